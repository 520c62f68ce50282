"""Compares the embedded host with a ComfyUI checkout: which names there are, what parameters they take, and what the
socket types of comfy_api send to the editor.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from . import MODULES
from .source import Definition, Tree

HERE = Path(__file__).resolve().parent
LANDMARKS = ("comfyui_version.py", "comfy_api/latest/__init__.py", "nodes.py", "execution.py")
MOST_SECONDS = 300  # for importing comfy_api, which imports torch
WIDTH = 110
SOCKETS = "comfy_api's io and ui, as they run"
COLUMNS = ("only in ComfyUI", "only in the stubs", "not the same")
ADVICE = """\
only in ComfyUI     a pack that uses it is tested in a ComfyUI, or gives its tests a stand-in
only in the stubs   a pack that uses it passes its tests here and fails in this ComfyUI
not the same        a pack that passes only what both take, by name, works in both
`A is B`            A in the stubs, B in ComfyUI"""


class NotComfyUI(ValueError):
    """The folder is not a ComfyUI checkout."""


@dataclass
class Difference:
    """One module of the embedded host beside ComfyUI's: names that are only there or only here, and what is not the
    same about the others.
    """

    module: str
    only_comfyui: list[str] = field(default_factory=list)
    only_stubs: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return any(self.counts())

    def counts(self) -> tuple[int, int, int]:
        """How many there are of each of COLUMNS."""
        return len(self.only_comfyui), len(self.only_stubs), len(self.changed)


@dataclass
class Comparison:
    """What `compare` found: `sockets` are the differences of comfy_api's io and ui, as they are when they run; None,
    with `why`, when ComfyUI's could not be imported.
    """

    version: str
    modules: list[Difference]
    same_modules: list[str]
    missing_modules: list[str]
    more_modules: list[str]
    sockets: Difference | None
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
    modules: list[Difference] = []
    same: list[str] = []
    missing: list[str] = []
    for module in stubs.modules():
        if not real.has(module):
            missing.append(module)
        elif difference := compare_module(stubs, real, module):
            modules.append(difference)
        else:
            same.append(module)
    mine = set(stubs.modules())
    packages = {name.partition(".")[0] for name in mine}
    more = [name for name in real.modules() if name.partition(".")[0] in packages and name not in mine]
    sockets, why = compare_sockets(root)
    return Comparison(version, modules, same, missing, more, sockets, why)


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
                add_changes(difference, name, mine[name], found)
    return difference


def add_changes(difference: Difference, name: str, mine: Definition, theirs: Definition) -> None:
    """Add what is not the same about a name that both have. A class with bases may have its members from them,
    and ComfyUI sets values on instances that the stubs declare in the class.
    """
    if mine.kind == theirs.kind == "function" and mine.parameters != theirs.parameters:
        difference.changed.append(f"{name}({', '.join(mine.parameters)}) is {name}({', '.join(theirs.parameters)})")
    if not mine.kind == theirs.kind == "class":
        return
    for member in sorted(mine.members | theirs.members):
        path = f"{name}.{member}"
        if member in mine.members and member in theirs.members:
            add_changes(difference, path, mine.members[member], theirs.members[member])
        elif member == "__init__":
            continue
        elif member in theirs.members and not mine.bases:
            difference.only_comfyui.append(path)
        elif member in mine.members and mine.members[member].kind == "function" and not theirs.bases:
            difference.only_stubs.append(path)


def described(folder: str) -> dict[str, Any]:
    """What comfy_api of a folder says of itself, asked in a process of its own. Raises ValueError with the reason."""
    command = [sys.executable, str(HERE / "sockets.py"), folder]
    done = subprocess.run(command, capture_output=True, text=True, timeout=MOST_SECONDS, check=False, cwd=folder)
    if done.returncode:
        raise ValueError((done.stderr.strip().splitlines() or ["no reason was given"])[-1])
    return json.loads(done.stdout.splitlines()[-1])


def compare_sockets(root: Path) -> tuple[Difference | None, str]:
    """(the differences of io and ui, why they are not known)."""
    try:
        theirs = described(str(root))
    except (ValueError, subprocess.TimeoutExpired) as error:
        return None, str(error)
    difference = Difference(SOCKETS)
    add_differences(difference, "", described(MODULES), theirs)
    return difference, ""


def add_differences(difference: Difference, path: str, mine: Any, theirs: Any) -> None:
    """Add where two descriptions are not the same."""
    if isinstance(mine, list) and isinstance(theirs, list) and set(map(str, mine)) != set(map(str, theirs)):
        for title, one, other in (("only in ComfyUI", theirs, mine), ("only in the stubs", mine, theirs)):
            alone = [str(entry) for entry in one if entry not in other]
            if alone:
                difference.changed.append(f"{path}: {title}: {', '.join(alone)}")
        return
    if not (isinstance(mine, dict) and isinstance(theirs, dict)):
        if mine != theirs:
            difference.changed.append(f"{path}: {json.dumps(mine)} is {json.dumps(theirs)}")
        return
    for name in sorted(mine | theirs):
        place = f"{path}.{name}".lstrip(".")
        if name not in mine:
            difference.only_comfyui.append(place)
        elif name not in theirs:
            difference.only_stubs.append(place)
        else:
            add_differences(difference, place, mine[name], theirs[name])


# --- what is printed --------------------------------------------------------------------------------------------------


def report(found: Comparison) -> str:
    """The comparison as text: a table of the modules first, then each of them."""
    lines = [f"The embedded host (the stubs) beside ComfyUI {found.version}", "", *summary(found), "", ADVICE]
    for difference in different(found):
        lines += ["", difference.module]
        lines += wrapped("  only in ComfyUI: ", difference.only_comfyui)
        lines += wrapped("  only in the stubs: ", difference.only_stubs)
        lines += [f"  {change}" for change in difference.changed]
    if found.missing_modules:
        lines += ["", *wrapped("Modules that are only in the stubs: ", found.missing_modules)]
    if found.more_modules:
        lines += ["", *wrapped("Modules that are only in ComfyUI: ", found.more_modules)]
    return "\n".join(lines)


def different(found: Comparison) -> list[Difference]:
    """What has differences: io and ui first."""
    return [*([found.sockets] if found.sockets else []), *found.modules]


def summary(found: Comparison) -> list[str]:
    """One line a module with differences: how many of each kind."""
    width = max(map(len, [SOCKETS, *(difference.module for difference in found.modules)]))
    lines = ["  ".join(["".ljust(width), *COLUMNS])]
    if found.sockets is None:
        lines.append(f"{SOCKETS}: not compared, ComfyUI's cannot be imported here ({found.why})")
    elif not found.sockets:
        lines.append(f"{SOCKETS}: the same")
    for difference in different(found):
        counts = (str(count or "").rjust(len(title)) for count, title in zip(difference.counts(), COLUMNS, strict=True))
        lines.append("  ".join([difference.module.ljust(width), *counts]).rstrip())
    here = f"{len(found.same_modules)} the same, {len(found.missing_modules)} only in the stubs"
    lines.append(f"modules: {here}, {len(found.more_modules)} only in ComfyUI")
    return lines


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
