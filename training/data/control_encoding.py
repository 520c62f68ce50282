"""Encodes control pictures: their latents as entries of the conditioning, and captions that the text encoder reads
together with them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import images
from .buckets import Framing
from .cache import Cache, key_of
from .changed_files import is_unchanged
from .control_methods import ControlMethod, FramedControl, unpack_mask
from .dataset import Conditioning, prompt_parts
from .listing import ControlPicture, ImageEntry
from .reading_ahead import check_may_encode
from .stored_extras import StoredExtras
from .stored_latent import Latent

if TYPE_CHECKING:
    from PIL import Image

EncodePrompt = Callable[[str, Sequence[Tensor], ControlMethod], Conditioning]
_FRAMES_PER_LATENT = 4  # of video models


@dataclass(frozen=True)
class _SeenPictures:
    """The control pictures of one crop of an image, as the text encoder sees them."""

    entry: ImageEntry
    framing: Framing
    flipped: bool


class ControlEncoder:
    """The control pictures of one folder, by the method of one model.

    `encode_pixels` turns (1, H, W, 3) into latents (1, C, h, w); `encode_prompt` encodes a caption with the pictures
    that it is about; `encoder` is the hash of the VAE. `seen` has what the text encoder sees, by its key.
    """

    def __init__(
        self,
        folder: Path,
        method: ControlMethod,
        encode_pixels: Callable[[Tensor], Tensor],
        encode_prompt: EncodePrompt,
        encoder: str,
        cache: Cache | None,
    ) -> None:
        self.folder, self.method, self.encoder, self.cache = folder, method, encoder, cache
        self.encode_pixels, self.encode_prompt = encode_pixels, encode_prompt
        self.seen: dict[str, Any] = {}
        self._opened: dict[str, Image.Image] = {}

    def extras(self, entry: ImageEntry, framing: Framing, latent: Latent, flipped: bool) -> Mapping[str, Any]:
        """The entries of the conditioning of one crop of an image, whose own latent that is; in memory only where the
        cache does not have them.
        """
        encoded = self._extras(entry, framing, latent, flipped)
        frames = _frames(latent)
        keys = [self._key(entry, control, framing, frames, flipped) for control in entry.controls]
        if self.cache is None or not all(self.cache.holds("latents", key) for key in keys):
            return encoded
        return StoredExtras(encoded, partial(self._extras, entry, framing, latent, flipped))

    def _extras(self, entry: ImageEntry, framing: Framing, latent: Latent, flipped: bool) -> dict[str, Any]:
        frames = _frames(latent)
        if len(entry.controls) > self.method.most:
            raise ValueError(
                f"Dataset: {entry.name} has {len(entry.controls)} control pictures, and with control pictures set to"
                f" {self.method.name} a model takes {self.method.most}. Remove the others, or choose another way."
            )
        if self.method.mask is not None and entry.frames:
            raise ValueError(
                f"Dataset: {entry.name} is a clip, and control pictures set to {self.method.name} are for pictures:"
                " connect clips to Samples, through the model's own node."
            )
        encoded = [self._read_or_encode(entry, control, framing, frames, flipped) for control in entry.controls]
        entries = self.method.entries([one["latent"] for one in encoded])
        if self.method.mask is not None:
            entries["concat_mask"] = unpack_mask(encoded[0]["mask"])
        return entries

    def see(self, entry: ImageEntry, framing: Framing, flipped: bool) -> str:
        """The key of what the text encoder sees with that crop of an image; "" where it sees nothing."""
        if self.method.seen is None or not entry.controls:
            return ""
        contents = [[control.sha256, framing.original, framing.scaled, framing.box] for control in entry.controls]
        key = key_of("seen pictures", self.method.name, contents, flipped)
        self.seen[key] = _SeenPictures(entry, framing, flipped)
        return key

    def encode(self, prompt: str) -> Conditioning:
        """The conditioning of a caption with the pictures whose key `prompt` has (`dataset.prompt_key`)."""
        caption, key = prompt_parts(prompt)
        seen = self.seen[key]
        assert self.method.seen is not None
        pictures: list[Tensor] = []
        for control in seen.entry.controls:
            pixels = self.method.seen(FramedControl(self._open(control), seen.framing))
            pictures.append(_flip(pixels, seen.flipped))
        return self.encode_prompt(caption, pictures, self.method)

    def _read_or_encode(
        self, entry: ImageEntry, control: ControlPicture, framing: Framing, frames: int, flipped: bool
    ) -> dict[str, Tensor]:
        """The `latent` of a control picture, and the `mask` where it is one."""
        key = self._key(entry, control, framing, frames, flipped)
        if self.cache is not None:
            cached = self.cache.read("latents", key)
            if cached is not None and torch.isfinite(cached[0]["latent"]).all():
                return dict(cached[0])
        check_may_encode()
        image = None
        if self.method.mask is not None:
            image = self._open(ControlPicture(entry.name, entry.sha256, entry.size))
        framed = FramedControl(self._open(control), framing, frames, image)
        encoded = {"latent": self.encode_pixels(_flip(self.method.for_vae(framed), flipped)).clone()}
        if not torch.isfinite(encoded["latent"]).all():
            raise ValueError(
                f"Dataset: the VAE makes NaN or infinite latents of {control.name}, as some do in float16: start"
                " ComfyUI with --fp32-vae or --bf16-vae, or take the picture away."
            )
        if self.method.mask is not None:
            encoded["mask"] = _flip(self.method.mask(framed).movedim(1, -1), flipped).movedim(-1, 1).contiguous()
        if self.cache is not None:
            self.cache.write("latents", key, encoded)
        return encoded

    def _key(self, entry: ImageEntry, control: ControlPicture, framing: Framing, frames: int, flipped: bool) -> str:
        """Where the cache has the latent of a control picture."""
        place = framing.original, framing.scaled, framing.box
        contents = [control.sha256]
        if self.method.mask is not None:
            contents.append(entry.sha256)
        return key_of("control", self.encoder, self.method.name, *contents, place, frames, flipped)

    def _open(self, control: ControlPicture) -> Image.Image:
        """A control picture in RGB; those of one image stay open. Raises ValueError when it has changed."""
        if control.name not in self._opened:
            path = self.folder / control.name
            if not is_unchanged(path, control.sha256):
                raise ValueError(f"Dataset: {control.name} changed while the folder was read; run again.")
            with images.errors_name(control.name):
                picture = images.open_image(path)[0]
            while len(self._opened) > self.method.most:  # and one image
                self._opened.pop(next(iter(self._opened)))
            self._opened[control.name] = picture
        return self._opened[control.name]


def _frames(latent: Latent) -> int:
    """How many frames a latent (C, h, w) or (C, T, h, w) stands for."""
    if latent.ndim == 4:
        return _FRAMES_PER_LATENT * (latent.shape[1] - 1) + 1
    return 1


def _flip(pixels: Tensor, flipped: bool) -> Tensor:
    if flipped:
        return pixels.flip(2)
    return pixels
