"""Text encoders of ComfyUI's own classes, tiny and random, trained with the models that they belong to."""

import comfy.lora
import comfy.model_management
import comfy.sd
import comfy.sd1_clip
import comfy.sdxl_clip
import comfy.supported_models
import pytest
import torch
from families import build, latent
from graft_nodes import host as wall
from graft_nodes.training.data.dataset import Dataset
from graft_nodes.training.run import step as steps
from graft_nodes.training.run import workspace
from slopes import slope_along
from tiny_encoders import ENCODERS, clip_of
from tiny_families import FAMILIES


def _encode(clip, text):
    with torch.inference_mode():
        context, extras = clip.encode_from_tokens_scheduled(clip.tokenize(text))[0]
        pooled = extras["pooled_output"]
        return (context.clone(), *([] if pooled is None else [pooled.clone()]))


# The parts of which the last layer counts: its hidden state, or the pooled output. SDXL, SD3, Gemma and Qwen 3 are read
# a layer earlier.
READ_TO_THE_END = {
    "sd1": {"clip_l"},
    "sdxl": {"clip_g"},
    "sd3": {"clip_l", "clip_g", "t5xxl"},
    "flux": {"clip_l", "t5xxl"},
    "qwen": {"qwen25_7b"},
    "lumina2": set(),
    "z-image": set(),
    "wan": {"umt5xxl"},
}


def _holds_last_layer(names, part, config):
    last = config.get("num_hidden_layers", config.get("num_layers")) - 1
    return any(f".{part}." in key and (f"layers.{last}." in key or f"block.{last}." in key) for key in names)


CASES = [(name, "lora", torch.float32) for name in ENCODERS]
CASES += [(name, "full", torch.float32) for name in ("sd1", "sdxl", "flux", "qwen")]
CASES += [
    (name, kind, torch.float16) for name in ("sd1", "sdxl") for kind in ("lora", "full")
]  # as a loader makes them


def _parts(name, monkeypatch, dtype=torch.float32):
    """(MODEL, CLIP, a dataset of two pictures)."""
    if not hasattr(comfy.supported_models, FAMILIES[name].supported):
        pytest.skip(f"this ComfyUI has no {FAMILIES[name].supported}")
    clip = clip_of(name, monkeypatch, dtype)
    with torch.inference_mode():
        model = build(name, **ENCODERS[name][-1])
    texts = ["", "a red square", "a blue circle"]
    conditionings = wall.encoding.encode_captions(clip, texts)
    return model, clip, Dataset.from_latents([latent(name, seed) for seed in range(2)], texts[1:], conditionings)


@pytest.mark.parametrize(("name", "kind", "dtype"), CASES, ids=str)
def test_both_are_trained_and_the_hosts_loader_reads_the_file(host, name, kind, dtype, monkeypatch):
    model, clip, data = _parts(name, monkeypatch, dtype)
    before = {key: t.clone() for key, t in clip.cond_stage_model.state_dict().items()}
    (adapter,) = host.call(
        "GraftAdapter", kind=kind, targets="attention+ff", text_encoder=True, rank=2 if kind == "lora" else 16
    )
    (optimizer,) = host.call("GraftOptimizer", learning_rate=1e-2, batch_size=2, total_steps=4)
    given = {"model": model, "clip": clip, "dataset": data, "adapter": adapter, "optimizer": optimizer}
    state, _ = host.call("GraftTrainStart", **given, run=f"{name} {kind} {dtype}")
    made = host.call("TrainStep", state=state, steps=2, validate_every=0)
    trained, patched, lora = made[0], made[2], made[3]
    text = {key for key in trained.trained if key.startswith("text_encoders.")}
    stepped = {key.split("/", 1)[1] for key in trained.optimizer if key.startswith("exp_avg/")}
    assert text & stepped and (kind == "full" or stepped == set(trained.trained))
    assert {part for part in ENCODERS[name][3] if any(f".{part}." in key for key in stepped)} == set(ENCODERS[name][3])
    if (
        kind == "lora"
    ):  # what the model is given nothing of is left out: layers after the one that is read, a language model's eyes
        last = {part for part, config in ENCODERS[name][3].items() if _holds_last_layer(stepped, part, config)}
        assert last == READ_TO_THE_END[name] and not any("visual" in key for key in text)
    assert all(torch.equal(t, before[key]) for key, t in clip.cond_stage_model.state_dict().items())
    names = comfy.lora.model_lora_keys_clip(clip.cond_stage_model, {})
    theirs = clip.clone()
    loaded = comfy.lora.load_lora({key: t for key, t in lora.items() if key.startswith("text_encoders.")}, names)
    assert len(set(theirs.patcher.add_patches(loaded, 1.0))) == len(loaded) > 0
    expected, ours, plain = (_encode(one, "a red square") for one in (theirs, patched, clip))
    for wanted, found, base in zip(expected, ours, plain, strict=True):
        assert torch.allclose(found, wanted, atol=1e-4)
        assert name == "sd1" or not torch.allclose(base, wanted, atol=1e-4)
    assert not torch.allclose(plain[0], expected[0], atol=1e-4)


