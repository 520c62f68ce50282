"""A running editor with a front end of a few files."""

import importlib.util

import pytest

from comfyui_api_stubs.tests.editor import serving
from comfyui_api_stubs.tests.which_host import REAL

if importlib.util.find_spec("aiohttp") is None or REAL:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """A server that runs for the whole session: see serving.Server."""
    place = tmp_path_factory.mktemp("editor")
    (place / "input").mkdir()
    (place / "models" / "loras").mkdir(parents=True)
    running = serving.Server(place, "--front-end-root", str(serving.front_end(place / "front")))
    yield running
    assert running.stop() == 0, "\n".join(running.lines)
