"""Two previews of one prompt, of which a person says in the training panel which is better, become a preference pair in
ComfyUI's input folder. routes.py has the route.
"""

from __future__ import annotations

import errno
import io
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..storage.bounded_read import MB, read_bounded
from ..storage.pictures import open_picture, picture_errors
from ..training.data.marked_pairs import PairChangedError, keep_pair
from ..training.data.yaml_values import shorten
from ..training.store.names import check_run_name
from . import folders, previews

FOLDER = "graft_preferences"  # in ComfyUI's input folder; each run has its own in it
_MOST_BYTES = 64 * MB  # of a preview
Answer = tuple[int, Any]


class Preview(NamedTuple):
    """A preview as its file has it: `prompt` is the number and `text` the words of its prompt, empty for the positive,
    which comes as conditioning.
    """

    step: int
    prompt: int
    text: str
    size: tuple[int, int]
    body: bytes


def mark(values: Mapping[str, Any]) -> Answer:
    """Keeps the previews `better` and `worse` of a run as a pair: {"folder", "pairs", "name", "captioned"}. 409 when
    the pair has been changed since, 500 or 507 when the disk takes no more.
    """
    run = _name(values, "run")
    check_run_name(run)
    better = _read(run, _name(values, "better"))
    worse = _read(run, _name(values, "worse"))
    if (better.prompt, better.text) != (worse.prompt, worse.text):
        raise ValueError("the two are previews of different prompts; a pair needs one prompt")
    if better.size != worse.size:
        raise ValueError("the two previews have different sizes; a pair needs one size")
    folder = f"{FOLDER}/{run}"
    path = os.path.join(folders.input_root(), FOLDER, run)
    if not folders.is_below_input(path):
        raise ValueError(f"{folder} is a link that leaves ComfyUI's input folder; remove the link")
    low, high = sorted((better.step, worse.step))
    try:
        pair = keep_pair(Path(path), f"steps-{low}-{high}", better.body, worse.body, better.text)
    except PairChangedError as error:
        return 409, {"error": str(error)}
    except OSError as error:
        logging.warning("Graft: a preference pair could not be kept: %s", error)
        status = 507 if error.errno == errno.ENOSPC else 500
        return status, {"error": f"{folder} in ComfyUI's input folder: {error.strerror or error}"}
    return 200, {"folder": folder, "pairs": pair.pairs, "name": pair.name, "captioned": pair.captioned}


def _read(run: str, name: str) -> Preview:
    """One preview of a run, by its file's name. Raises ValueError for what is none of Graft's previews,
    FileNotFoundError when it has been removed.
    """
    match = previews.NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"{name[:100]!r} is no preview of a run")
    step = int(match[2])
    path = os.path.realpath(os.path.join(previews.folder_of(run), name))
    root = os.path.realpath(folders.training_folder())
    if os.path.commonpath([root, path]) != root:
        raise ValueError(f"the preview of step {step} is a link to another folder; choose another step")
    try:
        body = read_bounded(path, _MOST_BYTES)
    except FileNotFoundError:
        raise FileNotFoundError(f"the preview of step {step} has been removed; choose another step") from None
    return Preview(step, int(match[4] or 0), previews.comment(io.BytesIO(body)), _size(step, body), body)


def _size(step: int, body: bytes) -> tuple[int, int]:
    try:
        with open_picture(io.BytesIO(body)) as picture:
            return picture.size
    except picture_errors() as error:
        raise ValueError(f"the preview of step {step} is damaged ({type(error).__name__}); choose another") from error


def _name(values: Mapping[str, Any], key: str) -> str:
    value = values.get(key, "")
    if not isinstance(value, str):
        raise ValueError(f"{key} is {shorten(value)}, expected a name")
    return value


ANSWERS: dict[str, Callable[[Any], Answer]] = {"mark": mark}
