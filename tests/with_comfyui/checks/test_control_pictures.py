"""Control pictures of a folder: what the dataset holds is what ComfyUI's own nodes make of the same pictures, and tiny
models of their families train on it.
"""

import functools
import shutil
from pathlib import Path

import comfy.supported_models
import numpy as np
import pytest
import torch
from comfy_extras import nodes_edit_model, nodes_flux, nodes_ip2p, nodes_qwen, nodes_wan
from families import build
from graft_nodes import host as wall
from graft_nodes.host import conditions
from graft_nodes.training.data import encoding
from graft_nodes.training.data.batches import image_conditioning
from graft_nodes.training.data.cache import Cache
from graft_nodes.training.data.control_encoding import ControlEncoder
from graft_nodes.training.data.control_methods import find_method
from graft_nodes.training.data.filters import Filters
from graft_nodes.training.data.folder_reader import read_folder
from graft_nodes.training.data.folder_settings import FolderSettings
from graft_nodes.training.optimizers.settings import OptimizerSettings
from graft_nodes.training.run import step as steps
from graft_nodes.training.run import workspace
from graft_nodes.training.state import Settings, Start, begin
from graft_nodes.training.trainable.settings import AdapterSettings
from PIL import Image
from tiny_families import EVERY, Family

import nodes

from .test_train_clip import clip_of


class Vae:
    """A VAE of 16 channels: each latent is what its 8 x 8 pixels hold on average. With `frames` that of a video."""

    def __init__(self, frames=False, channels=16):
        self.frames, self.channels = frames, channels

    def encode(self, pixels):
        height, width = (side // 8 * 8 for side in pixels.shape[1:3])
        top, left = (pixels.shape[1] - height) // 2, (pixels.shape[2] - width) // 2
        pixels = pixels[:, top : top + height, left : left + width]
        latents = torch.nn.functional.avg_pool2d(pixels.movedim(-1, 1), 8)
        latents = torch.cat([latents * (1 + 0.1 * n) - 0.5 for n in range(6)], 1)[:, : self.channels]
        if self.frames:
            latents = latents[::4].movedim(0, 1)[None]
        return latents


class Clip:
    """A CLIP that makes random tokens of a text, and none of pictures; `mask` is a mask of its tokens."""

    def __init__(self, mask=None):
        self.entries = {} if mask is None else {"attention_mask": mask}

    def tokenize(self, text, **_):
        return text

    def encode_from_tokens_scheduled(self, tokens):
        draws = torch.Generator().manual_seed(len(tokens))
        pooled = torch.randn(1, 8, generator=draws)
        return [[torch.randn(1, 6, 12, generator=draws), {"pooled_output": pooled, **self.entries}]]


def _save(path, width, height, seed):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)).save(path)


def _loaded(path):
    """As LoadImage gives it."""
    return torch.from_numpy(np.asarray(Image.open(path).convert("RGB"), dtype=np.float32) / 255.0)[None]


def _read(folder, clip, vae, method="auto", cache=None, tokenizer="", calls=None, **settings):
    """The dataset of a folder, as Dataset makes it."""
    listing = read_folder(folder, FolderSettings(validation=0.0, control_pictures=method, **settings))
    way = find_method(method, tokenizer or wall.encoding.tokenizer_of(clip))

    def encode_prompt(caption, pictures, way):
        text, options = way.prompt(wall.encoding.prompt_of(caption, False), len(pictures))
        if calls is not None:
            calls.append(caption)
        return wall.encoding.encode_with_pictures(clip, text, pictures, options)

    encode_pixels = functools.partial(wall.encoding.encode_pictures, vae)
    controls = ControlEncoder(listing.folder, way, encode_pixels, encode_prompt, "vae", cache)
    with torch.inference_mode():
        return encoding.encode(
            listing,
            encode_pixels,
            functools.partial(wall.encoding.encode_captions, clip),
            ("vae", "clip"),
            cache,
            controls=controls,
        )[0]


