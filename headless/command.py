"""The command line: `run` a workflow, `check` it, `plan` its memory, `editor` to build one, `curve` of a run, `doctor`.
Exit status 0 done, 1 failed, 2 not valid, 130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from ..storage.printable import pip_install, quote_command
from . import batch, checking, curve, doctor, hosts, log, plan, run, signals, torchrun, watch, workflow_file
from .command_error import CommandError
from .embedded import HostError, Problem, WorkflowError, caching, catalogue, editor, node_replacements, workflow
from .progress import Events
from .signals import INTERRUPTED

DONE, FAILED, INVALID = 0, 1, 2
STATUS = {"done": DONE, "failed": FAILED, "interrupted": INTERRUPTED}


def main(argv: Sequence[str]) -> int:
    """Run one command; returns the exit status."""
    parser = build_parser()
    arguments = parser.parse_args(argv)
    wrong = _wrong_options(arguments)
    if wrong:
        parser.error(wrong)
    try:
        with log.shown(arguments.verbose):
            if arguments.command == "editor":
                return _edit(arguments)
            if arguments.command == "doctor":
                return doctor.main(arguments)
            if arguments.command == "curve":
                return curve.main(arguments)
            if torchrun.follows(os.environ):
                return _follow(arguments)
            return _run(arguments, argv)
    except KeyboardInterrupt:
        return signals.say_stopped()


def build_parser() -> argparse.ArgumentParser:
    """The commands and their options."""
    description = "Run ComfyUI workflows without a browser."
    parser = argparse.ArgumentParser(prog=quote_command(typed_words()), description=description)
    parser.add_argument("--version", action="version", version=f"Graft {hosts.graft_version()}")
    commands = parser.add_subparsers(dest="command", required=True)
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument(
        "--comfyui",
        metavar="DIR",
        help="the ComfyUI to use (default: COMFYUI_PATH, then the one Graft is installed in)",
    )
    shared.add_argument(
        "--embedded", action="store_true", help="run on Graft's embedded host even when a ComfyUI is found"
    )
    shared.add_argument("--cpu", action="store_true", help="run on the CPU only")
    shared.add_argument(
        "--input", metavar="DIR", help="the input folder (default: the host's own; embedded host: ./input)"
    )
    shared.add_argument(
        "--output", metavar="DIR", help="the output folder (default: the host's own; embedded host: ./output)"
    )
    shared.add_argument(
        "--json",
        action="store_true",
        help="print JSON on standard output, everything else on standard error: doctor one object, run one a line for"
        " each event, the result last",
    )
    shared.add_argument(
        "--verbose", action="store_true", help="show the host's own log, and the traceback of a node that fails"
    )
    runs = commands.add_parser("run", parents=[shared], help="run a workflow file (API format or the editor's own)")
    runs.add_argument("workflow", metavar="WORKFLOW.json", nargs="?", help="the workflow; not with --watch")
    runs.add_argument(
        "--set",
        metavar="NODE.INPUT=VALUE",
        action="append",
        default=[],
        dest="assignments",
        help="change an input before the run; NODE is an id or a unique title, VALUE is JSON or plain text",
    )
    runs.add_argument(
        "--set-from",
        metavar="TABLE.csv",
        help="one run for each row of a table whose header names NODE.INPUT; results go to TABLE.csv.results.jsonl, and"
        " the same command again runs only the rows that are not done",
    )
    runs.add_argument(
        "--watch",
        metavar="FOLDER",
        help="run each workflow file that is put into the folder or changed there, until Ctrl-C",
    )
    runs.add_argument(
        "--pack",
        metavar="DIR",
        action="append",
        default=[],
        dest="packs",
        help="load another node pack from its folder, on the embedded host too; may be given again",
    )
    runs.add_argument(
        "--custom-nodes",
        action="store_true",
        help="load every custom node of the ComfyUI (default: only when the workflow needs one)",
    )
    runs.add_argument(
        "--as-ranks",
        metavar="N",
        type=rank_count,
        help="train as on N ranks, however many there are (default: as many as there are)",
    )
    runs.add_argument(
        "--shard",
        action="store_true",
        help="split the trained model over the ranks (FSDP2's fully_shard), for a model that does not fit on one GPU",
    )
    runs.add_argument(
        "--reproducible",
        action="store_true",
        help="with --shard: get exactly the bytes that one process gets; slower, and uses private parts of torch"
        " (default: FSDP2's own order of sums; without --shard you always get the bytes of one process)",
    )
    caching.add_options(runs)
    _add_check(commands, shared)
    _add_plan(commands, shared)
    commands.add_parser(
        "doctor", parents=[shared], help="check the host and the device: what works here, and what does not"
    )
    curves = commands.add_parser("curve", parents=[shared], help="print the losses of a stored run as CSV")
    curves.add_argument("run", metavar="RUN", help="its name, such as the folder in output/graft")
    edits = commands.add_parser("editor", help="open the graph editor (ComfyUI's front end) on Graft's embedded host")
    edits.add_argument(
        "--listen", metavar="ADDRESS", default="127.0.0.1", help="the address to listen on (default: this machine only)"
    )
    edits.add_argument(
        "--port", type=int, default=8188, help="the port to listen on; 0 is any free one (default: 8188)"
    )
    edits.add_argument("--no-browser", action="store_true", help="only print the address, do not open a browser")
    edits.add_argument(
        "--front-end-root", metavar="DIR", help="the folder of another version of the front end (it holds index.html)"
    )
    edits.add_argument("--cpu", action="store_true", help="run on the CPU only")
    edits.add_argument("--input", metavar="DIR", help="the input folder (default: ./input)")
    edits.add_argument("--output", metavar="DIR", help="the output folder (default: ./output)")
    edits.add_argument(
        "--pack", metavar="DIR", action="append", default=[], help="load this pack of nodes too; may be given again"
    )
    caching.add_options(edits)
    edits.add_argument("--verbose", action="store_true", help="show the host's own log, and every refused request")
    return parser


def _add_check(commands: Any, shared: argparse.ArgumentParser) -> None:
    checks = commands.add_parser(
        "check", parents=[shared], help="say what of a workflow would run and what is wrong with it, without running it"
    )
    checks.add_argument("workflow", metavar="WORKFLOW.json")
    checks.add_argument(
        "--export",
        metavar="API.json",
        help="write the workflow in API format, as the editor's 'Export (API)' does, with what --set sets",
    )
    _add_what_runs(checks)


def _add_what_runs(command: argparse.ArgumentParser) -> None:
    """The options of `run` that commands share which run nothing, or not all."""
    command.add_argument(
        "--set", metavar="NODE.INPUT=VALUE", action="append", default=[], dest="assignments", help="as for run"
    )
    command.add_argument("--pack", metavar="DIR", action="append", default=[], dest="packs", help="as for run")
    command.add_argument("--custom-nodes", action="store_true", help="as for run")
    command.set_defaults(set_from=None, watch=None, as_ranks=None, shard=False, reproducible=False)
    caching.add_options(command)


def _add_plan(commands: Any, shared: argparse.ArgumentParser) -> None:
    plans = commands.add_parser(
        "plan", parents=[shared], help="say how much memory a workflow's training takes, without training"
    )
    plans.add_argument("workflow", metavar="WORKFLOW.json")
    plans.add_argument(
        "--memory",
        metavar="SIZE",
        type=plan.memory_size,
        default=0,
        help="the device's memory, such as 12GB: say which settings make the training fit",
    )
    _add_what_runs(plans)


def typed_words() -> list[str]:
    """The command as it was typed: `graft`, or the name of a link to it, or Python with Graft's folder, or `python -m`
    with the package's name.
    """
    path = Path(sys.argv[0])
    if path.absolute() in (hosts.PACKAGE, hosts.PACKAGE / "__main__.py") and not sys.modules["__main__"].__package__:
        return [sys.executable, sys.argv[0]]
    if path.stem and path.suffix != ".py" and not path.stem.startswith("-"):
        return [path.stem]
    return ["python", "-m", __package__.partition(".")[0]]  # in custom_nodes this is the name of Graft's folder


def _wrong_options(arguments: argparse.Namespace) -> str:
    """Why the options of `run` do not go together; empty if they do."""
    if arguments.command != "run":
        return ""
    if (arguments.workflow is None) == (arguments.watch is None):
        return "run takes one of WORKFLOW.json and --watch FOLDER"
    if arguments.watch is not None and arguments.set_from is not None:
        return "--set-from goes with WORKFLOW.json, and not with --watch"
    if torchrun.place(os.environ) is not None and (arguments.watch or arguments.set_from):
        return "--watch and --set-from run in one process: start them without torchrun"
    return ""


def rank_count(text: str) -> int:
    """Parse a number of ranks from the command line."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number, 1 or more, got {text!r}")
    return int(text)


