"""Training nodes: GraftTrainStart begins a run, TrainStep trains it for some steps."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from comfy_api.latest import io

from .. import host
from ..patches.lora_files.stack_rows import rows_of
from ..training.objective import settings as objectives
from ..training.optimizers import settings as optimizers
from ..training.store.names import KEEPS, check_run_name
from ..training.trainable.settings import AdapterSettings
from .lora import used_entries
from .refusals import refusal
from .schema import (
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
    run_average,
    run_name,
    run_seed,
)


def training_only_lora(model: Any, lora_stack: Any, full_weights: bool = False) -> Any:
    """The LoRA that is on only while the loss is computed; None without a stack, or where no row is on."""
    entries = used_entries(rows_of(lora_stack or []), None)
    if not entries:
        return None
    from ..host import training_only

    return training_only.read(model, entries, full_weights)


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
                run_average(),
                run_seed(),
                run_name("run"),
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
                io.Model.Input(
                    "low_noise_model",
                    optional=True,
                    tooltip=(
                        "For Wan 2.2 14B, which is two models: connect the low noise one here and the high noise one to"
                        " model. Train Step then trains both in turn, each for its steps, and each gets a LoRA."
                    ),
                ),
                Adapter.Input(
                    "low_noise_adapter",
                    optional=True,
                    tooltip=(
                        "What to train of the low noise model, from another Adapter Settings: with its own initial LoRA"
                        " or rank. If left empty, both models have the same adapter settings."
                    ),
                ),
                LoraStack.Input(
                    "low_noise_training_only",
                    optional=True,
                    tooltip=(
                        "The training-only LoRA of the low noise model. That of the high noise model goes to"
                        " training-only LoRA."
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
        low_noise_model=None,
        low_noise_adapter=None,
        low_noise_training_only=None,
    ) -> io.NodeOutput:
        from ..training.distributed.process_group import current
        from ..training.expert_pair import ExpertPair
        from ..training.objective import experts

        _check_words(words, adapter, clip, low_noise_model)
        adapter = adapter or AdapterSettings()
        optimizer = optimizers.of_ranks(optimizer or optimizers.OptimizerSettings(), current().as_ranks)
        objective = objective or objectives.ObjectiveSettings()

        def begun(model: Any, adapter: Any, objective: Any, training_only: Any, run: str) -> tuple[Any, str]:
            settings = optimizer, objective, ema, seed, run
            return _begun(model, dataset, clip, vae, adapter, *settings, training_only, words)

        if low_noise_model is None:
            _check_single(low_noise_adapter, low_noise_training_only)
            objective = experts.with_own_boundary(objective, model.model.diffusion_model)
            return io.NodeOutput(*begun(model, adapter, objective, training_only, run))
        _check_pair(adapter, low_noise_adapter, training_only, low_noise_training_only)
        high, low = experts.of_pair(objective, model.model.diffusion_model)
        high_run, low_run = experts.pair_names(run)
        high_state, report = begun(model, adapter, high, training_only, high_run)
        low_state, low_report = begun(
            low_noise_model, low_noise_adapter or adapter, low, low_noise_training_only, low_run
        )
        if high_state.start.model == low_state.start.model:
            raise ValueError(
                "Start Training: model and low noise model are the same model. Connect the high noise expert to model"
                " and the low noise expert to low noise model."
            )
        return io.NodeOutput(ExpertPair(high_state, low_state), f"{report}\n\n{low_report}")


def _check_single(low_noise_adapter: Any, low_noise_training_only: Any) -> None:
    """Raises ValueError where one model is trained, and something of the other of a pair is connected."""
    for label, given in (
        ("low noise adapter settings", low_noise_adapter),
        ("low noise training-only LoRA", low_noise_training_only),
    ):
        if given is not None:
            raise ValueError(
                f"Start Training: {label} is connected, and low noise model is not. Connect the low noise model, or"
                f" take {label} off."
            )


def _check_pair(
    adapter: AdapterSettings, low_noise_adapter: Any, training_only: Any, low_noise_training_only: Any
) -> None:
    """Raises ValueError for what one expert at a time can be trained with only, and for what only one of them has."""
    from ..training.distributed.process_group import current

    alone, missing = [], []
    if adapter.text_encoder or (low_noise_adapter is not None and low_noise_adapter.text_encoder):
        alone.append("train text encoder is on: both experts read the one text encoder, so switch it off")
    if current().size > 1:
        alone.append("there are several ranks, and a pair is trained on one")
    if adapter.initial is not None and low_noise_adapter is None:
        missing.append(
            "an initial LoRA is connected to Adapter Settings, which is that of one expert: connect another Adapter"
            " Settings, with the low noise expert's initial LoRA or without one, to low noise adapter settings"
        )
    if training_only and low_noise_training_only is None:
        missing.append(
            "the training-only LoRA is that of the high noise expert: connect that of the low noise expert to low"
            " noise training-only LoRA, or an empty LoRA Stack where it has none"
        )
    if low_noise_training_only and training_only is None:
        missing.append(
            "the low noise training-only LoRA is that of the low noise expert: connect that of the high noise expert"
            " to training-only LoRA, or an empty LoRA Stack where it has none"
        )
    if alone or missing:
        remedy = ""
        if alone:
            remedy = " To keep it, train each expert in a run of its own."
        raise ValueError(f"Start Training: low noise model is connected, and {'; '.join([*alone, *missing])}.{remedy}")


def _begun(
    model: Any,
    dataset: Any,
    clip: Any,
    vae: Any,
    adapter: AdapterSettings,
    optimizer: Any,
    objective: Any,
    ema: Any,
    seed: int,
    run: str,
    training_only: Any,
    words: Any,
) -> tuple[Any, str]:
    """The state of a model before the first step, and its report."""
    from ..host import planning
    from ..host.conditions import takes_picture
    from ..host.latents import check_dataset
    from ..training import state as states
    from ..training.data import sliders
    from ..training.reports import text
    from ..training.store.store import Store
    from ..training.trainable.words import check_reference
    from .step_call import Subject, noted

    Store(host.folders.training_folder(), run, limit=host.folders.store_limit())  # report its errors first
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
    check_reference(words, settings.objective.compares_pairs)
    if dataset.has_sound:
        adapter = replace(adapter, with_sound=True)
    identity, unhashed = host.fingerprint.of_trained(model, clip if adapter.text_encoder or words else None)
    foreign = unhashed
    unhashed += dataset.unhashed
    switched = training_only_lora(model, training_only, adapter.full_weights)
    words, vectors, notes = _begun_words(words, clip, model, dataset)
    start = states.Start(identity, dataset.digest, adapter, ema, seed, switched.identity if switched else "", words)
    base = partial(host.base_weights.trained_weights, model, clip if adapter.text_encoder else None)
    encoder, parts = _trained_encoder(adapter, clip, model, dataset)
    state = states.begin(model.model.diffusion_model, start, settings, run, base, encoder, parts, vectors)
    state = noted(replace(state, subject=Subject(model, clip, vae, dataset, unhashed, switched)))
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
    )
    memory = planning.beginning(state, foreign)
    return state, "\n".join([report, *memory, *notes])


def _check_words(words: Any, adapter: Any, clip: Any, low_noise_model: Any) -> None:
    """Raises ValueError where words cannot be trained with what is connected."""
    if words is None:
        return
    if clip is None:
        raise ValueError("Start Training: Train Words is connected, and no CLIP is. Connect the model's CLIP.")
    if low_noise_model is not None:
        raise ValueError(
            "Start Training: Train Words is connected, and so is low noise model: each of the two models would train"
            " vectors of its own for one word. Disconnect one of them."
        )
    if words.alone and adapter is not None:
        raise ValueError(
            "Start Training: words only is on in Train Words, and Adapter Settings is connected. Disconnect it, or"
            " switch words only off."
        )


def _begun_words(words: Any, clip: Any, model: Any, dataset: Any) -> tuple[Any, Any, list[str]]:
    """Words with their bounds, the vectors that they start from, and lines for the report; nothing without words."""
    if words is None:
        return None, None, []
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
    from ..host.text_encoder_gradients import trainable_parts

    return clip.cond_stage_model, trainable_parts(clip, model, dataset.clip_skip)


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
                        " far, and sampled with the run's seed. kohya's --n, --d, --s, --l and --g work at the end of"
                        " a line."
                    ),
                ),
                advanced(
                    io.Int,
                    "switch_every",
                    display_name="switch experts every N steps",
                    default=50,
                    min=0,
                    max=1_000_000,
                    optional=True,
                    tooltip=(
                        "For both experts of Wan 2.2: trains one for N steps, then the other, with one model in VRAM at"
                        " a time. The result does not depend on it. Raise it if loading takes long; 0 trains the high"
                        " noise expert first and then the low noise one."
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
        switch_every=50,
    ) -> io.NodeOutput:
        from ..training.distributed import process_group
        from ..training.expert_pair import ExpertPair
        from ..training.objective import experts
        from ..training.run.loop import Callbacks
        from .step_call import Sampled, StepCall, outputs, planned

        group = process_group.current()
        if optimizer is not None:
            optimizer = optimizers.of_ranks(optimizer, group.as_ranks)
        sampled = Sampled(positive, negative, latent, _check_values(tensorboard, prompts))
        callbacks = Callbacks(
            validate_every=validate_every,
            snapshot_every=snapshot_every,
            snapshot_minutes=snapshot_minutes,
            preview_every=preview_every,
        )
        node = None
        if cls.hidden:
            node = cls.hidden.unique_id
        place = node, _workflow_id(cls.hidden)
        if isinstance(state, ExpertPair):
            from .expert_training import ExpertTraining

            pair = ExpertTraining.planned(state, steps, epochs, optimizer, objective, preview_every, sampled, place)
            return pair.trained(callbacks, keep, tensorboard, switch_every)
        if state.start.autoencoder is not None:
            from . import autoencoder_training

            return autoencoder_training.train(
                state, steps, epochs, optimizer, objective, callbacks, keep, tensorboard, place
            )
        if objective is not None:
            objective = experts.with_own_boundary(objective, state.subject.model.model.diffusion_model)
        state, steps = planned(state, steps, epochs, optimizer, objective, preview_every, sampled)
        group.meet_at(str(node))
        call = StepCall(state, steps, place, sampled)
        try:
            result, report = call.trained(steps, callbacks, keep, tensorboard)
        except process_group.RemoteRankError as error:
            host.events.interrupt_as(error.kind)
            raise
        return outputs(result, result, report, [call.ended(result)], call.pictures)


def _workflow_id(hidden: Any) -> str | None:
    """The id of the editor's workflow that a node runs in, None where it has none: new ones have zeros."""
    sent = getattr(hidden, "extra_pnginfo", None)
    workflow = sent.get("workflow") if isinstance(sent, dict) else None
    workflow_id = workflow.get("id") if isinstance(workflow, dict) else None
    if isinstance(workflow_id, str) and len(workflow_id) <= 100 and workflow_id.strip("0-"):
        return workflow_id
    return None


def _check_values(tensorboard: bool = False, prompts: str = "") -> list[Any]:
    """The preview prompts. Raises ValueError for what is wrong whatever is connected."""
    from ..training.run.preview_prompts import preview_prompts

    if tensorboard:
        from ..training.reports.tensorboard import check

        check()
    return preview_prompts(prompts)


NODES = [GraftTrainStart, TrainStep]
