"""Weights divided among ranks with FSDP2 (torch's fully_shard, after 2304.11277): of each parameter a rank holds its
part, and a block is whole on a rank only while it computes.

All ranks must run the same passes at the same time, so they say before each what they are about to do: who does
something else is named.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..memory.checkpointing import blocks
from ..memory.inference_tensors import alias, as_normal_tensors
from ..optimizers.registry import OPTIMIZERS
from .fsdp_order import Sums, norm
from .process_group import ProcessGroup, SingleProcess, parse_error

if TYPE_CHECKING:
    from ..state import TrainState

NOT_FINITE = "loss is not finite"


class PassMismatchError(RuntimeError):
    """Ranks are about to run different passes through a model that they hold together."""


@contextmanager
def sharded(
    module: nn.Module, device: torch.device, group: SingleProcess, kind: torch.dtype | None = None
) -> Iterator[Sums]:
    """For the block each rank of the group holds a part of every parameter of `module`, on `device`: its
    `local_rows`. Gives what adds their gradients.

    Parameters may lie elsewhere before: a block at a time comes over and is divided. `kind` is what blocks compute in,
    where trained parameters have another type. Afterwards classes, attributes, hooks and parameters are as they were.
    Raises ValueError for weights that cannot be divided.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    assert isinstance(group, ProcessGroup)
    _check(module)
    sums = Sums(group)
    policy = MixedPrecisionPolicy(
        param_dtype=kind, reduce_dtype=None if kind is None else torch.float32, cast_forward_inputs=False
    )
    scalars = {p for p in module.parameters() if p.ndim == 0}
    mesh = init_device_mesh(device.type, (group.size,))
    before = [_Before(part) for part in module.modules()]
    try:
        for part in module.modules():
            for name, buffer in part._buffers.items():
                part._buffers[name] = (
                    None if buffer is None else buffer.detach()
                )  # moved by its `.data`, so not the module's own
        for part in (*blocks(module), module):
            # The outermost part too gives its weights back after a pass: they may change before the next.
            fully_shard(part, mesh=mesh, mp_policy=policy, ignored_params=scalars, reshard_after_forward=True)
            sums.add_up(part)
        module.register_forward_pre_hook(partial(_announced, group), prepend=True)
        yield sums
    finally:
        for one in before:
            one.restore()


def _announced(group: ProcessGroup, *_: Any) -> None:
    check_same_pass(group, "forward")


def check_same_pass(group: ProcessGroup, doing: str) -> list[str]:
    """What the ranks are about to do, which must be this or NOT_FINITE. Raises PassMismatchError on every rank where it
    is not, RemoteRankError when one has failed.
    """
    said = group.all_gather_text(doing)
    for rank, text in enumerate(said):
        if "\n" in text:
            group.error_shared = True
            raise parse_error(rank, text)
    if len(set(said) - {NOT_FINITE}) > 1:
        each = ", ".join(f"rank {rank} {word}" for rank, word in enumerate(said))
        raise PassMismatchError(
            f"Ranks that hold a model together must run the same passes, and they do not ({each}). Their pictures are"
            " of different sizes or have prompts of different lengths: use batch_size 1 and one data set, or run"
            " without --shard."
        )
    return said


def local_rows(tensor: Tensor, group: SingleProcess) -> Tensor:
    """The part of a tensor that this rank holds: equal numbers of rows, the last ranks fewer or none (torch.chunk)."""
    parts = torch.chunk(tensor, group.size)
    if group.rank < len(parts):
        return parts[group.rank]
    return tensor[:0]


@contextmanager
def sharded_trainable(
    module: nn.Module,
    whole: Mapping[str, Tensor],
    live: Mapping[str, Tensor],
    device: torch.device,
    group: SingleProcess,
) -> Iterator[tuple[dict[str, nn.Parameter], Sums]]:
    """For the block `module` computes with whole weights that are trained, divided as `sharded` says; gives them by
    name, and what adds their gradients.

    `whole` are the weights as the run begins, on the CPU and float32, `live` this rank's rows of them as they are now:
    from here on they are the memory that the model computes with. Gradients arrive in the parameters that are given,
    summed over the ranks.
    """
    kinds = {p.dtype for p in module.parameters()}
    if len(kinds) > 1:
        raise ValueError(
            f"--shard trains whole weights of one type, and the model has {', '.join(sorted(map(str, kinds)))}."
        )
    (kind,) = kinds
    masters = {name: nn.Parameter(alias(tensor)) for name, tensor in whole.items()}
    with (
        as_normal_tensors(module, masters),
        sharded(module, device, group, None if kind == torch.float32 else kind) as sums,
    ):
        found = dict(module.named_parameters())
        with torch.no_grad():
            for name, tensor in live.items():
                rows_held = found[name].detach().to_local()  # type: ignore[attr-defined]
                tensor.data = rows_held.copy_(tensor)
        yield {name: found[name] for name in whole}, sums


