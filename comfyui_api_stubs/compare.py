"""Compares the embedded host with a ComfyUI checkout: which names there are, what parameters they take, and what the
socket types of comfy_api send to the editor.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from . import MODULES
from .source import Definition, Tree

HERE = Path(__file__).resolve().parent
LANDMARKS = ("comfyui_version.py", "comfy_api/latest/__init__.py", "nodes.py", "execution.py")
MOST_SECONDS = 300  # for importing comfy_api, which imports torch
WIDTH = 110


class NotComfyUI(ValueError):
    """The folder is no ComfyUI checkout."""


@dataclass
class Difference:
    """One module of the embedded host beside ComfyUI's: names that are only there or only here, and names that are not
    the same.
    """

    module: str
    only_comfyui: list[str] = field(default_factory=list)
    only_stubs: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.only_comfyui or self.only_stubs or self.changed)


@dataclass
class Comparison:
    """What `compare` found: `sockets` are the differences of comfy_api's io and ui, as they are when they run; None,
    with `why`, when ComfyUI's could not be imported.
    """

    version: str
    modules: list[Difference]
    missing_modules: list[str]
    more_modules: list[str]
    sockets: list[str] | None
    why: str = ""


def version_of(root: Path) -> str:
    """The version of a checkout. Raises NotComfyUI."""
    absent = [name for name in LANDMARKS if not (root / name).is_file()]
    if absent:
        raise NotComfyUI(f"{root} is not a ComfyUI checkout: it has no {', '.join(absent)}")
    line = (root / "comfyui_version.py").read_text(encoding="utf-8").split("__version__")[-1]
    return line.strip(" =\n\"'")


def compare(comfyui: str) -> Comparison:
    """Compare with the checkout in a folder; no module of ComfyUI is imported here, only in a process of its own."""
    root = Path(comfyui).expanduser().resolve()
    version = version_of(root)
    stubs, real = Tree(Path(MODULES)), Tree(root)
    modules, missing = [], []
    for module in stubs.modules():
        if not real.has(module):
            missing.append(module)
            continue
        difference = compare_module(stubs, real, module)
        if difference:
            modules.append(difference)
    mine = set(stubs.modules())
    packages = {name.partition(".")[0] for name in mine}
    more = [name for name in real.modules() if name.partition(".")[0] in packages and name not in mine]
    sockets, why = compare_sockets(root)
    return Comparison(version, modules, missing, more, sockets, why)


def compare_module(stubs: Tree, real: Tree, module: str) -> Difference:
    """One module of both."""
    difference = Difference(module)
    mine, theirs = stubs.names(module), real.names(module)
    for name in sorted(mine | theirs):
        if name not in mine and stubs.look_up(module, name) is None:
            difference.only_comfyui.append(name)
        elif name in mine:
            found = theirs.get(name) or real.look_up(module, name)
            if found is None:
                difference.only_stubs.append(name)
            else:
                difference.changed += changes(name, mine[name], found)
    return difference


def changes(name: str, mine: Definition, theirs: Definition) -> list[str]:
    """What is not the same about a name that both have."""
    if mine.kind == theirs.kind == "function" and mine.parameters != theirs.parameters:
        return [f"{name}({', '.join(mine.parameters)}) is {name}({', '.join(theirs.parameters)})"]
    if not mine.kind == theirs.kind == "class":
        return []
    found = []
    for member in sorted(theirs.members):
        if member in mine.members:
            found += changes(f"{name}.{member}", mine.members[member], theirs.members[member])
        elif member != "__init__" and not mine.bases:
            found.append(f"{name}.{member} is missing")
    return found


def described(folder: str) -> dict[str, Any]:
    """What comfy_api of a folder says of itself, asked in a process of its own. Raises ValueError with the reason."""
    command = [sys.executable, str(HERE / "sockets.py"), folder]
    done = subprocess.run(command, capture_output=True, text=True, timeout=MOST_SECONDS, check=False, cwd=folder)
    if done.returncode:
        raise ValueError((done.stderr.strip().splitlines() or ["no reason was given"])[-1])
    return json.loads(done.stdout.splitlines()[-1])


def compare_sockets(root: Path) -> tuple[list[str] | None, str]:
    """(the differences of io and ui, why there are none to tell)."""
    try:
        theirs = described(str(root))
    except (ValueError, subprocess.TimeoutExpired) as error:
        return None, str(error)
    return list(differences("", described(MODULES), theirs)), ""


def differences(path: str, mine: Any, theirs: Any) -> Iterator[str]:
    """Where two descriptions are not the same."""
    if isinstance(mine, list) and isinstance(theirs, list) and set(map(str, mine)) != set(map(str, theirs)):
        for title, one, other in (("only in ComfyUI", theirs, mine), ("only in the stubs", mine, theirs)):
            alone = [str(entry) for entry in one if entry not in other]
            if alone:
                yield f"{path}: {title}: {', '.join(alone)}"
        return
    if not (isinstance(mine, dict) and isinstance(theirs, dict)):
        if mine != theirs:
            yield f"{path}: {json.dumps(mine)} is {json.dumps(theirs)}"
        return
    for name in sorted(mine | theirs):
        place = f"{path}.{name}".lstrip(".")
        if name not in mine:
            yield f"{place} is missing"
        elif name not in theirs:
            yield f"{place} is only in the stubs"
        else:
            yield from differences(place, mine[name], theirs[name])


# --- what is printed --------------------------------------------------------------------------------------------------


def report(found: Comparison) -> str:
    """The comparison as text."""
    lines = [f"The embedded host beside ComfyUI {found.version}"]
    lines += ["`A is B`: A in the embedded host, B in ComfyUI", "", "comfy_api's io and ui, as they run:"]
    if found.sockets is None:
        lines.append(f"  not compared: ComfyUI's cannot be imported here ({found.why})")
    else:
        lines += [f"  {line}" for line in found.sockets or ["the same"]]
    if found.missing_modules:
        lines += ["", *wrapped("Modules that ComfyUI has not: ", found.missing_modules)]
    if found.more_modules:
        lines += ["", *wrapped("Modules that only ComfyUI has: ", found.more_modules)]
    for difference in found.modules:
        lines += ["", difference.module]
        lines += wrapped("  only in ComfyUI: ", difference.only_comfyui)
        lines += wrapped("  only in the stubs: ", difference.only_stubs)
        lines += [f"  {change}" for change in difference.changed]
    return "\n".join(lines)


def wrapped(title: str, names: list[str]) -> list[str]:
    """A title and names, in lines that fit."""
    lines: list[str] = []
    for name in names:
        if not lines or len(lines[-1]) + len(name) + 1 > WIDTH:
            lines.append((" " * len(title) if lines else title) + f"{name},")
        else:
            lines[-1] += f" {name},"
    return [line if number < len(lines) - 1 else line.rstrip(",") for number, line in enumerate(lines)]


def as_json(found: Comparison) -> str:
    """The comparison for programs."""
    return json.dumps(asdict(found), indent=2)
