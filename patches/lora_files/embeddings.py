"""Textual inversions inside LoRA files: which text encoder each belongs to, and the name that prompts call it by.

OneTrainer and sd-webui bundle named ones; ai-toolkit stores one without a name, which is called like the file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import NamedTuple

import torch
from torch import Tensor

from . import parse
from .entry import LoraEntry
from .key_formats import registry as key_formats

_NOT_IN_PROMPTS = re.compile(r'[\s<>\[\]():"|?*\\/,]+')  # what a prompt or a file name cannot hold
_ANY_ENCODER = ("", "emb_params", "string_to_param")  # keys that say no text encoder: the width tells
_OUTPUT = "_out"  # OneTrainer's embeddings behind the text encoder
_WRITTEN_NAMES = {"clip_h": "clip_l", "t5xxl": "t5", "gemma2_2b": "gemma"}  # OneTrainer's for ComfyUI's, else the same
_OTHER_NAMES = {"clip_l": "clip_h"}  # SD 2 has one text encoder, which OneTrainer calls clip_l


class TokenizerPart(NamedTuple):
    """One text encoder of a CLIP: the host's name for its embeddings ("clip_l", "t5xxl"), and their width."""

    key: str
    width: int


class Embedding(NamedTuple):
    """A textual inversion: its name in prompts, its file, and its vectors (tokens, width) by `TokenizerPart.key`."""

    name: str
    file: str
    vectors: Mapping[str, Tensor]


@dataclass
class EmbeddingReading:
    """The embeddings of a stack's files, lines for the report, and what is wrong with them."""

    embeddings: list[Embedding] = field(default_factory=list)
    report: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def read(
    entries: Iterable[LoraEntry], parts: Sequence[TokenizerPart], taken: Mapping[str, str] | None = None
) -> EmbeddingReading:
    """The embeddings in the files of a stack, for a CLIP with these text encoders.

    Of two with the same name the first counts, and the report says so. `taken` are those that the CLIP carries: file
    by name. Problems are collected, not raised; in a partial entry they are left out instead.
    """
    reading = EmbeddingReading()
    files = dict(taken or {})
    for entry in entries:
        for name, keys in _keys_by_name(entry).items():
            if name in files:
                reading.report.append(
                    f"{entry.name}: embedding:{name} is left out, the one from {files[name]} comes first"
                )
                continue
            embedding = _read(entry, name, keys, parts, reading)
            if embedding.vectors:
                files[name] = entry.name
                reading.embeddings.append(embedding)
                reading.report.append(f"embedding:{name} from {entry.name} ({_vector_counts(embedding)})")
    return reading


def prompt_names(keys: Iterable[str], file: str) -> list[str]:
    """The names by which prompts call the embeddings in a LoRA file, from its keys."""
    found = [key_formats.embedding_key(key) for key in keys]
    return sorted({_prompt_name(key.name, file) for key in found if key is not None})


