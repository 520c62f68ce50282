"""Matches layer names in LoRA files with the model's weights, also names that ComfyUI does not know."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from ..models import registry
from ..models.diffusers_names import LayerNames, swap_halves
from .key_formats import registry as key_formats
from .key_formats.key_format import GENERIC_PREFIX
from .target import Target

Shapes = Mapping[tuple[str, str], Sequence[int]]  # shape of every weight by ("model" or "clip", name)
# PEFT's prefix of a text encoder saved by itself; it does not say which one.
_BARE = re.compile(r"(?:base_model\.model\.)?(text_model[._].+)")
# Encoders that files number after CLIP-L. Beside others (HunyuanVideo's LLaMA) CLIP-L is not the first.
_NUMBERED_LATER = {"clip_g", "t5xxl"}


# Layers that trainers fuse: Q, K and V of one attention, or the K and V that it reads elsewhere.
_FUSED = re.compile(r"(.*_)(to_|w)?(q?kv)(_proj)?")
_FUSED_TEXT = re.compile(r"(.*_)to_added_(q?kv)")  # of the text's half in joint attention


def find_targets(names: Iterable[str], known: Mapping[str, Target], shapes: Shapes) -> dict[str, Target]:
    """Find the weights for a file's layer names that `known` (the host's map) lacks, or has wrong.

    Names that match no weight, or two weights, are skipped.
    """
    names = list(names)
    known = {name: target for name, target in known.items() if (target.model, target.weight) in shapes}
    if all(name in known and known[name].part is None for name in names):
        return {}
    own = _model_names(shapes)
    right = _drop_other_rows(known, own)
    missing = [name for name in names if name not in right]
    if not missing:
        return {}
    index = _index({**own, **right})
    ends = _ends(shapes)
    encoders = {weight.partition(".")[0] for space, weight in shapes if space == "clip"}
    targets = {}
    for name in missing:
        target = index.get(canonical_name(name)) or _find_fused(name, index) or _find_by_end(name, ends, encoders)
        if target is not None:
            targets[name] = target
    return targets


def _drop_other_rows(known: Mapping[str, Target], own: Mapping[str, Target]) -> dict[str, Target]:
    """The host's targets, without those that are other rows of their weight than Graft says: ComfyUI takes Ovis-Image's
    layers for as narrow as Flux'.
    """
    here = {canonical_name(name): target for name, target in own.items()}
    right = {}
    for name, target in known.items():
        other = here.get(canonical_name(name)) if target.part is not None else None
        if other is None or other.weight != target.weight or other.part == target.part:
            right[name] = target
    return right


def canonical_name(name: str) -> str:
    """A layer name without prefix and with underscores for dots; text encoders keep their number (`te1:…`)."""
    encoder = key_formats.split_text_encoder(name)
    if encoder is None:
        return key_formats.strip_prefixes(name)
    number, path = encoder
    return f"te{number}:{key_formats.strip_prefixes(path)}"


def _index(names: Mapping[str, Target]) -> dict[str, Target]:
    """Targets by canonical name, without names that two weights claim.

    How the rows of a weight are ordered is compared for none: the host and Graft each have a function of their own for
    that.
    """
    index: dict[str, Target] = {}
    claimed_twice = set()
    for name, target in names.items():
        first = index.setdefault(canonical_name(name), target)
        if (first.model, first.weight, first.part) != (target.model, target.weight, target.part):
            claimed_twice.add(canonical_name(name))
    for name in claimed_twice:
        del index[name]
    return index


def _find_fused(name: str, index: Mapping[str, Target]) -> Target | None:
    """What a layer for Q, K and V in one stands for in a model that holds them apart, or in one weight with others."""
    found = _FUSED_TEXT.fullmatch(canonical_name(name))
    if found is not None:
        base, letters = found.groups()
        parts = [f"{base}add_{letter}_proj" for letter in letters]
    else:
        found = _FUSED.fullmatch(canonical_name(name))
        if found is None:
            return None
        base, before, letters, after = found.groups("")
        parts = [f"{base}{before}{letter}{after}" for letter in letters]
    targets = [index[part] for part in parts if part in index]
    if len(targets) < len(parts):
        return None
    return join_targets(targets)


def join_targets(targets: Sequence[Target]) -> Target:
    """One target for layers that a file has in one, in the order of its rows.

    Rows that follow each other in one weight become one part of it.
    """
    whole = [targets[0]]
    for target in targets[1:]:
        last = whole[-1]
        if last.part and target.part and _follows(last, target):
            whole[-1] = last._replace(part=(0, last.part[1], last.part[2] + target.part[2]))
        else:
            whole.append(target)
    return whole[0]._replace(more=tuple(whole[1:]))


def _follows(first: Target, second: Target) -> bool:
    """Whether the rows of the second target are those after the first one's."""
    if first.part is None or second.part is None or first.function or second.function:
        return False
    end = first.part[1] + first.part[2]
    return (first.model, first.weight) == (second.model, second.weight) and second.part[1] == end


