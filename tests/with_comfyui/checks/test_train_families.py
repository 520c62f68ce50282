"""Training every family of models through the host's executor: tiny models of ComfyUI's own classes, made in inference
mode.
"""

import contextlib
import importlib
import json
import os
import random as python_random
import re
import shutil
from dataclasses import replace
from pathlib import Path

import comfy.lora
import comfy.model_management
import comfy.model_sampling
import comfy.ops
import comfy.samplers
import numpy
import pytest
import torch
from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel
from families import (
    build,
    conditioning,
    conditions,
    connects_text_of_ltx_2,
    latent,
    latents,
    masks_text_of_lumina,
    parts_of,
    random,
)
from graft_nodes import host as wall
from graft_nodes.host.plain_kernels import PlainKernels
from graft_nodes.patches.adapters.diff import difference_name
from graft_nodes.patches.lora_files.entry import LoraEntry
from graft_nodes.patches.lora_files.save import names_comfyui_ignores, to_key_format
from graft_nodes.patches.models.layers import is_linear
from graft_nodes.patches.token_downsampling.tokens import ToDoSettings
from graft_nodes.patches.token_downsampling.unet import TRAINING
from graft_nodes.training.data.dataset import Conditioning, Dataset
from graft_nodes.training.memory import saved_tensors
from graft_nodes.training.memory.checkpointing import blocks, checkpoint_blocks
from graft_nodes.training.objective.loss import losses
from graft_nodes.training.objective.settings import ObjectiveSettings
from graft_nodes.training.optimizers.settings import OptimizerSettings
from graft_nodes.training.run import step as steps
from graft_nodes.training.run import workspace
from graft_nodes.training.state import Settings, Start, begin
from graft_nodes.training.trainable.install import attach, init_trainable, make_lora
from graft_nodes.training.trainable.settings import AdapterSettings
from graft_nodes.training.trainable.targets import adapter_targets
from tiny_families import CLIPS, EVERY, FAMILIES, OTHERS

from ...file_as_module import file_as_module

NAMES = list(FAMILIES)
KINDS = ("lora", "locon", "loha", "lokr", "dora", "oft")


def dataset(name, cls=Dataset, kind=Conditioning):
    captions = {text: kind(*conditions(name, seed)) for seed, text in enumerate(("", "a", "b"))}
    return cls.from_latents([latent(name, seed) for seed in range(3)], ["a", "b", "a"], captions, held_out=[2])


class Model:
    """A node that builds a tiny model inside the executor, as a loader does, and its dataset, of the pack's own
    classes.
    """

    name, checked = "", {}

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"name": ("STRING", {"default": ""}), "dtype": ("STRING", {"default": "float32"})}}

    RETURN_TYPES = ("MODEL", "GRAFT_DATASET")
    FUNCTION = "make"
    CATEGORY = "test"

    def make(self, name, dtype):
        weights, _, cast = dtype.partition(" ")
        patcher = build(name, getattr(torch, weights), getattr(torch, cast) if cast else None)
        assert all(p.is_inference() for p in patcher.model.parameters())
        comfy.model_management.load_models_gpu(
            [patcher], force_full_load=True
        )  # the host's load marks modules in its own way
        Model.checked = picture_of(patcher)
        import nodes

        package = nodes.NODE_CLASS_MAPPINGS["TrainStep"].__module__.rpartition(".nodes.")[0]
        own = importlib.import_module(f"{package}.training.data.dataset")
        return patcher, dataset(name, own.Dataset, own.Conditioning)


def picture_of(patcher):
    """Everything that training must leave as it was."""
    module = patcher.model
    return {
        "bytes": {
            name: t.detach().contiguous().view(torch.uint8).clone() for name, t in module.state_dict().items() if t.ndim
        },
        "objects": {name: id(t) for name, t in module.named_parameters()},
        "gradients": {name: (t.requires_grad, t.grad is None) for name, t in module.named_parameters()},
        "modules": {
            name: (type(m), m.training, sorted(m.__dict__), len(m._forward_hooks), len(m._forward_pre_hooks))
            for name, m in module.named_modules()
        },
    }


def same(before, patcher):
    now = picture_of(patcher)
    assert not [name for name, t in before["bytes"].items() if not torch.equal(t, now["bytes"][name])]
    for key in ("objects", "gradients", "modules"):
        assert before[key].keys() == now[key].keys()
        assert not [(name, value, now[key][name]) for name, value in before[key].items() if value != now[key][name]], (
            key
        )
    return True


@contextlib.contextmanager
def global_draws_untouched():
    before = torch.get_rng_state(), numpy.random.get_state()[1].copy(), python_random.getstate()
    yield
    assert torch.equal(torch.get_rng_state(), before[0]) and (numpy.random.get_state()[1] == before[1]).all()
    assert python_random.getstate() == before[2]


def workflow(host, name, run, adapter, optimizer=None, dtype="float32", count=2):
    def node(node_id, **given):
        return {"class_type": node_id, "inputs": {**host.defaults(node_id), **given}}

    return {
        "1": node("GraftTestModel", name=name, dtype=dtype),
        "2": node("GraftAdapter", **{"rank": 2, "targets": "all", **adapter}),
        "3": node(
            "GraftOptimizer",
            settings=["2", 0],
            **{"learning_rate": 5e-3, "batch_size": 2, "total_steps": 4, **(optimizer or {})},
        ),
        "4": node("GraftTrainStart", model=["1", 0], dataset=["1", 1], settings=["3", 0], run=run),
        "5": node("TrainStep", state=["4", 0], steps=count, validate_every=1),
    }


def train(host, name, adapter, optimizer=None, dtype="float32", count=2):
    """The captured outputs of one run through the executor; the base is as it was."""
    host.nodes.NODE_CLASS_MAPPINGS.update(GraftTestModel=Model)
    host.fresh()
    shutil.rmtree(
        os.path.join(host.output, "graft"), ignore_errors=True
    )  # checkpointing is not part of a run's identity
    prompt = workflow(host, name, f"family {name}".replace(" ", "-"), adapter, optimizer, dtype, count)
    result = host.run(
        prompt, capture={"state": ["5", 0], "lora": ["5", 3], "model": ["1", 0], "start": ["4", 0], "report": ["5", 5]}
    )
    assert result["success"], json.dumps(result["errors"], default=str, indent=1)[:3000]
    assert f"{count} trained now" in result["captured"]["report"]
    assert same(Model.checked, result["captured"]["model"])
    return result["captured"]


def available(name):
    if not hasattr(comfy.supported_models, EVERY[name].supported):
        pytest.skip(f"this ComfyUI has no {EVERY[name].supported}")


