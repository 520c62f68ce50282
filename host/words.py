"""Begins words to train on a CLIP: whether its tokenizers can take them, and the vectors that they start from."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..patches.lora_files.embeddings import Embedding
from ..storage.safetensors import read_header
from ..training.data.dataset import Dataset
from ..training.trainable.words import CaptionWords, WordSettings, by_word, is_name, trained_name
from .embeddings import TokenVectors, carried_files, parts_of, table_of, tokenizer_with
from .encoding import LiveEncoder, prompt_of
from .text_encoder_gradients import backward_of_conditions, differentiable, fully_loaded

_WORD_OF_GRAFT = "graft_word"  # in the metadata of an embedding that Save Words wrote
# Text encoders whose tokenizers ComfyUI makes without an embeddings folder.
_WITHOUT_FOLDER = frozenset(
    {
        *("byt5_small", "chinese_roberta", "gemma2_2b", "gemma3_4b", "gemma3_12b", "gemma4", "jina_clip_2", "lyrics"),
        *("mt5xl", "pile_t5xl", "qwen25_3b", "qwen25_7b", "qwen3_2b", "t5base", "t5gemma", "umt5base", "umt5xxl"),
    }
)
_PROBE = "graft_probe"  # the name of an embedding that is looked for once
_MARKS = ("</w>", "▁", "Ġ")  # that tokenizers put before or after a whole word


class BegunWords(NamedTuple):
    """Words before the first step: the settings with their bounds, the vectors by trained name, and what the report
    says of them.
    """

    settings: WordSettings
    vectors: dict[str, Tensor]
    notes: list[str]


def file_of(word: str) -> str:
    """The path of a word's file in ComfyUI's embeddings folder, for `embedding:NAME`."""
    import folder_paths

    if not is_name(word):
        raise ValueError(f"the word {word!r} is no file name: use Save LoRA, which keeps it in the LoRA file")
    folders: list[str] = folder_paths.get_folder_paths("embeddings")
    return os.path.join(folders[0], f"{word}.safetensors")


def saved_metadata(word: str) -> dict[str, str]:
    """The metadata of a word's file, by which it is known as Graft's."""
    return {"format": "pt", _WORD_OF_GRAFT: word}


def problem_of_file(word: str) -> str:
    """Why a word cannot be saved as a file of ComfyUI's embeddings folder: another one is there; "" if it can."""
    path = file_of(word)
    if not os.path.exists(path) or _WORD_OF_GRAFT in read_header(path)[1]:
        return ""
    return f"{path} is there already, and Graft did not save it: move it away, or train the word under another name"


def says_where_read(words: Mapping[str, Mapping[str, Tensor]]) -> list[str]:
    """Which words ComfyUI alone does not find in its embeddings folder."""
    parts: dict[str, None] = {}
    for vectors in words.values():
        parts.update(dict.fromkeys(part for part in vectors if part in _WITHOUT_FOLDER))
    if not parts:
        return []
    return [
        f"ComfyUI's own tokenizer of {' and '.join(parts)} reads no embeddings folder, and so ignores this file: save"
        " the words with Save LoRA, and load that file with LoRA Stack"
    ]


class _Part(NamedTuple):
    """One text encoder of a CLIP: its key ("clip_l"), its tokenizer, and its table of vectors by token."""

    key: str
    tokenizer: Any
    table: torch.nn.Module


