"""The plan of a step's memory: against counts by hand, and against what PyTorch's own allocator records."""

from dataclasses import asdict, replace

import pytest
import torch
from graft_nodes.ema.decay import EMASettings
from graft_nodes.tests.allocated import most_held, recorded
from graft_nodes.training.data.tags import Caption
from graft_nodes.training.memory.allocations import META
from graft_nodes.training.memory.quantized_base import base
from graft_nodes.training.objective.settings import ObjectiveSettings
from graft_nodes.training.run.batch_loader import BatchSchedule
from graft_nodes.training.run.memory_plan import largest_batch, plan, plan_in_main_memory
from graft_nodes.training.run.step import advance_
from graft_nodes.training.run.workspace import Workspace
from graft_nodes.training.trainable.settings import AdapterSettings

FULL = AdapterSettings("full", targets="all")
LORA = AdapterSettings(targets="all", rank=4)
INT8 = AdapterSettings(targets="all", rank=4, base_weights="int8")
NF4 = replace(INT8, base_weights="nf4")
WIDTH, SIDE, BATCH = 64, 24, 4
NF4_TABLES = 256 * 2 * 4 + 65 * (4 + 1)  # bytes: two numbers of each byte, a bound and a code of each cell


def _run(lab, adapter, device, **optimizer):
    class OnDevice(lab.Flow):
        def denoise(self, x, sigma, conditionings, options):
            moved = [replace(one, context=one.context.to(x.device)) for one in conditionings]
            return super().denoise(x, sigma, moved, options)

    denoiser, dataset = OnDevice(lab.Net(WIDTH)), lab.pictures(shape=(WIDTH, SIDE, SIDE))
    state = lab.state(denoiser, dataset, adapter, **{"precision": "float32", "batch_size": BATCH, **optimizer})
    denoiser.device = device
    return state, denoiser, dataset


def _planned(lab, adapter, **optimizer):
    return plan(*_run(lab, adapter, META, **optimizer))


def _measured(lab, adapter, **optimizer):
    """The most that PyTorch's CPU allocator has handed out for a second step, above what there was before the run."""
    state, denoiser, dataset = _run(lab, adapter, torch.device("cpu"), **optimizer)
    with recorded() as record:
        work = Workspace(state, denoiser, largest_batch(dataset, BATCH))
        work.loader.until = 2
        with work.install():
            advance_(work)
            advance_(work)
    work.close()
    return most_held(record)