def _edit(arguments: argparse.Namespace) -> int:
    """Serve the graph editor until Ctrl-C."""
    try:
        if torchrun.place(os.environ) is not None:
            raise HostError(
                "the editor runs in one process: start it without torchrun. To train on several ranks, use `run`"
            )
        return _serve(arguments)
    except HostError as error:
        log.say(f"graft_nodes: {error}", sys.stderr)
        return FAILED


def _serve(arguments: argparse.Namespace) -> int:
    root = arguments.front_end_root
    install = f"install what it needs: {pip_install(*(package for _, package in doctor.EDITOR_NEEDS))}"
    front_end = editor.find_front_end(root and str(hosts.folder_named(root, "--front-end-root")), install)
    with contextlib.closing(editor.listen(arguments.listen, arguments.port)) as listening:
        choice = hosts.Choice(None, "the editor runs on it")
        host = hosts.open_host(choice, arguments.cpu, arguments.input, arguments.output, caching.chosen(arguments))
        hosts.load_packs(host, arguments.pack)
        log.say(f"host: {choice}")
        has_stopped = editor.serve(host, front_end, listening, arguments.listen, not arguments.no_browser, log.say)
    return DONE if has_stopped else FAILED


def _run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    started = time.monotonic()
    report = {**_report(), "host": None, "device": None}
    if arguments.json:
        stream, events = sys.stderr, Events(sys.stdout)
    else:
        stream, events = sys.stdout, Events()
    with contextlib.redirect_stdout(stream):
        status = _run_and_report(arguments, argv, report, stream, events)
    report["seconds"] = round(time.monotonic() - started, 3)
    events.send("end", **report)
    return status


