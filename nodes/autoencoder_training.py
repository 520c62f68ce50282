"""What the nodes do with training states of VAEs: begin, train, load and give the VAE. They import it only
then, so that ComfyUI starts without it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from comfy_api.latest import io

from .. import host
from ..host import autoencoder as autoencoders
from ..storage.printable import logger
from ..training import state as states
from ..training.data.dataset import Dataset
from ..training.data.stored_latent import read_latent
from ..training.objective import perceptual
from ..training.optimizers.settings import OptimizerSettings
from ..training.reports import text
from ..training.run import autoencoder as measures
from ..training.settings import StepSettings
from ..training.store import saved_states
from ..training.store.store import Store
from ..training.trainable.autoencoder import AutoencoderSettings, adapter_for
from .step_call import PreviewPrompt, Sampled, StepCall, Subject, check_dataset, step_count

log = logger(__name__)

SHOWN = 4  # pictures of a preview
SHOWN_SIDE = 512  # pixels of each
_OUTPUT = "Train Step: this training state is of a VAE, so there is no {}. Connect Trained VAE to TRAIN_STATE."


def begun(
    vae: Any, dataset: Dataset, settings: AutoencoderSettings, optimizer: Any, ema: Any, seed: int, run: str
) -> tuple[Any, str]:
    """The state of a VAE before the first step, and its report."""
    Store(host.folders.training_folder(), run, limit=host.folders.store_limit())  # report its errors first
    autoencoders.check(vae)
    if ema is not None and ema.snapshots:
        raise ValueError(
            "Start VAE Training: EMA Settings keeps snapshots, which are LoRAs, and a VAE has none. Set snapshot every"
            " N steps of EMA Settings to 0."
        )
    pictures = dataset.as_pictures()
    if settings.trains_encoder and not pictures.held_out:
        raise ValueError(
            "Start VAE Training: what to train is whole, and no image is held out to see whether the latent space"
            " moves. Set validation split of Dataset above 0, or train the decoder only."
        )
    if settings.lpips:
        perceptual.check_installed()
    identity, unhashed = host.fingerprint.fingerprint_of(vae, "vae")
    adapter = adapter_for(vae.first_stage_model, settings)
    start = states.Start(identity, pictures.digest, adapter, ema, seed, autoencoder=settings)
    chosen = states.Settings(optimizer or OptimizerSettings())
    state = states.begin(vae.first_stage_model, start, chosen, run, lambda: host.base_weights.base_weights(vae.patcher))
    state = replace(state, subject=Subject(vae.patcher, None, vae, pictures, unhashed))
    return state, text.beginning(state, pictures, unhashed)


def loaded(root: Path, name: str, vae: Any, dataset: Dataset | None) -> Any:
    """The saved state with this name of a VAE."""
    if vae is None:
        raise ValueError(f"Load State: {name} trains a VAE, and none is connected. Connect it to vae.")
    autoencoders.check(vae)
    pictures, digest = None, None
    if dataset is not None:
        pictures = dataset.as_pictures()
        digest = pictures.digest
    identity, unhashed = host.fingerprint.fingerprint_of(vae, "vae")
    state = saved_states.load(root, name, identity, digest, lambda: host.base_weights.base_weights(vae.patcher))
    return replace(state, subject=Subject(vae.patcher, None, vae, pictures, unhashed))


def train(
    state: Any,
    chosen: StepSettings,
    optimizer: Any,
    objective: Any,
    callbacks: Any,
    place: tuple[Any, str | None],
) -> io.NodeOutput:
    """Train Step's outputs for a VAE."""
    if objective is not None:
        raise ValueError(
            "Train Step: objective is connected, and this training state is of a VAE, whose losses are set in Start VAE"
            " Training. Disconnect it."
        )
    state = states.with_settings(state, optimizer, None)
    check_dataset(state.subject, chosen)
    count = step_count(state, chosen)
    if count:
        state = states.with_planned_steps(state, state.step + count)
    call = AutoencoderCall(state, count, place, Sampled(None, None, None, ()))
    result, report = call.trained(count, callbacks, chosen)
    log.info("%s", report)
    panel = {"text": [report], "graft_run": [call.ended(result)], "graft_previews": call.pictures}
    missing = [autoencoders.blocked(_OUTPUT.format(what)) for what in ("MODEL", "CLIP", "LoRA")]
    losses = {"loss": list(result.history.loss)}
    return io.NodeOutput(result, *missing, losses, report, ui={name: value for name, value in panel.items() if value})


