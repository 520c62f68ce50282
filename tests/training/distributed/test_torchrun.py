"""Whole workflows under torchrun: any workflow runs, ranks share what they must, a killed rank costs nothing, errors
are named.
"""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from graft_nodes.headless.embedded import describe
from graft_nodes.nodes import NODES

HERE = Path(__file__).resolve().parent
DEMO = HERE.parents[2] / "demo"


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """An input folder with four captioned pictures."""
    folder = tmp_path_factory.mktemp("in")
    (folder / "pictures").mkdir()
    for path in sorted((DEMO / "concept").iterdir())[:8]:
        shutil.copy(path, folder / "pictures")
    return folder


@pytest.fixture(scope="module")
def alone(tmp_path_factory, pictures):
    """What one process gives with twice the accumulation."""
    place = tmp_path_factory.mktemp("alone")
    status, _, errors = run(place, pictures, workflow(optimizer_accumulation=2), 0)
    assert status == 0, errors
    return place


def workflow(**changes):
    """Two training steps in a row on four pictures, an average merged and saved, losses told; `node_input` changes a
    value.
    """
    graph = {
        "demo": ("GraftDemo", {}),
        "fails": ("TestFails", {"model": ["demo", 0], "rank": ""}),
        "drawn": ("TestDrawn", {"told": ""}),
        "data": (
            "GraftDataset",
            {"folder": "pictures", "vae": ["demo", 2], "clip": ["demo", 1], "resolution": 64, "validation": 0.0},
        ),
        "adapter": ("GraftAdapter", {"rank": 2}),
        "optimizer": (
            "GraftOptimizer",
            {"settings": ["adapter", 0], "learning_rate": 1e-3, "batch_size": 1, "accumulation": 1, "total_steps": 8},
        ),
        "ema": ("GraftEMA", {"settings": ["optimizer", 0], "schedule": "ramp"}),
        "start": (
            "GraftTrainStart",
            {
                "model": ["fails", 0],
                "dataset": ["data", 0],
                "seed": ["drawn", 0],
                "settings": ["ema", 0],
                "run": "run",
            },
        ),
        "one": ("TrainStep", {"state": ["start", 0], "steps": 4, "validate_every": 0, "snapshot_every": 1}),
        "two": ("TrainStep", {"state": ["one", 0], "steps": 4, "validate_every": 0, "snapshot_every": 1}),
        "merge": ("EMAMerge", {"model": ["demo", 0], "state": ["two", 0]}),
        "save": ("GraftSaveLoRA", {"lora_model": ["merge", 2], "prefix": "loras/trained", "dtype": "float32"}),
        "seen": ("TestSeen", {"number": ["drawn", 0], "losses": ["two", 4]}),
    }
    for name, value in changes.items():
        node, _, key = name.partition("_")
        graph[node][1][key] = value
    return {
        node: {"class_type": kind, "inputs": {**defaults(kind), **inputs}} for node, (kind, inputs) in graph.items()
    }


def defaults(kind):
    """The value of every widget of one of Graft's nodes."""
    known = {node.GET_SCHEMA().node_id: node for node in NODES}
    inputs = describe(kind, known[kind]).inputs if kind in known else ()
    return {one.name: one.default for one in inputs if one.widget and one.required}


def run(place, pictures, graph, ranks, *more, kill="", restarts=0):
    """(status, standard output, standard error) of the command line; `ranks` 0 is without torchrun."""
    path = place / "workflow.json"
    path.write_text(json.dumps(graph))
    start = [sys.executable]
    if ranks:
        start += [
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            str(ranks),
            "--max-restarts",
            str(restarts),
            "--rdzv-backend",
            "c10d",
            "--rdzv-endpoint",
            "localhost:0",
        ]
    host = ["--comfyui", os.environ["GRAFT_TEST_COMFYUI"]] if "GRAFT_TEST_COMFYUI" in os.environ else ["--embedded"]
    command = [
        *start,
        str(HERE / "drive.py"),
        "run",
        str(path),
        *host,
        "--cpu",
        "--input",
        str(pictures),
        "--output",
        str(place),
    ]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "GRAFT_TEST_PLACE": str(place),
        "GRAFT_KILL": kill,
    }
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    done = subprocess.Popen([*command, *more], env=environment, start_new_session=True, **pipes)
    try:
        said, errors = done.communicate(timeout=120 + 30 * restarts)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(done.pid, signal.SIGKILL)
    return done.returncode, said, errors


