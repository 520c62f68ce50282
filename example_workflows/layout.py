"""An editor workflow that is being written: its nodes in columns, and wires that pass under no node.

A wire is the curve that the editor draws: it leaves and enters sockets sideways, pulled by a quarter of the distance.
One that would pass under a node goes around it over dots (the editor's reroutes), which wires of one output share.
"""

from __future__ import annotations

import itertools
import math
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

OPTIONAL = 7  # the shape of an optional input's socket
TITLE, SLOT = 30, 20  # the heights of a node's title and of a socket, in units of the canvas
GAP = 60  # between nodes, with the title of the lower one
EDGE = 20  # of a group beside its nodes
HEAD, LANES = 80, 50  # of a group above its first node: both titles; and more for many wires between them
LANE = 12  # between wires that go side by side
RIM = 2  # of a node, under which a wire may touch it
PULL = 20  # the farthest that a dot pulls a curve, as the editor's settings have it
PREVIEW = 226  # by which a sampler grows while it draws
# The heights of nodes with their settings folded, in the way of drawing them that is the higher one. Those that show
# pictures, texts or curves have room for them.
HEIGHTS = {
    "ApplyToDo": 210,
    "CLIPLoader": 120,
    "CLIPTextEncode": 102,
    "CheckpointLoaderSimple": 110,
    "DualCLIPLoader": 150,
    "EmptyLatentImage": 120,
    "GraftAdapter": 250,
    "GraftDataset": 560,
    "GraftDemo": 100,
    "GraftDemoVAE": 90,
    "GraftEMA": 240,
    "GraftLoRAConflicts": 420,
    "GraftLoRAEffect": 480,
    "GraftLoRAStack": 256,
    "GraftLoadLoRAs": 276,
    "GraftLossPlot": 90,
    "GraftObjective": 230,
    "GraftOptimizer": 260,
    "GraftRecipe": 190,
    "GraftSamples": 300,
    "GraftSaveLoRA": 140,
    "GraftSaveWords": 60,
    "GraftSlider": 610,
    "GraftSplitExperts": 160,
    "GraftTrainPairStart": 245,
    "GraftTrainStart": 205,
    "GraftTrainVAEStart": 330,
    "GraftTrainedVAE": 110,
    "GraftTrainingOnlyLoRA": 80,
    "GraftWords": 310,
    "KSampler": 265,
    "KSamplerAdvanced": 350,
    "LoRAStackPatch": 200,
    "PreviewAny": 180,
    "SaveImage": 330,
    "TrainStep": 530,
    "UNETLoader": 114,
    "VAEDecode": 60,
    "VAELoader": 86,
}
Point = tuple[float, float]
Box = tuple[float, float, float, float]  # left, top, right, bottom


