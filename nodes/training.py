"""Training in the graph: GraftTrainStart begins a run, TrainStep is a step of it."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from comfy_api.latest import io

from .. import host
from ..training.distributed import process_group
from ..training.objective import loss as objectives
from ..training.optimizers import settings as optimizers
from ..training.store.store import KEEPS
from ..training.trainable import install
from .aliases import aliases
from .sockets import EMA, Adapter, Dataset, LoraModel, LossMap, Objective, Optimizer, TrainState

log = logging.getLogger(__name__)


class Subject(NamedTuple):
    """What a TRAIN_STATE carries for the nodes: the host's objects, the pictures, and why results are not reused if
    they are not.
    """

    model: Any
    clip: Any
    vae: Any
    dataset: Any
    unhashed: tuple[str, ...]


class GraftTrainStart(io.ComfyNode):
    """Joins model, dataset and settings into a state at step 0."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="GraftTrainStart",
            display_name="Start Training",
            category="Graft/training",
            description="Joins model, dataset and settings into a training state at step 0. Nothing is trained yet.",
            **aliases("train", "lora training", "fine-tune", "finetune", "dreambooth"),
            inputs=[
                io.Model.Input(
                    "model",
                    tooltip=(
                        "The model to train; its weights are never changed. Apply ToDo before it makes training faster."
                    ),
                ),
                Dataset.Input("dataset", tooltip="From Dataset."),
                io.Clip.Input(
                    "clip", optional=True, tooltip="Goes through to Train Step's CLIP output; needed to train it."
                ),
                io.Vae.Input("vae", optional=True, tooltip="For the previews of Train Step."),
                Adapter.Input(
                    "adapter", optional=True, tooltip="What is trained; without it a LoRA of rank 16 on attention."
                ),
                Optimizer.Input("optimizer", optional=True, tooltip="How; without it AdamW at 1e-4, batch 1."),
                Objective.Input("objective", optional=True, tooltip="What for; without it the model's own objective."),
                EMA.Input("ema", optional=True, tooltip="Keep an average of the weights; without it there is none."),
                io.Int.Input(
                    "seed",
                    default=0,
                    min=0,
                    max=0xFFFFFFFFFFFFFFFF,
                    tooltip="Every random draw of the run comes from it.",
                ),
                io.String.Input(
                    "run", default="run", tooltip="Name of the folder under output/graft where the states are stored."
                ),
            ],
            outputs=[TrainState.Output(display_name="TRAIN_STATE"), io.String.Output(display_name="report")],
        )

    @classmethod
    def execute(
        cls,
        model,
        dataset,
        clip=None,
        vae=None,
        adapter=None,
        optimizer=None,
        objective=None,
        ema=None,
        seed=0,
        run="run",
    ) -> io.NodeOutput:
        from ..training import state as states
        from ..training.reports import text
        from ..training.store.store import Store

        Store(
            host.folders.training_folder(), run, limit=host.folders.store_limit()
        )  # what is wrong there is said before anything else
        adapter = adapter or install.AdapterSettings()
        optimizer = optimizers.of_ranks(optimizer or optimizers.OptimizerSettings(), process_group.group().meant)
        settings = states.Settings(optimizer, objective or objectives.ObjectiveSettings())
        levels = host.denoiser.at_levels(model, settings.objective.zero_terminal_snr)
        objectives.check_for(settings.objective, host.denoiser.prediction(levels.get_model_object("model_sampling")))
        if adapter.text_encoder and clip is None:
            raise ValueError(
                "GraftTrainStart: the adapter trains the text encoder (text_encoder), and no clip is connected."
            )
        patches = host.lora.patched(model) + (host.lora.patched(clip.patcher) if adapter.text_encoder else [])
        if adapter.kind == "full" and patches:
            raise ValueError(
                f"GraftTrainStart: kind full trains a model's own weights, and this one has {' and '.join(patches)}"
                " on it."
            )
        identity, unhashed = host.fingerprint.of_trained(model, clip if adapter.text_encoder else None)
        unhashed += dataset.unhashed
        start = states.Start(identity, dataset.digest, adapter, ema, seed)
        if adapter.text_encoder:
            text_encoder = clip.cond_stage_model
        else:
            text_encoder = None
        base = partial(host.base_weights.trained_weights, model, clip if adapter.text_encoder else None)
        adapted = adapter.text_encoder and adapter.kind != "full"
        if adapted:
            read = host.encoding.read_parts(clip, model, dataset.clip_skip)
        else:
            read = None
        begun = states.begin(model.model.diffusion_model, start, settings, run, base, text_encoder, read)
        begun = _noted(replace(begun, subject=Subject(model, clip, vae, dataset, unhashed)))
        return io.NodeOutput(begun, text.beginning(begun, dataset, unhashed))


