"""Every error that someone's first own LoRA can meet, on a real server: what is said where people look, what to do
next, and that nothing is lost. Each story is told on an open page; `place` is the folder that the server works in,
`own` an empty one.
"""

from __future__ import annotations

import base64
import json
import os
import re
from pathlib import Path
from typing import Any

from browsing import Editor
from graft_nodes.training.data.images import SUFFIXES
from serving import PATIENCE, UPLOAD_GB, lora, picture
from test_browser_dataset import PANEL, choose, drop, fill
from test_browser_rows import DROP, files_of
from test_browser_training import reached
from test_browser_workflows import look_at

WAIT = PATIENCE * 1000  # milliseconds
STATUS = ".graft-training .graft-status:visible"
HEIGHT = "(id) => app.graph.getNodeById(id).size[1]"
ERRORS = "(id) => app.lastNodeErrors[id].errors"
MARKED = f"([id, names]) => ({ERRORS})(id).map((one) => one.extra_info.input_name).sort().join() === names"
REFUSED = (
    "/prompt",
    "/graft/dataset/glance",
    "/graft/dataset/caption",
    "/graft/lora_upload",
    "Prompt execution failed",
    "PromptExecutionError",
)  # the page's own words for a refusal


def named(editor: Editor, words: str) -> str:
    """A name of this way to draw nodes: both use one server."""
    return f"{words} {'nodes2' if editor.modern else 'classic'}"


def fresh(editor: Editor) -> None:
    """An empty graph whose nodes get numbers of their own: front end 1.49 gives a node what one of its number had."""
    editor.clear()
    last = "window.graftLast = (window.graftLast ?? 0) + 100"
    editor.do(f"() => {{ (app.rootGraph ?? app.graph).last_node_id = {last} }}")


def links(editor: Editor, *ends: tuple[int, int, int, str]) -> None:
    for source, output, target, name in ends:
        editor.link(source, output, target, name)


def queue(editor: Editor) -> None:
    """Press Run, and know which errors are of before."""
    editor.do("() => { window.graftBefore = app.lastNodeErrors }")
    editor.queue()


def refused(editor: Editor, node: int, *names: str) -> list[dict[str, Any]]:
    """The errors of a node whose workflow was refused when it was queued, once the inputs of these names alone are
    marked: the host marks all that the node checks, and the page takes the others off a moment later. Nothing ran.
    """
    errors = "app.lastNodeErrors !== window.graftBefore && app.lastNodeErrors?.[id]"
    editor.page.wait_for_function(f"(id) => {errors}", arg=str(node))
    editor.page.wait_for_function(MARKED, arg=[str(node), ",".join(sorted(names))])
    assert editor.do("() => app.lastExecutionError") is None, "nothing ran"
    return editor.do(ERRORS, str(node))


def forget_refusals(editor: Editor) -> None:
    editor.settle()  # the browser notes a refused request after its answer is shown
    editor.dismiss()
    editor.errors[:] = [error for error in editor.errors if not any(words in error for words in REFUSED)]


def alerts(editor: Editor) -> list[str]:
    """What is said in words on the page."""
    return [words for words in editor.page.get_by_role("alert").all_inner_texts() if words.strip()]


def put(editor: Editor, node: int, **values: Any) -> None:
    """Give widgets of a node values."""
    script = """([id, values]) => {
      for (const [name, value] of Object.entries(values)) {
        const widget = app.graph.getNodeById(id).widgets.find((one) => one.name === name)
        widget.value = value
        widget.callback?.(value)
      }
    }"""
    editor.do(script, [node, values])


def training(editor: Editor, run: str, steps: int, **settings: Any) -> tuple[int, int]:
    """A workflow that trains on the demo's pictures; the ids of its Optimizer Settings and Train Step."""
    fresh(editor)
    demo, optimizer = editor.add("GraftDemo", 60, 700), editor.add("GraftOptimizer", 60, 60, **settings)
    data = editor.add("GraftDataset", 460, 60, folder="concept", resolution=64)
    start = editor.add("GraftTrainStart", 900, 60, run=run)
    step = editor.add("TrainStep", 1250, 60, steps=steps)
    links(
        editor,
        (demo, 2, data, "vae"),
        (demo, 1, data, "clip"),
        (demo, 0, start, "model"),
        (data, 0, start, "dataset"),
        (optimizer, 0, start, "settings"),
        (start, 0, step, "state"),
    )
    editor.settle()
    return optimizer, step


# --- before the run ---------------------------------------------------------------------------------------------------


