"""The editor's JSON (nodes, links, subgraphs) -> API graph, with the meaning of the ComfyUI front end's own export
("Export (API)").
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from . import prompt_text, widgets
from .problem import Problem, WorkflowError
from .schema import Schema

Catalogue = Callable[[str], Schema | None]
MUTED, BYPASSED = 2, 4
INPUT_NODE, OUTPUT_NODE = "-10", "-20"
# Nodes that exist in the editor alone: they are resolved or dropped, and never run.
EDITOR_ONLY = frozenset(("Note", "MarkdownNote", "Reroute", "PrimitiveNode"))


@dataclass(frozen=True)
class Link:
    """A wire: from an output slot of one node to an input slot of another."""

    id: str
    origin: str
    origin_slot: int
    target: str
    target_slot: int


@dataclass(frozen=True)
class Slot:
    """An input of a node: its link, if any, and the widget it belongs to, if any."""

    name: str
    type: str
    link: str | None
    widget: str | None = None


@dataclass
class Sheet:
    """One graph of the file: the root, or the definition of a subgraph with its own inputs and outputs."""

    name: str
    nodes: list[dict[str, Any]]
    links: dict[str, Link]
    inputs: list[dict[str, Any]] = field(default_factory=list)
    outputs: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Placed:
    """A node where it stands: `id` is its execution id ("12:5" inside subgraph node 12); `values` are its widgets'
    values.
    """

    id: str
    node: dict[str, Any]
    sheet: Sheet
    host: Placed | None
    inputs: list[Slot]
    outputs: list[str]
    schema: Schema | None = None
    inside: Sheet | None = None
    values: dict[str, Any] = field(default_factory=dict)

    @property
    def type(self) -> str:
        return str(self.node.get("type"))

    @property
    def mode(self) -> int:
        return int(self.node.get("mode") or 0)

    @property
    def runs(self) -> bool:
        return self.mode not in (MUTED, BYPASSED)


def class_types(data: Mapping[str, Any]) -> set[str]:
    """The node types that a host must know: those of nodes that are neither muted, bypassed nor the editor's own,
    subgraphs included.

    Raises WorkflowError when the file is not what the editor saves.
    """
    problems = _malformed(data)
    if problems:
        raise WorkflowError(problems)
    subgraphs = {str(entry.get("id")) for entry in _definitions(data)}
    nodes = [*data.get("nodes", []), *(node for entry in _definitions(data) for node in entry.get("nodes") or [])]
    active = {
        str(node.get("type")) for node in nodes if isinstance(node, dict) and node.get("mode") not in (MUTED, BYPASSED)
    }
    return active - subgraphs - EDITOR_ONLY


def to_api(data: Mapping[str, Any], look_up: Catalogue) -> dict[str, dict[str, Any]]:
    """The API graph of an editor workflow. Raises WorkflowError with everything that cannot be translated."""
    problems = _malformed(data)
    if problems:
        raise WorkflowError(problems)
    problems = _groups(data)
    root, sheets = _sheets(data)
    placed = _Placement(sheets, look_up, problems)
    placed.place(root, None, [])
    placed.apply_primitives()
    graph = {}
    for item in placed.all.values():
        if item.runs and item.inside is None and item.type not in EDITOR_ONLY:
            graph[item.id] = placed.export(item)
    if problems:
        raise WorkflowError(problems)
    for node in graph.values():
        for name in [
            name for name, value in node["inputs"].items() if isinstance(value, list) and value[0] not in graph
        ]:
            del node["inputs"][name]
    return graph


@dataclass(frozen=True)
class _Constant:
    """A value that comes from a widget of a subgraph's host."""

    value: Any


_UNSET = _Constant(None)  # a host's widget without a saved value: the widget inside keeps its own
_Source = (
    tuple[str, int] | _Constant | None
)  # where a link ends: an output of a node that runs, a host's value, or nowhere


