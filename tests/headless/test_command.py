"""The command line in processes of its own: exit status, what is printed, what is written, interruption."""

import argparse
import contextlib
import csv
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from graft_nodes.headless import hosts
from graft_nodes.headless.command import main
from PIL import Image

DRIVE = Path(__file__).parent / "drive.py"
SOURCE = {"class_type": "OddSource", "inputs": {"text": "hello", "number": 3}, "_meta": {"title": "the source"}}
SINK = {"class_type": "OddSink", "inputs": {"name": "out", "text": ["1", 0]}}
# Each real ComfyUI takes some ten seconds to start: there, only what depends on the host is run.
any_host = pytest.mark.skipif(
    "GRAFT_TEST_COMFYUI" in os.environ, reason="does not depend on the host; the embedded one has run it"
)
GOOD = {"1": SOURCE, "2": SINK}


@pytest.fixture
def place(tmp_path):
    """A folder to run in, with the input and output folders that the tests name."""
    (tmp_path / "in").mkdir()
    return tmp_path


def command(place, workflow, *options):
    if workflow is not None:
        (place / "w.json").write_text(json.dumps(workflow))
    words = [sys.executable, str(DRIVE), *options]
    environment = {key: value for key, value in os.environ.items() if key != "COMFYUI_PATH"} | {"OMP_NUM_THREADS": "1"}
    if "GRAFT_TEST_COMFYUI" in os.environ:
        environment["COMFYUI_PATH"] = os.environ["GRAFT_TEST_COMFYUI"]
    return words, {"cwd": place, "env": environment, "text": True, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}


def python_path(folder, environment):
    """PYTHONPATH with a folder in front of what an environment has there."""
    return os.pathsep.join([str(folder), *filter(None, [environment.get("PYTHONPATH")])])


def run(place, workflow, *options):
    """Run a workflow with the folders of `place`; returns (status, stdout, stderr)."""
    words, how = command(place, workflow, "run", "w.json", "--input", "in", "--output", "out", *options)
    done = subprocess.run(words, timeout=120, check=False, **how)
    return done.returncode, done.stdout, done.stderr


def told(out):
    """The events that --json printed."""
    return [json.loads(line) for line in out.splitlines()]


def last(out):
    """The last one: what came of it all."""
    end = told(out)[-1]
    assert end["event"] == "end"
    return end


def test_a_run_says_where_it_runs_then_its_progress_then_every_file(place):
    status, out, err = run(place, GOOD)
    lines = out.splitlines()
    assert status == 0, err
    assert lines[0].startswith("host: ") and lines[1].startswith("device: cpu")
    assert lines[2:4] == ['[1/2] node 1 "the source" (OddSource)', "[2/2] node 2 OddSink"]
    assert lines[4] == f"wrote {place / 'out' / 'out.txt'}" and lines[5].startswith("done in ")
    assert (place / "out" / "out.txt").read_text() == "hello"


STRANGE = "half \ud83d 🙂\x1b]0;owned\x07\x1b[2J\nERROR: faked\u202e"


@any_host
@pytest.mark.parametrize("encoding", ["cp1252", "ascii", "utf-8"])
def test_a_title_that_the_output_cannot_show_is_escaped_and_its_node_runs(place, encoding):
    words, how = command(
        place, {**GOOD, "1": {**SOURCE, "_meta": {"title": STRANGE}}}, "run", "w.json", "--output", "o"
    )
    how = {**how, "text": False, "env": {**how["env"], "PYTHONIOENCODING": encoding}}
    done = subprocess.run(words, timeout=120, check=False, **how)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.decode(encoding).splitlines() if "node 1 " in line]
    assert "half \\ud83d" in line and "\\x1b]0;owned\\x07\\x1b[2J" in line and line.endswith("(OddSource)")
    assert not re.search(rb"[\x00-\x09\x0b-\x1f\x7f]", done.stdout.replace(b"\r\n", b"\n"))


