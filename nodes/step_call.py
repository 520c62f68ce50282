"""One execution of Train Step for one state: what it begins with, and what it tells the front end while it trains."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from comfy_api.latest import io

from .. import host
from ..patches.lora_files.entry import LoraEntry
from ..storage.printable import logger
from ..training.distributed import process_group
from ..training.settings import GO_ON

if TYPE_CHECKING:
    from torch import Tensor

    from ..host.comfyui_objects import Clip, Model, Vae
    from ..host.lora_stacks import PatchedModels
    from ..host.training_only import TrainingOnlyLora
    from ..training.data.dataset import Dataset
    from ..training.expert_pair import ExpertPair
    from ..training.objective.settings import ObjectiveSettings
    from ..training.optimizers.settings import OptimizerSettings
    from ..training.run.call import Outcome
    from ..training.run.epoch_settings import EpochSettings
    from ..training.run.loop import Callbacks
    from ..training.run.preview_prompts import PromptLine
    from ..training.settings import StepSettings
    from ..training.state import History, Settings, TrainState
    from ..training.store.store import Store

log = logger(__name__)

_NO_OUTPUT = "Train Step: this training state is of a VAE, so there is no {}. Connect Trained VAE to TRAIN_STATE."


class Subject(NamedTuple):
    """What a TRAIN_STATE carries for the nodes: ComfyUI's objects, the dataset, and why results cannot be reused, if
    so.
    """

    model: Model
    clip: Clip
    vae: Vae
    dataset: Dataset | None
    unhashed: tuple[str, ...]
    training_only: TrainingOnlyLora | None = None


class PreviewInputs(NamedTuple):
    """What the previews of Train Step are sampled from; `prompts` are lines of text, read, and `chosen` says how."""

    positive: Any
    negative: Any
    latent: Any
    prompts: Sequence[PromptLine]
    chosen: StepSettings

    def shows(self, label: str) -> bool:
        """Whether previews are sampled with the weights, or with the average."""
        return self.chosen.preview_of in ("both", label)


class PreviewPrompt(NamedTuple):
    """A prompt of previews: its number (0 is the positive), what it and its negative are encoded as, and its line: its
    text, where that is known, and what its flags set.
    """

    number: int
    conditioning: Any
    negative: Any
    line: PromptLine


def plan_steps(
    state: TrainState,
    chosen: StepSettings,
    optimizer: OptimizerSettings | None,
    objective: ObjectiveSettings | None,
    sampled: PreviewInputs,
) -> tuple[Any, int]:
    """The state that Train Step begins with, with its new settings if there are any, and the number of steps."""
    from ..training import state as states
    from ..training.objective import experts
    from ..training.tasks.registry import trains_vae

    subject = state.subject
    if objective is not None and trains_vae(state):
        raise ValueError(
            "Train Step: objective is connected, and this training state is of a VAE, whose losses are set in Start VAE"
            " Training. Disconnect it."
        )
    if objective is not None:
        objective = experts.fill_boundary(objective, subject.model.model.diffusion_model)
    state = states.change_settings(state, optimizer, objective)
    state = replace(state, settings=replace(state.settings, from_file=chosen.load_settings))
    skip, dataset = state.settings.clip_skip, subject.dataset
    if skip is not None and dataset is not None and dataset.clip_skip != skip:  # taken from a file by an earlier call
        state = replace(state, subject=subject._replace(dataset=_with_clip_skip(subject, dataset, skip)))
    if state.start.encodes_captions and subject.clip is None:
        raise ValueError(
            "Train Step: this state trains the text encoder or words, but was loaded without a text encoder."
            " Connect CLIP to Load State."
        )
    _check(state, chosen, sampled)
    steps = step_count(state, chosen)
    if steps:
        state = states.plan_schedule(state, state.step + steps)
    return note_metadata(state), steps


def _count_clip_skip(subject: Subject, number: int) -> int:
    """EveryDream2's number of a CLIP skip, counted from the last layer. Raises ValueError without a CLIP."""
    if subject.clip is None and number > 1:
        raise ValueError("CLIP skip needs the CLIP that encodes the captions: connect CLIP to Start Training")
    return host.encoding.skip_from_own_layer(subject.clip, number)