class _Placement:
    """Every node of the workflow at its place, and the links between them followed through subgraphs, reroutes and
    bypassed nodes.
    """

    def __init__(self, sheets: Mapping[str, Sheet], look_up: Catalogue, problems: list[Problem]):
        self.sheets, self.look_up, self.problems = sheets, look_up, problems
        self.all: dict[str, Placed] = {}

    def place(self, sheet: Sheet, host: Placed | None, path: list[str]) -> None:
        """Place the nodes of a sheet below its host; the host's promoted values go down before the inner nodes are
        looked at.
        """
        if host:
            overrides = self._promoted(host)
        else:
            overrides = {}
        for node in sheet.nodes:
            item = self._placed(node, sheet, host, path)
            item.values.update(overrides.get(str(node.get("id")), {}))
            self.all[item.id] = item
            if item.inside is not None and item.runs:
                if len(path) > 100 or item.inside is sheet:
                    self.problems.append(_at(item, "the subgraph contains itself"))
                else:
                    self.place(item.inside, item, [*path, str(node.get("id"))])

    def apply_primitives(self) -> None:
        """The editor's PrimitiveNode writes its value into the widgets that it is wired to."""
        for item in [item for item in self.all.values() if item.type == "PrimitiveNode"]:
            saved = item.node.get("widgets_values")
            if isinstance(saved, list) and saved:
                value = saved[0]
            else:
                value = None
            if value is None:
                continue
            if (
                isinstance(value, str)
                and value
                and (item.node.get("properties") or {}).get("Run widget replace on values")
            ):
                value = self._filled(value)
            for link in [link for link in item.sheet.links.values() if link.origin == str(item.node.get("id"))]:
                target = self._neighbour(item, link.target)
                if target:
                    slot = _slot_of(target, link)
                else:
                    slot = None
                if target is not None and slot is not None and slot.widget is not None:
                    target.values[slot.widget] = value

    def export(self, item: Placed) -> dict[str, Any]:
        """The node as the API format has it."""
        inputs: dict[str, Any] = {name: self._sent(item, name, value) for name, value in item.values.items()}
        for slot in item.inputs:
            if slot.link is not None:
                source = self._source(item, slot, slot.type, frozenset())
            else:
                source = None
            if isinstance(source, _Constant) and source is not _UNSET:
                inputs[slot.name] = _wrapped(source.value)
            elif isinstance(source, tuple):
                inputs[slot.name] = [source[0], source[1]]
        title = item.node.get("title") or (item.schema.title if item.schema else item.type)
        return {"inputs": inputs, "class_type": item.type, "_meta": {"title": title}}

    def _placed(self, node: dict[str, Any], sheet: Sheet, host: Placed | None, path: list[str]) -> Placed:
        kind, schema = str(node.get("type")), None
        inside = self.sheets.get(kind)
        slots = [_slot(entry) for entry in node.get("inputs") or []]
        outputs = [str(entry.get("type")) for entry in node.get("outputs") or []]
        execution_id = ":".join([*path, str(node.get("id"))])
        item = Placed(execution_id, node, sheet, host, slots, outputs, inside=inside)
        if inside is not None:
            item.inputs = _subgraph_slots(inside, slots)
            item.outputs = [str(entry.get("type")) for entry in inside.outputs]
            item.values = self._host_values(item)
        elif kind not in EDITOR_ONLY:
            schema = self.look_up(kind)
            if schema is None:
                return item
            item.schema, item.inputs = schema, _configured(schema, slots)
            item.values = widgets.values(schema, node.get("widgets_values"))
            if any(entry.dynamic for entry in schema.inputs) and item.runs:
                self.problems.append(
                    _at(
                        item,
                        f"{kind} has inputs that grow in the editor, which the editor format does not describe; "
                        "save the workflow with 'Export (API)' and run that file",
                    )
                )
        return item

    def _host_values(self, item: Placed) -> dict[str, Any]:
        """The values of the widgets that a subgraph node shows, by the name of the subgraph's input."""
        assert item.inside is not None
        names = [
            str(entry.get("name")) for at, entry in enumerate(item.inside.inputs) if self._promotes(item.inside, at, 0)
        ]
        saved = item.node.get("widgets_values")
        return dict(zip(names, saved if isinstance(saved, list) else [], strict=False))

    def _promotes(self, inside: Sheet, at: int, depth: int) -> bool:
        """Whether an input of a subgraph shows a widget: it is wired to a widget inside, or to another subgraph's input
        that does.
        """
        for link in [link for link in inside.links.values() if link.origin == INPUT_NODE and link.origin_slot == at]:
            node = next((node for node in inside.nodes if str(node.get("id")) == link.target), None)
            if node is None or depth > 100:
                continue
            slots = [_slot(entry) for entry in node.get("inputs") or []]
            slot = next((slot for slot in slots if slot.link == link.id), None)
            inner = self.sheets.get(str(node.get("type")))
            if slot is None:
                continue
            if inner is not None:
                position = next(
                    (index for index, entry in enumerate(inner.inputs) if entry.get("name") == slot.name), None
                )
                if position is not None and self._promotes(inner, position, depth + 1):
                    return True
            elif slot.widget is not None or self._is_widget(str(node.get("type")), slot.name):
                return True
        return False

    def _is_widget(self, kind: str, name: str) -> bool:
        if kind not in EDITOR_ONLY:
            schema = self.look_up(kind)
        else:
            schema = None
        if schema:
            found = schema.input(name)
        else:
            found = None
        return found is not None and found.widget

    def _promoted(self, host: Placed) -> dict[str, dict[str, Any]]:
        """Values that the host's own widgets give to inner widgets (`proxyWidgets` of older files): {inner node id:
        {widget: value}}.
        """
        entries = (host.node.get("properties") or {}).get("proxyWidgets")
        try:
            if isinstance(entries, str):
                entries = json.loads(entries)
        except (ValueError, RecursionError) as error:
            self.problems.append(_at(host, f"'proxyWidgets' is not JSON ({error})"))
            return {}
        if not isinstance(entries or [], list):
            self.problems.append(_at(host, "'proxyWidgets' is not a list"))
            return {}
        saved = host.node.get("widgets_values")
        found: dict[str, dict[str, Any]] = {}
        for entry, value in zip(entries or [], saved if isinstance(saved, list) else [], strict=False):
            if value is None or not isinstance(entry, Sequence) or len(entry) < 2:
                continue
            node_id, name = str(entry[0]), str(entry[1])
            if node_id == "-1":
                outer = name
            else:
                outer = self._input_behind(host, node_id, name)
            if outer is not None:
                host.values[outer] = value
            else:
                found.setdefault(node_id, {})[name] = value
        return found

    def _input_behind(self, host: Placed, node_id: str, name: str) -> str | None:
        """The subgraph's input that is wired to that inner widget."""
        assert host.inside is not None
        node = next((node for node in host.inside.nodes if str(node.get("id")) == node_id), {})
        slot = next(
            (slot for slot in map(_slot, node.get("inputs") or []) if slot.name == name or slot.widget == name), None
        )
        if slot and slot.link is not None:
            link = host.inside.links.get(slot.link)
        else:
            link = None
        if link is None or link.origin != INPUT_NODE or not 0 <= link.origin_slot < len(host.inside.inputs):
            return None
        return str(host.inside.inputs[link.origin_slot].get("name"))

    def _sent(self, item: Placed, name: str, value: Any) -> Any:
        """A widget's value as it is sent: choices in prompts taken, file names filled in, lists wrapped."""
        if item.schema:
            found = item.schema.input(name)
        else:
            found = None
        if isinstance(value, str) and found is not None:
            if found.settings.get("dynamicPrompts"):
                try:
                    value = prompt_text.choose(value, random.Random(f"{item.id} {value}"))
                except ValueError as error:
                    self.problems.append(_at(item, f"input '{name}': {error}"))
            elif name == "filename_prefix" and item.type in prompt_text.SAVES_FILES:
                value = self._filled(value)
        return _wrapped(value)

    def _filled(self, text: str) -> str:
        return prompt_text.fill_in(text, self._widget_text, datetime.now())

    def _widget_text(self, node: str, widget: str) -> str | None:
        """The value of a widget for %Node.widget%: the node's "Node name for S&R" property counts first, then its
        title.
        """
        items = list(self.all.values())
        found = [item for item in items if (item.node.get("properties") or {}).get("Node name for S&R") == node]
        found = found or [
            item for item in items if item.node.get("title", item.schema.title if item.schema else item.type) == node
        ]
        if found:
            value = found[0].values.get(widget)
        else:
            value = None
        if value is None:
            return None
        if isinstance(value, (bool, float)):
            return json.dumps(value)
        return str(value)

    def _neighbour(self, item: Placed, node_id: str) -> Placed | None:
        path = item.id.rpartition(":")[0]
        return self.all.get(f"{path}:{node_id}" if path else node_id)

    def _source(self, item: Placed, slot: Slot, wanted: str, seen: frozenset[tuple[str, str]]) -> _Source:
        """What an input is wired to in the end: an output of a node that runs, a promoted value, or nothing."""
        if slot.link is None:
            return None
        key = (item.id, slot.name)
        if key in seen:
            self.problems.append(
                _at(item, f"input '{slot.name}': the links make a cycle through reroutes or bypassed nodes")
            )
            return None
        link = item.sheet.links.get(slot.link)
        if link is None:
            self.problems.append(_at(item, f"input '{slot.name}': link {slot.link} is not in the file"))
            return None
        if item.host is not None and link.origin == INPUT_NODE:
            return self._outer(item, item.host, link, seen | {key})
        origin = self._neighbour(item, link.origin)
        if origin is None:
            self.problems.append(
                _at(item, f"input '{slot.name}': linked to node {link.origin}, which is not in the file")
            )
            return None
        return self._output(origin, link.origin_slot, wanted, seen | {key})

    def _outer(self, item: Placed, host: Placed, link: Link, seen: frozenset[tuple[str, str]]) -> _Source:
        """What the host's input gives to a node inside a subgraph: what it is wired to, or the value of
        its own widget.
        """
        if not 0 <= link.origin_slot < len(host.inputs):
            self.problems.append(_at(item, f"the subgraph has no input {link.origin_slot}"))
            return None
        outer = host.inputs[link.origin_slot]
        if outer.link is None:
            source = _UNSET
        else:
            source = self._source(host, outer, outer.type, seen)
        if source is _UNSET and outer.name in host.values:
            return _Constant(host.values[outer.name])
        return source

    def _output(self, item: Placed, slot: int, wanted: str, seen: frozenset[tuple[str, str]]) -> _Source:
        if item.mode == MUTED:
            return None
        if item.mode == BYPASSED:
            passed = _bypass(item, slot, wanted)
            if passed is None:
                return None
            return self._source(item, passed, passed.type, seen)
        if item.inside is not None:
            links = [
                link for link in item.inside.links.values() if link.target == OUTPUT_NODE and link.target_slot == slot
            ]
            if links:
                inner = self.all.get(f"{item.id}:{links[0].origin}")
            else:
                inner = None
            if links and links[0].origin == INPUT_NODE:
                return self._outer(item, item, links[0], seen)
            if inner is None:
                return None
            return self._output(inner, links[0].origin_slot, wanted, seen)
        if item.type == "Reroute":
            if item.inputs:
                return self._source(item, item.inputs[0], wanted, seen)
            return None
        if item.type in EDITOR_ONLY:
            return None
        return (item.id, slot)


