"""The training panel as a person uses it: what comes back after a reload, in a second tab and after the server was
killed; the chart's range, values and sizes; previews by step.
"""

import csv
import math
import re

import pytest
from browsing import VISIBLE, Editor
from graft_nodes.training.reports.curve_table import curve_table
from serving import Server, few_pictures, named_front_end

SEND = "([name, detail]) => (app.api ?? window.comfyAPI.api.api).dispatchEvent(new CustomEvent(name, {detail}))"
STATUS = ".graft-trained .graft-status:visible"
STEPS = 100_000


def build(editor, run):
    """A workflow that trains for hours on the demo's model; the id of its Train Step."""
    add = editor.add
    editor.clear()
    demo, data = add("GraftDemo", 40, 60), add("GraftDataset", 300, 60, folder="few", resolution=64, buckets=False)
    start, step = add("GraftTrainStart", 700, 60, run=run), add("TrainStep", 1050, 60, steps=STEPS, snapshot_every=3)
    latent, text = add("EmptyLatentImage", 300, 700, width=64, height=64), add("CLIPTextEncode", 700, 500, text="zorp")
    for source, output, target, name in (
        (demo, 2, data, "vae"),
        (demo, 1, data, "clip"),
        (demo, 0, start, "model"),
        (demo, 1, start, "clip"),
        (demo, 2, start, "vae"),
        (data, 0, start, "dataset"),
        (start, 0, step, "state"),
        (demo, 1, text, "clip"),
        (text, 0, step, "positive"),
        (latent, 0, step, "latent"),
    ):
        editor.link(source, output, target, name)
    widgets = "app.graph.getNodeById(id).widgets.find((one) => one.name === 'preview_every')"
    editor.do(f"(id) => {{ {widgets}.value = 5 }}", step)
    return step


def reached(editor, least=1):
    """The step that the panel says, once it is at least that."""
    editor.page.wait_for_function(
        f"([where, least]) => Number(({VISIBLE})(where)?.innerText.match(/step (\\d+)/)?.[1]) >= least",
        arg=[STATUS.replace(":visible", ""), least],
    )
    return int(re.search(r"step (\d+)", editor.page.locator(STATUS).inner_text())[1])


def first_step(editor):
    """The first step that the chart knows: what it says at its left edge."""
    editor.page.mouse.move(5, 500)
    editor.page.locator(".graft-trained .graft-chart:visible").hover(position={"x": 45, "y": 60})
    return int(re.search(r"step (\d+)", editor.page.locator(".graft-tip:visible").inner_text())[1])


def begins_at_the_first_step(editor):
    """Whether the chart has the whole run; at its left edge a pixel is several steps of a long one."""
    return first_step(editor) <= 1 + reached(editor) // 100


def show(editor, node):
    """Bring the training panel's node to the upper left."""
    editor.do(
        "(id) => { const at = app.graph.getNodeById(id).pos; app.canvas.ds.scale = 1;"
        " app.canvas.ds.offset = [160 - at[0], 60 - at[1]]; app.canvas.setDirty(true, true) }",
        node,
    )
    editor.page.wait_for_timeout(500)


