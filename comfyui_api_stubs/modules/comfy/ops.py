"""Layers that leave their weights uninitialised and can cast or change them at each call (ComfyUI's `comfy.ops`)."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

import comfy.model_management


def scaled_dot_product_attention(q, k, v, *args, **kwargs):
    """PyTorch's attention."""
    return F.scaled_dot_product_attention(q, k, v, *args, **kwargs)


def cast_bias_weight(s, input=None, dtype=None, device=None, bias_dtype=None):
    """(weight, bias) of a layer cast for the input and passed through its weight and bias functions."""
    if input is not None:
        dtype = input.dtype if dtype is None else dtype
        device = input.device if device is None else device
    bias_dtype = dtype if bias_dtype is None else bias_dtype

    def ready(tensor, functions, dtype):
        if tensor is None:
            return None
        tensor = comfy.model_management.cast_to(tensor, dtype, device, copy=len(functions) > 0)
        for function in functions:
            tensor = function(tensor)
        return tensor

    return ready(s.weight, s.weight_function, dtype), ready(s.bias, s.bias_function, bias_dtype)


if TYPE_CHECKING:
    _Layer = torch.nn.Module  # what the class below is mixed into
else:
    _Layer = object


class CastWeightBiasOp(_Layer):
    """A layer whose weight and bias may be cast to the input's type or changed by functions at each call."""

    comfy_cast_weights = False
    forward_comfy_cast_weights: Callable[..., torch.Tensor]
    weight_function: list[Callable] = []  # noqa: RUF012 - ComfyUI's attribute; loading replaces it on the instance before it is extended
    bias_function: list[Callable] = []  # noqa: RUF012

    def reset_parameters(self):
        """Weights come from a file: leave them uninitialised."""

    def forward(self, *args, **kwargs):
        """The plain layer unless something casts or changes its weights."""
        if self.comfy_cast_weights or len(self.weight_function) > 0 or len(self.bias_function) > 0:
            return self.forward_comfy_cast_weights(*args, **kwargs)
        return super().forward(*args, **kwargs)


class _ConvCast(CastWeightBiasOp):
    _conv_forward: Callable[..., torch.Tensor]

    def forward_comfy_cast_weights(self, input):
        """Convolve with cast weights."""
        return self._conv_forward(input, *cast_bias_weight(self, input))


class disable_weight_init:
    """Layers without initialisation."""

    class Linear(CastWeightBiasOp, torch.nn.Linear):
        """nn.Linear."""

        def forward_comfy_cast_weights(self, input):
            """Multiply with cast weights."""
            return F.linear(input, *cast_bias_weight(self, input))

    class Conv1d(_ConvCast, torch.nn.Conv1d):
        """nn.Conv1d."""

    class Conv2d(_ConvCast, torch.nn.Conv2d):
        """nn.Conv2d."""

    class Conv3d(_ConvCast, torch.nn.Conv3d):
        """nn.Conv3d."""

    class GroupNorm(CastWeightBiasOp, torch.nn.GroupNorm):
        """nn.GroupNorm."""

        def forward_comfy_cast_weights(self, input):
            """Normalise with cast weights."""
            weight, bias = cast_bias_weight(self, input)
            return F.group_norm(input, self.num_groups, weight, bias, self.eps)

    class LayerNorm(CastWeightBiasOp, torch.nn.LayerNorm):
        """nn.LayerNorm."""

        def forward_comfy_cast_weights(self, input):
            """Normalise with cast weights."""
            weight, bias = cast_bias_weight(self, input)
            return F.layer_norm(input, self.normalized_shape, weight, bias, self.eps)

    class Embedding(CastWeightBiasOp, torch.nn.Embedding):
        """nn.Embedding."""

        bias = None

        def forward_comfy_cast_weights(self, input, out_dtype=None):
            """Look up rows, then cast them."""
            weight, _ = cast_bias_weight(self, device=input.device, dtype=self.weight.dtype)
            return F.embedding(
                input, weight, self.padding_idx, self.max_norm, self.norm_type, self.scale_grad_by_freq, self.sparse
            ).to(dtype=out_dtype)

        def forward(self, *args, **kwargs):
            """Look up rows; out_dtype counts only where weights are cast."""
            if not (self.comfy_cast_weights or self.weight_function or self.bias_function):
                kwargs.pop("out_dtype", None)
            return super().forward(*args, **kwargs)

    @classmethod
    def conv_nd(cls, dims, *args, **kwargs):
        """A convolution of two or three dimensions."""
        if dims not in (2, 3):
            raise ValueError(f"unsupported dimensions: {dims}; expected 2 or 3")
        return (cls.Conv2d if dims == 2 else cls.Conv3d)(*args, **kwargs)


class manual_cast(disable_weight_init):
    """Layers that cast their weights to the input's type at each call."""

    class Linear(disable_weight_init.Linear):
        """Casting nn.Linear."""

        comfy_cast_weights = True

    class Conv1d(disable_weight_init.Conv1d):
        """Casting nn.Conv1d."""

        comfy_cast_weights = True

    class Conv2d(disable_weight_init.Conv2d):
        """Casting nn.Conv2d."""

        comfy_cast_weights = True

    class Conv3d(disable_weight_init.Conv3d):
        """Casting nn.Conv3d."""

        comfy_cast_weights = True

    class GroupNorm(disable_weight_init.GroupNorm):
        """Casting nn.GroupNorm."""

        comfy_cast_weights = True

    class LayerNorm(disable_weight_init.LayerNorm):
        """Casting nn.LayerNorm."""

        comfy_cast_weights = True

    class Embedding(disable_weight_init.Embedding):
        """Casting nn.Embedding."""

        comfy_cast_weights = True


def pick_operations(
    weight_dtype, compute_dtype, load_device=None, disable_fast_fp8=False, fp8_optimizations=False, scaled_fp8=None
):
    """The layers for weights stored in one type and computed in another."""
    if compute_dtype is None or weight_dtype == compute_dtype:
        return disable_weight_init
    return manual_cast
