"""What a module's weight stands for: whether it is a plain one, its shape, and its values where a host keeps it
quantised.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MERGED = (torch.float32, torch.bfloat16, torch.float16)
COARSE = (torch.float8_e4m3fn, torch.float8_e5m2)
_SCALES = (
    "scale_weight",
    "weight_scale",
    "quant_state",
    "scales",
)  # what hosts and packs keep beside a quantised weight
_FUNCTIONS = ("_function", "_lowvram_function")  # of a partly loaded weight, and of a paged one
_AT_ONCE = 2**22  # numbers that go through a quantised module at once while it is read
_LOUD = 256.0  # units for a convolution: what a quantised bias beside them is rounded to does not show in the weight


def is_linear(module: nn.Module) -> bool:
    """Linear, or a host's quantised stand-in for it."""
    return isinstance(module, nn.Linear) or (hasattr(module, "in_features") and hasattr(module, "out_features"))


def obstacle(module: nn.Module, attribute: str, coarse: bool = False) -> str | None:
    """Why a weight is no plain floating one, or None: it is not there, or quantised, by its class, its scales or its
    type (`coarse`: fp8 is plain).
    """
    weight = module._parameters.get(attribute)
    if weight is None:
        return "there is no such weight"
    for kind in (type(weight), type(weight.data)):
        if kind not in (nn.Parameter, Tensor):
            return f"it is a {kind.__name__}"
    scale = next((name for name in _SCALES if attribute == "weight" and getattr(module, name, None) is not None), None)
    if scale is not None:
        return f"it is quantised ({scale})"
    if weight.dtype in MERGED or (coarse and weight.dtype in COARSE):
        return None
    return f"its type is {weight.dtype}"


def is_conv(module: nn.Module) -> bool:
    """A convolution of one, two or three dimensions."""
    return isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d))


def shape_of(module: Any) -> tuple[int, ...]:
    """The shape that a module's weight stands for; a quantised one may be packed into another."""
    if is_linear(module):
        return module.out_features, module.in_features
    if is_conv(module) and obstacle(module, "weight", coarse=True) is not None:
        return module.out_channels, module.in_channels // module.groups, *module.kernel_size
    return tuple(module.weight.shape)


def weight_of(module: nn.Module, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A module's weight (out, in / groups, ...) in float32, as its own forward uses it for activations of this type on
    this device.

    A plain one is read, fp8 too. A quantised one is what the forward makes of unit vectors, or of single pixels,
    whatever the way it is kept. Raises ValueError where a convolution's forward does not do what its stride, padding
    and dilation say.
    """
    with torch.inference_mode(False), torch.no_grad():
        if _is_plain(module, "weight"):
            return cast(Tensor, module.weight).detach().float()
        rows, columns, *kernel = shape_of(module)
        weight, loud = torch.empty(columns, rows, *kernel), _LOUD if kernel else 1.0
        with _laid_bare(module), _without_bias(module):
            nothing = _forward(module, _pixels(module, torch.zeros(1, columns, dtype=dtype, device=device)))
            for start in range(
                0, columns, step := max(1, _AT_ONCE // _pixels(module, torch.zeros(1, columns)).numel())
            ):
                units = loud * torch.eye(columns, dtype=dtype, device=device)[start : start + step]
                weight[start : start + step] = (_forward(module, _pixels(module, units)) - nothing) / loud
        return weight.flip(tuple(range(2, weight.ndim))).transpose(0, 1).contiguous()


def bias_of(module: nn.Module, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    """A module's bias (out,) in float32, as `weight_of` has its weight; None where there is none."""
    with torch.inference_mode(False), torch.no_grad():
        if getattr(module, "bias", None) is None:
            return None
        if _is_plain(module, "bias"):
            return cast(Tensor, module.bias).detach().float().cpu()
        with _laid_bare(module):
            nothing = _pixels(module, torch.zeros(1, shape_of(module)[1], dtype=dtype, device=device))
            return _forward(module, nothing)[0].reshape(shape_of(module)[0], -1)[:, 0]


@contextmanager
def _laid_bare(module: nn.Module) -> Iterator[None]:
    """Until the end, a convolution moves by one pixel over what it is given and pads nothing; any other module stays as
    it is.
    """
    dimensions = len(shape_of(module)) - 2
    bare = {
        "stride": (1,) * dimensions,
        "padding": (0,) * dimensions,
        "dilation": (1,) * dimensions,
        "padding_mode": "zeros",
    }
    if not is_conv(module):
        bare = {}
    before = {name: getattr(module, name) for name in bare}
    module.__dict__.update(bare)
    try:
        yield
    finally:
        module.__dict__.update(before)


@contextmanager
def _without_bias(module: nn.Module) -> Iterator[None]:
    """Until the end, a plain bias is nought: what is read beside it would be rounded with it."""
    if _is_plain(module, "bias"):
        bias = module._parameters.get("bias")
    else:
        bias = None
    if bias is not None:
        module._parameters["bias"] = nn.Parameter(torch.zeros_like(bias), requires_grad=False)
    try:
        yield
    finally:
        if bias is not None:
            module._parameters["bias"] = bias


def _pixels(module: nn.Module, vectors: Tensor) -> Tensor:
    """Vectors (n, in / groups) as what goes into a module: for a convolution, in each group, one pixel in the midst of
    zeros, so that what comes out is the kernel, back to front.
    """
    kernel = shape_of(module)[2:]
    pixels = vectors.reshape(*vectors.shape, *(1,) * len(kernel)).repeat(
        1, getattr(module, "groups", 1), *(1,) * len(kernel)
    )
    return F.pad(pixels, [side - 1 for side in reversed(kernel) for _ in range(2)])


def _is_plain(module: nn.Module, attribute: str) -> bool:
    """Whether a parameter is what the forward multiplies with: a plain one, that no function of the host's changes on
    its way.
    """
    changed = any(getattr(module, attribute + function, None) for function in _FUNCTIONS)
    return obstacle(module, attribute, coarse=True) is None and not changed


def _forward(module: nn.Module, x: Tensor) -> Tensor:
    """The module's own forward, without what has been put around it, in float32."""
    output = type(module).forward(module, x).float().cpu()
    expected = (len(x), shape_of(module)[0], *shape_of(module)[2:])
    if output.shape != expected:
        kind = type(module).__name__
        raise ValueError(
            f"{kind}: its forward made {tuple(output.shape)} of {tuple(x.shape)}, expected {expected}; use mode host"
        )
    return output