@pytest.mark.parametrize(("name", "checkpointing"), [(name, name in ("flux", "qwen")) for name in ENCODERS])
def test_gradients_of_the_encoder_are_those_of_finite_differences(host, name, checkpointing, monkeypatch):
    """The loss of a step against central differences of it, along the gradient and a random direction of all that is
    trained in it.
    """
    model, clip, data = _parts(name, monkeypatch)
    (adapter,) = host.call("GraftAdapter", targets="attention+ff", text_encoder=True, rank=2)
    (optimizer,) = host.call(
        "GraftOptimizer", learning_rate=2e-2, batch_size=2, total_steps=4, checkpointing=checkpointing
    )
    given = {"model": model, "clip": clip, "dataset": data, "adapter": adapter, "optimizer": optimizer}
    state = host.call(
        "TrainStep", state=host.call("GraftTrainStart", **given, run=f"slope {name}")[0], steps=2, validate_every=0
    )[0]
    with torch.inference_mode(False), wall.denoiser.open_denoiser(model, clip=clip) as denoiser:
        work = workspace.Workspace(state, denoiser, data)
        try:
            with work.install():
                (batch, *_) = work.loader.take(work.step, 0)

                def loss():
                    return steps.batch_losses(work, batch, torch.Generator().manual_seed(0), {}).sum()

                loss().backward()
                text = {key: t for key, t in work.trained.items() if key.startswith("text_encoders.")}
                gradient = {key: t.grad.clone() for key, t in text.items()}
                random = {
                    key: torch.randn(t.shape, generator=torch.Generator().manual_seed(1)) for key, t in text.items()
                }
                ways = {key: gradient[key] / _norm(gradient) + random[key] / _norm(random) for key in text}
                found = sum(float((gradient[key] * way).sum()) for key, way in ways.items())
                slope = slope_along(work.trained, ways, loss, (0.004, 0.002))
        finally:
            work.close()
    assert found == pytest.approx(slope, rel=3e-2)


def _norm(tensors):
    return torch.stack([t.norm() for t in tensors.values()]).norm()


@pytest.mark.parametrize(("family", "own"), [("sd1", 1), ("sdxl", 2)])
def test_clip_skip_counts_from_the_models_own_layer(monkeypatch, family, own):
    """EveryDream2's numbers: 0 and 1 are the layer that the model uses by itself, 2 is one further back."""
    clip = clip_of(family, monkeypatch)

    def encoded(skip):
        return _encode(wall.encoding.with_clip_skip(clip, skip), "a cat")[0]

    plain, back = _encode(clip, "a cat")[0], encoded(wall.encoding.skip_from_own_layer(clip, 2))
    assert torch.equal(encoded(own), plain)  # the layer counted from the last, as CLIP Set Last Layer does
    assert torch.equal(encoded(own + 1), back) and not torch.equal(back, plain)
    assert [wall.encoding.skip_from_own_layer(clip, skip) for skip in (0, 1)] == [0, 0]


def test_text_encoders_that_stop_at_different_layers_have_no_clip_skip_in_common(monkeypatch):
    with pytest.raises(ValueError, match="use different layers by themselves"):
        wall.encoding.skip_from_own_layer(clip_of("sd3", monkeypatch), 2)