def begin(settings: WordSettings, clip: Any, model: Any, dataset: Dataset) -> BegunWords:
    """The vectors that the words start from, for each text encoder that the MODEL sees something of.

    Raises ValueError for words that no caption has, that the CLIP knows already, or that a tokenizer cannot hold.
    """
    _check_captions(settings, dataset)
    parts = _parts(clip)
    _check_tokenizer(clip, parts)
    errors = _known_words(settings, clip, parts)
    clip = fully_loaded(clip)
    vectors: dict[str, Tensor] = {}
    notes: list[str] = []
    for word, initial in zip(settings.words, settings.initial, strict=True):
        for part in parts:
            found = _tokens(part, initial)
            tokens = _counted(found, settings.count)
            problem = _problem(part, word, initial, len(tokens))
            if problem:
                errors.append(problem)
                continue
            if len(tokens) != len(found):
                notes.append(_counted_note(part, word, initial, len(found), len(tokens)))
            vectors[trained_name(word, part.key)] = _looked_up(part, tokens)
    if errors:
        raise ValueError("Train Words: " + "; ".join(errors) + ".")
    read = _parts_read(clip, model, vectors, dataset)
    if not read:
        raise ValueError("Train Words: the model sees nothing of what this CLIP makes of a word: connect its own CLIP.")
    vectors = {name: tensor for name, tensor in vectors.items() if name.rpartition(".")[2] in read}
    if settings.max_norm:
        settings = replace(settings, bounds=_bounds(settings, [part for part in parts if part.key in read]))
    return BegunWords(settings, vectors, notes)


def _check_captions(settings: WordSettings, dataset: Dataset) -> None:
    """Raises ValueError for words that no caption has."""
    find, found = CaptionWords(settings.words).found, set()
    for image in dataset.images:
        found.update(find(image.caption))
    missing = [word for word in settings.words if word not in found]
    if missing and all(image.caption_template is None for image in dataset.images):
        example = dataset.images[0].caption
        raise ValueError(
            f"Train Words: no caption of the dataset has {', '.join(missing)} as a word of its own; the first is"
            f" {example[:80]!r}. Write the words into the captions, or give words that they have."
        )


def _parts(clip: Any) -> list[_Part]:
    """The text encoders of a CLIP that read embeddings. Raises ValueError without any."""
    parts = []
    for name, tokenizer in parts_of(getattr(clip, "tokenizer", None)):
        table = table_of(clip, name, tokenizer)
        if table is not None:
            parts.append(_Part(tokenizer.embedding_key, tokenizer, table))
    if not parts:
        raise ValueError(
            "Train Words: this CLIP has no tokenizer that reads embedding:NAME, so that words cannot be trained for it:"
            " train a LoRA instead."
        )
    return parts


def _check_tokenizer(clip: Any, parts: Sequence[_Part]) -> None:
    """Raises ValueError where vectors do not come out of ComfyUI's own tokenizer, as of LongCat-Image's."""
    vectors = {part.key: torch.zeros(1, part.tokenizer.embedding_size) for part in parts}
    tokenizer = tokenizer_with(clip.tokenizer, [Embedding(_PROBE, "", vectors)])
    try:
        rows = tokenizer.tokenize_with_weights(f"a embedding:{_PROBE} ")
        if any(isinstance(token, TokenVectors) for row in _rows(rows) for token, *_ in row):
            return
        problem = "it drops them"
    except RuntimeError as error:
        problem = str(error)
    raise ValueError(
        f"Train Words: ComfyUI's tokenizer of this model ({type(tokenizer).__name__}) takes no vectors among its tokens"
        f" ({problem}), so that words cannot be trained for it: train a LoRA instead."
    )


def _rows(tokens: Any) -> Iterator[Sequence[Any]]:
    """The rows of what a tokenizer answers: those of one text encoder, or of several by name."""
    if not isinstance(tokens, Mapping):
        tokens = {"": tokens}
    for rows in tokens.values():
        yield from rows


def _known_words(settings: WordSettings, clip: Any, parts: Sequence[_Part]) -> list[str]:
    """What is wrong with words that the CLIP knows already."""
    errors = []
    carried = carried_files(clip)
    for word, initial in zip(settings.words, settings.initial, strict=True):
        in_the_way = problem_of_file(word)
        if in_the_way:
            errors.append(in_the_way)
        if word in carried and initial != f"embedding:{word}":
            errors.append(
                f"this CLIP has embedding:{word} already, from {carried[word]}: choose another word, or"
                f" train it on with the initial words embedding:{word}"
            )
        knowing = [part.key for part in parts if _is_token(part, word)]
        if knowing:
            errors.append(
                f"{word!r} is a word that {' and '.join(knowing)} knows as a token of its own: choose one that it does"
                f" not know, such as sks_{word}, and write that into the captions"
            )
    return errors


