"""Compares what Graft makes of a workflow with what the front end exported, value by value; the table of it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ....headless import workflow_file
from ....headless.embedded import Problem, WorkflowError, catalogue, workflow

ABSENT = "absent"
EQUAL, BROWSER, REFUSED = "equal", "equal but for named fields", "not converted"
DISPUTED, WRONG, FAILED = "as the other front end sends it", "differs otherwise", "not exported by the front end"
NO_WORKFLOW = "no workflow"
NO_NODE, NO_CHOICE, NO_BROWSER = (
    "it has a node that this ComfyUI lacks",
    "it has a choice that this ComfyUI lacks",
    "it sends pictures that only a browser draws",
)
REASONS = (NO_NODE, NO_CHOICE, NO_BROWSER)
KINDS = (EQUAL, BROWSER, DISPUTED, REFUSED, NO_WORKFLOW, WRONG, FAILED)


@dataclass(frozen=True)
class BrowserOnly:
    """A field that may differ: the classes that have it (none: every class), its names, and why. With `unknown` it is
    one of nodes that this ComfyUI lacks.
    """

    classes: tuple[str, ...]
    names: tuple[str, ...]
    reason: str
    unknown: bool = False

    def holds(self, difference: Difference) -> bool:
        of_class = not self.classes or difference.kind in self.classes
        return difference.name in self.names and of_class and (difference.unknown or not self.unknown)

    def __str__(self) -> str:
        names = ", ".join(f"`{name}`" for name in self.names)
        if self.unknown:
            return f"{names} of a node that this ComfyUI lacks"
        if self.classes:
            return f"{names} of {', '.join(self.classes)}"
        return names


BROWSER_ONLY = (
    BrowserOnly(
        (),
        ("_meta.cnr_id", "_meta.ver"),
        "The pack and version that a node was saved with. Front end 1.58.1 writes them; no host reads them.",
    ),
    BrowserOnly(
        (),
        ("_meta.title",),
        "The title of a node that has none of its own: the front end takes it from its translations, Graft from the"
        " host, and of an unknown one its class. No host reads it.",
    ),
    BrowserOnly(
        ("SaveGLB", "Preview3D"),
        ("image",),
        "The 3D viewer that the editor puts on the node. The node has no such input.",
    ),
    BrowserOnly(
        (),
        ("viewport_state",),
        "Where the camera of the 3D viewer stands. Without a viewer it is empty, and the node takes its own default.",
    ),
    BrowserOnly(
        ("Load3D",),
        ("image",),
        "Pictures of what the browser shows of the 3D model. Graft sends none, and refuses to run the node.",
    ),
    BrowserOnly(
        ("Load3D",),
        ("upload 3d model", "upload extra resources", "clear"),
        "Buttons that the editor puts on the node. The node has no such inputs.",
    ),
    BrowserOnly(
        (),
        ("class_type",),
        "The front ends put a placeholder there, which has no class. Graft keeps the class, and refuses to run it.",
        unknown=True,
    ),
)


@dataclass(frozen=True)
class Disagreement:
    """Values that one front end sends otherwise than the other; Graft sends what the other one does."""

    front_end: str
    templates: tuple[str, ...]
    names: tuple[str, ...]
    reason: str

    def holds(self, front_end: str, template: str, name: str) -> bool:
        return front_end == self.front_end and template in self.templates and name in self.names


DISAGREEMENTS = (
    Disagreement(
        "1.49.6",
        ("templates_graphic_design_recomposer",),
        ("model.aspect_ratio",),
        "A Primitive holds `16:9`; 1.49.6 sends a model's name instead, 1.58.1 sends `16:9`.",
    ),
    Disagreement(
        "1.49.6",
        (
            "template_rob_realistic_2k_images_quick_variations",
            "templates_rob_realistic_2k_images_quick_variations.app",
        ),
        ("prompt", "source", "text"),
        "An output of a subgraph has two links, which no editor makes; 1.49.6 takes the other one than 1.58.1.",
    ),
    Disagreement(
        "1.58.1",
        ("api_flux2",),
        ("model.images.image_4",),
        "1.58.1 loses the last of four links when it loads the file; 1.49.6 sends it.",
    ),
    Disagreement(
        "1.58.1",
        (
            "api_bytedance_seedream_5_0_flash_image_edit",
            "api_nano_banana_2_1_image_edit",
            "api_openai_gpt_image_25_flare_image_edit",
            "api_openai_gpt_image_25_sunburst_image_edit",
        ),
        ("prompt",),
        "The file links an input that the unknown choice does not bring; 1.58.1 puts the link into `prompt`, 1.49.6"
        " drops it.",
    ),
    Disagreement(
        "1.49.6",
        (
            "api_anthropic_claude_fable5_1",
            "api_anthropic_claude_opus_5_5",
            "api_nano_banana_2_1_image_edit",
            "api_nano_banana_2_1_t2i",
        ),
        ("system_prompt",),
        "Behind an unknown choice the text box holds a number; 1.49.6 sends it as a number, 1.58.1 as a text.",
    ),
)


@dataclass(frozen=True)
class Difference:
    """One value that is not the front end's."""

    node: str
    kind: str
    name: str
    ours: Any
    theirs: Any
    unknown: bool = False  # whether this ComfyUI lacks the node

    def __str__(self) -> str:
        ours, theirs = json.dumps(self.ours)[:80], json.dumps(self.theirs)[:80]
        return f"node {self.node} ({self.kind}), {self.name}: Graft {ours}, the front end {theirs}"

    @property
    def browser_only(self) -> BrowserOnly | None:
        return next((entry for entry in BROWSER_ONLY if entry.holds(self)), None)


