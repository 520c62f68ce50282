"""Writes docs/families.md from what the checks found with each ComfyUI.

For each checkout, the files test_train_families.py, test_lora_names.py, test_word_families.py and
test_tread_families.py of checks/ run with `-m column`, GRAFT_TEST_COMFYUI (the checkout) and GRAFT_FAMILIES (a file for
the results). Then:

    python -m graft_nodes.tests.with_comfyui.write_families build/0.3.64.json build/0.8.0.json build/0.33.0.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .tiny_families import CLIPS, TITLES

DOCUMENT = Path(__file__).parents[2] / "docs" / "families.md"
COLUMNS = {  # name of a column: (heading, what a tick says)
    "gradients": (
        "Gradients",
        "the gradients of a LoRA are the finite differences of ComfyUI's own sampling with the saved file",
    ),
    "checkpointing": ("Checkpointing", "gradient checkpointing gives the same bytes"),
    "file": ("Saved file", "ComfyUI's own loader reads all of a saved LoRA, with nothing left over"),
    "clips": ("Clips", "clips of three frames train, two in a batch, with the same bytes with checkpointing"),
    "targets": (
        "Target layers",
        "each preset chooses the layers that the model's trainers train, and all of them learn",
    ),
    "todo": ("Apply ToDo", "attention gets fewer keys; `no`: an error names the model and says why"),
    "tread": (
        "Apply TREAD",
        "the blocks compute the same as complete blocks in which the skipping tokens are masked and put back; `no`: an"
        " error says why",
    ),
    "words": (
        "Train Words",
        "the text encoders in which a word can be trained with the model's own tokenizers, by ComfyUI's names; `no`:"
        " an error says why",
    ),
    "recognized": ("Recognized", "a LoRA on the whole model is recognized as one for this family"),
}
YES, UNTRIED, FAILED = "✓", "untried", "✗"
NO_CLIPS = "none"  # of models of pictures and of sound
_NOT_THERE = "this ComfyUI has no "

Host = Mapping[str, Any]  # one file of results


def _cells(host: Host, family: str, column: str) -> list[Mapping[str, str]]:
    return host["families"].get(family, {}).get(column, [])


def _has(host: Host, family: str) -> bool:
    """Whether a ComfyUI has a family: not every check was skipped for want of it."""
    cells = [cell for column in COLUMNS for cell in _cells(host, family, column)]
    return any(cell["outcome"] != "skipped" or not cell["says"].startswith(_NOT_THERE) for cell in cells)


def _verdict(host: Host, family: str, column: str) -> str:
    cells = _cells(host, family, column)
    outcomes = {cell["outcome"] for cell in cells}
    if "failed" in outcomes:
        return FAILED
    if "passed" not in outcomes:
        return UNTRIED
    says = {cell["says"] for cell in cells if cell["outcome"] == "passed"}
    if says == {""}:
        return YES
    return " ".join(sorted(says))


def _cell(hosts: Sequence[Host], family: str, column: str) -> str:
    if column == "clips" and family not in CLIPS:
        return NO_CLIPS
    verdicts = {host["comfyui"]: _verdict(host, family, column) for host in hosts}
    if not verdicts:
        return UNTRIED
    if len(set(verdicts.values())) == 1:
        return next(iter(verdicts.values()))
    return ", ".join(f"{verdict} ({version})" for version, verdict in verdicts.items())


def _row(hosts: Sequence[Host], family: str) -> str:
    having = [host for host in hosts if _has(host, family)]
    versions = ", ".join(host["comfyui"] for host in having)
    if not having:
        versions = "none of them has it"
    cells = [_cell(having, family, column) for column in COLUMNS]
    return f"| {' | '.join([TITLES[family], versions, *cells])} |"


def _listed(words: Sequence[str]) -> str:
    """Words as a sentence lists them: "a, b and c"."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def document(hosts: Sequence[Host]) -> str:
    """The whole file, with the ComfyUIs in the order in which they are given."""
    headings = ["Model", "ComfyUI", *(heading for heading, _ in COLUMNS.values())]
    lines = [
        "# Model families",
        "",
        "What the tests found, with a tiny random model of ComfyUI's own class for each family, in ComfyUI "
        + _listed([host["comfyui"] for host in hosts])
        + ".",
        "`tests/with_comfyui/write_families.py` writes this page from the tests' results.",
        "",
        *(f"- **{heading}**: {meaning}." for heading, meaning in COLUMNS.values()),
        "",
        f"{FAILED}: the test fails. {UNTRIED}: no test tries it. {NO_CLIPS} in Clips: a model for pictures or sound."
        " A version that is not listed does not have the model.",
        "",
        f"| {' | '.join(headings)} |",
        f"|{'---|' * len(headings)}",
        *(_row(hosts, family) for family in TITLES),
    ]
    return "\n".join(lines) + "\n"


def main(paths: Sequence[str]) -> None:
    """Write the document from files of results."""
    hosts = [json.loads(Path(path).read_text(encoding="utf-8")) for path in paths]
    DOCUMENT.write_text(document(hosts), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
