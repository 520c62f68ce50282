"""Gradient checkpointing (1604.06174): blocks drop their activations and compute them again in the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint


def blocks(module: nn.Module) -> list[nn.Module]:
    """The blocks to checkpoint: residual and transformer blocks.

    These are the outermost modules that are in a ModuleList or Sequential and have several children.
    """
    outermost: list[nn.Module] = []

    def visit(part: nn.Module) -> None:
        for child in part.children():
            is_in_list = isinstance(part, nn.ModuleList | nn.Sequential) and not isinstance(
                child, nn.ModuleList | nn.Sequential
            )
            if is_in_list and len(list(child.children())) > 1:
                outermost.append(child)
            else:
                visit(child)

    visit(module)
    return outermost


def _as_it_is(value: Any) -> Any:
    """Copy a dictionary argument of a block, for the second run of the block.

    A host tells all blocks in one dictionary which of them runs, and has changed it by the time they run again. Values
    that count calls have `as_it_is`, a copy that goes on from here.
    """
    if isinstance(value, dict):
        return {key: item.as_it_is() if hasattr(item, "as_it_is") else item for key, item in value.items()}
    return value


def _in(modes: Sequence[TorchFunctionMode], call: Callable[[], Any]) -> Any:
    """Repeats a call in its original function modes, because the backward pass runs outside of them."""
    with ExitStack() as stack:
        for mode in modes[len(_get_current_function_mode_stack()) :]:
            stack.enter_context(mode)
        return call()


def _watched(name: str, call: Callable[[], Any], given: Sequence[Any]) -> Any:
    """Run a block's forward; raises RuntimeError if it changes its input in place.

    It would run again with the changed input.
    """
    tensors = [value for value in given if isinstance(value, torch.Tensor) and not value.is_inference()]
    versions = [value._version for value in tensors]
    output = call()
    if [value._version for value in tensors] != versions:
        raise RuntimeError(
            f"{name} changes its input in place: with gradient checkpointing its gradients would be wrong. Switch"
            " gradient checkpointing off."
        )
    return output


@contextmanager
def checkpointed(module: nn.Module) -> Iterator[None]:
    """A context in which the modules of `blocks` are checkpointed.

    It leaves the global generator alone, and no trace afterwards.
    """

    def forgetting(forward: Callable[..., Any], name: str) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            recompute = partial(
                forward, *map(_as_it_is, args), **{name: _as_it_is(value) for name, value in kwargs.items()}
            )
            recompute = partial(_in, _get_current_function_mode_stack(), recompute)
            first = partial(_watched, name, partial(forward, *args, **kwargs), [*args, *kwargs.values()])
            runs = iter((first,))
            # The arguments are passed so that checkpoint() knows their device.
            return checkpoint(
                lambda *_, **__: next(runs, recompute)(), *args, use_reentrant=False, preserve_rng_state=False, **kwargs
            )

        return run

    old_forwards = [(part, part.__dict__.get("forward")) for part in blocks(module)]
    try:
        for part, _ in old_forwards:
            part.forward = forgetting(part.forward, type(part).__name__)
        yield
    finally:
        for part, old_forward in old_forwards:
            if old_forward is None:
                part.__dict__.pop("forward", None)
            else:
                part.forward = old_forward
