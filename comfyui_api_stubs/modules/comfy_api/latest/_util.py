"""Values that travel between nodes: video, drawings and 3D shapes (ComfyUI's comfy_api.latest._util)."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from io import BytesIO
from pathlib import Path
from typing import IO, Any

import torch


class _Choices(str, Enum):
    """Text values that a combo offers."""

    @classmethod
    def as_input(cls) -> list[str]:
        """The choices of a combo."""
        return [member.value for member in cls]


class VideoCodec(_Choices):
    """How pictures of a video are compressed."""

    AUTO = "auto"
    H264 = "h264"
    AV1 = "av1"


class VideoContainer(_Choices):
    """The format of a video file."""

    AUTO = "auto"
    MP4 = "mp4"
    MKV = "mkv"
    WEBM = "webm"

    @classmethod
    def get_extension(cls, value: str) -> str:
        """The file name's ending, without a dot."""
        container = cls(value)
        return "mp4" if container is cls.AUTO else container.value


@dataclass
class VideoComponents:
    """A video taken apart: pictures (B, H, W, C), pictures a second, and what else there is."""

    images: torch.Tensor
    frame_rate: Fraction
    audio: Any = None
    metadata: dict | None = None
    alpha: torch.Tensor | None = None


class SVG:
    """Vector drawings, each the bytes of a file."""

    def __init__(self, data: list[BytesIO]):
        self.data = data

    def combine(self, other: SVG) -> SVG:
        """These drawings and the other's."""
        return SVG.combine_all([self, other])

    @staticmethod
    def combine_all(svgs: list[SVG]) -> SVG:
        """The drawings of all."""
        return SVG([drawing for svg in svgs for drawing in svg.data])


class VOXEL:
    """A block of small cubes."""

    def __init__(self, data: torch.Tensor, voxel_colors: torch.Tensor | None = None, resolution: int | None = None):
        self.data = data
        self.voxel_colors = voxel_colors
        self.resolution = resolution


class SPLAT:
    """Gaussian splats, N in each of B shapes: positions (B, N, 3), scales (B, N, 3), rotations as quaternions
    (B, N, 4), opacities (B, N, 1), colors as spherical harmonics (B, N, K, 3). With `counts` (B,) the rest of a row
    is padding.
    """

    def __init__(
        self,
        positions: torch.Tensor,
        scales: torch.Tensor,
        rotations: torch.Tensor,
        opacities: torch.Tensor,
        sh: torch.Tensor,
        counts: torch.Tensor | None = None,
    ):
        self.positions = positions
        self.scales = scales
        self.rotations = rotations
        self.opacities = opacities
        self.sh = sh
        self.counts = counts


class MESH:
    """Triangles: vertices (B, N, 3), faces (B, M, 3), and what a material needs. With `vertex_counts` and
    `face_counts` (B,) the rest of a row is padding.
    """

    def __init__(
        self,
        vertices: torch.Tensor,
        faces: torch.Tensor,
        uvs: torch.Tensor | None = None,
        vertex_colors: torch.Tensor | None = None,
        texture: torch.Tensor | None = None,
        metallic_roughness: torch.Tensor | None = None,
        vertex_counts: torch.Tensor | None = None,
        face_counts: torch.Tensor | None = None,
        unlit: bool = False,
        normals: torch.Tensor | None = None,
        tangents: torch.Tensor | None = None,
        normal_map: torch.Tensor | None = None,
        occlusion_in_mr: bool = False,
        material: dict | None = None,
        emissive: torch.Tensor | None = None,
    ):
        if (vertex_counts is None) != (face_counts is None):
            raise ValueError("vertex_counts and face_counts go together: give both or neither")
        self.vertices = vertices
        self.faces = faces
        self.uvs = uvs
        self.vertex_colors = vertex_colors
        self.texture = texture
        self.metallic_roughness = metallic_roughness
        self.vertex_counts = vertex_counts
        self.face_counts = face_counts
        self.unlit = unlit
        self.normals = normals
        self.tangents = tangents
        self.normal_map = normal_map
        self.occlusion_in_mr = occlusion_in_mr
        self.material = material
        self.emissive = emissive


class File3D:
    """A 3D file, on disk or in memory; `format` is its ending without a dot."""

    def __init__(self, source: str | IO[bytes], file_format: str = ""):
        self._source = source
        if not file_format and isinstance(source, str):
            file_format = Path(source).suffix.lstrip(".").lower()
        self._format = file_format

    @property
    def format(self) -> str:
        return self._format

    @format.setter
    def format(self, value: str) -> None:
        self._format = (value or "").lstrip(".").lower()

    @property
    def is_disk_backed(self) -> bool:
        return isinstance(self._source, str)

    def get_source(self) -> str | IO[bytes]:
        """The path, or the stream from its beginning."""
        if not isinstance(self._source, str):
            self._source.seek(0)
        return self._source

    def get_bytes(self) -> bytes:
        """The whole file."""
        source = self.get_source()
        return Path(source).read_bytes() if isinstance(source, str) else source.read()

    def get_data(self) -> BytesIO:
        """The whole file, as a stream."""
        source = self.get_source()
        return source if isinstance(source, BytesIO) else BytesIO(self.get_bytes())

    def save_to(self, path: str) -> str:
        """Write the file to a path, making its folder; returns the path."""
        target, source = Path(path), self.get_source()
        target.parent.mkdir(parents=True, exist_ok=True)
        if not isinstance(source, str):
            target.write_bytes(source.read())
        elif Path(source).resolve() != target.resolve():
            shutil.copy2(source, target)
        return str(target)

    def __repr__(self) -> str:
        source = repr(self._source) if isinstance(self._source, str) else "<stream>"
        return f"File3D({source}, format={self._format!r})"


__all__ = ["MESH", "SPLAT", "SVG", "VOXEL", "File3D", "VideoCodec", "VideoComponents", "VideoContainer"]
