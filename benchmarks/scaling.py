"""What a step over ranks costs, on paper: bytes a rank keeps and bytes it sends, for SD1.5, SDXL and Flux, adapters and
whole weights.

python benchmarks/scaling.py --comfyui DIR [--ranks 1,2,4,8,16,64,256] [--rank 16] [--json FILE]

Models are ComfyUI's own classes without memory (device meta), what an adapter trains is what Graft chooses on them;
nothing is computed. The formulas are those of docs/scaling.md; tests/training/distributed hold them against what two to
four ranks on one machine really hand to collectives. Activations are not counted: they do not depend on how many ranks
there are.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
FLUX = {
    "in_channels": 16,
    "out_channels": 16,
    "vec_in_dim": 768,
    "context_in_dim": 4096,
    "hidden_size": 3072,
    "mlp_ratio": 4.0,
    "num_heads": 24,
    "depth": 19,
    "depth_single_blocks": 38,
    "axes_dim": [16, 56, 56],
    "theta": 10000,
    "patch_size": 2,
    "qkv_bias": True,
    "guidance_embed": True,
    "txt_ids_dims": [],
}
FEW = 4  # training.distributed.gradient_sum.FEW


@dataclass(frozen=True)
class Model:
    """Numbers of a model: all weights, the largest block's, and what an adapter on attention trains."""

    weights: int
    block: int
    adapter: int


def measured(checkout: str, rank: int) -> dict[str, Model]:
    """The models' numbers, from ComfyUI's classes."""
    sys.path.insert(0, str(ROOT / "tests" / "with_comfyui"))
    import open_comfyui

    open_comfyui.open_checkout(checkout)
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import comfy.ops
    import todo
    from comfy.ldm.flux.model import Flux
    from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel
    from graft_nodes.training.memory.checkpointing import blocks
    from graft_nodes.training.trainable.settings import AdapterSettings
    from graft_nodes.training.trainable.targets import adapter_targets

    common = {"dtype": torch.bfloat16, "device": "meta", "operations": comfy.ops.disable_weight_init}
    made = {name: UNetModel(**todo.SHAPES[name], **common) for name in ("sd15", "sdxl")}
    made["flux"] = Flux(image_model=None, **FLUX, **common)
    out = {}
    for name, module in made.items():
        settings = AdapterSettings(rank=rank)
        trained = sum(
            math.prod(tensor.shape)
            for target in adapter_targets(module, settings).values()
            for tensor in settings.adapter.tensors(target)
        )
        largest = max(sum(p.numel() for p in block.parameters()) for block in blocks(module))
        out[name] = Model(sum(p.numel() for p in module.parameters()), largest, trained)
    return out


def buffers(trained: int, ranks: int) -> float:
    """Bytes of what travels: a rank's own gradients, everyone's (or a slice of everyone's), the sum (and the slice of
    it).
    """
    return 0 if ranks == 1 else 4 * trained * (2 + ranks if ranks <= FEW else 4)


def adapters(model: Model, ranks: int, shard: bool) -> dict[str, float]:
    """Bytes of an adapter's training on one rank: base in bf16, adapter, gradients and AdamW's two
    moments in float32.
    """
    base = 2 * model.weights
    sent = 4 * model.adapter
    kept = (base / ranks + 2 * model.block if shard else base) + 4 * 4 * model.adapter + buffers(model.adapter, ranks)
    wire = 0.0 if ranks == 1 else sent * (ranks - 1) if ranks <= FEW else 2 * sent * (ranks - 1) / ranks
    gathered = 2 * base * (ranks - 1) / ranks if shard else 0.0  # whole blocks, once forward and once backward
    return {
        "memory": kept,
        "handed": 0 if ranks == 1 else sent * (1 if ranks <= FEW else 1 + 1 / ranks),
        "received": wire + gathered,
    }


def full(model: Model, ranks: int, shard: bool) -> dict[str, float]:
    """Bytes of training whole weights on one rank: float32 masters, gradients and two moments; blocks compute in bf16
    with --shard.
    """
    master = 4 * model.weights
    if shard:
        return {
            "memory": 4 * master / ranks + 2 * 2 * model.block,
            "handed": master + 2 * 2 * model.weights / ranks + master / ranks,
            # gathered twice in bf16; gradients in float32, and this rank's once more to measure them
            "received": (2 * 2 * model.weights + master + master / ranks) * (ranks - 1) / ranks,
        }
    wire = 0.0 if ranks == 1 else master * (ranks - 1) if ranks <= FEW else 2 * master * (ranks - 1) / ranks
    return {
        "memory": 4 * master + 2 * model.weights + buffers(model.weights, ranks),
        "handed": 0 if ranks == 1 else master * (1 if ranks <= FEW else 1 + 1 / ranks),
        "received": wire,
    }


WAYS = {
    "LoRA": lambda model, ranks: adapters(model, ranks, False),
    "LoRA --shard": lambda model, ranks: adapters(model, ranks, True),
    "full": lambda model, ranks: full(model, ranks, False),
    "full --shard": lambda model, ranks: full(model, ranks, True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--comfyui", required=True, metavar="DIR")
    parser.add_argument(
        "--ranks", default="1,2,4,8,16,64,256", type=lambda text: [int(part) for part in text.split(",")]
    )
    parser.add_argument("--rank", default=16, type=int)
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    models = measured(arguments.comfyui, arguments.rank)
    rows = []
    for name, model in models.items():
        print(
            f"\n{name}: {model.weights / 1e6:.1f}M weights, largest block {model.block / 1e6:.1f}M, "
            f"LoRA of rank {arguments.rank} on attention {model.adapter / 1e6:.2f}M"
        )
        print(f"| GB kept / MB received a step | {' | '.join(map(str, arguments.ranks))} |")
        print("|---" * (1 + len(arguments.ranks)) + "|")
        for way, cost in WAYS.items():
            found = [cost(model, ranks) if ranks > 1 or "shard" not in way else None for ranks in arguments.ranks]
            cells = [
                "-" if one is None else f"{one['memory'] / 1e9:.2f} / {one['received'] / 1e6:,.0f}" for one in found
            ]
            print(f"| {way} | {' | '.join(cells)} |")
            rows += [
                {"model": name, "way": way, "ranks": r, **one}
                for r, one in zip(arguments.ranks, found, strict=True)
                if one
            ]
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
