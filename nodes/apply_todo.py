"""ApplyToDo: token downsampling of a model's self-attention (arXiv 2402.13573). ApplyTREAD: tokens that skip blocks
while training (arXiv 2501.04765).
"""

from __future__ import annotations

from comfy_api.latest import io

from .. import host
from ..patches.token_downsampling.tokens import MAX_DEPTH, MAX_FACTOR, METHODS, PHASES, ToDoSettings
from .refusals import refusal
from .schema import GraftNode, advanced, aliases


class ApplyToDo(GraftNode):
    """Thins the keys and values of spatial self-attention; queries, and so the picture's detail, stay."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ApplyToDo",
            display_name="Apply ToDo (Token Downsampling)",
            category="Graft/model",
            description=(
                "Makes self-attention faster, in sampling and in training. Keys and values come from a"
                " smaller token grid; queries stay as they are, so the image keeps its resolution. Factor"
                " 2 keeps a quarter of the tokens. The larger the image, the larger the gain."
            ),
            **aliases("todo", "token downsampling", "token merging", "tome", "faster attention", "speed"),
            inputs=[
                io.Model.Input(
                    "model",
                    tooltip=(
                        "The model to speed up: a UNet (SD1.x, SD2.x, SDXL, SDXL's refiner) or a transformer (Chroma,"
                        " Flux 2, Flux, SD3, Qwen-Image, Cosmos or Anima, Wan, Lumina 2, Z-Image)."
                    ),
                ),
                io.Float.Input(
                    "factor",
                    display_name="downsampling factor",
                    default=2.0,
                    min=1.0,
                    max=MAX_FACTOR,
                    step=0.1,
                    tooltip=(
                        "How much smaller each side of the key/value grid becomes. 2 keeps 1/4 of the tokens, 4"
                        " keeps 1/16, 1 is off. Raise it for large images, lower it if detail suffers."
                    ),
                ),
                io.Int.Input(
                    "max_depth",
                    display_name="maximum depth",
                    default=1,
                    min=1,
                    max=MAX_DEPTH,
                    tooltip=(
                        "How many attention levels to downsample, starting at the finest. SD1.x has 4, SDXL 2, a"
                        " transformer 1. 1 is usually enough."
                    ),
                ),
                advanced(
                    io.String,
                    "depth_factors",
                    display_name="factors by depth",
                    default="",
                    tooltip=(
                        "One factor for each depth, such as '4 2'. Overrides factor and maximum depth. Leave"
                        " empty to use those."
                    ),
                ),
                advanced(
                    io.Combo,
                    "method",
                    display_name="downsampling method",
                    options=list(METHODS),
                    default=METHODS[0],
                    tooltip=(
                        "Which token stands for its neighbors: nearest-exact takes the middle one, nearest the"
                        " first, area their mean, blend half nearest and half mean. Keep nearest-exact unless you"
                        " compare."
                    ),
                ),
                advanced(
                    io.Float,
                    "start_percent",
                    display_name="start",
                    default=0.0,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    tooltip=(
                        "Sampling only: downsample from this fraction of the steps on. Raise it above 0 if the"
                        " composition changes too much. Training ignores it, because every image there has its"
                        " own noise level."
                    ),
                ),
                advanced(
                    io.Float,
                    "end_percent",
                    display_name="end",
                    default=1.0,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    tooltip=(
                        "Sampling only: stop downsampling at this fraction of the steps. Try 0.7 to get fine"
                        " detail back. Training ignores it."
                    ),
                ),
                advanced(
                    io.Combo,
                    "phase",
                    display_name="active during",
                    options=list(PHASES),
                    default=PHASES[0],
                    tooltip=(
                        "When to downsample: during training, during sampling, or both. Train Step's own"
                        " validation and previews run on the whole model unless you choose sampling."
                    ),
                ),
                advanced(
                    io.Float,
                    "disable_after",
                    display_name="disable after",
                    default=0.0,
                    min=0.0,
                    max=1_000_000.0,
                    step=0.05,
                    tooltip=(
                        "Training only: switch off after this fraction of the run (below 1) or after this many"
                        " steps (1 and above). 0 never switches off."
                    ),
                ),
                io.Latent.Input(
                    "latent",
                    optional=True,
                    tooltip="Only for the report: it shows the token counts for a latent of this size.",
                ),
            ],
            outputs=[io.Model.Output(display_name="MODEL"), io.String.Output(display_name="report")],
        )

    @classmethod
    def validate_inputs(cls, depth_factors=None, start_percent=None, end_percent=None) -> bool | str:
        return refusal(
            cls,
            ToDoSettings.parse,
            ("depth_factors",),
            ("start_percent", "end_percent"),
            depth_factors=depth_factors,
            start_percent=start_percent,
            end_percent=end_percent,
        )

    @classmethod
    def execute(
        cls,
        model,
        factor=2.0,
        max_depth=1,
        depth_factors="",
        method="nearest-exact",
        start_percent=0.0,
        end_percent=1.0,
        phase="both",
        disable_after=0.0,
        latent=None,
    ) -> io.NodeOutput:
        from ..patches.token_downsampling.report import report_data

        settings = ToDoSettings.parse(
            factor, max_depth, depth_factors, method, start_percent, end_percent, phase, disable_after
        )
        patched, todo, notes = host.token_downsampling.apply_todo(model, settings)
        if latent is None:
            shape = None
        else:
            shape = tuple(host.latents.sampled(model, latent).shape)
        data = report_data(todo, shape, notes)
        return io.NodeOutput(patched, data["text"], ui={"graft_todo": [data]})


class ApplyTREAD(GraftNode):
    """Lets part of the image's tokens skip a span of blocks while training; sampling stays whole."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ApplyTREAD",
            display_name="Apply TREAD (Token Routing)",
            category="Graft/model",
            description=(
                "Makes training faster: in every step a random part of the image's tokens skips a span of blocks and"
                " comes back behind them. Previews, validation and sampling run on the whole model. Works together"
                " with Apply ToDo."
            ),
            **aliases("tread", "token routing", "skip tokens", "faster training", "speed"),
            inputs=[
                io.Model.Input(
                    "model",
                    tooltip=(
                        "The model to train: a UNet or a transformer of any family but ACE-Step 1 and Stable Cascade."
                    ),
                ),
                io.Float.Input(
                    "ratio",
                    display_name="skip ratio",
                    default=0.5,
                    min=0.0,
                    max=0.95,
                    step=0.05,
                    tooltip=(
                        "The part of the tokens that skips the blocks (SimpleTuner's selection_ratio). 0 is off. Higher"
                        " is faster, and each step learns from less of the image."
                    ),
                ),
                io.Int.Input(
                    "start_layer",
                    display_name="start layer",
                    default=2,
                    min=-1000,
                    max=1000,
                    tooltip=(
                        "The first block that tokens skip, counted from 0 (SimpleTuner's start_layer_index). UNets"
                        " take all transformer blocks at their greatest width instead."
                    ),
                ),
                io.Int.Input(
                    "end_layer",
                    display_name="end layer",
                    default=-2,
                    min=-1000,
                    max=1000,
                    tooltip=(
                        "The last block that tokens skip. Negative numbers count from the end: -2 leaves the last block"
                        " whole."
                    ),
                ),
                advanced(
                    io.Float,
                    "disable_after",
                    display_name="disable after",
                    default=0.0,
                    min=0.0,
                    max=1_000_000.0,
                    step=0.05,
                    tooltip=(
                        "Switch off after this fraction of the run (below 1) or after this many steps (1 and above), so"
                        " that training ends on the whole model. 0 never switches off."
                    ),
                ),
            ],
            outputs=[io.Model.Output(display_name="MODEL"), io.String.Output(display_name="report")],
        )

    @classmethod
    def validate_inputs(cls, start_layer=None, end_layer=None) -> bool | str:
        from ..patches.token_routing.settings import RoutingSettings

        return refusal(cls, RoutingSettings.parse, start_layer=start_layer, end_layer=end_layer)

    @classmethod
    def execute(cls, model, ratio=0.5, start_layer=2, end_layer=-2, disable_after=0.0) -> io.NodeOutput:
        from ..host import token_routing
        from ..patches.token_routing.report import report
        from ..patches.token_routing.settings import RoutingSettings

        settings = RoutingSettings.parse(ratio, start_layer, end_layer, disable_after)
        patched, plan, replaced = token_routing.apply_routing(model, settings)
        return io.NodeOutput(patched, report(settings, plan, replaced))


NODES = [ApplyToDo, ApplyTREAD]