@pytest.mark.parametrize("name", NAMES)
def test_a_run_through_the_executor(host, name):
    """At step 1 every trained tensor has a gradient; checkpointing gives the same bytes; nothing else is changed."""
    available(name)
    with global_draws_untouched():
        plain = train(host, name, {"kind": "locon"})
    forgetful = train(host, name, {"kind": "locon"}, {"checkpointing": True})
    state, start = plain["state"], plain["start"]
    slots = {key.split("/", 1)[1] for key in state.optimizer if key.startswith("exp_avg/")}
    assert slots == set(state.trained) and not state.trained.keys() - start.trained.keys()
    assert all(torch.isfinite(t).all() for t in state.trained.values())
    moved = [key for key, t in state.trained.items() if not torch.equal(t, start.trained[key])]
    assert len(moved) > 0.9 * len(state.trained) and len(state.history.validation) == 3
    assert all(torch.equal(t, forgetful["state"].trained[key]) for key, t in state.trained.items())
    assert state.history.loss == forgetful["state"].history.loss
    if name == "sd1":
        return
    for loss in state.history.loss:
        assert 0.01 < loss < 20  # an objective of the model's own scale


@pytest.mark.parametrize("name", OTHERS)
def test_other_families_through_the_executor(host, name):
    """With and without checkpointing the same bytes; the base is as it was."""
    available(name)
    plain = train(host, name, {"kind": "lora"})["state"]
    forgetful = train(host, name, {"kind": "lora"}, {"checkpointing": True})["state"]
    assert plain.trained.keys() and all(torch.equal(t, forgetful.trained[key]) for key, t in plain.trained.items())
    assert {key.split("/", 1)[1] for key in plain.optimizer if key.startswith("exp_avg/")} == set(plain.trained)
    for loss in plain.history.loss:
        assert 0.01 < loss < 20


@pytest.mark.parametrize("name", NAMES)
def test_full_weights_through_the_executor(host, name):
    available(name)
    found = train(host, name, {"kind": "full", "rank": 16}, {"checkpointing": True}, count=1)
    state = found["state"]
    assert {key.split("/", 1)[1] for key in state.optimizer if key.startswith("exp_avg/")} | unread(name, state) == set(
        state.trained
    )


@pytest.mark.parametrize("name", NAMES)
def test_the_differences_that_comfyuis_loader_ignores_are_known(name):
    available(name)
    module = build(name).model.diffusion_model
    inner = set()
    for path, part in module.named_modules():
        own = dict(part.named_parameters(recurse=False))
        if any(key not in own for key, _ in part.named_parameters()):  # what ModelPatcher's _load_list leaves out
            inner |= {f"{path}.{key}".lstrip(".") for key in own}
    differences = {f"diffusion_model.{difference_name(key)}": p.detach() for key, p in module.named_parameters()}
    assert set(names_comfyui_ignores(differences)) == inner


def unread(name, state):
    """Parameters that no forward of text to image reads."""
    names = {
        "qwen": ("transformer_blocks.1.txt_mod",),
        "lumina2": ("x_pad_token", "cap_pad_token", "norm_final"),
        "z-image": ("x_pad_token", "cap_pad_token"),
    }.get(name, ())
    return {key for key in state.trained if key.startswith(names)} if names else set()


def adapter(name, kind="lora", targets="all"):
    return AdapterSettings(kind, rank=2, targets=targets, with_sound=bool(EVERY[name].sound))


def sampled(patcher, x, sigma, context, extras, parts=()):
    """The denoised latents that the host's own sampler computes, of latents and a noise level as training counts.

    Those of video with its sound, whose shapes are `parts`, are packed.
    """
    if isinstance(patcher.get_model_object("model_sampling"), comfy.model_sampling.COSMOS_RFLOW):
        x, sigma = x / (1 - sigma), sigma / (1 - sigma)
    getattr(patcher.model.diffusion_model, "clear_kv_cache", lambda: None)()  # of captions, with other weights
    guider = comfy.samplers.CFGGuider(patcher)
    guider.set_conds([[context, extras]], [[context, extras]])
    guider.set_cfg(1.0)
    seen = []

    def one_step(model, noise, sigmas, extra_args=None, **_):
        seen.append(model(x, sigmas[:1], **extra_args))
        return noise

    empty = torch.zeros_like(x)
    if parts:
        nested = importlib.import_module("comfy.nested_tensor").NestedTensor
        empty = nested([torch.zeros(1, *shape) for shape in parts])
    levels = torch.cat([sigma, torch.zeros(1)])
    guider.sample(empty, empty, comfy.samplers.KSAMPLER(one_step), levels, seed=0)
    return seen[0]


def with_file(patcher, lora, name="model"):
    """A clone with the LoRA on it by the host's own loader."""
    names = comfy.lora.model_lora_keys_unet(patcher.model, {})
    loaded = comfy.lora.load_lora(lora, names, log_missing=True)
    clone = patcher.clone()
    applied = clone.add_patches(loaded, 1.0)
    assert set(applied) == set(loaded) and len(loaded)
    return clone


def moved(patcher, settings, size=0.05):
    draws = torch.Generator().manual_seed(9)
    base = {key: p.detach() for key, p in patcher.model.diffusion_model.named_parameters()}
    start = init_trainable(patcher.model.diffusion_model, settings, 0, base)
    return {key: t + size * torch.randn(t.shape, generator=draws) for key, t in start.items()}


def still():
    return 0, 0, ""


def denoised(patcher, settings, trained, x, sigma, name, tokens=6):
    text = conditioning(*conditions(name, 3, tokens), parts_of(name))
    with wall.denoiser.open_denoiser(patcher) as denoiser, attach(denoiser.module, settings, trained, still):
        return denoiser.denoise(x, sigma, [text], {})


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", KINDS)
def test_training_computes_what_the_host_samples_with_the_file(name, kind):
    """The exported file through ComfyUI's own loader and sampler (conditions, guidance and masks included) against
    training's forward.
    """
    available(name)
    if kind != "locon" and name not in ("sd1", "flux", "wan", "qwen"):
        pytest.skip("one kind is enough there")
    patcher, settings = build(name), AdapterSettings(kind, rank=2, alpha=0.0 if kind == "oft" else 1.0, targets="all")
    trained = moved(patcher, settings)
    x, context, extras = random(1, *FAMILIES[name].latent, seed=4), *conditions(name, 3)
    with torch.no_grad():
        sigma = wall.denoiser.Denoiser(patcher).sigma(torch.tensor([0.6]))
        found = denoised(patcher, settings, trained, x, sigma, name)
        plain = sampled(patcher, x, sigma, context, {**extras, "guidance": 1.0})
        expected = sampled(
            with_file(patcher, make_lora(trained, settings, None)), x, sigma, context, {**extras, "guidance": 1.0}
        )
    scale = float((expected - x).abs().max())
    assert float((found - expected).abs().max()) < 2e-4 * scale
    assert float((plain - expected).abs().max()) > 1e-2 * scale


