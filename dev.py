"""Graft's developer commands, standard library only (Python 3.11 or newer):

python dev.py demo                      train, average, apply and sample with the bundled tiny model python dev.py test
[pytest arguments]   run the tests python dev.py check                     linter, type checker, known vulnerabilities
of what is installed for development python dev.py fuzz [TARGET …] [--cases N] [--seed S]    a night's fuzzing, or part
of it; a failure prints the command that replays it python dev.py soak [--minutes N]        two hours of work on the
editor's server, or N minutes: nothing may grow python dev.py lock                      write requirements/*.txt anew
from pyproject.toml and constraints.txt

Each makes `.venv` beside this file if need be and installs what it needs: every package by the hash in
requirements/*.txt, then torch, the one whose build depends on the machine, by its version in constraints.txt, then
Graft itself.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
PYTHON = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
WORKFLOW = ROOT / "example_workflows" / "train_and_sample.json"
# requirements/NAME.txt -> the extras of pyproject.toml that it holds.
LOCKS = {"demo": ("standalone",), "develop": ("standalone", "test", "comfyui", "benchmarks")}
# torch's own builds differ by machine (CPU, CUDA, ROCm), and these come along with some of them.
UNLOCKED = ("torch", "triton")
UNLOCKED_FAMILIES = ("nvidia-", "cuda-")


def install(lock: str) -> None:
    """Make the virtual environment and install Graft with what `lock` names, once for each state of the files that say
    so.
    """
    named = ("pyproject.toml", "constraints.txt", f"requirements/{lock}.txt")
    state = hashlib.sha256(b"".join((ROOT / name).read_bytes() for name in named)).hexdigest()[:16]
    stamp = VENV / f"graft-{lock}-{state}"
    if stamp.exists():
        return
    if not PYTHON.exists():
        print(f"dev.py: making {VENV}", flush=True)
        venv.create(VENV, with_pip=True)
    print(f"dev.py: installing requirements/{lock}.txt, torch and Graft", flush=True)
    pip = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    run(*pip, "--require-hashes", "--no-deps", "-r", f"requirements/{lock}.txt")
    run(*pip, "-c", "constraints.txt", "torch")
    run(*pip, "--no-deps", "--no-build-isolation", "-e", ".")
    stamp.touch()


def run(*arguments: str) -> None:
    """Run the environment's Python in the repository; leave with its exit status when that is not 0."""
    status = subprocess.call([str(PYTHON), *arguments], cwd=ROOT)
    if status:
        sys.exit(status)


def demo() -> None:
    """Train, average, apply and sample with the bundled tiny model on the embedded host; pictures land in output/."""
    install("demo")
    start = time.monotonic()
    folders = ("--input", str(ROOT / "demo"), "--output", str(ROOT / "output"))
    run("-m", "graft_nodes", "run", str(WORKFLOW), "--embedded", *folders)
    run("-m", "graft_nodes.demo.compare", str(ROOT / "output"))
    print(f"dev.py: the demo took {time.monotonic() - start:.0f} s (installation not counted)")


