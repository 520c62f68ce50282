"""A training step of a tiny model of each family is planned, with every setting that saves memory."""

import pytest
import torch
from families import build, conditions, latent, random
from graft_nodes.host import memory_planning
from graft_nodes.training.data.dataset import Conditioning, Dataset
from graft_nodes.training.optimizers.settings import OptimizerSettings
from graft_nodes.training.recipes.estimate import Plan, estimate
from graft_nodes.training.recipes.facts import Pictures, facts_of
from graft_nodes.training.state import Settings, Start, begin
from graft_nodes.training.trainable.settings import AdapterSettings
from tiny_families import FAMILIES

NAMES = ("sd1", "sdxl", "sd3", "flux", "qwen", "z-image", "wan")
TOKENS = 600  # enough for activations to be worth moving
SAVINGS = ({"checkpointing": True}, {"offload": "layers"}, {"offload": "activations"})


def _planned(name, **optimizer):
    patcher = build(name)
    captions = {text: Conditioning(*conditions(name, seed, TOKENS)) for seed, text in enumerate(("", "a"))}
    dataset = Dataset.from_latents([latent(name, seed) for seed in range(2)], ["a", "a"], captions)
    start = Start("m", dataset.digest, AdapterSettings("lora", rank=2, targets="all"))
    settings = Settings(OptimizerSettings(**{"batch_size": 2, "precision": "bf16", **optimizer}))
    with torch.inference_mode(False):
        state = begin(patcher.model.diffusion_model, start, settings)
    before = {key: id(p) for key, p in patcher.model.diffusion_model.named_parameters()}
    planned = memory_planning.plan(patcher, state, dataset)
    assert before == {key: id(p) for key, p in patcher.model.diffusion_model.named_parameters()}
    return planned


@pytest.mark.parametrize("name", NAMES)
def test_every_family_is_planned_and_savings_save(name):
    plain = _planned(
        name,
    )
    assert all(plain.parts[part] > 0 for part in ("weights", "trained", "optimizer", "activations"))
    checkpointed, layers, activations = (_planned(name, **saving) for saving in SAVINGS)
    assert checkpointed.parts["activations"] < plain.parts["activations"]
    assert activations.parts["activations"] < plain.parts["activations"]
    outside = plain.parts["weights"] - sum(layers.blocks)  # what is in no block stays, and some blocks are there
    assert layers.blocks and outside <= layers.parts["weights"] <= plain.parts["weights"]


# --- the formula of Training Recipe beside the plan -------------------------------------------------------------------

MEDIUM = {
    "sd1": {
        "model_channels": 128,
        "num_res_blocks": [2] * 4,
        "channel_mult": [1, 2, 4, 4],
        "transformer_depth": [1] * 6 + [0] * 2,
        "transformer_depth_output": [1] * 9 + [0] * 3,
    },
    "flux": {
        "hidden_size": 512,
        "num_heads": 8,
        "depth": 2,
        "depth_single_blocks": 4,
        "axes_dim": [16, 24, 24],
        "mlp_ratio": 4.0,
    },
}
SIDE, PIXELS, TEXT_TOKENS = 64, 512, 512


@pytest.mark.parametrize("name", MEDIUM)
def test_the_estimate_is_above_the_plan_and_below_twice_of_it(name):
    """Weights and optimizer to the byte but for its step counts; activations once to twice what the plan counts."""
    patcher = build(name, torch.bfloat16, **MEDIUM[name])
    network = patcher.model.diffusion_model
    captions = {text: Conditioning(*conditions(name, seed, TEXT_TOKENS)) for seed, text in enumerate(("", "a"))}
    shape = (*FAMILIES[name].latent[:-2], SIDE, SIDE)
    dataset = Dataset.from_latents([random(*shape, seed=seed) for seed in range(2)], ["a", "a"], captions)
    adapter = AdapterSettings("lora", rank=16, targets="attention+ff")
    for checkpointing in (False, True):
        settings = Settings(OptimizerSettings(batch_size=2, precision="bf16", checkpointing=checkpointing))
        with torch.inference_mode(False):
            state = begin(network, Start("m", dataset.digest, adapter), settings)
        planned = memory_planning.plan(patcher, state, dataset)
        wanted = Plan("adamw", adapter.targets, adapter.rank, 2, 1, (Pictures(PIXELS),), 2, checkpointing)
        estimated = estimate(facts_of(network, None, "flow"), wanted)
        assert estimated.parts["model"] == pytest.approx(planned.parts["weights"], rel=0.001)
        assert estimated.parts["optimizer"] == pytest.approx(planned.parts["optimizer"], rel=0.001)
        assert 1 < estimated.parts["activations"] / planned.parts["activations"] < 2
        assert 1 < estimated.total / planned.peak < 2
