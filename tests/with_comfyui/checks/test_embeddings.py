"""Embeddings inside LoRA files do what the same embeddings do as files in ComfyUI's embeddings folder: the same tokens
and the same conditioning, bit for bit.
"""

import json
import os

import comfy.model_management
import pytest
import torch
from families import build, random
from graft_nodes.host import fingerprint
from safetensors.torch import save_file
from tiny_encoders import ENCODERS, clip_of

# OneTrainer's name of a text encoder and ComfyUI's, and the width of the small encoder
PARTS = {
    "sd1": {"clip_l": ("clip_l", 12)},
    "sdxl": {"clip_l": ("clip_l", 4), "clip_g": ("clip_g", 8)},
    "sd3": {"clip_l": ("clip_l", 4), "clip_g": ("clip_g", 8), "t5": ("t5xxl", 4096)},
    "flux": {"clip_l": ("clip_l", 8), "t5": ("t5xxl", 12)},
}
PROMPTS = [
    "embedding:hat",
    "a red embedding:hat square",
    "a red embedding:hat, embedding:hat square",
    "a (red embedding:hat:1.3) square (embedding:hat)",
    "a\nembedding:hat\nsquare embedding:folder_only",
    "embedding:hat<b> embedding:hat[c] embedding:nowhere, d",
    ", ".join(["one two three four embedding:hat"] * 20),
]


def _vectors(name, seed):
    return {part: random(3, width, seed=seed) for part, (_, width) in PARTS[name].items()}


def _lora(model):
    """A LoRA on the first attention matrix of the model."""
    for key, tensor in model.model.state_dict().items():
        if "attn" in key and key.endswith(".weight") and tensor.ndim == 2:
            base = key.removesuffix(".weight")
            rows, columns = tensor.shape
            return {f"{base}.lora_up.weight": random(rows, 1), f"{base}.lora_down.weight": random(1, columns)}
    raise AssertionError("the model has no attention")


def _same(found, expected):
    assert found.keys() == expected.keys()
    for part, chunks in expected.items():
        assert [len(chunk) for chunk in found[part]] == [len(chunk) for chunk in chunks]
        for chunk, wanted in zip(found[part], chunks, strict=True):
            for (token, *more), (other, *rest) in zip(chunk, wanted, strict=True):
                assert more == rest and torch.is_tensor(token) == torch.is_tensor(other)
                assert torch.equal(torch.as_tensor(token), torch.as_tensor(other))


def _encode(clip, prompt):
    with torch.inference_mode():
        context, extras = clip.encode_from_tokens_scheduled(clip.tokenize(prompt))[0]
    return [context, *(value for value in extras.values() if torch.is_tensor(value))]


@pytest.mark.parametrize("name", PARTS)
def test_as_from_the_embeddings_folder(host, name, tmp_path, monkeypatch):
    hat, alone = _vectors(name, 1), _vectors(name, 2)
    for folder, files in (("both", {"hat": hat, "folder_only": alone}), ("one", {"folder_only": alone})):
        os.makedirs(tmp_path / folder)
        for word, vectors in files.items():
            renamed = {PARTS[name][part][0]: tensor for part, tensor in vectors.items()}
            save_file(renamed, tmp_path / folder / f"{word}.safetensors")
    expected, clip = (clip_of(name, monkeypatch, embeddings=str(tmp_path / folder)) for folder in ("both", "one"))
    changes = ENCODERS[name][-1]
    with torch.inference_mode():
        model = build(name, **changes)
    bundle = {f"bundle_emb.<hat>.{part}": tensor for part, tensor in hat.items()}
    save_file({**_lora(model), **bundle}, os.path.join(host.models, "loras", "hats.safetensors"))
    rows = json.dumps({"version": 1, "rows": [{"file": "hats.safetensors"}]})
    tokenizer, before = clip.tokenizer, clip.tokenize(PROMPTS[1])
    _, patched, report = host.call("GraftLoadLoRAs", model=model, rows=rows, clip=clip)
    assert "embedding:hat from hats.safetensors" in report
    for prompt in PROMPTS:
        for one in (patched, patched.clone()):
            _same(one.tokenize(prompt), expected.tokenize(prompt))
            _same(one.tokenize(prompt, return_word_ids=True), expected.tokenize(prompt, return_word_ids=True))
        for found, wanted in zip(_encode(patched, prompt), _encode(expected, prompt), strict=True):
            assert torch.equal(found, wanted)
    assert clip.tokenizer is tokenizer
    _same(clip.tokenize(PROMPTS[1]), before)
    assert not torch.equal(_encode(clip, PROMPTS[1])[0], _encode(patched, PROMPTS[1])[0])
    assert fingerprint.fingerprint_of(clip, "clip") != fingerprint.fingerprint_of(patched, "clip")
    comfy.model_management.unload_all_models()
