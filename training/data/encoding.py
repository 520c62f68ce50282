"""Encodes a listed folder: latents of every crop, masks, captions. What is in the cache is not encoded again."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...storage.digest import sha256_of_spaced_json
from . import clips, images
from .buckets import Framing
from .cache import Cache, key_of
from .changed_files import WatchedFiles, is_unchanged, keep_hashes, stamp_files
from .clips import ClipReader
from .conditionings import Conditionings
from .control_encoding import ControlEncoder
from .dataset import Conditioning, Dataset, DatasetImage, ImageCrop, WorsePicture, prompt_key
from .file_names import printable
from .kohya_metadata import folder_metadata
from .listing import FolderListing, ImageEntry
from .reading_ahead import check_may_encode
from .stored_latent import KEPT_BYTES, Latent, StoredLatent

if TYPE_CHECKING:
    from PIL import Image

_BYTES_PER_NUMBER = 4  # of a latent; of a picture 1
# Fields of the dataset that are not plain settings, or are in what captions are encoded from.
_NOT_HASHED = ("regularization", "report", "unhashed", "weighted_captions")


def encode(
    listing: FolderListing,
    encode_pixels: Callable[[Tensor], Tensor],
    encode_captions: Callable[[Sequence[str]], Mapping[str, Conditioning]],
    encoders: tuple[str, str],
    cache: Cache | None = None,
    on_progress: Callable[[int], object] = lambda done: None,
    prompt_of: Callable[[str], str] = str,
    controls: ControlEncoder | None = None,
    **settings: Any,
) -> tuple[Dataset, Tensor]:
    """Encode what a folder holds.

    Args:
        listing: the folder.
        encode_pixels: turns pictures (1, H, W, 3) from 0 to 1 into latents (1, C, h, w).
        encode_captions: gives the conditionings of captions.
        encoders: hashes of the VAE and the text encoder.
        cache: where encoded images are kept; None keeps none.
        on_progress: gets the number of images done.
        prompt_of: gives what the text encoder reads of a caption.
        controls: encodes the control pictures of the images, where they have some.
        settings: further fields of Dataset.

    Returns:
        The dataset, and its contact sheet (1, H, W, 3) from 0 to 1.

    Raises:
        ValueError: where a file has changed since it was listed.
    """
    encoder = ImageEncoder(listing, encode_pixels, encoders[0], cache, settings.get("batch_size", 0), controls)
    for number, entry in enumerate(listing.entries, 1):
        encoder.add(entry)
        on_progress(number)
    encoder.close()
    filters = listing.settings.filters
    watched = watched_files(listing)
    if cache is not None:
        for one in watched:
            keep_hashes(cache, one.folder)
    texts = {entry.caption.plain for entry in listing.entries if not _is_read_with_pictures(entry, controls)} | {""}
    conditionings = Conditionings(encode_captions, texts, encoders[1], cache, prompt_of, controls)
    conditionings.prepare(_prompts_with_pictures(encoder.images.values()))
    dataset = Dataset(
        tuple(encoder.images[entry.key] for entry in listing.train),
        conditionings,
        _digest(listing, encoders, settings, prompt_of, controls),
        tuple(encoder.images[entry.key] for entry in listing.held_out),
        listing.settings.flip,
        workers=filters.workers or int(encoder.leaves_on_disk or conditionings.leaves_on_disk),
        write_schedule=filters.write_schedule,
        watched=watched,
        kohya_metadata=folder_metadata(listing, settings.get("clip_skip", 0)),
        resolution=listing.settings.resolution,
        folder=printable(listing.folder.name),
        encoders=encoders,
        **settings,
    )
    return dataset, images.image_tensor(images.contact_sheet(encoder.sheet))


def watched_files(listing: FolderListing) -> tuple[WatchedFiles, ...]:
    """The files of the folder, and of the folders of control pictures that a file names."""
    folders = [listing.folder]
    if listing.settings.subset is not None:
        folders += map(Path, listing.settings.subset.control_folders)
    stop = listing.settings.filters.changed == "stop"
    clips = listing.settings.takes_clips
    return tuple(WatchedFiles(folder, stamp_files(folder, clips), stop, clips) for folder in dict.fromkeys(folders))


def _is_read_with_pictures(entry: ImageEntry, controls: ControlEncoder | None) -> bool:
    return bool(entry.controls) and controls is not None and controls.method.seen is not None


def _prompts_with_pictures(encoded: Iterable[DatasetImage]) -> set[str]:
    """The captions of images with the control pictures that the text encoder sees, of every crop, flipped or not."""
    prompts: set[str] = set()
    for image in encoded:
        for number in range(1 + len(image.other_crops)):
            seen = image.crop(number).seen
            prompts |= {prompt_key(image.caption, key) for key in seen if key}
    return prompts


def _digest(
    listing: FolderListing,
    encoders: tuple[str, str],
    settings: Mapping[str, Any],
    prompt_of: Callable[[str], str],
    controls: ControlEncoder | None,
) -> str:
    hashed_settings = {name: value for name, value in settings.items() if name not in _NOT_HASHED}
    regularization = settings.get("regularization")
    body: list[Any] = [listing.digest, encoders, hashed_settings, None]
    if regularization is not None:
        body[-1] = regularization.digest
    if any(prompt_of(text) != text for text in listing.caption_texts()):
        body.append("brackets are text")  # part of stored digests
    if controls is not None and any(entry.controls for entry in listing.entries):
        body.append(["control pictures", controls.method.name])
    return sha256_of_spaced_json(body)


class ImageEncoder:
    """Encodes images, clips and masks into `images`, by the key of their entry, and collects the first ones for the
    contact sheet. `is_of_pixels`: encoding is only reading the file.

    A picture is opened at most once, and not at all when everything of it is in the cache and on the sheet. Of clips,
    the frames of one part are in memory at a time.
    """

    def __init__(
        self,
        listing: FolderListing,
        encode_pixels: Callable[[Tensor], Tensor],
        encoder: str,
        cache: Cache | None,
        batch_size: int = 0,
        controls: ControlEncoder | None = None,
        is_of_pixels: bool = False,
    ) -> None:
        self.controls, self.is_of_pixels = controls, is_of_pixels
        self.listing, self.encode_pixels, self.encoder, self.cache = listing, encode_pixels, encoder, cache
        self.batch_size = batch_size
        self._kept = 0  # bytes of latents in memory
        self.leaves_on_disk = False  # latents that are read each time they are drawn
        self._fresh: dict[str, Tensor] = {}  # latents of the entry that is added, by their keys
        self._encoding = threading.Lock()  # several threads read stored latents, and encode those that are gone
        self.images: dict[tuple[Any, ...], DatasetImage] = {}
        self.sheet: list[Image.Image] = []
        self._names: set[str] = set()
        self._opened_name = ""
        self._opened: tuple[Image.Image, Image.Image | None] | None = None
        self._clip: ClipReader | None = None

    def add(self, entry: ImageEntry) -> None:
        """Encode an entry and keep it; the latents that the cache lacks are written there in one file."""
        self._fresh = {}
        for one, framing, flipped in _crops_of(entry):
            self._encode_missing(one, framing, flipped)
        if self.cache is not None:
            self.cache.write_together("latents", {key: ({"latent": one}, None) for key, one in self._fresh.items()})
        self.images[entry.key] = self._image(entry)
        if entry.name not in self._names and len(self.sheet) < images.SHEET_IMAGES:
            self.sheet.append(images.crop_image(self._sheet_picture(entry), entry.framings[0]))
        self._names.add(entry.name)

    def close(self) -> None:
        """Let go of the last clip."""
        if self._clip is not None:
            self._clip.close()
        self._clip = None

    def _sheet_picture(self, entry: ImageEntry) -> Image.Image:
        """The picture of an entry on the contact sheet."""
        if not entry.frames:
            return self._open(entry)[0]
        with images.errors_name(entry.name):
            return clips.first_frame(self._check_unchanged(entry))

    def _check_unchanged(self, entry: ImageEntry) -> Path:
        """The path of an entry; raises ValueError when the file is not the one that was listed."""
        path = self.listing.folder / entry.name
        if not is_unchanged(path, entry.sha256):
            raise ValueError(f"Dataset: {entry.name} changed while the folder was read; run again.")
        return path

    def _pixels(self, entry: ImageEntry, framing: Framing) -> Tensor:
        """A crop of a picture as (1, H, W, 3), of a clip as (frames, H, W, 3), in 0..1."""
        if not entry.frames:
            return images.image_tensor(images.crop_image(self._open(entry)[0], framing))
        path = self._check_unchanged(entry)
        if self._clip is None or (self._clip.path, self._clip.framing) != (path, framing):
            self.close()
            self._clip = ClipReader(path, framing)
        with images.errors_name(entry.name):
            return images.frames_tensor(self._clip.read(entry.frames))

    def _open(self, entry: ImageEntry) -> tuple[Image.Image, Image.Image | None]:
        """(image, alpha) of an entry; raises ValueError when the file is not the one that was listed."""
        if self._opened is None or self._opened_name != entry.name:
            path = self._check_unchanged(entry)
            with images.errors_name(entry.name):
                self._opened_name, self._opened = entry.name, images.open_image(path)
        return self._opened

    def _image(self, entry: ImageEntry) -> DatasetImage:
        first, *other_framings = [self._crop(entry, framing) for framing in entry.framings]
        flip = None
        if entry.flip != self.listing.settings.flip:
            flip = entry.flip
        template = None
        if entry.caption.varies:
            template = entry.caption
        return DatasetImage(
            printable(entry.part_name),
            entry.caption.plain,
            first.latent,
            first.flipped_latent,
            repeats=entry.repeats,
            mask=first.mask,
            framing=first.framing,
            other_crops=tuple(other_framings),
            caption_template=template,
            flip=flip,
            dropout=entry.dropout,
            batch_id=entry.batch_id,
            loss_weight=entry.loss_scale,
            batch_size=self.batch_size,
            sha256=entry.sha256,
            extras=first.extras,
            flipped_extras=first.flipped_extras,
            seen=first.seen,
            worse=first.worse,
        )

    def _crop(self, entry: ImageEntry, framing: Framing) -> ImageCrop:
        crop = ImageCrop(self._latent(entry, framing, False))
        if entry.flip:
            crop = replace(crop, flipped_latent=self._latent(entry, framing, True))
        if self.listing.settings.filters.size_conditioning:
            crop = replace(crop, framing=framing)
        if entry.mask:
            crop = replace(crop, mask=self._mask(entry, framing, crop.latent))
        if self.controls is not None and entry.controls:
            crop = self._add_controls(crop, entry, framing, self.controls)
        if entry.worse is not None:
            crop = replace(crop, worse=self._worse(entry.worse_entry(), framing))
        return crop

    def _worse(self, entry: ImageEntry, framing: Framing) -> WorsePicture:
        flipped = None
        if entry.flip:
            flipped = self._latent(entry, framing, True)
        return WorsePicture(self._latent(entry, framing, False), flipped, entry.sha256)

    def _add_controls(
        self, crop: ImageCrop, entry: ImageEntry, framing: Framing, controls: ControlEncoder
    ) -> ImageCrop:
        extras = controls.extras(entry, framing, crop.latent, False)
        seen = controls.see(entry, framing, False)
        if crop.flipped_latent is None:
            return replace(crop, extras=extras, seen=(seen, ""))
        flipped = controls.extras(entry, framing, crop.latent, True)
        return replace(crop, extras=extras, flipped_extras=flipped, seen=(seen, controls.see(entry, framing, True)))

    def _encode_missing(self, entry: ImageEntry, framing: Framing, flipped: bool) -> None:
        key = self._key(entry, framing, flipped)
        if key not in self._fresh and (self.cache is None or not self.cache.shapes("latents", key)):
            self._fresh[key] = self._encode(entry, framing, flipped)

    def _latent(self, entry: ImageEntry, framing: Framing, flipped: bool) -> Latent:
        """The latent of a crop: where the cache has it, it is read when it is drawn. Up to `KEPT_BYTES` of latents stay
        in memory.
        """
        key = self._key(entry, framing, flipped)
        load = partial(self._read_or_encode, entry, framing, flipped)
        fresh = self._fresh.get(key)
        if fresh is None:
            assert self.cache is not None
            shapes = self.cache.shapes("latents", key)
            if shapes is None:  # it has gone since
                fresh = load()
            else:
                keeps = self._is_kept(shapes["latent"])
                self.leaves_on_disk |= not keeps
                return StoredLatent(shapes["latent"], load, keeps)
        if not self._is_kept(fresh.shape) and self._is_read_again(entry, framing, flipped):
            self.leaves_on_disk = True
            return StoredLatent(fresh.shape, load)
        return fresh

    def _is_kept(self, shape: Sequence[int]) -> bool:
        """Whether a latent of that shape may stay in memory; from then on it counts."""
        size = math.prod(shape)
        if not self.is_of_pixels:
            size *= _BYTES_PER_NUMBER
        if self._kept + size > KEPT_BYTES:
            return False
        self._kept += size
        return True

    def _is_read_again(self, entry: ImageEntry, framing: Framing, flipped: bool) -> bool:
        """Whether the latent of a crop costs little when it is drawn: it is in the cache, or is the picture itself."""
        if self.cache is None:
            return self.is_of_pixels
        return self.cache.holds("latents", self._key(entry, framing, flipped))

    def _key(self, entry: ImageEntry, framing: Framing, flipped: bool) -> str:
        """Where the cache has the latent of a crop."""
        return key_of("latent", self.encoder, entry.sha256, framing.scaled, framing.box, flipped, *_frames_key(entry))

    def _read_or_encode(self, entry: ImageEntry, framing: Framing, flipped: bool) -> Tensor:
        """The latent of a crop from the cache, or encoded and written there."""
        key = self._key(entry, framing, flipped)
        if self.cache is not None:
            cached = self.cache.read("latents", key)
            if cached is not None and torch.isfinite(cached[0]["latent"]).all():
                return cached[0]["latent"]
        latent = self._encode(entry, framing, flipped)
        if self.cache is not None:
            self.cache.write("latents", key, {"latent": latent})
        return latent

    def _encode(self, entry: ImageEntry, framing: Framing, flipped: bool) -> Tensor:
        """The latent of a crop from the VAE."""
        if not self.is_of_pixels:
            check_may_encode()
        with self._encoding:
            pixels = self._pixels(entry, framing)
            if flipped:
                pixels = pixels.flip(2)
            latent = self.encode_pixels(pixels)[0].clone()
        if not torch.isfinite(latent).all():
            raise ValueError(
                f"Dataset: the VAE makes NaN or infinite latents of {entry.name}, as some do in float16: start"
                " ComfyUI with --fp32-vae or --bf16-vae, or take the picture away."
            )
        return latent

    def _mask(self, entry: ImageEntry, framing: Framing, latent: Latent) -> Tensor:
        if entry.mask == "alpha":
            mask = self._open(entry)[1]
        else:
            with images.errors_name(entry.mask):
                mask = images.open_mask(self.listing.folder / entry.mask)[0]
        assert mask is not None
        if mask.size != entry.size:
            mask = mask.resize(entry.size)
        return images.latent_mask(mask, framing, (latent.shape[-2], latent.shape[-1]))


def _crops_of(entry: ImageEntry) -> Iterator[tuple[ImageEntry, Framing, bool]]:
    """(entry, framing, whether flipped) of everything that is encoded of an entry and of the worse one of its pair."""
    entries = [entry]
    if entry.worse is not None:
        entries.append(entry.worse_entry())
    for one in entries:
        for framing in one.framings:
            yield one, framing, False
            if entry.flip:
                yield one, framing, True


def _frames_key(entry: ImageEntry) -> list[Any]:
    """What the key of a latent has of the frames of a clip; nothing of a picture, as in stored caches."""
    if not entry.frames:
        return []
    return ["frames", entry.frames]
