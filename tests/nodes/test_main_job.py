"""The main job, from the saved workflows: the demo model learns a word by the pixel rule, keeps what it knew, and is
not changed itself.

The whole of it is in the long runs: `python dev.py demo` runs it too, and fails when the pictures are wrong. The other
tests need only a few steps and pictures.
"""

import copy
import hashlib
import logging
import shutil
from pathlib import Path

import comfy.model_management
import numpy as np
import pytest
import torch
from graft_nodes.demo import compare, rule, score
from graft_nodes.headless import workflow_file
from graft_nodes.headless.embedded import catalogue, workflow
from graft_nodes.host import demo_files
from PIL import Image
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[2]
BASE = ROOT / "demo" / "base.safetensors"
STACK = "example_workflows/A stack of LoRAs, merged or bypassed"


EVERY_NODE = "demo/every_node"


def graph_of(host, name):
    """(API graph of a saved workflow, {title: node id})."""
    look_up = catalogue(host.nodes.NODE_CLASS_MAPPINGS, host.nodes.NODE_DISPLAY_NAME_MAPPINGS)
    graph = workflow_file.read(str(ROOT / f"{name}.json")).graph(look_up)
    assert workflow.check(graph, look_up) == []
    return graph, {workflow.title(graph, node_id): node_id for node_id in graph}


def only(graph, class_type):
    """The id of the one node of this class."""
    (found,) = (node_id for node_id, node in graph.items() if node["class_type"] == class_type)
    return found


def pictures(host, prefix, count):
    """The last `count` saved pictures of a prefix, as arrays."""
    files = sorted(Path(host.output).glob(f"{prefix}_*_.png"))[-count:]
    assert len(files) == count
    return [np.asarray(Image.open(file).convert("RGB")) for file in files]


