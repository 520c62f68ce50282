"""No dead setting: every input of every training node changes the result's bytes, is refused with a reason, or only
saves time or memory.

The inputs are read from the schemas: one without a case here fails. A case flips one input of a small run (`given` are
the other inputs that it needs to matter) and names what must change: the trained weights unless it says otherwise. An
input of settings has a case for each part that matters there, named `settings (part)`.
"""

import hashlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from graft_nodes.storage.digest import sha256_of_tensors
from PIL import Image

NODES = (
    "GraftDataset",
    "GraftAdapter",
    "GraftWords",
    "GraftOptimizer",
    "GraftObjective",
    "GraftEMA",
    "GraftTrainingOnlyLoRA",
    "GraftTrainStart",
    "GraftTrainPairStart",
    "TrainStep",
    "GraftSlider",
    "GraftTrainVAEStart",
    "GraftDemoVAE",
)
ALWAYS = ("GraftAdapter", "GraftOptimizer", "GraftObjective", "GraftEMA")  # settings nodes of every run
# Inputs that only a whole workflow uses, and the test file that does.
BY_THE_EXECUTOR = {"TrainStep": {"previews"}}  # test_graph_previews.py
SETTINGS = (*ALWAYS, "GraftWords", "GraftTrainingOnlyLoRA")
BASE = {
    "GraftDataset": {"folder": "dead", "resolution": 128, "bucket_step": 32, "validation": 0.25},
    "GraftAdapter": {"rank": 2},
    "GraftOptimizer": {"learning_rate": 1e-3, "batch_size": 2, "precision": "float32"},
    "GraftEMA": {"schedule": "constant", "decay": 0.5},
    "TrainStep": {"steps": 2, "validate_every": 0, "snapshot_every": 0, "snapshot_minutes": 0.0},
}


@dataclass(frozen=True)
class Case:
    """What an input is flipped to, and what comes of it: `changes` an aspect of the result, `same` bytes, or `refused`
    with a reason. A node that is None in `given` is left out.

    An input of settings is flipped to inputs by settings node that are different there, or to None, which is nothing.
    """

    value: Any
    given: dict[str, dict[str, Any] | None] = field(default_factory=dict)
    changes: str = "weights"
    same: bool = False
    refused: str = ""


EPS = {"model": {"kind": "eps"}}  # the demo is a flow model
REGULAR = {"GraftDataset": {"regularization": "regular"}}
PREVIEWS = {"TrainStep": {"preview_every": 2, "positive": "a red square", "negative": "", "latent": 64}}
EXPERT = {"GraftObjective": {"expert": "high noise", "boundary": 0.5}}
PAIR = {"GraftObjective": {"expert": "both", "boundary": 0.5}, "GraftTrainPairStart": {"low_noise_model": 1.05}}
ZORP = {"GraftTrainingOnlyLoRA": {"lora_stack": [("graft_demo/zorp.safetensors", 1.0, 1.0)]}}
NO_LORA = {"GraftTrainingOnlyLoRA": {"lora_stack": []}}
FULL = {"GraftAdapter": {"kind": "full"}}
WORDS = {"GraftWords": {"words": "two", "initial": "circle"}}
PROMPTS = {"positive": "a green circle", "negative": "a red circle", "target": "a yellow circle"}
SLIDER = {"GraftSlider": {**PROMPTS, "width": 64, "height": 64, "steps": 2, "cfg": 1.0}}
ANCHORED = {"GraftSlider": {**SLIDER["GraftSlider"], "anchor": "a blue circle"}}
VAE = {"GraftTrainVAEStart": {"crop": 64, "latent_bound": 1000.0}, "GraftDemoVAE": {"damage": 1.0}}
WHOLE_VAE = {**VAE, "GraftTrainVAEStart": {**VAE["GraftTrainVAEStart"], "part": "whole"}}
JUDGED_VAE = {**VAE, "GraftTrainVAEStart": {**VAE["GraftTrainVAEStart"], "discriminator": 0.5}}
BOTH_ERRORS = {**VAE, "GraftTrainVAEStart": {**VAE["GraftTrainVAEStart"], "mse": 1.0}}

