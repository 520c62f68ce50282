"""What is wrong with the texts of one row of a LoRA stack, and the strengths that its file's blocks get from them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import block_weights, open_file, parse, stack_rows
from .key_formats import registry as key_formats

ORDER = ("BASE", "CLIP", "T5", "IN", "M", "D", "S", "L", "OUT")


def check_texts(blocks: str, schedule: str) -> dict[str, str]:
    """{"blocks" or "schedule": what is wrong with it} of a row's texts; empty when nothing is."""
    problems: dict[str, str] = {}
    checks: dict[str, tuple[str, Callable[[str], Any]]] = {
        "blocks": (blocks, block_weights.parse),
        "schedule": (schedule, stack_rows.parse_schedule),
    }
    for name, (text, read) in checks.items():
        try:
            if text.strip():
                read(text)
        except ValueError as error:
            problems[name] = str(error).removeprefix(f"{name}: ")
    return problems


def blocks_of(path: str) -> list[str]:
    """The blocks that a LoRA file has layers in, in the order of the model."""
    tensors, _ = open_file.read_lora_header(path)
    keys = key_formats.generic_keys(tensors)
    diffusers = block_weights.diffusers_blocks(keys)
    found = {_block(layer, diffusers) for layer in parse.layer_names(keys)}
    return sorted(found, key=_place)


def _block(layer: str, diffusers: Any) -> str:
    if layer.startswith(key_formats.text_encoder_prefixes()):
        return block_weights.text_block(layer, diffusers)
    return block_weights.block_of_name(key_formats.strip_prefixes(layer), diffusers)


def _place(block: str) -> tuple[int, str]:
    kind = block_weights.kind_of(block)
    if kind in ORDER:
        return ORDER.index(kind), block
    return len(ORDER), block


def strengths(blocks: list[str], text: str) -> list[float]:
    """The strength of each block under block weights; 1 for all when the text is empty or cannot be read."""
    if not text.strip() or "blocks" in check_texts(text, ""):
        return [1.0] * len(blocks)
    given = block_weights.parse(text)
    return [block_weights.strength_of_block(given, block) for block in blocks]


def foreign_blocks(blocks: list[str], text: str) -> str:
    """What is wrong with block weights that name blocks of another family than a file's; "" if nothing is."""
    if not blocks or not text.strip() or "blocks" in check_texts(text, ""):
        return ""
    kinds = block_weights.related_kinds({block_weights.kind_of(block) for block in blocks}) | {
        block_weights.REST,
        *block_weights.TEXT,
    }
    foreign = [name for name in block_weights.parse(text) if name and block_weights.kind_of(name) not in kinds]
    if not foreign:
        return ""
    some = ", ".join(foreign[:6]) + (" …" if len(foreign) > 6 else "")
    return f"this file is for a model without {some}; its blocks are {', '.join(blocks)}"
