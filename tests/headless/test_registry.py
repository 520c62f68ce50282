"""What is sent to ComfyUI's registry, all that is tracked but for .comfyignore, runs; pyproject.toml says what the
registry expects.
"""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(
    "GRAFT_TEST_COMFYUI" in os.environ, reason="does not depend on the host; the embedded one has run it"
)


def listed(*options):
    done = subprocess.run(["git", "ls-files", "-z", *options], cwd=ROOT, capture_output=True, text=True, check=True)
    return {name for name in done.stdout.split("\0") if name}


def test_what_is_sent_holds_no_tests():
    ignored = listed("--cached", "--ignored", "--exclude-from=.comfyignore")
    assert all(name.startswith("comfyui_api_stubs/tests/") for name in ignored if name.startswith("comfyui_api_stubs/"))
    writers_and_pictures = ("docs/", "example_workflows/", "locales/")
    assert all(
        name.endswith((".py", ".png", ".svg", ".webp")) for name in ignored if name.startswith(writers_and_pictures)
    )
    folders = ("comfyui_api_stubs/", *writers_and_pictures)
    assert {name.partition("/")[0] for name in ignored if not name.startswith(folders)} == {
        ".ci",
        ".dockerignore",
        ".editorconfig",
        ".github",
        ".pre-commit-config.yaml",
        ".prettierignore",
        "CODE_OF_CONDUCT.md",
        "CONTRIBUTING.md",
        "Dockerfile",
        "benchmarks",
        "constraints.txt",
        "dev.py",
        "eslint.config.js",
        "mkdocs.yml",
        "package-lock.json",
        "package.json",
        "requirements",
        "tests",
    }


@pytest.fixture(scope="module")
def sent(tmp_path_factory):
    """The folder that the registry sends."""
    folder = tmp_path_factory.mktemp("sent") / "graft"
    for name in listed() - listed("--cached", "--ignored", "--exclude-from=.comfyignore"):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)
    return folder


def contents(folder):
    return {path.relative_to(folder): path.stat().st_mtime_ns for path in folder.rglob("*")}


@pytest.mark.parametrize("link", [False, True], ids=["folder", "link"])
@pytest.mark.parametrize("name", ["graft", "graft-nodes", "ComfyUI-Graft", "my Graft 1.0"])
def test_what_is_sent_runs_under_any_name_and_writes_nothing_into_its_folder(sent, tmp_path, name, link):
    place = tmp_path / "custom_nodes" / name
    place.parent.mkdir()
    if link:
        place.symlink_to(sent)
    else:
        shutil.copytree(sent, place)
    before = contents(place)
    graph = {
        "1": {"class_type": "GraftDemo", "inputs": {}},
        "2": {"class_type": "EmptyLatentImage", "inputs": {"width": 64, "height": 64, "batch_size": 1}},
        "3": {"class_type": "VAEDecode", "inputs": {"samples": ["2", 0], "vae": ["1", 2]}},
        "4": {"class_type": "SaveImage", "inputs": {"images": ["3", 0], "filename_prefix": "sent"}},
    }
    (tmp_path / "graph.json").write_text(json.dumps(graph))
    words = [sys.executable, "-B", "-I", f"custom_nodes/{name}", "run", "graph.json", "--embedded", "--cpu"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0 and list((tmp_path / "output").glob("sent*.png")), done.stdout + done.stderr
    assert contents(place) == before


def test_addresses_are_addresses_of_files_that_are_there():
    """The registry shows the icon, at most 800 x 400, and the banner, 21 to 9, from where they lie on the web."""
    said = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    names = "Icon|Banner|Repository|Documentation|Issues"
    addresses = dict(re.findall(rf'^({names}) = "(.*)"$', said, flags=re.MULTILINE))
    assert set(addresses) == set(names.split("|"))
    assert all(address.startswith("https://") for address in addresses.values())
    sizes = {}
    for name in ("Icon", "Banner"):
        path = addresses[name].removeprefix(
            addresses["Repository"].replace("github", "raw.githubusercontent") + "/main/"
        )
        with Image.open(ROOT / path) as picture:
            sizes[name] = picture.size
    assert sizes["Icon"] <= (800, 400) and sizes["Icon"][1] <= 400
    assert sizes["Banner"][0] * 9 == sizes["Banner"][1] * 21


def test_what_is_released_is_in_the_changelog_and_has_an_owner():
    release = runpy.run_path(str(ROOT / ".github" / "release.py"))
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    version = release["version"](project)
    changes = release["changes"]((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), version)
    assert changes and not re.search("^## ", changes, re.MULTILINE)
    with pytest.raises(ValueError, match=r"says nothing about 9\.9\.9"):
        release["changes"]("## 0.1.0\n\ntext", "9.9.9")
    assert release["changes"]("# x\n\n## 0.2.0\n\nnew\n\n## 0.1.0\n\nold\n", "0.2.0") == "new"
    owners = set(re.findall("OWNER", project))
    done = subprocess.run(
        [sys.executable, ROOT / ".github" / "release.py"], capture_output=True, text=True, check=False
    )
    assert not owners or (done.returncode == 1 and "in the place of OWNER" in done.stderr)
