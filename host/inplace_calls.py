"""Which variables of a function a call in place may be taken apart for: `x.add_(y)` as `x = x + y`."""

from __future__ import annotations

import ctypes
import dis
import inspect
import re
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any

import torch

# An instruction of newer Pythons may do two of these, as LOAD_FAST_LOAD_FAST does.
_ACCESS = re.compile("(LOAD|STORE|DELETE)_(?:FAST|DEREF|CLOSURE|NAME)")
_LEAVES = ("RETURN", "RAISE", "RERAISE")  # what begins so ends the function
_JUMPS_ALWAYS = ("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_ABSOLUTE", "JUMP_BACKWARD_NO_INTERRUPT")

_PLAIN = (torch.Tensor, torch.nn.Parameter)


@lru_cache(maxsize=1024)
def changes_values_of_self(func: Callable[..., Any]) -> bool:
    """Whether a tensor's method changes its values in place, as add_ and copy_ do, and not only its shape."""
    name = getattr(func, "__name__", "")
    if not name.endswith("_") or name.endswith("__") or getattr(torch.Tensor, name, None) is not func:
        return False
    operator = getattr(torch.ops.aten, name, None)
    if operator is None:
        return False
    overloads = [getattr(operator, overload) for overload in operator.overloads()]
    return any(_writes_self(overload) for overload in overloads)


def _writes_self(overload: Any) -> bool:
    first = overload._schema.arguments[0].alias_info
    return first is not None and first.is_write and torch.Tag.inplace_view not in overload.tags


def rebindable_variables(frame: FrameType, target: torch.Tensor) -> list[str]:
    """The variables of a function that hold `target`, when a new tensor in them has the same effect as the change of
    `target` that the function calls for at this point.

    There are none when the target has no name (`x[:, :4].add_(y)`), when the function reads it no more, so that the
    change is meant for others, or when it reads another tensor of the same memory later.
    """
    if frame.f_code.co_name == "__torch_function__":  # another mode, which passes the call on
        return []
    variables = _variables(frame)
    names = [name for name, value in variables.items() if value is target]
    later = _read_after(frame.f_code, frame.f_lasti)
    unused = result_is_unused(frame)
    if unused and later.isdisjoint(names):
        return []
    others = [value for name, value in variables.items() if name in later and value is not target]
    if any(_shares_memory(value, target) for value in others):
        return []
    return names


def rebind(frame: FrameType, names: Iterable[str], value: torch.Tensor) -> None:
    """Let variables of a running function hold `value`."""
    variables = frame.f_locals
    for name in names:
        variables[name] = value
    if sys.version_info < (3, 13):  # since then f_locals writes through (PEP 667)
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))
        _forget_snapshot(frame)


def _variables(frame: FrameType) -> dict[str, Any]:
    variables = dict(frame.f_locals)
    _forget_snapshot(frame)
    return variables


def _forget_snapshot(frame: FrameType) -> None:
    """Before Python 3.13 a frame keeps what `f_locals` saw, and would hold those tensors until its function ends."""
    if sys.version_info < (3, 13) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        frame.f_locals.clear()


def _shares_memory(value: Any, target: torch.Tensor) -> bool:
    """Whether a value is a tensor in the memory of `target`, or a list, tuple or dictionary with one or with itself."""
    if isinstance(value, dict):
        return any(_same_memory(item, target) for item in value.values())
    if isinstance(value, list | tuple):
        return any(_same_memory(item, target) for item in value)
    return _same_memory(value, target)


def _same_memory(value: Any, target: torch.Tensor) -> bool:
    if type(value) not in _PLAIN or type(target) not in _PLAIN:
        return False
    return value.device == target.device and value.untyped_storage().data_ptr() == target.untyped_storage().data_ptr()


def result_is_unused(frame: FrameType) -> bool:
    """Whether nobody uses the result of the call that a function is at."""
    following = _following_instructions(frame.f_code, frame.f_lasti)
    return bool(following) and following[0].opname == "POP_TOP"


def _following_instructions(code: CodeType, offset: int) -> list[dis.Instruction]:
    """The instructions behind the one at `offset`, which may lie in that one's cache (Python 3.11 and 3.12)."""
    instructions = _instructions(code)
    return instructions[bisect_right(instructions, offset, key=_offset) :]


@lru_cache(maxsize=1024)
def _instructions(code: CodeType) -> list[dis.Instruction]:
    return list(dis.get_instructions(code))


def _offset(instruction: dis.Instruction) -> int:
    return instruction.offset


@lru_cache(maxsize=4096)
def _read_after(code: CodeType, offset: int) -> frozenset[str]:
    """The variables that a function may read after the instruction at `offset`, before they are assigned anew.

    Those that inner functions share count too.
    """
    instructions = _instructions(code)
    start = len(instructions) - len(_following_instructions(code, offset))
    places = {instruction.offset: index for index, instruction in enumerate(instructions)}
    names = {*code.co_varnames, *code.co_freevars}
    if not code.co_flags & inspect.CO_OPTIMIZED:  # no function, but a module or a class
        names |= {*code.co_names}
    found = {name for name in names if _is_read(instructions, places, start, name)}
    return frozenset(found | {*code.co_cellvars})


def _is_read(instructions: list[dis.Instruction], places: dict[int, int], start: int, name: str) -> bool:
    """Whether any way through the function from instruction `start` reads a variable before it is assigned."""
    waiting, seen = [start], set[int]()
    while waiting:
        index = waiting.pop()
        if index in seen or index >= len(instructions):
            continue
        seen.add(index)
        instruction = instructions[index]
        access = _first_access(instruction, name)
        if access == "LOAD":
            return True
        if access is not None:
            continue
        waiting.extend(_following(instruction, index, places))
    return False


def _following(instruction: dis.Instruction, index: int, places: dict[int, int]) -> list[int]:
    following = []
    if instruction.opcode in dis.hasjrel or instruction.opcode in dis.hasjabs:
        following.append(places[instruction.argval])
    if not instruction.opname.startswith(_LEAVES) and instruction.opname not in _JUMPS_ALWAYS:
        following.append(index + 1)
    return following


def _first_access(instruction: dis.Instruction, name: str) -> str | None:
    """What an instruction does first with a variable: LOAD, STORE, DELETE or None."""
    kinds = _ACCESS.findall(instruction.opname)
    names = instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
    for kind, accessed in zip(kinds, names, strict=False):
        if accessed == name:
            return str(kind)
    return None
