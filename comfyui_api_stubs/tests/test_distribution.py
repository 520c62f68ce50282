"""comfyui-api-stubs as a distribution: the wheel is built, and works alone; its pytest plugin loads packs, checks nodes
and runs workflows.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

ROOT = Path(__file__).resolve().parents[2]
FOLDER = "comfyui_api_stubs"
BUILD = "import sys, setuptools.build_meta as build; print(build.build_wheel(sys.argv[1]))"
ALONE = """
import sys
sys.modules["graft_nodes"] = None
import comfyui_api_stubs
assert comfyui_api_stubs.install()
import comfy.comfy_types, comfy_api.v0_0_2, execution, folder_paths, nodes
from comfy_api.latest import IO, UI, io
assert IO is io and IO.Autogrow and UI.PreviewMask
print(comfyui_api_stubs.__file__)
"""


def tracked():
    listed = subprocess.run(["git", "ls-files", "-z", FOLDER], cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in listed.stdout.strip("\0").split("\0") if (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from what is tracked alone."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in tracked():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, source / name)
    command = [sys.executable, "-c", BUILD, str(out)]
    done = subprocess.run(command, cwd=source / FOLDER, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return out / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def site(wheel, tmp_path_factory):
    """A folder with the wheel installed in it, and nothing else."""
    site = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--target", str(site), str(wheel)], check=True, capture_output=True)
    return site


@pytest.fixture
def run_pytest(pytester, monkeypatch, site):
    """pytest in a process and a folder of its own, with the wheel; the plugin is found by its entry point."""
    monkeypatch.setenv("PYTHONPATH", str(site))
    pytester.makeini("[pytest]")
    return pytester.runpytest_subprocess


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
        metadata = [name for name in archive.namelist() if ".dist-info/" in name]
    own = [name for name in tracked() if not name.startswith(f"{FOLDER}/tests/")]
    assert sorted(names) == sorted(name for name in own if name.endswith((".py", "py.typed")))
    assert any(name.endswith("licenses/LICENSE") for name in metadata)


def test_the_wheel_works_without_graft(site, tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(
        [sys.executable, "-c", ALONE], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(site))


PACK = """
from comfy_api.latest import ComfyExtension, io
import folder_paths


class Double(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema("Double", inputs=[io.Int.Input("value", default=1)], outputs=[io.Int.Output()])

    @classmethod
    def execute(cls, value):
        return io.NodeOutput(2 * value)


class Wrong:
    RETURN_TYPES, RETURN_NAMES, FUNCTION, CATEGORY = ("INT",), ("a", "b"), "run", "test"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"value": ("INT", {"default": 9, "max": 5})}, "optinal": {}}

    def run(self, other):
        return (other,)


class Show(Wrong):
    RETURN_TYPES, RETURN_NAMES, OUTPUT_NODE = (), (), True

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"value": ("INT", {"default": 0})}}

    def run(self, value):
        if value > 10:
            raise ValueError("too much")
        return {"ui": {"text": [str(value)]}}


