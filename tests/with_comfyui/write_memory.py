"""Writes docs/memory.md, and two sentences of it into docs/quick_starts.md: what Training Recipe chooses for cards of
8 to 24 GB, and how long a step takes.

    python -m graft_nodes.tests.with_comfyui.write_memory [COMFYUI [TITLE …]]

With the folder of a ComfyUI checkout, the models are counted again from its classes, and so is a step of each TITLE
(of every one that was counted before, if none is named). Nothing is computed on a device.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from graft_nodes.training.recipes import choose
from graft_nodes.training.recipes.choose import Recipe
from graft_nodes.training.recipes.estimate import GB
from graft_nodes.training.recipes.facts import Device, ModelFacts
from graft_nodes.training.recipes.wish import Wish

from . import full_sizes, step_work

ROOT = Path(__file__).parents[2]
DOCUMENT, QUICK_STARTS = ROOT / "docs" / "memory.md", ROOT / "docs" / "quick_starts.md"
SDXL, FLUX = "SDXL on 12 GB", "Flux on 12 GB"  # what the marks of the quick starts are called
SIZES = (8, 12, 16, 24)
COMMAND = "python -m graft_nodes.tests.with_comfyui.write_memory"
INTRODUCTION = f"""# Memory: what fits in 8, 12, 16 and 24 GB

