"""Videos from files and from tensors (ComfyUI's comfy_api.latest._input_impl). Reading and writing needs PyAV; what is
written is 8-bit H.264 in MP4 or Matroska, and anything else is refused.
"""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import IO, Any

import numpy
import torch

from comfy_api.latest._input import VideoInput
from comfy_api.latest._util import VideoCodec, VideoComponents, VideoContainer


def _refuse(format: str, codec: str, bit_depth: int | None, color_space: str | None) -> None:
    """Raise ValueError for what only a real ComfyUI writes."""
    wrong = None
    if VideoContainer(format) is VideoContainer.WEBM:
        wrong = "WebM"
    elif VideoCodec(codec) is VideoCodec.AV1:
        wrong = "AV1"
    elif bit_depth not in (None, 8):
        wrong = f"{bit_depth} bits"
    elif color_space not in (None, "sRGB"):
        wrong = f"the color space {color_space}"
    if wrong:
        raise ValueError(f"the embedded host writes 8-bit H.264 in MP4 or Matroska, not {wrong}; use a real ComfyUI")


class VideoFromComponents(VideoInput):
    """A video of tensors."""

    def __init__(self, components: VideoComponents, bit_depth: int = 8):
        self.__components = components
        self.__bit_depth = bit_depth

    def get_components(self) -> VideoComponents:
        return self.__components

    def get_bit_depth(self) -> int:
        return self.__bit_depth

    def get_color_space(self) -> str:
        return "sRGB"

    def save_to(
        self,
        path: str | IO[bytes],
        format: VideoContainer = VideoContainer.AUTO,
        codec: VideoCodec = VideoCodec.AUTO,
        metadata: dict | None = None,
        bit_depth: int | None = None,
        crf: float | None = None,
        color_space: str | None = None,
    ) -> None:
        _refuse(format, codec, self.__bit_depth if bit_depth is None else bit_depth, color_space)
        import av

        kind = "matroska" if VideoContainer(format) is VideoContainer.MKV else "mp4"
        with av.open(path, mode="w", format=kind, options=_keep_metadata(kind)) as output:
            for key, value in (metadata or {}).items():
                output.metadata[key] = json.dumps(value)
            pictures = self._add_pictures(output, crf)
            sound = _add_sound(output, self.__components)
            self._write_pictures(output, pictures)
            _write_sound(output, sound, self.__components)

    def _add_pictures(self, output: Any, crf: float | None) -> Any:
        images, rate = self.__components.images, self.__components.frame_rate
        stream = output.add_stream("h264", rate=Fraction(rate).limit_denominator(1000))
        stream.height, stream.width = images.shape[1:3]
        stream.pix_fmt = "yuv420p"
        if crf is not None:
            stream.options = {"crf": str(crf)}
        return stream

    def _write_pictures(self, output: Any, stream: Any) -> None:
        import av

        for image in self.__components.images:
            pixels = (image[..., :3] * 255).clamp(0, 255).to(torch.uint8).cpu().numpy()
            frame = av.VideoFrame.from_ndarray(numpy.ascontiguousarray(pixels), format="rgb24")
            output.mux(stream.encode(frame.reformat(format="yuv420p")))
        output.mux(stream.encode(None))

    def as_trimmed(
        self, start_time: float | None = None, duration: float | None = None, strict_duration: bool = True
    ) -> VideoInput | None:
        start, seconds = start_time or 0.0, duration or 0.0
        if self.get_duration() < start + seconds:
            return None
        return VideoFromFile(self.get_stream_source(), start_time=start, duration=seconds)


def _keep_metadata(kind: str) -> dict[str, str]:
    """MP4 drops keys that it does not know unless it is told to keep them."""
    return {"movflags": "use_metadata_tags"} if kind == "mp4" else {}


def _add_sound(output: Any, components: VideoComponents) -> Any:
    """The output's stream for the sound, or None."""
    if not components.audio:
        return None
    channels = components.audio["waveform"].shape[1]
    layout = {1: "mono", 2: "stereo", 6: "5.1"}.get(channels)
    if layout is None:
        raise ValueError(f"a video has 1, 2 or 6 channels of sound, not {channels}")
    return output.add_stream("aac", rate=int(components.audio["sample_rate"]), layout=layout)


