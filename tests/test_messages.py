"""Messages call settings and nodes by what the editor shows: an error, a warning or a report has no raw id in it."""

import ast
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("settings", "storage", "patches", "ema", "training", "host", "nodes", "headless", "demo")
NODES = json.loads((ROOT / "locales" / "en" / "nodeDefs.json").read_text(encoding="utf-8"))
LABELS = {(input_id, texts["name"]) for node in NODES.values() for input_id, texts in node["inputs"].items()}
TRAINERS = ("kohya", "ai_toolkit", "onetrainer", "everydream2", "diffusers")  # names and notes for a document
VALUE = "\0"  # stands for what is filled into a text

# Ids that no message has as a word of plain English: "_" in them, or the name of another thing.
IDS = {input_id for input_id, label in LABELS if "_" in input_id and input_id != label}
NODE_IDS = {node_id for node_id, node in NODES.items() if node_id != node["display_name"]}
# Ids of one word. In front of a value they name the setting ("floor is 2", "kind full trains …"), elsewhere they may be
# plain English.
WORDS = {
    "accumulation",
    "algebra",
    "captions",
    "checkpointing",
    "flip",
    "floor",
    "gamma",
    "interval",
    "keep",
    "kind",
    "method",
    "offload",
    "pattern",
    "phase",
    "precision",
    "prefix",
    "prior",
    "profile",
    "targets",
    "timesteps",
    "validation",
    "warmup",
    "weighting",
}
# What other programs, files and Python call by the same name.
ALLOWED = {
    r"kohya's \w+": "the name in kohya's scripts, which people look for in tooltips",
    r"\w+ of filters": "a key of the YAML text",
    rf"^(trainable kind|prefix) {VALUE}$": "what two records of a registry share, told to contributors",
}


def texts(path):
    """(line, text) of every sentence in a file, docstrings left out; VALUE stands for each value in it."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    skipped = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr):
            skipped.add(id(node.value))  # a docstring
        if isinstance(node, ast.JoinedStr):
            skipped.update(id(part) for part in node.values)
        if isinstance(node, ast.keyword) and node.arg in TRAINERS:
            skipped.update(map(id, ast.walk(node)))  # what a setting is called elsewhere
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else VALUE for part in node.values]
            yield node.lineno, "".join(parts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def raw_ids(text):
    """The ids in a text that a reader of the editor does not know."""
    if " " not in text:
        return []  # a key, a name or an option
    for pattern in ALLOWED:
        text = re.sub(pattern, "", text)
    for _, label in sorted(LABELS, key=lambda pair: -len(pair[1])):
        if " " in label:
            text = re.sub(rf"\b{re.escape(label)}", "", text)
    named = [word for word in re.findall(r"\w+", text) if word in IDS or word in NODE_IDS]
    return named + re.findall(rf"\b({'|'.join(sorted(WORDS))}) (?:is )?[\"']?{VALUE}", text)


def test_the_words_are_ids_that_have_other_labels():
    labels = {}
    for input_id, label in LABELS:
        labels.setdefault(input_id, set()).add(label)
    assert not [word for word in WORDS if word in labels.get(word, {word})]


@pytest.mark.parametrize("package", PACKAGES)
def test_messages_name_settings_by_their_labels_and_nodes_by_their_names(package):
    found = []
    for path in sorted((ROOT / package).rglob("*.py")):
        for line, text in texts(path):
            found += [f"{path.relative_to(ROOT)}:{line}: {name} in {text!r}" for name in raw_ids(text)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        (f"floor is {VALUE}, expected 0 to 1", ["floor"]),
        (f"minimum learning rate ratio is {VALUE}, expected 0 to 1", []),
        (
            f"GraftAdapter: targets {VALUE} with pattern {VALUE} choose no module",
            ["GraftAdapter", "targets", "pattern"],
        ),
        ("set keep_tags to 0", ["keep_tags"]),
        ("weighted captions (kohya's weighted_captions)", []),
        (f"the pattern of a layer, and {VALUE}", []),
        ("keep_tags", []),
    ],
)
def test_a_raw_id_is_found(text, ids):
    assert raw_ids(text) == ids
