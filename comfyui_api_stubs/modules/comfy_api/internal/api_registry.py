"""The versions of the API (ComfyUI's comfy_api.internal.api_registry)."""

from __future__ import annotations

from typing import NamedTuple

from comfy_api.internal.singleton import ProxiedSingleton


class ComfyAPIBase(ProxiedSingleton):
    """What ComfyAPI of every version derives from."""


class ComfyAPIWithVersion(NamedTuple):
    """A version and its class."""

    version: str
    api_class: type[ComfyAPIBase]


registered_versions: list[ComfyAPIWithVersion] = []


def _order(entry: ComfyAPIWithVersion) -> tuple:
    """Oldest first, "latest" last."""
    if entry.version == "latest":
        return (1,)
    return (0, *(int(number) for number in entry.version.split(".")))


def register_versions(versions: list[ComfyAPIWithVersion]) -> None:
    """Say which versions there are."""
    global registered_versions
    versions.sort(key=_order)
    registered_versions = versions


def get_all_versions() -> list[ComfyAPIWithVersion]:
    """The versions that there are, oldest first."""
    return registered_versions
