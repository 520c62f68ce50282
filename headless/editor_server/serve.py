"""`python -m graft_nodes editor`: opens the embedded host, serves ComfyUI's front end, and stops cleanly on Ctrl-C."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import os
import signal
import socket
import sys
import webbrowser
from typing import Any

from .. import hosts, log
from ..caching import chosen
from ..problem import HostError

PATIENCE = 60.0  # seconds to wait for an interrupted workflow to end
FRONT_END = "comfyui_frontend_package"
INSTALL = "install Graft with its 'editor' extra (pip install 'graft-nodes[editor]')"


def main(arguments: argparse.Namespace) -> int:
    """Serve until Ctrl-C; returns 0, or 1 if the running workflow had to be cut off. Raises HostError if something is
    missing.
    """
    front_end = find_front_end(arguments.front_end_root)
    listening = listen(arguments.listen, arguments.port)
    with contextlib.closing(listening):
        choice = hosts.Choice(None, "the editor runs on it")
        host = hosts.open_host(choice, arguments.cpu, arguments.input, arguments.output, chosen(arguments))
        hosts.load_packs(host, arguments.pack)
        log.say(f"host: {choice}")
        return host.loop.run_until_complete(_serve(host, front_end, listening, arguments))


def find_front_end(root: str | None) -> str:
    """The folder with the front end's index.html: `root`, else the installed package's. Raises HostError if there is
    none.
    """
    if importlib.util.find_spec("aiohttp") is None:
        raise HostError(f"the editor needs aiohttp, which is not installed; {INSTALL}")
    if root is None:
        spec = importlib.util.find_spec(FRONT_END)
        if spec is None or not spec.submodule_search_locations:
            raise HostError(
                f"the editor needs ComfyUI's front end (comfyui-frontend-package), which is not installed; {INSTALL}"
            )
        root = os.path.join(next(iter(spec.submodule_search_locations)), "static")
    folder = hosts.folder_named(root, "--front-end-root")
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


async def _serve(host: hosts.Host, front_end: str, listening: socket.socket, arguments: argparse.Namespace) -> int:
    from aiohttp import web

    from .app import build, runner_of
    from .guard import is_loopback
    from .worker import Worker

    runner = runner_of(build(host, front_end, arguments.listen))
    await runner.setup()
    worker, ended = Worker(host), asyncio.Event()
    worker.start()
    try:
        await web.SockSite(runner, listening).start()
        with _on_signal(host.loop, ended):
            if ":" in arguments.listen:
                url_host = f"[{arguments.listen}]"
            else:
                url_host = arguments.listen
            reachable_host = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}.get(url_host, url_host)
            address = f"http://{reachable_host}:{listening.getsockname()[1]}/"
            if not is_loopback(arguments.listen):
                log.say(
                    f"graft_nodes: listening on {arguments.listen}: there are no passwords, so anyone who can reach"
                    " this machine can run workflows on it",
                    sys.stderr,
                )
            log.say(f"editor: {address}  (press Ctrl-C to stop)")
            if not arguments.no_browser:
                await asyncio.to_thread(webbrowser.open, address)
            await ended.wait()
    finally:
        waiting = len(host.server.prompt_queue.queue)
        stopped = await asyncio.to_thread(worker.stop, PATIENCE)
        await runner.cleanup()
    _say_how_it_ended(stopped, waiting)
    if stopped:
        return 0
    return 1


def _say_how_it_ended(done: bool, waiting: int) -> None:
    if waiting:
        log.say(f"graft_nodes: {waiting} queued workflow{'s were' if waiting > 1 else ' was'} not run", sys.stderr)
    if not done:
        log.say(f"graft_nodes: the running workflow did not stop within {PATIENCE:.0f} s and was cut off", sys.stderr)
    log.say("editor: ended")


@contextlib.contextmanager
def _on_signal(loop: asyncio.AbstractEventLoop, ended: asyncio.Event):
    """Set the event on the first Ctrl-C (or SIGTERM); the second one stops Python at once, as usual."""
    previous: dict[int, Any] = {}

    def end(number: int, frame: object) -> None:
        log.say(
            "\neditor: stopping; a running workflow is interrupted and its state is kept (press Ctrl-C again to stop"
            " at once)",
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
