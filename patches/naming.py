"""LoRAs for saving: the names and metadata of kohya-ss/sd-scripts, of PEFT, or ComfyUI's generic form."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from .adapters import LoRA
from .formats import Group, grouped

NAMES = ("kohya", "peft", "comfyui")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "float32": torch.float32}


def renamed(lora: Mapping[str, Tensor], names: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """A LORA_MODEL (ComfyUI's generic names) under the names of `names`, factors and differences as `dtype`, alpha as float32.

    kohya: `lora_unet_<path with underscores>.lora_up.weight`, `.alpha`. peft: `<path>.lora_B.weight`, alpha / rank multiplied into B
    because PEFT keeps alpha outside the file. comfyui: names unchanged. Raises ValueError listing what cannot be named so.
    """
    if names not in NAMES:
        raise ValueError(f"names: expected one of {', '.join(NAMES)}, got {names!r}")
    groups, strangers, problems = grouped(lora, plain=False)
    problems += [f"{key}: not a LoRA tensor" for key in strangers]
    if names == "peft":
        problems += [
            f"{base}: PEFT has no name for {', '.join(sorted(set(group) - {'up', 'down', 'alpha'}))}; save with kohya or comfyui names"
            for base, group in groups.items()
            if set(group) - {"up", "down", "alpha"}
        ]
    if problems or not groups:
        raise ValueError("the LoRA cannot be saved:\n" + "\n".join(f"- {problem}" for problem in problems or ["it is empty"]))
    out: dict[str, Tensor] = {}
    for base, group in groups.items():
        out.update(_peft(base, group, dtype) if names == "peft" else _plain(_kohya(base) if names == "kohya" else base, group, dtype))
    return out


_WRITTEN = {
    "up": ".lora_up.weight", "down": ".lora_down.weight", "mid": ".lora_mid.weight",
    "factor": ".weight", "up_bias": ".lora_up.bias", "magnitude": ".dora_scale",
    **{name: f".{name}.weight" for name in ("a1", "a2", "b1", "b2")},
}  # fmt: skip; every other role is its own suffix


def _kohya(base: str) -> str:
    """ComfyUI and every trainer of SDXL name a UNet layer so; text encoders keep the generic form, which has no one kohya name."""
    path = base.removeprefix("diffusion_model.")
    return base if path == base else "lora_unet_" + path.replace(".", "_")


def _plain(base: str, group: Group, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    for role, (_, tensor) in group.items():
        kind = torch.float32 if role == "alpha" else dtype if tensor.is_floating_point() else tensor.dtype
        yield base + _WRITTEN.get(role, f".{role}"), tensor.to(kind)


def _peft(base: str, group: Group, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    layer = LoRA(group["up"][1], group["down"][1], float(group["alpha"][1]) if "alpha" in group else None)
    up = layer.up if layer.scale == 1.0 else layer.up.float() * layer.scale
    yield f"{base}.lora_B.weight", up.to(dtype)
    yield f"{base}.lora_A.weight", layer.down.to(dtype)


def saved_metadata(lora: Mapping[str, Tensor], title: str, more: Mapping[str, str]) -> dict[str, str]:
    """`ss_*` and `modelspec.*` entries of a LoRA, without dates or random ids; `more` (of the training) goes on top."""
    groups, _, _ = grouped(lora, plain=False)
    ranks = sorted({group["down"][1].shape[0] for group in groups.values() if "down" in group})
    alphas = sorted({float(group["alpha"][1]) for group in groups.values() if "alpha" in group})
    entries = {
        "format": "pt",
        "modelspec.sai_model_spec": "1.0.0",
        "modelspec.title": title,
        "ss_network_module": "networks.lora",
    }
    if ranks:
        entries["ss_network_dim"] = str(ranks[0]) if len(ranks) == 1 else "Dynamic"
    if alphas:
        entries["ss_network_alpha"] = f"{alphas[0]:g}" if len(alphas) == 1 else "Dynamic"
    return {**entries, **more}
