"""The LoRA stacks in a model's ledger: what they come to together, so that taking them off restores every bit.

Patched weights are always computed from the base weights, never by subtracting a patch.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..core.ledger import Joint, enter_joint, find_joint
from ..core.slots import Slot, Swaps, copy_to_host, find_slot, hold_values, is_held, slots_by_tensor, write_
from ..models.layers import COARSE, dequantize, requantize, requantizes, shape_of, why_not_plain
from ..models.weight_caches import clear_weight_caches
from .bypass import Bypass, put_bypass, supports_bypass
from .fuse import Patch, Stack, apply_patches, are_additive, effective_patches, split_stacks
from .huge_pages import allocate
from .strength_schedule import Clock

# what is kept of each model, until `forget` or the end of the model
_kept_memory: weakref.WeakKeyDictionary[nn.Module, KeptMemory] = weakref.WeakKeyDictionary()


@dataclass(eq=False)
class _KeptWeight:
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
class _SavedBase:
    """A copy in host memory of a weight that is patched in place on a device."""

    base: weakref.ReferenceType[nn.Parameter]
    origin: Hashable
    copy: Tensor


@dataclass(eq=False)
class KeptMemory:
    """What is kept of one model for the next attach: memory of patched weights, base weights and adapters.

    A changed strength counts as a new stack, so this makes changing a strength cheap.

    - `weights`: patched parameters, one per weight however many stacks come and go.
    - `saved`: copies of the base weights that are patched in place on a device.
    - `bypasses`: adapters by module; `clock`: their scheduled multipliers.
    """

    weights: dict[str, _KeptWeight] = field(default_factory=dict)
    saved: dict[str, _SavedBase] = field(default_factory=dict)
    bypasses: dict[str, tuple[Hashable, Bypass]] = field(default_factory=dict)
    clock: Clock = field(default_factory=Clock)


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


@dataclass(eq=False)
class _PatchedWeight:
    """One weight that is patched now, under all of its names; with `saved` in place, else `live` is in its slots."""

    names: tuple[str, ...]  # those that stacks patch
    slots: list[Slot]  # every name's
    base: nn.Parameter
    live: nn.Parameter
    saved: Tensor | None = None
    swaps: Swaps | None = None

    @property
    def is_there(self) -> bool:
        """Whether it is in its slots, and nobody else has put something there since."""
        return is_held(self.slots[0], self.live) if self.swaps is None else self.swaps.is_there


class Stacks(Joint[Stack, Version]):
    """The LoRA stacks on one model, by owner, in the order in which they were attached.

    A weight in host memory is replaced by another parameter: its base is never written, and restoring means pointing
    back to it. A weight on a device is patched in place, so that the device holds it only once: its base is copied to
    (pinned) host memory at the first patch, kept there, and copied back. What is done to one name of a weight is done
    to all of its names.
    """

    owner = "LoRA stacks"

    def __init__(self) -> None:
        super().__init__()
        self.weights: dict[str, _PatchedWeight] = {}  # by the first name, as `slots`
        self.adapters: dict[str, Bypass] = {}  # by the module's path, as `calls`
        self.kept = KeptMemory()

    def _install(self, model: nn.Module, about: Version) -> None:
        try:
            super()._install(model, about)
        finally:
            clear_weight_caches(model)

    def install(self, model: nn.Module, things: list[Stack], about: Version) -> None:
        """Merge what is merged, and put adapters around the modules of what is not."""
        if not self.slots and not self.calls:  # use the memory that is kept for this model
            self.kept = _kept_memory.setdefault(model, self.kept)
        self._install_merged(model, things, about)
        self._install_bypasses(model, things, about)

    def _install_merged(self, model: nn.Module, stacks: Sequence[Stack], version: Version) -> None:
        wanted = self._find_weights(model, stacks)
        for name in self.slots.keys() - wanted.keys():
            self._restore(name)
        new_memory = self._allocate(
            {
                name: weight.base
                for name, weight in wanted.items()
                if not (is_patched_in_place(weight.base) or requantizes(weight.base))
                and version.transient.isdisjoint(weight.names)
            }
        )
        for name, weight in wanted.items():
            if is_patched_in_place(weight.base):
                self._patch_in_place(name, weight, stacks, version)
            else:
                weight.live = self._patch(name, weight, stacks, version, new_memory.get(name))
                self._restore(name)
                weight.swaps = self.slots[name] = Swaps(weight.slots, weight.live, yields=True)
                self.weights[name] = weight

    def _find_weights(self, model: nn.Module, stacks: Sequence[Stack]) -> dict[str, _PatchedWeight]:
        """The weights that stacks merge into, by their first names."""
        names = sorted({name for stack in stacks for name in stack.patches if split_stacks(stacks, name)[0]})
        slots_of = slots_by_tensor(model) if names else {}
        bases = {id(weight.slots[0].tensor): weight.base for weight in self.weights.values() if weight.is_there}
        weights: dict[int, _PatchedWeight] = {}
        for name in names:
            current = find_slot(model, name).tensor
            if current is None:
                raise ValueError(f"{name}: the model has no such weight any more")
            base = bases.get(id(current), current)
            if id(base) in weights:
                weights[id(base)].names += (name,)
            else:
                weights[id(base)] = _PatchedWeight((name,), slots_of[id(current)], base, base)
        return {weight.names[0]: weight for weight in weights.values()}

    def _restore(self, name: str) -> None:
        if name in self.slots:
            self.slots.pop(name).leave()
            del self.weights[name]

    def _allocate(self, bases: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        """Allocate memory for the weights whose kept memory does not fit.

        All kept memory is one mapping. So if any of it is no longer needed, all of it is allocated anew.
        """
        kept_weights = self.kept.weights
        new = [name for name, base in bases.items() if name not in kept_weights or not kept_weights[name].fits(base)]
        if new and any(name not in bases or name in new for name in kept_weights):
            for name in self.slots.keys() & kept_weights.keys():
                self._restore(name)
            kept_weights.clear()
            new = list(bases)
        memory: dict[str, Tensor] = {}
        for inference in (False, True):
            names = [name for name in new if bases[name].is_inference() == inference]
            with torch.inference_mode(inference):
                memory.update(zip(names, allocate([bases[name] for name in names]), strict=True))
        return memory

    def _patch(
        self, name: str, weight: _PatchedWeight, stacks: Sequence[Stack], version: Version, memory: Tensor | None
    ) -> nn.Parameter:
        base, recipe = weight.base, _recipe(stacks, weight.names)
        origin = _origin(base, version)
        patches = _merged_patches(stacks, weight.names)
        if not version.transient.isdisjoint(weight.names):
            return _compute(base, patches, None, _seed(name, base, version))
        # stored again only once it is valid: a failure must not leave half-written memory behind
        kept_weight = self.kept.weights.pop(name, None)
        if (
            kept_weight is None
            or kept_weight.base() is not base
            or (kept_weight.origin, kept_weight.recipe) != (origin, recipe)
        ):
            live = _compute(
                base, patches, memory if kept_weight is None else kept_weight.live, _seed(name, base, version)
            )
            kept_weight = _KeptWeight(weakref.ref(base), origin, recipe, live)
        self.kept.weights[name] = kept_weight
        return kept_weight.live

    def _patch_in_place(self, name: str, weight: _PatchedWeight, stacks: Sequence[Stack], version: Version) -> None:
        """Patch a weight in place, from a copy of its base in the host's memory."""
        self._restore(name)
        base, saved = weight.base, self.kept.saved.get(name)
        origin, is_transient = _origin(base, version), not version.transient.isdisjoint(weight.names)
        if is_transient or saved is None or saved.base() is not base or saved.origin != origin:
            saved = _SavedBase(weakref.ref(base), origin, copy_to_host(base))
            if not is_transient:
                self.kept.saved[name] = saved
        weight.saved = saved.copy
        # before the first byte changes: a failure restores it
        self.slots[name], self.weights[name] = hold_values(base, saved.copy, weight.slots[0]), weight
        with torch.inference_mode(base.is_inference()), torch.no_grad():
            patches, seed = _merged_patches(stacks, weight.names), _seed(name, base, version)
            if requantizes(base):
                write_(base, _requantize(base, patches, seed))
            else:
                apply_patches(base.data, patches, out=base.data, seed=seed)

    def _install_bypasses(self, model: nn.Module, stacks: Sequence[Stack], version: Version) -> None:
        module_names = {name.rpartition(".")[0] for stack in stacks for name in stack.bypass}
        if version.compiled and module_names:
            parts = {name.partition(".")[0] for name in module_names}
            module_names |= {
                name
                for name, module in model.named_modules()
                if name.partition(".")[0] in parts and supports_bypass(module)
            }
        for name in self.calls.keys() - module_names:
            self.calls.pop(name).leave()
        for name in sorted(module_names):
            adapter = self._find_adapter(model, name, stacks, version)
            if name in self.calls and self.adapters[name] is adapter:
                continue
            if name in self.calls:
                self.calls.pop(name).leave()
            self.calls[name] = put_bypass(model.get_submodule(name), adapter)
            self.adapters[name] = adapter

    def _find_adapter(self, model: nn.Module, name: str, stacks: Sequence[Stack], version: Version) -> Bypass:
        module, names = model.get_submodule(name), (f"{name}.weight", f"{name}.bias")
        on_weight, on_bias = (effective_patches(stacks, parameter_name, bypass=True) for parameter_name in names)
        serials = tuple(
            tuple(stack.serial for stack in split_stacks(stacks, parameter_name)[1]) for parameter_name in names
        )
        recipe: Hashable = serials, version.compute, version.compiled
        is_transient = False
        if not are_additive([*on_weight, *on_bias]):  # then the adapter depends on the module's weight and bias
            recipe = (
                recipe,
                version.load,
                tuple(
                    (_recipe(stacks, (parameter_name,)), id(module._parameters.get(parameter_name.rpartition(".")[2])))
                    for parameter_name in names
                ),
            )
            is_transient = bool(version.transient & set(names))
        entry = self.kept.bypasses.pop(name, None)
        if entry is None or is_transient or entry[0] != recipe:
            if not supports_bypass(module):
                raise ValueError(
                    f"{name}: bypass works on Linear and convolution modules, not on {type(module).__name__}; set patch"
                    " mode to merge"
                )
            entry = recipe, Bypass(module, on_weight, on_bias, self.kept.clock, version.compiled, version.compute)
        if not is_transient:
            self.kept.bypasses[name] = entry
        return entry[1]


