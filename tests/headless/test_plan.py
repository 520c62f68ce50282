"""`plan`: what a workflow's training takes, said without a step."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from graft_nodes.headless import plan
from graft_nodes.headless.command import main
from graft_nodes.headless.embedded import WorkflowError
from graft_nodes.host import memory_planning

TEMPLATE = Path(__file__).resolve().parents[2] / "demo" / "every_node.json"


@pytest.mark.parametrize(
    ("text", "size"),
    [("12GB", 12 * 2**30), ("1.5 gb", 3 * 2**29), ("500MB", 500 * 2**20), ("4096", 4096), ("8G", 2**33)],
)
def test_sizes_are_read(text, size):
    assert plan.memory_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "0GB", "12 apples"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="expected a size such as 12GB"):
        plan.memory_size(text)


def test_only_what_start_training_needs_runs():
    nodes = {"TrainStep": type("TrainStep", (), {"__module__": "graft_nodes.nodes.step"})}
    host = SimpleNamespace(nodes=SimpleNamespace(NODE_CLASS_MAPPINGS=nodes))
    graph = {
        "1": {"class_type": "Loader", "inputs": {}},
        "2": {"class_type": plan.STARTS[0], "inputs": {"model": ["1", 0]}},
        "3": {"class_type": "TrainStep", "inputs": {"state": ["2", 0]}},
        "4": {"class_type": "SaveImage", "inputs": {"images": ["3", 0]}},
    }
    made = plan.of_trainings(host, graph, 7)
    assert sorted(made) == ["1", "2", "plan 2"]
    assert made["plan 2"] == {"class_type": plan.NODE, "inputs": {"state": ["2", 0], "memory": 7}}
    assert nodes.keys() == {"TrainStep", plan.NODE} and nodes[plan.NODE].planning is memory_planning
    assert plan.texts({"plan 2": {"text": ["a"]}, "3": {"text": ["b"]}}) == ["a"]


def test_a_workflow_without_training_has_no_plan():
    host = SimpleNamespace(nodes=SimpleNamespace(NODE_CLASS_MAPPINGS={}))
    with pytest.raises(WorkflowError, match="has no Start Training"):
        plan.of_trainings(host, {"1": {"class_type": "Loader", "inputs": {}}, "2": {"inputs": {}}}, 0)


def test_a_size_that_is_none_is_a_wrong_command_line(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["plan", "w.json", "--memory", "much"])
    assert ended.value.code == 2 and "expected a size such as 12GB, got 'much'" in capsys.readouterr().err


def test_a_missing_file_is_named_with_what_to_do(tmp_path):
    graph = {
        "1": {"class_type": "UNETLoader", "inputs": {"unet_name": "flux.safetensors", "weight_dtype": "default"}},
        "2": {"class_type": plan.STARTS[0], "inputs": {"model": ["1", 0]}},
    }
    path = tmp_path / "w.json"
    path.write_text(json.dumps(graph), encoding="utf-8")
    command = [sys.executable, "-m", "graft_nodes", "plan", str(path), "--embedded"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "'flux.safetensors' is not in the list" in done.stderr
    assert "plan needs the files that the workflow names" in done.stderr.splitlines()[-1]
    assert plan.advice([]) == ""


@pytest.mark.slow
def test_the_demo_is_planned_and_not_trained(tmp_path):
    command = [sys.executable, "-m", "graft_nodes", "plan", str(TEMPLATE), "--embedded", "--memory", "20MB", "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = done.stderr.splitlines()
    assert any(line.startswith("run zorp: a step is planned to take") and "activations" in line for line in said)
    assert any(line.startswith("- gradient checkpointing on: ") for line in said)
    end = json.loads(done.stdout.splitlines()[-1])
    assert end["status"] == "done" and end["files"] == []
    again = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr  # its pictures are in the cache now
