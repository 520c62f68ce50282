"""The table: every number, and by name what failed, was cut, or cannot be done."""

from gpu_parts.processes import CANNOT, CUT, DONE, FAILED, CaseResult, PartResult
from gpu_parts.report import as_json, markdown

FACTS = {"device": "a GPU", "torch": "2.13", "python": "/usr/bin/python3"}
ROWS = [
    {
        "name": "apply",
        "value": 0.01234,
        "unit": "s",
        "ratio": 1.5,
        "bound": "at most 1",
        "broken": True,
        "note": "in copies | equal to 2^-7",
    },
    {"name": "memory", "value": 12.0, "unit": "MB", "ratio": None, "bound": "checked", "broken": False, "note": ""},
]


def parts():
    return [
        PartResult("lane", "The lane", 3.0, 15.0, [CaseResult("copy", DONE, "", 2.5, 1234.5, ROWS)]),
        PartResult(
            "stack",
            "Stacks",
            9.0,
            10.0,
            [
                CaseResult("bf16", CUT, "the part's 10 s were over"),
                CaseResult("fp8", CANNOT, "this device has no fp8"),
                CaseResult("4 LoRAs", FAILED, "AssertionError: a | b\nmore", rows=ROWS[1:]),
            ],
        ),
    ]


def test_the_table():
    text = markdown(FACTS, parts(), 12.4)
    assert text.startswith("# Graft on a GPU\n\n- torch: 2.13\n- python: /usr/bin/python3\n\n12 seconds in all.\n")
    assert "| The lane (`lane`) | done | 3 of 15 |" in text
    assert "| Stacks (`stack`) | 1 cut, 1 not on this device, 1 FAILED | 9 of 10 |" in text
    assert "| copy | apply | 0.01234 s | 1.5 | **at most 1** | in copies \\| equal to 2^-7 |" in text
    assert "| copy | whole, with setting up | 2.5 s | | | peak memory 1,234 MB |" in text
    assert "| 4 LoRAs | memory | 12 MB |  | checked |  |" in text


def test_what_failed_comes_first():
    lines = markdown(FACTS, parts(), 12.4).partition("## Not done")[2].splitlines()
    rows = [line for line in lines if line.startswith("| ")][1:4]
    assert rows == [
        "| FAILED | stack: 4 LoRAs | AssertionError: a \\| b more |",
        "| cut | stack: bf16 | the part's 10 s were over |",
        "| not on this device | stack: fp8 | this device has no fp8 |",
    ]


def test_nothing_is_missing_where_all_is_done():
    assert "Not done" not in markdown(FACTS, parts()[:1], 3.0)


def test_the_json_has_every_number():
    found = as_json(FACTS, parts(), 12.4)
    assert found["device"] == "a GPU" and found["seconds"] == 12.4
    assert [part["status"] for part in found["parts"]] == [DONE, FAILED]
    assert found["parts"][0]["cases"][0]["rows"] == ROWS and found["parts"][0]["cases"][0]["peak_mb"] == 1234.5
