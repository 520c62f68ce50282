"""Reads a LoRA file's metadata: trigger words, training settings (sd-scripts' `ss_*`, `modelspec.*`), base model."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...storage.regular_file import open_regular
from ...storage.safetensors import TensorInfo
from ..models.recognition import text_width
from ..models.registry import recognize_lora
from . import open_file, parse
from .key_formats import registry as key_formats
from .peft_config import peft_configs

ON_TOP_OF = "graft_trained_on_top_of"  # the LoRAs that were on the model while this one was trained
_FACTS = (  # (label, keys; the first one present counts)
    ("title", ("modelspec.title", "ss_output_name")),
    ("trigger", ("modelspec.trigger_phrase", "ss_trigger_words")),
    ("for", ("ss_base_model_version", "modelspec.architecture")),
    ("rank", ("ss_network_dim",)),
    ("alpha", ("ss_network_alpha",)),
    ("steps", ("ss_steps", "ss_max_train_steps")),
    ("resolution", ("modelspec.resolution", "ss_resolution")),
    ("rate", ("ss_unet_lr", "ss_learning_rate")),
    ("trained on", ("ss_sd_model_name",)),
    ("on top of", (ON_TOP_OF,)),
)
_LONGEST = 80  # characters of a text in a line
_MOST_SHOWN = 2000  # characters of a text in the editor
_MOST_SETTINGS, _LONGEST_SETTING = 30, 100  # of ToDo and of an average: how many, and characters of each
_MOST_TAGS = 4 << 20  # characters of all tags with their counts


def summarize(metadata: Mapping[str, str], words: int = 8) -> str:
    """A LoRA's metadata in one line: title, trigger words, tags, model, rank, steps …; empty without metadata."""
    facts = []
    for label, keys in _FACTS:
        value = _first(metadata, keys)
        if value:
            facts.append(f"{label} {_shorten(value)}")
    tags = _tags(metadata.get("ss_tag_frequency", ""))
    if tags:
        facts.append("tags " + ", ".join(f"{_shorten(tag)} ({count})" for tag, count in tags.most_common(words)))
    return "; ".join(facts)


def summarize_contents(state: Mapping[str, Tensor]) -> str:
    """A LoRA's contents in one line, from names and shapes: kinds of layers with their counts, ranks, model family."""
    shapes = key_formats.generic_keys({name: tuple(tensor.shape) for name, tensor in state.items()})
    kinds, ranks = parse.summarize(shapes)
    family = recognize_lora(shapes.items())
    parts = [", ".join(f"{number} {kind}" for kind, number in sorted(kinds.items()))] if kinds else ["no LoRA layers"]
    if ranks:
        parts.append(f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}")
    return ", ".join([*parts, *([f"for {family.title}"] if family else [])])


def _shorten(text: str) -> str:
    plain = " ".join(text[: 10 * _LONGEST].split())
    if len(plain) <= _LONGEST:
        return plain
    return plain[: _LONGEST - 1] + "…"


def _tags(text: str) -> Counter[str]:
    """Tags and their counts over all folders of kohya's `ss_tag_frequency`; empty if it is malformed or longer than any
    dataset's.
    """
    if len(text) > _MOST_TAGS:
        return Counter()
    try:
        folders = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return Counter()
    counts: Counter[str] = Counter()
    for tags in folders.values() if isinstance(folders, dict) else ():
        counts.update(
            {tag.strip(): count for tag, count in tags.items() if isinstance(count, int)}
            if isinstance(tags, dict)
            else {}
        )
    return counts


_WORDS = ("modelspec.trigger_phrase", "ss_trigger_words", "trained_words", "modelspec.usage_hint")


