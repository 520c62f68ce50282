"""A handle takes one thing off, once."""

import pytest
from graft_nodes.patches.core.handle import Handle


def test_it_leaves_once():
    left = []
    handle = Handle(lambda: left.append(1))
    handle.leave()
    handle.leave()
    assert left == [1]


def test_as_a_context_it_leaves_at_the_end_also_after_an_error():
    left = []
    with pytest.raises(KeyError), Handle(lambda: left.append(1)):
        assert not left
        raise KeyError
    assert left == [1]


def test_one_that_fails_does_not_leave_again():
    def fails():
        raise OSError("gone")

    handle = Handle(fails)
    with pytest.raises(OSError, match="gone"):
        handle.leave()
    handle.leave()
