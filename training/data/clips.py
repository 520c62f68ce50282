"""Clips as frames: video files with PyAV, animated GIF and WebP files with Pillow, folders of numbered pictures.

A clip is decoded from its beginning, one frame at a time. What is in a video file is told by its first bytes and handed
to that one demuxer, which gets the open file: no playlist or list of other files is followed, whatever the name says.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from ...storage.pictures import open_picture
from ...storage.printable import pip_install
from ...storage.regular_file import open_regular
from . import images
from .buckets import Framing
from .clip_files import SUFFIXES, frame_files, is_frame_folder, is_video
from .clip_parts import MOST_FRAMES

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image

MOST_BYTES = 8 * 2**30  # of a clip
MOST_PIXELS = 36_000_000  # of a frame: 8K
_ANIMATED = (".gif", ".webp")
_MATROSKA = b"\x1a\x45\xdf\xa3"
_MOV_BOXES = (b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide")
_LEAST_SHARE = 0.9  # of the length that a file says it has
_BROWSERS_TICKS = 100  # ms that browsers show a frame of a GIF which says 0


class NoClipsError(ValueError):
    """No clip can be trained on, whatever is in it: PyAV is not installed, or the VAE encodes pictures only."""


@dataclass(frozen=True)
class ClipInfo:
    """A clip that can be read: (width, height) of its frames, and when each is shown, from the first one's 0, in
    1 / `per_second` seconds. 0 where the frames have no times.
    """

    size: tuple[int, int]
    ticks: tuple[int, ...]
    per_second: int


@dataclass(frozen=True)
class _Frame:
    """One decoded frame; `picture` converts it to RGB."""

    tick: int
    per_second: int
    size: tuple[int, int]
    picture: Callable[[], Image.Image]


def is_clip(path: Path) -> bool:
    """Whether a picture or clip of a folder has several frames: animated GIF and WebP files do. Raises ValueError when
    such a file is not a picture.
    """
    if is_video(path.name) or is_frame_folder(path.name):
        return True
    if path.suffix.lower() not in _ANIMATED:
        return False
    with images.pillow_errors(path), open_picture(path) as file:
        return getattr(file, "n_frames", 1) > 1


def scan(path: Path, check: Callable[[], object] = lambda: None) -> ClipInfo:
    """What a clip has, decoded to its end; `check` is called for each frame. Raises ValueError when it is broken, ends
    before its end, or is too large.
    """
    ticks: list[int] = []
    first: _Frame | None = None
    for frame in _frames(path):
        check()
        if first is None:
            first = frame
        if frame.size != first.size:
            raise ValueError(f"frame {len(ticks) + 1} has another size than the first one; convert the clip")
        if len(ticks) == MOST_FRAMES:
            raise ValueError(f"it has more than {MOST_FRAMES:,} frames; cut it into shorter clips")
        ticks.append(frame.tick - first.tick)
    if first is None:
        raise ValueError("it has no frame that can be read")
    per_second = first.per_second
    if any(later <= before for before, later in pairwise(ticks)):
        per_second = 0
    return ClipInfo(first.size, tuple(ticks), per_second)


def read_header(path: Path) -> ClipInfo:
    """What the header and the first frame say; the number of frames may be wrong. ValueError when it is not a clip
    or its first frame cannot be read.
    """
    with contextlib.closing(_frames(path)) as frames:
        first = next(frames, None)
    if first is None:
        raise ValueError("it has no frame that can be read")
    count, rate = _stated_length(path)
    return ClipInfo(first.size, tuple(number * rate[1] for number in range(min(count, MOST_FRAMES))), rate[0])


def first_frame(path: Path) -> Image.Image:
    """The first frame in RGB. Raises ValueError when it cannot be read."""
    with contextlib.closing(_frames(path)) as frames:
        for frame in frames:
            return frame.picture()
    raise ValueError("it has no frame that can be read")


def thumbnail(path: Path, side: int) -> bytes:
    """The first frame as WebP that fits into a square. Raises ValueError when it cannot be read."""
    return images.small_webp(first_frame(path), side)


class ClipReader:
    """Reads parts of one clip, cropped. A part that begins behind the one before, as the next ones do, needs no second
    decoding of what was read; of the frames only those of the last part stay in memory.
    """

    def __init__(self, path: Path, framing: Framing) -> None:
        self.path, self.framing = path, framing
        self._frames: Generator[_Frame, None, None] | None = None
        self._position = 0  # of the next frame
        self._kept: dict[int, np.ndarray[Any, Any]] = {}

    def read(self, numbers: Sequence[int]) -> np.ndarray[Any, Any]:
        """The frames of these numbers, which never fall, as (frames, height, width, 3) in 8 bit."""
        import numpy as np

        wanted = set(numbers)
        self._kept = {number: pixels for number, pixels in self._kept.items() if number in wanted}
        missing = wanted - self._kept.keys()
        if missing:
            self._decode(missing)
        return np.stack([self._kept[number] for number in numbers])

    def close(self) -> None:
        """Let go of the file and the frames."""
        if self._frames is not None:
            self._frames.close()
        self._frames, self._kept = None, {}

    def _decode(self, missing: set[int]) -> None:
        import numpy as np

        if self._frames is None or min(missing) < self._position:
            kept = self._kept
            self.close()
            self._frames, self._position, self._kept = _frames(self.path), 0, kept
        for frame in islice(self._frames, max(missing) + 1 - self._position):
            if self._position in missing:
                self._kept[self._position] = np.asarray(images.crop_image(frame.picture(), self.framing))
            self._position += 1
        if self._position <= max(missing):
            raise ValueError("it ends before the frames that were found in it; run again")


# --- decoding ---------------------------------------------------------------------------------------------------------


def _frames(path: Path) -> Generator[_Frame, None, None]:
    if is_frame_folder(path.name):
        return _folder_frames(path)
    if is_video(path.name):
        return _video_frames(path)
    return _animation_frames(path)


def _stated_length(path: Path) -> tuple[int, tuple[int, int]]:
    """(how many frames a clip says it has, its frame rate as numerator and denominator, or 0 and 1)."""
    if is_frame_folder(path.name):
        return len(frame_files(path)), (0, 1)
    if is_video(path.name):
        with _open_container(path) as (container, stream):
            rate = stream.average_rate or 0
            count = stream.frames or int((_seconds(container, stream) or 0) * rate + 0.5) or 1
            return count, (int(rate.numerator), int(rate.denominator))
    with images.pillow_errors(path), open_picture(path) as file:
        return getattr(file, "n_frames", 1), (1000, int(file.info.get("duration", 0)) or _BROWSERS_TICKS)


def _folder_frames(path: Path) -> Generator[_Frame, None, None]:
    for number, file in enumerate(frame_files(path)):
        with images.errors_of(file.name):
            picture = images.open_image(file)[0]
        yield _Frame(number, 0, picture.size, picture.copy)


def _animation_frames(path: Path) -> Generator[_Frame, None, None]:
    with images.pillow_errors(path), open_picture(path) as file:
        _check_pixels(*file.size)
        tick = 0
        for number in range(getattr(file, "n_frames", 1)):
            file.seek(number)
            file.load()
            yield _Frame(tick, 1000, file.size, lambda: images.lay_over_white(file)[0])
            tick += int(file.info.get("duration", 0)) or _BROWSERS_TICKS


def _video_frames(path: Path) -> Generator[_Frame, None, None]:
    with _open_container(path) as (container, stream):
        seconds = _seconds(container, stream)
        times: list[float] = []
        count = 0
        for packet in container.demux(stream):
            if packet.is_corrupt:
                raise ValueError(f"it is damaged or ends early: {count} frames can be read; convert it again")
            for frame in packet.decode():
                if frame.time is not None:
                    times = [*times[:1], frame.time]
                count += 1
                yield _make_frame(frame, count - 1, _pixel_shape(stream))
        if seconds and len(times) > 1:
            shown = (times[-1] - times[0]) * count / (count - 1)
            if shown < _LEAST_SHARE * seconds:
                can_be_read = f"{count} frames, {shown:.2f} of {seconds:.2f} seconds, can be read"
                raise ValueError(f"it ends early: {can_be_read}; convert it again")


def _pixel_shape(stream: Any) -> Fraction:
    """How wide the pixels of a video are, as parts of their height: 1 for squares, 64/45 on a PAL DVD for 16:9."""
    shape = stream.sample_aspect_ratio
    return Fraction(shape) if shape else Fraction(1)


def _make_frame(frame: Any, number: int, pixel_shape: Fraction) -> _Frame:
    """A frame as PyAV gives it, turned and as wide as the file says."""
    width, height = round(frame.width * pixel_shape), frame.height
    _check_pixels(frame.width, frame.height)
    _check_pixels(width, height)
    turns = round(frame.rotation / 90) % 4
    size = (width, height)
    if turns % 2:
        size = (height, width)
    if frame.pts is None or frame.time_base is None:
        return _Frame(number, 0, size, lambda: _rotate(frame, turns, size))
    tick = frame.pts * frame.time_base.numerator
    return _Frame(tick, frame.time_base.denominator, size, lambda: _rotate(frame, turns, size))


def _rotate(frame: Any, turns: int, size: tuple[int, int]) -> Image.Image:
    import numpy as np
    from PIL import Image

    picture = Image.fromarray(np.ascontiguousarray(np.rot90(frame.to_ndarray(format="rgb24"), turns)))
    return picture if picture.size == size else picture.resize(size, Image.Resampling.LANCZOS)


def _check_pixels(width: int, height: int) -> None:
    if not 0 < width * height <= MOST_PIXELS:
        raise ValueError(f"its frames are {width} x {height}, expected at most {MOST_PIXELS:,} pixels; make it smaller")


@contextlib.contextmanager
def _open_container(path: Path) -> Iterator[tuple[Any, Any]]:
    """(container, its video stream) of a file. PyAV's errors inside the block say what is wrong."""
    av = _pyav(path)
    if path.stat().st_size > MOST_BYTES:
        raise ValueError(f"it is larger than {MOST_BYTES / 2**30:g} GB; cut it into shorter clips")
    with open_regular(path) as file:
        kind = _kind_of(file)
        try:
            # The demuxer has no protocol to open another file with.
            options = {"protocol_whitelist": "none"}
            with av.open(file, format=kind, options=options, metadata_errors="replace") as container:
                stream = container.streams.best("video")
                if stream is None:
                    raise ValueError("it has no video stream")
                _check_pixels(stream.codec_context.width, stream.codec_context.height)
                stream.codec_context.options = {"max_pixels": str(MOST_PIXELS)}
                stream.codec_context.thread_type = "AUTO"
                yield container, stream
        except av.error.FFmpegError as error:
            raise ValueError(f"not a clip that can be read ({error.strerror})") from error


def _kind_of(file: BinaryIO) -> str:
    """The demuxer for a file, by its first bytes."""
    head = file.read(8)
    file.seek(0)
    if head.startswith(_MATROSKA):
        return "matroska"
    if head[4:] in _MOV_BOXES:
        return "mov"
    raise ValueError(f"not a clip that can be read: it is none of {', '.join(SUFFIXES)}, whatever its name says")


def _pyav(path: Path) -> Any:
    try:
        import av
    except ModuleNotFoundError as error:
        raise NoClipsError(
            f"Dataset: {path.name} is a clip, and reading it needs the package PyAV, which ComfyUI installs:"
            f" {pip_install('av')}. Or set frames of clips to 0."
        ) from error
    return av


def _seconds(container: Any, stream: Any) -> float | None:
    """How long the video stream says it is; None where nothing says so."""
    if stream.duration and stream.time_base:
        return float(stream.duration * stream.time_base)
    hours, _, rest = str(stream.metadata.get("DURATION", "")).partition(":")
    minutes, _, seconds = rest.partition(":")
    with contextlib.suppress(ValueError):
        return int(hours) * 3600 + int(minutes) * 60 + float(seconds)
    if container.duration and len(container.streams) == 1:
        return container.duration / 1_000_000
    return None
