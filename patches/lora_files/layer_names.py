"""Names of layers in LoRA files, beyond those that a host knows: prefixes and separators of every trainer, and
diffusers' names of models.

Trainers write one name in many ways: kohya-ss/sd-scripts and musubi `lora_unet_a_b`, OneTrainer `lora_transformer_a_b`,
lycoris `lycoris_a_b`, PEFT `base_model.model.a.b`, diffusers `transformer.a.b`, XLabs
`double_blocks.0.processor.qkv_lora1`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from ..models import registry
from ..models.layer_names import LayerNames, swap_halves
from .parse import Target

Shapes = Mapping[tuple[str, str], Sequence[int]]  # shape of every weight by ("model" or "clip", name)
_OWN = "diffusion_model."
_PREFIXES = (
    "base_model.model.",
    "model.diffusion_model.",
    "diffusion_model.",
    "transformer.",
    "unet.",
    "pipe.dit.",
    "dit.",
    "model.",
    "lora_unet_",
    "lora_transformer_",
    "lora_prior_unet_",
    "lycoris_unet_",
    "lycoris_",
    "oft_unet_",
)
_TEXT = re.compile(r"(?:(?:lora_|lycoris_)?(?:prior_)?te(\d?)|text_encoder(?:_(\d))?)[._](.+)")
_BARE = re.compile(
    r"(?:base_model\.model\.)?(text_model[._].+)"
)  # PEFT's of a text encoder alone; which one, it does not say
_LATER = {
    "clip_g",
    "t5xxl",
}  # encoders that files number after CLIP-L; beside others (HunyuanVideo's LLaMA) that is not the first


def found(names: Iterable[str], known: Mapping[str, Target], shapes: Shapes) -> dict[str, Target]:
    """Targets of a file's layer names that `known` (the host's map) lacks; names that fit nothing, or two weights, are
    left out.
    """
    missing = [name for name in names if name not in known]
    if not missing:
        return {}
    index = _index({**_spelled(shapes), **{name: target for name, target in known.items()}})
    ends = _ends(shapes)
    encoders = {weight.partition(".")[0] for space, weight in shapes if space == "clip"}
    targets = ((name, index.get(canonical(name)) or _by_end(name, ends, encoders)) for name in missing)
    return {name: target for name, target in targets if target is not None and (target.model, target.weight) in shapes}


def canonical(name: str) -> str:
    """A name without prefix and with underscores; text encoders keep their number (`te1:…`)."""
    text = _TEXT.fullmatch(name)
    if text is not None:
        return f"te{text[1] or text[2] or '1'}:{_flat(text[3])}"
    return _flat(name)


def _flat(name: str) -> str:
    prefix = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), None)
    if prefix is None:
        return name.replace(".", "_").lstrip("_")
    return _flat(name[len(prefix) :])


def with_processors_gone(name: str) -> str:
    """A layer's name as diffusers writes it since 2023; before, `attn1.processor.to_out` was what `attn1.to_out.0` is
    now.
    """
    return re.sub(
        r"([._])processor[._]to_(\w+?)$",
        lambda found: f"{found[1]}to_{found[2]}{found[1] + '0' if found[2] == 'out' else ''}",
        name,
    )


def _index(names: Mapping[str, Target]) -> dict[str, Target]:
    """Targets by canonical name, without those that two names claim."""
    index: dict[str, Target | None] = {}
    for name, target in names.items():
        plain = canonical(name)
        index[plain] = target if index.get(plain, target) == target else None
    return {name: target for name, target in index.items() if target is not None}


def _ends(shapes: Shapes) -> dict[str, list[Target]]:
    """Text encoder weights by the last words of their names, for encoders whose place in the host's model the file does
    not know.
    """
    ends: dict[str, list[Target]] = {}
    for space, weight in shapes:
        if space == "clip" and weight.endswith(".weight"):
            words = weight.removesuffix(".weight").split(".")
            for start in range(1, len(words) - 1):
                ends.setdefault("_".join(words[start:]), []).append(Target("clip", weight))
    return ends


def _by_end(name: str, ends: Mapping[str, list[Target]], encoders: set[str]) -> Target | None:
    """The only text encoder's weight that a name fits, of those that its number can mean."""
    text, bare = _TEXT.fullmatch(name), _BARE.fullmatch(name)
    if text is None:
        if bare is not None:
            fits = ends.get(_flat(bare[1]), [])
        else:
            fits = []
    else:
        first = (text[1] or text[2] or "1") == "1"
        wrong = "clip_l"
        if first:
            if "clip_l" in encoders:
                wrong = "clip_g"
            else:
                wrong = ""
        elif len(encoders) > 1 and not encoders & _LATER:
            wrong = ""
        fits = [target for target in ends.get(_flat(text[3]), []) if target.weight.partition(".")[0] != wrong]
    if len(fits) == 1:
        return fits[0]
    return None


