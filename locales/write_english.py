"""Writes locales/en/nodeDefs.json from the nodes' own declarations: `python locales/write_english.py`, after a change
of a node's texts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


def node_texts(nodes: Iterable[Any]) -> dict[str, Any]:
    """{node id: {display_name, description, inputs: {id: {name, tooltip}}, outputs: {place: {name}}}} of V3 node
    classes, by node id.
    """
    out = {}
    for schema in sorted((node.define_schema() for node in nodes), key=lambda schema: schema.node_id):
        out[schema.node_id] = {
            "display_name": schema.display_name,
            "description": schema.description,
            "inputs": {one.id: {"name": one.display_name or one.id, "tooltip": one.tooltip} for one in schema.inputs},
            "outputs": {
                str(place): {"name": one.display_name or one.io_type} for place, one in enumerate(schema.outputs)
            },
        }
    return out


def main() -> None:
    """Write the file."""
    from graft_nodes import comfyui_api_stubs

    comfyui_api_stubs.install()
    from graft_nodes.nodes import NODES

    text = json.dumps(node_texts(NODES), indent=2, ensure_ascii=False) + "\n"
    (HERE / "en" / "nodeDefs.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
