"""What token routing (Apply TREAD) costs in quality: LoRAs of the demo's concept, trained with and without it, measured
without it.

python benchmarks/tread_quality.py [--steps 250] [--seeds 3] [--ratios 0.1,0.25,0.5] [--threads 1] [--json FILE]
                                   [--markdown FILE]

Each LoRA is trained on the demo's pictures as its workflow does, without TREAD and with each skip ratio, the same seeds
for all. The demo's model is a UNet: tokens skip the transformer blocks at its greatest width. Then TREAD is off for
everything: the loss on pictures of the concept that no run has seen, at noise and timesteps that are the same for all,
and how many of 32 sampled pictures the pixel rule calls right. Runs on the embedded host; the same seeds give the same
table on the same machine and torch.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import todo_quality
import torch

ALLOWED = 0.01  # how much higher a loss may be than without TREAD to be called as good


def with_tread(model: Any, ratio: float) -> Any:
    """The MODEL with TREAD, or itself at ratio 0."""
    from graft_nodes.host.token_routing import apply_routing
    from graft_nodes.patches.token_routing.settings import RoutingSettings

    return apply_routing(model, RoutingSettings.parse(ratio))[0]


def table(found: dict[float, list[dict[str, float]]]) -> list[str]:
    """The lines of a table with a row for each ratio."""
    of = len(todo_quality.NOISE_SEEDS) * 16
    seeds = len(found[0.0])
    plain = statistics.mean(one["held-out loss"] for one in found[0.0])
    lines = [
        f"| skip ratio | held-out loss of seeds 0 to {seeds - 1} | mean | | right of {of} |",
        "|---|---|---|---|---|",
    ]
    for ratio, runs in found.items():
        losses, right = ([one[key] for one in runs] for key in ("held-out loss", "right"))
        mean = statistics.mean(losses)
        name, more = ("off", "") if ratio == 0 else (f"{ratio:g}", f"{mean / plain - 1:+.1%}")
        listed, pictures = ", ".join(f"{loss:.4f}" for loss in losses), ", ".join(f"{value:g}" for value in right)
        lines.append(f"| {name} | {listed} | {mean:.4f} | {more} | {pictures} |")
    return lines


def largest(found: dict[float, list[dict[str, float]]]) -> float:
    """The largest ratio up to which each mean loss is at most ALLOWED above that without TREAD; 0 if none is."""
    means = {ratio: statistics.mean(one["held-out loss"] for one in runs) for ratio, runs in found.items()}
    best = 0.0
    for ratio in sorted(means):
        if means[ratio] > (1 + ALLOWED) * means[0.0]:
            return best
        best = ratio
    return best


def main() -> None:
    """Train, measure, print the table and the largest ratio that costs nothing to speak of."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", default=250, type=int)
    parser.add_argument("--seeds", default=3, type=int)
    parser.add_argument("--ratios", default="0.1,0.25,0.5", type=lambda text: [float(word) for word in text.split(",")])
    parser.add_argument("--threads", default=1, type=int)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    from graft_nodes import comfyui_api_stubs

    comfyui_api_stubs.install()
    demo, unseen = todo_quality.opened_demo()
    found: dict[float, list[dict[str, float]]] = {0.0: [], **{ratio: [] for ratio in options.ratios}}
    for seed in range(options.seeds):
        for ratio, runs in found.items():
            runs.append(todo_quality.trial(demo, with_tread(demo[0], ratio), options.steps, seed, unseen))
            said = ", ".join(f"{key} {value:.5g}" for key, value in runs[-1].items())
            print(f"{options.steps} steps, ratio {ratio:g}, seed {seed}: {said}", flush=True)
    text = "\n".join(table(found))
    print(text)
    print(f"the largest ratio within {ALLOWED:.0%} of the loss without TREAD: {largest(found):g}")
    if options.json:
        named = {f"{ratio:g}": runs for ratio, runs in found.items()}
        options.json.write_text(
            json.dumps({"steps": options.steps, "ratios": named}, indent=1) + "\n", encoding="utf-8"
        )
    if options.markdown:
        options.markdown.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
