"""Gradient checkpointing (1604.06174): blocks drop their activations and compute them again in the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import _get_current_function_mode_stack

from ...patches.adapters.rank_mask import current_timesteps, set_timesteps
from ...patches.core.calls import around
from ...patches.core.ledger import open_entry
from ...patches.token_routing import route
from .saved_tensors import KeptTensor, active_mode, enter_mode


def blocks(module: nn.Module) -> list[nn.Module]:
    """The blocks to checkpoint: residual and transformer blocks.

    These are the outermost modules that are in a ModuleList or Sequential and have several children. A bare nn.Module,
    as for each resolution of SD's VAE, only holds others: it is never called.
    """
    outermost: list[nn.Module] = []

    def visit(part: nn.Module) -> None:
        for child in part.children():
            only_holds = isinstance(child, nn.ModuleList | nn.Sequential) or type(child) is nn.Module
            is_in_list = isinstance(part, nn.ModuleList | nn.Sequential) and not only_holds
            if is_in_list and len(list(child.children())) > 1:
                outermost.append(child)
            else:
                visit(child)

    visit(module)
    return outermost


def _keep_argument(value: Any) -> Any:
    """An argument of a block as it is now, for the second run of the block.

    A host tells all blocks in one dictionary which of them runs, and has changed it by the time they run again. Values
    that count calls have `copy_for_rerun`, a copy that goes on from here.
    """
    if isinstance(value, Tensor):
        return KeptTensor(value, is_argument=True)
    if type(value) in (list, tuple):
        return type(value)(map(_keep_argument, value))
    if isinstance(value, dict):
        return {key: item.copy_for_rerun() if hasattr(item, "copy_for_rerun") else item for key, item in value.items()}
    return value


def _restore_argument(value: Any) -> Any:
    """The argument for the second run."""
    if isinstance(value, KeptTensor):
        return value.argument()
    if type(value) in (list, tuple):
        return type(value)(map(_restore_argument, value))
    return value


def _kept_tensors(value: Any) -> Iterator[KeptTensor]:
    if isinstance(value, KeptTensor):
        yield value
    elif type(value) in (list, tuple):
        for item in value:
            yield from _kept_tensors(item)


def _autocasts(tensors: Iterable[Tensor]) -> list[torch.autocast]:
    """The autocast settings of now, for the devices of some tensors."""
    settings = []
    for kind in sorted({"cpu", *(tensor.device.type for tensor in tensors)}):
        if torch.amp.is_autocast_available(kind):
            dtype, enabled = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
            settings.append(torch.autocast(kind, dtype, enabled, torch.is_autocast_cache_enabled()))
    return settings


class _Enough(Exception):
    """Stops the second run of a block when everything is there that the backward pass needs."""


class _Place:
    """What autograd gets instead of a tensor of a block: the place where it will be when the block has run again."""

    def __init__(self, tensor: Tensor) -> None:
        self.kind = _kind(tensor)
        self.kept: KeptTensor | None = None


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device


class _Call:
    """One call of a block that is checkpointed.

    The first tensor of it that the backward pass asks for makes it run again, in the function modes and with the
    autocast of the first run. The second run is watched as autograd watches the first of a block without checkpointing:
    a tensor that it keeps and then changes is refused, or copied where `copied_before_changes` is active.
    """

    def __init__(self, name: str, forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._name, self._forward = name, forward
        self._args = _keep_argument(tuple(args))
        self._kwargs = {key: _keep_argument(value) for key, value in kwargs.items()}
        self._function_modes = list(_get_current_function_mode_stack())
        self._copying = active_mode()
        self._routed = route.active_pass()
        self._timesteps = current_timesteps()
        given = (*args, *kwargs.values())
        self._autocasts = _autocasts(value for value in given if isinstance(value, Tensor))
        self._places: list[ReferenceType[_Place]] = []

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The first run."""
        with saved_tensors_hooks(self._reserve, self._fetch):
            output = self._forward(*args, **kwargs)
        if any(kept.is_changed for kept in _kept_tensors((self._args, *self._kwargs.values()))):
            raise RuntimeError(
                f"{self._name} changes its input in place: with gradient checkpointing its gradients would be wrong."
                " Switch gradient checkpointing off."
            )
        return output

    def _reserve(self, tensor: Tensor) -> _Place:
        place = _Place(tensor)
        self._places.append(ref(place))
        return place

    def _fetch(self, place: _Place) -> Tensor:
        if place.kept is None:
            self._run_again()
        kept, place.kept = place.kept, None
        assert kept is not None
        return kept.value()

    def _run_again(self) -> None:
        count = 0

        def keep(tensor: Tensor) -> KeptTensor:
            nonlocal count
            self._check(count < len(self._places))
            kept, place = KeptTensor(tensor.detach()), self._places[count]()
            if place is not None:
                self._check(place.kind == _kind(tensor))
                place.kept = kept
            count += 1
            if count == len(self._places):
                raise _Enough
            return kept

        with ExitStack() as stack:
            for mode in self._function_modes[len(_get_current_function_mode_stack()) :]:
                stack.enter_context(mode)
            for autocast in self._autocasts:
                stack.enter_context(autocast)
            copying, routed = enter_mode(self._copying), route.enter_pass(self._routed)
            timesteps = set_timesteps(self._timesteps)
            for context in (torch.enable_grad(), copying, routed, timesteps, suppress(_Enough)):
                stack.enter_context(context)
            args, kwargs = (
                _restore_argument(self._args),
                {key: _restore_argument(value) for key, value in self._kwargs.items()},
            )
            with saved_tensors_hooks(keep, KeptTensor.value):
                self._forward(*args, **kwargs)
            self._check(False)

    def _check(self, is_same: bool) -> None:
        if not is_same:
            raise RuntimeError(
                f"{self._name} computes something else when it runs again: with gradient checkpointing its gradients"
                " would be wrong. Switch gradient checkpointing off."
            )


@contextmanager
def checkpoint_blocks(module: nn.Module) -> Iterator[None]:
    """A context in which the modules of `blocks` are checkpointed.

    It leaves the global generator alone, and no trace afterwards.
    """

    with open_entry(module, "gradient checkpointing") as stack:
        for block in blocks(module):
            stack.enter_context(around(block, "checkpointing", _forget_shapes))
        yield


def _forget_shapes(block: nn.Module, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return inner(*args, **kwargs)
    return _Call(type(block).__name__, inner, args, kwargs).run(args, kwargs)
