"""What Graft's panels ask the server: LoRA files and what they say of themselves, stored runs, to stop a training step,
and the folders, pictures and captions of datasets.

The routes are registered on ComfyUI's PromptServer, real or embedded, while the pack loads. They take names and keys,
never paths.

    GET  /graft/loras                 {"loras": [name]}, as the LoRA nodes name them
    GET  /graft/near_loras?name=      {"near": [name]}, which files a missing one may have been
    GET  /graft/lora_info?name=       what one file says of itself
    GET  /graft/runs                  {"runs": [{run, states, step}]}
    GET  /graft/runs/RUN              {"run", "states": [{key, step, kind, changed}]}
    GET  /graft/runs/RUN/KEY          one state with its history and previews; KEY "latest" is the furthest
    POST /graft/stop?run=             ends the running step of that run after the step it is at; its state is kept
    GET  /graft/dataset/folders       the folders of ComfyUI's input folder, with their numbers of pictures
    GET  /graft/dataset/files?folder= {"files": [name]} of a folder, so that nothing is uploaded over them
    POST /graft/dataset/glance        {the inputs of a Dataset[, "only": name]}: what it would read, from headers
    GET  /graft/dataset/thumbnail?folder=&name=     a small WebP of a picture
    GET  /graft/dataset/caption?folder=&name=&captions=&encoding=    {"file", "text", "version"} of its caption
    POST /graft/dataset/caption       the same and {"text", "version"}: writes it, if it still is of that version

What is wrong comes back as {"error": "…"} with 400 (not a name), 403 (another site asks to change something), 404 (not
there), 409 (it does not run, is damaged, or has changed meanwhile), 413 (too much) or 500 (the disk). No answer names a
folder or quotes a damaged file.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from . import events, folders, previews
from .browser_json import text_of

Answer = tuple[int, Any]
MOST_BYTES = 4 << 20  # of a question's body


def register() -> None:
    """Adds the routes to ComfyUI's server, if there is one."""
    import server

    instance = getattr(server.PromptServer, "instance", None)
    if instance is not None:
        register_on(instance)


def register_on(instance: Any) -> None:
    """Adds the routes to a server. A second copy of the pack in the same process adds none."""
    paths = {getattr(route, "path", None) for route in instance.routes}
    for method, path, ask in _ROUTES:
        if path not in paths:
            getattr(instance.routes, method)(path)(_handler(ask))
    for path, ask in _ROUTES_WITH_BODY:
        if path not in paths:
            instance.routes.post(path)(_reads_body(ask))


def _handler(ask: Callable[[Any], Answer]) -> Callable[[Any], Awaitable[Any]]:
    """An aiohttp handler that answers in a thread, as files are read."""

    async def handle(request: Any) -> Any:
        from aiohttp import web

        status, value = 403, {"error": "another site's page asked for this; only ComfyUI's own page may"}
        if request.method == "GET" or not _from_another_site(request.headers):
            status, value = await asyncio.to_thread(_answered, ask, request)
        if isinstance(value, Mapping):
            return web.Response(text=text_of(value), status=status, content_type="application/json")
        return web.Response(body=value.body, status=status, headers=value.headers)

    return handle


def _reads_body(ask: Callable[[Any], Answer]) -> Callable[[Any], Awaitable[Any]]:
    """The handler of a question that is the JSON object in a request's body."""

    async def handle(request: Any) -> Any:
        body = b""
        if not _from_another_site(request.headers):
            if request.content_length is None or request.content_length > MOST_BYTES:
                return await _handler(lambda _: (413, {"error": f"expected at most {MOST_BYTES:,} bytes"}))(request)
            body = await request.read()
        return await _handler(lambda _: ask(_parsed(body)))(request)

    return handle


def _parsed(body: bytes) -> dict[str, Any]:
    try:
        values = json.loads(body)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise ValueError("expected a JSON object")
    return values


def _from_another_site(headers: Mapping[str, str]) -> bool:
    """Whether a browser says that another site's page, or one without an origin, sends a request. ComfyUI compares
    Origin with Host, which says nothing where Origin is "null" or missing.
    """
    return headers.get("Origin") == "null" or headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin")


