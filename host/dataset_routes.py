"""What the Dataset panel asks: input's folders, a glance at one, a picture's thumbnail, and its caption to read and
write. routes.py has the routes.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from ..training.data import caption_files, clip_files, clips, folder_list, folder_reader, folder_report, images
from ..training.data.dataset_config import read_config
from ..training.data.folder_settings import FolderSettings, FolderSource, read_settings
from ..training.data.layouts import registry
from ..training.data.yaml_values import read_encoding, shorten
from . import demo_files, folders
from .browser_json import read_text
from .comfyui_objects import Request

MOST_LOOKED_AT = 2_000  # pictures of a folder
LONGEST = 4.0  # seconds that a glance may look at pictures
MOST_FILE_BYTES = 200_000_000  # of a picture that gets a thumbnail
SIDE = 160  # pixels of a thumbnail
MOST_NAMES = 200_000  # of files in a folder that is uploaded to
Answer = tuple[int, Any]


class Thumbnail(NamedTuple):
    """The body and the headers of an answer that is not JSON."""

    body: bytes
    headers: dict[str, str]


def list_folders(request: Request) -> Answer:
    """The folders with their numbers of pictures, and the endings of the files that a dataset reads."""
    import folder_paths

    found = folder_list.picture_folders(folder_paths.get_input_directory())
    rows = [{"name": name, "pictures": count} for name, count in found.counts.items()]
    endings = (*images.SUFFIXES, *clip_files.SUFFIXES)
    return 200, {"folders": rows, "cut": found.cut, "pictures": endings, "captions": registry.suffixes()}


def list_files(request: Request) -> Answer:
    """The names of the files in a folder, none where there is no such folder yet. 409 when there are too many."""
    try:
        root = folders.input_folder(read_text(request.query, "folder"))
    except FileNotFoundError:
        return 200, {"files": []}
    names = folder_list.file_names(root, MOST_NAMES)
    if names is None:
        return 409, {"error": f"this folder has more than {MOST_NAMES:,} files; copy the new ones there yourself"}
    return 200, {"files": names}


def glance(values: Mapping[str, Any]) -> Answer:
    """What a Dataset with these inputs would read."""
    settings = read_settings(values)
    if folders.is_dataset_config(read_text(values, "folder")):
        return 200, _config_glance(values["folder"], settings)
    folder = Path(_folder(read_text(values, "folder")))
    validation = read_text(values, "validation_folder")
    own = settings.filters.validation
    if validation or own:
        settings = replace(settings, validation=0.0)
    found = folder_reader.glance_at_folder(folder, settings, MOST_LOOKED_AT, LONGEST, str(values.get("only") or ""))
    data = {**folder_report.glance_data(found), "folder": values["folder"]}
    if validation:
        data["held_out"] = len(folder_reader.training_pictures(Path(_folder(validation)), settings).images)
    elif own:
        apart = folder_reader.glance_at_folder(folder, replace(settings, filters=own), MOST_LOOKED_AT, LONGEST)
        data["held_out"] = len(apart.listing.entries)
        data["train"] -= data["held_out"]
    return 200, data


def _config_glance(name: str, settings: FolderSettings) -> dict[str, Any]:
    """The folders that kohya's dataset_config.toml names, without their pictures."""
    root = Path(folders.input_root())
    try:
        file = Path(folders.input_file(name))
    except FileNotFoundError:  # its own words name the folder's path
        raise FileNotFoundError(f"there is no file {name!r} in ComfyUI's input folder") from None
    sources, notes = read_config(file, root, FolderSource(root, settings))
    names = dict.fromkeys(folders.relative_to_input(source.folder) for source in sources)
    return {"folder": name, "folders": list(names), "notes": notes}


