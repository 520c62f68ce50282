"""Reads the graph editor's JSON: its nodes, links and subgraphs, and what is wrong with the file."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from .problem import Problem

SAVE_AGAIN = "open the workflow in the editor and save it again"
LINK_KEYS = ("id", "origin_id", "origin_slot", "target_id", "target_slot")


class Link(NamedTuple):
    """A link from an output slot of one node to an input slot of another."""

    id: str
    origin: str
    origin_slot: int
    target: str
    target_slot: int


class Slot(NamedTuple):
    """An input of a node: its link, if any, and the widget it belongs to, if any."""

    name: str
    type: str
    link: str | None
    widget: str | None = None


@dataclass
class EditorGraph:
    """One graph of the file: the root, or the definition of a subgraph with its own inputs and outputs."""

    name: str
    nodes: list[dict[str, Any]]
    links: dict[str, Link]
    inputs: list[dict[str, Any]] = field(default_factory=list)
    outputs: list[dict[str, Any]] = field(default_factory=list)

    @cached_property
    def links_from(self) -> dict[str, list[Link]]:
        """The links by the node that they come from, in the file's order."""
        found: dict[str, list[Link]] = {}
        for link in self.links.values():
            found.setdefault(link.origin, []).append(link)
        return found

    @cached_property
    def first_link_to(self) -> dict[tuple[str, int], Link]:
        """The first link of the file to each input slot, by node and slot."""
        found: dict[tuple[str, int], Link] = {}
        for link in self.links.values():
            found.setdefault((link.target, link.target_slot), link)
        return found

    @cached_property
    def nodes_by_id(self) -> dict[str, dict[str, Any]]:
        """The nodes by their id; of several with one id the first."""
        found: dict[str, dict[str, Any]] = {}
        for node in self.nodes:
            found.setdefault(str(node.get("id")), node)
        return found


def read_graphs(data: Mapping[str, Any]) -> tuple[EditorGraph, dict[str, EditorGraph]]:
    """The root graph and the subgraph definitions by id. Node ids inside subgraphs are made unique over the file, as
    the editor does on loading.
    """
    root = EditorGraph("", list(data.get("nodes", [])), _links(data.get("links") or []))
    ids = _NodeIds(data, root)
    subgraphs: dict[str, EditorGraph] = {}
    renamed: dict[str, dict[str, str]] = {}
    for entry in subgraph_definitions(data):
        renames: dict[str, str] = {}
        nodes = [ids.unique(node, renames) for node in entry.get("nodes") or []]
        links = {key: _renamed(link, renames) for key, link in _links(entry.get("links") or []).items()}
        subgraph_id = str(entry.get("id"))
        renamed[subgraph_id] = renames
        subgraphs[subgraph_id] = EditorGraph(
            str(entry.get("name")), nodes, links, list(entry.get("inputs") or []), list(entry.get("outputs") or [])
        )
    for graph in [root, *subgraphs.values()]:
        graph.nodes = [_with_renamed_proxies(node, renamed.get(str(node.get("type")), {})) for node in graph.nodes]
    return root, subgraphs


class _NodeIds:
    """The node ids used so far in a file, and the last number given to a node."""

    def __init__(self, data: Mapping[str, Any], root: EditorGraph) -> None:
        self.taken = {str(node.get("id")) for node in root.nodes}
        state = data.get("state")
        counted = data.get("last_node_id")
        if not counted and isinstance(state, dict):
            counted = state.get("lastNodeId")
        numbers = [_whole(node_id) for node_id in (counted, *self.taken)]
        self.last = max([0, *(number for number in numbers if number is not None)])

    def unique(self, node: dict[str, Any], renames: dict[str, str]) -> dict[str, Any]:
        """The node, with a new id if its id is already used; `renames` then records the change."""
        old_id = str(node.get("id"))
        if old_id in self.taken:
            self.last += 1
            while str(self.last) in self.taken:
                self.last += 1
            renames[old_id] = str(self.last)
            node = {**node, "id": self.last}
        else:
            self.last = max(self.last, _whole(old_id) or 0)
        self.taken.add(str(node.get("id")))
        return node


