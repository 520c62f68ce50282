"""Shards a model's weights over the ranks with FSDP2 (torch's fully_shard, after 2304.11277): `--shard`.

A rank keeps its rows of each parameter, and a block is whole on a rank only while it computes.

All ranks must run the same passes at the same time, so each says before a pass what it is about to do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...patches.core.calls import around
from ...patches.core.ledger import open_entry
from ...patches.core.slots import Slot, preserve, slots, swap_all
from ...settings.declaration import raise_errors
from ..memory.checkpointing import blocks
from ..memory.inference_tensors import alias, use_normal_tensors
from ..optimizers.registry import OPTIMIZERS
from .fsdp_order import OrderedReduction
from .process_group import ProcessGroup, SingleProcess, parse_error

if TYPE_CHECKING:
    from ..state import TrainState

NOT_FINITE = "loss is not finite"


class PassMismatchError(RuntimeError):
    """Ranks are about to run different passes through a model that is sharded over them."""


class SumReduction:
    """FSDP2's own gradient reduction: one sum over the ranks, added to the gradients of earlier micro-batches."""

    def prepare(self, module: Any) -> None:
        """Set up a module that fully_shard was called for. Raises ValueError where this torch cannot."""
        if not hasattr(module, "set_force_sum_reduction_for_comms"):
            raise ValueError(
                "--shard needs a newer torch, whose FSDP2 has set_force_sum_reduction_for_comms, and this is"
                f" {torch.__version__}."
            )
        module.set_gradient_divide_factor(1.0)  # a sum; FSDP2 would take the mean
        module.set_force_sum_reduction_for_comms(True)  # gloo only has sums

    def begin_step(self, parameters: Mapping[str, Tensor]) -> None:
        """Forgets the gradients of the previous step."""
        for parameter in parameters.values():
            parameter.grad = None

    def begin_backward(self, parameters: Mapping[str, Tensor]) -> None:
        """Before each backward pass of a step."""


Reduction = SumReduction | OrderedReduction