def make_thumbnail(request: Request) -> Answer:
    """A small picture, of a clip its first frame, which a browser keeps as long as the file is the same."""
    name = read_text(request.query, "name")
    path = Path(_shown_picture(read_text(request.query, "folder"), name))
    status = path.stat()
    is_clip = clip_files.is_video(name) or clip_files.is_frame_folder(name)
    tag = f'"{status.st_mtime_ns:x}-{status.st_size:x}"'
    kept = {
        "ETag": tag,
        "Cache-Control": "private, no-cache",  # ask each time whether it has changed
        "Content-Type": "image/webp",
        "X-Content-Type-Options": "nosniff",
    }
    if request.headers.get("If-None-Match") == tag:
        return 304, Thumbnail(b"", kept)
    if is_clip:
        return 200, Thumbnail(clips.thumbnail(path, SIDE), kept)
    if status.st_size > MOST_FILE_BYTES:
        raise ValueError(f"{name}: {status.st_size:,} bytes are too many for a thumbnail")
    return 200, Thumbnail(images.thumbnail(path, SIDE), kept)


def read_caption(request: Request) -> Answer:
    """A picture's caption as its file has it."""
    path, encoding = _caption_file(request.query)
    found = caption_files.read_caption(path, encoding)
    return 200, {"file": path.name, "text": found.text, "version": found.version}


def write_caption(values: Mapping[str, Any]) -> Answer:
    """Writes a picture's caption, or removes its file where the text is null."""
    text = values.get("text")
    if "text" not in values or not isinstance(text, str | None):
        raise ValueError(f"text is {shorten(text)}, expected a text, or null for no caption file")
    path, encoding = _caption_file(values)
    try:
        before, now = caption_files.write_caption(path, encoding, text, str(values.get("version", "")))
    except caption_files.CaptionChangedError as error:
        return 409, {"error": str(error)}
    return 200, {"file": path.name, "before": before, "text": now.text, "version": now.version}


def _folder(name: str) -> str:
    """The path of a folder. FileNotFoundError with the folders that the user may have meant when there is none."""
    import folder_paths

    try:
        return folders.pictures_folder(name)
    except FileNotFoundError:
        known = folder_list.picture_folders(folder_paths.get_input_directory()).counts
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
        hint = "; put it there, or choose another"
        if near:
            hint = f"; did you mean {' or '.join(near)}?"
        raise FileNotFoundError(f"there is no folder {name!r} in ComfyUI's input folder{hint}") from None


def _picture(folder: str, name: str) -> tuple[str, str]:
    """(path of the folder, path of a picture or clip in it)."""
    if clip_files.is_frame_folder(name):
        return folders.input_picture(folder, name, os.path.isdir)
    if not images.is_image(os.path.basename(name)) and not clip_files.is_video(name):
        endings = ", ".join((*images.SUFFIXES, *clip_files.SUFFIXES))
        raise ValueError(f"{name!r} is not a picture that a dataset reads (expected {endings})")
    return folders.input_picture(folder, name)


def _shown_picture(folder: str, name: str) -> str:
    """The path of a picture that is only read: it may be one of the demo's, before that is in the input folder."""
    try:
        return _picture(folder, name)[1]
    except FileNotFoundError:
        own = demo_files.pictures_folder(folder)
        if own is None or name not in os.listdir(own):
            raise
        return os.path.join(own, name)


def _caption_file(values: Mapping[str, Any]) -> tuple[Path, str]:
    """(the caption file of the picture that is asked for, its encoding). A link is followed inside the input folder."""
    folder, picture = _picture(read_text(values, "folder"), read_text(values, "name"))
    source, encoding = registry.AUTO, "utf-8"
    if values.get("captions"):
        source = read_text(values, "captions")
    if values.get("encoding"):
        encoding = read_encoding(values["encoding"])
    path = os.path.realpath(caption_files.caption_path(Path(picture), Path(folder), source, encoding))
    if not folders.is_below_input(path):
        raise ValueError(f"the caption of {values['name']!r} is a link that leaves the input folder; edit it there")
    return Path(path), encoding


ANSWERS: dict[str, Callable[[Any], Answer]] = {
    "folders": list_folders,
    "files": list_files,
    "glance": glance,
    "thumbnail": make_thumbnail,
    "caption": read_caption,
    "write_caption": write_caption,
}