@any_host
def test_what_strangers_name_cannot_write_to_the_terminal_or_fake_a_line(place):
    odd = {"class_type": STRANGE, "inputs": {STRANGE: ["1", 0]}, "_meta": {"title": STRANGE}}
    fails = {"class_type": "OddFailure", "inputs": {"message": STRANGE}, "_meta": {"title": STRANGE}}
    for workflow in (GOOD | {"2": odd}, {"1": fails, "2": SINK}):
        words, how = command(place, workflow, "run", "w.json", "--output", "out", "--verbose")
        done = subprocess.run(words, timeout=120, check=False, **how)
        said = done.stdout + done.stderr
        assert "owned" in said
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u202e\ud800-\udfff]", said), said
        assert not re.search("^ERROR: faked", said, re.MULTILINE)


def test_what_a_node_refuses_is_said_once_at_the_inputs_that_it_names(place):
    """A host says it at every input that Optimizer Settings checks itself: sixteen times."""
    settings = {"optimizer": "adamw", "learning_rate": 1e-4, "text_encoder_rate": 0.0, "schedule": "constant"}
    settings |= {"warmup": 2000, "total_steps": 1000, "floor": 0.0, "batch_size": 1, "accumulation": 1}
    settings |= {"clip_norm": 1.0, "weight_decay": 0.01, "lora_plus": 1.0, "precision": "auto", "scale_lr": False}
    settings |= {"checkpointing": False, "offload": "none", "block_rates": "", "fused_backward": False, "options": ""}
    sink = {"class_type": "PreviewAny", "inputs": {"source": ["1", 0]}}
    status, _, err = run(place, {"1": {"class_type": "GraftOptimizer", "inputs": settings}, "2": sink})
    assert status == 2
    said = [line.strip() for line in err.splitlines() if "warmup steps is 2000" in line and "input '" in line]
    assert [re.search("input '(.*?)'", line)[1] for line in said] == ["warmup", "total_steps"], err


@any_host
def test_a_file_is_named_once_however_the_output_folder_is_spelled(place):
    image = {"class_type": "EmptyImage", "inputs": {"width": 8, "height": 8, "batch_size": 1, "color": 0}}
    graph = {"1": image, "2": {"class_type": "SaveImage", "inputs": {"images": ["1", 0], "filename_prefix": "p"}}}
    words, how = command(place, graph, "run", "w.json", "--output", "in/../out")
    done = subprocess.run(words, timeout=120, check=False, **how)
    assert [line for line in done.stdout.splitlines() if line.startswith("wrote ")] == [
        f"wrote {place / 'out' / 'p_00001_.png'}"
    ]


@any_host
def test_in_custom_nodes_the_folder_s_own_name_is_the_command(place):
    """As README says: nothing is installed, and the folder is called as its owner likes."""
    folder = place / "custom_nodes" / "ComfyUI-Graft"
    folder.parent.mkdir()
    folder.symlink_to(Path(hosts.PACKAGE).resolve())
    (place / "sitecustomize.py").write_text(
        "import sys\nsys.meta_path[:] = [one for one in sys.meta_path if 'editable' not in repr(one)]"
    )
    _, how = command(place, GOOD)
    how |= {"cwd": folder.parent, "env": {**how["env"], "PYTHONPATH": str(place)}}
    words = [sys.executable, "-m", "ComfyUI-Graft"]
    usage = subprocess.run([*words, "--help"], timeout=120, check=False, **how)
    assert usage.returncode == 0 and usage.stdout.startswith("usage: python -m ComfyUI-Graft "), usage.stderr
    done = subprocess.run([*words, "doctor", "--embedded", "--cpu", "--json"], timeout=120, check=False, **how)
    assert done.returncode == 0 and json.loads(done.stdout)["ok"], done.stderr


def test_set_and_json(place):
    status, out, err = run(place, GOOD, "--json", "--set", "the source.text=changed", "--set", "2.name=other")
    report = last(out)
    assert status == 0, err
    assert (
        report["status"] == "done"
        and report["errors"] == []
        and report["seconds"] > 0
        and report["device"].startswith("cpu")
    )
    assert report["files"] == [str(place / "out" / "other.txt")] and report["outputs"]["2"]["text"] == ["changed"]
    assert (place / "out" / "other.txt").read_text() == "changed"
    assert "host: " in err and "node 1" in err
    start, first, second, *_ = events = told(out)
    assert start == {"event": "start", "nodes": 2} and [event["event"] for event in events[:3]] == [
        "start",
        "node",
        "node",
    ]
    assert first == {"event": "node", "node": "1", "title": "the source", "class": "OddSource", "number": 1, "nodes": 2}
    assert (second["node"], second["number"]) == ("2", 2)


