"""Tests mirror the tree: each product file has its test file, or docs/architecture.md says where it is tested."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("storage", "patches", "ema", "training", "host", "nodes", "headless", "demo")
HEADING = "## Tested elsewhere"
ROW = re.compile(r"^\| `(?P<file>[\w/.]+)` \| (?P<tests>.+?) \|$", re.MULTILINE)


def product_files():
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if path.name != "__init__.py":
                yield path.relative_to(ROOT)


def has_own_tests(file):
    return any((ROOT / "tests" / file.parent).glob(f"test_{file.stem}*.py"))


def tested_elsewhere():
    """{file, or folder with a slash: paths of the tests that docs/architecture.md names for it}."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = text.partition(HEADING)[2].partition("\n## ")[0]
    return {row["file"]: re.findall(r"`([\w/.]+)`", row["tests"]) for row in ROW.finditer(section)}


def test_the_table_names_what_exists():
    rows = tested_elsewhere()
    missing = [path for paths in rows.values() for path in paths if not (ROOT / path).exists()]
    assert rows and not missing
    assert not [file for file in rows if not (ROOT / file).exists()]


@pytest.mark.parametrize("file", list(product_files()), ids=str)
def test_each_file_is_tested(file):
    rows = tested_elsewhere()
    if has_own_tests(file):
        assert file.as_posix() not in rows, "it has a test file of its own: take its row out of docs/architecture.md"
    else:
        advice = f"write tests/{file.parent}/test_{file.stem}.py, or a row under '{HEADING}' in architecture.md"
        assert rows.get(file.as_posix()) or rows.get(f"{file.parent.as_posix()}/"), advice
