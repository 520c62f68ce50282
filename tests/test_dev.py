"""What dev.py's commands start, and what they fetch."""

import sys
import zipfile
from importlib.util import find_spec

import pytest
from graft_nodes import dev


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], ["test"]),
        (["--quick"], ["test", "--quick"]),
        (["tests/storage", "-k", "host"], ["test", "tests/storage", "-k", "host"]),
        (["host", "-k", "lora"], ["host", "-k", "lora"]),
        (["browser"], ["browser"]),
    ],
)
def test_a_newer_torch_runs_the_tier_that_is_named(monkeypatch, arguments, expected):
    started = []
    monkeypatch.setattr(dev.subprocess, "call", lambda words, env: started.append((words[2:], env["GRAFT_TORCH"])))
    dev.newer_torch(arguments)
    assert started == [(expected, dev.NEWER_TORCH)]


def front_end_wheel(folder, version):
    """A wheel of a made-up version of ComfyUI's front end."""
    name = f"comfyui_frontend_package-{version}"
    entries = {
        "comfyui_frontend_package/__init__.py": "",
        "comfyui_frontend_package/static/index.html": f"<title>{version}</title>",
        f"{name}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: comfyui-frontend-package\nVersion: {version}\n",
        f"{name}.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = f"{name}.dist-info/RECORD"
    entries[record] = "".join(f"{entry},,\n" for entry in [*entries, record])
    with zipfile.ZipFile(folder / f"{name}-py3-none-any.whl", "w") as wheel:
        for entry, text in entries.items():
            wheel.writestr(entry, text)


def test_a_front_end_is_fetched_once_in_the_version_that_is_asked_for(monkeypatch, tmp_path):
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for version in ("9.8.7", "9.9.9"):
        front_end_wheel(wheels, version)
    monkeypatch.setattr(dev, "ROOT", tmp_path)
    monkeypatch.setattr(dev, "PYTHON", sys.executable)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    static = dev.front_end("9.8.7")
    assert (static / "index.html").read_text(encoding="utf-8") == "<title>9.8.7</title>"
    assert static.is_relative_to(tmp_path / "build")
    for wheel in wheels.iterdir():
        wheel.unlink()
    assert dev.front_end("9.8.7") == static  # from where it lies
    with pytest.raises(SystemExit):
        dev.front_end("9.9.9")


def test_everything_that_follows_from_declarations_is_written(monkeypatch):
    """Each tool is a module that can be run."""
    ran = []
    monkeypatch.setattr(dev, "install", lambda lock: None)
    monkeypatch.setattr(dev, "run", lambda *arguments: ran.append(arguments))
    dev.main(["write"])
    modules = [module for flag, module in ran if flag == "-m"]
    assert modules == [f"graft_nodes.{name}" for name in dev.WRITERS]
    for module in modules:
        assert (dev.ROOT / f"{module.removeprefix('graft_nodes.').replace('.', '/')}.py").is_file()
        assert find_spec(module) is not None
