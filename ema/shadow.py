"""A weight average (shadow weights) and its step: started from weights, updated after every step, swapped in or set."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from ..patches.core.slots import exchange, hold_values
from .decay import EMASettings, decay_over
from .host_offload import Offload, open_lane
from .update import average_, check_pairs


@dataclass(eq=False)
class Shadow:
    """Float32 averages by name, and the number of the last training step that they include.

    `update_` and `swap_in` change it in place. With `offload` the averages are in host memory and are updated on a
    separate thread: call `finish` before reading `tensors`.
    """

    tensors: dict[str, Tensor]
    step: int = 0
    offload: Offload | None = None
    is_swapped: bool = False  # also where a broken exchange has left average and weights mixed

    @classmethod
    def from_weights(cls, weights: Mapping[str, Tensor], device: torch.device | str | None = None) -> Shadow:
        """An average that starts as a float32 copy of weights.

        Args:
            weights: by name, of any shapes.
            device: where the average lies; None is beside each weight.
        """
        return cls({name: w.detach().to(device or w.device, torch.float32, copy=True) for name, w in weights.items()})

    @classmethod
    def from_average(
        cls, average: Mapping[str, Tensor], step: int, weights: Mapping[str, Tensor], device: torch.device, where: str
    ) -> Shadow:
        """A copy of an average, to go on with.

        Args:
            average: float32, by name.
            step: the step that it is of.
            weights: those that are trained, by name.
            device: the model's.
            where: "same" (each beside its weight) or "host" (host memory).
        """
        lane = open_lane(weights, device) if where == "host" else None
        copies: dict[str, Tensor] = {}
        for name, tensor in average.items():
            target_device = torch.device("cpu")
            if where == "same":
                target_device = weights[name].device
            copies[name] = tensor.to(target_device, copy=True)
        return cls(copies, step, None if lane is None else Offload(lane))

    def update_(self, weights: Mapping[str, Tensor], settings: EMASettings, step: int, total_steps: int) -> bool:
        """Include the weights after a training step, every `interval` steps.

        Args:
            weights: by name.
            settings: the decay and the interval.
            step: 1 is the first.
            total_steps: the run's length, for the target schedule.

        Returns:
            Whether they were included.

        Raises:
            ValueError: unless `step` is the one after the last that was included.
        """
        if step != self.step + 1:
            raise ValueError(f"The average stands at step {self.step}: it can take step {self.step + 1}, not {step}.")
        due = step % settings.interval == 0
        if due:
            self._move(weights, decay_over(settings, step, total_steps))
        self.step = step
        return due

    def _move(self, weights: Mapping[str, Tensor], decay: float) -> None:
        if self.offload is None:
            average_(self.tensors, weights, decay)
        else:
            self.offload.take(self.tensors, weights, decay)

    def protect(self) -> None:
        """Call before the weights change: waits for a copy to host memory that still reads them."""
        if self.offload is not None:
            self.offload.protect()

    def finish(self) -> None:
        """Wait until the averages include everything passed to `update_`."""
        if self.offload is not None:
            self.offload.finish()

    def close(self) -> None:
        """Finish, and end the thread of an average in host memory."""
        if self.offload is not None:
            self.offload.close()

    @torch.no_grad()
    def switch_(self, weights: Mapping[str, Tensor]) -> None:
        """Set the live weights to the average, rounded to their types (Switch EMA, Li 2024, arXiv 2402.09240;
        ema-pytorch's hare and tortoise).

        Args:
            weights: by name, changed in place.

        Raises:
            ValueError: where names or shapes differ.
        """
        self.finish()
        check_pairs(self.tensors, weights)
        for name, tensor in self.tensors.items():
            weights[name].copy_(tensor)

    @contextmanager
    def swap_in(self, weights: Mapping[str, Tensor]) -> Iterator[None]:
        """A context in which the live weights are the average, one tensor at a time.

        Afterwards both have their bytes back. Float32 weights wait in the average's place. Those of another type (bf16
        would round the average) wait in host memory. When an exchange itself is broken off, `is_swapped` stays true.

        Args:
            weights: by name, changed in place.

        Raises:
            RuntimeError: within such a block.
            ValueError: where names or shapes differ.
        """
        if self.is_swapped:
            raise RuntimeError("The weight average is swapped in already: leave that block first.")
        self.finish()
        check_pairs(self.tensors, weights)
        self.is_swapped = True
        stack, half_exchanged = ExitStack(), False
        try:
            for name, tensor in self.tensors.items():
                live = weights[name].detach()
                if live.dtype == tensor.dtype:
                    average = tensor.clone()
                    half_exchanged = True
                    stack.enter_context(exchange(tensor, live, average))
                    half_exchanged = False
                    del average
                else:
                    stack.enter_context(hold_values(live, live.to("cpu", copy=True)))
                    live.copy_(tensor)
            yield
        finally:
            stack.close()  # the last one first: a weight with two names was exchanged twice
            self.is_swapped = half_exchanged
