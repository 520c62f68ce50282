"""OmniGen2."""

from __future__ import annotations

from torch import nn

from . import lumina
from .family import Missing, ModelFamily, TrainingTargets
from .layer_names import LayerNames, same_name
from .recognition import Recognition, SharedNames


def _unread(model: nn.Module) -> tuple[str, ...]:
    """What reads pictures as references, which training does not give."""
    if not hasattr(model, "ref_image_patch_embedder"):
        return ()
    return ("ref_image_",)


FAMILY = ModelFamily(
    name="omnigen2",
    title="OmniGen2",
    recognition=Recognition(
        names=("ref_image_(refiner|patch_embedder)_",), shared_names=SharedNames(lumina.SHARED, (2520,))
    ),
    modelspec=Missing("modelspec names no OmniGen2"),
    kohya=Missing("neither sd-scripts nor musubi trains it"),
    layer_names=LayerNames(prefix="transformer.", rename=same_name, model_sign=r"(^|\.)ref_image_patch_embedder\."),
    blocks=lumina.BLOCKS,
    token_layout=Missing("nobody has tried token downsampling with it"),
    training=TrainingTargets(attention=("attn",), feed_forward=("feed_forward",), unread=_unread),
    examples=(
        {"transformer.ref_image_refiner.0.attn.to_q": (2520, 2520)},
        {"diffusion_model.layers.0.attn.to_q": (2520, 2520)},
    ),
)