What [Training Recipe](../web/docs/GraftRecipe.md) chooses for each model and card, with goal `subject`. **All of it
is computed: none of it has run on a GPU yet.** `{COMMAND}` writes this page.
For your own model and card, look at the report of Training Recipe. To train all weights of SDXL or Flux.1 on such
cards, see [planning.md](planning.md#all-weights-on-8-to-24-gb-planned).

Each cell says how much memory a step takes, and what saves memory in it.
"""
LEGEND = """- **checkpointing**: gradient checkpointing in Optimizer Settings. Slower, with the same result.
- **layers in RAM**: offload to CPU memory `layers` in Optimizer Settings. The model's weights stay in main memory,
  which must have room for them. As many blocks as fit are on the card too. Of the others, the card holds only the
  block that computes and the next one, which is being copied. Slower still, with the same result.
- **adafactor**: the optimizer, instead of adamw. This one does change the result.

## How it is computed

- The models are ComfyUI's own classes at their published sizes. Their weights are in bf16, or in fp8 where a row says
  so (weight_dtype of Load Diffusion Model). Weights that ComfyUI loads in fp16, such as SDXL's, take the same: on a
  card they are converted once to the type of the computation, and the original values stay in CPU memory. Autograd
  keeps a copy of fp8 weights in that type, unless gradient checkpointing is on.
- With ComfyUI's dynamic VRAM (0.33 and later, on NVIDIA cards), training works on a complete copy of the model in CPU
  memory, which is read once and stays as long as the model does.
- A step takes memory for the weights, the LoRA and its gradients, the optimizer's state, the average (EMA) and the
  activations.
- A tenth of the card stays free. The memory of other programs is not counted.
- The text encoder and the VAE are not counted, because Dataset finishes with them before training begins.
- The optimizer is adamw, because ComfyUI does not install bitsandbytes. If you install it, the recipe uses adamw8bit,
  which needs less.
- GB are 2^30 bytes.
- These are estimates from a formula, with the activations that `plan` counts for these models. To plan a step of your
  own workflow, tensor by tensor, before it trains:

      python -m graft_nodes plan WORKFLOW.json --memory 12GB

  It tells you what each part of the step takes, whether it fits, and what to change. Validation and other programs
  are not counted there either: see [planning.md](planning.md).

One figure can be compared with a measurement: Qwen-Image in bf16 with checkpointing takes {qwen}, and musubi-tuner's
documentation says 42 GB.
"""
TIMES = """## How long a step takes

**Computed, not measured.** The operations of a step are counted on ComfyUI's own classes, at the pixels of the first
table and with the recipe's settings for the card: two for each multiply-add. We assume that a card reaches
{utilization:.0%} of its peak in bf16 products with float32 sums (tensor cores x 128 x clock):
{peaks}.
That share is a guess. Train Step's panel shows the real time after the first steps. If layers stay in RAM, the
weights of those that do not fit are copied to the card twice in a step, over PCIe 4.0 x16 at {copied:.0f} GB/s, while
it computes. The table shows whichever takes longer. Loading, encoding and previews are not included. Flux.1 was
counted with few blocks of its full width and scaled up to its 57; SDXL was counted whole.
"""
CLOSING = """## If it does not fit

Training Recipe saves memory in this order, and no more than it has to: gradient checkpointing; batch size 1 with
gradient accumulation; the average in CPU memory; adafactor; layers in CPU memory; full-bf16; rank 8. It leaves three
more things to you:

- a lower resolution in Dataset;
- the model in fp8;
- Apply ToDo before Start Training, at 1024 pixels and above. It saves activations, and these tables do not count
  that.

If memory still runs out, Train Step stops and lists what would save memory, the cheapest first. The state after the
last complete step is kept.
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
STEPS = 1500  # of the templates
UTILIZATION = 0.4
COPIED = 25e9  # bytes a second
COPIES = 2  # of a layer's weights in a step: forward, and backward with what checkpointing computes again


class Card(NamedTuple):
    """A card of NVIDIA's: its memory, its tensor cores, and its boost clock."""

    name: str
    gigabytes: int
    tensor_cores: int
    gigahertz: float

    @property
    def peak(self) -> float:
        """Operations a second, bf16 with float32 sums: 64 multiply-adds of each tensor core at each tick."""
        return self.tensor_cores * 128 * self.gigahertz * 1e9


CARDS = (Card("RTX 3060 12 GB", 12, 112, 1.777), Card("RTX 3090", 24, 328, 1.695), Card("RTX 4090", 24, 512, 2.52))


def chosen(facts: ModelFacts, size: int) -> Recipe:
    """The recipe for a card, as for someone who has not installed bitsandbytes."""
    with mock.patch.object(choose, "missing_package", return_value=["bitsandbytes is not installed"]):
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


class Pace(NamedTuple):
    """A step on a card: its operations, the bytes that are copied meanwhile, and the seconds of both."""

    operations: int
    copied: int
    seconds: float


def pace(title: str, facts: ModelFacts, card: Card) -> Pace:
    """How long a step takes with the recipe for a card; of one picture for each in the batch."""
    recipe = chosen(facts, card.gigabytes)
    pictures = recipe.optimizer.batch_size * recipe.optimizer.accumulation
    operations = step_work.stored()[title][step_work.how(recipe)] * pictures
    copied = 0
    if recipe.optimizer.offload == "layers":
        waiting = facts.weight_bytes - int(recipe.estimate.parts["model"]) + 2 * facts.largest_block
        copied = COPIES * waiting * recipe.optimizer.accumulation
    return Pace(operations, copied, max(operations / (card.peak * UTILIZATION), copied / COPIED))


def _times() -> Iterator[str]:
    """The lines of the table of times."""
    headings = ("LoRA for", "card", "what saves memory", "TFLOP a step", "GB copied", "a step", f"{STEPS:,} steps")
    yield f"| {' | '.join(headings)} |"
    yield "|" + "---|" * len(headings)
    for title, by_dtype in full_sizes.stored().items():
        if title not in step_work.stored():
            continue
        for dtype, facts in by_dtype.items():
            for card in CARDS:
                found, savings = pace(title, facts, card), _savings(chosen(facts, card.gigabytes))
                cells = [_label(title, dtype), card.name, ", ".join(savings) or "nothing"]
                cells += [f"{found.operations / 1e12:.0f}", f"{found.copied / GB:.1f}", _seconds(found), _whole(found)]
                yield f"| {' | '.join(cells)} |"


def _seconds(found: Pace) -> str:
    if found.seconds < 10:
        return f"{found.seconds:.1f} s"
    return f"{found.seconds:.0f} s"


def _whole(found: Pace) -> str:
    minutes = found.seconds * STEPS / 60
    if minutes < 90:
        return f"{minutes:.0f} minutes"
    return f"{minutes / 60:.1f} hours"


def _expected(title: str, facts: ModelFacts, card: Card) -> str:
    found = pace(title, facts, card)
    return f"{_seconds(found)} on an {card.name} ({_whole(found)} for the template's {STEPS:,} steps)"


def sentences() -> dict[str, str]:
    """What the quick starts say of time and memory, by mark."""
    sdxl = full_sizes.stored()["SDXL"][full_sizes.BF16]
    flux = full_sizes.stored()["Flux.1 dev"][full_sizes.FP8]
    small, _, large = CARDS
    fits = next(size for size in SIZES if chosen(flux, size).optimizer.offload != "layers")
    computed = "**Computed, not measured**: [memory.md](memory.md#how-long-a-step-takes) says how."
    return {
        SDXL: (
            f"Expect a step to take {_gb(chosen(sdxl, 12).estimate.total)} on the card, and"
            f" {_expected('SDXL', sdxl, small)} or {_expected('SDXL', sdxl, large)}. {computed}"
        ),
        FLUX: (
            f"Expect a step to take {_gb(chosen(flux, 12).estimate.total)} on the card, and"
            f" {_expected('Flux.1 dev', flux, small)}. From {fits} GB on the fp8 model stays on the card:"
            f" {_gb(chosen(flux, fits).estimate.total)}, and {_expected('Flux.1 dev', flux, large)}. {computed}"
        ),
    }


def document() -> str:
    """The whole page."""
    qwen = chosen(full_sizes.stored()["Qwen-Image"][full_sizes.BF16], 48)
    lines = [INTRODUCTION, *summary(), "", LEGEND.format(qwen=f"{qwen.estimate.total / GB:.1f} GB")]
    for size in SIZES:
        lines += [f"## {size} GB", "", "Memory in GB, and the settings.", "", *_details(size), ""]
    peaks = ", ".join(f"{card.name} {card.peak / 1e12:.0f} TFLOPS" for card in CARDS)
    lines += [TIMES.format(utilization=UTILIZATION, peaks=peaks, copied=COPIED / 1e9), *_times(), ""]
    return "\n".join([*lines, CLOSING])


def quick_starts_with(text: str) -> str:
    """The page of quick starts with the sentences between their marks."""
    for name, content in sentences().items():
        begin, end = f"<!-- {name}: tests/with_comfyui/write_memory.py -->", f"<!-- end of {name} -->"
        head, _, rest = text.partition(begin)
        _, _, tail = rest.partition(end)
        text = f"{head}{begin}\n{content}\n{end}{tail}"
    return text


def count_steps(titles: Sequence[str]) -> None:
    """Count a step of models, and keep each count as soon as it is made."""
    for title in titles:
        facts = full_sizes.stored()[title][full_sizes.BF16]
        pixels = choose.published_for(facts.family).resolution.value
        recipes = [chosen(facts, card.gigabytes) for card in CARDS]
        for how, recipe in {step_work.how(recipe): recipe for recipe in recipes}.items():
            work = step_work.stored()
            work.setdefault(title, {})[how] = step_work.counted(title, pixels, recipe)
            step_work.write(work)
            print(f"{title}, {how}: {work[title][how] / 1e12:.1f} TFLOP", flush=True)


def main(arguments: Sequence[str]) -> None:
    """Count models and steps again if a ComfyUI is named, and write page, table and sentences."""
    if arguments:
        sys.path.insert(0, str(Path(__file__).parent))
        from . import open_comfyui

        open_comfyui.open_checkout(arguments[0])
        full_sizes.write({title: full_sizes.counted(title) for title in full_sizes.FULL})
        count_steps(arguments[1:] or list(step_work.stored()))
    DOCUMENT.write_text(document(), encoding="utf-8")
    QUICK_STARTS.write_text(quick_starts_with(QUICK_STARTS.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
