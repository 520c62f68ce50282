"""Encodes images and captions with ComfyUI's VAE and text encoder."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from ..training.data.dataset import Conditioning
from .comfyui_objects import Clip, Vae

if TYPE_CHECKING:
    from ..training.objective.denoiser import Words
    from ..training.trainable.words import CaptionWords

_BARE_BRACKET = re.compile(r"(?<!\\)[()]")
_ESCAPED_BRACKET = re.compile(r"\\([()])")


def frame_step(vae: Vae) -> int:
    """In which steps a VAE takes the frames of a clip: multiples of it and 1 more. 0 where it encodes pictures only."""
    if getattr(vae, "latent_dim", 2) != 3 or getattr(vae, "not_video", False):
        return 0
    return vae.temporal_compression_decode() or 0


def encode_pictures(vae: Vae, pixels: torch.Tensor) -> torch.Tensor:
    """Encode images (B, H, W, 3) in 0..1 as latents (B, C, h, w), float32 on the CPU. A VAE for video takes a batch for
    the frames of one clip, and its latents are (1, C, frames, h, w).
    """
    latents = vae.encode(pixels[:, :, :, :3])
    return latents.detach().to("cpu", torch.float32)


def prompt_of(caption: str, weighted: bool) -> str:
    """A caption in ComfyUI's prompt syntax: its brackets are escaped, so that they are text, unless `weighted`.

    A bracket that is escaped already stays as it is: `saber (fate)` and `saber \\(fate\\)` are the same caption.
    """
    if weighted:
        return caption
    return _BARE_BRACKET.sub(r"\\\g<0>", caption)


def literal_of(caption: str) -> str:
    """A caption for a tokenizer that knows no prompt syntax: its brackets without backslashes in front."""
    return _ESCAPED_BRACKET.sub(r"\1", caption)


def literal_parts(tokenize: Callable[[str], Any]) -> frozenset[str]:
    """Which parts of a tokenizer know no prompt syntax, so that an escaped bracket is a backslash to them: they are
    asked. A tokenizer of one part has the name "".
    """
    escaped, bare = tokenize(r"\("), tokenize("(")
    if not isinstance(escaped, Mapping):
        escaped, bare = {"": escaped}, {"": bare}
    return frozenset(name for name, tokens in escaped.items() if tokens != bare[name])


def caption_key(clip: Clip, caption: str, weighted: bool) -> str:
    """What a CLIP reads of a caption, as a text for keys: its prompt, and the parts that read the caption as it is."""
    parts = _literal_parts_for(clip, caption, weighted)
    if not parts:
        return prompt_of(caption, weighted)
    return f"{literal_of(caption)}\n{' '.join(sorted(parts))}"


def prompt_for_clip(clip: Clip, caption: str, weighted: bool) -> str:
    """A caption as the prompt of a CLIP whose parts all read alike."""
    if _literal_parts_for(clip, caption, weighted):
        return literal_of(caption)
    return prompt_of(caption, weighted)


def _literal_parts_for(clip: Clip, caption: str, weighted: bool) -> frozenset[str]:
    if weighted or not ("(" in caption or ")" in caption):
        return frozenset()
    return literal_parts(clip.tokenize)


def _tokenize(clip: Clip, caption: str, weighted: bool, written: Callable[[str], str] = str) -> Any:
    """The tokens of a caption in every part of a CLIP; `written` changes the text last."""
    tokens = clip.tokenize(written(prompt_of(caption, weighted)))
    parts = _literal_parts_for(clip, caption, weighted)
    if not parts:
        return tokens
    literal = clip.tokenize(written(literal_of(caption)))
    if not isinstance(tokens, Mapping):
        return literal
    return {name: literal[name] if name in parts else part for name, part in tokens.items()}


def encode_captions(
    clip: Clip, captions: Sequence[str], clip_skip: int = 0, weighted: bool = False
) -> dict[str, Conditioning]:
    """Encode each caption, float32 on the CPU; `clip_skip` 2 stops one layer before the last, 0 leaves it as it is.
    With `weighted`, brackets weigh what is in them, as in a prompt.
    """
    clip = with_clip_skip(clip, clip_skip)
    conditionings = {}
    for caption in captions:
        context, extras = _encode(clip, _tokenize(clip, caption, weighted))
        for name, value in extras.items():
            extras[name] = _float_on_cpu(value)
        conditionings[caption] = Conditioning(_float_on_cpu(context), extras)
    return conditionings


def encode_with_pictures(
    clip: Clip, text: str, pictures: Sequence[torch.Tensor], tokenizer_options: Mapping[str, str], clip_skip: int = 0
) -> Conditioning:
    """Encode a prompt together with the pictures (1, H, W, 3) that it is about, float32 on the CPU."""
    clip = with_clip_skip(clip, clip_skip)
    context, extras = _encode(clip, clip.tokenize(text, images=list(pictures), **tokenizer_options))
    return Conditioning(_float_on_cpu(context), {name: _float_on_cpu(value) for name, value in extras.items()})


def tokenizer_of(clip: Clip) -> str:
    """The class of a CLIP's tokenizer, which tells what models it is for."""
    return type(getattr(clip, "tokenizer", None)).__name__


