"""LoRA rows in a real browser: how they look, their menu, pictures and words, files dropped, presets, block weights."""

import base64
import json
import shutil

import pytest
import serving
import torch
from safetensors.torch import save_file

STEPS = "() => app.extensionManager.workflow.activeWorkflow.changeTracker.undoQueue.length"
CAME_BACK = """([id, rows]) => {
  const widget = app.canvas.graph.getNodeById(id)?.widgets.find((one) => one.name === 'rows')
  const { changeTracker } = app.extensionManager.workflow.activeWorkflow
  if (!widget || changeTracker._restoringState) return false
  return JSON.stringify(JSON.parse(widget.value).rows) === JSON.stringify(rows)
}"""
BLOCKS = (
    "lora_te_text_model_encoder_layers_0_mlp_fc1",
    "lora_unet_mid_block_attentions_0_proj_in",
    *(f"lora_unet_down_blocks_{number}_attentions_{place}_proj_in" for number in (0, 1, 2) for place in (0, 1)),
    *(f"lora_unet_up_blocks_{number}_attentions_{place}_proj_in" for number in (1, 2, 3) for place in (0, 1)),
)
DROP = """([selector, files]) => {
  const given = new DataTransfer()
  for (const [name, text] of files) {
    given.items.add(new File([Uint8Array.from(atob(text), (one) => one.charCodeAt(0))], name))
  }
  const target = [...document.querySelectorAll(selector)].find((one) => one.offsetParent)
  for (const type of ['dragover', 'drop']) {
    target.dispatchEvent(new DragEvent(type, {dataTransfer: given, bubbles: true, cancelable: true}))
  }
}"""
# Texts of the rows that are cut off, lie outside their node or over each other, and boxes that scroll sideways.
MISLAID = """() => {
  const out = []
  const seen = (one) => one.offsetParent && getComputedStyle(one).visibility !== 'hidden'
  for (const panel of [...document.querySelectorAll('.graft-stack, .graft-popup')].filter(seen)) {
    const around = panel.getBoundingClientRect()
    const texts = [...panel.querySelectorAll('button, span, input, dt, dd, output, .graft-note')].filter(seen)
    for (const one of texts) {
      const box = one.getBoundingClientRect()
      const what = `${one.className} ${one.textContent.slice(0, 30)}`
      if (one.scrollWidth > one.clientWidth + 1 && one.clientWidth && one.tagName !== 'INPUT') out.push(`cut ${what}`)
      if (box.right > around.right + 1 || box.left < around.left - 1) out.push(`outside ${what}`)
      if (box.bottom > around.bottom + 1) out.push(`below ${what}`)
    }
    for (const line of panel.querySelectorAll('.graft-line, .graft-field, .graft-slider, .graft-foot')) {
      const boxes = [...line.children].filter(seen).map((one) => one.getBoundingClientRect())
      for (const [index, box] of boxes.entries()) {
        if (index && box.left < boxes[index - 1].right - 1 && box.top < boxes[index - 1].bottom - 1) {
          out.push(`overlap ${line.textContent.slice(0, 40)}`)
        }
      }
    }
    if (panel.scrollWidth > panel.clientWidth + 1) out.push(`sideways ${panel.className}`)
  }
  return out
}"""


def with_blocks(path):
    """A LoRA file with layers in thirteen blocks and the text encoder."""
    tensors = {}
    for layer in BLOCKS:
        tensors[f"{layer}.lora_up.weight"] = torch.zeros(8, 2, 1, 1)
        tensors[f"{layer}.lora_down.weight"] = torch.zeros(2, 8, 1, 1)
    save_file(tensors, path, {"ss_tag_frequency": json.dumps({"10_x": {"ink wash": 12, "brush": 3}})})


@pytest.fixture
def loader(editor, place):
    """(the editor, the id of a fresh Load LoRAs, the loras folder with real files, one of them with a picture)."""
    loras = place / "models" / "loras"
    (loras / "styles").mkdir(exist_ok=True)
    serving.lora(loras / "styles" / "anime_v2.1.safetensors")
    (loras / "styles" / "anime_v2.1.preview.png").write_bytes(serving.picture(64, 48, (30, 120, 200)))
    with_blocks(loras / "ink.safetensors")
    editor.clear()
    editor.do("() => app.refreshComboInNodes()")
    node = editor.add("GraftLoadLoRAs", 200, 60)
    editor.page.wait_for_timeout(500)
    yield editor, node, loras
    editor.page.keyboard.press("Escape")
    shutil.rmtree(place / "user" / "default" / "graft_lora_presets", ignore_errors=True)


