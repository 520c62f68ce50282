"""Queues, lists and stops workflows: /prompt, /queue, /interrupt, /free, /history and /jobs."""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from typing import Any

from aiohttp import web

from ..host import Host
from . import jobs
from .answers import answer, asked, number

SECRETS = (
    "auth_token_comfy_org",
    "api_key_comfy_org",
)  # never stored: the embedded host calls no paid service
BEGINNING = 0.01  # seconds between two looks at whether a workflow has begun


class Prompts:
    """The handlers of the routes; `add` registers them."""

    def __init__(self, host: Host):
        self.host, self.server, self.queue = host, host.server, host.server.prompt_queue

    def add(self, routes: web.RouteTableDef) -> None:
        """Register every route."""
        routes.get("/prompt")(self.state)
        routes.post("/prompt")(self.put)
        routes.get("/queue")(self.waiting)
        routes.post("/queue")(self.change_queue)
        routes.post("/interrupt")(self.interrupt)
        routes.post("/free")(self.free)
        routes.get("/history")(self.history)
        routes.get("/history/{prompt_id}")(self.one_of_history)
        routes.post("/history")(self.change_history)
        routes.get("/jobs")(self.jobs)
        routes.get("/jobs/{job_id}")(self.job)
        routes.post("/jobs/cancel")(self.cancel_jobs)
        routes.post("/jobs/{job_id}/cancel")(self.cancel_job)

    async def state(self, request: web.Request) -> web.Response:
        """GET /prompt: how many workflows are waiting or running."""
        return answer(self.server.get_queue_info())

    async def put(self, request: web.Request) -> web.Response:
        """POST /prompt: check a workflow and queue it; returns its errors by node."""
        data = self.server.trigger_on_prompt(await asked(request))
        problem = _malformed(data)
        if problem:
            return answer({"error": problem, "node_errors": {}}, 400)
        prompt, prompt_id = data["prompt"], data.get("prompt_id") or str(uuid.uuid4())
        valid, error, outputs, node_errors = await self.host.execution.validate_prompt(
            prompt_id,
            prompt,
            data.get("partial_execution_targets"),
        )
        if not valid:
            return answer({"error": error, "node_errors": node_errors}, 400)
        extra = {key: value for key, value in (data.get("extra_data") or {}).items() if key not in SECRETS}
        if "client_id" in data:
            extra["client_id"] = data["client_id"]
        extra["create_time"] = int(time.time() * 1000)
        queue_number = self._number(data)
        self.queue.put((queue_number, prompt_id, prompt, extra, outputs))
        return answer({"prompt_id": prompt_id, "number": queue_number, "node_errors": node_errors})

    def _number(self, data: dict[str, Any]) -> float:
        """A workflow's place in the queue: the number in the request, else the front or the end."""
        if "number" in data:
            return float(data["number"])
        if data.get("front"):
            queue_number = -self.server.number
        else:
            queue_number = self.server.number
        self.server.number += 1
        return queue_number

    async def waiting(self, request: web.Request) -> web.Response:
        """GET /queue: the running and the waiting workflows."""
        running, waiting = self.queue.get_current_queue_volatile()
        return answer({"queue_running": running, "queue_pending": waiting})

    async def change_queue(self, request: web.Request) -> web.Response:
        """POST /queue: {"clear": true} or {"delete": [ids]}."""
        data = await asked(request)
        if data.get("clear"):
            self.queue.wipe_queue()
        for prompt_id in _ids(data, "delete"):
            self.queue.delete_queue_item(lambda item, wanted=prompt_id: item[1] == wanted)
        return web.Response()

    async def interrupt(self, request: web.Request) -> web.Response:
        """POST /interrupt: stop the running workflow; with a prompt_id, only if it is that one."""
        prompt_id = (await asked(request)).get("prompt_id")
        await self._begun()
        if prompt_id:
            self.queue.interrupt_if_running(prompt_id)
        else:
            self.host.nodes.interrupt_processing(True)
        return web.Response()

    async def free(self, request: web.Request) -> web.Response:
        """POST /free: unload models and clear cached results, once nothing is running."""
        data = await asked(request)
        for name in ("unload_models", "free_memory"):
            if data.get(name):
                self.queue.set_flag(name, True)
        return web.Response()

    async def history(self, request: web.Request) -> web.Response:
        """GET /history: the finished workflows."""
        max_items, offset = number(request, "max_items"), number(request, "offset", -1)
        return answer(self.queue.get_history(max_items=max_items, offset=offset))

    async def one_of_history(self, request: web.Request) -> web.Response:
        """GET /history/ID: one finished workflow; an empty object if there is none with that id."""
        return answer(self.queue.get_history(prompt_id=request.match_info["prompt_id"]))

    async def change_history(self, request: web.Request) -> web.Response:
        """POST /history: {"clear": true} or {"delete": [ids]}."""
        data = await asked(request)
        if data.get("clear"):
            self.queue.wipe_history()
        for prompt_id in _ids(data, "delete"):
            self.queue.delete_history_item(prompt_id)
        return web.Response()

    async def jobs(self, request: web.Request) -> web.Response:
        """GET /jobs: waiting, running and finished workflows, filtered, sorted and in pages."""
        try:
            return answer(jobs.page(self._all_jobs(), request.query))
        except ValueError as error:
            return answer({"error": str(error)}, 400)

    async def job(self, request: web.Request) -> web.Response:
        """GET /jobs/ID: one workflow with its outputs."""
        job_id = request.match_info["job_id"]
        entry = self.queue.get_history(prompt_id=job_id).get(job_id)
        if entry:
            return answer(jobs.ended(job_id, entry, whole=True))
        for job in self._all_jobs():
            if job["id"] == job_id:
                return answer(job)
        return answer({"error": "Job not found"}, 404)

    def _all_jobs(self) -> list[dict[str, Any]]:
        running, waiting = self.queue.get_current_queue_volatile()
        history = self.queue.get_history()
        return [
            *(jobs.unfinished(item, "in_progress") for item in running),
            *(jobs.unfinished(item, "pending") for item in waiting),
            *(jobs.ended(prompt_id, entry) for prompt_id, entry in history.items()),
        ]

    async def cancel_job(self, request: web.Request) -> web.Response:
        """POST /jobs/ID/cancel: stop a workflow or remove it from the queue."""
        return answer({"cancelled": await self._cancel(request.match_info["job_id"])})

    async def cancel_jobs(self, request: web.Request) -> web.Response:
        """POST /jobs/cancel: cancel several workflows, {"job_ids": [ids]}."""
        ids = _ids(await asked(request), "job_ids")
        return answer({"cancelled": any([await self._cancel(job_id) for job_id in ids])})

    async def _cancel(self, prompt_id: str) -> bool:
        await self._begun()
        return self.queue.interrupt_if_running(prompt_id) or self.queue.delete_queue_item(
            lambda item: item[1] == prompt_id
        )

    async def _begun(self) -> None:
        """Returns once the workflow that left the queue has begun: as it begins, it forgets what was asked before."""
        while any(item[1] != self.server.last_prompt_id for item in self.queue.get_current_queue_volatile()[0]):
            await asyncio.sleep(BEGINNING)


