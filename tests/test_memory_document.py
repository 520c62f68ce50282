"""docs/memory.md and README's table say what Training Recipe chooses today."""

import pytest
from graft_nodes.tests.with_comfyui import full_sizes, write_memory


def test_the_page_is_what_the_recipe_chooses():
    assert write_memory.DOCUMENT.read_text(encoding="utf-8") == write_memory.document()


def test_the_table_in_the_readme_is_the_page_s():
    text = write_memory.README.read_text(encoding="utf-8")
    assert text == write_memory.readme_with(text)
    assert "\n".join(write_memory.summary()) in text


@pytest.mark.parametrize("size", write_memory.SIZES)
def test_nothing_in_the_page_takes_more_than_its_card(size):
    for facts in (facts for by_dtype in full_sizes.stored().values() for facts in by_dtype.values()):
        assert write_memory.chosen(facts, size).estimate.total <= 0.9 * size * 2**30


def test_every_model_of_the_list_is_in_the_file():
    assert {title: tuple(by_dtype) for title, by_dtype in full_sizes.stored().items()} == {
        title: full_sizes.dtypes(title) for title in full_sizes.FULL
    }
