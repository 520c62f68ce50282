"""What is trained: low-rank pairs at the activations of Linear and Conv2d modules (LoRA, arXiv 2106.09685), or copies of the weights."""

from __future__ import annotations

import fnmatch
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .aliases import standing_in
from .draws import generator

KINDS = ("lora", "locon", "full")
LATER_KINDS = ("loha", "lokr", "dora", "oft")
TARGETS = ("attention", "attention+ff", "all")

# Names of a path's parts, as they are in UNets and in the transformer families.
_ATTENTION = re.compile(r"(^|\.)(attn\d*|self_attn|cross_attn|attention|img_attn|txt_attn)(\.|$)")
_FEED_FORWARD = re.compile(r"(^|\.)(ff|ff_net|ffn|mlp|img_mlp|txt_mlp|feed_forward|proj_in|proj_out)(\.|$)")
_PREFIX = "diffusion_model."


@dataclass(frozen=True)
class AdapterSettings:
    """Settings of what is trained; plain values, checked on creation (`initial` alone holds tensors, and its digest stands for it).

    `attention` is every projection of self- and cross-attention; `attention+ff` adds feed-forward and the transformers' proj_in and
    proj_out; `all` is every module of the model. kind lora takes Linear and 1x1 Conv2d modules, locon every Conv2d too, full
    every parameter.
    `pattern` narrows the choice: globs, or /regular expressions/, separated by commas or lines; a leading ! leaves modules out.
    """

    kind: str = "lora"
    rank: int = 16
    alpha: float = 0.0
    targets: str = "attention"
    pattern: str = ""
    rank_dropout: float = 0.0
    module_dropout: float = 0.0
    network_dropout: float = 0.0
    max_norm: float = 0.0
    initial_digest: str = ""
    initial: Mapping[str, Tensor] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        wrong = []
        if self.kind in LATER_KINDS:
            wrong.append(f"kind {self.kind} is not available in this version of Graft; use lora, locon or full")
        elif self.kind not in KINDS:
            wrong.append(f"kind is {self.kind!r}, expected one of {', '.join(KINDS)}")
        if self.targets not in TARGETS:
            wrong.append(f"targets is {self.targets!r}, expected one of {', '.join(TARGETS)}")
        if self.rank < 1:
            wrong.append(f"rank is {self.rank}, expected 1 or more")
        if self.alpha < 0:
            wrong.append(f"alpha is {self.alpha}, expected 0 (the same as rank) or more")
        for name in ("rank_dropout", "module_dropout", "network_dropout"):
            if not 0.0 <= getattr(self, name) < 1.0:
                wrong.append(f"{name} is {getattr(self, name)}, expected at least 0 and below 1")
        if self.max_norm < 0:
            wrong.append(f"max_norm is {self.max_norm}, expected 0 (off) or more")
        if self.kind == "full":
            for name in ("rank_dropout", "module_dropout", "network_dropout", "max_norm"):
                if getattr(self, name):
                    wrong.append(f"{name} works on low-rank pairs and kind full has none; set it to 0")
            if self.initial is not None:
                wrong.append("initial is a start for low-rank pairs; with kind full apply it to the model instead")
        if wrong:
            raise ValueError("GraftAdapter: " + "; ".join(wrong) + ".")
        if self.initial is not None and not self.initial_digest:
            object.__setattr__(self, "initial_digest", tensors_digest(self.initial))

    @property
    def scale(self) -> float:
        """Factor on up @ down: alpha / rank, where alpha 0 stands for rank."""
        return (self.alpha or self.rank) / self.rank