def test_the_curve_comes_back_after_a_reload_in_a_second_tab_and_after_the_server_was_killed(browser, modern, tmp_path):
    (tmp_path / "input").mkdir()
    few_pictures(tmp_path / "input")
    server = Server(tmp_path, *named_front_end())
    try:
        editor = Editor(browser, server.address, modern)
        node = build(editor, "long run")
        show(editor, node)
        editor.queue()
        at = reached(editor, 6)
        # A reload in mid-run: nobody has touched the graph since it was queued.
        editor.open()
        show(editor, node)
        assert reached(editor, at) >= at and begins_at_the_first_step(editor)
        assert f"of {STEPS}" in editor.page.locator(STATUS).inner_text()
        figures = editor.page.locator(".graft-training figcaption:visible")
        figures.first.wait_for()
        # Previews and the state now: the buttons beside Stop.
        for what in ("sample", "save"):
            editor.page.locator(f".graft-actions button[data-ask={what}]:visible").click()
        editor.page.locator(STATUS).get_by_text("saved at step").wait_for()
        editor.page.locator(".graft-actions button[data-ask=sample]:visible:enabled").wait_for()
        editor.screenshot("training-asked")
        # A second tab with the same workflow: it has queued nothing, and hears of the end all the same.
        saved, other = editor.saved(), Editor(browser, server.address, modern)
        other.load(saved)
        show(other, node)
        reached(other, at)
        assert begins_at_the_first_step(other)
        other.page.locator(".graft-stop:visible").click()
        for one in (editor, other):
            one.page.locator(STATUS).get_by_text(re.compile(rf"stopped at \d+ of {STEPS}, kept; Run cont")).wait_for()
            assert one.page.locator(".graft-stop:visible").count() == 0 and begins_at_the_first_step(one)
        stopped = reached(editor)
        # Run continues from there, and the whole curve is drawn; then the power fails.
        editor.queue()
        reached(editor, stopped + 3)
        assert begins_at_the_first_step(editor)
        other.page.close()
        server.process.kill()
        server.process.wait()
        server = Server(tmp_path, *named_front_end(), port=server.port)
        editor.open()
        show(editor, node)
        kept = reached(editor, stopped)
        assert f"stopped at {kept} of {STEPS}, kept; Run continues" in editor.page.locator(STATUS).inner_text()
        assert begins_at_the_first_step(editor)
        figures.first.wait_for()
        editor.screenshot("training-after-a-restart")
        editor.page.close()
    finally:
        server.process.kill()
        server.process.wait()


def feed(editor, node, losses, **more):
    """Steps of a run, all at once."""
    editor.do(
        """([node, losses, more]) => {
          const api = app.api ?? window.comfyAPI.api.api
          losses.forEach((loss, index) => {
            const detail = {node: String(node), run: 'r', step: index + 1, until: 1000, loss, rate: 1e-4, ...more}
            api.dispatchEvent(new CustomEvent('graft.step', {detail}))
          })
        }""",
        [node, losses, more],
    )
    editor.page.wait_for_timeout(500)


RANGE = """async ([losses, options]) => {
  const pack = LiteGraph.registered_node_types.TrainStep.nodeData.python_module.split('.').pop()
  const {Series, Smoothed, draw, logTicks} = await import(`/extensions/${pack}/chart.js`)
  const [series, smooth] = [new Series(), new Smoothed(0.95)]
  losses.forEach((loss, index) => { series.add(index + 1, loss); smooth.add(index + 1, loss) })
  const canvas = document.body.appendChild(document.createElement('canvas'))
  const curves = [{series, color: 'red'}, {series: smooth, color: 'blue', within: series}]
  const found = draw(canvas, 400, 200, options.only ? [curves[1]] : curves, String, options)
  canvas.remove()
  return {...found, ticks: logTicks(-3, 2)}
}"""


def test_one_spike_does_not_flatten_the_curve(editor):
    losses = [0.1 + 0.05 * ((7 * index) % 10) / 10 for index in range(300)]
    spiked = [*losses[:150], 1e4, *losses[151:]]
    plain, robust, full = (
        editor.do(RANGE, [values, {"robust": on}]) for values, on in ((losses, True), (spiked, True), (spiked, False))
    )
    assert not plain["clipped"] and plain["high"] == max(losses), "without outliers the range is that of the values"
    assert robust["clipped"] and robust["high"] < 0.17 and robust["low"] == plain["low"]
    assert full["high"] == 1e4 and not full["clipped"]
    smooth = editor.do(RANGE, [spiked, {"robust": True, "only": True}])
    assert smooth["high"] < 0.17, "the smoothed curve keeps the spike for long"
    steps = [0.1] * 100 + [0.01] * 100
    assert not editor.do(RANGE, [steps, {"robust": True}])["clipped"], "a drop of the loss is not an outlier"
    log = editor.do(RANGE, [[1.0, 0.1, 0.01, 0.0], {"log": True}])
    assert log["high"] == 0 and log["low"] == -2 and log["clipped"], "what is not above zero is drawn at the edge"
    assert log["ticks"] == [0.001, 0.01, 0.1, 1, 10, 100]


