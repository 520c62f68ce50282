"""Chooses the settings of a training: each with the reason and the source."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...ema.decay import EMASettings
from ..objective.settings import ObjectiveSettings, check_for
from ..optimizers.build import missing_package
from ..optimizers.settings import OptimizerSettings
from ..trainable.settings import AdapterSettings
from .estimate import GB, Estimate, Plan, describe_method, estimate
from .facts import Device, ModelFacts, Pictures
from .fit import USABLE, Fit, fit
from .published import GENERAL, Figure, PublishedRecipe, published_for
from .wish import AUTO, STRENGTHS, Wish

OWN = "Graft's own rule"
_AVERAGED_STEPS = 20  # of AI-Toolkit's 2000: its decay 0.99 reaches back 100 steps, 1 / 20 of the run
_TOOLKIT_EMA = "AI-Toolkit, config/examples/train_lora_flux_24gb.yaml"
_KOHYA_ANY = "kohya's sd-scripts, docs/train_network.md"
_KOHYA_PRECISION = "kohya's sd-scripts, docs/sdxl_train_network.md (mixed_precision)"
_KOHYA_MEMORY = "kohya's sd-scripts, docs/flux_train_network.md"


@dataclass(frozen=True)
class Goal:
    """What a goal means for the settings."""

    targets: str
    why_targets: str
    targets_source: str
    rank_factor: int
    conditioning_dropout: float
    why_dropout: str
    dropout_source: str
    advice: str


_BOTH = "OneTrainer's attn-mlp presets; kohya's LoRA trains both too"
GOALS = {
    "subject": Goal(
        targets="attention",
        why_targets="a person or thing is learned where words meet the picture, and fewer layers overfit less",
        targets_source="diffusers' train_dreambooth_lora.py trains the attention projections",
        rank_factor=1,
        conditioning_dropout=0.05,
        why_dropout="CFG needs some training without words",
        dropout_source="AI-Toolkit, caption_dropout_rate of its examples",
        advice=(
            "for a subject, connect regularization images of its class to Dataset and set prior preservation to"
            " output-preservation in Objective Settings, so that the model does not forget the class"
        ),
    ),
    "style": Goal(
        targets="attention+ff",
        why_targets="a style is in how things are drawn, so the feed-forward layers learn too",
        targets_source=_BOTH,
        rank_factor=1,
        conditioning_dropout=0.1,
        why_dropout="a style should come without its words as well",
        dropout_source=OWN,
        advice="for a style, caption what is in the pictures and give the style itself one word, or none",
    ),
    "concept": Goal(
        targets="attention+ff",
        why_targets="a new concept needs the feed-forward layers too",
        targets_source=_BOTH,
        rank_factor=2,
        conditioning_dropout=0.05,
        why_dropout="CFG needs some training without words",
        dropout_source="AI-Toolkit, caption_dropout_rate of its examples",
        advice="for a concept, use many different pictures and captions that tell it from what else is in them",
    ),
}


@dataclass(frozen=True)
class Choice:
    """One setting: its node, its label in the editor, its value, why, and who says so."""

    node: str
    label: str
    value: object
    reason: str
    source: str


@dataclass(frozen=True)
class Recipe:
    """The settings, and what the report says of them."""

    adapter: AdapterSettings
    optimizer: OptimizerSettings
    objective: ObjectiveSettings
    ema: EMASettings
    choices: tuple[Choice, ...]
    estimate: Estimate
    unsaved: Estimate
    method: str
    memory: int
    pictures: tuple[Pictures, ...]
    hints: tuple[str, ...]


def _compute(device: Device) -> str | None:
    """The type that a recipe's layers compute in on a device, by torch's name; None for the model's own."""
    if device.kind == "cpu":
        return "float32"
    if device.bf16:
        return "bfloat16"
    if device.kind == "cuda":
        return "float16"
    return None


def memory_of(wish: Wish, device: Device) -> int:
    """The memory to fit into, in bytes."""
    if wish.memory == AUTO:
        return device.free
    return int(wish.memory.split()[0]) * GB