def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """sha256 over names, dtypes, shapes and bytes, in name order."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().to("cpu").contiguous()
        digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        if tensor.numel():
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


# --- choosing ---------------------------------------------------------------------------------------------------------------------


def _matches(path: str, pattern: str) -> bool:
    if len(pattern) > 1 and pattern.startswith("/") and pattern.endswith("/"):
        return re.search(pattern[1:-1], path) is not None
    return fnmatch.fnmatchcase(path, pattern)


def _chosen(path: str, settings: AdapterSettings) -> bool:
    if settings.targets != "all":
        wanted = _ATTENTION.search(path) or (settings.targets == "attention+ff" and _FEED_FORWARD.search(path))
        if not wanted:
            return False
    patterns = [p.strip() for p in re.split(r"[,\n]", settings.pattern) if p.strip()]
    keep = [p for p in patterns if not p.startswith("!")]
    drop = [p[1:] for p in patterns if p.startswith("!")]
    return (not keep or any(_matches(path, p) for p in keep)) and not any(_matches(path, p) for p in drop)


def targets(module: nn.Module, settings: AdapterSettings) -> dict[str, nn.Module]:
    """The modules that `settings` choose, by path, in the module's own order. Raises ValueError when there is none."""
    found: dict[str, nn.Module] = {}
    for path, part in module.named_modules():
        if settings.kind == "full":
            fits = any(True for _ in part.parameters(recurse=False))
        elif isinstance(part, nn.Linear):
            fits = True
        else:
            fits = isinstance(part, nn.Conv2d) and part.groups == 1 and (settings.kind == "locon" or part.kernel_size == (1, 1))
        if fits and _chosen(path, settings):
            found[path] = part
    if not found:
        some = [path for path, part in module.named_modules() if isinstance(part, nn.Linear | nn.Conv2d)][:5]
        raise ValueError(
            f"GraftAdapter: targets {settings.targets!r} with pattern {settings.pattern!r} choose no module for kind {settings.kind!r}. "
            f"The model has modules such as {', '.join(some) or '(none that can be trained)'}."
        )
    return found


# --- tensors ----------------------------------------------------------------------------------------------------------------------


