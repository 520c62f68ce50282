"""A step at Flux' width with few blocks, at 1,024 pixels: weights in bf16, fp8, int8 and NF4; the model's layers or the
activations in host memory.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from device_timer import MB, peak_mb

import training

from .case import CHECKED, CannotRun, Case, Row, Setting, at_most, open_host, row
from .sdxl_step import clear
from .stack import need_fp8

SHAPE = {
    "image_model": "flux",
    "in_channels": 16,
    "out_channels": 16,
    "vec_in_dim": 768,
    "context_in_dim": 4096,
    "hidden_size": 3072,
    "mlp_ratio": 4.0,
    "num_heads": 24,
    "depth": 2,
    "depth_single_blocks": 4,
    "axes_dim": [16, 56, 56],
    "theta": 10000,
    "patch_size": 2,
    "qkv_bias": True,
    "guidance_embed": True,
    "txt_ids_dims": [],
}
TINY = {
    **SHAPE,
    "vec_in_dim": 8,
    "context_in_dim": 16,
    "hidden_size": 64,
    "num_heads": 4,
    "depth_single_blocks": 2,
    "axes_dim": [4, 6, 6],
}
SIDE, TOKENS, TINY_SIDE, TINY_TOKENS = 128, 512, 8, 4
AS_LOADED, BF16, FP8 = "as loaded", "bf16", "fp8"
KINDS = (BF16, FP8, "int8", "nf4")
PLAN = 1.10  # of what a plan says
SECONDS = {FP8: 1.5, "int8": 1.1, "nf4": 1.5}  # of a step on bf16 weights, all with checkpointing
OFFLOADS = {"none": 1.0, "activations": 2.0, "layers": 2.5}  # of a step without; six blocks hide less than 57 do
ALL = 1000  # blocks wait in host memory, however many would fit on the card
LOSS = 0.1  # of bf16's, that another type may differ by


class Step(NamedTuple):
    """What steps have cost and given."""

    seconds: float
    peak: float
    planned: float
    losses: tuple[float, ...]


def cases(setting: Setting) -> list[Case]:
    """Each type of weights."""
    return [Case(kind, functools.partial(measured, setting, kind)) for kind in KINDS]


def model_of(setting: Setting, kind: str) -> Any:
    """A MODEL of ComfyUI's own class, random, waiting in host memory."""
    if not setting.comfyui:
        raise CannotRun("there is no ComfyUI checkout, and the embedded host has no Flux: name one with --comfyui")
    open_host(setting)
    if kind == FP8:
        need_fp8(setting.device)
    import comfy.model_patcher
    import comfy.supported_models

    config = comfy.supported_models.Flux(dict(TINY if setting.tiny else SHAPE))
    if kind == FP8:
        config.set_inference_dtype(torch.float8_e4m3fn, torch.bfloat16)
    else:
        config.set_inference_dtype(torch.bfloat16, None)
    model = config.get_model({}, device=setting.device)
    draws = torch.Generator(setting.device).manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.diffusion_model.named_parameters():
            drawn = torch.full(parameter.shape, float(name.endswith(("weight", "scale"))), device=setting.device)
            if parameter.ndim > 1:
                drawn = torch.randn(parameter.shape, generator=draws, device=setting.device)
                drawn *= parameter[0].numel() ** -0.5
            parameter.copy_(drawn)
    cpu = torch.device("cpu")
    return comfy.model_patcher.ModelPatcher(model.to(cpu), setting.device, cpu)


def dataset(setting: Setting) -> Any:
    """Latents with one caption."""
    from graft_nodes.training.data.dataset import Conditioning, Dataset

    shape, draws = TINY if setting.tiny else SHAPE, torch.Generator().manual_seed(0)
    side, tokens = (TINY_SIDE, TINY_TOKENS) if setting.tiny else (SIDE, TOKENS)
    pooled = torch.randn(1, shape["vec_in_dim"], generator=draws)
    context = torch.randn(1, tokens, shape["context_in_dim"], generator=draws)
    latents = [torch.randn(16, side, side, generator=draws) for _ in range(2)]
    return Dataset.from_latents(
        latents, ["a"] * 2, {name: Conditioning(context, {"pooled_output": pooled}) for name in ("a", "")}
    )


def steps(setting: Setting, patcher: Any, kind: str, offload: str) -> Step:
    """Some steps with one way of saving memory."""
    from graft_nodes.host import memory_planning
    from graft_nodes.host.denoiser import open_denoiser
    from graft_nodes.training.optimizers.settings import OptimizerSettings
    from graft_nodes.training.state import Settings, Start, begin
    from graft_nodes.training.trainable.settings import AdapterSettings

    data = dataset(setting)
    base = AS_LOADED if kind in (BF16, FP8) else kind
    adapter = AdapterSettings(rank=16, base_weights=base)
    saved = {"checkpointing": True, "offload": offload, "swapped_blocks": ALL if offload == "layers" else 0}
    optimizer = OptimizerSettings(precision="bf16", learning_rate=1e-3, **saved)
    state = begin(patcher.model.diffusion_model, Start("random", data.digest, adapter, seed=1), Settings(optimizer))
    planned = memory_planning.plan(patcher, state, data).peak
    with contextlib.ExitStack() as stack:
        denoiser = stack.enter_context(open_denoiser(patcher, layers=offload == "layers" or base != AS_LOADED))
        stack.enter_context(torch.inference_mode(False))
        clear(setting.device)
        state, seconds = training.seconds_of_steps(state, denoiser, data, 3 if setting.tiny else 5)
        peak = peak_mb(setting.device)
    return Step(statistics.median(seconds), peak, planned / MB, state.history.loss)


@functools.cache
def plain(setting: Setting) -> Step:
    """Steps on bf16 weights on the device, which the others are compared with."""
    return steps(setting, model_of(setting, BF16), BF16, "none")


def measured(setting: Setting, kind: str) -> Iterator[Row]:
    """Seconds and memory of each way, and the same losses from all of them."""
    patcher = model_of(setting, kind)
    found = {offload: steps(setting, patcher, kind, offload) for offload in OFFLOADS}
    none = found["none"]
    for offload, step in found.items():
        assert step.losses == none.losses, f"offload {offload}: losses {step.losses}, without {none.losses}"
        if offload != "none":
            note = "of a step without it, with the same losses"
            yield row(
                f"offload {offload}", step.seconds, "s", at_most(OFFLOADS[offload]), step.seconds / none.seconds, note
            )
        if setting.device.type == "cuda":
            yield row(
                f"offload {offload}, peak", step.peak, "MB", at_most(PLAN), step.peak / step.planned, "of the plan"
            )
    if kind == BF16:
        yield row("losses", len(none.losses), "", CHECKED, note="the same with every way of saving memory")
        return
    bf16 = plain(setting)
    off = max(abs(one / other - 1) for one, other in zip(none.losses, bf16.losses, strict=True))
    assert off > 0, f"the losses are those on bf16 weights: nothing is of type {kind}"
    yield row("losses", off, "", at_most(LOSS), note="the largest distance to those on bf16 weights, in these")
    yield row(
        "a step", none.seconds, "s", at_most(SECONDS[kind]), none.seconds / bf16.seconds, "of one on bf16 weights"
    )
    if setting.device.type == "cuda":
        yield row("peak", none.peak, "MB", at_most(1.0), none.peak / bf16.peak, "of bf16 weights'")
