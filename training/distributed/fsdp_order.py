"""`--reproducible`: FSDP2 with the bytes of one process.

Gradients are added in the order of the micro-batches, and the norm is measured tensor by tensor.

By itself fully_shard (2304.11277) changes three orders: a block's inputs pass through an identity, so that what the
block adds to their gradients is summed before it joins what others add; a reduce-scatter adds as its ring goes; and a
norm over rows is summed by rank.

The first of these needs private names of torch, all of them in this file and seen with torch 2.13: `unknown_torch` says
whether they are still there, and tests/training/distributed/test_fsdp_order.py fails when they are not.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from .process_group import ProcessGroup

SEEN_WITH = "2.13"  # the version of torch whose private names these are
BUCKET = 16 << 20  # how many numbers are sent together for measuring


def unknown_torch() -> list[str]:
    """The private names that this file needs and this torch does not have, or has with other arguments."""
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

    expected: dict[tuple[Any, str], list[str] | None] = {
        (FSDPModule, "set_custom_reduce_scatter"): ["self", "comm"],
        (FSDPModule, "_get_fsdp_state"): ["self"],
        (FSDPState, "_fsdp_param_group"): None,
        (FSDPParamGroup, "_register_post_backward_hook"): ["self", "args", "kwargs"],
        (FSDPParamGroup, "post_backward"): ["self", "unused"],
        (Tensor, "_backward_hooks"): None,
        (torch, "_foreach_norm"): None,
    }
    unknown = []
    for (owner, name), arguments in expected.items():
        value = getattr(owner, name, None)
        if value is None or (arguments is not None and list(inspect.signature(value).parameters) != arguments):
            unknown.append(f"{owner.__name__}.{name}")
    return unknown


class OrderedReduction:
    """Sums gradients in the order of the ranks and micro-batches, of the rows that this rank has."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.totals: dict[int, Tensor] = {}  # of the step so far, by module

    def prepare(self, module: Any) -> None:
        """Set up a module that fully_shard was called for. Raises ValueError where this torch cannot."""
        unknown = unknown_torch()
        if unknown:
            raise ValueError(
                f"--reproducible uses private names of torch {SEEN_WITH}, and torch {torch.__version__} has not"
                f" {', '.join(unknown)}: run without --reproducible, or use torch {SEEN_WITH}."
            )
        param_group = module._get_fsdp_state()._fsdp_param_group
        if param_group is not None:
            param_group._register_post_backward_hook = partial(_listen, param_group)
            module.set_custom_reduce_scatter(_OrderedReduceScatter(self, id(module)))

    def begin_step(self, parameters: Mapping[str, Tensor]) -> None:
        """Forgets the gradients of the previous step."""
        self.totals.clear()

    def begin_backward(self, parameters: Mapping[str, Tensor]) -> None:
        """Before each backward pass: what it will give is the sum of the step so far."""
        for parameter in parameters.values():
            parameter.grad = None


