"""What goes wrong inside a subgraph is said on the subgraph's own node."""

import json

import first_lora
from error_stories import HEIGHT, alerts, forget_refusals
from serving import ROOT
from test_browser_workflows import look_at

SEND = "([name, detail]) => (app.api ?? window.comfyAPI.api.api).dispatchEvent(new CustomEvent(name, {detail}))"
HISTORY = {"loss": [0.1] * 126, "rate": [1e-4] * 126, "norm": [1.0] * 126, "validation": []}


def step(editor, node, number, until=250):
    detail = {"node": str(node), "run": "r", "step": number, "until": until, "loss": 1 / number, "rate": 1e-4}
    editor.do(SEND, ["graft.step", {**detail, "norm": 1.0, "validation": None}])


def opens_the_first_template(editor):
    """The execution ids of its Dataset and its Train Step, which are in the subgraph, and the subgraph's own node."""
    editor.clear()
    file = ROOT / "example_workflows" / f"{first_lora.TEMPLATE}.json"
    editor.load(json.loads(file.read_text(encoding="utf-8")))
    outer = editor.titled(first_lora.BLUEPRINT)
    inside = "([id, type]) => app.graph.getNodeById(id).subgraph.nodes.find((one) => one.type === type).id"
    look_at(editor, outer)
    return outer, *(f"{outer}:{editor.do(inside, [outer, kind])}" for kind in ("GraftDataset", "TrainStep"))


def sets_folder(editor, name):
    editor.do(f"(values) => ({first_lora.SET})([{first_lora.outer()}, values])", {"folder": name})
    editor.page.mouse.click(800, 880)  # the editor looks for changes where someone does something


def test_what_is_wrong_inside_a_subgraph_is_said_on_its_own_node_until_it_is_right(editor):
    outer, dataset, _ = opens_the_first_template(editor)
    sets_folder(editor, "concept")
    editor.settle()
    height, before = editor.do(HEIGHT, outer), editor.saved()
    said = editor.page.locator(".graft-said:visible").get_by_role("alert")
    sets_folder(editor, "no such folder")  # before the run
    there_is_none = "Dataset: there is no folder 'no such folder' in ComfyUI's input folder"
    said.get_by_text(f"{there_is_none}; put it there, or choose another", exact=True).wait_for()
    editor.page.wait_for_timeout(300)
    assert len(alerts(editor)) == 1
    sets_folder(editor, "concept")
    said.wait_for(state="detached")
    editor.settle()
    assert editor.do(HEIGHT, outer) == height, "it is as it was"
    now, then = (
        next(node for node in workflow["nodes"] if str(node["id"]) == str(outer))["widgets_values"]
        for workflow in (editor.saved(), before)
    )
    assert now == then

    sets_folder(editor, "no such folder")
    said.get_by_text(f"{there_is_none}; put it there").wait_for()
    editor.queue()  # and by the run
    editor.page.wait_for_function("(id) => app.lastNodeErrors?.[id]", arg=dataset)
    editor.page.wait_for_timeout(800)
    said.get_by_text(there_is_none).wait_for()  # as the run says it, or as the panel says it once more
    assert len(alerts(editor)) == 1, "said once"
    editor.screenshot("refused-in-a-subgraph")
    forget_refusals(editor)
    inputs = editor.prompt()[dataset]["inputs"]
    assert inputs["folder"] == "no such folder" and not {"said", "dataset"} & set(inputs)
    editor.do(SEND, ["execution_start", {"prompt_id": "x"}])  # of the next run
    said.wait_for(state="detached")


def test_how_a_step_inside_a_subgraph_ended_is_said_on_its_own_node_until_the_next_run(editor):
    _, _, train = opens_the_first_template(editor)
    stored = {"run": "r", "key": "b", "step": 126, "history": HISTORY, "previews": []}
    states = [{"key": "c", "step": 4, "kind": "snapshot", "changed": 2.0, "best": None}]
    editor.page.route("**/graft/runs/r/b?*", lambda route: route.fulfill(json=stored))
    editor.page.route("**/graft/runs/r", lambda route: route.fulfill(json={"run": "r", "states": states}))
    said = editor.page.locator(".graft-said:visible").get_by_role("alert")
    for number in (125, 126):
        step(editor, train, number)
    ended = {"node": train, "run": "r", "key": "a", "result": "b", "until": 250, "ended": "done"}
    editor.do(SEND, ["graft.end", ended])
    said.get_by_text("Train Step: stopped at 126 of 250, kept; Run continues", exact=True).wait_for()
    editor.screenshot("stopped-in-a-subgraph")
    editor.do(SEND, ["execution_start", {"prompt_id": "x"}])
    said.wait_for(state="detached")
    for number in range(1, 6):
        step(editor, train, number)
    words = "The loss is not finite.\nLower the learning rate."
    editor.do(SEND, ["execution_error", {"node_id": train, "exception_message": words, "traceback": []}])
    kept = "Train Step: stopped by an error; step 4 is kept, Run continues from there"
    said.get_by_text(kept, exact=True).wait_for()
    assert said.inner_text().split("\n") == [*f"Train Step: {words}".split("\n"), kept]
    editor.screenshot("error-in-a-subgraph")
    step(editor, train, 5)  # it goes on
    editor.page.wait_for_timeout(500)
    assert said.inner_text().split("\n") == f"Train Step: {words}".split("\n")
    editor.do(SEND, ["execution_start", {"prompt_id": "x"}])
    said.wait_for(state="detached")
    for route in ("**/graft/runs/r/b?*", "**/graft/runs/r"):
        editor.page.unroute(route)
