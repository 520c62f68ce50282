"""Block weights: one strength a block of the model, in the lists of sd-webui-lora-block-weight (LBW), or
by block name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

REST = "BASE"  # the text encoders, and whatever is in no block of the list
TEXT = ("CLIP", "T5")  # the text encoders, where they have blocks of their own


def _numbered(prefix: str, numbers: Iterable[int]) -> tuple[str, ...]:
    return tuple(f"{prefix}{number:02}" for number in numbers)


LAYOUTS: dict[int, tuple[str, tuple[str, ...]]] = {  # length of a list -> (what it is for, its blocks)
    17: ("SD1.x", (REST, *_numbered("IN", (1, 2, 4, 5, 7, 8)), "M00", *_numbered("OUT", range(3, 12)))),
    26: ("SD1.x with LoCon", (REST, *_numbered("IN", range(12)), "M00", *_numbered("OUT", range(12)))),
    12: ("SDXL", (REST, *_numbered("IN", (4, 5, 7, 8)), "M00", *_numbered("OUT", range(6)))),
    20: ("SDXL with LoCon", (REST, *_numbered("IN", range(9)), "M00", *_numbered("OUT", range(9)))),
    57: ("Flux", (*_numbered("D", range(19)), *_numbered("S", range(38)))),
    58: ("Flux with BASE", (REST, *_numbered("D", range(19)), *_numbered("S", range(38)))),
    61: (
        "Flux with text encoders, first and last layers",
        (*TEXT, "IN", *_numbered("D", range(19)), *_numbered("S", range(38)), "OUT"),
    ),
}
PRESETS = {  # LBW's own, for SD1.x' 17 blocks where it counts which
    "NONE": {"": 0.0},
    "ALL": {"": 1.0},
    "ALL0.5": {"": 0.5},
    **{
        name: dict(zip(LAYOUTS[17][1], (float(digit) for digit in digits), strict=True))
        for name, digits in (
            ("INS", "11100000000000000"),
            ("IND", "10001110000000000"),
            ("INALL", "11111110000000000"),
            ("MIDD", "10001111111100000"),
            ("OUTD", "10000000111100000"),
            ("OUTS", "10000000000011111"),
            ("OUTALL", "10000000111111111"),
        )
    },
}
_PATHS = {
    "input_blocks": "IN",
    "middle_block": "M",
    "output_blocks": "OUT",
    "double_blocks": "D",
    "single_blocks": "S",
    "joint_blocks": "L",
    "transformer_blocks": "L",
    "blocks": "L",
    "layers": "L",
}
_PATH = re.compile(rf"^diffusion_model\.({'|'.join(_PATHS)})\.(\d+)\.")
_ENDS = re.compile(
    r"^(?:diffusion_model\.)?(?:(img_in|txt_in|time_in|vector_in|guidance_in)|(final_layer))[._]"
)  # of Flux and its like
_KINDS = "BASE, CLIP, T5, IN, M, OUT, D, S or L"
_BLOCK = re.compile(r"(BASE|CLIP|T5|IN|M|OUT|D|S|L)\d*")
# (pattern of a layer's name with underscores, its block): names in files, where LDM's and diffusers' both occur
_NAMES = (
    (r"input_blocks_(\d+)_", "IN{}", (1, 0)),
    (r"output_blocks_(\d+)_", "OUT{}", (1, 0)),
    (r"down_blocks_(\d+)_(?:attentions|resnets)_(\d+)_", "IN{}", (3, 1)),
    (r"down_blocks_(\d+)_downsamplers_0_", "IN{}", (3, 3)),
    (r"up_blocks_(\d+)_(?:attentions|resnets)_(\d+)_", "OUT{}", (3, 0)),
    (r"up_blocks_(\d+)_upsamplers_0_", "OUT{}", (3, 2)),
    (r"double_blocks_(\d+)_", "D{}", (1, 0)),
    (r"(?:single_transformer_blocks|single_blocks)_(\d+)_", "S{}", (1, 0)),
    (r"(?:joint_blocks|transformer_blocks|blocks|layers)_(\d+)_", "L{}", (1, 0)),
)
_OTHERS = (
    (r"^(x_embedder|context_embedder|time_text_embed)_", "IN"),
    (r"^(norm_out|proj_out)_", "OUT"),
)  # diffusers' Flux


def block_of(weight: str) -> str:
    """The block of a weight: IN04, M00, OUT11, D18, S37; IN and OUT of Flux's first and last layers; BASE of everything
    else.
    """
    found = _PATH.match(weight)
    if found is None:
        return _end(weight)
    if found[1] == "middle_block":
        return "M00"
    return f"{_PATHS[found[1]]}{int(found[2]):02}"


def _end(name: str) -> str:
    """IN or OUT of a layer before or after all blocks, by its name; else BASE."""
    found = _ENDS.match(name)
    if found is None:
        return REST
    if found[1]:
        return "IN"
    return "OUT"


def together(kinds: set[str]) -> set[str]:
    """Every kind of block of a model that has blocks of these kinds: a UNet, Flux, or another."""
    if kinds & {"D", "S"}:
        return {"IN", "D", "S", "OUT"}
    if kinds & {"IN", "M", "OUT"} and "L" not in kinds:
        return {"IN", "M", "OUT"}
    return kinds


def text_block(name: str, flux: bool = False) -> str:
    """CLIP or T5, by the name of a text encoder's weight or layer; `flux`: the second encoder is T5, as diffusers
    numbers them there.
    """
    if re.search(r"t5|te3|text_encoder_3", name) or (flux and re.search(r"te2|text_encoder_2", name)):
        return "T5"
    return "CLIP"


def block_of_name(layer: str, flux: bool = False) -> str:
    """The block of a layer by its name in a file, without prefix; UNets have two residual blocks a level. `flux`: it is
    diffusers' Flux.
    """
    name = layer.replace(".", "_") + "_"
    if re.search(r"(middle_block|mid_block)_", name):
        return "M00"
    if name.startswith("conv_in_"):
        return "IN00"
    for pattern, block, (step, offset) in _NAMES:
        found = re.search(pattern, name)
        if found is not None:
            number = int(found[1]) * step + offset + (int(found[2]) if found.lastindex == 2 else 0)
            if flux and block == "L{}" and "transformer_blocks_" in name:
                kind = "D{}"
            else:
                kind = block
            return kind.format(f"{number:02}")
    return next((block for pattern, block in _OTHERS if flux and re.match(pattern, name)), _end(name))


def parse(text: str) -> dict[str, float]:
    """{block or kind of block: strength} of "1,0,0.5,…" (12, 17, 20, 26, 57, 58 or 61 numbers), "IN=0, OUT05=0.5", or a
    preset.

    Raises ValueError that says what is wrong.
    """
    if text.strip().upper() in PRESETS:
        return dict(PRESETS[text.strip().upper()])
    parts = [part.strip() for part in text.replace("\n", ",").split(",") if part.strip()]
    if any("=" in part for part in parts):
        named = [part.partition("=") for part in parts]
        wrong = [name for name, _, _ in named if not _BLOCK.fullmatch(name.strip())]
        if wrong:
            raise ValueError(f"blocks: {', '.join(wrong)} is no block; expected {_KINDS}, with or without a number")
        return {name.strip(): _number(value) for name, _, value in named}
    if len(parts) not in LAYOUTS:
        known = ", ".join(f"{length} ({name})" for length, (name, _) in LAYOUTS.items())
        others = f"names such as IN=0, OUT05=0.5, or a preset ({', '.join(PRESETS)})"
        raise ValueError(f"blocks: expected a list of {known} numbers, got {len(parts)}; or {others}")
    return dict(zip(LAYOUTS[len(parts)][1], map(_number, parts), strict=True))


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not -1000 < value < 1000:
        raise ValueError(f"blocks: expected numbers, got {text.strip()!r}")
    return value


def fitting(text: str, weights: Iterable[str]) -> dict[str, float]:
    """`parse`, checked against a model's weights: ValueError when it names blocks that the model does not have."""
    strengths = parse(text)
    there = {block_of(weight) for weight in weights} | {REST, *TEXT}
    gone = [name for name in strengths if not any(_fits(name, block) for block in there)]
    if gone:
        fits = [f"{length} ({name})" for length, (name, of) in LAYOUTS.items() if set(of) <= there]
        if fits:
            instead = f"; expected a list of {' or '.join(fits)} numbers"
        else:
            instead = ""
        raise ValueError(f"blocks: this model has no {', '.join(gone[:6])}{' …' if len(gone) > 6 else ''}{instead}")
    return strengths


def strength(strengths: Mapping[str, float], weight: str, text: bool = False) -> float:
    """The strength of a weight (`text`: of a text encoder): its block's, of the longest name that fits; else BASE's;
    else 1.
    """
    return of_block(strengths, text_block(weight) if text else block_of(weight))


def of_block(strengths: Mapping[str, float], block: str) -> float:
    """The strength of a block by its name."""
    names = [name for name in strengths if _fits(name, block)]
    if names:
        return strengths[max(names, key=len)]
    return strengths.get(REST, 1.0)


def _fits(name: str, block: str) -> bool:
    """Whether a name means a block: OUT means OUT00 and all others, OUT1 and OUT01 mean OUT01, "" means everything."""
    kind, number = _split(name)
    return not name or (kind, number) == _split(block) or (number is None and kind == _split(block)[0])


def _split(name: str) -> tuple[str, int | None]:
    kind = name.rstrip("0123456789")
    return kind, int(name[len(kind) :]) if len(kind) < len(name) else None
