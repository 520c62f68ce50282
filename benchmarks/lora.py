"""What LoRA stacks cost on UNets in SD1.5's and SDXL's shape: apply, change one strength of four, remove, sample
through bypass.

python benchmarks/lora.py [--models sd15,sdxl] [--counts 1,2,4,8] [--ranks 16,64] [--dtypes bf16,float32] [--rounds 3]
[--threads 2]
                          [--change 0.01] [--clock wall|cpu] [--no-forward] [--no-libraries] [--no-checks] [--json FILE]
                            [--markdown FILE]

References, on the same model in the same run: the host's own way (add_patches, then load: unpatch, patch, load again
when a strength changes), PEFT's merge and unmerge of as many adapters on linear layers of the same shapes, diffusers'
fuse_lora of them, and a plain copy of the bytes that a stack touches (the limit). COMFYUI_PATH names a real ComfyUI;
otherwise the host is the embedded one, and `vs_core` is against its patches. LoRAs are on every attention, feed-forward
and projection weight, in float16, made as trainers make them: `down` as it is drawn at the start of training, `up` such
that each LoRA at strength 1 changes a weight by about 1 % (--change) of its norm. Each round measures every way once;
the table shows medians. "first" is an application into memory that the system has yet to give, "apply" one into memory
that an earlier stack used. Before it measures, it checks that both ways give the same weight and compares their error
against float64 (error_vs_core), and it counts the bytes of the tensors that a stack adds to the base
(memory_over_touched). `--clock cpu` counts the processor seconds of this process, for a CPU that others use as well
(with --threads 1, or waiting threads count too). The files are written after each case; a case that does not fit into
memory is skipped, and said.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import statistics
import sys
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from device_timer import Timer
from todo import SHAPES, WEIGHTS, build, free_bytes, open_host
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

DTYPES = {"bf16": torch.bfloat16, "float32": torch.float32}
KINDS = ("attn1", "attn2", "ff.net", "proj_in", "proj_out")
COPIES = 3.2  # of the weights: the model, the touched ones as both ways keep them, and a copy of them


def lora(model: nn.Module, rank: int, seed: int, change: float = 0.01) -> dict[str, Tensor]:
    """A LoRA in ComfyUI's generic names on every attention, feed-forward and projection weight."""
    generator, state = torch.Generator().manual_seed(seed), {}
    for name, weight in model.named_parameters():
        if name.endswith(".weight") and weight.ndim > 1 and any(kind in name for kind in KINDS):
            base = name.removesuffix(".weight")
            columns = weight[0].numel()
            down = torch.randn(rank, *weight.shape[1:], generator=generator) * (3 * columns) ** -0.5
            up = torch.randn(weight.shape[0], rank, *(1,) * (weight.ndim - 2), generator=generator)
            size = (
                float(weight.detach().float().square().mean().sqrt()) * (3 * columns / rank) ** 0.5
            )  # of up, for a change of 1
            state[f"{base}.lora_up.weight"], state[f"{base}.lora_down.weight"] = up * (change * size), down
            state[f"{base}.alpha"] = torch.tensor(float(rank))
    return {key: value.to(torch.float16) for key, value in state.items()}


CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
# (relative, absolute) of a merged weight against float64: a rounding to the nearest, in fp8 to one of both neighbors.
TOLERANCES = {
    torch.float8_e4m3fn: (2**-3, 2**-9),
    torch.bfloat16: (2**-7, 1e-5),
    torch.float16: (2**-10, 1e-5),
    torch.float32: (2**-20, 1e-6),
}


def load(patcher: Any) -> None:
    """As sampling does."""
    import comfy.model_management

    comfy.model_management.load_models_gpu([patcher], force_full_load=True)


class Peak(TorchDispatchMode):
    """`highest`: the most bytes of storages that were made inside and alive at once; `before` are tensors that were
    there already.
    """

    def __init__(self, before: Iterable[Tensor]):
        super().__init__()
        self.known = {tensor.untyped_storage()._cdata: 0 for tensor in before}
        self.alive = self.highest = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            storage = tensor.untyped_storage() if isinstance(tensor, Tensor) else None
            if storage is not None and storage._cdata not in self.known:
                self.known[storage._cdata] = storage.nbytes()
                self.alive += storage.nbytes()
                weakref.finalize(storage, self.freed, storage._cdata)
        self.highest = max(self.highest, self.alive)
        return result

    def freed(self, key: int) -> None:
        self.alive -= self.known.pop(key)


