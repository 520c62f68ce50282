"""Averaged weights from files or snapshots as one LORA_MODEL: which share each file has, the average itself, and what
there is to say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...ema import post_hoc, weighted_sum
from ...ema.post_hoc import Profile
from ...patches.lora_files import average
from ..reports.curves import PALE, Curve
from ..trainable.install import as_lora
from ..trainable.settings import AdapterSettings
from .sources import Sources

PROFILES = ("latest", "width", "best", "uniform", "exponential", "weights")
ALGEBRAS = ("auto", *average.ALGEBRAS)
SWEEP = 10  # widths that profile best tries when none are given


@dataclass(frozen=True)
class Merged:
    """The average as a LORA_MODEL, the curves of its profile over the steps, and the report's lines."""

    lora: dict[str, Tensor]
    curves: tuple[Curve, ...]
    lines: tuple[str, ...]


def shares_of(sources: Sources, profile: str, width: float, weights: str) -> tuple[tuple[float, ...], list[str]]:
    """(the share of each file, lines for the report); raises ValueError when the files cannot have such an average."""
    count = len(sources.files)
    if profile == "latest":
        return (*(0.0,) * (count - 1), 1.0), [f"latest: {sources.files[-1].name}"]
    if profile == "uniform":
        return weighted_sum.uniform(count), [f"uniform: the mean of {count} files"]
    if profile == "weights":
        return weighted_sum.given(weights, count), ["weights as given, divided by their sum"]
    if sources.powers and profile == "width":
        found = post_hoc.reconstruction(sources.profiles, width)
        last = max(one.step for one in sources.profiles)
        return found.weights, [
            f"width {width:g} at step {last}, reconstructed from {count} snapshots by least squares: {found.miss:.2%}"
            f" of the profile is missed, the snapshots' weights add up to {sum(found.weights):.4f}"
        ]
    if sources.powers:
        raise ValueError(
            "profile exponential is for a list of files; from snapshots of power-function averages use width"
        )
    steps = _steps(sources, profile)
    if profile == "exponential":
        said = f"exponential: a file's share falls with its age, over {width:g} of the {steps[-1]} steps"
        return weighted_sum.exponential(steps, width), [said]
    return weighted_sum.fitted(steps, width), [
        f"fitted to the power-function average of width {width:g} over {steps[-1]} steps"
    ]


def _steps(sources: Sources, profile: str) -> list[int]:
    without = [file.name for file in sources.files if file.step is None]
    if without:
        listed = ", ".join(without)
        raise ValueError(
            f"profile {profile} needs the step of every file, and none is recorded in {listed}; use uniform or weights"
        )
    return [file.step for file in sources.files if file.step is not None]


def merged(
    sources: Sources,
    profile: str,
    width: float,
    weights: str,
    algebra: str = "auto",
    rank: int = 0,
    base: Callable[[], Mapping[str, Tensor]] | None = None,
) -> Merged:
    """The average of `sources` with the shares of `profile`; `base` gives the model's own weights, from which
    checkpoints differ.
    """
    shares, lines = shares_of(sources, profile, width, weights)
    files, names = [file.load() for file in sources.files], [file.name for file in sources.files]
    if sources.files[0].kind == "checkpoint":
        lora, said = _checkpoints(files, shares, names, base)
    else:
        lora, said = _loras(sources, files, shares, names, algebra, rank)
    lines += [said, *(f"{name}: {share:.4f}" for name, share in zip(names, shares, strict=True))]
    return Merged(lora, curves(sources, shares, width if profile == "width" else None), tuple(lines))


def _checkpoints(
    files: Sequence[Mapping[str, Tensor]],
    shares: Sequence[float],
    names: Sequence[str],
    base: Callable[[], Mapping[str, Tensor]] | None,
) -> tuple[dict[str, Tensor], str]:
    if base is None:
        raise ValueError("an average of checkpoints needs the model that it is put on")
    own = base()
    strangers = [name for name, file in zip(names, files, strict=True) if not own.keys() & file.keys()]
    if strangers:
        raise ValueError(
            f"no weight of {', '.join(strangers)} is one of the model's: expected checkpoints of it or its diffusion"
            " model"
        )
    weighted_sum.check_equal([own, files[0]], ["the model", names[0]])
    whole = weighted_sum.mixture(files, shares, names)
    lora = as_lora({name: whole[name] for name in own}, AdapterSettings("full", targets="all"), own)
    return lora, "checkpoints: whole weights are averaged, and put on as the difference from the model's own"


