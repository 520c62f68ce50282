"""A training step: equal to the CPU's and to PEFT's; of SDXL's shape beside other trainers, as benchmarks/training.py
measures them.
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

from .case import CHECKED, CannotRun, Case, Row, Setting, at_most, need, row, use_device
from .sdxl_step import clear, size_of, steps_of
from .small_run import STEPS, begun, dataset, denoiser_on

RANK, RATE = 4, 1e-2


def cases(setting: Setting) -> list[Case]:
    """Each trainer, and two checks."""
    training.open_host(setting.comfyui, setting.device)
    use_device(setting.device)
    return [
        Case("ComfyUI's own trainer", functools.partial(core, setting, "weight")),
        Case("ComfyUI's own trainer, bypass", functools.partial(core, setting, "bypass")),
        Case("diffusers and PEFT", functools.partial(peft, setting)),
        Case("equal to the CPU", functools.partial(equal_to_cpu, setting)),
        Case("equal to PEFT", functools.partial(equal_to_peft, setting)),
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
        note = "losses to 1e-3, weights to 1e-2 of their way"
        yield row(f"{kind}: last loss", here.history.loss[-1], "", CHECKED, note=note)


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
    yield row(
        "last loss", float(losses[0]), "", CHECKED, note=f"losses of {STEPS} AdamW steps to 1e-4, adapters to 1e-3"
    )


def _of_peft(model: nn.Module) -> dict[str, nn.Parameter]:
    """PEFT's factors by Graft's names."""
    found = {}
    for name in ("first", "last"):
        layer: Any = model.get_submodule(name)
        found[f"{name}.lora_down.weight"] = layer.lora_A["default"].weight
        found[f"{name}.lora_up.weight"] = layer.lora_B["default"].weight
    return found


# --- seconds ----------------------------------------------------------------------------------------------------------

NOT_MORE = 1.0  # of another trainer's seconds and memory


@functools.cache
def ours(setting: Setting) -> dict[str, Any]:
    """Train Step's loop, measured once for all that it is compared with."""
    clear(setting.device)
    return training.graft(size_of(setting), steps_of(setting), setting.comfyui, setting.device, torch.bfloat16, "bf16")


def compared(setting: Setting, theirs: dict[str, Any]) -> Iterator[Row]:
    """Graft's seconds and memory over those of another trainer."""
    graft = ours(setting)
    seconds, other = (statistics.median(found["seconds"]) for found in (graft, theirs))
    note = f"of {other:.3g} s; LoRA rank {training.RANK} on every Linear and Conv2d, bf16; {theirs['where']}"
    yield row("a step of Graft's", seconds, "s", at_most(NOT_MORE), seconds / other, note)
    if setting.device.type == "cuda":
        ratio, note = graft["memory"] / theirs["memory"], f"of {theirs['memory']:,.0f} MB"
        yield row("memory beside the model", graft["memory"], "MB", at_most(NOT_MORE), ratio, note)


def core(setting: Setting, mode: str) -> Iterator[Row]:
    """Beside ComfyUI's TrainLoraNode."""
    if not setting.comfyui:
        raise CannotRun("there is no ComfyUI checkout: name one with --comfyui or COMFYUI_PATH")
    import comfy_extras.nodes_train as nodes

    if mode == "bypass" and "bypass_mode" not in inspect.getsource(nodes):
        raise CannotRun("this ComfyUI's trainer has no bypass mode")
    ours(setting)
    clear(setting.device)
    steps = steps_of(setting)
    yield from compared(
        setting, training.core(size_of(setting), steps, setting.comfyui, mode, setting.device, torch.bfloat16)
    )


def peft(setting: Setting) -> Iterator[Row]:
    """Beside a plain loop over diffusers' UNet with PEFT's adapters."""
    for package in ("diffusers", "peft"):
        need(package, "to measure a plain loop beside Graft's")
    ours(setting)
    clear(setting.device)
    yield from compared(setting, training.peft(size_of(setting), steps_of(setting), setting.device, torch.bfloat16))
