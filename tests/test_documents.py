"""Links in README.md and the documents lead somewhere, and README claims what docs/benchmarks.md measured."""

import re
from pathlib import Path

import pytest
from graft_nodes.tests.test_help_pages import locale, said_by_the_code
from PIL import Image

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]


def unfenced(path):
    return re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def anchors(path):
    """What GitHub makes of a page's headings."""
    found = set()
    for heading in re.findall(r"^#+ (.+)$", unfenced(path), flags=re.MULTILINE):
        plain = re.sub(r"[`*]", "", heading).lower()
        found.add(re.sub(r"[^\w\- ]", "", plain).replace(" ", "-"))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    dead = []
    for target in re.findall(r"\]\(([^)\s]+)\)", unfenced(page)):
        if target.startswith(("http:", "https:", "mailto:")):
            continue
        file, _, anchor = target.partition("#")
        to = page
        if file:
            to = (page.parent / file).resolve()
        if not to.exists() or (anchor and anchor not in anchors(to)):
            dead.append(target)
    assert not dead


def test_every_document_is_named_in_the_readme():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert not [page.name for page in (ROOT / "docs").glob("*.md") if f"](docs/{page.name})" not in text]


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


def test_the_moving_picture_moves_and_is_small():
    """tests/editor/moving_picture.py records it."""
    file = ROOT / "docs" / "editor.webp"
    assert file.stat().st_size < 1.5e6
    with Image.open(file) as picture:
        assert picture.n_frames > 20