class Graph:
    """Nodes by their host's schemas, the links between them, and where all of it lies."""

    def __init__(self, classes: Mapping[str, Any], title: str, first_id: int = 1, lanes: int = 0) -> None:
        from graft_nodes.headless.embedded import catalogue

        self.classes, self.look_up, self.title = classes, catalogue(classes, {}), title
        self.first_id, self.head = first_id, HEAD + lanes
        self.nodes: list[dict[str, Any]] = []
        self.links: list[list[Any]] = []
        self.groups: list[dict[str, Any]] = []
        self.dots: dict[Any, dict[str, Any]] = {}  # the editor's reroutes
        self.ends: list[dict[str, int]] = []  # of links over dots: the last one

    # --- what is in it ------------------------------------------------------------------------------------------------

    def note(self, texts: Sequence[str], width: int = 270) -> dict[str, Any]:
        """A text on the canvas, as high as Nodes 2.0 draws it in this width."""
        lines = itertools.chain(*(text.split("\n") for text in texts))
        height = 28 + sum(_line_height(line, width) for line in lines)
        node = {"type": "MarkdownNote", "inputs": [], "outputs": [], "properties": {}}
        text = "\n\n".join(texts)
        return self.put({**node, "widgets_values": [text], "color": "#432", "bgcolor": "#653"}, height)

    def add(self, kind: str, title: str = "", room: int = 0, **values: Any) -> dict[str, Any]:
        """A node with its widgets' defaults, but for `values`; `room` is another height than those of its kind have."""
        from graft_nodes.headless.embedded import EditorNode

        schema = self.look_up(kind)
        shown = EditorNode(schema)
        node = self.put({"type": kind}, room or HEIGHTS[kind])
        node["inputs"] = [_slot(item) for item in shown.sockets]
        node["outputs"] = [
            {"name": name, "type": kind_, "links": []}
            for name, kind_ in zip(self.output_names(kind), schema.outputs, strict=True)
        ]
        node["properties"] = {"Node name for S&R": kind}
        node["widgets_values"] = [_value(widget, values) for widget in shown.widgets]
        if title:
            node["title"] = title
        return node

    def put(self, node: dict[str, Any], height: int) -> dict[str, Any]:
        """A node as it is, with an id of its own."""
        order = len(self.nodes)
        added = {**node, "id": self.first_id + order, "pos": [0, 0], "size": [0, height], "order": order}
        self.nodes.append({**added, "flags": {}, "mode": 0})
        return self.nodes[-1]

    def output_names(self, kind: str) -> Sequence[str]:
        """The names of a node's outputs."""
        found = self.classes[kind]
        return getattr(found, "RETURN_NAMES", None) or found.RETURN_TYPES

    def link(self, source: dict[str, Any], output: int, target: dict[str, Any], name: str) -> None:
        """Connect an output, by place, to an input, by name."""
        (number,) = (place for place, slot in enumerate(target["inputs"]) if slot["name"] == name)
        link = len(self.links) + 1
        self.links.append([link, source["id"], output, target["id"], number, source["outputs"][output]["type"]])
        source["outputs"][output]["links"].append(link)
        target["inputs"][number]["link"] = link

    def chain(self, *nodes: dict[str, Any]) -> None:
        """Connect the settings of each node to the next one."""
        for source, target in itertools.pairwise(nodes):
            self.link(source, 0, target, "settings")

    def group(self, title: str, color: str, *nodes: dict[str, Any]) -> None:
        """A frame around nodes that have their places."""
        left, top = (min(node["pos"][axis] for node in nodes) for axis in (0, 1))
        right = max(node["pos"][0] + node["size"][0] for node in nodes)
        bottom = max(node["pos"][1] + _room(node) for node in nodes)
        bounding = [left - EDGE, top - self.head, right - left + 2 * EDGE, bottom - top + self.head + EDGE]
        number = len(self.groups) + 1
        shown = {"id": number, "title": title, "bounding": bounding, "color": color, "font_size": 24, "flags": {}}
        self.groups.append(shown)

    # --- where it lies ------------------------------------------------------------------------------------------------

    def column(self, left: int, width: int, *items: dict[str, Any] | int, top: int = 60) -> int:
        """Put nodes below each other; a number is more room between two of them. Returns the right edge."""
        for item in items:
            if isinstance(item, int):
                top += item
                continue
            item["pos"], item["size"][0] = [left, top], width
            top += _room(item) + GAP
        return left + width

    def fold(self, *nodes: dict[str, Any]) -> None:
        """Leave nothing of nodes but their titles."""
        for node in nodes:
            node["flags"] = {"collapsed": True}

    def document(self, **extra: Any) -> dict[str, Any]:
        """The workflow as the editor saves it, with every wire around the nodes."""
        self._lead_around()
        over = {"reroutes": [*self.dots.values()], "linkExtensions": self.ends} if self.dots else {}
        return {
            "id": str(uuid.uuid5(uuid.NAMESPACE_URL, f"graft/{self.title}")),
            "revision": 0,
            "last_node_id": self.first_id + len(self.nodes) - 1,
            "last_link_id": len(self.links),
            "nodes": self.nodes,
            "links": self.links,
            "groups": self.groups,
            "config": {},
            "extra": {"ds": self._view(), **over, **extra},
            "version": 0.4,
        }

    def _view(self) -> dict[str, Any]:
        """All of it in a window of 1600 x 1000, beside the sidebar and below the bars."""
        boxes = [_box(node) for node in self.nodes] + [
            (x, y, x + width, y + height) for x, y, width, height in (group["bounding"] for group in self.groups)
        ]
        left, top = (min(box[axis] for box in boxes) for axis in (0, 1))
        right, bottom = (max(box[axis] for box in boxes) for axis in (2, 3))
        scale = math.floor(min(1480 / (right - left), 860 / (bottom - top), 0.9) * 100) / 100
        return {"scale": scale, "offset": [round(90 / scale - left), round(115 / scale - top)]}

    # --- wires --------------------------------------------------------------------------------------------------------

    def _lead_around(self) -> None:
        """Give each link that passes under a node the fewest dots, on the shortest way, with which it does not."""
        boxes = {node["id"]: _box(node) for node in self.nodes}
        sockets = {node["id"]: node for node in self.nodes}
        lanes: list[tuple[tuple[int, int], float, float, float]] = []  # output, y, left, right
        for number, source, output, target, slot, _ in self.links:
            begin, end = _output(sockets[source], output), _input(sockets[target], slot)
            others = [box for node, box in boxes.items() if node not in (source, target)]
            mine = (source, output)
            taken = [lane for lane in lanes if lane[0] != mine]
            if _is_free([begin, end], others):
                continue
            ways = sorted(_ways(begin, end, list(boxes.values()), taken), key=lambda way: _cost([begin, *way, end]))
            way = next((way for way in ways if _is_free([begin, *way, end], others)), None)
            if way is None:
                names = [sockets[node].get("title") or sockets[node]["type"] for node in (source, target)]
                raise ValueError(f"no free way for a wire from {names[0]} to {names[1]} in {self.title}")
            lanes += [(mine, one[1], *sorted((one[0], other[0]))) for one, other in itertools.pairwise([begin, *way])]
            self._put_dots(number, mine, way, end)

    def _put_dots(self, link: int, output: tuple[int, int], way: Sequence[Point], end: Point) -> None:
        """Dots are shared by wires of one output that go on in one direction: others would bend each other."""
        parent = None
        for point, after in zip(way, [*way[1:], end], strict=True):
            pos = [round(point[0]), round(point[1])]
            course = round(math.atan2(after[1] - point[1], after[0] - point[0]), 3)
            key = (output, parent, *pos, course)
            if key not in self.dots:
                above = {} if parent is None else {"parentId": parent}
                self.dots[key] = {"id": len(self.dots) + 1, **above, "pos": pos, "linkIds": []}
            self.dots[key]["linkIds"].append(link)
            parent = self.dots[key]["id"]
        self.ends.append({"id": link, "parentId": parent})


