"""The main job, from the saved workflows: the demo model learns a word by the pixel rule, keeps what it knew, and is
not changed itself.
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
from graft_nodes.demo import rule, score
from graft_nodes.headless import schema, workflow
from PIL import Image
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[2]
BASE = ROOT / "demo" / "base.safetensors"


def graph_of(host, name):
    """(API graph of a saved example, {title: node id})."""
    look_up = schema.catalogue(host.nodes.NODE_CLASS_MAPPINGS, host.nodes.NODE_DISPLAY_NAME_MAPPINGS)
    graph = workflow.read(str(ROOT / "example_workflows" / f"{name}.json")).graph(look_up)
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
    """The whole of train_and_sample.json run once; what the nodes gave, and the graph."""
    for folder in ("concept", "regular"):
        shutil.copytree(ROOT / "demo" / folder, Path(host.input) / folder, dirs_exist_ok=True)
    graph, titles = graph_of(host, "train_and_sample")
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


def test_the_pictures_show_it_learned(host, trained):
    assert rule.score(pictures(host, "demo/before", 16), ["a zorp middle"] * 16) <= 1
    assert rule.score(pictures(host, "demo/after", 16), ["a zorp middle"] * 16) >= 13
    assert rule.score(pictures(host, "demo/known", 8), ["a green triangle right"] * 8) >= 7


@pytest.mark.long
def test_it_learned_with_and_without_the_average_and_forgot_nothing(trained):
    captions = score.CONCEPT + score.CAPTIONS[::3]
    seen = {}
    for name in ("base", "raw", "average"):
        drawn = score.sample(trained[name], trained["clip"], trained["vae"], captions)
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


def test_the_loss_fell(trained):
    losses = trained["losses"]["loss"]
    assert len(losses) == 250
    assert np.mean(losses[-50:]) < 0.8 * np.mean(losses[:10])


def test_queued_again_nothing_is_trained_and_the_file_is_the_same(host, trained):
    steps = [data for event, data in trained["events"] if event == "graft.step"]
    assert steps
    host.fresh()
    again = host.run(trained["graph"], trained["capture"])
    assert again["success"], again["errors"]
    assert [data for event, data in again["events"] if event == "graft.step"] == []
    assert "stored result" in again["captured"]["report"]
    first, second = sorted((Path(host.output) / "loras").glob("zorp_*.safetensors"))[:2]
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.long
def test_250_steps_at_once_are_100_and_150_byte_for_byte(host, trained, tmp_path):
    graph, first, output = copy.deepcopy(trained["graph"]), trained["titles"]["Train 100 steps"], host.output
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
    assert at_once.read_bytes() == sorted((Path(output) / "loras").glob("zorp_*.safetensors"))[0].read_bytes()


def test_the_saved_file_loads_in_the_host_s_own_loader_to_the_same_picture(host, trained, caplog):
    saved = sorted((Path(host.output) / "loras").glob("zorp_*.safetensors"))[0]
    shutil.copy(saved, Path(host.models) / "loras" / "zorp.safetensors")
    (fresh, clip, vae) = host.call("GraftDemo")
    with caplog.at_level(logging.DEBUG):
        (theirs,) = host.call("LoraLoaderModelOnly", model=fresh, lora_name="zorp.safetensors", strength_model=1.0)
    assert not [record.getMessage() for record in caplog.records if "not loaded" in record.getMessage().lower()]
    ours = score.sample(trained["patched"], clip, vae, ["a zorp middle"] * 2)
    assert np.abs(score.sample(theirs, clip, vae, ["a zorp middle"] * 2) - ours).max() <= 1e-4


def test_a_failing_node_leaves_the_base(host, trained):
    (fresh, clip, vae) = host.call("GraftDemo")
    before, lora = weights_digest(fresh), load_file(sorted((Path(host.output) / "loras").glob("zorp_*"))[0])
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


@pytest.mark.parametrize("name", ["lora_stack", "todo_speed"])
def test_the_other_examples_run(host, trained, name):
    graph, _ = graph_of(host, name)
    result = host.run(graph)
    assert result["success"], result["errors"]
    if name == "lora_stack":
        merge, bypass = (np.stack(pictures(host, f"stack/{mode}", 4)).astype(int) for mode in ("merge", "bypass"))
        assert np.abs(merge - bypass).max() <= 1
        assert rule.score(merge.astype(np.uint8), ["a zorp left"] * 4) >= 3
