"""The record of a model family: all that Graft knows about one kind of diffusion model, in one place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from .block_names import BlockNames
from .diffusers_names import LayerNames, WeightPart
from .recognition import Recognition
from .routed_blocks import TokenRouting
from .token_layout import TokenLayout, UNetLayout


@dataclass(frozen=True)
class Missing:
    """A placeholder for what a family lacks, with the reason."""

    why: str


@dataclass(frozen=True)
class ModelSpec:
    """`modelspec.architecture` (without /lora) and `modelspec.implementation` of a LoRA for the family."""

    architecture: str
    implementation: str


@dataclass(frozen=True)
class Kohya:
    """How sd-scripts writes a LoRA file for the family.

    `version` is `ss_base_model_version`, `v2` is `ss_v2`. `diffusers_blocks`: the UNet's layers have diffusers' block
    names. `one_text_encoder`: the text encoder has no number (`lora_te_`, not `lora_te1_`).
    """

    version: str | Missing
    v2: bool | Missing = Missing("ss_v2 is about SD1.x, SD2.x and SDXL alone")
    diffusers_blocks: bool = False
    one_text_encoder: bool = False


@dataclass(frozen=True)
class TrainingTargets:
    """Which layers GraftAdapter's presets train: regular expressions for one part of a layer's path.

    `attn\\d*` selects `blocks.0.attn1.to_q`. `unread(model)` gives path prefixes of layers whose output is never used,
    so they cannot learn anything; `sound(model)` those of layers that are used only where a video comes with its sound.
    `on_request` are parts of the network that are trained only when a layer filter names them; `only_in_all` are parts
    that the presets attention and attention+ff leave out unless one does.
    """

    attention: tuple[str, ...]
    feed_forward: tuple[str, ...]
    unread: Callable[[nn.Module], tuple[str, ...]] | None = None
    on_request: tuple[str, ...] = ()
    only_in_all: tuple[str, ...] = ()
    sound: Callable[[nn.Module], tuple[str, ...]] | None = None


_SAME_NAMES = LayerNames()


@dataclass(frozen=True, eq=False, kw_only=True)
class ModelFamily:
    """One kind of diffusion model.

    `name` is for code, `title` for people. `masked_text_alone` are ComfyUI's classes (and their subclasses)
    that take one caption with a mask at a time. `examples` are the layers {name: weight's shape} of LoRA files for it,
    one entry per file; tests read them. `other_names` are names that files have for the same layers beside
    `layer_names`: those of the authors' own code, or of another model of the family. `expert_boundary(model)` is the
    noise level at which a sampler goes from the high-noise model of a pair to the low-noise one; None for a model that
    is none of a pair.
    """

    name: str
    title: str
    recognition: Recognition
    modelspec: ModelSpec | Missing = Missing("modelspec has no name for it")
    kohya: Kohya | Missing = Missing("no trainer writes a version (ss_base_model_version) for it that others read")
    layer_names: LayerNames | Missing = _SAME_NAMES
    blocks: BlockNames | Missing
    token_layout: TokenLayout | UNetLayout | Missing = Missing("nobody has tried token downsampling with it")
    token_routing: TokenRouting | UNetLayout | Missing
    training: TrainingTargets | Missing
    examples: Sequence[Mapping[str, tuple[int, ...]]]
    weight_parts: tuple[WeightPart, ...] = ()
    other_names: tuple[LayerNames, ...] = ()
    masked_text_alone: tuple[str, ...] = ()
    expert_boundary: Callable[[nn.Module], float | None] | None = None
