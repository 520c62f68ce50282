"""Samples with what ComfyUI's own nodes make: Flux Kontext, Qwen-Image-Edit with two references and Wan image to video
train, branch, stop and resume to the same bytes, and other references change the loss. So does each expert of Wan 2.2,
on its own noise levels.
"""

import gc
import shutil
import threading
from functools import partial
from pathlib import Path

import comfy.model_management
import numpy as np
import pytest
import torch
from families import build, conditions, random
from graft_nodes.storage.digest import sha256_of_tensors
from graft_nodes.tests.training.data.making_clips import write_clip
from PIL import Image
from safetensors import safe_open
from tiny_families import EVERY, WAN, Family

COUNT = 4


class TinyVAE:
    """Stands in for a VAE: eight pixels to a side and four frames to a latent frame. What it gives depends on all
    frames.
    """

    def __init__(self, name):
        self.shape = EVERY[name].latent

    def encode(self, pixels):
        frames, height, width, _ = pixels.shape
        sides = [height // 8, width // 8]
        if len(self.shape) == 4:
            sides.insert(0, (frames - 1) // 4 + 1)
        return random(1, self.shape[0], *sides, seed=int(1000 * float(pixels.double().sum())) % 2**31)

    def spacial_compression_encode(self):
        return 8


class TinyCLIP:
    """Stands in for a text encoder: what it gives depends on the text and the pictures that it sees."""

    def __init__(self, name):
        self.name = name

    def tokenize(self, text, images=(), **_):
        return len(text) + sum(int(100 * float(image.double().sum())) for image in images)

    def encode_from_tokens_scheduled(self, tokens, *_, **__):
        context, entries = conditions(self.name, seed=tokens % 2**31)
        return [[context, {name: value for name, value in entries.items() if name != "reference_latents"}]]


class Clips:
    """A list of clips (5, 64, 80, 3), their first frames and captions."""

    RETURN_TYPES = ("IMAGE", "IMAGE", "STRING")
    OUTPUT_IS_LIST = (True, True, True)
    FUNCTION = "make"
    CATEGORY = "test"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"seed": ("INT", {"default": 0})}}

    def make(self, seed):
        clips = [torch.rand(5, 64, 80, 3, generator=torch.Generator().manual_seed(n)) for n in range(COUNT)]
        starts = [clip[:1] * (1.0 - 0.1 * seed) for clip in clips]
        return clips, starts, [f"clip {n}" for n in range(COUNT)]


