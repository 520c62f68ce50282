"""Runs a workflow on several ranks under torchrun: reads the rank, joins the process group, and runs TrainSteps on the
ranks after the first.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from . import hosts, log, rank_placement, run, signals
from .embedded import Catalogue, Graph, HostError, new_executor

NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
GOODBYE = 60.0  # seconds to wait for the first rank to save its state before this rank ends


@dataclass(frozen=True)
class Place:
    """The rank of a process, the world size, and its rank on this machine (LOCAL_RANK)."""

    rank: int
    size: int
    local: int


def place(environment: Mapping[str, str]) -> Place | None:
    """Rank and world size from the environment variables that torchrun sets; None for a single process. Raises
    HostError that lists what is missing or wrong.
    """
    variables = {name: environment[name] for name in NAMES if environment.get(name)}
    if not variables.keys() & {"RANK", "WORLD_SIZE"}:
        return None
    errors = [f"{name} is missing" for name in NAMES if name not in variables]
    numbers: dict[str, int] = {}
    for name, minimum in (("RANK", 0), ("WORLD_SIZE", 1), ("MASTER_PORT", 1), ("LOCAL_RANK", 0)):
        text = environment.get(name) or ("0" if name == "LOCAL_RANK" else "")
        if text and not (text.isdecimal() and int(text) >= minimum):
            errors.append(f"{name} is {text!r}, expected a whole number, {minimum} or more")
        elif text:
            numbers[name] = int(text)
    if not errors and numbers["RANK"] >= numbers["WORLD_SIZE"]:
        errors.append(f"RANK is {numbers['RANK']} and WORLD_SIZE {numbers['WORLD_SIZE']}: ranks count from 0")
    if errors:
        raise HostError(
            f"the environment variables of a torchrun rank are incomplete or wrong: {'; '.join(errors)}. Start ranks"
            " with torchrun: `torchrun --nproc-per-node 2 -m graft_nodes run WORKFLOW.json`, or unset RANK and"
            " WORLD_SIZE to run one process"
        )
    return Place(numbers["RANK"], numbers["WORLD_SIZE"], numbers["LOCAL_RANK"])


def follows(environment: Mapping[str, str]) -> bool:
    """Whether RANK is set and not 0."""
    return environment.get("RANK", "0") != "0"


def take_device(at: Place, cpu: bool) -> None:
    """Set the current CUDA device to this rank's GPU, before the host picks a device."""
    import torch

    if cpu or not torch.cuda.is_available():
        return
    count = torch.cuda.device_count()
    if at.local >= count:
        raise HostError(
            f"rank {at.local} of this machine (counted from 0) has no GPU, as there are only {count}: use"
            " --nproc-per-node"
            f" {count}"
        )
    torch.cuda.set_device(at.local)


@contextlib.contextmanager
def joined(
    host: hosts.Host, at: Place | None, as_ranks: int | None, shard: bool = False, reproducible: bool = False
) -> Iterator[Any]:
    """During the block, the loaded pack trains in a process group of all ranks, or as a single process. Yields the
    group.
    """
    parallel = of_pack(host, "training.distributed.process_group")
    if shard and (at is None or at.size == 1):
        raise HostError(
            "--shard splits the model over several ranks, and this is one process: start several with torchrun, or"
            " leave out --shard"
        )
    if at is None or at.size == 1:
        parallel.join(parallel.SingleProcess(as_ranks or 1))
        try:
            yield parallel.current()
        finally:
            parallel.join(parallel.SingleProcess())
        return
    import torch.distributed as distributed

    if not distributed.is_available():
        raise HostError("this torch is built without torch.distributed, so it cannot run ranks; install another build")
    device = host.management.get_torch_device().type
    if device not in ("cuda", "cpu") or (device == "cuda" and not distributed.is_nccl_available()):
        raise HostError(
            f"ranks train on CUDA GPUs (NCCL) or on CPUs (gloo), and this device is {device}: add --cpu or use one"
            " process"
        )
    try:
        store, rank, size = next(distributed.rendezvous("env://", timeout=parallel.TIMEOUT))
        store = distributed.PrefixStore(_start(store, rank, size, parallel.TIMEOUT.total_seconds()), store)
        distributed.init_process_group(
            "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
            store=distributed.PrefixStore("group", store),
            rank=rank,
            world_size=size,
            timeout=parallel.TIMEOUT,
        )
    except (RuntimeError, ValueError) as error:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise HostError(
            f"rank {at.rank} of {at.size} could not connect to the other ranks at {address}: {error}"
        ) from error
    group = parallel.ProcessGroup(distributed.PrefixStore("graft", store), as_ranks, shard, reproducible=reproducible)
    parallel.join(group)
    try:
        yield parallel.current()
    finally:
        broken = parallel.current().broken
        parallel.join(parallel.SingleProcess())
        if not broken:  # otherwise it would wait for ranks that have ended
            distributed.destroy_process_group()


