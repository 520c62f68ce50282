"""Keeps the pictures' own losses for the panel of Dataset: the newest of each folder."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..storage.atomic import write_whole
from ..storage.bounded_read import read_json
from ..storage.digest import sha256
from ..storage.printable import logger
from ..training.data.dataset import Dataset
from ..training.reports.outliers import outliers
from ..training.run.picture_losses import PictureLoss, by_name
from . import events, folders
from .browser_json import read_text, text_of
from .comfyui_objects import Request

log = logger(__name__)

MOST_BYTES = 64 << 20
FOLDER = "picture_losses"


def keep(run: str, step: int, dataset: Dataset, losses: Sequence[PictureLoss]) -> None:
    """Keep the losses of each of the dataset's folders, and tell the panels of it. Pictures are found in their folder
    by their contents, and are those that were measured as long as the file is the same.
    """
    by_hash: dict[str, list[PictureLoss]] = {}
    for loss in losses:
        if loss.image.sha256:
            by_hash.setdefault(loss.image.sha256, []).append(loss)
    reasons = outliers(by_name(losses))
    told = []
    for watched in dataset.watched:
        rows = {}
        for name, stamp in watched.files.items():
            if group := by_hash.get(stamp.sha256):
                own = [one for one in group if one.image.name == name]  # not those of a copy
                mean = next(iter(by_name(own or group).values()))
                rows[name] = {
                    "file": [stamp.size, stamp.modified],
                    "caption": mean.image.caption,
                    "before": mean.before,
                    "after": mean.after,
                    "caption_help": mean.caption_help,
                    "reasons": reasons.get(mean.image.name, []),
                }
        if rows:
            folder = folders.relative_to_input(watched.folder)
            told.append(folder)
            body = text_of({"folder": folder, "run": run, "step": step, "pictures": rows}).encode()
            path = _path(folder)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, [body])
    events.send_event("graft.picture_losses", {"folders": told})


def losses_of(request: Request) -> tuple[int, Any]:
    """The losses that are kept of a folder: {"run", "step", "pictures"}, none of a picture that has changed since."""
    name = read_text(request.query, "folder")
    root = Path(folders.pictures_folder(name))
    folder = folders.relative_to_input(root)
    nothing: dict[str, Any] = {"run": "", "step": 0, "pictures": {}}
    try:
        kept = read_json(_path(folder), MOST_BYTES)
    except FileNotFoundError:
        return 200, nothing
    except ValueError:
        log.warning("Graft: the picture losses of %s cannot be read; run Picture Losses again", folder)
        return 200, nothing
    pictures = {name: row for name, row in kept["pictures"].items() if _is_same(root / name, row)}
    return 200, {"run": kept["run"], "step": kept["step"], "pictures": pictures}


def _is_same(path: Path, row: Mapping[str, Any]) -> bool:
    try:
        status = os.stat(path)
    except OSError:
        return False
    return [status.st_size, status.st_mtime_ns] == row["file"]


def _path(folder: str) -> Path:
    name = sha256(folder.encode("utf-8", "surrogatepass")).hexdigest()[:32]
    return Path(folders.training_folder()) / "cache" / FOLDER / f"{name}.json"


ANSWERS = {"losses": losses_of}
