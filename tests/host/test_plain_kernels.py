"""comfy-kitchen's kernels under autograd: its plain code, against formulas written out and against its own kernels."""

import pytest
import torch
from graft_nodes.host.plain_kernels import PlainKernels
from torch.utils._python_dispatch import TorchDispatchMode

kitchen = pytest.importorskip("comfy_kitchen")


def _random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _turns(tokens, pairs):
    """Rotations (1, 1, T, pairs, 2, 2) and the same as complex numbers (1, 1, T, pairs)."""
    angles = _random(1, 1, tokens, pairs, seed=9)
    cos, sin = angles.cos(), angles.sin()
    return torch.stack([cos, -sin, sin, cos], -1).unflatten(-1, (2, 2)), torch.polar(torch.ones_like(angles), angles)


def _turned(x, turns):
    """Rotates the pairs (first half, second half) of the last dimension, as complex numbers."""
    first, second = x.chunk(2, -1)
    pairs = torch.complex(first, second) * turns
    return torch.cat([pairs.real, pairs.imag], -1)


def _normed(x, scale):
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * scale


class Called(TorchDispatchMode):
    """The operators that are called while it is entered."""

    def __enter__(self):
        self.names = []
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_gradients_of_rotations_with_and_without_norm():
    matrices, turns = _turns(5, 4)
    scale = _random(8, seed=3)
    cases = [
        (lambda q, k: kitchen.apply_rope_split_half(q, k, matrices), lambda x: _turned(x, turns)),
        (
            lambda q, k: kitchen.rms_rope_split_half(q, k, matrices, scale, scale, 1e-6),
            lambda x: _turned(_normed(x, scale), turns),
        ),
    ]
    for kernel, formula in cases:
        q, k = (_random(2, 3, 5, 8, seed=seed).requires_grad_() for seed in (1, 2))
        with PlainKernels():
            outputs = kernel(q, k)
        for given, output in zip((q, k), outputs, strict=True):
            assert torch.allclose(output, formula(given), atol=1e-9)
            direction = _random(*output.shape, seed=4)
            (found,) = torch.autograd.grad((output * direction).sum(), given)
            (expected,) = torch.autograd.grad((formula(given) * direction).sum(), given)
            assert torch.allclose(found, expected, atol=1e-9)


@pytest.mark.parametrize("name", ["adaln", "rms_adaln"])
def test_other_kernels_with_plain_code_get_it_too(name):
    given = [_random(2, 3, 8, seed=seed).requires_grad_() for seed in (1, 2, 3)]
    with PlainKernels():
        assert torch.autograd.gradcheck(getattr(kitchen, name), given)
        assert torch.autograd.gradcheck(
            lambda *values: getattr(torch.ops.comfy_kitchen, name).default(*values, 1e-6), given
        )


def test_the_kernel_itself_runs_without_gradients_and_afterwards():
    x, shift = _random(2, 3, 8).float(), torch.zeros(8)
    graded = x.clone().requires_grad_()
    with PlainKernels(), Called() as called:
        kitchen.adaln(x, shift, shift)
        with torch.no_grad():
            kitchen.adaln(graded, shift, shift)
    assert called.names == ["comfy_kitchen.adaln.default"] * 2
    with PlainKernels():
        inside = kitchen.adaln(graded, shift, shift)
    inside.sum().backward()
    after = kitchen.adaln(graded, shift, shift)
    assert torch.equal(after, inside)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        after.sum().backward()


def test_a_kernel_without_plain_code_refuses_by_its_name():
    @torch.library.custom_op("comfy_kitchen::graft_double", mutates_args=())
    def graft_double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    graded = _random(4, 8).requires_grad_()
    with PlainKernels(), pytest.raises(RuntimeError, match=r"graft_double.*no autograd formula"):
        torch.ops.comfy_kitchen.graft_double(graded).sum().backward()
