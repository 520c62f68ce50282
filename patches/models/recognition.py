"""How layer names and shapes in a LoRA file identify its model family."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

_DOWN = re.compile(
    r"[._](lora_down|lora_A|lora\.down|lora_linear_layer\.down)(\.default)?\.weight$"
    r"|_lora\.down\.weight$|\.down\.weight$"
)
_UP = re.compile(_DOWN.pattern.replace("down", "up").replace("lora_A", "lora_B"))
_UNET = re.compile(r"(input_blocks|output_blocks|middle_block|down_blocks|up_blocks|mid_block)_")
_TEXT = re.compile(r"attn2_(processor_)?to_[kv]")  # cross-attention of a UNet reads the text


class LoraShapes:
    """Names and shapes of a LoRA file's tensors, in the form used for recognition.

    `names` have underscores for dots and no leading `transformer.`; `inputs` are the columns of a layer's weight by the
    name of its down factor.
    """

    def __init__(self, tensors: Iterable[tuple[str, Sequence[int]]]):
        self.shapes = {name: tuple(shape) for name, shape in tensors}
        self.inputs: dict[str, int] = {}
        originals: dict[str, str] = {}
        for name in self.shapes:
            originals[name.removeprefix("transformer.").replace(".", "_")] = name
        for name, original in originals.items():
            if _is_down(original, self.shapes[original]):
                self.inputs[name] = self.shapes[original][1]
        self.names = tuple(originals)

    @property
    def is_unet(self) -> bool:
        """Whether layers are named as in an LDM-layout UNet (Stable Cascade's names are close to them)."""
        return self.has(_UNET.pattern) and not any("prior_unet" in name for name in self.names)

    def has(self, pattern: str) -> bool:
        """Whether a regular expression matches any name."""
        fits = re.compile(pattern).search
        return any(map(fits, self.names))

    def widths(self, pattern: str) -> set[int]:
        """Columns of the layers that a regular expression matches."""
        return {width for name, width in self.inputs.items() if re.search(pattern, name)}

    def text_widths(self) -> set[int]:
        """Columns of a UNet's cross-attention: the width of the text that it reads."""
        return self.widths(_TEXT.pattern)

    @functools.cached_property
    def layers(self) -> dict[str, tuple[int, int]]:
        """(rows, columns) of every layer with a pair of factors, by its name in the file."""
        rows: dict[str, int] = {}
        layers: dict[str, tuple[int, int]] = {}
        for name, shape in self.shapes.items():
            if _UP.search(name) and shape:
                rows[_UP.sub("", name)] = shape[0]
        for name, shape in self.shapes.items():
            base = _DOWN.sub("", name)
            if _is_down(name, shape) and base in rows:
                layers[base] = (rows[base], shape[1])
        return layers


def _is_down(name: str, shape: Sequence[int]) -> bool:
    return _DOWN.search(name) is not None and len(shape) > 1


def text_width(tensors: Iterable[tuple[str, Sequence[int]]]) -> int | None:
    """The width of the text that a UNet's LoRA reads, whether the family is known or not; None if no layer tells."""
    for name, shape in tensors:
        if _is_down(name, shape) and re.search(r"attn2[._](processor[._])?to_[kv]", name):
            return shape[1]
    return None


@dataclass(frozen=True)
class SharedNames:
    """Names shared by several families, which are told apart by the columns of these layers; `widths` None matches any.

    With `also`, a family needs a name that matches this too, and then takes precedence over one with the same columns
    and no `also`.
    """

    pattern: str
    widths: tuple[int, ...] | None
    also: str | None = None

    def fits(self, file: LoraShapes) -> bool:
        """Whether a file has such layers."""
        if self.widths is None:
            return file.has(self.pattern)
        if not file.widths(self.pattern) & set(self.widths):
            return False
        return self.also is None or file.has(self.also)


@dataclass(frozen=True)
class Recognition:
    """How to recognize the family of a LoRA file.

    A UNet: by `text_widths`, the columns of its cross-attention, or, if a file has no cross-attention, by `unet_names`.
    Any other: by `names` (one match is enough) or `shapes`; if all of those fail, by `shared_names`.
    """

    names: tuple[str, ...] = ()
    shapes: Callable[[LoraShapes], bool] | None = None
    shared_names: SharedNames | None = None
    text_widths: tuple[int, ...] = ()
    unet_names: str | None = None

    def fits(self, file: LoraShapes) -> bool:
        """Whether names or shapes that no other family has are in a file."""
        if any(map(file.has, self.names)):
            return True
        return self.shapes is not None and self.shapes(file)


def factors_of(layers: Mapping[str, Sequence[int]], rank: int = 4) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the LoRA file with the layers {layer: (rows, columns)}."""
    shapes: dict[str, tuple[int, ...]] = {}
    for layer, (rows, columns) in layers.items():
        shapes[f"{layer}.lora_up.weight"] = (rows, rank)
        shapes[f"{layer}.lora_down.weight"] = (rank, columns)
    return shapes
