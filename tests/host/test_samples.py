"""LATENTs, CONDITIONINGs and MASKs as GraftSamples takes them from a graph: types, copies, and what is refused."""

import math

import pytest
import torch
from graft_nodes.host.samples import conditioning_of, conditionings_of, latents_of, masks_of


def test_latents_are_float32_pictures_clips_or_sound():
    pictures = torch.arange(48.0, dtype=torch.bfloat16).reshape(2, 4, 2, 3).requires_grad_()
    (one, parts), (two, _) = latents_of({"samples": pictures}, 1)
    assert parts == ()
    assert one.shape == two.shape == (4, 2, 3) and one.dtype == torch.float32 and not one.requires_grad
    assert torch.equal(torch.stack([one, two]), pictures.detach().float())
    ((clip, _),) = latents_of({"samples": torch.ones(1, 16, 5, 2, 3)}, 1)
    assert clip.shape == (16, 5, 2, 3)
    ((sound, _),) = latents_of({"samples": torch.ones(1, 64, 25)}, 1)
    assert sound.shape == (64, 25)


@pytest.mark.parametrize("samples", [torch.ones(4, 2), torch.ones(1, 1, 1, 1, 2, 3), [torch.ones(1, 4, 2, 3)]])
def test_latents_of_other_shapes_are_refused(samples):
    with pytest.raises(ValueError, match=r"^Samples: latent 3 has the shape \(.*\): expected a batch of pictures"):
        latents_of({"samples": samples}, 3)


def test_a_conditioning_of_a_batch_is_one_for_all_or_one_for_each():
    parts = [[torch.full((1, 2, 3), float(number)), {"n": number}] for number in range(3)]
    found = conditionings_of(parts, "conditioning 1", 3)
    assert [(int(one.context[0, 0, 0]), one.extras["n"]) for one in found] == [(0, 0), (1, 1), (2, 2)]
    (shared, *others) = conditionings_of(parts[:1], "conditioning 1", 3)
    assert others == [shared, shared]
    with pytest.raises(ValueError, match="conditioning 1, sample 2 has a ControlNet"):
        conditionings_of([parts[0], [parts[1][0], {"control": print}]], "conditioning 1", 2)
    with pytest.raises(ValueError, match="conditioning 1 has 3 parts"):
        conditionings_of(parts, "conditioning 1", 2)


def test_a_conditioning_is_float32_with_its_own_entries():
    context = torch.ones(1, 2, 3, dtype=torch.bfloat16, requires_grad=True)
    ids, half = torch.arange(3, dtype=torch.int64), torch.full((2,), 0.5, dtype=torch.float16)
    entries = {
        "ids": ids,
        "pooled_output": half.requires_grad_(),
        "reference_latents": [half, half],
        "pair": (half, "a"),
        "by name": {"b": half},
        "guidance": 3.5,
        "nothing": None,
        "type": torch.float16,
        "callback": print,
        "strength": 1.0,
        "control": None,
    }
    found = conditioning_of([[context, entries]], "conditioning 1")
    assert found.context.dtype == torch.float32 and not found.context.requires_grad
    extras = found.extras
    assert extras.keys() == entries.keys() - {"callback"}
    assert torch.equal(extras["ids"], ids) and extras["ids"].dtype == torch.int64
    tensors = [extras["pooled_output"], *extras["reference_latents"], extras["pair"][0], extras["by name"]["b"]]
    for tensor in tensors:
        assert torch.equal(tensor, half.detach().float()) and tensor.dtype == torch.float32
        assert not tensor.requires_grad
    assert type(extras["reference_latents"]) is list and extras["pair"] == (extras["pair"][0], "a")
    assert (extras["guidance"], extras["nothing"], extras["type"]) == (3.5, None, torch.float16)


def test_an_object_of_comfyui_is_copied():
    class Output:
        pass

    Output.__module__ = "comfy.clip_vision"
    output = Output()
    output.image_embeds = torch.ones(2, dtype=torch.float16)
    kept = conditioning_of([[torch.ones(1, 2, 3), {"seen": output}]], "conditioning 1").extras["seen"]
    assert kept is not output and kept.image_embeds.dtype == torch.float32
    assert output.image_embeds.dtype == torch.float16
    Output.__module__ = "another_pack.nodes"
    with pytest.raises(ValueError, match=r"conditioning 1, seen holds a another_pack\.nodes\..*Output, and a training"):
        conditioning_of([[torch.ones(1, 2, 3), {"seen": output}]], "conditioning 1")


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"control": object()}, "a ControlNet"),
        ({"gligen": ("position", None, [])}, "GLIGEN boxes"),
        ({"hooks": object()}, "hooks"),
        ({"area": (8, 8, 0, 0)}, "an area"),
        ({"mask": torch.ones(1, 8, 8)}, "a mask of its own"),
        ({"start_percent": 0.0}, "a range of timesteps"),
        ({"clip_start_percent": 0.2, "start_percent": 0.1}, "a range of timesteps"),
        ({"strength": 0.5}, "a strength of its own"),
        ({"strength": 0.5, "area": (8, 8, 0, 0), "hooks": object()}, "hooks and an area"),
    ],
)
def test_what_samplers_apply_is_refused(entries, words):
    with pytest.raises(ValueError, match=f"^Samples: conditioning 2 has {words}, which only samplers apply"):
        conditioning_of([[torch.ones(1, 2, 3), entries]], "conditioning 2")


@pytest.mark.parametrize(
    ("conditioning", "words"),
    [
        ([], "conditioning 1 has 0 parts"),
        ([[torch.ones(1, 2, 3), {}]] * 2, "conditioning 1 has 2 parts"),
        ([[torch.ones(2, 2, 3), {}]], "conditioning 1 is a batch of 2"),
        ([[torch.full((1, 2, 3), math.nan), {}]], "conditioning 1 holds NaN"),
        ([[torch.ones(1, 2, 3), {"pooled": [torch.full((2,), math.inf)]}]], "conditioning 1, pooled holds NaN"),
    ],
)
def test_conditionings_that_cannot_be_trained_with(conditioning, words):
    with pytest.raises(ValueError, match=words):
        conditioning_of(conditioning, "conditioning 1")


def test_masks_are_one_a_picture_from_0_to_1():
    given = torch.tensor([[-1.0, 0.0, 0.25], [0.75, 1.0, 7.0]], dtype=torch.float64)
    expected = torch.tensor([[0.0, 0.0, 0.25], [0.75, 1.0, 1.0]])
    (one,) = masks_of(given)
    assert one.shape == (1, 2, 3) and one.dtype == torch.float32 and torch.equal(one[0], expected)
    both = masks_of(torch.stack([given, 1 - given]).requires_grad_())
    assert [mask.shape for mask in both] == [(1, 2, 3)] * 2 and not both[0].requires_grad
    assert torch.equal(both[0][0], expected) and torch.equal(both[1][0], 1 - expected)
