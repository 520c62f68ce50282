"""Latents that are read from the cache when they are drawn, so that thousands of pictures or clips need no memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Size, Tensor

KEPT_BYTES = 2**30  # how many bytes of latents, and of conditionings, a dataset keeps in memory


class StoredLatent:
    """A latent (C, h, w), or (C, T, h, w) of a clip, that `load` reads when it is drawn: with `keeps` once, else anew
    each time.
    """

    def __init__(self, shape: Sequence[int], load: Callable[[], Tensor], keeps: bool = False) -> None:
        self.shape, self.load, self.keeps = Size(shape), load, keeps
        self._kept: Tensor | None = None

    def read(self) -> Tensor:
        """The latent's tensor."""
        if self._kept is not None:
            return self._kept
        latent = self.load()
        if self.keeps:
            self._kept = latent
        return latent

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
