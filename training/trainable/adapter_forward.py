"""What each kind of adapter trains at one module, and how it acts at the activations; the base weight is read, never
changed.

LoRA (arXiv 2106.09685), LoHa and LoKr (arXiv 2309.14859), DoRA (arXiv 2402.09353), OFT (arXiv 2306.07280). Beginnings
and dropouts are those of the reference trainers (kohya-ss/sd-scripts, lycoris, PEFT); names and shapes are what lycoris
writes and ComfyUI reads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...patches.adapters.loha import LoHa
from ...patches.adapters.lokr import LoKr
from ...patches.adapters.lora import LoRA
from ...patches.adapters.oft import OFT
from ...patches.models.convolution import convolve
from ..random_draws import generator
from .targets import Site

if TYPE_CHECKING:
    from .install import AdapterSettings

LOW_RANK = ("lora", "locon", "dora")  # kinds with an up and a down factor

Moment = Callable[[], tuple[int, int, str]]  # (seed, step, part of the step) of the forward that runs now
Before = Callable[[Any, tuple[Any, ...]], tuple[Any, ...]]
After = Callable[[Any, tuple[Any, ...], Tensor], Tensor]


# --- beginnings -------------------------------------------------------------------------------------------------------


def factors(side: int, factor: int = -1) -> tuple[int, int]:
    """(m, n) with m * n = side and m <= n: `factor` where it divides, else the largest divisor up to it; -1 is as
    square as can be.
    """
    if factor > 0 and side % factor == 0:
        return min(factor, side // factor), max(factor, side // factor)
    limit = min(math.isqrt(side), factor if factor > 0 else side)
    m = next(m for m in range(limit, 0, -1) if side % m == 0)
    return m, side // m


def shapes(kind: str, site: Site) -> dict[str, tuple[int, ...]]:
    """Shapes of the trained tensors of one module, by suffix."""
    out, columns, *kernel = site.shape
    rank, flat = site.rank, math.prod(site.shape[1:])
    if kind in LOW_RANK:
        ones = (1,) * len(kernel)
        pair = {"lora_down.weight": (rank, columns, *kernel), "lora_up.weight": (out, rank, *ones)}
        if kind != "dora":
            return pair
        return {**pair, "dora_scale": (1, columns, *ones)}
    if kind == "loha":
        return {
            "hada_w1_a": (out, rank),
            "hada_w1_b": (rank, flat),
            "hada_w2_a": (out, rank),
            "hada_w2_b": (rank, flat),
        }
    if kind == "lokr":
        (first_out, rest_out), (first_in, rest_in) = factors(out), factors(columns)
        first = {"lokr_w1": (first_out, first_in)}
        if rank >= max(rest_out, rest_in) / 2:  # a product would be no smaller
            return {**first, "lokr_w2": (rest_out, rest_in, *kernel)}
        return {**first, "lokr_w2_a": (rest_out, rank), "lokr_w2_b": (rank, rest_in * math.prod(kernel))}
    size, count = factors(out, rank)
    return {"oft_blocks": (count, size, size)}


# Deviation of normal draws; what stands in neither table begins at zero.
_NORMAL = {"hada_w1_a": 0.1, "hada_w1_b": 1.0, "hada_w2_b": 1.0}
_UNIFORM = ("lora_down.weight", "lokr_w1", "lokr_w2_a")  # in +-1/sqrt(fan in)


def start(kind: str, site: Site, seed: int, norms: Callable[[], Tensor]) -> dict[str, Tensor]:
    """Trained tensors of one module before the first step, by suffix: float32 on the CPU, drawn from (seed, path,
    suffix).

    The change of the weight is zero. `norms` gives the norms of the weight's columns, which a DoRA magnitude begins
    with.
    """
    made: dict[str, Tensor] = {}
    for suffix, shape in shapes(kind, site).items():
        if suffix == "lora_down.weight":
            purpose = f"start {site.path}"
        else:
            purpose = f"start {site.path} {suffix}"
        if suffix == "dora_scale":
            made[suffix] = norms().reshape(shape).to("cpu", torch.float32)
        elif suffix in _NORMAL:
            made[suffix] = torch.empty(shape).normal_(0.0, _NORMAL[suffix], generator=generator(seed, 0, purpose))
        elif suffix in _UNIFORM:
            bound = math.prod(shape[1:]) ** -0.5
            made[suffix] = torch.empty(shape).uniform_(-bound, bound, generator=generator(seed, 0, purpose))
        else:
            made[suffix] = torch.zeros(shape)
    return made


def grouped(trained: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Trained tensors by path and suffix."""
    out: dict[str, dict[str, Tensor]] = {}
    for name, tensor in trained.items():
        path, _, suffix = name.removesuffix(".weight").rpartition(".")
        out.setdefault(path, {})[suffix + (".weight" if name.endswith(".weight") else "")] = tensor
    return out


