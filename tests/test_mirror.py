"""Tests mirror the tree: each product file has its test file, or where_tests_are.toml says where it is tested."""

from pathlib import Path, PurePosixPath

import pytest
from graft_nodes.tests.nearest_tests import own_tests, read_table

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("settings", "storage", "patches", "ema", "training", "host", "nodes", "headless", "demo")


def product_files():
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if path.name != "__init__.py":
                yield path.relative_to(ROOT)


def test_the_table_names_what_exists():
    rows = read_table(ROOT)
    missing = [path for paths in rows.values() for path in paths if not (ROOT / path).exists()]
    assert rows and not missing
    assert not [file for file in rows if not list(ROOT.glob(file))]


@pytest.mark.parametrize("file", list(product_files()), ids=str)
def test_each_file_is_tested(file):
    rows = read_table(ROOT)
    own = own_tests(ROOT, PurePosixPath(file))
    if own:
        assert not set(own) & set(rows.get(file.as_posix(), [])), "its row in where_tests_are.toml names its own tests"
    else:
        advice = f"write tests/{file.parent}/test_{file.stem}.py, or a row in tests/where_tests_are.toml"
        assert rows.get(file.as_posix()) or rows.get(f"{file.parent.as_posix()}/"), advice


def test_the_rows_are_in_order():
    rows = list(read_table(ROOT))
    assert rows == sorted(rows)
