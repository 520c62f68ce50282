"""A real browser (Chromium) with ComfyUI's front end open on a server: what the tests of the editor do with it."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
SCREENSHOTS = Path(__file__).resolve().parents[2] / "build" / "screenshots"
# What the page says that is not ours: it looks at model files of its own templates, and this machine may have no net;
# it asks for user data of a first start and for a help page in its language, which are not there. Version 1.27 also has
# complaints of its own: when its settings are made on a first page, and about its minimap when a subgraph is left.
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
)


def browser_path() -> str | None:
    """The Chromium of this machine."""
    named = os.environ.get("GRAFT_TEST_BROWSER")
    return named or next((path for name in BROWSERS if (path := shutil.which(name))), None)


class Editor:
    """One page with the editor open. `errors` are what the console and the page complained about."""

    def __init__(self, browser: Any, address: str, modern: bool) -> None:
        self.address, self.modern = address, modern
        self.page = browser.new_page(viewport={"width": 1600, "height": 1000})
        self.page.set_default_timeout(120_000)
        self.errors: list[str] = []
        self.page.on(
            "console", lambda message: self._note(message.text, message.location) if message.type == "error" else None
        )
        self.page.on("pageerror", lambda error: self._note(error.stack or str(error), {}))
        self.open()

    def _note(self, text: str, location: dict[str, Any]) -> None:
        where = str(location.get("url", ""))
        if not any(name in text or name in where for name in FOREIGN):
            self.errors.append(f"{text} ({where})")

    def open(self) -> None:
        """Load the page (again) and wait until the graph is there."""
        self.page.goto(self.address)
        self.page.wait_for_function(
            "window.app?.extensionManager && window.app.canvas && window.app.extensions?.length"
        )
        self.page.wait_for_function("() => window.LiteGraph?.registered_node_types['GraftLoRAStack']")
        self.page.wait_for_function("app.extensionManager.workflow.activeWorkflow?.changeTracker")
        self.page.wait_for_timeout(1500)
        self.page.keyboard.press("Escape")
        self.page.evaluate("on => app.extensionManager.setting.set('Comfy.VueNodes.Enabled', on)", self.modern)
        self.page.evaluate("() => app.extensionManager.setting.set('Comfy.TutorialCompleted', true)")
        self.page.wait_for_timeout(500)

    def do(self, script: str, argument: Any = None) -> Any:
        """The value of a JavaScript function or expression in the page."""
        return self.page.evaluate(script, argument)

    def clear(self) -> None:
        """An empty graph at scale 1."""
        self.do("() => { app.canvas.setGraph(app.rootGraph ?? app.graph); app.graph.clear() }")
        self.do("() => { app.canvas.ds.scale = 1; app.canvas.ds.offset = [0, 0]; app.canvas.setDirty(true, true) }")

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
        self.page.wait_for_timeout(1000)
        self.do("() => { app.canvas.ds.scale = 1; app.canvas.ds.offset = [0, 0]; app.canvas.setDirty(true, true) }")
        self.page.wait_for_timeout(200)

    def queue(self) -> None:
        """Press Run."""
        self.do("() => app.queuePrompt(0, 1)")

    def wait_until_idle(self, timeout: float = 240_000) -> None:
        """Return when nothing runs or waits."""
        self.page.wait_for_function(
            "async () => { const q = await (await fetch('/queue')).json(); return !q.queue_running.length &&"
            " !q.queue_pending.length }",
            timeout=timeout,
            polling=300,
        )
        self.page.wait_for_timeout(500)

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
        self.page.wait_for_timeout(800)

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
        self.page.wait_for_timeout(300)

    def titled(self, title: str) -> int:
        """The id of the node with this title in the graph that is shown."""
        return self.do("(title) => app.canvas.graph.nodes.find((one) => one.title === title).id", title)

    def undo(self) -> None:
        """Ctrl+Z with the focus on the canvas."""
        self.page.mouse.click(800, 880)
        self.page.wait_for_timeout(200)
        self.page.keyboard.press("Control+z")
        self.page.wait_for_timeout(1000)

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
