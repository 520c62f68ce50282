"""Averages files or snapshots into one LORA_MODEL: the share of each file, the average itself, and the report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...ema import post_hoc, weighted_sum
from ...ema.post_hoc import Profile
from ...patches.lora_files import average
from ..reports.curves import PALE, Curve
from ..trainable.install import make_lora
from ..trainable.settings import AdapterSettings
from .sources import Sources

ALGEBRAS = ("auto", *average.ALGEBRAS)
SWEEP = 10  # widths that profile best tries when none are given


@dataclass(frozen=True)
class MergedAverage:
    """The average as a LORA_MODEL, the curves of its profile over the steps, and the report's lines.

    `text_encoder` is how many tensors of text encoders the averaged checkpoints hold, which are left out.
    """

    lora: dict[str, Tensor]
    curves: tuple[Curve, ...]
    lines: tuple[str, ...]
    text_encoder: int = 0


def shares_of(sources: Sources, profile: str, width: float, weights: str) -> tuple[tuple[float, ...], list[str]]:
    """The share of each file in an average.

    Args:
        sources: the files.
        profile: the averaging profile.
        width: the relative width, for profiles that have one.
        weights: the text of weights, for that profile.

    Returns:
        (shares, lines for the report).

    Raises:
        ValueError: when the files cannot have such an average.
    """
    count = len(sources.files)
    if profile == "latest":
        return (*(0.0,) * (count - 1), 1.0), [f"latest: {sources.files[-1].name}"]
    if profile == "uniform":
        return weighted_sum.uniform_shares(count), [f"uniform: the mean of {count} files"]
    if profile == "weights":
        return weighted_sum.parse_shares(weights, count), ["weights as given, divided by their sum"]
    if sources.powers and profile == "width":
        fit = post_hoc.reconstruct(sources.profiles, width)
        last = max(profile_of_file.step for profile_of_file in sources.profiles)
        return fit.weights, [
            f"width {width:g} at step {last}, reconstructed from {count} snapshots by least squares: misses the asked"
            f" profile by {fit.miss:.2%} (float16 rounding alone {fit.noise:.2%}); the snapshots' weights add up to"
            f" {sum(fit.weights):.4f}"
        ]
    if sources.powers:
        raise ValueError(
            "averaging profile exponential is for a list of files; from snapshots of power-function averages use width"
        )
    steps = _steps(sources, profile)
    if profile == "exponential":
        line = f"exponential: a file's share falls with its age, over {width:g} of the {steps[-1]} steps"
        return weighted_sum.exponential_shares(steps, width), [line]
    return weighted_sum.power_shares(steps, width), [
        f"fitted to the power-function average of width {width:g} over {steps[-1]} steps"
    ]


def _steps(sources: Sources, profile: str) -> list[int]:
    missing = [file.name for file in sources.files if file.step is None]
    if missing:
        names = ", ".join(missing)
        raise ValueError(
            f"averaging profile {profile} needs the step of every file, and none is recorded in {names}; use uniform or"
            " weights"
        )
    return [file.step for file in sources.files if file.step is not None]


def merge_files(
    sources: Sources,
    profile: str,
    width: float,
    weights: str,
    algebra: str = "auto",
    rank: int = 0,
    base: Callable[[], Mapping[str, Tensor]] | None = None,
) -> MergedAverage:
    """Average files with the shares of a profile. A file whose share is 0 is not opened.

    Args:
        sources: the files.
        profile: the averaging profile.
        width: the relative width, for profiles that have one.
        weights: the text of weights, for that profile.
        algebra: factors, products, or auto, which takes factors for files of one run.
        rank: the largest rank of products; 0 keeps all.
        base: returns the model's own weights; checkpoints are saved as differences from them.
    """
    shares, lines = shares_of(sources, profile, width, weights)
    return merge_with_shares(sources, shares, lines, algebra, rank, base, width if profile == "width" else None)


def merge_with_shares(
    sources: Sources,
    shares: Sequence[float],
    lines: Sequence[str],
    algebra: str = "auto",
    rank: int = 0,
    base: Callable[[], Mapping[str, Tensor]] | None = None,
    width: float | None = None,
) -> MergedAverage:
    """Average files with these shares.

    Args:
        sources: the files.
        shares: of each.
        lines: how the report begins.
        algebra: factors, products, or auto, which takes factors for files of one run.
        rank: the largest rank of products; 0 keeps all.
        base: returns the model's own weights; checkpoints are saved as differences from them.
        width: is drawn beside the average.
    """
    used, used_shares = _files_in_use(sources, shares)
    files, names = [file.load() for file in used.files], [file.name for file in used.files]
    if used.files[0].kind == "checkpoint":
        lora, line = _merge_checkpoints(files, used_shares, names, base)
    else:
        lora, line = _merge_loras(used, files, used_shares, names, algebra, rank)
    lines = [*lines, line, *(f"{file.name}: {share:.4f}" for file, share in zip(sources.files, shares, strict=True))]
    text_encoder = sum(file.text_encoder for file in used.files)
    return MergedAverage(lora, curves(sources, shares, width), tuple(lines), text_encoder)


def _files_in_use(sources: Sources, shares: Sequence[float]) -> tuple[Sources, list[float]]:
    """The files that an average is made of, and their shares: those with a share other than 0."""
    files = [file for file, share in zip(sources.files, shares, strict=True) if share]
    return replace(sources, files=tuple(files)), [share for share in shares if share]


def _merge_checkpoints(
    files: Sequence[Mapping[str, Tensor]],
    shares: Sequence[float],
    names: Sequence[str],
    base: Callable[[], Mapping[str, Tensor]] | None,
) -> tuple[dict[str, Tensor], str]:
    if base is None:
        raise ValueError("an average of checkpoints needs the model that it is put on")
    model_weights = base()
    mismatched = [name for name, file in zip(names, files, strict=True) if not model_weights.keys() & file.keys()]
    if mismatched:
        raise ValueError(
            f"no weight of {', '.join(mismatched)} is one of the model's: expected checkpoints of it or its diffusion"
            " model"
        )
    weighted_sum.check_equal([model_weights, files[0]], ["the model", names[0]])
    averaged = weighted_sum.mix(files, shares, names)
    lora = make_lora(
        {name: averaged[name] for name in model_weights}, AdapterSettings("full", targets="all"), model_weights
    )
    return lora, "checkpoints: whole weights are averaged, and put on as the difference from the model's own"


def _merge_loras(
    sources: Sources,
    files: Sequence[Mapping[str, Tensor]],
    shares: Sequence[float],
    names: Sequence[str],
    algebra: str,
    rank: int,
) -> tuple[dict[str, Tensor], str]:
    runs = {file.run for file in sources.files}
    same_run = len(files) == 1 or (len(runs) == 1 and runs != {""})
    if sources.powers and (rank or algebra == "products"):
        raise ValueError(
            "snapshots of one run's averages are averaged by their factors, which keep their rank; set averaging method"
            " to auto or factors, and maximum rank to 0"
        )
    if algebra == "factors" and not same_run:
        labels = "; ".join(f"{file.name}: {file.run[:16] or 'no run recorded'}" for file in sources.files)
        raise ValueError(
            f"averaging method factors holds for files of one run only, and these are of different runs ({labels}); use"
            " products"
        )
    if algebra != "auto":
        method = algebra
    else:
        method = "factors" if same_run and not rank else "products"
    result = average.average(files, shares, names, method, rank)
    ranks = ", ".join(map(str, result.ranks)) or "none"
    if result.algebra == "factors" and len(files) == 1:
        return result.state, f"one file, taken as it is, rank {ranks}"
    if result.algebra == "factors":
        return result.state, f"factors are averaged (files of one run), rank {ranks}"
    if not rank:
        reduction = "exactly, by concatenation"
    else:
        reduction = f"cut to rank {rank} by SVD, which leaves out {result.lost:.2%} of the change's norm"
    return result.state, f"products are averaged {reduction}; rank {ranks}"


def curves(sources: Sources, shares: Sequence[float], width: float | None) -> tuple[Curve, ...]:
    """How much each training step (snapshots) or each file at its step counts in the average."""
    if sources.powers:
        profiles, last = sources.profiles, max(profile.step for profile in sources.profiles)
        midpoints = torch.arange(1, last + 1, dtype=torch.float64) - 0.5
        curve = Curve(post_hoc.step_density(profiles, shares, midpoints).tolist(), name="average")
        if width is None:
            return (curve,)
        return (
            Curve(post_hoc.step_density([Profile(last, width)], [1.0], midpoints).tolist(), PALE, f"width {width:g}"),
            curve,
        )
    places = [file.step for file in sources.files]
    steps = [step for step in places if step is not None]
    if len(steps) < len(places) or len(set(steps)) < len(steps) or min(steps) < 1:
        steps = list(range(1, len(places) + 1))
    values = [0.0] * max(steps)
    for step, share in zip(steps, shares, strict=True):
        values[step - 1] = share
    return (Curve(values, name="share of each file"),)


def widths_in(text: str) -> list[float]:
    """The widths that a user gives. Raises ValueError that says what is none."""
    expected = f"weights or widths {text!r}: with averaging profiles best and search expected widths such as '0.05 0.1'"
    try:
        widths = [float(number) for number in text.replace(",", " ").split()]
    except ValueError as error:
        raise ValueError(f"{expected}, or nothing ({error})") from error
    for width in widths:
        if not 0.0 < width <= post_hoc.WIDEST:
            raise ValueError(f"{expected}, above 0 and at most {post_hoc.WIDEST}; one is {width:g}")
    return widths


def widths_to_try(sources: Sources, text: str) -> list[float]:
    """The widths in `text`, or else about ten, evenly spaced on a log scale within what the snapshots allow."""
    if text.strip():
        return widths_in(text)
    possible = _possible_widths(sources)
    if not possible:
        raise post_hoc.TooFewSnapshots(
            f"{len(sources.files)} snapshots express no range of widths; take snapshots more often"
        )
    return post_hoc.spread_evenly(possible, SWEEP)


def reach(sources: Sources) -> str:
    """The widths that the snapshots can be made into, in words."""
    return f"these {len(sources.files)} snapshots express {post_hoc.ranges_text(_possible_widths(sources))}"


def _possible_widths(sources: Sources) -> list[tuple[float, float]]:
    if len(sources.files) < 2:
        return []
    return post_hoc.possible_widths(sources.profiles, max(profile.step for profile in sources.profiles))


@dataclass(frozen=True)
class Sweep:
    """Held-out losses of a run's last weights, of its EMA, and of averages of several widths."""

    plain: float
    running: float
    rows: tuple[tuple[float, float], ...]

    @property
    def best(self) -> float:
        """The width with the lowest loss. On a tie, the wider one."""
        return min(self.rows, key=lambda row: (row[1], -row[0]))[0]

    def lines(self) -> list[str]:
        """The losses as a table for the report."""
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
    """Measure the held-out loss of averages of several widths.

    Args:
        sources: a run's snapshots.
        widths: relative widths.
        score: returns the held-out loss of a LORA_MODEL (None: the last weights), or None without held-out images.
        running: the run's EMA as a LORA_MODEL.

    Raises:
        ValueError: without held-out images.
    """
    last_loss = score(None)
    if last_loss is None:
        raise ValueError(
            "averaging profile best needs held-out images: set validation split in Dataset, or choose a width"
        )
    reconstructions = [
        post_hoc.reconstruct(sources.profiles, width) for width in widths
    ]  # every width is checked before the first is scored
    loaded: dict[str, Mapping[str, Tensor]] = {}
    rows = []
    for width, reconstruction in zip(widths, reconstructions, strict=True):
        used, shares = _files_in_use(sources, reconstruction.weights)
        for file in used.files:
            if file.path not in loaded:
                loaded[file.path] = file.load()
        files = [loaded[file.path] for file in used.files]
        loss = score(average.average(files, shares, [file.name for file in used.files], "factors").state)
        assert loss is not None
        rows.append((width, loss))
    ema_loss = score(running)
    assert ema_loss is not None
    return Sweep(last_loss, ema_loss, tuple(rows))
