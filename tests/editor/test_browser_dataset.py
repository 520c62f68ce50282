"""The Dataset panel as a person uses it: drops a folder, chooses one, sees buckets and problems before a run, edits a
caption, takes it back, and finds all of it again after a reload.
"""

import hashlib
import json
import shutil

import pytest
import yaml
from serving import picture

PANEL = ".graft-dataset:visible"
SETTING = "([id, value]) => app.extensionManager.setting.set(id, value)"
CAPTION = "(query) => fetch(`/graft/dataset/caption?${new URLSearchParams(query)}`).then((answer) => answer.json())"
# Elements of the panel that are wider than where they lie, or whose text is cut.
CUT = """() => [...document.querySelectorAll('.graft-dataset, .graft-dataset *, .graft-folder')]
  .filter((one) => one.offsetParent && one.scrollWidth > one.clientWidth + 1 && one.clientWidth > 0
    && getComputedStyle(one).display !== 'inline')
  .map((one) => `${one.className} ${one.scrollWidth} > ${one.clientWidth} ${one.textContent.slice(0, 40)}`)"""


def resting_box(editor, selector):
    """Where an element is, once it has stopped moving: a panel follows its node a few frames later."""
    element = editor.page.locator(selector).first
    before = None
    while (box := element.bounding_box()) != before:
        before = box
        editor.page.wait_for_timeout(150)
    return box


def drop(editor, *paths, onto=f"{PANEL} .graft-scroll"):
    """Drag files and folders of this machine onto the panel, or the middle of another element."""
    box = resting_box(editor, onto)
    drop_at(editor, box["x"] + box["width"] / 2, box["y"] + box["height"] / 2, *paths)


def drop_at(editor, x, y, *paths):
    """Drag files and folders of this machine to a point of the page."""
    session = editor.page.context.new_cdp_session(editor.page)
    place = {"x": x, "y": y}
    data = {"items": [], "files": [str(path) for path in paths], "dragOperationsMask": 1}
    for kind in ("dragEnter", "dragOver", "drop"):
        session.send("Input.dispatchDragEvent", {"type": kind, "data": data, **place})


def fill(folder, *names):
    folder.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(names):
        content = picture(64, 48, (number, 40, 90)) if name.endswith(".png") else f"words of {name}".encode()
        (folder / name).write_bytes(content)
    return folder


def choose(editor, query):
    editor.page.locator(".graft-chooser:visible").click()
    editor.page.locator(".graft-picker-search:visible").fill(query)
    editor.page.keyboard.press("Enter")


def folder_of(editor):
    return next(iter(editor.prompt().values()))["inputs"]["folder"]


