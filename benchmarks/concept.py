"""The demo's concept, taught much as its workflow teaches it, for benchmarks that repeat that with something else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

REGULAR = 0.25  # of each batch


def begun(
    model: Any, clip: Any, vae: Any, steps: int, seed: int, held_out: tuple[int, ...] = (), snapshots: int = 0
) -> tuple[Any, Any]:
    """(TrainState before the first of `steps` steps, its dataset); `model` may carry a ToDo plan, `snapshots` is
    GraftEMA's.
    """
    from graft_nodes.demo import draw
    from graft_nodes.demo.encode_dataset import encode_dataset
    from graft_nodes.ema.decay import EMASettings
    from graft_nodes.training.objective.settings import ObjectiveSettings
    from graft_nodes.training.optimizers.settings import OptimizerSettings
    from graft_nodes.training.state import Settings, Start, begin
    from graft_nodes.training.trainable.settings import AdapterSettings

    regular = encode_dataset(clip, vae, draw.regular())
    data = encode_dataset(
        clip, vae, draw.concept(), regularization=regular, regularization_share=REGULAR, held_out=held_out
    )
    optimizer = OptimizerSettings(
        learning_rate=2e-3, schedule="cosine", warmup=min(10, steps), total_steps=steps, floor=0.1, batch_size=8
    )
    average = EMASettings("ramp", 0.99, snapshots=snapshots)
    start = Start("demo base", data.digest, AdapterSettings(targets="attention+ff", rank=16), average, seed)
    return begin(
        model.model.diffusion_model, start, Settings(optimizer, ObjectiveSettings(conditioning_dropout=0.1)), "zorp"
    ), data


def applied(model: Any, lora: Mapping[str, Tensor]) -> Any:
    """The MODEL with a LoRA on it."""
    from graft_nodes import host
    from graft_nodes.patches.lora_files.entry import LoraEntry

    return host.lora_stacks.apply_lora_stack(model, None, [LoraEntry("zorp", dict(lora), 1.0, 0.0)]).model
