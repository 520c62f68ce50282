"""What a V3 node can show in the editor: saved and previewed pictures, and text (ComfyUI's comfy_api.latest.ui)."""

from __future__ import annotations

import json
import os
import uuid
from typing import TYPE_CHECKING, Any

import folder_paths
import torch

from comfy_api.latest._io import ComfyNode, FolderType, _UIOutput

if TYPE_CHECKING:
    from PIL import Image as PILImage
    from PIL.PngImagePlugin import PngInfo


class SavedResult(dict):
    """Where a saved file is: its name, its folder below the folder of `type`."""

    def __init__(self, filename: str, subfolder: str, type: FolderType):
        super().__init__(filename=filename, subfolder=subfolder, type=FolderType(type).value)

    @property
    def filename(self) -> str:
        return self["filename"]

    @property
    def subfolder(self) -> str:
        return self["subfolder"]

    @property
    def type(self) -> FolderType:
        return FolderType(self["type"])


class SavedImages(_UIOutput):
    """Saved pictures."""

    def __init__(self, results: list[SavedResult], is_animated: bool = False):
        self.results = results
        self.is_animated = is_animated

    def as_dict(self) -> dict:
        return {"images": self.results, **({"animated": (True,)} if self.is_animated else {})}


class ImageSaveHelper:
    """Writes pictures into ComfyUI's folders."""

    @staticmethod
    def _convert_tensor_to_pil(image_tensor: torch.Tensor) -> PILImage.Image:
        from PIL import Image

        return Image.fromarray((image_tensor.cpu() * 255.0).clamp(0, 255).to(torch.uint8).numpy())

    @staticmethod
    def _create_png_metadata(cls: type[ComfyNode] | None) -> PngInfo | None:
        from comfy.cli_args import args
        from PIL.PngImagePlugin import PngInfo

        if args.disable_metadata or cls is None or not cls.hidden:
            return None
        info = PngInfo()
        if cls.hidden.prompt:
            info.add_text("prompt", json.dumps(cls.hidden.prompt))
        for key, value in (cls.hidden.extra_pnginfo or {}).items():
            info.add_text(key, json.dumps(value))
        return info

    @staticmethod
    def save_images(
        images: Any,
        filename_prefix: str,
        folder_type: FolderType,
        cls: type[ComfyNode] | None,
        compress_level: int = 4,
    ) -> list[SavedResult]:
        """Write a batch (B, H, W, C) as one PNG a picture; the counter goes on from the files that are there."""
        directory = folder_paths.get_directory_by_type(FolderType(folder_type).value)
        height, width = images[0].shape[:2]
        folder, filename, counter, subfolder, _ = folder_paths.get_save_image_path(
            filename_prefix, directory, width, height
        )
        info, results = ImageSaveHelper._create_png_metadata(cls), []
        for number, image in enumerate(images):
            file = f"{filename.replace('%batch_num%', str(number))}_{counter + number:05}_.png"
            picture = ImageSaveHelper._convert_tensor_to_pil(image)
            picture.save(os.path.join(folder, file), pnginfo=info, compress_level=compress_level)
            results.append(SavedResult(file, subfolder, folder_type))
        return results

    @staticmethod
    def get_save_images_ui(
        images: Any, filename_prefix: str, cls: type[ComfyNode] | None, compress_level: int = 4
    ) -> SavedImages:
        """Save into the output folder; returns what the editor shows."""
        return SavedImages(ImageSaveHelper.save_images(images, filename_prefix, FolderType.output, cls, compress_level))


class PreviewImage(_UIOutput):
    """Pictures (B, H, W, C) shown under the node, written into the temporary folder."""

    def __init__(self, image: Any, animated: bool = False, cls: type[ComfyNode] | None = None, **kwargs: Any):
        prefix = f"ComfyUI_temp_{uuid.uuid4().hex[:5]}"
        self.values = ImageSaveHelper.save_images(image, prefix, FolderType.temp, cls, compress_level=1)
        self.animated = animated

    def as_dict(self) -> dict:
        return {"images": self.values, "animated": (self.animated,)}


class PreviewText(_UIOutput):
    """A text shown under the node."""

    def __init__(self, value: str, **kwargs: Any):
        self.value = value

    def as_dict(self) -> dict:
        return {"text": (self.value,)}
