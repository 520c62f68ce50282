"""Token routing around one call of a model: blocks run on the tokens that stay, and the others come back behind them
(TREAD, arXiv 2501.04765).
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..core.calls import Call, around
from ..models.routed_blocks import REFERENCES, RoutedBlocks
from ..models.token_layout import Layout, Place
from ..models.torch_compile import is_compiled, unwrap
from ..token_downsampling.unet import TRAINING
from .routing_plan import Routing, Span, TransformerRouting
from .settings import RoutingSettings
from .token_choice import choose_kept, kept_count, put_back, sequence_indices, take

Windows = dict[Any, Tensor]  # {module: what is in place of its `sliding_window`}
ROUTING = "routing"  # in what TRAINING holds: the seed of the draws of a training batch, absent where all tokens stay


@dataclass(frozen=True, eq=False)
class RoutingCall:
    """ComfyUI `APPLY_MODEL` wrapper: while a training step runs, some image tokens skip the plan's blocks."""

    settings: RoutingSettings
    plan: Routing

    def __deepcopy__(self, memo: dict[int, Any]) -> RoutingCall:
        return self

    @property
    def identity(self) -> str:
        """The same text for an equal wrapper, in every process; fingerprints hash it."""
        return self.settings.identity

    def __call__(
        self,
        executor: Any,
        x: Tensor,
        t: Tensor,
        c_concat: Tensor | None = None,
        c_crossattn: Tensor | None = None,
        control: Any = None,
        transformer_options: Mapping[str, Any] | None = None,
        **conditions: Any,
    ) -> Tensor:
        options = transformer_options or {}
        training = options.get(TRAINING, {})
        seed = training.get(ROUTING)
        if seed is None or not self.settings.is_active_at(training["step"], training["total_steps"]):
            return executor(x, t, c_concat, c_crossattn, control, transformer_options, **conditions)
        if is_compiled(options.get("wrappers", {})):
            raise ValueError(
                "Apply TREAD does not work on a compiled model: other tokens skip in every step. Take TorchCompileModel"
                " off, or Apply TREAD"
            )
        model = unwrap(executor.class_obj.diffusion_model)
        layout = None
        if isinstance(self.plan, TransformerRouting) and self.plan.routed.layout is not None:
            layout = self.plan.routed.layout(model, x, c_crossattn, conditions)
        with RoutedPass(self.plan.spans(model), layout, self.settings.ratio, seed).enter():
            return executor(x, t, c_concat, c_crossattn, control, transformer_options, **conditions)


@dataclass(frozen=True, eq=False)
class RoutedPass:
    """One call of a model in which tokens skip spans of blocks; `seed` is that of the draw. `windows` are those of the
    blocks that have run, for blocks that run again.
    """

    spans: Sequence[Span]
    layout: Layout | None
    ratio: float
    seed: int
    windows: Windows = field(default_factory=dict)

    @contextmanager
    def enter(self) -> Iterator[None]:
        """A context in which the first block of each span takes tokens out, and its last one puts them back."""
        active = _active_passes()
        active.append(self)
        with ExitStack() as stack:
            stack.callback(active.pop)
            for number, span in enumerate(self.spans):
                route = _Route(self.layout, self.ratio, self.seed + number, self.windows)
                for index, (block, called) in enumerate(span):
                    first, last = index == 0 or called.apart, index == len(span) - 1 or called.apart
                    stack.enter_context(around(block, "routing", route.call(called, first, last)))
            stack.enter_context(_set_windows(self.windows))
            yield


@contextmanager
def _set_windows(windows: Windows) -> Iterator[None]:
    """A context in which modules have these in place of their `sliding_window`."""
    before = {module: module.sliding_window for module in windows}
    for module, window in windows.items():
        module.sliding_window = window
    try:
        yield
    finally:
        for module, number in before.items():
            module.sliding_window = number


_thread = threading.local()  # the calls that a thread is in


def _active_passes() -> list[RoutedPass]:
    if not hasattr(_thread, "calls"):
        _thread.calls = []
    calls: list[RoutedPass] = _thread.calls
    return calls


def active_pass() -> RoutedPass | None:
    """The call that this thread is in; gradient checkpointing enters it again when it runs a block again."""
    calls = _active_passes()
    if not calls:
        return None
    return calls[-1]


