"""What a module's weight stands for: whether it is a plain one, its shape, and its values where a host keeps it quantised."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

MERGED = (torch.float32, torch.bfloat16, torch.float16)
COARSE = (torch.float8_e4m3fn, torch.float8_e5m2)
_SCALES = ("scale_weight", "weight_scale", "quant_state", "scales")  # what hosts and packs keep beside a quantised weight
_AT_ONCE = 2**22  # numbers of unit vectors that go through a quantised module at once


def is_linear(module: nn.Module) -> bool:
    """Linear, or a host's quantised stand-in for it."""
    return isinstance(module, nn.Linear) or (hasattr(module, "in_features") and hasattr(module, "out_features"))


def obstacle(module: nn.Module, attribute: str, coarse: bool = False) -> str | None:
    """Why a weight is no plain floating one, or None: it is not there, or quantised, by its class, its scales or its type (`coarse`: fp8
    is plain)."""
    weight = module._parameters.get(attribute)
    if weight is None:
        return "there is no such weight"
    for kind in (type(weight), type(weight.data)):
        if kind not in (nn.Parameter, Tensor):
            return f"it is a {kind.__name__}"
    scale = next((name for name in _SCALES if attribute == "weight" and getattr(module, name, None) is not None), None)
    if scale is not None:
        return f"it is quantised ({scale})"
    return None if weight.dtype in MERGED or (coarse and weight.dtype in COARSE) else f"its type is {weight.dtype}"


def shape_of(module: nn.Module) -> tuple[int, ...]:
    """The shape that a module's weight stands for; a quantised one may be packed into another."""
    features = (getattr(module, "out_features", None), getattr(module, "in_features", None))
    return tuple(module.weight.shape) if None in features else features  # type: ignore[arg-type, return-value]


def is_readable(module: nn.Module) -> bool:
    """Whether `weight_of` can tell a module's weight."""
    return is_linear(module) or _is_plain(module, "weight")


def weight_of(module: nn.Module, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A module's weight (out, in, ...) in float32, as its own forward uses it for activations of this type on this device.

    A plain one is read. A quantised linear one is what the forward makes of unit vectors, whatever the way it is kept.
    """
    with torch.inference_mode(False), torch.no_grad():
        if _is_plain(module, "weight"):
            return cast(Tensor, module.weight).detach().float()
        rows, columns = shape_of(module)
        weight, nothing = torch.empty(rows, columns), _at_zero(module, columns, dtype, device)
        for start in range(0, columns, step := max(1, _AT_ONCE // columns)):
            units = torch.eye(columns, dtype=dtype, device=device)[start : start + step]
            weight[:, start : start + step] = (_forward(module, units) - nothing).T
        return weight


def bias_of(module: nn.Module, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    """A module's bias (out,) in float32, as `weight_of` has its weight; None where there is none."""
    with torch.inference_mode(False), torch.no_grad():
        if getattr(module, "bias", None) is None:
            return None
        if _is_plain(module, "bias") or not is_linear(module):
            return cast(Tensor, module.bias).detach().float().cpu()
        return _at_zero(module, shape_of(module)[1], dtype, device)[0]


def _is_plain(module: nn.Module, attribute: str) -> bool:
    """Whether a parameter is what the forward multiplies with: a plain one, that no function of the host's changes on its way."""
    return obstacle(module, attribute) is None and not getattr(module, f"{attribute}_function", None)


def _at_zero(module: nn.Module, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return _forward(module, torch.zeros(1, columns, dtype=dtype, device=device))


def _forward(module: nn.Module, x: Tensor) -> Tensor:
    """The module's own forward, without what has been put around it, in float32."""
    return type(module).forward(module, x).float().cpu()
