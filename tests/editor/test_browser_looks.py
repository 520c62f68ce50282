"""What Graft's panels and dialogs look like, measured in the page (measure.js): contrast of every text and of the
lines of charts, and nothing cut, laid over something else or scrolled sideways; in two windows, both themes, both
languages and both ways to draw nodes, all of them with all others. Chinese is measured where a font with its characters
is installed, and skipped by name where there is none.
"""

import base64
import json
from pathlib import Path

import first_lora
import pytest
import serving
from browsing import DRAWS_CHINESE, NO_CHINESE
from test_browser_dataset import SETTING, drop, fill
from test_browser_panels import SEND, ran
from test_browser_rows import DROP, LONG, give, with_blocks

SOURCE = Path(__file__).with_name("measure.js").read_text(encoding="utf-8")
LOAD = """(source) => import(`data:text/javascript,${encodeURIComponent(source)}`).then((found) => {
  window.graftMeasure = found.measure
  found.watch()
})"""
LANGUAGES = ("en", "zh")
THEMES = ("light", "dark")
SIZES = ((1280, 720), (1600, 1000))
MISSING = "a folder with quite a long name that is not there"
ENDLESS = "an_error_without_any_place_to_break_it_" * 4
ROW = {"file": LONG, "strength": 0.8, "whole": 0.123, "missed": 0.0123, "after": "IN=0, OUT03=0.5"}
BLOCKS = [{"name": f"OUT{at:02}", "effect": at / 20, "share": at / 190, "kept": at > 5} for at in range(20)]
DEPTH = {"depth": 1, "factor": 2, "before": [128, 96], "after": [64, 48], "frames": 1, "own": 10, "patched": 10}


def looked_at(editor):
    """What is wrong with what is on the page."""
    editor.settle()  # nodes are fitted and charts drawn in the next frames
    found = editor.do("() => window.graftMeasure()")
    faint = [f"{ratio:.2f} of {least}: {what}" for ratio, least, what in found["contrasts"] if ratio < least]
    assert found["texts"], "there is nothing to look at"
    return [*sorted(set(faint)), *found["mislaid"]]


@pytest.fixture
def look(editor, request):
    """A function that notes what is wrong with what is on the page, under a name; at the end nothing may be."""
    editor.do(LOAD, SOURCE)
    wrong = {}

    def note(name):
        for theme in THEMES:
            editor.do(SETTING, ["Comfy.ColorPalette", theme])
            if found := looked_at(editor):
                wrong[f"{name} {theme}"] = found
            editor.screenshot(f"looks-{request.node.callspec.id}-{name}-{theme}")

    yield note
    assert not wrong, json.dumps(wrong, indent=1, ensure_ascii=False)


def needs_chinese(editor):
    if not editor.do(DRAWS_CHINESE):
        pytest.skip(NO_CHINESE)


@pytest.fixture(params=LANGUAGES)
def spoken(editor, request):
    """The editor in a language, and afterwards as it was."""
    if request.param == "zh":
        needs_chinese(editor)
    editor.do(SETTING, ["Comfy.Locale", request.param])
    editor.settle()
    yield editor
    # In another language the page loads its graph again, and asks for the missing folder: late, and said as an error.
    editor.page.route("**/graft/dataset/glance", lambda route: route.fulfill(json={"folders": [], "notes": []}))
    editor.do(SETTING, ["Comfy.Locale", "en"])
    editor.page.set_viewport_size({"width": 1600, "height": 1000})
    editor.settle()
    editor.clear()
    editor.settle()
    editor.page.unroute("**/graft/dataset/glance")
    expected = ("404", "400", "/graft/runs/", "/graft/lora_upload", "/graft/preferences", "/view?")
    editor.errors[:] = [error for error in editor.errors if not any(words in error for words in expected)]


def sized(editor):
    """Each window in turn, with its name."""
    for width, height in SIZES:
        editor.page.set_viewport_size({"width": width, "height": height})
        editor.settle()
        yield str(width)


