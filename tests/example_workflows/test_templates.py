"""The templates: what the script writes is what is committed, each runs as it is opened, with nothing prepared, and a
missing file is named before anything runs.
"""

import importlib.util
import json
import math
import shutil
import sys
from pathlib import Path

import pytest
import torch
from graft_nodes.headless import workflow_file
from graft_nodes.headless.embedded import catalogue

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "example_workflows"
FIRST = "Train your first LoRA"
LORAS = "See what your LoRAs do"
WORDS = "Train a word without a LoRA"
PREFERENCE = "Teach the demo model what you prefer"
SLIDER = "Train a slider"
DECODER = "Repair a VAE's decoder"
SAMPLES = "Train on images from the graph"
FOLDERS = "Train on several folders"
DRAWN = ["A stack of LoRAs, merged or bypassed", "Sample faster with ToDo"]
REAL = sorted(path.stem for path in FOLDER.glob("Train a LoRA for *.json"))
OUTPUTS = {"MODEL": 0, "CLIP": 1, "VAE": 2}  # of Demo Model


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("write_templates", FOLDER / "write_templates.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def graph_of(host, title):
    """The API graph of a template."""
    look_up = catalogue(host.nodes.NODE_CLASS_MAPPINGS, host.nodes.NODE_DISPLAY_NAME_MAPPINGS)
    return workflow_file.read(str(FOLDER / f"{title}.json")).graph(look_up)


def nodes_of(graph, class_type):
    return [node["inputs"] for node in graph.values() if node["class_type"] == class_type]


def id_of(graph, class_type):
    (found,) = (node_id for node_id, node in graph.items() if node["class_type"] == class_type)
    return found


def shortened(graph, steps=2):
    """The same graph with few steps and small images."""
    for node in graph.values():
        inputs = node["inputs"]
        small = {"TrainStep": {"steps": steps}, "KSampler": {"steps": 1}, "GraftRecipe": {"steps": steps}}
        small["GraftDataset"] = {"resolution": 64}
        small["EmptyLatentImage"] = {"width": 64, "height": 64}
        small["GraftOptimizer"] = {"batch_size": 2}
        if inputs.get("preview_every"):
            small["TrainStep"]["preview_every"] = steps
        inputs.update(small.get(node["class_type"], {}))
    return graph


def fresh(host):
    """No folder of the demo, no LoRA of the demo, and nothing cached."""
    shutil.rmtree(Path(host.input) / "graft_demo", ignore_errors=True)
    shutil.rmtree(Path(host.models) / "loras" / "graft_demo", ignore_errors=True)
    host.fresh()


def test_the_committed_templates_are_what_the_script_writes(host, script):
    written = script.templates(host.nodes.NODE_CLASS_MAPPINGS)
    titles = [FIRST, LORAS, WORDS, PREFERENCE, DECODER, SLIDER, SAMPLES, FOLDERS, *DRAWN, *REAL]
    assert titles == sorted(written, key=titles.index)
    for title, document in written.items():
        committed = json.loads((FOLDER / f"{title}.json").read_text(encoding="utf-8"))
        assert committed == json.loads(json.dumps(document)), f"run example_workflows/write_templates.py: {title}"


def test_the_first_template_has_the_blueprint_with_its_ten_settings_as_a_form():
    data = json.loads((FOLDER / f"{FIRST}.json").read_text(encoding="utf-8"))
    blueprint = json.loads((ROOT / "subgraphs" / "Train a LoRA (Graft).json").read_text(encoding="utf-8"))
    (step,) = (node for node in blueprint["definitions"]["subgraphs"][0]["nodes"] if node["type"] == "TrainStep")
    assert step["widgets_values_named"]["preview_every"] == step["widgets_values"][3] == 0, "nothing is connected to it"
    step["widgets_values_named"]["preview_every"] = step["widgets_values"][3] = 50
    assert data["definitions"] == blueprint["definitions"]
    (node,) = (node for node in data["nodes"] if node["type"] == blueprint["nodes"][0]["type"])
    widgets = [slot["name"] for slot in node["inputs"] if "widget" in slot]
    assert len(widgets) == 10
    form = data["extra"]["linearData"]
    assert form["inputs"] == [[node["id"], name] for name in widgets]
    inner = {node["type"]: node["id"] for node in data["definitions"]["subgraphs"][0]["nodes"]}
    *pictures, file, previews = form["outputs"]
    shown = [next(node for node in data["nodes"] if node["id"] == output) for output in pictures]
    assert [(node["type"], node["title"]) for node in shown] == [("SaveImage", "After"), ("SaveImage", "Loss")]
    assert [file, previews] == [f"{node['id']}:{inner[kind]}" for kind in ("GraftSaveLoRA", "TrainStep")]


def test_the_first_template_runs_at_the_first_click(host):
    """In a ComfyUI without the demo's files; a look at it writes none."""
    fresh(host)
    graph = shortened(graph_of(host, FIRST))
    assert nodes_of(graph, "GraftDataset")[0]["folder"] == "graft_demo/concept"
    valid, *_, node_errors = host.validate(json.loads(json.dumps(graph)))
    assert valid and not node_errors
    assert not (Path(host.input) / "graft_demo").exists(), "validation writes nothing"
    dataset, demo = id_of(graph, "GraftDataset"), id_of(graph, "GraftDemo")
    result = host.run(graph, capture={"report": [dataset, 2]})
    assert result["success"], result["errors"]
    assert "put the demo's images into ComfyUI's input folder" in result["captured"]["report"]
    assert "put the demo's LoRA into ComfyUI's loras folder" in result["history"][demo]["text"][0]
    assert len(list((Path(host.input) / "graft_demo" / "concept").glob("*.png"))) == 16
    assert (Path(host.models) / "loras" / "graft_demo" / "zorp.safetensors").is_file()
    assert len(list((Path(host.output) / "loras").glob("first_*.safetensors"))) == 1
    shown = json.loads((FOLDER / f"{FIRST}.json").read_text(encoding="utf-8"))["extra"]["linearData"]["outputs"]
    after, curve, file = (result["history"][str(node)] for node in shown[:3])
    assert len(after["images"]) == 4 and len(curve["images"]) == 1
    (entry,) = file["loras"]
    path = Path(host.output) / entry["subfolder"] / entry["filename"]
    assert path.is_file()
    assert Path(result["history"][id_of(graph, "PreviewAny")]["text"][0]) == path
    again = host.run(graph, capture={"report": [dataset, 2]})
    assert again["success"] and dataset in again["cached"], "the files that were put there change nothing"


@pytest.mark.long
def test_the_first_template_teaches_the_word(host):
    import numpy as np
    from graft_nodes.demo import rule
    from PIL import Image

    fresh(host)
    result = host.run(graph_of(host, FIRST))
    assert result["success"], result["errors"]
    for name, fewest, most in (("before", 0, 0), ("after", 3, 4)):
        files = sorted((Path(host.output) / "first").glob(f"{name}_*.png"))[-4:]
        right = rule.score(np.stack([np.asarray(Image.open(file)) for file in files]), ["a zorp middle"] * 4)
        assert fewest <= right <= most


@pytest.mark.parametrize("title", REAL)
def test_a_missing_file_is_named_before_anything_runs(host, script, title):
    """By the host, and for the editor's button and in the note with where to have it."""
    graph = graph_of(host, title)
    (family,) = (family for family in script.FAMILIES if title.endswith(f" {family.title}"))
    valid, _, _, node_errors = host.validate(json.loads(json.dumps(graph)))
    said = json.dumps(node_errors)
    nodes = json.loads((FOLDER / f"{title}.json").read_text("utf-8"))["nodes"]
    note = nodes[0]["widgets_values"][0]
    offered = {}
    for node in nodes:
        for model in node["properties"].get("models", ()):
            assert model["name"] in node["widgets_values"] and model["url"].startswith("https://huggingface.co/")
            assert model["url"].endswith(f"/{model['name']}")
            offered[model["name"]] = model
    files = {value for _, values in family.files for value in values.values() if value.endswith(".safetensors")}
    assert set(offered) == files | ({family.low_noise_model} - {""})
    for file, model in offered.items():
        assert f"'{file}' not in" in said
        assert f"`models/{model['directory']}/{file}` ([download]({model['url']}), " in note
    if family.training_only:
        assert f"no LoRA file '{family.training_only}'" in said and f"models/loras/{family.training_only}" in note
    assert not valid


def test_a_family_s_template_runs_with_other_models_in_place_of_its_loaders(host):
    """Of each kind of loader one, here with the demo model; tests/with_comfyui has the families' own small models."""
    for title in ("Train a LoRA for SDXL", "Train a LoRA for Flux.1"):
        fresh(host)
        graph = shortened(graph_of(host, title))
        put_in_place(graph, host)
        result = host.run(graph)
        assert result["success"], result["errors"]
        name = nodes_of(graph, "GraftSaveLoRA")[0]["prefix"]
        assert list(Path(host.output).glob(f"{name}_*.safetensors"))
        previews = result["history"][id_of(graph, "TrainStep")]["graft_previews"]
        assert len(previews) == 2, "one with the weights and one with their average"


@pytest.mark.parametrize("title", REAL)
def test_the_recipe_counts_memory_for_the_templates_own_images(host, title):
    graph = graph_of(host, title)
    (recipe,) = nodes_of(graph, "GraftRecipe")
    assert recipe["dataset"] == [id_of(graph, "GraftDataset"), 0]


def test_the_recipes_note_on_wan_says_what_its_template_does(host):
    from graft_nodes.training.recipes.published import PUBLISHED

    graph = graph_of(host, "Train a LoRA for Wan 2.2")
    (start,), (objective,) = nodes_of(graph, "GraftTrainPairStart"), nodes_of(graph, "GraftObjective")
    assert "low_noise_model" in start and start["settings"] == [id_of(graph, "GraftObjective"), 0]
    assert (objective["timesteps"], objective["model_shift"]) == ("uniform", False)
    note = PUBLISHED.get("wan").note
    assert "trains both in one run" in note and "Start Training Expert Pair" in note
    assert "timestep sampling uniform and model's own shift off" in note


class OtherDemo:
    """A node that gives the demo model with other weights: the second one of a pair."""

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "make"
    CATEGORY = "test"
    host = None

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {}}

    def make(self):
        model = OtherDemo.host.call("GraftDemo")[0]
        for parameter in model.model.diffusion_model.parameters():
            parameter.mul_(0.9)
        return (model,)


