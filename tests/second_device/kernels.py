"""The second device's kernels: any operation is computed by the CPU's kernel on the same memory."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from .memory import CPU, NAME, block_of, is_on_device, is_pinned, on_device, on_host, pin
from .meter import meter
from .streams import begin_download, begin_upload, current_stream, host_waits, settle
from .torch_module import SecondModule, device_of

_aten = torch.ops.aten
_CPU_KERNELS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)  # of operations that do not touch memory

# CUDA's kernels of these tell the host something, usually a size: the host waits.
_WAITING = {
    "aten::nonzero",
    "aten::masked_select",
    "aten::equal",
    "aten::_unique",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::unique_consecutive",
    "aten::repeat_interleave",
}
_TAKES_CPU_INDICES = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}


class MixedDevices(RuntimeError):
    """An operation was given tensors of both devices."""


# --- any operation ----------------------------------------------------------------------------------------------------


class _Signature:
    """What an operation's schema says."""

    def __init__(self, op: Any) -> None:
        arguments = op._schema.arguments
        self.name = op._schema.name
        self.waits = self.name in _WAITING
        self.takes_cpu_indices = self.name in _TAKES_CPU_INDICES
        self.takes_numbers = torch._C._should_allow_numbers_as_tensors(self.name.partition("::")[2])
        self.draws = any(argument.name == "generator" for argument in arguments)
        self.tensors = {argument.name for argument in arguments if str(argument.type) == "Tensor"}
        self.names = [argument.name for argument in arguments]
        self.writes = [argument.alias_info is not None and argument.alias_info.is_write for argument in arguments]
        self.writes_named = dict(zip(self.names, self.writes, strict=True))

    def with_tensors(self, args: Any) -> Any:
        """The arguments with numbers as tensors again, which torch has made numbers; few operations take those."""
        if self.takes_numbers:
            return args
        return [_as_tensor(value, name in self.tensors) for name, value in zip(self.names, args, strict=False)]


_signature = cache(_Signature)


def _as_tensor(value: Any, is_tensor: bool) -> Any:
    if is_tensor and isinstance(value, (bool, int, float, complex)):
        return torch.tensor(value)
    return value


def compute(op: Any, *args: Any, **kwargs: Any) -> Any:
    """An operation on the tensors' numbers; its results are on the device."""
    signature = _signature(op)
    if signature.draws:
        kwargs = _with_generator(args, kwargs)
    args = signature.with_tensors(args)
    operands = _Operands(op)
    host_args = [
        operands.lowered(value, writes) for value, writes in zip(args, signature.writes[: len(args)], strict=True)
    ]
    host_kwargs = {name: operands.lowered(value, signature.writes_named[name]) for name, value in kwargs.items()}
    host_kwargs.pop("pin_memory", None)
    if not signature.takes_cpu_indices:
        operands.refuse_mixed()
    if signature.waits:
        meter.waited(signature.name)
        host_waits(current_stream().position())
    if signature.name == "aten::_index_put_impl_":
        _note_indices(args[1])
    operands.note_uses()
    return operands.raised(op(*host_args, **host_kwargs))


class _Operands:
    """The tensors that an operation was given, and the CPU tensors over the same memory that stand for them."""

    def __init__(self, op: Any) -> None:
        self.op = op
        self.sources: dict[int, tuple[Tensor, Tensor]] = {}  # (CPU tensor, the device's) by the id of the first
        self.foreign: list[Tensor] = []
        self.uses: list[tuple[Tensor, bool]] = []

    def lowered(self, value: Any, is_written: bool) -> Any:
        """What the CPU's kernel gets for an argument."""
        if isinstance(value, Tensor):
            return self._lowered_tensor(value, is_written)
        if isinstance(value, (list, tuple)):
            return [self.lowered(part, is_written) for part in value]
        if isinstance(value, torch.device):
            return CPU
        return value

    def _lowered_tensor(self, tensor: Tensor, is_written: bool) -> Tensor:
        if tensor.device.type == NAME:
            host = on_host(tensor)
            self.sources[id(host)] = host, tensor
            self.uses.append((tensor, is_written))
            return host
        if tensor.device.type == "cpu" and tensor.dim():
            self.foreign.append(tensor)
        return tensor

    def refuse_mixed(self) -> None:
        if self.foreign:
            shapes = ", ".join(f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in self.foreign)
            raise MixedDevices(f"{self.op}: {shapes} of the CPU among tensors of the second device")

    def note_uses(self) -> None:
        """Check the order in which streams use the memory of the tensors."""
        mark = current_stream().queue()
        for tensor, is_written in self.uses:
            _note_use(mark, tensor, is_written, self.op)

    def raised(self, value: Any) -> Any:
        """A result on the device: the input that was written, a view of an input, or a new tensor."""
        if isinstance(value, (list, tuple)):
            return type(value)([self.raised(part) for part in value])
        if not isinstance(value, Tensor):
            return value
        if id(value) in self.sources:
            source = self.sources[id(value)][1]
            if source.shape != value.shape:
                _resize(self.op, source, value)
            return source
        for host, source in self.sources.values():
            if _share_memory(host, value):
                return _view(source, value)
        return on_device(value)


