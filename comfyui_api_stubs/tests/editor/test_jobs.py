"""The list of jobs, from entries of the queue and of the history as the host writes them."""

import pytest

from comfyui_api_stubs.editor import jobs

EXTRA = {"create_time": 5, "extra_pnginfo": {"workflow": {"id": "mine"}}}
SAVED = {"filename": "a.png", "subfolder": "", "type": "output"}
PREVIEW = {**SAVED, "type": "temp"}
START, SUCCESS = ("execution_start", {"timestamp": 10}), ("execution_success", {"timestamp": 30})


def entry(outputs=None, messages=(START, SUCCESS), status="success"):
    prompt = (3, "id", {"1": {}}, EXTRA, ["1"])
    return {"prompt": prompt, "outputs": outputs or {}, "status": {"status_str": status, "messages": list(messages)}}


@pytest.mark.parametrize("status", ["pending", "in_progress"])
def test_a_job_that_waits_or_runs(status):
    counts = {"outputs_count": 0, "previewable_outputs_count": 0}
    job = {"id": "id", "status": status, "priority": 3, **counts}
    assert jobs.unfinished((3, "id", {}, EXTRA, ["1"]), status) == {**job, "create_time": 5, "workflow_id": "mine"}
    for extra in ({}, {"extra_pnginfo": {"workflow": 7}}, {"extra_pnginfo": None}):
        assert jobs.unfinished((3, "id", {}, extra, ["1"]), status) == job


@pytest.mark.parametrize(
    ("messages", "status", "expected"),
    [
        ([START, SUCCESS], "success", {"status": "completed", "execution_end_time": 30}),
        (
            [START, ("execution_error", {"timestamp": 40, "node_id": "1"})],
            "error",
            {
                "status": "failed",
                "execution_end_time": 40,
                "execution_error": {"timestamp": 40, "node_id": "1"},
            },
        ),
        (
            [START, ("execution_interrupted", {"timestamp": 50})],
            "error",
            {"status": "cancelled", "execution_end_time": 50},
        ),
        ([START], "error", {"status": "failed"}),
    ],
    ids=("completed", "failed", "cancelled", "without an end"),
)
def test_an_ended_job_says_how_and_when(messages, status, expected):
    job = jobs.ended("id", entry(messages=messages, status=status))
    counts = {"outputs_count": 0, "previewable_outputs_count": 0}
    common = {"id": "id", "priority": 3, "execution_start_time": 10, "create_time": 5, "workflow_id": "mine", **counts}
    assert job == {**common, **expected}


def test_a_whole_job_has_its_outputs_and_its_workflow():
    outputs = {"2": {"images": [SAVED]}}
    job = jobs.ended("id", entry(outputs), whole=True)
    assert job["outputs"] == outputs and job["execution_status"]["status_str"] == "success"
    assert job["workflow"] == {"prompt": {"1": {}}, "extra_data": EXTRA}
    assert jobs.ended("id", {"prompt": entry()["prompt"]})["status"] == "completed"


@pytest.mark.parametrize("kind", ["images", "video", "audio", "3d"])
def test_media_that_can_be_shown_are_counted_and_one_stands_for_the_job(kind):
    outputs = {
        "1": {"text": ["said"], kind: [PREVIEW], "animated": (True,)},
        "2": {"latents": [SAVED], kind: (SAVED, {**SAVED, "filename": "b.png"}), "number": 5},
        "3": "no outputs",
    }
    job = jobs.ended("id", entry(outputs))
    assert (job["outputs_count"], job["previewable_outputs_count"]) == (4, 3)
    assert job["preview_output"] == {**SAVED, "nodeId": "2", "mediaType": kind}, "the first that is saved"
    job = jobs.ended("id", entry({"1": outputs["1"]}))
    assert job["preview_output"] == {**PREVIEW, "nodeId": "1", "mediaType": kind}


def test_a_text_stands_for_a_job_without_media():
    job = jobs.ended("id", entry({"1": {"latents": [SAVED], "text": ["x" * 1025, "second", 7], "said": ["no"]}}))
    text = {"nodeId": "1", "mediaType": "text"}
    assert job["preview_output"] == {"content": "x" * 1024, "truncated": True, **text}
    assert (job["outputs_count"], job["previewable_outputs_count"]) == (1, 0)
    job = jobs.ended("id", entry({"1": {"text": ["x" * 1024]}}))
    assert job["preview_output"] == {"content": "x" * 1024, **text}


A = {"id": "a", "status": "completed", "create_time": 1, "execution_start_time": 5, "execution_end_time": 35}
B = {"id": "b", "status": "failed", "create_time": 2, "execution_start_time": 40, "execution_end_time": 50}
LISTED = [{**A, "workflow_id": "mine"}, B, {"id": "c", "status": "pending", "create_time": 3}]


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ({}, "cba"),
        ({"sort_order": "ASC"}, "abc"),
        ({"sort_by": "execution_duration"}, "abc"),
        ({"sort_by": "execution_duration", "sort_order": "asc"}, "cba"),
        ({"status": "failed, PENDING,"}, "cb"),
        ({"workflow_id": "mine"}, "a"),
        ({"workflow_id": "mine", "status": "failed"}, ""),
        ({"limit": "2"}, "cb"),
        ({"limit": "1", "offset": "1"}, "b"),
        ({"offset": "2"}, "a"),
        ({"offset": "-1"}, "cba"),
    ],
)
def test_jobs_are_filtered_sorted_and_cut(query, expected):
    assert "".join(job["id"] for job in jobs.page(LISTED, query)["jobs"]) == expected


def test_a_page_says_where_it_is():
    def pagination(**query):
        return jobs.page(LISTED, query)["pagination"]

    assert pagination(limit="1", offset="1") == {"offset": 1, "limit": 1, "total": 3, "has_more": True}
    assert pagination(limit="1", offset="2") == {"offset": 2, "limit": 1, "total": 3, "has_more": False}
    assert pagination(offset="-3") == {"offset": 0, "limit": None, "total": 3, "has_more": False}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("status", "dreaming"),
        ("limit", "0"),
        ("limit", "-1"),
        ("limit", "x"),
        ("offset", "x"),
        ("sort_by", "size"),
        ("sort_order", "up"),
    ],
)
def test_a_wrong_query_is_refused(name, value):
    with pytest.raises(ValueError, match=name):
        jobs.page(LISTED, {name: value})