def test_the_template_of_a_pair_trains_both_in_one_run_with_a_file_for_each(host, monkeypatch):
    """Here with the demo model as both, and a boundary, which it has none of."""
    monkeypatch.setattr(OtherDemo, "host", host)
    monkeypatch.setitem(host.nodes.NODE_CLASS_MAPPINGS, "GraftTestOtherDemo", OtherDemo)
    fresh(host)
    graph = shortened(graph_of(host, "Train a LoRA for Wan 2.2"))
    (objective,) = nodes_of(graph, "GraftObjective")
    assert (objective["expert"], objective["boundary"]) == ("both", 0.0)
    objective["boundary"] = 0.875
    first, second = nodes_of(graph, "KSamplerAdvanced")
    assert (first["start_at_step"], first["end_at_step"], second["start_at_step"]) == (0, 10, 10)
    put_in_place(graph, host)
    graph["low"] = {"class_type": "GraftTestOtherDemo", "inputs": {}}
    (start,) = nodes_of(graph, "GraftTrainPairStart")
    start["low_noise_model"] = ["low", 0]
    step = id_of(graph, "TrainStep")
    result = host.run(graph, capture={"report": [step, 5]})
    assert result["success"], result["errors"]
    report = result["captured"]["report"]
    assert "sigma) from 0.875 up are trained" in report and "sigma) below 0.875 are trained" in report
    previews = [preview["display_name"] for preview in result["history"][step]["graft_previews"]]
    assert previews == ["step 2, weights", "step 2, average"], "of the pair, and of the average that the recipe chose"
    for expert in ("high_noise", "low_noise"):
        (file,) = (Path(host.output) / "loras").glob(f"wan2.2_{expert}_*.safetensors")
        assert file.stat().st_size


