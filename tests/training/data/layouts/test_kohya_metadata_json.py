"""kohya's metadata JSON: whose entry is an image's, what its caption is, and what is said of files that are none."""

import json

import pytest
from graft_nodes.training.data.layouts.kohya_metadata_json import LAYOUT, MetadataCaptions


def reader(folder, records, most_lines=None):
    return MetadataCaptions(folder, [records], most_lines)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"1": {"caption": "a cat"}}', ()),
        ('{"1": {"tags": "cat"}, "2": {}}', ()),
        ("[]", "expected kohya's metadata"),
        ("3", "expected kohya's metadata"),
        ("{}", "expected kohya's metadata"),
        ('{"1": {"score": 3}}', "expected kohya's metadata"),
        ('{"1": {"caption": "a cat"}, "2": 3}', "expected kohya's metadata"),
    ],
)
def test_a_file_that_is_none_is_a_problem_and_beside_images_nothing(tmp_path, content, said):
    file = tmp_path / "meta.json"
    file.write_text(content, encoding="utf-8")
    problems = MetadataCaptions.of_file(tmp_path, file, None).problems
    if said:
        assert len(problems) == 1 and problems[0].startswith(f"meta.json: {said}")
    else:
        assert problems == ()
    assert LAYOUT.recognize(tmp_path) == (not said)


@pytest.mark.parametrize(
    "key",
    ["deep/1", "deep/1.png", "deep\\1.png", "1", "1.png", "elsewhere/1.png", "FOLDER/deep/1.png", "FOLDER/deep/1"],
)
def test_an_entry_is_known_by_path_or_name_with_or_without_ending(tmp_path, key):
    key = key.replace("FOLDER", tmp_path.as_posix())
    captions = reader(tmp_path, {key: {"caption": "a cat"}})
    assert captions.read(tmp_path / "deep" / "1.png").lines == ("a cat",)
    assert captions.describes(tmp_path / "deep" / "1.png") and not captions.describes(tmp_path / "2.png")


def test_the_path_comes_before_the_name_and_two_of_one_name_are_refused(tmp_path):
    captions = reader(tmp_path, {"a/1.png": {"caption": "a cat"}, "b/1.png": {"caption": "a dog"}})
    assert captions.read(tmp_path / "b" / "1.png").lines == ("a dog",)
    with pytest.raises(ValueError, match="has 2 entries of this file name; give whole paths there"):
        captions.read(tmp_path / "c" / "1.png")


@pytest.mark.parametrize(
    ("record", "lines"),
    [
        ({"caption": " a  cat ", "tags": "cat,  gray"}, ("a cat, cat, gray",)),
        ({"caption": "a cat\n\na dog", "tags": "gray"}, ("a cat, gray", "a dog, gray")),
        ({"tags": "cat\ngray"}, ("cat, gray",)),
        ({"caption": "", "tags": ""}, ()),
        ({"caption": None}, ()),
    ],
)
def test_tags_stand_behind_each_line_of_the_caption(tmp_path, record, lines):
    written = reader(tmp_path, {"1": record}).read(tmp_path / "1.png")
    assert (written.lines, written.found, written.more_lines, written.notes) == (lines, True, False, ())


def test_what_is_no_caption_is_said(tmp_path):
    captions = reader(tmp_path, {"1": {"caption": 3}, "2": {"caption": "a", "train_resolution": [64, 64]}, "3": {}})
    with pytest.raises(ValueError, match="its caption in the metadata JSON is not text; write it in quotes"):
        captions.read(tmp_path / "1.png")
    (note,) = captions.read(tmp_path / "2.png").notes
    assert note.startswith("train_resolution of the metadata JSON is not used")
    assert captions.read(tmp_path / "3.png") is None and captions.read(tmp_path / "4.png") is None


@pytest.mark.parametrize("key", ["a/1.png", "a/1", "1.png"])
@pytest.mark.parametrize("whole", [False, True])
def test_a_path_of_a_picture_that_is_there_is_of_no_other_one(tmp_path, key, whole):
    for name in ("a/1.png", "b/1.png", "1.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    named = str(tmp_path / key) if whole else key
    captions = MetadataCaptions(tmp_path, [{named: {"caption": "a red car"}}], None)
    found = [captions.read(tmp_path / name) for name in ("a/1.png", "b/1.png", "1.png")]
    assert [text is not None for text in found] == [key.startswith("a"), False, not key.startswith("a")]


@pytest.mark.parametrize("key", ["/", "", ".", "..", "\0", "\0.png", "a" * 5000, "a" * 5000 + ".png", "\ud800.png"])
def test_a_name_that_no_file_can_have_is_of_no_picture(tmp_path, key):
    captions = MetadataCaptions(tmp_path, [{key: {"caption": "a"}}], None)
    assert not captions.describes(tmp_path / "1.png")


def test_only_the_first_lines_are_kept(tmp_path):
    written = reader(tmp_path, {"1": {"caption": "a\nb\nc"}}, most_lines=1).read(tmp_path / "1.png")
    assert written.lines == ("a",) and written.more_lines


def test_other_json_files_beside_images_may_be_anything(tmp_path):
    (tmp_path / "a.json").write_text("[]", encoding="utf-8")
    (tmp_path / "b.json").write_text("{", encoding="utf-8")
    (tmp_path / "meta.json").write_text(json.dumps({"1": {"caption": "a cat"}}), encoding="utf-8")
    assert LAYOUT.recognize(tmp_path)


@pytest.mark.parametrize("key", ["deep/\u00e9", "\u00e9.png", "e\u0301"])
@pytest.mark.parametrize("name", ["\u00e9.png", "e\u0301.png"])
def test_an_accent_is_one_character_or_two(tmp_path, key, name):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / name).write_bytes(b"")
    assert reader(tmp_path, {key: {"caption": "a cat"}}).read(tmp_path / "deep" / name).lines == ("a cat",)
