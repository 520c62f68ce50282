"""The editor's server: damaged requests to every route and damaged WebSocket messages; nothing but answers below 500,
within seconds.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import socket
import threading
from pathlib import Path
from typing import Any
from urllib.parse import quote

from hypothesis import strategies as st

from .damage import CORPUS, damaged_bytes, damaged_json, odd, text_of
from .engine import PATIENCE, Target
from .workflows import API, texts

TARGETS = (
    "prompt",
    "queue",
    "interrupt",
    "free",
    "history",
    "history/{}",
    "jobs",
    "jobs/{}",
    "jobs/cancel",
    "jobs/{}/cancel",
    "view?filename={}",
    "view?filename=a.png&preview={}",
    "view?filename=a.png&channel={}",
    "view?filename={}&type={}&subfolder={}",
    "upload/image",
    "upload/mask",
    "userdata?dir={}",
    "v2/userdata?path={}",
    "userdata/{}",
    "userdata/{}/move/{}",
    "users",
    "settings",
    "settings/{}",
    "object_info",
    "object_info/{}",
    "models",
    "models/{}",
    "view_metadata/loras?filename={}",
    "extensions",
    "extensions/{}",
    "system_stats",
    "features",
    "embeddings",
    "internal/logs",
    "internal/files/{}",
    "i18n",
    "workflow_templates",
    "global_subgraphs",
    "global_subgraphs/{}",
    "graft/loras",
    "graft/lora_info?name={}",
    "graft/runs",
    "graft/runs/{}",
    "graft/runs/run/{}",
    "graft/stop?run={}",
    "graft/preferences",
    "jobs?status={}",
    "jobs?limit={}&offset={}",
    "jobs?sort_by={}&sort_order={}",
    "history?max_items={}&offset={}",
    "experiment/models/{}",
    "",
    "{}",
    "ws?clientId={}",
)
BODIES = (
    {"prompt": {}, "client_id": "a"},
    {"clear": True},
    {"delete": ["a"]},
    {"prompt_id": "a"},
    {"unload_models": True, "free_memory": True},
    {"job_ids": ["a"]},
    {"run": "a", "better": "0123456789ab-00000001-weights-0.jpg", "worse": "0123456789ab-00000002-weights-0.jpg"},
    {"Comfy.Setting": [1, {"a": None}]},
    [],
    "text",
    1,
    None,
)
HEADERS = (
    "Host",
    "Origin",
    "Content-Type",
    "Content-Length",
    "Transfer-Encoding",
    "Content-Encoding",
    "Range",
    "If-Modified-Since",
    "Cookie",
    "Sec-Fetch-Site",
    "Connection",
    "Upgrade",
    "Expect",
    "X-Forwarded-Host",
    "Accept-Encoding",
    "Comfy-User",
)
VALUES = (
    "",
    "a",
    "gzip",
    "deflate",
    "chunked",
    "bytes=0-",
    "bytes=-1",
    "bytes=5-1,9-",
    "application/json",
    "multipart/form-data",
    "multipart/form-data; boundary=x",
    "text/plain; charset=none",
    "application/json; charset=utf-16",
    "cross-site",
    "null",
    "-1",
    "99999999999",
    "http://evil.example",
    "localhost",
    "127.0.0.1:1",
    "close",
    "websocket",
    "100-continue",
    "Thu, 99 Foo 0000",
    "\xff",
    "a" * 9000,
)
NAMES = (
    "a",
    "a.png",
    "lora.safetensors",
    "broken.safetensors",
    "run",
    "latest",
    "default",
    "input",
    "output",
    "0",
    "-1",
    "99999999999999999999",
    "..",
    "../..",
    "%2e%2e",
    "a/b",
    "a%00b",
    "\udcff",
    "\u202e",
    "con",
    "x" * 300,
    "[output]",
    "webp;90",
    "jpeg;-1",
    "rgb",
    "a" * 5000,
)


HALF = 0.5  # seconds, then no answer is expected to what was sent


class Refused(Exception):
    """An answer of 400 to 499."""


class Routes(Target):
    """See above."""

    name = "routes"
    refusals = (Refused,)

    def __init__(self, place: Path) -> None:
        super().__init__(place)
        os.chdir(place)
        for name, body in _stored().items():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_bytes(body)
        self.said: list[str] = []
        self.server = _Serving(place, self.said)

    def cases(self) -> st.SearchStrategy[Any]:
        """("http", request) or ("socket", frames)."""
        return st.one_of(
            *[st.tuples(st.just("http"), requests())] * 5, st.tuples(st.just("socket"), st.lists(frames(), max_size=3))
        )

    def attempt(self, case: Any) -> None:
        """Ask, and look at the answer and at what the server logged."""
        kind, content = case
        self.said.clear()
        status = self._http(content) if kind == "http" else self._socket(content)
        if "in handle_expect_header" in "".join(self.said):
            raise Refused("aiohttp itself answers 500 to an Expect header that is not text")
        assert status < 500, f"answered {status}:\n" + "\n".join(self.said)
        assert not self.said, "logged an error:\n" + "\n".join(self.said)
        if status >= 400:
            raise Refused(str(status))

    def _http(self, request: bytes) -> int:
        with socket.create_connection(("127.0.0.1", self.server.port), timeout=PATIENCE) as connection:
            with contextlib.suppress(ConnectionError):  # it has answered before it has read all
                connection.sendall(request.replace(b"@host@", f"127.0.0.1:{self.server.port}".encode()))
                if not select.select([connection], [], [], HALF)[0]:
                    connection.shutdown(socket.SHUT_WR)  # it waits for the rest of a request that has none
            answer = _first(connection)
        return (
            int(answer.split()[1]) if answer.startswith(b"HTTP/1.") and answer.split()[1:2] else 400
        )  # it hung up, as on half a request

    def _socket(self, sent: list[bytes]) -> int:
        opening = (
            "GET /ws?clientId=fuzz HTTP/1.1\r\nHost: 127.0.0.1:{}\r\nUpgrade: websocket\r\nConnection:"
            " Upgrade\r\nSec-WebSocket-Key: {}"
        )
        with socket.create_connection(("127.0.0.1", self.server.port), timeout=PATIENCE) as connection:
            key = "dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
            connection.sendall(opening.format(self.server.port, key).encode())
            answer = _first(connection)
            with contextlib.suppress(ConnectionError):
                connection.sendall(b"".join(sent) + b"\x88\x80\0\0\0\0")
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(65536):
                    pass
        return 200 if b" 101 " in answer[:20] else int(answer.split()[1])

    def sound(self) -> None:
        """It answers, and forgets what was queued."""
        assert self._http(b'POST /queue HTTP/1.1\r\nHost: @host@\r\nContent-Length: 15\r\n\r\n{"clear": true}') == 200
        assert self._http(b"GET /prompt HTTP/1.1\r\nHost: @host@\r\n\r\n") == 200

    def close(self) -> None:
        """End the server, and leave its folder."""
        self.server.stop()
        os.chdir(self.place.parent.parent)


def _first(connection: socket.socket) -> bytes:
    """The first bytes of an answer, at least its status line."""
    body = b""
    with contextlib.suppress(ConnectionResetError):
        while b"\r\n" not in body:
            piece = connection.recv(65536)
            if not piece:
                break
            body += piece
    return body


def _stored() -> dict[str, bytes]:
    """What the routes can find."""
    found = {
        "input/a.png": CORPUS / "pictures/rgba.png",
        "output/a.png": CORPUS / "pictures/rgb.png",
        "models/loras/lora.safetensors": CORPUS / "loras/kohya.safetensors",
    }
    out = {name: path.read_bytes() for name, path in found.items()}
    out |= {
        f"output/graft/{path.name.replace('__', '/')}": path.read_bytes() for path in (CORPUS / "states").glob("run__*")
    }
    front = {"index.html": b"<!doctype html>", "assets/a.js": b"export {}", "extensions/core/own.js": b"export {}"}
    out |= {f"front/{name}": body for name, body in front.items()}
    whole = out["models/loras/lora.safetensors"]
    return {**out, "models/loras/broken.safetensors": whole[:300], "output/broken.png": out["output/a.png"][:60]}


class _Serving:
    """The embedded host's server in a thread of this process; errors of handlers go to `said`."""

    def __init__(self, place: Path, said: list[str]) -> None:
        self.place, self.said = place, said
        self.port, self.ready = 0, threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        assert self.ready.wait(120), "the server did not start"

    def _run(self) -> None:
        from aiohttp import web
        from aiohttp.http_exceptions import HttpProcessingError
        from graft_nodes.comfyui_api_stubs.editor.app import build
        from graft_nodes.headless import hosts

        host = hosts.open_host(
            hosts.Choice(None, "fuzzing"), True, str(self.place / "input"), str(self.place / "output")
        )
        self.loop = host.loop

        class Heard(logging.Handler):
            def emit(heard, record: logging.LogRecord) -> None:
                error = record.exc_info[1] if record.exc_info else None
                unreadable = isinstance(error, HttpProcessingError | web.RequestPayloadError)  # answered with 400
                if record.levelno >= logging.ERROR and error is not None and not unreadable:
                    self.said.append(heard.format(record))

        logging.getLogger().addHandler(Heard())
        logging.getLogger().setLevel(logging.ERROR)
        host.loop.set_exception_handler(
            lambda _, about: self.said.append(repr(about.get("exception") or about["message"]))
        )

        async def serve() -> None:
            runner = web.AppRunner(build(host, str(self.place / "front"), "127.0.0.1"), access_log=None)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self.port = runner.addresses[0][1]
            self.ready.set()

        host.loop.run_until_complete(serve())
        host.loop.run_forever()

    def stop(self) -> None:
        """Stop the loop."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(5)


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    """One HTTP request: a route with odd names in it, a body and headers; now and then with damage anywhere."""
    target = draw(st.sampled_from(TARGETS))
    while "{}" in target:
        name = draw(st.one_of(st.sampled_from(NAMES), st.text(max_size=5)))
        quoted = quote(name.encode("utf-8", "surrogateescape"), safe=draw(st.sampled_from(("", "/%", "/%.;&=?"))))
        target = target.replace("{}", quoted, 1)
    method = draw(
        st.sampled_from(("GET", "GET", "GET", "POST", "POST", "POST", "DELETE", "PUT", "HEAD", "OPTIONS", "PATCH", "X"))
    )
    body, headers = draw(bodies()) if method not in ("GET", "HEAD") else (b"", {})
    headers = {"Host": "@host@", **({"Content-Length": str(len(body))} if body else {}), **headers}
    for name in draw(st.lists(st.sampled_from(HEADERS), max_size=2)) if draw(st.booleans()) else ():
        headers[name] = draw(st.sampled_from(VALUES))
    prefix = draw(st.sampled_from(("/", "/", "/api/", "//")))
    head = (
        f"{method} {prefix}{target} HTTP/1.1\r\n"
        + "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        + "\r\n"
    )
    whole = head.encode("latin-1", "replace") + body
    return draw(damaged_bytes([whole], 3)) if draw(st.integers(0, 3)) == 0 else whole


_PROMPTS = texts(API)
_FILES = [path.read_bytes() for path in sorted((CORPUS / "pictures").iterdir())]


@st.composite
def bodies(draw: st.DrawFn) -> tuple[bytes, dict[str, str]]:
    """(a body, headers that say what it is)."""
    kind = draw(st.integers(0, 4))
    if kind == 0:
        prompt = draw(damaged_json(_PROMPTS, 3))
        return text_of({"prompt": prompt, "client_id": "fuzz", **draw(_extras())}), {"Content-Type": "application/json"}
    if kind == 1:
        return text_of(draw(damaged_json([json.dumps(body) for body in BODIES], 3))), {
            "Content-Type": "application/json"
        }
    if kind == 2:
        return draw(st.binary(max_size=60)), {}
    name, file = draw(st.sampled_from(NAMES)), draw(damaged_bytes(_FILES, 3))
    texts = draw(
        st.dictionaries(
            st.sampled_from(("type", "subfolder", "overwrite", "original_ref", "")),
            st.sampled_from(
                (
                    "input",
                    "temp",
                    "output",
                    "..",
                    "a",
                    "true",
                    '{"filename": "a.png"}',
                    '{"filename": "broken.png"}',
                    "{",
                    "[" * 3000,
                    "\xff",
                )
            ),
            max_size=3,
        )
    )
    parts = [
        f'--x\r\nContent-Disposition: form-data; name="{key}"\r\n\r\n{text}\r\n'.encode() for key, text in texts.items()
    ]
    head = f'--x\r\nContent-Disposition: form-data; name="image"; filename="{name}"\r\nContent-Type: image/png\r\n\r\n'
    whole = b"".join([*parts, head.encode("utf-8", "surrogateescape"), file, b"\r\n--x--\r\n"])
    return draw(damaged_bytes([whole], 2)), {"Content-Type": "multipart/form-data; boundary=x"}


def _extras() -> st.SearchStrategy[dict[str, Any]]:
    names = st.sampled_from(("prompt_id", "number", "front", "extra_data", "partial_execution_targets", "client_id"))
    return st.dictionaries(names, odd(), max_size=2)


@st.composite
def frames(draw: st.DrawFn) -> bytes:
    """One WebSocket frame of a client, unmasked or of a wrong length now and then."""
    message = {"type": "feature_flags", "data": {"supports_preview_metadata": True}}
    body = (
        text_of(draw(damaged_json([json.dumps(message)], 3))) if draw(st.booleans()) else draw(st.binary(max_size=20))
    )
    first = draw(st.sampled_from((0x81, 0x81, 0x81, 0x82, 0x80, 0x01, 0x89, 0x8A, 0x88, 0xC1, 0xFF)))
    size = bytes([0x80 | len(body)]) if len(body) < 126 else b"\xfe" + len(body).to_bytes(2, "big")
    frame = bytes([first]) + size + b"\0\0\0\0" + body
    return draw(damaged_bytes([frame], 2)) if draw(st.integers(0, 3)) == 0 else frame
