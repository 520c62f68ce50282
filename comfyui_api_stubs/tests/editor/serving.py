"""Starts the editor in a process of its own and talks to it, for the tests of the server."""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from PIL import Image

PATIENCE = 180.0  # seconds; a start imports torch, on machines that may be busy
IMPORTABLE = str(Path(__file__).resolve().parents[3])
PACK = Path(__file__).resolve().parent / "pack"  # a node pack with everything that a pack can bring


class Reply(NamedTuple):
    """The answer to a request."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Client:
    """Asks a server at `host`:`port`."""

    host: str
    port: int

    @property
    def address(self) -> str:
        return f"http://{self.host}:{self.port}"

    def ask(self, path: str, method: str = "GET", body: Any = None, headers: dict[str, str] | None = None) -> Reply:
        """One request; a body that is not bytes is sent as JSON."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=PATIENCE)
        data, given = body, headers or {}
        if body is not None and not isinstance(body, bytes):
            data, given = json.dumps(body).encode(), {"Content-Type": "application/json", **given}
        try:
            connection.request(method, path, body=data, headers=given)
            answer = connection.getresponse()
            return Reply(answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read())
        finally:
            connection.close()

    def raw(self, method: str, target: bytes, headers: dict[str, str] | None = None, body: bytes = b"") -> Reply:
        """One request whose target goes out byte for byte as it is given, which no client library would do."""
        return self.raws([(method, target)], headers, body)[0]

    def raws(
        self, requests: list[tuple[str, bytes]], headers: dict[str, str] | None = None, body: bytes = b""
    ) -> list[Reply]:
        """The answers to (method, target) pairs, all sent at once on one connection, or on as many as the server
        closes.
        """
        given = {"Host": f"{self.host}:{self.port}", "Content-Length": str(len(body)), **(headers or {})}
        head = "".join(f"\r\n{name}: {value}" for name, value in given.items()).encode() + b"\r\n\r\n" + body
        replies: list[Reply] = []
        while len(replies) < len(requests):
            left = requests[len(replies) : len(replies) + 100]
            with socket.create_connection((self.host, self.port), timeout=PATIENCE) as connection:
                connection.sendall(
                    b"".join(method.encode() + b" " + target + b" HTTP/1.1" + head for method, target in left)
                )
                with contextlib.closing(connection.makefile("rb")) as stream:
                    for method, _ in left:
                        answer = http.client.HTTPResponse(_Stream(stream), method=method)  # type: ignore[arg-type]
                        answer.begin()
                        named = {name.lower(): value for name, value in answer.getheaders()}
                        replies.append(Reply(answer.status, named, answer.read()))
                        if answer.will_close:
                            break
        return replies

    def upload(self, name: str, content: bytes, route: str = "/upload/image", **texts: str) -> Reply:
        """POST a form with a file `image` of that name and the given texts."""
        mark = uuid.uuid4().hex
        parts = [
            f'--{mark}\r\nContent-Disposition: form-data; name="{key}"\r\n\r\n{text}\r\n'.encode()
            for key, text in texts.items()
        ]
        quoted = name.replace("\\", "\\\\").replace('"', '\\"')
        head = (
            f'--{mark}\r\nContent-Disposition: form-data; name="image"; filename="{quoted}"\r\nContent-Type:'
            " image/png\r\n\r\n"
        )
        body = b"".join([*parts, head.encode("utf-8", "surrogateescape"), content, f"\r\n--{mark}--\r\n".encode()])
        return self.ask(route, "POST", body, {"Content-Type": f"multipart/form-data; boundary={mark}"})

    def queue(self, prompt: dict[str, Any], **more: Any) -> Reply:
        """POST /prompt."""
        return self.ask("/prompt", "POST", {"prompt": prompt, **more})

    def wait(self, prompt_id: str) -> dict[str, Any]:
        """The history entry of a queued workflow, once it has ended."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            found = self.ask(f"/history/{prompt_id}").json
            if prompt_id in found:
                return found[prompt_id]
            time.sleep(0.05)
        raise AssertionError(f"workflow {prompt_id} did not end; queue: {self.ask('/queue').json}")

    def wait_until_running(self, prompt_id: str) -> None:
        """Return once that workflow runs."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            if any(item[1] == prompt_id for item in self.ask("/queue").json["queue_running"]):
                return
            time.sleep(0.05)
        raise AssertionError(f"workflow {prompt_id} did not begin")


