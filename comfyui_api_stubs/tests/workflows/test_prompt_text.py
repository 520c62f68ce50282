"""Choices and comments in prompts, replacements in file names."""

import importlib.util
import random
import re
from datetime import datetime
from pathlib import Path

import pytest

from comfyui_api_stubs.workflows.prompt_text import SAVES_FILES, choose, fill_in


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain", {"plain"}),
        ("a {red|blue} ring", {"a red ring", "a blue ring"}),
        ("{a|{b|c}}", {"a", "b", "c"}),
        (r"\{kept|as is\}", {"{kept|as is}"}),
        ("x // comment\ny /* z\n */w", {"x \ny w"}),
        ("{one", {"one"}),
        ("{|maybe}", {"", "maybe"}),
    ],
)
def test_every_choice_and_nothing_else_comes_up(text, expected):
    assert {choose(text, random.Random(seed)) for seed in range(40)} == expected


def test_file_names():
    now = datetime(2031, 2, 3, 4, 5, 6)
    widgets = {("KSampler", "seed"): "7", ("Load", "name"): "a/b:c"}

    def fill(text):
        return fill_in(text, lambda node, name: widgets.get((node, name)), now)

    assert fill("%KSampler.seed%_%Load.name%") == "7_a_b_c"
    assert fill("%date:yyyy-MM-dd%/%date:hh-mm-ss yy d%") == "2031-02-03/04-05-06 31 3"
    assert fill("%width%x%height% %Nobody.x% 50%") == "%width%x%height% %Nobody.x% 50%"


def test_names_of_files_are_filled_in_for_the_nodes_of_the_editors_own_list():
    """In ComfyUI's front end: the list of its extension Comfy.SaveImageExtraOutput."""
    package = importlib.util.find_spec("comfyui_frontend_package")
    (list_,) = (
        found[1]
        for path in (Path(package.origin).parent / "static" / "assets").glob("core-*.js")
        for found in [re.search(r"new Set\(\[([^]]*)\]\);.{0,40}`Comfy.SaveImageExtraOutput`", path.read_text("utf-8"))]
        if found
    )
    assert set(re.findall(r"`(\w+)`", list_)) == SAVES_FILES
