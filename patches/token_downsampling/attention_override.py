"""Token downsampling around one call of a model.

Transformers get it through `optimized_attention_override`, UNets through an attn1 patch behind all other patches.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from ...storage.printable import logger
from ..models.attention_kernels import InferenceOnly, TrainingKernel
from ..models.token_layout import Grid, Layout, Place, text_length
from ..models.torch_compile import is_compiled, separate_code, unwrap
from .tokens import Span, ToDoSettings, target_grid, thin_span, thin_span_mask
from .transformers import TransformerToDo, plan_transformer
from .unet import CHANGED, LEFT, REPLACED, ToDoPatch, is_active, plan_unet

OVERRIDE = "optimized_attention_override"
Kernel = Callable[..., Tensor]
_OF_THE_DEVICE = tuple(
    getattr(torch, name) for name in ("OutOfMemoryError", "AcceleratorError") if hasattr(torch, name)
)

log = logger(__name__)


ToDo = ToDoPatch | TransformerToDo


def plan_todo(model: nn.Module, settings: ToDoSettings, replaced: Collection[tuple[Any, ...]] = ()) -> ToDo:
    """Plan token downsampling for a diffusion model.

    `replaced` are the blocks of a UNet that `plan_unet` counts as left alone. Raises TypeError naming an unknown class,
    and ValueError if the model has no self-attention or fewer depths than factors.
    """
    model = unwrap(model)
    if isinstance(getattr(model, "input_blocks", None), nn.Module):
        return plan_unet(model, settings, replaced)
    return plan_transformer(model, settings)


@dataclass(frozen=True, eq=False)
class ToDoCall:
    """ComfyUI `APPLY_MODEL` wrapper that sets up token downsampling for one call of the model.

    It works in a copy of that call's options. For a transformer it chains its override in front of the call's existing
    override, so that no other node's is lost, and a later one does not replace ours. For a UNet it moves the patch
    after all other attn1 patches, and tells it which blocks' attention is replaced. A compiled model runs code compiled
    for these settings. What it leaves alone is logged once a run: `begin_run` is called before each.
    """

    todo: ToDo
    logged: set[str] = field(default_factory=set)

    def __deepcopy__(self, memo: dict[int, Any]) -> ToDoCall:
        return self

    @property
    def identity(self) -> str:
        """The same text for an equal wrapper, in every process; fingerprints hash it."""
        return self.todo.identity

    def begin_run(self, *_: Any) -> None:
        """ComfyUI's `ON_PRE_RUN` callback: sampling or training begins."""
        self.logged.clear()

    def _warn_once(self, text: str) -> None:
        if text not in self.logged:
            self.logged.add(text)
            log.warning(text)

    def __call__(
        self,
        executor: Any,
        x: Tensor,
        t: Tensor,
        c_concat: Tensor | None = None,
        c_crossattn: Tensor | None = None,
        control: Any = None,
        transformer_options: Mapping[str, Any] | None = None,
        **conditions: Any,
    ) -> Tensor:
        options, code = self._options(executor.class_obj, x, c_crossattn, conditions, dict(transformer_options or {}))
        compiled = is_compiled(options.get("wrappers", {}))
        unthinned: dict[tuple[str, int, int], str] = {}
        if not compiled:
            options[LEFT] = unthinned
        with separate_code(code) if compiled else contextlib.nullcontext():
            out = executor(x, t, c_concat, c_crossattn, control, options, **conditions)
        set_up = options.get(OVERRIDE)
        reasons = Counter(reason for reason in unthinned.values() if reason)
        if isinstance(set_up, Thinning):
            reasons[CHANGED] += set_up.left
        if reasons.total():  # in the node's report are those that were known before the model ran
            listed = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))
            self._warn_once(f"Apply ToDo left {reasons.total()} self-attention blocks alone: {listed}")
        elif isinstance(set_up, Thinning) and set_up.met and not set_up.thinned:
            lengths = " or ".join(map(str, sorted(set_up.layout.places)))
            self._warn_once(
                f"Apply ToDo thinned nothing: no attention had {lengths} tokens. Another node adds tokens, or keeps"
                " keys of its own"
            )
        return out

    def _options(
        self, whole: Any, x: Tensor, context: Tensor | None, conditions: Mapping[str, Any], options: dict[str, Any]
    ) -> tuple[dict[str, Any], str]:
        """(the options of one call, an identity for them if compiled code can use them as they are)."""
        if not is_active(self.todo.settings, options, whole.model_sampling.percent_to_sigma):
            if isinstance(self.todo, ToDoPatch):
                options = remove_patch(self.todo, options)
            return options, f"{self.identity} rests"
        code, override = f"{self.identity} on {tuple(x.shape[2:])}", options.get(OVERRIDE)
        if isinstance(self.todo, TransformerToDo):
            layout = self.todo.tokens.layout(unwrap(whole.diffusion_model), x, context, conditions)
            override = make_thinning(self.todo, layout, override)
            code = f"{code} {layout}"
        else:
            options = move_patch_last(self.todo, options)
            if override is not None:
                override = Guard(override, text_length(context))
        if override is not None:
            options[OVERRIDE] = override
        return options, code


def move_patch_last(patch: ToDoPatch, options: Mapping[str, Any]) -> dict[str, Any]:
    """A UNet's transformer_options with the patch after all other attn1 patches, and with the blocks that others
    replace.
    """
    reordered = remove_patch(patch, options)
    others = reordered["patches"].get("attn1_patch", [])
    before = options.get("patches", {}).get("attn1_patch", [])
    if len(others) < len(before):  # else the patch was taken off for this call
        reordered["patches"]["attn1_patch"] = [*others, patch]
    return {**reordered, REPLACED: frozenset(options.get("patches_replace", {}).get("attn1", {}))}


