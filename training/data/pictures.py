"""The files of a dataset as pictures, in place of latents: what a VAE is trained on.

The "latents" of such a dataset are its crops, (3, H, W) in uint8, and it has no captions. Those beyond what stays in
memory are read from their files when they are drawn.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ...storage.digest import sha256_of_spaced_json
from .dataset import Conditioning, Dataset, DatasetImage
from .encoding import ImageEncoder, watched_files
from .file_names import printable
from .listing import FolderListing, ImageEntry


def read_pictures(listing: FolderListing) -> Dataset:
    """The pictures of a listed folder, cut as they are for latents. Raises ValueError where there is a clip, or when a
    file has changed since it was listed.
    """
    encoder = ImageEncoder(listing, _as_bytes, "", None, is_of_pixels=True)

    def picture(entry: ImageEntry) -> DatasetImage:
        if entry.frames:
            raise ValueError(
                f"VAE training takes pictures, and {entry.name} is a clip: its losses compare single pictures and say"
                " nothing of motion. Set frames of clips of Dataset to 0, which leaves clips out."
            )
        encoder.add(entry)
        return replace(encoder.images[entry.key], caption="", caption_template=None, framing=None)

    train, held_out = tuple(map(picture, listing.train)), tuple(map(picture, listing.held_out))
    return Dataset(
        train,
        {"": Conditioning(torch.zeros(1, 1, 1))},
        sha256_of_spaced_json(["pictures", listing.digest]),
        held_out,
        listing.settings.flip,
        workers=listing.settings.filters.workers or int(encoder.leaves_on_disk),
        watched=watched_files(listing),
        resolution=listing.settings.resolution,
        folder=printable(listing.folder.name),
    )


def _as_bytes(pixels: Tensor) -> Tensor:
    """Pixels (1, H, W, 3) in 0..1 as (1, 3, H, W) in uint8: image files have no finer ones."""
    return (pixels * 255).round().to(torch.uint8).movedim(-1, 1)
