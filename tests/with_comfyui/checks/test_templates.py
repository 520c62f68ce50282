"""Each template as it is opened: the first one whole, and those of the six families with tiny random models of
ComfyUI's own classes in place of their loaders. ComfyUI itself names a file that is missing.
"""

import importlib.util
import json
import shutil
import sys
from pathlib import Path

import comfy.sd
import pytest
import torch
from families import build, conditions, random
from graft_nodes.headless import workflow_file
from graft_nodes.headless.embedded import catalogue
from safetensors.torch import save_file
from tiny_families import EVERY

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "example_workflows"
FAMILIES = {
    "SD 1.5": "sd1",
    "SDXL": "sdxl",
    "Flux.1": "flux",
    "Flux Kontext": "flux",
    "Qwen-Image": "qwen",
    "Qwen-Image-Edit": "qwen",
    "Z-Image": "z-image",
    "Z-Image Turbo": "z-image",
    "Krea 2 Turbo": "krea2",
    "Wan": "wan",
    "Wan (image to video)": "wan i2v",
}
PAIRS = {"Wan 2.2": "wan"}  # both of its models


def graph_of(host, title):
    look_up = catalogue(host.nodes.NODE_CLASS_MAPPINGS, host.nodes.NODE_DISPLAY_NAME_MAPPINGS)
    graph = workflow_file.read(str(FOLDER / f"{title}.json")).graph(look_up)
    for node in graph.values():
        small = {"TrainStep": {"steps": 2}, "KSampler": {"steps": 1}, "GraftDataset": {"resolution": 128}}
        small |= {"GraftRecipe": {"steps": 2}, "EmptyLatentImage": {"width": 128, "height": 128}}
        small |= {"GraftOptimizer": {"batch_size": 2}}
        if node["inputs"].get("preview_every"):
            small["TrainStep"]["preview_every"] = 2
        node["inputs"].update(small.get(node["class_type"], {}))
    return graph


def fresh(host):
    """Nothing of the demo, and nothing encoded: the tiny text encoders have one hash."""
    shutil.rmtree(Path(host.input) / "graft_demo", ignore_errors=True)
    shutil.rmtree(Path(host.output) / "graft" / "cache", ignore_errors=True)
    host.fresh()


class TinyVAE:
    """Stands in for a family's VAE: latents of its shape, eight pixels to a side."""

    def __init__(self, shape):
        self.shape = shape

    def encode(self, pixels):
        sides = pixels.shape[1] // 8, pixels.shape[2] // 8
        return torch.stack([random(*self.shape[:-2], *sides, seed=int(image.sum())) for image in pixels])

    def decode(self, latents):
        height, width = latents.shape[-2:]
        return torch.zeros(latents.shape[0], 8 * height, 8 * width, 3) + latents.mean().clamp(0, 1)


def tiny_clip(host, name):
    """A CLIP of ComfyUI's class whose encodings are those of the family's text encoder, at random."""
    (_, clip, _) = host.call("GraftDemo")

    class TinyCLIP(comfy.sd.CLIP):
        def tokenize(self, text, return_word_ids=False, **_):
            return text

        def encode_from_tokens_scheduled(self, tokens, *_, **__):
            return [list(conditions(name, seed=len(tokens)))]

    clip.__class__ = TinyCLIP
    return clip


def stand_in(names, kinds, make):
    """A loader's class that takes any file and gives what `make` makes."""

    class Loader:
        @classmethod
        def INPUT_TYPES(cls):
            return {"required": {name: ("STRING", {}) for name in names}}

        RETURN_TYPES = kinds
        FUNCTION = "load"
        CATEGORY = "test"

        def load(self, **_):
            return make()

    return Loader


def training_adapter(host, name, file):
    """Put a LoRA for a tiny model, with layer names as AI-Toolkit writes them, into the folder of LoRAs."""
    state = {}
    for layer, module in build(name).model.diffusion_model.named_modules():
        if layer.endswith(("attention.qkv", "attention.out", "attn.wq", "attn.wo")):
            state[f"diffusion_model.{layer}.lora_A.weight"] = random(2, module.weight.shape[1], seed=1)
            state[f"diffusion_model.{layer}.lora_B.weight"] = random(module.weight.shape[0], 2, seed=2) * 0.1
    assert state
    folder = Path(host.models) / "loras"
    folder.mkdir(exist_ok=True)
    save_file(state, folder / file)


def stand_in_for_loaders(host, monkeypatch, graph, name):
    """Tiny models of a family in place of the loaders of a graph."""
    parts = {
        "MODEL": lambda: build(name),
        "CLIP": lambda: tiny_clip(host, name),
        "VAE": lambda: TinyVAE(EVERY[name].latent),
    }
    for node in list(graph.values()):
        kind = node["class_type"]
        if kind == "GraftLoRAStack":
            training_adapter(host, name, json.loads(node["inputs"]["rows"])["rows"][0]["file"])
        if kind in ("CheckpointLoaderSimple", "UNETLoader", "CLIPLoader", "DualCLIPLoader", "VAELoader"):
            kinds = tuple(host.node(kind).RETURN_TYPES)
            loader = stand_in(list(node["inputs"]), kinds, lambda kinds=kinds: tuple(parts[part]() for part in kinds))
            monkeypatch.setitem(host.nodes.NODE_CLASS_MAPPINGS, kind, loader)


