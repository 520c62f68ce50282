"""Turns the group nodes of a file, which the editor had before subgraphs, into subgraphs.

A group node's inputs and widgets are not in the file: the front end makes them from the nodes inside, and so do we.
Their order and names are those of front end 1.27.10. A muted group node runs as if it were on, as in every front end.
The nodes of a bypassed one run too; what is linked to it gets what it passes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from . import widgets
from .editor_file import EditorGraph, Link, all_nodes
from .problem import Problem
from .schema import Schema

PREFIXES = ("workflow>", "workflow/")
INPUT_NODE, OUTPUT_NODE = "-10", "-20"
NOTES = ("Note", "MarkdownNote")
MUTED, BYPASSED, ON = 2, 4, 0
_Refusal = tuple[str, str]  # (the input or "", why)
_ELSEWHERE = "load the pack that brings it (--pack DIR), or name a ComfyUI that has it (--comfyui DIR)"
_REMEDY = "open the workflow in the editor, convert the group node to nodes there, and save it"


def is_group(node: Mapping[str, Any]) -> bool:
    return str(node.get("type")).startswith(PREFIXES)


def malformed_groups(data: Mapping[str, Any]) -> list[Problem]:
    """Problems with the shape of `extra.groupNodes`, for the groups that have a node in the workflow."""
    return [
        _problem(node, f"{message}; {_REMEDY}")
        for node in all_nodes(data)
        if is_group(node)
        for message in _shape(data, node)
    ]


def inner_types(data: Mapping[str, Any]) -> set[str]:
    """The node types inside the group nodes of the workflow."""
    return {str(inner.get("type")) for node in all_nodes(data) if is_group(node) for inner in _nodes(data, node)}


def make_subgraphs(
    data: Mapping[str, Any],
    root: EditorGraph,
    subgraphs: dict[str, EditorGraph],
    look_up: Callable[[str], Schema | None],
) -> list[Problem]:
    """Make each group node of the root graph a subgraph node with a subgraph of its own; returns what is refused."""
    problems = []
    for subgraph in subgraphs.values():
        for node in filter(is_group, subgraph.nodes):
            problems.append(_problem(node, f"a group node inside a subgraph cannot be read; {_REMEDY}"))
    for place, node in enumerate(root.nodes):
        if not is_group(node):
            continue
        group = _Group(_definition(data, node), node, look_up)
        refusals = list(group.refusals())
        refusals += _behind_bypassed_groups(root, node)
        problems += [replace(_problem(node, message, name), unread=True) for name, message in refusals]
        if refusals:
            continue
        name = f"{node['type']} {node['id']}"
        subgraphs[name] = group.subgraph(name)
        mode = BYPASSED if node.get("mode") == BYPASSED else ON
        root.nodes[place] = {**node, "type": name, "widgets_values": None, "mode": mode}
    return problems


@dataclass
class _Widget:
    """A widget of the group node, for an input of a node inside."""

    index: int
    name: str  # of the input inside
    label: str  # its name on the group node
    shown: list[widgets.Widget]  # the widget itself, then those that the editor adds to it

    @property
    def has_slot(self) -> bool:
        declared = self.shown[0].input
        return declared is not None and not declared.settings.get("socketless")


@dataclass
class _Inner:
    """A node inside: `shown` is what the editor shows of its class, `saved` the names of its input slots."""

    index: int
    node: dict[str, Any]
    shown: widgets.EditorNode
    saved: list[str] = field(default_factory=list)
    converted: list[str] = field(default_factory=list)

    @property
    def sockets(self) -> list[str]:
        return [item.name for item in self.shown.sockets if not item.widget]


class _Group:
    """One group node: the nodes of its definition, and what the front end makes of them."""

    def __init__(self, definition: Mapping[str, Any], node: dict[str, Any], look_up: Callable[[str], Schema | None]):
        self.node = node
        self.definition = definition
        self.nodes: list[dict[str, Any]] = definition["nodes"]
        self.saved_links = [link for link in definition.get("links") or [] if link[0] is not None]
        self.reroutes = {index for index, one in enumerate(self.nodes) if one.get("type") == "Reroute"}
        self._before = {link[2]: link for link in self.saved_links if link[2] in self.reroutes}
        self.links = self._without_reroutes()
        self.linked = {(int(link[2]), int(link[3])): link for link in self.links}
        self.inner: list[_Inner] = []
        self.unknown: list[str] = []
        self.widgets: list[_Widget] = []
        self.inputs: list[tuple[str, int, str]] = []  # (name, index, input) in the front end's count
        self._seen: dict[str, int] = {}
        for index, one in enumerate(self.nodes):
            schema = look_up(str(one.get("type")))
            if schema is not None:
                self.inner.append(_inner(index, one, widgets.EditorNode(schema)))
            elif one.get("type") not in (*NOTES, "Reroute"):
                self.unknown.append(str(one.get("type")))
        for item in self.inner:
            self._add(item)
        for item in self.inner:
            self._add_converted(item)

    def refusals(self) -> Iterator[_Refusal]:
        """Why this group node cannot be read, if it cannot."""
        for kind in self.unknown:
            if is_group({"type": kind}):
                yield "", f"the group node '{kind}' is inside it, and no front end sends such a workflow; {_REMEDY}"
            elif kind == "PrimitiveNode":
                yield "", f"a Primitive inside it gives other values in other front ends; {_REMEDY}"
            else:
                yield "", f"this ComfyUI does not have '{kind}', which is inside the group node; {_ELSEWHERE}"
        if any(self._origin(index, 0) is None for index in self.reroutes):
            yield "", f"a Reroute inside takes its link from outside, and front ends lose that; {_REMEDY}"
        for item in self.inner:
            yield from _mixed_up(item)
            yield from self._misplaced(item)
        yield from self._links_to_nothing()

    def _without_reroutes(self) -> list[list[Any]]:
        """The links inside, with those through reroutes as one: front end 1.58.1 sends them, 1.27.10 loses them."""
        links = []
        for link in self.saved_links:
            origin = self._origin(link[0], link[1])
            if link[2] not in self.reroutes and origin is not None:
                links.append([*origin, *link[2:]])
        return links

    def _origin(self, index: int, slot: int) -> tuple[int, int] | None:
        """The node inside that an output gives the value of, and its slot; None behind a Reroute without one."""
        for _ in range(len(self.reroutes) + 1):
            if index not in self.reroutes:
                return index, slot
            if index not in self._before:
                return None
            index, slot = self._before[index][:2]
        return None

    def subgraph(self, name: str) -> EditorGraph:
        """The group as a subgraph, with the values of the group node's widgets in the nodes inside."""
        links: dict[str, Link] = {}
        outputs: list[dict[str, Any]] = []
        for number, (name_of_slot, index, slot) in enumerate(self._slots):
            if (name_of_slot, index, slot) in self._counted:
                _link(links, INPUT_NODE, number, index, self._items[index].saved.index(slot))
        for origin, origin_slot, target, target_slot, *_ in self.linked.values():
            _link(links, str(origin), int(origin_slot), int(target), int(target_slot))
        for index, place, kind in self._outputs():
            origin = self._origin(index, place)
            if origin is not None and self._output_shows(index, place):
                _link(links, str(origin[0]), origin[1], OUTPUT_NODE, len(outputs))
                outputs.append({"type": kind})
        values = self._values()
        to: dict[str, dict[int, str]] = {}
        for link in links.values():
            to.setdefault(link.target, {})[link.target_slot] = link.id
        nodes = [_with_values(item, values[item.index], to.get(str(item.index), {})) for item in self.inner]
        types = {item.index: {one.name: one.socket_type for one in item.shown.sockets} for item in self.inner}
        inputs = [{"name": name, "type": types[index].get(slot, "*")} for name, index, slot in self._slots]
        return EditorGraph(name, nodes, links, inputs, outputs)

    def _outputs(self) -> Iterator[tuple[int, int, str]]:
        """The outputs of the nodes inside, those of reroutes too: (place of the node, slot, type)."""
        shown = {item.index: item.shown.schema.outputs for item in self.inner}
        for index in range(len(self.nodes)):
            kinds = ("*",) if index in self.reroutes else shown.get(index, ())
            yield from ((index, slot, kind) for slot, kind in enumerate(kinds))

    @cached_property
    def _counted(self) -> set[tuple[str, int, str]]:
        return set(self.inputs)

    @cached_property
    def _items(self) -> dict[int, _Inner]:
        return {item.index: item for item in self.inner}

    @cached_property
    def _slots(self) -> list[tuple[str, int, str]]:
        """The slots of the group node as the front end shows them: its sockets, then one for each widget."""
        sockets = [entry for entry in self.inputs if entry[2] in self._items[entry[1]].sockets]
        shown = [widget for widget in self.widgets if widget.has_slot]
        return sockets + [(widget.label, widget.index, widget.name) for widget in shown]

    def _add(self, item: _Inner) -> None:
        """Add what the group node shows of a node inside, without its converted widgets."""
        for shown in _with_their_controls(item.shown.widgets):
            if shown[0].name not in item.converted:
                label = self._name(item, shown[0].name)
                self.widgets.append(_Widget(item.index, shown[0].name, label, shown))
        for slot in item.sockets:
            if (item.index, item.saved.index(slot)) in self.linked:
                continue
            name = self._name(item, slot)
            if self._setting(item.index, "input", slot).get("visible") is not False:
                self.inputs.append((name, item.index, slot))

    def _add_converted(self, item: _Inner) -> None:
        """Add the widgets that have a slot of their own, after everything else; the front end sorts the numbers of
        their slots as texts.
        """
        controls = {shown[0].name: shown for shown in _with_their_controls(item.shown.widgets)}
        for slot in sorted(item.converted, key=lambda name: str(item.saved.index(name))):
            if (item.index, item.saved.index(slot)) in self.linked:
                continue
            name = self._name(item, slot)
            self.widgets.append(_Widget(item.index, slot, name, controls[slot]))
            self.inputs.append((name, item.index, slot))

    def _name(self, item: _Inner, slot: str) -> str:
        """The name of an input or widget of the group node."""
        labels = [entry.get("label") for entry in item.node.get("inputs") or [] if entry.get("name") == slot]
        given = [self._setting(item.index, "input", slot).get("name"), *labels[:1], slot]
        name = key = next(one for one in given if one is not None)
        if name in self._seen:
            title = item.node["type"]
            if item.node.get("title") is not None:
                title = item.node["title"]
            name = key = f"{title} {slot}"
            if name in self._seen:
                name = f"{title} {self._seen[name]} {slot}"
        self._seen[key] = self._seen.get(key, 1) + 1
        return str(name)

    def _setting(self, index: int, side: str, slot: Any) -> Mapping[str, Any]:
        """What the user set for an input or output in the editor's Manage Group Nodes."""
        found: Any = self.definition.get("config")
        for key in (index, side, slot):
            if not isinstance(found, dict):
                return {}
            found = found.get(str(key))
        return found if isinstance(found, dict) else {}

    def _output_shows(self, index: int, slot: int) -> bool:
        visible = self._setting(index, "output", slot).get("visible")
        if visible is not None:
            return bool(visible)
        return (index, slot) in self._outside or (index, slot) not in self._linked_from

    @cached_property
    def _linked_from(self) -> set[tuple[Any, Any]]:
        return {(link[0], link[1]) for link in self.saved_links}

    @cached_property
    def _outside(self) -> set[tuple[Any, Any]]:
        """The outputs that had a link out of the group when it was made."""
        entries = [entry for entry in self.definition.get("external") or [] if isinstance(entry, list)]
        return {(entry[0], entry[1]) for entry in entries if all(isinstance(number, int) for number in entry[:2])}

    def _values(self) -> dict[int, dict[str, Any]]:
        """The values of the widgets inside: the group node's, else the ones that the definition saved."""
        values = {item.index: item.shown.values(item.node.get("widgets_values")) for item in self.inner}
        saved = self.node.get("widgets_values")
        left = iter(saved if isinstance(saved, list) else ())
        for widget in self.widgets:
            for one in widget.shown:
                value = next(left, one.default)
                if one.input is not None:
                    values[widget.index][one.name] = value
        return values

    def _misplaced(self, item: _Inner) -> Iterator[_Refusal]:
        """Links to converted widgets whose place the front end miscounts: it sends something else than it shows."""
        places = [item.saved.index(slot) for slot in item.converted]
        unsorted = sorted(places) != sorted(places, key=str)
        for count, name in self._linked_converted.get(item.index, ()):
            if unsorted or self._slots[count][0] != name:
                yield name, f"it is linked, and front ends lose the link or differ in where it goes; {_REMEDY}"
        if unsorted and any((item.index, place) in self.linked for place in places):
            yield "", f"a link to a widget of '{item.node['type']}' inside has no clear place; {_REMEDY}"

    @cached_property
    def _linked_converted(self) -> dict[int, list[tuple[int, str]]]:
        """By node inside: its converted widgets with a link, each with its place in the front end's count."""
        linked = {entry.get("name") for entry in self.node.get("inputs") or [] if entry.get("link") is not None}
        found: dict[int, list[tuple[int, str]]] = {}
        for count, (name, index, slot) in enumerate(self.inputs):
            if name in linked and slot in self._items[index].converted:
                found.setdefault(index, []).append((count, name))
        return found

    def _links_to_nothing(self) -> Iterator[_Refusal]:
        names = {name for name, _, _ in self.inputs}
        for entry in self.node.get("inputs") or []:
            if entry.get("link") is not None and entry.get("name") not in names:
                yield str(entry.get("name")), f"it is linked, and the group has no such input; {_REMEDY}"
        indices = {item.index: item for item in self.inner}
        for origin, origin_slot, target, target_slot, *_ in self.links:
            if origin in indices and target in indices:
                outputs = indices[origin].shown.schema.outputs
                if 0 <= origin_slot < len(outputs) and 0 <= target_slot < len(indices[target].saved):
                    continue
            if not self.unknown:
                yield "", f"a link inside, from node {origin} to node {target}, leads to nothing; {_REMEDY}"