def scaled(kind: str, suffixes: Collection[str]) -> bool:
    """Whether alpha counts: not for a rotation, and not for a LoKr without a product."""
    return kind != "oft" and "lokr_w2" not in suffixes


def folded(kind: str) -> str:
    """The tensor that another scale of the change is multiplied into, as a suffix; a rotation has none."""
    return {"loha": "hada_w1_a", "lokr": "lokr_w1", "oft": ""}.get(kind, "lora_up.weight")


def change(kind: str, tensors: Mapping[str, Tensor], site: Site) -> Tensor:
    """The difference (out, in, *kernel) that an additive adapter makes at one module, in float32; of DoRA without its
    magnitude.
    """
    get = tensors.__getitem__
    layer: LoRA | LoHa | LoKr
    if kind == "loha":
        layer = LoHa(get("hada_w1_a"), get("hada_w1_b"), get("hada_w2_a"), get("hada_w2_b"), site.alpha)
    elif kind == "lokr":
        two = tensors.get("lokr_w2"), None, None, tensors.get("lokr_w2_a"), tensors.get("lokr_w2_b")
        layer = LoKr(get("lokr_w1"), *two, alpha=site.alpha)
    else:
        layer = LoRA(get("lora_up.weight"), get("lora_down.weight"), site.alpha)
    return layer.delta(site.shape, next(iter(tensors.values())).device)


# --- norms ------------------------------------------------------------------------------------------------------------


def norm(kind: str, tensors: Mapping[str, Tensor], rank: int, alpha: float) -> Tensor:
    """Frobenius norm of the change of the weight (a rotation: of its blocks), at strength 1."""
    if scaled(kind, tensors):
        scale = alpha / rank
    else:
        scale = 1.0
    if kind in LOW_RANK:
        b, a = tensors["lora_up.weight"].flatten(1), tensors["lora_down.weight"].flatten(1)
        return ((b.T @ b) * (a @ a.T)).sum().clamp(min=0).sqrt() * scale  # |B A| without the product
    if kind == "loha":
        first, second = (tensors[f"hada_{w}_a"] @ tensors[f"hada_{w}_b"] for w in ("w1", "w2"))
        return (first * second).norm() * scale
    if kind == "lokr":
        whole = tensors.get("lokr_w2")
        if whole is None:
            second = tensors["lokr_w2_a"] @ tensors["lokr_w2_b"]
        else:
            second = whole
        return tensors["lokr_w1"].norm() * second.norm() * scale
    return tensors["oft_blocks"].norm()


def shrink_(kind: str, tensors: Mapping[str, Tensor], ratio: Tensor) -> None:
    """Multiply the change of the weight by `ratio`: up and down by its root (kohya), else the first factor or the
    blocks (lycoris).
    """
    if kind in LOW_RANK:
        tensors["lora_up.weight"].mul_(ratio.sqrt())
        tensors["lora_down.weight"].mul_(ratio.sqrt())
    else:
        tensors[folded(kind) or "oft_blocks"].mul_(ratio)


# --- dropouts ---------------------------------------------------------------------------------------------------------


