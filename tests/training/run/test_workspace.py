"""A workspace keeps tensors, and nobody else writes into it: read from the code of every package."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
OWN = ROOT / "training" / "run" / "workspace.py"
PACKAGES = ("training", "host", "nodes", "headless", "demo")
TYPES = {"Workspace", "TrainingContext"}
NAMES = {"work", "workspace", "context"}


def _names_of_workspaces(tree):
    """The usual names of a workspace, and those of arguments that are declared as one."""
    declared = {
        argument.arg
        for argument in ast.walk(tree)
        if isinstance(argument, ast.arg) and argument.annotation and ast.unparse(argument.annotation) in TYPES
    }
    return NAMES | declared


def _owner(target):
    """The name that a chain of attributes and items begins with: `work` of `work.loader.until`."""
    while isinstance(target, ast.Attribute | ast.Subscript):
        target = target.value
    return getattr(target, "id", None)


def _writes(tree):
    """The lines that assign to something of a workspace, or delete it."""
    names = _names_of_workspaces(tree)
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute | ast.Subscript)
        and isinstance(node.ctx, ast.Store | ast.Del)
        and _owner(node) in names
    ]


def test_nobody_else_writes_into_a_workspace():
    found = {
        str(path.relative_to(ROOT)): lines
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        if path != OWN and (lines := _writes(ast.parse(path.read_text(encoding="utf-8"))))
    }
    assert not found


def test_what_counts_as_writing():
    code = "def run(one: Workspace, work):\n    one.a.b = 1\n    work.c += 1\n    del work.d[0]\n    other.e = work.f\n"
    assert _writes(ast.parse(code)) == [2, 3, 4]
