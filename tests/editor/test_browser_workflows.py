"""Whole workflows in a real browser: built by adding and linking, queued, watched, stopped, gone on with, saved,
loaded; examples; help.
"""

import json
import re
from pathlib import Path

import pytest
import templates_dialog
from templates_dialog import PICTURE_OF, TITLES

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "example_workflows").glob("*.json"))
BLUEPRINTS = sorted((ROOT / "subgraphs").glob("*.json"))


def build(editor, steps, previews, run):
    """The training example by hand: model, pictures, settings, two steps, an average, a sampled picture;
    ids by name.
    """
    add, link = editor.add, editor.link
    editor.clear()
    ids = {
        "demo": add("GraftDemo", 40, 60),
        "regular": add("GraftDataset", 300, 60, folder="regular", resolution=128),
        "concept": add("GraftDataset", 300, 700, folder="concept", resolution=128),
        "adapter": add("GraftAdapter", 720, 60, rank=4),
        "optimizer": add("GraftOptimizer", 720, 560, learning_rate=2e-3, batch_size=4),
        "ema": add("GraftEMA", 720, 1100),
        "start": add("GraftTrainStart", 1100, 60, run=run),
        "first": add("TrainStep", 1450, 60, title="first", steps=steps, validate_every=5, preview_every=previews),
        "second": add("TrainStep", 1450, 1300, title="second", steps=5, validate_every=5),
        "merge": add("EMAMerge", 1850, 60),
        "positive": add("CLIPTextEncode", 1850, 500, text="a zorp middle"),
        "latent": add("EmptyLatentImage", 1850, 750, width=128, height=128),
        "sampler": add("KSampler", 2250, 60, steps=2, cfg=1.0, seed=1),
        "decode": add("VAEDecode", 2550, 60),
        "save": add("SaveImage", 2800, 60),
    }
    for source, output, target, name in (
        ("demo", 2, "regular", "vae"),
        ("demo", 1, "regular", "clip"),
        ("demo", 2, "concept", "vae"),
        ("demo", 1, "concept", "clip"),
        ("regular", 0, "concept", "regularization"),
        ("demo", 0, "start", "model"),
        ("concept", 0, "start", "dataset"),
        ("adapter", 0, "optimizer", "settings"),
        ("optimizer", 0, "ema", "settings"),
        ("ema", 0, "start", "settings"),
        ("demo", 1, "start", "clip"),
        ("demo", 2, "start", "vae"),
        ("start", 0, "first", "state"),
        ("first", 0, "second", "state"),
        ("second", 0, "merge", "state"),
        ("demo", 0, "merge", "model"),
        ("demo", 1, "positive", "clip"),
        ("merge", 0, "sampler", "model"),
        ("positive", 0, "sampler", "positive"),
        ("positive", 0, "sampler", "negative"),
        ("latent", 0, "sampler", "latent_image"),
        ("sampler", 0, "decode", "samples"),
        ("demo", 2, "decode", "vae"),
        ("decode", 0, "save", "images"),
        ("positive", 0, "first", "positive"),
        ("positive", 0, "first", "negative"),
        ("latent", 0, "first", "latent"),
    ):
        link(ids[source], output, ids[target], name)
    editor.page.wait_for_timeout(500)
    return ids


def look_at(editor, node):
    """Bring a node to the upper left of the page."""
    editor.do(
        """(id) => {
          const at = app.canvas.graph.getNodeById(id).pos
          app.canvas.ds.scale = 1
          app.canvas.ds.offset = [120 - at[0], 100 - at[1]]
          app.canvas.setDirty(true, true)
        }""",
        node,
    )
    editor.page.wait_for_timeout(400)


def panel_texts(editor):
    """What the training panels on the page say."""
    return editor.page.locator(".graft-training:visible .graft-status").all_inner_texts()


def trained(editor, node):
    """What a Train Step of the graph that is shown keeps of its run: {run, key}."""
    return editor.do("(id) => app.canvas.graph.getNodeById(id).properties['graft run']", node)


def stored(editor, kept):
    """The state of a run as the store has it."""
    return editor.do("(k) => fetch(`/graft/runs/${k.run}/${k.key}`).then((r) => r.json())", kept)


