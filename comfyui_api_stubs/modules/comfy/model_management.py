"""Devices, number types, which models are loaded, and interruption (ComfyUI's `comfy.model_management`).

The embedded host loads models whole: it unloads others to make room, and never splits one between device and host
memory.
"""

# mypy: disable-error-code="import-untyped, import-not-found"
# psutil need not be there, and its types are a package of their own.

import enum
import gc
import importlib.util
import logging
import os
import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch

from comfy.cli_args import args


class VRAMState(enum.Enum):
    """How device memory is used."""

    DISABLED = 0
    NO_VRAM = 1
    LOW_VRAM = 2
    NORMAL_VRAM = 3
    HIGH_VRAM = 4
    SHARED = 5


class CPUState(enum.Enum):
    """Which kind of device computes."""

    GPU = 0
    CPU = 1
    MPS = 2


in_training = False  # set by trainers while they need gradients, as in ComfyUI


def get_torch_device():
    """The device that models run on: CUDA, MPS or the CPU."""
    if not args.cpu and torch.cuda.is_available():
        return torch.device(torch.cuda.current_device())
    if not args.cpu and torch.backends.mps.is_available():
        return torch.device("mps")
    return torch.device("cpu")


def is_device_type(device, type):
    """Whether the device is of a type."""
    return getattr(device, "type", None) == type


def is_device_cpu(device):
    """Whether it is the CPU."""
    return is_device_type(device, "cpu")


def is_device_mps(device):
    """Whether it is Apple's GPU."""
    return is_device_type(device, "mps")


def is_device_cuda(device):
    """Whether it is a CUDA GPU."""
    return is_device_type(device, "cuda")


def cpu_mode():
    """Whether models run on the CPU."""
    return is_device_cpu(get_torch_device())


def mps_mode():
    """Whether models run on Apple's GPU."""
    return is_device_mps(get_torch_device())


if TYPE_CHECKING:
    cpu_state: CPUState
    vram_state: VRAMState
else:

    def __getattr__(name):
        """`cpu_state` and `vram_state` follow the device."""
        kind = get_torch_device().type if name in ("cpu_state", "vram_state") else None
        if name == "cpu_state":
            return {"cpu": CPUState.CPU, "mps": CPUState.MPS}.get(kind, CPUState.GPU)
        if name == "vram_state":
            return {"cpu": VRAMState.DISABLED, "mps": VRAMState.SHARED}.get(kind, VRAMState.NORMAL_VRAM)
        raise AttributeError(f"the embedded host's comfy.model_management has no {name!r}; it may need a real ComfyUI")


def get_torch_device_name(device):
    """A device in words."""
    return (
        f"{device} {torch.cuda.get_device_name(device)}"
        if is_device_cuda(device)
        else getattr(device, "type", str(device))
    )


def _host_memory():
    """(total, available) bytes of host memory."""
    if importlib.util.find_spec("psutil") is not None:
        import psutil

        memory = psutil.virtual_memory()
        return memory.total, memory.available
    if os.path.exists("/proc/meminfo"):
        with open("/proc/meminfo", encoding="ascii") as file:
            fields = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in file}
        return fields["MemTotal"], fields["MemAvailable"]
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return total, total // 2
    return 8 * 2**30, 4 * 2**30  # Windows without psutil: an assumption, used for batching decisions only


def get_total_memory(dev=None, torch_total_too=False):
    """Bytes of memory of a device."""
    dev = get_torch_device() if dev is None else dev
    total = torch.cuda.mem_get_info(dev)[1] if is_device_cuda(dev) else _host_memory()[0]
    return (total, total) if torch_total_too else total


def get_free_memory(dev=None, torch_free_too=False):
    """Bytes that can still be allocated on a device; with torch_free_too also how many of them torch already holds."""
    dev = get_torch_device() if dev is None else dev
    if is_device_cuda(dev):
        held = torch.cuda.memory_reserved(dev) - torch.cuda.memory_allocated(dev)
        free = torch.cuda.mem_get_info(dev)[0] + held
    else:
        free = held = _host_memory()[1]
    return (free, held) if torch_free_too else free


def extra_reserved_memory():
    """Bytes left to other programs."""
    return 400 * 2**20 if args.reserve_vram is None else args.reserve_vram * 2**30


def minimum_inference_memory():
    """Bytes kept free for activations."""
    return 0.8 * 2**30 + extra_reserved_memory()


def dtype_size(dtype):
    """Bytes of one element."""
    return dtype.itemsize


def module_size(module):
    """Bytes of a module's state dict."""
    return sum(tensor.nelement() * tensor.element_size() for tensor in module.state_dict().values())


def should_use_fp16(device=None, model_params=0, prioritize_performance=True, manual_cast=False):
    """Whether float16 is fast and right on a device."""
    device = get_torch_device() if device is None else device
    if is_device_cpu(device) or args.force_fp32:
        return False
    return is_device_mps(device) or torch.cuda.get_device_capability(device) >= (7, 0)


