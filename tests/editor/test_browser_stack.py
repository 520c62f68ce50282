"""LoRA rows edited by mouse and keyboard in a real browser, at top level and in a subgraph, after copy, undo and
reload.
"""

import json

import pytest

EVIL = 'Zürich\'s "best" <script>window.broken=1</script> ☃ & co.safetensors'
NAMES = [EVIL, "zorp.safetensors", *(f"style/paper cut {number:04d}.safetensors" for number in range(5000))]


@pytest.fixture
def stack(editor):
    """(the editor, the id of a fresh LoRA stack in an empty graph); the host has 5,002 LoRAs."""
    editor.page.route("**/graft/loras*", lambda route: route.fulfill(json={"loras": NAMES}))
    editor.page.route("**/graft/near_loras*", lambda route: route.fulfill(json={"near": ["zorp.safetensors"]}))
    editor.page.route("**/graft/lora_preview*", lambda route: route.fulfill(json={"picture": "", "problem": ""}))
    editor.clear()
    editor.do("() => app.refreshComboInNodes()")
    node = editor.add("GraftLoRAStack", 200, 150)
    editor.page.wait_for_timeout(500)
    yield editor, node
    editor.page.unroute("**/graft/lora_preview*")
    editor.page.unroute("**/graft/loras*")
    editor.page.unroute("**/graft/near_loras*")


def choose(editor, query):
    editor.page.locator(".graft-add:visible").first.click()
    editor.page.locator(".graft-picker-search:visible").fill(query)
    editor.page.keyboard.press("Enter")
    editor.page.wait_for_timeout(200)


def test_rows_by_mouse(stack):
    editor, node = stack
    choose(editor, "zorp")
    choose(editor, "Zürich")
    choose(editor, "cut 0042")
    assert [row["file"] for row in editor.rows(node)] == ["zorp.safetensors", EVIL, "style/paper cut 0042.safetensors"]
    assert editor.do("window.broken") is None
    editor.page.locator(".graft-on:visible").nth(1).click()
    handle = editor.page.locator(".graft-handle:visible").nth(2).bounding_box()
    first = editor.page.locator(".graft-row:visible").first.bounding_box()
    editor.page.mouse.move(handle["x"] + 5, handle["y"] + 5)
    editor.page.mouse.down()
    editor.page.mouse.move(handle["x"] + 5, first["y"] + 2, steps=8)
    editor.page.mouse.up()
    strength = editor.page.locator(".graft-model:visible").first.bounding_box()
    editor.page.mouse.move(strength["x"] + 20, strength["y"] + 5)
    editor.page.mouse.down()
    editor.page.mouse.move(strength["x"] - 10, strength["y"] + 5, steps=5)
    editor.page.mouse.up()
    editor.page.locator(".graft-info-button:visible").nth(1).click()
    about = editor.page.locator(".graft-about:visible")
    about.get_by_text("zorp, <b>bold</b>").wait_for()
    for name, value in (
        ("Base model", "SD 1.5"),
        ("Rank", "4"),
        ("Alpha", "2"),
        ("ToDo", "factor 2"),
        ("Layers", "LoRA 1"),
    ):
        assert f"{name}\n{value}\n" in about.inner_text(), about.inner_text()
    editor.page.locator(".graft-more:visible").nth(2).click()
    editor.page.get_by_label("Block weights of").fill("IN=0, OUT05=0.5")
    editor.page.keyboard.press("Tab")
    rows = editor.rows(node)
    assert [row["file"] for row in rows] == ["style/paper cut 0042.safetensors", "zorp.safetensors", EVIL]
    assert (
        [row["on"] for row in rows] == [True, True, False]
        and rows[0]["model"] == 0.7
        and rows[2]["blocks"] == "IN=0, OUT05=0.5"
    )
    editor.screenshot("lora-stack")
    editor.page.locator(".graft-remove:visible").nth(1).click()
    assert [row["file"] for row in editor.rows(node)] == ["style/paper cut 0042.safetensors", EVIL]
    assert json.loads(editor.prompt()[str(node)]["inputs"]["rows"])["rows"] == editor.rows(node)