def _report() -> dict[str, Any]:
    """What is said of a run, before it began."""
    return {"status": "invalid", "outputs": {}, "files": [], "errors": []}


def _run_and_report(
    arguments: argparse.Namespace, argv: Sequence[str], report: dict[str, Any], stream: TextIO, events: Events
) -> int:
    """Run the `run` command and fill in the report on the way."""
    try:
        place = torchrun.place(os.environ)
        if place is not None:
            torchrun.take_device(place, arguments.cpu)
        problems = workflow.malformed_assignments(arguments.assignments)
        if problems:
            raise CommandError(problems)
        document, rows = None, None
        if arguments.workflow is not None:
            document = workflow_file.read(arguments.workflow)
        if arguments.set_from is not None:
            rows = batch.read_table(arguments.set_from)
        hosts.pack_paths(arguments.packs)  # a wrong folder is said before a host opens
        folder = None
        if arguments.watch is not None:
            folder = watch.watch(arguments.watch)  # what comes while the host opens is run
        choice = hosts.choose(arguments.comfyui, arguments.embedded, os.environ)
        log.say(f"host: {choice}", stream)
        host = hosts.open_host(choice, arguments.cpu, arguments.input, arguments.output, caching.chosen(arguments))
        report["host"] = {"name": host.name, "version": host.version, "path": str(choice.root) if choice.root else None}
        hosts.load_packs(host, arguments.packs)
        report["device"] = doctor.device(host)
        log.say(f"device: {report['device']}", stream)
        with _join(host, place, arguments) as group:
            if group.size > 1:
                report["ranks"] = group.size
                log.say(f"ranks: {group.size}, training as on {group.as_ranks}", stream)
            opened = _Opened(arguments, argv, stream, events, host, group, caching.new_executor(host))
            if document is not None and rows is not None:
                status = _run_rows(opened, document, rows, report)
            elif document is not None:
                status = _run_opened(opened, document, (), report)
            else:
                assert folder is not None
                status = _run_watched(opened, folder, report)
            torchrun.finish(group, status)
            return status
    except CommandError as error:
        return _invalid(error.problems, report, "the command")
    except WorkflowError as error:
        return _invalid(error.problems, report)
    except HostError as error:
        report["status"], report["errors"] = "failed", [{"message": str(error)}]
        log.say(f"graft_nodes: {error}", sys.stderr)
        return FAILED


@dataclass
class _Opened:
    """What every run of a command shares: its options, an open host, the group of ranks (this is the first one), and
    the executor, which keeps results from one run to the next.
    """

    arguments: argparse.Namespace
    argv: Sequence[str]
    stream: TextIO
    events: Events
    host: hosts.Host
    group: Any
    executor: Any


