"""The user's files on the server: saved workflows, other files, and the editor's settings."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
from typing import Any
from urllib.parse import unquote

from aiohttp import web

from ..host import Host
from . import disk
from .answers import answer, asked, body_of, problem
from .files import download
from .paths import PathRefused, inside

log = logging.getLogger(__name__)

SETTINGS = "comfy.settings.json"
MOST_SETTINGS = 100 * disk.MB
# The front end requests these files when it opens, so they always exist. The first settings turn off the check for new
# ComfyUI releases.
FOLDERS, FILES = ("workflows", "subgraphs"), {"comfy.templates.json": b"[]", "user.css": b""}
FIRST_SETTINGS = {"Comfy.Notification.ShowVersionUpdates": False}


class UserData:
    """The folder of the only user: `default` in the host's user folder."""

    def __init__(self, host: Host):
        self.root = os.path.join(host.folders.get_user_directory(), "default")
        self.changing = asyncio.Lock()
        self._prepare()

    def _prepare(self) -> None:
        for name in FOLDERS:
            os.makedirs(os.path.join(self.root, name), exist_ok=True)
        default_files = {**FILES, SETTINGS: json.dumps(FIRST_SETTINGS, indent=4).encode()}
        for name, content in default_files.items():
            path = os.path.join(self.root, name)
            if not os.path.exists(path):
                disk.replace(path, [content])

    def add(self, routes: web.RouteTableDef) -> None:
        """Register every route."""
        routes.get("/users")(self.users)
        routes.get("/settings")(self.settings)
        routes.post("/settings")(self.change_settings)
        routes.get("/settings/{id}")(self.setting)
        routes.post("/settings/{id}")(self.change_setting)
        routes.get("/userdata")(self.listing)
        routes.get("/v2/userdata")(self.tree)
        routes.get("/userdata/{file}")(self.read)
        routes.post("/userdata/{file}")(self.write)
        routes.delete("/userdata/{file}")(self.delete)
        routes.post("/userdata/{file}/move/{dest}")(self.move)

    async def users(self, request: web.Request) -> web.Response:
        """GET /users: there is one user, whose files are on the server."""
        return answer({"storage": "server", "migrated": os.path.isdir(self.root)})

    def _path(self, name: str) -> str:
        """The path of a user's file. The front end URL-encodes the name twice, so decode it once more here."""
        decoded = unquote(name)
        if not decoded.strip("/"):
            raise PathRefused("the file name is missing")
        return inside(self.root, decoded)

    def _about(self, path: str, below: str) -> dict[str, Any]:
        stat = os.stat(path)
        return {
            "path": _relative(path, below),
            "size": stat.st_size,
            "modified": int(stat.st_mtime * 1000),
            "created": int(stat.st_ctime * 1000),
        }

    def _about_all(self, paths: list[str], below: str) -> list[dict[str, Any]]:
        """`_about` of each file that is there; links to nothing are left out."""
        entries = []
        for path in paths:
            with contextlib.suppress(FileNotFoundError):
                entries.append(self._about(path, below))
        return entries

    # settings
    def _settings(self) -> dict[str, Any]:
        """The saved settings; empty if there is no file, or if it is broken (which is logged, and the file renamed)."""
        path = os.path.join(self.root, SETTINGS)
        try:
            settings = json.loads(disk.read(path, MOST_SETTINGS).decode("utf-8"))
        except FileNotFoundError:
            return {}
        except (ValueError, RecursionError) as error:
            with contextlib.suppress(OSError):
                os.replace(path, f"{path}.broken")
            log.error(
                "%s is not JSON (%s); it was renamed to %s.broken, and settings start from their defaults",
                path,
                error,
                SETTINGS,
            )
            return {}
        if isinstance(settings, dict):
            return settings
        return {}

    async def _change(self, changes: dict[str, Any]) -> web.Response:
        async with self.changing:
            os.makedirs(self.root, exist_ok=True)
            text = json.dumps({**self._settings(), **changes}, indent=4)
            disk.replace(os.path.join(self.root, SETTINGS), [text.encode()])
        return web.Response()

    async def settings(self, request: web.Request) -> web.Response:
        """GET /settings."""
        return answer(self._settings())

    async def setting(self, request: web.Request) -> web.Response:
        """GET /settings/ID: the value of a setting, or null if it was never set."""
        return answer(self._settings().get(request.match_info["id"]))

    async def change_settings(self, request: web.Request) -> web.Response:
        """POST /settings: change several settings; the body is an object {id: value}."""
        return await self._change(await asked(request))

    async def change_setting(self, request: web.Request) -> web.Response:
        """POST /settings/ID: change one setting; the body is its value."""
        return await self._change({request.match_info["id"]: await body_of(request)})

    # files
    async def listing(self, request: web.Request) -> web.Response:
        """GET /userdata?dir=[&recurse=true][&full_info=true][&split=true]: the files in a folder."""
        directory = request.query.get("dir", "")
        if not directory:
            return problem("dir is missing")
        folder = inside(self.root, unquote(directory))
        if not os.path.isdir(folder):
            return problem("Directory not found", 404)
        files = await asyncio.to_thread(_files, folder, _yes(request, "recurse"))
        if _yes(request, "full_info"):
            return answer(self._about_all(files, folder))
        names = [_relative(path, folder) for path in files]
        return answer([[name, *name.split("/")] for name in names] if _yes(request, "split") else names)

    async def tree(self, request: web.Request) -> web.Response:
        """GET /v2/userdata?path=: all folders and files below a folder, folders first."""
        path = unquote(request.query.get("path", ""))
        folder = inside(self.root, path)
        if not os.path.exists(folder):
            if path:
                return problem("Requested path not found", 404)
            return answer([])
        if not os.path.isdir(folder):
            return problem("Requested path is not a directory")
        entries = []
        for parent, folders, files in os.walk(folder):
            entries += [self._entry(os.path.join(parent, name), "directory") for name in folders]
            entries += [self._entry(os.path.join(parent, name), "file") for name in files]
        return answer(sorted(entries, key=lambda entry: (entry["type"] != "directory", entry["name"].lower())))

    def _entry(self, path: str, kind: str) -> dict[str, Any]:
        entry: dict[str, Any] = {"name": os.path.basename(path), "path": _relative(path, self.root), "type": kind}
        if kind == "file":
            with contextlib.suppress(OSError):  # a broken link is listed without a size
                stat = os.stat(path)
                entry.update(size=stat.st_size, modified=stat.st_mtime)
        return entry

    async def read(self, request: web.Request) -> web.StreamResponse:
        """GET /userdata/FILE."""
        path = self._path(request.match_info["file"])
        if not os.path.isfile(path):
            return web.Response(status=404)
        if _relative(path, self.root) == "user.css":
            return web.FileResponse(path, headers={"Content-Type": "text/css"})
        return download(path)

    async def write(self, request: web.Request) -> web.Response:
        """POST /userdata/FILE[?overwrite=false][&full_info=true]: save the body as this file."""
        path = self._path(request.match_info["file"])
        if os.path.isdir(path):
            return problem("there is already a folder with that name", 409)
        is_new = request.query.get("overwrite") == "false"
        if is_new and os.path.lexists(path):  # before its body is read
            return problem("File already exists", 409)
        body = await request.read()
        os.makedirs(os.path.dirname(path), exist_ok=True)
        try:
            if is_new:
                await asyncio.to_thread(disk.create, path, [body])
            else:
                await asyncio.to_thread(disk.replace, path, [body])
        except FileExistsError:  # another page saved it meanwhile
            return problem("File already exists", 409)
        return self._named(request, path)

    async def delete(self, request: web.Request) -> web.Response:
        """DELETE /userdata/FILE."""
        path = self._path(request.match_info["file"])
        if not os.path.isfile(path):
            return web.Response(status=404)
        os.unlink(path)
        return web.Response(status=204)

    async def move(self, request: web.Request) -> web.Response:
        """POST /userdata/FILE/move/DEST[?overwrite=false]."""
        source, target = self._path(request.match_info["file"]), self._path(request.match_info["dest"])
        if not os.path.isfile(source):
            return web.Response(status=404)
        if os.path.isdir(target):
            return problem("File already exists", 409)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if request.query.get("overwrite") == "false":
            try:
                disk.rename_to_free(source, target)
            except FileExistsError:
                return problem("File already exists", 409)
        else:
            os.replace(source, target)
        return self._named(request, target)

    def _named(self, request: web.Request, path: str) -> web.Response:
        return answer(self._about(path, self.root) if _yes(request, "full_info") else _relative(path, self.root))


def _relative(path: str, folder: str) -> str:
    return os.path.relpath(path, folder).replace(os.sep, "/")


def _yes(request: web.Request, name: str) -> bool:
    return request.query.get(name, "").lower() == "true"


def _files(folder: str, below: bool) -> list[str]:
    """The files in a folder, sorted, without hidden ones (.name); `below` includes its subfolders."""
    paths = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if below and not name.startswith(".")]
        paths += [os.path.join(parent, name) for name in names if not name.startswith(".")]
    return sorted(paths)
