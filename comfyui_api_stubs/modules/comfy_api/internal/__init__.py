"""Class surgery behind V3 nodes: finding overrides, cloning and locking node classes for one execution (ComfyUI's
comfy_api.internal).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from comfy_api.internal.api_registry import ComfyAPIBase, ComfyAPIWithVersion, get_all_versions, register_versions


class _ComfyNodeInternal:
    """The root of every V3 node class, whatever version of the API it was written for."""

    @classmethod
    def GET_NODE_INFO_V1(cls) -> dict[str, Any]:
        """What /object_info says of the node."""
        raise NotImplementedError


class _NodeOutputInternal:
    """The root of every V3 node's return value."""


class classproperty:
    """A read-only property of the class itself."""

    def __init__(self, f: Callable[[Any], Any]):
        self.f = f

    def __get__(self, obj: object, owner: type) -> Any:
        return self.f(owner)


def is_class(obj: object) -> bool:
    """Whether `obj` is a class rather than an instance."""
    return isinstance(obj, type)


def prune_dict(d: dict) -> dict:
    """The entries whose value is not None."""
    return {key: value for key, value in d.items() if value is not None}


def as_pruned_dict(dataclass_obj: Any) -> dict:
    """A dataclass's fields that are not None."""
    return prune_dict(asdict(dataclass_obj))


def first_real_override(cls: type, name: str, *, base: type | None = None) -> Callable | None:
    """The method `name` bound to `cls` when a class below `base` defines it, else None.

    `base` defaults to what the class's own GET_BASE_CLASS says: the API class whose methods are placeholders.
    """
    if base is None:
        if not hasattr(cls, "GET_BASE_CLASS"):
            raise ValueError(f"{cls.__name__} has no GET_BASE_CLASS: it is not a V3 node class, so base must be given")
        base = cls.GET_BASE_CLASS()
    placeholder = getattr(base, name, None)
    if placeholder is None:
        return None
    for level in cls.__mro__:
        if level is base:
            return None
        if name not in vars(level):
            continue
        method = getattr(level, name)
        if not hasattr(method, "__func__"):
            raise TypeError(f"{name} of {cls.__name__} is not a class method; write @classmethod above it")
        if method.__func__ is not placeholder.__func__:
            return getattr(cls, name)
    return None


def copy_class(cls: type | None) -> type | None:
    """A subclass of the same name and attributes, so that setting an attribute on it leaves the original alone."""
    if cls is None:
        return None
    body = {key: value for key, value in vars(cls).items() if key not in ("__dict__", "__weakref__")}
    return type(cls.__name__, (cls,), body)


def shallow_clone_class(cls: type, new_name: str | None = None) -> type:
    """A subclass that sees everything of `cls`; what is set on it does not reach `cls`."""
    return type(cls)(new_name or f"{cls.__name__}Clone", (cls,), {})


def lock_class(cls: type) -> type:
    """A subclass of `cls` that refuses to have an attribute set, on itself and on its instances."""

    def refuse_instance(self: object, name: str, value: object) -> None:
        raise AttributeError(f"Cannot set attribute '{name}' on immutable instance of {type(self).__name__}")

    class Locked(type(cls)):  # type: ignore[misc]
        def __setattr__(self, name: str, value: object) -> None:
            raise AttributeError(f"Cannot modify class attribute '{name}' on locked class '{self.__name__}'")

    return Locked(cls.__name__, (cls,), {"__setattr__": refuse_instance})


def make_locked_method_func(type_obj: type, func: str, class_clone: type) -> Callable[..., Any]:
    """The class method `func` of `type_obj` as a function whose `cls` is the locked clone; a coroutine function stays
    one.
    """
    locked = lock_class(class_clone)
    method = getattr(type_obj, func).__func__
    if inspect.iscoroutinefunction(method):

        async def call_async(**inputs: Any) -> Any:
            return await method(locked, **inputs)

        return call_async

    def call(**inputs: Any) -> Any:
        return method(locked, **inputs)

    return call


__all__ = [
    "ComfyAPIBase",
    "ComfyAPIWithVersion",
    "as_pruned_dict",
    "classproperty",
    "copy_class",
    "first_real_override",
    "get_all_versions",
    "is_class",
    "lock_class",
    "make_locked_method_func",
    "prune_dict",
    "register_versions",
    "shallow_clone_class",
]
