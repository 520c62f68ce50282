"""ComfyUI's dynamic VRAM, its default on NVIDIA cards: a checkpoint of SDXL's shape from a file, LoRA and text encoder
over two Train Steps, and a LoRA stack on the paged model. Tiny, it is the demo's model.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import lora
import todo
import torch
from device_timer import MB, Timer
from torch import Tensor, nn

from .case import CHECKED, CannotRun, Case, Row, Setting, at_least, at_most, open_host, row
from .sdxl_step import clear

CAPTION, SIDE, TINY_SIDE, RATE = "a red square left", 32, 8, 1e-3
BYTES = 1.05  # of the weights in the type that they train in: what is on the device before the first step
ERROR = 0.1  # of gradients in half precision, beside float32 on the CPU
AGAIN = 3.0  # GB/s from host memory, for the second Train Step: a file that is read again is slower
OVERHEAD = 1.35  # of a sample without a stack
CPU = torch.device("cpu")
Load = Callable[..., tuple[Any, Any]]  # (MODEL, CLIP), paged unless disable_dynamic


def cases(setting: Setting) -> list[Case]:
    """Training, then sampling."""
    return [
        Case("LoRA and text encoder over two Train Steps", functools.partial(two_train_steps, setting)),
        Case("a LoRA stack on a paged model", functools.partial(stack, setting)),
    ]


@functools.cache
def opened(setting: Setting) -> Load:
    """How the model is loaded on a ComfyUI that pages it."""
    if setting.device.type == "cpu":
        raise CannotRun("ComfyUI pages no model that computes on the CPU")
    if not setting.comfyui:
        raise CannotRun("there is no ComfyUI checkout: name one of 0.33 or later with --comfyui or COMFYUI_PATH")
    open_host(setting)
    import comfy.model_patcher

    if not hasattr(comfy.model_patcher, "ModelPatcherDynamic"):
        raise CannotRun("this ComfyUI has no dynamic VRAM: name one of 0.33 or later")
    load = of_demo if setting.tiny else of_checkpoint(setting.device)
    switch_on(setting.device)
    return load


def switch_on(device: torch.device) -> None:
    """Have ComfyUI page what it loads from now on, as its main.py does; on the second device with a stand-in."""
    if device.type != "cuda":
        from graft_nodes.tests.second_device import dynamic_vram

        dynamic_vram.switch_on(device)
        return
    import comfy.memory_management
    import comfy.model_patcher
    import comfy_aimdo.control

    if not (comfy_aimdo.control.init() and comfy_aimdo.control.init_devices([device.index])):
        raise CannotRun("comfy-aimdo does not start on this machine")
    comfy.model_patcher.CoreModelPatcher = comfy.model_patcher.ModelPatcherDynamic
    comfy.memory_management.aimdo_enabled = True


def of_demo(disable_dynamic: bool = False) -> tuple[Any, Any]:
    """The demo's model."""
    from graft_nodes.demo.host_model import demo_clip, demo_patcher
    from graft_nodes.nodes.demo import BASE

    return demo_patcher(str(BASE), disable_dynamic), demo_clip(str(BASE), disable_dynamic)


def of_checkpoint(device: torch.device) -> Load:
    """A checkpoint of SDXL's shape on the disk, random, in fp16 with norms in float32, read by ComfyUI's own loader."""
    import comfy.model_patcher
    import comfy.sd
    import comfy.supported_models

    config = comfy.supported_models.SDXL(dict(todo.SHAPES["sdxl"]))
    config.set_inference_dtype(torch.float16, None)
    model = comfy.model_patcher.ModelPatcher(config.get_model({}, device=device), device, device)
    clip = comfy.sd.CLIP(config.clip_target({}))
    fill_(model.model.diffusion_model, device)
    fill_(clip.cond_stage_model, device)
    folder = tempfile.TemporaryDirectory()
    path = Path(folder.name) / "sdxl.safetensors"
    comfy.sd.save_checkpoint(str(path), model, clip)
    del model, clip
    clear(device)

    def load(disable_dynamic: bool = False, kept: Any = folder) -> tuple[Any, Any]:
        found = comfy.sd.load_checkpoint_guess_config(str(path), output_vae=False, disable_dynamic=disable_dynamic)
        return found[0], found[1]

    return load


