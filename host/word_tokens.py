"""The tokens of words: text encoders of a CLIP, whether their tokenizers take vectors, and the vectors of tokens."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..patches.lora_files.embeddings import Embedding
from .comfyui_objects import Clip, Tokenizer
from .embeddings import TokenVectors, parts_of, rows_of, table_of, tokenizer_with
from .encoding import literal_of, literal_parts, prompt_of

_PROBE = "graft_probe"  # the name of an embedding that is looked for once
_MARKS = ("</w>", "▁", "Ġ")  # that tokenizers put before or after a whole word


class Part(NamedTuple):
    """One text encoder of a CLIP: its key ("clip_l"), its tokenizer, and its table of vectors by token."""

    key: str
    tokenizer: Any
    table: torch.nn.Module


def text_encoders(clip: Clip) -> list[Part]:
    """The text encoders of a CLIP that read embeddings. Raises ValueError without any."""
    parts = []
    for name, tokenizer in parts_of(getattr(clip, "tokenizer", None)):
        table = table_of(clip, name, tokenizer)
        if table is not None:
            parts.append(Part(tokenizer.embedding_key, tokenizer, table))
    if not parts:
        raise ValueError(
            "Train Words: this CLIP has no tokenizer that reads embedding:NAME, so that words cannot be trained for it:"
            " train a LoRA instead."
        )
    return parts


def check_tokenizer(clip: Clip, parts: Sequence[Part]) -> None:
    """Raises ValueError where vectors do not come out of ComfyUI's own tokenizer, as of LongCat-Image's."""
    vectors = {part.key: torch.zeros(1, part.tokenizer.embedding_size) for part in parts}
    tokenizer = tokenizer_with(clip.tokenizer, [Embedding(_PROBE, "", vectors)])
    try:
        rows = tokenizer.tokenize_with_weights(f"a embedding:{_PROBE} ")
        if any(isinstance(token, TokenVectors) for row in rows_of(rows) for token, *_ in row):
            return
        problem = "it drops them"
    except RuntimeError as error:
        problem = str(error)
    raise ValueError(
        f"Train Words: ComfyUI's tokenizer of this model ({type(tokenizer).__name__}) takes no vectors among its tokens"
        f" ({problem}), so that words cannot be trained for it: train a LoRA instead."
    )


def tokens_of(part: Part, text: str) -> list[Any]:
    """The tokens of a text, without what a tokenizer puts around every text; vectors where it names an embedding."""
    if literal_parts(part.tokenizer.tokenize_with_weights):
        text = literal_of(text)
    else:
        text = prompt_of(text, False)
    rows = part.tokenizer.tokenize_with_weights(text, return_word_ids=True)
    if isinstance(rows, Mapping):
        rows = rows[part.key]
    return [token for row in rows for token, _, word in row if word]


def is_token(part: Part, word: str) -> bool:
    """Whether a word is one token of a tokenizer's own."""
    tokens = tokens_of(part, word)
    if len(tokens) != 1:
        return False
    ((_, text),) = part.tokenizer.untokenize([(tokens[0], 1.0)])
    for mark in _MARKS:
        text = text.replace(mark, "")
    return text.lower() == word.lower()


def fit_count(tokens: Sequence[Any], count: int) -> list[Any]:
    """As many of the initial words' tokens as a word has vectors: all for 0, else cut off or, as kohya does it, from
    the first one again.
    """
    if not count or not tokens:
        return list(tokens)
    return [tokens[index % len(tokens)] for index in range(count)]


def count_note(part: Part, word: str, initial: str, found: int, count: int) -> str:
    """What the report says of a word whose initial words have another number of tokens than it has vectors."""
    done = "repeated"
    if count < found:
        done = "cut off"
    return f"{word}: initial words {initial!r} are {found} tokens in {part.key}, {done} for {count} vectors"


def problem_of_initial(part: Part, initial: str, tokens: Sequence[Any]) -> str:
    """Why a word cannot start from initial words with these tokens; "" if it can."""
    named = re.search(r"embedding:(\S+)", initial)
    width = next(part.table.parameters()).shape[1]
    widths = {token.shape[-1] for token in tokens if isinstance(token, Tensor)}
    if named and widths != {width}:
        return (
            f"initial words {initial!r}: neither this CLIP nor ComfyUI's embeddings folder has an embedding {named[1]}"
            f" with vectors of {width} numbers for {part.key}: write a word, or another embedding"
        )
    if not tokens:
        return f"initial words {initial!r} have no token in {part.key}: write a word"
    return ""


def problem_of_count(part: Part, word: str, count: int) -> str:
    """Why a word cannot have so many vectors in a text encoder; "" if it can."""
    room = _room(part.tokenizer)
    if count > room:
        return (
            f"{word} would have {count} vectors in {part.key}, which reads {room} tokens at once: set vectors per word"
            f" to {room} or fewer, or write fewer initial words"
        )
    return ""


def _room(tokenizer: Tokenizer) -> int:
    """How many tokens of a caption a tokenizer puts into one row: 75 for CLIP."""
    start = getattr(tokenizer, "start_token", None) is not None
    end = getattr(tokenizer, "end_token", None) is not None
    room: int = tokenizer.max_length - start - end
    return room


@torch.no_grad()
def look_up_vectors(part: Part, tokens: Sequence[Any]) -> Tensor:
    """The vectors (tokens, width) of tokens, in float32 on the CPU; a vector among them stays."""
    rows = []
    for token in tokens:
        if not isinstance(token, Tensor):
            device = next(part.table.parameters()).device
            token = part.table(torch.tensor([token], device=device))[0]
        rows.append(token.detach().to("cpu", torch.float32))
    return torch.stack(rows)