def bring(editor, selector, place=0):
    """An element of a panel, moved into the window."""
    found = editor.page.locator(f"{selector}:visible").nth(place)
    below = found.bounding_box()["y"] - 250
    editor.do("(by) => { app.canvas.ds.offset[1] -= by; app.canvas.setDirty(true, true) }", below)
    editor.settle()
    return found


def test_datasets(spoken, look, place, tmp_path):
    editor, page = spoken, spoken.page
    mixed = fill(place / "input" / "mixed", "a rather long name of a picture_0001.png", "b.png", "b.txt", "c.txt")
    fill(mixed / "a clip of mine.frames", *(f"{number}.png" for number in range(1, 10)))
    (mixed / "bad.png").write_bytes(b"no picture")
    fresh = fill(tmp_path / "fresh", "zorp-00.png", "d.png", "notes of mine.docx")
    editor.clear()
    for x, folder in ((66, "concept"), (470, MISSING), (874, "mixed")):
        editor.add("GraftDataset", x, 90, folder=folder, **({"frames": "5"} if folder == "mixed" else {}))
    first, third = page.locator(".graft-dataset:visible").first, page.locator(".graft-dataset:visible").last
    first.locator("figure").first.wait_for()
    third.locator("[data-name=Problems]").wait_for()
    for size in sized(editor):
        bring(editor, ".graft-folder")
        first.locator("[data-name=Images]").click()
        third.locator("[data-name=Problems]").click()
        look(f"dataset-{size}")
        first.locator(".graft-caption").first.click()
        first.locator("textarea").wait_for()
        third.locator("[data-name=Buckets]").click()
        look(f"dataset-caption-{size}")
        first.locator("textarea").press("Control+Enter")
        first.locator(".graft-tabs > .graft-button:not([role=tab])").wait_for()
        third.locator("[data-name=Images]").click()
        third.locator(".graft-frames").first.wait_for()
        look(f"dataset-undo-{size}")
        bring(editor, ".graft-chooser", 1).click()
        page.locator(".graft-picker-option").first.wait_for()
        look(f"folders-{size}")
        page.keyboard.press("Escape")
    ask_about_uploads(editor, look, first, fresh)


def ask_about_uploads(editor, look, panel, folder):
    files = sorted(folder.iterdir())
    for size in sized(editor):
        bring(editor, ".graft-folder")
        drop(editor, *files)
        panel.locator(".graft-asking").wait_for()
        look(f"upload-{size}")
        panel.locator(".graft-asking .graft-button").first.click()
        look(f"upload-taken-{size}")
        panel.locator(".graft-asking .graft-button").last.click()


def test_rows(spoken, look, place):
    editor, page = spoken, spoken.page
    loras = place / "models" / "loras"
    (loras / LONG).parent.mkdir(parents=True, exist_ok=True)
    serving.lora(loras / LONG, {"ss_tag_frequency": json.dumps({"10_x": {"ink wash": 12, "b" * 60: 3}})})
    (loras / LONG).with_suffix(".png").write_bytes(serving.picture(64, 48, (30, 120, 200)))
    with_blocks(loras / "ink.safetensors")
    presets = place / "user" / "default" / "graft_lora_presets"
    presets.mkdir(parents=True, exist_ok=True)
    kept = {name: {"version": 1, "rows": [{"file": "zorp.safetensors"}]} for name in ("night", "a preset of mine " * 4)}
    for name, rows in kept.items():
        (presets / f"{name.strip()}.json").write_text(json.dumps(rows))
    editor.clear()
    editor.do("() => app.refreshComboInNodes()")
    nodes = editor.add("GraftLoadLoRAs", 66, 90), editor.add("GraftLoRAStack", 560, 90)
    broken = {"file": "ink.safetensors", "blocks": "IN=0.5", "schedule": "0.8-0.2", "model": -12.25, "clip": 100}
    rows = LONG, broken, {"file": "zorp.safetensors", "on": False}, {"file": "gone/ink_2.safetensors", "blocks": "D=0"}
    give(editor, nodes[0], *rows)
    editor.do("([id, text]) => { app.graph.getNodeById(id).widgets[0].value = text }", [nodes[1], '{"version": 9}'])
    bring(editor, ".graft-more", 1).click()
    bring(editor, ".graft-info-button").click()
    page.locator(".graft-slider:visible").first.wait_for()
    page.locator(".graft-preview:visible").wait_for()
    for size in sized(editor):
        bring(editor, ".graft-heads")
        editor.do(DROP, [".graft-stack", [("notes.txt", base64.b64encode(b"a").decode())]])
        look(f"rows-{size}")
        bring(editor, ".graft-file").click(button="right")
        look(f"row-menu-{size}")
        page.keyboard.press("Escape")
        page.locator(".graft-file:visible").first.click()
        page.locator(".graft-picker-option").first.wait_for()
        look(f"picker-{size}")
        page.locator(".graft-picker-search").fill("nothing like it")
        look(f"picker-empty-{size}")
        page.keyboard.press("Escape")
        bring(editor, ".graft-foot .graft-button", 2).click()
        page.locator(".graft-preset").first.wait_for()
        look(f"presets-{size}")
        page.locator(".graft-presets .graft-icon").last.click()
        page.locator(".graft-presets .graft-text").fill("a/b")
        page.keyboard.press("Enter")
        look(f"presets-refused-{size}")
        page.keyboard.press("Escape")


