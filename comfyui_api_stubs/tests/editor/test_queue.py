"""Queueing, watching and stopping workflows over HTTP."""

import json
import uuid

import pytest

from comfyui_api_stubs.tests.editor.serving import picture, shows, steps

LONG = 10_000  # steps, the most there can be: nobody waits for them


def test_a_workflow_is_queued_run_and_in_the_history(server):
    answer = server.queue(shows("first", 16)).json
    assert answer["node_errors"] == {} and uuid.UUID(answer["prompt_id"])
    entry = server.wait(answer["prompt_id"])
    assert entry["status"]["status_str"] == "success" and entry["status"]["completed"] is True
    assert [event for event, _ in entry["status"]["messages"]] == [
        "execution_start",
        "execution_cached",
        "execution_success",
    ]
    [image] = entry["outputs"]["2"]["images"]
    assert image == {"filename": "first_00001_.png", "subfolder": "", "type": "output"}
    assert entry["prompt"][1] == answer["prompt_id"] and entry["prompt"][2]["1"]["class_type"] == "EmptyImage"
    assert server.ask("/view?filename=first_00001_.png&type=output").headers["content-type"] == "image/png"


def test_with_and_without_api_is_the_same(server):
    for path in (
        "/object_info/SaveImage",
        "/queue",
        "/prompt",
        "/features",
        "/extensions",
        "/settings",
        "/models",
        "/users",
    ):
        assert server.ask(path).json == server.ask("/api" + path).json, path


def test_what_is_wrong_comes_back_by_node(server):
    prompt = shows()
    prompt["1"]["inputs"]["width"] = -5
    prompt["2"]["inputs"]["images"] = ["9", 0]
    answer = server.queue(prompt)
    assert answer.status == 400
    errors = answer.json["node_errors"]
    assert [error["type"] for error in errors["2"]["errors"]] == ["bad_linked_input"]
    assert answer.json["error"]["type"] == "prompt_outputs_failed_validation"
    only_size = server.queue({**prompt, "2": shows()["2"]})
    found = only_size.json["node_errors"]["1"]
    assert found["errors"][0]["type"] == "value_smaller_than_min" and found["dependent_outputs"] == ["2"]
    assert found["class_type"] == "EmptyImage" and found["errors"][0]["extra_info"]["input_name"] == "width"


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ({}, "no_prompt"),
        ({"prompt": []}, "invalid_prompt"),
        ({"prompt": {"1": 5}}, "invalid_prompt"),
        ({"prompt": "x"}, "invalid_prompt"),
        ({"prompt": {"1": {"class_type": "SaveImage", "inputs": []}}}, "invalid_prompt"),
        ({"prompt": {"1": {"class_type": ["SaveImage"], "inputs": {}}}}, "invalid_prompt"),
        ({"prompt": {}, "number": "first"}, "invalid_prompt"),
        ({"prompt": {}, "extra_data": 3}, "invalid_prompt"),
        ({"prompt": {}, "prompt_id": "mine"}, "invalid_prompt_id"),
        ({"prompt": {}, "prompt_id": 7}, "invalid_prompt_id"),
        ({"prompt": {}, "client_id": {}}, "invalid_prompt"),
        ({"prompt": {}, "partial_execution_targets": "2"}, "invalid_prompt"),
        ({"prompt": {}}, "prompt_no_outputs"),
        ({"prompt": {"1": {"class_type": "NoSuchNode", "inputs": {}}}}, "missing_node_type"),
    ],
)
def test_a_malformed_request_is_refused(server, body, kind):
    answer = server.ask("/prompt", "POST", body)
    assert answer.status == 400 and answer.json["error"]["type"] == kind


@pytest.mark.parametrize("body", [b"{", b"\xff\xfe", b"[1]", b'"text"', b"nul"])
@pytest.mark.parametrize("route", ["/prompt", "/queue", "/history", "/free", "/interrupt", "/settings", "/jobs/cancel"])
def test_a_body_that_is_no_json_object_is_refused(server, route, body):
    assert server.ask(route, "POST", body).status == 400


def test_only_the_outputs_that_are_asked_for_run(server):
    prompt = shows("part", 24)
    prompt["3"] = {"class_type": "SaveImage", "inputs": {"images": ["1", 0], "filename_prefix": "other"}}
    answer = server.queue(prompt, partial_execution_targets=["3"]).json
    assert list(server.wait(answer["prompt_id"])["outputs"]) == ["3"]


