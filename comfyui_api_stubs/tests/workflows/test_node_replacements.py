"""Nodes that ComfyUI replaced: in both formats the new node has the old one's values and links, as ComfyUI's server and
front end give them.
"""

from types import SimpleNamespace

import pytest

from comfyui_api_stubs.workflows import node_replacements, workflow
from comfyui_api_stubs.workflows.schema import catalogue

TOLD = {  # as GET /node_replacements of ComfyUI 0.33.0 says it
    "ResizeImagesByLongerEdge": [
        {
            "new_node_id": "ImageScaleToMaxDimension",
            "old_node_id": "ResizeImagesByLongerEdge",
            "old_widget_ids": ["longer_edge"],
            "input_mapping": [
                {"new_id": "image", "old_id": "images"},
                {"new_id": "largest_size", "old_id": "longer_edge"},
                {"new_id": "upscale_method", "set_value": "lanczos"},
            ],
            "output_mapping": [{"new_idx": 1, "old_idx": 0}],
        }
    ],
    "ImageBatch": [
        {
            "new_node_id": "BatchImagesNode",
            "old_node_id": "ImageBatch",
            "old_widget_ids": None,
            "input_mapping": [
                {"new_id": "images.image0", "old_id": "image1"},
                {"new_id": "images.image1", "old_id": "image2"},
            ],
            "output_mapping": None,
        }
    ],
    "T2IAdapterLoader": [
        {
            "new_node_id": "ControlNetLoader",
            "old_node_id": "T2IAdapterLoader",
            "old_widget_ids": None,
            "input_mapping": [{"new_id": "control_net_name", "old_id": "t2i_adapter_name"}],
            "output_mapping": None,
        }
    ],
}
SERVER = SimpleNamespace(node_replace_manager=SimpleNamespace(as_dict=lambda: TOLD))


def of(outputs=("IMAGE",), output_node=False, **inputs):
    return type(
        "Node",
        (),
        {"INPUT_TYPES": lambda: {"required": inputs}, "RETURN_TYPES": outputs, "OUTPUT_NODE": output_node},
    )


GROWN = {"template": {"input": {"required": {"image": ("IMAGE",)}}}}
CLASSES = {
    "Source": of(text=("STRING", {"default": "t"})),
    "Sink": of((), True, image=("IMAGE",)),
    "ConditioningAverage": of(
        ("CONDITIONING",),
        conditioning_to=("CONDITIONING",),
        conditioning_from=("CONDITIONING",),
        conditioning_to_strength=("FLOAT", {"default": 1.0}),
    ),
    "ImageScaleToMaxDimension": of(
        ("MASK", "IMAGE"),
        image=("IMAGE",),
        upscale_method=(["area", "lanczos"],),
        largest_size=("INT", {"default": 512}),
    ),
    "BatchImagesNode": of(images=("COMFY_AUTOGROW_V3", GROWN)),
    "ControlNetLoader": of(("CONTROL_NET",), control_net_name=(["a", "b"],)),
}
LOOK_UP = catalogue(CLASSES, {})


def translated(data, look_up=LOOK_UP, server=SERVER):
    document = workflow.parse(data)
    document, made = node_replacements.replaced(document, node_replacements.of_host(server), look_up)
    nodes = document.graph(look_up)
    return {key: (node["class_type"], node["inputs"]) for key, node in nodes.items()}, made, document


def test_a_renamed_node_keeps_its_inputs_in_both_formats():
    inputs = {"conditioning_to": ["8", 0], "conditioning_from": ["9", 0], "conditioning_to_strength": 0.3}
    node = {"class_type": "ConditioningAverage ", "inputs": inputs}
    nodes, made, document = translated({"1": node})
    assert nodes == {"1": ("ConditioningAverage", inputs)} and made == {"ConditioningAverage ": "ConditioningAverage"}
    assert document.class_types() == {"ConditioningAverage"} and node["class_type"] == "ConditioningAverage "
    slots = [{"name": f"conditioning_{end}", "type": "CONDITIONING", "link": None} for end in ("to", "from")]
    data = {"nodes": [{"id": 1, "type": "ConditioningAverage ", "inputs": slots, "widgets_values": [0.3]}], "links": []}
    nodes, _, _ = translated(data)
    assert nodes == {"1": ("ConditioningAverage", {"conditioning_to_strength": 0.3})}
    assert data["nodes"][0]["type"] == "ConditioningAverage "


