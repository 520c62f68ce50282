"""Compares the embedded host's core nodes with the real ones: ids, titles, inputs in order with type and limits,
outputs.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import comfyui_version
import pytest

HERE = os.path.dirname(os.path.abspath(__file__))
FILES = {
    "CheckpointLoaderSimple",
    "UNETLoader",
    "LoraLoader",
    "LoraLoaderModelOnly",
    "LoadImage",
}  # their choices are files
WIDER = {("LatentFromBatch", "batch_index")}  # 0.33.0 takes negative indices too
REAL_HAS_MORE_OUTPUTS = {"SaveImage", "PreviewImage", "PreviewAny"}  # 0.33.0 passes their input on


@pytest.fixture(scope="module")
def embedded():
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("GRAFT_TEST", "COMFYUI"))}
    command = [sys.executable, os.path.join(HERE, "core_node_specs.py")]
    child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert child.returncode == 0, child.stderr[-3000:]
    return json.loads(child.stdout)


@pytest.fixture(scope="module")
def describe():
    spec = importlib.util.spec_from_file_location("core_node_specs", os.path.join(HERE, "core_node_specs.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.described


SINCE_0_33 = {("CLIPLoader", "type"): {"krea2"}}  # choices that older ComfyUIs have not


def test_core_nodes(host, embedded, describe):
    assert len(embedded) >= 25
    version = tuple(int(part) for part in comfyui_version.__version__.split(".")[:2])
    newer = {} if version >= (0, 33) else SINCE_0_33
    for node_id, ours in embedded.items():
        real = json.loads(json.dumps(describe(host.node(node_id))))
        assert list(ours["inputs"]) == list(real["inputs"]), node_id
        assert ours["output_node"] == real["output_node"], node_id
        shown = real["outputs"][: len(ours["outputs"])] if node_id in REAL_HAS_MORE_OUTPUTS else real["outputs"]
        assert ours["outputs"] == shown, node_id
        for name, said in ours["inputs"].items():
            meant = real["inputs"][name]
            assert (said["category"], said["type"]) == (meant["category"], meant["type"]), (node_id, name)
            if (node_id, name) not in WIDER:
                assert said["limits"] == meant["limits"], (node_id, name)
            if node_id not in FILES:
                choices = set(said["choices"]) - newer.get((node_id, name), set())
                assert choices <= set(meant["choices"]), (node_id, name)