def _with_clip_skip(subject: Subject, dataset: Dataset, clip_skip: int) -> Dataset:
    """The dataset with its captions encoded at another CLIP skip. Raises ValueError where they cannot be."""
    from ..training.data.combine import with_clip_skip

    if subject.clip is None:
        raise ValueError(
            "CLIP skip needs the CLIP that encodes the captions: connect CLIP to Start Training or Load State"
        )

    def encode(texts: Sequence[str]) -> Any:
        host.events.raise_if_interrupted()
        return host.encoding.encode_captions(subject.clip, texts, clip_skip, dataset.weighted_captions)

    return with_clip_skip(dataset, clip_skip, encode)


def step_count(state: TrainState, chosen: StepSettings) -> int:
    """How many steps are asked for: epochs, where there are any, replace steps."""
    if not chosen.epochs:
        return chosen.steps
    return max(1, math.ceil(Fraction(chosen.epochs) * epoch_of(state)))


def epoch_of(state: TrainState) -> Fraction:
    """The steps of an epoch of a state's dataset."""
    from ..training.data.epoch_order import steps_per_epoch

    settings = state.settings.optimizer
    return steps_per_epoch(state.subject.dataset, settings.batch_size, settings.accumulation)


def with_lora(state: TrainState, clip: Clip, lora: Any, strength: float = 1.0) -> PatchedModels:
    """A state's model, with a LoRA that was trained for it at a strength, and the CLIP with it."""
    terminal = state.settings.objective.zero_terminal_snr
    model = host.model_sampling.with_zero_terminal_snr(state.subject.model, terminal)
    entries = [LoraEntry(f"{state.run} at step {state.step}", lora, strength, strength)]
    return host.lora_stacks.apply_lora_stack(model, clip, entries, trained_on=trained_words(state))


def trained_words(state: TrainState) -> tuple[str, ...]:
    """The words that a state trains: they take the place of those that its CLIP has under the same names."""
    if state is None or state.start.words is None:
        return ()
    words: tuple[str, ...] = state.start.words.words
    return words


def outputs(
    state: TrainState | ExpertPair,
    one: TrainState,
    report: str,
    runs: Sequence[Mapping[str, Any]],
    pictures: Sequence[Mapping[str, str]],
) -> io.NodeOutput:
    """What Train Step gives: a state or a pair of them, then the model, CLIP, LoRA and losses of `one` state, and for
    its panel what is kept of each run.
    """
    from ..host.trainable_vae import block_output
    from ..training.tasks.registry import task_of, trains_vae

    log.info("%s", report)
    if trains_vae(one):
        given = [block_output(_NO_OUTPUT.format(what)) for what in ("MODEL", "CLIP", "LoRA")]
    else:
        lora = task_of(one).lora_model(one)
        grafted = with_lora(one, one.subject.clip, lora)
        given = [grafted.model, grafted.clip, lora]
    panel = {"text": [report], "graft_run": runs, "graft_previews": pictures}
    shown = {name: value for name, value in panel.items() if value}
    return io.NodeOutput(state, *given, {"loss": list(one.history.loss)}, report, ui=shown)


def note_metadata(state: TrainState) -> TrainState:
    """The state with notes about the dataset, LoRAs on the model, ToDo and TREAD for its LoRA's metadata. Without a
    dataset it keeps its notes, and of a VAE there is no LoRA.
    """
    from ..host import token_routing
    from ..training.data import kohya_metadata, sliders
    from ..training.tasks.registry import trains_vae

    subject, settings = state.subject, state.settings
    if subject.dataset is None or trains_vae(state):
        return state
    optimizer = settings.optimizer
    sizes = optimizer.batch_size, optimizer.accumulation, optimizer.total_steps
    metadata = kohya_metadata.training_metadata(subject.dataset, *sizes, settings.objective.conditioning_dropout)
    notes = {
        **host.lora_stacks.carried_metadata(subject.model, subject.clip),
        **host.token_downsampling.todo_metadata(subject.model),
        **token_routing.routing_metadata(subject.model),
    }
    return replace(state, notes={**notes, **metadata, **sliders.metadata(subject.dataset)})


