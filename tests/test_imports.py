"""Holds the import rules of the house by reading the imports: who may import whom, and who may know ComfyUI."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("settings", "storage", "host", "nodes", "patches", "ema", "training", "headless", "demo")
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
    "settings": set(),
    "storage": set(),
    "patches": {"settings", "storage"},
    "ema": {"settings", "storage"},
    "training": {"settings", "storage", "patches", "ema"},
    "nodes": {"settings", "storage", "host", "training", "patches", "ema", "demo"},
    "headless": {"storage", "host"},
    "host": {"storage", "patches", "training"},
    "demo": {"storage", "host", "training", "ema", "headless"},
    "__init__": {"nodes"},
    "__main__": {"headless"},
}
EMBEDDED = ROOT / "headless" / "embedded.py"  # the one way to the embedded host
CORE = "patches.core."  # the ground of all that changes a model; everyone may import it
MAY_KNOW = {
    "nodes": {"comfy_api"},
    "headless": HOST_MODULES,  # which it opens, some by name
    "host": {"comfy", "comfy_execution", "folder_paths", "server"},
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
            if room_met is not None and room_met != room and not f"{module}.".startswith(CORE):
                assert room_met in MAY_IMPORT[room] or path == EMBEDDED, f"{path} imports {room_met}"


EMBEDDED_HOST = "comfyui_api_stubs"
# Which of Graft's files use the embedded host by themselves. Tests take helpers of its tests.
USES_IT = {
    "headless/embedded.py": "",
    "tests/": "tests.",
    "tests/fuzz/": "",  # fuzzing makes up what the server and its readers are given
}


def all_files():
    """Every Python file of Graft's, tests, benchmarks and scripts too."""
    for path in sorted(ROOT.rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        if not name.startswith((".", "build/", "node_modules/", "comfyui_api_stubs/")):
            yield name, path


def test_graft_imports_the_embedded_host_in_one_place():
    found = []
    for name, path in all_files():
        for _, module in imports(path):
            *_, inside = f".{module}.".partition(f".{EMBEDDED_HOST}.")
            if f".{EMBEDDED_HOST}." in f".{module}.":
                allowed = [start for place, start in USES_IT.items() if name.startswith(place)]
                if not any(inside.startswith(start) for start in allowed):
                    found.append(f"{name} imports {module}: take it from headless/embedded.py")
    assert not found


def test_the_embedded_host_imports_nothing_of_graft():
    found = []
    folder = ROOT / EMBEDDED_HOST
    for path in sorted(folder.rglob("*.py")):
        for level, module in imports(path):
            depth = len(path.relative_to(folder).parts)
            if level > depth or module.split(".")[0] == "graft_nodes":
                found.append(f"{path.relative_to(ROOT)} imports {'.' * level}{module}")
    assert not found


ONLY_STORAGE = {
    "hashlib": "hash with storage.digest",
    "safetensors": "read and write with storage.safetensors",
}
RENAMES = {"os.replace", "os.rename", "os.renames", "os.link", "shutil.move"}
DRAFTS = {"tempfile.mkstemp", "tempfile.NamedTemporaryFile"}


def called(node):
    """ "module.function" of a call such as os.replace(a, b), or ".method" of any other call of an attribute."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return ""
    owner = node.func.value
    if isinstance(owner, ast.Name) and owner.id in ("os", "shutil", "tempfile"):
        return f"{owner.id}.{node.func.attr}"
    return f".{node.func.attr}"


# The embedded host (comfyui_api_stubs) is not read here: it stands for ComfyUI and imports nothing of Graft. Neither is
# dev.py, which runs before the package can be imported.
@pytest.mark.parametrize(
    "path", [pytest.param(p, id=str(p.relative_to(ROOT))) for room, p in files() if room != "storage"]
)
def test_only_storage_hashes_files_and_moves_them_into_place(path):
    for level, module in imports(path):
        top = module.split(".")[0]
        assert level or top not in ONLY_STORAGE, f"{path} imports {module}: {ONLY_STORAGE[top]}"
    knows_paths = any(module == "pathlib" for _, module in imports(path))
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        name = called(node)
        place = f"{path}:{getattr(node, 'lineno', 0)}"
        assert name not in RENAMES, f"{place}: use storage.atomic.move_file"
        assert name not in DRAFTS, f"{place}: use storage.atomic.write_whole"
        if knows_paths and name == ".rename":
            pytest.fail(f"{place}: use storage.atomic.move_file")
        if knows_paths and name == ".replace":  # a text's takes two arguments, a path's one
            assert len(node.args) + len(node.keywords) > 1, f"{place}: use storage.atomic.move_file"
