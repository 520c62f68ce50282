"""A ComfyUI model on PyTorch's meta device, so that a training step can be planned: its weights are not touched."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from ..training.data.dataset import Conditioning, Dataset
from ..training.distributed import process_group
from ..training.expert_pair import ExpertPair
from ..training.memory.allocations import META, on_meta
from ..training.recipes.fit import USABLE
from ..training.run import memory_plan, memory_savings
from ..training.state import TrainState
from . import model_headers
from .comfyui_objects import Clip, Model
from .denoiser import Denoiser, allow_autograd
from .device_memory import half_type, training_device
from .encoding import LiveEncoder
from .model_sampling import with_zero_terminal_snr
from .whole_models import set_types

# what a network's own code raises where it meets tensors without values, and what Train Step will refuse
ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)
_MODEL_ALONE = "To plan the model alone, switch train text encoder of Adapter Settings off and disconnect Train Words."
_KEPT = 64
_RATES = ("learning_rate", "text_encoder_rate", "warmup", "floor")  # settings that no memory depends on

_plans: OrderedDict[Any, memory_plan.MemoryPlan] = OrderedDict()  # of this process's Start Training, by what counts
_for_the_command = False  # which plans what Start Training gives


def plans_for_card(memory: int) -> bool:
    """Whether to plan for a graphics card with bf16: its memory is named, and there is none here."""
    import comfy.model_management as management

    return memory > 0 and management.get_torch_device().type == "cpu"


@contextlib.contextmanager
def load_for_planning(memory: int) -> Iterator[None]:
    """A context in which ComfyUI loads diffusion models to plan them: as on a card of `memory` bytes, and with Load
    Diffusion Model without weights.
    """
    global _for_the_command
    with contextlib.ExitStack() as stack:
        stack.enter_context(model_headers.load_headers_only())
        if plans_for_card(memory):
            stack.enter_context(model_headers.load_as_on_card())
        _for_the_command = True
        try:
            yield
        finally:
            _for_the_command = False


def plan(patcher: Model, state: TrainState, dataset: Dataset, on_a_card: bool = False) -> memory_plan.MemoryPlan:
    """The memory of a training step of a MODEL on its device, or `on_a_card` with bf16."""
    is_half = on_a_card or half_type(patcher.load_device) is not None  # fp16 takes as much as bf16
    if state.settings.optimizer.precision == "auto" and is_half:
        state = state.with_optimizer(precision="bf16")
    on_host = patcher.load_device.type == "cpu" and not on_a_card
    encode = None
    with contextlib.ExitStack() as stack:
        stack.enter_context(set_types(patcher))
        if state.start.encodes_captions:
            if _computes_elsewhere(state) and not on_a_card:
                raise ValueError(
                    "This training cannot be planned: its text encoder computes on another device than the model."
                    f" {_MODEL_ALONE}"
                )
            encode = _PlannedEncoder(state.subject.clip, state.subject.dataset)
            stack.enter_context(set_types(state.subject.clip.patcher))
        denoiser = stack.enter_context(_on_meta(patcher, state.settings.objective.zero_terminal_snr, encode))
        return memory_plan.plan(state, denoiser, dataset, on_host)


def report_plan(state: Any, memory: int) -> str:
    """The plan of a state of Start Training as text; of both states of a pair of experts."""
    if isinstance(state, ExpertPair):
        return "\n\n".join(report_plan(expert, memory) for expert in state.states)
    subject = state.subject
    on_a_card = plans_for_card(memory)
    on_host = subject.model.load_device.type == "cpu" and not on_a_card

    def planned(changed: TrainState) -> memory_plan.MemoryPlan:
        return plan(subject.model, changed, subject.dataset, on_a_card)

    text = _report(state, planned, memory, on_host)
    if on_a_card:
        text += "\nplanned for a graphics card with bf16, as this machine has none"
    return text


def report_at_start(state: TrainState, foreign: Sequence[str]) -> list[str]:
    """What Start Training's report says of memory: the plan, and whether it fits into what is free on the device once
    ComfyUI has unloaded all else; or why there is none. `foreign` is what other packs have put on the MODEL.
    """
    if _for_the_command:
        return []
    why = _why_not(state, foreign)
    if why:
        return [f"memory is not planned: {why}"]
    subject = state.subject
    device = training_device(subject.model)
    where, free = f" free on {device.name}", device.free
    if device.kind == "cpu":
        where = " free in main memory"
        if state.start.encodes_captions:  # it is there already, and planned
            free += int(subject.clip.patcher.model_size())

    def planned(changed: TrainState) -> memory_plan.MemoryPlan:
        return _plan_once(subject.model, changed)

    try:
        return _report(state, planned, free, device.shares_memory, where).splitlines()
    except ERRORS as error:
        reason = str(error).strip().partition("\n")[0]
        return [f"memory is not planned: {type(error).__name__}: {reason}"]


def room_for_blocks(state: TrainState) -> int:
    """Bytes that the weights of blocks may take on the device, beside a step for which all of them wait in host memory;
    0 where that cannot be planned, for a reason that Start Training's report has.
    """
    device = training_device(state.subject.model)
    if device.shares_memory or _why_not(state, ()):
        return 0
    try:
        planned = _plan_once(state.subject.model, state.with_optimizer(offload="layers", swapped_blocks=0))
    except ERRORS:
        return 0
    return max(0, int(USABLE * device.free) - planned.peak)


def _report(
    state: TrainState, planned: memory_savings.Planner, memory: int, in_main_memory: bool, where: str = ""
) -> str:
    """The plan as text, with the settings that make it fit; `in_main_memory` where the model computes there."""

    def counted(changed: TrainState) -> memory_plan.MemoryPlan:
        if in_main_memory:
            changed = memory_plan.plan_in_main_memory(changed)
        return planned(changed)

    savings = memory_savings.savings_of(state.subject.model.model.diffusion_model, in_main_memory)
    return memory_savings.report(state, counted, memory, savings, where)


def _why_not(state: TrainState, foreign: Sequence[str]) -> str:
    """Why a run's memory is not planned when it begins; empty where it is."""
    if _computes_elsewhere(state):
        return "the text encoder is trained on another device than the model"
    if foreign:  # it may keep what it meets, and would meet tensors without values
        return f"code of others runs in the model: {', '.join(foreign)}"
    if process_group.current().size > 1:
        return "there are several ranks"
    if any(any(image.seen) for image in state.subject.dataset.images):
        return "captions are encoded with their control pictures as they come up"
    return ""


