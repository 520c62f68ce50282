"""The word tokenizer: known words have their own rows, any other word a stable spare one."""

import subprocess
import sys

from graft_nodes.demo import tokenizer


def rows(text):
    return [[row for row, _ in chunk] for chunk in tokenizer.token_chunks(text)]


def test_known_words_have_rows_of_their_own():
    assert [tokenizer.row(word) for word in tokenizer.KNOWN] == list(range(1, 13))
    assert tokenizer.FIRST_SPARE == 13
    assert rows("A Red circle, LEFT!") == [[1, 2, 6, 10, 0, 0, 0, 0]]


def test_an_unknown_word_keeps_its_spare_row_across_processes():
    assert tokenizer.row("zorp") == 60
    assert tokenizer.row("Zorp") == 60
    code = "from graft_nodes.demo import tokenizer; print(tokenizer.row('zorp'), tokenizer.row('blim'))"
    seen = {
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    }
    assert seen == {f"{tokenizer.row('zorp')} {tokenizer.row('blim')}\n"}
    assert all(13 <= tokenizer.row(f"word{n}") < 64 for n in range(500))


def test_empty_prompt_is_one_empty_chunk():
    assert rows("") == rows("  ,.") == [[0] * 8]


def test_a_long_prompt_goes_on_in_another_chunk():
    assert rows("a " * 9) == [[1] * 8, [1] + [0] * 7]


def test_weights():
    assert tokenizer.weighted_words("a (red zorp:1.5) left") == [("a", 1.0), ("red", 1.5), ("zorp", 1.5), ("left", 1.0)]
    assert tokenizer.weighted_words("a (red) left") == [("a", 1.0), ("red", 1.0), ("left", 1.0)]
    assert tokenizer.weighted_words("a ((red) left") == [("a", 1.0), ("red", 1.0), ("left", 1.0)]


def test_tokenizer_speaks_comfyui():
    words = tokenizer.WordTokenizer(embedding_directory=None, tokenizer_data={})
    made = words.tokenize_with_weights("a zorp left")
    assert list(made) == ["words"] and made["words"][0][:4] == [(1, 1.0), (60, 1.0), (10, 1.0), (0, 1.0)]
    numbered = words.tokenize_with_weights("a zorp left", return_word_ids=True)["words"][0]
    assert numbered[:4] == [(1, 1.0, 1), (60, 1.0, 2), (10, 1.0, 3), (0, 1.0, 0)]
    assert [word for _, word in words.untokenize(made["words"][0][:4])] == ["a", "<60>", "left", ""]
