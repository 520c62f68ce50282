"""Gives a CLIP the textual inversions of LoRA files: `embedding:NAME` in prompts finds them before files on disk."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..patches.lora_files.embeddings import Embedding, TokenizerPart
from ..storage.digest import sha256_of_tensors
from .comfyui_objects import Clip, Tokenizer

_LOOKUP = "_try_get_embedding"  # of ComfyUI's SDTokenizer, from 0.3.64 to 0.33.0


class TokenVectors(Tensor):
    """Vectors that stand among the numbers of tokens. A tensor answers a comparison with a number element by element,
    where the tokenizers of language models (Qwen-Image, HunyuanVideo) look for special tokens and expect yes or no: a
    vector is none of them. All that is computed with it is a plain tensor.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __eq__(self, other: object) -> Any:
        if isinstance(other, int):
            return False
        return super().__eq__(other)

    def __ne__(self, other: object) -> Any:
        if isinstance(other, int):
            return True
        return super().__ne__(other)

    __hash__ = Tensor.__hash__

    def __getitem__(self, index: Any) -> TokenVectors:
        """One vector, which stands among tokens too."""
        return super().__getitem__(index).as_subclass(TokenVectors)

    def __iter__(self) -> Iterator[TokenVectors]:
        return (self[index] for index in range(len(self)))


class CarriedEmbeddings:
    """What the tokenizer of a CLIP carries: the embeddings, and an identity for fingerprints."""

    def __init__(self, embeddings: Sequence[Embedding]) -> None:
        self.embeddings = tuple(embeddings)
        vectors = {}
        for embedding in self.embeddings:
            for part, tensor in embedding.vectors.items():
                vectors[f"{embedding.name} {part}"] = tensor
        self.identity = sha256_of_tensors(vectors)


def tokenizer_parts(clip: Clip) -> tuple[TokenizerPart, ...]:
    """The text encoders of a CLIP whose tokenizers read `embedding:NAME`."""
    parts = []
    for name, part in parts_of(getattr(clip, "tokenizer", None)):
        width = getattr(table_of(clip, name, part), "embedding_dim", None) or part.embedding_size
        parts.append(TokenizerPart(part.embedding_key, width))
    return tuple(parts)


def carried_files(clip: Clip) -> dict[str, str]:
    """The file of each embedding that a CLIP carries, by name."""
    return {embedding.name: embedding.file for embedding in _carried_embeddings(clip)}


def with_embeddings(clip: Clip, embeddings: Sequence[Embedding]) -> Clip:
    """A clone of a CLIP that knows these embeddings too, in place of those of their names. The CLIP and its tokenizer
    do not change.
    """
    clone = clip.clone()
    clone.tokenizer = tokenizer_with(clip.tokenizer, embeddings)
    names = {embedding.name for embedding in embeddings}
    others = [embedding for embedding in _carried_embeddings(clip) if embedding.name not in names]
    clone.tokenizer.graft_embeddings = CarriedEmbeddings((*others, *embeddings))
    return clone


def tokenizer_with(original: Any, embeddings: Sequence[Embedding]) -> Tokenizer:
    """A copy of a tokenizer that knows these embeddings too; their vectors may be of any length, and change later."""
    tokenizer = copy.copy(original)
    for name, part in list(parts_of(original)):
        if name:
            part = copy.copy(part)
            setattr(tokenizer, name, part)
        else:
            part = tokenizer
        if part.embedding_directory is None:  # ComfyUI would not look for embeddings at all
            part.embedding_directory = []
        setattr(part, _LOOKUP, _Lookup(part, embeddings))
    return tokenizer


def reads_at_start(tokenizer: Tokenizer, name: str) -> bool:
    """Whether a tokenizer reads an embedding that a prompt begins with. Flux.2's does not: the text that it puts in
    front of a prompt ends without a space.
    """
    rows = rows_of(tokenizer.tokenize_with_weights(f"embedding:{name} "))
    return any(isinstance(token, TokenVectors) for row in rows for token, *_ in row)


