"""One LoRA of a stack: its tensors and its strengths on the model and the text encoder."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from torch import Tensor

from ..patching.strength_schedule import Schedule
from . import block_weights

StateDict = Mapping[str, Tensor]


class LoraEntry(NamedTuple):
    """One LoRA of a stack: its name for messages, its tensors, and its strengths on the model and the text encoder.

    - `partial`: names that match no weight are skipped instead of refused.
    - `blocks`: block weights as `block_weights.parse` reads them; `metadata`: the file's own.
    - `schedule` multiplies the model's strength during sampling.
    - `comfyui_oft`: OFT and BOFT turn weights as ComfyUI's LoRA loader does it, which counts their strength twice.
    """

    name: str
    state_dict: StateDict
    strength_model: float = 1.0
    strength_clip: float = 1.0
    partial: bool = False
    blocks: str = ""
    metadata: Mapping[str, str] = MappingProxyType({})
    schedule: Schedule | None = None
    comfyui_oft: bool = False

    def strength(self, space: str) -> float:
        """The strength on the "model" or the "clip"."""
        return self.strength_model if space == "model" else self.strength_clip

    def block_strengths(self) -> Mapping[str, float]:
        """Strength by block; empty when the entry has no block weights."""
        return {} if not self.blocks else block_weights.parse(self.blocks)