# What `draw` writes and strokes on a canvas: {texts: [[text, x, y]], lines: {color: [[x, y], …]}, found}.
RECORDED = """async ([losses, rates, options]) => {
  const pack = LiteGraph.registered_node_types.TrainStep.nodeData.python_module.split('.').pop()
  const {Series, draw} = await import(`/extensions/${pack}/chart.js`)
  const series = (values) => {
    const made = new Series()
    values.forEach((value, index) => made.add(index + 1, value))
    return made
  }
  const canvas = document.body.appendChild(document.createElement('canvas'))
  const [pen, texts, lines] = [canvas.getContext('2d'), [], {}]
  let path = []
  const noted = {
    beginPath() { path = []; pen.beginPath() },
    lineTo(x, y) { path.push([x, y]); pen.lineTo(x, y) },
    stroke() { lines[pen.strokeStyle] = path; pen.stroke() },
    fillText(text, x, y) { texts.push([text, x, y]); pen.fillText(text, x, y) },
  }
  const get = (_, name) => noted[name] ?? (pen[name]?.bind ? pen[name].bind(pen) : pen[name])
  const set = (_, name, value) => { pen[name] = value; return true }
  canvas.getContext = () => new Proxy({}, {get, set})
  const right = options.right ? {series: series(rates), color: '#0000ff', width: 1, format: String} : null
  const curves = [{series: series(losses), color: '#ff0000', width: 1}]
  const found = draw(canvas, 400, 200, curves, String, {...options, right})
  canvas.remove()
  return {texts, lines, found}
}"""


def fits_axis(labels, points, values, of):
    """Whether the points of a curve lie where the labels of its axis say that these values are."""
    (one, above), (other, below) = labels[0], labels[-1]
    slope = (below - above) / (of(other) - of(one))
    expected = [above + slope * (of(value) - of(one)) for value in values]
    assert [y for _, y in points] == pytest.approx(expected, abs=0.01)
    return above - slope * of(one), slope  # where 0 is


def test_the_learning_rate_has_an_axis_of_its_own_from_zero_and_the_log_scale_is_logarithmic(editor):
    losses, rates = [1.0, 0.5, 0.05, 0.2, 0.01], [1e-4, 4e-4, 3e-4, 2e-4, 1e-5]
    for log, of in ((False, float), (True, math.log10)):
        drawn = editor.do(RECORDED, [losses, rates, {"log": log, "right": True}])
        alone = editor.do(RECORDED, [losses, rates, {"log": log}])
        found, edge = drawn["found"], drawn["found"]["left"] + drawn["found"]["width"]
        bottom = max(y for _, _, y in drawn["texts"]) - 4  # the steps are written below the plot
        steps = [text for text in drawn["texts"] if text[2] == bottom + 4]
        left = [(float(text), y) for text, x, y in drawn["texts"] if x < found["left"] and [text, x, y] not in steps]
        right = [(float(text), y) for text, x, y in drawn["texts"] if x > edge and [text, x, y] not in steps]
        assert len(left) > 1 and len(right) > 1
        fits_axis(left, drawn["lines"]["#ff0000"], losses, of)
        zero, slope = fits_axis(right, drawn["lines"]["#0000ff"], rates, float)  # whatever the losses' scale
        assert zero == pytest.approx(bottom, abs=0.01) and slope < 0
        assert min(y for _, y in drawn["lines"]["#0000ff"]) > 0, "all of it can be seen"
        assert [found[name] for name in ("low", "high")] == [alone["found"][name] for name in ("low", "high")]
        assert found["low"] == pytest.approx(of(0.01)) and found["high"] == pytest.approx(of(1.0))
        assert alone["found"]["width"] > found["width"], "the room on the right is the axis's"


# Where a color is in the middle column of the panel's chart: as a share of its height, from above; null if nowhere.
HEIGHT_OF = """(color) => {
  const canvas = (VISIBLE)('.graft-training .graft-chart')
  const at = Math.round(canvas.width / 2)
  const {data} = canvas.getContext('2d').getImageData(at, 0, 1, canvas.height)
  const near = []
  for (let y = 0; y < canvas.height; y++) {
    const off = color.map((value, index) => Math.abs(value - data[4 * y + index])).reduce((one, two) => one + two)
    if (data[4 * y + 3] > 100 && off < 40) near.push(y)
  }
  return near.length ? near.reduce((one, two) => one + two) / near.length / canvas.height : null
}""".replace("VISIBLE", VISIBLE)
LOSS, RATE = [0x4C, 0x8D, 0xD6], [0xAA, 0x76, 0xC2]  # the colors of their curves


