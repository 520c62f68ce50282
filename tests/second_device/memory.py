"""Tensors of the second device: plain torch tensors with storages of their own, which lie in the CPU's memory.

They are made through DLPack, which can name a pointer of any device.
"""

from __future__ import annotations

import ctypes
from typing import Any
from weakref import WeakValueDictionary, finalize

import torch
from torch import Tensor

from .meter import meter
from .streams import OutOfOrder, Uses, current_stream, is_uploading

NAME = "second"
CPU = torch.device("cpu")

# --- DLPack's structures ----------------------------------------------------------------------------------------------

_EXTENSION = 12  # kDLExtDev, which torch reads as the device of an extension
_CODES = {
    torch.bool: 6,
    torch.uint8: 1,
    torch.int8: 0,
    torch.int16: 0,
    torch.int32: 0,
    torch.int64: 0,
    torch.float16: 2,
    torch.float32: 2,
    torch.float64: 2,
    torch.bfloat16: 4,
    torch.complex64: 5,
    torch.complex128: 5,
}


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _DLManagedTensor(ctypes.Structure):
    _fields_ = (("tensor", _DLTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_CAPSULE_NAME = ctypes.c_char_p(b"dltensor")
_allocate = ctypes.pythonapi.PyMem_RawMalloc
_allocate.restype = ctypes.c_void_p
_allocate.argtypes = [ctypes.c_size_t]
_FREE = ctypes.cast(ctypes.pythonapi.PyMem_RawFree, ctypes.c_void_p)  # torch frees the structure, at any time


def _tensor_at(owner: Tensor, code: int) -> Tensor:
    """A tensor of the device at the address of a CPU tensor."""
    lengths = ctypes.c_int64 * owner.dim()
    address = _allocate(ctypes.sizeof(_DLManagedTensor))
    structure = _DLManagedTensor.from_address(address)
    structure.context, structure.deleter = None, _FREE
    structure.tensor = _DLTensor(
        data=owner.data_ptr(),
        device_type=_EXTENSION,
        device_id=0,
        ndim=owner.dim(),
        code=code,
        bits=owner.element_size() * 8,
        lanes=1,
        shape=lengths(*owner.shape),
        strides=lengths(*owner.stride()),
        byte_offset=0,
    )
    return torch._C._from_dlpack(_new_capsule(address, _CAPSULE_NAME, None))


# --- memory -----------------------------------------------------------------------------------------------------------


class Block:
    """One piece of the device's memory: the CPU's storage that owns it, and how it is used."""

    def __init__(self, owner: Tensor) -> None:
        self.storage = owner.untyped_storage()
        self.first = owner.storage_offset() * owner.element_size()
        self.size = self.storage.nbytes()
        self.stream = current_stream()  # whose pool it is taken from, and goes back to
        self.uses = Uses(self.stream.freed)
        meter.take(self.size)


_block_at: dict[int, Block] = {}  # by the address of their memory


def _freed(address: int, block: Block) -> None:
    """Torch has freed the storage."""
    if _block_at.get(address) is block:
        del _block_at[address]
    block.stream.take_back(block.uses)
    meter.give_back(block.size)


def on_device(owner: Tensor) -> Tensor:
    """A tensor of the device over the memory of a CPU tensor, which nothing else may use from now on."""
    if owner.dtype == torch.float64 and meter.lacks_float64:
        raise TypeError("The second device has no float64.")
    code = _CODES.get(owner.dtype)
    if code is None:  # types that DLPack does not know
        return on_device(owner.view(torch.uint8)).view(owner.dtype)
    block = Block(owner)
    tensor = _tensor_at(owner, code)
    _block_at[owner.data_ptr()] = block
    finalize(tensor.untyped_storage(), _freed, owner.data_ptr(), block).atexit = False
    return tensor


def is_on_device(value: Any) -> bool:
    """Whether a value is a tensor of the second device."""
    return isinstance(value, Tensor) and value.device.type == NAME


def block_of(tensor: Tensor) -> Block:
    """The memory of a tensor of the device."""
    return _block_at[tensor.untyped_storage().data_ptr()]


def on_host(tensor: Tensor) -> Tensor:
    """The CPU tensor over the memory of a tensor of the device."""
    storage = tensor.untyped_storage()
    if not storage.nbytes():
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    block = _block_at[storage.data_ptr()]
    offset = block.first // tensor.element_size() + tensor.storage_offset()
    view = torch.empty(0, dtype=tensor.dtype)
    return view.set_(block.storage, offset, tensor.shape, tensor.stride())


# --- pinned memory ----------------------------------------------------------------------------------------------------

_pinned: WeakValueDictionary[int, Any] = WeakValueDictionary()


def pin(tensor: Tensor) -> Tensor:
    """Call the memory of a CPU tensor pinned, which takes a power of two of it; it is refused above
    `Runtime.registered_limit`, with CUDA's words.
    """
    if tensor.numel():
        storage = tensor.untyped_storage()
        if pinned_bytes() + _rounded(storage) > Runtime.registered_limit:
            raise RuntimeError("CUDA error: out of memory")
        _pinned[storage.data_ptr()] = storage
    return tensor


def pinned_bytes() -> int:
    """What is pinned in all."""
    return sum(map(_rounded, _pinned.values())) + sum(registered.values())


def _rounded(storage: torch.UntypedStorage) -> int:
    return 1 << (storage.nbytes() - 1).bit_length()


def is_pinned(tensor: Tensor) -> bool:
    """Whether a CPU tensor is in pinned memory."""
    if tensor.device != CPU:
        return False
    return tensor.untyped_storage().data_ptr() in _pinned or _is_registered(tensor.data_ptr())


def _is_registered(address: int) -> bool:
    return any(first <= address < first + size for first, size in registered.items())


class Runtime:
    """Memory that is pinned where it lies, as `torch.cuda.cudart()` does it; returns CUDA's error codes."""

    @staticmethod
    def cudaHostRegister(address: int, size: int, flags: int) -> int:
        """Pin memory; it is refused above `registered_limit`."""
        if any(first < address + size and address < first + length for first, length in registered.items()):
            return 712  # cudaErrorHostMemoryAlreadyRegistered
        if pinned_bytes() + size > Runtime.registered_limit:
            return 2  # cudaErrorMemoryAllocation
        registered[address] = size
        return 0

    @staticmethod
    def cudaHostUnregister(address: int) -> int:
        """No longer pin memory."""
        if address not in registered:
            return 713  # cudaErrorHostMemoryNotRegistered
        size = registered.pop(address)
        if is_uploading(address, size):
            raise OutOfOrder("memory is pinned no longer before its copy to the device had ended")
        return 0

    registered_limit = 1 << 62


registered: dict[int, int] = {}  # the size of what is pinned where it lies, by its address
