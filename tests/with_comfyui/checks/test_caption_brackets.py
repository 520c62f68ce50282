"""ComfyUI's own tokenizers read captions letter by letter, or with weights where that is asked for."""

import comfy.sd1_clip
import pytest
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