@dataclass
class Outcome:
    """What came of one template: not converted, or the differences; equal without either. `not_run` is why a run of it
    is refused.
    """

    name: str
    front_end: str
    no_workflow: bool = False
    refused: list[Problem] = field(default_factory=list)
    not_run: list[Problem] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    failed: str = ""  # why the front end exported nothing

    @property
    def reason(self) -> str:
        """Why a run of it is refused."""
        messages = [problem.message for problem in self.not_run]
        if any("this host has no node" in message for message in messages):
            return NO_NODE
        if any("is not a choice of this ComfyUI" in message for message in messages):
            return NO_CHOICE
        return NO_BROWSER

    @property
    def fields(self) -> list[BrowserOnly]:
        """The browser-only fields that differ."""
        return [entry for entry in BROWSER_ONLY if any(one.browser_only == entry for one in self.differences)]

    @property
    def wrong(self) -> list[Difference]:
        """The differences that have no reason."""
        return [one for one in self.differences if one.browser_only is None and not self._disputed(one)]

    def _disputed(self, difference: Difference) -> bool:
        """Whether the other front end sends what Graft does."""
        return any(entry.holds(self.front_end, self.name, difference.name) for entry in DISAGREEMENTS)

    @property
    def kind(self) -> str:
        if self.no_workflow:
            return NO_WORKFLOW
        if self.failed:
            return FAILED
        if self.wrong:
            return WRONG
        if self.refused:
            return REFUSED
        if any(map(self._disputed, self.differences)):
            return DISPUTED
        if self.differences:
            return BROWSER
        return EQUAL


def definitions(nodes: Mapping[str, Any]) -> Any:
    """What looks up the schema of a class in a server's /object_info."""

    def of(name: str, info: Mapping[str, Any]) -> type:
        inputs = info["input"]
        given = {"INPUT_TYPES": lambda: inputs, "RETURN_TYPES": tuple(info["output"])}
        return type(name, (), {**given, "OUTPUT_NODE": info["output_node"]})

    classes = {name: of(name, info) for name, info in nodes.items()}
    return catalogue(classes, {name: info["display_name"] for name, info in nodes.items()})


def compare(path: Path, exported: Mapping[str, Any], look_up: Any, front_end: str) -> Outcome:
    """What Graft makes of a workflow file beside what the front end exported."""
    outcome = Outcome(path.stem, front_end)
    if "nodes" not in json.loads(path.read_text(encoding="utf-8")):
        outcome.no_workflow = True
        return outcome
    if "error" in exported:
        outcome.failed = str(exported["error"])
        return outcome
    try:
        graph = workflow_file.read(str(path)).graph(look_up)
    except WorkflowError as error:
        outcome.refused = error.problems
        return outcome
    outcome.not_run = workflow.cannot_run(graph, look_up)
    outcome.differences = differences(json.loads(json.dumps(graph)), exported["prompt"], look_up)
    return outcome


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any], look_up: Any) -> list[Difference]:
    """The values that differ, those of nodes that this ComfyUI lacks too."""
    found = []
    for node_id in sorted({*ours, *theirs}):
        mine, other = _flat(ours.get(node_id)), _flat(theirs.get(node_id))
        kind = str(mine.get("class_type") or other.get("class_type"))
        unknown = look_up(kind) is None
        for name in sorted({*mine, *other}):
            values = (mine.get(name, ABSENT), other.get(name, ABSENT))
            if values[0] != values[1]:
                found.append(Difference(node_id, kind, name, *values, unknown))
    return found


