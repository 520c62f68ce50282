"""What goes wrong is said where people look: in the panel of the node, with what to do next and what is kept."""

import json
import os

from serving import picture
from test_browser_dataset import PANEL, choose, drop, fill

SEND = "([name, detail]) => (app.api ?? window.comfyAPI.api.api).dispatchEvent(new CustomEvent(name, {detail}))"
HISTORY = {"loss": [0.1] * 126, "rate": [1e-4] * 126, "norm": [1.0] * 126, "validation": []}
HEIGHT = "(id) => app.graph.getNodeById(id).size[1]"
REFUSED = (
    "/prompt",
    "/graft/dataset/glance",
    "/graft/dataset/caption",
    "Prompt execution failed",
    "PromptExecutionError",
)  # the page's own words for a refusal


def step(editor, node, number, until=250):
    detail = {"node": str(node), "run": "r", "step": number, "until": until, "loss": 1 / number, "rate": 1e-4}
    editor.do(SEND, ["graft.step", {**detail, "norm": 1.0, "validation": None}])


def forget_refusals(editor):
    editor.settle()  # the browser notes a refused request after its answer is shown
    editor.dismiss()
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
    editor.settle()
    height = editor.do(HEIGHT, settings)
    editor.queue()
    editor.page.wait_for_function("(id) => app.lastNodeErrors?.[id]", arg=str(settings))
    editor.page.wait_for_timeout(800)
    errors = editor.do("(id) => app.lastNodeErrors[id].errors", str(settings))
    assert {one["extra_info"]["input_name"] for one in errors} == {"warmup", "total_steps", "options"}
    marked = "(id) => app.graph.getNodeById(id).inputs.filter((one) => one.hasErrors).map((one) => one.name)"
    assert set(editor.do(marked, settings)) <= {"warmup", "total_steps", "options"}
    words = (
        "Optimizer Settings: warmup steps is 2000 and total steps (schedule) only 1000; optimizer options: adamw has"
    )
    said = editor.page.locator(".graft-said:visible").get_by_role("alert")
    said.get_by_text(words).wait_for()
    editor.screenshot("refused-settings")
    forget_refusals(editor)
    assert editor.do(HEIGHT, settings) > height
    editor.do(SEND, ["execution_start", {"prompt_id": "x"}])  # of the next run
    said.wait_for(state="detached")
    editor.settle()
    assert editor.do(HEIGHT, settings) == height, "it is as it was"


def test_unreadable_block_weights_are_said_above_the_rows(editor):
    editor.clear()
    rows = '{"version": 1, "rows": [{"file": "zorp.safetensors", "blocks": "IN=zero"}]}'
    stack, show = editor.add("GraftLoRAStack", 60, 60, rows=rows), editor.add("PreviewAny", 600, 60)
    editor.link(stack, 1, show, "source")
    editor.queue()
    said = editor.page.locator(".graft-stack:visible .graft-problem").first
    said.get_by_text("row 1 (zorp.safetensors)").wait_for()
    forget_refusals(editor)


def alerts(editor):
    """What is said in words on the page."""
    return [words for words in editor.page.get_by_role("alert").all_inner_texts() if words.strip()]


def test_a_folder_that_cannot_be_trained_on_is_said_with_the_next_step_and_its_name_stays(editor, place):
    empty = "empty nodes2" if editor.modern else "empty classic"
    (place / "input" / empty).mkdir()
    endings = ".png, .jpg, .jpeg, .jfif, .webp, .avif, .gif, .bmp"
    outside = "is outside ComfyUI's input folder; give a folder inside it"
    for folder, words in (
        ("nowhere", "there is no folder 'nowhere' in ComfyUI's input folder; put it there, or choose another"),
        ("../loras", f"image folder '../loras' {outside}"),
        ("/etc", f"image folder '/etc' {outside}"),
        (
            empty,
            f"Dataset: folder '{empty}' has no pictures (expected {endings}). Put some there, or choose another"
            " folder.",
        ),
    ):
        editor.clear()
        node = editor.add("GraftDataset", 100, 60, folder=folder)
        editor.page.get_by_role("alert").get_by_text(words, exact=True).wait_for()
        assert alerts(editor) == [words], "said once"
        assert editor.prompt()[str(node)]["inputs"]["folder"] == folder, "what was typed stays"
    demo, show = editor.add("GraftDemo", 700, 60), editor.add("PreviewImage", 1000, 60)
    for source, output, target, name in ((demo, 2, node, "vae"), (demo, 1, node, "clip"), (node, 1, show, "images")):
        editor.link(source, output, target, name)
    editor.queue()
    editor.page.wait_for_function("(id) => app.lastNodeErrors?.[id]", arg=str(node))
    errors = editor.do("(id) => app.lastNodeErrors[id].errors", str(node))  # one for each input that the node checks
    assert "folder" in {error["extra_info"]["input_name"] for error in errors}
    assert all(words in error["details"] for error in errors)
    assert editor.do("() => app.lastExecutionError") is None, "nothing ran"
    editor.settle()
    editor.dismiss()
    choose(editor, "concept")
    editor.page.locator(PANEL).get_by_role("tab", name="Images (16)").wait_for()
    editor.page.wait_for_timeout(300)
    assert not alerts(editor)
    forget_refusals(editor)