def subgraph_definitions(data: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return list((data.get("definitions") or {}).get("subgraphs") or [])


def _links(entries: Sequence[Any]) -> dict[str, Link]:
    """Links in either style: [id, origin, slot, target, slot, type] or {"id", "origin_id", "origin_slot", "target_id",
    "target_slot"}.
    """
    links = {}
    for entry in entries:
        if isinstance(entry, dict):
            entry = [entry.get(key) for key in LINK_KEYS]
        if isinstance(entry, list) and len(entry) >= 5:
            links[str(entry[0])] = Link(str(entry[0]), str(entry[1]), int(entry[2]), str(entry[3]), int(entry[4]))
    return links


def _whole(node_id: Any) -> int | None:
    """An id as an int, or None if it is not a whole number."""
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
    proxies = []
    for entry in entries:
        if isinstance(entry, list) and entry:
            entry = [renames.get(str(entry[0]), entry[0]), *entry[1:]]
        proxies.append(entry)
    return {**node, "properties": {**node["properties"], "proxyWidgets": proxies}}


def malformed(data: Mapping[str, Any]) -> list[Problem]:
    """Problems with the shape of an editor file: its nodes, slots and links."""
    definitions = data.get("definitions")
    subgraphs: Any = []
    if isinstance(definitions, dict):
        subgraphs = definitions.get("subgraphs") or []
    elif definitions is not None:
        subgraphs = None
    if not isinstance(subgraphs, list) or not _are_objects(subgraphs):
        return [Problem(f"'definitions' is not {{\"subgraphs\": [subgraph, …]}}; {SAVE_AGAIN}")]
    problems = _malformed_graph(data, "")
    for subgraph in subgraphs:
        prefix = f"subgraph {subgraph.get('name') or subgraph.get('id')}: "
        problems += _malformed_graph(subgraph, prefix)
        for key in ("inputs", "outputs"):
            entries = subgraph.get(key) or []
            if isinstance(entries, list) and not _are_objects(entries):
                problems.append(Problem(f"{prefix}'{key}' holds an entry that is not an object; {SAVE_AGAIN}"))
    return problems


def _malformed_graph(graph: Mapping[str, Any], where: str) -> list[Problem]:
    problems = []
    for key in ("nodes", "links", "inputs", "outputs"):
        entries = graph.get(key) or []
        if not isinstance(entries, list):
            problems.append(Problem(f"{where}'{key}' is not a list; {SAVE_AGAIN}"))
        elif key == "nodes":
            for node in entries:
                problems += _malformed_node(node, where)
        elif key == "links":
            for entry in entries:
                if not _is_link(entry):
                    problems.append(Problem(f"{where}not a link: {json.dumps(entry)[:80]}; {SAVE_AGAIN}"))
    return problems


def _are_objects(entries: list[Any]) -> bool:
    return all(isinstance(entry, dict) for entry in entries)


def _malformed_node(node: Any, where: str) -> list[Problem]:
    if not isinstance(node, dict) or node.get("id") is None or not isinstance(node.get("type"), str):
        return [Problem(f"{where}not a node (it needs an id and a type): {json.dumps(node)[:80]}; {SAVE_AGAIN}")]
    errors = []
    if not isinstance(node.get("mode") or 0, int):
        errors.append(f"{where}'mode' is not a number but {json.dumps(node['mode'])[:40]}")
    if not isinstance(node.get("properties") or {}, dict):
        errors.append(f"{where}'properties' is not an object")
    for key in ("inputs", "outputs"):
        entries = node.get(key) or []
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            errors.append(f"{where}'{key}' is not a list of slots")
    title = str(node.get("title") or "")
    return [Problem(f"{message}; {SAVE_AGAIN}", str(node["id"]), title, node["type"]) for message in errors]


def _is_link(entry: Any) -> bool:
    """Whether an entry is a link in either style, or the null that the editor sometimes leaves."""
    if isinstance(entry, dict):
        entry = [entry.get(key) for key in LINK_KEYS]
    complete = isinstance(entry, list) and len(entry) >= 5 and None not in entry[:5]
    return entry is None or (complete and isinstance(entry[2], int) and isinstance(entry[4], int))


def all_nodes(data: Mapping[str, Any]) -> list[Any]:
    """All nodes of the file, including those inside subgraphs."""
    nodes = list(data.get("nodes", []))
    for entry in subgraph_definitions(data):
        nodes += entry.get("nodes") or []
    return nodes


def read_slot(entry: Mapping[str, Any]) -> Slot:
    """Read a slot of a node from the file's JSON."""
    widget, link = entry.get("widget"), entry.get("link")
    if isinstance(widget, dict):
        widget = widget.get("name")
    else:
        widget = None
    if link is not None:
        link = str(link)
    return Slot(str(entry.get("name")), str(entry.get("type")), link, widget)
