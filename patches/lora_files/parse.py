"""LoRA state dicts of every spelling (kohya-ss/sd-scripts, lycoris, PEFT, diffusers, ComfyUI), read into layers and
checked whole.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, cast

import torch
from torch import Tensor

from ..adapters.layer import (
    IA3,
    OFT,
    Additive,
    Diff,
    DoRA,
    GLoRA,
    InputOFT,
    Layer,
    LoHa,
    LoKr,
    LoRA,
    Set,
    neumann_rotations,
)
from ..patching.fuse import Slice
from .peft_config import PeftConfig, config_for

_ROLES = {  # suffix -> what the tensor is; the longest suffix that fits counts
    ".lora_up.weight": "up",
    ".lora_down.weight": "down",
    ".lora_mid.weight": "mid",
    ".lora_B.weight": "up",
    ".lora_A.weight": "down",
    ".lora_B.default.weight": "up",
    ".lora_A.default.weight": "down",
    ".lora_B": "up",
    ".lora_A": "down",
    ".lora.up.weight": "up",
    ".lora.down.weight": "down",
    "_lora.up.weight": "up",
    "_lora.down.weight": "down",
    ".lora_linear_layer.up.weight": "up",
    ".lora_linear_layer.down.weight": "down",
    ".alpha": "alpha",
    ".diff": "diff",
    ".diff_b": "diff_b",
}
_LOKR = ("lokr_w1", "lokr_w2", "lokr_w1_a", "lokr_w1_b", "lokr_w2_a", "lokr_w2_b", "lokr_t2")
_PARTS = 4  # of a fused weight that kohya's OFT for Flux turns one by one
_LOHA = ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")
_SAME = (
    *_LOKR,
    *_LOHA,
    "hada_t1",
    "hada_t2",
    "dora_scale",
    "oft_blocks",
    "oft_diag",
    "rescale",
    "w_norm",
    "b_norm",
    "set_weight",
    "on_input",
    "ia3_l",
    "boft_R",
    "boft_s",
)
_MORE_ROLES = {
    **{f".{name}": name for name in _SAME},
    **{f".{name}.weight": name for name in ("a1", "a2", "b1", "b2", "bm")},
    **{f".oft_blocks.{number}": f"oft_blocks.{number}" for number in range(_PARTS)},
    ".oft_R.weight": "oft_R",
    ".oft_R.default.weight": "oft_R",
    ".boft_R.default": "boft_R",
    ".boft_s.default": "boft_s",
    **dict.fromkeys(
        (".lora_magnitude_vector", ".lora_magnitude_vector.weight", ".lora_magnitude_vector.default.weight"),
        "magnitude",
    ),
    **dict.fromkeys((".lora_B.bias", ".lora_up.bias", ".lora_B.default.bias"), "up_bias"),
}
_REFUSED = {
    ".reshape_weight": "a weight that grows (reshape_weight)",
    ".oft_R": "OFT of PEFT before 0.15",
    ".oft_r": "OFT of PEFT before 0.15",
    ".lora_A.bias": "a bias between the factors",
    ".lora_down.bias": "a bias between the factors",
    ".q_layer.weight": "T-LoRA",
    ".p_layer.weight": "T-LoRA",
    ".lambda_layer": "T-LoRA",
}
_SUFFIXES = sorted((*_ROLES, *_MORE_ROLES, *_REFUSED), key=len, reverse=True)
_KINDS = {  # role -> family, for whoever works with factor pairs and differences alone
    **dict.fromkeys((*_LOHA, "hada_t1", "hada_t2"), "LoHa"),
    **dict.fromkeys(_LOKR, "LoKr"),
    **dict.fromkeys(("dora_scale", "magnitude"), "DoRA"),
    **dict.fromkeys(("oft_blocks", "oft_diag", "rescale", "oft_R", "boft_R", "boft_s"), "OFT or BOFT"),
    **dict.fromkeys((f"oft_blocks.{number}" for number in range(_PARTS)), "OFT or BOFT"),
    **dict.fromkeys(("a1", "a2", "b1", "b2", "bm"), "GLoRA"),
    **dict.fromkeys(("w_norm", "b_norm"), "norm weights"),
    **dict.fromkeys(("factor", "on_input", "ia3_l"), "IA3"),
    "set_weight": "set_weight",
    "up_bias": "LoRA bias",
}
TEXT_ENCODER = (
    "lora_te",
    "text_encoder",
    "text_model.",
    "base_model.model.text_model.",
    "te.",
    "te1.",
    "te2.",
    "lora_prior_te",
    "cond_stage_model.",
    "clip_",
)
_LISTED = 12


class Target(NamedTuple):
    """Where a layer goes: a model ("model" or "clip"), its weight, and for a fused weight the part and a row
    permutation of the host's.
    """

    model: str
    weight: str
    part: Slice | None = None
    function: Callable[[Tensor], Tensor] | None = None


@dataclass(frozen=True, eq=False)
class ParsedLora:
    """One LoRA read: layers by target, and the names that found no weight (`text_encoder`: names for a text encoder
    that is not here).

    `misfits` says of what found a weight and does not fit it why, where the rest was wanted all the same. `embeddings`
    are the names of the textual inversions in the file (OneTrainer, ai-toolkit), which are no LoRA's and are not read.
    """

    name: str
    layers: dict[Target, tuple[Layer, ...]]
    unmatched: tuple[str, ...] = ()
    text_encoder: tuple[str, ...] = ()
    kinds: dict[str, int] = field(default_factory=dict)
    embeddings: tuple[str, ...] = ()
    misfits: tuple[str, ...] = ()


def read(
    state: Mapping[str, Tensor],
    key_map: Mapping[str, Target],
    shapes: Mapping[tuple[str, str], Sequence[int]],
    name: str,
    partial: bool = False,
    hint: str = "",
    configs: tuple[PeftConfig, ...] = (),
) -> ParsedLora:
    """Match a LoRA's state dict with a model's weights and check it whole.

    `key_map` gives the target of every LoRA name the model knows; `shapes` the shape of (model, weight). Raises
    ValueError listing every problem: no match at all, names without a weight and wrong shapes (unless `partial`),
    incomplete pairs, NaN or infinite values, kinds that are not available. `hint` says what the file is for, in the
    message when nothing matches; `configs` are PEFT's settings that came with the file. Nothing is changed.
    """
    groups, strangers, problems = grouped(_without_embeddings(state), plain=False)
    has_clip = any(target.model == "clip" for target in key_map.values())
    layers: dict[Target, list[Layer]] = {}
    sources: dict[Target, str] = {}
    unmatched: list[str] = list(strangers)
    text: list[str] = []
    misfits: list[str] = []
    for base, tensors in groups.items():
        target = key_map.get(base)
        if target is None or (target.model, target.weight) not in shapes:
            (text if not has_clip and base.startswith(TEXT_ENCODER) else unmatched).append(base)
            continue
        if sources.setdefault(target, base) != base:
            problems.append(f"{base}: names the same weight as {sources[target]} ({target.weight})")
            continue
        for place, layer in _layers(base, tensors, target, shapes, config_for(configs, base), problems):
            misfit = _misfit(place, layer, shapes)
            if misfit is None:
                layers.setdefault(place, []).append(layer)
            else:
                misfits.append(f"{base}: {misfit}")
    if misfits and not (partial and layers):
        problems += [*misfits, *(["mark the row as partial to use the rest"] if layers and not problems else [])]
    bundled = embeddings(state)
    if bundled and not groups:
        problems.append(f"it holds embeddings only ({_some(bundled)}); put it into ComfyUI's embeddings folder")
    problems += _unusable(groups, layers, unmatched, text, partial, hint) if not problems else []
    if problems:
        if hint and sources:
            made = f", made for {hint},"
        else:
            made = ""
        raise ValueError(f"LoRA {name}{made} cannot be used:\n" + "\n".join(f"- {problem}" for problem in problems))
    kinds: dict[str, int] = {}
    for of in layers.values():
        for layer in of:
            kinds[layer.kind] = kinds.get(layer.kind, 0) + 1
    found = {target: tuple(of) for target, of in layers.items()}
    return ParsedLora(name, found, tuple(unmatched), tuple(text), kinds, tuple(bundled), tuple(misfits))


def unplaced(
    state: Mapping[str, Tensor], configs: tuple[PeftConfig, ...] = ()
) -> tuple[list[tuple[str, bool, Layer]], list[str]]:
    """((name in the file, whether it is for the bias, layer) of all layers, problems), without a model to check a file
    against.
    """
    groups, strangers, problems = grouped(_without_embeddings(state), plain=False)
    problems += [f"{key} is no LoRA tensor" for key in strangers]
    found: list[tuple[str, bool, Layer]] = []
    for base, tensors in groups.items():
        weight = Target("", f"{base}.weight")
        for target, layer in _layers(base, tensors, weight, defaultdict(tuple), config_for(configs, base), problems):
            found.append((base, target.weight != weight.weight, layer))
    return found, problems


def with_alphas(state: Mapping[str, Tensor], configs: tuple[PeftConfig, ...]) -> dict[str, Tensor]:
    """A LoRA's state dict that says by itself what PEFT's settings beside it say of its scales."""
    groups, _, _ = grouped(state, plain=False)
    more: dict[str, Tensor] = {}
    for base, group in groups.items():
        config, inner = config_for(configs, base), group.get("down") or group.get("hada_w1_b")
        if config is None or inner is None or "alpha" in group:
            scale = None
        else:
            scale = config.scale(base, len(inner[1]))
        if scale is not None and inner is not None:
            more[f"{base}.alpha"] = torch.tensor(scale * len(inner[1]))
    return {**state, **more}


_EMBEDDING = (  # OneTrainer's prefix of the embeddings that it saves with a LoRA: bundle_emb.<name>.<encoder>
    "bundle_emb."
)
_EMBEDDINGS = ("emb_params", "clip_l", "clip_g")  # ai-toolkit's, of the one embedding that it trains with a LoRA


def embeddings(state: Iterable[str]) -> list[str]:
    """Names of the textual inversions that OneTrainer and ai-toolkit put into a LoRA's file."""
    return sorted({key.split(".")[1] if key.startswith(_EMBEDDING) else key for key in state if _is_embedding(key)})


