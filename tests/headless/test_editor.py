"""Editor workflows become the API graphs that ComfyUI's front end itself exports (recorded by record_exports.py)."""

import json
from pathlib import Path

import pytest
from graft_nodes.headless import workflow
from graft_nodes.headless.schema import catalogue

FOLDER = Path(__file__).parent / "workflows"
NAMES = sorted(path.name.split(".")[0] for path in FOLDER.glob("*.api.json"))


def recorded_catalogue():
    """Look-up of the node schemas that were recorded with the exports, through classes that answer as ComfyUI's do."""
    nodes = json.loads((FOLDER / "schemas.json").read_text(encoding="utf-8"))["nodes"]

    def make(name, info):
        inputs = {kind: {key: tuple(entry) for key, entry in entries.items()} for kind, entries in info["inputs"].items()}
        return type(name, (), {"INPUT_TYPES": lambda: inputs, "RETURN_TYPES": tuple(info["outputs"]), "OUTPUT_NODE": info["output_node"]})

    return catalogue({name: make(name, info) for name, info in nodes.items()}, {name: info["title"] for name, info in nodes.items()})


@pytest.mark.parametrize("name", NAMES)
def test_equal_to_the_front_ends_own_export(name):
    document = workflow.read(str(FOLDER / f"{name}.editor.json"))
    expected = json.loads((FOLDER / f"{name}.api.json").read_text(encoding="utf-8"))
    assert document.is_editor
    assert document.graph(recorded_catalogue()) == expected
