"""Dropouts of an adapter while it trains: of ranks, of activations, of whole modules (kohya's and lycoris')."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..memory.offload import to_device
from ..random_draws import generator
from .settings import AdapterSettings

Moment = Callable[[], tuple[int, int, str]]  # (seed, step, part of the step) of the forward that runs now


class AdapterDropout:
    """Draws the dropout of one module's adapter for the current forward pass.

    A checkpointed forward pass that runs again gets the same dropout.
    """

    def __init__(self, settings: AdapterSettings, path: str, moment: Moment) -> None:
        self.settings, self.path, self.moment = settings, path, moment
        self.is_enabled = settings.any_dropout
        self.drops_modules = settings.module_dropout > 0

    def generator(self) -> torch.Generator | None:
        """The generator of this forward; None outside training, where nothing is left out."""
        seed, step, purpose = self.moment()
        if purpose:
            return generator(seed, step, f"dropout {purpose} {self.path}")
        return None

    def skips_module(self, generator: torch.Generator | None) -> bool:
        """Whether the whole adapter is dropped."""
        chance = self.settings.module_dropout
        return generator is not None and chance > 0 and float(torch.rand((), generator=generator)) < chance

    def drop_activations(self, values: Tensor, generator: torch.Generator | None) -> Tensor:
        """`network_dropout`: single activations zeroed, the rest scaled up by 1 / (1 - chance).

        Args:
            values: activations of any shape.
            generator: draws which, on the CPU; None drops nothing.
        """
        chance = self.settings.network_dropout
        if generator is None or not chance:
            return values
        keep = torch.rand(values.shape, generator=generator) >= chance
        return values * (to_device(keep, values.device, values.dtype) / (1 - chance))

    def drop_ranks(self, hidden: Tensor, dimension: int, generator: torch.Generator | None) -> Tensor:
        """Rank dropout of a low-rank pair, as kohya does it: zero other ranks for each image and scale the rest up by
        1 / (1 - chance).

        Args:
            hidden: what is between the two factors, (B, …), with the ranks in `dimension`.
            dimension: that of the ranks.
            generator: draws which, on the CPU; None drops nothing.
        """
        chance = self.settings.rank_dropout
        if generator is None or not chance:
            return hidden
        shape = [1] * hidden.ndim
        shape[0], shape[dimension] = hidden.shape[0], hidden.shape[dimension]
        keep = torch.rand(shape, generator=generator) >= chance
        return hidden * (to_device(keep, hidden.device, hidden.dtype) / (1 - chance))

    def keep_mask(self, count: int, device: torch.device, generator: torch.Generator | None) -> Tensor | None:
        """Rank dropout for adapters without ranks to drop.

        Args:
            count: how many rows of the change there are (as lycoris drops them, not scaled up), or blocks of a
                rotation.
            device: where the mask is needed.
            generator: draws which, on the CPU; None drops nothing.

        Returns:
            Which are kept (count,), as booleans; None for all.
        """
        chance = self.settings.rank_dropout
        if generator is None or not chance:
            return None
        return to_device(torch.rand(count, generator=generator) >= chance, device)
