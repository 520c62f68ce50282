"""The comparison with the front end's exports, on made-up workflows: what is equal, refused, or another value."""

import json
import os

import pytest
from graft_nodes.tests.headless.templates import __main__ as command
from graft_nodes.tests.headless.templates import compare

INFO = {"output": ["*"], "output_node": True, "display_name": "Node"}
NODES = {
    "Number": {**INFO, "input": {"required": {"value": ["INT", {"default": 1}]}}},
    "Load3D": {**INFO, "input": {"required": {"image": ["LOAD_3D", {}]}}},
    "Grows": {**INFO, "input": {"required": {"slot": ["COMFY_DYNAMICSLOT_V3", {}]}}},
    "SaveGLB": {**INFO, "input": {"required": {"prefix": ["STRING", {"default": "p"}]}}},
}


def outcome(tmp_path, kind, values, inputs, title="Node", name="w", front_end="1.58.1", sent="", node="1"):
    """The comparison of a workflow of one node with an export of these inputs."""
    path = tmp_path / f"{name}.json"
    path.write_text(json.dumps({"nodes": [{"id": 1, "type": kind, "widgets_values": values}], "links": []}))
    sent_as = kind if sent == "" else sent
    exported = {"prompt": {node: {"class_type": sent_as, "inputs": inputs, "_meta": {"title": title}}}}
    return compare.compare(path, exported, compare.definitions(NODES), front_end)


@pytest.mark.parametrize(
    ("kind", "values", "inputs", "title", "expected"),
    [
        ("Number", [3], {"value": 3}, "Node", compare.EQUAL),
        ("Number", [3], {"value": 3}, "Translated", compare.BROWSER),
        ("SaveGLB", ["p"], {"prefix": "p", "image": ""}, "Node", compare.BROWSER),
        ("Number", [3], {"value": 4}, "Node", compare.WRONG),
        ("Number", [3], {"value": 3, "image": ""}, "Node", compare.WRONG),
        ("Load3D", [], {"image": {"image": "scene.png"}, "clear": "clear"}, "Node", compare.BROWSER),
        ("Grows", [3], {}, "Node", compare.REFUSED),
    ],
)
def test_each_kind_of_outcome(tmp_path, kind, values, inputs, title, expected):
    assert outcome(tmp_path, kind, values, inputs, title).kind == expected


def test_a_node_that_this_comfyui_lacks_is_compared_but_for_its_class(tmp_path):
    for values, inputs, expected in (
        ([3], {"UNKNOWN": 3}, compare.BROWSER),
        ([3], {"UNKNOWN": 4}, compare.WRONG),
        ([], {"image": ["1", 0]}, compare.WRONG),
    ):
        one = outcome(tmp_path, "Nowhere", values, inputs, sent=None)
        assert (one.kind, one.reason) == (expected, compare.NO_NODE)
    assert outcome(tmp_path, "Number", [3], {"value": 3}, sent=None).kind == compare.WRONG


def test_a_node_that_is_not_sent_is_a_difference(tmp_path):
    one = outcome(tmp_path, "Nowhere", [], {}, node="2")
    assert {difference.name for difference in one.wrong} == {"the node"} and len(one.wrong) == 2


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
    refused = outcome(tmp_path, "Nowhere", [], {}, sent=None)
    text = compare.table({"1.58.1": [outcome(tmp_path, "Number", [3], {"value": 4}), refused]}, "0.33.0")
    assert "| differs otherwise | 1 |" in text and "node 1 (Number), value: Graft 3, the front end 4" in text
    assert "this host has no node 'Nowhere'" in text and "| w |" in text
    assert "| equal but for named fields | 1 |" in text and f"| {compare.REFUSED} | 0 |" in text
    assert f"| {compare.NO_NODE} | 1 |" in text and f"| {compare.NO_CHOICE} | 0 |" in text
    assert all(entry.reason in text for entry in (*compare.BROWSER_ONLY, *compare.DISAGREEMENTS))


def test_of_several_checkouts_the_newest_counts(tmp_path):
    for name, version in (("a", "0.8.0"), ("b", "0.33.0"), ("c", "0.3.64")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "comfyui_version.py").write_text(f'# by hand\n__version__ = "{version}"\n')
    named = os.pathsep.join(str(tmp_path / name) for name in "abc")
    assert command.newest(named) == str(tmp_path / "b")
    assert command.newest(str(tmp_path / "c")) == str(tmp_path / "c")
