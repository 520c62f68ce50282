"""Made-up optimizer and loss weighting: one record each takes them through the nodes, a training, a saved state and
its resumption, and the LoRA's metadata. Nothing else knows them.
"""

import os

import numpy as np
import pytest
import torch
from graft_nodes.storage.digest import sha256_of_tensors
from PIL import Image


class Drift(torch.optim.Optimizer):
    """Moves by the sign of a running sum; keeps a tensor a parameter and a count a group."""

    def __init__(self, groups, lr, pull):
        super().__init__(groups, {"lr": lr, "pull": pull, "count": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] += 1
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if "total" not in state:
                    state["total"] = torch.zeros_like(parameter)
                state["total"].mul_(group["pull"]).add_(parameter.grad)
                parameter.sub_(state["total"].sign(), alpha=group["lr"] / group["count"])


@pytest.fixture
def drift(host):
    """The optimizer `drift`, registered in the pack that the host has loaded."""
    record = host.module("training.optimizers.record")
    readers = host.module("training.optimizers.option_readers")
    made_up = record.OptimizerRecord(
        name="drift",
        help="moves by signs",
        full_name="made_up.Drift",
        build=lambda request: Drift(request.groups, request.learning_rate, **request.options),
        options={"pull": readers.BELOW_ONE},
        option_defaults={"pull": 0.5},
        element_wise=True,
        has_weight_decay=False,
        diverges_from=0.5,
        remarks=lambda settings: ["drift is made up"],
        group_numbers={"count": int},
    )
    with host.module("training.optimizers.registry").OPTIMIZERS.registered(made_up):
        yield


@pytest.fixture
def weighting(host):
    """The loss weighting `late`, registered in the pack that the host has loaded."""
    module = host.module("training.objective.weightings")
    made_up = module.LossWeighting(
        name="late", weights=lambda sigma, prediction, gamma: gamma * (sigma > 0.5), needs_snr=False
    )
    with module.WEIGHTINGS.registered(made_up):
        yield


@pytest.fixture(scope="module")
def parts(host):
    """Model, CLIP, VAE and a dataset of three pictures."""
    folder = os.path.join(host.input, "made_up")
    os.makedirs(folder, exist_ok=True)
    for i in range(3):
        Image.fromarray(np.full((128, 128, 3), 60 * i, dtype=np.uint8)).save(os.path.join(folder, f"{i}.png"))
    model, clip, vae = host.call("GraftDemo")
    return model, clip, vae, host.call("GraftDataset", folder="made_up", vae=vae, clip=clip, resolution=128)[0]


def _input(host, node, name):
    return next(entry for entry in host.node(node).define_schema().inputs if entry.id == name)


def _start(host, parts, run, **settings):
    model, _, vae, dataset = parts
    adapter = host.call("GraftAdapter", rank=2)[0]
    return host.call("GraftTrainStart", model=model, dataset=dataset, vae=vae, adapter=adapter, run=run, **settings)


def test_an_optimizer_is_one_record(host, parts, drift):
    offered = _input(host, "GraftOptimizer", "optimizer")
    assert offered.options[-1] == "drift" and " drift: moves by signs. " in offered.tooltip
    with pytest.raises(ValueError, match="drift has no 'push', only pull"):
        host.call("GraftOptimizer", optimizer="drift", options="push = 1")
    optimizer = host.call("GraftOptimizer", optimizer="drift", learning_rate=1e-3, options="pull = 0.25")[0]
    start, report = _start(host, parts, "drifting", optimizer=optimizer)
    assert "drift at 0.001" in report and "drift is made up" in report
    whole, half = (host.call("TrainStep", state=start, steps=steps)[0] for steps in (4, 2))
    assert {key.partition("/")[0] for key in half.optimizer} == {"total", "scalars"}
    assert all(value.tolist() == [2.0] for key, value in half.optimizer.items() if key.startswith("scalars/"))
    host.call("GraftSaveState", state=half, name="drifting")
    model, clip, vae, dataset = parts
    loaded = host.call("GraftLoadState", name="drifting", model=model, dataset=dataset, clip=clip, vae=vae)[0]
    assert sha256_of_tensors(loaded.optimizer) == sha256_of_tensors(half.optimizer)
    resumed = host.call("TrainStep", state=loaded, steps=2)[0]
    assert resumed.key == whole.key and sha256_of_tensors(resumed.trained) == sha256_of_tensors(whole.trained)
    assert sha256_of_tensors(resumed.optimizer) == sha256_of_tensors(whole.optimizer)
    metadata = host.module("training.lora_metadata").lora_metadata(whole)
    assert metadata["ss_optimizer"] == "made_up.Drift(pull=0.25)"


def test_a_weighting_is_one_record(host, parts, weighting):
    assert _input(host, "GraftObjective", "weighting").options[-1] == "late"
    ends = []
    for name in ("none", "late"):
        objective = host.call("GraftObjective", weighting=name, gamma=2.0)[0]
        state = _start(host, parts, f"weighted {name}", objective=objective)[0]
        ends.append(host.call("TrainStep", state=state, steps=2)[0])
    assert ends[0].history.loss != ends[1].history.loss and ends[0].key != ends[1].key


def test_afterwards_nothing_of_them_is_left(host):
    assert "drift" not in _input(host, "GraftOptimizer", "optimizer").options
    with pytest.raises(ValueError, match="optimizer is 'drift', expected one of adamw"):
        host.call("GraftOptimizer", optimizer="drift")
    with pytest.raises(ValueError, match="loss weighting is 'late', expected one of none, min-snr, debiased"):
        host.call("GraftObjective", weighting="late")
