"""Keeps a model's base weights and the LoRA stacks on them, so that taking patches off restores every bit.

Patched weights are always computed from the base weights, never by subtracting a patch.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..core.handle import Handle
from ..models.layers import (
    COARSE,
    dequantized,
    requantized,
    requantizes,
    shape_of,
    stored_tensors,
    why_not_plain,
)
from .bypass import Bypass, apply, supports
from .fuse import Patch, Stack, additive, effective, patched, shared_out
from .huge_pages import empty
from .strength_schedule import Clock

ATTRIBUTE = "_graft_ledger"  # set on a model while anything is attached; two imports of this package share it
# what is kept of each model, until `forget` or the end of the model
_kept: weakref.WeakKeyDictionary[nn.Module, Kept] = weakref.WeakKeyDictionary()


@dataclass(eq=False)
class _Kept:
    """Memory for one patched weight, and what its contents were computed from."""

    base: weakref.ReferenceType[nn.Parameter]
    origin: Hashable  # the base's memory and the host's version of it
    recipe: tuple[int, ...]
    live: nn.Parameter

    def fits(self, base: nn.Parameter) -> bool:
        """Whether this memory can hold another result for the base, such that the guards of a compiled model still
        hold.
        """
        return all(trait(self.live) == trait(base) for trait in (_kind, lambda parameter: parameter.requires_grad))


@dataclass(eq=False)
class _Saved:
    """A copy in host memory of a weight that is patched in place on a device."""

    base: weakref.ReferenceType[nn.Parameter]
    origin: Hashable
    copy: Tensor


@dataclass(eq=False)
class Kept:
    """What is kept of one model for the next attach: memory of patched weights, base weights and adapters.

    A changed strength counts as a new stack, so this makes changing a strength cheap.

    - `weights`: patched parameters, one per weight however many stacks come and go.
    - `saved`: copies of the base weights that are patched in place on a device.
    - `bypasses`: adapters by module; `clock`: their scheduled multipliers.
    """

    weights: dict[str, _Kept] = field(default_factory=dict)
    saved: dict[str, _Saved] = field(default_factory=dict)
    bypasses: dict[str, tuple[Hashable, Bypass]] = field(default_factory=dict)
    clock: Clock = field(default_factory=Clock)


@dataclass(eq=False)
class _Slot:
    """One weight that is patched now: replaced by another parameter or, with `saved`, changed in place."""

    module: nn.Module
    name: str
    base: nn.Parameter
    live: nn.Parameter
    saved: Tensor | None = None

    def restore(self) -> None:
        # if somebody else has replaced the weight since, leave that alone
        if self.module._parameters.get(self.name) is not self.live:
            return
        self.module._parameters[self.name] = self.base
        if self.saved is not None:
            _write(self.base, self.saved)


@dataclass(frozen=True)
class Version:
    """What the host says about the model's base weights.

    - `load` changes with each load of the model.
    - `transient`: weights that hold temporary contents (LoRA hooks).
    - `compute`: type and device of the activations, if known.
    - `compiled`: torch.compile has seen the model, or will see it. Then every module that can have a bypass gets an
      adapter of one structure, so another set of layers compiles nothing again.
    - `stochastic`: bfloat16 and float16 weights are rounded stochastically too, not only fp8.
    """

    load: Hashable = None
    transient: frozenset[str] = frozenset()
    compute: tuple[torch.dtype, torch.device] | None = None
    compiled: bool = False
    stochastic: bool = False


class Ledger:
    """The LoRA stacks on one model, by owner, in the order in which they were attached.

    A stack with two owners is applied once. `attach` and `detach` may come in any order. After the last detach the
    model has the same parameter objects with the same bytes, and none of our wrappers or attributes. If computing
    fails, everything on the model is removed and the error is raised.

    A weight in host memory is replaced by another parameter: its base is never written, and restoring means pointing
    back to it. A weight on a device is patched in place, so that the device holds it only once: its base is copied to
    (pinned) host memory at the first patch, kept there, and copied back.
    """

    def __init__(self) -> None:
        self.owners: dict[Hashable, tuple[Stack, ...]] = {}
        self.slots: dict[str, _Slot] = {}
        self.wrapped: dict[str, tuple[Bypass, Handle]] = {}
        self.kept = Kept()

    @property
    def stacks(self) -> list[Stack]:
        """Every attached stack once, in order."""
        return list(dict.fromkeys(stack for stacks in self.owners.values() for stack in stacks))

    def attach(self, model: nn.Module, owner: Hashable, stacks: Iterable[Stack], version: Version) -> None:
        """Apply an owner's stacks to the model, replacing the ones that owner had on it."""
        self.owners.pop(owner, None)
        self.owners[owner] = tuple(stacks)
        self._realize(model, version)

    def detach(self, model: nn.Module, owner: Hashable, version: Version) -> None:
        """Remove an owner's stacks; does nothing if it has none here."""
        if self.owners.pop(owner, None) is not None:
            self._realize(model, version)

    def _realize(self, model: nn.Module, version: Version) -> None:
        stacks = self.stacks
        self._adopt(model)
        try:
            self._weights(model, stacks, version)
            self._bypasses(model, stacks, version)
        except BaseException:
            self._clear(model)
            raise
        if not stacks:
            self._clear(model)

    def _adopt(self, model: nn.Module) -> None:
        """Reuse the memory kept for this model."""
        if not self.slots and not self.wrapped:
            self.kept = _kept.setdefault(model, self.kept)

    def _weights(self, model: nn.Module, stacks: Sequence[Stack], version: Version) -> None:
        merged_names = {
            name for name in {name for stack in stacks for name in stack.patches} if shared_out(stacks, name)[0]
        }
        for name in [name for name in self.slots if name not in merged_names]:
            self.slots.pop(name).restore()
        bases = {name: self._base(model, name) for name in sorted(merged_names)}
        new_memory = self._fresh(
            {
                name: base
                for name, (_, _, base) in bases.items()
                if name not in version.transient and not is_patched_in_place(base) and not requantizes(base)
            }
        )
        for name, (module, attribute, base) in bases.items():
            if is_patched_in_place(base):
                self.slots[name] = self._on_device(name, module, attribute, base, stacks, version)
                continue
            live = self._patched(name, base, stacks, version, new_memory.get(name))
            self.slots[name] = _Slot(module, attribute, base, live)
            module._parameters[attribute] = live

    def _base(self, model: nn.Module, name: str) -> tuple[nn.Module, str, nn.Parameter]:
        slot = self.slots.get(name)
        module, attribute = find_parameter(model, name)
        current = module._parameters[attribute]
        base = current
        if slot is not None and current is slot.live:
            base = slot.base
        if base is None:
            raise ValueError(f"{name}: the model has no such weight any more")
        return module, attribute, base

    def _fresh(self, bases: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        """Allocate memory for the weights whose kept memory does not fit.

        All kept memory is one mapping. So if any of it is no longer needed, all of it is allocated anew.
        """
        kept_weights = self.kept.weights
        new = [name for name, base in bases.items() if name not in kept_weights or not kept_weights[name].fits(base)]
        if new and any(name not in bases or name in new for name in kept_weights):
            for name in [name for name in self.slots if name in kept_weights]:
                self.slots.pop(name).restore()
            kept_weights.clear()
            new = list(bases)
        memory: dict[str, Tensor] = {}
        for inference in (False, True):
            names = [name for name in new if bases[name].is_inference() == inference]
            with torch.inference_mode(inference):
                memory.update(zip(names, empty([bases[name] for name in names]), strict=True))
        return memory

    def _patched(
        self, name: str, base: nn.Parameter, stacks: Sequence[Stack], version: Version, memory: Tensor | None
    ) -> nn.Parameter:
        recipe = _recipe(stacks, name)
        origin = _origin(base, version)
        patches = effective(stacks, name, bypass=False)
        if name in version.transient:
            return _computed(base, patches, None, _seed(name, base, version))
        # stored again only once it is valid: a failure must not leave half-written memory behind
        kept_weight = self.kept.weights.pop(name, None)
        if (
            kept_weight is None
            or kept_weight.base() is not base
            or (kept_weight.origin, kept_weight.recipe) != (origin, recipe)
        ):
            live = _computed(
                base, patches, memory if kept_weight is None else kept_weight.live, _seed(name, base, version)
            )
            kept_weight = _Kept(weakref.ref(base), origin, recipe, live)
        self.kept.weights[name] = kept_weight
        return kept_weight.live

    def _on_device(
        self,
        name: str,
        module: nn.Module,
        attribute: str,
        base: nn.Parameter,
        stacks: Sequence[Stack],
        version: Version,
    ) -> _Slot:
        """Patch a weight in place, from a copy of its base in the host's memory."""
        slot = self.slots.pop(name, None)
        if slot is not None:
            slot.restore()
        saved, origin = self.kept.saved.get(name), _origin(base, version)
        if name in version.transient or saved is None or saved.base() is not base or saved.origin != origin:
            saved = _Saved(weakref.ref(base), origin, host_copy(base))
            if name not in version.transient:
                self.kept.saved[name] = saved
        new_slot = _Slot(module, attribute, base, base, saved.copy)
        self.slots[name] = new_slot  # before the first byte changes: a failure restores it
        with torch.inference_mode(base.is_inference()), torch.no_grad():
            patches, seed = effective(stacks, name, bypass=False), _seed(name, base, version)
            if requantizes(base):
                _write(base, _requantized(base, patches, seed))
            else:
                patched(base.data, patches, out=base.data, seed=seed)
        return new_slot

    def _bypasses(self, model: nn.Module, stacks: Sequence[Stack], version: Version) -> None:
        module_names = {name.rpartition(".")[0] for stack in stacks for name in stack.bypass}
        if version.compiled and module_names:
            parts = {name.partition(".")[0] for name in module_names}
            module_names |= {
                name for name, module in model.named_modules() if name.partition(".")[0] in parts and supports(module)
            }
        for name in [name for name in self.wrapped if name not in module_names]:
            self.wrapped.pop(name)[1].leave()
        for name in sorted(module_names):
            adapter = self._bypass(model, name, stacks, version)
            current = self.wrapped.get(name)
            if current is None or current[0] is not adapter:
                if current is not None:
                    current[1].leave()
                self.wrapped[name] = adapter, apply(model.get_submodule(name), adapter)

    def _bypass(self, model: nn.Module, name: str, stacks: Sequence[Stack], version: Version) -> Bypass:
        module, names = model.get_submodule(name), (f"{name}.weight", f"{name}.bias")
        on_weight, on_bias = (effective(stacks, parameter_name, bypass=True) for parameter_name in names)
        serials = tuple(
            tuple(stack.serial for stack in shared_out(stacks, parameter_name)[1]) for parameter_name in names
        )
        recipe: Hashable = serials, version.compute, version.compiled
        is_transient = False
        if not additive([*on_weight, *on_bias]):  # then the adapter depends on the module's weight and bias
            recipe = (
                recipe,
                version.load,
                tuple(
                    (_recipe(stacks, parameter_name), id(module._parameters.get(parameter_name.rpartition(".")[2])))
                    for parameter_name in names
                ),
            )
            is_transient = bool(version.transient & set(names))
        entry = self.kept.bypasses.pop(name, None)
        if entry is None or is_transient or entry[0] != recipe:
            if not supports(module):
                raise ValueError(
                    f"{name}: bypass works on Linear and convolution modules, not on {type(module).__name__}; set patch"
                    " mode to merge"
                )
            entry = recipe, Bypass(module, on_weight, on_bias, self.kept.clock, version.compiled, version.compute)
        if not is_transient:
            self.kept.bypasses[name] = entry
        return entry[1]

    def _clear(self, model: nn.Module) -> None:
        for slot in self.slots.values():
            slot.restore()
        for _, handle in self.wrapped.values():
            handle.leave()
        self.slots, self.wrapped, self.owners = {}, {}, {}
        model.__dict__.pop(ATTRIBUTE, None)


def _computed(base: nn.Parameter, patches: Sequence[Patch], memory: Tensor | None, seed: int | None) -> nn.Parameter:
    """A weight with its patches as a parameter, in `memory` if given; an inference tensor if the base is one."""
    with torch.inference_mode(base.is_inference()), torch.no_grad():
        if requantizes(base):
            return nn.Parameter(_requantized(base, patches, seed), requires_grad=base.requires_grad)
        result = patched(base.detach(), patches, out=None if memory is None else memory.detach(), seed=seed)
        if isinstance(memory, nn.Parameter):
            return memory
        return nn.Parameter(result, requires_grad=base.requires_grad)


def _requantized(base: nn.Parameter, patches: Sequence[Patch], seed: int | None) -> Tensor:
    """A quantised weight with its patches, quantised again."""
    values = dequantized(base)
    return requantized(base, patched(values, patches, out=values), seed or 0)


def _seed(name: str, base: nn.Parameter, version: Version) -> int | None:
    """The seed for stochastic rounding of a weight, always the same for the same weight; None for rounding to the
    nearest.

    Weights need it if the steps of their type are wider than most changes.
    """
    coarse = (
        base.dtype in COARSE
        or requantizes(base)
        or (version.stochastic and base.dtype in (torch.bfloat16, torch.float16))
    )
    if coarse:
        return zlib.crc32(name.encode())
    return None


def is_patched_in_place(base: nn.Parameter) -> bool:
    """Whether a weight is on a device, where memory is too scarce for a second copy."""
    return base.device.type != "cpu"


def host_copy(base: nn.Parameter) -> Tensor:
    """Copy a weight to host memory, pinned if the weight is on CUDA."""
    with torch.inference_mode(False), torch.no_grad():
        if requantizes(base):
            return base.detach().to("cpu", copy=True).clone()
        copy = torch.empty(base.shape, dtype=base.dtype, pin_memory=base.device.type == "cuda")
        return copy.copy_(base.data)


def _write(parameter: nn.Parameter, contents: Tensor) -> None:
    with torch.inference_mode(parameter.is_inference()), torch.no_grad():
        for stored, wanted in zip(stored_tensors(parameter), stored_tensors(contents), strict=True):
            stored.copy_(wanted, non_blocking=True)


def _kind(tensor: Tensor) -> Hashable:
    return tensor.shape, tensor.dtype, tensor.device, tensor.is_inference()


def _origin(base: nn.Parameter, version: Version) -> Hashable:
    return base.data_ptr(), base.dtype, base.device, base.shape, version.load, version.stochastic


def _recipe(stacks: Iterable[Stack], name: str) -> tuple[int, ...]:
    return tuple(stack.serial for stack in shared_out(stacks, name)[0])


def find_parameter(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """(module, attribute) of a weight by its name; ValueError when the model has none."""
    path, _, attribute = name.rpartition(".")
    module = model.get_submodule(path)
    if attribute not in module._parameters:
        raise ValueError(f"{name}: the model has no such weight any more")
    return module, attribute


def attach(model: nn.Module, owner: Hashable, stacks: Iterable[Stack], version: Version | None = None) -> None:
    """Apply an owner's LoRA stacks to a model, through the model's ledger."""
    ledger = model.__dict__.get(ATTRIBUTE)
    if ledger is None:
        ledger = model.__dict__[ATTRIBUTE] = Ledger()
    ledger.attach(model, owner, stacks, version or Version())


def detach(model: nn.Module, owner: Hashable, version: Version | None = None) -> None:
    """Remove an owner's LoRA stacks from a model; does nothing if it has none there."""
    ledger = model.__dict__.get(ATTRIBUTE)
    if ledger is not None:
        ledger.detach(model, owner, version or Version())


def attached(model: nn.Module) -> list[Stack]:
    """The stacks that are on a model now, in order."""
    ledger = model.__dict__.get(ATTRIBUTE)
    if ledger is None:
        return []
    return ledger.stacks


def bases(model: nn.Module) -> dict[str, Tensor]:
    """The base of every weight currently patched on a model, by name."""
    ledger = model.__dict__.get(ATTRIBUTE)
    if ledger is None:
        return {}
    return {name: slot.base if slot.saved is None else slot.saved for name, slot in ledger.slots.items()}


def tick(model: nn.Module, percent: float, timestep: float | None = None) -> None:
    """Set the scheduled strengths of attached stacks to their values when `percent` (0 to 1) of sampling is done, and
    their masked ranks to those of a timestep (0 to 1000).
    """
    ledger = model.__dict__.get(ATTRIBUTE)
    if ledger is not None:
        ledger.kept.clock.tick(percent, timestep)


def forget(model: nn.Module) -> None:
    """Free what is kept for this model's next attach, unless a stack is attached."""
    if ATTRIBUTE not in model.__dict__:
        _kept.pop(model, None)


def is_kept(model: nn.Module) -> bool:
    """Whether memory is kept for this model's next attach."""
    return model in _kept


def shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """The shape that each weight stands for, by name: a quantized weight may be packed into another shape."""
    shape_by_name = {name: tuple(weight.shape) for name, weight in module.named_parameters(remove_duplicate=False)}
    for name, part in module.named_modules():
        if (
            part._parameters.get("weight") is not None
            and supports(part)
            and why_not_plain(part, "weight", coarse=True) is not None
        ):
            shape_by_name[f"{name}.weight" if name else "weight"] = shape_of(part)
    return shape_by_name