def test_dropped_files_that_cannot_be_taken_are_named_with_the_reason_and_nothing_is_written_over(
    editor, place, tmp_path
):
    name = "drops nodes2" if editor.modern else "drops classic"
    folder = fill(place / "input" / name, "a.png", "a.txt", "b.png")
    before = (folder / "a.png").read_bytes()
    (tmp_path / "twins").mkdir()
    fill(tmp_path / "twins", "c.png", "C.png")
    large, fake = tmp_path / "large.png", tmp_path / "fake.png"
    large.touch()
    os.truncate(large, 100 << 20)  # as many bytes as ComfyUI takes
    fake.write_bytes(b"no picture")
    (tmp_path / "notes.docx").touch()
    editor.clear()
    editor.add("GraftDataset", 100, 60, folder=name)
    panel = editor.page.locator(PANEL)
    panel.get_by_role("tab", name="Images (2)").wait_for()
    too_large = "larger than 105 MB, left out: large.png. Copy them into ComfyUI\u2019s input folder."
    for dropped, words in (
        (tmp_path / "notes.docx", "no pictures or captions, left out: notes.docx"),
        (large, too_large),
    ):
        drop(editor, dropped)
        panel.get_by_role("alert").get_by_text(words, exact=True).wait_for()
        assert panel.get_by_role("tab", name="Images (2)").is_visible(), "what was shown stays"
    drop(editor, *(tmp_path / "twins" / one for one in ("C.png", "c.png")), large, tmp_path / "notes.docx")
    panel.get_by_role("button", name="Upload").wait_for()
    asked = panel.locator(".graft-asking").inner_text()
    assert not alerts(editor), "what was said of the drop before is gone"
    assert too_large in asked and "no pictures or captions, left out: notes.docx" in asked
    assert "the name of another dropped file, left out: c.png" in asked and "1 file (" in asked
    editor.screenshot("dropped-refused")
    panel.get_by_role("button", name="Cancel").click()
    panel.get_by_role("tab", name="Images (2)").wait_for()

    (tmp_path / "a.png").write_bytes(picture(64, 64, (1, 2, 3)))
    drop(editor, tmp_path / "a.png", fake)
    panel.get_by_role("button", name="Upload").click()
    panel.get_by_role("alert").get_by_text(f"Already in {name}: a.png", exact=True).wait_for()
    panel.get_by_role("button", name="Skip these").click()
    panel.get_by_text("fake.png: not a picture that can be read", exact=False).wait_for()  # without a click
    assert (folder / "a.png").read_bytes() == before and sorted(one.name for one in folder.iterdir()) == [
        "a.png",
        "a.txt",
        "b.png",
        "fake.png",
    ]
    editor.screenshot("dropped-no-picture")


def test_a_caption_that_the_disk_refuses_stays_in_its_field_until_it_can_be_saved(editor, place):
    name = "captions nodes2" if editor.modern else "captions classic"
    folder = fill(place / "input" / name, "a.png")
    editor.clear()
    editor.add("GraftDataset", 100, 60, folder=name)
    panel = editor.page.locator(PANEL)
    panel.get_by_role("button", name="Edit the caption of a.png").click()
    field = panel.get_by_role("textbox", name="Caption of a.png")
    field.fill("my words")
    (folder / "a.txt").mkdir()
    panel.get_by_role("button", name="Save").click()
    words = "a.txt is a folder, but the caption is to be a file of that name: rename the folder"
    panel.get_by_text(f"Not saved: {words}", exact=True).wait_for()
    assert field.input_value() == "my words"
    editor.screenshot("caption-not-saved")
    panel.get_by_role("button", name="Cancel").click()
    panel.get_by_role("button", name="Edit the caption of a.png").click()
    panel.get_by_role("alert").get_by_text(words, exact=True).wait_for()
    (folder / "a.txt").rmdir()
    panel.get_by_role("button", name="Edit the caption of a.png").click()
    field.fill("my words")
    panel.get_by_role("button", name="Save").click()
    panel.get_by_role("button", name="Undo caption").wait_for()
    assert (folder / "a.txt").read_text() == "my words"
    forget_refusals(editor)


def test_rows_that_cannot_be_used_say_why_before_and_after_run_and_stay_as_they_are(editor):
    missing = (
        "There is no file “gone.safetensors” in the loras folders. Copy it there and press R, or choose another file."
    )
    refused = "- row 1: no LoRA file 'gone.safetensors' in ComfyUI's loras folders"
    weights = "- row 1 (zorp.safetensors): blocks: expected numbers, got 'zero'"
    for row, before, after in (
        ({"file": "gone.safetensors"}, missing, refused),
        ({"file": "zorp.safetensors", "blocks": "IN=zero"}, "Block weights: expected numbers, got 'zero'", weights),
    ):
        editor.clear()
        stack, show = (
            editor.add("GraftLoRAStack", 60, 60, rows=json.dumps({"version": 1, "rows": [row]})),
            editor.add("PreviewAny", 700, 60),
        )
        editor.link(stack, 1, show, "source")
        editor.page.locator(".graft-stack:visible .graft-note").get_by_text(before, exact=True).wait_for()
        editor.queue()
        editor.page.wait_for_function("(id) => app.lastNodeErrors?.[id]", arg=str(stack))
        (error,) = editor.do("(id) => app.lastNodeErrors[id].errors", str(stack))
        assert error["extra_info"]["input_name"] == "rows" and after in error["details"]
        editor.page.get_by_role("alert").get_by_text(after).wait_for()  # at the node too
        assert editor.rows(stack) == [row]
        assert editor.do("() => app.lastExecutionError") is None, "nothing ran"
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
