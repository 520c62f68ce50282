"""App mode: the first template as a form without the graph, with the curve, the previews by step and the saved file."""

import re

import first_lora
import pytest
from error_stories import forget_refusals
from test_browser_subgraphs import SEND, sets_folder, step

SMALL = """() => {
  const small = {
    EmptyLatentImage: {width: 64, height: 64, batch_size: 1}, KSampler: {steps: 2}, TrainStep: {preview_every: 6},
  }
  for (const node of app.graph.nodes.flatMap((one) => [one, ...(one.subgraph?.nodes ?? [])])) {
    for (const [name, value] of Object.entries(small[node.type] ?? {})) {
      node.widgets.find((one) => one.name === name).value = value
    }
  }
}"""
STEPS = 12
WANTED = ["after_", "loss_", *(f"-{step:08}-{of}-0" for step in (6, 12) for of in ("weights", "average"))]
TEN = [
    "image folder",
    "prompt",
    "steps",
    "resolution",
    "rank (dim)",
    "learning rate",
    "batch size",
    "seed",
    "run name",
    "filename prefix",
]
SHOWN = "() => document.querySelector('#graph-canvas').checkVisibility()"
OUTPUTS = "[data-testid=linear-outputs]"
PICTURES = """() => [...document.querySelectorAll('[data-testid=linear-outputs] img')]
  .filter((one) => one.naturalWidth).map((one) => new URL(one.src).searchParams.get('filename'))"""
LIVE = """() => [...document.images].some((one) => one.src.startsWith('blob:') && one.checkVisibility()
  && one.naturalWidth === 960 && one.naturalHeight === 540)"""
MESSAGE = ".p-toast-message, [data-testid=toast]"  # of the page; 1.58.1 has its own
ONCE = """([where, text]) =>
  [...document.querySelectorAll(where)].filter((one) => one.textContent.includes(text)).length === 1"""
NONE = ONCE.replace("=== 1", "=== 0")
ICON = "(item) => getComputedStyle(item.firstElementChild, '::before').content"


def fill_in(form, name, value):
    """Type a value into the field with this label."""
    item = form.get_by_test_id("app-mode-widget-item").filter(has=form.page.get_by_text(name, exact=True))
    item.locator("input").click(force=True)  # a number's field lies below what drags its value
    form.page.keyboard.press("Control+a")
    form.page.keyboard.type(str(value))
    form.page.keyboard.press("Tab")


def looks_at_outputs(editor, file):
    """The saved file by its name, to be downloaded, and the previews by their steps."""
    page = editor.page
    items = page.locator(f"{OUTPUTS} [data-testid=linear-history-item]")
    (without_picture,) = (one for one in items.all() if not one.locator("img").count())
    assert without_picture.evaluate(ICON) not in ("none", "normal"), "it can be seen"
    without_picture.click()
    page.get_by_text(file.name, exact=True).wait_for()
    editor.screenshot("app-mode-file")
    with page.expect_download() as download:
        page.get_by_role("button", name="Download", exact=True).first.click()
    assert download.value.path().read_bytes() == file.read_bytes()
    items.last.click()
    page.get_by_text(re.compile(rf"64 x 64\s+\| step {STEPS}, average")).wait_for()


def enters_app_mode(editor):
    """The first template as a form; which is shown."""
    page = editor.page
    first_lora.opens_the_template(editor)
    enter = page.get_by_role("button", name="Enter app mode")
    if not enter.count():
        pytest.skip("this front end has no app mode")
    editor.do(SMALL)
    enter.first.click()
    form = page.get_by_test_id("linear-widgets").first
    form.wait_for()
    page.wait_for_timeout(1500)
    if page.get_by_role("button", name="Skip").count():  # the front end's tour, the first time
        page.get_by_role("button", name="Skip").first.click()
    assert not editor.do(SHOWN), "no graph in sight"
    return form


def presses_run(editor):
    editor.page.get_by_test_id("linear-run-button").get_by_role("button", name="Run", exact=True).click()


def leaves_app_mode(editor):
    editor.page.get_by_role("button", name="Enter node graph").first.click()
    editor.page.wait_for_function(SHOWN)


def test_the_first_template_is_a_form_that_trains_without_the_graph(editor, place):
    page, run = editor.page, "app nodes2" if editor.modern else "app classic"
    form = enters_app_mode(editor)
    assert form.get_by_test_id("builder-widget-label").all_inner_texts() == TEN
    editor.screenshot("app-mode-form")
    for name, value in (("resolution", 64), ("batch size", 2), ("steps", STEPS), ("run name", run)):
        fill_in(form, name, value)
    sent = {name: value for node in editor.prompt().values() for name, value in node["inputs"].items()}
    assert (sent["resolution"], sent["batch_size"], sent["run"]) == (64, 2, run)
    saved = place / "output" / "loras"
    before = set(saved.glob("first_*.safetensors"))
    presses_run(editor)
    page.wait_for_function(LIVE)  # the curve, while it trains
    editor.screenshot("app-mode-trains")
    editor.wait_until_idle()
    page.wait_for_function(f"() => ({PICTURES})().length === {len(WANTED)}")
    assert all(name.startswith(start) or start in name for name, start in zip(editor.do(PICTURES), WANTED, strict=True))
    (file,) = set(saved.glob("first_*.safetensors")) - before
    assert (place / "output" / "graft" / run).is_dir()
    editor.screenshot("app-mode-trained")
    looks_at_outputs(editor, file)
    leaves_app_mode(editor)


def test_what_is_wrong_and_how_a_run_ended_is_said_where_no_graph_is_in_sight(editor):
    page = editor.page
    enters_app_mode(editor)
    inside = (
        "(type) => app.graph.nodes.find((node) => node.subgraph).subgraph.nodes.find((one) => one.type === type).id"
    )
    outer, inner = editor.titled(first_lora.BLUEPRINT), editor.do(inside, "TrainStep")
    sets_folder(editor, "no such folder")
    presses_run(editor)
    wrong = page.locator(MESSAGE).filter(has_text="there is no folder 'no such folder' in ComfyUI's input folder")
    wrong.filter(has_text="Dataset").first.wait_for()
    refused = "() => Object.keys(app.lastNodeErrors ?? {}).length"
    page.wait_for_function(refused)
    page.wait_for_function(ONCE, arg=[MESSAGE, "there is no folder 'no such folder'"])  # what it replaces fades
    editor.screenshot("app-mode-wrong-folder")
    forget_refusals(editor)
    states = [{"key": "c", "step": 4, "kind": "snapshot", "changed": 2.0, "best": None}]
    page.route("**/graft/runs/r", lambda route: route.fulfill(json={"run": "r", "states": states}))
    editor.do(SEND, ["execution_start", {"prompt_id": "x"}])  # of the next run
    page.wait_for_function(NONE, arg=[MESSAGE, "there is no folder 'no such folder'"])  # several may fade at once
    for number in range(1, 6):
        step(editor, f"{outer}:{inner}", number)
    editor.do(SEND, ["execution_interrupted", {"node_id": f"{outer}:{inner}", "prompt_id": "x"}])
    ended = page.locator(MESSAGE).filter(has_text="interrupted; step 4 is kept, Run continues from there")
    ended.filter(has_text="Train Step").wait_for()
    editor.screenshot("app-mode-interrupted")
    editor.do(SEND, ["execution_start", {"prompt_id": "x"}])
    ended.wait_for(state="detached")
    page.unroute("**/graft/runs/r")
    sets_folder(editor, "graft_demo/concept")
    leaves_app_mode(editor)
