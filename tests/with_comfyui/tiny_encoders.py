"""Text encoders of ComfyUI's own classes, tiny and random."""

import importlib
import importlib.util
import io
import os

import comfy.sd
import pytest
import torch

CLIP = {"num_attention_heads": 2}
T5 = {"d_kv": 4, "num_heads": 2, "d_ff": 8, "num_layers": 2}
LLM = {"intermediate_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1}


def _config(width, layers):
    return {**CLIP, "hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": layers}


# family -> module and factory of the encoder, tokenizer, the encoder's settings by part, changes of the diffusion model
# that fit it
ENCODERS = {
    "sd1": ("comfy.sd1_clip", "SD1ClipModel", "SD1Tokenizer", {"clip_l": _config(12, 2)}, {}),
    "sdxl": (
        "comfy.sdxl_clip",
        "SDXLClipModel",
        "SDXLTokenizer",
        {"clip_l": _config(4, 3), "clip_g": _config(8, 3)},
        {"adm_in_channels": 8 + 1536},
    ),
    "sd3": (
        "comfy.text_encoders.sd3_clip",
        "sd3_clip",
        "SD3Tokenizer",
        {"clip_l": _config(4, 3), "clip_g": _config(8, 3), "t5xxl": {**T5, "d_model": 4096, "num_layers": 1}},
        {
            "adm_in_channels": 12,
            "context_embedder_config": {
                "target": "torch.nn.Linear",
                "params": {"in_features": 4096, "out_features": 128},
            },
        },
    ),
    "flux": (
        "comfy.text_encoders.flux",
        "flux_clip",
        "FluxTokenizer",
        {"clip_l": _config(8, 2), "t5xxl": {**T5, "d_model": 12}},
        {},
    ),
    "qwen": (
        "comfy.text_encoders.qwen_image",
        "te",
        "QwenImageTokenizer",
        {"qwen25_7b": {**LLM, "hidden_size": 12, "num_hidden_layers": 2}},
        {},
    ),
    "lumina2": (
        "comfy.text_encoders.lumina2",
        "te",
        "LuminaTokenizer",
        {"gemma2_2b": {**LLM, "hidden_size": 12, "num_hidden_layers": 3, "vocab_size": 128}},
        {},
    ),
    "z-image": (
        "comfy.text_encoders.z_image",
        "te",
        "ZImageTokenizer",
        {"qwen3_4b": {**LLM, "hidden_size": 12, "num_hidden_layers": 3}},
        {},
    ),
    "wan": (
        "comfy.text_encoders.wan",
        "te",
        "WanT5Tokenizer",
        {"umt5xxl": {**T5, "d_model": 12, "vocab_size": 128}},
        {},
    ),
}
# More text encoders of language models, without a diffusion model that fits them.
MORE = {
    "sd2": ("comfy.text_encoders.sd2_clip", "SD2ClipModel", "SD2Tokenizer", {"clip_h": _config(12, 3)}, {}),
    "hunyuan-video": (
        "comfy.text_encoders.hunyuan_video",
        "hunyuan_video_clip",
        "HunyuanVideoTokenizer",
        {"clip_l": _config(8, 2), "llama": {**LLM, "hidden_size": 12, "num_hidden_layers": 4}},
        {},
    ),
    "hunyuan-image": (
        "comfy.text_encoders.hunyuan_image",
        "te",
        "HunyuanImageTokenizer",
        {"qwen25_7b": {**LLM, "hidden_size": 12, "num_hidden_layers": 4}, "byt5_small": {**T5, "d_model": 8}},
        {},
    ),
    "kandinsky5": (
        "comfy.text_encoders.kandinsky5",
        "te",
        "Kandinsky5Tokenizer",
        {"qwen25_7b": {**LLM, "hidden_size": 12, "num_hidden_layers": 2}, "clip_l": _config(8, 2)},
        {},
    ),
    "omnigen2": (
        "comfy.text_encoders.omnigen2",
        "te",
        "Omnigen2Tokenizer",
        {"qwen25_3b": {**LLM, "hidden_size": 12, "num_hidden_layers": 2}},
        {},
    ),
}
SMALLER = 64  # rows of T5's table of tokens where its width cannot be small


def stand_in_for_llamas_tokenizer(monkeypatch):
    """Qwen's tokenizer where a checkout lacks Llama's file of 9 MB."""
    import comfy.text_encoders.hunyuan_video as llama
    import comfy.text_encoders.qwen_image as qwen

    folder = os.path.dirname(llama.__file__)
    if os.path.isfile(os.path.join(folder, "llama_tokenizer", "tokenizer.json")):
        return

    class StandIn:
        def __init__(self):
            self.tokenizer = qwen.Qwen2Tokenizer.from_pretrained(os.path.join(folder, "qwen25_tokenizer"))
            self.get_vocab = self.tokenizer.get_vocab

        @classmethod
        def from_pretrained(cls, path, **_):
            return cls()

        def __call__(self, text):  # with the start token that Llama's puts in front
            return {"input_ids": [128000, *self.tokenizer(text)["input_ids"]]}

    monkeypatch.setattr(llama, "LlamaTokenizerFast", StandIn)


def pieces():
    """A sentencepiece model of a few letters, as the files of Gemma and UMT5 bring one."""
    sentencepiece, made = pytest.importorskip("sentencepiece"), io.BytesIO()
    lines = ["a red square left", "a blue circle right", "the quick brown fox jumps over the lazy dog", ""]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines * 3),
        model_writer=made,
        vocab_size=60,
        hard_vocab_limit=False,
        minloglevel=2,
        pad_id=0,
        eos_id=1,
        bos_id=2,
        unk_id=3,
    )
    return made.getvalue()


