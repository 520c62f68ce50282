"""A pack with types, as its author writes it: nodes of both kinds, and the parts of ComfyUI that packs call."""

from __future__ import annotations

from typing import Any

import comfy.model_management
import comfy.sd
import comfy.utils
import folder_paths
import torch
from comfy.comfy_types import IO as Sockets
from comfy.comfy_types import ComfyNodeABC, InputTypeDict
from comfy_api.latest import ComfyExtension, Input, InputImpl, Types, io, ui
from comfy_execution.graph_utils import GraphBuilder
from server import PromptServer


class Blend(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            "Blend",
            display_name="Blend",
            category="test",
            inputs=[
                io.Image.Input("a", tooltip="The first picture."),
                io.Image.Input("b", optional=True, lazy=True),
                io.Float.Input(
                    "amount", default=0.5, min=0.0, max=1.0, step=0.01, display_mode=io.NumberDisplay.slider
                ),
                io.Combo.Input("mode", options=["add", "mix"], default="mix"),
                io.Int.Input("seed", default=0, control_after_generate=True),
                io.String.Input("text", multiline=True),
                io.Boolean.Input("on", default=True),
                io.Custom("MY_TYPE").Input("mine", optional=True),
                io.MultiType.Input("any", [io.Image, io.Mask], optional=True),
                io.Autogrow.Input("images", io.Autogrow.TemplatePrefix(io.Image.Input("image"), "image", min=1, max=4)),
            ],
            outputs=[io.Image.Output(display_name="picture"), io.Int.Output("count")],
            hidden=[io.Hidden.unique_id, io.Hidden.prompt],
            is_output_node=True,
        )

    @classmethod
    def validate_inputs(cls, amount: float) -> bool | str:
        return amount < 1 or "amount must be below 1"

    @classmethod
    def fingerprint_inputs(cls, seed: int, **kwargs: Any) -> int:
        return seed

    @classmethod
    def check_lazy_status(cls, a: torch.Tensor, b: torch.Tensor | None = None, **kwargs: Any) -> list[str]:
        return ["b"] if b is None else []

    @classmethod
    def execute(cls, a: torch.Tensor, amount: float, b: torch.Tensor | None = None, **kwargs: Any) -> io.NodeOutput:
        latent: io.Latent.Type = {"samples": a}
        count = latent["samples"].shape[0]
        return io.NodeOutput(a * amount, count, ui=ui.PreviewText(str(cls.hidden.unique_id)))


class Later(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema("Later", inputs=[io.Video.Input("video")], outputs=[io.Video.Output()])

    @classmethod
    async def execute(cls, video: Input.Video) -> io.NodeOutput:
        width, height = video.get_dimensions()
        pictures: Input.Image = torch.zeros(1, height, width, 3)
        parts = Types.VideoComponents(images=pictures, audio=None, frame_rate=video.get_components().frame_rate)
        return io.NodeOutput(InputImpl.VideoFromComponents(parts))


class Old(ComfyNodeABC):
    RETURN_TYPES = (Sockets.MODEL, "MY_TYPE")
    FUNCTION = "run"
    CATEGORY = "test"

    @classmethod
    def INPUT_TYPES(cls) -> InputTypeDict:
        loras = folder_paths.get_filename_list("loras")
        return {
            "required": {
                "model": (Sockets.MODEL,),
                "lora": (loras,),
                "mode": (["add", "mix"], {"default": "mix"}),
                "own": ("MY_TYPE", {"lazy": True}),
                "steps": (Sockets.INT, {"default": 1, "min": 0, "tooltip": "How often."}),
            },
            "hidden": {"unique_id": "UNIQUE_ID"},
        }

    def run(self, model: Any, lora: str, steps: int) -> tuple[Any]:
        bar = comfy.utils.ProgressBar(steps)
        for _ in range(steps):
            comfy.model_management.throw_exception_if_processing_interrupted()
            bar.update(1)
        weights = comfy.utils.load_torch_file(folder_paths.get_full_path_or_raise("loras", lora), safe_load=True)
        device: torch.device = comfy.model_management.get_torch_device()
        PromptServer.instance.send_sync("old.ran", {"device": str(device), "weights": len(weights)})
        return (comfy.sd.load_lora_for_models(model, None, weights, 1.0, 0.0)[0],)

    def expand(self, model: Any) -> dict[str, Any]:
        graph = GraphBuilder()
        first = graph.node("KSampler", model=model)
        return {"result": (first.out(0),), "expand": graph.finalize()}


class Extension(ComfyExtension):
    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [Blend, Later]


async def comfy_entrypoint() -> Extension:
    return Extension()