def _start(store: Any, rank: int, size: int, patience: float) -> str:
    """Agree with the other ranks on a new name for this start of the job: after a restart, the store may still hold
    keys of the earlier start. The first rank sends the name to each rank that says hello.
    """
    name, deadline = uuid.uuid4().hex, time.monotonic() + patience
    if rank:
        store.set(f"hello/{rank}", name)
        _await(store, f"welcome/{rank}/{name}", deadline)
        given_name = store.get(f"welcome/{rank}/{name}").decode()
        store.set(f"ready/{given_name}/{rank}", "yes")
        return given_name
    for follower in range(1, size):
        while not store.check([f"ready/{name}/{follower}"]):
            if store.check([f"hello/{follower}"]):
                store.set(f"welcome/{follower}/{store.get(f'hello/{follower}').decode()}", name)
            _await(
                store,
                f"ready/{name}/{follower}",
                min(deadline, time.monotonic() + 0.2),
                last=time.monotonic() > deadline,
            )
    return name


def _await(store: Any, key: str, until: float, last: bool = True) -> None:
    """Wait for a key until `until`; then raise RuntimeError if `last`, else return."""
    while not store.check([key]):
        if time.monotonic() > until:
            if last:
                raise RuntimeError(f"{key} did not come in time")
            return
        time.sleep(0.02)


def of_pack(host: hosts.Host, name: str) -> Any:
    """A module of the pack that the host loaded, which may be a different copy from the one that runs the command."""
    home = host.nodes.NODE_CLASS_MAPPINGS[rank_placement.TRAINS].__module__.partition(".nodes.")[0]
    return importlib.import_module(f"{home}.{name}")


# --- the first rank ---------------------------------------------------------------------------------------------------


def spread(host: hosts.Host, group: Any, look_up: Catalogue, graph: Graph, outputs: list[str]) -> Graph:
    """Send the graph to the other ranks; returns the first rank's own graph."""
    if group.size == 1:
        return graph
    steps = rank_placement.trained(graph, outputs)
    everywhere, sent_outputs = rank_placement.sent(graph, steps, look_up)
    types = {source: [_types(host, graph, source)[slot] for slot in slots] for source, slots in sent_outputs.items()}
    for source, output_types in types.items():
        host.nodes.NODE_CLASS_MAPPINGS[rank_placement.carrier(source)] = rank_placement.carrying(
            output_types, _putting(group, source), inputs=True
        )
    counts = {source: len(slots) for source, slots in sent_outputs.items()}
    group.publish({"graph": rank_placement.others(graph, everywhere, sent_outputs, steps), "taken": counts})
    return rank_placement.first(graph, everywhere, sent_outputs)


def _types(host: hosts.Host, graph: Graph, node_id: str) -> Any:
    return host.nodes.NODE_CLASS_MAPPINGS[graph[node_id]["class_type"]].RETURN_TYPES


def _putting(group: Any, source: str) -> Any:
    def put(values: rank_placement.Values) -> rank_placement.Values:
        group.put_value(source, values)
        return values

    return put


def finish(group: Any, status: int) -> None:
    """Tell the other ranks that the first rank is done, and wait until they have ended."""
    if group.size == 1 or group.broken:
        return
    group.timeout = timedelta(seconds=10)
    with contextlib.suppress(RuntimeError):  # a rank that failed has reported it; one that has ended needs nothing
        group.publish({"end": status})
        for rank in range(1, group.size):
            group.wait_for(f"left/{rank}")


