"""Reads a folder of captioned images: lists, checks, sorts into buckets, splits into training and held-out images."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...settings.declaration import raise_errors
from ...storage.problem_list import problem_lines
from ..random_draws import generator
from . import clip_files, clip_parts, clips, control_methods, folder_notes, images, validation_split, wildcards
from .buckets import Framing, frame, nearest_bucket, shrunk_bucket
from .cache import Cache
from .captions import WrittenCaption, most_lines
from .changed_files import content_hash, recall_hashes
from .clips import ClipInfo, NoClipsError
from .control_files import MOST_CONTROLS, Pairs, find_pairs, pairs_in_folders
from .file_names import FolderNames, is_text, printable
from .folder_settings import ConfigSubset, FolderSettings
from .layouts import kohya_metadata_json, kohya_txt, registry
from .layouts.kohya_metadata_json import MetadataCaptions
from .layouts.layout import CaptionReader, DatasetLayout, ImageSettingsReader, kohya_class_words
from .listing import ControlPicture, FolderListing, ImageEntry, first_names, unique_images
from .musubi_jsonl import ListedCaptions, listed_pairs
from .preference_files import caption_paths, find_preferences
from .tags import Caption, CaptionRules, split_tags

if TYPE_CHECKING:
    from PIL import Image

MOST_FOLDER_REPEATS = 10_000
_FACTS_IN_PACK = 1024  # pictures
MOST_SHOWN = 10_000_000  # images in an epoch, with repeats


def read_folder(
    folder: Path, settings: FolderSettings, cache: Cache | None = None, check: Callable[[], object] = lambda: None
) -> FolderListing:
    """List a folder; unreadable images and clips are problems, not errors.

    The held-out share is chosen by content hash, so it does not depend on names or order: at least one image of two,
    never all. Equal pictures are all held out or all trained on, and so are the parts of a clip.

    Args:
        folder: the dataset's.
        settings: how it is read.
        cache: pictures whose contents it knows to be whole are not decoded again.
        check: called now and then; it may end the reading with an error.

    Raises:
        ValueError: where no picture can be used, or settings have no effect here.
    """
    if cache is not None:
        recall_hashes(cache, folder)
    reader = _FolderReader(folder, settings, cache, check)
    entries: list[ImageEntry] = []
    try:
        for path in reader.image_paths():
            check()
            entries += reader.entries(path)
    finally:
        reader.keep_facts()
    problems = reader.all_problems()
    notes = reader.notes(entries)
    if not entries:
        lines = problem_lines([*problems, *notes], "  ")
        raise ValueError(f"Dataset: no picture in folder {folder.name!r} can be used:\n{lines}")
    _refuse_endless_epochs(folder, entries)
    held_out = _held_out_names(entries, settings.validation)
    _refuse_settings_without_effect(settings, entries)
    return FolderListing(
        folder,
        tuple(entry for entry in entries if entry.name not in held_out),
        tuple(entry for entry in entries if entry.name in held_out),
        tuple(problems),
        settings,
        tuple(notes),
    )


@dataclass(frozen=True)
class FolderGlance:
    """What a folder looks like from the headers of its pictures, before anything runs.

    `listing` has every picture to train on, as which ones are held out depends on their contents; `held_out` is how
    many that will be. `refusal` is why a run refuses the folder, "" if it does not. `found` counts the pictures there
    are, `seen` those that were looked at.
    """

    listing: FolderListing
    found: int
    seen: int
    held_out: int
    refusal: str


def glance_at_folder(folder: Path, settings: FolderSettings, most: int, seconds: float, only: str = "") -> FolderGlance:
    """List a folder from the headers of its pictures.

    Args:
        folder: the dataset's.
        settings: how it is read.
        most: how many pictures are looked at.
        seconds: for about how long.
        only: looks at the picture of that name alone.

    Raises:
        ValueError: where there are none.
    """
    reader = _HeaderReader(folder, settings, None)
    paths = reader.image_paths()
    if only:
        paths = [path for path in paths if path.relative_to(folder).as_posix() == only]
    end = time.monotonic() + seconds
    entries: list[ImageEntry] = []
    seen = 0
    for path in paths[:most]:
        if time.monotonic() > end:
            break
        entries += reader.entries(path)
        seen += 1
    problems, notes = reader.all_problems(), reader.notes(entries)
    refusal = ""
    if seen == len(paths) and not only:
        refusal = _refusal(folder, settings, entries)
    listing = FolderListing(folder, tuple(entries), (), tuple(problems), settings, tuple(notes))
    held_out = 0
    if entries:
        held_out = len(_held_out_names(entries, settings.validation))
    return FolderGlance(listing, len(paths), seen, held_out, refusal)


def _refusal(folder: Path, settings: FolderSettings, entries: Sequence[ImageEntry]) -> str:
    if not entries:
        return f"Dataset: no picture in folder {folder.name!r} can be used."
    try:
        _refuse_endless_epochs(folder, entries)
        _refuse_settings_without_effect(settings, entries)
    except ValueError as error:
        return str(error)
    return ""


def training_pictures(folder: Path, settings: FolderSettings) -> Pairs:
    """The images and clips below a folder with their control pictures and the worse pictures of preference pairs.

    Raises ValueError when there are none, and for pairs without one of their pictures.
    """
    paths = pictures_in(folder, settings.takes_clips)
    conditions: list[Path] = []
    if settings.control_pictures in (control_methods.AUTO, control_methods.OFF):
        # OneTrainer makes them for every model and shows them to those alone that take them.
        conditions = [path for path in paths if images.is_condition(path)]
        paths = [path for path in paths if not images.is_condition(path)]
    if settings.control_pictures == control_methods.OFF:
        pairs = Pairs(paths)
    else:
        pairs = find_pairs(paths, folder)
    preferences = find_preferences(pairs.images)
    pairs.images, pairs.worse, pairs.conditions = preferences.images, preferences.worse, conditions
    return pairs


def pictures_in(folder: Path, clips: bool = False) -> list[Path]:
    """Every picture below a folder, with `clips` those too. Raises ValueError when there are none."""
    if clips:
        paths = clip_files.find_pictures_and_clips(folder)
        expected = ", ".join((*images.SUFFIXES, *clip_files.SUFFIXES))
    else:
        paths = images.find_images(folder)
        expected = ", ".join(images.SUFFIXES)
    if paths:
        return paths
    closed = images.closed_folders(folder)
    if closed:
        raise ValueError(
            f"Dataset: no pictures were found, and these folders cannot be opened: {first_names(closed)}. Grant the"
            " right to read them, or choose another folder."
        )
    found = clip_files.find_clips(folder)
    if found:
        raise ValueError(
            f"Dataset: folder {folder.name!r} has clips and no pictures, as {found[0].name}: set frames of clips, to 17"
            " for example, to train on them with a video model."
        )
    raise ValueError(
        f"Dataset: folder {folder.name!r} has no pictures (expected {expected}). Put some there, or choose another"
        " folder."
    )


def _held_out_names(entries: Sequence[ImageEntry], share: float) -> set[str]:
    return validation_split.choose_held_out(validation_split.contents(unique_images(entries)), share)


def _refuse_endless_epochs(folder: Path, entries: Sequence[ImageEntry]) -> None:
    """Raise ValueError for repeats that nobody means, as of a year at the start of a folder's name."""
    for entry in entries:
        if entry.folder_repeats > MOST_FOLDER_REPEATS:
            parents = (folder / entry.name).parent.relative_to(folder.parent).as_posix()
            raise ValueError(
                f"Dataset: the name of the folder {parents} says {entry.folder_repeats:,} repeats of each image,"
                f" as kohya's 10_name says 10; expected at most {MOST_FOLDER_REPEATS:,}. Rename it, so that it does"
                " not begin with that number."
            )
    shown = sum(entry.repeats for entry in entries)
    if shown > MOST_SHOWN:
        most = max(entries, key=lambda entry: entry.repeats)
        raise ValueError(
            f"Dataset: with repeats an epoch shows {shown:,.0f} images, expected at most {MOST_SHOWN:,}. Lower"
            f" repeats, the numbers in front of folder names or multiply; {most.name} alone is shown"
            f" {most.repeats:,.0f} times."
        )


