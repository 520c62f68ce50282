"""What a recipe needs to know of a model and of the device: counted from the model's own layers, never guessed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from ...patches.models.family import Missing, ModelFamily
from ...patches.models.layers import is_conv
from ..data.dataset import Dataset, DatasetImage
from ..memory.checkpointing import blocks
from ..trainable.settings import TARGETS, AdapterSettings
from ..trainable.targets import AdapterTarget, adapter_targets

TEXT_TOKENS = 512  # of a transformer's text, beside those of the image
_TEXT_APART = ("wan",)  # families whose blocks only look at the text, so that little is kept of it


@dataclass(frozen=True)
class Device:
    """Where training runs: torch's kind of device, its name, the bytes that training could have, and what it can do."""

    kind: str
    name: str
    free: int
    bf16: bool = False

    @property
    def shares_memory(self) -> bool:
        """Whether it computes in main memory, so that nothing is saved by moving things there."""
        return self.kind in ("cpu", "mps")


@dataclass(frozen=True)
class ModelFacts:
    """A model in numbers.

    - `lora_widths`: by target layers, the rows and columns of all layers: times the rank, the numbers of a LoRA.
    - `kept`: numbers that autograd keeps for each position of the latent (UNets) or each token (transformers), counted
      as what goes into and comes out of every attention, feed-forward and convolution layer.
    - `largest_kept`, `inputs`: of these, those of the largest checkpointed block; and the inputs of all blocks.
    - `largest_block`, `outside`: bytes of the weights of the largest block, and of those outside any block.
    - `types`: how many numbers the weights have of each type, by torch's name of it.
    """

    family: str
    title: str
    prediction: str
    parameters: int
    weight_bytes: int
    is_unet: bool
    has_todo: bool
    lora_widths: Mapping[str, int]
    kept: float
    largest_kept: float
    inputs: float
    largest_block: int
    outside: int
    types: Mapping[str, int]

    def positions(self, resolution: int) -> int:
        """Positions that one square image has: latents of a UNet, or tokens of 2 x 2 latents and the text's."""
        side = resolution // 8
        if self.is_unet:
            return side * side
        if self.family in _TEXT_APART:
            return (side // 2) ** 2
        return (side // 2) ** 2 + TEXT_TOKENS


@dataclass(frozen=True, order=True)
class Pictures:
    """Images that are trained: the side in pixels of a square with their area, and their own batch size (0: that of
    Optimizer Settings).
    """

    resolution: int
    batch_size: int = 0


def pictures_of(dataset: Dataset) -> tuple[Pictures, ...]:
    """The largest images of each batch size in a dataset, its regularization images among them."""
    images = dataset.images
    if dataset.regularization is not None:
        images += dataset.regularization.images
    sides: dict[int, int] = {}
    for image in images:
        sides[image.batch_size] = max(sides.get(image.batch_size, 0), _side(image))
    return tuple(sorted(Pictures(side, batch_size) for batch_size, side in sides.items()))


def _side(image: DatasetImage) -> int:
    """The side in pixels of a square with the area of an image, or of all frames of a clip."""
    if image.framing is not None:
        width, height = image.framing.target
        return round(math.sqrt(width * height * math.prod(image.shape[1:-2])))
    return round(8 * math.sqrt(math.prod(image.shape[1:])))


def facts_of(model: nn.Module, family: ModelFamily | None, prediction: str) -> ModelFacts:
    """The facts of a diffusion model. ValueError if it has no layer that an adapter could train."""
    is_unet = hasattr(model, "input_blocks")
    kept = _kept_layers(model, is_unet)
    in_blocks = [[layer for layer in kept if layer.path.startswith(f"{name}.")] for name in _block_names(model)]
    weights = [_weight_bytes(block) for block in blocks(model)]
    total = _weight_bytes(model)
    name, title, has_todo = "", "", False
    if family is not None:
        name, title, has_todo = family.name, family.title, not isinstance(family.token_layout, Missing)
    return ModelFacts(
        family=name,
        title=title,
        prediction=prediction,
        parameters=sum(part.numel() for part in model.parameters()),
        weight_bytes=total,
        is_unet=is_unet,
        has_todo=has_todo,
        lora_widths=_lora_widths(model),
        kept=sum(layer.numbers for layer in kept),
        largest_kept=max((sum(layer.numbers for layer in layers) for layers in in_blocks), default=0.0),
        inputs=sum(layers[0].input for layers in in_blocks if layers),
        largest_block=max(weights, default=0),
        outside=total - sum(weights),
        types=_types(model),
    )


@dataclass(frozen=True)
class _KeptLayer:
    """What autograd keeps of a layer for each position: all of it, and what goes into the layer."""

    path: str
    numbers: float
    input: float


def _kept_layers(model: nn.Module, is_unet: bool) -> list[_KeptLayer]:
    """The layers that see every position. Deeper levels of a UNet have fewer: a quarter with each doubling of width."""
    first_width = 0
    if is_unet:
        first = next((part for part in model.modules() if is_conv(part)), None)
        first_width = int(getattr(first, "out_channels", 0))
    layers = []
    for target in _layers_of_positions(model):
        rows, columns = target.shape[:2]
        share = 1.0
        if first_width:
            share = min(1.0, (first_width / min(rows, columns)) ** 2)
        layers.append(_KeptLayer(target.path, share * (rows + columns), share * columns))
    return layers


def _layers_of_positions(model: nn.Module) -> Iterator[AdapterTarget]:
    """Attention and feed-forward layers, and convolutions; every layer of a model without such names."""
    widest = "all"
    if "attention+ff" in _lora_widths(model):
        widest = "attention+ff"
    chosen = _targets(model, "lora", widest)
    for path, target in _targets(model, "locon", "all").items():
        if path in chosen or is_conv(target.module):
            yield target


def _lora_widths(model: nn.Module) -> dict[str, int]:
    """Rows and columns of the layers that a LoRA trains, by target layers; without those that choose none."""
    widths = {}
    for name in TARGETS:
        layers = _targets(model, "lora", name).values()
        if layers:
            widths[name] = sum(sum(target.shape[:2]) for target in layers)
    if not widths:
        raise ValueError(
            "Training Recipe: this model has no linear layer that a LoRA could train. Connect a diffusion model, or"
            " choose the layers in Adapter Settings."
        )
    return widths


def _targets(model: nn.Module, kind: str, name: str) -> dict[str, AdapterTarget]:
    try:
        return adapter_targets(model, AdapterSettings(kind=kind, targets=name))
    except ValueError:  # a model without such layers
        return {}


def _block_names(model: nn.Module) -> list[str]:
    wanted = {id(block) for block in blocks(model)}
    return [name for name, part in model.named_modules() if id(part) in wanted]


def _types(model: nn.Module) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for part in model.parameters():
        counts[str(part.dtype).removeprefix("torch.")] += part.numel()
    return dict(counts)


def _weight_bytes(module: nn.Module) -> int:
    return sum(part.numel() * part.element_size() for part in module.parameters())
