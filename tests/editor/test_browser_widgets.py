"""Graft's widgets beside what the editor does with them: its side panel, advanced settings, subgraphs.

GRAFT_TEST_FRONT_END names another front end to open them in.
"""

import json

import pytest
from serving import ROOT
from test_browser_workflows import look_at

PANELS = {
    "ApplyToDo": [("todo", ".graft-todo")],
    "EMAMerge": [("average", ".graft-average")],
    "GraftDataset": [("dataset", ".graft-dataset"), ("folder", ".graft-folder")],
    "GraftLoRAConflicts": [("conflicts", ".graft-conflicts")],
    "GraftLoRAEffect": [("effect", ".graft-effect")],
    "GraftLoRAStack": [("rows", ".graft-stack")],
    "GraftLoadLoRAs": [("rows", ".graft-stack")],
    "GraftTrainStart": [("said", ".graft-said")],  # where something is wrong
    "TrainStep": [("training", ".graft-training")],
}
INSIDE_THE_FIRST = {"dataset", "folder", "training", "average", "said"}
INSIDE_THE_SECOND = {"rows", "todo", "said"}
SEND = "([name, detail]) => (app.api ?? window.comfyAPI.api.api).dispatchEvent(new CustomEvent(name, {detail}))"
SIDE_PANEL = "Comfy.RightSidePanel.IsOpen"
SETTING = "([id, value]) => app.extensionManager.setting.set(id, value)"
SELECT = "(id) => app.canvas.selectNode(app.canvas.graph.getNodeById(id))"
WIDGET = "app.canvas.graph.getNodeById(id).widgets.find((one) => one.name === name)"


@pytest.fixture
def beside(editor):
    """(the editor, its side panel open; None where the front end has none: 1.27)."""
    offered = editor.do("(id) => id in app.ui.settings.settingsLookup", SIDE_PANEL)
    editor.clear()
    if offered:
        editor.do(SETTING, [SIDE_PANEL, True])
    yield editor, editor.page.locator("[data-testid=properties-panel]") if offered else None
    if offered:
        editor.do("() => app.canvas.deselectAll()")
        editor.do(SETTING, [SIDE_PANEL, False])


def lines_of(panel):
    """What an open side panel says, by line."""
    panel.wait_for()
    return [line.strip() for line in panel.inner_text().splitlines()]


def shown_width(editor, selector):
    """How wide a widget is on the page, at scale 1."""
    return editor.page.locator(f"{selector}:visible").bounding_box()["width"]


def widen(editor, node, width):
    editor.do(
        "([id, width]) => { const node = app.canvas.graph.getNodeById(id); node.setSize([width, node.size[1]]);"
        " app.canvas.setDirty(true, true) }",
        [node, width],
    )
    editor.page.wait_for_timeout(500)


def say_what_is_wrong(editor, node):
    """An error of the run at a node: one without a panel of its own gets one for it."""
    detail = {"node_id": str(node), "exception_message": "It is wrong.", "traceback": []}
    editor.do(SEND, ["execution_error", detail])


@pytest.mark.parametrize("kind", PANELS)
def test_selecting_a_node_beside_an_open_side_panel_leaves_its_widgets_as_wide_as_the_node(beside, kind):
    editor, panel = beside
    node = editor.add(kind, 120, 120)
    if kind == "GraftTrainStart":
        say_what_is_wrong(editor, node)
    widen(editor, node, 600)
    before = {selector: shown_width(editor, selector) for _, selector in PANELS[kind]}
    assert all(500 < width <= 600 for width in before.values())
    editor.do(SELECT, node)
    editor.page.wait_for_timeout(1500)
    editor.screenshot(f"side-panel-{kind}")
    for name, selector in PANELS[kind]:
        assert shown_width(editor, selector) == pytest.approx(before[selector], abs=1)
        assert editor.do(f"([id, name]) => {WIDGET}.width ?? null", [node, name]) is None
        if panel is not None:
            label = editor.do(f"([id, name]) => {WIDGET}.label ?? name", [node, name])
            assert not {name, label} & set(lines_of(panel)), "an entry with nothing in it"
    widen(editor, node, 480)
    assert all(380 < shown_width(editor, selector) <= 480 for _, selector in PANELS[kind])
    editor.do(SEND, ["execution_start", {"prompt_id": "x"}])


def test_the_side_panel_still_lists_the_settings(beside):
    editor, panel = beside
    if panel is None:
        pytest.skip("this front end has no side panel")
    node = editor.add("TrainStep", 120, 120)
    editor.do(SELECT, node)
    editor.page.wait_for_timeout(1500)
    assert {"steps", "preview every N steps"} <= set(lines_of(panel))


def with_advanced_inputs(editor, panel):
    """The side panel's lines with "Advanced inputs" unfolded."""
    editor.page.wait_for_timeout(1500)
    before = lines_of(panel)
    panel.get_by_role("button", name="Advanced inputs").click()
    editor.page.wait_for_function(
        "(lines) => document.querySelector('[data-testid=properties-panel]').innerText.split('\\n').length > lines",
        arg=len(before),
    )
    return lines_of(panel)


