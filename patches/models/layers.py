"""What a module's weight represents: whether it is plain, its shape, its values if the host keeps it quantized, and how
new values are quantized as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.slots import swap

MERGED = (torch.float32, torch.bfloat16, torch.float16)
COARSE = (torch.float8_e4m3fn, torch.float8_e5m2)
_SCALES = ("scale_weight", "weight_scale", "quant_state", "scales")  # what hosts keep beside a quantized weight
_FUNCTIONS = ("_function", "_lowvram_function")  # of a partly loaded weight, and of a paged one
_INPUT_SCALE = (
    "pre_quant_scale"  # of a host's layer: what it multiplies its input with, so its weight is not what counts
)
PROBE_NUMBERS = 2**22  # that go through a quantized module at once while its weight is read
PROBE_SCALE = 256.0  # of a probe of a convolution: what a quantized bias beside it is rounded to does not show


def is_linear(module: nn.Module) -> bool:
    """Linear, or a host's quantized stand-in for it."""
    return isinstance(module, nn.Linear) or (hasattr(module, "in_features") and hasattr(module, "out_features"))


def why_not_plain(module: nn.Module, attribute: str, coarse: bool = False) -> str | None:
    """Why a weight is not a plain floating-point tensor (missing, quantized, another type), or None if it is. `coarse`:
    fp8 counts as plain.
    """
    weight = module._parameters.get(attribute)
    if weight is None:
        return "there is no such weight"
    for kind in (type(weight), type(weight.data)):
        if kind not in (nn.Parameter, Tensor):
            return f"it is a {kind.__name__}"
    for scale in _SCALES:
        if attribute == "weight" and getattr(module, scale, None) is not None:
            return f"it is quantized ({scale})"
    if weight.dtype in MERGED or (coarse and weight.dtype in COARSE):
        return None
    return f"its type is {weight.dtype}"


def is_changed_by_host(module: nn.Module, attribute: str) -> bool:
    """Whether a host's function changes a parameter on the way to the layer's product."""
    return any(getattr(module, attribute + function, None) for function in _FUNCTIONS)


def casts_weights(module: nn.Module) -> bool:
    """Whether a host's layer casts its weight to the type of each input, as ComfyUI's do where that is another."""
    return bool(getattr(module, "comfy_cast_weights", False))


def is_conv(module: nn.Module) -> bool:
    """A 1D, 2D or 3D convolution."""
    return isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d))


def shape_of(module: Any) -> tuple[int, ...]:
    """The shape that a module's weight represents; a quantized one may be packed into another shape."""
    if is_linear(module):
        return module.out_features, module.in_features
    if is_conv(module) and why_not_plain(module, "weight", coarse=True) is not None:
        return module.out_channels, module.in_channels // module.groups, *module.kernel_size
    return tuple(module.weight.shape)


