"""Path tricks in Graft's routes: nothing but 4xx, nothing of another folder in an answer, nothing written anywhere
else.
"""

import pytest
from graft_nodes.comfyui_api_stubs.tests.editor.tricks import everything, not_refused, set_trap

ROUTES = [
    ("GET", "/graft/lora_info?name={}"),
    ("GET", "/graft/runs/{}"),
    ("GET", "/graft/runs/{}/latest"),
    ("GET", "/graft/runs/run/{}"),
    ("POST", "/graft/stop?run={}"),
]


@pytest.fixture(scope="module")
def trap(server):
    """Something to steal beside the server's folders, and links to it inside them."""
    return set_trap(server)


@pytest.mark.parametrize(("method", "route"), ROUTES, ids=[f"{method} {route}" for method, route in ROUTES])
def test_every_trick_is_refused(server, trap, method, route):
    assert not_refused(server, method, route) == []
    assert everything(server.place) == trap
