"""App mode: the first template as a form without the graph. What the front end shows there are files, so the path of
the saved LoRA, a text, is seen in the graph only.
"""

import first_lora
import pytest

SMALL = """() => {
  const small = {EmptyLatentImage: {width: 64, height: 64, batch_size: 1}, KSampler: {steps: 2}}
  for (const node of app.graph.nodes) {
    for (const [name, value] of Object.entries(small[node.type] ?? {})) {
      node.widgets.find((one) => one.name === name).value = value
    }
  }
}"""
NINE = ["seed", "folder", "resolution", "rank", "learning_rate", "batch_size", "steps", "run", "prefix"]
SHOWN = "() => document.querySelector('#graph-canvas').checkVisibility()"
PICTURES = """() => [...document.querySelectorAll('[data-testid=linear-outputs] img')]
  .filter((one) => one.naturalWidth).map((one) => new URL(one.src).searchParams.get('filename'))"""


def fill_in(form, name, value):
    """Type a value into the field with this label."""
    item = form.get_by_test_id("app-mode-widget-item").filter(has=form.page.get_by_text(name, exact=True))
    item.locator("input").click(force=True)  # a number's field lies below what drags its value
    form.page.keyboard.press("Control+a")
    form.page.keyboard.type(str(value))
    form.page.keyboard.press("Tab")


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
    for name, value in (("resolution", 64), ("batch_size", 2), ("steps", 4), ("run", run)):
        fill_in(form, name, value)
    sent = {name: value for node in editor.prompt().values() for name, value in node["inputs"].items()}
    assert (sent["resolution"], sent["batch_size"], sent["run"]) == (64, 2, run)
    saved = place / "output" / "loras"
    before = set(saved.glob("first_*.safetensors"))
    page.get_by_test_id("linear-run-button").get_by_role("button", name="Run", exact=True).click()
    page.wait_for_function(f"() => {{ const found = ({PICTURES})(); return found.length >= 2 }}")
    editor.wait_until_idle()
    after, curve = editor.do(PICTURES)[:2]
    assert after.startswith("after_") and curve.startswith("loss_")
    assert len(set(saved.glob("first_*.safetensors")) - before) == 1
    assert (place / "output" / "graft" / run).is_dir()
    editor.screenshot("app-mode-trained")
    page.get_by_role("button", name="Enter node graph").first.click()
    page.wait_for_function(SHOWN)
