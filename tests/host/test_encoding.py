"""Captions as ComfyUI's tokenizers read them: brackets are text unless they are to weigh."""

import pytest
from graft_nodes.host.encoding import prompt_of


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
