"""Readers of optimizer options: turn text such as `0.9 0.99` into the value that the optimizer's library takes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class OptionReader:
    """How one optimizer option is read.

    `read` turns text into a value and raises ValueError or KeyError if it cannot; `expected` says in words what it
    takes.
    """

    expected: str
    read: Callable[[str], Any]


def number(least: float, most: float = math.inf, open_below: bool = False) -> OptionReader:
    """A reader of a finite number.

    Args:
        least: the smallest number allowed.
        most: the largest number allowed.
        open_below: whether the number must be above `least`.
    """

    def read(text: str) -> float:
        value = float(text)
        if not least <= value <= most or (open_below and value == least) or math.isinf(value):
            raise ValueError
        return value

    expected = f"a number above {least:g}" if open_below else f"a number from {least:g}"
    if most != math.inf:
        expected += f" to {most:g}"
    return OptionReader(expected, read)


def _below_one(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1:
        raise ValueError
    return value


def _betas(text: str) -> tuple[float, float]:
    first, second = map(_below_one, text.split())
    return first, second


def _positive_betas(text: str) -> tuple[float, float]:
    first, second = _betas(text)
    if not first:
        raise ValueError
    return first, second


def _three_betas(text: str) -> tuple[float, float, float]:
    first, second, third = map(_below_one, text.split())
    return first, second, third


def _count(text: str) -> int:
    if int(text) < 1:
        raise ValueError
    return int(text)


def _flag(text: str) -> bool:
    return {"true": True, "false": False}[text.lower()]


BELOW_ONE = OptionReader("a number from 0, below 1", _below_one)
BETAS = OptionReader("two numbers from 0, below 1, as 0.9 0.99", _betas)
POSITIVE_BETAS = OptionReader("two numbers above 0, below 1, as 0.9 0.99", _positive_betas)
THREE_BETAS = OptionReader("three numbers from 0, below 1, as 0.9 0.999 0.9999", _three_betas)
COUNT = OptionReader("a whole number, 1 or more", _count)
FLAG = OptionReader("true or false", _flag)
ABOVE_ZERO = number(0.0, open_below=True)
