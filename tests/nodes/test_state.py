"""GraftSaveState and GraftLoadState: a run moves by its name, goes on bit for bit, and says what it lacks."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from graft_nodes.storage.digest import sha256_of_tensors
from graft_nodes.training.store.names import NEWEST, newest_name
from PIL import Image


@pytest.fixture(scope="module")
def parts(host):
    """Model, CLIP, VAE and a dataset of three pictures."""
    folder = os.path.join(host.input, "states")
    os.makedirs(folder, exist_ok=True)
    for i in range(3):
        Image.fromarray(np.full((256, 256, 3), 60 * i, dtype=np.uint8)).save(os.path.join(folder, f"{i}.png"))
    model, clip, vae = host.call("GraftDemo")
    return model, clip, vae, host.call("GraftDataset", folder="states", vae=vae, clip=clip, resolution=256)[0]


def _trained(host, parts, run, steps=2, kind="lora"):
    model, clip, vae, dataset = parts
    adapter = host.call("GraftAdapter", kind=kind, rank=2)[0]
    ema = host.call("GraftEMA", schedule="ramp")[0]
    state = host.call(
        "GraftTrainStart", model=model, dataset=dataset, clip=clip, vae=vae, adapter=adapter, ema=ema, run=run
    )[0]
    return host.call("TrainStep", state=state, steps=steps)[0]


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_a_saved_state_goes_on_bit_for_bit(host, parts, kind):
    state = _trained(host, parts, f"moved {kind}", kind=kind)
    path = host.call(
        "GraftSaveState", state=state, name=f"moved {kind}", max_shard_gb=0.00002 if kind == "lora" else 0.0
    )[0]
    assert path == os.path.join(host.output, "graft_states", f"moved {kind}")
    shards = [name for name in os.listdir(path) if name.endswith(".safetensors")]
    assert (len(shards) > 1) == (kind == "lora")
    loaded = host.call(
        "GraftLoadState", name=f"moved {kind}", model=parts[0], dataset=parts[3], clip=parts[1], vae=parts[2]
    )[0]
    one, two = (host.call("TrainStep", state=s, steps=1) for s in (state, loaded))
    assert one[0].key == two[0].key and sha256_of_tensors(one[3]) == sha256_of_tensors(two[3])


def test_without_a_dataset_it_samples_and_averages_and_training_says_what_is_missing(host, parts):
    state = _trained(host, parts, "bare")
    host.call("GraftSaveState", state=state, name="bare")
    loaded = host.call("GraftLoadState", name="bare", model=parts[0])[0]
    lora = host.call("TrainStep", state=loaded, steps=0)[3]
    assert sha256_of_tensors(lora) == sha256_of_tensors(state.lora_model())
    averaged = host.call("EMAMerge", model=parts[0], state=loaded)[2]
    assert all(torch.allclose(averaged[name], tensor) for name, tensor in state.lora_model(ema=True).items())
    with pytest.raises(ValueError, match=r"loaded without its dataset\. Connect the dataset to Load State"):
        host.call("TrainStep", state=loaded, steps=1)


def test_another_model_is_refused_with_both_named(host, parts, small):
    state = _trained(host, parts, "other")
    host.call("GraftSaveState", state=state, name="other")
    with pytest.raises(
        ValueError,
        match=state.start.model[:16] + r".*the model that is connected is (?!" + state.start.model[:16] + ")",
    ):
        host.call("GraftLoadState", name="other", model=small.unet())


def test_names_are_listed_and_kept_inside(host, parts):
    state = _trained(host, parts, "listed")
    host.call("GraftSaveState", state=state, name="listed")
    options = host.node("GraftLoadState").define_schema().inputs[0].options
    assert "listed" in options
    for name in ("../listed", "a/b", ".."):
        with pytest.raises(ValueError, match="plain folder name"):
            host.call("GraftSaveState", state=state, name=name)
        assert "plain folder name" in host.node("GraftLoadState").validate_inputs(name=name)
    record = json.loads(Path(host.output, "graft_states", "listed", "state.json").read_text(encoding="utf-8"))
    assert record["run"] == "listed" and record["step"] == 2 and record["begun_from"]["model"] == state.start.model


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_the_newest_state_is_the_one_that_was_saved_last(host, parts, kind):
    """EveryDream2's findlast: whatever the names, and whatever was saved before under the same name."""
    state = _trained(host, parts, f"newest {kind}", kind=kind)
    with pytest.raises(FileNotFoundError, match=r"there is no saved state in .* Save one with Save State first"):
        newest_name(Path(host.output, "nothing"))
    load = host.node("GraftLoadState")
    root = Path(host.output, "graft_states")
    for number, name in enumerate((f"zeta {kind}", f"alpha {kind}", f"zeta {kind}")):
        host.call("GraftSaveState", state=state, name=name)
        for record in root.glob("*/state.json"):
            if record.parent.name == name:
                os.utime(record, ns=(10**18, 10**18 + number))
            elif record.parent.name not in (f"zeta {kind}", f"alpha {kind}"):  # those of other tests
                os.utime(record, ns=(0, 0))
        assert newest_name(root) == name
        assert load.fingerprint_inputs(name=NEWEST) == load.fingerprint_inputs(name=name)
    assert NEWEST in load.define_schema().inputs[0].options and load.validate_inputs(name=NEWEST) is True
    loaded = host.call("GraftLoadState", name=NEWEST, model=parts[0])[0]
    assert loaded.step == state.step and loaded.average.keys() == state.average.keys()
    assert all(torch.equal(loaded.average[name], state.average[name]) for name in state.average)
