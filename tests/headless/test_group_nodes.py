"""Group nodes become what front end 1.27.10 itself exports for them (recorded by record_exports.py), or are refused."""

import copy
import json
from pathlib import Path

import pytest
from graft_nodes.headless import workflow
from graft_nodes.headless.problem import WorkflowError

from .test_editor_json import recorded_catalogue

FOLDER = Path(__file__).parent / "group_nodes"
NAMES = sorted(path.name.split(".")[0] for path in FOLDER.glob("*.api.json"))
LOOK_UP = recorded_catalogue()
SAMPLING = json.loads((FOLDER / "sampling.editor.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", NAMES)
def test_equal_to_the_front_ends_own_export(name):
    document = workflow.read(str(FOLDER / f"{name}.editor.json"))
    expected = json.loads((FOLDER / f"{name}.api.json").read_text(encoding="utf-8"))
    assert document.graph(LOOK_UP) == expected
    assert document.class_types() == {node["class_type"] for node in expected.values()}


def test_the_recorded_workflow_has_what_group_nodes_can_have():
    graph = workflow.parse(SAMPLING).graph(LOOK_UP)
    assert graph["3:1"]["inputs"]["positive"] == ["3:0", 0]  # a link inside
    assert graph["3:1"]["inputs"]["latent_image"] == ["2", 2]  # a link from outside, to an input with a new name
    assert graph["3:1"]["inputs"]["steps"] == ["2", 1]  # a link from outside, to a widget
    assert graph["3:1"]["inputs"]["cfg"] == 4.5  # a hidden widget keeps its value
    assert "image" not in graph["3:2"]["inputs"]  # a hidden input has no link
    assert graph["3:3"]["inputs"]["text"] == "ugly"  # the second input of one name


def changed(change):
    data = copy.deepcopy(SAMPLING)
    change(data, data["nodes"][2], data["extra"]["groupNodes"]["sampling"])
    return workflow.parse(data)


def test_the_older_separator_means_the_same():
    older = changed(lambda data, node, group: node.update(type="workflow/sampling"))
    assert older.graph(LOOK_UP) == workflow.parse(SAMPLING).graph(LOOK_UP)


def test_two_group_nodes_of_one_group_have_their_own_values():
    def add(data, node, group):
        data["nodes"].append({"id": 9, "type": "workflow>sampling", "widgets_values": ["a garden"]})

    graph = changed(add).graph(LOOK_UP)
    assert graph["9:0"]["inputs"] == {"text": "a garden"}
    assert graph["3:0"]["inputs"]["text"] == "a house"


def to_a_subgraph(data, node, group):
    inside = {"id": 20, "type": "workflow>sampling"}
    data["definitions"] = {"subgraphs": [{"id": "s", "name": "s", "nodes": [inside], "links": []}]}


def to_converted_in_an_older_file(data, node, group):
    group["nodes"][1]["inputs"] = [entry for entry in group["nodes"][1]["inputs"] if entry["name"] != "seed"]


def link_name(name):
    return lambda data, node, group: node["inputs"][0].update(name=name)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda data, node, group: node.update(mode=2), "front ends differ in what they send for a muted or bypassed"),
        (lambda data, node, group: node.update(mode=4), "front ends differ in what they send for a muted or bypassed"),
        (lambda data, node, group: data["extra"].pop("groupNodes"), "the file has no definition of this group node"),
        (lambda data, node, group: group["nodes"].append({"type": "Reroute"}), "a Reroute inside a group node"),
        (lambda data, node, group: group["nodes"].append({"type": "Lost"}), "does not have 'Lost'"),
        (lambda data, node, group: group["nodes"].append({"type": "OddSink"}), "'OddSink' inside has the input 'text'"),
        (lambda data, node, group: group["nodes"].append({}), "an entry that is not a node"),
        (lambda data, node, group: group["links"].append([1, 2]), "an entry that is not a link"),
        (lambda data, node, group: group["links"].append([1, 7, 2, 0]), "from node 1 to node 2, leads to nothing"),
        (lambda data, node, group: group["nodes"][1]["inputs"].reverse(), "'KSampler' inside has other inputs"),
        (link_name("gone"), "input 'gone' is linked, and the group has no such input"),
        (to_converted_in_an_older_file, "input 'steps' is linked, and front ends differ"),
        (to_a_subgraph, "a group node inside a subgraph cannot be read"),
    ],
)
def test_what_cannot_be_converted_is_refused_by_name(change, expected):
    with pytest.raises(WorkflowError) as error:
        changed(change).graph(LOOK_UP)
    assert expected in str(error.value)
    assert "workflow>sampling" in str(error.value)
