"""Graft's developer commands, standard library only: `python dev.py demo`, `python dev.py test [pytest arguments]`, `python dev.py check`.

Each makes `.venv` beside this file if need be, installs Graft into it with the pinned constraints, and runs.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
PYTHON = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
WORKFLOW = ROOT / "example_workflows" / "train_and_sample.json"


def install(extras: str) -> None:
    """Make the virtual environment and install Graft with `extras`, once for each state of pyproject.toml and constraints.txt."""
    state = b"".join((ROOT / name).read_bytes() for name in ("pyproject.toml", "constraints.txt"))
    stamp = VENV / f"graft-{extras.replace(',', '-')}-{hashlib.sha256(state).hexdigest()[:16]}"
    if stamp.exists():
        return
    if not PYTHON.exists():
        print(f"dev.py: making {VENV}", flush=True)
        venv.create(VENV, with_pip=True)
    print(f"dev.py: installing graft-nodes[{extras}]", flush=True)
    run("-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", "constraints.txt", "-e", f".[{extras}]")
    stamp.touch()


def run(*arguments: str) -> None:
    """Run the environment's Python in the repository; leave with its exit status when that is not 0."""
    status = subprocess.call([str(PYTHON), *arguments], cwd=ROOT)
    if status:
        sys.exit(status)


def checkout() -> Path | None:
    """The ComfyUI checkout that COMFYUI_PATH names, else ~/ComfyUI, else None."""
    folder = Path(os.environ.get("COMFYUI_PATH") or Path.home() / "ComfyUI").expanduser()
    return folder if (folder / "comfy" / "sd.py").is_file() else None


def demo() -> None:
    """Train, average, apply and sample with the bundled tiny model on the embedded host; pictures land in output/."""
    install("standalone")
    start = time.monotonic()
    folders = ("--input", str(ROOT / "demo"), "--output", str(ROOT / "output"))
    run("-m", "graft_nodes", "run", str(WORKFLOW), "--embedded", *folders)
    run("-m", "graft_nodes.demo.compare", str(ROOT / "output"))
    print(f"dev.py: the demo took {time.monotonic() - start:.0f} s (installation not counted)")


def test(arguments: list[str]) -> None:
    """Run pytest on the embedded host, and with a real ComfyUI when a checkout is found."""
    install("standalone,test" if checkout() is None else "standalone,test,comfyui")
    run("-m", "pytest", *arguments)


def check() -> None:
    """Run the linter and the type checker."""
    install("standalone,test")
    run("-m", "ruff", "check", ".")
    run("-m", "mypy")


def main(arguments: list[str]) -> None:
    """Run the named command."""
    if arguments[:1] == ["demo"] and len(arguments) == 1:
        demo()
    elif arguments[:1] == ["test"]:
        test(arguments[1:])
    elif arguments == ["check"]:
        check()
    else:
        sys.exit("usage: python dev.py demo | test [pytest arguments] | check")


if __name__ == "__main__":
    main(sys.argv[1:])
