"""The averaging step: shadow = decay * shadow + (1 - decay) * weights, one fused pass a (device, dtype) group, paired by name."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor


def check_pairs(shadow: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    """Raise ValueError that lists every name or shape in which the average and the weights differ."""
    wrong = [f"{name}: only in the average" for name in sorted(shadow.keys() - weights.keys())]
    wrong += [f"{name}: only in the weights" for name in sorted(weights.keys() - shadow.keys())]
    for name in sorted(shadow.keys() & weights.keys()):
        if shadow[name].shape != weights[name].shape:
            wrong.append(f"{name}: average {tuple(shadow[name].shape)}, weights {tuple(weights[name].shape)}")
        if shadow[name].dtype != torch.float32:
            wrong.append(f"{name}: the average is {shadow[name].dtype}, expected torch.float32 (a bf16 average never moves)")
    if wrong:
        raise ValueError(f"The weight average does not fit the weights ({len(wrong)}):\n  " + "\n  ".join(wrong))


@torch.no_grad()
def average_(shadow: Mapping[str, Tensor], weights: Mapping[str, Tensor], decay: float) -> None:
    """Move every tensor of `shadow` (float32) towards the one of the same name in `weights`, in place. Names and shapes must be equal."""
    check_pairs(shadow, weights)
    groups: dict[tuple[torch.device, torch.device, torch.dtype], list[str]] = defaultdict(list)
    for name, tensor in shadow.items():
        groups[tensor.device, weights[name].device, weights[name].dtype].append(name)
    for (device, source, dtype), names in groups.items():
        if device == source and dtype == torch.float32:
            torch._foreach_lerp_([shadow[name] for name in names], [weights[name] for name in names], 1.0 - decay)
        else:  # other device or dtype: one tensor at a time, so that no second copy of everything exists
            for name in names:
                shadow[name].lerp_(weights[name].to(device, torch.float32), 1.0 - decay)
