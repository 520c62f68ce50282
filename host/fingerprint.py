"""Hashes a model by its content, so that the same model has the same fingerprint in every process."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..storage.digest import sha256, sha256_of_spaced_json, sha256_of_tensors
from .base_weights import base_weights
from .comfyui_objects import Clip, Model
from .lora_injection import carried_stacks


class Fingerprint(NamedTuple):
    """A model's hash, the same in every process, and the parts that could not be hashed (such a run is not reused)."""

    digest: str
    unhashed: tuple[str, ...] = ()


_BASES: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


def fingerprint_patcher(patcher: Model) -> Fingerprint:
    """A hash of a ModelPatcher: base tensors, patches, LoRA stacks, attention patches, compute dtype and model
    sampling.

    The live, patched weights are never hashed. The base weights are hashed once per model, because they never change
    for good.
    """
    unhashed: list[str] = []
    parts: list[Any] = [_base_digest(patcher, unhashed), _model_facts(patcher)]
    parts.append(
        [[key, _hashable(entry, f"patch of {key}", unhashed)] for key, entry in sorted(patcher.patches.items())]
    )
    parts.append([stack.identity for stack in carried_stacks(patcher)])
    for key, injections in patcher.injections.items():
        if not all(hasattr(injection, "graft_stacks") for injection in injections):
            unhashed.append(f"injection {key}")
    options = {key: value for key, value in patcher.model_options.items() if key != "transformer_options"}
    for name, value in (
        *sorted(options.items()),
        *sorted(patcher.model_options.get("transformer_options", {}).items()),
    ):
        parts.append([name, _hashable(value, f"option {name}", unhashed)])
    for name, value in sorted(patcher.object_patches.items()):
        if name != "model_sampling":  # already in the facts
            parts.append([name, _hashable(value, f"object patch {name}", unhashed)])
    for name in ("wrappers", "hook_patches", "weight_wrapper_patches"):
        parts.append([name, _hashable(_without_empty(getattr(patcher, name, {})), name, unhashed)])
    return Fingerprint(sha256_of_spaced_json(parts), tuple(dict.fromkeys(unhashed)))


def fingerprint_trained(patcher: Model, clip: Clip) -> tuple[str, tuple[str, ...]]:
    """(hash, parts that could not be hashed) of the MODEL that is trained, and of its CLIP if that is trained too (not
    None).
    """
    model_fingerprint = fingerprint_patcher(patcher)
    if clip is None:
        return model_fingerprint
    clip_fingerprint = fingerprint_of(clip, "clip")
    return (
        f"{model_fingerprint.digest} {clip_fingerprint.digest}",
        model_fingerprint.unhashed + clip_fingerprint.unhashed,
    )


def fingerprint_of(thing: Any, name: str) -> Fingerprint:
    """Hash of a CLIP or VAE: its patcher's fingerprint, or its class if it has no weights."""
    patcher = getattr(thing, "patcher", None)
    if patcher is None:
        kind = f"{type(thing).__module__.rpartition('.')[2]}.{type(thing).__qualname__}"
        modules = [module for module in vars(thing).values() if isinstance(module, torch.nn.Module)]
        weights = {
            f"{i}.{key}": value for i, module in enumerate(modules) for key, value in module.state_dict().items()
        }
        return Fingerprint(sha256(f"{kind} {sha256_of_tensors(weights)}".encode()).hexdigest())
    patcher_fingerprint = fingerprint_patcher(patcher)
    digest = f"{patcher_fingerprint.digest} {getattr(thing, 'layer_idx', None)}"
    embeddings = getattr(getattr(thing, "tokenizer", None), "graft_embeddings", None)  # of host.embeddings
    if embeddings is not None:
        digest += f" {embeddings.identity}"
    return Fingerprint(
        digest,
        tuple(f"{name}: {part}" for part in patcher_fingerprint.unhashed),
    )


def versions(patcher: Model) -> dict[str, str]:
    """The versions of Graft and torch, and the device, to record with a training result."""
    import importlib.metadata

    try:
        graft = importlib.metadata.version("graft-nodes")
    # a folder in custom_nodes, which is not installed: its version is in pyproject.toml
    except importlib.metadata.PackageNotFoundError:
        text = (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
        graft = next((line.split('"')[1] for line in text.splitlines() if line.startswith("version = ")), "unknown")
    return {"graft": graft, "torch": str(torch.__version__), "device": str(patcher.load_device)}


def _base_digest(patcher: Model, unhashed: list[str]) -> str:
    if patcher.model in _BASES:
        return _BASES[patcher.model]
    weights = {key: value for key, value in base_weights(patcher).items() if not key.startswith("model_sampling.")}
    if any(weight.is_meta for weight in weights.values()):  # of `model_headers`
        unhashed.append("weights, as only the header of their file was read")
        return sha256_of_spaced_json({key: [str(weight.dtype), *weight.shape] for key, weight in weights.items()})
    _BASES[patcher.model] = sha256_of_tensors(weights)
    return _BASES[patcher.model]


def _model_facts(patcher: Model) -> list[Any]:
    model = patcher.model
    if not hasattr(model, "model_sampling"):  # a text encoder or a VAE
        return [type(model).__qualname__]
    sampling = patcher.get_model_object("model_sampling")
    values = {
        key: value
        for key, value in vars(sampling).items()
        if isinstance(value, int | float | str | bool) and key != "training"
    }
    return [
        type(model).__qualname__,
        type(model.latent_format).__qualname__,
        [cls.__qualname__ for cls in type(sampling).__mro__ if cls.__module__.startswith("comfy")],
        {key: repr(value) for key, value in sorted(values.items())},
        sha256_of_tensors(dict(sampling.named_buffers())),
        str(model.get_dtype()),
        str(model.manual_cast_dtype),
    ]


def _without_empty(value: Any) -> Any:
    if isinstance(value, Mapping):
        filled = {key: _without_empty(item) for key, item in value.items()}
        if filled:
            return {key: item for key, item in filled.items() if item not in ({}, [])}
        return {}
    return value


def _hashable(value: Any, where: str, unhashed: list[str]) -> Any:
    """`value` as canonical JSON: tensors by digest, objects by their `identity`, host adapters by kind and weights;
    other values are added to `unhashed`.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float | torch.dtype | torch.device):
        return repr(value)
    if isinstance(value, torch.Tensor):
        return sha256_of_tensors({"": value})
    if isinstance(value, Mapping):
        return [[_hashable(key, where, unhashed), _hashable(item, where, unhashed)] for key, item in value.items()]
    if isinstance(value, list | tuple):
        return [_hashable(item, where, unhashed) for item in value]
    if isinstance(getattr(value, "identity", None), str):
        return value.identity
    if hasattr(value, "weights") and hasattr(value, "name"):
        return [type(value).__qualname__, _hashable(value.weights, where, unhashed)]
    unhashed.append(f"{where} ({type(value).__module__}.{type(value).__qualname__})")
    return "unhashed"
