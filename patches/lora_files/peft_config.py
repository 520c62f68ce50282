"""PEFT's settings of a LoRA (scales, form of a rotation), from the file's header or `adapter_config.json` beside it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

BESIDE = "adapter_config"  # key of the metadata under which a PEFT folder's adapter_config.json is kept
_HEADER = (
    "lora_adapter_metadata"  # diffusers' key in the header: the same settings, with a prefix per part of the model
)


@dataclass(frozen=True)
class PeftConfig:
    """PEFT's settings for one part of a model (`part`: "transformer", "unet", "text_encoder" …; "" for all)."""

    part: str = ""
    rank: int | None = None
    alpha: float | None = None
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    rslora: bool = False
    terms: int = 5
    limit: float | None = None
    feedforward: tuple[str, ...] | None = None

    def scales_inputs(self, layer: str) -> bool | None:
        """Whether an IA3 layer scales its input instead of its output; None if the settings do not say."""
        return None if self.feedforward is None else layer.endswith(self.feedforward)

    def scale(self, layer: str, rank: int | None = None) -> float | None:
        """PEFT's scale of a layer: alpha / rank, or alpha / root of the rank for rsLoRA; None if the settings do not
        say.
        """
        layer = layer.removeprefix("base_model.model.").removeprefix(f"{self.part}." if self.part else "")
        alpha = _find_match(self.alpha_pattern, layer, self.alpha)
        divisor = _find_match(self.rank_pattern, layer, self.rank) or rank
        if alpha is None or not divisor:
            return None
        return float(alpha) / (divisor**0.5 if self.rslora else divisor)


def peft_configs(metadata: Mapping[str, str]) -> tuple[PeftConfig, ...]:
    """PEFT's settings in a file's metadata, the most specific part first.

    Raises ValueError if they exist but are not a JSON object.
    """
    configs: list[PeftConfig] = []
    for key, place in ((_HEADER, f"its metadata {_HEADER}"), (BESIDE, f"{BESIDE}.json beside it")):
        if metadata.get(key):
            expected = "expected a JSON object with the scales of its layers"
            again = "without them its strength is unknown: save or download it again"
            try:
                content = json.loads(metadata[key])
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{place}: not JSON ({error}), {expected}; {again}") from error
            if not isinstance(content, dict):
                raise ValueError(f"{place}: {expected}, got {metadata[key][:80]!r}; {again}")
            parts = {name.rpartition(".")[0] for name in content} if key == _HEADER else {""}
            configs += [
                _config(part, {name.removeprefix(f"{part}."): value for name, value in content.items()})
                for part in parts
            ]
    return tuple(sorted(configs, key=lambda config: -len(config.part)))


def config_for(configs: tuple[PeftConfig, ...], layer: str) -> PeftConfig | None:
    """The settings that apply to a layer's name in the file, or None."""
    return next((config for config in configs if not config.part or layer.startswith(f"{config.part}.")), None)


def _config(part: str, content: Mapping[str, Any]) -> PeftConfig:
    alpha, rank = content.get("lora_alpha", content.get("alpha")), content.get("r")
    coft, eps = content.get("coft"), content.get("eps", 6e-5)
    terms = content.get("num_cayley_neumann_terms") or 5
    if not _is_count(terms) or terms > _MOST_TERMS:
        raise ValueError(f"num_cayley_neumann_terms is {str(terms)[:40]}, expected a whole number up to {_MOST_TERMS}")
    return PeftConfig(
        part=part,
        rank=rank if _is_count(rank) else None,
        alpha=float(alpha) if _is_number(alpha) else None,
        rank_pattern=_patterns(content, "rank_pattern", _is_count),
        alpha_pattern=_patterns(content, "alpha_pattern", _is_number),
        rslora=content.get("use_rslora") is True,
        terms=0 if content.get("use_cayley_neumann") is False else terms,
        limit=float(eps) if coft is True and _is_number(eps) else None,
        feedforward=_names(content.get("feedforward_modules")),
    )


_MOST_TERMS = 1000


def _is_count(value: object) -> bool:
    return type(value) is int and 0 < value < 2**31


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e30


def _names(value: object) -> tuple[str, ...] | None:
    """The layer-name endings in a list, or None if there is no such list."""
    if isinstance(value, list) and all(isinstance(name, str) for name in value):
        return tuple(value)
    return None


def _patterns(content: Mapping[str, Any], name: str, check: Callable[[Any], bool]) -> dict[str, Any]:
    """Read {pattern: value}.

    Raises ValueError for an invalid pattern, or one that could keep the regex engine busy for hours (`(a+)+`).
    """
    patterns = content.get(name) or {}
    if not isinstance(patterns, Mapping):
        raise ValueError(f"{name}: expected an object, got {str(patterns)[:80]}")
    for pattern in patterns:
        try:
            re.compile(pattern)
            slow = len(pattern) > 1000 or len(re.findall(r"[*+{]", pattern)) > 2 or re.search(r"\)[*+{]", pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"{name}: {pattern[:80]!r} is not a pattern ({error})") from error
        if slow:
            raise ValueError(f"{name}: {pattern[:80]!r} is too complicated a pattern; expected names of layers")
    return {pattern: value for pattern, value in patterns.items() if check(value)}


def _find_match(patterns: Mapping[str, Any], layer: str, otherwise: Any) -> Any:
    """The value of the first pattern that matches the end of a module's name, as PEFT matches them.

    After `^` a pattern has to match the whole name.
    """
    return next((value for pattern, value in patterns.items() if re.match(rf"(.*\.)?({pattern})$", layer)), otherwise)
