"""Records README's moving picture: the editor, a link that is drawn, Run, the loss of the demo and its previews.

python -m graft_nodes.tests.editor.moving_picture

It takes two to five minutes. Look at the picture afterwards.
"""

from __future__ import annotations

import io
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

sys.path.insert(0, str(Path(__file__).resolve().parent))

import serving
from browsing import Editor, browser_path
from help_pictures import ROOT, SETTINGS, workplace

PICTURE = ROOT / "docs" / "editor.webp"
VIEW = {"width": 1280, "height": 720}
SHOWN = (960, 540)  # pixels of the picture
STEPS, TRAINING_FRAMES = 250, 30
SECONDS = 2  # between two screenshots, which take the training's processors
SCALE, OFFSET = 0.72, (112.0, 240.0)
CLOSE_SCALE, CLOSE_OFFSET = 1.15, (-720.0, 80.0)  # the panel of Train Step at the end
DOT = 9  # pixels from a slot's label to its dot
QUIET = {"Comfy.Minimap.Visible": False, "Comfy.Graph.CanvasInfo": False, "Comfy.Graph.CanvasMenu": False}
VIEW_TO = """([scale, offset]) => {
  app.canvas.ds.scale = scale
  app.canvas.ds.offset = offset
  app.canvas.setDirty(true, true)
}"""
POINTER = """() => {
  const pointer = document.createElement('div')
  pointer.innerHTML = `<svg width="26" height="26" viewBox="0 0 24 24">
    <path d="M4 2 L4 19 L8.5 15 L11.5 22 L14.5 20.7 L11.5 14 L18 14 Z" fill="white" stroke="black" stroke-width="1.2"/>
  </svg>`
  Object.assign(pointer.style, {position: 'fixed', zIndex: 100000, pointerEvents: 'none', left: '0', top: '0'})
  document.body.append(pointer)
  window.addEventListener('pointermove', (event) => {
    pointer.style.transform = `translate(${event.clientX - 4}px, ${event.clientY - 2}px)`
  }, true)
}"""


class Film:
    """The frames of a page, each with how long it is shown."""

    def __init__(self, editor: Editor) -> None:
        self.editor, self.page = editor, editor.page
        self.frames: list[tuple[bytes, int]] = []
        self.at = (640.0, 600.0)

    def shot(self, milliseconds: int) -> None:
        """Add the page as it is."""
        self.frames.append((self.page.screenshot(), milliseconds))

    def move(self, x: float, y: float, frames: int) -> None:
        """Move the pointer there, frame by frame."""
        from_x, from_y = self.at
        for number in range(1, frames + 1):
            share = number / frames
            self.page.mouse.move(from_x + (x - from_x) * share, from_y + (y - from_y) * share)
            self.page.wait_for_timeout(60)
            self.shot(70)
        self.at = (x, y)

    def zoom(self, scale: float, offset: tuple[float, float], frames: int) -> None:
        """Go closer to a part of the graph."""
        for number in range(1, frames + 1):
            share = number / frames
            view = [SCALE + (scale - SCALE) * share, [a + (b - a) * share for a, b in zip(OFFSET, offset, strict=True)]]
            self.editor.do(VIEW_TO, view)
            self.page.wait_for_timeout(250)
            self.shot(90)

    def save(self, path: Path) -> None:
        """Write an animated WebP."""
        pictures = []
        for content, _ in self.frames:
            with Image.open(io.BytesIO(content)) as opened:
                pictures.append(opened.convert("RGB").resize(SHOWN, Image.Resampling.LANCZOS))
        times = [milliseconds for _, milliseconds in self.frames]
        pictures[0].save(
            path,
            save_all=True,
            append_images=pictures[1:],
            duration=times,
            loop=0,
            quality=72,
            method=6,
        )


def main() -> None:
    """Record the picture."""
    with tempfile.TemporaryDirectory() as folder:
        server = serving.Server(workplace(Path(folder)))
        try:
            with sync_playwright() as running:
                browser = running.chromium.launch(
                    executable_path=browser_path(), args=["--no-sandbox", "--disable-background-networking"]
                )
                editor = Editor(browser, server.address, modern=True)
                record(editor).save(PICTURE)
                browser.close()
        finally:
            server.stop()
    print(f"{PICTURE}: {PICTURE.stat().st_size / 1e6:.2f} MB")


