"""The attention that a model is trained with: the same numbers from a kernel that keeps less, other nodes' overrides,
refusals.
"""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from graft_nodes.patches.models.attention_kernels import TrainingKernel
from graft_nodes.patches.token_downsampling.attention_override import Guard
from torch.nn.attention import SDPBackend, sdpa_kernel


def attention_sub_quad(q, k, v, heads):
    """Attention written out, under the name of a kernel of ComfyUI that keeps every score."""
    q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (q, k, v))
    return ((q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v).transpose(1, 2).flatten(2)


def attention_pytorch(q, k, v, heads):
    q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def attention_xformers(q, k, v, heads):
    return torch.full_like(q, 7.0)


def attention_sage(q, k, v, heads):
    raise AssertionError("it was called")


def _tensors(dtype=torch.float64):
    draws = torch.Generator().manual_seed(0)
    return [torch.randn(2, n, 16, generator=draws, dtype=dtype).requires_grad_() for n in (12, 5, 5)]


def test_a_kernel_that_keeps_every_score_gives_way_to_the_same_numbers():
    names = []

    def sdpa(q, k, v, heads):
        names.append("pytorch")
        return attention_pytorch(q, k, v, heads)

    given, reference = _tensors(), _tensors()
    out = TrainingKernel(sdpa)(attention_sub_quad, *given, 4)
    expected = attention_sub_quad(*reference, 4)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    found = torch.autograd.grad(out.square().sum(), given)
    torch.testing.assert_close(found, torch.autograd.grad(expected.square().sum(), reference), rtol=1e-11, atol=1e-11)
    assert names == ["pytorch"]


@pytest.mark.parametrize("kernel", [attention_sage, attention_xformers])
def test_whatever_comfyui_was_started_with_pytorchs_attention_trains(kernel):
    given, reference = _tensors(), _tensors()
    out, expected = TrainingKernel(attention_pytorch)(kernel, *given, 4), attention_pytorch(*reference, 4)
    assert torch.equal(out, expected)
    found = torch.autograd.grad(out.square().sum(), given)
    assert all(map(torch.equal, found, torch.autograd.grad(expected.square().sum(), reference)))


@pytest.mark.parametrize("kind", ["bool", "float", "broadcast"])
def test_masked_attention_has_the_same_gradients_on_each_kernel(kind):
    """PyTorch chooses among these by shapes and strides. Here each is chosen on its own."""
    draws = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, 4, n, 8, generator=draws, dtype=torch.float64) for n in (12, 7, 7))
    mask = torch.rand(2, 1, 12, 7, generator=draws) > 0.3
    mask[..., 0] = True
    if kind != "bool":
        mask = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -torch.inf)
    if kind == "broadcast":
        mask = mask[:1, :, :1].expand(2, 4, 12, 7)
    results = []
    for kernel in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION):
        given = [tensor.clone().requires_grad_() for tensor in (q, k, v)]

        def sdpa(q, k, v, heads, mask, kernel=kernel):
            with sdpa_kernel(kernel):
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)

        out = TrainingKernel(sdpa)(attention_sage, *given, 4, mask)
        results.append((out, *torch.autograd.grad(out.square().sum(), given)))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_another_nodes_override_is_called_with_the_kernel_that_trains():
    seen = []

    def theirs(kernel, q, k, v, heads):
        seen.append(kernel)
        return kernel(q, k, v, heads) * 2

    given = _tensors()
    out = TrainingKernel(attention_pytorch, theirs)(attention_sub_quad, *given, 4)
    assert seen == [attention_pytorch]
    torch.testing.assert_close(out, 2 * attention_sub_quad(*given, 4), rtol=1e-12, atol=1e-12)


def test_an_inference_only_override_is_refused_by_name():
    with pytest.raises(ValueError, match=r"SageAttention .* has no backward pass"):
        TrainingKernel(attention_pytorch, attention_sage)(attention_sub_quad, *_tensors(), 4)


@pytest.mark.parametrize(
    ("name", "refused"),
    [
        ("sageattn", True),
        ("my_sage_attn", True),
        ("FastSageAttention", True),
        ("SAGE", True),
        ("attn_INT8", True),
        ("fp8_attention", True),
        ("usage_logging_attention", False),
        ("MessageBus", False),
        ("passage", False),
        ("attention", False),
    ],
)
def test_other_packs_overrides_are_told_by_words_of_their_names(name, refused):
    def override(kernel, *args):
        return kernel(*args)

    override.__qualname__ = name
    with pytest.raises(ValueError, match="inference only") if refused else contextlib.nullcontext():
        TrainingKernel(attention_pytorch, override)(attention_sub_quad, *_tensors(), 4)


@pytest.mark.parametrize("name", ["OutOfMemoryError", "AcceleratorError"])
def test_a_devices_error_is_not_the_overrides(name):
    """The host frees memory on it; any other error in an override beside token downsampling is explained."""

    def override(kernel, *args):
        raise error("what happened")

    q, k, v = _tensors()
    for error, message in (
        (getattr(torch, name), "^what happened$"),
        (RuntimeError, "cannot be combined with Apply ToDo"),
    ):
        with pytest.raises(error, match=message):
            Guard(override, 0)(attention_pytorch, q, k, v, 4)


def test_an_override_that_fails_where_nothing_is_thinned_fails_as_it_is():
    def override(kernel, *args):
        raise RuntimeError("heads of 64 only")

    q, k, v = _tensors()
    with pytest.raises(RuntimeError, match=r"^heads of 64 only$"):
        Guard(override, 0)(attention_pytorch, q, q, q, 4)
    with pytest.raises(RuntimeError, match=r"^heads of 64 only$"):  # the text's
        Guard(override, k.shape[1])(attention_pytorch, q, k, v, 4)


@pytest.mark.parametrize(
    ("types", "given"),
    [
        ((torch.float32, torch.float32, torch.bfloat16), torch.bfloat16),  # norms under autocast: Wan, Qwen-Image
        ((torch.bfloat16, torch.bfloat16, torch.float32), torch.bfloat16),
        ((torch.float32, torch.float16, torch.float16), torch.float16),
        ((torch.float32, torch.float32, torch.float32), torch.float32),
    ],
)
@pytest.mark.parametrize("with_override", [False, True])
def test_kernels_get_one_type(types, given, with_override):
    seen = []

    def attention_pytorch(q, k, v, heads):
        seen.extend((q.dtype, k.dtype, v.dtype))
        return q + k + v

    def other_nodes(kernel, *given):
        return kernel(*given)

    previous = other_nodes if with_override else None
    q, k, v = (torch.ones(1, 2, 8, dtype=dtype, requires_grad=True) for dtype in types)
    TrainingKernel(attention_pytorch, previous)(attention_pytorch, q, k, v, 1).sum().backward()
    assert seen == [given] * 3
    assert [q.grad.dtype, k.grad.dtype, v.grad.dtype] == list(types)
