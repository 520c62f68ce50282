"""Train Step with previews by the user's own graph: it trains to the next preview, has ComfyUI run these nodes, and
goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from comfy_api.latest import io

from .. import host
from ..host.preview_graph import PreviewGraph
from ..storage.printable import logger
from ..training.run.call import Call, Outcome, open_call
from ..training.run.turns import next_multiple
from ..training.tasks.registry import task_of
from .previews import Shown
from .step_call import StepCall, outputs, with_lora

if TYPE_CHECKING:
    from ..training.run.loop import Callbacks
    from ..training.settings import StepSettings

log = logger(__name__)


class PausingStep:
    """One execution of Train Step that pauses at each preview. ComfyUI runs the nodes of the preview and behind them a
    Train Step that gets this object as its state; that one goes on, to the next preview or to the end.

    The bytes are those of a training without previews: the call trains in pieces (`run.call.Call`). Before each pause
    the state is kept as a snapshot, so that an error of a node costs no step.
    """

    def __init__(
        self,
        call: StepCall,
        steps: int,
        callbacks: Callbacks,
        chosen: StepSettings,
        every: int,
        graph: PreviewGraph,
    ) -> None:
        self.call, self.steps, self.chosen, self.every, self.graph = call, steps, chosen, every, graph
        self.callbacks = replace(call.with_callbacks(callbacks, chosen), preview_every=0)
        self.training: Call | None = None
        self.outcome: Outcome | None = None  # once it has ended
        self.due: list[tuple[str, float]] = []  # of this step's previews: weights or average, and the strength
        self.beside: list[torch.Tensor] = []  # images of one preview at several strengths
        self.handed: list[Any] = []  # MODELs and CLIPs of previews, whose LoRAs are let go when training goes on
        self._check()
        call.note_abilities(samples=True)

    def _check(self) -> None:
        """Raises ValueError before the first step for what a preview would lack."""
        subject = self.call.state.subject
        if self.call.shows is not None and self.call.shows.shown is not None:
            raise ValueError(
                "Train Step: previews is connected, and this training state is of a VAE, whose previews are pictures of"
                " its dataset. Disconnect it."
            )
        for output, value in (("CLIP", subject.clip), ("VAE", subject.vae)):
            if value is None and self.graph.uses(output):
                raise ValueError(
                    f"Train Step: {output} of Preview Begin is connected, and the training state has none. Connect"
                    f" {output} to Start Training or Load State."
                )

    def go_on(self, shown: Shown | None = None) -> io.NodeOutput:
        """Take what a preview has made, and train to the next one or to the end."""
        call = self.call
        call.bar = host.events.progress_bar(self.steps)
        with call.announce(self.chosen) as should_stop:
            if shown is not None:
                self._take(shown)
            if not self.due and self.outcome is None:
                self._train(should_stop)
            expanded = None
            if self.due:
                expanded = self._preview(*self.due[0])
            call.events.is_paused = expanded is not None
        return expanded or self._end()

    def _train(self, should_stop: Callable[[], bool]) -> None:
        """Train to the next preview, or to the end."""
        call, state, every = self.call, self.call.state, self.every
        with ExitStack() as stack:
            if self.training is None:

                def should_pause() -> bool:
                    return should_stop() or "sample" in call.events.asked

                subject, callbacks = state.subject, replace(self.callbacks, should_stop=should_pause)
                opened = call.open_denoiser
                self.training = open_call(
                    stack,
                    state,
                    self.steps,
                    opened,
                    subject.dataset,
                    call.store(),
                    callbacks,
                    self.chosen.keep,
                    log.warning,
                )
                self.training.begin()
            else:
                self.training.lock(stack)
            training = self.training
            begun = training.at.step
            if not training.is_stored:
                training.train_to(min(training.until, next_multiple(begun, every)) if every else training.until)
            self._let_go()
            at = training.at.step
            if at == training.until or should_stop():
                if not training.is_stored:
                    training.save()
                self.outcome = call.with_dataset(training.finish())
                call.events.result = self.outcome.state.key
            else:
                training.save_snapshot()
            is_asked = call.events.take_wish("sample")
            if at > begun and (is_asked or (every and at % every == 0)):
                self.due = self._previews()

    def _previews(self) -> list[tuple[str, float]]:
        assert self.training is not None and self.call.shows is not None
        there = ["weights", "average"] if self.training.at.average else ["weights"]
        labels = [label for label in there if self.call.sampled.shows(label)]
        shown = [label for label in labels if self.call.sampled.shows(label)]
        return [(label, strength) for label in shown for strength in self.call.shows.strengths]

    def _preview(self, label: str, strength: float) -> io.NodeOutput:
        """What has ComfyUI run the nodes of one preview, and this Train Step behind them."""
        assert self.training is not None
        state = self.training.at
        lora = task_of(state).lora_model(state, label == "average")
        patched = with_lora(state, state.subject.clip, lora, strength)
        self.handed += [patched.model, *([patched.clip.patcher] if patched.clip is not None else [])]
        given = (patched.model, patched.clip, state.subject.vae, state.step)
        graph, links = self.graph.expand(given, self)
        return io.NodeOutput(*links, expand=graph)

    def _let_go(self) -> None:
        """Let go of the LoRAs of earlier previews: ComfyUI keeps what nodes gave until the workflow ends."""
        for patcher in self.handed:
            host.lora_stacks.empty_stacks(patcher)
        self.handed = []

    def _take(self, shown: Shown) -> None:
        """Keep and show what a preview has made; images at several strengths beside each other."""
        label, _ = self.due.pop(0)
        images = shown.images
        if images is not None:
            self.beside.append(images)
        if self.due and self.due[0][0] == label:
            return
        if self.beside:
            images = torch.cat(self.beside, dim=2)
        self.beside = []
        assert self.training is not None
        step = self.training.at.step
        pictures = [] if images is None else self.call.save_preview(images, step, label)
        pictures += self.call.save_media(shown.video, shown.audio, step, label)
        self.call.show_preview(pictures, step)

    def _end(self) -> io.NodeOutput:
        """Train Step's outputs."""
        call, outcome = self.call, self.outcome
        assert outcome is not None
        result = outcome.state
        return outputs(result, result, call.report(outcome, call.pictures), [call.describe_end(result)], call.pictures)