class AutoencoderCall(StepCall):
    """One execution of Train Step for a VAE. Its previews are held-out pictures beside their reconstructions."""

    def opened(self) -> AbstractContextManager[Any]:
        """The state's VAE, for training."""
        return autoencoders.opened(self.state.subject.vae)

    def preview(self, denoiser: Any, step: int, average: bool, at_strength: Any) -> None:
        """Reconstructs the first held-out pictures with the VAE's current weights, and shows both."""
        label = "weights"
        if average:
            label = "average"
        dataset = self.state.subject.dataset
        shown = []
        for image in (dataset.held_out or dataset.images)[:SHOWN]:
            host.events.raise_if_interrupted()
            pixels = measures.as_pixels(_middle(read_latent(image.latent), denoiser.factor)[None], denoiser.device)
            pair = [pixels.movedim(1, -1).cpu(), denoiser.shown(pixels).cpu()]
            shown.append(torch.cat(pair, dim=2)[0])
        self.tell_preview(self.kept_preview(shown, PreviewPrompt(0, "", None), step, label), step)


def trained_vae(state: Any, average: bool) -> tuple[Any, str]:
    """The VAE with a state's weights or their average, and what to say of it."""
    if getattr(state, "start", None) is None or state.start.autoencoder is None:
        raise ValueError("Trained VAE: this training state is not of a VAE. Begin with Start VAE Training.")
    weights = state.weights(ema=average)
    vae = autoencoders.with_weights(state.subject.vae, weights)
    lines = [f"run {state.run!r} at step {state.step}: {len(weights)} trained tensors"]
    history = state.history.comparable
    if average:
        history = state.history.comparable_average
    if history:
        (first_step, first), (last_step, last) = history[0], history[-1]
        lines.append(f"held-out error {first:.4g} at step {first_step}, {last:.4g} at {last_step}")
    if not state.start.autoencoder.trains_encoder:
        lines.append("the encoder is the one that came in, so the latent space is the same")
    elif state.subject.dataset is None:
        lines.append("loaded without a dataset, so how far the latents have moved is not measured")
    else:
        moved = _moved(state, vae)
        bound = state.start.autoencoder.latent_bound
        if moved > bound:
            raise ValueError(
                f"Trained VAE: the latents of held-out images have moved by {moved:.3g} of their standard deviation,"
                f" and latent bound of Start VAE Training is {bound:g}. Take a state with fewer steps, or raise the"
                " bound."
            )
        lines.append(f"the latents of held-out images have moved by {moved:.3g} of their standard deviation")
    return vae, "\n".join(lines)


def _moved(state: Any, vae: Any) -> float:
    """How far the latents of held-out pictures have moved from those of the VAE that was trained."""
    latents = []
    for one in (state.subject.vae, vae):
        with autoencoders.opened(one) as coder:
            latents.append(measures.latents_of(coder, state.subject.dataset.held_out, state.start.autoencoder.crop))
    return measures.movement(*latents)


def _middle(picture: torch.Tensor, factor: int) -> torch.Tensor:
    """The middle of a picture (3, H, W), of at most SHOWN_SIDE pixels a side."""
    for axis in (1, 2):
        length = picture.shape[axis]
        side = min(length, SHOWN_SIDE)
        side -= side % factor
        picture = picture.narrow(axis, (length - side) // 2, side)
    return picture
