"""What a LoRA file says about itself: trigger words and training settings (kohya-ss/sd-scripts' `ss_*`, `modelspec.*`), and its model."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping

from torch import Tensor

_FACTS = (  # (label, keys of which the first that is there counts)
    ("title", ("modelspec.title", "ss_output_name")), ("trigger", ("modelspec.trigger_phrase", "ss_trigger_words")),
    ("for", ("ss_base_model_version", "modelspec.architecture")), ("rank", ("ss_network_dim",)), ("alpha", ("ss_network_alpha",)),
    ("steps", ("ss_steps", "ss_max_train_steps")), ("resolution", ("modelspec.resolution", "ss_resolution")),
    ("rate", ("ss_unet_lr", "ss_learning_rate")), ("trained on", ("ss_sd_model_name",)),
)  # fmt: skip
_LONGEST = 80


def about(metadata: Mapping[str, str], words: int = 8) -> str:
    """One line: title, trigger words, the most frequent training tags, model, rank, steps …; empty without metadata."""
    facts = []
    for label, keys in _FACTS:
        value = next((metadata[key] for key in keys if metadata.get(key, "None") not in ("", "None")), None)
        if value is not None:
            facts.append(f"{label} {_short(value)}")
    tags = _tags(metadata.get("ss_tag_frequency", ""))
    if tags:
        facts.append("tags " + ", ".join(f"{_short(tag)} ({count})" for tag, count in tags.most_common(words)))
    return "; ".join(facts)


def _short(text: str) -> str:
    plain = " ".join(text.split())
    return plain if len(plain) <= _LONGEST else plain[: _LONGEST - 1] + "…"


def _tags(text: str) -> Counter[str]:
    """Tags and their counts over all folders of kohya's `ss_tag_frequency`; none when it is not what it should be."""
    try:
        folders = json.loads(text or "{}")
    except json.JSONDecodeError:
        return Counter()
    counts: Counter[str] = Counter()
    for tags in folders.values() if isinstance(folders, dict) else ():
        counts.update({tag.strip(): count for tag, count in tags.items() if isinstance(count, int)} if isinstance(tags, dict) else {})
    return counts


_NAMES = (  # (pattern of names, family), the first that fits counts
    (r"double_blocks[._]\d+[._](img|txt)_attn.*|single_transformer_blocks|transformer_single", "Flux or its like"),
    (r"joint_blocks|context_block", "SD3"), (r"(^|[._])blocks[._]\d+[._](cross|self)_attn", "Wan"),
    (r"transformer_blocks[._]\d+[._](attn[._]add_[qkv]_proj|img_mlp)", "Qwen-Image"),
    (r"(^|[._])layers[._]\d+[._]attention", "Lumina or Z-Image"),
)  # fmt: skip
_CONTEXTS = {768: "SD1.x", 1024: "SD2.x", 2048: "SDXL", 1280: "SDXL's refiner"}


def made_for(state: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """The model family that a LoRA is for, from its metadata, else from names and shapes; empty when neither tells."""
    said = metadata.get("ss_base_model_version") or metadata.get("modelspec.architecture")
    if said:
        return f"{_short(said)} (its metadata)"
    context = _context(state.items())
    if context is not None:
        return f"{_CONTEXTS.get(context, f'a model with a context of {context}')} (its cross-attention)"
    family = next((family for pattern, family in _NAMES if any(re.search(pattern, key) for key in state)), None)
    return f"{family} (its names)" if family else ""


def _context(tensors: Iterable[tuple[str, Tensor]]) -> int | None:
    """Columns of a down matrix of cross-attention's keys: the width of the text encoder that the UNet knows."""
    for key, tensor in tensors:
        if re.search(r"attn2[._](processor[._])?to_k[._].*(lora_down|lora_A|lora\.down|down)", key) and tensor.ndim == 2:
            return tensor.shape[1]
    return None
