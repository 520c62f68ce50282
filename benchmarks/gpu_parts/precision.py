"""Which type a card computes in, one copy of frozen weights whatever type they were loaded in, and fp16 with its loss
scale.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from graft_nodes.training.memory.cast_weights import cast_weights
from graft_nodes.training.optimizers.precision import LossScale
from torch import Tensor, nn

from .case import CHECKED, Case, Row, Setting, at_most, open_host, row

DEPTH = 8
PEAK = 1.02  # at most, of a step on weights that were loaded in another type
ERROR = 0.02  # at most, of gradients in fp16 that would vanish without a loss scale


def cases(setting: Setting) -> list[Case]:
    """The answer, the memory, and the numbers."""
    return [
        Case("what precision auto means", partial(automatic, setting)),
        Case("one copy of frozen weights", partial(one_copy, setting)),
        Case("small gradients in fp16", partial(small_gradients, setting)),
    ]


def automatic(setting: Setting) -> Iterator[Row]:
    """bf16 on a card that computes it, by its compute capability; fp16 on an older one."""
    open_host(setting)
    from graft_nodes.host.device_memory import half_type

    found = half_type(setting.device)
    if setting.device.type != "cuda":
        assert found is None, f"auto means {found} on {setting.device.type}, expected the model's own type"
    elif not torch.version.hip:
        expected = torch.bfloat16 if torch.cuda.get_device_capability(setting.device)[0] >= 8 else torch.float16
        assert found == expected, f"auto means {found} on this card, expected {expected}"
    name = str(found or "the model's own type")
    note = f"{name}, as its compute capability says"
    yield row("bytes of a number", (found or torch.float32).itemsize, "bytes", CHECKED, note=note)


def network(setting: Setting, dtype: torch.dtype) -> nn.Module:
    """Frozen layers; the same weights in every type that bf16 has numbers for."""
    width = 64 if setting.tiny else 4096
    draws = torch.Generator().manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(DEPTH):
        layer = nn.Linear(width, width)
        with torch.no_grad():
            for parameter in layer.parameters():
                drawn = torch.randn(parameter.shape, generator=draws) * width**-0.5
                parameter.copy_(drawn.half().bfloat16())
        layers += [nn.LayerNorm(width), layer, nn.SiLU()]
    for layer in layers:
        if isinstance(layer, nn.Linear):
            layer.to(dtype)
    return nn.Sequential(*layers).requires_grad_(False).to(setting.device)


def step(setting: Setting, model: nn.Module) -> tuple[Tensor, int]:
    """The gradient of the input after a step under bf16 autocast, and the peak above what there was before."""
    module = getattr(torch, setting.device.type)
    draws = torch.Generator().manual_seed(1)
    x = torch.randn(64, model[1].in_features, generator=draws).to(setting.device).requires_grad_()  # type: ignore[index]
    counted = hasattr(module, "reset_peak_memory_stats")
    if counted:
        module.reset_peak_memory_stats()
    with torch.autocast(setting.device.type, torch.bfloat16):
        out = model(x)
    out.float().square().sum().backward()
    assert x.grad is not None
    return x.grad.cpu(), module.max_memory_allocated() if counted else 0


def one_copy(setting: Setting) -> Iterator[Row]:
    """The peak of a step on weights that were loaded in fp16 or float32, beside that of bf16 weights."""
    model = network(setting, torch.bfloat16)
    expected, least = step(setting, model)
    del model
    for dtype in (torch.float16, torch.float32):
        model = network(setting, dtype)
        before = {name: parameter.cpu().clone() for name, parameter in model.named_parameters()}
        with cast_weights(model, torch.bfloat16):
            found, peak = step(setting, model)
        assert torch.equal(found, expected), f"loaded in {dtype}, the gradients are others"
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter.cpu(), before[name]), f"{name} has other bytes afterwards"
        if least:
            yield row(f"peak, loaded in {dtype}", peak / 2**20, "MiB", at_most(PEAK), peak / least, "of bf16 weights")
        else:
            yield row(
                f"loaded in {dtype}", 1, "", CHECKED, note="equal gradients; memory is not counted on this device"
            )
        del model, before


def small_gradients(setting: Setting) -> Iterator[Row]:
    """Gradients that fp16 has no numbers for, through a network in fp16, beside float32."""
    scale = LossScale({})
    found = {}
    for dtype in (torch.float32, torch.float16):
        model = network(setting, dtype).to(dtype)
        x = torch.linspace(-1, 1, 64 * model[1].in_features).view(64, -1).to(setting.device, dtype).requires_grad_()  # type: ignore[index]
        loss = 1e-9 * model(x).float().sum()
        scale.scale_loss(loss).backward()
        gradient = {"x": x.detach().float().requires_grad_()}
        assert x.grad is not None
        gradient["x"].grad = x.grad.float()
        assert scale.unscale_(gradient), f"the gradients in {dtype} are not finite"
        found[dtype] = gradient["x"].grad.cpu()
    error = float((found[torch.float16] - found[torch.float32]).norm() / found[torch.float32].norm())
    yield row("error of the gradients", error, "", at_most(ERROR), note="of float32's")
