"""A list of node ids that is read from Graft's source, without running it, names Graft's nodes and no others.

ComfyUI-Manager finds the pack of a missing node in such a list. Its scan reads every Python file of a pack, the tests
and the embedded host as well, and takes for a node whatever looks like one. The rules here are those of version 2.0 of
its scanner.
"""

import ast
import json
import re
from pathlib import Path

import pytest
from graft_nodes.nodes import NODES

ROOT = Path(__file__).resolve().parents[1]
MAPPINGS, TITLES = ("NODE_CLASS_MAPPINGS", "NODE_CONFIG"), ("NODE_DISPLAY_NAME_MAPPINGS",)
QUOTED_KEY = re.compile(r"""(?:"([^"]*)"|'([^']*)')\s*:""")
IN_TEXT = (
    re.compile(r"""_CLASS_MAPPINGS\["(.*?)"\]|_CLASS_MAPPINGS\['(.*?)'\]"""),
    re.compile(r'@register_node\("(.+)",\s*".+"\)'),
    re.compile(r'"(\w+)"\s*:\s*{"class":\s*\w+\s*'),
)
DICTS = (
    re.compile(r"_CLASS_MAPPINGS\s*(?::\s*\w+\s*)?=\s*(?:\\\s*)?{([^}]*)}"),
    re.compile(r"_CLASS_MAPPINGS\.update\s*\(\s*{([^}]*)}\s*\)"),
)


def in_text(code):
    """Ids that the text of a file shows, also in strings."""
    code = re.sub(r"^\s*#.*$", "", code, flags=re.MULTILINE)
    for pattern in DICTS:
        for keys in QUOTED_KEY.findall("\n".join(pattern.findall(code))):
            yield "".join(keys)
    for pattern in IN_TEXT:
        for found in pattern.findall(code):
            yield found if isinstance(found, str) else "".join(found)


def keys_of(value):
    """The keys of a dict that is written out: strings, and Class for Class.NAME."""
    for key in value.keys if isinstance(value, ast.Dict) else ():
        if isinstance(key, ast.Constant) and isinstance(key.value, str):
            yield key.value
        elif isinstance(key, ast.Attribute) and isinstance(key.value, ast.Name):
            yield key.value.id


def named(nodes):
    return [node.id for node in nodes if isinstance(node, ast.Name)]


def of_comprehension(value, lists):
    """The classes of {cls.__name__: cls for cls in [A, B]}, or in a list that has a name."""
    if not isinstance(value, ast.DictComp):
        return
    for generator in value.generators:
        if isinstance(generator.iter, ast.List):
            yield from named(generator.iter.elts)
        elif isinstance(generator.iter, ast.Name):
            yield from lists.get(generator.iter.id, ())


def of_schema(cls):
    """The node_id in the Schema of a class that says it is a ComfyNode."""
    bases = [base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "") for base in cls.bases]
    if "ComfyNode" not in bases:
        return
    for call in ast.walk(cls):
        if isinstance(call, ast.Call) and getattr(call.func, "attr", getattr(call.func, "id", "")) == "Schema":
            yield from (word.value.value for word in call.keywords if word.arg == "node_id" and is_text(word.value))


def is_text(value):
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def in_code(code):
    """Ids that the statements of a file show."""
    tree = ast.parse(code)
    lists = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield from of_schema(node)
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign) and isinstance(node.value, ast.List):
            for target in getattr(node, "targets", None) or [node.target]:
                lists.setdefault(getattr(target, "id", ""), []).extend(named(node.value.elts))
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign | ast.AnnAssign):
            continue
        for target in getattr(node, "targets", None) or [node.target]:
            if isinstance(target, ast.Name) and target.id in (*MAPPINGS, *TITLES):
                yield from keys_of(node.value)
                yield from of_comprehension(node.value, lists)
            elif isinstance(target, ast.Subscript) and getattr(target.value, "id", "") in MAPPINGS:
                yield from [target.slice.value] if is_text(target.slice) else []


def scanned(folder):
    """{node id: the files where it is found} of a folder."""
    found = {}
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).parts
        if any(part.startswith(".") or part in ("__pycache__", "node_modules", "build") for part in parts):
            continue
        code = path.read_text(encoding="utf-8")
        for node_id in {*in_text(code), *in_code(code)}:
            found.setdefault(node_id.strip(), []).append("/".join(parts))
    return found


@pytest.mark.parametrize(
    ("code", "ids"),
    [
        ('TABLE = {"A": A, "B": B}', {"A", "B"}),
        ('X = """\nTABLE = {\'A\': A}\n"""', {"A"}),
        ('# TABLE = {"A": A}', set()),
        ('TITLES = {"A": "a"}', {"A"}),
        ("TABLE = {A.NAME: A}", {"A"}),
        ('TABLE["A"] = A', {"A"}),
        ('other.TABLE["A"] = A', {"A"}),
        ('nodes.TABLE.update({"A": A})', {"A"}),
        ("MINE = [A, B]\nTABLE = {one.__name__: one for one in MINE}", {"A", "B"}),
        ('class A(io.ComfyNode):\n    def define_schema(cls): return io.Schema(node_id="A")', {"A"}),
        ('class A(io.ComfyNode):\n    def define_schema(cls): return io.Schema("A")', set()),
        ("nodes.TABLE.update(A=A)", set()),
        ("TABLE = {one.__name__: one for one in (A, B)}", set()),
    ],
)
def test_what_the_scan_finds(code, ids):
    code = code.replace("TABLE", MAPPINGS[0]).replace("TITLES", TITLES[0])  # else this file would be found
    assert {*in_text(code), *in_code(code)} == ids


def test_a_list_of_graft_s_nodes_names_them_and_no_others():
    """The list is what the scan finds and what node_list.json names."""
    ids = {node.GET_SCHEMA().node_id for node in NODES}
    others = {node_id: files for node_id, files in scanned(ROOT).items() if node_id not in ids}
    assert not others, "declare nodes that are not Graft's as .update(Name=cls), dict(Name=cls) or io.Schema('Name')"
    assert set(json.loads((ROOT / "node_list.json").read_text(encoding="utf-8"))) == ids