def _run_rows(opened: _Opened, document: workflow.Document, rows: Sequence[batch.Row], report: dict[str, Any]) -> int:
    """Run the workflow once for each row that is not done yet; 1 if one failed."""
    results = batch.read_results(opened.arguments.set_from)
    results.check_place()
    failed: list[int] = []
    for row in rows:
        identity = batch.identity(document.data, opened.arguments.assignments, row)
        label = f"row {row.number} of {rows[-1].number}"
        if results.has(row, identity):
            log.say(f"{label}: done before", opened.stream)
            continue
        log.say(f"{label}: {', '.join(row.assignments)}", opened.stream)
        own = _report()
        opened.events.send("row", row=row.number, set=row.assignments)
        status = _one_of_many(opened, document, row.assignments, own)
        opened.events.send("result", row=row.number, **own)
        if status == INTERRUPTED:
            report["status"] = "interrupted"
            return status
        results.keep(row, identity, own)
        if status != DONE:
            failed.append(row.number)
    report.update(rows=[results.rows[row.number] for row in rows], status="failed" if failed else "done")
    done = len(rows) - len(failed)
    log.say(f"{done} of {len(rows)} rows are done; their results are in {results.path}", opened.stream)
    if failed:
        log.say(f"not done: row {', '.join(map(str, failed))}", opened.stream)
    return FAILED if failed else DONE


def _run_watched(opened: _Opened, folder: watch.Watch, report: dict[str, Any]) -> int:
    """Run each workflow file that comes into the folder, until Ctrl-C; 1 if one failed."""
    log.say(f"watching {folder.folder}; Ctrl-C ends it", opened.stream)
    failed = 0
    try:
        with signals.stopping():
            while True:
                for path in folder.ready():
                    log.say(f"run {path.name}", opened.stream)
                    failed += _run_file(opened, str(path)) != DONE
                time.sleep(watch.EVERY)
    except KeyboardInterrupt:
        report["status"] = "failed" if failed else "done"
    return FAILED if failed else DONE


def _run_file(opened: _Opened, path: str) -> int:
    own = _report()
    opened.events.send("file", workflow=path)
    try:
        status = _one_of_many(opened, workflow_file.read(path), (), own)
    except WorkflowError as error:
        status = _invalid(error.problems, own)
    opened.events.send("result", workflow=path, **own)
    if status == INTERRUPTED:
        raise KeyboardInterrupt
    return status


def _one_of_many(
    opened: _Opened, document: workflow.Document, assignments: Sequence[str], report: dict[str, Any]
) -> int:
    """One run of several in this process: nothing of it stays."""
    started = time.monotonic()
    try:
        return _run_opened(opened, document, assignments, report)
    finally:
        report["seconds"] = round(time.monotonic() - started, 3)
        workflow.forget()


def _run_opened(
    opened: _Opened, document: workflow.Document, assignments: Sequence[str], report: dict[str, Any]
) -> int:
    """Validate and run a workflow in an open host, with what --set and these assignments set."""
    host, arguments = opened.host, opened.arguments
    look_up = catalogue(host.nodes.NODE_CLASS_MAPPINGS, host.nodes.NODE_DISPLAY_NAME_MAPPINGS)
    try:
        translated = _translate(opened, document, look_up)
        wanted = [*arguments.assignments, *assignments]
        graph, problems = workflow.set_values(translated.graph(look_up), wanted, look_up)
    except WorkflowError as error:
        return _invalid(error.problems, report)
    if arguments.command == "plan" and not problems:
        graph = plan.of_trainings(host, graph, arguments.memory)
    with log.quiet():
        problems += run.validate(host, graph, look_up, translated.of_no_server)
    if arguments.command == "check":
        return _report_check(opened, graph, look_up, problems, report)
    if problems:
        status = _invalid(problems, report)
        if arguments.command == "plan" and (advice := plan.advice(problems)):
            log.say(advice, sys.stderr)
        return status
    metadata = document.data if document.is_editor else None
    return _execute(opened, graph, look_up, metadata, report)


def _translate(opened: _Opened, document: workflow.Document, look_up: workflow.Catalogue) -> workflow.Document:
    """The workflow with nodes of this host in place of old ones; loads other packs where it needs them."""
    document = _replace_old_nodes(opened.host, document, look_up, opened.stream)
    if _other_packs(opened.host, document, opened.arguments.custom_nodes, opened.stream):
        if opened.group.size > 1:
            opened.group.publish({"packs": True})
        document = _replace_old_nodes(opened.host, document, look_up, opened.stream)  # packs replace nodes too
    return document


def _report_check(
    opened: _Opened,
    graph: workflow.Graph,
    look_up: workflow.Catalogue,
    problems: Sequence[Problem],
    report: dict[str, Any],
) -> int:
    """Say what would run and what is wrong, and export what was read."""
    checking.say(graph, look_up, opened.stream, report)
    if opened.arguments.export is not None:
        checking.export(graph, opened.arguments.export, opened.stream)
    if problems:
        return _invalid(problems, report)
    report["status"] = "done"
    log.say("valid: it would run", opened.stream)
    return DONE


