"""Trains the demo's base model with Graft's own training core: every weight of the UNet, a ramping weight average, flow
matching.

python -m graft_nodes.demo.train_base [--steps 1500] [--seed 0] [--out demo/base.safetensors]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..storage.safetensors import write_safetensors
from . import draw, model

BASE = Path(__file__).resolve().parent / "base.safetensors"
UNET, TEXT = "model.diffusion_model.", "text."
RUN = "demo base"


def start_weights(seed: int = 0) -> dict[str, Tensor]:
    """The first weights of the file: a UNet to train, and the text encoder, which is not trained."""
    from . import host_model

    with torch.random.fork_rng(devices=[]):  # new modules get random weights
        unet, encoder = host_model.demo_unet(), model.TextEncoder()
    model.initialize_(unet, seed)
    model.initialize_text_(encoder, seed)
    weights = {UNET + key: tensor.contiguous() for key, tensor in unet.state_dict().items()}
    return weights | {TEXT + key: tensor.contiguous() for key, tensor in encoder.state_dict().items()}


def settings(steps: int) -> Any:
    """The settings to train the base model for `steps` steps."""
    from ..training.objective.settings import ObjectiveSettings
    from ..training.optimizers.settings import OptimizerSettings
    from ..training.state import Settings

    optimizer = OptimizerSettings(
        learning_rate=1e-3,
        schedule="cosine",
        warmup=min(60, steps),
        total_steps=steps,
        floor=0.02,
        batch_size=16,
        weight_decay=1e-4,
        clip_norm=1.0,
        precision="float32",
        options="betas = 0.9 0.99",
    )
    return Settings(optimizer, ObjectiveSettings(conditioning_dropout=0.1))


def train(steps: int, seed: int) -> dict[str, Tensor]:
    """Train for `steps` steps; returns the tensors of the file: the UNet's weight average and the unchanged text
    encoder.

    Saves a snapshot to Graft's store every 100 steps and on Ctrl-C; the same call resumes from the last one.
    """
    from .. import host
    from ..ema.decay import EMASettings
    from ..training.run.call import run
    from ..training.run.loop import Callbacks
    from ..training.state import Start, begin
    from ..training.store.store import Store
    from ..training.trainable.settings import AdapterSettings
    from . import host_model
    from .encode_dataset import encode_dataset

    with tempfile.TemporaryDirectory() as folder:
        start_tensors = start_weights(seed)
        digest = write_safetensors(Path(folder) / "start.safetensors", start_tensors)
        patcher, clip, vae = host_model.demo_model(str(Path(folder) / "start.safetensors"))
    dataset = encode_dataset(clip, vae, draw.base(seed))
    start = Start(
        digest,
        dataset.digest,
        AdapterSettings(kind="full", targets="all"),
        EMASettings(schedule="ramp", decay=0.999),
        seed,
    )
    state = begin(patcher.model.diffusion_model, start, settings(steps), run=RUN)
    store = Store(host.folders.training_folder(), RUN, host.fingerprint.versions(patcher))
    result = run(
        state,
        steps,
        lambda: host.denoiser.open_denoiser(patcher),
        dataset,
        store,
        Callbacks(progress_printer(steps), snapshot_every=100),
    )
    for note in result.notes:
        print(note)
    trained = {UNET + name: tensor for name, tensor in result.state.weights(ema=True).items()}
    return {key: trained.get(key, tensor).contiguous() for key, tensor in start_tensors.items()}


def progress_printer(steps: int) -> Any:
    """A callback that prints the mean loss and the time left every 50 steps."""
    start, recent = time.monotonic(), []

    def stepped(step: int, moved: Any, _: float | None) -> None:
        recent.append(moved.loss)
        if step % 50 == 0 or step == steps:
            seconds_left = (time.monotonic() - start) / len(recent) * (steps - step)
            print(
                f"step {step} of {steps}  loss {sum(recent[-50:]) / len(recent[-50:]):.4f}  {seconds_left:.0f} s left",
                flush=True,
            )

    return stepped


def main(argv: list[str] | None = None) -> int:
    """Draw, train and write the base model."""
    parser = argparse.ArgumentParser(
        prog="python -m graft_nodes.demo.train_base", description="Train the demo's base model."
    )
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=BASE)
    arguments = parser.parse_args(argv)
    from ..headless import embedded

    embedded.install()
    digest = write_safetensors(arguments.out, train(arguments.steps, arguments.seed))
    print(f"{arguments.out}: {arguments.out.stat().st_size} bytes, sha256 {digest}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
