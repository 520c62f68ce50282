"""Exports workflows as ComfyUI's front end does: app.graphToPrompt() in a real browser, on a real ComfyUI's server."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from playwright.sync_api import Error, Page, Playwright, Route, sync_playwright

from ...editor.browsing import browser_path
from . import packages

PATIENCE = 300.0  # seconds for a server to start
A_PAGE = 50  # workflows; a page grows with each
# The page draws nothing, which takes most of the time; the workflow goes into the one that is open, not into a new tab.
EXPORT = """async (workflow) => {
  document.body.style.display = 'none'
  window.app.canvas.pause_rendering = true
  const open = window.app.extensionManager.workflow.activeWorkflow
  await window.app.loadGraphData(workflow, true, false, open)
  await new Promise((done) => setTimeout(done, 100))
  return (await window.app.graphToPrompt()).output
}"""
READY = "window.app?.extensionManager && window.app.canvas && window.app.extensions?.length"


@contextlib.contextmanager
def server(checkout: str, front_end: str) -> Iterator[str]:
    """The address of the checkout's server with this version of the front end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = packages.BUILD / "comfyui"
    place.mkdir(parents=True, exist_ok=True)
    words = [sys.executable, str(Path(__file__).with_name("serve.py")), checkout, str(place), str(port)]
    words.append(str(packages.front_end(front_end)))
    with (packages.BUILD / "comfyui.log").open("w", encoding="utf-8") as log:
        paths = os.pathsep.join(packages.glsl())
        process = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, "PYTHONPATH": paths})
        try:
            _wait(process, port)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait()


def _wait(process: subprocess.Popen[bytes], port: int) -> None:
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        time.sleep(0.3)
    raise SystemExit(f"ComfyUI did not start; its log is {packages.BUILD / 'comfyui.log'}")


def node_definitions(address: str) -> dict[str, Any]:
    """What the server says of its nodes."""
    with urllib.request.urlopen(f"{address}/object_info") as answer:
        return json.load(answer)


def export(address: str, paths: Sequence[Path], folder: Path) -> None:
    """Write the front end's export of each workflow into the folder, under the same name; what it says if it fails."""
    folder.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        for start in range(0, len(paths), A_PAGE):
            page = _page(playwright, address)
            for path in paths[start : start + A_PAGE]:
                result = _exported(page, path)
                (folder / path.name).write_text(json.dumps(result), encoding="utf-8")
            _browser(page).close()
            print(f"exported {min(start + A_PAGE, len(paths))} of {len(paths)}", flush=True)


def _exported(page: Page, path: Path) -> dict[str, Any]:
    try:
        return {"prompt": page.evaluate(EXPORT, json.loads(path.read_text(encoding="utf-8")))}
    except Error as error:
        return {"error": error.message.splitlines()[0]}


def _page(playwright: Playwright, address: str) -> Page:
    """A page with the editor, which gets nothing from anywhere else and no pictures."""

    def answer(route: Route) -> None:
        if route.request.url.startswith(address) and "/view?" not in route.request.url:
            route.continue_()
        else:
            route.abort()

    browser = playwright.chromium.launch(executable_path=browser_path(), args=["--no-sandbox"])
    page = browser.new_page(viewport={"width": 400, "height": 300})
    page.set_default_timeout(120_000)
    page.route("**/*", answer)
    page.goto(address)
    page.wait_for_function(READY)
    page.wait_for_timeout(3000)
    return page


def _browser(page: Page) -> Any:
    return page.context.browser
