"""The web application: every route, with and without /api before it, behind the guard."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from ..hosts import Host
from .about import About
from .clients import Clients
from .files import Files
from .guard import explained, guard
from .packs import Packs
from .prompts import Prompts
from .userdata import UserData


def build(host: Host, front_end: str, listen: str) -> web.Application:
    """The application of an open embedded host, not yet listening; events of the host go to its clients from now on."""
    app = host.server.app
    app["largest_upload"] = host.server.largest_upload
    app.middlewares.append(guard(listen))
    app.middlewares.append(explained)
    clients = Clients(host.server, host.server.largest_upload)
    host.server.send_sync = clients.send_sync
    routes, packs = web.RouteTableDef(), Packs(host, front_end)
    routes.get("/ws")(clients.connect)
    for part in (Prompts(host), Files(host), UserData(host), About(host, clients.features), packs):
        part.add(routes)
    _add_twice(app, [*routes, *(_definition(route) for route in host.server.routes)])
    files = web.RouteTableDef()
    packs.add_files(files)
    app.add_routes(files)
    app.cleanup_ctx.append(clients.running)
    app.on_shutdown.append(clients.close)
    return app


def _definition(route: Any) -> web.RouteDef:
    """A route that a pack registered, as aiohttp has it."""
    method, path, handler = route
    return web.route(method, path, handler)


def _add_twice(app: web.Application, routes: list[web.RouteDef]) -> None:
    """Add routes under their own address and under /api, as clients use both."""
    for route in routes:
        for prefix in ("/api", ""):
            if route.method == "GET":
                app.router.add_get(prefix + route.path, route.handler)
            else:
                app.router.add_route(route.method, prefix + route.path, route.handler)
