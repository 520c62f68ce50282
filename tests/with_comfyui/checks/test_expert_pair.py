"""Both experts of Wan 2.2 in one run, through the host's executor: tiny models of ComfyUI's own class take turns, stop
and resume to the bytes of runs of their own, are previewed as a pair, and save two files that ComfyUI's loader reads.
"""

import shutil
from pathlib import Path

import comfy.lora
import comfy.lora_convert
import comfy.model_management as management
import comfy.samplers
import pytest
import torch
from families import build, conditions, latent, random
from graft_nodes.storage.digest import sha256_of_tensors
from safetensors import safe_open
from safetensors.torch import load_file

BOUNDARY = 0.875
EXPERTS = ("high noise", "low noise")


class TinyVAE:
    """Stands in for Wan's VAE: a picture of each latent frame."""

    def decode(self, latents):
        return latents[:, :3].permute(0, 2, 3, 4, 1).sigmoid()


class Pair:
    """A node that makes both models anew, as loaders do, with what they are trained on and previewed with."""

    RETURN_TYPES = ("MODEL", "MODEL", "GRAFT_DATASET", "VAE", "CONDITIONING", "CONDITIONING", "LATENT")
    FUNCTION = "make"
    CATEGORY = "test"
    dataset = None

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {}}

    @torch.inference_mode()
    def make(self):
        high, low = build("wan"), build("wan")
        for parameter in low.model.diffusion_model.parameters():
            parameter.mul_(0.9)
        prompts = ([list(conditions("wan", seed))] for seed in (7, 8))
        return high, low, Pair.dataset, TinyVAE(), *prompts, {"samples": torch.zeros(1, 16, 1, 8, 10)}


@pytest.fixture(autouse=True)
def pair_node(host, monkeypatch):
    data = host.module("training.data.dataset")
    captions = {text: data.Conditioning(*conditions("wan", seed)) for seed, text in enumerate(("", "a", "b"))}
    latents = [latent("wan", seed) for seed in range(4)]
    monkeypatch.setattr(Pair, "dataset", data.Dataset.from_latents(latents, ["a", "b"] * 2, captions, held_out=[2]))
    monkeypatch.setitem(host.nodes.NODE_CLASS_MAPPINGS, "GraftTestPair", Pair)


@pytest.fixture
def run(host):
    yield "wan pair"
    for folder in ("graft", "graft_states"):
        for path in Path(host.output, folder).glob("wan pair*"):
            shutil.rmtree(path)


def workflow(host, run, *steps, expert="both", low=True, model=0, **previewed):
    """Start Training, Train Steps in a row that go from expert to expert after each step, and Save LoRA."""

    def node(class_type, **inputs):
        return {"class_type": class_type, "inputs": {**host.defaults(class_type), **inputs}}

    graph = {
        "pair": {"class_type": "GraftTestPair", "inputs": {}},
        "adapter": node("GraftAdapter", rank=2, targets="all"),
        "optimizer": node(
            "GraftOptimizer",
            settings=["adapter", 0],
            learning_rate=1e-2,
            batch_size=2,
            precision="float32",
            total_steps=4,
        ),
        "objective": node("GraftObjective", settings=["optimizer", 0], expert=expert, timesteps="uniform"),
        "ema": node("GraftEMA", settings=["objective", 0], schedule="ramp"),
    }
    begun = {"dataset": ["pair", 2], "vae": ["pair", 3], "settings": ["ema", 0], "run": run}
    if low:
        begun |= {"high_noise_model": ["pair", model], "low_noise_model": ["pair", 1]}
        graph["start"] = node("GraftTrainPairStart", **begun)
    else:
        graph["start"] = node("GraftTrainStart", model=["pair", model], **begun)
    at = ["start", 0]
    for number, count in enumerate(steps):
        graph[f"step{number}"] = node("TrainStep", state=at, steps=count, validate_every=1, switch_every=1, **previewed)
        at = [f"step{number}", 0]
    graph["save"] = node("GraftSaveLoRA", state=at, dtype="float32", prefix=f"loras/{run}")
    return graph


def ran(host, graph, **capture):
    host.fresh()
    result = host.run(graph, capture=capture)
    assert result["success"], result["errors"]
    return result


