"""Datasets of sliders: noise for each set of prompts, pictures without their captions, pairs and missing partners."""

from dataclasses import replace

import pytest
import torch
from graft_nodes.training.data import sliders
from graft_nodes.training.data.batches import make_batches
from graft_nodes.training.data.combine import combine
from graft_nodes.training.data.dataset import Conditioning, Dataset
from graft_nodes.training.objective.slider import PICTURE_PAIRS, SliderSettings

TEXTS = ("", "person", "old", "young", "tall person", "tall old", "tall young")
CONTEXTS = {text: Conditioning(torch.full((1, 1, 1), float(number))) for number, text in enumerate(TEXTS)}


class Hash:
    digest, unhashed = "clip", ("a patch",)


def settings(**given):
    texts = {"positive": "old", "negative": "young", "target": "person", "neutral": "", "keep": "", **given}
    return SliderSettings("both directions", **texts)


def noise(*keep, **given):
    made = settings(keep="\n".join(keep), **given)
    return sliders.make_noise_dataset(made, torch.zeros(4, 6, 8), (64, 48), CONTEXTS, ("vae", "clip"))


def pictures(count=4, partner=True, shape=(1, 4, 6, 6)):
    latents = [torch.full((4, 6, 6), float(number)) for number in range(count)]
    data = Dataset.from_latents(latents, ["person"] * count, CONTEXTS, held_out=[count - 1])
    if not partner:
        return data
    images, held_out = [], []
    for group, made in ((data.images, images), (data.held_out, held_out)):
        for image in group:
            made.append(
                replace(image, extras={"reference_latents": [torch.full(shape, 100 + float(image.latent[0, 0, 0]))]})
            )
    return replace(data, images=tuple(images), held_out=tuple(held_out))


def test_noise_has_a_picture_of_zeros_for_each_set_and_the_size_for_sdxl():
    data = noise()
    (image,) = data.images
    assert image.latent.shape == (4, 6, 8) and not image.latent.any() and image.caption == "person"
    assert image.framing.size_conditioning() == {
        "width": 64, "height": 48, "crop_w": 0, "crop_h": 0, "target_width": 64, "target_height": 48
    }  # fmt: skip
    assert len(data.held_out) == 4 and sliders.is_noise(data)


def test_each_row_gets_the_prompts_of_its_set_and_none_is_dropped():
    data = noise("", "tall")
    assert [prompts.target for prompts in data.slider.sets] == ["tall person"]
    data = sliders.make_noise_dataset(
        settings(positive="old\ntall old", negative="young\ntall young", target="person\ntall person"),
        torch.zeros(4, 6, 8), (64, 48), CONTEXTS, ("", ""),
    )  # fmt: skip
    (batch,) = make_batches(data, 8, 1.0, 0, 0, 0, "part 0")
    assert set(batch.captions) == {"person", "tall person"}
    for row, caption in enumerate(batch.captions):
        tall = "tall " if caption.startswith("tall") else ""
        wanted = {"positive": f"{tall}old", "negative": f"{tall}young", "neutral": caption, "empty": ""}
        for role, text in wanted.items():
            assert torch.equal(getattr(batch.directions, role)[row].context, CONTEXTS[text].context)
        assert torch.equal(batch.conditionings[row].context, CONTEXTS[caption].context)
        assert batch.conditionings[row].extras["target_width"] == 64


def test_the_digest_changes_with_what_goes_in():
    made = [noise(), noise(guidance=2.0), noise(steps=7), noise("tall"), noise(positive="tall old")]
    made += [noise(anchor="tall person"), noise(anchor="tall person", anchor_strength=2.0)]
    made.append(sliders.make_picture_dataset(settings(), pictures(partner=False), CONTEXTS, Hash()))
    made.append(sliders.make_pair_dataset(SliderSettings(PICTURE_PAIRS), pictures()))
    assert len({data.digest for data in made}) == len(made)
    assert noise().digest == noise().digest


