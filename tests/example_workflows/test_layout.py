"""How templates are laid out: how large they are, what lies over what, and where wires go."""

import itertools
import json
from pathlib import Path

import pytest
from graft_nodes.example_workflows import layout

FOLDER = Path(__file__).resolve().parents[2] / "example_workflows"
PATHS = sorted(FOLDER.glob("*.json"))
LARGEST, FIRST = (2000, 1200), (1680, 950)  # in units of the canvas: 60% in 1600 x 1000, and in 1280 x 720
TRAINING = 817  # height of a subgraph's own node with the panels of what is inside, while it trains
PREVIEW = 226  # by which the editor makes a sampler higher while it draws
SIDEBAR, BARS = 60, 80  # pixels of the editor's window that its bars take
EMPTY = 400


@pytest.fixture(params=PATHS, ids=lambda path: path.stem)
def template(request):
    return json.loads(request.param.read_text(encoding="utf-8")), request.param.stem


def box(node):
    """left, top, right, bottom of a node with its title, and a sampler's preview."""
    (left, top), (width, height) = node["pos"], node["size"]
    if node["flags"].get("collapsed"):
        return left, top - 30, left + width, top
    if not height:  # as low as its panels are
        height = TRAINING
    return left, top - 30, left + width, top + height + PREVIEW * node["type"].startswith("KSampler")


def frames(data):
    return [
        (left, top, left + width, top + height) for left, top, width, height in (g["bounding"] for g in data["groups"])
    ]


def around(boxes):
    return tuple(pick(box[at] for box in boxes) for at, pick in enumerate((min, min, max, max)))


def meet(one, other):
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def test_a_template_can_be_read_as_it_opens(template):
    data, title = template
    left, top, right, bottom = around([*map(box, data["nodes"]), *frames(data)])
    width, height = FIRST if title == "Train your first LoRA" else LARGEST
    assert right - left <= width and bottom - top <= height
    scale, (x, y) = data["extra"]["ds"]["scale"], data["extra"]["ds"]["offset"]
    assert scale >= 0.6
    assert (left + x) * scale >= SIDEBAR and (top + y) * scale >= BARS
    assert (right + x) * scale <= 1600 and (bottom + y) * scale <= 1000


def test_nothing_lies_over_anything_else_with_previews_grown(template):
    data, _ = template
    nodes, groups = [*map(box, data["nodes"])], frames(data)
    assert not [pair for pair in itertools.combinations(nodes, 2) if meet(*pair)]
    assert not [pair for pair in itertools.combinations(groups, 2) if meet(*pair)]
    for node, group in itertools.product(nodes, groups):
        inside = group[0] <= node[0] and group[1] + 34 <= node[1] and node[2] <= group[2] and node[3] <= group[3]
        assert inside or not meet(node, group)


def test_no_group_has_much_of_nothing(template):
    data, _ = template
    nodes = [*map(box, data["nodes"])]
    for left, top, right, bottom in frames(data):
        corners = itertools.product(
            range(int(left), int(right) - EMPTY + 1, 10), range(int(top), int(bottom) - EMPTY + 1, 10)
        )
        assert not [at for at in corners if not any(meet((*at, at[0] + EMPTY, at[1] + EMPTY), node) for node in nodes)]


def test_a_decoder_lies_beside_its_sampler(template):
    data, _ = template
    nodes = {node["id"]: node for node in data["nodes"]}
    for _, source, _, target, _, kind in data["links"]:
        sampler, decoder = nodes[source], nodes[target]
        if kind == "LATENT" and decoder["type"] == "VAEDecode" and not sampler["flags"].get("collapsed"):
            assert box(decoder)[0] >= box(sampler)[2]


@pytest.fixture
def graph(host):
    return layout.Graph(host.nodes.NODE_CLASS_MAPPINGS, "of a test")


def linked(graph, between):
    """Three nodes in a row, the first linked to the last; the document."""
    demo, middle, target = (graph.add(kind) for kind in ("GraftDemo", "GraftDataset", "GraftRecipe"))
    graph.link(demo, 0, target, "model")
    graph.column(0, 200, demo)
    graph.column(260, 300, middle, top=60 if between else 400)
    graph.column(620, 300, target)
    return graph.document()["extra"]


@pytest.mark.parametrize("between", [False, True], ids=["free", "in the way"])
def test_a_wire_goes_around_what_lies_in_its_way(graph, between):
    extra = linked(graph, between)
    dots = extra.get("reroutes", [])
    assert bool(dots) is between
    for one, other in itertools.pairwise(dots):
        assert other["parentId"] == one["id"] and one["linkIds"] == other["linkIds"] == [1]
    assert not [dot for dot in dots if 260 < dot["pos"][0] < 560 and 30 < dot["pos"][1] < 620]
    assert extra.get("linkExtensions", []) == ([{"id": 1, "parentId": dots[-1]["id"]}] if between else [])


def test_wires_of_one_output_share_the_dots_of_one_way(graph):
    demo, middle, *targets = (graph.add(kind) for kind in ("GraftDemo", "GraftDataset", "GraftRecipe", "GraftRecipe"))
    graph.column(0, 200, demo)
    graph.column(260, 300, middle)
    graph.column(620, 300, *targets)
    for target in targets:
        graph.link(demo, 0, target, "model")
    dots = graph.document()["extra"]["reroutes"]
    assert dots[0]["linkIds"] == [1, 2]


def test_a_wire_without_a_way_is_said(graph):
    demo, wall, target = (graph.add(kind) for kind in ("GraftDemo", "GraftDataset", "GraftRecipe"))
    graph.link(demo, 0, target, "model")
    graph.column(0, 200, demo)
    graph.column(200, 300, wall, top=-3000)
    wall["size"][1] = 6000
    graph.column(500, 300, target)
    with pytest.raises(ValueError, match="no free way for a wire from GraftDemo to GraftRecipe in of a test"):
        graph.document()