@contextmanager
def open_denoiser(state: TrainState, layers: bool = False) -> Iterator[Any]:
    """The state's VAE if that is trained; else the denoiser of its own model, with its text encoder where that or words
    are trained and with its training-only LoRA.

    Its `training_only` switches that LoRA off for previews; None without one.
    """
    from ..host import memory_planning, trainable_vae, training_only
    from ..training.data.cache import QUANTIZED
    from ..training.memory.quantized_base.kept_weights import KeptWeights
    from ..training.tasks.registry import trains_vae

    subject = state.subject
    if trains_vae(state):
        with trainable_vae.open_vae(subject.vae) as coder:
            yield coder
        return
    if state.start.training_only and subject.training_only is None:
        raise ValueError(
            "This state computes its loss with a training-only LoRA, but was loaded without one. Connect that LoRA to"
            " training-only LoRA of Load State, and that of the low noise expert of a pair to low noise training-only"
            " LoRA."
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
        host.denoiser.open_denoiser(subject.model, terminal, layers, clip, skip, weighted) as denoiser,
        training_only.attach(denoiser.patcher, subject.training_only) as switched,
    ):
        denoiser.training_only = switched
        optimizer = state.settings.optimizer
        if subject.dataset is not None and optimizer.offload == "layers" and not optimizer.swapped_blocks:
            denoiser.room_for_blocks = memory_planning.room_for_blocks(state)
        if state.start.adapter.quantized_base:
            denoiser.kept_weights = KeptWeights(Path(host.folders.training_folder()) / "cache" / QUANTIZED)
        yield denoiser


def _check(state: TrainState, chosen: StepSettings, sampled: PreviewInputs) -> None:
    """Raises an error for missing inputs before the first step."""
    from ..training.tasks.registry import task_of

    subject = state.subject
    if subject.dataset is None and (chosen.steps or chosen.epochs):
        raise ValueError(
            "Train Step: the state was loaded without its dataset. Connect the dataset to Load State to train further."
        )
    if chosen.preview_every and chosen.preview_of == "average" and not state.average:
        raise ValueError(
            "Train Step: previews show is average, and this run has none: connect EMA Settings to Start Training, or"
            " set previews show to weights."
        )
    if (
        chosen.preview_every
        and subject.dataset is not None
        and task_of(state).previews(state, subject.dataset).shown is None
    ):
        host.previews.check_inputs(
            sampled.positive, sampled.negative, sampled.latent, subject.vae, sampled.prompts, subject.clip
        )


def encoded_prompts(subject: Subject, sampled: PreviewInputs) -> dict[str, Any]:
    """The texts among the prompts of previews, encoded with the CLIP as it came in."""
    skip = 0
    if subject.dataset is not None:
        skip = subject.dataset.clip_skip
    texts = preview_texts(subject, sampled)
    return dict(zip(texts, host.encoding.encode_prompts(subject.clip, texts, skip), strict=True))


def preview_texts(subject: Subject, sampled: PreviewInputs) -> list[str]:
    """The texts that previews need, each once: prompts and negative prompts."""
    texts: dict[str, None] = {}
    for line in preview_lines(subject, sampled):
        texts[line.text] = None
        if line.needed_negative is not None:
            texts[line.needed_negative] = None
    return list(texts)


def preview_lines(subject: Subject, sampled: PreviewInputs) -> list[PromptLine]:
    """The lines of prompts, with the trigger word of the dataset."""
    from ..training.run.preview_prompts import fill_trigger

    return fill_trigger(sampled.prompts, trigger_of(subject))


def trigger_of(subject: Subject) -> str:
    """The trigger word of a subject's dataset; "" without one."""
    return "" if subject.dataset is None else subject.dataset.trigger


def preview_prompts(subject: Subject, sampled: PreviewInputs, encoded: Mapping[str, Any]) -> list[PreviewPrompt]:
    """The prompts of previews: the positive, and the lines with what their texts were encoded as."""
    from ..training.run.preview_prompts import PromptLine

    prompts = []
    if sampled.positive is not None:
        prompts.append(PreviewPrompt(0, sampled.positive, sampled.negative, PromptLine()))
    for number, line in enumerate(preview_lines(subject, sampled), start=1):
        negative = sampled.negative
        needed = line.needed_negative
        if needed is not None and (line.negative is not None or negative is None):
            negative = encoded[needed]
        positive = host.previews.with_guidance(encoded[line.text], line.guidance)
        prompts.append(PreviewPrompt(number, positive, negative, line))
    return prompts


def preview_notes(subject: Subject, sampled: PreviewInputs) -> list[str]:
    """What of the preview prompts is not followed, for the report."""
    from ..training.run.preview_prompts import notes

    return notes(sampled.prompts, trigger_of(subject))


