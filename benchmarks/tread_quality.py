"""What token routing (Apply TREAD) costs in quality: LoRAs of the demo's concept, trained with and without it, measured
without it.

python benchmarks/tread_quality.py [--steps 250] [--seeds 3] [--ratios 0.1,0.25,0.5,0.5@0.75] [--threads 1]
                                   [--json FILE] [--markdown FILE]

Each LoRA is trained on the demo's pictures as its workflow does, without TREAD and with each skip ratio, the same seeds
for all; 0.5@0.75 is ratio 0.5, disabled after three quarters of the run. The demo's model is a UNet: tokens skip the
transformer blocks at its greatest width. Then TREAD is off for everything: the loss on pictures of the concept that no
run has seen, at noise and timesteps that are the same for all, and how many of 32 sampled pictures the pixel rule calls
right. Runs on the embedded host; the same seeds give the same table on the same machine and torch. With a JSON file of
as many steps, what it holds is not trained again.
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
OFF = "0"
Found = dict[str, list[dict[str, float]]]  # {way: one measurement a seed}


def with_tread(model: Any, way: str) -> Any:
    """The MODEL with TREAD, "ratio" or "ratio@disable after", or itself at ratio 0."""
    from graft_nodes.host.token_routing import apply_routing
    from graft_nodes.patches.token_routing.settings import RoutingSettings

    ratio, _, after = way.partition("@")
    return apply_routing(model, RoutingSettings(float(ratio), disable_after=float(after or 0)))[0]


def mean_loss(runs: list[dict[str, float]]) -> float:
    """The mean held-out loss of runs."""
    return statistics.mean(run["held-out loss"] for run in runs)


def table(found: Found) -> list[str]:
    """The lines of a table with a row for each way."""
    lines = [
        f"| skip ratio | held-out loss of seeds 0 to {len(found[OFF]) - 1} | mean | against off | right of 32 |",
        "|---|---|---|---|---|",
    ]
    for way, runs in found.items():
        losses = ", ".join(f"{run['held-out loss']:.4f}" for run in runs)
        right = ", ".join(f"{run['right']:g}" for run in runs)
        name, more = "off", ""
        if way != OFF:
            name, more = way.replace("@", ", disabled after "), f"{mean_loss(runs) / mean_loss(found[OFF]) - 1:+.1%}"
        lines.append(f"| {name} | {losses} | {mean_loss(runs):.4f} | {more} | {right} |")
    return lines


def largest(found: Found) -> str:
    """The largest ratio for the whole run up to which each mean loss is at most ALLOWED above that without TREAD."""
    best = OFF
    for way in sorted((way for way in found if "@" not in way), key=float):
        if mean_loss(found[way]) > (1 + ALLOWED) * mean_loss(found[OFF]):
            return best
        best = way
    return best


def read(path: Path | None, steps: int) -> Found:
    """What a file holds of runs of so many steps."""
    if path is None or not path.exists():
        return {}
    held = json.loads(path.read_text(encoding="utf-8"))
    return held["ratios"] if held["steps"] == steps else {}


def main() -> None:
    """Train, measure, print the table and the largest ratio that costs nothing to speak of."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", default=250, type=int)
    parser.add_argument("--seeds", default=3, type=int)
    parser.add_argument("--ratios", default="0.1,0.25,0.5", type=lambda text: text.split(","))
    parser.add_argument("--threads", default=1, type=int)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    from graft_nodes.headless import embedded

    embedded.install()
    demo, unseen = todo_quality.opened_demo()
    held = read(options.json, options.steps)
    found: Found = {way: held.get(way, [])[: options.seeds] for way in (OFF, *options.ratios)}
    for seed in range(options.seeds):
        for way, runs in found.items():
            if len(runs) > seed:
                continue
            runs.append(todo_quality.trial(demo, with_tread(demo[0], way), options.steps, seed, unseen))
            said = ", ".join(f"{key} {value:.5g}" for key, value in runs[-1].items())
            print(f"{options.steps} steps, ratio {way}, seed {seed}: {said}", flush=True)
            if options.json:
                text = json.dumps({"steps": options.steps, "ratios": {**held, **found}}, indent=1)
                options.json.write_text(text + "\n", encoding="utf-8")
    text = "\n".join(table(found))
    print(text)
    print(f"the largest ratio within {ALLOWED:.0%} of the loss without TREAD: {largest(found)}")
    if options.markdown:
        options.markdown.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