def results(place):
    """The saved LoRA, and every stored state of the run: the bytes of its tensors, and its record but for how long it
    took.
    """
    (path,) = (place / "loras").glob("trained*.safetensors")
    found = {"lora": path.read_bytes()}
    for path in sorted((place / "graft" / "run").rglob("*")):
        if path.name == "state.json":
            record = json.loads(path.read_bytes())
            found[path.parent.name] = {k: v for k, v in record.items() if k not in ("effort", "sha256")}
        elif path.suffix == ".safetensors":
            found[str(path.relative_to(place))] = path.read_bytes()
    return found


@pytest.mark.long
def test_two_ranks_of_which_one_is_killed_give_what_twice_the_accumulation_gives(tmp_path, pictures, alone):
    status, said, errors = run(tmp_path, pictures, workflow(), 2, kill="0:1:3:inside", restarts=3)
    assert status == 0, errors
    assert (
        said.count("ranks: 2, training as on 2") == 2 and "went on from the snapshot" in errors
    )  # started again, and not from the start
    assert errors.count("2 ranks, 2 micro-batches a step") == 2  # said by one rank, of two steps
    assert results(tmp_path) == results(alone) and len(results(alone)) == 5
    assert (tmp_path / "drawn-0").is_file() and not (
        tmp_path / "drawn-1"
    ).exists()  # one rank drew the seed, the other was told
    assert (tmp_path / "seen-0").read_text() == (alone / "seen-0").read_text() and not (tmp_path / "seen-1").exists()


def test_a_model_that_two_ranks_hold_together_trains_as_one_process_does(tmp_path, pictures, alone):
    status, _, errors = run(tmp_path, pictures, workflow(), 2, "--shard", "--reproducible")
    assert status == 0, errors
    assert results(tmp_path) == results(alone)


@pytest.mark.skipif(
    "GRAFT_TEST_KILLS" not in os.environ, reason="GRAFT_TEST_KILLS=20 kills a rank so often, which takes minutes"
)
def test_ranks_killed_at_random_moments_change_nothing(tmp_path, pictures):
    times, draw = int(os.environ["GRAFT_TEST_KILLS"]), random.Random(0)
    where = ["inside", "outside"] * (times // 2) + ["inside"] * (times % 2)
    draw.shuffle(where)
    kill = ",".join(
        f"{attempt}:{draw.randrange(2)}:{draw.randint(1, 3)}:{place}" for attempt, place in enumerate(where)
    )
    graph = workflow(one_steps=2 * times, two_steps=2 * times)
    ends = []
    for name, killed in (("whole", ""), ("killed", kill)):
        (tmp_path / name).mkdir()
        status, said, errors = run(tmp_path / name, pictures, graph, 2, kill=killed, restarts=times)
        assert status == 0, errors
        ends.append(results(tmp_path / name))
    assert said.count("ranks: 2") == times + 1 and ends[0] == ends[1]


def test_a_rank_that_is_asked_to_end_interrupts_all_and_the_state_is_kept(tmp_path, pictures):
    status, said, _ = run(tmp_path, pictures, workflow(one_snapshot_every=0), 2, "--json", kill="0:1:2:asked")
    assert status == 1  # torchrun's own
    report = json.loads(said.splitlines()[-1])
    assert report["status"] == "interrupted" and report["ranks"] == 2
    (path,) = (tmp_path / "graft" / "run").rglob("state.json")
    assert json.loads(path.read_bytes())["step"] == 2


def test_what_one_rank_cannot_do_is_named_by_the_command(tmp_path, pictures):
    status, said, errors = run(tmp_path, pictures, workflow(fails_rank="1"), 2, "--json")
    assert status == 1
    report = json.loads(said.splitlines()[-1])
    assert report["status"] == "failed" and "Rank 1 ended with FileNotFoundError" in report["errors"][0]["message"]
    assert "the disk of this machine has no such model" in report["errors"][0]["message"]
    assert "graft_nodes: rank 1: FileNotFoundError" in errors


def test_an_invalid_workflow_is_said_once_and_every_rank_ends(tmp_path, pictures):
    status, _, errors = run(tmp_path, pictures, workflow(two_steps="many"), 2)
    assert status == 1  # torchrun's own
    assert errors.count("the workflow is not valid (1 error); nothing was run") == 1
