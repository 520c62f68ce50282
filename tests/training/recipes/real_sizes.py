"""Models for the tests of recipes: what is counted of full sizes in ComfyUI's own classes, and small ones of shapes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from graft_nodes.tests.with_comfyui import full_sizes
from graft_nodes.training.recipes.facts import ModelFacts
from torch import nn

Shapes = Mapping[str, tuple[int, ...]]
TITLES = {
    "sd1": "SD 1.5",
    "sdxl": "SDXL",
    "flux": "Flux.1 dev",
    "qwen": "Qwen-Image",
    "z-image": "Z-Image",
    "wan": "Wan 14B",
}
FAMILIES = tuple(TITLES)


def facts(family: str) -> ModelFacts:
    """What Graft counts of a family's model in bf16."""
    return full_sizes.stored()[TITLES[family]][full_sizes.BF16]


def build(shapes: Shapes) -> nn.Module:
    """A model of linear layers (rows, columns) and convolutions (rows, columns, kernel) by path."""
    children: dict[str, dict[str, tuple[int, ...]]] = {}
    model: nn.Module = nn.Module()
    for path, shape in shapes.items():
        head, _, rest = path.partition(".")
        children.setdefault(head, {})[rest] = shape
    if all(head.isdigit() for head in children):
        model = nn.ModuleList()
    for head, inner in children.items():
        if list(inner) == [""]:
            model.add_module(head, _layer(inner[""]))
        else:
            model.add_module(head, build(inner))
    return model


def _layer(shape: tuple[int, ...]) -> nn.Module:
    if len(shape) == 2:
        return nn.Linear(shape[1], shape[0], device="meta", dtype=torch.bfloat16)
    return nn.Conv2d(shape[1], shape[0], shape[2], device="meta", dtype=torch.bfloat16)
