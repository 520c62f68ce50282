"""Stopping a workflow that has left the queue and not begun yet."""

import asyncio
import json
from types import SimpleNamespace

import pytest

from comfyui_api_stubs.editor.prompts import BEGINNING, Prompts

ITEM = (0, "mine", {}, {}, [])


class Host:
    """A host whose queue has just given its one workflow away."""

    def __init__(self):
        self.stops = []
        self.queue = SimpleNamespace(
            get_current_queue_volatile=lambda: ([ITEM], []),
            interrupt_if_running=self.stop_if_running,
            delete_queue_item=lambda matches: False,
        )
        self.server = SimpleNamespace(prompt_queue=self.queue, last_prompt_id="the one before")
        self.nodes = SimpleNamespace(interrupt_processing=self.stops.append)

    def stop_if_running(self, prompt_id):
        self.stops.append(prompt_id)
        return prompt_id == "mine"

    def begin(self):
        """What an executor does first."""
        self.stops.clear()
        self.server.last_prompt_id = "mine"


class Request:
    def __init__(self, body=None, **matched):
        self.body, self.match_info = body, matched

    async def text(self):
        return json.dumps(self.body) if self.body else ""


@pytest.mark.parametrize(
    ("route", "request_", "stopped"),
    [
        ("interrupt", Request(), [True]),
        ("interrupt", Request({"prompt_id": "mine"}), ["mine"]),
        ("cancel_job", Request(job_id="mine"), ["mine"]),
        ("cancel_jobs", Request({"job_ids": ["mine"]}), ["mine"]),
    ],
)
def test_a_workflow_that_is_beginning_is_stopped_too(route, request_, stopped):
    async def asked_before_it_begins():
        host = Host()
        answer = asyncio.ensure_future(getattr(Prompts(host), route)(request_))
        await asyncio.sleep(5 * BEGINNING)
        assert not answer.done()
        host.begin()
        await answer
        return host.stops

    assert asyncio.run(asyncio.wait_for(asked_before_it_begins(), 10)) == stopped
