"""A folder of captioned pictures: listed, checked, sorted into buckets, split into training and held-out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ....storage.digest import sha256, sha256_of_spaced_json
from ...random_draws import generator
from .. import buckets, captions, images, tags, wildcards
from ..buckets import Framing
from ..cache import Cache
from ..captions import Written
from ..changed_files import content_hash
from ..filters import Filters
from ..tags import Caption, Rules
from .everydream2_yaml import Files
from .lunnova_json import Index, read_index


@dataclass(frozen=True)
class FolderSettings:
    """How a folder is read; plain values, checked on creation."""

    resolution: int = 512
    buckets: bool = True
    bucket_step: int = 64
    captions: str = "auto"
    repeats: int = 1
    flip: float = 0.0
    validation: float = 0.1
    shuffle_tags: bool = False
    keep_tags: int = 0
    tag_dropout: float = 0.0
    filters: Filters = field(default_factory=Filters)

    def __post_init__(self) -> None:
        wrong = []
        if self.captions not in captions.MODES:
            wrong.append(f"captions is {self.captions!r}, expected one of {', '.join(captions.MODES)}")
        if self.repeats < 1:
            wrong.append(f"repeats is {self.repeats}, expected 1 or more")
        if self.keep_tags < 0:
            wrong.append(f"keep_tags is {self.keep_tags}, expected 0 or more")
        for name in ("flip", "tag_dropout"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                wrong.append(f"{name} is {getattr(self, name)}, expected from 0 to 1")
        if not 0.0 <= self.validation < 1.0:
            wrong.append(f"validation is {self.validation}, expected at least 0 and below 1")
        if self.shuffle_tags and self.filters.shuffle_tag_p is not None:
            wrong.append("shuffle_tags shuffles always and shuffle_tag_p of filters now and then; set one of them")
        if self.filters.scored and self.captions not in ("auto", "json"):
            wrong.append(
                f"abs_min_score, min_score and score_tags need scores from JSON files; captions {self.captions} reads"
                " none"
            )
        wrong += [
            f"resolution is {side}, expected a multiple of 8"
            for side in self.resolutions
            if not self.buckets and side % 8
        ]
        if wrong:
            raise ValueError("GraftDataset: " + "; ".join(wrong) + ".")
        for side in self.resolutions:
            buckets.sizes(side, self.bucket_step)

    @property
    def resolutions(self) -> tuple[int, ...]:
        """Every base resolution that pictures are shown at."""
        return tuple(dict.fromkeys((self.resolution, *self.filters.resolutions)))


def settings_of(filters: str, wrong: list[str], **plain: Any) -> FolderSettings:
    """The settings of a node's inputs; raises one ValueError for what is `wrong` already, in the YAML of `filters` and
    in the others.
    """
    chosen, settings = Filters(), None
    try:
        chosen = Filters.parse(filters)
    except ValueError as error:
        wrong = [*wrong, str(error)]
    try:
        settings = FolderSettings(**plain, filters=chosen)
    except ValueError as error:
        wrong = [*wrong, str(error).removeprefix("GraftDataset: ").rstrip(".")]
    if wrong or settings is None:
        raise ValueError("GraftDataset: " + "; ".join(wrong) + ".")
    return settings


@dataclass(frozen=True)
class Entry:
    """One picture that can be read, at one resolution: path relative to the folder, content hash, caption, bucket, and
    how it is used.

    `bucket` and `size` are (width, height). `framings` are the cuts it may be shown with; `dropout` None is as the
    dataset says; `mask` is the path of a mask file, "alpha" the picture's own transparency, "" none, and `mask_sha256`
    its content hash.
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
    group: str = ""
    loss_scale: float = 1.0
    mask: str = ""
    mask_sha256: str = ""


