"""ComfyUI's own tokenizers read captions letter by letter, or with weights where that is asked for."""

import importlib.util
from types import SimpleNamespace

import comfy.sd1_clip
import pytest
from comfy.text_encoders.qwen_image import QwenImageTokenizer
from graft_nodes import host as wall

CAPTIONS = [
    "saber (fate)",
    "tag_(thing:0.2)",
    "a (b:1.5), ((c)), d :) e (",
    "(:0.5) \\o/ (x)",
    "plain, words",
    "",
]


@pytest.fixture(scope="module")
def tokenizer():
    return comfy.sd1_clip.SDTokenizer()


@pytest.mark.parametrize("caption", CAPTIONS)
def test_a_caption_is_read_as_it_stands(tokenizer, caption):
    (chunk,) = tokenizer.tokenize_with_weights(wall.encoding.prompt_of(caption, False))
    ids = tokenizer.tokenizer(caption)["input_ids"]
    assert [token for token, _ in chunk][: len(ids)] == ids and {weight for _, weight in chunk} == {1.0}


@pytest.mark.parametrize("caption", CAPTIONS)
def test_with_weights_it_is_a_prompt(tokenizer, caption):
    weighted = tokenizer.tokenize_with_weights(wall.encoding.prompt_of(caption, True))
    assert weighted == tokenizer.tokenize_with_weights(caption)
    if "(b:1.5)" in caption:
        assert {1.0, 1.5, 1.21} <= {round(weight, 4) for _, weight in weighted[0]}


def test_brackets_that_are_escaped_already_stay_brackets(tokenizer):
    escaped, bare = (wall.encoding.prompt_of(text, False) for text in (r"saber \(fate\)", "saber (fate)"))
    assert tokenizer.tokenize_with_weights(escaped) == tokenizer.tokenize_with_weights(bare)


def _lens():
    """Lens' tokenizer over one that has a token for each letter: its own comes with the model's file."""
    from comfy.text_encoders.gpt_oss import LensGptOssTokenizer

    tokenizer = LensGptOssTokenizer.__new__(LensGptOssTokenizer)
    tokenizer.tokenizer = lambda text: {"input_ids": [ord(letter) for letter in text]}
    return tokenizer


def _longcat():
    from comfy.text_encoders.longcat_image import LongCatImageTokenizer

    return LongCatImageTokenizer(embedding_directory=None, tokenizer_data={})


def _made():
    """(name, tokenizer, a function from text to its tokens, whether it knows no prompt syntax) of this ComfyUI."""
    qwen = QwenImageTokenizer(embedding_directory=None, tokenizer_data={})
    made = [
        ("CLIP", comfy.sd1_clip.SD1Tokenizer(), False),
        ("Qwen", qwen, False),
    ]
    for module, make in (("longcat_image", _longcat), ("gpt_oss", _lens)):
        if importlib.util.find_spec(f"comfy.text_encoders.{module}") is not None:
            made.append((module, make(), True))
    return made


def _ids(tokens):
    parts = tokens.values() if isinstance(tokens, dict) else [tokens]
    return [[int(token[0]) for row in part for token in row] for part in parts]


@pytest.mark.parametrize("caption", [*CAPTIONS[:4], r"a \(b\), (c)"])
def test_every_tokenizer_is_asked_whether_it_knows_escaped_brackets(caption):
    written = caption.replace("\\(", "(").replace("\\)", ")")
    for name, tokenizer, is_literal in _made():
        asked = []

        def tokenize(text, tokenizer=tokenizer, asked=asked):
            asked.append(text)
            return tokenizer.tokenize_with_weights(text)

        clip = SimpleNamespace(tokenize=tokenize)
        assert bool(wall.encoding.literal_parts(clip.tokenize)) == is_literal, name
        found = _ids(wall.encoding._tokenize(clip, caption, False))
        text = written if is_literal else wall.encoding.prompt_of(written, False)
        assert found == _ids(tokenizer.tokenize_with_weights(text)), name
        raw = {"CLIP": "clip_l", "Qwen": "qwen25_7b", "longcat_image": "qwen25_7b"}.get(name)
        letters = tokenizer if raw is None else getattr(tokenizer, raw)
        special = {"add_special_tokens": False} if name != "gpt_oss" else {}
        whole = [int(one) for one in letters.tokenizer(written, **special)["input_ids"]]
        if any(quote in written for quote in "'\""):
            continue
        (row,) = found
        assert any(row[at : at + len(whole)] == whole for at in range(len(row))), (name, caption)
