"""Holds the import rules of the house by reading the imports: who may import whom, and who may know ComfyUI."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("storage", "host", "nodes", "patches", "ema", "training", "headless", "demo")
HOST_MODULES = {
    "comfy",
    "comfy_api",
    "comfy_execution",
    "comfy_extras",
    "folder_paths",
    "nodes",
    "execution",
    "server",
    "node_helpers",
    "latent_preview",
}
MAY_IMPORT = {
    "storage": {"patches"},
    "patches": {"storage"},
    "ema": {"storage"},
    "training": {"storage", "patches", "ema"},
    "nodes": {"storage", "host", "training", "patches", "ema", "demo"},
    "headless": {"storage", "host", "comfyui_api_stubs"},
    "host": {"storage", "patches", "training"},
    "demo": {"storage", "host", "training", "ema", "comfyui_api_stubs"},
    "__init__": {"nodes"},
    "__main__": {"headless"},
}
MAY_KNOW = {
    "nodes": {"comfy_api"},
    "headless": HOST_MODULES,  # which it opens, some by name
    "host": {"comfy", "folder_paths", "server"},
    "demo": {"comfy"},
}


def files():
    """Every module of the package outside the embedded host, with the room it belongs to."""
    yield from (("__init__", ROOT / "__init__.py"), ("__main__", ROOT / "__main__.py"))
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            yield room, path


def imports(path):
    """(level, module path) of every import statement in the file, wherever it stands."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((0, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level and not node.module:
                yield from ((node.level, alias.name) for alias in node.names)
            else:
                yield node.level, node.module


def target_room(path, level, module):
    """The room a relative import leads to, or None when it stays in its own."""
    folder = path.parent
    for _ in range(level - 1):
        folder = folder.parent
    return module.split(".")[0] if folder == ROOT else None


@pytest.mark.parametrize(("room", "path"), [pytest.param(r, p, id=str(p.relative_to(ROOT))) for r, p in files()])
def test_rooms_import_only_what_they_may(room, path):
    for level, module in imports(path):
        top = module.split(".")[0]
        if level == 0:
            assert top != "graft_nodes", (
                f"{path}: import the package relatively, two copies of it may live in one process"
            )
            if top in HOST_MODULES:
                assert top in MAY_KNOW.get(room, set()), f"{path} imports {module}: only the wall may know ComfyUI"
        else:
            room_met = target_room(path, level, module)
            if room_met is not None and room_met != room:
                assert room_met in MAY_IMPORT[room], f"{path} imports {room_met}"
