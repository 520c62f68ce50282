"""The estimate against what others have measured and against the tensors themselves, and what is saved to fit."""

import dataclasses
import re

import pytest
import torch
from graft_nodes.training.data.buckets import Framing
from graft_nodes.training.data.dataset import Conditioning, Dataset, DatasetImage
from graft_nodes.training.recipes.estimate import GB, Plan, estimate, trained_numbers
from graft_nodes.training.recipes.facts import Device, Pictures, facts_of, pictures_of
from graft_nodes.training.recipes.fit import ORDER, USABLE, fit
from graft_nodes.training.trainable.install import init_trainable
from graft_nodes.training.trainable.settings import AdapterSettings
from torch import nn

from .real_sizes import FAMILIES, build, facts

CUDA = Device("cuda", "a card", 24 * GB, bf16=True)
PLAN = Plan(
    optimizer="adamw8bit",
    targets="attention+ff",
    rank=16,
    batch_size=1,
    accumulation=1,
    pictures=(Pictures(1024),),
    number_bytes=2,
)


def test_the_numbers_of_a_lora_are_those_that_training_begins_with(tiny):
    found = facts_of(tiny, None, "flow")
    for targets in found.lora_widths:
        settings = AdapterSettings(rank=3, targets=targets)
        trained = init_trainable(tiny, settings, 0, {})
        assert trained_numbers(found, targets, 3) == sum(tensor.numel() for tensor in trained.values())


@pytest.fixture
def tiny():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn1 = nn.ModuleDict({"to_q": nn.Linear(8, 12), "to_v": nn.Linear(8, 12)})
            self.ff = nn.Linear(12, 8)

    model = nn.Module()
    model.blocks = nn.ModuleList([Block(), Block()])
    model.last = nn.Linear(8, 4)
    return model


def test_weights_are_counted_as_they_are_loaded(tiny):
    full, half = facts_of(tiny, None, "flow"), facts_of(tiny.to(torch.bfloat16), None, "flow")
    assert full.parameters == half.parameters == sum(weight.numel() for weight in tiny.parameters())
    assert full.weight_bytes == 2 * half.weight_bytes == 4 * full.parameters
    assert half.outside == 2 * (4 * 8 + 4)
    assert half.largest_block == (half.weight_bytes - half.outside) // 2


def test_a_unets_wider_layers_see_a_quarter_of_the_positions_with_each_doubling():
    model = build(
        {
            "input_blocks.0.0": (8, 4, 3),
            "input_blocks.1.0.conv": (16, 8, 3),
            "input_blocks.1.1.attn1.to_q": (16, 16),
            "middle_block.0.attn1.to_q": (32, 32),
            "out.2": (4, 8, 3),
        }
    )
    found = facts_of(model, None, "eps")
    assert found.is_unet and found.kept == (8 + 4) + (16 + 8) + (16 + 16) / 4 + (32 + 32) / 16 + (4 + 8)


def test_qwen_image_takes_what_musubi_tuner_measured():
    """musubi-tuner's docs/qwen_image.md: 42 GB at 1024 x 1024 pixels, batch size 1, bf16, gradient checkpointing."""
    total = estimate(facts("qwen"), dataclasses.replace(PLAN, checkpointing=True)).total
    assert total / GB == pytest.approx(42, rel=0.05)


def test_sdxl_trains_in_eight_gigabytes_as_kohya_says():
    """sd-scripts' docs/train_SDXL-en.md: 8 GB with gradient checkpointing, the UNet alone, rank 4 to 8."""
    plan = dataclasses.replace(PLAN, rank=8, checkpointing=True)
    assert 5 < estimate(facts("sdxl"), plan).total / GB < 8


@pytest.mark.parametrize("family", FAMILIES)
def test_more_memory_never_saves_more(family):
    found, before = facts(family), None
    for memory in (8, 12, 16, 24, 48, 200):
        fitted = fit(found, PLAN, CUDA, memory * GB)
        assert fitted.estimate.total <= USABLE * memory * GB
        if before is not None:
            assert not fitted.plan.layers_on_host or before.plan.layers_on_host
            assert not fitted.plan.checkpointing or before.plan.checkpointing
            assert fitted.plan.rank >= before.plan.rank
        before = fitted
    assert before.savings == () and before.plan == PLAN


def test_savings_are_taken_in_the_order_of_the_list():
    wanted = dataclasses.replace(PLAN, batch_size=4, optimizer="adamw", rank=64)
    taken = fit(facts("qwen"), wanted, CUDA, 6 * GB).savings
    assert len(taken) > 3 and list(taken) == [name for name in ORDER if name in taken]


def test_no_saving_is_needless():
    for family in FAMILIES:
        found = facts(family)
        fitted = fit(found, PLAN, CUDA, 8 * GB)
        if fitted.plan.average_on_host:
            without = dataclasses.replace(fitted.plan, average_on_host=False)
            assert estimate(found, without).total > USABLE * 8 * GB
        if fitted.plan.optimizer == "adafactor":
            without = dataclasses.replace(fitted.plan, optimizer="adamw8bit")
            assert estimate(found, without).total > USABLE * 8 * GB


