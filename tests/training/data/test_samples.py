"""A dataset of samples that come encoded: what each image gets, what the digest follows, and what the report counts.
GraftSamples itself is tested in tests/nodes/test_samples.py.
"""

import math
from dataclasses import replace

import pytest
import torch
from graft_nodes.training.data.dataset import Conditioning
from graft_nodes.training.data.folder_settings import SampleSettings
from graft_nodes.training.data.samples import Sample, check_finite, leaves, make_dataset, report

SETTINGS = SampleSettings(validation=0.0)


def text(seed=0, **extras):
    return Conditioning(torch.full((1, 2, 3), float(seed)), extras)


def samples(count=3, **given):
    return [Sample(torch.full((4, 2, 3), float(number)), text(number), **given) for number in range(count)]


def test_what_each_image_gets():
    mask = torch.ones(1, 2, 3)
    given = [
        Sample(torch.ones(4, 2, 3), text(1), "a cat", mask),
        Sample(torch.zeros(4, 2, 3), text(2)),
    ]
    settings = SampleSettings(repeats=3, validation=0.0, caption_dropout=0.25, batch_size=5)
    dataset = make_dataset(given, settings, text(9))
    assert [image.name for image in dataset.images] == ["sample 1", "sample 2"] and dataset.held_out == ()
    assert (dataset.caption_dropout, dataset.batch_size) == (0.25, 5)
    for image, one in zip(dataset.images, given, strict=True):
        assert image.latent is one.latent and image.mask is one.mask and image.caption == one.caption
        assert (image.repeats, image.batch_size, image.dropout) == (3, 5, None)
        assert image.brought.conditioning.context is one.conditioning.context
        assert torch.equal(image.brought.empty.context, text(9).context)
    without = make_dataset(given, settings).images  # there is nothing to put in a prompt's place
    assert all(image.dropout == 0.0 and image.brought.empty is None for image in without)


def test_entries_of_the_text_go_with_the_prompt_and_others_stay_with_the_sample():
    extras = {"pooled_output": torch.ones(1, 5), "reference_latents": [torch.ones(2)], "guidance": 3.5}
    (image,) = make_dataset([Sample(torch.ones(4, 2, 3), text(1, **extras))], SETTINGS).images
    assert image.brought.conditioning.extras.keys() == {"pooled_output"}
    assert image.extras.keys() == {"reference_latents", "guidance"} and image.extras["guidance"] == 3.5


def test_samples_that_share_a_conditioning_share_its_objects():
    shared = text(1, guidance=3.5)
    given = [Sample(torch.full((4, 2, 3), float(number)), shared) for number in range(2)]
    one, two = make_dataset(given, SETTINGS).images
    assert one.brought is two.brought and one.extras is two.extras
    (other,) = make_dataset([Sample(torch.ones(4, 2, 3), text(1, guidance=3.5))], SETTINGS).images
    assert other.brought is not one.brought


def test_held_out_samples_are_chosen_by_their_latents():
    given = samples(10)
    dataset = make_dataset(given, replace(SETTINGS, validation=0.3))
    assert len(dataset.held_out) == 3 and len(dataset.images) == 7
    latents = {float(image.latent.mean()) for image in dataset.held_out}
    again = make_dataset(given[::-1], replace(SETTINGS, validation=0.3))
    assert {float(image.latent.mean()) for image in again.held_out} == latents
    assert len({image.sha256 for image in dataset.images + dataset.held_out}) == 10


class Output:
    """As comfy.clip_vision.Output: a plain object with attributes."""

    def __init__(self, **attributes):
        self.__dict__.update(attributes)


class Other(Output):
    pass


NESTED = [
    {},
    {"a": 1},
    {"a": 1.0},
    {"a": True},
    {"a": "1"},
    {"b": 1},
    {"a": None},
    {"a": [1]},
    {"a": [1, 1]},
    {"a": [[1], 1]},
    {"a": [[1, 1]]},
    {"a": []},
    {"a": {"0": 1}},
    {"a": {"0": 1, "1": 1}},
    {"a": torch.ones(2)},
    {"a": torch.ones(2, dtype=torch.int32)},
    {"a": torch.ones(2, 1)},
    {"a": [torch.ones(2)]},
    {"a": [torch.zeros(2), torch.ones(2)]},
    {"a": [torch.ones(2), torch.zeros(2)]},
    {"a": Output(one=1)},
    {"a": Output(one=2)},
    {"a": Output(two=1)},
    {"a": Other(one=1)},
    {"a": Output(one=torch.ones(2))},
]


