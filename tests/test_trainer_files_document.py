"""docs/trainer_files.md has every trainer and layout, and what was measured."""

import pytest
from graft_nodes.tests.with_trainers import trainer_files, write_trainer_files

TEXT = write_trainer_files.DOCUMENT.read_text(encoding="utf-8")
SECTIONS = {
    section.splitlines()[0].split()[0]: [
        line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")
    ]
    for section in TEXT.split("\n## ")[1:]
}
LAYOUTS = {"SDXL", "SD 3.5", "Flux.1", "Wan 2.1", "Qwen-Image", "Z-Image"}
OF = {  # the layouts that each trainer trains
    "sd-scripts": {"SDXL", "SD 3.5", "Flux.1"},
    "OneTrainer": LAYOUTS - {"Wan 2.1"},
    "ai-toolkit": LAYOUTS,
    "musubi-tuner": {"Flux.1", "Wan 2.1", "Qwen-Image", "Z-Image"},
    "diffusers": LAYOUTS,
    "PEFT": LAYOUTS,
    "LyCORIS": LAYOUTS,
}


def test_every_trainer_has_a_section_with_the_layouts_that_it_trains():
    assert SECTIONS.keys() == OF.keys() and len(OF) == len(trainer_files.TRAINERS)
    assert {trainer: {row[0] for row in rows[1:]} for trainer, rows in SECTIONS.items()} == OF


@pytest.mark.parametrize("trainer", OF)
def test_every_row_has_every_column_and_no_error_above_the_tolerance(trainer):
    heading, *rows = SECTIONS[trainer]
    assert tuple(heading) == write_trainer_files.HEADINGS
    for row in rows:
        assert len(row) == len(heading) and int(row[2]) > 0
        assert all(float(error) <= write_trainer_files.TOLERANCE for error in row[3:6]), row


def test_the_scale_of_every_trainer_is_tabled():
    assert write_trainer_files.scales() in TEXT
    named = " ".join(row[0] for row in write_trainer_files.SCALES)
    assert {trainer for trainer in OF if trainer not in named} == set()


def row(**changes):
    errors = {"merge": 1e-7, "bypass": 2e-7, "host": 1e-7}
    plain = {"trainer": "T", "layout": "SDXL", "kind": "LoRA", "layers": 3, "errors": errors, "remark": ""}
    return {**plain, "unread": 0, "tensors": 6, "wrong": 0, "failed": "", **changes}


def result(*rows, broken=()):
    return {
        "comfyui": "1.0",
        "version": "abc",
        "trainer": "t",
        "stood_in_for": [],
        "rows": list(rows),
        "broken": list(broken),
    }


def test_the_page_says_what_comfyui_loses():
    lost = row(unread=2, wrong=1, remark="without one")
    text = write_trainer_files.document([result(row(), lost, row(failed="RuntimeError: x"))])
    assert "## T at commit abc" in text
    assert "| SDXL | LoRA | 3 | 1e-07 | 2e-07 | 1e-07 | the same |" in text
    assert "| LoRA (without one) | 3 |" in text and "does not read 2 of 6 tensors; 1 layers differ |" in text
    assert "| ends with an error |" in text


def test_what_is_wrong_is_no_page():
    high = row(errors={"merge": 1e-7, "bypass": 2e-5, "host": 1e-7})
    assert write_trainer_files.wrong([result(row())]) == []
    assert len(write_trainer_files.wrong([result(row(), high, broken=["T, SDXL, x: no"])])) == 2