def put_in_place(graph, host):
    """Demo Model in place of every loader."""
    graph["demo"] = {"class_type": "GraftDemo", "inputs": {}}
    loaders = {node_id: node["class_type"] for node_id, node in graph.items() if "Loader" in node["class_type"]}
    for node in graph.values():
        for name, value in node["inputs"].items():
            if isinstance(value, list) and value[0] in loaders:
                kind = host.node(loaders[value[0]]).RETURN_TYPES[value[1]]
                node["inputs"][name] = ["demo", OUTPUTS[kind]]
    for loader in loaders:
        del graph[loader]


def test_a_word_is_trained_alone_at_the_first_click(host):
    fresh(host)
    graph = shortened(graph_of(host, WORDS))
    step = id_of(graph, "TrainStep")
    result = host.run(graph, {"state": [step, 0], "model": [step, 1], "base": [id_of(graph, "GraftDemo"), 0]})
    assert result["success"], result["errors"]
    found = result["captured"]
    assert list(found["state"].trained) == ["bundle_emb.zorp.words"] and found["model"] is found["base"]
    (text,) = result["history"][id_of(graph, "GraftSaveWords")]["text"]
    assert text.startswith("embedding:zorp saved in ") and Path(text.partition(" saved in ")[2]).is_file()


def test_a_preference_is_trained_at_the_first_click(host):
    fresh(host)
    graph = shortened(graph_of(host, PREFERENCE))
    result = host.run(graph, {"state": [id_of(graph, "TrainStep"), 0], "report": [id_of(graph, "GraftDataset"), 2]})
    assert result["success"], result["errors"]
    report, state = result["captured"]["report"], result["captured"]["state"]
    assert "preference pairs: 24, as shape-" in report
    assert "put the demo's images into ComfyUI's input folder, as graft_demo/preference" in report
    assert state.settings.objective.loss == "dpo" and state.history.loss[0] == pytest.approx(math.log(2), rel=1e-5)


