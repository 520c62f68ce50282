"""Lines of captions and lists: only line ends divide them."""

import pytest
from graft_nodes.training.data.captions import read_lines
from graft_nodes.training.data.musubi_jsonl import read_jsonl

SEPARATORS = ("\u2028", "\u2029", "\x85", "\f", "\v", "\x1c")  # that str.splitlines divides at, too


@pytest.mark.parametrize("separator", SEPARATORS)
def test_separators_from_the_web_are_spaces(tmp_path, separator):
    path = tmp_path / "a.txt"
    path.write_bytes(f"a cat{separator}on a mat\r\n\na dog\rb".encode())
    spaced = " " if separator.isspace() else separator
    assert read_lines(path) == (f"a cat{spaced}on a mat", "a dog", "b")


def test_a_line_of_jsonl_may_have_them_in_its_texts(tmp_path):
    picture = tmp_path / "1.png"
    picture.touch()
    path = tmp_path / "list.jsonl"
    path.write_text('{"image_path": "1.png", "caption": "a\u2028b\x85c"}\n', encoding="utf-8")
    (listed,) = read_jsonl(path, "image_path", lambda key, name: tmp_path / name)
    assert listed.caption == "a\u2028b\x85c"