def describe(path: str) -> dict[str, Any]:
    """What the editor shows about a LoRA file, as plain JSON values.

    It is read from the header, plus a few bytes if only alphas give the scale. The keys:

    - `file`, `size` (bytes), `layers`, `kinds` {kind: layers}, `ranks`, `alphas`, `types` {type: tensors}
    - `family` and `base` (its model, "" if unknown), `title`, `words` (trigger words), `tags` [[tag, count]] (the most
      frequent)
    - `embeddings`: the names by which prompts call the textual inversions in the file
    - `on_top_of`, if it was trained on top of others: the LoRAs that belong on the model with this one
    - `steps`, `resolution`, `todo`, `ema`, `text_encoder` (whether it has layers for one), `from_graft`

    Texts are cut at 2,000 characters. Raises ValueError for pickles, damaged files and headers of more than 16 MB,
    OSError if the file is missing.
    """
    from . import embeddings

    tensors, metadata = open_file.read_lora_header(path)
    shapes = key_formats.generic_keys({name: tensor.shape for name, tensor in tensors.items()})
    kinds, ranks = parse.summarize(shapes)
    family = recognize_lora(shapes.items())
    base_model = metadata.get("ss_base_model_version") or metadata.get("modelspec.architecture") or ""
    types = Counter(tensor.kind for tensor in tensors.values())
    tags = _tags(metadata.get("ss_tag_frequency", ""))
    described: dict[str, Any] = {
        "file": os.path.basename(path),
        "size": os.path.getsize(path),
        "layers": len(parse.layer_names(shapes)),
        "kinds": kinds,
        "ranks": ranks,
        "alphas": _alphas(path, tensors, metadata),
        "types": dict(sorted(types.items())),
        "family": family.name if family else "",
        "base": _cut(base_model) or (family.title if family else ""),
        "title": _cut(_first(metadata, ("modelspec.title", "ss_output_name"))),
        "words": _cut(_first(metadata, _WORDS)),
        "tags": [[_cut(tag, _LONGEST), count] for tag, count in tags.most_common(20)],
        "embeddings": embeddings.prompt_names(tensors, path),
        "steps": _cut(_first(metadata, ("ss_steps", "ss_max_train_steps")), _LONGEST),
        "resolution": _cut(_first(metadata, ("modelspec.resolution", "ss_resolution")), _LONGEST),
        "todo": _settings(metadata, "ss_todo_"),
        "ema": _settings(metadata, "ss_ema_"),
        "text_encoder": any(name.startswith(key_formats.text_encoder_prefixes()) for name in shapes),
        "from_graft": "graft_state" in metadata,
    }
    if metadata.get(ON_TOP_OF):
        described["on_top_of"] = metadata[ON_TOP_OF]
    return described


def _settings(metadata: Mapping[str, str], prefix: str) -> dict[str, str]:
    """The entries of a prefix by their names without it: the first few, each cut."""
    keys = itertools.islice((key for key in metadata if key.startswith(prefix)), _MOST_SETTINGS)
    return {_cut(key.removeprefix(prefix), _LONGEST_SETTING): _cut(metadata[key], _LONGEST_SETTING) for key in keys}


def _cut(text: str, most: int = _MOST_SHOWN) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _first(metadata: Mapping[str, str], entries: Sequence[str]) -> str:
    return next((metadata[key] for key in entries if metadata.get(key, "None") not in ("", "None")), "")


def _alphas(path: str, tensors: Mapping[str, TensorInfo], metadata: Mapping[str, str]) -> list[float]:
    """All alphas of a file, from the few bytes of each tensor, else from its metadata."""
    alphas = set()
    with open_regular(path) as file:
        for name, tensor in tensors.items():
            if name.endswith(".alpha") and tensor.kind in _ALPHAS and 0 < tensor.end - tensor.start <= 8:
                file.seek(tensor.start)
                dtype = _ALPHAS[tensor.kind]
                alphas.add(float(torch.frombuffer(bytearray(file.read(tensor.end - tensor.start)), dtype=dtype)[0]))
    if not alphas:
        try:
            configs = peft_configs(metadata)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        texts = [metadata.get("ss_network_alpha", "")] + [str(config.alpha) for config in configs]
        alphas = {float(text) for text in texts if re.fullmatch(r"\d{1,20}(\.\d{1,20})?", text)}
    return sorted(alphas)


_ALPHAS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
}


def guess_model(state: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """The model family that a LoRA is for, from its metadata, else from names and shapes; empty if neither tells."""
    shapes = key_formats.generic_keys({name: tuple(tensor.shape) for name, tensor in state.items()})
    base_model = metadata.get("ss_base_model_version") or metadata.get("modelspec.architecture")
    if base_model:
        return f"{_shorten(base_model)} (its metadata)"
    family = recognize_lora(shapes.items())
    if family is not None:
        return f"{family.title} {parse.BY_SHAPES}"
    width = text_width(shapes.items())
    if width is not None:
        return f"a model with a context of {width} (its cross-attention)"
    return ""
