"""Every request to the disk fails once, one run each, and once from there on: `python -m
graft_nodes.tests.faults.tried` prints a table.

A fault is survived when the error names the cause, a path and the next step, what was stored before is readable, no
file with its final name is damaged, the weights are untouched, and the same call again ends in the very files that an
undisturbed one ends in.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from graft_nodes.ema.decay import EMASettings
from graft_nodes.storage.atomic import write_whole
from graft_nodes.storage.disk_errors import NEXT_STEPS
from graft_nodes.storage.safetensors import load_safetensors, safetensors_bytes
from graft_nodes.tests.faults.disk import Disk, fails
from graft_nodes.tests.training.conftest import Lab
from graft_nodes.training.data.cache import Cache
from graft_nodes.training.run import call
from graft_nodes.training.run.loop import Callbacks, train
from graft_nodes.training.state import TrainState, advance_position, begin, equal, state_key
from graft_nodes.training.store import saved_states, store
from graft_nodes.training.trainable.settings import AdapterSettings
from torch import nn

STEPS = 4
FAULTS = ((errno.EIO, False), (errno.ENOSPC, False), (errno.ENOSPC, True))  # (errno, whether the disk stays so)


@dataclass
class Tally:
    """How many faults were tried, after how many all was as promised, and the steps that had to be trained again."""

    tried: int = 0
    survived: int = 0
    lost: list[int] = field(default_factory=list)

    def row(self, name: str) -> str:
        """A line of the table."""
        lost = f"{sum(self.lost)} (at most {max(self.lost)} of one fault)" if self.lost else "-"
        return f"| {name} | {self.tried} | {self.survived} | {lost} |"


def hash_of(module: nn.Module) -> str:
    """sha256 over every parameter and buffer."""
    hashed = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        hashed.update(name.encode() + tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder; of a state.json what does not depend on the time it took."""
    out = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        body = path.read_bytes()
        if path.name == "state.json":
            record = json.loads(body)
            body = json.dumps(
                {key: value for key, value in record.items() if key not in ("effort", "sha256")}, sort_keys=True
            ).encode()
        out[path.relative_to(folder).as_posix()] = body
    return out


def each(
    folder: Path, prepare: Callable[[], object], act: Callable[[], Any], check: Callable[[OSError | None], None]
) -> Tally:
    """Call `act` once undisturbed, then once for each of its requests and each fault; `check` raises AssertionError
    where a promise breaks.

    `prepare` fills the empty folder before each call; a call that hears of no error must have survived without.
    """

    def fresh() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        prepare()

    fresh()
    with Disk(folder).installed() as disk:
        act()
    expected, requests, tally = contents(folder), disk.asked, Tally()
    for number, lasting in FAULTS:
        for at, request in enumerate(requests, 1):
            fresh()
            heard: OSError | None = None
            tally.tried += 1
            try:
                with Disk(folder, at, fails(number), lasting).installed():
                    act()
            except OSError as error:
                heard = error
            where = f"{os.strerror(number)} at {request}"
            if heard is not None:
                assert heard.errno == number, f"{where}: {heard!r} is another error"
                assert NEXT_STEPS[number] in str(heard), f"{where}: {heard!r} does not say what to do"
                assert heard.filename and str(heard.filename).startswith(str(folder)), (
                    f"{where}: {heard!r} names no path"
                )
            check(heard)
            act()
            found = contents(folder)
            differing = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
            assert not differing, f"{where}: not the same after another call: {differing}"
            tally.survived += 1
    return tally


