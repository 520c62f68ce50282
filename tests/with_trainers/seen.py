"""The weights and biases that modules compute with, seen from outside: what their forward makes of unit inputs.

It does not matter whether a LoRA changed the weight, sits at the activations or replaced the forward: linear layers and
convolutions are their answers to unit inputs.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def layers(model: nn.Module) -> dict[str, nn.Module]:
    """The linear layers and convolutions of a model by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, (nn.Linear, *CONVOLUTIONS))}


def kind(module: nn.Module) -> type[nn.Module]:
    """PyTorch's class of a layer."""
    return next(plain for plain in (nn.Linear, *CONVOLUTIONS) if isinstance(module, plain))


def parameters(model: nn.Module) -> dict[str, Tensor]:
    """A copy of a model's parameters in float64."""
    return {name: tensor.detach().clone().double() for name, tensor in model.named_parameters()}


@torch.no_grad()
def seen(model: nn.Module, shapes: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """Weight and bias of each named layer in float64.

    `shapes` are the layers as they were before anything changed them: they say sizes, stride and padding.
    """
    found = {}
    for name, plain in shapes.items():
        module = model.get_submodule(name)
        look = _linear if isinstance(plain, nn.Linear) else _convolution
        weight, bias = look(module, plain)
        found[f"{name}.weight"] = weight.double()
        if plain.bias is not None:
            found[f"{name}.bias"] = bias.double()
    return found


def _linear(module: nn.Module, plain: nn.Linear) -> tuple[Tensor, Tensor]:
    units = torch.eye(plain.in_features, dtype=plain.weight.dtype).unsqueeze(0)
    bias = module(torch.zeros_like(units[:, :1]))[0, 0]
    return (module(units)[0].double() - bias.double()).T, bias


def _convolution(module: nn.Module, plain: nn.Conv2d) -> tuple[Tensor, Tensor]:
    """The kernel, from its answer to one unit in each channel; with a stride, to one unit for each of its phases."""
    ways = [Way(*way) for way in zip(plain.kernel_size, plain.stride, plain.padding, strict=True)]
    empty = torch.zeros(plain.in_channels, plain.in_channels, *(way.side for way in ways), dtype=plain.weight.dtype)
    answer = module(empty)[0]
    bias = answer[(slice(None), *(0 for _ in ways))]
    weight = torch.full(plain.weight.shape, torch.nan, dtype=torch.float64)
    channels = torch.arange(plain.in_channels)
    for unit in itertools.product(*(way.units for way in ways)):
        units = empty.clone()
        units[(channels, channels, *unit)] = 1.0
        answers = (module(units).double() - answer.double()).transpose(0, 1)
        taps = [way.taps(place) for way, place in zip(ways, unit, strict=True)]
        for found in itertools.product(*taps):
            tap, output = zip(*found, strict=True)
            weight[(slice(None), slice(None), *tap)] = answers[(slice(None), slice(None), *output)]
    return weight, bias


class Way(NamedTuple):
    """One dimension of a convolution: an output at `y` sees the inputs from `y * stride - padding` on."""

    kernel: int
    stride: int
    padding: int

    @property
    def units(self) -> range:
        """Where units have to be, so that all of the kernel is seen."""
        first = self.kernel - 1 - self.padding
        return range(first, first + self.stride)

    @property
    def side(self) -> int:
        """How long an input is that holds every unit and every output that sees one."""
        outputs = (self.kernel + self.stride - 2) // self.stride
        return max(self.units[-1] + 1, outputs * self.stride + self.kernel - 2 * self.padding)

    def taps(self, unit: int) -> list[tuple[int, int]]:
        """(place in the kernel, output) of every output that sees a unit."""
        outputs = range((unit + self.padding) // self.stride + 1)
        seen_at = ((unit + self.padding - output * self.stride, output) for output in outputs)
        return [(tap, output) for tap, output in seen_at if tap < self.kernel]
