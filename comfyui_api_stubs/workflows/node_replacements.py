"""Puts nodes in the place of those that ComfyUI has renamed or replaced, as its front end and its server do.

A ComfyUI from 0.16 on says itself which ones these are; older ones, and the embedded host, have those that their front
ends replaced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .workflow import Catalogue, Document, is_link


@dataclass(frozen=True)
class Replacement:
    """What takes the place of a class. `inputs` gives for each input of the new one the name of an old one, or the
    value that it gets; None keeps them all. `outputs` gives the new place of an output that has another. `widgets` are
    the names of the old one's widgets, in the order in which the editor saves them.
    """

    new: str
    inputs: tuple[tuple[str, str | None, Any], ...] | None = None  # (new name, old name or None, value)
    outputs: Mapping[int, int] | None = None
    widgets: tuple[str, ...] = ()


# What the front ends replaced before a server said so.
RENAMED = {
    "ConditioningAverage ": Replacement("ConditioningAverage"),
    "SDV_img2vid_Conditioning": Replacement("SVD_img2vid_Conditioning"),
    "T2IAdapterLoader": Replacement(
        "ControlNetLoader", (("control_net_name", "t2i_adapter_name", None),), None, ("t2i_adapter_name",)
    ),
    "Load3DAnimation": Replacement("Load3D"),
    "Preview3DAnimation": Replacement("Preview3D"),
}


def of_host(server: Any) -> dict[str, Replacement]:
    """The replacements by the old class: those that a host's server knows, and the renamed ones."""
    manager = getattr(server, "node_replace_manager", None)
    told = {} if manager is None else manager.as_dict()
    return {**RENAMED, **{old: _read(entries[0]) for old, entries in told.items() if entries}}


def _read(entry: Mapping[str, Any]) -> Replacement:
    """A replacement as ComfyUI's server tells it."""
    inputs = None
    if entry.get("input_mapping"):
        inputs = tuple((one["new_id"], one.get("old_id"), one.get("set_value")) for one in entry["input_mapping"])
    outputs = {one["old_idx"]: one["new_idx"] for one in entry.get("output_mapping") or ()}
    widgets = tuple(entry.get("old_widget_ids") or ())
    known = RENAMED.get(str(entry["old_node_id"]))
    if known is not None and not widgets:
        widgets = known.widgets
    return Replacement(str(entry["new_node_id"]), inputs, outputs, widgets)


def replaced(
    document: Document, replacements: Mapping[str, Replacement], look_up: Catalogue
) -> tuple[Document, dict[str, str]]:
    """The document with the classes that the host lacks replaced where it has their replacement, and which ones those
    were: {old: new}.
    """
    chosen = {old: one for old, one in replacements.items() if look_up(old) is None and look_up(one.new) is not None}
    made: dict[str, str] = {}
    if document.is_editor:
        data = _editor(document.data, chosen, made)
    else:
        data = _api(document.data, chosen, made)
    return Document(document.path, data, document.is_editor), made


def _api(graph: Mapping[str, Any], chosen: Mapping[str, Replacement], made: dict[str, str]) -> dict[str, Any]:
    moved: dict[str, Mapping[int, int]] = {}
    nodes: dict[str, Any] = {}
    for node_id, node in graph.items():
        one = chosen.get(str(node.get("class_type")))
        if one is not None:
            made[str(node["class_type"])] = one.new
            moved[str(node_id)] = one.outputs or {}
            node = {**node, "class_type": one.new, "inputs": _inputs(node.get("inputs") or {}, one)}
        nodes[node_id] = node
    for node_id, node in nodes.items():
        inputs = dict(node.get("inputs") or {})
        for name, value in inputs.items():
            if is_link(value):
                inputs[name] = [value[0], moved.get(str(value[0]), {}).get(value[1], value[1])]
        nodes[node_id] = {**node, "inputs": inputs} if inputs else node
    return nodes


def _inputs(inputs: Mapping[str, Any], one: Replacement) -> dict[str, Any]:
    if one.inputs is None:
        return dict(inputs)
    found = {}
    for new, old, value in one.inputs:
        if old is None:
            found[new] = value
        elif old in inputs:
            found[new] = inputs[old]
    return found


def _editor(data: Mapping[str, Any], chosen: Mapping[str, Replacement], made: dict[str, str]) -> dict[str, Any]:
    """An editor file with replaced nodes in the root and in subgraphs."""
    if not isinstance(data.get("nodes"), list):
        return dict(data)
    result = {**data, **_graph(data, chosen, made)}
    definitions = data.get("definitions")
    if isinstance(definitions, dict) and isinstance(definitions.get("subgraphs"), list):
        inner = [
            {**one, **_graph(one, chosen, made)} if isinstance(one, dict) else one for one in definitions["subgraphs"]
        ]
        result["definitions"] = {**definitions, "subgraphs": inner}
    return result


def _graph(graph: Mapping[str, Any], chosen: Mapping[str, Replacement], made: dict[str, str]) -> dict[str, Any]:
    """The nodes and links of one graph; what is not a node or link is left for the reader to refuse."""
    if not isinstance(graph.get("nodes"), list):
        return {}
    moved: dict[str, Mapping[int, int]] = {}
    nodes = []
    for node in graph["nodes"]:
        one = chosen.get(str(node.get("type"))) if isinstance(node, dict) else None
        if one is not None:
            made[node["type"]] = one.new
            moved[str(node.get("id"))] = one.outputs or {}
            node = _editor_node(node, one)
        nodes.append(node)
    links = graph.get("links")
    if isinstance(links, list):
        links = [_link(entry, moved) for entry in links]
    return {"nodes": nodes, **({} if links is None else {"links": links})}


def _editor_node(node: Mapping[str, Any], one: Replacement) -> dict[str, Any]:
    result = {**node, "type": one.new}
    if one.inputs is None:
        return result
    saved = node.get("widgets_values")
    values = dict(zip(one.widgets, saved, strict=False)) if isinstance(saved, list) else dict(saved or {})
    result["widgets_values"] = _inputs(values, one)
    entries = {entry.get("name"): entry for entry in node.get("inputs") or [] if isinstance(entry, dict)}
    result["inputs"] = [
        {**entries[old], "name": new, **({"widget": {"name": new}} if "widget" in entries[old] else {})}
        for new, old, _ in one.inputs
        if old is not None and old in entries
    ]
    return result


def _link(entry: Any, moved: Mapping[str, Mapping[int, int]]) -> Any:
    """A link whose origin's output has another place."""
    if isinstance(entry, dict):
        places, slot = moved.get(str(entry.get("origin_id")), {}), entry.get("origin_slot")
        return {**entry, "origin_slot": places.get(slot, slot) if isinstance(slot, int) else slot}
    if isinstance(entry, Sequence) and not isinstance(entry, str) and len(entry) >= 5:
        places = moved.get(str(entry[1]), {})
        return [*entry[:2], places.get(entry[2], entry[2]), *entry[3:]]
    return entry