def test_learning_rate_and_log_scale_are_drawn_when_they_are_ticked(editor):
    editor.clear()
    node, page = editor.add("TrainStep", 160, 60), editor.page
    feed(editor, node, [10 ** (-index / 50) for index in range(200)])
    legend = page.locator(".graft-legend:visible")
    legend.get_by_label("smoothed").uncheck()
    page.wait_for_timeout(500)
    plain = editor.do(HEIGHT_OF, LOSS)
    assert plain > 0.6 and editor.do(HEIGHT_OF, RATE) is None
    legend.get_by_label("learning rate").check()
    page.wait_for_timeout(500)
    constant = editor.do(HEIGHT_OF, RATE)
    assert constant < 0.25, "near the top of its axis, which begins at zero"
    legend.get_by_label("log scale").check()
    page.wait_for_timeout(500)
    assert 0.35 < editor.do(HEIGHT_OF, LOSS) < 0.6, "a constant factor is a straight line"
    assert editor.do(HEIGHT_OF, RATE) == pytest.approx(constant, abs=0.01)
    editor.screenshot("training-log-scale")
    legend.get_by_label("learning rate").uncheck()
    page.wait_for_timeout(500)
    assert editor.do(HEIGHT_OF, RATE) is None


def test_the_chart_says_its_values_fills_the_node_and_opens_over_the_page(editor):
    editor.clear()
    node = editor.add("TrainStep", 160, 60)
    losses = [0.2] * 100
    losses[49] = 30.0
    feed(editor, node, losses, speed=0.25, validation=0.5)
    page, status = editor.page, editor.page.locator(STATUS)
    assert "s/it 4" in status.inner_text() and "it/s" not in status.inner_text()
    chart, tip = page.locator(".graft-chart:visible"), page.locator(".graft-tip:visible")
    chart.hover(position={"x": 44, "y": 60})
    said = tip.inner_text()
    assert "step 1\n" in said and "loss 0.2\n" in said and "held out 0.5" in said and "learning rate 1.0e-4" in said
    full = page.get_by_role("checkbox", name="full range")
    full.check()
    chart.hover(position={"x": 44 + (chart.bounding_box()["width"] - 54) * 49 / 99, "y": 60})
    assert "step 50\n" in tip.inner_text() and "loss 30" in tip.inner_text()
    for name in ("learning rate", "log scale"):
        page.locator(".graft-legend:visible").get_by_label(name).check()
    before = chart.bounding_box()["height"]
    editor.do("(id) => { const n = app.graph.getNodeById(id); n.setSize([500, n.size[1] + 160]) }", node)
    editor.do("() => app.canvas.setDirty(true, true)")
    page.wait_for_timeout(600)
    assert chart.bounding_box()["height"] > before + 140, "a taller node has a taller chart"
    tall = editor.do("(id) => app.graph.getNodeById(id).size[1]", node)
    feed(editor, node, [0.2] * 3)
    assert editor.do("(id) => app.graph.getNodeById(id).size[1]", node) == tall, "and it does not grow by itself"
    editor.screenshot("training-chart")
    page.get_by_role("button", name="Full size").click()
    page.wait_for_timeout(300)
    assert page.locator("dialog .graft-chart").bounding_box()["width"] > 1400
    feed(editor, node, [0.2] * 5)
    assert "step 5 of" in page.locator("dialog .graft-status").inner_text(), "it goes on in there"
    editor.screenshot("training-full-size")
    page.keyboard.press("Escape")
    page.locator("dialog").wait_for(state="detached")
    assert "step 5 of" in page.locator(".graft-panel .graft-status:visible").inner_text()