# Pixels of the chart's numbers that are not gray: those of a canvas that was drawn before it was on the page have a
# curve's color.
COLORS_OF_THE_AXIS = """(canvas) => {
  const {data} = canvas.getContext('2d').getImageData(0, 0, 36, canvas.height)
  const found = []
  for (let at = 0; at < data.length; at += 4) {
    const [r, g, b, a] = data.slice(at, at + 4)
    if (a > 200 && Math.max(r, g, b) - Math.min(r, g, b) > 40) found.push([r, g, b])
  }
  return found.slice(0, 3)
}"""


def previews_by_step(editor):
    """The captions of the gallery at each of its steps, once the pictures are there; it is left at the first step."""
    panel = editor.page.locator(".graft-training:visible").filter(has=editor.page.locator("figcaption:visible")).first
    slider = panel.get_by_label("Step of the previews")
    slider.focus()
    editor.page.keyboard.press("End")
    pictures = "[...document.querySelectorAll('.graft-training .graft-pictures img')].filter((one) => one.offsetParent)"
    found = {}
    for _ in range(int(slider.get_attribute("max")) + 1):
        editor.page.wait_for_function(f"() => {pictures}.length && {pictures}.every((one) => one.naturalWidth > 0)")
        captions = panel.locator("figcaption").all_inner_texts()
        found[int(re.match(r"step (\d+)", captions[0])[1])] = captions
        editor.page.keyboard.press("ArrowLeft")
    return found


def stop_after_a_preview(editor, node):
    """Queue, wait for the chart and for pictures with and without the average, and press Stop; what the step kept."""
    editor.queue()
    panel = editor.page.locator(".graft-training:visible").first
    panel.locator(".graft-stop:visible").wait_for()
    panel.get_by_text("step 1").first.wait_for()
    chart = panel.locator(".graft-chart").element_handle()
    before = chart.evaluate("(canvas) => canvas.toDataURL()")
    editor.page.wait_for_function("([canvas, before]) => canvas.toDataURL() !== before", arg=[chart, before])
    pictures = panel.locator(".graft-pictures img")
    pictures.nth(1).wait_for()
    loaded = "(image) => image.naturalWidth > 0"
    editor.page.wait_for_function(loaded, arg=pictures.first.element_handle())
    captions = " ".join(panel.locator("figcaption").all_inner_texts())
    assert "weights" in captions and "average" in captions
    panel.locator(".graft-stop:visible").focus()
    editor.page.keyboard.press("Enter")
    editor.wait_until_idle()
    editor.page.wait_for_function("(id) => app.canvas.graph.getNodeById(id).properties['graft run']", arg=node)
    panel.locator(".graft-stop:visible").wait_for(state="detached")
    return trained(editor, node)