def test_everything_that_is_wrong_is_listed_and_nothing_runs(place):
    bad = {
        "1": {"class_type": "OddSource", "inputs": {"text": "t", "number": 1000}},
        "2": {"class_type": "OddSink", "inputs": {"text": ["1", 2]}},
        "3": {"class_type": "NoSuchNode", "inputs": {"x": ["1", 0]}},
        "4": {"class_type": "OddPass", "inputs": {"image": ["4", 1], "latent": ["1", 2], "amount": 1}},
        "5": {"class_type": "OddSink", "inputs": {"name": "not plain", "latent": ["4", 0]}},
        "6": {"class_type": "OddSink", "inputs": {"name": "good"}},
    }
    status, out, err = run(place, bad, "--json", "--set", "1.nothing=1")
    assert status == 2 and list((place / "out").iterdir()) == []
    for expected in (
        "(7 errors)",
        "--set 1.nothing=1",
        "1000 is above the maximum 100",
        "required input is missing",
        "expected STRING, got LATENT",
        "no node 'NoSuchNode'",
        "the links make a cycle",
        "'not plain' is not a plain name",
    ):
        assert expected in err, expected
    report = last(out)
    assert report["status"] == "invalid" and len(report["errors"]) == 7
    (unknown,) = (error for error in report["errors"] if error.get("node") == "3")
    assert (unknown["title"], unknown["class"]) == ("NoSuchNode", "NoSuchNode")


def test_a_node_that_fails_is_named(place):
    broken = {
        "1": {"class_type": "OddFailure", "inputs": {"message": "it broke"}, "_meta": {"title": "doomed"}},
        "2": SINK,
    }
    status, out, err = run(place, broken, "--json")
    assert status == 1 and 'node 1 "doomed" (OddFailure) failed: ValueError: it broke' in err and "Traceback" not in err
    events = told(out)
    assert [event["event"] for event in events] == ["start", "node", "error", "end"]
    (error,) = events[-1]["errors"]
    assert events[2] == {"event": "error", **error}
    assert (error["node"], error["title"], error["class"]) == ("1", "doomed", "OddFailure")
    assert (error["exception"], error["message"]) == ("ValueError", "it broke") and error["traceback"]


@pytest.mark.skipif(sys.platform == "win32", reason="signals are sent differently there")
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=any_host)])
def test_an_interruption_lets_the_node_save_and_says_how_to_go_on(place, number):
    slow = {"1": {"class_type": "OddSlow", "inputs": {"steps": 100000}}, "2": SINK}
    words, how = command(place, slow, "run", "w.json", "--input", "in", "--output", "out", "--set", "2.name=a_b")
    process = subprocess.Popen(words, **how)
    try:
        while "node 1" not in (line := process.stdout.readline()):
            assert line, process.stderr.read()
        time.sleep(0.3)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "python -m graft_nodes run w.json --input in --output out --set 2.name=a_b" in err
    assert int((place / "out" / "saved.txt").read_text()) > 0 and f"wrote {place / 'out' / 'saved.txt'}" in out
    assert not (place / "out" / "a_b.txt").exists()


DEAF = """
import time

class Deaf:
    RETURN_TYPES, FUNCTION, OUTPUT_NODE, CATEGORY = (), "run", True, "test"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {}}

    def run(self):
        time.sleep(60)
        return ()

NODE_CLASS_MAPPINGS = dict(Deaf=Deaf)
"""


@any_host
@pytest.mark.skipif(sys.platform == "win32", reason="signals are sent differently there")
def test_a_second_interruption_ends_a_node_that_does_not_look_at_the_first(place):
    (place / "deaf.py").write_text(DEAF)
    graph = {"1": {"class_type": "Deaf", "inputs": {}}}
    words, how = command(place, graph, "run", "w.json", "--output", "out", "--pack", "deaf.py")
    process = subprocess.Popen(words, **how)
    try:
        while "node 1" not in (line := process.stdout.readline()):
            assert line, process.stderr.read()
        for _ in range(2):
            time.sleep(0.5)
            assert process.poll() is None
            process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 130, err


