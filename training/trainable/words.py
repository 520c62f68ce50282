"""Words that are trained (textual inversion): a few vectors for each text encoder, in place of a word in the captions.

They lie among the trained tensors as `bundle_emb.NAME.ENCODER`, which is also how a LoRA carries them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ...settings.declaration import check_values, setting
from .settings import WORDS, is_word

MOST_WORDS = 64
MOST_VECTORS = 64
_NAME = re.compile(r"[A-Za-z0-9_-]{1,100}")


def _entries(text: str) -> tuple[str, ...]:
    return tuple(entry for entry in (part.strip() for part in re.split(r"[,\n]", text)) if entry)


@dataclass(frozen=True)
class WordSettings:
    """The settings of Train Words: plain values, checked on creation.

    `initial` are the words that each of `words` starts from. `count` is the number of vectors a word, 0: as many as
    its initial words have tokens. `learning_rate` 0 is that of Optimizer Settings. After the share `stop_after` of the
    steps the words stay as they are. No vector's norm gets above `max_norm` times the mean norm of the text encoder's
    own vectors (0: any); `bounds` are these norms by text encoder, once they are known. With `alone` nothing else is
    trained.
    """

    words: tuple[str, ...] = setting(
        "words",
        "",
        "The words to train, one per line or separated by commas, exactly as in your captions, such as sks_cat."
        " Choose words that mean nothing yet.",
        multiline=True,
        read=_entries,
        kohya="--token_string",
        onetrainer="placeholder",
        diffusers=("--token_abstraction", "as your captions have it"),
    )
    initial: tuple[str, ...] = setting(
        "initial words",
        "",
        "What each word starts from, such as cat: one entry for each word, in the same order, or one for all. The"
        " closer its meaning, the fewer steps it takes.",
        multiline=True,
        read=_entries,
        kohya=("--init_word", "with another number of tokens, they are repeated or cut off, as in kohya's"),
        onetrainer="initial embedding text",
        diffusers=("--initializer_concept", "without it diffusers draws random vectors; Graft asks for a word"),
    )
    count: int = setting(
        "vectors per word",
        0,
        "How many vectors a word has: 2 to 8 hold more detail. 0: as many as the initial words have tokens. With"
        " another number these are repeated or cut off.",
        low=0,
        high=64,
        kohya="--num_vectors_per_token",
        onetrainer=("Token Count", "above the text's tokens OneTrainer adds padding tokens; Graft repeats the text's"),
        diffusers=(
            "--num_new_tokens_per_abstraction",
            "diffusers ignores it beside an initial concept; Graft repeats or cuts off",
        ),
    )
    learning_rate: float = setting(
        "learning rate",
        0.001,
        "How fast the words change, with the schedule of Optimizer Settings. Words need more than a LoRA: 0.0005 to"
        " 0.005. 0 uses the learning rate of Optimizer Settings.",
        low=0.0,
        high=10.0,
        step=1e-06,
        diffusers="--text_encoder_lr",
    )
    stop_after: float = setting(
        "stop after (share of steps)",
        1.0,
        "Freezes the words after this share of the total steps; the adapter trains on. Try 0.5 if the words take"
        " over. 1 never freezes them.",
        low=0.01,
        high=1.0,
        step=0.05,
        advanced=True,
        onetrainer="Stop Training After",
        diffusers="--train_text_encoder_ti_frac",
    )
    max_norm: float = setting(
        "maximum norm",
        2.0,
        "Limits the length of each vector to this multiple of the mean length of the text encoder's own. Lower it to"
        " 1 if the word drowns the rest of the prompt; 0 is off.",
        low=0.0,
        high=100.0,
        step=0.1,
        advanced=True,
    )
    alone: bool = setting(
        "words only",
        False,
        "Trains the words and nothing else. Disconnect Adapter Settings then.",
        kohya=("train_textual_inversion.py", "on"),
        onetrainer=("Training Method Embedding", "on"),
    )
    bounds: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "bounds", tuple((part, float(norm)) for part, norm in self.bounds))
        check_values(self, "Train Words", _word_errors)
        if len(self.initial) == 1:
            object.__setattr__(self, "initial", self.initial * len(self.words))

    def is_frozen(self, step: int, total_steps: int) -> bool:
        """Whether the words do not move any more in the step after `step`."""
        return self.stop_after < 1 and total_steps > 0 and step >= self.stop_after * total_steps


def is_name(word: str) -> bool:
    """Whether a word can be trained: it is also the name of a file."""
    return _NAME.fullmatch(word) is not None


def _word_errors(settings: WordSettings) -> Iterator[str]:
    words = settings.words
    if not words:
        yield "words is empty: write the word that your captions have, such as sks_cat"
    if len(words) > MOST_WORDS:
        yield f"words has {len(words)} words, expected at most {MOST_WORDS}"
    for word in words:
        if not is_name(word):
            yield f"words has {word!r}, expected letters, digits, _ and - only, as in sks_cat"
    if len({word.lower() for word in words}) < len(words):
        yield "words has a word twice"
    if not settings.initial:
        yield "initial words is empty: write what each word is most like, such as cat"
    elif len(settings.initial) not in (1, len(words)):
        yield (
            f"initial words has {len(settings.initial)} entries for {len(words)} words: write one for each word, in the"
            " same order, or one for all"
        )
    if settings.alone and settings.stop_after < 1:
        yield (
            f"stop after is {settings.stop_after:g} and words only is on, so that nothing would be trained then: set it"
            " to 1"
        )


def check_reference(settings: WordSettings | None, compares_pairs: bool) -> None:
    """Raises ValueError for words beside a loss that compares with the model before training, which has none."""
    if settings is not None and compares_pairs:
        raise ValueError(
            "Train Words: loss function dpo of Objective Settings compares with the model before training, which does"
            " not know the word: train the words first, then a LoRA on the pairs with the CLIP of that Train Step."
        )


# --- among the trained tensors ----------------------------------------------------------------------------------------


def trained_name(word: str, part: str) -> str:
    """The name of a word's vectors for one text encoder ("clip_l") among the trained tensors."""
    return f"{WORDS}{word}.{part}"


