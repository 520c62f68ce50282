"""Train Step for both experts of a pair, in turn: what TrainStep does when its training state is an ExpertPair."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from comfy_api.latest import io

from .. import host
from ..host import pair_previews
from ..storage.printable import logger
from ..training.expert_pair import ExpertPair
from ..training.objective import experts
from ..training.objective.settings import ObjectiveSettings
from ..training.optimizers.settings import OptimizerSettings
from ..training.run.call import open_call, skip_training
from ..training.run.loop import Callbacks
from ..training.run.turns import train_in_turn
from ..training.settings import StepSettings
from ..training.tasks.registry import task_of
from .step_call import (
    PreviewInputs,
    PreviewPrompt,
    StepCall,
    encoded_prompts,
    outputs,
    plan_steps,
    preview_notes,
    preview_prompts,
    with_lora,
)

log = logger(__name__)


class ExpertTraining:
    """One execution of TrainStep for a pair; `calls` are those of the high noise and of the low noise expert."""

    def __init__(self, calls: Sequence[StepCall], steps: int, sampled: PreviewInputs) -> None:
        self.calls, self.steps, self.sampled = calls, steps, sampled
        self.prompts: list[PreviewPrompt] = []
        bar, done = host.events.progress_bar(steps * len(calls)), [0] * len(calls)

        def advanced(number: int, steps_done: int) -> None:
            done[number] = steps_done
            bar(sum(done))

        for number, call in enumerate(calls):
            call.bar = partial(advanced, number)

    @classmethod
    def plan(
        cls,
        pair: ExpertPair,
        chosen: StepSettings,
        optimizer: OptimizerSettings | None,
        objective: ObjectiveSettings | None,
        sampled: PreviewInputs,
        place: tuple[Any, str | None],
    ) -> ExpertTraining:
        """The execution for each expert, with new settings if there are any."""
        objectives: Sequence[Any] = (None, None)
        if objective is not None:
            objectives = experts.split_pair(objective, pair.high.subject.model.model.diffusion_model)
        calls = []
        for state, own in zip(pair.states, objectives, strict=True):
            state, count = plan_steps(state, chosen, optimizer, own, sampled)
            calls.append(StepCall(state, count, place, sampled))
        return cls(calls, count, sampled)

    def train(self, callbacks: Callbacks, chosen: StepSettings) -> io.NodeOutput:
        """Train Step's outputs: the pair, and of the high noise expert what there is only one of."""
        outcomes = self._train_in_turn(callbacks, chosen)
        pair = ExpertPair(*(outcome.state for outcome in outcomes))
        runs = [call.describe_end(state) for call, state in zip(self.calls, pair.states, strict=True)]
        return outputs(pair, pair.high, self._report(outcomes), runs, self.calls[0].pictures)

    def _train_in_turn(self, callbacks: Callbacks, chosen: StepSettings) -> list[Any]:
        if not self.steps:
            return [skip_training(call.state) for call in self.calls]
        every = callbacks.preview_every
        with ExitStack() as stack:
            stops = [stack.enter_context(call.announce(chosen)) for call in self.calls]
            callbacks = replace(callbacks, preview_every=0, should_stop=lambda: any(asked() for asked in stops))
            begun = []
            for call in self.calls:
                own, dataset = call.with_callbacks(callbacks, chosen), call.state.subject.dataset
                opened = partial(_open_alone, call.open_denoiser)
                begun.append(
                    open_call(
                        stack, call.state, self.steps, opened, dataset, call.store(), own, chosen.keep, log.warning
                    )
                )
            outcomes = train_in_turn(begun, chosen.switch_every, self.preview, every)
            for call, outcome in zip(self.calls, outcomes, strict=True):
                call.events.result = outcome.state.key
        return [call.with_dataset(outcome) for call, outcome in zip(self.calls, outcomes, strict=True)]

    def preview(self, states: Sequence[Any], step: int) -> None:
        """Samples every prompt with both experts as they are now, and with their averages, and shows the images.

        Raises ComfyUI's exception when the user interrupts.
        """
        if not self.prompts:
            subject = self.calls[0].state.subject
            self.prompts = preview_prompts(subject, self.sampled, encoded_prompts(subject, self.sampled))
        for label in ("weights", "average"):
            if not self.sampled.shows(label) or (label == "average" and not states[0].average):
                continue
            loras = [task_of(state).lora_model(state, label == "average") for state in states]
            models = [with_lora(state, None, lora).model for state, lora in zip(states, loras, strict=True)]
            for prompt in self.prompts:
                host.events.raise_if_interrupted()
                self._preview_prompt(prompt, models, states[0].settings.objective.boundary, step, label)

    def _preview_prompt(
        self, prompt: PreviewPrompt, models: Sequence[Any], boundary: float, step: int, label: str
    ) -> None:
        """Samples one prompt. The images are kept with the runs of both experts, as they are the pair's."""
        high, low = self.calls
        latents = pair_previews.sample_pair(
            models,
            boundary,
            prompt.conditioning,
            prompt.negative,
            high.latent_of(prompt),
            high.seed,
            prompt.line,
        )
        decoded = host.previews.decode_alone(high.state.subject.vae, latents)
        said = step, label, prompt.number, prompt.line.text
        high.save_preview(decoded, *said)
        low.show_preview(low.save_preview(decoded, *said), step)  # the one that the panel shows now

    def _report(self, outcomes: Sequence[Any]) -> str:
        parts = []
        for call, outcome in zip(self.calls, outcomes, strict=True):
            parts.append(call.report(outcome))
        pictures = self.calls[0].pictures
        if pictures:
            parts.append(f"{len(pictures)} previews of the pair, from {pictures[0]['filename']} on, in both folders")
        if pictures:
            parts += preview_notes(self.calls[0].state.subject, self.sampled)
        parts.append(
            "MODEL, LoRA and losses of this node are the high noise expert's; Split Expert Pair gives those of both"
        )
        return "\n\n".join(parts)


@contextlib.contextmanager
def _open_alone(opened: Callable[[], AbstractContextManager[Any]]) -> Iterator[Any]:
    """A model for training, with all others off the device."""
    pair_previews.unload_models()
    with opened() as denoiser:
        yield denoiser
