"""LoRAs for saving: the names, metadata and hashes of kohya-ss/sd-scripts, the names of PEFT and diffusers, or
ComfyUI's generic form.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ...storage.digest import sha256
from ...storage.safetensors import safetensors_bytes
from ..adapters.lora import LoRA
from ..adapters.registry import tensor_names
from ..models.family import Kohya, Missing, ModelFamily, ModelSpec
from ..models.layer_names import LayerNames, swap_halves
from ..models.recognise import recognise_lora
from ..models.unet import diffusers_name
from .layer_names import with_processors_gone
from .parse import Group, grouped

NAMES = ("kohya", "peft", "comfyui")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "float32": torch.float32}
_OWN = "diffusion_model."


def renamed(lora: Mapping[str, Tensor], names: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """A LORA_MODEL (ComfyUI's generic names) under the names of `names`, factors and differences as `dtype`, alpha as
    float32.

    kohya: `lora_unet_<path with underscores>.lora_up.weight`, `.alpha`; SD1.x and SD2 with diffusers' block names, as
    sd-scripts writes them; text encoders `lora_te…`. peft: diffusers' own `unet.…` and `transformer.….lora_B.weight`
    where the family is known (a fused weight in its parts), alpha / rank multiplied into B and factors filled up with
    zeros to the largest rank, because PEFT keeps alpha outside the file and diffusers takes one for all. comfyui: names
    unchanged. Layers that were merged without a model have their first file's names: kohya's and diffusers' of a UNet
    become kohya's, with which ComfyUI reads them too. Raises ValueError listing what cannot be named so, and tensors
    with NaN, infinite numbers, or numbers that `dtype` cannot hold.
    """
    if names not in NAMES:
        raise ValueError(f"names: expected one of {', '.join(NAMES)}, got {names!r}")
    groups, strangers, problems = grouped(lora, plain=False)
    problems += [f"{key}: not a LoRA tensor" for key in strangers]
    problems += [f"{key}: holds NaN or infinite values" for key, tensor in lora.items() if not _finite(tensor)]
    if names == "peft":
        problems += [
            f"{base}: PEFT has no name for {', '.join(sorted(set(group) - {'up', 'down', 'alpha'}))}; save with kohya"
            " or comfyui names"
            for base, group in groups.items()
            if set(group) - {"up", "down", "alpha"}
        ]
        underscored = [base for base in groups if _UNDERSCORED.match(base)]
        if underscored:
            problems.append(
                f"{len(underscored)} layers have a file's names, of which PEFT's are not known"
                f" ({', '.join(sorted(underscored)[:3])}); connect model to Merge LoRAs, or save with kohya or comfyui"
                " names"
            )
    if problems or not groups:
        raise ValueError(
            "the LoRA cannot be saved:\n" + "\n".join(f"- {problem}" for problem in problems or ["it is empty"])
        )
    family = _family(lora)
    out: dict[str, Tensor] = {}
    for base, group in groups.items():
        if names == "peft":
            out.update(_peft(base, group, dtype, family))
        else:
            out.update(
                _plain(_kohya(base, family, groups) if names == "kohya" else _foreign(base, groups), group, dtype)
            )
    if names == "peft":
        out = _one_rank(out)
    large = [
        f"{key}: holds numbers above {torch.finfo(dtype).max:g}, the largest of {dtype}"
        for key, of in out.items()
        if not _finite(of)
    ]
    if large:
        raise ValueError(
            "the LoRA cannot be saved in this dtype, use bf16 or float32:\n" + "\n".join(f"- {each}" for each in large)
        )
    return out


def _finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor.float() if tensor.element_size() == 1 else tensor).all())


def _family(lora: Mapping[str, Tensor]) -> ModelFamily | None:
    return recognise_lora((name, tuple(tensor.shape)) for name, tensor in lora.items())


_ENCODER = re.compile(r"text_encoders\.(clip_l|clip_g|clip_h|t5xxl)\.transformer\.(.+)")
_PARAMETER = re.compile(  # last words of what is no module's weight, but a parameter of the model's own
    r"\.(modulation|modulate_table|\w*shift_table|scale|gamma|beta|positional_\w+|\w*(tokens?|registers?|pos_embed|_embedding|padding))$"
)
_UNDERSCORED = re.compile(r"lora_|lycoris_|oft_unet_")  # what names begin with that have underscores for every point
_DIFFUSERS = re.compile(
    r"(?:base_model\.model\.)?(?:unet\.)?((?:(?:down|up)_blocks\.|mid_block\.|conv_|time_embedding\.|add_embedding\.).+)"
)
_DIFFUSERS_ENCODER = re.compile(r"text_encoder(?:_([23]))?\.(.+)")
_NUMBERS = {"clip_l": "1", "clip_g": "2", "t5xxl": "3"}  # of kohya's; diffusers counts the encoders that a family has


def _kohya(base: str, family: ModelFamily | None, groups: Mapping[str, Group]) -> str:
    """sd-scripts' name of a layer; what has none keeps the generic form: text encoders of one's own kind, a model's own
    parameters.
    """
    encoder = _ENCODER.fullmatch(base)
    if encoder is not None:
        return f"lora_te{_number(encoder[1], family, groups)}_{encoder[2].replace('.', '_')}"
    path = base.removeprefix(_OWN)
    if path == base:
        return _foreign(base, groups)
    if "diff" in groups[base] and _PARAMETER.search(base):
        return base
    if _writes_diffusers_blocks(family):
        path = diffusers_name(path)
    return "lora_unet_" + path.replace(".", "_")


def _writes_diffusers_blocks(family: ModelFamily | None) -> bool:
    return family is not None and isinstance(family.kohya, Kohya) and family.kohya.diffusers_blocks


def _has_one_text_encoder(family: ModelFamily) -> bool:
    return isinstance(family.kohya, Kohya) and family.kohya.one_text_encoder


def _foreign(base: str, groups: Iterable[str]) -> str:
    """kohya's name of a layer that has diffusers' one of a UNet or a text encoder; every other name as it is."""
    encoder, unet = _DIFFUSERS_ENCODER.fullmatch(base), _DIFFUSERS.fullmatch(base)
    if encoder is not None:
        number = encoder[1] or ("1" if any(name.startswith("text_encoder_2.") for name in groups) else "")
        return f"lora_te{number}_{encoder[2].replace('.', '_')}"
    if unet is None:
        return base
    return f"lora_unet_{with_processors_gone(unet[1]).replace('.', '_')}"


def _number(encoder: str, family: ModelFamily | None, groups: Mapping[str, Group]) -> str:
    """kohya's number of a text encoder: none where the model has only one."""
    others = {found[1] for found in map(_ENCODER.fullmatch, groups) if found is not None} - {encoder}
    if family is None:
        single = encoder == "clip_l"
    else:
        single = _has_one_text_encoder(family)
    alone = encoder == "clip_h" or (not others and single)
    if alone and encoder != "t5xxl":
        return ""
    return _NUMBERS[encoder]


def _plain(base: str, group: Group, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    for role, (_, tensor) in group.items():
        if role == "alpha":
            kind = torch.float32
        else:
            if tensor.is_floating_point():
                kind = dtype
            else:
                kind = tensor.dtype
        record = tensor_names().roles[role]
        if record.to_save is not None:
            tensor = record.to_save(tensor, {name: beside for name, (_, beside) in group.items()})
        yield base + record.saved_suffix, tensor.to(kind)


def _peft(base: str, group: Group, dtype: torch.dtype, family: ModelFamily | None) -> Iterator[tuple[str, Tensor]]:
    layer = LoRA(group["up"][1], group["down"][1], float(group["alpha"][1]) if "alpha" in group else None)
    if layer.scale == 1.0:
        up = layer.up
    else:
        up = layer.up.float() * layer.scale
    rows, columns = layer.up.shape[0], layer.down.shape[1]
    names = _layer_names(family)
    if names is not None and names.swaps_halves(base.removeprefix(_OWN), rows, columns):
        up = swap_halves(up)
    for name, start, length in _parts(base, family, rows, columns):
        yield f"{name}.lora_B.weight", up[start : start + length].to(dtype).contiguous()
        yield f"{name}.lora_A.weight", layer.down.to(dtype)


def _one_rank(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """PEFT's factors with zeros up to the largest rank of their part of the model (`unet.`, `text_encoder.`)."""
    ranks: dict[str, int] = {}
    for name, tensor in tensors.items():
        if name.endswith(".lora_A.weight"):
            part = name.partition(".")[0]
            ranks[part] = max(ranks.get(part, 0), len(tensor))
    out = {}
    for name, tensor in tensors.items():
        more, rank_first = ranks[name.partition(".")[0]], name.endswith(".lora_A.weight")
        if rank_first:
            shape = (more, *tensor.shape[1:])
        else:
            shape = (len(tensor), more, *tensor.shape[2:])
        if shape != tuple(tensor.shape):
            full = tensor.new_zeros(shape)
            (full[: len(tensor)] if rank_first else full[:, : tensor.shape[1]]).copy_(tensor)
            tensor = full
        out[name] = tensor
    return out


def _layer_names(family: ModelFamily | None) -> LayerNames | None:
    if family is None or isinstance(family.layer_names, Missing):
        return None
    return family.layer_names


def _parts(base: str, family: ModelFamily | None, rows: int, columns: int) -> Sequence[tuple[str, int, int]]:
    """(diffusers' name, first row, rows) of a layer: several for a fused weight; its own name where the family is not
    known.
    """
    encoder, names = _ENCODER.fullmatch(base), _layer_names(family)
    if encoder is not None:
        t5 = "2" if names is None else names.t5
        place = {"clip_l": "", "clip_g": "_2", "clip_h": "", "t5xxl": f"_{t5}"}[encoder[1]]
        return [(f"text_encoder{place}.{encoder[2]}", 0, rows)]
    path = base.removeprefix(_OWN)
    if path == base or names is None:
        return [(with_processors_gone(base), 0, rows)]
    return [(names.prefix + name, start, length) for name, start, length in names.parts(path, rows, columns)]


def hashes(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> dict[str, str]:
    """`sshs_model_hash` and `sshs_legacy_hash` as sd-scripts computes them, of the file with only its `ss_*` metadata.

    The first is sha256 of everything behind the header; the second the first 8 digits of sha256 of 64 KiB from 1 MiB
    on.
    """
    whole, legacy, place = sha256(), sha256(), 0
    kohya = {key: value for key, value in metadata.items() if key.startswith("ss_")}
    chunks = safetensors_bytes(tensors, kohya or None)
    for number, chunk in enumerate(chunks):
        if number:
            whole.update(chunk)
        legacy.update(chunk[max(0, 0x100000 - place) : max(0, 0x110000 - place)])
        place += len(chunk)
    return {"sshs_model_hash": whole.hexdigest(), "sshs_legacy_hash": legacy.hexdigest()[:8]}


def saved_metadata(lora: Mapping[str, Tensor], title: str, more: Mapping[str, str]) -> dict[str, str]:
    """`ss_*` and `modelspec.*` entries of a LoRA, without dates or random ids; `more` (of the training) goes on top."""
    groups, _, _ = grouped(lora, plain=False)
    ranks = sorted({group["down"][1].shape[0] for group in groups.values() if "down" in group})
    alphas = sorted({float(group["alpha"][1]) for group in groups.values() if "alpha" in group})
    lycoris = any(set(group) - {"up", "down", "alpha"} for group in groups.values())
    entries = {
        "format": "pt",
        "modelspec.sai_model_spec": "1.0.0",
        "modelspec.title": title,
        "modelspec.implementation": "https://github.com/comfyanonymous/ComfyUI",
        "ss_network_module": "lycoris.kohya" if lycoris else "networks.lora",
        "ss_output_name": title,
    }
    if ranks:
        entries["ss_network_dim"] = str(ranks[0]) if len(ranks) == 1 else "Dynamic"
    if alphas:
        entries["ss_network_alpha"] = f"{alphas[0]:g}" if len(alphas) == 1 else "Dynamic"
    return {**entries, **more, **_family_metadata(_family(lora))}


def _family_metadata(family: ModelFamily | None) -> dict[str, str]:
    """What modelspec and kohya say of the model that a LoRA is for; nothing where it is not known."""
    if family is None:
        return {}
    entries: dict[str, str] = {}
    if isinstance(family.modelspec, ModelSpec):
        entries["modelspec.architecture"] = f"{family.modelspec.architecture}/lora"
        entries["modelspec.implementation"] = family.modelspec.implementation
    if isinstance(family.kohya, Kohya):
        if isinstance(family.kohya.version, str):
            entries["ss_base_model_version"] = family.kohya.version
        if isinstance(family.kohya.v2, bool):
            entries["ss_v2"] = str(family.kohya.v2)
    return entries
