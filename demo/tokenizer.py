"""The demo's word-level tokenizer: 64 rows, a dozen known words, and a fixed spare row for every other word."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from ..storage.digest import sha256

SHAPES = ("circle", "square", "triangle", "cross")
COLORS = ("red", "yellow", "green", "blue")
POSITIONS = ("left", "middle", "right")
KNOWN = ("a", *COLORS, *SHAPES, *POSITIONS)
CONCEPT = "zorp"

ROWS = 64
LENGTH = 8
EMPTY = 0
FIRST_SPARE = 1 + len(KNOWN)

_ROW = {word: index for index, word in enumerate(KNOWN, start=1)}
_PIECE = re.compile(r"\(([^()]*):\s*([0-9]*\.?[0-9]+)\s*\)|([^()]+)|[()]")
_WORD = re.compile(r"embedding:[^\s,:]+|\w+")
_EMBEDDING = "embedding:"


def row(word: str) -> int:
    """The row of a word: its own row if it is known, else a spare row that depends only on the word's letters."""
    word = word.lower()
    if word in _ROW:
        return _ROW[word]
    digest = sha256(word.encode("utf-8")).digest()
    return FIRST_SPARE + int.from_bytes(digest[:8], "big") % (ROWS - FIRST_SPARE)


def weighted_words(text: str) -> list[tuple[str, float]]:
    """The words of a prompt with their weights; `(some words:1.3)` weighs its words 1.3, everything else weighs 1.
    `embedding:NAME` is one word.
    """
    words: list[tuple[str, float]] = []
    for match in _PIECE.finditer(text):
        inner, weight, plain = match.groups()
        for word in _WORD.findall(inner or plain or ""):
            words.append((word, float(weight or 1.0)))
    return words


def token_chunks(
    text: str, vectors_of: Callable[[str], Iterable[Any]] = lambda name: ()
) -> list[list[tuple[Any, float]]]:
    """The prompt as chunks of LENGTH (row, weight) pairs, the last one filled with EMPTY; an empty prompt is one empty
    chunk. `embedding:NAME` is as many vectors in place of rows as `vectors_of` gives for the name.
    """
    pairs: list[tuple[Any, float]] = []
    for word, weight in weighted_words(text):
        if word.startswith(_EMBEDDING):
            pairs += [(vector, weight) for vector in vectors_of(word.removeprefix(_EMBEDDING))]
        else:
            pairs.append((row(word), weight))
    pairs = pairs or [(EMPTY, 1.0)]
    pairs += [(EMPTY, 1.0)] * (-len(pairs) % LENGTH)
    return [pairs[start : start + LENGTH] for start in range(0, len(pairs), LENGTH)]


def is_row(token: object) -> bool:
    """Whether a token is the number of a row, and not a vector."""
    return isinstance(token, int)


def _numbered(chunks: list[list[tuple]]) -> list[list[tuple]]:
    """Each (row, weight) with the number of its word, from 1; 0 for filling."""
    numbered: list[list[tuple]] = []
    number = 0
    for chunk in chunks:
        numbered.append([])
        for row_number, weight in chunk:
            number += 1
            if is_row(row_number) and row_number == EMPTY:
                numbered[-1].append((row_number, weight, 0))
            else:
                numbered[-1].append((row_number, weight, number))
    return numbered


class WordTokenizer:
    """`token_chunks` under the names that ComfyUI's CLIP object calls, with the embeddings that LoRA files bring."""

    embedding_key = "words"
    embedding_size = 64
    max_length = LENGTH
    embedding_directory: object = None  # the demo has no embeddings of its own

    def __init__(self, embedding_directory: object = None, tokenizer_data: object = None) -> None:
        """ComfyUI passes both arguments; they are unused, as the demo has no files for its tokenizer."""

    def _try_get_embedding(self, embedding_name: str) -> tuple[Any, str, str]:
        """(None, the name, the text after it), as ComfyUI's tokenizers answer for an embedding that is not there."""
        name, *leftover = embedding_name.split()
        return None, name, " ".join(leftover)

    def _vectors_of(self, name: str) -> Iterable[Any]:
        vectors, *_ = self._try_get_embedding(name)
        if vectors is None:
            return ()
        return vectors

    def tokenize_with_weights(
        self, text: str, return_word_ids: bool = False, **_: object
    ) -> dict[str, list[list[tuple]]]:
        """`{"words": chunks}`; with `return_word_ids` each pair carries the (one-based) number of its word, 0 for
        filling.
        """
        chunks: list[list[tuple]] = [list(chunk) for chunk in token_chunks(text, self._vectors_of)]
        if return_word_ids:
            chunks = _numbered(chunks)
        return {"words": chunks}

    def untokenize(self, pairs: list[tuple]) -> list[tuple[tuple, str]]:
        """Each pair with the word it stands for: a known word, `""` for filling, `<n>` for spare row n."""
        names = {EMPTY: "", **{index: word for word, index in _ROW.items()}}
        return [(pair, names.get(pair[0], f"<{pair[0]}>")) for pair in pairs]

    def state_dict(self) -> dict:
        """Empty: the words are in the code."""
        return {}
