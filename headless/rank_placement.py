"""Which nodes of a workflow run on which rank, and the small nodes that carry results from one rank to the others.

Everything runs on the first rank. The others run what a TrainStep stands on, as far as it is live (models, text
encoders, states): plain results of the first rank (pictures, latents, conditionings, LoRAs, numbers, texts) are sent to
them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from . import workflow
from .workflow import Catalogue, Graph

TRAINS = "TrainStep"
# Types that are nothing but tensors, texts and numbers, whoever makes them.
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
# What TrainStep needs on the first rank alone: it shows, the others do not.
SHOWS: dict[str, Any] = {"positive": None, "negative": None, "latent": None, "preview_every": 0, "tensorboard": False}

Values = list[list[Any]]  # of each output a list, as the host keeps them


def trained(graph: Graph, outputs: Sequence[str]) -> list[str]:
    """The nodes that train, of those that the outputs need."""
    return sorted(node_id for node_id in workflow.reachable(graph, outputs) if graph[node_id]["class_type"] == TRAINS)


def sent(graph: Graph, steps: Sequence[str], look_up: Catalogue) -> tuple[set[str], dict[str, list[int]]]:
    """(nodes that run on every rank, nodes whose results are sent with the outputs that are) for these TrainSteps."""
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
    """The graph of the first rank: what is sent passes through a node that sends it before it goes on
    to a TrainStep.
    """
    result = _linked(graph, set(graph), everywhere, sent)
    for source, slots in sent.items():
        inputs = {f"value{number}": [source, slot] for number, slot in enumerate(slots)}
        result[carrier(source)] = {
            "class_type": carrier(source),
            "inputs": inputs,
            "_meta": {"title": "to the other ranks"},
        }
    return result


def others(graph: Graph, everywhere: set[str], sent: Mapping[str, Sequence[int]], steps: Sequence[str]) -> Graph:
    """The graph of every other rank: what runs on every rank; what is sent comes from nodes that take it."""
    result = _linked(graph, everywhere, everywhere, sent)
    for node_id in steps:
        inputs = result[node_id]["inputs"]
        off = {name: value for name, value in SHOWS.items() if value is not None}
        result[node_id]["inputs"] = {**{name: value for name, value in inputs.items() if name not in SHOWS}, **off}
    for source in sent:
        result[carrier(source)] = {"class_type": carrier(source), "inputs": {}}
    return result


def _linked(graph: Graph, kept: set[str], everywhere: set[str], sent: Mapping[str, Sequence[int]]) -> Graph:
    """A copy of some nodes, in which those that run everywhere take what is sent from its carrier."""

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
    """Id and class of the node that carries another one's results."""
    return f"{node_id} on every rank"


def carrying(types: Sequence[Any], act: Callable[[Values], Values], inputs: bool, output: bool = False) -> type:
    """A node class that gives what `act` makes of its inputs, both as the lists that the host keeps; without inputs
    `act` gets none.
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