def _ends(shapes: Shapes) -> dict[str, list[Target]]:
    """Text encoder weights by the last words of their names.

    It is for files that do not know the encoder's path in the host's model.
    """
    ends: dict[str, list[Target]] = {}
    for space, weight in shapes:
        if space == "clip" and weight.endswith(".weight"):
            words = weight.removesuffix(".weight").split(".")
            for start in range(1, len(words) - 1):
                ends.setdefault("_".join(words[start:]), []).append(Target("clip", weight))
    return ends


def _find_by_end(name: str, ends: Mapping[str, list[Target]], encoders: set[str]) -> Target | None:
    """The text encoder weight that a name matches; None unless exactly one does.

    Only the encoders that the name's number can mean are looked at.
    """
    encoder, bare = key_formats.split_text_encoder(name), _BARE.fullmatch(name)
    if encoder is not None:
        number, path = encoder
        other = _other_encoder(number, encoders)
        candidates = ends.get(key_formats.strip_prefixes(path), [])
        candidates = [target for target in candidates if target.weight.partition(".")[0] != other]
    elif bare is not None:
        candidates = ends.get(key_formats.strip_prefixes(bare[1]), [])
    else:
        candidates = []
    if len(candidates) == 1:
        return candidates[0]
    return None


def _other_encoder(number: str, encoders: set[str]) -> str:
    """The encoder that a number cannot mean, "" if it can mean any."""
    if number == "1":
        if "clip_l" in encoders:
            return "clip_g"
        return ""
    if len(encoders) > 1 and not encoders & _NUMBERED_LATER:
        return ""
    return "clip_l"


# --- the model's weights under other names ---


def _model_names(shapes: Shapes) -> dict[str, Target]:
    """{name: target}: the model's weights under their own names, and under diffusers' where those differ."""
    # a bias goes with its weight
    weight_names = [
        name for space, name in shapes if space == "model" and name.startswith(GENERIC_PREFIX) and name[-5:] != ".bias"
    ]
    tables = [
        table
        for table in registry.layer_names()
        if table.model_sign is not None and any(re.search(table.model_sign, weight) for weight in weight_names)
    ]
    names: dict[str, Target] = {}
    for weight in weight_names:
        names[_path(weight)] = Target("model", weight)
    for weight in weight_names:
        for table in tables:
            _add_diffusers_names(names, weight, table, shapes)
        _add_weight_parts(names, weight, shapes)
    return names


def _path(weight: str) -> str:
    return weight.removeprefix(GENERIC_PREFIX).removesuffix(".weight").removesuffix(".scale")


def _add_diffusers_names(names: dict[str, Target], weight: str, table: LayerNames, shapes: Shapes) -> None:
    """Add diffusers' names of a weight, or of its parts."""
    path, shape = _path(weight), shapes["model", weight]
    if len(shape) < 2:
        names.setdefault(table.rename(path), Target("model", weight))
        return
    rows, columns, *_ = shape
    for both in table.joined:
        second = weight.replace(path, re.sub(both.pattern, both.rest, path))
        if re.match(both.pattern, path) and ("model", second) in shapes:
            targets = [Target("model", weight), Target("model", second)]
            names.setdefault(re.sub(both.pattern, both.name, path), join_targets(targets))
    change = swap_halves if table.swaps_halves(path, rows, columns) else None
    for name, start, length in table.parts(path, rows, columns):
        where = None if length == rows else (0, start, length)
        names.setdefault(name, Target("model", weight, where, change))


def _add_weight_parts(names: dict[str, Target], weight: str, shapes: Shapes) -> None:
    """Add names for the first rows of a weight, for which some files have a separate layer."""
    path = _path(weight)
    for family in registry.FAMILIES:
        for part in family.weight_parts:
            if weight.endswith(".weight") and re.search(part.pattern, path):
                base, _, layer = path.rpartition(".")
                sibling = weight.replace(f".{layer}.", f".{part.sibling}.")
                rows = part.per_row * shapes["model", sibling][0]
                names[f"{base}.{part.name}"] = Target("model", weight, (0, 0, rows))
