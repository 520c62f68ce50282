"""Preview images during training: samples with ComfyUI's sampler, without changing the loaded model, and saves files
for the front end.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import tempfile
import wave
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch

from ..patches.adapters.rank_mask import set_timesteps
from ..patches.token_downsampling.unet import EVALUATING
from ..storage.atomic import make_folders, move_file, write_whole
from ..storage.file_list import names_in
from ..storage.pictures import open_picture, picture_errors
from ..training.run.preview_prompts import PLAIN, PromptLine
from . import folders, latents
from .comfyui_objects import Clip, Conditioning, Latent, Model, Sampling, Vae
from .device_memory import unload
from .model_sampling import prediction_type, timestep_of
from .network_state import drop_weight_caches

STEPS, SAMPLER = 20, "euler"
PREVIEWS = "previews"  # in the folder of a run
MOST = 1000  # previews that a panel may show


def check_inputs(
    positive: Conditioning,
    negative: Conditioning | None,
    latent: Latent,
    vae: Vae,
    prompts: Sequence[PromptLine],
    clip: Clip,
) -> None:
    """Raises ValueError that names every missing or unsupported input of previews. `prompts` are encoded with `clip`,
    and serve without a positive.
    """
    inputs = {"latent": latent, "VAE (on Start Training, or on Load State)": vae}
    if prompts:
        inputs["CLIP (on Start Training, or on Load State), which encodes more preview prompts,"] = clip
    else:
        inputs = {"positive prompt": positive, **inputs}
    errors = [f"{label} is not connected" for label, value in inputs.items() if value is None]
    if latent is not None:
        latents.check_previewable(latent)
        if any(line.width or line.height for line in prompts) and not latents.is_empty(latent["samples"]):
            errors.append("a prompt has --w or --h, and latent holds a picture: connect an empty latent")
    for label, conditioning in (("positive prompt", positive), ("negative prompt", negative)):
        unsupported = {
            key for _, options in conditioning or () for key in ("control", "hooks") if options.get(key) is not None
        }
        errors += [f"{label} has {key}, which needs more weights in memory" for key in sorted(unsupported)]
    if errors:
        raise ValueError(
            f"Train Step: preview every N steps is above 0, and {'; '.join(errors)}. Connect what is missing, or set"
            " preview every N steps to 0."
        )


@torch.no_grad()
def sample(
    patcher: Model,
    positive: Conditioning,
    negative: Conditioning | None,
    latent: Latent,
    seed: int,
    line: PromptLine = PLAIN,
) -> torch.Tensor:
    """Sample latents (B, C, h, w) as `line` says, with the weights that are on a loaded MODEL now. Where it says
    nothing: `seed`, the size of `latent`, 20 steps of Euler with the scheduler simple (flow models) or normal, and with
    a negative the guidance 7, of flow models 4.

    The MODEL is neither loaded nor changed. Without a negative there is no guidance. The noise is KSampler's for that
    seed. Global generators stay as they are.
    """
    import comfy.samplers

    class Loaded(comfy.samplers.CFGGuider):
        """A guider that does not load or move the model."""

        def outer_sample(
            self,
            noise: Any,
            latent_image: Any,
            sampler: Any,
            sigmas: Any,
            denoise_mask: Any = None,
            callback: Any = None,
            disable_pbar: bool = False,
            seed: Any = None,
            **more: Any,
        ) -> Any:
            self.inner_model, device = self.model_patcher.model, self.model_patcher.load_device
            noise, latent_image = noise.to(device, torch.float32), latent_image.to(device, torch.float32)
            return self.inner_sample(
                noise,
                latent_image,
                device,
                sampler,
                sigmas.to(device),
                denoise_mask,
                callback,
                disable_pbar,
                seed,
                **more,
            )

    start, noise, sigmas = prepare_sampling(patcher, latent, seed, line)
    guider = set_up_guider(Loaded(patcher), positive, negative, line.cfg)
    with keep_generators(patcher), drop_weight_caches(patcher.model.diffusion_model):
        sampler = comfy.samplers.sampler_object(line.sampler or SAMPLER)
        return guider.sample(noise, start, sampler, sigmas, disable_pbar=True, seed=seed_of(line, seed)).to("cpu")


def seed_of(line: PromptLine, seed: int) -> int:
    """The seed of a preview: its own, or that of all previews."""
    return seed if line.seed is None else line.seed


def check_samplers(prompts: Sequence[PromptLine]) -> None:
    """Raises ValueError for a sampler or a scheduler that ComfyUI does not know."""
    import comfy.samplers

    names = comfy.samplers.KSampler
    for number, line in enumerate(prompts, start=1):
        for flag, name, known in (("ss", line.sampler, names.SAMPLERS), ("sc", line.scheduler, names.SCHEDULERS)):
            if name and name not in known:
                raise ValueError(
                    f"Train Step: more preview prompts: prompt {number}: --{flag} is {name[:40]!r}, expected one of"
                    f" {', '.join(known)}."
                )


def prepare_sampling(
    patcher: Model, latent: Latent, seed: int, line: PromptLine = PLAIN
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What previews are sampled from: the latents, KSampler's noise for that seed, and the noise levels."""
    import comfy.samplers

    sampling = patcher.get_model_object("model_sampling")
    start = latents.prepare_latent(patcher, latent)
    noise = latents.draw_noise(start, torch.Generator().manual_seed(seed_of(line, seed)))
    schedule = line.scheduler or ("simple" if prediction_type(sampling) == "flow" else "normal")
    sampler = comfy.samplers.KSampler(patcher, line.steps or STEPS, "cpu", line.sampler or SAMPLER, schedule)
    return start, noise, sampler.sigmas


