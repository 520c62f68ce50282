"""Editor workflows become the API graphs that ComfyUI's front end itself exports (recorded by record_exports.py)."""

import json
from pathlib import Path

import pytest
from graft_nodes.headless import workflow
from graft_nodes.headless.problem import WorkflowError
from graft_nodes.headless.schema import catalogue
from graft_nodes.tests.counting_lines import lines_run

FOLDER = Path(__file__).parent / "workflows"
NAMES = sorted(path.name.split(".")[0] for path in FOLDER.glob("*.api.json"))


def recorded_catalogue():
    """Look-up of the node schemas that were recorded with the exports, through classes that answer as ComfyUI's do."""
    nodes = json.loads((FOLDER / "schemas.json").read_text(encoding="utf-8"))["nodes"]

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


@pytest.mark.parametrize("name", NAMES)
def test_equal_to_the_front_ends_own_export(name):
    document = workflow.read(str(FOLDER / f"{name}.editor.json"))
    expected = json.loads((FOLDER / f"{name}.api.json").read_text(encoding="utf-8"))
    assert document.is_editor
    assert document.graph(recorded_catalogue()) == expected


LOOK_UP = recorded_catalogue()


def refused(data):
    with pytest.raises(WorkflowError) as error:
        workflow.parse(data).graph(LOOK_UP)
    return str(error.value)


def test_values_saved_by_name_as_some_packs_do():
    node = {"id": 1, "type": "OddSource", "widgets_values": {"number": 8}}
    assert workflow.parse({"nodes": [node]}).graph(LOOK_UP)["1"]["inputs"] == {"text": "t", "number": 8}


def test_a_group_node_is_refused_with_the_way_out():
    text = refused({"nodes": [{"id": 1, "type": "workflow>mine"}, {"id": 2, "type": "workflow/yours", "title": "two"}]})
    assert "node 1" in text and "node 2" in text and "convert it to a subgraph" in text


def test_links_that_lead_nowhere_are_listed():
    slots = [{"name": "text", "type": "STRING", "link": 5}, {"name": "image", "type": "IMAGE", "link": 6}]
    text = refused({"nodes": [{"id": 1, "type": "OddSink", "inputs": slots}], "links": [[6, 9, 0, 1, 1, "IMAGE"]]})
    assert "link 5 is not in the file" in text and "linked to node 9, which is not in the file" in text


def test_a_loop_of_reroutes_is_an_error():
    wire = {"name": "", "type": "*"}
    nodes = [
        {"id": 1, "type": "Reroute", "inputs": [{**wire, "link": 2}]},
        {"id": 2, "type": "Reroute", "inputs": [{**wire, "link": 1}]},
        {"id": 3, "type": "OddSink", "inputs": [{"name": "text", "type": "STRING", "link": 3}]},
    ]
    assert "make a cycle" in refused(
        {"nodes": nodes, "links": [[1, 1, 0, 2, 0, "*"], [2, 2, 0, 1, 0, "*"], [3, 2, 0, 3, 0, "STRING"]]}
    )


def test_a_subgraph_inside_itself_is_an_error():
    inner = {"id": "a", "name": "a", "nodes": [{"id": 5, "type": "b"}], "links": []}
    outer = {"id": "b", "name": "b", "nodes": [{"id": 6, "type": "a"}], "links": []}
    text = refused({"nodes": [{"id": 1, "type": "a"}], "links": [], "definitions": {"subgraphs": [inner, outer]}})
    assert "the subgraph contains itself" in text


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"nodes": [3]}, "not a node (it needs an id and a type): 3"),
        ({"nodes": [{"id": 1}]}, "not a node"),
        ({"nodes": [{"id": 1, "type": "OddSink", "mode": "merge"}]}, "'mode' is not a number but \"merge\""),
        ({"nodes": [{"id": 1, "type": "OddSink", "inputs": {"text": 1}}]}, "'inputs' is not a list of slots"),
        ({"nodes": [{"id": 2, "type": "OddSink", "outputs": [1]}]}, "'outputs' is not a list of slots"),
        ({"nodes": [], "links": [[1, 2]]}, "not a link: [1, 2]"),
        (
            {"nodes": [], "links": {}, "definitions": {"subgraphs": [{"id": "x", "nodes": 4}]}},
            "subgraph x: 'nodes' is not a list",
        ),
        ({"nodes": [], "definitions": []}, "'definitions' is not"),
    ],
)
def test_a_malformed_file_is_an_error_that_says_where(data, expected):
    assert expected in refused(data)


def test_a_node_whose_inputs_grow_is_refused():
    growing = {"required": {"images": ("COMFY_AUTOGROW_V3", {})}}
    cls = type("Growing", (), {"INPUT_TYPES": lambda: growing, "RETURN_TYPES": ()})
    with pytest.raises(WorkflowError, match=r"inputs that grow in the editor.*Export \(API\)"):
        workflow.parse({"nodes": [{"id": 1, "type": "Growing"}]}).graph(catalogue({"Growing": cls}, {}))


# --- what a node costs ------------------------------------------------------------------------------------------------


def is_counted(file):
    """Whether a file is of headless/."""
    return "headless" in file


def reroute(number, link):
    return {"id": number, "type": "Reroute", "inputs": [{"name": "", "type": "*", "link": link}], "outputs": []}


def sink(number, link):
    slot = {"name": "value", "type": "*", "link": link}
    return {"id": number, "type": "OddSink", "inputs": [slot], "widgets_values": ["out"]}


def reroutes_with_a_sink_each(count):
    """A chain of reroutes; at each of them hangs an output node."""
    source = {"id": 1, "type": "OddSource", "outputs": [{"type": "STRING"}], "widgets_values": ["t", 1]}
    nodes = [source, *(reroute(n, n) for n in range(2, count + 2)), *(sink(-n, -n) for n in range(2, count + 2))]
    links = [[n, n - 1, 0, n, 0, "*"] for n in range(2, count + 2)]
    links += [[-n, n, 0, -n, 0, "*"] for n in range(2, count + 2)]
    return {"nodes": nodes, "links": links}


def primitives(count):
    """Each node's value comes from a primitive, and its text names another node's."""
    nodes, links = [], []
    for n in range(1, count + 1):
        slot = {"name": "number", "type": "INT", "link": n, "widget": {"name": "number"}}
        nodes.append({"id": n, "type": "OddSource", "inputs": [slot], "widgets_values": ["t", 1]})
        nodes.append({"id": -n, "type": "PrimitiveNode", "outputs": [{"type": "INT"}], "widgets_values": [n]})
        nodes[-1]["properties"] = {"Run widget replace on values": True}
        nodes[-1]["widgets_values"] = [f"%OddSource.number%{n}"]
        links.append([n, -n, 0, n, 0, "INT"])
    return {"nodes": nodes, "links": links}


@pytest.mark.slow
@pytest.mark.parametrize("shape", [reroutes_with_a_sink_each, primitives])
def test_as_many_nodes_more_cost_as_many_lines_more(shape):
    few, more, many = (
        lines_run(lambda count=count: workflow.parse(shape(count)).graph(LOOK_UP), is_counted)
        for count in (500, 750, 1000)
    )
    assert few > 500 and many - more <= more - few


def test_5000_reroutes_in_a_row_are_followed():
    graph = workflow.parse(reroutes_with_a_sink_each(5000)).graph(LOOK_UP)
    assert len(graph) == 5001 and all(graph[f"-{n}"]["inputs"]["value"] == ["1", 0] for n in range(2, 5002))
