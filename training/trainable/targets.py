"""Chooses the modules to train and the size of each one's adapter."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from torch import nn

from ...patches.adapters.rank_mask import RankMask
from ...patches.adapters.trainable import TrainableKind
from ...patches.models import registry
from ...patches.models.family import TrainingTargets
from ...patches.models.layers import is_conv, is_linear
from .patterns import matches
from .settings import TEXT_ENCODER, AdapterSettings

# Parts of paths in text encoders; those of diffusion models are in the record of their family.
_TEXT_ATTENTION = ("self_attn", "SelfAttention", "EncDecAttention")
_TEXT_FEED_FORWARD = ("mlp", "DenseReluDense")


@dataclass(frozen=True)
class AdapterTarget:
    """A module that gets an adapter: its weight is (out, in, *kernel), the change is scaled by alpha / rank, and
    `rank_mask` says which ranks work at which noise level (None: all). `factor` is LoKr's.
    """

    path: str
    module: nn.Module
    rank: int
    alpha: float
    rank_mask: RankMask | None = None
    factor: int = 0

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight."""
        module = self.module
        if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
            return (module.out_channels, module.in_channels // module.groups, *module.kernel_size)
        return (int(module.out_features), int(module.in_features))  # type: ignore[arg-type]


def adapter_targets(
    module: nn.Module, settings: AdapterSettings, text_encoder: nn.Module | None = None
) -> dict[str, AdapterTarget]:
    """The modules that settings choose.

    Args:
        module: the model.
        settings: target layers, layer filter and the kind of adapter.
        text_encoder: the text encoder, if it is trained too.

    Returns:
        {path: target} in the module's own order, those of the text encoder after them.

    Raises:
        ValueError: where there is none, where a size matches none of them, or where the text encoder is to be trained
            and has none.
    """
    targets = {target.path: target for target in _targets_in(module, settings, "")}
    if text_encoder is not None:
        encoder_targets = {target.path: target for target in _targets_in(text_encoder, settings, TEXT_ENCODER)}
        if not encoder_targets:
            raise ValueError(
                f"Adapter Settings: train text encoder is on, and target layers {settings.targets!r} with layer filter"
                f" {settings.pattern!r} choose no module of the text encoder. Its paths begin with {TEXT_ENCODER}, so"
                f" that {TEXT_ENCODER}* chooses all of them."
            )
        targets |= encoder_targets
    if not targets:
        examples = [path for path, part in module.named_modules() if is_linear(part) or isinstance(part, nn.Conv2d)]
        raise ValueError(
            f"Adapter Settings: target layers {settings.targets!r} with layer filter {settings.pattern!r} choose no"
            f" module for adapter type {settings.kind!r}. The model has modules such as"
            f" {', '.join(examples[:5]) or '(none that can be trained)'}."
        )
    unused = [size.pattern for size in settings.patterns.sizes if not any(matches(p, size.pattern) for p in targets)]
    if unused:
        raise ValueError(
            f"Adapter Settings: layer filter gives a size to {', '.join(unused)}, which matches no chosen module such"
            f" as {next(iter(targets))}."
        )
    return targets


def _targets_in(module: nn.Module, settings: AdapterSettings, prefix: str) -> Iterator[AdapterTarget]:
    unread = _unread(module, settings.with_sound)
    kind = settings.trainable_kind
    for name, part in module.named_modules():
        path = prefix + name
        if not name.startswith(unread) and _can_train(part, kind) and _is_chosen(path, settings):
            yield AdapterTarget(path, part, *settings.size_of(path), settings.rank_mask_of(path), settings.factor)


def _can_train(module: nn.Module, kind: TrainableKind) -> bool:
    if kind.full_weights:
        return any(True for _ in module.parameters(recurse=False))
    if is_linear(module):
        return True
    if not is_conv(module) or module.groups != 1:
        return False
    return kind.convolutions or set(module.kernel_size) == {1}  # type: ignore[arg-type]


def _is_chosen(path: str, settings: AdapterSettings) -> bool:
    part = path.partition(".")[0]
    on_request, only_in_all = _parts_left_out()
    is_left_out = part in on_request or (part in only_in_all and settings.targets != "all")
    if is_left_out and not settings.patterns.name(part):
        return False
    if settings.targets != "all":
        attention, feed_forward = _preset_patterns()
        in_feed_forward = settings.targets == "attention+ff" and feed_forward.search(path)
        if not attention.search(path) and not in_feed_forward:
            return False
    return settings.patterns.choose(path)


@registry.FAMILIES.derived
def _preset_patterns() -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Paths of attention and of feed-forward layers, in text encoders and in models of every family."""
    attention = dict.fromkeys(_TEXT_ATTENTION)
    feed_forward = dict.fromkeys(_TEXT_FEED_FORWARD)
    for family in registry.FAMILIES:
        if isinstance(family.training, TrainingTargets):
            attention.update(dict.fromkeys(family.training.attention))
            feed_forward.update(dict.fromkeys(family.training.feed_forward))
    return (
        re.compile(rf"(^|\.)({'|'.join(attention)})(\.|$)"),
        re.compile(rf"^(?!.*embedder)(.*\.|)({'|'.join(feed_forward)})(\.|$)"),
    )


@registry.FAMILIES.derived
def _parts_left_out() -> tuple[frozenset[str], frozenset[str]]:
    """Parts of networks that only a layer filter that names them trains: with any preset, and with all but all."""
    on_request: list[str] = []
    only_in_all: list[str] = []
    for family in registry.FAMILIES:
        if isinstance(family.training, TrainingTargets):
            on_request += family.training.on_request
            only_in_all += family.training.only_in_all
    return frozenset(on_request), frozenset(only_in_all)


def _unread(module: nn.Module, with_sound: bool) -> tuple[str, ...]:
    """Prefixes of modules whose output is unused, so that they cannot learn."""
    paths: list[str] = []
    for family in registry.FAMILIES:
        targets = family.training
        if not isinstance(targets, TrainingTargets):
            continue
        if targets.unread is not None:
            paths += targets.unread(module)
        if targets.sound is not None and not with_sound:
            paths += targets.sound(module)
    return tuple(paths)
