"""Vectors among the tokens of the tokenizers that ComfyUI brings, and what the text encoders of language models make of
them.
"""

import importlib
import importlib.util
import types

import pytest
import torch
from graft_nodes.host import embeddings, word_files, word_tokens
from graft_nodes.host.encoding import LiveEncoder
from graft_nodes.host.text_encoder_gradients import make_differentiable
from graft_nodes.patches.lora_files.embeddings import Embedding
from graft_nodes.training.data.dataset import Conditioning
from slopes import slope_along
from tiny_encoders import MORE, clip_of, pieces, stand_in_for_llamas_tokenizer, tekken

TOKENIZERS = {
    "comfy.sd1_clip": "SD1Tokenizer",
    "comfy.sdxl_clip": "SDXLTokenizer",
    "comfy.text_encoders.sd2_clip": "SD2Tokenizer",
    "comfy.text_encoders.sd3_clip": "SD3Tokenizer",
    "comfy.text_encoders.flux": "FluxTokenizer KleinTokenizer",
    "comfy.text_encoders.hidream": "HiDreamTokenizer",
    "comfy.text_encoders.hunyuan_video": "HunyuanVideoTokenizer HunyuanVideo15Tokenizer",
    "comfy.text_encoders.hunyuan_image": "HunyuanImageTokenizer",
    "comfy.text_encoders.hydit": "HyditTokenizer",
    "comfy.text_encoders.kandinsky5": "Kandinsky5Tokenizer Kandinsky5TokenizerImage",
    "comfy.text_encoders.lt": "LTXVT5Tokenizer LTXAVGemmaTokenizer",
    "comfy.text_encoders.lumina2": "LuminaTokenizer",
    "comfy.text_encoders.omnigen2": "Omnigen2Tokenizer",
    "comfy.text_encoders.pixart_t5": "PixArtTokenizer",
    "comfy.text_encoders.cosmos": "CosmosT5Tokenizer",
    "comfy.text_encoders.genmo": "MochiT5Tokenizer",
    "comfy.text_encoders.aura_t5": "AuraT5Tokenizer",
    "comfy.text_encoders.sa_t5": "SAT5Tokenizer",
    "comfy.text_encoders.ovis": "OvisTokenizer",
    "comfy.text_encoders.qwen_image": "QwenImageTokenizer",
    "comfy.text_encoders.wan": "WanT5Tokenizer",
    "comfy.text_encoders.z_image": "ZImageTokenizer",
}
NAMES = [(module, name) for module, names in TOKENIZERS.items() for name in names.split()]


@pytest.fixture(scope="module")
def spiece_model():
    return pieces()


def _tokenizer(module, name, spiece_model, folder=None):
    if importlib.util.find_spec(module) is None or not hasattr(importlib.import_module(module), name):
        pytest.skip(f"this ComfyUI has no {name}")
    data = dict.fromkeys(("spiece_model", "mt5xl.spiece_model"), spiece_model) | {"tekken_model": tekken()}
    return getattr(importlib.import_module(module), name)(embedding_directory=folder, tokenizer_data=data)


def _vectors(rows):
    found = []
    for row in embeddings.rows_of(rows):
        found += [token for token, *_ in row if torch.is_tensor(token)]
    return found


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_vectors_come_out_of_the_tokenizer(module, name, spiece_model, tmp_path, monkeypatch):
    """The language models' tokenizers compare every token with a number, which a tensor answers with a tensor."""
    stand_in_for_llamas_tokenizer(monkeypatch)
    tokenizer = _tokenizer(module, name, spiece_model, str(tmp_path))
    parts = [part for _, part in embeddings.parts_of(tokenizer)]
    assert parts
    for part in parts:
        if part.embedding_key != "qwen3_4b":  # Z-Image's, which ComfyUI 0.8.0 gives no folder, and newer ones do
            reads_folder = part.embedding_directory is not None
            assert reads_folder == (part.embedding_key not in word_files.WITHOUT_FOLDER), part.embedding_key
    given = {part.embedding_key: torch.randn(2, 3 + number) for number, part in enumerate(parts)}
    reading = embeddings.tokenizer_with(tokenizer, [Embedding("hat", "", given)])
    for prompt in ("a red embedding:hat left", "embedding:hat "):
        found = _vectors(reading.tokenize_with_weights(prompt))
        used = {key: tensor for key, tensor in given.items() if any(t.shape[-1] == tensor.shape[-1] for t in found)}
        assert used.keys() == given.keys() - {"byt5_small"}, prompt  # which reads what stands in quotes
        for tensor in used.values():
            assert torch.equal(torch.stack([t for t in found if t.shape[-1] == tensor.shape[-1]]), tensor)


@pytest.mark.parametrize(("name", "reads"), [("Flux2Tokenizer", False), ("KleinTokenizer", True)])
def test_which_tokenizers_read_an_embedding_that_a_prompt_begins_with(name, reads, spiece_model):
    tokenizer = _tokenizer("comfy.text_encoders.flux", name, spiece_model)
    (part,) = [part for _, part in embeddings.parts_of(tokenizer)]
    vectors = torch.randn(2, 4)
    reading = embeddings.tokenizer_with(tokenizer, [Embedding("hat", "", {part.embedding_key: vectors})])
    assert embeddings.reads_at_start(reading, "hat") == reads
    for prompt in (" embedding:hat left", "a embedding:hat "):
        assert torch.equal(torch.stack(_vectors(reading.tokenize_with_weights(prompt))), vectors)


def test_a_tokenizer_that_drops_vectors_is_refused(spiece_model):
    tokenizer = _tokenizer("comfy.text_encoders.longcat_image", "LongCatImageTokenizer", spiece_model)
    clip = types.SimpleNamespace(tokenizer=tokenizer)
    parts = [word_tokens.Part(part.embedding_key, part, None) for _, part in embeddings.parts_of(tokenizer)]
    said = r"\(LongCatImageTokenizer\) takes no vectors among its tokens \(it drops them\)"
    with pytest.raises(ValueError, match=said):
        word_tokens.check_tokenizer(clip, parts)


@pytest.mark.parametrize("name", MORE)
def test_gradients_of_language_models_are_those_of_finite_differences(name, monkeypatch):
    clip = clip_of(name, monkeypatch)
    draws = torch.Generator().manual_seed(0)
    encoder, vectors = LiveEncoder(clip), {}
    for attribute, part in embeddings.parts_of(clip.tokenizer):
        if part.embedding_key != "byt5_small":
            width = embeddings.table_of(clip, attribute, part).embedding_dim
            vectors[part.embedding_key] = torch.randn(2, width, generator=draws) / width**0.5
    assert vectors.keys() == MORE[name][3].keys() - {"byt5_small"}
    weigh = {}

    def loss():
        (found,) = encoder(["a hat left"], [Conditioning(torch.zeros(1, 1, 1))], {"hat": vectors})
        total = 0.0
        for key, tensor in {"context": found.context, **found.extras}.items():
            if torch.is_tensor(tensor) and tensor.is_floating_point():
                weigh.setdefault(key, torch.randn(tensor.shape, generator=draws))
                total = total + (tensor.double() * weigh[key]).sum()
        return total

    with make_differentiable(encoder):
        for tensor in vectors.values():
            tensor.requires_grad_()
        loss().backward()
        for key, tensor in vectors.items():
            gradient = tensor.grad.clone()
            assert gradient.abs().max() > 0, key
            way = gradient / gradient.norm() * tensor.detach().norm()
            slope = slope_along(vectors, {key: way}, loss, (0.004, 0.002))
            assert float((gradient * way).sum()) == pytest.approx(slope, rel=1e-2), key
