"""A training step: equal to the CPU's and to PEFT's, and its seconds and memory beside other trainers, as
benchmarks/training.py measures them.
"""

from __future__ import annotations

import functools
import inspect
import statistics
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import training

from .case import CannotRun, Case, Row, Setting, need, row, use_device
from .small_run import STEPS, begun, dataset, denoiser_on

RANK, RATE = 4, 1e-2


def cases(setting: Setting) -> list[Case]:
    """Two checks, and each trainer."""
    training.open_host(setting.comfyui, setting.device)
    use_device(setting.device)
    return [
        Case("equal to the CPU", functools.partial(equal_to_cpu, setting)),
        Case("equal to PEFT", functools.partial(equal_to_peft, setting)),
        Case("Graft and the bare loop", functools.partial(graft, setting)),
        Case("ComfyUI's own trainer", functools.partial(core, setting, "weight")),
        Case("ComfyUI's own trainer, bypass", functools.partial(core, setting, "bypass")),
        Case("diffusers and PEFT", functools.partial(peft, setting)),
    ]


def equal_to_cpu(setting: Setting) -> Iterator[Row]:
    """The same steps on the CPU and on the device: the same losses and weights."""
    from graft_nodes.training.run.loop import train

    torch.backends.cudnn.allow_tf32 = False
    data = dataset()
    for kind in ("locon", "full"):
        states = []
        for device in (torch.device("cpu"), setting.device):
            with denoiser_on(device) as denoiser:
                first = begun(denoiser, data, kind, optimizer="sgd", learning_rate=RATE)
                states.append((first, train(first, denoiser, data, STEPS)))
        (first, there), (_, here) = states
        torch.testing.assert_close(torch.tensor(here.history.loss), torch.tensor(there.history.loss), rtol=1e-3, atol=0)
        for name, tensor in there.trained.items():
            moved = float((tensor - first.trained[name]).abs().max())
            far = float((here.trained[name].cpu() - tensor.cpu()).abs().max())
            assert far <= 1e-2 * moved + 1e-6, f"{kind}, {name}: {far:.1e} apart, after it moved by {moved:.1e}"
        yield row(f"{kind}: last loss", here.history.loss[-1], "", note="losses to 1e-3, weights to 1e-2 of their way")


class Net(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(24, 48), nn.Linear(48, 8)

    def forward(self, x: Tensor) -> Tensor:
        """The last layer of the first."""
        return self.last(F.silu(self.first(x)))


def equal_to_peft(setting: Setting) -> Iterator[Row]:
    """The adapter that Graft trains and PEFT's, from the same values: the same gradients and the same steps."""
    need("peft", "to compare a training step with its adapter")
    import peft
    from graft_nodes.training.trainable.install import attach, init_trainable
    from graft_nodes.training.trainable.settings import AdapterSettings

    draws = torch.Generator().manual_seed(0)
    plain, other = Net(), Net()
    for parameter in plain.parameters():
        parameter.data = torch.randn(parameter.shape, generator=draws) * 0.2
    other.load_state_dict(plain.state_dict())
    x, y = (torch.randn(16, width, generator=draws).to(setting.device) for width in (24, 8))
    settings = AdapterSettings("lora", targets="all", rank=RANK)
    plain.to(setting.device).requires_grad_(False)
    start = init_trainable(plain, settings, 0, dict(plain.named_parameters()))
    start = {name: tensor + 0.1 * torch.randn(tensor.shape, generator=draws) for name, tensor in start.items()}
    trained = {name: tensor.to(setting.device).requires_grad_() for name, tensor in start.items()}
    config = peft.LoraConfig(r=RANK, lora_alpha=RANK, target_modules=["first", "last"])
    adapted = peft.inject_adapter_in_model(config, other.to(setting.device))
    theirs = _of_peft(adapted)
    for name, tensor in start.items():
        theirs[name].data.copy_(tensor)
    optimizers = [torch.optim.AdamW(group, lr=RATE, weight_decay=0.0) for group in (trained.values(), theirs.values())]
    with attach(plain, settings, trained, lambda: (0, 0, "")), torch.enable_grad():
        for _ in range(STEPS):
            losses = [F.mse_loss(net(x), y) for net in (plain, adapted)]
            for loss, optimizer in zip(losses, optimizers, strict=True):
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-6)
    for name, tensor in trained.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-3, atol=1e-4)
    yield row("last loss", float(losses[0]), "", note=f"losses of {STEPS} AdamW steps to 1e-4, adapters to 1e-3")


def _of_peft(model: nn.Module) -> dict[str, nn.Parameter]:
    """PEFT's factors by Graft's names."""
    found = {}
    for name in ("first", "last"):
        layer: Any = model.get_submodule(name)
        found[f"{name}.lora_down.weight"] = layer.lora_A["default"].weight
        found[f"{name}.lora_up.weight"] = layer.lora_B["default"].weight
    return found


# --- seconds ----------------------------------------------------------------------------------------------------------


def size_of(setting: Setting) -> str:
    """The UNet's shape."""
    if setting.tiny:
        return "small"
    return "400M"


def steps_of(setting: Setting) -> int:
    """How many steps are measured."""
    if setting.tiny:
        return 2
    return 12


def measured(found: dict[str, Any]) -> Iterator[Row]:
    """Speed and memory of one trainer."""
    seconds = statistics.median(found["seconds"])
    note = f"LoRA rank {training.RANK} on every Linear and Conv2d, float32, batch {training.BATCH}; {found['where']}"
    yield row("a step", seconds, "s", note=note)
    yield row("speed", 1 / seconds, "it/s")
    yield row("memory beside the model", found["memory"], "MB")


def graft(setting: Setting) -> Iterator[Row]:
    """Train Step's loop, and the bare loop in turn with it."""
    found = training.graft(size_of(setting), steps_of(setting), setting.comfyui, setting.device)
    yield from measured(found)
    bare = statistics.median(found["bare"])
    yield row("over the bare loop", statistics.median(found["seconds"]) / bare, "times its time", None)


def core(setting: Setting, mode: str) -> Iterator[Row]:
    """ComfyUI's TrainLoraNode."""
    if not setting.comfyui:
        raise CannotRun("there is no ComfyUI checkout: name one with --comfyui or COMFYUI_PATH")
    import comfy_extras.nodes_train as nodes

    if mode == "bypass" and "bypass_mode" not in inspect.getsource(nodes):
        raise CannotRun("this ComfyUI's trainer has no bypass mode")
    yield from measured(training.core(size_of(setting), steps_of(setting), setting.comfyui, mode, setting.device))


def peft(setting: Setting) -> Iterator[Row]:
    """A plain loop over diffusers' UNet with PEFT's adapters."""
    for package in ("diffusers", "peft"):
        need(package, "to measure a plain loop beside Graft's")
    yield from measured(training.peft(size_of(setting), steps_of(setting), setting.device))