def folder(host, name, first):
    """A folder of pictures with captions."""
    place = Path(host.input) / name
    place.mkdir(exist_ok=True)
    for number in range(COUNT):
        pixels = np.random.default_rng(first + number).integers(0, 255, (64, 80, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(place / f"{number}.png")
        (place / f"{number}.txt").write_text(f"make it {number}", encoding="utf-8")
    return name


def node(class_type, **inputs):
    return {"class_type": class_type, "inputs": inputs}


def common(*steps, run, dataset="samples", validate_every=1):
    """Loaders, Start Training on the dataset of a node that is still to be added, and Train Steps in a row."""
    graph = {
        "model": node("UNETLoader"),
        "clip": node("CLIPLoader"),
        "vae": node("VAELoader"),
        "adapter": node("GraftAdapter", rank=2, targets="all"),
        "optimizer": node(
            "GraftOptimizer", settings=["adapter", 0], learning_rate=1e-2, batch_size=2, precision="float32"
        ),
        "start": node(
            "GraftTrainStart",
            model=["model", 0],
            dataset=[dataset, 0],
            settings=["optimizer", 0],
            run=run,
        ),
    }
    at = ["start", 0]
    for number, count in enumerate(steps):
        graph[f"step{number}"] = node("TrainStep", state=at, steps=count, validate_every=validate_every)
        at = [f"step{number}", 0]
    return graph


def kontext(host, other):
    texts = ["pictures", 1]
    return {
        "pictures": node("LoadImageTextDataSetFromFolder", folder=folder(host, "edited", 0)),
        "sources": node("LoadImageDataSetFromFolder", folder=folder(host, f"sources {other}", 100 + other)),
        "latents": node("VAEEncode", pixels=["pictures", 0], vae=["vae", 0]),
        "reference": node("VAEEncode", pixels=["sources", 0], vae=["vae", 0]),
        "prompt": node("CLIPTextEncode", text=texts, clip=["clip", 0]),
        "conditioning": node("ReferenceLatent", conditioning=["prompt", 0], latent=["reference", 0]),
        "samples": node(
            "GraftSamples",
            latents=["latents", 0],
            conditioning=["conditioning", 0],
            captions=texts,
            clip=["clip", 0],
            validation=0.25,
        ),
    }


def qwen(host, other):
    graph = kontext(host, other)
    graph["second"] = node("LoadImageDataSetFromFolder", folder=folder(host, "second sources", 500))
    images = {"image1": ["sources", 0], "image2": ["second", 0]}
    graph["conditioning"] = node(
        "TextEncodeQwenImageEditPlus", prompt=["pictures", 1], clip=["clip", 0], vae=["vae", 0], **images
    )
    del graph["prompt"], graph["reference"]
    return graph


def wan(host, other):
    return {
        "clips": node("TestClips", seed=other),
        "latents": node("VAEEncode", pixels=["clips", 0], vae=["vae", 0]),
        "prompt": node("CLIPTextEncode", text=["clips", 2], clip=["clip", 0]),
        "conditioning": node(
            "WanImageToVideo",
            positive=["prompt", 0],
            negative=["prompt", 0],
            vae=["vae", 0],
            start_image=["clips", 1],
            width=80,
            height=64,
            length=5,
            batch_size=1,
        ),
        "samples": node(
            "GraftSamples",
            latents=["latents", 0],
            conditioning=["conditioning", 0],
            captions=["clips", 2],
            clip=["clip", 0],
            validation=0.25,
        ),
    }


WORKFLOWS = {"flux kontext": kontext, "qwen edit": qwen, "wan i2v": wan}


def loader_of(kind, make):
    """A loader's class that gives what `make` makes."""

    class Loader:
        RETURN_TYPES = (kind,)
        FUNCTION = "load"
        CATEGORY = "test"

        @classmethod
        def INPUT_TYPES(cls):
            return {"required": {}}

        def load(self):
            return (make(),)

    return Loader


@pytest.fixture
def loaders(host, monkeypatch):
    """Stands tiny models in for the loaders."""

    def put(name):
        parts = {"MODEL": lambda: build(name), "CLIP": lambda: TinyCLIP(name), "VAE": lambda: TinyVAE(name)}
        for kind, part in (("UNETLoader", "MODEL"), ("CLIPLoader", "CLIP"), ("VAELoader", "VAE")):
            monkeypatch.setitem(host.nodes.NODE_CLASS_MAPPINGS, kind, loader_of(part, parts[part]))
        monkeypatch.setitem(host.nodes.NODE_CLASS_MAPPINGS, "TestClips", Clips)

    return put


def ran(host, graph, **capture):
    for entry in graph.values():
        if entry["class_type"] in host.nodes.NODE_CLASS_MAPPINGS and entry["class_type"].startswith(("Graft", "Train")):
            entry["inputs"] = {**host.defaults(entry["class_type"]), **entry["inputs"]}
    result = host.run(graph, capture=capture)
    assert result["success"], result["errors"]
    return result["captured"]


def whole(state):
    return sha256_of_tensors(state.trained), sha256_of_tensors(state.optimizer), state.history, state.key


def cut_in_a_step(host, monkeypatch, graph, steps=2):
    """Interrupt a run between the forward and the backward pass of the step after `steps`."""
    denoiser, training = host.module("host.denoiser").Denoiser, []
    denoise = denoiser.denoise

    def interrupted(self, x, *more):
        found = denoise(self, x, *more)
        training.extend([found.requires_grad] if found.requires_grad else [])
        if len(training) > steps:
            raise comfy.model_management.InterruptProcessingException
        return found

    for entry in graph.values():
        if entry["class_type"].startswith(("Graft", "Train")):
            entry["inputs"] = {**host.defaults(entry["class_type"]), **entry["inputs"]}
    with monkeypatch.context() as patched:
        patched.setattr(denoiser, "denoise", interrupted)
        host.fresh()
        result = host.run(graph)
    assert not result["success"] and "execution_interrupted" in dict(result["events"])
    assert len(training) == steps + 1


@pytest.mark.parametrize("name", WORKFLOWS)
def test_a_workflow_of_core_s_nodes_trains_branches_stops_and_resumes(host, loaders, monkeypatch, name):
    build(name)  # skips where this ComfyUI has no such family
    make, run = WORKFLOWS[name], f"samples {name}"
    needed = {entry["class_type"] for entry in make(host, 0).values()} - {"TestClips"}
    if needed - host.nodes.NODE_CLASS_MAPPINGS.keys():
        pytest.skip("this ComfyUI has no such nodes")
    loaders(name)
    host.fresh()
    graph = {**make(host, 0), **common(4, run=run)}
    found = ran(host, graph, state=["step0", 0], report=["samples", 1], dataset=["samples", 0])
    at_once, data = found["state"], found["dataset"]
    assert "3 samples to train on, 1 held out" in found["report"]
    assert len(at_once.history.loss) == 4 and all(torch.isfinite(torch.tensor(at_once.history.loss)))
    moved = [key for key, tensor in at_once.trained.items() if "lora_up" in key and bool(tensor.any())]
    assert len(moved) > 0.8 * sum("lora_up" in key for key in at_once.trained)
    brought = {"flux kontext": "reference_latents (4)", "qwen edit": "reference_latents (4)"}
    assert brought.get(name, "concat_latent_image (4), concat_mask (4)") in found["report"]
    if name == "qwen edit":
        assert all(len(image.extras["reference_latents"]) == 2 for image in data.images)
    if name == "wan i2v":
        assert all(image.latent.shape == (16, 2, 8, 10) for image in data.images)
    shutil.rmtree(Path(host.output) / "graft" / run)
    host.fresh()
    loaders(name)
    monkeypatch.setattr(host.module("training.data.sample_store"), "KEPT_BYTES", 0)
    read = {"state": ["step1", 0], "half": ["step0", 0], "report": ["samples", 1], "dataset": ["samples", 0]}
    branched = ran(host, {**make(host, 0), **common(2, 2, run=run)}, **read)
    assert "read from the cache when they are drawn" in branched["report"]
    assert branched["dataset"].digest == data.digest
    assert whole(branched["state"]) == whole(at_once), "cut in two, made anew, and read from the cache"
    host.call("GraftSaveState", state=branched["half"], name=run)
    shutil.rmtree(Path(host.output) / "graft" / run)
    cut_in_a_step(host, monkeypatch, {**make(host, 0), **common(4, run=run)})
    assert whole(ran(host, {**make(host, 0), **common(4, run=run)}, state=["step0", 0])["state"]) == whole(at_once)
    shutil.rmtree(Path(host.output) / "graft" / run)
    loaded = host.call("GraftLoadState", name=run, model=build(name), dataset=data)[0]
    assert whole(host.call("TrainStep", state=loaded, steps=2, validate_every=1)[0]) == whole(at_once)
    other = ran(host, {**make(host, 1), **common(1, run=f"{run} other")}, state=["step0", 0])["state"]
    assert other.start.digest != at_once.start.digest
    assert other.history.loss[0] != at_once.history.loss[0]
    assert other.history.validation[0] != at_once.history.validation[0]
    shutil.rmtree(Path(host.output) / "graft" / f"{run} other", ignore_errors=True)


class Experts:
    """Stands in for the loader of both experts of Wan 2.2 I2V."""

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "load"
    CATEGORY = "test"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"unet_name": ("STRING", {"default": "high"})}}

    @torch.inference_mode()
    def load(self, unet_name):
        model = build("wan 2.2 i2v")
        for parameter in model.model.diffusion_model.parameters():
            parameter.mul_({"high": 1.0, "low": 0.9}[unet_name])
        return (model,)


