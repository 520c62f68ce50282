"""Models with the layers and sizes of real ones, without values: what a recipe counts is there, on the meta device."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch
from graft_nodes.patches.models.recognise import recognise_model
from graft_nodes.training.recipes.facts import ModelFacts, facts_of
from torch import nn

Shapes = Mapping[str, tuple[int, ...]]


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


def flux() -> nn.Module:
    shapes = {}
    for i in range(19):
        for stream in ("img", "txt"):
            block = f"double_blocks.{i}.{stream}"
            shapes[f"{block}_attn.qkv"], shapes[f"{block}_attn.proj"] = (9216, 3072), (3072, 3072)
            shapes[f"{block}_mlp.0"], shapes[f"{block}_mlp.2"] = (12288, 3072), (3072, 12288)
            shapes[f"{block}_mod.lin"] = (18432, 3072)
    for i in range(38):
        block = f"single_blocks.{i}"
        shapes[f"{block}.linear1"], shapes[f"{block}.linear2"] = (21504, 3072), (3072, 15360)
        shapes[f"{block}.modulation.lin"] = (9216, 3072)
    return build(shapes)


def qwen() -> nn.Module:
    shapes = {}
    for i in range(60):
        block = f"transformer_blocks.{i}"
        for name in ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"):
            shapes[f"{block}.attn.{name}"] = (3072, 3072)
        for stream in ("img", "txt"):
            shapes[f"{block}.{stream}_mlp.net.0.proj"] = (12288, 3072)
            shapes[f"{block}.{stream}_mlp.net.2"] = (3072, 12288)
            shapes[f"{block}.{stream}_mod.1"] = (18432, 3072)
    return build(shapes)


def z_image() -> nn.Module:
    shapes = {}
    for i in range(34):
        block = f"layers.{i}"
        shapes[f"{block}.attention.qkv"], shapes[f"{block}.attention.out"] = (11520, 3840), (3840, 3840)
        shapes[f"{block}.feed_forward.w1"], shapes[f"{block}.feed_forward.w2"] = (10240, 3840), (3840, 10240)
        shapes[f"{block}.feed_forward.w3"] = (10240, 3840)
    return build(shapes)


def wan() -> nn.Module:
    shapes = {}
    for i in range(40):
        block = f"blocks.{i}"
        for attention in ("self_attn", "cross_attn"):
            for name in "qkvo":
                shapes[f"{block}.{attention}.{name}"] = (5120, 5120)
        shapes[f"{block}.ffn.0"], shapes[f"{block}.ffn.2"] = (13824, 5120), (5120, 13824)
    return build(shapes)


def sd1() -> nn.Module:
    return _unet({(1, 2): 320, (4, 5): 640, (7, 8): 1280}, {1: 1, 2: 1, 4: 1, 5: 1, 7: 1, 8: 1}, text=768)


def sdxl() -> nn.Module:
    return _unet({(1, 2): 320, (4, 5): 640, (7, 8): 1280}, {4: 2, 5: 2, 7: 10, 8: 10}, text=2048)


def _unet(widths: Mapping[tuple[int, int], int], depths: Mapping[int, int], text: int) -> nn.Module:
    """The half of a UNet that goes down, twice: what goes up is alike."""
    shapes: dict[str, tuple[int, ...]] = {"input_blocks.0.0": (320, 4, 3)}
    for side in ("input_blocks", "output_blocks"):
        for numbers, width in widths.items():
            for number in numbers:
                shapes |= _unet_block(f"{side}.{number}", width, depths.get(number, 0), text)
    return build(shapes)


def _unet_block(block: str, width: int, depth: int, text: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    shapes[f"{block}.0.in_layers.2"], shapes[f"{block}.0.out_layers.3"] = (width, width, 3), (width, width, 3)
    shapes[f"{block}.0.emb_layers.1"] = (width, 1280)
    for i in range(depth):
        inner = f"{block}.1.transformer_blocks.{i}"
        for attention, columns in (("attn1", width), ("attn2", text)):
            shapes[f"{inner}.{attention}.to_q"] = shapes[f"{inner}.{attention}.to_out.0"] = (width, width)
            shapes[f"{inner}.{attention}.to_k"] = shapes[f"{inner}.{attention}.to_v"] = (width, columns)
        shapes[f"{inner}.ff.net.0.proj"], shapes[f"{inner}.ff.net.2"] = (8 * width, width), (width, 4 * width)
    if depth:
        shapes[f"{block}.1.proj_in"] = shapes[f"{block}.1.proj_out"] = (width, width)
    return shapes


MODELS = {"sd1": sd1, "sdxl": sdxl, "flux": flux, "qwen": qwen, "z-image": z_image, "wan": wan}
PREDICTIONS = {"sd1": "eps", "sdxl": "eps", "flux": "flow", "qwen": "flow", "z-image": "flow", "wan": "flow"}


@cache
def facts(family: str) -> ModelFacts:
    """What Graft counts of a family's model."""
    model = MODELS[family]()
    return facts_of(model, recognise_model(model), PREDICTIONS[family])
