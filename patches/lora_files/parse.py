"""Parses LoRA files of every key format (sd-scripts, lycoris, PEFT, diffusers, ComfyUI) into layers and checks them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ...storage.problem_list import problem_lines
from ..adapters.diff import Diff
from ..adapters.file_format import FileFormat, LayerError, LayerTensors, PlacedLayer, TensorRole, Trainer
from ..adapters.layer import AdditiveLayer, Layer, WeightLayer
from ..adapters.registry import tensor_names
from ..adapters.row_parts import slice_rows
from ..models.registry import recognize_lora
from ..patching.fuse import Slice
from .key_formats import registry as key_formats
from .key_formats.key_format import Group
from .peft_config import PeftConfig, config_for
from .repeated_changes import Claim, drop_repeated
from .target import Target

_LISTED = 12
_ALPHA = "alpha"
BY_SHAPES = "(its names and shapes)"  # how a hint ends that does not come from the metadata
_EMBEDDINGS_ONLY = "to use them in prompts, put the file on a CLIP with Load LoRAs, or into ComfyUI's embeddings folder"
LARGEST_ALPHA = 1e8  # no trainer comes near: their alphas are about as large as the rank


@dataclass(frozen=True, eq=False)
class ParsedLora:
    """A parsed LoRA: layers by target, and what of the file is not used.

    - `text_encoder`: names for a text encoder that is not loaded.
    - `misfits`: why layers that match a weight do not fit it, for partial LoRAs whose other layers are used.
    - `repeated`: names for changes that the file has under another name too; `idle`: layers with an alpha alone.
    - `embeddings`: textual inversions in the file (OneTrainer, ai-toolkit). They are not part of the LoRA; `embeddings`
      reads them.
    """

    name: str
    layers: dict[Target, tuple[Layer, ...]]
    unmatched: tuple[str, ...] = ()
    text_encoder: tuple[str, ...] = ()
    kinds: dict[str, int] = field(default_factory=dict)
    embeddings: tuple[str, ...] = ()
    misfits: tuple[str, ...] = ()
    repeated: tuple[str, ...] = ()
    idle: tuple[str, ...] = ()

    @property
    def embeddings_only(self) -> bool:
        """Whether the file holds embeddings and nothing else."""
        return bool(self.embeddings) and not (self.layers or self.unmatched or self.text_encoder or self.misfits)


def read(
    state: Mapping[str, Tensor],
    key_map: Mapping[str, Target],
    shapes: Mapping[tuple[str, str], Sequence[int]],
    name: str,
    partial: bool = False,
    hint: str = "",
    configs: tuple[PeftConfig, ...] = (),
    trainer: Trainer = "",
    embeddings_are_read: bool = False,
    model_family: Callable[[], str] = str,
) -> ParsedLora:
    """Match a LoRA's state dict with a model's weights and check all of it. Nothing is changed.

    Args:
        state: the file's tensors by name.
        key_map: the target of every LoRA name that the model knows.
        shapes: the shape of each (model, weight).
        name: what errors call the file.
        partial: whether names without a weight and wrong shapes are left out.
        hint: what the file is for, in the message when nothing matches.
        configs: the PEFT settings that came with the file.
        trainer: who wrote it (see `trainer.oft_trainer`).
        embeddings_are_read: a CLIP gets the embeddings in the file, so it may hold nothing else.
        model_family: gives the title of the model's family ("" if it is unknown), for messages.

    Raises:
        ValueError: listing every problem: no match at all, names without a weight and wrong shapes (unless `partial`),
            incomplete pairs, NaN or infinite values, unavailable kinds, two names with different changes of the same
            rows.
    """
    tensors_of_layers = drop_embeddings(state)
    groups, strangers, problems = group_by_layer(tensors_of_layers, plain=False)
    claims: list[Claim] = []
    unknown: list[str] = []
    misfits: list[str] = []
    for base, tensors in groups.items():
        target = key_map.get(base)
        if target is None or any((piece.model, piece.weight) not in shapes for piece in target.pieces):
            unknown.append(base)
            continue
        config = config_for(configs, base)
        for layer_target, layer in _place_layers(base, tensors, target, shapes, config, problems, trainer):
            misfit = _misfit(layer_target, layer, shapes)
            if misfit is None:
                claims.append(Claim(base, layer_target, layer))
            else:
                misfits.append(f"{base}: {misfit}")
    used, repeated, clashes = drop_repeated(claims, shapes)
    problems += clashes
    layers: dict[Target, list[Layer]] = {}
    for claim in used:
        layers.setdefault(claim.target, []).append(claim.layer)
    encoder_names, others = _split_by_model(unknown, key_map)
    unmatched = [*strangers, *others]
    if misfits and not (partial and layers):
        rest_is_fine = layers and not problems
        problems += misfits
        if rest_is_fine:
            problems.append("mark the row as partial to use the rest")
    embeddings = key_formats.embedding_names(state)
    if not problems and not (groups or strangers) and embeddings:
        if not embeddings_are_read:
            problems.append(f"it holds embeddings only ({_list_some(embeddings)}): {_EMBEDDINGS_ONLY}")
    elif not problems:
        problems += _explain_unusable(state, groups, layers, unmatched, encoder_names, partial, hint, model_family)
    if problems:
        fits = bool(layers) and not misfits
        matches = len(unknown) < len(groups)
        raise ValueError(
            f"{name}{_purpose(hint, matches, fits, model_family)} cannot be used:\n" + problem_lines(problems)
        )
    kinds = Counter(layer.kind for target_layers in layers.values() for layer in target_layers)
    layers_by_target = {target: tuple(target_layers) for target, target_layers in layers.items()}
    return ParsedLora(
        name,
        layers_by_target,
        tuple(unmatched),
        tuple(encoder_names),
        kinds,
        tuple(embeddings),
        tuple(misfits),
        repeated,
        tuple(base for base in _with_alphas(tensors_of_layers) if base not in groups),
    )


def _split_by_model(unknown: Sequence[str], key_map: Mapping[str, Target]) -> tuple[list[str], list[str]]:
    """Divide unknown names: (those of a text encoder that is not loaded, the others)."""
    if any(target.model == "clip" for target in key_map.values()):
        return [], list(unknown)
    prefixes = key_formats.text_encoder_prefixes()
    encoder_names = [base for base in unknown if base.startswith(prefixes)]
    others = [base for base in unknown if not base.startswith(prefixes)]
    return encoder_names, others


def _purpose(hint: str, matches: bool, fits: bool, model_family: Callable[[], str]) -> str:
    """What a file is made for, where that is known and some of its names match.

    A file whose layers all fit is for the model's own family, whatever other family has the same names and shapes.
    """
    if fits and hint.endswith(BY_SHAPES) and model_family():
        hint = f"{model_family()} {BY_SHAPES}"
    if hint and matches:
        return f", made for {hint},"
    return ""


def read_layers(
    state: Mapping[str, Tensor], configs: tuple[PeftConfig, ...] = ()
) -> tuple[list[tuple[str, bool, Layer]], list[str]]:
    """All layers of a LoRA without a model to check them against.

    Args:
        state: the file's tensors by generic names.
        configs: the PEFT settings that came with the file.

    Returns:
        ([(name in the file, whether for the bias, layer)], problems).
    """
    groups, strangers, problems = group_by_layer(drop_embeddings(state), plain=False)
    problems += [f"{key} is not a LoRA tensor" for key in strangers]
    layers: list[tuple[str, bool, Layer]] = []
    for base, tensors in groups.items():
        weight = Target("", f"{base}.weight")
        for target, layer in _parse_layers(
            base, tensors, weight, defaultdict(tuple), config_for(configs, base), problems
        ):
            layers.append((base, target.weight != weight.weight, layer))
    return layers, problems


def add_alphas(state: Mapping[str, Tensor], configs: tuple[PeftConfig, ...]) -> dict[str, Tensor]:
    """A LoRA with the scales that PEFT keeps in its settings beside the file: as alphas, or, in a layer without a rank
    that alpha is divided by (a LoKr of two whole matrices), multiplied into a tensor.

    Args:
        state: the file's tensors by name; it is not changed.
        configs: the PEFT settings that came with the file.
    """
    groups, _, _ = group_by_layer(state, plain=False)
    scaled = dict(state)
    for base, group in groups.items():
        config = config_for(configs, base)
        if config is None or "alpha" in group:
            continue
        ranks = dividing_ranks(group)
        scale = config.scale(base, ranks[0] if ranks else None)
        if scale is None:
            continue
        if ranks:
            scaled[f"{base}.alpha"] = torch.tensor(scale * ranks[0])
            continue
        for role in _roles(group):
            if role.takes_scale:
                key, tensor = group[role.name]
                scaled[key] = tensor.float() * scale
    return scaled


def dividing_ranks(group: Group) -> list[int]:
    """The sides of a layer's tensors that alpha is divided by; where there are several the first one counts."""
    return [len(group[role.name][1]) for role in _roles(group) if role.divides_alpha]