@any_host
@pytest.mark.skipif(sys.platform == "win32", reason="signals are sent differently there")
@pytest.mark.parametrize(
    "words", [("run", "w.json"), ("doctor",), ("editor", "--no-browser", "--port", "0")], ids=lambda words: words[0]
)
def test_a_termination_while_the_host_opens_is_an_interruption(place, words):
    _, how = command(place, GOOD)
    code = (  # the signal comes inside of an import, in code that a string holds, as that of a dataclass
        "import os, sys\n"
        "from graft_nodes.headless import command, hosts\n"
        "hosts._import_embedded = lambda: exec('os.kill(os.getpid(), 15)', {'os': os})\n"
        "sys.exit(command.main(sys.argv[1:]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, *words], timeout=120, check=False, **how)
    assert done.returncode == 130 and "graft_nodes: stopped" in done.stderr and "Traceback" not in done.stderr


@any_host
@pytest.mark.skipif(sys.platform == "win32", reason="signals are sent differently there")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_while_the_command_is_imported_is_an_interruption(place, number):
    _, how = command(place, GOOD)
    code = (  # the signal comes inside of an import, in code that a string holds, as that of a dataclass
        "import os, sys\n"
        "class Stop:\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'graft_nodes.headless.batch':\n"
        f"            exec('os.kill(os.getpid(), {int(number)})', {{'os': os}})\n"
        "sys.meta_path.insert(0, Stop())\n"
        "from graft_nodes.__main__ import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, "run", "w.json"], timeout=120, check=False, **how)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "graft_nodes: stopped\n")


@any_host
def test_a_stop_that_an_import_swallows_ends_the_opening_all_the_same(place):
    from graft_nodes.headless import signals

    with pytest.raises(signals.Stopped), signals.stopping(), contextlib.suppress(BaseException):
        signal.raise_signal(signal.SIGTERM)


@any_host
@pytest.mark.parametrize(
    "words", [("run", "w.json"), ("doctor",), ("editor", "--no-browser", "--port", "0")], ids=lambda words: words[0]
)
def test_an_output_that_can_be_no_folder_is_said(place, words):
    _, how = command(place, GOOD)
    done = subprocess.run(
        [sys.executable, "-m", "graft_nodes", *words, "--cpu", "--output", "w.json"], timeout=120, check=False, **how
    )
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert f"graft_nodes: cannot create the folder {place / 'w.json'}: " in done.stderr


@any_host
def test_an_editor_workflow_runs_too(place):
    nodes = [
        {
            "id": 1,
            "type": "OddSource",
            "outputs": [{"name": "STRING", "type": "STRING"}],
            "widgets_values": ["from the editor", 4],
        },
        {
            "id": 2,
            "type": "OddSink",
            "inputs": [{"name": "text", "type": "STRING", "link": 1}],
            "widgets_values": ["x"],
            "title": "end",
        },
        {"id": 3, "type": "Note", "widgets_values": ["a note"]},
        {"id": 4, "type": "NoSuchNode", "mode": 4},
    ]
    status, _, err = run(place, {"nodes": nodes, "links": [[1, 1, 0, 2, 0, "STRING"]]}, "--set", "end.name=told")
    assert status == 0, err
    assert (place / "out" / "told.txt").read_text() == "from the editor"


@pytest.mark.parametrize(
    ("options", "status", "expected"),
    [
        (("run", "none.json"), 2, "none.json: cannot be read"),
        (("run", "w.json", "--input", "nowhere"), 1, "--input nowhere: no such folder"),
        (("run", "w.json", "--comfyui", "in"), 1, "(named by --comfyui) is not a ComfyUI"),
        (
            ("editor", "--front-end-root", "in", "--no-browser"),
            1,
            "in is not ComfyUI's front end: it has no index.html",
        ),
    ],
)
def test_what_cannot_be_done_is_said(place, monkeypatch, capsys, options, status, expected):
    monkeypatch.chdir(place)
    monkeypatch.delenv("COMFYUI_PATH", raising=False)
    (place / "w.json").write_text(json.dumps(GOOD))
    assert main(options) == status and expected in capsys.readouterr().err


@pytest.mark.parametrize("options", [("run",), ("train",), (), ("run", "w.json", "--unknown")])
def test_a_command_line_that_makes_no_sense_is_invalid(options, capsys):
    with pytest.raises(SystemExit) as left:
        main(options)
    assert left.value.code == 2 and "usage:" in capsys.readouterr().err


@any_host
def test_doctor_whatever_lies_in_the_current_folder(place):
    (place / "nodes.py").write_text("raise SystemExit(77)")
    _, how = command(place, None)
    words = [
        sys.executable,
        "-m",
        "graft_nodes",
        "doctor",
        "--embedded",
        "--cpu",
        "--input",
        "in",
        "--output",
        "out",
        "--json",
    ]
    done = subprocess.run(words, timeout=120, check=False, **how)
    report = json.loads(done.stdout)
    assert done.returncode == 0 and report["ok"] and report["device"].startswith("cpu")
    assert (
        report["versions"]["torch"]
        and report["dtypes"]["float32"] == "computes"
        and report["folders"]["output"] == str(place / "out")
    )


def test_a_malformed_set_is_said_before_a_host_opens(place, monkeypatch, capsys):
    def never(*_, **__):
        raise AssertionError("the host was opened")

    monkeypatch.chdir(place)
    monkeypatch.setattr(hosts, "open_host", never)
    (place / "w.json").write_text(json.dumps(GOOD))
    wrong = ["seed=3", "1.seed", "1.=3", ".seed=3", ""]
    options = [word for text in wrong for word in ("--set", text)]
    assert main(["run", "w.json", "--embedded", *options]) == 2
    said = capsys.readouterr().err
    assert "the command is not valid (5 errors)" in said and said.count(": expected NODE.INPUT=VALUE") == 5
    assert "--set seed=3: " in said and "--set 1.seed: " in said


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("w.json", "--pack", "nowhere"), "--pack nowhere: no such folder"),
        (("w.json", "--pack", "in"), "--pack in: this folder is not a node pack; it has no __init__.py"),
        (("w.json", "--pack", "w.json"), "--pack w.json: expected a folder with __init__.py, or a .py file"),
        (("--watch", "nowhere"), "--watch nowhere: no such folder; make it first"),
    ],
)
def test_a_wrong_folder_is_said_before_a_host_opens(place, monkeypatch, capsys, options, expected):
    def never(*_, **__):
        raise AssertionError("the host was opened")

    monkeypatch.chdir(place)
    monkeypatch.setattr(hosts, "open_host", never)
    (place / "w.json").write_text(json.dumps(GOOD))
    assert main(["run", *options, "--embedded"]) == 1
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("/usr/bin/graft", "graft"),
        ("C:/Scripts/graft.exe", "graft"),
        ("/home/me/bin/gft", "gft"),
        ("x/__main__.py", "python -m graft_nodes"),
        ("-c", "python -m graft_nodes"),
    ],
)
def test_help_says_the_name_that_was_typed(monkeypatch, capsys, typed, name):
    monkeypatch.setattr(sys, "argv", [typed])
    with pytest.raises(SystemExit):
        main(["run", "--help"])
    assert capsys.readouterr().out.startswith(f"usage: {name} run ")


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # as if it were not installed
from graft_nodes.headless.command import main
sys.argv[0] = "graft"
try:
    status = main(sys.argv[1:])