def test_a_run_from_before_anchors_is_stored_as_before():
    values = {"": 0.0, "person": 0.3, "old": 0.9, "young": -0.4}
    contexts = {text: Conditioning(torch.full((1, 1, 1), value)) for text, value in values.items()}
    data = sliders.make_noise_dataset(settings(), torch.zeros(4, 6, 6), (48, 48), contexts, ("vae", "clip"))
    assert data.digest == "53fd63eb1115b17160bc2b86c36822e897e85d533aa7ad1738fa8714bcc00509"


def test_an_anchor_comes_with_each_row_and_into_the_report_and_the_metadata():
    data = noise(anchor="tall person", anchor_strength=0.5)
    (batch,) = make_batches(data, 3, 0.0, 0, 0, 0, "part 0")
    assert all(torch.equal(one.context, CONTEXTS["tall person"].context) for one in batch.directions.anchor)
    assert sliders.describe(data)[0].endswith(", held at 'tall person' with strength 0.5")
    found = sliders.metadata(data)
    assert found["graft_slider_anchor"] == "tall person" and found["graft_slider_anchor_strength"] == "0.5"
    (plain,) = make_batches(noise(), 3, 0.0, 0, 0, 0, "part 0")
    assert plain.directions.anchor == () and "graft_slider_anchor" not in sliders.metadata(noise())


def test_pictures_get_each_set_in_place_of_their_captions():
    data = sliders.make_picture_dataset(settings(keep="tall"), pictures(partner=False), CONTEXTS, Hash())
    assert [image.caption for image in data.images + data.held_out] == ["tall person"] * 4
    assert all(image.dropout == 0.0 for image in data.images) and not sliders.is_noise(data)
    assert data.unhashed == ("a patch",)


def test_pairs_keep_their_captions_and_the_model_does_not_see_the_partner():
    data = sliders.make_pair_dataset(SliderSettings(PICTURE_PAIRS), pictures())
    (batch,) = make_batches(data, 3, 0.0, 0, 0, 0, "part 0")
    assert torch.equal(batch.worse, batch.latents + 100)
    assert torch.equal(batch.at_strength(1.0), batch.latents) and torch.equal(batch.at_strength(-1.0), batch.worse)
    assert all(not one.extras for one in batch.conditionings) and batch.directions is None


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (lambda: pictures(partner=False), "4 of 4 pictures have no partner: 0, 1, 2"),
        (lambda: pictures(shape=(1, 4, 3, 3)), "a pair is two pictures of one shape"),
        (lambda: sliders.make_pair_dataset(SliderSettings(PICTURE_PAIRS), pictures()), "comes from another Slider"),
        (
            lambda: replace(pictures(), regularization=pictures(partner=False), regularization_share=0.5),
            "has regularization images",
        ),
    ],
)
def test_wrong_pairs_are_refused(data, said):
    with pytest.raises(ValueError, match=f"Slider: .*{said}"):
        sliders.make_pair_dataset(SliderSettings(PICTURE_PAIRS), data())


def test_prompts_that_are_encoded_alike_are_refused():
    alike = {**CONTEXTS, "young": CONTEXTS["old"]}
    with pytest.raises(ValueError, match="this CLIP encodes 'old' and 'young' alike"):
        sliders.make_noise_dataset(settings(), torch.zeros(4, 6, 8), (64, 48), alike, ("", ""))


def test_a_slider_is_not_one_of_several_datasets():
    data = sliders.make_pair_dataset(SliderSettings(PICTURE_PAIRS), pictures())
    with pytest.raises(ValueError, match="one comes from Slider"):
        combine([data, pictures()])
    with pytest.raises(ValueError, match="A slider is connected as regularization dataset"):
        replace(pictures(), regularization=data, regularization_share=0.5)


def test_the_report_and_the_metadata_name_the_prompts():
    data = noise(neutral="tall person")
    assert sliders.describe(data) == [
        "slider, both directions, guidance 3: 'person' from 'young' to 'old', starting from 'tall person'",
        "no pictures: noise is denoised in 20 steps with CFG 3",
    ]
    assert sliders.metadata(data) == {
        "graft_slider": "both directions",
        "graft_slider_guidance": "3",
        "graft_slider_positive": "old",
        "graft_slider_negative": "young",
        "graft_slider_target": "person",
        "graft_slider_neutral": "tall person",
    }
    assert sliders.metadata(pictures()) == {} and sliders.describe(pictures()) == []
