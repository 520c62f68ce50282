"""Named training states: save one to move or keep a run; load it to continue, sample or average."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from comfy_api.latest import io

from .. import host
from ..storage.file_list import files_below
from .schema import Dataset, GraftNode, LoraModel, LoraStack, TrainState, file_size_input, search_aliases
from .training import training_only_lora

if TYPE_CHECKING:
    from ..host.comfyui_objects import Clip, Model, Vae
    from ..training import state as states
    from ..training.data.dataset import Dataset as TrainingData
    from ..training.expert_pair import ExpertPair


def _root() -> Path:
    return Path(host.folders.states_folder())


def _folder_of(name: str) -> Path:
    from ..training.store import saved_states

    return saved_states.folder_of(_root(), name)


def _name_of(name: str) -> str:
    """The name of a saved state that was chosen by name, or as the newest."""
    from ..training.store.names import NEWEST, newest_name

    return newest_name(_root()) if name == NEWEST else name


class GraftSaveState(GraftNode):
    """Saves a state under a name."""

    checked_together = (("name",),)

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="GraftSaveState",
            display_name="Save State",
            category="Graft/training",
            description=(
                "Saves a training state under a name, with optimizer, averages, history and settings, so that you can"
                " continue it later or on another machine. Train Step stores its own results automatically."
            ),
            **search_aliases("save training", "checkpoint", "export state", "resume"),
            is_output_node=True,
            inputs=[
                TrainState.Input("state", tooltip="From Train Step."),
                io.String.Input(
                    "name",
                    display_name="name",
                    default="state",
                    tooltip="Folder under output/graft_states. A saved state with the same name is replaced.",
                ),
                file_size_input(
                    "Splits the tensors into several files with an index if one would be larger than this. 0"
                    " writes one file."
                ),
            ],
            outputs=[io.String.Output(display_name="path")],
        )

    @classmethod
    def check_settings(cls, name: str) -> None:
        """Raises ValueError for a name that cannot be a folder's."""
        _folder_of(name)

    @classmethod
    def execute(
        cls, state: states.TrainState | ExpertPair, name: str = "state", max_shard_gb: float = 0.0
    ) -> io.NodeOutput:
        from ..training.expert_pair import ExpertPair
        from ..training.objective import experts

        if not isinstance(state, ExpertPair):
            folder, message = _save(state, name, max_shard_gb)
            return io.NodeOutput(folder, ui={"text": [message]})
        saved = []
        for one, own_name in zip(state.states, experts.pair_names(name), strict=True):
            saved.append(_save(one, own_name, max_shard_gb))
        folders, messages = zip(*saved, strict=True)
        return io.NodeOutput("\n".join(folders), ui={"text": list(messages)})


def _save(state: states.TrainState, name: str, max_shard_gb: float) -> tuple[str, str]:
    """Saves a state under a name: its folder, and what to say."""
    from ..training.store import saved_states

    versions = host.fingerprint.versions(state.subject.model)
    folder = saved_states.save(state, _root(), name, int(max_shard_gb * 1e9), versions)
    files = files_below(folder)
    size = sum(status.st_size for _, status in files)
    message = (
        f"step {state.step} of run {state.run!r} saved as {name!r}: {len(files)} files, {size / 1e6:.1f} MB in {folder}"
    )
    return str(folder), message


