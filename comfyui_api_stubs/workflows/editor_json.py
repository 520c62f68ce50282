"""Translates the editor's JSON (nodes, links, subgraphs) to an API graph, like ComfyUI's "Export (API)"."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property
from typing import Any, NamedTuple

from . import browser_nodes, editor_file, group_nodes, prompt_text, widgets
from .browser_nodes import SETS_OF_GETS
from .editor_file import (
    SAVE_AGAIN,
    EditorGraph,
    Link,
    Slot,
    all_nodes,
    read_graphs,
    read_slot,
    subgraph_definitions,
)
from .problem import Problem, WorkflowError
from .schema import Schema

__all__ = ["class_types", "malformed", "to_api"]
Catalogue = Callable[[str], Schema | None]
MUTED, BYPASSED = 2, 4
INPUT_NODE, OUTPUT_NODE = "-10", "-20"
_LINK_AGAIN = "link it again in the editor, or remove its link"
_OUT_OF_ITSELF = "take it out of itself in the editor and save the workflow"


@dataclass
class PlacedNode:
    """A node and the graph it is in: `id` is its execution id ("12:5" for node 5 inside subgraph node 12); `values` are
    the values of its widgets.
    """

    id: str
    node: dict[str, Any]
    graph: EditorGraph
    host: PlacedNode | None
    inputs: list[Slot]
    outputs: list[str]
    schema: Schema | None = None
    inside: EditorGraph | None = None
    values: dict[str, Any] = field(default_factory=dict)
    never_sent: bool = False  # it exists only in the browser

    @cached_property
    def type(self) -> str:
        return str(self.node.get("type"))

    @property
    def class_title(self) -> str:
        """The title that the editor gives a node of this class."""
        if self.schema:
            return self.schema.title
        return self.type

    @property
    def mode(self) -> int:
        return int(self.node.get("mode") or 0)

    @property
    def runs(self) -> bool:
        return self.mode not in (MUTED, BYPASSED)

    @cached_property
    def is_group(self) -> bool:
        """Whether it was a group node, which is a subgraph by now."""
        return group_nodes.is_group(self.node)


def malformed(data: Mapping[str, Any]) -> list[Problem]:
    """Problems with the shape of an editor file: its nodes, slots, links and group nodes."""
    return editor_file.malformed(data) or group_nodes.malformed_groups(data)


def class_types(data: Mapping[str, Any]) -> set[str]:
    """The node types that a host needs, also inside subgraphs and group nodes: all but muted and bypassed nodes and
    those that exist only in the browser.

    The file must not be `malformed`.
    """
    subgraphs = {str(entry.get("id")) for entry in subgraph_definitions(data)}
    active = set()
    for node in all_nodes(data):
        if not isinstance(node, dict) or node.get("mode") in (MUTED, BYPASSED):
            continue
        if not browser_nodes.is_never_sent(node, is_known=False):
            active.add(str(node.get("type")))
    groups = {kind for kind in active if group_nodes.is_group({"type": kind})}
    return (active | group_nodes.inner_types(data)) - groups - subgraphs - browser_nodes.OF_THE_BROWSER


def of_no_server(data: Mapping[str, Any]) -> frozenset[str]:
    """The types of nodes that nothing in the file says a server brought. The file must not be `malformed`."""
    return frozenset(str(node.get("type")) for node in all_nodes(data) if browser_nodes.may_live_in_the_browser(node))


def to_api(data: Mapping[str, Any], look_up: Catalogue) -> dict[str, dict[str, Any]]:
    """The API graph of an editor workflow that is not `malformed`. Raises WorkflowError that lists everything that
    cannot be translated.
    """
    root, subgraphs = read_graphs(data)
    problems = group_nodes.make_subgraphs(data, root, subgraphs, look_up)
    placed = _Placement(subgraphs, look_up, problems)
    placed.place(root, None, [])
    placed.apply_primitives()
    graph = {}
    for item in placed.all.values():
        if item.runs and item.inside is None and not item.never_sent:
            graph[item.id] = placed.export(item)
    if problems:
        raise WorkflowError(problems)
    for node in graph.values():
        _drop_links_to_nothing(node["inputs"], graph)
    return graph


def _drop_links_to_nothing(inputs: dict[str, Any], graph: Mapping[str, Any]) -> None:
    for name, value in list(inputs.items()):
        if isinstance(value, list) and value[0] not in graph:
            del inputs[name]


@dataclass(frozen=True)
class _Constant:
    """A value that comes from a widget of a subgraph node."""

    value: Any


_UNSET = _Constant(None)  # a widget of the subgraph node without a saved value: the widget inside keeps its own value
# where a link comes from: an output of a node that runs, a value, or nowhere
_Source = tuple[str, int] | _Constant | None


class _Onward(NamedTuple):
    """An input whose link leads on, and the type that it has to give."""

    item: PlacedNode
    slot: Slot
    wanted: str

    @property
    def key(self) -> tuple[str, str | None, str]:
        """Inputs with the same key lead to the same source."""
        return (self.item.id, self.slot.link, self.wanted)


class _Walk:
    """One way along links, from an input to where its value comes from."""

    def __init__(self) -> None:
        self.seen: set[tuple[str, str]] = set()  # the inputs on the way: (node, name)
        self.widgets: list[tuple[PlacedNode, str]] = []  # inputs of subgraph nodes on the way: they may have a value
        self.passed: dict[tuple[str, str | None, str], int] = {}  # key of an input: how many widgets were before it


class _Placement:
    """All nodes of the workflow by execution id; follows their links through subgraphs, reroutes and bypassed nodes."""

    def __init__(self, subgraphs: Mapping[str, EditorGraph], look_up: Catalogue, problems: list[Problem]):
        self.subgraphs, self.look_up, self.problems = subgraphs, look_up, problems
        self.all: dict[str, PlacedNode] = {}
        self._shown: dict[str, widgets.EditorNode] = {}  # by class
        self._shows_widget: dict[tuple[int, int], _Constant | None] = {}  # by subgraph and number of its input
        self._ends: dict[tuple[str, str | None, str], _Source] = {}  # where inputs that were followed lead

    def place(self, graph: EditorGraph, host: PlacedNode | None, path: list[str]) -> None:
        """Add the nodes of a graph; `host` is the subgraph node around it, whose promoted values are set first."""
        overrides: dict[str, dict[str, Any]] = {}
        if host:
            overrides = self._promoted(host)
        for node in graph.nodes:
            item = self._placed(node, graph, host, path)
            for name, value in overrides.get(str(node.get("id")), {}).items():
                if name in item.values or item.inside is not None:
                    item.values[name] = value
            self.all[item.id] = item
            if item.inside is not None and (item.runs or item.is_group or host is not None):
                if len(path) > 100 or item.inside is graph:
                    self.problems.append(_at(item, f"the subgraph contains itself; {_OUT_OF_ITSELF}"))
                else:
                    self.place(item.inside, item, [*path, str(node.get("id"))])

    def apply_primitives(self) -> None:
        """Write the value of each PrimitiveNode into the widgets that it is linked to, as the editor does."""
        for item in self.all.values():
            value = _first_saved_value(item)
            if item.type != "PrimitiveNode" or value is None:
                continue
            fills_in = (item.node.get("properties") or {}).get("Run widget replace on values")
            if isinstance(value, str) and value and fills_in:
                value = self._filled(value)
            for link in item.graph.links_from.get(str(item.node.get("id")), ()):
                self._write_into_widget(item, link, value)

    def _write_into_widget(self, item: PlacedNode, link: Link, value: Any) -> None:
        target = self._neighbor(item, link.target)
        if target is None:
            return
        slot = _slot_of(target, link)
        if slot is None or slot.widget is None:
            return
        if target.inside is not None:
            target.values[slot.widget] = value
        elif target.schema is not None:
            self._of_class(target.type, target.schema).choose(target.values, slot.widget, value)
            target.inputs = _there(target.schema, target.inputs, target.values)

    def export(self, item: PlacedNode) -> dict[str, Any]:
        """The node in the API format."""
        inputs: dict[str, Any] = {name: self._sent(item, name, value) for name, value in item.values.items()}
        for slot in item.inputs:
            source = self._source(item, slot)
            if isinstance(source, _Constant) and source is not _UNSET:
                inputs[slot.name] = _wrapped(source.value)
            elif isinstance(source, tuple):
                inputs[slot.name] = [source[0], source[1]]
        if item.type == widgets.CUSTOM_COMBO:
            chosen = inputs.get("choice")
            if isinstance(chosen, list):  # linked: the browser does not know what will be chosen
                chosen = item.values.get("choice")
            inputs["index"] = widgets.own_index(inputs, chosen)
        title = item.node.get("title") or item.class_title
        return {"inputs": inputs, "class_type": item.type, "_meta": {"title": title}}

    def _placed(self, node: dict[str, Any], graph: EditorGraph, host: PlacedNode | None, path: list[str]) -> PlacedNode:
        kind = str(node.get("type"))
        inside = self.subgraphs.get(kind)
        outputs = [str(entry.get("type")) for entry in node.get("outputs") or []]
        execution_id = ":".join([*path, str(node.get("id"))])
        item = PlacedNode(execution_id, node, graph, host, [], outputs, inside=inside)
        if inside is not None:
            item.outputs = [str(entry.get("type")) for entry in inside.outputs]
            item.values = self._host_values(item)
        else:
            self._read_class(item)
        item.inputs = self._slots(node, graph, item.values)
        return item

    def _read_class(self, item: PlacedNode) -> None:
        """Set what a node's class tells: the values of its widgets, or that it is never sent."""
        schema = self.look_up(item.type)
        item.never_sent = browser_nodes.is_never_sent(item.node, schema is not None)
        if item.never_sent:
            return
        if item.runs and item.type in browser_nodes.ACTIVE:
            self.problems.append(replace(_at(item, browser_nodes.LIVES_IN_THE_BROWSER), unread=True))
        saved = item.node.get("widgets_values")
        if schema is None:
            item.values = widgets.of_unknown(saved)
            return
        shown = self._of_class(item.type, schema)
        item.schema, item.values = schema, shown.values(saved)
        if item.runs:
            self.problems += _unreadable(item, shown)

    def _slots(self, node: Mapping[str, Any], graph: EditorGraph, values: Mapping[str, Any]) -> list[Slot]:
        """The inputs of a node with these values, as the editor shows them, each with its link."""
        kind = str(node.get("type"))
        slots = [read_slot(entry) for entry in node.get("inputs") or []]
        inside = self.subgraphs.get(kind)
        if inside is not None:
            slots = _subgraph_slots(inside, slots)
        elif kind not in browser_nodes.NEVER_SENT:
            schema = self.look_up(kind)
            if schema is not None:
                slots = _configured(self._of_class(kind, schema), slots, values)
        return _with_links_of_table(slots, node, graph)

    def _values_of(self, node: Mapping[str, Any]) -> dict[str, Any]:
        """The values of a node's own widgets, where the host has its class."""
        kind = str(node.get("type"))
        schema = self.look_up(kind)
        if schema is None:
            return {}
        return self._of_class(kind, schema).values(node.get("widgets_values"))

    def _of_class(self, kind: str, schema: Schema) -> widgets.EditorNode:
        if kind not in self._shown:
            self._shown[kind] = widgets.EditorNode(schema)
        return self._shown[kind]

    def _host_values(self, item: PlacedNode) -> dict[str, Any]:
        """The values of the widgets that a subgraph node shows, by the name of the subgraph's input."""
        assert item.inside is not None
        shown = {}
        for number, entry in enumerate(item.inside.inputs):
            widget = self._promoted_widget(item.inside, number, 0)
            if widget is not None:
                shown[str(entry.get("name"))] = widget.value
        return {**shown, **dict(zip(shown, _saved_values(item), strict=False))}

    def _promoted_widget(self, inside: EditorGraph, number: int, depth: int) -> _Constant | None:
        """The value of the widget that an input of a subgraph shows: the first one inside that it is linked to, or that
        another subgraph's input shows; None if it shows none.
        """
        key = (id(inside), number)
        if depth <= 100 and key not in self._shows_widget:
            self._shows_widget[key] = None  # for a subgraph that contains itself
            found = None
            for link in inside.links_from.get(INPUT_NODE, ()):
                if found is None and link.origin_slot == number:
                    found = self._widget_at(inside, link, depth)
            self._shows_widget[key] = found
        return self._shows_widget.get(key)

    def _widget_at(self, inside: EditorGraph, link: Link, depth: int) -> _Constant | None:
        node = inside.nodes_by_id.get(link.target)
        if node is None:
            return None
        values = self._values_of(node)
        slot = next((slot for slot in self._slots(node, inside, values) if slot.link == link.id), None)
        if slot is None:
            return None
        inner = self.subgraphs.get(str(node.get("type")))
        if inner is not None:
            return self._widget_of_subgraph(inner, node, slot.name, depth)
        if slot.name in values and not browser_nodes.is_never_sent(node, is_known=True):
            return _Constant(values[slot.name])
        return None

    def _widget_of_subgraph(
        self, inner: EditorGraph, node: Mapping[str, Any], name: str, depth: int
    ) -> _Constant | None:
        """The value of a widget of a subgraph node that is in a subgraph itself: the saved one, else the one inside."""
        found = None
        place = 0
        for number, entry in enumerate(inner.inputs):
            widget = self._promoted_widget(inner, number, depth + 1)
            if entry.get("name") == name:
                found = widget
                break
            place += widget is not None
        saved = node.get("widgets_values")
        if found is not None and isinstance(saved, list) and place < len(saved):
            return _Constant(saved[place])
        return found

    def _promoted(self, host: PlacedNode) -> dict[str, dict[str, Any]]:
        """Values that the host's own widgets give to inner widgets (`proxyWidgets` of older files): {inner node id:
        {widget: value}}.
        """
        entries = (host.node.get("properties") or {}).get("proxyWidgets")
        try:
            if isinstance(entries, str):
                entries = json.loads(entries)
        except (ValueError, RecursionError) as error:
            self.problems.append(_at(host, f"'proxyWidgets' is not JSON ({error}); {SAVE_AGAIN}"))
            return {}
        if not isinstance(entries or [], list):
            self.problems.append(_at(host, f"'proxyWidgets' is not a list; {SAVE_AGAIN}"))
            return {}
        promoted: dict[str, dict[str, Any]] = {}
        for entry, value in zip(entries or [], _saved_values(host), strict=False):
            if value is None or not isinstance(entry, Sequence) or len(entry) < 2:
                continue
            node_id, name = str(entry[0]), str(entry[1])
            outer: str | None = name
            if node_id != "-1":
                outer = self._input_behind(host, node_id, name)
            if outer is not None:
                host.values[outer] = value
            else:
                promoted.setdefault(node_id, {})[name] = value
        return promoted

    def _input_behind(self, host: PlacedNode, node_id: str, name: str) -> str | None:
        """The name of the subgraph's input that is linked to an inner widget."""
        assert host.inside is not None
        node = host.inside.nodes_by_id.get(node_id, {})
        slots = self._slots(node, host.inside, self._values_of(node))
        slot = next((slot for slot in slots if name in (slot.name, slot.widget)), None)
        if slot is None or slot.link is None:
            return None
        link = host.inside.links.get(slot.link)
        if link is None or link.origin != INPUT_NODE or not 0 <= link.origin_slot < len(host.inside.inputs):
            return None
        return str(host.inside.inputs[link.origin_slot].get("name"))

    def _sent(self, item: PlacedNode, name: str, value: Any) -> Any:
        """A widget's value as it is sent: choices in prompts taken, file names filled in, lists wrapped."""
        declared = item.schema and item.schema.input(name)
        if isinstance(value, str) and declared:
            if declared.settings.get("dynamicPrompts"):
                try:
                    value = prompt_text.choose(value, random.Random(f"{item.id} {value}"))
                except ValueError as error:
                    self.problems.append(_at(item, f"{error}; nest them less deep", name))
            elif name == "filename_prefix" and item.type in prompt_text.SAVES_FILES:
                value = self._filled(value)
        return _wrapped(value)

    def _filled(self, text: str) -> str:
        return prompt_text.fill_in(text, self._widget_text, datetime.now())

    def _widget_text(self, node: str, widget: str) -> str | None:
        """The value of a widget for %Node.widget%: the node's "Node name for S&R" property counts first, then its
        title.
        """
        names, titles = self._named
        item = names.get(node) or titles.get(node)
        value = item.values.get(widget) if item else None
        if value is None:
            return None
        if isinstance(value, (bool, float)):
            return json.dumps(value)
        return str(value)

    @cached_property
    def _named(self) -> tuple[dict[Any, PlacedNode], dict[Any, PlacedNode]]:
        """The first node of each name for S&R, and the first of each title; all nodes are placed by now."""
        names: dict[Any, PlacedNode] = {}
        titles: dict[Any, PlacedNode] = {}
        for item in self.all.values():
            name = (item.node.get("properties") or {}).get("Node name for S&R")
            title = item.node.get("title", item.class_title)
            if isinstance(name, str):
                names.setdefault(name, item)
            if isinstance(title, str):
                titles.setdefault(title, item)
        return names, titles

    def _neighbor(self, item: PlacedNode, node_id: str) -> PlacedNode | None:
        path = item.id.rpartition(":")[0]
        return self.all.get(f"{path}:{node_id}" if path else node_id)

    def _source(self, item: PlacedNode, slot: Slot) -> _Source:
        """Where an input's link comes from in the end: an output of a node that runs, a promoted value, or nothing."""
        if slot.link is None:
            return None
        walk, problems = _Walk(), len(self.problems)
        step: _Onward | _Source = self._next(_Onward(item, slot, slot.type), walk)
        while isinstance(step, _Onward):
            if step.key in self._ends:
                step = self._ends[step.key]
                break
            walk.passed[step.key] = len(walk.widgets)
            step = self._next(step, walk)
        settled = len(walk.widgets)
        if step is _UNSET:
            step, settled = _innermost_value(walk)
        if step is not _UNSET and len(self.problems) == problems:
            self._ends.update((key, step) for key, count in walk.passed.items() if count <= settled)
        return step

    def _next(self, step: _Onward, walk: _Walk) -> _Onward | _Source:
        """One link on from an input."""
        item, slot = step.item, step.slot
        if slot.link is None:
            return None
        if (item.id, slot.name) in walk.seen:
            message = "the links make a cycle through reroutes or bypassed nodes; remove one of them in the editor"
            self.problems.append(_at(item, message, slot.name))
            return None
        walk.seen.add((item.id, slot.name))
        link = item.graph.links.get(slot.link)
        if link is None:
            self.problems.append(_at(item, f"link {slot.link} is not in the file; {_LINK_AGAIN}", slot.name))
            return None
        if item.host is not None and link.origin == INPUT_NODE:
            return self._outer(item, item.host, link, walk, slot.name)
        origin = self._neighbor(item, link.origin)
        if origin is None:
            message = f"linked to node {link.origin}, which is not in the file; {_LINK_AGAIN}"
            self.problems.append(_at(item, message, slot.name))
            return None
        return self._output(origin, link.origin_slot, step.wanted, walk)

    def _outer(self, item: PlacedNode, host: PlacedNode, link: Link, walk: _Walk, name: str) -> _Onward | _Source:
        """Where a link inside a subgraph gets its value: the link of the host's input, or the host's widget."""
        if not 0 <= link.origin_slot < len(host.inputs):
            message = f"linked to input {link.origin_slot} of the subgraph, which has none there; {_LINK_AGAIN}"
            self.problems.append(_at(item, message, name))
            return None
        outer = host.inputs[link.origin_slot]
        walk.widgets.append((host, outer.name))
        if outer.link is None or (host.is_group and self._is_primitive(host, outer)):
            return _UNSET
        return _Onward(host, outer, outer.type)

    def _is_primitive(self, item: PlacedNode, slot: Slot) -> bool:
        """Whether an input is linked to a PrimitiveNode, which has written its value into the widget by now."""
        link = item.graph.links.get(str(slot.link))
        origin = self._neighbor(item, link.origin) if link else None
        return origin is not None and origin.type == "PrimitiveNode"

    def _output(self, item: PlacedNode, slot: int, wanted: str, walk: _Walk) -> _Onward | _Source:
        if item.mode == MUTED:
            return None
        if item.mode == BYPASSED:
            passed = _bypass_group(item, slot, wanted) if item.is_group else _bypass(item, slot, wanted)
            if passed is None:
                return None
            return _Onward(item, passed, passed.type)
        if item.inside is not None:
            return self._output_of_subgraph(item, item.inside, slot, wanted, walk)
        if item.type in SETS_OF_GETS:
            return self._behind_get(item, wanted)
        if item.never_sent:
            number = 0 if item.type == "Reroute" else slot
            if 0 <= number < len(item.inputs):
                return _Onward(item, item.inputs[number], wanted)
            return None
        return (item.id, slot)

    def _behind_get(self, item: PlacedNode, wanted: str) -> _Onward | _Source:
        """What is linked to the Set node that a Get node names: the first one of its own graph, else the only one of
        the graphs around it.
        """
        kind, looks_around = SETS_OF_GETS[item.type]
        name = str(_first_saved_value(item) or "")
        sets = self._sets_seen(item, kind, looks_around)
        named = [one for one in sets if name and str(_first_saved_value(one) or "") == name]
        own = [one for one in named if _host_id(one) == _host_id(item)]
        if not named:
            names = ", ".join(sorted({str(_first_saved_value(one) or "") for one in sets})) or "none"
            message = f"no Set node is named '{name}' (the Set nodes here: {names}); choose another name in the editor"
            self.problems.append(_at(item, message))
            return None
        if not own and len(named) > 1:
            ids = ", ".join(one.id for one in named)
            message = f"{len(named)} Set nodes around this subgraph are named '{name}' (ids {ids}); rename one of them"
            self.problems.append(_at(item, message))
            return None
        found = (own or named)[0]
        if not found.inputs:
            return None
        slot = found.inputs[0]
        link = found.graph.links.get(str(slot.link))
        if not own and link is not None and link.origin == INPUT_NODE:
            return None  # the front end finds no node behind it
        return _Onward(found, slot, wanted)

    def _sets_seen(self, item: PlacedNode, kind: str, looks_around: bool) -> list[PlacedNode]:
        """The Set nodes that a Get node sees, those of its own graph first."""
        found: list[PlacedNode] = []
        around: PlacedNode | None = item
        while around is not None:
            found += self._sets.get((_host_id(around), kind), [])
            around = around.host if looks_around else None
        return found

    @cached_property
    def _sets(self) -> dict[tuple[str, str], list[PlacedNode]]:
        """The Set nodes by the subgraph node around them and their type, in the file's order; all nodes are placed by
        now.
        """
        kinds = {kind for kind, _ in SETS_OF_GETS.values()}
        found: dict[tuple[str, str], list[PlacedNode]] = {}
        for item in self.all.values():
            if item.type in kinds:
                found.setdefault((_host_id(item), item.type), []).append(item)
        return found

    def _output_of_subgraph(
        self, item: PlacedNode, inside: EditorGraph, slot: int, wanted: str, walk: _Walk
    ) -> _Onward | _Source:
        link = inside.first_link_to.get((OUTPUT_NODE, slot))
        if link is None:
            return None
        if link.origin == INPUT_NODE:
            return self._outer(item, item, link, walk, "")
        inner = self.all.get(f"{item.id}:{link.origin}")
        if inner is None:
            return None
        return self._output(inner, link.origin_slot, wanted, walk)


