"""Tables of values: what they may hold, which rows are done, and a batch in a process of its own."""

import gc
import json
import signal
import subprocess
import sys
import time
import weakref

import pytest
from graft_nodes.headless import batch, workflow_file
from graft_nodes.headless.command_error import CommandError
from graft_nodes.headless.embedded import HostError, workflow
from graft_nodes.tests.headless.test_command import GOOD, SINK, SOURCE, command, last, run, told


def table(folder, text):
    path = folder / "table.csv"
    path.write_text(text)
    return str(path)


def test_the_header_names_inputs_and_an_empty_cell_sets_nothing(tmp_path):
    rows = batch.read_table(table(tmp_path, '\ufeff1.number,"Save, last.name"\n3,a\n,b\n\n"{""x"": 1}",\n'))
    assert rows == [
        batch.Row(1, ("1.number=3", "Save, last.name=a")),
        batch.Row(2, ("Save, last.name=b",)),
        batch.Row(4, ('1.number={"x": 1}',)),
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "empty; expected a header"),
        ("1.number\n", "no rows below the header"),
        ("number\n3\n", "column 1 is headed 'number'; expected NODE.INPUT"),
        ("1.number=,2.name\n3,a\n", "column 1 is headed '1.number='"),
        ("1.number,1.number\n3,4\n", "column 2, '1.number', is there twice"),
        ("1.number\n3,4\n", "row 1 has 2 cells, the header 1"),
        ("1.number;1.text\n3;4\n", "columns are separated by commas, and the header '1.number;1.text' has none"),
        ('1.number\n"3\n', "not a CSV file in UTF-8"),
    ],
)
def test_a_table_that_cannot_be_run_says_why(tmp_path, text, expected):
    with pytest.raises(CommandError) as error:
        batch.read_table(table(tmp_path, text))
    assert "--set-from" in str(error.value) and expected in str(error.value)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "cp1252"])
def test_a_table_in_another_encoding_is_refused_with_what_to_do(tmp_path, encoding):
    text = "1.number,2.name\n3,a\n" + ("4,é\n" if encoding == "cp1252" else "")
    (tmp_path / "table.csv").write_bytes(text.encode(encoding))
    with pytest.raises(CommandError, match=r'not a CSV file in UTF-8 .*; spreadsheets save it as "CSV UTF-8"'):
        batch.read_table(str(tmp_path / "table.csv"))


@pytest.mark.parametrize("end", ["\r\n", "\r"])
def test_lines_end_as_on_any_system(tmp_path, end):
    (tmp_path / "table.csv").write_bytes(f"1.number{end}3{end}4{end}".encode())
    assert batch.read_table(str(tmp_path / "table.csv")) == [
        batch.Row(1, ("1.number=3",)),
        batch.Row(2, ("1.number=4",)),
    ]


def test_a_table_of_more_than_20_MB_is_refused_by_its_size(tmp_path):
    path = table(tmp_path, "1.number\n3\n")
    with open(path, "r+b") as file:
        file.truncate(20 * 1024**2 + 1)
    with pytest.raises(CommandError, match="larger than 20 MB"):
        batch.read_table(path)


def test_a_row_is_done_with_the_same_workflow_and_values_only(tmp_path):
    path = table(tmp_path, "1.number\n3\n")
    (row,) = batch.read_table(path)
    results = batch.read_results(path)
    results.keep(row, batch.identity({"1": {}}, [], row), {"status": "done"})
    again = batch.read_results(path)
    assert again.has(row, batch.identity({"1": {}}, [], row))
    assert not again.has(row, batch.identity({"2": {}}, [], row))
    assert not again.has(row, batch.identity({"1": {}}, ["1.text=x"], row))
    assert not again.has(batch.Row(1, ("1.number=4",)), batch.identity({"1": {}}, [], batch.Row(1, ("1.number=4",))))


def test_results_that_are_none_are_left_alone(tmp_path):
    path = table(tmp_path, "1.number\n3\n")
    batch.results_path(path).write_text("no JSON\n")
    with pytest.raises(CommandError, match="not the results of a batch"):
        batch.read_results(path)
    assert batch.results_path(path).read_text() == "no JSON\n"


