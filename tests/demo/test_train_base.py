"""The commands that train the base and teach the concept, on a few pictures and steps."""

import os

import pytest
import torch
from graft_nodes import host as wall
from graft_nodes.demo import draw, learn, train_base
from safetensors.torch import load_file, save_file


@pytest.fixture
def few_pictures(monkeypatch, tmp_path):
    monkeypatch.setattr(draw, "PER_CAPTION", 1)
    monkeypatch.setattr(draw, "PSEUDO_PER_CAPTION", 0)
    monkeypatch.setattr(wall.folders, "training_folder", lambda: str(tmp_path / "runs"))


def test_training_changes_the_unet_alone_and_goes_on_after_an_interruption(few_pictures, monkeypatch, capsys):
    first, whole = train_base.start_weights(seed=1), train_base.train(4, seed=1)
    assert whole.keys() == first.keys()
    changed = {key for key in first if not torch.equal(first[key], whole[key])}
    assert changed and all(key.startswith(train_base.UNET) for key in changed)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in whole.values())
    capsys.readouterr()
    again = train_base.train(4, seed=1)
    assert "nothing was trained" in capsys.readouterr().out
    assert all(torch.equal(whole[key], again[key]) for key in whole)

    def interrupted(steps):
        def stepped(step, moved, validation):
            if step == 2:
                raise KeyboardInterrupt

        return stepped

    monkeypatch.setattr(train_base, "RUN", "another")
    report = train_base._reporter
    monkeypatch.setattr(train_base, "_reporter", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train_base.train(4, seed=1)
    monkeypatch.setattr(train_base, "_reporter", report)
    resumed = train_base.train(4, seed=1)
    assert "went on from the snapshot at step 2" in capsys.readouterr().out
    assert all(torch.equal(whole[key], resumed[key]) for key in whole)


def test_the_file_appears_whole_or_not_at_all(tmp_path, monkeypatch):
    weights = {"text.b": torch.ones(2), "text.a": torch.zeros(3)}
    first = train_base.write(weights, tmp_path / "x.safetensors")
    assert first == train_base.write(dict(reversed(weights.items())), tmp_path / "y.safetensors")
    assert load_file(tmp_path / "x.safetensors").keys() == weights.keys()

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        train_base.write({"text.a": torch.ones(1)}, tmp_path / "x.safetensors")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.safetensors", "y.safetensors"]
    assert load_file(tmp_path / "x.safetensors").keys() == weights.keys()


def test_learning_gives_a_lora_that_goes_on_and_leaves_the_base_alone(tmp_path):
    save_file(train_base.start_weights(seed=1), tmp_path / "start.safetensors")
    model, clip, vae = wall.demo.demo_model(str(tmp_path / "start.safetensors"))
    before = {key: tensor.clone() for key, tensor in model.model.state_dict().items()}
    state = learn.learn(model, clip, vae, steps=2)
    lora = state.lora_model(ema=True)
    assert len([key for key in lora if key.endswith(".lora_up.weight")]) == 84
    grafted = learn.applied(model, lora)
    assert grafted is not model
    after = model.model.state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before)
