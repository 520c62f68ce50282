"""Slots: where modules hold weights, buffers and other tensors. What is in them is exchanged here, and comes back as
the same object with the same bytes.

In host memory another tensor takes a weight's place, and the weight is never written. On a device, where memory is too
scarce for both, its values change in place and are copied back.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .handle import Handle
from .host_memory import empty_on_host

_SWAPS = "_graft_swaps"  # of a module while another tensor is in one of its slots


SlotKey = tuple[int, str]  # a module's id and a name


def slot_key(module: nn.Module, name: str) -> SlotKey:
    """The `key` of a module's slot."""
    return id(module), name


class Slot(NamedTuple):
    """One name of a module: its parameters, its buffers or its attributes are the `table`."""

    module: nn.Module
    table: dict[str, Any]
    name: str

    @property
    def tensor(self) -> Any:
        """What is there now."""
        return self.table[self.name]

    @property
    def key(self) -> SlotKey:
        """The same for the slot, whichever tensor is in it."""
        return slot_key(self.module, self.name)


class _Swaps(dict[str, "list[Swap]"]):
    """The swaps of one module by name, in the order in which they came. A deep copy of the module has none."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _Swaps:
        return _Swaps()


class Swap(Handle):
    """Another tensor in a slot. `leave` puts back what was there, also beneath swaps that came later.

    If somebody else has put something there since, it is thrown away, or stays if this one `yields`. Where somebody has
    removed the slot itself, nothing is put back.
    """

    def __init__(self, slot: Slot, tensor: Any, yields: bool = False) -> None:
        super().__init__(self._put_back)
        self._module = weakref.ref(slot.module)  # its swaps are kept on it: it must not keep itself
        self._table, self._name, self._yields = slot.table, slot.name, yields
        self.found, self.tensor = slot.tensor, tensor
        self._swaps: list[Swap] = vars(slot.module).setdefault(_SWAPS, _Swaps()).setdefault(slot.name, [])
        self._swaps.append(self)
        slot.table[slot.name] = tensor

    def put(self, tensor: Any) -> None:
        """Hold another tensor in place of the one before."""
        above = self._above()
        if above is not None:
            above.found = tensor
        elif self._name in self._table and (not self._yields or self._table[self._name] is self.tensor):
            self._table[self._name] = tensor
        self.tensor = tensor

    @property
    def is_there(self) -> bool:
        """Whether this one's tensor is in the slot, or beneath a swap that came later, and nobody else's."""
        return self._table.get(self._name) is self.tensor or self._above() is not None

    def _above(self) -> Swap | None:
        return next((swap for swap in self._swaps if swap.found is self.tensor and swap is not self), None)

    def _put_back(self) -> None:
        self.put(self.found)
        self._swaps.remove(self)
        module = self._module()
        if self._swaps or module is None:
            return
        of_module = vars(module)[_SWAPS]
        del of_module[self._name]
        if not of_module:
            del vars(module)[_SWAPS]


def slots(parts: Iterable[nn.Module], attributes: bool = False) -> Iterator[Slot]:
    """The slots of modules that hold a tensor: parameters and buffers, with `attributes` other tensors too."""
    for part in parts:
        tables: list[dict[str, Any]] = [part._parameters, part._buffers]
        if attributes:
            tables.append(vars(part))
        for table in tables:
            for name, value in list(table.items()):
                if isinstance(value, Tensor):
                    yield Slot(part, table, name)


def find_slot(module: nn.Module, name: str) -> Slot:
    """The slot of a parameter or buffer by its name, which may be empty (a layer without bias); ValueError when the
    module has none of that name.
    """
    path, _, attribute = name.rpartition(".")
    owner = module.get_submodule(path)
    for table in (owner._parameters, owner._buffers):
        if attribute in table:
            return Slot(owner, table, attribute)
    raise ValueError(f"{name}: the model has no such weight any more")


def slots_by_tensor(module: nn.Module) -> dict[int, list[Slot]]:
    """By the id of each parameter and buffer, its slots in all parts of `module`: tied weights have several."""
    names: dict[int, list[Slot]] = {}
    for slot in slots(module.modules()):
        names.setdefault(id(slot.tensor), []).append(slot)
    return names


class Swaps(Handle):
    """Another tensor in every slot of one tensor."""

    def __init__(self, found: Iterable[Slot], tensor: Any, yields: bool = False) -> None:
        self._swaps = [Swap(slot, tensor, yields) for slot in found]
        super().__init__(self._put_back)

    def put(self, tensor: Any) -> None:
        """Hold another tensor in place of the one before."""
        for one in self._swaps:
            one.put(tensor)

    @property
    def is_there(self) -> bool:
        """Whether this one's tensor is in each of them, or beneath a swap that came later."""
        return all(one.is_there for one in self._swaps)

    def _put_back(self) -> None:
        for one in reversed(self._swaps):
            one.leave()


