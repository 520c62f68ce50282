"""Samples captions with the open host's own sampler and counts how many pictures satisfy the pixel rule.

python -m graft_nodes.demo.score [FILE] [--grid PICTURE.png]     # scores demo/base.safetensors
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from . import draw, rule, tokenizer

BASE = Path(__file__).resolve().parent / "base.safetensors"
CAPTIONS = [caption for caption, *_ in draw.captions()]
CONCEPT = [f"a {tokenizer.CONCEPT} {tokenizer.POSITIONS[index % 3]}" for index in range(16)]


def sample(
    model: Any, clip: Any, vae: Any, captions: list[str], seed: int = 0, steps: int = 20, cfg: float = 2.0
) -> np.ndarray:
    """Sample one picture per caption, (n, 256, 256, 3) float32 in 0..1: euler with flow's even steps, in one batch,
    with noise from `seed`.
    """
    import comfy.sample

    with torch.inference_mode():
        encoded = [clip.encode_from_tokens_scheduled(clip.tokenize(caption)) for caption in captions]
        positive = [[torch.cat([cond[0][0] for cond in encoded]), dict(encoded[0][0][1])]]
        negative = clip.encode_from_tokens_scheduled(clip.tokenize(""))
        latent = torch.zeros(len(captions), 3, 32, 32)
        noise = torch.randn(latent.shape, generator=torch.Generator().manual_seed(seed))
        samples = comfy.sample.sample(
            model, noise, steps, cfg, "euler", "simple", positive, negative, latent, disable_pbar=True, seed=seed
        )
        return vae.decode(samples).float().cpu().numpy()


def base_score(model: Any, clip: Any, vae: Any, seed: int = 0) -> int:
    """How many of the base model's 48 captions give a correct picture."""
    return rule.score(sample(model, clip, vae, CAPTIONS, seed), CAPTIONS)


def concept_score(model: Any, clip: Any, vae: Any, seed: int = 0) -> int:
    """How many of 16 samples of 'a zorp left', 'middle' and 'right' are correct."""
    return rule.score(sample(model, clip, vae, CONCEPT, seed), CONCEPT)


def grid(pictures: np.ndarray, columns: int = 8, side: int = 128) -> Any:
    """A PIL picture of (n, 256, 256, 3) pictures in rows; the last row is filled with white."""
    from PIL import Image

    rows = -(-len(pictures) // columns)
    sheet = Image.new("RGB", (columns * side, rows * side), "white")
    for index, pixels in enumerate(pictures):
        small = Image.fromarray(np.round(pixels * 255).astype(np.uint8)).resize((side, side), Image.Resampling.LANCZOS)
        sheet.paste(small, (index % columns * side, index // columns * side))
    return sheet


def main(argv: list[str] | None = None) -> int:
    """Score a demo model file on three seeds and, with --grid, draw what it samples."""
    parser = argparse.ArgumentParser(
        prog="python -m graft_nodes.demo.score", description="Score the demo model by the pixel rule."
    )
    parser.add_argument("file", nargs="?", type=Path, default=BASE)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--grid", type=Path)
    arguments = parser.parse_args(argv)
    from ..headless import embedded

    embedded.install()
    from . import host_model

    model, clip, vae = host_model.demo_model(str(arguments.file))
    for seed in range(arguments.seeds):
        base, concept = base_score(model, clip, vae, seed), concept_score(model, clip, vae, seed)
        print(
            f"seed {seed}: {base} of {len(CAPTIONS)} captions right; {concept} of {len(CONCEPT)} of 'a"
            f" {tokenizer.CONCEPT} …'"
        )
    if arguments.grid is not None:
        pictures = np.concatenate([sample(model, clip, vae, CAPTIONS), sample(model, clip, vae, CONCEPT)])
        grid(pictures).save(arguments.grid)
        print(arguments.grid)
    return 0


if __name__ == "__main__":
    sys.exit(main())