def test_results_that_cannot_be_written_end_the_batch_before_it_begins(tmp_path):
    (tmp_path / "in").mkdir()
    table(tmp_path, "1.number\n3\n4\n")
    (tmp_path / "table.csv.results.jsonl.partial").mkdir()  # a folder in the place of the draft
    status, out, err = run(tmp_path, GOOD, "--set-from", "table.csv", "--json")
    assert status == 1 and "Traceback" not in err
    assert "table.csv.results.jsonl" in err and "cannot be written" in err and "nothing was run" in err
    assert last(out)["status"] == "failed" and "cannot be written" in last(out)["errors"][0]["message"]
    assert not list((tmp_path / "out").glob("*.txt"))


def test_a_disk_that_fills_up_meanwhile_is_said_with_the_row(tmp_path, monkeypatch):
    results = batch.Results(tmp_path / "results.jsonl")
    results.keep(batch.Row(1, ("1.a=1",)), "id", {"status": "done"})

    def full(*arguments):
        raise OSError(28, "No space left on device", str(results.path))

    monkeypatch.setattr(batch, "write_whole", full)
    with pytest.raises(HostError, match=r"row 2: .*results.jsonl.*cannot be written .*No space left"):
        results.keep(batch.Row(2, ("1.a=2",)), "id", {"status": "done"})
    assert results.path.read_text().count("\n") == 1


def test_nothing_of_a_run_stays_in_a_process_that_runs_more(tmp_path):
    class Node:
        pass

    first = Node()
    first.itself = first
    seen = weakref.ref(first)
    (tmp_path / "w.json").write_text(json.dumps(GOOD))
    workflow_file.read(str(tmp_path / "w.json"))  # takes all there is out of the search for garbage
    assert gc.get_freeze_count() > 0
    del first
    workflow.forget()
    assert gc.get_freeze_count() == 0 and seen() is None


COUNTED = """
import sys
from graft_nodes.headless import command, workflow_file
from graft_nodes.headless.embedded import workflow
times, forget = [], workflow.forget
workflow.forget = lambda: times.append(forget())
command.main(sys.argv[1:])
print(len(times), "times")
"""


def test_a_batch_looks_for_garbage_after_every_row(tmp_path):
    image = {"class_type": "EmptyImage", "inputs": {"width": 8, "height": 8, "batch_size": 1, "color": 0}}
    graph = {"1": image, "2": {"class_type": "SaveImage", "inputs": {"images": ["1", 0], "filename_prefix": "p"}}}
    _, how = command(tmp_path, graph)
    words = [
        "run",
        "w.json",
        "--embedded",
        "--cpu",
        "--output",
        "out",
        "--set-from",
        table(tmp_path, "1.color\n1\n2\n"),
    ]
    done = subprocess.run([sys.executable, "-c", COUNTED, *words], timeout=120, check=False, **how)
    assert done.stdout.splitlines()[-1:] == ["2 times"], done.stderr


def test_a_batch_goes_on_after_a_row_that_fails_and_again_does_the_missing_rows_alone(tmp_path):
    (tmp_path / "in").mkdir()
    graph = {"1": SOURCE, "2": {**SINK, "inputs": {"name": "out", "text": ["1", 0]}}}
    text = "1.text,2.name\none,a\ntwo,not plain\nthree,c\n"
    table(tmp_path, text)
    status, out, err = run(tmp_path, graph, "--set-from", "table.csv", "--json")
    assert status == 1 and "row 2 of 3" in err and "'not plain' is not a plain name" in err
    assert [row["status"] for row in last(out)["rows"]] == ["done", "invalid", "done"]
    written = {name: (tmp_path / "out" / f"{name}.txt").stat().st_mtime_ns for name in ("a", "c")}
    assert (tmp_path / "out" / "c.txt").read_text() == "three"
    table(tmp_path, text.replace("not plain", "b"))
    status, out, err = run(tmp_path, graph, "--set-from", "table.csv")
    assert status == 0, err
    assert out.count("done before") == 2 and (tmp_path / "out" / "b.txt").read_text() == "two"
    assert {name: (tmp_path / "out" / f"{name}.txt").stat().st_mtime_ns for name in ("a", "c")} == written
    kept = [json.loads(line) for line in (tmp_path / "table.csv.results.jsonl").read_text().splitlines()]
    assert [(one["row"], one["status"]) for one in kept] == [(1, "done"), (2, "done"), (3, "done")]