def select_words(trained: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The vectors of words among trained tensors."""
    return {name: tensor for name, tensor in trained.items() if is_word(name)}


def drop_words(trained: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Trained tensors without the vectors of words."""
    return {name: tensor for name, tensor in trained.items() if not is_word(name)}


def group_by_word(trained: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """The vectors of words among trained tensors.

    Args:
        trained: the trained tensors by name.

    Returns:
        {word: {text encoder: vectors (tokens, width)}}.
    """
    words: dict[str, dict[str, Tensor]] = {}
    for name, tensor in select_words(trained).items():
        word, _, part = name.removeprefix(WORDS).rpartition(".")
        words.setdefault(word, {})[part] = tensor
    return words


@torch.no_grad()
def limit_norms_(trained: Mapping[str, Tensor], settings: WordSettings | None) -> None:
    """Scale down in place every vector of a word whose norm is above the bound of its text encoder.

    Args:
        trained: the trained tensors by name; those of words change.
        settings: the bounds by text encoder, largest norms of a vector.
    """
    if settings is None or not settings.bounds:
        return
    bounds = dict(settings.bounds)
    for vectors in group_by_word(trained).values():
        for part, tensor in vectors.items():
            norms = torch.linalg.vector_norm(tensor, dim=-1, keepdim=True, dtype=torch.float32)
            tensor.mul_((bounds[part] / norms.clamp(min=bounds[part])).to(tensor.dtype))


class CaptionWords:
    """Finds trained words in captions, and writes them as ComfyUI's `embedding:NAME`, which its tokenizers replace by
    vectors.
    """

    def __init__(self, words: tuple[str, ...]) -> None:
        longest_first = sorted(words, key=len, reverse=True)
        choices = "|".join(map(re.escape, longest_first))
        self._pattern = re.compile(rf"(?<![\w-])(?:embedding:)?({choices})(?![\w-])")

    def find_words(self, caption: str) -> list[str]:
        """The trained words in a caption."""
        return self._pattern.findall(caption)

    def write_embeddings(self, caption: str) -> str:
        """The caption with `embedding:NAME` in place of each word, between spaces, as the tokenizers look for it.

        Args:
            caption: a caption as the dataset has it.
        """

        def embedding(match: re.Match[str]) -> str:
            start, end = match.span()
            text = f"embedding:{match[1]}"
            if start and caption[start - 1] not in " \n":
                text = f" {text}"
            if not caption[end : end + 1].isspace():
                text += " "
            return text

        return self._pattern.sub(embedding, caption)
