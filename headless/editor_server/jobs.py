"""Workflows that wait, run or have run as the front end's list shows them (ComfyUI's /api/jobs)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

STATES = ("pending", "in_progress", "completed", "failed", "cancelled")
SHOWN = ("images", "video", "audio", "3d", "text")
TEXT_SHOWN = 1024  # characters


def unfinished(item: tuple, status: str) -> dict[str, Any]:
    """A workflow that waits ("pending") or runs ("in_progress")."""
    place, prompt_id, _, extra_data, _ = item
    job = {
        "id": prompt_id,
        "status": status,
        "priority": place,
        "outputs_count": 0,
        "previewable_outputs_count": 0,
        **_origin(extra_data),
    }
    return _known(job)


def ended(prompt_id: str, entry: Mapping[str, Any], whole: bool = False) -> dict[str, Any]:
    """A workflow that has run; `whole`: with its outputs, its status messages and the workflow itself."""
    place, _, prompt, extra_data, _ = entry["prompt"]
    status, outputs = entry.get("status") or {}, entry.get("outputs") or {}
    events = {name: data for name, data in status.get("messages", ())}
    end: Mapping[str, Any] = {}
    for name in ("execution_success", "execution_error", "execution_interrupted"):
        if name in events:
            end = events[name]
            break
    shown = _shown(outputs)
    job = {
        "id": prompt_id,
        "status": _state(status, events),
        "priority": place,
        "execution_start_time": events.get("execution_start", {}).get("timestamp"),
        "execution_end_time": end.get("timestamp"),
        "execution_error": events.get("execution_error"),
        "outputs_count": len([one for one in shown if one["mediaType"] != "text"]),
        "previewable_outputs_count": len(
            [one for one in shown if one["mediaType"] in SHOWN and one["mediaType"] != "text"]
        ),
        "preview_output": _preview(shown),
        **_origin(extra_data),
    }
    job = _known(job)
    if whole:
        job.update(
            outputs=outputs, execution_status=entry.get("status"), workflow={"prompt": prompt, "extra_data": extra_data}
        )
    return job


def page(jobs: list[dict[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """The jobs that a query (status, workflow_id, sort_by, sort_order, limit, offset) asks for; ValueError says what is
    wrong with it.
    """
    wanted = [state.strip().lower() for state in query.get("status", "").split(",") if state.strip()]
    unknown = [state for state in wanted if state not in STATES]
    if unknown:
        raise ValueError(f"Invalid status value(s): {', '.join(unknown)}. Valid values: {', '.join(STATES)}")
    by, order = query.get("sort_by", "created_at").lower(), query.get("sort_order", "desc").lower()
    if by not in ("created_at", "execution_duration") or order not in ("asc", "desc"):
        raise ValueError("sort_by must be 'created_at' or 'execution_duration', sort_order 'asc' or 'desc'")
    limit, offset = _count(query, "limit"), max(0, _count(query, "offset") or 0)
    if limit is not None and limit <= 0:
        raise ValueError("limit must be a positive integer")
    workflow = query.get("workflow_id")
    chosen = [
        job
        for job in jobs
        if (not wanted or job["status"] in wanted) and (not workflow or job.get("workflow_id") == workflow)
    ]
    chosen.sort(key=_created if by == "created_at" else _duration, reverse=order == "desc")
    if limit is None:
        part = chosen[offset:]
    else:
        part = chosen[offset : offset + limit]
    pagination = {"offset": offset, "limit": limit, "total": len(chosen), "has_more": offset + len(part) < len(chosen)}
    return {"jobs": part, "pagination": pagination}


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
    """When a workflow was queued, and the id that the editor gave it."""
    found: Any = extra_data
    for name in ("extra_pnginfo", "workflow", "id"):
        if isinstance(found, Mapping):
            found = found.get(name)
        else:
            found = None
    return {"create_time": extra_data.get("create_time"), "workflow_id": found}


def _known(job: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in job.items() if value is not None}


def _state(status: Mapping[str, Any], events: Mapping[str, Any]) -> str:
    if status.get("status_str") != "error":
        return "completed"
    if "execution_interrupted" in events:
        return "cancelled"
    return "failed"


def _shown(outputs: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Everything that nodes gave the editor to show: files, then texts, each with its node and its kind."""
    found = []
    for node_id, output in outputs.items():
        for kind, items in output.items() if isinstance(output, dict) else ():
            for item in items if isinstance(items, (list, tuple)) and kind != "animated" else ():
                if isinstance(item, dict):
                    found.append({**item, "nodeId": node_id, "mediaType": kind})
                elif kind == "text" and isinstance(item, str):
                    if len(item) > TEXT_SHOWN:
                        cut = {"truncated": True}
                    else:
                        cut = {}
                    found.append({"content": item[:TEXT_SHOWN], **cut, "nodeId": node_id, "mediaType": kind})
    return found


def _preview(shown: list[dict[str, Any]]) -> dict[str, Any] | None:
    """What stands for a workflow in a list: a saved file, else a preview, else a text."""
    files = [one for one in shown if one["mediaType"] in SHOWN and one["mediaType"] != "text"]
    saved = [one for one in files if one.get("type") == "output"]
    return next(iter([*saved, *files, *(one for one in shown if one["mediaType"] == "text")]), None)
