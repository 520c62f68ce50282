"""The text encoder is trained where ComfyUI keeps it, on the CPU beside a model on a GPU: its factors lie with it, and
the numbers are those of training on one device.
"""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

pytestmark = pytest.mark.skipif(
    not hasattr(torch.utils.backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch cannot make a device in Python",
)


def _trained(folder, *arguments):
    """(where the trained tensors lay, the trained tensors and averages) of a training in a process of its own."""
    folder.mkdir()
    command = [sys.executable, "-m", "graft_nodes.tests.second_device.train_text_encoder", str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-5000:]
    places = next(line for line in done.stdout.splitlines() if line.startswith("PLACES"))
    return json.loads(places.removeprefix("PLACES")), load_file(folder / "state.safetensors")


LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("adapter", "optimizer", "nearly"),
    [
        ("lora", "adamw", 1e-3),  # a step is 1e-2 long, in the direction of a gradient that may be nearly zero
        pytest.param("full", "sgd", 1e-5, marks=LONG),
        pytest.param("loha", "sgd", 1e-5, marks=LONG),
    ],
)
def test_the_factors_lie_with_the_text_encoder_and_the_numbers_are_the_same(tmp_path, adapter, optimizer, nearly):
    places, apart = _trained(tmp_path / "second", "second", adapter, optimizer)
    assert places == {"text_encoders": ["cpu"], "model": ["second"]}
    places, together = _trained(tmp_path / "cpu", "cpu", adapter, optimizer)
    assert places == {"text_encoders": ["cpu"], "model": ["cpu"]}
    assert apart.keys() == together.keys() and any(name.startswith("average/text_encoders.") for name in apart)
    for name, tensor in together.items():
        torch.testing.assert_close(apart[name], tensor, rtol=0, atol=nearly)