def pair_of_experts(host, other, *steps, run):
    """Clips with their first frames, of core's nodes, to both experts in turn."""
    graph = {**wan(host, other), **common(*steps, run=run)}
    graph["model"] = node("UNETLoader", unet_name="high")
    graph["low"] = node("UNETLoader", unet_name="low")
    inputs = graph["start"]["inputs"]
    high = inputs.pop("model")
    graph["start"] = node("GraftTrainPairStart", **inputs, high_noise_model=high, low_noise_model=["low", 0])
    for number in range(len(steps)):
        graph[f"step{number}"]["inputs"]["switch_every"] = 1
    return graph


def forget(host, run):
    """Remove what is stored of both experts' runs, and of those with longer names."""
    for path in Path(host.output, "graft").glob(f"{run}*"):
        shutil.rmtree(path)


def test_both_experts_of_wan_2_2_train_in_turn_on_clips_with_their_first_frames(host, loaders, monkeypatch):
    """Each on its noise levels alone; cut, interrupted in a step or loaded, the run ends in the same bytes."""
    loaders("wan 2.2 i2v")
    monkeypatch.setitem(host.nodes.NODE_CLASS_MAPPINGS, "UNETLoader", Experts)
    run, denoiser, levels = "pair of core", host.module("host.denoiser").Denoiser, {}
    denoise = denoiser.denoise

    def watched(self, x, sigma, *more):
        first = next(iter(self.module.parameters())).detach().abs().sum()
        if not x.is_meta:  # as of the memory plan
            levels.setdefault(round(float(first), 4), []).extend(sigma.tolist())
        return denoise(self, x, sigma, *more)

    host.fresh()
    with monkeypatch.context() as patched:
        patched.setattr(denoiser, "denoise", watched)
        pair = ran(host, pair_of_experts(host, 0, 4, run=run), state=["step0", 0])["state"]
    expected = [whole(state) for state in pair.states]
    assert len(levels) == 2
    low, high = sorted(levels.values(), key=max)
    assert len(low) > 8 and len(high) > 8 and max(low) < 0.9 <= min(high)
    for state in pair.states:
        assert len(state.history.loss) == 4 and all(torch.isfinite(torch.tensor(state.history.loss)))
    forget(host, run)
    host.fresh()
    asked = {"state": ["step1", 0], "half": ["step0", 0], "dataset": ["samples", 0]}
    branched = ran(host, pair_of_experts(host, 0, 2, 2, run=run), **asked)
    assert [whole(state) for state in branched["state"].states] == expected
    host.call("GraftSaveState", state=branched["half"], name=run)
    forget(host, run)
    cut_in_a_step(host, monkeypatch, pair_of_experts(host, 0, 4, run=run))
    resumed = ran(host, pair_of_experts(host, 0, 4, run=run), state=["step0", 0])["state"]
    assert [whole(state) for state in resumed.states] == expected
    forget(host, run)
    models = {"model": Experts().load("high")[0], "low_noise_model": Experts().load("low")[0]}
    loaded = host.call("GraftLoadState", name=f"{run}_low_noise", dataset=branched["dataset"], **models)[0]
    on = host.call("TrainStep", state=loaded, steps=2, validate_every=1, switch_every=1)[0]
    assert [whole(state) for state in on.states] == expected
    other = ran(host, pair_of_experts(host, 1, 1, run=f"{run} other"), state=["step0", 0])["state"]
    for state, first in zip(other.states, pair.states, strict=True):
        assert state.history.loss[0] != first.history.loss[0]
    forget(host, run)


