"""What a trainer's file of this folder declares: one kind of LoRA file in one layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

State = Mapping[str, Tensor]


class Written(NamedTuple):
    """A file that a trainer wrote, and the network that is on its model."""

    path: Path
    network: nn.Module | None = None
    in_float32: bool = False  # what its network computes with, where that is not a choice; else float64


@dataclass(frozen=True)
class Case:
    """A kind of file of one trainer, in one layout of layouts.py.

    `write` installs the trainer's network on the trainer's model, draws its numbers and writes the file with the
    trainer's saver. The model is diffusers', or `model` gives it with ComfyUI's weights and `to_theirs` gives ComfyUI's
    tensors its names and shapes. `changes` are settings of ComfyUI's tiny model, instead of the layout's. Layers whose
    name ends like one of `spoilt` are not compared: the saver writes something else than the trainer computed with, as
    `remark` says.
    """

    trainer: str
    layout: str
    kind: str
    write: Callable[[nn.Module, Path], Written]
    model: Callable[[State], nn.Module] | None = None
    to_theirs: Callable[[dict[str, Tensor]], State] | None = None
    changes: Mapping[str, Any] | None = None
    spoilt: tuple[str, ...] = ()
    remark: str = ""
