"""Keeps checks/ out of an ordinary run: they need a real ComfyUI, which test_real_comfyui.py starts in a process of its
own. For the tests in a browser it starts the real ComfyUI's own server.

GRAFT_TEST_FRONT_END names the folder of a front end to use in place of the installed one.
"""

import os
import sys
import urllib.request
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "editor"))
sys.path.insert(0, str(Path(__file__).resolve().parent))
import browsing

collect_ignore = [] if "GRAFT_TEST_COMFYUI" in os.environ else ["checks"]
if "GRAFT_TEST_COMFYUI" in os.environ:
    collect_ignore += ["test_errors.py", "test_first_lora.py", "test_real_comfyui.py", "test_templates.py"]


@pytest.fixture(scope="module")
def browser():
    """Chromium without a window."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if (path := browsing.browser_path()) is None:
        pytest.skip("no browser found; name one in GRAFT_TEST_BROWSER")
    with playwright.sync_playwright() as running:
        opened = running.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-background-networking"])
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The checkout's server, working in a place with the demo's pictures and a LoRA."""
    import serving
    from test_real_comfyui import HOW, checkout

    if (path := checkout()) is None:
        pytest.skip(f"no ComfyUI found; {HOW}")
    place = tmp_path_factory.mktemp("served")
    environment = serving.fill_place(place)
    running = serving.RealServer(place, path, os.environ.get("GRAFT_TEST_FRONT_END", ""), environment)
    yield running
    running.stop()


def end_first_start(address):
    """The editor's own first start is over: in it front end 1.35 opens Templates over the graph, at some time."""
    asked = urllib.request.Request(
        f"{address}/api/settings/Comfy.TutorialCompleted", data=b"true", headers={"Content-Type": "application/json"}
    )
    urllib.request.urlopen(asked, timeout=60).close()


@pytest.fixture(scope="module", params=browsing.ways_to_draw())
def page(request, browser, server):
    """One page for all of a file's tests of a way to draw nodes."""
    end_first_start(server.address)
    opened = browsing.Editor(browser, server.address, request.param)
    yield opened
    opened.page.close()


@pytest.fixture
def editor(page):
    """The open editor; the page must not have complained at the end of the test."""
    page.errors.clear()  # of the start: what the page asks that this machine's ComfyUI has not
    yield page
    page.page.evaluate("() => app.canvas.setGraph(app.rootGraph ?? app.graph)")
    assert not page.errors
