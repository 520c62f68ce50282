"""LPIPS (arXiv 1801.03924): how different two pictures look, measured by the authors' package `lpips`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...storage.printable import pip_install

LEAST_SIDE = 16  # pixels: VGG halves them four times


def check_installed() -> None:
    """Raises ValueError that says what to install before LPIPS can be measured."""
    _package()


def network(device: torch.device) -> nn.Module:
    """LPIPS' network with VGG (Zhang 2018, arXiv 1801.03924), without gradients of its own. The first time torchvision
    downloads VGG.

    Args:
        device: where it computes.

    Raises:
        ValueError: where the package lpips is not installed.
    """
    with torch.random.fork_rng(devices=[]):  # new modules get random weights
        made = _package().LPIPS(net="vgg", verbose=False)
    return made.to(device).eval().requires_grad_(False)


def distances(network: nn.Module, left: Tensor, right: Tensor) -> Tensor:
    """How different pictures look.

    Args:
        network: what `network` gave.
        left: pictures (B, 3, H, W) from -1 to 1.
        right: the pictures to compare them with, of the same shape.

    Returns:
        Distances (B,), 0 of equal pictures, differentiable.
    """
    return network(left, right).flatten(1).mean(1)


def _package() -> Any:
    try:
        import lpips
    except (ImportError, OSError, RuntimeError) as error:  # the latter of a torchvision for another torch
        raise ValueError(
            f"Start VAE Training: LPIPS weight is above 0 and needs the package lpips, which needs the"
            f" torchvision of this torch ({error}): {pip_install('lpips', 'torchvision')}, or set LPIPS weight to 0."
        ) from error
    return lpips
