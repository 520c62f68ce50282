"""The help pages that the editor shows: every node has one, in one order, and it names what the node's schema has."""

import ast
import json
import re
from functools import cache
from pathlib import Path

import pytest
from graft_nodes.nodes import NODES

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "web" / "docs"
HEADINGS = ["When to use it", "Inputs", "Outputs", "Common mistakes"]
SCHEMAS = [node.define_schema() for node in NODES]

each_schema = pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: schema.node_id)


def page_of(schema):
    return (PAGES / f"{schema.node_id}.md").read_text(encoding="utf-8")


def sections(text):
    """What stands under each heading of the second level, in order, and before the first under ""."""
    unfenced = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)  # a # in an example is not a heading
    parts = re.split(r"^## (.+)$", unfenced, flags=re.MULTILINE)
    return dict(zip(["", *parts[1::2]], parts[::2], strict=True))


def listed(text):
    """(name, id, optional or not, advanced or not) of each entry of a list:
    `- **batch size** (`batch_size`), **seed** (optional, advanced): …`.

    Chinese pages have full-width signs. A name that is the id itself stands alone.
    """
    inputs = []
    for entry in re.findall(r"^- (\*\*.+?)[:\uff1a]", text, flags=re.MULTILINE):
        for name, notes in re.findall(r"\*\*(.+?)\*\*(?: ?[(\uff08](.+?)[)\uff09])?", entry):
            named_id = re.search(r"`(\w+)`", notes)
            identifier = named_id[1] if named_id else name
            is_optional, is_advanced = "optional" in notes or "可选" in notes, "advanced" in notes or "高级" in notes
            inputs.append((name, identifier, is_optional, is_advanced))
    return inputs


@cache
def locale(language):
    return json.loads((ROOT / "locales" / language / "nodeDefs.json").read_text(encoding="utf-8"))


def expected_inputs(schema, language):
    """What a page lists of a node's inputs: as the editor names them, with their ids."""
    names = locale(language)[schema.node_id]["inputs"]
    return [
        (
            names[declared.id]["name"],
            declared.id,
            bool(declared.optional) and not hasattr(declared, "default"),
            "advanced" in declared.extra_dict,
        )
        for declared in schema.inputs
    ]


def expected_outputs(schema, language):
    return [output["name"] for output in locale(language)[schema.node_id]["outputs"].values()]


@cache
def said_by_the_code():
    """Every text in the sources; what is filled into one is a line break here."""
    texts = []
    folders = ("nodes", "training", "patches", "ema", "host", "headless", "storage")
    for file in (ROOT / "__init__.py", *(file for folder in folders for file in sorted((ROOT / folder).rglob("*.py")))):
        for one in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(one, ast.JoinedStr):
                texts.append(
                    "".join(str(part.value) if isinstance(part, ast.Constant) else "\n" for part in one.values)
                )
            elif isinstance(one, ast.Constant) and isinstance(one.value, str):
                texts.append(one.value)
    return "\n\n".join(texts)


def test_every_page_belongs_to_a_node():
    assert {page.stem for page in PAGES.glob("*.md")} == {schema.node_id for schema in SCHEMAS}


@each_schema
def test_a_page_has_title_introduction_picture_and_headings_in_order(schema):
    found = sections(page_of(schema))
    assert list(found)[1:] == HEADINGS
    assert all(text.strip() for text in found.values())
    title, introduction, picture = re.split(r"\n\n+", found[""].strip())
    assert title == f"# {schema.display_name}"
    assert introduction.endswith((".", ".)"))
    assert picture == f"![{schema.display_name}]({schema.node_id}.png)"


@each_schema
def test_a_page_lists_the_inputs_in_order_and_says_which_are_optional_or_advanced(schema):
    assert listed(sections(page_of(schema))["Inputs"]) == expected_inputs(schema, "en")


@each_schema
def test_a_page_lists_the_outputs_of_the_schema_in_order(schema):
    names = [name for name, *_ in listed(sections(page_of(schema))["Outputs"])]
    assert names == expected_outputs(schema, "en")


@each_schema
def test_the_errors_that_a_page_quotes_are_those_of_the_code(schema):
    quoted = re.findall(r'\*"(.+?)"\*', sections(page_of(schema))["Common mistakes"], flags=re.DOTALL)
    parts = [part.strip(" ,;:") for text in quoted for part in " ".join(text.split()).split("…")]
    assert quoted
    assert not [part for part in parts if part not in said_by_the_code()]


@each_schema
def test_the_picture_of_a_page_exists(schema):
    assert (PAGES / f"{schema.node_id}.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


LANGUAGES = sorted(folder.name for folder in (ROOT / "locales").iterdir() if folder.is_dir() and folder.name != "en")
PLACEHOLDERS = {"<训练名称>": "<run>", "名称/键": "run/key", "名称": "NAME", "正则表达式": "regular expression"}

each_language = pytest.mark.parametrize("language", LANGUAGES)


def translation_of(schema, language):
    """The editor asks for NODE/LANGUAGE.md first; pictures are still looked for beside the English page."""
    return (PAGES / schema.node_id / f"{language}.md").read_text(encoding="utf-8")


def codes(text):
    """What stands between backticks outside of examples, with the English placeholders."""
    for translated, english in PLACEHOLDERS.items():
        text = text.replace(translated, english)
    unfenced = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return set(re.findall(r"`([^`\n]+)`", unfenced))


def links(text):
    return re.findall(r"(?<!!)\[[^\]\n]*\]\(([^)\s]+)\)", text)


@each_language
def test_every_node_has_a_page_in_every_language(language):
    assert {page.parent.name for page in PAGES.glob(f"*/{language}.md")} == {schema.node_id for schema in SCHEMAS}
    assert not [page.name for page in PAGES.glob("*/*") if page.name not in {f"{one}.md" for one in LANGUAGES}]


@each_language
@each_schema
def test_a_translated_page_names_every_input_and_output_as_the_editor_does(schema, language):
    translated = translation_of(schema, language)
    assert translated.startswith(f"# {locale(language)[schema.node_id]['display_name']}\n")
    _, _, inputs, outputs, _ = sections(translated).values()
    assert listed(inputs) == expected_inputs(schema, language)
    assert [name for name, *_ in listed(outputs)] == expected_outputs(schema, language)


@each_language
@each_schema
def test_a_translated_page_has_what_the_english_one_has(schema, language):
    english, translated = page_of(schema), translation_of(schema, language)
    assert len(sections(translated)) == len(sections(english))
    for pattern in (r"\]\((\S+\.png)\)", r'\*"(.+?)"\*', r"```.*?```"):
        assert re.findall(pattern, translated, flags=re.DOTALL) == re.findall(pattern, english, flags=re.DOTALL)
    for start in ("\n|", "\n- ", "\n### "):
        assert translated.count(start) == english.count(start), start
    assert len(links(translated)) == len(links(english))
    assert codes(translated) - {declared.id for declared in schema.inputs} == codes(english) - {
        declared.id for declared in schema.inputs
    }
