"""LoRA nodes: GraftLoRAStack lists files, LoRAStackPatch puts a whole stack on a model, GraftLoadLoRAs does both,
GraftSaveLoRA writes a trained one, GraftLoRAEffect measures what each block does, GraftLoRAConflicts where LoRAs work
against each other.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from comfy_api.latest import io

from .. import host
from ..patches.lora_files.key_formats import registry as key_formats
from ..patches.lora_files.key_formats.key_format import DTYPES
from ..patches.lora_files.stack_rows import EMPTY, StackRow, parse, parse_schedule, read_stack_rows
from ..storage.digest import sha256
from ..storage.printable import logger
from ..storage.problem_list import problem_lines
from .schema import GraftNode, LoraModel, LoraStack, TrainState, advanced_input, file_size_input, search_aliases

if TYPE_CHECKING:
    from torch import Tensor

    from ..host.comfyui_objects import Clip, Conditioning, Latent, Model
    from ..patches.lora_files.entry import LoraEntry
    from ..training import state as states
    from ..training.expert_pair import ExpertPair

log = logger(__name__)

MODES = ("auto", "merge", "bypass", "host")
T = TypeVar("T")


def find_files(listed: list[StackRow]) -> list[str]:
    """The path of each row's file. Raises one ValueError that lists every row whose file is missing or outside the
    folder.
    """
    return _read_each(listed, host.folders.lora_path)


def read_files(listed: list[StackRow]) -> list[tuple[dict[str, Tensor], dict[str, str]]]:
    """(tensors, metadata) of each row's file. Raises one ValueError that lists every row whose file is missing or
    cannot be read.
    """
    from ..patches.lora_files.open_file import load_once

    return _read_each(listed, lambda name: load_once(host.folders.lora_path(name)))


def lora_entries(listed: list[StackRow]) -> list[LoraEntry]:
    """Reads the files of rows and returns the entries of a stack. Raises one ValueError that lists every unreadable
    row.
    """
    from ..patches.lora_files.entry import LoraEntry

    entries = []
    for row, (tensors, file_metadata) in zip(listed, read_files(listed), strict=True):
        name, strength_model, strength_clip = row
        schedule = parse_schedule(row.schedule)
        entries.append(
            LoraEntry(name, tensors, strength_model, strength_clip, row.partial, row.blocks, file_metadata, schedule)
        )
    return entries


def _read_each(listed: list[StackRow], find: Callable[[str], T]) -> list[T]:
    results = []
    rows_by_problem: dict[str, list[str]] = {}
    for row in listed:
        try:
            results.append(find(row[0]))
        except (ValueError, FileNotFoundError) as error:
            rows_by_problem.setdefault(str(error), []).append(str(row.number))
    if rows_by_problem:
        problems = [
            f"{'row' if len(numbers) == 1 else 'rows'} {', '.join(numbers)}: {problem}"
            for problem, numbers in rows_by_problem.items()
        ]
        raise ValueError("LoRA stack:\n" + problem_lines(problems))
    return results


def _describe_row(row: StackRow, state: Mapping[str, Tensor], of_training: Mapping[str, str]) -> str:
    """A row's line in the report: strengths, and what the file's metadata say."""
    from ..patches.lora_files import metadata

    extras = [f"{name} {value}" for name, value in (("blocks", row.blocks), ("schedule", row.schedule)) if value]
    extras += ["partial matches allowed"] if row.partial else []
    about_file = "; ".join(filter(None, (metadata.summarize_contents(state), metadata.summarize(of_training))))
    return ", ".join((f"{row[0]}: model {row[1]:g}, clip {row[2]:g}", *extras)) + (
        f"\n  {about_file}" if about_file else ""
    )


def _rows_input() -> Any:
    """The input whose value is the rows' JSON; the editor draws a list of rows for it."""
    return io.String.Input(
        "rows",
        display_name="LoRA rows",
        default=EMPTY,
        multiline=True,
        socketless=True,
        tooltip=(
            'The rows as JSON: {"version": 1, "rows": [{"file": "name.safetensors", "on": true,'
            ' "model": 1.0, "clip": 1.0, "blocks": "", "schedule": "", "partial": false}]}. blocks:'
            ' one number per block (LBW lists), names such as "IN=0, OUT05=0.5", or an LBW preset.'
            ' schedule: "0.2-0.8" of sampling, or points "0:1, 0.5:0.3, 1:0". Files come from the'
            " loras folder, or from output/loras/... if Graft saved them."
        ),
    )


