"""Forks that train as one: torch is imported once, every fork is a rank of a gloo group on this machine.

python ranks.py FOLDER SCENARIO   runs one of the functions below and prints one line of JSON: what it found.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import random
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as distributed
from conftest import Lab
from graft_nodes.ema.decay import EMASettings
from graft_nodes.storage.safetensors import safetensors_bytes
from graft_nodes.training.distributed import gradient_sum, process_group
from graft_nodes.training.run import call as runs
from graft_nodes.training.run.loop import Callbacks
from graft_nodes.training.state import Start, TrainState, begin
from graft_nodes.training.store import store
from graft_nodes.training.trainable.settings import AdapterSettings

torch.set_num_threads(1)


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def together(
    size: int, act: Callable[[int], object], patience: float = 60.0, kill: tuple[int, float] | None = None
) -> list[object]:
    """What `act(rank)` gives on each rank of a group, as JSON; an exception is {"error", "kind", "rank"}, a killed rank
    its signal.

    `kill` is a rank that gets SIGKILL, whatever it does, so many seconds after the start.
    """
    port, readers, children = free_port(), [], []
    for rank in range(size):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            signal.alarm(int(patience))
            os.write(writer, json.dumps(_as_rank(rank, size, port, act)).encode())
            os._exit(0)
        os.close(writer)
        readers.append(reader)
        children.append(child)
    if kill is not None:
        time.sleep(kill[1])
        os.kill(children[kill[0]], signal.SIGKILL)  # nobody has waited for it yet: the number is its own
    told = []
    for reader, child in zip(readers, children, strict=True):
        with os.fdopen(reader, "rb") as pipe:
            body = pipe.read()
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        told.append(json.loads(body) if body else ended)
    return told


def _as_rank(rank: int, size: int, port: int, act: Callable[[int], object]) -> object:
    try:
        # Where torchrun would end the others, a rank whose store never comes gives up by itself.
        place = distributed.TCPStore("127.0.0.1", port, size, rank == 0, timeout=timedelta(seconds=10))
        distributed.init_process_group("gloo", store=place, rank=rank, world_size=size, timeout=timedelta(seconds=30))
        process_group.join(process_group.ProcessGroup(distributed.PrefixStore("graft", place)))
        found = act(rank)
        distributed.barrier()
        return found
    except BaseException as error:  # noqa: BLE001  (whatever it is, it is what the test asks for)
        if os.environ.get("SHOW"):
            traceback.print_exc()
        time.sleep(0.5 if rank == 0 else 0.0)  # the first rank has the store
        return {"error": str(error), "kind": type(error).__name__, "rank": getattr(error, "rank", None)}


def tensors_of(state: TrainState) -> dict[str, torch.Tensor]:
    """Everything of a state that is a tensor."""
    return {f"{group}/{name}": t for group in store.GROUPS for name, t in getattr(state, group).items()}


def bytes_of(state: TrainState) -> str:
    """A hash of a state's tensors and of everything that was measured."""
    import hashlib

    digest = hashlib.sha256(repr((state.key, state.step, state.position, state.history)).encode())
    for chunk in safetensors_bytes(tensors_of(state), {}):
        digest.update(chunk)
    return digest.hexdigest()


def train(
    state: TrainState,
    dataset,
    steps: int,
    callbacks: Callbacks | None = None,
    folder: Path | None = None,
    denoiser=None,
) -> TrainState:
    """`steps` further, as TrainStep goes."""
    kept = None if folder is None else store.Store(folder, "run")
    return runs.run(state, steps, lambda: nullcontext(denoiser or Lab.Flow()), dataset, kept, callbacks, "best").state


def plain(accumulation: int, ema: bool = True, adapter: AdapterSettings | None = None, switch: int = 0, **optimizer):
    """(state, dataset) of a small run with held-out pictures."""
    dataset = Lab.pictures(held_out=[9])
    adapter = adapter or AdapterSettings(targets="all", rank=2)
    optimizer = {"batch_size": 2, "total_steps": 100, **optimizer}
    made = Lab.state(Lab.Flow(), dataset, adapter, ema=False, accumulation=accumulation, **optimizer)
    averages = EMASettings("ramp", snapshots=50, widths=(0.1, 0.2), switch_every=switch) if ema else None
    return begin(Lab.Flow().module, Start("model", dataset.digest, adapter, averages, 3), made.settings), dataset


