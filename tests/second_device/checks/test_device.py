"""The second device does what CUDA does: where tensors may mix, what is counted, what must be waited for."""

import copy

import pytest
import torch
from graft_nodes.tests.second_device.device import DEVICE, MixedDevices, OutOfOrder, meter
from torch import nn
from torch.utils.checkpoint import checkpoint

second = torch.get_device_module("second")


@pytest.fixture(autouse=True)
def counted():
    """Counts from zero."""
    second.synchronize()
    meter.clear()


def on_device(*numbers):
    return torch.tensor(numbers, device=DEVICE)


# --- where tensors are ------------------------------------------------------------------------------------------------


def test_operations_compute_on_the_device():
    left, right = torch.randn(3, 4), torch.randn(4, 5)
    product = left.to(DEVICE) @ right.to(DEVICE)
    assert product.device == DEVICE and type(product) is torch.Tensor
    torch.testing.assert_close(product.cpu(), left @ right)


@pytest.mark.parametrize("operation", [torch.add, torch.matmul, torch.maximum])
def test_tensors_of_two_devices_do_not_mix(operation):
    with pytest.raises((MixedDevices, RuntimeError), match=r"device|CPU"):
        operation(torch.ones(2, 2, device=DEVICE), torch.ones(2, 2))


def test_tensors_of_two_devices_do_not_mix_in_place():
    with pytest.raises((MixedDevices, RuntimeError), match=r"device|CPU"):
        torch.ones(2, device=DEVICE).add_(torch.ones(2))


def test_a_number_may_mix_and_indices_may_cross():
    tensor = on_device(1.0, 2.0, 3.0)
    assert (tensor * torch.tensor(2.0)).tolist() == [2, 4, 6]
    assert tensor[torch.tensor([2, 0])].tolist() == [3, 1]


def test_numbers_mix_in_every_operation():
    """Torch hands a number on as a tensor, and to Python as a number again, which not every operation takes."""
    tensor = torch.tensor([5, 6, 7], dtype=torch.int32, device=DEVICE)
    assert tensor.bitwise_and_(-2).tolist() == [4, 6, 6] and tensor.dtype == torch.int32
    assert (tensor & 4).tolist() == [4, 4, 4] and (on_device(True, False) | True).tolist() == [True, True]
    assert torch.equal(torch.fmod(on_device(5.5), 2.0).cpu(), torch.tensor([1.5]))


@pytest.mark.parametrize("mask", [None, (1, 1, 90, 400), (1, 1, 1, 400)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_has_the_cpus_bytes_and_keeps_no_weights(mask, dtype):
    shapes = ((2, 4, 90, 16), (2, 4, 400, 16), (2, 4, 400, 16))
    given = [torch.randn(shape).to(dtype) for shape in shapes]
    bias = None
    if mask is not None:
        bias = torch.randn(mask).to(dtype)

    def results(device):
        inputs = [tensor.to(device, copy=True).requires_grad_() for tensor in given]
        on_it = bias if bias is None else bias.to(device)
        out = nn.functional.scaled_dot_product_attention(*inputs, attn_mask=on_it)
        kept = meter.allocated
        out.float().square().sum().backward()
        return kept, [out.detach().cpu(), *(tensor.grad.cpu() for tensor in inputs)]

    _, expected = results(torch.device("cpu"))
    before = meter.allocated
    kept, found = results(DEVICE)
    assert all(map(torch.equal, found, expected))
    assert kept - before < 2 * 4 * 90 * 400 * dtype.itemsize


def test_a_mask_that_learns_has_a_gradient():
    query, key = torch.randn(1, 2, 8, 16, device=DEVICE), torch.randn(1, 2, 6, 16, device=DEVICE)
    mask = torch.zeros(1, 1, 8, 6, device=DEVICE, requires_grad=True)
    nn.functional.scaled_dot_product_attention(query, key, key, attn_mask=mask).square().sum().backward()
    assert mask.grad is not None and float(mask.grad.abs().sum()) > 0


def test_views_share_memory():
    tensor = torch.zeros(4, 4, device=DEVICE)
    tensor.view(2, 8)[1].t().fill_(1)
    tensor[:, 0] += 1
    tensor.transpose(0, 1)[3, 0] = 5
    assert tensor.sum(1).tolist() == [6, 1, 5, 5]
    assert tensor[2:].untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn])