class Bench:
    """One model and the LoRAs for it."""

    def __init__(
        self, name: str, dtype: torch.dtype, rank: int, count: int, change: float, timer: Timer, compute: Any = None
    ):
        from graft_nodes.host import lora_stacks as host

        self.host, self.base, self.rank = host, build(name, timer.device, dtype, compute), rank
        self.seconds, self.device, self.side = timer.seconds, timer.device, 64
        self.states = [lora(self.base.model, rank, seed, change) for seed in range(count)]
        self.touched = [key.removesuffix(".alpha") + ".weight" for key in self.states[0] if key.endswith(".alpha")]

    def ours(self, strengths: Sequence[float], mode: str = "merge") -> Any:
        from graft_nodes.patches.lora_files.entry import LoraEntry

        entries = [LoraEntry(str(n), self.states[n], strength) for n, strength in enumerate(strengths)]
        return self.host.apply_lora_stack(self.base, None, entries, mode).model

    def core(self, strengths: Sequence[float]) -> Any:
        import comfy.sd

        patcher = self.base
        for state, strength in zip(self.states, strengths, strict=False):
            patcher, _ = comfy.sd.load_lora_for_models(patcher, None, state, strength, 0)
        return patcher

    def weight(self, name: str) -> Tensor:
        return self.base.model.get_parameter(name).detach().float().clone()

    def check(self, count: int) -> float:
        """Both ways give the same weights, and the base comes back; our mean error against float64 over the host's."""
        some, strengths = self.some(), [0.5] * count
        load(self.base)
        before = [self.weight(name) for name in some]
        found = []
        for patcher in (self.ours(strengths), self.core(strengths)):
            load(patcher)
            found.append([self.weight(name) for name in some])
            load(self.base)
        for name, ours, theirs, base in zip(some, *found, before, strict=True):
            assert not torch.equal(ours, base) and torch.allclose(ours, theirs, rtol=2**-6, atol=1e-5), name
            assert torch.equal(self.weight(name), base), name
        errors = [0.0, 0.0]
        for name, ours, theirs, base in zip(some, *found, before, strict=True):
            exact = self.exact(name, base, count)
            errors = [
                sum_ + float((one.double() - exact).abs().sum())
                for sum_, one in zip(errors, (ours, theirs), strict=True)
            ]
        return errors[0] / errors[1]

    def some(self) -> list[str]:
        """About a dozen of the touched weights."""
        return self.touched[:: max(1, len(self.touched) // 12)]

    def exact(self, name: str, base: Tensor, count: int) -> Tensor:
        """A weight with so many LoRAs at strength 0.5, in float64."""
        plain, exact = name.removesuffix(".weight"), base.double()
        for state in self.states[:count]:
            pair = [state[f"{plain}.lora_{side}.weight"].to(base.device).double().flatten(1) for side in ("up", "down")]
            exact += 0.5 * (pair[0] @ pair[1]).view(exact.shape)
        return exact

    def check_exact(self, count: int) -> None:
        """A merged stack gives the weights of float64, rounded, and the base comes back byte for byte."""
        load(self.base)
        kept = {name: self.base.model.get_parameter(name).detach().clone() for name in self.some()}
        patcher = self.ours([0.5] * count)  # a patcher that nobody holds takes its stack along
        load(patcher)
        for name, base in kept.items():
            merged = self.base.model.get_parameter(name).detach()
            relative, absolute = TOLERANCES[merged.dtype]
            exact = self.exact(name, base.float(), count)
            far = (merged.double() - exact).abs() - (absolute + relative * exact.abs())
            assert float(far.max()) <= 0, f"{name}: up to {float(far.max()):.1e} beyond what rounding allows"
            assert not torch.equal(merged.float(), base.float()), f"{name}: the stack changed nothing"
        load(self.base)
        for name, base in kept.items():
            assert torch.equal(self.base.model.get_parameter(name).float(), base.float()), (
                f"{name}: another base came back"
            )

    def round(self, count: int, ways: Sequence[str] = ("ours", "core")) -> dict[str, float]:
        """Seconds of everything once: first application, change of one strength, removal, by both ways, and a copy of
        the touched bytes.
        """
        strengths, out = [0.5] * count, {}
        changed = [*strengths[:-1], 0.25]
        out["ours first"] = self.first(strengths)
        for name in ways:
            load(self.base)
            way = getattr(self, name)
            first, second = way(strengths), way(changed)
            out[f"{name} apply"] = self.seconds(lambda first=first: load(first))
            out[f"{name} again"] = self.seconds(lambda first=first: load(first))
            out[f"{name} strength"] = self.seconds(lambda second=second: load(second))
            out[f"{name} remove"] = self.seconds(lambda: load(self.base))
        weights = [self.base.model.get_parameter(name).detach() for name in self.touched]
        copies = [torch.empty_like(weight) for weight in weights]
        for _ in range(2):  # the first touches the memory
            out["copy"] = self.seconds(
                lambda: [copy.copy_(weight) for copy, weight in zip(copies, weights, strict=True)]
            )
        return out

    def first(self, strengths: Sequence[float]) -> float:
        """Seconds of an application into fresh memory."""
        from graft_nodes.patches.patching import stack_ledger

        load(self.base)
        stack_ledger.forget(self.base.model)
        patched = self.ours(strengths)
        return self.seconds(lambda: load(patched))

    def memory(self, count: int) -> float:
        """Bytes that are alive at the worst moment of two applications after one another, over those of the touched
        weights.
        """
        from graft_nodes.patches.patching import stack_ledger

        load(self.base)
        stack_ledger.forget(self.base.model)
        stacks = [self.ours([strength] * count) for strength in (0.5, 0.25)]
        files = (tensor for state in self.states for tensor in state.values())
        with Peak([*self.base.model.state_dict().values(), *files]) as peak:
            for patcher in stacks:
                load(patcher)
        load(self.base)
        return peak.highest / sum(self.base.model.get_parameter(name).nbytes for name in self.touched)

    def diffusers(self, count: int) -> dict[str, float]:
        """Seconds of diffusers' fuse_lora and unfuse_lora of as many adapters, on linear layers of
        the touched shapes.
        """
        try:
            import peft
            from diffusers.loaders.peft import PeftAdapterMixin
        except ImportError:
            return {}

        class Model(PeftAdapterMixin, nn.Module):
            pass

        model = Model()
        model.layers = self._layers()
        config = peft.LoraConfig(r=self.rank, target_modules=r"layers\.\d+", init_lora_weights=False)
        names = [f"a{number}" for number in range(count)]
        for name in names:
            model.add_adapter(config, adapter_name=name)
        fuse = self.seconds(lambda: model.fuse_lora(lora_scale=0.5, adapter_names=names))
        return {"diffusers apply": fuse, "diffusers remove": self.seconds(model.unfuse_lora)}

    def _layers(self) -> nn.ModuleList:
        weights = [self.base.model.get_parameter(name).detach() for name in self.touched]
        layers = nn.ModuleList(
            nn.Linear(w[0].numel(), w.shape[0], bias=False, dtype=w.dtype, device="meta") for w in weights
        )
        for layer, weight in zip(layers, weights, strict=True):
            layer.weight = nn.Parameter(weight.flatten(1).clone(), requires_grad=False)
        return layers

    def peft(self, count: int) -> dict[str, float]:
        """Seconds of PEFT's merge and unmerge of as many adapters, on linear layers of the touched shapes."""
        try:
            import peft
        except ImportError:
            return {}
        layers = self._layers()
        config = peft.LoraConfig(r=self.rank, target_modules=r"\d+", init_lora_weights=False)
        for number in range(count):
            peft.inject_adapter_in_model(config, layers, adapter_name=f"a{number}")
        tuned = [layer for layer in layers if hasattr(layer, "merge")]
        names = [f"a{number}" for number in range(count)]
        merge = self.seconds(lambda: [layer.merge(adapter_names=names) for layer in tuned])
        return {"peft apply": merge, "peft remove": self.seconds(lambda: [layer.unmerge() for layer in tuned])}

    def forward(self, patcher: Any, context: int) -> float:
        """Seconds of one forward at latents of 64x64, or another side."""
        load(patcher)
        x, text, sigma = (
            torch.zeros(*size, device=self.device) for size in ((1, 4, self.side, self.side), (1, 77, context), (1,))
        )
        sigma += 1
        extra = {"y": torch.zeros(1, 2816, device=self.device)} if context == 2048 else {}
        options = {**patcher.model_options.get("transformer_options", {}), "sigmas": sigma}
        with torch.inference_mode():
            return self.seconds(
                lambda: patcher.model.apply_model(x, sigma, c_crossattn=text, transformer_options=options, **extra)
            )


def measure(args: argparse.Namespace) -> Iterator[list[dict[str, Any]]]:
    """The rows of one case after the other."""
    counts = [int(count) for count in args.counts.split(",")]
    timer = Timer(torch.device("cpu"), CLOCKS[args.clock])
    for name, dtype, rank in itertools.product(
        args.models.split(","), args.dtypes.split(","), map(int, args.ranks.split(","))
    ):
        label, need = f"{name} {dtype} rank {rank}", COPIES * WEIGHTS[name] * DTYPES[dtype].itemsize / 4
        free = free_bytes(torch.device("cpu"))
        if need > free:
            print(f"{label}: skipped, it needs about {need / 1e9:.0f} GB and {free / 1e9:.0f} are free", flush=True)
            continue
        bench, rows = Bench(name, DTYPES[dtype], rank, max(*counts, 4), args.change, timer), list[dict[str, Any]]()
        if args.checks:
            rows += checks(bench, label, sorted({1, max(counts)}))
        times: dict[int, dict[str, float]] = {}
        for count in counts:
            rounds = [bench.round(count) for _ in range(args.rounds)]
            times[count] = {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}
            times[count] |= bench.peft(count) | bench.diffusers(count) if args.libraries else {}
            rows += [
                {
                    "name": f"{label}, {count} LoRAs: {key}",
                    "value": value,
                    "unit": "s",
                    "ratio": value / times[count]["copy"],
                }
                for key, value in times[count].items()
            ]
            for row in rows[-len(times[count]) :]:
                print(f"{row['name']}: {row['value']:.3f} s, {row['ratio']:.2f} copies", flush=True)
        rows += headlines(label, times)
        if args.forward:
            rows += forwards(bench, name, label, args.rounds)
        del bench
        yield rows


def checks(bench: Bench, label: str, counts: Sequence[int]) -> list[dict[str, Any]]:
    """Our error over the host's, and the memory that stacks take over that of the weights they touch."""
    found = {f"error_vs_core_{count}": bench.check(count) for count in counts} | {
        "memory_over_touched": bench.memory(counts[-1])
    }
    return [{"name": name, "value": value, "unit": "x", "ratio": value, "case": label} for name, value in found.items()]


def headlines(label: str, times: dict[int, dict[str, float]]) -> list[dict[str, Any]]:
    """The claims: times of the host's way over ours, growth, and restoring over copying."""
    found = [(f"vs_core_{count}", times[count]["core apply"] / times[count]["ours apply"]) for count in times]
    if {1, 8} <= times.keys():
        found.append(("growth_1_to_8", times[8]["ours apply"] / times[1]["ours apply"]))
    if 4 in times:
        found.append(("strength_change_vs_core", times[4]["core strength"] / times[4]["ours strength"]))
        found.append(("restore_vs_copy", times[4]["ours remove"] / times[4]["copy"]))
    return [{"name": name, "value": value, "unit": "x", "ratio": value, "case": label} for name, value in found]


def core_bypass(bench: Bench, count: int, states: Sequence[dict[str, Tensor]]) -> Any:
    """The host's own bypass loader, once a LoRA; None where it has none.

    Each of its calls replaces what the one before injected, and wrappers do not come off in the order they went on:
    hence one injection.
    """
    import comfy.sd

    if not hasattr(comfy.sd, "load_bypass_lora_for_models"):
        return None
    from comfy.patcher_extension import PatcherInjection

    loaded = [comfy.sd.load_bypass_lora_for_models(bench.base, None, state, 0.5, 0)[0] for state in states[:count]]
    injections = [injection for patcher in loaded for of in patcher.injections.values() for injection in of]
    patcher = bench.base.clone()
    patcher.set_injections(
        "bypass_lora",
        [
            PatcherInjection(
                inject=lambda owner: [injection.inject(owner) for injection in injections],
                eject=lambda owner: [injection.eject(owner) for injection in reversed(injections)],
            )
        ],
    )
    return patcher


def forwards(bench: Bench, name: str, label: str, rounds: int) -> list[dict[str, Any]]:
    """What bypass costs over a bare forward, for four LoRAs of this rank and eight of rank 8, and a merged stack
    sampled again.
    """
    from graft_nodes.patches.lora_files.entry import LoraEntry

    context = SHAPES[name]["context_dim"]
    narrow = [lora(bench.base.model, 8, 100 + seed) for seed in range(8)]
    entries = [LoraEntry(str(n), state, 0.5) for n, state in enumerate(narrow)]
    ways = {
        "bypass_overhead": bench.ours([0.5] * 4, "bypass"),
        "bypass_overhead_core": core_bypass(bench, 4, bench.states),
        "bypass_overhead_8_of_rank_8": bench.host.apply_lora_stack(bench.base, None, entries, "bypass").model,
        "bypass_overhead_core_8_of_rank_8": core_bypass(bench, 8, narrow),
        "merged_overhead": bench.ours([0.5] * 4),
    }
    ways = {key: patcher for key, patcher in ways.items() if patcher is not None}
    seen: dict[str, list[float]] = {key: [] for key in ways}
    bench.forward(bench.base, context)
    for _ in range(rounds):
        for (
            key,
            patcher,
        ) in ways.items():  # a bare forward before each and after it: what else the machine does moves both
            before = bench.forward(bench.base, context)
            taken = bench.forward(patcher, context)
            seen[key].append(2 * taken / (before + bench.forward(bench.base, context)))
    medians = {key: statistics.median(values) for key, values in seen.items()}
    found = [
        {"name": key, "value": value - 1, "unit": "share", "ratio": value, "case": label}
        for key, value in medians.items()
    ]
    for key in ("bypass_overhead", "bypass_overhead_8_of_rank_8"):
        if (core := key.replace("overhead", "overhead_core")) in medians:
            share = (medians[key] - 1) / (medians[core] - 1)
            found.append(
                {"name": key.replace("overhead", "vs_core"), "value": share, "unit": "x", "ratio": share, "case": label}
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for option, default in (
        ("models", "sd15"),
        ("counts", "1,2,4,8"),
        ("ranks", "16"),
        ("dtypes", "bf16"),
        ("json", ""),
        ("markdown", ""),
    ):
        parser.add_argument(f"--{option}", default=default)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--change", type=float, default=0.01)
    parser.add_argument("--no-forward", dest="forward", action="store_false")
    parser.add_argument("--no-libraries", dest="libraries", action="store_false")
    parser.add_argument("--no-checks", dest="checks", action="store_false")
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    args = parser.parse_args()
    sys.argv = sys.argv[:1]
    torch.set_num_threads(args.threads)
    machine = platform.processor() or platform.machine()
    which = (
        f"{open_host('pytorch', True)}, torch {torch.__version__}, {machine}, {args.threads} threads, {args.clock}"
        " clock"
    )
    print(which)
    rows: list[dict[str, Any]] = []
    lines = [f"{which}", "", "| what | value | ratio |", "|---|---|---|"]
    for found in measure(args):
        rows += found
        lines += [
            f"| {row.get('case', '')} {row['name']} | {row['value']:.3f} {row['unit']} | {row['ratio']:.2f} |"
            for row in found
        ]
        for path, text in ((args.json, json.dumps(rows, indent=1)), (args.markdown, "\n".join(lines) + "\n")):
            if path:
                Path(path).write_text(text, encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