def _bypass(item: Placed, slot: int, wanted: str) -> Slot | None:
    """The input that a bypassed node hands on for an output: the same position if the types fit, else the first of the
    wanted type.
    """
    if 0 <= slot < len(item.outputs):
        own = item.outputs[slot]
    else:
        own = wanted
    if wanted in ("*", ""):
        if item.inputs:
            return item.inputs[slot if 0 <= slot < len(item.inputs) else 0]
        return None
    if 0 <= slot < len(item.inputs) and _fits(item.inputs[slot].type, own) and _fits(item.inputs[slot].type, wanted):
        return item.inputs[slot]
    same = next((entry for entry in item.inputs if entry.type == wanted), None)
    return same or next((entry for entry in item.inputs if _fits(entry.type, own) and _fits(entry.type, wanted)), None)


def _fits(one: str, other: str) -> bool:
    """The editor's rule for a permitted connection: any, the same (case aside), or a common member of "A,B" lists."""
    if {one, other} & {"*", "", "0"}:
        return True
    parts = [set(kind.lower().split(",")) for kind in (one, other)]
    return not parts[0].isdisjoint(parts[1])


def _slot(entry: Mapping[str, Any]) -> Slot:
    widget = entry.get("widget")
    link = entry.get("link")
    if isinstance(widget, Mapping):
        name = widget.get("name")
    else:
        name = None
    return Slot(str(entry.get("name")), str(entry.get("type")), None if link is None else str(link), name)