def _line_height(line: str, width: int) -> int:
    """Of a heading, an entry of a list (which names a file) or a paragraph, with the space below it."""
    shown = re.sub(r"\]\(.*?\)|[*`\[]", "", line)  # of a link its words
    letter, indent, high, below = 5.2, 24, 16, 6
    if line.startswith("# "):
        letter, high, below = 8.3, 25, 2
    elif line.startswith("- "):
        letter, indent, high, below = 6.2, 56, 17, 8
    return high * math.ceil(len(shown.lstrip("#- ")) * letter / (width - indent)) + below


def _slot(item: Any) -> dict[str, Any]:
    slot: dict[str, Any] = {"name": item.name, "type": item.type}
    if item.widget:
        slot["widget"] = {"name": item.name}
    elif not item.required:
        slot["shape"] = OPTIONAL
    return {**slot, "link": None}


def _value(widget: Any, values: dict[str, Any]) -> Any:
    if widget.input is None:
        return "fixed"  # of a seed: the same one at every run
    return values.get(widget.name, widget.default)


def _room(node: dict[str, Any]) -> int:
    """The height of a node, with the preview that a sampler grows by."""
    if node["flags"].get("collapsed"):
        return 0
    return node["size"][1] + (PREVIEW if node["type"].startswith("KSampler") else 0)


