"""ComfyUI's VAEs for training: opened with gradients, and copied with the weights that were trained."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from ..patches.core.calls import around
from .autograd_inplace import AvoidInplaceOps
from .comfyui_objects import Model, Vae
from .denoiser import announce_training
from .device_memory import half_type, limit_pinned_memory
from .encoding import frame_step
from .lora_stacks import list_patches
from .network_state import keep_attributes, switch_to_eval
from .whole_models import whole_model


class TrainableVAE:
    """A loaded VAE as a `training.objective.vae_losses.VaeCoder`. It runs ComfyUI's own encoder and decoder."""

    text_encoder = None

    def __init__(self, vae: Vae, patcher: Model) -> None:
        self.vae, self.patcher = vae, patcher
        self.module: torch.nn.Module = patcher.model
        self.device: torch.device = patcher.load_device
        self.own_type: torch.dtype = vae.vae_dtype
        # Not fp16, which ComfyUI does not compute VAEs in either: it overflows in SDXL's.
        self.auto_type = torch.bfloat16 if half_type(self.device) == torch.bfloat16 else None
        self.factor = int(vae.spacial_compression_encode())
        self._has_frames = getattr(vae, "latent_dim", 2) == 3

    def scale_pixels(self, pixels: torch.Tensor) -> torch.Tensor:
        """Pictures (B, 3, H, W) in 0..1, in the scale of what the decoder gives."""
        return self.vae.process_input(pixels)

    def encode(self, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(means, logarithms of the variances) of the latents; None where the VAE gives no variances."""
        inputs = self.scale_pixels(pixels).to(self.vae.vae_dtype)
        if self._has_frames:
            inputs = inputs.unsqueeze(2)  # each picture is a clip of one frame
        with _record_moments(self.module) as moments:
            mean = self._run_half("encode", inputs)
        if moments and moments[0].shape[1] == 2 * mean.shape[1] and moments[0].shape[2:] == mean.shape[2:]:
            return mean, moments[0].chunk(2, dim=1)[1].clamp(-30.0, 20.0)
        return mean, None

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Pictures (B, 3, H, W) in float32, in the scale of `scale_pixels`."""
        decoded = self._run_half("decode", latents.to(self.vae.vae_dtype))
        if self._has_frames:
            decoded = decoded[:, :, 0]
        return decoded.float()

    def _run_half(self, half: str, value: torch.Tensor) -> torch.Tensor:
        """Runs the encoder or the decoder as the network's forward, so that what hangs on that takes part."""
        run = getattr(self.module, half)
        with around(self.module, "replacement", lambda _, __, value: run(value)):
            return self.module(value)

    @torch.no_grad()
    def to_pictures(self, pixels: torch.Tensor) -> torch.Tensor:
        """Reconstructions (B, H, W, 3) in 0..1 of pictures (B, 3, H, W) in 0..1."""
        mean, _ = self.encode(pixels)
        return self.vae.process_output(self.decode(mean).clone()).movedim(1, -1)


@contextlib.contextmanager
def _record_moments(module: torch.nn.Module) -> Iterator[list[torch.Tensor]]:
    """What the VAE's regularization gets inside the block: means and variances, which ComfyUI keeps only the means
    of.
    """
    moments: list[torch.Tensor] = []
    regularization = getattr(module, "regularization", None)
    if regularization is None:
        yield moments
        return

    def call(_: torch.nn.Module, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        moments.append(args[0])
        return inner(*args, **kwargs)

    with around(regularization, "probe", call):
        yield moments


def check_trainable(vae: Vae) -> None:
    """Raises ValueError for a VAE that cannot be trained."""
    module = getattr(vae, "first_stage_model", None)
    if module is None or getattr(vae, "patcher", None) is None or not any(True for _ in module.parameters()):
        raise ValueError(
            "Start VAE Training: this VAE has no weights, as Demo Model's. Connect one from Load VAE, Load Checkpoint"
            " or Demo VAE."
        )
    if getattr(vae, "latent_dim", 2) not in (2, 3) or getattr(vae, "output_channels", 3) != 3:
        raise ValueError("Start VAE Training: this VAE is not one of pictures, and VAE training takes pictures only.")
    if getattr(vae, "not_video", False) or (getattr(vae, "latent_dim", 2) == 3 and not frame_step(vae)):
        raise ValueError(
            f"Start VAE Training: Graft does not know how this VAE ({type(module).__name__}) takes single pictures."
            " Connect the VAE of an SD, SDXL, Flux or Wan model."
        )
    patches = list_patches(vae.patcher)
    if patches:
        raise ValueError(f"Start VAE Training: this VAE has {' and '.join(patches)} on it. Connect it without them.")


@contextlib.contextmanager
def open_vae(vae: Vae) -> Iterator[TrainableVAE]:
    """Loads a VAE and yields it for training."""
    import comfy.model_management as management

    patcher = whole_model(vae.patcher)
    limit_pinned_memory()
    management.load_models_gpu([patcher], force_full_load=True)
    network = patcher.model
    with announce_training(), keep_attributes(network), switch_to_eval(network), AvoidInplaceOps():
        yield TrainableVAE(vae, patcher)


def block_output(message: str) -> Any:
    """In place of an output that does not exist: nodes that are connected to it do not run, and the message is
    shown.
    """
    from comfy_execution.graph_utils import ExecutionBlocker

    return ExecutionBlocker(message)


@torch.no_grad()
def copy_with_weights(vae: Vae, weights: Mapping[str, torch.Tensor]) -> Vae:
    """A copy of a VAE with these weights, by parameter name, which VAE Save saves and VAE Decode takes."""
    patcher = whole_model(vae.patcher)
    module = copy.deepcopy(patcher.model)
    parameters = dict(module.named_parameters())
    for name, tensor in weights.items():
        parameters[name].data.copy_(tensor)
    made = copy.copy(vae)
    made.first_stage_model = module
    made.patcher = type(patcher)(module, load_device=patcher.load_device, offload_device=patcher.offload_device)
    return made
