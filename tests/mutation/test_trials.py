"""A made-up package with a good test, none, and an endless loop: what is noticed by whom, what survives, and that the
tree itself is never changed.
"""

import shutil
import subprocess
import textwrap
from pathlib import PurePosixPath

import pytest
from graft_nodes.tests.mutation import __main__ as command
from graft_nodes.tests.mutation import trials
from graft_nodes.tests.mutation.changes import changes
from graft_nodes.tests.nearest_tests import nearest_tests

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="the tree is copied by git's list of files")

FILES = {
    "__init__.py": "",
    "pyproject.toml": """
        [tool.pytest.ini_options]
        addopts = "--import-mode=importlib"
        markers = ["slow", "long", "browser"]
    """,
    "tests/where_tests_are.toml": '"maths/" = ["tests/test_all.py"]\n',
    "maths/near.py": "def larger(a, b):\n    return a > b\n",
    "maths/far.py": "def total(a, b):\n    return a + b\n",
    "maths/unseen.py": "def half(a):\n    return a / 2\n",
    "maths/late.py": "def double(a):\n    return a * 2\n",
    "maths/loop.py": "def down(a):\n    while a > 0:\n        a -= 1\n    return a\n",
    "tests/maths/test_near.py": """
        from graft_nodes.maths.near import larger

        def test_larger():
            assert larger(2, 1) and not larger(1, 1)
    """,
    "tests/maths/test_loop.py": """
        from graft_nodes.maths.loop import down

        def test_down():
            assert down(3) == 0
    """,
    "tests/test_all.py": "def test_nothing():\n    pass\n",
    "tests/test_sums.py": """
        from graft_nodes.maths.far import total

        def test_total():
            assert total(1, 2) == 3
    """,
    "tests/test_readability.py": "raise AssertionError('it reads the source and must not be asked')\n",
    "tests/test_slow.py": """
        import pytest

        from graft_nodes.maths.late import double

        @pytest.mark.slow
        def test_slow():
            assert double(3) == 6

        @pytest.mark.browser
        @pytest.mark.slow
        def test_browser():
            raise AssertionError("not in the whole suite")
    """,
}


@pytest.fixture
def tree(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # these start in half the time without
    root = tmp_path / "tree"
    for name, text in FILES.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text), encoding="utf-8")
    subprocess.run(["git", "init", "--quiet"], cwd=root, check=True)
    return root


def content(root):
    """{file: bytes} of the tree, without what git keeps."""
    paths = [path for path in root.rglob("*") if path.is_file() and ".git" not in path.parts]
    return {path: path.read_bytes() for path in paths}


def only_change(root, file, after):
    """(file, its change that leaves this text in place of another)."""
    [change] = [change for change in changes((root / file).read_bytes()) if change.after == after]
    return PurePosixPath(file), change


def verdicts(root, *places, until="quick", survived=None):
    return list(command.tried(root, list(places), 1, until, survived))


def test_each_change_is_noticed_by_the_nearest_tests_then_by_all_or_survives(tree):
    before = content(tree)
    places = [
        only_change(tree, "maths/near.py", "(a >= b)"),
        only_change(tree, "maths/far.py", "(a - b)"),
        only_change(tree, "maths/unseen.py", "(a * 2)"),
    ]
    found = {verdict.file.stem: verdict for verdict in verdicts(tree, *places)}
    assert {name: verdict.by for name, verdict in found.items()} == {
        "near": "nearest",
        "far": "quick",
        "unseen": "survived",
    }
    assert found["near"].detail == "tests/maths/test_near.py::test_larger"
    assert found["far"].detail == "tests/test_sums.py::test_total"
    assert content(tree) == before
    text = command.summary(list(found.values()))
    assert text.startswith("2 of 3 changes were noticed (nearest 1, quick 1, survived 1)")
    assert text.splitlines()[1:] == ["survived  maths/unseen.py:2  a / 2  ->  (a * 2)"]


