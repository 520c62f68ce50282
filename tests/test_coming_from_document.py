"""docs/coming_from.md has what the declared settings are called elsewhere."""

import pytest
from graft_nodes.docs import write_coming_from as writer
from graft_nodes.nodes import NODES
from graft_nodes.settings.declaration import settings_of

TEXT = writer.DOCUMENT.read_text(encoding="utf-8")
DECLARING = [node for node in NODES if node.settings_class is not None]
NAMED = [
    pytest.param(node, trainer, setting, id=f"{node.define_schema().node_id}-{name}-{trainer}")
    for node in DECLARING
    for name, setting in settings_of(node.settings_class).items()
    for trainer in setting.elsewhere
]


def test_its_tables_are_written():
    assert writer.document(TEXT) == TEXT, "run python docs/write_coming_from.py"


@pytest.mark.parametrize(("node", "trainer", "setting"), NAMED)
def test_every_name_elsewhere_is_in_a_table_with_node_and_label(node, trainer, setting):
    """Read from the document, whoever wrote it: a node that no table names would be left out."""
    name = setting.elsewhere[trainer]
    first = (name if isinstance(name, str) else name[0]).split(", ")[0]
    title, cells = node.define_schema().display_name, [line.split(" | ") for line in TEXT.splitlines()]
    rows = [row for row in cells if row[0].startswith((f"| `{first}`", f"| {first}"))]
    assert [row for row in rows if row[1] == title and row[2].startswith(setting.label)]


def test_names_are_those_of_the_trainers_with_a_title():
    trainers = {case.values[1] for case in NAMED}
    assert trainers == writer.TITLES.keys()
    assert len(NAMED) > 200


def test_only_what_is_between_the_marks_is_written():
    text = "before\n<!-- settings of everydream2: GraftEMA -->\nold\n<!-- end -->\n| by hand |\n"
    written = writer.document(text)
    assert written.startswith("before\n<!-- settings of everydream2: GraftEMA -->\n| EveryDream2 | node | input |\n")
    assert written.endswith("|\n<!-- end -->\n| by hand |\n") and "old" not in written
    assert (
        "| `--ema_strength_target` | EMA Settings | start share at the end: with decay schedule `target` |\n" in written
    )
