"""Teaches the base model the concept as a LoRA and counts by the pixel rule what it draws before and after: the demo without the graph.

    python -m graft_nodes.demo.learn [--steps 250] [--seed 0] [--file demo/base.safetensors] [--grid PICTURE.png]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from . import draw, score

BATCH, REGULAR = 8, 2


def learn(model: Any, clip: Any, vae: Any, steps: int = 250, seed: int = 0) -> Any:
    """The TrainState after `steps` steps on the concept, two of each eight pictures regular ones; `model` may carry a ToDo plan."""
    from .. import host
    from ..ema.schedule import EMASettings
    from ..training.adapters import AdapterSettings
    from ..training.loop import train
    from ..training.objective import ObjectiveSettings
    from ..training.optimizer import OptimizerSettings
    from ..training.state import Settings, Start, begin
    from .pictures import encoded

    regular = encoded(clip, vae, draw.regular())
    pictures = encoded(clip, vae, draw.concept(), regularisation=regular, regularisation_share=REGULAR / BATCH)
    optimizer = OptimizerSettings(
        learning_rate=2e-3, schedule="cosine", warmup=min(10, steps), total_steps=steps, floor=0.1, batch_size=BATCH
    )
    adapter, average = AdapterSettings(kind="lora", rank=16, targets="attention+ff"), EMASettings(schedule="ramp", decay=0.99)
    start = Start("demo base", pictures.digest, adapter, average, seed)
    state = begin(model.model.diffusion_model, start, Settings(optimizer, ObjectiveSettings(conditioning_dropout=0.1)), run="zorp")
    with host.denoiser.denoiser(model) as denoiser:
        return train(state, denoiser, pictures, steps)


def applied(model: Any, lora: Mapping[str, Tensor]) -> Any:
    """The MODEL with a LoRA of `learn` on it."""
    from .. import host

    return host.lora.graft(model, None, [host.lora.Entry("zorp", dict(lora), 1.0, 0.0)]).model


def main(argv: list[str] | None = None) -> int:
    """Score, teach, score again."""
    parser = argparse.ArgumentParser(prog="python -m graft_nodes.demo.learn", description="Teach the demo model its concept and score it.")
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--file", type=Path, default=score.BASE)
    parser.add_argument("--grid", type=Path)
    given = parser.parse_args(argv)
    from .. import comfyui_api_stubs

    comfyui_api_stubs.install()
    from .. import host
    from ..patches.todo import ToDoSettings

    model, clip, vae = host.demo.demo_model(str(given.file))
    began = time.monotonic()
    state = learn(host.todo.apply_todo(model, ToDoSettings.parse(phase="training"))[0], clip, vae, given.steps, given.seed)
    print(f"{given.steps} steps in {time.monotonic() - began:.0f} s, last losses {np.mean(state.history.loss[-25:]):.4f}")
    variants = {"before": model, "after": applied(model, state.lora_model()), "after, averaged": applied(model, state.lora_model(ema=True))}
    for name, variant in variants.items():
        known, concept = score.base_score(variant, clip, vae), score.concept_score(variant, clip, vae)
        print(f"{name}: {known} of {len(score.CAPTIONS)} captions right; {concept} of {len(score.CONCEPT)} zorps", flush=True)
    if given.grid is not None:
        pictures = [score.sample(variants[name], clip, vae, score.CONCEPT) for name in ("before", "after, averaged")]
        score.grid(np.concatenate(pictures)).save(given.grid)
        print(given.grid)
    return 0


if __name__ == "__main__":
    sys.exit(main())
