"""`doctor` on a copy of the checkout that has not run yet: it makes nothing in it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[2]
MADE = ("input", "output", "temp", "user", "models", "custom_nodes", ".git", "__pycache__")
DOCTOR = """
import sys
sys.path.insert(0, sys.argv[1])
import open_comfyui
open_comfyui.stand_in_for_missing()
from graft_nodes.__main__ import main
sys.exit(main(["doctor", "--comfyui", sys.argv[2], "--cpu"]))
"""


def test_doctor_creates_nothing_in_a_comfyui(tmp_path):
    """ComfyUI makes `input` and `user` as soon as it is imported, and Load 3D makes `input/3d`."""
    checkout, place = tmp_path / "ComfyUI", tmp_path / "place"
    checkout.mkdir()
    place.mkdir()
    for entry in Path(os.environ["GRAFT_TEST_COMFYUI"]).iterdir():
        if entry.is_dir() and entry.name not in MADE:
            (checkout / entry.name).symlink_to(entry, target_is_directory=True)
        elif entry.is_file():
            shutil.copy(entry, checkout)
    before = [sorted(folder.rglob("*")) for folder in (checkout, place)]
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    words = [sys.executable, "-c", DOCTOR, str(TESTS / "with_comfyui"), str(checkout)]
    environment = {**os.environ, "TMPDIR": str(scratch), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(words, cwd=place, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0 and done.stdout.rstrip().endswith("ready"), done.stdout + done.stderr
    assert f"input: {checkout / 'input'}\n" in done.stdout and f"output: {checkout / 'output'}\n" in done.stdout
    assert [sorted(folder.rglob("*")) for folder in (checkout, place)] == before
    assert not list(scratch.glob("graft-doctor-*"))
