"""Word lists: which lines a caption can draw, what is refused, and that they are part of a dataset's contents."""

import collections

import numpy as np
import pytest
import torch
from graft_nodes.training.data import wildcards
from graft_nodes.training.data.filters import Filters
from graft_nodes.training.data.folder_reader import read_folder
from graft_nodes.training.data.folder_settings import FolderSettings
from graft_nodes.training.data.tags import Caption, CaptionRules, fill_wildcards
from graft_nodes.training.data.wildcards import WordLists
from PIL import Image

LISTS = WordLists(
    {"color": ("red", "blue", "green"), "things/animal": ("cat", "__color__ dog"), "place": ("{in|on} it",)}
)


def _draws(text, count=3000):
    generator = torch.Generator().manual_seed(0)
    return collections.Counter(fill_wildcards(text, generator, LISTS) for _ in range(count))


def test_every_line_is_drawn_as_often_as_the_others_and_lines_may_name_lists():
    found = _draws("a __color__ bird")
    assert set(found) == {"a red bird", "a blue bird", "a green bird"} and all(
        abs(n - 1000) < 120 for n in found.values()
    )
    found = _draws("__things/animal__")
    assert set(found) == {"cat", "red dog", "blue dog", "green dog"} and abs(found["cat"] - 1500) < 150
    assert set(_draws("{x|__color__} __place__")) == {
        f"{a} {b}" for a in ("x", "red", "blue", "green") for b in ("in it", "on it")
    }


def test_without_a_draw_the_first_lines_are_taken():
    assert fill_wildcards("a __things/animal__, __color__ {b|c} __place__", None, LISTS) == "a cat, red b in it"
    assert fill_wildcards("{{__color__}} a__b __ _x_ __ __", None, LISTS) == "{red} a__b __ _x_ __ __"


def test_a_caption_varies_by_its_lists_and_only_with_wildcards():
    rules = CaptionRules(wildcards=True, lists=LISTS)
    assert Caption(("a __color__ bird",), rules=rules).varies and not Caption(("a bird",), rules=rules).varies
    assert Caption(("a __color__ bird",)).plain == "a __color__ bird" and not Caption(("a __color__ bird",)).varies
    tags = Caption((), ("one", "__color__, two"), rules=CaptionRules(wildcards=True, lists=LISTS, shuffle=1.0))
    assert {tags.draw(torch.Generator().manual_seed(n)) for n in range(60)} >= {"one, red, two", "blue, two, one"}


@pytest.mark.parametrize(
    ("lines", "text", "message"),
    [
        ({"a": ("x",)}, "__b__", r"the caption has __b__, and there is no file wildcards/b\.txt"),
        ({"a": ("__b__",)}, "__a__", r"the word list 'a' has __b__"),
        ({"a": ("x", "__a__")}, "y __a__", "leads to itself.*a > a"),
        ({"a": ("__b__",), "b": ("__c__",), "c": ("q __a__",)}, "__b__", "b > c > a > b"),
        ({str(i): (f"__{i + 1}__",) for i in range(8)} | {"8": ("x",)}, "__0__", "more than 8 deep"),
    ],
)
def test_what_leads_nowhere_or_to_itself_is_refused(lines, text, message):
    lists = WordLists(lines)
    for _ in range(2):  # also when a part of it is known already
        with pytest.raises(ValueError, match=message):
            lists.check(text)


def test_eight_deep_and_many_times_the_same_is_fine():
    lists = WordLists({str(i): (f"__{i + 1}__", f"__{i + 1}__") for i in range(7)} | {"7": ("x",)})
    lists.check("__3__ __0__")
    assert fill_wildcards("__0__", torch.Generator().manual_seed(0), lists) == "x"


def test_long_rows_of_underscores_cost_no_time():
    assert wildcards.list_names("_" * 100_000) == [] and wildcards.list_names("__" + "a " * 50_000) == []