def test_types_come_back_as_they_were(dtype):
    tensor = torch.tensor([0.0, 1.0, 1.0]).to(dtype)
    back = tensor.to(DEVICE).cpu()
    assert back.dtype == dtype and back.tolist() == tensor.tolist()


def test_results_take_the_size_that_they_need():
    """torch computes a mean loss into a tensor of the input's size, and shrinks that."""
    found, wanted = torch.arange(12.0, requires_grad=True), torch.arange(12.0).flip(0)
    loss = torch.nn.functional.mse_loss(found.to(DEVICE), wanted.to(DEVICE))
    assert loss.shape == () and loss.device == DEVICE
    torch.testing.assert_close(loss.cpu(), torch.nn.functional.mse_loss(found, wanted))
    smaller = torch.arange(6.0, device=DEVICE)
    at = smaller.data_ptr()
    smaller.resize_(2, 2)
    assert smaller.tolist() == [[0, 1], [2, 3]] and smaller.data_ptr() == at
    with pytest.raises(NotImplementedError, match="enlarges its input"):
        smaller.resize_(3, 3)


def test_in_inference_mode():
    with torch.inference_mode():
        tensor = torch.ones(3, device=DEVICE)
        view = tensor[1:]
    normal = torch.empty(0, device=DEVICE)
    normal.set_(view.untyped_storage(), view.storage_offset(), view.shape, view.stride())
    normal.fill_(2)
    assert tensor.is_inference() and not normal.is_inference() and tensor.tolist() == [1, 2, 2]


# --- modules and gradients --------------------------------------------------------------------------------------------


def test_module_to_keeps_parameter_objects():
    module = nn.Sequential(nn.Linear(3, 4), nn.Conv2d(1, 2, 3))
    objects = {name: id(parameter) for name, parameter in module.named_parameters()}
    values = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    for device in (DEVICE, "cpu", DEVICE):
        module.to(device)
        assert {name: id(parameter) for name, parameter in module.named_parameters()} == objects
        for parameter in module.parameters():
            assert parameter.device == torch.device(device) and parameter.requires_grad
            assert type(parameter) is nn.Parameter
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor.cpu(), values[name])


def test_module_to_takes_gradients_along():
    module = nn.Linear(3, 4).to(DEVICE)
    module(torch.ones(2, 3, device=DEVICE)).sum().backward()
    module.to("cpu")
    assert module.weight.grad.device == torch.device("cpu") and module.weight.grad.unique().tolist() == [2]
    module.to(DEVICE)
    assert module.bias.grad.device == DEVICE and module.bias.grad.tolist() == [2] * 4


def test_data_may_be_set_across():
    parameter = nn.Parameter(torch.ones(2))
    parameter.data = torch.zeros(2, device=DEVICE)
    assert parameter.device == DEVICE and parameter.requires_grad and isinstance(parameter, nn.Parameter)
    parameter.data = torch.full((2,), 3.0)
    assert parameter.tolist() == [3, 3]


def network():
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    return nn.ModuleList([nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), attention, nn.LayerNorm(8)])


def loss_of(parts, x):
    convolution, norm, attention, last = parts
    tokens = norm(convolution(x)).flatten(2).transpose(1, 2)
    return last(attention(tokens, tokens, tokens, need_weights=False)[0]).square().mean() + tokens.mean()


@pytest.mark.parametrize("with_checkpoint", [False, True])
def test_gradients_are_those_of_the_cpu(with_checkpoint):
    here, there = network(), network().to(DEVICE)
    x = torch.randn(2, 3, 4, 4)
    loss_of(here, x).backward()
    if with_checkpoint:
        checkpoint(loss_of, there, x.to(DEVICE), use_reentrant=False).backward()
    else:
        loss_of(there, x.to(DEVICE)).backward()
    for ours, theirs in zip(here.parameters(), there.parameters(), strict=True):
        torch.testing.assert_close(theirs.grad.cpu(), ours.grad)


