"""Which modules are trained, and how large the adapter of each one is: presets, patterns, rank and alpha by pattern."""

from __future__ import annotations

import fnmatch
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from torch import nn

from ...patches.models import registry
from ...patches.models.family import ModelFamily, TrainingTargets
from ...patches.models.layers import is_linear

if TYPE_CHECKING:
    from .install import AdapterSettings

TARGETS = ("attention", "attention+ff", "all")
TEXT_ENCODER = "text_encoders."  # what trained names of a text encoder begin with, as ComfyUI's generic names do

# Parts of paths in text encoders; those of diffusion models are in the record of their family.
_TEXT_ATTENTION = ("self_attn", "SelfAttention", "EncDecAttention")
_TEXT_FEED_FORWARD = ("mlp", "DenseReluDense")
_SIZE = re.compile(r"\s*(rank\s+(?P<rank>\d+))?\s*(alpha\s+(?P<alpha>\d+(\.\d*)?))?\s*")


class Size(NamedTuple):
    """Rank and alpha of what matches `pattern`; None leaves what GraftAdapter says."""

    pattern: str
    rank: int | None
    alpha: float | None


@dataclass(frozen=True)
class Patterns:
    """What a pattern text says: modules to keep (all when empty), to leave out, and sizes, of which the last that
    matches counts.
    """

    keep: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()
    sizes: tuple[Size, ...] = ()


@dataclass(frozen=True)
class Site:
    """A module that gets an adapter: its weight is (out, in, *kernel), the change is scaled by alpha / rank."""

    path: str
    part: nn.Module
    rank: int
    alpha: float

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight."""
        part = self.part
        if isinstance(part, nn.Conv1d | nn.Conv2d | nn.Conv3d):
            return (part.out_channels, part.in_channels // part.groups, *part.kernel_size)
        return (int(part.out_features), int(part.in_features))  # type: ignore[arg-type]


def parse(text: str) -> Patterns:
    """Read a pattern text: globs, or /regular expressions/, separated by commas or lines; `!` leaves out, `=` gives
    sizes.

    `input_blocks.*=rank 8, alpha 4` narrows nothing: it says how large the adapters of chosen modules are. Raises
    ValueError listing what cannot be read.
    """
    keep: list[str] = []
    drop: list[str] = []
    sizes: list[Size] = []
    wrong: list[str] = []
    sized = False  # whether the entry before was a size, which a further "alpha 4" belongs to
    for entry in (part.strip() for part in re.split(r"[,\n]", text)):
        if entry:
            more = _SIZE.fullmatch(entry)
        else:
            more = None
        if more is not None and sized:
            last = sizes.pop()
            sizes.append(Size(last.pattern, _rank(more) or last.rank, _alpha(more) or last.alpha))
            continue
        sized = False
        if not entry:
            continue
        place, equals, said = entry.rpartition("=")
        if equals:
            found = _SIZE.fullmatch(said)
        else:
            found = None
        if entry.startswith("/") and entry.endswith("/") and found is None:
            keep.append(entry)
        elif equals:
            if found is None or not said.strip() or not place.strip():
                wrong.append(f"{entry!r}: expected PATTERN=rank 8, PATTERN=alpha 4 or PATTERN=rank 8, alpha 4")
                continue
            sizes.append(Size(place.strip(), _rank(found), _alpha(found)))
            sized = True
        elif entry.startswith("!"):
            drop.append(entry[1:].strip())
        else:
            keep.append(entry)
    wrong += [
        f"{size.pattern!r}: rank is 0, expected 1 or more; !{size.pattern} leaves modules out"
        for size in sizes
        if size.rank == 0
    ]
    wrong += [
        f"{one!r} is no regular expression: {_fault(one)}"
        for one in (*keep, *drop, *(s.pattern for s in sizes))
        if _fault(one)
    ]
    if wrong:
        raise ValueError("pattern " + "; ".join(wrong))
    return Patterns(tuple(keep), tuple(drop), tuple(sizes))


def _rank(found: re.Match[str]) -> int | None:
    if found["rank"] is None:
        return None
    return int(found["rank"])


def _alpha(found: re.Match[str]) -> float | None:
    if found["alpha"] is None:
        return None
    return float(found["alpha"])


def _is_regular(pattern: str) -> bool:
    return len(pattern) > 1 and pattern.startswith("/") and pattern.endswith("/")


def _fault(pattern: str) -> str:
    if _is_regular(pattern):
        try:
            re.compile(pattern[1:-1])
        except re.error as error:
            return str(error)
    return ""


def _matches(path: str, pattern: str) -> bool:
    if _is_regular(pattern):
        return re.search(pattern[1:-1], path) is not None
    return fnmatch.fnmatchcase(path, pattern)


@functools.lru_cache(maxsize=8)
def _preset_patterns(families: tuple[ModelFamily, ...]) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Paths of attention and of feed-forward layers, in text encoders and in models of these families."""
    attention = dict.fromkeys(_TEXT_ATTENTION)
    feed_forward = dict.fromkeys(_TEXT_FEED_FORWARD)
    for family in families:
        if isinstance(family.training, TrainingTargets):
            attention.update(dict.fromkeys(family.training.attention))
            feed_forward.update(dict.fromkeys(family.training.feed_forward))
    return (
        re.compile(rf"(^|\.)({'|'.join(attention)})(\.|$)"),
        re.compile(rf"^(?!.*embedder)(.*\.|)({'|'.join(feed_forward)})(\.|$)"),
    )


