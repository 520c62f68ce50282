"""A batch: a workflow run once for each row of a CSV table, with each row's result kept as soon as there is one."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..storage.atomic import write_whole
from ..storage.bounded_read import MB, read_bounded
from ..storage.digest import sha256_of_json
from .command_error import CommandError
from .embedded import HostError, Problem

MOST_BYTES = 20 * MB  # of a table
MOST_RESULTS = 1000 * MB  # of a file of results
DONE = "done"
OTHER_SEPARATORS = (";", "\t")  # what some spreadsheets write


@dataclass(frozen=True)
class Row:
    """One row of the table: its number (the first one below the header is 1) and what it sets, as --set does."""

    number: int
    assignments: tuple[str, ...]


@dataclass
class Results:
    """The results of a table's rows, one JSON object a line in a file beside it: TABLE.results.jsonl."""

    path: Path
    rows: dict[int, dict[str, Any]] = field(default_factory=dict)

    def has(self, row: Row, run: str) -> bool:
        """Whether the row is done, with the same workflow and the same values."""
        kept = self.rows.get(row.number, {})
        return kept.get("status") == DONE and kept.get("run") == run

    def keep(self, row: Row, run: str, report: dict[str, Any]) -> None:
        """Write down what came of a row. Raises HostError when that cannot be."""
        self.rows[row.number] = {"row": row.number, "run": run, "set": list(row.assignments), **report}
        try:
            self._write()
        except OSError as error:
            raise HostError(f"row {row.number}: {_unwritable(self.path, error)}") from error

    def check_place(self) -> None:
        """Write what is there already, so that a place where nothing can be written is said before a row runs. Raises
        HostError.
        """
        try:
            self._write()
        except OSError as error:
            raise HostError(f"{_unwritable(self.path, error)}; nothing was run") from error

    def _write(self) -> None:
        lines = [json.dumps(self.rows[number], default=str) + "\n" for number in sorted(self.rows)]
        write_whole(self.path, [line.encode() for line in lines])


def _unwritable(path: Path, error: OSError) -> str:
    return f"the results {path} cannot be written ({error}); make room there, or move the table to another folder"


def results_path(table: str) -> Path:
    return Path(f"{table}.results.jsonl")


def identity(workflow: Any, assignments: Sequence[str], row: Row) -> str:
    """What tells a row's run from another one: the workflow, what --set sets, and the row's own values."""
    return sha256_of_json([workflow, list(assignments), list(row.assignments)])


def read_table(path: str) -> list[Row]:
    """The rows of a CSV file whose header names NODE.INPUT as --set does. An empty cell sets nothing.

    Raises CommandError that lists everything that is wrong.
    """
    try:
        text = read_bounded(path, MOST_BYTES).decode("utf-8-sig")
        if "\0" in text:
            raise csv.Error("it has NUL characters, as UTF-16 has")
        lines = list(csv.reader(io.StringIO(text, newline=None), strict=True))  # \r ends a line, too
    except OSError as error:
        raise CommandError([Problem(f"--set-from {path}: cannot be read ({error.strerror or error})")]) from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise CommandError(
            [Problem(f'--set-from {path}: not a CSV file in UTF-8 ({error}); spreadsheets save it as "CSV UTF-8"')]
        ) from error
    except ValueError as error:
        raise CommandError([Problem(f"--set-from {path}: {error}")]) from error
    header = [name.strip() for name in (lines or [[]])[0]]
    problems = _wrong_header(path, header)
    rows = []
    for number, cells in enumerate(lines[1:], 1):
        if len(cells) > len(header):
            problems.append(
                Problem(f"--set-from {path}: row {number} has {len(cells)} cells, the header {len(header)}")
            )
        pairs = [f"{name}={cell}" for name, cell in zip(header, cells, strict=False) if cell != ""]
        if cells:
            rows.append(Row(number, tuple(pairs)))
    if not rows and not problems:
        problems.append(Problem(f"--set-from {path}: no rows below the header, so nothing would run"))
    if problems:
        raise CommandError(problems)
    return rows


def read_results(table: str) -> Results:
    """What is kept of an earlier batch of this table. Raises CommandError if the file is damaged."""
    results = Results(results_path(table))
    if not results.path.exists():
        return results
    try:
        for line in read_bounded(results.path, MOST_RESULTS).decode("utf-8").splitlines():
            entry = json.loads(line)
            results.rows[int(entry["row"])] = entry
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CommandError(
            [Problem(f"{results.path}: not the results of a batch ({error}); move it away to run every row")]
        ) from error
    return results


def _wrong_header(path: str, header: Sequence[str]) -> list[Problem]:
    problems = []
    if len(header) == 1 and any(separator in header[0] for separator in OTHER_SEPARATORS):
        return [Problem(f"--set-from {path}: columns are separated by commas, and the header {header[0]!r} has none")]
    for number, name in enumerate(header, 1):
        if "." not in name.strip(".") or "=" in name:
            message = f"column {number} is headed {name!r}; expected NODE.INPUT (NODE is an id or a unique title)"
            problems.append(Problem(f"--set-from {path}: {message}"))
        elif name in header[: number - 1]:
            problems.append(Problem(f"--set-from {path}: column {number}, {name!r}, is there twice"))
    if not header:
        problems.append(Problem(f"--set-from {path}: empty; expected a header of NODE.INPUT and a row for each run"))
    return problems