def used_entries(listed: list[StackRow], clip: Clip) -> list[LoraEntry]:
    """The entries of the rows that change something: their files are read, the others' are not."""
    return lora_entries([row for row in listed if row[1] != 0.0 or (clip is not None and row[2] != 0.0)])


class _RowsNode(GraftNode):
    """A node with a list of LoRA rows."""

    checked_together = (("rows",),)

    @classmethod
    def check_settings(cls, rows: str) -> None:
        """Raises ValueError for rows that cannot be read, and for files that are not there."""
        find_files(parse(rows))

    @classmethod
    def fingerprint_inputs(cls, rows: str = EMPTY, **_: Any) -> str:
        """Changes when the rows or a listed file change. What comes through sockets is fingerprinted by the nodes that
        made it.
        """
        from ..patches.lora_files.open_file import file_version

        digest = sha256(rows.encode())
        for path in find_files(parse(rows)):
            digest.update(repr((path, file_version(path))).encode())
        return digest.hexdigest()


class GraftLoRAStack(_RowsNode):
    """A list of LoRA files with strengths."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="GraftLoRAStack",
            display_name="LoRA Stack",
            category="Graft/lora",
            description=(
                "Lists LoRA files and their strengths, in the order in which they are applied. Other node packs read"
                " and write the same LORA_STACK. Patch Model with LoRA Stack applies it."
            ),
            **search_aliases("lora stack", "lora list", "multi lora", "lora loader", "power lora"),
            inputs=[
                _rows_input(),
                LoraStack.Input(
                    "lora_stack",
                    optional=True,
                    tooltip="Optional. A stack that is applied before these rows, from Graft or another node pack.",
                ),
            ],
            outputs=[LoraStack.Output(display_name="LORA_STACK"), io.String.Output(display_name="report")],
        )

    @classmethod
    def execute(cls, rows: str = EMPTY, lora_stack: Sequence[Any] | None = None) -> io.NodeOutput:
        new_rows = parse(rows)
        lines = [_describe_row(row, *file) for row, file in zip(new_rows, read_files(new_rows), strict=True)]
        earlier_rows = list(lora_stack or [])
        if earlier_rows:
            lines.insert(0, f"{len(earlier_rows)} rows from the stack before")
        return io.NodeOutput([*earlier_rows, *new_rows], "\n".join(lines) or "no rows")


class LoRAStackPatch(GraftNode):
    """Applies a stack of LoRAs in one pass. Removing it restores the base weights bit for bit."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="LoRAStackPatch",
            display_name="Patch Model with LoRA Stack",
            category="Graft/lora",
            description=(
                "Applies a whole stack of LoRAs to a model (and its CLIP) in one pass over each weight,"
                " however many LoRAs there are. Removing the stack restores the original weights exactly."
            ),
            **search_aliases("lora", "apply lora", "load lora", "lora stack", "lora loader", "bypass lora"),
            inputs=[
                io.Model.Input("model", tooltip="The diffusion model. It is not changed; a patched clone comes out."),
                LoraStack.Input(
                    "lora_stack",
                    optional=True,
                    tooltip="Files and strengths, from LoRA Stack or another pack's stack node.",
                ),
                io.Clip.Input(
                    "clip",
                    optional=True,
                    tooltip="The text encoder, for LoRAs that train it too and for the embeddings in their files.",
                ),
                LoraModel.Input(
                    "lora_model", optional=True, tooltip="One more LoRA, straight from training. It is applied last."
                ),
                io.Float.Input(
                    "lora_strength",
                    display_name="trained LoRA strength",
                    default=1.0,
                    min=-100.0,
                    max=100.0,
                    step=0.01,
                    tooltip=(
                        "Strength of the trained LoRA on both model and CLIP. Lower it if the effect is too strong; 0"
                        " leaves the LoRA out."
                    ),
                ),
                io.Combo.Input(
                    "mode",
                    display_name="patch mode",
                    options=list(MODES),
                    default=MODES[0],
                    tooltip=(
                        "merge: adds the LoRAs to the weights while the model is loaded. bypass: adds them at the"
                        " activations, for quantized models. host: ComfyUI's own patches, for merging, extracting and"
                        " saving models. auto: merges, and uses bypass for quantized weights and where merging is"
                        " impossible; the report says why."
                    ),
                ),
                advanced_input(
                    io.Boolean,
                    "comfyui_oft",
                    display_name="OFT as in ComfyUI",
                    default=False,
                    optional=True,
                    tooltip=(
                        "For OFT and BOFT files only. ComfyUI's LoRA loader counts their strength twice: 0.5 makes a"
                        " quarter of the change. Switch this on so that an old workflow gives the same image."
                    ),
                ),
            ],
            outputs=[
                io.Model.Output(display_name="MODEL"),
                io.Clip.Output(display_name="CLIP"),
                io.String.Output(display_name="report"),
            ],
        )

    @classmethod
    def execute(
        cls,
        model: Model,
        lora_stack: Sequence[Any] | None = None,
        clip: Clip = None,
        lora_model: Mapping[str, Tensor] | None = None,
        lora_strength: float = 1.0,
        mode: str = "auto",
        comfyui_oft: bool = False,
    ) -> io.NodeOutput:
        from ..patches.lora_files.entry import LoraEntry

        entries = used_entries(read_stack_rows(lora_stack or []), clip)
        if lora_model is not None and lora_strength != 0.0:
            entries.append(LoraEntry("trained LoRA", lora_model, lora_strength, lora_strength))
        entries = [entry._replace(comfyui_oft=comfyui_oft) for entry in entries]
        patched = host.lora_stacks.apply_lora_stack(model, clip, entries, mode)
        return io.NodeOutput(patched.model, patched.clip, patched.report or "nothing to apply")


