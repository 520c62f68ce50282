"""The nodes from Preview Begin to Preview End: found in a workflow, and run for each preview by node expansion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

BEGIN = "GraftPreviewBegin"
INPUT = "previews"  # of Train Step, where Preview End is connected
GIVEN = ("MODEL", "CLIP", "VAE", "step")  # the outputs of Preview Begin


@dataclass(frozen=True)
class PreviewGraph:
    """What lies between Preview Begin and Preview End of a workflow: nodes in API format by id, the ids of the Preview
    Begins, the link to Preview End, and the id of the Train Step that it is connected to, with its number of outputs.
    """

    nodes: Mapping[str, Mapping[str, Any]]
    begins: frozenset[str]
    end: Sequence[Any]
    train_step: str
    outputs: int

    def uses(self, output: str) -> bool:
        """Whether one of Preview Begin's outputs is connected."""
        links = [value for node in self.nodes.values() for value in _links(node)]
        return any(source in self.begins and GIVEN[index] == output for source, index in links)

    def expand(self, given: Sequence[Any], waiting: Any) -> tuple[dict[str, Any], list[Any]]:
        """The graph of one preview: these nodes with the values that Preview Begin gives, and behind them a Train Step
        that gets `waiting` as its state. Returns it with links to that node's outputs.

        What lies outside is linked to where it is, so it runs once. The editor shows the nodes that the user placed as
        those that run.
        """
        from comfy_execution.graph_utils import GraphBuilder

        graph = GraphBuilder()
        clones = {key: graph.node(node["class_type"], key) for key, node in self.nodes.items()}
        for key, clone in clones.items():
            clone.set_override_display_id(key)
            for name, value in self.nodes[key]["inputs"].items():
                clone.set_input(name, value)
            for name, (source, index) in _named_links(self.nodes[key]):
                if source in self.begins:
                    clone.set_input(name, given[index])
                elif source in clones:
                    clone.set_input(name, clones[source].out(index))
        source, index = self.end
        step = graph.node("TrainStep", self.train_step, state=waiting, previews=clones[source].out(index))
        return graph.finalize(), [step.out(number) for number in range(self.outputs)]


def find_preview_graph(workflow: Any, node: str, outputs: int) -> PreviewGraph | None:
    """What is connected to `previews` of a Train Step with so many outputs in a running workflow (ComfyUI's
    DynamicPrompt); None where nothing is.

    Raises ValueError where no Preview Begin leads there.
    """
    end = workflow.get_node(node)["inputs"].get(INPUT)
    if end is None:
        return None
    found: dict[str, Mapping[str, Any]] = {}
    follows: dict[str, bool] = {}  # whether a node comes after a Preview Begin
    begins: set[str] = set()
    pending = [end[0]]
    while pending:
        key = pending[-1]
        inner = found.setdefault(key, workflow.get_node(key))
        if inner["class_type"] == BEGIN:
            begins.add(key)
            follows[key] = True
        sources = [source for source, _ in _links(inner)]
        if node in sources:
            raise ValueError(
                f"Train Step: previews comes from node {key}, which is connected to an output of this very Train Step."
                " Connect it to Preview Begin, which gives the model as it is at each preview."
            )
        missing = [source for source in sources if source not in found]
        if missing and key not in follows:
            pending.append(missing[0])
            continue
        follows.setdefault(key, any(follows.get(source) for source in sources))
        pending.pop()
    if not begins:
        raise ValueError(
            "Train Step: previews is connected, and no Preview Begin leads to its Preview End, so every preview would"
            " be the same. Connect MODEL of Preview Begin to your sampler."
        )
    nodes = {key: inner for key, inner in found.items() if follows[key] and key not in begins}
    return PreviewGraph(nodes, frozenset(begins), tuple(end), node, outputs)


def _named_links(node: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The links of a node's inputs, by name."""
    from comfy_execution.graph_utils import is_link

    return [(name, value) for name, value in node["inputs"].items() if is_link(value)]


def _links(node: Mapping[str, Any]) -> list[Any]:
    return [link for _, link in _named_links(node)]
