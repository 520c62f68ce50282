"""Small clips for tests, written with PyAV: their frames are random, so that each can be told from the others."""

import av
import numpy as np
from PIL import Image


def random_frames(count, size=(48, 32), seed=0):
    """`count` random frames (height, width, 3)."""
    return np.random.default_rng(seed).integers(0, 255, (count, size[1], size[0], 3), dtype=np.uint8)


def write_clip(path, count=9, size=(48, 32), rate=8, seed=0, codec="ffv1", pixels="bgr0", shape=None, **options):
    """Write a clip and give its frames; ffv1 keeps them as they are. The same clip has the same bytes. `shape` is the
    width of a pixel in parts of its height.
    """
    frames = random_frames(count, size, seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w", options={"fflags": "+bitexact", **options}) as container:
        stream = container.add_stream(codec, rate=rate)
        stream.width, stream.height, stream.pix_fmt = *size, pixels
        if shape is not None:
            stream.codec_context.sample_aspect_ratio = shape
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    return frames


def write_gif(path, count=5, size=(48, 32), seed=0, duration=125):
    """Write an animation and give its frames as Pillow reads them."""
    frames = random_frames(count, size, seed)
    pictures = [Image.fromarray(frame) for frame in frames]
    path.parent.mkdir(parents=True, exist_ok=True)
    pictures[0].save(path, save_all=True, append_images=pictures[1:], duration=duration, loop=0, lossless=True)
    return frames


def write_frames(folder, count=5, size=(48, 32), seed=0):
    """Write a folder of numbered pictures and give its frames."""
    frames = random_frames(count, size, seed)
    folder.mkdir(parents=True, exist_ok=True)
    for number, frame in enumerate(frames, 1):
        Image.fromarray(frame).save(folder / f"{number}.png")
    return frames
