"""Reads a workflow in either JSON format as an API graph ({id: {class_type, inputs, _meta}}), gives its inputs other
values, and checks the graph before anything runs.
"""

from __future__ import annotations

import contextlib
import difflib
import gc
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from . import browser_nodes, editor_json, widgets
from .problem import Problem, WorkflowError
from .schema import COMBO, DYNAMIC_COMBO, NUMBERS, Input, Schema

WRAPPERS = ("prompt", "workflow", "input")
Graph = dict[str, dict[str, Any]]
Catalogue = Callable[[str], Schema | None]


@dataclass(frozen=True)
class Document:
    """A workflow file: `data` is its JSON, in the editor's format if `is_editor`, else in the API format."""

    path: str
    data: dict[str, Any]
    is_editor: bool

    def class_types(self) -> set[str]:
        """The node types that a host needs for this workflow, without editor-only nodes such as Note and Reroute."""
        if self.is_editor:
            self._refuse_malformed()
            return editor_json.class_types(self.data)
        return {str(node["class_type"]) for node in self.data.values() if node.get("class_type")}

    @cached_property
    def of_no_server(self) -> frozenset[str]:
        """The node types that may exist only in the browser, as far as the file tells: an API graph holds none."""
        if not self.is_editor or self._malformed:
            return frozenset()
        return editor_json.of_no_server(self.data)

    def graph(self, look_up: Catalogue) -> Graph:
        """The API graph. Raises WorkflowError that lists everything that cannot be translated."""
        with no_garbage():
            if self.is_editor:
                self._refuse_malformed()
                return editor_json.to_api(self.data, look_up)
            return {str(node_id): _api_node(node) for node_id, node in self.data.items()}

    def _refuse_malformed(self) -> None:
        if self._malformed:
            raise WorkflowError(self._malformed)

    @cached_property
    def _malformed(self) -> list[Problem]:
        return editor_json.malformed(self.data)


@contextlib.contextmanager
def no_garbage() -> Iterator[None]:
    """Do not look for garbage in the block, and later not in what it made: it makes many objects that stay to the end
    of the run, and going through them takes longer than making them.
    """
    looks = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if looks:
            gc.enable()


def forget() -> None:
    """Look for garbage again in everything that was read: a run that is not the last one of its process is over."""
    gc.unfreeze()
    gc.collect()


def _unwrapped(data: Any) -> Any:
    """The workflow in what servers are sent: {"prompt": …}, and {"input": {"workflow": …}} of serverless ones."""
    for _ in range(len(WRAPPERS)):
        if not isinstance(data, dict) or isinstance(data.get("nodes"), list):
            break
        inner = [data[name] for name in WRAPPERS if isinstance(data.get(name), dict)]
        inner = [one for one in inner if "class_type" not in one]
        if not inner:
            break
        data = next((one for one in inner if one), inner[0])
    return data


def parse(data: Any, path: str = "workflow") -> Document:
    """Detect the format of a workflow's JSON. Raises WorkflowError if it is neither."""
    data = _unwrapped(data)
    if isinstance(data, dict) and isinstance(data.get("nodes"), list):
        return Document(path, data, True)
    expected = (
        'an API workflow ({"id": {"class_type": …, "inputs": {…}}}) or an editor workflow ({"nodes": […], "links":'
        " […]})"
    )
    if not isinstance(data, dict) or not data:
        raise WorkflowError([Problem(f"{path}: not a workflow; expected {expected}, got {_kind(data)}")])
    malformed = [
        str(key)
        for key, node in data.items()
        if not isinstance(node, dict) or not isinstance(node.get("inputs", {}), dict)
    ]
    if malformed:
        raise WorkflowError(
            [
                Problem(
                    f"{path}: not a workflow; expected {expected}; these entries are not nodes: {', '.join(malformed)}"
                )
            ]
        )
    return Document(path, data, False)


def title(graph: Graph, node_id: str) -> str:
    """A node's title in the editor, else its class."""
    node = graph.get(node_id, {})
    meta = node.get("_meta")
    return str((meta.get("title") if isinstance(meta, dict) else None) or node.get("class_type") or "")


