"""Clips as frames: decoded bytes, times, rotation, parts that are read one after the other, and files that are none."""

import struct
import sys
from fractions import Fraction

import av
import numpy as np
import pytest
from graft_nodes.training.data import clips
from graft_nodes.training.data.buckets import Framing, frame
from PIL import Image

from .making_clips import random_frames, write_clip, write_frames, write_gif

WHOLE = frame((48, 32), (48, 32))


def _frames(path, numbers):
    return clips.ClipReader(path, WHOLE).read(numbers)


@pytest.mark.parametrize("name", ["a.mkv", "a.mov"])
def test_lossless_frames_are_what_was_written(tmp_path, name):
    codec, pixels = {"a.mkv": ("ffv1", "bgr0"), "a.mov": ("png", "rgb24")}[name]
    written = write_clip(tmp_path / name, codec=codec, pixels=pixels)
    assert np.array_equal(_frames(tmp_path / name, range(9)), written)
    info = clips.scan(tmp_path / name)
    assert info.size == (48, 32) and len(info.ticks) == 9
    assert [round(8 * tick / info.per_second, 1) for tick in info.ticks] == list(range(9))


@pytest.mark.parametrize(("name", "codec"), [("a.mp4", "libx264"), ("a.webm", "libvpx-vp9"), ("a.m4v", "mpeg4")])
def test_lossy_frames_are_those_that_comfyui_decodes(tmp_path, name, codec):
    write_clip(tmp_path / name, codec=codec, pixels="yuv420p")
    with av.open(str(tmp_path / name)) as container:
        decoded = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    assert len(decoded) == 9
    assert np.array_equal(_frames(tmp_path / name, range(9)), decoded)


def test_animations_and_frame_folders(tmp_path):
    written = write_gif(tmp_path / "a.webp", 5)
    assert np.array_equal(_frames(tmp_path / "a.webp", range(5)), written)
    assert clips.scan(tmp_path / "a.webp") == clips.ClipInfo((48, 32), (0, 125, 250, 375, 500), 1000)
    write_gif(tmp_path / "a.gif", 3)
    info = clips.scan(tmp_path / "a.gif")
    assert (len(info.ticks), info.per_second) == (3, 1000)
    written = write_frames(tmp_path / "a.frames", 11)
    assert np.array_equal(_frames(tmp_path / "a.frames", range(11)), written), "10.png comes after 2.png"
    assert clips.scan(tmp_path / "a.frames") == clips.ClipInfo((48, 32), tuple(range(11)), 0)


def test_which_pictures_are_clips(tmp_path):
    write_gif(tmp_path / "moving.gif", 3)
    write_gif(tmp_path / "moving.webp", 3)
    Image.new("RGB", (8, 8)).save(tmp_path / "still.gif")
    Image.new("RGB", (8, 8)).save(tmp_path / "still.webp")
    Image.new("RGB", (8, 8)).save(tmp_path / "still.png")
    moving = [path.name for path in sorted(tmp_path.iterdir()) if clips.is_clip(path)]
    assert moving == ["moving.gif", "moving.webp"]


def test_parts_behind_each_other_are_decoded_once(tmp_path, monkeypatch):
    written = write_clip(tmp_path / "a.mkv")
    opened = []
    real = av.open
    monkeypatch.setattr(av, "open", lambda *args, **given: opened.append(1) or real(*args, **given))
    reader = clips.ClipReader(tmp_path / "a.mkv", WHOLE)
    assert np.array_equal(reader.read([0, 1, 2]), written[:3])
    assert np.array_equal(reader.read([0, 1, 2]), written[:3]), "flipped, the same part is read again"
    assert np.array_equal(reader.read([2, 3, 3, 5]), written[[2, 3, 3, 5]]), "parts may overlap, frames may repeat"
    assert np.array_equal(reader.read([6, 7, 8]), written[6:])
    assert len(opened) == 1
    assert np.array_equal(reader.read([1]), written[1:2])
    assert len(opened) == 2
    reader.close()


def test_frames_are_scaled_and_cropped_as_pictures_are(tmp_path):
    written = write_clip(tmp_path / "a.mkv")
    framing = frame((48, 32), (16, 16))
    read = clips.ClipReader(tmp_path / "a.mkv", framing).read([4])
    expected = Image.fromarray(written[4]).resize(framing.scaled, Image.Resampling.LANCZOS).crop(framing.box)
    assert np.array_equal(read[0], np.asarray(expected))


def test_odd_sizes(tmp_path):
    written = write_clip(tmp_path / "odd.mkv", size=(47, 31))
    assert clips.scan(tmp_path / "odd.mkv").size == (47, 31)
    assert np.array_equal(clips.first_frame(tmp_path / "odd.mkv"), written[0])