def fail(editor, node, words):
    """An error of a node, of which older front ends also open a dialog."""
    editor.do(SEND, ["execution_error", {"node_id": str(node), "exception_message": words, "traceback": []}])
    editor.settle()
    editor.dismiss()


def train(editor, node):
    """Sixty steps of a run with a spike and all that a step can say, and previews of three steps."""
    said = {"node": str(node), "run": "r", "until": 100_000, "rate": 1e-4, "speed": 0.25, "left": 99_999}
    for number in range(1, 61):
        loss = 40.0 if number == 30 else 0.2 + 0.1 * (number % 7)
        held = {"validation": 0.5, "average": 0.45} if number % 20 == 0 else {}
        editor.do(SEND, ["graft.step", {**said, **held, "step": number, "loss": loss, "memory": 12_345_678_901}])
    for number in (20, 40, 60):
        one = {"filename": f"zorp-0{number // 20}.png", "subfolder": "concept", "type": "input"}
        strengths = ("weights",) * 3  # of a slider: -1, 0 and 1
        pictures = [{**one, "label": label, "prompt": at} for at in (0, 1) for label in (*strengths, "average")]
        editor.do(SEND, ["graft.preview", {"node": str(node), "run": "r", "step": number, "pictures": pictures}])
    editor.settle()


def test_training(spoken, look):
    editor, page = spoken, spoken.page
    editor.clear()
    running, failed, gone = (editor.add("TrainStep", x, 90) for x in (66, 470, 874))
    for node in (running, failed):
        train(editor, node)
    words = f"The loss is not finite.\nLower the learning rate.\n{ENDLESS}"
    fail(editor, failed, words)
    editor.do(
        "(id) => { const node = app.graph.getNodeById(id);"
        " node.properties['graft run'] = {run: 'a run of mine', key: 'k'}; node.onConfigure?.({}) }",
        gone,
    )
    panel = page.locator(".graft-training:visible").first
    for box in panel.locator(".graft-legend input:visible").all():
        box.check()
    compare = panel.locator(".graft-gallery-head input[type=checkbox]")
    for size in sized(editor):
        compare.uncheck()
        bring(editor, ".graft-training .graft-status")
        panel.locator(".graft-chart").hover(position={"x": 80, "y": 60})
        look(f"training-{size}")
        compare.check()
        panel.locator(".graft-chart").hover(position={"x": 250, "y": 60})
        look(f"training-compare-{size}")
        compare.uncheck()
        bring(editor, ".graft-training .graft-legend")
        panel.locator(".graft-large").click()
        page.locator("dialog .graft-chart").hover(position={"x": 300, "y": 60})
        look(f"training-full-{size}")
        page.locator("dialog .graft-enlarge").first.click()
        page.locator("dialog").last.locator("input[type=checkbox]").check()
        look(f"training-enlarged-{size}")
        page.keyboard.press("Escape")
        page.wait_for_function("() => document.querySelectorAll('dialog').length === 1")
        page.keyboard.press("Escape")
        page.locator("dialog").wait_for(state="detached")


