"""Workflow files beside the tests, and the schemas of nodes that were recorded with them."""

import json
from pathlib import Path

from ...workflows import workflow
from ...workflows.schema import catalogue

FOLDER = Path(__file__).parent / "workflows"


def read(path):
    """A workflow file of either format."""
    return workflow.parse(json.loads(Path(path).read_text(encoding="utf-8")), path)


def recorded_catalogue(folder=FOLDER):
    """Look-up of the node schemas that were recorded with the exports, through classes that answer as ComfyUI's do."""
    nodes = json.loads((folder / "schemas.json").read_text(encoding="utf-8"))["nodes"]

    def make(name, info):
        inputs = {
            kind: {key: tuple(entry) for key, entry in entries.items()} for kind, entries in info["inputs"].items()
        }
        return type(
            name,
            (),
            {"INPUT_TYPES": lambda: inputs, "RETURN_TYPES": tuple(info["outputs"]), "OUTPUT_NODE": info["output_node"]},
        )

    return catalogue(
        {name: make(name, info) for name, info in nodes.items()}, {name: info["title"] for name, info in nodes.items()}
    )
