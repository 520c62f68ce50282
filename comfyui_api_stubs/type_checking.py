"""Copies the embedded host's modules into a folder for type checkers: mypy takes none from inside a package."""

from __future__ import annotations

import shutil
from pathlib import Path

from . import MODULES

MARK = ".comfyui_api_stubs"  # says that the folder was written here, so that it may be written again


class NotWritten(ValueError):
    """The folder holds something else."""


def write_modules(folder: str) -> Path:
    """Write every module into a folder, and what an earlier call wrote anew. Raises NotWritten."""
    target = Path(folder).expanduser()
    if target.exists() and not target.is_dir():
        raise NotWritten(f"{target} is a file; name a folder")
    if target.is_dir() and any(target.iterdir()):
        if not (target / MARK).is_file():
            raise NotWritten(f"{target} holds something else; name a new or an empty folder")
        shutil.rmtree(target)
    shutil.copytree(MODULES, target, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    (target / ".gitignore").write_text("*\n", encoding="utf-8")
    (target / MARK).write_text("Written by `python -m comfyui_api_stubs types`, for type checkers.\n", encoding="utf-8")
    return target