def mixed(accumulation: int):
    """A run whose micro-batches have pictures of two sizes, so that a part has two backward passes."""
    other = Lab.pictures(6, (4, 4, 8), seed=5)
    dataset = Lab.pictures(regularization=other, regularization_share=0.5)
    return Lab.state(Lab.Flow(), dataset, accumulation=accumulation, batch_size=2, total_steps=100), dataset


def shard(reproducible: bool = True) -> None:
    """What --shard does, by default with --reproducible."""
    group = process_group.current()
    group.shard, group.reproducible = True, reproducible


WATCH = Callbacks(validate_every=25, snapshot_every=40)
WHOLE = AdapterSettings(kind="full", targets="all")
STEPS = 100


def equal(root: Path) -> dict:
    """Ranks against one process, byte for byte: the whole state, its history, its averages."""
    found = {}
    gradient_sum.BUCKET_BYTES = 512  # several, and tensors across slices
    runs_of = {
        "2 ranks, accumulation 2": (2, plain(2)),
        "4 ranks, accumulation 4": (4, plain(4)),
        "2 ranks, accumulation 4": (2, plain(4, ema=False)),
        "2 ranks, accumulation 3": (2, plain(3, ema=False)),
        "pictures of two sizes": (2, mixed(4)),
        "full weights": (4, plain(4, adapter=WHOLE, ema=False)),
        "dropout, full-bf16": (2, plain(2, adapter=AdapterSettings(rank=2, module_dropout=0.4), precision="full-bf16")),
        "fp16": (2, plain(2, ema=False, precision="fp16")),
        "the average takes over": (2, plain(2, switch=7)),
        "slices": (3, plain(6)),
        "slices, dropout": (3, plain(4, adapter=AdapterSettings(rank=2, module_dropout=0.4))),
    }
    for name, (size, (state, dataset)) in runs_of.items():
        gradient_sum.ALL_GATHER_MAX_RANKS = 1 if "slices" in name else 4
        steps = STEPS if name in ("2 ranks, accumulation 2", "4 ranks, accumulation 4", "full weights") else 12
        alone = bytes_of(train(state, dataset, steps, WATCH))
        told = together(size, lambda rank, s=state, d=dataset, n=steps: bytes_of(train(s, d, n, WATCH)))
        found[name] = [alone, *told]
    gradient_sum.ALL_GATHER_MAX_RANKS = 4
    state, dataset = plain(4)
    folder = root / "moving"
    ways = [(4, 4), (2, 7), (1, 10), (3, 12)]  # so many ranks up to that step, one after another
    for size, until in ways:
        told = together(size, lambda rank, until=until: bytes_of(train(state, dataset, until, WATCH, folder)))
    found["ranks that come and go"] = [bytes_of(train(state, dataset, 12, WATCH)), *told]
    return found