def _compute(base: nn.Parameter, patches: Sequence[Patch], memory: Tensor | None, seed: int | None) -> nn.Parameter:
    """A weight with its patches as a parameter, in `memory` if given; an inference tensor if the base is one."""
    with torch.inference_mode(base.is_inference()), torch.no_grad():
        if requantizes(base):
            return nn.Parameter(_requantize(base, patches, seed), requires_grad=base.requires_grad)
        result = apply_patches(base.detach(), patches, out=None if memory is None else memory.detach(), seed=seed)
        if isinstance(memory, nn.Parameter):
            return memory
        return nn.Parameter(result, requires_grad=base.requires_grad)


def _requantize(base: nn.Parameter, patches: Sequence[Patch], seed: int | None) -> Tensor:
    """A quantized weight with its patches, quantized again."""
    values = dequantize(base)
    return requantize(base, apply_patches(values, patches, out=values), seed or 0)


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


def _kind(tensor: Tensor) -> Hashable:
    return tensor.shape, tensor.dtype, tensor.device, tensor.is_inference()


def _origin(base: nn.Parameter, version: Version) -> Hashable:
    return base.data_ptr(), base.dtype, base.device, base.shape, version.load, version.stochastic


def _recipe(stacks: Iterable[Stack], names: Iterable[str]) -> tuple[int, ...]:
    return tuple(stack.serial for name in names for stack in split_stacks(stacks, name)[0])