def _loras(
    sources: Sources,
    files: Sequence[Mapping[str, Tensor]],
    shares: Sequence[float],
    names: Sequence[str],
    algebra: str,
    rank: int,
) -> tuple[dict[str, Tensor], str]:
    runs = {file.run for file in sources.files}
    same = len(runs) == 1 and runs != {""}
    if sources.powers and algebra == "products":
        raise ValueError(
            "snapshots of one run's averages are averaged by their factors; set algebra to auto or factors"
        )
    if algebra == "factors" and not same and len(files) > 1:
        listed = "; ".join(f"{file.name}: {file.run[:16] or 'no run recorded'}" for file in sources.files)
        raise ValueError(
            f"algebra factors holds for files of one run only, and these are of different runs ({listed}); use products"
        )
    if algebra != "auto":
        chosen = algebra
    else:
        if same and not rank:
            chosen = "factors"
        else:
            chosen = "products"
    out = average.average(files, shares, names, chosen, rank)
    ranks = ", ".join(map(str, out.ranks)) or "none"
    if out.algebra == "factors":
        return out.state, f"factors are averaged (files of one run), rank {ranks}"
    if not rank:
        cut = "exactly, by concatenation"
    else:
        cut = f"cut to rank {rank} by SVD, which leaves out {out.lost:.2%} of the change's norm"
    return out.state, f"products are averaged {cut}; rank {ranks}"


def curves(sources: Sources, shares: Sequence[float], width: float | None) -> tuple[Curve, ...]:
    """How much of the average each training step makes (snapshots), or each file at its step."""
    if sources.powers:
        profiles, last = sources.profiles, max(one.step for one in sources.profiles)
        points = torch.arange(1, last + 1, dtype=torch.float64) - 0.5
        made = Curve(post_hoc.shape(profiles, shares, points).tolist(), name="average")
        if width is None:
            return (made,)
        return (Curve(post_hoc.shape([Profile(last, width)], [1.0], points).tolist(), PALE, f"width {width:g}"), made)
    places = [file.step for file in sources.files]
    at = [place for place in places if place is not None]
    if len(at) < len(places) or len(set(at)) < len(at):
        at = list(range(1, len(places) + 1))
    values = [0.0] * at[-1]
    for place, share in zip(at, shares, strict=True):
        values[place - 1] = share
    return (Curve(values, name="share of each file"),)


def widths_to_try(sources: Sources, text: str) -> list[float]:
    """The widths in `text`, or ten, evenly spaced in the logarithm, over all that the snapshots express."""
    if text.strip():
        try:
            return [float(word) for word in text.replace(",", " ").split()]
        except ValueError as error:
            raise ValueError(
                f"weights {text!r}: with profile best expected widths such as '0.05 0.1', or nothing ({error})"
            ) from error
    last = max((one.step for one in sources.profiles), default=0)
    if len(sources.files) > 1:
        able = post_hoc.possible_widths(sources.profiles, last)
    else:
        able = None
    if able is None:
        raise post_hoc.TooFew(f"{len(sources.files)} snapshots express no range of widths; take snapshots more often")
    low, high = able[0] * 1.001, able[1] * 0.999
    return [low * (high / low) ** (k / (SWEEP - 1)) for k in range(SWEEP)]


@dataclass(frozen=True)
class Sweep:
    """Held-out losses of a run's last weights, of its running average, and of averages by width."""

    plain: float
    running: float
    rows: tuple[tuple[float, float], ...]

    @property
    def best(self) -> float:
        """The width with the least loss; the wider one of two equals."""
        return min(self.rows, key=lambda row: (row[1], -row[0]))[0]

    def lines(self) -> list[str]:
        """As a table for the report."""
        rows = [
            f"width {width:.4f}: {loss:.6g}{'  <- best' if width == self.best else ''}" for width, loss in self.rows
        ]
        return ["held-out loss", f"last weights: {self.plain:.6g}", f"running average: {self.running:.6g}", *rows]


def sweep(
    sources: Sources,
    widths: Sequence[float],
    score: Callable[[Mapping[str, Tensor] | None], float | None],
    running: Mapping[str, Tensor],
) -> Sweep:
    """Score every width; `score` gives the held-out loss of a LORA_MODEL (None: the last weights), or None without
    held-out pictures.
    """
    plain = score(None)
    if plain is None:
        raise ValueError("profile best needs held-out images: set validation on GraftDataset, or choose a width")
    found = [
        post_hoc.reconstruction(sources.profiles, width) for width in widths
    ]  # every width is checked before the first is scored
    files, names = [file.load() for file in sources.files], [file.name for file in sources.files]
    rows = []
    for width, one in zip(widths, found, strict=True):
        loss = score(average.average(files, one.weights, names, "factors").state)
        assert loss is not None
        rows.append((width, loss))
    after = score(running)
    assert after is not None
    return Sweep(plain, after, tuple(rows))