def enter_pass(call: RoutedPass | None) -> AbstractContextManager[None]:
    """A context in which the blocks of a call run on fewer tokens; backward passes have threads of their own."""
    return nullcontext() if call is None or call in _active_passes() else call.enter()


@functools.cache
def _signature(forward: Callable[..., Any]) -> inspect.Signature:
    """The parameters of a block's forward."""
    return inspect.signature(forward)


class _Route:
    """The way of one call's tokens around one span of blocks."""

    def __init__(self, layout: Layout | None, ratio: float, seed: int, windows: Windows) -> None:
        self._layout, self._ratio, self._seed, self._windows = layout, ratio, seed, windows
        self._full: Tensor | None = None  # the image's tokens in front of the span
        self._kept: Tensor | None = None  # the indices among them that stay
        self._place, self._length = Place(0), 0  # where the image is in the whole sequence, and how long that is
        self._grid: tuple[int, ...] = ()  # the sides of an argument that is a grid
        self._short: dict[str, tuple[Tensor, Tensor]] = {}  # by name: what blocks are given, and its part for them
        self._seen: dict[int, Tensor] = {}  # by size: a window over the tokens that stay

    def call(self, called: RoutedBlocks, first: bool, last: bool) -> Call:
        """What goes around a block's forward, so that it gets fewer tokens."""

        def call(block: nn.Module, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            bound = _signature(type(block).forward).bind(block, *args, **kwargs)
            given = _Arguments(bound, called)
            _check(given, called, type(block).__name__)
            if first:
                self._begin(given, called, type(block).__name__)
            for name in (*called.positions, *called.masks):
                if given.get(name) is not None:
                    given.set(name, self._shorten(name, given.get(name), called))
            _, *arguments = bound.args
            window = self._window(block, called)
            self._windows.update(window)
            with _set_windows(window):
                out = inner(*arguments, **bound.kwargs)
            if not last:
                return out
            return self._end(out, called)

        return call

    def _begin(self, given: _Arguments, called: RoutedBlocks, name: str) -> None:
        image = given.image
        if called.grid:
            self._grid = tuple(image.shape[1:-1])
            image = image.flatten(1, -2)
        place, length, count = self._where(image, called, name)
        self._place, self._length = place, length
        taken: Sequence[int] = ()
        if self._layout is not None:
            taken = tuple(self._layout.places)
        kept = kept_count(count, self._ratio, length - count, taken)
        rows = 1 if called.shared else image.shape[0]
        self._kept = choose_kept(self._seed, rows, count, kept, image.device)
        offset = self._offset(called)
        self._full = image[:, offset : offset + count]
        short = take(image, sequence_indices(self._kept, offset, count, image.shape[1]), 1)
        if called.grid:
            short = short.unflatten(1, (1,) * (len(self._grid) - 1) + (short.shape[1],))
        given.image = short

    def _where(self, image: Tensor, called: RoutedBlocks, name: str) -> tuple[Place, int, int]:
        """(where the image begins in the whole sequence, the sequence's length, the number of image tokens)."""
        if self._layout is None:
            return Place(0), image.shape[1], image.shape[1]
        grid = self._layout.grid
        count = self._layout.frames * grid[0] * grid[1]
        for length, place in sorted(self._layout.places.items(), reverse=True):
            begin, end = _stream(place, length, called)
            if image.shape[1] == end - begin:
                return place, length, count
        lengths = " or ".join(map(str, sorted(self._layout.places)))
        raise RuntimeError(
            f"Apply TREAD: {name} got {image.shape[1]} tokens, expected a sequence of {lengths}. Another node adds"
            " tokens: take one of the two nodes off"
        )

    def _offset(self, called: RoutedBlocks) -> int:
        """Where the image begins in a block's image argument."""
        return self._place.start - _stream(self._place, self._length, called)[0]

    def _shorten(self, name: str, value: Any, called: RoutedBlocks) -> Any:
        """An argument that counts the whole sequence, or a tuple of such, without the tokens that skip. Blocks that
        share one share what is left of it, or each would keep its own for the backward pass.
        """
        if isinstance(value, tuple | list):
            return type(value)(self._shorten(f"{name} {place}", one, called) for place, one in enumerate(value))
        if not isinstance(value, Tensor):
            return value
        if name in self._short and self._short[name][0] is value:
            return self._short[name][1]
        assert self._full is not None and self._kept is not None
        short, all_axes = value, name in called.masks
        indices = sequence_indices(self._kept, self._place.start, self._full.shape[1], self._length)
        if all_axes and short.ndim == 2 and short.shape[0] == self._length:  # one mask for all rows
            short = short.unsqueeze(0)
        first = 0 if called.shared else 1
        axes = [axis for axis in range(first, short.ndim) if short.shape[axis] == self._length]
        if not all_axes and short.ndim == 4 and axes[:2] == [1, 2]:  # (B, heads, N, D) or (B, N, heads, D)
            raise RuntimeError(
                f"Apply TREAD: with as many tokens as heads, {self._length}, it cannot tell them apart. Choose another"
                " image size, or take Apply TREAD off"
            )
        for axis in axes if all_axes else axes[:1]:
            short = take(short, indices, axis)
        self._short[name] = value, short
        return short

    def _window(self, block: nn.Module, called: RoutedBlocks) -> Windows:
        """The window of a block that counts the places that its tokens have with all others. Blocks compare it with how
        far apart tokens are now.
        """
        module: Any = block.get_submodule(called.window)
        if not called.window or module.sliding_window is None:
            return {}
        size = module.sliding_window
        if size not in self._seen:
            assert self._full is not None and self._kept is not None
            places = sequence_indices(self._kept, self._place.start, self._full.shape[1], self._length)[0]
            far = (places.unsqueeze(1) - places).abs() > size
            self._seen[size] = torch.where(far, -1, self._length)
        return {module: self._seen[size]}

    def _end(self, out: Any, called: RoutedBlocks) -> Any:
        """What the last block returns, with all tokens."""
        assert self._full is not None and self._kept is not None
        image = out[called.returned] if called.returned is not None else out
        if called.grid:
            image = image.flatten(1, -2)
        start, kept = self._offset(called), self._kept.shape[1]
        middle = put_back(self._full, self._kept, image[:, start : start + kept])
        image = torch.cat((image[:, :start], middle, image[:, start + kept :]), dim=1)
        if called.grid:
            image = image.unflatten(1, self._grid)
        self._full = self._kept = None
        if not called.apart:
            self._short = {}
        if called.returned is None:
            return image
        return type(out)(image if place == called.returned else part for place, part in enumerate(out))


def _stream(place: Place, length: int, called: RoutedBlocks) -> tuple[int, int]:
    """The part of a whole sequence that a block is given as its image's tokens."""
    return (0, length) if called.joint else place.stream or (place.start, length)


class _Arguments:
    """The arguments of one call of a block, by name or by position."""

    def __init__(self, bound: inspect.BoundArguments, called: RoutedBlocks) -> None:
        self._bound, self._image = bound, called.image

    @property
    def image(self) -> Tensor:
        """The image's tokens."""
        if isinstance(self._image, int):
            return self._bound.args[1 + self._image]  # behind self
        if isinstance(self._image, str):
            return self._bound.arguments[self._image]
        name, place = self._image
        return self._bound.arguments[name][place]

    @image.setter
    def image(self, tokens: Tensor) -> None:
        if isinstance(self._image, str):
            self._bound.arguments[self._image] = tokens
            return
        if isinstance(self._image, int):
            place = self._image
            (name,) = (one.name for one in self._bound.signature.parameters.values() if one.kind is one.VAR_POSITIONAL)
        else:
            name, place = self._image
        given = list(self._bound.arguments[name])
        given[place] = tokens
        self._bound.arguments[name] = tuple(given)

    def get(self, name: str) -> Any:
        """An argument, None if the block has no such parameter."""
        return self._bound.arguments.get(name)

    def set(self, name: str, value: Any) -> None:
        """Give another value for an argument."""
        self._bound.arguments[name] = value


def _check(given: _Arguments, called: RoutedBlocks, name: str) -> None:
    """RuntimeError for what tokens cannot skip."""
    for one, does in called.absent.items():
        if given.get(one) is not None:
            other = ", or choose another reference method" if does == REFERENCES else ""
            raise RuntimeError(f"Apply TREAD: {name} {does}, so tokens cannot skip it. Take Apply TREAD off{other}")
    for one, axes in called.one_step.items():
        value = getattr(given.get(one), "data", None)  # of a tensor, or of one that ComfyUI keeps compressed
        if isinstance(value, Tensor) and value.ndim == axes and value.shape[1] > 1:
            raise RuntimeError(
                f"Apply TREAD: {name} gets a noise level for each frame, so tokens cannot skip it. Take Apply TREAD off"
            )