def _execute(
    opened: _Opened,
    graph: workflow.Graph,
    look_up: workflow.Catalogue,
    metadata: Mapping[str, Any] | None,
    report: dict[str, Any],
) -> int:
    """Run a valid graph; nodes save `metadata` (the editor's JSON) into pictures."""
    host, group, arguments, stream = opened.host, opened.group, opened.arguments, opened.stream
    spread = partial(torchrun.spread, host, group, look_up)
    reading: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if arguments.command == "plan":
        reading = plan.loading(host, arguments.memory)
    with log.quiet("execution"), reading:
        result = run.execute(
            host, graph, metadata, stream, spread, group.size == 1, events=opened.events, executor=opened.executor
        )
    if result.error is not None:
        opened.events.send("error", **result.error)
    if arguments.command == "plan":
        for text in plan.texts(result.outputs):
            for line in text.splitlines():
                log.say(line, stream)
    return _finish(result, report, opened.argv, stream, arguments.verbose)


def _follow(arguments: argparse.Namespace) -> int:
    """Run as a rank after the first; only its errors are printed, as the first rank prints the rest."""
    try:
        place = torchrun.place(os.environ)
        assert place is not None
        torchrun.take_device(place, arguments.cpu)
        choice = hosts.choose(arguments.comfyui, arguments.embedded, os.environ)
        host = hosts.open_host(choice, arguments.cpu, arguments.input, arguments.output, caching.chosen(arguments))
        if not arguments.verbose:
            logging.getLogger().setLevel(logging.WARNING)  # the first rank logs the rest
        with log.quiet("execution"), _join(host, place, arguments) as group:
            return torchrun.Follower(host, group).follow(STATUS)
    except HostError as error:
        log.say(f"graft_nodes: {error}", sys.stderr)
        return FAILED


def _join(
    host: hosts.Host, at: torchrun.Place | None, arguments: argparse.Namespace
) -> contextlib.AbstractContextManager[Any]:
    """The group of ranks that the command line asks for."""
    return torchrun.joined(host, at, arguments.as_ranks, arguments.shard, arguments.reproducible)


def _replace_old_nodes(
    host: hosts.Host, document: workflow.Document, look_up: workflow.Catalogue, stream: TextIO
) -> workflow.Document:
    """The workflow with the nodes that this ComfyUI has in place of old ones."""
    document, made = node_replacements.replaced(document, node_replacements.of_host(host.server), look_up)
    for old, new in made.items():
        log.say(f"replaced: '{old}' is '{new}' in this ComfyUI", stream)
    return document


def _other_packs(host: hosts.Host, document: workflow.Document, everything: bool, stream: TextIO) -> bool:
    """Load the ComfyUI's other custom nodes if requested, or if the workflow uses a node that is not loaded yet.
    Returns whether it did.
    """
    missing = sorted(document.class_types() - set(host.nodes.NODE_CLASS_MAPPINGS))
    if host.choice.root is not None and (everything or missing):
        reason = "--custom-nodes" if everything else f"the workflow uses {', '.join(missing)}"
        log.say(f"loading the other custom nodes ({reason})", stream)
        hosts.load_other_packs(host)
        return True
    return False


def _invalid(problems: Sequence[Problem], report: dict[str, Any], what: str = "the workflow") -> int:
    report["status"], report["errors"] = "invalid", [problem.as_json() for problem in problems]
    count = "1 error" if len(problems) == 1 else f"{len(problems)} errors"
    log.say(f"graft_nodes: {what} is not valid ({count}); nothing was run", sys.stderr)
    for problem in problems:
        log.say(f"  {problem}", sys.stderr)
    return INVALID


def _finish(result: run.Result, report: dict[str, Any], argv: Sequence[str], stream: TextIO, verbose: bool) -> int:
    report.update(status=result.status, outputs=result.outputs, files=result.files)
    for path in result.files:
        log.say(f"wrote {path}", stream)
    if result.error is not None:
        report["errors"] = [result.error]
        error = result.error
        log.say(
            f'graft_nodes: node {error["node"]} "{error["title"]}" ({error["class"]}) failed: {error["exception"]}:'
            f" {error['message']}",
            sys.stderr,
        )
        if verbose:
            log.say("".join(error["traceback"]), sys.stderr)
    if result.status == "interrupted":
        report["continue"] = quote_command([*typed_words(), *argv])
        log.say(f"interrupted after {result.seconds:.1f} s; to continue: {report['continue']}", sys.stderr)
    if result.status == "done":
        log.say(f"done in {result.seconds:.1f} s", stream)
    return STATUS[result.status]