def _slot_of(item: Placed, link: Link) -> Slot | None:
    return next((slot for slot in item.inputs if slot.link == link.id), None)


def _configured(schema: Schema, saved: Sequence[Slot]) -> list[Slot]:
    """A node's inputs as the editor shows them: the class's own in its order, with the saved links, then what only the
    file has.
    """
    links = {slot.name: slot.link for slot in saved}
    own = [
        Slot(item.name, item.type, links.get(item.name), item.name if item.widget else None)
        for item in widgets.sockets(schema)
    ]
    names = {slot.name for slot in own}
    return own + [slot for slot in saved if slot.name not in names]


def _subgraph_slots(inside: Sheet, saved: Sequence[Slot]) -> list[Slot]:
    """A subgraph node's inputs: those of its definition, in that order, with the links that the file has for them."""
    slots = []
    for entry in inside.inputs:
        name = str(entry.get("name"))
        found = next((slot for slot in saved if slot.name == name), None)
        slots.append(Slot(name, str(entry.get("type")), found.link if found else None, name))
    return slots


def _sheets(data: Mapping[str, Any]) -> tuple[Sheet, dict[str, Sheet]]:
    """The root and the subgraph definitions; node ids inside subgraphs are made unique over the file, as the editor
    does on loading.
    """
    root = Sheet("", list(data.get("nodes", [])), _links(data.get("links") or []))
    taken = {str(node.get("id")) for node in root.nodes}
    state = data.get("state")
    counted = data.get("last_node_id") or (state.get("lastNodeId") if isinstance(state, Mapping) else None)
    last = max([0, *(number for number in map(_whole, [counted, *taken]) if number is not None)])
    sheets: dict[str, Sheet] = {}
    renamed: dict[str, dict[str, str]] = {}
    for entry in _definitions(data):
        renames: dict[str, str] = {}
        nodes = []
        for node in entry.get("nodes") or []:
            old = str(node.get("id"))
            if old in taken:
                while str(last := last + 1) in taken:
                    pass
                renames[old] = str(last)
                node = {**node, "id": last}
            else:
                last = max(last, _whole(old) or 0)
            taken.add(str(node.get("id")))
            nodes.append(node)
        links = {key: _renamed(link, renames) for key, link in _links(entry.get("links") or []).items()}
        sheet_id = str(entry.get("id"))
        renamed[sheet_id] = renames
        sheets[sheet_id] = Sheet(
            str(entry.get("name")), nodes, links, list(entry.get("inputs") or []), list(entry.get("outputs") or [])
        )
    for sheet in [root, *sheets.values()]:
        sheet.nodes = [_with_renamed_proxies(node, renamed.get(str(node.get("type")), {})) for node in sheet.nodes]
    return root, sheets