def test_the_comfyui_that_cannot_mask_text_of_lumina_2_is_known():
    """With PyTorch's attention, as on a GPU, it ends with an error for masked tokens, without Graft too."""
    patcher, x, sigma = build("lumina2"), random(1, *FAMILIES["lumina2"].latent, seed=4), torch.tensor([0.6])
    attention = importlib.import_module("comfy.ldm.modules.attention").attention_pytorch
    options = patcher.model_options.setdefault("transformer_options", {})
    options["optimized_attention_override"] = lambda _, *args, **kwargs: attention(*args, **kwargs)
    mask = {"attention_mask": torch.tensor([[1, 1, 1, 1, 0, 0]]), "guidance": 1.0}
    refused = contextlib.nullcontext()
    if not masks_text_of_lumina():
        refused = pytest.raises(RuntimeError, match="Expected attn_mask dtype")
    with torch.no_grad(), refused:
        assert torch.isfinite(sampled(patcher, x, sigma, random(1, 6, 12), mask)).all()


def is_real(value):
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def graded(patcher, settings, trained, x, sigma, name, way):
    text = conditioning(*conditions(name, 3), parts_of(name))
    with wall.denoiser.open_denoiser(patcher) as denoiser, attach(denoiser.module, settings, trained, still):
        (denoiser.denoise(x, sigma, [text], {}) * way).sum().backward()


