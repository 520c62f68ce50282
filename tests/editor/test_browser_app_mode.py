"""App mode: the first template as a form without the graph, with the curve, the previews by step and the saved file."""

import re

import first_lora
import pytest

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
NINE = ["seed", "folder", "resolution", "rank", "learning rate", "batch size", "steps", "run", "filename prefix"]
SHOWN = "() => document.querySelector('#graph-canvas').checkVisibility()"
OUTPUTS = "[data-testid=linear-outputs]"
PICTURES = """() => [...document.querySelectorAll('[data-testid=linear-outputs] img')]
  .filter((one) => one.naturalWidth).map((one) => new URL(one.src).searchParams.get('filename'))"""
LIVE = """() => [...document.images].some((one) => one.src.startsWith('blob:') && one.checkVisibility()
  && one.naturalWidth === 960 && one.naturalHeight === 540)"""
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


def test_the_first_template_is_a_form_that_trains_without_the_graph(editor, place):
    page, run = editor.page, "app nodes2" if editor.modern else "app classic"
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
    assert form.get_by_test_id("builder-widget-label").all_inner_texts() == NINE
    editor.screenshot("app-mode-form")
    for name, value in (("resolution", 64), ("batch size", 2), ("steps", STEPS), ("run", run)):
        fill_in(form, name, value)
    sent = {name: value for node in editor.prompt().values() for name, value in node["inputs"].items()}
    assert (sent["resolution"], sent["batch_size"], sent["run"]) == (64, 2, run)
    saved = place / "output" / "loras"
    before = set(saved.glob("first_*.safetensors"))
    page.get_by_test_id("linear-run-button").get_by_role("button", name="Run", exact=True).click()
    page.wait_for_function(LIVE)  # the curve, while it trains
    editor.screenshot("app-mode-trains")
    editor.wait_until_idle()
    page.wait_for_function(f"() => ({PICTURES})().length === {len(WANTED)}")
    assert all(name.startswith(start) or start in name for name, start in zip(editor.do(PICTURES), WANTED, strict=True))
    (file,) = set(saved.glob("first_*.safetensors")) - before
    assert (place / "output" / "graft" / run).is_dir()
    editor.screenshot("app-mode-trained")
    looks_at_outputs(editor, file)
    page.get_by_role("button", name="Enter node graph").first.click()
    page.wait_for_function(SHOWN)
