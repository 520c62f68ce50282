"""Draws the thumbnails of the templates again, and records what the front end exports of each. Run it when a template
has changed, and look at the pictures.

python -m graft_nodes.tests.editor.template_pictures [--place DIR] [--run] [TITLE …]

DIR is the folder to work in, in place of an empty one; `--run` runs each template before its picture is taken.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

sys.path.insert(0, str(Path(__file__).resolve().parent))

import serving
from browsing import Editor, browser_path

ROOT = Path(__file__).resolve().parents[2]
TEMPLATES = ROOT / "example_workflows"
EVERY_NODE = ROOT / "demo" / "every_node.json"  # which is exported, and has no picture
EXPORTS = ROOT / "tests" / "headless" / "examples"
WIDTH, MARGIN = 1280, 40  # pixels of a thumbnail, and what is left around the graph in it
LARGEST = 1600  # pixels of the page, which is as high as the graph needs
# Nothing but the graph: no bars, menus and messages.
ALONE = (
    "body * {visibility: hidden !important} #graph-canvas, .dom-widget, .dom-widget * {visibility: visible !important}"
)
SAVED = "() => app.graph.nodes.every((node) => node.type !== 'SaveImage' || app.nodeOutputs?.[node.id]?.images?.length)"
# No badge with the pack's folder, and texts however small.
SETTINGS = {"Comfy.NodeBadge.NodeSourceBadgeMode": "None", "LiteGraph.Canvas.MinFontSizeForLOD": 0}


def main(arguments: list[str]) -> None:
    """Draw and export the named templates, or all."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--place", type=Path)
    parser.add_argument("--run", action="store_true")
    parser.add_argument("titles", nargs="*")
    given = parser.parse_args(arguments)
    every = [EVERY_NODE, *sorted(TEMPLATES.glob("*.json"))]
    paths = [path for path in every if not given.titles or path.stem in given.titles]
    with tempfile.TemporaryDirectory() as folder:
        place = given.place or Path(folder)
        (place / "input").mkdir(exist_ok=True)
        for path in paths:
            empty_models(place, path)
        server = serving.Server(place)
        try:
            draw(server.address, paths, given.run)
        finally:
            server.stop()


def empty_models(place: Path, path: Path) -> None:
    """Put empty files where a template expects models, so that the editor marks none as missing."""
    for line in path.read_text(encoding="utf-8").split("`"):
        if line.startswith("models/"):
            (place / line).parent.mkdir(parents=True, exist_ok=True)
            (place / line).touch()


def draw(address: str, paths: list[Path], run: bool) -> None:
    """Open each template, record its export and take its picture."""
    with sync_playwright() as running:
        browser = running.chromium.launch(
            executable_path=browser_path(), args=["--no-sandbox", "--disable-background-networking"]
        )
        editor = Editor(browser, address, modern=False)
        for setting, value in SETTINGS.items():
            editor.do("([name, value]) => app.extensionManager.setting.set(name, value)", [setting, value])
        for path in paths:
            editor.clear()
            editor.load(json.loads(path.read_text(encoding="utf-8")))
            export(editor, path)
            if path == EVERY_NODE:
                continue
            if run:
                editor.queue()
                editor.page.wait_for_function(SAVED, timeout=900_000)
                editor.page.wait_for_timeout(5000)
            save(picture(editor), path.with_suffix(".jpg"))
            print(f"drew {path.stem}", flush=True)
        browser.close()


def export(editor: Editor, path: Path) -> None:
    """Write the front end's own API export, which tests/headless/test_examples.py compares with Graft's."""
    prompt = editor.prompt()
    for node in prompt.values():
        if node["class_type"] == "PreviewAny":  # its text box is not an input of the node
            node["inputs"].pop("preview", None)
    text = json.dumps(prompt, indent=1, ensure_ascii=False)
    (EXPORTS / f"{path.stem}.api.json").write_text(text + "\n", encoding="utf-8")


def picture(editor: Editor) -> bytes:
    """A PNG of the whole graph, and nothing of the editor around it."""
    editor.page.add_style_tag(content=ALONE)
    left, top, right, bottom = bounds(editor)
    scale = (LARGEST - 2 * MARGIN) / (right - left)
    height = round((bottom - top) * scale) + 2 * MARGIN
    editor.page.set_viewport_size({"width": LARGEST, "height": height})
    editor.page.wait_for_timeout(800)
    editor.do(
        """([left, top, scale, margin]) => {
          app.canvas.deselectAll?.()
          app.canvas.show_info = false
          app.canvas.ds.scale = scale
          app.canvas.ds.offset = [margin / scale - left, margin / scale - top]
          app.canvas.setDirty(true, true)
        }""",
        [left, top, scale, MARGIN],
    )
    editor.page.wait_for_timeout(2500)
    return editor.page.screenshot()


def bounds(editor: Editor) -> list[float]:
    """The graph's left, top, right and bottom."""
    return editor.do(
        """() => {
          const boxes = [...app.graph.nodes, ...app.graph.groups].map((one) => one.boundingRect ?? one._bounding)
          return [
            Math.min(...boxes.map((box) => box[0])), Math.min(...boxes.map((box) => box[1])),
            Math.max(...boxes.map((box) => box[0] + box[2])), Math.max(...boxes.map((box) => box[1] + box[3])),
          ]
        }"""
    )


def save(content: bytes, path: Path) -> None:
    """Write a picture as a small JPEG."""
    with Image.open(io.BytesIO(content)) as opened:
        height: Any = round(opened.height * WIDTH / opened.width)
        opened.convert("RGB").resize((WIDTH, height), Image.Resampling.LANCZOS).save(path, quality=82, optimize=True)


if __name__ == "__main__":
    main(sys.argv[1:])