def test_the_whole_suite_is_asked_last_and_only_by_what_survived_the_rest(tree):
    late = only_change(tree, "maths/late.py", "(a / 2)")
    unseen = only_change(tree, "maths/unseen.py", "(a * 2)")
    quick = {verdict.file.stem: verdict for verdict in verdicts(tree, late, unseen)}
    assert {name: (verdict.by, verdict.stage) for name, verdict in quick.items()} == {
        "late": ("survived", "quick"),
        "unseen": ("survived", "quick"),
    }
    (tree / "tests" / "test_sums.py").write_text("raise AssertionError('the quick tier ran again')\n")
    survived = {(verdict.file, verdict.change): verdict.stage for verdict in quick.values()}
    assert [one.by for one in verdicts(tree, late, until="quick", survived=survived)] == ["survived"]
    (tree / "tests" / "test_sums.py").write_text("")
    whole = {one.file.stem: one for one in verdicts(tree, late, unseen, until="whole", survived=survived)}
    assert whole["late"].by == "whole" and whole["late"].detail == "tests/test_slow.py::test_slow"
    assert (whole["unseen"].by, whole["unseen"].stage) == ("survived", "whole")


@pytest.mark.slow
def test_an_endless_loop_ends_with_its_time(tree, monkeypatch):
    monkeypatch.setattr(trials, "FIRST_SECONDS", 4.0)
    monkeypatch.setattr(trials, "LEAST_SECONDS", 4.0)
    [verdict] = verdicts(tree, only_change(tree, "maths/loop.py", "pass"))
    assert verdict.by == "time" and verdict.noticed and verdict.stage == "nearest"


def test_changes_are_undone_before_the_next(tree):
    """The second change has the size and perhaps the second of the first: a stale compiled file would hide it."""
    larger = only_change(tree, "maths/near.py", "(a >= b)")
    far = only_change(tree, "maths/far.py", "(a - b)")
    assert [one.by for one in verdicts(tree, far, larger, far, until="nearest")].count("survived") == 2


def test_tests_that_fail_without_a_change_judge_nothing(tree):
    (tree / "tests" / "maths" / "test_near.py").write_text("def test_broken():\n    raise ValueError('as it is')\n")
    [verdict] = verdicts(tree, only_change(tree, "maths/near.py", "(a >= b)"))
    assert verdict.by == "untried" and "test_broken" in verdict.detail and not verdict.noticed


def test_only_the_test_that_failed_runs_without_the_change(tree, monkeypatch):
    """Also when its name has what pytest prints between a name and its message."""
    (tree / "tests" / "maths" / "test_near.py").write_text(
        "import pytest\nfrom graft_nodes.maths.near import larger\n\n"
        "@pytest.mark.parametrize('name', ['a', 'b - c'])\n"
        "def test_larger(name):\n    assert not larger(1, 1) or name == 'a'\n"
    )
    asked = []
    run = trials.Copy.run

    def noted(self, marks, tests, limit):
        asked.append(tests)
        return run(self, marks, tests, limit)

    monkeypatch.setattr(trials.Copy, "run", noted)
    (tree / "tests" / "maths" / "test_far.py").write_text(
        "from graft_nodes.maths.far import total\n\ndef test_total():\n    assert total(1, 2) == 3\n"
    )
    places = [only_change(tree, "maths/far.py", "(a - b)"), only_change(tree, "maths/near.py", "(a >= b)")]
    assert [one.by for one in verdicts(tree, *places)] == ["nearest", "nearest"]
    far, near = "tests/maths/test_far.py", "tests/maths/test_near.py"
    assert asked == [[far], [f"{far}::test_total"], [near], [f"{near}::test_larger[b"], [near]]


def test_the_nearest_tests_of_a_file(tree):
    assert nearest_tests(tree, PurePosixPath("maths/near.py")) == ["tests/maths/test_near.py"]
    assert nearest_tests(tree, PurePosixPath("maths/far.py")) == ["tests/test_all.py"]
    assert nearest_tests(tree, PurePosixPath("other/file.py")) == []


def test_a_seed_draws_the_same_changes_and_another_seed_others(tree):
    files = command.product_files(tree, ["maths"])
    assert [file.name for file in files] == ["far.py", "late.py", "loop.py", "near.py", "unseen.py"]
    all_of_them = command.drawn(tree, files, 1000, 1)
    assert command.drawn(tree, files, 3, 1) == all_of_them[:3] != command.drawn(tree, files, 3, 2)
    assert len(all_of_them) == len(set(all_of_them)) == sum(len(changes((tree / file).read_bytes())) for file in files)