def _refuse_settings_without_effect(settings: FolderSettings, entries: Sequence[ImageEntry]) -> None:
    """Raise ValueError for settings that could change nothing here."""
    errors: list[str] = []
    if settings.keep_tags and not any(entry.caption.rules.moves_tags for entry in entries):
        errors.append(
            "keep first tags has no effect where no tags are shuffled or dropped; set shuffle tags or tag dropout, or"
            " keep first tags to 0"
        )
    if settings.filters.masks in ("alpha", "both") and not any(entry.mask for entry in entries):
        errors.append(f"masks is {settings.filters.masks}, but no picture is transparent or has a mask file")
    raise_errors("Dataset", errors)


class _FolderReader:
    """Reads the entries of one folder and collects problems and notes on the way."""

    def __init__(
        self,
        folder: Path,
        settings: FolderSettings,
        cache: Cache | None,
        check: Callable[[], object] = lambda: None,
    ) -> None:
        self.check = check
        self.folder, self.settings, self.filters, self.cache = folder, settings, settings.filters, cache
        self.counts = folder_notes.Counts()
        self._problems: list[str] = []
        self._facts: dict[str, tuple[dict[str, Tensor], Any]] = {}  # of pictures, not yet in the cache
        self._rules_made: dict[tuple[int, float, int], CaptionRules] = {}  # by what captions set: equal ones are one
        self._pairs, self._unpaired = Pairs([]), set[Path]()
        self._word_lists = wildcards.NO_LISTS
        if self.filters.wildcards:
            self._word_lists, self._problems = wildcards.read_word_lists(folder, self.filters.encoding)
        is_chosen = settings.captions != registry.AUTO
        self._selected = registry.find_layouts(settings.captions)
        self._readers = [(layout, layout.open(folder, self.filters, is_chosen)) for layout in self._selected]
        self._fallback: tuple[DatasetLayout, CaptionReader] | None = None
        if is_chosen:
            self._fallback = self._readers[0]
        self._metadata: MetadataCaptions | None = None
        if settings.subset is not None:
            self._read_as_subset(settings.subset)
        self._settings_readers: list[tuple[DatasetLayout, ImageSettingsReader]] = []
        for layout in registry.LAYOUTS:
            if layout.open_settings is not None:
                self._settings_readers.append((layout, layout.open_settings(folder, self.filters)))
        self._buckets = settings.bucket_choices()
        self._has_masks, self._names = images.has_masks(folder), FolderNames()

    def _read_as_subset(self, subset: ConfigSubset) -> None:
        """Take the captions from where a subset of kohya's dataset_config.toml says, if it does."""
        lines = most_lines(self.filters.wildcards)
        if subset.metadata_file:
            self._metadata = MetadataCaptions.of_file(self.folder, Path(subset.metadata_file), lines)
            self._read_alone(kohya_metadata_json.LAYOUT, self._metadata)
        elif subset.listed:
            self._read_alone(kohya_txt.LAYOUT, ListedCaptions(subset.listed))
        elif subset.caption_extension:
            reader = kohya_txt.TextFiles(self.filters.encoding, lines, (subset.caption_extension,))
            self._read_alone(kohya_txt.LAYOUT, reader)

    def _read_alone(self, layout: DatasetLayout, reader: CaptionReader) -> None:
        self._selected, self._readers, self._fallback = (layout,), [(layout, reader)], None

    def _paths_of_subset(self, subset: ConfigSubset) -> list[Path]:
        """The images that lie directly in the folder; of those, the ones that a metadata JSON names. Or those that a
        JSONL file lists.
        """
        if subset.listed:
            self._pairs = listed_pairs(subset.listed, self.settings.control_pictures != control_methods.OFF)
            return self._pairs.images[:: self.filters.consider_every_nth]
        self._pairs = training_pictures(self.folder, self.settings)
        if subset.control_folders and self.settings.control_pictures != control_methods.OFF:
            images_here = [path for path in self._pairs.images if path.parent == self.folder]
            others = [pictures_in(Path(folder)) for folder in subset.control_folders]
            before = self._pairs
            self._pairs = pairs_in_folders(images_here, others)
            self._pairs.worse, self._pairs.conditions = before.worse, before.conditions
        paths = [path for path in self._pairs.images if path.parent == self.folder]
        if not paths:
            raise ValueError(
                f"Dataset: image_dir {self.folder.name!r} has no pictures directly in it, as dataset_config.toml wants"
                " them; write a subset for each folder below it."
            )
        if self._metadata is None:
            return paths[:: self.filters.consider_every_nth]
        described = [path for path in paths if self._metadata.describes(path)]
        self.counts.left_out["that metadata_file does not name"] += len(paths) - len(described)
        return described

    def image_paths(self) -> list[Path]:
        """The images to consider. Raises ValueError when there are none."""
        paths = self._consider()
        pairs = self._pairs
        self.counts.conditions += map(self._name, pairs.conditions)
        for path in pairs.unused:
            self._problems.append(
                f"{self._name(path)}: no image uses this control picture: none has its name, or it has"
                f" {MOST_CONTROLS} already"
            )
        self._unpaired = {path for path in paths if pairs.controls and path not in pairs.controls}
        return paths

    def _name(self, path: Path) -> str:
        """A path relative to the folder; control pictures may lie beside it."""
        return Path(os.path.relpath(path, self.folder)).as_posix()

    def _consider(self) -> list[Path]:
        if self.settings.subset is not None:
            return self._paths_of_subset(self.settings.subset)
        self._pairs = training_pictures(self.folder, self.settings)
        paths = self._pairs.images
        listed: set[Path] = set()
        for _, reader in self._readers:
            listed |= reader.listed_images or set()
        unlisted_reason = self._selected[0].unlisted_reason
        if self._fallback is not None and unlisted_reason:
            selected = [path for path in paths if path in listed]
            self.counts.left_out[unlisted_reason] += len(paths) - len(selected)
            return selected
        selected = self._every_nth(paths)
        self.counts.left_out["by consider_every_nth"] += len(paths) - len(selected)
        return selected

    def _every_nth(self, paths: Sequence[Path]) -> list[Path]:
        """Every nth image; of those that index files list, the images of every nth file."""
        listed: set[Path] = set()
        passed_over: set[Path] = set()
        for _, reader in self._readers:
            if reader.passed_over is not None:
                listed |= reader.listed_images or set()
                passed_over |= reader.passed_over
        others = [path for path in paths if path not in listed]
        kept = (listed - passed_over).union(others[:: self.filters.consider_every_nth])
        return [path for path in paths if path in kept]

    def all_problems(self) -> list[str]:
        """Errors of files that were left out, as "file: what is wrong"."""
        problems: list[str] = []
        for _, reader in self._readers:
            problems += reader.problems
        for _, settings_reader in self._settings_readers:
            problems += settings_reader.problems
        return problems + self._problems

    def notes(self, entries: Sequence[ImageEntry]) -> list[str]:
        """Lines for the report, beside the problems."""
        return folder_notes.write_notes(self.folder, self.settings, self.counts, entries)

    def entries(self, path: Path) -> list[ImageEntry]:
        """An image's entries, one per resolution. None of them when it is left out, for a problem or by a filter."""
        name = path.relative_to(self.folder).as_posix()
        try:
            return self._read_image(path, name)
        except NoClipsError:
            raise
        except ValueError as error:
            self._problems.append(f"{name}: {error}")
        except OSError as error:
            file = Path(os.fsdecode(error.filename or path))
            other = "" if file == path else f"{file.name}: "  # its caption, mask or control picture
            self._problems.append(f"{name}: {other}{error.strerror or error}")
        return []

    def _read_image(self, path: Path, name: str) -> list[ImageEntry]:
        if name in self.filters.leave_out:
            self.counts.left_out["by leave_out"] += 1
            return []
        layout, image_caption = self._written_caption(path)
        caption = self._caption(image_caption)
        if self.filters.wildcards:
            self._word_lists.check(" ".join(caption.texts))
        _refuse_broken_characters(caption)
        _ = caption.plain  # a caption that cannot be expanded fails here, as this image's problem
        folder_repeats = 1
        if self.settings.subset is None:
            folder_repeats = layout.repeats(path, self.folder)
        reason = self._reason_to_skip(image_caption)
        if folder_repeats == 0:
            reason = "with 0 repeats by folder name, as kohya's 0_name"
        if reason:
            self.counts.left_out[reason] += 1
            return []
        sha256 = self._content_hash(path)
        size, has_alpha, parts = self._contents(path, name, sha256)
        mask = self._mask(layout, path, has_alpha, size)
        controls = self._controls(path, size)
        worse = self._worse(path, size, sha256)
        self.counts.add_notes(image_caption.notes)
        entries: list[ImageEntry] = []
        for bucket, framings in self._framings(sha256, size):
            if self.filters.small == "skip" and framings[0].enlarged:
                self.counts.too_small.append(name)
                continue
            mask.check(framings)
            whole = ImageEntry(
                name,
                sha256,
                caption,
                bucket,
                repeats=self.settings.repeats * folder_repeats * _or_default(image_caption.multiply, 1.0),
                size=size,
                captioned=image_caption.found,
                framings=framings,
                flip=_or_default(image_caption.flip, self.settings.flip),
                dropout=image_caption.dropout,
                batch_id=image_caption.batch_id,
                loss_scale=_or_default(image_caption.loss_scale, 1.0),
                mask=mask.name,
                mask_sha256=mask.sha256,
                folder_repeats=folder_repeats,
                controls=controls,
                worse=worse,
            )
            for part in parts:
                entries.append(replace(whole, frames=part) if part else whole)
        return entries

    def _contents(self, path: Path, name: str, sha256: str) -> tuple[tuple[int, int], bool, list[tuple[int, ...]]]:
        """((width, height), whether it has transparency, the frames of each part of a clip; of a picture one part
        without frames).
        """
        if not self.settings.takes_clips or not clips.is_clip(path):
            return *self._size_and_alpha(path, sha256), [()]
        if not self.settings.frame_step:
            raise NoClipsError(
                f"Dataset: {name} is a clip, and this VAE encodes pictures only. Connect the VAE of a video model, as"
                " Wan, HunyuanVideo or LTX-Video, and train that; or set frames of clips to 0."
            )
        info = self._clip_info(path, sha256)
        return info.size, False, self._parts(name, info)

    def _parts(self, name: str, info: ClipInfo) -> list[tuple[int, ...]]:
        """The frames of each part of a clip."""
        settings, filters = self.settings, self.filters
        shown = clip_parts.resample(info.ticks, info.per_second, settings.frame_rate)
        if settings.frame_rate and not info.per_second:
            self.counts.without_rate.append(name)
        parts = clip_parts.split_frames(
            len(shown),
            settings.frame_counts,
            settings.clip_part,
            filters.frame_sample,
            filters.frame_stride,
            max(1, settings.frame_step),
        )
        if len(parts) > clip_parts.MOST_PARTS:
            raise ValueError(
                f"it gives {len(parts):,} parts, expected at most {clip_parts.MOST_PARTS:,}; raise frames of clips or"
                " frame_stride of filters, or cut it into shorter clips"
            )
        if not parts:
            self.counts.too_short.append(f"{name} ({len(shown)})")
        return [tuple(shown[start : start + length]) for start, length in parts]

    def _clip_info(self, path: Path, sha256: str) -> ClipInfo:
        """What a clip that can be read to its end has."""
        if self.cache is not None:
            cached = self.cache.read("clips", sha256)
            if cached is not None:
                size, ticks, per_second = cached[1]
                return ClipInfo((size[0], size[1]), tuple(ticks), per_second)
        info = clips.scan(path, self.check)
        if self.cache is not None:
            self.cache.write("clips", sha256, {}, [info.size, info.ticks, info.per_second])
        return info

    def _controls(self, path: Path, size: tuple[int, int]) -> tuple[ControlPicture, ...]:
        """The control pictures of an image of that size. Raises ValueError when one cannot be read, or when it has none
        where others have.
        """
        if path in self._unpaired:
            raise ValueError(
                f"it has no control picture, as {len(self._pairs.controls)} others have: add"
                f" {path.stem}.control{path.suffix} beside it, or move it to a dataset of its own"
            )
        controls: list[ControlPicture] = []
        for file in self._pairs.controls.get(path, ()):
            if self.settings.takes_clips and clips.is_clip(file):
                raise ValueError(
                    f"its control {file.name} is a clip, and a folder has control pictures only: connect control clips"
                    " to Samples, through the model's own node, such as WanFunControlToVideo or WanVaceToVideo"
                )
            sha256 = self._content_hash(file)
            try:
                control_size, _ = self._size_and_alpha(file, sha256)
            except ValueError as error:
                raise ValueError(f"its control picture {file.name} cannot be used: {error}") from error
            controls.append(ControlPicture(self._name(file), sha256, control_size))
            if not control_methods.has_same_shape(control_size, size):
                self.counts.other_shapes.append(self._name(file))
        return tuple(controls)

    def _worse(self, path: Path, size: tuple[int, int], sha256: str) -> ControlPicture | None:
        """The worse picture of an image of that size; None without one. ValueError when they are not a pair."""
        file = self._pairs.worse.get(path)
        if file is None:
            return None
        if self.settings.takes_clips and (clips.is_clip(path) or clips.is_clip(file)):
            raise ValueError(f"it and {file.name} are a pair, and only pictures are trained in pairs, not clips")
        worse_sha256 = self._content_hash(file)
        if worse_sha256 == sha256:
            raise ValueError(f"{file.name} is the same picture, so neither is better; replace one of them")
        try:
            worse_size, _ = self._size_and_alpha(file, worse_sha256)
        except ValueError as error:
            raise ValueError(f"its worse picture {file.name} cannot be used: {error}") from error
        if not control_methods.has_same_shape(worse_size, size):
            raise ValueError(
                f"it is {size[0]}x{size[1]} and {file.name} {worse_size[0]}x{worse_size[1]}: the pictures of a pair"
                " need one shape, as they are cropped alike; crop one of them to that of the other"
            )
        return ControlPicture(self._name(file), worse_sha256, worse_size)

    def _written_caption(self, path: Path) -> tuple[DatasetLayout, WrittenCaption]:
        """The layout that has a caption for an image (the first of those that are read, if none has), and the caption
        with the settings files on top.
        """
        layout, caption = self._selected[0], None
        for candidate, reader in self._readers:
            caption = self._read_caption(reader, path)
            if caption is not None:
                layout = candidate
                if caption.more_lines:
                    self.counts.more_lines.append(path.relative_to(self.folder).as_posix())
                break
        image_caption = self._apply_settings_files(path, caption, True)
        if not image_caption.found and self._fallback is not None:
            fallback = self._fallback[1].fallback(path)
            if fallback is not None:
                self.counts.fallbacks += 1
                image_caption = self._apply_settings_files(path, fallback, False)
        if not image_caption.found:
            image_caption = self._class_words(path, caption) or image_caption
        return layout, image_caption

    def _read_caption(self, reader: CaptionReader, path: Path) -> WrittenCaption | None:
        names: tuple[Path, ...] = (path,)
        if path in self._pairs.worse:
            names = caption_paths(path)
        for name in names:
            caption = reader.read(name)
            if caption is not None:
                return caption
        return None

    def _class_words(self, path: Path, caption: WrittenCaption | None) -> WrittenCaption | None:
        """The words of kohya's class folder as the caption that no file gives, with the settings files on top."""
        words = kohya_class_words(path, self.folder)
        if self.settings.subset is not None:
            words = self.settings.subset.class_tokens
        if not words:
            return None
        if not is_text(words):
            self.counts.add_notes(
                [f"'{printable(words)}' of a folder's name is not a caption, as it is not UTF-8: rename the folder"]
            )
            return None
        self.counts.class_words.add(path.relative_to(self.folder).as_posix())
        words_caption = replace(caption or WrittenCaption(), lines=(words,), found=True)
        return self._apply_settings_files(path, words_caption, True)

    def _apply_settings_files(self, path: Path, caption: WrittenCaption | None, own_file: bool) -> WrittenCaption:
        for layout, reader in self._settings_readers:
            caption = reader.apply(path, caption, own_file and layout in self._selected)
        return caption or WrittenCaption()

    def _reason_to_skip(self, written: WrittenCaption) -> str | None:
        tags = list(written.tags) or [tag for line in written.lines for tag in split_tags(line)]
        reason = self.filters.reason_to_skip(tags, written.score)
        if reason is None and written.multiply == 0:
            return "with multiply 0"
        return reason

    def _caption(self, written: WrittenCaption) -> Caption:
        rules = self._rules(written)
        score_tag = self.filters.score_tag(written.score)
        if score_tag and written.lines:
            return Caption((), (*split_tags(" ".join(written.lines)), *score_tag), (), rules)
        weights = written.weights
        if weights:
            weights += (1.0,) * len(score_tag)
        if rules.moves_tags and written.lines:
            return self._add_moving_prefix(written.lines, rules)
        return Caption(written.lines, written.tags + score_tag, weights, rules)

    def _add_moving_prefix(self, lines: Sequence[str], rules: CaptionRules) -> Caption:
        """The lines with prefix and suffix as part of them, so that their tags move and count as kohya's do."""
        whole: list[str] = []
        for line in lines:
            whole.append(" ".join(part for part in (rules.prefix, line, rules.suffix) if part))
        return Caption(tuple(whole), rules=replace(rules, prefix="", suffix=""))

    def _rules(self, written: WrittenCaption) -> CaptionRules:
        filters = self.filters
        shuffle = _or_default(filters.shuffle_tag_p, float(self.settings.shuffle_tags))
        if written.shuffle is not None:
            shuffle = float(written.shuffle)
        of_caption = self.settings.keep_tags + written.prompt_tags, shuffle, written.max_length
        rules = self._rules_made.get(of_caption)
        if rules is None:
            rules = self._rules_made[of_caption] = self._new_rules(*of_caption)
        return rules

    def _new_rules(self, keep: int, shuffle: float, max_length: int) -> CaptionRules:
        filters = self.filters
        return CaptionRules(
            separator=filters.tag_separator,
            keep=keep,
            shuffle=shuffle,
            dropout=self.settings.tag_dropout,
            wildcards=filters.wildcards,
            lists=self._word_lists,
            left_out=filters.non_caption_tags,
            replacements=filters.replacements,
            max_length=max_length,
            keep_separator=filters.keep_separator,
            trigger=filters.trigger,
            prefix=filters.caption_prefix,
            suffix=filters.caption_suffix,
        )

    def _content_hash(self, path: Path) -> str:
        return content_hash(path)

    def _size_and_alpha(self, path: Path, sha256: str) -> tuple[tuple[int, int], bool]:
        """((width, height), whether it has transparency) of an image that can be read to its end."""
        if self.cache is not None:
            cached = self.cache.read("pictures", sha256)
            if cached is not None:
                (width, height), has_alpha = cached[1]
                return (width, height), has_alpha
        image, alpha = images.open_image(path)
        self._facts[sha256] = {}, [list(image.size), alpha is not None]
        if len(self._facts) >= _FACTS_IN_PACK:
            self.keep_facts()
        return image.size, alpha is not None

    def keep_facts(self) -> None:
        """Write what was found out about pictures into the cache."""
        if self.cache is not None:
            self.cache.write_together("pictures", self._facts)
        self._facts = {}

    def _framings(self, sha256: str, size: tuple[int, int]) -> list[tuple[tuple[int, int], tuple[Framing, ...]]]:
        """The bucket of an image at each resolution, with its crops there."""
        framings_by_bucket: list[tuple[tuple[int, int], tuple[Framing, ...]]] = []
        positions = self._crop_positions(sha256)
        if self.settings.no_upscale:  # an image that is smaller than several resolutions has one bucket for them
            by_bucket: dict[tuple[int, int], tuple[Framing, ...]] = {}
            for resolution in self.settings.resolutions:
                bucket, scaled = shrunk_bucket(size, resolution, self.settings.bucket_step)
                framings = dict.fromkeys(frame(size, bucket, position, scaled) for position in positions)
                by_bucket.setdefault(bucket, tuple(framings))
            return list(by_bucket.items())
        for choices in self._buckets:
            bucket = nearest_bucket(*size, choices)
            framings = dict.fromkeys(frame(size, bucket, position) for position in positions)
            framings_by_bucket.append((bucket, tuple(framings)))
        return framings_by_bucket

    def _crop_positions(self, sha256: str) -> list[tuple[float, float]]:
        """Where the image may be cropped: one position, or several that its contents draw."""
        if self.filters.crop == "random":
            rng = generator(0, 0, f"crops {sha256}")
            return [(x, y) for x, y in torch.rand(self.filters.crops, 2, generator=rng).tolist()]
        if self.filters.crop == "top":
            return [(0.5, 0.0)]
        return [(0.5, 0.5)]

    def _mask_file(self, layout: DatasetLayout, path: Path) -> Path | None:
        if layout.mask_file is not images.mask_file:
            return layout.mask_file(path, self.folder)
        if self._has_masks:
            return images.mask_file(path, self.folder, self._names)
        return None

    def _mask(self, layout: DatasetLayout, path: Path, has_alpha: bool, size: tuple[int, int]) -> _Mask:
        """The mask of a picture of that size. Raises ValueError when it cannot be used."""
        file = None
        if self.filters.masks in ("files", "both"):
            file = self._mask_file(layout, path)
        if file is None:
            if has_alpha and self.filters.masks in ("alpha", "both"):
                return _Mask("alpha", "alpha", "its transparency", images.open_image(path)[1])
            return _Mask()
        try:
            pixels, is_alpha = images.open_mask(file)
        except ValueError as error:
            raise ValueError(f"its mask {file.name} cannot be used: {error}") from error
        if not control_methods.has_same_shape(pixels.size, size):
            raise ValueError(_other_shape(file, pixels.size, size))
        name = file.relative_to(self.folder).as_posix()
        if is_alpha:
            self.counts.alpha_masks.append(name)
        return _Mask(name, self._content_hash(file), f"its mask {file.name}", pixels)


