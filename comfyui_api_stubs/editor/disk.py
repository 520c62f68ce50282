"""The server's files on disk: one that is written appears complete or not at all, and two that are saved under one name
at the same moment do not overwrite each other.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator

MB = 1 << 20
_CANNOT_LINK = (errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EMLINK)


def read(path: str | os.PathLike[str], most: int) -> bytes:
    """The bytes of a file. Raises ValueError when it has more than `most`."""
    with open(path, "rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"it is larger than {most / MB:g} MB, which no such file should be")
    return content


def replace(path: str, chunks: Iterable[bytes]) -> None:
    """Write a file, in place of one that is there. Raises OSError that names it."""
    with draft(path, chunks) as written:
        os.replace(written, path)


def create(path: str, chunks: Iterable[bytes]) -> None:
    """Write a new file. Raises FileExistsError when something has its name, OSError that names it."""
    with draft(path, chunks) as written:
        rename_to_free(written, path)


@contextlib.contextmanager
def draft(path: str, chunks: Iterable[bytes]) -> Iterator[str]:
    """A hidden file beside `path` with this content, all of it on the disk. The block gives it its name; a draft that
    has none afterwards is removed.
    """
    name = os.path.join(os.path.dirname(path), f".{secrets.token_hex(8)}.partial")
    try:
        with open(name, "xb") as file:
            file.writelines(chunks)
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(OSError):  # there is no file whose rights it could take over
            shutil.copymode(path, name)
        yield name
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from error
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.remove(name)


def rename_to_free(source: str, target: str) -> None:
    """Rename a file to a name that nothing has. Raises FileExistsError when something has it."""
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in _CANNOT_LINK:
            raise
    else:
        os.unlink(source)
        return
    with open(target, "xb"):  # a drive without hard links: an empty file takes the name first
        pass
    try:
        os.replace(source, target)
    except OSError:
        os.unlink(target)
        raise