def _behind_bypassed_groups(root: EditorGraph, node: Mapping[str, Any]) -> Iterator[_Refusal]:
    """Inputs of a group node that are linked to a bypassed group node, directly or through reroutes."""
    for entry in node.get("inputs") or []:
        link = root.links.get(str(entry.get("link")))
        origin = root.nodes_by_id.get(link.origin) if link else None
        for _ in range(len(root.nodes)):  # as many reroutes as there are nodes
            if origin is None or origin.get("type") != "Reroute":
                break
            slot: Mapping[str, Any] = next(iter(origin.get("inputs") or []), {})
            link = root.links.get(str(slot.get("link")))
            origin = root.nodes_by_id.get(link.origin) if link else None
        if origin is not None and is_group(origin) and origin.get("mode") == BYPASSED:
            yield (
                str(entry.get("name")),
                f"it is linked to the bypassed group node {origin['id']}, and front ends differ in what they send for"
                " it; turn that one on, or delete it",
            )


def _inner(index: int, node: dict[str, Any], shown: widgets.EditorNode) -> _Inner:
    entries = node.get("inputs") or []
    item = _Inner(index, node, shown)
    item.saved = [str(entry.get("name")) for entry in entries]
    for name in item.sockets:
        if name not in item.saved:  # the file was saved before the node had it
            item.saved.append(name)
    known = {widget.name for widget in shown.widgets if widget.input}
    names = [str(entry.get("name")) for entry in entries if isinstance(entry.get("widget"), dict)]
    item.converted = [name for name in names if name in known]
    return item


