"""Starts `python -m graft_nodes editor` in a process of its own and talks to it, for the tests of the server."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import queue
import shutil
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

ROOT = Path(__file__).resolve().parents[2]
UPLOAD_GB = "0.002"  # the servers of the browser tests take no larger LoRA
PATIENCE = 180.0  # seconds; a start imports torch, on machines that may be busy


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

    def __init__(self, place: Path, *options: str, port: int = 0, environment: dict[str, str] | None = None):
        self.place = place
        command = [
            sys.executable,
            "-m",
            "graft_nodes",
            "editor",
            "--port",
            str(port),
            "--no-browser",
            "--cpu",
            *options,
        ]
        self.process = subprocess.Popen(
            command,
            cwd=place,
            env={**os.environ, **(environment or {})},
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


class RealServer(Client):
    """The server of a ComfyUI checkout with Graft as a custom node, on the CPU, working in `place`."""

    def __init__(
        self, place: Path, checkout: str, front_end: str = "", environment: dict[str, str] | None = None
    ) -> None:
        self.place = place
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.host, self.port = "127.0.0.1", port
        script = Path(__file__).resolve().parents[1] / "with_comfyui" / "serve_comfyui.py"
        command = [
            sys.executable,
            str(script),
            str(Path(checkout).expanduser().resolve()),
            str(place),
            str(port),
            front_end,
        ]
        self.log = (place / "comfyui.log").open("w+", encoding="utf-8")
        env = {**os.environ, **(environment or {})}
        self.process = subprocess.Popen(command, env=env, stdout=self.log, stderr=subprocess.STDOUT)
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end and self.process.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                return
            except OSError:
                time.sleep(0.3)
        raise AssertionError(f"ComfyUI did not start:\n{(place / 'comfyui.log').read_text()[-3000:]}")

    def stop(self) -> None:
        """End it."""
        # not SIGINT, which a process that was started in the background ignores as long as it does not care
        self.process.terminate()
        self.process.wait(PATIENCE)
        self.log.close()


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


def named_front_end() -> list[str]:
    """The options of a Server that serves the front end in the folder that GRAFT_TEST_FRONT_END names, if it does."""
    named = os.environ.get("GRAFT_TEST_FRONT_END")
    return ["--front-end-root", named] if named else []


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
    import io

    from PIL import Image

    out = io.BytesIO()
    Image.new("RGBA" if len(color) == 4 else "RGB", (width, height), color).save(out, format="PNG")
    return out.getvalue()


def lora(path: Path, more: dict[str, str] | None = None) -> None:
    """A LoRA file of rank 4 that says a few things about itself, some of them markup, and `more`."""
    import torch
    from safetensors.torch import save_file

    layer = "lora_unet_input_blocks_1_1_transformer_blocks_0_attn1_to_q"
    factors = {f"{layer}.lora_down.weight": torch.zeros(4, 8), f"{layer}.lora_up.weight": torch.zeros(8, 4)}
    said = {"ss_network_dim": "4", "ss_todo_factor": "2", "modelspec.trigger_phrase": "zorp, <b>bold</b>"}
    save_file(
        {**factors, f"{layer}.alpha": torch.tensor(2.0)},
        path,
        {**said, "ss_base_model_version": "SD 1.5", **(more or {})},
    )


def shows(name: str = "picture", width: int = 16, color: int = 0xFF0000) -> dict[str, Any]:
    """A workflow that saves a picture of one color."""
    return {
        "1": {"class_type": "EmptyImage", "inputs": {"width": width, "height": 8, "batch_size": 1, "color": color}},
        "2": {"class_type": "SaveImage", "inputs": {"images": ["1", 0], "filename_prefix": name}},
    }


def samples(steps: int, seed: int = 0) -> dict[str, Any]:
    """A workflow that samples the demo model for so many steps and saves the picture."""
    return {
        "1": {"class_type": "GraftDemo", "inputs": {}},
        "2": {"class_type": "CLIPTextEncode", "inputs": {"clip": ["1", 1], "text": "red circle"}},
        "3": {"class_type": "EmptyLatentImage", "inputs": {"width": 64, "height": 64, "batch_size": 1}},
        "4": {
            "class_type": "KSampler",
            "inputs": {
                "model": ["1", 0],
                "positive": ["2", 0],
                "negative": ["2", 0],
                "latent_image": ["3", 0],
                "seed": seed,
                "steps": steps,
                "cfg": 1.0,
                "sampler_name": "euler",
                "scheduler": "simple",
                "denoise": 1.0,
            },
        },
        "5": {"class_type": "VAEDecode", "inputs": {"samples": ["4", 0], "vae": ["1", 2]}},
        "6": {"class_type": "SaveImage", "inputs": {"images": ["5", 0], "filename_prefix": "sampled"}},
    }


def fill_place(place: Path) -> dict[str, str]:
    """Put into a server's folder what the browser tests count on: the demo's pictures and a LoRA. The environment that
    such a server needs: error_stories.py tells of a LoRA that is larger than it takes.
    """
    (place / "models" / "loras").mkdir(parents=True)
    (place / "input").mkdir()
    for folder in ("concept", "regular"):
        shutil.copytree(ROOT / "demo" / folder, place / "input" / folder)
    lora(place / "models" / "loras" / "zorp.safetensors")
    return {"GRAFT_UPLOAD_GB": UPLOAD_GB}


def few_pictures(folder: Path) -> None:
    """Put eight of the demo's pictures with their captions into the folder `few` of an input folder."""
    (folder / "few").mkdir()
    for path in sorted((Path(__file__).resolve().parents[2] / "demo" / "concept").iterdir())[:16]:
        shutil.copy(path, folder / "few")


def trains(run: str, steps: int, seed: int = 0, **inputs: Any) -> dict[str, Any]:
    """A workflow that trains a small LoRA on the pictures of `few_pictures`."""
    return {
        "1": {"class_type": "GraftDemo", "inputs": {}},
        "2": {
            "class_type": "GraftDataset",
            "inputs": {
                "folder": "few",
                "vae": ["1", 2],
                "clip": ["1", 1],
                "resolution": 64,
                "buckets": False,
                "bucket_step": 64,
                "captions": "txt",
                "repeats": 1,
                "flip": 0.0,
                "shuffle_tags": False,
                "keep_tags": 0,
                "tag_dropout": 0.0,
                "caption_dropout": 0.0,
                "clip_skip": 0,
                "validation": 0.25,
                "filters": "",
                "regularization_share": 0.25,
            },
        },
        "3": {
            "class_type": "GraftTrainStart",
            "inputs": {
                "model": ["1", 0],
                "clip": ["1", 1],
                "dataset": ["2", 0],
                "seed": seed,
                "run": run,
            },
        },
        "4": {
            "class_type": "TrainStep",
            "inputs": {
                "state": ["3", 0],
                "steps": steps,
                "epochs": 0.0,
                "validate_every": 2,
                "preview_every": 0,
                "snapshot_every": 0,
                **inputs,
            },
        },
    }
