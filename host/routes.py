"""What Graft's panels ask the server: LoRA files and what they say of themselves, stored runs, to stop a training step,
to keep preference pairs, and the folders, pictures and captions of datasets.

The routes are registered on ComfyUI's PromptServer, real or embedded, while the pack loads. They take names and keys,
never paths.

    GET  /graft/loras                 {"loras": [name]}, as the LoRA nodes name them
    GET  /graft/near_loras?name=      {"near": [name]}, which files a missing one may have been
    GET  /graft/lora_info?name=       what one file says of itself
    GET  /graft/lora_preview?name=    {"picture", "problem"}, its preview picture as a data URL
    GET  /graft/lora_row?name=&blocks=&schedule=  {"blocks", "problems"}, the strength of each of its blocks
    GET  /graft/lora_upload?name=&size=  whether a file of this name and size may be sent
    POST /graft/lora_upload?name=     stores a LoRA file, its bytes the body: {"name", "new"}
    GET  /graft/runs                  {"runs": [{run, states, step}]}
    GET  /graft/runs/RUN              {"run", "states": [{key, step, kind, changed}]}
    GET  /graft/runs/RUN/KEY?until=   one state with its history and previews, or the furthest on the way to it, which
                                      is step `until`; KEY "latest" is the furthest, "live" what a training step that
                                      runs has reached
    GET  /graft/running               {"running": [{node, workflow, run, key, until}]}, the training steps that run
    POST /graft/stop?run=             ends the running step of that run after the step it is at; its state is kept
    POST /graft/sample?run=           has it sample its previews after the step it is at
    POST /graft/save?run=             has it keep its state after the step it is at
    GET  /graft/preferences?run=      {"folder", "pairs", "marked": [[better, worse]]}, two previews' names each
    POST /graft/preferences           {"run", "better", "worse"}, two previews' names: keeps them as a pair, and answers
                                      {"folder", "pairs", "name", "captioned"}
    GET  /graft/dataset/folders       the folders of ComfyUI's input folder, with their numbers of pictures
    GET  /graft/dataset/files?folder= {"files": [name]} of a folder, so that nothing is uploaded over them
    POST /graft/dataset/glance        {the inputs of a Dataset[, "only": name]}: what it would read, from headers
    GET  /graft/dataset/losses?folder=  {"run", "step", "pictures": {name: {before, after, caption_help, caption,
                                      reasons}}}, what Picture Losses has measured
    GET  /graft/dataset/thumbnail?folder=&name=     a small WebP of a picture
    GET  /graft/dataset/caption?folder=&name=&captions=&encoding=    {"file", "text", "version"} of its caption
    POST /graft/dataset/caption       the same and {"text", "version"}: writes it, if it still is of that version

They answer ComfyUI's own page and programs. What is posted is JSON (of Content-Type application/json), and a LoRA file
application/octet-stream.

What is wrong comes back as {"error": "…"} with 400 (not a name, no LoRA), 403 (another site asks), 404 (not there),
409 (it does not run, is damaged, has changed meanwhile, or there is another of the name), 413 (too much), 415 (content
of another type), 500 (the disk) or 507 (the disk is full). No answer names a folder or quotes a damaged file.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..storage.printable import logger
from . import events, folders
from .browser_json import read_name, read_step, text_of

if TYPE_CHECKING:
    from .comfyui_objects import Request

log = logger(__name__)

Answer = tuple[int, Any]
Handler = Callable[[Any], Awaitable[Any]]
MOST_BYTES = 4 << 20  # of a question's body
_UPLOAD = "/graft/lora_upload"
_JSON = "application/json"
_ANOTHER_SITE: Answer = (403, {"error": "another site's page asked for this; only ComfyUI's own page may"})


def register() -> None:
    """Adds the routes to ComfyUI's server, if there is one."""
    instance = events.prompt_server()
    if instance is not None:
        register_on(instance)


