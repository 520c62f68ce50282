"""Activations that wait in host memory come back as they lay: the same numbers in another layout may take another way
through a kernel, to other last bits.
"""

import pytest
import torch
from graft_nodes.tests.second_device.device import DEVICE, meter
from graft_nodes.training.memory.offload import SMALL, activations_on_host
from torch import nn

ROWS, COLUMNS = 256, 128  # above SMALL


class Kept(torch.autograd.Function):
    """Keeps its input for the backward pass, which hands it to `seen`."""

    seen: torch.Tensor

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sum()

    @staticmethod
    def backward(ctx, grad):
        (Kept.seen,) = ctx.saved_tensors
        return torch.zeros_like(Kept.seen)


@pytest.mark.parametrize(
    "layout",
    [
        lambda x: x.clone(),
        lambda x: x.T,
        lambda x: x.chunk(2, dim=1)[1],
        lambda x: x[:, 3:-3],
        lambda x: x[None, ::2, :, None],
        lambda x: x[:, None].expand(-1, 3, -1),
        lambda x: x.unfold(0, 8, 4),
    ],
    ids=["whole", "transposed", "half", "columns", "every other row", "expanded", "overlapping"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tensor_comes_back_as_it_lay(layout, dtype):
    drawn = torch.randn(2 * ROWS, 2 * COLUMNS, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert drawn.nbytes >= 4 * SMALL
    x = drawn.to(DEVICE).requires_grad_()
    with activations_on_host(nn.Identity()):
        laid = layout(x * 1)
        loss = Kept.apply(laid)
        values, strides, shape = laid.detach().cpu(), laid.stride(), laid.shape
        meter.clear()
        del laid
        loss.backward()
    assert Kept.seen.device == DEVICE and Kept.seen.shape == shape and Kept.seen.stride() == strides
    assert meter.uploaded and torch.equal(Kept.seen.cpu(), values)
