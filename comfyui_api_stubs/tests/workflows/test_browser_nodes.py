"""Nodes that exist only in the JavaScript of packs. Set and Get nodes lead to what front end 1.58.1 exports with
KJNodes loaded (recorded by record_exports.py).
"""

import json
from pathlib import Path

import pytest

from comfyui_api_stubs.tests.workflows import recorded
from comfyui_api_stubs.tests.workflows.recorded import recorded_catalogue
from comfyui_api_stubs.workflows import workflow
from comfyui_api_stubs.workflows.problem import WorkflowError

FOLDER = Path(__file__).parent / "browser_nodes"
NAMES = sorted(path.name.split(".")[0] for path in FOLDER.glob("*.editor.json"))
LOOK_UP = recorded_catalogue()


def read(name):
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", NAMES)
def test_equal_to_the_front_ends_own_export(name):
    document = recorded.read(str(FOLDER / f"{name}.editor.json"))
    assert document.graph(LOOK_UP) == read(f"{name}.1.58.1")
    assert document.class_types() <= {"OddSource", "OddSink"}


def changed(name, **names):
    """A recorded workflow whose nodes are of other classes."""
    text = json.dumps(read(f"{name}.editor"))
    for old, new in names.items():
        text = text.replace(f'"{old}"', f'"{new}"')
    return json.loads(text)


EASY = {"SetNode": "easy setNode", "GetNode": "easy getNode"}


@pytest.mark.parametrize("name", ["set_get", "two_sets", "set_muted", "set_both", "widget_from_get", "unlinked_set"])
def test_easy_use_s_set_and_get_lead_to_the_same_within_a_graph(name):
    document = workflow.parse(changed(name, **EASY))
    assert document.graph(LOOK_UP) == read(f"{name}.1.58.1")
    assert document.class_types() <= {"OddSource", "OddSink"}


def refused(data):
    with pytest.raises(WorkflowError) as error:
        workflow.parse(data).graph(LOOK_UP)
    return [str(problem) for problem in error.value.problems]


def test_easy_use_s_get_does_not_look_outside_of_its_subgraph():
    (problem,) = refused(changed("set_outside", **EASY))
    assert "node 3:20" in problem and "no Set node" in problem and "'a'" in problem


def test_a_get_of_another_pack_s_set_finds_none():
    (problem,) = refused(changed("set_get_one", GetNode="easy getNode"))
    assert "no Set node" in problem


@pytest.mark.parametrize("name", ["b", ""])
def test_the_name_that_no_set_has_is_said_with_those_there_are(name):
    data = read("set_get_one.editor")
    next(node for node in data["nodes"] if node["type"] == "GetNode")["widgets_values"] = [name]
    (problem,) = refused(data)
    assert "node 3" in problem and f"no Set node is named '{name}'" in problem
    assert "Set nodes here: a" in problem


def test_a_set_inside_a_subgraph_is_not_seen_outside():
    data = read("set_outside.editor")
    root, inner = data["nodes"], data["definitions"]["subgraphs"][0]
    inner["nodes"].append(root.pop(1))
    root.append({"id": 70, "type": "GetNode", "outputs": [{"type": "STRING"}], "widgets_values": ["a"]})
    root.append({"id": 71, "type": "OddSink", "inputs": [{"name": "text", "type": "STRING", "link": 90}]})
    data["links"] = [[90, 70, 0, 71, 0, "STRING"]]
    inner["nodes"][-1]["inputs"] = []
    (problem,) = refused(data)
    assert "node 70" in problem and "no Set node is named 'a'" in problem


def test_several_sets_of_a_name_around_a_subgraph_are_refused():
    """KJNodes warns and sends nothing."""
    data = read("set_outside.editor")
    data["nodes"].append({**data["nodes"][1], "id": 60})
    (problem,) = refused(data)
    assert "2 Set nodes" in problem and "'a'" in problem


def test_a_get_that_nothing_uses_is_no_problem():
    data = read("set_get_one.editor")
    data["nodes"].append({"id": 50, "type": "GetNode", "widgets_values": ["nowhere"], "outputs": [{"type": "*"}]})
    assert workflow.parse(data).graph(LOOK_UP) == read("set_get_one.1.58.1")