@pytest.mark.long
@pytest.mark.parametrize("place", ["top level", "subgraph"])
def test_train_and_sample_built_by_hand_watched_stopped_and_gone_on_with(editor, place):
    steps = 40
    ids = build(editor, steps, previews=8, run=f"{place} {'nodes2' if editor.modern else 'classic'}")
    if place == "subgraph":
        editor.wrap([ids[name] for name in ("adapter", "optimizer", "ema", "start", "first", "second")], "training")
        editor.enter("training")
    else:
        assert set(editor.prompt()) == {str(one) for one in ids.values()}
    assert sorted(node["class_type"] for node in editor.prompt().values()).count("TrainStep") == 2
    first = editor.titled("first")
    look_at(editor, first)
    kept = stop_after_a_preview(editor, first)
    editor.screenshot(f"training-{place.replace(' ', '-')}")
    begun = stored(editor, kept)
    assert 8 <= begun["step"] < steps, "stopped after a preview and before the end, with the state kept"
    editor.page.wait_for_function("(id) => app.nodeOutputs?.[id]?.images?.length", arg=str(ids["save"]))
    # Queued again it goes on to the end.
    editor.queue()
    moved_on = "([id, key]) => app.canvas.graph.getNodeById(id).properties['graft run'].key !== key"
    editor.page.wait_for_function(moved_on, arg=[first, kept["key"]])
    editor.wait_until_idle()
    kept = stored(editor, trained(editor, first))
    assert kept["step"] == steps and kept["history"]["loss"][: begun["step"]] == begun["history"]["loss"], (
        "the same run goes on"
    )
    # Saved, the page loaded anew, the workflow opened: the same prompt, and the curve is there from the store.
    saved, prompt = editor.saved(), editor.prompt()
    editor.open()
    editor.load(saved)
    assert editor.prompt() == prompt
    assert values_of(editor.saved()) == values_of(saved)
    if place == "subgraph":
        editor.enter("training")
    look_at(editor, first)
    editor.page.locator(".graft-training:visible").filter(has_text=f"step {steps}").first.wait_for()
    assert editor.page.locator(".graft-chart:visible").first.is_visible()
    assert editor.page.locator(".graft-chart:visible").first.evaluate(COLORS_OF_THE_AXIS) == []
    held = next(text for text in panel_texts(editor) if f"step {steps}" in text)
    assert f"held out {float(format(kept['history']['validation'][-1][1], '.3g')):g}" in held
    # What the second one trained after the stop was gone on from: it draws no previews.
    drawn = [step for step in range(8, steps + 1, 8) if not begun["step"] < step <= begun["step"] + 5]
    assert previews_by_step(editor) == {step: [f"step {step}, weights", f"step {step}, average"] for step in drawn}
    editor.screenshot(f"training-reopened-{place.replace(' ', '-')}")
    # A copy shows the same run; undo takes it away again.
    editor.do(
        "(id) => { const c = app.canvas; c.selectNode(c.graph.getNodeById(id)); c.copyToClipboard();"
        " c.pasteFromClipboard() }",
        first,
    )
    editor.page.wait_for_function("() => app.canvas.graph.nodes.filter((one) => one.type === 'TrainStep').length === 3")
    ran = (
        "() => app.canvas.graph.nodes.filter((one) => one.title === 'first').map((one) => one.properties['graft"
        " run'].key)"
    )
    assert len(set(editor.do(ran))) == 1 and len(editor.do(ran)) == 2
    editor.undo()
    assert editor.prompt() == prompt


def values_of(workflow):
    """What every widget holds, of the graph and its subgraphs. Of nodes without settings 1.27 keeps what they said."""
    graphs = [workflow, *workflow.get("definitions", {}).get("subgraphs", [])]
    return [
        {str(node["id"]): node.get("widgets_values") or [] for node in graph["nodes"] if has_settings(node)}
        for graph in graphs
    ]


def has_settings(node):
    return any("widget" in one for one in node.get("inputs", []))


def test_a_missing_lora_is_said_on_the_node_when_it_is_queued(editor):
    editor.clear()
    rows = '{"version": 1, "rows": [{"file": "nowhere/Zorp.safetensors"}]}'
    stack, show = editor.add("GraftLoRAStack", 60, 60, rows=rows), editor.add("PreviewAny", 600, 60)
    editor.link(stack, 1, show, "source")
    # Flagged on the row before, with what it may be; the demo's LoRA has the same name in another folder.
    near = editor.page.locator(".graft-link:visible")
    near.get_by_text("zorp.safetensors", exact=True).wait_for()
    near.get_by_text("graft_demo/zorp.safetensors", exact=True).wait_for()
    editor.queue()
    editor.page.wait_for_function("(id) => app.lastNodeErrors?.[id]", arg=str(stack))
    said = editor.do("(id) => JSON.stringify(app.lastNodeErrors[id].errors)", str(stack))
    assert "nowhere/Zorp.safetensors" in said
    names = re.search(r"did you mean ([^?]*)", said)[1]
    assert set(re.split(", | or ", names)) >= {"zorp.safetensors", "graft_demo/zorp.safetensors"}
    editor.dismiss()
    noted = ("/prompt", "Prompt execution failed", "PromptExecutionError")  # the page's own words for a refusal
    editor.errors[:] = [error for error in editor.errors if not any(name in error for name in noted)]


def test_the_way_to_draw_is_the_one_that_is_asked_for_and_offered(editor):
    setting = "app.ui.settings.settingsLookup['Comfy.VueNodes.Enabled']"
    offered = editor.do(f"() => {setting}.type !== 'hidden'")
    assert offered or not editor.modern
    editor.clear()
    node = editor.add("GraftLoRAStack", 200, 150)
    editor.page.wait_for_timeout(500)
    assert editor.page.locator(".graft-stack:visible").count() == 1
    drawn = editor.page.locator(f"[data-node-id='{node}']").count()
    assert (drawn > 0) == editor.modern, "Nodes 2.0 makes an element of each node, the classic canvas none"


