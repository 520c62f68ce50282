"""Panels in a real browser: the loss as it is trained, tokens by depth, a dataset's pictures; quick with 100,000
points, legible.
"""

import re

from browsing import VISIBLE
from serving import picture

SEND = "([name, detail]) => (app.api ?? window.comfyAPI.api.api).dispatchEvent(new CustomEvent(name, {detail}))"


def step(editor, node, number, loss=0.1, until=1000, run="r", validation=None, average=None):
    detail = {"node": str(node), "run": run, "step": number, "until": until, "loss": loss, "rate": 1e-4, "norm": 1.0}
    editor.do(SEND, ["graft.step", {**detail, "validation": validation, "average": average}])


def ran(editor, node, output):
    editor.do("([id, output]) => app.canvas.graph.getNodeById(id).onExecuted(output)", [node, output])
    editor.page.wait_for_timeout(300)


def test_the_loss_is_drawn_as_it_comes(editor):
    editor.clear()
    node = editor.add("TrainStep", 100, 100)
    editor.page.wait_for_timeout(300)
    assert editor.page.locator(".graft-chart:visible").count() == 0
    for number in range(1, 6):
        step(editor, node, number, 1 / number)
    editor.page.locator(".graft-chart:visible").wait_for()
    status = editor.page.locator(".graft-training .graft-status:visible")
    status.filter(has_text="step 5 of 1000").wait_for()
    blank = "(c) => c.getContext('2d').getImageData(0, 0, c.width, c.height).data.every((v) => v === 0)"
    assert not editor.page.locator(".graft-chart:visible").evaluate(blank)
    assert editor.page.locator(".graft-stop:visible").is_visible()
    step(editor, node, 3, 0.5)  # a run that went back is drawn from there
    status.filter(has_text="step 3 of 1000").wait_for()


def test_the_held_out_loss_of_the_average_is_drawn_where_there_is_one(editor):
    editor.clear()
    node = editor.add("TrainStep", 100, 100)
    editor.page.wait_for_timeout(300)
    history = {"loss": [0.1] * 4, "rate": [1e-4] * 4, "norm": [1.0] * 4, "validation": [[0, 0.9], [4, 0.8]]}
    stored = {"run": "r", "key": "b", "step": 4, "history": history, "previews": []}
    averages = {"average_validation": [[0, 0.9], [4, 0.25]]}
    editor.page.route("**/graft/runs/**", lambda route: route.fulfill(json=stored))
    status = editor.page.locator(".graft-training .graft-status:visible")
    switch = editor.page.locator(".graft-training .graft-legend label:visible", has_text="held out, average")
    step(editor, node, 1, validation=0.9)
    editor.page.locator(".graft-chart:visible").wait_for()
    assert switch.count() == 0 and "average" not in status.inner_text()
    step(editor, node, 2, validation=0.8, average=0.7)
    switch.wait_for()
    assert "held out 0.8" in status.inner_text() and "average 0.7" in status.inner_text()
    ran(editor, node, {"graft_run": [{"run": "r", "key": "b"}]})  # a run from before it was measured
    switch.wait_for(state="detached")
    assert "average" not in status.inner_text()
    stored = {**stored, "key": "c", "history": {**history, **averages}}
    ran(editor, node, {"graft_run": [{"run": "r", "key": "c"}]})
    switch.wait_for()
    assert "average 0.25" in status.inner_text()
    editor.page.unroute("**/graft/runs/**")


