"""A small training run on a device: the host's UNet in a tiny shape, random weights, latents and captions."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import todo
import torch

SHAPE, SIDE, PICTURES = "tiny", 16, 8
STEPS = 4


@contextmanager
def denoiser_on(device: torch.device) -> Iterator[Any]:
    """A Denoiser of the tiny UNet, loaded on the device; the same weights on every device."""
    from graft_nodes.host.denoiser import open_denoiser

    patcher = todo.build(SHAPE, device, torch.float32)
    draws = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in patcher.model.diffusion_model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=draws) * parameter[0].numel() ** -0.5)
    with open_denoiser(patcher) as opened, torch.inference_mode(False):
        yield opened


def dataset() -> Any:
    """Latents with two captions."""
    from graft_nodes.training.data.dataset import Conditioning, Dataset

    draws = torch.Generator().manual_seed(1)
    width = todo.SHAPES[SHAPE]["context_dim"]
    conditionings = {text: Conditioning(torch.randn(1, 8, width, generator=draws)) for text in ("a", "b", "")}
    latents = [torch.randn(4, SIDE, SIDE, generator=draws) for _ in range(PICTURES)]
    return Dataset.from_latents(latents, ["a", "b"] * (PICTURES // 2), conditionings)


def begun(denoiser: Any, data: Any, kind: str, average: Any = None, **optimizer: Any) -> Any:
    """The state before the first step of a run."""
    from graft_nodes.training.optimizers.settings import OptimizerSettings
    from graft_nodes.training.state import Settings, Start, begin
    from graft_nodes.training.trainable.settings import AdapterSettings

    adapter = AdapterSettings(kind, targets="all", rank=4)
    start = Start("random", data.digest, adapter, average, 3)
    settings = {"learning_rate": 1e-3, "batch_size": 2, "total_steps": 100, "precision": "float32", **optimizer}
    return begin(denoiser.module, start, Settings(OptimizerSettings(**settings)))


def digest(state: Any) -> str:
    """A hash of every tensor of a state, and of what was measured."""
    from graft_nodes.storage.safetensors import safetensors_bytes
    from graft_nodes.training.store.store import GROUPS

    found = hashlib.sha256(repr((state.key, state.step, state.history.loss, state.history.norm)).encode())
    tensors = {f"{group}/{name}": tensor for group in GROUPS for name, tensor in getattr(state, group).items()}
    for chunk in safetensors_bytes(tensors, {}):
        found.update(chunk)
    return found.hexdigest()


def make_deterministic(device: torch.device) -> None:
    """Refuse operations that may give other bytes each time; CUBLAS_WORKSPACE_CONFIG is in the part's environment."""
    torch.use_deterministic_algorithms(True)
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = False
