"""`python -m comfyui_api_stubs compare`: finds what differs, on made-up checkouts; and io and ui have every name of
0.33.0. tests/with_comfyui/checks/test_comfy_api.py compares with the real one.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from graft_nodes.comfyui_api_stubs import MODULES, __main__, compare

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
    assert helpers.changed == ["pillow(fn, arg) is pillow(fn, arg, more)"], "it comes from another module"


def test_modules_that_only_comfyui_has_are_told(checkout):
    (checkout / "comfy").mkdir(exist_ok=True)
    (checkout / "comfy" / "quantum.py").write_text("", encoding="utf-8")
    (checkout / "node_modules_of_mine").mkdir()
    (checkout / "node_modules_of_mine" / "some.py").write_text("", encoding="utf-8")
    found = compare.compare(str(checkout))
    assert "comfy.quantum" in found.more_modules and "node_modules_of_mine.some" not in found.more_modules
    assert not set(found.more_modules) & {"node_helpers", "comfy.samplers"}
    assert "Modules that only ComfyUI has: " in compare.report(found) and "comfy.quantum" in compare.report(found)


def test_a_comfy_api_that_cannot_be_imported_is_said(checkout):
    (checkout / "comfy_api" / "latest" / "__init__.py").write_text("import no_such_package", encoding="utf-8")
    found = compare.compare(str(checkout))
    assert found.sockets is None and "no_such_package" in found.why
    assert "not compared: ComfyUI's cannot be imported here" in compare.report(found)


def test_sockets_that_differ_are_told():
    mine = {"io": {"Int": {"io_type": "INT"}, "Old": {}}}
    theirs = {"io": {"Int": {"io_type": "NUMBER"}, "New": {}}}
    told = list(compare.differences("", mine, theirs))
    assert told == ['io.Int.io_type: "INT" is "NUMBER"', "io.New is missing", "io.Old is only in the stubs"]
    both = [["id", "min=None", "rounded=1"], ["id", "max=None", "min=None"]]
    assert list(compare.differences("Int", *both)) == [
        "Int: only in ComfyUI: max=None",
        "Int: only in the stubs: rounded=1",
    ]
    assert list(compare.differences("Int", ["a", "b"], ["b", "a"])) == ['Int: ["a", "b"] is ["b", "a"]']


def test_a_folder_that_is_no_comfyui_is_refused(tmp_path, capsys):
    assert __main__.main(["compare", "--comfyui", str(tmp_path)]) == 2
    assert "is not a ComfyUI checkout: it has no comfyui_version.py" in capsys.readouterr().err


def test_the_command_prints_text_or_json(checkout, capsys):
    assert __main__.main(["compare", "--comfyui", str(checkout)]) == 0
    assert "The embedded host beside ComfyUI 9.9.9" in capsys.readouterr().out
    assert __main__.main(["compare", "--comfyui", str(checkout), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["version"] == "9.9.9"
