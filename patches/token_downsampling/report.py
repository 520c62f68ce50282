"""The report on token downsampling: tokens before and after, blocks, estimated saving, as numbers and as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..models.token_layout import Grid
from .attention_override import ToDo
from .tokens import DepthReport, attention_saving, target_grid
from .transformers import TransformerToDo
from .unet import ToDoPatch


def report_rows(todo: ToDo, latent: Sequence[int] | None = None) -> list[DepthReport]:
    """The report's rows, one per depth of the model.

    They include grids if the latent's shape (..., [frames,] height, width) is given.
    """
    frames = 1
    if latent is not None and len(latent) == 5:
        frames = int(latent[2])
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
        width = 1
        if isinstance(todo, ToDoPatch):
            width = todo.widths[depth]
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
    - `saving`: fraction of the self-attention's products that is saved, 0 to 1; null without a latent.
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
        "saving": None if latent is None else attention_saving(rows),
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
    if isinstance(todo, TransformerToDo):
        return todo.patch
    return 2 ** todo.levels[depth]


def report_text(todo: ToDo, latent: Sequence[int] | None = None, notes: Sequence[str] = ()) -> str:
    """The report as text: for each depth the tokens before and after, blocks patched and left alone, and the estimated
    saving.
    """
    rows, settings = report_rows(todo, latent), todo.settings
    lines = [_row_text(row) for row in rows]
    if isinstance(todo, TransformerToDo):
        lines.append(f"{todo.name}: the image's keys and values are thinned, those of text and reference images stay")
    if latent is not None:
        scope = ""
        if isinstance(todo, TransformerToDo):
            scope = " among the image's tokens"
        lines.append(f"self-attention products saved{scope}: about {100 * attention_saving(rows):.0f}%")
    lines.append(
        f"method {settings.method}, phase {settings.phase}, {100 * settings.start_percent:g}% to"
        f" {100 * settings.end_percent:g}%"
    )
    if settings.disable_after:
        if settings.disable_after < 1:
            end = f"{100 * settings.disable_after:g}% of the training run"
        else:
            end = f"{settings.disable_after:g} training steps"
        lines.append(f"off after {end}")
    return "\n".join([*lines, *notes])


def _row_text(row: DepthReport) -> str:
    line = f"depth {row.depth}: factor {row.factor:g}, {row.patched} blocks patched, {row.skipped} left alone"
    if row.before is None or row.after is None:
        return line
    if row.frames > 1:
        frames = f"{row.frames} frames of "
    else:
        frames = ""
    before, after = (row.frames * grid[0] * grid[1] for grid in (row.before, row.after))
    return f"{line}, K/V tokens {before} ({frames}{_sides(row.before)}) -> {after} ({_sides(row.after)})"


def _sides(grid: Grid) -> str:
    return f"{grid[0]}x{grid[1]}"