class GraftLoadLoRAs(_RowsNode):
    """LoRA Stack and Patch Model with LoRA Stack in one node."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="GraftLoadLoRAs",
            display_name="Load LoRAs",
            category="Graft/lora",
            description=(
                "Lists LoRA files and applies them to a model (and its CLIP), in one node. It does what LoRA"
                " Stack and Patch Model with LoRA Stack do together, in patch mode auto."
            ),
            **search_aliases("load lora", "lora loader", "multi lora", "power lora", "lora stack", "apply lora"),
            inputs=[
                io.Model.Input("model", tooltip="The diffusion model. It is not changed; a patched clone comes out."),
                _rows_input(),
                io.Clip.Input(
                    "clip",
                    optional=True,
                    tooltip="The text encoder, for LoRAs that train it too and for the embeddings in their files.",
                ),
            ],
            outputs=[
                io.Model.Output(display_name="MODEL"),
                io.Clip.Output(display_name="CLIP"),
                io.String.Output(display_name="report"),
            ],
        )

    @classmethod
    def execute(cls, model: Model, rows: str = EMPTY, clip: Clip = None) -> io.NodeOutput:
        patched = host.lora_stacks.apply_lora_stack(model, clip, used_entries(parse(rows), clip), MODES[0])
        return io.NodeOutput(patched.model, patched.clip, patched.report or "nothing to apply")


class GraftSaveLoRA(GraftNode):
    """Writes a LoRA file that ComfyUI and other tools load."""

    checked_together = (("prefix",),)
    checked_sockets = ("lora_model", "state")

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="GraftSaveLoRA",
            display_name="Save LoRA",
            category="Graft/lora",
            description=(
                "Saves a trained LoRA as a safetensors file under ComfyUI's output folder. The same training gives a"
                " file with the same bytes."
            ),
            **search_aliases("save lora", "export lora", "lora file"),
            is_output_node=True,
            inputs=[
                LoraModel.Input(
                    "lora_model", optional=True, tooltip="The LoRA to save. Connect this or a training state, not both."
                ),
                TrainState.Input(
                    "state",
                    optional=True,
                    tooltip=(
                        "A training state; its LoRA is saved with the training metadata. Connect this or a LoRA,"
                        " not both."
                    ),
                ),
                advanced_input(
                    io.Combo,
                    "names",
                    display_name="key format",
                    options=list(key_formats.writable_formats()),
                    default="kohya",
                    tooltip=(
                        "The names of the tensors in the file. kohya (lora_unet_...) is read by most tools; peft"
                        " (lora_A and lora_B, alpha multiplied in) by diffusers; comfyui: ComfyUI's own names; t-lora:"
                        " the names of T-LoRA's authors, for T-LoRAs on a UNet's attention layers."
                    ),
                ),
                advanced_input(
                    io.Combo,
                    "dtype",
                    display_name="data type",
                    options=list(DTYPES),
                    default="bf16",
                    tooltip=(
                        "The data type of the saved tensors. bf16 and fp16 halve the file; choose float32 to"
                        " keep the weights exactly."
                    ),
                ),
                io.String.Input(
                    "prefix",
                    display_name="filename prefix",
                    default="loras/graft",
                    tooltip=(
                        "Name under the output folder; a number is added. LoRAs under output/loras show up in"
                        " LoRA Stack."
                    ),
                ),
                file_size_input(
                    "For full weights: splits the tensors into several files with an index if one would be larger"
                    " than this. Graft reads them all from any of them; ComfyUI's own loaders do not. 0 writes one"
                    " file."
                ),
            ],
            outputs=[io.String.Output(display_name="path")],
        )

    @classmethod
    def check_settings(cls, connected: Sequence[str], prefix: str) -> None:
        """Raises ValueError for a prefix that leaves the output folder, and unless one socket is connected."""
        host.folders.check_prefix(prefix)
        if len(connected) != 1:
            found = "both are" if connected else "none is"
            raise ValueError(f"connect exactly one of trained LoRA and training state, {found} connected")

    @classmethod
    def execute(
        cls,
        lora_model: Mapping[str, Tensor] | None = None,
        state: states.TrainState | ExpertPair | None = None,
        names: str = "kohya",
        dtype: str = "bf16",
        prefix: str = "loras/graft",
        max_shard_gb: float = 0.0,
    ) -> io.NodeOutput:
        inputs = {"lora_model": lora_model, "state": state}
        cls.check_settings([name for name, value in inputs.items() if value is not None], prefix)
        loras, most = _named_loras(lora_model, state, prefix), int(max_shard_gb * 1e9)
        saved = [_save_lora(*lora, names, DTYPES[dtype], most) for lora in loras]
        shown: dict[str, list[Any]] = {"loras": [entry for _, entry, _ in saved if entry]}
        notes = [note for _, _, note in saved if note]
        if notes:
            shown["text"] = notes
        return io.NodeOutput("\n".join(path for path, _, _ in saved), ui=shown)


def _named_loras(
    lora_model: Any, state: states.TrainState | ExpertPair | None, prefix: str
) -> list[tuple[Any, dict[str, str], str]]:
    """The LoRAs to save, each with its training metadata and the prefix of its file: those of a pair of experts are
    two.
    """
    from ..training.expert_lora import expert_of, metadata_of
    from ..training.expert_pair import ExpertPair
    from ..training.lora_metadata import lora_metadata
    from ..training.objective import experts
    from ..training.tasks.registry import task_of

    if state is None:
        return [(lora_model, metadata_of(lora_model), experts.name_file(prefix, expert_of(lora_model)))]
    if isinstance(state, ExpertPair):
        named = list(zip(state.states, experts.pair_names(prefix), strict=True))
    else:
        named = [(state, experts.name_file(prefix, state.settings.objective.expert))]
    return [(task_of(one).lora_model(one), lora_metadata(one), own_prefix) for one, own_prefix in named]


def _save_lora(
    lora: Any, training_metadata: dict[str, str], prefix: str, names: str, dtype: Any, most: int
) -> tuple[str, Any, str]:
    """Writes a file, or shards of at most `most` bytes (0: one file): the path of the first, what the editor is told of
    it, and a note where ComfyUI's loaders ignore some of it.
    """
    from ..patches.lora_files import save
    from ..storage.shards import save_shards

    file_metadata = save.build_metadata(lora, os.path.basename(prefix), training_metadata)
    tensors = save.to_key_format(lora, names, dtype)
    file_metadata |= save.kohya_hashes(tensors, file_metadata)
    path, entry = host.folders.output_file(prefix, ".safetensors")
    written = save_shards(tensors, Path(path).parent, Path(path).stem, most, file_metadata)[0]
    path = str(written)
    if entry is not None:
        entry["filename"] = written.name
    left_out = save.names_comfyui_ignores(lora)
    note = ""
    if left_out:
        note = _loading_note(left_out)
        log.warning("%s: %s", os.path.basename(path), note)
    return path, entry, note


class GraftSaveWords(GraftNode):
    """Saves trained words as embeddings."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="GraftSaveWords",
            display_name="Save Words",
            category="Graft/training",
            description=(
                "Saves trained words into ComfyUI's embeddings folder, for prompts with embedding:NAME. Save LoRA puts"
                " the words into the LoRA file as well; this node is for words without a LoRA."
            ),
            **search_aliases("save embedding", "textual inversion", "export embedding"),
            is_output_node=True,
            inputs=[
                LoraModel.Input("lora_model", tooltip="From Train Step or EMA Merge, with words from Train Words."),
            ],
            outputs=[io.String.Output(display_name="path")],
        )

    @classmethod
    def execute(cls, lora_model: Mapping[str, Tensor]) -> io.NodeOutput:
        from ..host import word_files
        from ..patches.lora_files import embeddings
        from ..storage.atomic import make_folders
        from ..storage.safetensors import write_safetensors

        _, words = embeddings.split(lora_model)
        if not words:
            raise ValueError(
                "Save Words: this LoRA has no words. Connect Train Words to Start Training and train them."
            )
        try:
            problems = [problem for name in words if (problem := word_files.problem_of_file(name))]
            paths = {name: word_files.file_of(name) for name in words}
        except ValueError as error:
            raise ValueError(f"Save Words: {error}.") from error
        if problems:
            raise ValueError(f"Save Words: {'; '.join(problems)}.")
        for name, path in paths.items():
            make_folders(Path(path).parent)
            write_safetensors(path, words[name], word_files.saved_metadata(name))
        said = [f"embedding:{name} saved in {path}" for name, path in paths.items()]
        said += word_files.describe_readers(words)
        return io.NodeOutput("\n".join(paths.values()), ui={"text": ["\n".join(said)]})