def _flat(node: Mapping[str, Any] | None) -> dict[str, Any]:
    """A node's class, inputs and notes by name, and whether it is there."""
    if node is None:
        return {"the node": ABSENT}
    notes = {f"_meta.{name}": value for name, value in node["_meta"].items()}
    return {"the node": "there", "class_type": node.get("class_type"), **notes, **node["inputs"]}


def table(results: Mapping[str, Sequence[Outcome]], comfyui: str) -> str:
    """The results by front end as Markdown."""
    lines = ["| | " + " | ".join(f"front end {version}" for version in results) + " |"]
    lines.append("|---|" + "---:|" * len(results))
    for kind in KINDS:
        counts = [sum(one.kind == kind for one in outcomes) for outcomes in results.values()]
        lines.append(f"| {kind} | " + " | ".join(map(str, counts)) + " |")
    totals = [len(outcomes) for outcomes in results.values()]
    lines.append("| **templates** | " + " | ".join(map(str, totals)) + " |")
    lines += [
        "",
        "## Fields that may differ",
        "",
        "| field | why it may differ | templates |",
        "|---|---|---|",
    ]
    for only in BROWSER_ONLY:
        counts = [sum(only in one.fields for one in outcomes) for outcomes in results.values()]
        lines.append(f"| {only} | {only.reason} | {' / '.join(map(str, counts))} |")
    lines += ["", "## Where the front ends disagree", "", "| front end | templates | input | what it does |"]
    lines.append("|---|---|---|---|")
    for entry in DISAGREEMENTS:
        names = ", ".join(f"`{name}`" for name in entry.names)
        lines.append(f"| {entry.front_end} | {', '.join(entry.templates)} | {names} | {entry.reason} |")
    lines += ["", *_wrong(results), f"## Converted, and not run on ComfyUI {comfyui}", "", *_reasons(results), ""]
    lines += ["| node and input | what Graft says | templates |", "|---|---|---|"]
    refused: dict[tuple[str, str], set[str]] = {}
    for outcomes in results.values():
        for one in outcomes:
            for problem in [*one.refused, *one.not_run]:
                where = f"{problem.class_type}, `{problem.input}`" if problem.input else problem.class_type
                refused.setdefault((where, problem.message), set()).add(one.name)
    for (where, message), names in sorted(refused.items()):
        lines.append(f"| {where} | {_short(message)} | {', '.join(sorted(names))} |")
    return "\n".join(lines) + "\n"


def _reasons(results: Mapping[str, Sequence[Outcome]]) -> list[str]:
    """How many templates are refused for each reason, as a table."""
    lines = ["| why | " + " | ".join(f"front end {version}" for version in results) + " |"]
    lines.append("|---|" + "---:|" * len(results))
    for reason in REASONS:
        counts = [sum(bool(one.not_run) and one.reason == reason for one in found) for found in results.values()]
        lines.append(f"| {reason} | " + " | ".join(map(str, counts)) + " |")
    return lines


def _wrong(results: Mapping[str, Sequence[Outcome]]) -> list[str]:
    """The section of what differs elsewhere; empty if nothing does."""
    lines = []
    for version, outcomes in results.items():
        for one in outcomes:
            if one.kind == WRONG:
                lines += [f"- {one.name}, front end {version}: {difference}" for difference in one.wrong]
    return ["## Other differences", "", *lines, ""] if lines else []


def _short(message: str) -> str:
    """A message for a cell: the lists of choices in it are long."""
    text = message.replace("|", "\\|")
    return text if len(text) <= 300 else text[:297] + "…"


def counts(outcomes: Sequence[Outcome]) -> str:
    """How many there are of each kind, as a line."""
    return ", ".join(f"{kind}: {count}" for kind, count in Counter(one.kind for one in outcomes).most_common())
