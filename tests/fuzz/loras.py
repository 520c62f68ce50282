"""LoRA files: read, described and put on a small model as the nodes do, and taken off again; the base
keeps its bytes.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import torch
from graft_nodes.patches.core import ledger as core_ledger
from graft_nodes.patches.lora_files import layer_matching, metadata, open_file, parse, save
from graft_nodes.patches.lora_files.key_formats import registry as key_formats
from graft_nodes.patches.lora_files.parse import Target as Place
from graft_nodes.patches.lora_files.peft_config import peft_configs
from graft_nodes.patches.lora_files.trainer import oft_trainer
from graft_nodes.patches.patching import stack_ledger
from graft_nodes.patches.patching.fuse import Patch, Stack
from hypothesis import strategies as st
from torch import nn

from ..faults.tried import hash_of
from .damage import corpus, damaged_bytes, damaged_json, text_of
from .engine import Target

AT_ACTIVATIONS = ("0.weight", "1.weight", "2.weight")
NAMES = {"to_q": "0", "qkv": "1", "conv": "2", "norm": "3"}


def model() -> nn.Module:
    """A linear layer, one of three parts, a convolution and a norm, in the order in which `run` uses them."""
    built = nn.ModuleList(
        [nn.Linear(6, 8), nn.Linear(6, 12), nn.Conv2d(4, 8, 3, padding=1), nn.LayerNorm(8)]
    ).requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for parameter in built.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return built


def run(of: Any) -> None:
    """Every layer once, as activations-side adapters work only then."""
    x = torch.ones(2, 6)
    of[3](of[0](x))
    of[1](x)
    of[2](torch.ones(1, 4, 5, 5))


_JSON_WITHIN = ("lora_adapter_metadata", "adapter_config", "ss_tag_frequency")


def body_of(text: str) -> str:
    """JSON text, or an empty object where damage has left none."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return "{}"
    return text


def key_map() -> dict[str, Place]:
    """Names that trainers give to the model's layers."""
    found = {}
    for name, number in NAMES.items():
        for spelled in (
            f"lora_unet_{name}",
            f"diffusion_model.{name}",
            f"unet.{name}",
            f"transformer.{name}",
            name,
            f"lycoris_{name}",
        ):
            found[spelled] = Place("model", f"{number}.weight")
    for part, name in enumerate("qkv"):
        found[f"transformer.{name}"] = Place("model", "1.weight", (0, 4 * part, 4))
    return found


@st.composite
def damaged_file(draw: st.DrawFn, bodies: list[bytes]) -> bytes:
    """A safetensors file with a damaged header whose length fits, or with damage anywhere."""
    if draw(st.booleans()):
        return draw(damaged_bytes(bodies))
    body = draw(st.sampled_from(bodies))
    length = struct.unpack("<Q", body[:8])[0]
    header = draw(damaged_json([body[8 : 8 + length]]))
    said = header.get("__metadata__") if isinstance(header, dict) else None
    for key in _JSON_WITHIN if isinstance(said, dict) and draw(st.booleans()) else ():
        if isinstance(said.get(key), str):
            said[key] = text_of(draw(damaged_json([body_of(said[key])]))).decode()
    text = text_of(header, draw(st.sampled_from(("", "", "", "__metadata__", "dtype", "shape", "data_offsets"))))
    data = draw(damaged_bytes([body[8 + length :]], 2)) if draw(st.booleans()) else body[8 + length :]
    claimed = draw(st.sampled_from((0, 0, 0, 0, -1, 1, 8, 2**31, 2**63))) + len(text)
    return struct.pack("<Q", claimed % 2**64) + text + data


class Loras(Target):
    """See above."""

    name = "loras"
    night = 1_000_000

    def __init__(self, place: Path) -> None:
        super().__init__(place)
        self.path = place / "lora.safetensors"
        self.model = model()
        self.shapes = {("model", name): shape for name, shape in stack_ledger.weight_shapes(self.model).items()}
        self.base, self.targets = hash_of(self.model), key_map()

    def cases(self) -> st.SearchStrategy[Any]:
        """(a file's bytes, at the activations or in the weights)."""
        return st.tuples(damaged_file(corpus("loras")), st.booleans())

    def attempt(self, case: Any) -> None:
        """As the picker's route describes it, and as LoRAStackPatch and GraftSaveLoRA use it."""
        body, bypass = case
        self.path.write_bytes(body)
        refused = None
        try:
            told = metadata.describe(str(self.path))
            json.dumps(told)
        except ValueError as error:
            assert str(self.path) in str(error), f"the error does not name the file: {error}"
            refused = error
        state, said = open_file.load(str(self.path))
        metadata.summarize(said)
        metadata.summarize_contents(state)
        names = {**self.targets, **layer_matching.find_targets(parse.layer_names(state), self.targets, self.shapes)}
        hint, configs = metadata.guess_model(state, said), peft_configs(said)
        keys, trainer = key_formats.generic_keys(state), oft_trainer(state, said)
        parsed = parse.read(keys, names, self.shapes, "lora", True, hint, configs, trainer)
        patches: dict[str, list[Patch]] = {}
        for weight, layer, part in parse.patches_of(parsed, "model", self.shapes):
            patches.setdefault(weight, []).append(Patch(layer, 0.5, part))
        stack = Stack(patches, [name for name in patches if name in AT_ACTIVATIONS] if bypass else ())
        try:
            stack_ledger.attach(self.model, "fuzz", [stack])
            run(self.model)
        finally:
            stack_ledger.detach(self.model, "fuzz")
        save.build_metadata(state, "lora", said)
        if refused is not None:
            raise refused

    def sound(self) -> None:
        """The base is what it was, byte for byte, and nothing is on it."""
        stack_ledger.forget(self.model)
        assert hash_of(self.model) == self.base, "the base's bytes have changed"
        assert not hasattr(self.model, core_ledger.ATTRIBUTE), "something is still on the model"
