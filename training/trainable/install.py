"""What is trained: an adapter at the activations of chosen modules (`kinds`), or copies of the weights themselves."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from ...storage.digest import sha256_of_tensors
from ..memory.inference_tensors import as_normal_tensors
from . import adapter_forward
from .adapter_forward import Dropouts, Moment
from .targets import TARGETS, TEXT_ENCODER, Patterns, Site, parse, sites, size_of, targets

__all__ = [
    "KINDS",
    "TARGETS",
    "TEXT_ENCODER",
    "AdapterSettings",
    "as_lora",
    "attached",
    "beginning",
    "from_lora",
    "limit_norms_",
    "targets",
]

KINDS = ("lora", "locon", "loha", "lokr", "dora", "oft", "full")
_PREFIX = "diffusion_model."
_DROPOUTS = ("rank_dropout", "module_dropout", "network_dropout")


@dataclass(frozen=True)
class AdapterSettings:
    """Settings of what is trained; plain values, checked on creation (`initial` alone holds tensors, and its digest
    stands for it).

    `attention` is every projection of self- and cross-attention; `attention+ff` adds feed-forward and the transformers'
    proj_in and proj_out; `all` is every module of the model. kind lora takes linear layers and convolutions of kernel
    1, full every parameter, the others every convolution too. `pattern` narrows the choice and gives single parts a
    rank and alpha of their own (`targets.parse`). `rank` is the size of the factors; of oft the side of the blocks (or
    their number, whichever is larger). `alpha` 0 is the rank.
    """

    kind: str = "lora"
    rank: int = 16
    alpha: float = 0.0
    targets: str = "attention"
    pattern: str = ""
    text_encoder: bool = False
    rank_dropout: float = 0.0
    module_dropout: float = 0.0
    network_dropout: float = 0.0
    max_norm: float = 0.0
    initial_digest: str = ""
    initial: Mapping[str, Tensor] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        wrong = []
        if self.kind not in KINDS:
            wrong.append(f"kind is {self.kind!r}, expected one of {', '.join(KINDS)}")
        if self.targets not in TARGETS:
            wrong.append(f"targets is {self.targets!r}, expected one of {', '.join(TARGETS)}")
        if self.rank < 1:
            wrong.append(f"rank is {self.rank}, expected 1 or more")
        if not 0 <= self.alpha < float("inf"):
            wrong.append(f"alpha is {self.alpha}, expected 0 (the same as rank) or more")
        for name in _DROPOUTS:
            if not 0.0 <= getattr(self, name) < 1.0:
                wrong.append(f"{name} is {getattr(self, name)}, expected at least 0 and below 1")
        if not 0 <= self.max_norm < float("inf"):
            wrong.append(f"max_norm is {self.max_norm}, expected 0 (off) or more")
        try:
            sizes = parse(self.pattern).sizes
        except ValueError as error:
            sizes = ()
            wrong.append(str(error))
        if self.kind == "full":
            for name in (*_DROPOUTS, "max_norm", "alpha"):
                if getattr(self, name):
                    wrong.append(f"{name} works on an adapter and kind full has none; set it to 0")
            if sizes:
                wrong.append("pattern gives a rank or an alpha, and kind full has neither")
            if self.initial is not None:
                wrong.append("initial is a start for an adapter; with kind full apply it to the model instead")
        if self.kind == "oft":
            if self.alpha or any(size.alpha is not None for size in sizes):
                wrong.append("alpha scales a change that is added, and kind oft rotates; set it to 0")
            if self.network_dropout:
                wrong.append(
                    "network_dropout leaves out inner activations, and kind oft has none; use rank_dropout or"
                    " module_dropout"
                )
        if wrong:
            raise ValueError("GraftAdapter: " + "; ".join(wrong) + ".")
        if self.initial is not None and not self.initial_digest:
            object.__setattr__(self, "initial_digest", sha256_of_tensors(self.initial))

    @cached_property
    def patterns(self) -> Patterns:
        """What `pattern` says."""
        return parse(self.pattern)

    @property
    def dropping(self) -> bool:
        """Whether any dropout is on."""
        return bool(self.rank_dropout or self.module_dropout or self.network_dropout)


# --- tensors ----------------------------------------------------------------------------------------------------------


def beginning(
    module: nn.Module,
    settings: AdapterSettings,
    seed: int,
    base: Mapping[str, Tensor],
    text_encoder: nn.Module | None = None,
    read: Collection[str] | None = None,
) -> dict[str, Tensor]:
    """Trained tensors before the first step: float32, on the CPU, by name (`<path>.lora_down.weight`, or the
    parameter's own name).

    Adapters begin as `kinds.start` says, drawn from (seed, module name); kind full copies the weights in `base`. `base`
    goes by parameter name; names of the text encoder, which is trained when it is given, begin with `text_encoders.`
    there and in the result. `read` are the paths of its parts that can learn something; None is all of them.
    """
    chosen = sites(module, settings, text_encoder)
    if read is not None:
        chosen = {
            path: site
            for path, site in chosen.items()
            if not path.startswith(TEXT_ENCODER) or path[len(TEXT_ENCODER) :] in read
        }
    if settings.kind == "full":
        return _whole(module, text_encoder, chosen, base)
    out: dict[str, Tensor] = {}
    for path, site in chosen.items():
        started = adapter_forward.start(settings.kind, site, seed, lambda site=site: _column_norms(site.part, None))  # type: ignore[misc]
        out.update((f"{path}.{suffix}", tensor) for suffix, tensor in started.items())
    if settings.initial is not None:
        _start_from_(out, settings, chosen)
    return out


def _whole(
    module: nn.Module, text_encoder: nn.Module | None, chosen: Mapping[str, Site], base: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    once = {
        name for name, _ in module.named_parameters()
    }  # a parameter that modules share is trained under its first name
    once |= {TEXT_ENCODER + name for name, _ in text_encoder.named_parameters()} if text_encoder is not None else set()
    names = [
        _join(path, name) for path, site in chosen.items() for name, _ in site.part.named_parameters(recurse=False)
    ]
    quantised = [name for name in names if name in once and not _plain(base[name])]
    if quantised:
        one = quantised[0]
        raise ValueError(
            f"GraftAdapter: kind full trains weights, and {len(quantised)} of them are quantised ({one}:"
            f" {base[one].dtype}); use another kind, which trains beside them, or a model that is not quantised."
        )
    return {name: base[name].detach().to("cpu", torch.float32, copy=True) for name in names if name in once}


def _join(path: str, name: str) -> str:
    if path in ("", TEXT_ENCODER):
        return path + name
    return f"{path}.{name}"


def _plain(weight: Tensor) -> bool:
    return weight.is_floating_point() and weight.element_size() > 1 and type(weight) in (Tensor, nn.Parameter)


@torch.no_grad()
def _column_norms(part: nn.Module, change: Tensor | None) -> Tensor:
    """Norms (in,) of the columns of a module's weight plus a change, in float32 or more; of a quantised one as it
    computes.
    """
    weight = _values(part)
    if change is None:
        changed = weight
    else:
        changed = weight + change.to(weight.device, weight.dtype)
    return changed.transpose(0, 1).flatten(1).norm(dim=1)


def _values(part: nn.Module) -> Tensor:
    """A module's weight as it computes with it; what is quantised in a way of its own is asked for the images of unit
    vectors.
    """
    weight = part.weight
    assert isinstance(weight, Tensor)
    if _plain(weight):
        if weight.dtype == torch.float64:
            return weight
        return weight.float()
    units = torch.eye(int(part.in_features), device=weight.device)  # type: ignore[arg-type]
    zero = units.new_zeros(1, units.shape[0])
    forward = type(part).forward.__get__(part)
    return (forward(units) - forward(zero)).T.float()


def _start_from_(out: dict[str, Tensor], settings: AdapterSettings, chosen: Mapping[str, Site]) -> None:
    """Overwrite the beginning with the tensors of `settings.initial`; raises with every mismatch. The file's own alpha
    is folded in.
    """
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
    for path, site in chosen.items():
        names = [f"{path}.{suffix}" for suffix in adapter_forward.shapes(settings.kind, site)]
        if any(name in given for name in names):
            wrong += [f"{name}: missing beside the others of its layer" for name in names if name not in given]
    if not given.keys() & out.keys():
        wrong.append("no tensor of it is one that these settings train")
    if wrong:
        raise ValueError(f"GraftAdapter: initial does not fit ({len(wrong)}):\n  " + "\n  ".join(wrong))
    for name in given.keys() & out.keys():
        out[name] = given[name].detach().to("cpu", torch.float32).clone()
    for path, site in chosen.items():
        name = f"{path}.{adapter_forward.folded(settings.kind)}"
        if name in given and adapter_forward.scaled(settings.kind, adapter_forward.shapes(settings.kind, site)):
            alpha = given.get(f"{path}.alpha")
            out[name] = out[name] * ((site.rank if alpha is None else float(alpha)) / site.alpha)


def as_lora(
    trained: Mapping[str, Tensor], settings: AdapterSettings, base: Mapping[str, Tensor] | None
) -> dict[str, Tensor]:
    """Trained tensors under ComfyUI's generic names, on the CPU: `diffusion_model.<path>.<suffix>`,
    `text_encoders.<path>.<suffix>`.

    Adapters get an `.alpha` each; whole weights become differences from `base` (by parameter name): `.diff` and
    `.diff_b`.
    """
    out: dict[str, Tensor] = {}
    if settings.kind == "full" and base is None:
        raise ValueError("Differences of whole weights need the base weights, and none are attached to this state.")
    for name, tensor in trained.items():
        value = tensor.detach().to("cpu", torch.float32)
        if name.startswith(TEXT_ENCODER):
            key = name
        else:
            key = _PREFIX + name
        if base is not None and settings.kind == "full":
            difference = value - base[name].detach().to("cpu", torch.float32)
            if name.endswith(".bias"):
                own = key.removesuffix(".bias") + ".diff_b"
            else:
                own = key.removesuffix(".weight") + ".diff"
            out[own] = difference
            continue
        out[key] = value.clone()
    for path in adapter_forward.grouped(trained) if settings.kind != "full" else ():
        if path.startswith(TEXT_ENCODER):
            key = path
        else:
            key = _PREFIX + path
        alpha = 0.0 if settings.kind == "oft" else size_of(path, settings)[1]  # lycoris' OFT: no constraint
        out[f"{key}.alpha"] = torch.tensor(alpha)
    return out


def from_lora(
    lora: Mapping[str, Tensor], settings: AdapterSettings, base: Mapping[str, Tensor] | None
) -> dict[str, Tensor]:
    """Trained tensors from what `as_lora` gave: factors as they are (alpha is the settings'), differences added to
    `base`.
    """
    if settings.kind != "full":
        return {
            name.removeprefix(_PREFIX): tensor.clone() for name, tensor in lora.items() if not name.endswith(".alpha")
        }
    if base is None:
        raise ValueError("Whole weights from differences need the base weights, and none are attached to this state.")
    out: dict[str, Tensor] = {}
    for name, tensor in lora.items():
        path, _, role = name.removeprefix(_PREFIX).rpartition(".")
        if role == "diff_b":
            own = f"{path}.bias"
        else:
            if f"{path}.weight" in base:
                own = f"{path}.weight"
            else:
                own = path
        out[own] = base[own].detach().to("cpu", torch.float32) + tensor
    return out


@torch.no_grad()
def limit_norms_(trained: Mapping[str, Tensor], settings: AdapterSettings) -> int:
    """Scale changes in place whose norm is above `max_norm` (kohya's scale weight norm; of a rotation its blocks'); how
    many.
    """
    if not settings.max_norm:
        return 0
    above = []
    for path, tensors in adapter_forward.grouped(trained).items():
        norm = adapter_forward.norm(settings.kind, tensors, *size_of(path, settings))
        above.append(norm > settings.max_norm)
        adapter_forward.shrink_(settings.kind, tensors, settings.max_norm / norm.clamp(min=settings.max_norm))
    return int(torch.stack(above).sum())


# --- installing -------------------------------------------------------------------------------------------------------


def _cast_(slots: Sequence[tuple[dict[str, Any], str, Tensor, torch.dtype]], *_: Any) -> None:
    """Before a forward: float32 weights that are trained go in as the model's own type, so that gradients reach them in
    float32.
    """
    done: dict[int, Tensor] = {}
    for parameters, name, tensor, dtype in slots:
        parameters[name] = done.setdefault(id(tensor), tensor.to(dtype))


@contextmanager
def _whole_in(module: nn.Module, trained: Mapping[str, Tensor]) -> Iterator[partial[None]]:
    """For the block the named parameters of `module` are the trained ones, in the model's own type as of its last
    forward.

    Yields what makes them so without a forward.
    """
    own = dict(module.named_parameters())
    cast = {id(own[name]): tensor for name, tensor in trained.items() if own[name].dtype != tensor.dtype}
    slots = [
        (part._parameters, name, cast[id(p)], p.dtype)
        for part in module.modules()
        for name, p in part._parameters.items()
        if p is not None and id(p) in cast
    ]
    with as_normal_tensors(
        module, {name: tensor for name, tensor in trained.items() if own[name].dtype == tensor.dtype}
    ):
        hook = module.register_forward_pre_hook(partial(_cast_, slots))
        try:
            yield partial(_cast_, slots)
        finally:
            hook.remove()


@contextmanager
def attached(
    module: nn.Module,
    settings: AdapterSettings,
    trained: Mapping[str, Tensor],
    moment: Moment,
    text_encoder: nn.Module | None = None,
) -> Iterator[Callable[[], None]]:
    """For the block `module` computes with the trained tensors, its own weights frozen and fit for autograd; then it is
    as before.

    So does `text_encoder`, where it is trained; its trained names begin with `text_encoders.`. Yields what must be
    called before its parts compute: a host calls those, and never the whole.
    """
    before = partial(_cast_, ())  # adapters have nothing to cast
    parts = [("", module)] + ([(TEXT_ENCODER, text_encoder)] if text_encoder is not None else [])
    with ExitStack() as stack:
        if settings.kind == "full":
            for prefix, part in parts:
                own = {
                    n.removeprefix(prefix): t for n, t in trained.items() if n.startswith(TEXT_ENCODER) == bool(prefix)
                }
                before = stack.enter_context(_whole_in(part, own))  # of the text encoder, which is last
            yield before
            return
        for _, part in parts:
            stack.enter_context(as_normal_tensors(part))
        tensors = adapter_forward.grouped(trained)
        for path, site in sites(module, settings, text_encoder).items():
            if path not in tensors:  # a part of the text encoder that nothing reads
                continue
            _hooked(stack, settings, site, tensors[path], moment)
        yield before


def _hooked(
    stack: ExitStack, settings: AdapterSettings, site: Site, tensors: Mapping[str, Tensor], moment: Moment
) -> None:
    def norms(now: Mapping[str, Tensor]) -> Tensor:
        return _column_norms(site.part, adapter_forward.change(settings.kind, now, site))

    before, after = adapter_forward.acting(settings.kind, site, tensors, Dropouts(settings, site.path, moment), norms)
    if before is not None:
        stack.callback(site.part.register_forward_pre_hook(before).remove)
    stack.callback(site.part.register_forward_hook(after).remove)