class StepCall:
    """One execution of TrainStep for one state: sends progress to the front end while it trains.

    `place` are the node's execution id and the id of its workflow.
    """

    def __init__(self, state: TrainState, steps: int, place: tuple[Any, str | None], sampled: PreviewInputs) -> None:
        from ..training.reports.throughput import Throughput
        from ..training.run.call import target_key
        from ..training.tasks.registry import task_of

        until = state.step + steps
        key = target_key(state, steps)
        prompt = host.events.running_prompt()
        host.webhook.address()  # report its error before the first step
        self.events = host.events.TrainingCall(*place, state.run, key, state.start.digest, until, prompt)
        self.events.is_first_rank = process_group.current().is_main_process
        self.state, self.sampled = state, sampled
        self.encoded: dict[str, Any] = {}  # the texts of previews, unless what is trained changes them
        self.bar, self.pace = host.events.progress_bar(steps), Throughput(until)
        self.pictures: list[dict[str, str]] = []
        self.writer: Any = None
        self.previewing = False
        self.epoch_settings: EpochSettings | None = None  # from a file, where that was asked for
        self.savings: list[str] = []  # that were taken when memory ran out
        self.has_layers_on_host = state.settings.optimizer.offload == "layers"
        self.shows = None  # what previews show
        if state.subject.dataset is not None:
            self.shows = task_of(state).previews(state, state.subject.dataset)

    def train(self, steps: int, callbacks: Callbacks, chosen: StepSettings) -> tuple[Any, str]:
        """The state after `steps` more steps and the report, with progress, events, previews, stopping and interruption
        of the host.
        """
        from ..training.run import call as runs

        state, subject = self.state, self.state.subject
        self.previewing = callbacks.preview_every > 0 or self.has_preview_inputs()
        self.note_abilities(self.previewing)
        store = self.store()
        with self.announce(chosen) as should_stop:
            callbacks = replace(self.with_callbacks(callbacks, chosen), preview=self.preview, should_stop=should_stop)
            outcome = runs.run(
                state, steps, self.open_denoiser, subject.dataset, store, callbacks, chosen.keep, log.warning
            )
            outcome = self.with_dataset(outcome)
            self.events.result = outcome.state.key
        report = self.report(outcome, self.pictures)
        if self.previewing:
            report = "\n".join([report, *preview_notes(subject, self.sampled)])
        return outcome.state, report

    def report(self, outcome: Outcome, pictures: Sequence[Mapping[str, str]] = ()) -> str:
        """The report of the call once it has ended."""
        from ..training.reports import text

        report = text.step(self.state, outcome, self.state.subject.unhashed, pictures)
        return "\n".join([report, self.events.problem] if self.events.problem else [report])

    def with_dataset(self, outcome: Outcome) -> Outcome:
        """What the call has reached, with the dataset that it trained on last and the notes on that: a file of settings
        may have changed the CLIP skip of its captions.
        """
        if self.state.subject.dataset is outcome.state.subject.dataset:
            return outcome
        return replace(outcome, state=note_metadata(replace(outcome.state, subject=self.state.subject)))

    def has_preview_inputs(self) -> bool:
        """Whether previews can be sampled now and then, where none are planned."""
        if self.shows is None or self.shows.shown is not None:
            return self.shows is not None
        subject, sampled = self.state.subject, self.sampled
        try:
            host.previews.check_inputs(
                sampled.positive, sampled.negative, sampled.latent, subject.vae, sampled.prompts, subject.clip
            )
        except ValueError:
            return False
        return True

    def store(self) -> Store | None:
        """Where the run's results are stored; None where they cannot be."""
        from ..training.store.store import Store

        subject = self.state.subject
        if subject.unhashed:
            return None
        versions = host.fingerprint.versions(subject.model)
        return Store(host.folders.training_folder(), self.state.run, versions, host.folders.store_limit())

    @contextmanager
    def announce(self, chosen: StepSettings) -> Iterator[Callable[[], bool]]:
        """A context in which pages see the call and can stop it: it yields whether somebody asked for that."""
        from ..ema.host_offload import offload_note
        from ..training.reports.tensorboard import Writer
        from ..training.store.store import Store

        state = self.state
        if (
            state.start.ema is not None
            and state.start.ema.device == "host"
            and (note := offload_note(state.subject.model.load_device))
        ):
            log.info("%s", note)
        if chosen.tensorboard and self.writer is None:  # it goes on after a pause
            folder = Store(host.folders.training_folder(), state.run).folder
            self.writer = Writer(folder / "tensorboard" / state.start.digest[:16], chosen.log_seconds, chosen.log_every)
        try:
            with host.events.announce_call(self.events) as should_stop:
                yield should_stop
        finally:
            if self.writer is not None:
                self.writer.close()

    def with_callbacks(self, callbacks: Callbacks, chosen: StepSettings) -> Callbacks:
        """The callbacks with progress and events of the host, and with the states that stay."""
        from ..training.data.epoch_order import ends_epoch

        is_kept = None
        if chosen.load_settings:
            self.epoch_settings = self._read_settings(chosen)
        if chosen.keep_epochs or chosen.load_settings:
            epoch = epoch_of(self.state)

            def is_kept(step: int) -> bool:
                now = chosen if self.epoch_settings is None else self.epoch_settings.step_settings
                return bool(now.keep_epochs) and ends_epoch(step, epoch, now.keep_epochs, now.keep_from)

        return replace(
            callbacks,
            is_kept=is_kept,
            epoch_settings=self.epoch_settings,
            on_begin=lambda begun: self.take_history(begun.history),
            on_step=self.report_step,
            raise_if_interrupted=host.events.raise_if_interrupted,
            take_wish=self.events.take_wish,
            save_asked=self.report_saved,
            save_memory=self.save_memory if chosen.when_short == GO_ON else None,
        )

    def _read_settings(self, chosen: StepSettings) -> EpochSettings:
        """The file of settings of this call. Raises ValueError on several ranks, each of which would read it."""
        from ..training.objective.settings import check_for
        from ..training.run.epoch_settings import FILE, MODEL_KEYS, EpochSettings
        from ..training.tasks.registry import trains_vae

        if process_group.current().size > 1:
            raise ValueError(
                "Train Step: load settings every epoch is on, and this training runs on several ranks. Switch it off."
            )
        state = self.state
        is_vae = trains_vae(state)

        def fit(dataset: Dataset, clip_skip: int) -> Dataset:
            fitted = _with_clip_skip(state.subject, dataset, clip_skip)
            self.state = replace(self.state, subject=state.subject._replace(dataset=fitted))
            if self.encoded:
                self.encoded = encoded_prompts(self.state.subject, self.sampled)
            return fitted

        def check(settings: Settings) -> None:
            if not is_vae:
                sampling = state.subject.model.get_model_object("model_sampling")
                check_for(settings.objective, host.model_sampling.prediction_type(sampling))

        return EpochSettings(
            Path(host.folders.training_folder()) / state.run / FILE,
            epoch_of(state),
            chosen,
            fit,
            lambda number: _count_clip_skip(state.subject, number),
            check,
            MODEL_KEYS if is_vae else (),
            log.warning,
        )

    def save_memory(self, state: TrainState, words: str) -> None:
        """Goes on with one more saving, and says so to pages."""
        self.has_layers_on_host = state.settings.optimizer.offload == "layers"
        self.savings.append(words)
        log.warning("Graft: memory ran out at step %d: %s, and training goes on", state.step + 1, words)

    def report_saved(self, state: TrainState) -> None:
        """Tells pages that the state was saved as asked."""
        host.events.send_event("graft.saved", {**self.events.event_fields, "step": state.step})

    def note_abilities(self, samples: bool) -> None:
        """Notes what the call can be asked for while it trains: `samples` says whether it has what previews need."""
        group = process_group.current()
        can = {"sample": samples and not group.shard, "save": not self.state.subject.unhashed and not group.shard}
        self.events.can = tuple(what for what, is_able in can.items() if is_able)

    def open_denoiser(self) -> AbstractContextManager[Any]:
        """The denoiser of the state's model."""
        state = self.state
        waiting = self.has_layers_on_host or state.start.adapter.quantized_base
        return open_denoiser(state, waiting or process_group.current().shard)

    def describe_end(self, result: TrainState) -> dict[str, Any]:
        """What the panel keeps of the call that ended with this state."""
        return {"run": result.run, "key": result.key, "until": self.events.until}

    def report_step(self, step: int, moved: Any, validation: Any) -> None:
        """Reports a step to the front end. Raises ComfyUI's exception when the user interrupts."""
        from ..training.run.out_of_memory import used_memory

        self.bar(step - self.state.step)
        speed, seconds_left = self.pace(step, moved.seconds)
        held_out: dict[str, float | None] = {"validation": None, "average": None}
        if validation is not None:
            held_out = {"validation": validation.weights, "average": validation.average}
            if validation.accuracy is not None:
                held_out["accuracy"] = validation.accuracy
        measurements: dict[str, Any] = {"loss": moved.loss, "rate": moved.rate, "norm": moved.norm, **held_out}
        memory = used_memory(self.state.subject.model.load_device)
        if self.savings:
            measurements["saving"] = list(self.savings)
        if self.epoch_settings is not None:
            measurements["settings"] = self.epoch_settings.problem or self.epoch_settings.shown
        self.events.report_step({"step": step, **measurements, "speed": speed, "left": seconds_left, "memory": memory})
        if self.writer is not None:
            self.writer.write(step, moved, validation)
        host.events.raise_if_interrupted()

    def take_history(self, history: History) -> None:
        """Takes the history that training goes on from, before the model is loaded: encodes the prompts of previews."""
        self.events.take_history(history)
        samples = self.shows is not None and self.shows.shown is None
        if self.previewing and samples and not self.state.start.encodes_captions:
            self.encoded = encoded_prompts(self.state.subject, self.sampled)

    def prompts(self, denoiser: Any) -> list[PreviewPrompt]:
        """The prompts of previews, encoded with the text encoder as it is now."""
        encoded = self.encoded
        if denoiser.encode is not None:
            texts = preview_texts(self.state.subject, self.sampled)
            encoded = dict(zip(texts, denoiser.encode.encode_prompts(texts), strict=True))
        return preview_prompts(self.state.subject, self.sampled, encoded)

    def preview(self, denoiser: Any, step: int, average: bool, at_strength: Any) -> None:
        """Shows what the kind of training previews, with the model's current weights, and remembers the files: samples
        of every prompt, or pictures of its own.

        Raises ComfyUI's exception when the user interrupts.
        """
        import torch

        label = "average" if average else "weights"
        if not self.sampled.shows(label):
            return
        preview = self.shows
        assert preview is not None
        if preview.shown is not None:
            pictures = []
            for image in preview.images:
                host.events.raise_if_interrupted()
                pictures.append(preview.shown(denoiser, image))
            self.show_preview(self.save_preview(pictures, step, label), step)
            return
        without: AbstractContextManager[None] = nullcontext()
        if denoiser.training_only is not None:
            without = denoiser.training_only.switch_off()
        with without:
            for prompt in self.prompts(denoiser):
                host.events.raise_if_interrupted()
                beside = []
                for strength in preview.strengths:
                    with at_strength(strength):
                        beside.append(self.sample_images(prompt, denoiser.patcher))
                images = torch.cat(beside, dim=2)
                self.show_preview(self.save_preview(images, step, label, prompt.number, prompt.line.text), step)

    def latent_of(self, prompt: PreviewPrompt) -> Any:
        """The latent of a prompt: the one that is connected, at the size that the prompt's flags set."""
        line = prompt.line
        return host.latents.at_size(self.sampled.latent, self.state.subject.vae, line.width, line.height)

    def sample_images(self, prompt: PreviewPrompt, patcher: Model) -> Tensor:
        """The images (B, h, w, 3) in 0..1 of one prompt."""
        latent = self.latent_of(prompt)
        latents = host.previews.sample(patcher, prompt.conditioning, prompt.negative, latent, self.seed, prompt.line)
        return host.previews.decode(self.state.subject.vae, latents, patcher)

    @property
    def seed(self) -> int:
        """The seed of previews."""
        return self.state.start.seed % 2**63

    def save_preview(
        self, decoded: Any, step: int, label: str, prompt: int = 0, words: str = ""
    ) -> list[dict[str, Any]]:
        """Writes the images of a prompt, by its number and text, and returns what a page is told of them."""
        name = host.previews.name_of(self.state.start.digest, step, label, prompt)
        files = host.previews.save_pictures(decoded, self.state.run, name, words)
        self.pictures += [{**file, "display_name": f"step {step}, {label}"} for file in files]
        if self.writer is not None:
            self.writer.write_pictures(step, f"{words or 'preview'} ({label})", decoded)
        said: dict[str, Any] = {"label": label}
        if prompt:
            said.update(prompt=prompt, text=words)
        return [{**file, **said} for file in files]

    def save_media(self, video: Any, audio: Any, step: int, label: str) -> list[dict[str, Any]]:
        """Writes the video and the sound of a preview, where there are any, and returns what a page is told of them."""
        name = host.previews.name_of(self.state.start.digest, step, label)
        return [{**file, "label": label} for file in host.previews.save_media(video, audio, self.state.run, name)]

    def show_preview(self, pictures: list[dict[str, Any]], step: int) -> None:
        """Shows images on the node."""
        host.events.send_event("graft.preview", {**self.events.event_fields, "step": step, "pictures": pictures})
