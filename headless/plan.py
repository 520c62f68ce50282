"""`plan`: what the trainings of a workflow would take, without a step. Start Training's states go to a node of its own,
and nothing runs that these do not need.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from .embedded import Graph, Problem, WorkflowError, workflow
from .hosts import Host
from .torchrun import of_pack

STARTS = ("GraftTrainStart", "GraftTrainPairStart")
NODE = "GraftPlanTraining"  # only here; no editor shows it
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


def memory_size(text: str) -> int:
    """Bytes of a size such as 12GB, 500 MB or 12000000000."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]?)B?\s*", text, re.IGNORECASE)
    if found is None or not float(found[1]):
        raise argparse.ArgumentTypeError(f"expected a size such as 12GB, got {text!r}")
    return int(float(found[1]) * _UNITS[found[2].upper()])


class PlanTraining:
    """Takes a training state and says what a step of it takes. `planning` is host.memory_planning of the pack that the
    host loaded.
    """

    planning: Any = None
    RETURN_TYPES = ()
    OUTPUT_NODE = True
    FUNCTION = "plan"
    CATEGORY = "Graft/training"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        """The state, and the memory in bytes; 0 is none."""
        return {"required": {"state": ("TRAIN_STATE",), "memory": ("INT", {"default": 0, "max": 2**63 - 1})}}

    def plan(self, state: Any, memory: int) -> dict[str, Any]:
        """The report, for the command to print."""
        return {"ui": {"text": [self.planning.report_plan(state, memory)]}}


def of_trainings(host: Host, graph: Graph, memory: int) -> Graph:
    """The graph that plans every training of `graph`. WorkflowError if there is none."""
    starts = [node_id for node_id, node in graph.items() if node.get("class_type") in STARTS]
    if not starts:
        raise WorkflowError([workflow.problem(graph, "", "the workflow has no Start Training, so there is no plan")])
    of_host = {"planning": of_pack(host, "host.memory_planning")}
    host.nodes.NODE_CLASS_MAPPINGS[NODE] = type("PlanTraining", (PlanTraining,), of_host)
    needed = workflow.reachable(graph, starts)
    plans = {node_id: node for node_id, node in graph.items() if node_id in needed}
    for node_id in starts:
        plans[f"plan {node_id}"] = {"class_type": NODE, "inputs": {"state": [node_id, 0], "memory": memory}}
    return plans


def loading(host: Host, memory: int) -> AbstractContextManager[None]:
    """A context in which the models of a workflow are loaded to be planned, for a device with that memory (0: this)."""
    return of_pack(host, "host.memory_planning").load_for_planning(memory)


def advice(problems: Sequence[Problem]) -> str:
    """What to do where files of a workflow are not on this machine; empty where that is not what is wrong."""
    if not any("is not in the list" in problem.message for problem in problems):
        return ""
    return (
        "  plan needs the files that the workflow names: put them into the models folder, or change the name with"
        " --set NODE.INPUT=VALUE. What models of full size take is in docs/planning.md"
    )


def texts(outputs: dict[str, Any]) -> list[str]:
    """The reports among the outputs of a run."""
    return [text for node, output in outputs.items() if node.startswith("plan ") for text in output["text"]]
