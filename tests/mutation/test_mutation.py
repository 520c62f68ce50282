"""A made-up package with a good test, none, and an endless loop: which changes are made, what is noticed, and that the
tree itself never changes.
"""

import subprocess
import textwrap

import pytest
from cosmic_ray.mutating import mutate_code
from graft_nodes.tests.mutation import __main__ as command
from graft_nodes.tests.mutation.operators import LeaveOutStatement, Provider

FILES = {
    "__init__.py": "",
    "pyproject.toml": """
        [tool.pytest.ini_options]
        addopts = "--import-mode=importlib"
        markers = ["long", "browser"]
    """,
    "tests/where_tests_are.toml": '"maths/far.py" = ["tests/test_sums.py"]\n"maths/" = ["tests/test_all.py"]\n',
    "maths/near.py": "def larger(a, b):\n    return a > b\n",
    "maths/far.py": "def total(a, b):\n    return a + b\n",
    "maths/unseen.py": "def half(a):\n    return a / 2\n",
    "maths/loop.py": "def down(a):\n    while a > 0:\n        a -= 1\n    return a\n",
    "maths/broken.py": "def one():\n    return 1\n",
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
    "tests/maths/test_broken.py": "def test_broken():\n    raise ValueError('as it is')\n",
    "tests/test_all.py": "def test_nothing():\n    pass\n",
    "tests/test_sums.py": """
        from graft_nodes.maths.far import total

        def test_total():
            assert total(1, 2) == 3
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
    name = ("-c", "user.name=x", "-c", "user.email=x@example.com")
    for words in (["init", "--quiet"], ["add", "--all"], [*name, "commit", "--quiet", "-m", "all"]):
        subprocess.run(["git", *words], cwd=root, check=True)
    return root


def content(root):
    """{file: bytes} of the tree, without what git keeps and what is built."""
    paths = [path for path in root.rglob("*") if path.is_file() and not {".git", "build"} & set(path.parts)]
    return {path: path.read_bytes() for path in paths}


def verdicts(root, capsys, *arguments):
    """(exit status, {place and operator: verdict}) of a call."""
    status = command.main(list(arguments), root)
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line[:4].strip().isdigit()]
    return status, {f"{place} {operator}": word for *_, word, place, operator in lines}


def test_changes_are_noticed_by_the_nearest_tests_or_survive(tree, capsys):
    before = content(tree)
    files = ("maths/near.py", "maths/far.py", "maths/unseen.py")
    status, found = verdicts(tree, capsys, *files, "--seed", "1")
    assert status == 1
    assert found.items() >= {
        ("maths/near.py:2 ReplaceComparisonOperator_Gt_GtE", "noticed"),
        ("maths/far.py:2 ReplaceBinaryOperator_Add_Sub", "noticed"),
        ("maths/far.py:2 LeaveOutStatement", "noticed"),
        ("maths/unseen.py:2 ReplaceBinaryOperator_Div_Mul", "survived"),
        ("maths/unseen.py:2 NumberReplacer", "survived"),
    }
    assert content(tree) == before
    assert status_and_text(tree, capsys)[1].startswith("4 of 7 changes were noticed\nsurvived  maths/unseen.py:2")


def status_and_text(tree, capsys):
    """What a call says that has nothing left to do."""
    return command.main(["--resume"], tree), capsys.readouterr().out


def test_the_clone_is_as_it_was_and_a_call_goes_on_where_one_ended(tree, capsys, monkeypatch):
    tried = command.Tests.try_change

    def broken_off(tests, item):
        if tests.unchanged:
            raise KeyboardInterrupt
        return tried(tests, item)

    monkeypatch.setattr(command.Tests, "try_change", broken_off)
    with pytest.raises(KeyboardInterrupt):
        command.main(["maths/near.py", "--seed", "1"], tree)
    monkeypatch.undo()
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    assert (tree / "build/mutation/graft_nodes/maths/near.py").read_text() == FILES["maths/near.py"]
    capsys.readouterr()
    status, text = status_and_text(tree, capsys)
    assert status == 0 and "1 of 1" in text and "2 of 2 changes were noticed" in text


def test_an_endless_loop_is_noticed_by_its_time(tree, capsys, monkeypatch):
    monkeypatch.setattr(command, "LEAST_SECONDS", 2.0)
    _, found = verdicts(tree, capsys, "maths/loop.py", "--seed", "1")
    assert found["maths/loop.py:3 LeaveOutStatement"] == "noticed"


def test_tests_that_fail_without_a_change_judge_nothing(tree, capsys):
    status, found = verdicts(tree, capsys, "maths/broken.py", "--seed", "1")
    assert status == 1 and set(found.values()) == {"untried"}
    assert "untried, for its tests fail without it: maths/broken.py:2" in status_and_text(tree, capsys)[1]


def test_a_seed_draws_the_same_changes_and_another_seed_others(tree, tmp_path):
    def drawn(count, seed):
        session = tmp_path / f"{count} {seed}.sqlite"
        with command.inside(tree):
            command.begin(["maths"], count, seed, session)
        with command.use_db(session) as work:
            found = {command.sort_key(item.mutations[0]) for item in work.work_items}
        session.unlink()
        return found

    assert drawn(4, 1) == drawn(4, 1) != drawn(4, 2)
    everywhere = drawn(1000, 1)
    assert len({key[:2] for key in everywhere}) == len(everywhere) > 10  # one change at a place


@pytest.mark.parametrize("arguments", [["--resume"], ["nowhere"]])
def test_what_the_command_cannot_do(arguments, tree, capsys):
    with pytest.raises(SystemExit):
        command.main(arguments, tree)
    assert "expected" in capsys.readouterr().err


def test_every_operator_is_there():
    assert len({Provider()[name] for name in Provider()}) == len(list(Provider())) > 25


@pytest.mark.parametrize("example", LeaveOutStatement.examples(), ids=lambda example: example.pre_mutation_code)
def test_statements_that_are_left_out(example):
    assert mutate_code(example.pre_mutation_code, LeaveOutStatement(), 0) == example.post_mutation_code


@pytest.mark.parametrize(
    "source", ["x = f(a)\n", "x: int = 1\n", '"""Text."""\n', "log.warning(a)\n", "print(a)\n", "import a\n", "a\n"]
)
def test_statements_that_stay(source):
    assert mutate_code(source, LeaveOutStatement(), 0) is None
