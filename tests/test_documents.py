"""Links in README.md and the documents lead somewhere, and README claims what docs/benchmarks.md measured."""

import json
import re
from pathlib import Path

import pytest
from graft_nodes import dev
from graft_nodes.headless import command
from graft_nodes.tests.test_help_pages import links, locale, said_by_the_code
from graft_nodes.training.optimizers.registry import OPTIMIZERS
from PIL import Image

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
HELP_PAGES = sorted((ROOT / "web" / "docs").rglob("*.md"))


def unfenced(path):
    return re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def anchors(path):
    """What GitHub makes of a page's headings."""
    found = set()
    for heading in re.findall(r"^#+ (.+)$", unfenced(path), flags=re.MULTILINE):
        plain = re.sub(r"[`*]", "", heading).lower()
        found.add(re.sub(r"[^\w\- ]", "", plain).replace(" ", "-"))
    return found


def dead_links(page, targets):
    """Those of the links of a page that lead to no file, or to no heading of one."""
    dead = []
    for target in targets:
        if target.startswith(("http:", "https:", "mailto:")):
            continue
        file, _, anchor = target.partition("#")
        to = page
        if file:
            to = (page.parent / file).resolve()
        if not to.exists() or (anchor and anchor not in anchors(to)):
            dead.append(target)
    return dead


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    assert not dead_links(page, re.findall(r"\]\(([^)\s]+)\)", unfenced(page)))


@pytest.mark.parametrize("page", HELP_PAGES, ids=lambda page: page.relative_to(ROOT / "web" / "docs").as_posix())
def test_links_of_help_pages_lead_somewhere(page):
    assert not dead_links(page, links(unfenced(page)))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_of_the_tree_that_a_page_names_are_there(page):
    """`folder/file.py`, also with a star; what is made up has no folder in the tree, and git ignores what is built and
    what a run leaves.
    """
    named = re.findall(r"`([\w.*-]+(?:/[\w.*-]+)+/?)`", unfenced(page))
    ignored = tuple(line.removeprefix("/") for line in (ROOT / ".gitignore").read_text(encoding="utf-8").split())
    mine = {name for name in named if (ROOT / name.split("/")[0]).is_dir() and not name.startswith(ignored)}
    assert not [name for name in sorted(mine) if not list(ROOT.glob(name))]


def test_files_and_functions_of_the_picture_are_there():
    """docs/architecture.svg has "file name" on its lines, a method with its class."""
    text = (ROOT / "docs" / "architecture.svg").read_text(encoding="utf-8")
    named = re.findall(r'class="f"[^>]*>([\w/.]+)(?: <tspan class="d">([\w.]+)<)?', text)
    assert len(named) > 25
    for file, name in named:
        path = ROOT / file if "/" in file else ROOT / "patches" / "core" / file
        code = path.read_text(encoding="utf-8")
        for word in name.split(".") if name else ():
            assert re.search(rf"(?:def|class) {word}\b", code), f"{file} has no {word}"


def test_every_document_is_named_in_the_readme():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert not [page.name for page in (ROOT / "docs").glob("*.md") if f"](docs/{page.name})" not in text]


def commands():
    """(page, words) of every line in a page that runs Graft or dev.py, in code and in the running text."""
    python = r"(?:python3? -m graft_nodes|\S*python\S* \S*custom_nodes[/\\]graft-nodes|graft)"
    graft = rf"{python} (?=(?:run|plan|check|doctor|editor)\b)"
    for page in [*PAGES, *HELP_PAGES]:
        text = page.read_text(encoding="utf-8")
        for program, rest in re.findall(rf"({graft}|python dev\.py )([^`\n|]*)", text):
            words = re.findall(r'"[^"]*"|\S+', rest.partition("  #")[0])
            yield page, "dev" if "dev.py" in program else "graft", [word.strip('"') for word in words]


def test_every_command_and_option_of_the_pages_is_there():
    """What the words are given to is not run, as it takes hours or needs a person's files."""
    (choices,) = (action.choices for action in command.build_parser()._actions if action.dest == "command")
    options = {name: set(parser._option_string_actions) for name, parser in choices.items()}
    developers = dict(re.findall(r"^python dev\.py ([\w-]+)()", dev.__doc__, re.MULTILINE))
    found, wrong = 0, []
    for page, program, words in commands():
        known = developers if program == "dev" else options
        name = words[0].rstrip(".,:;)")
        given = [
            re.sub(r"[=\]).,:;].*", "", word.lstrip("[")) for word in words[1:] if word.lstrip("[").startswith("--")
        ]
        found += 1
        if name not in known or (program == "graft" and not set(given) <= options[name]):
            wrong.append((page.name, program, words))
    assert found > 80
    assert not wrong


def test_workflows_that_commands_name_can_run():
    """Those that are in the tree: what a command would set is set."""
    named = [
        (page, words)
        for page, program, words in commands()
        if program == "graft" and ("example_workflows" in " ".join(words) or "every_node" in " ".join(words))
    ]
    assert named
    for page, (_, path, *rest) in named:
        file = ROOT / path.removeprefix("custom_nodes/graft-nodes/")
        assert command.main(["check", str(file), "--embedded", *rest]) == 0, (page.name, path)


