"""LoRA files that arrive: slowly, many at once, not at all; and what is left of them."""

import asyncio
import os
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
from graft_nodes.host import lora_routes, routes
from graft_nodes.tests.editor.serving import lora

web = pytest.importorskip("aiohttp.web", reason="aiohttp is not installed: pip install aiohttp")
OCTETS = {"Content-Type": "application/octet-stream"}
PATIENCE = 20.0  # seconds


@pytest.fixture
def loras(tmp_path, monkeypatch):
    """A loras folder that is ComfyUI's only one."""
    import folder_paths

    folder = tmp_path / "loras"
    folder.mkdir()
    known = folder_paths.folder_names_and_paths
    monkeypatch.setitem(known, "loras", ([str(folder)], known["loras"][1]))
    return folder


@pytest.fixture
def content(tmp_path):
    lora(tmp_path / "sent.safetensors")
    return (tmp_path / "sent.safetensors").read_bytes()


class Running:
    """A server with Graft's routes and a page of its own, whose answers need a thread of the default pool, of which
    there are two.
    """

    async def __aenter__(self):
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
        app, table = web.Application(), web.RouteTableDef()
        routes.register_on(types.SimpleNamespace(routes=table))
        table.get("/page")(self.page)
        app.add_routes(table)
        self.runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        self.port = site._server.sockets[0].getsockname()[1]
        self.writers = []
        return self

    async def __aexit__(self, *_):
        for writer in self.writers:
            writer.close()
        await self.runner.cleanup()

    async def page(self, request):
        await asyncio.to_thread(threading.get_ident)
        return web.Response(text="here")

    async def send(self, name, size, first=b"x" * 100):
        """Begin an upload: (reader, writer) of its connection."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        head = (
            f"POST /graft/lora_upload?name={name} HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\n"
            f"Content-Type: application/octet-stream\r\nContent-Length: {size}\r\n\r\n"
        )
        writer.write(head.encode() + first)
        await writer.drain()
        self.writers.append(writer)
        return reader, writer

    async def get(self, path):
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\nConnection: close\r\n\r\n".encode())
        status = await asyncio.wait_for(status_of(reader), PATIENCE)
        writer.close()
        return status


async def status_of(reader):
    return int((await reader.readline()).split()[1])


async def until(is_so):
    end = time.monotonic() + PATIENCE
    while not is_so():
        assert time.monotonic() < end
        await asyncio.sleep(0.02)


def drafts(folder):
    return [name for name in os.listdir(folder) if name.startswith(".")]


def test_slow_uploads_hold_up_no_other_answer_and_end(loras, monkeypatch):
    monkeypatch.setattr(lora_routes, "PERIOD", 1.5)

    async def talk():
        async with Running() as server:
            slow = [await server.send(f"slow{number}.safetensors", 10**6) for number in range(8)]
            await until(lambda: len(drafts(loras)) == 8)

            async def drip():
                while True:
                    for _, writer in slow:
                        writer.write(b"x")
                    await asyncio.sleep(0.1)

            dripping = asyncio.create_task(drip())
            for path in ("/page", "/graft/loras", "/graft/running", "/page"):
                assert await server.get(path) == 200
            assert len(drafts(loras)) == 8, "they still drip"
            statuses = [await asyncio.wait_for(status_of(reader), PATIENCE) for reader, _ in slow]
            dripping.cancel()
            assert statuses == [408] * 8
            await until(lambda: os.listdir(loras) == [])

    asyncio.run(talk())


def test_an_upload_that_is_slow_but_steady_is_taken(loras, content, monkeypatch):
    monkeypatch.setattr(lora_routes, "PERIOD", 0.5)
    monkeypatch.setattr(lora_routes, "LEAST_RATE", len(content) / 4)

    async def talk():
        async with Running() as server:
            reader, writer = await server.send("steady.safetensors", len(content), content[:10])
            for at in range(10, len(content), len(content) // 8):
                writer.write(content[at : at + len(content) // 8])
                await asyncio.sleep(0.2)
            assert await asyncio.wait_for(status_of(reader), PATIENCE) == 200

    asyncio.run(talk())
    assert (loras / "steady.safetensors").read_bytes() == content and drafts(loras) == []


def test_more_uploads_than_are_taken_at_once_are_refused_until_there_is_room(loras, content):
    async def talk():
        async with Running() as server:
            held = [await server.send(f"held{number}.safetensors", 10**6) for number in range(lora_routes.AT_ONCE)]
            await until(lambda: len(drafts(loras)) == lora_routes.AT_ONCE)
            reader, _ = await server.send("one-more.safetensors", len(content), content)
            assert await asyncio.wait_for(status_of(reader), PATIENCE) == 503
            held[0][1].close()
            await until(lambda: len(drafts(loras)) == lora_routes.AT_ONCE - 1)
            reader, _ = await server.send("one-more.safetensors", len(content), content)
            assert await asyncio.wait_for(status_of(reader), PATIENCE) == 200

    asyncio.run(talk())
    assert os.listdir(loras) == ["one-more.safetensors"], "the others' drafts went with the server"


def test_uploads_of_one_name_at_once_give_one_file(loras, tmp_path):
    bodies = []
    for number in range(8):
        lora(tmp_path / "sent.safetensors", {"number": str(number)})
        bodies.append((tmp_path / "sent.safetensors").read_bytes())

    async def talk():
        async with Running() as server:
            sent = await asyncio.gather(*(server.send("one.safetensors", len(body), body) for body in bodies))
            return [await asyncio.wait_for(status_of(reader), PATIENCE) for reader, _ in sent]

    statuses = asyncio.run(talk())
    assert sorted(statuses) == [200] + [409] * 7
    assert (loras / "one.safetensors").read_bytes() == bodies[statuses.index(200)] and os.listdir(loras) == [
        "one.safetensors"
    ]


def test_drafts_of_a_process_that_was_killed_are_swept(loras, content):
    hour = time.time() - 3600
    for name in (".0123456789abcdef.partial", ".fedcba9876543210.incoming.partial", ".fedcba9876543210.incoming"):
        (loras / name).write_bytes(b"half")
        os.utime(loras / name, (hour, hour))
    kept = [".0123456789abcdee.partial", ".mine.partial", "a.partial", ".0123456789abcdef"]
    for name in kept:
        (loras / name).write_bytes(b"kept")
    for name in kept[1:]:
        os.utime(loras / name, (hour, hour))

    async def talk():
        async with Running() as server:
            assert await server.get("/graft/loras") == 200

    asyncio.run(talk())
    assert sorted(os.listdir(loras)) == sorted(kept), "a young draft may still be written"


def test_a_file_finds_its_folder_made(loras, content):
    loras.rmdir()

    async def talk():
        async with Running() as server:
            assert await server.get(f"/graft/lora_upload?name=first.safetensors&size={len(content)}") == 200
            reader, _ = await server.send("first.safetensors", len(content), content)
            return await asyncio.wait_for(status_of(reader), PATIENCE)

    assert asyncio.run(talk()) == 200
    assert (loras / "first.safetensors").read_bytes() == content
