"""How much device memory a training step takes: an estimate from the model's weights, its layers and the settings.

It is a formula, quick enough for Training Recipe. `run.memory_plan` counts the step itself, tensor by tensor; at the
published sizes of the families that were planned (`planned`) the activations are those of the plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .facts import ModelFacts, Pictures
from .family_shares import share_of

GB = 2**30
_TWICE = 2  # norms, attention and activation functions keep about as much again as the layers
_SIZES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}  # bytes of the types that layers compute in
_STATE_BYTES = {"adamw": 8.0, "adamw8bit": 2.0, "adafactor": 0.1}  # of an optimizer, for each trained number


@dataclass(frozen=True)
class Plan:
    """The settings that memory depends on, and what the device does.

    `number_bytes`: of a number that autograd keeps. `compute`: the type that layers compute in, by torch's name of it;
    None where that is the model's own. Where the device has memory of its own (not `shares_memory`), frozen weights are
    cast to it once. `kept_blocks`: how many blocks stay on the device with layers on the host, beside the two that come
    and go.
    """

    optimizer: str
    targets: str
    rank: int
    batch_size: int
    accumulation: int
    pictures: tuple[Pictures, ...]
    number_bytes: int
    checkpointing: bool = False
    average_on_host: bool = False
    layers_on_host: bool = False
    kept_blocks: int = 0
    bf16_weights: bool = False
    compute: str | None = "bfloat16"
    shares_memory: bool = False

    def largest(self, facts: ModelFacts) -> Pictures:
        """The batch that takes most: its resolution and batch size."""
        batches = [Pictures(kind.resolution, kind.batch_size or self.batch_size) for kind in self.pictures]
        return max(batches, key=lambda batch: facts.positions(batch.resolution) * batch.batch_size)


@dataclass(frozen=True)
class Estimate:
    """The parts of an estimate, in bytes, by what they are."""

    parts: Mapping[str, float]

    @property
    def total(self) -> float:
        """All of it, in bytes."""
        return sum(self.parts.values())


def trained_numbers(facts: ModelFacts, targets: str, rank: int) -> int:
    """How many numbers a LoRA of this rank has: rank x (rows + columns) of each layer."""
    return rank * facts.lora_widths[targets]


def estimate(facts: ModelFacts, plan: Plan) -> Estimate:
    """The memory of a step."""
    trained = trained_numbers(facts, plan.targets, plan.rank)
    each = 4
    if plan.bf16_weights:
        each = 2
    average = 4.0 * trained
    if plan.average_on_host:
        average = 0.0
    return Estimate(
        {
            "model": _weights(facts, plan),
            "activations": _activations(facts, plan),
            "LoRA and gradients": 2.0 * each * trained,
            "optimizer": _STATE_BYTES[plan.optimizer] * trained,
            "average": average,
        }
    )


def _weights(facts: ModelFacts, plan: Plan) -> float:
    """With layers in host memory: what is outside the blocks, those that stay, and two that come and go."""
    if plan.layers_on_host:
        return min(facts.weight_bytes, facts.outside + (2 + plan.kept_blocks) * facts.largest_block)
    bytes_then = facts.weight_bytes
    for name, count in facts.types.items():
        if plan.compute is not None and _is_cast_once(name, plan):
            bytes_then += count * (_SIZES[plan.compute] - _SIZES[name])
    return bytes_then


def _is_cast_once(name: str, plan: Plan) -> bool:
    """Whether weights of this type are held in that of the computation while training."""
    if plan.compute is None or plan.shares_memory or plan.layers_on_host:
        return False
    return name in _SIZES and name != plan.compute


def _activations(facts: ModelFacts, plan: Plan) -> float:
    """With checkpointing: the inputs of all blocks, and one block that runs again."""
    kept = _TWICE * facts.kept
    if plan.checkpointing:
        kept = facts.inputs + _TWICE * facts.largest_kept
    kept *= share_of(facts, plan.targets, plan.checkpointing) or 1.0
    batch = plan.largest(facts)
    return batch.batch_size * facts.positions(batch.resolution) * kept * plan.number_bytes + _copies(facts, plan)


def _copies(facts: ModelFacts, plan: Plan) -> float:
    """Weights of another type than the computation's that are not cast once (fp8, and all where memory is shared) are
    copied to it, and autograd keeps the copies. With checkpointing they are those of one block.
    """
    if plan.checkpointing or plan.compute is None:
        return 0.0
    copied = 0
    for name, count in facts.types.items():
        if name != plan.compute and not _is_cast_once(name, plan):
            copied += count
    return float(plan.number_bytes * copied)


def describe_method(facts: ModelFacts, plan: Plan) -> str:
    """How the estimate was made, in a sentence."""
    trained = trained_numbers(facts, plan.targets, plan.rank)
    batch = plan.largest(facts)
    positions = facts.positions(batch.resolution)
    kind = "tokens"
    if facts.is_unet:
        kind = "positions of the latent"
    activations = "what goes into and comes out of every layer, counted twice for norms and attention"
    if plan.checkpointing:
        activations = "the inputs of the checkpointed blocks, and the largest block counted twice"
    share = share_of(facts, plan.targets, plan.checkpointing)
    if share:
        activations += f", times {share:g}, as `plan` counts them for the family's published sizes"
    return (
        f"model: its weights as they are loaded, {facts.weight_bytes / GB:.2f} GB; LoRA: rank {plan.rank} x rows and"
        f" columns of its layers = {trained:,} numbers; activations: {activations}, for {positions:,} {kind}"
        f" ({batch.resolution} x {batch.resolution} pixels) and batch size {batch.batch_size}. Text encoder and VAE are"
        " left out: they are done before training"
    )
