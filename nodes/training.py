"""Training nodes: GraftTrainStart begins a run, TrainStep trains it for some steps."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from comfy_api.latest import io

from .. import host
from ..patches.lora_files.entry import LoraEntry
from ..patches.lora_files.stack_rows import rows_of
from ..training.distributed import process_group
from ..training.objective import settings as objectives
from ..training.optimizers import settings as optimizers
from ..training.store.names import KEEPS, check_run_name
from ..training.trainable.settings import AdapterSettings
from .lora import used_entries
from .refusals import refusal
from .schema import (
    EMA,
    Adapter,
    Dataset,
    LoraModel,
    LoraStack,
    LossMap,
    Objective,
    Optimizer,
    TrainState,
    Words,
    advanced,
    aliases,
)

log = logging.getLogger(__name__)


class Subject(NamedTuple):
    """What a TRAIN_STATE carries for the nodes: ComfyUI's objects, the dataset, and why results cannot be reused, if
    so.
    """

    model: Any
    clip: Any
    vae: Any
    dataset: Any
    unhashed: tuple[str, ...]
    training_only: Any = None


def training_only_lora(model: Any, lora_stack: Any, full_weights: bool = False) -> Any:
    """The LoRA that is on only while the loss is computed; None without a stack, or where no row is on."""
    entries = used_entries(rows_of(lora_stack or []), None)
    if not entries:
        return None
    from ..host import training_only

    return training_only.read(model, entries, full_weights)


class Sampled(NamedTuple):
    """What the previews of Train Step are sampled from; `prompts` are texts."""

    positive: Any
    negative: Any
    latent: Any
    prompts: Sequence[str]


class PreviewPrompt(NamedTuple):
    """A prompt of previews: its number (0 is the positive), its text where that is known, and its conditioning."""

    number: int
    text: str
    conditioning: Any


class GraftTrainStart(io.ComfyNode):
    """Joins model, dataset and settings into a state at step 0."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="GraftTrainStart",
            display_name="Start Training",
            category="Graft/training",
            description=(
                "Combines model, dataset and settings into a training state at step 0. It does not train"
                " yet; connect Train Step for that."
            ),
            **aliases("train", "lora training", "fine-tune", "finetune", "dreambooth"),
            inputs=[
                io.Model.Input(
                    "model",
                    tooltip=(
                        "The model to train. Its weights are never changed. Put Apply ToDo in front of it to"
                        " train faster."
                    ),
                ),
                Dataset.Input("dataset", tooltip="From Dataset: the images and captions to train on."),
                io.Clip.Input(
                    "clip",
                    optional=True,
                    tooltip="Passed on to Train Step's CLIP output. Needed if you train the text encoder.",
                ),
                io.Vae.Input("vae", optional=True, tooltip="For the previews of Train Step."),
                Adapter.Input(
                    "adapter",
                    optional=True,
                    tooltip=(
                        "What to train, from Adapter Settings. If left empty, a LoRA of rank 16 on the attention"
                        " layers."
                    ),
                ),
                Optimizer.Input(
                    "optimizer",
                    optional=True,
                    tooltip="How to train, from Optimizer Settings. If left empty, AdamW at 1e-4 with batch size 1.",
                ),
                Objective.Input(
                    "objective",
                    optional=True,
                    tooltip=(
                        "The loss and noise settings, from Objective Settings. If left empty, the model's own"
                        " objective."
                    ),
                ),
                EMA.Input(
                    "ema",
                    optional=True,
                    tooltip="Keeps an average of the weights, from EMA Settings. If left empty, there is no average.",
                ),
                io.Int.Input(
                    "seed",
                    display_name="seed",
                    default=0,
                    min=0,
                    max=0xFFFFFFFFFFFFFFFF,
                    tooltip="The seed of every random draw in the run. The same seed and inputs give the same result.",
                ),
                io.String.Input(
                    "run",
                    display_name="run name",
                    default="run",
                    tooltip="Folder under output/graft where the training states are stored.",
                ),
                LoraStack.Input(
                    "training_only",
                    optional=True,
                    tooltip=(
                        "For distilled models such as Z-Image Turbo: their training adapter, from LoRA Stack. It is on"
                        " while the loss is computed, and off in previews, in MODEL and in what is saved."
                    ),
                ),
                Words.Input(
                    "words",
                    optional=True,
                    tooltip=(
                        "Words to train beside the adapter or alone, from Train Words (textual inversion). Connect CLIP"
                        " too."
                    ),
                ),
            ],
            outputs=[TrainState.Output(display_name="TRAIN_STATE"), io.String.Output(display_name="report")],
        )

    @classmethod
    def validate_inputs(cls, run=None) -> bool | str:
        return refusal(cls, check_run_name, run=run)

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
        training_only=None,
        words=None,
    ) -> io.NodeOutput:
        from ..training import state as states
        from ..training.objective import experts
        from ..training.reports import text
        from ..training.store.store import Store

        Store(host.folders.training_folder(), run, limit=host.folders.store_limit())  # report its errors first
        _check_words(words, adapter, clip)
        adapter = adapter or AdapterSettings()
        optimizer = optimizers.of_ranks(optimizer or optimizers.OptimizerSettings(), process_group.current().as_ranks)
        objective = experts.with_own_boundary(objective or objectives.ObjectiveSettings(), model.model.diffusion_model)
        settings = states.Settings(optimizer, objective)
        levels = host.model_sampling.with_zero_terminal_snr(model, settings.objective.zero_terminal_snr)
        sampling = levels.get_model_object("model_sampling")
        prediction = host.model_sampling.prediction_type(sampling)
        objectives.check_for(settings.objective, prediction)
        if adapter.text_encoder and clip is None:
            raise ValueError(
                "Start Training: train text encoder is on in Adapter Settings, and no CLIP is connected. Connect one,"
                " or switch train text encoder off."
            )
        patches = host.lora.patched_by(model) + (host.lora.patched_by(clip.patcher) if adapter.text_encoder else [])
        if adapter.full_weights and patches:
            raise ValueError(
                f"Start Training: adapter type full needs an unpatched model, and this one has {' and '.join(patches)}"
                " on it. Take them off first."
            )
        identity, unhashed = host.fingerprint.of_trained(model, clip if adapter.text_encoder or words else None)
        unhashed += dataset.unhashed
        switched = training_only_lora(model, training_only, adapter.full_weights)
        words, vectors = _begun_words(words, clip, model, dataset)
        start = states.Start(identity, dataset.digest, adapter, ema, seed, switched.identity if switched else "", words)
        base = partial(host.base_weights.trained_weights, model, clip if adapter.text_encoder else None)
        encoder, parts = _trained_encoder(adapter, clip, model, dataset)
        state = states.begin(model.model.diffusion_model, start, settings, run, base, encoder, parts, vectors)
        state = _noted(replace(state, subject=Subject(model, clip, vae, dataset, unhashed, switched)))
        sigma = None
        if prediction == "flow":
            sigma = partial(host.model_sampling.sigma_at, sampling)
        report = text.beginning(state, dataset, unhashed, sigma, switched.report if switched else "")
        return io.NodeOutput(state, report)


