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

How Graft and ComfyUI's own LoRA loader read the files of each trainer.

For every row, the trainer's own module code makes a network with random numbers on a tiny model, and its own saver
writes the file. Each layer then gets unit inputs: with the trainer's network on the model, with the file in each of
Graft's patch modes, and with ComfyUI {comfyui}'s LoRA loader. diffusers' checkpoint conversions tell us which weight
is which.

- **Layers**: the number of layers that the trainer's network changes.
- **Merge, Bypass, Host**: the largest error of any weight or bias in this patch mode. All are at most
  {tolerance:.0e}; weights are about 0.1, and the files change them by as much.
- **ComfyUI's own loader**: what it does not read, and how many layers then differ by more than {tolerance:.0e}.

`python dev.py trainer-files` measures this and writes this page. Imports of a trainer that are not installed and that
these files do not use are replaced by stand-ins, as the sections say; its math never is.
"""


# (trainer, files, what their alpha is, what the product of the factors was multiplied by), read in the trainers' code
SCALES = (
    (
        "sd-scripts",
        "LoRA, LoRA-FA, DyLoRA; also with LoRA+ (rates alone), `conv_dim`, `network_reg_dims` and ranks by block",
        "as given, the rank for 0 or none",
        "alpha / rank of the layer",
    ),
    (
        "sd-scripts",
        "`split_qkv`: three or four pairs on one weight, saved as one of three or four times the rank",
        "that of one pair",
        "**alpha / rank of one pair**",
    ),
    ("sd-scripts", "resized, also with a rank for each layer (`Dynamic`)", "scale x new rank", "alpha / rank"),
    ("sd-scripts, musubi-tuner", "LoHa; LoKr with a product", "as given, the rank for 0 or none", "alpha / rank"),
    ("sd-scripts, musubi-tuner", "LoKr of two whole matrices", "the rank", "1"),
    ("sd-scripts", "OFT", "the constraint", "1"),
    ("musubi-tuner", "LoRA; q, k and v that its converters join", "as given; three times that", "alpha / rank"),
    (
        "LyCORIS",
        "LoRA, LoHa, LoKr with a product, GLoRA, DyLoRA, T-LoRA; `use_tucker` and `use_scalar` change nothing of it",
        "as given, the rank for 0 or none",
        "alpha / rank",
    ),
    ("LyCORIS", "LoRA, LoHa, LoKr with a product, `rs_lora`", "given x root of the rank", "alpha / rank"),
    (
        "LyCORIS",
        "the same before version 3.0, and GLoRA to this day, `rs_lora`",
        "as given",
        "**alpha / root of the rank**",
    ),
    ("LyCORIS", "LoKr of two whole matrices", "the rank", "1"),
    (
        "LyCORIS",
        "LoKr of two whole matrices, `rs_lora`",
        "rank x root of the rank; the rank before 3.0",
        "**root of the rank**",
    ),
    ("made from LyCORIS", "LoKr of two whole matrices whose alpha is the one given", "as given", "**alpha / rank**"),
    ("LyCORIS", "OFT, BOFT", "the constraint", "1"),
    ("LyCORIS", "full, norms, IA3", "none, or without effect", "1"),
    ("OneTrainer", "LoRA, DoRA, LoHa, LoKr with a product", "as given, 0 too", "alpha / rank"),
    ("OneTrainer", "LoKr of two whole matrices", "the rank", "1"),
    ("ai-toolkit", "LoRA with kohya's names, LoKr with a product", "as given, the rank for 0 or none", "alpha / rank"),
    ("ai-toolkit", "LoRA with PEFT's names", "none; it trains with the rank", "1"),
    ("ai-toolkit", "LoKr of two whole matrices", "the rank, 9999999999", "1"),
    (
        "PEFT, diffusers, SimpleTuner",
        "every kind; `rank_pattern` and `alpha_pattern` give a layer its own",
        "in `adapter_config.json` or in the header, else the rank",
        "alpha / rank; with `use_rslora` alpha / root of the rank",
    ),
    ("SimpleTuner", "LyCORIS' kinds, whose `rs_lora` it cannot switch on", "as LyCORIS", "as LyCORIS"),
)
SCALES_HEADING = ("Trainer", "File", "Alpha in the file", "Scale")
SCALES_INTRODUCTION = """### Scales

This is the scale by which each trainer multiplies the product of its factors, read from its code. If it is not alpha
divided by the rank in the file (in **bold**), Graft takes it from the metadata: `ss_network_module` says who trained
the file, and `ss_network_dim`, `ss_network_alpha` and `ss_network_args` say how. A file without metadata gets alpha
divided by its rank, or 1 without a rank, as ComfyUI's own loader does for all files.
"""


def scales() -> str:
    """The part of the page on scales."""
    rows = [SCALES_HEADING, ("---",) * len(SCALES_HEADING), *SCALES]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return f"{SCALES_INTRODUCTION}\n{table}\n"


def document(results: Sequence[Result]) -> str:
    """The whole page, with the trainers in the order in which they are given."""
    comfyui = " and ".join(sorted({result["comfyui"] for result in results}))
    lines = [INTRODUCTION.format(comfyui=comfyui, tolerance=TOLERANCE), scales()]
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
