"""The embedded host's server under ComfyUI's real front end in a real browser: it opens, runs, survives a reload and a
lost server.
"""

import json
from pathlib import Path

import pytest
from serving import PATIENCE, Server, few_pictures, named_front_end, samples, trains

ROOT = Path(__file__).resolve().parents[2]
WAIT = PATIENCE * 1000  # milliseconds


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp("opens")
    (place / "models" / "loras").mkdir(parents=True)
    (place / "input").mkdir()
    return place


@pytest.fixture(scope="module")
def running(place):
    """A list of the one server that runs: a test may end it and put another in its place."""
    servers = [Server(place, *named_front_end())]
    yield servers
    servers[0].stop()


@pytest.fixture(scope="module")
def tab(browser, running):
    from browsing import Editor

    opened = Editor(browser, running[0].address, False)
    yield opened
    opened.page.close()


def nodes(tab):
    """The ids and types in the graph."""
    return tab.do("() => app.graph._nodes.map((node) => [String(node.id), node.type]).sort()")


def load(tab, prompt):
    tab.do("async (prompt) => { await app.loadApiJson(prompt, 'small.json') }", prompt)
    assert nodes(tab) == sorted([key, node["class_type"]] for key, node in prompt.items())


def listen(tab, *events):
    """Have the page note in `window.heard` which of these events came."""
    tab.do(
        """(events) => {
      window.heard = []
      for (const event of events) app.api.addEventListener(event, () => window.heard.push(event))
    }""",
        list(events),
    )


def run(tab):
    """Queue the graph and wait until its picture is there; the picture's file name."""
    before = tab.do("() => app.nodeOutputs?.['6']?.images?.[0]?.filename ?? ''")
    tab.do("async () => { await app.queuePrompt(0, 1) }")
    tab.page.wait_for_function(
        "(before) => { const now = app.nodeOutputs?.['6']?.images?.[0]?.filename; return now && now !== before }",
        arg=before,
        timeout=WAIT,
    )
    return tab.do("() => app.nodeOutputs['6'].images[0].filename")


def test_it_opens_without_a_complaint_and_has_every_node(tab):
    assert tab.errors == []
    known = set(tab.do("() => Object.keys(LiteGraph.registered_node_types)"))
    pages = {path.stem for path in (ROOT / "web" / "docs").glob("*.md")}
    assert pages and pages <= known and {"KSampler", "SaveImage", "LoadImage"} <= known


UNKNOWN = """() => {
  const inside = (graph) => graph.nodes.flatMap((node) => [node, ...(node.subgraph ? inside(node.subgraph) : [])])
  const known = new Set(Object.keys(LiteGraph.registered_node_types))
  return inside(app.rootGraph ?? app.graph).filter((node) => !known.has(node.type)).map((node) => node.type)
}"""


def test_a_page_without_a_graph_opens_the_first_template(tab, browser, running):
    """As in another browser, once somebody has seen the first start: ComfyUI's own first graph has nodes that only
    ComfyUI has.
    """
    from browsing import Editor

    assert tab.do("() => app.extensionManager.setting.get('Comfy.TutorialCompleted')") is True
    template = json.loads((ROOT / "example_workflows" / "Train your first LoRA.json").read_text(encoding="utf-8"))
    second = Editor(browser, running[0].address, False)
    try:
        for _ in range(2):
            assert sorted(kind for _, kind in nodes(second)) == sorted(node["type"] for node in template["nodes"])
            assert second.do(UNKNOWN) == []
            assert second.page.locator(".p-dialog:visible").count() == 0
            assert second.do("() => app.graph.groups.length") == len(template["groups"])
            assert second.errors == []
            second.screenshot("a-page-without-a-graph")
            second.do("() => { localStorage.clear(); sessionStorage.clear() }")
            second.open()
    finally:
        second.page.close()


