"""Nodes that make LoRAs of what is there: several LoRAs into one, the difference of two models as a LoRA."""

from __future__ import annotations

from comfy_api.latest import io

from .. import host
from ..patches import blocks, files, low_rank
from ..patches.rows import rows_of
from .aliases import aliases
from .lora import found_files
from .sockets import LoraModel, LoraStack


def _said(made: low_rank.Made, what: str) -> str:
    layers = sum(key.endswith((".lora_up.weight", ".diff", ".diff_b")) for key in made.state)
    error = f"{made.lost:.2%} of the change (its norm) left out" if made.lost else "nothing left out"
    return f"{what}: {layers} layers, largest rank {made.rank}, {error}"


class GraftMergeLoRAs(io.ComfyNode):
    """A stack of LoRAs as one LoRA."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="GraftMergeLoRAs",
            display_name="Merge LoRAs",
            category="Graft/lora",
            description="Makes one LoRA of a whole stack, strengths included: the same change, or the nearest one of a chosen rank.",
            **aliases("merge lora", "combine lora", "resize lora", "svd"),
            inputs=[
                LoraStack.Input("lora_stack", tooltip="The LoRAs and strengths to merge: LoRA and LoCon files, and full differences; block "
                    "weights count."),
                io.Int.Input(
                    "rank", default=0, min=0, max=4096,
                    tooltip="0 keeps the change exactly (the ranks add up). Above 0 it is cut to this rank by SVD; the report says what is "
                    "lost.",
                ),
            ],
            outputs=[LoraModel.Output(display_name="LORA_MODEL"), io.String.Output(display_name="report")],
        )

    @classmethod
    def execute(cls, lora_stack, rank=0) -> io.NodeOutput:
        listed = rows_of(lora_stack)
        scheduled = [row[0] for row in listed if row.schedule]
        if scheduled:
            raise ValueError(f"{', '.join(scheduled)}: a schedule over sampling cannot be merged; leave it empty, or patch with the stack")
        loras = [(row[0], files.load_once(path)[0], row[1], row[2]) for row, path in zip(listed, found_files(listed), strict=True)]
        made = low_rank.merged(loras, rank, by_block=[blocks.parse(row.blocks) if row.blocks else {} for row in listed])
        return io.NodeOutput(made.state, _said(made, " + ".join(f"{name} at {model:g}" for name, _, model, _ in loras)))


class GraftExtractLoRA(io.ComfyNode):
    """The difference of two models as a LoRA."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="GraftExtractLoRA",
            display_name="Extract LoRA",
            category="Graft/lora",
            description="Makes a LoRA of what one model has and another has not, by SVD; patches and LoRA stacks count.",
            **aliases("extract lora", "model difference", "svd"),
            inputs=[
                io.Model.Input("model", tooltip="The changed model."),
                io.Model.Input("base", tooltip="The model it came from; the LoRA leads from here to there."),
                io.Int.Input("rank", default=16, min=1, max=4096, tooltip="Rank of the LoRA; the report says what is lost."),
            ],
            outputs=[LoraModel.Output(display_name="LORA_MODEL"), io.String.Output(display_name="report")],
        )

    @classmethod
    def execute(cls, model, base, rank=16) -> io.NodeOutput:
        changes = host.lora.differences(model, base)
        bar, done = host.events.progress(len(changes)), iter(range(1, len(changes) + 1))

        def advance() -> None:
            host.events.raise_if_interrupted()
            bar(next(done))

        made = low_rank.extracted(changes, rank, advance)
        return io.NodeOutput(made.state, _said(made, f"difference of {len(changes)} weights"))


NODES = [GraftMergeLoRAs, GraftExtractLoRA]
