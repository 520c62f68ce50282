"""Text encoders of ComfyUI's own classes, tiny and random."""

import base64
import importlib
import importlib.util
import io
import json
import os

import comfy.sd
import pytest
import torch

CLIP = {"num_attention_heads": 2}
T5 = {"d_kv": 4, "num_heads": 2, "d_ff": 8, "num_layers": 2}
_SPECIAL = ("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "a1", "a2", "a3", "a4", "a5", "a6", "<pad>")
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
# The text encoders of the other families of docs/families.md, and changes of their diffusion models.
OTHERS = {
    "flux2": (
        "comfy.text_encoders.flux",
        "flux2_te",
        "Flux2Tokenizer",
        {"mistral3_24b": {**LLM, "hidden_size": 12, "num_hidden_layers": 31, "vocab_size": 512}},
        {"context_in_dim": 36},
    ),
    "krea2": (
        "comfy.text_encoders.krea2",
        "te",
        "Krea2Tokenizer",
        {"qwen3vl_4b": {**LLM, "hidden_size": 12, "num_hidden_layers": 36}},
        {"txtlayers": 12},
    ),
    "ideogram": (
        "comfy.text_encoders.ideogram4",
        "te",
        "Ideogram4Tokenizer",
        {"qwen3vl_8b": {**LLM, "hidden_size": 4, "num_hidden_layers": 37}},
        {},
    ),
    "pixart": (
        "comfy.text_encoders.pixart_t5",
        "pixart_te",
        "PixArtTokenizer",
        {"t5xxl": {**T5, "d_model": 12}},
        {},
    ),
    "ltx": ("comfy.text_encoders.lt", "ltxv_te", "LTXVT5Tokenizer", {"t5xxl": {**T5, "d_model": 12}}, {}),
    "cosmos": ("comfy.text_encoders.cosmos", "te", "CosmosT5Tokenizer", {"t5xxl": {**T5, "d_model": 12}}, {}),
    "anima": (
        "comfy.text_encoders.anima",
        "te",
        "AnimaTokenizer",
        {"qwen3_06b": {**LLM, "hidden_size": 12, "num_hidden_layers": 2}},
        {},
    ),
    "ernie": (
        "comfy.text_encoders.ernie",
        "te",
        "ErnieTokenizer",
        {"ministral3_3b": {**LLM, "hidden_size": 12, "num_hidden_layers": 3, "vocab_size": 512}},
        {},
    ),
    "hidream": (
        "comfy.text_encoders.hidream",
        "hidream_clip",
        "HiDreamTokenizer",
        {
            "clip_l": _config(4, 3),
            "clip_g": _config(4, 3),
            "t5xxl": {**T5, "d_model": 12},
            "llama": {**LLM, "hidden_size": 10, "num_hidden_layers": 2},
        },
        {},
    ),
    "hidream o1": ("comfy.text_encoders.hidream_o1", "HiDreamO1TE", "HiDreamO1Tokenizer", {}, {}),
    "hunyuan 1.5": (
        "comfy.text_encoders.hunyuan_image",
        "te",
        "HunyuanVideo15Tokenizer",
        {"qwen25_7b": {**LLM, "hidden_size": 12, "num_hidden_layers": 4}, "byt5_small": {**T5, "d_model": 8}},
        {},
    ),
    "kandinsky 5 image": (
        "comfy.text_encoders.kandinsky5",
        "te",
        "Kandinsky5TokenizerImage",
        {"qwen25_7b": {**LLM, "hidden_size": 12, "num_hidden_layers": 2}, "clip_l": _config(8, 2)},
        {},
    ),
    "ace-step": (
        "comfy.text_encoders.ace",
        "AceT5Model",
        "AceT5Tokenizer",
        {"umt5base": {**T5, "d_model": 12, "vocab_size": 128}},
        {"lyric_encoder_vocab_size": 6693},
    ),
    "ace-step 1.5": (
        "comfy.text_encoders.ace15",
        "te",
        "ACE15Tokenizer",
        {"qwen3_06b": {**LLM, "hidden_size": 12, "num_hidden_layers": 2}},
        {},
    ),
    "stable audio": (
        "comfy.text_encoders.sa_t5",
        "SAT5Model",
        "SAT5Tokenizer",
        {"t5base": {**T5, "d_model": 768, "num_layers": 1}},
        {},
    ),
    "auraflow": (
        "comfy.text_encoders.aura_t5",
        "AuraT5Model",
        "AuraT5Tokenizer",
        {"pile_t5xl": {**T5, "d_model": 12}},
        {},
    ),
}
# family of docs/families.md -> its text encoders above, where they have another name
OF_FAMILY = {
    "sd2-v": "sd2",
    "flux schnell": "flux",
    "flux kontext": "flux",
    "qwen edit": "qwen",
    "chroma": "pixart",
    "radiance": "pixart",
    "wan i2v": "wan",
    "wan 2.2 i2v": "wan",
    "wan 2.2": "wan",
    "hunyuan": "hunyuan-video",
    "hunyuan image": "hunyuan-image",
    "kandinsky 5": "kandinsky5",
    "ideogram 4": "ideogram",
}
_UNNAMED = ("ace-step", "ace-step 1.5")  # whose classes do not say under which name they take their settings
_WITH_PIECES = ("lumina2", "wan", "ace-step")
_WITH_TEKKEN = ("flux2", "ernie")
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


def tekken():
    """A Mistral tokenizer of single bytes, as a model's file brings one."""
    vocabulary = [
        {"rank": rank, "token_bytes": base64.b64encode(bytes([rank])).decode(), "token_str": None}
        for rank in range(256)
    ]
    special = [{"rank": rank, "token_str": text, "is_control": True} for rank, text in enumerate(_SPECIAL)]
    config = {
        "pattern": ".",
        "num_vocab_tokens": 256,
        "default_vocab_size": 256 + len(_SPECIAL),
        "default_num_special_tokens": len(_SPECIAL),
        "version": "v3",
    }
    text = json.dumps({"config": config, "vocab": vocabulary, "special_tokens": special})
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def _tokenizer(cls, name):
    """The family's own; of SD3's T5 with few different tokens, so that its table of 4096 columns is small, and of
    ACE-Step 1.5 for two seconds of sound, whose codes a language model writes.
    """
    if name == "ace-step 1.5":
        return _for_seconds(cls, 2)
    if name != "sd3":
        return cls

    class Few(cls):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.t5xxl.__class__ = _with_few_tokens(type(self.t5xxl))

    return Few


def _for_seconds(cls, seconds):
    class Short(cls):
        def tokenize_with_weights(self, text, *args, **kwargs):
            return super().tokenize_with_weights(text, *args, **{**kwargs, "duration": seconds})

    return Short


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
    module, encoder, tokenizer, parts, _ = {**ENCODERS, **MORE, **OTHERS}[name]
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"this ComfyUI has no {module}")
    own = importlib.import_module(module)
    there = own
    if name == "hunyuan 1.5":
        there = importlib.import_module("comfy.text_encoders.hunyuan_video")
    encoder, tokenizer = getattr(own, encoder), _tokenizer(getattr(there, tokenizer), name)
    options = {"dtype": dtype, "initial_device": torch.device("cpu")}
    options |= {f"{part}_model_config": dict(config) for part, config in parts.items()}
    if name in _UNNAMED:
        options["model_name"] = next(iter(parts))
    if name == "sd3":
        options["t5xxl_model_config"]["vocab_size"] = SMALLER
    if "qwen25_7b" in parts:  # its eyes see no caption, and would be 600 million weights
        import comfy.text_encoders.qwen_vl as eyes

        real = eyes.Qwen2VLVisionTransformer
        small = {"hidden_size": 16, "intermediate_size": 8, "num_heads": 2, "num_layers": 1}
        monkeypatch.setattr(eyes, "Qwen2VLVisionTransformer", lambda **asked: real(**{**asked, **small}))
    if name == "krea2":
        import comfy.text_encoders.qwen3vl as eyes

        small = {"hidden_size": 16, "intermediate_size": 8, "depth": 1, "deepstack_visual_indexes": []}
        monkeypatch.setitem(eyes.QWEN3VL_VISION, "qwen3vl_4b", small)
        monkeypatch.setitem(eyes.QWEN3VL_VISION_COMMON, "num_heads", 2)
    target = type(
        "Target",
        (),
        {
            "params": {},
            "clip": encoder if isinstance(encoder, type) else encoder(),
            "tokenizer": tokenizer,
        },
    )
    data = {}
    if name in _WITH_PIECES:
        data["spiece_model"] = pieces()
    if name in _WITH_TEKKEN:
        data["tekken_model"] = tekken()
    if name in ("hunyuan-video", "hidream"):
        stand_in_for_llamas_tokenizer(monkeypatch)
    with torch.inference_mode():
        clip = comfy.sd.CLIP(target, embeddings, parameters=0, model_options=options, tokenizer_data=data)
        draws = torch.Generator().manual_seed(0)
        for key, p in clip.cond_stage_model.named_parameters():
            drawn = torch.randn(p.shape, generator=draws) * (0.2 if p.ndim < 2 else p.shape[-1] ** -0.5)
            p.copy_(drawn + (1.0 if "norm" in key and key.endswith("weight") else 0.0))
    return clip
