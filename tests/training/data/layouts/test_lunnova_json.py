"""One JSON a picture: LunNova's example and configuration, every key of it, and files that are not what
they should be.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from graft_nodes.training.data.filters import Filters
from graft_nodes.training.data.folder_reader import read_folder
from graft_nodes.training.data.folder_report import report
from graft_nodes.training.data.folder_settings import FolderSettings
from graft_nodes.training.random_draws import generator
from PIL import Image

SAMPLES = Path(__file__).parents[1] / "samples"
EXAMPLE = {
    "tags": ["oc:kindle", "oc", "kirin", "artist:lulubell", "oc only", "solo", "safe"],
    "score": 55,
    "path": "images/287/2877648.png",
    "aspect_ratio": 1.0,
}


def _picture(root, path, seed=0):
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(seed).integers(0, 255, (64, 64, 3), dtype=np.uint8)).save(file)


def _record(root, name, path, **record):
    file = root / "metadata" / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"path": path, **record}), encoding="utf-8")


def _many(root, scores):
    for i, score in enumerate(scores):
        _picture(root, f"images/{i}.png", i)
        _record(
            root,
            f"{i // 3}/{i}.json",
            f"images/{i}.png",
            tags=[f"tag {i}", "every"],
            **({} if score is None else {"score": score}),
        )


def _read(root, filters="", captions="json", **settings):
    chosen = Filters.parse(filters)
    return read_folder(
        root,
        FolderSettings(resolution=64, bucket_step=16, captions=captions, validation=0.0, filters=chosen, **settings),
    )


def _captions(listing):
    return {entry.name: entry.caption.plain for entry in listing.train}


@pytest.mark.parametrize("captions", ["json", "auto"])
def test_the_example_of_the_post(tmp_path, captions):
    _picture(tmp_path, EXAMPLE["path"])
    (tmp_path / "metadata" / "deep").mkdir(parents=True)
    (tmp_path / "metadata" / "deep" / "1.json").write_text(json.dumps(EXAMPLE), encoding="utf-8")
    found = _captions(_read(tmp_path, captions=captions))
    assert found == {EXAMPLE["path"]: "oc:kindle, oc, kirin, artist:lulubell, oc only, solo, safe"}
    text = (
        "non_caption_tags: [safe]\nreplacements: {'artist:': 'by=', ':': '=', ' ': '_'}\ntag_separator: '"
        " '\nscore_tags: [800, 50, 5]"
    )
    assert _captions(_read(tmp_path, text, captions)) == {
        EXAMPLE["path"]: "oc=kindle oc kirin by=lulubell oc_only solo scr50"
    }


@pytest.mark.parametrize("captions", ["json", "auto"])
def test_comments_as_they_are_printed_are_read_past(tmp_path, captions):
    _picture(tmp_path, "images/12/77.png")
    (tmp_path / "metadata").mkdir()
    (tmp_path / "metadata" / "1.json").write_bytes((SAMPLES / "lunnova.json").read_bytes())
    found = _captions(_read(tmp_path, captions=captions))
    assert found == {"images/12/77.png": "oc:ember, pegasus, artist:someone, solo, #1 fan"}


def test_an_error_behind_comments_has_its_line(tmp_path):
    _picture(tmp_path, "1.png")
    text = '{\n  # the tags\n  "tags": ["a # b"]  # and no comma\n  "score": 3\n}\n'
    (tmp_path / "1.json").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"1\.json: is not JSON \(Expecting ',' delimiter: line 4 column 3"):
        _read(tmp_path)


def test_a_cameras_picture_in_capitals(tmp_path):
    _picture(tmp_path, "IMG_1.JPG")
    (tmp_path / "IMG_1.json").write_text('{"tags": ["red"]}', encoding="utf-8")
    assert _captions(_read(tmp_path)) == {"IMG_1.JPG": "red"}


@pytest.mark.parametrize("captions", ["json", "auto"])
def test_a_file_of_a_preference_pairs_name_describes_the_pair(tmp_path, captions):
    for number, name in enumerate(("1.win.png", "1.lose.png", "2.win.JPG", "2.lose.JPG")):
        _picture(tmp_path, name, number)
    (tmp_path / "1.json").write_text('{"tags": ["of both"]}', encoding="utf-8")
    (tmp_path / "2.json").write_text('{"tags": ["not this one"]}', encoding="utf-8")
    (tmp_path / "2.win.json").write_text('{"tags": ["of the better"]}', encoding="utf-8")
    (tmp_path / "3.json").write_text('{"tags": ["of none"]}', encoding="utf-8")
    listing = _read(tmp_path, captions=captions)
    assert _captions(listing) == {"1.win.png": "of both", "2.win.JPG": "of the better"}
    assert listing.problems == ("3.json: has no path, and no picture of its name lies beside it",)
    for path in tmp_path.glob("*.lose.*"):
        path.unlink()
    assert "1.json: has no path, and no picture of its name lies beside it" in _read(tmp_path).problems


def test_a_text_of_tags_is_cut_around_its_choices(tmp_path):
    _picture(tmp_path, "images/1.png")
    _record(tmp_path, "1.json", "images/1.png", tags="a {red, big|blue} cat, tail")
    entry = _read(tmp_path, "wildcards: true").train[0]
    assert {entry.caption.draw(generator(0, i, "")) for i in range(50)} == {"a red, big cat, tail", "a blue cat, tail"}


def test_a_path_of_windows(tmp_path):
    _picture(tmp_path, "images/one.png")
    _record(tmp_path, "one.json", "images\\one.png", tags=["red"])
    assert _captions(_read(tmp_path)) == {"images/one.png": "red"}


def test_scores_choose_pictures(tmp_path):
    _many(tmp_path, [10, 60, 150, 250, None])
    names = lambda text: [entry.name[7] for entry in _read(tmp_path, text).train]  # noqa: E731
    assert names("") == ["0", "1", "2", "3", "4"]
    assert names("abs_min_score: 60") == ["1", "2", "3"]
    assert names("min_score: 150") == ["2", "3"]
    assert names("min_score: 150\ntag_bonus_scores: {'tag 1': 90, 'tag 3': -101}") == ["1", "2"]
    assert names("min_score: 150\nabs_min_score: 61\ntag_bonus_scores: {'tag 1': 90}") == ["2", "3"]
    listing = _read(tmp_path, "min_score: 150\nblacklist_tags: [tag 3]")
    assert [entry.name[7] for entry in listing.train] == ["2"]
    assert {
        "2 left out below min_score",
        "1 left out with a tag of blacklist_tags",
        "1 left out without a score",
    } <= set(listing.notes)
    assert "1 left out with a tag of blacklist_tags" in report(listing)


def test_images_are_left_out_by_their_names(tmp_path):
    _many(tmp_path, [1] * 4)
    every = [entry.name for entry in _read(tmp_path).train]
    listing = _read(tmp_path, f"leave_out: ['{every[1]}', '{every[3]}', other.png]")
    assert [entry.name for entry in listing.train] == [every[0], every[2]]
    assert "2 left out by leave_out" in listing.notes


def test_every_nth_file_in_the_order_of_their_names(tmp_path):
    _many(tmp_path, [1] * 7)
    assert [entry.name[7] for entry in _read(tmp_path, "consider_every_nth: 3").train] == ["0", "3", "6"]


@pytest.mark.parametrize("nth", [2, 3])
def test_auto_leaves_out_images_and_no_captions(tmp_path, nth):
    _many(tmp_path, [1] * 8)
    found = {
        captions: _captions(_read(tmp_path, f"consider_every_nth: {nth}", captions)) for captions in ("json", "auto")
    }
    assert found["auto"] == found["json"] and len(found["auto"]) == -(-8 // nth) and all(found["auto"].values())
    listing = _read(tmp_path, f"consider_every_nth: {nth}", "auto")
    assert f"{8 - len(found['auto'])} left out by consider_every_nth" in listing.notes


def test_auto_takes_every_nth_of_the_images_without_json_too(tmp_path):
    _many(tmp_path, [1] * 4)
    for number in range(4):
        _picture(tmp_path, f"others/{number}.png", 20 + number)
        (tmp_path / "others" / f"{number}.txt").write_text("text", encoding="utf-8")
    (tmp_path / "other.json").write_text("[1, 2]", encoding="utf-8")
    found = _captions(_read(tmp_path, "consider_every_nth: 2", "auto"))
    assert sorted(found) == ["images/0.png", "images/2.png", "others/0.png", "others/2.png"] and all(found.values())


def test_auto_takes_every_nth_pair_with_its_caption(tmp_path):
    for number in range(4):
        _picture(tmp_path, f"{number}.win.png", number)
        _picture(tmp_path, f"{number}.lose.png", 20 + number)
        (tmp_path / f"{number}.json").write_text('{"tags": ["pair"]}', encoding="utf-8")
    for captions in ("json", "auto"):
        found = _captions(_read(tmp_path, "consider_every_nth: 2", captions))
        assert found == {"0.win.png": "pair", "2.win.png": "pair"}, captions


def test_shuffle_tag_p_is_of_the_draws(tmp_path):
    _many(tmp_path, [1])
    rules = _read(tmp_path, "shuffle_tag_p: 0.5").train[0].caption.rules
    assert rules.shuffle == 0.5 and rules.dropout == 0
    with pytest.raises(ValueError, match="shuffle tags shuffles always and shuffle_tag_p"):
        _read(tmp_path, "shuffle_tag_p: 0.5", shuffle_tags=True)


def test_score_tags_join_texts_too(tmp_path):
    _many(tmp_path, [100])
    (tmp_path / "images" / "0.txt").write_text("a, b", encoding="utf-8")
    assert _captions(_read(tmp_path, captions="auto")) == {
        "images/0.png": "a, b"
    }  # the text beside a picture comes first


def test_scores_need_json(tmp_path):
    with pytest.raises(ValueError, match="need scores from JSON files; caption source txt reads none"):
        _read(tmp_path, "min_score: 3", "txt")


def test_files_that_are_not_what_they_should_be(tmp_path):
    _many(tmp_path, [1, 1])
    _picture(tmp_path, "beside.png", 9)
    _picture(tmp_path, "alone.png", 8)
    (tmp_path / "beside.json").write_text('\ufeff{"tags": "one, two"}', encoding="utf-8")
    for name, data in {
        "a.json": b"{",
        "b.json": b"[1]",
        "c.json": b'{"tags": ["x"], "path": "../../etc/passwd"}',
        "d.json": b'{"tags": ["x"]}',
        "e.json": b'{"tags": ["x"], "path": "nowhere.png"}',
        "f.json": b"\xff\xfe",
        "g.json": b'{"tags": ["x"], "path": "/etc/passwd"}',
        "h.json": b'{"tags": ["x"], "path": "images/0.png"}',
        "i.json": b'{"tags": ["x"], "path": "alone.png", "score": "high"}',
    }.items():
        (tmp_path / "metadata" / name).write_bytes(data)
    listing = _read(tmp_path)
    assert _captions(listing)["beside.png"] == "one, two" and "alone.png" not in _captions(listing)
    said = "\n".join(listing.problems)
    for part in (
        "metadata/a.json: is not JSON",
        "metadata/b.json: expected an object with tags",
        "metadata/c.json: path '../../etc/passwd' leaves",
        "metadata/d.json: has no path",
        "metadata/e.json: path 'nowhere.png' names no file",
        "metadata/f.json: is not UTF-8",
        "metadata/g.json: path '/etc/passwd' leaves",
        "another JSON file does already",
        "metadata/i.json: score is 'high'",
    ):
        assert part in said, part
    assert "1 left out that no JSON file describes" in listing.notes


def test_other_json_files_do_not_disturb_auto(tmp_path):
    _picture(tmp_path, "a.png")
    (tmp_path / "a.txt").write_text("words", encoding="utf-8")
    (tmp_path / "config.json").write_text('{"resolution": 512}', encoding="utf-8")
    listing = _read(tmp_path, captions="auto")
    assert _captions(listing) == {"a.png": "words"} and not listing.problems


def test_a_path_in_another_spelling_than_the_disks(tmp_path):
    """A JSON from Windows (NFC, capitals do not count) beside pictures from a Mac's archive (NFD)."""
    _picture(tmp_path, "images/e\u0301.PNG")
    _record(tmp_path, "1.JSON", "images/\u00e9.png", tags=["accent"])
    assert _captions(_read(tmp_path)) == {"images/e\u0301.PNG": "accent"}
