"""The report on token downsampling: tokens before and after, blocks, estimated saving, as numbers and as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..models.token_layout import Grid
from .attention_override import ToDo
from .tokens import DepthReport, ToDoSettings, attention_saving, target_grid
from .transformers import TransformerToDo
from .unet import ToDoPatch


def report_rows(todo: ToDo, latent: Sequence[int] | None = None) -> list[DepthReport]:
    """The report's rows, one per depth of the model.

    They include grids if the latent's shape (..., [frames,] height, width) is given.
    """
    frames = int(latent[2]) if latent is not None and len(latent) == 5 else 1
    rows = []
    for depth, (patchable, foreign) in sorted(todo.depths.items()):
        factor, patched = 1.0, 0
        if depth <= len(todo.settings.factors):
            factor = todo.settings.factors[depth - 1]
        if factor != 1.0:
            patched = patchable
        before = after = None
        if latent is not None:
            before = todo.grid_at(depth, latent)
            after = target_grid(before, factor)
        width = todo.widths[depth] if isinstance(todo, ToDoPatch) else 1
        rows.append(DepthReport(depth, factor, before, after, patched, patchable - patched + foreign, frames, width))
    return rows


def report_data(todo: ToDo, latent: Sequence[int] | None = None, notes: Sequence[str] = ()) -> dict[str, Any]:
    """The report as JSON values, which the node sends to the editor as `output.graft_todo[0]`.

    - `version`: 1.
    - `depths`: one entry per depth that the model has, finest first, with these keys:
    - `depth` (from 1), `factor`, `width` (of queries and keys), `frames` (grids that a sequence has);
    - `cell`: the latent's sides divided by it, rounded up, are the token grid's;
    - `before` and `after`: token grids [height, width], null without a latent;
    - `own`: self-attention blocks that a factor downsamples; `patched` and `skipped`: those and others, at the factor
      given.
    - `latent`: [height, width] of the latent, null without one.
    - `saving`: fraction of the self-attention's products saved in a step that is downsampled, 0 to 1. It is 0 if no
      step is, and null without a latent.
    - `sampling_share`: the fraction of sampling that is downsampled, 0 to 1. `training_share`: that of training, null
      if it depends on the length of the run.
    - `method`, `phase`, `start_percent`, `end_percent`, `disable_after`: as given.
    - `transformer`: the class's name, null for a UNet.
    - `notes`: sentences. `text`: the whole report in words.
    """
    rows, settings = report_rows(todo, latent), todo.settings
    return {
        "version": 1,
        "depths": [
            {
                "depth": row.depth,
                "factor": row.factor,
                "cell": _cell(todo, row.depth),
                "before": row.before and list(row.before),
                "after": row.after and list(row.after),
                "frames": row.frames,
                "width": row.width,
                "own": todo.depths[row.depth][0],
                "patched": row.patched,
                "skipped": row.skipped,
            }
            for row in rows
        ],
        "latent": None if latent is None else list(latent[-2:]),
        "saving": None if latent is None else _saving(rows, settings),
        "sampling_share": settings.sampling_share,
        "training_share": settings.training_share,
        "method": settings.method,
        "phase": settings.phase,
        "start_percent": settings.start_percent,
        "end_percent": settings.end_percent,
        "disable_after": settings.disable_after,
        "transformer": todo.name if isinstance(todo, TransformerToDo) else None,
        "notes": list(notes),
        "text": report_text(todo, latent, notes),
    }


def _cell(todo: ToDo, depth: int) -> int:
    """How many of the latent's values one token of a depth covers, per side."""
    return todo.patch if isinstance(todo, TransformerToDo) else 2 ** todo.levels[depth]


def report_text(todo: ToDo, latent: Sequence[int] | None = None, notes: Sequence[str] = ()) -> str:
    """The report as text: for each depth the tokens before and after, blocks patched and left alone, and the estimated
    saving.
    """
    rows, settings = report_rows(todo, latent), todo.settings
    lines = [_row_text(row) for row in rows]
    if isinstance(todo, TransformerToDo):
        lines.append(f"{todo.name}: the image's keys and values are thinned, those of text and reference images stay")
    saving = None
    if latent is not None:
        saving = _saving(rows, settings)
        lines.append(_saving_text(todo, saving))
    lines.append(
        f"downsampling method {settings.method}, active during {settings.phase}, {100 * settings.start_percent:g}% to"
        f" {100 * settings.end_percent:g}%"
    )
    lines += [*_sampling_lines(settings, saving), *_training_lines(settings, saving)]
    return "\n".join([*lines, *notes])


def _saving(rows: Sequence[DepthReport], settings: ToDoSettings) -> float:
    """The fraction of the products that is saved in a step that is downsampled; 0 if no step is."""
    if settings.sampling_share == 0 and settings.training_share == 0:
        return 0.0
    return attention_saving(rows)


def _saving_text(todo: ToDo, saving: float) -> str:
    scope = where = ""
    if isinstance(todo, TransformerToDo):
        scope = " among the image's tokens"
    if saving and (todo.settings.sampling_share, todo.settings.training_share) != (1, 1):
        where = " in each step that it works in"
    return f"self-attention products saved{scope}: about {100 * saving:.0f}%{where}"


def _sampling_lines(settings: ToDoSettings, saving: float | None) -> list[str]:
    """What start and end do, where they are set."""
    start, end = settings.start_percent, settings.end_percent
    if (start, end) == (0, 1):
        return []
    if settings.phase == "training":
        return ["sampling is never downsampled (active during training): start and end change nothing"]
    if start == 1:
        return ["sampling is never downsampled: start is 1"]
    if start == end:
        return ["sampling is downsampled in one step at most: start and end are the same"]
    saved = _over_all(settings.sampling_share, saving)
    return [f"sampling is downsampled from {100 * start:g}% to {100 * end:g}%{saved}"]


def _training_lines(settings: ToDoSettings, saving: float | None) -> list[str]:
    """What disable_after does, where it is set."""
    if not settings.disable_after:
        return []
    if settings.phase == "sampling":
        return ["training is never downsampled (active during sampling): disable after changes nothing"]
    share = settings.training_share
    if share is None:
        return [f"off after {settings.disable_after:g} training steps"]
    return [f"off after {100 * share:g}% of the training run{_over_all(share, saving)}"]


def _over_all(share: float, saving: float | None) -> str:
    return "" if saving is None else f": about {100 * share * saving:.0f}% saved over all of it"


def _row_text(row: DepthReport) -> str:
    line = f"depth {row.depth}: factor {row.factor:g}, {row.patched} blocks patched, {row.skipped} left alone"
    if row.before is None or row.after is None:
        return line
    frames = f"{row.frames} frames of " if row.frames > 1 else ""
    before, after = (row.frames * grid[0] * grid[1] for grid in (row.before, row.after))
    return f"{line}, K/V tokens {before} ({frames}{_sides(row.before)}) -> {after} ({_sides(row.after)})"


def _sides(grid: Grid) -> str:
    return f"{grid[0]}x{grid[1]}"