def _is_embedding(key: str) -> bool:
    return key.startswith(_EMBEDDING) or key in _EMBEDDINGS


def _without_embeddings(state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    return {key: tensor for key, tensor in state.items() if not _is_embedding(key)}


def names(state: Collection[str]) -> list[str]:
    """Every layer that a LoRA's keys name, once."""
    return list(dict.fromkeys(base for base, role in (_role(key, state) for key in state) if role is not None))


def summary(shapes: Mapping[str, Sequence[int]]) -> tuple[dict[str, int], list[int]]:
    """({kind of layer: how many}, every rank) of a file by the names and shapes of its tensors; what is no LoRA's is
    not counted.
    """
    groups: dict[str, dict[str, Sequence[int]]] = {}
    for key, shape in shapes.items():
        base, role = _role(key, shapes)
        if role is not None:
            groups.setdefault(base, {})[role] = shape
    kinds: dict[str, int] = {}
    ranks = set()
    for roles in groups.values():
        family = next(
            (name for name, needed, more in _FAMILIES if any(role in roles for role in (*needed, *more))), None
        )
        if family == "LoRA" and len(roles.get("down", ())) > 2:
            family = "LoCon"
        names = [*([family] if family else []), *(["DoRA"] if {"dora_scale", "magnitude"} & roles.keys() else [])]
        names += [kind for kind, of in _WHOLE.items() if of & roles.keys()]
        for name in names:
            kinds[name] = kinds.get(name, 0) + 1
        ranks |= {
            roles[role][0] for role in ("down", "hada_w1_b", "lokr_w2_b", "lokr_w1_b") if len(roles.get(role, ())) > 1
        }
    return kinds, sorted(ranks)


_WHOLE = {"diff": {"diff", "diff_b"}, "norm": {"w_norm", "b_norm"}, "set_weight": {"set_weight"}, "IA3": {"ia3_l"}}
Group = dict[str, tuple[str, Tensor]]  # role -> (key in the file, tensor)


def grouped(state: Mapping[str, Tensor], plain: bool = True) -> tuple[dict[str, Group], list[str], list[str]]:
    """(tensors by layer name and role, keys of no known form, problems); `plain` refuses everything but factor pairs
    and differences.
    """
    groups: dict[str, Group] = {}
    strangers: list[str] = []
    problems: list[str] = []
    others: dict[str, list[str]] = {}
    for key, tensor in state.items():
        base, role = _role(key, state)
        if role is None:
            strangers.append(key)
            continue
        kind = _REFUSED.get(role) or (_KINDS.get(role) if plain else None)
        if kind is not None:
            others.setdefault(kind, []).append(key)
            continue
        group = groups.setdefault(base, {})
        if role in group:
            problems.append(f"{key}: the same tensor is also there as {group[role][0]}")
        group[role] = (key, tensor)
    for kind, keys in sorted(others.items()):
        problems.append(
            f"{kind} is not available {'here' if plain else 'in this version of Graft'} ({_some(keys)});"
            f" {_INSTEAD[plain]}"
        )
    return groups, strangers, problems


_INSTEAD = {True: "only factor pairs and differences are", False: "use ComfyUI's own LoRA loader for this file"}


def _role(key: str, state: Container[str]) -> tuple[str, str | None]:
    """(layer, role) of a key; the role of a refused kind is its suffix, None when it is no LoRA's."""
    if key.endswith(".diff_m"):  # distilled LoRAs of Wan: the difference of a block's own parameter `modulation`
        return key.removesuffix(".diff_m") + ".modulation", "diff"
    suffix = next((suffix for suffix in _SUFFIXES if key.endswith(suffix)), None)
    if suffix is not None:
        return key[: -len(suffix)], _ROLES.get(suffix) or _MORE_ROLES.get(suffix) or suffix
    base = key.removesuffix(".weight")
    return (
        base,
        "factor" if base != key and f"{base}.on_input" in state else None,
    )  # lycoris' IA3: a `.weight` beside `.on_input`


_FAMILIES: tuple[
    tuple[str, tuple[str, ...], tuple[str, ...]], ...
] = (  # name, roles that must be there, roles that may be
    ("LoRA", ("up", "down"), ("mid", "up_bias")),
    ("LoHa", _LOHA, ("hada_t1", "hada_t2")),
    ("LoKr", (), _LOKR),
    ("OFT", ("oft_blocks",), ("rescale",)),
    ("OFT of lycoris 2.0", ("oft_diag",), ()),
    ("OFT in parts", ("oft_blocks.0",), tuple(f"oft_blocks.{number}" for number in range(1, _PARTS))),
    ("PEFT's OFT", ("oft_R",), ()),
    ("PEFT's BOFT", ("boft_R", "boft_s"), ()),
    ("GLoRA", ("a1", "a2", "b1", "b2"), ("bm",)),
    ("IA3", ("factor", "on_input"), ()),
)


def _layers(
    base: str,
    group: Group,
    target: Target,
    shapes: Mapping[tuple[str, str], Sequence[int]],
    config: PeftConfig | None,
    problems: list[str],
) -> Iterator[tuple[Target, Layer]]:
    tensors = {role: tensor for role, (_, tensor) in group.items()}
    if "lokr_w1" in tensors and "lokr_w2" in tensors:
        tensors.pop("alpha", None)  # counts for nothing; ai-toolkit's 9999999999 is infinite in float16
    for role, tensor in tensors.items():
        if not bool(torch.isfinite(tensor.float() if tensor.element_size() == 1 else tensor).all()):
            problems.append(f"{group[role][0]}: holds NaN or infinite values")
    alpha = tensors.get("alpha")
    if alpha is not None and alpha.numel() != 1:
        problems.append(f"{group['alpha'][0]}: expected one number, got {tuple(alpha.shape)}")
        return
    found = [family for family in _FAMILIES if any(role in tensors for role in (*family[1], *family[2]))]
    missing = [f"{name}: {role} is missing" for name, needed, _ in found for role in needed if role not in tensors]
    wrong = _incomplete(group, found, missing)
    if wrong is not None:
        problems.append(f"{base}: {wrong}")
        return
    malformed = [
        f"{key}: {wrong}" for role, (key, tensor) in group.items() if (wrong := _malformed(role, tensor)) is not None
    ]
    if malformed:
        problems += malformed
        return
    if found:
        family = found[0][0]
    else:
        family = None
    if family == "OFT in parts":
        yield from _oft_parts(tensors, target, None if alpha is None else float(alpha))
        return
    main = _main(tensors, family, None if alpha is None else float(alpha), config or PeftConfig())
    if config is not None and alpha is None and isinstance(main, LoRA | LoHa | LoKr):
        main = _scaled(main, config.scale(base, tensors["down"].shape[0] if "down" in tensors else None))
    scaling = tensors.get("dora_scale", tensors["magnitude"].flatten() if "magnitude" in tensors else None)
    if scaling is not None:
        if not isinstance(main, Additive):
            if main is None:
                beside = "nothing"
            else:
                beside = main.kind
            problems.append(f"{base}: a DoRA magnitude beside {beside}; expected LoRA, LoHa or LoKr factors")
            return
        yield target, DoRA(main, scaling)
    elif main is not None:
        yield target, main
    for role, kind in (("diff", Diff), ("w_norm", Diff), ("set_weight", Set)):
        if role in tensors:
            yield target, kind(tensors[role])
    bias = Target(target.model, target.weight.removesuffix(".weight") + ".bias", _rows(target.part), target.function)
    if "ia3_l" in tensors:
        if config is None:
            said = None
        else:
            said = config.scales_inputs(base)
        if said is None:
            columns = _columns(tensors["ia3_l"], shapes[target.model, target.weight])
        else:
            columns = said
        yield target, IA3(tensors["ia3_l"], columns, whole=True)
        if not columns and (bias.model, bias.weight) in shapes:
            yield bias, IA3(tensors["ia3_l"], columns, whole=True)  # PEFT scales the output, bias and all
    for role in ("diff_b", "b_norm", "up_bias"):
        if role in tensors:
            yield bias, Diff(tensors[role], main.scale if role == "up_bias" and isinstance(main, LoRA) else 1.0)


def _columns(factor: Tensor, shape: Sequence[int]) -> bool:
    """Whether PEFT's IA3 factor is for inputs: (1, in) of a linear layer; a convolution's is (1, side, 1, 1) either
    way.
    """
    return factor.shape[0] == 1 and (factor.ndim == 2 or (len(shape) > 1 and factor.numel() == shape[1] != shape[0]))


def _incomplete(group: Group, found: Sequence[tuple], missing: Sequence[str]) -> str | None:
    """What is wrong with the tensors of one layer, or None."""
    keys = ", ".join(sorted(key for key, _ in group.values()))
    if len(found) > 1:
        return f"expected one kind of layer, got {' and '.join(name for name, *_ in found)} ({keys})"
    if missing and found[0][0] == "LoRA":
        return f"expected an up and a down matrix, got only {keys}"
    if missing:
        return f"{'; '.join(missing)}, got only {keys}"
    return None


def _oft_parts(tensors: Mapping[str, Tensor], target: Target, alpha: float | None) -> Iterator[tuple[Target, Layer]]:
    """kohya's OFT for Flux: one set of blocks for each of Q, K, V (and the feed-forward part), one after the other down
    the rows.
    """
    sets = [tensors[f"oft_blocks.{number}"] for number in range(_PARTS) if f"oft_blocks.{number}" in tensors]
    if target.part is None:
        start = 0
    else:
        start = target.part[1]
    for blocks in sets:
        rows = blocks.shape[0] * blocks.shape[-1]
        yield target._replace(part=(0, start, rows)) if len(sets) > 1 else target, OFT(blocks, None, alpha)
        start += rows


def _malformed(role: str, tensor: Tensor) -> str | None:
    """What is wrong with a tensor by itself, or None."""
    shape = tuple(tensor.shape)
    if not tensor.numel() or tensor.is_complex():
        return f"expected real numbers, got {'complex ones' if tensor.is_complex() else 'none'} {shape}"
    if role == "oft_R":
        if shape:
            side = (1 + math.isqrt(1 + 8 * shape[-1])) // 2
        else:
            side = 0
        if len(shape) != 2 or side * (side - 1) // 2 != shape[1]:
            return f"expected upper triangles (blocks, b (b - 1) / 2), got {role} {shape}"
    if role == "boft_R" and (len(shape) != 4 or shape[-1] != shape[-2]):
        return f"expected (stages, blocks, b, b), got {role} {shape}"
    if role.startswith("oft_blocks.") and len(shape) != 3:
        return f"expected (blocks, b, b), got {role} {shape}"
    if role == "on_input" and tensor.numel() != 1:
        return f"expected one number, got {shape}"
    if role == "ia3_l" and not shape:
        return f"expected a vector or more, got {role} {shape}"
    return None


def _scaled(layer: LoRA | LoHa | LoKr, scale: float | None) -> LoRA | LoHa | LoKr:
    """A layer of PEFT's, which keeps alpha / rank outside the tensors."""
    if scale is None or scale == 1.0:
        return layer
    if isinstance(layer, LoKr):
        if layer.w1 is not None:
            name = "w1"
        else:
            name = "w1_a"
        return replace(layer, **{name: getattr(layer, name).float() * scale})
    return replace(layer, alpha=scale * (layer.rank if isinstance(layer, LoRA) else layer.w1_b.shape[0]))


def _main(
    tensors: Mapping[str, Tensor], family: str | None, alpha: float | None, config: PeftConfig
) -> Additive | OFT | InputOFT | GLoRA | IA3 | None:
    """The layer of a family's tensors, without a DoRA magnitude."""
    get = tensors.get
    if family == "LoRA":
        return LoRA(tensors["up"], tensors["down"], alpha, get("mid"))
    if family == "LoHa":
        w1_a, w1_b, w2_a, w2_b = (tensors[name] for name in _LOHA)
        return LoHa(w1_a, w1_b, w2_a, w2_b, alpha, get("hada_t1"), get("hada_t2"))
    if family == "LoKr":
        first, second, a1, b1, a2, b2, core = (get(name) for name in _LOKR)
        return LoKr(first, second, a1, b1, a2, b2, core, alpha)
    if family == "OFT":
        return OFT(tensors["oft_blocks"], get("rescale"), alpha)
    if family == "OFT of lycoris 2.0":
        return OFT(tensors["oft_diag"], rotated=True)
    if family == "PEFT's OFT":
        return InputOFT(neumann_rotations(_limited(tensors["oft_R"], config.limit), config.terms)[None])
    if family == "PEFT's BOFT":
        turned = tensors["boft_R"].float()
        skew = 0.5 * (turned - turned.transpose(-1, -2))
        one = torch.eye(skew.shape[-1])
        return InputOFT((one - skew) @ torch.linalg.inv(one + skew), tensors["boft_s"].flatten(), "BOFT")
    if family == "GLoRA":
        return GLoRA(tensors["a1"], tensors["a2"], tensors["b1"], tensors["b2"], alpha, get("bm"))
    if family == "IA3":
        return IA3(tensors["factor"], bool(tensors["on_input"]))
    return None


def _limited(upper: Tensor, limit: float | None) -> Tensor:
    """PEFT's constrained OFT: the norm of each skew block is kept below limit / sqrt(blocks)."""
    if limit is None:
        return upper
    norms = torch.linalg.vector_norm(upper.float(), dim=1, keepdim=True) * 2**0.5
    return upper.float() * (limit / upper.shape[0] ** 0.5 / norms.clamp(min=1e-30)).clamp(max=1.0)


def _rows(part: Slice | None) -> Slice | None:
    """The part of a bias that belongs to a part of its weight."""
    if part is not None and part[0] == 0:
        return part
    return None


def _misfit(target: Target, layer: Layer, shapes: Mapping[tuple[str, str], Sequence[int]]) -> str | None:
    """Why a layer does not fit where it goes, or None."""
    shape = shapes.get((target.model, target.weight))
    if shape is None:
        return f"the model has no {target.weight}"
    if target.part is not None:
        shape = [target.part[2] if dimension == target.part[0] else side for dimension, side in enumerate(shape)]
    problem = layer.problem(shape)
    if problem is None and target.function is not None and not isinstance(layer, Additive):
        problem = (
            f"{layer.kind} on a weight whose rows this model holds in another order; use ComfyUI's own LoRA loader for"
            " this file"
        )
    if problem is None:
        return None
    return f"{problem} ({target.weight})"


def _unusable(
    groups: Mapping[str, Group],
    layers: Mapping[Target, list[Layer]],
    unmatched: Sequence[str],
    text: Sequence[str],
    partial: bool,
    hint: str,
) -> list[str]:
    if not groups:
        return [f"it holds no LoRA layer ({_some(unmatched)})" if unmatched else "it is empty"]
    if not layers and text and not unmatched:
        return [f"it is for a text encoder only ({_some(text)}); connect clip"]
    if not layers:
        return [f"no key matches this model, it is for {hint or 'another one'} ({_some([*unmatched, *text])})"]
    if unmatched and not partial:
        return [
            f"{len(unmatched)} of {len(groups) + len(unmatched) - sum(name in groups for name in unmatched)} names"
            f" match no weight of this model ({_some(unmatched)}); mark the row as partial to use the rest"
        ]
    return []


def _some(names: Iterable[str]) -> str:
    listed = sorted(names)
    return ", ".join(listed[:_LISTED]) + (f" and {len(listed) - _LISTED} more" if len(listed) > _LISTED else "")


def patches_of(
    parsed: ParsedLora, model: str, shapes: Mapping[tuple[str, str], Sequence[int]]
) -> Iterator[tuple[str, Layer, Slice | None]]:
    """(weight, layer, part) of every layer for one model; a host's row permutation is applied to
    the whole difference.
    """
    for target, layers in parsed.layers.items():
        if target.model != model:
            continue
        shape = list(shapes[target.model, target.weight])
        if target.part is not None:
            shape[target.part[0]] = target.part[2]
        for layer in layers:
            function = target.function
            yield (
                target.weight,
                layer if function is None else Diff(function(cast(Additive, layer).delta(shape))),
                target.part,
            )