def test_a_dropped_folder_is_uploaded_looked_at_edited_and_there_again_after_a_reload(editor, tmp_path):
    name = f"3_dropped {'nodes2' if editor.modern else 'classic'}"
    folder = fill(tmp_path / name, "a.png", "a.txt", "b.png", "notes.docx", ".hidden.png")
    (folder / "bad.png").write_bytes(b"no picture")
    editor.clear()
    editor.add("GraftDataset", 100, 60)
    panel = editor.page.locator(PANEL)
    panel.get_by_text("drop a folder or pictures here").wait_for()
    empty = panel.bounding_box()["height"]
    drop(editor, folder)
    panel.get_by_role("button", name="Upload").wait_for()
    assert "left out: notes.docx" in panel.inner_text() and "4 files" in panel.inner_text()
    assert panel.get_by_role("textbox").input_value() == name
    editor.screenshot("dataset-asks")
    panel.get_by_role("button", name="Upload").click()
    panel.get_by_role("tab", name="Problems (1)").wait_for()
    assert "bad.png: not a picture that can be read" in panel.inner_text() and "notes.docx" in panel.inner_text()
    assert folder_of(editor) == name
    assert "1 to train on, 1 held out" in panel.inner_text() and "6 per epoch with repeats" in panel.inner_text()
    editor.page.wait_for_timeout(300)  # it is fitted in the next frame
    assert panel.bounding_box()["height"] == pytest.approx(empty, abs=1), "it keeps its height"
    panel.get_by_role("tab", name="Buckets (1)").click()
    assert "576 \u00d7 448" in panel.inner_text()
    panel.get_by_role("tab", name="Images (2)").click()
    panel.locator("img").first.evaluate("(img) => img.decode()")

    a_png = {"folder": name, "name": "a.png", "captions": "auto", "encoding": "utf-8"}
    panel.get_by_role("button", name="Edit the caption of a.png").click()
    field = panel.get_by_role("textbox", name="Caption of a.png")
    assert field.input_value() == "words of a.txt"
    field.fill("a zorp, <b>bold</b>")
    editor.screenshot("dataset-edits")
    assert not editor.do(CUT)
    editor.page.keyboard.press("Control+Enter")
    panel.get_by_role("button", name="Undo caption").wait_for()
    panel.get_by_role("button", name="Edit the caption of a.png").get_by_text("a zorp, <b>bold</b>").wait_for()
    assert editor.do(CAPTION, a_png)["text"] == "a zorp, <b>bold</b>"
    panel.get_by_role("button", name="Undo caption").click()
    panel.get_by_role("button", name="Edit the caption of a.png").get_by_text("words of a.txt").wait_for()
    assert editor.do(CAPTION, a_png)["text"] == "words of a.txt"

    panel.get_by_role("button", name="Edit the caption of b.png").click()
    panel.get_by_role("textbox").fill("a caption where there was none")
    panel.get_by_role("button", name="Save").click()
    panel.get_by_role("button", name="Undo caption").wait_for()
    saved = editor.saved()
    editor.open()
    editor.load(saved)
    panel.get_by_role("tab", name="Images (2)").click()
    panel.get_by_text("a caption where there was none").wait_for()

    fill(folder, "c.png").joinpath("a.txt").write_text("another text", encoding="utf-8")
    drop(editor, folder / "c.png", folder / "a.txt")
    panel.get_by_role("button", name="Upload").click()
    panel.get_by_text("a.txt", exact=False).wait_for()
    assert f"Already in {name}: a.txt" in panel.inner_text()
    panel.get_by_role("button", name="Skip these").click()
    panel.get_by_role("tab", name="Images (3)").wait_for()
    assert editor.do(CAPTION, a_png)["text"] == "words of a.txt", "nothing is written over"


def test_upload_pressed_twice_uploads_once(editor, tmp_path):
    editor.clear()
    editor.add("GraftDataset", 100, 60)
    panel = editor.page.locator(PANEL)
    panel.get_by_text("drop a folder or pictures here").wait_for()
    drop(editor, fill(tmp_path / f"4_twice {'nodes2' if editor.modern else 'classic'}", "a.png", "b.png"))
    panel.get_by_role("button", name="Upload").wait_for()
    uploads = []
    editor.page.on("request", lambda request: uploads.append(request.url) if "/upload/image" in request.url else None)
    panel.get_by_role("button", name="Upload").evaluate("(button) => { button.click(); button.click() }")
    panel.get_by_role("tab", name="Images (2)").wait_for()
    assert len(uploads) == 2


def test_cancel_during_the_look_at_the_folder_uploads_nothing(editor, tmp_path):
    editor.clear()
    editor.add("GraftDataset", 100, 60)
    panel = editor.page.locator(PANEL)
    panel.get_by_text("drop a folder or pictures here").wait_for()
    drop(editor, fill(tmp_path / f"5_cancel {'nodes2' if editor.modern else 'classic'}", "a.png"))
    button = panel.get_by_role("button", name="Upload")
    button.wait_for()
    uploads = []
    editor.page.on("request", lambda request: uploads.append(request.url) if "/upload/image" in request.url else None)
    with editor.page.expect_response(lambda response: "/graft/dataset/files" in response.url):
        button.evaluate("(button) => { button.click(); button.nextSibling.click() }")
    editor.page.wait_for_timeout(300)
    assert not uploads and not editor.errors


def test_a_caption_that_cannot_be_written_stays_in_its_field(editor):
    editor.clear()
    editor.add("GraftDataset", 100, 60, folder="concept")
    panel = editor.page.locator(PANEL)
    panel.get_by_role("button", name="Edit the caption of zorp-00.png").click()
    field = panel.get_by_role("textbox")
    field.fill("mine")
    refusal = {"error": "zorp-00.txt has changed on disk since it was read"}
    editor.page.route("**/graft/dataset/caption", lambda route: route.fulfill(status=409, json=refusal))
    panel.get_by_role("button", name="Save").click()
    panel.get_by_text("Not saved: zorp-00.txt has changed on disk").wait_for()
    assert field.input_value() == "mine"
    editor.page.unroute("**/graft/dataset/caption")
    editor.do("() => app.graph.nodes[0].widgets.find((one) => one.name === 'resolution').callback(512)")
    editor.do("() => { app.graph.nodes[0].widgets.find((one) => one.name === 'repeats').value = 2 }")
    editor.do("() => app.graph.nodes[0].widgets.find((one) => one.name === 'repeats').callback(2)")
    editor.page.wait_for_timeout(1500)
    assert field.input_value() == "mine", "a look at the folder meanwhile leaves it"
    panel.get_by_role("button", name="Cancel").click()
    panel.get_by_text("32 per epoch with repeats").wait_for()
    editor.settle()  # the browser notes a refused request after its answer is shown
    editor.errors[:] = [error for error in editor.errors if "409" not in error]