def _listen(param_group: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Notice the end of a block's backward pass; returns the block's inputs unchanged.

    The first input that gets its gradient marks the end: autograd runs what was made last first, so it runs all of the
    block before what made the block's inputs.
    """
    calls = iter((param_group.post_backward,))

    def end_backward(_: Tensor) -> None:
        for post_backward in calls:
            post_backward()

    if torch.is_grad_enabled():
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                # This block must give up its weights before the one that made its input takes its own.
                register_first(leaf, end_backward)
    return args, kwargs


def register_first(tensor: Tensor, hook: Callable[[Tensor], None]) -> None:
    """Register a gradient hook that runs before those that are there already."""
    hooks: dict[int, Any] = {}
    if tensor._backward_hooks is not None:
        hooks = tensor._backward_hooks
    other_hooks = dict(hooks)
    hooks.clear()
    tensor.register_hook(hook)
    assert tensor._backward_hooks is not None
    tensor._backward_hooks.update(other_hooks)


class _OrderedReduceScatter:
    """Replaces FSDP2's reduce-scatter: adds all ranks' gradients of this rank's rows in the order of the ranks.

    They are added to those of the step so far. It gives the sum, even if it is asked for a mean.
    """

    def __init__(self, reduction: OrderedReduction, module: int) -> None:
        self.reduction, self.module = reduction, module

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocates an input or output buffer."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        ranks, total = self.reduction.group, self.reduction.totals.get(self.module)
        rows = torch.empty_like(input_tensor).view(ranks.size, -1)
        ranks.all_to_all(rows.view(torch.uint8), input_tensor.view(torch.uint8), "gradients")
        if total is None:
            output_tensor.copy_(rows[0])
        elif total.shape == output_tensor.shape:
            torch.add(total, rows[0], out=output_tensor)
        else:
            raise RuntimeError(
                "Some weights have gradients in one micro-batch of a step and none in another, and ranks that share a"
                " model cannot add those: set gradient accumulation so that each rank has one micro-batch a step."
            )
        for row in rows[1:]:
            output_tensor.add_(row)
        self.reduction.totals[self.module] = output_tensor


@dataclass(frozen=True)
class _Slice:
    """Where a tensor is put together to measure it: its number and name, the rank, and its place in what the rank
    receives.
    """

    number: int
    name: str
    rank: int
    start: int
    end: int


def norm(
    rows: Mapping[str, Tensor], shapes: Mapping[str, torch.Size], group: ProcessGroup, device: torch.device
) -> Tensor:
    """The gradient norm as one process measures it, over whole tensors; `rows` are this rank's part of them.

    Each tensor is put together on one of the ranks, which share the work. Tensors that are on no rank are left out.
    """
    norms = torch.zeros(len(shapes), device=device)
    for bucket in _fill_buckets(shapes, group.size):
        local_rows = torch.zeros(group.size, max(place.end for place in bucket), device=device)
        for place in bucket:
            if place.name in rows:
                local_rows[place.rank, place.start] = 1  # it is there
                local_rows[place.rank, place.start + 1 :][: rows[place.name].numel()] = rows[place.name].reshape(-1)
        received = torch.empty_like(local_rows)
        group.all_to_all(received.view(torch.uint8), local_rows.view(-1).view(torch.uint8), "norms")
        for place in bucket:
            if place.rank == group.rank:
                norms[place.number] = _norm_of_one(received, place, shapes[place.name])
    gathered = torch.empty(group.size, len(shapes), device=device)
    group.all_gather(gathered.view(torch.uint8), norms.view(torch.uint8), "norms")
    tensor_norms = gathered.sum(0)  # one rank has measured each tensor, the others have zeros
    return torch.linalg.vector_norm(tensor_norms[tensor_norms != -1])


def _norm_of_one(received: Tensor, place: _Slice, shape: torch.Size) -> Tensor | int:
    """The norm of a tensor, put together from the rows that all ranks sent; -1 if none sent any."""
    if not received[:, place.start].any():
        return -1
    # Only the last ranks may have fewer rows, so that the numbers of all are one piece.
    tensor = received[:, place.start + 1 : place.end].reshape(-1)[: shape.numel()].view(shape)
    return torch._foreach_norm([tensor])[0]


def _fill_buckets(shapes: Mapping[str, torch.Size], ranks: int) -> Iterator[list[_Slice]]:
    """Groups tensors to send together, each to the rank that has the fewest numbers so far."""
    bucket: list[_Slice] = []
    ends = [0] * ranks
    for number, (name, shape) in enumerate(shapes.items()):
        rank = ends.index(min(ends))
        end = ends[rank] + 1 + -(-shape[0] // ranks) * (shape.numel() // shape[0])
        bucket.append(_Slice(number, name, rank, ends[rank], end))
        ends[rank] = end
        if sum(ends) * ranks > BUCKET:
            yield bucket
            bucket, ends = [], [0] * ranks
    if bucket:
        yield bucket