def _note_use(mark: Any, tensor: Tensor, is_written: bool, what: object) -> None:
    if not tensor.untyped_storage().nbytes():
        return
    uses = block_of(tensor).uses
    if is_written:
        uses.wrote(mark, what)
    else:
        uses.read(mark, what)


def _resize(op: Any, tensor: Tensor, host: Tensor) -> None:
    """Give a tensor the size of its result: of its own memory, or where it is empty (as `out`), of the result's."""
    if not tensor.numel():
        storage, offset = on_device(host).untyped_storage(), 0
    elif host.numel() <= tensor.numel():
        storage, offset = tensor.untyped_storage(), tensor.storage_offset()
    else:
        raise NotImplementedError(f"{op} enlarges its input, which the second device cannot")
    _aten.set_.source_Storage_storage_offset.redispatch(
        _CPU_KERNELS, tensor, storage, offset, host.shape, host.stride()
    )


def _share_memory(tensor: Tensor, other: Tensor) -> bool:
    return bool(other.numel()) and tensor.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _view(source: Tensor, host: Tensor) -> Tensor:
    """The view of a tensor's memory that a CPU tensor is."""
    offset = host.storage_offset() - block_of(source).first // host.element_size()
    return _aten.as_strided.default.redispatch(_CPU_KERNELS, source, host.shape, host.stride(), offset)


def _with_generator(args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Random operations draw from the device's own generator, unless they are given one; one of the CPU is refused."""
    given = [value for value in (*args, *kwargs.values()) if isinstance(value, torch._C.Generator)]
    for generator in given:
        device = device_of(generator)
        if device.type != NAME:
            raise RuntimeError(f"Expected a '{NAME}' device type for generator but found '{device.type}'")
    if given:
        return kwargs
    return {**kwargs, "generator": SecondModule.default_generators[0]}


def _note_indices(indices: Any) -> None:
    """What CUDA does with indices: those of the CPU are copied over, and masks become numbers, whose count is read."""
    for index in indices:
        if isinstance(index, Tensor) and not is_on_device(index):
            _upload(index, False)
        elif isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8):
            meter.waited("boolean indexing")
            host_waits(current_stream().position())


# --- memory, and what crosses -----------------------------------------------------------------------------------------


def _empty(size: Any, *, dtype: Any = None, memory_format: Any = None, **_: Any) -> Tensor:
    dtype = dtype or torch.get_default_dtype()
    return on_device(torch.empty(tuple(size), dtype=dtype, memory_format=memory_format or torch.contiguous_format))


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> Tensor:
    return on_device(torch.empty_strided(tuple(size), tuple(stride), dtype=dtype or torch.get_default_dtype()))


def _empty_like(tensor: Tensor, *, device: Any = None, pin_memory: Any = None, **options: Any) -> Tensor:
    if pin_memory:
        return pin(_aten.empty_like.default(on_host(tensor), **options))
    return _aten.empty_like.default.redispatch(_CPU_KERNELS, tensor, device=device, **options)


def _to_copy(tensor: Tensor, *, device: Any = None, non_blocking: bool = False, **options: Any) -> Tensor:
    """As torch's own, which pins the memory of a copy to the host that is not waited for."""
    if non_blocking and device is not None and torch.device(device) == CPU:
        options.pop("pin_memory", None)
        target = pin(torch.empty(tensor.shape, dtype=options.get("dtype") or tensor.dtype))
        return target.copy_(tensor, non_blocking=True)
    options |= {"device": device, "non_blocking": non_blocking}
    return _aten._to_copy.default.redispatch(_CPU_KERNELS, tensor, **options)


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    """Every copy into, out of and within the device."""
    mark = current_stream().queue()
    for tensor, is_written in ((source, False), (target, True)):
        if is_on_device(tensor):
            _note_use(mark, tensor, is_written, "a copy")
    if not is_on_device(target):
        _download(source, target, non_blocking)
        return target
    if not is_on_device(source):
        _upload(source, non_blocking)
        on_host(target).copy_(source)
    else:
        on_host(target).copy_(on_host(source))
    return target


