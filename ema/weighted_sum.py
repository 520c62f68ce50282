"""Averages of stored weights: the share of each file, and their weighted sum.

(Uniform: arXiv 2203.05482; power function: 2312.02696.)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..storage.problem_list import problem_lines
from .decay import gamma_of_width


def uniform_shares(count: int) -> tuple[float, ...]:
    """Equal shares, 1 / count each: a model soup (Wortsman 2022, arXiv 2203.05482). Raises ValueError for none."""
    if count < 1:
        raise ValueError("There is no file to average.")
    return (1 / count,) * count


def exponential_shares(steps: Sequence[int], width: float) -> tuple[float, ...]:
    """Shares of files saved after `steps` (rising), which add up to 1: each in proportion to exp(-age / (width * last
    step)), with its age in steps before the last file, so that `width` is the average's relative length.

    Raises ValueError for steps that do not rise, and unless `width` is above 0.
    """
    _check_steps(steps)
    if not (width > 0 and math.isfinite(width)):
        raise ValueError(f"average width is {width}, expected above 0.")
    raw_weights = [math.exp((step - steps[-1]) / (width * steps[-1])) for step in steps]
    return tuple(weight / math.fsum(raw_weights) for weight in raw_weights)


def power_shares(steps: Sequence[int], width: float) -> tuple[float, ...]:
    """Shares of files saved after `steps` (rising) for the power-function average of relative width `width` at the last
    step T.

    A file represents the steps since the previous file, the first file all steps up to its own. Its share is the
    profile's integral over them: (t_i / T)^(gamma + 1) - (t_(i - 1) / T)^(gamma + 1). They add up to 1. Raises
    ValueError for steps that do not rise, and for a width that no power function has.
    """
    _check_steps(steps)
    exponent = gamma_of_width(width) + 1
    cumulative = [0.0, *((step / steps[-1]) ** exponent for step in steps)]
    return tuple(after - before for before, after in itertools.pairwise(cumulative))


def parse_numbers(text: str) -> list[float]:
    """Numbers separated by spaces or commas. Raises ValueError that says what is none."""
    try:
        return list(map(float, text.replace(",", " ").split()))
    except ValueError as error:
        raise ValueError(
            f"weights or widths {text!r}: expected numbers separated by spaces or commas ({error})."
        ) from error


def parse_shares(text: str, count: int) -> tuple[float, ...]:
    """Shares from numbers separated by spaces or commas, one per file, divided by their sum. Raises ValueError
    describing the error.
    """
    numbers = parse_numbers(text)
    if len(numbers) != count:
        raise ValueError(
            f"weights or widths {text!r}: {len(numbers)} numbers for {count} files; give one a file, in the order of"
            " the list."
        )
    total = math.fsum(numbers)
    if not all(map(math.isfinite, numbers)) or abs(total) < 1e-9:
        raise ValueError(f"weights or widths {text!r}: expected finite numbers with a sum other than 0.")
    return tuple(number / total for number in numbers)


def check_equal(sources: Sequence[Mapping[str, Tensor]], names: Sequence[str]) -> None:
    """Check that sources have equal keys and shapes.

    Args:
        sources: tensors by key.
        names: what messages call the sources.

    Raises:
        ValueError: listing every key and shape in which a source differs from the first.
    """
    problems = []
    first = sources[0]
    for source, name in zip(sources[1:], names[1:], strict=True):
        for key in sorted(first.keys() - source.keys()):
            problems.append(f"{key}: in {names[0]}, missing in {name}")
        for key in sorted(source.keys() - first.keys()):
            problems.append(f"{key}: in {name}, missing in {names[0]}")
        for key in sorted(first.keys() & source.keys()):
            if first[key].shape != source[key].shape:
                shapes = f"{tuple(first[key].shape)} in {names[0]}, {tuple(source[key].shape)} in {name}"
                problems.append(f"{key}: {shapes}")
    if problems:
        raise ValueError(f"The weights to average do not fit each other ({len(problems)}):\n" + problem_lines(problems))


@torch.no_grad()
def mix(
    sources: Sequence[Mapping[str, Tensor]], shares: Sequence[float], names: Sequence[str] | None = None
) -> dict[str, Tensor]:
    """The weighted sum of sources, added up in float64 one tensor at a time. Tensors that are not floats are taken from
    the last source.

    Args:
        sources: tensors by key, with equal keys and shapes.
        shares: the weight of each; they may add up to anything.
        names: what messages call the sources.

    Returns:
        {key: sum in float32 on the CPU}.

    Raises:
        ValueError: listing every mismatch (see `check_equal`), or every tensor that holds NaN or infinite values.
    """
    if not sources or len(sources) != len(shares):
        raise ValueError(f"Expected one share a source, got {len(shares)} for {len(sources)}.")
    names = names or [f"number {k + 1}" for k in range(len(sources))]
    check_equal(sources, names)
    averaged = {}
    not_finite = []
    for key, like in sources[0].items():
        if not like.is_floating_point():
            averaged[key] = sources[-1][key].clone()
            continue
        total = torch.zeros(like.shape, dtype=torch.float64)
        for source, share in zip(sources, shares, strict=True):
            if share:
                total.add_(source[key].to("cpu", torch.float64), alpha=share)
        if not _is_finite(total):
            for source, name in zip(sources, names, strict=True):
                if not _is_finite(source[key].float()):
                    not_finite.append(f"{key} of {name}")
        averaged[key] = total.to(torch.float32)
    if not_finite:
        raise ValueError(f"NaN or infinite values ({len(not_finite)}):\n" + problem_lines(not_finite))
    return averaged


def _is_finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())


def _check_steps(steps: Sequence[int]) -> None:
    if not steps:
        raise ValueError("There is no file to average.")
    if steps[0] < 1 or any(later <= earlier for earlier, later in itertools.pairwise(steps)):
        raise ValueError(
            f"The files' steps are {', '.join(map(str, steps))}: expected rising numbers from 1, one file a step."
        )
