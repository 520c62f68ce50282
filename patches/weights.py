"""One ledger per model: the base weights by reference and the stacks on them; what is live is always computed anew from the base."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from .bypass import Bypass, Wrapped, supports
from .stack import Piece, Stack, effective, patched

ATTRIBUTE = "_graft_ledger"  # on the model while anything is attached; two imports of this package share it


@dataclass(eq=False)
class _Kept:
    """A patched parameter and what it was computed from."""

    base: weakref.ReferenceType[nn.Parameter]
    origin: Hashable  # the base's memory and the host's version of it
    recipe: tuple[int, ...]
    live: nn.Parameter


@dataclass(eq=False)
class Kept:
    """Results that wait for the next attach: patched parameters by weight, bypass adapters by module; owned by the stacks."""

    weights: dict[str, _Kept] = field(default_factory=dict)
    bypasses: dict[str, tuple[tuple[int, ...], Bypass]] = field(default_factory=dict)


@dataclass(eq=False)
class _Slot:
    """One weight that is replaced now."""

    module: nn.Module
    name: str
    base: nn.Parameter
    live: nn.Parameter

    def restore(self) -> None:
        if self.module._parameters.get(self.name) is self.live:  # someone else's later replacement is not ours to undo
            self.module._parameters[self.name] = self.base


@dataclass(frozen=True)
class Version:
    """What the host says about the base: `load` changes with each load, weights in `transient` hold passing contents (LoRA hooks)."""

    load: Hashable = None
    transient: frozenset[str] = frozenset()


class Ledger:
    """The stacks that are on one model, by owner, in the order they came; a stack that two owners hold is applied once.

    `attach` and `detach` may come in any order. After the last detach the model has the same parameter objects with the same bytes, and
    no wrapper or attribute of ours. If computing fails, everything that is on the model comes off and the error is raised.
    """

    def __init__(self) -> None:
        self.owners: dict[Hashable, tuple[Stack, ...]] = {}
        self.slots: dict[str, _Slot] = {}
        self.wrapped: dict[str, Wrapped] = {}
        self.kept = Kept()

    @property
    def stacks(self) -> list[Stack]:
        """Every attached stack once, in order."""
        return list(dict.fromkeys(stack for stacks in self.owners.values() for stack in stacks))

    def attach(self, model: nn.Module, owner: Hashable, stacks: Iterable[Stack], version: Version) -> None:
        """Put an owner's stacks on the model, in place of what the same owner had on it."""
        self.owners.pop(owner, None)
        self.owners[owner] = tuple(stacks)
        self._realize(model, version)

    def detach(self, model: nn.Module, owner: Hashable, version: Version) -> None:
        """Take an owner's stacks off; nothing happens when it has none here."""
        if self.owners.pop(owner, None) is not None:
            self._realize(model, version)

    def _realize(self, model: nn.Module, version: Version) -> None:
        stacks = self.stacks
        self._adopt(stacks)
        try:
            self._weights(model, stacks, version)
            self._bypasses(model, stacks)
        except BaseException:
            self._clear(model)
            raise
        if not stacks:
            self._clear(model)

    def _adopt(self, stacks: Sequence[Stack]) -> None:
        """Go on with the results that the first stack kept, and let every stack keep what is computed from here on."""
        if not self.slots and not self.wrapped:
            self.kept = next((stack.kept for stack in stacks if stack.kept is not None), self.kept)
        for stack in stacks:
            stack.kept = self.kept

    def _weights(self, model: nn.Module, stacks: Sequence[Stack], version: Version) -> None:
        wanted = {name for stack in stacks for name in stack.pieces if name not in stack.bypass}
        for name in [name for name in self.slots if name not in wanted]:
            self.slots.pop(name).restore()
        for name in sorted(wanted):
            slot = self.slots.get(name)
            module, attribute = _place(model, name)
            current = module._parameters[attribute]
            base = slot.base if slot is not None and current is slot.live else current
            if base is None:
                raise ValueError(f"{name}: the model has no such weight any more")
            live = self._patched(name, base, stacks, version)
            self.slots[name] = _Slot(module, attribute, base, live)
            module._parameters[attribute] = live

    def _patched(self, name: str, base: nn.Parameter, stacks: Sequence[Stack], version: Version) -> nn.Parameter:
        recipe = tuple(stack.serial for stack in stacks if name in stack.pieces and name not in stack.bypass)
        origin = (base.data_ptr(), base.dtype, base.device, base.shape, version.load)
        pieces = effective(stacks, name, bypass=False)
        if name in version.transient:
            return _computed(base, pieces, None)
        kept = self.kept.weights.pop(name, None)  # put back when it is right: a failure must not leave half-written memory behind
        if kept is None or kept.base() is not base or (kept.origin, kept.recipe) != (origin, recipe):
            kept = _Kept(weakref.ref(base), origin, recipe, _computed(base, pieces, kept))
        self.kept.weights[name] = kept
        return kept.live

    def _bypasses(self, model: nn.Module, stacks: Sequence[Stack]) -> None:
        wanted = {name.rpartition(".")[0] for stack in stacks for name in stack.bypass}
        for name in [name for name in self.wrapped if name not in wanted]:
            self.wrapped.pop(name).remove()
        for name in sorted(wanted):
            adapter = self._bypass(model, name, stacks)
            current = self.wrapped.get(name)
            if current is None or current.adapter is not adapter:
                if current is not None:
                    current.remove()
                self.wrapped[name] = Wrapped(model.get_submodule(name), adapter)

    def _bypass(self, model: nn.Module, name: str, stacks: Sequence[Stack]) -> Bypass:
        weight, bias = f"{name}.weight", f"{name}.bias"
        recipe = tuple(stack.serial for stack in stacks if weight in stack.bypass or bias in stack.bypass)
        kept = self.kept.bypasses.get(name)
        if kept is not None and kept[0] == recipe:
            return kept[1]
        module = model.get_submodule(name)
        if not supports(module):
            raise ValueError(f"{name}: bypass works on Linear and convolution modules, not on {type(module).__name__}; use mode merge")
        adapter = Bypass(
            effective(stacks, weight, bypass=True), effective(stacks, bias, bypass=True), _shape(module), getattr(module, "groups", 1)
        )
        self.kept.bypasses[name] = (recipe, adapter)
        return adapter

    def _clear(self, model: nn.Module) -> None:
        for slot in self.slots.values():
            slot.restore()
        for wrapped in self.wrapped.values():
            wrapped.remove()
        self.slots, self.wrapped, self.owners = {}, {}, {}
        model.__dict__.pop(ATTRIBUTE, None)