def _pair_shapes(part: nn.Module, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if isinstance(part, nn.Linear):
        return (rank, part.in_features), (part.out_features, rank)
    assert isinstance(part, nn.Conv2d)
    return (rank, part.in_channels, *part.kernel_size), (part.out_channels, rank, 1, 1)


def beginning(module: nn.Module, settings: AdapterSettings, seed: int, base: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Trained tensors before the first step: float32, on the CPU, by name (`<path>.lora_down.weight`, or the parameter's own name).

    Down weights are uniform in +-1/sqrt(fan_in), drawn from (seed, module name), up weights zero; kind full copies the weights in `base`
    (by parameter name).
    """
    chosen = targets(module, settings)
    if settings.kind == "full":
        once = {name for name, _ in module.named_parameters()}  # a parameter that modules share is trained under its first name
        names = [f"{path}.{name}" if path else name for path, part in chosen.items() for name, _ in part.named_parameters(recurse=False)]
        return {name: base[name].detach().to("cpu", torch.float32, copy=True) for name in names if name in once}
    out: dict[str, Tensor] = {}
    for path, part in chosen.items():
        down, up = _pair_shapes(part, settings.rank)
        bound = float(torch.Size(down[1:]).numel()) ** -0.5
        out[f"{path}.lora_down.weight"] = torch.empty(down).uniform_(-bound, bound, generator=generator(seed, 0, f"start {path}"))
        out[f"{path}.lora_up.weight"] = torch.zeros(up)
    if settings.initial is not None:
        _start_from_(out, settings)
    return out


def _start_from_(out: dict[str, Tensor], settings: AdapterSettings) -> None:
    """Overwrite the beginning with the pairs of `settings.initial`; raises with every mismatch. The file's own alpha is folded into up."""
    assert settings.initial is not None
    given = {name.removeprefix(_PREFIX): tensor for name, tensor in settings.initial.items()}
    wrong = []
    for name in sorted(given.keys() - out.keys()):
        if not name.endswith(".alpha"):
            wrong.append(f"{name}: not a tensor that these settings train")
    for name in sorted(given.keys() & out.keys()):
        if given[name].shape != out[name].shape:
            wrong.append(f"{name}: expected {tuple(out[name].shape)}, got {tuple(given[name].shape)}")
        elif not torch.isfinite(given[name]).all():
            wrong.append(f"{name}: has values that are not finite")
    if not given.keys() & out.keys():
        wrong.append("no tensor of it is one that these settings train")
    if wrong:
        raise ValueError(f"GraftAdapter: initial does not fit ({len(wrong)}):\n  " + "\n  ".join(wrong))
    for name in given.keys() & out.keys():
        value = given[name].detach().to("cpu", torch.float32)
        if name.endswith(".lora_up.weight"):
            alpha = given.get(name.removesuffix(".lora_up.weight") + ".alpha")
            theirs = 1.0 if alpha is None else float(alpha) / settings.rank
            value = value * (theirs / settings.scale)
        out[name] = value.clone()


def as_lora(trained: Mapping[str, Tensor], settings: AdapterSettings, base: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    """Trained tensors under ComfyUI's generic names, on the CPU.

    Pairs become `diffusion_model.<path>.lora_up.weight`, `.lora_down.weight` and `.alpha`; whole weights become differences from `base`
    (by parameter name): `.diff` and `.diff_b`.
    """
    out: dict[str, Tensor] = {}
    for name, tensor in trained.items():
        value = tensor.detach().to("cpu", torch.float32)
        if settings.kind != "full":
            out[_PREFIX + name] = value.clone()
            if name.endswith(".lora_up.weight"):
                out[_PREFIX + name.removesuffix(".lora_up.weight") + ".alpha"] = torch.tensor(settings.alpha or float(settings.rank))
            continue
        if base is None:
            raise ValueError("Differences of whole weights need the base weights, and none are attached to this state.")
        difference = value - base[name].detach().to("cpu", torch.float32)
        if name.endswith(".bias"):
            out[_PREFIX + name.removesuffix(".bias") + ".diff_b"] = difference
        else:
            out[_PREFIX + name.removesuffix(".weight") + ".diff"] = difference
    return out


def from_lora(lora: Mapping[str, Tensor], settings: AdapterSettings, base: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    """Trained tensors from what `as_lora` gave: pairs as they are (alpha is the settings'), differences added to `base`."""
    if settings.kind != "full":
        return {name.removeprefix(_PREFIX): tensor.clone() for name, tensor in lora.items() if not name.endswith(".alpha")}
    if base is None:
        raise ValueError("Whole weights from differences need the base weights, and none are attached to this state.")
    out: dict[str, Tensor] = {}
    for name, tensor in lora.items():
        path, _, role = name.removeprefix(_PREFIX).rpartition(".")
        own = f"{path}.bias" if role == "diff_b" else f"{path}.weight" if f"{path}.weight" in base else path
        out[own] = base[own].detach().to("cpu", torch.float32) + tensor
    return out


@torch.no_grad()
def limit_norms_(trained: Mapping[str, Tensor], settings: AdapterSettings) -> int:
    """Scale pairs in place whose change of the weight has a Frobenius norm above `max_norm` (kohya's scale weight norm); how many."""
    if not settings.max_norm:
        return 0
    scaled = 0
    for name, up in trained.items():
        if not name.endswith(".lora_up.weight"):
            continue
        down = trained[name.removesuffix("up.weight") + "down.weight"]
        b, a = up.flatten(1), down.flatten(1)
        norm = ((b.T @ b) * (a @ a.T)).sum().clamp(min=0).sqrt() * abs(settings.scale)  # |B A| without the product
        if norm > settings.max_norm:
            factor = (settings.max_norm / norm).sqrt()
            up.mul_(factor)
            down.mul_(factor)
            scaled += 1
    return scaled


# --- installing -------------------------------------------------------------------------------------------------------------------

Moment = Callable[[], tuple[int, int, str]]  # (seed, step, part of the step) of the forward that runs now


class _Dropouts:
    """Masks of the low-rank activations, the same when a checkpointed forward runs again."""

    def __init__(self, settings: AdapterSettings, path: str, moment: Moment) -> None:
        self.settings, self.path, self.moment = settings, path, moment

    def __call__(self, hidden: Tensor, channel: int) -> Tensor | None:
        """The masked hidden activations, or None when the whole module is left out; `channel` is the dimension of the rank."""
        settings = self.settings
        seed, step, purpose = self.moment()
        if not purpose:  # sampling and validation use every unit
            return hidden
        draws = generator(seed, step, f"dropout {purpose} {self.path}")
        if settings.module_dropout and torch.rand((), generator=draws) < settings.module_dropout:
            return None
        if settings.network_dropout:
            keep = torch.rand(hidden.shape, generator=draws) >= settings.network_dropout
            hidden = hidden * (keep.to(hidden.device, hidden.dtype) / (1 - settings.network_dropout))
        if settings.rank_dropout:
            shape = [1] * hidden.ndim
            shape[0], shape[channel] = hidden.shape[0], hidden.shape[channel]
            keep = torch.rand(shape, generator=draws) >= settings.rank_dropout
            hidden = hidden * (keep.to(hidden.device, hidden.dtype) / (1 - settings.rank_dropout))
        return hidden


Hook = Callable[[Any, tuple[Tensor, ...], Tensor], Tensor]


def _linear_hook(down: Tensor, up: Tensor, scale: float, drop: _Dropouts | None) -> Hook:
    def beside(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
        x = args[0]
        hidden = F.linear(x, down.to(x.dtype))
        if drop is not None:
            dropped = drop(hidden, hidden.ndim - 1)
            if dropped is None:
                return out
            hidden = dropped
        # One pass for scale, product and sum.
        rows = hidden.reshape(-1, hidden.shape[-1]).to(out.dtype)
        return torch.addmm(out.reshape(-1, out.shape[-1]), rows, up.to(out.dtype).T, alpha=scale).view(out.shape)

    return beside


def _conv_hook(down: Tensor, up: Tensor, scale: float, drop: _Dropouts | None) -> Hook:
    def beside(module: nn.Conv2d, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
        x = args[0]
        hidden = F.conv2d(x, down.to(x.dtype), None, module.stride, module.padding, module.dilation)
        if drop is not None:
            dropped = drop(hidden, 1)
            if dropped is None:
                return out
            hidden = dropped
        return out + F.conv2d(hidden.to(out.dtype), up.to(out.dtype) * scale)

    return beside


def _cast_(slots: Sequence[tuple[dict[str, Any], str, Tensor, torch.dtype]], *_: Any) -> None:
    """Before a forward: float32 weights that are trained go in as the model's own type, so that gradients reach them in float32."""
    done: dict[int, Tensor] = {}
    for parameters, name, tensor, dtype in slots:
        parameters[name] = done.setdefault(id(tensor), tensor.to(dtype))


@contextmanager
def attached(module: nn.Module, settings: AdapterSettings, trained: Mapping[str, Tensor], moment: Moment) -> Iterator[None]:
    """For the block `module` computes with the trained tensors, its own weights frozen and fit for autograd; then it is as before."""
    if settings.kind == "full":
        own = dict(module.named_parameters())
        cast = {id(own[name]): tensor for name, tensor in trained.items() if own[name].dtype != tensor.dtype}
        slots = [
            (part._parameters, name, cast[id(p)], p.dtype)
            for part in module.modules() for name, p in part._parameters.items() if p is not None and id(p) in cast
        ]  # fmt: skip
        with standing_in(module, {name: tensor for name, tensor in trained.items() if own[name].dtype == tensor.dtype}):
            hook = module.register_forward_pre_hook(partial(_cast_, slots))
            try:
                yield
            finally:
                hook.remove()
        return
    dropping = settings.rank_dropout or settings.module_dropout or settings.network_dropout
    with ExitStack() as stack:
        stack.enter_context(standing_in(module))
        for path, part in targets(module, settings).items():
            drop = _Dropouts(settings, path, moment) if dropping else None
            down, up = trained[f"{path}.lora_down.weight"], trained[f"{path}.lora_up.weight"]
            make = _linear_hook if isinstance(part, nn.Linear) else _conv_hook
            hook = part.register_forward_hook(make(down, up, settings.scale, drop))
            stack.callback(hook.remove)
        yield