def swap(module: nn.Module, name: str, tensor: Tensor, yields: bool = False) -> Swaps:
    """Hold another tensor in place of a parameter or buffer, under every name that `module` has for it.

    Args:
        module: the model.
        name: one of the names.
        tensor: the other one, of any shape.
        yields: whether it gives way where somebody else has put a tensor there since.
    """
    held = find_slot(module, name).tensor
    if held is None:
        raise ValueError(f"{name}: the model has no such weight")
    return Swaps(slots_by_tensor(module)[id(held)], tensor, yields)


@contextmanager
def swap_all(found: Iterable[Slot], new: Callable[[Slot], Tensor | None]) -> Iterator[None]:
    """A context in which slots hold what `new` gives for each tensor in them; None leaves it there.

    It is asked once for a tensor with several names. Afterwards, also after an error, every object is back.
    """
    replacements: dict[int, Tensor | None] = {}
    with ExitStack() as stack:
        for slot in list(found):
            key = id(slot.tensor)
            if key not in replacements:
                replacements[key] = new(slot)
            replacement = replacements[key]
            if replacement is not None:
                stack.callback(Swap(slot, replacement).leave)
        yield


@contextmanager
def preserve(module: nn.Module) -> Iterator[None]:
    """A context after which every part of a module has the attributes, parameters, buffers and hooks of before.

    It is for what others put there and have no way to take off, as torch's fully_shard.
    """
    saved = []
    for part in module.modules():
        attributes = vars(part)
        tables = {}
        for name, value in attributes.items():
            if name.startswith("_") and isinstance(value, dict):  # nn.Module's own: parameters, buffers, hooks
                tables[name] = (value, dict(value))
        saved.append((attributes, set(attributes), tables))
    try:
        yield
    finally:
        for attributes, names, tables in saved:
            for name in set(attributes) - names:
                del attributes[name]
            for name, (table, content) in tables.items():
                table.clear()
                table.update(content)
                attributes[name] = table


# --- values that change in place --------------------------------------------------------------------------------------


def is_made_of_others(tensor: Tensor) -> bool:
    """Whether a tensor is made of others (torch's protocol for them), as a host's quantized weights are."""
    return hasattr(tensor, "__tensor_flatten__")


def stored_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors that hold a tensor's bytes: itself, or those that it is made of, as quantized weights are."""
    if not is_made_of_others(tensor):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
        yield from stored_tensors(getattr(tensor, name))


def copy_to_host(tensor: Tensor) -> Tensor:
    """A copy in host memory; see `empty_on_host`."""
    with torch.inference_mode(False), torch.no_grad():
        if is_made_of_others(tensor):
            return tensor.detach().to("cpu", copy=True).clone()
        return empty_on_host(tensor.data).copy_(tensor.data)


def write_(tensor: Tensor, values: Tensor) -> None:
    """Give a tensor the values of another one of its kind, in place, whatever mode it was made in."""
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        for stored, wanted in zip(stored_tensors(tensor), stored_tensors(values), strict=True):
            stored.data.copy_(wanted.data, non_blocking=True)


def hold_values(tensor: Tensor, saved: Tensor | None = None, slot: Slot | None = None) -> Handle:
    """Let a tensor's values change in place: leaving writes back `saved`, a copy that is made here if none is given.

    With a `slot` it does not where somebody else has put a tensor with other memory there since.
    """
    copy = tensor.detach().clone() if saved is None else saved

    def leave() -> None:
        if slot is None or is_held(slot, tensor):
            write_(tensor, copy)

    return Handle(leave)


def is_held(slot: Slot, tensor: Tensor) -> bool:
    """Whether the memory of a tensor is in a slot, or beneath swaps that came later; an alias of it counts."""
    swaps = vars(slot.module).get(_SWAPS, {}).get(slot.name, ())
    held = [slot.table.get(slot.name), *(swap.found for swap in swaps)]
    return any(one is tensor or (one is not None and one.data_ptr() == tensor.data_ptr()) for one in held)


def exchange(left: Tensor, right: Tensor, copy_of_left: Tensor) -> Handle:
    """Two tensors take each other's values, in place; leaving gives both their bytes back.

    Args:
        left: of any shape and type.
        right: of the same shape and type.
        copy_of_left: its copy, of that shape, made before anything changes, as memory may not suffice for it.
    """
    _exchange(left, right, copy_of_left)
    return Handle(lambda: _exchange(right, left, right.detach().clone()))


@torch.no_grad()
def _exchange(left: Tensor, right: Tensor, copy_of_left: Tensor) -> None:
    left.copy_(right)
    right.copy_(copy_of_left)
