"""Conditioning values that know how they are batched."""

import math

import torch

import comfy.utils


class CONDRegular:
    """A tensor that is repeated to the batch and concatenated along it."""

    def __init__(self, cond):
        self.cond = cond

    def _copy_with(self, cond):
        return self.__class__(cond)

    def process_cond(self, batch_size, **kwargs):
        """The value for that batch."""
        return self._copy_with(comfy.utils.repeat_to_batch_size(self.cond, batch_size))

    def can_concat(self, other):
        """Whether both fit into one batch."""
        return self.cond.shape == other.cond.shape and self.cond.device == other.cond.device

    def concat(self, others):
        """One batch of this and the others."""
        return torch.cat([self.cond, *(other.cond for other in others)])

    def size(self):
        """The shape, for memory estimates."""
        return list(self.cond.size())


class CONDNoiseShape(CONDRegular):
    """A tensor of the latent's size; an area of the picture takes its part of it."""

    def process_cond(self, batch_size, area, **kwargs):  # type: ignore[override]  # as ComfyUI has it
        """The value for that batch and area."""
        data = self.cond
        if area is not None:
            dims = len(area) // 2
            for i in range(dims):
                data = data.narrow(i + 2, area[i + dims], area[i])
        return self._copy_with(comfy.utils.repeat_to_batch_size(data, batch_size))


class CONDCrossAttn(CONDRegular):
    """Context tokens (B, N, C): of different lengths they are repeated to a common one, which leaves attention as it
    is.
    """

    def can_concat(self, other):
        """Whether both fit into one batch with at most fourfold repetition."""
        a, b = self.cond.shape, other.cond.shape
        if self.cond.device != other.cond.device or a[0] != b[0] or a[2] != b[2]:
            return False
        return math.lcm(a[1], b[1]) // min(a[1], b[1]) <= 4

    def concat(self, others):
        """One batch of this and the others, all of one length."""
        conds = [self.cond, *(other.cond for other in others)]
        length = math.lcm(*(c.shape[1] for c in conds))
        return torch.cat([c.repeat(1, length // c.shape[1], 1) for c in conds])
