"""The panels of the nodes that look into a LoRA stack, in a real browser: measured on the demo model, and taken over by
the rows with one click.
"""

import json

import pytest

DEMO = "graft_demo/zorp.safetensors"
SEND = "([name, detail]) => (app.api ?? window.comfyAPI.api.api).dispatchEvent(new CustomEvent(name, {detail}))"


def give(editor, node, *rows):
    text = json.dumps({"version": 1, "rows": rows})
    editor.do("([id, text]) => { app.graph.getNodeById(id).widgets[0].value = text }", [node, text])


@pytest.fixture
def stacks(editor):
    """(the editor, the ids of two LoRA stacks in a row with three rows, one of them off)."""
    editor.clear()
    first, second = editor.add("GraftLoRAStack", 40, 60), editor.add("GraftLoRAStack", 40, 420)
    editor.link(first, 0, second, "lora_stack")
    give(editor, first, {"file": DEMO, "model": 0.7, "blocks": "OUT=0.5"}, {"file": "zorp.safetensors", "on": False})
    give(editor, second, {"file": DEMO, "model": 0.3})
    return editor, first, second


def measured(editor, second, kind, values, *links):
    """The id of a node of this kind behind the stacks, after it has run on the demo model."""
    demo, text = editor.add("GraftDemo", 40, 700), editor.add("CLIPTextEncode", 340, 700, text="a zorp left")
    latent = editor.add("EmptyLatentImage", 340, 860, width=64, height=64, batch_size=1)
    node = editor.add(kind, 560, 60, **values)
    editor.do("(id) => { app.graph.getNodeById(id).size[0] = 460 }", node)
    editor.link(demo, 1, text, "clip")
    outputs = {"model": (demo, 0), "positive": (text, 0), "latent": (latent, 0), "lora_stack": (second, 0)}
    for name in links:
        editor.link(*outputs[name], node, name)
    editor.queue()
    editor.page.locator(".graft-panel [role=img]:visible").first.wait_for()
    editor.wait_until_idle()
    return node


def test_the_effect_is_shown_and_what_matters_is_kept_with_one_click(stacks):
    editor, first, second = stacks
    wanted = ("model", "lora_stack", "positive", "latent")
    node = measured(editor, second, "GraftLoRAEffect", {"levels": 2, "keep": 0.6}, *wanted)
    panel = editor.page.locator(".graft-effect:visible")
    assert panel.locator(".graft-bars").count() == 2 and panel.locator(".graft-kept").count() > 1
    assert f"{DEMO} at 0.7" in panel.inner_text() and "Kept: " in panel.inner_text()
    button = panel.locator(".graft-button")
    button.click()
    (used, off), (other,) = editor.rows(first), editor.rows(second)
    assert "=0" in used["blocks"] and "=0.5" in used["blocks"] and "=0" in other["blocks"]
    assert off == {**off, "on": False, "file": "zorp.safetensors", "blocks": ""}
    assert used["model"] == 0.7 and other["model"] == 0.3
    assert "written into 2 rows" in panel.inner_text()
    button.click()
    assert "already have these block weights" in panel.inner_text()
    saved = editor.saved()
    (kept,) = (one["properties"]["graft effect"] for one in saved["nodes"] if str(one["id"]) == str(node))
    assert [row["after"] for row in kept["rows"]] == [used["blocks"], other["blocks"]]
    editor.load(saved)
    assert panel.locator(".graft-bars").count() == 2, "the panel is there again"
    give(editor, second, {"file": "zorp.safetensors"})
    panel.locator(".graft-button").click()
    assert "The rows have changed" in panel.inner_text() and editor.rows(second)[0].get("blocks", "") == ""


def test_conflicts_are_shown_and_the_suggestion_is_taken_with_one_click(stacks):
    editor, first, second = stacks
    give(editor, first, {"file": DEMO, "model": 0.7}, {"file": DEMO, "model": -0.2, "blocks": "M=0.5"})
    measured(editor, second, "GraftLoRAConflicts", {"threshold": 0.2}, "model", "lora_stack")
    panel = editor.page.locator(".graft-conflicts:visible")
    assert panel.locator("[role=img]").count() == 3, "three pairs of three rows"
    assert "rows 1 and 2 cancel (-1.00)" in panel.inner_text()
    assert "+1.00" in panel.inner_text(), "of rows 1 and 3"
    panel.locator(".graft-button").click()
    (strong, weak), (other,) = editor.rows(first), editor.rows(second)
    assert strong["blocks"] == "" and "OUT=0" in weak["blocks"] and "OUT=0" in other["blocks"]
    assert "written into 2 rows" in panel.inner_text()
    editor.load(editor.saved())
    editor.queue()
    editor.wait_until_idle()
    panel.locator(".graft-button").wait_for(state="hidden")
    assert panel.locator(".graft-cells").count() >= 1, "nothing is left to change"


def test_what_sampling_finds_out_about_a_stack_is_said_at_its_node_until_the_next_run(editor):
    editor.clear()
    node = editor.add("GraftLoadLoRAs", 60, 60)
    said = editor.page.get_by_role("alert")
    text = "two MODELs of the same base sample at once"
    editor.do(SEND, ["execution_start", {"prompt_id": "mine"}])
    editor.do(SEND, ["graft.notice", {"node": str(node), "prompt": "of another page", "text": "not mine"}])
    editor.do(SEND, ["graft.notice", {"node": str(node), "prompt": "mine", "text": text}])
    said.get_by_text(text, exact=True).wait_for()
    assert not said.get_by_text("not mine").count()
    editor.do(SEND, ["execution_start", {"prompt_id": "the next"}])
    said.get_by_text(text, exact=True).wait_for(state="hidden")
