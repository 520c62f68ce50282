"""Ends what a check has left in the device's streams: memory that it has freed is taken again by the next one."""

import pytest
from graft_nodes.tests.second_device import streams


@pytest.fixture(autouse=True)
def ended():
    yield
    streams.host_waits_for_all()
