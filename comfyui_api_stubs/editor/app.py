"""The web application: all routes, with and without the /api prefix, behind the guard."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from ..host import Host
from .about import About
from .bodies import bodies
from .clients import Clients
from .files import Files
from .guard import explained, guard
from .packs import Packs
from .prompts import Prompts
from .userdata import UserData

IDLE = 75.0  # seconds


def build(host: Host, front_end: str, listen: str) -> web.Application:
    """The web application of an open embedded host, not yet listening; the host's events now go to its clients."""
    app = host.server.app
    app["largest_upload"] = host.server.largest_upload
    app.middlewares.append(guard(listen))
    app.middlewares.append(bodies())
    app.middlewares.append(explained)
    clients = Clients(host.server, host.server.largest_upload)
    host.server.send_sync = clients.send_sync
    routes, packs = web.RouteTableDef(), Packs(host, front_end)
    routes.get("/ws")(clients.connect)
    for handlers in (Prompts(host), Files(host), UserData(host), About(host, clients.features), packs):
        handlers.add(routes)
    _add_twice(app, [*routes, *(_definition(route) for route in host.server.routes)])
    files = web.RouteTableDef()
    packs.add_files(files)
    app.add_routes(files)
    app.cleanup_ctx.append(clients.running)
    app.on_shutdown.append(clients.close)
    return app


def runner_of(app: web.Application, idle: float = IDLE) -> web.AppRunner:
    """Runs an application; ends connections on which no whole request arrives for `idle` seconds."""
    return web.AppRunner(app, access_log=None, shutdown_timeout=2.0, keepalive_timeout=idle)


def _definition(route: Any) -> web.RouteDef:
    """A route that a pack registered, as an aiohttp RouteDef."""
    method, path, handler = route
    return web.route(method, path, handler)


def _add_twice(app: web.Application, routes: list[web.RouteDef]) -> None:
    """Add each route with and without the /api prefix, as clients use both."""
    for route in routes:
        for prefix in ("/api", ""):
            if route.method == "GET":
                app.router.add_get(prefix + route.path, route.handler)
            else:
                app.router.add_route(route.method, prefix + route.path, route.handler)