def test_the_implicit_accuracy_of_preference_pairs_is_drawn_and_comes_back_from_the_store(editor):
    editor.clear()
    node = editor.add("TrainStep", 100, 100)
    editor.page.wait_for_timeout(300)
    history = {"loss": [0.7] * 4, "rate": [1e-4] * 4, "norm": [1.0] * 4, "validation": [[0, 0.69], [4, 0.4]]}
    stored = {"run": "r", "key": "b", "step": 4, "history": history, "previews": []}
    editor.page.route("**/graft/runs/**", lambda route: route.fulfill(json=stored))
    status = editor.page.locator(".graft-training .graft-status:visible")
    switch = editor.page.locator(".graft-training .graft-legend label:visible", has_text="implicit accuracy")
    detail = {"node": str(node), "run": "r", "until": 9, "loss": 0.7, "rate": 1e-4, "norm": 1.0}
    editor.do(SEND, ["graft.step", {**detail, "step": 1, "validation": 0.69, "average": None}])
    editor.page.locator(".graft-chart:visible").wait_for()
    assert switch.count() == 0 and "accuracy" not in status.inner_text()
    editor.do(SEND, ["graft.step", {**detail, "step": 2, "validation": 0.6, "average": None, "accuracy": 0.75}])
    switch.wait_for()
    assert "implicit accuracy 0.75" in status.inner_text()
    ran(editor, node, {"graft_run": [{"run": "r", "key": "b"}]})  # a run without pairs
    switch.wait_for(state="detached")
    stored = {**stored, "key": "c", "history": {**history, "accuracy": [[0, 0.5], [4, 0.95]]}}
    ran(editor, node, {"graft_run": [{"run": "r", "key": "c"}]})
    switch.wait_for()
    assert "implicit accuracy 0.95" in status.inner_text()
    editor.screenshot("training-implicit-accuracy")
    editor.page.unroute("**/graft/runs/**")


def test_another_run_of_the_same_name_shows_nothing_of_the_one_before(editor):
    """Other settings, the same run name: held-out loss and pictures, while it trains and once it is done."""
    editor.clear()
    node = editor.add("TrainStep", 100, 100)
    editor.page.wait_for_timeout(300)
    status, pictures = (editor.page.locator(f".graft-training {one}:visible") for one in (".graft-status", "img"))
    shown = [
        {"filename": f"zorp-0{number}.png", "subfolder": "concept", "type": "input", "label": "weights"}
        for number in (0, 5)
    ]
    history = {"loss": [0.1] * 4, "rate": [1e-4] * 4, "norm": [1.0] * 4, "validation": []}
    stored = {"b": {"run": "r", "key": "b", "step": 4, "history": history, "previews": [{**shown[1], "step": 4}]}}
    stored["c"] = {**stored["b"], "key": "c", "previews": []}
    asked = re.compile(r"/graft/runs/r/(\w)\?")
    editor.page.route("**/graft/runs/**", lambda route: route.fulfill(json=stored[asked.search(route.request.url)[1]]))
    for number in range(1, 5):
        step(editor, node, number, 1 / number, validation=0.9 if number % 2 == 0 else None)
    editor.do(SEND, ["graft.preview", {"node": str(node), "run": "r", "step": 4, "pictures": shown[:1]}])
    status.get_by_text("held out").wait_for()
    pictures.wait_for()
    step(editor, node, 4)
    editor.page.wait_for_timeout(300)
    assert "held out 0.9" in status.inner_text() and pictures.count() == 0, (
        "it went on from step 3: that of step 2 is its own"
    )
    editor.do(SEND, ["graft.preview", {"node": str(node), "run": "r", "step": 4, "pictures": shown[:1]}])
    step(editor, node, 1)
    editor.page.wait_for_timeout(300)
    assert "held out" not in status.inner_text() and pictures.count() == 0
    editor.do(SEND, ["graft.preview", {"node": str(node), "run": "r", "step": 1, "pictures": shown[:1]}])
    ran(editor, node, {"graft_run": [{"run": "r", "key": "b"}]})
    assert "held out" not in status.inner_text() and "zorp-05" in pictures.get_attribute("src"), (
        "the store knows which are its own"
    )
    ran(editor, node, {"graft_run": [{"run": "r", "key": "c"}]})
    assert pictures.count() == 0, "a stored result that has none"
    editor.page.unroute("**/graft/runs/**")
    late = []
    editor.page.route("**/graft/runs/**", lambda route: late.append(route))
    ran(editor, node, {"graft_run": [{"run": "r", "key": "b"}]})
    step(editor, node, 1)
    late[0].fulfill(json=stored["b"])
    editor.page.wait_for_timeout(300)
    assert "step 1 of 1000" in status.inner_text(), "the next run has begun before the store answered"
    editor.page.unroute("**/graft/runs/**")


