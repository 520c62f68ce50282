"""The locale files: the English texts are the declarations', every other language has all of them, and every setting is
named.
"""

import importlib.util
import json
import re
from pathlib import Path

import pytest
from graft_nodes.nodes import NODES
from graft_nodes.training.optimizers.registry import OPTIMIZERS

ROOT = Path(__file__).resolve().parents[1]
LANGUAGES = sorted(
    folder.name for folder in (ROOT / "locales").iterdir() if folder.is_dir() and not folder.name.startswith("_")
)


def read(language, name):
    return json.loads((ROOT / "locales" / language / name).read_text(encoding="utf-8"))


def keys(content, path=()):
    """The paths of all texts."""
    if not isinstance(content, dict):
        return {path}
    return {one for name, value in content.items() for one in keys(value, (*path, name))}


def test_the_english_texts_are_those_of_the_declarations():
    spec = importlib.util.spec_from_file_location("write_english", ROOT / "locales" / "write_english.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert read("en", "nodeDefs.json") == module.node_texts(NODES), "run python locales/write_english.py"


def test_every_input_has_a_tooltip():
    texts = read("en", "nodeDefs.json")
    assert not [path for path in keys(texts) if path[-1] == "tooltip" and not lookup(texts, path)]


# Ids that say nothing to someone who has not read the code: the field must say something else.
JARGON = {
    "accumulation",
    "algebra",
    "clip_norm",
    "floor",
    "inv_gamma",
    "kind",
    "lora_plus",
    "method",
    "names",
    "pattern",
    "phase",
    "prefix",
    "prior",
    "profile",
    "rows",
    "scale_lr",
    "source",
    "target",
    "targets",
    "validation",
    "weights",
    "widths",
}


def input_names(language):
    """(node, input id, name that the editor shows) of every input."""
    for node, texts in read(language, "nodeDefs.json").items():
        for identifier, field in texts["inputs"].items():
            yield node, identifier, field["name"]


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_input_and_output_of_every_node_has_a_display_name(language):
    texts = read(language, "nodeDefs.json")
    for schema in (node.define_schema() for node in NODES):
        names = texts[schema.node_id]
        assert list(names["inputs"]) == [declared.id for declared in schema.inputs]
        assert list(names["outputs"]) == [str(place) for place in range(len(schema.outputs))]
        shown = [*names["inputs"].values(), *names["outputs"].values()]
        assert not [field["name"] for field in shown if not field["name"] or "_" in field["name"]]


@pytest.mark.parametrize("language", LANGUAGES)
def test_an_output_that_is_called_as_its_type_is_named_by_the_type(language):
    """The editor looks for the name of such an output among the types; those of others are named by them."""
    texts, types = read(language, "nodeDefs.json"), read(language, "main.json")["dataTypes"]
    named = {}
    for schema in (node.define_schema() for node in NODES):
        for place, declared in enumerate(schema.outputs):
            own = declared.io_type.startswith("GRAFT_") or declared.io_type == "TRAIN_STATE"
            if own and declared.display_name in (None, declared.io_type):
                named[declared.io_type] = texts[schema.node_id]["outputs"][str(place)]["name"]
    assert types == named


def test_a_setting_is_named_for_people_and_not_after_its_id():
    named_after_the_id = [
        (node, identifier)
        for node, identifier, name in input_names("en")
        if identifier in JARGON and name == identifier.replace("_", " ")
    ]
    assert not named_after_the_id
    assert {identifier for _, identifier, _ in input_names("en")} >= JARGON


def test_the_inputs_of_a_node_have_different_names():
    for language in LANGUAGES:
        for node, texts in read(language, "nodeDefs.json").items():
            names = [field["name"] for field in texts["inputs"].values()]
            assert len(set(names)) == len(names), (language, node)


def lookup(content, path):
    for name in path:
        content = content[name]
    return content


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_tooltip_of_the_optimizer_says_a_word_on_each(language):
    tooltip = read(language, "nodeDefs.json")["GraftOptimizer"]["inputs"]["optimizer"]["tooltip"]
    colon = {"en": ": ", "zh": "\uff1a"}[language]
    assert not [record.name for record in OPTIMIZERS if f"{record.name}{colon}" not in tooltip]
    packages = [record.package.name for record in OPTIMIZERS if record.package is not None]
    assert packages and not [name for name in packages if name not in tooltip]


@pytest.mark.parametrize("language", [one for one in LANGUAGES if one != "en"])
@pytest.mark.parametrize("name", ["nodeDefs.json", "settings.json", "main.json"])
def test_another_language_has_every_text(language, name):
    english, other = read("en", name), read(language, name)
    assert keys(english) == keys(other)
    assert all(isinstance(lookup(other, path), str) and lookup(other, path) for path in keys(other))


def test_every_setting_is_named():
    ids = re.findall(r"id: '(Graft\.[\w.]+)'", (ROOT / "web" / "settings.js").read_text(encoding="utf-8"))
    assert ids and {one.replace(".", "_") for one in ids} == set(read("en", "settings.json"))


WEB = ROOT / "web"
QUOTED = r"'((?:[^'\\\n]|\\.)*)'"


def panel_texts():
    """{English: Chinese} of the panels, from the source of web/chinese.js."""
    lines = (WEB / "chinese.js").read_text(encoding="utf-8").splitlines()
    lines = [line for line in lines if line.startswith("  ") and not line.startswith("  //")]
    entries = [re.fullmatch(rf"  (?:{QUOTED}|(\w+)): {QUOTED},", line) for line in lines]
    assert all(entries)
    return {entry[1] or entry[2]: entry[3] for entry in entries}


def panel_sources():
    return {path.name: path.read_text(encoding="utf-8") for path in WEB.glob("*.js") if path.name != "chinese.js"}


def test_every_text_of_the_panels_has_a_chinese_one_with_the_same_blanks():
    known = panel_texts()
    asked = {text for source in panel_sources().values() for text in re.findall(rf"(?<![\w.])t\(\s*{QUOTED}", source)}
    assert len(asked) > 70 and not asked - set(known)
    blanks = re.compile(r"\{\w+\}")
    assert not [
        text
        for text, other in known.items()
        if sorted(blanks.findall(text)) != sorted(blanks.findall(other)) or not other
    ]


def test_no_chinese_text_is_left_over():
    everything = "\n".join(panel_sources().values()) + (ROOT / "nodes" / "step_call.py").read_text(
        encoding="utf-8"
    ).replace('"', "'")
    words = set(re.findall(QUOTED, everything)) | set(re.findall(r"\b(\w+): \(\) =>", everything))
    assert not set(panel_texts()) - words
