"""Types of values on sockets, for annotations and for nodes that make them (ComfyUI's comfy_api.latest._input)."""

from __future__ import annotations

import io
import math
from abc import ABC, abstractmethod
from fractions import Fraction
from typing import IO, Any, TypedDict

import numpy
import torch

from comfy_api.latest._util import VideoCodec, VideoComponents, VideoContainer

ImageInput = torch.Tensor  # (B, H, W, C)
MaskInput = torch.Tensor  # (B, H, W)
CurvePoint = tuple[float, float]


class AudioInput(TypedDict):
    """Sound: waveform (B, C, T) and values a second."""

    waveform: torch.Tensor
    sample_rate: int


class LatentInput(TypedDict):
    """Latents (B, C, H, W), and what is known of them."""

    samples: torch.Tensor
    noise_mask: torch.Tensor | None
    batch_index: list[int] | None


class VideoInput(ABC):
    """A video; what it does not know of itself it reads from its components."""

    @abstractmethod
    def get_components(self) -> VideoComponents:
        """Pictures, sound and pictures a second."""

    @abstractmethod
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
        """Write the video to a file."""

    @abstractmethod
    def as_trimmed(
        self, start_time: float | None = None, duration: float | None = None, strict_duration: bool = False
    ) -> VideoInput | None:
        """The part from `start_time` on, `duration` seconds long; None when there is not that much."""

    def get_stream_source(self) -> str | io.BytesIO:
        """A path, or a file in memory."""
        buffer = io.BytesIO()
        self.save_to(buffer)
        buffer.seek(0)
        return buffer

    def get_active_trim_window(self) -> tuple[float, float]:
        """(start, seconds) of a trimmed video; no seconds mean up to the end."""
        return 0.0, 0.0

    def get_dimensions(self) -> tuple[int, int]:
        """(width, height)."""
        height, width = self.get_components().images.shape[1:3]
        return width, height

    def get_bit_depth(self) -> int:
        """Bits a color."""
        return 8

    def get_color_space(self) -> str:
        """sRGB, HDR, HDR PQ or auto."""
        return "auto"

    def get_duration(self) -> float:
        """Seconds."""
        components = self.get_components()
        return float(components.images.shape[0] / components.frame_rate)

    def get_frame_count(self) -> int:
        """How many pictures."""
        return int(self.get_components().images.shape[0])

    def get_frame_rate(self) -> Fraction:
        """Pictures a second."""
        return self.get_components().frame_rate

    def get_container_format(self) -> str:
        """The file's format, as FFmpeg names it."""
        import av

        with av.open(self.get_stream_source(), mode="r") as container:
            return container.format.name


# --- curves -----------------------------------------------------------------------------------------------------------


class CurveInput(ABC):
    """A curve over 0 to 1."""

    @property
    @abstractmethod
    def points(self) -> list[CurvePoint]:
        """The points that it goes through."""

    @abstractmethod
    def interp(self, x: float) -> float:
        """Its height at `x`."""

    def interp_array(self, xs: numpy.ndarray) -> numpy.ndarray:
        """Its heights at many places."""
        return numpy.array([self.interp(float(x)) for x in xs], dtype=numpy.float64)

    def to_lut(self, size: int = 256) -> numpy.ndarray:
        """A table of its heights at `size` places from 0 to 1."""
        return self.interp_array(numpy.linspace(0.0, 1.0, size))

    @staticmethod
    def from_raw(data: Any) -> CurveInput:
        """A curve from what the widget gives: {"points", "interpolation"}, or the points alone."""
        if isinstance(data, CurveInput):
            return data
        kind = data.get("interpolation", "monotone_cubic") if isinstance(data, dict) else "monotone_cubic"
        points = data["points"] if isinstance(data, dict) else data
        curve = LinearCurve if kind == "linear" else MonotoneCubicCurve
        return curve([(float(x), float(y)) for x, y in points])


