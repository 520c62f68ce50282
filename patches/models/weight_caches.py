"""Clears what host models keep between calls that was computed with their weights.

HiDream-O1 keeps keys and values by prompt: with other weights the same prompt would meet those of the weights before.
"""

from __future__ import annotations

from torch import nn

# Methods of modules that forget what was computed with their weights. To add one, list its name here.
_CLEARING = ("clear_kv_cache",)  # HiDream-O1: keys and values of prompts, and embedded references


def clear_weight_caches(model: nn.Module) -> None:
    """Make every module of a model forget what it has computed with its weights.

    For whenever weights, or what adapters do beside them, have changed. It writes no weight.
    """
    for module in model.modules():
        for name in _CLEARING:
            if hasattr(type(module), name):
                getattr(module, name)()
