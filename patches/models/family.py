"""Where each diffusion transformer family of ComfyUI keeps its image tokens in self-attention: shapes in, positions out
(no tensors).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..token_downsampling.tokens import Grid


@dataclass(frozen=True)
class Place:
    """One kind of self-attention call, known by its sequence length.

    `start` says where the image begins. When other attention calls of the model happen to have the same length, the
    first `skip` calls of it are theirs, and after that every `period`-th call is this one.
    """

    start: int
    skip: int = 0
    period: int = 1


@dataclass(frozen=True)
class Layout:
    """The image tokens of one forward pass: frames of one grid each, and {sequence length: place} of the calls that
    hold them.
    """

    frames: int
    grid: Grid
    places: Mapping[int, Place]


@dataclass(frozen=True)
class Family:
    """One transformer family: how to find its layout, its patch sides, and where its blocks with self-attention are.

    `layout(model, x, context, conditions)` takes the latent (B, C, [T,] H, W), the text tokens (B, L, D) or None, and
    the other conditions of the call by name.
    """

    layout: Callable[[nn.Module, Tensor, Tensor | None, Mapping[str, Any]], Layout]
    patch: Callable[[nn.Module], int]
    blocks: tuple[str, ...]


def family_of(model: nn.Module) -> Family:
    """The family of a diffusion model; raises TypeError that names a class nobody knows."""
    name = type(model).__name__
    family = FAMILIES.get(name)
    if family is None:
        known = ", ".join(sorted(FAMILIES))
        raise TypeError(
            f"token downsampling does not know where {name} keeps its image tokens, so it would do nothing or harm; "
            f"it knows LDM-layout UNets and these transformers: {known}"
        )
    missing = [
        block for block in family.blocks if not isinstance(getattr(model, block, None), nn.ModuleList | nn.ModuleDict)
    ]
    if missing:
        raise TypeError(
            f"this {name} has no {' and no '.join(missing)}: it is not the ComfyUI class that token downsampling knows"
        )
    return family


def block_count(model: nn.Module, family: Family) -> int:
    """How many blocks have self-attention."""
    return sum(len(getattr(model, name)) for name in family.blocks)


def token_grid(latent: Sequence[int], patch: int) -> Grid:
    """Tokens of a latent's (..., height, width); sides that do not divide are padded by the model, hence rounded up."""
    return math.ceil(latent[-2] / patch), math.ceil(latent[-1] / patch)


def _count(latent: Sequence[int], patch: int) -> int:
    height, width = token_grid(latent, patch)
    return height * width


def _length(context: Tensor | None) -> int:
    if context is None:
        return 0
    return context.shape[1]


def _flux(model: nn.Module, x: Tensor, context: Tensor | None, conditions: Mapping[str, Any]) -> Layout:
    """Text, image, reference images. Flux, Flux 2, Chroma: joint attention in double and in single blocks."""
    patch, text = int(model.patch_size), _length(context)  # type: ignore[arg-type]
    grid = token_grid(x.shape, patch)
    if type(model).__name__ != "Flux":
        references = 0
    else:
        references = sum(_count(ref.shape, patch) for ref in conditions.get("ref_latents") or ())
    return Layout(1, grid, {text + grid[0] * grid[1] + references: Place(text)})


def _sd3(model: nn.Module, x: Tensor, context: Tensor | None, conditions: Mapping[str, Any]) -> Layout:
    """Registers, text, image in joint attention; the image alone in the second attention of SD3.5 medium's first
    blocks.
    """
    text = _length(context) + int(getattr(model, "register_length", 0))
    grid = token_grid(x.shape, int(model.patch_size))  # type: ignore[arg-type]
    image = grid[0] * grid[1]
    return Layout(1, grid, {image: Place(0), text + image: Place(text)})


def _qwen(model: nn.Module, x: Tensor, context: Tensor | None, conditions: Mapping[str, Any]) -> Layout:
    """Text, image (layers or frames one after the other), reference images."""
    patch, text = int(model.patch_size), _length(context)  # type: ignore[arg-type]
    grid, frames = token_grid(x.shape, patch), x.shape[2]
    references = sum(ref.shape[-3] * _count(ref.shape, patch) for ref in conditions.get("ref_latents") or ())
    return Layout(frames, grid, {text + frames * grid[0] * grid[1] + references: Place(text)})


