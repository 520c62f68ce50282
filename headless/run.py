"""Runs an API graph in an open host: validates it, executes it with the host's executor, handles Ctrl-C, and lists the
files it wrote.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

from . import choice_files, log, signals
from .embedded import Catalogue, Graph, Problem, new_executor, workflow
from .hosts import Host
from .progress import Events, Progress

OUTPUT_KINDS = ("output", "temp")
# subfolder of the output folder with training states and the dataset cache, which are not listed as results
KEPT = "graft"
# A node's validation function raised an error. Ignored for nodes that already have a problem.
EXCEPTIONS = ("exception_during_validation", "exception_during_inner_validation")


@dataclass
class Result:
    """How a run ended: `status` is "done", "failed" or "interrupted"."""

    status: str = "done"
    error: dict[str, Any] | None = None
    outputs: dict[str, Any] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    seconds: float = 0.0


@dataclass
class Interruption:
    """Whether the user has asked to stop the run."""

    asked: bool = False


def validate(host: Host, graph: Graph, look_up: Catalogue, of_no_server: Collection[str] = ()) -> list[Problem]:
    """All problems of the graph: those from our own check, then those that only the host's validation finds."""
    problems = workflow.check(graph, look_up, of_no_server)
    copy, cut = workflow.without_broken_parts(graph, look_up)
    if copy:
        reported = {(problem.node, problem.input) for problem in problems}
        faulty = cut | {problem.node for problem in problems}
        problems += [
            host_problem
            for host_problem in _once(_host_problems(host, copy, cut, faulty), look_up)
            if (host_problem.node, host_problem.input) not in reported
        ]
    return choice_files.with_advice(host, graph, look_up, problems)


def execute(
    host: Host,
    graph: Graph,
    metadata: Mapping[str, Any] | None,
    stream: TextIO,
    spread: Callable[[Graph, list[str]], Graph] = lambda graph, outputs: graph,
    insist: bool = True,
    events: Events | None = None,
    executor: Any = None,
) -> Result:
    """Run a valid graph. Nodes save `metadata` (the editor's JSON) into pictures.

    `spread` turns the graph and its outputs into the graph for this rank, when other ranks run parts of it. With
    `insist` a second Ctrl-C stops at once; without it the second is ignored, as torchrun sends several. An `executor`
    that has run before has the results that it kept.
    """
    prompt_id = str(uuid.uuid4())
    valid = host.loop.run_until_complete(host.execution.validate_prompt(prompt_id, graph, None))
    if not valid[0] or valid[3]:
        raise AssertionError(f"the graph was not validated before it was run: {valid[1] or valid[3]}")
    graph = spread(graph, valid[2])
    interruption = Interruption()
    events = events or Events()
    count = len(workflow.reachable(graph, valid[2]))
    events.send("start", nodes=count)
    watch = _Watch(host, graph, Progress(stream, count, events), interruption)
    extra = {"client_id": "graft-headless", "extra_pnginfo": {"workflow": metadata} if metadata else {}}
    listing_before, start = _listing(host), time.monotonic()
    executor = executor or new_executor(host)
    with watch.attached(), _interruptible(host, interruption, insist):
        host.loop.run_until_complete(executor.execute_async(graph, prompt_id, extra, valid[2]))
    result = Result(seconds=time.monotonic() - start)
    result.outputs = dict(getattr(executor, "history_result", {}).get("outputs") or {})
    _read_messages(result, [*executor.status_messages, *watch.blocked], graph)
    result.files = _written(host, result.outputs, listing_before)
    return result


def outcome(message: Mapping[str, Any], graph: Graph) -> dict[str, Any]:
    """The error of a failed node as a dict: its id, title and class, and the exception with message and traceback."""
    node_id = str(message.get("node_id"))
    return {
        "node": node_id,
        "title": workflow.title(graph, node_id),
        "class": str(message.get("node_type")),
        "exception": str(message.get("exception_type", "")),
        "message": str(message.get("exception_message", "")).strip(),
        "traceback": list(message.get("traceback") or []),
    }


class _Watch:
    """Follows the host's progress: which node runs and how far it is. After Ctrl-C it repeats the request to stop, as
    the host may have cleared it.
    """

    def __init__(self, host: Host, graph: Graph, progress: Progress, interruption: Interruption):
        self.host, self.graph, self.progress, self.interruption = host, graph, progress, interruption
        self.blocked: list[tuple[str, dict[str, Any]]] = []

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """Receive the host's events and progress during the block; restores its own hooks afterwards."""
        send, hook, bars = (
            self.host.server.send_sync,
            self.host.utils.PROGRESS_BAR_HOOK,
            self.host.utils.PROGRESS_BAR_ENABLED,
        )
        self.host.server.send_sync = self.heard
        self.host.utils.set_progress_bar_global_hook(self.moved)
        self.host.utils.set_progress_bar_enabled(False)
        try:
            with log.preceded_by(self.progress.clear):
                yield
        finally:
            self.progress.close()
            self.host.server.send_sync = send
            self.host.utils.set_progress_bar_global_hook(hook)
            self.host.utils.set_progress_bar_enabled(bars)

    def heard(self, event: Any, data: Any, sid: Any = None) -> None:
        """An event that the host would send to the browser."""
        if self.interruption.asked:
            self.host.nodes.interrupt_processing(True)
        if event == "executing" and data.get("node") is not None:
            node_id = str(data.get("display_node") or data["node"])
            node = self.graph.get(node_id, {})
            self.progress.node(node_id, workflow.title(self.graph, node_id), str(node.get("class_type")))
        elif event == "execution_cached":
            self.progress.total -= len(set(data.get("nodes") or ()) & set(self.graph))
        elif event == "executed":
            self._tell_files("files", data, _name_files(self.host, data.get("output") or {}))
        elif event == "graft.preview":
            self._tell_files(
                "preview", data, _name_files(self.host, {"pictures": data.get("pictures")}), step=data["step"]
            )
        elif event == "execution_error" and data.get("exception_type") == "ExecutionBlocked":
            self.blocked.append((event, data))

    def _tell_files(self, event: str, data: Mapping[str, Any], files: Sequence[str], **more: Any) -> None:
        node_id = data.get("display_node") or data.get("node")
        if files:
            self.progress.events.send(event, node=node_id, files=files, **more)

    def moved(
        self, value: float, total: float, preview: Any = None, prompt_id: Any = None, node_id: Any = None
    ) -> None:
        """The running node is at `value` of `total`."""
        if self.interruption.asked:
            self.host.nodes.interrupt_processing(True)
        self.host.management.throw_exception_if_processing_interrupted()
        self.progress.step(value, total)


