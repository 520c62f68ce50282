"""Nodes for the training settings: adapter, words, optimizer, objective, EMA and a training-only LoRA. They chain as
LoRA loaders do: each takes the settings so far and gives them with its own part.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from comfy_api.latest import io

from ..ema.decay import EMASettings
from ..training.objective.settings import ObjectiveSettings
from ..training.optimizers.settings import OptimizerSettings
from ..training.settings import TrainingSettings
from ..training.trainable.settings import AdapterSettings
from ..training.trainable.words import WordSettings
from .schema import GraftNode, LoraModel, LoraStack, Settings, inputs_of, search_aliases


class SettingsNode(GraftNode):
    """A node that sets one part of the training settings; `part` is its name there."""

    part: ClassVar[str]

    @classmethod
    def define_settings(
        cls, node_id: str, display_name: str, description: str, searched: tuple[str, ...], *sockets: Any
    ) -> io.Schema:
        """The schema: the settings so far, the sockets, and an input for each declared setting."""
        before = Settings.Input(
            "settings",
            optional=True,
            tooltip="Optional. The settings so far, from Training Recipe or another settings node.",
        )
        inputs = [before, *sockets]
        if cls.settings_class is not None:
            inputs += inputs_of(cls.settings_class)
        return io.Schema(
            node_id=node_id,
            display_name=display_name,
            category="Graft/training",
            description=description,
            **search_aliases(*searched),
            inputs=inputs,
            outputs=[Settings.Output(display_name="GRAFT_SETTINGS")],
        )

    @classmethod
    def with_part(cls, settings: TrainingSettings | None, value: Any) -> io.NodeOutput:
        """The node's output: the settings so far with this part."""
        return io.NodeOutput(replace(settings or TrainingSettings(), **{cls.part: value}))

    @classmethod
    def execute(cls, chosen: Any, settings: TrainingSettings | None = None) -> io.NodeOutput:
        return cls.with_part(settings, chosen)


class GraftAdapter(SettingsNode):
    """Settings: what is trained."""

    settings_class = AdapterSettings
    part = "adapter"
    checked_together = (
        ("kind",),
        ("pattern",),
        ("kind", "rank", "min_rank"),
        ("kind", "base_weights"),
        ("kind", "alpha", "pattern", "rank_dropout", "module_dropout", "network_dropout", "max_norm"),
    )

    @classmethod
    def define_schema(cls) -> io.Schema:
        return cls.define_settings(
            "GraftAdapter",
            "Adapter Settings",
            "What to train: an adapter (LoRA, LoCon, LoHa, LoKr, DoRA, OFT, T-LoRA) or the full weights, and in which"
            " layers.",
            ("lora settings", "locon", "rank", "network dim", "full fine-tune"),
            LoraModel.Input(
                "initial",
                optional=True,
                tooltip="Optional. A LoRA of the same type, rank and layers to continue from.",
            ),
        )

    @classmethod
    def execute(
        cls, chosen: AdapterSettings, settings: TrainingSettings | None = None, initial: Any = None
    ) -> io.NodeOutput:
        return cls.with_part(settings, replace(chosen, initial=initial))


class GraftWords(SettingsNode):
    """Settings: words that are trained."""

    settings_class = WordSettings
    part = "words"
    checked_together = (("words", "initial", "count", "learning_rate", "stop_after", "max_norm", "alone"),)

    @classmethod
    def define_schema(cls) -> io.Schema:
        return cls.define_settings(
            "GraftWords",
            "Train Words",
            "Trains words (textual inversion): in place of the word, the text encoder reads a few trained vectors."
            " Together with an adapter this is pivotal tuning.",
            ("textual inversion", "embedding", "pivotal tuning", "new token", "trigger word"),
        )


