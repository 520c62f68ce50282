"""What can be wrong with a file: strategies for damaged bytes, damaged JSON and odd values."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

CORPUS = Path(__file__).parent / "corpus"
DEEP, HUGE = (
    "@deep@",
    "@huge@",
)  # in JSON text they become what Python's own writer cannot write: deep nesting, a number of 5,000 digits
_BYTES = (
    b"\0",
    b"\xff",
    b"\x7f",
    b"\x80",
    b"\0\0\0\0",
    b"\xff\xff\xff\xff",
    b"\xff" * 8,
    b"\0" * 8,
    b"\x7f\xff\xff\xff",
    b"\xff\xff\xff\x7f",
    b"\0\0\xc0\x7f",
    b"\0\0\x80\x7f",
    b"\0\0\x80\xff",
    b"\0\x7c",
    b"\xc0\x7f",
    b"\0\0\0\0\0\0\0\x80",
    b"\xff" * 7 + b"\x7f",
    b"\xed\xa0\x80",
    b"\xef\xbb\xbf",
    b"{",
    b"}",
    b"[",
    b"]",
    b'"',
    b",",
    b":",
    b"&a [*a]",
    b"!!python/object/apply:os.system ['true']",
    b"\n",
    b"\r\n",
    b"\t- ",
)
_TEXTS = (
    "",
    " ",
    "\0",
    "\ud800",
    "\U0001f600",
    "../../outside",
    "/etc/passwd",
    "C:\\x",
    "a" * 300,
    "NaN",
    "-1",
    "1e999",
    "true",
    "null",
    "{a|b}",
    "%s",
    "${x}",
    "__class__",
    "__proto__",
    "constructor",
    "model",
    "[[1]]",
    "\u202e",
    "\n",
    "%Node.widget%",
    "%date:yyyy%",
    "a,b" * 50,
)
_NUMBERS = (
    0,
    1,
    -1,
    2,
    3,
    7,
    255,
    256,
    2**31 - 1,
    -(2**31),
    2**32,
    2**53,
    2**63,
    -(2**63),
    2**64,
    10**30,
    0.5,
    -0.0,
    1e-300,
    1e308,
)
_SPECIAL = (float("nan"), float("inf"), float("-inf"), True, False, None, DEEP, HUGE)


def odd() -> st.SearchStrategy[Any]:
    """One value that nobody expects there."""
    links = st.sampled_from(
        (["1", 0], ["1", -1], [1, 99], ["", 0], [None, 0], ["1", 0.5], ["1", "0"], [["1", 0], 0], [{}, 0])
    )
    plain = st.one_of(
        st.sampled_from(_TEXTS),
        st.sampled_from(_NUMBERS),
        st.sampled_from(_SPECIAL),
        st.text(max_size=8),
        st.integers(),
    )
    nested = st.one_of(st.lists(plain, max_size=3), st.dictionaries(st.sampled_from(_TEXTS), plain, max_size=3), links)
    return st.one_of(plain, nested)


def changes(most: int, least: int) -> st.SearchStrategy[int]:
    """How many changes: few more often than many, so that what is behind the first check is reached too."""
    return st.sampled_from([max(least, count) for count in (0, 1, 1, 1, 2, most)])


def corpus(name: str) -> list[bytes]:
    """The committed files of a target, in the order of their names."""
    found = [path.read_bytes() for path in sorted((CORPUS / name).iterdir())]
    assert found, f"there is no corpus of {name}"
    return found


@st.composite
def damaged_bytes(draw: st.DrawFn, bodies: Sequence[bytes], most: int = 6, least: int = 0) -> bytes:
    """One of some files with up to `most` changes: bits, bytes, parts gone, doubled, put in, cut off, from another
    file.
    """
    body = bytearray(draw(st.sampled_from(bodies)))
    for _ in range(draw(changes(most, least))):
        at = draw(st.integers(0, max(0, len(body) - 1)))
        what = draw(st.integers(0, 7))
        if what == 0 and body:
            body[at] ^= 1 << draw(st.integers(0, 7))
        elif what == 1 and body:
            body[at] = draw(st.integers(0, 255))
        elif what == 2:
            piece = draw(st.sampled_from(_BYTES))
            body[at : at + len(piece)] = piece
        elif what == 3:
            body[at:at] = draw(st.sampled_from(_BYTES))
        elif what == 4:
            del body[at : at + draw(st.integers(1, 64))]
        elif what == 5:
            body[at:at] = body[at : at + draw(st.integers(1, 64))]
        elif what == 6:
            del body[at:]
        else:
            other = draw(st.sampled_from(bodies))
            start = draw(st.integers(0, max(0, len(other) - 1)))
            body[at:at] = other[start : start + draw(st.integers(1, 200))]
    return bytes(body)


def places(tree: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value in a JSON tree."""
    found = [at]
    if isinstance(tree, dict):
        for key, value in tree.items():
            found += places(value, (*at, key))
    elif isinstance(tree, list):
        for index, value in enumerate(tree):
            found += places(value, (*at, index))
    return found


@st.composite
def damaged_json(draw: st.DrawFn, texts: Sequence[str | bytes], most: int = 4, least: int = 0) -> Any:
    """One of some JSON texts as a value, with up to `most` changes: odd values, keys gone, renamed, values copied to
    other places.
    """
    tree = json.loads(draw(st.sampled_from(texts)))
    for _ in range(draw(changes(most, least))):
        every = places(tree)
        at = every[draw(st.integers(0, len(every) - 1))]
        what = draw(st.integers(0, 5))
        if not at:
            if what == 0:
                tree = draw(odd())
            continue
        holder = _at(tree, at[:-1])
        if what in (0, 1, 2):
            holder[at[-1]] = draw(odd())
        elif what == 3:
            del holder[at[-1]]
        elif what == 4 and isinstance(holder, dict):
            holder[draw(st.sampled_from((*_TEXTS[:12], *map(str, holder), "1", "2")))] = holder.pop(at[-1])
        else:
            source = every[draw(st.integers(0, len(every) - 1))]
            copied = json.dumps(_at(tree, source))
            if len(copied) < 20_000:
                holder[at[-1]] = json.loads(copied)
    return tree


def text_of(tree: Any, double: str = "") -> bytes:
    """JSON text with what no writer writes: deep nesting, huge numbers and, with `double`, that key twice in every
    object that has it.
    """
    text = json.dumps(tree)
    text = text.replace(f'"{DEEP}"', "[" * 3000 + "]" * 3000).replace(f'"{HUGE}"', "9" * 5000)
    if double:
        text = re.sub(rf'("{re.escape(double)}": )', r"\1null, \1", text)
    return text.encode()


def _at(tree: Any, path: Sequence[Any]) -> Any:
    for key in path:
        tree = tree[key]
    return tree