def weights_digest(model):
    """sha256 of a MODEL's diffusion weights in key order, once no clone of it is loaded."""
    comfy.model_management.unload_all_models()
    digest = hashlib.sha256()
    for name, tensor in sorted(model.model.diffusion_model.state_dict().items()):
        digest.update(name.encode() + tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def file_digest(like):
    """The same digest of the bundled file's tensors, cast to the types that the loader gave them."""
    tensors, digest = load_file(BASE), hashlib.sha256()
    for name, tensor in sorted(like.model.diffusion_model.state_dict().items()):
        stored = tensors[f"model.diffusion_model.{name}"].to(tensor.dtype).contiguous()
        digest.update(name.encode() + stored.view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@pytest.fixture(scope="module")
def trained(host):
    """the training example with 4 and 6 steps and two pictures, run once; what the nodes gave, and the graph."""
    graph, titles = graph_of(host, EVERY_NODE)
    graph[titles["Train 100 steps"]]["inputs"]["steps"] = 4
    graph[titles["Train 150 more"]]["inputs"]["steps"] = 6
    graph[only(graph, "GraftTrainStart")]["inputs"]["run"] = "few steps"
    graph[only(graph, "GraftSaveLoRA")]["inputs"]["prefix"] = "loras/few"
    for node in graph.values():
        if node["class_type"] == "EmptyLatentImage":
            node["inputs"]["batch_size"] = 2
        if node["class_type"] == "SaveImage":
            node["inputs"]["filename_prefix"] += " few"
    return {**run_whole(host, graph, titles), "file": only_file(host, "few")}


@pytest.fixture(scope="module")
def learned(host):
    """The same of the training example as it is."""
    graph, titles = graph_of(host, EVERY_NODE)
    return {**run_whole(host, graph, titles), "file": only_file(host, "zorp")}


def only_file(host, prefix):
    """The one LoRA file that was saved with this prefix."""
    (found,) = (Path(host.output) / "loras").glob(f"{prefix}_*.safetensors")
    return found


def run_whole(host, graph, titles):
    """Run a graph of the training example; what the nodes gave, and the graph."""
    last, merge, demo = (
        titles["Train 150 more"],
        only(graph, "EMAMerge"),
        graph[titles["Sample before"]]["inputs"]["model"][0],
    )
    capture = {
        "base": [demo, 0],
        "clip": [demo, 1],
        "vae": [demo, 2],
        "raw": [last, 1],
        "losses": [last, 4],
        "report": [last, 5],
        "average": [merge, 0],
        "patched": [only(graph, "LoRAStackPatch"), 0],
    }
    result = host.run(graph, capture)
    assert result["success"], result["errors"]
    return {**result["captured"], "graph": graph, "titles": titles, "capture": capture, "events": result["events"]}


@pytest.mark.long
def test_the_pictures_show_it_learned(host, learned):
    assert compare.main([host.output]) == 0
    losses = learned["losses"]["loss"]
    assert len(losses) == 250
    assert np.mean(losses[-50:]) < 0.8 * np.mean(losses[:10])


@pytest.mark.long
def test_it_learned_with_and_without_the_average_and_forgot_nothing(learned):
    captions = score.CONCEPT + score.CAPTIONS[::3]
    seen = {}
    for name in ("base", "raw", "average"):
        drawn = score.sample(learned[name], learned["clip"], learned["vae"], captions)
        seen[name] = rule.score(drawn[:16], captions[:16]), rule.score(drawn[16:], captions[16:])
    assert seen["base"][0] <= 1 and seen["base"][1] >= 14, seen
    for name in ("raw", "average"):
        assert seen[name][0] >= 13 and seen[name][1] >= 0.9 * seen["base"][1], seen


def test_the_average_is_the_same_through_either_node(trained):
    by_node = [
        score.sample(trained[name], trained["clip"], trained["vae"], ["a zorp left"], steps=4)
        for name in ("average", "patched")
    ]
    assert np.abs(by_node[0] - by_node[1]).max() <= 1e-5


def test_the_base_has_the_file_s_bytes(trained):
    assert weights_digest(trained["base"]) == file_digest(trained["base"])


def test_queued_again_nothing_is_trained_and_the_file_is_the_same(host, trained):
    assert len([data for event, data in trained["events"] if event == "graft.step"]) == 10
    host.fresh()
    again = host.run(trained["graph"], trained["capture"])
    assert again["success"], again["errors"]
    assert [data for event, data in again["events"] if event == "graft.step"] == []
    assert "stored result" in again["captured"]["report"]
    first, second = sorted((Path(host.output) / "loras").glob("few_*.safetensors"))
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.long
def test_250_steps_at_once_are_100_and_150_byte_for_byte(host, learned, tmp_path):
    graph, first, output = copy.deepcopy(learned["graph"]), learned["titles"]["Train 100 steps"], host.output
    graph[first]["inputs"]["steps"] = 250
    graph[only(graph, "EMAMerge")]["inputs"]["state"] = [first, 0]
    needed = workflow.reachable(graph, [only(graph, "GraftSaveLoRA")])
    host.fresh()
    host.folder_paths.set_output_directory(str(tmp_path))  # an empty store: nothing to reuse
    try:
        result = host.run({node: entry for node, entry in graph.items() if node in needed})
    finally:
        host.folder_paths.set_output_directory(output)
    assert result["success"], result["errors"]
    assert [data for event, data in result["events"] if event == "graft.step"]
    (at_once,) = (tmp_path / "loras").glob("zorp_*.safetensors")
    assert at_once.read_bytes() == learned["file"].read_bytes()


def test_the_saved_file_loads_in_the_host_s_own_loader_to_the_same_picture(host, trained, caplog):
    shutil.copy(trained["file"], Path(host.models) / "loras" / "few.safetensors")
    (fresh, clip, vae) = host.call("GraftDemo")
    with caplog.at_level(logging.DEBUG):
        (theirs,) = host.call("LoraLoaderModelOnly", model=fresh, lora_name="few.safetensors", strength_model=1.0)
    assert not [record.getMessage() for record in caplog.records if "not loaded" in record.getMessage().lower()]
    ours = score.sample(trained["patched"], clip, vae, ["a zorp middle"] * 2)
    assert np.abs(score.sample(fresh, clip, vae, ["a zorp middle"] * 2) - ours).max() >= 0.01
    assert np.abs(score.sample(theirs, clip, vae, ["a zorp middle"] * 2) - ours).max() <= 1e-4


def test_a_failing_node_leaves_the_base(host, trained):
    (fresh, clip, vae) = host.call("GraftDemo")
    before, lora = weights_digest(fresh), load_file(trained["file"])
    for mode in ("merge", "bypass"):
        (model, *_) = host.call("LoRAStackPatch", model=fresh, lora_model=lora, mode=mode)

        def fails(*_, **__):
            raise RuntimeError("a node raises in the middle")

        broken = model.clone()
        broken.set_model_unet_function_wrapper(fails)
        with pytest.raises(RuntimeError, match="in the middle"):
            score.sample(broken, clip, vae, ["a zorp left"])
        assert score.sample(model, clip, vae, ["a zorp left"]).shape == (1, 256, 256, 3)
        model.detach()
        assert weights_digest(fresh) == before


def test_the_todo_example_runs(host):
    graph, _ = graph_of(host, "example_workflows/Sample faster with ToDo")
    result = host.run(graph)
    assert result["success"], result["errors"]


def test_the_stack_example_draws_the_same_merged_and_at_the_activations(host, trained):
    drawn_by_the_stack(host, trained)


def test_the_stack_example_draws_the_new_word_with_the_demo_s_lora(host):
    """As it is saved, in a ComfyUI that has no such file: Demo Model puts the LoRA into the loras folder."""
    graph, _ = graph_of(host, STACK)
    assert rule.score(drawn(host, graph), ["a zorp left"] * 4) >= 3
    assert (Path(host.models) / "loras" / demo_files.LORA).is_file()


@pytest.mark.long
def test_the_stack_example_draws_the_new_word(host, learned):
    assert rule.score(drawn_by_the_stack(host, learned), ["a zorp left"] * 4) >= 3


def drawn_by_the_stack(host, made):
    """The pictures of the stack example with the LoRA that was saved."""
    graph, _ = graph_of(host, STACK)
    stack = graph[only(graph, "GraftLoRAStack")]["inputs"]
    stack["rows"] = stack["rows"].replace(demo_files.LORA, f"output/loras/{made['file'].name}")
    return drawn(host, graph)


def drawn(host, graph):
    """The pictures of the stack example, which must be the same merged and at the activations."""
    result = host.run(graph)
    assert result["success"], result["errors"]
    merge, bypass = (np.stack(pictures(host, f"stack/{mode}", 4)).astype(int) for mode in ("merge", "bypass"))
    assert np.abs(merge - bypass).max() <= 1
    return merge.astype(np.uint8)
