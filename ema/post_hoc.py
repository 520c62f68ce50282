"""Post-hoc EMA: averages of any relative width after training, by least squares from snapshots of a few widths.

(Karras 2024, arXiv 2312.02696, section 3.2.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .decay import gamma_of_width

TOLERANCE = 0.05  # largest error of a reconstruction, as a share of the profile's L2 norm
WIDEST = 0.28  # gamma 0 (a plain mean) has 12^-0.5 = 0.2887; beyond, no power function has that width
NARROWEST = 0.001


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
    """How snapshots combine into an average: one weight per snapshot, and the error.

    The error is a fraction (0 to 1) of the profile's L2 norm.
    """

    weights: tuple[float, ...]
    miss: float


class TooFew(ValueError):
    """There are not enough snapshots for a reconstruction."""


def width_of_gamma(gamma: float) -> float:
    """Relative width (sigma_rel) of the power-function average with exponent `gamma`: its standard deviation over its
    length.
    """
    return ((gamma + 1) / ((gamma + 2) ** 2 * (gamma + 3))) ** 0.5


def products(left: Sequence[Profile], right: Sequence[Profile]) -> Tensor:
    """Inner products (len(left), len(right)) of profiles, float64: the integral over all t of their product."""
    t_a, g_a = _columns(left)
    t_b, g_b = (row[None, :] for row in _columns(right))
    t_a, g_a = t_a[:, None], g_a[:, None]
    early, late = torch.minimum(t_a, t_b), torch.maximum(t_a, t_b)
    exponent = torch.where(t_a < t_b, g_b, g_a)  # exponent of the profile that ends later
    return (g_a + 1) * (g_b + 1) / (g_a + g_b + 1) * (early / late) ** exponent / late


class _System:
    """The normal equations for a list of snapshots, decomposed once because a range of widths solves it many times."""

    def __init__(self, snapshots: Sequence[Profile]) -> None:
        errors = [
            f"{snapshot} is there twice"
            for snapshot in sorted(set(snapshots), key=repr)
            if snapshots.count(snapshot) > 1
        ]
        errors += [f"{snapshot}: expected step 1 or later" for snapshot in snapshots if snapshot.step < 1]
        if errors:
            raise ValueError("Snapshots: " + "; ".join(errors) + ".")
        if not snapshots:
            raise TooFew("Snapshots: there is none to reconstruct an average from.")
        self.snapshots, self.gram = snapshots, products(snapshots, snapshots)
        self.scale = self.gram.diagonal().sqrt()  # unit diagonal: early snapshots have far larger norms
        eigenvalues, self.vectors = torch.linalg.eigh(self.gram / self.scale[:, None] / self.scale)
        # Dense snapshots make the system nearly singular: of the solutions equal in float64, take the one
        # with the smallest norm.
        self.inverse = torch.where(eigenvalues > 1e-13 * eigenvalues.max(), 1 / eigenvalues, 0.0)

    def fit(self, target: Profile) -> Fit:
        """Weights for `target`, and the error of the fit."""
        right_side = products(self.snapshots, [target])[:, 0]
        weights = self.vectors @ (self.inverse * (self.vectors.T @ (right_side / self.scale))) / self.scale
        squared_norm = float(products([target], [target]))
        squared_miss = squared_norm - 2 * float(weights @ right_side) + float(weights @ self.gram @ weights)
        return Fit(tuple(weights.tolist()), (max(0.0, squared_miss) / squared_norm) ** 0.5)


def fit(snapshots: Sequence[Profile], target: Profile) -> Fit:
    """The least-squares weights of `snapshots` for `target` (algorithm 3 of the paper), whatever the error."""
    return _System(snapshots).fit(target)


def reconstruction(
    snapshots: Sequence[Profile], width: float, step: int | None = None, tolerance: float = TOLERANCE
) -> Fit:
    """Weights of `snapshots` for the average of relative width `width` at `step` (default: the last snapshot's).

    Raises TooFew below two snapshots (unless one is exactly that average), and ValueError with the possible range if a
    width misses more than `tolerance` of its profile.
    """
    if not snapshots:
        raise TooFew(
            "There is no snapshot to reconstruct an average from: set snapshots on GraftEMA and train further."
        )
    last = max(snapshot.step for snapshot in snapshots)
    if step is None:
        step = last
    if Profile(step, width) in snapshots:
        return Fit(tuple(float(snapshot == Profile(step, width)) for snapshot in snapshots), 0.0)
    if len(snapshots) < 2:
        single = f"step {last}, width {snapshots[0].width:g}"
        raise TooFew(f"One snapshot ({single}) holds that average alone; two or more are needed for width {width:g}.")
    if step > last:
        raise ValueError(
            f"The last snapshot is of step {last}; an average at step {step} cannot be reconstructed from it."
        )
    if 0.0 < width <= WIDEST:
        result = fit(snapshots, Profile(step, width))
    else:
        result = None
    if result is None or result.miss > tolerance:
        if result is None:
            reason = f"expected above 0 and at most {WIDEST}"
        else:
            reason = f"{result.miss:.0%} of its profile is missed"
        raise ValueError(
            f"Width {width:g} at step {step} is beyond these {len(snapshots)} snapshots ({reason}); they express "
            f"{_range_text(snapshots, step, tolerance)}."
        )
    return result


def possible_widths(
    snapshots: Sequence[Profile], step: int, tolerance: float = TOLERANCE
) -> tuple[float, float] | None:
    """(narrowest, widest) relative width that the snapshots can reconstruct at `step`, with no gap in between; None if
    there is no such width.
    """

    system = _System(snapshots)

    def good(width: float) -> bool:
        return system.fit(Profile(step, width)).miss <= tolerance

    grid = [NARROWEST * (WIDEST / NARROWEST) ** (k / 60) for k in range(61)]
    grid = sorted({*grid, *(snapshot.width for snapshot in snapshots if NARROWEST <= snapshot.width <= WIDEST)})
    reachable = [good(width) for width in grid]
    start = max(
        (k for k, is_reachable in enumerate(reachable) if is_reachable),
        key=lambda k: (grid[k] in {snapshot.width for snapshot in snapshots}, -k),
        default=None,
    )
    if start is None:
        return None
    low = high = start
    while low > 0 and reachable[low - 1]:
        low -= 1
    while high < len(grid) - 1 and reachable[high + 1]:
        high += 1
    if low == 0:
        narrowest = grid[low]
    else:
        narrowest = _edge(good, grid[low], grid[low - 1])
    if high == len(grid) - 1:
        widest = grid[high]
    else:
        widest = _edge(good, grid[high], grid[high + 1])
    return narrowest, widest


def shape(profiles: Sequence[Profile], weights: Sequence[float], points: Tensor) -> Tensor:
    """How much each training step counts in an average: the density of the weighted sum of profiles at `points`."""
    total = torch.zeros_like(points, dtype=torch.float64)
    for profile, weight in zip(profiles, weights, strict=True):
        gamma, share = profile.gamma, points.double() / profile.step
        total += torch.where(share <= 1, weight * (gamma + 1) / profile.step * share.clamp(max=1.0) ** gamma, 0.0)
    return total


def _columns(profiles: Sequence[Profile]) -> tuple[Tensor, Tensor]:
    steps = torch.tensor([float(profile.step) for profile in profiles], dtype=torch.float64)
    return steps, torch.tensor([profile.gamma for profile in profiles], dtype=torch.float64)


def _edge(good: Callable[[float], bool], inside: float, outside: float) -> float:
    for _ in range(20):
        middle = (inside * outside) ** 0.5
        inside, outside = (middle, outside) if good(middle) else (inside, middle)
    return inside


def _range_text(snapshots: Sequence[Profile], step: int, tolerance: float) -> str:
    widths = possible_widths(snapshots, step, tolerance)
    if widths is None:
        return "no width there; take snapshots more often"
    return f"widths {widths[0]:.4f} to {widths[1]:.4f}"