def _tokenizer(cls, name):
    """The family's own; of SD3's T5 with few different tokens, so that its table of 4096 columns is small."""
    if name != "sd3":
        return cls

    class Few(cls):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.t5xxl.__class__ = _with_few_tokens(type(self.t5xxl))

    return Few


def _with_few_tokens(cls):
    class FewTokens(cls):
        def tokenize_with_weights(self, *args, **kwargs):
            rows = super().tokenize_with_weights(*args, **kwargs)
            return [[(_smaller(token), *more) for token, *more in row] for row in rows]

    return FewTokens


def _smaller(token):
    if torch.is_tensor(token) or token < 2:  # vectors of an embedding, and padding
        return token
    return 2 + token % (SMALLER - 2)


def clip_of(name, monkeypatch, dtype=torch.float32, embeddings=None):
    """A CLIP with random weights, made in inference mode as a loader makes it; `embeddings` is its folder of them."""
    module, encoder, tokenizer, parts, _ = {**ENCODERS, **MORE}[name]
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"this ComfyUI has no {module}")
    own = importlib.import_module(module)
    encoder, tokenizer = getattr(own, encoder), _tokenizer(getattr(own, tokenizer), name)
    options = {"dtype": dtype, "initial_device": torch.device("cpu")}
    options |= {f"{part}_model_config": dict(config) for part, config in parts.items()}
    if name == "sd3":
        options["t5xxl_model_config"]["vocab_size"] = SMALLER
    if "qwen25_7b" in parts:  # its eyes see no caption, and would be 600 million weights
        import comfy.text_encoders.qwen_vl as eyes

        real = eyes.Qwen2VLVisionTransformer
        small = {"hidden_size": 16, "intermediate_size": 8, "num_heads": 2, "num_layers": 1}
        monkeypatch.setattr(eyes, "Qwen2VLVisionTransformer", lambda **asked: real(**{**asked, **small}))
    target = type(
        "Target",
        (),
        {"params": {}, "clip": encoder if isinstance(encoder, type) else encoder(), "tokenizer": tokenizer},
    )
    data = {"spiece_model": pieces()} if name in ("lumina2", "wan") else {}
    if name == "hunyuan-video":
        stand_in_for_llamas_tokenizer(monkeypatch)
    with torch.inference_mode():
        clip = comfy.sd.CLIP(target, embeddings, parameters=0, model_options=options, tokenizer_data=data)
        draws = torch.Generator().manual_seed(0)
        for key, p in clip.cond_stage_model.named_parameters():
            drawn = torch.randn(p.shape, generator=draws) * (0.2 if p.ndim < 2 else p.shape[-1] ** -0.5)
            p.copy_(drawn + (1.0 if "norm" in key and key.endswith("weight") else 0.0))
    return clip
