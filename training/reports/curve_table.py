"""A run's measurements as a table in CSV, for spreadsheets and scripts. `web/curve_table.js` writes the same one."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

# The header, and what a history names it.
COLUMNS = {
    "loss": "loss",
    "learning_rate": "rate",
    "gradient_norm": "norm",
    "held_out_loss": "validation",
    "held_out_loss_of_average": "average_validation",
    "implicit_accuracy": "accuracy",
}
EVERY_STEP = ("loss", "rate", "norm")  # from step 1 on; the others are pairs (step, value)


def curve_table(history: Mapping[str, Sequence[Any]]) -> str:
    """CSV with a row for each step at which something was measured; 0 is before the first step. Cells are empty where
    nothing was measured, or no number.
    """
    columns = {}
    for header, name in COLUMNS.items():
        measured = history[name]
        columns[header] = dict(enumerate(measured, start=1) if name in EVERY_STEP else measured)
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["step", *columns])
    for step in sorted(set().union(*columns.values())):
        values = [column.get(step) for column in columns.values()]
        rows.writerow([step, *("" if value is None or not math.isfinite(value) else value for value in values)])
    return text.getvalue()
