"""Every file of the product says what it is."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("settings", "storage", "patches", "ema", "training", "host", "nodes", "headless", "demo")


def test_every_file_says_what_it_is():
    silent = []
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))):
                silent.append(str(path.relative_to(ROOT)))
    assert not silent