def problem(graph: Graph, node_id: str, message: str, name: str = "") -> Problem:
    """A Problem at a node of the graph."""
    return Problem(message, node_id, title(graph, node_id), str(graph.get(node_id, {}).get("class_type") or ""), name)


def is_link(value: Any) -> bool:
    """Whether an input's value is a link: [node id, output slot]."""
    return isinstance(value, list) and len(value) == 2 and isinstance(value[0], (str, int)) and type(value[1]) is int


def malformed_assignments(assignments: Iterable[str]) -> list[Problem]:
    """What is wrong with --set in any workflow."""
    problems = []
    for assignment in assignments:
        target, equals, _ = assignment.partition("=")
        node, _, name = target.rpartition(".")
        if not (equals and node and name):
            message = f"--set {assignment}: expected NODE.INPUT=VALUE (NODE is an id or a unique title)"
            problems.append(Problem(message))
    return problems


def set_values(graph: Graph, assignments: Iterable[str], look_up: Catalogue) -> tuple[Graph, list[Problem]]:
    """A copy of the graph with every NODE.INPUT=VALUE applied, and the problems with those that could not be."""
    with no_garbage():
        result = {node_id: {**node, "inputs": dict(node["inputs"])} for node_id, node in graph.items()}
    problems = []
    for assignment in assignments:
        try:
            node_id, item, text = _target(result, assignment, look_up)
            inputs = result[node_id]["inputs"]
            _keep_unknown_choice(inputs, item[1], f"--set {assignment}")
            inputs[item[0]] = _value(text, item[1], f"--set {assignment}")
        except WorkflowError as error:
            problems += error.problems
    return result, problems


def check(graph: Graph, look_up: Catalogue, of_no_server: Collection[str] = ()) -> list[Problem]:
    """All problems of the graph: unknown classes and cycles anywhere; bad links, bad values and missing inputs in the
    nodes that would run. `of_no_server` are the unknown classes that may exist only in the browser.
    """
    problems = cannot_run(graph, look_up, of_no_server)
    roots = _roots(graph, look_up)
    if not roots:
        problems.append(
            Problem(
                "the workflow has no output node (such as Save Image, Preview Image or Train Step), so nothing would"
                " run"
            )
        )
    needed = reachable(graph, roots or list(graph))
    for node_id in graph:
        if node_id in needed and not _is_unknown(graph[node_id], look_up):
            problems += _check_node(graph, node_id, look_up)
    return problems + [_cycle(graph, cycle) for cycle in cycles(graph)]


def cannot_run(graph: Graph, look_up: Catalogue, of_no_server: Collection[str] = ()) -> list[Problem]:
    """What the graph needs and this host cannot have: nodes and choices that it lacks, and in the nodes that would run
    pictures that only a browser draws.
    """
    problems = []
    needed = reachable(graph, _roots(graph, look_up) or list(graph))
    for node_id, node in graph.items():
        if _is_unknown(node, look_up):
            problems.append(problem(graph, node_id, _unknown(node, of_no_server)))
        elif node_id in needed:
            for name, message in widgets.cannot_run(_schema(node, look_up), node["inputs"]):
                problems.append(problem(graph, node_id, message, name))
    return problems


def _roots(graph: Graph, look_up: Catalogue) -> list[str]:
    """The nodes that make the graph run: output nodes, and unknown ones, which may be some."""
    roots = []
    for node_id, node in graph.items():
        if _is_unknown(node, look_up) or _schema(node, look_up).output_node:
            roots.append(node_id)
    return roots


def _is_unknown(node: Mapping[str, Any], look_up: Catalogue) -> bool:
    return look_up(str(node.get("class_type") or "")) is None


def reachable(graph: Graph, roots: Sequence[str]) -> set[str]:
    """The nodes that the roots need, the roots included."""
    reached, pending = set(), [root for root in roots if root in graph]
    while pending:
        node_id = pending.pop()
        if node_id not in reached:
            reached.add(node_id)
            pending += [source for _, source, _ in links(graph, node_id) if source in graph]
    return reached


