"""Blocks of ComfyUI's own classes under torch.compile while they train, beside the same run without."""

from __future__ import annotations

import inspect

import families
import pytest
import torch
from graft_nodes import host
from graft_nodes.host.token_downsampling import apply_todo
from graft_nodes.host.token_routing import apply_routing
from graft_nodes.patches.token_downsampling.tokens import ToDoSettings
from graft_nodes.patches.token_routing.settings import RoutingSettings
from graft_nodes.tests.training.run.compiling_anew import graphs_run_as_they_are
from graft_nodes.training.data.dataset import Conditioning, Dataset
from graft_nodes.training.optimizers.settings import OptimizerSettings
from graft_nodes.training.run import compiled_blocks
from graft_nodes.training.run.loop import Callbacks, train
from graft_nodes.training.state import Settings, Start, begin
from graft_nodes.training.trainable.settings import AdapterSettings
from quantized import with_quantized_layers


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    with graphs_run_as_they_are(monkeypatch):
        yield


def trained(patcher, family, compile="blocks", steps=3, **optimizer):
    """(the state after some steps, what the report says of compiling)."""
    conditionings = {text: Conditioning(*families.conditions(family, n)) for n, text in enumerate(("", "a"))}
    dataset = Dataset.from_latents([families.latent(family, n) for n in range(2)], ["a"] * 2, conditionings)
    given = OptimizerSettings(learning_rate=0.1, optimizer="sgd", batch_size=2, compile=compile, **optimizer)
    adapter = AdapterSettings(rank=4, targets="all")
    state = begin(patcher.model.diffusion_model, Start(str(id(patcher)), dataset.digest, adapter), Settings(given))
    notes = []
    with torch.inference_mode(), host.denoiser.open_denoiser(patcher) as denoiser:
        return train(state, denoiser, dataset, steps, Callbacks(note=notes.append)), notes


def far(state, other):
    return max(float((tensor - other.trained[name]).abs().max()) for name, tensor in state.trained.items())


SAID = ["compiled blocks", "graph breaks, where blocks call what torch.compile does not look into"]
WAYS = {
    "alone": lambda patcher: patcher,
    "todo": lambda patcher: apply_todo(patcher, ToDoSettings(factor=2.0))[0],
    "tread": lambda patcher: apply_routing(patcher, RoutingSettings(0.5, 0, -1))[0],
}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", ["sd1", "flux"])
def test_trains_as_without(family, way, checkpointing):
    patcher = WAYS[way](families.build(family))
    found, notes = trained(patcher, family, checkpointing=checkpointing)
    assert [line.partition(":")[0] for line in notes] == SAID  # nothing was compiled later
    expected, _ = trained(patcher, family, "off", checkpointing=checkpointing)
    assert far(found, expected) < 1e-5
    assert far(found, trained(patcher, family, "off", 0)[0]) > 1e-3


@pytest.mark.parametrize("kind", ["float8_e4m3fn", "mxfp8", "nvfp4", "int8_tensorwise"])
def test_quantized_layers_of_the_host_train_as_without(kind):
    patcher, _ = with_quantized_layers("flux", kind)
    found, notes = trained(patcher, "flux")
    assert notes[0].startswith("compiled blocks: 6 compilations for 1 DoubleStreamBlock and 1 SingleStreamBlock")
    assert [line.partition(":")[0] for line in notes] == SAID  # nothing was compiled later
    assert far(found, trained(patcher, "flux", "off")[0]) < 1e-5
    assert far(found, trained(patcher, "flux", "off", 0)[0]) > 1e-3


@pytest.mark.parametrize(("kind", "family"), [("asym_w4a8_int8", "flux"), ("convrot_w4a4", "z-image")])
def test_four_bit_layers_of_the_host_are_refused(kind, family):
    patcher, _ = with_quantized_layers(family, kind)
    trained(patcher, family, "off", steps=1)
    with pytest.raises(ValueError, match=r"torch.compile cannot compile this model .*set compile to off"):
        trained(patcher, family)


def test_blocks_that_change_by_calls_what_gradients_need_are_refused(monkeypatch):
    monkeypatch.setattr(compiled_blocks, "BACKEND", "aot_eager")
    lightricks = pytest.importorskip("comfy.ldm.lightricks.model", reason="this ComfyUI has no LTXV")
    if ".addcmul_(" not in inspect.getsource(lightricks):
        pytest.skip("LTX-Video of this ComfyUI makes new tensors")
    patcher = families.build("ltx")
    trained(patcher, "ltx", "off", steps=1)
    with pytest.raises(ValueError, match="set compile to off"):
        trained(patcher, "ltx")