def _chosen(path: str, preset: str, patterns: Patterns) -> bool:
    if preset != "all":
        attention, feed_forward = _preset_patterns(registry.families())
        wanted = attention.search(path) or (preset == "attention+ff" and feed_forward.search(path))
        if not wanted:
            return False
    return (not patterns.keep or any(_matches(path, p) for p in patterns.keep)) and not any(
        _matches(path, p) for p in patterns.drop
    )


def _fits(part: nn.Module, kind: str) -> bool:
    if kind == "full":
        return any(True for _ in part.parameters(recurse=False))
    if is_linear(part):
        return True
    if not isinstance(part, nn.Conv1d | nn.Conv2d | nn.Conv3d) or part.groups != 1:
        return False
    return kind != "lora" or set(part.kernel_size) == {1}


def size_of(path: str, settings: AdapterSettings) -> tuple[int, float]:
    """(rank, alpha) of the adapter at `path`: those of the last pattern that gives one, else the settings'; alpha 0 is
    the rank.
    """
    rank, alpha = settings.rank, settings.alpha
    for size in settings.patterns.sizes:
        if _matches(path, size.pattern):
            rank, alpha = rank if size.rank is None else size.rank, alpha if size.alpha is None else size.alpha
    return rank, alpha or float(rank)


def _unread(module: nn.Module) -> tuple[str, ...]:
    """Beginnings of paths whose output nothing reads, so that they can learn nothing."""
    paths: list[str] = []
    for family in registry.families():
        if isinstance(family.training, TrainingTargets) and family.training.unread is not None:
            paths += family.training.unread(module)
    return tuple(paths)


def _found(module: nn.Module, settings: AdapterSettings, prefix: str) -> Iterator[Site]:
    unread = _unread(module)
    for path, part in module.named_modules():
        if path.startswith(unread):
            continue
        if _fits(part, settings.kind) and _chosen(prefix + path, settings.targets, settings.patterns):
            yield Site(prefix + path, part, *size_of(prefix + path, settings))


def sites(module: nn.Module, settings: AdapterSettings, text_encoder: nn.Module | None = None) -> dict[str, Site]:
    """The modules that `settings` choose, by path, in the module's own order, those of the text encoder after them.

    Raises ValueError when there is none, when a size matches none of them, or when the text encoder is to be trained
    and has none.
    """
    found = {site.path: site for site in _found(module, settings, "")}
    if text_encoder is not None:
        own = {site.path: site for site in _found(text_encoder, settings, TEXT_ENCODER)}
        if not own:
            raise ValueError(
                f"GraftAdapter: text_encoder is on, and targets {settings.targets!r} with pattern {settings.pattern!r}"
                f" choose no module of it. Its paths begin with {TEXT_ENCODER}, so that {TEXT_ENCODER}* chooses all of"
                " them."
            )
        found |= own
    if not found:
        some = [path for path, part in module.named_modules() if is_linear(part) or isinstance(part, nn.Conv2d)][:5]
        raise ValueError(
            f"GraftAdapter: targets {settings.targets!r} with pattern {settings.pattern!r} choose no module for kind"
            f" {settings.kind!r}. The model has modules such as {', '.join(some) or '(none that can be trained)'}."
        )
    idle = [size.pattern for size in settings.patterns.sizes if not any(_matches(path, size.pattern) for path in found)]
    if idle:
        one = next(iter(found))
        raise ValueError(
            f"GraftAdapter: pattern gives a size to {', '.join(idle)}, which matches no chosen module such as {one}."
        )
    return found


def targets(module: nn.Module, settings: AdapterSettings) -> dict[str, nn.Module]:
    """The modules of `sites` alone, by path."""
    return {path: site.part for path, site in sites(module, settings).items()}