def test_a_curve_that_is_flat_but_for_rounding_has_an_axis(editor):
    editor.clear()
    node = editor.add("EMAMerge", 100, 60)
    values = [0.1, 0.1 + 2**-56, 0.1 + 2**-55]
    ran(
        editor,
        node,
        {
            "graft_profile": [
                {"version": 1, "curves": [{"name": "", "steps": [1, 2, 3], "values": values}], "lines": []}
            ]
        },
    )
    chart = editor.page.locator(".graft-average canvas:visible")
    chart.wait_for()
    assert not chart.evaluate(
        "(c) => c.getContext('2d').getImageData(0, 0, c.width, c.height).data.every((v) => v === 0)"
    )
    found = editor.do("""async () => {
          const pack = LiteGraph.registered_node_types.TrainStep.nodeData.python_module.split('.').pop()
          const {ticks} = await import(`/extensions/${pack}/chart.js`)
          return [
            ticks(0, 1), ticks(0.1, 0.1 + 2 ** -55), ticks(0, 100, 3), ticks(-0.2, 0.25), ticks(5, 5, 2),
            ticks(1e-300, 2e-300),
            ticks(0.11, 0.29), ticks(0.05, 0.19), ticks(1, 8, 3, 1), ticks(1, 2, 3, 1), ticks(1, 3, 5, 1),
          ]
        }""")
    assert found[6:8] == [[0.15, 0.2, 0.25], [0.05, 0.1, 0.15]], "three"
    assert found[8:] == [[2, 4, 6, 8], [1, 2], [1, 2, 3]], "whole steps"
    assert found[:1] + found[2:4] == [[0, 0.5, 1], [0, 50, 100], [-0.2, 0, 0.2]] and all(
        len(one) <= 40 for one in found
    )


def test_a_hundred_thousand_points_stay_quick(editor):
    editor.clear()
    node = editor.add("TrainStep", 100, 100)
    editor.page.wait_for_timeout(300)
    columns = editor.do(
        """async () => {
          const pack = LiteGraph.registered_node_types.TrainStep.nodeData.python_module.split('.').pop()
          const {Smoothed, Series, decimated} = await import(`/extensions/${pack}/chart.js`)
          const series = new Smoothed(0.9)
          for (let step = 1; step <= 100000; step++) series.add(step, step === 70001 ? 1e9 : Math.sin(step))
          const plain = new Series()
          for (let step = 1; step <= 100000; step++) plain.add(step, step === 70001 ? 1e9 : Math.sin(step))
          const out = decimated(plain, 1, 100000, 300)
          return [out.length, Math.max(...out.map((one) => one[2])), decimated(series, 1, 100000, 300).length]
        }""",
    )
    assert columns[0] <= 300 and columns[2] <= 300 and columns[1] == 1e9, "a spike of one step is seen"
    editor.do(
        """(id) => {
          const api = app.api ?? window.comfyAPI.api.api
          for (let step = 1; step <= 100000; step++) {
            const detail = {node: String(id), run: 'r', step, until: 100000, loss: Math.random(), rate: 1e-4}
            api.dispatchEvent(new CustomEvent('graft.step', {detail}))
          }
        }""",
        node,
    )
    editor.page.get_by_text("step 100000").first.wait_for()
    redraws, width = editor.do(
        """async (id) => {
          const pen = CanvasRenderingContext2D.prototype
          const {lineTo, clearRect} = pen
          const chart = (VISIBLE)('.graft-training .graft-chart')
          const redraws = [] // how many lines each has drawn
          pen.clearRect = function (...at) {
            if (this.canvas === chart) redraws.push(0)
            return clearRect.apply(this, at)
          }
          pen.lineTo = function (...at) {
            if (this.canvas === chart) redraws[redraws.length - 1]++
            return lineTo.apply(this, at)
          }
          const api = app.api ?? window.comfyAPI.api.api
          const detail = {node: String(id), run: 'r', step: 100001, until: 200000, loss: 0.5, rate: 1e-4}
          api.dispatchEvent(new CustomEvent('graft.step', {detail}))
          for (let frame = 0; frame < 3; frame++) await new Promise(requestAnimationFrame)
          Object.assign(pen, {lineTo, clearRect})
          return [redraws, chart.clientWidth]
        }""".replace("VISIBLE", VISIBLE),
        node,
    )
    assert redraws, "a new step is drawn"
    assert 100 < max(redraws) <= 2 * 4 * width + 50, "at most four points a column and curve, not one a step"
    assert not editor.errors