def trained(host, run, *steps, expert="both", low=True, model=0):
    """The state after the last Train Step."""
    graph = workflow(host, run, *steps, expert=expert, low=low, model=model)
    del graph["save"]
    return ran(host, graph, state=[f"step{len(steps) - 1}", 0])["captured"]["state"]


def whole(state):
    parts = state.trained, state.optimizer, state.average
    return *(sha256_of_tensors(part) for part in parts), state.history, state.step


def forget(host, run):
    for path in Path(host.output, "graft").glob(f"{run}*"):
        shutil.rmtree(path)


@pytest.fixture
def seen(host, monkeypatch):
    """(whether it is the high noise expert, noise level, models on the device) of every picture in training."""
    denoiser, levels = host.module("host.denoiser").Denoiser, []
    denoise = denoiser.denoise

    def watched(self, x, sigma, *more):
        experts = {id(one.model.model) for one in management.current_loaded_models if one.model is not None}
        assert id(self.model) in experts
        first = next(iter(self.model.diffusion_model.parameters()))
        levels.extend((torch.equal(first, watched.high), float(level), len(experts)) for level in sigma)
        return denoise(self, x, sigma, *more)

    watched.high = next(iter(build("wan").model.diffusion_model.parameters())).clone()
    monkeypatch.setattr(denoiser, "denoise", watched)
    return levels


def test_each_expert_sees_its_noise_levels_and_gets_the_bytes_of_a_run_of_its_own(host, run, seen):
    graph = workflow(host, run, 4)
    found = ran(host, graph, state=["step0", 0], report=["start", 1])["captured"]
    assert "from 0.875 up are trained" in found["report"] and "below 0.875 are trained" in found["report"]
    assert len(seen) >= 16 and all((level >= BOUNDARY) == is_high for is_high, level, _ in seen)
    assert all(count == 1 for *_, count in seen), "only the expert whose turn it is lies on the device"
    turns = [is_high for number, (is_high, *_) in enumerate(seen) if not number or is_high != seen[number - 1][0]]
    assert turns == [True, False] * 4
    for number, (expert, state) in enumerate(zip(EXPERTS, found["state"].states, strict=True)):
        assert all(torch.isfinite(torch.tensor(state.history.loss)))
        alone = trained(host, f"{run} alone", 4, expert=expert, low=False, model=number)
        assert whole(alone) == whole(state)


def test_a_run_that_is_cut_interrupted_or_loaded_ends_in_the_same_bytes(host, run, seen, monkeypatch):
    expected = [whole(state) for state in trained(host, run, 4).states]
    forget(host, run)
    calls, denoiser = len(seen), host.module("host.denoiser").Denoiser
    branched = trained(host, run, 2, 2)
    assert [whole(state) for state in branched.states] == expected
    forget(host, run)
    watched = denoiser.denoise

    def interrupted(self, x, sigma, *more):
        if len(seen) >= 2 * calls + calls // 2:
            management.interrupt_current_processing()
        return watched(self, x, sigma, *more)

    graph = workflow(host, run, 4)
    with monkeypatch.context() as patched:
        patched.setattr(denoiser, "denoise", interrupted)
        host.fresh()
        result = host.run(graph)
    assert not result["success"] and "execution_interrupted" in dict(result["events"])
    management.interrupt_current_processing(False)
    done = len(seen)
    resumed = ran(host, graph, state=["step0", 0], report=["step0", 5])["captured"]
    assert [whole(state) for state in resumed["state"].states] == expected
    assert 0 < len(seen) - done < calls, "what was trained before the interruption is not trained again"
    forget(host, run)
    half = trained(host, run, 2)
    host.call("GraftSaveState", state=half, name=run)
    forget(host, run)
    high, low, dataset, vae, *_ = Pair().make()
    loaded = host.call(
        "GraftLoadState", name=f"{run}_low_noise", model=high, low_noise_model=low, dataset=dataset, vae=vae
    )[0]
    on = host.call("TrainStep", state=loaded, steps=2, validate_every=1, switch_every=1)[0]
    assert [whole(state) for state in on.states] == expected


