"""Ranks on this machine, one for each GPU (NCCL) or two on the CPU (gloo): collectives, and training as one process."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as distributed
from device_timer import Timer

from .case import CHECKED, CannotRun, Case, CutShort, Row, Setting, at_least, device_named, open_host, row
from .small_run import STEPS, begun, dataset, denoiser_on, digest, make_deterministic

CPU_RANKS = 2
SPEED = 2.0  # GB/s, that PCIe 3.0 x8 does, too
PATIENCE = timedelta(seconds=60)
KINDS = ("lora", "full")


def cases(setting: Setting) -> list[Case]:
    """Collectives, training, and FSDP2 where there are several ranks."""
    return [
        Case("collectives", partial(collectives, setting)),
        Case("training as one process", partial(training, setting, "")),
        Case("training with sharded weights (FSDP2)", partial(training, setting, "shard")),
        Case("several ranks", partial(several, setting)),
    ]


def size_of(setting: Setting) -> int:
    """How many ranks there can be; CannotRun where there can be none."""
    if not distributed.is_available():
        raise CannotRun("this torch is built without torch.distributed")
    if setting.device.type == "cpu":
        return CPU_RANKS
    if setting.device.type != "cuda":
        raise CannotRun(f"ranks run on CUDA (NCCL) and on CPUs (gloo), not on {setting.device.type}")
    if not distributed.is_nccl_available():
        raise CannotRun("this torch is built without NCCL")
    return torch.cuda.device_count()


def several(setting: Setting) -> Iterator[Row]:
    """Says so when one GPU leaves everything between ranks untried."""
    size = size_of(setting)
    if size < 2:
        raise CannotRun("there is one GPU: NCCL ran in a group of one rank, and nothing was sent between ranks")
    yield row("ranks", size, "", CHECKED, note="of which each sent to the others")


def collectives(setting: Setting) -> Iterator[Row]:
    """Sum, gather and broadcast of device tensors have the right values."""
    told = together(setting, size_of(setting), "collectives")
    yield row("ranks", len(told), "", CHECKED, note=f"{told[0]['backend']}: sum, gather and broadcast are right")
    for name in ("all_reduce", "all_gather"):
        speed = told[0]["megabytes"] / 1000 / max(rank[name] for rank in told)
        yield row(f"{name} of {told[0]['megabytes']:.0f} MB", speed, "GB/s", at_least(SPEED))


def training(setting: Setting, mode: str) -> Iterator[Row]:
    """Ranks give the bytes of one process that accumulates as often."""
    size = size_of(setting)
    if mode == "shard" and (size < 2 or setting.device.type != "cuda"):
        raise CannotRun("it is tried with two GPUs or more; the tests of training/distributed try it on the CPU")
    alone = together(setting, 1, "alone", str(size))[0]
    told = together(setting, size, f"train {mode}".strip())
    for kind in KINDS:
        digests = {rank[kind] for rank in told}
        assert digests == {alone[kind]}, f"{kind}: the ranks' bytes are not those of one process"
    yield row("ranks", size, "", CHECKED, note=f"equal bytes to one process: {', '.join(KINDS)}, {STEPS} steps")


def together(setting: Setting, size: int, *arguments: str) -> list[dict[str, Any]]:
    """What each rank says, each in a process of its own."""
    port = free_port()
    ranks, logs = [], []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(size):
            place = [str(rank), str(size), str(port), setting.device.type, setting.comfyui]
            log = Path(folder) / f"{rank}.log"
            with log.open("wb") as output:
                command = [sys.executable, "-m", "gpu_parts.ranks", *place, *arguments]
                ranks.append(subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT))
            logs.append(log)
        try:
            statuses = [process.wait(max(1.0, setting.left())) for process in ranks]
        except subprocess.TimeoutExpired as error:
            raise CutShort(f"the ranks were not done when the part's time was over: {' '.join(arguments)}") from error
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        texts = [log.read_text(encoding="utf-8", errors="replace") for log in logs]
    for rank, status in enumerate(statuses):
        assert status == 0, f"rank {rank} ended with {status}: {texts[rank][-3000:]}"
    return [json.loads(text.splitlines()[-1]) for text in texts]


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


# --- what a rank does -------------------------------------------------------------------------------------------------


def rank_main(rank: int, size: int, port: int, kind: str, comfyui: str, what: str, as_ranks: str = "1") -> Any:
    """Join the group, and do what was asked for."""
    device = device_named(kind)
    if kind == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    setting = Setting(device, True, comfyui, 0.0)
    if what == "alone":
        return train(setting, int(as_ranks))
    store = distributed.TCPStore("127.0.0.1", port, size, rank == 0, timeout=PATIENCE)
    backend = "gloo"
    if kind == "cuda":
        backend = "cpu:gloo,cuda:nccl"
    distributed.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=PATIENCE)
    try:
        if what == "collectives":
            return {"backend": backend, **measure_collectives(device, rank, size)}
        from graft_nodes.training.distributed import process_group

        group = process_group.ProcessGroup(distributed.PrefixStore("graft", store))
        group.shard = group.reproducible = what == "train shard"
        process_group.join(group)
        return train(setting, size)
    finally:
        distributed.destroy_process_group()


def train(setting: Setting, ranks: int) -> dict[str, str]:
    """Digests of short runs: `ranks` micro-batches make a step, however many processes there are."""
    from graft_nodes.training.run import call

    open_host(setting)
    make_deterministic(setting.device)
    data, found = dataset(), {}
    for kind in KINDS:
        with denoiser_on(setting.device) as denoiser:
            state = begun(denoiser, data, kind, accumulation=ranks)
            opened = partial(nullcontext, denoiser)
            found[kind] = digest(call.run(state, STEPS, opened, data, None).state)
    return found


def measure_collectives(device: torch.device, rank: int, size: int) -> dict[str, float]:
    """Check the values of each collective, and its seconds."""
    timer = Timer(device)
    numbers = 1 << 22
    own = torch.full((numbers,), float(rank + 1), device=device)
    summed = own.clone()
    distributed.all_reduce(summed)
    assert bool((summed == size * (size + 1) / 2).all()), "all_reduce gave another sum"
    gathered = torch.empty(size * numbers, device=device)
    distributed.all_gather_into_tensor(gathered, own)
    for other in range(size):
        assert bool((gathered[other * numbers : (other + 1) * numbers] == other + 1).all()), (
            "all_gather mixed the ranks"
        )
    sent = own.clone()
    distributed.broadcast(sent, 0)
    assert bool((sent == 1).all()), "broadcast gave another rank's value"
    return {
        "megabytes": own.nbytes / 1e6,
        "all_reduce": min(timer.seconds(lambda: distributed.all_reduce(summed)) for _ in range(3)),
        "all_gather": min(timer.seconds(lambda: distributed.all_gather_into_tensor(gathered, own)) for _ in range(3)),
    }


if __name__ == "__main__":
    place = sys.argv[1:]
    print(json.dumps(rank_main(*map(int, place[:3]), *place[3:])))
