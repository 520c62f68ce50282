"""The text encoder is trained too: gradients through the host's CLIP, one file for both, the CLIP that comes out has it
on.
"""

import os

import numpy as np
import pytest
import torch
from PIL import Image


@pytest.fixture(scope="module")
def pictures(host):
    folder = os.path.join(host.input, "few")
    os.makedirs(folder, exist_ok=True)
    for i in range(4):
        pixels = np.full((128, 128, 3), 60 * i, dtype=np.uint8)
        pixels[32:96, 16 * i : 16 * i + 64] = (200, 40, 40 * i)
        Image.fromarray(pixels).save(os.path.join(folder, f"{i}.png"))
        with open(os.path.join(folder, f"{i}.txt"), "w", encoding="utf-8") as file:
            file.write("a red square left" if i % 2 else "a blue circle right")
    return "few"


def _workflow(host, pictures, run, *steps, clip=True, optimizer=None, **adapter):
    def node(node_id, **given):
        return {"class_type": node_id, "inputs": {**host.defaults(node_id), **given}}

    prompt = {
        "1": node("GraftDemo"),
        "2": node("GraftDataset", folder=pictures, vae=["1", 2], clip=["1", 1], resolution=128, validation=0.25),
        "3": node("GraftAdapter", rank=2, text_encoder=True, **adapter),
        "4": node(
            "GraftOptimizer", settings=["3", 0], learning_rate=1e-2, batch_size=2, total_steps=8, **(optimizer or {})
        ),
        "5": node("GraftTrainStart", model=["1", 0], dataset=["2", 0], settings=["4", 0], run=run),
    }
    if clip:
        prompt["5"]["inputs"]["clip"] = ["1", 1]
    at = ["5", 0]
    for number, count in enumerate(steps):
        prompt[str(10 + number)] = node("TrainStep", state=at, steps=count, validate_every=1)
        at = [str(10 + number), 0]
    return prompt


def _run(host, prompt, last="10"):
    host.fresh()
    capture = {
        "state": [last, 0],
        "model": [last, 1],
        "clip": [last, 2],
        "lora": [last, 3],
        "base": ["1", 1],
        "start": ["5", 0],
    }
    result = host.run(prompt, capture=capture)
    assert result["success"], result["errors"]
    return result["captured"]


def _encode(clip, text):
    with torch.inference_mode():
        return clip.encode_from_tokens_scheduled(clip.tokenize(text))[0][0].float()


def test_both_are_trained_and_what_comes_out_has_it_on(host, pictures):
    found = _run(host, _workflow(host, pictures, "te", 3, kind="lora", targets="attention+ff"))
    state, start = found["state"], found["start"]
    text = {name for name in state.trained if name.startswith("text_encoders.")}
    assert text and text != set(state.trained)
    moved = {key.split("/", 1)[1] for key in state.optimizer if key.startswith("exp_avg/")}
    assert moved == set(state.trained)
    assert all(not torch.equal(state.trained[name], start.trained[name]) for name in text if "lora_up" in name)
    assert text - {name for name in found["lora"]} == set()  # the file has them under the same names
    trained, base = _encode(found["clip"], "a red square left"), _encode(found["base"], "a red square left")
    assert not torch.allclose(trained, base, atol=1e-4)
    wall = host.module("host")
    adapters = host.module("training.trainable.install")
    with torch.inference_mode(False), wall.denoiser.open_denoiser(state.subject.model, clip=found["base"]) as denoiser:
        devices = {"text_encoders": denoiser.text_encoder_device}
        weights = {
            name: t.to(devices.get(name.partition(".")[0], denoiser.device), copy=True)
            for name, t in state.trained.items()
        }
        with (
            adapters.attach(denoiser.module, state.start.adapter, weights, lambda: (0, 0, ""), denoiser.text_encoder),
            torch.no_grad(),
        ):
            (live,) = denoiser.encode(["a red square left"], [state.subject.dataset.conditionings["a red square left"]])
    assert torch.allclose(live.context.float(), trained, atol=1e-4)
    after = found["base"].cond_stage_model
    fresh = host.call("GraftDemo")[1].cond_stage_model
    assert [p.requires_grad for p in after.parameters()] == [p.requires_grad for p in fresh.parameters()]
    assert all(p.grad is None for p in after.parameters()) and not any(m._forward_hooks for m in after.modules())
    assert [m.training for m in after.modules()] == [m.training for m in fresh.modules()]
    assert torch.equal(_encode(found["base"], "a red square left"), base)


@pytest.mark.parametrize("kind", ["lora", "dora", "full"])
def test_two_calls_are_one_and_the_base_keeps_its_bytes(host, pictures, kind):
    once = _run(host, _workflow(host, pictures, f"te one {kind}", 4, kind=kind, targets="attention"))
    twice = _run(host, _workflow(host, pictures, f"te two {kind}", 1, 3, kind=kind, targets="attention"), "11")
    assert all(torch.equal(t, twice["state"].trained[name]) for name, t in once["state"].trained.items())
    assert once["state"].history.validation == twice["state"].history.validation
    fresh = host.call("GraftDemo")[1].cond_stage_model.state_dict()
    assert all(torch.equal(t, fresh[name]) for name, t in once["base"].cond_stage_model.state_dict().items())
    assert all(torch.isfinite(t).all() for t in once["lora"].values())


