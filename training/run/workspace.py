"""The live tensors of a training run on the model's device: trained weights, optimizer, gradients and averages."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from ...ema.decay import EMASettings
from ...ema.shadow import Shadow
from ...patches.core.slots import SlotKey, held_values
from ..data import sliders
from ..data.dataset import Conditioning, Dataset
from ..data.listing import first_names
from ..data.preference_files import missing_partner
from ..distributed import fsdp, gradient_sum, process_group
from ..distributed.placement import RowSharded, placement_for
from ..memory.cast_weights import cast_weights
from ..memory.checkpointing import checkpointed
from ..memory.inference_tensors import as_normal_tensors
from ..memory.layer_ring import layers_on_host
from ..memory.offload import activations_on_host
from ..memory.quantised_base import base as quantised_base
from ..memory.quantised_base.registry import format_named
from ..objective import perceptual
from ..objective.autoencoder import Autoencoder
from ..objective.denoiser import Denoiser
from ..objective.noise import LAST_SIGNAL
from ..objective.settings import check_for
from ..optimizers.precision import LossScale, autocast, autocast_type, computes_in_fp16
from ..optimizers.stepper import OptimizerStepper
from ..state import History, RunCost, TrainState, advance_position
from ..trainable import install
from ..trainable.autoencoder import AutoencoderSettings, side_of
from ..trainable.settings import AS_LOADED, TEXT_ENCODER, WORDS
from ..trainable.words import by_word, check_reference
from .batch_loader import BatchLoader, BatchSchedule
from .discriminator import Discriminator
from .out_of_memory import used

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


def check(state: TrainState, denoiser: Denoiser, dataset: Dataset, group: process_group.SingleProcess) -> None:
    """Raise ValueError when the state's objective does not fit the model or the pictures."""
    objective = state.settings.objective
    if state.start.autoencoder is not None:
        _check_autoencoder(state, denoiser, dataset, group)
        return
    check_for(objective, denoiser.prediction)
    _check_fp16(state, denoiser, group)
    if state.settings.optimizer.fused_backward and group.size > 1:
        raise ValueError(
            "Optimizer Settings: fused backward pass moves a weight before the ranks can add up their gradients: switch"
            " it off."
        )
    if state.start.adapter.quantised_base:
        _check_quantised_base(state.start.adapter.base_weights, denoiser, group)
    if state.settings.optimizer.compile != "off":
        _check_compile(state, denoiser, group)
    check_reference(state.start.words, objective.compares_pairs)
    if state.start.words is not None and group.shard:
        raise ValueError(
            "Train Words: --shard divides the model among ranks, and words cannot be trained beside that: start without"
            " --shard, or disconnect Train Words."
        )
    if group.shard:
        fsdp.check(state, group)
    if dataset.slider is not None:
        sliders.check(dataset, state.start.adapter, state.start.words is not None, objective)
        sliders.check_group(group.shard)
    if state.start.encodes_captions:
        _check_captions(state, denoiser, dataset)
    if objective.prior != "none" and dataset.regularisation is None:
        raise ValueError(
            f"Objective Settings: prior preservation {objective.prior} needs a regularization dataset: connect one to"
            " Dataset."
        )
    if objective.compares_pairs:
        _check_pairs(objective.loss, dataset)
    if objective.zero_terminal_snr and _ends_with_signal(denoiser):
        raise ValueError(
            "Objective Settings: zero terminal SNR is on, and the model's noise levels end with signal: rescale them"
            " (zero_terminal)."
        )


def _ends_with_signal(denoiser: Denoiser) -> bool:
    """Whether the model's last noise level has any signal left. A plan has no numbers to tell it from."""
    if denoiser.device.type == "meta":
        return False
    return float(denoiser.sigma(torch.tensor([1 - 2**-24], device=denoiser.device))) ** -2 > 2 * LAST_SIGNAL