class Dropouts:
    """What is left out of one module's adapter in the forward that runs now; the same when a checkpointed forward runs
    again.
    """

    def __init__(self, settings: AdapterSettings, path: str, moment: Moment) -> None:
        self.settings, self.path, self.moment = settings, path, moment

    def draws(self) -> torch.Generator | None:
        """The generator of this forward; None outside training, where nothing is left out."""
        seed, step, purpose = self.moment()
        if purpose:
            return generator(seed, step, f"dropout {purpose} {self.path}")
        return None

    def module(self, draws: torch.Generator | None) -> bool:
        """Whether the whole adapter is left out."""
        chance = self.settings.module_dropout
        return draws is not None and chance > 0 and float(torch.rand((), generator=draws)) < chance

    def units(self, values: Tensor, draws: torch.Generator | None) -> Tensor:
        """`network_dropout`: single activations, those that stay scaled up."""
        chance = self.settings.network_dropout
        if draws is None or not chance:
            return values
        keep = torch.rand(values.shape, generator=draws) >= chance
        return values * (keep.to(values.device, values.dtype) / (1 - chance))

    def ranks(self, hidden: Tensor, channel: int, draws: torch.Generator | None) -> Tensor:
        """`rank_dropout` of a low-rank pair, anew a picture, the rest scaled up (kohya); `channel` is the dimension of
        the rank.
        """
        chance = self.settings.rank_dropout
        if draws is None or not chance:
            return hidden
        shape = [1] * hidden.ndim
        shape[0], shape[channel] = hidden.shape[0], hidden.shape[channel]
        keep = torch.rand(shape, generator=draws) >= chance
        return hidden * (keep.to(hidden.device, hidden.dtype) / (1 - chance))

    def rows(self, count: int, draws: torch.Generator | None) -> Tensor | None:
        """`rank_dropout` where there are no ranks to leave out: rows of the change (lycoris, not scaled up) or blocks
        of a rotation.
        """
        chance = self.settings.rank_dropout
        if draws is None or not chance:
            return None
        return torch.rand(count, generator=draws) >= chance


# --- at the activations -----------------------------------------------------------------------------------------------


def acting(
    kind: str,
    site: Site,
    tensors: Mapping[str, Tensor],
    drop: Dropouts,
    norms: Callable[[Mapping[str, Tensor]], Tensor],
) -> tuple[Before | None, After]:
    """(what is done to the input before the module's forward, what is done to its output after it) for one adapter.

    `norms` gives the column norms of weight + change, for DoRA.
    """
    if kind == "dora":
        return _dora(site, tensors, drop, norms)
    if kind == "oft":
        return None, _oft(site, tensors, drop)
    if kind == "loha":
        return None, _loha(site, tensors, drop)
    return None, _lokr(site, tensors, drop) if kind == "lokr" else _pair(site, tensors, drop)


def _is_conv(site: Site) -> bool:
    return len(site.shape) > 2


def _pair(site: Site, tensors: Mapping[str, Tensor], drop: Dropouts) -> After:
    factor, down, up = site.alpha / site.rank, tensors["lora_down.weight"], tensors["lora_up.weight"]
    dropping = drop.settings.dropping

    def hidden_of(module: nn.Module, x: Tensor) -> Tensor | None:
        if _is_conv(site):
            hidden = convolve(module, x, down.to(x.dtype))
        else:
            hidden = F.linear(x, down.to(x.dtype))
        if not dropping:
            return hidden
        draws = drop.draws()
        if drop.module(draws):
            return None
        return drop.ranks(drop.units(hidden, draws), 1 if _is_conv(site) else hidden.ndim - 1, draws)

    def beside(module: nn.Module, args: tuple[Any, ...], out: Tensor) -> Tensor:
        hidden = hidden_of(module, args[0])
        if hidden is None:
            return out
        if _is_conv(site):
            return out + _pointwise(up.to(out.dtype) * factor, hidden.to(out.dtype))
        rows = hidden.reshape(-1, hidden.shape[-1]).to(out.dtype)  # one pass for scale, product and sum
        return torch.addmm(out.reshape(-1, out.shape[-1]), rows, up.to(out.dtype).T, alpha=factor).view(out.shape)

    return beside


_CONV: dict[int, Callable[..., Tensor]] = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}


def _pointwise(weight: Tensor, x: Tensor) -> Tensor:
    """A convolution of kernel 1."""
    return _CONV[weight.ndim](x, weight)


def _added(site: Site, made: Callable[[nn.Module, Tensor], Tensor], drop: Dropouts) -> After:
    """`made(module, x)` is added to the output, with lycoris' dropouts."""
    dropping = drop.settings.dropping

    def beside(module: nn.Module, args: tuple[Any, ...], out: Tensor) -> Tensor:
        if not dropping:
            return out + made(module, args[0]).to(out.dtype)
        draws = drop.draws()
        if drop.module(draws):
            return out
        added = made(module, args[0])
        keep = drop.rows(site.shape[0], draws)
        if keep is not None:
            added = added * keep.to(added.device, added.dtype).view(-1, *(1,) * (len(site.shape) - 2))
        return out + drop.units(added, draws).to(out.dtype)

    return beside