def with_clip_skip(clip: Clip, clip_skip: int) -> Clip:
    """A clone of a CLIP that stops at that layer, counted from the end. 0 leaves it as it is."""
    if not clip_skip:
        return clip
    clone = clip.clone()
    clone.clip_layer(-clip_skip)
    return clone


def skip_from_own_layer(clip: Clip, clip_skip: int) -> int:
    """A CLIP skip counted from the layer that the model uses by itself, as one that is counted from the last layer. 0
    and 1 are that layer. Raises ValueError where the text encoders of a model use different ones.
    """
    if clip_skip < 2:
        return 0
    own = set()
    for module in clip.cond_stage_model.modules():
        if hasattr(module, "options_default"):
            own.add(-(module.options_default[1] or -1))
    if len(own) > 1:
        raise ValueError(
            "Dataset: the text encoders of this CLIP use different layers by themselves, so CLIP skip from model's own"
            " layer has no meaning here: switch it off."
        )
    return next(iter(own), 1) + clip_skip - 1


def _encode(clip: Clip, tokens: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    context, extras = clip.encode_from_tokens_scheduled(tokens)[0]
    return context, {name: value for name, value in extras.items() if not callable(value)}


@torch.no_grad()
def encode_prompts(clip: Clip, prompts: Sequence[str], clip_skip: int = 0) -> list[Any]:
    """Encode each prompt for sampling, as the node CLIP Text Encode does; `clip_skip` as for captions."""
    clip = with_clip_skip(clip, clip_skip)
    return [clip.encode_from_tokens_scheduled(clip.tokenize(prompt)) for prompt in prompts]


class LiveEncoder:
    """A loaded CLIP's text encoder that is being trained, or whose words are: its conditionings carry gradients. With
    `weighted`, brackets weigh what is in them.
    """

    def __init__(self, clip: Clip, clip_skip: int = 0, weighted: bool = False) -> None:
        self.weighted = weighted
        self.clip = with_clip_skip(clip, clip_skip).clone()
        # Already loaded: loading it again would move the weights that are being trained.
        self.clip.load_model = lambda *_, **__: self.clip.patcher
        self.module: torch.nn.Module = self.clip.cond_stage_model
        self._tokenizer = clip.tokenizer
        self._words: CaptionWords | None = None
        self._space_in_front = False

    def use_words(self, words: Words) -> None:
        """Reads these words in captions and prompts as their vectors from now on."""
        from ..patches.lora_files.embeddings import Embedding
        from ..training.trainable.words import CaptionWords
        from .embeddings import reads_at_start, tokenizer_with

        embeddings = [Embedding(word, "", vectors) for word, vectors in words.items()]
        self.clip.tokenizer = tokenizer_with(self._tokenizer, embeddings)
        self._words = CaptionWords(tuple(words))
        self._space_in_front = not reads_at_start(self.clip.tokenizer, next(iter(words)))

    def __call__(
        self, captions: Sequence[str], known: Sequence[Conditioning], words: Words = MappingProxyType({})
    ) -> list[Conditioning]:
        """Encodes the captions with the current weights and these words. `known` are the dataset's conditionings; their
        other entries (sizes) are kept.
        """
        if words:
            self.use_words(words)
        encoded: dict[str, tuple[torch.Tensor, dict[str, Any]]] = {}
        for caption in dict.fromkeys(captions):
            tokens = _tokenize(self.clip, caption, self.weighted, self._write_words)
            encoded[caption] = _encode(self.clip, tokens)
        conditionings = []
        for caption, old in zip(captions, known, strict=True):
            context, extras = encoded[caption]
            conditionings.append(Conditioning(context, {**old.extras, **extras}))
        return conditionings

    def _write_words(self, caption: str) -> str:
        """A caption with its words as embeddings that the tokenizer reads."""
        if self._words is None:
            return caption
        written = self._words.write_embeddings(caption)
        if self._space_in_front and written.startswith("embedding:"):
            return f" {written}"
        return written

    def encode_prompts(self, prompts: Sequence[str]) -> list[Any]:
        """Encode each prompt for sampling with the current weights and words."""
        return encode_prompts(self.clip, [self._write_words(prompt) for prompt in prompts])


def _float_on_cpu(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if value.is_floating_point():
        return value.detach().to("cpu", torch.float32)
    return value.detach().cpu()
