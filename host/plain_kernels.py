"""Makes ComfyUI models trainable that call comfy-kitchen's kernels, which have no backward pass: comfy-kitchen's own
plain PyTorch code computes instead where a gradient is needed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

NAMESPACE = "comfy_kitchen"  # of its operators in torch.ops
PLAIN = "eager"  # what comfy-kitchen calls the backend in plain PyTorch
_OPERATORS = (type(torch.ops.aten.add), type(torch.ops.aten.add.default))


class PlainKernels(TorchFunctionMode):
    """While it is entered, a comfy-kitchen kernel that gets a tensor with a gradient is computed by its plain code.

    A kernel without plain code stays, and refuses the backward pass by its name. Calls without gradients, as in
    sampling and in blocks before the first trained weight, keep the fast kernel. Enter it before AvoidInplaceOps, which
    must be the first to see a call.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        values = kwargs or {}
        if isinstance(func, _OPERATORS) and torch.is_grad_enabled() and needs_gradient(*args, *values.values()):
            return (_plain_kernel(str(func)) or func)(*args, **values)
        return func(*args, **values)


def needs_gradient(*values: Any) -> bool:
    """Whether one of the arguments of a call is a tensor with a gradient."""
    return any(isinstance(value, torch.Tensor) and value.requires_grad for value in values)


@lru_cache(maxsize=1024)
def _plain_kernel(operator: str) -> Callable[..., Any] | None:
    """comfy-kitchen's plain code of an operator ("comfy_kitchen.apply_rope", or with ".default" after it); None if it
    has none that takes the operator's own arguments.
    """
    namespace, name = operator.split(".")[:2]
    if namespace != NAMESPACE:
        return None
    import comfy_kitchen

    if name not in comfy_kitchen.list_backends().get(PLAIN, {}).get("capabilities", ()):
        return None
    plain: Callable[..., Any] = comfy_kitchen.registry.get_implementation(name, backend=PLAIN)
    arguments = [argument.name for argument in getattr(torch.ops.comfy_kitchen, name).default._schema.arguments]
    return plain if list(inspect.signature(plain).parameters) == arguments else None
