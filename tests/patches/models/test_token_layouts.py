"""Where each family's transformer keeps its image tokens, against numbers counted by hand: a latent of 7 x 9 is padded
to 8 x 10, which are 4 x 5 = 20 patches of 2 x 2. `tests/with_comfyui/checks/test_todo_transformers.py` sees the same in
ComfyUI's own classes.
"""

from types import SimpleNamespace

import pytest
import torch
from graft_nodes.patches.models import registry
from graft_nodes.patches.models.routed_blocks import TokenRouting
from graft_nodes.patches.models.token_layout import Place, TokenLayout

PICTURE, VIDEO = (2, 4, 7, 9), (2, 4, 3, 7, 9)
GRID = (4, 5)
TWO = {"patch_size": 2}
LUMINA = {**TWO, "context_refiner": [None, None]}
Z_IMAGE = {**LUMINA, "pad_tokens_multiple": 8, "siglip_embedder": None}
SEES = {**Z_IMAGE, "siglip_embedder": "one", "siglip_pad_token": "one", "siglip_refiner": [None]}
WAN = {"patch_size": (1, 2, 2)}
DEEP = {"patch_size": (2, 2, 2)}
COSMOS = {"patch_temporal": 1, "patch_spatial": 2}


def latent(*shape):
    return torch.zeros(shape)