def test_the_digest_follows_everything_that_a_conditioning_holds():
    def digest(extras):
        return make_dataset([Sample(torch.ones(4, 2, 3), text(1, **extras))], SETTINGS).digest

    digests = [digest(extras) for extras in NESTED]
    assert len(set(digests)) == len(NESTED)
    assert digests == [digest(extras) for extras in NESTED]
    assert digest({"a": 1, "b": torch.ones(2), "c": 2}) == digest({"c": 2, "b": torch.ones(2), "a": 1})


def test_leaves_are_named_by_their_way():
    value = {"a": [1, {"b": "two"}], "c": Output(d=None)}
    assert list(leaves(value)) == [("/a#", 2), ("/a/0", 1), ("/a/1/b", "two"), ("/c#", "Output"), ("/c/d", None)]


def test_the_digest_follows_samples_and_settings():
    plain = samples()
    regularization = make_dataset(samples(1), SETTINGS)
    other = make_dataset(samples(2), SETTINGS)
    made = [
        make_dataset(plain, SETTINGS),
        make_dataset(plain[::-1], SETTINGS),
        make_dataset(plain[:2], SETTINGS),
        make_dataset([replace(plain[0], caption="a"), *plain[1:]], SETTINGS),
        make_dataset([replace(plain[0], mask=torch.ones(1, 2, 3)), *plain[1:]], SETTINGS),
        make_dataset(plain, replace(SETTINGS, repeats=2)),
        make_dataset(plain, replace(SETTINGS, validation=0.5)),
        make_dataset(plain, replace(SETTINGS, caption_dropout=0.5)),
        make_dataset(plain, replace(SETTINGS, batch_size=2)),
        make_dataset(plain, replace(SETTINGS, loss_weight=0.5)),
        make_dataset(plain, SETTINGS, text(7)),
        make_dataset(plain, SETTINGS, text(8)),
        make_dataset(plain, SETTINGS, regularization=regularization, regularization_share=0.5),
        make_dataset(plain, SETTINGS, regularization=regularization, regularization_share=0.25),
        make_dataset(plain, SETTINGS, regularization=other, regularization_share=0.25),
    ]
    assert len({dataset.digest for dataset in made}) == len(made)
    assert made[-1].regularization is other and made[-1].regularization_share == 0.25


def test_the_report_counts_samples_entries_captions_and_masks():
    given = [Sample(torch.full((4, 256, 256), float(number)), text(number)) for number in range(3)]
    given += [Sample(torch.full((4, 128, 256), float(number)), text(number, guidance=3.5)) for number in range(2)]
    given[0] = replace(given[0], caption="a cat", mask=torch.ones(1, 256, 256))
    given[1] = replace(given[1], caption="a dog")
    dataset = make_dataset(given, replace(SETTINGS, validation=0.2))
    assert report(dataset, False) == [
        "4 samples to train on, 1 held out for validation",
        "latents: 2 of 4x128x256, 3 of 4x256x256",
        "conditionings bring: guidance (2)",
        "2 captions, for reports only; 1 masks",
        "no prompt is dropped: connect an empty conditioning, or CLIP, for that",
    ]
    lines = report(make_dataset(given[:3], SETTINGS, text(9)), True)
    assert "where the prompt is dropped, the empty conditioning takes its place; what a sample brings stays" in lines
    assert not any("bring:" in line or "no prompt" in line for line in lines)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_number_that_is_not_finite_is_refused_by_name(value):
    tensor = torch.zeros(3, 4)
    check_finite(tensor, "latent 2")
    tensor[1, 2] = value
    with pytest.raises(ValueError, match=r"^Samples: latent 2 holds NaN or infinite values"):
        check_finite(tensor, "latent 2")
