"""EveryDream2's files: the example of its documentation, how folders and files lie over each other, batch_id, and what
is wrong in them.
"""

from itertools import permutations

import numpy as np
import pytest
from graft_nodes.training.data.filters import Filters
from graft_nodes.training.data.folder_reader import read_folder
from graft_nodes.training.data.folder_settings import FolderSettings
from graft_nodes.training.random_draws import generator
from PIL import Image

EXAMPLE = """
main_prompt: A portrait of Cloud Strife
tags:
  - tag: low angle shot
  - tag: looking to the side
  - tag: holding buster sword
    weight: 1.5
  - tag: clouds in background
    weight: 0.5
  - tag: smiling
    weight: 0.8
max_caption_length: 60
"""


def _picture(root, path, text=None, suffix=".txt", seed=None):
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    seed = sum(path.encode()) if seed is None else seed
    Image.fromarray(np.random.default_rng(seed).integers(0, 255, (64, 64, 3), dtype=np.uint8)).save(file)
    if text is not None:
        file.with_suffix(suffix).write_text(text, encoding="utf-8")


def _read(root, captions="yaml", filters="", **settings):
    settings = FolderSettings(
        resolution=64, bucket_step=16, captions=captions, validation=0.0, filters=Filters.parse(filters), **settings
    )
    return read_folder(root, settings)


def _entries(listing):
    return {entry.name: entry for entry in listing.train}


@pytest.mark.parametrize("captions", ["yaml", "auto"])
def test_the_example_of_the_documentation(tmp_path, captions):
    _picture(tmp_path, "a.png", EXAMPLE, ".yaml")
    caption = _read(tmp_path, captions, shuffle_tags=True).train[0].caption
    # Heavier tags first where nothing is drawn; whole tags while the text is at most 60 characters.
    assert caption.plain == "A portrait of Cloud Strife, holding buster sword"
    drawn = [caption.draw(generator(0, i, "")) for i in range(400)]
    assert all(text.startswith("A portrait of Cloud Strife, ") and len(text) <= 60 for text in drawn)
    first = [text.split(", ")[1] for text in drawn if text.count(",")]
    assert first.count("holding buster sword") > 1.8 * first.count("clouds in background") > 0


def test_a_caption_is_cut_around_its_choices(tmp_path):
    _picture(tmp_path, "a.png", "caption: 'a {red, big|blue} cat, tail'", ".yaml")
    _picture(tmp_path, "in/b.png", "a {red, big|blue} cat, tail")
    (tmp_path / "in" / "local.yaml").write_text("tags: [here]", encoding="utf-8")
    found = _entries(_read(tmp_path, filters="wildcards: true"))
    for name, end in (("a.png", "tail"), ("in/b.png", "tail, here")):
        drawn = {found[name].caption.draw(generator(0, i, "")) for i in range(50)}
        assert drawn == {f"a red, big cat, {end}", f"a blue cat, {end}"}


def test_one_line_is_drawn_with_the_tags_of_the_folder(tmp_path):
    _picture(tmp_path, "a.png", "a {red, big|blue} cat, tail\na dog")
    (tmp_path / "global.yaml").write_text("tags: [photo]\nmultiply: 2", encoding="utf-8")
    entry = _read(tmp_path, filters="wildcards: true").train[0]
    cats = {f"a {kind} cat, tail, photo" for kind in ("red, big", "blue")}
    assert {entry.caption.draw(generator(0, i, "")) for i in range(100)} == {*cats, "a dog, photo"}
    assert entry.repeats == 2 and entry.captioned
    shuffled = _read(tmp_path, filters="wildcards: true", shuffle_tags=True).train[0].caption
    dogs = {text for text in (shuffled.draw(generator(0, i, "")) for i in range(100)) if "dog" in text}
    assert dogs == {"a dog, photo"}  # the caption's first tag stays in front
    assert _read(tmp_path).train[0].caption.plain == "a {red, big|blue} cat, tail a dog, photo"


