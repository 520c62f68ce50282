"""FSDP2 with the bytes of one process: gradients are added in the order of the micro-batches, and measured tensor by
tensor.

Of itself fully_shard (2304.11277) changes three orders: a block's inputs pass through an identity, so that what the
block adds to their gradients is summed before it joins what others add; a reduce-scatter adds as its ring goes; and a
norm over rows is summed by rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from .process_group import ProcessGroup

BUCKET = 16 << 20  # numbers that travel together to be measured


class Sums:
    """The gradients of a step so far, of the rows that this rank holds of the parts that FSDP2 divides."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.totals: dict[int, Tensor] = {}

    def begin(self) -> None:
        """A step begins anew."""
        self.totals.clear()

    def add_up(self, part: nn.Module) -> None:
        """Have a part that fully_shard was called for add its gradients in order. Raises ValueError where this torch
        cannot.
        """
        if not hasattr(part, "set_custom_reduce_scatter"):
            raise ValueError(
                "--shard needs a newer torch, whose FSDP2 has set_custom_reduce_scatter, and this is"
                f" {torch.__version__}."
            )
        own = part._get_fsdp_state()._fsdp_param_group  # type: ignore[operator]
        if own is not None:
            own._register_post_backward_hook = partial(_listening, own)
            part.set_custom_reduce_scatter(_Added(self, id(part)))  # type: ignore[operator]


def _listening(own: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A block's inputs as they are. The first of them to have its gradient says that the block's backward pass is over:
    autograd runs what was made last first, so all of the block before what made its inputs.
    """
    once = iter((own.post_backward,))

    def heard(_: Tensor) -> None:
        for over in once:
            over()

    if torch.is_grad_enabled():
        for one in tree_leaves((args, kwargs)):
            if isinstance(one, Tensor) and one.grad_fn is not None:
                _first(one, heard)  # this block gives its weights back before the one that made its input takes its own
    return args, kwargs


def _first(tensor: Tensor, hook: Callable[[Tensor], None]) -> None:
    """Have a hook hear of a tensor's gradient before those that are there already."""
    there: dict[int, Any] = tensor._backward_hooks if tensor._backward_hooks is not None else {}
    others = dict(there)
    there.clear()
    tensor.register_hook(hook)
    assert tensor._backward_hooks is not None
    tensor._backward_hooks.update(others)


class _Added:
    """In place of FSDP2's reduce-scatter: every rank's gradients of this rank's rows, added to those of the step so far
    in the order of the ranks. It gives the sum, whatever mean it is asked for.
    """

    def __init__(self, sums: Sums, part: int) -> None:
        self.sums, self.part = sums, part

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for what goes in or comes out."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        ranks, before = self.sums.group, self.sums.totals.get(self.part)
        rows = torch.empty_like(input_tensor).view(ranks.size, -1)
        ranks.all_to_all(rows.view(torch.uint8), input_tensor.view(torch.uint8), "gradients")
        if before is not None and before.shape != output_tensor.shape:
            raise RuntimeError(
                "Some weights have gradients in one micro-batch of a step and none in another, and ranks that hold them"
                " together cannot add those: set accumulation so that each rank has one micro-batch a step."
            )
        torch.add(before, rows[0], out=output_tensor) if before is not None else output_tensor.copy_(rows[0])
        for row in rows[1:]:
            output_tensor.add_(row)
        self.sums.totals[self.part] = output_tensor


@dataclass(frozen=True)
class _Place:
    """Where a tensor travels to be measured: its number and name, the rank, and from where to where in what that rank
    gets of each.
    """

    number: int
    name: str
    rank: int
    low: int
    high: int


def norm(
    rows: Mapping[str, Tensor], shapes: Mapping[str, torch.Size], group: ProcessGroup, device: torch.device
) -> Tensor:
    """The norm over whole tensors of which `rows` are what this rank has, as one process measures it: each tensor is
    put together on one of the ranks, which share the work. Tensors that are on no rank count as none.
    """
    found = torch.zeros(len(shapes), device=device)
    for bucket in _in_buckets(shapes, group.size):
        own = torch.zeros(group.size, max(place.high for place in bucket), device=device)
        for place in bucket:
            if place.name in rows:
                own[place.rank, place.low] = 1  # it is there
                own[place.rank, place.low + 1 :][: rows[place.name].numel()] = rows[place.name].reshape(-1)
        every = torch.empty_like(own)
        group.all_to_all(every.view(torch.uint8), own.view(-1).view(torch.uint8), "norms")
        for place in bucket:
            if place.rank == group.rank:
                shape = shapes[place.name]
                whole = (
                    every[:, place.low + 1 : place.high].reshape(-1)[: shape.numel()].view(shape)
                )  # ranks before the last rows are full
                found[place.number] = torch._foreach_norm([whole])[0] if every[:, place.low].any() else -1
    told = torch.empty(group.size, len(shapes), device=device)
    group.all_gather(told.view(torch.uint8), found.view(torch.uint8), "norms")
    each = told.sum(0)  # of each tensor one rank tells something
    return torch.linalg.vector_norm(each[each != -1])


def _in_buckets(shapes: Mapping[str, torch.Size], ranks: int) -> Iterator[list[_Place]]:
    """Where tensors travel, some together; each to the rank that has the least so far."""
    bucket: list[_Place] = []
    ends = [0] * ranks
    for number, (name, shape) in enumerate(shapes.items()):
        rank = ends.index(min(ends))
        end = ends[rank] + 1 + -(-shape[0] // ranks) * (shape.numel() // shape[0])
        bucket.append(_Place(number, name, rank, ends[rank], end))
        ends[rank] = end
        if sum(ends) * ranks > BUCKET:
            yield bucket
            bucket, ends = [], [0] * ranks
    if bucket:
        yield bucket
