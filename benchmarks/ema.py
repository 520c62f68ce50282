"""What a weight average costs: an update of 413M float32 parameters beside other libraries and a plain copy; its share
of a training step.

python benchmarks/ema.py [--json FILE] [--parameters MILLIONS] [--rounds N] [--threads N] [--steps N]

Every update is checked against decay * shadow + (1 - decay) * weights before it is timed. Rounds go through all
contestants in turn and the least time of each counts, so that other work on the machine falls on all alike. Needs
diffusers and ema-pytorch (extra `test`), and leaves out one that is not installed.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from device_timer import Timer
from graft_nodes.ema.update import average_
from torch import Tensor, nn

DECAY = 0.999
WIDTH = 1280
BLOCK = (
    ((WIDTH, WIDTH),) * 4 + ((8 * WIDTH, WIDTH), (WIDTH, 4 * WIDTH)) + ((WIDTH,),) * 10
)  # a transformer block of SD's widest level


def shapes(count: int) -> list[tuple[int, ...]]:
    """Shapes of blocks, and of one matrix for the rest, that make about `count` parameters."""
    out: list[tuple[int, ...]] = []
    size = sum(torch.Size(shape).numel() for shape in BLOCK)
    while count >= size:
        out += BLOCK
        count -= size
    return [*out, (max(1, count // WIDTH), WIDTH)]


class Weights(nn.Module):
    """Parameters without a forward."""

    def __init__(self, sizes: list[tuple[int, ...]], seed: int, device: torch.device) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        row = torch.randn(1 << 20, generator=draw).to(device)
        self.all = nn.ParameterList([nn.Parameter(self._filled(size, row)) for size in sizes])

    @staticmethod
    def _filled(size: tuple[int, ...], row: Tensor) -> Tensor:
        count = torch.Size(size).numel()
        return row.repeat(count // row.numel() + 1)[:count].reshape(size).contiguous()


LIBRARIES = ("diffusers", "ema_pytorch")


def missing() -> list[str]:
    """Libraries to compare with that are not installed."""
    return [name for name in LIBRARIES if importlib.util.find_spec(name) is None]


def contestants(model: Weights, shadow: Weights) -> dict[str, Callable[[], None]]:
    """One update each, all of the same weights into the same shadow; of the libraries that are installed."""
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    live, kept = list(model.parameters()), [p.detach() for p in shadow.parameters()]
    names = (
        {name: p.detach() for name, p in model.named_parameters()},
        {name: p.detach() for name, p in shadow.named_parameters()},
    )

    averaged = AveragedModel(nn.Identity(), multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    averaged.module = shadow
    averaged.n_averaged.fill_(1)
    runs = {"Graft": lambda: average_(names[1], names[0], DECAY)}
    if "diffusers" not in missing():
        runs["diffusers, loop"] = diffusers_update(live, kept, False)
        runs["diffusers, foreach"] = diffusers_update(live, kept, True)
    if "ema_pytorch" not in missing():
        runs["ema-pytorch"] = ema_pytorch_update(model, shadow)
    runs["torch.optim.swa_utils"] = lambda: averaged.update_parameters(model)
    runs["plain foreach copy"] = lambda: torch._foreach_copy_(kept, [p.detach() for p in live])
    return runs


def diffusers_update(live: list[nn.Parameter], kept: list[Tensor], foreach: bool) -> Callable[[], None]:
    """diffusers' update of `kept`."""
    from diffusers.training_utils import EMAModel

    average = EMAModel([live[0]], decay=DECAY, min_decay=DECAY, foreach=foreach)
    average.shadow_params, average.optimization_step = kept, 10
    return lambda: average.step(live)


def ema_pytorch_update(model: Weights, shadow: Weights) -> Callable[[], None]:
    """ema-pytorch's update of `shadow`."""
    from ema_pytorch import EMA

    hare = EMA(
        model,
        ema_model=shadow,
        beta=DECAY,
        min_value=DECAY,
        update_every=1,
        update_after_step=-1,
        include_online_model=False,
    )
    hare.initted.data.copy_(torch.tensor(True))
    hare.step.data.fill_(10_000_000)
    return hare.update


@torch.no_grad()
def check(name: str, update: Callable[[], None], model: Weights, shadow: Weights) -> None:
    """One update from a known shadow; raises when the result is wrong."""
    for p in shadow.parameters():
        p.fill_(0.5)
    update()
    decay = 0.0 if "copy" in name else DECAY
    for number in {0, len(model.all) // 2, len(model.all) - 1}:
        first = model.all[number].flatten()[:64]
        expected = decay * torch.full_like(first, 0.5) + (1 - decay) * first
        torch.testing.assert_close(
            shadow.all[number].flatten()[:64], expected, rtol=1e-5, atol=1e-6, msg=lambda text: f"{name}: {text}"
        )


def extra_memory(update: Callable[[], None]) -> int | None:
    """Bytes that the process held more during an update than before it (Linux), the least of three."""
    status = Path("/proc/self/status")
    if not status.exists() or not os.access("/proc/self/clear_refs", os.W_OK):
        return None

    def kilobytes(field: str) -> int:
        return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith(field))

    found = []
    for _ in range(3):
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")
        before = kilobytes("VmRSS")
        update()
        found.append(max(0, kilobytes("VmHWM") - before) * 1024)
    return min(found)


