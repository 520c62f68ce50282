"""What the rows of a LoRA stack ask of one file: what it says of itself, its preview picture, its blocks, and to take
in a file that was dropped onto the node.

Imported with the first such request, so that a start does not pay for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import threading
from collections.abc import Callable
from typing import Any

from ..patches.lora_files import metadata, row_check, sidecar_files, upload_check
from ..patches.lora_files.near_names import file_name
from ..storage.atomic import Draft, move_to_free_name, shared_draft, sweep_drafts
from ..storage.digest import sha256_of_file
from ..storage.disk_errors import explain_disk_errors
from ..storage.printable import logger
from ..storage.safetensors import LongHeader, PickledFile
from . import folders
from .browser_json import read_name, whole_number
from .comfyui_objects import Request

log = logger(__name__)

Answer = tuple[int, Any]
PART = 1 << 20  # bytes of an upload to read at a time
_LONGEST = 4000  # characters of block weights or a schedule
_SPARE = 1 << 30  # bytes that an upload leaves free on the disk
AT_ONCE = 8  # files that arrive
PERIOD = 20.0  # seconds, in each of which a file has to bring this much of itself:
LEAST_RATE = 4096.0  # bytes a second
_placing = threading.Lock()
_arriving = 0  # counted by the server's loop alone


def _list_loras(request: Request) -> Answer:
    """The names of all LoRA files. Half files of servers that were killed are removed on the way."""
    if folders.upload_limit():
        with contextlib.suppress(FileNotFoundError):
            sweep_drafts(folders.loras_folder())
    return 200, {"loras": folders.lora_names()}


def _listed_name(request: Request) -> str:
    """The name of a LoRA file in the query. FileNotFoundError when there is no such file."""
    name = read_name(request, "name")
    if not folders.is_listed(name):
        raise FileNotFoundError(f"no LoRA file {name!r} in ComfyUI's loras folders")
    return name


def _describe_file(request: Request) -> Answer:
    name = _listed_name(request)
    path = folders.lora_path(name)
    try:
        return 200, {"name": name, **metadata.describe(path), "noted": sidecar_files.trigger_words(path)}
    except ValueError as error:
        raise _unreadable_error(name, error) from None


def _unreadable_error(name: str, error: ValueError) -> ValueError:
    """What to say of a file that cannot be read: the error itself may name folders and quote the file."""
    if isinstance(error, PickledFile):
        return ValueError(f"{name!r} is a pickle; Graft reads safetensors only")
    if isinstance(error, LongHeader):
        return ValueError(f"{name!r} says more about itself than any LoRA: its header has more than 16 MB")
    log.warning("Graft: %s", error)
    return ValueError(f"{name!r} is damaged or no LoRA file; ComfyUI's log says more")


def _read_preview(request: Request) -> Answer:
    """{"picture": a data URL or "", "problem": why one that is there cannot be shown}."""
    name = _listed_name(request)
    try:
        return 200, {"picture": sidecar_files.preview_url(folders.lora_path(name)), "problem": ""}
    except sidecar_files.NoPicture as error:
        return 200, {"picture": "", "problem": str(error)}
    except ValueError as error:
        raise _unreadable_error(name, error) from None


def _check_row(request: Request) -> Answer:
    """{"blocks": [[block, strength]] of the file's layers, "problems": {"blocks" or "schedule": what is wrong}}."""
    name, blocks, schedule = (
        read_name(request, "name"),
        request.query.get("blocks", ""),
        request.query.get("schedule", ""),
    )
    if len(blocks) > _LONGEST or len(schedule) > _LONGEST:
        raise ValueError(f"block weights and schedules have at most {_LONGEST} characters")
    problems = row_check.check_texts(blocks, schedule)
    names: list[str] = []
    if folders.is_listed(name):
        try:
            names = row_check.blocks_of(folders.lora_path(name))
        except ValueError as error:  # it may name folders and quote the file
            log.warning("Graft: %s", error)
    foreign = row_check.foreign_blocks(names, blocks)
    if foreign:
        problems["blocks"] = foreign
    return 200, {"blocks": list(zip(names, row_check.strengths(names, blocks), strict=True)), "problems": problems}


# --- a file that was dropped onto the node ----------------------------------------------------------------------------


class Refused(Exception):
    """A file that is not taken in: the status of the answer, and what to say."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


def _answer_upload_check(request: Request) -> Answer:
    """Says before a file is sent whether it will be taken."""
    name, text = read_name(request, "name"), request.query.get("size", "")
    size = whole_number(text)
    if size is None:
        raise ValueError(f"size is missing or no number of bytes: got {text[:100]!r}")
    try:
        check_upload(name, size)
    except Refused as error:
        return error.status, {"error": str(error)}
    return 200, {"name": name, "size": size}


def check_upload(name: str, size: int) -> None:
    """Raises Refused for what is known before the first byte."""
    limit = folders.upload_limit()
    if not limit:
        raise Refused(403, "this ComfyUI takes no LoRA files from the browser (GRAFT_UPLOAD_GB is 0)")
    if size > limit:
        raise Refused(
            413, f"{name[:100]!r} has {size / 1e9:.3g} GB, more than the {limit / 1e9:g} GB of GRAFT_UPLOAD_GB"
        )
    try:
        upload_check.check_name(name)
    except ValueError as error:
        raise Refused(400, str(error)) from error
    same = _same_names(name)
    if same and size not in map(_size, same):
        raise Refused(409, _taken_message(name, same))
    free = shutil.disk_usage(folders.loras_folder()).free
    if size + _SPARE > free:
        raise Refused(507, f"the disk of the loras folder has {free / 1e9:.1f} GB left: make room for {name!r} first")


def _same_names(name: str) -> list[str]:
    return [other for other in folders.lora_names() if file_name(other) == file_name(name)]


def _size(name: str) -> int:
    return os.path.getsize(folders.lora_path(name))


def _taken_message(name: str, same: list[str]) -> str:
    return f"there is another LoRA of this name ({same[0]}), with other content: rename {name!r}, or choose that one"


async def receive_file(request: Request) -> Answer:
    """Stores the body of a request as a LoRA file. The file appears whole, checked, or not at all, and never in place
    of another; one that is there already is named in the answer.

    A body that is slow to arrive holds no thread. One that brings less than `LEAST_RATE` is ended (408), and more than
    `AT_ONCE` are refused (503).
    """
    global _arriving
    if _arriving >= AT_ONCE:
        return 503, {"error": f"{_arriving} LoRA files are arriving already; send this one when they are here"}
    _arriving += 1
    try:
        return await _store_body(request, read_name(request, "name"))
    except Refused as error:
        return error.status, {"error": str(error)}
    except ValueError as error:
        return 400, {"error": str(error)}
    except OSError as error:
        log.error("Graft: a LoRA file could not be stored: %s", error)
        return 507, {"error": f"the file could not be stored: {error.strerror or error}"}
    finally:
        _arriving -= 1


async def _store_body(request: Request, name: str) -> Answer:
    if request.content_length is None:
        raise Refused(411, "say how long the file is (Content-Length)")
    size: int = request.content_length
    await asyncio.to_thread(check_upload, name, size)
    target = os.path.join(folders.loras_folder(), name)
    with explain_disk_errors(target):
        draft = await asyncio.to_thread(Draft, shared_draft(target))
        try:
            await _receive(request.content, size, draft)
            await asyncio.to_thread(draft.complete)
            return await asyncio.to_thread(_place, draft.path, name)
        finally:
            draft.discard()  # in this thread: a server that ends waits for no other


async def _receive(content: Any, size: int, draft: Draft) -> None:
    """Write a body to a draft as it arrives. Raises Refused when it is shorter or longer than `size`, or too slow."""
    clock = asyncio.get_running_loop().time
    received, waiting = 0, bytearray()
    seen, end = 0, clock() + PERIOD  # how much had arrived when this period began, and when it ends
    while True:
        try:
            chunk = await asyncio.wait_for(content.read(PART), end - clock())
        except asyncio.TimeoutError:
            chunk = None
        received += len(chunk or b"")
        if clock() >= end:
            if received - seen < LEAST_RATE * PERIOD:
                raise Refused(
                    408, f"the file arrives too slowly: {received - seen:,} bytes in {PERIOD:g} s; send it again"
                )
            seen, end = received, clock() + PERIOD
        if chunk is None:
            continue
        waiting += chunk
        if not chunk or received > size:
            break
        if len(waiting) >= PART:
            await asyncio.to_thread(draft.write, bytes(waiting))
            waiting.clear()
    if received != size:
        raise Refused(400, f"the file did not arrive whole: {received} of {size} bytes")
    await asyncio.to_thread(draft.write, bytes(waiting))


def _place(draft: str, name: str) -> Answer:
    """Give a draft its name if it is a LoRA and the name is free."""
    try:
        upload_check.check_lora(draft, name)
    except ValueError as error:
        raise Refused(400, str(error)) from error
    with _placing:
        same = _same_names(name)
        for other in same:
            if _size(other) == os.path.getsize(draft) and _digest(other) == sha256_of_file(draft):
                return 200, {"name": other, "new": False}
        target = os.path.join(folders.loras_folder(), name)
        if same:
            raise Refused(409, _taken_message(name, same))
        try:
            move_to_free_name(draft, target)
        except FileExistsError as error:  # a link to nothing, or another process was faster
            raise Refused(409, _taken_message(name, [name])) from error
    log.info("Graft: stored %s in the loras folder", name)
    return 200, {"name": name, "new": True}


def _digest(name: str) -> str:
    return sha256_of_file(folders.lora_path(name))


ANSWERS: dict[str, Callable[[Any], Answer]] = {
    "all": _list_loras,
    "info": _describe_file,
    "preview": _read_preview,
    "row": _check_row,
    "may_come": _answer_upload_check,
}