def run_order(graph: Graph, look_up: Catalogue) -> list[str]:
    """The nodes that would run, each after those that it needs."""
    order: list[str] = []
    reached: set[str] = set()
    for root in (root for root in _roots(graph, look_up) if root not in reached):
        reached.add(root)
        trail = [(root, _sources(graph, root))]
        while trail:
            node_id, sources = trail[-1]
            source = next((one for one in sources if one not in reached), None)
            if source is None:
                order.append(node_id)
                trail.pop()
            else:
                reached.add(source)
                trail.append((source, _sources(graph, source)))
    return order


def links(graph: Graph, node_id: str) -> Iterator[tuple[str, str, int]]:
    """The node's links as (input, source node, source slot)."""
    for name, value in graph[node_id]["inputs"].items():
        if is_link(value):
            yield name, str(value[0]), value[1]


def cycles(graph: Graph) -> list[list[str]]:
    """The cycles of the graph, each as a closed path [a, b, …, a]: one for each link that closes a cycle in a
    depth-first search.
    """
    closed_paths: list[list[str]] = []
    finished: set[str] = set()
    for start in graph:
        if start in finished:
            continue
        path, trail = [start], [(start, _sources(graph, start))]
        positions = {start: 0}  # of the nodes on the path
        while trail:
            node_id, sources = trail[-1]
            source = next(sources, None)
            if source is None:
                finished.add(node_id)
                trail.pop()
                del positions[path.pop()]
            elif source in positions:
                closed_paths.append([*path[positions[source] :], source])
            elif source not in finished:
                trail.append((source, _sources(graph, source)))
                positions[source] = len(path)
                path.append(source)
    return closed_paths


def without_broken_parts(graph: Graph, look_up: Catalogue) -> tuple[Graph, set[str]]:
    """A copy of a broken graph that a host can validate: without unknown nodes, dangling links and one link of each
    cycle.

    Also returns the nodes that lost an input.
    """
    known_nodes = {key: node for key, node in graph.items() if look_up(str(node.get("class_type") or ""))}
    repaired: Graph = {key: {**node, "inputs": dict(node["inputs"])} for key, node in known_nodes.items()}
    cut: set[str] = set()
    closing = {(path[-2], path[-1]) for path in cycles(graph)}
    for node_id, node in repaired.items():
        for name, source, slot in list(links(repaired, node_id)):
            if (
                source not in repaired
                or not 0 <= slot < len(_schema(repaired[source], look_up).outputs)
                or (node_id, source) in closing
            ):
                del node["inputs"][name]
                cut.add(node_id)
    return repaired, cut


def _sources(graph: Graph, node_id: str) -> Iterator[str]:
    """The nodes that a node takes inputs from, each once."""
    return iter(dict.fromkeys(source for _, source, _ in links(graph, node_id) if source in graph))


