"""nf4: 4-bit NormalFloat of QLoRA (arXiv 2305.14314), with the numbers and the packing of bitsandbytes."""

from __future__ import annotations

import torch
from torch import Tensor

from .format import QuantizedWeight, UnpackedFormat

BLOCK = 64  # numbers with a scale of their own
CELL = 1 / 32  # of -1..1: so narrow that a cell has one bound between two codes at most
CODE = (  # quantiles of a normal distribution, scaled to -1..1, with an exact 0
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)


class NF4(UnpackedFormat):
    """Weights as 4-bit codes, two in a byte (out, in / 2), and the largest magnitude (n, 1) of each block of 64."""

    name = "nf4"
    is_kept = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        code = torch.tensor(CODE)
        bounds = (code[1:] + code[:-1]) / 2
        codes = torch.bucketize(torch.arange(-1, 1 + CELL, CELL), bounds)
        self._codes = codes.to(torch.uint8).to(device)  # at the lower end of each cell
        self._bounds = torch.cat([bounds, torch.tensor([torch.inf])])[codes].to(device)  # above it, the next code
        self._pairs = torch.stack([code.repeat_interleave(16), code.repeat(16)], 1).to(device)  # of each byte

    def quantize(self, weight: Tensor) -> QuantizedWeight:
        """Each number of a block, divided by the largest, becomes the code that is nearest."""
        blocks = weight.float().reshape(-1, BLOCK)
        largest = torch.maximum(blocks.amax(1, keepdim=True), -blocks.amin(1, keepdim=True))
        blocks = blocks / largest.clamp(min=torch.finfo(torch.float32).tiny)
        numbers = blocks.view(-1)
        cells = ((numbers + 1) / CELL).int().clamp_(0, len(self._codes) - 1)  # a NaN may come to be any integer
        codes = torch.index_select(self._codes, 0, cells)
        codes += numbers > torch.index_select(self._bounds, 0, cells)
        first, second = codes.view(len(weight), -1, 2).unbind(2)
        return QuantizedWeight(first * 16 + second, largest)

    def values(self, weight: QuantizedWeight) -> Tensor:
        """The number of each code times the largest of its block."""
        pairs = torch.index_select(self._pairs, 0, weight.numbers.reshape(-1).int())
        return (pairs.view(-1, BLOCK) * weight.scales).view(len(weight.numbers), -1)
