"""The wheel and the sdist hold what Graft needs to run and nothing else, and an installed wheel runs without the
checkout.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = (
    "storage",
    "nodes",
    "host",
    "patches",
    "ema",
    "settings",
    "training",
    "headless",
    "demo",
    "comfyui_api_stubs",
    "web",
    "locales",
    "subgraphs",
    "example_workflows",
)
# dev.py is of use in a checkout only, and for setuptools a module like any beside __init__.py.
FILES = {"__init__.py", "__main__.py", "icon.svg", "dev.py"}
# comfyui_api_stubs is a distribution of its own as well: this is that one's.
OTHERS = {f"comfyui_api_stubs/{name}" for name in ("pyproject.toml", "README.md", "LICENSE")}
OTHER_TESTS = "comfyui_api_stubs/tests/"
BUILD = "import sys, setuptools.build_meta as build; print(getattr(build, sys.argv[1])(sys.argv[2]))"
GRAPH = {
    "1": {"class_type": "GraftDemo", "inputs": {}},
    "2": {"class_type": "CLIPTextEncode", "inputs": {"text": "a red square", "clip": ["1", 1]}},
    "3": {"class_type": "EmptyLatentImage", "inputs": {"width": 128, "height": 128, "batch_size": 1}},
    "4": {
        "class_type": "ApplyToDo",
        "inputs": {
            "model": ["1", 0],
            "factor": 2.0,
            "max_depth": 1,
            "depth_factors": "",
            "method": "nearest-exact",
            "start_percent": 0.0,
            "end_percent": 1.0,
            "phase": "both",
            "disable_after": 0.0,
        },
    },
    "5": {
        "class_type": "KSampler",
        "inputs": {
            "model": ["4", 0],
            "positive": ["2", 0],
            "negative": ["2", 0],
            "latent_image": ["3", 0],
            "seed": 0,
            "steps": 1,
            "cfg": 1.0,
            "sampler_name": "euler",
            "scheduler": "normal",
            "denoise": 1.0,
        },
    },
    "6": {"class_type": "VAEDecode", "inputs": {"samples": ["5", 0], "vae": ["1", 2]}},
    "7": {"class_type": "SaveImage", "inputs": {"images": ["6", 0], "filename_prefix": "wheel"}},
}


def _tracked() -> list[str]:
    return (
        subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
        .stdout.strip("\0")
        .split("\0")
    )


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The wheel and the sdist, built from what is tracked alone."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in _tracked():
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, source / name)
    made = []
    for hook in ("build_wheel", "build_sdist"):
        done = subprocess.run(
            [sys.executable, "-c", BUILD, hook, str(out)], cwd=source, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
        made.append(out / done.stdout.splitlines()[-1])
    return made


def test_the_wheel_holds_what_runs_and_nothing_else(built):
    names = {
        name.removeprefix("graft_nodes/") for name in zipfile.ZipFile(built[0]).namelist() if ".dist-info/" not in name
    }
    wanted = {
        name for name in _tracked() if (name in FILES or name.partition("/")[0] in FOLDERS) and (ROOT / name).is_file()
    }
    assert names == {name for name in wanted - OTHERS if not name.startswith(OTHER_TESTS)}


def test_the_sdist_holds_what_the_wheel_is_built_from(built):
    with tarfile.open(built[1]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames() if not archive.getmember(name).isdir()}
    wheel = {
        name.removeprefix("graft_nodes/") for name in zipfile.ZipFile(built[0]).namelist() if ".dist-info/" not in name
    }
    assert wheel | {"pyproject.toml", "LICENSE", "README.md"} <= names
    assert not [name for name in names if name.startswith((".ci", ".git", "output", "temp"))]


def test_an_installed_wheel_runs_a_workflow_without_the_checkout(built, tmp_path):
    site, work = tmp_path / "site", tmp_path / "work"
    work.mkdir()
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--target", str(site), str(built[0])], check=True, capture_output=True)
    (work / "graph.json").write_text(json.dumps(GRAPH), encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(site)}
    environment.pop("COMFYUI_PATH", None)

    def run(*arguments):
        return subprocess.run(
            [sys.executable, *arguments], cwd=work, env=environment, capture_output=True, text=True, check=False
        )

    where = run("-c", "import graft_nodes; print(graft_nodes.__file__)")
    assert where.stdout.startswith(str(site)), where.stdout + where.stderr
    done = run("-m", "graft_nodes", "run", "graph.json", "--embedded", "--output", str(work / "output"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert list((work / "output").glob("wheel*.png"))


@pytest.mark.parametrize("name", ["demo", "develop"])
def test_every_locked_package_has_its_hashes_and_the_version_of_the_constraints(name):
    entries = re.split(r"\n(?=\S)", (ROOT / "requirements" / f"{name}.txt").read_text(encoding="utf-8"))
    locked = {match[1]: (match[2], entry) for entry in entries if (match := re.match(r"([a-z0-9_.-]+)==(\S+)", entry))}
    assert len(locked) >= 15
    assert all(re.search(r"--hash=sha256:[0-9a-f]{64}", entry) for _, entry in locked.values())
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").split()
    wanted = dict(line.split("==") for line in lines if "==" in line and not line.startswith(("torch==", "#")))
    assert {package: version for package, (version, _) in locked.items() if package in wanted}.items() <= wanted.items()
    if name == "develop":
        assert wanted.keys() <= locked.keys()