def test_the_last_lines_name_the_rows_that_are_not_done(tmp_path):
    (tmp_path / "in").mkdir()
    graph = {"1": SOURCE, "2": {**SINK, "inputs": {"name": "out", "text": ["1", 0]}}}
    table(tmp_path, "2.name\nnot plain\na\nnot plain either\n")
    status, out, err = run(tmp_path, graph, "--set-from", "table.csv")
    assert status == 1, err
    assert out.splitlines()[-2:] == [
        "1 of 3 rows are done; their results are in table.csv.results.jsonl",
        "not done: row 1, 3",
    ]


@pytest.mark.skipif(sys.platform == "win32", reason="signals are sent differently there")
def test_an_interrupted_batch_goes_on_with_the_row_that_was_interrupted(tmp_path):
    (tmp_path / "in").mkdir()
    slow = {"1": {"class_type": "OddSlow", "inputs": {"steps": 1}}, "2": SINK}
    table(tmp_path, "1.steps\n2\n300\n3\n")
    options = ("run", "w.json", "--input", "in", "--output", "out", "--set-from", "table.csv")
    words, how = command(tmp_path, slow, *options)
    process = subprocess.Popen(words, **how)
    try:
        for wanted in ("row 2 of 3", "node 1"):
            while wanted not in (line := process.stdout.readline()):
                assert line, process.stderr.read()
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert f"to continue: python -m graft_nodes {' '.join(options)}" in err
    assert list(batch.read_results(str(tmp_path / "table.csv")).rows) == [1]
    status, out, err = run(tmp_path, None, "--set-from", "table.csv")
    assert status == 0, err
    assert [line for line in out.splitlines() if line.startswith("row ")] == [
        "row 1 of 3: done before",
        "row 2 of 3: 1.steps=300",
        "row 3 of 3: 1.steps=3",
    ]
    results = batch.read_results(str(tmp_path / "table.csv")).rows
    assert [results[number]["status"] for number in (1, 2, 3)] == ["done"] * 3


def test_a_row_that_changes_the_seed_alone_does_not_load_the_model_again(tmp_path):
    """The rows share what is kept of results; --cache-none keeps nothing."""
    (tmp_path / "in").mkdir()
    sampler = {"steps": 1, "cfg": 1.0, "sampler_name": "euler", "scheduler": "normal", "denoise": 1.0}
    graph = {
        "load": {"class_type": "GraftDemo", "inputs": {}},
        "words": {"class_type": "CLIPTextEncode", "inputs": {"clip": ["load", 1], "text": "a red circle"}},
        "empty": {"class_type": "EmptyLatentImage", "inputs": {"width": 64, "height": 64, "batch_size": 1}},
        "sample": {
            "class_type": "KSampler",
            "inputs": {
                **sampler,
                "seed": 1,
                "model": ["load", 0],
                "positive": ["words", 0],
                "negative": ["words", 0],
                "latent_image": ["empty", 0],
            },
        },
        "show": {"class_type": "OddSink", "inputs": {"name": "out", "latent": ["sample", 0]}},
    }
    table(tmp_path, "sample.seed\n1\n2\n")
    status, out, err = run(tmp_path, graph, "--set-from", "table.csv", "--json")
    assert status == 0, err
    assert _run_by_row(out) == [{"load", "words", "empty", "sample", "show"}, {"sample", "show"}]
    (tmp_path / "table.csv.results.jsonl").unlink()
    status, out, err = run(tmp_path, graph, "--set-from", "table.csv", "--json", "--cache-none")
    assert status == 0, err
    assert _run_by_row(out) == [set(graph), set(graph)]


def _run_by_row(out):
    """The nodes that ran for each row."""
    rows = []
    for event in told(out):
        if event["event"] == "row":
            rows.append(set())
        elif event["event"] == "node":
            rows[-1].add(event["node"])
    return rows