def should_use_bf16(device=None, model_params=0, prioritize_performance=True, manual_cast=False):
    """Whether bfloat16 is fast on a device."""
    device = get_torch_device() if device is None else device
    if is_device_cpu(device) or args.force_fp32:
        return False
    return is_device_mps(device) or torch.cuda.get_device_capability(device) >= (8, 0)


_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def unet_dtype(device=None, model_params=0, supported_dtypes=_FLOATS, weight_dtype=None):
    """The type a diffusion model's weights are stored in."""
    for flag, dtype in (("fp32_unet", torch.float32), ("bf16_unet", torch.bfloat16), ("fp16_unet", torch.float16)):
        if getattr(args, flag):
            return dtype
    for dtype in supported_dtypes:
        usable = {torch.float16: should_use_fp16, torch.bfloat16: should_use_bf16}.get(dtype)
        if usable is not None and usable(device, model_params=model_params):
            return dtype
    return torch.float32


def unet_manual_cast(weight_dtype, inference_device, supported_dtypes=_FLOATS):
    """The type to compute in when the device does not compute in the stored one; None when it does."""
    usable = {torch.float16: should_use_fp16(inference_device), torch.bfloat16: should_use_bf16(inference_device)}
    if weight_dtype in (torch.float32, torch.float64) or usable.get(weight_dtype, False):
        return None
    return next((dtype for dtype in supported_dtypes if usable.get(dtype, False)), torch.float32)


def unet_offload_device():
    """Where diffusion models wait."""
    return get_torch_device() if args.highvram or args.gpu_only else torch.device("cpu")


def text_encoder_offload_device():
    """Where text encoders wait."""
    return get_torch_device() if args.gpu_only else torch.device("cpu")


def text_encoder_device():
    """Where text encoders run."""
    return get_torch_device() if args.gpu_only or should_use_fp16(prioritize_performance=False) else torch.device("cpu")


def text_encoder_initial_device(load_device, offload_device, model_size=0):
    """Where a text encoder is built."""
    return offload_device


def text_encoder_dtype(device=None):
    """The type a text encoder's weights are stored in unless told otherwise."""
    if args.fp32_text_enc:
        return torch.float32
    return torch.bfloat16 if args.bf16_text_enc else torch.float16


def intermediate_device():
    """Where results between nodes live."""
    return get_torch_device() if args.gpu_only else torch.device("cpu")


def vae_dtype(device=None, allowed_dtypes=()):
    """The type a VAE computes in."""
    for dtype in allowed_dtypes:
        if {torch.float16: should_use_fp16, torch.bfloat16: should_use_bf16}.get(dtype, lambda _: False)(device):
            return dtype
    return torch.float32


def force_channels_last():
    """Whether models are kept channels-last."""
    return args.force_channels_last


def device_supports_non_blocking(device):
    """Whether copies to a device may be asynchronous."""
    return not (is_device_mps(device) or args.deterministic)


def cast_to(weight, dtype=None, device=None, non_blocking=False, copy=False, stream=None):
    """A tensor as type and on device; the same tensor when nothing changes and no copy is asked for."""
    return weight.to(device=device, dtype=dtype, non_blocking=non_blocking, copy=copy)


def cast_to_device(tensor, device, dtype, copy=False):
    """A tensor on a device as a type."""
    return cast_to(tensor, dtype=dtype, device=device, non_blocking=device_supports_non_blocking(device), copy=copy)


def pytorch_attention_flash_attention():
    """Whether PyTorch's attention needs no full attention matrix here, for memory estimates."""
    return not cpu_mode()


def soft_empty_cache(force=False):
    """Give cached device memory back."""
    if is_device_cuda(get_torch_device()):
        torch.cuda.empty_cache()
    elif mps_mode():
        torch.mps.empty_cache()


