"""Lumina 2, the tokens of Z-Image, which shares its class in ComfyUI, and OmniGen2, which shares its layers' names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from .block_names import plain_blocks
from .diffusers_names import LayerNames, grouped_qkv, rename_by_table
from .family import Kohya, ModelFamily, ModelSpec, TrainingTargets
from .recognition import Recognition, SharedNames
from .routed_blocks import REFERENCES, RoutedBlocks, RoutedClass, TokenRouting
from .token_layout import (
    Grid,
    Layout,
    Place,
    TokenLayout,
    TransformerClass,
    patch_size,
    reference_tokens,
    round_up,
    text_length,
    token_count,
    token_grid,
)

MODEL_SIGN = r"(^|\.)layers\.0\.attention\.qkv\."
SHARED = r"(layers|context_refiner|noise_refiner)_\d+_(attn|attention)_"
_RENAMES = (
    (r"attention\.out$", "attn.to_out.0"),
    (r"attention\.([qk])_norm$", r"attn.norm_\1"),
    (r"feed_forward\.w(\d)$", r"feed_forward.linear_\1"),
    (r"adaLN_modulation\.1$", "norm1.linear"),
    (r"^final_layer\.linear$", "norm_out.linear_2"),
    (r"^final_layer\.norm1\.linear$", "norm_out.linear_1"),
    (r"^cap_embedder\.", "time_caption_embed.caption_embedder."),
    (r"^t_embedder\.mlp\.0$", "time_caption_embed.timestep_embedder.linear_1"),
    (r"^t_embedder\.mlp\.2$", "time_caption_embed.timestep_embedder.linear_2"),
)


def _layout(model: nn.Module, x: Tensor, context: Tensor | None, conditions: Mapping[str, Any]) -> Layout:
    """Text, image. Before, two refiners see only the text and only the image. Z-Image pads text and image to a
    multiple; the padding tokens stay.
    """
    grid, text = token_grid(x.shape, patch_size(model)), text_length(context)
    image = grid[0] * grid[1]
    if not hasattr(model, "pad_tokens_multiple"):
        start = _unmasked_text(conditions)
        return _refined_layout(grid, {image: 0, start + image: start}, [(text, model.context_refiner)])
    multiple: int | None = model.pad_tokens_multiple  # type: ignore[assignment]
    caption, image = round_up(text, multiple), round_up(image, multiple)
    captions, references, vision = _references(model, conditions, multiple)
    sequence = captions + caption + vision + references + image
    refiners = [(captions + caption, model.context_refiner), (vision, getattr(model, "siglip_refiner", None) or ())]
    return _refined_layout(grid, {references + image: references, sequence: sequence - image}, refiners)


def _unmasked_text(conditions: Mapping[str, Any]) -> int:
    """Text tokens before the image in older ComfyUIs, which set it right after the unmasked ones (and fail themselves
    when their number differs within a batch).
    """
    mask = conditions.get("attention_mask")
    if mask is None:
        return int(conditions["num_tokens"])
    return int(mask.sum(dim=1).max())


def _references(model: nn.Module, conditions: Mapping[str, Any], multiple: int | None) -> tuple[int, int, int]:
    """Tokens added by reference images (Z-Image Omni): their captions, the images themselves, and their vision
    features.
    """
    latents = conditions.get("ref_latents") or ()
    if not len(latents):
        return 0, 0, 0
    captions = _reference_captions(conditions.get("ref_contexts") or (), len(latents), multiple)
    patch, images = patch_size(model), 0
    for latent in latents:
        images += round_up(token_count(latent.shape, patch), multiple)
    return captions, images, _vision_tokens(model, conditions, len(latents), multiple)


def _reference_captions(texts: Sequence[Tensor], references: int, multiple: int | None) -> int:
    """Tokens of all captions; a reference without a caption has only padding."""
    captions = max(0, references - len(texts)) * (multiple or 0)
    for text in texts:
        captions += round_up(text_length(text), multiple)
    return captions


def _vision_tokens(model: nn.Module, conditions: Mapping[str, Any], references: int, multiple: int | None) -> int:
    """Tokens of the references' vision features; an image without any, such as the generated one, has only padding."""
    if getattr(model, "siglip_embedder", None) is None:
        return 0
    if getattr(model, "siglip_pad_token", None) is None:
        multiple = None
    features = (conditions.get("siglip_feats") or ())[:references]
    tokens = (references + 1 - len(features)) * (multiple or 0)
    for feature in features:
        tokens += round_up(feature.shape[1] * feature.shape[2], multiple)
    return tokens


