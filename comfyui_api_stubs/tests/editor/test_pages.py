"""Pages that stop reading, requests that stop halfway, connections that say nothing: none of them holds up the others,
and each ends.
"""

import asyncio
import base64
import contextlib
import json
import logging
import os
import time
import types

import aiohttp
import pytest
from aiohttp import web

from comfyui_api_stubs.editor.app import runner_of
from comfyui_api_stubs.editor.bodies import bodies
from comfyui_api_stubs.editor.clients import PREVIEW_IMAGE_WITH_METADATA, Clients, merge_key
from comfyui_api_stubs.editor.page import PageLimits

PATIENCE = 30.0
BIG = "x" * 1_000_000


class Running:
    """A server of pages and bodies in this process, with limits of its own."""

    def __init__(self, limits, stalled, idle):
        self.host = types.SimpleNamespace(
            loop=asyncio.get_running_loop(),
            sockets={},
            sockets_metadata={},
            client_id=None,
            last_node_id=None,
            get_queue_info=lambda: {"exec_info": {"queue_remaining": 0}},
        )
        self.clients = Clients(self.host, 1000, limits)
        app = web.Application(client_max_size=10_000)
        app.middlewares.append(bodies(stalled))
        app.router.add_get("/ws", self.clients.connect)
        app.router.add_post("/body", self.body)
        app.cleanup_ctx.append(self.clients.running)
        app.on_shutdown.append(self.clients.close)
        self.runner = runner_of(app, idle)

    async def body(self, request):
        return web.Response(body=await request.read())

    async def stalled_page(self, client):
        """A page that shakes hands and then reads nothing."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1024)
        key = base64.b64encode(os.urandom(16)).decode()
        writer.write(
            f"GET /ws?clientId={client} HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
        )
        await reader.readuntil(b"\r\n\r\n")
        return reader, writer


@contextlib.asynccontextmanager
async def running(limits=None, stalled=PATIENCE, idle=PATIENCE):
    server = Running(limits or PageLimits(), stalled, idle)
    await server.runner.setup()
    site = web.TCPSite(server.runner, "127.0.0.1", 0)
    await site.start()
    server.port = server.runner.addresses[0][1]
    server.address = f"http://127.0.0.1:{server.port}"
    try:
        yield server
    finally:
        await server.runner.cleanup()


@contextlib.asynccontextmanager
async def page_of(server, client):
    async with (
        aiohttp.ClientSession() as session,
        session.ws_connect(f"{server.address}/ws?clientId={client}") as socket,
    ):
        assert (await socket.receive_json(timeout=PATIENCE))["type"] == "status"
        yield socket


async def until(condition):
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        await asyncio.sleep(0.01)


def run(work):
    asyncio.run(asyncio.wait_for(work, 2 * PATIENCE))


def test_a_page_that_stops_reading_holds_up_no_other_and_is_dropped(caplog):
    async def work():
        async with running(PageLimits(send=1.0, close=0.2)) as server, page_of(server, "reads") as page:
            _, writer = await server.stalled_page("stalled")
            await until(lambda: "stalled" in server.clients.open)
            for number in range(40):
                server.clients.send_sync("executed", {"number": number, "big": BIG})
            for number in range(40):  # all before the other is given up
                told = await page.receive_json(timeout=0.9)
                assert told["data"]["number"] == number
            await until(lambda: "stalled" not in server.clients.open)
            assert "stalled" not in server.host.sockets and "stalled" not in server.host.sockets_metadata
            server.clients.send_sync("executed", {"number": 40})
            assert (await page.receive_json(timeout=PATIENCE))["data"] == {"number": 40}
            writer.close()

    with caplog.at_level(logging.WARNING):
        run(work())
    assert "the page stalled was disconnected: this page did not read the server's events in time" in caplog.text


def test_a_page_that_reads_again_is_told_why_it_was_dropped():
    async def work():
        async with running(PageLimits(send=0.3, close=PATIENCE)) as server:
            reader, writer = await server.stalled_page("slow")
            for _ in range(40):
                server.clients.send_sync("executed", {"big": BIG})
            page = server.clients.open["slow"][0]
            await until(lambda: page.socket.closed)
            received = b""
            while chunk := await asyncio.wait_for(reader.read(1 << 20), PATIENCE):
                received = (received + chunk)[-1000:]
                if b"did not read the server's events in time" in received:
                    break
            assert (1013).to_bytes(2, "big") + b"this page did not read" in received
            writer.close()

    run(work())


@pytest.mark.parametrize("limits", [PageLimits(close=0.2, messages=50), PageLimits(close=0.2, bytes=20_000_000)])
def test_what_waits_for_a_page_is_bounded(limits):
    async def work():
        async with running(limits) as server:
            _, writer = await server.stalled_page("slow")
            await until(lambda: "slow" in server.clients.open)
            for _ in range(100):
                server.clients.send_sync("executed", {"big": BIG})
            await until(lambda: "slow" not in server.clients.open)
            writer.close()

    run(work())


def test_progress_that_waits_is_replaced_by_newer_progress():
    async def work():
        async with running() as server:
            _, writer = await server.stalled_page("slow")
            await until(lambda: "slow" in server.clients.open)
            for _ in range(30):  # fills the connection
                server.clients.send_sync("executed", {"big": BIG})
            page = server.clients.open["slow"][0]
            await until(lambda: page.waiting > 5 and not server.clients.waiting.qsize())
            before = page.waiting
            for value in range(10_000):
                server.clients.send_sync("progress", {"prompt_id": "a", "node": "1", "value": value, "max": 10_000})
                server.clients.send_sync("progress_state", {"prompt_id": "a", "nodes": {"1": {"value": value}}})
            server.clients.send_sync("executed", {"end": True})
            await until(lambda: page.waiting == before + 3)
            writer.transport.abort()

    run(work())


def test_what_may_replace_what():
    same = [
        ("progress", {"prompt_id": "a", "node": "1", "value": 1}, {"prompt_id": "a", "node": "1", "value": 2}),
        ("progress_state", {"prompt_id": "a", "nodes": {}}, {"prompt_id": "a", "nodes": {"1": {}}}),
        ("status", {"status": 1}, {"status": 2}),
        (PREVIEW_IMAGE_WITH_METADATA, (1, {"node_id": "1"}), (2, {"node_id": "1"})),
    ]
    for event, older, newer in same:
        assert merge_key(event, older) == merge_key(event, newer) is not None
    assert merge_key("progress", {"prompt_id": "a", "node": "1"}) != merge_key(
        "progress", {"prompt_id": "a", "node": "2"}
    )
    for event in ("executing", "executed", "execution_error", "pack.step", 3):
        assert merge_key(event, {"prompt_id": "a", "node": "1"}) is None


def test_what_a_page_can_do_is_kept_until_its_last_tab_is_closed():
    async def work():
        async with running() as server:
            open_pages, sockets, metadata = server.clients.open, server.host.sockets, server.host.sockets_metadata
            async with page_of(server, "twin") as first:
                assert metadata == {"twin": {"feature_flags": {}}}
                can = {"feature_flags": {"supports_preview_metadata": True}}
                await first.send_json({"type": "feature_flags", "data": can["feature_flags"]})
                assert (await first.receive_json(timeout=PATIENCE))["type"] == "feature_flags"
                async with page_of(server, "twin"):
                    assert len(open_pages["twin"]) == 2 and metadata == {"twin": can}
                await until(lambda: len(open_pages["twin"]) == 1)
                assert metadata == {"twin": can} and sockets == {"twin": open_pages["twin"][0].socket}
            await until(lambda: not open_pages)
            assert not metadata and not sockets

    run(work())


def test_a_server_that_stops_waits_for_no_page_that_does_not_read():
    async def work():
        async with running(PageLimits(close=0.3)) as server, page_of(server, "reads") as page:
            _, writer = await server.stalled_page("stalled")
            await until(lambda: "stalled" in server.clients.open)
            for _ in range(30):
                server.clients.send_sync("executed", {"big": BIG})
            for _ in range(30):
                await page.receive_json(timeout=PATIENCE)
            began = asyncio.get_running_loop().time()
            closing = asyncio.create_task(server.runner.cleanup())
            assert (await page.receive(PATIENCE)).extra == "the server stops"
            await closing
            assert asyncio.get_running_loop().time() - began < 10
            writer.close()

    run(work())


def test_a_body_that_stops_arriving_ends_the_request():
    async def work():
        async with running(stalled=0.3) as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(b"POST /body HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nhalf")
            answer = await asyncio.wait_for(reader.read(), PATIENCE)  # to the end: the connection is closed
            assert answer.startswith(b"HTTP/1.1 408") and b"stopped arriving after 4 bytes" in answer
            writer.close()

    run(work())


def test_a_body_that_keeps_arriving_is_read_to_its_end():
    async def work():
        async with running(stalled=0.5) as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(b"POST /body HTTP/1.1\r\nHost: x\r\nContent-Length: 8\r\n\r\n")
            for _ in range(8):
                writer.write(b"x")
                await asyncio.sleep(0.15)
            assert (await asyncio.wait_for(reader.readline(), PATIENCE)).startswith(b"HTTP/1.1 200")
            writer.close()

    run(work())


@pytest.mark.parametrize("sent", [b"", b"GET /ws", b"GET /ws HTTP/1.1\r\nHost: x\r\nX-Slow: "])
def test_a_connection_without_a_whole_request_ends(sent):
    async def work():
        async with running(idle=0.3) as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(sent)
            assert await asyncio.wait_for(reader.read(), PATIENCE) == b""
            writer.close()

    run(work())


def test_a_compressed_body_is_refused_before_it_is_unpacked():
    async def work():
        async with running() as server, aiohttp.ClientSession() as session:
            body = json.dumps({"a": "b" * 1000}).encode()
            for encoding in ("gzip", "deflate"):
                async with session.post(f"{server.address}/body", data=body, compress=encoding) as reply:
                    assert reply.status == 415 and "without Content-Encoding" in await reply.text()
            async with session.post(f"{server.address}/body", data=body) as reply:
                assert reply.status == 200 and await reply.read() == body
            async with session.post(f"{server.address}/body", data=b"x" * 20_000) as reply:
                assert reply.status == 413

    run(work())


def test_a_flood_of_messages_that_are_no_json_is_one_line_of_the_log(caplog):
    async def work():
        async with running() as server, page_of(server, "floods") as page:
            for number in range(2000):
                await (page.send_str("[1, 2") if number % 2 else page.send_bytes(b"\0" * 100))
            await page.send_json({"type": "feature_flags", "data": {}})
            assert (await page.receive_json(timeout=PATIENCE))["type"] == "feature_flags"

    run(work())
    assert [one.getMessage() for one in caplog.records] == ["client floods sent something that is not JSON"]
