"""Captions of pictures: a .txt beside the picture or in a captions/ folder; kohya's repeat folders (`10_name`)."""

from __future__ import annotations

import re
from pathlib import Path

MODES = ("auto", "txt", "folder")
LATER_MODES = ("json", "yaml")
PICTURES = (".png", ".jpg", ".jpeg", ".webp")


def find_pictures(folder: Path) -> list[Path]:
    """Every picture file below the folder, in the order of its relative path; hidden folders are left out."""
    found = (p for p in folder.rglob("*") if p.suffix.lower() in PICTURES and p.is_file())
    inside = (p for p in found if not any(part.startswith(".") for part in p.relative_to(folder).parts))
    return sorted(inside, key=lambda p: p.relative_to(folder).as_posix())


def repeats_of(picture: Path, folder: Path) -> int:
    """kohya's repeat count: the leading number of the innermost folder named `N_name`, 1 without one; the dataset's folder counts too."""
    for part in (picture.parent, *picture.parent.parents):
        match = re.match(r"(\d+)_", part.name)
        if match:
            return max(1, int(match[1]))
        if part == folder:
            break
    return 1


def caption_files(picture: Path, mode: str) -> list[Path]:
    """Where the caption of a picture may be, in the order of preference; raises ValueError for a mode of a later version."""
    if mode in LATER_MODES:
        raise ValueError(f"GraftDataset: captions {mode} is not available in this version of Graft; use auto, txt or folder.")
    if mode not in MODES:
        raise ValueError(f"GraftDataset: captions is {mode!r}, expected one of {', '.join(MODES)}.")
    beside = picture.with_suffix(".txt")
    apart = picture.parent / "captions" / f"{picture.stem}.txt"
    return {"txt": [beside], "folder": [apart], "auto": [beside, apart]}[mode]


def read_caption(picture: Path, mode: str) -> str | None:
    """The caption in one line, None when there is no file; raises ValueError that names a file that is not UTF-8."""
    for path in caption_files(picture, mode):
        if path.is_file():
            try:
                text = path.read_text(encoding="utf-8-sig")
            except UnicodeDecodeError as error:
                where = f"{error.reason} at byte {error.start}"
                raise ValueError(f"{path.name}: the caption is not UTF-8 text ({where}); save it as UTF-8") from error
            return " ".join(text.split())
    return None
