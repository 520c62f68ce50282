"""What `plan` says of models of full size: ComfyUI's own classes on the meta device, without memory for their weights.

`planned_sizes.json` keeps it, so that docs/planning.md can be written without a ComfyUI.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from graft_nodes.tests.with_comfyui import full_sizes

FILE = Path(__file__).with_name("planned_sizes.json")
FULL_FILE = Path(__file__).with_name("planned_full_weights.json")
FULL_WEIGHTS = ("SDXL", "Flux.1 dev")  # models whose training of all weights is planned
PIXELS = (512, 768, 1024)
PLAIN, CHECKPOINTED = "plain", "gradient checkpointing"
TARGETS = ("attention", "attention+ff")  # the latter at the smallest size alone, for Training Recipe's estimate
RANK = 16
TEXTS: dict[str, tuple[int, int, int]] = {  # tokens, their width, and that of the pooled text; 0 is none
    "SD 1.5": (77, 768, 0),
    "SDXL": (77, 2048, 1280),
    "Flux.1 dev": (512, 4096, 768),
    "Qwen-Image": (512, 3584, 0),
    "Wan 14B": (512, 4096, 0),
    "Z-Image": (512, 2560, 0),
    "Wan 2.1 1.3B": (512, 4096, 0),
}
# by title, "<pixels>" or, with feed-forward layers, "<pixels> attention+ff", and PLAIN or CHECKPOINTED: bytes by part
Plans = dict[str, dict[str, dict[str, dict[str, int]]]]


def stored() -> Plans:
    """The plans in the file."""
    plans: Plans = json.loads(FILE.read_text(encoding="utf-8"))
    return plans


def write(plans: Plans) -> None:
    """Put plans into the file."""
    FILE.write_text(json.dumps(plans, indent=1) + "\n", encoding="utf-8")


def planned(title: str, pixels: int, checkpointing: bool, targets: str = TARGETS[0]) -> dict[str, int]:
    """The parts of a step's memory."""
    from graft_nodes.host import memory_planning

    patcher = patcher_of(title)
    return dict(memory_planning.plan(patcher, *run(patcher, title, pixels, checkpointing, targets)).parts)


def stored_full() -> dict[str, dict[str, Any]]:
    """The plans of full weights in their file: by title, `on the card` and `layers`, bytes by part, and `blocks`."""
    plans: dict[str, dict[str, Any]] = json.loads(FULL_FILE.read_text(encoding="utf-8"))
    return plans


def write_full(plans: dict[str, dict[str, Any]]) -> None:
    """Put plans of full weights into their file."""
    FULL_FILE.write_text(json.dumps(plans, indent=1) + "\n", encoding="utf-8")


def planned_full(title: str) -> dict[str, Any]:
    """The parts of a step that trains all weights at 1024 x 1024 pixels, with everything that saves memory, and the
    same with layers in host memory; and the bytes of the blocks that wait there.
    """
    from graft_nodes.host import memory_planning
    from graft_nodes.training.optimizers.settings import OptimizerSettings
    from graft_nodes.training.trainable.settings import AdapterSettings

    patcher, found = patcher_of(title), {}
    for name, offload in (("on the card", "none"), ("layers", "layers")):
        optimizer = OptimizerSettings(
            optimizer="adafactor",
            options="scale_parameter = false",
            learning_rate=1e-5,
            precision="full-bf16",
            checkpointing=True,
            fused_backward=True,
            clip_norm=0.0,
            offload=offload,
        )
        planned = run_with(patcher, title, PIXELS[-1], AdapterSettings("full", targets="all"), optimizer)
        plan = memory_planning.plan(patcher, *planned, on_a_card=True)
        found[name] = dict(plan.parts)
    return {**found, "blocks": list(plan.blocks)}


def run(patcher: Any, title: str, pixels: int, checkpointing: bool, targets: str = TARGETS[0]) -> tuple[Any, Any]:
    """State and dataset: a LoRA of rank 16, bf16, one picture of pixels x pixels."""
    from graft_nodes.training.optimizers.settings import OptimizerSettings
    from graft_nodes.training.trainable.settings import AdapterSettings

    optimizer = OptimizerSettings(batch_size=1, precision="bf16", checkpointing=checkpointing)
    return run_with(patcher, title, pixels, AdapterSettings("lora", rank=RANK, targets=targets), optimizer)


def run_with(patcher: Any, title: str, pixels: int, adapter: Any, optimizer: Any) -> tuple[Any, Any]:
    """State and dataset of a run with these settings on one picture of pixels x pixels."""
    import torch
    from graft_nodes.training.state import Settings, Start, begin

    dataset = _dataset(title, pixels)
    start = Start(title, dataset.digest, adapter)
    with torch.inference_mode(False):
        return begin(patcher.model.diffusion_model, start, Settings(optimizer)), dataset


def patcher_of(title: str) -> Any:
    """The opened ComfyUI's model of full size in bf16, on the meta device."""
    import comfy.model_patcher
    import torch

    cpu = torch.device("cpu")
    model = full_sizes.model(title, full_sizes.BF16).eval()
    return comfy.model_patcher.ModelPatcher(model, load_device=cpu, offload_device=cpu)


def _dataset(title: str, pixels: int) -> Any:
    import torch
    from graft_nodes.training.data.dataset import Conditioning, Dataset
    from tiny_families import EVERY

    tokens, width, pooled = TEXTS[title]
    extras = {}
    if pooled:
        extras["pooled_output"] = torch.zeros(1, pooled)
    caption = Conditioning(torch.zeros(1, tokens, width), extras)
    channels = EVERY[full_sizes.FULL[title][0]].latent[:-2]
    latent = torch.zeros(*channels, pixels // 8, pixels // 8)
    return Dataset.from_latents([latent], ["a"], {"a": caption, "": caption})