except SystemExit as left:
    status = left.code
print("imported:", *sorted({"numpy", "safetensors", "PIL", "yaml", "aiohttp"} & set(sys.modules)))
sys.exit(status)
"""


def without_torch(place, *words):
    _, how = command(place, GOOD)
    return subprocess.run([sys.executable, "-c", WITHOUT_TORCH, *words], timeout=120, check=False, **how)


@any_host
def test_without_torch_the_version_is_said_and_nothing_large_is_imported(place):
    done = without_torch(place, "--version")
    assert done.returncode == 0 and re.fullmatch(r"Graft \S+\nimported:\s*", done.stdout), done.stderr


@any_host
@pytest.mark.parametrize("words", [("doctor",), ("run", "w.json"), ("plan", "w.json")])
def test_without_torch_a_command_says_what_to_install(place, words):
    done = without_torch(place, *words, "--embedded")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "torch" in done.stderr and "[standalone]" in done.stderr
    if words == ("doctor",):
        assert "python: " in done.stdout
        assert "not ready: workflows cannot run here" in done.stdout


@any_host
@pytest.mark.parametrize("name", ["graft-nodes", "my Graft 1.0"])
@pytest.mark.parametrize("ending", ["", "/__main__.py"])
@pytest.mark.parametrize("options", [(), ("-I",)], ids=["", "as the portable's Python"])
def test_python_runs_the_folder_whatever_it_is_called(place, name, ending, options):
    """The Python of ComfyUI's Windows portable looks for packages in its own folders alone, as python -I does."""
    folder = place / "custom_nodes" / name
    folder.parent.mkdir()
    folder.symlink_to(hosts.PACKAGE)
    (place / "custom_nodes" / "torch.py").write_text("raise RuntimeError('a file beside the folder was imported')")
    words = [sys.executable, *options, f"custom_nodes/{name}{ending}"]
    done = subprocess.run([*words, "--version"], cwd=place, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.startswith("Graft "), done.stderr
    usage = subprocess.run([*words, "--help"], cwd=place, capture_output=True, text=True, timeout=60, check=False)
    assert " ".join(usage.stdout.split()).startswith(f"usage: {shlex.join([words[0], words[-1]])} [-h]"), usage.stdout
    done = subprocess.run(
        [*words, "doctor", "--embedded", "--cpu", "--json"],
        cwd=place,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0 and json.loads(done.stdout)["ok"], done.stderr


PROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"


def test_version_is_that_of_the_package(capsys):
    with pytest.raises(SystemExit) as left:
        main(["--version"])
    written = re.search(r'^version = "(.+)"$', PROJECT.read_text(encoding="utf-8"), re.MULTILINE)
    assert left.value.code == 0 and capsys.readouterr().out == f"Graft {written.group(1)}\n"


@pytest.mark.parametrize("options", [("w.json", "--watch", "in"), (), ("--watch", "in", "--set-from", "t.csv")])
def test_options_that_exclude_each_other_are_said(options, capsys):
    with pytest.raises(SystemExit) as left:
        main(["run", *options])
    assert left.value.code == 2 and "--watch" in capsys.readouterr().err


@any_host
def test_doctor_names_the_attention_kernels_that_are_installed(place):
    for name in ("xformers", "flash_attn", "sageattention"):
        (place / "packages" / name).mkdir(parents=True)
        (place / "packages" / name / "__init__.py").write_text("")
    _, how = command(place, None)
    how["env"]["PYTHONPATH"] = python_path(place / "packages", how["env"])
    words = [sys.executable, "-m", "graft_nodes", "doctor", "--embedded", "--cpu", "--json"]
    done = subprocess.run(words, timeout=120, check=False, **how)
    kernels = json.loads(done.stdout)["attention"]
    assert kernels == ["pytorch scaled_dot_product_attention", "xformers", "flash_attn", "sageattention"]


@any_host
def test_curve_prints_a_stored_run_as_csv(place):
    def node(kind, **inputs):
        return {"class_type": kind, "inputs": inputs}

    (place / "in" / "few").mkdir()
    for name in ("a", "b", "c"):
        Image.effect_noise((64, 64), 90).convert("RGB").save(place / "in" / "few" / f"{name}.png")
    training = {
        "1": node("GraftDemo"),
        "2": node("GraftDataset", folder="few", vae=["1", 2], clip=["1", 1], resolution=64, validation=0.4),
        "3": node("GraftTrainStart", model=["1", 0], dataset=["2", 0], seed=0, run="mine"),
        "4": node("TrainStep", state=["3", 0], steps=2, validate_every=2),
        "5": node("OddSink", name="out", text=["4", 5]),
    }
    words, how = command(place, training, "run", "w.json", "--embedded", "--input", "in", "--output", "out", "--json")
    done = subprocess.run(words, timeout=300, check=False, **how)
    assert done.returncode == 0, done.stderr
    words, _ = command(place, None, "curve", "mine", "--embedded", "--output", "out")
    done = subprocess.run(words, timeout=120, check=False, **how)
    assert done.returncode == 0, done.stderr
    (record,) = [json.loads(path.read_text()) for path in (place / "out").rglob("state.json")]
    rows = list(csv.DictReader(io.StringIO(done.stdout)))
    assert [row["step"] for row in rows] == ["0", "1", "2"]
    losses = record["history"]["loss"]
    assert [float(row["loss"]) for row in rows[1:]] == losses and len(losses) == 2
    assert [float(rows[step]["held_out_loss"]) for step in (0, 2)] == [
        loss for _, loss in record["history"]["validation"]
    ]
    words, _ = command(place, None, "curve", "other", "--embedded", "--output", "out")
    done = subprocess.run(words, timeout=120, check=False, **how)
    assert done.returncode == 1 and not done.stdout
    assert "run 'other' has no stored state. Stored runs: mine" in done.stderr


@any_host
def test_doctor_creates_nothing(place):
    _, how = command(place, None)
    before = sorted(place.rglob("*"))
    words = [sys.executable, "-m", "graft_nodes", "doctor", "--embedded", "--cpu"]
    done = subprocess.run(words, timeout=120, check=False, **how)
    assert done.returncode == 0, done.stderr
    assert sorted(place.rglob("*")) == before


@any_host
def test_another_pack_is_loaded_from_its_folder(place):
    (place / "shout").mkdir()
    (place / "shout" / "__init__.py").write_text(
        "class Shout:\n"
        "    RETURN_TYPES, FUNCTION, CATEGORY = ('STRING',), 'shout', 'shout'\n"
        "    INPUT_TYPES = classmethod(lambda cls: {'required': {'text': ('STRING', {})}})\n"
        "    def shout(self, text):\n"
        "        return (text.upper(),)\n"
        "NODE_CLASS_MAPPINGS = dict(Shout=Shout)\n"
    )
    graph = {"1": {"class_type": "Shout", "inputs": {"text": "loud"}}, "2": SINK}
    status, _, err = run(place, graph, "--pack", "shout")
    assert status == 0 and (place / "out" / "out.txt").read_text() == "LOUD", err
    (place / "shout" / "__init__.py").write_text("import nothing_of_this_name\n")
    status, _, err = run(place, graph, "--pack", "shout")
    assert status == 1 and "--pack shout did not load; the log above says why" in err
    assert "nothing_of_this_name" in err


RUNS = {
    "comfyui": None,
    "embedded": False,
    "cpu": False,
    "input": None,
    "output": None,
    "json": False,
    "verbose": False,
}
KEPT = {"cache_classic": False, "cache_lru": 0, "cache_none": False, "cache_ram": False}
ONE_BY_ONE = {"set_from": None, "watch": None, "as_ranks": None, "shard": False, "reproducible": False}
OF_GRAPHS = {"workflow": "a.json", "assignments": [], "packs": [], "custom_nodes": False}
DEFAULTS = {
    "run": {**RUNS, **KEPT, **ONE_BY_ONE, **OF_GRAPHS},
    "plan": {**RUNS, **KEPT, **ONE_BY_ONE, **OF_GRAPHS, "memory": 0},
    "doctor": RUNS,
}


@pytest.mark.parametrize("words", [["run", "a.json"], ["plan", "a.json"], ["doctor"], ["editor"]], ids=" ".join)
def test_what_the_help_calls_the_default_is_it(monkeypatch, words):
    plain, parsed = argparse.ArgumentParser.parse_args, []

    def stop(self, argv):
        parsed.append(vars(plain(self, argv)))
        raise KeyboardInterrupt

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    with pytest.raises(KeyboardInterrupt):
        main(words)
    [found] = parsed
    if words == ["editor"]:
        assert (found["listen"], found["port"], found["no_browser"]) == ("127.0.0.1", 8188, False)
        assert found["input"] is found["output"] is found["front_end_root"] is None
        return
    assert found == {"command": words[0], **DEFAULTS[words[0]]}
