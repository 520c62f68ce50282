"""Token routing: how many tokens skip which blocks, and when (TREAD, arXiv 2501.04765)."""

from __future__ import annotations

from dataclasses import dataclass

from ..token_downsampling.tokens import is_disabled, wrong_disable_after

MAX_RATIO = 0.95
MAX_LAYER = 1000


@dataclass(frozen=True)
class RoutingSettings:
    """The settings of Apply TREAD.

    `ratio` of the image's tokens skip the blocks from `start_layer` to `end_layer`, both included and counted from 0;
    negative numbers count from the end. `disable_after` is a share of the run (below 1) or a number of steps.
    """

    ratio: float
    start_layer: int = 2
    end_layer: int = -2
    disable_after: float = 0.0

    @classmethod
    def parse(
        cls, ratio: float = 0.5, start_layer: int = 2, end_layer: int = -2, disable_after: float = 0.0
    ) -> RoutingSettings:
        """Settings from the node's inputs; raises ValueError listing every invalid input."""
        problems = []
        if not 0.0 <= ratio <= MAX_RATIO:  # NaN fails this too
            problems.append(f"skip ratio: expected 0 (off) to {MAX_RATIO}, got {ratio}")
        for label, layer in (("start layer", start_layer), ("end layer", end_layer)):
            if not -MAX_LAYER <= layer <= MAX_LAYER:
                problems.append(f"{label}: expected {-MAX_LAYER} to {MAX_LAYER}, got {layer}")
        if (start_layer < 0) == (end_layer < 0) and start_layer > end_layer:
            problems.append(f"start layer {start_layer} comes after end layer {end_layer}: no block would be skipped")
        problems += wrong_disable_after(disable_after)
        if problems:
            raise ValueError("Apply TREAD:\n" + "\n".join(f"- {problem}" for problem in problems))
        return cls(float(ratio), int(start_layer), int(end_layer), float(disable_after))

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

    def active_at(self, step: int, total_steps: int) -> bool:
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
