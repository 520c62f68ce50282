"""Token routing: how many tokens skip which blocks, and when (TREAD, arXiv 2501.04765)."""

from __future__ import annotations

from dataclasses import dataclass

from ...settings.declaration import check_values, setting
from ..token_downsampling.tokens import is_disabled


@dataclass(frozen=True)
class RoutingSettings:
    """The settings of Apply TREAD; plain values, checked on creation.

    `ratio` of the image's tokens skip the blocks from `start_layer` to `end_layer`, both included and counted from 0;
    negative numbers count from the end. `disable_after` is a share of the run (below 1) or a number of steps.
    """

    ratio: float = setting(
        "skip ratio",
        0.5,
        "The part of the tokens that skips the blocks (SimpleTuner's selection_ratio). 0 is off. Higher is faster,"
        " and each step learns from less of the image.",
        low=0.0,
        high=0.95,
        step=0.05,
    )
    start_layer: int = setting(
        "start layer",
        2,
        "The first block that tokens skip, counted from 0 (SimpleTuner's start_layer_index). In UNets, all"
        " transformer blocks with the most channels are skipped instead.",
        low=-1000,
        high=1000,
    )
    end_layer: int = setting(
        "end layer",
        -2,
        "The last block that tokens skip. Negative numbers count from the end: -2 leaves the last block whole.",
        low=-1000,
        high=1000,
    )
    disable_after: float = setting(
        "disable after",
        0.0,
        "Switch off after this fraction of the run (below 1) or after this many steps (1 and above), so that"
        " training ends on the whole model. 0 never switches off.",
        low=0.0,
        high=1_000_000.0,
        step=0.05,
        advanced=True,
    )

    def __post_init__(self) -> None:
        check_values(self, "Apply TREAD")
        first, last = self.start_layer, self.end_layer
        if (first < 0) == (last < 0) and first > last:
            raise ValueError(
                f"Apply TREAD: start layer {first} comes after end layer {last}: no block would be skipped."
            )

    @property
    def identity(self) -> str:
        """The same text for equal settings, in every process; fingerprints hash it."""
        return f"tread {self.ratio:.17g} {self.start_layer} {self.end_layer} after {self.disable_after:.17g}"

    @property
    def changes_nothing(self) -> bool:
        """True when no token skips anything."""
        return self.ratio == 0.0

    def metadata(self) -> dict[str, str]:
        """The metadata of a LoRA trained with these settings (`ss_tread_*`)."""
        return {
            "ss_tread_ratio": f"{self.ratio:g}",
            "ss_tread_start_layer": str(self.start_layer),
            "ss_tread_end_layer": str(self.end_layer),
        }

    def is_active_at(self, step: int, total_steps: int) -> bool:
        """Whether tokens skip blocks at training step `step` (counted from 0) of `total_steps`."""
        return not is_disabled(self.disable_after, step, total_steps)

    def blocks(self, count: int) -> range:
        """The blocks that are skipped, of `count`. ValueError if there is none."""
        first, last = (layer + count if layer < 0 else layer for layer in (self.start_layer, self.end_layer))
        chosen = range(max(first, 0), min(last, count - 1) + 1)
        if not chosen:
            raise ValueError(
                f"Apply TREAD: no block lies between start layer {self.start_layer} and end layer {self.end_layer}:"
                f" this model has {count} blocks, 0 to {count - 1}"
            )
        return chosen
