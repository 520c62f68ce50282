"""LunNova's layout (translunar-diffusion, `metadata/**/*.json`): one JSON file per image, with tags, score and path."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Any

from ....storage.bounded_read import MB, read_json
from ....storage.file_list import files_below
from .. import images
from ..captions import WrittenCaption
from ..file_names import FolderNames, is_of_system
from ..filters import Filters
from ..tags import split_template
from ..yaml_values import shorten
from .layout import CaptionReader, DatasetLayout

_MOST_BYTES = 64 * MB  # of a JSON file


class JsonIndex(CaptionReader):
    """Reads every nth JSON file below the folder (`consider_every_nth`), in the order of their paths.

    With `chosen`, JSON files that describe no image are problems; otherwise they may be anything, and all are read, so
    that the images of the files between are known as those that are passed over.
    """

    def __init__(self, folder: Path, every_nth: int, chosen: bool) -> None:
        self.folder = folder
        self._names = FolderNames()
        self._captions: dict[Path, WrittenCaption] = {}
        self._better: set[Path] = set()  # pictures of preference pairs that have a file of the pair's name
        problems: list[str] = []
        passed_over: set[Path] = set()
        for number, file in enumerate(_json_files(folder)):
            is_passed_over = number % every_nth != 0
            if chosen and is_passed_over:
                continue
            try:
                described = self._read_file(file, chosen)
                if is_passed_over:
                    passed_over |= described
            except ValueError as error:
                problems.append(f"{file.relative_to(folder).as_posix()}: {error}")
        self.problems = tuple(problems)
        self.listed_images = frozenset(self._captions) | self._better
        self.passed_over = frozenset(passed_over)

    def read(self, image: Path) -> WrittenCaption | None:
        return self._captions.get(image)

    def _read_file(self, file: Path, chosen: bool) -> set[Path]:
        """The images that a file describes: one, none, or a pair's better one with the name of both."""
        record = _load_record(file)
        if record is not None:
            image = _described_image(file, self.folder, record, self._names)
            described: set[Path] = set()
            if image is None:
                image, better = self._described_pair(file)
                described.add(better)
            described.add(image)
            if image in self._captions:
                raise ValueError(
                    f"describes {image.relative_to(self.folder).as_posix()}, which another JSON file does already; not"
                    " used"
                )
            tags = record["tags"]
            if isinstance(tags, str):
                tags = split_template(tags)
            stripped = (str(tag).strip() for tag in tags)
            self._captions[image] = WrittenCaption(
                tags=tuple(tag for tag in stripped if tag), found=True, score=_score_of(record)
            )
            return described
        if chosen:
            raise ValueError('expected an object with tags, as {"tags": [...], "score": 55, "path": "a.png"}')
        return set()

    def _described_pair(self, file: Path) -> tuple[Path, Path]:
        """(the name that stands for a preference pair of the file's name, its better picture)."""
        from ..preference_files import LOSE, WIN, caption_paths

        better, worse = (
            _picture_beside(file.with_name(f"{file.stem}.{side}.json"), self._names) for side in (WIN, LOSE)
        )
        if better is None or worse is None:
            raise ValueError("has no path, and no picture of its name lies beside it")
        self._better.add(better)
        return caption_paths(better)[-1], better


def _is_json(name: str) -> bool:
    return name.lower().endswith(".json") and not name.startswith(".")


def _json_files(folder: Path) -> list[Path]:
    """Every JSON file below the folder, outside of hidden folders, in the order of their paths."""
    by_name: dict[str, Path] = {}
    for path, _ in files_below(folder, _is_json):
        relative = path.relative_to(folder)
        if not any(map(is_of_system, relative.parts)):
            by_name[relative.as_posix()] = path
    return [path for _, path in sorted(by_name.items())]


def _load_record(file: Path) -> dict[str, Any] | None:
    """The JSON object of a file that describes an image, None for another file."""
    record = read_json(file, _MOST_BYTES, has_comments=True)
    if isinstance(record, dict) and isinstance(record.get("tags"), list | str):
        return record
    return None


def _picture_beside(file: Path, names: FolderNames) -> Path | None:
    """The picture of a JSON file's name."""
    return names.find_beside(file, images.SUFFIXES)


def _described_image(file: Path, folder: Path, record: dict[str, Any], names: FolderNames) -> Path | None:
    """The image that a JSON file describes: at `path`, relative to the folder, or of the same name beside the file.
    None without either.
    """
    if "path" not in record:
        return _picture_beside(file, names)
    relative = PurePosixPath(str(record["path"]).replace("\\", "/"))
    if relative.is_absolute() or ".." in relative.parts or ":" in str(relative):
        raise ValueError(f"path {record['path']!r} leaves the dataset's folder; give one relative to it")
    image = names.first([folder.joinpath(*relative.parts)])
    if image is None:
        raise ValueError(f"path {record['path']!r} names no file below the dataset's folder")
    return image


def _score_of(record: dict[str, Any]) -> float | None:
    score = record.get("score")
    if score is None:
        return None
    if isinstance(score, bool) or not isinstance(score, int | float) or not abs(score) < 1e300:
        raise ValueError(f"score is {shorten(score)}, expected a finite number")
    return float(score)


def _recognize(folder: Path) -> bool:
    return bool(JsonIndex(folder, 1, False).listed_images)


def _open(folder: Path, filters: Filters, chosen: bool) -> CaptionReader:
    return JsonIndex(folder, filters.consider_every_nth, chosen)


LAYOUT = DatasetLayout(
    name="json",
    title="one JSON file per image (LunNova)",
    hint="one JSON per image (tags, score, path)",
    documentation=(
        'one JSON file per image, anywhere below the folder: `{"tags": ["solo", "kirin"], "score": 55, "path":'
        ' "images/1.png"}`. `path` is relative to the dataset\'s folder. Without `path`, the file describes the image'
        " with the same name beside it. Images without a JSON file are left out. The file can have comments (`# …`)."
    ),
    suffixes=(".json",),
    recognize=_recognize,
    open=_open,
    has_scores=True,
    unlisted_reason="that no JSON file describes",
)
