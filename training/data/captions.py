"""Captions of pictures in text files: beside the picture or in a captions/ folder; kohya's
repeat folders (`10_name`).
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

LONGEST = 1 << 20  # bytes of a text file
MODES = ("auto", "txt", "folder", "json", "yaml")


@dataclass(frozen=True)
class Written:
    """What the files around a picture say of it; None where nothing is said. `main` tags at the front are no tags but
    the prompt itself.
    """

    lines: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    weights: tuple[float, ...] = ()
    main: int = 0
    found: bool = False
    score: float | None = None
    multiply: float | None = None
    flip: float | None = None
    dropout: float | None = None
    shuffle: bool | None = None
    group: str = ""
    loss_scale: float | None = None
    max_length: int = 0
    notes: tuple[str, ...] = ()


def repeats_of(picture: Path, folder: Path) -> int:
    """kohya's repeat count: the leading number of the innermost folder named `N_name`, 1 without one; the dataset's
    folder counts too.
    """
    for part in (picture.parent, *picture.parent.parents):
        match = re.match(r"(\d+)_", part.name)
        if match:
            return max(1, int(match[1]))
        if part == folder:
            break
    return 1


def text_files(picture: Path, folder: Path, mode: str) -> list[Path]:
    """Where the caption of a picture may be as text, in the order of preference.

    A captions folder lies beside the picture, beside the picture's folder (images/1.png, captions/1.txt), or at the top
    with the same subfolders.
    """
    beside = [picture.with_suffix(".txt"), picture.with_suffix(".caption")]
    places = [picture.parent / "captions"]
    if picture.parent != folder:
        places += [picture.parent.parent / "captions", folder / "captions" / picture.parent.relative_to(folder)]
    apart = [place / f"{picture.stem}.txt" for place in places]
    return {"txt": beside, "folder": apart, "auto": [*beside, *apart], "yaml": beside}.get(mode, [])


def read_lines(path: Path, encoding: str = "utf-8") -> tuple[str, ...]:
    """The lines of a text file that are not empty, spaces made single; raises ValueError that names a file in another
    encoding.
    """
    if path.stat().st_size > LONGEST:
        raise ValueError(f"{path.name}: {path.stat().st_size:,} bytes are no caption; expected at most {LONGEST:,}")
    try:
        # utf-8-sig reads plain UTF-8 too and drops the mark that Windows editors put first.
        text = path.read_text(encoding="utf-8-sig" if encoding == "utf-8" else encoding)
    except UnicodeDecodeError as error:
        where = f"{error.reason} at byte {error.start}"
        if encoding == "utf-8":
            name = "UTF-8"
        else:
            name = encoding
        advice = "save it as UTF-8 or name its encoding in filters (encoding: cp1252)"
        raise ValueError(f"{path.name}: the caption is not {name} text ({where}); {advice}") from error
    return tuple(line for line in (" ".join(line.split()) for line in text.splitlines()) if line)


def read_text(picture: Path, folder: Path, mode: str, encoding: str = "utf-8") -> Written | None:
    """The caption of a picture from the first text file that there is, None without one."""
    path = next((path for path in text_files(picture, folder, mode) if os.path.isfile(path)), None)
    if path is None:
        return None
    return Written(lines=read_lines(path, encoding), found=True)