def _bytes(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize("adapter", [LORA, FULL], ids=["lora", "full"])
def test_weights_trained_tensors_optimizer_and_average_are_counted_exactly(lab, adapter):
    state, denoiser, dataset = _run(lab, adapter, META)
    parts = plan(state, denoiser, dataset).parts
    network = _bytes([*denoiser.module.parameters(), *denoiser.module.buffers()])
    trained = _bytes(state.trained.values())
    steps = 4 * len(state.trained)  # AdamW's count of each tensor, which is on the CPU unless fused
    assert parts["weights"] == network and parts["trained"] == parts["average"] == trained
    assert 2 * trained <= parts["optimizer"] <= 2 * trained + steps


def test_zero_terminal_snr_is_planned_as_any_v_model(lab):
    """On the meta device the noise levels have no values, by which a step is refused that ends with signal."""
    state, denoiser, dataset = _run(lab, LORA, META)
    denoiser.prediction = "v"
    terminal = replace(state, settings=replace(state.settings, objective=ObjectiveSettings(zero_terminal_snr=True)))
    assert plan(terminal, denoiser, dataset) == plan(state, denoiser, dataset)


@pytest.mark.parametrize("adapter", [LORA, FULL], ids=["lora", "full"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_peak_is_what_pytorchs_allocator_measures(lab, adapter, checkpointing):
    planned = _planned(lab, adapter, checkpointing=checkpointing)
    own = planned.peak - planned.parts["weights"]  # the network was there before
    assert own == pytest.approx(_measured(lab, adapter, checkpointing=checkpointing), rel=0.1)


def test_savings_save_what_they_move_or_narrow(lab):
    plain, half = _planned(lab, FULL), _planned(lab, FULL, precision="full-bf16")
    assert half.parts["trained"] * 2 == plain.parts["trained"]
    assert _planned(lab, FULL, offload="optimizer").parts["optimizer"] == 0
    outside = 2 * 4 * WIDTH  # weight and bias of the norm
    assert _planned(lab, LORA, offload="layers", swapped_blocks=2).parts["weights"] == outside
    block = (plain.parts["weights"] - outside) // 2
    assert _planned(lab, LORA, offload="layers", swapped_blocks=1).parts["weights"] == outside + block
    assert _planned(lab, LORA, offload="layers").blocks == (block, block)
    assert _planned(lab, LORA, checkpointing=True).peak < 0.8 * _planned(lab, LORA).peak
    assert _planned(lab, LORA, batch_size=1).parts["activations"] < 0.3 * _planned(lab, LORA).parts["activations"]
    assert _planned(lab, LORA, offload="activations").peak < 0.8 * _planned(lab, LORA).peak
    assert _planned(lab, FULL, optimizer="sgd").parts["optimizer"] == plain.parts["trained"]


@pytest.mark.parametrize(("base_weights", "shared"), [("int8", 0), ("int8 weight-only", 0), ("nf4", NF4_TABLES)])
def test_quantized_weights_are_counted_in_place_of_the_models_own_or_beside_them(lab, base_weights, shared):
    adapter = replace(INT8, base_weights=base_weights)
    state, denoiser, dataset = _run(lab, adapter, META)
    network = _bytes([*denoiser.module.parameters(), *denoiser.module.buffers()])
    layers = [part for part in denoiser.module.modules() if isinstance(part, torch.nn.Linear)]
    floats = _bytes([layer.weight for layer in layers])
    if base_weights == "nf4":
        size = shared + sum(layer.weight.numel() // 2 + 4 * layer.weight.numel() // 64 for layer in layers)
    else:
        size = sum(layer.weight.numel() + 4 * layer.out_features for layer in layers)
    assert plan(state, denoiser, dataset).parts["weights"] == network - floats + size
    on_host = plan(state, denoiser, dataset, on_host=True)
    assert on_host.parts["weights"] == network + size
    own = on_host.peak - network
    assert own == pytest.approx(_measured(lab, adapter), rel=0.1)


@pytest.mark.parametrize(("base_weights", "shared"), [("int8", 0), ("int8 weight-only", 0), ("nf4", NF4_TABLES)])
def test_quantized_layers_in_host_memory_take_none_of_the_devices(lab, monkeypatch, base_weights, shared):
    monkeypatch.setattr(base, "SMALL", 0)
    adapter = replace(INT8, base_weights=base_weights)
    assert _planned(lab, adapter, offload="layers", swapped_blocks=2).parts["weights"] == shared + 2 * 4 * WIDTH


@pytest.mark.parametrize("adapter", [LORA, INT8, NF4], ids=["lora", "int8", "nf4"])
def test_planning_leaves_no_trace(lab, adapter):
    state, denoiser, dataset = _run(lab, adapter, META)
    before = {name: (id(p), p.detach().clone()) for name, p in denoiser.module.named_parameters()}
    drawn = torch.random.get_rng_state()
    plan(state, denoiser, dataset)
    assert torch.equal(torch.random.get_rng_state(), drawn)
    for name, p in denoiser.module.named_parameters():
        assert id(p) == before[name][0] and torch.equal(p, before[name][1])


def test_the_largest_batch_counts(lab):
    small, large = lab.pictures(shape=(WIDTH, 8, 8)), lab.pictures(shape=(WIDTH, 16, 16))
    mixed = replace(small, images=small.images + large.images)
    assert {tuple(image.latent.shape) for image in largest_batch(mixed, 3).images} == {(WIDTH, 16, 16)}
    own = replace(mixed, images=(replace(small.images[0], batch_size=9), *large.images))
    assert len(largest_batch(own, 2).images) == 9


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("loaded", [torch.float16, torch.float32])
def test_frozen_weights_of_another_type_are_cast_once(lab, loaded, checkpointing):
    """Autograd would keep a second copy of each: SDXL is loaded in fp16, and cards compute in bf16."""
    found = {}
    for dtype in (torch.bfloat16, loaded):
        state, denoiser, dataset = _run(lab, LORA, META, precision="bf16", checkpointing=checkpointing)
        denoiser.module.to(torch.bfloat16)
        for part in denoiser.module.modules():
            if isinstance(part, (torch.nn.Linear, torch.nn.Conv2d)):
                part.to(dtype)
        forward = denoiser.module.forward
        denoiser.module.forward = lambda *given, forward=forward: forward(*(one.to(torch.bfloat16) for one in given))
        found[dtype] = plan(state, denoiser, dataset)
    assert found[loaded] == found[torch.bfloat16]


def test_fp16_takes_what_bf16_takes(lab):
    assert _planned(lab, LORA, precision="fp16") == _planned(lab, LORA, precision="bf16")
    assert _planned(lab, LORA, precision="fp16").peak < _planned(lab, LORA).peak


def test_moments_of_8_bits_take_what_bitsandbytes_gives_them(lab):
    library = pytest.importorskip("bitsandbytes")
    wide = AdapterSettings(targets="all", rank=80)  # tensors with more and with fewer numbers than 4096
    state, denoiser, dataset = _run(lab, wide, META, optimizer="adamw8bit")
    planned = plan(state, denoiser, dataset)
    weights = [torch.nn.Parameter(tensor.clone()) for tensor in state.trained.values()]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer = library.optim.AdamW8bit(weights)
    optimizer.step()
    states = [slot for tensors in optimizer.state.values() for name, slot in tensors.items() if name[:4] != "qmap"]
    own = _bytes(slot for slot in states if isinstance(slot, torch.Tensor))
    assert planned.parts["optimizer"] == own  # without the two tables of 1 KB that all tensors share
    assert {slot.dtype for slot in states if isinstance(slot, torch.Tensor)} == {torch.float32, torch.uint8}


def test_a_plan_needs_no_text_encoder_for_captions_that_vary(lab):
    state, denoiser, dataset = _run(lab, LORA, META)
    image = replace(dataset.images[0], caption_template=Caption(("not encoded",)))
    varying = replace(dataset, images=(image,) * 2)
    assert plan(state, denoiser, varying) == plan(state, denoiser, dataset)


def test_micro_batches_after_the_second_take_no_more(lab):
    assert _planned(lab, LORA, accumulation=2) == _planned(lab, LORA, accumulation=5)
    assert _planned(lab, FULL, accumulation=2).peak > _planned(lab, FULL).peak


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5])
@pytest.mark.parametrize("repeats", [0.4, 1, 3])
def test_the_largest_batch_is_as_large_as_those_of_training(lab, share, repeats):
    shape = (WIDTH, SIDE, SIDE)
    dataset = lab.pictures(10, shape)
    if share:
        others = lab.pictures(10, shape, seed=9)
        dataset = lab.pictures(10, shape, regularization=others, regularization_share=share)
    dataset = replace(dataset, images=tuple(replace(image, repeats=repeats) for image in dataset.images))
    state = lab.state(lab.Flow(lab.Net(WIDTH)), dataset, LORA, batch_size=BATCH)
    for given in (dataset, largest_batch(dataset, BATCH)):
        batches = [BatchSchedule.from_state(state, given).batches(step, 0) for step in range(6)]
        sizes = [sum(len(batch.conditionings) for batch in parts) for parts in batches]
        assert max(sizes) == BATCH
    assert sizes == [BATCH] * 6


def test_nothing_is_moved_out_of_main_memory_into_main_memory(lab):
    plain = plan(*_run(lab, LORA, META))
    for offload in ("optimizer", "activations"):
        state, denoiser, dataset = _run(lab, LORA, META, offload=offload)
        assert plan(plan_in_main_memory(state), denoiser, dataset) == plain
    state, denoiser, dataset = _run(lab, LORA, META, offload="layers")
    assert plan(plan_in_main_memory(state), denoiser, dataset) == _planned(lab, LORA, checkpointing=True)
    beside = replace(state.start, ema=EMASettings(device="host"))
    assert plan_in_main_memory(replace(state, start=beside)).start.ema == EMASettings()


@pytest.mark.parametrize("adapter", [LORA, FULL, INT8, NF4], ids=["lora", "full", "int8", "nf4"])
def test_a_preview_is_what_pytorchs_allocator_measures(lab, adapter):
    """Above what stays between steps: a call of the network with the picture twice."""
    state, denoiser, dataset = _run(lab, adapter, META)
    planned = plan(state, denoiser, dataset, on_host=True)
    stays = sum(planned.parts[part] for part in ("weights", "trained", "optimizer", "average"))
    state, denoiser, dataset = _run(lab, adapter, torch.device("cpu"))
    work = Workspace(state, denoiser, largest_batch(dataset, BATCH))
    work.loader.until = 2
    with work.install():
        advance_(work)
        advance_(work)
        batch = work.loader.take(2, 0)[0]
        with recorded() as record, torch.no_grad(), work.use_own_weights():
            level = denoiser.sigma(torch.full((2,), 0.5))
            denoiser.denoise(torch.cat([batch.latents[:1]] * 2), level, batch.conditionings[:1] * 2, {})
    work.close()
    assert planned.preview - stays == pytest.approx(most_held(record), rel=0.1)


@pytest.mark.parametrize("adapter", [LORA, FULL], ids=["lora", "full"])
@pytest.mark.parametrize("offload", ["none", "layers"])
def test_a_model_of_which_only_the_header_was_read_is_planned_as_any_other(lab, adapter, offload):
    more = {"fused_backward": True, "clip_norm": 0.0, "precision": "full-bf16"} if adapter.full_weights else {}
    state, denoiser, dataset = _run(lab, adapter, META, offload=offload, **more)
    expected = plan(state, denoiser, dataset)
    denoiser.module.to(META)
    without_values = lab.state(denoiser, dataset, adapter, **asdict(state.settings.optimizer))
    assert all(tensor.is_meta for tensor in without_values.trained.values()) == adapter.full_weights
    assert plan(without_values, denoiser, dataset) == expected
    assert all(tensor.is_meta for tensor in denoiser.module.parameters())