def give(editor, node, *rows):
    """Set the rows of a node, as a workflow does."""
    text = json.dumps({"version": 1, "rows": [{"file": row} if isinstance(row, str) else row for row in rows]})
    script = "([id, text]) => { app.graph.getNodeById(id).widgets.find((one) => one.name === 'rows').value = text }"
    editor.do(script, [node, text])
    editor.page.wait_for_timeout(700)


def files_of(editor, node):
    return [row["file"].removesuffix(".safetensors") for row in editor.rows(node)]


def menu(editor, row, entry):
    """Choose an entry of a row's menu."""
    editor.page.locator(".graft-file:visible").nth(row).click(button="right")
    editor.page.get_by_role("menuitem", name=entry, exact=True).click()
    editor.page.wait_for_timeout(200)


def test_a_row_by_its_looks_and_its_menu(loader):
    editor, node, _ = loader
    give(
        editor, node, "styles/anime_v2.1.safetensors", "ink.safetensors", "zorp.safetensors", "old/Anime-V2.safetensors"
    )
    first = editor.page.locator(".graft-file:visible").first
    assert first.inner_text().split("\n") == ["anime_v2.1", "styles"], "the file first, its folder after"
    assert first.locator("img").evaluate("(one) => [one.naturalWidth, one.naturalHeight]") == [64, 48]
    heads = editor.page.locator(".graft-head:visible")
    for place, field in ((0, ".graft-model"), (1, ".graft-clip")):
        head, number = heads.nth(place).bounding_box(), editor.page.locator(f"{field}:visible").first.bounding_box()
        assert head["y"] < number["y"] and abs(head["x"] + head["width"] - number["x"] - number["width"]) < 3
    note = editor.page.locator(".graft-note:visible")
    assert "styles/anime_v2.1.safetensors" in note.inner_text(), "near by its parts"
    note.locator(".graft-link").click()
    assert files_of(editor, node)[3] == "styles/anime_v2.1"

    menu(editor, 3, "Remove")
    menu(editor, 2, "Move to the top")
    menu(editor, 0, "Duplicate")
    assert files_of(editor, node) == ["zorp", "zorp", "styles/anime_v2.1", "ink"]
    editor.page.locator(".graft-on:visible").first.click()
    menu(editor, 3, "Solo: switch all other rows off")
    assert [row["on"] for row in editor.rows(node)] == [False, False, False, True]
    menu(editor, 3, "End solo")
    assert [row["on"] for row in editor.rows(node)] == [False, True, True, True], "as it was before"
    menu(editor, 2, "Choose another file of this folder")
    assert editor.page.locator(".graft-picker-option:visible").all_inner_texts() == ["styles/anime_v2.1.safetensors"]
    editor.page.keyboard.press("Escape")
    menu(editor, 2, "File info")
    editor.page.locator(".graft-preview:visible").wait_for()
    editor.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    editor.page.locator(".graft-chip:visible").get_by_text("zorp, <b>bold</b>").click()
    editor.page.locator(".graft-copied:visible").get_by_text("Copied").wait_for()
    assert editor.do("() => navigator.clipboard.readText()") == "zorp, <b>bold</b>"
    editor.page.locator(".graft-handle:visible").nth(1).focus()
    editor.page.keyboard.press("Shift+F10")  # the menu by the keyboard: down to "Move down"
    if editor.page.locator(".graft-menu:visible").count():
        editor.page.keyboard.press("ArrowDown")
        editor.page.keyboard.press("Enter")
        editor.page.wait_for_timeout(200)
        assert files_of(editor, node) == ["zorp", "styles/anime_v2.1", "zorp", "ink"]
    editor.screenshot("lora-rows")
    assert editor.do(MISLAID) == []


def test_a_dropped_file_becomes_a_row_and_what_is_wrong_with_it_is_said(loader, tmp_path):
    editor, node, loras = loader
    give(editor, node, "zorp.safetensors")
    serving.lora(tmp_path / "fresh.safetensors", {"note": "fresh"})
    fresh = base64.b64encode((tmp_path / "fresh.safetensors").read_bytes()).decode()

    def drop(*files, selector=".graft-stack"):
        editor.do(DROP, [selector, files])
        editor.page.wait_for_timeout(1200)
        return editor.page.locator(".graft-message").first.inner_text()

    assert drop(("fresh.safetensors", fresh)) == ""
    assert files_of(editor, node) == ["zorp", "fresh"] and (loras / "fresh.safetensors").exists()
    assert drop(("fresh.safetensors", fresh)) == "" and files_of(editor, node) == ["zorp", "fresh", "fresh"]
    editor.undo()
    assert files_of(editor, node) == ["zorp", "fresh"]
    before = (loras / "zorp.safetensors").read_bytes()
    said = drop(("zorp.safetensors", fresh), ("notes.txt", "YQ=="), ("no.safetensors", "YWFhYWFhYWFhYWFh"))
    assert "there is another LoRA of this name (zorp.safetensors), with other content" in said
    assert "“notes.txt” is not a LoRA: drop a .safetensors file" in said
    assert "no.safetensors is not a whole safetensors file" in said
    assert files_of(editor, node) == ["zorp", "fresh"] and (loras / "zorp.safetensors").read_bytes() == before
    assert not (loras / "no.safetensors").exists()
    editor.screenshot("lora-rows-dropped")
    editor.errors[:] = [error for error in editor.errors if "/graft/lora_upload" not in error]  # it notes every 400
    (loras / "fresh.safetensors").unlink()


