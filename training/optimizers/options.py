"""What an optimiser's own library can be told beside rate and decay: `betas = 0.9 0.99, eps = 1e-8` (kohya's
optimizer_args).
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

Reader = Callable[[str], Any]


def _number(least: float, most: float = math.inf, open_below: bool = False) -> Reader:
    def read(text: str) -> float:
        value = float(text)
        if not least <= value <= most or (open_below and value == least) or math.isinf(value):
            raise ValueError
        return value

    read.__doc__ = f"a number {'above' if open_below else 'from'} {least:g}" + (
        "" if most == math.inf else f" to {most:g}"
    )
    return read


def _below_one(text: str) -> float:
    """a number from 0, below 1"""
    value = float(text)
    if not 0 <= value < 1:
        raise ValueError
    return value


def _betas(text: str) -> tuple[float, float]:
    """two numbers from 0, below 1, as 0.9 0.99"""
    first, second = map(_below_one, text.split())
    return first, second


def _betas_of_points(text: str) -> tuple[float, float]:
    """two numbers above 0, below 1, as 0.9 0.99"""  # the weights that are sampled are found by a division by the first
    first, second = _betas(text)
    if not first:
        raise ValueError
    return first, second


def _whole(text: str) -> int:
    """a whole number, 1 or more"""
    if int(text) < 1:
        raise ValueError
    return int(text)


def _flag(text: str) -> bool:
    """true or false"""
    return {"true": True, "false": False}[text.lower()]


_EPS = _number(0.0, open_below=True)
_MOMENTUM: dict[str, Reader] = {"momentum": _below_one, "nesterov": _flag}
_ADAM: dict[str, Reader] = {"betas": _betas, "eps": _EPS}

KNOWN: Mapping[str, Mapping[str, Reader]] = {
    "adamw": _ADAM,
    "adamw8bit": _ADAM,
    "adafactor": {"beta2_decay": _number(-10.0, 0.0), "d": _number(1.0)},
    "lion": {"betas": _betas},
    "prodigy": {
        **_ADAM,
        "beta3": _below_one,
        "d0": _EPS,
        "d_coef": _EPS,
        "growth_rate": _number(1.0),
        "decouple": _flag,
        "use_bias_correction": _flag,
        "safeguard_warmup": _flag,
    },
    "schedulefree": {"betas": _betas_of_points, "eps": _EPS, "r": _number(0.0), "weight_lr_power": _number(0.0)},
    "muon": {**_MOMENTUM, "ns_steps": _whole, **_ADAM},  # the last two are of its AdamW, for what is no matrix
    "adacoor": {"eps": _EPS},
    "sgd": _MOMENTUM,
}


def parse(optimizer: str, text: str) -> dict[str, Any]:
    """Options by the names that the library has for them; raises ValueError that lists everything that cannot be read.

    Entries `name = value` have commas or lines between them; two numbers of one value may have a comma between them,
    too.
    """
    known, out, wrong = KNOWN[optimizer], dict[str, Any](), list[str]()
    for name, value in _entries(text, wrong):
        if name not in known:
            near = difflib.get_close_matches(name, list(known), n=1)
            wrong.append(
                f"{optimizer} has no {name!r}"
                + (f", did you mean {near[0]}?" if near else f", only {', '.join(known)}")
            )
            continue
        if name in out:
            wrong.append(f"{name} is given twice")
        try:
            out[name] = known[name](value)
        except (ValueError, KeyError):
            wrong.append(f"{name} is {value!r}, expected {known[name].__doc__}")
    if out.get("nesterov") and out.get("momentum") == 0:
        wrong.append("nesterov needs a momentum above 0")
    if wrong:
        raise ValueError("options: " + "; ".join(wrong))
    return out


def _entries(text: str, wrong: list[str]) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for part in filter(None, (part.strip() for part in re.split(r"[,\n]", text))):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if equals:
            found.append((name, value))
        elif found:
            found[-1] = (found[-1][0], f"{found[-1][1]} {part}")
        else:
            wrong.append(f"{part!r} cannot be read, expected such as betas = 0.9 0.99, eps = 1e-8")
    return found
