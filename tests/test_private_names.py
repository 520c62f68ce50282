"""No test imports, calls or replaces a private name of a module of Graft."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PRIVATE = re.compile(r"_[a-zA-Z]")
PRIVATE_IN_TEXT = re.compile(r"graft_nodes(\.\w+)*\._[a-zA-Z]\w*")


def is_private(name):
    return bool(PRIVATE.match(name)) and not name.endswith("__")


def files_of_the_tests():
    return [path for path in sorted((ROOT / "tests").rglob("*.py")) if path != Path(__file__).resolve()]


def imported_names(node):
    """(name in Graft, name in this file) of what a statement imports from Graft's modules; of other statements none."""
    if not isinstance(node, ast.ImportFrom) or not node.module:
        return []
    parts = node.module.split(".")
    if parts[0] != "graft_nodes" or "tests" in parts:
        return []
    return [(alias.name, alias.asname or alias.name) for alias in node.names]


def replaced_attribute(node):
    """(object, attribute) of a call of setattr with the attribute's name as a text; None of any other node."""
    if not isinstance(node, ast.Call) or getattr(node.func, "attr", "") != "setattr" or len(node.args) < 2:
        return None
    target, name = node.args[:2]
    if isinstance(target, ast.Name) and isinstance(name, ast.Constant) and isinstance(name.value, str):
        return target.id, name.value
    return None


def private_uses(text):
    """(line, name) of every private name of Graft that a test file touches."""
    tree = ast.parse(text)
    modules = {local for node in ast.walk(tree) for _, local in imported_names(node)}
    for node in ast.walk(tree):
        yield from ((node.lineno, name) for name, _ in imported_names(node) if is_private(name))
        touched = replaced_attribute(node)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            touched = node.value.id, node.attr
        if touched and touched[0] in modules and is_private(touched[1]):
            yield node.lineno, ".".join(touched)
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            match = PRIVATE_IN_TEXT.search(node.value)
            if match:
                yield node.lineno, match[0]


SEEN = """from graft_nodes.ema import shadow as s
from graft_nodes.ema.shadow import _x
from graft_nodes.tests.lab import _fixture
s._y()
monkeypatch.setattr(s, "_z", 1)
monkeypatch.setattr("graft_nodes." + "ema", 1)
s.__name__, s.public, torch._private
"""


def test_private_names_are_seen():
    path = ".".join(("graft_nodes", "ema", "shadow", "_w"))
    expected = [(2, "_x"), (4, "s._y"), (5, "s._z"), (8, path)]
    assert sorted(private_uses(f"{SEEN}setattr('{path}', 1)")) == expected


@pytest.mark.parametrize("path", files_of_the_tests(), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_private_name_of_graft(path):
    assert not list(private_uses(path.read_text(encoding="utf-8")))