def recipe(facts: ModelFacts, wish: Wish, device: Device, pictures: Sequence[Pictures] = ()) -> Recipe:
    """The settings for a model, a wish, a device and the images of a dataset (without: of the published resolution).
    ValueError with what to choose instead if memory is too small.
    """
    published, goal = published_for(facts.family), GOALS[wish.goal]
    memory = memory_of(wish, device)
    optimizer, why_optimizer, optimizer_source = usable_optimizer(published.optimizer, device)
    wanted = Plan(
        optimizer=optimizer,
        targets=_targets(facts, goal),
        rank=published.rank.value * goal.rank_factor,
        batch_size=published.batch_size.value,
        accumulation=1,
        pictures=tuple(pictures) or (Pictures(published.resolution.value),),
        number_bytes=4 if device.kind == "cpu" else 2,
        compute=_compute(device),
        shares_memory=device.shares_memory,
    )
    fitted = fit(facts, wanted, device, memory)
    writer = _Writer(facts, wish, device, published, goal, fitted)
    adapter = writer.adapter()
    moved = writer.optimizer(why_optimizer, optimizer_source)
    objective, ema = writer.objective(), writer.ema()
    check_for(objective, facts.prediction)
    return Recipe(
        adapter,
        moved,
        objective,
        ema,
        tuple(writer.choices),
        fitted.estimate,
        estimate(facts, wanted),
        describe_method(facts, fitted.plan),
        memory,
        tuple(pictures),
        tuple(_hints(facts, published, goal, fitted, memory)),
    )


def _targets(facts: ModelFacts, goal: Goal) -> str:
    if goal.targets in facts.lora_widths:
        return goal.targets
    return "all"


def usable_optimizer(published: Figure[str], device: Device) -> tuple[str, str, str]:
    """The published optimizer, or adamw where it cannot run; why; source."""
    name, source = published.value, published.source
    if name != "adamw8bit":
        return name, "as published", source
    if device.kind != "cuda":
        return (
            "adamw",
            f"adamw8bit computes on CUDA, and this device is {device.kind}: adamw without the 8 bits",
            source,
        )
    if missing_package(name):
        return "adamw", "adamw8bit is published, and its package bitsandbytes is not installed", source
    return name, "AdamW with a quarter of its optimizer memory", source


_Note = Callable[[str, object, str, str], None]  # label, value, reason, source


