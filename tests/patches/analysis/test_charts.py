"""What the pictures of LoRA Effect and LoRA Conflicts show: lengths, colors and places, read from their pixels."""

import pytest
import torch
from graft_nodes.patches.analysis.charts import Bar, BarChart, CellTable, draw_bars, draw_cells, to_latin_1

WORDS = "名 naïve"


def blue(picture):
    """Where strong bars and cells of positive numbers are."""
    return (picture[0, ..., 2] - picture[0, ..., 0] > 0.4) & (picture[0, ..., 0] < 0.2)


def red(picture):
    return picture[0, ..., 0] - picture[0, ..., 2] > 0.5


def runs(mask):
    """(first, last) of each run of columns in which something is."""
    columns = [place for place, is_there in enumerate(mask.any(0).tolist()) if is_there]
    starts = [place for place in columns if place - 1 not in columns]
    ends = [place for place in columns if place + 1 not in columns]
    return list(zip(starts, ends, strict=True))


def test_bars_are_as_high_as_their_values_and_all_charts_have_one_scale():
    first = BarChart(WORDS, [Bar("IN01", 0.4), Bar("M00", 0.2), Bar("OUT03", 0.1, strong=False), Bar("BASE", 0.0)])
    picture = draw_bars([first, BarChart("second", [Bar("IN01", 0.1)])])
    half = picture.shape[1] // 2
    upper, lower = blue(picture[:, :half]), blue(picture[:, half:])
    (one, two), (below,) = runs(upper), runs(lower)
    high = [int(upper[:, start].sum()) for start, _ in (one, two)]
    assert high[1] == pytest.approx(high[0] / 2, abs=2) and int(lower[:, below[0]].sum()) == pytest.approx(
        high[0] / 4, abs=2
    )
    assert below == one and two[0] - one[0] > one[1] - one[0] > 20  # beside each other, and in the same place below
    pale = (picture[0, :half, :, 2] - picture[0, :half, :, 0] > 0.1) & ~upper
    assert any(start > two[1] and end - start > 20 for start, end in runs(pale))


def test_bars_without_any_effect_and_no_chart_at_all_are_drawn():
    flat = draw_bars([BarChart("nothing", [Bar("IN01", 0.0)])])
    assert flat.shape[0] == 1 and not blue(flat)[: flat.shape[1] // 2].any()
    assert draw_bars([]).shape == draw_bars([BarChart("nothing", [])]).shape


def test_cells_are_red_below_0_blue_above_and_gray_where_nothing_is():
    table = CellTable([WORDS], ["IN01", "M00", "OUT03", "BASE"], [("1 and 2", [-1.0, 1.0, None, 0.0])])
    picture = draw_cells(table)
    (negative,), (positive,) = runs(red(picture)), runs(blue(picture))
    width = negative[1] - negative[0]
    assert width > 20 and 0 < positive[0] - negative[1] < 4 and positive[1] - positive[0] == pytest.approx(width, abs=2)
    last = int(blue(picture).any(1).nonzero()[-1])  # nothing is written over the cell's lower edge
    assert blue(picture)[last, positive[0] : positive[1] + 1].all()
    row = int(red(picture).any(1).nonzero()[0]) + 2
    beside = [picture[0, row, positive[1] + 3 + width // 8 + number * (width + 1)] for number in (0, 1)]
    paper = picture[0, 0, 0]
    assert not torch.allclose(beside[0], paper, atol=0.02) and torch.allclose(beside[1], paper, atol=0.02)


def test_cells_are_darker_the_stronger_the_number():
    dark = []
    for value in (0.05, 0.25, 0.5, 1.0, 2.0):
        picture = draw_cells(CellTable([], ["a"], [("1 and 2", [value])]))
        top = int((picture[0, ..., 0] < 0.97).any(1).nonzero()[0])
        dark.append(float(picture[0, top + 2, 90].mean()))
    assert dark[0] > dark[1] > dark[2] > dark[3] == dark[4]


def test_lines_are_below_each_other_in_their_order():
    values = [[1.0], [-1.0], [1.0]]
    picture = draw_cells(CellTable([], ["a"], [(f"{n}", line) for n, line in enumerate(values)]))
    above, middle = blue(picture).any(1).nonzero().flatten().tolist(), red(picture).any(1).nonzero().flatten().tolist()
    assert above[0] < middle[0] < middle[-1] < above[-1]


def test_the_name_of_a_line_is_beside_its_cells():
    picture = draw_cells(CellTable([], ["a"], [("first", [0.0]), ("1 and 2", [1.0])]))
    cells = blue(picture).any(1).nonzero().flatten().tolist()
    left = int(blue(picture).any(0).nonzero()[0])
    ink = (picture[0, :, :left].amax(2) < 0.5).any(1).nonzero().flatten().tolist()
    beside = [row for row in ink if cells[0] <= row <= cells[-1]]
    assert len(beside) > 5 and max(ink) == max(beside)  # the last name ends within its line


def test_numbers_stand_in_their_cells_and_can_be_read():
    """Light on dark cells, dark on light ones."""
    dark = draw_cells(CellTable([], ["a"], [("1 and 2", [1.0])]))
    rows, columns = blue(dark).nonzero(as_tuple=True)
    dark_cell = dark[0, rows.min() : rows.max(), columns.min() : columns.max()]
    assert int((dark_cell.amin(-1) > 0.8).sum()) > 15
    light = draw_cells(CellTable([], ["a"], [("1 and 2", [0.1])]))
    light_cell = light[0, rows.min() : rows.max(), columns.min() : columns.max()]
    assert int((light_cell.amax(-1) < 0.5).sum()) > 15


def test_texts_have_only_characters_that_the_font_has():
    assert to_latin_1(WORDS) == "? naïve"