def test_the_commands_to_try_it_stand_alone():
    assert "```\npython dev.py demo\npython dev.py test\n```" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_rows_of_the_readme_are_measured_in_the_benchmarks():
    """Every figure of the five rows is one of docs/benchmarks.md."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    section = re.search(r"^## Measured\n(.*?)^## ", readme, flags=re.MULTILINE | re.DOTALL)[1]
    rows = [line for line in section.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == 5
    benchmarks = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    for figure in re.findall(r"\d[\d.,]*\d(?:x| s\b| MB)?", " ".join(rows)):
        assert figure in benchmarks, figure


def test_the_messages_of_troubleshooting_are_those_of_the_code():
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    quoted = re.findall(r'\*"(.+?)"\*', text, flags=re.DOTALL)
    parts = [part.strip(" ,;:") for message in quoted for part in message.split("…")]
    assert len(quoted) > 40
    assert not [part for part in parts if part not in said_by_the_code()]


def labels_of_the_nodes():
    """The names of each node's inputs in the editor, by the name of the node."""
    nodes = locale("en").values()
    return {node["display_name"]: [named["name"] for named in node.get("inputs", {}).values()] for node in nodes}


def test_each_row_of_coming_from_names_an_input_of_its_node():
    """With `filters`, whose keys are the Dataset's."""
    labels, text = labels_of_the_nodes(), (ROOT / "docs" / "coming_from.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    checked, wrong = 0, []
    for cells in rows:
        for node in cells[1].split("; "):
            if node in labels:
                checked += 1
                words = [*labels[node], "filters", "loss_scale.txt", "masks", "always", "in front of"]
                if not any(word in cells[2] for word in words):
                    wrong.append(cells)
    assert checked > 80
    assert not wrong


def readme():
    return (ROOT / "README.md").read_text(encoding="utf-8")


def section(text, heading):
    return re.search(rf"^## {heading}\n(.*?)(?=^## |\Z)", text, flags=re.MULTILINE | re.DOTALL)[1]


def titles_in(folder):
    return {path.stem for path in (ROOT / folder).glob("*.json")}


def test_the_readme_names_every_blueprint_and_every_template():
    named = set(re.findall(r"(?<!\*)\*([^*\n]+(?:\n[^*\n]+)?)\*(?!\*)", readme()))
    assert len(readme().splitlines()) < 200
    named = {" ".join(name.split()) for name in named}
    assert len(titles_in("subgraphs")) == 2
    assert titles_in("subgraphs") <= named
    assert titles_in("example_workflows") <= named


def test_what_you_can_train_names_template_node_and_help_page():
    """Each row: templates that are there, a node that is in them, and that node's own help page."""
    ids = {node["display_name"]: identifier for identifier, node in locale("en").items()}
    rows = [
        line.strip("| ").split(" | ")
        for line in section(readme(), "What you can train").splitlines()
        if "web/docs" in line
    ]
    assert len(rows) >= 11
    for _, templates, node, page in rows:
        titles = re.findall(r"\*([^*]+)\*", templates)
        assert titles
        for title in titles:
            content = (ROOT / "example_workflows" / f"{title}.json").read_text(encoding="utf-8")
            assert ids[node] in {one["type"] for one in json.loads(content)["nodes"]}, title
        assert page == f"[{ids[node]}](web/docs/{ids[node]}.md)"
        assert (ROOT / "web" / "docs" / f"{ids[node]}.md").exists()


def test_the_page_of_the_editor_has_each_blueprint_with_its_settings_and_sockets():
    text = section((ROOT / "docs" / "editor.md").read_text(encoding="utf-8"), "Blueprints")
    assert not [title for title in titles_in("subgraphs") if f"**{title}**" not in text]
    data = json.loads((ROOT / "subgraphs" / "Train a LoRA (Graft).json").read_text(encoding="utf-8"))
    (node,), inner = data["nodes"], data["definitions"]["subgraphs"][0]
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")][1:]
    ours = {kind: one["display_name"] for kind, one in locale("en").items()}
    titles = {**ours, "CLIPTextEncode": "Prompt"}  # as it is called there
    assert [row[1] for row in rows] == [titles[kind] for kind in kinds_of_the_settings(node, inner)]
    assert all(f"`{slot['name']}`" in text for slot in node["inputs"] if "widget" not in slot)


def kinds_of_the_settings(node, inner):
    """The type of the node inside that each setting of a blueprint goes to, in their order."""
    types = {one["id"]: one["type"] for one in inner["nodes"]}
    targets = {link["id"]: types.get(link["target_id"]) for link in inner["links"]}
    into = {slot["name"]: targets[slot["linkIds"][0]] for slot in inner["inputs"]}
    return [into[slot["name"]] for slot in node["inputs"] if "widget" in slot]


def test_the_numbers_of_the_nodes_page_are_counted():
    text = (ROOT / "docs" / "nodes.md").read_text(encoding="utf-8")
    assert f"- With {len(list(OPTIMIZERS))} optimizers" in text
    hosts = re.findall(r"0\.\d+\.\d+", (ROOT / "docs" / "families.md").read_text(encoding="utf-8").splitlines()[2])
    assert f"in {['no', 'one', 'two', 'three', 'four'][len(hosts)]} versions of ComfyUI" in text


@pytest.mark.parametrize("page", ["troubleshooting.md"])
def test_a_pages_contents_list_every_heading(page):
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert re.findall(r"^- \[(.+)\]\(#", text, flags=re.MULTILINE) == re.findall(r"^## (.+)$", text, flags=re.MULTILINE)


def test_the_moving_picture_moves_and_is_small():
    """tests/editor/moving_picture.py records it."""
    file = ROOT / "docs" / "editor.webp"
    assert file.stat().st_size < 1.5e6
    with Image.open(file) as picture:
        assert picture.n_frames > 20
