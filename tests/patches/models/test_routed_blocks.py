"""Where transformers that token downsampling does not know keep their image tokens, against numbers counted by hand: a
latent of 8 x 10 has 4 x 5 = 20 patches of 2 x 2. `tests/with_comfyui/checks/test_tread_families.py` sees the same in
ComfyUI's own classes.
"""

from types import SimpleNamespace

import pytest
import torch
from graft_nodes.patches.models import registry
from graft_nodes.patches.models.token_layout import Place, TokenLayout

PICTURE, VIDEO = (2, 4, 8, 10), (2, 4, 3, 8, 10)


def latent(*shape):
    return torch.zeros(shape)


def hunyuan(patch=(1, 2, 2), old=False, **more):
    block = SimpleNamespace(flipped_img_txt=True) if old else SimpleNamespace()
    return {"patch_size": list(patch), "double_blocks": [block], **more}


AUDIO = {"transformer": SimpleNamespace(num_memory_tokens=7), "global_cond_type": "prepend", "patch_size": 2}
CASES = {  # (class, model, latent, text, conditions, image's tokens, {length: place})
    "hunyuan video": ("HunyuanVideo", hunyuan(), VIDEO, 5, {}, 60, {65: Place(5, stream=(5, 65))}),
    "hunyuan video, image in front": (
        "HunyuanVideo",
        hunyuan(old=True),
        VIDEO,
        5,
        {},
        60,
        {65: Place(0, stream=(0, 60))},
    ),
    "hunyuan video with a reference of 2 x 3": (
        "HunyuanVideo",
        hunyuan(),
        VIDEO,
        5,
        {"ref_latent": latent(2, 4, 1, 4, 6)},
        60,
        {71: Place(11, stream=(5, 71))},
    ),
    "hunyuan video, reference and image in front": (
        "HunyuanVideo",
        hunyuan(old=True),
        VIDEO,
        5,
        {"ref_latent": latent(2, 4, 1, 4, 6)},
        60,
        {71: Place(6, stream=(0, 66))},
    ),
    "hunyuan video, two frames in a token": (
        "HunyuanVideo",
        hunyuan((2, 2, 2)),
        VIDEO,
        5,
        {},
        40,
        {45: Place(5, stream=(5, 45))},
    ),
    "hunyuan 1.5: characters, vision, text": (
        "HunyuanVideo",
        hunyuan((1, 1, 1), byt5_in="one"),
        (2, 4, 1, 4, 5),
        5,
        {"txt_byt5": latent(2, 4, 8), "clip_fea": latent(2, 9, 8)},
        20,
        {38: Place(18, stream=(18, 38))},
    ),
    "hunyuan that reads no characters": (
        "HunyuanVideo",
        hunyuan(byt5_in=None),
        VIDEO,
        5,
        {"txt_byt5": latent(2, 4, 8)},
        60,
        {65: Place(5, stream=(5, 65))},
    ),
    "hunyuan image": ("HunyuanVideo", hunyuan((1, 1)), PICTURE, 5, {}, 80, {85: Place(5, stream=(5, 85))}),
    "ernie": ("ErnieImageModel", {"patch_size": 1}, PICTURE, 5, {}, 80, {85: Place(0)}),
    "ideogram": ("Ideogram4Transformer2DModel", {"patch_size": 2}, PICTURE, 5, {}, 80, {85: Place(5)}),
    "ideogram without a text": (
        "Ideogram4Transformer2DModel",
        {"patch_size": 2},
        PICTURE,
        None,
        {},
        80,
        {80: Place(0)},
    ),
    "krea 2": ("SingleStreamDiT", {"patch": 2, "default_ref_method": None}, PICTURE, 5, {}, 20, {25: Place(5)}),
    "krea 2 with a reference of 2 x 3": (
        "SingleStreamDiT",
        {"patch": 2, "default_ref_method": "index"},
        PICTURE,
        5,
        {"ref_latents": [latent(2, 4, 4, 6)]},
        20,
        {31: Place(5)},
    ),
    "krea 2 with a method for its reference": (
        "SingleStreamDiT",
        {"patch": 2, "default_ref_method": None},
        PICTURE,
        5,
        {"ref_latents": [latent(2, 4, 4, 6)], "ref_latents_method": "index"},
        20,
        {31: Place(5)},
    ),
    "krea 2 that leaves out references": (
        "SingleStreamDiT",
        {"patch": 2, "default_ref_method": None},
        PICTURE,
        5,
        {"ref_latents": [latent(2, 4, 4, 6)]},
        20,
        {25: Place(5)},
    ),
    "auraflow": (
        "MMDiT",
        {"patch_size": 2, "register_tokens": latent(1, 8, 4)},
        PICTURE,
        5,
        {},
        20,
        {33: Place(13)},
    ),
    "omnigen 2 with a reference of 2 x 3": (
        "OmniGen2Transformer2DModel",
        {"patch_size": 2},
        PICTURE,
        5,
        {"ref_latents": [latent(2, 4, 4, 6)]},
        20,
        {31: Place(11)},
    ),
    "hidream": (
        "HiDreamImageTransformer2DModel",
        {"patch_size": 2},
        PICTURE,
        5,
        {"encoder_hidden_states_llama3": latent(2, 3, 7, 8)},
        20,
        {39: Place(0, stream=(0, 20))},
    ),
    "hidream with a picture to edit": (
        "HiDreamImageTransformer2DModel",
        {"patch_size": 2},
        PICTURE,
        5,
        {"encoder_hidden_states_llama3": latent(2, 3, 7, 8), "image_cond": latent(2, 4, 8, 10)},
        40,
        {59: Place(0, stream=(0, 40))},
    ),
    "hidream o1": (
        "HiDreamO1Transformer",
        {"patch_size": 32},
        (2, 3, 64, 96),
        None,
        {"input_ids": latent(2, 4)},
        6,
        {10: Place(4)},
    ),
    "hidream o1 with a reference": (
        "HiDreamO1Transformer",
        {"patch_size": 32},
        (2, 3, 64, 96),
        None,
        {"input_ids": latent(2, 9), "ref_patches": latent(1, 8, 16)},
        6,
        {23: Place(9)},
    ),
    "stable audio": (
        "AudioDiffusionTransformer",
        AUDIO,
        (2, 64, 20),
        5,
        {"prepend_cond": latent(2, 3, 8)},
        10,
        {21: Place(11)},
    ),
    "stable audio, modulated, of older ComfyUIs": (
        "AudioDiffusionTransformer",
        {"transformer": SimpleNamespace(), "global_cond_type": "adaLN"},
        (2, 64, 20),
        5,
        {},
        20,
        {20: Place(0)},
    ),
}


@pytest.mark.parametrize(("name", "model", "shape", "text", "conditions", "count", "places"), CASES.values(), ids=CASES)
def test_where_the_image_is(name, model, shape, text, conditions, count, places):
    context = None
    if text is not None:
        context = latent(shape[0], text, 12)
    routed = registry.token_routing().classes[name]
    found = routed.layout(SimpleNamespace(**model), latent(*shape), context, conditions)
    assert found.frames * found.grid[0] * found.grid[1] == count
    assert dict(found.places) == places


def test_every_layout_is_counted():
    known = [family.token_layout for family in registry.FAMILIES if isinstance(family.token_layout, TokenLayout)]
    counted_elsewhere = {one.layout for tokens in known for one in tokens.classes.values()}
    found = {one.layout for one in registry.token_routing().classes.values()}
    here = {registry.token_routing().classes[name].layout for name, *_ in CASES.values()}
    assert found - counted_elsewhere - {None} == here
