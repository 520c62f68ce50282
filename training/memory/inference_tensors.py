"""Makes weights from inference mode trainable: views of the same memory that autograd accepts take their place.

ComfyUI's executor runs in inference mode, and autograd refuses weights that were made there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ...patches.core.ledger import open_entry
from ...patches.core.slots import Slot, slots, swap_all


def alias(tensor: Tensor) -> Tensor:
    """A normal tensor without gradient over the same memory as `tensor`, whatever mode `tensor` was made in."""
    if torch.is_inference_mode_enabled():
        raise RuntimeError("Aliases are normal tensors: make them inside torch.inference_mode(False).")
    if not tensor.is_inference():
        return tensor.detach()
    if hasattr(tensor, "__tensor_flatten__"):  # torch's protocol of tensors made of others, as quantized weights are
        names, context = tensor.__tensor_flatten__()
        parts = {name: alias(getattr(tensor, name)) for name in names}
        kind: Any = type(tensor)
        return kind.__tensor_unflatten__(parts, context, tensor.shape, tensor.stride())
    if type(tensor) not in (Tensor, nn.Parameter):
        raise TypeError(
            f"Weights of type {type(tensor).__name__} made in inference mode cannot be trained on in this version of"
            " Graft."
        )
    normal = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return normal.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


@contextmanager
def use_normal_tensors(module: nn.Module, trained: Mapping[str, Tensor] | None = None) -> Iterator[None]:
    """A context in which every parameter, buffer and other tensor that parts of `module` keep is a frozen alias; those
    in `trained` are the given tensors.

    Afterwards, also after an exception, the original Parameter and buffer objects are back, with flags and values
    untouched.
    """
    trained = dict(trained or {})
    names = dict(module.named_parameters())
    missing = trained.keys() - names.keys()
    if missing:
        raise KeyError(f"The model has no parameter {', '.join(sorted(missing))}.")
    given = {id(names[name]): tensor for name, tensor in trained.items()}

    def normal(slot: Slot) -> Tensor | None:
        old = slot.tensor
        if slot.table is slot.module._parameters:
            if id(old) in given:
                return given[id(old)]
            return nn.Parameter(alias(old), requires_grad=False)
        if old.is_inference():
            return alias(old)
        return None

    with open_entry(module, "normal tensors") as stack:
        every_slot = slots(module.modules(), attributes=True)  # ACE-Step keeps positions that are not a buffer
        stack.enter_context(swap_all(every_slot, normal))
        yield