def _same(found, expected):
    """Whether the entries of two conditionings are equal."""
    if isinstance(expected, torch.Tensor):
        return torch.equal(found, expected.float())
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(_same, found, expected))
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(_same(found[name], value) for name, value in expected.items())
    return found == expected


def _assert_is(conditioning, core):
    ((context, entries),) = core
    assert torch.equal(conditioning.context, context.float())
    assert _same(dict(conditioning.extras), {key: value for key, value in entries.items() if value is not None}) or (
        _same(dict(conditioning.extras), entries)
    )


PLAIN = {"filters": Filters(size_conditioning=False)}


def test_flux_kontext_is_scale_and_reference_latent(tmp_path):
    """Two control pictures: one of the image's shape, one of another."""
    _save(tmp_path / "a.png", 128, 128, 0)
    (tmp_path / "a.txt").write_text("make it red")
    _save(tmp_path / "a.control.png", 256, 256, 1)
    _save(tmp_path / "a.control2.png", 300, 170, 2)
    clip, vae = Clip(), Vae()
    data = _read(tmp_path, clip, vae, resolution=128, tokenizer="FluxTokenizer", **PLAIN)
    core = clip.encode_from_tokens_scheduled("make it red")
    for name in ("a.control.png", "a.control2.png"):
        scaled = nodes_flux.FluxKontextImageScale.execute(_loaded(tmp_path / name)).args[0]
        core = nodes_edit_model.ReferenceLatent.execute(core, {"samples": vae.encode(scaled)}).args[0]
    _assert_is(image_conditioning(data, "make it red", data.images[0].crop(0)), core)


@pytest.mark.parametrize("plus", [True, False], ids=["Plus", "first"])
def test_qwen_image_edit_sees_the_pictures(tmp_path, monkeypatch, plus):
    """Latents and text are those of core's node, with the empty caption too; the second time from the cache."""
    clip, vae = clip_of("qwen", monkeypatch), Vae(frames=True)
    _save(tmp_path / "data" / "a.png", 128, 128, 0)
    (tmp_path / "data" / "a.txt").write_text("make (it) red")
    _save(tmp_path / "data" / "control" / "a.png", 200, 200, 1)
    files = ["a.png"]
    if plus:
        _save(tmp_path / "data" / "control2" / "a.png", 120, 300, 2)
        files.append("../control2/a.png")
    pictures = [_loaded(tmp_path / "data" / "control" / name) for name in files]
    method = "auto" if plus else "Qwen-Image-Edit"
    for calls in ([], []):
        cache = Cache(tmp_path / "cache")
        data = _read(tmp_path / "data", clip, vae, method, cache, resolution=128, calls=calls, **PLAIN)
        for caption in ("make (it) red", ""):
            found = image_conditioning(data, caption, data.images[0].crop(0))
            prompt = wall.encoding.prompt_of(caption, False)
            with torch.inference_mode():
                if plus:
                    node = nodes_qwen.TextEncodeQwenImageEditPlus
                    core = node.execute(clip, prompt, vae, *pictures).args[0]
                else:
                    core = nodes_qwen.TextEncodeQwenImageEdit.execute(clip, prompt, vae, *pictures).args[0]
            _assert_is(found, core)
    assert calls == []


def test_instruct_pix2pix_is_its_node(tmp_path):
    _save(tmp_path / "a.png", 128, 128, 0)
    _save(tmp_path / "a.control.png", 128, 128, 1)
    clip, vae = Clip(), Vae(channels=4)
    data = _read(tmp_path, clip, vae, "concatenated latents", resolution=128, **PLAIN)
    text = clip.encode_from_tokens_scheduled("")
    node = nodes_ip2p.InstructPixToPixConditioning
    core = node.execute(text, text, _loaded(tmp_path / "a.control.png"), vae).args[0]
    _assert_is(image_conditioning(data, "", data.images[0].crop(0)), core)