@dataclass(frozen=True)
class Listing:
    """What a folder holds: pictures to train on, pictures held out, what is wrong with the others, and what deserves a
    word.
    """

    folder: Path
    train: tuple[Entry, ...]
    held_out: tuple[Entry, ...]
    problems: tuple[str, ...] = ()
    settings: FolderSettings = field(default_factory=FolderSettings)
    notes: tuple[str, ...] = ()

    @property
    def entries(self) -> tuple[Entry, ...]:
        """All pictures, those to train on first."""
        return self.train + self.held_out

    @property
    def digest(self) -> str:
        """Over contents and settings; file names and places do not count."""

        def row(entry: Entry) -> dict[str, Any]:
            rules = replace(entry.caption.rules, lists=wildcards.NO_LISTS)  # they are the same for all and may be long
            plain = asdict(replace(entry, caption=replace(entry.caption, rules=rules)))
            del plain["caption"]["rules"]["lists"]
            return {key: value for key, value in plain.items() if key not in ("name", "captioned", "mask")}

        parts = {"train": [row(e) for e in self.train], "held out": [row(e) for e in self.held_out]}
        body: dict[str, Any] = {**parts, "size conditioning": self.settings.filters.size_conditioning}
        lists = next(
            (
                e.caption.rules.lists
                for e in self.entries
                if any(map(wildcards.named, e.caption.lines + e.caption.tags))
            ),
            None,
        )
        if lists:
            body["word lists"] = lists.digest
        return sha256_of_spaced_json(body)


def read_folder(folder: Path, settings: FolderSettings, cache: Cache | None = None) -> Listing:
    """List a folder; unreadable pictures are problems, not errors. Raises ValueError when no picture can be used.

    A picture whose contents `cache` knows to be whole is not decoded again. The held-out share is chosen by content
    hash, so it does not depend on names or order: at least one picture of two, never all.
    """
    reader = _Reader(folder, settings, cache)
    entries = [entry for path in reader.paths() for entry in reader.entries(path)]
    problems = (*reader.index.problems, *reader.yaml.problems, *reader.problems)
    if not entries:
        listed = "\n  ".join([*problems, *reader.notes(entries)])
        raise ValueError(f"GraftDataset: no picture in folder {folder.name!r} can be used:\n  {listed}")
    names = [e.name for e in sorted(once(entries), key=lambda e: (sha256(e.sha256.encode()).hexdigest(), e.name))]
    kept = set(
        names[: min(len(names) - 1, max(1, round(len(names) * settings.validation)))] if settings.validation else []
    )
    train = tuple(e for e in entries if e.name not in kept)
    held_out = tuple(e for e in entries if e.name in kept)
    _refuse_idle(settings, entries)
    return Listing(folder, train, held_out, problems, settings, tuple(reader.notes(entries)))


def _refuse_idle(settings: FolderSettings, entries: Sequence[Entry]) -> None:
    """Raise ValueError for settings that could change nothing here."""
    wrong = []
    if settings.keep_tags and not any(entry.caption.rules.shuffle or entry.caption.rules.dropout for entry in entries):
        wrong.append(
            "keep_tags has no effect where no tags are shuffled or dropped; set shuffle_tags or tag_dropout, or"
            " keep_tags to 0"
        )
    if settings.filters.masks in ("alpha", "both") and not any(entry.mask for entry in entries):
        wrong.append(f"masks is {settings.filters.masks}, but no picture is transparent or has a mask file")
    if wrong:
        raise ValueError("GraftDataset: " + "; ".join(wrong) + ".")


