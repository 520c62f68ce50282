"""What is put on a model goes through patches/core: nothing else replaces a forward, fills a slot or adds a hook."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("storage", "patches", "ema", "training", "host", "nodes", "headless", "demo")
TABLES = ("_parameters", "_buffers")


def product():
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if not path.is_relative_to(ROOT / "patches" / "core"):
                yield path


def ways(source):
    """(line, what it does) of each way on a model that is not the core's."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr == "forward" and not isinstance(node.ctx, ast.Load):
            yield node.lineno, "replaces a forward: patches.core.calls.around"
        if isinstance(node, ast.Subscript):
            key = node.slice.value if isinstance(node.slice, ast.Constant) else None
            if isinstance(node.value, ast.Attribute) and node.value.attr in TABLES:
                yield node.lineno, "reaches into a module's slots: patches.core.slots"
            if key == "forward" and not isinstance(node.ctx, ast.Load):
                yield node.lineno, "replaces a forward: patches.core.calls.around"
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            words = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
            if name.startswith(("register_forward", "register_full_backward")):
                yield node.lineno, "adds a hook: patches.core.calls.around"
            if name in ("setattr", "delattr", "pop") and "forward" in words:
                yield node.lineno, "replaces a forward: patches.core.calls.around"
            if name in ("add_object_patch", "add_callback_with_key", "add_wrapper_with_key"):
                yield node.lineno, "puts something on a MODEL clone: patches.core.clones"


@pytest.mark.parametrize("path", [pytest.param(path, id=str(path.relative_to(ROOT))) for path in product()])
def test_nothing_goes_past_the_core(path):
    found = [f"{path}:{line} {what}" for line, what in ways(path.read_text(encoding="utf-8"))]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        "module.forward = call",
        "del self.layer.forward",
        "part._parameters[name] = tensor",
        "old = part._buffers['x']",
        "vars(part)['forward'] = call",
        "part.__dict__.pop('forward', None)",
        "setattr(part, 'forward', call)",
        "part.register_forward_hook(hook)",
        "part.register_forward_pre_hook(hook)",
        "clone.add_wrapper_with_key('apply_model', 'key', call)",
    ],
)
def test_each_way_is_found(source):
    assert list(ways(source))


def test_the_core_is_small_and_plain():
    """At most a thousand lines of code, which import nothing of Graft."""
    total = 0
    for path in sorted((ROOT / "patches" / "core").glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        docstrings = {
            line
            for node in ast.walk(tree)
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
            for line in range(node.lineno, node.end_lineno + 1)
        }
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            total += bool(line.strip()) and not line.strip().startswith("#") and number not in docstrings
        assert not [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level > 1], path
    assert total <= 1000, total