@contextlib.contextmanager
def _interruptible(host: Host, interruption: Interruption, insist: bool) -> Iterator[None]:
    """During the block, Ctrl-C (or SIGTERM) asks the host to stop after the running step; with `insist` a second one
    stops at once.
    """

    def ask(number: int, frame: Any) -> None:
        if interruption.asked:
            if insist:
                raise KeyboardInterrupt
            return
        interruption.asked = True
        host.nodes.interrupt_processing(True)
        os.write(
            2, b"\ninterrupting: the running node stops at its next step and saves what it has (again: stop at once)\n"
        )

    with signals.listening(ask):
        yield


def _host_problems(host: Host, graph: Graph, cut: set[str], faulty: set[str]) -> list[Problem]:
    """The problems that the host's validation finds. Validates a copy, as the host converts values in place.

    `cut` are the nodes whose inputs we removed, `faulty` those that already have a problem; errors that only follow
    from that are left out.
    """
    copy = {node_id: {**node, "inputs": dict(node["inputs"])} for node_id, node in graph.items()}
    _, error, _, node_errors = host.loop.run_until_complete(
        host.execution.validate_prompt(str(uuid.uuid4()), copy, None)
    )
    problems = []
    for node_id, entry in (node_errors or {}).items():
        for reason in entry["errors"]:
            if (node_id in faulty and reason["type"] in EXCEPTIONS) or (
                node_id in cut and reason["type"] == "required_input_missing"
            ):
                continue
            name = str((reason.get("extra_info") or {}).get("input_name") or "")
            details = str(reason.get("details") or "")
            if details and details != name:
                message = f"{reason['message']}: {details}"
            else:
                message = str(reason["message"])
            problems.append(workflow.problem(graph, str(node_id), message, name))
    if error and not node_errors and not cut and error["type"] != "prompt_no_outputs":
        problems.append(Problem(f"{error['message']} {error.get('details') or ''}".strip()))
    return problems


def _once(problems: Sequence[Problem], look_up: Catalogue) -> list[Problem]:
    """The problems without repetitions: a host says what a node itself refuses at every input that the node checks.

    What is said at several inputs of a node is kept at those whose names in the editor are in it, or at the first.
    """
    repeated: dict[tuple[str, str], list[Problem]] = {}
    for problem in problems:
        said = problem.message.replace(f": {problem.input} - ", ": ")
        repeated.setdefault((problem.node, said), []).append(problem)
    kept = []
    for (_, said), same in repeated.items():
        schema = look_up(same[0].class_type)
        named = set()
        if schema is not None:
            named = schema.named_in(said)
        kept += [problem for problem in same if problem.input in named] or same[:1]
    return kept


def _read_messages(result: Result, messages: list[tuple[str, dict[str, Any]]], graph: Graph) -> None:
    for event, data in messages:
        if event == "execution_interrupted":
            result.status = "interrupted"
        elif event == "execution_error" and result.error is None:
            result.status, result.error = "failed", outcome(data, graph)


def _listing(host: Host) -> dict[str, tuple[int, int]]:
    """All files in the output folder with modification time and size, except Graft's own training states and cache."""
    files = {}
    root = os.path.abspath(host.folders.get_output_directory())
    for folder, subfolders, names in os.walk(root):
        if folder == root:
            subfolders[:] = [name for name in subfolders if name != KEPT]
        for name in names:
            path = os.path.join(folder, name)
            with contextlib.suppress(FileNotFoundError):
                stat = os.stat(path)
                files[path] = (stat.st_mtime_ns, stat.st_size)
    return files


def _written(host: Host, outputs: Mapping[str, Any], before: Mapping[str, tuple[int, int]]) -> list[str]:
    """The files that nodes list as results, then all other new or changed files in the output folder."""
    named_paths = [path for output in outputs.values() for path in _name_files(host, output)]
    changed_paths = [path for path, state in sorted(_listing(host).items()) if before.get(path) != state]
    return list(dict.fromkeys([*named_paths, *changed_paths]))


def _name_files(host: Host, output: Mapping[str, Any]) -> list[str]:
    """The files that one node lists as results."""
    lists = [items for items in output.values() if isinstance(items, (list, tuple))]
    paths = [_path(host, item) for items in lists for item in items]
    return [path for path in paths if path]


def _path(host: Host, item: Any) -> str | None:
    """The path of a result entry ({filename, subfolder, type}); None if it is not a file, or outside the host's
    folders.
    """
    if not isinstance(item, Mapping) or not item.get("filename") or item.get("type") not in OUTPUT_KINDS:
        return None
    folder = os.path.abspath(host.folders.get_directory_by_type(item["type"]))
    path = os.path.abspath(os.path.join(folder, str(item.get("subfolder") or ""), str(item["filename"])))
    if os.path.commonpath([folder, path]) == folder and os.path.isfile(path):
        return path
    return None
