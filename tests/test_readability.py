"""Every file of the product says what it is, and docstrings explain what there is."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("settings", "storage", "patches", "ema", "training", "host", "nodes", "headless", "demo")


def test_every_file_says_what_it_is():
    silent = []
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))):
                silent.append(str(path.relative_to(ROOT)))
    assert not silent


SECTION = re.compile(r"^Args:\n((?:    .*\n|\n)+)", re.MULTILINE)
SHAPE = re.compile(r"\([^()]*,[^()]*\)|shape|dimensions")
SHAPES_SAID = ("ema", "patches/core", "patches/adapters", "patches/patching", "training/objective")
EXPLAINED = ("ema", "training/objective")  # every public function that takes a tensor says what each argument is


def documented(path: Path) -> Iterator[tuple[str, ast.FunctionDef, dict[str, str] | None]]:
    """(name, function, {argument: what its docstring says of it}) of a file's functions; None without arguments."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef):
            found = SECTION.search((ast.get_docstring(node) or "") + "\n")
            entries = None
            if found is not None:
                parts = re.split(r"^    (\w+): ", found[1], flags=re.MULTILINE)[1:]
                entries = dict(zip(parts[::2], parts[1::2], strict=True))
            yield f"{path.relative_to(ROOT)}: {node.name}", node, entries


def parameters(function: ast.FunctionDef) -> list[ast.arg]:
    given = function.args
    return [one for one in (*given.posonlyargs, *given.args, *given.kwonlyargs) if one.arg not in ("self", "cls")]


@pytest.mark.parametrize("package", PACKAGES)
def test_docstrings_explain_the_arguments_that_there_are(package):
    wrong = []
    for path in sorted((ROOT / package).rglob("*.py")):
        for name, function, entries in documented(path):
            if entries is None:
                continue
            names = [one.arg for one in parameters(function)]
            more = [one.arg for one in (function.args.vararg, function.args.kwarg) if one is not None]
            if [entry for entry in entries if entry not in more] != names:
                wrong.append(f"{name} explains {list(entries)} and takes {names}")
    assert not wrong


@pytest.mark.parametrize("package", SHAPES_SAID)
def test_docstrings_say_the_shapes_of_tensors(package):
    silent = []
    for path in sorted((ROOT / package).rglob("*.py")):
        for name, function, entries in documented(path):
            if function.name.startswith("_"):
                continue
            for one in parameters(function):
                kind = ast.unparse(one.annotation) if one.annotation is not None else ""
                if kind not in ("Tensor", "torch.Tensor", "Tensor | None"):
                    continue
                if entries is None and package in EXPLAINED:
                    silent.append(f"{name} does not explain {one.arg}")
                elif entries is not None and not SHAPE.search(entries.get(one.arg, "")):
                    silent.append(f"{name}: {one.arg}")
    assert not silent
