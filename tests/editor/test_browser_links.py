"""A link that is dragged to a setting arrives there, and the tooltip over a setting is its own, on the classic canvas:
front ends keep the sockets of folded settings, which must not lie in front of the others.

GRAFT_TEST_FRONT_END names another front end to open them in.
"""

import pytest

# Nodes 2.0 has no sockets of settings that it does not show.
pytestmark = pytest.mark.parametrize("page", [pytest.param(False, id="classic")], indirect=True)
SOURCE = """() => {
  class Source extends LiteGraph.LGraphNode {
    constructor() {
      super('a value of any kind')
      this.addOutput('value', '*')
    }
  }
  LiteGraph.registerNodeType('graft_test/Source', Source)
}"""
KINDS = """() => Object.entries(LiteGraph.registered_node_types)
  .filter(([, one]) => one.nodeData?.category?.startsWith('Graft'))
  .map(([name]) => name)"""
# What a person sees of a node's settings: each with its place on the page, from its left edge; DOM elements apart, as
# they take the pointer themselves.
SEEN = """(id) => {
  const node = app.canvas.graph.getNodeById(id)
  const { canvas, ds } = app.canvas
  const { required, optional } = node.constructor.nodeData.input
  const box = canvas.getBoundingClientRect()
  const along = (edge, at, place, offset) => edge + (at + place + offset) * ds.scale
  const place = (x, y) => [along(box.x, node.pos[0], x, ds.offset[0]), along(box.y, node.pos[1], y, ds.offset[1])]
  return (node.widgets ?? [])
    .filter((widget) => !widget.hidden && !(widget.advanced && !node.showAdvanced))
    .filter((widget) => node.inputs.some((input) => input.widget?.name === widget.name))
    .map((widget) => ({
      name: widget.name,
      isElement: Boolean(widget.element),
      tooltip: ({ ...required, ...optional })[widget.name]?.[1]?.tooltip ?? '',
      dot: place(10, widget.y + 10),
      label: place(50, widget.y + 10),
      end: place(node.size[0] - 50, widget.y + 10),
    }))
}"""
LINKED = """(id) => app.canvas.graph.getNodeById(id).inputs
  .filter((input) => input.link != null).map((input) => input.widget?.name ?? input.name)"""
FREE = """(id) => {
  const node = app.canvas.graph.getNodeById(id)
  node.inputs.forEach((input, at) => input.link != null && node.disconnectInput(at))
}"""
INSIDE = """(id) => {
  const node = app.canvas.graph.getNodeById(id)
  return node.widgets.every((widget) => widget.hidden || widget.y + 20 <= node.size[1])
}"""
OUTPUT = """(id) => {
  const node = app.canvas.graph.getNodeById(id)
  const [x, y] = node.getOutputPos(0)
  const box = app.canvas.canvas.getBoundingClientRect()
  const { ds } = app.canvas
  return [box.x + (x + ds.offset[0]) * ds.scale, box.y + (y + ds.offset[1]) * ds.scale]
}"""


@pytest.fixture(scope="module")
def kinds(page):
    page.do(SOURCE)
    return page.do(KINDS)


def drag(editor, start, end):
    mouse = editor.page.mouse
    mouse.move(*start)
    mouse.down()
    mouse.move(*[(a + b) / 2 for a, b in zip(start, end, strict=True)], steps=2)
    mouse.move(*end, steps=3)
    mouse.up()


def placed(editor, kind):
    """(a source of any value, a node of the kind) in an empty graph."""
    editor.clear()
    source = editor.add("graft_test/Source", 60, 120)
    node = editor.add(kind, 500, 120)
    editor.do("() => { app.canvas.ds.scale = 0.75; app.canvas.setDirty(true, true) }")
    editor.settle()
    return source, node


def show_advanced(editor, node, on):
    editor.do(
        "([id, on]) => { app.graph.getNodeById(id).showAdvanced = on; app.canvas.setDirty(true, true) }", [node, on]
    )
    editor.settle()


def arrivals(editor, source, node, places):
    """[setting, place, what was linked] for each of a node's settings that did not get the link that was dragged to it,
    and how many were tried.
    """
    wrong, tried = [], 0
    for at, known in enumerate(editor.do(SEEN, node)):
        for place in ("dot",) if known["isElement"] else places:
            widget = editor.do(SEEN, node)[at]
            drag(editor, editor.do(OUTPUT, source), widget[place])
            arrived = editor.do(LINKED, node)
            tried += 1
            if arrived != [widget["name"]]:
                wrong.append((widget["name"], place, arrived))
            editor.do(FREE, node)
    return wrong, tried


def test_a_link_that_is_dragged_to_a_setting_arrives_there(editor, kinds):
    wrong, total = {}, 0
    for kind in kinds:
        source, node = placed(editor, kind)
        for state, places in (("new", ("dot", "label", "end")), ("open", ("label",)), ("folded again", ("dot",))):
            if state != "new":
                show_advanced(editor, node, state == "open")
            missed, tried = arrivals(editor, source, node, places)
            total += tried
            if missed:
                wrong[kind, state] = missed
    assert not wrong, "\n".join(map(str, wrong.items()))
    assert total > 500


def test_the_tooltip_over_a_setting_is_its_own(editor, kinds):
    editor.do("() => app.extensionManager.setting.set('LiteGraph.Node.TooltipDelay', 0)")
    page, wrong, tried = editor.page, {}, 0
    for kind in kinds:
        _, node = placed(editor, kind)
        show_advanced(editor, node, True)
        show_advanced(editor, node, False)
        for widget in editor.do(SEEN, node):
            if not widget["tooltip"] or widget["isElement"]:
                continue
            for place in ("dot", "label"):
                page.mouse.move(200, 700)
                page.locator(".node-tooltip").wait_for(state="hidden")
                page.mouse.move(*widget[place])
                page.locator(".node-tooltip").wait_for(state="visible")
                said = page.locator(".node-tooltip").inner_text()
                tried += 1
                if said != widget["tooltip"]:
                    wrong[kind, widget["name"], place] = said[:60]
    assert not wrong, "\n".join(map(str, wrong.items()))
    assert tried > 100


def test_a_link_never_goes_to_a_setting_that_stays_out_of_sight(editor, kinds):
    """Dropped on the node itself, a link goes to the first input that takes it: a folded one comes into sight then."""
    assert {"GraftOptimizer", "GraftObjective"} <= set(kinds)
    for kind in ("GraftOptimizer", "GraftObjective"):
        source, node = placed(editor, kind)
        for name in folded(editor, node):
            editor.link(source, 0, node, name)
            editor.settle()
            assert name not in folded(editor, node)
            assert editor.do(INSIDE, node), "the node has room for it"
            editor.do(FREE, node)


def folded(editor, node):
    return editor.do(
        "(id) => app.graph.getNodeById(id).widgets.filter((one) => one.advanced && one.hidden).map((one) => one.name)",
        node,
    )
