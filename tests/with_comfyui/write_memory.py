"""Writes docs/memory.md, and its first table into README.md: what Training Recipe chooses for cards of 8 to 24 GB.

    python -m graft_nodes.tests.with_comfyui.write_memory [COMFYUI]

With the folder of a ComfyUI checkout, the models are counted again from its classes. Nothing is computed on a device.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

from graft_nodes.training.recipes import choose
from graft_nodes.training.recipes.choose import Recipe, Wish
from graft_nodes.training.recipes.estimate import GB
from graft_nodes.training.recipes.facts import Device, ModelFacts

from . import full_sizes

ROOT = Path(__file__).parents[2]
DOCUMENT, README = ROOT / "docs" / "memory.md", ROOT / "README.md"
MARKS = ("<!-- memory table: tests/with_comfyui/write_memory.py -->", "<!-- end of the memory table -->")
SIZES = (8, 12, 16, 24)
COMMAND = "python -m graft_nodes.tests.with_comfyui.write_memory"
INTRODUCTION = f"""# Memory: what fits on 8, 12, 16 and 24 GB

What [Training Recipe](../web/docs/GraftRecipe.md) chooses for each model and card, with goal `subject`. **All of it
is computed: no GPU has run this yet.** `{COMMAND}` writes this page. For your own model and card, look at the report
of Training Recipe.

Each cell says how much memory a step takes, and what saves memory in it.
"""
LEGEND = """- **checkpointing**: gradient checkpointing in Optimizer Settings. Slower, with the same result.
- **layers in RAM**: offload to CPU memory `layers` in Optimizer Settings. The model's weights wait in main memory,
  which has to have room for them; there is no second copy. On the card are the block that computes and the next one,
  which is copied meanwhile. Slower still, with the same result.
- **adafactor**: the optimizer, in place of adamw. This one does change the result.

## How it is computed

- The models are ComfyUI's own classes at their published sizes. Their weights are in bf16 (fp16 takes the same), or
  in fp8 where it says so (weight_dtype of Load Diffusion Model).
- A step takes the weights, the LoRA and its gradients, the optimizer's state, the average (EMA) and the activations.
- A tenth of the card is left free. What other programs have on it is not counted.
- The text encoder and the VAE are not counted, because Dataset is done with them before training begins.
- The optimizer is adamw, because ComfyUI does not install bitsandbytes. If you do, the recipe takes adamw8bit, which
  needs less.
- GB are 2^30 bytes.
- These are estimates: a formula, whose activations are those that `plan` counts of these models. To plan a step of
  your own workflow, tensor by tensor, before it trains:

      python -m graft_nodes plan WORKFLOW.json --memory 12GB

  It says what the step takes by part, whether it fits, and what to change. Previews, validation and other programs are
  not counted there either: [planning.md](planning.md).

One figure has a measurement beside it: Qwen-Image in bf16 with checkpointing takes {qwen}, and musubi-tuner's
documentation says 42 GB.
"""
CLOSING = """## If it does not fit

Training Recipe saves in this order, and no more than it must: gradient checkpointing; batch size 1 with gradient
accumulation; the average in CPU memory; adafactor; layers in CPU memory; full-bf16; rank 8. Three more things help,
which it leaves to you:

- a lower resolution in Dataset;
- the model in fp8;
- Apply ToDo in front of Start Training, at 1024 pixels and above. It saves activations, and these tables do not count
  that.

