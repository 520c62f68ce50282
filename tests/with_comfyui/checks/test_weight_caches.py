"""HiDream-O1 keeps keys and values by prompt: pictures with a stack, and of the base after one, are those of models
that were never used before.
"""

import comfy.sample
import comfy.supported_models
import pytest
import torch
from families import build, conditions, latents
from graft_nodes.host import lora_stacks as graft_lora
from graft_nodes.patches.lora_files.entry import LoraEntry
from graft_nodes.patches.patching.strength_schedule import Schedule
from tiny_families import EVERY

NAME = "hidream o1"
pytestmark = pytest.mark.skipif(
    not hasattr(comfy.supported_models, EVERY[NAME].supported), reason="this ComfyUI has no HiDream-O1"
)
LAYERS = ("language_model.layers.0.self_attn.q_proj", "language_model.layers.0.mlp.down_proj")


def picture(model, steps=2):
    conds = [[[c, dict(extra)]] for c, extra in (conditions(NAME, 1), conditions(NAME, 2))]
    noise, start = latents(NAME, 7), torch.zeros_like(latents(NAME, 5))
    with torch.inference_mode():
        return comfy.sample.sample(
            model, noise, steps, 2.0, "euler", "simple", *conds, start, seed=7, disable_pbar=True
        ).clone()


def stacked(model, mode, strength=1.0, schedule=None):
    shapes = {name: tuple(tensor.shape) for name, tensor in model.model.diffusion_model.named_parameters()}
    generator = torch.Generator().manual_seed(0)
    file = {}
    for layer in LAYERS:
        rows, columns = shapes[f"{layer}.weight"]
        file[f"model.{layer}.lora_A.weight"] = torch.randn(2, columns, generator=generator) * 0.3
        file[f"model.{layer}.lora_B.weight"] = torch.randn(rows, 2, generator=generator) * 0.3
    entry = LoraEntry("x.safetensors", file, strength, schedule=schedule)
    return graft_lora.apply_lora_stack(model, None, [entry], mode).model


@pytest.mark.parametrize("mode", ["merge", "bypass", "host"])
def test_a_stack_comes_changes_and_goes(mode):
    base, first, second = (
        picture(model) for model in (build(NAME), stacked(build(NAME), mode), stacked(build(NAME), mode, -1))
    )
    assert not torch.equal(first, base) and not torch.equal(second, first)
    model = build(NAME)
    assert torch.equal(picture(model), base)
    assert torch.equal(picture(stacked(model, mode)), first)
    kept = stacked(model, mode, -1)
    assert torch.equal(picture(kept), second)
    assert torch.equal(picture(model), base)
    assert torch.equal(picture(kept), second)


def test_a_strength_follows_its_schedule_within_a_picture(monkeypatch):
    fading = Schedule(((0.0, 1.0), (1.0, 0.0)))
    found = picture(stacked(build(NAME), "bypass", schedule=fading), steps=4)
    model = build(NAME)
    network = type(model.model.diffusion_model)
    forward = network._forward

    def anew(self, *arguments, **named):
        self.clear_kv_cache()
        return forward(self, *arguments, **named)

    monkeypatch.setattr(network, "_forward", anew)
    expected = picture(stacked(model, "bypass", schedule=fading), steps=4)
    monkeypatch.undo()
    assert torch.allclose(found, expected, atol=1e-4) and not torch.allclose(found, picture(build(NAME), 4), atol=1e-3)


class Poses:
    """Counts how often it is freed, as Wan Animate 2's pose branch would be."""

    freed = 0

    def free(self):
        self.freed += 1


def test_what_wan_animate_keeps_of_poses_is_freed_at_another_strength():
    """ComfyUI's WanAnimate2Cache keeps what the pose branch computed until a picture is done."""
    for schedule, freed in ((Schedule(((0.0, 1.0), (1.0, 0.0))), 3), (None, 0)):
        model, poses = stacked(build(NAME), "bypass", schedule=schedule), Poses()
        model.model_options["transformer_options"]["animate2_cache"] = poses
        picture(model, steps=4)
        assert poses.freed == freed