def test_an_error_is_said_on_the_node(editor):
    editor.clear()
    demo, start = editor.add("GraftDemo", 60, 60), editor.add("GraftTrainStart", 900, 60)
    adapter = editor.add("GraftAdapter", 400, 400, pattern="no_such_layer")  # only the run knows the model's layers
    data = editor.add("GraftDataset", 400, 60, folder="concept", resolution=128)
    step = editor.add("TrainStep", 1300, 60, steps=1)
    links = ((demo, 2, data, "vae"), (demo, 1, data, "clip"), (demo, 0, start, "model"), (data, 0, start, "dataset"))
    for source, output, target, name in (*links, (adapter, 0, start, "settings"), (start, 0, step, "state")):
        editor.link(source, output, target, name)
    editor.do(
        """() => {
          const api = app.api ?? window.comfyAPI.api.api
          api.addEventListener('execution_error', ({detail}) => { window.ended = detail }, {once: true})
        }"""
    )
    editor.queue()
    editor.page.wait_for_function("() => window.ended")
    assert editor.do("() => window.ended.node_id") == str(start)
    editor.settle()
    editor.dismiss()  # the dialog of 1.27, which hides the page from readers of roles
    said = editor.page.locator(".graft-said:visible").get_by_role("alert")
    said.get_by_text("layer filter 'no_such_layer'").wait_for()
    assert said.count() == 1


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_open_whole_and_export_as_committed(editor, path):
    workflow = json.loads(path.read_text(encoding="utf-8"))
    editor.clear()
    editor.load(workflow)
    kinds = editor.do(
        "() => (app.rootGraph ?? app.graph).nodes.map((one) => [one.type, one.type in LiteGraph.registered_node_types])"
    )
    assert not [kind for kind, known in kinds if not known]
    committed = json.loads(
        (ROOT / "tests" / "headless" / "examples" / f"{path.stem}.api.json").read_text(encoding="utf-8")
    )
    prompt = editor.prompt()
    for node in prompt.values():
        if (
            node["class_type"] == "PreviewAny"
        ):  # older front ends also send the text box that they put on it; the node has no such input
            node["inputs"].pop("preview", None)
        if node["class_type"] == "DualCLIPLoader":  # front ends have names of their own for it
            node["_meta"]["title"] = "Load CLIP (Dual)"
    assert prompt == committed


@pytest.mark.parametrize("path", BLUEPRINTS, ids=lambda path: path.stem)
def test_blueprints_are_offered_and_open_whole(editor, path):
    offered = editor.do("() => fetch('/global_subgraphs').then((r) => r.status === 404 ? null : r.json())")
    if offered is None:  # an older host has no library of blueprints; they open as workflows all the same
        editor.errors[:] = [error for error in editor.errors if "/global_subgraphs" not in error]
    else:
        assert path.stem in [entry["name"] for entry in offered.values()]
    editor.clear()
    editor.load(json.loads(path.read_text(encoding="utf-8")))
    outer = editor.titled(path.stem)
    sockets = [
        one["name"] for one in json.loads(path.read_text(encoding="utf-8"))["definitions"]["subgraphs"][0]["inputs"]
    ]
    assert editor.do("(id) => app.graph.getNodeById(id).inputs.map((one) => one.name)", outer) == sockets
    editor.enter(path.stem)
    kinds = editor.do(
        "() => app.canvas.graph.nodes.map((one) => [one.type, one.type in LiteGraph.registered_node_types])"
    )
    assert len(kinds) >= 3 and not [kind for kind, known in kinds if not known]
    editor.screenshot(f"blueprint-{path.stem.split()[0]}")