# --- the model's weights under other names ---


def _spelled(shapes: Shapes) -> dict[str, Target]:
    """{name: target}: the model's weights under their own names and under diffusers', where those differ."""
    own = [name for space, name in shapes if space == "model" and name.startswith(_OWN)]
    tables = _tables(own)
    names: dict[str, Target] = {}
    for weight in own:
        if not weight.endswith(".bias"):
            names[_path(weight)] = Target("model", weight)
    for weight in own:
        if not weight.endswith(".bias"):
            for table in tables:
                _add_diffusers_names(names, weight, table, shapes)
            _add_weight_parts(names, weight, shapes)
    return names


def _path(weight: str) -> str:
    return weight.removeprefix(_OWN).removesuffix(".weight").removesuffix(".scale")


def _tables(own: Sequence[str]) -> list[LayerNames]:
    """Names of the families that a model's weights give away."""
    tables = []
    for names in registry.layer_names():
        sign = names.model_sign
        if sign is not None and any(re.search(sign, weight) for weight in own):
            tables.append(names)
    return tables


def _add_diffusers_names(names: dict[str, Target], weight: str, table: LayerNames, shapes: Shapes) -> None:
    """diffusers' names of a weight, or of its parts."""
    path, shape = _path(weight), shapes["model", weight]
    if len(shape) < 2:
        names.setdefault(table.rename(path), Target("model", weight))
        return
    rows, columns, *_ = shape
    change = swap_halves if table.swaps_halves(path, rows, columns) else None
    for name, start, length in table.parts(path, rows, columns):
        where = None if length == rows else (0, start, length)
        names.setdefault(name, Target("model", weight, where, change))


def _add_weight_parts(names: dict[str, Target], weight: str, shapes: Shapes) -> None:
    """Names of the first rows of a weight that some files have a layer for."""
    path = _path(weight)
    for family in registry.families():
        for part in family.weight_parts:
            if weight.endswith(".weight") and re.search(part.pattern, path):
                base, _, layer = path.rpartition(".")
                sibling = weight.replace(f".{layer}.", f".{part.sibling}.")
                rows = part.per_row * shapes["model", sibling][0]
                names[f"{base}.{part.name}"] = Target("model", weight, (0, 0, rows))


# --- whole files under other names ---

T = TypeVar("T")


def renamed(state: Mapping[str, T]) -> Mapping[str, T]:
    """A LoRA whose trainer has names of its own (XLabs' for Flux) under generic names; the same mapping where there is
    none.
    """
    for family in registry.families():
        for spelling in family.file_spellings:
            pattern = re.compile(spelling.pattern)
            if any(pattern.fullmatch(key) for key in state):
                return {_respelled(key, pattern, spelling.rename): value for key, value in state.items()}
    return state


def _respelled(key: str, pattern: re.Pattern[str], rename: Callable[[re.Match[str]], str]) -> str:
    match = pattern.fullmatch(key)
    if match is None:
        return key
    return rename(match)
