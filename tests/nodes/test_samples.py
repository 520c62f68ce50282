"""GraftSamples: latents and conditionings of the graph become a dataset; what cannot be trained with is refused."""

import os

import numpy as np
import pytest
import torch
from graft_nodes.storage.digest import sha256_of_tensors
from PIL import Image


@pytest.fixture(scope="module")
def parts(host):
    """Model, CLIP, six latents and six conditionings."""
    model, clip, vae = host.call("GraftDemo")
    draw = torch.Generator().manual_seed(5)
    latents = [{"samples": vae.encode(torch.rand(1, 64, 64, 3, generator=draw))} for _ in range(6)]
    prompts = ["a red square", "a blue circle", "a green square", "a red circle", "a blue square", "a green circle"]
    encoded = [host.call("CLIPTextEncode", clip=clip, text=prompt)[0] for prompt in prompts]
    conditionings = [[[context.cpu(), options] for context, options in one] for one in encoded]  # as ComfyUI's own
    return model, clip, latents, conditionings


def samples(host, parts, **given):
    """(dataset, report) of the six samples; every input is a list, as ComfyUI hands them in."""
    _, _, latents, conditionings = parts
    inputs = {"latents": latents, "conditioning": conditionings, "validation": [0.0], **given}
    return host.call("GraftSamples", **inputs)


def trained(host, parts, dataset, run, steps=2, **adapter):
    model, clip, *_ = parts
    state = host.call(
        "GraftTrainStart",
        model=model,
        dataset=dataset,
        clip=clip,
        adapter=host.call("GraftAdapter", rank=2, **adapter)[0],
        optimizer=host.call("GraftOptimizer", learning_rate=1e-2, batch_size=2, precision="float32")[0],
        run=run,
    )[0]
    return host.call("TrainStep", state=state, steps=steps, validate_every=1)[0]


def changed(conditioning, **entries):
    ((context, own),) = conditioning
    return [[context, {**own, **entries}]]


