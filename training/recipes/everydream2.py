"""Settings as EveryDream2 has them by itself, all at once: those of its train.py and optimizer.json, which its tweaking
guide explains. Figures only, read in 2026.
"""

from __future__ import annotations

from ..objective.settings import ObjectiveSettings, check_for
from ..optimizers.settings import OptimizerSettings
from ..settings import TrainingSettings
from ..trainable.settings import AdapterSettings
from .choose import Choice, usable_optimizer
from .facts import Device, ModelFacts
from .published import Figure
from .report import lines_of
from .wish import STRENGTHS, Wish

_TRAIN, _OPTIMIZER = "EveryDream2, train.py", "EveryDream2, optimizer.json"
_GUIDE = "EveryDream2, doc/ADVANCED_TWEAKING.md"
HINTS = (
    "connect CLIP to Start Training: the text encoder is trained too. Its report plans the memory, which is several"
    " times that of a LoRA",
    "what other nodes set by themselves there: seed 555 in Start Training; resolution 512, caption source auto and flip"
    " probability 0 in Dataset; preview every N steps 250 and log every N steps 25 in Train Step",
    "the guide takes a learning rate of 2e-6 to 5e-6 at batch size 6 to 8 on SD1.x, half of it at 768 pixels, and 2e-7"
    " for SD 2.1 at 768",
    "an average is kept if EMA Settings follows this node: the guide suggests a decay of 0.999 to 0.9999",
)


def everydream2(facts: ModelFacts, wish: Wish, device: Device) -> tuple[TrainingSettings, str]:
    """The settings, and the report with each and where it is from. Raises ValueError for a model that they do not
    suit.
    """
    choices: list[Choice] = []

    def note(node: str, label: str, value: object, reason: str, source: str = _TRAIN) -> None:
        choices.append(Choice(node, label, value, reason, source))

    node = "Adapter Settings"
    note(node, "adapter type", "full", "it trains all weights, and has no LoRA")
    note(node, "target layers", "all", "of the diffusion model and of the text encoder")
    note(node, "train text encoder", "on", "unless --disable_textenc_training is set")
    adapter = AdapterSettings(kind="full", targets="all", text_encoder=True)

    node = "Optimizer Settings"
    optimizer, why, source = usable_optimizer(Figure("adamw8bit", _OPTIMIZER), device)
    note(node, "optimizer", optimizer, why, source)
    factor = STRENGTHS[wish.strength]
    rates = 1e-6 * factor, 5e-7 * factor
    reason = f"{{}} is its own, times {factor:g} for strength {wish.strength}"
    note(node, "learning rate", rates[0], reason.format("1e-6"), _OPTIMIZER)
    note(node, "text encoder learning rate", rates[1], reason.format("5e-7"), _OPTIMIZER)
    note(node, "learning rate schedule", "constant", "cosine is there to try, with a warmup of 0.02", _OPTIMIZER)
    note(
        node, "total steps (schedule)", wish.steps, "the steps of this node: set the same in Train Step", "your choice"
    )
    note(node, "batch size", 2, "--batch_size")
    note(node, "gradient accumulation", 1, "--grad_accum")
    note(node, "maximum gradient norm", 0.0, "--clip_grad_norm: no clipping")
    note(node, "weight decay", 0.01, "its own", _OPTIMIZER)
    note(node, "training precision", "auto", "mixed precision (--amp) where the device has it")
    moved = OptimizerSettings(
        optimizer=optimizer,
        learning_rate=rates[0],
        text_encoder_rate=rates[1],
        total_steps=wish.steps,
        batch_size=2,
        clip_norm=0.0,
    )

    node = "Objective Settings"
    note(node, "loss function", "mse", "that of its train.json; train.py alone mixes it with Huber's", "its train.json")
    note(node, "loss weighting", "none", "--min_snr_gamma is off")
    offset = 0.0 if facts.prediction == "flow" else 0.02
    reason = "--zero_frequency_noise_ratio" if offset else "its 0.02 is for models that predict noise"
    note(node, "noise offset", offset, reason)
    note(node, "pyramid noise kind", "everydream2", "for a pyramid noise discount as there, which is 0", _GUIDE)
    note(node, "conditioning dropout", 0.04, "--cond_dropout")
    objective = ObjectiveSettings(offset_noise=offset, pyramid_kind="everydream2", conditioning_dropout=0.04)
    check_for(objective, facts.prediction)
    report = [
        f"settings as EveryDream2 has them by itself, for {facts.title or 'an unknown model'}, {facts.parameters:,}"
        f" parameters, predicts {facts.prediction}; strength {wish.strength}, {wish.steps} steps. memory is not used",
        *lines_of(choices),
        "",
        *(f"hint: {hint}" for hint in HINTS),
    ]
    return TrainingSettings(adapter, moved, objective), "\n".join(report)