def set_up_guider(guider: Any, positive: Conditioning, negative: Conditioning | None, cfg: float | None = None) -> Any:
    """One of ComfyUI's CFGGuiders with the prompts and the guidance of previews."""
    patcher = guider.model_patcher
    sampling = patcher.get_model_object("model_sampling")
    flow = prediction_type(sampling) == "flow"
    guider.model_options = {
        **patcher.model_options,
        "transformer_options": {**patcher.model_options.get("transformer_options", {}), EVALUATING: True},
    }
    guider.model_options = with_timesteps(guider.model_options, sampling)
    guider.set_conds(positive, negative if negative is not None else positive)
    if negative is None:
        cfg = 1.0
    elif cfg is None:
        cfg = 4.0 if flow else 7.0
    guider.set_cfg(cfg)
    return guider


def with_guidance(conditioning: Any, guidance: float | None) -> Any:
    """A CONDITIONING with the guidance that distilled models are told, as ComfyUI's Flux Guidance sets it."""
    if guidance is None:
        return conditioning
    return [[context, {**options, "guidance": guidance}] for context, options in conditioning]


def keep_generators(patcher: Model) -> contextlib.AbstractContextManager[None]:
    """A context after which the global generators are as they were."""
    if patcher.load_device.type == "cuda":
        return torch.random.fork_rng([patcher.load_device])
    return torch.random.fork_rng([])