def test_sets_and_gets_that_make_a_circle_are_an_error():
    data = read("set_get_one.editor")
    data["links"] = [[1, 3, 0, 2, 0, "STRING"], [3, 3, 0, 4, 0, "STRING"]]
    assert "make a cycle" in refused(data)[0]


LOOSE = [
    {"id": 80, "type": "Label (rgthree)", "inputs": [], "outputs": [], "properties": {"fontSize": 12}},
    {"id": 81, "type": "Bookmark (rgthree)", "widgets_values": ["1", 1]},
    {"id": 82, "type": "Fast Groups Bypasser (rgthree)", "outputs": [{"name": "OPT_CONNECTION", "type": "*"}]},
    {"id": 83, "type": "Fast Bypasser (rgthree)", "inputs": [{"name": "", "type": "*", "link": 95}]},
    {"id": 84, "type": "Fast Muter (rgthree)", "inputs": [{"name": "", "type": "*", "link": 96}]},
    {"id": 85, "type": "Note+ (mtb)", "widgets_values": ["<p>", "css"]},
    {"id": 87, "type": "easy bookmark", "properties": {"cnr_id": "comfyui-easy-use"}, "widgets_values": ["1", 1]},
    {"id": 88, "type": "Mute / Bypass Repeater (rgthree)", "inputs": [], "outputs": [{"name": "OPT", "type": "*"}]},
    {"id": 89, "type": "Fast Actions Button (rgthree)", "inputs": [{"name": "", "type": "*", "link": None}]},
    {"id": 86, "type": "A note of another pack", "inputs": [], "outputs": [], "properties": {"text": "<b>"}},
]


def test_nodes_that_send_nothing_are_left_out():
    data = read("set_get_one.editor")
    data["nodes"] += LOOSE
    data["links"] += [[95, 1, 0, 83, 0, "*"], [96, 82, 0, 84, 0, "*"]]
    document = workflow.parse(data)
    assert document.graph(LOOK_UP) == read("set_get_one.1.58.1")
    assert document.class_types() == {"OddSource", "OddSink"}


@pytest.mark.parametrize("kind", ["Reroute (rgthree)", "Node Collector (rgthree)"])
def test_a_pack_s_own_reroute_passes_on_what_is_linked_to_it(kind):
    data = changed("reroute", Reroute=kind)
    assert workflow.parse(data).graph(LOOK_UP) == read("reroute.1.58.1")


@pytest.mark.parametrize("kind", ["Random Unmuter (rgthree)", "Anything Everywhere", "Prompts Everywhere"])
def test_a_node_that_changes_what_the_browser_sends_is_named(kind):
    data = read("set_get_one.editor")
    data["nodes"].append({"id": 80, "type": kind, "title": "mine", "inputs": [{"name": "", "type": "*"}]})
    (problem,) = refused(data)
    assert f'node 80 "mine" ({kind})' in problem
    assert "in the browser" in problem and "'Export (API)'" in problem
    data["nodes"][-1]["mode"] = 2
    assert workflow.parse(data).graph(LOOK_UP) == read("set_get_one.1.58.1")


def lost(**properties):
    node = {"id": 80, "type": "Lost", "inputs": [{"name": "text", "type": "STRING", "link": None}], "outputs": []}
    return {**read("set_get_one.editor"), "nodes": [*read("set_get_one.editor")["nodes"], {**node, **properties}]}


def said_of(data):
    document = workflow.parse(data)
    graph = document.graph(LOOK_UP)
    return [str(problem) for problem in workflow.check(graph, LOOK_UP, document.of_no_server)]


def test_an_unknown_node_that_no_server_brought_may_live_in_the_browser():
    """The front end writes the class of a server's node into its properties."""
    (problem,) = said_of(lost(properties={"color": "red"}))
    assert "this host has no node 'Lost'; load the pack" in problem and "in the browser" in problem
    assert "'Export (API)'" in problem


@pytest.mark.parametrize("properties", [{"Node name for S&R": "Lost"}, {"cnr_id": "x"}, {"aux_id": "a/b"}])
def test_an_unknown_node_of_a_server_needs_its_pack(properties):
    (problem,) = said_of(lost(properties=properties))
    assert "load the pack that brings it (--pack DIR)" in problem and "browser" not in problem
