"""A stack applied at the activations, y = f(x) + h(x), touching no weight: one fused adapter a module, whatever the number of LoRAs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .stack import Piece, fuse

_CONV: dict[int, Any] = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}


def supports(module: nn.Module) -> bool:
    """Whether a module's output is linear in its weight in a way that is known here: Linear, or a convolution."""
    return is_linear(module) or isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d))


def is_linear(module: nn.Module) -> bool:
    """Linear, or a host's quantised stand-in for it."""
    return isinstance(module, nn.Linear) or (hasattr(module, "in_features") and hasattr(module, "out_features"))


class Wrapped:
    """An adapter around one module's forward, until `remove`.

    An instance's `forward`, not a forward hook: torch.compile looks for a changed forward, and misses hooks that come and go. Another
    wrapper may have been put around this one and taken off in any order; then what remains of this one passes everything through.
    """

    def __init__(self, module: nn.Module, adapter: Bypass):
        self.module, self.adapter = module, adapter
        self._previous = _without_remains(module.__dict__.get("forward"))
        inner = self._previous if self._previous is not None else type(module).forward.__get__(module)
        self._state = state = {"adapter": adapter}

        def forward(*args: Any, **kwargs: Any) -> Tensor:
            output = inner(*args, **kwargs)
            adapter = state["adapter"]
            return output if adapter is None else adapter(module, args, kwargs, output)

        forward.graft_state, forward.graft_inner = state, self._previous  # type: ignore[attr-defined]
        self._forward = forward
        module.forward = forward

    def remove(self) -> None:
        """Put the forward back that was there before."""
        self._state["adapter"] = None  # type: ignore[assignment]
        if self.module.__dict__.get("forward") is not self._forward:
            return
        if self._previous is None:
            del self.module.forward
        else:
            self.module.forward = self._previous


def _without_remains(forward: Any) -> Any:
    """An instance's forward without removed wrappers of ours that another pack's wrapper had kept."""
    while getattr(forward, "graft_state", {"adapter": True})["adapter"] is None:
        forward = forward.graft_inner
    return forward


class Bypass:
    """What is added to one module's output: the product of all pieces of its weight and the differences of its bias.

    Factors are cast once to the activations' type and device.
    """

    def __init__(self, weight: Sequence[Piece], bias: Sequence[Piece], shape: Sequence[int], groups: int = 1):
        with torch.inference_mode(False), torch.no_grad():
            fused = fuse(weight, shape)
            diff = fused.diff
            if groups > 1 and fused.up.shape[1]:  # the factors of a grouped convolution mix groups: their product is the small thing here
                product = (fused.up @ fused.down.float()).reshape(tuple(shape))
                diff = product if diff is None else diff + product
            factors = (fused.down.reshape(-1, *shape[1:]), fused.up.reshape(*fused.up.shape, *(1,) * (len(shape) - 2)))
            self.factors = factors if groups == 1 and fused.up.shape[1] else None
            self.diff = diff
            self.bias = fuse(bias, (shape[0],)).diff if bias else None
        self._cast: tuple[tuple[torch.dtype, torch.device], list[Tensor | None]] | None = None

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Tensor) -> Tensor:
        x = args[0] if args else next(iter(kwargs.values()))
        down, up, diff, bias = self._for(x)
        if down is not None and up is not None:
            hidden = F.linear(x, down) if down.ndim == 2 else convolve(module, x, down, 1)
            output = output + (F.linear(hidden, up) if up.ndim == 2 else _CONV[up.ndim](hidden, up))
        if diff is not None:
            output = output + (F.linear(x, diff) if diff.ndim == 2 else convolve(module, x, diff, getattr(module, "groups", 1)))
        if bias is not None:
            output = output + bias.view(-1, *(1,) * (output.ndim - 2 if _is_conv(module) else 0))
        return output

    def _for(self, x: Tensor) -> list[Tensor | None]:
        key = (x.dtype, x.device)
        if self._cast is None or self._cast[0] != key:
            down, up = self.factors if self.factors is not None else (None, None)
            with torch.inference_mode(False), torch.no_grad():
                parts = (down, up, self.diff, self.bias)
                self._cast = (key, [None if t is None else t.to(x.device, x.dtype, copy=t.is_inference()) for t in parts])
        return self._cast[1]


def convolve(module: Any, x: Tensor, weight: Tensor, groups: int = 1) -> Tensor:
    """A convolution with another weight in place of the module's (no bias), with its stride, dilation and kind of padding."""
    padding = module.padding
    if module.padding_mode != "zeros":
        x, padding = F.pad(x, module._reversed_padding_repeated_twice, mode=module.padding_mode), 0
    return _CONV[weight.ndim](x, weight, None, module.stride, padding, module.dilation, groups)


def _is_conv(module: nn.Module) -> bool:
    return isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d))