def test_settings_lie_over_each_other(tmp_path):
    _picture(tmp_path, "top.png", "main_prompt: top", ".yaml")
    _picture(tmp_path, "in/plain.png", "main_prompt: plain", ".yaml")
    _picture(
        tmp_path,
        "in/own.png",
        "main_prompt: own\nmultiply: 3\nflip_p: 0.9\nshuffle_tags: false\nloss_scale: 0.25",
        ".yml",
    )
    _picture(tmp_path, "in/deep/last.png", "main_prompt: last", ".yaml")
    (tmp_path / "global.yaml").write_text(
        "cond_dropout: 0.2\nmultiply: 1.5\nflip_p: 0.1\ntags: [everywhere]", encoding="utf-8"
    )
    (tmp_path / "in" / "local.yaml").write_text(
        "multiply: 2\nbatch_id: horses\nshuffle_tags: true\ntags: [here]", encoding="utf-8"
    )
    (tmp_path / "in" / "deep" / "global.yml").write_text("cond_dropout: 0.7", encoding="utf-8")
    found = _entries(_read(tmp_path, repeats=2))
    assert [found[name].repeats for name in ("top.png", "in/plain.png", "in/own.png", "in/deep/last.png")] == [
        3.0,
        4.0,
        6.0,
        3.0,
    ]
    assert [found[name].flip for name in ("top.png", "in/plain.png", "in/own.png")] == [0.1, 0.1, 0.9]
    assert [found[name].dropout for name in ("top.png", "in/own.png", "in/deep/last.png")] == [0.2, 0.2, 0.7]
    assert [found[name].batch_id for name in ("top.png", "in/plain.png", "in/own.png", "in/deep/last.png")] == [
        "",
        "horses",
        "horses",
        "",
    ]
    assert [found[name].loss_scale for name in ("top.png", "in/own.png")] == [1.0, 0.25]
    assert [found[name].caption.rules.shuffle for name in ("top.png", "in/plain.png", "in/own.png")] == [0.0, 1.0, 0.0]
    assert (
        found["top.png"].caption.plain == "top, everywhere"
        and found["in/plain.png"].caption.plain == "plain, here, everywhere"
    )
    assert found["in/deep/last.png"].caption.plain == "last, everywhere"


@pytest.mark.parametrize("captions", ["auto", "txt", "yaml"])
def test_text_files_of_a_folder(tmp_path, captions):
    _picture(tmp_path, "in/a.png", "one, two")
    _picture(tmp_path, "b.png", "three")
    said = {
        "multiply": "2.5",
        "cond_dropout": "0.5",
        "flip_p": "0.25",
        "loss_scale": "2",
        "batch_id": "my_horses",
        "shuffle_tags": "",
    }
    for name, text in said.items():
        (tmp_path / "in" / f"{name}.txt").write_text(text, encoding="utf-8")
    found = _entries(_read(tmp_path, captions))
    values = {
        name: (e.repeats, e.dropout, e.flip, e.loss_scale, e.batch_id, e.caption.rules.shuffle)
        for name, e in found.items()
    }
    assert values == {"in/a.png": (2.5, 0.5, 0.25, 2.0, "my_horses", 1.0), "b.png": (1.0, None, 0.0, 1.0, "", 0.0)}
    assert found["in/a.png"].caption.plain == "one, two" and found["b.png"].caption.plain == "three"


def test_text_and_yaml_together(tmp_path):
    _picture(tmp_path, "a.png", "from text, with tags")
    (tmp_path / "a.yaml").write_text("tags: [more]\nbatch_id: x", encoding="utf-8")
    _picture(tmp_path, "b.png", "only settings")
    (tmp_path / "b.yaml").write_text("batch_id: y", encoding="utf-8")
    found = _entries(_read(tmp_path, "auto"))
    assert found["a.png"].caption.plain == "from text, more, with tags" and found["a.png"].batch_id == "x"
    assert found["b.png"].caption.plain == "only settings" and found["b.png"].batch_id == "y"


def test_the_file_name_is_the_last_resort(tmp_path):
    _picture(tmp_path, "john smith on a boat_999.png")
    listing = _read(tmp_path)
    assert listing.train[0].caption.plain == "john smith on a boat" and "1 captions are file names" in listing.notes[0]
    assert _read(tmp_path, "auto").train[0].caption.plain == ""


def test_multiply_0_leaves_out(tmp_path):
    _picture(tmp_path, "a.png", "multiply: 0\nmain_prompt: a", ".yaml")
    _picture(tmp_path, "b.png", "main_prompt: b", ".yaml")
    listing = _read(tmp_path)
    assert list(_entries(listing)) == ["b.png"] and "1 left out with multiply 0" in listing.notes


