"""Nodes that make LoRAs without training: merge several LoRAs into one, or extract the difference of two models."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from comfy_api.latest import io

from .. import host
from ..patches.lora_files import merge
from ..patches.lora_files.entry import LoraEntry
from ..patches.lora_files.key_formats import registry as key_formats
from ..patches.lora_files.stack_rows import rows_of
from ..patches.patching.plan import scheduled_weights
from .lora import lora_entries
from .schema import LoraModel, LoraStack, aliases


def _report(merged: merge.MergedLora, source: str) -> str:
    layers = sum(key.endswith((".lora_up.weight", ".diff", ".diff_b")) for key in merged.state)
    if merged.lost:
        left_out = f"{merged.lost:.2%} of the change left out (by norm)"
    else:
        left_out = "nothing left out"
    return f"{source}: {layers} layers, largest rank {merged.rank}, {left_out}"


def _embeddings_left_out(entries: Sequence[LoraEntry]) -> list[str]:
    lines = []
    for entry in entries:
        names = key_formats.embedding_names(entry.state_dict)
        if names:
            lines.append(f"{entry.name}: {len(names)} embeddings in the file are left out ({', '.join(names)})")
    return lines


def _advancing(steps: int) -> Callable[[], None]:
    """Returns a function to call after each of `steps` steps: it shows progress and stops when the user asks."""
    bar, step_numbers = host.events.progress(steps), iter(range(1, steps + 1))

    def advance() -> None:
        host.events.raise_if_interrupted()
        bar(next(step_numbers))

    return advance


class GraftMergeLoRAs(io.ComfyNode):
    """Merges a stack of LoRAs into one LoRA."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="GraftMergeLoRAs",
            display_name="Merge LoRAs",
            category="Graft/lora",
            description=(
                "Merges a whole stack into one LoRA, strengths included: the exact same change, or the"
                " closest one of a rank you choose."
            ),
            **aliases("merge lora", "combine lora", "resize lora", "svd"),
            inputs=[
                LoraStack.Input(
                    "lora_stack", tooltip="The LoRAs and strengths to merge, of any kind. Block weights count."
                ),
                io.Int.Input(
                    "rank",
                    display_name="maximum rank",
                    default=0,
                    min=0,
                    max=4096,
                    tooltip=(
                        "0 keeps the change exactly and adds up the ranks. Above 0 the change is reduced to this"
                        " rank by SVD, for a smaller file; the report says how much is lost."
                    ),
                ),
                io.Model.Input(
                    "model",
                    optional=True,
                    tooltip=(
                        "The model that the LoRAs are for. Needed for kinds that change the weight they find:"
                        " DoRA, OFT, BOFT, GLoRA, IA3 and set_weight."
                    ),
                ),
                io.Clip.Input(
                    "clip",
                    optional=True,
                    tooltip="The text encoder, connected together with the model, for LoRAs that train it too.",
                ),
            ],
            outputs=[LoraModel.Output(display_name="LORA_MODEL"), io.String.Output(display_name="report")],
        )

    @classmethod
    def execute(cls, lora_stack, rank=0, model=None, clip=None) -> io.NodeOutput:
        if clip is not None and model is None:
            raise ValueError("CLIP is connected without model: connect both, or neither")
        rows = rows_of(lora_stack)
        scheduled = [row[0] for row in rows if row.schedule]
        if scheduled:
            raise ValueError(
                f"{', '.join(scheduled)}: a LoRA with a sampling schedule cannot be merged; clear the schedule, or"
                " use Patch Model with LoRA Stack"
            )
        entries = lora_entries(rows)
        if model is None:
            merged = merge.merge_loras(entries, rank, host.events.raise_if_interrupted)
            left_out = _embeddings_left_out(entries)
        else:
            changes, left_out = host.lora.lora_changes(model, clip, entries)
            merged = merge.merge_changes(changes, rank, _advancing(len(changes)))
        strengths = " + ".join(f"{entry.name} at {entry.strength_model:g}" for entry in entries)
        return io.NodeOutput(merged.state, "\n".join([_report(merged, strengths), *left_out]))


class GraftExtractLoRA(io.ComfyNode):
    """Extracts the difference of two models as a LoRA."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="GraftExtractLoRA",
            display_name="Extract LoRA",
            category="Graft/lora",
            description=(
                "Extracts the difference between two models as a LoRA, by SVD. Patches and LoRA stacks"
                " on the models count."
            ),
            **aliases("extract lora", "model difference", "svd"),
            inputs=[
                io.Model.Input("model", tooltip="The changed model, such as a fine-tune."),
                io.Model.Input(
                    "base", tooltip="The model it came from. The LoRA turns this one into the changed model."
                ),
                io.Int.Input(
                    "rank",
                    display_name="rank",
                    default=16,
                    min=1,
                    max=4096,
                    tooltip=(
                        "The rank of the LoRA. Raise it for a closer match and a larger file; the report says"
                        " how much is lost."
                    ),
                ),
            ],
            outputs=[LoraModel.Output(display_name="LORA_MODEL"), io.String.Output(display_name="report")],
        )

    @classmethod
    def execute(cls, model, base, rank=16) -> io.NodeOutput:
        changes = host.model_difference.model_difference(model, base)
        merged = merge.extract_lora(changes, rank, _advancing(len(changes)))
        lines = [_report(merged, f"difference of {len(changes)} weights")]
        for name, patcher in (("model", model), ("base model", base)):
            count = len(scheduled_weights(host.lora_injection.carried_stacks(patcher)))
            if count:
                lines.append(f"{name}: ignores the sampling schedule of {count} weights")
        return io.NodeOutput(merged.state, "\n".join(lines))


NODES = [GraftMergeLoRAs, GraftExtractLoRA]