def _mixed_up(item: _Inner) -> Iterator[_Refusal]:
    """Inputs whose place the front end miscounts, so that a link goes to another input than it shows."""
    kind = item.node["type"]
    for one in item.shown.schema.inputs:
        if one.dynamic:
            yield one.name, f"'{kind}' inside has it; it grows or changes, and front ends send it wrongly; {_REMEDY}"
    if item.saved[: len(item.sockets)] != item.sockets:
        yield "", f"'{kind}' inside has other inputs in this ComfyUI than in the file; {_REMEDY}"


def _with_their_controls(shown: list[widgets.Widget]) -> list[list[widgets.Widget]]:
    """Each widget with those that the editor adds to it; an upload button stands alone."""
    groups: list[list[widgets.Widget]] = []
    for widget in shown:
        if widget.input is None and widget.name != "upload":
            groups[-1].append(widget)
        else:
            groups.append([widget])
    return groups


def _link(links: dict[str, Link], origin: str, origin_slot: int, target: Any, target_slot: int) -> None:
    name = str(len(links))
    links[name] = Link(name, origin, origin_slot, str(target), target_slot)


def _with_values(item: _Inner, values: dict[str, Any], to: Mapping[int, str]) -> dict[str, Any]:
    """The node inside as a node of a subgraph: its id is its index, its slots have the links."""
    entries = list(item.node.get("inputs") or [])
    entries += [{"name": name, "type": "*"} for name in item.saved[len(entries) :]]
    slots = [{**entry, "link": to.get(place)} for place, entry in enumerate(entries)]
    return {**item.node, "id": item.index, "inputs": slots, "widgets_values": values}