def _check_words(words: Any, adapter: Any, clip: Any) -> None:
    """Raises ValueError where words cannot be trained with what is connected."""
    if words is None:
        return
    if clip is None:
        raise ValueError("Start Training: Train Words is connected, and no CLIP is. Connect the model's CLIP.")
    if words.alone and adapter is not None:
        raise ValueError(
            "Start Training: words only is on in Train Words, and Adapter Settings is connected. Disconnect it, or"
            " switch words only off."
        )


def _begun_words(words: Any, clip: Any, model: Any, dataset: Any) -> tuple[Any, Any]:
    """Words with their bounds, and the vectors that they start from; (None, None) without words."""
    if words is None:
        return None, None
    from ..host import words as words_of_host

    return words_of_host.begin(words, clip, model, dataset)


def _trained_encoder(adapter: AdapterSettings, clip: Any, model: Any, dataset: Any) -> tuple[Any, Any]:
    """The text encoder that an adapter trains, and the paths of its parts that can learn something; None where all or
    nothing can.
    """
    if not adapter.text_encoder:
        return None, None
    if adapter.full_weights:
        return clip.cond_stage_model, None
    return clip.cond_stage_model, host.text_encoder_gradients.trainable_parts(clip, model, dataset.clip_skip)


class TrainStep(io.ComfyNode):
    """Trains some steps: takes a state and returns a new one. The old state stays valid."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TrainStep",
            display_name="Train Step",
            category="Graft/training",
            description=(
                "Trains for some steps. A training state goes in and a new one comes out; the old one is"
                " still there. Chain two nodes, branch three from one, or sample in between. Results are"
                " stored, so no step is trained twice."
            ),
            **aliases("train", "lora training", "fine-tune", "train lora"),
            is_output_node=True,
            hidden=[io.Hidden.unique_id],
            inputs=[
                TrainState.Input("state", tooltip="From Start Training, Load State or another Train Step."),
                io.Int.Input(
                    "steps",
                    display_name="steps",
                    default=100,
                    min=0,
                    max=10_000_000,
                    tooltip="How many more steps to train. Raise it and queue again to continue from the last result.",
                ),
                io.Float.Input(
                    "epochs",
                    display_name="epochs (replaces steps)",
                    default=0.0,
                    min=0.0,
                    max=100_000.0,
                    step=0.5,
                    tooltip="Trains this many epochs instead of steps: passes through all images. 0 uses steps.",
                ),
                io.Int.Input(
                    "validate_every",
                    display_name="validate every N steps",
                    default=50,
                    min=0,
                    max=1_000_000,
                    tooltip=(
                        "Measures the loss on the held-out images every N steps. With EMA Settings it measures"
                        " the average as well, which doubles the time. Raise it if validation takes too long; 0 is"
                        " never."
                    ),
                ),
                io.Int.Input(
                    "preview_every",
                    display_name="preview every N steps",
                    default=0,
                    min=0,
                    max=1_000_000,
                    tooltip=(
                        "Samples a preview every N steps, with the weights and with their average. Connect"
                        " positive, negative and latent. 0 is never."
                    ),
                ),
                advanced(
                    io.Int,
                    "snapshot_every",
                    display_name="snapshot every N steps",
                    default=100,
                    min=0,
                    max=1_000_000,
                    tooltip=(
                        "Stores the state every N steps. A run that is killed continues from the last one. Lower"
                        " it if steps are slow; 0 is never."
                    ),
                ),
                io.Conditioning.Input("positive", optional=True, tooltip="The prompt for previews."),
                io.Conditioning.Input(
                    "negative", optional=True, tooltip="The negative prompt for previews. Without it they use no CFG."
                ),
                io.Latent.Input(
                    "latent", optional=True, tooltip="The size of the previews, and the latent they start from."
                ),
                Optimizer.Input(
                    "optimizer",
                    optional=True,
                    tooltip=(
                        "Optional. New optimizer settings from this step on. If left empty, the settings already"
                        " in the state are used."
                    ),
                ),
                Objective.Input(
                    "objective",
                    optional=True,
                    tooltip=(
                        "Optional. New loss and noise settings from this step on. If left empty, the settings"
                        " already in the state are used."
                    ),
                ),
                advanced(
                    io.Combo,
                    "keep",
                    display_name="states to keep",
                    options=list(KEEPS),
                    default="best",
                    optional=True,
                    tooltip=(
                        "Which states stay on disk. last: the final one. best: also the one with the lowest"
                        " held-out loss, that of the average if there is one. every: these and all snapshots, if"
                        " you want to branch from them."
                    ),
                ),
                advanced(
                    io.Float,
                    "snapshot_minutes",
                    display_name="snapshot every N minutes",
                    default=10.0,
                    min=0.0,
                    max=10_000.0,
                    step=1.0,
                    optional=True,
                    tooltip=(
                        "Also stores a snapshot when this many minutes have passed since the last one. 0 is never."
                    ),
                ),
                advanced(
                    io.Boolean,
                    "tensorboard",
                    display_name="write TensorBoard logs",
                    default=False,
                    optional=True,
                    tooltip="Writes TensorBoard files into the run's folder. Needs the Python package tensorboard.",
                ),
                advanced(
                    io.String,
                    "prompts",
                    display_name="more preview prompts",
                    default="",
                    multiline=True,
                    optional=True,
                    tooltip=(
                        "More prompts for the previews, one per line, at most 16. Lines that start with # are"
                        " skipped. They are encoded with the CLIP of Start Training, with what is trained of it so"
                        " far, and always sampled with the run's seed."
                    ),
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
    def validate_inputs(cls, tensorboard=None, prompts=None) -> bool | str:
        return refusal(cls, _check_values, ("tensorboard",), ("prompts",), tensorboard=tensorboard, prompts=prompts)

    @classmethod
    def fingerprint_inputs(cls, **_) -> str:
        """Changes when the stop button was used, so that the step continues when queued again."""
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
        prompts="",
    ) -> io.NodeOutput:
        from ..training import state as states
        from ..training.data.epoch_order import batches_per_epoch
        from ..training.objective import experts
        from ..training.run.call import target_key
        from ..training.run.loop import Callbacks

        group = process_group.current()
        if optimizer is not None:
            optimizer = optimizers.of_ranks(optimizer, group.as_ranks)
        subject = state.subject
        if objective is not None:
            objective = experts.with_own_boundary(objective, subject.model.model.diffusion_model)
        state = states.with_settings(state, optimizer, objective)
        if state.start.encodes_captions and subject.clip is None:
            raise ValueError(
                "Train Step: this state trains the text encoder or words, but was loaded without a text encoder."
                " Connect CLIP to Load State."
            )
        sampled = Sampled(positive, negative, latent, _check_values(tensorboard, prompts))
        _check(subject, steps > 0 or epochs > 0, preview_every, sampled)
        if epochs > 0:
            optimizer_settings = state.settings.optimizer
            steps = max(
                1,
                math.ceil(
                    epochs
                    * batches_per_epoch(subject.dataset, optimizer_settings.batch_size)
                    / optimizer_settings.accumulation
                ),
            )
        if steps:
            state = states.with_planned_steps(state, state.step + steps)
        state = _noted(state)
        callbacks = Callbacks(
            validate_every=validate_every,
            snapshot_every=snapshot_every,
            snapshot_minutes=snapshot_minutes,
            preview_every=preview_every,
        )
        node = None
        if cls.hidden:
            node = cls.hidden.unique_id
        group.meet_at(str(node))
        told = host.events.TrainingCall(
            node, _workflow_id(cls.hidden), state.run, target_key(state, steps), state.start.digest, state.step + steps
        )
        call = _Call(state, told, sampled)
        try:
            result, report = call.trained(steps, callbacks, keep, tensorboard)
        except process_group.RemoteRankError as error:
            host.events.interrupt_as(error.kind)
            raise
        lora = result.lora_model()
        model = host.model_sampling.with_zero_terminal_snr(subject.model, result.settings.objective.zero_terminal_snr)
        grafted = host.lora.apply_lora_stack(
            model, subject.clip, [LoraEntry(f"{result.run} at step {result.step}", lora)]
        )
        log.info("%s", report)
        panel = {
            "text": [report],
            "graft_run": [{"run": result.run, "key": result.key, "until": call.told.until}],
            "graft_previews": call.pictures,
        }
        losses = {"loss": list(result.history.loss)}
        return io.NodeOutput(
            result, grafted.model, grafted.clip, lora, losses, report, ui={k: v for k, v in panel.items() if v}
        )


def _workflow_id(hidden: Any) -> str | None:
    """The id of the editor's workflow that a node runs in, None where it has none: new ones have zeros."""
    sent = getattr(hidden, "extra_pnginfo", None)
    workflow = sent.get("workflow") if isinstance(sent, dict) else None
    workflow_id = workflow.get("id") if isinstance(workflow, dict) else None
    if isinstance(workflow_id, str) and len(workflow_id) <= 100 and workflow_id.strip("0-"):
        return workflow_id
    return None