def a_folder_that_is_not_there_is_refused_at_its_widget_and_said_in_the_panel(
    editor: Editor, place: Path, own: Path
) -> None:
    fresh(editor)
    demo, data = editor.add("GraftDemo", 60, 60), editor.add("GraftDataset", 400, 60, folder="no such folder")
    show = editor.add("PreviewImage", 900, 60)
    links(editor, (demo, 2, data, "vae"), (demo, 1, data, "clip"), (data, 1, show, "images"))
    queue(editor)
    said = editor.page.locator(".graft-dataset:visible").get_by_role("alert")
    said.get_by_text("there is no folder 'no such folder' in ComfyUI's input folder").wait_for()
    refused(editor, data, "folder")
    editor.screenshot("refused-folder")
    forget_refusals(editor)


def of_settings_that_the_node_checks_only_those_that_are_named_are_marked(
    editor: Editor, place: Path, own: Path
) -> None:
    """The host says it at all sixteen that Optimizer Settings checks itself."""
    settings, _ = training(editor, named(editor, "refused"), 1, warmup=2000, options="beta = 0.9")
    height = editor.do(HEIGHT, settings)
    queue(editor)
    names = {
        error["extra_info"]["input_name"] for error in refused(editor, settings, "warmup", "total_steps", "options")
    }
    words = (
        "Optimizer Settings: warmup steps is 2000 and total steps (schedule) only 1000; optimizer options: adamw has"
    )
    said = editor.page.locator(".graft-said:visible").get_by_role("alert")
    said.get_by_text(words).wait_for()
    editor.settle()
    marked = "(id) => app.graph.getNodeById(id).inputs.filter((one) => one.hasErrors).map((one) => one.name)"
    assert set(editor.do(marked, settings)) <= names
    editor.screenshot("refused-settings")
    forget_refusals(editor)
    assert editor.do(HEIGHT, settings) > height
    put(editor, settings, warmup=0, options="")
    queue(editor)
    said.wait_for(state="detached")
    editor.settle()
    assert editor.do(HEIGHT, settings) == height, "it is as it was"
    editor.wait_until_idle(WAIT)


def unreadable_block_weights_are_said_above_the_rows(editor: Editor, place: Path, own: Path) -> None:
    fresh(editor)
    rows = '{"version": 1, "rows": [{"file": "zorp.safetensors", "blocks": "IN=zero"}]}'
    stack, show = editor.add("GraftLoRAStack", 60, 60, rows=rows), editor.add("PreviewAny", 600, 60)
    editor.link(stack, 1, show, "source")
    queue(editor)
    said = editor.page.locator(".graft-stack:visible .graft-problem").first
    said.get_by_text("row 1 (zorp.safetensors)").wait_for()
    forget_refusals(editor)


def a_folder_that_cannot_be_trained_on_is_said_with_the_next_step_and_its_name_stays(
    editor: Editor, place: Path, own: Path
) -> None:
    empty = named(editor, "empty")
    (place / "input" / empty).mkdir()
    endings = ", ".join(SUFFIXES)
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
        fresh(editor)
        node = editor.add("GraftDataset", 100, 60, folder=folder)
        editor.page.get_by_role("alert").get_by_text(words, exact=True).wait_for()
        assert alerts(editor) == [words], "said once"
        assert editor.prompt()[str(node)]["inputs"]["folder"] == folder, "what was typed stays"
    demo, show = editor.add("GraftDemo", 700, 60), editor.add("PreviewImage", 1000, 60)
    links(editor, (demo, 2, node, "vae"), (demo, 1, node, "clip"), (node, 1, show, "images"))
    queue(editor)
    (error,) = refused(editor, node, "folder")
    assert words in error["details"]
    editor.settle()
    editor.dismiss()
    choose(editor, "concept")
    editor.page.locator(PANEL).get_by_role("tab", name="Images (16)").wait_for()
    editor.page.wait_for_timeout(300)
    assert not alerts(editor)
    forget_refusals(editor)


def dropped_files_that_cannot_be_taken_are_named_with_the_reason_and_nothing_is_written_over(
    editor: Editor, place: Path, own: Path
) -> None:
    name = named(editor, "drops")
    folder = fill(place / "input" / name, "a.png", "a.txt", "b.png")
    before = (folder / "a.png").read_bytes()
    (own / "twins").mkdir()
    fill(own / "twins", "c.png", "C.png")
    large, fake = own / "large.png", own / "fake.png"
    large.touch()
    os.truncate(large, 100 << 20)  # as many bytes as ComfyUI takes
    fake.write_bytes(b"no picture")
    (own / "notes.docx").touch()
    fresh(editor)
    editor.add("GraftDataset", 100, 60, folder=name)
    panel = editor.page.locator(PANEL)
    panel.get_by_role("tab", name="Images (2)").wait_for()
    too_large = "larger than 105 MB, left out: large.png. Copy them into ComfyUI\u2019s input folder."
    for dropped, words in (
        (own / "notes.docx", "no pictures or captions, left out: notes.docx"),
        (large, too_large),
    ):
        drop(editor, dropped)
        panel.get_by_role("alert").get_by_text(words, exact=True).wait_for()
        assert panel.get_by_role("tab", name="Images (2)").is_visible(), "what was shown stays"
    drop(editor, *(own / "twins" / one for one in ("C.png", "c.png")), large, own / "notes.docx")
    panel.get_by_role("button", name="Upload").wait_for()
    asked = panel.locator(".graft-asking").inner_text()
    assert not alerts(editor), "what was said of the drop before is gone"
    assert too_large in asked and "no pictures or captions, left out: notes.docx" in asked
    assert "the name of another dropped file, left out: c.png" in asked and "1 file (" in asked
    editor.screenshot("dropped-refused")
    panel.get_by_role("button", name="Cancel").click()
    panel.get_by_role("tab", name="Images (2)").wait_for()

    (own / "a.png").write_bytes(picture(64, 64, (1, 2, 3)))
    drop(editor, own / "a.png", fake)
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


