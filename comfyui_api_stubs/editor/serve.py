"""Serves ComfyUI's front end on an open host, and stops cleanly on Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import signal
import socket
import webbrowser
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..host import Host
from ..host_error import HostError

PATIENCE = 60.0  # seconds to wait for an interrupted workflow to end
FRONT_END = "comfyui_frontend_package"


def find_front_end(root: str | None, install: str) -> str:
    """The folder with the front end's index.html: `root`, else the installed package's. `install` says how to install
    what is missing. Raises HostError.
    """
    if importlib.util.find_spec("aiohttp") is None:
        raise HostError(f"the editor needs aiohttp, which is not installed; {install}")
    if root is None:
        spec = importlib.util.find_spec(FRONT_END)
        if spec is None or not spec.submodule_search_locations:
            raise HostError(
                f"the editor needs ComfyUI's front end (comfyui-frontend-package), which is not installed; {install}"
            )
        root = os.path.join(next(iter(spec.submodule_search_locations)), "static")
    folder = Path(root).absolute()
    if not (folder / "index.html").is_file():
        raise HostError(f"{folder} is not ComfyUI's front end: it has no index.html")
    return str(folder)


def listen(address: str, port: int) -> socket.socket:
    """Open a listening socket. Raises HostError if the address is not this machine's or the port is in use."""
    if ":" in address:
        family = socket.AF_INET6
    else:
        family = socket.AF_INET
    try:
        return socket.create_server((address, port), family=family, backlog=128)
    except (OSError, OverflowError, ValueError, TypeError) as error:  # the last two: an invalid host name
        raise HostError(
            f"cannot listen on {address[:100]} port {port}: {error}; choose another with --port (0: any free one)"
        ) from error


def serve(
    host: Host, front_end: str, listening: socket.socket, listen: str, opens_browser: bool, say: Callable[[str], None]
) -> bool:
    """Serve on a socket that `listen` opened until Ctrl-C; `say` prints a line. Returns whether the running workflow
    stopped; when it did not, it was cut off.
    """
    return host.loop.run_until_complete(_serve(host, front_end, listening, listen, opens_browser, say))


async def _serve(
    host: Host, front_end: str, listening: socket.socket, listen: str, opens_browser: bool, say: Callable[[str], None]
) -> bool:
    from aiohttp import web

    from .app import build, runner_of
    from .guard import is_loopback
    from .worker import Worker

    runner = runner_of(build(host, front_end, listen))
    await runner.setup()
    worker, ended = Worker(host), asyncio.Event()
    worker.start()
    try:
        await web.SockSite(runner, listening).start()
        with _on_signal(host.loop, ended, say):
            url_host = f"[{listen}]" if ":" in listen else listen
            reachable_host = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}.get(url_host, url_host)
            address = f"http://{reachable_host}:{listening.getsockname()[1]}/"
            if not is_loopback(listen):
                say(
                    f"editor: listening on {listen}: there are no passwords, so anyone who can reach this machine can"
                    " run workflows on it"
                )
            say(f"editor: {address}  (press Ctrl-C to stop)")
            if opens_browser:
                await asyncio.to_thread(webbrowser.open, address)
            await ended.wait()
    finally:
        waiting = len(host.server.prompt_queue.queue)
        stopped = await asyncio.to_thread(worker.stop, PATIENCE)
        await runner.cleanup()
    if waiting:
        say(f"editor: {waiting} queued workflow{'s were' if waiting > 1 else ' was'} not run")
    if not stopped:
        say(f"editor: the running workflow did not stop within {PATIENCE:.0f} s and was cut off")
    say("editor: ended")
    return stopped


@contextlib.contextmanager
def _on_signal(loop: asyncio.AbstractEventLoop, ended: asyncio.Event, say: Callable[[str], None]) -> Iterator[None]:
    """Set the event on the first Ctrl-C (or SIGTERM); the second one stops Python at once, as usual."""
    previous: dict[int, Any] = {}

    def end(number: int, frame: object) -> None:
        say(
            "\neditor: stopping; a running workflow is interrupted and its state is kept (press Ctrl-C again to stop"
            " at once)"
        )
        for signal_number, handler in previous.items():
            signal.signal(signal_number, handler)
        loop.call_soon_threadsafe(ended.set)

    for number in (signal.SIGINT, signal.SIGTERM):
        previous[number] = signal.signal(number, end)
    try:
        yield
    finally:
        for signal_number, handler in previous.items():
            signal.signal(signal_number, handler)