def _loha(site: Site, tensors: Mapping[str, Tensor], drop: Dropouts) -> After:
    def added(module: nn.Module, x: Tensor) -> Tensor:
        delta = change("loha", tensors, site).to(x.dtype)
        if _is_conv(site):
            return convolve(module, x, delta)
        return F.linear(x, delta)

    return _added(site, added, drop)


def _lokr(site: Site, tensors: Mapping[str, Tensor], drop: Dropouts) -> After:
    """kron(w1, w2) x without the product: w2 on each part of the input, then w1 across the parts."""
    first, kernel, parts = tensors["lokr_w1"], site.shape[2:], tensors["lokr_w1"].shape[1]
    if scaled("lokr", tensors):
        factor = site.alpha / site.rank
    else:
        factor = 1.0

    def added(module: nn.Module, x: Tensor) -> Tensor:
        whole = tensors.get("lokr_w2")
        if whole is None:
            second = tensors["lokr_w2_a"] @ tensors["lokr_w2_b"]
        else:
            second = whole
        second, mix = second.to(x.dtype), (first * factor).to(x.dtype)
        if not _is_conv(site):
            return torch.einsum("lm,...mk->...lk", mix, F.linear(x.unflatten(-1, (parts, -1)), second)).flatten(-2)
        grouped = x.unflatten(1, (parts, -1)).flatten(0, 1)
        made = convolve(module, grouped, second.reshape(second.shape[0], -1, *kernel)).unflatten(0, (x.shape[0], parts))
        return torch.einsum("lm,bmk...->blk...", mix, made).flatten(1, 2)

    return _added(site, added, drop)


def _dora(
    site: Site, tensors: Mapping[str, Tensor], drop: Dropouts, norms: Callable[[Mapping[str, Tensor]], Tensor]
) -> tuple[Before, After]:
    """The columns of weight + change are scaled to the magnitude, which is the input scaled; the norm is a constant
    (section 4.3).
    """
    pair, magnitude = _pair(site, tensors, drop), tensors["dora_scale"]

    def before(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x = args[0]
        if drop.settings.module_dropout and drop.module(drop.draws()):  # as `pair` draws it
            return args
        with torch.no_grad():
            length = norms(tensors)
        ratio = (magnitude.flatten() / (length.to(magnitude.dtype) + torch.finfo(torch.float32).eps)).to(x.dtype)
        return (x * ratio.view(-1, *(1,) * (len(site.shape) - 2)), *args[1:])

    return before, pair


def _oft(site: Site, tensors: Mapping[str, Tensor], drop: Dropouts) -> After:
    """R (W x) + b: the output without bias is rotated block by block. Left out is a block that does not turn (as PEFT's
    OFT has it).
    """
    blocks = tensors["oft_blocks"]
    layer, dropping = OFT(blocks), drop.settings.dropping

    def after(module: nn.Module, args: tuple[Any, ...], out: Tensor) -> Tensor:
        if dropping:
            draws = drop.draws()
        else:
            draws = None
        if dropping and drop.module(draws):
            return out
        rotations = layer.rotations(site.shape[0], out.device)
        if dropping:
            keep = drop.rows(blocks.shape[0], draws)
        else:
            keep = None
        if keep is not None:
            one = torch.eye(blocks.shape[-1], device=rotations.device, dtype=rotations.dtype)
            rotations = torch.where(keep.to(rotations.device).view(-1, 1, 1), rotations, one)
        if _is_conv(site):
            channel = 1
        else:
            channel = out.ndim - 1
        plain = out.movedim(channel, -1)
        bias = getattr(module, "bias", None)
        if bias is None:
            bias = None
        else:
            bias = bias.to(out.dtype)
        plain = (plain if bias is None else plain - bias).unflatten(-1, blocks.shape[:2])
        turned = torch.einsum("knm,...kn->...km", rotations.to(out.dtype), plain).flatten(-2)
        return (turned if bias is None else turned + bias).movedim(-1, channel)

    return after