def _computed(base: nn.Parameter, pieces: Sequence[Piece], kept: _Kept | None) -> nn.Parameter:
    """A parameter base + pieces, in the memory of the kept one when that fits; made outside inference mode, so that any mode can use it."""
    with torch.inference_mode(False), torch.no_grad():
        memory: Tensor | None = None
        if kept is not None and (kept.live.shape, kept.live.dtype, kept.live.device) == (base.shape, base.dtype, base.device):
            memory = kept.live.detach()
        result = patched(base.detach(), pieces, out=memory)
        if kept is not None and memory is not None:
            return kept.live
        return nn.Parameter(result, requires_grad=base.requires_grad)


def _place(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, attribute = name.rpartition(".")
    module = model.get_submodule(path)
    if attribute not in module._parameters:
        raise ValueError(f"{name}: the model has no such weight any more")
    return module, attribute


def _shape(module: nn.Module) -> tuple[int, ...]:
    features = (getattr(module, "out_features", None), getattr(module, "in_features", None))
    return tuple(module.weight.shape) if None in features else features  # type: ignore[arg-type, return-value]


def attach(model: nn.Module, owner: Hashable, stacks: Iterable[Stack], version: Version | None = None) -> None:
    """Put an owner's stacks on a model, through the one ledger that the model carries."""
    ledger = model.__dict__.get(ATTRIBUTE)
    if ledger is None:
        ledger = model.__dict__[ATTRIBUTE] = Ledger()
    ledger.attach(model, owner, stacks, version or Version())


def detach(model: nn.Module, owner: Hashable, version: Version | None = None) -> None:
    """Take an owner's stacks off a model; nothing happens when it has none on it."""
    ledger = model.__dict__.get(ATTRIBUTE)
    if ledger is not None:
        ledger.detach(model, owner, version or Version())


def attached(model: nn.Module) -> list[Stack]:
    """The stacks that are on a model now, in order."""
    ledger = model.__dict__.get(ATTRIBUTE)
    return [] if ledger is None else ledger.stacks


def bases(model: nn.Module) -> dict[str, nn.Parameter]:
    """The base parameters, by name, of the weights that are replaced on a model now."""
    ledger = model.__dict__.get(ATTRIBUTE)
    return {} if ledger is None else {name: slot.base for name, slot in ledger.slots.items()}


def forget(stacks: Iterable[Stack]) -> None:
    """Free what is kept for these stacks' next attach."""
    for stack in stacks:
        stack.kept = None


def plan(
    model: nn.Module, names: Iterable[str], mode: str, no_merge: str | None = None, needs_weight: Mapping[str, str] | None = None
) -> tuple[list[str], list[str], dict[str, int]]:
    """(weights to merge, weights for bypass, {reason: number of weights} where it is not what `mode` says).

    "auto" merges plain floating weights and bypasses the others (quantised ones); `no_merge` says why nothing may be merged;
    `needs_weight` names the kinds of layer, by weight, that are not linear at the activations. Raises ValueError listing the weights for
    which the mode, or any mode, is impossible.
    """
    merge: list[str] = []
    bypass: list[str] = []
    reasons: dict[str, int] = {}
    problems: list[str] = []
    for name in names:
        module, attribute = _place(model, name)
        obstacle = no_merge or _obstacle(module._parameters[attribute])
        kinds = (needs_weight or {}).get(name)
        no_bypass = f"{kinds} needs the weight itself" if kinds else f"{type(module).__name__} has no bypass"
        at_activations = supports(module) and attribute in ("weight", "bias") and not kinds
        if mode == "merge" and obstacle is not None:
            problems.append(f"{name}: cannot be merged, {obstacle}; use mode auto, bypass or host")
        elif obstacle is not None and not at_activations:
            problems.append(f"{name}: cannot be merged, {obstacle}, and {no_bypass}; use mode host")
        elif obstacle is not None or (mode == "bypass" and at_activations):
            bypass.append(name)
            if mode != "bypass":
                reasons[f"at the activations because {obstacle}"] = reasons.get(f"at the activations because {obstacle}", 0) + 1
        else:
            merge.append(name)
            if mode == "bypass":
                reason = f"merged because {no_bypass}"
                reasons[reason] = reasons.get(reason, 0) + 1
    if problems:
        raise ValueError("\n".join(problems))
    return merge, bypass, reasons


_MERGED = (torch.float32, torch.bfloat16, torch.float16)


def _obstacle(weight: Tensor | None) -> str | None:
    if weight is None:
        return "there is no such weight"
    if type(weight.data) is not Tensor:
        return f"it is a {type(weight.data).__name__}"
    return None if weight.dtype in _MERGED else f"its type is {weight.dtype}"
