"""GraftSnapshots lists weights to average; EMAMerge puts averaged weights into a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from comfy_api.latest import io

from .. import host
from ..patches.lora_files.stack_rows import read_stack_rows
from ..settings.declaration import raise_errors
from ..storage.digest import sha256
from ..storage.file_list import files_below
from ..storage.problem_list import problem_lines
from ..training.averages.settings import AverageSettings
from .schema import GraftNode, LoraModel, LoraStack, Snapshots, TrainState, inputs_of, search_aliases

if TYPE_CHECKING:
    from ..host.comfyui_objects import Clip, Model
    from ..training import state as states
    from ..training.averages.merge import MergedAverage
    from ..training.averages.sources import Sources as SnapshotList
    from ..training.expert_pair import ExpertPair

_SOCKETS = {"state": "training state", "snapshots": "snapshots", "lora_stack": "LoRA stack"}


def _lines(source: str) -> list[str]:
    return [line.strip() for line in source.splitlines() if line.strip()]


def _run_folder(line: str) -> tuple[Path, str] | None:
    """(folder, first characters of a branch's key) when the line names a run in output/graft."""
    from ..training.store.store import Store

    run, _, branch = line.replace("\\", "/").partition("/")
    folder = Path(host.folders.training_folder()) / run
    if "/" in branch or not folder.is_dir():
        return None
    return Store(host.folders.training_folder(), run).folder, branch


def _find_paths(lines: list[str], find: Callable[[str], str]) -> list[tuple[str, str]]:
    paths, problems = [], []
    for line in lines:
        try:
            paths.append((line, find(line)))
        except (ValueError, FileNotFoundError) as error:
            problems.append(str(error))
    if problems:
        raise ValueError("Files to average:\n" + problem_lines(problems))
    return paths


def _source_lines(source: str) -> list[str]:
    """The lines of a source, one or more."""
    lines = _lines(source)
    if not lines:
        raise ValueError("Snapshots: run or files is empty; give the name of a run, or one file per line")
    return lines


class GraftSnapshots(GraftNode):
    """Lists what to average: a run's snapshots, or files."""

    checked_together = (("source",),)

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="GraftSnapshots",
            display_name="Snapshots",
            category="Graft/averages",
            description=(
                "Lists weights to average: the snapshots of a training run, or LoRA files or checkpoints that you have."
            ),
            **search_aliases("ema", "average", "checkpoints", "model soup", "merge lora"),
            inputs=[
                io.String.Input(
                    "source",
                    display_name="run or files",
                    default="run",
                    multiline=True,
                    tooltip=(
                        "The name of a run (its folder under output/graft; run/key if it went several ways), or"
                        " one file per line: LoRAs from the loras folder (output/loras/... for saved ones) or"
                        " checkpoints."
                    ),
                ),
            ],
            outputs=[Snapshots.Output(display_name="GRAFT_SNAPSHOTS"), io.String.Output(display_name="report")],
        )

    @classmethod
    def check_settings(cls, source: str) -> None:
        """Raises ValueError when a file is not there. A run may still be trained by the same workflow."""
        lines = _source_lines(source)
        if len(lines) > 1 or lines[0].lower().endswith(".safetensors"):
            _find_paths(lines, host.folders.weights_path)

    @classmethod
    def fingerprint_inputs(cls, source: str = "run") -> str:
        """Changes when a listed file changes, or the run's snapshots change."""
        from ..patches.lora_files.open_file import file_version

        lines, digest = _lines(source), sha256(source.encode())
        run = None
        if len(lines) == 1:
            run = _run_folder(lines[0])
        if run is not None:
            for snapshot, status in files_below(run[0] / "averages"):
                if snapshot.suffix == ".safetensors":
                    digest.update(repr((str(snapshot), status.st_size, status.st_mtime_ns)).encode())
            return digest.hexdigest()
        for _, path in _find_paths(lines, host.folders.weights_path):
            digest.update(repr((path, file_version(path))).encode())
        return digest.hexdigest()

    @classmethod
    def execute(cls, source: str = "run") -> io.NodeOutput:
        from ..training.averages import sources

        lines = _source_lines(source)
        run = None
        if len(lines) == 1:
            run = _run_folder(lines[0])
        if run is None:
            snapshots = sources.sources_of_files(_find_paths(lines, host.folders.weights_path))
        else:
            snapshots = sources.sources_of_run(*run)
        return io.NodeOutput(snapshots, snapshots.report())


