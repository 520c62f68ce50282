"""docs/families.md has the families that the tests try, and what their results say."""

import pytest
from graft_nodes.tests.with_comfyui import tiny_families, write_families

TEXT = write_families.DOCUMENT.read_text(encoding="utf-8")
ROWS = [line.strip("| ").split(" | ") for line in TEXT.splitlines() if line.startswith("| ")]


def test_every_family_has_a_title():
    assert tiny_families.TITLES.keys() == tiny_families.EVERY.keys()
    assert len(set(tiny_families.TITLES.values())) == len(tiny_families.TITLES)


def test_every_family_has_a_row_with_every_column():
    heading, *rows = ROWS
    assert heading == ["Model", "ComfyUI", *(title for title, _ in write_families.COLUMNS.values())]
    assert [row[0] for row in rows] == list(tiny_families.TITLES.values())
    assert all(len(row) == len(heading) for row in rows)


def test_the_table_claims_nothing_that_fails():
    assert not [row for row in ROWS if write_families.FAILED in " ".join(row)]


@pytest.fixture
def hosts():
    def cells(outcome, says=""):
        return {column: [{"outcome": outcome, "says": says}] for column in write_families.COLUMNS}

    old = {"sd1": cells("passed"), "krea2": cells("skipped", "this ComfyUI has no Krea2"), "flux": cells("passed")}
    new = {"sd1": cells("passed", "no"), "krea2": cells("passed"), "flux": cells("passed")}
    new["flux"]["todo"].append({"outcome": "failed", "says": ""})
    return [{"comfyui": "1.0", "families": old}, {"comfyui": "2.0", "families": new}]


def test_a_table_says_what_each_host_found(hosts):
    lines = {line.split(" | ")[0]: line for line in write_families.document(hosts).splitlines()}
    assert lines["| SD 1.x"].startswith("| SD 1.x | 1.0, 2.0 | ✓ (1.0), no (2.0) | ")
    assert lines["| Krea 2"].startswith("| Krea 2 | 2.0 | ✓ | ✓ | ")
    assert "| ✓ (1.0), ✗ (2.0) |" in lines["| Flux.1 dev"]
    assert lines["| SD 1.x"].count("none") == lines["| Krea 2"].count("none") == 1  # no clips
    assert lines["| Flux.2"].startswith("| Flux.2 | none of them has it | untried | ")


def test_clips_are_tried_with_families_that_have_frames():
    assert all(len(tiny_families.EVERY[name].latent) == 4 for name in tiny_families.CLIPS)