def rows_of(tokens: Any) -> Iterator[Sequence[Any]]:
    """The rows of what a tokenizer answers: those of one text encoder, or of several by name."""
    if not isinstance(tokens, Mapping):
        tokens = {"": tokens}
    for rows in tokens.values():
        yield from rows


def _carried_embeddings(clip: Clip) -> tuple[Embedding, ...]:
    carried = getattr(getattr(clip, "tokenizer", None), "graft_embeddings", None)
    if carried is None:
        return ()
    embeddings: tuple[Embedding, ...] = carried.embeddings
    return embeddings


def parts_of(tokenizer: Tokenizer) -> Iterator[tuple[str, Any]]:
    """(attribute, tokenizer) of each text encoder; the attribute is "" for the tokenizer itself."""
    for name, part in (("", tokenizer), *getattr(tokenizer, "__dict__", {}).items()):
        if hasattr(part, _LOOKUP) and hasattr(part, "embedding_key"):
            yield name, part


def table_of(clip: Clip, name: str, part: Any) -> Any:
    """The table of vectors by token of a text encoder whose tokenizer is `part`, under this name; None without one."""
    encoder = clip.cond_stage_model
    if name:  # Wan's tokenizer is clip_umt5xxl, its text encoder umt5xxl
        encoder = getattr(encoder, name, None) or getattr(encoder, part.embedding_key, None)
    encoder = getattr(encoder, "transformer", encoder)
    if not hasattr(encoder, "get_input_embeddings"):
        return None
    return encoder.get_input_embeddings()


class _Lookup:
    """How a part of a tokenizer finds an embedding: those of LoRA files by name, then as before."""

    def __init__(self, part: Any, embeddings: Sequence[Embedding]) -> None:
        self.vectors = _vectors(embeddings, part.embedding_key)
        self.before = getattr(part, _LOOKUP)
        self.says_name = _answers_with_name(part)

    def __call__(self, text: str) -> tuple[Any, ...]:
        """(vectors, leftover text), or with the name between them: what the tokenizer asks for after `embedding:`."""
        words = text.split()
        if not words:
            return self._look_up_elsewhere(text)
        name, leftover = words[0], " ".join(words[1:])
        if self.says_name:
            name, leftover = _cut_at_bracket(name, leftover)
        plain = name
        if name not in self.vectors:
            plain = name.strip(",")
            leftover = f"{name[len(plain) :]} {leftover}"
        if plain not in self.vectors:
            return self._look_up_elsewhere(text)
        vectors = self.vectors[plain].as_subclass(TokenVectors)
        if self.says_name:
            return vectors, name, leftover
        return vectors, leftover

    def _look_up_elsewhere(self, text: str) -> tuple[Any, ...]:
        answer: tuple[Any, ...] = self.before(text)
        return answer


def _cut_at_bracket(name: str, leftover: str) -> tuple[str, str]:
    """A name ends at the first `<` or `[` in a ComfyUI that says names; the rest is text again."""
    for index, letter in enumerate(name):
        if letter in "<[":
            return name[:index], f"{name[index:]} {leftover}".rstrip()
    return name, leftover


def _vectors(embeddings: Sequence[Embedding], part: str) -> Mapping[str, Tensor]:
    """The vectors for one text encoder by name; none for an embedding that was trained for others only."""
    return {embedding.name: embedding.vectors.get(part, torch.zeros(0, 1)) for embedding in embeddings}


def _answers_with_name(part: Any) -> bool:
    """Whether this ComfyUI's lookup answers with the name too (0.33.0), not with vectors and leftover only (0.3.64)."""
    without_folders = copy.copy(part)
    without_folders.embedding_directory = []
    answer = getattr(type(part), _LOOKUP)(without_folders, "graft")
    if len(answer) not in (2, 3):
        raise RuntimeError(
            f"This ComfyUI's tokenizers answer {_LOOKUP} in a form that Graft does not know ({len(answer)} values):"
            " take the embeddings out of the LoRA file, or disconnect CLIP"
        )
    return len(answer) == 3