def _tokens(part: _Part, text: str) -> list[Any]:
    """The tokens of a text, without what a tokenizer puts around every text; vectors where it names an embedding."""
    rows = part.tokenizer.tokenize_with_weights(prompt_of(text, False), return_word_ids=True)
    if isinstance(rows, Mapping):
        rows = rows[part.key]
    return [token for row in rows for token, _, word in row if word]


def _is_token(part: _Part, word: str) -> bool:
    tokens = _tokens(part, word)
    if len(tokens) != 1:
        return False
    ((_, text),) = part.tokenizer.untokenize([(tokens[0], 1.0)])
    for mark in _MARKS:
        text = text.replace(mark, "")
    return text.lower() == word.lower()


def _counted(tokens: Sequence[Any], count: int) -> list[Any]:
    """As many of the initial words' tokens as a word has vectors: all for 0, else cut off or, as kohya does it, from
    the first one again.
    """
    if not count or not tokens:
        return list(tokens)
    return [tokens[index % len(tokens)] for index in range(count)]


def _counted_note(part: _Part, word: str, initial: str, found: int, count: int) -> str:
    done = "repeated"
    if count < found:
        done = "cut off"
    return f"{word}: initial words {initial!r} are {found} tokens in {part.key}, {done} for {count} vectors"


def _problem(part: _Part, word: str, initial: str, count: int) -> str:
    """Why a word cannot have so many vectors in a text encoder; "" if it can."""
    if not count:
        return f"initial words {initial!r} have no token in {part.key}: write a word"
    room = _room(part.tokenizer)
    if count > room:
        return (
            f"{word} would have {count} vectors in {part.key}, which reads {room} tokens at once: set vectors per word"
            f" to {room} or fewer, or write fewer initial words"
        )
    return ""


def _room(tokenizer: Any) -> int:
    """How many tokens of a caption a tokenizer puts into one row: 75 for CLIP."""
    start = getattr(tokenizer, "start_token", None) is not None
    end = getattr(tokenizer, "end_token", None) is not None
    room: int = tokenizer.max_length - start - end
    return room


@torch.no_grad()
def _looked_up(part: _Part, tokens: Sequence[Any]) -> Tensor:
    rows = []
    for token in tokens:
        if not isinstance(token, Tensor):
            device = next(part.table.parameters()).device
            token = part.table(torch.tensor([token], device=device))[0]
        rows.append(token.detach().to("cpu", torch.float32))
    return torch.stack(rows)


@torch.no_grad()
def _bounds(settings: WordSettings, parts: Sequence[_Part]) -> tuple[tuple[str, float], ...]:
    """The largest norm of a word's vectors by text encoder: `max_norm` times the mean norm of its own vectors."""
    bounds = []
    for part in parts:
        weight = next(part.table.parameters())
        total = 0.0
        for rows in torch.arange(len(weight), device=weight.device).split(4096):
            total += float(torch.linalg.vector_norm(part.table(rows).double(), dim=-1).sum())
        bounds.append((part.key, settings.max_norm * total / len(weight)))
    return tuple(bounds)


def _parts_read(clip: Any, model: Any, vectors: Mapping[str, Tensor], dataset: Dataset) -> set[str]:
    """The text encoders whose vectors reach what the MODEL is conditioned on, found by the gradients of a caption with
    all words.
    """
    encoder = LiveEncoder(clip, dataset.clip_skip)
    probes: dict[str, Tensor] = {}
    with differentiable(encoder):
        for name, tensor in vectors.items():
            probes[name] = tensor.to(clip.patcher.load_device, copy=True).requires_grad_()
        words = by_word(probes)
        backward_of_conditions(encoder, model, " ".join(words), words)
    return {name.rpartition(".")[2] for name, probe in probes.items() if probe.grad is not None}