class Part:
    """Samples of Wan's sizes: latents of 17 frames at 832x480, conditionings of 512 tokens."""

    RETURN_TYPES = ("LATENT", "CONDITIONING")
    OUTPUT_IS_LIST = (True, True)
    FUNCTION = "make"
    CATEGORY = "test"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"number": ("INT", {"default": 0})}}

    def make(self, number):
        numbers = [float(PART * number + place) for place in range(PART)]
        latents = [{"samples": torch.full((1, 16, 5, 60, 104), one)} for one in numbers]
        return latents, [[[torch.full((1, 512, 4096), one), {}]] for one in numbers]


PART = 12  # samples in each


class Watch(threading.Thread):
    """Samples the memory of this process that is not a file's."""

    def __init__(self):
        super().__init__(daemon=True)
        self.stopped, self.begin, self.most = threading.Event(), self.now(), 0

    def now(self):
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))

    def run(self):
        while not self.stopped.wait(0.005):
            self.most = max(self.most, self.now() - self.begin)


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux says how much memory is anonymous")
def test_samples_in_parts_through_more_images_take_no_more_memory_the_more_there_are(host, monkeypatch):
    """With --cache-none, ComfyUI lets go of the latents and conditionings of a part when its Samples has run."""
    monkeypatch.setitem(host.nodes.NODE_CLASS_MAPPINGS, "TestPart", Part)
    store, batches = host.module("training.data.sample_store"), host.module("training.data.batches")
    a_part = PART * 4 * (16 * 5 * 60 * 104 + 512 * 4096)
    monkeypatch.setattr(store, "KEPT_BYTES", a_part // 8)
    most = []
    for count in (2, 8):
        shutil.rmtree(Path(host.output) / "graft" / "cache", ignore_errors=True)
        graph, last = {}, None
        for number in range(count):
            graph[f"part{number}"] = node("TestPart", number=number)
            made = node("GraftSamples", latents=[f"part{number}", 0], conditioning=[f"part{number}", 1], validation=0.0)
            made["inputs"] |= {} if last is None else {"more_images": last}
            graph[f"samples{number}"], last = made, [f"samples{number}", 0]
        host.fresh("NONE")
        gc.collect()
        watch = Watch()
        watch.start()
        data = ran(host, graph, dataset=last)["dataset"]
        for step in range(20):
            for batch in batches.make_batches(data, 2, 0.0, 0, step, step, "part 0"):
                for latent, conditioning in zip(batch.latents, batch.conditionings, strict=True):
                    assert (latent == latent.flatten()[0]).all() and conditioning.context[0, 0, 0] == latent.flatten()[
                        0
                    ]
        watch.stopped.set()
        watch.join()
        assert len(data.images) == count * PART
        most.append(watch.most)
        del data, batch, latent, conditioning
    assert most[0] < 4 * a_part and most[1] < most[0] + a_part // 2, [one / a_part for one in most]


def clips_of_core(host, start):
    """The frames from `start` on of clips in a folder."""
    place = Path(host.input) / "clips of core"
    for number in range(COUNT):
        write_clip(place / f"{number}.mp4", 9, (80, 64), seed=number, codec="mpeg4", pixels="yuv420p")
        (place / f"{number}.txt").write_text(f"clip {number}", encoding="utf-8")
    return {
        "clips": node("LoadVideoTextDataSetFromFolder", folder=place.name),
        "part": node("VideoTemporalCrop", video=["clips", 0], start_frame=start, length=5),
        "frames": node("GetVideoComponents", video=["part", 0]),
        "dataset": node(
            "MakeTrainingDataset", images=["frames", 0], texts=["clips", 1], vae=["vae", 0], clip=["clip", 0]
        ),
        "samples": node(
            "GraftSamples",
            latents=["dataset", 0],
            conditioning=["dataset", 1],
            captions=["clips", 1],
            clip=["clip", 0],
            validation=0.25,
        ),
    }


def test_clips_and_parts_of_them_from_core_s_dataset_nodes_become_samples(host, loaders):
    if {entry["class_type"] for entry in clips_of_core(host, 0).values()} - host.nodes.NODE_CLASS_MAPPINGS.keys():
        pytest.skip("this ComfyUI has no such nodes")
    found = []
    for start in (0, 4):
        loaders("wan")
        host.fresh()
        graph = {**clips_of_core(host, start), **common(1, run="clips of core")}
        found.append(ran(host, graph, state=["step0", 0], dataset=["samples", 0]))
    begin, end = (one["dataset"] for one in found)
    images = begin.images + begin.held_out
    assert {image.caption for image in images} == {f"clip {number}" for number in range(COUNT)}
    assert {tuple(image.latent.shape) for image in images} == {(16, 2, 8, 10)}  # five frames of 80x64
    assert len({sha256_of_tensors({"": image.latent}) for image in images + end.images + end.held_out}) == 2 * COUNT
    assert found[0]["state"].history.loss != found[1]["state"].history.loss


def test_what_cores_resolution_bucket_gives_becomes_samples(host):
    """Latents of two sizes, batched by size, with the conditioning of each sample."""
    nodes_dataset = pytest.importorskip("comfy_extras.nodes_dataset", reason="this ComfyUI has no dataset nodes")
    latents = [{"samples": random(1, 4, 8, 8 + 2 * (n % 2), seed=n)} for n in range(5)]
    conditionings = [[[random(1, 5, 6, seed=10 + n), {"pooled_output": random(1, 8, seed=20 + n)}]] for n in range(5)]
    bucketed = nodes_dataset.ResolutionBucket.execute(latents, conditionings).args
    order = [0, 2, 4, 1, 3]
    expected = [latents[n] for n in order], [conditionings[n] for n in order]
    found = []
    for given in (bucketed, expected):
        dataset = host.call("GraftSamples", latents=given[0], conditioning=given[1], validation=[0.0])[0]
        found.append(dataset.digest)
    assert len(bucketed[0]) == 2 and found[0] == found[1]


class Pictures:
    """A list of pictures (1, 64, 80, 3) with a mask each, of what a CLIP vision model sees of them, and of other
    clips.
    """

    RETURN_TYPES = ("IMAGE", "MASK", "CLIP_VISION_OUTPUT", "IMAGE")
    OUTPUT_IS_LIST = (True, True, True, True)
    FUNCTION = "make"
    CATEGORY = "test"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"seed": ("INT", {"default": 0})}}

    def make(self, seed):
        pictures = [random(1, 64, 80, 3, seed=n).sigmoid() for n in range(COUNT)]
        masks = [torch.zeros(1, 64, 80) for _ in range(COUNT)]
        for mask in masks:
            mask[:, : 32 + 8 * seed] = 1.0
        clips = [random(5, 64, 80, 3, seed=50 + 100 * seed + n).sigmoid() for n in range(COUNT)]
        return pictures, masks, [self.seen(100 * seed + n) for n in range(COUNT)], clips

    def seen(self, seed):
        import comfy.clip_vision

        output = comfy.clip_vision.Output()
        output.last_hidden_state = random(1, 257, 1280, seed=seed)
        output.penultimate_hidden_states = random(1, 257, 1280, seed=seed + 50)
        output.image_embeds = random(1, 1024, seed=seed)
        return output


