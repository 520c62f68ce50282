"""Two previews of one prompt, of which a person says in the training panel which is better, become a preference pair in
ComfyUI's input folder. The panel finds its marks again in that folder. routes.py has the routes.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
from collections.abc import Callable, Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from ..storage.bounded_read import MB, read_bounded
from ..storage.digest import sha256
from ..storage.file_list import names_in
from ..storage.pictures import open_picture, picture_errors
from ..storage.printable import logger
from ..training.data.marked_pairs import KeptPair, PairChangedError, keep_pair, kept_pairs
from ..training.store.names import check_run_name
from . import folders, previews
from .browser_json import read_name, read_text
from .comfyui_objects import Request

log = logger(__name__)

FOLDER = "graft_preferences"  # in ComfyUI's input folder; each run has its own in it
_MOST_BYTES = 64 * MB  # of a preview
_TITLE = re.compile(r"steps-(\d+)-(\d+)-[0-9a-f]{12}")  # a pair's name
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
    run = read_text(values, "run")
    check_run_name(run)
    better = _read_preview(run, read_text(values, "better"))
    worse = _read_preview(run, read_text(values, "worse"))
    if (better.prompt, better.text) != (worse.prompt, worse.text):
        raise ValueError("the two are previews of different prompts; a pair needs one prompt")
    if better.size != worse.size:
        raise ValueError("the two previews have different sizes; a pair needs one size")
    folder, path = _folder(run)
    low, high = sorted((better.step, worse.step))
    try:
        pair = keep_pair(path, f"steps-{low}-{high}", better.body, worse.body, better.text)
    except PairChangedError as error:
        return 409, {"error": str(error)}
    except OSError as error:
        log.warning("Graft: a preference pair could not be kept: %s", error)
        status = 507 if error.errno == errno.ENOSPC else 500
        return status, {"error": f"{folder} in ComfyUI's input folder: {error.strerror or error}"}
    return 200, {"folder": folder, "pairs": pair.pairs, "name": pair.name, "captioned": pair.captioned}


def list_marked(request: Request) -> Answer:
    """What has been marked of a run: {"folder", "pairs", "marked"}, the last [[better, worse]], names of previews that
    are still the pictures of a pair.
    """
    run = read_name(request, "run")
    check_run_name(run)
    folder, path = _folder(run)
    pairs = kept_pairs(path)
    steps = set().union(*map(_steps, pairs))
    pictures = _by_digest(run, steps)
    names = [list(both) for pair in pairs for both in _previews_of(pair, pictures)]
    return 200, {"folder": folder, "pairs": len(pairs), "marked": names}


def _folder(run: str) -> tuple[str, Path]:
    """The folder of a run's pairs: its name below ComfyUI's input folder, and where it is."""
    name, path = f"{FOLDER}/{run}", os.path.join(folders.input_root(), FOLDER, run)
    if not folders.is_below_input(path):
        raise ValueError(f"{name} is a link that leaves ComfyUI's input folder; remove the link")
    return name, Path(path)


def _steps(pair: KeptPair) -> set[int]:
    """The two steps of a pair; none of one that is named in another way."""
    match = _TITLE.fullmatch(pair.name)
    return {int(match[1]), int(match[2])} if match else set()


def _by_digest(run: str, steps: set[int]) -> dict[str, list[str]]:
    """The names of a run's previews at these steps, by the sha256 of their files."""
    found: dict[str, list[str]] = {}
    for name in sorted(names_in(previews.folder_of(run))):
        match = previews.NAME.fullmatch(name)
        if match is None or int(match[2]) not in steps:
            continue
        with contextlib.suppress(ValueError, FileNotFoundError):  # a link, or just removed: `mark` takes neither
            found.setdefault(sha256(_body(run, name)).hexdigest(), []).append(name)
    return found


def _previews_of(pair: KeptPair, pictures: Mapping[str, list[str]]) -> Iterator[tuple[str, str]]:
    """The previews that a pair was made of. Weights and their average may have given the same pictures."""
    for better, worse in product(pictures.get(pair.better, ()), pictures.get(pair.worse, ())):
        if {_step(better), _step(worse)} == _steps(pair):
            yield better, worse


def _step(name: str) -> int:
    return int(_parts(name)[2])


def _parts(name: str) -> re.Match[str]:
    """The parts of a preview's name. Raises ValueError for what is none of Graft's previews."""
    match = previews.NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"{name[:100]!r} is not a preview of a run")
    return match


def _read_preview(run: str, name: str) -> Preview:
    """One preview of a run, by its file's name. Raises ValueError for what is none of Graft's previews,
    FileNotFoundError when it has been removed.
    """
    prompt, step, body = int(_parts(name)[4] or 0), _step(name), _body(run, name)
    return Preview(step, prompt, previews.read_comment(io.BytesIO(body)), _size(step, body), body)


def _body(run: str, name: str) -> bytes:
    """The file of a preview. Raises ValueError for a link to elsewhere, FileNotFoundError when it has been removed."""
    step = _step(name)
    path = os.path.realpath(os.path.join(previews.folder_of(run), name))
    root = os.path.realpath(folders.previews_folder())
    if os.path.commonpath([root, path]) != root:
        raise ValueError(f"the preview of step {step} is a link to another folder; choose another step")
    try:
        return read_bounded(path, _MOST_BYTES)
    except FileNotFoundError:
        raise FileNotFoundError(f"the preview of step {step} has been removed; choose another step") from None


def _size(step: int, body: bytes) -> tuple[int, int]:
    try:
        with open_picture(io.BytesIO(body)) as picture:
            return picture.size
    except picture_errors() as error:
        raise ValueError(f"the preview of step {step} is damaged ({type(error).__name__}); choose another") from error


ANSWERS: dict[str, Callable[[Any], Answer]] = {"mark": mark, "marked": list_marked}
