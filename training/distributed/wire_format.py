"""Sends a node's outputs to another process: plain values and tensors to bytes and back, as JSON and safetensors."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from ...patches.lora_files.stack_rows import StackRow
from ...storage.safetensors import safetensors_bytes, tensors_from_bytes


def encode(value: Any) -> bytes:
    """Serialize a tree of dicts, lists, tuples, tensors, strings, numbers, booleans and None to bytes; raises TypeError
    that says where another value is.
    """
    tensors: dict[str, Tensor] = {}
    tree = json.dumps(_tree(value, "value", tensors)).encode()
    return len(tree).to_bytes(8, "little") + tree + b"".join(safetensors_bytes(tensors))


def decode(body: bytes) -> Any:
    """Read what `encode` wrote; tensors are on the CPU."""
    length = int.from_bytes(body[:8], "little")
    return _value(json.loads(body[8 : 8 + length]), tensors_from_bytes(body[8 + length :]))


def _tree(value: Any, place: str, tensors: dict[str, Tensor]) -> Any:
    """A value as JSON: everything but strings, numbers, booleans and None becomes [kind, content]."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, Tensor) and value.layout == torch.strided and not value.is_quantized:
        name = str(len(tensors))
        tensors[name] = value
        return ["tensor", name]
    if isinstance(value, StackRow):
        return ["row", [*value, value.blocks, value.schedule, value.partial]]
    if type(value) in (list, tuple):
        return [type(value).__name__, [_tree(item, f"{place}[{number}]", tensors) for number, item in enumerate(value)]]
    if isinstance(value, dict):
        pairs = [
            [_tree(key, f"a key of {place}", tensors), _tree(item, f"{place}[{key!r}]", tensors)]
            for key, item in value.items()
        ]
        return ["dict", pairs]
    raise TypeError(
        f"{place} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be sent to other ranks"
    )


def _value(tree: Any, tensors: dict[str, Tensor]) -> Any:
    if not isinstance(tree, list):
        return tree
    kind, content = tree
    if kind == "tensor":
        return tensors[content]
    if kind == "row":
        return StackRow(*content)
    if kind == "dict":
        return {_value(key, tensors): _value(item, tensors) for key, item in content}
    parts = [_value(item, tensors) for item in content]
    if kind == "tuple":
        return tuple(parts)
    return parts