def test_wan_image_to_video_is_its_node(tmp_path):
    _save(tmp_path / "a.png", 128, 128, 0)
    _save(tmp_path / "a.control.png", 128, 128, 1)
    clip, vae = Clip(), Vae(frames=True)
    data = _read(tmp_path, clip, vae, resolution=128, tokenizer="WanT5Tokenizer", **PLAIN)
    text = clip.encode_from_tokens_scheduled("")
    picture = _loaded(tmp_path / "a.control.png")
    core = nodes_wan.WanImageToVideo.execute(text, text, vae, 128, 128, 1, 1, start_image=picture).args[0]
    _assert_is(image_conditioning(data, "", data.images[0].crop(0)), core)


def test_an_inpainting_mask_is_inpaint_model_conditioning(tmp_path):
    _save(tmp_path / "a.png", 128, 128, 0)
    _save(tmp_path / "a.control.png", 128, 128, 1)
    mask = Image.open(tmp_path / "a.control.png").convert("L")
    mask.save(tmp_path / "a.control.png")
    clip, vae = Clip(), Vae()
    data = _read(tmp_path, clip, vae, "inpainting mask", resolution=128, **PLAIN)
    text = clip.encode_from_tokens_scheduled("")
    given = {"vae": vae, "pixels": _loaded(tmp_path / "a.png"), "mask": _loaded(tmp_path / "a.control.png")[..., 0]}
    core = nodes.InpaintModelConditioning().encode(text, text, noise_mask=False, **given)[0]
    _assert_is(image_conditioning(data, "", data.images[0].crop(0)), core)


def test_flux_fill_learns_from_masks_of_a_folder(tmp_path):
    losses = []
    for seed in (10, 20, 10):
        folder = _pairs(tmp_path / f"{seed}", seed)
        data = _read(folder, Clip(), Vae(), "inpainting mask", resolution=64, bucket_step=16, flip=0.5, **PLAIN)
        losses.append(_trained("flux", data, build("flux", in_channels=96)))
    assert losses[0] == losses[2] != losses[1]
    with pytest.raises(ValueError, match="takes no concatenated latents"):
        _trained("flux", data)


def _trained(name, data, patcher=None):
    patcher = patcher or build(name)
    settings = Settings(OptimizerSettings(learning_rate=1e-2, batch_size=2, total_steps=10))
    state = begin(
        patcher.model.diffusion_model, Start("m", data.digest, AdapterSettings(rank=2, targets="all")), settings
    )
    with wall.denoiser.open_denoiser(patcher) as denoiser:
        work = workspace.Workspace(state, denoiser, data)
        with work.install():
            result = steps.advance_(work)
        work.close()
    return result.loss


def _pairs(folder, seed):
    for number in range(2):
        _save(folder / f"{number}.png", 64, 80, number)
        _save(folder / f"{number}.control.png", 64, 80, seed + number)
    return folder


CONCATENATED = {  # models that are others than those of tiny_families only by the picture that they take
    "instruct pix2pix": Family("SD15_instructpix2pix", {**EVERY["sd1"].config, "in_channels": 8}, predicts="eps"),
    "flux canny": Family("Flux", {**EVERY["flux"].config, "in_channels": 32}, (16, 8, 10), EVERY["flux"].extras),
}


@pytest.mark.parametrize(
    ("name", "method", "frames"),
    [
        ("flux kontext", "reference latents", False),
        ("omnigen2", "reference latents", False),
        ("qwen edit", "reference latents", True),
        ("wan i2v", "Wan image to video", True),
        ("instruct pix2pix", "concatenated latents", False),
        ("flux canny", "concatenated latents", False),
    ],
)
def test_other_control_pictures_change_the_loss(tmp_path, monkeypatch, name, method, frames):
    for title, family in CONCATENATED.items():
        monkeypatch.setitem(EVERY, title, family)
    vae, given = Vae(frames, EVERY[name].latent[0]), {"resolution": 64, "bucket_step": 16, "flip": 0.5}
    clip = Clip(torch.ones(1, 6, dtype=torch.long) if name == "omnigen2" else None)
    losses = []
    for seed in (10, 20, 10):
        data = _read(_pairs(tmp_path / f"{seed}", seed), clip, vae, method, **given, **PLAIN)
        losses.append(_trained(name, data))
    assert losses[0] == losses[2] != losses[1]


