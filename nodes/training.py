"""Training nodes: GraftTrainStart begins a run, TrainStep trains it for some steps."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from comfy_api.latest import io

from .. import host
from ..patches.lora_files.stack_rows import read_stack_rows
from ..training.objective import settings as objectives
from ..training.optimizers import settings as optimizers
from ..training.settings import NODES as PARTS
from ..training.settings import StepSettings, TrainingSettings
from ..training.store.names import check_run_name
from ..training.trainable.settings import AdapterSettings
from .lora import used_entries
from .schema import (
    Dataset,
    GraftNode,
    LoraModel,
    LossMap,
    Previews,
    Settings,
    TrainState,
    inputs_of,
    run_name,
    run_seed,
    run_settings,
    search_aliases,
)

if TYPE_CHECKING:
    from ..host.comfyui_objects import Clip, Conditioning, Latent, Model, Vae
    from ..host.preview_graph import PreviewGraph
    from ..host.training_only import TrainingOnlyLora
    from ..training import state as states
    from ..training.data.dataset import Dataset as TrainingData
    from ..training.expert_pair import ExpertPair
    from .graph_previews import PausingStep
    from .previews import Shown


def training_only_lora(model: Model, lora_stack: Any, full_weights: bool = False) -> TrainingOnlyLora | None:
    """The LoRA that is on only while the loss is computed; None without a stack, or where no row is on."""
    entries = used_entries(read_stack_rows(lora_stack or []), None)
    if not entries:
        return None
    from ..host import training_only

    return training_only.read_lora(model, entries, full_weights)


class _RunStart(GraftNode):
    """A node that begins a run."""

    checked_together = (("run",),)

    @classmethod
    def check_settings(cls, run: str) -> None:
        """Raises ValueError for a run name that cannot be one."""
        check_run_name(run)


class GraftTrainStart(_RunStart):
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
            **search_aliases(
                "train",
                "lora training",
                "fine-tune",
                "finetune",
                "dreambooth",
                "kohya",
                "train sdxl",
                "sdxl train",
                "train flux",
                "flux train",
            ),
            inputs=[
                io.Model.Input(
                    "model",
                    tooltip=(
                        "The model to train. Its weights are never changed. Put Apply ToDo before it to train faster."
                    ),
                ),
                Dataset.Input("dataset", tooltip="From Dataset: the images and captions to train on."),
                run_settings(),
                io.Clip.Input(
                    "clip",
                    optional=True,
                    tooltip="Passed on to Train Step's CLIP output. Needed if you train the text encoder or words.",
                ),
                io.Vae.Input("vae", optional=True, tooltip="For the previews of Train Step."),
                run_seed(),
                run_name("run"),
            ],
            outputs=[TrainState.Output(display_name="TRAIN_STATE"), io.String.Output(display_name="report")],
        )

    @classmethod
    def execute(
        cls,
        model: Model,
        dataset: TrainingData,
        settings: TrainingSettings | None = None,
        clip: Clip = None,
        vae: Vae = None,
        seed: int = 0,
        run: str = "run",
    ) -> io.NodeOutput:
        from ..training.objective import experts

        settings = settings or TrainingSettings()
        _check_words(settings, clip)
        objective = settings.objective or objectives.ObjectiveSettings()
        objective = experts.fill_boundary(objective, model.model.diffusion_model)
        subject = model, dataset, clip, vae
        return io.NodeOutput(*_begin(*subject, replace(settings, objective=objective), seed, run))


class GraftTrainPairStart(_RunStart):
    """Joins both experts of a pair, a dataset and settings into a state at step 0."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="GraftTrainPairStart",
            display_name="Start Training Expert Pair",
            category="Graft/training",
            description=(
                "For Wan 2.2 14B, which is two models: combines both, a dataset and settings into one training state."
                " Train Step then trains both in turn, each for its steps, and each gets a LoRA."
            ),
            **search_aliases("wan 2.2", "high noise", "low noise", "mixture of experts", "train lora"),
            inputs=[
                io.Model.Input("high_noise_model", tooltip="The high noise model. Its weights are never changed."),
                io.Model.Input("low_noise_model", tooltip="The low noise model. Its weights are never changed."),
                Dataset.Input("dataset", tooltip="From Dataset: the clips or images and captions to train on."),
                run_settings(),
                Settings.Input(
                    "low_noise_settings",
                    optional=True,
                    tooltip=(
                        "The settings that differ for the low noise model: Adapter Settings with its own rank or"
                        " initial LoRA, and its own Training-only LoRA. If nothing is connected, both models have the"
                        " same settings."
                    ),
                ),
                io.Clip.Input("clip", optional=True, tooltip="Passed on to Train Step's CLIP output."),
                io.Vae.Input("vae", optional=True, tooltip="For the previews of Train Step."),
                run_seed(),
                run_name("run"),
            ],
            outputs=[TrainState.Output(display_name="TRAIN_STATE"), io.String.Output(display_name="report")],
        )

    @classmethod
    def execute(
        cls,
        high_noise_model: Model,
        low_noise_model: Model,
        dataset: TrainingData,
        settings: TrainingSettings | None = None,
        low_noise_settings: TrainingSettings | None = None,
        clip: Clip = None,
        vae: Vae = None,
        seed: int = 0,
        run: str = "run",
    ) -> io.NodeOutput:
        from ..training.expert_pair import ExpertPair
        from ..training.objective import experts

        settings = settings or TrainingSettings()
        own = low_noise_settings or TrainingSettings()
        _check_pair(settings, own)
        high, low = experts.split_pair(
            settings.objective or objectives.ObjectiveSettings(), high_noise_model.model.diffusion_model
        )
        low_settings = replace(
            settings,
            objective=low,
            adapter=own.adapter or settings.adapter,
            training_only=own.training_only,
        )
        high_run, low_run = experts.pair_names(run)
        others = dataset, clip, vae
        high_state, report = _begin(high_noise_model, *others, replace(settings, objective=high), seed, high_run)
        low_state, low_report = _begin(low_noise_model, *others, low_settings, seed, low_run)
        if high_state.start.model == low_state.start.model:
            raise ValueError(
                "Start Training Expert Pair: high noise model and low noise model are the same model. Connect each"
                " expert to its own input."
            )
        return io.NodeOutput(ExpertPair(high_state, low_state), f"{report}\n\n{low_report}")


