"""Shows and uploads pictures (/view and /upload), and serves files of the front end and of packs."""

from __future__ import annotations

import asyncio
import hashlib
import io
import itertools
import mimetypes
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, TypeVar

from aiohttp import BodyPartReader, web
from aiohttp.http_exceptions import BadHttpMessage

from ..host import Host
from . import disk
from .answers import answer, parsed, problem
from .paths import PathRefused, inside, single
from .pictures import DAMAGED, DRAWING, open_picture

KINDS = ("input", "output", "temp")
Drawn = TypeVar("Drawn")
PART = 1 << 20  # bytes of an upload to read at a time
MOST_FIELDS = 100  # of a form; the front end sends five
# Python takes content types from the system, and some systems say text/plain for scripts, which browsers then refuse to
# run.
TYPES = {
    ".js": "text/javascript",
    ".mjs": "text/javascript",
    ".css": "text/css",
    ".html": "text/html",
    ".json": "application/json",
    ".svg": "image/svg+xml",
    ".webp": "image/webp",
    ".md": "text/markdown",
    ".wasm": "application/wasm",
    ".woff2": "font/woff2",
    ".ico": "image/x-icon",
    ".vtt": "text/vtt",
    ".map": "application/json",
}
# Content types that a browser shows without running any code in them.
INERT = ("image/", "video/", "audio/", "text/plain", "application/json", "font/")


def type_of(path: str) -> str:
    """The content type for a file's extension."""
    return TYPES.get(os.path.splitext(path)[1].lower()) or mimetypes.guess_type(path)[0] or "application/octet-stream"


def served(path: str) -> web.StreamResponse:
    """Serve a file of the front end or of a pack; 404 if it does not exist or is a folder."""
    if not os.path.isfile(path):
        raise web.HTTPNotFound()
    return web.FileResponse(path, headers={"Content-Type": type_of(path), "Cache-Control": "no-cache"})


def download(path: str) -> web.StreamResponse:
    """Serve a user's file: the browser shows it if it cannot run code and downloads it otherwise, so that it never runs
    in this page's origin.
    """
    kind = type_of(path)
    inert = kind.startswith(INERT) and kind != "image/svg+xml"
    name = os.path.basename(path).replace("\\", "\\\\").replace('"', '\\"').encode("ascii", "replace").decode()
    headers = {
        "Content-Type": kind if inert else "application/octet-stream",
        "Content-Disposition": f'{"inline" if inert else "attachment"}; filename="{name}"',
        "Content-Security-Policy": "sandbox; default-src 'none'; style-src 'unsafe-inline'",
    }
    return web.FileResponse(path, headers=headers)