class Run:
    """A tiny run with held-out loss, snapshots of averages, blocks of history and a schedule; it counts the steps that
    it makes.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.denoiser, self.dataset = folder, Lab.Flow(), Lab.pictures(held_out=[9])
        adapter = AdapterSettings(targets="all", rank=1, pattern="blocks.0.ff")
        plain = Lab.state(self.denoiser, self.dataset, adapter, ema=False, optimizer="sgd")
        ema = EMASettings("ramp", snapshots=4, widths=(0.1, 0.2))
        self.start = begin(
            self.denoiser.module, type(plain.start)("model", self.dataset.digest, adapter, ema, 3), plain.settings
        )
        self.base, self.step, self.lost = hash_of(self.denoiser.module), 0, list[int]()
        self.other = begin(
            self.denoiser.module, type(plain.start)("model", self.dataset.digest, adapter, ema, 4), plain.settings
        )
        self.older = train(self.other, self.denoiser, self.dataset, 1)

    @property
    def start_key(self) -> str:
        """The folder of the run's result."""
        return state_key(self.start.start.digest, advance_position((), self.start.settings.digest, STEPS))[:32]

    def prepare(self) -> None:
        """An older result of the same run's folder."""
        self.step = 0
        store.Store(self.folder, "run").save(self.older)

    def act(self) -> None:
        """The run, from wherever the store stands."""

        def stepped(step: int, *_: Any) -> None:
            self.step = step

        before, self.step = self.step, 0
        callbacks = Callbacks(validate_every=2, snapshot_every=3, on_step=stepped)
        kept = store.Store(self.folder, "run")
        outcome = call.run(self.start, STEPS, lambda: nullcontext(self.denoiser), self.dataset, kept, callbacks, "best")
        if before:
            self.lost.append(outcome.trained - (STEPS - before))
        self.step = STEPS

    def check(self, heard: OSError | None) -> None:
        """What has its final name is whole, the older result is there, and the base is what it was."""
        assert hash_of(self.denoiser.module) == self.base
        for path in self.folder.rglob("*"):
            if path.name == "state.json" and path.parent.name != self.older.key[:32]:
                store.load(path.parent, self.start)
            elif path.suffix == ".safetensors":
                load_safetensors(str(path))
            elif path.suffix == ".json":
                json.loads(path.read_bytes())
        again, _ = store.load(self.folder / "run" / self.older.key[:32], self.other)
        assert equal(again, self.older)


def of_the_store(folder: Path) -> Tally:
    """A run into a store."""
    run, block = Run(folder), store.BLOCK
    store.BLOCK = 3
    try:
        tally = each(folder, run.prepare, run.act, run.check)
    finally:
        store.BLOCK = block
    return Tally(tally.tried, tally.survived, run.lost)


def of_saved_states(folder: Path) -> Tally:
    """A state saved in shards under a name that another state has."""
    run = Run(folder)
    newer = train(run.start, run.denoiser, run.dataset, 2)

    def check(heard: OSError | None) -> None:
        dataset = run.dataset.digest
        there: TrainState = saved_states.load(folder, "mine", "model", dataset)
        assert equal(there, run.older) or equal(there, newer)
        assert heard is not None or equal(there, newer)

    return each(
        folder,
        lambda: saved_states.save(run.older, folder, "mine", 60),
        lambda: saved_states.save(newer, folder, "mine", 60),
        check,
    )


def of_lora_files(folder: Path) -> Tally:
    """A LoRA file in place of another, as GraftSaveLoRA writes it."""
    path, older, newer = folder / "lora.safetensors", {"a": torch.zeros(4)}, {"a": torch.ones(8)}

    def check(heard: OSError | None) -> None:
        there = load_safetensors(str(path))[0]["a"]
        assert torch.equal(there, older["a"] if heard is not None else newer["a"])

    return each(
        folder,
        lambda: write_whole(str(path), safetensors_bytes(older, {})),
        lambda: write_whole(str(path), safetensors_bytes(newer, {})),
        check,
    )


def of_the_cache(folder: Path) -> Tally:
    """Latents kept by the dataset's cache: what cannot be kept is said, and made again."""
    tensors, said = {"latent": torch.arange(12.0)}, list[str]()

    def act() -> None:
        cache = Cache(folder / "cache")
        if cache.read("latents", "ab12") is None:
            cache.write("latents", "ab12", tensors, {"a": 1})
        if cache.read("latents", "cd34") is None:
            cache.write_together("latents", {"cd34": (tensors, None), "ef56": (tensors, {"a": 1})})
        cache.report()
        said[:] = cache.notes

    def check(heard: OSError | None) -> None:
        assert heard is None
        for key in ("ab12", "cd34", "ef56"):
            found = Cache(folder / "cache").read("latents", key)
            assert said or found is not None
            assert found is None or torch.equal(found[0]["latent"], tensors["latent"])
        assert not said or "cannot be written" in said[0]

    return each(folder, lambda: None, act, check)


ALL = {
    "a run into the store": of_the_store,
    "Save State over another": of_saved_states,
    "a LoRA file over another": of_lora_files,
    "the dataset's cache": of_the_cache,
}

if __name__ == "__main__":
    import tempfile

    torch.set_num_threads(1)
    print("| disk faults in | tried | survived | steps trained again |\n|---|---|---|---|")
    for name, of in ALL.items():
        with tempfile.TemporaryDirectory() as place:
            print(of(Path(place) / "place").row(name), flush=True)
