"""Tensors that the backward pass will ask for: a model that changes one of them in place must never get a wrong
gradient.

Autograd refuses such a change for the tensors that it keeps itself. For those that a hook keeps (checkpointing and
offload have such hooks) it looks no more, so `KeptTensor` does. `copied_before_changes` makes a copy of what is needed
before it changes, and `CopiesWhereNeeded` does so for models that cannot do without.

`torch.autograd.graph.allow_mutation_on_saved_tensors` is meant for the same, but finds a tensor by its first element
alone: the gradient is wrong where a slice was kept and the whole changes. It also takes a new tensor for an old one
that had its place in memory.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from types import TracebackType
from typing import Any
from weakref import WeakSet, WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ...patches.core.calls import around
from ...patches.core.ledger import open_entry

CHANGED = "The model changes activations in place that its gradients need"
_AUTOGRAD_REFUSAL = "modified by an inplace operation"  # autograd's own words
_PLAIN = (Tensor, nn.Parameter)
_late: WeakSet[type[nn.Module]] = WeakSet()  # networks that have changed such a tensor in a later step alone
_here = threading.local()  # the modes that a thread is in


class KeptTensor:
    """A tensor whose values of now are wanted later.

    `is_argument` says that it is wanted to run a block again. Then any change is followed by a copy; else only one that
    autograd records is, since the gradient would be wrong after the others.
    """

    def __init__(self, tensor: Tensor, is_argument: bool = False) -> None:
        self.is_argument, self.is_copy = is_argument, False
        self._tensor, self._is_spoiled = tensor, False
        self._version = _version(tensor)
        self._memory: _Memory | None = None
        mode = active_mode()
        if mode is not None:
            self._memory = mode.memory(tensor)
        if self._memory is not None:
            self._memory.kept.add(self)

    @property
    def is_changed(self) -> bool:
        """Whether the values are lost."""
        return self._is_spoiled or _version(self._tensor) != self._version

    def value(self) -> Tensor:
        """The tensor with its values of then; raises RuntimeError when they are lost."""
        if self.is_changed:
            raise RuntimeError(
                f"A tensor of shape {tuple(self._tensor.shape)} that a gradient needs has been modified by an inplace"
                " operation."
            )
        return self._tensor

    def argument(self) -> Tensor:
        """The same for a block that may change it again."""
        if self.is_copy:
            return self.value().clone()
        return self.value()

    def before_change(self, is_recorded: bool) -> bool:
        """Its memory will change now; `is_recorded` says whether autograd knows it. Returns whether it was copied."""
        self._memory = None
        if not (is_recorded or self.is_argument):
            self._is_spoiled = True
        if self.is_changed:
            return False
        needs_gradient = self._tensor.requires_grad
        self._tensor = self._tensor.detach().clone().requires_grad_(needs_gradient)
        self._version, self.is_copy = _version(self._tensor), True
        return True


class _Memory:
    """What is kept in one piece of memory."""

    def __init__(self) -> None:
        self.kept: WeakSet[KeptTensor] = WeakSet()


class CopyBeforeChange(TorchDispatchMode):
    """While it is entered, a KeptTensor gets a copy before anything changes its memory.

    `has_copied` says that this was needed, `has_left` that some of the model ran in `left`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.has_copied = self.has_left = False
        # A KeptTensor holds its _Memory and its tensor; so an address here is of memory that is still in use.
        self._memories: WeakValueDictionary[int, _Memory] = WeakValueDictionary()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """torch.compile shall not take this mode, which it runs outside of (`left`), for one that it cannot see
        through: it would compile for that and, once the mode is over, again.
        """
        return True

    def __enter__(self) -> Any:
        entered = super().__enter__()
        _modes().append(self)
        return entered

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _modes().pop()
        super().__exit__(kind, error, trace)

    def memory(self, tensor: Tensor) -> _Memory | None:
        """Where what is kept in a tensor's memory is listed; None for tensors without memory of their own."""
        address = _address(tensor)
        if not address:
            return None
        memory = self._memories.get(address)
        if memory is None:
            memory = self._memories[address] = _Memory()
        return memory

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        values = kwargs or {}
        for index, name in _written_arguments(func):
            written = values.get(name)
            if index < len(args):
                written = args[index]
            for tensor in _tensors(written):
                self._before_change(tensor)
        return func(*args, **values)

    def _before_change(self, tensor: Tensor) -> None:
        memory = self._memories.get(_address(tensor))
        if memory is None:
            return
        for kept in list(memory.kept):
            if kept.before_change(is_recorded=torch.is_grad_enabled() and tensor.requires_grad):
                self.has_copied = True


def active_mode() -> CopyBeforeChange | None:
    """The innermost CopyBeforeChange that this thread is in."""
    modes = _modes()
    if not modes:
        return None
    return modes[-1]


def _modes() -> list[CopyBeforeChange]:
    if not hasattr(_here, "modes"):
        _here.modes = []
    modes: list[CopyBeforeChange] = _here.modes
    return modes