def test_the_curves_are_saved_as_the_table_that_the_command_prints(editor, tmp_path):
    editor.clear()
    node = editor.add("TrainStep", 160, 60)
    losses = [0.1 + 0.2, 1e-7, 0.25]
    feed(editor, node, losses[:2], norm=1.5)
    third = {"node": str(node), "run": "r", "step": 3, "until": 9, "loss": None, "rate": 1e-4, "norm": 2.5}
    editor.do(SEND, ["graft.step", {**third, "validation": 0.5, "average": 0.25}])
    editor.page.wait_for_timeout(300)
    with editor.page.expect_download() as saved:
        editor.page.get_by_role("button", name="CSV").click()
    assert saved.value.suggested_filename == "r.csv"
    saved.value.save_as(tmp_path / "r.csv")
    history = {
        "loss": [*losses[:2], math.nan],
        "rate": [1e-4] * 3,
        "norm": [1.5, 1.5, 2.5],
        "validation": [(3, 0.5)],
        "average_validation": [(3, 0.25)],
        "accuracy": [],
    }

    def numbers(text):
        head, *rows = csv.reader(text.splitlines())
        return head, [[float(cell) if cell else None for cell in row] for row in rows]

    assert numbers((tmp_path / "r.csv").read_text()) == numbers(curve_table(history))
    editor.screenshot("training-csv")


NOTICES = """() => {
  window.asked = 0
  window.shown = []
  window.Notification = class {
    static permission = 'default'
    static async requestPermission() { window.asked += 1; return (this.permission = window.answer ?? 'granted') }
    constructor(title, options) { window.shown.push([title, options.body, options.tag]) }
  }
}"""
SET = "([id, value]) => app.extensionManager.setting.set(id, value)"


def test_a_desktop_notice_comes_only_when_it_was_asked_for(editor):
    notice, page = "Graft.Training.Notice", editor.page
    done = {"run": "mine", "ended": "done", "step": 20, "steps": 20, "until": 20, "loss": 0.125, "seconds": 75.0}

    def end(**more):
        summary = {**done, **more}
        editor.do(SEND, ["graft.end", {"node": "1", "run": summary["run"], "ended": "done", "summary": summary}])
        return editor.do("() => window.shown.splice(0)")

    editor.do(NOTICES)
    assert end() == [] and editor.do("() => window.asked") == 0
    editor.do(SET, [notice, True])
    try:
        assert editor.do("() => window.asked") == 1
        said = "step 20 of 20, loss 0.125, 1 min 15 s"
        assert end() == [["mine: training is done", said, "graft mine"]]
        failed = end(ended="failed", steps=0, step=0, loss=None)
        assert failed == [["mine: training has failed", "step 0 of 20, loss \u2013, 1 min 15 s", "graft mine"]]
        assert end(steps=0) == [], "a stored result is not news"
        editor.open()  # a page that opens does not ask
        editor.do(NOTICES)
        assert editor.do("() => window.asked") == 0 and end() == []
        editor.do(SET, [notice, False])
        editor.do("() => { window.answer = 'denied' }")
        editor.do(SET, [notice, True])
        page.get_by_text("The browser does not allow them for this page.").wait_for()
        editor.screenshot("training-no-notices")
        assert end() == []
    finally:
        editor.do(SET, [notice, False])


def test_previews_are_looked_through_by_step_and_compared(editor):
    editor.clear()
    node, page = editor.add("TrainStep", 160, 20), editor.page
    feed(editor, node, [0.2] * 30)
    for number in (1, 2, 3):
        pictures = [
            {
                "filename": f"zorp-0{number}.png",
                "subfolder": "concept",
                "type": "input",
                "label": label,
                "prompt": prompt,
            }
            for prompt in (0, 1)
            for label in ("weights", "average")
        ]
        detail = {"node": str(node), "run": "r", "step": 10 * number, "pictures": pictures}
        editor.do(SEND, ["graft.preview", detail])
    figures = page.locator(".graft-training figure:visible")
    figures.nth(3).wait_for()
    assert figures.count() == 4
    captions = figures.all_inner_texts()
    assert captions == [
        "step 30, weights",
        "step 30, average",
        "step 30, prompt 1, weights",
        "step 30, prompt 1, average",
    ]
    page.get_by_role("slider", name="Step of the previews").focus()
    page.keyboard.press("ArrowLeft")
    assert figures.first.inner_text() == "step 20, weights"
    editor.do(SEND, ["graft.preview", {**detail, "step": 40}])
    assert figures.first.inner_text() == "step 20, weights", "it stays where someone looks"
    page.get_by_role("checkbox", name="Compare").check()
    assert figures.all_inner_texts()[:4] == [
        "step 10, weights",
        "step 20, weights",
        "step 10, average",
        "step 20, average",
    ]
    last = page.get_by_title("Enlarge").nth(7)
    below = last.bounding_box()["y"] - 600  # the row of the last pictures is below the page: move the canvas up
    editor.do("(by) => { app.canvas.ds.offset[1] -= by; app.canvas.setDirty(true, true) }", max(0, below))
    page.wait_for_timeout(500)
    last.click()
    large = page.locator("dialog figure")
    assert large.all_inner_texts() == ["step 10, prompt 1, average", "step 20, prompt 1, average"]
    page.keyboard.press("ArrowRight")
    assert large.nth(1).inner_text() == "step 30, prompt 1, average"
    page.wait_for_function("() => [...document.querySelectorAll('dialog img')].every((one) => one.naturalWidth > 0)")
    assert large.first.locator("img").bounding_box()["height"] > 600
    editor.screenshot("training-compared")
    page.keyboard.press("Escape")
    page.locator("dialog").wait_for(state="detached")
    assert figures.nth(1).inner_text() == "step 20, weights"