def test_an_optimizer_steps_as_on_the_cpu():
    here, there = network().double(), network().double().to(DEVICE)
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    for parts, given in ((here, x), (there, x.to(DEVICE))):
        optimizer = torch.optim.AdamW(parts.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            loss_of(parts, given).backward()
            nn.utils.clip_grad_norm_(parts.parameters(), 1.0)
            optimizer.step()
    for ours, theirs in zip(here.parameters(), there.parameters(), strict=True):
        torch.testing.assert_close(
            theirs.cpu(), ours, rtol=1e-4, atol=1e-5
        )  # the order of sums counts where a gradient is 0


def test_a_module_is_copied():
    module = nn.Linear(2, 2).to(DEVICE)
    twin = copy.deepcopy(module)
    twin.weight.data.zero_()
    assert twin.weight.device == DEVICE and module.weight.abs().sum() > 0


def test_autocast_computes_in_the_lower_type():
    layer, x = nn.Linear(4, 4).to(DEVICE), torch.randn(2, 4, device=DEVICE)
    with torch.autocast("second", torch.bfloat16):
        low = layer(x)
        normed = nn.functional.layer_norm(low, (4,))
    assert low.dtype == torch.bfloat16 and normed.dtype == torch.float32 and layer(x).dtype == torch.float32
    low.float().sum().backward()
    assert layer.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_operations_that_autocast_does_not_cast_run_in_it(dtype):
    """As on CUDA: they keep the type of their input, also where torch hands them on as several smaller ones."""
    x = torch.randn(2, 4, device=DEVICE, requires_grad=True)
    layer = nn.Linear(4, 6).to(DEVICE)
    with torch.autocast("second", dtype):
        gate, value = nn.functional.silu(layer(x).view(2, 3, 2).transpose(1, 2)).flatten(1).chunk(2, dim=-1)
        kept = x.reshape(4, 2).clamp(min=-1.0) * 2
    assert gate.dtype == value.dtype == dtype and kept.dtype == torch.float32
    with torch.autocast("cpu", dtype):
        expected = layer.cpu()(x.detach().cpu())
    torch.testing.assert_close(
        torch.cat([gate, value], dim=-1).cpu(),
        nn.functional.silu(expected.view(2, 3, 2).transpose(1, 2)).flatten(1),
        rtol=2e-2,
        atol=2e-2,
    )
    (gate * value).float().sum().backward()
    assert x.grad.dtype == torch.float32 and x.grad.isfinite().all()


# --- generators -------------------------------------------------------------------------------------------------------


def test_generators_belong_to_a_device():
    ours, theirs = (torch.Generator(DEVICE).manual_seed(1) for _ in range(2))
    assert ours.device == DEVICE
    first = torch.randn(4, generator=ours, device=DEVICE)
    assert torch.equal(first, torch.randn(4, generator=theirs, device=DEVICE))
    with pytest.raises(RuntimeError, match="Expected a 'second' device type for generator"):
        torch.randn(4, generator=torch.Generator(), device=DEVICE)


def test_the_device_draws_from_its_own_default_generator():
    before = torch.get_rng_state()
    torch.rand(3, device=DEVICE)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(7)
    first = torch.rand(3, device=DEVICE)
    torch.manual_seed(7)
    assert torch.equal(torch.rand(3, device=DEVICE), first)


# --- what is counted --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wait",
    [
        lambda t: t.sum().item(),
        lambda t: t.cpu(),
        lambda t: t.tolist(),
        lambda t: bool(t.any()),
        lambda t: float(t[0]),
        lambda t: t.cpu().numpy(),
        lambda t: t[t > 1],
        lambda t: t.nonzero(),
        lambda t: torch.equal(t, t),
        lambda t: torch.zeros(3).copy_(t),
        lambda t: torch.zeros(3).copy_(t, non_blocking=True),  # memory that is not pinned
    ],
)
def test_waits_are_counted(wait):
    tensor = on_device(1.0, 2.0, 3.0)
    meter.clear()
    wait(tensor)
    assert len(meter.synchronizations) == 1
    assert __file__ in meter.synchronizations[0]


def test_computing_is_no_wait():
    tensor = on_device(1.0, 2.0, 3.0)
    meter.clear()
    tensor[1:] *= 2
    tensor.clamp_(max=tensor.mean())
    torch.where(tensor > 1, tensor, 0.0).sum()
    assert not meter.synchronizations and not meter.uploaded


def test_numpy_needs_a_copy():
    with pytest.raises(TypeError, match="can't convert"):
        on_device(1.0).numpy()


def test_bytes_that_cross_are_counted():
    tensor = torch.ones(5, dtype=torch.float16).to(DEVICE)
    assert meter.uploaded == 10 and len(meter.blocking_uploads) == 1
    torch.ones(2).to(DEVICE, non_blocking=True)
    assert meter.uploaded == 18 and len(meter.blocking_uploads) == 1
    tensor.cpu()
    assert meter.downloaded == 10