def _turn(path, degrees):
    """Write the turn by a quarter into the matrix of a MP4's track header, as phones do."""
    data = bytearray(path.read_bytes())
    at = data.index(b"tkhd") + 4 + 40  # version, times, id, duration, layer, volume
    one = 1 << 16
    matrix = {90: (0, one, 0, -one, 0, 0, 0, 0, 1 << 30), 270: (0, -one, 0, one, 0, 0, 0, 0, 1 << 30)}[degrees]
    data[at : at + 36] = struct.pack(">9i", *matrix)
    path.write_bytes(data)


@pytest.mark.parametrize(("degrees", "turns"), [(90, 3), (270, 1)])
def test_turned_clips_are_upright(tmp_path, degrees, turns):
    path = tmp_path / "a.mov"
    written = write_clip(path, codec="png", pixels="rgb24")
    _turn(path, degrees)
    assert clips.scan(path).size == (32, 48)
    assert clips.read_header(path).size == (32, 48)
    assert np.array_equal(clips.first_frame(path), np.rot90(written[0], turns))


def test_look_estimates_from_the_header(tmp_path):
    for name, codec in (("a.mp4", "libx264"), ("a.webm", "libvpx-vp9")):
        write_clip(tmp_path / name, 16, codec=codec, pixels="yuv420p")
        info = clips.read_header(tmp_path / name)
        assert info.size == (48, 32) and len(info.ticks) == 16
        assert info.ticks[8] == info.per_second
    write_gif(tmp_path / "a.gif", 3)
    assert len(clips.read_header(tmp_path / "a.gif").ticks) == 3
    write_frames(tmp_path / "a.frames", 4)
    assert len(clips.read_header(tmp_path / "a.frames").ticks) == 4


def test_thumbnail_is_the_first_frame(tmp_path):
    write_clip(tmp_path / "a.mkv", size=(400, 100))
    (tmp_path / "thumbnail.webp").write_bytes(clips.thumbnail(tmp_path / "a.mkv", 40))
    with Image.open(tmp_path / "thumbnail.webp") as picture:
        assert picture.size == (40, 10)


# --- files that are not clips -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.mp4", "a.mkv", "a.webm"])
@pytest.mark.parametrize("share", [0.3, 0.6, 0.85])
def test_truncated_clips_are_told(tmp_path, name, share):
    codec, pixels = {"a.mp4": ("libx264", "yuv420p"), "a.mkv": ("ffv1", "bgr0"), "a.webm": ("libvpx-vp9", "yuv420p")}[
        name
    ]
    path = tmp_path / name
    options = {"movflags": "faststart"} if name == "a.mp4" else {}
    write_clip(path, 24, codec=codec, pixels=pixels, **options)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(ValueError, match=r"ends early|not a clip"):
        clips.scan(path)


PLAYLIST = b"#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:9,\nsecret.mkv\n#EXT-X-ENDLIST\n"
CONCAT = b"ffconcat version 1.0\nfile secret.mkv\n"


@pytest.mark.parametrize("text", [b"", b"\0", b"hello", PLAYLIST, CONCAT, b"\x1a\x45\xdf\xa3", b"\0\0\0\x18ftypisom"])
@pytest.mark.parametrize("name", ["a.mp4", "a.mkv"])
def test_other_files_are_refused_and_open_no_other_one(tmp_path, text, name):
    write_clip(tmp_path / "secret.mkv")
    (tmp_path / name).write_bytes(text)
    for read in (clips.scan, clips.read_header, clips.first_frame):
        with pytest.raises(ValueError, match="not a clip"):
            read(tmp_path / name)


def test_pyav_itself_follows_a_list_of_files(tmp_path):
    """Without that the test above would say nothing."""
    write_clip(tmp_path / "secret.mkv")
    (tmp_path / "a.mp4").write_bytes(CONCAT)
    with av.open(str(tmp_path / "a.mp4")) as container:
        assert len(list(container.decode(video=0))) == 9


def test_a_header_that_promises_a_million_frames(tmp_path):
    path = tmp_path / "a.mp4"
    write_clip(path, 9, codec="libx264", pixels="yuv420p")
    data = bytearray(path.read_bytes())
    for box in (b"mvhd", b"mdhd", b"tkhd"):
        at = data.index(box) + 4 + {b"mvhd": 16, b"mdhd": 16, b"tkhd": 20}[box]
        data[at : at + 4] = struct.pack(">I", 0x7FFF0000)
    at = data.index(b"stts") + 12  # after the number of entries: frames, and the time of each
    data[at : at + 4] = struct.pack(">I", 1_000_000)
    path.write_bytes(data)
    assert len(clips.read_header(path).ticks) <= clips.MOST_FRAMES
    assert len(clips.scan(path).ticks) == 9


