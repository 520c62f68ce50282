"""A frozen base that is quantized while adapters train: which layers are, and their forwards meanwhile.

Adapters stay in full precision, as they go around the layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from ....patches.core.calls import around
from ....patches.core.ledger import open_entry
from ....patches.core.slots import slot_key
from ....patches.models.layers import is_changed_by_host, why_not_plain
from ..offload import SMALL, is_on_device, weights_on
from .format import QuantizedWeight, WeightFormat, linear
from .kept_weights import KeptWeights

MULTIPLE = 8  # of both sizes of a weight: CUDA's int8 product needs it, and blocks of 64 numbers fit
IN_CACHE = 1 << 18  # numbers that a CPU quantizes at once
_BUFFERS = ("quantized_numbers", "quantized_scales")  # of a layer that is quantized


class QuantizedBase:
    """A model's quantized weights, which can be switched off.

    `waiting`: the slots of the tensors that `layers` do not compute with now.
    """

    def __init__(self, weight_format: WeightFormat, layers: Collection[nn.Linear]) -> None:
        self.weight_format, self.is_off = weight_format, False
        self.waiting = {slot_key(layer, "weight") for layer in layers}
        self._quantized = {slot_key(layer, name) for layer in layers for name in _BUFFERS}

    @contextmanager
    def switch_off(self) -> Iterator[None]:
        """Inside the block, which makes no gradients, the model computes with its own weights; what waits in host
        memory comes over layer by layer.
        """
        before = self.is_off, self.waiting
        self.is_off, self.waiting = True, self._quantized
        try:
            yield
        finally:
            self.is_off, self.waiting = before


class QuantizedLayer:
    """The forward of a linear layer while its weight is quantized."""

    def __init__(self, layer: nn.Linear, weight: QuantizedWeight, device: torch.device, base: QuantizedBase) -> None:
        self._layer, self._device, self._base = layer, device, base
        for name, tensor in zip(_BUFFERS, weight, strict=True):
            layer.register_buffer(name, tensor, persistent=False)
        layer.quantized_layer = self  # type: ignore[assignment]
        self._handle = around(layer, "replacement", self._call)

    @property
    def weight(self) -> QuantizedWeight:
        """The quantized weight."""
        return QuantizedWeight(*(cast(Tensor, getattr(self._layer, name)) for name in _BUFFERS))

    def _call(self, _: nn.Module, inner: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """The layer's output for x."""
        if self._base.is_off:
            with weights_on([self._layer], self._device, self._base.waiting):
                return inner(x)
        return linear(x, self._base.weight_format, self.weight, self._layer.bias)

    def values(self) -> Tensor:
        """The weight that the layer computes with now, in float32."""
        if self._base.is_off:
            return self._layer.weight.detach().to(self._device).float()
        return self._base.weight_format.values(self.weight)

    def remove(self) -> None:
        """The layer is as before."""
        self._handle.leave()
        del self._layer.quantized_layer
        for name in _BUFFERS:
            delattr(self._layer, name)


@torch.no_grad()
def _weights(
    layers: Mapping[str, nn.Linear],
    weight_format: WeightFormat,
    device: torch.device,
    on_host: bool,
    kept: KeptWeights | None,
) -> dict[str, QuantizedWeight]:
    """The quantized weights of layers by path, from disk if they are kept there."""
    if kept is None or device.type != "cpu" or not weight_format.is_kept:
        return {path: _quantize_on(device, layer, weight_format, on_host) for path, layer in layers.items()}
    key = kept.key(weight_format, layers)
    weights = kept.read(key, layers)
    if weights is None:
        weights = {path: _quantize(weight_format, layer.weight.detach()) for path, layer in layers.items()}
        kept.write(key, weights)
    return weights


def _quantize_on(device: torch.device, layer: nn.Linear, weight_format: WeightFormat, on_host: bool) -> QuantizedWeight:
    weight = _quantize(weight_format, layer.weight.detach().to(device))
    if on_host:
        return QuantizedWeight(*map(_copy_to_host, weight))
    return weight


