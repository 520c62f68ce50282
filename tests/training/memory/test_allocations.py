"""Counting memory on the meta device, tensor by tensor."""

import torch
from graft_nodes.training.memory.allocations import META, Allocations, AutocastOnMeta, FusedAttention, on_meta
from torch.nn import functional


def test_memory_counts_once_while_it_lives():
    with Allocations() as counter:
        with counter.count_as("a"):
            first = torch.empty(1000, device=META)
        view = first[:10]
        assert counter.now["a"] == counter.total == 4000
        with counter.count_as("b"):
            second = first.to(torch.bfloat16)
        assert (counter.now["b"], counter.peak) == (2000, 6000)
        del first
        assert counter.total == 6000  # the view holds it
        del view
        assert counter.total == 2000 and counter.peak == 6000
        counter.count(second, "c")
        assert (counter.now["b"], counter.now["c"]) == (0, 2000)
        counter.forget_peak()
        assert counter.peak == 2000 and counter.at_peak["c"] == 2000


def test_numbers_read_from_it_are_1_and_host_memory_does_not_count():
    with Allocations() as counter:
        total = torch.empty(5, device=META).sum()
        assert float(total) == 1.0 and torch.stack([total, total]).tolist() == [1.0, 1.0]
        before = counter.total
        on_host = torch.empty(5, device=META).cpu()
        assert on_host.device.type == "cpu" and counter.total == before


def test_what_goes_to_the_host_takes_no_memory_there():
    with Allocations() as counter:
        tensor = torch.empty(2**20, 2**20, device=META)  # 4 TB
        on_host = torch.empty_like(tensor, device="cpu").copy_(tensor)
        before = counter.total
        assert on_host.device.type == "cpu" and on_host.shape == tensor.shape and counter.total == before
        back = torch.empty_like(on_host, device=META).copy_(on_host)
        assert counter.total == 2 * before and back.stride() == tensor.stride()


def test_attention_keeps_its_input_its_output_and_a_number_for_each_row():
    with FusedAttention(), Allocations() as counter:
        query = torch.empty(2, 4, 100, 8, device=META, requires_grad=True)
        inputs = counter.total
        output = functional.scaled_dot_product_attention(query, query, query)
        assert counter.total - inputs == 4 * (query.numel() + 2 * 4 * 100)  # no table of 100 x 100
        output.sum().backward()
        assert query.grad.shape == query.shape


def test_autocast_gives_the_types_of_pytorchs():
    with AutocastOnMeta(torch.bfloat16):
        x, weight = torch.empty(4, 8, device=META), torch.empty(8, 8, device=META)
        assert functional.linear(x, weight).dtype == (x @ weight).dtype == torch.bfloat16
        assert functional.layer_norm((x @ weight), (8,)).dtype == torch.float32
        assert (x + 1).dtype == torch.float32


def test_a_module_has_its_own_tensors_back():
    layer = torch.nn.BatchNorm1d(4)
    before = {name: id(tensor) for name, tensor in (*layer.named_parameters(), *layer.named_buffers())}
    seen = []
    with on_meta(layer, seen.append):
        assert all(tensor.device == META for tensor in (*layer.parameters(), *layer.buffers()))
    assert len(seen) == 5
    assert {name: id(tensor) for name, tensor in (*layer.named_parameters(), *layer.named_buffers())} == before