def test_a_smaller_batch_keeps_the_step():
    wanted = dataclasses.replace(PLAN, batch_size=4)
    fitted = fit(facts("flux"), wanted, CUDA, 8 * GB)
    assert (fitted.plan.batch_size, fitted.plan.accumulation) == (1, 4)


def test_on_the_cpu_nothing_is_moved_there():
    cpu = Device("cpu", "cpu", 30 * GB)
    fitted = fit(facts("flux"), PLAN, cpu, 32 * GB)
    assert not fitted.plan.layers_on_host and not fitted.plan.average_on_host
    assert fitted.plan.checkpointing


def test_what_does_not_fit_is_refused_with_what_to_choose():
    with pytest.raises(ValueError) as refused:
        fit(facts("qwen"), dataclasses.replace(PLAN, pictures=(Pictures(2048),)), CUDA, 6 * GB)
    text = str(refused.value)
    assert re.search(r"memory is 6.0 GB, and a step at 2048 pixels takes about \d+\.\d GB with every saving", text)
    assert "choose 12 GB in memory if your device has it" in text and text.count("if your device has it") == 1
    assert "load the model in fp8" in text and "lower the resolution of Dataset" in text
    with pytest.raises(ValueError, match="What helps: load the model in fp8") as hopeless:
        fit(facts("qwen"), dataclasses.replace(PLAN, pictures=(Pictures(16384),)), CUDA, 6 * GB)
    assert "if your device has it" not in str(hopeless.value)


def test_the_batch_that_takes_most_is_counted():
    found = facts("sdxl")
    small, large = Pictures(512, 8), Pictures(1024)  # eight of 512 pixels take as much as two of 1024
    for batch_size, takes_most in ((1, (small,)), (3, (large,))):
        plan = dataclasses.replace(PLAN, batch_size=batch_size, pictures=(small, large))
        alone = dataclasses.replace(plan, pictures=takes_most)
        assert estimate(found, plan) == estimate(found, alone)
    assert estimate(found, dataclasses.replace(PLAN, batch_size=9, pictures=(small,))) == estimate(
        found, dataclasses.replace(PLAN, batch_size=1, pictures=(small,))
    )


def _image(height, width, batch_size=0, framing=None, frames=()):
    latent = torch.zeros(4, *frames, height // 8, width // 8)
    return DatasetImage("a", "", latent, batch_size=batch_size, framing=framing)


def test_the_images_of_a_dataset():
    words = {"": Conditioning(torch.zeros(1, 1, 1))}
    framing = Framing((900, 900), (768, 768), 0, 0, (768, 768))  # of a VAE that makes sides 16 times smaller
    regular = Dataset((_image(1024, 1024),), words, "b")
    images = (_image(512, 512), _image(256, 1024), _image(384, 384, 4, framing), _image(320, 320, 4))
    dataset = Dataset(images, words, "a", regularization=regular, regularization_share=0.5)
    assert pictures_of(dataset) == (Pictures(768, 4), Pictures(1024))
    clip = Dataset((_image(256, 256, frames=(4,)),), words, "c")
    assert pictures_of(clip) == (Pictures(512),)  # four frames


def of_types(**types):
    """SDXL with weights of these types, half of its numbers each if there are two."""
    sizes = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1}
    found = facts("sdxl")
    count = found.parameters // len(types)
    weight_bytes = sum(sizes[name] * count for name in types)
    return dataclasses.replace(found, weight_bytes=weight_bytes, types=dict.fromkeys(types, count))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_frozen_weights_of_another_16_or_32_bit_type_take_what_those_of_the_computation_take(checkpointing):
    """They are cast once. fp16 and bf16 have the same bytes, and are not the same type."""
    plan = dataclasses.replace(PLAN, checkpointing=checkpointing)
    wanted = estimate(of_types(bfloat16=True), plan).total
    for loaded in ("float16", "float32"):
        assert estimate(of_types(**{loaded: True}), plan).total == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize(
    ("loaded", "settings", "copied"),
    [
        ("float8_e4m3fn", {}, 2.0),  # unpacked at each use, and kept
        ("float8_e4m3fn", {"checkpointing": True}, 0.0),
        ("float16", {"shares_memory": True}, 2.0),  # a second copy there would save nothing
        ("float16", {"shares_memory": True, "compute": "float16"}, 0.0),
        ("float16", {"compute": None}, 0.0),  # the model's own type
        ("float16", {"compute": "float32", "number_bytes": 4, "shares_memory": True}, 4.0),
    ],
)
def test_copies_that_autograd_keeps(loaded, settings, copied):
    found, plan = of_types(**{loaded: True}), dataclasses.replace(PLAN, **settings)
    plain = dataclasses.replace(found, types={plan.compute or loaded: found.parameters})
    more = estimate(found, plan).parts["activations"] - estimate(plain, plan).parts["activations"]
    assert more == copied * found.parameters


def test_types_are_counted(tiny):
    tiny.last.to(torch.float16)
    assert facts_of(tiny, None, "flow").types == {
        "float32": sum(weight.numel() for weight in tiny.blocks.parameters()),
        "float16": 4 * 8 + 4,
    }
