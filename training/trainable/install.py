"""What is trained: an adapter at the activations of chosen modules, or copies of the weights themselves.

Makes the initial values, installs them on a model for a block, and names them as a LoRA.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...patches.adapters.diff import difference_name, parameter_name
from ...patches.adapters.tlora import SCHEDULE
from ...patches.adapters.trainable import InitSource, Tensors, TrainedTensor, initial_tensors
from ...patches.core.calls import around
from ...patches.core.handle import Handle
from ...patches.core.ledger import open_entry
from ...patches.core.slots import Swaps, slots_by_tensor
from ...storage.problem_list import problem_lines
from ..memory.inference_tensors import use_normal_tensors
from ..memory.quantized_base.base import quantized_values
from ..random_draws import generator
from .dropout import AdapterDropout, Moment
from .settings import TEXT_ENCODER, AdapterSettings
from .targets import AdapterTarget, adapter_targets
from .words import drop_words, select_words

_PREFIX = "diffusion_model."
_FROM_SETTINGS = (".alpha", f".{SCHEDULE}")  # what a LoRA has beside the trained tensors


def group_by_module(trained: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Trained tensors of adapters by their module.

    Args:
        trained: {name: tensor}, with names such as `<path>.lora_down.weight`.

    Returns:
        {path: {suffix: tensor}}.
    """
    modules: dict[str, dict[str, Tensor]] = {}
    for name, tensor in trained.items():
        path, _, suffix = name.removesuffix(".weight").rpartition(".")
        if name.endswith(".weight"):
            suffix += ".weight"
        modules.setdefault(path, {})[suffix] = tensor
    return modules


# --- initial values ---------------------------------------------------------------------------------------------------


def init_trainable(
    module: nn.Module,
    settings: AdapterSettings,
    seed: int,
    base: Mapping[str, Tensor],
    text_encoder: nn.Module | None = None,
    read: Collection[str] | None = None,
) -> dict[str, Tensor]:
    """The trained tensors before the first step.

    Adapters are initialized by their kind, drawn from (seed, module name); kind full copies the weights in `base`.

    Args:
        module: the model.
        settings: what is trained.
        seed: the run's seed.
        base: the model's own weights by parameter name. Names of the text encoder begin with `text_encoders.`, here and
            in the result.
        text_encoder: the text encoder, if it is trained too.
        read: the paths of its parts that can learn something; None is all of them.

    Returns:
        {name: tensor in float32 on the CPU}. Names are `<path>.lora_down.weight` and so on, or the parameter's own.

    Raises:
        ValueError: where the settings choose no module.
    """
    targets = adapter_targets(module, settings, text_encoder)
    if read is not None:
        targets = {path: target for path, target in targets.items() if _can_learn(path, read)}
    if settings.full_weights:
        return _copy_weights(module, text_encoder, targets, base)
    trained: dict[str, Tensor] = {}
    for path, target in targets.items():
        for suffix, tensor in init_module(settings, target, seed).items():
            trained[f"{path}.{suffix}"] = tensor
    if settings.initial is not None:
        _start_from_(trained, settings, targets)
    return trained


def _can_learn(path: str, read: Collection[str]) -> bool:
    return not path.startswith(TEXT_ENCODER) or path[len(TEXT_ENCODER) :] in read


def init_module(settings: AdapterSettings, target: AdapterTarget, seed: int) -> dict[str, Tensor]:
    """The trained tensors of one module before the first step; what the module computes stays the same.

    Args:
        settings: the kind of adapter.
        target: the module.
        seed: the run's seed.

    Returns:
        {suffix: tensor in float32 on the CPU}.
    """

    def norms() -> Tensor:
        return _column_norms(target.module, None)

    def source_of(record: TrainedTensor) -> InitSource:
        purpose = f"start {target.path}"
        if record.seeded_by_suffix:
            purpose += f" {record.suffix}"
        return InitSource(partial(generator, seed, 0, purpose), norms)

    return initial_tensors(settings.adapter.tensors(target), source_of)


