"""torch.compile without what earlier tests have compiled."""

from __future__ import annotations

from contextlib import contextmanager

from graft_nodes.training.run import compiled_blocks


@contextmanager
def graphs_run_as_they_are(monkeypatch):
    """A context in which torch.compile makes its graphs and runs them as they are: the guards are the same for every
    backend.
    """
    import torch._dynamo

    monkeypatch.setattr(compiled_blocks, "BACKEND", "eager")
    compiled_blocks.compiler_for.cache_clear()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    compiled_blocks.compiler_for.cache_clear()
    torch._dynamo.reset()