def _refined_layout(grid: Grid, starts: Mapping[int, int], refiners: Sequence[tuple[int, Any]]) -> Layout:
    """A layout of {length: where the image begins} whose first calls belong to refiners, (length, blocks), that do not
    see an image.
    """
    places = {}
    for length, start in starts.items():
        skip = sum(len(blocks) for refiner_length, blocks in refiners if refiner_length == length)
        places[length] = Place(start, skip)
    return Layout(1, grid, places)


_CLASS = TransformerClass(_layout, patch_size, ("noise_refiner", "layers"))
TOKENS = TokenLayout({"NextDiT": _CLASS, "NextDiTPixelSpace": _CLASS})
_ROUTED_BLOCKS = RoutedBlocks(
    "layers", "x", positions=("freqs_cis",), masks=("x_mask",), absent={"timestep_zero_index": REFERENCES}
)
_ROUTED = RoutedClass((_ROUTED_BLOCKS,), _layout)
ROUTING = TokenRouting({"NextDiT": _ROUTED, "NextDiTPixelSpace": _ROUTED})
BLOCKS = plain_blocks("layers")
TARGETS = TrainingTargets(attention=("attention",), feed_forward=("feed_forward",))
FAMILY = ModelFamily(
    name="lumina",
    title="Lumina 2",
    recognition=Recognition(shared_names=SharedNames(SHARED, (2304,))),
    modelspec=ModelSpec("lumina-2", "https://github.com/Alpha-VLLM/Lumina-Image-2.0"),
    kohya=Kohya("lumina2"),
    layer_names=LayerNames(
        rename=rename_by_table(_RENAMES),
        fused=(grouped_qkv(r"^(.*)attention\.qkv$", r"\1attn.to_{}"),),
        model_sign=MODEL_SIGN,
    ),
    blocks=BLOCKS,
    token_layout=TOKENS,
    token_routing=ROUTING,
    training=TARGETS,
    examples=(
        {"transformer.layers.0.attn.to_q": (2304, 2304)},
        {"diffusion_model.layers.0.attention.qkv": (3840, 2304)},
    ),
    masked_text_alone=("NextDiT",),  # its masks do not broadcast over a batch in ComfyUI 0.3.64
)


def _unread(model: nn.Module) -> tuple[str, ...]:
    """What reads pictures as references, which training does not give."""
    return () if not hasattr(model, "ref_image_patch_embedder") else ("ref_image_",)


def _omnigen2_layout(model: nn.Module, x: Tensor, context: Tensor | None, conditions: Mapping[str, Any]) -> Layout:
    """Text, reference images, image."""
    patch = patch_size(model)
    before, grid = (
        text_length(context) + reference_tokens(conditions.get("ref_latents"), patch),
        token_grid(x.shape, patch),
    )
    return Layout(1, grid, {before + grid[0] * grid[1]: Place(before)})


_OMNIGEN2_ROUTED = RoutedBlocks("layers", "hidden_states", positions=("image_rotary_emb",), masks=("attention_mask",))
OMNIGEN2 = ModelFamily(
    name="omnigen2",
    title="OmniGen2",
    recognition=Recognition(names=("ref_image_(refiner|patch_embedder)_",), shared_names=SharedNames(SHARED, (2520,))),
    layer_names=LayerNames(model_sign=r"(^|\.)ref_image_patch_embedder\."),
    blocks=BLOCKS,
    token_routing=TokenRouting({"OmniGen2Transformer2DModel": RoutedClass((_OMNIGEN2_ROUTED,), _omnigen2_layout)}),
    training=TrainingTargets(attention=("attn",), feed_forward=("feed_forward",), unread=_unread),
    examples=(
        {"transformer.ref_image_refiner.0.attn.to_q": (2520, 2520)},
        {"diffusion_model.layers.0.attn.to_q": (2520, 2520)},
    ),
)
