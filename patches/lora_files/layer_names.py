"""Names of layers in LoRA files, beyond those that a host knows: prefixes and separators of every trainer, and
diffusers' names of models.

Trainers write one name in many ways: kohya-ss/sd-scripts and musubi `lora_unet_a_b`, OneTrainer `lora_transformer_a_b`,
lycoris `lycoris_a_b`, PEFT `base_model.model.a.b`, diffusers `transformer.a.b`, XLabs
`double_blocks.0.processor.qkv_lora1`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from torch import Tensor

from .parse import Target

Shapes = Mapping[tuple[str, str], Sequence[int]]  # shape of every weight by ("model" or "clip", name)
_OWN = "diffusion_model."
_PREFIXES = (
    "base_model.model.",
    "model.diffusion_model.",
    "diffusion_model.",
    "transformer.",
    "unet.",
    "pipe.dit.",
    "dit.",
    "model.",
    "lora_unet_",
    "lora_transformer_",
    "lora_prior_unet_",
    "lycoris_unet_",
    "lycoris_",
    "oft_unet_",
)
_TEXT = re.compile(r"(?:(?:lora_|lycoris_)?(?:prior_)?te(\d?)|text_encoder(?:_(\d))?)[._](.+)")
_BARE = re.compile(
    r"(?:base_model\.model\.)?(text_model[._].+)"
)  # PEFT's of a text encoder alone; which one, it does not say
_LATER = {
    "clip_g",
    "t5xxl",
}  # encoders that files number after CLIP-L; beside others (HunyuanVideo's LLaMA) that is not the first


def found(names: Iterable[str], known: Mapping[str, Target], shapes: Shapes) -> dict[str, Target]:
    """Targets of a file's layer names that `known` (the host's map) lacks; names that fit nothing, or two weights, are
    left out.
    """
    missing = [name for name in names if name not in known]
    if not missing:
        return {}
    index = _index({**_spelled(shapes), **{name: target for name, target in known.items()}})
    ends = _ends(shapes)
    encoders = {weight.partition(".")[0] for space, weight in shapes if space == "clip"}
    targets = ((name, index.get(canonical(name)) or _by_end(name, ends, encoders)) for name in missing)
    return {name: target for name, target in targets if target is not None and (target.model, target.weight) in shapes}


def canonical(name: str) -> str:
    """A name without prefix and with underscores; text encoders keep their number (`te1:…`)."""
    text = _TEXT.fullmatch(name)
    if text is not None:
        return f"te{text[1] or text[2] or '1'}:{_flat(text[3])}"
    return _flat(name)


def _flat(name: str) -> str:
    prefix = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), None)
    if prefix is None:
        return name.replace(".", "_").lstrip("_")
    return _flat(name[len(prefix) :])


def with_processors_gone(name: str) -> str:
    """A layer's name as diffusers writes it since 2023; before, `attn1.processor.to_out` was what `attn1.to_out.0` is
    now.
    """
    return re.sub(
        r"([._])processor[._]to_(\w+?)$",
        lambda found: f"{found[1]}to_{found[2]}{found[1] + '0' if found[2] == 'out' else ''}",
        name,
    )


def _index(names: Mapping[str, Target]) -> dict[str, Target]:
    """Targets by canonical name, without those that two names claim."""
    index: dict[str, Target | None] = {}
    for name, target in names.items():
        plain = canonical(name)
        index[plain] = target if index.get(plain, target) == target else None
    return {name: target for name, target in index.items() if target is not None}


def _ends(shapes: Shapes) -> dict[str, list[Target]]:
    """Text encoder weights by the last words of their names, for encoders whose place in the host's model the file does
    not know.
    """
    ends: dict[str, list[Target]] = {}
    for space, weight in shapes:
        if space == "clip" and weight.endswith(".weight"):
            words = weight.removesuffix(".weight").split(".")
            for start in range(1, len(words) - 1):
                ends.setdefault("_".join(words[start:]), []).append(Target("clip", weight))
    return ends


def _by_end(name: str, ends: Mapping[str, list[Target]], encoders: set[str]) -> Target | None:
    """The only text encoder's weight that a name fits, of those that its number can mean."""
    text, bare = _TEXT.fullmatch(name), _BARE.fullmatch(name)
    if text is None:
        if bare is not None:
            fits = ends.get(_flat(bare[1]), [])
        else:
            fits = []
    else:
        first = (text[1] or text[2] or "1") == "1"
        wrong = "clip_l"
        if first:
            if "clip_l" in encoders:
                wrong = "clip_g"
            else:
                wrong = ""
        elif len(encoders) > 1 and not encoders & _LATER:
            wrong = ""
        fits = [target for target in ends.get(_flat(text[3]), []) if target.weight.partition(".")[0] != wrong]
    if len(fits) == 1:
        return fits[0]
    return None