def _definitions(data: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return list((data.get("definitions") or {}).get("subgraphs") or [])


def _links(entries: Sequence[Any]) -> dict[str, Link]:
    """Links in either style: [id, origin, slot, target, slot, type] or {"id", "origin_id", "origin_slot", "target_id",
    "target_slot"}.
    """
    found = {}
    for entry in entries:
        if isinstance(entry, Mapping):
            entry = [entry.get(key) for key in ("id", "origin_id", "origin_slot", "target_id", "target_slot")]
        if isinstance(entry, list) and len(entry) >= 5:
            found[str(entry[0])] = Link(str(entry[0]), str(entry[1]), int(entry[2]), str(entry[3]), int(entry[4]))
    return found


def _whole(node_id: Any) -> int | None:
    """An id as the number that it is; None for another one."""
    text = str(node_id)
    if re.fullmatch(r"-?[0-9]{1,18}", text):
        return int(text)
    return None


def _renamed(link: Link, renames: Mapping[str, str]) -> Link:
    return Link(
        link.id,
        renames.get(link.origin, link.origin),
        link.origin_slot,
        renames.get(link.target, link.target),
        link.target_slot,
    )


def _with_renamed_proxies(node: dict[str, Any], renames: Mapping[str, str]) -> dict[str, Any]:
    entries = (node.get("properties") or {}).get("proxyWidgets")
    if not renames or not isinstance(entries, list):
        return node
    proxies = [
        [renames.get(str(entry[0]), entry[0]), *entry[1:]] if isinstance(entry, list) and entry else entry
        for entry in entries
    ]
    return {**node, "properties": {**node["properties"], "proxyWidgets": proxies}}


def _malformed(data: Mapping[str, Any]) -> list[Problem]:
    """What keeps the file from being read as the editor's: nodes, slots and links of another shape."""
    definitions = data.get("definitions")
    if isinstance(definitions, Mapping):
        subgraphs = definitions.get("subgraphs") or []
    else:
        if definitions is None:
            subgraphs = []
        else:
            subgraphs = None
    if not isinstance(subgraphs, list) or not all(isinstance(entry, Mapping) for entry in subgraphs):
        return [Problem("'definitions' is not {\"subgraphs\": [subgraph, …]}")]
    problems = []
    for sheet in [data, *subgraphs]:
        if sheet is not data:
            where = f"subgraph {sheet.get('name') or sheet.get('id')}: "
        else:
            where = ""
        for part in ("nodes", "links", "inputs", "outputs"):
            if not isinstance(sheet.get(part) or [], list):
                problems.append(Problem(f"{where}'{part}' is not a list"))
            elif part == "nodes":
                problems += [problem for node in sheet.get(part) or [] for problem in _malformed_node(node, where)]
            elif part == "links":
                wrong = [entry for entry in sheet.get(part) or [] if not _is_link(entry)]
                problems += [Problem(f"{where}not a link: {json.dumps(entry)[:80]}") for entry in wrong]
            elif sheet is not data and not all(isinstance(entry, Mapping) for entry in sheet.get(part) or []):
                problems.append(Problem(f"{where}'{part}' holds an entry that is not an object"))
    return problems


def _malformed_node(node: Any, where: str) -> list[Problem]:
    if not isinstance(node, Mapping) or node.get("id") is None or not isinstance(node.get("type"), str):
        return [Problem(f"{where}not a node (it needs an id and a type): {json.dumps(node)[:80]}")]
    wrong = []
    if not isinstance(node.get("mode") or 0, int):
        wrong.append(f"{where}'mode' is not a number but {json.dumps(node['mode'])[:40]}")
    if not isinstance(node.get("properties") or {}, Mapping):
        wrong.append(f"{where}'properties' is not an object")
    for part in ("inputs", "outputs"):
        entries = node.get(part) or []
        if not isinstance(entries, list) or not all(isinstance(entry, Mapping) for entry in entries):
            wrong.append(f"{where}'{part}' is not a list of slots")
    return [Problem(message, str(node["id"]), str(node.get("title") or ""), node["type"]) for message in wrong]


def _is_link(entry: Any) -> bool:
    """Whether it is a link in either style (or the null that the editor may leave)."""
    if isinstance(entry, Mapping):
        entry = [entry.get(key) for key in ("id", "origin_id", "origin_slot", "target_id", "target_slot")]
    whole = isinstance(entry, list) and len(entry) >= 5 and None not in entry[:5]
    return entry is None or (whole and isinstance(entry[2], int) and isinstance(entry[4], int))


def _groups(data: Mapping[str, Any]) -> list[Problem]:
    """Group nodes (the editor's older way, before subgraphs) are not translated."""
    nodes = [*data.get("nodes", []), *(node for entry in _definitions(data) for node in entry.get("nodes") or [])]
    found = [node for node in nodes if str(node.get("type")).startswith(("workflow/", "workflow>"))]
    message = (
        "a group node, which only the editor can unpack; ungroup it or convert it to a subgraph there, or save with"
        " 'Export (API)'"
    )
    return [
        Problem(message, str(node.get("id")), str(node.get("title") or ""), str(node.get("type"))) for node in found
    ]


def _at(item: Placed, message: str) -> Problem:
    return Problem(
        message, item.id, str(item.node.get("title") or (item.schema.title if item.schema else "")), item.type
    )


def _wrapped(value: Any) -> Any:
    """A list as a value is wrapped, because a bare list means a link."""
    if isinstance(value, list):
        return {"__value__": value}
    return value