CASES = {
    "flux": ("Flux", TWO, PICTURE, 5, {}, 1, {25: Place(5)}),
    "flux without a text": ("Flux", TWO, PICTURE, None, {}, 1, {20: Place(0)}),
    "flux with references of 2 x 3 and 2 x 2": (
        "Flux",
        TWO,
        PICTURE,
        5,
        {"ref_latents": [latent(1, 4, 4, 5), latent(1, 4, 4, 4)]},
        1,
        {5 + 20 + 6 + 4: Place(5)},
    ),
    "chroma": ("Chroma", TWO, PICTURE, 5, {}, 1, {25: Place(5)}),
    "chroma radiance": ("ChromaRadiance", {"patch_size": 16}, (2, 3, 60, 75), 5, {}, 1, {25: Place(5)}),
    "sd3": ("MMDiT", TWO, PICTURE, 5, {}, 1, {20: Place(0), 25: Place(5)}),
    "sd3 with registers": ("MMDiT", {**TWO, "register_length": 3}, PICTURE, 5, {}, 1, {20: Place(0), 28: Place(8)}),
    "qwen": ("QwenImageTransformer2DModel", TWO, (2, 4, 1, 7, 9), 5, {}, 1, {25: Place(5)}),
    "qwen, three layers and a reference of two": (
        "QwenImageTransformer2DModel",
        TWO,
        VIDEO,
        5,
        {"ref_latents": [latent(1, 4, 2, 4, 5)]},
        3,
        {5 + 3 * 20 + 2 * 6: Place(5)},
    ),
    "lumina": ("NextDiT", LUMINA, PICTURE, 9, {"num_tokens": 6}, 1, {20: Place(0), 26: Place(6)}),
    "lumina, masked text": (
        "NextDiT",
        LUMINA,
        PICTURE,
        9,
        {"num_tokens": 6, "attention_mask": torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0]])},
        1,
        {20: Place(0), 23: Place(3)},
    ),
    "lumina, as much text as image": (
        "NextDiT",
        LUMINA,
        PICTURE,
        20,
        {"num_tokens": 20},
        1,
        {20: Place(0, skip=2), 40: Place(20)},
    ),
    "z-image, in eights": ("NextDiT", Z_IMAGE, PICTURE, 5, {}, 1, {24: Place(0), 8 + 24: Place(8)}),
    "z-image as first published": (
        "NextDiT",
        {**Z_IMAGE, "pad_tokens_multiple": None},
        PICTURE,
        5,
        {},
        1,
        {20: Place(0), 25: Place(5)},
    ),
    "z-image, as much text as image": (
        "NextDiT",
        Z_IMAGE,
        PICTURE,
        24,
        {},
        1,
        {24: Place(0, skip=2), 48: Place(24)},
    ),
    "z-image with a reference and its caption": (
        "NextDiT",
        Z_IMAGE,
        PICTURE,
        5,
        {"ref_latents": [latent(1, 4, 4, 6)], "ref_contexts": [latent(1, 9, 12)]},
        1,
        {8 + 24: Place(8), 16 + 8 + 8 + 24: Place(32)},
    ),
    "z-image, two references and one caption": (
        "NextDiT",
        Z_IMAGE,
        PICTURE,
        5,
        {"ref_latents": [latent(1, 4, 4, 6), latent(1, 4, 8, 8)], "ref_contexts": [latent(1, 9, 12)]},
        1,
        {8 + 16 + 24: Place(24), 8 + 16 + 8 + 24 + 24: Place(56)},
    ),
    "z-image, as many vision features as picture tokens": (
        "NextDiT",
        SEES,
        PICTURE,
        5,
        {
            "ref_latents": [latent(1, 4, 4, 6)],
            "ref_contexts": [latent(1, 9, 12)],
            "siglip_feats": [latent(1, 4, 6, 12)],
        },
        1,
        {8 + 24: Place(8, skip=1), 16 + 8 + 32 + 8 + 24: Place(64)},  # the picture itself has eight of padding
    ),
    "z-image, vision features without padding": (
        "NextDiT",
        {**SEES, "siglip_pad_token": None},
        PICTURE,
        5,
        {
            "ref_latents": [latent(1, 4, 4, 6)],
            "ref_contexts": [latent(1, 9, 12)],
            "siglip_feats": [latent(1, 3, 3, 12), latent(1, 9, 9, 12)],
        },
        1,
        {8 + 24: Place(8), 16 + 8 + 9 + 8 + 24: Place(41)},
    ),
    "wan": ("WanModel", WAN, VIDEO, 5, {}, 3, {60: Place(0)}),
    "wan, two frames in a token": ("WanModel", DEEP, VIDEO, 5, {}, 2, {40: Place(0)}),
    "wan, as much text as image": ("WanModel", WAN, VIDEO, 60, {}, 3, {60: Place(0, period=2)}),
    "wan, as much text and vision features as image": (
        "WanModel",
        {**WAN, "img_emb": "one"},
        VIDEO,
        60,
        {"clip_fea": latent(1, 60, 8)},
        3,
        {60: Place(0, period=3)},
    ),
    "wan, vision features in the text": (
        "WanModel",
        WAN,
        VIDEO,
        64,
        {"clip_fea": latent(1, 4, 8)},
        3,
        {60: Place(0, period=2)},
    ),
    "wan with a reference, whose odd row is left out": (
        "WanModel",
        {**WAN, "ref_conv": "one"},
        VIDEO,
        5,
        {"reference_latent": latent(2, 4, 7, 10)},
        3,
        {15 + 60: Place(15)},
    ),
    "wan that reads no reference": (
        "WanModel",
        {**WAN, "ref_conv": None},
        VIDEO,
        5,
        {"reference_latent": latent(2, 4, 7, 10)},
        3,
        {60: Place(0)},
    ),
    "wan with more frames": ("WanModel", WAN, VIDEO, 5, {"time_dim_concat": latent(2, 4, 2, 7, 9)}, 5, {100: Place(0)}),
    "wan with pictures in context": (
        "WanModel",
        DEEP,
        VIDEO,
        5,
        {"context_latents": [latent(2, 4, 3, 4, 6), latent(2, 4, 1, 4, 4)]},
        2,
        {40 + 2 * 6 + 4: Place(0)},
    ),
    "humo with a reference behind": (
        "HumoWanModel",
        WAN,
        VIDEO,
        5,
        {"reference_latent": latent(2, 4, 2, 7, 10)},
        3,
        {60 + 2 * 15: Place(0)},
    ),
    "humo, as much text as image": ("HumoWanModel", WAN, VIDEO, 60, {}, 3, {60: Place(0, period=2)}),
    "cosmos": ("GeneralDIT", COSMOS, VIDEO, 5, {}, 3, {60: Place(0)}),
    "cosmos, as much text as image": ("MiniTrainDIT", COSMOS, VIDEO, 60, {}, 3, {60: Place(0, period=2)}),
    "anima, as much image as its least text": (
        "Anima",
        COSMOS,
        (1, 4, 1, 32, 64),
        5,
        {"t5xxl_ids": latent(1, 9)},
        1,
        {512: Place(0, period=2)},
    ),
    "anima, as much image as a long text": (
        "Anima",
        COSMOS,
        (1, 4, 1, 64, 64),
        5,
        {"t5xxl_ids": latent(1, 1024)},
        1,
        {1024: Place(0, period=2)},
    ),
}


