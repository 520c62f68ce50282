"""What the nodes do with training states of VAEs beside training them: begin, load and give the VAE. They import it
only then, so that ComfyUI starts without it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import host
from ..ema.decay import EMASettings
from ..host import trainable_vae as autoencoders
from ..training import state as states
from ..training.data.dataset import Dataset
from ..training.objective import perceptual
from ..training.optimizers.settings import OptimizerSettings
from ..training.reports import text
from ..training.state import TrainState
from ..training.store import saved_states
from ..training.store.store import Store
from ..training.tasks import vae as measures
from ..training.tasks.registry import trains_vae
from ..training.trainable.vae_parts import VaeSettings, adapter_for
from .step_call import Subject

if TYPE_CHECKING:
    from ..host.comfyui_objects import Vae


def begin_training(
    vae: Vae,
    dataset: Dataset,
    settings: VaeSettings,
    optimizer: OptimizerSettings | None,
    ema: EMASettings | None,
    seed: int,
    run: str,
) -> tuple[Any, str]:
    """The state of a VAE before the first step, and its report."""
    Store(host.folders.training_folder(), run, limit=host.folders.store_limit())  # report its errors first
    autoencoders.check_trainable(vae)
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
    start = states.Start(identity, pictures.digest, adapter, ema, seed, task="vae", task_settings=settings)
    chosen = states.Settings(optimizer or OptimizerSettings())
    state = states.begin(vae.first_stage_model, start, chosen, run, lambda: host.base_weights.base_weights(vae.patcher))
    state = replace(state, subject=Subject(vae.patcher, None, vae, pictures, unhashed))
    return state, text.beginning(state, pictures, unhashed)


def load_state(root: Path, name: str, vae: Vae, dataset: Dataset | None) -> TrainState:
    """The saved state with this name of a VAE."""
    if vae is None:
        raise ValueError(f"Load State: {name} trains a VAE, and none is connected. Connect it to vae.")
    autoencoders.check_trainable(vae)
    pictures, digest = None, None
    if dataset is not None:
        pictures = dataset.as_pictures()
        digest = pictures.digest
    identity, unhashed = host.fingerprint.fingerprint_of(vae, "vae")
    state = saved_states.load(root, name, identity, digest, lambda: host.base_weights.base_weights(vae.patcher))
    return replace(state, subject=Subject(vae.patcher, None, vae, pictures, unhashed))


def trained_vae(state: TrainState, average: bool) -> tuple[Any, str]:
    """The VAE with a state's weights or their average, and what to say of it."""
    if getattr(state, "start", None) is None or not trains_vae(state):
        raise ValueError("Trained VAE: this training state is not of a VAE. Begin with Start VAE Training.")
    weights = state.weights(ema=average)
    vae = autoencoders.copy_with_weights(state.subject.vae, weights)
    lines = [f"run {state.run!r} at step {state.step}: {len(weights)} trained tensors"]
    history = state.history.comparable
    if average:
        history = state.history.comparable_average
    if history:
        (first_step, first), (last_step, last) = history[0], history[-1]
        lines.append(f"held-out error {first:.4g} at step {first_step}, {last:.4g} at {last_step}")
    if not state.start.task_settings.trains_encoder:
        lines.append("the encoder is the one that came in, so the latent space is the same")
    elif state.subject.dataset is None:
        lines.append("loaded without a dataset, so how far the latents have moved is not measured")
    else:
        latents = []
        for one in (state.subject.vae, vae):
            with autoencoders.open_vae(one) as coder:
                latents.append(
                    measures.latents_of(coder, state.subject.dataset.held_out, state.start.task_settings.crop)
                )
        moved = measures.movement(*latents)
        bound = state.start.task_settings.latent_bound
        if moved > bound:
            raise ValueError(
                f"Trained VAE: the latents of held-out images have moved by {moved:.3g} of their standard deviation,"
                f" and latent bound of Start VAE Training is {bound:g}. Take a state with fewer steps, or raise the"
                " bound."
            )
        lines.append(f"the latents of held-out images have moved by {moved:.3g} of their standard deviation")
    return vae, "\n".join(lines)