def test_presets_are_kept_on_the_server_and_a_newer_one_is_refused_without_loss(loader, place):
    editor, node, _ = loader
    give(editor, node, "zorp.safetensors", {"file": "ink.safetensors", "model": 0.4, "clip": 0.1})
    presets = editor.page.get_by_role("button", name="Presets")
    name = editor.page.get_by_label("Name of a new preset")
    presets.click()
    name.fill("night/day")
    editor.page.keyboard.press("Enter")
    editor.page.locator(".graft-presets .graft-note").get_by_text("A name has 1 to 80 characters").wait_for()
    name.fill("夜 ink")
    editor.page.get_by_role("button", name="Save rows").click()
    line = editor.page.locator(".graft-preset", has_text="夜 ink")
    line.wait_for()
    folder = place / "user" / "default" / "graft_lora_presets"
    stored = json.loads((folder / "夜 ink.json").read_text(encoding="utf-8"))
    assert stored["version"] == 1 and [row["file"] for row in stored["rows"]] == ["zorp.safetensors", "ink.safetensors"]
    newer = '{"version": 2, "rows": [], "more": "of a newer Graft"}'
    (folder / "newer.json").write_text(newer)
    editor.page.keyboard.press("Escape")

    give(editor, node, "styles/anime_v2.1.safetensors")
    presets.click()
    editor.page.locator(".graft-preset", has_text="newer").click()
    message = editor.page.locator(".graft-presets .graft-note")
    message.get_by_text("these rows have version 2, this Graft reads version 1: update Graft").wait_for()
    name.fill("newer")
    editor.page.keyboard.press("Enter")
    message.get_by_text("these rows have version 2").wait_for()
    assert (folder / "newer.json").read_text() == newer, "it is not written over either"
    assert files_of(editor, node) == ["styles/anime_v2.1"]
    editor.screenshot("lora-presets")
    assert editor.do(MISLAID) == []
    editor.page.get_by_role("button", name="Add to the rows").last.click()
    editor.page.wait_for_timeout(300)
    assert files_of(editor, node) == ["styles/anime_v2.1", "zorp", "ink"]
    presets.click()
    line.click()
    editor.page.wait_for_timeout(300)
    assert [(row["file"], row["model"]) for row in editor.rows(node)] == [
        ("zorp.safetensors", 1),
        ("ink.safetensors", 0.4),
    ]
    editor.undo()
    assert len(editor.rows(node)) == 3
    presets.click()
    for _ in range(2):
        editor.page.get_by_label("Delete 夜 ink").click()
    editor.page.wait_for_timeout(300)
    assert not (folder / "夜 ink.json").exists() and (folder / "newer.json").exists()