def test_a_workflow_of_the_first_version_opens_with_defaults_for_what_came_since(editor):
    saved = json.loads(
        (ROOT / "tests" / "headless" / "older" / "train_and_sample-0.1.0.json").read_text(encoding="utf-8")
    )
    editor.clear()
    editor.load(saved)
    prompt = editor.prompt()
    now = json.loads((ROOT / "tests" / "headless" / "examples" / "every_node.api.json").read_text(encoding="utf-8"))
    since = {
        "EMAMerge": {"algebra", "rank", "search_tries", "search_seed"},
        "TrainStep": {"keep", "snapshot_minutes", "tensorboard"},
        "GraftOptimizer": {"block_rates", "fused_backward"},
        "GraftDataset": {
            "weighted_captions",
            "no_upscale",
            "min_side",
            "max_side",
            "batch_size",
            "validation_folder",
            "control_pictures",
            "frames",
            "frame_rate",
            "clip_part",
        },
        "GraftObjective": {"sigmoid_scale", "logit_mean", "logit_std", "mode_scale", "model_shift"},
        "LoRAStackPatch": {"comfyui_oft"},
    }
    compared = 0
    for node in saved["nodes"]:
        if node["type"] in since:
            inputs = prompt[str(node["id"])]["inputs"]
            named = [slot["name"] for slot in node["inputs"] if "widget" in slot]
            assert [inputs[name] for name in named] == node["widgets_values"]
            (added,) = {
                tuple((name, other["inputs"][name]) for name in sorted(since[node["type"]]))
                for other in now.values()
                if other["class_type"] == node["type"]
            }
            assert tuple((name, inputs[name]) for name in sorted(since[node["type"]])) == added
            compared += 1
    assert compared == 8


def test_templates_have_pictures(editor):
    pack = editor.do("() => LiteGraph.registered_node_types.TrainStep.nodeData.python_module.split('.').pop()")
    for name in (path.stem for path in EXAMPLES):
        size = editor.do(
            """(address) => new Promise((done) => {
              const image = new Image()
              image.onload = () => done([image.naturalWidth, image.naturalHeight])
              image.onerror = () => done(null)
              image.src = address
            })""",
            f"/api/workflow_templates/{pack}/{name}.jpg",
        )
        assert size and min(size) > 300


def test_templates_are_found_in_the_dialog_by_title_and_picture(editor):
    editor.clear()
    templates_dialog.are_found(editor)


def test_templates_are_described_to_the_dialog_which_opens_with_them(editor):
    """These front ends draw no description; they search in it. A real ComfyUI describes only its own templates."""
    editor.clear()
    page = editor.page
    (index,) = editor.do("() => fetch('/templates/index.json').then((r) => r.json())")
    assert {one["title"] for one in index["templates"] if len(one["description"]) > 40} == set(TITLES)
    page.locator(".side-tool-bar-container").get_by_text("Templates", exact=True).click()
    dialog = page.get_by_role("dialog").first
    every = dialog.get_by_text("All Templates", exact=True)
    every.or_(dialog.get_by_text("Custom Nodes", exact=True)).first.wait_for()
    for title in TITLES if every.count() else ():  # front end 1.27 draws no more than a dozen at once
        page.wait_for_function(PICTURE_OF, arg=title, polling=300)
    assert "0 of 0" not in dialog.inner_text()
    editor.screenshot("templates-opened")
    page.keyboard.press("Escape")
    dialog.wait_for(state="detached")


def test_every_help_page_opens(editor):
    ours = "([name, kind]) => kind.nodeData?.category?.startsWith('Graft') ? [name] : []"
    nodes = editor.do(f"() => Object.entries(LiteGraph.registered_node_types).flatMap({ours})")
    assert len(nodes) >= 17
    pages = editor.do(
        """(nodes) => Promise.all(nodes.map(async (name) => {
          const module = LiteGraph.registered_node_types[name].nodeData.python_module.split('.').pop()
          const answer = await fetch(`/extensions/${module}/docs/${name}.md`)
          return [name, answer.status, (await answer.text()).length]
        }))""",
        nodes,
    )
    assert all(status == 200 and length > 300 for _, status, length in pages), pages
    if editor.modern:
        return
    for name in nodes:
        editor.clear()
        node = editor.add(name, 500, 150)
        editor.do("(id) => app.canvas.selectNode(app.graph.getNodeById(id))", node)
        page = editor.page.locator(f"img[src*='/docs/{name}.png']")
        if not page.count():  # a panel that is open may follow the selection
            editor.page.locator(
                "[data-testid=info-button], button:has(i.icon-\\[lucide--info\\])"
            ).first.dispatch_event("click")
        page.first.wait_for(timeout=30_000)
        assert page.first.evaluate("(image) => image.decode().then(() => image.naturalWidth)") > 100
        assert editor.page.get_by_text("Common mistakes").first.is_visible()