class Songs:
    """Lists of latents of sound and of conditionings with lyrics."""

    RETURN_TYPES = ("LATENT", "CONDITIONING")
    OUTPUT_IS_LIST = (True, True)
    FUNCTION = "make"
    CATEGORY = "test"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"seed": ("INT", {"default": 0})}}

    def make(self, seed):
        latents = [{"samples": random(1, *EVERY["ace-step"].latent, seed=n)} for n in range(COUNT)]
        made = []
        for number in range(COUNT):
            context, entries = conditions("ace-step", seed=number)
            entries["conditioning_lyrics"] = entries["conditioning_lyrics"] + seed
            made.append([[context, {**entries, "lyrics_strength": 1.0}]])
        return latents, made


class Sounds:
    """A list of what an audio encoder makes of two seconds of sound."""

    RETURN_TYPES = ("AUDIO_ENCODER_OUTPUT",)
    OUTPUT_IS_LIST = (True,)
    FUNCTION = "make"
    CATEGORY = "test"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"seed": ("INT", {"default": 0})}}

    def make(self, seed):
        return ([self.heard(100 * seed + number) for number in range(COUNT)],)

    def heard(self, seed):
        layers = random(33, 1, 100, 1280, seed=seed)
        return {"encoded_audio_all_layers": list(layers), "audio_samples": 32000}


