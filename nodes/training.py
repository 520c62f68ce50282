"""Training in the graph: GraftTrainStart begins a run, TrainStep is a step of it."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from comfy_api.latest import io

from .. import host
from ..training import adapters
from ..training import objective as objectives
from ..training import optimizer as optimizers
from .aliases import aliases
from .sockets import EMA, Adapter, Dataset, LoraModel, LossMap, Objective, Optimizer, TrainState

_LATER = "is not available in this version of Graft"
_NOT_YET = " (not available in this version)"

log = logging.getLogger(__name__)


class Subject(NamedTuple):
    """What a TRAIN_STATE carries for the nodes: the host's objects, the pictures, and why results are not reused if they are not."""

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
                    tooltip="The model to train; its weights are never changed. Apply ToDo before it makes training faster.",
                ),
                Dataset.Input("dataset", tooltip="From Dataset."),
                io.Clip.Input("clip", optional=True, tooltip="Goes through to Train Step's CLIP output."),
                io.Vae.Input("vae", optional=True, tooltip="Carried along for later steps."),
                Adapter.Input("adapter", optional=True, tooltip="What is trained; without it a LoRA of rank 16 on attention."),
                Optimizer.Input("optimizer", optional=True, tooltip="How; without it AdamW at 1e-4, batch 1."),
                Objective.Input("objective", optional=True, tooltip="What for; without it the model's own objective."),
                EMA.Input("ema", optional=True, tooltip="Keep an average of the weights; without it there is none."),
                io.Int.Input("seed", default=0, min=0, max=0xFFFFFFFFFFFFFFFF, tooltip="Every random draw of the run comes from it."),
                io.String.Input("run", default="run", tooltip="Name of the folder under output/graft where the states are stored."),
            ],
            outputs=[TrainState.Output(display_name="TRAIN_STATE"), io.String.Output(display_name="report")],
        )

    @classmethod
    def execute(
        cls, model, dataset, clip=None, vae=None, adapter=None, optimizer=None, objective=None, ema=None, seed=0, run="run"
    ) -> io.NodeOutput:
        from ..training import reports
        from ..training import state as states
        from ..training.store import Store

        Store(host.folders.training_folder(), run)  # a wrong name is said before anything is computed
        adapter = adapter or adapters.AdapterSettings()
        settings = states.Settings(optimizer or optimizers.OptimizerSettings(), objective or objectives.ObjectiveSettings())
        objectives.check_for(settings.objective, host.denoiser.prediction(model.get_model_object("model_sampling")))
        patches = host.lora.patched(model)
        if adapter.kind == "full" and patches:
            raise ValueError(f"GraftTrainStart: kind full trains a model's own weights, and this one has {' and '.join(patches)} on it.")
        made = host.fingerprint.fingerprint(model)
        unhashed = made.unhashed + dataset.unhashed
        start = states.Start(made.digest, dataset.digest, adapter, ema, seed)
        begun = states.begin(model.model.diffusion_model, start, settings, run, lambda: host.base.unet_weights(model))
        begun = replace(begun, notes=host.todo.todo_metadata(model), subject=Subject(model, clip, vae, dataset, unhashed))
        return io.NodeOutput(begun, reports.beginning(begun, dataset, unhashed))


class TrainStep(io.ComfyNode):
    """Training as a function: a state goes in, a state comes out, the first is still there."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TrainStep",
            display_name="Train Step",
            category="Graft/training",
            description=(
                "Trains, as a function: a state goes in, a new state comes out, and the one that went in is still there. Chain two, branch "
                "three from one, sample in between. Results are stored: the same step is never trained twice."
            ),
            **aliases("train", "lora training", "fine-tune", "train lora"),
            is_output_node=True,
            hidden=[io.Hidden.unique_id],
            inputs=[
                TrainState.Input("state", tooltip="From Start Training or another Train Step."),
                io.Int.Input("steps", default=100, min=0, max=10_000_000, tooltip="How many steps further."),
                io.Float.Input(
                    "epochs", default=0.0, min=0.0, max=100_000.0, step=0.5,
                    tooltip="Above 0 it replaces steps: rounds through the pictures.",
                ),
                io.Int.Input(
                    "validate_every", default=50, min=0, max=1_000_000,
                    tooltip="Measure the loss on the held-out pictures every N steps; 0 is never.",
                ),
                io.Int.Input("preview_every", default=0, min=0, max=1_000_000, tooltip="Sample a picture every N steps" + _NOT_YET + "."),
                io.Int.Input(
                    "snapshot_every", default=100, min=0, max=1_000_000,
                    tooltip="A run that is killed goes on from the last one; 0 is never.",
                ),
                io.Conditioning.Input("positive", optional=True, tooltip="For previews."),
                io.Conditioning.Input("negative", optional=True, tooltip="For previews."),
                io.Latent.Input("latent", optional=True, tooltip="For previews."),
                Optimizer.Input("optimizer", optional=True, tooltip="Settings that hold from here on."),
                Objective.Input("objective", optional=True, tooltip="Settings that hold from here on."),
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
    def execute(
        cls, state, steps=100, epochs=0.0, validate_every=50, preview_every=0, snapshot_every=100, positive=None, negative=None,
        latent=None, optimizer=None, objective=None,
    ) -> io.NodeOutput:
        from ..training import state as states
        from ..training.dataset import batches_per_epoch

        if preview_every:
            raise ValueError(f"TrainStep: preview_every {_LATER}; set it to 0 and sample between two Train Steps.")
        subject, state = state.subject, states.with_settings(state, optimizer, objective)
        if epochs > 0:
            held = state.settings.optimizer
            steps = max(1, math.ceil(epochs * batches_per_epoch(subject.dataset, held.batch_size) / held.accumulation))
        result, report = _trained(state, steps, validate_every, snapshot_every, cls.hidden.unique_id if cls.hidden else None)
        lora = result.lora_model()
        grafted = host.lora.graft(subject.model, subject.clip, [host.lora.Entry(f"{result.run} at step {result.step}", lora)])
        log.info("%s", report)
        return io.NodeOutput(result, grafted.model, grafted.clip, lora, {"loss": list(result.history.loss)}, report, ui={"text": [report]})


def _trained(state: Any, steps: int, validate_every: int, snapshot_every: int, node: str | None) -> tuple[Any, str]:
    """The state after `steps` more steps and the report, with progress, events and interruption of the host."""
    from ..ema.offload import note_on
    from ..training import reports, runs
    from ..training.store import Store

    subject = state.subject
    if state.start.ema is not None and state.start.ema.device == "host" and (note := note_on(subject.model.load_device)):
        log.info("%s", note)
    store = None if subject.unhashed else Store(host.folders.training_folder(), state.run, host.fingerprint.versions(subject.model))
    bar = host.events.progress(steps)

    def stepped(step, moved, validation):
        bar(step - state.step)
        data = {"node": node, "run": state.run, "step": step, "until": state.step + steps, "loss": moved.loss, "rate": moved.rate}
        host.events.send_event("graft.step", {**data, "norm": moved.norm, "validation": validation})
        host.events.raise_if_interrupted()

    forward = partial(host.denoiser.denoiser, subject.model, state.settings.objective.zero_terminal_snr)
    outcome = runs.run(state, steps, forward, subject.dataset, store, stepped, validate_every, snapshot_every)
    return outcome.state, reports.step(state, outcome, subject.unhashed)


NODES = [GraftTrainStart, TrainStep]
