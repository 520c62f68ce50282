"""Writes the tables of planned peaks into docs/planning.md.

    python -m graft_nodes.tests.with_comfyui.write_plans [COMFYUI [--full] [TITLE …]]

With the folder of a ComfyUI checkout, the models (or those named) are planned again from its classes, which takes
minutes and no memory for weights. After `--full` those are the models all of whose weights are trained.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from graft_nodes.training.memory.layer_ring import fewest_waiting, more_bytes
from graft_nodes.training.recipes.estimate import GB
from graft_nodes.training.recipes.fit import USABLE

from . import planned_sizes
from .planned_sizes import CHECKPOINTED, PIXELS, PLAIN, TARGETS

DOCUMENT = Path(__file__).parents[2] / "docs" / "planning.md"
MARKS = ("<!-- planned peaks: tests/with_comfyui/write_plans.py -->", "<!-- end of the planned peaks -->")
FULL_MARKS = (
    "<!-- planned full weights: tests/with_comfyui/write_plans.py -->",
    "<!-- end of the planned full weights -->",
)
CARDS = (8, 12, 16, 24)  # GB


def table() -> Iterator[str]:
    """The lines of the table."""
    headings = ["LoRA for", "gradient checkpointing", "weights", *(f"{pixels} pixels" for pixels in PIXELS)]
    yield f"| {' | '.join(headings)} |"
    yield "|" + "---|" * len(headings)
    for title, by_pixels in planned_sizes.stored().items():
        for how, shown in ((PLAIN, "off"), (CHECKPOINTED, "on")):
            parts = [by_pixels[str(pixels)][how] for pixels in PIXELS]
            sizes = [parts[0]["weights"], *(sum(part.values()) for part in parts)]
            yield f"| {' | '.join([title, shown, *(f'{size / GB:.2f} GB' for size in sizes)])} |"


def full_table() -> Iterator[str]:
    """The lines of the table of full weights."""
    cards = [f"{size} GB: blocks in CPU memory, a step" for size in CARDS]
    yield f"| all weights of | all on the card | all blocks in CPU memory | {' | '.join(cards)} |"
    yield "|" + "---|" * (len(CARDS) + 3)
    for title, plans in planned_sizes.stored_full().items():
        least, blocks = sum(plans["layers"].values()), plans["blocks"]
        cells = [f"{sum(plans['on the card'].values()) / GB:.2f} GB", f"{least / GB:.2f} GB"]
        for size in CARDS:
            waiting = fewest_waiting(blocks, int(USABLE * size * GB) - least)
            cells.append(f"{waiting} of {len(blocks)}, {(least + more_bytes(blocks, waiting)) / GB:.2f} GB")
        yield f"| {' | '.join([title, *cells])} |"


def document_with(text: str) -> str:
    """The page with the tables between their marks."""
    for (first, last), lines in ((MARKS, table()), (FULL_MARKS, full_table())):
        head, _, rest = text.partition(first)
        _, _, tail = rest.partition(last)
        text = "\n".join([f"{head}{first}", *lines, f"{last}{tail}"])
    return text


def wanted() -> Iterator[tuple[str, int, str]]:
    """What is planned of each model: its key in the file, pixels and target layers."""
    attention, both = TARGETS
    for pixels in PIXELS:
        yield str(pixels), pixels, attention
    yield f"{PIXELS[0]} {both}", PIXELS[0], both


def plan_again(titles: Sequence[str]) -> None:
    """Plan models, and keep each plan as soon as it is made."""
    plans = planned_sizes.stored() if planned_sizes.FILE.exists() else {}
    for title in titles:
        by_key = plans.setdefault(title, {})
        for key, pixels, targets in wanted():
            for how in (PLAIN, CHECKPOINTED):
                parts = planned_sizes.planned(title, pixels, how == CHECKPOINTED, targets)
                by_key.setdefault(key, {})[how] = parts
                planned_sizes.write(plans)
                print(f"{title}, {key} pixels, {how}: {sum(parts.values()) / GB:.2f} GB", flush=True)


def plan_full_again(titles: Sequence[str]) -> None:
    """Plan the training of all weights of models, and keep each plan as soon as it is made."""
    plans = planned_sizes.stored_full() if planned_sizes.FULL_FILE.exists() else {}
    for title in titles:
        plans[title] = planned_sizes.planned_full(title)
        planned_sizes.write_full(plans)
        print(f"{title}, all weights: {sum(plans[title]['layers'].values()) / GB:.2f} GB", flush=True)


def main(arguments: Sequence[str]) -> None:
    """Plan again if a ComfyUI is named, and write the table."""
    if arguments:
        sys.path.insert(0, str(Path(__file__).parent))
        from . import open_comfyui

        open_comfyui.open_checkout(arguments[0])
        if arguments[1:2] == ["--full"]:
            plan_full_again(arguments[2:] or planned_sizes.FULL_WEIGHTS)
        else:
            plan_again(arguments[1:] or list(planned_sizes.TEXTS))
    DOCUMENT.write_text(document_with(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