NODE_CLASS_MAPPINGS = dict(Double=Double, Wrong=Wrong, Show=Show)
"""


def workflow(value, shown="Show"):
    return {
        "1": {"class_type": "Double", "inputs": {"value": value}},
        "2": {"class_type": shown, "inputs": {"value": ["1", 0]}},
    }


def files_needed():
    load = {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": "big.safetensors"}}
    encode = {"class_type": "CLIPTextEncode", "inputs": {"text": "", "clip": ["1", 1]}}
    empty = {"class_type": "EmptyLatentImage", "inputs": {"width": 64, "height": 64, "batch_size": 1}}
    decode = {"class_type": "VAEDecode", "inputs": {"samples": ["3", 0], "vae": ["1", 2]}}
    return {
        "1": load,
        "2": encode,
        "3": empty,
        "4": decode,
        "5": {"class_type": "PreviewImage", "inputs": {"images": ["4", 0]}},
    }


def grouped():
    """A workflow of the editor: a group node that holds Double and Show."""
    show = {"type": "Show", "inputs": [{"name": "value", "type": "INT", "widget": {"name": "value"}}]}
    group = {"nodes": [{"type": "Double"}, show], "links": [[0, 0, 1, 0, 1, "INT"]]}
    node = {"id": 1, "type": "workflow>both", "widgets_values": [4]}
    return {"nodes": [node], "links": [], "extra": {"groupNodes": {"both": group}}}


def test_a_pack_is_loaded_checked_and_its_workflows_run(pytester, run_pytest):
    pack = pytester.path / "pack"
    (pack / "workflows").mkdir(parents=True)
    (pack / "__init__.py").write_text(PACK, encoding="utf-8")
    files = {"good": workflow(4), "fails": workflow(6), "other": workflow(1, "NotHere"), "files": files_needed()}
    files["grouped"] = grouped()
    for name, data in files.items():
        (pack / "workflows" / f"{name}.json").write_text(json.dumps(data), encoding="utf-8")
    (pack / "package.json").write_text('{"name": "no workflow"}', encoding="utf-8")
    (pytester.path / "test_own.py").write_text(
        "def test_run(comfy_pack):\n"
        f"    assert comfy_pack.run({workflow(3)!r})['2'] == {{'text': ['6']}}\n"
        "    assert list(comfy_pack.nodes) == ['Double', 'Wrong', 'Show']\n",
        encoding="utf-8",
    )
    result = run_pytest("--comfy-pack=pack", "test_own.py", "-rA")
    result.assert_outcomes(passed=6, failed=2, skipped=2)
    text = result.stdout.str()
    assert "RETURN_NAMES has 2 entries for 1 outputs" in text and "its default 9 is above its max 5" in text
    assert "INPUT_TYPES has 'optinal'" in text and "run takes no value, which INPUT_TYPES has" in text
    assert "node 2 (Show): ValueError: too much" in text
    assert "other.json: neither the pack nor the embedded host has NotHere" in text
    assert "files.json: it needs big.safetensors" in text and "collected 10 items" in text
    failures = text.split("short test summary")[0]  # which repeats whole messages where CI is set
    assert "modules/execution.py" not in text and failures.count("raise ValueError") == 1  # the pack's own stack, once
    for name in ("pack::loads", "node::Double", "workflow::workflows/good.json", "workflow::workflows/grouped.json"):
        assert f"{name}" in text


def test_a_pack_that_does_not_load_is_told_with_its_stack(pytester, run_pytest):
    (pytester.path / "pack.py").write_text("import no_such_package\n", encoding="utf-8")
    result = run_pytest("--comfy-pack=pack.py")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "pack.py does not load: ModuleNotFoundError*. Install what the pack requires; no_such_package is not*",
            "*line 1*",
        ]
    )


V3 = """
from comfy_api.latest import ComfyExtension, io

class Wrong(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema("Wrong", inputs=[io.Imige.Input("picture")])

    @classmethod
    def execute(cls, picture):
        return None

class Extension(ComfyExtension):
    async def get_node_list(self):
        return [Wrong]

async def comfy_entrypoint():
    return Extension()
"""


@pytest.mark.parametrize(
    ("source", "told"),
    [
        (
            V3,
            "class Wrong: AttributeError: comfy_api.latest.io has no 'Imige'; it has Image, and io.Custom('IMIGE')",
        ),
        ("import comfy.ldm.flux", "'comfy.ldm.flux'. The embedded host does not have it"),
    ],
)
def test_why_a_pack_does_not_load_names_the_node_and_what_to_do(pytester, run_pytest, source, told):
    (pytester.path / "pack.py").write_text(source, encoding="utf-8")
    result = run_pytest("--comfy-pack=pack.py", "-k", "loads")
    result.assert_outcomes(failed=1)
    first = next(line for line in result.stdout.lines if line.startswith("pack.py does not load: "))
    assert told in first
    assert "comfyui_api_stubs/modules" not in result.stdout.str().partition("short test summary")[0]


def test_workflows_that_are_broken_are_told(pytester, run_pytest):
    pack = pytester.path / "pack"
    (pack / "example_workflows").mkdir(parents=True)
    (pack / "__init__.py").write_text(PACK, encoding="utf-8")
    (pack / "settings.json").write_text("{ // no workflow, and no JSON", encoding="utf-8")
    (pack / "example_workflows" / "cut.json").write_text('{"1": {', encoding="utf-8")
    (pack / "example_workflows" / "near.json").write_text(json.dumps(workflow(1, "Shov")), encoding="utf-8")
    alone = {"1": workflow(1)["1"]}
    (pack / "example_workflows" / "alone.json").write_text(json.dumps(alone), encoding="utf-8")
    result = run_pytest("--comfy-pack=pack", "-k", "workflow", "-rs")
    result.assert_outcomes(failed=2, skipped=1)
    text = result.stdout.str()
    assert "it is not JSON (" in text and "; export it again from ComfyUI" in text
    assert "Prompt has no outputs: end it with a node that shows or saves something" in text
    assert "near.json: neither the pack nor the embedded host has Shov; the pack has Show" in text


def test_a_pack_that_is_not_there_is_refused(run_pytest):
    result = run_pytest("--comfy-pack=nowhere")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--comfy-pack: there is no *nowhere*"])
