"""A run that is stopped and resumed ends with the bytes of one that was not, under deterministic algorithms."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from graft_nodes.ema.decay import EMASettings
from graft_nodes.training.run import call
from graft_nodes.training.run.loop import train
from graft_nodes.training.store.store import Store

from .case import CHECKED, Case, CutShort, Row, Setting, device_named, open_host, row
from .small_run import STEPS, begun, dataset, denoiser_on, digest, make_deterministic

RUNS: dict[str, dict[str, Any]] = {
    "LoRA, bf16": {"kind": "lora", "precision": "bf16"},
    "LoCon, float32, average on the device": {"kind": "locon", "average": EMASettings("ramp")},
    "LoRA, average in host memory": {"kind": "lora", "average": EMASettings("ramp", device="host")},
    "LoKr, gradient checkpointing": {"kind": "lokr", "checkpointing": True},
    "full weights, full-bf16": {"kind": "full", "precision": "full-bf16"},
}


def cases(setting: Setting) -> list[Case]:
    """Each kind of run within this process, and all of them again in another."""
    open_host(setting)
    make_deterministic(setting.device)
    within = [Case(f"{name}, in this process", partial(resumed, setting, name)) for name in RUNS]
    return [*within, Case("every run, in another process", partial(resumed_elsewhere, setting))]


def resumed(setting: Setting, name: str) -> Iterator[Row]:
    """Twice whole, and once in two calls."""
    data = dataset()
    with denoiser_on(setting.device) as denoiser:
        state = begun(denoiser, data, **RUNS[name])
        whole, again = (digest(train(state, denoiser, data, STEPS)) for _ in range(2))
        half = train(state, denoiser, data, STEPS // 2)
        parts = digest(train(half, denoiser, data, STEPS - STEPS // 2))
    assert whole == again, "the same steps gave other bytes the second time"
    assert whole == parts, "two calls of half the steps gave other bytes than one call"
    yield row("steps", STEPS, "", CHECKED, note="equal bytes: weights, optimizer, averages, losses")


def resumed_elsewhere(setting: Setting) -> Iterator[Row]:
    """Half of the steps here, the state through the disk, the rest in a process of its own."""
    data, wanted = dataset(), {}
    with tempfile.TemporaryDirectory() as folder:
        with denoiser_on(setting.device) as denoiser:
            for number, (name, options) in enumerate(RUNS.items()):
                state = begun(denoiser, data, **options)
                wanted[name] = digest(train(state, denoiser, data, STEPS))
                store = Store(Path(folder), f"run{number}")
                call.run(state, STEPS // 2, partial(nullcontext, denoiser), data, store)
        command = [sys.executable, "-m", "gpu_parts.resume", folder, str(setting.device), setting.comfyui]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=setting.left())
        except subprocess.TimeoutExpired as error:
            raise CutShort("the other process was not done when the part's time was over") from error
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    other = [name for name in RUNS if found[name] != [wanted[name], STEPS - STEPS // 2]]
    assert not other, f"other bytes, or trained from the start: {', '.join(other)}"
    yield row("runs", len(RUNS), "", CHECKED, note="equal bytes, resumed from the disk")


def resume(folder: str, device: str, comfyui: str) -> dict[str, list[Any]]:
    """{run: [digest, how many steps were trained now]} of runs whose first half is on the disk."""
    setting = Setting(device_named(device), False, comfyui, 0.0)
    open_host(setting)
    make_deterministic(setting.device)
    data, found = dataset(), {}
    with denoiser_on(setting.device) as denoiser:
        for number, (name, options) in enumerate(RUNS.items()):
            state, store = begun(denoiser, data, **options), Store(Path(folder), f"run{number}")
            outcome = call.run(state, STEPS, partial(nullcontext, denoiser), data, store)
            found[name] = [digest(outcome.state), outcome.trained]
    return found


if __name__ == "__main__":
    print(json.dumps(resume(*sys.argv[1:])))
