"""Learning rates that differ by tensor: block learning rates, LoRA+ (2402.12354), and the text encoder's."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Protocol

from ...patches.adapters.registry import up_factor_suffixes
from ..trainable.patterns import compile_regex, matches
from ..trainable.settings import TEXT_ENCODER, is_word


class Rates(Protocol):
    """The settings that a tensor's learning rate depends on."""

    @property
    def learning_rate(self) -> float: ...
    @property
    def text_encoder_rate(self) -> float: ...
    @property
    def lora_plus(self) -> float: ...
    @property
    def block_rates(self) -> str: ...


def is_text_encoder(name: str) -> bool:
    """Whether a trained tensor is the text encoder's."""
    return name.startswith(TEXT_ENCODER)


def is_up(name: str) -> bool:
    """Whether a trained tensor is an up matrix, for which LoRA+ raises the learning rate."""
    return name.endswith(up_factor_suffixes())


def parse_block_rates(text: str) -> list[tuple[str, float]]:
    """Read block learning rates.

    Args:
        text: entries `pattern = multiple`, separated by commas or lines. Patterns are those of the layer filter: globs,
            or /regular expressions/.

    Returns:
        (pattern, multiple of the rate) of every entry, in order.

    Raises:
        ValueError: naming every entry that cannot be read.
    """
    rates, errors = [], []
    for part in re.split(r"[,\n]", text):
        entry = part.strip()
        if not entry:
            continue
        pattern, _, number = entry.rpartition("=")
        pattern = pattern.strip()
        try:
            factor = float(number.strip())
            compile_regex(pattern)
        except (ValueError, re.error) as error:
            errors.append(
                f"block learning rates: {entry!r} cannot be read ({error}), expected such as output_blocks.* = 0.5"
            )
            continue
        if not pattern or not (math.isfinite(factor) and factor >= 0):
            errors.append(
                f"block learning rates: {entry!r} needs a pattern and a finite multiple of the rate, 0 or more"
            )
        rates.append((pattern, factor))
    if errors:
        raise ValueError("; ".join(errors))
    return rates


def _matches(name: str, pattern: str) -> bool:
    """Whether a pattern matches a trained tensor, by its own name or by its module's path."""
    return any(matches(name.rsplit(".", suffix_parts)[0], pattern) for suffix_parts in range(3))


def unmatched_patterns(block_rates: str, names: Iterable[str]) -> list[str]:
    """The patterns that match none of the trained tensors.

    Args:
        block_rates: the text of block learning rates.
        names: the names of the trained tensors.
    """
    names = list(names)
    unused = []
    for pattern, _ in parse_block_rates(block_rates):
        if not any(_matches(name, pattern) for name in names):
            unused.append(pattern)
    return unused


def ratios(settings: Rates, names: Iterable[str], words_rate: float = 0.0) -> dict[str, float]:
    """The learning rate of every trained tensor, as a multiple of the schedule's.

    If several block patterns match, the last one counts. LoRA+ (Hayou 2024, arXiv 2402.12354) multiplies the rate of
    up matrices.

    Args:
        settings: the learning rates; the text encoder's own takes the place of the common one.
        names: the names of the trained tensors.
        words_rate: the learning rate of trained words; 0 is the common one. Nothing else changes it.

    Returns:
        {name: ratio}.
    """
    patterns = parse_block_rates(settings.block_rates)
    ratio_of_name = {}
    for name in names:
        if is_word(name):
            ratio_of_name[name] = (words_rate or settings.learning_rate) / settings.learning_rate
            continue
        ratio = next((factor for pattern, factor in reversed(patterns) if _matches(name, pattern)), 1.0)
        if is_up(name):
            ratio *= settings.lora_plus
        if is_text_encoder(name) and settings.text_encoder_rate:
            ratio *= settings.text_encoder_rate / settings.learning_rate
        ratio_of_name[name] = ratio
    return ratio_of_name