def test(arguments: list[str]) -> None:
    """Run pytest: on the embedded host, and beside it with a real ComfyUI when COMFYUI_PATH or ~/ComfyUI names a
    checkout.
    """
    install("develop")
    if arguments:
        run("-m", "pytest", *arguments)
        return
    command = [str(PYTHON), "-m", "pytest"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GRAFT_TEST_THREADS": "1"}  # two at a time
    with tempfile.TemporaryFile() as heard:
        real = subprocess.Popen(
            [*command, "tests/with_comfyui", "-s"], cwd=ROOT, env=environment, stdout=heard, stderr=heard
        )
        try:
            embedded = subprocess.call([*command, "--ignore=tests/with_comfyui"], cwd=ROOT, env=environment)
            print("dev.py: on the embedded host that was all; the tests with a real ComfyUI:", flush=True)
            real.wait()
        finally:
            real.terminate()
        heard.seek(0)
        print(heard.read().decode(errors="replace"), flush=True)
    if embedded or real.returncode:
        sys.exit(embedded or real.returncode)


def check() -> None:
    """Run the linter and the type checker, and look for known vulnerabilities."""
    install("develop")
    run("-m", "ruff", "check", ".")
    run("-m", "mypy")
    audit()


def audit() -> None:
    """Leave with an error when a locked package has a known vulnerability; say so when the data cannot be reached."""
    command = (
        "-m",
        "pip_audit",
        "-r",
        "requirements/develop.txt",
        "--disable-pip",
        "--no-deps",
        "--progress-spinner",
        "off",
        "-f",
        "json",
    )
    done = subprocess.run([str(PYTHON), *command], cwd=ROOT, capture_output=True, text=True, check=False)
    found = json.loads(done.stdout)["dependencies"] if done.stdout.startswith("{") else []
    seen = [one for one in found if "vulns" in one]
    faulty = [
        f"{one['name']} {one['version']}: {', '.join(v['id'] for v in one['vulns'])}" for one in seen if one["vulns"]
    ]
    if faulty:
        sys.exit("dev.py: known vulnerabilities:\n" + "\n".join(faulty))
    if not seen:
        reason = (
            "it finds none of the packages there"
            if found
            else (done.stderr.strip().splitlines() or ["no output"])[-1][:200]
        )
        print(f"dev.py: known vulnerabilities were NOT looked for: pip-audit cannot reach its data here ({reason})")
    else:
        print(
            f"dev.py: no known vulnerability in {len(seen)} of {len(found)} locked packages (the others are not in the"
            " data)"
        )


def lock() -> None:
    """Resolve pyproject.toml within constraints.txt for Python 3.11 and newer on every platform, and write the hashes
    down.
    """
    install("develop")
    for name, extras in LOCKS.items():
        wanted = [word for extra in extras for word in ("--extra", extra)]
        command = (
            "-m",
            "uv",
            "pip",
            "compile",
            "pyproject.toml",
            "-c",
            "constraints.txt",
            *wanted,
            "--group",
            "build",
            "--universal",
        )
        form = ("--python-version", "3.11", "--generate-hashes", "--no-annotate", "--no-header", "--quiet")
        done = subprocess.run([str(PYTHON), *command, *form], cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(done.stderr)
        (ROOT / "requirements" / f"{name}.txt").write_text(HEAD + locked(done.stdout), encoding="utf-8")


HEAD = (
    "# Written by `python dev.py lock` from pyproject.toml and constraints.txt. torch is left out: its build depends on"
    " the machine.\n"
)


def locked(resolved: str) -> str:
    """A resolution without torch and what comes along with it."""
    kept, keep = [], True
    for line in resolved.splitlines():
        if line and not line[0].isspace():
            name = line.partition("==")[0]
            keep = name not in UNLOCKED and not name.startswith(UNLOCKED_FAMILIES) and not line.startswith("#")
        if keep:
            kept.append(line)
    return "\n".join(kept) + "\n"


NIGHTLY = {"fuzz": "graft_nodes.tests.fuzz", "soak": "graft_nodes.tests.faults.soak"}


def nightly(name: str, arguments: list[str]) -> None:
    """Run what takes hours; --help lists its options."""
    install("develop")
    run("-m", NIGHTLY[name], *arguments)


def main(arguments: list[str]) -> None:
    """Run the named command."""
    if sys.version_info < (3, 11):
        sys.exit(
            f"dev.py needs Python 3.11 or newer, and this is {sys.version.split()[0]} (inside ComfyUI, Graft runs on"
            " 3.10 too)"
        )
    commands = {"demo": demo, "check": check, "lock": lock}
    if arguments[:1] == ["test"]:
        test(arguments[1:])
    elif arguments and arguments[0] in NIGHTLY:
        nightly(arguments[0], arguments[1:])
    elif len(arguments) == 1 and arguments[0] in commands:
        commands[arguments[0]]()
    else:
        sys.exit("usage: python dev.py demo | test [pytest arguments] | check | fuzz [options] | soak [options] | lock")


if __name__ == "__main__":
    main(sys.argv[1:])
