"""Weights as ComfyUI-GGUF keeps them: blocks of 32 numbers, a scale in float16 and 32 times 8 bits."""

import torch


class GGUFTensor(torch.Tensor):
    """Bytes that say they have the shape of the weight they stand for, and that cannot be copied."""

    def __new__(cls, data, stands_for):
        return super().__new__(cls, data)

    def __init__(self, data, stands_for):
        self.stands_for = torch.Size(stands_for)

    def detach(self):
        return self

    def clone(self):
        return self

    @property
    def shape(self):
        return self.stands_for


def packed(weight):
    """A weight of any shape in blocks."""
    blocks = weight.detach().float().reshape(-1, 32)
    scales = (blocks.abs().amax(1, keepdim=True) / 127).half()
    return GGUFTensor(
        torch.cat([scales.view(torch.int8), (blocks / scales.float()).round().to(torch.int8)], 1), weight.shape
    )


def unpacked(weight, dtype):
    """The numbers that blocks stand for, multiplied out in a type."""
    blocks = weight.as_subclass(torch.Tensor)
    return (blocks[:, 2:].to(dtype) * blocks[:, :2].contiguous().view(torch.float16).to(dtype)).reshape(weight.shape)
