"""Memory of a training run: how much is used, and what to change when it runs out."""

from __future__ import annotations

import gc
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import torch

from ..optimizers.settings import OptimizerSettings

_WORDS = ("not enough memory", "can't allocate memory", "out of memory")  # of torch's allocators on CPU, CUDA and MPS


def used_memory(device: torch.device) -> int:
    """Memory in use, in bytes: the most that was allocated on a device that counts it, as CUDA, since `begin_peak`;
    else what is allocated on MPS.

    Without either it is this process's memory (0 if unknown).
    """
    counts = _counting_module(device)
    if counts is not None:
        return int(counts.max_memory_allocated(device))
    if device.type == "mps":
        return int(torch.mps.current_allocated_memory())
    if sys.platform == "linux":
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    if sys.platform == "win32":
        return 0
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def begin_peak(device: torch.device) -> None:
    """Let the most that is allocated on a device begin with what is allocated now."""
    counts = _counting_module(device)
    if counts is not None:
        counts.reset_peak_memory_stats(device)


def _counting_module(device: torch.device) -> Any:
    """torch's module of a device that counts the most that was allocated; None for others."""
    module = getattr(torch, device.type, None)
    return module if hasattr(module, "reset_peak_memory_stats") else None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means out of memory, on any device."""
    if isinstance(error, MemoryError | torch.cuda.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(phrase in str(error).lower() for phrase in _WORDS)


def release(error: BaseException) -> None:
    """Frees what the failed computation still holds, so that the state can be saved."""
    cause: BaseException | None = error
    while cause is not None:
        traceback.clear_frames(cause.__traceback__)
        cause = cause.__context__
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def advice(optimizer: OptimizerSettings, device: torch.device, batch_size: int, further: Sequence[str]) -> str:
    """Settings that would save memory, those that cost least first. `batch_size` is the largest that the datasets make
    of the optimizer's, and `further` is what the kind of training has to suggest.
    """
    suggestions = []
    if not optimizer.checkpointing:
        suggestions.append("switch gradient checkpointing on")
    if batch_size > 1:
        suggestions.append(
            f"make batch size smaller than {batch_size} (a larger gradient accumulation keeps the step the same)"
        )
    if device.type == "cuda" and optimizer.precision == "float32":
        suggestions.append("set training precision to bf16")
    return "; or ".join([*suggestions, *further])
