"""Token routing: which blocks of a model tokens can skip."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..models import registry
from ..models.routed_blocks import RoutedBlocks, RoutedClass
from ..models.torch_compile import unwrap
from ..token_downsampling.unet import attention_blocks
from .settings import RoutingSettings

Span = Sequence[tuple[nn.Module, RoutedBlocks]]  # blocks one after the other, and how each is called
_IN_UNET = RoutedBlocks("transformer_blocks", "x")


@dataclass(frozen=True, eq=False)
class TransformerRouting:
    """The plan for a transformer: its class, the blocks that are skipped, and how many blocks it has."""

    routed: RoutedClass
    skipped: range
    total: int

    def spans(self, model: nn.Module) -> list[Span]:
        """The blocks that are skipped, as one span."""
        listed = [(block, called) for called in self.routed.blocks for block in _blocks(model, called)]
        return [[listed[index] for index in self.skipped]]


@dataclass(frozen=True, eq=False)
class UNetRouting:
    """The plan for a UNet: the names of its transformers at the greatest width, and how many blocks these have and the
    whole UNet has.
    """

    transformers: tuple[str, ...]
    skipped: int
    total: int

    def spans(self, model: nn.Module) -> list[Span]:
        """The blocks of each transformer, as a span of their own."""
        spans: list[Span] = []
        for name in self.transformers:
            blocks: Any = model.get_submodule(name).transformer_blocks
            spans.append([(block, _IN_UNET) for block in blocks])
        return spans


Routing = TransformerRouting | UNetRouting


def plan_routing(model: nn.Module, settings: RoutingSettings) -> Routing:
    """Plan token routing for a diffusion model.

    Raises TypeError naming a class whose blocks are not known or that tokens cannot skip, and ValueError if no block
    is between the settings' layers.
    """
    model = unwrap(model)
    if isinstance(getattr(model, "input_blocks", None), nn.Module):
        return _plan_unet(model)
    name, known = type(model).__name__, registry.token_routing()
    if name in known.refused:
        raise TypeError(f"Apply TREAD does not work on {name}: {known.refused[name]}")
    if name not in known.classes:
        listed = ", ".join(sorted(known.classes))
        raise TypeError(
            f"Apply TREAD does not know how {name} calls its blocks, so tokens cannot skip them; it knows LDM-layout"
            f" UNets and these transformers: {listed}"
        )
    routed = known.classes[name]
    total = sum(len(_blocks(model, called)) for called in routed.blocks)
    return TransformerRouting(routed, settings.blocks(total), total)


def _blocks(model: nn.Module, called: RoutedBlocks) -> list[nn.Module]:
    blocks: Any = model.get_submodule(called.blocks)
    return list(blocks)


def _plan_unet(unet: nn.Module) -> UNetRouting:
    widest = max((one.width for one in attention_blocks(unet).values()), default=0)
    transformers, skipped, total = [], 0, 0
    for name, module in unet.named_modules():
        blocks = getattr(module, "transformer_blocks", None)
        if not isinstance(blocks, nn.ModuleList):
            continue
        total += len(blocks)
        first: Any = blocks[0]
        if type(module).__name__ == "SpatialTransformer" and first.attn1.heads * first.attn1.dim_head == widest:
            transformers.append(name)
            skipped += len(blocks)
    if not transformers:
        raise ValueError(f"Apply TREAD: this {type(unet).__name__} has no transformer blocks that tokens could skip")
    return UNetRouting(tuple(transformers), skipped, total)
