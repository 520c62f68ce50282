"""What the nodes' schemas are made of beside ComfyUI's own: socket types, advanced inputs and search aliases."""

from __future__ import annotations

import dataclasses
from typing import Any

from comfy_api.latest import io

# Graft's own sockets, and those shared with other packs.
Adapter = io.Custom("GRAFT_ADAPTER")
Dataset = io.Custom("GRAFT_DATASET")
EMA = io.Custom("GRAFT_EMA")
LoraModel = io.Custom("LORA_MODEL")
LoraStack = io.Custom("LORA_STACK")
LossMap = io.Custom("LOSS_MAP")
Objective = io.Custom("GRAFT_OBJECTIVE")
Optimizer = io.Custom("GRAFT_OPTIMIZER")
Snapshots = io.Custom("GRAFT_SNAPSHOTS")
TrainState = io.Custom("TRAIN_STATE")
Words = io.Custom("GRAFT_WORDS")

_HAS_ALIASES = any(field.name == "search_aliases" for field in dataclasses.fields(io.Schema))  # newer than 0.3.64


def advanced(kind: Any, identifier: str, **declared: Any) -> Any:
    """`advanced(io.Int, "rank", default=16)` is `io.Int.Input("rank", default=16)`, folded away in the editor behind
    "Show advanced inputs".

    Widgets take no `advanced` in ComfyUI 0.3.64; what is in `extra_dict` reaches the editor from every host.
    """
    made = kind.Input(identifier, **declared)
    made.extra_dict = {**made.extra_dict, "advanced": True}
    return made


def aliases(*words: str) -> dict[str, list[str]]:
    """Search aliases: `io.Schema(..., **aliases("a", "b"))` passes the keyword argument if the host's Schema has it."""
    if _HAS_ALIASES:
        return {"search_aliases": list(words)}
    return {}


def run_average() -> Any:
    """The input of nodes that begin a run: its EMA settings."""
    return EMA.Input(
        "ema",
        optional=True,
        tooltip="Keeps an average of the weights, from EMA Settings. If left empty, there is no average.",
    )


def run_seed() -> Any:
    """The input of nodes that begin a run: its seed."""
    return io.Int.Input(
        "seed",
        display_name="seed",
        default=0,
        min=0,
        max=0xFFFFFFFFFFFFFFFF,
        tooltip="The seed of every random draw in the run. The same seed and inputs give the same result.",
    )


def run_name(default: str) -> Any:
    """The input of nodes that begin a run: its name."""
    return io.String.Input(
        "run",
        display_name="run name",
        default=default,
        tooltip="Folder under output/graft where the training states are stored.",
    )
