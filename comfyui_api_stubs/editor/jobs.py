"""The list of queued, running and finished workflows that the front end shows (ComfyUI's /api/jobs)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

STATES = ("pending", "in_progress", "completed", "failed", "cancelled")
SHOWN = ("images", "video", "audio", "3d", "text")
TEXT_SHOWN = 1024  # characters


def unfinished(item: tuple, status: str) -> dict[str, Any]:
    """The job of a workflow that waits ("pending") or runs ("in_progress")."""
    priority, prompt_id, _, extra_data, _ = item
    job = {
        "id": prompt_id,
        "status": status,
        "priority": priority,
        "outputs_count": 0,
        "previewable_outputs_count": 0,
        **_origin(extra_data),
    }
    return _known(job)


def ended(prompt_id: str, entry: Mapping[str, Any], whole: bool = False) -> dict[str, Any]:
    """The job of a finished workflow; `whole` adds its outputs, its status and the workflow itself."""
    priority, _, prompt, extra_data, _ = entry["prompt"]
    status, outputs = entry.get("status") or {}, entry.get("outputs") or {}
    events = {name: data for name, data in status.get("messages", ())}
    end: Mapping[str, Any] = {}
    for name in ("execution_success", "execution_error", "execution_interrupted"):
        if name in events:
            end = events[name]
            break
    results = _shown(outputs)
    job = {
        "id": prompt_id,
        "status": _state(status, events),
        "priority": priority,
        "execution_start_time": events.get("execution_start", {}).get("timestamp"),
        "execution_end_time": end.get("timestamp"),
        "execution_error": events.get("execution_error"),
        "outputs_count": len([result for result in results if result["mediaType"] != "text"]),
        "previewable_outputs_count": len(
            [result for result in results if result["mediaType"] in SHOWN and result["mediaType"] != "text"]
        ),
        "preview_output": _preview(results),
        **_origin(extra_data),
    }
    job = _known(job)
    if whole:
        job.update(
            outputs=outputs, execution_status=entry.get("status"), workflow={"prompt": prompt, "extra_data": extra_data}
        )
    return job


def page(jobs: list[dict[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """Filter, sort and page jobs by a query (status, workflow_id, sort_by, sort_order, limit, offset). Raises
    ValueError if the query is not valid.
    """
    states = [state.strip().lower() for state in query.get("status", "").split(",") if state.strip()]
    unknown = [state for state in states if state not in STATES]
    if unknown:
        raise ValueError(f"Invalid status value(s): {', '.join(unknown)}. Valid values: {', '.join(STATES)}")
    sort_key, order = query.get("sort_by", "created_at").lower(), query.get("sort_order", "desc").lower()
    if sort_key not in ("created_at", "execution_duration") or order not in ("asc", "desc"):
        raise ValueError("sort_by must be 'created_at' or 'execution_duration', sort_order 'asc' or 'desc'")
    limit, offset = _count(query, "limit"), max(0, _count(query, "offset") or 0)
    if limit is not None and limit <= 0:
        raise ValueError("limit must be a positive integer")
    workflow = query.get("workflow_id")
    matches = [
        job
        for job in jobs
        if (not states or job["status"] in states) and (not workflow or job.get("workflow_id") == workflow)
    ]
    matches.sort(key=_created if sort_key == "created_at" else _duration, reverse=order == "desc")
    if limit is None:
        page_jobs = matches[offset:]
    else:
        page_jobs = matches[offset : offset + limit]
    pagination = {
        "offset": offset,
        "limit": limit,
        "total": len(matches),
        "has_more": offset + len(page_jobs) < len(matches),
    }
    return {"jobs": page_jobs, "pagination": pagination}


def _created(job: dict[str, Any]) -> float:
    return job.get("create_time", 0)


def _duration(job: dict[str, Any]) -> float:
    return job.get("execution_end_time", 0) - job.get("execution_start_time", 0)


def _count(query: Mapping[str, str], name: str) -> int | None:
    try:
        if name in query:
            return int(query[name])
        return None
    except ValueError:
        raise ValueError(f"{name} must be an integer") from None


def _origin(extra_data: Mapping[str, Any]) -> dict[str, Any]:
    """The time a workflow was queued and the id that the editor gave it."""
    value: Any = extra_data
    for name in ("extra_pnginfo", "workflow", "id"):
        if isinstance(value, Mapping):
            value = value.get(name)
        else:
            value = None
    return {"create_time": extra_data.get("create_time"), "workflow_id": value}


def _known(job: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in job.items() if value is not None}


def _state(status: Mapping[str, Any], events: Mapping[str, Any]) -> str:
    if status.get("status_str") != "error":
        return "completed"
    if "execution_interrupted" in events:
        return "cancelled"
    return "failed"


def _shown(outputs: Mapping[str, Any]) -> list[dict[str, Any]]:
    """All files and texts that nodes output for the editor to show, each with its node id and media type."""
    results = []
    for node_id, output in outputs.items():
        for kind, items in output.items() if isinstance(output, dict) else ():
            for item in items if isinstance(items, (list, tuple)) else ():
                if isinstance(item, dict):
                    results.append({**item, "nodeId": node_id, "mediaType": kind})
                elif kind == "text" and isinstance(item, str):
                    if len(item) > TEXT_SHOWN:
                        flags = {"truncated": True}
                    else:
                        flags = {}
                    results.append({"content": item[:TEXT_SHOWN], **flags, "nodeId": node_id, "mediaType": kind})
    return results


def _preview(shown: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The result that represents a workflow in the list: a saved file, else a preview, else a text."""
    files = [result for result in shown if result["mediaType"] in SHOWN and result["mediaType"] != "text"]
    saved = [result for result in files if result.get("type") == "output"]
    return next(iter([*saved, *files, *(result for result in shown if result["mediaType"] == "text")]), None)