class Server(Client):
    """A running server; `place` is the folder it works in (input, output, user, models … are below it)."""

    STARTS: tuple[str, ...] = ("comfyui_api_stubs", "editor", "--pack", str(PACK))

    def __init__(self, place: Path, *options: str, port: int = 0, environment: dict[str, str] | None = None):
        self.place = place
        command = [sys.executable, "-m", *self.STARTS, "--port", str(port), "--no-browser", *options]
        self.process = subprocess.Popen(
            command,
            cwd=place,
            env={**os.environ, "PYTHONPATH": IMPORTABLE, **(environment or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []
        self._said: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()
        address = self.wait_for("editor: http").split()[1]
        self.host, _, given = address.removeprefix("http://").rstrip("/").rpartition(":")
        self.port = int(given)

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._said.put(line.rstrip("\n"))
        self._said.put(None)

    def wait_for(self, start: str) -> str:
        """The next line that begins so."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            line = self._said.get(timeout=PATIENCE)
            if line is None:
                break
            self.lines.append(line)
            if line.startswith(start):
                return line
        raise AssertionError(f"the server did not say {start!r}; it said:\n" + "\n".join(self.lines))

    def stop(self, number: int = signal.SIGINT) -> int:
        """End it as Ctrl-C does; its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        status = self.process.wait(PATIENCE)
        while (line := self._said.get(timeout=PATIENCE)) is not None:
            self.lines.append(line)
        return status


class _Stream:
    """What HTTPResponse wants of a socket, over a stream that several answers are read from."""

    def __init__(self, stream: BinaryIO):
        self.stream = stream

    def makefile(self, *_: Any) -> Any:
        return _Open(self.stream)


class _Open:
    """A stream that one answer cannot close."""

    def __init__(self, stream: BinaryIO):
        self.stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def close(self) -> None:
        """Left to whoever opened it."""


def at_once(count: int, ask: Callable[[int], Any]) -> list[Any]:
    """What `ask(number)` returns for each number, all of them asked at the same moment."""
    together = threading.Barrier(count)

    def one(number: int) -> Any:
        together.wait()
        return ask(number)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count)))


def front_end(folder: Path) -> Path:
    """A stand-in for ComfyUI's front end: the server tests need files to serve, not a page that works."""
    (folder / "extensions" / "core").mkdir(parents=True)
    (folder / "assets").mkdir()
    (folder / "index.html").write_text("<!doctype html><title>front end</title>")
    (folder / "extensions" / "core" / "own.js").write_text("export {}")
    (folder / "assets" / "a.css").write_text("body {}")
    return folder


def picture(width: int = 8, height: int = 6, color: tuple[int, ...] = (200, 30, 40, 128)) -> bytes:
    """A PNG of one color, with transparency when the color has four values."""
    out = io.BytesIO()
    Image.new("RGBA" if len(color) == 4 else "RGB", (width, height), color).save(out, format="PNG")
    return out.getvalue()


def shows(name: str = "picture", width: int = 16, color: int = 0xFF0000) -> dict[str, Any]:
    """A workflow that saves a picture of one color."""
    return {
        "1": {"class_type": "EmptyImage", "inputs": {"width": width, "height": 8, "batch_size": 1, "color": color}},
        "2": {"class_type": "SaveImage", "inputs": {"images": ["1", 0], "filename_prefix": name}},
    }


def steps(count: int, seed: int = 0) -> dict[str, Any]:
    """A workflow that takes so many steps, with a picture of each, and saves the last one."""
    return {
        "4": {"class_type": "PackSteps", "inputs": {"steps": count, "seed": seed}},
        "6": {"class_type": "SaveImage", "inputs": {"images": ["4", 0], "filename_prefix": "stepped"}},
    }