def clip_vision(host, other):
    graph = wan(host, 0)
    graph["pictures"] = node("TestPictures", seed=other)
    graph["conditioning"]["inputs"]["clip_vision_output"] = ["pictures", 2]
    return graph


def control_clip(host, other):
    graph = wan(host, 0)
    graph["pictures"] = node("TestPictures", seed=other)
    inputs = {**graph["conditioning"]["inputs"], "control_video": ["pictures", 3]}
    graph["conditioning"] = node("WanFunControlToVideo", **inputs)
    return graph


def fill(host, other):
    prompt = ["prompt", 0]
    pictures = {"pixels": ["pictures", 0], "mask": ["pictures", 1], "noise_mask": False}
    return {
        "pictures": node("TestPictures", seed=other),
        "prompt": node("CLIPTextEncode", text="a cat", clip=["clip", 0]),
        "filled": node("InpaintModelConditioning", positive=prompt, negative=prompt, vae=["vae", 0], **pictures),
        "samples": node("GraftSamples", latents=["filled", 2], conditioning=["filled", 0], validation=0.25),
    }


def song(host, other):
    return {
        "songs": node("TestSongs", seed=other),
        "samples": node("GraftSamples", latents=["songs", 0], conditioning=["songs", 1], validation=0.25),
    }


def sound(host, other):
    graph = wan(host, 0)
    graph["sounds"] = node("TestSounds", seed=other)
    inputs = {**graph["conditioning"]["inputs"], "audio_encoder_output": ["sounds", 0]}
    inputs["ref_image"] = inputs.pop("start_image")
    graph["conditioning"] = node("WanHuMoImageToVideo", **inputs)
    return graph


HUMO = Family("WAN21_HuMo", {**WAN, "model_type": "humo"}, (16, 2, 8, 10))
# (graph, family, settings of its model, what the conditionings bring)
ENTRIES = {
    "CLIP vision": (clip_vision, "wan i2v", {}, "clip_vision_output (4)"),
    "control clip": (control_clip, "wan i2v", {"in_dim": 48}, "concat_latent_image (4)"),
    "Flux Fill": (fill, "flux", {"in_channels": 96}, "concat_latent_image (4), concat_mask (4)"),
    "lyrics": (song, "ace-step", {}, ""),
    "sound": (sound, "wan humo", {}, "audio_embed (4), reference_latents (4)"),
}