def tried(patcher, settings):
    """A few of the layers that are trained, from the first to the last, and of those of sound."""
    paths = list(adapter_targets(patcher.model.diffusion_model, settings))
    silent = adapter_targets(patcher.model.diffusion_model, replace(settings, with_sound=False))
    of_sound = [path for path in paths if path not in silent]
    assert bool(of_sound) == settings.with_sound
    chosen = [paths[0], paths[len(paths) // 3], paths[2 * len(paths) // 3], paths[-1]]
    return dict.fromkeys([*chosen, *of_sound[:1], *of_sound[len(of_sound) // 2 :][:1]])


@pytest.mark.column("gradients")
@pytest.mark.parametrize("name", EVERY)
def test_gradients_are_those_of_finite_differences_of_sampling(name):
    """Along random directions of a few tensors, against central differences of the host's own forward with the file
    applied.
    """
    available(name)
    patcher, settings = build(name), adapter(name, "locon")
    trained = {key: t.requires_grad_() for key, t in moved(patcher, settings).items()}
    x, context, extras = latents(name, 4), *conditions(name, 3)
    extras, parts = {**extras, "guidance": 1.0}, parts_of(name)
    way = random(*x.shape, seed=5)
    sigma = wall.denoiser.Denoiser(patcher).sigma(torch.tensor([0.6]))
    graded(patcher, settings, trained, x, sigma, name, way)
    for path in tried(patcher, settings):
        key = f"{path}.lora_up.weight"
        direction = random(*trained[key].shape, seed=6)
        values = []
        for sign in (1, -1):
            file = make_lora({**trained, key: trained[key].detach() + sign * 0.004 * direction}, settings, None)
            with torch.no_grad():
                found = sampled(with_file(patcher, file), x, sigma, context, extras, parts)
            values.append(float((found.double() * way).sum()))
        expected = (values[0] - values[1]) / 0.008
        if name not in FAMILIES and trained[key].grad is None:  # a part for pictures as references
            assert expected == 0
            continue
        assert float((trained[key].grad * direction).sum()) == pytest.approx(
            expected, rel=2e-2, abs=2e-3 * float(way.norm())
        ), key


@pytest.mark.column("checkpointing")
@pytest.mark.parametrize("name", EVERY)
def test_checkpointed_gradients_are_the_same_bytes(name):
    """Of adapters and of what a text encoder that is trained gives: blocks run again in the backward pass change
    tensors in place too.
    """
    available(name)
    settings = adapter(name, targets="attention+ff")
    patcher, found = _checkpointed_or_not(name, settings)
    assert len(blocks(patcher.model.diffusion_model)) > 1 and all(bool(t.any()) for t in found.values())
    given = {"context", *(key for key, t in conditions(name, 3)[1].items() if is_real(t))}
    adapters = set(moved(patcher, settings))
    assert name not in FAMILIES or found.keys() == adapters | given


@pytest.mark.column("clips")
@pytest.mark.parametrize("name", CLIPS)
def test_clips_of_three_frames_train(name):
    """Two in a batch: all adapters learn, with the same bytes with checkpointing."""
    available(name)
    settings = adapter(name)
    patcher, found = _checkpointed_or_not(name, settings, frames=3)
    adapters = moved(patcher, settings)
    assert adapters and not [key for key in adapters if key not in found or not bool(found[key].any())]


def _checkpointed_or_not(name, settings, frames=None):
    """A model and its gradients of adapters and conditioning, the same bytes with and without checkpointing."""
    patcher, x, found = build(name), latents(name, 4, 2, frames), []
    way = random(*x.shape, seed=5)
    for forgetful in (contextlib.nullcontext, checkpoint_blocks):
        graded = {key: t.requires_grad_() for key, t in moved(patcher, settings).items()}
        context, extras = conditions(name, 3)
        given = {"context": context} | {key: t for key, t in extras.items() if is_real(t)}
        given = {key: t.clone().requires_grad_() for key, t in given.items()}
        read = {**extras, **{key: t for key, t in given.items() if key != "context"}}
        text = conditioning(given["context"], read, parts_of(name, frames))
        with (
            wall.denoiser.open_denoiser(patcher) as denoiser,
            wall.autograd_inplace.AvoidInplaceOps(),
        ):  # as with a text encoder, UNets too
            module = denoiser.module
            with (
                attach(module, settings, graded, still),
                forgetful(*([module] if forgetful is checkpoint_blocks else [])),
            ):
                sigma = denoiser.sigma(torch.tensor([0.3, 0.6]))
                (denoiser.denoise(x, sigma, [text, text], {}) * way).sum().backward()
        found.append({key: t.grad for key, t in (graded | given).items() if t.grad is not None})
    assert found[0].keys() == found[1].keys() and all(torch.equal(t, found[1][key]) for key, t in found[0].items())
    return patcher, found[0]


# --- T-LoRA, which ComfyUI's own loader does not read -----------------------------------------------------------------

T_LORA = AdapterSettings("tlora", rank=4, targets="all", min_rank=1, rank_exponent=1.5)


def with_t_lora(patcher, trained):
    """A MODEL with the file that Save LoRA writes of T-LoRA, put on by Graft."""
    file = to_key_format(make_lora(trained, T_LORA, None), "comfyui", torch.bfloat16)
    return wall.lora_stacks.apply_lora_stack(patcher, None, [LoraEntry("t-lora", file)]).model


@pytest.mark.parametrize("level", [0.05, 0.6, 0.95])
@pytest.mark.parametrize("name", ["sd1", "flux", "wan", "qwen"])
def test_t_lora_samples_as_trained_at_the_samplers_noise_level(name, level):
    """And its gradients are those of finite differences of that, in all ranks that work there and in no other."""
    available(name)
    patcher = build(name)
    trained = {key: t.requires_grad_("base" not in key) for key, t in moved(patcher, T_LORA).items()}
    x, context, extras = random(1, *FAMILIES[name].latent, seed=4), *conditions(name, 3)
    extras = {**extras, "guidance": 1.0}
    sampling, u = patcher.get_model_object("model_sampling"), torch.tensor([level])
    sigma = wall.denoiser.Denoiser(patcher).sigma(u)
    timesteps = sampling.timestep(sigma).float()
    if name != "sd1":
        timesteps = 1000 * sigma  # flows count noise by its share
    ranks = int(((1000 - float(timesteps)) / 1000) ** 1.5 * 3) + 1
    with torch.no_grad():
        found = denoised(patcher, T_LORA, trained, x, sigma, name)
        plain = sampled(patcher, x, sigma, context, extras)
        expected = sampled(with_t_lora(patcher, trained), x, sigma, context, extras)
    change = float((expected - plain).abs().max())
    assert change > 0 and float((found - expected).abs().max()) < 1e-3 * change
    way = random(*x.shape, seed=5)
    graded(patcher, T_LORA, trained, x, sigma, name, way)
    paths = list(adapter_targets(patcher.model.diffusion_model, T_LORA))
    path = paths[len(paths) // 3]
    for part, axis in (("q_layer.weight", 0), ("p_layer.weight", 1), ("lambda_layer", 1)):
        key = f"{path}.{part}"
        gradient = trained[key].grad.transpose(0, axis).flatten(1)
        assert [bool(rank.any()) for rank in gradient] == [number < ranks for number in range(4)], key
        direction = trained[key].grad / trained[key].grad.norm() * trained[key].detach().norm()
        values = []
        for sign in (1, -1):
            other = {**trained, key: trained[key].detach() + sign * 0.02 * direction}
            with torch.no_grad():
                values.append(sampled(with_t_lora(patcher, other), x, sigma, context, extras).double() * way)
        expected = float((values[0] - values[1]).sum()) / 0.04
        rounding = torch.finfo(torch.float32).eps * float(values[0].norm()) / 0.04  # with little noise most of it is x
        assert float((trained[key].grad * direction).sum()) == pytest.approx(expected, rel=2e-2, abs=rounding), key


@pytest.mark.parametrize("name", ["sd1", "flux", "wan", "qwen"])
def test_checkpointed_gradients_of_t_lora_are_the_same_bytes(name):
    available(name)
    _, found = _checkpointed_or_not(name, T_LORA)
    assert all(bool(t.any()) for t in found.values())


@pytest.mark.parametrize("name", ["sd1", "flux", "wan", "qwen"])
def test_t_lora_through_the_executor(host, name):
    """Everything but what training started from learns, with the same bytes with checkpointing."""
    available(name)
    adapter = {"kind": "tlora", "rank": 4, "min_rank": 1}
    plain = train(host, name, adapter)
    forgetful = train(host, name, adapter, {"checkpointing": True})["state"].trained
    for key, tensor in plain["state"].trained.items():
        assert torch.equal(tensor, forgetful[key])
        assert torch.equal(tensor, plain["start"].trained[key]) == ("base" in key), key


@pytest.mark.column("targets")
@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("preset", ["attention", "attention+ff", "all"])
def test_every_chosen_layer_learns(name, preset):
    """Training of pictures, of sound or of both gives each layer that a preset chooses a gradient."""
    available(name)
    patcher, settings = build(name), adapter(name, targets=preset)
    trained = {key: t.requires_grad_() for key, t in moved(patcher, settings).items()}
    x = latents(name, 4)
    sigma = wall.denoiser.Denoiser(patcher).sigma(torch.tensor([0.6]))
    graded(patcher, settings, trained, x, sigma, name, random(*x.shape, seed=5))
    idle = [key for key, t in trained.items() if t.grad is None or not bool(t.grad.any())]
    assert trained and idle == []


@pytest.mark.column("file")
@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("key_format", ["generic", "kohya"])
def test_comfyuis_own_loader_reads_all_of_a_saved_file(name, key_format, caplog):
    available(name)
    patcher, settings = build(name), adapter(name)
    network = patcher.model.diffusion_model
    file = make_lora(moved(patcher, settings), settings, None)
    if key_format == "kohya" and not isinstance(network, UNetModel):  # names of UNets tell their full size
        file = to_key_format(file, key_format, torch.float32)
    names = comfy.lora.model_lora_keys_unet(patcher.model, {})
    loaded = comfy.lora.load_lora(file, names, log_missing=True)
    assert not [record.getMessage() for record in caplog.records if "not loaded" in record.getMessage()]
    weights = {f"diffusion_model.{path}.weight" for path in adapter_targets(network, settings)}
    assert set(loaded) == weights and set(patcher.clone().add_patches(loaded, 1.0)) == weights


NO_TODO = {
    "ace-step": "its attention is linear: it costs as much with fewer tokens",
    "ace-step 1.5": "its tokens are moments of a sound",
    "stable audio": "its tokens are moments of a sound",
}


@pytest.mark.column("todo")
@pytest.mark.parametrize("name", EVERY)
def test_todo_thins_it_or_says_that_it_cannot(name, record_property):
    available(name)
    patcher = build(name)
    x, (context, extras) = latents(name, 4), conditions(name, 3)
    try:
        patched = wall.token_downsampling.apply_todo(patcher, ToDoSettings(factor=2.0))[0]
    except TypeError as error:
        network = type(patcher.model.diffusion_model).__name__
        unknown = f"does not know where {network} keeps its image tokens", f"this {network} has no"
        assert any(text in str(error) for text in unknown)
        record_property("says", f"no: {NO_TODO.get(name, 'where its image tokens are is not known')}")
        return
    with torch.no_grad():
        sigma = wall.denoiser.Denoiser(patcher).sigma(torch.tensor([0.6]))
        parts = parts_of(name)
        plain, thinned = (sampled(model, x, sigma, context, {**extras}, parts) for model in (patcher, patched))
    assert torch.isfinite(thinned).all() and not torch.allclose(plain, thinned, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["flux", "sd3", "qwen", "lumina2", "z-image", "wan"])
def test_new_tensors_for_assignments_in_place_change_no_value(name):
    available(name)
    patcher = build(name)
    x, sigma = random(1, *FAMILIES[name].latent, seed=4), torch.tensor([0.6])
    settings = AdapterSettings(rank=2, targets="all", kind="locon")
    trained = moved(patcher, settings)
    with torch.no_grad():
        plain = denoised(patcher, settings, trained, x, sigma, name)
    graded = denoised(patcher, settings, {key: t.requires_grad_() for key, t in trained.items()}, x, sigma, name)
    assert graded.requires_grad and torch.allclose(plain, graded, rtol=0, atol=1e-5)


def test_text_layers_of_the_network_are_computed_at_every_step():
    """LTX-2's text connectors run when conditions are made, also for captions that were validated before."""
    available("ltx 2")
    if not connects_text_of_ltx_2():
        pytest.skip("this ComfyUI has LTX-2's text connectors in the text encoder")
    patcher, settings = build("ltx 2"), AdapterSettings("lora", rank=2, pattern="video_embeddings_connector.*")
    trained = {key: t.requires_grad_() for key, t in moved(patcher, settings).items()}
    text, x = Conditioning(*conditions("ltx 2", 3)), random(1, *EVERY["ltx 2"].latent, seed=4)
    with wall.denoiser.open_denoiser(patcher) as denoiser, attach(denoiser.module, settings, trained, still):
        with torch.no_grad():
            denoiser.denoise(x, torch.tensor([0.6]), [text], {})
        for _ in range(2):
            found = torch.autograd.grad(
                denoiser.denoise(x, torch.tensor([0.6]), [text], {}).sum(), list(trained.values()), allow_unused=True
            )
            assert found and all(t is not None and bool(t.any()) for t in found)


def test_dropout_of_the_network_is_off_while_training():
    """ComfyUI 0.3.64 leaves ACE-Step in training mode, and samples with dropout."""
    patcher = build("ace-step")
    network = patcher.model.diffusion_model.train()
    text, x = Conditioning(*conditions("ace-step", 3)), random(1, *EVERY["ace-step"].latent, seed=4)
    with global_draws_untouched(), torch.no_grad(), wall.denoiser.open_denoiser(patcher) as denoiser:
        found = [denoiser.denoise(x, torch.tensor([0.6]), [text], {}) for _ in range(2)]
    assert torch.equal(*found) and all(part.training for part in network.modules())


@pytest.mark.parametrize("name", ["flux", "sd3", "wan"])
def test_captions_of_different_lengths_share_a_batch(name):
    patcher = build(name)
    with wall.denoiser.open_denoiser(patcher) as denoiser, torch.no_grad():
        x, sigma = random(3, *FAMILIES[name].latent, seed=4), denoiser.sigma(torch.tensor([0.2, 0.5, 0.8]))
        texts = [Conditioning(*conditions(name, seed, tokens)) for seed, tokens in ((1, 6), (2, 9), (3, 6))]
        together = denoiser.denoise(x, sigma, texts, {})
        alone = torch.cat([denoiser.denoise(x[i : i + 1], sigma[i : i + 1], [one], {}) for i, one in enumerate(texts)])
    assert torch.allclose(together, alone, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_noise_levels_are_the_models_own(name):
    """For flows the shifted share, written out; for the others a row of the table. The objective is what the family
    predicts.
    """
    available(name)
    patcher = build(name)
    denoiser = wall.denoiser.Denoiser(patcher)
    assert denoiser.prediction == FAMILIES[name].predicts
    u = torch.tensor([0.1, 0.5, 0.9])
    if denoiser.prediction != "flow":
        table = patcher.get_model_object("model_sampling").sigmas
        assert torch.equal(denoiser.sigma(u), table[[100, 500, 900]])
        return
    shift = patcher.model.model_config.sampling_settings.get("shift", 1.15 if name == "flux" else 1.0)
    shift = float(torch.tensor(shift).exp()) if name in ("flux", "qwen") else shift
    assert torch.allclose(denoiser.sigma(u), shift * u / (1 + (shift - 1) * u), atol=1e-5)
    clean, noise = random(3, *FAMILIES[name].latent, seed=1), random(3, *FAMILIES[name].latent, seed=2)
    sigma = denoiser.sigma(u)
    s = sigma.view(-1, *(1,) * (clean.ndim - 1))
    assert torch.allclose(denoiser.noisy(clean, noise, sigma), (1 - s) * clean + s * noise, atol=1e-6)


def cosmos_sampling():
    if not hasattr(comfy.model_sampling, "COSMOS_RFLOW"):
        pytest.skip("this ComfyUI has no COSMOS_RFLOW")

    class ModelSampling(comfy.model_sampling.ModelSamplingCosmosRFlow, comfy.model_sampling.COSMOS_RFLOW):
        pass

    return ModelSampling()


def test_cosmos_predicts_a_flow_by_comfyuis_own_formulas():
    """In float64: a network that predicts noise - clean denoises to the clean latents, and the loss of a wrong one is
    the error of that prediction.
    """
    sampling = cosmos_sampling()
    clean, noise, wrong = (random(3, 4, 2, 5, seed=seed).double() for seed in (1, 2, 3))
    t = torch.tensor([0.05, 0.5, 0.95], dtype=torch.float64)
    x = wall.model_sampling.noisy_latents(sampling, clean, noise, t)
    given, sigma = wall.model_sampling.to_comfyui_scale(sampling, x, t)
    assert torch.allclose(given, sampling.noise_scaling(sigma.view(-1, 1, 1, 1), noise, clean), rtol=1e-12)
    assert torch.allclose(sampling.calculate_input(sigma, given), x, rtol=1e-12)
    assert torch.allclose(sampling.timestep(sigma), t, rtol=1e-12)
    velocity = noise - clean
    assert torch.allclose(sampling.calculate_denoised(sigma, velocity, given), clean, rtol=1e-10, atol=1e-12)
    step = 1e-6  # along the way of a flow the latents change by what the network predicts
    beside = [wall.model_sampling.noisy_latents(sampling, clean, noise, t + sign * step) for sign in (1, -1)]
    assert torch.allclose((beside[0] - beside[1]) / (2 * step), velocity, atol=1e-8)
    assert wall.model_sampling.prediction_type(sampling) == "flow"
    denoised = sampling.calculate_denoised(sigma, velocity + wrong, given)
    found = losses(ObjectiveSettings(), "flow", denoised, clean, t)
    assert torch.allclose(found, wrong.square().flatten(1).mean(1), rtol=1e-9)


def test_noise_levels_of_cosmos_end_where_comfyuis_do():
    sampling = cosmos_sampling()
    u = torch.tensor([0.0, 0.25, 0.9, 1.0])
    t = wall.model_sampling.sigma_at(sampling, u)
    assert torch.equal(t[:3], u[:3]) and float(t[3]) == pytest.approx(120 / 121)
    (_, sigma) = wall.model_sampling.to_comfyui_scale(sampling, torch.zeros(4, 1), t)
    for share, level in zip(u.tolist(), sigma.tolist(), strict=True):
        assert level == pytest.approx(float(sampling.sigma(share)), rel=1e-4)


@pytest.mark.parametrize("name", ["qwen", "wan"])
def test_a_picture_gets_its_frame(name):
    patcher = build(name)
    denoiser = wall.denoiser.Denoiser(patcher)
    flat = random(2, 16, 8, 10)
    made = denoiser.process_in(flat)
    assert made.shape == (2, 16, 1, 8, 10) and torch.equal(made, patcher.model.process_latent_in(flat.unsqueeze(2)))
    assert torch.equal(denoiser.process_in(flat.unsqueeze(2)), made)


@pytest.mark.parametrize("sampling", ["EDM", "IMG_TO_IMG", "V_PREDICTION_DDPM"])
def test_model_sampling_that_training_does_not_know_is_refused_by_name(host, sampling):
    if not hasattr(comfy.model_sampling, sampling):
        pytest.skip(f"this ComfyUI has no {sampling}")

    class ModelSampling(comfy.model_sampling.ModelSamplingDiscrete, getattr(comfy.model_sampling, sampling)):
        pass

    patcher = build("sd1")
    patcher.add_object_patch("model_sampling", ModelSampling(patcher.model.model_config))
    with pytest.raises(ValueError, match=rf"predicts .*{sampling}.*training knows eps, v and flow"):
        host.call("GraftTrainStart", model=patcher, dataset=dataset("sd1"))


_FLUX = "img_attn txt_attn linear1 linear2"
PRESETS = {  # parts of the paths of attention, those of feed-forward; how many layers the tiny model has
    "sd1": ("attn1 attn2", "ff proj_in proj_out", (56, 84)),
    "sd2-v": ("attn1 attn2", "ff proj_in proj_out", (56, 84)),
    "sdxl": ("attn1 attn2", "ff proj_in proj_out", (56, 84)),
    "sd3": ("attn attn2", "mlp", (9, 15)),
    "flux": (_FLUX, "img_mlp txt_mlp", (6, 10)),
    "flux schnell": (_FLUX, "img_mlp txt_mlp", (6, 10)),
    "flux kontext": (_FLUX, "img_mlp txt_mlp", (6, 10)),
    "flux2": (_FLUX, "img_mlp txt_mlp", (6, 10)),
    "krea2": ("attn", "mlp", (10, 16)),
    "chroma": (_FLUX, "img_mlp txt_mlp", (6, 10)),
    "radiance": (_FLUX, "img_mlp txt_mlp", (6, 10)),
    "qwen": ("attn", "img_mlp txt_mlp", (14, 20)),
    "qwen edit": ("attn", "img_mlp txt_mlp", (14, 20)),
    "lumina2": ("attention", "feed_forward", (8, 20)),
    "z-image": ("attention", "feed_forward", (8, 20)),
    "wan": ("self_attn cross_attn", "ffn", (16, 20)),
    "wan i2v": ("self_attn cross_attn", "ffn", (20, 24)),
    "wan 2.2 i2v": ("self_attn cross_attn", "ffn", (16, 20)),
    "wan 2.2": ("self_attn cross_attn", "ffn", (16, 20)),
    "hunyuan": (_FLUX, "img_mlp txt_mlp", (6, 10)),
    "hunyuan 1.5": ("img_attn txt_attn", "img_mlp txt_mlp", (7, 13)),
    "hunyuan image": (_FLUX, "img_mlp txt_mlp", (6, 10)),
    "ltx": ("attn1 attn2", "ff", (16, 20)),
    "ltx 2": ("attn1 attn2", "ff", (16, 20)),
    "ltx 2 sound": (
        "attn1 attn2 audio_attn1 audio_attn2 audio_to_video_attn video_to_audio_attn",
        "ff audio_ff",
        (48, 56),
    ),
    "cosmos": ("self_attn cross_attn", "mlp", (16, 20)),
    "anima": ("self_attn cross_attn", "mlp", (16, 20)),
    "ernie": ("self_attention", "mlp", (8, 14)),
    "hidream": ("attn1", "ff_i ff_t", (24, 90)),
    "hidream o1": ("self_attn", "mlp", (8, 14)),
    "ideogram 4": ("attention", "feed_forward", (4, 10)),
    "kandinsky 5": ("self_attention cross_attention", "feed_forward", (20, 26)),
    "kandinsky 5 image": ("self_attention cross_attention", "feed_forward", (20, 26)),
    "ace-step": ("attn cross_attn self_attn", "ff feed_forward", (21, 27)),
    "ace-step 1.5": ("self_attn cross_attn", "mlp", (16, 22)),
    "stable audio": ("self_attn cross_attn", "ff", (10, 14)),
    "auraflow": ("attn", "mlp", (12, 15)),
    "pixart": ("attn cross_attn", "mlp", (10, 14)),
    "omnigen2": ("attn", "feed_forward", (16, 28)),
}


@pytest.mark.column("targets")
@pytest.mark.parametrize("name", EVERY)
def test_presets_hit_the_layers_of_each_family(name):
    """Those that its trainers train: no text refiners and no part that reads text before the blocks do, but for
    ACE-Step's lyrics, which its own trainer trains.
    """
    available(name)
    module = build(name).model.diffusion_model
    attention, feed_forward = (set(parts.split()) for parts in PRESETS[name][:2])
    found = [adapter_targets(module, adapter(name, targets=preset)) for preset in ("attention", "attention+ff")]
    for chosen, parts in zip(found, (attention, attention | feed_forward), strict=True):
        assert all(set(path.split(".")) & parts for path in chosen)
        assert {part for path in chosen for part in path.split(".")} >= parts
        assert not any(
            "modulation" in part or "norm" in part or "embed" in part for path in chosen for part in path.split(".")
        )
        assert not any(
            path.startswith(("txt_in.", "txtfusion.", "visual.", "encoder.", "tokenizer.")) for path in chosen
        )
    assert (len(found[0]), len(found[1])) == PRESETS[name][2]


@pytest.mark.parametrize(
    ("name", "part"),
    [("anima", "llm_adapter"), ("ltx 2", "video_embeddings_connector"), ("hidream o1", "visual")],
)
def test_a_part_before_the_blocks_is_trained_only_when_it_is_named(name, part):
    available(name)
    if name == "ltx 2" and not connects_text_of_ltx_2():
        pytest.skip("this ComfyUI has LTX-2's text connectors in the text encoder")
    module = build(name).model.diffusion_model
    layers = module.get_submodule(part).named_modules()
    inside = {f"{part}.{path}" for path, layer in layers if is_linear(layer)}
    for preset in ("attention", "attention+ff", "all"):
        assert not inside & set(adapter_targets(module, AdapterSettings(targets=preset)))
    assert set(adapter_targets(module, AdapterSettings(targets="all", pattern=f"{part}.*"))) == inside


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("hunyuan", "txt_in"),
        ("hunyuan 1.5", "txt_in"),
        ("hunyuan image", "txt_in"),
        ("krea2", "txtfusion"),
        ("ace-step 1.5", "encoder"),
    ],
)
def test_what_reads_text_before_the_blocks_is_trained_with_all_or_when_it_is_named(name, part):
    available(name)
    module = build(name).model.diffusion_model
    found = {
        (preset, pattern): any(
            path.startswith(f"{part}.")
            for path in adapter_targets(module, AdapterSettings(targets=preset, pattern=pattern))
        )
        for preset in ("attention", "attention+ff", "all")
        for pattern in ("", f"*, {part}.*")
    }
    assert found == {key: key[0] == "all" or bool(key[1]) for key in found}


FP8 = [name for name in NAMES if name in ("sd1", "flux", "qwen", "wan", "sd3")]


@pytest.mark.parametrize("name", FP8)
def test_adapters_beside_fp8_weights(host, name):
    """A base in fp8 that is cast where it is used: adapters train beside it, and it keeps its bytes."""
    found = train(host, name, {"kind": "lora", "targets": "attention"}, dtype="float8_e4m3fn float32")
    weights = found["model"].model.diffusion_model
    assert torch.float8_e4m3fn in {p.dtype for p in weights.parameters()}
    state = found["state"]
    assert {key.split("/", 1)[1] for key in state.optimizer if key.startswith("exp_avg/")} == set(state.trained)
    assert all(torch.isfinite(t).all() for t in state.trained.values())


@pytest.mark.parametrize("kind", [*KINDS, "tlora"])
def test_every_kind_beside_fp8_weights_is_that_beside_the_same_weights_in_float32(kind):
    quantized, plain = build("flux", torch.float8_e4m3fn, torch.float32), build("flux")
    for key, weight in plain.model.diffusion_model.named_parameters():
        weight.data.copy_(quantized.model.diffusion_model.get_parameter(key).float())
    settings = AdapterSettings(kind, rank=2, targets="attention+ff")
    trained = moved(plain, settings)
    x, sigma = random(1, *FAMILIES["flux"].latent, seed=4), torch.tensor([0.6])
    start = init_trainable(quantized.model.diffusion_model, settings, 0, {})
    assert all(
        torch.allclose(t, start[key], atol=1e-5)
        for key, t in init_trainable(plain.model.diffusion_model, settings, 0, {}).items()
    )
    with torch.no_grad():
        found, expected = (denoised(patcher, settings, trained, x, sigma, "flux") for patcher in (quantized, plain))
    assert torch.allclose(found, expected, atol=1e-4 * float(expected.abs().max()))


def test_full_weights_of_an_fp8_model_are_refused(host):
    host.nodes.NODE_CLASS_MAPPINGS.update(GraftTestModel=Model)
    host.fresh()
    result = host.run(workflow(host, "flux", "refused", {"kind": "full", "rank": 16}, dtype="float8_e4m3fn float32"))
    assert not result["success"] and "quantized" in json.dumps(result["errors"], default=str)


def test_one_step_is_a_loop_written_by_hand():
    """The loss and the update of a Flux step, against AdamW over the network called directly with
    the family's inputs.
    """
    name, settings = "flux", AdapterSettings("lora", rank=2, targets="attention")
    patcher, data = build(name), dataset(name)
    own = Settings(OptimizerSettings(learning_rate=1e-2, batch_size=1, clip_norm=0.0, weight_decay=0.0))
    state = begin(patcher.model.diffusion_model, Start("m", data.digest, settings), own)
    seen = []
    with wall.denoiser.open_denoiser(patcher) as denoiser:
        before = denoiser.denoise

        def watched(x, sigma, texts, options):
            seen.append((x.detach().clone(), sigma.clone(), texts[0]))
            return before(x, sigma, texts, options)

        denoiser.denoise = watched
        work = workspace.Workspace(state, denoiser, data)
        with work.install():
            measured = steps.advance_(work)
        made = {key: t.detach().clone() for key, t in work.trained.items()}
        work.close()
    (x, sigma, text), network = seen[0], patcher.model.diffusion_model
    trained = {key: t.clone().requires_grad_() for key, t in state.trained.items()}
    match = min(data.images, key=lambda picture: float(_residual(patcher, picture, x, sigma).std().sub(1).abs()))
    noise = _residual(patcher, match, x, sigma)
    clean = patcher.model.process_latent_in(match.latent[None])
    with wall.denoiser.open_denoiser(patcher), attach(network, settings, trained, still):
        out = network(x, sigma, context=text.context, y=text.extras["pooled_output"], guidance=torch.ones(1))
        loss = (out - (noise - clean)).square().mean()
        loss.backward()
    assert measured.loss == pytest.approx(float(loss.detach()), rel=1e-4)
    optimizer = torch.optim.AdamW(list(trained.values()), lr=1e-2, weight_decay=0.0)
    optimizer.step()
    assert all(torch.allclose(t.detach(), made[key], atol=1e-4) for key, t in trained.items())


def _residual(patcher, picture, x, sigma):
    clean = patcher.model.process_latent_in(picture.latent[None])
    return (x - (1 - sigma.view(-1, 1, 1, 1)) * clean) / sigma.view(-1, 1, 1, 1)


# --- networks that change tensors by calls ----------------------------------------------------------------------------

CALLS = {
    "ltx": "comfy.ldm.lightricks.model",
    "chroma": "comfy.ldm.chroma.layers",
    "radiance": "comfy.ldm.chroma.layers",
}
EVERY_CALL = CALLS | {"ltx 2": "comfy.ldm.lightricks.av_model"}  # its class calls super(), which a copy cannot
IN_PLACE = re.compile(r"^( +)(\w+)\.(addcmul|add)_\(", re.MULTILINE)


def with_new_tensors(module, folder):
    """A copy of a module of ComfyUI's in which `x.addcmul_(…)` is `x = x.addcmul(…)`."""
    copy = folder / "copy_with_new_tensors.py"
    source = Path(module.__file__).read_text(encoding="utf-8")
    copy.write_text(IN_PLACE.sub(r"\1\2 = \2.\3(", source), encoding="utf-8")
    with file_as_module(copy, module.__package__) as made:
        return made


def use_new_tensors(monkeypatch, module, folder):
    made = with_new_tensors(module, folder)
    for name, kind in vars(made).items():
        if isinstance(kind, type) and kind.__module__ == made.__name__ and "forward" in vars(kind):
            monkeypatch.setattr(getattr(module, name), "forward", kind.forward)


def use_plain_rotations(monkeypatch):
    """The kernels of comfy-kitchen know no float64; ComfyUI trains without them, but for 0.8.0."""
    if hasattr(comfy.model_management, "in_training"):
        monkeypatch.setattr(comfy.model_management, "in_training", True)
        return
    rotations = importlib.import_module("comfy.ldm.flux.math")
    if rotations.apply_rope.__module__.startswith("comfy_kitchen"):
        plain = importlib.import_module("comfy_kitchen").registry.get_implementation("apply_rope", backend="eager")
        monkeypatch.setattr(rotations, "apply_rope", plain)


class Called:
    """A tiny network in float64 with adapters, and the inputs that ComfyUI calls it with."""

    def __init__(self, name):
        self.name, self.settings = name, AdapterSettings("lora", rank=2, targets="all")
        self.patcher = build(name, torch.float64)
        for part in (*self.patcher.model.parameters(), *self.patcher.model.buffers()):
            if part.is_floating_point():
                part.data = part.data.double()
        for part in self.patcher.model.modules():
            if type(part).__name__ == "EmbedND":  # attention would compute in float32, as it says
                part.register_forward_hook(lambda part, args, rotation: rotation.double())
        self.trained = {key: t.double().requires_grad_() for key, t in moved(self.patcher, self.settings).items()}
        self.inputs = None

    def loss(self, trained):
        """A sum over the output; its gradients too, where they are on."""
        module = self.patcher.model.diffusion_model
        with attach(module, self.settings, trained, still):
            if self.inputs is None:
                self._watch(module)
            args, kwargs = self.inputs
            out = module(*args, **kwargs)
            loss = (out * random(*out.shape, seed=5).double()).sum()
            if torch.is_grad_enabled():
                loss.backward()
        return loss.detach()

    def _watch(self, module):
        def seen(part, args, kwargs):
            self.inputs = args, kwargs

        x, (context, extras) = random(1, *EVERY[self.name].latent, seed=4), conditions(self.name, 3)
        hook = module.register_forward_pre_hook(seen, with_kwargs=True)
        with torch.no_grad():
            denoiser = wall.denoiser.Denoiser(self.patcher)
            denoiser.denoise(x, torch.tensor([0.6]), [Conditioning(context, extras)], {})
        hook.remove()

    def gradients(self, forgetful=False):
        for t in self.trained.values():
            t.grad = None
        with wall.denoiser.open_denoiser(self.patcher), contextlib.ExitStack() as stack:
            if forgetful:
                stack.enter_context(checkpoint_blocks(self.patcher.model.diffusion_model))
            self.loss(self.trained)
        return {key: t.grad for key, t in self.trained.items()}


@pytest.mark.parametrize("name", CALLS)
def test_gradients_of_networks_that_change_tensors_by_calls(name, tmp_path, monkeypatch):
    """In float64: those of the same code with new tensors and, along a random direction of all trained tensors, those
    of finite differences; with checkpointing the same bytes.
    """
    available(name)
    use_plain_rotations(monkeypatch)
    network = Called(name)
    found, forgetful = network.gradients(), network.gradients(forgetful=True)
    assert all(t is not None and bool(t.any()) for t in found.values())
    assert all(torch.equal(t, forgetful[key]) for key, t in found.items())
    direction = {key: random(*t.shape, seed=number).double() for number, (key, t) in enumerate(found.items())}
    step, values = 1e-5, []
    for sign in (1, -1):
        with torch.no_grad():
            values.append(
                network.loss({key: t + sign * step * direction[key] for key, t in network.trained.items()}).item()
            )
    along = sum(float((t * direction[key]).sum()) for key, t in found.items())
    assert along == pytest.approx((values[0] - values[1]) / (2 * step), rel=1e-6)
    use_new_tensors(monkeypatch, importlib.import_module(CALLS[name]), tmp_path)
    anew = network.gradients()
    assert all(torch.allclose(t, anew[key], rtol=1e-10, atol=1e-12) for key, t in found.items())


def steps_with(name, count):
    """Whether changes were copied in each of some training steps of a tiny model."""
    patcher, settings = build(name), adapter(name)
    found, plain = [], patcher.model.diffusion_model.forward

    def forward(*args, **kwargs):
        found.append(saved_tensors.active_mode() is not None)
        return plain(*args, **kwargs)

    patcher.model.diffusion_model.forward = forward
    trained = {key: t.requires_grad_() for key, t in moved(patcher, settings).items()}
    text, x = conditioning(*conditions(name, 3), parts_of(name)), latents(name, 4)
    way = random(*x.shape, seed=5)
    with (
        wall.denoiser.open_denoiser(patcher) as denoiser,
        attach(denoiser.module, settings, trained, still),
    ):
        sigma = denoiser.sigma(torch.tensor([0.6]))
        for step in range(count):
            (denoiser.denoise(x, sigma, [text], {TRAINING: {"step": step}}) * way).sum().backward()
    return found


@pytest.mark.parametrize("name", EVERY)
def test_only_networks_that_change_tensors_by_calls_pay_for_it(name, monkeypatch):
    """Networks that autograd refuses as they are have copies in all steps, others in the first one."""
    available(name)
    found = steps_with(name, 3)
    monkeypatch.setattr(wall.denoiser, "copy_where_needed", lambda network: contextlib.nullcontext())
    try:
        steps_with(name, 1)
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
        assert found == [True] * 3
        return
    assert found in ([True, False, False], [False] * 3)  # UNets have none at all
    assert (found == [False] * 3) == isinstance(build(name).model.diffusion_model, UNetModel)


class OneBlock(torch.nn.Module):
    def __init__(self, block):
        super().__init__()
        self.blocks = torch.nn.ModuleList([block])

    def forward(self, *args):
        return self.blocks[0](*args)


def test_a_block_that_changes_tensors_in_functions_beside_it():
    """MiniMax H3's, whose functions scale and add in place."""
    minimax = pytest.importorskip("comfy.ldm.minimax.model", reason="this ComfyUI has no MiniMax H3")
    block = minimax.DiTBlock(16, 2, 8, 32, 8, 1e-5, 1e-5, dtype=torch.float32, operations=comfy.ops.disable_weight_init)
    for number, part in enumerate(block.parameters()):
        part.data = random(*part.shape, seed=number) * 0.2
    network = OneBlock(block)
    turns, segments = minimax.rope_rotation_table(random(6, 8), torch.float32), [(0, 3, 0), (3, 6, 1)]

    def loss():
        return network(random(6, 16, seed=1), random(2, 8, seed=2), segments, turns).square().sum()

    def backward():
        for part in block.parameters():
            part.grad = None
        loss().backward()
        return [part.grad.clone() for part in block.parameters()]

    with wall.denoiser.announce_training(), PlainKernels(), wall.autograd_inplace.AvoidInplaceOps():
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            backward()
        with wall.autograd_inplace.copy_where_needed(network):
            found = backward()
            with checkpoint_blocks(network):
                forgetful = backward()
    assert all(torch.equal(a, b) for a, b in zip(found, forgetful, strict=True))
    ways = [random(*part.shape, seed=9 + number) for number, part in enumerate(block.parameters())]
    values = []
    for sign in (1e-3, -2e-3):
        for part, way in zip(block.parameters(), ways, strict=True):
            part.data += sign * way
        with wall.denoiser.announce_training(), PlainKernels():
            values.append(float(loss().detach()))
    along = sum(float((a * way).sum()) for a, way in zip(found, ways, strict=True))
    assert along == pytest.approx((values[0] - values[1]) / 2e-3, rel=1e-3)


@pytest.mark.parametrize("name", EVERY_CALL)
def test_memory_settings_change_no_byte_of_networks_that_change_tensors_by_calls(host, name):
    available(name)
    plain = train(host, name, {"kind": "lora"})["state"]
    for setting in ({"offload": "activations"}, {"offload": "layers"}, {"offload": "optimizer"}):
        found = train(host, name, {"kind": "lora"}, setting)["state"]
        assert all(torch.equal(t, found.trained[key]) for key, t in plain.trained.items())