def remove_patch(patch: ToDoPatch, options: Mapping[str, Any]) -> dict[str, Any]:
    """A UNet's transformer_options without the patch among its attn1 patches."""
    patches = dict(options.get("patches", {}))
    if "attn1_patch" in patches:
        patches["attn1_patch"] = [other for other in patches["attn1_patch"] if other is not patch]
    return {**options, "patches": patches}


def make_thinning(todo: TransformerToDo, layout: Layout, previous: Kernel | None) -> Thinning | Kernel | None:
    """The override for one call with this layout; `previous` itself if the grid is too small to thin."""
    target = target_grid(layout.grid, todo.settings.factors[0])
    if target == layout.grid:
        return previous
    return Thinning(layout, target, todo.settings.method, previous)


class Thinning:
    """Token downsampling of a transformer, as ComfyUI's `optimized_attention_override` for one call of one model.

    K, V and mask lose image tokens, Q does not. It works behind the rotary embedding, so each key keeps its own
    position. It lives as long as the call, and counts calls only if other attention of the model happens to have the
    image's sequence length.

    `met` says whether it has met any attention, `thinned` whether it has met the image's, `left` in how many blocks
    text and image had fewer or more keys than queries.
    """

    def __init__(
        self,
        layout: Layout,
        target: Grid,
        method: str,
        previous: Kernel | None,
        seen: Mapping[int, int] = MappingProxyType({}),
    ):
        self.layout, self.target, self.method, self.previous = layout, target, method, previous
        self._seen, self.met, self.thinned, self.left = Counter(seen), False, False, 0

    def copy_for_rerun(self) -> Thinning:
        """A copy that goes on counting from here, for a block that runs again later."""
        return Thinning(self.layout, self.target, self.method, self.previous, self._seen)

    def __call__(self, kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        axis, self.met = _axis(args, kwargs), True
        place = self._place(q, k, v, axis)
        if place is not None:
            self.thinned = True
            length = k.shape[axis]
            k, v = self._thin(k, axis, place), self._thin(v, axis, place)
            if len(args) > 1:  # heads, mask
                args = (args[0], self._thin_mask(args[1], length, place), *args[2:])
            elif kwargs.get("mask") is not None:
                kwargs["mask"] = self._thin_mask(kwargs["mask"], length, place)
        if self.previous is None:
            return kernel(q, k, v, *args, **kwargs)
        if place is None:
            return self.previous(kernel, q, k, v, *args, **kwargs)
        return _with_fewer_keys(self.previous, kernel, q, k, v, *args, **kwargs)

    def _place(self, q: Tensor, k: Tensor, v: Tensor, axis: int) -> Place | None:
        length = q.shape[axis]
        place = self.layout.places.get(length)
        if place is None:
            return None
        if k.shape[axis] != length or v.shape[axis] != length:
            joint = length > self._span(place).count  # text and image attend together, so this is not cross-attention
            self.left += joint and k.shape[axis] > length
            return None
        if place.skip == 0 and place.period == 1:
            return place
        number = self._seen[length] - place.skip
        self._seen[length] += 1
        if number >= 0 and number % place.period == 0:
            return place
        return None

    def _span(self, place: Place) -> Span:
        return Span(place.start, self.layout.frames, self.layout.grid)

    def _thin(self, tokens: Tensor, axis: int, place: Place) -> Tensor:
        if axis == 1 and tokens.ndim == 4:
            thinned = self._thin(tokens.flatten(2), axis, place)
            return thinned.reshape(*thinned.shape[:2], *tokens.shape[2:])
        return thin_span(tokens, self._span(place), self.target, self.method)

    def _thin_mask(self, mask: Tensor | None, length: int, place: Place) -> Tensor | None:
        if mask is None or mask.shape[-1] != length:  # broadcast over the keys
            return mask
        return thin_span_mask(mask, self._span(place), self.target, self.method)


class Guard:
    """Wraps another node's `optimized_attention_override` on a UNet: if it fails on downsampled attention, the error
    names it.

    `text` is the number of cross-attention tokens.
    """

    def __init__(self, override: Kernel, text: int):
        self.override, self.text = override, text

    def __call__(self, kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        axis = _axis(args, kwargs)
        thinned = k.shape[axis] != self.text and k.shape[axis] < q.shape[axis]
        if thinned:
            return _with_fewer_keys(self.override, kernel, q, k, v, *args, **kwargs)
        return self.override(kernel, q, k, v, *args, **kwargs)


def _axis(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """The axis of an attention call's tensors that counts tokens.

    The tensors are (B, heads, N, D), or (B, N, C), or (B, N, heads, D) as SD3 passes v.
    """
    if args[3] if len(args) > 3 else kwargs.get("skip_reshape", False):
        return 2
    return 1


def _with_fewer_keys(override: Kernel, kernel: Kernel, *args: Any, **kwargs: Any) -> Tensor:
    """Call an override with fewer keys than queries; if another node's override fails, the error names it."""
    foreign = override.previous if isinstance(override, TrainingKernel) else override
    if foreign is None:
        return override(kernel, *args, **kwargs)
    try:
        return override(kernel, *args, **kwargs)
    except (*_OF_THE_DEVICE, InferenceOnly):
        raise
    except (RuntimeError, ValueError, TypeError, AssertionError) as error:
        raise RuntimeError(
            f"the attention override {_name(foreign)} of another node failed in a model with token downsampling, where"
            f" self-attention has fewer keys than queries ({error}). A kernel that needs as many of both cannot be"
            " combined with Apply ToDo: take one of the two nodes off"
        ) from error


def _name(function: Any) -> str:
    return getattr(function, "__qualname__", type(function).__name__)
