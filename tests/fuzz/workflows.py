"""Workflow files in both formats: read, made a graph, --set applied, checked; every refusal is a WorkflowError that
lists what is wrong.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from graft_nodes.comfyui_api_stubs.tests.workflows.recorded import FOLDER, recorded_catalogue
from graft_nodes.headless import workflow_file
from graft_nodes.headless.embedded import WorkflowError, workflow
from hypothesis import strategies as st

from .damage import damaged_bytes, damaged_json, text_of
from .engine import Target

ROOT = Path(__file__).resolve().parents[2]
API = [*sorted((ROOT / "tests/headless").glob("*/*.api.json")), *sorted(FOLDER.parent.glob("*/*.api.json"))]
EDITOR = [
    *sorted(FOLDER.glob("*.editor.json")),
    *sorted((ROOT / "example_workflows").glob("*.json")),
]
_LOOKS = (
    "pos",
    "size",
    "flags",
    "color",
    "bgcolor",
    "order",
    "groups",
    "extra",
    "version",
    "revision",
    "boundingBox",
    "localized_name",
)


def texts(paths: list[Path]) -> list[str]:
    """The files as short JSON, without what only says how a node looks."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(entry) for key, entry in value.items() if key not in _LOOKS}
        return [plain(entry) for entry in value] if isinstance(value, list) else value

    found = [json.dumps(plain(json.loads(path.read_text(encoding="utf-8")))) for path in paths]
    return [text for text in found if len(text) < 12_000]


def assignments() -> st.SearchStrategy[list[str]]:
    """What may stand behind --set."""
    nodes = st.sampled_from(("1", "2", "3", "KSampler", "a.b", "", "nobody", "Train Step", "12:5", "OddSource"))
    names = st.sampled_from(
        ("seed", "steps", "text", "cfg", "latent", "flag", "choice", "filename_prefix", "nothing", "model", "a.b")
    )
    odd = st.sampled_from(
        (
            "",
            "1",
            "-1",
            "true",
            "null",
            "[]",
            "[1, 0]",
            '["1", 0]',
            "{}",
            "NaN",
            "1e999",
            "9" * 5000,
            "[" * 3000,
            '"x',
            "euler",
        )
    )
    values = st.one_of(odd, st.text(max_size=10), st.integers().map(str), st.floats().map(str))
    good = st.builds(lambda node, name, value: f"{node}.{name}={value}", nodes, names, values)
    return st.one_of(st.just([]), st.lists(st.one_of(good, good, st.text(max_size=12)), max_size=2))


class ApiWorkflows(Target):
    """The API format."""

    name = "api"
    night = 1_000_000
    refusals = (WorkflowError,)
    files = API

    def __init__(self, place: Path) -> None:
        super().__init__(place)
        self.path, self.look_up = place / "workflow.json", recorded_catalogue()

    def cases(self) -> st.SearchStrategy[Any]:
        """(a file's bytes, assignments)."""
        trees = texts(self.files)
        damaged = damaged_json(trees, 4).map(text_of)
        return st.tuples(
            st.one_of(damaged, damaged, damaged, damaged_bytes([text.encode() for text in trees])), assignments()
        )

    def attempt(self, case: Any) -> None:
        """As `run` does it up to the host."""
        body, values = case
        self.path.write_bytes(body)
        document = workflow_file.read(str(self.path))
        document.class_types()
        graph, problems = workflow.set_values(document.graph(self.look_up), values, self.look_up)
        before = json.dumps(graph)
        problems += workflow.check(graph, self.look_up)
        workflow.without_broken_parts(graph, self.look_up)
        assert json.dumps(graph) == before, "checking has changed the graph"
        for problem in problems:
            json.dumps(problem.as_json())
            assert str(problem)
        if problems:
            raise WorkflowError(problems)

    def sound(self) -> None:
        """What was read is looked through for garbage again, as between the runs of a batch."""
        workflow.forget()


class EditorWorkflows(ApiWorkflows):
    """The editor's own format."""

    name = "editor"
    files = EDITOR
