"""One JSON file a picture with tags, score and path: the layout of LunNova's loader (translunar-diffusion,
`metadata/**/*.json`).
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from .. import images
from ..captions import Written
from ..filters import Filters, shown
from ..tags import split


@dataclass(frozen=True)
class Index:
    """What the JSON files below a folder say, by picture, and what is wrong with the others."""

    written: dict[Path, Written]
    problems: tuple[str, ...] = ()
    files: int = 0


def read_index(folder: Path, filters: Filters, strict: bool) -> Index:
    """Read every nth JSON file below the folder, in the order of their paths; with `strict`, those that describe no
    picture are problems.

    `path` is relative to the folder; without it the picture of the same name beside the file is meant. Other keys are
    ignored.
    """
    files = sorted((p for p in folder.rglob("*.json") if p.is_file()), key=lambda p: p.relative_to(folder).as_posix())
    files = [p for p in files if not any(part.startswith(".") for part in p.relative_to(folder).parts)]
    written: dict[Path, Written] = {}
    problems: list[str] = []
    for file in files[:: filters.consider_every_nth]:
        name = file.relative_to(folder).as_posix()
        try:
            record = _record(file)
            if record is None:
                if strict:
                    problems.append(
                        f'{name}: expected an object with tags, as {{"tags": [...], "score": 55, "path": "a.png"}}'
                    )
                continue
            picture = _picture(file, folder, record)
            if picture in written:
                raise ValueError(
                    f"describes {picture.relative_to(folder).as_posix()}, which another JSON file does already; not"
                    " used"
                )
            written[picture] = _written(record)
        except ValueError as error:
            problems.append(f"{name}: {error}")
    return Index(written, tuple(problems), len(files[:: filters.consider_every_nth]))


def _record(file: Path) -> dict[str, object] | None:
    try:
        record = json.loads(file.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 text ({error.reason} at byte {error.start})") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not JSON ({error})") from error
    except OSError as error:
        raise ValueError(f"cannot be read ({error.strerror})") from error
    if isinstance(record, dict) and isinstance(record.get("tags"), list | str):
        return record
    return None


def _picture(file: Path, folder: Path, record: dict[str, object]) -> Path:
    if "path" in record:
        given = PurePosixPath(str(record["path"]).replace("\\", "/"))
        if given.is_absolute() or ".." in given.parts or ":" in str(given):
            raise ValueError(f"path {record['path']!r} leaves the dataset's folder; give one relative to it")
        picture = folder.joinpath(*given.parts)
        if not os.path.isfile(picture):  # False for names too long, too
            raise ValueError(f"path {record['path']!r} names no file below the dataset's folder")
        return picture
    beside = (file.with_suffix(suffix) for suffix in images.SUFFIXES)
    found = next((path for path in beside if os.path.isfile(path)), None)
    if found is None:
        raise ValueError("has no path, and no picture of its name lies beside it")
    return found


def _written(record: dict[str, object]) -> Written:
    given, score = record["tags"], record.get("score")
    tags = split(given) if isinstance(given, str) else [str(tag).strip() for tag in given]  # type: ignore[attr-defined]
    if score is not None and (isinstance(score, bool) or not isinstance(score, int | float) or not abs(score) < 1e300):
        raise ValueError(f"score is {shown(score)}, expected a finite number")
    return Written(tags=tuple(tag for tag in tags if tag), found=True, score=None if score is None else float(score))