def _host_id(item: PlacedNode) -> str:
    """The id of the subgraph node around a node; empty in the root."""
    return item.host.id if item.host is not None else ""


def _with_links_of_table(slots: Sequence[Slot], node: Mapping[str, Any], graph: EditorGraph) -> list[Slot]:
    """The inputs of a node with the links that only the file's table of links knows, as the newer front ends read it:
    an input's own link counts if the table has it, else the first one there that leads to the input.

    A link that an input of the node names belongs to that one, whatever place the table gives, also if the node no
    longer has it.
    """
    own = {str(entry.get("link")) for entry in node.get("inputs") or []}
    linked = []
    for number, slot in enumerate(slots):
        link = graph.first_link_to.get((str(node.get("id")), number))
        if link is not None and link.id not in own and slot.link not in graph.links:
            slot = slot._replace(link=link.id)
        linked.append(slot)
    return linked


def _unreadable(item: PlacedNode, shown: widgets.EditorNode) -> list[Problem]:
    """What keeps a node from being sent: inputs whose values this reader cannot know."""
    found = shown.unreadable(item.values)
    return [replace(_at(item, message, name), unread=True) for name, message in found]


def _innermost_value(walk: _Walk) -> tuple[_Source, int]:
    """(the value of the last widget on the way that has one, its number); _UNSET without one."""
    for number in reversed(range(len(walk.widgets))):
        host, name = walk.widgets[number]
        if name in host.values:
            return _Constant(host.values[name]), number
    return _UNSET, 0


