"""Trained words in captions: which are found, and what their tokenizers are given, letter by letter."""

import pytest
from graft_nodes.training.trainable.words import CaptionWords

WORDS = CaptionWords(("zorp", "zorp-blue"))


@pytest.mark.parametrize(
    ("caption", "written", "found"),
    [
        ("zorp", "embedding:zorp ", ["zorp"]),
        ("a zorp left", "a embedding:zorp left", ["zorp"]),
        ("a zorp\nleft", "a embedding:zorp\nleft", ["zorp"]),
        ("a\nzorp", "a\nembedding:zorp ", ["zorp"]),
        ("a\tzorp", "a\t embedding:zorp ", ["zorp"]),  # tokenizers split at spaces and at new lines alone
        ("a red zorp, right", "a red embedding:zorp , right", ["zorp"]),
        ("(zorp:1.2)", "( embedding:zorp :1.2)", ["zorp"]),
        (".zorp.", ". embedding:zorp .", ["zorp"]),
        ("a embedding:zorp, left", "a embedding:zorp , left", ["zorp"]),
        ("zorp-blue zorp", "embedding:zorp-blue embedding:zorp ", ["zorp-blue", "zorp"]),
        ("a zorps, xzorp, my-zorp, zorp-red, Zorp", "a zorps, xzorp, my-zorp, zorp-red, Zorp", []),
        ("", "", []),
    ],
)
def test_words_stand_between_spaces(caption, written, found):
    assert WORDS.write_embeddings(caption) == written
    assert WORDS.find_words(caption) == found
