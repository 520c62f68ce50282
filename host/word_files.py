"""Words as files of ComfyUI's embeddings folder: their names, whose they are, and which text encoders read them."""

from __future__ import annotations

import os
from collections.abc import Mapping

from torch import Tensor

from ..storage.safetensors import read_header
from ..training.trainable.words import is_name

_WORD_OF_GRAFT = "graft_word"  # in the metadata of an embedding that Save Words wrote
# Text encoders whose tokenizers ComfyUI makes without an embeddings folder.
WITHOUT_FOLDER = frozenset(
    {
        *("byt5_small", "chinese_roberta", "gemma2_2b", "gemma3_4b", "gemma3_12b", "gemma4", "jina_clip_2", "lyrics"),
        *("mt5xl", "pile_t5xl", "qwen25_3b", "qwen25_7b", "qwen3_2b", "t5base", "t5gemma", "umt5base", "umt5xxl"),
    }
)


def file_of(word: str) -> str:
    """The path of a word's file in ComfyUI's embeddings folder, for `embedding:NAME`."""
    import folder_paths

    if not is_name(word):
        raise ValueError(f"the word {word!r} is not a file name: use Save LoRA, which keeps it in the LoRA file")
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


def describe_readers(words: Mapping[str, Mapping[str, Tensor]]) -> list[str]:
    """Which words ComfyUI alone does not find in its embeddings folder."""
    parts: dict[str, None] = {}
    for vectors in words.values():
        parts.update(dict.fromkeys(part for part in vectors if part in WITHOUT_FOLDER))
    if not parts:
        return []
    return [
        f"ComfyUI's own tokenizer of {' and '.join(parts)} reads no embeddings folder, and so ignores this file: save"
        " the words with Save LoRA, and load that file with LoRA Stack"
    ]