def test_limits(tmp_path, monkeypatch):
    write_clip(tmp_path / "a.mkv")
    monkeypatch.setattr(clips, "MOST_FRAMES", 8)
    with pytest.raises(ValueError, match="more than 8 frames; cut it"):
        clips.scan(tmp_path / "a.mkv")
    monkeypatch.setattr(clips, "MOST_FRAMES", 9)
    clips.scan(tmp_path / "a.mkv")
    monkeypatch.setattr(clips, "MOST_PIXELS", 48 * 32 - 1)
    with pytest.raises(ValueError, match="48 x 32, expected at most"):
        clips.scan(tmp_path / "a.mkv")
    monkeypatch.setattr(clips, "MOST_BYTES", 100)
    with pytest.raises(ValueError, match="larger than"):
        clips.scan(tmp_path / "a.mkv")


def test_frames_without_growing_times_have_no_rate(tmp_path):
    written = random_frames(3)
    pictures = [Image.fromarray(frame) for frame in written]
    pictures[0].save(tmp_path / "a.gif", save_all=True, append_images=pictures[1:], duration=0)
    assert clips.scan(tmp_path / "a.gif").ticks == (0, 100, 200), "as browsers show a GIF of 0 ms"


def test_frame_folders_name_what_is_wrong(tmp_path):
    write_frames(tmp_path / "a.frames", 3)
    Image.new("RGB", (8, 8)).save(tmp_path / "a.frames" / "4.png")
    with pytest.raises(ValueError, match="frame 4 has another size"):
        clips.scan(tmp_path / "a.frames")
    (tmp_path / "a.frames" / "4.png").write_bytes(b"no picture")
    with pytest.raises(ValueError, match=r"4.png: not a picture"):
        clips.scan(tmp_path / "a.frames")
    (tmp_path / "b.frames").mkdir()
    with pytest.raises(ValueError, match="no frame"):
        clips.scan(tmp_path / "b.frames")


def test_longer_sound_makes_a_clip_no_longer_at_a_glance(tmp_path):
    """Matroska says how long each stream is in words, and counts no frames."""
    with av.open(str(tmp_path / "a.mkv"), "w") as container:
        stream, beside = container.add_stream("ffv1", rate=8), container.add_stream("pcm_s16le", rate=8000)
        stream.width, stream.height, stream.pix_fmt, beside.layout = 48, 32, "bgr0", "mono"
        for frame in random_frames(9):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        sound = av.AudioFrame.from_ndarray(np.zeros((1, 16000), dtype=np.int16), format="s16", layout="mono")
        sound.sample_rate = 8000
        for ending in (beside.encode(sound), stream.encode(), beside.encode()):
            container.mux(ending)
    assert clips.read_header(tmp_path / "a.mkv").ticks == tuple(range(9))
    assert len(clips.scan(tmp_path / "a.mkv").ticks) == 9


def test_sound_alone_is_no_clip(tmp_path):
    with av.open(str(tmp_path / "a.mkv"), "w") as container:
        stream = container.add_stream("pcm_s16le", rate=8000)
        stream.layout = "mono"
        sound = av.AudioFrame.from_ndarray(np.zeros((1, 800), dtype=np.int16), format="s16", layout="mono")
        sound.sample_rate = 8000
        container.mux(stream.encode(sound))
        container.mux(stream.encode(None))
    with pytest.raises(ValueError, match="no video stream"):
        clips.scan(tmp_path / "a.mkv")


def test_without_pyav_the_file_and_the_remedy_are_named(tmp_path, monkeypatch):
    write_clip(tmp_path / "a.mkv")
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(clips.NoClipsError, match=r"a.mkv is a clip.*pip install av"):
        clips.scan(tmp_path / "a.mkv")


@pytest.mark.parametrize("ending", [".mkv", ".mp4", ".mov"])
@pytest.mark.parametrize(("shape", "size"), [((64, 45), (68, 32)), ((8, 9), (43, 32)), ((1, 1), (48, 32))])
def test_pixels_that_are_no_squares_are_shown_in_their_shape(tmp_path, ending, shape, size):
    """As ITU-R BT.601 video has them, a DVD for example: 720 pixels across are 1024 or 640 squares."""
    path = tmp_path / f"a{ending}"
    codec, pixels = ("png", "rgb24") if ending == ".mov" else ("libx264", "yuv420p")
    frames = write_clip(path, 3, shape=Fraction(*shape), codec=codec, pixels=pixels)
    info = clips.scan(path)
    assert info.size == size == clips.read_header(path).size == clips.first_frame(path).size
    whole = Framing(size, size, 0, 0, size)
    found = clips.ClipReader(path, whole).read([2])[0]
    assert found.shape == (size[1], size[0], 3)
    if ending == ".mov":
        expected = np.asarray(Image.fromarray(frames[2]).resize(size, Image.Resampling.LANCZOS))
        assert (found == expected).all()