def _noted(state: Any) -> Any:
    """The state with notes about the dataset, ToDo and TREAD for its LoRA's metadata. Without a dataset it keeps its
    notes.
    """
    from ..host import token_routing
    from ..training.data import kohya_metadata

    subject, settings = state.subject, state.settings
    if subject.dataset is None:
        return state
    optimizer = settings.optimizer
    sizes = optimizer.batch_size, optimizer.accumulation, optimizer.total_steps
    metadata = kohya_metadata.training_metadata(subject.dataset, *sizes, settings.objective.conditioning_dropout)
    notes = {**host.token_downsampling.todo_metadata(subject.model), **token_routing.routing_metadata(subject.model)}
    return replace(state, notes={**notes, **metadata})


@contextmanager
def opened(state: Any, layers: bool = False) -> Iterator[Any]:
    """The denoiser of a state's own model, with its text encoder where that or words are trained and with its
    training-only LoRA.

    Its `training_only` switches that LoRA off for previews; None without one.
    """
    from ..host import training_only

    subject = state.subject
    if state.start.training_only and subject.training_only is None:
        raise ValueError(
            "This state computes its loss with a training-only LoRA, but was loaded without one. Connect that LoRA to"
            " training-only LoRA of Load State."
        )
    if state.start.encodes_captions:
        clip = subject.clip
    else:
        clip = None
    skip, weighted = 0, False
    if subject.dataset is not None:
        skip, weighted = subject.dataset.clip_skip, subject.dataset.weighted_captions
    terminal = state.settings.objective.zero_terminal_snr
    with (
        host.denoiser.denoiser(subject.model, terminal, layers, clip, skip, weighted) as denoiser,
        training_only.attached(denoiser.patcher, subject.training_only) as switched,
    ):
        denoiser.training_only = switched
        yield denoiser