class GraftOptimizer(SettingsNode):
    """Settings: how the trained weights move."""

    settings_class = OptimizerSettings
    part = "optimizer"
    checked_together = (
        ("learning_rate",),
        ("block_rates",),
        ("optimizer",),
        ("optimizer", "optimizer_class", "options"),
        # what decides whether a run can learn at all
        (
            "optimizer",
            "options",
            "learning_rate",
            "text_encoder_rate",
            "block_rates",
            "lora_plus",
            "scale_lr",
            "clip_norm",
        ),
        ("optimizer", "schedule"),
        ("optimizer", "weight_decay"),
        ("optimizer", "warmup"),
        ("schedule", "floor"),
        ("warmup", "total_steps"),
        ("optimizer", "fused_backward", "clip_norm", "accumulation", "precision"),
    )

    @classmethod
    def define_schema(cls) -> io.Schema:
        return cls.define_settings(
            "GraftOptimizer",
            "Optimizer Settings",
            "The optimizer and its learning rate, schedule, batch size, precision and memory settings.",
            (
                "learning rate",
                "adamw",
                "prodigy",
                "batch size",
                "lr schedule",
                "gradient accumulation",
                "gradient checkpointing",
            ),
        )

    @classmethod
    def check_settings(cls, **values: Any) -> None:
        """Raises ValueError for settings that are wrong, for an optimizer that is not installed, and for a learning
        rate at which no run learns anything.
        """
        from ..training.optimizers.build import check_installed
        from ..training.optimizers.checks import check_rate

        made = OptimizerSettings(**values)
        check_installed(made)
        if "learning_rate" in values and not made.scale_lr:  # whose batch size only the run knows
            check_rate(made)


class GraftObjective(SettingsNode):
    """Settings: what training minimizes."""

    settings_class = ObjectiveSettings
    part = "objective"
    checked_together = (
        ("loss", "weighting"),
        ("loss", "prior"),
        ("loss", "target", "noise_candidates"),
        ("offset_noise",),
        ("min_timestep", "max_timestep"),
        ("expert", "boundary"),
        ("expert", "min_timestep", "max_timestep"),
    )

    @classmethod
    def define_schema(cls) -> io.Schema:
        return cls.define_settings(
            "GraftObjective",
            "Objective Settings",
            "What the model learns to predict: loss, loss weighting, noise and timesteps. The defaults suit most"
            " LoRAs.",
            ("loss", "min snr", "offset noise", "timestep", "huber", "prior preservation", "dpo"),
        )


class GraftEMA(SettingsNode):
    """Settings: the running average of the trained weights."""

    settings_class = EMASettings
    part = "ema"
    checked_together = (
        ("widths",),
        ("decay", "min_decay"),
        ("interval", "snapshots", "switch_every"),
        ("snapshots", "widths"),
    )

    @classmethod
    def define_schema(cls) -> io.Schema:
        return cls.define_settings(
            "GraftEMA",
            "EMA Settings",
            "Keeps a running average (EMA) of the trained weights. It is usually better than the last step, and always"
            " steadier.",
            ("ema", "exponential moving average", "weight averaging", "polyak"),
        )


class GraftTrainingOnlyLoRA(SettingsNode):
    """Settings: a LoRA that is on only while the loss is computed."""

    part = "training_only"

    @classmethod
    def define_schema(cls) -> io.Schema:
        return cls.define_settings(
            "GraftTrainingOnlyLoRA",
            "Training-only LoRA",
            "For distilled models such as Z-Image Turbo: their training adapter. It is on while the loss is computed,"
            " and off in previews, in MODEL and in saved files.",
            ("training adapter", "assistant lora", "de-distill", "z-image turbo", "turbo"),
            LoraStack.Input("lora_stack", tooltip="The training adapter, from LoRA Stack."),
        )

    @classmethod
    def execute(cls, lora_stack: Any, settings: TrainingSettings | None = None) -> io.NodeOutput:
        return cls.with_part(settings, lora_stack)


NODES = [GraftAdapter, GraftWords, GraftOptimizer, GraftObjective, GraftEMA, GraftTrainingOnlyLoRA]