def _saved_values(item: PlacedNode) -> list[Any]:
    """The values of a node's widgets, as saved in the file."""
    values = item.node.get("widgets_values")
    if isinstance(values, list):
        return values
    return []


def _first_saved_value(item: PlacedNode) -> Any:
    return next(iter(_saved_values(item)), None)


def _bypass(item: PlacedNode, slot: int, wanted: str) -> Slot | None:
    """The input that a bypassed node passes on to an output: the one in the same position if the types fit, else the
    first one of the wanted type.
    """
    has_input = 0 <= slot < len(item.inputs)
    if wanted in ("*", ""):
        if not item.inputs:
            return None
        return item.inputs[slot if has_input else 0]
    output_type = wanted
    if 0 <= slot < len(item.outputs):
        output_type = item.outputs[slot]
    fitting = [entry for entry in item.inputs if _fits(entry.type, output_type) and _fits(entry.type, wanted)]
    if has_input and item.inputs[slot] in fitting:
        return item.inputs[slot]
    exact = [entry for entry in item.inputs if entry.type == wanted]
    return next(iter(exact + fitting), None)


def _bypass_group(item: PlacedNode, slot: int, wanted: str) -> Slot | None:
    """The input that a bypassed group node passes on: the one in the same position if it has the wanted type, else the
    first one that has it.
    """
    same_place = item.inputs[slot : slot + 1]
    return next((entry for entry in [*same_place, *item.inputs] if entry.type == wanted), None)


