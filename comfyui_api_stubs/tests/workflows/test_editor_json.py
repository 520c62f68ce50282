"""Editor workflows become the API graphs that ComfyUI's front end itself exports (recorded by record_exports.py)."""

import json
from pathlib import Path

import pytest

from comfyui_api_stubs.tests.counting_lines import lines_run
from comfyui_api_stubs.tests.workflows.recorded import FOLDER, read, recorded_catalogue
from comfyui_api_stubs.workflows import workflow
from comfyui_api_stubs.workflows.problem import WorkflowError
from comfyui_api_stubs.workflows.schema import catalogue

NAMES = sorted(path.name.split(".")[0] for path in FOLDER.glob("*.api.json"))


@pytest.mark.parametrize("name", NAMES)
def test_equal_to_the_front_ends_own_export(name):
    document = read(str(FOLDER / f"{name}.editor.json"))
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


def of_classes(**inputs):
    """Look-up of classes that declare these inputs, and one output."""
    made = {name: {"INPUT_TYPES": lambda given=given: given, "RETURN_TYPES": ("*",)} for name, given in inputs.items()}
    return catalogue({name: type(name, (), members) for name, members in made.items()}, {})


NUMBER = ("INT", {"default": 1})
SIZES = {"key": "by sizes", "inputs": {"required": {"width": NUMBER, "crop": (["no", "yes"], {})}}}
FACTOR = {"key": "by factor", "inputs": {"required": {"factor": NUMBER}}}
RESIZE = {"required": {"how": ("COMFY_DYNAMICCOMBO_V3", {"options": [SIZES, FACTOR]}), "method": (["area"], {})}}


def test_a_choice_brings_its_own_inputs_right_behind_it():
    look_up = of_classes(Resize=RESIZE)
    for saved, expected in (
        (["by sizes", 24, "yes", "area"], {"how": "by sizes", "how.width": 24, "how.crop": "yes", "method": "area"}),
        (["by factor", 3, "area"], {"how": "by factor", "how.factor": 3, "method": "area"}),
        ([], {"how": "by sizes", "how.width": 1, "how.crop": "no", "method": "area"}),
    ):
        node = {"id": 1, "type": "Resize", "widgets_values": saved}
        assert workflow.parse({"nodes": [node]}).graph(look_up)["1"]["inputs"] == expected


GROWING = {"template": {"input": {"required": {"a": ("STRING", {})}}}}


@pytest.mark.parametrize(
    ("kind", "inputs", "expected"),
    [
        ("Growing", {"texts": ("COMFY_AUTOGROW_V3", GROWING)}, "input 'texts': its inputs grow and hold values"),
        ("Slots", {"slot": ("COMFY_DYNAMICSLOT_V3", {})}, "input 'slot': inputs of type COMFY_DYNAMICSLOT_V3"),
    ],
)
def test_values_that_cannot_be_read_are_refused_with_node_input_and_remedy(kind, inputs, expected):
    node = {"id": 7, "type": kind, "title": "odd", "widgets_values": ["by hand"]}
    look_up = of_classes(**{kind: {"required": inputs}})
    with pytest.raises(WorkflowError) as error:
        workflow.parse({"nodes": [node]}).graph(look_up)
    text = str(error.value)
    assert f'node 7 "odd" ({kind}), {expected}' in text and "save the workflow with 'Export (API)'" in text
    node["mode"] = 4  # a bypassed node is not sent
    assert workflow.parse({"nodes": [node]}).graph(look_up) == {}


BY_HAND = (
    "'by hand' is not a choice of this ComfyUI, which has by sizes, by factor; choose one of them in the editor, or"
)
BY_HAND += " update ComfyUI"