def _write_sound(output: Any, stream: Any, components: VideoComponents) -> None:
    """The first sound of the batch, as long as the pictures."""
    if stream is None:
        return
    import av

    rate = int(components.audio["sample_rate"])
    length = int(-(-components.images.shape[0] * rate // Fraction(components.frame_rate)))
    wave = components.audio["waveform"][0, :, :length].float().cpu().contiguous().numpy()
    frame = av.AudioFrame.from_ndarray(wave, format="fltp", layout=stream.layout.name)
    frame.sample_rate, frame.pts = rate, 0
    output.mux(stream.encode(frame))
    output.mux(stream.encode(None))


class VideoFromFile(VideoInput):
    """A video in a file or in memory, from `start_time` on (counted from the end when negative), `duration` seconds of
    it, or all.
    """

    def __init__(self, file: str | io.BytesIO, *, start_time: float = 0, duration: float = 0):
        self.__file = file
        self.__start_time = start_time
        self.__duration = duration

    def get_stream_source(self) -> str | io.BytesIO:
        if isinstance(self.__file, io.BytesIO):
            self.__file.seek(0)
        return self.__file

    def _open(self) -> Any:
        import av

        return av.open(self.get_stream_source(), mode="r")

    def _whole(self) -> float:
        """Seconds of the whole file."""
        with self._open() as container:
            stream = _pictures_of(container)
            if container.duration:
                return container.duration / 1_000_000
            return float(sum(1 for _ in container.decode(stream)) / _rate(stream))

    def get_active_trim_window(self) -> tuple[float, float]:
        start = self.__start_time
        if start < 0:
            start = max(self._whole() + start, 0.0)
        return float(start), float(self.__duration)

    def get_dimensions(self) -> tuple[int, int]:
        with self._open() as container:
            stream = _pictures_of(container)
            return stream.width, stream.height

    def get_color_space(self) -> str:
        return "sRGB"

    def get_duration(self) -> float:
        start, seconds = self.get_active_trim_window()
        left = max(self._whole() - start, 0.0)
        return min(left, seconds) if seconds else left

    def get_frame_rate(self) -> Fraction:
        with self._open() as container:
            return _rate(_pictures_of(container))

    def get_frame_count(self) -> int:
        with self._open() as container:
            return sum(1 for _ in self._pictures(container))

    def _pictures(self, container: Any) -> Iterator[Any]:
        """The pictures of the part that is meant."""
        start, seconds = self.get_active_trim_window()
        for frame in container.decode(_pictures_of(container)):
            if frame.time < start:
                continue
            if seconds and frame.time >= start + seconds:
                return
            yield frame

    def _sound(self, container: Any) -> dict | None:
        """The sound of the part that is meant."""
        if not container.streams.audio:
            return None
        import av

        stream = container.streams.audio[0]
        resampler = av.AudioResampler(format="fltp")
        pieces = [piece.to_ndarray() for frame in container.decode(stream) for piece in resampler.resample(frame)]
        if not pieces:
            return None
        start, seconds = self.get_active_trim_window()
        rate = stream.sample_rate
        first = int(start * rate)
        last = first + int(seconds * rate) if seconds else None
        wave = numpy.concatenate(pieces, axis=1)[:, first:last]
        return {"waveform": torch.from_numpy(wave.copy())[None], "sample_rate": rate}

    def get_components(self) -> VideoComponents:
        with self._open() as container:
            rate, metadata = _rate(_pictures_of(container)), dict(container.metadata)
            frames = [torch.from_numpy(frame.to_ndarray(format="rgb24")) for frame in self._pictures(container)]
        with self._open() as container:
            audio = self._sound(container)
        images = torch.stack(frames).float() / 255.0 if frames else torch.zeros(0, 0, 0, 3)
        return VideoComponents(images=images, frame_rate=rate, audio=audio, metadata=metadata)

    def save_to(
        self,
        path: str | IO[bytes],
        format: VideoContainer = VideoContainer.AUTO,
        codec: VideoCodec = VideoCodec.AUTO,
        metadata: dict | None = None,
        bit_depth: int | None = None,
        crf: float | None = None,
        color_space: str | None = None,
    ) -> None:
        """Copy the file when nothing about it changes, else write it anew."""
        as_it_is = (VideoContainer(format), VideoCodec(codec)) == (VideoContainer.AUTO, VideoCodec.AUTO)
        asked = metadata or bit_depth or crf or color_space or self.__start_time or self.__duration
        if as_it_is and not asked:
            self._copy(path)
            return
        components = self.get_components()
        tags = {**(components.metadata or {}), **(metadata or {})}
        VideoFromComponents(components).save_to(path, format, codec, tags, bit_depth, crf, color_space)

    def _copy(self, path: str | IO[bytes]) -> None:
        source = self.get_stream_source()
        if isinstance(source, str) and isinstance(path, str):
            if Path(source).resolve() != Path(path).resolve():
                shutil.copyfile(source, path)
            return
        data = Path(source).read_bytes() if isinstance(source, str) else source.getvalue()
        if isinstance(path, str):
            Path(path).write_bytes(data)
        else:
            path.write(data)

    def as_trimmed(
        self, start_time: float | None = None, duration: float | None = None, strict_duration: bool = True
    ) -> VideoInput | None:
        seconds = duration or 0.0
        start = self.__start_time + (start_time or 0.0)
        trimmed = VideoFromFile(self.get_stream_source(), start_time=start, duration=seconds)
        if strict_duration and trimmed.get_duration() < seconds:
            return None
        return trimmed


def _pictures_of(container: Any) -> Any:
    """The file's first stream of pictures."""
    if not container.streams.video:
        raise ValueError(f"{container.name or 'the file'} has no pictures: it is not a video")
    return container.streams.video[0]


def _rate(stream: Any) -> Fraction:
    """Pictures a second; 1 when the file does not say."""
    return Fraction(stream.average_rate or 1)


__all__ = ["VideoFromComponents", "VideoFromFile"]
