"""What goes wrong is said where people look: in the panel of the node, with what to do next and what is kept."""

SEND = "([name, detail]) => (app.api ?? window.comfyAPI.api.api).dispatchEvent(new CustomEvent(name, {detail}))"
HISTORY = {"loss": [0.1] * 126, "rate": [1e-4] * 126, "norm": [1.0] * 126, "validation": []}
REFUSED = (
    "/prompt",
    "/graft/dataset/glance",
    "Prompt execution failed",
    "PromptExecutionError",
)  # the page's own words for a refusal


def step(editor, node, number, until=250):
    detail = {"node": str(node), "run": "r", "step": number, "until": until, "loss": 1 / number, "rate": 1e-4}
    editor.do(SEND, ["graft.step", {**detail, "norm": 1.0, "validation": None}])


def forget_refusals(editor):
    editor.errors[:] = [error for error in editor.errors if not any(words in error for words in REFUSED)]


def test_a_folder_that_is_not_there_is_refused_at_its_widget_and_said_in_the_panel(editor):
    editor.clear()
    demo, data = editor.add("GraftDemo", 60, 60), editor.add("GraftDataset", 400, 60, folder="no such folder")
    show = editor.add("PreviewImage", 900, 60)
    for source, output, target, name in ((demo, 2, data, "vae"), (demo, 1, data, "clip"), (data, 1, show, "images")):
        editor.link(source, output, target, name)
    editor.queue()
    said = editor.page.locator(".graft-dataset:visible").get_by_role("alert")
    said.get_by_text("there is no folder 'no such folder' in ComfyUI's input folder").wait_for()
    errors = editor.do("(id) => app.lastNodeErrors[id].errors", str(data))
    assert [one["extra_info"]["input_name"] for one in errors] == ["folder"]
    assert editor.do("() => app.lastExecutionError") is None
    editor.screenshot("refused-folder")
    forget_refusals(editor)


def test_of_settings_that_the_node_checks_only_those_that_are_named_are_marked(editor):
    """The host says it at all sixteen that Optimizer Settings checks itself."""
    editor.clear()
    settings = editor.add("GraftOptimizer", 60, 60, warmup=2000, options="beta = 0.9")
    start, demo, data = (
        editor.add("GraftTrainStart", 900, 60),
        editor.add("GraftDemo", 60, 700),
        editor.add("GraftDataset", 460, 60, folder="concept"),
    )
    step = editor.add("TrainStep", 1250, 60)
    for source, output, target, name in (
        (demo, 2, data, "vae"),
        (demo, 1, data, "clip"),
        (demo, 0, start, "model"),
        (data, 0, start, "dataset"),
        (settings, 0, start, "optimizer"),
        (start, 0, step, "state"),
    ):
        editor.link(source, output, target, name)
    editor.queue()
    editor.page.wait_for_function("(id) => app.lastNodeErrors?.[id]", arg=str(settings))
    editor.page.wait_for_timeout(800)
    errors = editor.do("(id) => app.lastNodeErrors[id].errors", str(settings))
    assert {one["extra_info"]["input_name"] for one in errors} == {"warmup", "total_steps", "options"}
    marked = "(id) => app.graph.getNodeById(id).inputs.filter((one) => one.hasErrors).map((one) => one.name)"
    assert set(editor.do(marked, settings)) <= {"warmup", "total_steps", "options"}
    editor.screenshot("refused-settings")
    forget_refusals(editor)


def test_unreadable_block_weights_are_said_above_the_rows(editor):
    editor.clear()
    rows = '{"version": 1, "rows": [{"file": "zorp.safetensors", "blocks": "IN=zero"}]}'
    stack, show = editor.add("GraftLoRAStack", 60, 60, rows=rows), editor.add("PreviewAny", 600, 60)
    editor.link(stack, 1, show, "source")
    editor.queue()
    said = editor.page.locator(".graft-stack:visible .graft-problem").first
    said.get_by_text("row 1 (zorp.safetensors)").wait_for()
    forget_refusals(editor)


def test_an_error_during_training_is_said_with_what_is_kept_and_goes_with_the_next_run(editor):
    editor.clear()
    node = editor.add("TrainStep", 100, 100)
    editor.page.wait_for_timeout(300)
    states = [{"key": "b", "step": 90, "kind": "result", "changed": 1.0, "best": None}]
    states.append({"key": "c", "step": 4, "kind": "snapshot", "changed": 2.0, "best": None})
    editor.page.route("**/graft/runs/r", lambda route: route.fulfill(json={"run": "r", "states": states}))
    for number in range(1, 6):
        step(editor, node, number)
    words = "The loss is not finite.\nLower the learning rate."
    editor.do(SEND, ["execution_error", {"node_id": str(node), "exception_message": words, "traceback": []}])
    panel = editor.page.locator(".graft-training:visible")
    panel.get_by_text("stopped by an error; step 4 is kept, Run continues from there").wait_for()
    assert panel.get_by_role("alert").inner_text().split("\n") == words.split("\n")
    editor.screenshot("error-in-training")
    editor.do(SEND, ["execution_start", {"prompt_id": "x"}])
    editor.page.wait_for_timeout(300)
    assert not panel.get_by_role("alert").count()
    editor.page.unroute("**/graft/runs/r")


def test_a_stopped_step_says_where_that_it_is_kept_and_that_run_continues_also_after_a_reload(editor):
    editor.clear()
    node = editor.add("TrainStep", 100, 100)
    editor.page.wait_for_timeout(300)
    stored = {"run": "r", "key": "b", "step": 126, "history": HISTORY, "previews": []}
    editor.page.route("**/graft/runs/r/b", lambda route: route.fulfill(json=stored))
    for number in (125, 126):
        step(editor, node, number)
    output = {"graft_run": [{"run": "r", "key": "b", "until": 250}]}
    editor.do("([id, output]) => app.canvas.graph.getNodeById(id).onExecuted(output)", [node, output])
    words = "stopped at 126 of 250, kept; Run continues"
    editor.page.locator(".graft-training:visible").get_by_text(words).wait_for()
    editor.screenshot("stopped")
    saved = editor.saved()
    editor.clear()
    editor.load(saved)
    editor.page.locator(".graft-training:visible").get_by_text(words).wait_for()
    whole = {"graft_run": [{"run": "r", "key": "b", "until": 126}]}
    editor.do("(output) => app.graph.nodes[0].onExecuted(output)", whole)
    editor.page.wait_for_timeout(500)
    assert words not in editor.page.locator(".graft-training:visible").inner_text(), "only 126 were asked for now"
    editor.page.unroute("**/graft/runs/r/b")
