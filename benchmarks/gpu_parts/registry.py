"""The parts in the order in which they run: what decides most comes first, so that a run that is cut short has decided
it. Imports no torch.
"""

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
    Part("step", "A step of SDXL's shape: seconds, memory, waits, averages", "gpu_parts.sdxl_step", 75),
    Part("paged", "Dynamic VRAM: LoRA and text encoder over two Train Steps", "gpu_parts.paged", 60),
    Part("stack", "LoRA stacks of SDXL's shape in fp16, bf16 and fp8", "gpu_parts.stack", 60),
    Part("ring", "Layers in host memory: copies and overlap", "gpu_parts.ring", 10),
    Part("flux", "Flux' width: types, layers and activations in host memory", "gpu_parts.flux_width", 55),
    Part("training", "A training step beside other trainers", "gpu_parts.steps", 65),
    Part("interruptions", "A preview in mid-run, and memory that runs out", "gpu_parts.interruptions", 20),
    Part("optimizers", "Optimizers on 1,100 tensors", "gpu_parts.optimizers", 15),
    Part("precision", "Types: what a card computes in, frozen weights, loss scale", "gpu_parts.precision", 10),
    Part("todo", "Token downsampling: forward and training step", "gpu_parts.downsampling", 40),
    Part("lane", "CudaLane: weights on their way to an average in host memory", "gpu_parts.copy_lane", 10),
    Part("ema", "Weight averages on the device and in host memory", "gpu_parts.averages", 10),
    Part("resume", "Byte-exact resume under deterministic algorithms", "gpu_parts.resume", 30, DETERMINISTIC),
    Part("nccl", "Ranks: NCCL's collectives, and training as one", "gpu_parts.ranks", 20, DETERMINISTIC),
    Part("compile", "Strength change under torch.compile", "gpu_parts.compiled", 25),
    Part("nodes", "The node tests", "gpu_parts.node_tests", 30, DETERMINISTIC),
)


def by_name(names: list[str]) -> list[Part]:
    """The parts with these names in the registry's order, all for none; ValueError names what is unknown."""
    known = {part.name: part for part in PARTS}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"{', '.join(unknown)}: no such part; the parts are {', '.join(known)}")
    return [part for part in PARTS if not names or part.name in names]
