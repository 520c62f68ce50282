"""Writes the table of planned peaks into docs/planning.md.

    python -m graft_nodes.tests.with_comfyui.write_plans [COMFYUI [TITLE …]]

With the folder of a ComfyUI checkout, the models (or those named) are planned again from its classes, which takes
minutes and no memory for weights.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from graft_nodes.training.recipes.estimate import GB

from . import planned_sizes
from .planned_sizes import CHECKPOINTED, PIXELS, PLAIN, TARGETS

DOCUMENT = Path(__file__).parents[2] / "docs" / "planning.md"
MARKS = ("<!-- planned peaks: tests/with_comfyui/write_plans.py -->", "<!-- end of the planned peaks -->")


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


def document_with(text: str) -> str:
    """The page with the table between its marks."""
    head, _, rest = text.partition(MARKS[0])
    _, _, tail = rest.partition(MARKS[1])
    return "\n".join([f"{head}{MARKS[0]}", *table(), f"{MARKS[1]}{tail}"])


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


def main(arguments: Sequence[str]) -> None:
    """Plan again if a ComfyUI is named, and write the table."""
    if arguments:
        sys.path.insert(0, str(Path(__file__).parent))
        from . import open_comfyui

        open_comfyui.open_checkout(arguments[0])
        plan_again(arguments[1:] or list(planned_sizes.TEXTS))
    DOCUMENT.write_text(document_with(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
