"""ApplyToDo: token downsampling of a model's self-attention (arXiv 2402.13573)."""

from __future__ import annotations

from comfy_api.latest import io

from .. import host
from ..patches.token_downsampling import report
from ..patches.token_downsampling.tokens import MAX_DEPTH, MAX_FACTOR, METHODS, PHASES, ToDoSettings
from .aliases import aliases


class ApplyToDo(io.ComfyNode):
    """Thins the keys and values of spatial self-attention; queries, and so the picture's detail, stay."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ApplyToDo",
            display_name="Apply ToDo (Token Downsampling)",
            category="Graft/model",
            description=(
                "Makes self-attention cheaper, for sampling and for training: keys and values are taken from a smaller"
                " token grid, queries are kept. Factor 2 leaves a quarter of the tokens. The bigger the picture, the"
                " bigger the gain."
            ),
            **aliases("todo", "token downsampling", "token merging", "tome", "faster attention", "speed"),
            inputs=[
                io.Model.Input(
                    "model",
                    tooltip=(
                        "A UNet (SD1.x, SD2, SDXL …) or a transformer: Flux, Chroma, SD3, Qwen-Image, Lumina 2,"
                        " Z-Image, Wan, Cosmos and Anima."
                    ),
                ),
                io.Float.Input(
                    "factor",
                    default=2.0,
                    min=1.0,
                    max=MAX_FACTOR,
                    step=0.1,
                    tooltip=(
                        "How much smaller each side of the key/value grid gets: 2 keeps 1/4 of the tokens, 4 keeps"
                        " 1/16; 1 is off."
                    ),
                ),
                io.Int.Input(
                    "max_depth",
                    default=1,
                    min=1,
                    max=MAX_DEPTH,
                    tooltip=(
                        "How many levels to thin, from the finest one that has attention on. SD1.x has 4, SDXL 2, a"
                        " transformer 1."
                    ),
                ),
                io.String.Input(
                    "depth_factors",
                    default="",
                    tooltip="One factor a depth, such as '4 2'; overrides factor and max_depth when not empty.",
                ),
                io.Combo.Input(
                    "method",
                    options=list(METHODS),
                    default=METHODS[0],
                    tooltip=(
                        "Which token stands for its neighbours: the middle one (nearest-exact), the first (nearest),"
                        " their mean (area), or half nearest and half mean (blend)."
                    ),
                ),
                io.Float.Input(
                    "start_percent",
                    default=0.0,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    tooltip=(
                        "Share of sampling after which thinning begins. Not used while training, where each sample has"
                        " its own noise level."
                    ),
                ),
                io.Float.Input(
                    "end_percent",
                    default=1.0,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    tooltip="Share of sampling after which thinning ends. Not used while training.",
                ),
                io.Combo.Input(
                    "phase",
                    options=list(PHASES),
                    default=PHASES[0],
                    tooltip=(
                        "When it works: while training, while sampling, or both. Train Step's own validation and"
                        " previews are not thinned unless you choose sampling."
                    ),
                ),
                io.Float.Input(
                    "disable_after",
                    default=0.0,
                    min=0.0,
                    max=1_000_000.0,
                    step=0.05,
                    tooltip=(
                        "Training only: switch off after this share of the run (below 1) or after this many steps; 0 is"
                        " never."
                    ),
                ),
                io.Latent.Input(
                    "latent",
                    optional=True,
                    tooltip="Only for the report: token counts are those of this latent's size.",
                ),
            ],
            outputs=[io.Model.Output(display_name="MODEL"), io.String.Output(display_name="report")],
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
        settings = ToDoSettings.parse(
            factor, max_depth, depth_factors, method, start_percent, end_percent, phase, disable_after
        )
        patched, todo, notes = host.token_downsampling.apply_todo(model, settings)
        if latent is None:
            shape = None
        else:
            shape = tuple(host.latents.sampled(model, latent).shape)
        data = report.report_data(todo, shape, notes)
        return io.NodeOutput(patched, data["text"], ui={"graft_todo": [data]})


NODES = [ApplyToDo]
