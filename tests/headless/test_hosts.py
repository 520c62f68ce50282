"""Which host is chosen, and what is said when it cannot be."""

import asyncio
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from graft_nodes.headless import hosts
from graft_nodes.headless.embedded import HostError
from graft_nodes.tests.headless.test_command import python_path


def checkout(folder, version="1.2.3"):
    for name in hosts.LANDMARKS:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("")
    (folder / "comfyui_version.py").write_text(f'__version__ = "{version}"\n')
    return folder


def test_the_command_line_comes_before_the_environment_and_that_before_the_place(tmp_path):
    named, other, around = (checkout(tmp_path / name) for name in ("named", "other", "around"))
    package = around / "custom_nodes" / "graft"
    package.mkdir(parents=True)
    environment = {"COMFYUI_PATH": str(other)}
    assert hosts.choose(str(named), False, environment, package).root == named
    assert hosts.choose(None, False, environment, package).root == other
    assert hosts.choose(None, False, {}, package).root == around
    assert hosts.choose(None, False, {"COMFYUI_PATH": ""}, tmp_path / "elsewhere" / "graft").root is None
    assert hosts.choose(str(named), True, environment, package).root is None
    assert "ComfyUI 1.2.3 at" in str(hosts.choose(str(named), False, {}, package))
    assert "embedded host" in str(hosts.choose(None, True, {}, package))


def test_a_link_into_custom_nodes_counts_as_installed(tmp_path):
    root, real = checkout(tmp_path / "comfy"), tmp_path / "graft"
    real.mkdir()
    (root / "custom_nodes").mkdir()
    link = root / "custom_nodes" / "graft"
    link.symlink_to(real)
    assert hosts.choose(None, False, {}, link).root == root
    assert hosts.choose(None, False, {}, real).root is None


@pytest.mark.parametrize("by", ["--comfyui", "COMFYUI_PATH"])
def test_a_named_folder_that_is_no_comfyui_is_an_error_not_ignored(tmp_path, by):
    (tmp_path / "nodes.py").write_text("")
    with pytest.raises(
        HostError, match=rf"named by {by}\) is not a ComfyUI: it has no comfy/model_management.py, execution.py"
    ):
        hosts.choose(str(tmp_path) if by == "--comfyui" else None, False, {"COMFYUI_PATH": str(tmp_path)})


def test_missing_requirements_are_listed(tmp_path):
    lines = [
        "numpy>=1",
        "# a comment",
        "no-such-package-a==1.0",
        "no-such-package-b[x]~=2 ; python_version>'3'",
        "",
        "",
    ]
    (tmp_path / "requirements.txt").write_text("\n".join(lines))
    assert hosts.missing_requirements(tmp_path) == ["no-such-package-a", "no-such-package-b"]


@pytest.mark.parametrize(
    ("command", "where", "wrong"),
    [
        ("doctor", "folder_paths.py", "OSError('Could not load this library: libnoise.so')"),
        ("run", "folder_paths.py", "RuntimeError('operator noise::hum does not exist')"),
        ("run", "comfy/options.py", "RuntimeError('operator noise::hum does not exist')"),
    ],
)
def test_a_package_that_does_not_fit_torch_is_named(tmp_path, command, where, wrong):
    root, installed = checkout(tmp_path / "comfy"), tmp_path / "site-packages"
    (root / "comfy" / "cli_args.py").write_text("class args:\n    cpu = front_end_root = base_directory = None\n")
    for name in ("comfy/options.py", "utils/extra_config.py"):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text("")
    (root / where).write_text("import noisemaker\n")
    (root / "requirements.txt").write_text("torch\nno-such-package>=2\n")
    (installed / "noisemaker").mkdir(parents=True)
    (installed / "noisemaker" / "__init__.py").write_text(f"raise {wrong}\n")
    described = installed / "noisemaker-2.10.0.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: noisemaker\nVersion: 2.10.0\n")
    (tmp_path / "workflow.json").write_text('{"1": {"class_type": "Nobody", "inputs": {}}}')
    arguments = [command, *(["workflow.json"] if command == "run" else []), "--comfyui", str(root)]
    done = subprocess.run(
        [sys.executable, "-m", "graft_nodes", *arguments],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": python_path(installed, os.environ)},
    )
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert wrong.split("'")[1] in done.stderr
    assert f"noisemaker 2.10.0 does not work here with torch {torch.__version__}" in done.stderr
    assert "install versions that fit together" in done.stderr
    if command == "doctor":
        assert "missing packages:\n  - no-such-package\n" in done.stdout and "\nnot ready: " in done.stdout


def test_the_other_packs_of_a_comfyui_are_loaded_behind_its_api_nodes():
    loaded = []

    def loading(what):
        async def load():
            loaded.append(what)

        return load

    nodes = SimpleNamespace(
        init_builtin_api_nodes=loading("api nodes"), init_external_custom_nodes=loading("custom nodes")
    )
    loop = asyncio.new_event_loop()
    hosts.load_other_packs(SimpleNamespace(loop=loop, nodes=nodes))
    loop.close()
    assert loaded == ["api nodes", "custom nodes"]
