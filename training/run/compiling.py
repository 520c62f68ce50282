"""Compiles a model's blocks before the first step, and says what was compiled and how long it took.

A pass of every size of the dataset goes first, the largest picture first of all. So what is compiled, and with it how
steps round, does not depend on where a run goes on.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import asdict, replace

from ...storage.digest import sha256_of_json
from ..data.dataset import Dataset
from ..random_draws import generator
from .batch_loader import BatchSchedule
from .compiled_blocks import graph_breaks, kinds
from .step import batch_losses, step_options
from .workspace import Workspace

_SHOWN_BREAKS = 3


class CompilationReport:
    """What is compiled for a run from here on."""

    def __init__(self, work: Workspace) -> None:
        self._work, self._compiler = work, work.block_compiler
        self._seconds: float | None = None
        self._graphs, self._later = self._compiler.graphs, 0
        self._breaks = graph_breaks()

    def first_pass(self) -> None:
        """Compile with a pass of every size, unless an earlier call has done so. Nothing of the run moves.

        Raises ValueError when a block cannot be compiled.
        """
        from torch._dynamo.exc import TorchDynamoException

        work, run = self._work, _run_of(self._work)
        if run in self._compiler.compiled_for:
            return
        started = time.perf_counter()
        try:
            for shape, image in work.loader.schedule.sizes().items():
                alone = replace(image, repeats=1, batch_size=0, batch_id="")
                batch = replace(work.dataset, images=(alone,) * shape[0], held_out=(), regularization=None, workers=0)
                _pass(work, batch)
        except TorchDynamoException as error:
            raise ValueError(
                "Optimizer Settings: compile is blocks, and torch.compile cannot compile this model"
                f" ({_reason(error)}): set compile to off."
            ) from error
        finally:
            work.stepper.drop_gradients()
        self._compiler.compiled_for.add(run)
        self._seconds = time.perf_counter() - started
        self._later = self._compiler.graphs

    def lines(self) -> list[str]:
        """Sentences for the report."""
        compiler = self._compiler
        if self._seconds is None:
            before = compiler.graphs - self._graphs
            lines = ["compiled blocks: as compiled before"]
        else:
            blocks = " and ".join(f"{count} {name}" for name, count in kinds(self._work.denoiser.module).items())
            before = compiler.graphs - self._later
            lines = [
                f"compiled blocks: {self._later - self._graphs} compilations for {blocks} took {self._seconds:.1f} s"
                " before the first step"
            ]
        if before:
            lines.append(f"compiled {before} times more while training, for sizes or settings that came later")
        return lines + _describe_breaks(graph_breaks() - self._breaks)


def _describe_breaks(breaks: Counter[str]) -> list[str]:
    if not breaks:
        return []
    reasons = "; ".join(f"{count} x {reason}" for reason, count in breaks.most_common(_SHOWN_BREAKS))
    return [f"graph breaks, where blocks call what torch.compile does not look into: {breaks.total()} ({reasons})"]


def _run_of(work: Workspace) -> str:
    """What compilations depend on beside the sizes: the model with its patches, what is trained, and how."""
    start, settings = work.start_state.start, asdict(work.start_state.settings.optimizer)
    how = {name: settings[name] for name in ("precision", "checkpointing", "offload")}
    return sha256_of_json({"model": start.model, "adapter": start.adapter.identity(), "how": how})


def _pass(work: Workspace, dataset: Dataset) -> None:
    """A forward and backward pass whose gradients are thrown away."""
    schedule = replace(BatchSchedule.from_state(work.start_state, dataset), batch_size=len(dataset.images), parts=1)
    with work.set_purpose("part 0"):
        for number, batch in enumerate(schedule.batches(0, 0)):
            noise = generator(work.start_state.start.seed, 0, "compiling")
            loss = batch_losses(work, batch, noise, step_options(work, number)).sum()
            if loss.requires_grad:
                loss.backward()


def _reason(error: BaseException) -> str:
    error = getattr(error, "inner_exception", error)  # of a compiler behind torch.compile
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
