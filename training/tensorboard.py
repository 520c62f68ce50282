"""Event files for TensorBoard, with the optional package `tensorboard`: what is measured in each step, as scalars."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from .step import Moved


def check() -> None:
    """Raise ValueError that says what to install when the package is missing."""
    if importlib.util.find_spec("tensorboard") is None:
        raise ValueError("TrainStep: tensorboard is on and the package is not installed: pip install tensorboard, or switch it off.")


class Writer:
    """Writes a run's scalars into `folder`; a run that goes on from an earlier step replaces what came after it."""

    def __init__(self, folder: Path) -> None:
        check()
        self.folder = folder
        self.writer: Any = None

    def write(self, step: int, moved: Moved, validation: float | None) -> None:
        """The scalars of one step."""
        if self.writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(str(self.folder), purge_step=step)
        values = {"loss": moved.loss, "learning rate": moved.rate, "gradient norm": moved.norm}
        if validation is not None:
            values["held-out loss"] = validation
        if moved.seconds:
            values["steps a second"] = 1 / moved.seconds
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is left."""
        if self.writer is not None:
            self.writer.close()