def test_tokens_by_depth_follow_the_factor(editor):
    editor.clear()
    node = editor.add("ApplyToDo", 100, 100)
    depths = [
        {
            "depth": 1,
            "factor": 2,
            "before": [97, 64],
            "after": [48, 32],
            "frames": 1,
            "own": 10,
            "patched": 10,
            "skipped": 0,
        },
        {
            "depth": 2,
            "factor": 1,
            "before": [49, 32],
            "after": [49, 32],
            "frames": 1,
            "own": 5,
            "patched": 0,
            "skipped": 5,
        },
    ]
    ran(editor, node, {"graft_todo": [{"version": 1, "depths": depths, "saving": 0.7, "notes": []}]})
    table = editor.page.locator(".graft-todo table:visible")
    assert "6208 (97\u00d764)" in table.inner_text() and "1536 (48\u00d732)" in table.inner_text()
    turn = (
        "(id) => { const w = app.graph.getNodeById(id).widgets.find((one) => one.name === 'factor'); w.value = 4;"
        " w.callback(4) }"
    )
    editor.do(turn, node)
    editor.page.wait_for_timeout(300)
    assert "384 (24\u00d716)" in table.inner_text()
    saved = editor.saved()
    editor.clear()
    editor.load(saved)
    assert "384 (24\u00d716)" in editor.page.locator(".graft-todo table:visible").inner_text(), (
        "a saved workflow still shows them"
    )


def test_tokens_by_depth_claim_no_more_than_is_saved(editor):
    """Blocks that another patch computes, a factor that is computed while running, a latent that the host resizes."""
    editor.clear()
    node, latent = (
        editor.add("ApplyToDo", 500, 100, factor=2.0),
        editor.add("EmptyLatentImage", 60, 100, width=1024, height=1024),
    )
    panel = editor.page.locator(".graft-todo:visible")
    depth = {"depth": 1, "factor": 2, "cell": 1, "before": [64, 64], "after": [32, 32], "frames": 1}
    ran(editor, node, {"graft_todo": [{"version": 1, "depths": [{**depth, "own": 0, "patched": 0, "skipped": 3}]}]})
    assert (
        "0, 3 unchanged" in panel.inner_text()
        and "Saves about 0% of the self-attention multiplications." in panel.inner_text()
    )
    editor.link(latent, 0, node, "latent")
    ran(
        editor,
        node,
        {
            "graft_todo": [
                {"version": 1, "depths": [{**depth, "own": 3, "patched": 3, "skipped": 0}], "latent": [64, 64]}
            ]
        },
    )
    panel.get_by_text("4096 (64\u00d764)").wait_for()
    assert "1024 (32\u00d732)" in panel.inner_text() and "Saves about 75%" in panel.inner_text()
    number = editor.add("PrimitiveFloat", 60, 400, value=4.0)
    editor.link(number, 0, node, "factor")
    editor.page.wait_for_timeout(300)
    assert "256 (16\u00d716)" in panel.inner_text(), "the value of the node that the factor comes from"