def _roles(group: Group) -> list[TensorRole]:
    """The records of a layer's tensors, in the order of the registry."""
    return [role for role in tensor_names().roles.values() if role.name in group]


def drop_embeddings(state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """A LoRA file without the textual inversions in it."""
    return {key: tensor for key, tensor in state.items() if key_formats.embedding_name(key) is None}


def layer_names(state: Collection[str]) -> list[str]:
    """Every layer named by a LoRA's keys, once."""
    layers = (tensor_names().layer_and_role(key, state) for key in state)
    return list(dict.fromkeys(base for base, role in layers if role is not None))


def summarize(shapes: Mapping[str, Sequence[int]]) -> tuple[dict[str, int], list[int]]:
    """Summarize a LoRA file from names and shapes. Tensors that are not a LoRA's are not counted.

    Args:
        shapes: of its tensors, by name.

    Returns:
        ({kind of layer: count}, all ranks).
    """
    names = tensor_names()
    groups: dict[str, dict[str, Sequence[int]]] = {}
    for key, shape in shapes.items():
        base, role = names.layer_and_role(key, shapes)
        if role is not None:
            groups.setdefault(base, {})[role] = shape
    kinds: dict[str, int] = {}
    ranks = set()
    for roles in groups.values():
        for name in _labels(roles):
            kinds[name] = kinds.get(name, 0) + 1
        for role_record in names.roles.values():
            shape = roles.get(role_record.name, ())
            if role_record.is_rank and len(shape) > 1:
                ranks.add(shape[0])
    return kinds, sorted(ranks)


def _labels(roles: Mapping[str, Sequence[int]]) -> list[str]:
    """The kind of a layer with tensors of these shapes, as a summary names it."""
    present = [file_format for file_format in tensor_names().formats if file_format.is_in(roles)]
    alone = [file_format for file_format in present if file_format.place == "alone"]
    around = [file_format for file_format in present if file_format.place == "around"]
    beside = [file_format for file_format in present if file_format.place == "beside"]
    return [name for file_format in (*alone[:1], *around, *beside) for name in file_format.names_in(roles)]


def group_by_layer(state: Mapping[str, Tensor], plain: bool = True) -> tuple[dict[str, Group], list[str], list[str]]:
    """Group a LoRA's tensors by layer. A layer with an alpha alone is left out: it does nothing. So is a tensor that is
    there twice, as `lora_up` and as `lora_B`.

    Args:
        state: the file's tensors by name.
        plain: whether everything but factor pairs and differences is refused.

    Returns:
        (tensors by layer name and role, unknown keys, problems).
    """
    groups: dict[str, Group] = {}
    strangers: list[str] = []
    problems: list[str] = []
    unavailable: dict[str, list[str]] = {}
    names = tensor_names()
    for key, tensor in state.items():
        base, role = names.layer_and_role(key, state)
        if role is None:
            strangers.append(key)
            continue
        refusal = names.refusal(role, plain)
        if refusal:
            unavailable.setdefault(refusal, []).append(key)
            continue
        group = groups.setdefault(base, {})
        if role in group and not _same_tensor(group[role][1], tensor):
            problems.append(f"{key}: {group[role][0]} is the same tensor of the same layer, with other values")
        group.setdefault(role, (key, tensor))
    for kind, keys in sorted(unavailable.items()):
        problems.append(
            f"{kind} is not available {'here' if plain else 'in this version of Graft'} ({_list_some(keys)});"
            f" {_INSTEAD[plain]}"
        )
    return {base: group for base, group in groups.items() if group.keys() != {_ALPHA}}, strangers, problems


def _same_tensor(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one.float(), other.float())


def _with_alphas(state: Iterable[str]) -> list[str]:
    """The layers for which a file has an alpha."""
    return [key.removesuffix(f".{_ALPHA}") for key in state if key.endswith(f".{_ALPHA}")]


_INSTEAD = {True: "only factor pairs and differences are", False: "use ComfyUI's own LoRA loader for this file"}


def _place_layers(
    base: str,
    group: Group,
    target: Target,
    shapes: Mapping[tuple[str, str], Sequence[int]],
    config: PeftConfig | None,
    problems: list[str],
    trainer: Trainer,
) -> Iterator[tuple[Target, Layer]]:
    """`_layers`, where the rows of a layer may be in several weights of the model."""
    if not target.more:
        yield from _parse_layers(base, group, target, shapes, config, problems, trainer)
        return
    lengths = [piece.part[2] if piece.part else shapes[piece.model, piece.weight][0] for piece in target.pieces]
    whole = Target(target.model, f"{base}.weight")
    shape = (sum(lengths), *shapes[target.model, target.weight][1:])
    biases = [_bias_of(piece) for piece in target.pieces]
    virtual = {(whole.model, whole.weight): shape}
    if all((bias.model, bias.weight) in shapes for bias in biases):
        virtual[whole.model, _bias_of(whole).weight] = shape[:1]
    for found, layer in _parse_layers(base, group, whole, virtual, config, problems, trainer):
        on_bias = found.weight != whole.weight
        full = shape[:1] if on_bias else shape
        mismatch = layer.mismatch(full)
        if mismatch is not None or found.part is not None:
            problems.append(f"{base}: {mismatch or 'it is for some rows'} (of {_weights(target)} in one)")
            return
        start = 0
        for piece, bias, length in zip(target.pieces, biases, lengths, strict=True):
            rows = slice_rows(layer, start, length, full)
            if rows is None:
                problems.append(
                    f"{base}: {layer.kind} on {_weights(target)} in one, which this model holds apart; use ComfyUI's"
                    " own LoRA loader for this file"
                )
                return
            yield (bias if on_bias else piece), rows
            start += length


def _weights(target: Target) -> str:
    return ", ".join(piece.weight for piece in target.pieces)


def _parse_layers(
    base: str,
    group: Group,
    target: Target,
    shapes: Mapping[tuple[str, str], Sequence[int]],
    config: PeftConfig | None,
    problems: list[str],
    trainer: Trainer = "",
) -> Iterator[tuple[Target, Layer]]:
    """The layers built from the tensors of one name, and their targets; errors are added to `problems`."""
    present = [file_format for file_format in tensor_names().formats if file_format.is_in(group)]
    tensors = {role: tensor for role, (_, tensor) in group.items()}
    if any(file_format.ignores_alpha(tensors) for file_format in present):
        tensors.pop("alpha", None)
    for role, tensor in tensors.items():
        if not is_finite(tensor):
            problems.append(f"{group[role][0]}: holds NaN or infinite values")
    alpha = tensors.get("alpha")
    if alpha is not None and alpha.numel() != 1:
        problems.append(f"{group['alpha'][0]}: expected one number, got {tuple(alpha.shape)}")
        return
    if alpha is not None and is_finite(alpha) and abs(float(alpha)) > LARGEST_ALPHA:
        problems.append(f"{group['alpha'][0]}: is {float(alpha):g}, expected at most {LARGEST_ALPHA:g}; it is damaged")
    contradiction = _contradiction(group, present)
    if contradiction is not None:
        problems.append(f"{base}: {contradiction}")
        return
    malformed = [error for role, (key, tensor) in group.items() for error in _tensor_errors(role, key, tensor)]
    if malformed:
        problems += malformed
        return
    bias = _bias_of(target)
    layer_tensors = LayerTensors(
        name=base,
        tensors=tensors,
        alpha=None if alpha is None else float(alpha),
        weight_shape=shapes[target.model, target.weight],
        has_bias=(bias.model, bias.weight) in shapes,
        peft=config,
        trainer=trainer,
    )
    try:
        placed_layers = _build_layers(layer_tensors, present)
    except LayerError as error:
        problems.append(f"{base}: {error}")
        return
    for placed in placed_layers:
        yield _place(target, placed), placed.layer


# what `is_finite` found of each tensor that is still in use, and the version of its contents
_finite_tensors: MutableMapping[Tensor, tuple[int, bool]] = WeakTensorKeyDictionary()


def is_finite(tensor: Tensor) -> bool:
    """Whether a file's numbers are finite in float32, in which they are computed with.

    Each tensor is looked at once: a row whose strength changes keeps its file's tensors.
    """
    if tensor.is_inference():  # its contents may change without a new version
        return _all_finite(tensor)
    looked_at = _finite_tensors.get(tensor)
    if looked_at is None or looked_at[0] != tensor._version:
        looked_at = tensor._version, _all_finite(tensor)
        _finite_tensors[tensor] = looked_at
    return looked_at[1]


def _all_finite(tensor: Tensor) -> bool:
    if tensor.element_size() in (1, 8):
        tensor = tensor.float()
    return bool(torch.isfinite(tensor).all())


def _build_layers(tensors: LayerTensors, formats: Sequence[FileFormat]) -> list[PlacedLayer]:
    """The layers of one name: the main layer with its wrappers, then the layers beside it; biases after weights."""
    main = [placed for file_format in formats if file_format.place == "alone" for placed in file_format.build(tensors)]
    for file_format in formats:
        if file_format.place == "around":
            inner = main[0].layer if main else None
            main[:1] = file_format.build(replace(tensors, inner=inner))
    by_format = [main, *(list(file_format.build(tensors)) for file_format in formats if file_format.place == "beside")]
    weights = [placed for layers in by_format for placed in layers if not placed.on_bias]
    biases = [placed for layers in reversed(by_format) for placed in layers if placed.on_bias]
    return weights + biases


def _place(target: Target, placed: PlacedLayer) -> Target:
    """The target of a layer built from a target's tensors."""
    if placed.on_bias:
        return _bias_of(target)
    if placed.rows is None:
        return target
    start, length = placed.rows
    if target.part is not None:
        start += target.part[1]
    return target._replace(part=(0, start, length))


def _bias_of(target: Target) -> Target:
    weight = target.weight.removesuffix(".weight") + ".bias"
    return Target(target.model, weight, _rows(target.part), target.function)


def _contradiction(group: Group, formats: Sequence[FileFormat]) -> str | None:
    """Why the tensors of one layer contradict each other, or None."""
    keys = ", ".join(sorted(key for key, _ in group.values()))
    alone = [file_format for file_format in formats if file_format.place == "alone"]
    if len(alone) > 1:
        return f"expected one kind of layer, got {' and '.join(layer_format.name for layer_format in alone)} ({keys})"
    for file_format in formats:
        missing = file_format.missing_roles(group)
        if missing:
            listed = "; ".join(f"{file_format.name}: {role} is missing" for role in missing)
            return f"{file_format.incomplete or listed}, got only {keys}"
    return None


def _tensor_errors(role: str, key: str, tensor: Tensor) -> Iterator[str]:
    """The errors of a single tensor."""
    if not tensor.numel() or tensor.is_complex():
        numbers = "complex ones" if tensor.is_complex() else "none"
        yield f"{key}: expected real numbers, got {numbers} {tuple(tensor.shape)}"
        return
    error = tensor_names().roles[role].check(role, tensor)
    if error is not None:
        yield f"{key}: {error}"


def _rows(part: Slice | None) -> Slice | None:
    """The part of the bias for a part of its weight."""
    return part if part is not None and part[0] == 0 else None


def _misfit(target: Target, layer: Layer, shapes: Mapping[tuple[str, str], Sequence[int]]) -> str | None:
    """Why a layer does not fit its target, or None."""
    shape = shapes.get((target.model, target.weight))
    if shape is None:
        return f"the model has no {target.weight}"
    if target.part is not None:
        shape = [target.part[2] if dimension == target.part[0] else side for dimension, side in enumerate(shape)]
    problem = layer.mismatch(shape)
    if problem is None and target.function is not None and not layer.is_additive:
        problem = _unknown_order(target.function, layer, shape)
    if problem is None:
        return None
    return f"{problem} ({target.weight})"


def _unknown_order(function: Callable[[Tensor], Tensor], layer: Layer, shape: Sequence[int]) -> str | None:
    """Why a layer that computes a new weight cannot follow what a host does to differences, or None."""
    from ..adapters.row_order import row_order

    if row_order(function, shape) is not None:
        return None
    return (
        f"{layer.kind} on a weight that this model holds in another form than the file; use ComfyUI's own LoRA loader"
        " for this file"
    )


def _explain_unusable(
    state: Mapping[str, Tensor],
    groups: Mapping[str, Group],
    layers: Mapping[Target, list[Layer]],
    unmatched: Sequence[str],
    text: Sequence[str],
    partial: bool,
    hint: str,
    model_family: Callable[[], str],
) -> list[str]:
    if not groups:
        return [f"it holds no LoRA layer ({_list_some(unmatched or state)})" if state else "it is empty"]
    if not layers and text and not unmatched:
        return [f"it is for a text encoder only ({_list_some(text)}); connect CLIP"]
    if not layers:
        family = recognize_lora((name, tensor.shape) for name, tensor in state.items())
        if family is not None and family.title == model_family():
            return [
                f"it is for {family.title}, as this model is, but all of its names are unknown"
                f" ({_list_some([*unmatched, *text])}); try ComfyUI's own LoRA loader"
            ]
        return [f"no key matches this model, it is for {hint or 'another one'} ({_list_some([*unmatched, *text])})"]
    if unmatched and not partial:
        return [
            f"{len(unmatched)} of {len(groups) + len(unmatched) - sum(name in groups for name in unmatched)} names"
            f" match no weight of this model ({_list_some(unmatched)}); mark the row as partial to use the rest"
        ]
    return []


def _list_some(names: Iterable[str]) -> str:
    listed = sorted(names)
    return ", ".join(listed[:_LISTED]) + (f" and {len(listed) - _LISTED} more" if len(listed) > _LISTED else "")


def patches_of(
    parsed: ParsedLora, model: str, shapes: Mapping[tuple[str, str], Sequence[int]]
) -> Iterator[tuple[str, Layer, Slice | None]]:
    """The layers for one model, for the model's own order of rows.

    Args:
        parsed: the file.
        model: "model" or "clip".
        shapes: the shape of each (model, weight).

    Yields:
        (weight, layer, part of the weight) of each.
    """
    for target, layers in parsed.layers.items():
        if target.model != model:
            continue
        shape = list(shapes[target.model, target.weight])
        if target.part is not None:
            shape[target.part[0]] = target.part[2]
        for layer in layers:
            yield target.weight, _reorder_rows(layer, target.function, shape), target.part


def _reorder_rows(layer: Layer, function: Callable[[Tensor], Tensor] | None, shape: Sequence[int]) -> Layer:
    """A layer after what a host does to the difference that it makes."""
    from ..adapters.row_order import InRowOrder, row_order

    if function is None:
        return layer
    if layer.is_additive:
        return Diff(function(cast(AdditiveLayer, layer).delta(shape)))
    rows = row_order(function, shape)
    assert rows is not None, "a layer that does not fit was let through"
    return InRowOrder(cast(WeightLayer, layer), rows)
