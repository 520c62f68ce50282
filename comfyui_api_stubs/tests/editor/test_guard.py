"""Who is answered: this page and programs on this machine, not another site and not a name that was made
to point here.
"""

import http.client
import json
import socket

import pytest

from comfyui_api_stubs.tests.editor.serving import shows

OTHER_HOSTS = [
    "evil.example",
    "evil.example:8188",
    "127.0.0.1.evil.example",
    "localhost.evil.example",
    "evil.example@127.0.0.1",
    "127.0.0.1@evil.example",
    "192.168.1.5",
    "10.0.0.1:8188",
    "[2001:db8::1]",
    "0.0.0.0",
    "",
    " ",
    "localhost:99999999",
    "localhost:port",
    "127.0.0.1/x",
    "[::1",
    "localhost,x",
    "127.0.0.1 evil.example",
    "xn--localhost-8f4h",
]
OTHER_ORIGINS = [
    "http://evil.example",
    "https://127.0.0.1.evil.example",
    "null",
    "file://",
    "http://localhost:1",
    "http://127.0.0.1:1",
    "chrome-extension://abc",
    "http://evil.example@127.0.0.1",
    "http://127.0.0.1",
    "javascript:0",
    "",
    "http://",
    "127.0.0.1",
]
TARGETS = [
    ("GET", "/"),
    ("GET", "/object_info/SaveImage"),
    ("POST", "/prompt"),
    ("GET", "/api/userdata?dir=workflows"),
    ("POST", "/interrupt"),
]


def asked(server, method, target, headers):
    body = json.dumps({"prompt": shows("never")}).encode() if target == "/prompt" else b""
    return server.raw(method, target.encode(), headers, body)


@pytest.mark.parametrize("host", OTHER_HOSTS)
def test_another_host_is_refused(server, host):
    for method, target in TARGETS:
        assert asked(server, method, target, {"Host": host}).status in (400, 403), (method, target)
    assert server.ask("/queue").json["queue_pending"] == []


@pytest.mark.parametrize("origin", OTHER_ORIGINS)
def test_another_origin_is_refused(server, origin):
    for method, target in TARGETS:
        assert asked(server, method, target, {"Origin": origin}).status == 403, (method, target)


@pytest.mark.parametrize("site", ["cross-site", "same-site", "something new"])
def test_what_another_site_makes_a_browser_send_is_refused(server, site):
    for method, target in TARGETS:
        assert asked(server, method, target, {"Sec-Fetch-Site": site}).status == 403, (method, target)
    framed = {"Sec-Fetch-Site": site, "Sec-Fetch-Dest": "iframe", "Sec-Fetch-Mode": "navigate"}
    assert asked(server, "GET", "/", framed).status == 403
    link = {"Sec-Fetch-Site": site, "Sec-Fetch-Dest": "document", "Sec-Fetch-Mode": "navigate"}
    assert asked(server, "GET", "/", link).status == 200
    assert asked(server, "GET", "/view?filename=x.png", link).status == 403
    assert asked(server, "POST", "/", link).status == 403


def test_this_page_and_local_programs_are_answered(server):
    own = (
        f"127.0.0.1:{server.port}",
        f"localhost:{server.port}",
        f"LOCALHOST:{server.port}",
        "[::1]:8188",
        "localhost",
        "127.0.0.1:9000",
    )
    for host in own:
        assert asked(server, "GET", "/prompt", {"Host": host}).status == 200, host
        assert asked(server, "GET", "/prompt", {"Host": host, "Origin": f"http://{host.lower()}"}).status == 200, host
        assert asked(server, "GET", "/prompt", {"Host": host, "Sec-Fetch-Site": "same-origin"}).status == 200
    assert asked(server, "GET", "/prompt", {"Host": "localhost:80", "Origin": "http://localhost"}).status == 200


def test_every_answer_says_what_the_browser_may_not_do(server):
    for target in ("/", "/queue", "/nothing", "/assets/a.css", "/extensions/pack/pack.js"):
        headers = server.ask(target).headers
        assert headers["x-content-type-options"] == "nosniff" and headers["x-frame-options"] == "SAMEORIGIN", target
        assert "access-control-allow-origin" not in headers


def test_no_preflight_is_granted(server):
    headers = {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
    reply = asked(server, "OPTIONS", "/prompt", headers)
    assert reply.status == 403 and "access-control-allow-origin" not in reply.headers


@pytest.mark.parametrize("method", ["PUT", "PATCH", "DELETE", "TRACE", "CONNECT", "OPTIONS", "FOO"])
def test_other_methods_are_refused(server, method):
    for target in ("/prompt", "/view?filename=x", "/"):
        assert 400 <= server.raw(method, target.encode()).status < 500


@pytest.mark.parametrize(
    ("headers", "opens"),
    [
        ({}, True),
        ({"Origin": "SELF"}, True),
        ({"Origin": "http://evil.example"}, False),
        ({"Origin": "null"}, False),
        ({"Host": "evil.example"}, False),
        ({"Sec-Fetch-Site": "cross-site"}, False),
    ],
)
def test_a_websocket_is_guarded_too(server, headers, opens):
    key = {"Sec-WebSocket-Version": "13", "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA=="}
    upgrade = {"Upgrade": "websocket", "Connection": "Upgrade", **key}
    given = {name: server.address if value == "SELF" else value for name, value in headers.items()}
    lines = [
        "GET /ws?clientId=x HTTP/1.1",
        *(f"{k}: {v}" for k, v in {"Host": f"{server.host}:{server.port}", **upgrade, **given}.items()),
    ]
    with socket.create_connection((server.host, server.port), timeout=60) as connection:
        connection.sendall("\r\n".join([*lines, "", ""]).encode())
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        assert answer.status == (101 if opens else 403)


@pytest.mark.parametrize("origin", ["http://[::1", "http://[", "http://[::1]x", "http://127.0.0.1:99999999"])
def test_an_origin_that_is_no_address_is_refused(server, origin):
    for method, target in TARGETS:
        reply = asked(server, method, target, {"Origin": origin})
        assert reply.status == 403 and reply.headers["x-content-type-options"] == "nosniff", (method, target)