def test_a_slider_is_trained_and_drawn_at_five_strengths_at_the_first_click(host):
    fresh(host)
    graph = shortened(graph_of(host, SLIDER))
    step = id_of(graph, "TrainStep")
    result = host.run(graph, {"state": [step, 0], "dataset": [id_of(graph, "GraftSlider"), 0]})
    assert result["success"], result["errors"]
    state, dataset = result["captured"]["state"], result["captured"]["dataset"]
    assert state.step == 2 and not dataset.has_pictures and dataset.slider.target == ("a yellow circle middle",)
    (file,) = (Path(host.output) / "loras").glob("slider_*.safetensors")
    assert file.stat().st_size
    rows = [node_id for node_id, node in graph.items() if node["class_type"] == "SaveImage"]
    assert len(rows) == 5 and all(len(result["history"][row]["images"]) == 4 for row in rows)


def test_a_decoder_is_repaired_at_the_first_click(host):
    fresh(host)
    graph = shortened(graph_of(host, DECODER))
    given = {"state": [id_of(graph, "TrainStep"), 0], "vae": [id_of(graph, "GraftTrainedVAE"), 0]}
    result = host.run(graph, {**given, "base": [id_of(graph, "GraftDemoVAE"), 0]})
    assert result["success"], result["errors"]
    state, vae, base = (result["captured"][name] for name in ("state", "vae", "base"))
    assert state.step == 2 and {name.partition(".")[0] for name in state.trained} == {"decoder"}
    ours, theirs = vae.get_sd(), base.get_sd()
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items() if name not in state.trained)
    assert not any(torch.equal(theirs[name], tensor) for name, tensor in state.trained.items() if tensor.ndim > 1)
    rows = [node_id for node_id, node in graph.items() if node["class_type"] == "SaveImage"]
    assert len(rows) == 2 and all(len(result["history"][row]["images"]) == 4 for row in rows)
    assert len(result["history"][id_of(graph, "TrainStep")]["graft_previews"]) >= 1