WHEN = [  # settings, what the panel says of them
    ({}, "Saves about 75% of the self-attention multiplications."),
    (
        {"start_percent": 0.2, "end_percent": 0.6},
        "75% of the self-attention multiplications in each step that it works in."
        " Sampling is downsampled from 20% to 60%: about 30% saved over all of it.",
    ),
    ({"start_percent": 1.0}, "in each step that it works in. Sampling is never downsampled: start is 1."),
    ({"phase": "sampling"}, "in each step that it works in. Training is never downsampled."),
    ({"phase": "training"}, "in each step that it works in. Sampling is never downsampled."),
    (
        {"phase": "sampling", "start_percent": 0.5, "end_percent": 0.5},
        "Saves nothing: no step is downsampled. Sampling is downsampled in one step at most: start and end are the"
        " same. Training is never downsampled.",
    ),
    ({"disable_after": 300.0}, "in each step that it works in. Off after 300 training steps."),
    (
        {"disable_after": 0.4},
        "in each step that it works in. Off after 40% of the training run: about 30% saved over all of it.",
    ),
]


def test_the_todo_panel_says_when_it_saves_something(editor):
    editor.clear()
    node = editor.add("ApplyToDo", 500, 100)
    panel = editor.page.locator(".graft-todo:visible")
    depth = {"depth": 1, "factor": 2, "cell": 1, "before": [64, 64], "after": [32, 32], "frames": 1}
    ran(editor, node, {"graft_todo": [{"version": 1, "depths": [{**depth, "own": 3, "patched": 3, "skipped": 0}]}]})
    usual = {"start_percent": 0.0, "end_percent": 1.0, "phase": "both", "disable_after": 0.0}
    turn = (
        "([id, values]) => { for (const w of app.graph.getNodeById(id).widgets) if (w.name in values)"
        " { w.value = values[w.name]; w.callback(w.value) } }"
    )
    for settings, said in WHEN:
        editor.do(turn, [node, {**usual, **settings}])
        editor.page.wait_for_timeout(200)
        assert said in " ".join(panel.inner_text().split()), settings


def test_tokens_follow_the_latent_that_is_connected_before_anything_runs(editor):
    editor.clear()
    node, latent = editor.add("ApplyToDo", 500, 100), editor.add("EmptyLatentImage", 60, 100, width=512, height=768)
    panel = editor.page.locator(".graft-todo:visible")
    editor.link(latent, 0, node, "latent")
    panel.get_by_text("The latent is 96\u00d764.").wait_for()
    depths = [  # as SD1.x has them, and without a latent when it ran
        {
            "depth": 1,
            "factor": 2,
            "cell": 1,
            "before": None,
            "after": None,
            "frames": 1,
            "own": 6,
            "patched": 6,
            "skipped": 0,
        },
        {
            "depth": 2,
            "factor": 1,
            "cell": 2,
            "before": None,
            "after": None,
            "frames": 1,
            "own": 6,
            "patched": 0,
            "skipped": 6,
        },
    ]
    ran(editor, node, {"graft_todo": [{"version": 1, "depths": depths}]})
    assert "6144 (96\u00d764)" in panel.inner_text() and "1536 (48\u00d732)" in panel.inner_text()
    # Another size, typed at the other node: the editor says that the graph changed once the pointer is let go.
    resize = (
        "(id) => { const w = app.graph.getNodeById(id).widgets.find((one) => one.name === 'width'); w.value = 1000;"
        " w.callback(1000) }"
    )
    editor.do(resize, latent)
    editor.page.mouse.click(900, 880)
    panel.get_by_text("12000 (96\u00d7125)").wait_for()
    assert "3024 (48\u00d763)" in panel.inner_text(), "odd sides are rounded up, as the model does"
    # Through a reroute and the wall of a subgraph.
    reroute = editor.add("Reroute", 300, 400)
    editor.do("([from, by]) => app.graph.getNodeById(from).connect(0, app.graph.getNodeById(by), 0)", [latent, reroute])
    editor.link(reroute, 0, node, "latent")
    editor.wrap([node], "group")
    editor.enter("group")
    panel = editor.page.locator(".graft-todo:visible")
    panel.get_by_text("12000 (96\u00d7125)").wait_for()
    inner = "app.canvas.graph.nodes.find((one) => one.type === 'ApplyToDo')"
    editor.do(f"() => {inner}.disconnectInput({inner}.findInputSlot('latent'))")
    panel.get_by_text("Connect a latent to see its tokens.").wait_for()