def enter_mode(mode: CopyBeforeChange | None) -> AbstractContextManager[Any]:
    """A context in which a mode is active, which may be so already; backward passes have threads of their own."""
    if mode is None or mode in _modes():
        return nullcontext()
    return mode


@contextmanager
def leave_modes() -> Iterator[None]:
    """A context for code that no CopyBeforeChange may see, as torch.compile's: what changes there is refused."""
    modes = _modes()
    if not modes:
        yield
        return
    for mode in modes:
        mode.has_left = True
    _here.modes = []
    try:
        with _disable_current_modes():
            yield
    finally:
        _here.modes = modes


@contextmanager
def copy_before_changes(mode: CopyBeforeChange | None = None) -> Iterator[None]:
    """A context for a forward pass in which the model may change tensors that its gradients need.

    Every operation passes through Python here: only for models that need it.
    """
    with mode or CopyBeforeChange(), saved_tensors_hooks(KeptTensor, KeptTensor.value):
        yield


class CopiesWhereNeeded:
    """A context in which a network may change tensors that its gradients need; others pay for it in one step only.

    The first step with inputs of a form runs in `copied_before_changes`. Where something had to be copied, all later
    steps do too. `step_of` gets the arguments of a forward pass and says which step it belongs to; None is one by
    itself. Inputs have one form if the same ones are there, with the same sides longer than 1.
    """

    def __init__(self, network: nn.Module, step_of: Callable[[Mapping[str, Any]], int | None]) -> None:
        self._network, self._step_of = network, step_of
        self._mode = CopyBeforeChange()
        self._mode.has_copied = type(network) in _late
        self._first_steps: dict[Hashable, int] = {}
        self._is_watched = True

    def __enter__(self) -> CopiesWhereNeeded:
        self._on_network = open_entry(self._network, "copies before changes")
        self._on_network.enter_context(around(self._network, "copies", self._call))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._on_network.close()
        if refuses_change(error):
            raise RuntimeError(f"{CHANGED}, {self._why_not_copied()} {error}") from error

    def _call(self, _: nn.Module, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._copying(args, kwargs):
            return inner(*args, **kwargs)

    def _copying(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> AbstractContextManager[None]:
        if not torch.is_grad_enabled():
            return nullcontext()
        self._is_watched = not self._is_sharded and (self._mode.has_copied or self._is_first(args, kwargs))
        if not self._is_watched:
            return nullcontext()
        return copy_before_changes(self._mode)

    def _is_first(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether this forward pass belongs to the first step with inputs of their form."""
        step = self._step_of(kwargs)
        if step is None:
            return True
        return self._first_steps.setdefault(_form((args, kwargs)), step) == step

    @property
    def _is_sharded(self) -> bool:
        """Whether FSDP2 divides the network: it takes memory away and gives it back behind tensors that are kept."""
        sharding = sys.modules.get("torch.distributed.tensor")  # its import takes seconds
        return sharding is not None and any(isinstance(p, sharding.DTensor) for p in self._network.parameters())

    def _why_not_copied(self) -> str:
        if self._is_sharded:
            return "which cannot be copied first under --shard: start without --shard."
        if not self._is_watched:
            _late.add(type(self._network))
            return "and did not in the first step. Run it again: they are copied in every step then."
        if self._mode.has_left:
            return "in blocks that torch.compile has compiled: set compile of Optimizer Settings to off."
        return (
            "where autograd does not record it (under no_grad, or through detach() or .data), so no copy can mend it:"
            " this version of ComfyUI cannot train it."
        )


def refuses_change(error: BaseException | None) -> bool:
    """Whether an error is autograd's, or a KeptTensor's, about a tensor that was changed in place."""
    return isinstance(error, RuntimeError) and _AUTOGRAD_REFUSAL in str(error) and not str(error).startswith(CHANGED)


def _form(value: Any) -> Hashable:
    """Which inputs there are, and which of their sides are longer than 1."""
    if isinstance(value, Tensor):
        return tuple(side > 1 for side in value.shape)
    if isinstance(value, list | tuple):
        return tuple(map(_form, value))
    if isinstance(value, dict):
        return tuple((str(key), _form(item)) for key, item in value.items())
    return type(value).__name__


def _version(tensor: Tensor) -> int:
    """How often a tensor was changed in place; those of inference mode do not count it."""
    if tensor.is_inference():
        return 0
    return tensor._version


def _address(tensor: Tensor) -> int:
    if type(tensor) not in _PLAIN or tensor.layout is not torch.strided:
        return 0
    return storage_address(tensor)


def storage_address(tensor: Tensor) -> int:
    """Which memory a tensor lies in: the same number for its views."""
    storage = tensor.untyped_storage()
    if tensor.device.type == "meta":  # no memory, so no address of it
        return storage._cdata
    return storage.data_ptr()


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [item for item in value if isinstance(item, Tensor)]
    return []


@lru_cache(maxsize=4096)
def _written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    """Places and names of an operator's arguments that it writes to."""
    written = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.append((index, argument.name))
    return tuple(written)