LONG = "a photo of zorp, " + "standing in a wide green field under a clear sky, " * 6 + "late afternoon"


def test_several_prompts_have_rows_and_come_back_after_a_reload_with_what_was_marked(browser, modern, tmp_path):
    (tmp_path / "input").mkdir()
    few_pictures(tmp_path / "input")
    server = Server(tmp_path, *named_front_end())
    try:
        editor = Editor(browser, server.address, modern)
        page, node = editor.page, build(editor, "several prompts")
        editor.do(
            "([id, values]) => { for (const one of app.graph.getNodeById(id).widgets)"
            " if (one.name in values) one.value = values[one.name] }",
            [node, {"steps": 10, "preview_every": 5, "prompts": f"a zorp\n# not this\n\n{LONG}"}],
        )
        show(editor, node)
        editor.queue()
        for when in ("as it trained", "after a reload"):
            headings, figures = (page.locator(f".graft-training {one}:visible") for one in (".graft-prompt", "figure"))
            figures.get_by_text("step 10, prompt 2, weights").wait_for()
            editor.wait_until_idle()  # at the end of a step its pictures are put up once more
            assert headings.all_inner_texts() == ["positive prompt", "prompt 1 a zorp", f"prompt 2 {LONG}"]
            assert figures.all_inner_texts() == [f"step 10, {one}weights" for one in ("", "prompt 1, ", "prompt 2, ")]
            tops = [
                one.bounding_box()["y"] for one in (headings.nth(1), figures.nth(1), headings.nth(2), figures.nth(2))
            ]
            assert tops == sorted(tops), "each picture below its own text"
            page.get_by_role("slider", name="Step of the previews").focus()
            page.keyboard.press("ArrowLeft")
            assert figures.nth(1).inner_text() == "step 5, prompt 1, weights"
            page.get_by_role("checkbox", name="Compare").check()
            page.keyboard.press("Home")
            page.get_by_role("slider", name="Step of the previews").focus()
            page.keyboard.press("End")
            assert figures.all_inner_texts()[-2:] == ["step 5, prompt 2, weights", "step 10, prompt 2, weights"]
            editor.do("(id) => { app.canvas.ds.offset[1] -= 300; app.canvas.setDirty(true, true) }")
            page.wait_for_timeout(400)
            editor.screenshot("training-prompts")
            page.get_by_title("Enlarge").last.click()
            assert page.locator("dialog .graft-prompt").inner_text() == LONG
            assert page.locator("dialog figure").nth(1).inner_text() == "step 10, prompt 2, weights"
            page.keyboard.press("Escape")
            page.locator("dialog").wait_for(state="detached")
            verdicts = page.locator(".graft-training").get_by_role("button", name="This one is better")
            if when == "as it trained":
                verdicts.nth(1).click()
            said = page.locator(".graft-training").get_by_text("1 pair in graft_preferences/several prompts")
            said.wait_for()
            assert [one.get_attribute("aria-pressed") for one in verdicts.all()] == ["false", "true", *["false"] * 4]
            assert not editor.errors
            editor.open()
            show(editor, node)
        page.close()
    finally:
        server.process.kill()
        server.process.wait()
