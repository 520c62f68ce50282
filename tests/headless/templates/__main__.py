"""Compares what Graft makes of ComfyUI's own templates with what ComfyUI's front end exports in a real browser, value
by value: python dev.py templates. The exports stay under build/templates, and are made again with --again.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from pathlib import Path

from . import compare, packages

DOCS = Path(__file__).resolve().parents[3] / "docs" / "templates.md"
START = "<!-- the table: written by `python dev.py templates --write` -->\n"
FRONT_ENDS = ("1.49.6", "1.58.1")


def main(arguments: list[str] | None = None) -> int:
    """Export what is not exported yet, compare, print the table; 1 if a value differs that may not."""
    options = _parser().parse_args(arguments)
    checkout = newest(options.comfyui)
    paths = [path for path in packages.templates() if not options.names or path.stem in options.names]
    results = {}
    version = "?"
    for front_end in options.front_ends or FRONT_ENDS:
        folder = _exported(checkout, front_end, paths, options.again)
        nodes = json.loads((folder / "nodes" / "object_info.json").read_text(encoding="utf-8"))
        look_up = compare.definitions(nodes)
        read = [(path, json.loads((folder / path.name).read_text(encoding="utf-8"))) for path in paths]
        results[front_end] = [compare.compare(path, exported, look_up, front_end) for path, exported in read]
        print(f"front end {front_end}: {compare.counts(results[front_end])}")
        version = folder.parent.name
    text = compare.table(results, version)
    print(text)
    if options.write:
        before = DOCS.read_text(encoding="utf-8").partition(START)[0]
        DOCS.write_text(before + START + "\n" + text, encoding="utf-8")
    wrong = [one for outcomes in results.values() for one in outcomes if one.kind in (compare.WRONG, compare.FAILED)]
    return min(len(wrong), 1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python dev.py templates", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="TEMPLATE", help="only these templates")
    parser.add_argument(
        "--comfyui",
        default=os.environ.get("COMFYUI_PATH", "~/ComfyUI"),
        metavar="DIR",
        help="the ComfyUI checkout whose nodes count; of several, the newest (default: COMFYUI_PATH or ~/ComfyUI)",
    )
    parser.add_argument(
        "--front-end",
        action="append",
        dest="front_ends",
        metavar="VERSION",
        help=f"a version of ComfyUI's front end; may be given again (default: {' and '.join(FRONT_ENDS)})",
    )
    parser.add_argument("--again", action="store_true", help="export again what was exported before")
    parser.add_argument("--write", action="store_true", help=f"write the table into docs/{DOCS.name}")
    return parser


def newest(named: str) -> str:
    """The checkout of a path, or the newest one of several, which are named as in PATH."""
    checkouts = [str(Path(one).expanduser().resolve()) for one in named.split(os.pathsep) if one]
    return max(checkouts, key=lambda one: [int(part) for part in re.findall(r"\d+", _version(one))])


def _exported(checkout: str, front_end: str, paths: list[Path], again: bool) -> Path:
    """The folder of a front end's exports, with those that are missing made now."""
    version = _version(checkout)
    folder = packages.BUILD / "exports" / version / front_end
    missing = [path for path in paths if again or not (folder / path.name).exists()]
    if missing:
        from . import export

        with export.server(checkout, front_end) as address:
            nodes = folder / "nodes"
            nodes.mkdir(parents=True, exist_ok=True)
            text = json.dumps(export.node_definitions(address))
            (nodes / "object_info.json").write_text(text, encoding="utf-8")
            export.export(address, missing, folder)
    return folder


def _version(checkout: str) -> str:
    """The version of a ComfyUI checkout."""
    names: dict[str, str] = {}
    for line in (Path(checkout) / "comfyui_version.py").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition("=")
        names[name.strip()] = value.strip().strip('"')
    return names["__version__"]


if __name__ == "__main__":
    sys.exit(main())
