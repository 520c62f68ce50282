"""docs/sources.md: what the five documents say, where it is in Graft, and the test that runs it. Every node, input,
value, file and test that a row names is there.
"""

import ast
import re
from functools import cache
from pathlib import Path

import pytest
from graft_nodes.nodes import NODES
from graft_nodes.settings.declaration import settings_of
from graft_nodes.tests.test_help_pages import expected_inputs
from graft_nodes.training.data.filters import Filters

PAGE = Path(__file__).resolve().parents[1] / "docs" / "sources.md"
DOCUMENTS = ("kohya's", "diffusers'", "LunNova's", "EveryDream2's", "InvokeAI's")
HEADING = ["the document says", "its name there", "in Graft", "what differs and why", "test"]
NODE_OF = {node.define_schema().display_name.split(" (")[0]: node for node in NODES}
FILTERS = "filters (YAML)"
FILTER_KEYS = Filters.keys()


def rows_of(text):
    """(line, cells) of each row of the page's tables of rows."""
    is_inside = False
    for number, line in enumerate(text.splitlines(), 1):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells == HEADING:
            is_inside = True
        elif not line.startswith("|"):
            is_inside = False
        elif is_inside and line.startswith("| "):
            yield number, cells


ROWS = list(rows_of(PAGE.read_text(encoding="utf-8")))
each_row = pytest.mark.parametrize("cells", [pytest.param(cells, id=str(line)) for line, cells in ROWS])


@cache
def names_in(path):
    """The names of a file's tests that no mark skips."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            marks = " ".join(ast.unparse(one) for one in node.decorator_list)
            if "skip" not in marks and "xfail" not in marks:
                found.add(node.name)
    return found


def wrong_test(cell):
    """What is wrong with the last cell of a row: it links the tests that run it."""
    links = re.findall(r"\[(test_\w+)\]\(([^)]+)\)", cell)
    if not links:
        return ["no test"]
    files = [(name, PAGE.parent / path) for name, path in links]
    return [f"{name} in {path}" for name, path in files if not path.is_file() or name not in names_in(path)]


def wrong_place(cell):
    """What is wrong with the third cell: nodes are bold, their inputs italic, values of an input code behind it."""
    problems, node, label = [], None, ""
    for bold, italic, code in re.findall(r"\*\*(.+?)\*\*|\*(.+?)\*|`(.+?)`", cell):
        if bold:
            node, label = NODE_OF.get(bold), ""
            problems += [] if node else [f"no node {bold}"]
        elif italic:
            label = italic
            inputs = expected_inputs(node.define_schema(), "en") if node else []
            problems += [] if any(entry[0] == label for entry in inputs) else [f"no input {label}"]
        elif node is not None and label:
            problems += wrong_value(node, label, code)
    return problems


def wrong_value(node, label, code):
    if label == FILTERS:
        return [] if code in FILTER_KEYS else [f"no key {code} of filters"]
    settings = settings_of(node.settings_class) if node.settings_class else {}
    declared = [one for one in settings.values() if one.label == label]
    if not declared:
        return [f"{label} has no value {code}"]
    one = declared[0]
    try:
        given = code if one.kind is str else one.kind(code)
        error = one.error(given)
        one.value(given)
    except ValueError as unreadable:
        error = str(unreadable)
    return [error] if error else []


def test_every_document_has_its_section():
    titles = re.findall(r"^## (\S+)", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert tuple(titles) == DOCUMENTS
    assert len(ROWS) >= 200


@each_row
def test_a_row_is_whole(cells):
    says, _, place, differs, test = cells
    assert says and place and test
    assert "missing" not in f"{place} {differs}".lower()
    assert "partly" not in differs.lower() or "no GPU" in differs, "partly, and not for want of a device"


@each_row
def test_what_a_row_names_is_there(cells):
    assert wrong_place(cells[2]) == []


@each_row
def test_the_test_of_a_row_runs(cells):
    assert wrong_test(cells[4]) == []


@pytest.mark.parametrize(
    ("cell", "problem"),
    [
        ("**Apply Tea**", "no node Apply Tea"),
        ("**EMA Settings** *decoy*", "no input decoy"),
        ("**EMA Settings** *decay* `2`", "decay is 2.0, expected from 0.0 to 0.999999"),
        ("**Dataset** *filters (YAML)* `consider_every`", "no key consider_every of filters"),
        ("**Start Training** *seed* `1`", "seed has no value 1"),
    ],
)
def test_what_is_not_there_is_found(cell, problem):
    assert wrong_place(cell) == [problem]


def test_a_test_that_is_not_there_is_found():
    gone = "[test_gone](../tests/test_sources_document.py)"
    assert len(wrong_test(gone)) == len(wrong_test("—")) == len(wrong_test("[test_a](../tests/gone.py)")) == 1
