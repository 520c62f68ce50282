"""Whole workflows under torchrun: any workflow runs, ranks share what they must, a killed rank costs nothing, errors are named."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from graft_nodes.headless.schema import describe
from graft_nodes.nodes import NODES
from graft_nodes.patches.files import load_safetensors

HERE = Path(__file__).resolve().parent
DEMO = HERE.parents[1] / "demo"


@pytest.fixture
def place(tmp_path):
    (tmp_path / "in" / "pictures").mkdir(parents=True)
    for path in sorted((DEMO / "concept").iterdir())[:8]:
        shutil.copy(path, tmp_path / "in" / "pictures")
    return tmp_path


def workflow(**changes):
    """Two training steps in a row on four pictures, an average merged and saved, losses told; `node_input` changes a value."""
    graph = {
        "demo": ("GraftDemo", {}),
        "fails": ("TestFails", {"model": ["demo", 0], "rank": ""}),
        "drawn": ("TestDrawn", {"told": ""}),
        "data": ("GraftDataset", {"folder": "pictures", "vae": ["demo", 2], "clip": ["demo", 1], "resolution": 64, "validation": 0.0}),
        "adapter": ("GraftAdapter", {"rank": 2}),
        "optimizer": ("GraftOptimizer", {"learning_rate": 1e-3, "batch_size": 1, "accumulation": 1, "total_steps": 8}),
        "ema": ("GraftEMA", {"schedule": "ramp"}),
        "start": ("GraftTrainStart", {"model": ["fails", 0], "dataset": ["data", 0], "adapter": ["adapter", 0], "seed": 5, "run": "run",
                                      "optimizer": ["optimizer", 0], "ema": ["ema", 0]}),
        "one": ("TrainStep", {"state": ["start", 0], "steps": 4, "validate_every": 0, "snapshot_every": 1}),
        "two": ("TrainStep", {"state": ["one", 0], "steps": 4, "validate_every": 0, "snapshot_every": 1}),
        "merge": ("EMAMerge", {"model": ["demo", 0], "state": ["two", 0]}),
        "save": ("GraftSaveLoRA", {"lora_model": ["merge", 2], "prefix": "loras/trained", "dtype": "float32"}),
        "seen": ("TestSeen", {"number": ["drawn", 0], "losses": ["two", 4]}),
    }  # fmt: skip
    for name, value in changes.items():
        node, _, key = name.partition("_")
        graph[node][1][key] = value
    return {node: {"class_type": kind, "inputs": {**defaults(kind), **inputs}} for node, (kind, inputs) in graph.items()}


def defaults(kind):
    """The value of every widget of one of Graft's nodes."""
    known = {node.GET_SCHEMA().node_id: node for node in NODES}
    inputs = describe(kind, known[kind]).inputs if kind in known else ()
    return {one.name: one.default for one in inputs if one.widget and one.required}


def run(place, graph, ranks, *more, kill="", restarts=0, out="out"):
    """(status, standard output, standard error) of the command line; `ranks` 0 is without torchrun."""
    path = place / "workflow.json"
    path.write_text(json.dumps(graph))
    (place / out).mkdir(exist_ok=True)
    start = [sys.executable]
    if ranks:
        start += ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--max-restarts", str(restarts), "--master-port", "0",
                  "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]  # fmt: skip
    command = [*start, str(HERE / "drive.py"), "run", str(path), "--embedded", "--cpu", "--input", str(place / "in"), "--output",
               str(place / out), *more]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    environment.update(GRAFT_TEST_PLACE=str(place / out), GRAFT_KILL=kill)
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, env=environment)
    return done.returncode, done.stdout, done.stderr


def lora(place, out="out"):
    (path,) = (place / out / "loras").glob("trained*.safetensors")
    return path.read_bytes()


def test_a_workflow_on_two_ranks_is_the_workflow_with_twice_the_accumulation(place):
    status, said, errors = run(place, workflow(start_seed=["drawn", 0]), 2)
    assert status == 0, errors
    assert "ranks: 2, steps as of 2" in said and "2 ranks, 2 micro-batches a step" in errors + said
    (drawn,) = [path.name for path in (place / "out").glob("drawn-*")]  # one rank drew the seed, the other was told
    number = int(drawn.split("-")[2])
    assert drawn.startswith("drawn-0-") and (place / "out" / "seen-0").is_file() and not (place / "out" / "seen-1").exists()

    alone = workflow(start_seed=number, optimizer_accumulation=2)
    status, _, errors = run(place, alone, 0, out="alone")
    assert status == 0, errors
    assert lora(place) == lora(place, "alone")
    assert states(place / "out") == states(place / "alone")
    seen = [(place / out / "seen-0").read_text().partition("[")[2].split(",") for out in ("out", "alone")]
    assert seen[0] == seen[1] and len(seen[0]) == 8


def states(folder):
    """Every stored state of a run by its key: the bytes of its tensors, and its record but for how long it took."""
    found = {}
    for path in sorted((folder / "graft" / "run").rglob("*")):
        if path.name == "state.json":
            record = json.loads(path.read_bytes())
            found[path.parent.name] = {k: v for k, v in record.items() if k not in ("effort", "sha256", "versions")}
        elif path.suffix == ".safetensors":
            found[str(path.relative_to(folder))] = path.read_bytes()
    return found


def test_a_killed_rank_is_started_again_and_the_end_is_the_same(place):
    kill = "0:1:3:inside,1:0:2:outside"  # a rank inside a collective, then the first one
    status, _, errors = run(place, workflow(), 2, "--as-ranks", "2", kill=kill, restarts=3)
    assert status == 0, errors
    assert "went on from the snapshot" in errors
    status, _, errors = run(place, workflow(), 0, "--as-ranks", "2", out="alone")
    assert status == 0, errors
    assert lora(place) == lora(place, "alone") and states(place / "out") == states(place / "alone")


def test_what_one_rank_cannot_do_is_named_by_the_command(place):
    status, said, errors = run(place, workflow(fails_rank="1"), 2, "--json")
    assert status == 1
    report = json.loads(said.splitlines()[-1])
    assert report["status"] == "failed" and "Rank 1 ended with FileNotFoundError" in report["errors"][0]["message"]
    assert "the disk of this machine has no such model" in report["errors"][0]["message"]
    assert "graft_nodes: rank 1: FileNotFoundError" in errors


def test_an_invalid_workflow_is_said_once_and_every_rank_ends(place):
    status, _, errors = run(place, workflow(two_steps="many"), 2)
    assert status == 1  # torchrun's own
    assert errors.count("the workflow is not valid (1 error); nothing was run") == 1


def test_the_averaged_weights_are_there(place):
    status, _, errors = run(place, workflow(), 2)
    assert status == 0, errors
    (path,) = (place / "out" / "loras").glob("trained*.safetensors")
    assert any(tensor.abs().sum() > 0 for name, tensor in load_safetensors(str(path))[0].items() if "lora_up" in name)