class Files:
    """The handlers of /view and /upload."""

    def __init__(self, host: Host):
        self.folders = host.folders

    def add(self, routes: web.RouteTableDef) -> None:
        """Register every route."""
        routes.get("/view")(self.view)
        routes.post("/upload/image")(self.upload_image)
        routes.post("/upload/mask")(self.upload_mask)

    def find(self, name: str, subfolder: str, kind: str) -> str:
        """The path of "name.png" or "name.png [output]" in the folder of that kind. Raises PathRefused if there is no
        such kind of folder or the path leaves it.
        """
        name, annotated = self.folders.annotated_filepath(name)
        folder = annotated or (self.folders.get_directory_by_type(kind) if kind in KINDS else None)
        if folder is None:
            raise PathRefused(f"type {kind!r} is not one of {', '.join(KINDS)}")
        return inside(folder, subfolder, name)

    async def view(self, request: web.Request) -> web.StreamResponse:
        """GET /view?filename=&subfolder=&type=[&preview=webp;90][&channel=rgb|a]."""
        query = request.query
        if not query.get("filename"):
            return problem("filename is missing")
        path = self.find(query["filename"], query.get("subfolder", ""), query.get("type", "output"))
        if not os.path.isfile(path):
            return web.Response(status=404)
        channel = query.get("channel", "")
        if "preview" not in query and channel not in ("rgb", "a"):
            return download(path)
        try:
            if "preview" in query:
                kind, body = await _drawn(preview, path, query["preview"], channel)
            else:
                kind, body = "png", await _drawn(_channel, path, channel)
        except DAMAGED as error:
            return problem(f"{query['filename']!r} cannot be shown as an image: {error}")
        return web.Response(body=body, content_type=f"image/{kind}")

    async def upload_image(self, request: web.Request) -> web.Response:
        """POST /upload/image: a form with image (a file), type, subfolder and overwrite."""
        form, file, name = await _form(request)
        with file:
            return await self._stored(form, name, file)

    async def upload_mask(self, request: web.Request) -> web.Response:
        """POST /upload/mask: like an image; its transparency is copied onto the picture that original_ref names."""
        form, file, name = await _form(request)
        with file:
            reference = parsed(form.get("original_ref") or "null", "original_ref")
            if (
                not isinstance(reference, dict)
                or not isinstance(reference.get("filename"), str)
                or not reference["filename"]
            ):
                return problem("original_ref must be an object with filename, subfolder and type")
            original = self.find(
                reference["filename"], str(reference.get("subfolder") or ""), str(reference.get("type") or "output")
            )
            if not os.path.isfile(original):
                return problem(f"there is no image {reference['filename']!r}", 404)
            try:
                masked = await _drawn(_masked, original, file)
            except DAMAGED as error:
                return problem(f"not an image: {error}")
            return await self._stored(form, name, masked)

    async def _stored(self, form: dict[str, str], name: str, file: BinaryIO) -> web.Response:
        """Save an uploaded file in the folder that the form names; the response has its name."""
        kind, subfolder = form.get("type") or "input", form.get("subfolder", "")
        if kind not in KINDS:
            return problem(f"type {kind!r} is not one of {', '.join(KINDS)}")
        folder = inside(self.folders.get_directory_by_type(kind), subfolder)
        inside(folder, single(name))
        overwrite = form.get("overwrite", "").lower() in ("true", "1")
        stored_name = await asyncio.to_thread(_store, folder, name, file, overwrite)
        return answer({"name": stored_name, "subfolder": subfolder, "type": kind})


async def _copy_part(part: BodyPartReader, target: BinaryIO, taken: int, largest: int) -> int:
    """Copy a part of a form into a file; returns `taken` plus its bytes. 413 if that is more than `largest`."""
    while chunk := await part.read_chunk(PART):
        taken += len(chunk)
        if taken > largest:
            raise web.HTTPRequestEntityTooLarge(max_size=largest, actual_size=taken)
        target.write(chunk)
    return taken


async def _form(request: web.Request) -> tuple[dict[str, str], BinaryIO, str]:
    """Read a form; returns (its texts, the file "image", the file's name). 400 if it has no such file."""
    if not request.content_type.startswith("multipart/"):
        raise web.HTTPBadRequest(text="a multipart form with the file 'image' was expected")
    texts: dict[str, str] = {}
    file, name, byte_count, fields = None, "", 0, 0
    try:
        parts = await request.multipart()
    except ValueError as error:  # no boundary
        raise web.HTTPBadRequest(text=f"the form cannot be read: {error}") from error
    try:
        async for part in parts:
            fields += 1
            if fields > MOST_FIELDS:
                raise web.HTTPBadRequest(text=f"the form has more than {MOST_FIELDS} fields")
            if not isinstance(part, BodyPartReader):
                raise web.HTTPBadRequest(text="a form inside another form")
            if part.name == "image" and part.filename:
                name, file = part.filename, tempfile.TemporaryFile()  # noqa: SIM115  (the caller closes it)
            target: BinaryIO = io.BytesIO()
            if part.name == "image" and file is not None:
                target = file
            byte_count = await _copy_part(part, target, byte_count, request.app["largest_upload"])
            if part.name and part.name != "image":
                target.seek(0)
                texts[part.name] = target.read().decode()
    except (ValueError, BadHttpMessage) as error:
        _close(file)
        raise web.HTTPBadRequest(text=f"the form cannot be read: {error}") from error
    except BaseException:
        _close(file)
        raise
    if file is None:
        raise web.HTTPBadRequest(text="the form has no file 'image'")
    return texts, file, name


def _close(file: BinaryIO | None) -> None:
    if file is not None:
        file.close()