def test_inputs_values_and_outputs_are_mapped_in_api_format():
    scale = {"class_type": "ResizeImagesByLongerEdge", "inputs": {"images": ["1", 0], "longer_edge": 640}}
    graph = {"1": {"class_type": "Source", "inputs": {}}, "2": scale}
    graph["3"] = {"class_type": "Sink", "inputs": {"image": ["2", 0]}}
    nodes, _, _ = translated(graph)
    wanted = {"image": ["1", 0], "largest_size": 640, "upscale_method": "lanczos"}
    assert nodes["2"] == ("ImageScaleToMaxDimension", wanted)
    assert nodes["3"] == ("Sink", {"image": ["2", 1]})


@pytest.mark.parametrize("inside", [False, True])
def test_inputs_values_and_outputs_are_mapped_in_the_editor_s_format(inside):
    scale = {
        "id": 2,
        "type": "ResizeImagesByLongerEdge",
        "inputs": [
            {"name": "images", "type": "IMAGE", "link": 1},
            {"name": "longer_edge", "type": "INT", "widget": {"name": "longer_edge"}, "link": None},
        ],
        "widgets_values": [640],
    }
    nodes = [
        {"id": 1, "type": "Source", "outputs": [{"type": "IMAGE"}]},
        scale,
        {"id": 3, "type": "Sink", "inputs": [{"name": "image", "type": "IMAGE", "link": 2}]},
    ]
    links = [[1, 1, 0, 2, 0, "IMAGE"], [2, 2, 0, 3, 0, "IMAGE"]]
    data, prefix = {"nodes": nodes, "links": links}, ""
    if inside:
        keys = ("id", "origin_id", "origin_slot", "target_id", "target_slot", "type")
        linked = [dict(zip(keys, link, strict=True)) for link in links]
        definition = {"id": "s", "name": "s", "nodes": nodes, "links": linked}
        data, prefix = (
            {"nodes": [{"id": 9, "type": "s"}], "links": [], "definitions": {"subgraphs": [definition]}},
            "9:",
        )
    found, _, _ = translated(data)
    wanted = {"image": [f"{prefix}1", 0], "largest_size": 640, "upscale_method": "lanczos"}
    assert found[f"{prefix}2"] == ("ImageScaleToMaxDimension", wanted)
    assert found[f"{prefix}3"] == ("Sink", {"image": [f"{prefix}2", 1]})


def test_links_go_into_inputs_that_grow():
    slots = [{"name": f"image{number}", "type": "IMAGE", "link": number} for number in (1, 2)]
    nodes = [{"id": 1, "type": "Source"}, {"id": 2, "type": "ImageBatch", "inputs": slots}]
    links = [[1, 1, 0, 2, 0, "IMAGE"], [2, 1, 0, 2, 1, "IMAGE"]]
    found, _, _ = translated({"nodes": nodes, "links": links})
    assert found["2"] == ("BatchImagesNode", {"images.image0": ["1", 0], "images.image1": ["1", 0]})


@pytest.mark.parametrize("server", [SERVER, SimpleNamespace()])
def test_a_loader_s_saved_value_has_its_new_name(server):
    data = {"nodes": [{"id": 1, "type": "T2IAdapterLoader", "widgets_values": ["b"]}], "links": []}
    assert translated(data, server=server)[0] == {"1": ("ControlNetLoader", {"control_net_name": "b"})}


def test_a_class_that_the_host_has_or_whose_replacement_it_lacks_stays():
    node = {"1": {"class_type": "ConditioningAverage ", "inputs": {"a": 1}}}
    has_it = catalogue({**CLASSES, "ConditioningAverage ": CLASSES["Source"]}, {})
    lacks_it = catalogue({"Source": CLASSES["Source"]}, {})
    for look_up in (has_it, lacks_it):
        nodes, made, _ = translated(node, look_up)
        assert nodes == {"1": ("ConditioningAverage ", {"a": 1})} and not made


@pytest.mark.parametrize("data", [{"nodes": [3], "links": {}}, {"nodes": [{"id": 1}], "links": [3, None, [1]]}])
def test_what_is_no_workflow_is_left_to_the_reader(data):
    document = workflow.Document("w", data, True)
    again, made = node_replacements.replaced(document, node_replacements.of_host(SERVER), LOOK_UP)
    assert again.data == data and not made