def test_everything_wrong_is_named(tmp_path):
    _picture(tmp_path, "good.png", "main_prompt: good\nrating: 3", ".yaml")
    _picture(tmp_path, "bad.png", "main_promt: x\nflip_p: 3\ntags: word\nmultiply: -1", ".yaml")
    _picture(tmp_path, "torn.png", "tags: [", ".yaml")
    (tmp_path / "local.yaml").write_text("cond_dropout: often", encoding="utf-8")
    (tmp_path / "multiply.txt").write_text("twice", encoding="utf-8")
    listing = _read(tmp_path)
    assert list(_entries(listing)) == ["good.png"] and "rating in good.yaml is not used" in listing.notes
    said = "\n".join(listing.problems)
    for part in (
        "local.yaml: cond_dropout is 'often'",
        "multiply.txt: is 'twice'",
        "unknown key 'main_promt', did you mean main_prompt?",
        "flip_p is 3, expected a number from 0 to 1",
        "tags is 'word', expected a list of tags",
        "multiply is -1",
        "torn.yaml is not YAML",
    ):
        assert part in said, part


def test_yaml_cannot_run_anything(tmp_path):
    _picture(tmp_path, "a.png", "main_prompt: !!python/object/apply:os.getcwd []", ".yaml")
    with pytest.raises(ValueError, match="is not YAML"):
        _read(tmp_path)


def _orders(caption):
    return {tuple(caption.draw(generator(0, number, "")).split(", ")) for number in range(200)}


_LOCAL = "shuffle_tags: true\n"


@pytest.mark.parametrize(
    ("captions", "files", "shuffle"),
    [
        ("auto", {"local.yaml": _LOCAL}, False),
        ("txt", {"shuffle_tags.txt": ""}, False),
        ("yaml", {"global.yaml": _LOCAL}, False),
        ("yaml", {}, True),
        ("yaml", {"multiply.txt": "2"}, True),
        ("auto", {"local.yaml": "shuffle_tags: true\nmultiply: 2\n"}, True),
        ("auto", {"a.yaml": _LOCAL}, False),
        ("auto", {"local.yaml": "multiply: 2\n"}, True),
        ("txt", {"global.yml": "flip_p: 0.5\n"}, True),
    ],
)
@pytest.mark.parametrize("keep", [0, 1, 2])
def test_the_main_prompt_of_a_text_never_moves_and_keep_counts_the_tags_behind_it(
    tmp_path, captions, files, shuffle, keep
):
    """`--keep_tags 2` of EveryDream2 keeps the main prompt and 2 additional tags: the tweaking guide."""
    _picture(tmp_path, "a.png", "main, 1, 2, 3, 4")
    for name, content in files.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    caption = _read(tmp_path, captions, shuffle_tags=shuffle, keep_tags=keep).train[0].caption
    fixed = ("main", "1", "2", "3", "4")[: 1 + keep]
    expected = {fixed + rest for rest in permutations(("1", "2", "3", "4")[keep:])}
    assert _orders(caption) == expected


def test_the_main_prompt_of_a_file_name_never_moves(tmp_path):
    _picture(tmp_path, "main, 1, 2_0.png")
    caption = _read(tmp_path, "yaml", shuffle_tags=True).train[0].caption
    assert _orders(caption) == {("main", "1", "2"), ("main", "2", "1")}


def test_tags_of_yaml_without_a_main_prompt_all_move(tmp_path):
    _picture(tmp_path, "a.png", "tags: [1, 2]\nshuffle_tags: true\n", ".yaml")
    assert _orders(_read(tmp_path, "auto").train[0].caption) == {("1", "2"), ("2", "1")}


def test_a_main_prompt_with_commas_stays_whole_before_each_line(tmp_path):
    _picture(tmp_path, "a.png", "one, 1\ntwo, 2")
    (tmp_path / "a.yaml").write_text("main_prompt: sks, sitting\ntags: [t]\nshuffle_tags: true\n", encoding="utf-8")
    caption = _read(tmp_path, "auto", "wildcards: true").train[0].caption
    found = _orders(caption)
    assert {text[:2] for text in found} == {("sks", "sitting")}
    assert {text[2:] for text in found} == {("t", "1"), ("1", "t"), ("t", "2"), ("2", "t")}


def test_kohyas_shuffle_moves_the_first_tag(tmp_path):
    """Where nothing is EveryDream2's, `keep first tags` counts from the first tag, as keep_tokens does."""
    _picture(tmp_path, "a.png", "1, 2, 3")
    assert len(_orders(_read(tmp_path, "auto", shuffle_tags=True).train[0].caption)) == 6