class Unit(nn.Module):
    """Runs a part of the model for FSDP2.

    FSDP2's hooks and state sit on this module, so that dropping it removes them: torch has no call that undoes
    fully_shard.
    """

    def __init__(self, part: nn.Module, inner: list[nn.Module]) -> None:
        super().__init__()
        self.inner = nn.ModuleList(inner)  # FSDP2 looks here for the units inside this one
        self.part = part

    def call(self, _: nn.Module, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What goes around the part's forward."""
        return self(inner, *args, **kwargs)

    def forward(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return inner(*args, **kwargs)


@contextmanager
def shard(
    module: nn.Module, device: torch.device, group: SingleProcess, compute_dtype: torch.dtype | None = None
) -> Iterator[Reduction]:
    """A context in which each rank keeps only its rows of every parameter. Afterwards attributes, hooks and parameters
    are as they were.

    Args:
        module: the model. Its parameters may be on another device before: they are moved and sharded block by block.
        device: where the rows lie.
        group: the processes.
        compute_dtype: what blocks compute in if trained parameters have another type.

    Yields:
        How their gradients are summed.

    Raises:
        ValueError: for weights that cannot be sharded.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    assert isinstance(group, ProcessGroup)
    _check_weights(module)
    reduction: Reduction = OrderedReduction(group) if group.reproducible else SumReduction()
    reduce_dtype = None
    if compute_dtype is not None:
        reduce_dtype = torch.float32
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    mesh = init_device_mesh(device.type, (group.size,))
    ignored = {parameter for parameter in module.parameters() if parameter.ndim == 0}
    units: list[nn.Module] = []
    with open_entry(module, "FSDP2") as stack:
        stack.enter_context(preserve(module))
        stack.enter_context(swap_all(slots(module.modules()), _detach))
        for part in blocks(module):
            unit = Unit(part, [])
            # Weights are given up after each pass, also by the outermost part: they may change before the next.
            fully_shard(unit, mesh=mesh, mp_policy=policy, ignored_params=ignored, reshard_after_forward=True)
            reduction.prepare(unit)
            stack.enter_context(around(part, "sharding", unit.call))
            units.append(unit)
            ignored |= set(part.parameters())  # sharded now
        root = Unit(module, units)
        fully_shard(root, mesh=mesh, mp_policy=policy, ignored_params=ignored, reshard_after_forward=True)
        reduction.prepare(root)
        stack.enter_context(around(module, "sharding", root.call))
        stack.enter_context(around(module, "announcement", partial(_announce, group)))
        yield reduction


def _announce(group: ProcessGroup, _: nn.Module, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The model's forward pass, announced to the other ranks first."""
    check_same_pass(group, "forward")
    return inner(*args, **kwargs)


def _detach(slot: Slot) -> Tensor | None:
    """In place of buffers: FSDP2 moves a buffer by setting its `.data`, and the module's own must stay."""
    if slot.table is slot.module._buffers:
        return slot.tensor.detach()
    return None


def check_same_pass(group: ProcessGroup, doing: str) -> list[str]:
    """Tell the other ranks which pass comes next here, and return what each said: this, or NOT_FINITE.

    Raises PassMismatchError on every rank if they differ, RemoteRankError if one has failed.
    """
    passes = group.all_gather_text(doing)
    for rank, text in enumerate(passes):
        if "\n" in text:
            group.error_shared = True
            raise parse_error(rank, text)
    if len(set(passes) - {NOT_FINITE}) > 1:
        ranks = ", ".join(f"rank {rank} {text}" for rank, text in enumerate(passes))
        raise PassMismatchError(
            f"Ranks that share a model must run the same passes, and they do not ({ranks}). Their images have different"
            " sizes, or their prompts different lengths: use batch size 1 and one data set, or run without --shard."
        )
    return passes


@contextmanager
def shard_trainable(
    module: nn.Module,
    whole: Mapping[str, Tensor],
    live: Mapping[str, Tensor],
    device: torch.device,
    group: SingleProcess,
) -> Iterator[tuple[dict[str, nn.Parameter], Reduction]]:
    """A context in which a model computes with whole weights that are trained, sharded as in `shard`.

    Args:
        module: the model.
        whole: the weights as the run begins, by name, float32 on the CPU.
        live: this rank's rows of them as they are now, which become the memory that the model computes with.
        device: where the rows lie.
        group: the processes.

    Yields:
        (the parameters by name, which receive the gradients; how these are summed).
    """
    dtypes = {parameter.dtype for parameter in module.parameters()}
    if len(dtypes) > 1:
        raise ValueError(
            f"--shard trains whole weights of one type, and the model has {', '.join(sorted(map(str, dtypes)))}."
        )
    compute_dtype: torch.dtype | None = dtypes.pop()
    if compute_dtype == torch.float32:
        compute_dtype = None
    masters = {name: nn.Parameter(alias(tensor)) for name, tensor in whole.items()}
    with use_normal_tensors(module, masters), shard(module, device, group, compute_dtype) as reduction:
        parameters = dict(module.named_parameters())
        with torch.no_grad():
            for name, tensor in live.items():
                rows = parameters[name].detach().to_local()  # type: ignore[attr-defined]
                tensor.data = rows.copy_(tensor)
        yield {name: parameters[name] for name in whole}, reduction


def check(state: TrainState, group: SingleProcess) -> None:
    """Raise ValueError with every setting of a run that does not work with --shard."""
    optimizer = state.settings.optimizer
    errors = []
    if optimizer.accumulation % group.size:
        errors.append(
            f"gradient accumulation {optimizer.accumulation} is not a multiple of {group.size} ranks, which must all"
            " run the same passes"
        )
    if optimizer.offload in ("activations", "layers"):
        errors.append(
            f"offload to CPU memory is {optimizer.offload}, which moves what is sharded already: set it to none or"
            " optimizer"
        )
    if state.start.adapter.full_weights:
        errors += _errors_of_full_training(state, group)
    raise_errors("--shard", errors)


def _errors_of_full_training(state: TrainState, group: SingleProcess) -> list[str]:
    optimizer, ema = state.settings.optimizer, state.start.ema
    errors = []
    if not optimizer.record.element_wise:  # a rank steps its rows alone
        names = ", ".join(record.name for record in OPTIMIZERS if record.element_wise)
        errors.append(f"optimizer {optimizer.optimizer} needs whole tensors: use one of {names}")
    if optimizer.precision in ("fp16", "full-bf16"):
        errors.append(f"training precision {optimizer.precision} is for weights that a rank holds whole: use bf16")
    if state.start.adapter.text_encoder:
        errors.append("the text encoder is not divided: switch train text encoder off in Adapter Settings")
    if ema is not None and ema.snapshots:
        errors.append(
            f"snapshot every N steps in EMA Settings is {ema.snapshots}, and snapshots need whole weights: set it to 0"
        )
    if state.settings.objective.compares_pairs:
        errors.append(
            f"loss function {state.settings.objective.loss} needs the model without what is trained: use adapter type"
            " lora"
        )
    if state.settings.objective.prior == "output-preservation":
        errors.append(
            "prior preservation output-preservation needs the model without what is trained: use regularization"
        )
    if state.trained and not any(
        tensor.ndim > 0 and len(torch.chunk(tensor, group.size)) == group.size for tensor in state.trained.values()
    ):
        errors.append(f"no trained tensor has rows for {group.size} ranks: start fewer")
    for name, tensor in state.trained.items():
        if not tensor.ndim:
            errors.append(f"{name} is a single number, which cannot be divided")
    return errors


def _check_weights(module: nn.Module) -> None:
    quantized = []
    for name, parameter in module.named_parameters():
        if type(parameter) not in (Tensor, nn.Parameter) or not parameter.is_floating_point():
            quantized.append(name)
    if quantized:
        raise ValueError(
            f"--shard divides plain weights among ranks, and {len(quantized)} are quantized ({quantized[0]}): run"
            " without --shard, or use a model that is not quantized."
        )
