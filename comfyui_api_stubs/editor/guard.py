"""Refuses requests from other websites: the Host must be an address that this server listens on, and the Origin must be
this server's own page.

A web page can make a browser send requests to 127.0.0.1, either directly (CSRF) or through a domain name that points
there (DNS rebinding). ComfyUI compares Origin with Host when the host is a loopback address. This guard also checks the
Host itself, refuses an opaque Origin, and refuses requests from other sites even if the browser sends no Origin.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Mapping
from urllib.parse import urlsplit

from aiohttp import web

from .answers import NotJson
from .paths import PathRefused, identifier

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}
NEXT_STEPS = {
    errno.ENOSPC: "free some space there, then do the same again",
    errno.EDQUOT: "your quota is used up: free some space there, then do the same again",
    errno.EIO: "the drive fails: start the server with a folder on another one",
    errno.EROFS: "make the drive writable, or start the server with another folder",
    errno.EACCES: "this user may not write there: grant the right to, or start the server with another folder",
}
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "SAMEORIGIN",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


def is_loopback(name: str) -> bool:
    """Whether a host name or address can only be reached from this machine."""
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def guard(listen: str) -> Callable:
    """The middleware for a server that listens on `listen`: refuses requests from other sites (403) and adds security
    headers.
    """
    everywhere = not is_loopback(listen)

    @web.middleware
    async def checked(request: web.Request, handler: Handler) -> web.StreamResponse:
        if not request.raw_path.startswith("/"):
            return web.Response(status=400, text="this server is not a proxy", headers=HEADERS)
        reason = refused(request.headers, everywhere, listen) or _from_another_site(request)
        if reason:
            log.warning("refused %s %s: %s", request.method, request.path, reason)
            return web.Response(status=403, text=reason.encode("ascii", "backslashreplace").decode(), headers=HEADERS)
        try:
            response = await handler(request)
        except web.HTTPException as error:  # aiohttp raises this for 404, 405, 413 …
            _harden(error)
            raise
        if not response.prepared:
            _harden(response)
        return response

    return checked


def _harden(response: web.StreamResponse) -> None:
    for name, value in HEADERS.items():
        response.headers.setdefault(name, value)
    response.headers.setdefault("Cache-Control", "no-cache")


def refused(headers: Mapping[str, str], everywhere: bool, listen: str) -> str:
    """Why the Host or Origin of a request is refused; empty if both are fine. `everywhere`: other machines can
    reach the server.
    """
    host = headers.get("Host", "").lower()
    name = _name(host)
    if not name:
        return "a request needs a Host header"
    if not (
        is_loopback(name) or (everywhere and (name == listen.lower() or _is_address(name) or name in _own_names()))
    ):
        return f"Host {host!r} is not this server; use the address that it printed"
    origin = headers.get("Origin")
    if origin is not None and not _is_own(origin, host):
        return f"Origin {origin!r} is not this server ({host})"
    return ""


def _from_another_site(request: web.Request) -> str:
    """Why a request is refused because another site sent it (Sec-Fetch-Site), else empty. A link from another site to
    the start page is allowed.
    """
    opens = request.method == "GET" and request.path == "/" and request.headers.get("Sec-Fetch-Dest") == "document"
    site = request.headers.get("Sec-Fetch-Site", "none")
    return "" if opens or site in ("none", "same-origin") else f"a {site} request"


def _is_own(origin: str, host: str) -> bool:
    """Whether a page of this origin has the address in a Host header. The origin of a page without one, such as a file,
    is "null".
    """
    scheme, _, address = origin.lower().partition("://")
    port = _DEFAULT_PORTS.get(scheme)
    return port is not None and address.removesuffix(port) == host.removesuffix(port)


def _name(host: str) -> str:
    """The host name in a Host header, without the port; empty if the header is not valid."""
    try:
        parts = urlsplit(f"//{host}")
        _ = parts.port
    except ValueError:
        return ""
    if parts.netloc == host and "@" not in host and not parts.path:
        return parts.hostname or ""
    return ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _own_names() -> set[str]:
    """The names of this machine."""
    hostname = socket.gethostname().lower()
    return {hostname, f"{hostname}.local", hostname.split(".")[0]}


@web.middleware
async def explained(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn errors into JSON responses with a message: 400 for an unsafe path or a body that is not JSON, 409 for a path
    that cannot be used, 507 for a full disk, 500 for other disk errors.
    """
    try:
        for value in request.match_info.values():
            identifier(value)
        return await handler(request)
    except (PathRefused, NotJson) as error:
        return web.json_response({"error": str(error)}, status=400)
    except (ConnectionError, web.RequestPayloadError) as error:  # the body is incomplete, or its compression is broken
        return web.json_response({"error": f"the request ended early: {error}"}, status=400)
    except (FileExistsError, FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        return web.json_response({"error": f"cannot use that path: {error.strerror}"}, status=409)
    except OSError as error:  # a full or broken disk, or a read-only folder
        if error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
            return web.json_response({"error": f"cannot use that path: {error.strerror}"}, status=409)
        log.error("%s %s: %s", request.method, request.path, error)
        name = os.path.basename(os.fsdecode(error.filename or ""))
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            status = 507
        else:
            status = 500
        message = error.strerror or str(error)
        if request.method != "GET" and error.errno in NEXT_STEPS:
            message = f"{message} ({NEXT_STEPS[error.errno]})"
        return web.json_response({"error": f"{name}: {message}"}, status=status)