async def _drawn(draw: Callable[..., Drawn], *arguments: Any) -> Drawn:
    """What a function draws, in one of the few threads that do that."""
    return await asyncio.get_running_loop().run_in_executor(DRAWING, draw, *arguments)


def _store(folder: str, name: str, file: BinaryIO, overwrite: bool) -> str:
    """Save a file, completely or not at all. Returns its name, with a number added if another file already has it, also
    one that is uploaded at the same moment.
    """
    os.makedirs(folder, exist_ok=True)
    if overwrite:
        disk.replace(os.path.join(folder, name), _chunks(file))
        return name
    size, digest = file.seek(0, os.SEEK_END), _sha256(file)
    names = _numbered(name)
    for name in names:
        path = os.path.join(folder, name)
        if _holds(path, size, digest):
            return name
        if not os.path.lexists(path):
            break
    with disk.draft(path, _chunks(file)) as draft:
        while True:
            path = os.path.join(folder, name)
            try:
                disk.rename_to_free(draft, path)
            except FileExistsError:  # another upload was faster
                if _holds(path, size, digest):
                    return name
                name = next(names)
            else:
                return name


def _numbered(name: str) -> Iterator[str]:
    """name.png, name (1).png, name (2).png …"""
    stem, extension = os.path.splitext(name)
    yield name
    for number in itertools.count(1):
        yield f"{stem} ({number}){extension}"


def _holds(path: str, size: int, digest: str) -> bool:
    """Whether the file at a path has this content."""
    try:
        if not os.path.isfile(path) or os.path.getsize(path) != size:
            return False
        with open(path, "rb") as file:
            return _sha256(file) == digest
    except FileNotFoundError:  # just removed
        return False


def _sha256(file: BinaryIO) -> str:
    digest = hashlib.sha256()
    for chunk in _chunks(file):
        digest.update(chunk)
    return digest.hexdigest()


def _chunks(file: BinaryIO) -> Iterator[bytes]:
    file.seek(0)
    while chunk := file.read(PART):
        yield chunk


def preview(path: str, asked: str, channel: str) -> tuple[str, bytes]:
    """Encode a picture as WebP or JPEG; `asked` is the query's `preview`, such as "webp;90"."""
    kind, _, quality = asked.partition(";")
    if kind == "jpeg" and "a" not in channel:
        kind = "jpeg"
    else:
        kind = "webp"
    buffer = io.BytesIO()
    with open_picture(path) as picture:
        converted = picture.convert(
            "RGB" if kind == "jpeg" or channel == "rgb" else "RGBA" if _transparent(picture) else "RGB"
        )
        converted.save(buffer, format=kind, quality=min(100, int(quality)) if quality.isdecimal() else 90)
    return kind, buffer.getvalue()


def _transparent(picture: Any) -> bool:
    return "A" in picture.getbands() or "transparency" in picture.info


def _channel(path: str, channel: str) -> bytes:
    """A PNG of a picture without its transparency ("rgb"), or of its transparency alone ("a")."""
    from PIL import Image

    buffer = io.BytesIO()
    with open_picture(path) as picture:
        if channel == "rgb":
            picture.convert("RGB").save(buffer, format="PNG")
        else:
            alpha = Image.new("RGBA", picture.size)
            alpha.putalpha(picture.convert("RGBA").getchannel("A"))
            alpha.save(buffer, format="PNG")
    return buffer.getvalue()


def _masked(original: str, mask: BinaryIO) -> BinaryIO:
    """A PNG of the original picture with the mask's transparency; keeps the picture's text metadata."""
    from PIL.PngImagePlugin import PngInfo

    buffer, texts = io.BytesIO(), PngInfo()
    with open_picture(original) as picture, open_picture(mask) as mask_picture:
        for key, text in getattr(picture, "text", {}).items():
            texts.add_text(key, text)
        masked = picture.convert("RGBA")
        alpha = mask_picture.convert("RGBA").getchannel("A")
        if alpha.size != masked.size:
            raise ValueError(
                f"the mask is {alpha.size[0]}x{alpha.size[1]}, the picture {masked.size[0]}x{masked.size[1]}"
            )
        masked.putalpha(alpha)
        masked.save(buffer, format="PNG", compress_level=4, pnginfo=texts)
    return buffer
