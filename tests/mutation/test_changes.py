"""The changes of a small source: all that should be there, none of a text, and each of them is Python."""

from pathlib import Path

import pytest
from graft_nodes.tests.mutation.changes import changes, is_python


def changed(source):
    """{the source with each change}."""
    body = source.encode()
    return {change.applied(body).decode() for change in changes(body)}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("a < b", {"(a <= b)"}),
        ("a == b != c", {"(a != b != c)", "(a == b == c)"}),
        ("x = a + 2", {"x = (a - 2)", "x = a + 3"}),
        ("x = a and not b", {"x = (a or not b)", "x = a and (b)"}),
        ("x = -y", {"x = (y)"}),
        ("x += 1", {"pass", "x += 2"}),
        ("x.y = True", {"pass", "x.y = False"}),
        ("x = 'key'", {"x = 'XXkey'"}),
        ("f(x)", {"pass"}),
        ("if a:\n    f()", {"if (not (a)):\n    f()", "if a:\n    pass"}),
        ("if not a:\n    x = y", {"if (a):\n    x = y"}),
        ("x = [a for a in b if a]", {"x = [a for a in b if (not (a))]"}),
        ("for a in b:\n    break", {"for a in b:\n    continue"}),
        ("def f(a=1):\n    return a", {"def f(a=2):\n    return a", "def f(a=1):\n    return None"}),
        ("if a:\n    raise ValueError('no')", {"if (not (a)):\n    raise ValueError('no')", "if a:\n    pass"}),
        ("é = 'ü'; x = 1", {"é = 'XXü'; x = 1", "é = 'ü'; x = 2"}),
    ],
)
def test_what_is_changed(source, expected):
    assert changed(source) == expected


@pytest.mark.parametrize(
    "source",
    [
        '"""A docstring."""',
        "def f():\n    '''A docstring.'''",
        "def f(a: 'Text' = None) -> 'Text':\n    return",
        "x: Literal['a', 1]",
        "@dataclass(frozen=True)\nclass A:\n    pass",
        "log.warning('slow')",
        "print('a text', 1)",
        "x = f'{a} of {b + 1}'",
        "x = 'a text with spaces'",
        "x = Input(tooltip='Short', display_name='Rank')",
        "from a import b",
        "if TYPE_CHECKING:\n    x = 1",
        "if sys.platform == 'win32':\n    x = 1",
        "return",
    ],
)
def test_what_stays(source):
    assert changed(source) == set()


def test_every_change_of_a_real_file_is_python_and_another_text():
    body = Path(__file__).with_name("trials.py").read_bytes()
    found = changes(body)
    assert len(found) > 20 and len({change.applied(body) for change in found}) == len(found)
    assert all(is_python(change.applied(body)) and change.applied(body) != body for change in found)
    assert all(body[change.start : change.end].decode() == change.before for change in found)


def test_what_is_no_python_is_told():
    assert not is_python(b"def f(:")
