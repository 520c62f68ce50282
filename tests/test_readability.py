"""Limits that keep the product's Python readable: how dense it is, how long lines and the wall's files are."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("storage", "patches", "ema", "training", "host", "nodes", "headless", "demo")
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
MOST_COMPREHENSIONS = 4.0  # per 100 lines
MOST_CONDITIONAL_EXPRESSIONS = 1.5  # per 100 lines
MOST_SYNTAX_NODES = 9.0  # a line
LONGEST_LINE = 120
LONGEST_HOST_FILE = 250


def product_files():
    """Every Python file of the product, the embedded host left out: it follows ComfyUI's own shape."""
    for package in PACKAGES:
        yield from sorted((ROOT / package).rglob("*.py"))


def code_lines(text):
    return [line for line in text.splitlines() if line.strip()]


@pytest.fixture(scope="module")
def counts():
    """(lines, comprehensions, conditional expressions, syntax nodes) of the product."""
    lines = comprehensions = conditionals = nodes = 0
    for path in product_files():
        text = path.read_text(encoding="utf-8")
        lines += len(code_lines(text))
        for node in ast.walk(ast.parse(text)):
            nodes += 1
            comprehensions += isinstance(node, COMPREHENSIONS)
            conditionals += isinstance(node, ast.IfExp)
    return lines, comprehensions, conditionals, nodes


def test_one_loop_or_one_condition_a_line(counts):
    lines, comprehensions, conditionals, nodes = counts
    assert 100 * comprehensions / lines <= MOST_COMPREHENSIONS
    assert 100 * conditionals / lines <= MOST_CONDITIONAL_EXPRESSIONS
    assert nodes / lines <= MOST_SYNTAX_NODES


def test_no_line_is_too_long():
    long = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in product_files()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if len(line) > LONGEST_LINE
    ]
    assert not long


def test_files_of_the_wall_to_comfyui_are_short():
    long = {}
    for path in (ROOT / "host").rglob("*.py"):
        count = len(path.read_text(encoding="utf-8").splitlines())
        if count > LONGEST_HOST_FILE:
            long[path.name] = count
    assert not long, f"host/ translates; move what decides to patches or training: {long}"


def test_every_file_says_what_it_is():
    silent = []
    for path in product_files():
        if not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))):
            silent.append(str(path.relative_to(ROOT)))
    assert not silent
