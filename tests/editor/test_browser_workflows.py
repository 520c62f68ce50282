"""Whole workflows in a real browser: built by adding and linking, queued, watched, stopped, gone on with, saved, loaded; examples; help."""

import json
import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "example_workflows").glob("*.json"))
ON_EMBEDDED_HOST = "GRAFT_TEST_EDITOR" not in os.environ


def build(editor, steps, previews=0):
    """The training example by hand: model, pictures, settings, two steps, an average, a sampled picture; ids by name."""
    add, link = editor.add, editor.link
    editor.clear()
    ids = {
        "demo": add("GraftDemo", 40, 60), "regular": add("GraftDataset", 300, 60, folder="regular", resolution=256),
        "concept": add("GraftDataset", 300, 700, folder="concept", resolution=256),
        "adapter": add("GraftAdapter", 720, 60, rank=4), "optimizer": add("GraftOptimizer", 720, 560, learning_rate=2e-3, batch_size=4),
        "ema": add("GraftEMA", 720, 1100), "start": add("GraftTrainStart", 1100, 60, run="nodes2" if editor.modern else "classic"),
        "first": add("TrainStep", 1450, 60, title="first", steps=steps, validate_every=5, preview_every=previews),
        "second": add("TrainStep", 1450, 700, title="second", steps=5, validate_every=5), "merge": add("EMAMerge", 1850, 60),
        "positive": add("CLIPTextEncode", 1850, 500, text="a zorp middle"),
        "latent": add("EmptyLatentImage", 1850, 750, width=256, height=256),
        "sampler": add("KSampler", 2250, 60, steps=2, cfg=1.0, seed=1), "decode": add("VAEDecode", 2550, 60),
        "save": add("SaveImage", 2800, 60),
    }  # fmt: skip
    for source, output, target, name in (
        ("demo", 2, "regular", "vae"), ("demo", 1, "regular", "clip"), ("demo", 2, "concept", "vae"), ("demo", 1, "concept", "clip"),
        ("regular", 0, "concept", "regularisation"), ("demo", 0, "start", "model"), ("concept", 0, "start", "dataset"),
        ("adapter", 0, "start", "adapter"), ("optimizer", 0, "start", "optimizer"), ("ema", 0, "start", "ema"),
        ("demo", 1, "start", "clip"),
        ("demo", 2, "start", "vae"), ("start", 0, "first", "state"), ("first", 0, "second", "state"),
        ("second", 0, "merge", "state"), ("demo", 0, "merge", "model"), ("demo", 1, "positive", "clip"),
        ("merge", 0, "sampler", "model"), ("positive", 0, "sampler", "positive"),
        ("positive", 0, "sampler", "negative"), ("latent", 0, "sampler", "latent_image"), ("sampler", 0, "decode", "samples"),
        ("demo", 2, "decode", "vae"), ("decode", 0, "save", "images"), ("positive", 0, "first", "positive"),
        ("positive", 0, "first", "negative"), ("latent", 0, "first", "latent"),
    ):  # fmt: skip
        link(ids[source], output, ids[target], name)
    editor.page.wait_for_timeout(500)
    return ids


def look_at(editor, node):
    """Bring a node to the upper left of the page."""
    editor.do(
        """(id) => {
          const at = app.canvas.graph.getNodeById(id).pos
          app.canvas.ds.offset = [120 - at[0], 100 - at[1]]
          app.canvas.setDirty(true, true)
        }""",
        node,
    )
    editor.page.wait_for_timeout(400)


def panel_texts(editor):
    """What the training panels on the page say."""
    return editor.page.locator(".graft-training:visible .graft-status").all_inner_texts()


