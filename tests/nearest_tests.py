"""The tests nearest to a product file: its own test file, and those that where_tests_are.toml names for it."""

from __future__ import annotations

import sys
from pathlib import Path, PurePosixPath

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest brings it

TABLE = "tests/where_tests_are.toml"
WITH_COMFYUI = "tests/with_comfyui"  # these need a real ComfyUI


def own_tests(root: Path, file: PurePosixPath) -> list[str]:
    """The test files that mirror a product file."""
    paths = (root / "tests" / file.parent).glob(f"test_{file.stem}*.py")
    return sorted(path.relative_to(root).as_posix() for path in paths)


def read_table(root: Path) -> dict[str, list[str]]:
    """{file, folder with a slash or pattern with a star: paths of the tests that the table names for it}."""
    return tomllib.loads((root / TABLE).read_text(encoding="utf-8"))


def nearest_tests(root: Path, file: PurePosixPath) -> list[str]:
    """The test files to ask first about a change of this product file; none for a file that nothing names.

    A folder's row is for files that have neither a test file of their own nor a row. What a pattern names is asked
    before them: it looks at many files, and takes little time.
    """
    rows = read_table(root)
    paths = [*own_tests(root, file), *rows.get(file.as_posix(), [])] or rows.get(f"{file.parent.as_posix()}/", [])
    for pattern, tests in rows.items():
        if "*" in pattern and file.match(pattern):
            paths = [*tests, *paths]
    return [path for path in dict.fromkeys(paths) if not path.startswith(WITH_COMFYUI)]
