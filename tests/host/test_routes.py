"""Every route that Graft adds, on a server that lets everything through, as ComfyUI is when it is reached by its LAN
address: who is answered, and what may be sent.
"""

import asyncio
import gzip
import json
import threading
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
from graft_nodes.host import routes

web = pytest.importorskip("aiohttp.web", reason="aiohttp is not installed: pip install aiohttp")
OCTETS, JSON = "application/octet-stream", "application/json"
LAN = "192.168.1.5:8188"
FROM_ELSEWHERE = [
    {"Origin": "http://evil.example"},
    {"Origin": "http://192.168.1.5"},
    {"Origin": "http://192.168.1.5:8189"},
    {"Origin": "http://192.168.1.50:8188"},
    {"Origin": "http://evil.example@192.168.1.5:8188"},
    {"Origin": "http://[::1"},
    {"Origin": "file://192.168.1.5:8188"},
    {"Origin": "null"},
    {"Origin": ""},
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site"},
    {"Origin": f"http://{LAN}", "Sec-Fetch-Site": "cross-site"},
]
FROM_HERE = [
    {},
    {"Origin": f"http://{LAN}"},
    {"Origin": f"HTTP://{LAN}"},
    {"Origin": f"https://{LAN}"},  # behind a proxy that speaks HTTPS with the browser
    {"Origin": f"http://{LAN}", "Sec-Fetch-Site": "same-origin"},
    {"Sec-Fetch-Site": "none"},
]


def added():
    """(method, path, handler) of every route that Graft adds."""
    table = web.RouteTableDef()
    routes.register_on(types.SimpleNamespace(routes=table))
    return [(route.method, route.path, route.handler) for route in table]


ADDED = [(method, path) for method, path, _ in added()]
POSTED = [path for method, path in ADDED if method == "POST"]


def answers(asked):
    """The (status, error) of requests (method, path, headers, body) that a server of these routes answers."""
    from aiohttp.test_utils import TestClient, TestServer

    async def talk():
        app = web.Application()
        for method, path, handler in added():
            app.router.add_route(method, path, handler)
        found = []
        async with TestClient(TestServer(app)) as client:
            for method, path, headers, body in asked:
                target = path.replace("{", "").replace("}", "")
                skipped = [] if "Content-Type" in headers else ["Content-Type"]
                given = {"Host": LAN, **headers}
                reply = await client.request(method, target, headers=given, data=body, skip_auto_headers=skipped)
                text = await reply.text()
                found.append((reply.status, json.loads(text).get("error", "") if reply.status >= 400 else ""))
        return found

    return asyncio.run(talk())


def content_of(path):
    return OCTETS if path == "/graft/lora_upload" else JSON


def test_there_are_routes_that_change_something():
    assert {"/graft/stop", "/graft/dataset/caption", "/graft/preferences", "/graft/lora_upload"} <= set(POSTED)


@pytest.mark.parametrize("headers", FROM_ELSEWHERE, ids=str)
def test_no_route_answers_another_site(headers):
    asked = [(method, path, {"Content-Type": content_of(path), **headers}, b"{}") for method, path in ADDED]
    for (method, path), (status, error) in zip(ADDED, answers(asked), strict=True):
        assert status == 403 and "only ComfyUI's own page may" in error, (method, path)


@pytest.mark.parametrize("headers", FROM_HERE, ids=str)
def test_every_route_answers_its_own_page_and_programs(headers):
    asked = [(method, path, {"Content-Type": content_of(path), **headers}, b"{}") for method, path in ADDED]
    for (method, path), (status, _) in zip(ADDED, answers(asked), strict=True):
        assert status not in (403, 415, 500), (method, path)


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        ("comfy.example", "http://comfy.example"),
        ("comfy.example:80", "http://comfy.example"),
        ("comfy.example", "https://comfy.example:443"),
        ("COMFY.example", "https://comfy.example"),
    ],
)
def test_the_usual_ports_may_be_left_out(host, origin):
    [(status, _)] = answers(
        [("POST", "/graft/stop?run=x", {"Host": host, "Origin": origin, "Content-Type": JSON}, b"{}")]
    )
    assert status == 409


@pytest.mark.parametrize(
    "sent",
    ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "text/json", None],
    ids=str,
)
def test_a_form_of_another_site_is_no_content_for_any_route(sent):
    """What a page can send elsewhere without asking first; old browsers say no Origin."""
    headers = {} if sent is None else {"Content-Type": sent}
    for path, (status, error) in zip(POSTED, answers([("POST", path, headers, b"{}") for path in POSTED]), strict=True):
        assert status == 415 and content_of(path) in error, path


def test_json_with_a_charset_is_json():
    headers = {"Content-Type": "application/json; charset=utf-8"}
    assert answers([("POST", "/graft/stop?run=mine", headers, b"{}")]) == [
        (409, "no training step of run 'mine' is running")
    ]


def test_compressed_content_is_taken_by_no_route():
    packed = gzip.compress(b"{}")
    asked = [("POST", path, {"Content-Type": content_of(path), "Content-Encoding": "gzip"}, packed) for path in POSTED]
    for path, (status, _) in zip(POSTED, answers(asked), strict=True):
        assert status == 415, path


def test_a_second_copy_of_the_pack_adds_no_routes():
    instance = types.SimpleNamespace(routes=web.RouteTableDef())
    routes.register_on(instance)
    count = len(instance.routes)
    routes.register_on(instance)
    assert len(instance.routes) == count > 15


@pytest.mark.parametrize("route", ["thumbnail", "lora_preview"])
def test_few_pictures_are_drawn_at_once_and_hold_up_no_other_answer(monkeypatch, route):
    """Of 8 that are asked for; the pool that answers everything else has one thread."""
    from aiohttp.test_utils import TestClient, TestServer
    from graft_nodes.host import dataset_routes, lora_routes

    may_end, drawing, most = threading.Event(), [], []

    def draw(request):
        drawing.append(1)
        most.append(len(drawing))
        assert may_end.wait(60)
        drawing.pop()
        return 200, {"drawn": True}

    monkeypatch.setitem(dataset_routes.ANSWERS, "thumbnail", draw)
    monkeypatch.setitem(lora_routes.ANSWERS, "preview", draw)
    path = {"thumbnail": "/graft/dataset/thumbnail", "lora_preview": "/graft/lora_preview"}[route]

    async def talk():
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        app = web.Application()
        for method, known, handler in added():
            app.router.add_route(method, known, handler)
        async with TestClient(TestServer(app)) as client:
            asked = [asyncio.create_task(client.get(path)) for _ in range(8)]
            while not drawing:
                await asyncio.sleep(0.01)
            for other in ("/graft/running", "/graft/runs", "/graft/running"):
                assert (await client.get(other)).status == 200
            may_end.set()
            assert [reply.status for reply in await asyncio.gather(*asked)] == [200] * 8

    asyncio.run(talk())
    assert len(most) == 8 and max(most) <= 2
