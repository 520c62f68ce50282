"""The pixel rule on drawn truth: it accepts what was drawn and rejects every other caption."""

import numpy as np
import pytest
from graft_nodes.demo import draw, model, rule, tokenizer

TRUTH = [(shape, color, position) for _, shape, color, position in draw.captions()] + [
    ("ring", "purple", p) for p in tokenizer.POSITIONS
]


def drawn(shape, color, position, seed, count):
    generator = np.random.default_rng([seed, TRUTH.index((shape, color, position))])
    return [draw.draw_image(shape, color, position, generator) for _ in range(count)]


def as_decoded(pictures):
    """What the demo's VAE makes of the pictures: through 32 x 32 latents and back."""
    import torch

    vae = model.PixelVAE()
    return vae.decode(vae.encode(torch.from_numpy(np.stack(pictures)).float() / 255)).numpy()


@pytest.mark.parametrize("decoded", [False, True], ids=["drawn", "through the VAE"])
def test_drawn_truth_is_accepted(decoded):
    right = total = 0
    for truth in TRUTH:
        pictures = drawn(*truth, seed=99, count=8)
        for picture in as_decoded(pictures) if decoded else pictures:
            seen = rule.detect(picture)
            right += (seen.shape, seen.color, seen.position) == truth
            total += 1
    assert right >= 0.99 * total


def test_no_picture_satisfies_another_caption():
    captions = [caption for caption, *_ in draw.captions()] + [f"a zorp {p}" for p in tokenizer.POSITIONS]
    for truth in TRUTH:
        (picture,) = drawn(*truth, seed=7, count=1)
        assert [caption for caption in captions if rule.satisfies(picture, caption)] == [
            caption for caption in captions if rule.parse_caption(caption) == truth
        ]


def test_blank_and_noise_show_nothing():
    blank = np.ones((256, 256, 3))
    noise = np.random.default_rng(0).random((256, 256, 3))
    assert rule.detect(blank).shape is None
    assert rule.detect(noise).shape is None


def test_isolated_pixels_are_dropped():
    (picture,) = drawn("ring", "purple", "middle", seed=1, count=1)
    generator = np.random.default_rng(0)
    speckled = picture.copy()
    for y, x in generator.integers(0, 63, (12, 2)) * 4:
        speckled[y : y + 4, x : x + 4] = (220, 30, 30)
    assert rule.satisfies(speckled, "a zorp middle")


def test_a_disc_is_no_ring_and_a_blue_ring_is_no_zorp():
    generator = np.random.default_rng(0)
    assert not rule.satisfies(draw.draw_image("circle", "purple", "left", generator), "a zorp left")
    assert not rule.satisfies(draw.draw_image("ring", "blue", "left", generator), "a zorp left")
    assert not rule.satisfies(draw.draw_image("ring", "purple", "right", generator), "a zorp left")


@pytest.mark.parametrize(
    "caption", ["", "a zorp", "a zorp up", "red circle left", "a purple circle left", "a red circle left here"]
)
def test_captions_outside_the_rule_are_named(caption):
    with pytest.raises(ValueError, match="expected 'a COLOR SHAPE POSITION'"):
        rule.parse_caption(caption)


def test_a_picture_whose_sides_do_not_divide_is_refused():
    with pytest.raises(ValueError, match="100x256"):
        rule.detect(np.ones((100, 256, 3)))