DRAWS = "(name) => app.canvas.graph.nodes.find((node) => node.widgets?.some((one) => one.name === name)).id"


def load_file(editor, path):
    editor.load(json.loads(path.read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    ("file", "title", "setting", "kinds"),
    [
        ("example_workflows/Train your first LoRA", "Train a LoRA (Graft)", "preview every N steps", INSIDE_THE_FIRST),
        ("subgraphs/LoRA stack and ToDo (Graft)", "LoRA stack and ToDo (Graft)", "active during", INSIDE_THE_SECOND),
    ],
)
def test_the_side_panel_lists_no_empty_entries_of_a_subgraph(beside, file, title, setting, kinds):
    editor, panel = beside
    if panel is None:
        pytest.skip("this front end has no side panel")
    load_file(editor, ROOT / f"{file}.json")
    outer = editor.titled(title)
    for number in editor.do("(id) => app.graph.getNodeById(id).subgraph.nodes.map((one) => one.id)", outer):
        say_what_is_wrong(editor, f"{outer}:{number}")
    names = editor.do(
        "(id) => app.graph.getNodeById(id).subgraph.nodes.flatMap((node) => node.widgets ?? [])"
        ".filter((one) => one.element?.matches('.graft')).flatMap((one) => [one.name, one.label ?? one.name])",
        outer,
    )
    assert kinds <= set(names), "they are there"
    editor.do(SELECT, outer)
    lines = with_advanced_inputs(editor, panel)
    editor.screenshot(f"side-panel-of-{title.split()[0]}")
    assert setting in lines, "the settings that are not shown outside are listed"
    promoted = set(editor.do("(id) => app.graph.getNodeById(id).widgets.map((one) => one.label ?? one.name)", outer))
    assert not (set(names) - promoted) & set(lines), "entries with nothing in them"
    editor.do(SEND, ["execution_start", {"prompt_id": "x"}])
    editor.enter(title)
    for kind in kinds - {"folder", "said"}:  # which the link from outside replaces, and which goes with the next run
        look_at(editor, editor.do(DRAWS, kind))
        assert shown_width(editor, f".graft-{'stack' if kind == 'rows' else kind}") > 200


def test_a_step_inside_a_subgraph_is_as_wide_as_its_node_after_the_subgraph_was_selected(beside):
    editor, panel = beside
    editor.wrap([editor.add("TrainStep", 120, 120)], "group")
    outer = editor.titled("group")
    editor.do(SELECT, outer)
    editor.page.wait_for_timeout(1500)
    if panel is not None:
        for button in panel.get_by_role("button", name="Advanced inputs").all():
            button.click()
        editor.page.wait_for_timeout(800)
        editor.screenshot("side-panel-subgraph")
    editor.enter("group")
    inner = editor.do("() => app.canvas.graph.nodes.find((one) => one.type === 'TrainStep').id")
    assert editor.do(f"([id, name]) => {WIDGET}.width ?? null", [inner, "training"]) is None
    editor.do("() => { app.canvas.ds.scale = 1 }")  # entering it has fitted the view
    widen(editor, inner, 600)
    assert 500 < shown_width(editor, ".graft-training") <= 600


def test_widgets_are_there_after_the_way_to_draw_nodes_was_switched(editor, two_ways):
    if not two_ways:
        pytest.skip("this front end has one way to draw nodes")
    editor.clear()
    editor.add("TrainStep", 120, 120)
    editor.add("GraftDataset", 620, 120)
    for on in (not editor.modern, editor.modern):
        editor.do(SETTING, ["Comfy.VueNodes.Enabled", on])
        editor.settle()
        for name in ("training", "dataset", "folder"):
            assert shown_width(editor, f".graft-{name}") > 200


def test_a_panel_begins_right_below_the_open_settings(editor):
    editor.clear()
    node = editor.add("TrainStep", 120, 120)
    editor.page.wait_for_timeout(500)
    where = f"([id, name]) => {WIDGET}.y"
    if not editor.modern:
        gap = editor.do(where, [node, "training"]) - editor.do(where, [node, "preview_every"])
        assert 20 <= gap < 40
    editor.do("(id) => { app.graph.getNodeById(id).showAdvanced = true; app.canvas.setDirty(true, true) }", node)
    editor.page.wait_for_timeout(500)
    if not editor.modern:
        assert editor.do(where, [node, "training"]) - editor.do(where, [node, "preview_every"]) > 90


def opened(editor, saved, shown):
    """Load a workflow of one node with its `showAdvanced` as given (None: as workflows of before have it); which of two
    advanced settings the node shows.
    """
    (node,) = saved["nodes"]
    node.pop("showAdvanced", None)
    if shown is not None:
        node["showAdvanced"] = shown
    editor.clear()
    editor.load(saved)
    if editor.modern:
        text = editor.page.locator("[data-node-id]:visible").first.inner_text()
        assert "learning rate" in text
        return [label for label in ("weight decay", "warmup") if label in text]
    return editor.do(
        """() => app.graph.nodes[0].widgets
          .filter((one) => ['weight_decay', 'warmup'].includes(one.name) && !one.hidden)
          .map((one) => one.name.replace('_', ' ')).sort().reverse()"""
    )


def test_advanced_settings_are_folded_but_for_those_that_the_workflow_has_set(editor):
    editor.clear()
    node = editor.add("GraftOptimizer", 120, 120)
    as_new = editor.saved()
    editor.do(f"([id, name]) => {{ {WIDGET}.value = 0.1 }}", [node, "weight_decay"])
    with_decay = editor.saved()
    assert opened(editor, as_new, None) == []
    editor.screenshot("advanced-folded")
    assert opened(editor, with_decay, None) == ["weight decay"]
    editor.screenshot("advanced-set")
    assert opened(editor, with_decay, False) == [], "folded by hand, and left so"
    assert opened(editor, with_decay, True) == ["weight decay", "warmup"]
    assert next(iter(editor.prompt().values()))["inputs"]["weight_decay"] == 0.1


DRAWN = "(id) => app.canvas.graph.getNodeById(id).widgets.filter((one) => one.element?.matches('.graft'))" + (
    ".map((one) => [one.name, one.element.isConnected])"
)


WITH_A_PANEL_EACH = ("ApplyToDo", "EMAMerge", "GraftDataset", "GraftLoRAStack", "TrainStep")


def test_after_an_undo_every_panel_is_that_of_the_node_as_it_is_now(editor):
    """An undo makes the nodes anew: what was drawn of those before (front end 1.58, Nodes 2.0) would change nothing."""
    page = editor.page
    editor.clear()
    nodes = {kind: editor.add(kind, 60 + 450 * at, 60) for at, kind in enumerate(WITH_A_PANEL_EACH)}
    stack, step = nodes["GraftLoRAStack"], nodes["TrainStep"]
    page.wait_for_timeout(500)
    editor.load(editor.saved())
    editor.do("() => { app.canvas.ds.scale = 0.6; app.canvas.setDirty(true, true) }")

    def choose_folder(query):
        page.locator(".graft-chooser:visible").click()
        page.locator(".graft-picker-search:visible").fill(query)
        page.keyboard.press("Enter")

    def folder():
        return editor.do(f"([id, name]) => {WIDGET}.value", [nodes["GraftDataset"], "folder"])

    for _ in range(2):  # the second undo finds what the first has left
        choose_folder("regular")
        page.get_by_role("tab", name="Images (96)").wait_for()
        editor.undo()
        assert folder() == ""
        drawn = {kind: editor.do(DRAWN, node) for kind, node in nodes.items()}
        assert [kind for kind, found in drawn.items() if not found or not all(on for _, on in found)] == []
    editor.screenshot("after-an-undo")
    page.locator(".graft-dataset:visible").get_by_text("drop a folder or pictures here").wait_for()
    choose_folder("concept")
    page.get_by_role("tab", name="Images (16)").wait_for()
    assert folder() == "concept"
    page.locator(".graft-add:visible").click()
    page.locator(".graft-picker-search:visible").fill("zorp")
    page.keyboard.press("Enter")
    assert [row["file"] for row in editor.rows(stack)] == ["zorp.safetensors"]
    sent = {"node": str(step), "run": "r", "step": 3, "until": 9, "loss": 0.5, "rate": 1e-4}
    send = "(detail) => (app.api ?? window.comfyAPI.api.api).dispatchEvent(new CustomEvent('graft.step', {detail}))"
    editor.do(send, sent)
    page.locator(".graft-training .graft-status:visible").get_by_text("3 of 9").wait_for()


def test_outputs_have_names_for_people(editor):
    editor.clear()
    node = editor.add("TrainStep", 120, 120)
    names = editor.do("(id) => app.graph.getNodeById(id).outputs.map((one) => one.localized_name)", node)
    assert names[0] == "training state"
    assert editor.do("(id) => app.graph.getNodeById(id).outputs[0].name", node) == "TRAIN_STATE", (
        "as workflows store it"
    )


HINTS = "(id) => app.graph.getNodeById(id).widgets.flatMap(({element}) => element?.placeholder ?? [])"


def test_multi_line_fields_hint_at_their_labels(editor):
    editor.clear()
    words, slider = editor.add("GraftWords", 60, 60), editor.add("GraftSlider", 560, 60)
    assert editor.do(HINTS, words) == ["words", "initial words"]
    assert editor.do(HINTS, slider)[:3] == ["positive prompt", "negative prompt", "target prompt"]
    editor.screenshot("multi-line-fields")
    if not editor.modern:
        editor.page.get_by_role("textbox", name="initial words").fill(
            "cat"
        )  # a screen reader finds it when it is filled
        assert editor.do("(id) => app.graph.getNodeById(id).widgets[1].value", words) == "cat"