class EMAMerge(GraftNode):
    """Puts an average of weights into a model."""

    settings_class = AverageSettings
    checked_together = (("profile", "weights", "algebra", "rank"),)
    checked_sockets = ("state", "snapshots", "lora_stack")

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="EMAMerge",
            display_name="EMA Merge",
            category="Graft/averages",
            description=(
                "Puts averaged weights into a model: the EMA kept during training, an average of any"
                " width made afterwards from snapshots, or an average of LoRA files or checkpoints."
            ),
            **search_aliases("ema", "average", "weight averaging", "merge lora", "model soup"),
            inputs=[
                io.Model.Input(
                    "model",
                    tooltip=(
                        "The model to patch: the one that the training started from. It is not changed; a"
                        " patched clone comes out."
                    ),
                ),
                io.Clip.Input("clip", optional=True, tooltip="The text encoder, for LoRA files that train it too."),
                TrainState.Input(
                    "state", optional=True, tooltip="From Train Step. Connect either this, snapshots or a LoRA stack."
                ),
                Snapshots.Input(
                    "snapshots",
                    optional=True,
                    tooltip=(
                        "From Snapshots: a run's snapshots, or files. Connect either this, a training state or a LoRA"
                        " stack."
                    ),
                ),
                LoraStack.Input(
                    "lora_stack",
                    optional=True,
                    tooltip=(
                        "LoRA files to average. Profile weights uses their strengths. Connect either this, a"
                        " training state or snapshots."
                    ),
                ),
                *inputs_of(cls.settings_class),
            ],
            outputs=[
                io.Model.Output(display_name="MODEL"),
                io.Clip.Output(display_name="CLIP"),
                LoraModel.Output(display_name="LORA_MODEL"),
                io.Image.Output(display_name="profile"),
                io.String.Output(display_name="report"),
            ],
        )

    @classmethod
    def check_settings(cls, connected: Sequence[str], **values: Any) -> None:
        """Raises ValueError for settings that do not go together, or not with what is connected."""
        _check_settings(connected, AverageSettings(**values))

    @classmethod
    def execute(
        cls,
        model: Model,
        chosen: AverageSettings,
        clip: Clip = None,
        state: states.TrainState | ExpertPair | None = None,
        snapshots: SnapshotList | None = None,
        lora_stack: Sequence[Any] | None = None,
    ) -> io.NodeOutput:
        from ..patches.lora_files.entry import LoraEntry
        from ..training.expert_lora import mark_expert
        from ..training.expert_pair import single
        from ..training.reports.curves import draw, editor_data
        from .step_call import trained_words

        state = single(state, "EMA Merge")
        _check(state, snapshots, lora_stack, chosen)
        if state is not None and chosen.profile == "latest":
            average = _running_average(state)
        elif chosen.profile == "search":
            average = _search_average(state, _sources(state, None, None), chosen)
        else:
            sources = _sources(state, snapshots, lora_stack)
            if lora_stack is not None and chosen.profile == "weights" and not chosen.weights.strip():
                strengths = {row[0]: row[1] for row in read_stack_rows(lora_stack)}
                chosen = replace(chosen, weights=" ".join(repr(strengths[file.name]) for file in sources.files))
            average = _average_files(state, sources, chosen, lambda: host.base_weights.unet_weights(model))
            if clip is not None and average.text_encoder:
                skipped = average.text_encoder
                line = f"skips {skipped} text encoder tensors in these files: only the diffusion model is averaged"
                average = replace(average, lines=(*average.lines, line))
        if state is not None:
            model = host.model_sampling.with_zero_terminal_snr(model, state.settings.objective.zero_terminal_snr)
            average = replace(average, lora=mark_expert(average.lora, state.settings.objective))
        entry = LoraEntry("the average", average.lora, chosen.strength, chosen.strength)
        grafted = host.lora_stacks.apply_lora_stack(model, clip, [entry], chosen.mode, trained_words(state))
        picture = draw(list(average.curves), "how much each step counts in the average", "step", "share")
        profile_data = {"version": 1, "curves": editor_data(average.curves), "lines": list(average.lines)}
        report = "\n".join([*average.lines, grafted.report])
        return io.NodeOutput(
            grafted.model, grafted.clip, average.lora, picture, report, ui={"graft_profile": [profile_data]}
        )


