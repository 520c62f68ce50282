"""Block weights: one LoRA strength per block of the model.

They are lists as in sd-webui-lora-block-weight (LBW), block names, or presets.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..models import registry
from ..models.block_names import REST, TEXT, BlockNames, DiffusersBlocks, NumberedBlocks


def weight_lists() -> dict[int, tuple[str, tuple[str, ...]]]:
    """The lists of all model families: {length of a list: (what it is for, its blocks)}."""
    lists: dict[int, tuple[str, tuple[str, ...]]] = {}
    for names in registry.block_names():
        lists.update(names.weight_lists)
    return lists


def presets() -> dict[str, Mapping[str, float]]:
    """The presets of all model families: {name: block weights}."""
    all_presets: dict[str, Mapping[str, float]] = {}
    for names in registry.block_names():
        all_presets.update(names.presets)
    return all_presets


@dataclass(frozen=True)
class _Patterns:
    """The block names of all model families combined, as patterns for lookup."""

    in_model: re.Pattern[str]
    in_files: re.Pattern[str]
    files: tuple[NumberedBlocks, ...]
    ends: re.Pattern[str]
    block: re.Pattern[str]
    kinds: Mapping[str, str]  # kind of each list of blocks, or the block that is in no list
    single: frozenset[str]
    described: str


@functools.lru_cache(maxsize=8)
def _patterns(families: tuple[BlockNames, ...]) -> _Patterns:
    lists: dict[str, str] = {}
    in_files: dict[str, str] = {}
    single: dict[str, str] = {}
    kinds: dict[str, None] = dict.fromkeys((REST, *TEXT))
    first: dict[str, None] = {}
    last: dict[str, None] = {}
    files: dict[NumberedBlocks, None] = {}
    for names in families:
        lists.update(names.lists)
        if names.diffusers is not None:
            in_files.update(names.diffusers.lists)
        single.update(names.single)
        kinds.update(dict.fromkeys(names.kinds))
        first.update(dict.fromkeys(names.first))
        last.update(dict.fromkeys(names.last))
        files.update(dict.fromkeys(names.files))
    in_files.update(lists)
    return _Patterns(
        in_model=re.compile(rf"^diffusion_model\.({_alternatives([*lists, *single])})\.(\d+)\."),
        in_files=re.compile(rf"({_alternatives(in_files)})_(\d+)_"),
        files=tuple(files),
        ends=re.compile(rf"^(?:diffusion_model\.)?(?:({_alternatives(first)})|({_alternatives(last)}))[._]"),
        block=re.compile(rf"({_alternatives(kinds)})\d*"),
        kinds=in_files | single,
        single=frozenset(single),
        described=_described(list(kinds)),
    )


def _alternatives(words: Iterable[str]) -> str:
    """A regular expression that matches any of the words, the longest first."""
    return "|".join(sorted(words, key=len, reverse=True))


def _described(kinds: list[str]) -> str:
    return f"{', '.join(kinds[:-1])} or {kinds[-1]}"


def _all_patterns() -> _Patterns:
    return _patterns(registry.block_names())


def diffusers_blocks(keys: Iterable[str]) -> DiffusersBlocks | None:
    """How a file from diffusers or its trainers names its blocks; None for any other file or family."""
    text = "\n".join(keys)
    for names in registry.block_names():
        if names.diffusers is not None and names.diffusers.sign in text:
            return names.diffusers
    return None


def block_of(weight: str) -> str:
    """The block that a weight is in: IN04, M00, OUT11, D18, S37 and so on.

    IN and OUT are Flux's first and last layers; BASE is everything else.
    """
    patterns = _all_patterns()
    match = patterns.in_model.match(weight)
    if match is None:
        return _end_block(weight)
    if match[1] in patterns.single:
        return patterns.kinds[match[1]]
    return f"{patterns.kinds[match[1]]}{int(match[2]):02}"


def _end_block(name: str) -> str:
    """IN or OUT for a layer before or after all blocks, by its name; else BASE."""
    match = _all_patterns().ends.match(name)
    if match is None:
        return REST
    if match[1]:
        return "IN"
    return "OUT"


def related_kinds(kinds: set[str]) -> set[str]:
    """All kinds of blocks of the model families that have blocks of these kinds."""
    unet_kinds = {"IN", "M", "OUT"}
    for names in registry.block_names():
        if kinds & set(names.kinds) - unet_kinds:
            return set(names.kinds) if len(names.kinds) > 1 else kinds
    if kinds & unet_kinds:
        return unet_kinds
    return kinds


def text_block(name: str, diffusers: DiffusersBlocks | None = None) -> str:
    """The text encoder, CLIP or T5, that a weight or layer name is for.

    Pass `diffusers` for a file with those block names.
    """
    t5 = ["t5", "te3", "text_encoder_3"]
    if diffusers is not None:
        t5 += diffusers.t5
    if any(word in name for word in t5):
        return "T5"
    return "CLIP"


def block_of_name(layer: str, diffusers: DiffusersBlocks | None = None) -> str:
    """The block that a layer is in, from its name in a file without prefix.

    Pass `diffusers` for a file with those block names.
    """
    name = layer.replace(".", "_") + "_"
    patterns = _all_patterns()
    for blocks in patterns.files:
        match = re.search(blocks.pattern, name)
        if match is not None:
            return f"{blocks.kind}{blocks.number(match.groups()):02}"
    match = patterns.in_files.search(name)
    if match is not None:
        kind = patterns.kinds[match[1]]
        if diffusers is not None:
            kind = diffusers.lists.get(match[1], kind)
        return f"{kind}{int(match[2]):02}"
    return _diffusers_end(name, diffusers) or _end_block(name)


def _diffusers_end(name: str, diffusers: DiffusersBlocks | None) -> str | None:
    """IN or OUT for a layer before or after all blocks, from its name in a diffusers file."""
    if diffusers is None:
        return None
    for layers, block in ((diffusers.first, "IN"), (diffusers.last, "OUT")):
        if name.startswith(tuple(f"{layer}_" for layer in layers)):
            return block
    return None


def parse(text: str) -> dict[str, float]:
    """Read block weights.

    Args:
        text: a list "1,0,0.5,…" (12, 17, 20, 26, 57, 58 or 61 numbers), names "IN=0, OUT05=0.5", or a preset.

    Returns:
        {block or kind of block: strength}.

    Raises:
        ValueError: saying what was expected.
    """
    preset = presets().get(text.strip().upper())
    if preset is not None:
        return dict(preset)
    parts = [part.strip() for part in text.replace("\n", ",").split(",") if part.strip()]
    if any("=" in part for part in parts):
        pairs = [part.partition("=") for part in parts]
        unknown = [name for name, _, _ in pairs if not _all_patterns().block.fullmatch(name.strip())]
        if unknown:
            expected = _all_patterns().described
            raise ValueError(
                f"blocks: {', '.join(unknown)} is not a block; expected {expected}, with or without a number"
            )
        return {name.strip(): _number(value) for name, _, value in pairs}
    lists = weight_lists()
    if len(parts) not in lists:
        known_lists = ", ".join(f"{length} ({title})" for length, (title, _) in lists.items())
        alternatives = f"names such as IN=0, OUT05=0.5, or a preset ({', '.join(presets())})"
        raise ValueError(f"blocks: expected a list of {known_lists} numbers, got {len(parts)}; or {alternatives}")
    return dict(zip(lists[len(parts)][1], map(_number, parts), strict=True))


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not -1000 < value < 1000:
        raise ValueError(f"blocks: expected numbers, got {text.strip()!r}")
    return value


def parse_for_model(text: str, weights: Iterable[str]) -> dict[str, float]:
    """Read block weights and check them against a model.

    Args:
        text: as in `parse`.
        weights: the names of the model's weights.

    Raises:
        ValueError: where they cannot be read, or name blocks that the model does not have.
    """
    strengths = parse(text)
    model_blocks = {block_of(weight) for weight in weights} | {REST, *TEXT}
    missing = [name for name in strengths if not any(_fits(name, block) for block in model_blocks)]
    if missing:
        fits = [
            f"{length} ({name})"
            for length, (name, block_names) in weight_lists().items()
            if set(block_names) <= model_blocks
        ]
        advice = f"; expected a list of {' or '.join(fits)} numbers" if fits else ""
        raise ValueError(
            f"blocks: this model has no {', '.join(missing[:6])}{' …' if len(missing) > 6 else ''}{advice}"
        )
    return strengths


def strength_of_weight(strengths: Mapping[str, float], weight: str, text: bool = False) -> float:
    """The block strength of a weight: that of its block, by the longest matching name; else BASE's; else 1.

    Args:
        strengths: as `parse` gives them.
        weight: its name.
        text: whether it is a text encoder's.
    """
    return strength_of_block(strengths, text_block(weight) if text else block_of(weight))


def strength_of_block(strengths: Mapping[str, float], block: str) -> float:
    """The strength of a block by its name."""
    names = [name for name in strengths if _fits(name, block)]
    if names:
        return strengths[max(names, key=len)]
    return strengths.get(REST, 1.0)


def format_weights(pairs: Iterable[tuple[str, float]]) -> str:
    """The text of block weights, as the sliders of a row write it: "IN=0, OUT05=0.5".

    Blocks at 1 are left out, unless BASE, which counts for every block without a strength of its own, has another. A
    kind whose blocks are all the same is named once.
    """
    kinds: dict[str, list[tuple[str, float]]] = {}
    for block, value in pairs:
        kind = block
        if block not in TEXT:  # T5 is a name, and no fifth block T
            kind = _split(block)[0]
        kinds.setdefault(kind, []).append((block, value))
    is_rest_changed = any(value != 1.0 for _, value in kinds.get(REST, ()))
    parts = []
    for kind, blocks in kinds.items():
        if len({value for _, value in blocks}) == 1:
            blocks = [(kind, blocks[0][1])]
        parts += [f"{name}={value:.6g}" for name, value in blocks if is_rest_changed or value != 1.0]
    return ", ".join(parts)


def _fits(name: str, block: str) -> bool:
    """Whether a name covers a block.

    OUT covers OUT00 and all others, OUT1 and OUT01 cover OUT01, "" covers everything.
    """
    kind, number = _split(name)
    return not name or (kind, number) == _split(block) or (number is None and kind == _split(block)[0])


def kind_of(block: str) -> str:
    """The kind of a block, its name without the number: OUT of OUT04."""
    return block.rstrip("0123456789")


def _split(name: str) -> tuple[str, int | None]:
    kind = kind_of(name)
    return kind, int(name[len(kind) :]) if len(kind) < len(name) else None
