"""python -m graft_nodes.tests.nodes.write_inputs: writes inputs.json, what workflows know of each node, again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from graft_nodes.training.store.names import NEWEST

FILE = Path(__file__).with_name("inputs.json")
SETTINGS = ("default", "min", "max", "step", "round", "multiline", "socketless", "forceInput", "advanced")


def of_node(node: Any) -> dict[str, Any]:
    """A node's category, inputs with their settings, and outputs, as the host tells the editor (/object_info)."""
    told = json.loads(json.dumps(node.GET_NODE_INFO_V1()))
    return {
        "category": told["category"],
        "output_node": told["output_node"],
        "inputs": {
            f"{name} ({group})": _input(*told["input"][group][name])
            for group, names in told["input_order"].items()
            for name in names
        },
        "outputs": [list(pair) for pair in zip(told["output_name"], told["output"], strict=True)],
    }


def _input(kind: Any, told: dict[str, Any] | None = None) -> list[Any]:
    """[type, settings]; the names of files are left out of a list's options."""
    told = told or {}
    settings = {name: told[name] for name in SETTINGS if name in told}
    options = told.get("options", kind)
    if isinstance(options, list):
        kind = "COMBO"
        if options not in ([""], [NEWEST]):
            settings["options"] = options
    return [kind, settings]


def text(nodes: list[Any]) -> str:
    """The file: a line for each input."""
    lines = []
    for node in nodes:
        about = of_node(node)
        inputs = [f"   {json.dumps(name)}: {json.dumps(value)}" for name, value in about.pop("inputs").items()]
        head = "".join(f'  "{name}": {json.dumps(value)},\n' for name, value in about.items())
        body = ",\n".join(inputs)
        lines.append(f' "{node.define_schema().node_id}": {{\n{head}  "inputs": {{\n{body}\n  }}\n }}')
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    from graft_nodes.headless import embedded

    embedded.install()
    from graft_nodes.nodes import NODES

    FILE.write_text(text(NODES), encoding="utf-8")
