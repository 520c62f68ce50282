"""Tests mirror the tree: each product file has its test file, or docs/architecture.md says where it is tested."""

from pathlib import Path, PurePosixPath

import pytest
from graft_nodes.tests.mutation import nearest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("settings", "storage", "patches", "ema", "training", "host", "nodes", "headless", "demo")


def product_files():
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if path.name != "__init__.py":
                yield path.relative_to(ROOT)


def test_the_table_names_what_exists():
    rows = nearest.tested_elsewhere(ROOT)
    missing = [path for paths in rows.values() for path in paths if not (ROOT / path).exists()]
    assert rows and not missing
    assert not [file for file in rows if not list(ROOT.glob(file))]


@pytest.mark.parametrize("file", list(product_files()), ids=str)
def test_each_file_is_tested(file):
    rows = nearest.tested_elsewhere(ROOT)
    own = nearest.own_tests(ROOT, PurePosixPath(file))
    if own:
        assert not set(own) & set(rows.get(file.as_posix(), [])), "its row in docs/architecture.md names its own tests"
    else:
        advice = f"write tests/{file.parent}/test_{file.stem}.py, or a row under 'Tested elsewhere' in architecture.md"
        assert rows.get(file.as_posix()) or rows.get(f"{file.parent.as_posix()}/"), advice