def _folder(root):
    for i in range(3):
        pixels = np.full((64, 64, 3), 40 * i, dtype=np.uint8)
        (root / "images").mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(root / "images" / f"{i}.png")
        (root / "images" / f"{i}.txt").write_text(f"a __color__ ring {i}", encoding="utf-8")
    (root / "wildcards" / "more").mkdir(parents=True)
    (root / "wildcards" / "color.txt").write_text("# of rings\nred\n\n dark  blue \n__more/odd__\n", encoding="utf-8")
    (root / "wildcards" / "more" / "odd.txt").write_text("mauve", encoding="utf-8")
    return root


SETTINGS = {"resolution": 64, "bucket_step": 16, "validation": 0.0, "filters": Filters(wildcards=True)}


def test_the_files_of_a_folder(tmp_path):
    listing = read_folder(_folder(tmp_path), FolderSettings(**SETTINGS))
    caption = listing.train[0].caption
    assert caption.plain == "a red ring 0" and len(listing.train) == 3 and not listing.problems
    drawn = {caption.draw(torch.Generator().manual_seed(n)) for n in range(40)}
    assert drawn == {"a red ring 0", "a dark blue ring 0", "a mauve ring 0"}
    before = listing.digest
    assert read_folder(tmp_path, FolderSettings(**SETTINGS)).digest == before
    (tmp_path / "wildcards" / "more" / "odd.txt").write_text("pink", encoding="utf-8")
    assert read_folder(tmp_path, FolderSettings(**SETTINGS)).digest != before
    plain = read_folder(tmp_path, FolderSettings(**{**SETTINGS, "filters": Filters()}))
    assert plain.train[0].caption.plain == "a __color__ ring 0" and any(
        "wildcards is not used" in note for note in plain.notes
    )


def test_files_that_cannot_be_used_are_said(tmp_path):
    root = _folder(tmp_path / "data")
    lists = root / "wildcards"
    (lists / "long.txt").write_bytes(b"x\n" * (1 << 20))
    (lists / "empty.txt").write_text("\n# nothing\n", encoding="utf-8")
    (lists / "other.txt").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "secret.txt").write_text("secret", encoding="utf-8")
    (lists / "out.txt").symlink_to(tmp_path / "secret.txt")
    (root / "images" / "1.txt").write_text("__out__ __../secret__", encoding="utf-8")
    listing = read_folder(root, FolderSettings(**SETTINGS))
    said = "\n".join(listing.problems)
    expected = (
        "long.txt: it has 2097152 bytes",
        "empty.txt: it has no line",
        "other.txt: ",
        "out.txt: it leads out of the dataset's",
    )
    for part in (*expected, "images/1.png: the caption has __out__"):
        assert part in said, part
    assert len(listing.train) == 2 and not any("secret" in repr(entry.caption.draw(None)) for entry in listing.train)


def test_a_list_that_is_known_already_counts_as_deep_as_it_is():
    lists = WordLists({str(i): (f"__{i + 1}__",) for i in range(8)} | {"8": ("x",)})
    lists.check("__1__")
    with pytest.raises(ValueError, match="'0' has lists in each other more than 8 deep"):
        lists.check("__0__")


def test_a_caption_draws_at_most_1000_lines():
    def lists(count):
        return WordLists({"a": ("x", "__b__ " * count), "b": ("y",)})

    lists(999).check("__a__")
    with pytest.raises(ValueError, match=r"may draw 1,001 lines .* at most 1,000"):
        lists(1000).check("__a__")


def test_lists_with_the_same_lines_are_the_same():
    one, same, other = (WordLists({"a": lines}) for lines in (("x", "y"), ("x", "y"), ("x",)))
    assert one == same and one != other and one != "a" and len({one, same, other}) == 2
    assert one.texts == ("x", "y")


def test_a_list_may_be_as_long_as_a_caption_file(tmp_path, monkeypatch):
    monkeypatch.setattr(wildcards, "MAX_TEXT_BYTES", 4)
    (tmp_path / "wildcards").mkdir()
    (tmp_path / "wildcards" / "a.txt").write_bytes(b"abcd")
    lists, problems = wildcards.read_word_lists(tmp_path, "utf-8")
    assert lists["a"] == ("abcd",) and not problems