def test_what_no_run_can_have_is_converted_and_said_together():
    """As the front ends convert it: an unknown choice brings no inputs, and the values behind it move up."""
    view = {"model_file": (["a.glb"], {}), "image": ("LOAD_3D", {}), "width": NUMBER}
    nodes = [
        {"id": 1, "type": "Resize", "widgets_values": ["by hand", 24, "yes"]},
        {"id": 2, "type": "Lost", "widgets_values": [3]},
        {"id": 3, "type": "Load3D", "widgets_values": ["a.glb", "u", "v", "clear", "", 64]},
    ]
    look_up = of_classes(Resize=RESIZE, Load3D={"required": view})
    graph = workflow.parse({"nodes": nodes}).graph(look_up)
    assert graph["1"]["inputs"] == {"how": "by hand", "method": 24}
    assert (graph["2"]["class_type"], graph["2"]["inputs"]) == ("Lost", {"UNKNOWN": 3})
    assert graph["3"]["inputs"] == {"model_file": "a.glb", "image": "", "width": 64}  # behind the view's three buttons
    graph["9"] = {"class_type": "Lost", "inputs": {"a": ["1", 0], "b": ["3", 0]}}  # so that all of them would run
    said = {(one.node, one.input): one.message for one in workflow.check(graph, look_up)}
    assert said["1", "how"] == BY_HAND
    assert "this host has no node 'Lost'; load the pack" in said["2", ""]
    assert "it sends pictures of the 3D view" in said["3", "image"] and "'Export (API)'" in said["3", "image"]
    graph["3"]["inputs"]["image"] = {"image": "threed/scene.png [temp]"}  # as an Export (API) has it
    graph["1"]["inputs"]["how"] = ["2", 0]  # a linked choice is known when it runs
    assert {one.node for one in workflow.cannot_run(graph, look_up)} == {"2", "9"}


def test_an_unknown_choice_cannot_be_set_to_another():
    """The values behind it were read without knowing its inputs."""
    look_up = of_classes(Resize=RESIZE)
    node = {"id": 1, "type": "Resize", "widgets_values": ["by hand", 24, "area"]}
    graph = workflow.parse({"nodes": [node]}).graph(look_up)
    _, problems = workflow.set_values(graph, ["1.how=by factor"], look_up)
    assert "was saved with 'by hand', which is not a choice of this ComfyUI" in str(problems[0])
    graph["1"]["inputs"]["how"] = "by sizes"
    changed, problems = workflow.set_values(graph, ["1.how=by factor"], look_up)
    assert not problems and changed["1"]["inputs"]["how"] == "by factor"


CHOICES = FOLDER.with_name("choices")
# 1.49.6 puts a choice's inputs back to their defaults when a Primitive gives the choice that the node has already, and
# keeps a Primitive's link to an input that the saved choice does not bring
OF_1_49_6 = {
    ("302", "resize_type.width"): 512,
    ("302", "resize_type.height"): 512,
    ("402", "resize_type.height"): 512,
    ("502", "resize_type.multiplier"): 4,
}


@pytest.mark.parametrize("front_end", ["1.49.6", "1.58.1"])
def test_choices_by_primitives_and_promoted_unknown_ones_and_unknown_nodes_equal_the_front_ends_export(front_end):
    expected = json.loads((CHOICES / f"choices.{front_end}.json").read_text(encoding="utf-8"))
    graph = read(str(CHOICES / "choices.editor.json")).graph(LOOK_UP)
    ours, theirs = {}, {}
    for made, nodes in ((ours, graph), (theirs, expected)):
        for node_id, node in nodes.items():
            made |= {(node_id, "class_type"): node["class_type"]}
            made |= {(node_id, name): value for name, value in node["inputs"].items()}
    assert (ours.pop(("1402", "class_type")), theirs.pop(("1402", "class_type"))) == ("Gone", None)
    if front_end == "1.49.6":
        assert {key: theirs[key] for key in OF_1_49_6} == OF_1_49_6
        theirs |= {key: ours[key] for key in OF_1_49_6}
    assert ours == theirs


def test_a_node_that_no_pack_brings_is_called_by_its_class():
    graph = workflow.parse({"nodes": [{"id": 1, "type": "Gone"}, {"id": 2, "type": "Gone", "title": "mine"}]})
    assert [node["_meta"]["title"] for node in graph.graph(LOOK_UP).values()] == ["Gone", "mine"]


def test_a_promoted_choice_has_its_own_place_among_the_options():
    """As front end 1.58.1 sends it; 1.49.6 sends the place of what was chosen inside the subgraph."""
    data = json.loads((FOLDER / "growing.editor.json").read_text(encoding="utf-8"))
    (node,) = (node for node in data["nodes"] if len(node["type"]) == 36)
    node["widgets_values"] = ["said", "blue", "p"]
    (combo,) = (node for node_id, node in workflow.parse(data).graph(LOOK_UP).items() if node_id == "24:20")
    assert (combo["inputs"]["choice"], combo["inputs"]["index"]) == ("blue", 1)