@pytest.mark.parametrize("arguments", [["--count", "0"], ["nowhere"], ["docs"]])
def test_what_the_command_cannot_do(arguments, tree, capsys):
    with pytest.raises(SystemExit):
        command.main(arguments, tree)
    assert "expected" in capsys.readouterr().err


def test_the_command_lists_what_it_would_try(tree, capsys):
    assert command.main(["maths/near.py", "--seed", "1", "--list"], tree) == 0
    assert "maths/near.py:2  a > b  ->  (a >= b)" in capsys.readouterr().out


def test_a_call_goes_on_where_the_one_before_ended(tree, capsys):
    file = tree.parent / "tried.json"
    options = [
        "maths/near.py",
        "maths/unseen.py",
        "--seed",
        "1",
        "--until",
        "nearest",
        "--jobs",
        "1",
        "--json",
        str(file),
    ]

    def call(*more):
        """(exit status, changes tried, the summary's first line)."""
        before = len(file.read_text().splitlines()) if file.exists() else 0
        status = command.main([*options, *more], tree)
        [first] = [line for line in capsys.readouterr().out.splitlines() if "changes were noticed" in line]
        return status, len(file.read_text().splitlines()) - before, first

    status, count, first = call("--count", "2")
    assert (status, count) == (1, 2) and "of 2 changes" in first
    everything = len(command.drawn(tree, command.product_files(tree, ["maths/near.py", "maths/unseen.py"]), 100, 1))
    status, count, first = call()
    assert count == everything - 2 and f"of {everything} changes" in first
    assert call() == (1, 0, first)
    survived = int(first.partition("survived ")[2].partition(")")[0])
    assert survived > 0 and call("--again") == (1, survived, first)
    options[options.index("nearest")] = "quick"
    assert call()[1] == survived and call()[1] == 0  # what survived the nearest tests is not the last word


def test_lines_written_anew_leave_the_other_changes_in_their_order(tree):
    files = command.product_files(tree, ["maths"])
    before = [(file, change.before, change.after) for file, change in command.drawn(tree, files, 1000, 1)]
    (tree / "maths" / "near.py").write_text("FIRST = 1\n\n\n" + FILES["maths/near.py"])
    after = [(file, change.before, change.after) for file, change in command.drawn(tree, files, 1000, 1)]
    assert [place for place in after if place in before] == before and len(after) > len(before)


def test_what_no_test_noticed_is_tried_again_only_from_a_file(tree, capsys):
    with pytest.raises(SystemExit):
        command.main(["maths", "--again"], tree)
    assert "--json" in capsys.readouterr().err


def test_a_line_of_a_log_is_no_failing_test():
    log, words = (
        "ERROR    root:execution.py:899 out of memory",
        "FAILED tests/a/test_b.py::test_c[x y] - ValueError: no",
    )
    assert trials.Ran(1, 0.0, f"{log}\n{words}\n1 failed").first_failure == "tests/a/test_b.py::test_c[x y]"
    assert trials.Ran(2, 0.0, "ERROR tests/a/test_b.py\n1 error").first_failure == "tests/a/test_b.py"
    assert trials.Ran(2, 0.0, log).first_failure == log


def test_rows_add_to_a_file_with_its_own_tests_and_stars_to_every_file(tree):
    table = tree / "tests" / "where_tests_are.toml"
    table.write_text(
        table.read_text()
        + '"maths/near.py" = ["tests/test_sums.py"]\n'
        + '"maths/f*.py" = ["tests/maths/test_loop.py", "tests/test_sums.py"]\n'
    )
    assert nearest_tests(tree, PurePosixPath("maths/near.py")) == ["tests/maths/test_near.py", "tests/test_sums.py"]
    far = ["tests/maths/test_loop.py", "tests/test_sums.py", "tests/test_all.py"]
    assert nearest_tests(tree, PurePosixPath("maths/far.py")) == far
    assert nearest_tests(tree, PurePosixPath("maths/unseen.py")) == ["tests/test_all.py"]
