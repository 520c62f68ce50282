"""The newest node API: io (schema), ui, ComfyExtension, and names for input types (ComfyUI's comfy_api.latest)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, TypeAlias

from comfy_api.internal import ComfyAPIBase
from comfy_api.internal.async_to_sync import create_sync_class
from comfy_api.internal.singleton import ProxiedSingleton

from . import _io_public as io
from . import _ui_public as ui
from ._caching import CacheContext, CacheProvider, CacheValue
from ._input import AudioInput, ImageInput, LatentInput, MaskInput, VideoInput
from ._input_impl import VideoFromComponents, VideoFromFile
from ._util import MESH, SPLAT, VOXEL, File3D, VideoCodec, VideoComponents, VideoContainer

IO = io
UI = ui


class ComfyAPI_latest(ComfyAPIBase):
    """What a node may ask of ComfyUI while it runs."""

    VERSION = "latest"
    STABLE = False

    class NodeReplacement(ProxiedSingleton):
        """Nodes that take the place of older ones."""

        async def register(self, node_replace: io.NodeReplace) -> None:
            """Announce a replacement; the server keeps it in `node_replacements`."""
            from server import PromptServer

            PromptServer.instance.node_replacements.append(node_replace)

    class Execution(ProxiedSingleton):
        """The running workflow."""

        async def set_progress(
            self,
            value: float,
            max_value: float,
            node_id: str | None = None,
            preview_image: Any = None,
            ignore_size_limit: bool = False,
        ) -> None:
            """Say that a node, the running one if none is named, did `value` of `max_value`; with a picture (PIL or a
            tensor) as a preview.
            """
            from comfy_execution.progress import get_progress_state
            from comfy_execution.utils import get_executing_context

            running = get_executing_context()
            node = node_id if node_id is not None or running is None else running.node_id
            if node is None:
                raise ValueError("no node is running, so set_progress needs a node_id")
            shown = _preview(preview_image, ignore_size_limit)
            get_progress_state().update_progress(node_id=node, value=value, max_value=max_value, image=shown)

    class Caching(ProxiedSingleton):
        """Caches outside of ComfyUI, which the embedded host does not ask."""

        CacheProvider: TypeAlias = CacheProvider
        CacheContext: TypeAlias = CacheContext
        CacheValue: TypeAlias = CacheValue

        async def register_provider(self, provider: CacheProvider) -> None:
            """Refuse it: results would not be kept where the pack expects them."""
            raise NotImplementedError("the embedded host asks no cache outside of itself; use a real ComfyUI for that")

        async def unregister_provider(self, provider: CacheProvider) -> None:
            """Nothing is registered."""

    def __init__(self) -> None:
        super().__init__()
        self.node_replacement = self.NodeReplacement()
        self.execution = self.Execution()
        self.caching = self.Caching()


def _preview(picture: Any, ignore_size_limit: bool) -> tuple | None:
    """A preview as clients get it: (format, picture, largest side or None)."""
    if picture is None:
        return None
    from comfy.cli_args import args
    from PIL import Image

    if isinstance(picture, ImageInput):
        first = picture[0] if picture.ndim == 4 else picture
        picture = Image.fromarray((first.cpu().float() * 255).clamp(0, 255).byte().numpy())
    return (picture.format or "JPEG", picture, None if ignore_size_limit else args.preview_size)


class ComfyExtension(ABC):
    """What a pack's comfy_entrypoint returns."""

    async def on_load(self) -> None:  # noqa: B027  (optional hook)
        """Called once when the pack is loaded."""

    @abstractmethod
    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        """The pack's node classes."""


class Input:
    """Types of values on sockets, for annotations."""

    Image: TypeAlias = ImageInput
    Audio: TypeAlias = AudioInput
    Mask: TypeAlias = MaskInput
    Latent: TypeAlias = LatentInput
    Video: TypeAlias = VideoInput


class InputImpl:
    """Values that nodes make."""

    VideoFromFile: TypeAlias = VideoFromFile
    VideoFromComponents: TypeAlias = VideoFromComponents


class Types:
    """What those values are made of."""

    VideoCodec: TypeAlias = VideoCodec
    VideoContainer: TypeAlias = VideoContainer
    VideoComponents: TypeAlias = VideoComponents
    MESH: TypeAlias = MESH
    VOXEL: TypeAlias = VOXEL
    SPLAT: TypeAlias = SPLAT
    File3D: TypeAlias = File3D


Caching = ComfyAPI_latest.Caching
ComfyAPI = ComfyAPI_latest
ComfyAPISync = create_sync_class(ComfyAPI_latest)

__all__ = [
    "IO",
    "UI",
    "Caching",
    "ComfyAPI",
    "ComfyAPISync",
    "ComfyExtension",
    "Input",
    "InputImpl",
    "Types",
    "io",
    "ui",
]
