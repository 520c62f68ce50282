"""The example workflows: what we make of the editor's JSON is what the front end (1.49.6, on ComfyUI 0.33.0) itself
exported of it.
"""

import json
from pathlib import Path

import pytest
from graft_nodes.headless import workflow_file
from graft_nodes.headless.embedded import catalogue, workflow

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "example_workflows").glob("*.json"))
EXPORTS = Path(__file__).parent / "examples"


def expected_files(data):
    """The model files that a template's note names, as models/FOLDER/FILE: this host has none of them. A LoRA is in no
    list but in a row, which its node checks when the host validates the workflow.
    """
    (note,) = (node for node in data["nodes"] if node["type"] == "MarkdownNote")
    files = [part for part in note["widgets_values"][0].split("`") if part.startswith("models/")]
    return [file for file in files if not file.startswith("models/loras/")]


@pytest.mark.parametrize("path", [*EXAMPLES, ROOT / "demo" / "every_node.json"], ids=lambda path: path.stem)
def test_an_example_is_translated_as_the_front_end_does(host, path):
    look_up = catalogue(host.nodes.NODE_CLASS_MAPPINGS, host.nodes.NODE_DISPLAY_NAME_MAPPINGS)
    ours = workflow_file.read(str(path)).graph(look_up)
    theirs = json.loads((EXPORTS / f"{path.stem}.api.json").read_text(encoding="utf-8"))
    assert {node: (entry["class_type"], entry["inputs"]) for node, entry in ours.items()} == {
        node: (entry["class_type"], entry["inputs"]) for node, entry in theirs.items()
    }
    files = expected_files(json.loads(path.read_text(encoding="utf-8")))
    problems = [str(problem) for problem in workflow.check(ours, look_up)]
    assert len(problems) == len(files)
    for file, problem in zip(files, problems, strict=True):
        assert f"'{file.rpartition('/')[2]}' is not in the list" in problem


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_has_a_picture_a_note_and_groups(path):
    data = json.loads(path.read_text(encoding="utf-8"))
    assert path.with_suffix(".jpg").stat().st_size < 600_000
    assert data["groups"] and any(node["type"] == "MarkdownNote" for node in data["nodes"])
