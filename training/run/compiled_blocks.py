"""Blocks of a model under torch.compile while its loss is computed (`compile` of Optimizer Settings).

torch.compile gets the forward of each block's class, so blocks of one class and shape share one compilation. Gradient
checkpointing, offload and token routing stay around the compiled block. Attention is called from it as it is, and so is
what torch.compile cannot see through: a graph break.
"""

from __future__ import annotations

import functools
import operator
import os
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode

from ...patches.core.calls import around, has_other_forward
from ...patches.core.ledger import open_entry
from ...patches.token_downsampling.attention_override import OVERRIDE
from ...patches.token_downsampling.unet import TRAINING
from ...storage.printable import pip_install
from ..memory.checkpointing import blocks
from ..memory.saved_tensors import leave_modes

BACKEND = "inductor"
_COMPILERS = ("g++", "clang++", "cl")
_OFF = "set compile of Optimizer Settings to off"
_LIMITS = {  # of torch.compile's settings while blocks are compiled
    "recompile_limit": 256,
    "accumulated_recompile_limit": 4096,
    "fail_on_recompile_limit_hit": True,  # else a block would run uncompiled without a word
    "automatic_dynamic_shapes": False,  # what is compiled must not depend on which sizes came first
}
_OUT_OF_PLACE: dict[Any, Callable[..., Tensor]] = {
    operator.iadd: torch.add,
    operator.isub: torch.sub,
    operator.imul: torch.mul,
    operator.itruediv: torch.div,
}


# What ComfyUI's transformer_options tell patches of a block, and a place that no block has.
_FOR_PATCHES = ("block", "transformer_index", "uuids", "cond_or_uncond", "wrappers", "callbacks")
_NO_BLOCK = ("input", -1)


def compiled_parts(module: nn.Module) -> list[nn.Module]:
    """The modules that are compiled: blocks, and of a UNet's transformers the blocks inside, around which tokens may be
    routed.
    """
    parts: list[nn.Module] = []
    for block in blocks(module):
        inner = getattr(block, "transformer_blocks", None)
        parts += list(inner) if isinstance(inner, nn.ModuleList) else [block]
    return parts


def check_compiler(device: torch.device) -> None:
    """Raise ValueError when blocks cannot be compiled for a device here."""
    import torch._dynamo

    if not hasattr(torch._dynamo.config, "fail_on_recompile_limit_hit"):
        raise ValueError(
            f"Optimizer Settings: compile is blocks, and PyTorch {torch.__version__} is too old for it: update PyTorch,"
            " or set compile to off."
        )
    if BACKEND != "inductor":
        return
    if device.type == "cpu":
        names = (os.environ["CXX"],) if os.environ.get("CXX") else _COMPILERS
        if not any(map(shutil.which, names)):
            raise ValueError(
                f"Optimizer Settings: compile is blocks, and there is no C++ compiler ({', '.join(names)}): install one"
                " (on Debian and Ubuntu apt install g++; on Windows Visual Studio's Build Tools), or set compile to"
                " off."
            )
    elif device.type == "cuda" and not torch.utils._triton.has_triton():
        raise ValueError(
            "Optimizer Settings: compile is blocks, and Triton is not there, which compiles for the GPU:"
            f" {pip_install('triton-windows' if os.name == 'nt' else 'triton')}, or set compile to off."
        )