def updates(count: int, rounds: int, device: torch.device) -> list[dict]:
    """Rows of the update's part."""
    sizes, timer = shapes(count), Timer(device)
    model, shadow = Weights(sizes, 1, device), Weights(sizes, 2, device)
    size = sum(p.numel() for p in model.parameters())
    runs = contestants(model, shadow)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for name, update in runs.items():
        check(name, update, model, shadow)
    for _ in range(rounds):
        for name, update in runs.items():
            times[name].append(timer.device_seconds(update))
    best = {name: min(of) for name, of in times.items()}
    graft, copy = best["Graft"], best["plain foreach copy"]
    rows = [{"name": f"update: {name}", "value": of, "unit": "s", "ratio": of / graft} for name, of in best.items()]
    for name in ("diffusers, foreach", "diffusers, loop"):
        if name in best:
            label = "vs_" + name.replace(", ", "_")
            rows.append({"name": label, "value": best[name], "unit": "s", "ratio": best[name] / graft})
    rows.append({"name": "vs_copy", "value": copy, "unit": "s", "ratio": graft / copy})
    for name in ("Graft", "diffusers, foreach"):
        more = None
        if name in runs and device.type == "cpu":
            more = extra_memory(runs[name])
        if more is not None:
            rows.append(
                {"name": f"extra memory: {name}", "value": more / 1e6, "unit": "MB", "ratio": more / (4 * size)}
            )
    return rows


def training(steps: int) -> list[dict]:
    """Rows of the demo's training step: LoRA rank 16 on every layer, batch 8, 32x32 latents, in the embedded host."""
    from graft_nodes.headless import embedded

    embedded.install()
    from graft_nodes import host
    from graft_nodes.demo import host_model
    from graft_nodes.ema.decay import EMASettings
    from graft_nodes.nodes.demo import BASE
    from graft_nodes.training.data.dataset import Dataset
    from graft_nodes.training.optimizers.settings import OptimizerSettings
    from graft_nodes.training.run.step import advance_
    from graft_nodes.training.run.workspace import Workspace
    from graft_nodes.training.state import Settings, Start, begin
    from graft_nodes.training.trainable.settings import AdapterSettings

    patcher, clip, _ = host_model.demo_model(str(BASE))
    with torch.inference_mode():
        conditionings = host.encoding.encode_captions(clip, ["a red circle left", ""])
    draw = torch.Generator().manual_seed(0)
    data = Dataset.from_latents(
        [torch.randn(3, 32, 32, generator=draw) for _ in range(16)], ["a red circle left"] * 16, conditionings
    )
    kinds = {
        "off": None,
        "every step": EMASettings("ramp"),
        "every 10 steps": EMASettings("ramp", interval=10),
        "host memory, every step": EMASettings("ramp", device="host"),
        "host memory, every 10 steps": EMASettings("ramp", interval=10, device="host"),
        "every step, with snapshots": EMASettings("ramp", snapshots=50),
    }
    spent: dict[str, list[float]] = {name: [] for name in kinds}
    averaging: dict[str, list[float]] = {name: [] for name in kinds}
    with host.denoiser.open_denoiser(patcher) as denoiser, torch.inference_mode(False):
        for name, ema in kinds.items():
            start = Start("demo", data.digest, AdapterSettings("locon", targets="all", rank=16), ema)
            settings = Settings(OptimizerSettings(batch_size=8, total_steps=1000))
            work = Workspace(begin(denoiser.module, start, settings), denoiser, data)
            for shadow in work.shadows:
                _timed(shadow, averaging[name])
            with work.install():
                for _ in range(steps):
                    begun = time.perf_counter()
                    advance_(work)
                    spent[name].append(time.perf_counter() - begun)
            work.close()
    off = statistics.median(spent["off"])
    rows = [
        {
            "name": f"step: average {name}",
            "value": statistics.median(of),
            "unit": "s",
            "ratio": statistics.median(of) / off,
        }
        for name, of in spent.items()
    ]
    for name, of in averaging.items():
        if of:  # by itself: the difference of two steps is smaller than how much steps differ
            ratio = sum(of) / sum(spent[name])
            rows.append(
                {"name": f"share of the step: average {name}", "value": sum(of) / steps, "unit": "s", "ratio": ratio}
            )
    share = next(row for row in rows if row["name"] == "share of the step: average every step")
    rows.append({"name": "step_overhead", "value": share["value"], "unit": "s", "ratio": share["ratio"]})
    return rows


def _timed(shadow: object, into: list[float]) -> None:
    update = shadow.update_  # type: ignore[attr-defined]

    def timed(*args: object) -> bool:
        begun = time.perf_counter()
        done = update(*args)
        into.append(time.perf_counter() - begun)
        return done

    shadow.update_ = timed  # type: ignore[attr-defined]


def table(rows: list[dict]) -> str:
    """Rows as Markdown."""
    lines = ["| | value | ratio |", "|---|---:|---:|"]
    lines += [f"| {row['name']} | {row['value']:.4g} {row['unit']} | {row['ratio']:.3g} |" for row in rows]
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    parser.add_argument("--parameters", type=float, default=413.0, help="millions")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = updates(int(options.parameters * 1e6), options.rounds, torch.device("cpu"))
    if options.steps:
        rows += training(options.steps)
    machine = f"{platform.machine()}, {os.cpu_count()} cores, {options.threads} threads, torch {torch.__version__}"
    print(f"{options.parameters:g}M float32 parameters; {machine}\n")
    print(table(rows))
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