# --- the model's weights under other names ---

_WAN = (  # (in the model's names, in diffusers')
    (r"self_attn\.", "attn1."),
    (r"cross_attn\.k_img", "attn2.add_k_proj"),
    (r"cross_attn\.v_img", "attn2.add_v_proj"),
    (r"cross_attn\.", "attn2."),
    (r"(attn\d\.)([qkv])$", r"\1to_\2"),
    (r"(attn\d\.)o$", r"\1to_out.0"),
    (r"ffn\.0$", "ffn.net.0.proj"),
    (r"ffn\.2$", "ffn.net.2"),
    (r"norm3$", "norm2"),
    (r"^head\.head$", "proj_out"),
    (r"(^|\.)(head\.)?modulation$", r"\1scale_shift_table"),
    (r"^time_embedding\.0$", "condition_embedder.time_embedder.linear_1"),
    (r"^time_embedding\.2$", "condition_embedder.time_embedder.linear_2"),
    (r"^time_projection\.1$", "condition_embedder.time_proj"),
    (r"^text_embedding\.0$", "condition_embedder.text_embedder.linear_1"),
    (r"^text_embedding\.2$", "condition_embedder.text_embedder.linear_2"),
    (r"^img_emb\.proj\.1$", "condition_embedder.image_embedder.ff.net.0.proj"),
    (r"^img_emb\.proj\.3$", "condition_embedder.image_embedder.ff.net.2"),
)
_LUMINA = (
    (r"attention\.out$", "attn.to_out.0"),
    (r"attention\.([qk])_norm$", r"attn.norm_\1"),
    (r"feed_forward\.w(\d)$", r"feed_forward.linear_\1"),
    (r"adaLN_modulation\.1$", "norm1.linear"),
    (r"^final_layer\.linear$", "norm_out.linear_2"),
    (r"^final_layer\.norm1\.linear$", "norm_out.linear_1"),
    (r"^cap_embedder\.", "time_caption_embed.caption_embedder."),
    (r"^t_embedder\.mlp\.0$", "time_caption_embed.timestep_embedder.linear_1"),
    (r"^t_embedder\.mlp\.2$", "time_caption_embed.timestep_embedder.linear_2"),
)
_ZIMAGE = (
    (r"attention\.out$", "attention.to_out.0"),
    (r"attention\.([qk])_norm$", r"attention.norm_\1"),
    (r"^final_layer\.", "all_final_layer.2-1."),
    (r"^x_embedder$", "all_x_embedder.2-1"),
)
_RULES = (  # a weight that gives a family away, its tables
    (re.compile(r"(^|\.)blocks\.0\.cross_attn\.q\."), (_WAN,)),
    (re.compile(r"(^|\.)layers\.0\.attention\.qkv\."), (_LUMINA, _ZIMAGE)),
)