class GraftLoadState(GraftNode):
    """Loads a saved state."""

    checked_together = (("name",),)
    growing_choices = ("name",)  # a state may be saved after the list was made

    @classmethod
    def define_schema(cls) -> io.Schema:
        from ..training.store.names import NEWEST, saved_names

        return io.Schema(
            node_id="GraftLoadState",
            display_name="Load State",
            category="Graft/training",
            description=(
                "Loads a training state from Save State. With its dataset you can continue training;"
                " without it you can sample, average and save it."
            ),
            **search_aliases("resume", "resume training", "load training", "continue training"),
            inputs=[
                io.Combo.Input(
                    "name",
                    display_name="saved state",
                    options=[*saved_names(_root()), NEWEST],
                    tooltip=(
                        "A state under output/graft_states, or the one that was saved last. Press R to refresh the"
                        " list."
                    ),
                ),
                io.Model.Input(
                    "model",
                    optional=True,
                    tooltip="The model it was trained on. Any other model is refused. Not needed for a VAE.",
                ),
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
                io.Vae.Input(
                    "vae",
                    optional=True,
                    tooltip="For the previews of Train Step. Of VAE training: the VAE that it was trained on.",
                ),
                LoraStack.Input(
                    "training_only",
                    optional=True,
                    tooltip=(
                        "The training-only LoRA that the state was trained with, if it had one. Needed only to"
                        " continue training."
                    ),
                ),
                io.Model.Input(
                    "low_noise_model",
                    optional=True,
                    tooltip=(
                        "For the saved states of both experts of Wan 2.2: connect the low noise model here and the"
                        " high noise model to model, and choose either of the two states. Both are loaded."
                    ),
                ),
                LoraStack.Input(
                    "low_noise_training_only",
                    optional=True,
                    tooltip=(
                        "The training-only LoRA of the low noise model, if it was trained with one. Needed only to"
                        " continue training."
                    ),
                ),
            ],
            outputs=[TrainState.Output(display_name="TRAIN_STATE")],
        )

    @classmethod
    def check_settings(cls, name: str) -> None:
        """Raises ValueError for a name that cannot be a folder's."""
        _folder_of(name)

    @classmethod
    def fingerprint_inputs(cls, name: str = "", **_: Any) -> str:
        """Changes when the saved state changes."""
        from ..training.objective import experts

        versions = []
        with suppress(FileNotFoundError):
            name = _name_of(name)
        for one in (name, *experts.pair_names(name)):
            if one:
                with suppress(FileNotFoundError, NotADirectoryError):
                    status = (_root() / one / "state.json").stat()
                    versions.append(f"{status.st_mtime_ns} {status.st_size}")
        return " ".join(versions)

    @classmethod
    def execute(
        cls,
        name: str,
        model: Model = None,
        dataset: TrainingData | None = None,
        clip: Clip = None,
        vae: Vae = None,
        training_only: Sequence[Any] | None = None,
        low_noise_model: Model = None,
        low_noise_training_only: Sequence[Any] | None = None,
    ) -> io.NodeOutput:
        from ..training.expert_pair import ExpertPair
        from ..training.objective import experts
        from ..training.store import saved_states

        name = _name_of(name)
        if saved_states.is_of_vae(_root(), name):
            from . import vae_training

            return io.NodeOutput(vae_training.load_state(_root(), name, vae, dataset))
        if model is None:
            raise ValueError(
                f"Load State: {name} trains a diffusion model, and none is connected. Connect it to model."
            )
        if low_noise_model is None:
            if low_noise_training_only is not None:
                raise ValueError(
                    "Load State: low noise training-only LoRA is connected, and low noise model is not. Connect the"
                    " low noise model; for one expert connect its LoRA to training-only LoRA."
                )
            return io.NodeOutput(_load(name, model, dataset, clip, vae, training_only))
        names = experts.pair_names(name)
        if name not in names:
            raise ValueError(
                f"Load State: low noise model is connected, and {name} does not end in _high_noise or _low_noise."
                " Choose a saved state of both experts, or take low noise model off."
            )
        high = _load(names[0], model, dataset, clip, vae, training_only)
        low = _load(names[1], low_noise_model, dataset, clip, vae, low_noise_training_only)
        if tuple(one.settings.objective.expert for one in (high, low)) != experts.IN_TURN:
            raise ValueError(
                f"Load State: {' and '.join(names)} are not the states of a high noise and a low noise expert. Take low"
                " noise model off, or choose a saved state of both experts."
            )
        return io.NodeOutput(ExpertPair(high, low))


def _load(name: str, model: Model, dataset: Any, clip: Clip, vae: Vae, training_only: Any) -> states.TrainState:
    """The saved state with this name, for what is connected."""
    from dataclasses import replace

    from ..training.store import saved_states
    from .step_call import Subject

    if dataset is None:
        pictures = None
    else:
        pictures = dataset.digest
    needs_clip = saved_states.needs_clip(_root(), name)
    if needs_clip and clip is None:
        raise ValueError(f"Load State: {name} trains the text encoder or words, and no CLIP is connected. Connect one.")
    if needs_clip:
        trained_clip = clip
    else:
        trained_clip = None
    identity, unhashed = host.fingerprint.fingerprint_trained(model, trained_clip)
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
    return replace(state, subject=Subject(model, clip, vae, dataset, unhashed, switched))


class GraftSplitExperts(GraftNode):
    """The states, models and LoRAs of both experts of a pair."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="GraftSplitExperts",
            display_name="Split Expert Pair",
            category="Graft/training",
            description=(
                "Splits the training state of both experts of Wan 2.2 into two: their training states, their trained"
                " models, and their LoRAs. Sample with the high noise model first, then with the low noise one."
            ),
            **search_aliases("wan 2.2", "high noise", "low noise", "experts", "split state"),
            inputs=[
                TrainState.Input("state", tooltip="Of both experts: from Train Step, Start Training or Load State.")
            ],
            outputs=[
                TrainState.Output("high_state", display_name="high noise state"),
                io.Model.Output("high_model", display_name="high noise MODEL"),
                LoraModel.Output("high_lora", display_name="high noise LoRA"),
                TrainState.Output("low_state", display_name="low noise state"),
                io.Model.Output("low_model", display_name="low noise MODEL"),
                LoraModel.Output("low_lora", display_name="low noise LoRA"),
            ],
        )

    @classmethod
    def execute(cls, state: states.TrainState | ExpertPair) -> io.NodeOutput:
        from ..training.expert_pair import ExpertPair
        from ..training.tasks.registry import task_of
        from .step_call import with_lora

        if not isinstance(state, ExpertPair):
            raise ValueError(
                "Split Expert Pair: this training state is of one model. Begin with Start Training Expert Pair to"
                " train a pair, or take this node out."
            )
        outputs: list[Any] = []
        for one in state.states:
            lora = task_of(one).lora_model(one)
            outputs += [one, with_lora(one, None, lora).model, lora]
        return io.NodeOutput(*outputs)


NODES = [GraftSaveState, GraftLoadState, GraftSplitExperts]
