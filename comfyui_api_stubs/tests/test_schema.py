"""The V3 schema API: what a node class says of itself in V1 terms. Holds for a real ComfyUI too."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from enum import Enum

import pytest
import torch
from comfy_api.latest import ComfyExtension, io, ui

from comfyui_api_stubs.tests.which_host import REAL


class Color(Enum):
    RED = "red"
    BLUE = "blue"


class Everything(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            "Everything",
            display_name="Every thing",
            category="test",
            description="All kinds.",
            inputs=[
                io.Model.Input("model", tooltip="a model"),
                io.Int.Input("count", default=3, min=1, max=9, step=2, control_after_generate=True),
                io.Float.Input(
                    "share", default=0.5, min=0.0, max=1.0, step=0.1, round=0.01, display_mode=io.NumberDisplay.slider
                ),
                io.String.Input(
                    "text", default="", multiline=True, placeholder="say", dynamic_prompts=False, socketless=True
                ),
                io.Boolean.Input("on", default=True, label_on="yes", label_off="no"),
                io.Combo.Input("color", options=Color, default=Color.BLUE),
                io.Combo.Input(
                    "file", options=["a", "b"], upload=io.UploadType.image, image_folder=io.FolderType.input
                ),
                io.MultiType.Input(
                    io.Float.Input("either", default=1.0), [io.Int, io.Mask], tooltip="a number or a mask"
                ),
                io.MultiType.Input("plain", [io.Image, io.Mask], optional=True),
                io.Custom("PACK_THING").Input("thing", optional=True, lazy=True, extra_dict={"own": 1}),
                io.LoraModel.Input("lora", optional=True),
                io.AnyType.Input("any", optional=True),
            ],
            outputs=[
                io.Model.Output(),
                io.Custom("PACK_THING").Output(display_name="thing out", tooltip="the thing"),
                io.Int.Output(is_output_list=True),
                io.LossMap.Output(),
            ],
            hidden=[io.Hidden.unique_id],
            is_output_node=True,
            not_idempotent=True,
        )

    @classmethod
    def execute(cls, **inputs):
        return io.NodeOutput(1, 2, [3], {"loss": []}, ui=ui.PreviewText("done"))


def test_v1_view():
    spec = Everything.INPUT_TYPES()
    required, optional = spec["required"], spec["optional"]
    assert list(required) == ["model", "count", "share", "text", "on", "color", "file", "either"]
    assert required["model"] == ("MODEL", {"tooltip": "a model"})
    assert required["count"] == ("INT", {"default": 3, "min": 1, "max": 9, "step": 2, "control_after_generate": True})
    assert required["share"] == (
        "FLOAT",
        {"default": 0.5, "min": 0.0, "max": 1.0, "step": 0.1, "round": 0.01, "display": "slider"},
    )
    text = {"default": "", "multiline": True, "placeholder": "say", "dynamicPrompts": False, "socketless": True}
    assert required["text"] == ("STRING", text)
    assert required["on"] == ("BOOLEAN", {"default": True, "label_on": "yes", "label_off": "no"})
    assert required["color"] == ("COMBO", {"default": "blue", "multiselect": False, "options": ["red", "blue"]})
    assert required["file"][1] == {
        "multiselect": False,
        "options": ["a", "b"],
        "image_upload": True,
        "image_folder": "input",
    }
    assert required["either"][0] == "FLOAT,INT,MASK" and required["either"][1]["default"] == 1.0
    assert required["either"][1]["tooltip"] == "a number or a mask" and required["either"][1]["widgetType"] == "FLOAT"
    assert optional["plain"] == ("IMAGE,MASK", {}) and optional["thing"] == ("PACK_THING", {"lazy": True, "own": 1})
    assert [optional[name][0] for name in ("lora", "any")] == ["LORA_MODEL", "*"]
    assert spec["hidden"] == {name: (name.upper(),) for name in ("unique_id", "prompt", "extra_pnginfo")}


def test_class_attributes():
    assert list(Everything.RETURN_TYPES) == ["MODEL", "PACK_THING", "INT", "LOSS_MAP"]
    assert list(Everything.RETURN_NAMES) == ["MODEL", "thing out", "INT", "LOSS_MAP"]
    assert list(Everything.OUTPUT_IS_LIST) == [False, False, True, False]
    assert list(Everything.OUTPUT_TOOLTIPS) == [None, "the thing", None, None]
    assert (Everything.FUNCTION, Everything.CATEGORY, Everything.DESCRIPTION) == (
        "EXECUTE_NORMALIZED",
        "test",
        "All kinds.",
    )
    assert Everything.OUTPUT_NODE is True and Everything.INPUT_IS_LIST is False and Everything.NOT_IDEMPOTENT is True


def test_object_info():
    info = Everything.GET_NODE_INFO_V1()
    assert info["name"] == "Everything" and info["display_name"] == "Every thing" and info["output_node"] is True
    assert info["input_order"]["optional"] == ["plain", "thing", "lora", "any"]
    assert info["output"] == ["MODEL", "PACK_THING", "INT", "LOSS_MAP"] and info["experimental"] is False


def test_search_aliases_where_the_host_has_them():
    if "search_aliases" in {field.name for field in dataclasses.fields(io.Schema)}:
        schema = io.Schema(node_id="X", search_aliases=["lora"])
        assert schema.get_v1_info(Everything).search_aliases == ["lora"]
    else:
        assert REAL


@pytest.mark.parametrize(("inputs", "outputs"), [((["a", "a"]), []), ([], ["a", "a"])])
def test_ids_are_unique(inputs, outputs):
    schema = io.Schema(
        node_id="X", inputs=[io.Int.Input(key) for key in inputs], outputs=[io.Int.Output(key) for key in outputs]
    )
    with pytest.raises(ValueError, match="must be unique"):
        schema.validate()


def test_an_id_of_both_an_input_and_an_output():
    schema = io.Schema(node_id="X", inputs=[io.Int.Input("a")], outputs=[io.Int.Output("a")])
    if hasattr(io, "Autogrow"):
        schema.validate()
    else:
        assert REAL, "0.3.64 refuses it"
        with pytest.raises(ValueError, match="between inputs and outputs"):
            schema.validate()


def test_outputs_get_ids():
    schema = io.Schema(node_id="X", outputs=[io.Int.Output(), io.Int.Output()])
    schema.finalize()
    assert [output.id for output in schema.outputs] == ["_0_INT_", "_1_INT_"]


def with_execute(returned):
    return type("Returning", (Everything,), {"execute": classmethod(lambda cls, **inputs: returned)})


def test_return_values_are_normalized():
    Everything.GET_SCHEMA()
    assert with_execute((1, 2)).EXECUTE_NORMALIZED().result == (1, 2)
    assert with_execute(None).EXECUTE_NORMALIZED().result is None
    output = with_execute(io.NodeOutput(5, ui={"text": ["x"]})).EXECUTE_NORMALIZED()
    assert output[0] == 5 and output.ui == {"text": ["x"]}
    with pytest.raises(Exception, match="Invalid return type"):
        with_execute("text").EXECUTE_NORMALIZED()
    with pytest.raises(Exception, match="not expandable"):
        with_execute(io.NodeOutput(expand={})).EXECUTE_NORMALIZED()


def test_a_class_without_execute_is_refused():
    nothing = type("Nothing", (io.ComfyNode,), {"define_schema": Everything.define_schema})
    with pytest.raises(Exception, match="No execute function"):
        nothing.GET_SCHEMA()


def test_clones_do_not_reach_the_class():
    clone = Everything.PREPARE_CLASS_CLONE(None)
    assert clone.hidden.unique_id is None and clone.hidden.anything is None
    clone.note = 1
    assert not hasattr(Everything, "note") and issubclass(clone, Everything)


def test_types_know_their_sockets():
    thing = io.Custom("A_THING")
    assert thing.io_type == "A_THING" and thing.Input("x").io_type == "A_THING" and thing.Output().io_type == "A_THING"
    assert io.Int.Input("x").io_type == "INT", "making a custom type leaves the others alone"


def test_extension_lists_nodes():
    class Mine(ComfyExtension):
        async def get_node_list(self):
            return [Everything]

    assert asyncio.new_event_loop().run_until_complete(Mine().get_node_list()) == [Everything]


def test_preview_images_are_written_to_temp(host):
    shown = ui.PreviewImage(torch.rand(2, 4, 6, 3), cls=None).as_dict()
    assert len(shown["images"]) == 2 and shown["images"][0]["type"] == "temp" and shown["animated"] == (False,)
    for saved in shown["images"]:
        assert os.path.isfile(os.path.join(host.temp, saved["subfolder"], saved["filename"]))


def test_saved_images_go_on_counting(host):
    first = ui.ImageSaveHelper.get_save_images_ui(torch.rand(1, 4, 6, 3), "schema/picture", cls=None).as_dict()[
        "images"
    ]
    second = ui.ImageSaveHelper.get_save_images_ui(torch.rand(1, 4, 6, 3), "schema/picture", cls=None).as_dict()[
        "images"
    ]
    assert [saved["filename"] for saved in (*first, *second)] == ["picture_00001_.png", "picture_00002_.png"]
    assert first[0]["subfolder"] == "schema" and first[0]["type"] == "output"
