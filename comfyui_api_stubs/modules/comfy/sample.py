"""Noise from a seed and sampling in one call (ComfyUI's `comfy.sample`)."""

import numpy as np
import torch

import comfy.model_management
import comfy.samplers
import comfy.utils


def prepare_noise(latent_image, seed, noise_inds=None):
    """Noise like a latent (B, C, H, W), on the CPU, the same numbers as ComfyUI's for a seed; the global generator is
    left alone.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(batch):
        shape = (batch, *latent_image.shape[1:])
        return torch.randn(shape, dtype=torch.float32, layout=latent_image.layout, generator=generator).to(
            dtype=latent_image.dtype
        )

    if noise_inds is None:
        return draw(latent_image.shape[0])
    each = [draw(1) for _ in range(int(np.max(noise_inds)) + 1)]
    return torch.cat([each[i] for i in noise_inds])


def fix_empty_latent_channels(model, latent_image):
    """An empty latent with the model's number of channels; others as they are."""
    channels = model.get_model_object("latent_format").latent_channels
    if channels != latent_image.shape[1] and torch.count_nonzero(latent_image) == 0:
        latent_image = comfy.utils.repeat_to_batch_size(latent_image, channels, dim=1)
    return latent_image


def sample(
    model,
    noise,
    steps,
    cfg,
    sampler_name,
    scheduler,
    positive,
    negative,
    latent_image,
    denoise=1.0,
    disable_noise=False,
    start_step=None,
    last_step=None,
    force_full_denoise=False,
    noise_mask=None,
    sigmas=None,
    callback=None,
    disable_pbar=False,
    seed=None,
):
    """The latent of a sampler and a schedule by name."""
    sampler = comfy.samplers.KSampler(
        model,
        steps=steps,
        device=model.load_device,
        sampler=sampler_name,
        scheduler=scheduler,
        denoise=denoise,
        model_options=model.model_options,
    )
    samples = sampler.sample(
        noise,
        positive,
        negative,
        cfg=cfg,
        latent_image=latent_image,
        start_step=start_step,
        last_step=last_step,
        force_full_denoise=force_full_denoise,
        denoise_mask=noise_mask,
        sigmas=sigmas,
        callback=callback,
        disable_pbar=disable_pbar,
        seed=seed,
    )
    return samples.to(comfy.model_management.intermediate_device())


def sample_custom(
    model,
    noise,
    cfg,
    sampler,
    sigmas,
    positive,
    negative,
    latent_image,
    noise_mask=None,
    callback=None,
    disable_pbar=False,
    seed=None,
):
    """The latent of a sampler object and given noise levels."""
    samples = comfy.samplers.sample(
        model,
        noise,
        positive,
        negative,
        cfg,
        model.load_device,
        sampler,
        sigmas,
        model_options=model.model_options,
        latent_image=latent_image,
        denoise_mask=noise_mask,
        callback=callback,
        disable_pbar=disable_pbar,
        seed=seed,
    )
    return samples.to(comfy.model_management.intermediate_device())
