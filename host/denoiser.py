"""ComfyUI's forward pass of a diffusion model, for training: with conditions, noise levels, patches and wrappers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ..patches.adapters.rank_mask import set_timesteps
from ..patches.models import registry
from ..patches.models.attention_kernels import TrainingKernel
from ..patches.token_downsampling.attention_override import OVERRIDE
from ..training.data.dataset import Conditioning
from .autograd_inplace import AvoidInplaceOps, copy_where_needed
from .comfyui_objects import Clip, Model
from .device_memory import half_type, limit_pinned_memory, unload_others
from .encoding import LiveEncoder
from .latents import dimensions_of
from .lora_injection import compute_of
from .model_sampling import (
    noisy_latents,
    prediction_type,
    sigma_at,
    timestep_of,
    to_comfyui_scale,
    with_zero_terminal_snr,
)
from .whole_models import whole_clip, whole_model


class Denoiser:
    """A loaded ModelPatcher as a `training.objective.denoiser.Denoiser`.

    It runs ComfyUI's own forward, with patches, wrappers and size conditions.
    """

    def __init__(self, patcher: Model, encode: LiveEncoder | None = None, device: torch.device | None = None) -> None:
        from .conditions import Conditions

        self.encode: LiveEncoder | None = encode
        self.text_encoder: torch.nn.Module | None = None
        self.text_encoder_device: torch.device = patcher.load_device
        if encode is not None:
            self.text_encoder = encode.module
            self.text_encoder_device = encode.clip.patcher.load_device
        self.auto_type: torch.dtype | None = half_type(patcher.load_device)
        self.own_type: torch.dtype = compute_of(patcher)[0]
        self.patcher, self.model, self.module = patcher, patcher.model, patcher.model.diffusion_model
        self.kept_weights: Any = None
        self.room_for_blocks = 0
        self.training_only: Any = None  # the LoRA that previews switch off
        self.device: torch.device = device or patcher.load_device
        self.sampling = patcher.get_model_object("model_sampling")
        self.prediction = prediction_type(self.sampling)
        self._conditions = Conditions(patcher.model, self.device)

    def process_in(self, latents: torch.Tensor) -> torch.Tensor:
        """Scales the VAE's latents as the network expects them; a picture for a video model gets a frame dimension."""
        if dimensions_of(self.model) == 3 and latents.ndim == 4:
            latents = latents.unsqueeze(2)
        return self.model.process_latent_in(latents)

    def sigma(self, u: torch.Tensor) -> torch.Tensor:
        """The noise levels (B,) at timesteps from 0 to 1 (B,), from the model's sigma table; for flows with the model's
        shift.
        """
        return sigma_at(self.sampling, u)

    def noisy(self, clean: torch.Tensor, noise: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        """Clean latents (B, C, h, w) with noise of level sigma (B,)."""
        return noisy_latents(self.sampling, clean, noise, sigma)

    def denoise(
        self,
        x: torch.Tensor,
        sigma: torch.Tensor,
        conditionings: Sequence[Conditioning],
        transformer_options: Mapping[str, Any],
    ) -> torch.Tensor:
        """The denoised latents (B, C, h, w) in float32.

        Images whose conditions ComfyUI cannot batch are run in separate groups.
        """
        conditions = [self._conditions.get(conditioning, x) for conditioning in conditionings]
        groups = self._batches(conditions)
        if len(groups) == 1:
            return self._apply(x, sigma, conditions, transformer_options)
        denoised: list[torch.Tensor] = [x] * len(conditions)
        for group in groups:
            part = self._apply(x[group], sigma[group], [conditions[index] for index in group], transformer_options)
            for index, image in zip(group, part, strict=True):
                denoised[index] = image
        return torch.stack(denoised)

    def _batches(self, conditions: Sequence[Mapping[str, Any]]) -> list[list[int]]:
        """Groups the indices of images that can run in one batch: those whose conditions ComfyUI can concatenate."""
        from .conditions import can_concat

        batches: list[list[int]] = []
        for index, condition in enumerate(conditions):
            batch = None
            if not self._runs_alone(condition):
                batch = next((other for other in batches if can_concat(conditions[other[0]], condition)), None)
            if batch is None:
                batches.append([index])
            else:
                batch.append(index)
        return batches

    def _runs_alone(self, condition: Mapping[str, Any]) -> bool:
        """Whether the network can only take these conditions one at a time."""
        return "attention_mask" in condition and registry.takes_masked_text_alone(self.module)

    def conditions(self, conditioning: Conditioning) -> list[torch.Tensor]:
        """The tensors that the network gets for a conditioning."""
        from .conditions import empty_noise

        x = empty_noise(self.model, self.device)
        values = [getattr(condition, "cond", None) for condition in self._conditions.make(conditioning, x).values()]
        return [value for value in values if isinstance(value, torch.Tensor)]

    def _apply(
        self,
        x: torch.Tensor,
        sigma: torch.Tensor,
        conditions: Sequence[dict[str, Any]],
        transformer_options: Mapping[str, Any],
    ) -> torch.Tensor:
        import comfy.patcher_extension as extension
        from comfy.ldm.modules.attention import attention_pytorch

        from .network_state import drop_weight_caches

        x, sigma = to_comfyui_scale(self.sampling, x, sigma)
        options = self.patcher.model_options
        all_options = {**options.get("transformer_options", {}), **transformer_options}
        all_options[OVERRIDE] = TrainingKernel(attention_pytorch, all_options.get(OVERRIDE))
        all_options["wrappers"] = extension.merge_nested_dicts(all_options.get("wrappers", {}), self.patcher.wrappers)
        all_options["callbacks"] = extension.merge_nested_dicts(
            all_options.get("callbacks", {}), self.patcher.callbacks
        )
        all_options.update(sigmas=sigma, cond_or_uncond=[0], uuids=[self.patcher.patches_uuid])
        arguments: dict[str, Any] = {"transformer_options": all_options}
        for name, condition in conditions[0].items():
            arguments[name] = condition.concat([other[name] for other in conditions[1:]])
        wrapper = options.get("model_function_wrapper")
        with set_timesteps(timestep_of(self.sampling, sigma)), drop_weight_caches(self.module):
            if wrapper is None:
                return self.model.apply_model(x, sigma, **arguments).float()
            return wrapper(
                self.model.apply_model, {"input": x, "timestep": sigma, "c": arguments, "cond_or_uncond": [0]}
            ).float()


@contextlib.contextmanager
def allow_autograd(module: torch.nn.Module, text_encoder: bool) -> Iterator[None]:
    """The context for ComfyUI's forward and backward pass: in-place operations and kernels without a backward pass are
    avoided, except in UNets: they change nothing in place that is needed again, and there every saved call counts.
    """
    from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel

    from .four_bit_layers import allow_gradients
    from .plain_kernels import PlainKernels

    if isinstance(module, UNetModel) and not text_encoder:
        with allow_gradients(module):
            yield
        return
    with allow_gradients(module), PlainKernels(), AvoidInplaceOps(), copy_where_needed(module):
        yield


@contextlib.contextmanager
def announce_training() -> Iterator[None]:
    """A context in which ComfyUI knows that it trains, if it asks for that."""
    import comfy.model_management as management

    was_training = getattr(management, "in_training", None)
    if was_training is None:
        yield
        return
    management.in_training = True
    try:
        yield
    finally:
        management.in_training = was_training


@contextlib.contextmanager
def keep_off_the_device() -> Iterator[None]:
    """A context in which ComfyUI loads models without bringing their weights to the device, as with --novram."""
    import comfy.model_management as management

    states = vars(management)
    before = states.get("vram_state")
    management.vram_state = management.VRAMState.NO_VRAM
    try:
        yield
    finally:
        if before is None:  # the embedded host works it out
            del states["vram_state"]
        else:
            management.vram_state = before


def move_to_host_memory(patcher: Model) -> None:
    """Moves the weights of a loaded MODEL to ComfyUI's offload device. Patches are then applied at every use."""
    if patcher.load_device != patcher.offload_device:
        patcher.partially_unload(patcher.offload_device, patcher.model_size())


def describe_attention(model: Model) -> str:
    """Which attention a model trains and samples with, as a line for the report: ComfyUI's own choice."""
    from comfy.ldm.modules import attention

    name = attention.optimized_attention.__name__.removeprefix("attention_")
    line = f"attention: {name}, which ComfyUI chose when it started (--use-pytorch-cross-attention and others set it)"
    if "optimized_attention_override" in model.model_options.get("transformer_options", {}):
        line += "; a node on this model replaces some of it"
    return line


@contextlib.contextmanager
def open_denoiser(
    patcher: Model,
    terminal: bool = False,
    layers: bool = False,
    clip: Clip = None,
    clip_skip: int = 0,
    weighted_captions: bool = False,
) -> Iterator[Denoiser]:
    """Loads a MODEL, as the only one on its device, and yields its Denoiser. At the end ComfyUI is told that training
    is over.

    `terminal` rescales the noise levels of a v model to zero terminal SNR. With `layers` the weights stay in host
    memory, for `training.memory.offload.layers_on_host` to bring over. With a `clip` its text encoder is loaded too, to
    be trained.
    """
    import comfy.model_management as management

    from .network_state import freeze_beside, keep_attributes, switch_to_eval

    patcher = with_zero_terminal_snr(whole_model(patcher), terminal)
    if clip is not None:
        clip = whole_clip(clip)
    limit_pinned_memory()
    patchers = [patcher]
    if clip is not None:
        patchers.append(clip.patcher)
    unload_others(patchers)
    if layers:
        with keep_off_the_device():
            management.load_models_gpu([patcher])
        move_to_host_memory(patcher)
        patchers.remove(patcher)
    if patchers:
        management.load_models_gpu(patchers, force_full_load=True)
    patcher.pre_run()
    try:
        network = patcher.model.diffusion_model
        with (
            announce_training(),
            keep_attributes(network),
            switch_to_eval(network),
            freeze_beside(patcher.model, network),
            allow_autograd(network, clip is not None),
        ):
            yield Denoiser(patcher, None if clip is None else LiveEncoder(clip, clip_skip, weighted_captions))
    finally:
        patcher.cleanup()
