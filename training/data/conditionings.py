"""Encoded captions: the plain ones are in memory as far as they fit, variants are encoded ahead of the steps that draw
them and cached on disk.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .cache import Cache, key_of
from .control_encoding import ControlEncoder
from .dataset import Conditioning, prompt_parts
from .reading_ahead import check_may_encode
from .stored_latent import KEPT_BYTES

Encode = Callable[[Sequence[str]], Mapping[str, Conditioning]]
_CHUNK = 64  # captions per call of the text encoder
_PACK_BYTES = 32 * 2**20  # how many bytes of conditionings are written into one file
_BYTES_PER_NUMBER = 4
RECENT_BYTES = 256 * 2**20  # how many conditionings of variants stay in memory


class Conditionings(Mapping[str, Conditioning]):
    """Conditioning by caption. Iterating gives the captions it began with; any other one is encoded when it is asked
    for.

    `encoder` identifies the text encoder in the cache, and `prompt_of` gives what it reads of a caption. A conditioning
    is the same whenever it was encoded. `controls` encodes captions with the pictures that the text encoder sees.
    """

    def __init__(
        self,
        encode: Encode,
        texts: Iterable[str],
        encoder: str = "",
        cache: Cache | None = None,
        prompt_of: Callable[[str], str] = str,
        controls: ControlEncoder | None = None,
    ) -> None:
        self._controls = controls
        self._encode, self._encoder, self._cache, self._prompt_of = encode, encoder, cache, prompt_of
        self._recent: OrderedDict[str, Conditioning] = OrderedDict()
        self._bytes = 0
        self._lock = threading.RLock()
        self._texts = sorted(set(texts))
        self._fixed: dict[str, Conditioning] = {}
        self._largest = 0  # bytes of one conditioning
        self.leaves_on_disk = False  # conditionings that are read when they are drawn, and do not stay
        self._kept = 0  # bytes of those that are in memory, or will be once they are read
        self._to_keep: set[str] = set()  # those of them that are still on disk
        self._encode_first()

    def _encode_first(self) -> None:
        """Encode those captions that it begins with and the cache lacks; the others are read when they are asked for.
        Up to `KEPT_BYTES` of all stay in memory.
        """
        missing: list[str] = []
        for text in self._texts:
            size = self._stored_size(text)
            if size is None:
                missing.append(text)
            elif self._is_kept(size):
                self._to_keep.add(text)
            else:
                self.leaves_on_disk = True
        for text, conditioning in self._encode_all(missing):
            if self._is_kept(_size(conditioning)) or not self._is_cached(text):
                self._fixed[text] = conditioning
            else:
                self.leaves_on_disk = True

    def _is_kept(self, size: int) -> bool:
        """Whether a conditioning of so many bytes may stay in memory; from then on it counts."""
        self._largest = max(self._largest, size)
        if self._kept + size > KEPT_BYTES:
            return False
        self._kept += size
        return True

    def _stored_size(self, text: str) -> int | None:
        """The bytes of a conditioning that the cache has, by the shapes of its tensors; None when it has none."""
        if self._cache is None:
            return None
        shapes = self._cache.shapes("texts", self._key(text))
        if shapes is None:
            return None
        return _BYTES_PER_NUMBER * sum(math.prod(shape) for shape in shapes.values())

    def with_encoder(self, encode: Encode, encoder: str) -> Conditionings:
        """The same captions, encoded by another text encoder. Raises ValueError where it sees pictures too."""
        if self._controls is not None and self._controls.seen:
            raise ValueError(
                "captions that are encoded with control pictures cannot be encoded anew while a run goes on"
            )
        return Conditionings(encode, self._texts, encoder, self._cache, self._prompt_of)

    def sees(self, pictures: str) -> bool:
        """Whether these are pictures of its own, by their key."""
        return self._controls is not None and pictures in self._controls.seen

    def __iter__(self) -> Iterator[str]:
        return iter(self._texts)

    def __contains__(self, text: object) -> bool:
        """Every caption is there: what is not encoded yet is when it is asked for."""
        return isinstance(text, str)

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, text: str) -> Conditioning:
        if text in self._fixed:
            return self._fixed[text]
        with self._lock:
            if text in self._recent:
                self._recent.move_to_end(text)
                return self._recent[text]
            [(_, conditioning)] = self._encode_all([text])
            if text in self._to_keep:
                self._to_keep.remove(text)
                self._fixed[text] = conditioning
            else:
                self._remember(text, conditioning)
            return conditioning

    def prepare(self, texts: Iterable[str], done: Callable[[int, int], object] = lambda done, total: None) -> int:
        """Encode the captions that are missing, before the steps that need them. Returns how many those were. `done`
        gets (number done, of how many).

        Raises ValueError when the conditionings would not fit into the cache.
        """
        with self._lock:
            drawn = set(texts) - self._fixed.keys()
            on_disk = {text for text in drawn if self._keep(text)}
            missing = sorted(text for text in drawn - on_disk if text not in self._recent)
            if not missing:
                return 0
            self._check_cache_size(len(on_disk) + len(missing))
            for number, (text, conditioning) in enumerate(self._encode_all(missing), 1):
                self._remember(text, conditioning)
                done(number, len(missing))
            if self._cache is not None:
                self._cache.trim()
            return len(missing)

    def _check_cache_size(self, count: int) -> None:
        if self._cache is None:
            return
        size = count * self._largest
        if size > self._cache.limit:
            raise ValueError(
                f"{count} wordings of captions are drawn, {size / 2**30:.1f} GB of conditioning, and the cache may hold"
                f" {self._cache.limit / 2**30:g} GB: train fewer steps at a time, vary fewer captions, or raise"
                " cache_gb in Dataset's filters."
            )

    def _keep(self, text: str) -> bool:
        """Whether the cache has a caption; its file stays there from now on."""
        return self._cache is not None and self._cache.keep("texts", self._key(text))

    def _is_cached(self, text: str) -> bool:
        return self._cache is not None and self._cache.holds("texts", self._key(text))

    def _key(self, text: str) -> str:
        return key_of("text", self._encoder, self._prompt_of(text))

    def _remember(self, text: str, conditioning: Conditioning) -> None:
        """Keep a conditioning in memory; the least recently used ones go if they can be read from disk again."""
        self._recent[text] = conditioning
        self._bytes += _size(conditioning)
        while self._bytes > RECENT_BYTES and len(self._recent) > 1 and self._is_cached(next(iter(self._recent))):
            self._bytes -= _size(self._recent.popitem(last=False)[1])

    def _encode_all(self, texts: Sequence[str]) -> Iterator[tuple[str, Conditioning]]:
        """Each text with its conditioning, from the cache if it is there."""
        for start in range(0, len(texts), _CHUNK):
            chunk = texts[start : start + _CHUNK]
            conditionings: dict[str, Conditioning] = {}
            for text in chunk:
                cached = self._read(text)
                if cached is not None:
                    conditionings[text] = cached
            missing = [text for text in chunk if text not in conditionings]
            if missing:
                encoded = self._encode_missing(missing)
                conditionings.update(encoded)
                self._write(encoded)
            for text in chunk:
                yield text, conditionings[text]

    @torch.no_grad()
    def _encode_missing(self, texts: Sequence[str]) -> list[tuple[str, Conditioning]]:
        check_may_encode()
        encoded: list[tuple[str, Conditioning]] = []
        alone = [text for text in texts if not prompt_parts(text)[1]]
        if alone:
            encoded += self._encode(alone).items()
        for text in texts:
            if prompt_parts(text)[1]:
                assert self._controls is not None
                encoded.append((text, self._controls.encode(text)))
        return encoded

    def _read(self, text: str) -> Conditioning | None:
        if self._cache is None:
            return None
        cached = self._cache.read("texts", self._key(text))
        if cached is None:
            return None
        tensors, settings = cached
        context = tensors.pop("context")
        extras = {name.removeprefix("extras/"): tensor for name, tensor in tensors.items()}
        return Conditioning(context, {**settings, **extras})

    def _write(self, encoded: Sequence[tuple[str, Conditioning]]) -> None:
        """Write conditionings into the cache, in files of about `_PACK_BYTES`."""
        if self._cache is None:
            return
        pack: dict[str, tuple[dict[str, Tensor], dict[str, Any]]] = {}
        size = 0
        for text, conditioning in encoded:
            tensors, settings = _parts(conditioning)
            if not _is_plain(settings):
                continue
            if size + _size(conditioning) > _PACK_BYTES:
                self._cache.write_together("texts", pack)
                pack, size = {}, 0
            pack[self._key(text)] = tensors, settings
            size += _size(conditioning)
        self._cache.write_together("texts", pack)


def _parts(conditioning: Conditioning) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(tensors, plain values) of a conditioning, as the cache has them."""
    tensors, settings = {"context": conditioning.context}, {}
    for name, value in conditioning.extras.items():
        if isinstance(value, Tensor):
            tensors[f"extras/{name}"] = value
        else:
            settings[name] = value
    return tensors, settings


def _is_plain(value: object) -> bool:
    """Whether a value survives JSON unchanged."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(entry) for key, entry in value.items())
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def _size(conditioning: Conditioning) -> int:
    """Bytes of the tensors."""
    total = 0
    for value in (conditioning.context, *conditioning.extras.values()):
        if isinstance(value, Tensor):
            total += value.numel() * value.element_size()
    return total