@pytest.mark.parametrize("name", ENTRIES)
def test_what_nodes_put_into_a_conditioning_reaches_the_model_from_memory_and_from_the_cache(
    host, loaders, monkeypatch, name
):
    make, family, changes, brought = ENTRIES[name]
    monkeypatch.setitem(EVERY, "wan humo", HUMO)
    build(family, **changes)  # skips where this ComfyUI has no such family
    monkeypatch.setitem(host.nodes.NODE_CLASS_MAPPINGS, "TestPictures", Pictures)
    monkeypatch.setitem(host.nodes.NODE_CLASS_MAPPINGS, "TestSongs", Songs)
    monkeypatch.setitem(host.nodes.NODE_CLASS_MAPPINGS, "TestSounds", Sounds)
    run = f"entries {name}"

    def trained(other):
        loaders(family)
        loader = loader_of("MODEL", lambda: build(family, **changes))
        monkeypatch.setitem(host.nodes.NODE_CLASS_MAPPINGS, "UNETLoader", loader)
        host.fresh()
        shutil.rmtree(Path(host.output) / "graft" / run, ignore_errors=True)
        graph = {**make(host, other), **common(1, run=run)}
        return ran(host, graph, state=["step0", 0], report=["samples", 1])

    first, other = trained(0), trained(1)
    assert brought in first["report"]
    assert other["state"].history.loss != first["state"].history.loss
    assert other["state"].history.validation != first["state"].history.validation
    monkeypatch.setattr(host.module("training.data.sample_store"), "KEPT_BYTES", 0)
    read = trained(0)
    assert "read from the cache when they are drawn" in read["report"]
    assert whole(read["state"]) == whole(first["state"])
    assert any(bool(tensor.any()) for key, tensor in read["state"].trained.items() if "lora_up" in key)


@pytest.mark.parametrize("expert", ["high noise", "low noise"])
def test_an_expert_of_wan_2_2_trains_on_its_side_branches_resumes_and_saves_its_file(
    host, loaders, monkeypatch, expert
):
    """Image to video, whose models have Wan 2.1's layers without the vision input: the boundary is 0.9."""
    levels, run, suffix = [], f"expert {expert}", expert.replace(" ", "_")
    denoiser = host.module("host.denoiser").Denoiser
    denoise = denoiser.denoise

    def watched(self, x, sigma, *more):
        if not x.is_meta:  # as of the memory plan
            levels.extend(sigma.tolist())
        return denoise(self, x, sigma, *more)

    monkeypatch.setattr(denoiser, "denoise", watched)

    def made(*steps):
        host.fresh()
        loaders("wan")
        loader = loader_of("MODEL", lambda: build("wan", in_dim=36))
        monkeypatch.setitem(host.nodes.NODE_CLASS_MAPPINGS, "UNETLoader", loader)
        graph = {**wan(host, 0), **common(*steps, run=run)}
        graph["objective"] = node("GraftObjective", settings=["optimizer", 0], expert=expert, timesteps="uniform")
        graph["start"]["inputs"]["settings"] = ["objective", 0]
        return graph

    last = {"state": ["step0", 0], "report": ["start", 1], "dataset": ["samples", 0]}
    found = ran(host, made(4), **last)
    at_once = found["state"]
    side = {"high noise": "from 0.9 up", "low noise": "below 0.9"}[expert]
    assert f"expert {expert}: only noise levels (sigma) {side} are trained" in found["report"]
    assert at_once.settings.objective.boundary == 0.9
    assert len(levels) >= 12 and all((level >= 0.9) == (expert == "high noise") for level in levels)
    shutil.rmtree(Path(host.output) / "graft" / run)
    branched = ran(host, made(2, 2), state=["step1", 0], half=["step0", 0])
    assert whole(branched["state"]) == whole(at_once)
    host.call("GraftSaveState", state=branched["half"], name=run)
    shutil.rmtree(Path(host.output) / "graft" / run)
    model = build("wan", in_dim=36)
    loaded = host.call("GraftLoadState", name=run, model=model, dataset=found["dataset"])[0]
    assert whole(host.call("TrainStep", state=loaded, steps=2, validate_every=1)[0]) == whole(at_once)
    for prefix, name in (("loras/pair", f"pair_{suffix}_0"), (f"loras/my {expert}", f"my {expert}_0")):
        for given in ({"state": at_once}, {"lora_model": at_once.lora_model()}):
            path = Path(host.call("GraftSaveLoRA", **given, prefix=prefix)[0])
            assert path.name.startswith(name)
            with safe_open(path, "pt") as file:
                assert (file.metadata()["graft_expert"], file.metadata()["graft_expert_boundary"]) == (expert, "0.9")


