"""Clips from a folder beside pictures, encoded by ComfyUI's own Wan VAE at a tiny size: what it is given is what its
node VAE Encode makes, and one run of both stops and resumes to the same bytes.
"""

import inspect
import shutil
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from comfy import sd
from comfy.ldm.wan.vae import WanVAE
from families import build
from graft_nodes import host as wall
from graft_nodes.tests.training.data.making_clips import random_frames, write_clip
from graft_nodes.tests.with_comfyui.checks.test_samples import TinyCLIP, common, loader_of, node, ran, whole
from PIL import Image

RUN = "clips and stills"


def tiny_vae():
    """ComfyUI's VAE object around a random Wan VAE of 8 channels."""
    size = {"dim": 8, "z_dim": 16, "dim_mult": [1, 2, 4, 4], "num_res_blocks": 2, "attn_scales": [], "dropout": 0.0}
    if "image_channels" in inspect.signature(WanVAE.__init__).parameters:
        size["image_channels"] = 3
    torch.manual_seed(5)
    model = WanVAE(temperal_downsample=[False, True, True], **size)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    with pytest.MonkeyPatch.context() as patch:  # 0.3.64 does not read the size from the file
        patch.setattr("comfy.ldm.wan.vae.WanVAE", lambda **given: WanVAE(**{**given, "dim": 8}))
        return sd.VAE(sd=model.state_dict(), dtype=torch.float32)


def folder(host):
    """Three clips of 9 frames and three pictures, with captions."""
    place = Path(host.input) / "moving"
    shutil.rmtree(place, ignore_errors=True)
    for number in range(3):
        write_clip(place / f"clip {number}.mkv", 9, (64, 64), seed=number)
        Image.fromarray(random_frames(1, (64, 64), 50 + number)[0]).save(place / f"still {number}.png")
        (place / f"clip {number}.txt").write_text(f"it moves {number}", encoding="utf-8")
        (place / f"still {number}.txt").write_text(f"it stands {number}", encoding="utf-8")
    return "moving"


def graph(host, *steps, **dataset):
    host.node("GraftDataset")
    made = common(*steps, run=RUN, dataset="data", validate_every=2)
    made["data"] = node(
        "GraftDataset",
        folder=folder(host),
        vae=["vae", 0],
        clip=["clip", 0],
        **{"resolution": 64, "bucket_step": 32, "validation": 0.3, "frames": "6", "flip": 0.5, **dataset},
    )
    return made


@pytest.fixture
def loaders(host, monkeypatch):
    """Stands tiny models in for the loaders."""
    for kind, part, make in (
        ("UNETLoader", "MODEL", lambda: build("wan")),
        ("CLIPLoader", "CLIP", lambda: TinyCLIP("wan")),
        ("VAELoader", "VAE", tiny_vae),
    ):
        monkeypatch.setitem(host.nodes.NODE_CLASS_MAPPINGS, kind, loader_of(part, make))


def test_the_vae_tells_which_frames_it_takes(host):
    assert wall.encoding.frame_step(tiny_vae()) == 4
    assert wall.encoding.frame_step(object()) == 0


def test_clips_and_stills_in_one_run_resume_to_the_same_bytes(host, loaders):
    host.fresh()
    found = ran(host, graph(host, 4), state=["step0", 0], report=["data", 2], dataset=["data", 0])
    at_once, data = found["state"], found["dataset"]
    assert "3 pictures and 3 clips" in found["report"]
    assert "frames of clips 6 is taken as 5: this VAE takes multiples of 4 and 1 more" in found["report"]
    latents = {image.name: image.latent for image in data.images + data.held_out}
    assert {tuple(latent.shape) for latent in latents.values()} == {(16, 1, 8, 8), (16, 2, 8, 8)}
    with av.open(str(Path(host.input) / "moving" / "clip 1.mkv")) as container:
        decoded = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)][:5]
    pixels = torch.from_numpy(np.stack(decoded)).float() / 255.0
    assert torch.equal(latents["clip 1.mkv (5 frames from 1)"], tiny_vae().encode(pixels)[0].float().cpu())
    assert len(at_once.history.loss) == 4 and all(torch.isfinite(torch.tensor(at_once.history.loss)))
    moved = [key for key, tensor in at_once.trained.items() if "lora_up" in key and bool(tensor.any())]
    assert moved
    shutil.rmtree(Path(host.output) / "graft" / RUN)
    shutil.rmtree(Path(host.output) / "graft" / "cache", ignore_errors=True)
    host.fresh()
    branched = ran(host, graph(host, 2, 2), state=["step1", 0], dataset=["data", 0])
    assert branched["dataset"].digest == data.digest
    assert whole(branched["state"]) == whole(at_once), "cut in two, with everything encoded anew"
    shutil.rmtree(Path(host.output) / "graft" / RUN)


def test_parts_and_rate_reach_the_latents(host, loaders):
    host.fresh()
    given = {"clip_part": "chunk", "frames": "1, 5", "frame_rate": 8.0, "validation": 0.0, "flip": 0.0}
    made = graph(host, **given)
    del made["start"], made["adapter"], made["optimizer"], made["model"]
    data = ran(host, made, dataset=["data", 0])["dataset"]
    frames = [image.latent.shape[1] for image in data.images]
    assert sorted(frames) == [1] * 27 + [1] * 3 + [2] * 3