def check(state: TrainState, group: SingleProcess) -> None:
    """Raise ValueError with everything in a run's settings that cannot be done on weights that ranks hold together."""
    adapter, optimizer, ema, wrong = state.start.adapter, state.settings.optimizer, state.start.ema, []
    if optimizer.accumulation % group.size:
        wrong.append(
            f"accumulation {optimizer.accumulation} is no multiple of {group.size} ranks, which must all run the same"
            " passes"
        )
    if optimizer.offload in ("activations", "layers"):
        wrong.append(f"offload {optimizer.offload} moves what the ranks divide already: set it to none or optimizer")
    if adapter.kind == "full":
        if not OPTIMIZERS.get(optimizer.optimizer).element_wise:
            usable = ", ".join(record.name for record in OPTIMIZERS if record.element_wise)
            wrong.append(f"optimizer {optimizer.optimizer} needs whole tensors: use one of {usable}")
        if optimizer.precision in ("fp16", "full-bf16"):
            wrong.append(f"precision {optimizer.precision} is for weights that a rank holds whole: use bf16")
        if adapter.text_encoder:
            wrong.append("the text encoder is not divided: set GraftAdapter's text_encoder to off")
        if ema is not None and ema.snapshots:
            wrong.append(f"GraftEMA's snapshots (every {ema.snapshots} steps) need whole weights: set them to 0")
        if state.settings.objective.prior == "output-preservation":
            wrong.append("prior output-preservation needs the model without what is trained: use regularisation")
        some = [
            tensor
            for tensor in state.trained.values()
            if tensor.ndim and len(torch.chunk(tensor, group.size)) == group.size
        ]
        if state.trained and not some:
            wrong.append(f"no trained tensor has rows for {group.size} ranks: start fewer")
        wrong += [
            f"{name} is a single number, which cannot be divided"
            for name, tensor in state.trained.items()
            if not tensor.ndim
        ]
    if wrong:
        raise ValueError("--shard: " + "; ".join(wrong) + ".")


class TensorPlacement:
    """Which part of the trained tensors each rank has; this one: all of each."""

    is_sharded = False  # whether it takes every rank to put the tensors together

    def local(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's part of whole tensors, by `<name>` or `<slot>/<name>`."""
        return dict(tensors)

    def gather(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole tensors from the parts of all ranks, on the CPU; with several ranks on the first one, and nothing on
        the others.
        """
        return dict(tensors)


class Replicated(TensorPlacement):
    """Every rank has the whole trained tensors."""


class RowSharded(TensorPlacement):
    """Trained whole weights as the ranks hold them: rows of each."""

    is_sharded = True

    def __init__(self, trained: Mapping[str, Tensor], group: ProcessGroup) -> None:
        self.group, self.shapes = group, {name: tensor.shape for name, tensor in trained.items()}

    def _shape(self, key: str, tensor: Tensor) -> torch.Size | None:
        """The whole shape of what is divided, None of what every rank has (numbers of an optimiser)."""
        slot, _, name = key.rpartition("/")
        shape = self.shapes.get(name)
        if shape is not None and slot != "scalars" and tensor.ndim == len(shape):
            return shape
        return None

    def is_row_sharded(self, key: str, tensor: Tensor) -> bool:
        """Whether a tensor, by `<name>` or `<slot>/<name>`, is one of rows."""
        return self._shape(key, tensor) is not None

    def local(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        held = {
            key: tensor if self._shape(key, tensor) is None else local_rows(tensor, self.group)
            for key, tensor in tensors.items()
        }
        return {key: tensor for key, tensor in held.items() if tensor.numel()}

    def gather(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        plan = [
            [key, self._shape(key, t) is not None, str(t.dtype).removeprefix("torch.")] for key, t in tensors.items()
        ]
        out: dict[str, Tensor] = {}
        for key, divided_, kind in self.group.broadcast(plan, {})[0]:  # the first rank has rows of everything
            if not divided_:
                out[key] = tensors.get(key, torch.empty(0))
                continue
            shape = self.shapes[key.rpartition("/")[2]]
            most = -(-shape[0] // self.group.size) * (shape.numel() // shape[0])
            own, every = (
                torch.zeros(most, dtype=getattr(torch, kind)),
                torch.empty(self.group.size, most, dtype=getattr(torch, kind)),
            )
            if key in tensors:
                own[: tensors[key].numel()] = tensors[key].reshape(-1)
            self.group.all_gather(every.view(torch.uint8), own.view(torch.uint8), "state")
            if self.group.is_main_process:
                out[key] = every.view(-1)[: shape.numel()].view(shape).clone()
        if self.group.is_main_process:
            return out
        return {}

    def norm(self, gradients: Mapping[str, Tensor], device: torch.device) -> Tensor:
        """The norm over whole tensors of which `gradients` are what this rank holds, as one process measures it."""
        return norm(gradients, self.shapes, self.group, device)


def placement(state: TrainState, group: SingleProcess) -> TensorPlacement:
    """How a rank holds what a run trains."""
    if isinstance(group, ProcessGroup) and group.shard and state.start.adapter.kind == "full":
        return RowSharded(state.trained, group)
    return Replicated()


def _check(module: nn.Module) -> None:
    strange = [
        name
        for name, p in module.named_parameters()
        if type(p) not in (Tensor, nn.Parameter) or not p.is_floating_point()
    ]
    if strange:
        raise ValueError(
            f"--shard divides plain weights among ranks, and {len(strange)} are quantised ({strange[0]}): run without"
            " --shard, or use a model that is not quantised."
        )


class _Before:
    """What a module was: its class, its attributes, and what is in its dictionaries (parameters, buffers, hooks)."""

    def __init__(self, part: nn.Module) -> None:
        self.part, self.kind = part, type(part)
        self.names = set(part.__dict__)
        self.held: dict[str, tuple[Any, Mapping[Any, Any]]] = {
            name: (value, dict(value))
            for name, value in part.__dict__.items()
            if isinstance(value, dict) and name.startswith("_")
        }

    def restore(self) -> None:
        from torch.distributed._composable_state import (
            _module_state_mapping,
        )  # the only way to have fully_shard forget a module

        _module_state_mapping.pop(self.part, None)
        self.part.__class__ = self.kind
        for name in set(self.part.__dict__) - self.names:
            del self.part.__dict__[name]
        for name, (value, content) in self.held.items():
            value.clear()
            value.update(content)
            self.part.__dict__[name] = value
