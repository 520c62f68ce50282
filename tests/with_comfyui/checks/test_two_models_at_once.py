"""Dual Model CFG Guider: ComfyUI has one set of weights for two MODELs of one base, and Graft says so."""

import logging

import comfy.model_management
import comfy.samplers
import comfy_extras.nodes_custom_sampler as sampler_nodes
import pytest
import torch
from families import build, conditions, latents
from graft_nodes.host import lora_stacks
from graft_nodes.patches.lora_files.entry import LoraEntry

NAME = "flux"
LAYER = "diffusion_model.double_blocks.0.img_attn.proj"
DRAWS = torch.Generator().manual_seed(0)
STATE = {
    f"{LAYER}.lora_up.weight": torch.randn(32, 2, generator=DRAWS),
    f"{LAYER}.lora_down.weight": torch.randn(2, 32, generator=DRAWS),
}


def caption(seed):
    tokens, extras = conditions(NAME, seed)
    return [[tokens, dict(extras)]]


def sampled(model, negative, caplog):
    """(latent, what Graft said) of the guider with one MODEL for each side."""
    if not hasattr(sampler_nodes, "Guider_DualModel"):
        pytest.skip("this ComfyUI has no Dual Model CFG Guider")
    guider = sampler_nodes.Guider_DualModel(model, negative)
    guider.set_conds(caption(1), caption(2))
    guider.set_cfg(3.0)
    caplog.clear()
    with torch.inference_mode(), caplog.at_level(logging.WARNING):
        made = guider.sample(
            latents(NAME, 7),
            torch.zeros_like(latents(NAME, 5)),
            comfy.samplers.sampler_object("euler"),
            torch.tensor([1.0, 0.5, 0.0]),
            disable_pbar=True,
            seed=3,
        )
    comfy.model_management.unload_all_models()
    said = [record.getMessage() for record in caplog.records if "two MODELs of the same base" in record.getMessage()]
    return made, said


def with_stack(patcher):
    return lora_stacks.apply_lora_stack(patcher, None, [LoraEntry("x", STATE)], "merge").model


def test_a_stack_on_one_side_of_one_base_is_named(caplog):
    base = build(NAME)
    plain, nothing_said = sampled(base, base.clone(), caplog)
    both, nothing = sampled(with_stack(base), build_with_stack(), caplog)
    positive, on_both = sampled(with_stack(base), base, caplog)
    negative, on_neither = sampled(base, with_stack(base), caplog)
    assert nothing_said == nothing == []
    assert torch.allclose(positive, both, atol=1e-5) and "works on both" in on_both[0]
    assert torch.allclose(negative, plain, atol=1e-5) and "works on neither" in on_neither[0]
    assert not torch.allclose(both, plain, atol=1e-3)


def build_with_stack():
    """The same stack on a base of its own, with the same weights."""
    return with_stack(build(NAME))


def test_a_base_of_its_own_is_the_remedy(caplog):
    apart, said = sampled(build_with_stack(), build(NAME), caplog)
    together, _ = sampled(build_with_stack(), build_with_stack(), caplog)
    assert said == [] and not torch.allclose(apart, together, atol=1e-4)