def test_rows_by_keyboard_alone(stack):
    editor, node = stack
    keyboard = editor.page.keyboard
    editor.page.locator(".graft-add:visible").focus()
    keyboard.press("Enter")
    keyboard.type("paper 4999")
    keyboard.press("Enter")
    keyboard.type("0.8")
    keyboard.press("Tab")
    keyboard.type("0.25")
    keyboard.press("Enter")
    editor.page.locator(".graft-add:visible").focus()
    keyboard.press("Enter")
    keyboard.type("zorp")
    keyboard.press("ArrowDown")
    keyboard.press("ArrowUp")
    keyboard.press("Enter")
    keyboard.press("ArrowUp")  # of the number: one step of 0.05
    keyboard.press("Tab")
    editor.page.locator(".graft-handle:visible").nth(1).focus()
    keyboard.press("ArrowUp")
    assert editor.do("document.activeElement.classList.contains('graft-handle')")
    editor.page.locator(".graft-on:visible").nth(1).focus()
    keyboard.press("Space")
    rows = editor.rows(node)
    assert [(row["file"], row["model"], row["clip"], row["on"]) for row in rows] == [
        ("zorp.safetensors", 1.05, 1, True),
        ("style/paper cut 4999.safetensors", 0.8, 0.25, False),
    ]
    editor.page.locator(".graft-remove:visible").first.focus()
    keyboard.press("Enter")
    assert len(editor.rows(node)) == 1
    assert editor.do("document.activeElement.classList.contains('graft-remove')")
    editor.page.locator(".graft-add:visible").focus()
    keyboard.press("Enter")
    keyboard.press("Escape")
    assert editor.do("document.activeElement.classList.contains('graft-add')") and len(editor.rows(node)) == 1


def test_a_long_list_stays_short_on_the_page(stack):
    editor, _ = stack
    editor.page.locator(".graft-add:visible").click()
    assert editor.page.locator(".graft-picker-option:visible").count() == 200
    assert "5002" in editor.page.locator(".graft-picker-count:visible").inner_text()
    editor.page.locator(".graft-picker-search:visible").fill("paper cut 31 4")
    assert editor.page.locator(".graft-picker-option:visible").count() < 200
    editor.page.locator(".graft-picker-search:visible").fill("no such thing")
    assert editor.page.locator(".graft-picker-count:visible").inner_text() == "no such LoRA"
    editor.page.keyboard.press("Escape")
    assert editor.page.locator(".graft-picker:visible").count() == 0


def test_undo_takes_back_one_change_at_a_time(stack):
    editor, node = stack
    choose(editor, "zorp")
    choose(editor, "cut 0007")
    editor.page.locator(".graft-on:visible").first.click()
    editor.undo()
    assert [row["on"] for row in editor.rows(node)] == [True, True]
    assert editor.page.locator(".graft-on:visible").first.is_checked()
    editor.undo()
    assert len(editor.rows(node)) == 1
    assert editor.page.locator(".graft-row:visible").count() == 1


def test_saved_loaded_and_copied_it_is_the_same(stack):
    editor, node = stack
    choose(editor, "zorp")
    choose(editor, "Zürich")
    before, prompt = editor.saved(), editor.prompt()
    editor.clear()
    editor.load(before)
    assert editor.prompt() == prompt
    again = editor.saved()
    assert [one.get("widgets_values") for one in again["nodes"]] == [
        one.get("widgets_values") for one in before["nodes"]
    ]
    editor.do(
        "(id) => { const c = app.canvas; c.selectNode(c.graph.getNodeById(id)); c.copyToClipboard();"
        " c.pasteFromClipboard() }",
        node,
    )
    editor.page.wait_for_timeout(500)
    editor.do("() => { app.graph.nodes[1].pos = [700, 150]; app.canvas.setDirty(true, true) }")
    editor.page.wait_for_timeout(300)
    first, second = editor.do("() => app.graph.nodes.map((one) => one.id)")
    assert editor.rows(first) == editor.rows(second)
    editor.page.locator(".graft-on:visible").last.click()
    assert [row["on"] for row in editor.rows(first)] != [row["on"] for row in editor.rows(second)]


def test_in_a_subgraph(stack):
    editor, node = stack
    choose(editor, "zorp")
    editor.wrap([node], "group")
    editor.enter("group")
    choose(editor, "cut 0001")
    inner = editor.do("() => app.canvas.graph.nodes.find((one) => one.type === 'GraftLoRAStack').id")
    assert [row["file"] for row in editor.rows(inner)] == ["zorp.safetensors", "style/paper cut 0001.safetensors"]
    (sent,) = [one["inputs"]["rows"] for one in editor.prompt().values() if one["class_type"] == "GraftLoRAStack"]
    assert json.loads(sent)["rows"] == editor.rows(inner)
    saved = editor.saved()
    editor.clear()
    editor.load(saved)
    (sent,) = [one["inputs"]["rows"] for one in editor.prompt().values() if one["class_type"] == "GraftLoRAStack"]
    assert len(json.loads(sent)["rows"]) == 2