def test_a_dataset_shows_pictures_buckets_and_problems(editor):
    editor.clear()
    node = editor.add("GraftDataset", 100, 60, folder="concept")
    pictures = [
        {
            "name": f"<img src=x onerror=alert({i})>.png",
            "width": 40,
            "height": 30,
            "bucket": [32, 32],
            "caption": "a zorp",
            "varies": False,
            "captioned": True,
            "held_out": False,
            "mask": False,
        }
        for i in range(30)
    ]
    buckets = [{"width": 32, "height": 32, "batch_id": "", "train": 29, "held_out": 1}]
    problems = [{"name": "bad.png", "message": "not a picture"}]
    data = {"folder": "concept", "count": 30, "pictures": pictures, "buckets": buckets, "problems": problems}
    editor.page.route(
        "**/thumbnail?*", lambda route: route.fulfill(body=picture(), content_type="image/png")
    )  # these pictures are not there
    ran(editor, node, {"graft_dataset": [data]})
    assert "not a picture" in editor.page.locator(".graft-dataset:visible").inner_text(), "problems come first"
    editor.page.get_by_role("tab", name="Images (30)").click()
    assert editor.page.locator(".graft-dataset figure:visible").count() == 24
    editor.page.locator(".graft-dataset:visible").get_by_role("button", name="More").click()
    assert editor.page.locator(".graft-dataset figure:visible").count() == 30
    editor.page.get_by_role("tab", name="Buckets (1)").focus()
    editor.page.keyboard.press("Enter")
    assert "32 \u00d7 32" in editor.page.locator(".graft-dataset:visible").inner_text()
    editor.page.unroute("**/thumbnail?*")


def test_a_dataset_shows_the_folder_that_was_read(editor):
    """Another one is typed meanwhile, or a node is connected that gives the name."""
    editor.clear()
    node = editor.add("GraftDataset", 100, 60, folder="regular")
    one = {
        "name": "zorp-00.png",
        "width": 64,
        "height": 64,
        "bucket": [64, 64],
        "caption": "a zorp",
        "varies": False,
        "captioned": True,
    }
    data = {
        "folder": "concept",
        "count": 1,
        "pictures": [{**one, "held_out": False, "mask": False}],
        "buckets": [],
        "problems": [],
    }
    ran(editor, node, {"graft_dataset": [data]})
    assert "?folder=concept&" in editor.page.locator(".graft-dataset img:visible").get_attribute("src")


def test_an_average_shows_its_profile(editor):
    editor.clear()
    node = editor.add("EMAMerge", 100, 60)
    curve = {"name": "width 0.1", "steps": list(range(1, 100)), "values": [i / 100 for i in range(1, 100)]}
    ran(editor, node, {"graft_profile": [{"version": 1, "curves": [curve], "lines": ["an average of 99 steps"]}]})
    editor.page.locator(".graft-average canvas:visible").wait_for()
    assert "an average of 99 steps" in editor.page.locator(".graft-average:visible").inner_text()
    saved = editor.saved()
    editor.clear()
    editor.load(saved)
    editor.page.locator(".graft-average canvas:visible").wait_for()
    assert "an average of 99 steps" in editor.page.locator(".graft-average:visible").inner_text(), "it comes back"


SETTINGS = "([id, value]) => app.extensionManager.setting.set(id, value)"