def _download(source: Tensor, target: Tensor, non_blocking: bool) -> None:
    meter.downloaded += source.numel() * source.element_size()
    contents = on_host(source).to(target.dtype).expand(target.shape)
    if non_blocking and is_pinned(target):
        begin_download(target, contents)
        return
    meter.waited("copy to the host")
    host_waits(current_stream().position())
    target.copy_(contents)


def _upload(source: Tensor, non_blocking: bool) -> None:
    meter.uploaded += source.numel() * source.element_size()
    if is_pinned(source):
        settle(source)
        if non_blocking:
            begin_upload(source)
    if not non_blocking:
        meter.blocked("copy to the device")
        host_waits(current_stream().position())


def _local_scalar_dense(tensor: Tensor) -> Any:
    meter.waited("item")
    block_of(tensor).uses.read(current_stream().queue(), "item")
    host_waits(current_stream().position())
    return on_host(tensor).item()


def _set(tensor: Tensor, source: Any, *where: Any) -> Tensor:
    """Let a tensor be a view of a storage."""
    overload = _aten.set_.source_Storage_storage_offset if where else _aten.set_.source_Storage
    return overload.redispatch(_CPU_KERNELS, tensor, source, *where)


# --- attention --------------------------------------------------------------------------------------------------------


def _any_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None = None,
    dropout: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention that keeps no weights for the backward pass, where the CPU has such a kernel; torch asks for one only
    on devices that it knows.
    """
    given = query, key, value, bias
    has_fused = all(tensor is None or is_on_device(tensor) for tensor in given)
    if has_fused:
        hosts = [tensor if tensor is None else on_host(tensor) for tensor in given]
        has_fused = torch._fused_sdp_choice(*hosts, dropout, is_causal, scale=scale, enable_gqa=enable_gqa) != 0
    if has_fused and (bias is None or not bias.requires_grad):
        return _aten._scaled_dot_product_fused_attention_overrideable(
            *given, dropout_p=dropout, is_causal=is_causal, scale=scale
        )[0]
    return _aten._scaled_dot_product_attention_math(
        *given, dropout_p=dropout, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None = None,
    dropout: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """Fused attention: the result and what its gradient needs."""
    out, logarithms = compute(
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        query,
        key,
        value,
        dropout,
        is_causal,
        attn_mask=bias,
        scale=scale,
    )
    nothing = torch.empty(0)
    return out, logarithms, nothing, nothing, query.shape[2], key.shape[2], nothing, nothing, nothing


def _attention_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    needed: list[bool],
    out: Tensor,
    logarithms: Tensor,
    *more: Any,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """The gradients of query, key and value; a bias gets none."""
    _, _, _, _, dropout, is_causal, _, _ = more
    found = compute(
        _aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
        gradient,
        query,
        key,
        value,
        out,
        logarithms,
        dropout,
        is_causal,
        attn_mask=bias,
        scale=scale,
    )
    return *found, None


# --- making it known --------------------------------------------------------------------------------------------------

_OWN = {
    "empty.memory_format": _empty,
    "empty_strided": _empty_strided,
    "empty_like": _empty_like,
    "_to_copy": _to_copy,
    "_copy_from": _copy_from,
    "_local_scalar_dense": _local_scalar_dense,
    "set_.source_Storage": _set,
    "set_.source_Storage_storage_offset": _set,
    "_scaled_dot_product_fused_attention_overrideable": _attention,
    "_scaled_dot_product_fused_attention_overrideable_backward": _attention_backward,
}
# Torch's own way from these to smaller operations ends in kernels that an extension has to bring.
_WHOLE = ("convolution", "convolution_backward", "native_group_norm", "native_layer_norm")


def register() -> list[Any]:
    """Make the device and its kernels known to torch; they last as long as the libraries that this returns."""
    torch.utils.backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=SecondModule())
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(compute, "PrivateUse1")
    aten = torch.library.Library("aten", "IMPL")
    for name, kernel in _OWN.items():
        aten.impl(name, kernel, "PrivateUse1")
    for name in _WHOLE:
        aten.impl(name, partial(compute, getattr(_aten, name).default), "PrivateUse1")
    for key in ("PrivateUse1", "AutogradPrivateUse1"):
        aten.impl("scaled_dot_product_attention", _any_attention, key)
    return [everything, aten]
