"""A real browser (Chromium) with ComfyUI's front end open on a server: what the tests of the editor do with it.

GRAFT_TEST_SLOWER=6 makes its pages six times slower: tests that wait for a time, and not for what they need, fail then.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
SCREENSHOTS = Path(__file__).resolve().parents[2] / "build" / "screenshots"
# What the page says that is not ours: it looks at model files of its own templates, and this machine may have no net;
# it asks for user data of a first start and for a help page in its language, which are not there. Version 1.27 also has
# complaints of its own: when its settings are made on a first page, about its minimap when a subgraph is left, and when
# it is told of a step in a subgraph while another workflow is open.
FOREIGN = (
    "huggingface.co",
    "civitai.com",
    "github.com",
    "comfy.org",
    "googletagmanager",
    "before initialization",
    "favicon",
    "/en.md",
    "/userdata",
    "/user.css",
    "/templates/index",
    "core workflow templates",
    "at Proxy.addSetting",
    "graph that was never set up",
    "Subgraph not found",
)


# Loaders that front end 1.27 counts on: without each of them it opens no node that loads a checkpoint, a LoRA or a VAE.
# ComfyUI has them, the embedded host has not.
COUNTED_ON = (
    "ImageOnlyCheckpointLoader",
    "ControlNetLoader",
    "UpscaleModelLoader",
    "StyleModelLoader",
    "GLIGENLoader",
)
LOADER = {
    "input": {"required": {}},
    "input_order": {"required": []},
    "output": ["*"],
    "output_is_list": [False],
    "output_name": ["*"],
    "description": "",
    "category": "loaders",
    "output_node": False,
    "python_module": "nodes",
}


def add_loaders(route: Any) -> None:
    """Answer for /object_info as the server does, and name the loaders that front end 1.27 counts on."""
    answer = route.fetch()
    there = {name: {**LOADER, "name": name, "display_name": name} for name in COUNTED_ON}
    route.fulfill(response=answer, json={**there, **answer.json()})


def browser_path() -> str | None:
    """The Chromium of this machine."""
    named = os.environ.get("GRAFT_TEST_BROWSER")
    return named or next((path for name in BROWSERS if (path := shutil.which(name))), None)


def ways_to_draw() -> list[Any]:
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


# Resolves once nothing on the page has changed for some frames, or after so many milliseconds.
STILL = """([frames, most]) => new Promise((done) => {
  let left = frames
  const watcher = new MutationObserver(() => { left = frames })
  watcher.observe(document.body, {subtree: true, childList: true, attributes: true, characterData: true})
  const end = performance.now() + most
  const look = () => {
    left -= 1
    if (left > 0 && performance.now() < end) return requestAnimationFrame(look)
    watcher.disconnect()
    done()
  }
  requestAnimationFrame(look)
})"""
FRAMES = 10
# The first element that can be seen: the front end keeps panels of a graph's subgraphs after the graph has gone.
VISIBLE = "(selector) => [...document.querySelectorAll(selector)].find((one) => one.checkVisibility())"
# Whether two Chinese characters look different: without a font that has them each is the same empty box.
DRAWS_CHINESE = """() => {
  const pen = document.createElement('canvas').getContext('2d', {willReadFrequently: true})
  pen.font = '32px sans-serif'
  const drawn = (character) => {
    pen.clearRect(0, 0, 40, 40)
    pen.fillText(character, 2, 34)
    return pen.getImageData(0, 0, 40, 40).data.join()
  }
  return drawn('训') !== drawn('练')
}"""
NO_CHINESE = "no font with Chinese characters, so texts have not their width: apt-get install fonts-wqy-microhei"


class Editor:
    """One page with the editor open. `errors` are what the console and the page complained about."""

    def __init__(self, browser: Any, address: str, modern: bool) -> None:
        self.address, self.modern = address, modern
        self.page = browser.new_page(viewport={"width": 1600, "height": 1000})
        self.page.set_default_timeout(120_000)
        if slower := os.environ.get("GRAFT_TEST_SLOWER"):
            session = self.page.context.new_cdp_session(self.page)
            session.send("Emulation.setCPUThrottlingRate", {"rate": float(slower)})
        self.errors: list[str] = []
        self.page.on(
            "console", lambda message: self._note(message.text, message.location) if message.type == "error" else None
        )
        self.page.on("pageerror", lambda error: self._note(error.stack or str(error), {}))
        if len(ways_to_draw()) == 1:  # 1.27
            self.page.route("**/object_info", add_loaders)
        self._asked: set[Any] = set()  # requests without an answer so far
        self.page.on("request", lambda asked: self._asked.add(asked))
        self.page.on("requestfinished", lambda asked: self._asked.discard(asked))
        self.page.on("requestfailed", lambda asked: self._asked.discard(asked))
        self.open()

    def _note(self, text: str, location: dict[str, Any]) -> None:
        where = str(location.get("url", ""))
        if not any(name in text or name in where for name in FOREIGN):
            self.errors.append(f"{text} ({where})")

    def open(self) -> None:
        """Load the page (again) and wait until the graph is there."""
        self._asked.clear()
        self.page.goto(self.address)
        self.page.wait_for_function(
            "window.app?.extensionManager && window.app.canvas && window.app.extensions?.length"
        )
        self.page.wait_for_function("() => window.LiteGraph?.registered_node_types['GraftLoRAStack']")
        self.page.wait_for_function("app.extensionManager.workflow.activeWorkflow?.changeTracker")
        self.settle()
        self.page.keyboard.press("Escape")
        self.page.evaluate("on => app.extensionManager.setting.set('Comfy.VueNodes.Enabled', on)", self.modern)
        self.page.evaluate("() => app.extensionManager.setting.set('Comfy.TutorialCompleted', true)")
        self.page.evaluate("() => app.extensionManager.setting.set('Comfy.RightSidePanel.IsOpen', false)")
        self.settle()

    def settle(self, most: float = 2000) -> None:
        """Return once the page rests: every request answered and nothing drawn anew for a few frames; or after `most`
        milliseconds.
        """
        end = time.monotonic() + most / 1000
        while (left := end - time.monotonic()) > 0:
            self.do(STILL, [FRAMES, left * 1000])
            if not self._asked:
                return
            self.page.wait_for_timeout(30)

    def do(self, script: str, argument: Any = None) -> Any:
        """The value of a JavaScript function or expression in the page."""
        return self.page.evaluate(script, argument)

    def clear(self) -> None:
        """An empty graph at scale 1."""
        self.do("() => { app.canvas.setGraph(app.rootGraph ?? app.graph); app.graph.clear() }")
        self.do("() => { app.canvas.ds.scale = 1; app.canvas.ds.offset = [0, 0]; app.canvas.setDirty(true, true) }")
        self.settle()  # new nodes may get the numbers of those that go

    def add(self, kind: str, x: float, y: float, title: str = "", **values: Any) -> int:
        """Put a node into the graph; its id. Values go to widgets by name."""
        return self.do(
            """([kind, x, y, title, values]) => {
              const node = LiteGraph.createNode(kind)
              node.pos = [x, y]
              if (title) node.title = title
              app.canvas.graph.add(node)
              for (const [name, value] of Object.entries(values)) {
                const widget = node.widgets.find((one) => one.name === name)
                if (!widget) throw new Error(`${kind} has no widget ${name}`)
                widget.value = value
                widget.callback?.(value)
              }
              app.canvas.setDirty(true, true)
              return node.id
            }""",
            [kind, x, y, title, values],
        )

    def link(self, source: int, output: int, target: int, name: str) -> None:
        """Connect an output, by place, to an input, by name."""
        self.do(
            """([source, output, target, name]) => {
              const to = app.canvas.graph.getNodeById(target)
              const slot = to.findInputSlot(name)
              if (slot < 0) throw new Error(`${to.type} has no input ${name}`)
              const from = app.canvas.graph.getNodeById(source)
              if (!from.connect(output, to, slot)) throw new Error(`${name} of ${to.type} does not take it`)
            }""",
            [source, output, target, name],
        )

    def saved(self) -> dict[str, Any]:
        """The workflow as the editor saves it."""
        return self.do("() => app.graphToPrompt().then((found) => JSON.parse(JSON.stringify(found.workflow)))")

    def prompt(self) -> dict[str, Any]:
        """The workflow in API format."""
        return self.do("() => app.graphToPrompt().then((found) => JSON.parse(JSON.stringify(found.output)))")

    def load(self, workflow: dict[str, Any]) -> None:
        """Open a saved workflow."""
        self.do("(workflow) => app.loadGraphData(workflow)", workflow)
        self.settle()
        self.do("() => { app.canvas.ds.scale = 1; app.canvas.ds.offset = [0, 0]; app.canvas.setDirty(true, true) }")
        self.settle()

    def queue(self) -> None:
        """Press Run."""
        self.do("() => app.queuePrompt(0, 1)")

    def dismiss(self) -> None:
        """Close the dialog in which older front ends (1.27) say that a workflow was refused."""
        while self.page.locator(".p-dialog-mask:visible").count():
            self.page.keyboard.press("Escape")
            self.settle()

    def wait_until_idle(self, timeout: float = 240_000) -> None:
        """Return when nothing runs or waits."""
        self.page.wait_for_function(
            "async () => { const q = await (await fetch('/queue')).json(); return !q.queue_running.length &&"
            " !q.queue_pending.length }",
            timeout=timeout,
            polling=300,
        )
        self.settle()

    def enter(self, title: str) -> None:
        """Go into the subgraph whose node in the graph that is shown has this title."""
        self.do(
            """(title) => {
              const node = app.canvas.graph.nodes.find((one) => one.title === title)
              app.canvas.setGraph(node.subgraph)
              app.canvas.ds.scale = 1
              app.canvas.setDirty(true, true)
            }""",
            title,
        )
        self.settle()

    def wrap(self, nodes: list[int], title: str) -> None:
        """Make a subgraph of nodes of the graph that is shown."""
        self.do(
            """([ids, title]) => {
              const graph = app.canvas.graph
              const {subgraph, node} = graph.convertToSubgraph(new Set(ids.map((id) => graph.getNodeById(id))))
              node.title = subgraph.name = title
            }""",
            [nodes, title],
        )
        self.settle()

    def titled(self, title: str) -> int:
        """The id of the node with this title in the graph that is shown."""
        return self.do("(title) => app.canvas.graph.nodes.find((one) => one.title === title).id", title)

    def undo(self) -> None:
        """Ctrl+Z with the focus on the canvas."""
        self.page.mouse.click(800, 880)
        self.settle()
        self.page.keyboard.press("Control+z")
        self.settle()

    def rows(self, node: int) -> list[dict[str, Any]]:
        """The rows of a LoRA stack, from the widget's value."""
        text = self.do(
            "(id) => app.canvas.graph.getNodeById(id).widgets.find((one) => one.name === 'rows').value", node
        )
        return json.loads(text)["rows"]

    def screenshot(self, name: str) -> None:
        """Keep a picture of the page under build/screenshots, to be looked at."""
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=SCREENSHOTS / f"{name}-{'nodes2' if self.modern else 'classic'}.png")
