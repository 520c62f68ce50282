"""LunNova's configuration (translunar-diffusion): what its `train` and `validation` say, as filters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .yaml_values import shorten, unknown_key

_UNREAD = ("target", "mode")  # its loader's class, and which of the two it is
_FILTERS = "metadata_params"
_PARAMS = ("size", "flip_p")


def as_filters(document: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """The keys of filters in a document with `train`, those of `validation` in a mapping of their own; another document
    is given as it is. Raises ValueError that names what cannot be read.
    """
    if "train" not in document:
        return document
    besides = [str(name)[:80] for name in document if name not in ("train", "validation")]
    if besides:
        raise ValueError(f"{besides[0]} stands beside train: put it into its {_FILTERS}")
    found = _flatten("train", document["train"])
    if "validation" in document:
        found["validation"] = _flatten("validation", document["validation"])
    return found


def _flatten(section: str, value: Any) -> dict[Any, Any]:
    params = value.get("params") if isinstance(value, Mapping) else None
    if not isinstance(params, Mapping):
        raise ValueError(f"{section} is {shorten(value)}, expected params, as in LunNova's configuration")
    filters = params.get(_FILTERS)
    if filters is None:  # flat files
        filters = {}
    if not isinstance(filters, Mapping):
        raise ValueError(f"{section}: {_FILTERS} is {shorten(filters)}, expected lines of the form key: value")
    known = (*_PARAMS, *_UNREAD, _FILTERS)
    for name in params:
        if name not in known:
            raise ValueError(f"{section}: {unknown_key(str(name)[:80], known)}")
    return {**filters, **{name: params[name] for name in _PARAMS if name in params}}