def test_train_and_sample_built_by_hand_watched_stopped_and_gone_on_with(editor):
    ids = build(editor, steps=40, previews=10)
    assert set(editor.prompt()) == {str(one) for one in ids.values()}
    look_at(editor, ids["first"])
    editor.queue()
    panel = editor.page.locator(".graft-training:visible").first
    panel.locator(".graft-stop:visible").wait_for()
    panel.get_by_text("step 1").first.wait_for()
    editor.page.wait_for_function("() => document.querySelector('.graft-training .graft-pictures img')?.naturalWidth > 0")
    editor.screenshot("training")
    panel.locator(".graft-stop:visible").click()
    editor.wait_until_idle()
    editor.page.wait_for_function("(id) => app.graph.getNodeById(id).properties['graft run']", arg=ids["first"])
    kept = editor.do("(id) => app.graph.getNodeById(id).properties['graft run']", ids["first"])
    shown = editor.do("(k) => fetch(`/graft/runs/${k.run}/${k.key}`).then((r) => r.json())", kept)
    assert 10 <= shown["step"] < 40, "stopped after a preview and before the end, with the state kept"
    assert panel.locator(".graft-stop:visible").count() == 0
    look_at(editor, ids["save"])
    editor.page.wait_for_function("(id) => app.nodeOutputs?.[id]?.images?.length", arg=str(ids["save"]))
    # Queued again it goes on to the end.
    look_at(editor, ids["first"])
    editor.queue()
    editor.wait_until_idle()
    moved_on = "([id, key]) => app.graph.getNodeById(id).properties['graft run'].key !== key"
    editor.page.wait_for_function(moved_on, arg=[ids["first"], kept["key"]])
    kept = editor.do("(id) => app.graph.getNodeById(id).properties['graft run']", ids["first"])
    stored = editor.do("(k) => fetch(`/graft/runs/${k.run}/${k.key}`).then((r) => r.json())", kept)
    assert stored["step"] == 40
    shown_held = stored["history"]["validation"][-1][1]
    editor.wait_until_idle()
    # Saved, the page loaded anew, the workflow opened: the same prompt, and the curve is there from the store.
    saved, prompt = editor.saved(), editor.prompt()
    editor.open()
    editor.load(saved)
    assert editor.prompt() == prompt
    look_at(editor, ids["first"])
    editor.page.locator(".graft-training:visible").filter(has_text="step 40").first.wait_for()
    assert editor.page.locator(".graft-chart:visible").first.is_visible()
    held = next(text for text in panel_texts(editor) if "step 40" in text)
    assert f"held out {float(f'{shown_held:.3g}'):g}" in held
    editor.screenshot("training-reopened")
    again = editor.saved()
    assert [one.get("widgets_values") for one in again["nodes"]] == [one.get("widgets_values") for one in saved["nodes"]]


def test_an_error_is_said_on_the_node(editor):
    editor.clear()
    demo, data = editor.add("GraftDemo", 60, 60), editor.add("GraftDataset", 400, 60, folder="no such folder")
    show = editor.add("PreviewImage", 900, 60)
    for source, output, target, name in ((demo, 2, data, "vae"), (demo, 1, data, "clip"), (data, 1, show, "images")):
        editor.link(source, output, target, name)
    editor.queue()
    editor.page.wait_for_function("() => app.lastExecutionError")
    said = editor.do("() => JSON.stringify([app.lastExecutionError, app.lastNodeErrors])")
    assert "no such folder" in said and str(data) in said


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_open_whole_and_export_as_committed(editor, path):
    workflow = json.loads(path.read_text(encoding="utf-8"))
    editor.clear()
    editor.load(workflow)
    kinds = editor.do("() => (app.rootGraph ?? app.graph).nodes.map((one) => [one.type, one.type in LiteGraph.registered_node_types])")
    assert not [kind for kind, known in kinds if not known]
    committed = json.loads((ROOT / "tests" / "headless" / "examples" / f"{path.stem}.api.json").read_text(encoding="utf-8"))
    assert editor.prompt() == committed


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
    if not editor.modern:
        editor.clear()
        node = editor.add("TrainStep", 200, 150)
        editor.do("(id) => app.canvas.selectNode(app.graph.getNodeById(id))", node)
        editor.page.wait_for_timeout(300)
        editor.page.locator("[data-testid=info-button], button:has(i.icon-\\[lucide--info\\])").first.click()
        editor.page.get_by_text("Common mistakes").first.wait_for()
