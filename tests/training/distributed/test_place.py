"""What the environment says of ranks, and which nodes run where."""

import json
import subprocess
import sys

import pytest
import torch
from graft_nodes.headless import rank_placement, torchrun
from graft_nodes.headless.embedded import HostError, Schema
from graft_nodes.patches.lora_files.stack_rows import StackRow
from graft_nodes.training.distributed import wire_format

WHOLE = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "LOCAL_RANK": "1"}


def test_the_environment_of_torchrun_says_where_a_process_stands():
    assert torchrun.place(WHOLE) == torchrun.Place(1, 4, 1)
    assert torchrun.place({}) is None
    assert (
        torchrun.place({"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}) is None
    )  # a cluster's scripts set these for others


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"MASTER_ADDR": ""}, "MASTER_ADDR is missing"),
        ({"RANK": ""}, "RANK is missing"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is '0'"),
        ({"WORLD_SIZE": "none"}, "WORLD_SIZE is 'none'"),
        ({"RANK": "4"}, "RANK is 4 and WORLD_SIZE 4"),
        ({"LOCAL_RANK": "-1"}, "LOCAL_RANK is '-1'"),
    ],
)
def test_an_environment_that_is_not_whole_is_refused(change, said):
    with pytest.raises(HostError, match=said):
        torchrun.place({**WHOLE, **change})


@pytest.mark.parametrize(
    ("command", "said"), [(["run", "x.json"], "MASTER_ADDR is missing"), (["editor"], "MASTER_ADDR is missing")]
)
def test_the_command_says_so(command, said, tmp_path):
    environment = {"RANK": "0", "WORLD_SIZE": "2", "PATH": "", "MASTER_PORT": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "graft_nodes", *command], capture_output=True, text=True, env=environment, cwd=tmp_path
    )
    assert done.returncode == 1 and said in done.stderr and "torchrun --nproc-per-node 2" in done.stderr


def test_the_editor_is_one_process(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "graft_nodes", "editor"],
        capture_output=True,
        text=True,
        env={**WHOLE, "PATH": ""},
        cwd=tmp_path,
    )
    assert done.returncode == 1 and "the editor runs in one process" in done.stderr


def node(kind, **inputs):
    return {"class_type": kind, "inputs": inputs}


KINDS = {
    "Load": ("MODEL", "CLIP"),
    "Text": ("CONDITIONING",),
    "Number": ("INT",),
    "Merge": ("MODEL", "STRING"),
    "Stack": ("LORA_STACK", "STRING"),
    "Start": ("TRAIN_STATE", "STRING"),
    "TrainStep": ("TRAIN_STATE", "MODEL", "CLIP", "LORA_MODEL", "LOSS_MAP", "STRING"),
    "Sample": ("LATENT",),
    "Picture": ("IMAGE",),
}


def look_up(kind):
    return Schema(kind, (), KINDS[kind], False)


GRAPH = {
    "load": node("Load"),
    "stack": node("Stack"),
    "merge": node("Merge", model=["load", 0], lora_stack=["stack", 0]),
    "latent": node("Sample", model=["load", 0]),
    "prompt": node("Text", clip=["load", 1]),
    "more": node("Text", clip=["load", 1]),
    "seed": node("Number"),
    "steps": node("Number", latent=["latent", 0]),
    "start": node("Start", model=["merge", 0], seed=["seed", 0]),
    "one": node(
        "TrainStep",
        state=["start", 0],
        steps=["steps", 0],
        positive=["prompt", 0],
        latent=["latent", 0],
        preview_every=5,
        prompts=["more", 0],
    ),
    "two": node("TrainStep", state=["one", 0], steps=3),
    "sample": node("Sample", model=["two", 1], positive=["prompt", 0]),
    "picture": node("Picture", latent=["sample", 0]),
}


