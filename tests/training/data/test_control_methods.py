"""What each way to take control pictures makes of their pixels, and how `auto` chooses. ComfyUI's own nodes are the
judges in tests/with_comfyui/checks/test_control_pictures.py.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from graft_nodes.training.data.buckets import frame
from graft_nodes.training.data.control_methods import (
    METHODS,
    ControlSize,
    FramedControl,
    find_method,
    has_same_shape,
    options,
    set_size,
)
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


def _pixels(picture):
    return torch.from_numpy(np.asarray(picture, dtype=np.float32) / 255.0)[None]


def _alone(picture):
    """A picture as the control picture of an image of its own shape, of which nothing is cut off."""
    return FramedControl(picture, frame(picture.size, picture.size))


def test_the_shortest_side_of_a_reference_is_one_step():
    control = FramedControl(_picture(2, 900), frame((64, 64), (64, 64)))
    assert BY_NAME["reference latents"].for_vae(control).shape[2] == 16


def test_kontext_knows_17_sizes_of_a_megapixel():
    """Wide and tall ones are the same; the model takes sides in steps of 16; the nearest aspect ratio is taken."""
    sizes = {}
    for width in range(40, 251, 3):
        pixels = BY_NAME["Flux Kontext"].for_vae(_alone(Image.new("RGB", (width, 100))))
        sizes[width / 100] = (pixels.shape[2], pixels.shape[1])
    known = set(sizes.values())
    assert len(known) == 17 and known == {(height, width) for width, height in known}
    for width, height in known:
        assert width % 16 == height % 16 == 0 and width * height == pytest.approx(2**20, rel=0.02)
    for aspect, (width, height) in sizes.items():
        assert abs(width / height - aspect) == min(abs(w / h - aspect) for w, h in known)


@pytest.mark.parametrize(("size", "box"), [((104, 100), (2, 0, 102, 100)), ((100, 106), (0, 3, 100, 103))])
def test_kontext_takes_the_middle_of_a_picture(size, box):
    picture = _picture(*size)
    expected = picture.crop(box).resize((1024, 1024), Image.Resampling.LANCZOS)
    found = BY_NAME["Flux Kontext"].for_vae(_alone(picture))
    assert torch.allclose(found, _pixels(expected), rtol=0, atol=1.01 / 255) and found.shape == (1, 1024, 1024, 3)


@pytest.mark.parametrize("name", ["Qwen-Image-Edit", "Qwen-Image-Edit Plus"])
def test_qwen_image_edit_scales_to_a_megapixel(name):
    """A picture of a quarter of it: each pixel becomes four."""
    picture = _picture(256, 1024)
    expected = _pixels(picture).repeat_interleave(2, 1).repeat_interleave(2, 2)
    assert torch.allclose(BY_NAME[name].for_vae(_alone(picture)), expected, rtol=0, atol=1e-6)


def test_qwen_image_edit_plus_sees_smaller_pictures():
    """Each pixel that the text encoder sees is the mean of four of a picture of four times its area."""
    picture = _picture(2 * 192, 2 * 768)
    expected = torch.nn.functional.avg_pool2d(_pixels(picture).movedim(-1, 1), 2).movedim(1, -1)
    assert torch.allclose(BY_NAME["Qwen-Image-Edit Plus"].seen(_alone(picture)), expected, rtol=0, atol=1e-6)
    first = BY_NAME["Qwen-Image-Edit"]
    assert torch.equal(first.seen(_alone(picture)), first.for_vae(_alone(picture)))


def test_sides_are_rounded_as_the_nodes_do():
    """sqrt(1048576 / 13000) = 8.981 and sqrt(147456 / 13000) = 3.368; Plus takes multiples of 8 for the VAE."""
    control = _alone(_picture(100, 130))
    first, plus = BY_NAME["Qwen-Image-Edit"], BY_NAME["Qwen-Image-Edit Plus"]
    assert first.for_vae(control).shape == (1, 1168, 898, 3)
    assert plus.for_vae(control).shape == (1, 1168, 896, 3)
    assert plus.seen(control).shape == (1, 438, 337, 3)
    assert plus.for_vae(_alone(_picture(1, 100_000))).shape[2] == 8


def test_entries_are_those_that_the_models_read():
    latents = [torch.rand(1, 16, 3, 4, 5), torch.rand(1, 16, 1, 2, 3)]
    found = {name: method.entries(latents) for name, method in BY_NAME.items()}
    for name in ("reference latents", "Flux Kontext", "Qwen-Image-Edit", "Qwen-Image-Edit Plus"):
        assert found[name].keys() == {"reference_latents"}
        assert all(one is other for one, other in zip(found[name]["reference_latents"], latents, strict=True))
    assert found["concatenated latents"] == {"concat_latent_image": latents[0]}
    video = found["Wan image to video"]
    assert video.keys() == {"concat_latent_image", "concat_mask"} and video["concat_latent_image"] is latents[0]
    assert video["concat_mask"].shape == (1, 1, 3, 4, 5)  # 0: the frame is there
    assert video["concat_mask"].mean((0, 1, 3, 4)).tolist() == [0.0, 1.0, 1.0]
    assert {name: method.most for name, method in BY_NAME.items()} == {
        "reference latents": 3,
        "Flux Kontext": 3,
        "Qwen-Image-Edit": 1,
        "Qwen-Image-Edit Plus": 3,
        "concatenated latents": 1,
        "Wan image to video": 1,
        "inpainting mask": 1,
    }


def test_prompts_name_the_pictures_that_the_text_encoder_sees():
    assert BY_NAME["Qwen-Image-Edit"].prompt("make it red", 1) == ("make it red", {})
    text, options = BY_NAME["Qwen-Image-Edit Plus"].prompt("make it red", 2)
    place = "<|vision_start|><|image_pad|><|vision_end|>"
    assert text == f"Picture 1: {place}Picture 2: {place}make it red"
    assert options.keys() == {"llama_template"} and options["llama_template"].count("{}") == 1


@pytest.mark.parametrize(
    ("tokenizer", "name"),
    [
        ("FluxTokenizer", "Flux Kontext"),
        ("Flux2Tokenizer", "reference latents"),
        ("KleinTokenizer", "reference latents"),
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
    given = host.node("GraftDataset").INPUT_TYPES()["optional"]["control_pictures"]
    assert (given[0] if isinstance(given[0], list) else given[1]["options"]) == list(options())


def test_the_help_page_has_a_row_for_each_method_with_the_node_that_does_the_same():
    page = (Path(__file__).parents[3] / "web" / "docs" / "GraftDataset.md").read_text(encoding="utf-8")
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| ")]
    nodes = {cells[0].removeprefix("| "): cells[1] for cells in rows}
    for method in METHODS:
        assert f"`{method.node.partition(' and ')[0]}`" in nodes[method.name]


def _sized(method, size, *picture):
    control = FramedControl(_picture(*picture), frame((64, 64), (64, 64)))
    return control.picture, set_size(BY_NAME[method], size).for_vae(control)


@pytest.mark.parametrize("method", ["reference latents", "Flux Kontext", "Qwen-Image-Edit", "Qwen-Image-Edit Plus"])
def test_musubis_sizes_are_about_an_area_or_the_pictures_own(method):
    assert set_size(BY_NAME[method], ControlSize()) is BY_NAME[method]
    _, pixels = _sized(method, ControlSize(512 * 512), 300, 100)
    assert pixels.shape == (1, 288, 880, 3)  # sqrt(512 * 512 * 3) = 886.8, / 3 = 295.6: the nearest multiples of 16
    picture, pixels = _sized(method, ControlSize(kept=True), 301, 103)
    middle = np.asarray(picture, dtype=np.float32)[3:99, 6:294] / 255.0
    assert torch.equal(pixels[0], torch.from_numpy(middle))
    assert _sized(method, ControlSize(512 * 512, True), 512, 512)[1].shape == (1, 512, 512, 3)
    assert _sized(method, ControlSize(512 * 512, True), 1024, 1024)[1].shape == (1, 512, 512, 3)
    assert _sized(method, ControlSize(512 * 512, True), 64, 64)[1].shape == (1, 64, 64, 3)
    assert _sized(method, ControlSize(kept=True), 10, 40)[1].shape == (1, 32, 16, 3)


def test_sizes_have_names_of_their_own_which_the_cache_tells_apart():
    sizes = ControlSize(512 * 512), ControlSize(kept=True), ControlSize(512 * 512, True), ControlSize()
    assert [set_size(BY_NAME["Flux Kontext"], size).name for size in sizes] == [
        "Flux Kontext at 262,144 pixels",
        "Flux Kontext at their own size",
        "Flux Kontext at their own size, up to 262,144 pixels",
        "Flux Kontext",
    ]


@pytest.mark.parametrize("method", ["concatenated latents", "Wan image to video", "inpainting mask"])
def test_a_control_picture_that_has_the_size_of_its_image_has_no_other(method):
    for size in (ControlSize(512 * 512), ControlSize(kept=True)):
        with pytest.raises(ValueError, match="control_resolution and no_resize_control do not fit control pictures"):
            set_size(BY_NAME[method], size)
