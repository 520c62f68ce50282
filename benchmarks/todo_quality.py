"""What token downsampling while training costs in quality: LoRAs of the demo's concept, trained with and without it,
measured without it.

python benchmarks/todo_quality.py [--steps 40,80] [--seeds 3] [--json FILE] [--markdown FILE]

Each LoRA is trained on the demo's pictures as its workflow does, with ToDo off, with factor 2, and with factors "4 4",
the same seeds for all. Then ToDo is off for everything: the loss on pictures of the concept that no run has seen, at
noise and timesteps that are the same for all, and how many of 32 sampled pictures the pixel rule calls right. Few
steps, so that the rule's score is not yet full and a difference would be seen. Runs on the embedded host; the same
seeds give the same table on the same machine and torch.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import concept
import torch

WAYS = {"off": "", "factor 2": "2", "factors 4 4": "4 4"}
NOISE_SEEDS = (0, 1)


def held_out_loss(model: Any, state: Any, pictures: Any) -> float:
    """Mean loss of pictures that the run has not seen, with the weights of a TrainState on a plain MODEL."""
    from graft_nodes import host
    from graft_nodes.training.run.validation import validate
    from graft_nodes.training.run.workspace import Workspace

    with torch.inference_mode(False), host.denoiser.open_denoiser(model) as denoiser:
        work = Workspace(state, denoiser, pictures)
        try:
            with work.install():
                held = validate(work)
        finally:
            work.close()
    assert held is not None
    return held.loss


def trial(demo: tuple[Any, Any, Any], patched: Any, steps: int, seed: int, unseen: Any) -> dict[str, float]:
    """Train one LoRA on a patched MODEL, and measure it on the plain one."""
    from graft_nodes import host
    from graft_nodes.demo import score
    from graft_nodes.training.run.loop import train

    model, clip, vae = demo
    began = time.perf_counter()
    begun, pictures = concept.begun(patched, clip, vae, steps, seed)
    with host.denoiser.open_denoiser(patched) as denoiser:
        state = train(begun, denoiser, pictures, steps)
    seconds = time.perf_counter() - began
    taught = concept.applied(model, state.lora_model())
    right = sum(score.concept_score(taught, clip, vae, noise) for noise in NOISE_SEEDS)
    return {
        "held-out loss": held_out_loss(model, state, unseen),
        "right": right,
        "training loss": statistics.mean(state.history.loss[-25:]),
        "seconds": seconds,
    }


def with_todo(model: Any, factors: str) -> Any:
    """The MODEL with ToDo while training."""
    from graft_nodes import host
    from graft_nodes.patches.token_downsampling.tokens import ToDoSettings

    if not factors:
        return model
    return host.token_downsampling.apply_todo(model, ToDoSettings(depth_factors=factors, phase="training"))[0]


def opened_demo() -> tuple[tuple[Any, Any, Any], Any]:
    """(the demo's MODEL, CLIP and VAE; pictures of its concept that no run sees)."""
    from dataclasses import replace

    from graft_nodes.demo import draw, host_model, score
    from graft_nodes.demo.encode_dataset import encode_dataset

    demo = host_model.demo_model(str(score.BASE))
    unseen = encode_dataset(demo[1], demo[2], draw.concept(seed=1))
    return demo, replace(unseen, held_out=unseen.images)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", default="40,80", type=lambda text: [int(word) for word in text.split(",")])
    parser.add_argument("--seeds", default=3, type=int)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    from graft_nodes.headless import embedded

    embedded.install()
    from graft_nodes.demo import score

    demo, unseen = opened_demo()
    rows: list[dict[str, Any]] = []
    of = len(score.CONCEPT) * len(NOISE_SEEDS)
    lines = [
        f"| steps | training with | held-out loss of seeds 0 to {options.seeds - 1} | mean | right of {of} | mean |",
        "|---|---|---|---|---|---|",
    ]
    for steps in options.steps:
        for way, factors in WAYS.items():
            found = []
            for seed in range(options.seeds):
                found.append(trial(demo, with_todo(demo[0], factors), steps, seed, unseen))
                said = ", ".join(f"{key} {value:.5g}" for key, value in found[-1].items())
                print(f"{steps} steps, {way}, seed {seed}: {said}", flush=True)
            losses, right = ([one[key] for one in found] for key in ("held-out loss", "right"))
            mean, count = statistics.mean(losses), statistics.mean(right)
            lines.append(
                f"| {steps} | {way} | {', '.join(f'{loss:.4f}' for loss in losses)} | {mean:.4f} | "
                f"{', '.join(f'{value:g}' for value in right)} | {count:.1f} |"
            )
            name = f"quality_{steps}_{way.replace(' ', '_')}"
            rows.append({"name": f"{name}_loss", "value": mean, "unit": "loss", "ratio": None})
            rows.append({"name": f"{name}_right", "value": count, "unit": f"of {of}", "ratio": count / of})
    text = "\n".join(lines)
    print(text)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    if options.markdown:
        options.markdown.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
