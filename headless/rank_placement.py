"""Decides which nodes of a workflow run on which rank, and builds the small nodes that send results to other ranks.

The first rank runs everything. The other ranks run only the nodes that a TrainStep depends on and whose results cannot
be sent (models, text encoders, states). The first rank sends them plain results (pictures, latents, conditionings,
LoRAs, numbers, texts).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .embedded import Catalogue, Graph, workflow

TRAINS = "TrainStep"
# Types that hold only tensors, texts and numbers, whichever node outputs them.
PLAIN = frozenset(
    (
        "INT",
        "FLOAT",
        "STRING",
        "BOOLEAN",
        "COMBO",
        "LATENT",
        "IMAGE",
        "MASK",
        "AUDIO",
        "SIGMAS",
        "CONDITIONING",
        "LORA_MODEL",
        "LORA_STACK",
        "LOSS_MAP",
    )
)
# Inputs that TrainStep uses only on the first rank, which shows previews; their values on the other ranks.
SHOWS: dict[str, Any] = {
    "positive": None,
    "negative": None,
    "latent": None,
    "preview_every": 0,
    "tensorboard": False,
    "prompts": "",
}

Values = list[list[Any]]  # one list for each output, as the host stores them


def trained(graph: Graph, outputs: Sequence[str]) -> list[str]:
    """The TrainStep nodes that the outputs depend on."""
    return sorted(node_id for node_id in workflow.reachable(graph, outputs) if graph[node_id]["class_type"] == TRAINS)


def sent(graph: Graph, steps: Sequence[str], look_up: Catalogue) -> tuple[set[str], dict[str, list[int]]]:
    """For these TrainSteps: (nodes that run on every rank, {node whose results are sent: its sent outputs})."""
    used_slots: dict[str, set[int]] = {}
    everywhere, pending = set(steps), list(steps)
    while pending:
        for name, source, slot in workflow.links(graph, pending.pop()):
            if graph[source]["class_type"] == TRAINS or name not in SHOWS:
                used_slots.setdefault(source, set()).add(slot)
            if (
                source in used_slots
                and source not in everywhere
                and not _plain(graph, source, used_slots[source], look_up)
            ):
                everywhere.add(source)
                pending.append(source)
    return everywhere, {source: sorted(slots) for source, slots in used_slots.items() if source not in everywhere}


def _plain(graph: Graph, node_id: str, slots: set[int], look_up: Catalogue) -> bool:
    schema = look_up(graph[node_id]["class_type"])
    return schema is not None and all(slot < len(schema.outputs) and schema.outputs[slot] in PLAIN for slot in slots)


def first(graph: Graph, everywhere: set[str], sent: Mapping[str, Sequence[int]]) -> Graph:
    """The graph of the first rank: results for the other ranks pass through a node that sends them, then go to the
    TrainStep.
    """
    result = _copy_nodes(graph, set(graph), everywhere, sent)
    for source, slots in sent.items():
        inputs = {f"value{number}": [source, slot] for number, slot in enumerate(slots)}
        result[carrier(source)] = {
            "class_type": carrier(source),
            "inputs": inputs,
            "_meta": {"title": "to the other ranks"},
        }
    return result


def others(graph: Graph, everywhere: set[str], sent: Mapping[str, Sequence[int]], steps: Sequence[str]) -> Graph:
    """The graph of every other rank: the nodes that run on every rank, and nodes that receive the sent results."""
    result = _copy_nodes(graph, everywhere, everywhere, sent)
    for node_id in steps:
        inputs = result[node_id]["inputs"]
        off = {name: value for name, value in SHOWS.items() if value is not None}
        result[node_id]["inputs"] = {**{name: value for name, value in inputs.items() if name not in SHOWS}, **off}
    for source in sent:
        result[carrier(source)] = {"class_type": carrier(source), "inputs": {}}
    return result


def _copy_nodes(graph: Graph, kept: set[str], everywhere: set[str], sent: Mapping[str, Sequence[int]]) -> Graph:
    """A copy of the `kept` nodes; those that run on every rank take sent results from the carrier nodes."""

    def link(name: str, value: Any) -> Any:
        if workflow.is_link(value) and str(value[0]) in sent and name not in SHOWS:
            return [carrier(str(value[0])), list(sent[str(value[0])]).index(value[1])]
        return value

    return {
        node_id: {**node, "inputs": {k: link(k, v) if node_id in everywhere else v for k, v in node["inputs"].items()}}
        for node_id, node in graph.items()
        if node_id in kept
    }


def carrier(node_id: str) -> str:
    """The id, and also the class name, of the node that carries the results of `node_id` between ranks."""
    return f"{node_id} on every rank"


def carrying(types: Sequence[Any], act: Callable[[Values], Values], inputs: bool, output: bool = False) -> type:
    """A node class that outputs `act(inputs)`, both as the host's lists of values. Without `inputs`, `act` gets an
    empty list.
    """

    class Carrier:
        RETURN_TYPES = tuple(types)
        OUTPUT_IS_LIST = (True,) * len(types)
        INPUT_IS_LIST = True
        FUNCTION = "carry"
        CATEGORY = "Graft/ranks"
        OUTPUT_NODE = output

        @classmethod
        def INPUT_TYPES(cls) -> dict:
            return {"required": {f"value{number}": (kind,) for number, kind in enumerate(types)} if inputs else {}}

        def carry(self, **values: list) -> tuple:
            return tuple(act([values[f"value{number}"] for number in range(len(types))] if inputs else []))

    return Carrier