def _spelled(shapes: Shapes) -> dict[str, Target]:
    """{name: target}: the model's weights under their own names and under diffusers', where those differ."""
    own = [name for space, name in shapes if space == "model" and name.startswith(_OWN)]
    tables = [table for sign, of in _RULES if any(sign.search(name) for name in own) for table in of]
    names: dict[str, Target] = {}
    for weight in own:
        if weight.endswith(".bias"):
            continue
        plain, target = (
            weight.removeprefix(_OWN).removesuffix(".weight").removesuffix(".scale"),
            Target("model", weight),
        )
        names[plain] = target
        for table in tables:
            name = plain
            for pattern, theirs in table:
                name = re.sub(pattern, theirs, name)
            names.setdefault(name, target)
    if any("individual_token_refiner." in name for name in own):
        names.update(_hunyuan(own, shapes))
    for fused in [name for name in own if name.endswith(".attention.qkv.weight") and tables]:
        names.update(_split(fused, shapes))
    for linear in [name for name in own if name.endswith(".linear1.weight") and "single_blocks." in name]:
        width = 3 * shapes["model", linear.replace(".linear1.", ".linear2.")][0]
        names[linear.removeprefix(_OWN).replace(".linear1.weight", ".linear1_qkv")] = Target(
            "model", linear, (0, 0, width)
        )
    return names


def _hunyuan(own: Iterable[str], shapes: Shapes) -> Iterator[tuple[str, Target]]:
    """HunyuanVideo's matrices under diffusers' names; its last norm has scale and shift the other way round there."""
    for weight in own:
        if weight.endswith(".weight") and len(shapes["model", weight]) > 1:
            rows, columns, *_ = shapes["model", weight]
            for name, start, length in theirs(
                weight.removeprefix(_OWN).removesuffix(".weight"), "hunyuan", rows, columns
            ):
                swapped = None
                if name == "norm_out.linear":
                    swapped = _swap_halves
                yield name, Target("model", weight, None if length == rows else (0, start, length), swapped)