@pytest.mark.parametrize(
    ("name", "method", "frames", "says"),
    [
        ("wan", "Wan image to video", True, "takes no concatenated latents"),
        ("wan", "concatenated latents", True, "takes no concatenated latents"),
        ("sd3", "reference latents", False, "takes no reference latents"),
    ],
)
def test_a_model_that_takes_none_is_refused_at_the_first_step(tmp_path, name, method, frames, says):
    data = _read(_pairs(tmp_path, 1), Clip(), Vae(frames), method, resolution=64, bucket_step=16, **PLAIN)
    with pytest.raises(ValueError, match=says):
        _trained(name, data)


@pytest.mark.parametrize(
    ("name", "config", "takes"),
    [
        ("wan", {}, False),
        ("wan i2v", {}, True),
        ("flux", {}, False),
        ("flux kontext", {}, False),
        ("flux", {"in_channels": 96}, True),
        ("sd3", {}, False),
        ("omnigen2", {}, False),
        ("qwen edit", {}, False),
        ("ltx", {}, False),
        ("hunyuan", {}, False),
    ],
)
def test_which_models_take_a_picture_beside_the_noise(name, config, takes):
    _available(name)
    patcher = build(name, **config)
    x = conditions.empty_noise(patcher.model, torch.device("cpu"))
    assert ("c_concat" in patcher.model.extra_conds(**_asked(x))) == takes
    assert conditions.takes_picture(patcher.model) == takes


def test_an_inpainting_model_of_stable_diffusion_takes_one_with_its_mask():
    patcher = build("sd1", in_channels=9)
    patcher.model.set_inpaint()
    assert conditions.takes_picture(patcher.model)


@pytest.mark.parametrize("name", ["hunyuan 1.5", "kandinsky 5"])
def test_text_to_video_with_an_empty_picture_beside_the_noise_needs_none(name):
    """ComfyUI gives these the empty picture for plain text to video."""
    _available(name)
    patcher = build(name)
    x = conditions.empty_noise(patcher.model, torch.device("cpu"))
    assert "c_concat" in patcher.model.extra_conds(**_asked(x))
    assert not conditions.takes_picture(patcher.model)


def _available(name):
    if not hasattr(comfy.supported_models, EVERY[name].supported):
        pytest.skip(f"this ComfyUI has no {EVERY[name].supported}")


def _asked(x):
    """What ComfyUI's sampler says of a conditioning without a picture."""
    return {
        "noise": x,
        "latent_image": x,
        "device": x.device,
        "cross_attn": torch.ones(1, 6, 12),
        "pooled_output": torch.ones(1, 8),
    }


def test_a_text_encoder_that_sees_pictures_is_not_trained(tmp_path, monkeypatch):
    clip = clip_of("qwen", monkeypatch)
    data = _read(_pairs(tmp_path, 1), clip, Vae(True), resolution=64, bucket_step=16, **PLAIN)
    patcher, adapter = build("qwen edit"), AdapterSettings(rank=2, text_encoder=True)
    encoder = clip.cond_stage_model
    state = begin(patcher.model.diffusion_model, Start("m", data.digest, adapter), Settings(), text_encoder=encoder)
    says = pytest.raises(ValueError, match="this text encoder sees the control pictures")
    with wall.denoiser.open_denoiser(patcher, clip=clip) as denoiser, says:
        workspace.Workspace(state, denoiser, data)


