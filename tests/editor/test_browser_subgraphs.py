"""What goes wrong inside a subgraph is said on the subgraph's own node."""

import json

import first_lora
from error_stories import alerts, forget_refusals
from serving import ROOT
from test_browser_dataset import drop_at, fill
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


def problem(editor):
    """What the subgraph's own node says is wrong."""
    return editor.page.locator(".graft-outside:visible > .graft-content > .graft-problem")


def test_what_is_wrong_inside_a_subgraph_is_said_on_its_own_node_until_it_is_right(editor):
    outer, dataset, _ = opens_the_first_template(editor)
    sets_folder(editor, "concept")
    editor.settle()
    before = editor.saved()
    said = problem(editor)
    sets_folder(editor, "no such folder")  # before the run
    there_is_none = "Dataset: there is no folder 'no such folder' in ComfyUI's input folder"
    said.get_by_text(f"{there_is_none}; put it there, or choose another", exact=True).wait_for()
    editor.page.wait_for_timeout(300)
    assert len(alerts(editor)) == 1
    sets_folder(editor, "concept")
    said.wait_for(state="hidden")
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
    assert inputs["folder"] == "no such folder" and not {"outside", "dataset"} & set(inputs)
    editor.do(SEND, ["execution_start", {"prompt_id": "x"}])  # of the next run
    said.wait_for(state="hidden")


def test_how_a_step_inside_a_subgraph_ended_is_said_on_its_own_node_until_the_next_run(editor):
    _, _, train = opens_the_first_template(editor)
    stored = {"run": "r", "key": "b", "step": 126, "history": HISTORY, "previews": []}
    states = [{"key": "c", "step": 4, "kind": "snapshot", "changed": 2.0, "best": None}]
    editor.page.route("**/graft/runs/r/b?*", lambda route: route.fulfill(json=stored))
    editor.page.route("**/graft/runs/r", lambda route: route.fulfill(json={"run": "r", "states": states}))
    said, status = problem(editor), editor.page.locator(".graft-outside:visible .graft-trained .graft-status")
    for number in (125, 126):
        step(editor, train, number)
    ended = {"node": train, "run": "r", "key": "a", "result": "b", "until": 250, "ended": "done"}
    editor.do(SEND, ["graft.end", ended])
    status.get_by_text("stopped at 126 of 250, kept; Run continues", exact=True).wait_for()
    editor.screenshot("stopped-in-a-subgraph")
    editor.do(SEND, ["execution_start", {"prompt_id": "x"}])
    for number in range(1, 6):
        step(editor, train, number)
    words = "The loss is not finite.\nLower the learning rate."
    editor.do(SEND, ["execution_error", {"node_id": train, "exception_message": words, "traceback": []}])
    status.get_by_text("stopped by an error; step 4 is kept, Run continues from there", exact=True).wait_for()
    assert said.inner_text().split("\n") == f"Train Step: {words}".split("\n")
    editor.screenshot("error-in-a-subgraph")
    step(editor, train, 5)  # it goes on
    status.get_by_text("stopped by an error").wait_for(state="hidden")
    assert said.inner_text().split("\n") == f"Train Step: {words}".split("\n")
    editor.do(SEND, ["execution_start", {"prompt_id": "x"}])
    said.wait_for(state="hidden")
    for route in ("**/graft/runs/r/b?*", "**/graft/runs/r"):
        editor.page.unroute(route)


def point_on(editor, node, dx, dy):
    """A point of the page, so far from the upper left of a node of the graph."""
    return editor.do(
        """([id, dx, dy]) => {
          const {pos} = app.graph.getNodeById(id)
          const box = app.canvas.canvas.getBoundingClientRect()
          const {offset, scale} = app.canvas.ds
          return [(pos[0] + dx + offset[0]) * scale + box.x, (pos[1] + dy + offset[1]) * scale + box.y]
        }""",
        [node, dx, dy],
    )


def test_the_panels_inside_are_shown_on_the_subgraphs_own_node_while_that_is_in_sight(editor):
    _, _, train = opens_the_first_template(editor)
    page = editor.page
    for number in range(1, 6):
        step(editor, train, number)
    outside = page.locator(".graft-outside:visible")
    outside.locator(".graft-status", has_text="step 5 of 250").wait_for()
    outside.get_by_role("tab", name="Images (16)").wait_for()
    outside.get_by_role("button", name="Stop and keep").wait_for()
    assert outside.locator(".graft-chart").bounding_box()["height"] >= 90
    editor.settle()
    overlap = "() => [...document.querySelectorAll('.graft-outside')].find((one) => one.checkVisibility())"
    assert editor.do(f"() => {{ const one = ({overlap})(); return one.scrollHeight - one.clientHeight }}") <= 1
    editor.enter(first_lora.BLUEPRINT)
    page.locator(".graft-training:visible .graft-status", has_text="step 5 of 250").wait_for()
    page.locator(".graft-dataset:visible").get_by_role("tab", name="Images (16)").wait_for()
    assert page.locator(".graft-trained").count() == 1, "it is one element, which moves"
    first_lora.leaves(editor)
    outside.locator(".graft-status", has_text="step 5 of 250").wait_for()
    assert "outside" not in json.dumps(editor.saved()["nodes"])


def test_files_dropped_on_a_subgraph_or_beside_it_go_to_the_dataset_inside(editor, tmp_path):
    outer, _, _ = opens_the_first_template(editor)
    page = editor.page
    outside = page.locator(".graft-outside:visible")
    outside.get_by_role("tab", name="Images").first.wait_for()
    files = [f"{name}.png" for name in "abc"]
    folder = fill(tmp_path / "beside", *files)
    many = [fill(tmp_path / "loose", *files) / name for name in files]
    nodes = editor.do("() => app.graph.nodes.length")
    for place, dropped, words in (
        ((200, 40), [folder], "3 files"),  # on its sockets
        ((-40, 300), [folder], "3 files"),  # on the canvas
        ((-40, 300), many, "3 files"),
    ):
        drop_at(editor, *point_on(editor, outer, *place), *dropped)
        outside.get_by_text(words).wait_for()
        outside.get_by_role("button", name="Cancel").click()
        outside.get_by_role("tab", name="Images").first.wait_for()
    assert editor.do("() => app.graph.nodes.length") == nodes, "the editor has made no nodes of them"
    drop_at(editor, *point_on(editor, outer, -40, 300), many[0])  # may be a workflow: the editor's
    page.wait_for_function("(before) => app.graph.nodes.length > before", arg=nodes)
    assert not outside.get_by_text("1 file").count()
    editor.screenshot("dropped-beside-a-subgraph")
    # front end 1.49 asks for the new Load Image's picture before it has its name
    editor.errors[:] = [error for error in editor.errors if "filename=undefined" not in error]