class _Reader:
    """Reads the entries of one folder and gathers what is wrong on the way."""

    def __init__(self, folder: Path, settings: FolderSettings, cache: Cache | None) -> None:
        self.folder, self.settings, self.filters, self.cache = folder, settings, settings.filters, cache
        self.problems: list[str] = []
        self.unwanted: Counter[str] = Counter()
        self.said: list[str] = []
        self.small: list[str] = []
        self.file_names = 0
        self.yaml = Files(folder, self.filters.encoding)
        self.lists = wildcards.NO_LISTS
        if self.filters.wildcards:
            self.lists, self.problems = wildcards.read(folder, self.filters.encoding)
        self.index = Index({})
        if settings.captions in ("auto", "json"):
            self.index = read_index(folder, self.filters, settings.captions == "json")
        self.choices = [
            buckets.sizes(side, settings.bucket_step) if settings.buckets else [(side, side)]
            for side in settings.resolutions
        ]

    def paths(self) -> list[Path]:
        """The pictures to consider; raises ValueError when there is none."""
        found = images.find(self.folder)
        if not found:
            raise ValueError(
                f"GraftDataset: folder {self.folder.name!r} has no pictures (expected {', '.join(images.SUFFIXES)})."
            )
        if self.settings.captions == "json":
            without = [path for path in found if path not in self.index.written]
            if without:
                self.unwanted["that no JSON file describes"] = len(without)
            return [path for path in found if path in self.index.written]
        if self.index.written:
            return found
        self.unwanted["by consider_every_nth"] = len(found) - len(found[:: self.filters.consider_every_nth])
        return found[:: self.filters.consider_every_nth]

    def entries(self, path: Path) -> list[Entry]:
        """The entries of a picture, one a resolution; none when it is left out, for a problem or by a filter."""
        name = path.relative_to(self.folder).as_posix()
        try:
            written = self._written(path)
            caption = self._caption(written)
            if self.filters.wildcards:
                self.lists.check(" ".join(caption.lines + caption.tags))
            _ = caption.plain  # what cannot be said is a problem of this picture, now
            if written.multiply is None:
                multiply = 1.0
            else:
                multiply = written.multiply
            reason = self.filters.unwanted(self._tags(written), written.score) or (
                None if multiply else "with multiply 0"
            )
            if reason:
                self.unwanted[reason] += 1
                return []
            sha256 = content_hash(path)
            size, alpha = self._whole(path, sha256)
            places = self._places(sha256)
            mask, mask_sha256 = self._mask(path, alpha)
        except ValueError as error:
            self.problems.append(f"{name}: {error}")
            return []
        except OSError as error:
            self.problems.append(f"{name}: {error.strerror or error}")
            return []
        self.said += [note for note in written.notes if note not in self.said]
        repeats = self.settings.repeats * captions.repeats_of(path, self.folder) * multiply
        if written.flip is None:
            flip = self.settings.flip
        else:
            flip = written.flip
        if written.loss_scale is None:
            scale = 1.0
        else:
            scale = written.loss_scale
        out = []
        for choices in self.choices:
            bucket = buckets.nearest(*size, choices)
            framings = tuple(dict.fromkeys(buckets.frame(size, bucket, place) for place in places))
            if self.filters.small == "skip" and framings[0].enlarged:
                self.small.append(name)
                continue
            out.append(
                Entry(
                    name,
                    sha256,
                    caption,
                    bucket,
                    repeats,
                    size,
                    written.found,
                    framings,
                    flip,
                    written.dropout,
                    written.group,
                    scale,
                    mask,
                    mask_sha256,
                )
            )
        return out

    def _written(self, path: Path) -> Written:
        mode = self.settings.captions
        text = captions.read_text(path, self.folder, mode, self.filters.encoding) or self.index.written.get(path)
        written = self.yaml.around(path, text, mode in ("auto", "yaml"))
        if mode == "yaml" and not written.found:  # EveryDream2's last resort
            self.file_names += 1
            return self.yaml.around(path, Written(lines=(path.stem.split("_")[0],), found=True), False)
        return written

    def _tags(self, written: Written) -> list[str]:
        return list(written.tags) or tags.split(" ".join(written.lines))

    def _caption(self, written: Written) -> Caption:
        settings, chosen = self.settings, self.filters
        if chosen.shuffle_tag_p is None:
            shuffle = float(settings.shuffle_tags)
        else:
            shuffle = chosen.shuffle_tag_p
        rules = Rules(
            chosen.tag_separator,
            settings.keep_tags + written.main,
            shuffle if written.shuffle is None else float(written.shuffle),
            settings.tag_dropout,
            chosen.wildcards,
            self.lists,
            chosen.non_caption_tags,
            chosen.replacements,
            written.max_length,
            chosen.keep_separator,
            chosen.trigger,
            chosen.caption_prefix,
            chosen.caption_suffix,
        )
        scored = chosen.score_tag(written.score)
        if written.weights:
            weights = (*written.weights, *(1.0 for _ in scored))
        else:
            weights = ()
        if scored and written.lines:
            return Caption((), (*tags.split(" ".join(written.lines)), *scored), (), rules)
        return Caption(written.lines, (*written.tags, *scored), weights, rules)

    def _whole(self, path: Path, sha256: str) -> tuple[tuple[int, int], bool]:
        """((width, height), whether it has transparency) of a picture that can be read to its end."""
        if self.cache is None:
            known = None
        else:
            known = self.cache.read("pictures", sha256)
        if known is not None:
            (width, height), alpha = known[1]
            return (width, height), alpha
        picture, mask = images.open_picture(path)
        if self.cache is not None:
            self.cache.write("pictures", sha256, {}, [list(picture.size), mask is not None])
        return picture.size, mask is not None

    def _places(self, sha256: str) -> list[tuple[float, float]]:
        """Where the picture may be cut: one place, or some that its contents draw."""
        if self.filters.crop == "random":
            drawn = generator(0, 0, f"crops {sha256}")
            return [(x, y) for x, y in torch.rand(self.filters.crops, 2, generator=drawn).tolist()]
        return [(0.5, 0.0 if self.filters.crop == "top" else 0.5)]

    def _mask(self, path: Path, alpha: bool) -> tuple[str, str]:
        wanted = self.filters.masks
        if wanted in ("files", "both"):
            file = images.mask_file(path, self.folder)
        else:
            file = None
        if file is None:
            if alpha and wanted in ("alpha", "both"):
                return ("alpha", "alpha")
            return ("", "")
        try:
            images.open_mask(file)
        except ValueError as error:
            raise ValueError(f"its mask {file.name} cannot be used: {error}") from error
        return file.relative_to(self.folder).as_posix(), content_hash(file)

    def notes(self, entries: Sequence[Entry]) -> list[str]:
        """What deserves a word beside the problems."""
        entries = once(entries)
        lines = [f"{count} left out {reason}" for reason, count in sorted(self.unwanted.items()) if count]
        if self.small:
            lines.append(f"{len(self.small)} left out, smaller than their bucket (small: skip): {some(self.small)}")
        if self.file_names:
            lines.append(
                f"{self.file_names} captions are file names up to the first underscore, as EveryDream2 takes them"
            )
        same = [names for names in _by(entries, lambda e: e.sha256).values() if len(names) > 1]
        lines += _few([f"the same picture {len(names)} times: {some(names)}" for names in same])
        named = [names for names in _by(entries, lambda e: e.name.rpartition(".")[0]).values() if len(names) > 1]
        lines += _few(
            [f"one name for {len(names)} pictures, so one caption file too: {some(names)}" for names in named]
        )
        if not self.filters.wildcards:
            wild = [e.name for e in entries if any(map(tags.looks_wild, e.caption.lines + e.caption.tags))]
            if wild:
                lines.append(
                    f"{len(wild)} captions have {{a|b}} as it is; wildcards: true in filters makes choices of it:"
                    f" {some(wild)}"
                )
            if (self.folder / wildcards.FOLDER).is_dir():
                lines.append(
                    f"{wildcards.FOLDER} is not used; with wildcards: true in filters __name__ is a line of its"
                    " name.txt"
                )
        return lines + self.said


def once(entries: Iterable[Entry]) -> list[Entry]:
    """One entry of each picture, whatever its resolutions."""
    return list({entry.name: entry for entry in entries}.values())


def _by(entries: Sequence[Entry], key: Any) -> dict[Any, list[str]]:
    out: dict[Any, list[str]] = {}
    for entry in entries:
        out.setdefault(key(entry), []).append(entry.name)
    return out


def _few(lines: list[str]) -> list[str]:
    return lines[:5] + ([f"and {len(lines) - 5} more like this"] if len(lines) > 5 else [])


def some(names: Sequence[str]) -> str:
    """The first five of some names."""
    return ", ".join(names[:5]) + (" …" if len(names) > 5 else "")
