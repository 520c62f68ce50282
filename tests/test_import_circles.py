"""No two modules import each other, by whatever way round: imports inside functions and under TYPE_CHECKING count."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("settings", "storage", "patches", "ema", "training", "host", "nodes", "headless", "demo")


def module_name(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imported_modules(path, modules):
    """Names of the product's modules that a file imports, a package itself or a module in it."""
    package = module_name(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        above = package[: len(package) - (node.level - 1)]
        target = ".".join([*above, *(node.module or "").split(".")]).strip(".")
        for alias in node.names:
            inside = f"{target}.{alias.name}".strip(".")
            if inside in modules:
                yield inside
            elif target in modules:
                yield target


def import_graph():
    """{module: the modules that it imports} of the product."""
    files = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    modules = {module_name(path): path for path in files}
    return {name: sorted(set(imported_modules(path, modules)) - {name}) for name, path in modules.items()}


def circle(graph):
    """Modules of one circle in order, the first again at the end; empty when there is none."""
    done = set()
    for start in graph:
        path, waiting = [], [(start, iter(graph[start]))]
        path.append(start)
        while waiting:
            module, imports = waiting[-1]
            following = next((name for name in imports if name not in done), None)
            if following is None:
                done.add(module)
                path.pop()
                waiting.pop()
            elif following in path:
                return [*path[path.index(following) :], following]
            else:
                path.append(following)
                waiting.append((following, iter(graph[following])))
    return []


def test_a_circle_is_seen():
    assert circle({"a": ["b"], "b": ["c"], "c": ["a"], "d": []}) == ["a", "b", "c", "a"]
    assert circle({"a": ["b", "c"], "b": ["c"], "c": []}) == []


def test_no_import_circle():
    found = circle(import_graph())
    assert not found, " -> ".join(found)