def _check_settings(sockets: Sequence[str], chosen: AverageSettings) -> None:
    """Raises one ValueError that lists all settings of EMAMerge that do not fit together or what is connected."""
    errors = [*_connection_errors(sockets, chosen.profile), *_value_errors(chosen)]
    from_state, algebra = list(sockets) == ["state"], chosen.algebra
    if from_state and (chosen.rank or algebra == "products" or (chosen.profile == "latest" and algebra != "auto")):
        errors.append(
            "the averages of a training state keep their rank and their factors: set maximum rank to 0 and averaging"
            " method to auto (to reduce the rank, save the average and use Merge LoRAs)"
        )
    elif chosen.rank and algebra == "factors":
        errors.append(
            "maximum rank only works with averaging method products: set maximum rank to 0, or averaging method to"
            " products"
        )
    raise_errors("EMA Merge", errors)


def _connection_errors(sockets: Sequence[str], profile: str) -> list[str]:
    """What does not fit which of state, snapshots and lora_stack are connected."""
    if len(sockets) != 1:
        inputs_are = "none is"
        if sockets:
            inputs_are = f"{' and '.join(map(_SOCKETS.__getitem__, sockets))} are"
        return [f"connect exactly one of training state, snapshots and LoRA stack; {inputs_are} connected"]
    from_state = sockets[0] == "state"
    if from_state and profile in ("uniform", "exponential", "weights"):
        return [
            f"averaging profile {profile} needs files: connect snapshots or a LoRA stack; for a training state use"
            " latest, width, best or search"
        ]
    if not from_state and profile in ("best", "search"):
        return [f"averaging profile {profile} needs a run's held-out images: connect the run's training state"]
    return []


def _value_errors(chosen: AverageSettings) -> list[str]:
    """What is wrong with the weights, whatever is connected."""
    from ..ema.weighted_sum import parse_numbers
    from ..training.averages.merge import widths_in

    readers: dict[str, Callable[[str], object]] = {"weights": parse_numbers, "best": widths_in, "search": widths_in}
    if chosen.profile in readers:
        try:
            readers[chosen.profile](chosen.weights)
        except ValueError as error:
            return [str(error).rstrip(".")]
    elif chosen.weights.strip():
        return [
            f"weights or widths are given and averaging profile is {chosen.profile}: leave them empty, or set averaging"
            " profile to weights"
        ]
    return []


def _check(state: states.TrainState | None, snapshots: Any, lora_stack: Any, chosen: AverageSettings) -> None:
    """`_check_settings` of a run, which also sees that a state has an average."""
    inputs = {"state": state, "snapshots": snapshots, "lora_stack": lora_stack}
    sockets = [name for name, value in inputs.items() if value is not None]
    if sockets == ["state"] and state is not None and not state.average:
        raise ValueError(
            "EMA Merge: this state has no average: connect EMA Settings to Start Training and train again."
        )
    _check_settings(sockets, chosen)