def _ids(data: dict[str, Any], name: str) -> list[str]:
    """A list of ids from a request's body; 400 if it is anything else."""
    value = data.get(name, [])
    if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
        raise web.HTTPBadRequest(text=f"{name} must be a list of ids")
    return value


def _malformed(data: Any) -> dict[str, Any] | None:
    """The error of a request to queue a workflow whose JSON has the wrong shape; None if the shape is right."""
    if not isinstance(data, dict) or "prompt" not in data:
        return _error("no_prompt", "No prompt provided", "No prompt provided")
    prompt = data["prompt"]
    if not isinstance(prompt, dict):
        return _error(
            "invalid_prompt",
            "The prompt is not a workflow",
            f"expected an object of nodes by id, got {type(prompt).__name__}",
        )
    malformed_nodes = [
        node_id
        for node_id, node in prompt.items()
        if not isinstance(node, dict)
        or not isinstance(node.get("inputs", {}), dict)
        or not isinstance(node.get("class_type", ""), str)
    ]
    if malformed_nodes:
        details = f"nodes that are not {{class_type, inputs}}: {', '.join(malformed_nodes[:10])}"
        return _error("invalid_prompt", "The prompt is not a workflow", details)
    extra, targets = data.get("extra_data"), data.get("partial_execution_targets")
    if extra is not None and not isinstance(extra, dict):
        return _error("invalid_prompt", "extra_data is not an object", f"got {type(extra).__name__}")
    if targets is not None and not (isinstance(targets, list) and all(isinstance(target, str) for target in targets)):
        return _error("invalid_prompt", "partial_execution_targets is not a list of node ids", repr(targets)[:100])
    if not _is_place(data.get("number", 0)):
        return _error("invalid_prompt", "number is not a number", repr(data["number"])[:100])
    if not (data.get("client_id") is None or isinstance(data["client_id"], str)):
        return _error("invalid_prompt", "client_id is not a string", repr(data["client_id"])[:100])
    return _wrong_id(data.get("prompt_id"))


def _is_place(value: Any) -> bool:
    """Whether a number can be a place in the queue: NaN cannot be compared, and not every whole number is a float."""
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and abs(value) < 2**63


def _wrong_id(prompt_id: Any) -> dict[str, Any] | None:
    try:
        valid = prompt_id is None or str(uuid.UUID(prompt_id)) == prompt_id
    except (ValueError, AttributeError, TypeError):
        valid = False
    details = "expected a UUID, lower case with hyphens; leave it out to get a new one"
    if valid:
        return None
    return _error("invalid_prompt_id", "prompt_id must be a valid UUID", details)


def _error(kind: str, message: str, details: str) -> dict[str, Any]:
    return {"type": kind, "message": message, "details": details, "extra_info": {}}
