"""Running editors: one server with a front end of a few files, and one with ComfyUI's real front end open in a real
browser.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

if importlib.util.find_spec("aiohttp") is None or "GRAFT_TEST_COMFYUI" in os.environ:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """A server that runs for the whole session: see serving.Server."""
    import serving

    place = tmp_path_factory.mktemp("editor")
    (place / "input").mkdir()
    (place / "models" / "loras").mkdir(parents=True)
    running = serving.Server(place, "--front-end-root", str(serving.front_end(place / "front")))
    yield running
    assert running.stop() == 0, "\n".join(running.lines)


@pytest.fixture(scope="module")
def browser():
    """Chromium without a window; of one file's tests, as an event loop runs in this thread while it is open."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed: pip install playwright"
    )
    from browsing import BROWSERS, browser_path

    if (path := browser_path()) is None:
        pytest.skip(f"no browser found ({', '.join(BROWSERS)}); name one in GRAFT_TEST_BROWSER")
    with playwright.sync_playwright() as running:
        opened = running.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-background-networking"])
        yield opened
        opened.close()


@pytest.fixture(scope="session")
def browsed(tmp_path_factory):
    """The folder that the server of `address` works in."""
    return tmp_path_factory.mktemp("browsed")


@pytest.fixture
def place(browsed):
    """The folder that a test's server works in: that of `address`, where a file has no server of its own."""
    return browsed


@pytest.fixture(scope="module", autouse=True)
def no_demo_files(browsed):
    """Takes away what a file's workflows have put into place: the next file counts on the LoRAs of `address` alone."""
    yield
    shutil.rmtree(browsed / "models" / "loras" / "graft_demo", ignore_errors=True)


@pytest.fixture(scope="session")
def address(browsed):
    """A server with the real front end: the embedded host's, or that of the ComfyUI checkout that GRAFT_TEST_EDITOR
    names. GRAFT_TEST_FRONT_END names the folder of a front end to use in place of the installed one.
    """
    import serving

    (browsed / "models" / "loras").mkdir(parents=True)
    (browsed / "input").mkdir()
    for folder in ("concept", "regular"):
        shutil.copytree(HERE.parents[1] / "demo" / folder, browsed / "input" / folder)
    serving.lora(browsed / "models" / "loras" / "zorp.safetensors")
    checkout = os.environ.get("GRAFT_TEST_EDITOR")
    if checkout is None:
        running = serving.Server(browsed, *serving.named_front_end())
    else:
        running = serving.RealServer(browsed, checkout, os.environ.get("GRAFT_TEST_FRONT_END", ""))
    yield running.address
    running.stop()


def ways_to_draw():
    """Classic, and Nodes 2.0 where the front end under test offers it: older ones (1.27) hide it, and draw no pack's
    widgets in it.
    """
    named = os.environ.get("GRAFT_TEST_FRONT_END")
    package = importlib.util.find_spec("comfyui_frontend_package")
    found = (
        Path(named).expanduser()
        if named
        else package and Path(next(iter(package.submodule_search_locations))) / "static"
    )
    scripts = sorted((found / "assets").glob("*.js"), key=lambda path: -path.stat().st_size) if found else []
    offered = not scripts or any(b"Nodes 2.0" in path.read_bytes() for path in scripts)
    return [pytest.param(False, id="classic"), *([pytest.param(True, id="nodes2")] if offered else [])]


@pytest.fixture(scope="module", params=ways_to_draw())
def page(request, browser, address):
    """One page for all of a file's tests of a way to draw nodes."""
    from browsing import Editor

    opened = Editor(browser, address, request.param)
    yield opened
    opened.page.close()


@pytest.fixture
def editor(page):
    """The open editor; the page must not have complained at the end of the test."""
    page.errors.clear()
    yield page
    page.page.evaluate("() => app.canvas.setGraph(app.rootGraph ?? app.graph)")
    assert not page.errors