def with_timesteps(model_options: Mapping[str, Any], sampling: Sampling) -> dict[str, Any]:
    """Model options for sampling in which adapters that are being trained know the noise level."""
    import comfy.patcher_extension as extension

    def told(executor: Any, x: torch.Tensor, t: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        with set_timesteps(timestep_of(sampling, t.flatten()[:1])):  # one level for all pictures
            return executor(x, t, *args, **kwargs)

    own = {"wrappers": {extension.WrappersMP.APPLY_MODEL: {"graft_timesteps": [told]}}}
    options = model_options.get("transformer_options", {})
    return {**model_options, "transformer_options": extension.merge_nested_dicts(options, own)}


def decode(vae: Vae, denoised: Any, training: Any) -> torch.Tensor:
    """Pictures (B, h, w, 3) in 0..1. The MODEL `training` stays loaded whatever the decoder needs, and the decoder
    leaves its device afterwards.
    """
    with _hold_loaded(training):
        pictures = decode_alone(vae, denoised)
    if getattr(vae, "patcher", None) is not None:
        unload(vae.patcher)
    return pictures


@torch.no_grad()
def decode_alone(vae: Vae, denoised: Any) -> torch.Tensor:
    """The same where no MODEL needs to stay loaded."""
    return latents.decode(vae, denoised).float().cpu()


@contextlib.contextmanager
def _hold_loaded(patcher: Model) -> Iterator[None]:
    """Hides a loaded model from ComfyUI inside the block, so that it is not unloaded."""
    import comfy.model_management as management

    loaded = management.current_loaded_models
    entries = [entry for entry in loaded if entry.model is patcher]
    for entry in entries:
        loaded.remove(entry)
    try:
        yield
    finally:
        loaded[:0] = entries


def save_pictures(pictures: torch.Tensor, run: str, name: str, text: str = "") -> list[dict[str, str]]:
    """Write pictures (B, h, w, 3) as JPEG files into the folder `previews` of a run; returns their addresses for the
    front end's /view. The `text` of their prompt becomes the files' comment.

    Raises OSError that names the file and says what to do when the disk is full.
    """
    from PIL import Image

    folder = folder_of(run)
    make_folders(Path(folder))
    note = {"comment": text} if text else {}
    files = []
    for number, picture in enumerate(pictures):
        file = f"{name}-{number}.jpg"
        body = io.BytesIO()
        Image.fromarray((picture.clamp(0, 1) * 255).round().to(torch.uint8).numpy()).save(
            body, format="JPEG", quality=92, **note
        )
        write_whole(os.path.join(folder, file), [body.getvalue()])
        files.append(_view_address(run, file))
    return files


def save_media(video: Any, audio: Any, run: str, name: str) -> list[dict[str, str]]:
    """Write ComfyUI's VIDEO as MP4 and the first sound of its AUDIO as WAV into the folder `previews` of a run, where
    they are not None; returns their addresses as `save_pictures` does.
    """
    folder, files = folder_of(run), []
    make_folders(Path(folder))
    if video is not None:
        file = f"{name}-0.mp4"
        with tempfile.TemporaryDirectory(dir=folder, prefix=".") as drafts:  # it writes to a path, which may break off
            video.save_to(os.path.join(drafts, file))
            move_file(os.path.join(drafts, file), os.path.join(folder, file))
        files.append(_view_address(run, file))
    if audio is not None:
        file = f"{name}-0.wav"
        write_whole(os.path.join(folder, file), [_wave_of(audio["waveform"][0], audio["sample_rate"])])
        files.append(_view_address(run, file))
    return files


def _wave_of(samples: torch.Tensor, rate: int) -> bytes:
    """A WAV file, 16 bits, of samples (channels, T) in -1..1."""
    whole = (samples.detach().float().cpu().clamp(-1, 1) * 32767).round().to(torch.int16)
    body = io.BytesIO()
    with wave.open(body, "wb") as file:
        file.setnchannels(len(whole))
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(whole.T.contiguous().numpy().astype("<i2").tobytes())
    return body.getvalue()


def name_of(start: str, step: int, label: str, prompt: int = 0) -> str:
    """The name, without number and extension, of previews at a step of the run that began from the digest `start`.

    `prompt` is the number of one of more preview prompts, 0 is the positive.
    """
    name = f"{start[:12]}-{step:08}-{label}"
    if prompt:
        name += f"-p{prompt}"
    return name


_STEM = r"([0-9a-f]{12})-(\d{8})-(weights|average)(?:-p(\d{1,2}))?-(\d+)"
NAME = re.compile(_STEM + r"\.jpg")
_KEPT = re.compile(_STEM + r"\.(?:jpg|mp4|wav)")


def list_kept(run: str, start: str, until: int) -> list[dict[str, Any]]:
    """The newest previews of a run up to a step, oldest first: their /view addresses, steps and labels; with several
    prompts also its number and text.
    """
    matches = [one for one in map(_KEPT.fullmatch, names_in(folder_of(run))) if one]
    matches = [one for one in matches if one[1] == start[:12] and int(one[2]) <= until]
    matches.sort(key=lambda one: (int(one[2]), one[3] == "average", int(one[4] or 0), int(one[5]), one[0]))
    shown = []
    for match in matches[-MOST:]:
        picture: dict[str, Any] = {**_view_address(run, match[0]), "step": int(match[2]), "label": match[3]}
        if match[4]:
            text = read_comment(os.path.join(folder_of(run), match[0]))
            picture.update(prompt=int(match[4]), text=text)
        shown.append(picture)
    return shown


def read_comment(file: str | BinaryIO) -> str:
    """The prompt that a preview was made with; empty where the file cannot be read."""
    try:
        with open_picture(file) as picture:
            text = picture.info.get("comment", b"")
    except picture_errors():
        return ""
    return bytes(text).decode("utf-8", "replace")


def folder_of(run: str) -> str:
    """Where the previews of a run are kept."""
    return os.path.join(folders.previews_folder(), run, PREVIEWS)


def _view_address(run: str, file: str) -> dict[str, str]:
    return {
        "filename": file,
        "subfolder": f"{os.path.basename(folders.previews_folder())}/{run}/{PREVIEWS}",
        "type": "output",
    }
