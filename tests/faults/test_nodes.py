"""An exception in any node, or inside the model while a graft is on it: the base is whole, and the next queue gives the
same bytes.
"""

import errno
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from graft_nodes.storage.digest import sha256_of_tensors
from graft_nodes.storage.disk_errors import NEXT_STEPS
from graft_nodes.tests.faults.disk import Disk, fails
from PIL import Image


class Planted(Exception):
    """What a node raises."""


@pytest.fixture(scope="module")
def parts(host):
    """Model, CLIP, VAE, a dataset of three pictures, and a LoRA for the model."""
    folder = os.path.join(host.input, "faults")
    os.makedirs(folder, exist_ok=True)
    for i in range(3):
        Image.fromarray(np.full((128, 128, 3), 60 * i, dtype=np.uint8)).save(os.path.join(folder, f"{i}.png"))
    model, clip, vae = host.call("GraftDemo")
    dataset = host.call("GraftDataset", folder="faults", vae=vae, clip=clip, resolution=128)[0]
    adapter = host.call("GraftAdapter", rank=2)[0]
    state = host.call(
        "GraftTrainStart", model=model, dataset=dataset, clip=clip, vae=vae, adapter=adapter, run="faults"
    )[0]
    return model, clip, vae, state, host.call("TrainStep", state=state, steps=2)[3]


@pytest.fixture
def wall(host):
    """The pack's own host module, as the host loaded it."""
    return host.module("host")


def whole(wall, model):
    """Hash of the base's bytes, whoever has patched the model by now."""
    return sha256_of_tensors(wall.base_weights.base_weights(model))


class Giver:
    """A node that hands out what the test made."""

    given: dict = {}  # noqa: RUF012

    RETURN_TYPES, FUNCTION, CATEGORY = ("MODEL", "CLIP", "VAE", "LORA_MODEL"), "give", "test"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {}}

    def give(self):
        return tuple(Giver.given["parts"])


def workflow(host, mode):
    """A LoRA on a model, sampled, decoded, saved."""

    def node(kind, **inputs):
        return {"class_type": kind, "inputs": {**host.defaults(kind), **inputs}}

    return {
        "1": {"class_type": "GraftTestGiver", "inputs": {}},
        "2": node("LoRAStackPatch", model=["1", 0], lora_model=["1", 3], mode=mode),
        "3": node("CLIPTextEncode", clip=["1", 1], text="a red square"),
        "4": node("EmptyLatentImage", width=64, height=64, batch_size=1),
        "5": node(
            "KSampler",
            model=["2", 0],
            positive=["3", 0],
            negative=["3", 0],
            latent_image=["4", 0],
            seed=1,
            steps=2,
            cfg=1.0,
        ),
        "6": node("VAEDecode", samples=["5", 0], vae=["1", 2]),
        "7": node("SaveImage", images=["6", 0], filename_prefix="faults"),
    }


@pytest.mark.parametrize("mode", ["merge", "bypass"])
@pytest.mark.parametrize(
    "where", ["CLIPTextEncode", "KSampler", "VAEDecode", "SaveImage", "inside the model", "LoRAStackPatch"]
)
def test_a_node_that_raises(host, parts, wall, monkeypatch, where, mode):
    model, clip, vae, _, lora = parts
    Giver.given["parts"] = (model, clip, vae, lora)
    host.nodes.NODE_CLASS_MAPPINGS.update(GraftTestGiver=Giver)
    prompt, before = workflow(host, mode), whole(wall, model)
    host.fresh()
    expected = host.run(prompt, capture={"images": ["6", 0]})["captured"]["images"]
    with monkeypatch.context() as patch:
        if where == "inside the model":
            calls = iter([False, True])
            first = next(iter(model.model.diffusion_model.children()))
            hook = first.register_forward_pre_hook(
                lambda *_: (_ for _ in ()).throw(Planted("planted")) if next(calls, False) else None
            )
        else:
            cls = host.node(where)
            name = "execute" if hasattr(cls, "PREPARE_CLASS_CLONE") else cls.FUNCTION
            planted = lambda *_, **__: (_ for _ in ()).throw(Planted("planted"))  # noqa: E731
            patch.setattr(cls, name, classmethod(planted) if name == "execute" else planted)
        host.fresh()
        try:
            broken = host.run(prompt)
        finally:
            if where == "inside the model":
                hook.remove()
    assert not broken["success"] and "planted" in str(broken["errors"]) and whole(wall, model) == before
    host.fresh()
    again = host.run(prompt, capture={"images": ["6", 0]})
    assert again["success"] and torch.equal(again["captured"]["images"], expected) and whole(wall, model) == before


