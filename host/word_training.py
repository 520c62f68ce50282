"""Begins words to train on a CLIP: whether its tokenizers can take them, and the vectors that they start from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..training.data.dataset import Dataset
from ..training.trainable.words import CaptionWords, WordSettings, group_by_word, trained_name
from . import word_tokens
from .comfyui_objects import Clip, Model
from .embeddings import carried_files
from .encoding import LiveEncoder
from .text_encoder_gradients import backward_of_conditions, load_fully, make_differentiable
from .word_files import problem_of_file
from .word_tokens import Part


class StartVectors(NamedTuple):
    """Words before the first step: the settings with their bounds, the vectors by trained name, and what the report
    says of them.
    """

    settings: WordSettings
    vectors: dict[str, Tensor]
    notes: list[str]


def start_words(settings: WordSettings, clip: Clip, model: Model, dataset: Dataset) -> StartVectors:
    """The vectors that the words start from, for each text encoder that the MODEL sees something of.

    Raises ValueError for words that no caption has, that the CLIP knows already, or that a tokenizer cannot hold.
    """
    _check_captions(settings, dataset)
    parts = word_tokens.text_encoders(clip)
    word_tokens.check_tokenizer(clip, parts)
    errors = _word_problems(settings, clip, parts)
    clip = load_fully(clip)
    vectors: dict[str, Tensor] = {}
    notes: list[str] = []
    for word, initial in zip(settings.words, settings.initial, strict=True):
        for part in parts:
            found = word_tokens.tokens_of(part, initial)
            tokens = word_tokens.fit_count(found, settings.count)
            problem = word_tokens.problem_of_initial(part, initial, found)
            problem = problem or word_tokens.problem_of_count(part, word, len(tokens))
            if problem:
                errors.append(problem)
                continue
            if len(tokens) != len(found):
                notes.append(word_tokens.count_note(part, word, initial, len(found), len(tokens)))
            vectors[trained_name(word, part.key)] = word_tokens.look_up_vectors(part, tokens)
    if errors:
        raise ValueError("Train Words: " + "; ".join(errors) + ".")
    read = _find_read_parts(clip, model, vectors, dataset)
    if not read:
        raise ValueError("Train Words: the model sees nothing of what this CLIP makes of a word: connect its own CLIP.")
    vectors = {name: tensor for name, tensor in vectors.items() if name.rpartition(".")[2] in read}
    if settings.max_norm:
        settings = replace(settings, bounds=_bounds(settings, [part for part in parts if part.key in read]))
    return StartVectors(settings, vectors, notes)


def _check_captions(settings: WordSettings, dataset: Dataset) -> None:
    """Raises ValueError for words that no caption has."""
    find, found = CaptionWords(settings.words).find_words, set()
    for image in dataset.images:
        found.update(find(image.caption))
    missing = [word for word in settings.words if word not in found]
    if missing and all(image.caption_template is None for image in dataset.images):
        example = dataset.images[0].caption
        raise ValueError(
            f"Train Words: no caption of the dataset has {', '.join(missing)} as a word of its own; the first is"
            f" {example[:80]!r}. Write the words into the captions, or give words that they have."
        )


def _word_problems(settings: WordSettings, clip: Clip, parts: Sequence[Part]) -> list[str]:
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
        knowing = [part.key for part in parts if word_tokens.is_token(part, word)]
        if knowing:
            errors.append(
                f"{word!r} is a token of its own in {' and '.join(knowing)}, and so has a meaning: choose a word that"
                f" is none, such as sks_{word}, and write that into the captions"
            )
    return errors


@torch.no_grad()
def _bounds(settings: WordSettings, parts: Sequence[Part]) -> tuple[tuple[str, float], ...]:
    """The largest norm of a word's vectors by text encoder: `max_norm` times the mean norm of its own vectors."""
    bounds = []
    for part in parts:
        weight = next(part.table.parameters())
        total = 0.0
        for rows in torch.arange(len(weight), device=weight.device).split(4096):
            total += float(torch.linalg.vector_norm(part.table(rows).to("cpu", torch.float64), dim=-1).sum())
        bounds.append((part.key, settings.max_norm * total / len(weight)))
    return tuple(bounds)


def _find_read_parts(clip: Clip, model: Model, vectors: Mapping[str, Tensor], dataset: Dataset) -> set[str]:
    """The text encoders whose vectors reach what the MODEL is conditioned on, found by the gradients of a caption with
    all words.
    """
    encoder = LiveEncoder(clip, dataset.clip_skip)
    probes: dict[str, Tensor] = {}
    with make_differentiable(encoder):
        for name, tensor in vectors.items():
            probes[name] = tensor.to(clip.patcher.load_device, copy=True).requires_grad_()
        words = group_by_word(probes)
        backward_of_conditions(encoder, model, " ".join(words), words)
    return {name.rpartition(".")[2] for name, probe in probes.items() if probe.grad is not None}
