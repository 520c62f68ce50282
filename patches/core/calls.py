"""Calls around a module's forward: in one order, whoever comes first, and off again in any order.

A module with calls around it has one dispatcher in place of its instance's `forward`. A hook would not do:
torch.compile notices a changed forward but misses hooks that come and go.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections import deque
from collections.abc import Callable, Iterator
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

from torch import Tensor, nn

from .handle import Handle

# (module, inner, *args, **kwargs) -> output; `inner` is what lies inside of this call
Call = Callable[..., Any]


class Layer(NamedTuple):
    """A place in the order of calls: its name, and why it lies inside of the one above."""

    name: str
    why: str


# Outermost first.
LAYERS = (
    Layer("announcement", "Ranks agree on a pass before any of it runs, or one of them would wait for ever."),
    Layer("cast", "Trained weights take the model's own type before anything reads them, and after the ranks agree."),
    Layer(
        "copies",
        "Copies before changes in place are watched for over the whole pass, also where blocks run again, so they lie"
        " outside of checkpointing.",
    ),
    Layer(
        "routing",
        "Tokens skip a block before anything keeps its arguments: what runs again runs on the tokens that stay.",
    ),
    Layer("sharding", "A block is gathered once for its call, and again for the backward pass that runs it again."),
    Layer(
        "checkpointing",
        "A block that runs again is whole by then, as its unit gathers it before the backward pass.",
    ),
    Layer(
        "ring",
        "Weights come to the device for each run of a block and leave after it. Outside of checkpointing, the backward"
        " pass would run the block without them.",
    ),
    Layer("compiled", "Compiled code reads weights where they are when it runs, so the ring has fetched them before."),
    Layer("probe", "A probe sees what a part computes with everything that is trained in it."),
    Layer("adapter", "Trained adapters are inside of blocks, compiled or not, and see the tokens that stay."),
    Layer("bypass", "A trained adapter learns beside a model with its stacks, so they belong to what it goes around."),
    Layer(
        "replacement",
        "What computes in place of the module's own forward (a quantized product, half of a VAE): all others go around"
        " what a module computes, whatever that is.",
    ),
    Layer(
        "input",
        "A host's own layer gets its input in the type of the products. What adapters read is not cast: gradients add"
        " up in the input's own type, as with a layer that needs no cast.",
    ),
)
_PLACES = {layer.name: place for place, layer in enumerate(LAYERS)}

_OWN_FORWARD = "torch.compile gets the forward of the block's class, and would leave out what lies inside of it"
_INSIDE = ("probe", "adapter", "bypass", "replacement", "input")  # of compiled blocks
_NEVER_TOGETHER = {
    **{frozenset(("compiled", inner)): _OWN_FORWARD for inner in _INSIDE},
    frozenset(("compiled",)): "a block is compiled once",
    frozenset(("replacement",)): "only one of them can compute in place of the module",
    frozenset(("sharding",)): "its weights are divided among the ranks already",
    frozenset(("sharding", "ring")): "a rank's rows stay on its device, and there is nothing to bring over",
}
_SEARCHED = 256  # objects that are looked at for a dispatcher which another pack's forward holds


class _Entry:
    """One call around a module; two of them are never equal."""

    def __init__(self, layer: str, call: Call) -> None:
        self.layer, self.call = layer, call


class Dispatcher:
    """The `forward` of a module with calls around it. It runs them from the outermost to the innermost.

    When the last one has left, it puts back what was there. Where another pack's forward has come on top and holds this
    one, that stays and this passes everything through.
    """

    def __init__(self, module: nn.Module, previous: Any) -> None:
        self.module, self.previous = module, previous
        self.entries: list[_Entry] = []
        self.own = type(module).forward.__get__(module) if previous is None else previous
        self.run = self.own

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module has as its forward. A bound method: for another object torch.compile compiles again, and a
        function's deep copy is the function itself.
        """
        return self.run(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Dispatcher:
        """A copied model computes as its original did, with weights of its own; handles stay with the original."""
        copied = Dispatcher(copy.deepcopy(self.module, memo), copy.deepcopy(self.previous, memo))
        copied.entries = [_Entry(entry.layer, entry.call) for entry in self.entries]
        copied._chain()
        return copied

    @property
    def is_outermost(self) -> bool:
        """Whether the module's forward is this one, and not another pack's."""
        return getattr(self.module.__dict__.get("forward"), "__self__", None) is self

    def enter(self, entry: _Entry) -> None:
        """Put a call in its place: of one layer, the one that came last is outermost."""
        for other in self.entries:
            why = _NEVER_TOGETHER.get(frozenset((entry.layer, other.layer)))
            if why is not None:
                raise ValueError(
                    f"{type(self.module).__name__}: {entry.layer} cannot be put around a module that has"
                    f" {other.layer} already: {why}. Take one of the two off first."
                )
        outside = [other for other in self.entries if _PLACES[other.layer] < _PLACES[entry.layer]]
        self.entries.insert(len(outside), entry)
        self._chain()

    def leave(self, entry: _Entry) -> None:
        """Take a call out, wherever it is."""
        self.entries.remove(entry)
        self._chain()
        if self.entries or not self.is_outermost:
            return
        if self.previous is None:
            del self.module.__dict__["forward"]
        else:
            self.module.__dict__["forward"] = self.previous

    def _chain(self) -> None:
        run = self.own
        for entry in reversed(self.entries):
            run = _link(self.module, entry.call, run)
        self.run = run


def _link(module: nn.Module, call: Call, inner: Callable[..., Any]) -> Callable[..., Any]:
    """A link of the chain. It is a closure of always the same code, so that a model that was compiled with one entry
    takes another of the same kind without being compiled again.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        return call(module, inner, *args, **kwargs)

    return run


def around(module: nn.Module, layer: str, call: Call) -> Handle:
    """Put a call around a module's forward, until the handle leaves.

    Args:
        module: the module.
        layer: a name in LAYERS, which says what lies outside of it and what inside.
        call: `call(module, inner, *args, **kwargs)` gets the arguments and returns the output;
            `inner(*args, **kwargs)` computes what lies inside. A deep copy of the module passes itself as `module`.

    Raises:
        ValueError: where the module has a call that must not meet this one.
    """
    if layer not in _PLACES:
        raise ValueError(f"{layer} is not a layer of calls: expected one of {', '.join(_PLACES)}.")
    entry = _Entry(layer, call)
    dispatcher = _dispatcher(module)
    if dispatcher is None:
        dispatcher = Dispatcher(module, module.__dict__.get("forward"))
        module.__dict__["forward"] = dispatcher.forward
    dispatcher.enter(entry)
    return Handle(functools.partial(dispatcher.leave, entry))


def layers_around(module: nn.Module) -> list[str]:
    """The layers of the calls around a module, outermost first."""
    dispatcher = _dispatcher(module)
    if dispatcher is None:
        return []
    return [entry.layer for entry in dispatcher.entries]


def has_other_forward(module: nn.Module) -> bool:
    """Whether another pack has put a forward on the module, with or without calls of ours inside or outside of it."""
    dispatcher = _dispatcher(module)
    if dispatcher is None:
        return "forward" in module.__dict__
    return not dispatcher.is_outermost or dispatcher.previous is not None


def _dispatcher(module: nn.Module) -> Dispatcher | None:
    """The dispatcher of a module: its forward, or one that the forward of another pack holds and will call."""
    waiting: deque[Any] = deque([module.__dict__.get("forward")])
    seen: set[int] = set()
    while waiting and len(seen) < _SEARCHED:
        value = waiting.popleft()
        if isinstance(value, Dispatcher) and value.module is module:
            return value
        if id(value) not in seen:
            seen.add(id(value))
            waiting.extend(_held_objects(value))
    return None


def _held_objects(value: Any) -> Iterator[Any]:
    """What a forward of another pack may call: in its closure, of a partial, on the object that it is a method of."""
    if isinstance(value, MethodType):
        yield from (value.__func__, value.__self__)
    elif isinstance(value, FunctionType):
        yield from closure_contents(value)
        yield from (value.__defaults__ or ())
        yield getattr(value, "__wrapped__", None)
    elif isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, list | tuple):
        yield from value
    elif isinstance(value, dict):
        yield from value.values()
    elif not isinstance(value, nn.Module | Tensor | type | ModuleType):
        yield from getattr(value, "__dict__", {}).values()


def closure_contents(function: Any) -> Iterator[Any]:
    """What the variables of a function's closure hold, without those that have no value yet; nothing of others."""
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):
            yield cell.cell_contents
