"""The text report of a recipe: every choice, why, and who published it."""

from __future__ import annotations

from collections.abc import Sequence

from .choose import Choice, Recipe
from .estimate import GB
from .facts import Device, ModelFacts, Pictures
from .fit import USABLE
from .published import PUBLISHED, published_for
from .wish import AUTO, Wish


def report(recipe: Recipe, facts: ModelFacts, wish: Wish, device: Device) -> str:
    """The report of the node."""
    parts = ", ".join(f"{name} {size / GB:.2f}" for name, size in recipe.estimate.parts.items())
    estimate = f"estimate: {recipe.estimate.total / GB:.2f} GB for a step ({parts})"
    if recipe.unsaved.total > recipe.estimate.total:
        estimate += f"; {recipe.unsaved.total / GB:.2f} GB without the savings below"
    lines = [
        f"recipe for {facts.title or 'an unknown model'}, {facts.parameters:,} parameters, predicts"
        f" {facts.prediction}; goal {wish.goal}, strength {wish.strength}, {wish.steps} steps",
        _family(facts),
        _memory(recipe, wish, device),
        _pictures(recipe, facts),
        estimate,
        f"how: {recipe.method}",
        *lines_of(recipe.choices),
        "",
        *(f"hint: {hint}" for hint in recipe.hints),
    ]
    lines.append(
        "To change a setting, connect its settings node to Start Training in place of this node's output, with the"
        " values above"
    )
    return "\n".join(lines)


def lines_of(choices: Sequence[Choice]) -> list[str]:
    """The choices by node, with their sources below."""
    sources = list(dict.fromkeys(choice.source for choice in choices))
    lines: list[str] = []
    node = ""
    for choice in choices:
        if choice.node != node:
            node = choice.node
            lines += ["", node]
        lines.append(_line(choice, sources.index(choice.source) + 1))
    return [*lines, "", "sources", *(f"[{number}] {source}" for number, source in enumerate(sources, 1))]


def _family(facts: ModelFacts) -> str:
    if facts.family in PUBLISHED:
        return f"family: {facts.title}, recognized by its layers; its published settings follow"
    known = ", ".join(PUBLISHED.names())
    if facts.family:
        return f"family: {facts.title}, for which Graft has no recipe ({known}): AI-Toolkit's general defaults follow"
    return f"family: not recognized, so AI-Toolkit's general defaults follow (recipes: {known})"


def _memory(recipe: Recipe, wish: Wish, device: Device) -> str:
    amount = f"{recipe.memory / GB:.1f} GB"
    if wish.memory != AUTO:
        text = f"memory: {amount}, as chosen; training runs on {device.name}"
    elif device.kind == "cpu":
        text = f"memory: {amount}, auto: training runs on the CPU, so it is what its own memory has free"
    else:
        text = f"memory: {amount}, auto: what {device.name} has free when ComfyUI unloads its models"
    return f"{text}; {USABLE:.0%} of it may be used"


def _pictures(recipe: Recipe, facts: ModelFacts) -> str:
    if not recipe.pictures:
        side = published_for(facts.family).resolution.value
        return f"images: {side} x {side} pixels, as published; connect a Dataset to count its own"
    sizes = [_size(kind) for kind in recipe.pictures]
    return f"images: of the dataset, the largest as much as {', '.join(sizes)}"


def _size(kind: Pictures) -> str:
    text = f"{kind.resolution} x {kind.resolution} pixels"
    if kind.batch_size:
        text += f" (in batches of their own, of {kind.batch_size})"
    return text


def _line(choice: Choice, source: int) -> str:
    value = choice.value
    if isinstance(value, float):
        value = f"{value:g}"
    return f"- {choice.label} {value}: {choice.reason} [{source}]"