def in_a_subgraph(nodes, links, inputs, **values):
    """A workflow whose only node is a subgraph with these nodes."""
    inner = {"id": "s", "name": "s", "nodes": nodes, "links": links, "inputs": inputs}
    return {"nodes": [{"id": 1, "type": "s", **values}], "links": [], "definitions": {"subgraphs": [inner]}}


def test_the_widget_of_an_input_that_a_node_no_longer_has_takes_no_value():
    """Front ends 1.49.6 and 1.58.1 give the subgraph's values to the widgets that there are, and drop the link."""
    slots = [
        {"name": name, "type": "INT", "link": number, "widget": {"name": name}}
        for number, name in enumerate(("gone", "width"), 1)
    ]
    links = [[1, -10, 0, 5, 0, "INT"], [2, -10, 1, 5, 1, "INT"]]
    inputs = [{"name": "gone", "type": "INT"}, {"name": "width", "type": "INT"}]
    node = {"id": 5, "type": "Size", "inputs": slots, "widgets_values": [64]}
    data = in_a_subgraph([node], links, inputs, widgets_values=[8, 16])
    graph = workflow.parse(data).graph(of_classes(Size={"required": {"width": NUMBER}}))
    assert graph["1:5"]["inputs"] == {"width": 8}


def test_the_nodes_of_a_bypassed_subgraph_in_a_subgraph_are_sent():
    """As both front ends do; nothing is linked to them."""
    deep = {"id": "deep", "name": "deep", "nodes": [{"id": 7, "type": "Size"}], "links": []}
    data = in_a_subgraph([{"id": 6, "type": "deep", "mode": 4}], [], [])
    data["definitions"]["subgraphs"].append(deep)
    assert list(workflow.parse(data).graph(of_classes(Size={"required": {}}))) == ["1:6:7"]


def test_a_bypassed_node_passes_on_what_its_match_type_may_be():
    match = ("COMFY_MATCHTYPE_V3", {"template": {"template_id": "t", "allowed_types": "IMAGE,MASK"}})
    look_up = of_classes(Source={}, Either={"required": {"input": match}}, End={"required": {"image": ("IMAGE", {})}})
    nodes = [
        {"id": 1, "type": "Source", "outputs": [{"name": "o", "type": "IMAGE"}]},
        {
            "id": 2,
            "type": "Either",
            "mode": 4,
            "inputs": [{"name": "input", "type": "IMAGE,MASK", "link": 1}],
            "outputs": [{"name": "o", "type": "IMAGE"}],
        },
        {"id": 3, "type": "End", "inputs": [{"name": "image", "type": "IMAGE", "link": 2}]},
    ]
    data = {"nodes": nodes, "links": [[1, 1, 0, 2, 0, "IMAGE"], [2, 2, 0, 3, 0, "IMAGE"]]}
    assert workflow.parse(data).graph(look_up)["3"]["inputs"] == {"image": ["1", 0]}


# --- what a node costs ------------------------------------------------------------------------------------------------


def is_counted(file):
    """Whether a file reads workflows."""
    return Path(file).parent == Path(workflow.__file__).parent


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


LINK_TABLE = FOLDER.with_name("link_table")


@pytest.mark.parametrize("name", sorted(path.name.split(".")[0] for path in LINK_TABLE.glob("*.editor.json")))
def test_an_input_without_its_own_link_follows_the_table_of_links_as_1_58_1_does(name):
    graph = read(str(LINK_TABLE / f"{name}.editor.json")).graph(LOOK_UP)
    assert graph == json.loads((LINK_TABLE / f"{name}.1.58.1.json").read_text(encoding="utf-8"))


def test_a_link_of_the_table_alone_that_leads_nowhere_is_listed():
    slot = {"name": "text", "type": "STRING", "link": None}
    nodes = [{"id": 1, "type": "OddSink", "inputs": [slot]}]
    assert "linked to node 9, which is not in the file" in refused({"nodes": nodes, "links": [[6, 9, 0, 1, 0, "*"]]})
