"""The tests nearest to a product file: its own test file, and those that docs/architecture.md names for it."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath

HEADING = "## Tested elsewhere"
ROW = re.compile(r"^\| `(?P<file>[\w/.*]+)` \| (?P<tests>.+?) \|$", re.MULTILINE)
WITH_COMFYUI = "tests/with_comfyui"  # these need a real ComfyUI


def own_tests(root: Path, file: PurePosixPath) -> list[str]:
    """The test files that mirror a product file."""
    paths = (root / "tests" / file.parent).glob(f"test_{file.stem}*.py")
    return sorted(path.relative_to(root).as_posix() for path in paths)


def tested_elsewhere(root: Path) -> dict[str, list[str]]:
    """{file, folder with a slash or pattern with a star: paths of the tests that docs/architecture.md names for it}."""
    page = root / "docs" / "architecture.md"
    if not page.exists():
        return {}
    section = page.read_text(encoding="utf-8").partition(HEADING)[2].partition("\n## ")[0]
    return {row["file"]: re.findall(r"`([\w/.]+)`", row["tests"]) for row in ROW.finditer(section)}


def nearest_tests(root: Path, file: PurePosixPath) -> list[str]:
    """The test files to ask first about a change of this product file; none for a file that nothing names.

    A folder's row is for files that have neither a test file of their own nor a row. What a pattern names is asked
    before them: it looks at many files, and takes little time.
    """
    rows = tested_elsewhere(root)
    paths = [*own_tests(root, file), *rows.get(file.as_posix(), [])] or rows.get(f"{file.parent.as_posix()}/", [])
    for pattern, tests in rows.items():
        if "*" in pattern and file.match(pattern):
            paths = [*tests, *paths]
    return [path for path in dict.fromkeys(paths) if not path.startswith(WITH_COMFYUI)]