PREFERENCES = "**/graft/preferences"
PAIR = {
    "folder": f"graft_preferences/{'a run of mine ' * 3}",
    "pairs": 12,
    "name": "steps-20-60-ab12",
    "captioned": False,
}


def answering(**answer):
    """What answers a request of the page in place of the server."""
    return lambda route: route.fulfill(**answer)


def test_preferences(spoken, look):
    """Compared previews, one of them marked as the better one; what is said of the pair, and of one that is refused."""
    editor, page = spoken, spoken.page
    editor.clear()
    train(editor, editor.add("TrainStep", 66, 90))
    panel = page.locator(".graft-training:visible")
    panel.locator(".graft-gallery-head input[type=checkbox]").check()
    refusal = {"error": "the preview of step 20 has been removed; choose another step"}
    for size in sized(editor):
        for name, answer in (("preferred", {"json": PAIR}), ("not-preferred", {"json": refusal, "status": 404})):
            page.route(PREFERENCES, answering(**answer))
            bring(editor, ".graft-training .graft-gallery")
            panel.locator(".graft-verdict").first.click()
            look(f"{name}-{size}")
            panel.locator(".graft-enlarge").first.click()
            page.locator("dialog .graft-verdict").first.wait_for()
            look(f"{name}-large-{size}")
            page.keyboard.press("Escape")
            page.locator("dialog").wait_for(state="detached")
            page.unroute(PREFERENCES)


def test_averages_tokens_and_errors(spoken, look):
    editor = spoken
    editor.clear()
    upper = ("EMAMerge", "ApplyToDo", "EMAMerge")
    average, todo, empty = (editor.add(kind, 66 + 404 * at, 90) for at, kind in enumerate(upper))
    lower = ("GraftDataset", "GraftLoRAStack", "GraftWords")  # the last has a panel only for its errors
    data, stack, words = (editor.add(kind, 66 + 470 * at, 560) for at, kind in enumerate(lower))
    steps = list(range(1, 100))
    rising = [step / 100 for step in steps]
    curves = [{"name": f"width 0.{name}", "steps": steps, "values": rising} for name in range(1, 6)]
    ran(editor, average, {"graft_profile": [{"version": 1, "curves": curves, "lines": ["an average of 99 steps"]}]})
    ran(editor, todo, {"graft_todo": [{"version": 1, "depths": [{**DEPTH, "skipped": 2}, {**DEPTH, "depth": 2}]}]})
    for size in sized(editor):
        look(f"panels-{size}")
    for node in (average, todo, empty, data, stack, words):
        said = f"row 1 (zorp.safetensors): no block of this file is called Q.\n{ENDLESS}"
        fail(editor, node, said)
    for size in sized(editor):
        look(f"errors-{size}")


KEEP_CURVE = """() => {
  const before = HTMLCanvasElement.prototype.toBlob
  HTMLCanvasElement.prototype.toBlob = function (...given) {
    window.graftCurve = this
    return before.apply(this, given)
  }
}"""
# Put the picture that app mode has of the curve onto the page, on the color that the picture has behind it.
SHOW_CURVE = """() => {
  const canvas = window.graftCurve
  window.graftDrawn.get(canvas).pop() // the background, which comes last
  const [red, green, blue, alpha] = canvas.getContext('2d').getImageData(1, 1, 1, 1).data
  const holder = document.createElement('div')
  holder.className = 'graft graft-kept-curve'
  holder.style.cssText = `position: fixed; z-index: 9999; left: 0; top: 0; width: 300px;
    background: rgb(${red} ${green} ${blue} / ${alpha / 255})`
  holder.append(canvas)
  document.body.append(holder)
}"""
HIDE_CURVE = "() => { document.querySelector('.graft-kept-curve')?.remove(); delete window.graftCurve }"
INNER_STEP = """(title) => {
  const outer = app.graph.nodes.find((one) => one.title === title)
  return `${outer.id}:${outer.subgraph.nodes.find((one) => one.type === 'TrainStep').id}`
}"""
CUT_LABELS = """() => [...document.querySelectorAll('[data-testid=linear-widgets], [data-testid=builder-widget-label]')]
  .filter((one) => one.scrollWidth > one.clientWidth + 1).map((one) => one.textContent)"""


