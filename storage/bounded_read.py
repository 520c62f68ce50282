"""Reads small files whole, and refuses those that are too large for what they should be."""

from __future__ import annotations

import json
import os
import re
from typing import Any

from .regular_file import open_regular

MB = 1 << 20


def read_bounded(path: str | os.PathLike[str], most: int) -> bytes:
    """The bytes of a file. Raises ValueError when there are more than `most`, OSError as `open` does."""
    with open_regular(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"it is larger than {most / MB:g} MB, which no such file should be")
    return content


_TEXT_OR_COMMENT = re.compile(r'"(?:[^"\\]|\\.)*"|#[^\n]*')


def read_json(path: str | os.PathLike[str], most: int, has_comments: bool = False) -> Any:
    """The content of a JSON file of at most `most` bytes; `has_comments` reads past what stands behind a # up to the
    end of its line. Raises ValueError, which says why, when it cannot be read.
    """
    try:
        text = read_bounded(path, most).decode("utf-8-sig")
        if has_comments and "#" in text:
            text = _TEXT_OR_COMMENT.sub(lambda found: "" if found[0][0] == "#" else found[0], text)
        return json.loads(text)
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 text ({error.reason} at byte {error.start})") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not JSON ({error})") from error
    except OSError as error:
        raise ValueError(f"cannot be read ({error.strerror})") from error