CASES: dict[str, dict[str, Case]] = {
    "GraftDataset": {
        "folder": Case("dead2"),
        "vae": Case("other"),
        "clip": Case("other"),
        "resolution": Case(192),
        "buckets": Case(False),
        "bucket_step": Case(64),
        "captions": Case("folder"),
        "repeats": Case(3),
        "flip": Case(1.0),
        "shuffle_tags": Case(True),
        "keep_tags": Case(2, {"GraftDataset": {"shuffle_tags": True}}),
        "tag_dropout": Case(0.9),
        "caption_dropout": Case(1.0),
        "clip_skip": Case(2),
        "validation": Case(0.5),
        "filters": Case("blacklist_tags: [one]"),
        "regularization": Case("regular"),
        "regularization_share": Case(0.75, {**REGULAR, "GraftOptimizer": {"batch_size": 4}}),
        "weighted_captions": Case(True, {"GraftDataset": {"filters": "caption_prefix: '(zorp:3)'"}}),
        "no_upscale": Case(True, {"GraftDataset": {"resolution": 512}}),
        "min_side": Case(128),
        "max_side": Case(128),
        "more_images": Case("dead2"),
        "batch_size": Case(3),
        "validation_folder": Case("dead2"),
        "control_pictures": Case(
            "reference latents",
            {"GraftDataset": {"folder": "dead pairs", "control_pictures": "off"}},
            refused="takes no reference latents",
        ),
        "frames": Case("5", {"GraftDataset": {"folder": "dead clips"}}, refused="this VAE encodes pictures only"),
        "frame_rate": Case(16.0, refused="no effect with frames of clips 0"),
        "clip_part": Case("chunk", refused="no effect with frames of clips 0"),
        # the demo's own layer is the last, from where CLIP skip counts by default
        "skip_from_own": Case(True, {"GraftDataset": {"clip_skip": 2}}, same=True),
    },
    "GraftAdapter": {
        "settings": Case(None),
        "kind": Case("locon", {"GraftAdapter": {"targets": "all"}}),
        "rank": Case(3),
        "alpha": Case(1.0),
        "targets": Case("attention+ff"),
        "pattern": Case("!*attn2*"),
        "text_encoder": Case(True),
        "rank_dropout": Case(0.5),
        "module_dropout": Case(0.5),
        "network_dropout": Case(0.5),
        "max_norm": Case(0.001),
        "initial": Case("lora"),
        "min_rank": Case(1, {"GraftAdapter": {"kind": "tlora", "rank": 4}}),
        "rank_exponent": Case(4.0, {"GraftAdapter": {"kind": "tlora", "rank": 4, "min_rank": 1}}),
        "base_weights": Case("int8"),
        "factor": Case(4, {"GraftAdapter": {"kind": "lokr"}}),
    },
    "GraftOptimizer": {
        "settings": Case(None),
        "optimizer": Case("sgd"),
        "learning_rate": Case(2e-3),
        "text_encoder_rate": Case(1e-5, {"GraftAdapter": {"text_encoder": True}}),
        "schedule": Case("linear"),
        "warmup": Case(2),
        "total_steps": Case(3, {"GraftOptimizer": {"schedule": "linear"}}),
        "floor": Case(0.9, {"GraftOptimizer": {"schedule": "linear", "total_steps": 2}}),
        "batch_size": Case(3),
        "accumulation": Case(2),
        "clip_norm": Case(1e-3, {"GraftOptimizer": {"optimizer": "sgd", "learning_rate": 1.0}}),
        "weight_decay": Case(5.0),
        "lora_plus": Case(16.0),
        "precision": Case("bf16"),
        "checkpointing": Case(True, same=True),
        "offload": Case("activations", same=True),
        "swapped_blocks": Case(1, {"GraftOptimizer": {"offload": "layers"}}, same=True),
        "optimizer_class": Case("torch.optim.NAdam"),
        "scale_lr": Case(True),
        "block_rates": Case("input_blocks.* = 0.5"),
        "fused_backward": Case(True, {**FULL, "GraftOptimizer": {"clip_norm": 0.0}}, same=True),
        "options": Case("betas = 0.5 0.9"),
        "compile": Case("blocks", {"GraftAdapter": {"rank_dropout": 0.5}}, refused="set compile to off"),
    },
    "GraftObjective": {
        "settings": Case(None),
        "loss": Case("huber"),
        "weighting": Case("debiased", EPS),
        "gamma": Case(0.1, {**EPS, "GraftObjective": {"weighting": "min-snr"}}),
        "offset_noise": Case(0.5),
        "pyramid_noise": Case(0.5),
        "ip_noise": Case(0.5),
        "zero_terminal_snr": Case(True, {"model": {"kind": "v"}}),
        "timesteps": Case("logit-normal"),
        "shift": Case(3.0, {"GraftObjective": {"timesteps": "shifted"}}),
        "conditioning_dropout": Case(1.0),
        "prior": Case("output-preservation", REGULAR),
        "prior_weight": Case(7.0, {**REGULAR, "GraftObjective": {"prior": "regularization"}}),
        "min_timestep": Case(0.5),
        "max_timestep": Case(0.5),
        "sigmoid_scale": Case(3.0, {"GraftObjective": {"timesteps": "sigmoid"}}),
        "logit_mean": Case(1.0, {"GraftObjective": {"timesteps": "logit-normal"}}),
        "logit_std": Case(0.5, {"GraftObjective": {"timesteps": "logit-normal"}}),
        "mode_scale": Case(-0.5, {"GraftObjective": {"timesteps": "mode"}}),
        "model_shift": Case(False, EPS, refused="only flow models have a shift of their own"),
        "expert": Case("low noise", EXPERT),
        "boundary": Case(0.7, EXPERT),
        "beta": Case(5000.0, {"GraftDataset": {"folder": "dead preferences"}, "GraftObjective": {"loss": "dpo"}}),
        "sigma_bounds": Case(True, EPS, refused="bounds are sigmas is for flow models"),
        "pyramid_kind": Case("everydream2", {"GraftObjective": {"pyramid_noise": 0.5}}),
        "target": Case("cfg-augmented"),
        "target_scale": Case(5.0, {"GraftObjective": {"target": "cfg-augmented"}}),
        "noise_candidates": Case(4),
    },
    "GraftEMA": {
        "settings": Case(None),
        "schedule": Case("ramp", changes="average"),
        "decay": Case(0.9, changes="average"),
        "inv_gamma": Case(5.0, {"GraftEMA": {"schedule": "warmup", "decay": 0.99}}, changes="average"),
        "power": Case(0.1, {"GraftEMA": {"schedule": "warmup", "decay": 0.99}}, changes="average"),
        "target": Case(0.5, {"GraftEMA": {"schedule": "target"}}, changes="average"),
        "interval": Case(2, changes="average"),
        "device": Case("host", same=True),
        "snapshots": Case(1, changes="files"),
        "widths": Case("0.06 0.2", {"GraftEMA": {"snapshots": 1}}, changes="files"),
        "switch_every": Case(1),
        "begin_after": Case(1, changes="average"),
        "min_decay": Case(0.5, {"GraftEMA": {"schedule": "ramp"}}, changes="average"),
    },
    "GraftWords": {
        "settings": Case(None, WORDS),
        "words": Case("one", WORDS),
        "initial": Case("triangle", WORDS),
        "count": Case(2, WORDS),
        "learning_rate": Case(0.1, WORDS),
        "stop_after": Case(0.5, {**WORDS, "GraftOptimizer": {"total_steps": 4}, "TrainStep": {"steps": 4}}),
        "max_norm": Case(0.5, WORDS),
        "alone": Case(True, {**WORDS, "GraftAdapter": None}),
    },
    "GraftTrainingOnlyLoRA": {
        "settings": Case(None, NO_LORA),
        "lora_stack": Case(ZORP["GraftTrainingOnlyLoRA"]["lora_stack"], NO_LORA),
    },
    "GraftTrainStart": {
        "model": Case("other"),
        "dataset": Case("dead2"),
        "settings": Case(None),
        "settings (adapter)": Case({"GraftAdapter": None}),
        "settings (optimizer)": Case({"GraftOptimizer": None}),
        "settings (objective)": Case({"GraftObjective": None}, {"GraftObjective": {"loss": "huber"}}),
        "settings (ema)": Case({"GraftEMA": None}, changes="average"),
        "settings (words)": Case(WORDS),
        "settings (training-only)": Case(ZORP),
        "clip": Case(None, changes="clip"),
        "vae": Case("other", PREVIEWS, changes="pictures"),
        "seed": Case(5),
        "run": Case("another run", changes="run"),
    },
    "GraftTrainPairStart": {
        "high_noise_model": Case(1.1, PAIR),
        "low_noise_model": Case(1.1, PAIR),
        "dataset": Case("dead2", PAIR),
        "settings": Case({"GraftAdapter": {"rank": 3}}, PAIR),
        "settings (optimizer)": Case({"GraftOptimizer": None}, PAIR),
        "settings (objective)": Case({"GraftObjective": {"loss": "huber"}}, PAIR),
        "settings (ema)": Case({"GraftEMA": None}, PAIR, changes="average"),
        "settings (training-only)": Case(
            ZORP,
            {**PAIR, "GraftTrainPairStart": {**PAIR["GraftTrainPairStart"], "low_noise_settings": NO_LORA}},
        ),
        "low_noise_settings": Case({"GraftAdapter": {"rank": 3}}, PAIR),
        "low_noise_settings (training-only)": Case(ZORP, {**PAIR, **NO_LORA}),
        "clip": Case(None, PAIR, changes="clip"),
        "vae": Case("other", {**PAIR, **PREVIEWS}, changes="pictures"),
        "seed": Case(5, PAIR),
        "run": Case("another run", PAIR, changes="run"),
    },
    "TrainStep": {
        "state": Case("step 1"),
        "steps": Case(1),
        "epochs": Case(1.0),
        "validate_every": Case(1, changes="history"),
        "preview_every": Case(1, PREVIEWS, changes="pictures"),
        "snapshot_every": Case(1, {"TrainStep": {"keep": "every"}}, changes="files"),
        "positive": Case("a blue circle", PREVIEWS, changes="pictures"),
        "negative": Case(None, PREVIEWS, changes="pictures"),
        "latent": Case(128, PREVIEWS, changes="pictures"),
        "prompts": Case("a blue circle", PREVIEWS, changes="pictures"),
        "settings": Case({"GraftOptimizer": {"learning_rate": 5e-3}}),
        "settings (objective)": Case({"GraftObjective": {"loss": "huber"}}),
        "keep": Case("every", {"TrainStep": {"snapshot_every": 1}}, changes="files"),
        "snapshot_minutes": Case(1e-9, changes="snapshots"),
        "when_short": Case("stop", {"TrainStep": {"is_short": True}}, refused="Memory ran out at step 1"),
        "tensorboard": Case(True, changes="files"),
        "log_every": Case(1000, {"TrainStep": {"tensorboard": True}}, changes="files"),
        "keep_epochs": Case(1, {"TrainStep": {"steps": 8}}, changes="files"),
        "keep_from": Case(1000, {"TrainStep": {"steps": 8, "keep_epochs": 1}}, changes="files"),
        "load_settings": Case(True, {"TrainStep": {"steps": 6, "file": {"clip_grad_norm": 1e-4}}}),
        "switch_every": Case(1, PAIR, changes="loads"),
        "keep_every": Case(1, changes="files"),
        "preview_of": Case("average", {**PREVIEWS, "GraftEMA": {}}, changes="pictures"),
        "log_seconds": Case(5, {"TrainStep": {"tensorboard": True}}, changes="flushed"),
    },
    "GraftSlider": {
        "method": Case("concept sliders", SLIDER),
        "positive": Case("a blue circle", SLIDER),
        "negative": Case("a blue circle", SLIDER),
        "target": Case("a blue circle", SLIDER),
        "neutral": Case("a blue circle", SLIDER),
        "keep": Case("one\ntwo", SLIDER),
        "guidance": Case(1.0, SLIDER),
        "width": Case(128, SLIDER),
        "height": Case(128, SLIDER),
        "steps": Case(5, SLIDER),
        "cfg": Case(4.0, SLIDER),
        "clip": Case("other", SLIDER),
        "vae": Case(None, SLIDER, refused="connect VAE, which tells the shape of the latents"),
        "dataset": Case("dead2", SLIDER),
        "anchor": Case("a blue circle", SLIDER),
        "anchor_strength": Case(3.0, ANCHORED),
    },
    "GraftTrainVAEStart": {
        "vae": Case(0.5, VAE),
        "dataset": Case("dead2", VAE),
        "settings": Case({"GraftOptimizer": None}, VAE),
        "settings (ema)": Case({"GraftEMA": None}, VAE, changes="average"),
        "part": Case("whole", VAE),
        "crop": Case(32, VAE),
        "l1": Case(0.0, BOTH_ERRORS),
        "mse": Case(1.0, VAE),
        "edge": Case(1.0, VAE),
        "kl": Case(1e-2, WHOLE_VAE),
        "latent_bound": Case(1e-6, WHOLE_VAE, refused="the latents of held-out images have moved by"),
        "lpips": Case(1.0, VAE, refused="pip install lpips torchvision"),
        "discriminator": Case(0.5, VAE),
        "discriminator_start": Case(1, JUDGED_VAE),
        "discriminator_rate": Case(1e-2, JUDGED_VAE),
        "seed": Case(5, VAE),
        "run": Case("another run", VAE, changes="run"),
    },
    "GraftDemoVAE": {"damage": Case(0.5, VAE)},
}


