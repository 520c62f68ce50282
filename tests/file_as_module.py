"""Imports a Python file as a module of a package that it does not lie in: families and kinds that only tests have."""

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType


@contextmanager
def file_as_module(file: Path, package: str) -> Iterator[ModuleType]:
    """Import `file` as if it lay in `package`, whose modules it may import by relative names; forget it afterwards."""
    name = f"{package}.{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        del sys.modules[name]