def test_counts_are_one_for_each_sample_for_each_latent_or_for_all(host, parts):
    _, _, latents, conditionings = parts
    whole, _ = samples(host, parts)
    assert [image.name for image in whole.images] == [f"sample {n}" for n in range(1, 7)]
    batches = [{"samples": torch.cat([one["samples"] for one in latents[n : n + 3]])} for n in (0, 3)]
    for given in (conditionings, conditionings[:2], conditionings[:1]):
        dataset, _ = samples(host, parts, latents=batches, conditioning=given)
        found = [image.brought.conditioning.context for image in dataset.images]
        wanted = [given[n * len(given) // 6] for n in range(6)]
        assert all(torch.equal(context, one[0][0]) for context, one in zip(found, wanted, strict=True))
        assert all(torch.equal(a.latent, b.latent) for a, b in zip(dataset.images, whole.images, strict=True))
    assert samples(host, parts, latents=batches)[0].digest == whole.digest
    with pytest.raises(ValueError, match="6 latents and 4 conditionings: connect as many conditionings as latents"):
        samples(host, parts, conditioning=conditionings[:4])
    with pytest.raises(ValueError, match="6 latents and 5 captions"):
        samples(host, parts, captions=["a"] * 5)
    with pytest.raises(ValueError, match="3 and 4 channels"):
        samples(host, parts, latents=[*latents[:5], {"samples": torch.zeros(1, 4, 8, 8)}])
    in_parts = [[part for one in conditionings[n : n + 3] for part in one] for n in (0, 3)]
    by_bucket, _ = samples(host, parts, latents=batches, conditioning=in_parts)
    assert by_bucket.digest == whole.digest
    with pytest.raises(ValueError, match=r"conditioning 2 has 2 parts.* or as many parts as its latent has samples"):
        samples(host, parts, latents=batches, conditioning=[in_parts[0], in_parts[1][:2]])
    with pytest.raises(ValueError, match=r"latent 1 has the shape \(3, 8\).*or of sound \(3"):
        samples(host, parts, latents=[{"samples": torch.zeros(3, 8)}])
    with pytest.raises(ValueError, match="latent 1 holds NaN"):
        samples(host, parts, latents=[{"samples": torch.full((1, 3, 8, 8), torch.nan)}])


def test_sound_becomes_samples_that_a_model_of_pictures_refuses(host, parts):
    """Each channel over time; a batch counts as many samples. The channels alone do not tell them from a picture."""
    model = parts[0]
    draw = torch.Generator().manual_seed(7)
    songs = [{"samples": torch.randn(2, 3, length, generator=draw)} for length in (8, 8, 12)]
    dataset, report = samples(host, parts, latents=songs)
    assert "latents: 2 of 3x12, 4 of 3x8" in report
    given = [one for song in songs for one in song["samples"]]
    assert all(torch.equal(image.latent, latent) for image, latent in zip(dataset.images, given, strict=True))
    groups = host.module("training.data.batches").make_batches(dataset, 6, 0.0, 0, 0, 0, "part 0")
    assert {tuple(batch.latents.shape[1:]) for batch in groups} <= {(3, 8), (3, 12)}
    with pytest.raises(ValueError, match=r"Samples: sample 1 is sound.*: disconnect masks"):
        samples(host, parts, latents=songs, masks=[torch.ones(1, 64, 64)])
    refused = r"Start Training: \w+ takes latents of pictures, with 3 channels, and sample 1 has one of sound, with 3"
    with pytest.raises(ValueError, match=refused):
        host.call("GraftTrainStart", model=model, dataset=dataset, run="sound")
    wide, _ = samples(host, parts, latents=[{"samples": torch.zeros(1, 4, 8, 8)}], conditioning=parts[3][:1])
    refused = r"takes latents of pictures, with 3 channels, and sample 1 has one of a picture or a clip, with 4"
    with pytest.raises(ValueError, match=refused):
        host.call("GraftTrainStart", model=model, dataset=wide, run="sound")


def test_everything_counts_in_the_digest_and_nothing_else(host, parts):
    _, clip, latents, conditionings = parts
    plain = samples(host, parts)[0].digest
    assert samples(host, parts)[0].digest == plain
    one, _ = samples(host, parts, latents=latents[:1], conditioning=conditionings[:1])
    reference = {"reference_latents": [torch.ones(1, 3, 4, 4)]}
    other = {"reference_latents": [torch.zeros(1, 3, 4, 4)]}
    brought = [changed(one, **reference) for one in conditionings]
    different = [
        samples(host, parts, conditioning=brought),
        samples(host, parts, conditioning=[*brought[:5], changed(conditionings[5], **other)]),
        samples(host, parts, conditioning=[changed(one, guidance=3.5) for one in conditionings]),
        samples(host, parts, conditioning=conditionings[::-1]),
        samples(host, parts, latents=latents[::-1]),
        samples(host, parts, captions=["a caption"]),
        samples(host, parts, masks=[torch.ones(1, 64, 64)]),
        samples(host, parts, repeats=[2]),
        samples(host, parts, validation=[0.2]),
        samples(host, parts, caption_dropout=[0.5], clip=[clip]),
        samples(host, parts, clip=[clip]),
        samples(host, parts, empty=[conditionings[0]]),
        samples(host, parts, batch_size=[3]),
        samples(host, parts, loss_weight=[0.5]),
        samples(host, parts, more_images=[one]),
        samples(host, parts, regularization=[samples(host, parts)[0]]),
        samples(host, parts, regularization=[samples(host, parts)[0]], regularization_share=[0.5]),
    ]
    digests = [dataset.digest for dataset, _ in different]
    assert len({plain, *digests}) == len(different) + 1


def test_nothing_is_copied(host, parts):
    _, _, latents, conditionings = parts
    dataset, report = samples(host, parts)
    for image, latent, ((context, _),) in zip(dataset.images, latents, conditionings, strict=True):
        assert image.latent.data_ptr() == latent["samples"].data_ptr()
        assert image.brought.conditioning.context.data_ptr() == context.data_ptr()
    assert "nothing is copied" in report


def test_equal_latents_are_all_held_out_or_all_trained_on(host, parts):
    _, _, latents, conditionings = parts
    given = {"latents": [*latents, *latents], "conditioning": conditionings * 2, "validation": [0.3]}
    dataset, report = samples(host, parts, **given)
    assert len(dataset.held_out) == 4 and "8 samples to train on, 4 held out" in report
    assert not {image.sha256 for image in dataset.images} & {image.sha256 for image in dataset.held_out}
    again, _ = samples(host, parts, **{**given, "latents": given["latents"][::-1]})
    assert {image.sha256 for image in again.held_out} == {image.sha256 for image in dataset.held_out}


def test_masks_are_at_the_size_of_the_latents_and_weigh_the_loss(host, parts):
    mask = torch.zeros(64, 64)
    mask[:, :32] = 1.0
    dataset, _ = samples(host, parts, masks=[mask])
    size = dataset.images[0].latent.shape[-2:]
    expected = torch.zeros(1, *size)
    expected[..., : size[1] // 2] = 1.0
    assert all(torch.equal(image.mask, expected) for image in dataset.images)
    losses = [trained(host, parts, one, "sample masks").history.loss for one in (dataset, samples(host, parts)[0])]
    assert 0.2 * losses[1][0] < losses[0][0] < 0.8 * losses[1][0]


def test_samples_of_their_own_are_measured_and_never_trained_on(host, parts):
    _, _, latents, conditionings = parts
    first, others = slice(0, 3), slice(2, 6)  # the third sample is trained on
    own, _ = samples(host, parts, latents=latents[others], conditioning=conditionings[others], validation=[0.5])
    given = {"latents": latents[first], "conditioning": conditionings[first], "validation": [0.9]}
    dataset, report = samples(host, parts, **given, validation_dataset=[own])
    names = ["sample 1", "sample 2", "sample 3"]
    assert [image.name for image in dataset.images] == names and len(dataset.held_out) == 3
    unseen = {sha256_of_tensors({"": one["samples"][0].float()}) for one in latents[3:]}
    assert {image.sha256 for image in dataset.held_out} == unseen
    assert "validation dataset: 3 images are measured" in report and "1 images of it are trained on too" in report
    assert dataset.digest != samples(host, parts, **{**given, "validation": [0.0]})[0].digest
    state = trained(host, parts, dataset, "samples measured")
    assert [step for step, _ in state.history.validation] == [0, 1, 2]
    with pytest.raises(ValueError, match=r"every image of validation dataset is trained on too.*or disconnect it"):
        samples(host, parts, **given, validation_dataset=[samples(host, parts, **{**given, "validation": [0.0]})[0]])


def test_a_loss_weight_scales_the_loss_of_the_samples(host, parts):
    runs = [
        trained(host, parts, samples(host, parts, loss_weight=[weight])[0], f"samples weigh {weight}")
        for weight in (1.0, 0.25)
    ]
    first, second = (run.history.loss[0] for run in runs)
    assert second == pytest.approx(0.25 * first, rel=1e-5)


def test_a_dropped_prompt_keeps_what_belongs_to_the_sample(host, parts):
    from graft_nodes.training.data.batches import draw_items, make_batches

    _, clip, _, conditionings = parts
    reference = [torch.ones(1, 3, 4, 4)]
    brought = [
        changed(one, reference_latents=reference, attention_mask=torch.ones(1, one[0][0].shape[1]))
        for one in conditionings
    ]
    dataset, _ = samples(host, parts, conditioning=brought, clip=[clip])
    (batch,) = make_batches(dataset, 4, 1.0, 0, 0, 0, "part 0")
    empty = host.call("CLIPTextEncode", clip=clip, text="")[0][0][0]
    for conditioning in batch.conditionings:
        assert torch.equal(conditioning.context, empty.float().cpu())
        assert torch.equal(conditioning.extras["reference_latents"][0], reference[0])
        assert "attention_mask" not in conditioning.extras
    (kept,) = make_batches(dataset, 4, 0.0, 0, 0, 0, "part 0")
    assert all("attention_mask" in one.extras and "reference_latents" in one.extras for one in kept.conditionings)
    never, report = samples(host, parts, conditioning=brought)
    assert not any(item.dropped for item in draw_items(never, 6, 1.0, 0, 0, 0, "part 0"))
    assert "no prompt is dropped" in report


def test_what_only_samplers_apply_is_refused_by_name(host, parts):
    one = parts[3][0]
    for given, said in (
        ([changed(one, control=object())], "conditioning 1 has a ControlNet.*Control that is trained is a latent"),
        ([changed(one, hooks=object(), area=(1, 1, 0, 0))], "has hooks and an area"),
        ([changed(one, strength=0.5)], "a strength of its own"),
        ([[*one, *one]], "conditioning 1 has 2 parts"),
        ([[[one[0][0].repeat(2, 1, 1), {}]]], "a batch of 2"),
        ([changed(one, reference_latents=[torch.full((1, 3, 4, 4), torch.inf)])], "reference_latents holds NaN or inf"),
        ([changed(one, thing=pytest)], "thing holds a "),
    ):
        with pytest.raises(ValueError, match=said):
            samples(host, parts, conditioning=given)
    dataset, clip = samples(host, parts)[0], parts[1]
    for name, title, value in (
        ("more_images", "more images", dataset),
        ("regularization", "regularization dataset", dataset),
        ("validation_dataset", "validation dataset", dataset),
        ("empty", "empty conditioning", one),
        ("clip", "CLIP", clip),
    ):
        with pytest.raises(ValueError, match=f"Samples: {title} takes one, and 2 are connected"):
            samples(host, parts, **{name: [value] * 2})
    with pytest.raises(ValueError, match="bring conditionings that are encoded already"):
        trained(host, parts, samples(host, parts)[0], "sample encoder", text_encoder=True)


def test_samples_train_with_folders_and_as_regularization(host, parts):
    _, clip, *_ = parts
    folder = os.path.join(host.input, "beside samples")
    os.makedirs(folder, exist_ok=True)
    for number in range(3):
        pixels = np.random.default_rng(number).integers(0, 255, (128, 128, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(os.path.join(folder, f"{number}.png"))
    given = {"folder": "beside samples", "vae": host.call("GraftDemo")[2], "clip": clip, "resolution": 128}
    given["validation"] = 0.0
    read = host.call("GraftDataset", **given)[0]
    other, _ = samples(host, parts, clip=[clip])
    both, _ = samples(host, parts, clip=[clip], more_images=[read])
    behind = host.call("GraftDataset", **given, more_images=other)[0]
    regular = host.call("GraftDataset", **given, regularization=other)[0]
    assert len(both.images) == len(behind.images) == 9 and "" in both.conditionings
    found = []
    for number, dataset in enumerate((other, both, behind, regular)):
        state = trained(host, parts, dataset, f"mixed samples {number}", steps=3)
        found.append(sha256_of_tensors(state.trained))
    assert len(set(found)) == 4


def test_samples_that_are_regularization_images_are_not_measured(host, parts):
    latents = parts[2]
    whole, _ = samples(host, parts, validation=[0.4])
    number = int(whole.held_out[0].name.split()[1]) - 1
    regular, _ = samples(host, parts, latents=latents[number : number + 1], conditioning=parts[3][:1])
    dataset, report = samples(host, parts, validation=[0.4], regularization=[regular])
    assert [image.name for image in dataset.held_out] == [image.name for image in whole.held_out[1:]]
    assert "1 held-out images are not measured" in report
