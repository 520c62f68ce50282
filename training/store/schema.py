"""The form of a state.json: what each of its entries must be, checked before anything of it is used."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

Check = Callable[[Any], bool]


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _digest(value: Any) -> bool:
    return _text(value) and re.fullmatch(r"[0-9a-f]{64}", value) is not None


def _count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**64


def _number(value: Any) -> bool:
    return isinstance(value, float) or (type(value) is int and abs(value) < 2**64)


def _flag(value: Any) -> bool:
    return isinstance(value, bool)


def _list_of(check: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(check, value))


def _pair(first: Check, second: Check) -> Check:
    return lambda value: isinstance(value, list) and len(value) == 2 and first(value[0]) and second(value[1])


def _map_of(check: Check) -> Check:
    return lambda value: isinstance(value, dict) and all(map(check, value.values()))


def _object(**entries: Check) -> Check:
    return lambda value: (
        isinstance(value, dict) and all(name in value and check(value[name]) for name, check in entries.items())
    )


def _anything(value: Any) -> bool:
    return True


def _beside(value: Any) -> bool:
    """The name of a safetensors file in the same folder."""
    return _plain(value) and value.endswith((".safetensors", ".safetensors.index.json"))


def _plain(value: Any) -> bool:
    """A name of the form that Graft gives files: it cannot lead to another folder on any system."""
    return isinstance(value, str) and re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}", value) is not None


def _block(value: Any) -> bool:
    """The name of a block of history."""
    return isinstance(value, str) and re.fullmatch(r"[0-9a-f]{64}\.json", value) is not None


def _tensors(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    if "files" in value:
        return _plain(value.get("name")) and _map_of(_text)(value["files"]) and all(map(_beside, value["files"]))
    if "parts" in value:
        return bool(value["parts"]) and _list_of(_object(file=_beside, sha256=_text))(value["parts"])
    return _beside(value.get("file")) and _text(value.get("sha256"))


def block_of_history(value: Any) -> bool:
    """Whether a value is the measurements of some steps. Without a running average there is no `average_validation`,
    without preference pairs no `accuracy`.
    """
    optional = ("average_validation", "accuracy")
    return _object(**_MEASURED)(value) and all(_validations(value.get(name, [])) for name in optional)


def _history(value: Any) -> bool:
    return block_of_history(value) and _object(blocks=_list_of(_block))(value) and _count(value.get("outdated", 0))


def _begun_from(value: Any) -> bool:
    """Without a training-only LoRA there is no `training_only`, without trained words no `words`; a run that denoises
    has no `task`, and only kinds of training with settings have `task_settings`.
    """
    form = _object(
        model=_text,
        dataset=_text,
        adapter=_map_of(_anything),
        ema=lambda ema: ema is None or isinstance(ema, dict),
        seed=_count,
    )
    if not form(value) or not all(_text(value.get(name, "")) for name in ("training_only", "task")):
        return False
    return all(isinstance(value.get(name, {}), dict) for name in ("words", "task_settings"))


_validations = _list_of(_pair(_count, _number))
_MEASURED = {name: _list_of(_number) for name in ("loss", "rate", "norm")} | {"validation": _validations}
_FORM: dict[str, Check] = {
    "key": _digest,
    "start": _digest,
    "step": _count,
    "order": _list_of(_text),
    "position": _list_of(_pair(_text, _count)),
    "begun_from": _begun_from,
    "settings": _object(optimizer=_map_of(_anything), objective=_map_of(_anything)),
    "effort": _object(seconds=_number, memory=_count),
    "versions": _map_of(_text),
    "history": _history,
    "kind": _text,
    "tensors": _tensors,
}
_OPTIONAL: dict[str, Check] = {
    "taken": _list_of(_pair(_count, _map_of(lambda value: _text(value) or _number(value)))),
    "clip_skip": _count,
    # of a saved state
    "run": _text,
    "notes": _map_of(_text),
    "open_schedule": _flag,
}


def problem(record: Mapping[str, Any]) -> str:
    """What is wrong with the entries of a state.json, or ""."""
    names = [name for name, check in _FORM.items() if name not in record or not check(record[name])]
    names += [name for name, check in _OPTIONAL.items() if name in record and not check(record[name])]
    if names:
        return f"these entries are missing or of another form: {', '.join(names)}"
    steps = sum(count for _, count in record["position"])
    if steps == record["step"]:
        return ""
    return f"its position is of {steps} steps, its step is {record['step']}"