def _quantize(weight_format: WeightFormat, weight: Tensor) -> QuantizedWeight:
    """A quantized weight; on a CPU it is quantized in parts that fit into its cache, which is four times as fast."""
    if is_on_device(weight):
        return weight_format.quantize(weight)
    rows = max(MULTIPLE, IN_CACHE // weight.shape[1] // MULTIPLE * MULTIPLE)
    parts = map(weight_format.quantize, weight.split(rows))
    return QuantizedWeight(*map(torch.cat, zip(*parts, strict=True)))


def _copy_to_host(tensor: Tensor) -> Tensor:
    """A tensor in host memory; small ones stay, as copying them costs more than it saves."""
    if tensor.nbytes < SMALL or not is_on_device(tensor):
        return tensor
    return torch.empty_like(tensor, device="cpu").copy_(tensor)


def why_not_quantized(layer: nn.Linear) -> str | None:
    """Why a linear layer keeps its weight while the base is quantized; None if it does not."""
    if why_not_plain(layer, "weight") is not None:
        return "quantized already"
    if "forward" in vars(layer) or is_changed_by_host(layer, "weight") or is_changed_by_host(layer, "bias"):
        return "patched"
    if type(layer) is nn.modules.linear.NonDynamicallyQuantizableLinear:  # nn.MultiheadAttention reads its weight
        return "read by another module"
    if layer.in_features % MULTIPLE or layer.out_features % MULTIPLE:
        return f"a size that is not a multiple of {MULTIPLE}"
    return None


def _linear_layers(module: nn.Module) -> dict[str, nn.Linear]:
    return {path: part for path, part in module.named_modules() if isinstance(part, nn.Linear)}


def chosen_layers(module: nn.Module) -> dict[str, nn.Linear]:
    """The layers of a model whose weights can be quantized, by path."""
    return {path: layer for path, layer in _linear_layers(module).items() if why_not_quantized(layer) is None}


def remark(module: nn.Module, name: str) -> str:
    """How many layers of a model are of a format and how many stay, as a sentence for a report."""
    layers = _linear_layers(module).values()
    reasons = Counter(reason for layer in layers if (reason := why_not_quantized(layer)) is not None)
    text = f"base weights: {name} in {len(layers) - reasons.total()} of {len(layers)} linear layers"
    if reasons:
        counts = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))
        text += f"; as loaded: {counts}"
    return text


@contextmanager
def quantize_base(
    module: nn.Module,
    format_type: type[WeightFormat],
    device: torch.device,
    on_host: bool = False,
    kept: KeptWeights | None = None,
) -> Iterator[QuantizedBase]:
    """A context in which the frozen linear layers of a model compute with quantized weights. Afterwards it is as
    before.

    Their own weights stay where they are: in host memory, if `device` is another one. All other tensors come over for
    the block.

    Args:
        module: the model.
        format_type: the format of the weights.
        device: where it computes.
        on_host: whether the other tensors stay too, and quantized weights wait in host memory: `layer_ring` brings both
            over.
        kept: what a CPU would take long to quantize is read from it, or written there.
    """
    layers = chosen_layers(module)
    base = QuantizedBase(format_type(device), layers.values())
    with open_entry(module, "quantized base") as stack:
        if not on_host:
            stack.enter_context(weights_on(list(module.modules()), device, base.waiting))
        weights = _weights(layers, base.weight_format, device, on_host, kept)
        for path, layer in layers.items():
            stack.callback(QuantizedLayer(layer, weights[path], device, base).remove)
        yield base


def quantized_values(module: nn.Module) -> Tensor | None:
    """The weight that a layer computes with while its base is quantized, in float32; None for any other layer."""
    layer: Any = getattr(module, "quantized_layer", None)
    if layer is None:
        return None
    return cast(Tensor, layer.values())