def _lumina(model: nn.Module, x: Tensor, context: Tensor | None, conditions: Mapping[str, Any]) -> Layout:
    """Text, image: Lumina 2 and Z-Image. Two refiners see the text alone and the image alone before.

    Z-Image pads text and image to a multiple; the padding tokens stay. Older ComfyUIs set the image right after the
    unmasked text (and fail themselves when that differs within a batch).
    """
    grid, text = token_grid(x.shape, int(model.patch_size)), _length(context)  # type: ignore[arg-type]
    image = grid[0] * grid[1]
    if not hasattr(model, "pad_tokens_multiple"):
        mask = conditions.get("attention_mask")
        if mask is None:
            start = int(conditions["num_tokens"])
        else:
            start = int(mask.sum(dim=1).max())
        return _refined(grid, {image: 0, start + image: start}, [(text, model.context_refiner)])
    multiple: int | None = model.pad_tokens_multiple  # type: ignore[assignment]
    caption, picture = _padded(text, multiple), _padded(image, multiple)
    captions, pictures, vision = _references(model, conditions, multiple)
    sequence = captions + caption + vision + pictures + picture
    refiners = [(captions + caption, model.context_refiner), (vision, getattr(model, "siglip_refiner", None) or ())]
    return _refined(grid, {pictures + picture: pictures, sequence: sequence - picture}, refiners)


def _references(model: nn.Module, conditions: Mapping[str, Any], multiple: int | None) -> tuple[int, int, int]:
    """Tokens that reference images add (Z-Image Omni): of their captions, of themselves, of their vision features."""
    latents, texts = conditions.get("ref_latents") or (), conditions.get("ref_contexts") or ()
    if not len(latents):
        return 0, 0, 0
    nothing = multiple or 0
    captions = sum(_padded(_length(texts[i]), multiple) if i < len(texts) else nothing for i in range(len(latents)))
    captions += sum(_padded(_length(text), multiple) for text in texts[len(latents) :])
    patch = int(model.patch_size)  # type: ignore[arg-type]
    pictures = sum(_padded(_count(latent.shape, patch), multiple) for latent in latents)
    if getattr(model, "siglip_embedder", None) is None:
        return captions, pictures, 0
    padding = getattr(model, "siglip_pad_token", None) is not None
    features = conditions.get("siglip_feats") or ()
    sizes = [feature.shape[1] * feature.shape[2] for feature in features[: len(latents)]]
    missing = (len(latents) + 1 - len(sizes)) * (nothing if padding else 0)  # the picture itself has none
    return captions, pictures, sum(_padded(size, multiple if padding else None) for size in sizes) + missing


def _refined(grid: Grid, starts: Mapping[int, int], refiners: Sequence[tuple[int, Any]]) -> Layout:
    """A layout of {length: where the image begins} whose first calls belong to refiners, (length, blocks), that see no
    image.
    """
    skips = {length: sum(len(blocks) for seen, blocks in refiners if seen == length) for length in starts}
    return Layout(1, grid, {length: Place(start, skips[length]) for length, start in starts.items()})


def _padded(count: int, multiple: int | None) -> int:
    if multiple is None:
        return count
    return math.ceil(count / multiple) * multiple


