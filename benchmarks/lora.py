"""What LoRA stacks cost on UNets in SD1.5's and SDXL's shape: apply, change one strength of four, remove, sample through bypass.

python benchmarks/lora.py [--models sd15,sdxl] [--counts 1,2,4,8] [--ranks 16,64] [--dtypes bf16,float32] [--rounds 3] [--threads 2]
                          [--clock wall|cpu] [--no-forward] [--json FILE] [--markdown FILE]

References, on the same model in the same run: the host's own way (add_patches, then load: unpatch, patch, load again when a strength
changes), PEFT's merge and unmerge of the same factors on linear layers of the same shapes, and a plain copy of the bytes that a stack
touches (the limit). COMFYUI_PATH names a real ComfyUI; otherwise the host is the embedded one, and `vs_core` is against its patches. LoRAs
are on every attention, feed-forward and projection weight. Each round measures every way once; the table shows medians. Before it measures,
it checks that both ways give the same weight. `--clock cpu` counts the processor seconds of this process, for a CPU that
others use as well (with --threads 1, or waiting threads count too).
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from todo import SHAPES, build, open_host
from torch import Tensor, nn

DTYPES = {"bf16": torch.bfloat16, "float32": torch.float32}
KINDS = ("attn1", "attn2", "ff.net", "proj_in", "proj_out")


def lora(model: nn.Module, rank: int, seed: int) -> dict[str, Tensor]:
    """A LoRA in ComfyUI's generic names on every attention, feed-forward and projection weight."""
    generator, state = torch.Generator().manual_seed(seed), {}
    for name, weight in model.named_parameters():
        if name.endswith(".weight") and weight.ndim > 1 and any(kind in name for kind in KINDS):
            base = name.removesuffix(".weight")
            state[f"{base}.lora_up.weight"] = torch.randn(weight.shape[0], rank, *(1,) * (weight.ndim - 2), generator=generator) * 0.01
            state[f"{base}.lora_down.weight"] = torch.randn(rank, *weight.shape[1:], generator=generator) * 0.01
            state[f"{base}.alpha"] = torch.tensor(float(rank))
    return {key: value.to(torch.float16) for key, value in state.items()}


CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
clock = CLOCKS["wall"]


def seconds(work: Callable[[], Any]) -> float:
    start = clock()
    work()
    return clock() - start


def load(patcher: Any) -> None:
    """As sampling does."""
    import comfy.model_management

    comfy.model_management.load_models_gpu([patcher], force_full_load=True)