def test_images_from_the_graph_are_trained_at_the_first_click(host):
    fresh(host)
    graph = shortened(graph_of(host, SAMPLES))
    given = {"state": [id_of(graph, "TrainStep"), 0], "dataset": [id_of(graph, "GraftSamples"), 0]}
    result = host.run(graph, {**given, "latent": [graph[id_of(graph, "GraftSamples")]["inputs"]["latents"][0], 0]})
    assert result["success"], result["errors"]
    state, dataset, latent = (result["captured"][name] for name in ("state", "dataset", "latent"))
    assert (len(dataset.images), len(dataset.held_out)) == (12, 4) and state.step == 2
    drawn = {tuple(one.flatten().tolist()) for one in latent["samples"].float()}
    assert {tuple(image.latent.flatten().tolist()) for image in dataset.images + dataset.held_out} == drawn


def test_two_folders_are_trained_at_the_first_click(host):
    fresh(host)
    graph = shortened(graph_of(host, FOLDERS))
    first, second = sorted(
        (node_id for node_id, node in graph.items() if node["class_type"] == "GraftDataset"),
        key=lambda node_id: "more_images" in graph[node_id]["inputs"],
    )
    capture = {
        "state": [id_of(graph, "TrainStep"), 0],
        "dataset": [second, 0],
        "report": [second, 2],
        "own": [first, 0],
    }
    result = host.run(graph, capture)
    assert result["success"], result["errors"]
    dataset, own, report = (result["captured"][name] for name in ("dataset", "own", "report"))
    assert result["captured"]["state"].step == 2 and own.images and own.held_out
    repeats = {"concept": 4, "regular": 1}
    assert all(image.repeats == repeats[image.name.partition("/")[0]] for image in dataset.images)
    assert len(dataset.images) > len(own.images) and len(dataset.held_out) > len(own.held_out)
    (shown,) = result["history"][id_of(graph, "PreviewAny")]["text"]
    assert shown == report and "graft_demo/regular" in report


def test_loras_are_measured_compared_and_drawn_at_the_first_click(host):
    fresh(host)
    graph = shortened(graph_of(host, LORAS))
    rows = [node["rows"] for kind in ("GraftLoRAStack", "GraftLoadLoRAs") for node in nodes_of(graph, kind)]
    assert rows[0] == rows[1]
    result = host.run(
        graph, {"effect": [id_of(graph, "GraftLoRAEffect"), 1], "between": [id_of(graph, "GraftLoRAConflicts"), 1]}
    )
    assert result["success"], result["errors"]
    assert all(word in str(result["captured"][name]) for name in ("effect", "between") for word in ("zorp", "mauve"))
    (table,) = result["history"][id_of(graph, "GraftLoRAConflicts")]["graft_conflicts"]
    cosines = [cosine for _, cosine, *_ in table["pairs"][0]["blocks"]]
    assert max(cosines) - min(cosines) > 0.2, "the blocks differ, so there is something to see"
    assert 0.3 < max(cosines) < 0.9 and any(table["after"])
    assert (Path(host.models) / "loras" / "graft_demo" / "zorp.safetensors").is_file()
