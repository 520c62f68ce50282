"""What a V3 node can show in the editor: saved and previewed pictures, sounds, videos, 3D models and text (ComfyUI's
comfy_api.latest.ui).
"""

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


class SavedAudios(_UIOutput):
    """Saved sounds."""

    def __init__(self, results: list[SavedResult]):
        self.results = results

    def as_dict(self) -> dict:
        return {"audio": self.results}


_EXIF_MODEL, _EXIF_MAKE = 0x0110, 0x010F


def _directory(folder_type: FolderType) -> Any:
    """The folder that a FolderType names."""
    return folder_paths.get_directory_by_type(FolderType(folder_type).value)


def _workflow_texts(cls: type[ComfyNode] | None) -> dict[str, str] | None:
    """What is stored in files: the prompt and what the page sent along, as JSON; None when nothing is to be."""
    from comfy.cli_args import args

    if args.disable_metadata or cls is None or not cls.hidden:
        return None
    values = dict(cls.hidden.extra_pnginfo or {})
    if cls.hidden.prompt:
        values = {"prompt": cls.hidden.prompt, **values}
    return {key: json.dumps(value) for key, value in values.items()}


class ImageSaveHelper:
    """Writes pictures into ComfyUI's folders."""

    @staticmethod
    def _convert_tensor_to_pil(image_tensor: torch.Tensor) -> PILImage.Image:
        from PIL import Image

        return Image.fromarray((image_tensor.cpu() * 255.0).clamp(0, 255).to(torch.uint8).numpy())

    @staticmethod
    def _create_png_metadata(cls: type[ComfyNode] | None) -> PngInfo | None:
        from PIL.PngImagePlugin import PngInfo

        texts = _workflow_texts(cls)
        if texts is None:
            return None
        info = PngInfo()
        for key, value in texts.items():
            info.add_text(key, value)
        return info

    @staticmethod
    def _create_animated_png_metadata(cls: type[ComfyNode] | None) -> PngInfo | None:
        """The same in a block of ComfyUI's own behind the pictures, where animated files have room for it."""
        from PIL.PngImagePlugin import PngInfo

        texts = _workflow_texts(cls)
        if texts is None:
            return None
        info = PngInfo()
        for key, value in texts.items():
            info.add(b"comf", f"{key}\0{value}".encode("latin-1"), after_idat=True)
        return info

    @staticmethod
    def _create_webp_metadata(pil_image: PILImage.Image, cls: type[ComfyNode] | None) -> PILImage.Exif:
        """The same as "key:text" in EXIF fields: the prompt in the camera's model, the rest from its maker down."""
        exif = pil_image.getexif()
        texts = dict(_workflow_texts(cls) or {})
        if "prompt" in texts:
            exif[_EXIF_MODEL] = f"prompt:{texts.pop('prompt')}"
        for offset, (key, value) in enumerate(texts.items()):
            exif[_EXIF_MAKE - offset] = f"{key}:{value}"
        return exif

    @staticmethod
    def _animated_file(
        images: Any, filename_prefix: str, folder_type: FolderType, ending: str
    ) -> tuple[str, SavedResult, list[PILImage.Image]]:
        """(path, what the editor is told, pictures) of a batch that becomes one file."""
        height, width = images[0].shape[:2]
        folder, filename, counter, subfolder, _ = folder_paths.get_save_image_path(
            filename_prefix, _directory(folder_type), width, height
        )
        file = f"{filename}_{counter:05}_.{ending}"
        pictures = [ImageSaveHelper._convert_tensor_to_pil(image) for image in images]
        return os.path.join(folder, file), SavedResult(file, subfolder, folder_type), pictures

    @staticmethod
    def save_animated_png(
        images: Any,
        filename_prefix: str,
        folder_type: FolderType,
        cls: type[ComfyNode] | None,
        fps: float,
        compress_level: int,
    ) -> SavedResult:
        """Write a batch as one animated PNG."""
        path, saved, (first, *rest) = ImageSaveHelper._animated_file(images, filename_prefix, folder_type, "png")
        first.save(
            path,
            pnginfo=ImageSaveHelper._create_animated_png_metadata(cls),
            compress_level=compress_level,
            save_all=True,
            duration=int(1000.0 / fps),
            append_images=rest,
        )
        return saved

    @staticmethod
    def get_save_animated_png_ui(
        images: Any, filename_prefix: str, cls: type[ComfyNode] | None, fps: float, compress_level: int
    ) -> SavedImages:
        """Save into the output folder; returns what the editor shows."""
        saved = ImageSaveHelper.save_animated_png(images, filename_prefix, FolderType.output, cls, fps, compress_level)
        return SavedImages([saved], is_animated=len(images) > 1)

    @staticmethod
    def save_animated_webp(
        images: Any,
        filename_prefix: str,
        folder_type: FolderType,
        cls: type[ComfyNode] | None,
        fps: float,
        lossless: bool,
        quality: int,
        method: int,
    ) -> SavedResult:
        """Write a batch as one animated WebP."""
        path, saved, (first, *rest) = ImageSaveHelper._animated_file(images, filename_prefix, folder_type, "webp")
        first.save(
            path,
            save_all=True,
            duration=int(1000.0 / fps),
            append_images=rest,
            exif=ImageSaveHelper._create_webp_metadata(first, cls),
            lossless=lossless,
            quality=quality,
            method=method,
        )
        return saved

    @staticmethod
    def get_save_animated_webp_ui(
        images: Any,
        filename_prefix: str,
        cls: type[ComfyNode] | None,
        fps: float,
        lossless: bool,
        quality: int,
        method: int,
    ) -> SavedImages:
        """Save into the output folder; returns what the editor shows."""
        saved = ImageSaveHelper.save_animated_webp(
            images, filename_prefix, FolderType.output, cls, fps, lossless, quality, method
        )
        return SavedImages([saved], is_animated=len(images) > 1)

    @staticmethod
    def save_images(
        images: Any,
        filename_prefix: str,
        folder_type: FolderType,
        cls: type[ComfyNode] | None,
        compress_level: int = 4,
    ) -> list[SavedResult]:
        """Write a batch (B, H, W, C) as one PNG a picture; the counter goes on from the files that are there."""
        height, width = images[0].shape[:2]
        folder, filename, counter, subfolder, _ = folder_paths.get_save_image_path(
            filename_prefix, _directory(folder_type), width, height
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


class PreviewMask(PreviewImage):
    """Masks (B, H, W) shown under the node, as gray pictures."""

    def __init__(self, mask: Any, animated: bool = False, cls: type[ComfyNode] | None = None, **kwargs: Any):
        height, width = mask.shape[-2:]
        super().__init__(mask.reshape(-1, height, width, 1).expand(-1, -1, -1, 3), animated, cls, **kwargs)


class AudioSaveHelper:
    """Writes sounds into ComfyUI's folders; needs PyAV."""

    _CODECS = {"flac": "flac", "mp3": "libmp3lame", "opus": "libopus"}  # noqa: RUF012
    _OPUS_RATES = (8000, 12000, 16000, 24000, 48000)

    @staticmethod
    def save_audio(
        audio: dict,
        filename_prefix: str,
        folder_type: FolderType,
        cls: type[ComfyNode] | None,
        format: str = "flac",
        quality: str = "128k",
    ) -> list[SavedResult]:
        """Write each sound of a batch as a file; `quality` is kilobits a second, such as 128k, or V0 for MP3."""
        if format not in AudioSaveHelper._CODECS:
            raise ValueError(f"Unsupported audio format: {format!r}; it must be flac, mp3 or opus")
        folder, filename, counter, subfolder, _ = folder_paths.get_save_image_path(
            filename_prefix, _directory(folder_type)
        )
        results = []
        for number, waveform in enumerate(audio["waveform"].cpu()):
            file = f"{filename.replace('%batch_num%', str(number))}_{counter + number:05}.{format}"
            path = os.path.join(folder, file)
            AudioSaveHelper._write(path, waveform, audio["sample_rate"], format, quality, _workflow_texts(cls))
            results.append(SavedResult(file, subfolder, folder_type))
        return results

    @staticmethod
    def _write(path: str, waveform: Any, rate: int, format: str, quality: str, texts: dict[str, str] | None) -> None:
        """Write one sound (C, T)."""
        import av

        layout = "mono" if waveform.shape[0] == 1 else "stereo"
        with av.open(path, mode="w", format=format) as output:
            output.metadata.update(texts or {})
            written = AudioSaveHelper._rate(rate, format)
            stream = output.add_stream(AudioSaveHelper._CODECS[format], rate=written, layout=layout)
            assert isinstance(stream, av.AudioStream)
            if format != "flac":
                AudioSaveHelper._set_quality(stream, quality)
            samples = waveform.movedim(0, 1).reshape(1, -1).float().contiguous().numpy()
            frame = av.AudioFrame.from_ndarray(samples, format="flt", layout=layout)
            frame.sample_rate, frame.pts = rate, 0
            resampler = av.AudioResampler(format=stream.format, layout=layout, rate=written)
            for piece in (*resampler.resample(frame), *resampler.resample(None)):
                output.mux(stream.encode(piece))
            output.mux(stream.encode(None))

    @staticmethod
    def _rate(rate: int, format: str) -> int:
        """The rate that is written: Opus knows five, and the next higher one loses nothing."""
        if format != "opus":
            return rate
        return next((known for known in AudioSaveHelper._OPUS_RATES if known >= rate), AudioSaveHelper._OPUS_RATES[-1])

    @staticmethod
    def _set_quality(stream: Any, quality: str) -> None:
        if quality == "V0":
            stream.codec_context.qscale = True
        else:
            stream.bit_rate = int(quality.removesuffix("k")) * 1000

    @staticmethod
    def get_save_audio_ui(
        audio: dict, filename_prefix: str, cls: type[ComfyNode] | None, format: str = "flac", quality: str = "128k"
    ) -> SavedAudios:
        """Save into the output folder; returns what the editor shows."""
        saved = AudioSaveHelper.save_audio(audio, filename_prefix, FolderType.output, cls, format, quality)
        return SavedAudios(saved)


class PreviewAudio(_UIOutput):
    """Sounds played under the node, written into the temporary folder."""

    def __init__(self, audio: dict, cls: type[ComfyNode] | None = None, **kwargs: Any):
        prefix = f"ComfyUI_temp_{uuid.uuid4().hex[:5]}"
        self.values = AudioSaveHelper.save_audio(audio, prefix, FolderType.temp, cls)

    def as_dict(self) -> dict:
        return {"audio": self.values}


class PreviewVideo(_UIOutput):
    """Videos, saved already, played under the node."""

    def __init__(self, values: list[SavedResult | dict], **kwargs: Any):
        self.values = values

    def as_dict(self) -> dict:
        return {"images": self.values, "animated": (True,)}


class PreviewUI3D(_UIOutput):
    """A 3D model shown under the node, with a picture behind it when there is `bg_image`."""

    def __init__(self, model_file: Any, camera_info: Any, **kwargs: Any):
        self.model_file = model_file
        self.camera_info = camera_info
        self.bg_image_path: str | None = None
        background = kwargs.get("bg_image")
        if background is not None:
            name = f"bg_{uuid.uuid4().hex}.png"
            picture = ImageSaveHelper._convert_tensor_to_pil(background[0])
            picture.save(os.path.join(folder_paths.get_temp_directory(), name), compress_level=1)
            self.bg_image_path = f"temp/{name}"

    def as_dict(self) -> dict:
        return {"result": [self.model_file, self.camera_info, self.bg_image_path]}


class PreviewUI3DAdvanced(_UIOutput):
    """A 3D model shown under the node, with where the models of the view stand."""

    def __init__(self, model_file: Any, camera_info: Any, model_3d_info: Any):
        self.model_file = model_file
        self.camera_info = camera_info
        self.model_3d_info = model_3d_info

    def as_dict(self) -> dict:
        return {"result": [self.model_file, self.camera_info, self.model_3d_info]}


class PreviewText(_UIOutput):
    """A text shown under the node."""

    def __init__(self, value: str, **kwargs: Any):
        self.value = value

    def as_dict(self) -> dict:
        return {"text": (self.value,)}


__all__ = [
    "AudioSaveHelper",
    "ImageSaveHelper",
    "PreviewAudio",
    "PreviewImage",
    "PreviewMask",
    "PreviewText",
    "PreviewUI3D",
    "PreviewUI3DAdvanced",
    "PreviewVideo",
    "SavedAudios",
    "SavedImages",
    "SavedResult",
]
