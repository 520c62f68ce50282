"""ApplyToDo: token downsampling of a model's self-attention (arXiv 2402.13573). ApplyTREAD: tokens that skip blocks
while training (arXiv 2501.04765).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from comfy_api.latest import io

from .. import host
from ..patches.token_downsampling.tokens import ToDoSettings
from ..patches.token_routing.settings import RoutingSettings
from .schema import GraftNode, inputs_of, search_aliases

if TYPE_CHECKING:
    from ..host.comfyui_objects import Latent, Model


class ApplyToDo(GraftNode):
    """Thins the keys and values of spatial self-attention; queries, and so the picture's detail, stay."""

    settings_class = ToDoSettings
    checked_together = (("depth_factors",), ("start_percent", "end_percent"))

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ApplyToDo",
            display_name="Apply ToDo (Token Downsampling)",
            category="Graft/model",
            description=(
                "Makes self-attention faster, in sampling and in training. Keys and values come from a smaller token"
                " grid; the queries stay complete, so the image keeps its resolution. Factor 2 keeps a quarter of the"
                " tokens. The larger the image, the larger the gain."
            ),
            **search_aliases("todo", "token downsampling", "token merging", "tome", "faster attention", "speed"),
            inputs=[
                io.Model.Input(
                    "model",
                    tooltip=(
                        "The model to speed up: a UNet (SD1.x, SD2.x, SDXL, SDXL's refiner) or a transformer (Chroma,"
                        " Flux 2, Flux, SD3, Qwen-Image, Cosmos or Anima, Wan, Lumina 2, Z-Image)."
                    ),
                ),
                *inputs_of(cls.settings_class),
                io.Latent.Input(
                    "latent",
                    optional=True,
                    tooltip="Only for the report: it shows the token counts for a latent of this size.",
                ),
            ],
            outputs=[io.Model.Output(display_name="MODEL"), io.String.Output(display_name="report")],
        )

    @classmethod
    def execute(cls, model: Model, chosen: ToDoSettings, latent: Latent | None = None) -> io.NodeOutput:
        from ..patches.token_downsampling.report import report_data

        patched, todo, notes = host.token_downsampling.apply_todo(model, chosen)
        shape = None if latent is None else tuple(host.latents.prepare_latent(model, latent).shape)
        data = report_data(todo, shape, notes)
        return io.NodeOutput(patched, data["text"], ui={"graft_todo": [data]})


class ApplyTREAD(GraftNode):
    """Lets part of the image's tokens skip a span of blocks while training; sampling stays whole."""

    settings_class = RoutingSettings
    checked_together = (("start_layer", "end_layer"),)

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ApplyTREAD",
            display_name="Apply TREAD (Token Routing)",
            category="Graft/model",
            description=(
                "Makes training faster: in every step a random part of the image's tokens skips some of the blocks"
                " and comes back after them. Previews, validation and sampling run on the whole model. Works together"
                " with Apply ToDo."
            ),
            **search_aliases("tread", "token routing", "skip tokens", "faster training", "speed"),
            inputs=[
                io.Model.Input(
                    "model",
                    tooltip=(
                        "The model to train: a UNet or a transformer of any family but ACE-Step 1 and Stable Cascade."
                    ),
                ),
                *inputs_of(cls.settings_class),
            ],
            outputs=[io.Model.Output(display_name="MODEL"), io.String.Output(display_name="report")],
        )

    @classmethod
    def execute(cls, model: Model, chosen: RoutingSettings) -> io.NodeOutput:
        from ..host import token_routing
        from ..patches.token_routing.report import report

        patched, plan, replaced = token_routing.apply_routing(model, chosen)
        return io.NodeOutput(patched, report(chosen, plan, replaced))


NODES = [ApplyToDo, ApplyTREAD]