class _PointCurve(CurveInput):
    """A curve through points; before the first and after the last it is level, without any it is 0."""

    def __init__(self, control_points: list[CurvePoint]):
        self._points = sorted(((float(x), float(y)) for x, y in control_points), key=lambda point: point[0])
        self._xs = numpy.array([x for x, _ in self._points], dtype=numpy.float64)
        self._ys = numpy.array([y for _, y in self._points], dtype=numpy.float64)

    @property
    def points(self) -> list[CurvePoint]:
        return list(self._points)

    def interp(self, x: float) -> float:
        return float(self.interp_array(numpy.array([x], dtype=numpy.float64))[0])

    def interp_array(self, xs: numpy.ndarray) -> numpy.ndarray:
        """Its heights at many places."""
        places = numpy.asarray(xs, dtype=numpy.float64)
        if len(self._points) < 2:
            return numpy.full_like(places, self._ys[0] if self._points else 0.0)
        return self._between(places)

    @abstractmethod
    def _between(self, xs: numpy.ndarray) -> numpy.ndarray:
        """The heights when there are two points or more."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._points})"


class LinearCurve(_PointCurve):
    """Straight lines from point to point."""

    def _between(self, xs: numpy.ndarray) -> numpy.ndarray:
        return numpy.interp(xs, self._xs, self._ys)


class MonotoneCubicCurve(_PointCurve):
    """A smooth curve that overshoots no point: a cubic Hermite spline with the slopes of Fritsch and Carlson (1980)."""

    def __init__(self, control_points: list[CurvePoint]):
        super().__init__(control_points)
        self._slopes = self._monotone_slopes()

    def _monotone_slopes(self) -> numpy.ndarray:
        widths, rises = numpy.diff(self._xs), numpy.diff(self._ys)
        secants = numpy.divide(rises, widths, out=numpy.zeros_like(rises), where=widths != 0)
        if len(secants) == 0:
            return numpy.zeros(len(self._xs))
        inner = numpy.where(secants[:-1] * secants[1:] > 0, (secants[:-1] + secants[1:]) / 2, 0.0)
        slopes = numpy.concatenate((secants[:1], inner, secants[-1:]))
        for left, secant in enumerate(secants):
            if secant == 0:
                slopes[left : left + 2] = 0.0
                continue
            steepness = math.hypot(*(slopes[left : left + 2] / secant))
            if steepness > 3:
                slopes[left : left + 2] *= 3 / steepness
        return slopes

    def _between(self, xs: numpy.ndarray) -> numpy.ndarray:
        right = numpy.searchsorted(self._xs, xs, side="right").clip(1, len(self._xs) - 1)
        left = right - 1
        width = self._xs[right] - self._xs[left]
        t = numpy.divide(xs - self._xs[left], width, out=numpy.zeros_like(xs), where=width != 0)
        start, end = self._ys[left], self._ys[right]
        bend = t * (1 - t) * width * (self._slopes[left] * (1 - t) - self._slopes[right] * t)
        inside = start + (end - start) * t * t * (3 - 2 * t) + bend
        inside = numpy.where(xs <= self._xs[0], self._ys[0], inside)
        return numpy.where(xs >= self._xs[-1], self._ys[-1], inside)


class RangeInput:
    """From where to where values go, as in a levels dialog; the midpoint, if any, is where half of the output lies."""

    def __init__(self, min_val: float, max_val: float, midpoint: float | None = None):
        self.min_val = min_val
        self.max_val = max_val
        self.midpoint = midpoint

    @staticmethod
    def from_raw(data: Any) -> RangeInput:
        """A range from what the widget gives: {"min", "max", "midpoint"}."""
        if isinstance(data, RangeInput):
            return data
        if not isinstance(data, dict):
            raise TypeError(f"a range is a dict with min and max, not a {type(data).__name__}")
        midpoint = data.get("midpoint")
        middle = None if midpoint is None else float(midpoint)
        return RangeInput(float(data.get("min", 0.0)), float(data.get("max", 1.0)), middle)

    def to_lut(self, size: int = 256) -> numpy.ndarray:
        """A table of what `size` values from 0 to 1 become."""
        values = numpy.linspace(0.0, 1.0, size, dtype=numpy.float64)
        width = self.max_val - self.min_val
        if abs(width) < 1e-10:
            return (values >= self.min_val).astype(numpy.float64)
        levels = numpy.clip((values - self.min_val) / width, 0.0, 1.0)
        if not self.midpoint or self.midpoint < 0:
            return levels
        gamma = max(-math.log2(self.midpoint), 0.001)
        return levels ** (1.0 / gamma)

    def __repr__(self) -> str:
        return f"RangeInput({self.min_val}, {self.max_val}, midpoint={self.midpoint})"


__all__ = [
    "AudioInput",
    "CurveInput",
    "CurvePoint",
    "ImageInput",
    "LatentInput",
    "LinearCurve",
    "MaskInput",
    "MonotoneCubicCurve",
    "RangeInput",
    "VideoInput",
]
