"""Runs ComfyUI's own execution tests on the embedded host, unchanged: `python dev.py execution-tests CHECKOUT …`.

The tests start `python main.py` in the folder of ComfyUI and talk to it as a browser does. They run in a temporary
folder with a copy of the checkout's tests and a main.py that starts Graft's editor server with the checkout's testing
nodes as a pack; the folder is deleted at the end.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from graft_nodes.headless import command, embedded

REPOSITORY = "https://github.com/comfyanonymous/ComfyUI"
CLIENT = Path(__file__).parent / "execution_tests.txt"  # the tests' websocket client, locked
TESTS = "tests/execution"
UNIT_TESTS = "tests-unit/execution_test"
PACKS = f"{TESTS}/testing_nodes"
# What does not run here, and why; docs/headless.md tells it too.
LEFT_OUT = {
    "test_jobs.py": "unit tests of comfy_execution.jobs, a module that the embedded host has no counterpart of: its job"
    " list is comfyui_api_stubs/editor/jobs.py, and test_execution.py asks for it over HTTP",
    "test_preview_method.py": "samples with SDXL's weights on a server that runs already; the same is tested with small"
    " models in comfyui_api_stubs/tests/editor/test_events.py",
    "test_cache_provider.py": "unit tests of caches that other packs plug in (comfy_execution.cache_provider); the"
    " embedded host keeps results in the four ways that its options name, and in no other",
    "test_enrich_output.py": "unit tests of comfy_execution.asset_enrichment, which adds the ids of ComfyUI's asset"
    " database to outputs; the embedded host has no such database",
}
MAIN = """import sys
from graft_nodes.tests.with_comfyui.execution_tests import serve
sys.exit(serve(sys.argv[1:]))
"""


def serve(arguments: list[str]) -> int:
    """What main.py of a ComfyUI does, with its options: serve the editor with the testing nodes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output-directory")
    parser.add_argument("--extra-model-paths-config")  # names the folder of the testing nodes
    options, rest = parser.parse_known_args(arguments)
    packs = sorted(path for path in Path(PACKS).iterdir() if (path / "__init__.py").is_file())
    words = ["editor", "--no-browser", "--output", options.output_directory, *rest]
    for pack in packs:
        words += ["--pack", str(pack)]
    return command.main(words)


def fetched(checkout: str, folder: Path) -> Path:
    """The folder of a checkout: the one named, or that of a version such as v0.33.0, which is fetched."""
    named = Path(checkout).expanduser()
    if (named / TESTS).is_dir():
        return named
    if named.exists() or not checkout.startswith("v"):
        sys.exit(f"{checkout} is neither the folder of a ComfyUI with its tests nor a version such as v0.33.0")
    target = folder / "fetched"
    words = ("git", "clone", "--quiet", "--depth", "1", "--branch", checkout, REPOSITORY, str(target))
    if subprocess.call(words):
        sys.exit(f"{checkout} could not be fetched from {REPOSITORY}; name the folder of a checkout instead")
    return target


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return listening.getsockname()[1]


def websocket_client(folder: Path) -> str:
    """Install the tests' websocket client into a folder; returns the folder."""
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps")
    subprocess.check_call([*pip, "--require-hashes", "--target", str(folder / "client"), "-r", str(CLIENT)])
    return str(folder / "client")


def run_tests(checkout: str, more: list[str]) -> int:
    """Run one checkout's tests; returns pytest's exit status."""
    with tempfile.TemporaryDirectory(prefix="graft-execution-tests-") as name:
        folder = Path(name)
        root, source = folder / "ComfyUI", fetched(checkout, folder)
        shutil.copytree(source / "tests", root / "tests")
        if (source / UNIT_TESTS).is_dir():
            shutil.copytree(source / UNIT_TESTS, root / UNIT_TESTS)
        (root / "main.py").write_text(MAIN, encoding="utf-8")
        (root / "pytest.ini").write_text("[pytest]\nmarkers =\n  execution\n  inference\n", encoding="utf-8")
        paths = (str(root), embedded.MODULES, websocket_client(folder), os.environ.get("PYTHONPATH", ""))
        programs = (str(Path(sys.executable).parent), os.environ["PATH"])
        environment = {"PYTHONPATH": os.pathsep.join(paths).rstrip(os.pathsep), "PATH": os.pathsep.join(programs)}
        words = ["-p", "no:cacheprovider", "--output_dir", str(folder / "output"), "--port", str(free_port())]
        tests = [path for path in (TESTS, UNIT_TESTS) if (root / path).is_dir()]
        for path in tests:
            for file in sorted(LEFT_OUT.keys() & {entry.name for entry in (root / path).iterdir()}):
                print(f"left out: {path}/{file}: {LEFT_OUT[file]}", flush=True)
                words.append(f"--ignore={path}/{file}")
        arguments = [sys.executable, "-m", "pytest", "-q", *tests, *words, *more]
        return subprocess.call(arguments, cwd=root, env={**os.environ, **environment})


def main(arguments: list[str]) -> int:
    """Run the tests of each checkout; arguments from the first one with a dash on are pytest's."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkouts", nargs="+", metavar="CHECKOUT", help="a folder, or a version such as v0.33.0")
    options, more = parser.parse_known_args(arguments)
    failed = 0
    for checkout in options.checkouts:
        print(f"ComfyUI's execution tests of {checkout}", flush=True)
        failed += run_tests(checkout, more) != 0
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