def weight_of(module: nn.Module, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A module's weight as its own forward uses it.

    A plain weight is read directly, fp8 too. A quantized one is measured from the forward's output for unit vectors or
    single pixels, however it is stored.

    Args:
        module: a Linear or a convolution.
        dtype: that of the activations.
        device: theirs.

    Returns:
        (out, in / groups, *kernel) in float32.

    Raises:
        ValueError: if a convolution's forward does not match its stride, padding and dilation.
    """
    with torch.inference_mode(False), torch.no_grad():
        if _is_plain(module, "weight"):
            return cast(Tensor, module.weight).detach().float()
        with _unit_stride(module), _without_bias(module):
            return _probed_weight(module, dtype, device)


def _probed_weight(module: nn.Module, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A module's weight, measured from its forward's output for unit vectors."""
    rows, columns, *kernel = shape_of(module)
    scale = PROBE_SCALE if kernel else 1.0
    weight = torch.empty(columns, rows, *kernel)
    units = scale * torch.eye(columns, dtype=dtype, device=device)
    zero = _forward(module, _pixels(module, torch.zeros(1, columns, dtype=dtype, device=device)))
    step = max(1, PROBE_NUMBERS // _pixels(module, torch.zeros(1, columns)).numel())
    for start in range(0, columns, step):
        probe = _pixels(module, units[start : start + step])
        weight[start : start + step] = (_forward(module, probe) - zero) / scale
    return weight.flip(tuple(range(2, weight.ndim))).transpose(0, 1).contiguous()


def bias_of(module: nn.Module, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    """A module's bias, read as `weight_of` reads its weight.

    Args:
        module: a Linear or a convolution.
        dtype: that of the activations.
        device: theirs.

    Returns:
        (out,) in float32; None if it has none.
    """
    with torch.inference_mode(False), torch.no_grad():
        if getattr(module, "bias", None) is None:
            return None
        if _is_plain(module, "bias"):
            return cast(Tensor, module.bias).detach().float().cpu()
        with _unit_stride(module):
            zero = _pixels(module, torch.zeros(1, shape_of(module)[1], dtype=dtype, device=device))
            return _forward(module, zero)[0].reshape(shape_of(module)[0], -1)[:, 0]


@contextmanager
def _unit_stride(module: nn.Module) -> Iterator[None]:
    """Within the block, a convolution has stride and dilation 1 and no padding; any other module is unchanged."""
    if not is_conv(module):
        yield
        return
    dimensions = len(shape_of(module)) - 2
    settings = {
        "stride": (1,) * dimensions,
        "padding": (0,) * dimensions,
        "dilation": (1,) * dimensions,
        "padding_mode": "zeros",
    }
    before = {name: getattr(module, name) for name in settings}
    module.__dict__.update(settings)
    try:
        yield
    finally:
        module.__dict__.update(before)


@contextmanager
def _without_bias(module: nn.Module) -> Iterator[None]:
    """Within the block, a plain bias is zero, because measured outputs would be rounded together with it."""
    bias = module._parameters.get("bias")
    if bias is None or not _is_plain(module, "bias"):
        yield
        return
    with swap(module, "bias", nn.Parameter(torch.zeros_like(bias), requires_grad=False)):
        yield


def _pixels(module: nn.Module, vectors: Tensor) -> Tensor:
    """Vectors (n, in / groups) as input for a module: for a convolution, one pixel surrounded by zeros in each group,
    so that the output is the kernel in reverse order.
    """
    kernel = shape_of(module)[2:]
    ones = (1,) * len(kernel)
    pixels = vectors.reshape(*vectors.shape, *ones).repeat(1, getattr(module, "groups", 1), *ones)
    padding: list[int] = []
    for side in reversed(kernel):
        padding += (side - 1, side - 1)
    return F.pad(pixels, padding)


def _is_plain(module: nn.Module, attribute: str) -> bool:
    """Whether a parameter is exactly what the forward multiplies with: plain, and not changed by any host function on
    the way.
    """
    return why_not_plain(module, attribute, coarse=True) is None and not is_changed_by_host(module, attribute)


def _forward(module: nn.Module, x: Tensor) -> Tensor:
    """The module's own forward in float32, without any wrappers around it."""
    output = type(module).forward(module, x).float().cpu()
    expected = (len(x), shape_of(module)[0], *shape_of(module)[2:])
    if output.shape != expected:
        kind = type(module).__name__
        raise ValueError(
            f"{kind}: its forward made {tuple(output.shape)} of {tuple(x.shape)}, expected {expected}; set patch mode"
            " to host"
        )
    return output


# --- weights that can be quantized again: ComfyUI's int8 and fp8 ------------------------------------------------------


def requantizes(weight: Any) -> bool:
    """Whether a weight is a tensor that is made of others and quantizes new numbers in its own way."""
    return hasattr(weight, "requantize_from_float") and hasattr(weight, "__tensor_flatten__")


def why_not_merged(module: nn.Module, attribute: str, coarse: bool) -> str | None:
    """Why a weight cannot be merged, or None. With `coarse`, fp8 and quantized weights that requantize can be."""
    if coarse and requantizes(module._parameters.get(attribute)):
        if getattr(module, _INPUT_SCALE, None) is None:
            return None
        return f"its layer scales its input ({_INPUT_SCALE})"
    return why_not_plain(module, attribute, coarse)


def dequantize(weight: Any) -> Tensor:
    """The numbers that a quantized weight stands for, in float32."""
    return weight.detach().to(torch.float32).dequantize()


def requantize(weight: Any, values: Tensor, seed: int) -> Tensor:
    """Quantize values as a weight is, with scales of their own, rounded up or down at random.

    Rounding to the nearest would lose nearly all of a LoRA: the weight lies on the grid already, and the change is
    smaller than a step.

    Args:
        weight: the quantized one.
        values: float32, of the shape that it stands for; may be overwritten.
        seed: of the rounding.
    """
    quantized: Any = weight.requantize_from_float(
        values, scale="recalculate", stochastic_rounding=max(1, seed), inplace_ops=True
    )
    return quantized.to(weight.dtype)
