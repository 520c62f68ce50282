"""Reads what Python modules define without importing them: names, parameters of functions, members of classes. Names
that a module imports from a neighbour are followed to where they are defined.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

MOST_STEPS = 8  # from one module's import to the next


@dataclass
class Definition:
    """What stands behind a name: `parameters` of a function, `members` of a class, neither of a plain value."""

    kind: str
    parameters: list[str] = field(default_factory=list)
    required: list[str] = field(default_factory=list)
    members: dict[str, Definition] = field(default_factory=dict)
    bases: list[str] = field(default_factory=list)


class Tree:
    """The modules in a folder: the embedded host's, or those of a ComfyUI checkout."""

    def __init__(self, root: Path):
        self.root = root

    def file(self, module: str) -> Path | None:
        """The file of a module, or None."""
        path = self.root.joinpath(*module.split("."))
        for candidate in (path.with_name(f"{path.name}.py"), path / "__init__.py"):
            if candidate.is_file():
                return candidate
        return None

    def has(self, module: str) -> bool:
        """Whether there is such a module, or a folder of modules."""
        return self.file(module) is not None or self.root.joinpath(*module.split(".")).is_dir()

    def modules(self) -> list[str]:
        """Every module in the folder."""
        found = []
        for path in self.root.rglob("*.py"):
            parts = path.relative_to(self.root).with_suffix("").parts
            found.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
        return sorted(name for name in found if name)

    def names(self, module: str) -> dict[str, Definition]:
        """The public names of a module; with __all__ only those, else what it defines itself."""
        return _names(self, module)

    def look_up(self, module: str, name: str, steps: int = MOST_STEPS) -> Definition | None:
        """What a name means in a module, imports followed; None when it is not there."""
        body = _body(self, module)
        for node in reversed(body):
            if isinstance(node, ast.ImportFrom) and steps:
                found = self._imported(module, node, name, steps)
                if found is not None:
                    return found
            elif name in _bound(node):
                return _definition(node)
        if self.file(f"{module}.{name}") is not None:
            return Definition("module")
        return None

    def _imported(self, module: str, node: ast.ImportFrom, name: str, steps: int) -> Definition | None:
        source = self._absolute(module, node)
        for alias in node.names:
            if alias.name == "*":
                exported = _exported(_body(self, source))
                if name in exported or (not exported and not name.startswith("_")):
                    return self.look_up(source, name, steps - 1)
            elif name == (alias.asname or alias.name):
                return self.look_up(source, alias.name, steps - 1) or Definition("value")
        return None

    def _absolute(self, module: str, node: ast.ImportFrom) -> str:
        """The module that an import names."""
        if not node.level:
            return node.module or ""
        file = self.file(module)
        package = module.split(".")
        if file is None or file.name != "__init__.py":
            package = package[:-1]
        package = package[: len(package) - node.level + 1]
        return ".".join([*package, *([node.module] if node.module else [])])


@cache
def _body(tree: Tree, module: str) -> list[ast.stmt]:
    """A module's statements, those under a top-level `if` or `try` as well."""
    file = tree.file(module)
    if file is None:
        return []
    return _flat(ast.parse(file.read_text(encoding="utf-8")).body)


def _flat(body: list[ast.stmt]) -> list[ast.stmt]:
    found: list[ast.stmt] = []
    for node in body:
        if isinstance(node, ast.If | ast.Try):
            found += _flat(node.body) + _flat(node.orelse)
        else:
            found.append(node)
    return found


@cache
def _names(tree: Tree, module: str) -> dict[str, Definition]:
    body = _body(tree, module)
    wanted = _exported(body)
    if not wanted:
        wanted = [name for node in body for name in _bound(node) if not name.startswith("_")]
    found = {name: tree.look_up(module, name) for name in dict.fromkeys(wanted)}
    return {name: definition for name, definition in found.items() if definition is not None}


def _exported(body: list[ast.stmt]) -> list[str]:
    """The names in __all__; entries that are not plain text are left out."""
    for node in body:
        value = getattr(node, "value", None)
        if "__all__" in _bound(node) and isinstance(value, ast.List):
            entries = [entry.value for entry in value.elts if isinstance(entry, ast.Constant)]
            return [entry for entry in entries if isinstance(entry, str)]
    return []


def _bound(node: ast.AST) -> list[str]:
    """The names that a statement defines."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Assign):
        return [name.id for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name)]
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return [node.target.id]
    return []


def _definition(node: ast.AST) -> Definition:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return _function(node)
    if isinstance(node, ast.ClassDef):
        members = {}
        for inner in _flat(node.body):
            for name in _bound(inner):
                if name == "__init__" or not name.startswith("_"):
                    members[name] = _definition(inner)
        return Definition("class", members=members, bases=[ast.unparse(base) for base in node.bases])
    return Definition("value")


def _function(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Definition:
    """A function's parameters without self and cls; properties have none and count as values."""
    decorators = {ast.unparse(decorator).split(".")[-1] for decorator in node.decorator_list}
    if decorators & {"property", "classproperty", "setter", "cached_property"}:
        return Definition("value")
    arguments = node.args
    positional = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    required = positional[: len(positional) - len(arguments.defaults)]
    if positional[:1] in (["self"], ["cls"], ["s"]):
        positional, required = positional[1:], required[1:]
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        positional.append(argument.arg)
        if default is None:
            required.append(argument.arg)
    return Definition("function", parameters=positional, required=required)
