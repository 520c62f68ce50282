"""Group nodes become what front end 1.27.10 itself exports for them (recorded by record_exports.py), or are refused.
Where it loses a link, they become what 1.58.1 exports, which makes subgraphs of them.
"""

import copy
import json
from pathlib import Path

import pytest

from comfyui_api_stubs.tests.workflows.recorded import read, recorded_catalogue
from comfyui_api_stubs.tests.workflows.test_editor_json import NUMBER, of_classes
from comfyui_api_stubs.workflows import workflow
from comfyui_api_stubs.workflows.problem import WorkflowError

FOLDER = Path(__file__).parent / "group_nodes"
NAMES = sorted(path.name.split(".")[0] for path in FOLDER.glob("*.editor.json"))
LOOK_UP = recorded_catalogue()
SAMPLING = json.loads((FOLDER / "sampling.editor.json").read_text(encoding="utf-8"))


# Inputs that 1.27.10 leaves out: of group nodes behind a reroute, a bypassed node, a Primitive or a group node, and
# behind a bypassed node inside a group node.
LOST = {
    "links": {("3:1", "latent_image"), ("3:1", "steps"), ("9:1", "latent_image"), ("11:1", "latent_image")},
    "muted": {("3:2", "latent"), ("4", "anything")},
}


def exported(name, front_end):
    return json.loads((FOLDER / f"{name}.{front_end}.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", NAMES)
def test_equal_to_the_front_ends_own_export(name):
    document = read(str(FOLDER / f"{name}.editor.json"))
    graph = document.graph(LOOK_UP)
    assert document.class_types() >= {node["class_type"] for node in graph.values()}
    for node, lost in LOST.get(name, ()):
        del graph[node]["inputs"][lost]
    assert graph == exported(name, "1.27.10")


@pytest.mark.parametrize("name", LOST)
def test_a_link_that_1_27_10_loses_is_sent_as_1_58_1_sends_it(name):
    graph = read(str(FOLDER / f"{name}.editor.json")).graph(LOOK_UP)
    newer = exported(name, "1.58.1")
    ids = dict(zip(by_place(graph), by_place(newer), strict=True))
    for node, lost in LOST[name]:
        assert renamed(graph[node]["inputs"][lost], ids) == newer[ids[node]]["inputs"][lost]


def by_place(graph):
    """The ids of the nodes; 1.58.1 gives group nodes and the nodes inside other ones, in the same order."""
    return sorted(graph, key=lambda node_id: (":" in node_id, [int(part) for part in node_id.split(":")]))


def renamed(value, ids):
    if isinstance(value, list):
        return [ids[value[0]], value[1]]
    return value


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


@pytest.mark.parametrize("upload", ["image_upload", "animated_image_upload", "video_upload"])
def test_the_button_of_an_upload_takes_a_value_between_those_of_two_nodes(upload):
    look_up = of_classes(Load={"required": {"file": (["a", "b"], {upload: True}), "width": NUMBER}})
    group = {"nodes": [{"type": "Load"}, {"type": "Load"}], "links": []}
    node = {"id": 1, "type": "workflow>two", "widgets_values": ["b", 32, "image", "b", 64, "image"]}
    data = {"nodes": [node], "links": [], "extra": {"groupNodes": {"two": group}}}
    graph = workflow.parse(data).graph(look_up)
    assert [graph[node_id]["inputs"] for node_id in ("1:0", "1:1")] == [
        {"file": "b", "width": 32},
        {"file": "b", "width": 64},
    ]


def to_a_subgraph(data, node, group):
    inside = {"id": 20, "type": "workflow>sampling"}
    data["definitions"] = {"subgraphs": [{"id": "s", "name": "s", "nodes": [inside], "links": []}]}


def to_one_in_another(data, node, group):
    data["extra"]["groupNodes"]["inner"] = copy.deepcopy(group)
    group["nodes"][2] = {"type": "workflow>inner", "inputs": [], "outputs": []}


def to_a_link_from_a_bypassed_one(data, node, group):
    data["nodes"].append({"id": 9, "type": "workflow>sampling", "mode": 4})
    data["nodes"].append({"id": 10, "type": "Reroute", "inputs": [{"name": "", "type": "*", "link": 21}]})
    data["links"] += [[20, 10, 0, 3, 2, "LATENT"], [21, 9, 1, 10, 0, "LATENT"]]
    slot = next(entry for entry in node["inputs"] if entry["name"] == "start")
    slot["link"] = 20


def to_converted_in_an_older_file(data, node, group):
    group["nodes"][1]["inputs"] = [entry for entry in group["nodes"][1]["inputs"] if entry["name"] != "seed"]


def link_name(name):
    return lambda data, node, group: node["inputs"][0].update(name=name)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            to_a_link_from_a_bypassed_one,
            "input 'start': it is linked to the bypassed group node 9, and front ends differ",
        ),
        (to_one_in_another, "the group node 'workflow>inner' is inside it, and no front end sends such a workflow"),
        (lambda data, node, group: data["extra"].pop("groupNodes"), "the file has no definition of this group node"),
        (lambda data, node, group: group["nodes"].append({"type": "Reroute"}), "a Reroute inside takes its link from"),
        (lambda data, node, group: group["nodes"].append({"type": "PrimitiveNode"}), "a Primitive inside it gives"),
        (lambda data, node, group: group["nodes"].append({"type": "Lost"}), "does not have 'Lost'"),
        (lambda data, node, group: group["nodes"].append({}), "an entry that is not a node"),
        (lambda data, node, group: group["links"].append([1, 2]), "an entry that is not a link"),
        (lambda data, node, group: group.update(external=3), "'external' of its definition is not a list"),
        (lambda data, node, group: group["nodes"][1].update(inputs=3), "a node whose 'inputs' is not a list of slots"),
        (lambda data, node, group: group["links"].append([1, 7, 2, 0]), "from node 1 to node 2, leads to nothing"),
        (lambda data, node, group: group["nodes"][1]["inputs"].reverse(), "'KSampler' inside has other inputs"),
        (link_name("gone"), "input 'gone': it is linked, and the group has no such input"),
        (to_converted_in_an_older_file, "input 'steps': it is linked, and front ends lose the link"),
        (to_a_subgraph, "a group node inside a subgraph cannot be read"),
    ],
)
def test_what_cannot_be_converted_is_refused_by_name(change, expected):
    with pytest.raises(WorkflowError) as error:
        changed(change).graph(LOOK_UP)
    assert expected in str(error.value)
    assert "workflow>sampling" in str(error.value)


