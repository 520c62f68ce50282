"""Applies a LoRA stack at the activations, y = f(x) + h(x), without changing any weight.

There is one adapter per module, however many LoRAs there are. Layers that do more than add (DoRA, rotations, IA3 …)
become maps of the module's input and output.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..adapters.channel_maps import Map, apply_maps, combine_scales
from ..core.calls import around
from ..core.handle import Handle
from ..models.convolution import convolve, convolve_pointwise
from ..models.layers import bias_of, is_conv, is_linear, shape_of, weight_of
from .compose import Kron, compose, make_uniform
from .fuse import Patch
from .strength_schedule import Clock


def supports_bypass(module: nn.Module) -> bool:
    """Whether a module can be patched at the activations: Linear or a convolution, whose output is linear in the
    weight.
    """
    return is_linear(module) or is_conv(module)


def put_bypass(module: nn.Module, adapter: Bypass) -> Handle:
    """Put an adapter around a module's forward, until the handle leaves.

    Args:
        module: a Linear or a convolution.
        adapter: what it adds.

    Raises:
        ValueError: where the module runs compiled: its own forward would be left out.
    """
    key = str(id(module))
    if adapter.compiled:
        _COMPILED[key] = adapter.parts

    def call(module: nn.Module, inner: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        if not adapter.is_on:
            return inner(*args, **kwargs)
        name = None if args else next(iter(kwargs))
        x = args[0] if name is None else kwargs[name]

        def own(x: Tensor) -> Tensor:
            return inner(x, *args[1:], **kwargs) if name is None else inner(**{**kwargs, name: x})

        if adapter.compiled:
            return adapter.run(module, x, own, _COMPILED[key])
        return adapter(module, x, own)

    handle = around(module, "bypass", call)

    def leave() -> None:
        handle.leave()
        if _COMPILED.get(key) is adapter.parts:
            del _COMPILED[key]

    return Handle(leave)


class Bypass:
    """All patches of a module's weight and bias as one adapter at its activations.

    `module` is read if a patch needs its weight (DoRA's norms) or its bias, in the type and on the device of the
    activations (`compute`; float32 on the CPU if unknown). Factors are cast once to the activations' type and device.
    Scheduled patches take their multipliers from `clock`.

    With `compiled` every adapter has the same structure, so torch.compile sees no difference between them: one input
    scale, one output scale, factors whose rank is a multiple of 8 and marked as dynamic, and always a bias.
    """

    def __init__(
        self,
        module: nn.Module,
        weight: Sequence[Patch],
        bias: Sequence[Patch] = (),
        clock: Clock | None = None,
        compiled: bool = False,
        compute: tuple[torch.dtype, torch.device] | None = None,
    ):
        self.clock, self.compiled = clock or Clock(), compiled
        self.is_on = True  # switched off, it passes everything through and stays in its place
        self.schedules = {patch.changes for patch in (*weight, *bias) if patch.changes is not None}
        self.clock.users.add(self)
        self._cast: tuple[tuple[torch.dtype, torch.device], Parts] | None = None
        dtype_and_device = compute or (torch.float32, torch.device("cpu"))
        shape, groups = shape_of(module), getattr(module, "groups", 1)
        with torch.inference_mode(False), torch.no_grad():
            read_weight = functools.partial(weight_of, module, *dtype_and_device)
            composed = compose(weight, shape, read_weight, self.clock.index_of, groups)
            if compiled:
                composed = make_uniform(composed, weight, read_weight, self.clock.index_of, groups)
            composed.add_bias(bias, lambda: bias_of(module, *dtype_and_device), self.clock.index_of)
            up, down, places = composed.join_pairs()
            if compiled and groups == 1:
                padding = max(8, -(-up.shape[1] // 8) * 8) - up.shape[1]
                up, down, places = F.pad(up, (0, padding)), F.pad(down, (0, 0, 0, padding)), places + [0] * padding
            biases = composed.biases or ([(0, torch.zeros(shape[0]))] if compiled else [])
            inputs, outputs = composed.inputs, composed.outputs
            if compiled:
                inputs = (combine_scales(inputs, shape[1] * groups),)
                outputs = (combine_scales(outputs, shape[0]),)
            self.parts = Parts(
                down.reshape(-1, *shape[1:]) if up.shape[1] else None,
                up.reshape(*up.shape, *(1,) * (len(shape) - 2)) if up.shape[1] else None,
                torch.tensor(places) if any(places) else None,
                tuple(composed.diffs),
                tuple(composed.krons),
                tuple(biases),
                inputs,
                outputs,
                composed.own,
            )
        if compute is not None:
            self._prepare(*compute)

    def __call__(self, module: nn.Module, x: Tensor, own: Callable[[Tensor], Tensor]) -> Tensor:
        """The module's output for x with this adapter applied; `own` computes the output without it."""
        key = (x.dtype, x.device)
        if self._cast is None or self._cast[0] != key:
            with torch.inference_mode(False), torch.no_grad():
                self._cast = (key, self.parts.to(x.dtype, x.device))
        return self.run(module, x, own, self._cast[1])

    def _prepare(self, dtype: torch.dtype, device: torch.device) -> None:
        """Cast to the activations' type and move to their device before the first call."""
        with torch.inference_mode(False), torch.no_grad():
            self.parts = self.parts.to(dtype, device)
        if self.compiled and self.parts.down is not None:
            torch._dynamo.mark_dynamic(self.parts.down, 0)
            torch._dynamo.mark_dynamic(self.parts.up, 1)
            if self.parts.places is not None:
                torch._dynamo.mark_dynamic(self.parts.places, 0)

    def run(self, module: nn.Module, x: Tensor, own: Callable[[Tensor], Tensor], parts: Parts) -> Tensor:
        """`__call__` with parts that are in the type and on the device of x:

            y = outputs(f(inputs(x))) + sum of multiplier * (diff or kron) @ x + up @ (multipliers * (down @ x)) +
            biases

        Args:
            module: the module, for the stride and padding of a convolution.
            x: its input (…, in), or (B, in, h, w) of a convolution.
            own: f, the module's own output for an input.
            parts: the tensors.

        Returns:
            The output, of the type of x.
        """
        if not parts.own:
            return self._added(module, x, None, parts)
        channels = -1 if is_linear(module) else 1
        output = own(apply_maps(parts.inputs, x.float(), channels).to(x.dtype) if parts.inputs else x)
        if not parts.outputs:
            return self._added(module, x, output, parts)
        return self._added(module, x, apply_maps(parts.outputs, output.float(), channels), parts).to(output.dtype)

    def _added(self, module: nn.Module, x: Tensor, output: Tensor | None, parts: Parts) -> Tensor:
        down, up, places = parts.down, parts.up, parts.places
        scheduled = places is not None or any(place for place, _ in (*parts.diffs, *parts.krons, *parts.biases))
        gains = self.clock.values.to(x.device, x.dtype) if scheduled else None
        for place, diff in parts.diffs:
            diff = diff.to(x.device, x.dtype)
            if diff.ndim == 2:
                change = F.linear(x, diff)
            else:
                change = convolve(module, x, diff, getattr(module, "groups", 1), self.compiled)
            output = _add_change(output, change, place, gains)
        for place, kron in parts.krons:
            output = _add_change(output, kron.to(x.dtype, x.device)(x), place, gains)
        assert output is not None  # if the module's own output is not used, a difference replaces it
        if down is not None and up is not None:
            down, up = down.to(x.device, x.dtype), up.to(x.device, x.dtype)
            hidden = F.linear(x, down) if down.ndim == 2 else convolve(module, x, down, compiled=self.compiled)
            if places is not None and gains is not None:
                hidden = hidden * gains[places].view(-1, *(1,) * (down.ndim - 2))
            output = _add_product(output, hidden, up, self.compiled)
        for place, bias in parts.biases:
            change = bias.to(x.device, x.dtype)
            if is_conv(module):
                change = change.view(-1, *(1,) * (output.ndim - 2))
            output = _add_change(output, change, place, gains)
        return output


class Parts(NamedTuple):
    """The tensors that an adapter computes with.

    - `down`, `up`: the factors, None without any; `places`: the multiplier index of each component, None if all are
      constant.
    - `diffs`: (multiplier index, difference) of the weight; `krons`: (multiplier index, Kronecker product); `biases`:
      (multiplier index, difference) of the bias.
    - `inputs`, `outputs`: maps of the module's input and output; `own`: whether any of the module's own output is used.
    """

    down: Tensor | None
    up: Tensor | None
    places: Tensor | None
    diffs: tuple[tuple[int, Tensor], ...]
    krons: tuple[tuple[int, Kron], ...]
    biases: tuple[tuple[int, Tensor], ...]
    inputs: tuple[Map, ...]
    outputs: tuple[Map, ...]
    own: bool

    def to(self, dtype: torch.dtype, device: torch.device) -> Parts:
        """These parts in another type and on another device. Maps stay float32, so their output is rounded once."""
        return Parts(
            None if self.down is None else self.down.to(device, dtype),
            None if self.up is None else self.up.to(device, dtype),
            None if self.places is None else self.places.to(device),
            tuple((place, diff.to(device, dtype)) for place, diff in self.diffs),
            tuple((place, kron.to(dtype, device)) for place, kron in self.krons),
            tuple((place, bias.to(device, dtype)) for place, bias in self.biases),
            tuple(channel_map.to(device) for channel_map in self.inputs),
            tuple(channel_map.to(device) for channel_map in self.outputs),
            self.own,
        )


# The parts of attached adapters under torch.compile, by module. torch.compile treats tensors stored on a module as
# fixed shapes; tensors looked up here may have a dynamic one.
_COMPILED: dict[str, Parts] = {}


def _add_change(output: Tensor | None, change: Tensor, place: int, gains: Tensor | None) -> Tensor:
    """output + change, times its multiplier if scheduled; the change alone if there is no output yet."""
    if place and gains is not None:
        change = change * gains[place]
    if output is None:
        return change
    return output + change


def _add_product(output: Tensor, hidden: Tensor, up: Tensor, compiled: bool) -> Tensor:
    """output + up @ hidden, in one pass with one rounding if the types allow it."""
    if up.ndim > 2:
        return output + convolve_pointwise(hidden, up, compiled)
    if output.dtype != hidden.dtype or output.ndim < 2:
        return output + F.linear(hidden, up)
    return torch.addmm(output.flatten(0, -2), hidden.flatten(0, -2), up.t()).view(output.shape)
