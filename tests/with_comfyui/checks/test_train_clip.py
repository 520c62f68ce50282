"""Text encoders of ComfyUI's own classes, tiny and random, trained with the models that they belong to."""

import comfy.lora
import comfy.model_management
import comfy.sd
import comfy.sd1_clip
import comfy.sdxl_clip
import pytest
import torch
from families import build, latent
from graft_nodes import host as wall
from graft_nodes.training.dataset import Dataset


def _config(width, layers):
    return {"hidden_size": width, "intermediate_size": 2 * width, "num_attention_heads": 2, "num_hidden_layers": layers}


def clip_of(name):
    """A CLIP with random weights, made in inference mode as a loader makes it."""
    options = {"dtype": torch.float32, "initial_device": torch.device("cpu")}
    if name == "sd1":
        target = (comfy.sd1_clip.SD1ClipModel, comfy.sd1_clip.SD1Tokenizer)
        options["clip_l_model_config"] = _config(12, 2)
    else:
        target = (comfy.sdxl_clip.SDXLClipModel, comfy.sdxl_clip.SDXLTokenizer)
        options |= {"clip_l_model_config": _config(4, 3), "clip_g_model_config": _config(8, 3)}
    kind = type("Target", (), {"params": {}, "clip": target[0], "tokenizer": target[1]})
    with torch.inference_mode():
        clip = comfy.sd.CLIP(kind, parameters=0, model_options=options)
        draws = torch.Generator().manual_seed(0)
        for key, p in clip.cond_stage_model.named_parameters():
            drawn = torch.randn(p.shape, generator=draws) * (0.2 if p.ndim < 2 else p.shape[-1] ** -0.5)
            p.copy_(drawn + (1.0 if "norm" in key and key.endswith("weight") else 0.0))
    return clip


def _model(name):
    return build(name) if name == "sd1" else build(name, adm_in_channels=8 + 1536)


def _encode(clip, text):
    with torch.inference_mode():
        context, extras = clip.encode_from_tokens_scheduled(clip.tokenize(text))[0]
        return context.clone(), extras["pooled_output"].clone()


@pytest.mark.parametrize("name", ["sd1", "sdxl"])
@pytest.mark.parametrize("kind", ["lora", "full"])
def test_both_are_trained_and_the_hosts_loader_reads_the_file(host, name, kind):
    clip = clip_of(name)
    with torch.inference_mode():
        model = _model(name)
    texts = ["", "a red square", "a blue circle"]
    conditionings = wall.encoding.encode_captions(clip, texts)
    data = Dataset.of([latent(name, seed) for seed in range(2)], texts[1:], conditionings)
    before = {key: t.clone() for key, t in clip.cond_stage_model.state_dict().items()}
    (adapter,) = host.call("GraftAdapter", kind=kind, targets="attention+ff", text_encoder=True, rank=2 if kind == "lora" else 16)
    (optimizer,) = host.call("GraftOptimizer", learning_rate=1e-2, batch_size=2, total_steps=4)
    given = {"model": model, "clip": clip, "dataset": data, "adapter": adapter, "optimizer": optimizer}
    state, _ = host.call("GraftTrainStart", **given, run=f"{name} {kind}")
    made = host.call("TrainStep", state=state, steps=2, validate_every=0)
    trained, patched, lora = made[0], made[2], made[3]
    text = {key for key in trained.trained if key.startswith("text_encoders.")}
    stepped = {key.split("/", 1)[1] for key in trained.optimizer if key.startswith("exp_avg/")}
    assert text & stepped and (kind == "full" or stepped == set(trained.trained))
    if name == "sdxl":  # the hidden layer before CLIP-L's last is what SDXL reads; the last of CLIP-G makes the pooled output
        last = {part for part in ("clip_l", "clip_g") if any(part in key and "layers.2." in key for key in stepped)}
        assert last == {"clip_g"}
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