def _wan(model: nn.Module, x: Tensor, context: Tensor | None, conditions: Mapping[str, Any]) -> Layout:
    """A reference picture's tokens, the frames, in-context references; the text is in a cross-attention of its own."""
    depth, patch = int(model.patch_size[0]), int(model.patch_size[1])  # type: ignore[index]
    added = conditions.get("time_dim_concat")
    frames = math.ceil(x.shape[2] / depth) + (0 if added is None else math.ceil(added.shape[2] / depth))
    grid, before = token_grid(x.shape, patch), 0
    reference = conditions.get("reference_latent")
    if getattr(model, "ref_conv", None) is not None and reference is not None:
        before = (reference.shape[-2] // patch) * (
            reference.shape[-1] // patch
        )  # a plain strided convolution: rounded down
    after = sum(
        math.ceil(ref.shape[-3] / depth) * _count(ref.shape, patch) for ref in conditions.get("context_latents") or ()
    )
    total = before + frames * grid[0] * grid[1] + after
    texts, vision = [_length(context)], conditions.get("clip_fea")
    if vision is not None:
        embedded = getattr(model, "img_emb", None) is not None
        if embedded:
            texts = [_length(context), vision.shape[-2]]
        else:
            texts = [_length(context) - vision.shape[-2], vision.shape[-2]]
    return Layout(frames, grid, {total: Place(before, period=1 + texts.count(total))})


def _humo(model: nn.Module, x: Tensor, context: Tensor | None, conditions: Mapping[str, Any]) -> Layout:
    """The frames, then a reference picture; text and audio are in cross-attentions of their own (audio
    frame by frame).
    """
    depth, patch = int(model.patch_size[0]), int(model.patch_size[1])  # type: ignore[index]
    reference, added = conditions.get("reference_latent"), conditions.get("time_dim_concat")
    frames = math.ceil(x.shape[2] / depth) + (0 if added is None else math.ceil(added.shape[2] / depth))
    grid = token_grid(x.shape, patch)
    if reference is None:
        after = 0
    else:
        after = (reference.shape[-3] // depth) * (reference.shape[-2] // patch) * (reference.shape[-1] // patch)
    total = frames * grid[0] * grid[1] + after
    return Layout(frames, grid, {total: Place(0, period=2 if _length(context) == total else 1)})


def _cosmos(model: nn.Module, x: Tensor, context: Tensor | None, conditions: Mapping[str, Any]) -> Layout:
    """The frames; the text is in a cross-attention of its own (Anima makes at least 512 text tokens)."""
    frames = math.ceil(x.shape[2] / int(model.patch_temporal))  # type: ignore[arg-type]
    grid = token_grid(x.shape, int(model.patch_spatial))  # type: ignore[arg-type]
    words = conditions.get("t5xxl_ids")
    if words is None:
        text = _length(context)
    else:
        text = max(512, words.shape[-1])
    total = frames * grid[0] * grid[1]
    return Layout(frames, grid, {total: Place(0, period=2 if text == total else 1)})


def _patch_size(model: nn.Module) -> int:
    size = model.patch_size
    return int(size[1]) if isinstance(size, tuple | list) else int(size)  # type: ignore[arg-type]


_FLUX = Family(_flux, _patch_size, ("double_blocks", "single_blocks"))
_SD3 = Family(_sd3, _patch_size, ("joint_blocks",))
_LUMINA = Family(_lumina, _patch_size, ("noise_refiner", "layers"))
_WAN = Family(_wan, _patch_size, ("blocks",))
_HUMO = Family(_humo, _patch_size, ("blocks",))
_COSMOS = Family(_cosmos, lambda model: int(model.patch_spatial), ("blocks",))  # type: ignore[arg-type]

# By class name, exact: a subclass may keep its tokens elsewhere (Wan's S2V and SCAIL do, causal Wan keeps keys of
# earlier frames).
FAMILIES: dict[str, Family] = {
    "Flux": _FLUX,
    "Chroma": _FLUX,
    "ChromaRadiance": _FLUX,
    "MMDiT": _SD3,
    "OpenAISignatureMMDITWrapper": _SD3,
    "QwenImageTransformer2DModel": Family(_qwen, _patch_size, ("transformer_blocks",)),
    "NextDiT": _LUMINA,
    "NextDiTPixelSpace": _LUMINA,
    "WanModel": _WAN,
    "VaceWanModel": Family(_wan, _patch_size, ("blocks", "vace_blocks")),
    "CameraWanModel": _WAN,
    "AnimateWanModel": _WAN,
    "HumoWanModel": _HUMO,
    "GeneralDIT": _COSMOS,
    "MiniTrainDIT": _COSMOS,
    "Anima": _COSMOS,
}
