"""`python -m comfyui_api_stubs compare`: finds what differs, on made-up checkouts; and io and ui have every name of
0.33.0. tests/with_comfyui/checks/test_comfy_api.py compares with the real one.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from comfyui_api_stubs import MODULES, __main__, compare

HERE = Path(__file__).resolve().parent


def kind(told):
    """A name's socket type, or what kind of thing it is."""
    return told.get("io_type") or min(told)


@pytest.fixture(scope="module")
def described():
    return compare.described(MODULES)


@pytest.mark.parametrize("module", ["io", "ui"])
def test_every_name_of_0_33_0_is_there(described, module):
    wanted = json.loads((HERE / "names_0_33_0.json").read_text(encoding="utf-8"))[module]
    assert {name: kind(told) for name, told in described[module].items()} == wanted


@pytest.fixture
def checkout(tmp_path):
    """A folder that looks like a ComfyUI, with one module of the embedded host."""
    for name in compare.LANDMARKS:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("", encoding="utf-8")
    (tmp_path / "comfyui_version.py").write_text('__version__ = "9.9.9"\n', encoding="utf-8")
    helpers = tmp_path / "node_helpers.py"
    helpers.write_text(
        "from other import moved as pillow\ndef image_alpha_fix(destination, source): pass\nclass Extra: pass\n",
        encoding="utf-8",
    )
    (tmp_path / "other.py").write_text("def moved(fn, arg, more=1): pass\n", encoding="utf-8")
    return tmp_path


def test_names_and_parameters_that_differ_are_told(checkout):
    found = compare.compare(str(checkout))
    assert found.version == "9.9.9" and "comfy.samplers" in found.missing_modules
    (helpers,) = [difference for difference in found.modules if difference.module == "node_helpers"]
    assert helpers.only_comfyui == ["Extra", "image_alpha_fix"] and helpers.only_stubs == []
    assert "node_helpers" not in found.same_modules
    assert helpers.changed == ["pillow(fn, arg) is pillow(fn, arg, more)"], "it comes from another module"


def test_modules_that_only_comfyui_has_are_told(checkout):
    (checkout / "comfy").mkdir(exist_ok=True)
    (checkout / "comfy" / "quantum.py").write_text("", encoding="utf-8")
    (checkout / "node_modules_of_mine").mkdir()
    (checkout / "node_modules_of_mine" / "some.py").write_text("", encoding="utf-8")
    found = compare.compare(str(checkout))
    assert "comfy.quantum" in found.more_modules and "node_modules_of_mine.some" not in found.more_modules
    assert not set(found.more_modules) & {"node_helpers", "comfy.samplers"}
    assert "Modules that are only in ComfyUI: comfy.quantum" in compare.report(found)


def test_a_comfy_api_that_cannot_be_imported_is_said(checkout):
    (checkout / "comfy_api" / "latest" / "__init__.py").write_text("import no_such_package", encoding="utf-8")
    found = compare.compare(str(checkout))
    assert found.sockets is None and "no_such_package" in found.why
    assert "not compared, ComfyUI's cannot be imported here" in compare.report(found)


def test_sockets_that_differ_are_told():
    mine = {"io": {"Int": {"io_type": "INT"}, "Old": {}}}
    theirs = {"io": {"Int": {"io_type": "NUMBER"}, "New": {}}}
    found = compare.Difference("sockets")
    compare.add_differences(found, "", mine, theirs)
    assert found.changed == ['io.Int.io_type: "INT" is "NUMBER"']
    assert found.only_comfyui == ["io.New"] and found.only_stubs == ["io.Old"]
    for both, expected in (
        (
            [["id", "min=None", "rounded=1"], ["id", "max=None", "min=None"]],
            ["Int: only in ComfyUI: max=None", "Int: only in the stubs: rounded=1"],
        ),
        ([["a", "b"], ["b", "a"]], ['Int: ["a", "b"] is ["b", "a"]']),
    ):
        found = compare.Difference("sockets")
        compare.add_differences(found, "Int", *both)
        assert found.changed == expected


MINE = (
    "class Host:\n    def run(self, prompt): pass\n    def stop(self): pass\n    def mine(self): pass\n    seed = 0\n"
)
THEIRS = "class Host:\n    def run(self, prompt, seed=0): pass\n    def stop(self): pass\n    def theirs(self): pass\n"


@pytest.fixture
def trees(tmp_path):
    """Two folders with one module of one class, and one with that class below another."""
    texts = {"mine": MINE, "theirs": THEIRS, "derived": THEIRS.replace("Host", "Host(Base)")}
    for folder, text in texts.items():
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "hosts.py").write_text(text, encoding="utf-8")
    return {folder: compare.Tree(tmp_path / folder) for folder in texts}


def test_methods_that_differ_are_told(trees):
    found = compare.compare_module(trees["mine"], trees["theirs"], "hosts")
    assert found.changed == ["Host.run(prompt) is Host.run(prompt, seed)"]
    assert found.only_comfyui == ["Host.theirs"] and found.only_stubs == ["Host.mine"]
    assert compare.compare_module(trees["mine"], trees["derived"], "hosts").only_stubs == [], "it may come from Base"


def test_a_summary_counts_the_differences_of_each_module():
    found = compare.Comparison(
        "9.9.9",
        [compare.Difference("nodes", ["A", "B"], [], ["f(a) is f(b)"]), compare.Difference("server", [], ["C"], [])],
        same_modules=["latent_preview"],
        missing_modules=["comfy.mine", "comfy.own"],
        more_modules=["comfy.theirs"],
        sockets=compare.Difference(compare.SOCKETS),
    )
    lines = compare.report(found).splitlines()
    heading = lines[2].split("  ")
    assert [part.strip() for part in heading if part.strip()] == list(compare.COLUMNS)
    assert lines[3] == "comfy_api's io and ui, as they run: the same"
    ends = [lines[2].index(title) + len(title) for title in compare.COLUMNS]
    assert (lines[4][:5], lines[4][ends[0] - 1], lines[4][ends[2] - 1]) == ("nodes", "2", "1")
    assert lines[4].split() == ["nodes", "2", "1"] and lines[5].split() == ["server", "1"]
    assert lines[5][ends[1] - 1] == "1"
    assert lines[6] == "modules: 1 the same, 2 only in the stubs, 1 only in ComfyUI"
    below = "\n".join(lines[7:])
    parts = [
        compare.ADVICE,
        "nodes\n  only in ComfyUI: A, B",
        "Modules that are only in the stubs: comfy.mine, comfy.own",
    ]
    assert all(below.count(part) == 1 for part in parts) and sorted(parts, key=below.index) == parts


def test_a_folder_that_is_no_comfyui_is_refused(tmp_path, capsys):
    assert __main__.main(["compare", "--comfyui", str(tmp_path)]) == 2
    assert "is not a ComfyUI checkout: it has no comfyui_version.py" in capsys.readouterr().err


def test_the_command_prints_text_or_json(checkout, capsys):
    assert __main__.main(["compare", "--comfyui", str(checkout)]) == 0
    assert "The embedded host (the stubs) beside ComfyUI 9.9.9" in capsys.readouterr().out
    assert __main__.main(["compare", "--comfyui", str(checkout), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["version"] == "9.9.9"


def test_ctrl_c_ends_it_with_one_line(checkout, capsys, monkeypatch):
    def stopped(folder):
        raise KeyboardInterrupt

    monkeypatch.setattr(compare, "described", stopped)
    assert __main__.main(["compare", "--comfyui", str(checkout)]) == 130
    assert capsys.readouterr() == ("", "comfyui_api_stubs: stopped\n")
