"""What makes steps faster or smaller, two at a time, in a UNet of the open host: the same bytes twice and where a run
goes on, the bytes or numbers of the other one alone, and gradients of finite differences.
"""

import itertools
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from graft_nodes import host as wall
from graft_nodes.host.token_downsampling import apply_todo
from graft_nodes.host.token_routing import apply_routing
from graft_nodes.patches.token_downsampling.tokens import ToDoSettings
from graft_nodes.patches.token_routing.settings import RoutingSettings
from graft_nodes.tests.training.run.compiling_anew import graphs_run_as_they_are
from graft_nodes.training.data.dataset import Conditioning, Dataset
from graft_nodes.training.optimizers.settings import OptimizerSettings
from graft_nodes.training.run.loop import train
from graft_nodes.training.run.step import advance_
from graft_nodes.training.run.workspace import Workspace
from graft_nodes.training.state import Settings, Start, begin, equal
from graft_nodes.training.trainable.settings import BASE_WEIGHTS, AdapterSettings

STEPS = 3
ERROR = 2e-5  # of float32, at a learning rate of 0.1


@dataclass(frozen=True)
class Way:
    """One way to save: what it does to the model, and its settings. `same_bytes`: it changes no number. `smooth`: the
    loss has the gradient that is trained with.
    """

    on: Any = None
    adapter: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    same_bytes: bool = False
    smooth: bool = True


def _routed(patcher):
    return apply_routing(patcher, RoutingSettings(0.5))[0]


def _thinned(patcher):
    return apply_todo(patcher, ToDoSettings(depth_factors="2", phase="training"))[0]


WAYS = {
    "TREAD": Way(on=_routed),
    "ToDo": Way(on=_thinned),
    "T-LoRA": Way(adapter={"kind": "tlora"}),
    "checkpointing": Way(optimizer={"checkpointing": True}, same_bytes=True),
    "offload activations": Way(optimizer={"offload": "activations"}, same_bytes=True),
    "compile": Way(optimizer={"compile": "blocks"}),
    "fused backward pass": Way(optimizer={"fused_backward": True, "clip_norm": 0.0}),
    "bf16": Way(optimizer={"precision": "bf16"}, smooth=False),
    **{f"base {kind}": Way(adapter={"base_weights": kind}, smooth=False) for kind in BASE_WEIGHTS[1:]},
}
OTHER_RUNS = ("T-LoRA", "fused backward pass")  # other tensors, and a norm that is not clipped
PAIRS = [pair for pair in itertools.combinations(WAYS, 2) if not all(name.startswith("base") for name in pair)]


def _cases(pairs):
    """The pairs as a test's parameters: compiling takes longest, and one pair shows that it works here."""
    cases = []
    for pair in pairs:
        marks = []
        if "compile" in pair and pair != ("TREAD", "compile"):
            marks = [pytest.mark.long]
        cases.append(pytest.param(pair, marks=marks, id=" and ".join(pair)))
    return cases


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    with graphs_run_as_they_are(monkeypatch):
        yield


def _data():
    generator = torch.Generator().manual_seed(1)
    texts = {text: Conditioning(torch.randn(1, 7, 24, generator=generator)) for text in ("a", "")}
    return Dataset.from_latents([torch.randn(4, 16, 24, generator=generator) for _ in range(4)], ["a"] * 4, texts)


def _begun(small, names):
    """(MODEL, state before the first step, dataset) with these ways."""
    patcher, data = small.unet(), _data()
    adapter: dict[str, Any] = {"targets": "attention+ff", "rank": 4}
    optimizer: dict[str, Any] = {"optimizer": "sgd", "learning_rate": 0.1, "weight_decay": 0.0}
    optimizer |= {"batch_size": 2, "precision": "float32"}
    for name in names:
        way = WAYS[name]
        adapter |= way.adapter
        optimizer |= way.optimizer
        if way.on is not None:
            patcher = way.on(patcher)
    start = Start("small", data.digest, AdapterSettings(**adapter))
    return patcher, begin(patcher.model.diffusion_model, start, Settings(OptimizerSettings(**optimizer))), data


def _trained(small, names, *calls):
    """The state after these calls of so many steps."""
    patcher, state, data = _begun(small, names)
    with wall.denoiser.open_denoiser(patcher) as denoiser, torch.inference_mode(False):
        for steps in calls:
            state = train(state, denoiser, data, steps)
    return state


def _far(state, other):
    return max(float((tensor - other.trained[name]).abs().max()) for name, tensor in state.trained.items())


@pytest.mark.slow
@pytest.mark.parametrize("pair", _cases(PAIRS))
def test_a_pair_trains_the_same_bytes_and_goes_on_where_it_was(small, pair):
    whole = _trained(small, pair, STEPS)
    assert equal(whole, _trained(small, pair, STEPS)) and equal(whole, _trained(small, pair, 1, STEPS - 1))
    assert _far(whole, _trained(small, pair, 0)) > 100 * ERROR
    for name, other in (pair, pair[::-1]):
        if name in OTHER_RUNS:
            continue
        alone = _far(whole, _trained(small, [other], STEPS))
        if WAYS[name].same_bytes:
            assert alone == 0.0
        elif name == "compile":
            assert alone < ERROR
        else:
            assert alone > 2 * ERROR, f"{name} changes nothing"


SMOOTH = [pair for pair in PAIRS if all(WAYS[name].smooth and "fused" not in name for name in pair)]


def _slope(small, pair, at=0.0, along=None):
    """(loss, gradients by name) of the first step, with the trained tensors moved."""
    patcher, state, data = _begun(small, pair)
    with wall.denoiser.open_denoiser(patcher) as denoiser, torch.inference_mode(False):
        work = Workspace(state, denoiser, data)
        work.loader.until = 1
        try:
            with work.install():
                if along is not None:
                    with torch.no_grad():
                        for name, tensor in work.trained.items():
                            tensor += at * along[name]
                before = {name: tensor.detach().clone() for name, tensor in work.trained.items()}
                loss = advance_(work).loss
                rate = state.settings.optimizer.learning_rate
                gradients = {name: (before[name] - tensor.detach()) / rate for name, tensor in work.trained.items()}
        finally:
            work.close()
    return loss, gradients


@pytest.mark.slow
@pytest.mark.parametrize("pair", _cases(SMOOTH))
def test_a_pair_has_the_gradients_of_finite_differences(small, pair):
    _, gradients = _slope(small, pair)
    norm = float(torch.stack([gradient.square().sum() for gradient in gradients.values()]).sum().sqrt())
    along = {name: gradient / norm for name, gradient in gradients.items()}
    step = 0.004
    above, below = (_slope(small, pair, sign * step, along)[0] for sign in (1, -1))
    assert (above - below) / (2 * step) == pytest.approx(norm, rel=5e-3)
