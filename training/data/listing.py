"""A dataset folder's contents: images to train on, held-out images, and the problems of the others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from ...storage.digest import sha256, spaced_json
from .buckets import Framing
from .folder_settings import FolderSettings
from .tags import Caption, CaptionRules
from .wildcards import NO_LISTS, WordLists, list_names


@dataclass(frozen=True)
class ControlPicture:
    """A control picture, or the worse picture of a preference pair: its path relative to the folder of its image,
    content hash, and (width, height).
    """

    name: str
    sha256: str
    size: tuple[int, int]


@dataclass(frozen=True)
class ImageEntry:
    """One image that can be read, at one resolution: path relative to the folder, content hash, caption, bucket, and
    how it is used.

    `bucket` and `size` are (width, height). `repeats` is the product of all repeats, `folder_repeats` the part that
    comes from the folder's name. `framings` are its crops; `dropout` None means as the dataset says; `mask` is the path
    of a mask file, "alpha" the image's own transparency, "" none, and `mask_sha256` its content hash. `controls` are
    its control pictures in their order. Of a clip, `frames` are the numbers of the frames of one part, in their order;
    none of a picture. `worse` is the picture that people like less than this one.
    """

    name: str
    sha256: str
    caption: Caption
    bucket: tuple[int, int]
    repeats: float
    size: tuple[int, int]
    captioned: bool
    framings: tuple[Framing, ...]
    flip: float = 0.0
    dropout: float | None = None
    batch_id: str = ""
    loss_scale: float = 1.0
    mask: str = ""
    mask_sha256: str = ""
    folder_repeats: int = 1
    controls: tuple[ControlPicture, ...] = ()
    frames: tuple[int, ...] = ()
    worse: ControlPicture | None = None

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells it from the other entries of its folder."""
        return self.name, self.bucket, self.frames

    @property
    def directory(self) -> str:
        """The name of the directory that it lies in, "" where that is the dataset's folder."""
        return self.name.rpartition("/")[0].rpartition("/")[2]

    @property
    def part_name(self) -> str:
        """Its name, of a clip with the frames of this part, the first one being 1."""
        if not self.frames:
            return self.name
        return f"{self.name} ({len(self.frames)} frames from {self.frames[0] + 1})"

    def worse_entry(self) -> ImageEntry:
        """The worse picture in place of this one."""
        assert self.worse is not None
        return replace(self, name=self.worse.name, sha256=self.worse.sha256, size=self.worse.size, worse=None)

    def identity(self) -> dict[str, Any]:
        """Everything that decides what is trained, as plain values for the digest: no names, no places.

        The keys are part of stored digests and never change.
        """
        values = _plain(self)
        values["group"] = values.pop("batch_id")
        for name in ("name", "captioned", "mask", "folder_repeats"):
            del values[name]
        del values["controls"], values["worse"]
        if self.worse is not None:
            values["worse picture"] = self.worse.sha256
        if not self.frames:
            del values["frames"]
        if self.controls:
            values["control pictures"] = [control.sha256 for control in self.controls]
        return values


@dataclass(frozen=True)
class FolderListing:
    """What a folder holds: images to train on, images held out, errors of the others (`problems`), and notes for the
    report.
    """

    folder: Path
    train: tuple[ImageEntry, ...]
    held_out: tuple[ImageEntry, ...]
    problems: tuple[str, ...] = ()
    settings: FolderSettings = field(default_factory=FolderSettings)
    notes: tuple[str, ...] = ()

    @property
    def entries(self) -> tuple[ImageEntry, ...]:
        """All images, those to train on first."""
        return self.train + self.held_out

    @property
    def digest(self) -> str:
        """Hash of contents and settings; file names and places do not count."""
        body: dict[str, Iterator[str]] = {
            "train": _spaced_list(self.train),
            "held out": _spaced_list(self.held_out),
            "size conditioning": iter([spaced_json(self.settings.filters.size_conditioning)]),
        }
        if any(entry.caption.shows_separator for entry in self.entries):
            body["separators"] = iter([spaced_json("part of the text")])
        lists = self._word_lists()
        if lists:
            body["word lists"] = iter([spaced_json(lists.digest)])
        return _sha256_of_parts(body)

    def caption_texts(self) -> Iterator[str]:
        """Texts that between them hold everything that a drawn caption can hold."""
        for entry in self.entries:
            yield from entry.caption.possible_texts
        yield from self._word_lists().texts

    def _word_lists(self) -> WordLists:
        """The word lists, if a caption names one of them."""
        for entry in self.entries:
            for text in entry.caption.texts:
                if list_names(text):
                    return entry.caption.rules.lists
        return NO_LISTS


def _spaced_list(entries: Sequence[ImageEntry]) -> Iterator[str]:
    """The JSON of a list of entries' identities in parts, so that those of thousands are not in memory together."""
    before = "["
    for entry in entries:
        yield before + spaced_json(entry.identity())
        before = ", "
    yield "]" if entries else "[]"


def _sha256_of_parts(body: Mapping[str, Iterable[str]]) -> str:
    """What `sha256_of_spaced_json` gives of a mapping whose values' JSON comes in parts."""
    digest, before = sha256(), "{"
    for name in sorted(body):
        digest.update(f"{before}{spaced_json(name)}: ".encode())
        for part in body[name]:
            digest.update(part.encode())
        before = ", "
    digest.update(b"}")
    return digest.hexdigest()


_LEAVES = (str, int, float, bool, type(None))


@cache
def _field_names(kind: type) -> tuple[str, ...]:
    return tuple(one.name for one in fields(kind))


def _plain(value: Any) -> Any:
    """A dataclass, and those in it, as mappings by field: what `asdict` gives, without copies of all else."""
    kind: Any = type(value)
    if kind in _LEAVES:
        return value
    if kind is tuple:
        return [_plain(one) for one in value]
    if kind is CaptionRules:
        return value.identity
    return {name: _plain(getattr(value, name)) for name in _field_names(kind)}


def unique_images(entries: Iterable[ImageEntry]) -> list[ImageEntry]:
    """One entry per image, whatever its resolutions."""
    return list({entry.name: entry for entry in entries}.values())


def first_names(names: Sequence[str]) -> str:
    """The first five of many names."""
    text = ", ".join(names[:5])
    if len(names) > 5:
        text += " …"
    return text


def count_names(names: Sequence[str], what: str, advice: str = "") -> list[str]:
    """A report's line about some files: how many they are, what is with them, and the first of their names. No line
    where there are none.

    Args:
        names: the files.
        what: follows their number.
        advice: follows their names.
    """
    if not names:
        return []
    return [f"{len(names)} {what}: {first_names(names)}{advice}"]