def _copy_weights(
    module: nn.Module, text_encoder: nn.Module | None, targets: Mapping[str, AdapterTarget], base: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    first_names = {name for name, _ in module.named_parameters()}  # what modules share is trained under its first name
    if text_encoder is not None:
        first_names |= {TEXT_ENCODER + name for name, _ in text_encoder.named_parameters()}
    names = []
    for path, target in targets.items():
        names += [_join(path, name) for name, _ in target.module.named_parameters(recurse=False)]
    names = [name for name in names if name in first_names]
    quantized = [name for name in names if not _is_plain(base[name])]
    if quantized:
        example = quantized[0]
        raise ValueError(
            f"Adapter Settings: adapter type full trains weights, and {len(quantized)} of them are quantized"
            f" ({example}: {base[example].dtype}); use another adapter type, which trains beside them, or a model that"
            " is not quantized."
        )
    return {name: _copy_to_train(base[name].detach()) for name in names}


def _copy_to_train(weight: Tensor) -> Tensor:
    if weight.is_meta:  # of a model that is only planned
        return weight.to(torch.float32, copy=True)
    return weight.to("cpu", torch.float32, copy=True)


def _join(path: str, name: str) -> str:
    if path in ("", TEXT_ENCODER):
        return path + name
    return f"{path}.{name}"


def _is_plain(weight: Tensor) -> bool:
    return weight.is_floating_point() and weight.element_size() > 1 and type(weight) in (Tensor, nn.Parameter)


@torch.no_grad()
def _column_norms(module: nn.Module, change: Tensor | None) -> Tensor:
    """The norms (in,) of the columns of a module's weight plus a change, in float32 or wider; DoRA starts from them.

    A quantized weight is read as the module computes with it.
    """
    weight = _weight_values(module)
    changed = weight if change is None else weight + change.to(weight.device, weight.dtype)
    return changed.transpose(0, 1).flatten(1).norm(dim=1)


def _weight_values(module: nn.Module) -> Tensor:
    """A module's weight as the module computes with it.

    A weight with a quantization of its own is read by sending unit vectors through the module.
    """
    quantized = quantized_values(module)
    if quantized is not None:
        return quantized
    weight = module.weight
    assert isinstance(weight, Tensor)
    if _is_plain(weight):
        if weight.dtype == torch.float64:
            return weight
        return weight.float()
    units = torch.eye(int(module.in_features), device=weight.device)  # type: ignore[arg-type]
    zero_input = units.new_zeros(1, units.shape[0])
    forward = type(module).forward.__get__(module)
    return (forward(units) - forward(zero_input)).T.float()


def _start_from_(trained: dict[str, Tensor], settings: AdapterSettings, targets: Mapping[str, AdapterTarget]) -> None:
    """Start from another LoRA: overwrite initial values with the tensors of `settings.initial`.

    Its own alpha is multiplied in. Raises ValueError with every mismatch.
    """
    assert settings.initial is not None
    initial = {name.removeprefix(_PREFIX): tensor for name, tensor in settings.initial.items()}
    suffixes = {path: [record.suffix for record in settings.adapter.tensors(t)] for path, t in targets.items()}
    errors = [*_tensor_mismatches(initial, trained), *_incomplete_layers(initial, suffixes)]
    common = initial.keys() & trained.keys()
    if not common:
        errors.append("no tensor of it is one that these settings train")
    if errors:
        count = len(errors)
        raise ValueError(f"Adapter Settings: initial LoRA does not fit ({count}):\n" + problem_lines(errors, "  "))
    for name in common:
        trained[name] = initial[name].detach().to("cpu", torch.float32).clone()
    for path, target in targets.items():
        for suffix in settings.adapter.all_scale_tensors:
            name = f"{path}.{suffix}"
            if name in initial and settings.adapter.alpha_counts(suffixes[path]):
                alpha = initial.get(f"{path}.alpha")
                given_alpha = target.rank if alpha is None else float(alpha)
                trained[name] = trained[name] * (given_alpha / target.alpha)


def _tensor_mismatches(given: Mapping[str, Tensor], trained: Mapping[str, Tensor]) -> Iterator[str]:
    for name in sorted(given.keys() - trained.keys()):
        if not name.endswith(_FROM_SETTINGS):
            yield f"{name}: not a tensor that these settings train"
    for name in sorted(given.keys() & trained.keys()):
        if given[name].shape != trained[name].shape:
            yield f"{name}: expected {tuple(trained[name].shape)}, got {tuple(given[name].shape)}"
        elif not torch.isfinite(given[name]).all():
            yield f"{name}: has values that are not finite"


def _incomplete_layers(given: Mapping[str, Tensor], suffixes: Mapping[str, Sequence[str]]) -> Iterator[str]:
    for path, layer_suffixes in suffixes.items():
        names = [f"{path}.{suffix}" for suffix in layer_suffixes]
        if any(name in given for name in names):
            yield from (f"{name}: missing beside the others of its layer" for name in names if name not in given)


# --- as a LoRA --------------------------------------------------------------------------------------------------------


def make_lora(
    trained: Mapping[str, Tensor], settings: AdapterSettings, base: Mapping[str, Tensor] | None
) -> dict[str, Tensor]:
    """The trained tensors as a LoRA under ComfyUI's generic names.

    Args:
        trained: the trained tensors by name.
        settings: what is trained.
        base: the model's own weights by parameter name, which full weights become differences from (`.diff`,
            `.diff_b`). None for adapters.

    Returns:
        {name: tensor in float32 on the CPU}. Names are `diffusion_model.<path>.<suffix>` and
        `text_encoders.<path>.<suffix>`. Each adapter gets an `.alpha`. Trained words keep their names.
    """
    words = select_words(trained)
    lora = _make_layers(drop_words(trained), settings, base)
    for name, tensor in words.items():
        lora[name] = tensor.detach().to("cpu", torch.float32).clone()
    return lora


def _make_layers(
    trained: Mapping[str, Tensor], settings: AdapterSettings, base: Mapping[str, Tensor] | None
) -> dict[str, Tensor]:
    lora: dict[str, Tensor] = {}
    if settings.full_weights:
        if base is None:
            raise ValueError("Differences of whole weights need the base weights, and none are attached to this state.")
        for name, tensor in trained.items():
            value = tensor.detach().to("cpu", torch.float32)
            lora[difference_name(_generic_name(name))] = value - base[name].detach().to("cpu", torch.float32)
        return lora
    for name, tensor in trained.items():
        lora[_generic_name(name)] = tensor.detach().to("cpu", torch.float32).clone()
    for path, tensors in group_by_module(trained).items():
        alpha = 0.0  # lycoris' OFT: no constraint
        if settings.adapter.takes_alpha:
            rank, alpha = settings.size_of(path)[:2]
            if not settings.adapter.alpha_counts(tensors):
                alpha = float(rank)  # as lycoris, so that alpha / rank is the scale for whoever knows the rank
        lora[f"{_generic_name(path)}.alpha"] = torch.tensor(alpha)
        mask = settings.rank_mask_of(path)
        if mask is not None:
            lora[f"{_generic_name(path)}.{SCHEDULE}"] = torch.tensor([float(mask.min_rank), mask.exponent])
    return lora


def _generic_name(name: str) -> str:
    if name.startswith(TEXT_ENCODER):
        return name
    return _PREFIX + name


def read_lora(
    lora: Mapping[str, Tensor], settings: AdapterSettings, base: Mapping[str, Tensor] | None
) -> dict[str, Tensor]:
    """The trained tensors of a LoRA that `make_lora` made: factors stay as they are, differences are added to `base`.

    Args:
        lora: the LoRA's tensors by name. Alpha comes from the settings.
        settings: what is trained.
        base: the model's own weights by parameter name, for full weights.

    Returns:
        {name: tensor in float32}, as `init_trainable` names them.
    """
    words = {name: tensor.clone() for name, tensor in select_words(lora).items()}
    return {**_read_layers(drop_words(lora), settings, base), **words}


def _read_layers(
    lora: Mapping[str, Tensor], settings: AdapterSettings, base: Mapping[str, Tensor] | None
) -> dict[str, Tensor]:
    if not settings.full_weights:
        factors = {name: tensor for name, tensor in lora.items() if not name.endswith(_FROM_SETTINGS)}
        return {name.removeprefix(_PREFIX): tensor.clone() for name, tensor in factors.items()}
    if base is None:
        raise ValueError("Whole weights from differences need the base weights, and none are attached to this state.")
    trained: dict[str, Tensor] = {}
    for name, tensor in lora.items():
        parameter = parameter_name(name.removeprefix(_PREFIX), base)
        trained[parameter] = base[parameter].detach().to("cpu", torch.float32) + tensor
    return trained


@torch.no_grad()
def limit_norms_(trained: Mapping[str, Tensor], settings: AdapterSettings) -> Tensor:
    """Maximum weight norm: scale down in place each change whose norm is above the limit. It is kohya's
    scale_weight_norms.

    Args:
        trained: the trained tensors by name, which change.
        settings: what is trained, and the limit `max_norm`, a Frobenius norm; that of a rotation is of its blocks. 0 is
            no limit.

    Returns:
        How many were scaled down, as a tensor without dimensions, because reading it waits for the device.
    """
    if not settings.max_norm:
        return torch.tensor(0)
    adapter, exceeded = settings.adapter, []
    for path, tensors in group_by_module(drop_words(trained)).items():
        norm = adapter.norm(tensors, adapter.scale(tensors, *settings.size_of(path)))
        exceeded.append(norm > settings.max_norm)
        adapter.rescale_(tensors, settings.max_norm / norm.clamp(min=settings.max_norm))
    if not exceeded:
        return torch.tensor(0)
    return torch.stack([one.to(exceeded[0].device) for one in exceeded]).sum()


# --- installing -------------------------------------------------------------------------------------------------------


@contextmanager
def _install_weights(
    module: nn.Module, trained: Mapping[str, Tensor], waiting: Container[str]
) -> Iterator[Callable[[], None]]:
    """A context in which the named parameters of `module` are the trained ones, in the model's own type.

    Before each forward pass, float32 ones are cast to that type, so that their gradients are float32. It yields a
    function that casts them without a forward pass. Those that are `waiting` are cast where they come over.
    """
    parameters = dict(module.named_parameters())
    others = {
        name: tensor
        for name, tensor in trained.items()
        if parameters[name].dtype != tensor.dtype and name not in waiting
    }
    dtypes = {name: parameters[name].dtype for name in others}
    with open_entry(module, "trained weights") as stack:
        stack.enter_context(use_normal_tensors(module, {n: t for n, t in trained.items() if n not in others}))
        found, names = slots_by_tensor(module), dict(module.named_parameters())
        held = {name: stack.enter_context(Swaps(found[id(names[name])], names[name])) for name in others}

        def cast() -> None:
            for name, tensor in others.items():
                held[name].put(tensor.to(dtypes[name]))

        def call(_: nn.Module, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            cast()
            return inner(*args, **kwargs)

        stack.enter_context(around(module, "cast", call))
        yield cast


@contextmanager
def attach(
    module: nn.Module,
    settings: AdapterSettings,
    trained: Mapping[str, Tensor],
    moment: Moment,
    text_encoder: nn.Module | None = None,
    strength: float = 1.0,
    waiting: Container[str] = (),
) -> Iterator[Callable[[], None]]:
    """A context in which a model computes with the trained tensors; its own weights are frozen and fit for autograd.
    Afterwards the model is as before.

    Args:
        module: the model.
        settings: what is trained.
        trained: the trained tensors by name.
        moment: gives (seed, step, purpose) of the forward pass that runs, which dropout is drawn from.
        text_encoder: the text encoder, if it is trained too; the same holds for it.
        strength: of the adapters.
        waiting: trained weights of the model, by name, that lie in host memory and come over with their block.

    Yields:
        A function that must be called before parts of the text encoder compute, because a host calls those and never
        the whole.
    """
    trained = drop_words(trained)
    cast_weights: Callable[[], None] = lambda: None  # noqa: E731  # adapters have nothing to cast
    parts = {"": module}
    if text_encoder is not None:
        parts[TEXT_ENCODER] = text_encoder
    with open_entry(module, "training") as stack:
        if settings.full_weights:
            for prefix, part in parts.items():
                part_weights = {n: t for n, t in trained.items() if n.startswith(TEXT_ENCODER) == bool(prefix)}
                weights = {name.removeprefix(prefix): tensor for name, tensor in part_weights.items()}
                # of the text encoder, which comes last
                cast_weights = stack.enter_context(_install_weights(part, weights, waiting))
            yield cast_weights
            return
        for part in parts.values():
            stack.enter_context(use_normal_tensors(part))
        tensors = group_by_module(trained)
        for path, target in adapter_targets(module, settings, text_encoder).items():
            if path in tensors:  # except parts of the text encoder whose output is unused
                dropout = AdapterDropout(settings, path, moment)
                at_strength = settings.adapter.at_strength(tensors[path], strength)
                stack.enter_context(_put_adapter(settings, target, at_strength, dropout))
        yield cast_weights


def _put_adapter(settings: AdapterSettings, target: AdapterTarget, tensors: Tensors, dropout: AdapterDropout) -> Handle:
    """Put an adapter around the forward of its module, until the handle leaves."""
    adapter, module = settings.adapter, target.module

    def column_norms(now: Tensors) -> Tensor:
        return _column_norms(module, adapter.change(now, target))

    before, after = adapter.hooks(target, tensors, dropout, column_norms)

    def call(module: nn.Module, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if before is not None:
            args = before(module, args)
        out = inner(*args, **kwargs)
        if after is not None:
            out = after(module, args, out)
        return out

    return around(module, "adapter", call)
