"""A ComfyUI model on PyTorch's meta device, so that a training step can be planned: its weights are not touched."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from ..training.data.dataset import Dataset
from ..training.expert_pair import ExpertPair
from ..training.memory.allocations import META, on_meta
from ..training.run import memory_plan, memory_savings
from ..training.state import TrainState
from . import model_headers
from .denoiser import Denoiser, fit_for_autograd
from .model_sampling import with_zero_terminal_snr


def for_a_card(memory: int) -> bool:
    """Whether to plan for a graphics card with bf16: its memory is named, and there is none here."""
    import comfy.model_management as management

    return memory > 0 and management.get_torch_device().type == "cpu"


@contextlib.contextmanager
def loading(memory: int) -> Iterator[None]:
    """A context in which ComfyUI loads diffusion models to plan them: as on a card of `memory` bytes, and with Load
    Diffusion Model without weights.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(model_headers.headers_only())
        if for_a_card(memory):
            stack.enter_context(model_headers.types_of_a_card())
        yield


def plan(patcher: Any, state: TrainState, dataset: Dataset, on_a_card: bool = False) -> memory_plan.MemoryPlan:
    """The memory of a training step of a MODEL on its device, or `on_a_card` with bf16."""
    settings = state.settings
    has_bf16 = on_a_card or (patcher.load_device.type == "cuda" and torch.cuda.is_bf16_supported())
    if settings.optimizer.precision == "auto" and has_bf16:
        settings = replace(settings, optimizer=replace(settings.optimizer, precision="bf16"))
    with _on_meta(patcher, settings.objective.zero_terminal_snr) as denoiser:
        on_host = patcher.load_device.type == "cpu" and not on_a_card
        return memory_plan.plan(replace(state, settings=settings), denoiser, dataset, on_host)


def report(state: Any, memory: int) -> str:
    """The plan of a state of Start Training as text; of both states of a pair of experts."""
    if isinstance(state, ExpertPair):
        return "\n\n".join(report(expert, memory) for expert in state.states)
    subject = state.subject

    on_a_card = for_a_card(memory)

    def planned(changed: TrainState) -> memory_plan.MemoryPlan:
        return plan(subject.model, changed, subject.dataset, on_a_card)

    savings = memory_savings.savings_of(subject.model.model.diffusion_model)
    text = memory_savings.report(state, planned, memory, savings)
    if on_a_card:
        text += "\nplanned for a graphics card with bf16, as this machine has none"
    return text


@contextlib.contextmanager
def _on_meta(patcher: Any, terminal: bool) -> Iterator[Denoiser]:
    """The Denoiser of a MODEL on the meta device; the network's own weights come there when they are counted."""
    from .network_state import evaluating, kept_attributes

    patcher = with_zero_terminal_snr(patcher, terminal)
    network = patcher.model.diffusion_model
    sampling = patcher.get_model_object("model_sampling")
    with contextlib.ExitStack() as stack:
        stack.enter_context(on_meta(sampling))
        for context in (kept_attributes(network), evaluating(network), fit_for_autograd(network, False)):
            stack.enter_context(context)
        yield Denoiser(patcher, device=META)