STEPS = "() => app.extensionManager.workflow.activeWorkflow.changeTracker.undoQueue.length"


def test_a_change_of_a_caption_is_one_step_of_undo(editor, place):
    name = "undone nodes2" if editor.modern else "undone classic"
    folder = fill(place / "input" / name, "a.png", "a.txt", "b.png")
    page, panel = editor.page, editor.page.locator(PANEL)
    editor.clear()
    editor.add("GraftDataset", 100, 60, folder=name)
    panel.get_by_role("tab", name="Images (2)").wait_for()

    def write(picture, words):
        before = editor.do(STEPS)
        panel.get_by_role("button", name=f"Edit the caption of {picture}").click()
        panel.get_by_role("textbox").fill(words)
        page.keyboard.press("Control+Enter")
        panel.get_by_role("button", name=f"Edit the caption of {picture}").get_by_text(words).wait_for()
        editor.settle()
        page.mouse.click(800, 880)
        editor.settle()
        assert editor.do(STEPS) == before + 1

    def captions(first, second):
        for of, words in (("a.png", first), ("b.png", second)):
            panel.get_by_role("button", name=f"Edit the caption of {of}").get_by_text(words).wait_for()
        found = [path.read_text() if path.exists() else "no caption" for path in (folder / "a.txt", folder / "b.txt")]
        assert found == [first, second]

    page.mouse.click(800, 880)
    editor.settle()
    write("a.png", "first")
    write("b.png", "second")
    page.keyboard.press("Control+z")
    captions("first", "no caption")
    page.keyboard.press("Control+z")
    captions("words of a.txt", "no caption")
    for wanted in (("first", "no caption"), ("first", "second")):
        page.keyboard.press("Control+y")
        captions(*wanted)
    panel.get_by_role("button", name="Undo caption").click()
    captions("first", "no caption")
    page.keyboard.press("Control+z")
    captions("first", "second")
    (folder / "b.txt").write_text("written elsewhere")
    page.keyboard.press("Control+z")
    panel.get_by_text("Not undone: b.txt has changed on disk").wait_for()
    assert (folder / "b.txt").read_text() == "written elsewhere", "nothing is lost"
    editor.settle()  # the browser notes a refused request after its answer is shown
    editor.errors[:] = [error for error in editor.errors if "409" not in error]


def test_a_folder_is_searched_for_and_what_is_wrong_is_said_at_the_widget(editor):
    editor.clear()
    editor.add("GraftDataset", 100, 60)
    panel, chooser = editor.page.locator(PANEL), editor.page.locator(".graft-chooser:visible")
    chooser.click()
    options = editor.page.locator(".graft-picker-option:visible")
    options.first.wait_for()
    assert "concept\n16 pictures" in options.all_inner_texts()
    editor.page.keyboard.press("Escape")
    choose(editor, "reg")
    panel.get_by_role("tab", name="Images (96)").wait_for()
    assert folder_of(editor) == "regular" and "96" in chooser.inner_text()
    assert panel.locator("figure").count() == 24
    editor.undo()
    assert folder_of(editor) == ""
    panel.get_by_text("drop a folder or pictures here").wait_for()
    editor.clear()
    editor.add("GraftDataset", 100, 60, folder="koncept")
    panel.get_by_text("there is no folder 'koncept' in ComfyUI's input folder; did you mean concept?").wait_for()
    node = editor.add("GraftDataset", 600, 60, folder="concept", resolution=64, captions="json")
    editor.page.get_by_text("Dataset: no picture in folder 'concept' can be used.").wait_for()
    editor.do("(id) => { app.graph.getNodeById(id).widgets[0].value = '../input' }", node)
    editor.page.get_by_text("is outside ComfyUI's input folder").wait_for()
    editor.settle()
    editor.errors[:] = [error for error in editor.errors if "404" not in error and "400" not in error]