def _plan_once(patcher: Model, state: TrainState) -> memory_plan.MemoryPlan:
    """The plan, or that of the last time in this process where nothing differs that memory depends on."""
    settings = asdict(state.settings.optimizer)
    counting = tuple((name, value) for name, value in settings.items() if name not in _RATES)
    loaded = patcher.model_size(), patcher.model.get_dtype(), patcher.load_device
    key = state.start.digest, counting, repr(state.settings.objective), loaded
    if key not in _plans:
        _plans[key] = plan(patcher, state, state.subject.dataset)
        while len(_plans) > _KEPT:
            _plans.popitem(last=False)
    return _plans[key]


@contextlib.contextmanager
def _on_meta(patcher: Model, terminal: bool, encode: LiveEncoder | None) -> Iterator[Denoiser]:
    """The Denoiser of a MODEL on the meta device; the network's own weights, and the text encoder's, come there when
    they are counted.
    """
    from .network_state import freeze_beside, keep_attributes, switch_to_eval

    patcher = with_zero_terminal_snr(patcher, terminal)
    network = patcher.model.diffusion_model
    sampling = patcher.get_model_object("model_sampling")
    with contextlib.ExitStack() as stack:
        stack.enter_context(on_meta(sampling))
        stack.enter_context(freeze_beside(patcher.model, network))
        for context in (keep_attributes(network), switch_to_eval(network), allow_autograd(network, encode is not None)):
            stack.enter_context(context)
        yield Denoiser(patcher, encode, META)


class _PlannedEncoder(LiveEncoder):
    """A text encoder on the meta device."""

    def __init__(self, clip: Clip, dataset: Dataset) -> None:
        super().__init__(clip, dataset.clip_skip, dataset.weighted_captions)
        self.clip.patcher.load_device = META  # of a clone

    def __call__(self, *captions: Any) -> list[Conditioning]:
        """As of its base; ValueError where the encoder's own code needs numbers."""
        try:
            return super().__call__(*captions)
        except ERRORS as error:
            raise ValueError(
                "This text encoder cannot be planned: its code needs numbers where a plan has shapes alone."
                f" {_MODEL_ALONE}"
            ) from error


def _computes_elsewhere(state: TrainState) -> bool:
    """Whether a text encoder that is trained, or whose words are, is on another device than the model."""
    subject = state.subject
    return bool(state.start.encodes_captions and subject.clip.patcher.load_device != subject.model.load_device)