def register_on(instance: Any) -> None:
    """Adds the routes to a server. A second copy of the pack in the same process adds none."""
    paths = {getattr(route, "path", None) for route in instance.routes}
    for method, path, handle, content in (
        *((method, path, _make_handler(ask), _JSON) for method, path, ask in _ROUTES),
        *(("get", path, _make_handler(ask, draws=True), _JSON) for path, ask in _PICTURES),
        *(("post", path, _make_body_handler(ask), _JSON) for path, ask in _ROUTES_WITH_BODY),
        ("post", _UPLOAD, _receive_upload, "application/octet-stream"),
    ):
        if path not in paths:
            getattr(instance.routes, method)(path)(_guard(handle, content))


def _guard(handle: Handler, content: str) -> Handler:
    """The handler of a route that answers ComfyUI's own page and programs only, and takes content of one type only.

    A page of another site can send forms and plain text anywhere without asking first, and nothing else.
    """

    async def guarded(request: Request) -> Any:
        from . import other_site

        reason = other_site.refusal(request.headers)
        if reason:
            log.warning("Graft: refused %s %s: %s", request.method, request.path, reason)
            return _response(*_ANOTHER_SITE)
        if request.method != "GET":
            sent = request.headers.get("Content-Type", "")
            if sent.partition(";")[0].strip().lower() != content:
                found = repr(sent[:100]) if sent else "none"
                return _response(415, {"error": f"expected Content-Type {content}, found {found}"})
            if request.headers.get("Content-Encoding", "identity").strip().lower() not in ("", "identity"):
                # its size would show only when it is unpacked
                return _response(415, {"error": "send the body as it is, without Content-Encoding"})
        return await handle(request)

    return guarded


def _make_handler(ask: Callable[[Any], Answer], draws: bool = False) -> Handler:
    """An aiohttp handler that answers in a thread, as files are read and answers may be long. What `draws` has the few
    threads for pictures, and never those that ComfyUI's own page waits for.
    """

    async def handle(request: Request) -> Any:
        def answer() -> Any:
            return _response(*_answer(ask, request))

        if not draws:
            return await asyncio.to_thread(answer)
        from ..storage.pictures import DRAWING

        return await asyncio.get_running_loop().run_in_executor(DRAWING, answer)

    return handle


def _response(status: int, value: Any) -> Any:
    from aiohttp import web

    if isinstance(value, Mapping):
        return web.Response(text=text_of(value), status=status, content_type="application/json")
    return web.Response(body=value.body, status=status, headers=value.headers)


def _make_body_handler(ask: Callable[[Any], Answer]) -> Handler:
    """The handler of a question that is the JSON object in a request's body."""

    async def handle(request: Request) -> Any:
        if request.content_length is None or request.content_length > MOST_BYTES:
            return _response(413, {"error": f"expected at most {MOST_BYTES:,} bytes"})
        body = await request.read()
        return await _make_handler(lambda _: ask(_parse(body)))(request)

    return handle


def _parse(body: bytes) -> dict[str, Any]:
    try:
        values = json.loads(body)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise ValueError("expected a JSON object")
    return values


async def _receive_upload(request: Request) -> Any:
    """POST /graft/lora_upload: a body that is read as it arrives."""
    from . import lora_routes

    return _response(*await lora_routes.receive_file(request))


def _answer(ask: Callable[[Any], Answer], request: Request) -> Answer:
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
        log.warning("Graft: %s", error)
        return 500, {"error": f"{os.path.basename(str(error.filename or ''))}: {error.strerror or error}"}
    except ValueError as error:
        return 400, {"error": str(error)}


# --- LoRA files -------------------------------------------------------------------------------------------------------


def _near_loras(request: Request) -> Answer:
    return 200, {"near": folders.near_loras(read_name(request, "name"))}


# --- runs -------------------------------------------------------------------------------------------------------------


