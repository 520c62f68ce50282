"""How a run ended: the error of the node that failed, and the files that were written. The host is made up."""

import asyncio
import io
import json
import os
import types

import pytest
from graft_nodes.headless import run
from graft_nodes.headless.embedded import caching
from graft_nodes.headless.progress import Events

GRAPH = {
    "1": {"class_type": "Painter", "inputs": {}, "_meta": {"title": "paints"}},
    "2": {"class_type": "Saver", "inputs": {"images": ["1", 0]}},
}


class MadeUpHost:
    """A host whose executor sends and notes these messages, and writes these files into the output folder."""

    def __init__(self, output, sent=(), noted=(), writes=(), results=None):
        self.output, self.sent, self.noted, self.writes, self.results = output, sent, noted, writes, results or {}
        self.loop, self.page = asyncio.new_event_loop(), []
        self.execution = types.SimpleNamespace(PromptExecutor=self.executor, validate_prompt=self.validate_prompt)
        self.caching = caching.Caching()
        self.server = types.SimpleNamespace(send_sync=lambda *event: self.page.append(event))
        self.folders = types.SimpleNamespace(
            get_output_directory=lambda: str(output), get_directory_by_type=lambda kind: str(output.parent / kind)
        )
        self.utils = types.SimpleNamespace(
            PROGRESS_BAR_HOOK=None,
            PROGRESS_BAR_ENABLED=True,
            set_progress_bar_global_hook=lambda hook: None,
            set_progress_bar_enabled=lambda enabled: None,
        )

    async def validate_prompt(self, prompt_id, graph, targets):
        return True, None, ["2"], {}

    def executor(self, server):
        async def execute_async(graph, prompt_id, extra, outputs):
            for event in self.sent:
                server.send_sync(*event, "me")
            for name in self.writes:
                path = self.output / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(name)

        history = {"outputs": self.results}
        return types.SimpleNamespace(
            execute_async=execute_async, status_messages=list(self.noted), history_result=history
        )


@pytest.fixture
def ended(tmp_path):
    """Runs the graph in such a host; returns (the result, what was printed)."""
    output = tmp_path / "output"
    output.mkdir()

    def run_it(**host):
        made_up, stream = MadeUpHost(output, **host), io.StringIO()
        try:
            result = run.execute(made_up, GRAPH, None, stream)
        finally:
            made_up.loop.close()
        assert not made_up.page  # nothing goes to a browser during a run
        return result, stream.getvalue()

    return run_it


def error(node, class_type, kind="ValueError"):
    told = {"node_id": node, "node_type": class_type, "exception_type": kind, "exception_message": f"{kind} broke\n"}
    return "execution_error", {**told, "traceback": ["line 1"]}


FAILED = {
    "node": "1",
    "title": "paints",
    "class": "Painter",
    "exception": "ValueError",
    "message": "ValueError broke",
    "traceback": ["line 1"],
}
BLOCKED = {**FAILED, "node": "2", "title": "Saver", "class": "Saver"}
BLOCKED |= {"exception": "ExecutionBlocked", "message": "ExecutionBlocked broke"}
PAINTER, BLOCKER = error("1", "Painter"), error("2", "Saver", "ExecutionBlocked")


@pytest.mark.parametrize(
    ("host", "status", "expected"),
    [
        ({"noted": [("execution_start", {}), ("execution_success", {})]}, "done", None),
        ({"noted": [PAINTER], "sent": [PAINTER]}, "failed", FAILED),
        ({"noted": [PAINTER, error("2", "Saver")], "sent": [BLOCKER]}, "failed", FAILED),
        ({"sent": [BLOCKER]}, "failed", BLOCKED),  # the host sends it to the page alone
        ({"sent": [PAINTER]}, "done", None),  # the host would have noted it
        ({"noted": [("execution_interrupted", {})]}, "interrupted", None),
    ],
    ids=("done", "failed", "the first error counts", "blocked", "only sent", "interrupted"),
)
def test_how_a_run_ended(ended, host, status, expected):
    result, _ = ended(**host)
    assert (result.status, result.error) == (status, expected)


def test_progress_names_each_node_and_counts_those_that_run(ended):
    sent = [
        ("execution_cached", {"nodes": ["1", "7"]}),
        ("executing", {"node": "2.0", "display_node": "2"}),
        ("executing", {"node": None}),
    ]
    assert ended(sent=sent)[1].splitlines() == ["[1/1] node 2 Saver"]


def test_events_name_the_files_of_a_node_and_of_previews(tmp_path):
    """A node that lists none of the host's files sends no event."""
    output, told, out = tmp_path / "output", io.StringIO(), io.StringIO()
    output.mkdir()
    (tmp_path / "temp").mkdir()
    (tmp_path / "temp" / "t.png").write_text("")
    preview = {"filename": "t.png", "subfolder": "", "type": "temp"}
    sent = [
        ("executing", {"node": "2"}),
        ("executed", {"node": "1", "output": {"text": ["nothing"]}}),
        ("executed", {"node": "1", "output": None}),
        ("graft.preview", {"node": "2", "step": 5, "pictures": [preview, preview]}),
        ("executed", {"node": "2", "output": {"images": [preview], "text": ["a text"]}}),
    ]
    host = MadeUpHost(output, sent=sent)
    try:
        run.execute(host, GRAPH, None, told, events=Events(out))
    finally:
        host.loop.close()
    events = [json.loads(line) for line in out.getvalue().splitlines()]
    path = str(tmp_path / "temp" / "t.png")
    assert events == [
        {"event": "start", "nodes": 2},
        {"event": "node", "node": "2", "title": "Saver", "class": "Saver", "number": 1, "nodes": 2},
        {"event": "preview", "node": "2", "files": [path, path], "step": 5},
        {"event": "files", "node": "2", "files": [path]},
    ]


def test_named_files_come_first_then_the_others_that_changed(ended, tmp_path):
    output = tmp_path / "output"
    for name in ("old.txt", "changed.txt"):
        (output / name).write_text("before")
    (tmp_path / "temp").mkdir()
    (tmp_path / "temp" / "t.png").write_text("")
    (tmp_path / "secret.txt").write_text("")
    listed = [
        {"filename": "b.png", "subfolder": "sub", "type": "output"},
        {"filename": "t.png", "subfolder": "", "type": "temp"},
        {"filename": "../secret.txt", "type": "output"},
        {"filename": "secret.txt", "type": "input"},
        {"filename": "missing.png", "type": "output"},
        {"type": "output"},
        "a text",
    ]
    writes = ("sub/b.png", "a.txt", "changed.txt", "graft/state.json", "sub/graft/kept.txt")
    result, _ = ended(writes=writes, results={"2": {"images": listed, "text": "a text"}})
    names = [os.path.relpath(path, tmp_path).replace(os.sep, "/") for path in result.files]
    assert names == [
        "output/sub/b.png",
        "temp/t.png",
        "output/a.txt",
        "output/changed.txt",
        "output/sub/graft/kept.txt",
    ]
    assert result.outputs["2"]["images"] == listed and result.seconds >= 0
