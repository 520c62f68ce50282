"""Encoded captions: those that every step may need are in memory, others are encoded ahead of the steps that draw them
and kept on disk.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .cache import Cache, key_of
from .dataset import Conditioning

Encode = Callable[[Sequence[str]], Mapping[str, Conditioning]]
_CHUNK = 64  # captions a call of the text encoder
_RECENT = 256 * 2**20  # bytes of conditionings that are kept in memory beside those on disk


class Conditionings(Mapping[str, Conditioning]):
    """Conditioning by caption. Iterating gives the captions that were given; any other one is encoded when it is asked
    for.

    `encoder` identifies the text encoder in the cache. A conditioning is the same whether it was encoded now, ahead or
    long ago.
    """

    def __init__(self, encode: Encode, texts: Iterable[str], encoder: str = "", cache: Cache | None = None) -> None:
        self._encode, self._encoder, self._cache = encode, encoder, cache
        self._recent: OrderedDict[str, Conditioning] = OrderedDict()
        self._bytes = 0
        self._lock = threading.RLock()
        self._fixed: dict[str, Conditioning] = {}
        for text, made in self._all(sorted(set(texts))):
            self._fixed[text] = made

    def __iter__(self) -> Iterator[str]:
        return iter(self._fixed)

    def __len__(self) -> int:
        return len(self._fixed)

    def __getitem__(self, text: str) -> Conditioning:
        if text in self._fixed:
            return self._fixed[text]
        with self._lock:
            if text in self._recent:
                self._recent.move_to_end(text)
                return self._recent[text]
            for _, made in self._all([text]):
                self._remember(text, made)
            return self._recent[text]

    def prepare(self, texts: Iterable[str], done: Callable[[int, int], object] = lambda done, total: None) -> int:
        """Encode what is not there yet, before the steps that need it; how many that were. `done` hears (number done,
        of how many).

        Raises ValueError when the conditionings would not fit into the cache.
        """
        with self._lock:
            missing = sorted(
                {
                    text
                    for text in texts
                    if text not in self._fixed and text not in self._recent and not self._kept(text)
                }
            )
            if self._cache is not None and missing:
                size = max(_size(made) for made in self._fixed.values())
                if size * len(missing) > self._cache.limit:
                    raise ValueError(
                        f"{len(missing)} wordings of captions are drawn, {size * len(missing) / 2**30:.1f} GB of"
                        f" conditioning, and the cache may hold {self._cache.limit / 2**30:g} GB: train fewer steps at"
                        " a time, vary fewer captions, or raise cache_gb in GraftDataset's filters."
                    )
            for number, (text, made) in enumerate(self._all(missing), 1):
                self._remember(text, made)
                done(number, len(missing))
            if self._cache is not None and missing:
                self._cache.trim()
            return len(missing)

    def _kept(self, text: str) -> bool:
        return self._cache is not None and self._cache.holds("texts", self._key(text))

    def _key(self, text: str) -> str:
        return key_of("text", self._encoder, text)

    def _remember(self, text: str, made: Conditioning) -> None:
        """Keep a conditioning; without a disk to read it from again it stays, else the least recently used go."""
        self._recent[text] = made
        self._bytes += _size(made)
        while self._bytes > _RECENT and len(self._recent) > 1 and self._kept(next(iter(self._recent))):
            self._bytes -= _size(self._recent.popitem(last=False)[1])

    def _all(self, texts: Sequence[str]) -> Iterator[tuple[str, Conditioning]]:
        """Each text with its conditioning, from the cache where it has it."""
        for start in range(0, len(texts), _CHUNK):
            chunk = texts[start : start + _CHUNK]
            known = {text: found for text in chunk if (found := self._read(text)) is not None}
            new = [text for text in chunk if text not in known]
            with torch.no_grad():
                if new:
                    made = dict(self._encode(new))
                else:
                    made = {}
            for text in new:
                self._write(text, made[text])
            yield from ((text, known[text] if text in known else made[text]) for text in chunk)

    def _read(self, text: str) -> Conditioning | None:
        if self._cache is None:
            found = None
        else:
            found = self._cache.read("texts", self._key(text))
        if found is None:
            return None
        tensors, plain = found
        extras = {name.removeprefix("extras/"): tensor for name, tensor in tensors.items() if name != "context"}
        return Conditioning(tensors["context"], {**plain, **extras})

    def _write(self, text: str, made: Conditioning) -> None:
        if self._cache is None:
            return
        tensors = {f"extras/{name}": value for name, value in made.extras.items() if isinstance(value, Tensor)}
        plain = {name: value for name, value in made.extras.items() if not isinstance(value, Tensor)}
        if _is_plain(plain):
            self._cache.write("texts", self._key(text), {"context": made.context, **tensors}, plain)


def _is_plain(value: Any) -> bool:
    """Whether JSON gives back the very value."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(one) for key, one in value.items())
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def _size(made: Conditioning) -> int:
    tensors = [made.context, *(value for value in made.extras.values() if isinstance(value, Tensor))]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
