"""The live tensors of a training run on the model's device: trained weights, optimizer, gradients and averages."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...ema.decay import EMASettings
from ...ema.shadow import Shadow
from ...patches.core.slots import SlotKey, find_slot, hold_values, slots_by_tensor
from ..data.dataset import Conditioning, Dataset
from ..distributed import fsdp, gradient_sum, process_group
from ..distributed.placement import RowSharded, placement_for
from ..memory.cast_weights import cast_weights
from ..memory.checkpointing import checkpoint_blocks
from ..memory.inference_tensors import use_normal_tensors
from ..memory.layer_ring import Leaf, block_sizes, fewest_waiting, layers_on_host, slots_of_blocks
from ..memory.offload import activations_on_host
from ..memory.quantized_base import base as quantized_base
from ..memory.quantized_base.registry import find_format
from ..objective.denoiser import Denoiser
from ..optimizers.precision import LossScale, autocast, autocast_type, computes_in_fp16
from ..optimizers.stepper import OptimizerStepper, live_type
from ..state import History, RunCost, TrainState, advance_position, name_companions
from ..tasks.registry import task_of
from ..trainable import install
from ..trainable.settings import TEXT_ENCODER, WORDS
from ..trainable.words import group_by_word
from .batch_loader import BatchLoader, BatchSchedule
from .out_of_memory import used_memory

if TYPE_CHECKING:
    from .compiled_blocks import BlockCompiler


@dataclass(frozen=True)
class StepResult:
    """What one step measured."""

    loss: float
    rate: float
    norm: float
    seconds: float = 0.0


@dataclass(frozen=True)
class HeldOutLoss:
    """What one validation measured: the loss of the trained weights, and of their running average if there is one; of
    preference pairs also the implicit accuracy of the trained weights.
    """

    weights: float
    average: float | None = None
    accuracy: float | None = None


class Workspace:
    """Live copies of a state's tensors on the model's device, which steps change in place. Nobody else writes into it:
    its methods do.

    `state()` freezes them again. The steps are those of a `group` of ranks that all have such a workspace; without one,
    of this process. `raise_if_interrupted` is asked wherever a step or validation takes long. Of a plan,
    `in_main_memory` is whether its device stands for the host's memory.
    """

    def __init__(
        self,
        state: TrainState,
        denoiser: Denoiser,
        dataset: Dataset,
        group: process_group.SingleProcess | None = None,
        raise_if_interrupted: Callable[[], None] | None = None,
        in_main_memory: bool = False,
    ) -> None:
        self.group = group or process_group.SingleProcess()
        self.task = task_of(state)
        self.task.check(state, denoiser, dataset, self.group)
        self.raise_if_interrupted = raise_if_interrupted or _never_interrupt
        self.start_state, self.denoiser, self.dataset = state, denoiser, dataset
        self.loader = BatchLoader(
            BatchSchedule.from_state(state, dataset), dataset.loader_threads, every=(self.group.rank, self.group.size)
        )
        self.placement = placement_for(state, self.group)
        self.quantized: quantized_base.QuantizedBase | None = None  # the model's weights while they are
        self.notes: list[str] = []  # for the report
        self.block_sizes: tuple[int, ...] = ()  # bytes that each block brings to the device, where blocks wait
        self.waiting: frozenset[str] = self._waiting_weights()  # trained weights in host memory, by name
        self.stepper = self._build_stepper()
        self.trained = self.stepper.trained
        self.gradients = gradient_sum.for_group(self.group, self.stepper.leaves, self.placement.is_sharded)
        self.loss_scale: LossScale | None = None
        if computes_in_fp16(state.settings.optimizer, denoiser):
            self.loss_scale = LossScale(state.optimizer)
        self.companions = self.task.companions(state, denoiser.device)
        self.shadow: Shadow | None = None
        self.powers: list[tuple[EMASettings, Shadow]] = []  # power-function averages that snapshots are taken of
        if self.group.is_main_process or self.placement.is_sharded:  # each part of the averages is kept once
            self._begin_averages()
        self.step = state.step
        # False while a step changes the tensors: an interruption then leaves no usable state.
        self.is_consistent = True
        self.saved_step = state.step  # the step of the last snapshot
        self.seconds = 0.0
        self.memory = 0  # bytes in use at the peak of a step
        self.results: list[StepResult] = []
        self.validation: list[tuple[int, float]] = []
        self.average_validation: list[tuple[int, float]] = []
        self.accuracy: list[tuple[int, float]] = []
        # Before the trained tensors are installed: differences of whole weights are taken from the model's own.
        self.base = state.base_of_differences() if self.powers else None
        self.in_main_memory = in_main_memory
        self.is_cast = False  # whether the model's frozen weights are of autocast's type
        self.attached = ExitStack()  # holds the trained tensors on the model
        self.before_encoding: Callable[[], None] = lambda: None
        self.strength = 1.0  # of the adapter; sliders change it
        self.purpose = ""  # what runs now: a micro-batch of the step, or "" outside training

    def _build_stepper(self) -> OptimizerStepper:
        state, device = self.start_state, self.denoiser.device
        norm = None
        if isinstance(self.placement, RowSharded):
            norm = partial(self.placement.norm, device=device)
        return OptimizerStepper(
            state.settings.optimizer,
            self.placement.local(state.trained),
            self.placement.local(state.optimizer),
            device,
            state.start.seed,
            norm,
            self._text_encoder_devices(),
            0.0 if state.start.words is None else state.start.words.learning_rate,
            self.waiting if self._trains_layers_on_host else None,
        )

    def _text_encoder_devices(self) -> dict[str, torch.device]:
        """Where the text encoder's trained tensors and words lie: on its device, which may be another one than the
        model's.
        """
        if not self.start_state.start.encodes_captions:
            return {}
        names = [name for name in self.start_state.trained if name.startswith((TEXT_ENCODER, WORDS))]
        return dict.fromkeys(names, self.denoiser.text_encoder_device)

    def _begin_averages(self) -> None:
        state, device = self.start_state, self.denoiser.device
        ema = state.start.ema
        if ema is None:
            return
        average = self.placement.local(state.average)
        self.shadow = Shadow.from_average(average, state.step, self.trained, device, ema.device)
        if not ema.snapshots:
            return
        for number, width in enumerate(ema.widths):
            average = {name: state.powers[f"{number}/{name}"] for name in state.trained}
            settings = replace(ema, schedule="power", widths=(width,), snapshots=0)
            self.powers.append((settings, Shadow.from_average(average, state.step, self.trained, device, ema.device)))

    def load_until(self, step: int) -> None:
        """Have batches prepared ahead up to a step, and none behind it."""
        self.loader.until = step

    def moment(self) -> tuple[int, int, str]:
        """(seed, step, purpose) of the forward that runs now."""
        return self.start_state.start.seed, self.step, self.purpose

    @contextmanager
    def set_purpose(self, purpose: str) -> Iterator[None]:
        """Inside the block every forward is for that purpose, on which the adapter's dropout depends."""
        before, self.purpose = self.purpose, purpose
        try:
            yield
        finally:
            self.purpose = before

    def switch_off_dropout(self) -> AbstractContextManager[None]:
        """A context in which the adapter drops nothing, as while sampling."""
        return self.set_purpose("")

    def begin_moving(self) -> None:
        """From here on until `finish_step` the tensors are not a state."""
        self.is_consistent = False
        for shadow in self.shadows:
            shadow.protect()

    def drop_step(self, has_moved: bool) -> None:
        """Forget the gradients of a step that is not made. Where nothing has moved, the tensors are a state still."""
        self.stepper.drop_gradients()
        if not has_moved:
            self.is_consistent = True

    def finish_step(self, result: StepResult) -> None:
        """Count a step whose tensors have moved, and let the averages follow."""
        self.step += 1
        self._average()
        self.results.append(result)
        self.is_consistent = True

    def _average(self) -> None:
        """Updates the averages with this step's weights; every `switch_every` steps sets the weights to the average."""
        ema, total = self.start_state.start.ema, self.start_state.settings.optimizer.total_steps
        if ema is None:
            return
        if self.shadow is not None:
            self.shadow.update_(self.trained, ema, self.step, total)
        for settings, shadow in self.powers:
            shadow.update_(self.trained, settings, self.step, total)
        if ema.switch_every and self.step % ema.switch_every == 0:
            self.stepper.wait()
            for _, shadow in self.powers:
                shadow.protect()
            if self.shadow is not None:
                self.shadow.switch_(self.trained)
            self.group.broadcast_(self.trained)

    def count_seconds(self, seconds: float) -> None:
        """Count time that steps took."""
        self.seconds += seconds

    def note_memory(self) -> None:
        """Count the memory that a step took at its peak."""
        self.memory = max(self.memory, used_memory(self.denoiser.device))

    def note_saved(self) -> None:
        """A snapshot of this step was asked for."""
        self.saved_step = self.step

    def note_validation(self, loss: HeldOutLoss) -> None:
        """Keep what a validation at this step measured."""
        self.validation.append((self.step, loss.weights))
        if loss.average is not None:
            self.average_validation.append((self.step, loss.average))
        if loss.accuracy is not None:
            self.accuracy.append((self.step, loss.accuracy))

    @contextmanager
    def install(self) -> Iterator[None]:
        """Inside the block the model computes with the trained tensors. Afterwards it is restored, also on errors."""
        settings, denoiser = self.start_state.settings.optimizer, self.denoiser
        module = denoiser.module
        with ExitStack() as stack:
            if self.start_state.start.adapter.quantized_base:  # of layers that nothing goes around yet
                stack.enter_context(self._quantize_base())
            stack.enter_context(self._cast_weights())
            if self.compiles:
                stack.enter_context(self.block_compiler.install(module))
            if settings.offload == "activations":
                stack.enter_context(activations_on_host(module))
            if settings.offload == "layers":
                trained, leaves = self._trained_types, self._leaves()
                stack.enter_context(
                    layers_on_host(module, denoiser.device, self._waiting_slots, self._waiting_blocks, trained, leaves)
                )
            # Weights that are fetched from the host block by block must not be kept for the backward pass: they are
            # fetched again.
            if settings.checkpointing or settings.offload == "layers":
                stack.enter_context(checkpoint_blocks(module))
            stack.enter_context(torch.enable_grad())
            if self.group.shard and not self.placement.is_sharded:  # adapters are trained beside a divided base
                stack.enter_context(use_normal_tensors(module))
                stack.enter_context(fsdp.shard(module, denoiser.device, self.group))
            stack.enter_context(self.attached)
            self._attach()
            yield

    @contextmanager
    def _cast_weights(self) -> Iterator[None]:
        """A context in which frozen weights are of the type that autocast computes in."""
        settings, denoiser = self.start_state.settings.optimizer, self.denoiser
        dtype = autocast_type(settings, denoiser)
        if dtype is None or not self.task.casts_frozen_weights or self.group.shard:
            yield
            return
        # What waits in host memory comes over layer by layer, and is cast there.
        stays = self.in_main_memory or settings.offload == "layers" or self.start_state.start.adapter.quantized_base
        with cast_weights(denoiser.module, dtype, self.trained, stays) as count:
            self.is_cast = count > 0
            try:
                yield
            finally:
                self.is_cast = False

    @property
    def compiles(self) -> bool:
        """Whether the model's blocks run under torch.compile."""
        return self.start_state.settings.optimizer.compile != "off"

    @cached_property
    def block_compiler(self) -> BlockCompiler:
        """What is compiled for this model and the sizes of its batches."""
        from .compiled_blocks import compiler_for

        kind = type(self.denoiser.module)
        return compiler_for(f"{kind.__module__}.{kind.__qualname__}", tuple(self.loader.schedule.sizes()))

    @contextmanager
    def _quantize_base(self) -> Iterator[None]:
        """A context in which the base is quantized."""
        denoiser = self.denoiser
        weight_format = find_format(self.start_state.start.adapter.base_weights)
        on_host = self.start_state.settings.optimizer.offload == "layers"
        kept = denoiser.kept_weights
        with quantized_base.quantize_base(
            denoiser.module, weight_format, denoiser.device, on_host, kept
        ) as self.quantized:
            if kept is not None:
                self.notes += kept.notes
            yield
        self.quantized = None

    def _waiting_slots(self) -> Container[SlotKey]:
        """The slots of weights that layers do not compute with now."""
        if self.quantized is None:
            return ()
        return self.quantized.waiting

    @property
    def _trains_layers_on_host(self) -> bool:
        """Whether layers that wait in host memory are trained themselves."""
        if self.start_state.settings.optimizer.offload != "layers" or self.denoiser.device.type == "cpu":
            return False
        return self.start_state.start.adapter.full_weights

    @cached_property
    def _trained_types(self) -> dict[SlotKey, torch.dtype]:
        """The type of each trained weight of layers in host memory, by every slot that it will be in."""
        if not self._trains_layers_on_host:
            return {}
        module, dtype = self.denoiser.module, live_type(self.start_state.settings.optimizer)
        slots_of = slots_by_tensor(module)
        names = [name for name in self.start_state.trained if not name.startswith((TEXT_ENCODER, WORDS))]
        return {slot.key: dtype for name in names for slot in slots_of[id(find_slot(module, name).tensor)]}

    def _waiting_weights(self) -> frozenset[str]:
        if not self._trained_types:
            return frozenset()
        module = self.denoiser.module
        in_blocks = slots_of_blocks(module, self._waiting_blocks)
        names = [name for name in self.start_state.trained if not name.startswith((TEXT_ENCODER, WORDS))]
        return frozenset(name for name in names if find_slot(module, name).key in in_blocks)

    def _leaves(self) -> dict[int, Leaf]:
        """Where the gradients of trained weights go that wait in host memory, by the ids of these."""
        module, leaves = self.denoiser.module, self.stepper.leaves
        return {id(self.trained[n]): Leaf(leaves[n], find_slot(module, n).tensor.dtype) for n in self.waiting}

    @cached_property
    def _waiting_blocks(self) -> int:
        """How many blocks wait in host memory."""
        module, device = self.denoiser.module, self.denoiser.device
        sizes = block_sizes(module, device, self._waiting_slots(), self._trained_types)
        self.block_sizes = tuple(sizes)
        waiting = self.start_state.settings.optimizer.swapped_blocks
        if not waiting:
            waiting = fewest_waiting(sizes, self.denoiser.room_for_blocks)
            if sizes:
                self.notes.append(f"offload to CPU memory: {waiting} of {len(sizes)} blocks wait in CPU memory")
        return waiting

    def use_own_weights(self) -> AbstractContextManager[None]:
        """A context without gradients in which the base is as it was loaded, as it will be when the LoRA is used.
        Weights that are cast for training stay so, and the block computes in their type.
        """
        if self.is_cast:
            return autocast(self.start_state.settings.optimizer, self.denoiser)
        if self.quantized is None:
            return nullcontext()
        return self.quantized.switch_off()

    def _attach(self) -> None:
        adapter, denoiser = self.start_state.start.adapter, self.denoiser
        if self.placement.is_sharded:
            sharded = fsdp.shard_trainable(
                denoiser.module, self.start_state.trained, self.trained, denoiser.device, self.group
            )
            self.gradients.attach(*self.attached.enter_context(sharded))
            return
        if adapter.text_encoder:
            text_encoder = denoiser.text_encoder
        else:
            text_encoder = None
            if self.start_state.start.words is not None:
                assert denoiser.text_encoder is not None
                self.attached.enter_context(use_normal_tensors(denoiser.text_encoder))
        attached = install.attach(
            denoiser.module,
            adapter,
            self.trained,
            self.moment,
            text_encoder,
            strength=self.strength,
            waiting=self.waiting,
        )
        self.before_encoding = self.attached.enter_context(attached)

    def encode(self, captions: Sequence[str], known: Sequence[Conditioning]) -> Sequence[Conditioning]:
        """Conditionings of captions: the dataset's, or freshly encoded if the text encoder or words are trained.

        Args:
            captions: what the images of a batch show.
            known: the dataset's conditionings, one for each.
        """
        if not self.start_state.start.encodes_captions:
            return known
        assert self.denoiser.encode is not None
        self.before_encoding()
        return self.denoiser.encode(captions, known, self._vectors())

    def _vectors(self) -> dict[str, dict[str, Tensor]]:
        """The vectors of trained words, by word and text encoder; without a way for gradients once they are frozen."""
        vectors = group_by_word(self.trained)
        words, total_steps = self.start_state.start.words, self.start_state.settings.optimizer.total_steps
        if words is not None and words.is_frozen(self.step, total_steps):
            for word, parts in vectors.items():
                vectors[word] = {part: tensor.detach() for part, tensor in parts.items()}
        return vectors

    @contextmanager
    def switch_off_trained(self) -> Iterator[None]:
        """Inside the block (within `installed()`) the model computes without trained tensors and gradients."""
        self.attached.close()
        try:
            with torch.no_grad():
                yield
        finally:
            self._attach()

    @contextmanager
    def at_strength(self, strength: float) -> Iterator[None]:
        """A context (within `install`) in which the model computes with the adapter at another strength.

        Args:
            strength: 1 is as trained, 0 without the adapter.
        """
        if strength == self.strength:
            yield
            return
        before = self.strength
        self._attach_at(strength)
        try:
            yield
        finally:
            self._attach_at(before)

    def _attach_at(self, strength: float) -> None:
        self.attached.close()
        self.strength = strength
        self._attach()

    @property
    def has_average(self) -> bool:
        """Whether the run keeps a running average, here or on the first rank."""
        return self.start_state.start.ema is not None

    @contextmanager
    def use_average(self) -> Iterator[None]:
        """Inside the block (within `installed()`) the model computes with the running average. Afterwards the live
        weights are back, bit for bit, also after an error.

        Ranks that run the same forward pass (`--shard`) enter it together.
        """
        self.stepper.wait()
        with ExitStack() as stack:
            if self.shadow is not None:
                stack.enter_context(self.shadow.swap_in(self.trained))
            else:
                for tensor in self.trained.values():
                    stack.enter_context(hold_values(tensor.detach()))
            if self.group.shard and not self.placement.is_sharded:
                self.group.broadcast_(self.trained)  # only the first rank has the average
            stack.callback(self.stepper.wait)
            yield

    @property
    def is_usable(self) -> bool:
        """Whether the tensors are a state: not half stepped, and not half exchanged with their average or with the
        weights to sample with.
        """
        is_swapped = self.stepper.is_swapped or (self.shadow is not None and self.shadow.is_swapped)
        return self.is_consistent and not is_swapped

    @property
    def best(self) -> tuple[int, float] | None:
        """Step and held-out loss of the best validation so far."""
        history = self.start_state.history
        measured = history.validation + tuple(self.validation)
        of_average = history.average_validation + tuple(self.average_validation)
        return replace(history, validation=measured, average_validation=of_average).best

    @property
    def shadows(self) -> list[Shadow]:
        """Every running average."""
        shadows = [shadow for _, shadow in self.powers]
        if self.shadow is None:
            return shadows
        return [self.shadow, *shadows]

    def finish(self) -> None:
        """Waits for averages that are updated in host memory."""
        for shadow in self.shadows:
            shadow.finish()

    def close(self) -> None:
        """Ends background threads."""
        self.loader.close()
        for shadow in self.shadows:
            shadow.close()

    def position(self) -> TrainState:
        """The workspace's current position, as a state without tensors."""
        start = self.start_state
        position = advance_position(start.position, start.settings.digest, self.step - start.step)
        return replace(start, trained={}, optimizer={}, average={}, powers={}, step=self.step, position=position)

    def lora_of(self, shadow: Shadow) -> dict[str, Tensor]:
        """An average as a LORA_MODEL on the CPU.

        Args:
            shadow: the average.
        """
        shadow.finish()
        return install.make_lora(shadow.tensors, self.start_state.start.adapter, self.base)

    def state(self, own: bool = False) -> TrainState:
        """The workspace as an immutable state: everything is copied to the CPU.

        Args:
            own: whether it is for the rows of this rank alone. Else, where ranks shard the tensors, all of them make
                this call together.
        """
        gather: Callable[[Mapping[str, Tensor]], dict[str, Tensor]] = self.placement.gather
        if own:
            gather = dict
        self.finish()
        average: dict[str, Tensor] = {}
        if self.shadow is not None:
            average = _cpu_copies(self.shadow)
        powers = {}
        for number, (_, shadow) in enumerate(self.powers):
            for name, tensor in _cpu_copies(shadow).items():
                powers[f"{number}/{name}"] = tensor
        optimizer = gather(self.stepper.state())
        if self.loss_scale is not None:
            optimizer.update(self.loss_scale.state())
        optimizer.update(name_companions({name: one.state() for name, one in self.companions.items()}))
        cost = self.start_state.cost
        return replace(
            self.position(),
            trained=gather(self.stepper.copy_sampling_weights()),
            optimizer=optimizer,
            average=gather(average),
            powers=powers,
            cost=RunCost(cost.seconds + self.seconds, max(cost.memory, self.memory)),
            history=self._history(),
        )

    def _history(self) -> History:
        earlier = self.start_state.history
        return History(
            earlier.loss + tuple(result.loss for result in self.results),
            earlier.rate + tuple(result.rate for result in self.results),
            earlier.norm + tuple(result.norm for result in self.results),
            earlier.validation + tuple(self.validation),
            earlier.outdated,
            earlier.average_validation + tuple(self.average_validation),
            earlier.accuracy + tuple(self.accuracy),
        )


def _never_interrupt() -> None:
    """Nobody interrupts."""


def _cpu_copies(shadow: Shadow) -> dict[str, Tensor]:
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in shadow.tensors.items()}
