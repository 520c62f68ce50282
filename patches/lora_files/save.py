"""Saves LoRAs in a key format (kohya, PEFT, ComfyUI), with the metadata and hashes of kohya-ss/sd-scripts."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ...storage.digest import sha256
from ...storage.problem_list import problem_lines
from ...storage.safetensors import safetensors_bytes
from ..adapters.tlora import SCHEDULE
from ..models.family import Kohya, ModelFamily, ModelSpec
from ..models.registry import recognize_lora
from .key_formats import registry as key_formats
from .key_formats.key_format import GENERIC_PREFIX
from .key_formats.kohya import is_inner_parameter
from .parse import group_by_layer
from .trainer import MIN_RANK, RANK_EXPONENT


def to_key_format(lora: Mapping[str, Tensor], name: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Convert a LORA_MODEL (ComfyUI's generic names) to a key format.

    Layers merged without a model have the names of their first file. kohya's stay; diffusers' UNet names become
    kohya's, which ComfyUI reads too. Trained words go with them under OneTrainer's names, in float32.

    Args:
        lora: its tensors by name.
        name: the key format.
        dtype: that of factors and differences; alphas are float32.

    Raises:
        ValueError: listing what the format cannot name, and tensors with NaN, infinite numbers, or numbers that `dtype`
            cannot hold.
    """
    choices = key_formats.writable_formats()
    if name not in choices:
        raise ValueError(f"key format: expected one of {', '.join(choices)}, got {name!r}")
    writer = choices[name].writer
    assert writer is not None
    from . import embeddings

    layers, words = embeddings.split(lora)
    groups, strangers, problems = group_by_layer(layers, plain=False)
    problems += [f"{key}: not a LoRA tensor" for key in strangers]
    problems += [f"{key}: holds NaN or infinite values" for key, tensor in lora.items() if not _is_finite(tensor)]
    alternatives = [choice.name for choice in choices.values() if choice.holds_every_kind]
    problems += writer.problems(groups, " or ".join(alternatives))
    if not lora and not problems:
        problems.append("it is empty")
    if problems:
        raise ValueError("the LoRA cannot be saved:\n" + problem_lines(problems))
    tensors = writer.write(groups, dtype, _family(lora))
    tensors.update(embeddings.bundle(words))
    too_large = [key for key, tensor in tensors.items() if not _is_finite(tensor)]
    if too_large:
        largest = torch.finfo(dtype).max
        raise ValueError(
            "the LoRA cannot be saved in this data type, use bf16 or float32:\n"
            + problem_lines([f"{key}: holds numbers above {largest:g}, the largest of {dtype}" for key in too_large])
        )
    return tensors


def names_comfyui_ignores(lora: Mapping[str, Tensor]) -> list[str]:
    """Names of the differences that ComfyUI's LoRA loaders ignore: those of parameters that lie in a module with
    further modules (Wan's `modulation`, Z-Image's pad tokens).
    """
    groups, _, _ = group_by_layer(lora, plain=False)
    names: list[str] = []
    for base, group in groups.items():
        has_bias = "diff_b" in group  # so it is a module, as Wan's patch_embedding
        if "diff" in group and not has_bias and is_inner_parameter(base):
            names.append(base.removeprefix(GENERIC_PREFIX))
    return names


def _is_finite(tensor: Tensor) -> bool:
    if tensor.element_size() == 1:  # fp8
        tensor = tensor.float()
    return bool(torch.isfinite(tensor).all())


def _family(lora: Mapping[str, Tensor]) -> ModelFamily | None:
    return recognize_lora((name, tuple(tensor.shape)) for name, tensor in lora.items())


def kohya_hashes(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> dict[str, str]:
    """The hashes of a file with only its `ss_*` metadata, as sd-scripts computes them.

    Args:
        tensors: the file's.
        metadata: the file's.

    Returns:
        `sshs_model_hash`, the sha256 of everything after the header, and `sshs_legacy_hash`, the first 8 digits of the
        sha256 of 64 KiB from 1 MiB on.
    """
    model_hash, legacy_hash, offset = sha256(), sha256(), 0
    kohya = {key: value for key, value in metadata.items() if key.startswith("ss_")}
    chunks = safetensors_bytes(tensors, kohya or None)
    for number, chunk in enumerate(chunks):
        if number:
            model_hash.update(chunk)
        legacy_hash.update(chunk[max(0, 0x100000 - offset) : max(0, 0x110000 - offset)])
        offset += len(chunk)
    return {"sshs_model_hash": model_hash.hexdigest(), "sshs_legacy_hash": legacy_hash.hexdigest()[:8]}


def build_metadata(lora: Mapping[str, Tensor], title: str, more: Mapping[str, str]) -> dict[str, str]:
    """The metadata of a saved LoRA (`ss_*` and `modelspec.*`), without dates or random ids.

    Args:
        lora: its tensors by generic names.
        title: the file's.
        more: from training; it overrides the others.
    """
    groups, _, _ = group_by_layer(lora, plain=False)
    ranks = sorted({group["down"][1].shape[0] for group in groups.values() if "down" in group})
    alphas = sorted({float(group["alpha"][1]) for group in groups.values() if "alpha" in group})
    lycoris = any(set(group) - {"up", "down", "alpha"} for group in groups.values())
    entries = {
        "format": "pt",
        "modelspec.sai_model_spec": "1.0.0",
        "modelspec.title": title,
        "modelspec.implementation": "https://github.com/comfyanonymous/ComfyUI",
        "ss_network_module": "lycoris.kohya" if lycoris else "networks.lora",
        "ss_output_name": title,
    }
    whole_lokr = any({"lokr_w1", "lokr_w2"} <= set(group) for group in groups.values())
    if ranks and not whole_lokr:  # which has no rank: another layer's would divide its alpha
        entries["ss_network_dim"] = str(ranks[0]) if len(ranks) == 1 else "Dynamic"
    schedules = {tuple(group[SCHEDULE][1].tolist()) for group in groups.values() if SCHEDULE in group}
    if len(schedules) == 1:
        min_rank, exponent = schedules.pop()
        entries |= {MIN_RANK: f"{min_rank:g}", RANK_EXPONENT: f"{exponent:g}"}
    if alphas:
        entries["ss_network_alpha"] = f"{alphas[0]:g}" if len(alphas) == 1 else "Dynamic"
    return {**entries, **more, **_family_metadata(_family(lora))}


def _family_metadata(family: ModelFamily | None) -> dict[str, str]:
    """The metadata entries that say which model a LoRA is for (modelspec's and kohya's); empty if it is unknown."""
    if family is None:
        return {}
    entries: dict[str, str] = {}
    if isinstance(family.modelspec, ModelSpec):
        entries["modelspec.architecture"] = f"{family.modelspec.architecture}/lora"
        entries["modelspec.implementation"] = family.modelspec.implementation
    if isinstance(family.kohya, Kohya):
        if isinstance(family.kohya.version, str):
            entries["ss_base_model_version"] = family.kohya.version
        if isinstance(family.kohya.v2, bool):
            entries["ss_v2"] = str(family.kohya.v2)
    return entries