@pytest.fixture(scope="module")
def folders(host):
    """Two folders of pictures of two shapes with captions beside them and, others, in a captions folder; one for
    regularization; one of pairs before and after an edit, and one of pairs by preference.
    """
    draw = np.random.default_rng(0)
    for name, count in (("dead", 8), ("dead2", 4), ("regular", 2)):
        folder = os.path.join(host.input, name)
        os.makedirs(os.path.join(folder, "captions"), exist_ok=True)
        for i in range(count):
            shape = (160, 224, 3) if i % 2 else (224, 224, 3)
            Image.fromarray(draw.integers(0, 255, shape, dtype=np.uint8)).save(os.path.join(folder, f"{i}.png"))
            beside = f"red square, {'one' if i < 3 else 'two'}, left, blue"
            for place, text in ((f"{i}.txt", beside), (f"captions/{i}.txt", "a green circle")):
                with open(os.path.join(folder, place), "w", encoding="utf-8") as file:
                    file.write(text)
    os.makedirs(os.path.join(host.input, "dead clips"))
    for name in ("0.gif", "1.gif", "2.gif"):
        frames = [Image.fromarray(draw.integers(0, 255, (96, 96, 3), dtype=np.uint8)) for _ in range(6)]
        frames[0].save(os.path.join(host.input, "dead clips", name), save_all=True, append_images=frames[1:])
    for folder, partners in (
        ("dead pairs", ("0.png", "0.control.png")),
        ("dead preferences", ("0.win.png", "0.lose.png")),
    ):
        os.makedirs(os.path.join(host.input, folder))
        for name in (*partners, *(partner.replace("0", "1", 1) for partner in partners)):
            pixels = draw.integers(0, 255, (224, 224, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(os.path.join(host.input, folder, name))


class Lab:
    """Runs the training nodes with settings by node, and says what came of it; `known` are the runs of before."""

    def __init__(self, host, monkeypatch, known) -> None:
        self.host, self.monkeypatch, self.known = host, monkeypatch, known
        self.model, self.clip, self.vae = host.call("GraftDemo")

    def unflipped(self, given):
        """What the run with which a case is compared gives: one run for all cases with the same inputs."""
        name = repr(sorted(given.items()))
        if name not in self.known:
            self.known[name] = self.run(given)
        return self.known[name]

    def other(self, thing, scale=1.05):
        """The demo's model, CLIP or VAE with slightly different weights."""
        made = self.host.call("GraftDemo")[{"model": 0, "clip": 1, "vae": 2}[thing]]
        if thing == "vae":  # it has no weights: another class, of darker pictures

            class Darker(type(made)):
                def encode(self, pixels):
                    return super().encode(pixels * 0.8)

                def decode(self, latents):
                    return super().decode(latents) * 0.8

            made.__class__ = Darker
            return made
        place = {"model": "model", "clip": "cond_stage_model"}[thing]
        with torch.inference_mode():
            for p in getattr(made, place).parameters():
                p.mul_(scale)
        return made

    def of_kind(self, kind):
        import comfy.model_sampling as sampling

        if kind == "flow":
            return self.model
        prediction = {"eps": sampling.EPS, "v": sampling.V_PREDICTION}[kind]
        made = self.model.clone()
        made.add_object_patch(
            "model_sampling", type("Sampling", (sampling.ModelSamplingDiscrete, prediction), {})(None)
        )
        return made

    def dataset(self, given):
        given = dict(given)
        vae, clip = (
            self.other(name) if given.pop(name, "") == "other" else getattr(self, name) for name in ("vae", "clip")
        )
        for name in ("regularization", "more_images"):
            if given.get(name):
                given[name] = self.dataset({**BASE["GraftDataset"], "folder": given[name], "validation": 0.0})
        return self.host.call("GraftDataset", vae=vae, clip=clip, **given)[0]

    def settings(self, given):
        """What a chain of the settings nodes with inputs here gives; one whose settings are flipped to None is the
        last, with nothing before it.
        """
        settings, last = None, None
        for node in SETTINGS:
            values = given.get(node)
            if values is None:
                continue
            if "settings" in values:
                last = node
            else:
                settings = self.host.call(node, settings=settings, **values)[0]
        if last is not None:
            settings = self.host.call(last, **given[last])[0]
        return settings

    def different(self, given, nodes, flipped):
        """The settings of a run at a node that takes those of `nodes`, with what was flipped there."""
        if flipped is None:
            return None
        known = {node: given[node] for node in nodes if node in ALWAYS or given[node]}
        for node, values in flipped.items():
            known[node] = None if values is None else {**(known.get(node) or {}), **values}
        return self.settings(known)

    def run(self, given):
        """What a run with these inputs by node gives: digests by aspect."""
        left_out = [node for node, values in given.items() if values is None]
        given = {node: {**BASE.get(node, {}), **(given.get(node) or {})} for node in (*NODES, "model")}
        given |= dict.fromkeys(left_out)
        if (given["GraftAdapter"] or {}).get("initial") == "lora":
            other = self.start({**given, "GraftAdapter": {"rank": 2}, "GraftTrainStart": {"seed": 9}})
            given["GraftAdapter"]["initial"] = other.lora_model()
        if given["GraftTrainVAEStart"]:
            return self.vae_run(given)
        if given["GraftTrainPairStart"]:
            return self.pair_run(given)
        begin = self.beginning(given, "GraftTrainStart")
        if given["GraftSlider"]:
            begin["dataset"] = self.slider(given["GraftSlider"])
        if begin.get("model") == "other":
            begin["model"] = self.other("model")
        else:
            begin["model"] = self.of_kind(given["model"].get("kind", "flow"))
        state = self.host.call("GraftTrainStart", **begin)[0]
        return self.step(state, begin["run"], dict(given["TrainStep"]))

    def beginning(self, given, node, nodes=SETTINGS):
        """The inputs of a node that begins a run and takes settings of `nodes`; its models are as they were given."""
        digest = hashlib.sha256(repr(sorted(given.items())).encode()).hexdigest()[:16]
        begin = {"run": f"dead {digest}", "clip": self.clip, "vae": self.vae, "settings": {}, **given[node]}
        folder = begin.get("dataset", given["GraftDataset"]["folder"])
        begin["dataset"] = self.dataset({**given["GraftDataset"], "folder": folder})
        begin["settings"] = self.different(given, nodes, begin["settings"])
        if begin["vae"] == "other":
            begin["vae"] = self.other("vae")
        return begin

    def pair_run(self, given):
        """What a run of both experts gives; they are the demo's model with its weights scaled."""
        begin = self.beginning(given, "GraftTrainPairStart")
        begin["high_noise_model"] = self.other("model", begin.get("high_noise_model", 1.0))
        begin["low_noise_model"] = self.other("model", begin["low_noise_model"])
        if "low_noise_settings" in begin:
            begin["low_noise_settings"] = self.settings(begin["low_noise_settings"])
        state = self.host.call("GraftTrainPairStart", **begin)[0]
        return self.step(state, begin["run"], dict(given["TrainStep"]))

    def slider(self, given):
        """The dataset of a slider; its pictures, if it has any, are those of a folder."""
        given = {"clip": self.clip, "vae": self.vae, **given}
        if given["clip"] == "other":
            given["clip"] = self.other("clip")
        if "dataset" in given:
            given["dataset"] = self.dataset({**BASE["GraftDataset"], "folder": given["dataset"]})
        return self.host.call("GraftSlider", **given)[0]

    def vae_run(self, given):
        """What a run of VAE training gives; its VAE is the demo's with some damage."""
        begin = self.beginning(given, "GraftTrainVAEStart", ("GraftOptimizer", "GraftEMA"))
        del begin["clip"]
        damage = given["GraftTrainVAEStart"].get("vae", given["GraftDemoVAE"]["damage"])
        begin["vae"] = self.host.call("GraftDemoVAE", damage=damage)[0]
        state = self.host.call("GraftTrainVAEStart", **begin)[0]
        result = self.step(state, begin["run"], dict(given["TrainStep"]))
        after = self.host.call("TrainStep", state=state, **given["TrainStep"])[0]  # the stored result
        self.host.call("GraftTrainedVAE", state=after)
        return result

    def start(self, given):
        return self.host.call(
            "GraftTrainStart",
            model=self.model,
            dataset=self.dataset(given["GraftDataset"]),
            settings=self.settings({"GraftAdapter": given["GraftAdapter"]}),
            **given["GraftTrainStart"],
        )[0]

    def step(self, state, run, given):
        host = self.host
        if given.pop("state", "") == "step 1":
            state = host.call("TrainStep", state=state, steps=1)[0]
        for name in ("positive", "negative"):
            if isinstance(given.get(name), str):
                given[name] = host.call("CLIPTextEncode", clip=self.clip, text=given[name])[0]
        if "latent" in given:
            given["latent"] = host.call(
                "EmptyLatentImage", width=given["latent"], height=given["latent"], batch_size=1
            )[0]
        if "settings" in given:
            given["settings"] = self.settings(
                {node: {**BASE.get(node, {}), **values} for node, values in given["settings"].items()}
            )
        if given.pop("is_short", False):
            self.be_short_of_memory()
        content = given.pop("file", None)
        if content is not None:
            path = Path(host.output, "graft", run, "train.json")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(content), encoding="utf-8")
        kept = []
        partial = self.store.Store.save_partial
        self.monkeypatch.setattr(
            self.store.Store, "save_partial", lambda own, at, to: kept.append(at.step) or partial(own, at, to)
        )
        denoiser, loads = host.module("host.denoiser"), []
        opened = denoiser.open_denoiser
        self.monkeypatch.setattr(denoiser, "open_denoiser", lambda *given: loads.append(1) or opened(*given))
        logs, flushed = host.module("training.reports.tensorboard"), []
        writer = logs.Writer
        self.monkeypatch.setattr(logs, "Writer", lambda *given: flushed.append(given[1:]) or writer(*given))
        told = len(host.events)
        result = host.call("TrainStep", state=state, **given)
        self.monkeypatch.undo()
        after = result[0]
        states = getattr(after, "states", [after])
        folder = os.path.join(host.output, "graft", run)
        files = sorted(
            os.path.relpath(os.path.join(at, name), folder) for at, _, names in os.walk(folder) for name in names
        )
        pictures = [
            picture for name, data in host.events[told:] if name == "graft.preview" for picture in data["pictures"]
        ]
        shown = hashlib.sha256()
        for picture in pictures:
            with open(
                os.path.join(getattr(host, picture["type"]), picture["subfolder"], picture["filename"]), "rb"
            ) as file:
                shown.update(file.read())
        return {
            "weights": [sha256_of_tensors(state.trained) for state in states],
            "average": [sha256_of_tensors({**state.average, **state.powers}) for state in states],
            "history": [state.history for state in states],
            "loads": len(loads),
            "files": [name.split("events.out")[0] if "tensorboard" in name else name for name in files],
            "snapshots": kept,
            "flushed": flushed,
            "pictures": (len(pictures), shown.hexdigest()),
            "clip": result[2] is None,
            "run": [state.run for state in states],
        }

    def be_short_of_memory(self):
        """Memory is short for a step without gradient checkpointing."""
        loop = self.host.module("training.run.loop")
        real = loop.advance_

        def advance_(work):
            if not work.start_state.settings.optimizer.checkpointing:
                raise MemoryError
            return real(work)

        self.monkeypatch.setattr(loop, "advance_", advance_)

    @property
    def store(self):
        """The pack's own module, as the host imported it."""
        return self.host.module("training.store.store")


@pytest.fixture(scope="module")
def known():
    return {}


@pytest.fixture
def lab(host, folders, monkeypatch, known):
    return Lab(host, monkeypatch, known)


def test_every_input_has_a_case(host):
    for node in NODES:
        inputs = {entry.id for entry in host.node(node).define_schema().inputs} - BY_THE_EXECUTOR.get(node, set())
        cases = {_input(name) for name in CASES[node]}
        assert inputs == cases, f"{node}: {sorted(inputs ^ cases)} are without a case here, or gone"


def _input(name):
    """The input that a case is of."""
    return name.partition(" (")[0]


@pytest.mark.parametrize(("node", "name"), [(node, name) for node in NODES for name in CASES[node]])
def test_the_setting_is_alive(lab, node, name):
    case = CASES[node][name]
    flipped = {**case.given, node: {**case.given.get(node, {}), _input(name): case.value}}
    before = lab.unflipped(case.given)
    if case.refused:
        with pytest.raises((ValueError, RuntimeError), match=case.refused):
            lab.run(flipped)
        return
    after = lab.run(flipped)
    if case.same:
        assert after["weights"] == before["weights"] and after["average"] == before["average"], (
            f"{node}.{name} is to change speed only"
        )
    else:
        assert after[case.changes] != before[case.changes], (
            f"{node}.{name} = {case.value!r} changes nothing of the {case.changes}"
        )