class TrainStep(io.ComfyNode):
    """Training as a function: a state goes in, a state comes out, the first is still there."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TrainStep",
            display_name="Train Step",
            category="Graft/training",
            description=(
                "Trains, as a function: a state goes in, a new state comes out, and the one that went in is still"
                " there. Chain two, branch three from one, sample in between. Results are stored: the same step is"
                " never trained twice."
            ),
            **aliases("train", "lora training", "fine-tune", "train lora"),
            is_output_node=True,
            hidden=[io.Hidden.unique_id],
            inputs=[
                TrainState.Input("state", tooltip="From Start Training or another Train Step."),
                io.Int.Input("steps", default=100, min=0, max=10_000_000, tooltip="How many steps further."),
                io.Float.Input(
                    "epochs",
                    default=0.0,
                    min=0.0,
                    max=100_000.0,
                    step=0.5,
                    tooltip="Above 0 it replaces steps: rounds through the pictures.",
                ),
                io.Int.Input(
                    "validate_every",
                    default=50,
                    min=0,
                    max=1_000_000,
                    tooltip="Measure the loss on the held-out pictures every N steps; 0 is never.",
                ),
                io.Int.Input(
                    "preview_every",
                    default=0,
                    min=0,
                    max=1_000_000,
                    tooltip=(
                        "Every N steps sample positive, negative and latent with the weights and with their average; 0"
                        " is never."
                    ),
                ),
                io.Int.Input(
                    "snapshot_every",
                    default=100,
                    min=0,
                    max=1_000_000,
                    tooltip="A run that is killed goes on from the last one; 0 is never.",
                ),
                io.Conditioning.Input("positive", optional=True, tooltip="For previews."),
                io.Conditioning.Input(
                    "negative", optional=True, tooltip="For previews; without it they have no guidance."
                ),
                io.Latent.Input("latent", optional=True, tooltip="For previews: their size, and what they start from."),
                Optimizer.Input("optimizer", optional=True, tooltip="Settings that hold from here on."),
                Objective.Input("objective", optional=True, tooltip="Settings that hold from here on."),
                io.Combo.Input(
                    "keep",
                    options=list(KEEPS),
                    default="best",
                    optional=True,
                    tooltip=(
                        "last: the state at the end. best: also the one of the lowest held-out loss. every: these and"
                        " every snapshot."
                    ),
                ),
                io.Float.Input(
                    "snapshot_minutes",
                    default=10.0,
                    min=0.0,
                    max=10_000.0,
                    step=1.0,
                    optional=True,
                    tooltip="A snapshot too when so many minutes have passed since the last; 0 is never.",
                ),
                io.Boolean.Input(
                    "tensorboard",
                    default=False,
                    optional=True,
                    tooltip="Write TensorBoard files into the run's folder; needs the package tensorboard.",
                ),
            ],
            outputs=[
                TrainState.Output(display_name="TRAIN_STATE"),
                io.Model.Output(display_name="MODEL"),
                io.Clip.Output(display_name="CLIP"),
                LoraModel.Output(display_name="LORA_MODEL"),
                LossMap.Output(display_name="LOSS_MAP"),
                io.String.Output(display_name="report"),
            ],
        )

    @classmethod
    def fingerprint_inputs(cls, **_) -> str:
        """Changes when a step was stopped by its button: queued again it goes on."""
        return str(host.events.stops())

    @classmethod
    def execute(
        cls,
        state,
        steps=100,
        epochs=0.0,
        validate_every=50,
        preview_every=0,
        snapshot_every=100,
        positive=None,
        negative=None,
        latent=None,
        optimizer=None,
        objective=None,
        keep="best",
        snapshot_minutes=10.0,
        tensorboard=False,
    ) -> io.NodeOutput:
        from ..training import state as states
        from ..training.data.epoch_order import batches_per_epoch
        from ..training.run.loop import Callbacks

        group, node = process_group.group(), cls.hidden.unique_id if cls.hidden else None
        if optimizer is not None:
            optimizer = optimizers.of_ranks(optimizer, group.meant)
        subject, state = state.subject, _noted(states.with_settings(state, optimizer, objective))
        if state.start.adapter.text_encoder and subject.clip is None:
            raise ValueError(
                "TrainStep: the state trains the text encoder and was loaded without one. Connect clip to Load State."
            )
        _check(subject, steps > 0 or epochs > 0, preview_every, positive, negative, latent, tensorboard)
        if epochs > 0:
            held = state.settings.optimizer
            steps = max(1, math.ceil(epochs * batches_per_epoch(subject.dataset, held.batch_size) / held.accumulation))
        callbacks = Callbacks(
            validate_every=validate_every,
            snapshot_every=snapshot_every,
            snapshot_minutes=snapshot_minutes,
            preview_every=preview_every,
        )
        group.meet(str(node))
        call = _Call(state, state.step + steps, node, (positive, negative, latent))
        try:
            result, report = call.trained(steps, callbacks, keep, tensorboard)
        except process_group.Elsewhere as error:
            host.events.interrupt_as(error.kind)
            raise
        lora = result.lora_model()
        model = host.denoiser.at_levels(subject.model, result.settings.objective.zero_terminal_snr)
        grafted = host.lora.graft(model, subject.clip, [host.lora.Entry(f"{result.run} at step {result.step}", lora)])
        log.info("%s", report)
        shown = {
            "text": [report],
            "graft_run": [{"run": result.run, "key": result.key}],
            "graft_previews": call.pictures,
        }
        losses = {"loss": list(result.history.loss)}
        return io.NodeOutput(
            result, grafted.model, grafted.clip, lora, losses, report, ui={k: v for k, v in shown.items() if v}
        )


def _noted(state: Any) -> Any:
    """The state with what its LoRA is to say of the pictures and of ToDo; one without its dataset keeps
    what it says.
    """
    from ..training.data import kohya_metadata

    subject, settings = state.subject, state.settings
    if subject.dataset is None:
        return state
    optimizer = settings.optimizer
    sizes = optimizer.batch_size, optimizer.accumulation, optimizer.total_steps
    said = kohya_metadata.metadata(subject.dataset, *sizes, settings.objective.conditioning_dropout)
    return replace(state, notes={**host.token_downsampling.todo_metadata(subject.model), **said})


def opened(state: Any, layers: bool = False) -> Any:
    """The denoiser of a state's own model (a context manager), with its text encoder where that is trained."""
    subject = state.subject
    if state.start.adapter.text_encoder:
        clip = subject.clip
    else:
        clip = None
    if subject.dataset is None:
        skip = 0
    else:
        skip = subject.dataset.clip_skip
    return host.denoiser.denoiser(subject.model, state.settings.objective.zero_terminal_snr, layers, clip, skip)


