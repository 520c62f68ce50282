"""Post-hoc EMA: averages of any relative width after training, by least squares from snapshots of a few widths (Karras
2024, arXiv 2312.02696, section 3.2).

A snapshot is an average with the profile p(t) = (g + 1) / T (t / T)^g over the steps 0 < t <= T. The weights x of the
snapshots p_i for an asked profile r have the least norm of r - sum x_i p_i, plus what their rounding adds:

    (A + ridge I) x = b    with A_ij = <p_i, p_j>, b_i = <p_i, r>
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..settings.declaration import raise_errors
from .decay import gamma_of_width

TOLERANCE = 0.05  # largest miss of a reconstruction
# Rms error of a number stored in float16, as a share of it: at most half a unit in the last place, evenly spread.
ROUNDING = 2**-11 / 3**0.5
WIDEST = 0.28  # gamma 0 (a plain mean) has 12^-0.5 = 0.2887; beyond, no power function has that width
NARROWEST = 0.001
GRID = 240  # steps between the widths that are looked at to find what snapshots can reconstruct


@dataclass(frozen=True)
class Profile:
    """The power-function average of relative width `width` (sigma_rel) after step `step`: p(t) = (g+1)/T (t/T)^g on
    0..T.
    """

    step: int
    width: float

    @property
    def gamma(self) -> float:
        """The exponent g."""
        return gamma_of_width(self.width)


@dataclass(frozen=True)
class Fit:
    """How snapshots combine into a profile: one weight per snapshot, and how far the result is from that average.

    `profile_miss` is what the combined profile misses, as a share of the asked one's L2 norm. `noise` is the most that
    the weights make of the snapshots' rounding, as a share of the averaged values. `miss` is both.
    """

    weights: tuple[float, ...]
    profile_miss: float
    noise: float = 0.0

    @property
    def miss(self) -> float:
        """The miss of the profile and the noise together."""
        return math.hypot(self.profile_miss, self.noise)


class TooFewSnapshots(ValueError):
    """There are not enough snapshots for a reconstruction."""


def width_of_gamma(gamma: float) -> float:
    """Relative width (sigma_rel) of the power-function average with exponent `gamma`: its standard deviation over its
    length. The inverse of `gamma_of_width`.
    """
    return ((gamma + 1) / ((gamma + 2) ** 2 * (gamma + 3))) ** 0.5


def inner_products(left: Sequence[Profile], right: Sequence[Profile]) -> Tensor:
    """Inner products (len(left), len(right)) of profiles, float64: the integral over all t of their product.

    With S <= T, the earlier and the later end, and g_T, the exponent of the profile that ends at T: <p, q> = (g_p + 1)
    (g_q + 1) / (g_p + g_q + 1) (S / T)^g_T / T.
    """
    t_a, g_a = _columns(left)
    t_b, g_b = (row[None, :] for row in _columns(right))
    t_a, g_a = t_a[:, None], g_a[:, None]
    early, late = torch.minimum(t_a, t_b), torch.maximum(t_a, t_b)
    exponent = torch.where(t_a < t_b, g_b, g_a)
    return (g_a + 1) * (g_b + 1) / (g_a + g_b + 1) * (early / late) ** exponent / late


def _check(snapshots: Sequence[Profile]) -> None:
    """Raise ValueError that names snapshots which are there twice or before the first step."""
    errors = [
        f"{snapshot} is there twice" for snapshot in sorted(set(snapshots), key=repr) if snapshots.count(snapshot) > 1
    ]
    errors += [f"{snapshot}: expected step 1 or later" for snapshot in snapshots if snapshot.step < 1]
    raise_errors("Snapshots", errors)


class _System:
    """The normal equations for a list of snapshots, decomposed once because a range of widths solves it many times.

    `rounding` is the rms error of a stored value, as a share of it. The weights have the least `miss`: without that
    share of the rounding, dense snapshots would be added up with huge weights of both signs.
    """

    def __init__(self, snapshots: Sequence[Profile], rounding: float) -> None:
        _check(snapshots)
        if not snapshots:
            raise TooFewSnapshots("Snapshots: there is none to reconstruct an average from.")
        self.snapshots, self.rounding = snapshots, rounding
        self.gram = inner_products(snapshots, snapshots)
        eigenvalues, self.vectors = torch.linalg.eigh(self.gram)
        self.eigenvalues = eigenvalues.clamp(min=0)
        self.float64_error = 1e-13 * float(self.eigenvalues.max())

    def fit(self, target: Profile) -> Fit:
        """Weights for `target`, and the error of the fit."""
        right_side = inner_products(self.snapshots, [target])[:, 0]
        squared_norm = float(inner_products([target], [target]))
        ridge = max(self.rounding**2 * squared_norm, self.float64_error)
        weights = self.vectors @ ((self.vectors.T @ right_side) / (self.eigenvalues + ridge))
        squared_miss = squared_norm - 2 * float(weights @ right_side) + float(weights @ self.gram @ weights)
        profile_miss = (max(0.0, squared_miss) / squared_norm) ** 0.5
        return Fit(tuple(weights.tolist()), profile_miss, self._noise(weights, squared_norm))

    def _noise(self, weights: Tensor, squared_norm: float) -> float:
        """The rms rounding of the sum, as a share of an average whose profile has that squared L2 norm.

        A snapshot's rounding is a share of its own size. Where the averaged values stay the same, every snapshot is as
        large as the average. Where they are noise around zero, each is as large as its profile's L2 norm, and early
        ones, which average fewer steps, are larger. Values between the two are rounded by no more than the worse.
        """
        constant, noise = weights.square().sum(), weights.square() @ self.gram.diagonal() / squared_norm
        return self.rounding * float(torch.maximum(constant, noise)) ** 0.5


def fit(snapshots: Sequence[Profile], target: Profile, rounding: float = 0.0) -> Fit:
    """The least-squares weights of snapshots for a profile (Karras 2024, arXiv 2312.02696, algorithm 3), however far
    they miss it.

    Args:
        snapshots: the profiles that were saved.
        target: the profile that is wanted.
        rounding: the rms error of a stored value, as a share of it; 0 for exact values.

    Raises:
        ValueError: for snapshots that are there twice or before the first step.
        TooFewSnapshots: for none.
    """
    return _System(snapshots, rounding).fit(target)


def reconstruct(
    snapshots: Sequence[Profile],
    width: float,
    step: int | None = None,
    tolerance: float = TOLERANCE,
    rounding: float = ROUNDING,
) -> Fit:
    """Weights of snapshots for the average of another width.

    Args:
        snapshots: the profiles that were saved.
        width: the relative width (sigma_rel) that is wanted.
        step: where the average ends; None is the last snapshot's step.
        tolerance: how far it may miss the profile, as a share of it.
        rounding: the rms error of a stored value, as a share of it.

    Raises:
        TooFewSnapshots: below two snapshots, unless one is exactly that average.
        ValueError: with the possible range, if the width misses more than `tolerance`.
    """
    if not snapshots:
        raise TooFewSnapshots(
            "There is no snapshot to reconstruct an average from: set snapshot every N steps in EMA Settings and train"
            " further."
        )
    last = max(snapshot.step for snapshot in snapshots)
    if step is None:
        step = last
    _check(snapshots)
    if Profile(step, width) in snapshots:
        return Fit(tuple(float(snapshot == Profile(step, width)) for snapshot in snapshots), 0.0)
    if len(snapshots) < 2:
        single = f"step {last}, width {snapshots[0].width:g}"
        raise TooFewSnapshots(
            f"One snapshot ({single}) holds that average alone; two or more are needed for width {width:g}."
        )
    if step > last:
        raise ValueError(
            f"The last snapshot is of step {last}; an average at step {step} cannot be reconstructed from it."
        )
    system = _System(snapshots, rounding)
    result = system.fit(Profile(step, width)) if 0.0 < width <= WIDEST else None
    if result is None or result.miss > tolerance:
        if result is None:
            reason = f"expected above 0 and at most {WIDEST}"
        else:
            reason = f"it would be missed by {result.miss:.0%}"
        raise ValueError(
            f"Width {width:g} at step {step} is beyond these {len(snapshots)} snapshots ({reason}); they express "
            f"{ranges_text(_find_ranges(system, step, tolerance))}."
        )
    return result


def possible_widths(
    snapshots: Sequence[Profile], step: int, tolerance: float = TOLERANCE, rounding: float = ROUNDING
) -> list[tuple[float, float]]:
    """The relative widths that snapshots can reconstruct.

    Args:
        snapshots: the profiles that were saved.
        step: where the averages end.
        tolerance: how far they may miss their profiles.
        rounding: the rms error of a stored value, as a share of it.

    Returns:
        Ranges (narrowest, widest), rising; between two of them is a gap.
    """
    return _find_ranges(_System(snapshots, rounding), step, tolerance)


def _find_ranges(system: _System, step: int, tolerance: float) -> list[tuple[float, float]]:
    def good(width: float) -> bool:
        return system.fit(Profile(step, width)).miss <= tolerance

    grid = {NARROWEST * (WIDEST / NARROWEST) ** (k / GRID) for k in range(GRID + 1)}
    grid |= {snapshot.width for snapshot in system.snapshots if NARROWEST <= snapshot.width <= WIDEST}
    widths = sorted(grid)
    ranges = []
    start = 0
    for is_good, run in itertools.groupby(widths, good):
        first, start = start, start + len(list(run))
        if not is_good:
            continue
        narrowest, widest = widths[first], widths[start - 1]
        if first > 0:
            narrowest = _find_edge(good, narrowest, widths[first - 1])
        if start < len(widths):
            widest = _find_edge(good, widest, widths[start])
        ranges.append((narrowest, widest))
    return ranges


def spread_evenly(ranges: Sequence[tuple[float, float]], count: int) -> list[float]:
    """About `count` widths within `ranges` (narrowest, widest), evenly on a log scale; at least one of each range."""
    total = sum(math.log(widest / narrowest) for narrowest, widest in ranges)
    widths = []
    for narrowest, widest in ranges:
        length = math.log(widest / narrowest)
        points = max(1, round(count * length / total)) if total > 0 else 1
        if points == 1:
            widths.append((narrowest * widest) ** 0.5)
            continue
        inside = 1 - 2e-3  # away from the edges, which are known to a few digits
        start = narrowest * (widest / narrowest) ** ((1 - inside) / 2)
        widths += [start * (widest / narrowest) ** (inside * k / (points - 1)) for k in range(points)]
    return widths


def ranges_text(ranges: Sequence[tuple[float, float]]) -> str:
    """Ranges of widths in words, with the gaps between them."""
    if not ranges:
        return "no width there; take snapshots more often"
    text = "widths " + " and ".join(f"{narrowest:.4f} to {widest:.4f}" for narrowest, widest in ranges)
    gaps = [f"{before[1]:.4f} and {after[0]:.4f}" for before, after in itertools.pairwise(ranges)]
    if gaps:
        text += f", none between {' or between '.join(gaps)}"
    return text


def step_density(profiles: Sequence[Profile], weights: Sequence[float], points: Tensor) -> Tensor:
    """How much each training step counts in an average: the density of the weighted sum of profiles.

    Args:
        profiles: the step and width of each.
        weights: how much of each.
        points: where it is computed (N,), in steps, float64.

    Returns:
        Densities (N,).
    """
    total = torch.zeros_like(points, dtype=torch.float64)
    for profile, weight in zip(profiles, weights, strict=True):
        gamma, share = profile.gamma, points.double() / profile.step
        total += torch.where(share <= 1, weight * (gamma + 1) / profile.step * share.clamp(max=1.0) ** gamma, 0.0)
    return total


def _columns(profiles: Sequence[Profile]) -> tuple[Tensor, Tensor]:
    steps = torch.tensor([float(profile.step) for profile in profiles], dtype=torch.float64)
    return steps, torch.tensor([profile.gamma for profile in profiles], dtype=torch.float64)


def _find_edge(good: Callable[[float], bool], inside: float, outside: float) -> float:
    for _ in range(20):
        middle = (inside * outside) ** 0.5
        inside, outside = (middle, outside) if good(middle) else (inside, middle)
    return inside
