"""Writes the tables of docs/coming_from.md from what the settings are called elsewhere:
`python docs/write_coming_from.py`, after a change of a declared setting. What stands around the tables is written by
hand.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

DOCUMENT = Path(__file__).resolve().parent / "coming_from.md"

TITLES = {
    "kohya": "sd-scripts",
    "ai_toolkit": "AI-Toolkit",
    "onetrainer": "OneTrainer",
    "everydream2": "EveryDream2",
    "diffusers": "diffusers",
    "lunnova": "LunNova",
}
LABELS = ("onetrainer",)  # its names are those of its window, and no code

# A table stands between these comments, which name the trainer and the nodes.
_TABLE = re.compile(r"(<!-- settings of (\w+): ([\w ]+) -->\n).*?(<!-- end -->)", flags=re.DOTALL)


def rows(trainer: str, node: Any) -> Iterator[str]:
    """The rows of a node's settings that a trainer has as well."""
    from graft_nodes.settings.declaration import settings_of

    title = node.define_schema().display_name
    for setting in settings_of(node.settings_class).values():
        if trainer not in setting.elsewhere:
            continue
        name = setting.elsewhere[trainer]
        names, note = (name, "") if isinstance(name, str) else name
        if trainer not in LABELS:
            names = ", ".join(f"`{one}`" for one in names.split(", "))
        meaning = f"{setting.label}: {note}" if note else setting.label
        yield f"| {names} | {title} | {meaning} |"


def table(trainer: str, nodes: Sequence[Any]) -> str:
    """The table of a trainer's names for the settings of these nodes."""
    head = [f"| {TITLES[trainer]} | node | input |", "|---|---|---|"]
    return "\n".join([*head, *(row for node in nodes for row in rows(trainer, node))]) + "\n"


def document(text: str) -> str:
    """The document with its tables written again."""
    from graft_nodes.nodes import NODES

    by_id = {node.define_schema().node_id: node for node in NODES}

    def written(found: re.Match[str]) -> str:
        begin, trainer, nodes, end = found.groups()
        return begin + table(trainer, [by_id[node] for node in nodes.split()]) + end

    return _TABLE.sub(written, text)


def main() -> None:
    """Write the document."""
    from graft_nodes.headless import embedded

    embedded.install()
    DOCUMENT.write_text(document(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
