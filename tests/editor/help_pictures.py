"""Draws the pictures of the help pages again: every node as the editor shows it. Run it when labels or inputs have
changed, and look at the pictures.

python -m graft_nodes.tests.editor.help_pictures [NODE …]
"""

from __future__ import annotations

import io
import json
import shutil
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
PAGES = ROOT / "web" / "docs"
WORKFLOW = ROOT / "demo" / "every_node.json"
MARGIN = 12  # pixels around a node
ROWS = {
    "version": 1,
    "rows": [
        {"file": "zorp.safetensors", "on": True, "model": 0.8, "clip": 0.8},
        {
            "file": "style/paper cut.safetensors",
            "on": True,
            "model": 0.5,
            "clip": 0.5,
            "blocks": "IN=0",
            "schedule": "0.2-0.8",
        },
    ],
}
# No badge with the pack's folder, no links.
SETTINGS = {"Comfy.NodeBadge.NodeSourceBadgeMode": "None", "Comfy.LinkRenderMode": -1}
WIDTH = 400
VALUES = {name: {"rows": json.dumps(ROWS)} for name in ("GraftLoRAStack", "GraftLoadLoRAs")}


def main(wanted: list[str]) -> None:
    """Draw the named nodes, or all that have a help page."""
    names = wanted or sorted(page.stem for page in PAGES.glob("*.md"))
    with tempfile.TemporaryDirectory() as folder:
        server = serving.Server(workplace(Path(folder)))
        try:
            draw(server.address, names)
        finally:
            server.stop()


def workplace(folder: Path) -> Path:
    """A folder for the server with the demo's images and two LoRA files."""
    for name in ("concept", "regular"):
        shutil.copytree(ROOT / "demo" / name, folder / "input" / name)
    loras = folder / "models" / "loras"
    (loras / "style").mkdir(parents=True)
    serving.lora(loras / "zorp.safetensors")
    serving.lora(loras / "style" / "paper cut.safetensors")
    picture = next((ROOT / "demo" / "concept").glob("*.png"))
    shutil.copy(picture, loras / "style" / "paper cut.png")
    return folder


def draw(address: str, names: list[str]) -> None:
    """Draw each node: the example workflow's own, or a new one."""
    with sync_playwright() as running:
        browser = running.chromium.launch(
            executable_path=browser_path(), args=["--no-sandbox", "--disable-background-networking"]
        )
        editor = Editor(browser, address, modern=True)
        editor.load(json.loads(WORKFLOW.read_text(encoding="utf-8")))
        for setting, value in SETTINGS.items():
            editor.do("([name, value]) => app.extensionManager.setting.set(name, value)", [setting, value])
        for name in names:
            save(picture(editor, node_of(editor, name)), PAGES / f"{name}.png")
            print(f"drew {name}", flush=True)
        browser.close()


def node_of(editor: Editor, name: str) -> int:
    """The id of the workflow's last node of a type, or of a new one."""
    ids = editor.do("(name) => app.graph.nodes.filter((node) => node.type === name).map((node) => node.id)", name)
    if ids:
        return ids[-1]
    return editor.add(name, 6000, 0, **VALUES.get(name, {}))


def picture(editor: Editor, node: int) -> bytes:
    """A PNG of one node alone in the graph's middle, as Nodes 2.0 draws it."""
    editor.do(
        """([id, width]) => {
          const node = app.graph.getNodeById(id)
          node.pos = [20000 + 2000 * id, 0]
          node.title = LiteGraph.registered_node_types[node.type].title
          node.setSize([Math.max(width, node.computeSize()[0]), node.computeSize()[1]])
          app.canvas.ds.scale = 1
          app.canvas.ds.offset = [300 - node.pos[0], 120 - node.pos[1]]
          app.canvas.deselectAll?.()
          app.canvas.setDirty(true, true)
        }""",
        [node, WIDTH],
    )
    editor.page.wait_for_timeout(1500)
    box: Any = editor.page.locator(f"[data-node-id='{node}']").first.bounding_box()
    clip = {
        "x": box["x"] - MARGIN,
        "y": box["y"] - MARGIN,
        "width": box["width"] + 2 * MARGIN,
        "height": box["height"] + 2 * MARGIN,
    }
    return editor.page.screenshot(clip=clip)


def save(content: bytes, path: Path) -> None:
    """Write a picture with 256 colors: a quarter of the bytes."""
    with Image.open(io.BytesIO(content)) as opened:
        opened.convert("RGB").quantize(256).save(path, optimize=True)


if __name__ == "__main__":
    main(sys.argv[1:])