@pytest.mark.parametrize("where", ["sample", "decode", "save_pictures", "send"])
def test_a_preview_that_fails_costs_no_step(host, parts, wall, monkeypatch, where):
    model, clip, _, state, _ = parts
    positive = host.call("CLIPTextEncode", clip=clip, text="a")[0]
    latent = host.call("EmptyLatentImage", width=64, height=64, batch_size=1)[0]
    given = {
        "steps": 4,
        "validate_every": 0,
        "snapshot_every": 0,
        "preview_every": 2,
        "positive": positive,
        "latent": latent,
    }
    start, before = (
        host.call(
            "GraftTrainStart",
            model=model,
            dataset=state.subject.dataset,
            clip=clip,
            vae=state.subject.vae,
            run=f"previews {where}",
        )[0],
        whole(wall, model),
    )
    with monkeypatch.context() as patch:
        real, calls = wall.events.send_event, iter([True])

        def failing(*arguments, **_):
            if where != "send" or arguments[0] == "graft.preview":
                raise Planted("planted")
            return real(*arguments)

        patch.setattr(
            wall.events if where == "send" else wall.previews, "send_event" if where == "send" else where, failing
        )
        with pytest.raises(Planted):
            host.call("TrainStep", state=start, **given)
        assert next(calls)
    assert whole(wall, model) == before
    again = host.call("TrainStep", state=start, **given)
    assert "went on from the snapshot at step 2" in again[5]
    other = host.call(
        "GraftTrainStart",
        model=model,
        dataset=state.subject.dataset,
        clip=clip,
        vae=state.subject.vae,
        run="undisturbed",
    )[0]
    assert sha256_of_tensors(again[3]) == sha256_of_tensors(host.call("TrainStep", state=other, **given)[3])


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_pictures_and_loras_that_cannot_be_written_are_named(host, parts, wall, number):
    output = Path(host.output)
    for at in (1, 2, 3, 4, 5):
        with Disk(output / "graft", at, fails(number), lasting=True).installed(), pytest.raises(OSError) as caught:
            wall.previews.save_pictures(torch.zeros(1, 8, 8, 3), f"run {number} {at}", "name")
        assert (
            caught.value.errno == number
            and str(output) in str(caught.value.filename)
            and NEXT_STEPS[number] in str(caught.value)
        )
        assert not list((output / "graft").rglob(f"run {number} {at}/**/*.jpg"))
    for at in (1, 2, 3, 4):
        with Disk(output / "loras", at, fails(number), lasting=True).installed(), pytest.raises(OSError) as caught:
            host.call("GraftSaveLoRA", lora_model=parts[4], prefix=f"loras/faults{number}")
        assert (
            caught.value.errno == number
            and "loras" in str(caught.value.filename)
            and NEXT_STEPS[number] in str(caught.value)
        )
        assert not [path for path in (output / "loras").glob(f"faults{number}*") if path.suffix == ".safetensors"]
    assert Path(host.call("GraftSaveLoRA", lora_model=parts[4], prefix=f"loras/faults{number}")[0]).is_file()


def test_the_base_is_told_though_a_graft_comes_off_while_it_is_read(host, parts, wall):
    import comfy.model_management as management

    model, clip, _, _, lora = parts
    before, real = whole(wall, model), model.model.state_dict
    grafted = host.call("LoRAStackPatch", model=model, clip=clip, lora_model=lora, mode="merge")[0]
    management.load_models_gpu([grafted])
    assert sha256_of_tensors(real()) != sha256_of_tensors(wall.base_weights.base_weights(model)), (
        "the graft is on the model"
    )

    def collected(*arguments, **named):  # as when the collector finds a clone just then
        found = real(*arguments, **named)
        grafted.eject_model()
        return found

    model.model.state_dict = collected
    try:
        assert whole(wall, model) == before
    finally:
        del model.model.state_dict
        management.unload_all_models()
