"""What each way to take control pictures makes of their pixels, and how `auto` chooses. ComfyUI's own nodes are the
judges in tests/with_comfyui/checks/test_control_pictures.py.
"""

import numpy as np
import pytest
import torch
from graft_nodes.training.data.buckets import frame
from graft_nodes.training.data.control_methods import METHODS, FramedControl, find_method, has_same_shape, options
from PIL import Image

BY_NAME = {method.name: method for method in METHODS}


def _picture(width, height, seed=0):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8))


@pytest.mark.parametrize(
    ("size", "other", "same"),
    [
        ((512, 512), (64, 64), True),
        ((1000, 667), (1500, 1000), True),
        ((1000, 667), (1000, 700), False),
        ((2, 1), (1, 2), False),
    ],
)
def test_shapes_are_the_same_but_for_rounding(size, other, same):
    assert has_same_shape(size, other) is same and has_same_shape(other, size) is same


def test_a_control_picture_is_cropped_as_its_image():
    """A picture twice as large shows the same part; one of another shape is left whole."""
    image = _picture(200, 100)
    framing = frame(image.size, (64, 64), (0.25, 0.5))
    small = FramedControl(image, framing)
    scaled = image.resize(framing.scaled, Image.Resampling.LANCZOS).crop(framing.box)
    expected = torch.from_numpy(np.asarray(scaled, dtype=np.float32) / 255.0)[None]
    assert torch.equal(small.as_image(), expected) and torch.equal(
        BY_NAME["reference latents"].for_vae(small), expected
    )
    large = FramedControl(image.resize((400, 200), Image.Resampling.NEAREST), framing)
    assert small.cut().shape == (1, 100, 100, 3) and large.cut().shape == (1, 200, 200, 3)
    assert torch.equal(large.cut()[:, ::2, ::2], small.cut())
    other = FramedControl(_picture(90, 120), framing)
    assert other.cut().shape == (1, 120, 90, 3) and other.as_image().shape == (1, 64, 64, 3)


@pytest.mark.parametrize("size", [(90, 120), (1000, 300), (7, 900)])
def test_a_reference_of_another_shape_has_the_area_of_the_image(size):
    framing = frame((256, 256), (256, 256))
    pixels = BY_NAME["reference latents"].for_vae(FramedControl(_picture(*size), framing))
    height, width = pixels.shape[1:3]
    assert width % 16 == 0 and height % 16 == 0
    assert width * height == pytest.approx(256 * 256, rel=0.3)


def test_the_first_frame_of_a_video_is_followed_by_gray():
    control = FramedControl(_picture(64, 64), frame((64, 64), (64, 64)), frames=9)
    pixels = BY_NAME["Wan image to video"].for_vae(control)
    assert pixels.shape == (9, 64, 64, 3) and torch.equal(pixels[:1], control.as_image())
    assert (pixels[1:] == 0.5).all()


@pytest.mark.parametrize(
    ("tokenizer", "name"),
    [
        ("FluxTokenizer", "Flux Kontext"),
        ("Flux2Tokenizer", "reference latents"),
        ("KleinTokenizer8B", "reference latents"),
        ("Omnigen2Tokenizer", "reference latents"),
        ("QwenImageTokenizer", "Qwen-Image-Edit Plus"),
        ("WanT5Tokenizer", "Wan image to video"),
    ],
)
def test_auto_knows_models_by_their_tokenizer(tokenizer, name):
    assert find_method("auto", tokenizer).name == name
    assert find_method("concatenated latents", tokenizer).name == "concatenated latents"


def test_a_clip_that_tells_nothing_asks_for_the_setting():
    with pytest.raises(ValueError, match=r"this CLIP does not tell.*Set control pictures: reference latents for Flux"):
        find_method("auto", "SD1Tokenizer")


def test_the_nodes_options_are_the_methods(host):
    assert list(host.module("nodes.dataset").CONTROL_PICTURES) == options()