@pytest.mark.parametrize(
    ("name", "model", "shape", "text", "conditions", "frames", "places"), CASES.values(), ids=CASES
)
def test_where_the_image_is(name, model, shape, text, conditions, frames, places):
    context = None
    if text is not None:
        context = latent(shape[0], text, 12)
    found = classes()[name].layout(SimpleNamespace(**model), latent(*shape), context, conditions)
    assert (found.frames, dict(found.places)) == (frames, places)
    grids = {PICTURE: GRID, VIDEO: GRID, (2, 3, 60, 75): GRID, (2, 4, 1, 7, 9): GRID}
    assert found.grid == grids.get(shape, (shape[-2] // 2, shape[-1] // 2))


def classes():
    """Every class whose tokens a family knows."""
    layouts = [family.token_layout for family in registry.FAMILIES if isinstance(family.token_layout, TokenLayout)]
    return {name: kept for tokens in layouts for name, kept in tokens.classes.items()}


def test_every_layout_is_counted():
    of_cases = {classes()[name].layout for name, *_ in CASES.values()}
    assert of_cases == {kept.layout for kept in classes().values()}


DOUBLE = SimpleNamespace(flipped_img_txt=True)
OLD_DOUBLE = SimpleNamespace()
# Layouts that Apply TREAD alone asks for: family, class, model, latent, length of the text, conditions, frames, places.
ROUTED = {
    "hunyuan": (
        "hunyuan",
        "HunyuanVideo",
        {**WAN, "double_blocks": [DOUBLE]},
        VIDEO,
        5,
        {},
        3,
        {65: Place(0, stream=(0, 60))},
    ),
    "older hunyuan, with characters, vision and a reference": (
        "hunyuan",
        "HunyuanVideo",
        {**WAN, "double_blocks": [OLD_DOUBLE], "byt5_in": "one"},
        VIDEO,
        5,
        {"txt_byt5": latent(1, 4, 12), "clip_fea": latent(1, 2, 12), "ref_latent": latent(1, 4, 1, 7, 9)},
        3,
        {5 + 4 + 2 + 20 + 60: Place(31, stream=(11, 91))},
    ),
    "hunyuan without the part that reads characters": (
        "hunyuan",
        "HunyuanVideo",
        {"patch_size": (2, 2), "double_blocks": [DOUBLE], "byt5_in": None},
        PICTURE,
        5,
        {"txt_byt5": latent(1, 4, 12)},
        1,
        {25: Place(0, stream=(0, 20))},
    ),
    "auraflow": ("auraflow", "MMDiT", {**TWO, "register_tokens": latent(1, 8, 12)}, PICTURE, 5, {}, 1, {33: Place(13)}),
    "hidream": (
        "hidream",
        "HiDreamImageTransformer2DModel",
        TWO,
        PICTURE,
        5,
        {"encoder_hidden_states_llama3": latent(1, 32, 3, 12)},
        1,
        {20 + 5 + 2 * 3: Place(0, stream=(0, 20))},
    ),
    "hidream o1": (
        "hidream",
        "HiDreamO1Transformer",
        TWO,
        PICTURE,
        None,
        {"input_ids": latent(1, 6)},
        1,
        {26: Place(6)},
    ),
    "hidream o1 with references": (
        "hidream",
        "HiDreamO1Transformer",
        TWO,
        PICTURE,
        None,
        {"input_ids": latent(1, 6), "ref_patches": latent(1, 7, 12)},
        1,
        {33: Place(6)},
    ),
    "krea2": ("krea2", "SingleStreamDiT", {"patch": 2, "default_ref_method": None}, PICTURE, 5, {}, 1, {25: Place(5)}),
    "krea2 with a reference of 2 x 3": (
        "krea2",
        "SingleStreamDiT",
        {"patch": 2, "default_ref_method": "index"},
        PICTURE,
        5,
        {"ref_latents": [latent(1, 4, 4, 5)]},
        1,
        {31: Place(5)},
    ),
    "krea2, no method for references": (
        "krea2",
        "SingleStreamDiT",
        {"patch": 2, "default_ref_method": "index"},
        PICTURE,
        5,
        {"ref_latents": [latent(1, 4, 4, 5)], "ref_latents_method": None},
        1,
        {25: Place(5)},
    ),
    "ernie": ("ernie", "ErnieImageModel", TWO, PICTURE, 5, {}, 1, {25: Place(0)}),
    "omnigen2 with a reference of 2 x 3": (
        "omnigen2",
        "OmniGen2Transformer2DModel",
        TWO,
        PICTURE,
        5,
        {"ref_latents": [latent(1, 4, 4, 5)]},
        1,
        {31: Place(11)},
    ),
}


@pytest.mark.parametrize(
    ("family", "name", "model", "shape", "text", "conditions", "frames", "places"), ROUTED.values(), ids=ROUTED
)
def test_where_the_image_is_whose_tokens_skip(family, name, model, shape, text, conditions, frames, places):
    found = routed(family, name, model, shape, text, conditions)
    assert (found.frames, found.grid, dict(found.places)) == (frames, GRID, places)


def test_a_picture_that_hidream_edits_lies_beside_the_image():
    text, image = latent(1, 32, 3, 12), latent(2, 4, 7, 9)
    conditions = {"encoder_hidden_states_llama3": text, "image_cond": image}
    found = routed("hidream", "HiDreamImageTransformer2DModel", TWO, PICTURE, 5, conditions)
    assert found.grid == (4, 9) and found.places == {36 + 5 + 6: Place(0, stream=(0, 36))}


@pytest.mark.parametrize(("kind", "in_front"), [("prepend", 3 + 2 + 1), ("adaLN", 3 + 2)])
def test_sound_lies_behind_what_is_put_in_front(kind, in_front):
    model = {"transformer": SimpleNamespace(num_memory_tokens=3), "global_cond_type": kind, "patch_size": 4}
    found = routed(
        "stable-audio", "AudioDiffusionTransformer", model, (2, 4, 40), 5, {"prepend_cond": latent(1, 2, 12)}
    )
    assert (found.frames, found.grid) == (1, (1, 10)) and found.places == {in_front + 10: Place(in_front)}


def test_a_transformer_of_sound_without_memory():
    model = {"transformer": SimpleNamespace(), "global_cond_type": "adaLN"}
    found = routed("stable-audio", "AudioDiffusionTransformer", model, (2, 4, 40), 5, {})
    assert found.grid == (1, 40) and found.places == {40: Place(0)}


def test_a_token_of_ideogram_is_a_place_of_the_latent():
    found = routed("ideogram4", "Ideogram4Transformer2DModel", {}, PICTURE, 5, {})
    assert found.grid == (7, 9) and found.places == {5 + 63: Place(5)}


def routed(family, name, model, shape, text, conditions):
    """What Apply TREAD is told of a family's class."""
    (own,) = (one.token_routing for one in registry.FAMILIES if one.name == family)
    assert isinstance(own, TokenRouting)
    context = None if text is None else latent(shape[0], text, 12)
    return own.classes[name].layout(SimpleNamespace(**model), latent(*shape), context, conditions)