def _box(node: dict[str, Any]) -> Box:
    (left, top), (width, _) = node["pos"], node["size"]
    return left, top - TITLE, left + width, top + _room(node)


def _output(node: dict[str, Any], slot: int) -> Point:
    if node["flags"].get("collapsed"):
        return node["pos"][0] + node["size"][0], node["pos"][1] - TITLE / 2
    return node["pos"][0] + node["size"][0] - 9, node["pos"][1] + (slot + 0.7) * SLOT


def _input(node: dict[str, Any], slot: int) -> Point:
    if node["flags"].get("collapsed"):
        return node["pos"][0], node["pos"][1] - TITLE / 2
    above = sum("widget" not in one for one in node["inputs"][:slot])
    return node["pos"][0] + 10, node["pos"][1] + (above + 0.7) * SLOT


def _ways(begin: Point, end: Point, boxes: Sequence[Box], taken: Sequence[Any]) -> Iterator[list[Point]]:
    """Ways over one dot, two, and four: across on some height, with room beside what other outputs have there."""
    sides = ((box[edge], side) for box in boxes for edge, side in ((1, -1), (3, 1)))
    lanes = {edge + side * LANE * step for edge, side in sides for step in range(1, 9)}
    for out, back in itertools.product((20, 25, 30), repeat=2):
        near, far = begin[0] + 9 + out, end[0] - 10 - back
        left, right = sorted((near, far))
        between = [(top, bottom) for low, top, high, bottom in boxes if left < high and low < right]
        used = [lane for _, lane, low, high in taken if left < high and low < right]
        yield [(far, begin[1])]
        yield [(near, end[1])]
        for y in lanes:
            if any(top < y < bottom for top, bottom in between) or any(abs(y - lane) < LANE - 1 for lane in used):
                continue
            yield [(near, y), (far, y)]
            yield [(near, begin[1]), (near, y), (far, y), (far, end[1])]


def _cost(points: Sequence[Point]) -> float:
    """The length of a way; a dot is worth a detour."""
    return sum(math.dist(one, other) for one, other in itertools.pairwise(points)) + 60 * len(points)


def _is_free(points: Sequence[Point], boxes: Sequence[Box]) -> bool:
    return not any(
        left + RIM < x < right - RIM and top < y < bottom
        for x, y in _curve(points)
        for left, top, right, bottom in boxes
    )


def _curve(points: Sequence[Point], samples: int = 32) -> Iterator[Point]:
    """Points along a wire from an output over dots to an input."""
    pulls = [(1.0, 0.0)]  # the direction at each point
    for before, at, after in zip(points, points[1:], points[2:], strict=False):
        into, out = (math.atan2(b[1] - a[1], b[0] - a[0]) for a, b in ((before, at), (at, after)))
        turn = (into - out) / 2
        if abs(turn) > math.pi / 2:
            turn += math.pi
        pulls.append((math.cos(into - turn), math.sin(into - turn)))
    pulls.append((1.0, 0.0))
    last = len(points) - 2
    for place, (a, b) in enumerate(itertools.pairwise(points)):
        quarter = math.dist(a, b) / 4
        first = quarter if place == 0 else min(PULL, quarter)
        second = quarter if place == last else min(PULL, quarter)
        c = (a[0] + pulls[place][0] * first, a[1] + pulls[place][1] * first)
        d = (b[0] - pulls[place + 1][0] * second, b[1] - pulls[place + 1][1] * second)
        for step in range(samples + 1):
            t = step / samples
            shares = ((1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t * t * (1 - t), t**3)
            yield tuple(
                sum(share * one[axis] for share, one in zip(shares, (a, c, d, b), strict=True)) for axis in (0, 1)
            )