def _check_pair(settings: TrainingSettings, own: TrainingSettings) -> None:
    """Raises ValueError for what only one expert at a time can be trained with, and for what only one of them has;
    `own` are the settings of the low noise expert alone.
    """
    from ..training.distributed.process_group import current

    node = "Start Training Expert Pair"
    shared = "which both experts share: connect it to settings"
    own.refuse_others(("adapter", "training_only"), node, shared)
    adapters = [one for one in (settings.adapter, own.adapter) if one is not None]
    problems = []
    if settings.words is not None:
        problems.append(
            "Train Words is in settings, and each of the two models would train vectors of its own for one word"
        )
    if any(one.text_encoder for one in adapters):
        problems.append("train text encoder is on: both experts read the one text encoder, so switch it off")
    if current().size > 1:
        problems.append("there are several ranks, and a pair is trained on one")
    if settings.adapter is not None and settings.adapter.initial is not None and own.adapter is None:
        problems.append(
            "an initial LoRA is connected to Adapter Settings, which is that of one expert: connect another Adapter"
            " Settings, with the low noise expert's initial LoRA or without one, to low noise settings"
        )
    for mine, other, expert, place in (
        (settings.training_only, own.training_only, "low noise", "low noise settings"),
        (own.training_only, settings.training_only, "high noise", "settings"),
    ):
        if mine and other is None:
            problems.append(
                f"only one expert has a training-only LoRA: connect Training-only LoRA with that of the {expert}"
                f" expert to {place}, or with an empty LoRA Stack where it has none"
            )
    if problems:
        raise ValueError(f"{node}: {'; '.join(problems)}. To train them so, train each expert in a run of its own.")


