"""EMAMerge: averaged weights into a model."""

from __future__ import annotations

from comfy_api.latest import io

from .. import host
from .aliases import aliases

TrainState = io.Custom("TRAIN_STATE")
Snapshots = io.Custom("GRAFT_SNAPSHOTS")
LoraStack = io.Custom("LORA_STACK")
LoraModel = io.Custom("LORA_MODEL")
_LATER = "is not available in this version of Graft"


class EMAMerge(io.ComfyNode):
    """Puts the average that ran along with a training into a model."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="EMAMerge",
            display_name="EMA Merge",
            category="Graft/averages",
            description="Puts averaged weights into a model: the average that ran along with the training.",
            **aliases("ema", "average", "weight averaging", "merge lora", "model soup"),
            inputs=[
                io.Model.Input("model", tooltip="The model to patch, such as the one the training began from; it is not changed."),
                io.Clip.Input("clip", optional=True, tooltip="The text encoder to patch, where it was trained too."),
                TrainState.Input("state", optional=True, tooltip="From Train Step, begun with EMA Settings."),
                Snapshots.Input("snapshots", optional=True, tooltip="Not available in this version."),
                LoraStack.Input("lora_stack", optional=True, tooltip="Not available in this version."),
                io.Combo.Input(
                    "profile", options=["latest", "width", "best", "uniform", "exponential", "weights"], default="latest",
                    tooltip="latest: the average as it is at the state's step. The others come with a later version.",
                ),
                io.Float.Input(
                    "width", default=0.1, min=0.01, max=0.28, step=0.01,
                    tooltip="Of profile width. Not available in this version.",
                ),
                io.String.Input("weights", default="", tooltip="Of profile weights. Not available in this version."),
                io.Float.Input("strength", default=1.0, min=-10.0, max=10.0, step=0.01, tooltip="1 is the average as it is."),
                io.Combo.Input(
                    "mode", options=["auto", "merge", "bypass", "host"], default="auto", tooltip="As in Patch Model with LoRA Stack."
                ),
            ],
            outputs=[
                io.Model.Output(display_name="MODEL"),
                io.Clip.Output(display_name="CLIP"),
                LoraModel.Output(display_name="LORA_MODEL"),
                io.Image.Output(display_name="profile"),
                io.String.Output(display_name="report"),
            ],
        )

    @classmethod
    def execute(
        cls, model, clip=None, state=None, snapshots=None, lora_stack=None, profile="latest", width=0.1, weights="", strength=1.0,
        mode="auto",
    ) -> io.NodeOutput:
        later = {"snapshots": snapshots, "lora_stack": lora_stack}
        wrong = [f"{name} {_LATER}; disconnect it" for name, value in later.items() if value is not None]
        if profile != "latest":
            wrong.append(f"profile {profile} {_LATER}; use latest")
        if weights.strip():
            wrong.append(f"weights {_LATER}; leave it empty")
        if state is None:
            wrong.append("state is not connected: connect a Train Step's TRAIN_STATE")
        elif not state.average:
            wrong.append("this state has no average: connect EMA Settings to Start Training")
        if wrong:
            raise ValueError("EMAMerge: " + "; ".join(wrong) + ".")
        from ..training.curves import Curve, averaging_profile, draw

        lora = state.lora_model(ema=True)
        grafted = host.graft(model, clip, [host.Entry(f"average of {state.run} at step {state.step}", lora, strength, strength)], mode)
        shares = averaging_profile(state.start.ema, state.step, state.settings.optimizer.total_steps)
        picture = draw([Curve(shares, first=0)], "share of each step's weights in the average", "step", "share")
        lines = [f"average ({state.start.ema.schedule}) at step {state.step}; {shares[0]:.2%} of it are the weights before the first step"]
        return io.NodeOutput(grafted.model, grafted.clip, lora, picture, "\n".join([*lines, grafted.report]))


NODES = [EMAMerge]