def test_the_id_and_the_workflow_of_the_sender_are_kept_but_no_keys(server):
    mine, workflow = str(uuid.uuid4()), {"id": "the-workflow", "nodes": []}
    extra = {
        "extra_pnginfo": {"workflow": workflow},
        "api_key_comfy_org": "secret-key",
        "auth_token_comfy_org": "secret-token",
    }
    answer = server.queue(shows("mine", 32), prompt_id=mine, extra_data=extra, client_id="me").json
    assert answer["prompt_id"] == mine
    entry = server.wait(mine)
    assert entry["prompt"][3]["extra_pnginfo"] == {"workflow": workflow} and entry["prompt"][3]["client_id"] == "me"
    assert b"secret" not in server.ask("/history").body and b"secret" not in server.ask("/queue").body
    assert server.ask(f"/jobs/{mine}").json["workflow_id"] == "the-workflow"


@pytest.fixture
def busy(server):
    """A workflow that runs for as long as the test does not stop it."""
    running = server.queue(steps(LONG, seed=uuid.uuid4().int % 10**9)).json["prompt_id"]
    server.wait_until_running(running)
    yield running
    server.ask("/queue", "POST", {"clear": True})
    server.ask("/interrupt", "POST", {})
    server.wait(running)


def test_the_queue_keeps_its_order_and_lets_go(server, busy):
    last = server.queue(shows("c")).json
    first = server.queue(shows("b"), front=True).json
    middle = server.queue(shows("a"), number=(last["number"] - 0.5)).json
    assert first["number"] < 0 < last["number"]
    listed = server.ask("/queue").json
    assert [item[1] for item in listed["queue_running"]] == [busy]
    assert [item[1] for item in listed["queue_pending"]] == [answer["prompt_id"] for answer in (first, middle, last)]
    assert server.ask("/prompt").json == {"exec_info": {"queue_remaining": 4}}
    assert server.ask("/queue", "POST", {"delete": [middle["prompt_id"], "no such id"]}).status == 200
    assert [item[1] for item in server.ask("/queue").json["queue_pending"]] == [first["prompt_id"], last["prompt_id"]]
    assert server.ask("/queue", "POST", {"clear": True}).status == 200
    assert server.ask("/queue").json["queue_pending"] == []
    assert server.ask("/queue", "POST", {"delete": "everything"}).status == 400


def test_interrupting_another_workflow_does_nothing(server, busy):
    assert server.ask("/interrupt", "POST", {"prompt_id": str(uuid.uuid4())}).status == 200
    assert [item[1] for item in server.ask("/queue").json["queue_running"]] == [busy]


def test_interruption_is_in_the_history_and_the_next_workflow_runs(server, busy):
    after = server.queue(shows("after", 40)).json["prompt_id"]
    assert server.ask("/interrupt", "POST").status == 200
    entry = server.wait(busy)
    assert entry["status"]["status_str"] == "error"
    event, data = entry["status"]["messages"][-1]
    assert event == "execution_interrupted" and data["node_id"] in steps(1) and data["prompt_id"] == busy
    assert server.wait(after)["status"]["status_str"] == "success"
    assert server.ask(f"/jobs/{busy}").json["status"] == "cancelled"


def test_jobs_are_listed_filtered_and_cancelled(server, busy):
    waiting = server.queue(shows("never")).json["prompt_id"]
    listed = {job["id"]: job for job in server.ask("/api/jobs").json["jobs"]}
    assert listed[busy]["status"] == "in_progress" and listed[waiting]["status"] == "pending"
    assert [job["id"] for job in server.ask("/api/jobs?status=pending").json["jobs"]] == [waiting]
    one = server.ask(f"/api/jobs/{waiting}")
    assert one.status == 200 and (one.json["id"], one.json["status"]) == (waiting, listed[waiting]["status"])
    assert server.ask(f"/api/jobs/{waiting}/cancel", "POST").json == {"cancelled": True}
    assert server.ask(f"/api/jobs/{waiting}/cancel", "POST").json == {"cancelled": False}
    assert server.ask(f"/api/jobs/{waiting}").status == 404
    assert server.ask("/api/jobs/cancel", "POST", {"job_ids": [busy, waiting]}).json == {"cancelled": True}
    assert server.wait(busy)["status"]["messages"][-1][0] == "execution_interrupted"


