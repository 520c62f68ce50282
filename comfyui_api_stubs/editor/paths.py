"""Checks file names from requests: a path must stay inside its folder, on every operating system."""

from __future__ import annotations

import os
import re
import unicodedata
from urllib.parse import unquote

LONGEST = 255  # bytes in one part of a path
DEEPEST = 32  # folders in one another, with the file
# Characters that look like a path separator or that some system turns into one. (NFKC covers the full-width ones, but
# not these.)
_LIKE_SEPARATORS = str.maketrans(
    dict.fromkeys("\u2044\u2215\u29f8\u2571", "/") | dict.fromkeys("\u2216\u29f5\u29f9\ufe68\uff3c", "\\")
)
_DEVICES = re.compile(
    r"(con|prn|aux|nul|conin\$|conout\$|clock\$|(com|lpt)[0-9\u00b9\u00b2\u00b3])(\.|$)", re.IGNORECASE
)
_U_CODES = re.compile(r"%u([0-9a-fA-F]{4})")
_CONTROL = re.compile(r"[\x00-\x1f\x7f\ufffd\u202a-\u202e\u2066-\u2069\ufeff\u200b\u2028\u2029]")


class PathRefused(ValueError):
    """A name leaves its folder, or is not a plain file name on some operating system."""


def inside(folder: str, *names: str) -> str:
    """The absolute path of `names` below `folder`; empty names are ignored. The file need not exist.

    Raises PathRefused if a name is absolute, goes up a folder, leaves the folder through a symbolic link, or holds
    something special to a file system: a drive, stream, device, control character, or an encoded or look-alike
    separator.
    """
    for name in names:
        _check(name)
    path = os.path.abspath(os.path.join(folder, *names))
    root = os.path.realpath(folder)
    try:
        real = os.path.realpath(path)
        stays = os.path.commonpath([root, real]) == root
    except (ValueError, OSError) as error:
        raise PathRefused(f"{names[-1]!r} is not the name of a file: {error}") from error
    if not stays:
        raise PathRefused(f"{'/'.join(names)!r} is outside its folder")
    return path


def single(name: str) -> str:
    """Check that a name is a file name without folders; raises PathRefused if not."""
    _check(name)
    if not name or "/" in name or name in (".", ".."):
        raise PathRefused(f"{name!r} is not the name of one file")
    return name


def _check(name: str) -> None:
    """Raise PathRefused if a name is not a plain relative path, also after URL-decoding or Unicode normalization."""
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise PathRefused(f"{name!r} is not text") from error
    for form in _forms(name):
        if _CONTROL.search(form):
            raise PathRefused(f"{name!r} holds a control character")
        if "\\" in form or ":" in form or form.startswith(("/", "~")):
            raise PathRefused(
                f"{name!r} is not a path below a folder: no drive, no backslash, no colon, no leading / or ~"
            )
        for part in form.split("/"):
            if _climbs(part):
                raise PathRefused(f"{name!r} leaves its folder")
            if _DEVICES.match(part.strip()):
                raise PathRefused(f"{name!r} is the name of a device")
    if name.count("/") >= DEEPEST:
        raise PathRefused(f"{name[:60]!r}… is nested more than {DEEPEST} folders deep")
    for part in name.split("/"):
        if part != part.rstrip(" .") and part != ".":
            raise PathRefused(f"{name!r}: no part of a path may end in a space or a dot")
        if len(part.encode()) > LONGEST:
            raise PathRefused(f"a part of {name[:60]!r}… is longer than {LONGEST} bytes")


def identifier(value: str) -> str:
    """Check an id, which is looked up in a table and never used as a path. Raises PathRefused if it holds ".." or
    control characters.
    """
    for form in _forms(value):
        if _CONTROL.search(form) or any(_climbs(part) for part in form.replace("\\", "/").split("/")):
            raise PathRefused(f"{value!r} is not a valid id")
    return value


def _climbs(part: str) -> bool:
    """Whether a part of a path is "..", or something that a system may read as "..": more dots, spaces around them, or
    ;parameters after them.
    """
    plain = part.split(";")[0]
    return ".." in plain and not plain.replace(".", "").strip()


def _forms(name: str) -> set[str]:
    """All readings of a name: as it is, URL-decoded once and twice, with Microsoft's %uXXXX decoded, and each of these
    with normalized Unicode.
    """
    decoded = {name, unquote(name), unquote(unquote(name)), _U_CODES.sub(lambda found: chr(int(found[1], 16)), name)}
    return {
        form.translate(_LIKE_SEPARATORS) for text in decoded for form in (text, unicodedata.normalize("NFKC", text))
    }