def test_block_weights_by_sliders_and_their_checks(loader):
    editor, node, _ = loader
    give(editor, node, {"file": "ink.safetensors", "blocks": "OUTALL"})
    editor.page.locator(".graft-more:visible").click()
    sliders = editor.page.locator(".graft-slider:visible")
    sliders.first.wait_for()
    widths = sliders.evaluate_all("all => all.map((one) => [...one.children].map((part) => part.offsetWidth))")
    assert all((name, value) == (46, 28) for name, _, value in widths), widths
    assert not any(sliders.evaluate_all("all => all.map((one) => one.scrollWidth > one.clientWidth)"))
    shown = dict(text.split("\n") for text in sliders.all_inner_texts())
    assert list(shown)[:3] == ["CLIP", "IN01", "IN02"] and len(shown) == len(BLOCKS)
    assert (shown["CLIP"], shown["IN01"], shown["OUT03"], shown["OUT10"]) == ("1", "0", "1", "1")
    sliders.get_by_label("OUT03 of").focus()
    editor.page.keyboard.press("ArrowLeft")
    editor.page.wait_for_timeout(400)
    (row,) = editor.rows(node)
    assert row["blocks"] == "IN=0, M=0, OUT03=0.95"
    assert editor.page.get_by_label("Block weights of").input_value() == row["blocks"]
    assert editor.do("document.activeElement.closest('.graft-slider')?.innerText.startsWith('OUT03')")
    note = editor.page.locator(".graft-note:visible")
    editor.page.get_by_label("Block weights of").fill("1,2,3")
    editor.page.keyboard.press("Tab")
    note.get_by_text("Block weights: expected a list of 17").wait_for()
    editor.page.get_by_role("textbox", name="Schedule of").fill("0.8-0.2")
    editor.page.keyboard.press("Tab")
    note.get_by_text("Schedule: expected a start before an end").wait_for()
    editor.page.get_by_label("Block weights of").fill("D=0")
    editor.page.keyboard.press("Tab")
    note.get_by_text("this file is for a model without D").wait_for()
    editor.screenshot("lora-blocks")
    editor.page.get_by_label("Block weights of").fill("IN=0.5")
    editor.page.get_by_role("textbox", name="Schedule of").fill("")
    editor.page.keyboard.press("Tab")
    editor.page.wait_for_timeout(500)
    assert note.count() == 0
    editor.page.get_by_role("button", name="All blocks at 1").click()
    editor.page.wait_for_timeout(300)
    assert editor.rows(node)[0]["blocks"] == ""


def change_by_change(editor, change, *others):
    """Make changes by hand, each followed by a click beside the node, where the editor notes what has changed since:
    [how many steps of undo it took].
    """
    taken = []
    for act in (change, *others):
        before = editor.do(STEPS)
        act()
        editor.settle()
        editor.page.mouse.click(800, 880)
        editor.settle()
        taken.append(editor.do(STEPS) - before)
    return taken


def comes_back(editor, node, rows):
    """Wait until an undo or a redo has brought these rows: it makes every node anew, which takes longer than the page
    rests on a busy machine.
    """
    editor.page.wait_for_function(CAME_BACK, arg=[node, rows])
    editor.settle()
    assert editor.rows(node) == rows


def test_each_change_is_one_step_of_undo_and_comes_back(loader):
    """Also those whose row grows later: by a picture, by what the server says of block weights, by folding out."""
    editor, node, _ = loader
    page, keyboard = editor.page, editor.page.keyboard

    def add(query):
        page.locator(".graft-add:visible").click()
        page.locator(".graft-picker-search:visible").fill(query)
        keyboard.press("Enter")

    def type_into(field, text):
        field.fill(text)
        keyboard.press("Tab")

    blocks, unfold = page.get_by_label("Block weights of"), page.locator(".graft-more:visible").first
    changes = (
        lambda: add("anime"),
        lambda: type_into(page.locator(".graft-model:visible").first, "0.5"),
        lambda: add("zorp"),
        lambda: page.locator(".graft-on:visible").last.click(),
        lambda: (unfold.click(), blocks.wait_for(), editor.settle(), type_into(blocks, "D=zero")),
        lambda: menu(editor, 1, "Move to the top"),
        lambda: menu(editor, 0, "Duplicate"),
        lambda: page.locator(".graft-remove:visible").last.click(),
    )
    change_by_change(editor, lambda: None)  # what the editor has not noted so far
    rows, taken = [editor.rows(node)], []
    for change in changes:
        taken += change_by_change(editor, change)
        rows.append(editor.rows(node))
    assert taken == [1] * len(changes)
    assert change_by_change(editor, lambda: page.locator(".graft-info-button:visible").first.click()) == [0], (
        "what only folds out changes nothing"
    )
    for before in rows[-2::-1]:
        keyboard.press("Control+z")
        comes_back(editor, node, before)
    for after in rows[1:]:
        keyboard.press("Control+y")
        comes_back(editor, node, after)


def test_a_height_that_the_editor_measures_late_is_no_step_of_undo(loader):
    """Nodes 2.0 gives a node the height of what it shows (front end 1.49)."""
    editor, node, _ = loader
    change_by_change(editor, lambda: None)  # what the editor has not noted so far

    def grow():
        editor.page.locator(".graft-stack:visible").evaluate("(one) => { one.style.minHeight = '600px' }")
        editor.page.wait_for_timeout(800)  # longer than the editor itself waits for what follows a change

    assert change_by_change(editor, grow) == [0]
    assert change_by_change(editor, lambda: give(editor, node, {"file": "ink.safetensors"})) == [1]


LONG = "a folder of mine/another one/a rather long name of a LoRA file_with_underscores-and-numbers-0001.safetensors"