@pytest.fixture
def app_mode(editor):
    """The first template as a form, and the id of its Train Step; None where the front end has no app mode (1.27)."""
    page = editor.page
    first_lora.opens_the_template(editor)
    step = editor.do(INNER_STEP, first_lora.BLUEPRINT)
    enter = page.get_by_role("button", name="Enter app mode")
    if not enter.count():
        yield None
        return
    enter.first.click()
    page.get_by_test_id("linear-widgets").first.wait_for()
    page.wait_for_timeout(1500)
    if page.get_by_role("button", name="Skip").count():  # the front end's tour, the first time
        page.get_by_role("button", name="Skip").first.click()
    editor.do(LOAD, SOURCE)
    yield step
    for setting in (["Comfy.Locale", "en"], ["Comfy.ColorPalette", "dark"]):
        editor.do(SETTING, setting)
    editor.settle()
    page.set_viewport_size({"width": 1600, "height": 1000})
    page.get_by_role("button", name="Enter node graph").first.click()
    page.wait_for_function("() => document.querySelector('#graph-canvas').checkVisibility()")
    editor.errors[:] = [error for error in editor.errors if "/graft/runs/" not in error and "404" not in error]


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_labels_of_app_mode(editor, app_mode, language):
    if app_mode is None:
        return
    if language == "zh":
        needs_chinese(editor)
    editor.do(SETTING, ["Comfy.Locale", language])
    for size in sized(editor):
        assert editor.do(CUT_LABELS) == [], size
        editor.screenshot(f"looks-app-{language}-{size}")


def test_the_curve_of_app_mode(editor, app_mode):
    """The picture of it while it trains."""
    if app_mode is None:
        return
    editor.do(KEEP_CURVE)
    editor.do(SEND, ["execution_start", {"prompt_id": "x"}])
    for theme in THEMES:
        editor.do(SETTING, ["Comfy.ColorPalette", theme])
        editor.page.wait_for_timeout(1100)  # pictures of the curve are a second apart
        train(editor, app_mode)
        editor.page.wait_for_function("() => window.graftCurve")
        editor.do(SHOW_CURVE)
        wrong = looked_at(editor)
        editor.screenshot(f"looks-app-curve-{theme}")
        editor.do(HIDE_CURVE)
        assert wrong == [], theme


def conflicts_of(names):
    """What LoRA Conflicts says of three rows, by block, with more conflicts than it writes out."""
    cosines = [(name, (-1) ** at * (0.2 + 0.8 * at / len(names))) for at, name in enumerate(names)]
    pairs = [{"rows": pair, "cosine": -0.9, "blocks": cosines} for pair in ([0, 1], [0, 2], [1, 2])]
    return {
        "stack": "a/b.safetensors",
        "rows": [{"file": LONG, "strength": 0.8, "before": ""} for _ in range(3)],
        "blocks": names,
        "pairs": pairs,
        "fights": 12,
        "worst": [[pair["rows"], name, cosine] for pair in pairs for name, cosine in cosines],
        "after": ["", ", ".join(f"{name}=0" for name in names), "OUT=0"],
    }


