"""Which pictures of a dataset stand out by their own losses, and why that may be."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence

from ..run.picture_losses import PictureLoss

FAR = 3.5  # robust standard deviations (Iglewicz and Hoaglin, How to Detect and Handle Outliers, 1993)
FEWEST = 5  # pictures that can tell what is usual
_OF_NORMAL = 0.6745  # the median deviation of a normal distribution, in standard deviations

FAR_ABOVE = "its loss is far above the others: a broken picture, a wrong caption, or unlike the rest"
FAR_BELOW = "its loss is far below the others: nearly empty, or shown much more often"
NO_HELP = "its caption helps far less than the others' do: it may be wrong"
NOT_FINITE = "its loss is not a number: a broken picture"


def outliers(losses: Mapping[str, PictureLoss]) -> dict[str, list[str]]:
    """What stands out of pictures, by name: {name: reasons}, in their order; none where nothing does.

    Losses are compared as logarithms, as they differ by factors. Fewer than `FEWEST` pictures are not compared.
    """
    logs = {name: math.log(loss.after) for name, loss in losses.items() if _is_usable(loss.after)}
    helps = {
        name: loss.caption_help
        for name, loss in losses.items()
        if loss.caption_help is not None and math.isfinite(loss.caption_help)
    }
    scores, help_scores = far_scores(logs), far_scores(helps)
    copies = _copies(losses.values())
    found: dict[str, list[str]] = {}
    for name, loss in losses.items():
        reasons = []
        if not math.isfinite(loss.after):
            reasons.append(NOT_FINITE)
        if scores.get(name, 0.0) > FAR:
            reasons.append(FAR_ABOVE)
        if scores.get(name, 0.0) < -FAR:
            reasons.append(FAR_BELOW)
        if help_scores.get(name, 0.0) < -FAR:
            reasons.append(NO_HELP)
        if others := [other for other in copies.get(loss.image.sha256, ()) if other != name]:
            reasons.append(f"the same file as {', '.join(others[:3])}")
        if reasons:
            found[name] = reasons
    return found


def _is_usable(loss: float) -> bool:
    return math.isfinite(loss) and loss > 0


def far_scores(values: Mapping[str, float]) -> dict[str, float]:
    """How far each value is from the median, in standard deviations that are estimated from the median deviation; none
    where there are too few values, or most are equal.
    """
    if len(values) < FEWEST:
        return {}
    middle = statistics.median(values.values())
    spread = statistics.median(abs(value - middle) for value in values.values())
    if not spread:
        return {}
    return {name: _OF_NORMAL * (value - middle) / spread for name, value in values.items()}


def _copies(losses: Iterable[PictureLoss]) -> dict[str, list[str]]:
    """The names of pictures with equal contents, by their hash."""
    names: dict[str, list[str]] = {}
    for loss in losses:
        if loss.image.sha256:
            names.setdefault(loss.image.sha256, []).append(loss.image.name)
    return names


def describe(losses: Mapping[str, PictureLoss], step: int, shown: int = 10) -> str:
    """The report: the means, the pictures with the highest losses, and what stands out."""
    found = outliers(losses)
    lines = [
        f"{len(losses)} pictures at step {step}, all at the same noise levels and with the same noise",
        *_mean_lines(losses.values()),
        "highest losses (before, after):",
    ]
    for name, loss in list(losses.items())[:shown]:
        lines.append(f"  {name}: {loss.before:.4g}, {loss.after:.4g}{' (held out)' if loss.is_held_out else ''}")
    if len(losses) < FEWEST:
        lines.append(f"fewer than {FEWEST} pictures cannot tell which stands out")
    elif not found:
        lines.append("no picture stands out")
    for name, reasons in found.items():
        lines.append(f"{name}: {'; '.join(reasons)}")
    return "\n".join(lines)


def _mean_lines(losses: Iterable[PictureLoss]) -> list[str]:
    lines, every = [], list(losses)
    for words, is_held_out in (("to train on", False), ("held out", True)):
        part: Sequence[PictureLoss] = [loss for loss in every if loss.is_held_out == is_held_out]
        if part:
            before, after = (
                statistics.fmean(values) for values in zip(*((x.before, x.after) for x in part), strict=True)
            )
            lines.append(f"mean of {len(part)} {words}: {before:.4g} before training, {after:.4g} after")
    return lines
