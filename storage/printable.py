"""Texts for terminals and logs. Names in files of strangers (layers, dtypes, metadata, files, titles, classes) may hold
escape sequences that write to a terminal's clipboard or title, and line breaks that fake lines of a log.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence

# Controls but for tabs and line breaks, what turns the direction of text, line separators, halves of characters.
_SPECIAL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_CONTINUED = re.compile(r"\n(?![ \t\n]|$)")


def make_printable(text: str) -> str:
    """The text with special characters written as escapes (`\\x1b`). Lines after the first are indented, so that none
    looks like another message.
    """
    return _CONTINUED.sub("\n  ", _SPECIAL.sub(_escape, text))


def _escape(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def quote_command(words: Sequence[str]) -> str:
    """A command as this system's shell reads it."""
    return subprocess.list2cmdline(words) if os.name == "nt" else shlex.join(words)


def pip_install(*packages: str) -> str:
    """The command that installs packages for the Python that runs here: ComfyUI's portable and Desktop versions each
    have one of their own, which a bare `pip` does not reach.
    """
    return quote_command([sys.executable, "-m", "pip", "install", *packages])


def logger(name: str) -> logging.Logger:
    """The logger of a module: what it logs is printable."""
    log = logging.getLogger(name)
    if not any(isinstance(one, PrintableFilter) for one in log.filters):
        log.addFilter(PrintableFilter())
    return log


class PrintableFilter(logging.Filter):
    """Makes the message of every record printable."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Keep the record, with a message that is whole and printable."""
        record.msg, record.args = make_printable(record.getMessage()), None
        return True