class BlockCompiler:
    """What was compiled for the blocks of models that see pictures of the same sizes, and how often.

    `graphs` counts compilations. With `sizes` more than one, what is compiled is for any size.
    """

    def __init__(self, dynamic: bool) -> None:
        self.dynamic, self.graphs = dynamic, 0
        self.compiled_for: set[Any] = set()  # runs whose first pass is done
        self._forwards: dict[Any, Callable[..., Any]] = {}

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        """torch.compile's backend."""
        from torch._dynamo.backends.registry import lookup_backend

        modes = _modes_outside()
        for node in graph.graph.nodes:
            if node.op == "call_function":
                node.target = _for_training(node.target, modes)
        graph.recompile()
        compiled: Callable[..., Any] = lookup_backend(BACKEND)(graph, inputs)
        self.graphs += 1  # behind the call: torch.compile may begin anew in it
        return compiled

    def forward(self, kind: type[nn.Module]) -> Callable[..., Any]:
        """The compiled forward of a class."""
        if kind not in self._forwards:
            self._forwards[kind] = torch.compile(kind.forward, backend=self, dynamic=self.dynamic)
        return self._forwards[kind]

    @contextmanager
    def install(self, module: nn.Module) -> Iterator[None]:
        """A context in which the blocks of a module run compiled wherever gradients are wanted."""
        with open_entry(module, "compiled blocks") as stack:
            stack.enter_context(_torch_settings())
            for block in compiled_parts(module):
                if has_other_forward(block):
                    raise ValueError(
                        f"{type(block).__name__} has another forward already, which another node has put there: take"
                        f" that node off the model, or {_OFF}."
                    )
                stack.enter_context(around(block, "compiled", self._call))
            yield

    def _call(self, block: nn.Module, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return inner(*args, **kwargs)
        compiled = self.forward(type(block))
        with leave_modes(), _outside_modes():
            return compiled(
                block,
                *map(_argument_for_compiler, args),
                **{name: _argument_for_compiler(one) for name, one in kwargs.items()},
            )


@functools.lru_cache(maxsize=4)
def compiler_for(kind: str, sizes: tuple[tuple[int, ...], ...]) -> BlockCompiler:
    """What is compiled for models of a class on batches of these sizes; the next call of a run finds it again.

    Another order of sizes, or others, would give code that rounds otherwise: those have their own.
    """
    return BlockCompiler(dynamic=len(sizes) > 1)


@contextmanager
def _torch_settings() -> Iterator[None]:
    import torch._dynamo
    import torch._functorch.config
    import torch._inductor.config

    # Inductor's stored graphs may be from another size, whose code rounds otherwise. Compiled C++ is still found again.
    with (
        torch._dynamo.config.patch(_LIMITS),
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        yield


# --- what torch.compile sees ------------------------------------------------------------------------------------------

_here = threading.local()  # the function modes that a compiled block of this thread runs outside of


def _modes_outside() -> Sequence[TorchFunctionMode]:
    return getattr(_here, "modes", ())


@contextmanager
def _outside_modes() -> Iterator[None]:
    """A context without function modes: torch.compile could not see through those that read the caller's bytecode. What
    they do happens in the graph (`_for_training`), and where the graph breaks.
    """
    modes, before = list(_get_current_function_mode_stack()), _modes_outside()
    for _ in modes:
        _pop_mode()
    _here.modes = modes
    try:
        yield
    finally:
        _here.modes = before
        for mode in modes:
            _push_mode(mode)


@contextmanager
def _inside_modes(modes: Sequence[TorchFunctionMode]) -> Iterator[None]:
    for mode in modes:
        _push_mode(mode)
    try:
        yield
    finally:
        for _ in modes:
            _pop_mode()


def _for_training(target: Any, modes: Sequence[TorchFunctionMode]) -> Any:
    """A graph's operation as it is computed for gradients: `x += y` makes a new tensor, and an operation of a library
    runs in the function modes of the block.
    """
    if target in _OUT_OF_PLACE:
        return _rename(_make_assigning(target), target.__name__)
    if isinstance(target, torch._ops.OpOverload | torch._ops.OpOverloadPacket) and not str(target).startswith("aten."):
        return _rename(_run_in_modes(target, modes), "library_operation")
    return target


def _rename(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    function.__name__ = f"graft_{name}"  # graphs are written down with it
    return function


def _make_assigning(in_place: Any) -> Callable[..., Any]:
    out_of_place = _OUT_OF_PLACE[in_place]

    def compute(target: Any, other: Any) -> Any:
        if any(isinstance(value, Tensor) and value.requires_grad for value in (target, other)):
            return out_of_place(target, other).to(target.dtype)
        return in_place(target, other)

    return compute


def _run_in_modes(target: Callable[..., Any], modes: Sequence[TorchFunctionMode]) -> Callable[..., Any]:
    def compute(*args: Any, **kwargs: Any) -> Any:
        with _inside_modes(modes):
            return target(*args, **kwargs)

    return compute


class _AsItIs:
    """A function of another node, or of a patch, that torch.compile does not look into."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    @torch.compiler.disable
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with _inside_modes(_modes_outside()):
            return self.function(*args, **kwargs)


def _argument_for_compiler(value: Any) -> Any:
    """An argument of a block as torch.compile sees it: ComfyUI's transformer_options without what changes from step to
    step or block to block and only patches read. Attention stays a function that it does not look into: which kernel
    computes, and on which tokens, is decided at each call.
    """
    if not isinstance(value, dict) or "sigmas" not in value:
        return value
    options = {name: one for name, one in value.items() if name != TRAINING}
    if not options.get("patches") and not options.get("patches_replace"):
        options = {name: one for name, one in options.items() if name not in _FOR_PATCHES} | {"block": _NO_BLOCK}
    if options.get(OVERRIDE) is not None:
        options[OVERRIDE] = _AsItIs(options[OVERRIDE])
    return options


# --- what there is to say ---------------------------------------------------------------------------------------------


def graph_breaks() -> Counter[str]:
    """How often torch.compile has broken a graph in this process, by its reason."""
    from torch._dynamo.utils import counters

    return Counter({str(reason).strip().partition("\n")[0]: count for reason, count in counters["graph_break"].items()})


def kinds(module: nn.Module) -> Mapping[str, int]:
    """How many blocks of each class a module has."""
    return Counter(type(block).__name__ for block in compiled_parts(module))