def _api_node(node: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a node that always has `inputs`, with links written as ["id", slot]."""
    inputs = {
        name: [str(value[0]), value[1]] if is_link(value) else value
        for name, value in (node.get("inputs") or {}).items()
    }
    if not isinstance(node.get("_meta", {}), dict):  # hosts look for a title in it
        node = {name: value for name, value in node.items() if name != "_meta"}
    return {**node, "inputs": inputs}


def _kind(data: Any) -> str:
    return {dict: "an empty object", list: "a list", type(None): "null"}.get(type(data), f"a {type(data).__name__}")


def _schema(node: Mapping[str, Any], look_up: Catalogue) -> Schema:
    schema = look_up(str(node.get("class_type") or ""))
    if schema is None:
        raise AssertionError(f"no schema for {node.get('class_type')!r}")
    return schema


def _unknown(node: Mapping[str, Any], of_no_server: Collection[str]) -> str:
    if not node.get("class_type"):
        return "has no class_type"
    message = (
        f"this host has no node '{node['class_type']}'; load the pack that brings it (--pack DIR), or name a ComfyUI"
        " that has it (--comfyui DIR)"
    )
    if node["class_type"] in of_no_server:
        return f"{message}. {browser_nodes.NO_SERVER_BROUGHT_IT}"
    return message


def _cycle(graph: Graph, path: Sequence[str]) -> Problem:
    names = " -> ".join(f'{node_id} "{title(graph, node_id)}"' for node_id in reversed(path))
    return problem(
        graph, path[0], f"the links make a cycle: {names}; a workflow must not feed a node's result back to itself"
    )


def _check_node(graph: Graph, node_id: str, look_up: Catalogue) -> list[Problem]:
    schema, inputs = _schema(graph[node_id], look_up), graph[node_id]["inputs"]
    problems = []
    for item in schema.inputs:
        if item.required and item.name not in inputs and not item.dynamic:
            if item.widget:
                advice = "give it a value"
            else:
                advice = f"link a {item.type} to it"
            problems.append(
                problem(graph, node_id, f"required input is missing (type {item.type}); {advice}", item.name)
            )
    for name, value in inputs.items():
        declared_input = schema.input(name)
        if isinstance(value, list):
            message = _check_link(graph, value, declared_input, schema, look_up)
        else:
            if declared_input is None or declared_input.dynamic:
                message = None
            else:
                message = _check_value(value, declared_input, schema)
        if message:
            problems.append(problem(graph, node_id, message, name))
    return problems


def _check_link(graph: Graph, value: list[Any], item: Input | None, schema: Schema, look_up: Catalogue) -> str | None:
    if not is_link(value):
        return f'expected a link ["node id", output slot] or a value, got the list {json.dumps(value)[:80]}'
    source, slot = str(value[0]), value[1]
    if source not in graph:
        return f"linked to node {source}, which is not in the workflow"
    source_schema = look_up(str(graph[source].get("class_type") or ""))
    if source_schema is None:
        return None
    if not 0 <= slot < len(source_schema.outputs):
        return (
            f'linked to output {slot} of node {source} "{title(graph, source)}", which has {len(source_schema.outputs)}'
            " outputs"
        )
    output_type = source_schema.outputs[slot]
    if item is None or item.dynamic or "input_types" in schema.own_checks or compatible(output_type, item.type):
        return None
    return f'expected {item.type}, got {output_type} from output {slot} of node {source} "{title(graph, source)}"'


def compatible(given: str, wanted: str) -> bool:
    """Whether an output of type `given` fits an input of type `wanted`: the types are equal, one is "*", or lists such
    as "A,B" share a type.
    """
    if "*" in (given, wanted) or given == wanted or "COMFY_MATCHTYPE_V3" in (given, wanted):
        return True
    type_sets = [{name.strip() for name in kind.split(",")} for kind in (given, wanted)]
    return not type_sets[0].isdisjoint(type_sets[1])


def _check_value(value: Any, item: Input, schema: Schema) -> str | None:
    """The error of a value, by the rules of ComfyUI's validation; also refuses a text for a BOOLEAN, which ComfyUI
    would read as true.
    """
    if isinstance(value, dict) and "__value__" in value:
        value = value["__value__"]
    if item.type in NUMBERS:
        try:
            value = (int if item.type == "INT" else float)(value)
        except (TypeError, ValueError, OverflowError):
            return f"expected {item.type}, got {json.dumps(value, default=str)}"
    if item.type == "BOOLEAN" and not isinstance(value, (bool, int, float)):
        return f"expected BOOLEAN (true or false), got {json.dumps(value, default=str)}"
    if schema.checks(item.name):
        return None
    return _check_limits(value, item)


def _check_limits(value: Any, item: Input) -> str | None:
    low, high = item.settings.get("min"), item.settings.get("max")
    if item.type in NUMBERS and low is not None and value < low:
        return f"{value} is below the minimum {low}"
    if item.type in NUMBERS and high is not None and value > high:
        return f"{value} is above the maximum {high}"
    if item.type == COMBO and item.options is not None:
        if item.settings.get("multiselect") and isinstance(value, list):
            values = value
        else:
            values = [value]
        missing = [entry for entry in values if entry not in item.options]
        if missing:
            return f"{', '.join(repr(entry) for entry in missing)} is not in the list {_choices(item.options)}"
    return None


def _keep_unknown_choice(inputs: Mapping[str, Any], item: Input, what: str) -> None:
    """Raise if the choice to set is none of this host: the file's other values were read without knowing its inputs."""
    choice = inputs.get(item.name, item.default)
    if item.type == DYNAMIC_COMBO and not isinstance(choice, list) and choice not in item.choices:
        message = (
            f"{what}: the workflow was saved with {choice!r}, which is not a choice of this ComfyUI, so the values"
            " beside it are not those of another choice; choose in the editor, or update ComfyUI"
        )
        raise WorkflowError([Problem(message)])


def _choices(options: Sequence[Any]) -> str:
    return f"[{_first_twenty([str(option) for option in options])}]"


def _first_twenty(names: Sequence[str]) -> str:
    """The names with commas, and how many there are where that is more than 20."""
    text = ", ".join(names[:20])
    if len(names) > 20:
        text += f", … {len(names)} in all"
    return text


def _target(graph: Graph, assignment: str, look_up: Catalogue) -> tuple[str, tuple[str, Input], str]:
    """Parse NODE.INPUT=VALUE into the node id, the input (its name and description) and the value's text."""
    malformed = malformed_assignments([assignment])
    if malformed:
        raise WorkflowError(malformed)
    target, _, text = assignment.partition("=")
    splits = [(target[:index], target[index + 1 :]) for index, letter in enumerate(target) if letter == "."]
    matches = [(node_ids, name) for node, name in splits if (node_ids := _named(graph, node))]
    if not matches:
        raise WorkflowError([Problem(f"--set {assignment}: {_no_such_node(graph, splits[-1][0])}")])
    node_ids, name = matches[-1]
    if len(node_ids) > 1:
        ids = ", ".join(node_ids)
        message = (
            f"--set {assignment}: {len(node_ids)} nodes have the title '{title(graph, node_ids[0])}' (ids {ids});"
            " use the id"
        )
        raise WorkflowError([Problem(message)])
    node_id = node_ids[0]
    schema = look_up(str(graph[node_id].get("class_type") or ""))
    if schema is None:
        raise WorkflowError([])  # check() reports the unknown class
    for candidates, candidate in matches:
        item = schema.input(candidate)
        if candidates == node_ids and item is not None:
            return node_id, (candidate, item), text
    choices = ", ".join(item.name for item in schema.inputs) or "none"
    message = f"--set {assignment}: has no input '{name}'; its inputs are {choices}"
    raise WorkflowError([problem(graph, node_id, message)])


def _no_such_node(graph: Graph, name: str) -> str:
    """Which nodes there are, at most 20 of them, those with a similar title first."""
    similar = difflib.get_close_matches(name, [title(graph, node_id) for node_id in graph], n=3)
    nodes = sorted(graph, key=lambda node_id: title(graph, node_id) not in similar)
    named = [f'{node_id} "{title(graph, node_id)}"' for node_id in nodes]
    return f"no node has the id or title '{name}'; the nodes are {_first_twenty(named)}"


def _named(graph: Graph, name: str) -> list[str]:
    if name in graph:
        return [name]
    return [node_id for node_id in graph if title(graph, node_id) == name]


def _value(text: str, item: Input, what: str) -> Any:
    """Convert the text of a --set to the input's type: parsed as JSON if that fits, else the text itself."""
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        parsed = text
    kind = item.type.upper()
    fits = {
        "STRING": True,
        "INT": isinstance(parsed, int) and not isinstance(parsed, bool),
        "FLOAT": isinstance(parsed, (int, float)) and not isinstance(parsed, bool),
        "BOOLEAN": isinstance(parsed, bool),
    }.get(kind, not isinstance(parsed, list))
    if not item.dynamic and not item.widget and kind not in ("*", "STRING", "INT", "FLOAT", "BOOLEAN", COMBO):
        raise WorkflowError(
            [Problem(f"{what}: input '{item.name}' takes a link of type {item.type}, which has no value to set")]
        )
    if not fits:
        raise WorkflowError([Problem(f"{what}: input '{item.name}' expects {item.type}, got {text!r}")])
    if kind == "STRING":
        if isinstance(parsed, str):
            return parsed
        return text
    if kind == COMBO and text in (item.options or ()):
        return text
    return parsed
