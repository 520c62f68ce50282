"""Captions as ComfyUI's tokenizers read them: brackets are text unless they are to weigh."""

from types import SimpleNamespace

import pytest
import torch
from graft_nodes.host.encoding import (
    LiveEncoder,
    caption_key,
    encode_captions,
    frame_step,
    literal_of,
    literal_parts,
    prompt_for_clip,
    prompt_of,
    skip_from_own_layer,
)


@pytest.mark.parametrize(
    ("caption", "prompt"),
    [
        ("saber (fate)", r"saber \(fate\)"),
        ("tag_(thing:0.2), (a:1.3)", r"tag_\(thing:0.2\), \(a:1.3\)"),
        ("((deep) :)", r"\(\(deep\) :\)"),
        (r"saber \(fate\)", r"saber \(fate\)"),  # as taggers write it for prompts
        (r"saber \(fate (a)", r"saber \(fate \(a\)"),
        ("", ""),
        (r"a \o/ [b] {c} embedding:name", r"a \o/ [b] {c} embedding:name"),
    ],
)
def test_brackets_are_escaped_unless_they_weigh(caption, prompt):
    assert prompt_of(caption, False) == prompt
    assert prompt_of(caption, True) == caption
    assert prompt_of(prompt, False) == prompt


@pytest.mark.parametrize(
    ("facts", "step"),
    [
        ({"latent_dim": 3}, 4),
        ({"latent_dim": 3, "not_video": False}, 4),
        ({"latent_dim": 3, "not_video": True}, 0),  # Qwen-Image's has frames in its latents, and takes pictures only
        ({"latent_dim": 2}, 0),
        ({}, 0),
    ],
)
def test_in_which_steps_a_vae_takes_frames(facts, step):
    assert frame_step(SimpleNamespace(temporal_compression_decode=lambda: 4, **facts)) == step
    assert frame_step(SimpleNamespace(temporal_compression_decode=lambda: None, **facts)) == 0


class _Clip:
    """A CLIP whose parts read a text letter by letter; those in `literal` take backslashes for letters."""

    def __init__(self, parts=("l", "g"), literal=(), bare=False):
        self.parts, self.literal, self.bare, self.texts = parts, literal, bare, []
        self.cond_stage_model = torch.nn.Identity()
        self.tokenizer = self.patcher = None

    def clone(self):
        return self

    def tokenize(self, text):
        self.texts.append(text)
        plain = text.replace("\\(", "(").replace("\\)", ")")
        tokens = {
            part: [[(ord(letter), 1.0) for letter in (text if part in self.literal else plain)]] for part in self.parts
        }
        return tokens[self.parts[0]] if self.bare else tokens

    def encode_from_tokens_scheduled(self, tokens):
        rows = tokens.values() if isinstance(tokens, dict) else [tokens]
        return [
            (torch.tensor(next([[float(token)] for token, _ in row[0]] for row in rows))[None], {"rows": str(tokens)})
        ]


def _letters(conditioning):
    return "".join(chr(int(token)) for token in conditioning.context.flatten())


@pytest.mark.parametrize("caption", ["saber (fate)", r"saber \(fate\)"])
@pytest.mark.parametrize("literal", [(), ("l",)])
def test_no_backslash_is_encoded_whatever_the_tokenizer_knows(caption, literal):
    clip = _Clip(("l",), literal)
    assert literal_parts(clip.tokenize) == frozenset(literal)
    assert _letters(encode_captions(clip, [caption])[caption]) == "saber (fate)"
    assert _letters(LiveEncoder(clip)([caption], [SimpleNamespace(extras={})])[0]) == "saber (fate)"
    assert prompt_for_clip(clip, caption, False) == ("saber (fate)" if literal else r"saber \(fate\)")


def test_a_tokenizer_without_names_for_its_part():
    clip = _Clip(("l",), ("l",), bare=True)
    assert literal_parts(clip.tokenize) == frozenset([""])
    assert _letters(encode_captions(clip, ["(a)"])["(a)"]) == "(a)"


def test_parts_that_read_differently_get_each_their_own():
    clip = _Clip(("l", "g"), ("g",))
    rows = encode_captions(clip, ["(a)"])["(a)"].extras["rows"]
    assert "92" not in rows and rows.count("40, 1.0") == 2


def test_keys_tell_the_ways_of_reading_apart():
    keys = {caption_key(_Clip(("l", "g"), literal), "(a)", False) for literal in ((), ("l",), ("g",), ("l", "g"))}
    assert len(keys) == 4
    assert caption_key(_Clip(literal=("l",)), "(a)", False) == caption_key(_Clip(literal=("l",)), r"\(a\)", False)
    assert (
        caption_key(_Clip(literal=("l",)), "plain", False) == "plain" and caption_key(_Clip(), "(a:2)", True) == "(a:2)"
    )


def test_captions_without_brackets_ask_nothing():
    clip = _Clip()
    encode_captions(clip, ["plain"])
    assert clip.texts == ["plain"] and literal_of(r"a \o/ [b]") == r"a \o/ [b]"


def encoder_with(*layers):
    """A CLIP whose text encoders stop at these layers by themselves, None: the last."""
    module = torch.nn.Module()
    for number, layer in enumerate(layers):
        part = torch.nn.Module()
        part.options_default = ("last" if layer is None else "hidden", layer, True)
        module.add_module(str(number), part)
    return SimpleNamespace(cond_stage_model=module)


@pytest.mark.parametrize(
    ("layers", "from_last"),
    [((None,), [0, 0, 2, 3, 4]), ((-2,), [0, 0, 3, 4, 5]), ((-2, -2), [0, 0, 3, 4, 5]), ((), [0, 0, 2, 3, 4])],
    ids=["SD 1.x", "SD 2.x", "SDXL", "unknown"],
)
def test_clip_skip_as_everydream2_counts_it(layers, from_last):
    """0 and 1 are the model's own layer, 2 is one further back: `--clip_skip` of the tweaking guide."""
    clip = encoder_with(*layers)
    assert [skip_from_own_layer(clip, skip) for skip in range(5)] == from_last


def test_text_encoders_with_layers_of_their_own_have_no_common_clip_skip():
    with pytest.raises(ValueError, match="use different layers by themselves, so CLIP skip from model's own layer"):
        skip_from_own_layer(encoder_with(None, -2), 2)
