"""VAE training nodes: GraftTrainVAEStart begins a run, GraftTrainedVAE gives the VAE that came out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from comfy_api.latest import io

from ..training.settings import TrainingSettings
from ..training.store.names import check_run_name
from ..training.trainable.vae_parts import VaeSettings
from .schema import Dataset, GraftNode, Settings, TrainState, inputs_of, run_name, run_seed, search_aliases

if TYPE_CHECKING:
    from ..host.comfyui_objects import Vae
    from ..training import state as states
    from ..training.data.dataset import Dataset as TrainingData


class GraftTrainVAEStart(GraftNode):
    """Joins VAE, dataset and settings into a state at step 0."""

    settings_class = VaeSettings
    checked_together = (("part", "crop", "l1", "mse", "edge", "kl", "lpips", "discriminator"), ("run",))

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="GraftTrainVAEStart",
            display_name="Start VAE Training",
            category="Graft/training",
            description=(
                "Combines a VAE, a dataset's images and settings into a training state at step 0. Connect Train Step to"
                " train it, then Trained VAE."
            ),
            **search_aliases("train vae", "autoencoder", "fine-tune vae", "decoder"),
            inputs=[
                io.Vae.Input("vae", tooltip="The VAE to train. Its weights are never changed."),
                Dataset.Input(
                    "dataset",
                    tooltip="From Dataset: its images are used, not its captions. Hold some out to measure the error.",
                ),
                Settings.Input(
                    "settings",
                    optional=True,
                    tooltip=(
                        "How to train, from Optimizer Settings, and EMA Settings for an average. If nothing is"
                        " connected: AdamW at 1e-4 with batch size 1. For published VAEs use 1e-5 to 5e-5."
                    ),
                ),
                *inputs_of(cls.settings_class),
                run_seed(),
                run_name("vae"),
            ],
            outputs=[TrainState.Output(display_name="TRAIN_STATE"), io.String.Output(display_name="report")],
        )

    @classmethod
    def check_settings(cls, run: str = "vae", **values: Any) -> None:
        """Raises ValueError for settings that are wrong, and for a run name that cannot be one."""
        check_run_name(run)
        VaeSettings(**values)

    @classmethod
    def execute(
        cls,
        vae: Vae,
        dataset: TrainingData,
        chosen: VaeSettings,
        settings: TrainingSettings | None = None,
        seed: int = 0,
        run: str = "vae",
    ) -> io.NodeOutput:
        from .vae_training import begin_training

        settings = settings or TrainingSettings()
        settings.refuse_others(("optimizer", "ema"), "Start VAE Training", "which VAE training does not have")
        return io.NodeOutput(*begin_training(vae, dataset, chosen, settings.optimizer, settings.ema, seed, run))


class GraftTrainedVAE(GraftNode):
    """The VAE with the weights of a training state."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="GraftTrainedVAE",
            display_name="Trained VAE",
            category="Graft/training",
            description=(
                "Gives you the trained VAE. Connect it to VAE Decode, or to VAE Save, whose file Load VAE loads."
            ),
            **search_aliases("save vae", "autoencoder", "train vae"),
            inputs=[
                TrainState.Input("state", tooltip="Of VAE training: from Train Step or Load State."),
                io.Combo.Input(
                    "weights",
                    display_name="which weights",
                    options=["last", "average"],
                    default="last",
                    tooltip="last: the weights of the last step. average: their running average, with EMA Settings.",
                ),
            ],
            outputs=[io.Vae.Output(display_name="VAE"), io.String.Output(display_name="report")],
        )

    @classmethod
    def execute(cls, state: states.TrainState, weights: str = "last") -> io.NodeOutput:
        from .vae_training import trained_vae

        vae, report = trained_vae(state, weights == "average")
        return io.NodeOutput(vae, report, ui={"text": [report]})


NODES = [GraftTrainVAEStart, GraftTrainedVAE]
