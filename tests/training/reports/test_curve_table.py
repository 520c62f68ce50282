"""A run's table: read again with Python's own reader, it holds what was measured, to the last digit."""

import csv
import io
import math

from graft_nodes.training.reports.curve_table import curve_table

HISTORY = {
    "loss": [0.1 + 0.2, 1e-7, math.nan],
    "rate": [1e-4, 2e-4, 3e-4],
    "norm": [1.5, math.inf, 2.5],
    "validation": [(0, 0.9), (2, 0.8)],
    "average_validation": [(2, 0.7)],
    "accuracy": [],
}


def test_a_row_for_each_step_and_empty_cells_where_nothing_was_measured():
    table = list(csv.DictReader(io.StringIO(curve_table(HISTORY))))
    assert [row["step"] for row in table] == ["0", "1", "2", "3"]

    def cells(name):
        return [float(row[name]) if row[name] else None for row in table]

    assert cells("loss") == [None, 0.1 + 0.2, 1e-7, None]
    assert cells("learning_rate") == [None, 1e-4, 2e-4, 3e-4]
    assert cells("gradient_norm") == [None, 1.5, None, 2.5]
    assert cells("held_out_loss") == [0.9, None, 0.8, None]
    assert cells("held_out_loss_of_average") == [None, None, 0.7, None]
    assert cells("implicit_accuracy") == [None] * 4


def test_a_run_before_its_first_step_has_a_header_alone():
    empty = {name: [] for name in HISTORY}
    header = "step,loss,learning_rate,gradient_norm,held_out_loss,held_out_loss_of_average,implicit_accuracy\n"
    assert curve_table(empty) == header