def test_the_boundary_is_the_models_own_and_other_models_have_none(host):
    objective = host.call("GraftObjective", **{**host.defaults("GraftObjective"), "expert": "high noise"})[0].objective
    experts = host.module("training.objective.experts")
    for changes, boundary in (({}, 0.875), ({"in_dim": 36}, 0.9)):
        network = build("wan", **changes).model.diffusion_model
        assert experts.fill_boundary(objective, network).boundary == boundary
    for name in ("wan i2v", "wan 2.2", "flux"):
        with pytest.raises(ValueError, match="is not known as one of a pair"):
            experts.fill_boundary(objective, build(name).model.diffusion_model)


SAMPLINGS = ["uniform", "logit-normal", "shifted", "mode", "sigmoid", "shift", "flux_shift"]
SAMPLINGS += ["ai-toolkit shift", "ai-toolkit flux_shift"]


@pytest.mark.parametrize("shift", [5.0, 8.0])
@pytest.mark.parametrize("expert", ["high noise", "low noise"])
@pytest.mark.parametrize("timesteps", SAMPLINGS)
def test_ten_thousand_draws_are_all_on_the_experts_side_of_comfyuis_own_sigmas(host, timesteps, expert, shift):
    """In float64, with the model sampling that ModelSamplingSD3 puts on."""
    model = host.call("ModelSamplingSD3", model=build("wan"), shift=shift)[0]
    sampling = model.get_model_object("model_sampling")
    settings = host.module("training.objective.settings").ObjectiveSettings
    draws = host.module("training.objective.timesteps")
    at = partial(host.module("host.model_sampling").sigma_at, sampling)
    objective = settings(timesteps=timesteps, shift=3.0, expert=expert, boundary=0.875)
    found = draws.draw_expert_levels(objective, 10_000, torch.Generator().manual_seed(1), 1560, at).double()
    if expert == "high noise":
        assert float(found.min()) >= 0.875 and float(found.max()) <= 1.0
    else:
        assert float(found.min()) >= 0.0 and float(found.max()) < 0.875
    if timesteps == "uniform":  # as the sampler steps: uniform in the model's own time
        time = found / (shift - (shift - 1) * found)
        border = 0.875 / (shift - (shift - 1) * 0.875)
        spread = {"high noise": (1 + border) / 2, "low noise": border / 2}[expert]
        assert float(time.mean()) == pytest.approx(spread, abs=0.01)


@pytest.mark.parametrize(("family", "shift"), [("sd3", 3.0), ("wan", 8.0)])
def test_bounds_in_sigma_are_those_of_comfyuis_own_schedule(host, family, shift):
    """Trained and reported are levels between two sigmas of the sampler, uniform in the model's own time."""
    import comfy.samplers

    sampling = build(family).get_model_object("model_sampling")
    sampling.set_parameters(shift=shift)
    settings = host.module("training.objective.settings").ObjectiveSettings
    draws = host.module("training.objective.timesteps")
    at = partial(host.module("host.model_sampling").sigma_at, sampling)
    schedule = comfy.samplers.calculate_sigmas(sampling, "simple", 20)  # from 1 down to 0
    most, least = float(schedule[6]), float(schedule[15])
    objective = settings(min_timestep=least, max_timestep=most, sigma_bounds=True)
    found = draws.draw_levels(objective, 10_000, torch.Generator().manual_seed(1), 1560, at).double()
    assert float(found.min()) >= least and float(found.max()) <= most
    times = found / (shift - (shift - 1) * found)
    ends = [sigma / (shift - (shift - 1) * sigma) for sigma in (least, most)]
    quarters = torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)
    assert torch.allclose(times.quantile(quarters), ends[0] + (ends[1] - ends[0]) * quarters, atol=0.01)
    said = draws.describe_levels(objective, at, 1560)
    assert f"none below {least:.3g} " in said and f"or above {most:.3g} " in said
    fractions = draws.describe_levels(settings(min_timestep=0.5), at, 1560)
    assert f"none below {shift / (1 + shift):.3g} (minimum timestep 0.5)" in fractions