def test_a_workflow_runs_and_its_picture_arrives(tab, place):
    load(tab, samples(4, seed=1))
    listen(tab, "progress", "b_preview", "executed")
    name = run(tab)
    assert (place / "output" / name).is_file() and set(tab.do("() => window.heard")) == {
        "progress",
        "b_preview",
        "executed",
    }
    tab.page.wait_for_function("() => app.graph.getNodeById(6)?.imgs?.[0]?.naturalWidth > 0", timeout=WAIT)
    assert tab.errors == []


def test_a_reload_keeps_the_graph_and_it_runs_again(tab):
    tab.open()
    tab.page.wait_for_function("() => app.graph._nodes.length === 6", timeout=WAIT)
    tab.do("() => { app.graph.getNodeById(4).widgets.find((widget) => widget.name === 'seed').value = 2 }")
    assert run(tab).startswith("sampled_") and tab.errors == []


def test_a_server_that_goes_away_is_said_and_nothing_is_lost(tab, running, place):
    port, before = running[0].port, nodes(tab)
    listen(tab, "reconnecting", "reconnected")
    assert running[0].stop() == 0
    tab.page.wait_for_function("() => window.heard.includes('reconnecting')", timeout=WAIT)
    tab.page.get_by_text("Reconnecting").first.wait_for(timeout=WAIT)
    running[0] = Server(place, *named_front_end(), port=port)
    tab.page.wait_for_function("() => window.heard.includes('reconnected')", timeout=WAIT)
    assert nodes(tab) == before
    tab.errors.clear()  # that it could not reach the server, it was to say
    tab.do("() => { app.graph.getNodeById(4).widgets.find((widget) => widget.name === 'seed').value = 3 }")
    assert run(tab).startswith("sampled_") and tab.errors == []


def test_two_tabs_do_not_disturb_each_other(tab, browser, running):
    from browsing import Editor

    other = Editor(browser, running[0].address, False)
    try:
        load(other, {"1": {"class_type": "GraftDemo", "inputs": {}}})
        assert other.do("() => app.api.clientId") != tab.do("() => app.api.clientId")
        tab.do("() => { app.graph.getNodeById(4).widgets.find((widget) => widget.name === 'seed').value = 4 }")
        assert run(tab).startswith("sampled_")
        assert nodes(other) == [["1", "GraftDemo"]] and len(nodes(tab)) == 6
        assert tab.errors == [] and other.errors == []
    finally:
        other.page.close()


def test_a_server_that_dies_while_it_trains_comes_back_and_the_step_goes_on(tab, running, place):
    few_pictures(place / "input")
    load(tab, trains("dies", 10_000, snapshot_every=5))
    tab.do(
        "() => { window.steps = []; app.api.addEventListener('graft.step', (event) =>"
        " window.steps.push(event.detail.step)) }"
    )
    tab.do("async () => { await app.queuePrompt(0, 1) }")
    tab.page.wait_for_function("() => window.steps.at(-1) >= 12 || app.lastExecutionError", timeout=WAIT)
    assert tab.do("() => app.lastExecutionError") is None
    panel = tab.page.locator(".graft-training .graft-status:visible")
    before, prompt, port = nodes(tab), tab.prompt(), running[0].port
    running[0].process.kill()
    running[0].process.wait()
    tab.page.get_by_text("Reconnecting").first.wait_for(timeout=WAIT)
    assert "step 1" in panel.inner_text(), "the curve stays on the page"
    tab.do("() => { window.steps = [] }")
    running[0] = Server(place, *named_front_end(), port=port)
    tab.page.wait_for_function("() => fetch('/queue').then(() => true, () => false)", timeout=WAIT, polling=500)
    assert nodes(tab) == before and tab.prompt() == prompt
    tab.page.wait_for_timeout(1500)  # the page connects again
    tab.errors.clear()
    tab.do("async () => { await app.queuePrompt(0, 1) }")
    tab.page.wait_for_function("() => window.steps.length > 0", timeout=WAIT)
    assert tab.do("() => window.steps[0]") > 5, "it went on from what was stored"
    tab.page.locator(".graft-stop:visible").click()
    tab.wait_until_idle()
    assert tab.errors == []