# --- memory -----------------------------------------------------------------------------------------------------------


def test_memory_is_counted_and_given_back():
    before = second.memory_allocated()
    tensor = torch.zeros(1000, device=DEVICE)
    view = tensor[10:]
    assert second.memory_allocated() == before + 4000
    del tensor
    assert second.memory_allocated() == before + 4000
    del view
    assert second.memory_allocated() == before
    assert second.max_memory_allocated() == before + 4000


def test_memory_runs_out():
    tensor = torch.zeros(10, device=DEVICE)
    with meter.limited(100):
        with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
            torch.zeros(1000, device=DEVICE)
        with pytest.raises(torch.OutOfMemoryError):
            torch.ones(1000).to(DEVICE)
        assert (tensor + 1).sum() == 10
    torch.zeros(1000, device=DEVICE)


def test_memory_runs_out_in_the_backward_pass():
    weight = torch.zeros(100, 100, device=DEVICE, requires_grad=True)
    loss = (weight * 2).sum()
    with meter.limited(100), pytest.raises(torch.OutOfMemoryError):
        loss.backward()


# --- order ------------------------------------------------------------------------------------------------------------


def pinned(*numbers):
    return torch.tensor(numbers).pin_memory()


def test_pinned_memory():
    assert pinned(1.0).is_pinned() and torch.empty(3, pin_memory=True).is_pinned()
    assert torch.empty_like(on_device(1.0), device="cpu", pin_memory=True).is_pinned()
    assert on_device(1.0).to("cpu", non_blocking=True).is_pinned()
    assert not torch.empty(3).is_pinned()


def test_a_copy_to_pinned_memory_must_be_waited_for():
    target = torch.zeros(2).pin_memory()
    target.copy_(on_device(1.0, 2.0), non_blocking=True)
    assert not meter.synchronizations and target.isnan().all()
    second.current_stream().synchronize()
    assert target.tolist() == [1, 2]


def test_a_copy_to_pinned_memory_copies_what_was_there_then():
    source, target = on_device(1.0), torch.zeros(1).pin_memory()
    target.copy_(source, non_blocking=True)
    source.fill_(2.0)
    event = second.Event()
    event.record()
    assert not event.query()
    event.synchronize()
    assert event.query() and target.item() == 1


def test_pinned_memory_may_go_back_in_the_same_stream():
    parked = torch.zeros(2).pin_memory()
    parked.copy_(on_device(1.0, 2.0), non_blocking=True)
    back = torch.empty(2, device=DEVICE).copy_(parked, non_blocking=True)
    assert not meter.synchronizations and back.tolist() == [1, 2]


def test_pinned_memory_must_stay_until_its_copy_has_ended():
    source = pinned(1.0, 2.0)
    source.to(DEVICE, non_blocking=True)
    source.fill_(3.0)
    with pytest.raises(OutOfOrder, match="changed before its copy"):
        second.synchronize()


def test_a_copy_on_another_stream_must_be_waited_for():
    side, source = second.Stream(), pinned(1.0)
    with second.stream(side):
        copied = source.to(DEVICE, non_blocking=True)
    with pytest.raises(OutOfOrder, match="may still be writing"):
        copied + 1
    second.current_stream().wait_stream(side)
    assert (copied + 1).item() == 2


def test_what_another_stream_reads_must_not_be_changed():
    side, tensor, target = second.Stream(), on_device(1.0), torch.zeros(1).pin_memory()
    side.wait_stream(second.current_stream())
    event = second.Event()
    with second.stream(side):
        target.copy_(tensor, non_blocking=True)
        event.record()
    with pytest.raises(OutOfOrder, match="may still be reading"):
        tensor.add_(1)
    second.current_stream().wait_event(event)
    tensor.add_(1)


def test_a_side_stream_waits_for_what_it_reads():
    tensor = on_device(1.0).add_(1)
    with second.stream(second.Stream()), pytest.raises(OutOfOrder, match="may still be writing"):
        tensor * 2


def test_pinned_memory_of_another_stream_must_be_waited_for():
    side, tensor, target = second.Stream(), on_device(1.0), torch.zeros(1).pin_memory()
    second.synchronize()
    with second.stream(side):
        target.copy_(tensor, non_blocking=True)
    with pytest.raises(OutOfOrder, match="copy of another stream"):
        target.to(DEVICE, non_blocking=True)