def _definition(data: Mapping[str, Any], node: Mapping[str, Any]) -> Any:
    extra = data.get("extra")
    groups = extra.get("groupNodes") if isinstance(extra, dict) else None
    name = str(node.get("type"))[len(PREFIXES[0]) :]
    return groups.get(name) if isinstance(groups, dict) else None


def _nodes(data: Mapping[str, Any], node: Mapping[str, Any]) -> list[Any]:
    return list(_definition(data, node)["nodes"])


def _shape(data: Mapping[str, Any], node: Mapping[str, Any]) -> list[str]:
    """What is wrong with the shape of a group node's definition."""
    definition = _definition(data, node)
    if not isinstance(definition, dict) or not isinstance(definition.get("nodes"), list):
        return ["the file has no definition of this group node ('extra.groupNodes')"]
    errors = []
    for inner in definition["nodes"]:
        if not isinstance(inner, dict) or not isinstance(inner.get("type"), str):
            errors.append("its definition holds an entry that is not a node")
        elif not _are_objects(inner.get("inputs") or []):
            errors.append("its definition holds a node whose 'inputs' is not a list of slots")
    if not _are_links(definition.get("links") or []):
        errors.append("its definition holds an entry that is not a link")
    if not isinstance(definition.get("external") or [], list):
        errors.append("'external' of its definition is not a list")
    return errors


def _are_objects(entries: Any) -> bool:
    return isinstance(entries, list) and all(isinstance(entry, dict) for entry in entries)


def _are_links(entries: Any) -> bool:
    if not isinstance(entries, list):
        return False
    for entry in entries:
        if not isinstance(entry, list) or len(entry) < 4:
            return False
        if entry[0] is not None and not all(isinstance(number, int) for number in entry[:4]):
            return False
    return True


def _problem(node: Mapping[str, Any], message: str, name: str = "") -> Problem:
    return Problem(message, str(node.get("id")), str(node.get("title") or ""), str(node.get("type")), name)