def split(lora: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """(The layers of a LORA_MODEL, the words trained with it: {name: {text encoder: vectors}}, float32 on the CPU)."""
    layers: dict[str, Tensor] = {}
    words: dict[str, dict[str, Tensor]] = {}
    for key, tensor in lora.items():
        found = key_formats.embedding_key(key)
        if found is None or found.name is None:
            layers[key] = tensor
        else:
            vectors = tensor.detach().to("cpu", torch.float32).contiguous()
            words.setdefault(found.name, {})[found.encoder] = vectors
    return layers, words


def bundle(words: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Trained words as LoRA files carry them: a key for each text encoder, under the name that OneTrainer has for it.
    sd-webui reads those of SD 1, 2 and SDXL.
    """
    tensors: dict[str, Tensor] = {}
    for name, vectors in words.items():
        for encoder, tensor in vectors.items():
            tensors[f"bundle_emb.{name}.{_WRITTEN_NAMES.get(encoder, encoder)}"] = tensor
    return tensors


def _keys_by_name(entry: LoraEntry) -> dict[str, dict[str, str]]:
    """{name in prompts: {key in the file: text encoder}}."""
    by_name: dict[str, dict[str, str]] = {}
    for key in entry.state_dict:
        found = key_formats.embedding_key(key)
        if found is not None:
            by_name.setdefault(_prompt_name(found.name, entry.name), {})[key] = found.encoder
    return by_name


def _prompt_name(name: str | None, file: str) -> str:
    """A name as prompts can write it: "<my hat>" is "my_hat", as OneTrainer names the file of such an embedding."""
    plain = _NOT_IN_PROMPTS.sub("_", name or "").strip("_")
    stem = PurePosixPath(file.replace("\\", "/")).name.removesuffix(".safetensors")
    return plain or _NOT_IN_PROMPTS.sub("_", stem).strip("_")


def _read(
    entry: LoraEntry, name: str, keys: Mapping[str, str], parts: Sequence[TokenizerPart], reading: EmbeddingReading
) -> Embedding:
    vectors: dict[str, Tensor] = {}
    for key, encoder in keys.items():
        tensor = entry.state_dict[key]
        part = _part_of(encoder, tensor, parts)
        if part is None:
            reading.report.append(f"{entry.name}: {key} is left out, {_why_without_part(encoder, parts)}")
            continue
        problem = _problem(tensor, part)
        if problem is None and part.key in vectors:
            problem = f"the file has vectors of embedding:{name} for {part.key} twice"
        if problem is None:
            vectors[part.key] = tensor.detach().clone().reshape(-1, part.width)
        elif entry.partial:
            reading.report.append(f"{entry.name}: partial: {key} is left out, {problem}")
        else:
            reading.problems.append(f"{entry.name}: {key}: {problem}")
    return Embedding(name, entry.name, vectors)


def _part_of(encoder: str, tensor: Tensor, parts: Sequence[TokenizerPart]) -> TokenizerPart | None:
    """The text encoder that a tensor is for: by name, or by width where the key says none."""
    if encoder.endswith(_OUTPUT):
        return None
    if encoder.split(".")[0] in _ANY_ENCODER:
        return _part_of_width(tensor, parts)
    return next(_matching_parts(encoder, parts), None)


def _part_of_width(tensor: Tensor, parts: Sequence[TokenizerPart]) -> TokenizerPart | None:
    """The part with the tensor's width; the first one, whose width the problem then names, if none has it."""
    for part in parts:
        if tensor.ndim and tensor.shape[-1] == part.width:
            return part
    return next(iter(parts), None)


def _matching_parts(encoder: str, parts: Sequence[TokenizerPart]) -> Iterator[TokenizerPart]:
    """The parts that a name may mean, the best first: OneTrainer says t5, gemma and qwen without a size."""
    for part in parts:
        if part.key == encoder:
            yield part
    for part in parts:
        if encoder in part.key or part.key == _OTHER_NAMES.get(encoder):
            yield part


def _why_without_part(encoder: str, parts: Sequence[TokenizerPart]) -> str:
    if encoder.endswith(_OUTPUT):
        return "it is added behind the text encoder, which ComfyUI has no place for"
    if not parts:
        return "this CLIP reads no embedding:NAME"
    return f"this CLIP has no {encoder} ({', '.join(part.key for part in parts)})"


def _problem(tensor: Tensor, part: TokenizerPart) -> str | None:
    """Why a tensor cannot be vectors of a text encoder, or None."""
    if not tensor.is_floating_point() or tensor.ndim not in (1, 2) or not tensor.numel():
        return f"expected vectors of {part.width} numbers for {part.key}, got {tensor.dtype} {tuple(tensor.shape)}"
    if tensor.shape[-1] != part.width:
        return (
            f"its vectors have {tensor.shape[-1]} numbers, {part.key} of this CLIP takes {part.width}: connect the CLIP"
            " that it was trained on"
        )
    if not parse.is_finite(tensor):
        return "holds NaN or infinite values"
    return None


def _vector_counts(embedding: Embedding) -> str:
    counts = []
    for part, vectors in embedding.vectors.items():
        counts.append(f"{part}: {len(vectors)}")
    return ", ".join(counts) + " vectors"
