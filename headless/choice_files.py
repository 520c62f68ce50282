"""What to do about a choice that this host lacks: most choices are files, and theirs is a folder."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from .embedded import COMBO, UPLOADS, Catalogue, Graph, Input, Problem
from .hosts import Host


def with_advice(host: Host, graph: Graph, look_up: Catalogue, problems: Sequence[Problem]) -> list[Problem]:
    """The problems, each one of a missing choice with where its files belong, near names, and how to set another."""
    return [_advise(host, graph, look_up, problem) for problem in problems]


def _advise(host: Host, graph: Graph, look_up: Catalogue, problem: Problem) -> Problem:
    schema = look_up(problem.class_type)
    item = schema.input(problem.input) if schema is not None and problem.input else None
    if item is None or item.name != problem.input or item.type != COMBO:
        return problem
    value = graph[problem.node]["inputs"].get(problem.input)
    if not isinstance(value, str) or value in (item.options or ()):
        return problem
    from ..host.folders import near_files

    near = near_files(value, [str(option) for option in item.options or ()])
    places = _folders(host, problem.class_type, item)
    advice = []
    if near:
        advice.append(f"did you mean {' or '.join(map(repr, near))}?")
    if places:
        advice.append(f"put the file into {' or '.join(places)}, or")
    advice.append(f"choose another with --set {_word(f'{problem.node}.{problem.input}=NAME')}")
    return replace(problem, message=f"{problem.message}; {' '.join(advice)}")


def _word(text: str) -> str:
    """A word of a command line."""
    return f'"{text}"' if " " in text else text


def _folders(host: Host, class_type: str, item: Input) -> list[str]:
    """The folders whose files an input lists; none where they are not files."""
    if any(item.settings.get(upload) for upload in UPLOADS):
        return [host.folders.get_input_directory()]
    options = set(map(str, item.options or ()))
    with names_asked_for(host.folders) as asked:
        host.nodes.NODE_CLASS_MAPPINGS[class_type].INPUT_TYPES()
    kinds = [kind for kind, names in asked.items() if options.issuperset(names)]
    if options and any(asked[kind] for kind in kinds):
        kinds = [kind for kind in kinds if asked[kind]]
    elif options and not _are_files(options):
        return []
    return list(dict.fromkeys(_folder(host.folders, kind) for kind in kinds))


def _are_files(options: set[str]) -> bool:
    """Whether choices beside those of an empty folder leave room for files: "None" does, a list of modes does not."""
    return options <= {"None", "none", ""}


def _folder(folders: Any, kind: str) -> str:
    """The folder of a kind of models that has its name, else the first one."""
    paths = [str(path) for path in folders.get_folder_paths(kind)]
    return next((path for path in paths if path.replace("\\", "/").endswith(f"/{kind}")), paths[0])


@contextlib.contextmanager
def names_asked_for(folders: Any) -> Iterator[dict[str, list[str]]]:
    """The kinds of models whose files are listed during the block, with their names."""
    asked: dict[str, list[str]] = {}
    listed = folders.get_filename_list

    def list_and_note(kind: str) -> list[str]:
        names = list(listed(kind))
        asked[kind] = names
        return list(names)

    folders.get_filename_list = list_and_note
    try:
        yield asked
    finally:
        folders.get_filename_list = listed