def _fits(first: str, second: str) -> bool:
    """The editor's rule for which types connect: "*", equal types (ignoring case), or lists "A,B" that share a type."""
    if {first, second} & {"*", "", "0"}:
        return True
    return not set(first.lower().split(",")).isdisjoint(second.lower().split(","))


def _slot_of(item: PlacedNode, link: Link) -> Slot | None:
    return next((slot for slot in item.inputs if slot.link == link.id), None)


def _configured(shown: widgets.EditorNode, saved: Sequence[Slot], values: Mapping[str, Any]) -> list[Slot]:
    """A node's inputs as the editor shows them: those of its class, in order and with the saved links, then those that
    are only in the file, but for the inputs of widgets that the class no longer has.
    """
    links = {slot.name: slot.link for slot in saved}
    declared = []
    for entry in shown.sockets:
        widget = entry.name if entry.widget else None
        declared.append(Slot(entry.name, entry.socket_type, links.get(entry.name), widget))
    names = {slot.name for slot in declared}
    for slot in saved:
        if slot.name not in names and (slot.widget is None or slot.widget in values):
            declared.append(slot)
    return _there(shown.schema, declared, values)


def _there(schema: Schema, slots: Sequence[Slot], values: Mapping[str, Any]) -> list[Slot]:
    """The slots without those of other choices than the node's."""
    return [slot for slot in slots if widgets.has_slot(schema, values, slot.name)]


def _subgraph_slots(inside: EditorGraph, saved: Sequence[Slot]) -> list[Slot]:
    """A subgraph node's inputs: those of its definition, in order and with the links from the file."""
    slots = []
    links = {slot.name: slot.link for slot in reversed(saved)}  # of several with one name the first counts
    for entry in inside.inputs:
        name = str(entry.get("name"))
        slots.append(Slot(name, str(entry.get("type")), links.get(name), name))
    return slots


def _at(item: PlacedNode, message: str, name: str = "") -> Problem:
    title = str(item.node.get("title") or (item.schema.title if item.schema else ""))
    return Problem(message, item.id, title, item.type, name)


def _wrapped(value: Any) -> Any:
    """Wrap a value that is a list, because a bare list means a link."""
    if isinstance(value, list):
        return {"__value__": value}
    return value
