"""A stack applied at the activations, y = f(x) + h(x), touching no weight: one fused adapter a module, whatever the number of LoRAs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .schedule import Clock, Schedule
from .stack import Piece, fuse

_CONV: dict[int, Any] = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}


def supports(module: nn.Module) -> bool:
    """Whether a module's output is linear in its weight in a way that is known here: Linear, or a convolution."""
    return is_linear(module) or isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d))


def is_linear(module: nn.Module) -> bool:
    """Linear, or a host's quantised stand-in for it."""
    return isinstance(module, nn.Linear) or (hasattr(module, "in_features") and hasattr(module, "out_features"))


class Wrapped:
    """An adapter around one module's forward, until `remove`.

    An instance's `forward`, not a forward hook: torch.compile looks for a changed forward, and misses hooks that come and go. Another
    wrapper may have been put around this one and taken off in any order; then what remains of this one passes everything through.
    """

    def __init__(self, module: nn.Module, adapter: Bypass):
        self.module, self.adapter = module, adapter
        self._previous = _without_remains(module.__dict__.get("forward"))
        inner = self._previous if self._previous is not None else type(module).forward.__get__(module)
        self._state = state = {"adapter": adapter}
        self._key = key = str(id(module))

        def forward(*args: Any, **kwargs: Any) -> Tensor:
            output = inner(*args, **kwargs)
            adapter = state["adapter"]
            if adapter is None:
                return output
            x = args[0] if args else next(iter(kwargs.values()))
            return adapter.added(module, x, output, _COMPILED[key]) if adapter.compiled else adapter(module, x, output)

        if adapter.compiled:
            _COMPILED[key] = adapter.parts
        forward.graft_state, forward.graft_inner = state, self._previous  # type: ignore[attr-defined]
        self._forward = forward
        module.forward = forward

    def remove(self) -> None:
        """Put the forward back that was there before."""
        self._state["adapter"] = None  # type: ignore[assignment]
        if _COMPILED.get(self._key) is self.adapter.parts:
            del _COMPILED[self._key]
        if self.module.__dict__.get("forward") is not self._forward:
            return
        if self._previous is None:
            del self.module.forward
        else:
            self.module.forward = self._previous


def _without_remains(forward: Any) -> Any:
    """An instance's forward without removed wrappers of ours that another pack's wrapper had kept."""
    while getattr(forward, "graft_state", {"adapter": True})["adapter"] is None:
        forward = forward.graft_inner
    return forward


