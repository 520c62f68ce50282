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

sys.path.insert(0, str(Path(__file__).resolve().parent))
import browsing

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
    if (path := browsing.browser_path()) is None:
        pytest.skip(f"no browser found ({', '.join(browsing.BROWSERS)}); name one in GRAFT_TEST_BROWSER")
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

    environment = serving.fill_place(browsed)
    checkout = os.environ.get("GRAFT_TEST_EDITOR")
    if checkout is None:
        running = serving.Server(browsed, *serving.named_front_end(), environment=environment)
    else:
        front_end = os.environ.get("GRAFT_TEST_FRONT_END", "")
        running = serving.RealServer(browsed, checkout, front_end, environment)
    yield running.address
    running.stop()


@pytest.fixture(scope="session")
def two_ways():
    """Whether the front end under test draws nodes in two ways."""
    return len(browsing.ways_to_draw()) == 2


@pytest.fixture(params=browsing.ways_to_draw())
def modern(request):
    """The ways to draw nodes, for tests that open pages of their own."""
    return request.param


@pytest.fixture(scope="module", params=browsing.ways_to_draw())
def page(request, browser, address):
    """One page for all of a file's tests of a way to draw nodes."""
    opened = browsing.Editor(browser, address, request.param)
    yield opened
    opened.page.close()


@pytest.fixture
def editor(page):
    """The open editor; the page must not have complained at the end of the test."""
    page.errors.clear()
    yield page
    page.page.evaluate("() => app.canvas.setGraph(app.rootGraph ?? app.graph)")
    assert not page.errors