def _swap_halves(change: Tensor) -> Tensor:
    """The two halves of a change, the other way round."""
    return change.roll(len(change) // 2, 0)


def _split(fused: str, shapes: Shapes) -> Iterator[tuple[str, Target]]:
    """Q, K and V of a fused weight of Lumina's, whose K and V may have fewer heads."""
    base = fused.removeprefix(_OWN).removesuffix("attention.qkv.weight")
    rows, query = shapes["model", fused][0], shapes["model", fused.replace(".qkv.", ".out.")][1]
    other = (rows - query) // 2
    for letter, start, length in (("q", 0, query), ("k", query, other), ("v", query + other, other)):
        for attention in ("attn", "attention"):
            yield f"{base}{attention}.to_{letter}", Target("model", fused, (0, start, length))


# --- whole files under other names ---

_XLABS = re.compile(r"(double|single)_blocks\.(\d+)\.processor\.(qkv|proj)_lora([12]?)\.(up|down)\.weight")
T = TypeVar("T")


def renamed(state: Mapping[str, T]) -> Mapping[str, T]:
    """A LoRA of XLabs' for Flux under generic names: lora1 is for the image, lora2 for the text; the same mapping where
    there is none.
    """
    if not any(_XLABS.fullmatch(key) for key in state):
        return state
    return {_xlabs(key): value for key, value in state.items()}


def _xlabs(key: str) -> str:
    match = _XLABS.fullmatch(key)
    if match is None:
        return key
    kind, number, what, which, side = match.groups()
    single = {"qkv": "linear1_qkv", "proj": "linear2"}[what]
    if kind == "single":
        layer = single
    else:
        layer = f"{'txt' if which == '2' else 'img'}_attn.{what}"
    return f"{_OWN}{kind}_blocks.{number}.{layer}.lora_{side}.weight"


# --- diffusers' names for saving ---

_FLUX = (
    (r"^double_blocks\.(\d+)\.img_attn\.proj$", r"transformer_blocks.\1.attn.to_out.0"),
    (r"^double_blocks\.(\d+)\.txt_attn\.proj$", r"transformer_blocks.\1.attn.to_add_out"),
    (r"^double_blocks\.(\d+)\.img_mlp\.0$", r"transformer_blocks.\1.ff.net.0.proj"),
    (r"^double_blocks\.(\d+)\.img_mlp\.2$", r"transformer_blocks.\1.ff.net.2"),
    (r"^double_blocks\.(\d+)\.txt_mlp\.0$", r"transformer_blocks.\1.ff_context.net.0.proj"),
    (r"^double_blocks\.(\d+)\.txt_mlp\.2$", r"transformer_blocks.\1.ff_context.net.2"),
    (r"^double_blocks\.(\d+)\.img_mod\.lin$", r"transformer_blocks.\1.norm1.linear"),
    (r"^double_blocks\.(\d+)\.txt_mod\.lin$", r"transformer_blocks.\1.norm1_context.linear"),
    (r"^single_blocks\.(\d+)\.linear2$", r"single_transformer_blocks.\1.proj_out"),
    (r"^single_blocks\.(\d+)\.modulation\.lin$", r"single_transformer_blocks.\1.norm.linear"),
    (r"^img_in$", "x_embedder"),
    (r"^txt_in$", "context_embedder"),
    (r"^final_layer\.linear$", "proj_out"),
    (r"^final_layer\.adaLN_modulation\.1$", "norm_out.linear"),
    (r"^time_in\.in_layer$", "time_text_embed.timestep_embedder.linear_1"),
    (r"^time_in\.out_layer$", "time_text_embed.timestep_embedder.linear_2"),
    (r"^vector_in\.in_layer$", "time_text_embed.text_embedder.linear_1"),
    (r"^vector_in\.out_layer$", "time_text_embed.text_embedder.linear_2"),
    (r"^guidance_in\.in_layer$", "time_text_embed.guidance_embedder.linear_1"),
    (r"^guidance_in\.out_layer$", "time_text_embed.guidance_embedder.linear_2"),
)
_REFINER, _REFINERS = (
    r"^txt_in\.individual_token_refiner\.blocks\.(\d+)\.",
    r"context_embedder.token_refiner.refiner_blocks.\1.",
)
_HUNYUAN = (
    (_REFINER + r"self_attn\.proj$", _REFINERS + "attn.to_out.0"),
    (_REFINER + r"mlp\.0$", _REFINERS + "ff.net.0.proj"),
    (_REFINER + r"mlp\.2$", _REFINERS + "ff.net.2"),
    (_REFINER + r"adaLN_modulation\.1$", _REFINERS + "norm_out.linear"),
    (r"^txt_in\.input_embedder$", "context_embedder.proj_in"),
    (r"^img_in\.proj$", "x_embedder.proj"),
    (r"^txt_in\.t_embedder\.in_layer$", "context_embedder.time_text_embed.timestep_embedder.linear_1"),
    (r"^txt_in\.t_embedder\.out_layer$", "context_embedder.time_text_embed.timestep_embedder.linear_2"),
    (r"^txt_in\.c_embedder\.in_layer$", "context_embedder.time_text_embed.text_embedder.linear_1"),
    (r"^txt_in\.c_embedder\.out_layer$", "context_embedder.time_text_embed.text_embedder.linear_2"),
    *_FLUX,
)
_SD3 = (
    (r"^joint_blocks\.(\d+)\.x_block\.attn\.proj$", r"transformer_blocks.\1.attn.to_out.0"),
    (r"^joint_blocks\.(\d+)\.x_block\.attn2\.proj$", r"transformer_blocks.\1.attn2.to_out.0"),
    (r"^joint_blocks\.(\d+)\.context_block\.attn\.proj$", r"transformer_blocks.\1.attn.to_add_out"),
    (r"^joint_blocks\.(\d+)\.x_block\.mlp\.fc1$", r"transformer_blocks.\1.ff.net.0.proj"),
    (r"^joint_blocks\.(\d+)\.x_block\.mlp\.fc2$", r"transformer_blocks.\1.ff.net.2"),
    (r"^joint_blocks\.(\d+)\.context_block\.mlp\.fc1$", r"transformer_blocks.\1.ff_context.net.0.proj"),
    (r"^joint_blocks\.(\d+)\.context_block\.mlp\.fc2$", r"transformer_blocks.\1.ff_context.net.2"),
    (r"^joint_blocks\.(\d+)\.x_block\.adaLN_modulation\.1$", r"transformer_blocks.\1.norm1.linear"),
    (r"^joint_blocks\.(\d+)\.context_block\.adaLN_modulation\.1$", r"transformer_blocks.\1.norm1_context.linear"),
    (r"^context_embedder$", "context_embedder"),
    (r"^final_layer\.linear$", "proj_out"),
    (r"^final_layer\.adaLN_modulation\.1$", "norm_out.linear"),
    (r"^t_embedder\.mlp\.0$", "time_text_embed.timestep_embedder.linear_1"),
    (r"^t_embedder\.mlp\.2$", "time_text_embed.timestep_embedder.linear_2"),
    (r"^y_embedder\.mlp\.0$", "time_text_embed.text_embedder.linear_1"),
    (r"^y_embedder\.mlp\.2$", "time_text_embed.text_embedder.linear_2"),
)
_FUSED = {  # family: (pattern of a fused weight, diffusers' names of Q, K and V)
    "flux": (
        (r"^double_blocks\.(\d+)\.img_attn\.qkv$", r"transformer_blocks.\1.attn.to_{}"),
        (r"^double_blocks\.(\d+)\.txt_attn\.qkv$", r"transformer_blocks.\1.attn.add_{}_proj"),
        (r"^single_blocks\.(\d+)\.linear1$", r"single_transformer_blocks.\1.attn.to_{}"),
    ),
    "hunyuan": ((_REFINER + r"self_attn\.qkv$", _REFINERS + "attn.to_{}"),),
    "sd3": (
        (r"^joint_blocks\.(\d+)\.x_block\.attn\.qkv$", r"transformer_blocks.\1.attn.to_{}"),
        (r"^joint_blocks\.(\d+)\.x_block\.attn2\.qkv$", r"transformer_blocks.\1.attn2.to_{}"),
        (r"^joint_blocks\.(\d+)\.context_block\.attn\.qkv$", r"transformer_blocks.\1.attn.add_{}_proj"),
    ),
    "lumina": ((r"^(.*)attention\.qkv$", r"\1attn.to_{}"),),
    "z-image": ((r"^(.*)attention\.qkv$", r"\1attention.to_{}"),),
}
_FUSED["hunyuan"] += _FUSED["flux"]
_SAVED = {"flux": _FLUX, "hunyuan": _HUNYUAN, "sd3": _SD3, "wan": _WAN, "lumina": _LUMINA, "z-image": _ZIMAGE}


def theirs(path: str, family: str, rows: int, columns: int) -> list[tuple[str, int, int]]:
    """(diffusers' name, first row, rows) of a layer of a family's: one, or the parts of a fused weight of (rows,
    columns).
    """
    for pattern, name in _FUSED.get(family, ()):
        if re.match(pattern, path):
            if family in ("flux", "hunyuan", "lumina"):
                query = columns
            else:
                query = rows // 3
            if family == "lumina":
                other = (rows - query) // 2
            else:
                other = query
            spans = [(re.sub(pattern, name, path).format("q"), 0, query)]
            spans += [
                (re.sub(pattern, name, path).format(letter), query + place * other, other)
                for place, letter in enumerate("kv")
            ]
            if path.endswith(".linear1"):
                spans.append(
                    (re.sub(pattern, r"single_transformer_blocks.\1.proj_mlp", path), 3 * query, rows - 3 * query)
                )
            return spans
    for pattern, name in _SAVED.get(family, ()):
        path = re.sub(pattern, name, path)
    return [(path, 0, rows)]