def _begin(
    model: Model, dataset: Any, clip: Clip, vae: Vae, chosen: TrainingSettings, seed: int, run: str
) -> tuple[Any, str]:
    """The state of a model before the first step, and its report."""
    from ..host import memory_planning
    from ..host.conditions import takes_picture
    from ..host.latents import check_dataset
    from ..training import state as states
    from ..training.data import sliders
    from ..training.distributed.process_group import current
    from ..training.reports import text
    from ..training.store.store import Store
    from ..training.tasks.registry import task_for
    from ..training.trainable.words import check_reference
    from .step_call import Subject, note_metadata

    Store(host.folders.training_folder(), run, limit=host.folders.store_limit())  # report its errors first
    adapter, words = chosen.adapter or AdapterSettings(), chosen.words
    optimizer = optimizers.spread_over_ranks(chosen.optimizer or optimizers.OptimizerSettings(), current().as_ranks)
    settings = states.Settings(optimizer, chosen.objective or objectives.ObjectiveSettings())
    levels = host.model_sampling.with_zero_terminal_snr(model, settings.objective.zero_terminal_snr)
    sampling = levels.get_model_object("model_sampling")
    prediction = host.model_sampling.prediction_type(sampling)
    objectives.check_for(settings.objective, prediction)
    if adapter.text_encoder and clip is None:
        raise ValueError(
            "Start Training: train text encoder is on in Adapter Settings, and no CLIP is connected. Connect one,"
            " or switch train text encoder off."
        )
    patches = host.lora_stacks.list_patches(model) + (
        host.lora_stacks.list_patches(clip.patcher) if adapter.text_encoder else []
    )
    if adapter.full_weights and patches:
        raise ValueError(
            f"Start Training: adapter type full needs an unpatched model, and this one has {' and '.join(patches)}"
            " on it. Take them off first."
        )
    check_reference(words, settings.objective.compares_pairs)
    if dataset.has_sound:
        adapter = replace(adapter, with_sound=True)
    identity, unhashed = host.fingerprint.fingerprint_trained(model, clip if adapter.text_encoder or words else None)
    foreign = unhashed
    unhashed += dataset.unhashed
    switched = training_only_lora(model, chosen.training_only, adapter.full_weights)
    words, vectors, notes = _start_words(words, clip, model, dataset)
    start = states.Start(
        identity,
        dataset.digest,
        adapter,
        chosen.ema,
        seed,
        switched.identity if switched else "",
        words,
        task_for(dataset),
    )
    base = partial(host.base_weights.trained_weights, model, clip if adapter.text_encoder else None)
    encoder, parts = _trained_encoder(adapter, clip, model, dataset)
    state = states.begin(model.model.diffusion_model, start, settings, run, base, encoder, parts, vectors)
    state = note_metadata(replace(state, subject=Subject(model, clip, vae, dataset, unhashed, switched)))
    sliders.check(dataset, adapter, words is not None, settings.objective)
    check_dataset(model.model, dataset, "Start Training")
    sigma = None
    if prediction == "flow":
        sigma = partial(host.model_sampling.sigma_at, sampling)
    report = text.beginning(
        state,
        dataset,
        unhashed,
        sigma,
        training_only=switched.report if switched else "",
        takes_picture=takes_picture(model.model),
        ranks=current().as_ranks,
    )
    memory = memory_planning.report_at_start(state, foreign)
    return state, "\n".join([report, host.denoiser.describe_attention(model), *memory, *notes])


def _check_words(settings: TrainingSettings, clip: Clip) -> None:
    """Raises ValueError where words cannot be trained with what is connected."""
    if settings.words is None:
        return
    if clip is None:
        raise ValueError("Start Training: Train Words is in settings, and no CLIP is connected. Connect the model's.")
    if settings.words.alone and settings.adapter is not None:
        raise ValueError(
            "Start Training: words only is on in Train Words, and settings has Adapter Settings. Take it out, or switch"
            " words only off."
        )


def _start_words(words: Any, clip: Clip, model: Model, dataset: Any) -> tuple[Any, Any, list[str]]:
    """Words with their bounds, the vectors that they start from, and lines for the report; nothing without words."""
    if words is None:
        return None, None, []
    from ..host import word_training as words_of_host

    return words_of_host.start_words(words, clip, model, dataset)


