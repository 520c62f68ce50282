"""The first LoRA as a person makes it, on a real ComfyUI's own server, in a real browser.

GRAFT_TEST_FRONT_END names the folder of a front end to use in place of the installed one.
"""

from __future__ import annotations

import os

import pytest
from test_real_comfyui import HOW, checkout


@pytest.fixture(scope="module")
def browser():
    """Chromium without a window."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    from browsing import browser_path

    if (path := browser_path()) is None:
        pytest.skip("no browser found; name one in GRAFT_TEST_BROWSER")
    with playwright.sync_playwright() as running:
        opened = running.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-background-networking"])
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The checkout's server, working in an empty place."""
    import serving

    if (path := checkout()) is None:
        pytest.skip(f"no ComfyUI found; {HOW}")
    running = serving.RealServer(tmp_path_factory.mktemp("served"), path, os.environ.get("GRAFT_TEST_FRONT_END", ""))
    yield running
    running.stop()


@pytest.mark.browser
@pytest.mark.parametrize("modern", [False, True], ids=["classic", "nodes2"])
def test_from_an_empty_editor_to_an_image_with_the_own_lora(server, browser, modern, tmp_path):
    import first_lora
    from browsing import Editor

    editor = Editor(browser, server.address, modern)
    editor.errors.clear()  # of the start: what the page asks that this machine's ComfyUI has not
    first_lora.make(editor, server.place, tmp_path)
    editor.page.close()
    assert not editor.errors
