"""What operations give on PyTorch's meta device, remembered by the shapes, strides and types of what they get.

PyTorch works them out in Python, which is most of what a plan of a step's memory takes; a model's blocks are alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

META = torch.device("meta")
_MOST = 100_000  # results that are remembered
_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.layout, torch.memory_format, torch.device)
_TENSORS = (Tensor, torch.nn.Parameter)
_Shape = tuple[torch.Size, tuple[int, ...], torch.dtype]
_Made = Callable[[Sequence[Any]], Any]

remembered: dict[Any, _Made | None] = {}  # None: an operation that has to run


class _NotRemembered(Exception):
    """An argument that says too little of itself."""


def remember_result(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What an operation gives."""
    if func.is_view:
        return func(*args, **kwargs)
    try:
        key = id(func), tuple(map(_describe, args)), tuple((name, _describe(value)) for name, value in kwargs.items())
    except _NotRemembered:
        return func(*args, **kwargs)
    if key not in remembered:
        if len(remembered) >= _MOST:
            remembered.clear()
        before = list(map(_place, _tensors(args, kwargs)))
        found = func(*args, **kwargs)
        remembered[key] = _find_recipe(func, args, kwargs, before, found)
        return found
    made = remembered[key]
    if made is None:
        return func(*args, **kwargs)
    return made(args)


def _describe(value: Any) -> Any:
    """All that an operation's result depends on of an argument."""
    if type(value) in _TENSORS:
        if not value.is_meta:
            raise _NotRemembered
        return value.shape, value.stride(), value.dtype
    if isinstance(value, (list, tuple)):
        return tuple(map(_describe, value))
    if isinstance(value, _PLAIN):
        return type(value), value
    raise _NotRemembered


def _tensors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    return (value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor))


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def _find_recipe(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], before: Sequence[Any], found: Any
) -> _Made | None:
    """How the result is made again from arguments that are seen the same; None where the operation has to run: it
    gives a view, or changes the place or shape of what it gets.
    """
    if list(map(_place, _tensors(args, kwargs))) != before:
        return None
    if isinstance(found, Tensor):
        position = next((number for number, value in enumerate(args) if value is found), None)
        if position is not None:
            return lambda given: given[position]
        parts = [found]
    elif isinstance(found, (list, tuple)):
        parts = list(found)
    else:
        return None
    storages = {place[0] for place in before}
    shapes: list[_Shape | None] = []
    for part in parts:
        if part is None:  # a gradient that is not asked for
            shapes.append(None)
            continue
        if not _is_whole(part) or part.untyped_storage()._cdata in storages:
            return None
        storages.add(part.untyped_storage()._cdata)
        shapes.append((part.shape, part.stride(), part.dtype))
    if isinstance(found, Tensor):
        return lambda _: _new(shapes[0])
    kind = type(found)
    return lambda _: kind(map(_new, shapes))


def _is_whole(tensor: Any) -> bool:
    """Whether a tensor of its shape and strides has the same storage."""
    if type(tensor) is not Tensor or tensor.device != META or tensor.storage_offset():
        return False
    needed = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=META).untyped_storage()
    return tensor.untyped_storage().nbytes() == needed.nbytes()


def _new(shape: _Shape | None) -> Tensor | None:
    if shape is None:
        return None
    size, stride, dtype = shape
    return torch.empty_strided(size, stride, dtype=dtype, device=META)