class Bypass:
    """What is added to one module's output: the product of all pieces of its weight and the differences of its bias.

    Factors are cast once to the activations' type and device. `compiled` gives every adapter the same form, so that torch.compile sees no
    difference between them: a rank that is a multiple of 8 and marked as dynamic, and always a bias. Scheduled pieces take their
    multipliers from `clock`.
    """

    def __init__(
        self, weight: Sequence[Piece], bias: Sequence[Piece], shape: Sequence[int], groups: int = 1, clock: Clock | None = None,
        compiled: bool = False,
    ):  # fmt: skip
        self.clock = clock or Clock()
        with torch.inference_mode(False), torch.no_grad():
            up, down, places, diffs = self._fused(weight, shape, groups)
            if compiled and groups == 1:
                more = max(8, -(-up.shape[1] // 8) * 8) - up.shape[1]
                up, down, places = F.pad(up, (0, more)), F.pad(down, (0, 0, 0, more)), places + [0] * more
            biases = [(self.clock.place(schedule), fuse(of, (shape[0],)).diff) for schedule, of in _by_schedule(bias)]
            if compiled and not biases:
                biases = [(0, torch.zeros(shape[0]))]
            self.parts = Parts(
                down.reshape(-1, *shape[1:]) if up.shape[1] else None,
                up.reshape(*up.shape, *(1,) * (len(shape) - 2)) if up.shape[1] else None,
                torch.tensor(places) if any(places) else None,
                tuple(diffs),
                tuple((place, diff) for place, diff in biases if diff is not None),
            )
        self.compiled = compiled
        self._cast: tuple[tuple[torch.dtype, torch.device], Parts] | None = None

    def _fused(self, pieces: Sequence[Piece], shape: Sequence[int], groups: int) -> tuple[Tensor, Tensor, list[int], list]:
        """(up, down, the place of every component's multiplier, (place, full difference) of what has no factors)."""
        ups, downs, places, diffs = [], [], [], []
        for schedule, of in _by_schedule(pieces):
            fused, place = fuse(of, shape), self.clock.place(schedule)
            diff = fused.diff
            if groups > 1 and fused.up.shape[1]:  # the factors of a grouped convolution mix groups: their product is the small thing here
                product = (fused.up @ fused.down.float()).reshape(tuple(shape))
                diff = product if diff is None else diff + product
            else:
                ups.append(fused.up)
                downs.append(fused.down.float())
                places += [place] * fused.up.shape[1]
            if diff is not None:
                diffs.append((place, diff))
        columns = torch.Size(shape[1:]).numel()
        return torch.cat([torch.zeros(shape[0], 0), *ups], 1), torch.cat([torch.zeros(0, columns), *downs], 0), places, diffs

    def __call__(self, module: nn.Module, x: Tensor, output: Tensor) -> Tensor:
        key = (x.dtype, x.device)
        if self._cast is None or self._cast[0] != key:
            with torch.inference_mode(False), torch.no_grad():
                self._cast = (key, self.parts.to(x.dtype, x.device))
        return self.added(module, x, output, self._cast[1])

    def prepare(self, dtype: torch.dtype, device: torch.device) -> None:
        """Cast to the activations' type, and move to their device, before the first call."""
        with torch.inference_mode(False), torch.no_grad():
            self.parts = self.parts.to(dtype, device)
        if self.compiled and self.parts.down is not None:
            torch._dynamo.mark_dynamic(self.parts.down, 0)
            torch._dynamo.mark_dynamic(self.parts.up, 1)

    def added(self, module: nn.Module, x: Tensor, output: Tensor, parts: Parts) -> Tensor:
        """The module's output for x with this adapter's change, made by its parts."""
        down, up, places, diffs, biases = parts
        scheduled = places is not None or any(place for place, _ in (*diffs, *biases))
        gains = self.clock.values.to(x.device, x.dtype) if scheduled else None
        if down is not None and up is not None:
            down, up = down.to(x.device, x.dtype), up.to(x.device, x.dtype)
            hidden = F.linear(x, down) if down.ndim == 2 else convolve(module, x, down)
            if places is not None and gains is not None:
                hidden = hidden * gains[places].view(-1, *(1,) * (down.ndim - 2))
            output = _added(output, hidden, up)
        for place, diff in diffs:
            diff = diff.to(x.device, x.dtype)
            change = F.linear(x, diff) if diff.ndim == 2 else convolve(module, x, diff, getattr(module, "groups", 1))
            output = output + (change if not place or gains is None else change * gains[place])
        for place, bias in biases:
            change = bias.to(x.device, x.dtype).view(-1, *(1,) * (output.ndim - 2 if _is_conv(module) else 0))
            output = output + (change if not place or gains is None else change * gains[place])
        return output


class Parts(NamedTuple):
    """What an adapter multiplies with: factors, the place of each component's multiplier, (place, difference) of weight and bias."""

    down: Tensor | None
    up: Tensor | None
    places: Tensor | None
    diffs: tuple[tuple[int, Tensor], ...]
    biases: tuple[tuple[int, Tensor], ...]

    def to(self, dtype: torch.dtype, device: torch.device) -> Parts:
        """These parts in another type, on another device."""
        return Parts(
            None if self.down is None else self.down.to(device, dtype),
            None if self.up is None else self.up.to(device, dtype),
            None if self.places is None else self.places.to(device),
            tuple((place, diff.to(device, dtype)) for place, diff in self.diffs),
            tuple((place, bias.to(device, dtype)) for place, bias in self.biases),
        )


# The parts of attached adapters under torch.compile, by module. What hangs on a module has fixed shapes for torch.compile; what is found
# here may have a dynamic one.
_COMPILED: dict[str, Parts] = {}


def _by_schedule(pieces: Sequence[Piece]) -> list[tuple[Schedule | None, list[Piece]]]:
    groups: dict[Schedule | None, list[Piece]] = {}
    for piece in pieces:
        groups.setdefault(piece.schedule, []).append(piece)
    return list(groups.items())


def _added(output: Tensor, hidden: Tensor, up: Tensor) -> Tensor:
    """output + up of hidden, in one pass and one rounding where the types allow it."""
    if up.ndim > 2:
        return output + _CONV[up.ndim](hidden, up)
    if output.dtype != hidden.dtype or output.ndim < 2:
        return output + F.linear(hidden, up)
    return torch.addmm(output.flatten(0, -2), hidden.flatten(0, -2), up.t()).view(output.shape)


def convolve(module: Any, x: Tensor, weight: Tensor, groups: int = 1) -> Tensor:
    """A convolution with another weight in place of the module's (no bias), with its stride, dilation and kind of padding."""
    padding = module.padding
    if module.padding_mode != "zeros":
        x, padding = F.pad(x, module._reversed_padding_repeated_twice, mode=module.padding_mode), 0
    return _CONV[weight.ndim](x, weight, None, module.stride, padding, module.dilation, groups)


def _is_conv(module: nn.Module) -> bool:
    return isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d))