@dataclass(frozen=True)
class _Mask:
    """The mask of one picture: `ImageEntry.mask`, its content hash, what messages call it, and its pixels as L."""

    name: str = ""
    sha256: str = ""
    called: str = ""
    pixels: Image.Image | None = None

    def check(self, framings: Sequence[Framing]) -> None:
        """Raise ValueError where nothing of a picture would be trained: the mask is black in all of its crops."""
        if self.pixels is None:
            return
        remedy = "white is what is trained: draw it there, or take the mask away to train on the whole picture"
        if self.name == "alpha":
            remedy = "what is opaque is trained: take the transparency away, or set masks to off for this dataset"
        brightest = images.brightest(self.pixels)
        if brightest < images.LEAST_WHITE:
            raise ValueError(
                f"{self.called} is black everywhere (its brightest pixel is {brightest} of 255), so nothing of the"
                f" picture would be trained; {remedy}"
            )
        if all(images.brightest(self.pixels, framing) < images.LEAST_WHITE for framing in framings):
            width, height = framings[0].target
            raise ValueError(
                f"{self.called} is black in all that the bucket {width}x{height} shows of the picture, so nothing would"
                f" be trained; {remedy}"
            )


def _other_shape(mask: Path, mask_size: tuple[int, int], size: tuple[int, int]) -> str:
    """What is wrong with a mask of another shape than its picture."""
    said = (
        f"its mask {mask.name} is {mask_size[0]}x{mask_size[1]} and the picture {size[0]}x{size[1]}: a mask needs the"
        " shape of its picture; "
    )
    if control_methods.has_same_shape(mask_size, (size[1], size[0])):
        return said + "turn the mask on its side, as the EXIF of the picture turns that, or save both without EXIF"
    return said + "draw it on the picture, or take it away"


class _HeaderReader(_FolderReader):
    """Reads no more of a picture than its header; the place of a file stands for its contents."""

    def _content_hash(self, path: Path) -> str:
        return str(path)

    def _size_and_alpha(self, path: Path, sha256: str) -> tuple[tuple[int, int], bool]:
        return images.open_header(path)

    def _clip_info(self, path: Path, sha256: str) -> ClipInfo:
        return clips.read_header(path)


def _refuse_broken_characters(caption: Caption) -> None:
    """Raise ValueError for a caption that no tokenizer reads."""
    broken = next((text for text in caption.texts if not is_text(text)), None)
    if broken is not None:
        raise ValueError(
            f"its caption '{printable(broken)}' has broken characters, as from the name of a file or folder that is"
            " not UTF-8: rename that, or write the caption into a file"
        )


def _or_default(value: float | None, default: float) -> float:
    if value is None:
        return default
    return value
