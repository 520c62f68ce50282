"""GraftSnapshots lists weights to average; EMAMerge puts averaged weights into a model."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from comfy_api.latest import io

from .. import host
from ..patches.lora_files.stack_rows import rows_of
from ..storage import safetensors
from .aliases import aliases
from .sockets import LoraModel, LoraStack, Snapshots, TrainState
from .training import opened

PROFILES = ("latest", "width", "best", "uniform", "exponential", "weights")


def _lines(source: str) -> list[str]:
    return [line.strip() for line in source.splitlines() if line.strip()]


def _run_folder(line: str) -> tuple[Path, str] | None:
    """(folder, beginning of a way's key) when the line names a run below output/graft."""
    from ..training.store.store import Store

    run, _, way = line.replace("\\", "/").partition("/")
    folder = Path(host.folders.training_folder()) / run
    if "/" in way or not folder.is_dir():
        return None
    return Store(host.folders.training_folder(), run).folder, way


def _paths(lines: list[str], find: Callable[[str], str]) -> list[tuple[str, str]]:
    found, wrong = [], []
    for line in lines:
        try:
            found.append((line, find(line)))
        except (ValueError, FileNotFoundError) as error:
            wrong.append(str(error))
    if wrong:
        raise ValueError("Files to average:\n" + "\n".join(f"- {one}" for one in wrong))
    return found


class GraftSnapshots(io.ComfyNode):
    """What to average: a run's snapshots, or a list of files."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="GraftSnapshots",
            display_name="Snapshots",
            category="Graft/averages",
            description=(
                "Lists weights to average: the snapshots of a training run, or LoRA files or checkpoints that you have."
            ),
            **aliases("ema", "average", "checkpoints", "model soup", "merge lora"),
            inputs=[
                io.String.Input(
                    "source",
                    default="run",
                    multiline=True,
                    tooltip=(
                        "The name of a run (the folder below output/graft; run/key where it went several ways), or one"
                        " file a line: names of the loras folder (output/loras/... for saved ones), or of checkpoints."
                    ),
                ),
            ],
            outputs=[Snapshots.Output(display_name="GRAFT_SNAPSHOTS"), io.String.Output(display_name="report")],
        )

    @classmethod
    def fingerprint_inputs(cls, source="run") -> str:
        """Changes when a listed file, or what a run has kept, does."""
        lines, digest = _lines(source), hashlib.sha256(source.encode())
        if len(lines) == 1:
            run = _run_folder(lines[0])
        else:
            run = None
        if run is None:
            found = _paths(lines, host.folders.weights_path)
        else:
            found = []
        if run is None:
            paths = [path for _, path in found]
        else:
            paths = sorted(map(str, (run[0] / "averages").glob("*.safetensors")))
        for path in paths:
            digest.update(repr((path, safetensors.version(path))).encode())
        return digest.hexdigest()

    @classmethod
    def execute(cls, source="run") -> io.NodeOutput:
        from ..training.averages import sources

        lines = _lines(source)
        if not lines:
            raise ValueError("GraftSnapshots: source is empty; give the name of a run, or one file a line")
        if len(lines) == 1:
            run = _run_folder(lines[0])
        else:
            run = None
        if run is None:
            found = sources.of_files(_paths(lines, host.folders.weights_path))
        else:
            found = sources.of_run(*run)
        return io.NodeOutput(found, found.report())


class EMAMerge(io.ComfyNode):
    """Puts an average of weights into a model."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="EMAMerge",
            display_name="EMA Merge",
            category="Graft/averages",
            description=(
                "Puts averaged weights into a model: the average that ran along with a training, one of any width made"
                " afterwards from snapshots, or an average of LoRA files or checkpoints."
            ),
            **aliases("ema", "average", "weight averaging", "merge lora", "model soup"),
            inputs=[
                io.Model.Input(
                    "model", tooltip="The model to patch, as the one that the training began from; it is not changed."
                ),
                io.Clip.Input(
                    "clip", optional=True, tooltip="The text encoder, for LoRA files that have layers for it."
                ),
                TrainState.Input(
                    "state", optional=True, tooltip="From Train Step. Connect this, snapshots or lora_stack."
                ),
                Snapshots.Input("snapshots", optional=True, tooltip="From Snapshots: a run's, or files."),
                LoraStack.Input(
                    "lora_stack", optional=True, tooltip="LoRA files to average; profile weights takes their strengths."
                ),
                io.Combo.Input(
                    "profile",
                    options=list(PROFILES),
                    default="latest",
                    tooltip=(
                        "latest: the running average, or the last file. width: one of that relative width. best: the"
                        " width with the least held-out loss. uniform: the mean. exponential: newer files count more."
                        " weights: as given."
                    ),
                ),
                io.Float.Input(
                    "width",
                    default=0.1,
                    min=0.001,
                    max=0.28,
                    step=0.005,
                    tooltip=(
                        "Of width and exponential: how far the average reaches back, as a share of the run (its"
                        " standard deviation)."
                    ),
                ),
                io.String.Input(
                    "weights",
                    default="",
                    tooltip=(
                        "Of profile weights: one number a file, in the order of the report. Of best: the widths to try,"
                        " empty for ten."
                    ),
                ),
                io.Float.Input(
                    "strength", default=1.0, min=-10.0, max=10.0, step=0.01, tooltip="1 is the average as it is."
                ),
                io.Combo.Input(
                    "mode",
                    options=["auto", "merge", "bypass", "host"],
                    default="auto",
                    tooltip="As in Patch Model with LoRA Stack.",
                ),
                io.Combo.Input(
                    "algebra",
                    options=["auto", "factors", "products"],
                    default="auto",
                    optional=True,
                    tooltip=(
                        "How LoRA files are averaged. factors: up and down by themselves, for files of one run."
                        " products: what they do to the weights, for any ranks. auto: factors where all files record"
                        " the same run, else products."
                    ),
                ),
                io.Int.Input(
                    "rank",
                    default=0,
                    min=0,
                    max=4096,
                    optional=True,
                    tooltip=(
                        "Of products: cut the average to this rank by SVD; 0 is exact, with the files' ranks added up."
                    ),
                ),
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
    def execute(
        cls,
        model,
        clip=None,
        state=None,
        snapshots=None,
        lora_stack=None,
        profile="latest",
        width=0.1,
        weights="",
        strength=1.0,
        mode="auto",
        algebra="auto",
        rank=0,
    ) -> io.NodeOutput:
        from ..training.reports.curves import draw, editor_data

        _check(state, snapshots, lora_stack, profile, weights, algebra, rank)
        if state is not None and profile == "latest":
            made = _running(state)
        else:
            found = _sources(state, snapshots, lora_stack)
            if lora_stack is not None and profile == "weights" and not weights.strip():
                strengths = {row[0]: row[1] for row in rows_of(lora_stack)}
                weights = " ".join(repr(strengths[file.name]) for file in found.files)
            made = _made(
                state, found, profile, width, weights, algebra, rank, lambda: host.base_weights.unet_weights(model)
            )
            left_out = sum(file.text_encoder for file in found.files)
            if clip is not None and left_out:
                line = (
                    f"{left_out} tensors of text encoders in these files are left out: only diffusion models are"
                    " averaged"
                )
                made = replace(made, lines=(*made.lines, line))
        if state is not None:
            model = host.denoiser.at_levels(model, state.settings.objective.zero_terminal_snr)
        grafted = host.lora.graft(model, clip, [host.lora.Entry("the average", made.lora, strength, strength)], mode)
        picture = draw(list(made.curves), "share of each step's weights in the average", "step", "share")
        profile_data = {"version": 1, "curves": editor_data(made.curves), "lines": list(made.lines)}
        report = "\n".join([*made.lines, grafted.report])
        return io.NodeOutput(
            grafted.model, grafted.clip, made.lora, picture, report, ui={"graft_profile": [profile_data]}
        )


def _check(state: Any, snapshots: Any, lora_stack: Any, profile: str, weights: str, algebra: str, rank: int) -> None:
    """Raise one ValueError that lists everything in EMAMerge's inputs that does not go together."""
    wrong = []
    connected = [
        name
        for name, value in (("state", state), ("snapshots", snapshots), ("lora_stack", lora_stack))
        if value is not None
    ]
    if len(connected) != 1:
        if connected:
            are = f"{' and '.join(connected)} are"
        else:
            are = "none is"
        wrong.append(f"connect exactly one of state, snapshots and lora_stack; {are} connected")
    elif state is not None and not state.average:
        wrong.append("this state has no average: connect EMA Settings to Start Training")
    elif state is not None and profile in ("uniform", "exponential", "weights"):
        wrong.append(
            f"profile {profile} is for files: connect snapshots or lora_stack; of a state use latest, width or best"
        )
    elif state is None and profile == "best":
        wrong.append("profile best measures the loss on a run's held-out pictures: connect the run's state")
    if weights.strip() and profile not in ("weights", "best"):
        wrong.append(f"weights are given and profile is {profile}: leave them empty, or set profile to weights")
    if rank and algebra == "factors":
        wrong.append("rank is for algebra products; factors keep their rank")
    if wrong:
        raise ValueError("EMAMerge: " + "; ".join(wrong) + ".")


def _sources(state: Any, snapshots: Any, lora_stack: Any) -> Any:
    from ..training.averages import sources
    from ..training.store.store import Store

    if snapshots is not None:
        return snapshots
    if state is not None:
        return sources.of_state(state, Store(host.folders.training_folder(), state.run).folder)
    rows = rows_of(lora_stack)
    if not rows:
        raise ValueError("EMAMerge: lora_stack is empty.")
    changing = [row[0] for row in rows if row.blocks or row.schedule]
    if changing:
        raise ValueError(
            f"EMAMerge: files are averaged whole; empty blocks and schedule of {', '.join(changing)}, or use Merge"
            " LoRAs."
        )
    return sources.of_files(_paths([row[0] for row in rows], host.folders.lora_path))


def _running(state: Any) -> Any:
    """The average that ran along."""
    from ..training.averages.merge import Merged
    from ..training.reports.curves import Curve, averaging_profile

    shares = averaging_profile(state.start.ema, state.step, state.settings.optimizer.total_steps)
    line = (
        f"average ({state.start.ema.schedule}) at step {state.step}; {shares[0]:.2%} of it are the weights before the"
        " first step"
    )
    return Merged(state.lora_model(ema=True), (Curve(shares, first=0),), (line,))


def _made(state: Any, found: Any, profile: str, width: float, weights: str, algebra: str, rank: int, base: Any) -> Any:
    """The average of files or snapshots; profile best chooses the width by the held-out loss first."""
    from ..training.averages import merge
    from ..training.averages.held_out_loss import held_out_loss

    lines: list[str] = []
    if profile == "best":
        if state.subject.dataset is None:
            raise ValueError("EMAMerge: profile best measures the held-out loss: connect the dataset to Load State.")
        widths = merge.widths_to_try(found, weights)
        with opened(state) as denoiser:
            score = partial(held_out_loss, state, denoiser, state.subject.dataset)
            swept = merge.sweep(found, widths, score, state.lora_model(ema=True))
        profile, width, weights, lines = "width", swept.best, "", swept.lines()
    made = merge.merged(found, profile, width, weights, algebra, rank, base)
    return merge.Merged(made.lora, made.curves, (*lines, *made.lines))


NODES = [GraftSnapshots, EMAMerge]
