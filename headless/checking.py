"""`check`: what of a workflow would run, without running it, and the workflow in API format."""

from __future__ import annotations

import json
from typing import Any, TextIO

from ..storage.atomic import write_whole
from . import log
from .embedded import Catalogue, Graph, HostError, workflow


def say(graph: Graph, look_up: Catalogue, stream: TextIO, report: dict[str, Any]) -> None:
    """Print the nodes that would run, each after those that it needs, and the others; the report gets their ids."""
    needed = workflow.run_order(graph, look_up)
    left = [node_id for node_id in graph if node_id not in set(needed)]
    report["nodes"], report["not_needed"] = needed, left
    for title, ids in (("would run", needed), ("not needed by an output", left)):
        if ids:
            log.say(f"{title}: {len(ids)} {'node' if len(ids) == 1 else 'nodes'}", stream)
        for node_id in ids:
            log.say(f"  {_name_node(graph, node_id)}", stream)


def _name_node(graph: Graph, node_id: str) -> str:
    title, kind = workflow.title(graph, node_id), str(graph[node_id].get("class_type") or "no class")
    name = kind if title == kind else f'"{title}" ({kind})'
    return f"node {node_id} {name}".replace("\n", " ")


def export(graph: Graph, path: str, stream: TextIO) -> None:
    """Write the graph as ComfyUI's "Export (API)" does. Raises HostError when that cannot be."""
    text = json.dumps(graph, indent=2, ensure_ascii=True)
    try:
        write_whole(path, [text.encode() + b"\n"])
    except OSError as error:
        raise HostError(f"--export {path}: cannot be written ({error.strerror or error})") from error
    log.say(f"wrote {path}", stream)