NEWER, REFUSED = FOLDER / "newer", FOLDER / "refused"
CORE = recorded_catalogue(FOLDER)


def test_reroutes_inside_and_inputs_without_widgets_are_sent_as_1_58_1_sends_them():
    """1.27.10 loses the links through reroutes inside, and puts those behind a forceInput into other inputs."""
    graph = read(str(NEWER / "reroutes.editor.json")).graph(CORE)
    newer = json.loads((NEWER / "reroutes.1.58.1.json").read_text(encoding="utf-8"))
    older = json.loads((NEWER / "reroutes.1.27.10.json").read_text(encoding="utf-8"))
    ids = dict(zip(by_place(graph), by_place(newer), strict=True))
    ours = {
        ids[node_id]: {name: renamed(value, ids) for name, value in node["inputs"].items()}
        for node_id, node in graph.items()
    }
    assert ours == {node_id: node["inputs"] for node_id, node in newer.items()}
    assert "latent_image" not in older["3:3"]["inputs"] and "text" not in older["3:4"]["inputs"]


# Why each is refused, shown by what the front ends send: (node of 1.27.10, of 1.58.1, input, what each of them sends).
GONE = "nothing"
PROOFS = {
    # they differ
    "behind_bypassed": ("6:0", "52:51", "samples", GONE, ["54:53", 0], "linked to the bypassed group node 3"),
    "choice": ("3:0", "52:51", "scale_method", "scale by multiplier", "area", "front ends send it wrongly"),
    "other_order": ("3:0", "53:51", "model", ["3:1", 0], ["1", 0], "has other inputs in this ComfyUI"),
    "primitive": ("3:1", "53:52", "steps", 21, 2, "a Primitive inside it gives other values"),
    "unsorted": ("3:0", "52:51", "steps", "simple", ["5", 0], "'steps': it is linked, and front ends lose the link or"),
    "unsorted_inside": ("3:0", "53:51", "cfg", "disable", "simple", "has no clear place"),
    # they lose a link
    "converted": ("3:0", "53:51", "steps", 20, 20, "'steps': it is linked, and front ends lose the link or"),
    "growing": ("3:0", "53:51", "images.image0", GONE, GONE, "front ends send it wrongly"),
    "reroute_outside": ("3:1", "53:52", "latent_image", GONE, GONE, "a Reroute inside takes its link from outside"),
    # 1.27.10 exports nothing, and 1.58.1 a class that no server has
    "group_in_group": (None, "52:51", "samples", GONE, GONE, "no front end sends such a workflow"),
}


def test_every_recorded_refusal_is_shown():
    assert sorted(PROOFS) == sorted(path.name.split(".")[0] for path in REFUSED.glob("*.editor.json"))


@pytest.mark.parametrize("name", PROOFS)
def test_what_is_refused_is_sent_wrongly_or_in_two_ways(name):
    *nodes, wanted, older, newer, why = PROOFS[name]
    for node_id, front_end, sent in zip(nodes, ("1.27.10", "1.58.1"), (older, newer), strict=True):
        path = REFUSED / f"{name}.{front_end}.json"
        assert path.exists() == (node_id is not None)
        if node_id is not None:
            node = json.loads(path.read_text(encoding="utf-8"))[node_id]
            assert node["inputs"].get(wanted, GONE) == sent
    if name == "group_in_group":
        assert node["class_type"] == "workflow>g"
    with pytest.raises(WorkflowError) as error:
        read(str(REFUSED / f"{name}.editor.json")).graph(CORE)
    assert why in str(error.value)