def test_a_preview_is_what_two_ksamplers_make_of_both_trained_models(host, run, monkeypatch):
    """ComfyUI's own KSampler (Advanced) at the step where the noise level falls below the boundary."""
    previews, latents = host.module("host.previews"), []
    decode = previews.decode_alone
    monkeypatch.setattr(previews, "decode_alone", lambda vae, x: latents.append(x.clone()) or decode(vae, x))
    given = {"positive": ["pair", 4], "negative": ["pair", 5], "latent": ["pair", 6], "preview_every": 2}
    graph = workflow(host, run, 4, **given)
    result = ran(host, graph, state=["step0", 0], high=["pair", 0])
    state, model = result["captured"]["state"], result["captured"]["high"]
    assert len(latents) == 4 and len(result["history"]["step0"]["graft_previews"]) == 4
    for ending in ("high_noise", "low_noise"):
        names = sorted(path.name[13:] for path in Path(host.output, "graft", f"{run}_{ending}", "previews").iterdir())
        labels = ("average", "weights")
        assert names == [f"0000000{step}-{label}-0.jpg" for step in (2, 4) for label in labels]
    sigmas = comfy.samplers.calculate_sigmas(model.get_model_object("model_sampling"), "simple", 20)
    border = int((sigmas[:-1] >= BOUNDARY).sum())
    assert 2 < border < 18
    _, high, _, _, low, _ = host.call("GraftSplitExperts", state=state)
    *_, positive, negative, start = Pair().make()
    common = {"noise_seed": state.high.start.seed, "steps": 20, "cfg": 4.0, "sampler_name": "euler"}
    common |= {"scheduler": "simple", "positive": positive, "negative": negative}
    first = host.call(
        "KSamplerAdvanced", model=high, add_noise="enable", latent_image=start, start_at_step=0,
        end_at_step=border, return_with_leftover_noise="enable", **common,
    )[0]  # fmt: skip
    expected, without = (
        host.call(
            "KSamplerAdvanced", model=second, add_noise="disable", latent_image=first, start_at_step=border,
            end_at_step=10000, return_with_leftover_noise="disable", **common,
        )[0]["samples"]
        for second in (low, Pair().make()[1])
    )  # fmt: skip
    scale = float(expected.abs().max())
    assert float((latents[2] - expected).abs().max()) < 2e-3 * scale
    assert float((latents[2] - without).abs().max()) > 1e-2 * scale


def predicted(model, x, sigma, context):
    """What a MODEL predicts in ComfyUI's own way of sampling."""
    management.load_models_gpu([model])
    with torch.no_grad():
        return model.model.apply_model(x, sigma, c_crossattn=context)


def test_both_files_are_read_by_comfyuis_own_loader_with_nothing_left_over(host, run, caplog):
    result = ran(host, workflow(host, run, 3), state=["step0", 0], path=["save", 0])
    state, paths = result["captured"]["state"], result["captured"]["path"].splitlines()
    assert [Path(path).name.rpartition("_0")[0] for path in paths] == [f"{run}_high_noise", f"{run}_low_noise"]
    assert load_file(paths[0]).keys() == load_file(paths[1]).keys()
    _, high, _, _, low, _ = host.call("GraftSplitExperts", state=state)
    base_high, base_low, *_ = Pair().make()
    x, sigma, context = random(1, 16, 1, 8, 10, seed=4), torch.tensor([0.9]), conditions("wan", 3)[0]
    for path, expert, base, model in zip(paths, EXPERTS, (base_high, base_low), (high, low), strict=True):
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
        assert (metadata["graft_expert"], float(metadata["graft_expert_boundary"])) == (expert, BOUNDARY)
        names = comfy.lora.model_lora_keys_unet(base.model, {})
        loaded = comfy.lora.load_lora(comfy.lora_convert.convert_lora(load_file(path)), names, log_missing=True)
        assert not [record.getMessage() for record in caplog.records if "not loaded" in record.getMessage()]
        patched = base.clone()
        assert loaded and set(patched.add_patches(loaded, 1.0)) == set(loaded)
        suffix = ".lora_up.weight"
        assert len(loaded) == sum(name.endswith(suffix) for name in load_file(path))
        plain = predicted(base, x, sigma, context)
        expected, found = predicted(model, x, sigma, context), predicted(patched, x, sigma, context)
        scale = float((expected - plain).abs().max())
        assert scale > 1e-3 and float((found - expected).abs().max()) < 1e-2 * scale
