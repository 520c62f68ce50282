"""`check`: it says what would run and what is wrong, runs nothing, and exports what the editor would."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from graft_nodes.comfyui_api_stubs.tests.workflows.recorded import FOLDER, recorded_catalogue
from graft_nodes.headless import checking, workflow_file
from graft_nodes.headless.embedded import HostError, workflow

from .test_command import SINK, SOURCE, any_host, command, last

LOOK_UP = recorded_catalogue()


def check(place, data, *options):
    (place / "in").mkdir(exist_ok=True)
    words, how = command(place, data, "check", "w.json", "--input", "in", "--output", "out", *options)
    done = subprocess.run(words, timeout=120, check=False, **how)
    return done.returncode, done.stdout, done.stderr


GRAPH = {"9": SINK, "1": SOURCE, "5": {"class_type": "OddSource", "inputs": {}, "_meta": {"title": "spare"}}}


def test_a_valid_workflow_is_listed_and_does_not_run(tmp_path):
    status, out, err = check(tmp_path, GRAPH, "--set", "1.number=7", "--export", "api.json")
    assert status == 0, err
    lines = out.splitlines()[2:]
    assert lines == [
        "would run: 2 nodes",
        '  node 1 "the source" (OddSource)',
        "  node 9 OddSink",
        "not needed by an output: 1 node",
        '  node 5 "spare" (OddSource)',
        "wrote api.json",
        "valid: it would run",
    ]
    assert not list((tmp_path / "out").glob("*.txt"))
    exported = json.loads((tmp_path / "api.json").read_text())
    assert exported["1"]["inputs"] == {"text": "hello", "number": 7} and set(exported) == set(GRAPH)


@any_host
def test_what_is_wrong_is_listed_and_the_rest_is_exported(tmp_path):
    graph = {**GRAPH, "1": {**SOURCE, "inputs": {"text": "hello", "number": 700}}}
    status, out, err = check(tmp_path, graph, "--export", "api.json", "--json")
    end = last(out)
    assert status == 2 and "above the maximum" in err and end["status"] == "invalid"
    assert end["nodes"] == ["1", "9"] and end["not_needed"] == ["5"]
    assert json.loads((tmp_path / "api.json").read_text())["1"]["inputs"]["number"] == 700


@pytest.mark.parametrize("name", ["widgets", "subgraph"])
def test_an_export_is_what_the_editor_exports(tmp_path, name, capsys):
    paths = sorted(FOLDER.glob(f"*{name}*.editor.json"))
    for path in paths:
        graph = workflow_file.read(str(path)).graph(LOOK_UP)
        target = tmp_path / "api.json"
        checking.export(graph, str(target), sys.stdout)
        expected = Path(str(path).replace(".editor.", ".api."))
        assert json.loads(target.read_text(encoding="utf-8")) == json.loads(expected.read_text(encoding="utf-8"))
        assert workflow_file.read(str(target)).graph(LOOK_UP) == graph
    assert paths and "wrote " in capsys.readouterr().out


def test_an_export_that_cannot_be_written_is_said(tmp_path):
    with pytest.raises(HostError, match=r"--export .*none.*: cannot be written"):
        checking.export({}, str(tmp_path / "none" / "api.json"), io.StringIO())


def test_the_order_is_one_in_which_it_can_run():
    sources = {str(number): {"class_type": "OddSource", "inputs": {}} for number in range(3)}
    passes = {
        "a": {"class_type": "OddPass", "inputs": {"image": ["2", 3], "latent": ["b", 0]}},
        "b": {"class_type": "OddPass", "inputs": {"image": ["0", 3], "latent": ["1", 2]}},
        "sink": {"class_type": "OddSink", "inputs": {"image": ["a", 1], "latent": ["b", 0]}},
    }
    graph = {**passes, **sources}
    order = workflow.run_order(graph, LOOK_UP)
    assert sorted(order) == sorted(graph)
    for node_id in order:
        for _, source, _ in workflow.links(graph, node_id):
            assert order.index(source) < order.index(node_id)


def test_a_circle_has_an_order_too():
    graph = {
        "a": {"class_type": "OddPass", "inputs": {"latent": ["b", 0]}},
        "b": {"class_type": "OddPass", "inputs": {"latent": ["a", 0]}},
        "sink": {"class_type": "OddSink", "inputs": {"latent": ["b", 0]}},
    }
    assert sorted(workflow.run_order(graph, LOOK_UP)) == ["a", "b", "sink"]


def test_the_command_says_what_its_host_replaced(tmp_path):
    """The embedded host has no Conditioning Average to put there."""
    (tmp_path / "in").mkdir()
    graph = {"1": SOURCE, "2": {"class_type": "ConditioningAverage ", "inputs": {}}, "3": SINK}
    words, how = command(tmp_path, graph, "check", "w.json", "--input", "in", "--output", "out", "--export", "a.json")
    done = subprocess.run(words, timeout=180, check=False, **how)
    exported = json.loads((tmp_path / "a.json").read_text())["2"]["class_type"]
    replaced = "GRAFT_TEST_COMFYUI" in os.environ
    assert exported == ("ConditioningAverage" if replaced else "ConditioningAverage ")
    assert ("replaced: 'ConditioningAverage ' is 'ConditioningAverage' in this ComfyUI" in done.stdout) == replaced
    assert ("this host has no node 'ConditioningAverage '" in done.stderr) != replaced