class Bench:
    """One model and the LoRAs for it."""

    def __init__(self, name: str, dtype: torch.dtype, rank: int, count: int):
        from graft_nodes.host import lora as host

        self.host, self.base = host, build(name, torch.device("cpu"), dtype)
        self.states = [lora(self.base.model, rank, seed) for seed in range(count)]
        self.touched = [key.removesuffix(".alpha") + ".weight" for key in self.states[0] if key.endswith(".alpha")]

    def ours(self, strengths: Sequence[float], mode: str = "merge") -> Any:
        entries = [self.host.Entry(str(n), self.states[n], strength) for n, strength in enumerate(strengths)]
        return self.host.graft(self.base, None, entries, mode).model

    def core(self, strengths: Sequence[float]) -> Any:
        import comfy.sd

        patcher = self.base
        for state, strength in zip(self.states, strengths, strict=False):
            patcher, _ = comfy.sd.load_lora_for_models(patcher, None, state, strength, 0)
        return patcher

    def weight(self, name: str) -> Tensor:
        return self.base.model.get_parameter(name).detach().float().clone()

    def check(self, count: int) -> None:
        """Both ways give the same weights, and the base comes back."""
        some, strengths = self.touched[:: len(self.touched) // 4], [0.5] * count
        load(self.base)
        before = [self.weight(name) for name in some]
        found = []
        for patcher in (self.ours(strengths), self.core(strengths)):
            load(patcher)
            found.append([self.weight(name) for name in some])
            load(self.base)
        for name, ours, theirs, base in zip(some, *found, before, strict=True):
            assert not torch.equal(ours, base) and torch.allclose(ours, theirs, rtol=2**-7, atol=1e-5), name
            assert torch.equal(self.weight(name), base), name

    def round(self, count: int) -> dict[str, float]:
        """Seconds of everything once: first application, change of one strength, removal, by both ways, and a copy of the touched bytes."""
        strengths, out = [0.5] * count, {}
        changed = [*strengths[:-1], 0.25]
        for way in (self.ours, self.core):
            load(self.base)
            first, second = way(strengths), way(changed)
            name = way.__name__
            out[f"{name} apply"] = seconds(lambda first=first: load(first))
            out[f"{name} again"] = seconds(lambda first=first: load(first))
            out[f"{name} strength"] = seconds(lambda second=second: load(second))
            out[f"{name} remove"] = seconds(lambda: load(self.base))
        weights = [self.base.model.get_parameter(name).detach() for name in self.touched]
        copies = [torch.empty_like(weight) for weight in weights]
        for _ in range(2):  # the first touches the memory
            out["copy"] = seconds(lambda: [copy.copy_(weight) for copy, weight in zip(copies, weights, strict=True)])
        return out

    def peft(self, count: int) -> dict[str, float]:
        """Seconds of PEFT's merge and unmerge of as many adapters, on linear layers of the touched shapes."""
        try:
            import peft
        except ImportError:
            return {}
        weights = [self.base.model.get_parameter(name).detach() for name in self.touched]
        layers = nn.ModuleList(nn.Linear(w[0].numel(), w.shape[0], bias=False, dtype=w.dtype, device="meta") for w in weights)
        for layer, weight in zip(layers, weights, strict=True):
            layer.weight = nn.Parameter(weight.flatten(1).clone(), requires_grad=False)
        config = peft.LoraConfig(r=self.states[0][self.touched[0].replace(".weight", ".lora_down.weight")].shape[0], target_modules=r"\d+")
        for number in range(count):
            peft.inject_adapter_in_model(config, layers, adapter_name=f"a{number}")
        tuned = [layer for layer in layers if hasattr(layer, "merge")]
        names = [f"a{number}" for number in range(count)]
        merge = seconds(lambda: [layer.merge(adapter_names=names) for layer in tuned])
        return {"peft apply": merge, "peft remove": seconds(lambda: [layer.unmerge() for layer in tuned])}

    def forward(self, patcher: Any, context: int) -> float:
        """Seconds of one forward at 64x64 latents."""
        load(patcher)
        x, text = torch.zeros(1, 4, 64, 64), torch.zeros(1, 77, context)
        extra = {"y": torch.zeros(1, 2816)} if context == 2048 else {}
        options = {**patcher.model_options.get("transformer_options", {}), "sigmas": torch.ones(1)}
        with torch.inference_mode():
            return seconds(lambda: patcher.model.apply_model(x, torch.ones(1), c_crossattn=text, transformer_options=options, **extra))


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    counts = [int(count) for count in args.counts.split(",")]
    for name, dtype, rank in itertools.product(args.models.split(","), args.dtypes.split(","), map(int, args.ranks.split(","))):
        bench, label = Bench(name, DTYPES[dtype], rank, max(*counts, 4)), f"{name} {dtype} rank {rank}"
        bench.check(2)
        times: dict[int, dict[str, float]] = {}
        for count in counts:
            rounds = [bench.round(count) for _ in range(args.rounds)]
            times[count] = {key: statistics.median(one[key] for one in rounds) for key in rounds[0]} | bench.peft(count)
            rows += [{"name": f"{label}, {count} LoRAs: {key}", "value": value, "unit": "s", "ratio": value / times[count]["copy"]}
                     for key, value in times[count].items()]  # fmt: skip
            for row in rows[-len(times[count]) :]:
                print(f"{row['name']}: {row['value']:.3f} s, {row['ratio']:.2f} copies", flush=True)
        rows += headlines(label, times)
        if args.forward:
            rows += forwards(bench, name, label, args.rounds)
        del bench
    return rows


def headlines(label: str, times: dict[int, dict[str, float]]) -> list[dict[str, Any]]:
    """The claims: times of the host's way over ours, growth, and restoring over copying."""
    found = [(f"vs_core_{count}", times[count]["core apply"] / times[count]["ours apply"]) for count in times]
    if {1, 8} <= times.keys():
        found.append(("growth_1_to_8", times[8]["ours apply"] / times[1]["ours apply"]))
    if 4 in times:
        found.append(("strength_change_vs_core", times[4]["core strength"] / times[4]["ours strength"]))
        found.append(("restore_vs_copy", times[4]["ours remove"] / times[4]["copy"]))
    return [{"name": name, "value": value, "unit": "x", "ratio": value, "case": label} for name, value in found]


def forwards(bench: Bench, name: str, label: str, rounds: int) -> list[dict[str, Any]]:
    """Bypass of four LoRAs over a bare forward, and a merged stack sampled again over one."""
    context = SHAPES[name]["context_dim"]
    bypass, merged = bench.ours([0.5] * 4, "bypass"), bench.ours([0.5] * 4)
    seen: dict[str, list[float]] = {"bypass_overhead": [], "merged_overhead": []}
    bench.forward(bench.base, context)
    for _ in range(rounds):
        bare = bench.forward(bench.base, context)
        seen["bypass_overhead"].append(bench.forward(bypass, context) / bare)
        seen["merged_overhead"].append(bench.forward(merged, context) / bare)
    medians = {key: statistics.median(values) for key, values in seen.items()}
    return [{"name": key, "value": value - 1, "unit": "share", "ratio": value, "case": label} for key, value in medians.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for option, default in (("models", "sd15"), ("counts", "1,2,4,8"), ("ranks", "16"), ("dtypes", "bf16"), ("json", ""), ("markdown", "")):
        parser.add_argument(f"--{option}", default=default)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-forward", dest="forward", action="store_false")
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    args = parser.parse_args()
    globals()["clock"] = CLOCKS[args.clock]
    sys.argv = sys.argv[:1]
    torch.set_num_threads(args.threads)
    machine = platform.processor() or platform.machine()
    which = f"{open_host('pytorch', True)}, torch {torch.__version__}, {machine}, {args.threads} threads, {args.clock} clock"
    print(which)
    rows = measure(args)
    lines = [f"{which}", "", "| what | value | ratio |", "|---|---|---|"]
    lines += [f"| {row.get('case', '')} {row['name']} | {row['value']:.3f} {row['unit']} | {row['ratio']:.2f} |" for row in rows]
    print("\n".join(lines))
    for path, text in ((args.json, json.dumps(rows, indent=1)), (args.markdown, "\n".join(lines) + "\n")):
        if path:
            Path(path).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
