"""The tests' host with Graft's pack loaded from the repository."""

from __future__ import annotations

import dataclasses
import importlib
import logging
import os
from types import ModuleType
from typing import Any

from graft_nodes.comfyui_api_stubs.tests import host_fixture

REPOSITORY = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def one_link(inputs: dict[str, Any]) -> dict[str, Any]:
    """A node's inputs in which what several settings nodes gave, by part (adapter=..., optimizer=...), is one
    `settings`, as a chain of these nodes gives it.
    """
    parts = {name: value for name, value in inputs.items() if name != "settings" and hasattr(value, "refuse_others")}
    parts.pop("low_noise_settings", None)
    if not parts:
        return inputs
    settings = inputs.get("settings")
    for given in parts.values():
        chosen = {name: getattr(given, name) for name in given.chosen()}
        settings = dataclasses.replace(settings or type(given)(), **chosen)
    rest = {name: value for name, value in inputs.items() if name not in parts}
    return {**rest, "settings": settings}


class Host(host_fixture.Host):
    """An open host that knows Graft's nodes. `pack_log` is what was logged when they did not load."""

    def __init__(self, base: str):
        super().__init__(base)
        self.pack_log = self._load_pack()

    @property
    def real(self) -> bool:
        """Whether this is a real ComfyUI."""
        return "GRAFT_TEST_COMFYUI" in os.environ

    def _load_pack(self) -> str:
        """Load the repository as a custom node; returns what was logged, empty when it loaded."""
        records: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger().addHandler(handler)
        try:
            loaded = self.loop.run_until_complete(self.nodes.load_custom_node(REPOSITORY))
        finally:
            logging.getLogger().removeHandler(handler)
        return "" if loaded else "\n".join(records)

    def node(self, node_id: str) -> type:
        """The class of a node; says why the pack did not load when it is missing."""
        if node_id not in self.nodes.NODE_CLASS_MAPPINGS:
            why = f"; Graft's pack did not load:\n{self.pack_log}" if self.pack_log else ""
            raise KeyError(f"no node {node_id!r} on this host{why}")
        return self.nodes.NODE_CLASS_MAPPINGS[node_id]

    def module(self, name: str) -> ModuleType:
        """A module of the pack, such as "patches.patching.stack_ledger", as the host imported it: under a name of its
        own, beside `graft_nodes`.
        """
        return importlib.import_module(f"{self.node('TrainStep').__module__.rsplit('.', 2)[0]}.{name}")

    def call(self, node_id: str, **inputs: Any) -> tuple:
        """Run one node, its widgets' defaults filled in, with settings by part; returns its outputs as a tuple."""
        return super().call(node_id, **one_link(inputs))

    def template(self, title: str) -> dict[str, Any]:
        """The API graph of a template, as the editor sends it when you press Run."""
        look_up = self.module("headless.embedded").catalogue(
            self.nodes.NODE_CLASS_MAPPINGS, self.nodes.NODE_DISPLAY_NAME_MAPPINGS
        )
        file = os.path.join(REPOSITORY, "example_workflows", f"{title}.json")
        return self.module("headless.workflow_file").read(file).graph(look_up)
