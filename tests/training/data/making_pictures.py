"""Small pictures for tests: their pixels are random, so that each can be told from the others."""

import numpy as np
from PIL import Image


def write_picture(path, size=(64, 64), seed=0, **save):
    """Write a picture of `size` (width, height) with its folders, and give its path. The same picture has the same
    bytes.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path, **save)
    return path