def test_pages_of_jobs(server):
    ids = []
    for number in range(3):  # one after the other, so that no two begin in the same millisecond
        ids.append(server.queue(shows("page", 48 + number)).json["prompt_id"])
        server.wait(ids[-1])
    found = server.ask("/jobs?status=completed&limit=2&offset=1&sort_by=created_at&sort_order=desc").json
    assert [job["id"] for job in found["jobs"]] == [ids[1], ids[0]]
    assert (
        found["pagination"]["offset"] == 1 and found["pagination"]["limit"] == 2 and found["pagination"]["total"] >= 3
    )
    job = found["jobs"][0]
    assert (
        job["outputs_count"] == 1
        and job["preview_output"]["filename"].startswith("page_")
        and job["preview_output"]["nodeId"] == "2"
    )
    assert job["execution_end_time"] >= job["execution_start_time"] >= job["create_time"]
    whole = server.ask(f"/jobs/{ids[0]}").json
    assert whole["outputs"]["2"]["images"] and whole["workflow"]["prompt"]["1"]["class_type"] == "EmptyImage"


@pytest.mark.parametrize(
    "query", ["status=dreaming", "limit=0", "limit=x", "offset=x", "sort_by=size", "sort_order=up"]
)
def test_a_wrong_question_for_jobs_is_refused(server, query):
    assert server.ask(f"/jobs?{query}").status == 400


def test_history_in_parts_and_forgotten(server):
    ids = [server.queue(shows("kept", 60 + n)).json["prompt_id"] for n in range(3)]
    for prompt_id in ids:
        server.wait(prompt_id)
    assert list(server.ask("/history?max_items=2").json) == ids[1:]
    everything = list(server.ask("/history").json)
    assert list(server.ask("/history?max_items=1&offset=0").json) == everything[:1]
    assert server.ask("/history?max_items=many").status == 400
    server.ask("/history", "POST", {"delete": [ids[1]]})
    assert server.ask(f"/history/{ids[1]}").json == {}
    server.ask("/history", "POST", {"clear": True})
    assert server.ask("/history").json == {}


def test_a_node_that_fails_is_named(server):
    prompt = {
        "1": {"class_type": "LoadImage", "inputs": {"image": "broken.png"}},
        "2": {"class_type": "SaveImage", "inputs": {"images": ["1", 0], "filename_prefix": "x"}},
    }
    (server.place / "input" / "broken.png").write_bytes(picture()[:40])
    prompt_id = server.queue(prompt).json["prompt_id"]
    event, data = server.wait(prompt_id)["status"]["messages"][-1]
    assert (
        event == "execution_error"
        and data["node_id"] == "1"
        and data["node_type"] == "LoadImage"
        and data["exception_message"]
    )
    assert server.ask(f"/jobs/{prompt_id}").json["status"] == "failed"


def test_free_forgets_results(server):
    first = server.queue(shows("again", 70)).json["prompt_id"]
    server.wait(first)
    assert (
        server.wait(server.queue(shows("again", 70)).json["prompt_id"])["outputs"]["2"]["images"][0]["filename"]
        == "again_00001_.png"
    )
    assert server.ask("/free", "POST", {"free_memory": True}).status == 200
    again = server.wait(server.queue(shows("again", 70)).json["prompt_id"])
    assert again["outputs"]["2"]["images"][0]["filename"] == "again_00002_.png"


@pytest.mark.parametrize("number", ["1" + "0" * 400, "-1" + "0" * 400, "1e999", "NaN", "-Infinity", '"1"', "[]"])
def test_a_number_that_is_no_place_in_the_queue_is_refused(server, number):
    body = f'{{"prompt": {json.dumps(shows("never"))}, "number": {number}}}'.encode()
    reply = server.ask("/prompt", "POST", body)
    said = json.dumps(reply.json)
    assert reply.status == 400 and ("number is not a number" in said or "is not JSON" in said)
    assert server.ask("/queue").json["queue_pending"] == []


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity"])
def test_what_json_does_not_know_is_refused(server, value):
    prompt = json.dumps(shows("never", width=123)).replace("123", value)
    reply = server.ask("/prompt", "POST", f'{{"prompt": {prompt}}}'.encode())
    assert reply.status == 400 and f"{value} is not a value of JSON" in reply.json["error"]


def test_a_setting_of_a_node_that_no_computer_holds_is_named(server):
    prompt = json.dumps(shows("never", width=123)).replace("123", "1" + "0" * 400)
    reply = server.ask("/prompt", "POST", f'{{"prompt": {prompt}}}'.encode())
    assert reply.status == 400 and reply.json["node_errors"]["1"]["errors"][0]["type"] in (
        "invalid_input_type",
        "value_bigger_than_max",
    )