def _merged_patches(stacks: Iterable[Stack], names: Iterable[str]) -> list[Patch]:
    """The merged patches of all names of one weight."""
    return [patch for name in names for patch in effective_patches(stacks, name, bypass=False)]


def attach(model: nn.Module, owner: Hashable, stacks: Iterable[Stack], version: Version | None = None) -> None:
    """Apply an owner's LoRA stacks to a model, through the model's ledger."""
    on_model = find_joint(model, Stacks.owner)
    if on_model is None:
        on_model = Stacks()
        enter_joint(model, on_model)
    on_model.attach(model, owner, stacks, version or Version())


def detach(model: nn.Module, owner: Hashable, version: Version | None = None) -> None:
    """Remove an owner's LoRA stacks from a model; does nothing if it has none there."""
    on_model = find_joint(model, Stacks.owner)
    if on_model is not None:
        on_model.detach(model, owner, version or Version())


def attached_stacks(model: nn.Module) -> list[Stack]:
    """The stacks that are on a model now, in order."""
    on_model = find_joint(model, Stacks.owner)
    if on_model is None:
        return []
    return list(on_model.things)


def base_weights(model: nn.Module) -> dict[str, Tensor]:
    """The base of every weight currently patched on a model, by name."""
    on_model = find_joint(model, Stacks.owner)
    if on_model is None:
        return {}
    return {
        name: weight.base if weight.saved is None else weight.saved
        for weight in on_model.weights.values()
        for name in weight.names
    }


def tick(model: nn.Module, percent: float, timestep: float | None = None) -> bool:
    """Set the scheduled strengths of attached stacks to their values when `percent` (0 to 1) of sampling is done, and
    their masked ranks to those of a timestep (0 to 1000). Returns whether any of them has changed.
    """
    on_model = find_joint(model, Stacks.owner)
    if on_model is None or not on_model.kept.clock.tick(percent, timestep):
        return False
    clear_weight_caches(model)
    return True


def forget(model: nn.Module) -> None:
    """Free what is kept for this model's next attach, unless a stack is attached."""
    if find_joint(model, Stacks.owner) is None:
        _kept_memory.pop(model, None)


def is_kept(model: nn.Module) -> bool:
    """Whether memory is kept for this model's next attach."""
    return model in _kept_memory


def weight_shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """The shape that each weight stands for, by name: a quantized weight may be packed into another shape."""
    shape_by_name = {name: tuple(weight.shape) for name, weight in module.named_parameters(remove_duplicate=False)}
    for name, part in module.named_modules():
        if (
            part._parameters.get("weight") is not None
            and supports_bypass(part)
            and why_not_plain(part, "weight", coarse=True) is not None
        ):
            shape_by_name[f"{name}.weight" if name else "weight"] = shape_of(part)
    return shape_by_name