def test_a_missing_file_is_flagged_before_queueing_and_can_be_replaced(stack):
    editor, node = stack
    rows = json.dumps({"version": 1, "rows": [{"file": "old/zorp.safetensors", "on": True, "model": 0.5, "clip": 0.5}]})
    editor.do("([id, rows]) => { app.graph.getNodeById(id).widgets[0].value = rows }", [node, rows])
    note = editor.page.locator(".graft-note:visible")
    note.get_by_text("There is no file").wait_for()
    assert "old/zorp.safetensors" in note.inner_text()
    editor.screenshot("lora-stack-missing")
    editor.page.locator(".graft-link:visible").first.click()
    (row,) = editor.rows(node)
    assert row["file"] == "zorp.safetensors" and row["model"] == 0.5
    editor.page.wait_for_timeout(300)
    assert note.count() == 0


def flagged(editor, node, *rows):
    """Which rows of a stack have a note that their file is not there."""
    text = json.dumps({"version": 1, "rows": [{"file": row} if isinstance(row, str) else row for row in rows]})
    editor.do("([id, text]) => { app.graph.getNodeById(id).widgets[0].value = text }", [node, text])
    editor.page.wait_for_timeout(500)
    return [row.locator(".graft-note").is_visible() for row in editor.page.locator(".graft-row:visible").all()]


def test_only_rows_that_are_on_are_flagged_and_one_that_is_no_name_hides_no_other(stack):
    editor, node = stack
    near = "**/graft/near_loras?name="
    editor.page.route(
        near, lambda route: route.fulfill(status=400, json={"error": "name is missing or not a valid name: got ''"})
    )
    assert flagged(editor, node, "gone.safetensors", "", "zorp.safetensors") == [True, True, False]
    editor.page.unroute(near)
    editor.errors.clear()  # the browser notes every 400
    assert flagged(editor, node, {"file": "gone.safetensors", "on": False}) == [False], (
        "a row that is off is not looked at"
    )
    editor.page.locator(".graft-on:visible").click()
    editor.page.locator(".graft-note:visible").get_by_text("There is no file").wait_for()
    editor.page.locator(".graft-on:visible").click()
    editor.page.wait_for_timeout(300)
    assert editor.page.locator(".graft-note:visible").count() == 0


def test_slashes_and_backslashes_name_the_same_file(stack):
    editor, node = stack
    names = ["a\\old zorp.safetensors", "sub\\deep\\zorp.safetensors"]  # as a server on Windows lists them
    editor.page.route("**/graft/loras*", lambda route: route.fulfill(json={"loras": names}))
    editor.do("() => app.refreshComboInNodes()")
    assert flagged(editor, node, "sub/deep/zorp.safetensors", names[1], "sub/zorp.safetensors") == [False, False, True]
    editor.page.locator(".graft-add:visible").click()
    editor.page.locator(".graft-picker-search:visible").fill("zorp")
    assert editor.page.locator(".graft-picker-option:visible").all_inner_texts() == names[::-1], (
        "what begins so comes first"
    )
    editor.page.keyboard.press("Escape")


def test_an_error_goes_when_the_server_is_back(stack):
    editor, _ = stack
    editor.page.route("**/graft/loras*", lambda route: route.abort())
    editor.do("() => app.refreshComboInNodes()")
    editor.page.locator(".graft-add:visible").click()
    problem = editor.page.locator(".graft-problem:visible")
    problem.get_by_text("The list of LoRAs cannot be read").wait_for()
    editor.page.unroute("**/graft/loras*")
    editor.do("() => app.refreshComboInNodes()")
    editor.page.wait_for_timeout(500)
    assert problem.count() == 0 and editor.page.locator(".graft-add:visible").get_attribute("title") == ""
    editor.errors.clear()  # the browser notes every request that failed


@pytest.mark.parametrize("text", ["not json", '{"version": 9, "rows": []}', '{"rows": [{"on": true}], "version": 1}'])
def test_rows_that_cannot_be_read_are_kept_and_said(stack, text):
    editor, node = stack
    editor.do("([id, text]) => { app.graph.getNodeById(id).widgets[0].value = text }", [node, text])
    editor.page.locator(".graft-problem:visible").get_by_text("cannot be read").wait_for()
    assert editor.prompt()[str(node)]["inputs"]["rows"] == text
    editor.page.locator(".graft-raw:visible").fill('{"version": 1, "rows": [{"file": "zorp.safetensors"}]}')
    editor.page.keyboard.press("Tab")
    assert editor.page.locator(".graft-row:visible").count() == 1