def _list_runs(request: Request) -> Answer:
    from ..training.store import listing

    return 200, {"runs": listing.runs(folders.training_folder())}


def _list_states(request: Request) -> Answer:
    from ..training.store import listing

    run = request.match_info["run"]
    states = listing.states(folders.training_folder(), run)
    if states:
        return (200, {"run": run, "states": states})
    return (404, {"error": f"run {run!r} has no stored state"})


def _describe_state(request: Request) -> Answer:
    from ..training.store import listing
    from . import previews

    run, key = request.match_info["run"], request.match_info["key"]
    if key == "live":
        state = events.live_state(run)
    else:
        state = listing.describe_state(folders.training_folder(), run, key, read_step(request, "until"))
    return 200, {**state, "previews": previews.list_kept(run, state["start"], state["step"])}


def _list_running(request: Request) -> Answer:
    return 200, {"running": [call.event_fields for call in events.running_calls()]}


def _stop(request: Request) -> Answer:
    run = read_name(request, "run")
    if not events.stop_run(run):
        return 409, {"error": f"no training step of run {run!r} is running"}
    return 200, {"run": run, "stopping": True}


def _make_ask(what: str) -> Callable[[Any], Answer]:
    """What asks a running training step to sample its previews or to save its state now."""

    def ask(request: Request) -> Answer:
        run = read_name(request, "run")
        if not events.ask_run(run, what):
            return 409, {"error": f"no training step of run {run!r} is running that can {what} now"}
        return 200, {"run": run, "asked": what}

    return ask


# --- what other files answer ------------------------------------------------------------------------------------------


def _answer_of(file: str, name: str) -> Callable[[Any], Answer]:
    """What a file of this folder answers under a name; imported when it is asked for, so that ComfyUI starts without
    it.
    """

    def ask(question: Any) -> Answer:
        answers: Mapping[str, Callable[[Any], Answer]] = import_module(f".{file}", __package__).ANSWERS
        return answers[name](question)

    return ask


_ROUTES: tuple[tuple[str, str, Callable[[Any], Answer]], ...] = (
    ("get", "/graft/loras", _answer_of("lora_routes", "all")),
    ("get", "/graft/near_loras", _near_loras),
    ("get", "/graft/lora_info", _answer_of("lora_routes", "info")),
    ("get", "/graft/lora_row", _answer_of("lora_routes", "row")),
    ("get", _UPLOAD, _answer_of("lora_routes", "may_come")),
    ("get", "/graft/runs", _list_runs),
    ("get", "/graft/runs/{run}", _list_states),
    ("get", "/graft/runs/{run}/{key}", _describe_state),
    ("get", "/graft/running", _list_running),
    ("post", "/graft/stop", _stop),
    ("post", "/graft/sample", _make_ask("sample")),
    ("post", "/graft/save", _make_ask("save")),
    ("get", "/graft/preferences", _answer_of("preference_routes", "marked")),
    ("get", "/graft/dataset/folders", _answer_of("dataset_routes", "folders")),
    ("get", "/graft/dataset/files", _answer_of("dataset_routes", "files")),
    ("get", "/graft/dataset/losses", _answer_of("picture_losses", "losses")),
    ("get", "/graft/dataset/caption", _answer_of("dataset_routes", "caption")),
)
_PICTURES: tuple[tuple[str, Callable[[Any], Answer]], ...] = (
    ("/graft/lora_preview", _answer_of("lora_routes", "preview")),
    ("/graft/dataset/thumbnail", _answer_of("dataset_routes", "thumbnail")),
)
_ROUTES_WITH_BODY: tuple[tuple[str, Callable[[Any], Answer]], ...] = (
    ("/graft/preferences", _answer_of("preference_routes", "mark")),
    ("/graft/dataset/glance", _answer_of("dataset_routes", "glance")),
    ("/graft/dataset/caption", _answer_of("dataset_routes", "write_caption")),
)