def _loading_note(left_out: list[str]) -> str:
    """What to say of differences that ComfyUI's LoRA loaders ignore."""
    first = ", ".join(left_out[:3])
    if len(left_out) > 3:
        first += " …"
    return (
        f"ComfyUI's LoRA loaders ignore {len(left_out)} of these differences, as they are parameters beside a model's"
        f" layers ({first}): load the file with LoRA Stack and Patch Model with LoRA Stack, which apply all"
    )


def _with_blocks(listed: list[StackRow], blocks: list[str]) -> list[StackRow]:
    """The rows of a stack, those that change the model with these block weights in order."""
    remaining = iter(blocks)
    return [row.with_blocks(next(remaining)) if row[1] != 0.0 else row for row in listed]


class GraftLoRAEffect(GraftNode):
    """Measures what each block of each row of a stack does to the model's prediction."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="GraftLoRAEffect",
            display_name="LoRA Effect",
            category="Graft/lora",
            description=(
                "Measures how much each block of each LoRA in a stack changes what the model predicts for your"
                " prompt, and writes block weights that keep only the blocks that matter. The model is not changed."
            ),
            **search_aliases(
                "lora analysis", "lora block weight", "lbw", "lora blocks", "lora layers", "which blocks matter"
            ),
            is_output_node=True,
            inputs=[
                io.Model.Input(
                    "model", tooltip="The diffusion model that the LoRAs are for, without this stack on it."
                ),
                LoraStack.Input(
                    "lora_stack",
                    tooltip="The LoRAs to measure, at their strengths and block weights, from LoRA Stack.",
                ),
                io.Conditioning.Input(
                    "positive",
                    tooltip="A prompt for these LoRAs, with their trigger words. Other prompts may use other blocks.",
                ),
                io.Latent.Input(
                    "latent",
                    tooltip=(
                        "The size to measure in. An empty latent measures on pure noise; a latent with a picture gets"
                        " noise on top. A small one is faster and gives nearly the same result."
                    ),
                ),
                io.Int.Input(
                    "levels",
                    display_name="noise levels",
                    default=3,
                    min=1,
                    max=20,
                    tooltip=(
                        "How many noise levels to predict at, spread evenly over sampling. Each block costs one"
                        " prediction per level. Raise it to 6 for LoRAs that change only details."
                    ),
                ),
                io.Float.Input(
                    "keep",
                    display_name="keep what matters",
                    default=0.9,
                    min=0.05,
                    max=1.0,
                    step=0.05,
                    tooltip=(
                        "Keeps the strongest blocks of each row up to this share of its effect, and switches off the"
                        " others in the output stack. Lower it to 0.7 for fewer blocks; 1 keeps all."
                    ),
                ),
                advanced_input(
                    io.Int,
                    "measure_seed",
                    display_name="seed",
                    default=0,
                    min=0,
                    max=0xFFFFFFFFFFFFFFFF,
                    tooltip="Which noise to measure on. Change it to see how much the numbers depend on the noise.",
                ),
            ],
            outputs=[
                LoraStack.Output(display_name="LORA_STACK"),
                io.String.Output(display_name="report"),
                io.Image.Output(display_name="IMAGE"),
            ],
        )

    @classmethod
    def execute(
        cls,
        model: Model,
        lora_stack: Sequence[Any],
        positive: Conditioning,
        latent: Latent,
        levels: int = 3,
        keep: float = 0.9,
        measure_seed: int = 0,
    ) -> io.NodeOutput:
        from ..host.lora_effect import open_predictor
        from ..patches.analysis import charts, effect
        from ..patches.analysis.rows import read_rows

        listed = read_stack_rows(lora_stack or [])
        used = [row for row in listed if row[1] != 0.0]
        if not used:
            raise ValueError(
                "LoRA Effect: the stack has no row that changes the model. Add LoRAs to LoRA Stack, switch their rows"
                " on and give them a model strength."
            )
        weights = host.lora_stacks.model_weights(model)
        effect.check_blocks(weights)
        rows = read_rows(lora_entries(used), weights, host.lora_stacks.to_generic_keys)
        with open_predictor(model, positive, latent, levels, measure_seed) as predict:
            effects = effect.measure(rows, predict, keep, host.events.progress_bar(effect.count_steps(rows)))
        kept = _with_blocks(listed, [one.block_weights for one in effects])
        shown = effect.panel(effects, predict.sigmas, keep)
        shown["stack"] = [row[0] for row in used]
        return io.NodeOutput(
            kept,
            effect.report(effects, predict.sigmas, keep),
            charts.draw_bars(effect.charts(effects)),
            ui={"graft_effect": [shown]},
        )


class GraftLoRAConflicts(GraftNode):
    """Compares the rows of a stack with each other: where they cancel or repeat each other."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="GraftLoRAConflicts",
            display_name="LoRA Conflicts",
            category="Graft/lora",
            description=(
                "Compares the LoRAs of a stack in pairs, shows in which blocks they cancel or repeat each other, and"
                " writes block weights that stop it. It compares only the weights, so it takes seconds."
            ),
            **search_aliases(
                "lora analysis", "lora overlap", "lora interference", "lora conflict", "lora block weight"
            ),
            is_output_node=True,
            inputs=[
                io.Model.Input("model", tooltip="The diffusion model that the LoRAs are for. It defines the layers."),
                LoraStack.Input(
                    "lora_stack",
                    tooltip="Two or more LoRAs, compared at their strengths and block weights, from LoRA Stack.",
                ),
                io.Float.Input(
                    "threshold",
                    display_name="conflict from",
                    default=0.1,
                    min=0.01,
                    max=1.0,
                    step=0.01,
                    tooltip=(
                        "The cosine from which two LoRAs conflict in a block, with either sign. LoRAs that have"
                        " nothing in common are near 0. Raise it to 0.3 to change only the worst blocks."
                    ),
                ),
            ],
            outputs=[
                LoraStack.Output(display_name="LORA_STACK"),
                io.String.Output(display_name="report"),
                io.Image.Output(display_name="IMAGE"),
            ],
        )

    @classmethod
    def execute(cls, model: Model, lora_stack: Sequence[Any], threshold: float = 0.1) -> io.NodeOutput:
        from ..patches.analysis import charts, conflicts
        from ..patches.analysis.rows import read_rows

        listed = read_stack_rows(lora_stack or [])
        used = [row for row in listed if row[1] != 0.0]
        if len(used) < 2:
            raise ValueError(
                f"LoRA Conflicts: the stack has {len(used)} rows that change the model, and it takes two to conflict."
                " Add LoRAs to LoRA Stack, switch their rows on and give them a model strength."
            )
        weights = host.lora_stacks.model_weights(model)
        rows = read_rows(lora_entries(used), weights, host.lora_stacks.to_generic_keys)
        shapes = {name: shape for (space, name), shape in weights.shapes.items() if space == "model"}
        advance = host.events.step_counter(len(conflicts.group_by_layer(rows)))
        compared = conflicts.compare(rows, shapes, host.model_difference.weight_reader(model), advance)
        found = conflicts.find_fights(compared, threshold)
        shown = conflicts.panel(compared, found)
        shown["stack"] = [row[0] for row in used]
        return io.NodeOutput(
            _with_blocks(listed, conflicts.suggest_weights(compared, found)),
            conflicts.report(compared, found, threshold),
            charts.draw_cells(conflicts.table(compared)),
            ui={"graft_conflicts": [shown]},
        )


NODES = [
    GraftLoRAStack,
    LoRAStackPatch,
    GraftLoadLoRAs,
    GraftSaveLoRA,
    GraftSaveWords,
    GraftLoRAEffect,
    GraftLoRAConflicts,
]