class _Writer:
    """Makes the settings objects and writes down every choice."""

    def __init__(
        self,
        facts: ModelFacts,
        wish: Wish,
        device: Device,
        published: PublishedRecipe,
        goal: Goal,
        fitted: Fit,
    ) -> None:
        self.facts, self.wish, self.device, self.published = facts, wish, device, published
        self.goal, self.plan, self.savings = goal, fitted.plan, fitted.savings
        self.choices: list[Choice] = []

    def _noter(self, node: str) -> _Note:
        def note(label: str, value: object, reason: str, source: str) -> None:
            self.choices.append(Choice(node, label, value, reason, source))

        return note

    def adapter(self) -> AdapterSettings:
        """What is trained."""
        note, goal, published, plan = self._noter("Adapter Settings"), self.goal, self.published, self.plan
        note("adapter type", "lora", "the usual kind, which every program loads", "all of these trainers' examples")
        reason, source = "as published", published.rank.source
        if goal.rank_factor > 1:
            reason = f"{published.rank.value} is published, times {goal.rank_factor} for a {self.wish.goal}: {OWN}"
        if "rank (dim)" in self.savings:
            reason, source = "lowered to fit into memory", "kohya's sd-scripts, docs/train_SDXL-en.md: 4 to 8 for 8 GB"
        note("rank (dim)", plan.rank, reason, source)
        scale = published.alpha.value / published.rank.value
        alpha = plan.rank * scale
        note("alpha", alpha, f"the published scale alpha / rank of {scale:g}", published.alpha.source)
        if plan.targets == goal.targets:
            note("target layers", plan.targets, goal.why_targets, goal.targets_source)
        else:
            note("target layers", plan.targets, "this model has no layers that Graft knows as attention", OWN)
        note("train text encoder", "off", "the diffusion model alone learns it", _text_encoder_source(self.facts))
        return AdapterSettings(rank=plan.rank, alpha=alpha, targets=plan.targets)

    def optimizer(self, why: str, source: str) -> OptimizerSettings:
        """How the weights move."""
        note, published, plan, wish = self._noter("Optimizer Settings"), self.published, self.plan, self.wish
        options = ""
        if plan.optimizer == "adafactor":
            why, source, options = (
                "almost no optimizer memory, to fit into memory",
                _KOHYA_MEMORY,
                "scale_parameter = false",
            )
        note("optimizer", plan.optimizer, why, source)
        if options:
            note("optimizer options", options, "so that Adafactor takes AdamW's learning rate", _KOHYA_MEMORY)
        factor = STRENGTHS[wish.strength]
        rate = published.learning_rate.value * factor
        reason = f"{published.learning_rate.value:g} is published, times {factor:g} for strength {wish.strength}"
        note("learning rate", rate, reason, published.learning_rate.source)
        note(
            "learning rate schedule", "constant", "as published; with the average no falling rate is needed", _KOHYA_ANY
        )
        note("total steps (schedule)", wish.steps, "the steps of this node: set the same in Train Step", "your choice")
        self._batch(note)
        note(
            "maximum gradient norm",
            1.0,
            "one odd picture cannot throw the weights off",
            "kohya's and AI-Toolkit's max_grad_norm",
        )
        note("weight decay", published.weight_decay.value, "as published", published.weight_decay.source)
        precision = self._precision(note)
        self._memory(note)
        return OptimizerSettings(
            optimizer=plan.optimizer,
            learning_rate=rate,
            total_steps=wish.steps,
            batch_size=plan.batch_size,
            accumulation=plan.accumulation,
            clip_norm=1.0,
            weight_decay=published.weight_decay.value,
            precision=precision,
            checkpointing=plan.checkpointing,
            offload="layers" if plan.layers_on_host else "none",
            options=options,
        )

    def _batch(self, note: _Note) -> None:
        size, source = self.published.batch_size.value, self.published.batch_size.source
        if "batch size" in self.savings:
            note("batch size", 1, f"{size} is published, and takes too much memory", OWN)
            reason = f"{self.plan.accumulation} batches of 1 make the same step as the published batch of {size}"
            note("gradient accumulation", self.plan.accumulation, reason, OWN)
            return
        note("batch size", size, "as published", source)
        note("gradient accumulation", 1, "as published", source)

    def _precision(self, note: _Note) -> str:
        label, source = "training precision", _KOHYA_PRECISION
        if self.plan.bf16_weights:
            note(
                label,
                "full-bf16",
                "LoRA and gradients take half, to fit into memory",
                "kohya's sd-scripts, docs/train_SDXL-en.md (full_bf16)",
            )
            return "full-bf16"
        if self.device.bf16:
            note(label, "bf16", "this device has it; the LoRA itself stays in float32", source)
            return "bf16"
        if self.device.kind == "cuda":
            note(label, "fp16", "this device has no bf16; the LoRA itself stays in float32", source)
            return "fp16"
        note(label, "auto", f"on {self.device.kind} that is the model's own", OWN)
        return "auto"

    def _memory(self, note: _Note) -> None:
        plan = self.plan
        if plan.checkpointing:
            note("gradient checkpointing", "on", "without it the step does not fit; slower, same result", _KOHYA_MEMORY)
        else:
            note("gradient checkpointing", "off", "the step fits without it, and is faster so", "the estimate above")
        if plan.layers_on_host:
            reason = (
                "blocks of the model wait in CPU memory until they compute, as few as fit beside the step; slower, same"
                " result"
            )
            note("offload to CPU memory", "layers", reason, f"{_KOHYA_MEMORY} (blocks_to_swap)")
        else:
            note("offload to CPU memory", "none", "the step fits without it", "the estimate above")

    def objective(self) -> ObjectiveSettings:
        """What training minimizes."""
        note, goal = self._noter("Objective Settings"), self.goal
        note("loss function", "mse", "as published", "the default of all of these trainers")
        values: dict[str, object] = {}
        if self.facts.prediction == "flow":
            values = self._write_flow(note)
        else:
            values = self._write_noise(note)
        note("conditioning dropout", goal.conditioning_dropout, goal.why_dropout, goal.dropout_source)
        return ObjectiveSettings(conditioning_dropout=goal.conditioning_dropout, **values)  # type: ignore[arg-type]

    def _write_flow(self, note: _Note) -> dict[str, object]:
        timesteps, source = self.published.timesteps.value, self.published.timesteps.source
        note("loss weighting", "none", "flow models have no signal-to-noise ratio to weigh by", "min-SNR's definition")
        note("timestep sampling", timesteps.sampling, "which noise levels are trained most", source)
        if timesteps.sampling == "shift":
            note("timestep shift", timesteps.shift, "as published (discrete_flow_shift)", source)
        return {"timesteps": timesteps.sampling, "shift": timesteps.shift}

    def _write_noise(self, note: _Note) -> dict[str, object]:
        gamma, offset = self.published.min_snr, self.published.noise_offset
        note("loss weighting", "min-snr", "steadier, and learns faster", gamma.source)
        note("min-SNR gamma", gamma.value, "the usual cap", gamma.source)
        note("timestep sampling", "uniform", "every noise level alike", "the default of kohya and OneTrainer")
        values: dict[str, object] = {"weighting": "min-snr", "gamma": gamma.value}
        if self.facts.prediction == "eps" and offset.value:
            note("noise offset", offset.value, "this family's base model was trained with it", offset.source)
            values["offset_noise"] = offset.value
        return values

    def ema(self) -> EMASettings:
        """The average of the weights."""
        note, steps = self._noter("EMA Settings"), self.wish.steps
        decay = min(max(1 - _AVERAGED_STEPS / steps, 0.5), 0.9999)
        note("decay schedule", "ramp", "forgets the start of the run by itself", OWN)
        reason = f"1 - {_AVERAGED_STEPS} / {steps} steps: what AI-Toolkit's 0.99 is to its 2000 steps"
        note("decay", round(decay, 6), reason, _TOOLKIT_EMA)
        device = "same"
        if self.plan.average_on_host:
            device = "host"
            note("store average on", device, "out of the device's memory, to fit", OWN)
        else:
            note("store average on", device, "there is memory for it beside the weights", "the estimate above")
        return EMASettings(schedule="ramp", decay=round(decay, 6), device=device)


def _text_encoder_source(facts: ModelFacts) -> str:
    if facts.family == "sdxl":
        return "kohya's sd-scripts, docs/train_SDXL-en.md (network_train_unet_only)"
    return "AI-Toolkit, train_text_encoder of its examples"


def _hints(facts: ModelFacts, published: PublishedRecipe, goal: Goal, fitted: Fit, memory: int) -> Sequence[str]:
    hints = [goal.advice]
    if published.note and published is not GENERAL:
        hints.append(published.note)
    least = fitted.estimate.total - fitted.plan.kept_blocks * facts.largest_block
    is_tight = least > 0.8 * USABLE * memory
    if facts.has_todo and (fitted.plan.largest(facts).resolution >= 1024 or is_tight):
        hints.append("Apply ToDo in front of Start Training saves time and memory at this resolution")
    if fitted.plan.layers_on_host:
        hints.append(
            "the model does not fit and is offloaded, which is slow: loaded in fp8 (weight_dtype of Load Diffusion"
            " Model) it takes half"
        )
    if is_tight:
        hints.append("memory is tight: a lower resolution in Dataset saves most")
    return hints
