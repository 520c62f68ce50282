"""The comparison with the front end's exports, on made-up workflows: what is equal, refused, or another value."""

import json

import pytest
from graft_nodes.tests.headless.templates import compare

INFO = {"output": ["*"], "output_node": True, "display_name": "Node"}
NODES = {
    "Number": {**INFO, "input": {"required": {"value": ["INT", {"default": 1}]}}},
    "SaveGLB": {**INFO, "input": {"required": {"prefix": ["STRING", {"default": "p"}]}}},
}


def outcome(tmp_path, kind, values, inputs, title="Node", name="w", front_end="1.58.1"):
    """The comparison of a workflow of one node with an export of these inputs."""
    path = tmp_path / f"{name}.json"
    path.write_text(json.dumps({"nodes": [{"id": 1, "type": kind, "widgets_values": values}], "links": []}))
    exported = {"prompt": {"1": {"class_type": kind, "inputs": inputs, "_meta": {"title": title}}}}
    return compare.compare(path, exported, compare.definitions(NODES), front_end)


@pytest.mark.parametrize(
    ("kind", "values", "inputs", "title", "expected"),
    [
        ("Number", [3], {"value": 3}, "Node", compare.EQUAL),
        ("Number", [3], {"value": 3}, "Translated", compare.BROWSER),
        ("SaveGLB", ["p"], {"prefix": "p", "image": ""}, "Node", compare.BROWSER),
        ("Number", [3], {"value": 4}, "Node", compare.WRONG),
        ("Number", [3], {"value": 3, "image": ""}, "Node", compare.WRONG),
        ("Nowhere", [3], {"value": 3}, "Node", compare.REFUSED),
    ],
)
def test_each_kind_of_outcome(tmp_path, kind, values, inputs, title, expected):
    assert outcome(tmp_path, kind, values, inputs, title).kind == expected


def test_a_disagreement_counts_for_its_front_end_and_template_only(tmp_path):
    first = compare.DISAGREEMENTS[0]
    for front_end, name, expected in (
        (first.front_end, first.templates[0], compare.DISPUTED),
        ("other", first.templates[0], compare.WRONG),
        (first.front_end, "other", compare.WRONG),
    ):
        theirs = {"value": 3, first.names[0]: "x"}
        assert outcome(tmp_path, "Number", [3], theirs, name=name, front_end=front_end).kind == expected


def test_the_table_says_how_many_and_why(tmp_path):
    refused = outcome(tmp_path, "Nowhere", [], {})
    text = compare.table({"1.58.1": [outcome(tmp_path, "Number", [3], {"value": 4}), refused]}, "0.33.0")
    assert "| differs otherwise | 1 |" in text and "node 1 (Number), value: Graft 3, the front end 4" in text
    assert "this host has no node 'Nowhere'" in text and "| w |" in text
    assert f"| {compare.NO_NODE} | 1 |" in text and f"| {compare.NO_CHOICE} | 0 |" in text
    assert all(entry.reason in text for entry in (*compare.BROWSER_ONLY, *compare.DISAGREEMENTS))
