"""A listed folder through the encoders: latents of every cut, masks, captions; what the cache has is
not encoded again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...storage.digest import sha256_of_spaced_json
from . import images, kohya_metadata
from .buckets import Framing
from .cache import Cache, key_of
from .changed_files import WatchedFiles, content_hash, stamp_files
from .conditionings import Conditionings
from .dataset import Conditioning, Dataset, DatasetImage, ImageCrop
from .layouts.folder import Entry, Listing

if TYPE_CHECKING:
    from PIL import Image

_SHEET = 36  # pictures on the contact sheet


def encode(
    listing: Listing,
    encode_pixels: Callable[[Tensor], Tensor],
    encode_captions: Callable[[Sequence[str]], Mapping[str, Conditioning]],
    encoders: tuple[str, str],
    cache: Cache | None = None,
    encoded: Callable[[int], object] = lambda done: None,
    **settings: Any,
) -> tuple[Dataset, Tensor]:
    """The dataset of a listing, and its contact sheet (1, H, W, 3) in 0..1.

    `encode_pixels` turns (1, H, W, 3) into latents (1, C, h, w); `encoders` identify it and the text encoder; `encoded`
    hears how many pictures are done; `settings` are further fields of Dataset. Raises ValueError when a file has
    changed since it was listed.
    """
    shown: list[Image.Image] = []
    seen: set[str] = set()
    made: dict[tuple[str, tuple[int, int]], DatasetImage] = {}
    eye = _Eye(listing, encode_pixels, encoders[0], cache)
    for entry in listing.entries:
        made[entry.name, entry.bucket] = eye.picture(entry)
        if entry.name not in seen and len(shown) < _SHEET:
            shown.append(images.fitted(eye.opened(entry)[0], entry.framings[0]))
        seen.add(entry.name)
        encoded(len(made))
    filters = listing.settings.filters
    texts = {entry.caption.plain for entry in listing.entries} | {""}
    conditionings = Conditionings(encode_captions, texts, encoders[1], cache)
    regularisation = settings.get("regularisation")
    plain = {key: value for key, value in settings.items() if key not in ("regularisation", "report", "unhashed")}
    body = [listing.digest, encoders, plain, None if regularisation is None else regularisation.digest]
    digest = sha256_of_spaced_json(body)
    train, held_out = (
        tuple(made[entry.name, entry.bucket] for entry in part) for part in (listing.train, listing.held_out)
    )
    dataset = Dataset(
        train,
        conditionings,
        digest,
        held_out,
        listing.settings.flip,
        workers=filters.workers,
        write_schedule=filters.write_schedule,
        watched=WatchedFiles(listing.folder, stamp_files(listing.folder), filters.changed == "stop"),
        kohya_metadata=kohya_metadata.of_listing(listing, settings.get("clip_skip", 0)),
        **settings,
    )
    return dataset, images.pixels_of(images.contact_sheet(shown))


class _Eye:
    """Latents and masks of entries; a picture is opened at most once, and not at all when the cache has everything of
    it.
    """

    def __init__(
        self, listing: Listing, encode_pixels: Callable[[Tensor], Tensor], encoder: str, cache: Cache | None
    ) -> None:
        self.listing, self.encode_pixels, self.encoder, self.cache = listing, encode_pixels, encoder, cache
        self._open: tuple[str, tuple[Image.Image, Image.Image | None]] | None = None

    def opened(self, entry: Entry) -> tuple[Image.Image, Image.Image | None]:
        """(picture, alpha) of an entry; raises ValueError when the file is not the one that was listed."""
        if self._open is None or self._open[0] != entry.name:
            path = self.listing.folder / entry.name
            if content_hash(path) != entry.sha256:
                raise ValueError(f"GraftDataset: {entry.name} changed while the folder was read; run again.")
            self._open = (entry.name, images.open_picture(path))
        return self._open[1]

    def picture(self, entry: Entry) -> DatasetImage:
        views = [self._view(entry, framing) for framing in entry.framings]
        if entry.flip != self.listing.settings.flip:
            own = entry.flip
        else:
            own = None
        first = views[0]
        return DatasetImage(
            entry.name,
            entry.caption.plain,
            first.latent,
            first.flipped_latent,
            entry.repeats,
            first.mask,
            first.framing,
            tuple(views[1:]),
            entry.caption if entry.caption.varies else None,
            own,
            entry.dropout,
            entry.group,
            entry.loss_scale,
        )

    def _view(self, entry: Entry, framing: Framing) -> ImageCrop:
        latent = self._latent(entry, framing, False)
        if entry.flip:
            flipped = self._latent(entry, framing, True)
        else:
            flipped = None
        if self.listing.settings.filters.size_conditioning:
            told = framing
        else:
            told = None
        view = ImageCrop(latent, flipped, None, told)
        if entry.mask:
            return replace(view, mask=self._mask(entry, framing, latent))
        return view

    def _latent(self, entry: Entry, framing: Framing, mirrored: bool) -> Tensor:
        key = key_of("latent", self.encoder, entry.sha256, framing.scaled, framing.box, mirrored)
        if self.cache is None:
            found = None
        else:
            found = self.cache.read("latents", key)
        if found is not None and torch.isfinite(found[0]["latent"]).all():
            return found[0]["latent"]
        pixels = images.pixels_of(images.fitted(self.opened(entry)[0], framing))
        latent = self.encode_pixels(pixels.flip(2) if mirrored else pixels)[0].clone()
        if not torch.isfinite(latent).all():
            raise ValueError(
                f"GraftDataset: the VAE makes NaN or infinite latents of {entry.name}, as some do in float16: start"
                " ComfyUI with --fp32-vae or --bf16-vae, or take the picture away."
            )
        if self.cache is not None:
            self.cache.write("latents", key, {"latent": latent})
        return latent

    def _mask(self, entry: Entry, framing: Framing, latent: Tensor) -> Tensor:
        picture, alpha = self.opened(entry)
        if entry.mask == "alpha":
            mask = alpha
        else:
            mask = images.open_mask(self.listing.folder / entry.mask)
        assert mask is not None
        if mask.size != picture.size:
            mask = mask.resize(picture.size)
        return images.latent_mask(mask, framing, (latent.shape[-2], latent.shape[-1]))
