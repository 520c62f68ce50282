"""The embedded host for type checkers: mypy takes a pack that is right, and says what is wrong with another."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from comfyui_api_stubs import MODULES
from comfyui_api_stubs.__main__ import main

RIGHT = Path(__file__).parent / "typed_packs" / "right.py"
WRONG = Path(__file__).parent / "typed_packs" / "wrong.py"
MISTAKE = "  # mypy: "  # behind it: the code of the error that mypy tells in this line


def python_files(folder):
    return {path.relative_to(folder): path.read_bytes() for path in Path(folder).rglob("*.py")}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The modules in a folder of their own."""
    folder = tmp_path_factory.mktemp("pack") / "comfy_types"
    assert main(["types", str(folder)]) == 0
    return folder


def run_mypy(written, pack, *options):
    """(line, code) of each error that mypy tells of a pack, in a folder of its own and without settings."""
    shutil.copy(pack, written.parent)
    environment = {"MYPYPATH": str(written)}
    command = [sys.executable, "-m", "mypy", "--config-file=", f"--cache-dir={written.parent / 'cache'}", *options]
    done = subprocess.run(
        [*command, pack.name], cwd=written.parent, env=environment, capture_output=True, text=True, check=False
    )
    errors = [line for line in done.stdout.splitlines() if ": error: " in line]
    assert done.stdout.splitlines()[-1:] and not done.stderr, done.stdout + done.stderr
    return [(line.split(": error: ")[0], line.rpartition("[")[2].rstrip("]")) for line in errors]


def test_every_module_is_written_and_written_again(written, tmp_path, capsys):
    assert python_files(written) == python_files(MODULES)
    (written / "old.py").write_text("", encoding="utf-8")
    assert main(["types", str(written)]) == 0
    assert capsys.readouterr().out.strip() == str(written)
    assert not (written / "old.py").exists() and (written / "comfy_api" / "latest" / "__init__.py").is_file()


def test_a_folder_with_something_else_is_refused_and_left_alone(tmp_path, capsys):
    (tmp_path / "mine.txt").write_text("mine", encoding="utf-8")
    assert main(["types", str(tmp_path)]) == 2
    assert "holds something else; name a new or an empty folder" in capsys.readouterr().err
    assert main(["types", str(tmp_path / "mine.txt")]) == 2
    assert "is a file; name a folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.slow
def test_mypy_takes_a_pack_that_is_right(written):
    assert run_mypy(written, RIGHT) == []


@pytest.mark.slow
def test_mypy_tells_the_mistakes_of_a_pack_and_none_of_the_hosts_own(written):
    lines = WRONG.read_text(encoding="utf-8").splitlines()
    expected = [
        (f"{WRONG.name}:{number}", line.partition(MISTAKE)[2])
        for number, line in enumerate(lines, 1)
        if MISTAKE in line
    ]
    assert len(expected) >= 8
    assert run_mypy(written, WRONG) == expected