def test_the_text_encoder_has_a_rate_of_its_own(host, pictures):
    plain = _run(host, _workflow(host, pictures, "te rate a", 1))
    slow = _run(host, _workflow(host, pictures, "te rate b", 1, optimizer={"text_encoder_rate": 1e-3}))
    start = plain["start"].trained
    for name in start:
        if "lora_up" not in name:
            continue
        one, other = ((found["state"].trained[name] - start[name]).abs().max() for found in (plain, slow))
        assert float(other / one) == pytest.approx(0.1 if name.startswith("text_encoders.") else 1.0, rel=1e-3)


def test_gradients_of_the_text_encoder_are_those_of_finite_differences(host, pictures):
    """The loss as training computes it against central differences, along a random direction of
    the encoder's tensors.
    """
    steps = host.module("training.run.step")
    state = _run(host, _workflow(host, pictures, "te slope", 1, targets="attention"))["state"]
    wall, subject = host.module("host"), state.subject
    with torch.inference_mode(False), wall.denoiser.open_denoiser(subject.model, clip=subject.clip) as denoiser:
        work = host.module("training.run.workspace").Workspace(state, denoiser, subject.dataset)
        try:
            with work.install():
                batch, *_ = work.loader.take(work.step, 0)

                def loss():
                    draws = torch.Generator().manual_seed(0)
                    return steps.batch_losses(work, batch, draws, {}).sum()

                loss().backward()
                text = {name: t for name, t in work.trained.items() if name.startswith("text_encoders.")}
                ways = {
                    name: torch.randn(t.shape, generator=torch.Generator().manual_seed(1)).to(t.device)
                    for name, t in text.items()
                }
                found = sum(float((work.trained[name].grad * way).sum()) for name, way in ways.items())
                values = []
                for sign in (1, -2):
                    with torch.no_grad():
                        for name, way in ways.items():
                            work.trained[name].add_(way, alpha=sign * 0.01)
                        values.append(float(loss()))
        finally:
            work.close()
    assert found == pytest.approx((values[0] - values[1]) / 0.02, rel=3e-2, abs=1e-4) and abs(found) > 1e-4


def test_without_a_clip_it_is_refused(host, pictures):
    host.fresh()
    result = host.run(_workflow(host, pictures, "te none", 1, clip=False))
    assert not result["success"] and "no CLIP is connected" in str(result["errors"])


def test_the_text_encoder_alone_by_a_pattern(host, pictures):
    found = _run(host, _workflow(host, pictures, "te alone", 1, pattern="text_encoders.*"))
    state, start = found["state"], found["start"]
    assert state.trained and all(name.startswith("text_encoders.") for name in state.trained)
    assert all(not torch.equal(t, start.trained[name]) for name, t in state.trained.items() if "lora_up" in name)
    trained, base = _encode(found["clip"], "a red square left"), _encode(found["base"], "a red square left")
    assert not torch.allclose(trained, base, atol=1e-6)


def test_prompts_of_previews_are_encoded_with_what_is_trained_so_far(host, pictures, monkeypatch):
    """The preview of a prompt at step 2 and of the average is what the nodes make with the CLIP and MODEL of step 2."""
    kept = []
    previews = host.module("host").previews
    real = previews.decode
    monkeypatch.setattr(
        previews, "decode", lambda vae, latents, training: kept.append(latents) or real(vae, latents, training)
    )

    def node(node_id, **given):
        return {"class_type": node_id, "inputs": {**host.defaults(node_id), **given}}

    prompt = _workflow(host, pictures, "te previews", 2, 2, kind="lora", targets="attention+ff")
    text, latent = "a red square left", node("EmptyLatentImage", width=64, height=64, batch_size=1)
    prompt["6"] = node("GraftEMA", settings=["4", 0], schedule="constant", decay=0.5)
    prompt["5"]["inputs"].update(settings=["6", 0], vae=["1", 2])
    prompt["60"] = node("CLIPTextEncode", clip=["1", 1], text=text)
    prompt["11"]["inputs"].update(preview_every=4, prompts=text, positive=["60", 0], latent=["32", 0])
    prompt["20"] = node("EMAMerge", model=["1", 0], clip=["1", 1], state=["11", 0])
    prompt["32"] = latent
    for name in ("weights", "average"):
        model, clip = (["11", 1], ["11", 2]) if name == "weights" else (["20", 0], ["20", 1])
        prompt[f"text {name}"] = node("CLIPTextEncode", clip=clip, text=text)
        for given in ("60", f"text {name}"):
            prompt[f"{name} {given}"] = node(
                "KSampler",
                model=model,
                positive=[given, 0],
                negative=[given, 0],
                latent_image=["32", 0],
                seed=0,
                steps=20,
                cfg=1.0,
                sampler_name="euler",
                scheduler="simple",
                denoise=1.0,
            )
    host.fresh()
    names = [f"{name} {given}" for name in ("weights", "average") for given in ("60", f"text {name}")]
    result = host.run(prompt, capture={name: [name, 0] for name in names})
    assert result["success"], result["errors"]
    assert len(kept) == 4
    for latents, name in zip(kept, names, strict=True):
        expected = result["captured"][name]["samples"]
        assert torch.allclose(latents.cpu(), expected.cpu(), atol=2e-3 * float(expected.abs().max())), name
    assert not torch.allclose(kept[0], kept[1], atol=1e-2), "positive was encoded before the training"