def measured(root: Path) -> dict:
    """What a rank hands to collectives, step by step, and when gradients leave: buckets before the last gradient is
    made.
    """
    gradient_sum.BUCKET_BYTES = 64
    state, dataset = plain(2, ema=False)
    size = sum(t.numel() * t.element_size() for t in state.trained.values())

    def act(rank: int) -> object:
        order: list[str] = []
        launch, made = gradient_sum.Bucket.launch, gradient_sum.AllGatheredGradients.gradient_ready

        def launched(self, group):
            order.append("leaves")
            launch(self, group)

        def heard(self, bucket, number, tensor):
            order.append("made")
            made(self, bucket, number, tensor)

        gradient_sum.Bucket.launch, gradient_sum.AllGatheredGradients.gradient_ready = launched, heard
        train(state, dataset, 10)
        group = process_group.current()
        return {"sent": group.bytes_sent, "order": order[: len(order) // 10], "said": group.report(2, 10)}

    return {"gradients": size, "tensors": len(state.trained), "ranks": together(2, act), "others": handed_otherwise()}


def handed_otherwise() -> dict:
    """Bytes that one step hands to collectives when slices are added, and when the model is held together."""
    found = {}
    adapter = AdapterSettings(targets="all", rank=2)
    for name, size, kind in (("slices", 3, adapter), ("shard, adapters", 2, adapter), ("shard, full", 4, WHOLE)):
        gradient_sum.ALL_GATHER_MAX_RANKS = 1 if name == "slices" else 4
        state, dataset = plain(size, ema=False, adapter=kind)

        def act(rank: int, name=name, state=state, dataset=dataset) -> object:
            group, counts = process_group.current(), {"gathered": 0, "scattered": 0}
            group.shard = group.reproducible = name.startswith("shard")
            for call, purpose in (("all_gather_single", "gathered"), ("reduce_scatter_single", "scattered")):
                real = getattr(distributed, call)

                def counted(*arguments, real=real, purpose=purpose, **named):
                    own = named.get("input_tensor", named.get("input", arguments[1] if len(arguments) > 1 else None))
                    counts[purpose] += own.numel() * own.element_size()
                    return real(*arguments, **named)

                setattr(distributed, call, counted)
            train(state, dataset, 2)
            return {**group.bytes_sent, **counts}

        trained, model = (
            sum(t.numel() for t in tensors) * 4 for tensors in (state.trained.values(), Lab.Flow().module.parameters())
        )
        found[name] = {"trained": trained, "model": model, "ranks": together(size, act)}
    return found


def shape_of(module: torch.nn.Module) -> list:
    """What must be the same again: classes, attributes, parameters and hooks of every part."""
    return [
        (
            name,
            type(part),
            sorted(part.__dict__),
            [id(p) for p in part._parameters.values()],
            [id(b) for b in part._buffers.values()],
            len(part._forward_hooks),
            len(part._forward_pre_hooks),
            len(part._state_dict_hooks),
            len(part._load_state_dict_post_hooks),
        )
        for name, part in module.named_modules()
    ]


class Uneven(Lab.Net):
    """A network with a layer of more rows than the others, of which the last of three ranks has none."""

    def __init__(self):
        super().__init__()
        self.more = torch.nn.Linear(1, 9)

    def forward(self, x, context):
        return super().forward(x, context) * (1 + self.more(context.reshape(-1, 1)).mean(-1).view(-1, 1, 1, 1))


class Skipping(Lab.Net):
    """A network that reads what goes into a block, which reads it twice, again after it: gradients of three parts,
    whose order counts.
    """

    def __init__(self):
        super().__init__(32)

    def forward(self, x, context):
        x, kept = x.repeat(1, 8, 1, 1), []
        for block in self.blocks:
            kept.append(x)
            x = block(x)
        for one in reversed(kept):
            x = x + one * context
        return (self.norm(x) * (1 + context)).unflatten(1, (8, 4)).sum(1)


def skipping(accumulation: int, adapter: AdapterSettings, **optimizer):
    """Such a network, gradients clipped."""
    dataset = Lab.pictures(held_out=[9])
    settings = {"batch_size": 2, "total_steps": 100, "clip_norm": 0.1, **optimizer}
    return Lab.state(Lab.Flow(Skipping()), dataset, adapter, False, accumulation=accumulation, **settings), dataset


def uneven(accumulation: int, **optimizer):
    """Whole weights of such a network."""
    dataset = Lab.pictures(held_out=[9])
    made = Lab.state(
        Lab.Flow(Uneven()), dataset, WHOLE, False, accumulation=accumulation, batch_size=2, total_steps=100, **optimizer
    )
    return made, dataset


def sharded(root: Path) -> dict:
    """Ranks that hold the model together: against one process, how much each holds, and what is left on the model."""
    found = {}
    rate = {"learning_rate": 1e-4}
    runs_of = {
        "adapters": (2, plain(2), 12),
        "adapters, checkpointing": (3, plain(3, ema=False, checkpointing=True), 5),
        "adapters, blocks that are skipped": (2, skipping(2, AdapterSettings(targets="all", rank=2)), 12),
        "full, 2 ranks": (2, plain(2, ema=False, adapter=WHOLE, **rate), STEPS),
        "full, 4 ranks, average": (4, average_only(4, WHOLE, **rate), 30),
        "full, two parts a rank": (2, plain(4, ema=False, adapter=WHOLE, **rate), 12),
        "full, blocks that are skipped": (4, skipping(8, WHOLE, checkpointing=True, **rate), 12),
        "full, lion": (3, uneven(3, optimizer="lion", **rate), 12),
    }
    watch = replace(WATCH, validate_every=5)
    for name, (size, (state, dataset), steps) in runs_of.items():
        net = Uneven if name == "full, lion" else Skipping if "skipped" in name else Lab.Net
        alone = train(state, dataset, steps, watch, denoiser=Lab.Flow(net()))
        stored = root / name.replace(",", "").replace(" ", "-")

        def act(rank: int, state=state, dataset=dataset, steps=steps, alone=alone, stored=stored, net=net) -> object:
            group, denoiser = process_group.current(), Lab.Flow(net())
            group.shard = group.reproducible = True
            parts, before, held = [], shape_of(denoiser.module), denoiser.denoise

            def counted(*arguments):
                if not parts:
                    parts.append(
                        sum(p.to_local().numel() for p in denoiser.module.parameters() if hasattr(p, "to_local"))
                    )
                return held(*arguments)

            denoiser.denoise = counted
            first = train(state, dataset, steps // 2, watch, stored, denoiser)
            end = train(first, dataset, steps - steps // 2, watch, stored, denoiser)
            ours, theirs = tensors_of(end), tensors_of(alone)
            return {
                "far": max(float((ours[name].float() - theirs[name].float()).abs().max()) for name in theirs),
                "same": ours.keys() == theirs.keys() and end.key == alone.key,
                "bytes": bytes_of(end) == bytes_of(alone),
                "held": parts[0],
                "of": sum(p.numel() for p in denoiser.module.parameters()),
                "back": shape_of(denoiser.module) == before,
                "loss": max(abs(a - b) for a, b in zip(end.history.loss, alone.history.loss, strict=True)),
                "validated": (
                    [step for step, _ in end.history.validation] == [step for step, _ in alone.history.validation]
                ),
                "validated average": _far_losses(end.history.average_validation, alone.history.average_validation),
            }

        found[name] = together(size, act)
    found["snapshots"] = snapshots_together(root / "parts", WHOLE, rate)
    found["full disk"] = disk_that_fills(root / "filled", rate)
    found["turns"] = turns()
    return found


def _far_losses(left, right) -> float:
    """The largest difference of two rows of (step, loss); infinite when they are of other steps."""
    if [step for step, _ in left] != [step for step, _ in right]:
        return float("inf")
    return max((abs(a - b) for (_, a), (_, b) in zip(left, right, strict=True)), default=0.0)


def plain_fsdp(root: Path) -> dict:
    """`--shard` by itself, twice on the same model: how far two ranks end from one process and from each other."""
    results = {}
    rate = {"learning_rate": 1e-4}
    runs_of = {
        "adapters": plain(2, ema=False),
        "adapters, checkpointing": plain(2, ema=False, checkpointing=True),
        "full": plain(2, ema=False, adapter=WHOLE, **rate),
        "full, two micro-batches a rank": plain(4, ema=False, adapter=WHOLE, **rate),
        "full, clipped": plain(2, ema=False, adapter=WHOLE, clip_norm=0.1, **rate),
    }
    for name, (state, dataset) in runs_of.items():
        alone = train(state, dataset, 12, WATCH)

        def act(rank: int, state=state, dataset=dataset, alone=alone) -> object:
            shard(reproducible=False)
            denoiser = Lab.Flow()
            before = shape_of(denoiser.module)
            end = train(train(state, dataset, 6, WATCH, denoiser=denoiser), dataset, 6, WATCH, denoiser=denoiser)
            ours, expected = tensors_of(end), tensors_of(alone)
            return {
                "bytes": bytes_of(end),
                "far": max(float((ours[name].float() - expected[name].float()).abs().max()) for name in expected),
                "moved": max(
                    float((expected[name] - state.trained[name.partition("/")[2]]).abs().max())
                    for name in expected
                    if name.startswith("trained/")
                ),
                "loss": max(abs(a - b) for a, b in zip(end.history.loss, alone.history.loss, strict=True)),
                "same": ours.keys() == expected.keys() and end.key == alone.key,
                "back": shape_of(denoiser.module) == before,
            }

        results[name] = together(2, act)
    return results


def disk_that_fills(folder: Path, rate: dict) -> dict:
    """The second snapshot that two ranks write together fails on the second of them; then the same call again."""
    state, dataset = plain(2, False, WHOLE, **rate)
    alone, often, real = bytes_of(train(state, dataset, 9)), Callbacks(snapshot_every=3), store.rank_files.write

    def act(rank: int, fails: bool) -> object:
        calls = []
        shard()

        def write(*arguments):
            calls.append(1)
            if fails and rank == 1 and len(calls) == 2:
                raise OSError(28, "No space left on device", str(folder))
            return real(*arguments)

        store.rank_files.write = write
        return bytes_of(train(state, dataset, 9, often, folder)) == alone

    told = together(2, lambda rank: act(rank, True))
    (kept,) = (json.loads(path.read_bytes()) for path in folder.rglob("state.json"))
    whole = all((next(folder.rglob("partial")) / one["file"]).is_file() for one in kept["tensors"]["parts"])
    return {"told": told, "kept": kept["step"], "whole": whole, "again": together(2, lambda rank: act(rank, False))}


def turns() -> list:
    """Which block takes its weights for the backward pass of a step, and which gives them back, on each
    of two ranks.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    state, dataset = skipping(2, WHOLE)

    def act(rank: int) -> object:
        order = []
        shard()
        for call, doing in (("pre_backward", "takes"), ("post_backward", "gives")):
            real = getattr(FSDPParamGroup, call)

            @functools.wraps(real)
            def told(self, *arguments, real=real, doing=doing):
                order.append(f"{doing} {self._module_fqn}")
                return real(self, *arguments)

            setattr(FSDPParamGroup, call, told)
        train(state, dataset, 1, denoiser=Lab.Flow(Skipping()))
        return [one for one in order if "inner" in one]

    return together(2, act)


def snapshots_together(folder: Path, adapter: AdapterSettings, rate: dict) -> dict:
    """A run of whole weights that ends early, its snapshot, and where it leads on two ranks, on four and on one."""
    state, dataset = plain(4, False, adapter, optimizer="schedulefree", schedule="constant", **rate)
    alone = train(state, dataset, 9)
    often = Callbacks(snapshot_every=3)

    def begun(rank: int) -> object:
        shard()

        def stepped(step, moved, validation):
            if step == 7 and rank == 1:
                raise OSError("asked to fail")

        return train(state, dataset, 9, replace(often, on_step=stepped), folder).step

    told = together(2, begun)
    files = sorted(path.name for path in folder.rglob("partial/*"))
    ends = []
    for size in (1, 2, 4):
        copy = folder.with_name(f"on {size}")
        shutil.copytree(folder, copy)

        def on(rank: int, size=size, copy=copy) -> object:
            if size > 1:
                shard()
            end, theirs = tensors_of(train(state, dataset, 9, often, copy)), tensors_of(alone)
            return max(float((end[name].float() - theirs[name].float()).abs().max()) for name in theirs)

        ends.append(together(size, on))
    return {
        "told": told,
        "files": files,
        "ends": ends,
        "left": sorted(path.name for path in folder.with_name("on 2").rglob("state*")),
    }


def average_only(accumulation: int, adapter: AdapterSettings, **optimizer):
    """`plain` with a running average and no snapshots of others."""
    state, dataset = plain(accumulation, False, adapter, **optimizer)
    start = replace(state.start, ema=EMASettings("ramp"))
    return begin(Lab.Flow().module, start, state.settings), dataset


def failing(root: Path) -> dict:  # noqa: C901  (scenarios, each a function inside)
    """An error of one rank, wherever it is made: what each of three ranks ends with, and what the first
    one has kept.
    """
    state, dataset = plain(3, ema=False)
    state = replace(state, run="run")
    found = {}

    class Interrupted(BaseException):
        pass

    def stepping(rank: int, at: int, who: int, error: BaseException):
        def stepped(step, moved, validation):
            if rank == who and step == at:
                raise error

        return Callbacks(on_step=stepped)

    def attempt(name: str, act: Callable[[int, Path], object]) -> None:
        folder = root / name
        begun = time.monotonic()
        told = together(3, lambda rank: act(rank, folder))
        kept = [json.loads(path.read_bytes())["step"] for path in folder.rglob("state.json")]
        found[name] = {"told": told, "kept": kept, "seconds": time.monotonic() - begun}

    full = OSError(28, "No space left on device")
    attempt("after a step", lambda rank, to: train(state, dataset, 9, stepping(rank, 4, 1, full), to).step)
    attempt(
        "interrupted",
        lambda rank, to: train(state, dataset, 9, stepping(rank, 4, 2, Interrupted("asked to stop")), to).step,
    )
    attempt("after the last step", lambda rank, to: train(state, dataset, 9, stepping(rank, 9, 2, full), to).step)

    def in_backward(rank: int, folder: Path) -> object:
        denoiser = Lab.Flow()
        if rank == 1:
            denoise, calls = denoiser.denoise, []

            def short(*arguments):
                calls.append(1)
                if len(calls) == 5:
                    raise torch.OutOfMemoryError("out of memory: tried to allocate 8 GiB")
                return denoise(*arguments)

            denoiser.denoise = short
        return train(state, dataset, 9, None, folder, denoiser).step

    attempt("out of memory", in_backward)

    def not_a_number(rank: int, folder: Path) -> object:
        denoiser = Lab.Flow()
        denoiser.fail_at = 5 if rank == 1 else None
        return train(state, dataset, 9, None, folder, denoiser).step

    attempt("not a number", not_a_number)

    def cannot_open(rank: int, folder: Path) -> object:
        def opened():
            if rank == 2:
                raise FileNotFoundError("model.safetensors is missing")
            return nullcontext(Lab.Flow())

        return runs.run(state, 9, opened, dataset, store.Store(folder, "run")).state.step

    attempt("cannot open", cannot_open)

    def another(rank: int, folder: Path) -> object:
        return train(
            state if rank != 1 else replace(state, start=replace(state.start, seed=4)), dataset, 9, None, folder
        ).step

    attempt("another seed", another)

    def stopping(rank: int, folder: Path) -> object:
        asked = [rank == 1 and step == 4 for step in range(1, 10)]
        return train(state, dataset, 9, Callbacks(should_stop=lambda: asked.pop(0)), folder).step

    attempt("asked to stop", stopping)

    def killed(rank: int, folder: Path) -> object:
        process_group.current().patience = timedelta(seconds=20)
        gather, calls = gradient_sum.Bucket.launch, []

        def launch(self, group):
            calls.append(1)
            gather(self, group)
            if rank == 1 and len(calls) == 5:
                os.kill(os.getpid(), signal.SIGKILL)

        gradient_sum.Bucket.launch = launch
        return train(state, dataset, 9, None, folder).step

    attempt("killed in a collective", killed)
    return found


def killed(root: Path) -> dict:
    """One job of two ranks that is started again after each of 20 kills, ten of them inside a collective and ten at any
    moment.
    """
    draw, steps, progress, ends = random.Random(0), 250, [], []
    state, dataset = plain(2)
    alone = bytes_of(train(state, dataset, steps, WATCH))
    launch, often = gradient_sum.Bucket.launch, replace(WATCH, snapshot_every=2)

    class Slow(Lab.Flow):
        def denoise(self, *arguments):
            time.sleep(0.01)  # so that the run outlasts the kills on any machine
            return super().denoise(*arguments)

    def job(rank: int, inside: int | None) -> object:
        calls = []

        def launched(self, group):
            calls.append(1)
            launch(self, group)
            if len(calls) == inside:
                os.kill(os.getpid(), signal.SIGKILL)

        gradient_sum.Bucket.launch = launched
        return bytes_of(train(state, dataset, steps, often, root, Slow()))

    for number in draw.sample(range(20), 20):
        who, at, inside = draw.randrange(2), draw.uniform(0.0, 0.4), draw.randint(1, 12) if number % 2 else None
        kill = (who, at) if inside is None else None
        ends.append(together(2, lambda rank, w=who, i=inside: job(rank, i if rank == w else None), kill=kill))
        progress.append(max((json.loads(path.read_bytes())["step"] for path in root.rglob("state.json")), default=0))
    return {
        "ends": ends,
        "progress": progress,
        "steps": steps,
        "alone": alone,
        "last": together(2, lambda rank: job(rank, None)),
    }


if __name__ == "__main__":
    place = Path(sys.argv[1])
    # What is imported at first use is imported before the forks.
    train(*plain(1), 1, WATCH)
    for name in ("torch.distributed.fsdp", "torch.distributed.tensor"):
        importlib.import_module(name)
    print(
        json.dumps(
            {
                "equal": equal,
                "measured": measured,
                "failing": failing,
                "killed": killed,
                "sharded": sharded,
                "plain_fsdp": plain_fsdp,
            }[sys.argv[2]](place)
        )
    )
