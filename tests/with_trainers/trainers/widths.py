"""Functions that have the width of the real model as a constant, for a tiny one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import CodeType, FunctionType
from typing import Any


def narrowed(function: Callable[..., Any], sizes: Mapping[int, int]) -> Callable[..., Any]:
    """A function with other constants, also in the functions inside it."""
    code = _with_sizes(function.__code__, sizes)
    made = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def _with_sizes(code: CodeType, sizes: Mapping[int, int]) -> CodeType:
    constants = []
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            constants.append(_with_sizes(constant, sizes))
        elif type(constant) is int:
            constants.append(sizes.get(constant, constant))
        else:
            constants.append(constant)
    return code.replace(co_consts=tuple(constants))
