"""AdaCoor, EveryDream2's optimiser without a learning rate: v += eps g^2, p -= eps g / (sqrt(v) + eps), v in bf16."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class AdaCoor(torch.optim.Optimizer):
    """AdaGrad in all but its scale: a first step of about sqrt(eps) in every coordinate, then smaller ones. A group's
    `lr` is ignored.
    """

    def __init__(self, params: Any, eps: float = 1e-8) -> None:
        if not eps > 0:
            raise ValueError(f"AdaCoor: eps is {eps}, expected above 0")
        super().__init__(params, {"eps": eps, "lr": eps})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Move every tensor that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._move_(p, group["eps"])
        return loss

    def _move_(self, p: torch.Tensor, eps: float) -> None:
        state, g = self.state[p], p.grad
        assert g is not None
        if "v" not in state:
            state["v"] = torch.zeros_like(p, dtype=torch.bfloat16)
        state["v"].copy_(state["v"].float().addcmul_(g, g, value=eps))  # the sum in float32, rounded once
        p.addcdiv_(g, state["v"].float().sqrt_().add_(eps), value=-eps)