@torch.no_grad()
def fill_(module: nn.Module, device: torch.device) -> None:
    """Random matrices, and norms that do nothing, in float32."""
    draws = torch.Generator(device).manual_seed(0)
    for name, parameter in module.named_parameters():
        if parameter.ndim > 1:
            drawn = torch.randn(parameter.shape, generator=draws, device=device)
            parameter.copy_(drawn * parameter[0].numel() ** -0.5)
        else:
            parameter.data = torch.full_like(parameter, float(name.endswith("weight")), dtype=torch.float32)


# --- training ---------------------------------------------------------------------------------------------------------


def dataset(setting: Setting, model: Any, clip: Any) -> Any:
    """Latents with one caption, as the text encoder encodes it."""
    from graft_nodes.host.encoding import encode_captions
    from graft_nodes.training.data.dataset import Dataset

    draws, side = torch.Generator().manual_seed(0), TINY_SIDE if setting.tiny else SIDE
    channels = model.model.latent_format.latent_channels
    latents = [torch.randn(channels, side, side, generator=draws) for _ in range(2)]
    with torch.inference_mode():
        return Dataset.from_latents(latents, [CAPTION] * 2, encode_captions(clip, [CAPTION, ""]))


def begun(denoiser: Any, data: Any) -> Any:
    """A LoRA on the model and its text encoder that learns by plain descent, so that a step is its gradient."""
    from graft_nodes.training.optimizers.settings import OptimizerSettings
    from graft_nodes.training.state import Settings, Start, begin
    from graft_nodes.training.trainable.settings import AdapterSettings

    adapter = AdapterSettings(rank=4, text_encoder=True)
    optimizer = OptimizerSettings("sgd", RATE, clip_norm=0.0, weight_decay=0.0)
    start = Start("random", data.digest, adapter, seed=1)
    return begin(denoiser.module, start, Settings(optimizer), text_encoder=denoiser.text_encoder)


def two_train_steps(setting: Setting) -> Iterator[Row]:
    """Types, bytes, gradients against the CPU, and what the second Train Step loads."""
    load, timer = opened(setting), Timer(setting.device)
    from graft_nodes.host.denoiser import open_denoiser
    from graft_nodes.training.run.loop import train

    model, clip = load()
    assert model.is_dynamic() and clip.patcher.is_dynamic(), "ComfyUI does not page the model"
    reads: list[str] = []
    for name, patcher in (("model", model), ("text encoder", clip.patcher)):
        factory, *rest = patcher.cached_patcher_init
        patcher.cached_patcher_init = (counted(reads, name, factory), *rest)
    data = dataset(setting, model, clip)
    states: list[Any] = []
    opening = []
    for turn in range(2):
        clear(setting.device)
        started = timer.clock()
        with open_denoiser(model, clip=clip) as denoiser, torch.inference_mode(False):
            opening.append(timer.clock() - started)
            parts = {"model": denoiser.module, "text encoder": denoiser.text_encoder}
            assert not [1 for part in parts.values() for layer in part.modules() if hasattr(layer, "_v")], "it is paged"
            size = sum(weight.nbytes for part in parts.values() for weight in part.parameters())
            if turn == 0:
                yield from types(model, parts["model"])
                if setting.device.type == "cuda":
                    used = torch.cuda.memory_allocated(setting.device)
                    yield row("on the device", used / MB, "MB", at_most(BYTES), used / size, "of the weights' bytes")
                states.append(begun(denoiser, data))
            states.append(train(states[-1], denoiser, data, 1))
    assert sorted(reads) == ["model", "text encoder"], f"read again: {', '.join(reads)}"
    yield row("reads", len(reads), "", CHECKED, note="the file is read once for each, over two Train Steps")
    seconds = opening[1]
    note = f"{seconds:.3g} s, the first {opening[0]:.3g} s"
    yield row("the second load", size / seconds / 1e9, "GB/s", at_least(AGAIN), note=note)
    moved = {name: states[2].trained[name] - states[1].trained[name] for name in states[1].trained}
    assert any(bool(change.any()) for change in moved.values()), "the second Train Step changed nothing"
    found = [states[0].trained, states[1].trained]
    del model, clip, denoiser, parts
    yield from gradients(found, on_the_cpu(load, data))


def counted(reads: list[str], name: str, factory: Callable[..., Any]) -> Callable[..., Any]:
    """A factory that says when it is called."""

    def load(*given: Any, **options: Any) -> Any:
        reads.append(name)
        return factory(*given, **options)

    return load