def _check_fp16(state: TrainState, denoiser: Denoiser, group: process_group.SingleProcess) -> None:
    """Raise ValueError where what computes in fp16, because of the device or of the model, cannot have a loss scale.
    Training precision fp16 itself is refused elsewhere.
    """
    optimizer = state.settings.optimizer
    if optimizer.precision == "fp16" or not computes_in_fp16(optimizer, denoiser):
        return
    found = (
        f"Optimizer Settings: training precision {optimizer.precision} computes in fp16 with this model on this device"
    )
    if optimizer.fused_backward:
        raise ValueError(
            f"{found}, and a fused backward pass moves weights before it is known whether a gradient overflowed: switch"
            " it off, or set training precision to bf16."
        )
    if group.shard:
        raise ValueError(
            f"{found}, and its loss scale is for weights that a rank holds whole: set training precision to bf16, or"
            " start without --shard."
        )


def _check_quantised_base(base_weights: str, denoiser: Denoiser, group: process_group.SingleProcess) -> None:
    """Raise ValueError where the base cannot be quantised."""
    if group.shard:
        raise ValueError(
            f"Adapter Settings: base weights is {base_weights}, and --shard divides the weights as loaded: start"
            f" without --shard, or set base weights to {AS_LOADED}."
        )
    if not quantised_base.chosen_layers(denoiser.module):
        raise ValueError(
            f"Adapter Settings: base weights is {base_weights}, and no linear layer of the model can be"
            f" ({quantised_base.remark(denoiser.module, base_weights)}): set base weights to {AS_LOADED}."
        )


def _check_compile(state: TrainState, denoiser: Denoiser, group: process_group.SingleProcess) -> None:
    """Raise ValueError when blocks cannot be compiled here."""
    from .compiled_blocks import check_compiler

    if group.shard:
        raise ValueError(
            "Optimizer Settings: compile is blocks, and --shard divides the blocks among ranks: set compile to off, or"
            " start without --shard."
        )
    check_compiler(denoiser.device)


def _check_pairs(loss: str, dataset: Dataset) -> None:
    """Raise ValueError when some images have no worse picture to compare with."""
    images = dataset.images + dataset.held_out
    if dataset.regularisation is not None:
        images += dataset.regularisation.images
    alone = [image.name for image in images if image.worse is None]
    if not alone:
        return
    remedy = "Name the pictures of a pair name.win.png and name.lose.png, or choose another loss function."
    partner = missing_partner(alone[0])
    if partner:
        remedy = f"Beside {alone[0]} there is no {partner}. {remedy}"
    raise ValueError(
        f"Objective Settings: loss function {loss} learns from pairs, and {len(alone)} of {len(images)} images have no"
        f" worse picture: {first_names(alone)}. {remedy}"
    )


def _check_autoencoder(
    state: TrainState, coder: Denoiser, dataset: Dataset, group: process_group.SingleProcess
) -> None:
    """Raise ValueError for what divides or moves a model in ways that a VAE does not take, and where its losses need
    larger pictures or another precision.
    """
    if group.size > 1:
        raise ValueError("Start VAE Training: a VAE is trained by one process, and there are several ranks.")
    if state.settings.optimizer.offload != "none":
        raise ValueError(
            f"Optimizer Settings: offload to CPU memory is {state.settings.optimizer.offload}, and VAE training takes"
            " none: set it to none, and make crop size of Start VAE Training smaller to need less memory."
        )
    if state.settings.optimizer.compile != "off":
        raise ValueError("Optimizer Settings: compile is blocks, and VAE training takes none: set compile to off.")
    settings = state.start.autoencoder
    assert settings is not None
    if settings.discriminator and state.settings.optimizer.precision == "fp16":
        raise ValueError(
            "Optimizer Settings: training precision is fp16, and discriminator weight of Start VAE Training is above 0:"
            " use bf16 or float32, or set it to 0."
        )
    if settings.discriminator and computes_in_fp16(state.settings.optimizer, coder):
        raise ValueError(
            "Start VAE Training: this VAE is loaded in fp16, and discriminator weight is above 0: set training"
            " precision of Optimizer Settings to bf16, or discriminator weight to 0."
        )
    factor = cast(Autoencoder, coder).factor
    for image in dataset.images + dataset.held_out:
        side = min(side_of(length, settings.crop, factor) for length in image.latent.shape[-2:])
        if side < settings.least_side:
            raise ValueError(
                f"Start VAE Training: of {image.name} a side of {side} pixels is left, and LPIPS and the discriminator"
                f" need {settings.least_side}: make resolution of Dataset larger, or set their weights to 0."
            )


