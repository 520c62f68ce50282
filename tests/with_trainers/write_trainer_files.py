"""Writes docs/trainer_files.md from what was measured; with files of results, from those:

python -m graft_nodes.tests.with_trainers.write_trainer_files build/onetrainer.json …
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

DOCUMENT = Path(__file__).parents[2] / "docs" / "trainer_files.md"
MODES = ("merge", "bypass", "host")
TOLERANCE = 1e-5
HEADINGS = ("Layout", "File", "Layers", "Merge", "Bypass", "Host", "ComfyUI's own loader")

Result = Mapping[str, Any]  # of one trainer


def wrong(results: Sequence[Result]) -> list[str]:
    """Everything that is not the trainer's own forward, and every file that could not be measured."""
    lines = [line for result in results for line in result["broken"]]
    for result in results:
        for row in result["rows"]:
            if max(row["errors"].values()) > TOLERANCE:
                lines.append(f"{row['trainer']}, {row['layout']}, {row['kind']}: {row['errors']}")
    return lines


def _comfyui(row: Mapping[str, Any]) -> str:
    if row["failed"]:
        return "ends with an error"
    if not row["unread"] and not row["wrong"]:
        return "the same"
    lost = []
    if row["unread"]:
        lost.append(f"does not read {row['unread']} of {row['tensors']} tensors")
    if row["wrong"]:
        lost.append(f"{row['wrong']} layers differ")
    return "; ".join(lost)


def _row(row: Mapping[str, Any]) -> str:
    errors = [f"{row['errors'][mode]:.0e}" for mode in MODES]
    kind = row["kind"] + (f" ({row['remark']})" if row["remark"] else "")
    return f"| {' | '.join([row['layout'], kind, str(row['layers']), *errors, _comfyui(row)])} |"


def _title(result: Result) -> str:
    trainer = result["rows"][0]["trainer"]
    between = " " if "." in result["version"] else " at commit "
    return f"## {trainer}{between}{result['version']}"


def _section(result: Result) -> list[str]:
    lines = [_title(result), ""]
    if result["stood_in_for"]:
        lines += [f"Stood in for: {', '.join(result['stood_in_for'])}.", ""]
    heading = f"| {' | '.join(HEADINGS)} |"
    return [*lines, heading, "|---|---|---:|---:|---:|---:|---|", *map(_row, result["rows"]), ""]


INTRODUCTION = """# Files that trainers write

What Graft and ComfyUI's own LoRA loader make of the files of each trainer.

For every row the trainer's own module code makes a network with random numbers on a tiny model, and its own saver
writes the file. Each layer then answers unit inputs: with the trainer's network on the model, with the file in each of
Graft's patch modes, and with ComfyUI {comfyui}'s LoRA loader. diffusers' conversions of checkpoints tell which weight
is which.

- **Layers**: how many the trainer's network changes.
- **Merge, Bypass, Host**: the largest error of any weight or bias of the model in this patch mode. All are at most
  {tolerance:.0e}; weights are about 0.1, and the files change them by as much.
- **ComfyUI's own loader**: what it leaves unread, and how many layers then differ by more than {tolerance:.0e}.

`python dev.py trainer-files` measures it and writes this page. Imports of a trainer that are not installed and that
these files do not use are stood in for, as the sections say; its maths never is.
"""


def document(results: Sequence[Result]) -> str:
    """The whole page, with the trainers in the order in which they are given."""
    comfyui = " and ".join(sorted({result["comfyui"] for result in results}))
    lines = [INTRODUCTION.format(comfyui=comfyui, tolerance=TOLERANCE)]
    for result in results:
        lines += _section(result)
    return "\n".join(lines).rstrip() + "\n"


def main(paths: Sequence[str]) -> None:
    """Write the page from files of results."""
    results = [json.loads(Path(path).read_text(encoding="utf-8")) for path in paths]
    failed = wrong(results)
    if failed:
        sys.exit("\n".join(failed))
    DOCUMENT.write_text(document(results), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