def _check(
    subject: Any, training: bool, preview_every: int, positive: Any, negative: Any, latent: Any, tensorboard: bool
) -> None:
    """Say what is missing before the first step."""
    if training and subject.dataset is None:
        raise ValueError(
            "TrainStep: the state was loaded without its dataset. Connect the dataset to Load State to train further."
        )
    if preview_every:
        host.previews.check(positive, negative, latent, subject.vae)
    if tensorboard:
        from ..training.reports.tensorboard import check

        check()


class _Call:
    """One execution of TrainStep: what it tells the front end while it trains."""

    def __init__(self, state: Any, until: int, node: str | None, sampled: tuple[Any, Any, Any]) -> None:
        from ..training.reports.throughput import Throughput

        self.state, self.until, self.node, self.sampled = state, until, node, sampled
        self.bar, self.pace = host.events.progress(until - state.step), Throughput(until)
        self.pictures: list[dict[str, str]] = []
        self.writer: Any = None

    def trained(self, steps: int, callbacks: Any, keep: str, tensorboard: bool) -> tuple[Any, str]:
        """The state after `steps` more steps and the report, with progress, events, previews, stopping and interruption
        of the host.
        """
        from ..ema.host_offload import note_on
        from ..training.reports import text
        from ..training.reports.tensorboard import Writer
        from ..training.run import call as runs
        from ..training.store.store import Store

        state, subject = self.state, self.state.subject
        if (
            state.start.ema is not None
            and state.start.ema.device == "host"
            and (note := note_on(subject.model.load_device))
        ):
            log.info("%s", note)
        folder = host.folders.training_folder()
        store = None
        if not subject.unhashed:
            store = Store(folder, state.run, host.fingerprint.versions(subject.model), host.folders.store_limit())
        forward = partial(opened, state, state.settings.optimizer.offload == "layers" or process_group.group().shard)
        if tensorboard:
            self.writer = Writer(Store(folder, state.run).folder / "tensorboard" / state.start.digest[:16])
        try:
            with host.events.stoppable(state.run) as should_stop:
                callbacks = replace(callbacks, on_step=self.stepped, preview=self.preview, should_stop=should_stop)
                outcome = runs.run(state, steps, forward, subject.dataset, store, callbacks, keep, log.warning)
        finally:
            if self.writer is not None:
                self.writer.close()
        return outcome.state, text.step(state, outcome, subject.unhashed, self.pictures)

    def stepped(self, step: int, moved: Any, validation: float | None) -> None:
        """Tell of a step; raises the host's exception when the user interrupts."""
        from ..training.run.out_of_memory import used

        self.bar(step - self.state.step)
        speed, left = self.pace(step, moved.seconds)
        data = {
            "node": self.node,
            "run": self.state.run,
            "step": step,
            "until": self.until,
            "loss": moved.loss,
            "rate": moved.rate,
        }
        more = {"norm": moved.norm, "validation": validation, "speed": speed, "left": left}
        host.events.send_event("graft.step", {**data, **more, "memory": used(self.state.subject.model.load_device)})
        if self.writer is not None:
            self.writer.write(step, moved, validation)
        host.events.raise_if_interrupted()

    def preview(self, denoiser: Any, step: int, average: bool) -> None:
        """Sample with the weights that are on the model now, show the pictures, and remember where they are."""
        if average:
            label = "average"
        else:
            label = "weights"
        latents = host.previews.sample(denoiser.patcher, *self.sampled, self.state.start.seed % 2**63)
        name = host.previews.name_of(self.state.start.digest, step, label)
        files = host.previews.keep(
            host.previews.decode(self.state.subject.vae, latents, denoiser.patcher), self.state.run, name
        )
        self.pictures += files
        told = [{**file, "label": label} for file in files]
        host.events.send_event(
            "graft.preview", {"node": self.node, "run": self.state.run, "step": step, "pictures": told}
        )


NODES = [GraftTrainStart, TrainStep]
