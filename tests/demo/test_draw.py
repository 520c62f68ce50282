"""Drawing: the same seed gives the same pictures, and the committed ones are what the script draws."""

from pathlib import Path

import numpy as np
import pytest
from graft_nodes.demo import draw, tokenizer
from PIL import Image

DEMO = Path(draw.__file__).resolve().parent


@pytest.mark.parametrize("name", ["concept", "regular"])
def test_committed_pictures_are_what_the_script_draws(name):
    expected = {title: (caption, pixels) for title, caption, pixels in getattr(draw, name)()}
    assert {path.stem for path in (DEMO / name).glob("*.png")} == set(expected)
    for title, (caption, pixels) in expected.items():
        stored = np.asarray(Image.open(DEMO / name / f"{title}.png").convert("RGB"))
        assert np.array_equal(stored, pixels), title
        assert (DEMO / name / f"{title}.txt").read_text(encoding="utf-8") == caption + "\n"


def test_the_committed_pairs_are_what_the_script_draws_with_one_caption_each():
    expected = {title: pixels for title, _, pixels in draw.preference()}
    folder = DEMO / "preference"
    assert {path.stem for path in folder.glob("*.png")} == set(expected) and len(expected) == 2 * draw.PREFERENCE_PAIRS
    for title, pixels in expected.items():
        assert np.array_equal(np.asarray(Image.open(folder / f"{title}.png").convert("RGB")), pixels), title
        assert (folder / f"{title.partition('.')[0]}.txt").read_text(encoding="utf-8") == "a shape middle\n"
    assert len(list(folder.glob("*.txt"))) == draw.PREFERENCE_PAIRS


def test_the_committed_pictures_are_few_and_small():
    assert 12 <= len(list((DEMO / "concept").glob("*.png"))) <= 24
    assert (
        sum(path.stat().st_size for name in ("concept", "regular", "preference") for path in (DEMO / name).iterdir())
        < 1_500_000
    )


def test_drawing_does_not_touch_the_global_generator():
    before = np.random.get_state()[1].copy()
    next(draw.base())
    assert np.array_equal(before, np.random.get_state()[1])


def test_every_caption_of_the_base_is_drawn_and_a_tenth_is_said_by_made_up_words():
    said = [caption for _, caption, _ in draw.base()]
    assert len(said) == 48 * draw.PER_CAPTION
    pseudo = [caption.split()[1] for caption in said if len(caption.split()) == 3]
    assert len(pseudo) == 48 * draw.PSEUDO_PER_CAPTION
    assert all(tokenizer.row(word) >= tokenizer.FIRST_SPARE for word in pseudo)
    assert tokenizer.row(tokenizer.CONCEPT) not in {tokenizer.row(word) for word in pseudo}
    plain = {caption for caption in said if len(caption.split()) == 4}
    assert plain == {caption for caption, *_ in draw.captions()} and len(plain) == 48


def test_edges_are_anti_aliased():
    pixels = draw.draw_image("circle", "red", "middle", np.random.default_rng(0))
    assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 20


def test_write_gives_the_count_and_a_caption_beside_each_picture(tmp_path):
    assert draw.write(draw.concept(), tmp_path / "a") == draw.CONCEPT_PICTURES
    assert {path.stem for path in (tmp_path / "a").glob("*.txt")} == {
        path.stem for path in (tmp_path / "a").glob("*.png")
    }


def test_mauve_is_the_concepts_purple_on_the_four_shapes(tmp_path):
    drawn = list(draw.mauve(0))
    assert len(drawn) == 24 and len({name for name, _, _ in drawn}) == 24
    assert {caption.split()[2] for _, caption, _ in drawn} == set(draw.tokenizer.SHAPES)
    again = list(draw.mauve(0))
    assert all(np.array_equal(one[2], other[2]) for one, other in zip(drawn, again, strict=True))
    assert draw.main(["mauve", str(tmp_path / "mauve")]) == 0
    assert len(list((tmp_path / "mauve").glob("*.png"))) == 24
    with pytest.raises(SystemExit):
        draw.main(["mauve"])


def test_unknown_shape_is_named():
    with pytest.raises(ValueError, match="'star'"):
        draw.distance("star", np.zeros(1), np.zeros(1), 1.0)
