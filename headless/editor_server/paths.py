"""Where a name that came in a request may lead: only below the folder it is asked for in, whatever system it was made
for.
"""

from __future__ import annotations

import os
import re
import unicodedata
from urllib.parse import unquote

LONGEST = 255  # bytes of one component
# Characters that look like a separator or that some system folds into one (NFKC knows the full-width ones, but not
# these).
_LIKE_SEPARATORS = str.maketrans(
    dict.fromkeys("\u2044\u2215\u29f8\u2571", "/") | dict.fromkeys("\u2216\u29f5\u29f9\ufe68\uff3c", "\\")
)
_DEVICES = re.compile(
    r"(con|prn|aux|nul|conin\$|conout\$|clock\$|(com|lpt)[0-9\u00b9\u00b2\u00b3])(\.|$)", re.IGNORECASE
)
_U_CODES = re.compile(r"%u([0-9a-fA-F]{4})")
_CONTROL = re.compile(r"[\x00-\x1f\x7f\ufffd\u202a-\u202e\u2066-\u2069\ufeff\u200b\u2028\u2029]")


class PathRefused(ValueError):
    """A name that does not stay in its folder, or that means something else than a file in it on some system."""


def inside(folder: str, *names: str) -> str:
    """The absolute path of `names` below `folder`; an empty name is passed over. Nothing need be there.

    Raises PathRefused when a name is absolute, climbs, holds what a file system reads as more than a name (drives,
    streams, devices, control characters, encoded or look-alike separators), or leads out of the folder through a
    symbolic link.
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
    """A file name without any folder; raises PathRefused for everything else."""
    _check(name)
    if not name or "/" in name or name in (".", ".."):
        raise PathRefused(f"{name!r} is not the name of one file")
    return name


def _check(name: str) -> None:
    """Raise PathRefused when a name, or what it becomes once decoded or normalised, is more than a relative path."""
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
    for part in name.split("/"):
        if part != part.rstrip(" .") and part != ".":
            raise PathRefused(f"{name!r}: no part of a path may end in a space or a dot")
        if len(part.encode()) > LONGEST:
            raise PathRefused(f"a part of {name[:60]!r}… is longer than {LONGEST} bytes")


def identifier(value: str) -> str:
    """An id that is looked up in a table and never made a path; raises PathRefused when it could only be meant as one
    that climbs.
    """
    for form in _forms(value):
        if _CONTROL.search(form) or any(_climbs(part) for part in form.replace("\\", "/").split("/")):
            raise PathRefused(f"{value!r} is not a valid id")
    return value


def _climbs(part: str) -> bool:
    """Whether a part of a path is "..", or what some system takes for it: more dots, spaces around them, parameters
    after them.
    """
    plain = part.split(";")[0]
    return ".." in plain and not plain.replace(".", "").strip()


def _forms(name: str) -> set[str]:
    """The name as given, decoded once and twice (and by Microsoft's %uXXXX), and each as a system that normalises
    Unicode would see it.
    """
    decoded = {name, unquote(name), unquote(unquote(name)), _U_CODES.sub(lambda found: chr(int(found[1], 16)), name)}
    return {
        form.translate(_LIKE_SEPARATORS) for text in decoded for form in (text, unicodedata.normalize("NFKC", text))
    }
