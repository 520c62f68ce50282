"""The parts in the order in which they run: checks first, then measurements. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # without it CUDA's matrix products refuse to be deterministic


@dataclass(frozen=True)
class Part:
    """A part of the command: `module` has its `cases`; `share` is its share of the time, in seconds of
    a run of all parts.
    """

    name: str
    title: str
    module: str
    share: float
    environment: Mapping[str, str] = field(default_factory=dict)


PARTS = (
    Part("step", "A step of SDXL's shape: seconds, memory, waits, averages", "gpu_parts.sdxl_step", 80),
    Part("paged", "Dynamic VRAM: LoRA and text encoder over two Train Steps", "gpu_parts.paged", 60),
    Part("ring", "Layers in host memory: copies and overlap", "gpu_parts.ring", 10),
    Part(
        "flux", "Flux' width: bf16, fp8, int8, nf4; layers and activations in host memory", "gpu_parts.flux_width", 60
    ),
    Part("lane", "CudaLane: weights on their way to an average in host memory", "gpu_parts.copy_lane", 15),
    Part("resume", "Byte-exact resume under deterministic algorithms", "gpu_parts.resume", 50, DETERMINISTIC),
    Part("nccl", "Ranks: NCCL's collectives, and training as one", "gpu_parts.ranks", 40, DETERMINISTIC),
    Part("precision", "Types: what a card computes in, frozen weights, loss scale", "gpu_parts.precision", 15),
    Part("nodes", "The node tests", "gpu_parts.node_tests", 130, DETERMINISTIC),
    Part("todo", "Token downsampling: forward and training step", "gpu_parts.downsampling", 75),
    Part("stack", "LoRA stacks on bf16 and fp8", "gpu_parts.stack", 80),
    Part("compile", "Strength change under torch.compile", "gpu_parts.compiled", 50),
    Part("ema", "Weight averages on the device and in host memory", "gpu_parts.averages", 20),
    Part("training", "A training step beside other trainers", "gpu_parts.steps", 60),
)


def by_name(names: list[str]) -> list[Part]:
    """The parts with these names in the registry's order, all for none; ValueError names what is unknown."""
    known = {part.name: part for part in PARTS}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"{', '.join(unknown)}: no such part; the parts are {', '.join(known)}")
    return [part for part in PARTS if not names or part.name in names]
