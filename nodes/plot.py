"""GraftLossPlot: a training's losses as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from comfy_api.latest import io

from .schema import GraftNode, LossMap, search_aliases


class GraftLossPlot(GraftNode):
    """Draws every loss faintly and the smoothed curve on top."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="GraftLossPlot",
            display_name="Loss Plot",
            category="Graft/training",
            description=(
                "Draws the loss of a training run as an image: every step in a pale color, with the smoothed curve on"
                " top."
            ),
            **search_aliases("loss plot", "loss graph", "training curve", "loss curve"),
            inputs=[
                LossMap.Input("loss", tooltip="From Train Step or ComfyUI's own trainer."),
                io.Float.Input(
                    "smoothing",
                    display_name="smoothing",
                    default=0.9,
                    min=0.0,
                    max=0.999,
                    step=0.01,
                    tooltip=(
                        "How much the curve is smoothed. 0 shows the raw loss; 0.9 averages about ten steps."
                        " Raise it for long, noisy runs."
                    ),
                ),
            ],
            outputs=[io.Image.Output(display_name="IMAGE")],
        )

    @classmethod
    def execute(cls, loss: Mapping[str, Sequence[float]], smoothing: float = 0.9) -> io.NodeOutput:
        from ..training.reports.curves import PALE, Curve, draw, smooth

        values = [float(value) for value in loss.get("loss", ())]
        if not values:
            raise ValueError("There are no losses to plot: the LOSS_MAP is empty. Train at least one step.")
        curves = [
            Curve(values, PALE, "every step"),
            Curve(smooth(values, smoothing), name=f"smoothed ({smoothing:g})"),
        ]
        return io.NodeOutput(draw(curves if smoothing else curves[:1], f"{len(values)} steps", "step", "loss"))


NODES = [GraftLossPlot]