def test_demo_folders_that_a_run_puts_into_place_are_said_in_the_panel_inside_a_subgraph_too(editor, place):
    shutil.rmtree(place / "input" / "graft_demo", ignore_errors=True)
    editor.clear()
    settings = {"folder": "graft_demo/concept", "resolution": 64, "captions": "auto"}
    settings["repeats"] = 2 if editor.modern else 3  # or the node would not run again
    demo, data = editor.add("GraftDemo", 60, 60), editor.add("GraftDataset", 400, 60, **settings)
    show = editor.add("PreviewImage", 1000, 60)
    for source, output, target, name in ((demo, 2, data, "vae"), (demo, 1, data, "clip"), (data, 1, show, "images")):
        editor.link(source, output, target, name)
    words = "put the demo's images into ComfyUI's input folder, as graft_demo/concept"
    editor.queue()
    editor.page.locator(PANEL).get_by_text(words, exact=True).wait_for()
    assert len(list((place / "input" / "graft_demo" / "concept").glob("*.png"))) == 16
    editor.screenshot("dataset-puts-into-place")
    editor.wait_until_idle()
    shutil.rmtree(place / "input" / "graft_demo")
    editor.do("(id) => { app.graph.getNodeById(id).widgets.find((one) => one.name === 'repeats').value += 2 }", data)
    editor.wrap([data], "group")
    editor.queue()
    said = editor.page.locator(".graft-outside:visible").get_by_text(words, exact=True)
    said.wait_for()
    editor.screenshot("dataset-puts-into-place-inside")
    editor.wait_until_idle()
    assert editor.page.get_by_text(words).count() == 1, "the panel says it, and no box beside it"


def test_pictures_are_sorted_by_their_losses_and_left_out(editor, place):
    name = f"measured {'nodes2' if editor.modern else 'classic'}"
    names = [f"{letter}.png" for letter in "abc"]
    folder = fill(place / "input" / name, *names, "a.txt", "b.txt", "c.txt")
    measured = {
        "a.png": (0.4, 0.125, 0.2, []),
        "b.png": (0.4, 0.375, 0.1, ["its loss is far"]),
        "c.png": (0.4, 0.25, -0.3, []),
    }
    rows = {
        one: {
            "file": [(folder / one).stat().st_size, (folder / one).stat().st_mtime_ns],
            "caption": f"words of {one[0]}.txt",
            "before": before,
            "after": after,
            "caption_help": caption,
            "reasons": reasons,
        }
        for one, (before, after, caption, reasons) in measured.items()
    }
    kept = place / "output" / "graft" / "cache" / "picture_losses"
    kept.mkdir(parents=True, exist_ok=True)
    body = {"folder": name, "run": "mine", "step": 9, "pictures": rows}
    (kept / f"{hashlib.sha256(name.encode()).hexdigest()[:32]}.json").write_text(json.dumps(body))
    editor.clear()
    editor.add("GraftDataset", 100, 60, folder=name, filters="masks: files")
    panel = editor.page.locator(PANEL)

    def shown():
        return panel.locator("figure b").all_inner_texts()

    order = panel.get_by_role("combobox", name="Order of the pictures")
    order.wait_for()
    assert shown() == names
    order.select_option("highest loss first")
    assert shown() == ["b.png", "c.png", "a.png"]
    figure = panel.locator("figure", has_text="b.png")
    assert (
        "loss 0.4 \u2192 0.375, caption helps 10.0%" in figure.inner_text() and "its loss is far" in figure.inner_text()
    )
    editor.screenshot("dataset-losses")
    assert not editor.do(CUT)
    order.select_option("least helped by the caption first")
    assert shown() == ["c.png", "b.png", "a.png"]
    panel.get_by_role("button", name="Leave out b.png").click()
    panel.locator("figure", has_text="b.png").wait_for(state="detached")
    filters = next(iter(editor.prompt().values()))["inputs"]["filters"]
    assert yaml.safe_load(filters) == {"masks": "files", "leave_out": ["b.png"]} and shown() == ["c.png", "a.png"]
    editor.undo()
    panel.locator("figure", has_text="b.png").wait_for()
    (folder / "a.txt").write_text("other words")
    editor.do("() => app.refreshComboInNodes()")
    panel.locator("figure", has_text="other words").wait_for()
    panel.get_by_role("button", name="Leave out a.png").wait_for(state="detached")