# --- whole workflows --------------------------------------------------------------------------------------------------

WORKFLOWS = {  # family: (its text encoder, whether its VAE is a video's, the conditioning's entry, control pictures)
    "flux kontext": ("flux", False, "reference_latents", 1),
    "qwen edit": ("qwen", True, "reference_latents", 2),
    "wan i2v": ("wan", True, "concat_latent_image", 1),
}


MADE = {}  # the CLIP and VAE of each family


class Loader:
    """A node that gives a tiny model with its CLIP and VAE, as loaders do."""

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"name": ("STRING", {"default": ""})}}

    RETURN_TYPES = ("MODEL", "CLIP", "VAE")
    FUNCTION = "make"
    CATEGORY = "test"

    def make(self, name):
        return build(name), *MADE[name]


def _workflow(host, name, run, steps):
    def node(node_id, **given):
        return {"class_type": node_id, "inputs": {**host.defaults(node_id), **given}}

    prompt = {
        "1": node("GraftTestLoader", name=name),
        "2": node(
            "GraftDataset",
            folder="edits",
            clip=["1", 1],
            vae=["1", 2],
            resolution=64,
            bucket_step=16,
            validation=0.34,
            flip=0.5,
        ),
        "3": node("GraftAdapter", rank=2, targets="all"),
        "4": node("GraftOptimizer", settings=["3", 0], learning_rate=5e-3, batch_size=2, total_steps=4),
        "5": node("GraftTrainStart", model=["1", 0], dataset=["2", 0], settings=["4", 0], run=run),
    }
    last = "5"
    for number, count in enumerate(steps, 6):
        prompt[str(number)] = node("TrainStep", state=[last, 0], steps=count, validate_every=2)
        last = str(number)
    return prompt, last


def _run(host, name, run, steps):
    host.nodes.NODE_CLASS_MAPPINGS.update(GraftTestLoader=Loader)
    host.fresh()
    prompt, last = _workflow(host, name, run, steps)
    result = host.run(prompt, capture={"state": [last, 0], "data": ["2", 0], "report": ["2", 2]})
    assert result["success"], str(result["errors"])[:3000]
    return result["captured"]


@pytest.mark.parametrize("name", WORKFLOWS)
def test_a_workflow_trains_on_pairs_and_goes_on_to_the_same_bytes(host, monkeypatch, name):
    """Dataset tells from the CLIP how the model takes the pictures. Two steps and two more, the second time after a
    stop, give the bytes of four; other control pictures another loss.
    """
    encoder, frames, entry, count = WORKFLOWS[name]
    MADE[name] = (clip_of(encoder, monkeypatch), Vae(frames))
    folder = Path(host.input) / "edits"
    shutil.rmtree(folder, ignore_errors=True)
    for number in range(3):
        _save(folder / f"{number}.png", 64, 80, number)
        (folder / f"{number}.txt").write_text("a red square", encoding="utf-8")
        for control in range(count):
            _save(folder / f"control{control + 1}" / f"{number}.png", 64, 80, 10 * control + number + 50)
    short = name.replace(" ", "-")
    whole = _run(host, name, f"{short}-whole", [4])
    assert f"control pictures: {3 * count}, {count} for each image" in whole["report"]
    for image in whole["data"].images + whole["data"].held_out:
        assert entry in image.extras and image.flipped_extras is not None
        if entry == "reference_latents":
            assert len(image.extras[entry]) == count
    _run(host, name, f"{short}-parts", [2])
    parts = _run(host, name, f"{short}-parts", [2, 2])
    for key, tensor in whole["state"].trained.items():
        assert torch.equal(tensor, parts["state"].trained[key])
    assert whole["state"].history.loss == parts["state"].history.loss
    _save(folder / "control1" / "1.png", 64, 80, 999)
    other = _run(host, name, f"{short}-other", [4])
    assert other["data"].digest != whole["data"].digest and other["state"].history != whole["state"].history
