"""Event files for TensorBoard, with the optional package `tensorboard`: the measurements of each step as scalars, and
the previews.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

from torch import Tensor

from ...storage.disk_errors import explain_disk_errors
from ...storage.printable import pip_install
from ..run.workspace import HeldOutLoss, StepResult


def check() -> None:
    """Raise ValueError that says what to install when the package is missing."""
    if importlib.util.find_spec("tensorboard") is None:
        raise ValueError(
            f"Train Step: write TensorBoard logs is on and the package is not installed: {pip_install('tensorboard')},"
            " or switch it off."
        )


class Writer:
    """Writes a run's scalars and pictures into `folder`, to disk every so many `seconds`: what is measured of training
    at every `every`-th step. A run that goes on from an earlier step replaces what came after it.
    """

    def __init__(self, folder: Path, seconds: int = 120, every: int = 1) -> None:
        check()
        self.folder, self.seconds, self.every = folder, seconds, every
        self.writer: Any = None
        self._losses: list[float] = []  # since the last point

    def write(self, step: int, moved: StepResult, validation: HeldOutLoss | None) -> None:
        """The scalars of one step. Raises OSError that names the folder; an error of the writer's thread is raised at a
        later step.
        """
        values: dict[str, float] = {}
        self._losses.append(moved.loss)
        if step % self.every == 0:
            values = {"loss": fmean(self._losses), "learning rate": moved.rate, "gradient norm": moved.norm}
            if moved.seconds:
                values["steps a second"] = 1 / moved.seconds
            self._losses.clear()
        if validation is not None:
            values["held-out loss"] = validation.weights
            if validation.average is not None:
                values["held-out loss of the average"] = validation.average
            if validation.accuracy is not None:
                values["implicit accuracy on held-out pairs"] = validation.accuracy
        if not values:
            return
        with self._name_errors():
            writer = self._open(step)
            for name, value in values.items():
                writer.add_scalar(name, value, step)

    def write_pictures(self, step: int, name: str, pictures: Iterable[Tensor]) -> None:
        """Pictures (h, w, 3) in 0..1 of one step, under a name. Raises OSError as `write` does."""
        with self._name_errors():
            for number, picture in enumerate(pictures):
                self._open(step).add_image(f"{name}/{number}", picture.clamp(0, 1), step, dataformats="HWC")

    def _open(self, step: int) -> Any:
        if self.writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(str(self.folder), purge_step=step, flush_secs=self.seconds)
        return self.writer

    def close(self) -> None:
        """Write what is left. Raises OSError as `write` does."""
        if self.writer is not None:
            with self._name_errors():
                self.writer.close()
            self.writer = None  # of a training that pauses: the next point opens another file

    @contextmanager
    def _name_errors(self) -> Iterator[None]:
        try:
            with explain_disk_errors(str(self.folder)):
                yield
        except OSError:
            self.writer = None  # its thread has ended and would raise the same error again
            raise