def _check_captions(state: TrainState, denoiser: Denoiser, dataset: Dataset) -> None:
    """Raise ValueError when the captions cannot be encoded in every step, as what is trained asks for."""
    what, off = "Adapter Settings: train text encoder is on", "switch it off"
    if state.start.words is not None:
        what, off = "Train Words is connected", "disconnect it"
    if denoiser.text_encoder is None:
        raise ValueError(f"{what}, and there is no text encoder to train: connect CLIP.")
    if any(any(image.seen) for image in dataset.images):
        raise ValueError(
            f"{what}, and this text encoder sees the control pictures, so that every caption would be encoded with its"
            f" pictures in every step, which Graft does not do: {off}."
        )
    if dataset.brings_conditionings:
        raise ValueError(
            f"{what}, and the samples of Samples bring conditionings that are encoded already: {off}, or train on"
            " folders."
        )


class Workspace:
    """Live copies of a state's tensors on the model's device, which steps change in place.

    `state()` freezes them again.

    The steps are those of a `group` of ranks that all have such a workspace; without one, of this process.
    """

    def __init__(
        self, state: TrainState, denoiser: Denoiser, dataset: Dataset, group: process_group.SingleProcess | None = None
    ) -> None:
        self.group = group or process_group.SingleProcess()
        check(state, denoiser, dataset, self.group)
        self.start_state, self.denoiser, self.dataset = state, denoiser, dataset
        self.loader = BatchLoader(
            BatchSchedule.of(state, dataset), dataset.loader_threads, every=(self.group.rank, self.group.size)
        )
        self.placement = placement_for(state, self.group)
        self.stepper = self._build_stepper()
        self.trained = self.stepper.trained
        self.gradients = gradient_sum.for_group(self.group, self.trained, self.placement.is_sharded)
        self.loss_scale: LossScale | None = None
        if computes_in_fp16(state.settings.optimizer, denoiser):
            self.loss_scale = LossScale(state.optimizer)
        self.discriminator: Discriminator | None = None
        self.perceptual: nn.Module | None = None  # measures LPIPS
        if state.start.autoencoder is not None:
            self._begin_autoencoder(state.start.autoencoder)
        self.shadow: Shadow | None = None
        self.powers: list[tuple[EMASettings, Shadow]] = []  # power-function averages that snapshots are taken of
        if self.group.is_main_process or self.placement.is_sharded:  # each part of the averages is kept once
            self._begin_averages()
        self.step = state.step
        # False while a step changes the tensors: an interruption then leaves no usable state.
        self.is_consistent = True
        self.saved_step = state.step  # the step of the last snapshot
        self.seconds = 0.0
        self.results: list[StepResult] = []
        self.validation: list[tuple[int, float]] = []
        self.average_validation: list[tuple[int, float]] = []
        self.accuracy: list[tuple[int, float]] = []
        # Before the trained tensors are installed: differences of whole weights are taken from the model's own.
        self.base: Mapping[str, Tensor] | None = None
        if self.powers and state.base is not None and state.start.adapter.full_weights:
            self.base = state.base()
        self.quantised: quantised_base.QuantisedBase | None = None  # the model's weights while they are
        self.in_main_memory = False  # of a plan: whether its device stands for the host's memory
        self.is_cast = False  # whether the model's frozen weights are of autocast's type
        self.notes: list[str] = []  # for the report
        self.attached = ExitStack()  # holds the trained tensors on the model
        self.before_encoding: Callable[[], None] = lambda: None
        self.raise_if_interrupted: Callable[[], None] = lambda: None  # asked wherever a step or validation takes long
        self.strength = 1.0  # of the adapter; sliders change it
        self.base_latents: list[Tensor] = []  # of a VAE that is trained whole: those of held-out pictures before it
        self.held_out_starts: dict[int, Tensor] = {}  # of a slider: what held-out noise is denoised to
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
        )

    def _text_encoder_devices(self) -> dict[str, torch.device]:
        """Where the text encoder's trained tensors and words lie: on its device, which may be another one than the
        model's.
        """
        if not self.start_state.start.encodes_captions:
            return {}
        names = [name for name in self.start_state.trained if name.startswith((TEXT_ENCODER, WORDS))]
        return dict.fromkeys(names, self.denoiser.text_encoder_device)

    def _begin_autoencoder(self, settings: AutoencoderSettings) -> None:
        state, device = self.start_state, self.denoiser.device
        if settings.discriminator:
            self.discriminator = Discriminator(settings.discriminator_rate, state.optimizer, device, state.start.seed)
        if settings.lpips:
            self.perceptual = perceptual.network(device)

    def _begin_averages(self) -> None:
        state, device = self.start_state, self.denoiser.device
        ema = state.start.ema
        if ema is None:
            return
        average = self.placement.local(state.average)
        self.shadow = Shadow.beside(average, state.step, self.trained, device, ema.device)
        if not ema.snapshots:
            return
        for number, width in enumerate(ema.widths):
            average = {name: state.powers[f"{number}/{name}"] for name in state.trained}
            settings = replace(ema, schedule="power", widths=(width,), snapshots=0)
            self.powers.append((settings, Shadow.beside(average, state.step, self.trained, device, ema.device)))

    def moment(self) -> tuple[int, int, str]:
        """(seed, step, purpose) of the forward that runs now."""
        return self.start_state.start.seed, self.step, self.purpose

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Inside the block the model computes with the trained tensors. Afterwards it is restored, also on errors."""
        settings, denoiser = self.start_state.settings.optimizer, self.denoiser
        module = denoiser.module
        with ExitStack() as stack:
            stack.enter_context(self._cast_weights())
            if self.start_state.start.adapter.quantised_base:
                stack.enter_context(self._quantised_base())
            if self.compiles:
                stack.enter_context(self.block_compiler.installed(module))
            if settings.offload == "activations":
                stack.enter_context(activations_on_host(module))
            if settings.offload == "layers":
                ring = layers_on_host(module, denoiser.device, denoiser.pins_memory, self._waiting)
                pins = stack.enter_context(ring)
                if pins.note:
                    self.notes.append(pins.note)
            # Weights that are fetched from the host block by block must not be kept for the backward pass: they are
            # fetched again.
            if settings.checkpointing or settings.offload == "layers":
                stack.enter_context(checkpointed(module))
            stack.enter_context(torch.enable_grad())
            if self.group.shard and not self.placement.is_sharded:  # adapters are trained beside a divided base
                stack.enter_context(as_normal_tensors(module))
                stack.enter_context(fsdp.sharded(module, denoiser.device, self.group))
            stack.enter_context(self.attached)
            self._attach()
            yield

    @contextmanager
    def _cast_weights(self) -> Iterator[None]:
        """A context in which frozen weights are of the type that autocast computes in."""
        settings, denoiser = self.start_state.settings.optimizer, self.denoiser
        dtype = autocast_type(settings, denoiser)
        if dtype is None or self.start_state.start.autoencoder is not None or self.group.shard:
            yield
            return
        # What waits in host memory comes over layer by layer, and is cast there.
        stays = self.in_main_memory or settings.offload == "layers" or self.start_state.start.adapter.quantised_base
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
    def _quantised_base(self) -> Iterator[None]:
        """A context in which the base is quantised."""
        denoiser = self.denoiser
        weight_format = format_named(self.start_state.start.adapter.base_weights)
        on_host = self.start_state.settings.optimizer.offload == "layers"
        kept = denoiser.kept_weights
        with quantised_base.quantised(denoiser.module, weight_format, denoiser.device, on_host, kept) as self.quantised:
            if kept is not None:
                self.notes += kept.notes
            yield
        self.quantised = None

    def _waiting(self) -> Container[SlotKey]:
        """The slots of weights that layers do not compute with now."""
        if self.quantised is None:
            return ()
        return self.quantised.waiting

    def own_weights(self) -> AbstractContextManager[None]:
        """A context without gradients in which the base is as it was loaded, as it will be when the LoRA is used.
        Weights that are cast for training stay so, and the block computes in their type.
        """
        if self.is_cast:
            return autocast(self.start_state.settings.optimizer, self.denoiser)
        if self.quantised is None:
            return nullcontext()
        return self.quantised.off()

    def _attach(self) -> None:
        adapter, denoiser = self.start_state.start.adapter, self.denoiser
        if self.placement.is_sharded:
            sharded = fsdp.sharded_trainable(
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
                self.attached.enter_context(as_normal_tensors(denoiser.text_encoder))
        attached = install.attached(
            denoiser.module,
            adapter,
            self.trained,
            self.moment,
            text_encoder,
            strength=self.strength,
        )
        self.before_encoding = self.attached.enter_context(attached)

    def encoded(self, captions: Sequence[str], known: Sequence[Conditioning]) -> Sequence[Conditioning]:
        """Conditionings of captions: the dataset's, or freshly encoded if the text encoder or words are trained."""
        if not self.start_state.start.encodes_captions:
            return known
        assert self.denoiser.encode is not None
        self.before_encoding()
        return self.denoiser.encode(captions, known, self._vectors())

    def _vectors(self) -> dict[str, dict[str, Tensor]]:
        """The vectors of trained words, by word and text encoder; without a way for gradients once they are frozen."""
        vectors = by_word(self.trained)
        words, total_steps = self.start_state.start.words, self.start_state.settings.optimizer.total_steps
        if words is not None and words.is_frozen(self.step, total_steps):
            for word, parts in vectors.items():
                vectors[word] = {part: tensor.detach() for part, tensor in parts.items()}
        return vectors

    @contextmanager
    def plain(self) -> Iterator[None]:
        """Inside the block (within `installed()`) the model computes without trained tensors and gradients."""
        self.attached.close()
        try:
            with torch.no_grad():
                yield
        finally:
            self._attach()

    @contextmanager
    def at_strength(self, strength: float) -> Iterator[None]:
        """Inside the block (within `installed()`) the model computes with the adapter at that strength."""
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
    def averaged(self) -> Iterator[None]:
        """Inside the block (within `installed()`) the model computes with the running average. Afterwards the live
        weights are back, bit for bit, also after an error.

        Ranks that run the same forward pass (`--shard`) enter it together.
        """
        with ExitStack() as stack:
            if self.shadow is not None:
                stack.enter_context(self.shadow.swapped(self.trained))
            else:
                for tensor in self.trained.values():
                    stack.enter_context(held_values(tensor.detach()))
            if self.group.shard and not self.placement.is_sharded:
                self.group.broadcast_(self.trained)  # only the first rank has the average
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

    def as_lora(self, shadow: Shadow) -> dict[str, Tensor]:
        """An average as a LORA_MODEL on the CPU."""
        shadow.finish()
        return install.as_lora(shadow.tensors, self.start_state.start.adapter, self.base)

    def state(self, own: bool = False) -> TrainState:
        """The workspace as an immutable state: everything is copied to the CPU.

        Where ranks shard the tensors, all of them make this call together, unless it is for the rows of this rank
        alone (`own`).
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
        if self.discriminator is not None:
            optimizer.update(self.discriminator.state())
        cost = self.start_state.cost
        return replace(
            self.position(),
            trained=gather(self.stepper.sampled()),
            optimizer=optimizer,
            average=gather(average),
            powers=powers,
            cost=RunCost(cost.seconds + self.seconds, max(cost.memory, used(self.denoiser.device))),
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


def _cpu_copies(shadow: Shadow) -> dict[str, Tensor]:
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in shadow.tensors.items()}