def _check_values(tensorboard: bool = False, prompts: str = "") -> list[str]:
    """The preview prompts. Raises ValueError for what is wrong whatever is connected."""
    from ..training.run.preview_prompts import preview_prompts

    if tensorboard:
        from ..training.reports.tensorboard import check

        check()
    return preview_prompts(prompts)


def _check(subject: Any, training: bool, preview_every: int, sampled: Sampled) -> None:
    """Raises an error for missing inputs before the first step."""
    if training and subject.dataset is None:
        raise ValueError(
            "Train Step: the state was loaded without its dataset. Connect the dataset to Load State to train further."
        )
    if preview_every:
        host.previews.check(
            sampled.positive, sampled.negative, sampled.latent, subject.vae, sampled.prompts, subject.clip
        )


class _Call:
    """One execution of TrainStep: sends progress to the front end while it trains."""

    def __init__(self, state: Any, told: Any, sampled: Sampled) -> None:
        from ..training.reports.throughput import Throughput

        self.state, self.told, self.sampled = state, told, sampled
        self.encoded: list[Any] = []  # the prompts of previews, unless what is trained changes them
        self.bar, self.pace = host.events.progress(told.until - state.step), Throughput(told.until)
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
        previewing = callbacks.preview_every > 0
        forward = partial(opened, state, state.settings.optimizer.offload == "layers" or process_group.current().shard)
        if tensorboard:
            self.writer = Writer(Store(folder, state.run).folder / "tensorboard" / state.start.digest[:16])
        try:
            with host.events.shown(self.told), host.events.stoppable(state.run) as should_stop:
                callbacks = replace(
                    callbacks,
                    on_begin=lambda begun: self.begun(begun.history, previewing),
                    on_step=self.stepped,
                    preview=self.preview,
                    should_stop=should_stop,
                )
                outcome = runs.run(state, steps, forward, subject.dataset, store, callbacks, keep, log.warning)
                self.told.result = outcome.state.key
        finally:
            if self.writer is not None:
                self.writer.close()
        return outcome.state, text.step(state, outcome, subject.unhashed, self.pictures)

    def stepped(self, step: int, moved: Any, validation: Any) -> None:
        """Reports a step to the front end. Raises ComfyUI's exception when the user interrupts."""
        from ..training.run.out_of_memory import used

        self.bar(step - self.state.step)
        speed, seconds_left = self.pace(step, moved.seconds)
        held_out: dict[str, float | None] = {"validation": None, "average": None}
        if validation is not None:
            held_out = {"validation": validation.weights, "average": validation.average}
        measurements = {"loss": moved.loss, "rate": moved.rate, "norm": moved.norm, **held_out}
        memory = used(self.state.subject.model.load_device)
        self.told.stepped({"step": step, **measurements, "speed": speed, "left": seconds_left, "memory": memory})
        if self.writer is not None:
            self.writer.write(step, moved, validation)
        host.events.raise_if_interrupted()

    def begun(self, history: Any, previewing: bool) -> None:
        """Takes the history that training goes on from, before the model is loaded: encodes the prompts of previews."""
        self.told.begun(history)
        if previewing and not self.state.start.encodes_captions:
            subject = self.state.subject
            skip = 0
            if subject.dataset is not None:
                skip = subject.dataset.clip_skip
            self.encoded = host.encoding.encode_prompts(subject.clip, self.sampled.prompts, skip)

    def prompts(self, denoiser: Any) -> list[PreviewPrompt]:
        """The prompts of previews, encoded with the text encoder as it is now."""
        encoded = self.encoded
        if denoiser.encode is not None:
            encoded = denoiser.encode.encode_prompts(self.sampled.prompts)
        prompts = []
        if self.sampled.positive is not None:
            prompts.append(PreviewPrompt(0, "", self.sampled.positive))
        for number, (text, conditioning) in enumerate(zip(self.sampled.prompts, encoded, strict=True), start=1):
            prompts.append(PreviewPrompt(number, text, conditioning))
        return prompts

    def preview(self, denoiser: Any, step: int, average: bool) -> None:
        """Samples every prompt with the model's current weights, shows the images, and remembers their files.

        Raises ComfyUI's exception when the user interrupts.
        """
        label = "weights"
        if average:
            label = "average"
        without: AbstractContextManager[None] = nullcontext()
        if denoiser.training_only is not None:
            without = denoiser.training_only.off()
        with without:
            for prompt in self.prompts(denoiser):
                host.events.raise_if_interrupted()
                self.preview_of(prompt, denoiser.patcher, step, label)

    def preview_of(self, prompt: PreviewPrompt, patcher: Any, step: int, label: str) -> None:
        """Samples one prompt and shows the images."""
        state, sampled = self.state, self.sampled
        seed = state.start.seed % 2**63
        latents = host.previews.sample(patcher, prompt.conditioning, sampled.negative, sampled.latent, seed)
        name = host.previews.name_of(state.start.digest, step, label, prompt.number)
        decoded = host.previews.decode(state.subject.vae, latents, patcher)
        files = host.previews.keep(decoded, state.run, name, prompt.text)
        self.pictures += files
        said: dict[str, Any] = {"label": label}
        if prompt.number:
            said.update(prompt=prompt.number, text=prompt.text)
        pictures = [{**file, **said} for file in files]
        host.events.send_event("graft.preview", {**self.told.told, "step": step, "pictures": pictures})


NODES = [GraftTrainStart, TrainStep]
