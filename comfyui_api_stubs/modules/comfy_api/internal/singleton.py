"""Classes of which there is one instance (ComfyUI's comfy_api.internal.singleton)."""

from __future__ import annotations

from typing import Any


class SingletonMetaclass(type):
    """Calling such a class gives its one instance."""

    _instances: dict[type, Any] = {}  # noqa: RUF012  (one table for all classes)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls.get_instance(*args, **kwargs)

    def inject_instance(cls, instance: Any) -> None:
        """Make this the instance, before there is one."""
        if cls in SingletonMetaclass._instances:
            raise AssertionError(f"{cls.__name__} has an instance already")
        SingletonMetaclass._instances[cls] = instance

    def get_instance(cls, *args: Any, **kwargs: Any) -> Any:
        """The instance, made now if there is none."""
        if cls not in SingletonMetaclass._instances:
            SingletonMetaclass._instances[cls] = super().__call__(*args, **kwargs)
        return SingletonMetaclass._instances[cls]


class ProxiedSingleton(metaclass=SingletonMetaclass):
    """A class of which there is one instance."""