def test_settings_have_a_section_and_take_effect(editor):
    ours = "Object.values(app.ui.settings.settingsLookup).filter((one) => one.id.startsWith('Graft.'))"
    assert editor.do(f"() => {ours}.map((one) => one.category[0])") == ["Graft"] * 4
    editor.clear()
    node = editor.add("TrainStep", 100, 100)
    for number, loss in enumerate((0.5, 0.5, 0.5, 0.1), start=1):
        step(editor, node, number, loss)
    status = editor.page.locator(".graft-training .graft-status:visible")
    status.get_by_text("step 4 of 1000").wait_for()
    assert "loss 0.1 " not in status.inner_text() + " "
    try:
        editor.do(SETTINGS, ["Graft.Training.Smoothing", 0])
        status.get_by_text("0.1", exact=True).wait_for()
        editor.do(SETTINGS, ["Graft.Training.Previews", 2])
        picture = {"filename": "none.jpg", "subfolder": "graft", "type": "temp", "label": "average"}
        for number in (1, 2, 3):
            editor.do(SEND, ["graft.preview", {"node": str(node), "run": "r", "step": number, "pictures": [picture]}])
        captions = editor.page.locator(".graft-training figcaption:visible")
        captions.get_by_text("step 3, average").wait_for()
        slider = editor.page.get_by_role("slider", name="Step of the previews")
        slider.focus()
        seen = []
        for _ in range(2):
            editor.page.keyboard.press("ArrowLeft")
            seen += captions.all_inner_texts()
        assert seen == ["step 2, average"] * 2 and slider.get_attribute("max") == "1", "two of them are kept"
    finally:
        editor.do(SETTINGS, ["Graft.Training.Smoothing", 0.95])
        editor.do(SETTINGS, ["Graft.Training.Previews", 400])
    editor.errors[:] = [error for error in editor.errors if "/view?" not in error]  # these pictures are not there


# Latin words that the panels show in Chinese too: names of things, and what the server or the user wrote.
KEPT = {"CSV", "JSON", "LoRA", "CLIP", "EMA", "ToDo", "nowhere", "safetensors", "loras"}


def test_panels_speak_chinese_when_the_editor_does(editor):
    editor.do(SETTINGS, ["Comfy.Locale", "zh"])
    try:
        editor.page.wait_for_timeout(1000)
        editor.clear()
        training, todo, stack = (
            editor.add("TrainStep", 60, 60),
            editor.add("ApplyToDo", 480, 60),
            editor.add("GraftLoRAStack", 900, 60),
        )
        data, average = editor.add("GraftDataset", 60, 600), editor.add("EMAMerge", 480, 600)
        for number in range(1, 4):
            step(editor, training, number, 1 / number)
        depths = [
            {
                "depth": 1,
                "factor": 2,
                "before": [64, 64],
                "after": [32, 32],
                "frames": 1,
                "own": 8,
                "patched": 8,
                "skipped": 2,
            }
        ]
        ran(editor, todo, {"graft_todo": [{"version": 1, "depths": depths}]})
        nothing = {"folder": "concept", "count": 0, "pictures": [], "buckets": [], "problems": []}
        ran(editor, data, {"graft_dataset": [nothing]})
        rows = '{"version": 1, "rows": [{"file": "nowhere.safetensors"}]}'
        editor.do("([id, rows]) => { app.graph.getNodeById(id).widgets[0].value = rows }", [stack, rows])
        editor.page.locator(".graft-more:visible").click()
        editor.page.get_by_text("loras \u6587\u4ef6\u5939\u4e2d\u6ca1\u6709").wait_for()
        assert average
        editor.screenshot("chinese")
        panels = "[...document.querySelectorAll('.graft')].filter((one) => one.offsetParent)"
        shown = editor.do(f"() => {panels}.map((one) => one.innerText).join(' ')")
        inner = "[...one.querySelectorAll('[aria-label]')].map((other) => other.getAttribute('aria-label'))"
        labels = editor.do(f"() => {panels}.flatMap((one) => {inner}).join(' ')")
    finally:
        editor.do(SETTINGS, ["Comfy.Locale", "en"])
        editor.page.wait_for_timeout(500)
    # The page loads the graph again in another language: as it was when a run of a test before was kept in it.
    editor.errors[:] = [error for error in editor.errors if "/graft/runs/r/" not in error]
    assert (
        "\u5404\u6df1\u5ea6\u7684\u4ee4\u724c" in labels
        and "+ \u6dfb\u52a0 LoRA" in shown
        and "\u7b2c 3 \u6b65" not in shown
    )
    assert not set(re.findall("[A-Za-z]{3,}", f"{shown} {labels}")) - KEPT
