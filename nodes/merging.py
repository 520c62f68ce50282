"""Nodes that make LoRAs without training: merge several LoRAs into one, or extract the difference of two models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from comfy_api.latest import io

from .. import host
from ..patches.lora_files.key_formats import registry as key_formats
from ..patches.lora_files.merge_methods import METHODS, MergeSettings
from ..patches.lora_files.stack_rows import read_stack_rows
from .lora import lora_entries
from .schema import GraftNode, LoraModel, LoraStack, inputs_of, search_aliases

if TYPE_CHECKING:
    from ..host.comfyui_objects import Clip, Model
    from ..patches.lora_files.entry import LoraEntry


def _report(merged: Any, source: str) -> str:
    """The line on a merge.MergedLora: what it is made of, its layers and ranks, and what the cut lost."""
    layers = sum(key.endswith((".lora_up.weight", ".diff", ".diff_b")) for key in merged.state)
    ranks = f"largest rank {merged.rank}"
    if merged.lowest_rank < merged.rank:
        ranks += f", lowest {merged.lowest_rank}"
    left_out = "nothing left out"
    if merged.lost:
        left_out = f"{_percent(merged.lost)} of the change left out (by norm)" + _worst_layer(merged.cut)
    return f"{source}: {layers} layers, {ranks}, {left_out}"


def _worst_layer(loss: Any) -> str:
    return f", most in {loss.worst_layer} ({_percent(loss.worst_share)})"


def _percent(share: float) -> str:
    """A share above 0, which never reads as none."""
    if share < 0.00005:
        return "less than 0.01%"
    return f"{share:.2%}"


def _losses(merged: Any, entries: Sequence[LoraEntry], method: str) -> list[str]:
    """A line for each file on what the method lost of its change, and one where it matters that it changes nothing."""
    about_zeros = METHODS.get(method).about_zeros
    lines = []
    for file, loss in merged.files.items():
        line = f"{entries[file].name}: {method} leaves nothing out"
        if loss.share:
            line = (
                f"{entries[file].name}: {method} leaves out {_percent(loss.share)} of its change (by norm)"
                + _worst_layer(loss)
            )
        lines.append(line)
        if loss.zeros and about_zeros:
            layers = "1 layer" if loss.zeros == 1 else f"{loss.zeros} layers"
            lines.append(f"{entries[file].name}: its change is zero in {layers}. {about_zeros}")
    return lines


class GraftMergeLoRAs(GraftNode):
    """Merges a stack of LoRAs into one LoRA."""

    settings_class = MergeSettings
    checked_together = (("method", "density", "resize", "resize_to", "epsilon"),)

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="GraftMergeLoRAs",
            display_name="Merge LoRAs",
            category="Graft/lora",
            description=(
                "Merges a whole stack with its strengths into one LoRA: exactly the same change, the closest change"
                " of a rank you choose, or a mix by TIES, DARE, DELLA and others."
            ),
            **search_aliases("merge lora", "combine lora", "resize lora", "svd", "ties", "dare", "della", "karcher"),
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
                        "0 keeps the change exactly and adds up the ranks; TIES, DARE and DELLA come as close as"
                        " those ranks allow. Above 0 the change is reduced to this rank by SVD, for a smaller file."
                        " The report says how much is lost."
                    ),
                ),
                io.Model.Input(
                    "model",
                    optional=True,
                    tooltip=(
                        "The model that the LoRAs are for. Needed for kinds whose change depends on the model's"
                        " weight: DoRA, OFT, BOFT, GLoRA, IA3 and set_weight."
                    ),
                ),
                io.Clip.Input(
                    "clip",
                    optional=True,
                    tooltip="The text encoder, connected together with the model, for LoRAs that train it too.",
                ),
                *inputs_of(cls.settings_class),
            ],
            outputs=[LoraModel.Output(display_name="LORA_MODEL"), io.String.Output(display_name="report")],
        )

    @classmethod
    def execute(
        cls, lora_stack: Sequence[Any], chosen: MergeSettings, rank: int = 0, model: Model = None, clip: Clip = None
    ) -> io.NodeOutput:
        from ..patches.lora_files import merge

        if clip is not None and model is None:
            raise ValueError("CLIP is connected without model: connect both, or neither")
        rows = read_stack_rows(lora_stack)
        scheduled = [row[0] for row in rows if row.schedule]
        if scheduled:
            raise ValueError(
                f"{', '.join(scheduled)}: a LoRA with a sampling schedule cannot be merged; clear the schedule, or"
                " use Patch Model with LoRA Stack"
            )
        entries = lora_entries(rows)
        if model is None:
            merged = merge.merge_loras(entries, rank, host.events.raise_if_interrupted, chosen)
            left_out = []
            for entry in entries:
                names = key_formats.embedding_names(entry.state_dict)
                if names:
                    left_out.append(
                        f"{entry.name}: {len(names)} embeddings in the file are left out ({', '.join(names)})"
                    )
        else:
            changes, left_out = host.lora_stacks.lora_changes(model, clip, entries)
            merged = merge.merge_changes(changes, rank, host.events.step_counter(len(changes)), chosen)
        source = " + ".join(f"{entry.name} at {entry.strength_model:g}" for entry in entries)
        if chosen.method != "sum":
            source = f"{chosen.method} of {source}"
        return io.NodeOutput(
            merged.state, "\n".join([_report(merged, source), *_losses(merged, entries, chosen.method), *left_out])
        )


class GraftExtractLoRA(GraftNode):
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
            **search_aliases("extract lora", "model difference", "svd"),
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
    def execute(cls, model: Model, base: Model, rank: int = 16) -> io.NodeOutput:
        from ..patches.lora_files import merge
        from ..patches.patching.plan import scheduled_weights

        changes = host.model_difference.model_difference(model, base)
        merged = merge.extract_lora(changes, rank, host.events.step_counter(len(changes)))
        lines = [_report(merged, f"difference of {len(changes)} weights")]
        for name, patcher in (("model", model), ("base model", base)):
            count = len(scheduled_weights(host.lora_injection.carried_stacks(patcher)))
            if count:
                lines.append(f"{name}: ignores the sampling schedule of {count} weights")
        return io.NodeOutput(merged.state, "\n".join(lines))


NODES = [GraftMergeLoRAs, GraftExtractLoRA]