@pytest.mark.parametrize("most", (8, 20))
def test_what_loras_do(spoken, look, most):
    """The panels of LoRA Effect and LoRA Conflicts: new, with blocks that have room for their names or have none, after
    their button was pressed, and with an error.
    """
    editor = spoken
    editor.clear()
    kinds = ("GraftLoRAEffect", "GraftLoRAConflicts", "GraftLoRAEffect")
    effect, conflicts, new = (editor.add(kind, 66 + 404 * at, 90) for at, kind in enumerate(kinds))
    still = {**ROW, "whole": 0, "blocks": []}
    rows = [{**ROW, "blocks": BLOCKS[-most:]}, still, {**ROW, "blocks": [{**one, "kept": True} for one in BLOCKS]}]
    ran(editor, effect, {"graft_effect": [{"version": 1, "stack": ["a.safetensors"], "rows": rows}]})
    ran(editor, conflicts, {"graft_conflicts": [conflicts_of([one["name"] for one in BLOCKS[-most:]])]})
    editor.page.locator(".graft-conflicts [role=img]").nth(2).wait_for()
    for size in sized(editor):
        look(f"loras-{most}-{size}")
    for panel in ("effect", "conflicts"):
        editor.page.locator(f".graft-{panel} .graft-button:visible").click()
    words = f"row 1 (zorp.safetensors): no block of this file is called Q.\n{ENDLESS}"
    fail(editor, new, words)
    for size in sized(editor):
        look(f"loras-said-{most}-{size}")


PLANTED = """() => {
  const panel = document.body.appendChild(document.createElement('div'))
  panel.className = 'graft planted'
  panel.style.cssText = 'position: fixed; left: 200px; top: 400px; width: 300px'
  const plant = (style, text) => {
    const one = panel.appendChild(document.createElement('div'))
    one.className = 'planted'
    one.style.cssText = style
    one.textContent = text
    return one
  }
  plant('background: #222; color: #555', 'faint words')
  plant('background: #222; color: #ddd; opacity: 0.4', 'faded words')
  plant('background: #222; color: #ddd; width: 40px; overflow: hidden; white-space: nowrap', 'words that are cut')
  plant('background: #222; color: #ddd; width: 40px; overflow: auto; white-space: nowrap', 'words that scroll sideways')
  plant('background: #222; color: #ddd', 'words below').style.marginTop = '9px'
  plant('background: #222; color: #ddd', 'words above').style.marginTop = '-9px'
  const field = plant('', '').appendChild(document.createElement('input'))
  field.placeholder = 'a hint that its field has no room for'
  field.style.cssText = 'width: 60px; background: #222; color: #ddd'
  const chart = panel.appendChild(document.createElement('canvas'))
  chart.className = 'graft-chart planted'
  chart.style.background = '#222'
  const pen = chart.getContext('2d')
  pen.clearRect(0, 0, 9, 9)
  pen.strokeStyle = '#444'
  pen.stroke()
  pen.fillStyle = '#666'
  pen.fillText('7', 5, 5)
  const box = document.body.appendChild(document.createElement('div'))
  box.className = 'graft graft-popup planted'
  box.style.cssText = 'left: calc(100vw - 50px); top: 9px; width: 90px'
  box.textContent = 'half of it is outside'
}"""
WANTED = {
    "faint words": " of 4.5: div.planted “faint words”",
    "faded words": " of 4.5: div.planted “faded words”",
    "cut words": "cut div.planted “words that are cut”",
    "scrolled words": "sideways div.planted “words that scroll sideways”",
    "overlap": "overlap div.planted “words below” and div.planted “words above”",
    "cut hint": "cut input. “a hint that its field has no room for”",
    "line": " of 3: line #444444 of a chart",
    "number": " of 4.5: text #666666 of a chart",
    "outside": "beyond the window div.graft graft-popup planted",
}


def test_what_is_planted_is_found(editor):
    """The measure itself: nothing wrong with a panel, and each thing that is planted into it is named."""
    editor.do(LOAD, SOURCE)
    editor.clear()
    editor.add("ApplyToDo", 100, 60)
    editor.add("EMAMerge", 600, 60)
    assert looked_at(editor) == []
    editor.do(PLANTED)
    found = looked_at(editor)
    editor.do("() => document.querySelectorAll('.planted').forEach((one) => one.remove())")
    missed = [name for name, words in WANTED.items() if not any(words in line for line in found)]
    assert not missed, found
