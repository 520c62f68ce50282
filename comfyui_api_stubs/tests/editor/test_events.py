"""What a page hears over its WebSocket, in ComfyUI's formats, and what happens when pages come and go."""

import asyncio
import contextlib
import io
import json
import struct

import aiohttp
import pytest
from PIL import Image

from comfyui_api_stubs.tests.editor.serving import PATIENCE, shows, steps


class Page:
    """A client that notes everything it is sent."""

    def __init__(self, socket):
        self.socket, self.heard = socket, []

    async def until(self, event, prompt_id=None):
        """Listen until an event (of that workflow); its data."""
        while True:
            message = await self.socket.receive(PATIENCE)
            if message.type == aiohttp.WSMsgType.BINARY:
                self.heard.append((struct.unpack(">I", message.data[:4])[0], message.data[4:]))
                continue
            assert message.type == aiohttp.WSMsgType.TEXT, message
            told = json.loads(message.data)
            self.heard.append((told["type"], told["data"]))
            if told["type"] == event and (prompt_id is None or told["data"].get("prompt_id") == prompt_id):
                return told["data"]

    def names(self):
        return [event for event, _ in self.heard]


@contextlib.asynccontextmanager
async def opened(server, client="", **features):
    """A page; `features` are what it says it can do, as the front end does first of all."""
    async with (
        aiohttp.ClientSession() as session,
        session.ws_connect(f"{server.address}/ws?clientId={client}") as socket,
    ):
        page = Page(socket)
        if features:
            await socket.send_json({"type": "feature_flags", "data": features})
            page.features = await page.until("feature_flags")
        yield page


def run(work):
    return asyncio.run(asyncio.wait_for(work, PATIENCE))


async def queued(server, prompt, client):
    reply = await asyncio.to_thread(server.queue, prompt, client_id=client)
    return reply.json["prompt_id"]


def test_a_page_is_told_its_id_and_what_the_server_can(server):
    async def work():
        async with opened(server) as page:
            status = await page.until("status")
            assert len(status["sid"]) == 32 and status["status"] == {"exec_info": {"queue_remaining": 0}}
        async with opened(server, "mine", supports_preview_metadata=True) as page:
            assert page.heard[0] == ("status", {"status": {"exec_info": {"queue_remaining": 0}}, "sid": "mine"})
            assert page.features == server.ask("/features").json
            assert page.features.pop("max_upload_size") > 2**20
            assert page.features == {
                "supports_preview_metadata": True,
                "supports_model_type_tags": False,
                "extension": {"manager": {"supports_v4": False}},
                "node_replacements": False,
                "assets": False,
            }

    run(work())


def test_the_events_of_a_run_in_order(server):
    async def work():
        async with opened(server, "watcher", supports_preview_metadata=True) as page:
            prompt_id = await queued(server, steps(3, seed=11), "watcher")
            end = await page.until("execution_success", prompt_id)
            assert isinstance(end["timestamp"], int)
            while (await page.until("executing"))["node"] is not None:
                pass
            heard = [(event, data) for event, data in page.heard if isinstance(event, str)]
            order = [
                event for event, _ in heard if event in ("execution_start", "execution_cached", "execution_success")
            ]
            assert order == ["execution_start", "execution_cached", "execution_success"]
            ran = [data["node"] for event, data in heard if event == "executing"]
            assert sorted(ran[:-1]) == sorted(steps(1)) and ran[-1] is None
            told = [
                (data["value"], data["max"], data["node"])
                for event, data in heard
                if event == "progress" and data["node"] == "4"
            ]
            assert told == [(1, 3, "4"), (2, 3, "4"), (3, 3, "4")]
            states = [data["nodes"]["4"] for event, data in heard if event == "progress_state" and "4" in data["nodes"]]
            assert states[0]["state"] == "running" and states[-1]["state"] == "finished"
            assert {"value", "max", "node_id", "prompt_id", "display_node_id", "parent_node_id", "real_node_id"} <= set(
                states[0]
            )
            [saved] = [data for event, data in heard if event == "executed" and "images" in data["output"]]
            assert saved["node"] == saved["display_node"] == "6" and saved["output"]["images"][0]["type"] == "output"
            pictures = [data for event, data in page.heard if event == 4]
            assert len(pictures) == 3
            length = struct.unpack(">I", pictures[0][:4])[0]
            about, picture = json.loads(pictures[0][4 : 4 + length]), Image.open(io.BytesIO(pictures[0][4 + length :]))
            assert about["node_id"] == "4" and about["prompt_id"] == prompt_id and about["image_type"] == "image/jpeg"
            assert picture.format == "JPEG" and max(picture.size) == 512
            assert page.heard[-1][1] == {"node": None, "prompt_id": prompt_id}

    run(work())