class LoadedModel:
    """A model on its device; holds its patcher weakly, and passes to the patcher's parent when the patcher goes."""

    def __init__(self, model):
        self._patcher_finalizer = None
        self._set_model(model)
        self.device = model.load_device
        self.real_model: Any = None  # once it is loaded a weakref of the model, and what follows the model's end
        self.currently_used = True
        self.model_finalizer: Any = None

    def _set_model(self, model):
        self._model = weakref.ref(model)
        if model.parent is not None:
            self._parent_model = weakref.ref(model.parent)
            self._patcher_finalizer = weakref.finalize(model, self._switch_parent)

    def _switch_parent(self):
        parent = self._parent_model()
        if parent is not None:
            self._set_model(parent)

    def __del__(self):
        if self._patcher_finalizer is not None:
            self._patcher_finalizer.detach()

    def __eq__(self, other):
        return self.model is other.model

    __hash__ = None  # type: ignore[assignment]  # how a class says that its objects have no hash

    @property
    def model(self):
        """The patcher, None when it is gone."""
        return self._model()

    def is_dead(self):
        """Whether the model outlived its patchers."""
        return self.real_model is not None and self.real_model() is not None and self.model is None

    def model_memory(self):
        """Bytes of the model."""
        return self.model.model_size()

    def model_offloaded_memory(self):
        """Bytes not on the device."""
        return self.model.model_size() - self.model.loaded_size()

    def model_memory_required(self, device):
        """Bytes that loading it takes."""
        return self.model_offloaded_memory() if device == self.model.current_loaded_device() else self.model_memory()

    def model_load(self, lowvram_model_memory=0, force_patch_weights=False):
        """Patch the model and put it on its device."""
        self.model.model_patches_to(self.device)
        self.model.model_patches_to(self.model.model_dtype())
        self.model_use_more_vram(lowvram_model_memory or 1e32, force_patch_weights=force_patch_weights)
        self.real_model = weakref.ref(self.model.model)
        self.model_finalizer = weakref.finalize(self.model.model, cleanup_models)
        return self.model.model

    def model_use_more_vram(self, extra_memory, force_patch_weights=False):
        """Load what is not loaded yet; returns the bytes that took."""
        return self.model.partially_load(self.device, extra_memory, force_patch_weights=force_patch_weights)

    def model_unload(self, memory_to_free=None, unpatch_weights=True):
        """Take the model off its device."""
        self.model.detach(unpatch_weights)
        if self.model_finalizer is not None:
            self.model_finalizer.detach()
        self.model_finalizer = self.real_model = None
        return True


current_loaded_models: list[LoadedModel] = []


def loaded_models(only_currently_used=False):
    """The patchers of loaded models."""
    return [loaded.model for loaded in current_loaded_models if loaded.currently_used or not only_currently_used]


def cleanup_models():
    """Forget models that are gone."""
    current_loaded_models[:] = [loaded for loaded in current_loaded_models if loaded.real_model() is not None]


def cleanup_models_gc():
    """Collect models that outlived their patchers."""
    if any(loaded.is_dead() for loaded in current_loaded_models):
        gc.collect()
        cleanup_models()
        for loaded in current_loaded_models:
            if loaded.is_dead():
                logging.warning(
                    "a loaded %s is still referenced though its patchers are gone", type(loaded.real_model()).__name__
                )


def free_memory(memory_required, device, keep_loaded=()):
    """Unload models of a device until that many bytes are free; returns them."""
    cleanup_models_gc()
    candidates = [m for m in current_loaded_models if m.device == device and m not in keep_loaded and not m.is_dead()]
    for loaded in candidates:
        loaded.currently_used = False
    unloaded = []
    for loaded in sorted(reversed(candidates), key=lambda m: m.model_memory()):
        if not args.disable_smart_memory and get_free_memory(device) > memory_required:
            break
        loaded.model_unload()
        unloaded.append(loaded)
    for loaded in unloaded:
        current_loaded_models[:] = [other for other in current_loaded_models if other is not loaded]
    if unloaded:
        soft_empty_cache()
    return unloaded


def load_models_gpu(
    models, memory_required=0, force_patch_weights=False, minimum_memory_required=None, force_full_load=False
):
    """Patch models and put them on their devices; a clone takes over from the clone that was loaded."""
    cleanup_models_gc()
    wanted = list(dict.fromkeys(m for model in models for m in (model, *model.model_patches_models())))
    to_load = []
    for patcher in wanted:
        fresh = LoadedModel(patcher)
        loaded = next((m for m in current_loaded_models if m == fresh), fresh)
        loaded.currently_used = True
        to_load.append(loaded)

    for loaded in to_load:
        for other in [m for m in current_loaded_models if loaded.model.is_clone(m.model)]:
            current_loaded_models[:] = [m for m in current_loaded_models if m is not other]
            other.model.detach(unpatch_all=False)
            other.model_finalizer.detach()

    room = max(minimum_inference_memory(), memory_required + extra_reserved_memory())
    for device in dict.fromkeys(m.device for m in to_load):
        if not is_device_cpu(device):
            free_memory(
                sum(m.model_memory_required(device) for m in to_load if m.device == device) * 1.1 + room, device
            )

    for loaded in to_load:
        loaded.model_load(force_patch_weights=force_patch_weights)
        current_loaded_models.insert(0, loaded)


def load_model_gpu(model):
    """Patch one model and put it on its device."""
    load_models_gpu([model])


def unload_all_models():
    """Take every model off the device."""
    free_memory(1e30, get_torch_device())


class InterruptProcessingException(Exception):
    """The user stopped the run."""


_interrupt_lock = threading.RLock()
_interrupt = False


def interrupt_current_processing(value=True):
    """Ask the run to stop, or take the request back."""
    global _interrupt
    with _interrupt_lock:
        _interrupt = value


def processing_interrupted():
    """Whether the run was asked to stop."""
    with _interrupt_lock:
        return _interrupt


def throw_exception_if_processing_interrupted():
    """Raise once when the run was asked to stop."""
    global _interrupt
    with _interrupt_lock:
        if _interrupt:
            _interrupt = False
            raise InterruptProcessingException
