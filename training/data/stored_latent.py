"""Latents that are read from the cache when they are drawn, so that thousands of pictures or clips need no memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Size, Tensor

KEPT_BYTES = 2**30  # how many bytes of latents, and of conditionings, a dataset keeps in memory


class StoredLatent:
    """A latent (C, h, w), or (C, T, h, w) of a clip, that `read` reads anew each time."""

    def __init__(self, shape: Sequence[int], read: Callable[[], Tensor]) -> None:
        self.shape, self.read = Size(shape), read

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)


Latent = Tensor | StoredLatent


def read_latent(latent: Latent) -> Tensor:
    """The latent's tensor, wherever it is."""
    if isinstance(latent, StoredLatent):
        return latent.read()
    return latent
