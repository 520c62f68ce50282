"""A module whose weights come over for a moment is afterwards as it was."""

import pytest
import torch
from graft_nodes.training.memory.offload import layers_on_host
from torch import nn


@pytest.mark.parametrize("own", [False, True])
def test_a_forward_that_somebody_replaced_is_there_again(own):
    module = nn.Sequential(nn.Linear(2, 2))
    if own:
        module.forward = lambda x: x + 1.0
    kept = dict(vars(module))
    with pytest.raises(ValueError, match="inside"), layers_on_host(module, torch.device("cpu")):
        assert vars(module)["forward"] is not kept.get("forward")
        raise ValueError("inside")
    assert vars(module) == kept and vars(module[0]).keys() == vars(nn.Linear(2, 2)).keys()
