"""GraftPictureLosses: the loss of every picture of a run's dataset, and which pictures stand out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from comfy_api.latest import io

from .. import host
from .schema import GraftNode, TrainState, search_aliases

if TYPE_CHECKING:
    from ..training import state as states
    from ..training.expert_pair import ExpertPair


class GraftPictureLosses(GraftNode):
    """Measures every picture as validation does, and says so to the panel of Dataset."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="GraftPictureLosses",
            display_name="Picture Losses",
            category="Graft/training",
            description=(
                "Measures the loss of every picture of the dataset, before and after training, and names pictures that"
                " stand out: broken ones, copies, and captions that may be wrong. The Dataset panel can then sort by"
                " it."
            ),
            **search_aliases("per image loss", "outliers", "wrong captions", "duplicates", "dataset quality"),
            is_output_node=True,
            inputs=[TrainState.Input("state", tooltip="From Train Step, or from Load State with its dataset.")],
            outputs=[io.String.Output(display_name="report")],
        )

    @classmethod
    def execute(cls, state: states.TrainState | ExpertPair) -> io.NodeOutput:
        from ..host import picture_losses as kept
        from ..training.expert_pair import single
        from ..training.reports import outliers
        from ..training.run.picture_losses import by_name, passes, picture_losses
        from .step_call import open_denoiser

        state = single(state, "Picture Losses")
        dataset = state.subject.dataset
        if dataset is None:
            raise ValueError(
                "Picture Losses: the state was loaded without its dataset. Connect the dataset to Load State."
            )
        advance = host.events.step_counter(passes(dataset))
        with open_denoiser(state) as denoiser:
            losses = picture_losses(state, denoiser, dataset, host.events.raise_if_interrupted, advance)
        report = outliers.describe(by_name(losses), state.step)
        kept.keep(state.run, state.step, dataset, losses)
        return io.NodeOutput(report, ui={"text": [report]})


NODES = [GraftPictureLosses]