@pytest.mark.parametrize("title", FAMILIES)
def test_a_family_s_template_trains_shows_previews_saves_and_samples(host, monkeypatch, title):
    name = FAMILIES[title]
    build(name)  # skips where this ComfyUI has no such family
    fresh(host)
    graph = graph_of(host, f"Train a LoRA for {title}")
    stand_in_for_loaders(host, monkeypatch, graph, name)
    ids = {node["class_type"]: node_id for node_id, node in graph.items()}
    result = host.run(graph, capture={"report": [ids["TrainStep"], 5]})
    assert result["success"], result["errors"]
    assert ("training-only LoRA: on" in result["captured"]["report"]) == ("GraftLoRAStack" in ids)
    assert len(result["history"][ids["TrainStep"]]["graft_previews"]) == 2
    prefix = graph[ids["GraftSaveLoRA"]]["inputs"]["prefix"]
    assert list(Path(host.output).glob(f"{prefix}_*.safetensors"))
    assert len(result["history"][ids["SaveImage"]]["images"]) == 1


def low_noise(patcher):
    """Other weights than those of the first model."""
    for parameter in patcher.model.diffusion_model.parameters():
        parameter.mul_(0.9)
    return patcher


@pytest.mark.parametrize("title", PAIRS)
def test_the_template_of_a_pair_trains_both_experts_saves_two_files_and_samples_with_both(host, monkeypatch, title):
    name = PAIRS[title]
    fresh(host)
    graph = graph_of(host, f"Train a LoRA for {title}")
    stand_in_for_loaders(host, monkeypatch, graph, name)
    ids = {node["class_type"]: node_id for node_id, node in graph.items()}
    low = graph[ids["GraftTrainPairStart"]]["inputs"]["low_noise_model"][0]
    names = list(graph[low]["inputs"])
    loader = stand_in(names, ("MODEL",), lambda: (low_noise(build(name)),))
    monkeypatch.setitem(host.nodes.NODE_CLASS_MAPPINGS, "GraftTestLowNoise", loader)
    graph[low]["class_type"] = "GraftTestLowNoise"
    step = ids["TrainStep"]
    capture = {"report": [step, 5], "state": [step, 0], "path": [ids["GraftSaveLoRA"], 0]}
    result = host.run(graph, capture=capture)
    assert result["success"], result["errors"]
    found = result["captured"]
    assert "expert high noise: only noise levels (sigma) from 0.875 up are trained" in found["report"]
    assert "expert low noise: only noise levels (sigma) below 0.875 are trained" in found["report"]
    assert len(result["history"][step]["graft_previews"]) == 2, "with the weights, and with their average"
    prefix = Path(host.output) / graph[ids["GraftSaveLoRA"]]["inputs"]["prefix"]
    endings = ("high_noise", "low_noise")
    for state, ending, path in zip(found["state"].states, endings, found["path"].splitlines(), strict=True):
        assert state.step == 2 and path.startswith(f"{prefix}_{ending}_") and Path(path).is_file()
    assert len(result["history"][ids["SaveImage"]]["images"]) == 1


@pytest.mark.parametrize("title", [*FAMILIES, *PAIRS])
def test_comfyui_names_the_missing_file(host, title):
    spec = importlib.util.spec_from_file_location("write_templates", FOLDER / "write_templates.py")
    script = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = script
    spec.loader.exec_module(script)
    (family,) = (family for family in script.FAMILIES if family.title == title)
    if family.training_only:
        (Path(host.models) / "loras" / family.training_only).unlink(missing_ok=True)
    valid, *_, errors = host.validate(graph_of(host, f"Train a LoRA for {title}"))
    said = json.dumps(errors)
    assert not valid
    for _, values in family.files:
        for name, file in values.items():
            if file.endswith(".safetensors"):
                assert f"{name}: '{file}' not in" in said
    if family.low_noise_model:
        assert f"unet_name: '{family.low_noise_model}' not in" in said
    if family.training_only:
        assert f"no LoRA file '{family.training_only}'" in said


@pytest.mark.parametrize(
    "title",
    [
        "Train your first LoRA",
        "A stack of LoRAs, merged or bypassed",
        "See what your LoRAs do",
        "Train a word without a LoRA",
        "Teach the demo model what you prefer",
        "Train a slider",
        "Repair a VAE's decoder",
        "Train on images from the graph",
        "Train on several folders",
    ],
)
def test_a_template_of_the_demo_model_runs_at_the_first_click(host, title):
    fresh(host)
    shutil.rmtree(Path(host.models) / "loras" / "graft_demo", ignore_errors=True)
    result = host.run(graph_of(host, title))
    assert result["success"], result["errors"]
    assert (Path(host.models) / "loras" / "graft_demo" / "zorp.safetensors").is_file()
    if title == "Train your first LoRA":
        assert len(list((Path(host.input) / "graft_demo" / "concept").glob("*.png"))) == 16