def _sources(state: states.TrainState | None, snapshots: Any, lora_stack: Any) -> SnapshotList:
    from ..training.averages import sources
    from ..training.store.store import Store

    if snapshots is not None:
        return snapshots
    if state is not None:
        return sources.sources_of_state(state, Store(host.folders.training_folder(), state.run).folder)
    rows = read_stack_rows(lora_stack)
    if not rows:
        raise ValueError("EMA Merge: the LoRA stack is empty. Add LoRAs to it.")
    changing = [row[0] for row in rows if row.blocks or row.schedule]
    if changing:
        raise ValueError(
            "EMA Merge cannot average LoRAs with block weights or schedules: clear blocks and schedule of"
            f" {', '.join(changing)}, or use Merge LoRAs."
        )
    return sources.sources_of_files(_find_paths([row[0] for row in rows], host.folders.lora_path))


def _running_average(state: states.TrainState) -> MergedAverage:
    """The EMA that was kept during training."""
    from ..training.averages.merge import MergedAverage
    from ..training.reports.curves import Curve, averaging_profile
    from ..training.tasks.registry import task_of

    settings = state.start.ema
    assert settings is not None  # the state has an average
    shares = averaging_profile(settings, state.step, state.settings.optimizer.total_steps)
    line = f"EMA ({settings.schedule}) at step {state.step}; {shares[0]:.2%} of it is the starting weights"
    return MergedAverage(task_of(state).lora_model(state, ema=True), (Curve(shares, first=0),), (line,))


def _average_files(state: states.TrainState | None, found: Any, chosen: AverageSettings, base: Any) -> MergedAverage:
    """The average of files or snapshots; profile best first picks the width with the lowest held-out loss."""
    from ..training.averages import merge
    from ..training.averages.held_out_loss import held_out_loss
    from ..training.tasks.registry import task_of
    from .step_call import open_denoiser

    lines: list[str] = []
    profile, width, weights = chosen.profile, chosen.width, chosen.weights
    if profile == "best":
        assert state is not None  # which the connections are checked for
        _check_dataset(state, profile)
        widths = merge.widths_to_try(found, weights)
        with open_denoiser(state) as denoiser:
            score = partial(held_out_loss, state, denoiser, state.subject.dataset)
            sweep = merge.sweep(found, widths, score, task_of(state).lora_model(state, ema=True))
        profile, width, weights, lines = "width", sweep.best, "", [merge.reach(found), *sweep.lines()]
    average = merge.merge_files(found, profile, width, weights, chosen.algebra, chosen.rank, base)
    return replace(average, lines=(*lines, *average.lines))


def _search_average(state: states.TrainState, found: Any, chosen: AverageSettings) -> MergedAverage:
    """The average whose shares are searched for the lowest held-out loss, or the best width if that is better."""
    from ..training.averages import merge, search
    from ..training.averages.held_out_loss import halves, held_out_loss
    from .step_call import open_denoiser

    _check_dataset(state, "search")
    dataset, tries = state.subject.dataset, chosen.search_tries
    widths, seen_and_kept = merge.widths_to_try(found, chosen.weights), halves(dataset)
    bar = host.events.progress_bar(len(seen_and_kept) * len(widths) + tries + 1)
    scored = iter(range(1, len(seen_and_kept) * len(widths) + tries + 2))
    with open_denoiser(state) as denoiser:

        def score(lora: Any, numbers: Any) -> float | None:
            host.events.raise_if_interrupted()
            loss = held_out_loss(state, denoiser, dataset, lora, numbers)
            bar(next(scored))
            return loss

        searched = search.search(found, widths, score, seen_and_kept, tries, chosen.search_seed)
    return merge.merge_with_shares(found, searched.shares, [merge.reach(found), *searched.lines], width=searched.width)


def _check_dataset(state: states.TrainState, profile: str) -> None:
    if state.subject.dataset is None:
        raise ValueError(
            f"EMA Merge: averaging profile {profile} measures the held-out loss: connect the dataset to Load State."
        )


NODES = [GraftSnapshots, EMAMerge]