# --- the others -------------------------------------------------------------------------------------------------------


class Follower:
    """A rank after the first: runs the TrainSteps that the first rank names, and the nodes they depend on; writes no
    files.
    """

    def __init__(self, host: hosts.Host, group: Any) -> None:
        self.host, self.group = host, group
        self.executor = new_executor(host)
        self.graph: Graph = {}
        self.results: dict[str, rank_placement.Values] = {}
        self.busy = False

    def follow(self, codes: Mapping[str, int]) -> int:
        """Run what the first rank sends until it is done; returns the exit status."""
        try:
            with self._interruptible():
                for message in self.group.messages():
                    if "packs" in message:
                        hosts.load_other_packs(self.host)
                    if "graph" in message:
                        self._prepare(message["graph"], message["taken"])
                    if "run" in message:
                        status = self._run(message["run"])
                        if status != "done":
                            return codes[status]
                    if "end" in message:
                        return int(message["end"])
        except KeyboardInterrupt as error:
            self._fail(error)
            return codes["interrupted"]
        except RuntimeError as error:  # another rank failed, or the connection broke
            self._say(str(error))
            return codes["failed"]
        finally:
            with contextlib.suppress(RuntimeError):
                self.group.leave(GOODBYE)
        raise AssertionError("the first rank's messages have no end")

    def _prepare(self, graph: Graph, taken: Mapping[str, int]) -> None:
        self.graph = graph
        for source, count in taken.items():
            act = _taking(self.group, source)
            self.host.nodes.NODE_CLASS_MAPPINGS[rank_placement.carrier(source)] = rank_placement.carrying(
                ["*"] * count, act, inputs=False
            )

    def _run(self, node_id: str) -> str:
        """Run one TrainStep; returns "done", "failed" or "interrupted". Keeps its results, so it never runs twice."""
        output_types = _types(self.host, self.graph, node_id)
        keeper, classes = f"{node_id} kept", self.host.nodes.NODE_CLASS_MAPPINGS
        classes[keeper] = rank_placement.carrying(
            output_types, lambda values: self.results.setdefault(node_id, values), inputs=True, output=True
        )
        inputs = {f"value{number}": [node_id, number] for number in range(len(output_types))}
        graph = {**self.graph, keeper: {"class_type": keeper, "inputs": inputs}}
        self.busy = True
        try:
            self.host.loop.run_until_complete(self.executor.execute_async(graph, str(uuid.uuid4()), {}, [keeper]))
        finally:
            self.busy = False
        for event, data in self.executor.status_messages:
            if event == "execution_interrupted":
                self._fail(KeyboardInterrupt())
                return "interrupted"
            if event == "execution_error":
                error = run.outcome(data, self.graph)
                exception_name = error["exception"].rpartition(".")[2]
                if exception_name == "RemoteRankError":  # the rank that failed reports it
                    self._say(error["message"])
                else:
                    self._fail(f"{exception_name}\nnode {error['node']} ({error['class']}): {error['message']}")
                return "failed"
        classes[keeper] = rank_placement.carrying(output_types, lambda _: self.results[node_id], inputs=False)
        self.graph = {**self.graph, node_id: {"class_type": keeper, "inputs": {}}}
        return "done"

    def _fail(self, error: BaseException | str) -> None:
        """Report an error of this rank on standard error and to the other ranks."""
        self._say(error if isinstance(error, str) else type(error).__name__)
        with contextlib.suppress(RuntimeError):
            self.group.report_failure(error)

    def _say(self, text: str) -> None:
        log.say(f"graft_nodes: rank {self.group.rank}: {': '.join(text.splitlines())}", sys.stderr)

    @contextlib.contextmanager
    def _interruptible(self) -> Iterator[None]:
        """During the block, Ctrl-C (or SIGTERM) stops the running node after its step, on every rank; between nodes it
        ends this rank.
        """

        def ask(number: int, frame: Any) -> None:
            if not self.busy:
                raise KeyboardInterrupt
            self.host.nodes.interrupt_processing(True)

        with signals.listening(ask):
            yield


def _taking(group: Any, source: str) -> Any:
    return lambda _: group.take_value(source)
