"""The command that trains the base, on a few pictures and steps."""

import pytest
import torch
from graft_nodes import host as wall
from graft_nodes.demo import draw, train_base


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
    report = train_base.progress_printer
    monkeypatch.setattr(train_base, "progress_printer", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train_base.train(4, seed=1)
    monkeypatch.setattr(train_base, "progress_printer", report)
    resumed = train_base.train(4, seed=1)
    assert "went on from the snapshot at step 2" in capsys.readouterr().out
    assert all(torch.equal(whole[key], resumed[key]) for key in whole)
