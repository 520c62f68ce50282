"""All settings of a training, as one value that goes along one link: what is trained, how it moves, what it learns, and
the averages of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from ..ema.decay import EMASettings
from .objective.settings import ObjectiveSettings
from .optimizers.settings import OptimizerSettings
from .trainable.settings import AdapterSettings
from .trainable.words import WordSettings

# What each part is set by, as the editor calls it.
NODES = {
    "adapter": "Adapter Settings",
    "optimizer": "Optimizer Settings",
    "objective": "Objective Settings",
    "ema": "EMA Settings",
    "words": "Train Words",
    "training_only": "Training-only LoRA",
}


@dataclass(frozen=True)
class TrainingSettings:
    """The settings of a training. A part that is None was not chosen: a run takes its defaults, and has no average, no
    words and no training-only LoRA.

    `training_only` are the rows of the LoRA stack that is on only while the loss is computed.
    """

    adapter: AdapterSettings | None = None
    optimizer: OptimizerSettings | None = None
    objective: ObjectiveSettings | None = None
    ema: EMASettings | None = None
    words: WordSettings | None = None
    training_only: Sequence[Any] | None = None

    def chosen(self) -> tuple[str, ...]:
        """The names of the parts that were chosen."""
        return tuple(one.name for one in fields(self) if getattr(self, one.name) is not None)

    def refuse_others(self, allowed: Sequence[str], node: str, why: str) -> None:
        """Raises ValueError where a part was chosen that a node cannot use."""
        others = [NODES[name] for name in self.chosen() if name not in allowed]
        if others:
            raise ValueError(f"{node}: settings has {' and '.join(others)}, {why}.")
