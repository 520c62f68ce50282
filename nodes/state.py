"""Named training states: save one to move or keep a run; load it to continue, sample or average."""

from __future__ import annotations

from pathlib import Path

from comfy_api.latest import io

from .. import host
from ..storage.file_list import files_below
from .refusals import refusal
from .schema import Dataset, LoraStack, TrainState, advanced, aliases
from .training import Subject, training_only_lora


def _root() -> Path:
    return Path(host.folders.states_folder())


def _folder_of(name: str) -> Path:
    from ..training.store import saved_states

    return saved_states.folder_of(_root(), name)


class GraftSaveState(io.ComfyNode):
    """Saves a state under a name."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="GraftSaveState",
            display_name="Save State",
            category="Graft/training",
            description=(
                "Saves a training state under a name, with optimizer, averages, history and settings, so"
                " that you can continue it later or on another machine. Train Step stores its own results"
                " by itself."
            ),
            **aliases("save training", "checkpoint", "export state", "resume"),
            is_output_node=True,
            inputs=[
                TrainState.Input("state", tooltip="From Train Step."),
                io.String.Input(
                    "name",
                    display_name="name",
                    default="state",
                    tooltip="Folder under output/graft_states. A saved state of the same name is replaced.",
                ),
                advanced(
                    io.Float,
                    "max_shard_gb",
                    display_name="maximum file size (GB)",
                    default=0.0,
                    min=0.0,
                    max=1000.0,
                    step=0.5,
                    tooltip=(
                        "Splits the tensors into several files with an index if one would be larger than this. 0"
                        " writes one file."
                    ),
                ),
            ],
            outputs=[io.String.Output(display_name="path")],
        )

    @classmethod
    def validate_inputs(cls, name=None) -> bool | str:
        return refusal(cls, _folder_of, name=name)

    @classmethod
    def execute(cls, state, name="state", max_shard_gb=0.0) -> io.NodeOutput:
        from ..training.store import saved_states

        versions = host.fingerprint.versions(state.subject.model)
        folder = saved_states.save(state, _root(), name, int(max_shard_gb * 1e9), versions)
        files = files_below(folder)
        size = sum(status.st_size for _, status in files)
        message = (
            f"step {state.step} of run {state.run!r} saved as {name!r}: {len(files)} files, {size / 1e6:.1f} MB in"
            f" {folder}"
        )
        return io.NodeOutput(str(folder), ui={"text": [message]})


class GraftLoadState(io.ComfyNode):
    """Loads a saved state."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        from ..training.store.names import saved_names

        return io.Schema(
            node_id="GraftLoadState",
            display_name="Load State",
            category="Graft/training",
            description=(
                "Loads a training state from Save State. With its dataset you can continue training;"
                " without it you can sample, average and save it."
            ),
            **aliases("resume", "load training", "continue training"),
            inputs=[
                io.Combo.Input(
                    "name",
                    display_name="saved state",
                    options=saved_names(_root()) or [""],
                    tooltip="A state under output/graft_states. Press R to refresh the list.",
                ),
                io.Model.Input("model", tooltip="The model it was trained on. Any other model is refused."),
                Dataset.Input(
                    "dataset",
                    optional=True,
                    tooltip="The dataset it was trained with. Needed only to continue training.",
                ),
                io.Clip.Input(
                    "clip",
                    optional=True,
                    tooltip=(
                        "Passed on to Train Step's CLIP output. Needed if the state trains the text encoder or words."
                    ),
                ),
                io.Vae.Input("vae", optional=True, tooltip="For the previews of Train Step."),
                LoraStack.Input(
                    "training_only",
                    optional=True,
                    tooltip=(
                        "The training-only LoRA that the state was trained with, if it was. Needed only to continue"
                        " training."
                    ),
                ),
            ],
            outputs=[TrainState.Output(display_name="TRAIN_STATE")],
        )

    @classmethod
    def validate_inputs(cls, name="") -> bool | str:
        """Names are looked up when the node runs: a state may be saved after the list was made."""
        try:
            _folder_of(name)
        except ValueError as error:
            return str(error)
        return True

    @classmethod
    def fingerprint_inputs(cls, name="", **_) -> str:
        """Changes when the saved state changes."""
        record = _root() / name / "state.json"
        if record.is_file():
            return f"{record.stat().st_mtime_ns} {record.stat().st_size}"
        return ""

    @classmethod
    def execute(cls, name, model, dataset=None, clip=None, vae=None, training_only=None) -> io.NodeOutput:
        from dataclasses import replace

        from ..training.store import saved_states

        if dataset is None:
            pictures = None
        else:
            pictures = dataset.digest
        needs_clip = saved_states.needs_clip(_root(), name)
        if needs_clip and clip is None:
            raise ValueError(
                f"Load State: {name} trains the text encoder or words, and no CLIP is connected. Connect one."
            )
        if needs_clip:
            trained_clip = clip
        else:
            trained_clip = None
        identity, unhashed = host.fingerprint.of_trained(model, trained_clip)
        switched = training_only_lora(model, training_only)
        state = saved_states.load(
            _root(),
            name,
            identity,
            pictures,
            lambda: host.base_weights.trained_weights(model, trained_clip),
            switched.identity if switched else None,
        )
        unhashed += () if dataset is None else dataset.unhashed
        return io.NodeOutput(replace(state, subject=Subject(model, clip, vae, dataset, unhashed, switched)))


NODES = [GraftSaveState, GraftLoadState]