def a_caption_that_the_disk_refuses_stays_in_its_field_until_it_can_be_saved(
    editor: Editor, place: Path, own: Path
) -> None:
    name = named(editor, "captions")
    folder = fill(place / "input" / name, "a.png")
    fresh(editor)
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


def rows_that_cannot_be_used_say_why_before_and_after_run_and_stay_as_they_are(
    editor: Editor, place: Path, own: Path
) -> None:
    missing = (
        "There is no file “gone.safetensors” in the loras folders. Copy it there and press R, or choose another file."
    )
    absent = "- row 1: no LoRA file 'gone.safetensors' in ComfyUI's loras folders"
    weights = "- row 1 (zorp.safetensors): blocks: expected numbers, got 'zero'"
    for row, before, after in (
        ({"file": "gone.safetensors"}, missing, absent),
        ({"file": "zorp.safetensors", "blocks": "IN=zero"}, "Block weights: expected numbers, got 'zero'", weights),
    ):
        fresh(editor)
        stack, show = (
            editor.add("GraftLoRAStack", 60, 60, rows=json.dumps({"version": 1, "rows": [row]})),
            editor.add("PreviewAny", 700, 60),
        )
        editor.link(stack, 1, show, "source")
        editor.page.locator(".graft-stack:visible .graft-note").get_by_text(before, exact=True).wait_for()
        queue(editor)
        (error,) = refused(editor, stack, "rows")
        assert after in error["details"]
        editor.page.get_by_role("alert").get_by_text(after).wait_for()  # at the node too
        assert editor.rows(stack) == [row]
    forget_refusals(editor)


def a_dropped_lora_that_cannot_be_taken_is_said_with_the_reason_and_no_file_is_written_over(
    editor: Editor, place: Path, own: Path
) -> None:
    """It is not a LoRA, is broken, has the name of another, or is larger than the server takes."""
    loras = place / "models" / "loras"
    lora(loras / "taken.safetensors")
    lora(own / "other.safetensors", {"note": "other"})
    before = (loras / "taken.safetensors").read_bytes()
    (own / "large.safetensors").write_bytes(bytes(3_000_000))
    fresh(editor)
    stack = editor.add("GraftLoRAStack", 200, 60)
    editor.page.locator(".graft-stack:visible").wait_for()
    for name, content, words in (
        ("notes.txt", b"notes", "“notes.txt” is not a LoRA: drop a .safetensors file"),
        ("no.safetensors", b"no tensors", "no.safetensors is not a whole safetensors file"),
        (
            "taken.safetensors",
            (own / "other.safetensors").read_bytes(),
            "there is another LoRA of this name (taken.safetensors), with other content",
        ),
        (
            "large.safetensors",
            (own / "large.safetensors").read_bytes(),
            f"'large.safetensors' has 0.003 GB, more than the {UPLOAD_GB} GB of GRAFT_UPLOAD_GB",
        ),
    ):
        editor.do(DROP, [".graft-stack", [(name, base64.b64encode(content).decode())]])
        editor.page.locator(".graft-stack:visible .graft-message").get_by_text(words).wait_for()
    editor.screenshot("dropped-lora-refused")
    assert files_of(editor, stack) == [] and (loras / "taken.safetensors").read_bytes() == before
    assert not [name for name in ("no.safetensors", "large.safetensors") if (loras / name).exists()]
    (loras / "taken.safetensors").unlink()
    forget_refusals(editor)