def record(editor: Editor) -> Film:
    """Draw a link, press Run, and watch."""
    editor.page.set_viewport_size(VIEW)
    for setting, value in {**SETTINGS, **QUIET, "Comfy.LinkRenderMode": 2}.items():
        editor.do("([name, value]) => app.extensionManager.setting.set(name, value)", [setting, value])
    editor.clear()
    dataset, start = build(editor)
    editor.do(POINTER)
    editor.page.wait_for_timeout(2500)
    film = Film(editor)
    film.page.mouse.move(*film.at)
    film.shot(900)
    film.move(*slot(editor, dataset, "dataset", 1), 6)
    film.page.mouse.down()
    film.move(*slot(editor, start, "dataset", -1), 9)
    film.page.mouse.up()
    film.shot(600)
    press_run(film)
    film.frames += list(evenly(watch(film), TRAINING_FRAMES))
    editor.wait_until_idle()
    editor.page.wait_for_timeout(1500)
    film.shot(1200)
    film.zoom(CLOSE_SCALE, CLOSE_OFFSET, 7)
    editor.page.wait_for_timeout(1000)
    film.shot(4000)
    return film


def slot(editor: Editor, node: int, label: str, side: int) -> tuple[float, float]:
    """Where the dot beside a slot's label is, to its left (-1) or to its right (1)."""
    box = editor.page.locator(f"[data-node-id='{node}']").get_by_text(label, exact=True).first.bounding_box()
    assert box is not None
    return box["x"] + box["width"] / 2 + side * (box["width"] / 2 + DOT), box["y"] + box["height"] / 2


def build(editor: Editor) -> tuple[int, int]:
    """The graph, but for one link; the ids of Dataset and Start Training."""
    editor.do(VIEW_TO, [SCALE, OFFSET])
    model = editor.add("GraftDemo", 0, 0)
    prompt = editor.add("CLIPTextEncode", 0, 170, "Prompt", text="a zorp middle")
    negative = editor.add("CLIPTextEncode", 0, 370, "Negative", text="")
    latent = editor.add("EmptyLatentImage", 0, 570, width=256, height=256, batch_size=2)
    dataset = editor.add("GraftDataset", 330, 0, folder="concept", resolution=256)
    optimizer = editor.add("GraftOptimizer", 760, 330, learning_rate=0.002, total_steps=STEPS, batch_size=8)
    start = editor.add("GraftTrainStart", 760, 0)
    step = editor.add("TrainStep", 1140, 0, steps=STEPS, validate_every=25, preview_every=50)
    for source, output, target, name in (
        (model, 2, dataset, "vae"),
        (model, 1, dataset, "clip"),
        (model, 1, prompt, "clip"),
        (model, 1, negative, "clip"),
        (model, 0, start, "model"),
        (model, 2, start, "vae"),
        (optimizer, 0, start, "settings"),
        (start, 0, step, "state"),
        (prompt, 0, step, "positive"),
        (negative, 0, step, "negative"),
        (latent, 0, step, "latent"),
    ):
        editor.link(source, output, target, name)
    for node, size in (
        (prompt, [280, 130]),
        (negative, [280, 130]),
        (latent, [280, 130]),
        (dataset, [380, 330]),
        (step, [420, 330]),
    ):
        editor.do("([id, size]) => app.graph.getNodeById(id).setSize(size)", [node, size])
    return dataset, start


def press_run(film: Film) -> None:
    """Move to the Run button and click it."""
    box = film.page.get_by_test_id("queue-button").first.bounding_box()
    assert box is not None
    film.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2, 7)
    film.page.mouse.click(*film.at)
    film.page.wait_for_timeout(200)
    film.shot(300)


def watch(film: Film) -> list[bytes]:
    """Screenshots from the first step to the last."""
    film.page.wait_for_selector(".graft-chart:visible")
    shots = []
    while film.editor.do("async () => (await (await fetch('/queue')).json()).queue_running.length > 0"):
        shots.append(film.page.screenshot())
        film.page.wait_for_timeout(1000 * SECONDS)
    return shots


def evenly(shots: list[bytes], count: int) -> Iterator[tuple[bytes, int]]:
    """So many of them, one as far from the next as the other."""
    for number in range(count):
        yield shots[number * len(shots) // count], 150


if __name__ == "__main__":
    main()