def _answered(ask: Callable[[Any], Answer], request: Any) -> Answer:
    from ..training.store.store import Damaged

    try:
        return ask(request)
    except Damaged as error:
        return 409, {"error": str(error).replace(folders.training_folder() + os.sep, "")}
    except FileNotFoundError as error:
        if error.errno is not None:  # the system's own message has the whole path
            return 404, {"error": "the file has just been removed"}
        return 404, {"error": str(error)}
    except OSError as error:
        logging.warning("Graft: %s", error)
        return 500, {"error": f"{os.path.basename(str(error.filename or ''))}: {error.strerror or error}"}
    except ValueError as error:
        return 400, {"error": str(error)}


def _named(request: Any, name: str) -> str:
    """A name from the query. ValueError when it is missing or has characters that no name has."""
    value = request.query.get(name, "")
    if not value.strip() or len(value) > 1000 or any(ord(character) < 32 for character in value):
        raise ValueError(f"{name} is missing or not a valid name: got {value[:100]!r}")
    return value


# --- LoRA files -------------------------------------------------------------------------------------------------------


def _loras(request: Any) -> Answer:
    return 200, {"loras": folders.lora_names()}


def _near_loras(request: Any) -> Answer:
    return 200, {"near": folders.near_loras(_named(request, "name"))}


def _lora_info(request: Any) -> Answer:
    from ..patches.lora_files import metadata
    from ..storage.safetensors import PickledFile

    name = _named(request, "name")
    if not folders.listed(name):
        raise FileNotFoundError(f"no LoRA file {name!r} in ComfyUI's loras folders")
    try:
        return 200, {"name": name, **metadata.describe(folders.lora_path(name))}
    except PickledFile:
        raise ValueError(f"{name!r} is a pickle; Graft reads safetensors only") from None
    except ValueError as error:  # it may name folders and quote the file
        logging.warning("Graft: %s", error)
        raise ValueError(f"{name!r} is damaged or no LoRA file; ComfyUI's log says more") from None


# --- runs -------------------------------------------------------------------------------------------------------------


def _runs(request: Any) -> Answer:
    from ..training.store import listing

    return 200, {"runs": listing.runs(folders.training_folder())}


def _run(request: Any) -> Answer:
    from ..training.store import listing

    run = request.match_info["run"]
    states = listing.states(folders.training_folder(), run)
    if states:
        return (200, {"run": run, "states": states})
    return (404, {"error": f"run {run!r} has no stored state"})


def _state(request: Any) -> Answer:
    from ..training.store import listing

    run = request.match_info["run"]
    state = listing.shown(folders.training_folder(), run, request.match_info["key"])
    return 200, {**state, "previews": previews.kept(run, state["start"], state["step"])}


def _stop(request: Any) -> Answer:
    run = _named(request, "run")
    if not events.stop(run):
        return 409, {"error": f"no training step of run {run!r} is running"}
    return 200, {"run": run, "stopping": True}


# --- datasets ---------------------------------------------------------------------------------------------------------


def _of_dataset(name: str) -> Callable[[Any], Answer]:
    """What datasets.py answers under a name; imported when it is asked for, so that ComfyUI starts without it."""

    def ask(question: Any) -> Answer:
        from . import datasets

        return datasets.ANSWERS[name](question)

    return ask


_ROUTES: tuple[tuple[str, str, Callable[[Any], Answer]], ...] = (
    ("get", "/graft/loras", _loras),
    ("get", "/graft/near_loras", _near_loras),
    ("get", "/graft/lora_info", _lora_info),
    ("get", "/graft/runs", _runs),
    ("get", "/graft/runs/{run}", _run),
    ("get", "/graft/runs/{run}/{key}", _state),
    ("post", "/graft/stop", _stop),
    ("get", "/graft/dataset/folders", _of_dataset("folders")),
    ("get", "/graft/dataset/files", _of_dataset("files")),
    ("get", "/graft/dataset/thumbnail", _of_dataset("thumbnail")),
    ("get", "/graft/dataset/caption", _of_dataset("caption")),
)
_ROUTES_WITH_BODY: tuple[tuple[str, Callable[[Any], Answer]], ...] = (
    ("/graft/dataset/glance", _of_dataset("glance")),
    ("/graft/dataset/caption", _of_dataset("write_caption")),
)