def a_preset_of_a_newer_version_is_refused_and_neither_it_nor_the_rows_are_changed(
    editor: Editor, place: Path, own: Path
) -> None:
    presets = place / "user" / "default" / "graft_lora_presets"
    presets.mkdir(parents=True, exist_ok=True)
    newer = '{"version": 2, "rows": [], "more": "of a newer Graft"}'
    (presets / "newer.json").write_text(newer)
    row = {"file": "zorp.safetensors", "model": 0.4}
    fresh(editor)
    stack = editor.add("GraftLoRAStack", 200, 60, rows=json.dumps({"version": 1, "rows": [row]}))
    editor.page.get_by_role("button", name="Presets").click()
    editor.page.locator(".graft-preset", has_text="newer").click()
    said = editor.page.locator(".graft-presets .graft-note")
    said.get_by_text("these rows have version 2, this Graft reads version 1: update Graft").wait_for()
    assert (presets / "newer.json").read_text() == newer and editor.rows(stack) == [row]
    editor.page.keyboard.press("Escape")
    (presets / "newer.json").unlink()


# --- in the middle of a run -------------------------------------------------------------------------------------------


def stored(editor: Editor, run: str) -> list[dict[str, Any]]:
    """The states of a run that the store has."""
    return editor.do("(run) => fetch(`/graft/runs/${run}`).then((r) => r.json())", run)["states"]


def an_error_during_training_is_said_with_what_is_kept_and_goes_with_the_next_run(
    editor: Editor, place: Path, own: Path
) -> None:
    """A learning rate with which training diverges after a few steps."""
    run, steps = named(editor, "diverges"), 60
    optimizer, step = training(editor, run, steps, learning_rate=10.0)
    look_at(editor, step)
    queue(editor)
    panel = editor.page.locator(".graft-training:visible")
    words = re.compile(r"^stopped by an error; step (\d+) is kept, Run continues from there$")
    ending = panel.get_by_text(words)
    ending.wait_for(timeout=WAIT)
    kept = int(words.match(ending.inner_text())[1])
    assert [(state["kind"], state["step"]) for state in stored(editor, run)] == [("partial", kept)]
    assert 0 < kept < steps
    editor.dismiss()  # the dialog of 1.27, which hides the page from readers of roles
    alert = panel.get_by_role("alert")
    alert.get_by_text("training has diverged").wait_for()
    (said,) = alert.all_inner_texts()
    assert said.startswith(f"Step {kept + 1} has loss ")
    assert f"The state after step {kept} is kept; use a lower learning rate or more warmup steps." in said
    editor.screenshot("error-in-training")
    put(editor, optimizer, learning_rate=1e-4)
    queue(editor)
    assert reached(editor, steps) == steps
    editor.wait_until_idle(WAIT)
    assert not panel.get_by_role("alert").count() and not ending.count()
    forget_refusals(editor)


def a_stopped_step_says_where_that_it_is_kept_and_that_run_continues_also_after_a_reload(
    editor: Editor, place: Path, own: Path
) -> None:
    run, steps = named(editor, "stopped"), 100_000
    _, step = training(editor, run, steps)
    look_at(editor, step)
    queue(editor)
    reached(editor, 3)
    begun = editor.saved()
    editor.page.locator(".graft-stop:visible").click()
    ending = editor.page.locator(STATUS).get_by_text(re.compile(rf"stopped at \d+ of {steps}, kept; Run continues"))
    ending.wait_for(timeout=WAIT)
    editor.wait_until_idle(WAIT)
    at = reached(editor)
    assert 3 <= at < steps and at == max(state["step"] for state in stored(editor, run))
    editor.screenshot("stopped")
    saved = editor.saved()
    editor.open()
    for workflow in (begun, saved):  # one that was saved before it stopped finds where it stopped too
        editor.load(workflow)
        look_at(editor, step)
        ending.wait_for(timeout=WAIT)
        assert reached(editor) == at
    put(editor, step, steps=at)
    queue(editor)
    ending.wait_for(state="detached", timeout=WAIT)  # only so many are asked for now
    editor.wait_until_idle(WAIT)
    assert reached(editor) == at


ALL = (
    a_folder_that_is_not_there_is_refused_at_its_widget_and_said_in_the_panel,
    of_settings_that_the_node_checks_only_those_that_are_named_are_marked,
    unreadable_block_weights_are_said_above_the_rows,
    a_folder_that_cannot_be_trained_on_is_said_with_the_next_step_and_its_name_stays,
    dropped_files_that_cannot_be_taken_are_named_with_the_reason_and_nothing_is_written_over,
    a_caption_that_the_disk_refuses_stays_in_its_field_until_it_can_be_saved,
    rows_that_cannot_be_used_say_why_before_and_after_run_and_stay_as_they_are,
    a_dropped_lora_that_cannot_be_taken_is_said_with_the_reason_and_no_file_is_written_over,
    a_preset_of_a_newer_version_is_refused_and_neither_it_nor_the_rows_are_changed,
    an_error_during_training_is_said_with_what_is_kept_and_goes_with_the_next_run,
    a_stopped_step_says_where_that_it_is_kept_and_that_run_continues_also_after_a_reload,
)
