"""Merging LoRAs into a weight on a device: few kernels, no wait, and as exact as on the CPU."""

import pytest
import torch
from graft_nodes.patches.adapters.lora import LoRA
from graft_nodes.patches.patching.fuse import Patch, apply_patches
from graft_nodes.tests.second_device.device import DEVICE, meter
from torch.utils._python_dispatch import TorchDispatchMode

MOST = 60
FP8 = torch.float8_e4m3fn


class Kernels(TorchDispatchMode):
    """Counts the operations on the device that compute or copy; views start no kernel."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        is_view = any(one.alias_info is not None and not one.alias_info.is_write for one in func._schema.returns)
        made = result if isinstance(result, torch.Tensor) else None
        makes_nothing = "empty" in func._schema.name
        if not is_view and not makes_nothing and made is not None and made.device.type == DEVICE.type:
            self.count += 1
        return result


def _loras(count, rows, columns, dtype):
    draws = torch.Generator().manual_seed(3)
    patches = []
    for _ in range(count):
        up, down = torch.randn(rows, 16, generator=draws) * 0.05, torch.randn(16, columns, generator=draws) * 0.05
        patches.append(Patch(LoRA(up.to(dtype), down.to(dtype)), 0.7))
    return patches


@pytest.mark.parametrize("files", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("dtype", "seed"),
    [(torch.float32, None), (torch.bfloat16, None), (torch.float16, None), (torch.bfloat16, 5), (FP8, 5)],
)
def test_a_weight_takes_few_kernels_and_no_wait(dtype, seed, files):
    base = (torch.randn(1280, 5120, generator=torch.Generator().manual_seed(1)) * 0.1).to(dtype)
    patches = _loras(4, 1280, 5120, files)
    exact = base.double()
    for patch in patches:
        exact += 0.7 * (patch.layer.up.double() @ patch.layer.down.double())
    here = apply_patches(base, patches, seed=seed)
    on_device = base.to(DEVICE)
    meter.clear()
    with Kernels() as kernels:
        apply_patches(on_device, patches, out=on_device, seed=seed)
    assert kernels.count <= MOST
    assert not meter.synchronizations and not meter.blocking_uploads
    errors = [(found.double() - exact).abs().mean() for found in (here, on_device.cpu())]
    assert errors[1] <= 1.0001 * errors[0]


def test_a_large_weight_is_merged_in_two_parts(monkeypatch):
    monkeypatch.setattr("graft_nodes.patches.patching.fuse.DEVICE_BLOCK", 1000)
    base = torch.randn(65, 40, generator=torch.Generator().manual_seed(1)).to(FP8)
    patches = _loras(4, 65, 40, torch.float32)
    on_device = base.to(DEVICE)
    with Kernels() as kernels:
        apply_patches(on_device, patches, out=on_device, seed=5)
    assert kernels.count <= MOST
    exact = base.double() + sum(0.7 * (patch.layer.up.double() @ patch.layer.down.double()) for patch in patches)
    assert ((on_device.cpu().double() - exact).abs() <= exact.abs() / 8 + 2**-9).all()  # the distance between neighbors
