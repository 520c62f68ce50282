"""The demo's pictures are counted and judged: only a model that has learned the new word and kept the others passes."""

import numpy as np
import pytest
from graft_nodes.demo import compare, draw
from PIL import Image

KNOWN, NEW = ("triangle", "green", "right"), ("ring", "purple", "middle")


def pictures_of(folder, name, said, right, wrong):
    """Save pictures that show what the caption says, and some of another."""
    random = np.random.default_rng(0)
    for number in range(right + wrong):
        shown = said if number < right else ("circle", "red", "left")
        pixels = draw.draw_image(*shown, random)
        Image.fromarray(pixels).save(folder / f"{name}_{number:05}_.png")


@pytest.mark.parametrize(
    ("before", "after", "known", "status", "complaint"),
    [
        (0, 16, 8, 0, ""),
        (1, 13, 7, 0, ""),
        (2, 16, 8, 1, "before: expected from 0 to 1"),
        (0, 12, 8, 1, "after: expected from 13 to 16"),
        (0, 16, 6, 1, "known: expected from 7 to 8"),
    ],
)
def test_it_fails_unless_the_word_was_learned_and_nothing_forgotten(
    tmp_path, capsys, before, after, known, status, complaint
):
    folder = tmp_path / "demo"
    folder.mkdir()
    pictures_of(folder, "before", NEW, before, 16 - before)
    pictures_of(folder, "after", NEW, after, 16 - after)
    pictures_of(folder, "known", KNOWN, known, 8 - known)
    assert compare.main([str(tmp_path)]) == status
    told = capsys.readouterr()
    assert f"after: a zorp middle, {after} of 16 right" in told.out and complaint in told.err
    assert bool(told.err) == bool(status) and (folder / "before_after.png").exists()


def test_too_few_pictures_are_said(tmp_path):
    with pytest.raises(FileNotFoundError, match="run the demo workflow first"):
        compare.main([str(tmp_path)])
