"""VAE training nodes: GraftTrainVAEStart begins a run, GraftTrainedVAE gives the VAE that came out."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..training.store.names import check_run_name
from .refusals import refusal
from .schema import Dataset, Optimizer, TrainState, advanced, aliases, run_average, run_name, run_seed

_WEIGHT: dict[str, Any] = {"min": 0.0, "max": 1000.0, "step": 0.01, "round": False}  # of a loss


class GraftTrainVAEStart(io.ComfyNode):
    """Joins VAE, dataset and settings into a state at step 0."""

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
            **aliases("train vae", "autoencoder", "fine-tune vae", "decoder"),
            inputs=[
                io.Vae.Input("vae", tooltip="The VAE to train. Its weights are never changed."),
                Dataset.Input(
                    "dataset",
                    tooltip="From Dataset: its images are used, not its captions. Hold some out to measure.",
                ),
                Optimizer.Input(
                    "optimizer",
                    optional=True,
                    tooltip=(
                        "How to train, from Optimizer Settings. If left empty, AdamW at 1e-4 with batch size 1. For"
                        " published VAEs use 1e-5 to 5e-5."
                    ),
                ),
                run_average(),
                io.Combo.Input(
                    "part",
                    display_name="what to train",
                    options=["decoder", "whole"],
                    default="decoder",
                    tooltip=(
                        "decoder: the latent space stays as it is, so every model with this VAE still fits. whole:"
                        " the encoder too; training ends when the latents move too far."
                    ),
                ),
                io.Int.Input(
                    "crop",
                    display_name="crop size",
                    default=256,
                    min=0,
                    max=8192,
                    step=8,
                    tooltip=(
                        "Trains on squares of this many pixels, cut out of the images at random places. Lower it to"
                        " need less memory; 0 takes whole images."
                    ),
                ),
                io.Float.Input(
                    "l1",
                    display_name="L1 weight",
                    default=1.0,
                    tooltip="Weight of the mean absolute error. Edges stay sharper than with MSE.",
                    **_WEIGHT,
                ),
                io.Float.Input(
                    "mse",
                    display_name="MSE weight",
                    default=0.0,
                    tooltip="Weight of the mean squared error. Try 1 for smoother results.",
                    **_WEIGHT,
                ),
                advanced(
                    io.Float,
                    "edge",
                    display_name="edge weight",
                    default=0.0,
                    tooltip="Weight of the error of edges (Sobel). Try 0.5 if results are blurred.",
                    **_WEIGHT,
                ),
                advanced(
                    io.Float,
                    "kl",
                    display_name="KL weight",
                    default=0.0,
                    min=0.0,
                    max=1.0,
                    step=1e-7,
                    round=False,
                    tooltip="For whole: weight of the KL loss, which keeps latents near normal noise. 1e-6 is usual.",
                ),
                advanced(
                    io.Float,
                    "latent_bound",
                    display_name="latent bound",
                    default=0.1,
                    min=0.0,
                    max=1000.0,
                    step=0.01,
                    tooltip=(
                        "For whole: training ends when the latents of held-out images have moved by more than this"
                        " share of their standard deviation. Raise it only for models that you train anew."
                    ),
                ),
                run_seed(),
                run_name("vae"),
                io.Float.Input(
                    "lpips",
                    display_name="LPIPS weight",
                    default=0.0,
                    tooltip=(
                        "Weight of LPIPS, the difference that people see. Needs the packages lpips and torchvision,"
                        " which download VGG once. Try 0.1 to 1."
                    ),
                    optional=True,
                    **_WEIGHT,
                ),
                advanced(
                    io.Float,
                    "discriminator",
                    display_name="discriminator weight",
                    default=0.0,
                    tooltip=(
                        "Weight of a patch discriminator, which learns to tell reconstructions from images: sharper"
                        " detail, which may be invented. Try 0.5."
                    ),
                    optional=True,
                    **_WEIGHT,
                ),
                advanced(
                    io.Int,
                    "discriminator_start",
                    display_name="discriminator start",
                    default=0,
                    min=0,
                    max=1000000,
                    tooltip=(
                        "The discriminator takes part after this many steps. Let the other losses settle first: half"
                        " of the steps is a good start."
                    ),
                    optional=True,
                ),
                advanced(
                    io.Float,
                    "discriminator_rate",
                    display_name="discriminator learning rate",
                    default=1e-4,
                    min=1e-7,
                    max=1.0,
                    step=1e-7,
                    round=False,
                    tooltip="The discriminator's own learning rate, with Adam; it stays the same in all steps.",
                    optional=True,
                ),
            ],
            outputs=[TrainState.Output(display_name="TRAIN_STATE"), io.String.Output(display_name="report")],
        )

    @classmethod
    def validate_inputs(
        cls,
        part=None,
        crop=None,
        l1=None,
        mse=None,
        edge=None,
        kl=None,
        latent_bound=None,
        run=None,
        lpips=0.0,
        discriminator=0.0,
        discriminator_start=0,
        discriminator_rate=1e-4,
    ) -> bool | str:
        settings = {"part": part, "crop": crop, "l1": l1, "mse": mse, "edge": edge, "kl": kl, "lpips": lpips}
        settings["discriminator"] = discriminator
        alone = {"latent_bound": latent_bound, "discriminator_start": discriminator_start}
        alone["discriminator_rate"] = discriminator_rate
        return refusal(cls, _check, tuple(settings), ("run",), **settings, **alone, run=run)

    @classmethod
    def execute(
        cls,
        vae,
        dataset,
        optimizer=None,
        ema=None,
        part="decoder",
        crop=256,
        l1=1.0,
        mse=0.0,
        edge=0.0,
        kl=0.0,
        latent_bound=0.1,
        seed=0,
        run="vae",
        lpips=0.0,
        discriminator=0.0,
        discriminator_start=0,
        discriminator_rate=1e-4,
    ) -> io.NodeOutput:
        from ..training.trainable.autoencoder import AutoencoderSettings
        from .autoencoder_training import begun

        settings = AutoencoderSettings(
            part,
            crop,
            l1,
            mse,
            edge,
            kl,
            latent_bound,
            lpips,
            discriminator,
            discriminator_start,
            discriminator_rate,
        )
        return io.NodeOutput(*begun(vae, dataset, settings, optimizer, ema, seed, run))


def _check(run: str = "vae", **settings: Any) -> None:
    from ..training.trainable.autoencoder import AutoencoderSettings

    check_run_name(run)
    AutoencoderSettings(**settings)


class GraftTrainedVAE(io.ComfyNode):
    """The VAE with the weights of a training state."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="GraftTrainedVAE",
            display_name="Trained VAE",
            category="Graft/training",
            description=(
                "The VAE with what was trained: connect it to VAE Decode, or to VAE Save, whose file Load VAE loads."
            ),
            **aliases("save vae", "autoencoder", "train vae"),
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
    def execute(cls, state, weights="last") -> io.NodeOutput:
        from .autoencoder_training import trained_vae

        vae, report = trained_vae(state, weights == "average")
        return io.NodeOutput(vae, report, ui={"text": [report]})


NODES = [GraftTrainVAEStart, GraftTrainedVAE]