def test_a_page_that_knows_only_plain_previews_gets_those(server):
    async def work():
        async with opened(server, "older") as page:
            prompt_id = await queued(server, steps(2, seed=12), "older")
            await page.until("execution_success", prompt_id)
            pictures = [data for event, data in page.heard if event == 1]
            assert len(pictures) == 2 and 4 not in page.names()
            assert (
                struct.unpack(">I", pictures[0][:4])[0] == 1
                and Image.open(io.BytesIO(pictures[0][4:])).format == "JPEG"
            )

    run(work())


def test_what_a_page_can_do_counts_until_its_last_tab_closes(server):
    """A new tab with the same id that says nothing yet gets the new previews; after all are closed, plain ones."""

    async def previews(page, seed):
        page.heard.clear()
        prompt_id = await queued(server, steps(1, seed=seed), "features")
        await page.until("execution_success", prompt_id)
        return [event for event in page.names() if event in (1, 4)]

    async def work():
        async with opened(server, "features", supports_preview_metadata=True), opened(server, "features") as second:
            assert await previews(second, 15) == [4]
        await asyncio.sleep(0.2)
        async with opened(server, "features") as page:
            assert await previews(page, 16) == [1]

    run(work())


def test_previews_can_be_switched_off(server):
    async def work():
        async with opened(server, "blind") as page:
            extra = {"preview_method": "none"}
            reply = await asyncio.to_thread(server.queue, steps(2, seed=13), client_id="blind", extra_data=extra)
            await page.until("execution_success", reply.json["prompt_id"])
            assert 1 not in page.names() and 4 not in page.names()

    run(work())


def test_what_was_done_before_is_said_to_be_cached(server):
    async def work():
        async with opened(server, "again") as page:
            first = await queued(server, shows("cached", 90), "again")
            await page.until("execution_success", first)
            second = await queued(server, shows("cached", 90), "again")
            assert (await page.until("execution_cached", second))["nodes"] == ["1", "2"]
            shown = await page.until("executed", second)
            assert shown["output"]["images"][0]["filename"].startswith("cached_")

    run(work())


def test_a_failure_is_told_with_its_node(server):
    (server.place / "input" / "torn.png").write_bytes(b"\x89PNG\r\n")
    prompt = {
        "1": {"class_type": "LoadImage", "inputs": {"image": "torn.png"}},
        "2": {"class_type": "SaveImage", "inputs": {"images": ["1", 0], "filename_prefix": "x"}},
    }

    async def work():
        async with opened(server, "unlucky") as page:
            prompt_id = await queued(server, prompt, "unlucky")
            error = await page.until("execution_error", prompt_id)
            assert (
                error["node_id"] == "1"
                and error["node_type"] == "LoadImage"
                and error["traceback"]
                and error["exception_message"]
            )
            assert error["exception_type"] and error["executed"] == []

    run(work())


def test_two_tabs_each_hear_their_own_and_both_the_queue(server):
    async def work():
        async with opened(server, "one") as one, opened(server, "two") as two:
            prompt_id = await queued(server, shows("tabs", 91), "one")
            await one.until("execution_success", prompt_id)
            for page in (one, two):
                while (await page.until("status"))["status"]["exec_info"]["queue_remaining"]:
                    pass
            assert "execution_start" not in two.names() and "executed" not in two.names()

    run(work())


def test_a_duplicated_tab_and_the_first_both_hear(server):
    async def work():
        async with opened(server, "twin") as first:
            async with opened(server, "twin") as second:
                prompt_id = await queued(server, shows("twins", 92), "twin")
                await asyncio.gather(
                    first.until("execution_success", prompt_id), second.until("execution_success", prompt_id)
                )
            prompt_id = await queued(server, shows("twins", 93), "twin")
            await first.until("execution_success", prompt_id)

    run(work())


def test_a_page_that_reloads_in_the_middle_is_told_what_runs(server):
    async def work():
        async with opened(server, "reload") as page:
            prompt_id = await queued(server, steps(10_000, seed=14), "reload")
            while (await page.until("executing", prompt_id))["node"] != "4":
                pass
        async with opened(server, "reload") as page:
            assert (await page.until("executing"))["node"] == "4"
            await page.until("progress", prompt_id)
            await asyncio.to_thread(server.ask, "/interrupt", "POST", {"prompt_id": prompt_id})
            assert (await page.until("execution_interrupted", prompt_id))["node_id"] == "4"

    run(work())


@pytest.mark.parametrize(
    "said", ["{", "[1]", '{"type": "feature_flags"}', '{"type": "feature_flags", "data": 3}', "", "\0"]
)
def test_nonsense_from_a_page_is_passed_over(server, said):
    async def work():
        async with opened(server, "nonsense") as page:
            await page.until("status")
            await page.socket.send_str(said)
            await page.socket.send_bytes(b"\0\1\2")
            prompt_id = await queued(server, shows("sense", 94), "nonsense")
            await page.until("execution_success", prompt_id)

    run(work())
