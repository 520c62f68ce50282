"""Another strength, or another LoRA, under torch.compile: nothing is compiled again, and the result stays right."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator
from typing import Any

import lora
import todo
import torch
from device_timer import Timer, wait

from .case import CannotRun, Case, Row, Setting, at_most, open_host, row

RANK, CHANGE = 16, 0.1
COMPILING, CHANGED = 60.0, 10.0  # seconds; forwards, of which compiling again would take a thousand
STRENGTHS = (0.5, 1.0, 0.25)
TOLERANCE = {"inductor": 2e-3, "eager": 1e-5}  # of the largest value; inductor's kernels add in another order


def cases(setting: Setting) -> list[Case]:
    """Both ways of applying a stack."""
    open_host(setting)
    return [Case(mode, functools.partial(changed, setting, mode)) for mode in ("merge", "bypass")]


def backend_of(setting: Setting) -> str:
    """inductor on CUDA, where it needs Triton; elsewhere eager, whose guards are the same."""
    if setting.device.type != "cuda" or setting.tiny:
        return "eager"
    if importlib.util.find_spec("triton") is None:
        raise CannotRun("torch.compile needs triton, which is not installed")
    return "inductor"


def compiled(patcher: Any, backend: str) -> Any:
    """A clone that compiles: ComfyUI's own way where the host has it, else a wrapper of the same kind."""
    clone = patcher.clone()
    if importlib.util.find_spec("comfy_api.torch_helpers") is not None:
        from comfy_api.torch_helpers import set_torch_compile_wrapper

        set_torch_compile_wrapper(model=clone, backend=backend)
        return clone
    from comfy.patcher_extension import WrappersMP

    network = torch.compile(clone.model.diffusion_model, backend=backend)

    def compute(executor: Any, *arguments: Any, **named: Any) -> Any:
        model = executor.class_obj
        plain, model.diffusion_model = model.diffusion_model, network
        try:
            return executor(*arguments, **named)
        finally:
            model.diffusion_model = plain

    clone.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "torch.compile", compute)
    return clone


def changed(setting: Setting, mode: str) -> Iterator[Row]:
    """Seconds until the first forward with another strength, and with another LoRA."""
    from graft_nodes.host.lora_stacks import apply_lora_stack
    from graft_nodes.patches.lora_files.entry import LoraEntry
    from graft_nodes.tests.sampling_options import sampling_options

    backend, timer, shape = backend_of(setting), Timer(setting.device), "66M"
    if setting.tiny:
        shape = "tiny"
    torch.backends.cudnn.allow_tf32 = False
    torch._dynamo.reset()
    base = todo.build(shape, setting.device, torch.float32)
    files = [lora.lora(base.model, RANK, seed, CHANGE) for seed in range(2)]
    draws = torch.Generator().manual_seed(0)
    x = torch.randn(1, 4, 32, 32, generator=draws).to(setting.device)
    text = torch.randn(1, 77, todo.SHAPES[shape]["context_dim"], generator=draws).to(setting.device)
    sampled = compiled(base, backend)

    def stacked(model: Any, file: dict[str, torch.Tensor], strength: float) -> Any:
        return apply_lora_stack(model, None, [LoraEntry("a", file, strength)], mode).model

    def forward(patcher: Any) -> torch.Tensor:
        lora.load(patcher)
        options = {**sampling_options(patcher), "sigmas": torch.ones(1, device=setting.device)}
        with torch.inference_mode():
            sigma = torch.ones(1, device=setting.device)
            return patcher.model.apply_model(x, sigma, c_crossattn=text, transformer_options=options).float()

    def first_forward(patcher: Any) -> tuple[float, torch.Tensor]:
        results: list[torch.Tensor] = []
        return timer.seconds(lambda: results.append(forward(patcher))), results[0]

    started = timer.clock()
    for _ in range(2):  # torch.compile learns at the second call which sizes vary
        forward(stacked(sampled, files[0], STRENGTHS[0]))
    wait(setting.device)
    yield row(
        "compiling", timer.clock() - started, "s", at_most(COMPILING), note=f"backend {backend}, the first two forwards"
    )
    again = stacked(sampled, files[0], STRENGTHS[0])
    plain = min(first_forward(again)[0] for _ in range(3))
    changes = [(f"strength {strength}", files[0], strength) for strength in STRENGTHS[1:]]
    for name, file, strength in [*changes, ("another LoRA", files[1], 1.0)]:
        with torch._dynamo.config.patch(error_on_recompile=True):
            seconds, found = first_forward(stacked(sampled, file, strength))
        wanted = forward(stacked(base, file, strength))
        far = float((found - wanted).abs().max() / wanted.abs().max())
        assert far <= TOLERANCE[backend], f"{name}: {far:.1e} of the largest value from what it is without compiling"
        note = f"nothing compiled again; {far:.0e} of the largest value from the result without compiling"
        yield row(
            f"{name}, with its first forward", seconds, "s", at_most(CHANGED), seconds / plain, f"forwards; {note}"
        )
    lora.load(base)