def _trained_encoder(adapter: AdapterSettings, clip: Clip, model: Model, dataset: Any) -> tuple[Any, Any]:
    """The text encoder that an adapter trains, and the paths of its parts that can learn something; None where all or
    nothing can.
    """
    if not adapter.text_encoder:
        return None, None
    if adapter.full_weights:
        return clip.cond_stage_model, None
    from ..host.text_encoder_gradients import trainable_parts

    return clip.cond_stage_model, trainable_parts(clip, model, dataset.clip_skip)


class TrainStep(GraftNode):
    """Trains some steps: takes a state and returns a new one. The old state stays valid."""

    settings_class = StepSettings
    checked_together = (("tensorboard",), ("prompts",))

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TrainStep",
            display_name="Train Step",
            category="Graft/training",
            description=(
                "Trains for some steps. A training state goes in, and a new one comes out; the old one stays usable."
                " Chain two nodes, branch three from one, or sample in between. Results are stored, so no step is"
                " trained twice."
            ),
            **search_aliases("train", "lora training", "fine-tune", "train lora", "validation", "loss curve"),
            is_output_node=True,
            hidden=[io.Hidden.unique_id, io.Hidden.dynprompt],
            enable_expand=True,
            inputs=[
                TrainState.Input("state", tooltip="From Start Training, Load State or another Train Step."),
                *inputs_of(cls.settings_class),
                io.Conditioning.Input("positive", optional=True, tooltip="The prompt for previews."),
                io.Conditioning.Input(
                    "negative", optional=True, tooltip="The negative prompt for previews. Without it they use no CFG."
                ),
                io.Latent.Input(
                    "latent", optional=True, tooltip="The size of the previews, and the latent they start from."
                ),
                Settings.Input(
                    "settings",
                    optional=True,
                    tooltip=(
                        "Optional. New optimizer, loss and noise settings from this step on. If nothing is connected,"
                        " the settings in the state are used."
                    ),
                ),
                Previews.Input(
                    "previews",
                    optional=True,
                    lazy=True,  # its nodes run at each preview, and never by themselves
                    tooltip=(
                        "Optional. From Preview End: samples the previews with your own nodes, from Preview Begin to"
                        " Preview End, instead of positive, negative and latent."
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
    def check_settings(cls, **values: Any) -> None:
        """Raises ValueError for what is wrong with settings whatever is connected, and without a package they need."""
        _preview_prompts(StepSettings(**values))

    @classmethod
    def fingerprint_inputs(cls, **_: Any) -> str:
        """Changes when the stop button was used, so that the step continues when queued again."""
        return str(host.events.stop_count())

    @classmethod
    def check_lazy_status(cls, state: Any = None, **_: Any) -> list[str]:
        """What a preview has made is needed only to go on after it."""
        from .graph_previews import PausingStep

        return ["previews"] if isinstance(state, PausingStep) else []

    @classmethod
    def execute(
        cls,
        state: states.TrainState | ExpertPair | PausingStep,
        chosen: StepSettings,
        positive: Conditioning | None = None,
        negative: Conditioning | None = None,
        latent: Latent | None = None,
        settings: TrainingSettings | None = None,
        previews: Shown | None = None,
    ) -> io.NodeOutput:
        from ..training.distributed import process_group
        from ..training.expert_pair import ExpertPair
        from ..training.run.loop import Callbacks
        from .graph_previews import PausingStep
        from .step_call import PreviewInputs, StepCall, outputs, plan_steps

        if isinstance(state, PausingStep):
            return state.go_on(previews)
        group = process_group.current()
        settings = settings or TrainingSettings()
        optimizer, objective = settings.optimizer, settings.objective
        if optimizer is not None:
            optimizer = optimizers.spread_over_ranks(optimizer, group.as_ranks)
        sampled = PreviewInputs(positive, negative, latent, _preview_prompts(chosen), chosen)
        callbacks = Callbacks(
            validate_every=chosen.validate_every,
            snapshot_every=chosen.snapshot_every,
            keep_every=chosen.keep_every,
            snapshot_minutes=chosen.snapshot_minutes,
            preview_every=chosen.preview_every,
        )
        node = None
        if cls.hidden:
            node = cls.hidden.unique_id
        place = node, _workflow_id(cls.hidden)
        graph = _preview_graph(cls.hidden, len(cls.define_schema().outputs))
        if graph is not None:
            _check_own_graph(state, group.size)
            chosen, every = replace(chosen, preview_every=0), chosen.preview_every
        _check_change(settings, state.high if isinstance(state, ExpertPair) else state)
        if isinstance(state, ExpertPair):
            from .expert_training import ExpertTraining

            pair = ExpertTraining.plan(state, chosen, optimizer, objective, sampled, place)
            return pair.train(callbacks, chosen)
        planned, steps = plan_steps(state, chosen, optimizer, objective, sampled)
        group.meet_at(str(node))
        call = StepCall(planned, steps, place, sampled)
        if graph is not None and steps:
            return PausingStep(call, steps, callbacks, chosen, every, graph).go_on()
        try:
            result, report = call.train(steps, callbacks, chosen)
        except process_group.RemoteRankError as error:
            host.events.interrupt_as(error.kind)
            raise
        return outputs(result, result, report, [call.describe_end(result)], call.pictures)


def _check_change(settings: TrainingSettings, state: states.TrainState) -> None:
    """Raises ValueError for new settings of what a run cannot change once it has begun. The same settings again are
    none: a recipe may go to Start Training and to Train Step.
    """
    start = state.start
    begun: dict[str, Any] = {
        "adapter": replace(start.adapter, with_sound=False),
        "ema": start.ema,
        "words": start.words,
    }
    for name, before in begun.items():
        new = getattr(settings, name)
        if name == "words" and new is not None and before is not None:
            new = replace(new, bounds=before.bounds)
        if new is not None and new != before:
            raise ValueError(
                f"Train Step: settings changes {PARTS[name]}, and a run keeps those that it began with: begin another"
                " run with Start Training, or connect only Optimizer Settings or Objective Settings here."
            )


def _preview_graph(hidden: Any, outputs: int) -> PreviewGraph | None:
    """The nodes that make the previews of the Train Step that runs; None without any."""
    from ..host.preview_graph import find_preview_graph

    if hidden is None or hidden.dynprompt is None:
        return None
    return find_preview_graph(hidden.dynprompt, hidden.unique_id, outputs)


def _check_own_graph(state: Any, ranks: int) -> None:
    """Raises ValueError where previews cannot be sampled by nodes of the workflow."""
    from ..training.expert_pair import ExpertPair

    problem = ""
    if isinstance(state, ExpertPair):
        problem = "this training state is of a pair of experts, whose previews need both models"
    elif ranks > 1:
        problem = "this training runs on several ranks"
    if problem:
        raise ValueError(
            f"Train Step: previews is connected, and {problem}. Disconnect it, and connect positive prompt and latent"
            " for simple previews."
        )


def _workflow_id(hidden: Any) -> str | None:
    """The id of the editor's workflow that a node runs in, None where it has none: new ones have zeros."""
    sent = getattr(hidden, "extra_pnginfo", None)
    workflow = sent.get("workflow") if isinstance(sent, dict) else None
    workflow_id = workflow.get("id") if isinstance(workflow, dict) else None
    if isinstance(workflow_id, str) and len(workflow_id) <= 100 and workflow_id.strip("0-"):
        return workflow_id
    return None


def _preview_prompts(chosen: StepSettings) -> list[Any]:
    """The preview prompts. Raises ValueError for what is wrong with them, and where TensorBoard is not installed."""
    from ..training.run.preview_prompts import preview_prompts

    if chosen.tensorboard:
        from ..training.reports.tensorboard import check

        check()
    prompts = preview_prompts(chosen.prompts)
    host.previews.check_samplers(prompts)
    return prompts


NODES = [GraftTrainStart, GraftTrainPairStart, TrainStep]