def test_live_things_are_made_everywhere_and_plain_results_are_sent():
    everywhere, sent = rank_placement.sent(GRAPH, rank_placement.trained(GRAPH, ["picture", "one"]), look_up)
    assert everywhere == {"one", "two", "start", "merge", "load"}
    assert sent == {
        "stack": [0],
        "seed": [0],
        "steps": [0],
    }  # and nothing that these stand on, nor what only previews need


SENT = ("INT", "FLOAT", "STRING", "BOOLEAN", "COMBO", "LATENT", "IMAGE", "MASK", "AUDIO", "SIGMAS", "CONDITIONING")
SENT += ("LORA_MODEL", "LORA_STACK", "LOSS_MAP")
MADE = ("MODEL", "CLIP", "VAE", "TRAIN_STATE", "CONTROL_NET", "*")


@pytest.mark.parametrize(("kind", "is_sent"), [*((kind, True) for kind in SENT), *((kind, False) for kind in MADE)])
def test_what_holds_tensors_texts_and_numbers_alone_is_sent(kind, is_sent):
    graph = {
        "made": node("Make"),
        "start": node("Start", given=["made", 1]),
        "one": node("TrainStep", state=["start", 0]),
    }
    schemas = {"Make": Schema("Make", (), ("MODEL", kind), False)}
    everywhere, sent = rank_placement.sent(graph, ["one"], lambda name: schemas.get(name) or look_up(name))
    if is_sent:
        assert everywhere == {"one", "start"} and sent == {"made": [1]}
    else:
        assert everywhere == {"one", "start", "made"} and sent == {}


def test_the_first_rank_sends_what_the_others_take():
    everywhere, sent = rank_placement.sent(GRAPH, ["one", "two"], look_up)
    first, others = (
        rank_placement.first(GRAPH, everywhere, sent),
        rank_placement.others(GRAPH, everywhere, sent, ["one", "two"]),
    )
    assert (
        first.keys() - GRAPH.keys() == {rank_placement.carrier(name) for name in sent} and GRAPH.keys() <= first.keys()
    )
    assert others.keys() == everywhere | {rank_placement.carrier(name) for name in sent}
    for graph in (first, others):
        assert graph["start"]["inputs"]["seed"] == [rank_placement.carrier("seed"), 0]
        assert graph["merge"]["inputs"]["lora_stack"] == [rank_placement.carrier("stack"), 0]
    assert first["steps"]["inputs"]["latent"] == ["latent", 0] and first["one"]["inputs"]["latent"] == ["latent", 0]
    shown = {"preview_every": 0, "tensorboard": False, "prompts": ""}
    assert others["one"]["inputs"] == {"state": ["start", 0], "steps": [rank_placement.carrier("steps"), 0], **shown}
    assert GRAPH["one"]["inputs"]["preview_every"] == 5 and json.dumps(others)


def test_values_travel_as_they_are():
    value = [
        {"samples": torch.randn(2, 3).to(torch.bfloat16), "more": (1, 2.5, float("inf"), None, True), 3: "three"},
        [["conditioning", {"pooled": torch.zeros(0, 4), "mask": torch.ones(2, dtype=torch.bool)}]],
        [StackRow("a.safetensors", 0.5, 1.0, "IN=0", "0.2-0.8", True)],
    ]
    back = wire_format.decode(wire_format.encode(value))
    assert torch.equal(back[0]["samples"], value[0]["samples"]) and back[0]["samples"].dtype == torch.bfloat16
    assert back[0]["more"] == value[0]["more"] and back[0][3] == "three"
    assert back[1][0][1]["pooled"].shape == (0, 4) and back[1][0][1]["mask"].dtype == torch.bool
    (row,) = back[2]
    assert (
        row == value[2][0]
        and (row.blocks, row.schedule, row.partial) == ("IN=0", "0.2-0.8", True)
        and isinstance(row, StackRow)
    )


def test_what_is_alive_is_refused_with_its_place():
    with pytest.raises(TypeError, match=r"value\[1\]\['hooks'\] is a builtins.object"):
        wire_format.encode([1, {"hooks": object()}])
