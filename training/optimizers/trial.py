"""Tries an optimizer class of a package on a few small tensors before anything is trained with it: it must move them,
and go on from its saved state to the same bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from .from_package import UnfitClassError
from .settings import OptimizerSettings
from .stepper import OptimizerStepper

_SHAPES = {"a.weight": (8, 4), "b.weight": (4, 8), "c.bias": (8,), "d.weight": (4, 2, 3, 3)}
_STEPS = 3  # before its state is saved, and after it
# What a class raises that needs a closure, another optimizer, or tensors of another kind.
_FAULTS = (TypeError, ValueError, RuntimeError, AttributeError, LookupError, ArithmeticError, AssertionError)


def find_faults(settings: OptimizerSettings) -> list[str]:
    """Why a run cannot be trained with the optimizer class of these settings, as a sentence; empty where it can.

    Args:
        settings: their class, options, learning rate and weight decay count.
    """
    tried = OptimizerSettings(
        learning_rate=settings.learning_rate,
        weight_decay=settings.weight_decay,
        options=settings.options,
        optimizer_class=settings.optimizer_class,
    )
    return list(_faults(tried))


@functools.lru_cache(maxsize=16)
def _faults(settings: OptimizerSettings) -> tuple[str, ...]:
    path = settings.optimizer_class
    with torch.inference_mode(False), torch.enable_grad(), torch.random.fork_rng(devices=[]):
        try:
            first = _stepper(settings, _weights(), {})
            if any(callable(getattr(one, "eval", None)) for one in first.optimizers):
                return (
                    f"optimizer class {path} trains other weights than it samples with (it has eval): use schedulefree"
                    " or prodigyplus",
                )
            _take(first, 0)
            unsaved = sorted({name for one in first.optimizers for name in _unsaved(one)})
            if unsaved:
                return (f"optimizer class {path} keeps what cannot be saved in its state: {', '.join(unsaved)}",)
            saved, weights = first.state(), first.copy_sampling_weights()
            again = _stepper(settings, weights, saved)
            for stepper in (first, again):
                _take(stepper, _STEPS)
        except UnfitClassError as error:
            return (str(error),)
        except _FAULTS as error:
            return (f"optimizer class {path} fails on small tensors: {type(error).__name__}: {error}",)
    whole, resumed = first.copy_sampling_weights(), again.copy_sampling_weights()
    if any(torch.equal(whole[name], tensor) for name, tensor in _weights().items()):
        return (f"optimizer class {path} leaves some tensors where they are: use another one",)
    if any(not torch.equal(tensor, resumed[name]) for name, tensor in whole.items()):
        return (
            f"optimizer class {path} does not go on from its saved state to the same bytes, so a run with it could not"
            " be continued: it keeps something outside of its state, or draws random numbers",
        )
    return ()


def _unsaved(optimizer: torch.optim.Optimizer) -> Iterator[str]:
    """The entries of its state that are neither tensors nor numbers."""
    for state in optimizer.state.values():
        for name, value in state.items():
            if not (value is None or isinstance(value, Tensor | int | float)):
                yield str(name)


def _stepper(settings: OptimizerSettings, weights: dict[str, Tensor], saved: dict[str, Tensor]) -> OptimizerStepper:
    return OptimizerStepper(settings, weights, saved, torch.device("cpu"), 0)


def _weights() -> dict[str, Tensor]:
    draws = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=draws) for name, shape in _SHAPES.items()}


def _take(stepper: OptimizerStepper, first: int) -> None:
    for step in range(first, first + _STEPS):
        stepper.prepare(stepper.settings.learning_rate, step)
        draws = torch.Generator().manual_seed(step)
        for tensor in stepper.trained.values():
            tensor.grad = torch.randn(tensor.shape, generator=draws)
        stepper.step_()