If memory runs out all the same, Train Step stops with a list of what needs less, the cheapest first. The state after
the last complete step is kept.
"""
HEADINGS = (
    "LoRA for",
    "weights",
    "LoRA, optimizer, average",
    "activations",
    "a step",
    "without savings",
    "batch size",
    "optimizer",
    "gradient checkpointing",
    "offload to CPU memory",
)
DEVICE = Device("cuda", "a card", 0, bf16=True)


def chosen(facts: ModelFacts, size: int) -> Recipe:
    """The recipe for a card, as for someone who has not installed bitsandbytes."""
    with mock.patch.object(choose, "missing", return_value=["bitsandbytes is not installed"]):
        return choose.recipe(facts, Wish(memory=f"{size} GB"), DEVICE)


def _label(title: str, dtype: str) -> str:
    if dtype == full_sizes.FP8:
        return f"{title} in fp8"
    return title


def _models() -> list[tuple[str, ModelFacts]]:
    models = []
    for title, by_dtype in full_sizes.stored().items():
        models += [(_label(title, dtype), facts) for dtype, facts in by_dtype.items()]
    return models


def _savings(recipe: Recipe) -> list[str]:
    said = []
    optimizer = recipe.optimizer
    if optimizer.checkpointing:
        said.append("checkpointing")
    if optimizer.accumulation > 1:
        said.append("batch size 1")
    if recipe.ema.device == "host":
        said.append("average in RAM")
    if optimizer.optimizer != "adamw":
        said.append(optimizer.optimizer)
    if optimizer.offload == "layers":
        said.append("layers in RAM")
    if optimizer.precision != "bf16":
        said.append(optimizer.precision)
    return said


def _cell(facts: ModelFacts, size: int) -> str:
    recipe = chosen(facts, size)
    return ", ".join([_gb(recipe.estimate.total), *_savings(recipe)])


def _gb(size: float) -> str:
    return f"{size / GB:.1f} GB"


def summary() -> list[str]:
    """The lines of the first table."""
    headings = ["LoRA for", "pixels", *(f"{size} GB" for size in SIZES)]
    lines = [f"| {' | '.join(headings)} |", "|" + "---|" * len(headings)]
    for label, facts in _models():
        pixels = choose.published_for(facts.family).resolution.value
        cells = [_cell(facts, size) for size in SIZES]
        lines.append(f"| {label} | {pixels} | {' | '.join(cells)} |")
    return lines


def _details(size: int) -> list[str]:
    lines = [f"| {' | '.join(HEADINGS)} |", "|" + "---|" * len(HEADINGS)]
    for label, facts in _models():
        lines.append(f"| {' | '.join([label, *_figures(chosen(facts, size))])} |")
    return lines


def _figures(recipe: Recipe) -> list[str]:
    """What stands under HEADINGS, but for the model."""
    parts, settings = recipe.estimate.parts, recipe.optimizer
    trained = parts["LoRA and gradients"] + parts["optimizer"] + parts["average"]
    sizes = [parts["model"], trained, parts["activations"], recipe.estimate.total, recipe.unsaved.total]
    checkpointing = "off"
    if settings.checkpointing:
        checkpointing = "on"
    figures = [f"{size / GB:.2f}" for size in sizes]
    return [*figures, str(settings.batch_size), settings.optimizer, checkpointing, settings.offload]


def document() -> str:
    """The whole page."""
    qwen = chosen(full_sizes.stored()["Qwen-Image"][full_sizes.BF16], 48)
    lines = [INTRODUCTION, *summary(), "", LEGEND.format(qwen=f"{qwen.estimate.total / GB:.1f} GB")]
    for size in SIZES:
        lines += [f"## {size} GB", "", "Memory in GB, and the settings.", "", *_details(size), ""]
    return "\n".join([*lines, CLOSING])


def readme_with(text: str) -> str:
    """README with the first table between its marks."""
    head, _, rest = text.partition(MARKS[0])
    _, _, tail = rest.partition(MARKS[1])
    return "\n".join([f"{head}{MARKS[0]}", *summary(), f"{MARKS[1]}{tail}"])


def main(arguments: Sequence[str]) -> None:
    """Count the models again if a ComfyUI is named, and write page and table."""
    if arguments:
        sys.path.insert(0, str(Path(__file__).parent))
        from . import open_comfyui

        open_comfyui.open_checkout(arguments[0])
        full_sizes.write({title: full_sizes.counted(title) for title in full_sizes.FULL})
    DOCUMENT.write_text(document(), encoding="utf-8")
    README.write_text(readme_with(README.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
