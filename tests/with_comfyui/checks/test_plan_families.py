"""A training step of a tiny model of each family is planned, with every setting that saves memory."""

import pytest
import torch
from families import build, conditions, latent
from graft_nodes.host import planning
from graft_nodes.training.data.dataset import Conditioning, Dataset
from graft_nodes.training.optimizers.settings import OptimizerSettings
from graft_nodes.training.state import Settings, Start, begin
from graft_nodes.training.trainable.settings import AdapterSettings

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
    planned = planning.plan(patcher, state, dataset)
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
    assert layers.parts["weights"] == 0 and layers.peak > 0
