"""Text that the editor rewrites when it queues a workflow: {a|b} choices in prompts, %date:…% and %Node.widget% in file
names.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from datetime import datetime

COMMENT = re.compile(r"/\*|//")
LINE_COMMENT = re.compile(r"//")
LINE_END = re.compile(r"[\n\r\u2028\u2029]")
ESCAPED = re.compile(r"\\([{}|])")
UNSAFE = re.compile(r'[/?<>\\:*|"\x00-\x1F\x7F]')
DATE_PARTS = re.compile(r"([dMhms])\1?|y{2,4}")
DEEPEST = 100  # nested choices
# Nodes whose filename_prefix the editor fills in before it sends the workflow.
SAVES_FILES = frozenset(
    (
        "SaveImage",
        "SaveImageAdvanced",
        "SaveSVGNode",
        "SaveVideo",
        "SaveAnimatedWEBP",
        "SaveAnimatedPNG",
        "SaveWEBM",
        "SaveAudio",
        "SaveAudioMP3",
        "SaveAudioOpus",
        "SaveAudioAdvanced",
        "SaveGLB",
        "Save3DAdvanced",
        "SaveGaussianSplat",
        "SavePointCloud",
        "CLIPSave",
        "VAESave",
        "ModelSave",
        "LoraSave",
        "SaveLatent",
    )
)


def choose(text: str, source: random.Random) -> str:
    """Resolve a dynamic prompt: remove its comments and pick one option of every {a|b|…}, also of nested ones.

    Raises ValueError if they are nested more than 100 deep.
    """
    if _depth(text) > DEEPEST:
        raise ValueError(f"choices {{a|b}} are nested more than {DEEPEST} deep: {text[:60]!r}")
    return ESCAPED.sub(r"\1", _choose(_without_comments(text), source))


def _without_comments(text: str) -> str:
    """The text without /* blocks */ and without what follows // on a line; a block that nothing closes stays."""
    kept: list[str] = []
    position, opening = 0, COMMENT
    start = opening.search(text)
    while start is not None:
        end = _end_of_comment(text, start)
        if end is None:
            opening = LINE_COMMENT  # nothing closes a block from here on
            start = opening.search(text, start.start() + 1)
            continue
        kept.append(text[position : start.start()])
        position = end
        start = opening.search(text, position)
    return "".join([*kept, text[position:]])


def _end_of_comment(text: str, start: re.Match[str]) -> int | None:
    """Where a comment ends; None for a block that nothing closes."""
    if start.group() == "//":
        line_end = LINE_END.search(text, start.end())
        return line_end.start() if line_end else len(text)
    closing = text.find("*/", start.end())
    if closing < 0:
        return None
    return closing + len("*/")


def _depth(text: str) -> int:
    """How deep the blocks are nested."""
    deepest = depth = 0
    for letter in text:
        if letter == "{":
            depth = depth + 1
        else:
            if letter == "}":
                depth = max(0, depth - 1)
        deepest = max(deepest, depth)
    return deepest


def fill_in(text: str, widget: Callable[[str, str], str | None], now: datetime) -> str:
    """Replace %date:FORMAT% and %Node.widget% in a file name prefix; anything else stays, as the host replaces %width%
    and others.
    """

    def replace(match: re.Match[str]) -> str:
        parts = match.group(1).split(".")
        if len(parts) == 2:
            value = widget(parts[0], parts[1])
            if value is None:
                return match.group(0)
            return UNSAFE.sub("_", value)
        if match.group(1).startswith("date:"):
            return _date(match.group(1)[len("date:") :], now)
        return match.group(0)

    return re.sub(r"%([^%]+)%", replace, text)


def _choose(text: str, source: random.Random) -> str:
    """Resolve the choices of a text without comments; an unclosed block ends at the end of the text."""
    parts: list[str] = []
    position = 0
    while position < len(text):
        if text[position] == "\\":
            parts.append(text[position : position + 2])
            position += 2
        elif text[position] == "{":
            options, position = _block(text, position + 1)
            parts.append(choose(options[source.randrange(len(options))], source))
        else:
            parts.append(text[position])
            position += 1
    return "".join(parts)


def _block(text: str, at: int) -> tuple[list[str], int]:
    """The options of the block that starts at `at`, and the position after it."""
    options: list[str] = []
    current: list[str] = []
    depth = 0
    while at < len(text):
        letter = text[at]
        at += 1
        if letter == "\\":
            current.append(letter + text[at : at + 1])
            at += 1
            continue
        if letter == "{":
            depth += 1
        elif letter == "}":
            if not depth:
                break
            depth -= 1
        elif letter == "|" and not depth:
            options.append("".join(current))
            current = []
            continue
        current.append(letter)
    return [*options, "".join(current)], at


def _date(pattern: str, now: datetime) -> str:
    parts = {"d": now.day, "M": now.month, "h": now.hour, "m": now.minute, "s": now.second}

    def replace(match: re.Match[str]) -> str:
        text = match.group(0)
        if text[0] == "y":
            return {2: str(now.year)[2:], 4: str(now.year)}.get(len(text), text)
        return str(parts[text[0]]).rjust(len(text), "0")

    return DATE_PARTS.sub(replace, pattern)
