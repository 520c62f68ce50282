"""What strangers' files name reaches terminals and logs as text, never as commands or faked lines."""

import ast
import logging
from pathlib import Path

import pytest
from graft_nodes.storage.printable import logger, make_printable

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, Äöü 漢字 🙂\tend", "plain, Äöü 漢字 🙂\tend"),
        ("\x1b]0;owned\x07\x1b[2J", "\\x1b]0;owned\\x07\\x1b[2J"),
        ("a\rb\x00\x7f\x9b31m", "a\\rb\\x00\\x7f\\x9b31m".replace("\\r", "\\x0d")),
        ("half \ud83d, byte \udcff", "half \\ud83d, byte \\udcff"),
        ("\u202egnp.exe\u2066 \u2028x", "\\u202egnp.exe\\u2066 \\u2028x"),
        ("name\nERROR: all is lost", "name\n  ERROR: all is lost"),
        ("two:\n  one\n\n\ttwo\n", "two:\n  one\n\n\ttwo\n"),
    ],
)
def test_special_characters_are_written_as_escapes(text, shown):
    assert make_printable(text) == shown
    shown.encode()


def test_a_module_s_logger_logs_printable_text(caplog):
    log = logger("graft.test_printable")
    assert logger("graft.test_printable") is log
    with caplog.at_level(logging.INFO):
        log.warning("layer %s of %r: %d%%", "a\x1b[2J", "b", 5)
        log.info("\x1b 100%")
    assert [record.getMessage() for record in caplog.records] == ["layer a\\x1b[2J of 'b': 5%", "\\x1b 100%"]


PACKAGES = ("storage", "ema", "patches", "training", "host", "nodes", "demo", "headless")
LEVELS = {"debug", "info", "warning", "error", "exception", "critical", "log"}


def test_every_message_of_graft_goes_through_it():
    """No module logs by the root logger, or by a logger of its own; only headless/log.py prints."""
    found = []
    for path in (one for package in PACKAGES for one in (ROOT / package).rglob("*.py")):
        where = path.relative_to(ROOT).as_posix()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if called in {f"logging.{level}" for level in LEVELS}:
                found.append(f"{where}:{node.lineno} {called}")
            if called == "logging.getLogger" and node.args and where != "storage/printable.py":
                found.append(f"{where}:{node.lineno} {called}")
            if called == "print" and where != "headless/log.py" and not where.startswith("demo/"):  # scripts
                found.append(f"{where}:{node.lineno} {called}")
    assert not found
