"""Which errors of a rank the others can still hear."""

from types import SimpleNamespace

import pytest
from graft_nodes.training.distributed.gradient_sum import RowShardedGradients


@pytest.mark.parametrize(("until", "broken", "heard"), [(9, False, True), (8, False, False), (9, True, False)])
def test_an_error_between_steps_is_told_while_another_step_comes(until, broken, heard):
    """In steps 0 to `until` - 1, behind step 7: the others wait for the next one, or are done."""
    told = []
    group = SimpleNamespace(rank=0, size=2, shard=True, broken=broken, broadcast_error=told.append)
    gradients, error = RowShardedGradients({}, group), OSError("No space left on device")
    gradients.begin_step(7, 0)  # none is left to compute
    gradients.broadcast_error(error, until)
    assert told == [error] * heard