def types(model: Any, module: nn.Module) -> Iterator[Row]:
    """The copy's weights have the type that the model computes in, whatever the file has."""
    dtype = model.model.get_dtype()
    other = [name for name, weight in module.named_parameters() if weight.dtype != dtype]
    assert not other, f"{len(other)} weights are not {dtype}: {', '.join(other[:5])}"
    files = sorted({str(weight.dtype) for weight in model.model.diffusion_model.parameters()})
    count = len(list(module.parameters()))
    yield row("weights", count, "", CHECKED, note=f"all in {dtype}; in the file {', '.join(files)}")


def on_the_cpu(load: Load, data: Any) -> list[Mapping[str, Tensor]]:
    """What is trained before and after the same step, on the CPU in float32, with a model that was never paged."""
    from graft_nodes.host.denoiser import open_denoiser
    from graft_nodes.training.run.loop import train

    model, clip = load(disable_dynamic=True)
    for patcher, network in ((model, model.model.diffusion_model), (clip.patcher, clip.cond_stage_model)):
        patcher.load_device = patcher.offload_device = CPU
        network.to(CPU, torch.float32)
    model.model.diffusion_model.dtype, model.model.manual_cast_dtype = torch.float32, None
    with open_denoiser(model, clip=clip) as denoiser, torch.inference_mode(False):
        state = begun(denoiser, data)
        return [state.trained, train(state, denoiser, data, 1).trained]


def gradients(found: list[Mapping[str, Tensor]], expected: list[Mapping[str, Tensor]]) -> Iterator[Row]:
    """Their distance, of the model's LoRA and of the text encoder's."""
    for title, is_text in (("the model's LoRA", False), ("the text encoder's LoRA", True)):
        names = [name for name in found[0] if name.startswith("text_encoders.") == is_text]
        ours, theirs = (
            torch.cat([(after[name] - before[name]).flatten() for name in names]) for before, after in (found, expected)
        )
        assert float(theirs.norm()) > 0, f"{title} has no gradient on the CPU"
        error = float((ours - theirs).norm() / theirs.norm())
        yield row(
            f"gradients of {title}", error, "", at_most(ERROR), note="distance to float32 on the CPU, over its norm"
        )


# --- sampling ---------------------------------------------------------------------------------------------------------


def stack(setting: Setting) -> Iterator[Row]:
    """Eight LoRAs at the activations, as auto puts them there: seconds of a sample, and its numbers beside a whole
    model's.
    """
    load, timer = opened(setting), Timer(setting.device)
    from graft_nodes.host.lora_stacks import apply_lora_stack
    from graft_nodes.host.previews import sample
    from graft_nodes.patches.lora_files.entry import LoraEntry

    results = {}
    for paged in (True, False):
        model, clip = load(disable_dynamic=not paged)
        latent = {
            "samples": torch.zeros(
                1, model.model.latent_format.latent_channels, *[TINY_SIDE if setting.tiny else 64] * 2
            )
        }
        positive = clip.encode_from_tokens_scheduled(clip.tokenize(CAPTION))
        files = [lora.lora(model.model.diffusion_model, 8, seed, 0.1) for seed in range(8)]
        files = [{f"diffusion_model.{name}": tensor for name, tensor in file.items()} for file in files]
        entries = [LoraEntry(str(number), file, 0.5) for number, file in enumerate(files)]
        stacked = apply_lora_stack(model, None, entries, "auto").model

        def sampled(patcher: Any, positive: Any = positive, latent: Any = latent) -> Tensor:
            lora.load(patcher)
            patcher.pre_run()
            return sample(patcher, positive, None, latent, 1, steps=4)

        results[paged] = sampled(stacked), sampled(model)
        if paged:
            plain, slower = (
                min(timer.seconds(functools.partial(sampled, patcher)) for _ in range(2))
                for patcher in (model, stacked)
            )
            note = "of a sample without LoRAs, with eight of rank 8"
            yield row("a sample", slower, "s", at_most(OVERHEAD), slower / plain, note)
        del model, clip, stacked
        clear(setting.device)
    (found, plain), (expected, _) = results[True], results[False]
    assert not torch.equal(found, plain), "the stack changes nothing"
    error = float((found - expected).norm() / (expected - plain).norm())
    yield row(
        "numbers", error, "", at_most(ERROR), note="distance to a merged stack on a whole model, over what it changes"
    )
