"""A model with its patches, options and injections; clones share the model (ComfyUI's `comfy.model_patcher`)."""

import collections
import contextlib
import copy
import inspect
import logging
import uuid
from typing import Any

import torch

import comfy.float
import comfy.hooks
import comfy.lora
import comfy.model_management
import comfy.patcher_extension
import comfy.utils
from comfy.patcher_extension import CallbacksMP, PatcherInjection, WrappersMP

Backup = collections.namedtuple("Backup", ["weight", "inplace_update"])


def set_model_options_patch_replace(model_options, patch, name, block_name, number, transformer_index=None):
    """Replace an attention of one block; the options' dicts on the way are copied, not changed."""
    block = (block_name, number) if transformer_index is None else (block_name, number, transformer_index)
    options = dict(model_options["transformer_options"])
    replace = dict(options.get("patches_replace", {}))
    replace[name] = {**replace.get(name, {}), block: patch}
    options["patches_replace"] = replace
    model_options["transformer_options"] = options
    return model_options


def _append_cfg_function(model_options, name, function, disable_cfg1_optimization):
    model_options[name] = [*model_options.get(name, []), function]
    if disable_cfg1_optimization:
        model_options["disable_cfg1_optimization"] = True
    return model_options


def set_model_options_post_cfg_function(model_options, post_cfg_function, disable_cfg1_optimization=False):
    """Add a function that changes the result of classifier-free guidance."""
    return _append_cfg_function(
        model_options, "sampler_post_cfg_function", post_cfg_function, disable_cfg1_optimization
    )


def create_model_options_clone(orig_model_options: dict):
    """Options whose dicts and lists are copies."""
    return comfy.patcher_extension.copy_nested_dicts(orig_model_options)


class ModelPatcher:
    """Patches, options and injections for a model; loading applies them, unloading takes them off."""

    def __init__(self, model, load_device, offload_device, size=0, weight_inplace_update=False):
        self.model, self.size = model, size
        self.load_device, self.offload_device = load_device, offload_device
        self.weight_inplace_update = weight_inplace_update
        if getattr(model, "device", None) is None:
            model.device = offload_device
        self.patches, self.backup = {}, {}
        self.object_patches, self.object_patches_backup = {}, {}
        self.weight_wrapper_patches = {}
        self.model_options: dict[str, Any] = {"transformer_options": {}}
        self.model_size()
        self.force_cast_weights = False
        self.patches_uuid, self.parent = uuid.uuid4(), None
        self.attachments, self.additional_models = {}, {}
        self.callbacks, self.wrappers = CallbacksMP.init_callbacks(), WrappersMP.init_wrappers()
        self.is_injected, self.skip_injection, self.injections = False, False, {}
        self.hook_patches, self.hook_patches_backup, self.hook_backup, self.cached_hook_patches = {}, None, {}, {}
        self.current_hooks = self.forced_hooks = None
        self.is_clip, self.hook_mode = False, comfy.hooks.EnumHookMode.MaxSpeed
        for name, value in (
            ("model_loaded_weight_memory", 0),
            ("lowvram_patch_counter", 0),
            ("model_lowvram", False),
            ("current_weight_patches_uuid", None),
        ):
            if not hasattr(model, name):
                setattr(model, name, value)

    def __del__(self):
        if "hook_mode" in self.__dict__:  # a half-built patcher has nothing to detach
            self.detach(unpatch_all=False)

    # --- clones -------------------------------------------------------------------------------------------------------

    def clone(self):
        """A patcher of the same model with copies of the patches and options; it shares the backup of the model's
        weights.
        """
        n = type(self)(
            self.model,
            self.load_device,
            self.offload_device,
            self.size,
            weight_inplace_update=self.weight_inplace_update,
        )
        n.parent, n.patches_uuid = self, self.patches_uuid
        n.backup, n.object_patches_backup, n.hook_backup = self.backup, self.object_patches_backup, self.hook_backup
        n.patches = {key: list(patches) for key, patches in self.patches.items()}
        n.object_patches, n.weight_wrapper_patches = dict(self.object_patches), dict(self.weight_wrapper_patches)
        # ComfyUI 0.3.64 deep-copies the options (later versions only their dicts and lists): patches must bear it
        n.model_options = copy.deepcopy(self.model_options)
        n.force_cast_weights = self.force_cast_weights
        n.attachments = {
            key: value.on_model_patcher_clone() if hasattr(value, "on_model_patcher_clone") else value
            for key, value in self.attachments.items()
        }
        n.additional_models = {
            key: [model.clone() for model in models] for key, models in self.additional_models.items()
        }
        n.callbacks = comfy.patcher_extension.copy_nested_dicts(self.callbacks)
        n.wrappers = comfy.patcher_extension.copy_nested_dicts(self.wrappers)
        n.is_injected, n.skip_injection = self.is_injected, self.skip_injection
        n.injections = {key: list(injections) for key, injections in self.injections.items()}
        n.current_hooks, n.forced_hooks = self.current_hooks, self.forced_hooks
        n.is_clip, n.hook_mode = self.is_clip, self.hook_mode
        for callback in self.get_all_callbacks(CallbacksMP.ON_CLONE):
            callback(self, n)
        return n

    def is_clone(self, other):
        """Whether both patch the same model."""
        return self.model is getattr(other, "model", None)

    def clone_has_same_weights(self, clone: "ModelPatcher"):
        """Whether a clone loads to the same model state."""
        if not self.is_clone(clone):
            return False
        for name in ("attachments", "additional_models", "injections"):
            if getattr(self, name).keys() != getattr(clone, name).keys():
                return False
        for name in ("callbacks", "wrappers"):
            mine, theirs = getattr(self, name), getattr(clone, name)
            if any(len(items) != len(theirs.get(kind, ())) for kind, items in mine.items()):
                return False
        return (not self.patches and not clone.patches) or self.patches_uuid == clone.patches_uuid

    # --- options ------------------------------------------------------------------------------------------------------

    def set_model_sampler_cfg_function(self, sampler_cfg_function, disable_cfg1_optimization=False):
        """Replace classifier-free guidance; a function of three arguments is called with (cond, uncond, scale)."""
        function = sampler_cfg_function
        if len(inspect.signature(function).parameters) == 3:
            self.model_options["sampler_cfg_function"] = lambda args: function(
                args["cond"], args["uncond"], args["cond_scale"]
            )
        else:
            self.model_options["sampler_cfg_function"] = function
        if disable_cfg1_optimization:
            self.model_options["disable_cfg1_optimization"] = True

    def set_model_sampler_post_cfg_function(self, post_cfg_function, disable_cfg1_optimization=False):
        """Add a function that changes the result of classifier-free guidance."""
        set_model_options_post_cfg_function(self.model_options, post_cfg_function, disable_cfg1_optimization)

    def set_model_unet_function_wrapper(self, unet_wrapper_function):
        """Wrap apply_model in the samplers."""
        self.model_options["model_function_wrapper"] = unet_wrapper_function

    def set_model_patch(self, patch, name):
        """Add a patch to transformer_options["patches"]."""
        patches = self.model_options["transformer_options"].setdefault("patches", {})
        patches[name] = [*patches.get(name, []), patch]

    def set_model_patch_replace(self, patch, name, block_name, number, transformer_index=None):
        """Replace an attention of one block."""
        set_model_options_patch_replace(
            self.model_options, patch, name, block_name, number, transformer_index=transformer_index
        )

    def set_model_attn1_patch(self, patch):
        """Before self-attention's projections: (q, context, value, extra_options) to the same three."""
        self.set_model_patch(patch, "attn1_patch")

    def set_model_attn1_replace(self, patch, block_name, number, transformer_index=None):
        """Replace self-attention between its projections."""
        self.set_model_patch_replace(patch, "attn1", block_name, number, transformer_index)

    def set_model_attn1_output_patch(self, patch):
        """After self-attention: (x, extra_options) to x."""
        self.set_model_patch(patch, "attn1_output_patch")

    def add_object_patch(self, name, obj):
        """Put an object at a dotted path of the model while it is patched."""
        self.object_patches[name] = obj

    def get_model_object(self, name: str):
        """The object at a dotted path of the model as it will be when this patcher is loaded."""
        if name in self.object_patches:
            return self.object_patches[name]
        if name in self.object_patches_backup:
            return self.object_patches_backup[name]
        return comfy.utils.get_attr(self.model, name)

    def add_weight_wrapper(self, name, function):
        """Run a function on a weight at each use."""
        self.weight_wrapper_patches[name] = [*self.weight_wrapper_patches.get(name, []), function]
        self.patches_uuid = uuid.uuid4()

    def _patch_lists(self):
        """Every container of attention patches with its keys."""
        options = self.model_options["transformer_options"]
        for patches in options.get("patches", {}).values():
            yield patches, range(len(patches))
        for patches in options.get("patches_replace", {}).values():
            yield patches, list(patches)
        if "model_function_wrapper" in self.model_options:
            yield self.model_options, ["model_function_wrapper"]

    def model_patches_to(self, device):
        """Move patches that can move (or change type) to a device or type."""
        for patches, keys in self._patch_lists():
            for key in keys:
                if hasattr(patches[key], "to"):
                    patches[key] = patches[key].to(device)

    def model_patches_models(self):
        """Models that patches need loaded."""
        return [
            model
            for patches, keys in self._patch_lists()
            for key in keys
            if hasattr(patches[key], "models")
            for model in patches[key].models()
        ]

    # --- weights ------------------------------------------------------------------------------------------------------

    def model_dtype(self):
        """The type the weights are stored in, None when the model does not say."""
        return self.model.get_dtype() if hasattr(self.model, "get_dtype") else None

    def model_size(self):
        """Bytes of the model."""
        if self.size <= 0:
            self.size = comfy.model_management.module_size(self.model)
        return self.size

    def loaded_size(self):
        """Bytes on the load device."""
        return self.model.model_loaded_weight_memory

    def lowvram_patch_counter(self):
        """Patches applied at each use; the embedded host has none."""
        return self.model.lowvram_patch_counter

    def memory_required(self, input_shape):
        """A rough number of bytes that one forward takes."""
        return self.model.memory_required(input_shape=input_shape)

    def add_patches(self, patches, strength_patch=1.0, strength_model=1.0):
        """Add {key or (key, offset[, function]): patch}; returns the ones whose weight exists."""
        with self.use_ejected():
            weights, found = self.model.state_dict().keys(), []
            for target, patch in patches.items():
                key, offset, function = (target, None, None) if isinstance(target, str) else (*target, None)[:3]
                if key in weights:
                    found.append(target)
                    self.patches.setdefault(key, []).append((strength_patch, patch, strength_model, offset, function))
            self.patches_uuid = uuid.uuid4()
            return found

    def get_key_patches(self, filter_prefix=None):
        """{key: [(base weight, convert function), *patches]}."""

        def convert(weight, **kwargs):
            return weight

        out = {}
        for key in self.model_state_dict():
            if filter_prefix is None or key.startswith(filter_prefix):
                backup = self.backup.get(key)
                weight = comfy.utils.get_attr(self.model, key) if backup is None else backup.weight
                out[key] = [(weight, convert), *self.patches.get(key, [])]
        return out

    def model_state_dict(self, filter_prefix=None):
        """The model's state dict as it is now, without injections."""
        with self.use_ejected():
            return {
                key: value
                for key, value in self.model.state_dict().items()
                if filter_prefix is None or key.startswith(filter_prefix)
            }

    def patch_weight_to_device(self, key, device_to=None, inplace_update=False):
        """Replace a weight by its patched value; the old one is kept in the backup."""
        if key not in self.patches:
            return
        weight = comfy.utils.get_attr(self.model, key)
        inplace_update = self.weight_inplace_update or inplace_update
        if key not in self.backup:
            self.backup[key] = Backup(weight.to(device=self.offload_device, copy=inplace_update), inplace_update)
        start = weight.to(device=weight.device if device_to is None else device_to, dtype=torch.float32, copy=True)
        patched = comfy.lora.calculate_weight(self.patches[key], start, key)
        patched = comfy.float.stochastic_rounding(patched, weight.dtype)
        put = comfy.utils.copy_to_param if inplace_update else comfy.utils.set_attr_param
        put(self.model, key, patched)

    def _load_list(self):
        """[(bytes, name, module, names of its parameters)] of modules whose parameters are all their own."""
        found = []
        for name, module in self.model.named_modules():
            own = [key for key, _ in module.named_parameters(recurse=False)]
            leaf = len(own) == len(list(module.named_parameters()))
            if leaf and (own or hasattr(module, "comfy_cast_weights")):
                found.append((comfy.model_management.module_size(module), name, module, own))
        return found

    def load(self, device_to=None, lowvram_model_memory=0, force_patch_weights=False, full_load=False):
        """Patch the weights and put the whole model on a device."""
        with self.use_ejected():
            for _, name, module, params in self._load_list():
                if hasattr(module, "comfy_cast_weights"):
                    module.comfy_cast_weights = getattr(module, "prev_comfy_cast_weights", module.comfy_cast_weights)
                    module.__dict__.pop("prev_comfy_cast_weights", None)
                    module.weight_function, module.bias_function = [], []
                    if self.force_cast_weights:
                        module.prev_comfy_cast_weights, module.comfy_cast_weights = module.comfy_cast_weights, True
                module_functions = ((f"{name}.weight", "weight_function"), (f"{name}.bias", "bias_function"))
                for key, functions in module_functions:
                    if key in self.weight_wrapper_patches:
                        getattr(module, functions).extend(self.weight_wrapper_patches[key])
                if getattr(module, "comfy_patched_weights", False):
                    continue
                for param in params:
                    self.patch_weight_to_device(f"{name}.{param}" if name else param, device_to=device_to)
                module.comfy_patched_weights = True
            self.model.to(device_to)
            self.model.model_lowvram, self.model.device = False, device_to
            self.model.model_loaded_weight_memory = self.model_size()
            self.model.current_weight_patches_uuid = self.patches_uuid
            for callback in self.get_all_callbacks(CallbacksMP.ON_LOAD):
                callback(self, device_to, lowvram_model_memory, force_patch_weights, full_load)
            self.apply_hooks(self.forced_hooks, force_apply=True)

    def patch_model(self, device_to=None, lowvram_model_memory=0, load_weights=True, force_patch_weights=False):
        """Put object patches, then weights, then injections into the model; returns it."""
        with self.use_ejected():
            for name, value in self.object_patches.items():
                old = comfy.utils.set_attr(self.model, name, value)
                self.object_patches_backup.setdefault(name, old)
            if load_weights:
                self.load(device_to, lowvram_model_memory, force_patch_weights=force_patch_weights, full_load=True)
        self.inject_model()
        return self.model

    def unpatch_model(self, device_to=None, unpatch_weights=True):
        """Take injections, patched weights and object patches out of the model."""
        self.eject_model()
        if unpatch_weights:
            for key, backup in self.backup.items():
                put = comfy.utils.copy_to_param if backup.inplace_update else comfy.utils.set_attr_param
                put(self.model, key, backup.weight)
            self.model.current_weight_patches_uuid = None
            self.backup.clear()
            if device_to is not None:
                self.model.to(device_to)
                self.model.device = device_to
            self.model.model_loaded_weight_memory = 0
            for module in self.model.modules():
                module.__dict__.pop("comfy_patched_weights", None)
        for name, value in self.object_patches_backup.items():
            comfy.utils.set_attr(self.model, name, value)
        self.object_patches_backup.clear()

    def partially_unload(self, device_to, memory_to_free=0):
        """Bytes freed: none, since the embedded host loads and unloads models whole."""
        return 0

    def partially_load(self, device_to, extra_memory=0, force_patch_weights=False):
        """Patch and load the model unless a patcher with the same weight patches has; returns the bytes that took."""
        with self.use_ejected(skip_and_inject_on_exit_only=True):
            loaded = self.model.current_weight_patches_uuid
            stale = loaded is not None and (loaded != self.patches_uuid or force_patch_weights)
            self.unpatch_model(self.offload_device, unpatch_weights=stale)
            self.patch_model(load_weights=False)
            if self.model.model_loaded_weight_memory > 0:
                self.apply_hooks(self.forced_hooks, force_apply=True)
                return 0
            try:
                self.load(
                    device_to,
                    lowvram_model_memory=extra_memory,
                    force_patch_weights=force_patch_weights,
                    full_load=True,
                )
            except BaseException:
                self.detach()
                raise
            return self.model.model_loaded_weight_memory

    def detach(self, unpatch_all=True):
        """Let go of the model: injections off, patches to the offload device, and with unpatch_all the weights
        restored.
        """
        self.eject_model()
        self.model_patches_to(self.offload_device)
        if unpatch_all:
            self.unpatch_model(self.offload_device, unpatch_weights=unpatch_all)
        for callback in self.get_all_callbacks(CallbacksMP.ON_DETACH):
            callback(self, unpatch_all)
        return self.model

    def current_loaded_device(self):
        """Where the model is."""
        return self.model.device

    def calculate_weight(self, patches, weight, key, intermediate_dtype=torch.float32):
        """Deprecated name of comfy.lora.calculate_weight."""
        logging.warning("ModelPatcher.calculate_weight is deprecated; use comfy.lora.calculate_weight")
        return comfy.lora.calculate_weight(patches, weight, key, intermediate_dtype=intermediate_dtype)

    # --- a run --------------------------------------------------------------------------------------------------------

    def pre_run(self):
        """Sampling starts."""
        if hasattr(self.model, "current_patcher"):
            self.model.current_patcher = self
        self._call(CallbacksMP.ON_PRE_RUN)

    def prepare_state(self, timestep, model_options=None):
        """A step of sampling starts."""
        self._call(CallbacksMP.ON_PREPARE_STATE, timestep)

    def cleanup(self):
        """Sampling ended."""
        self.clean_hooks()
        if hasattr(self.model, "current_patcher"):
            self.model.current_patcher = None
        self._call(CallbacksMP.ON_CLEANUP)

    # --- callbacks, wrappers, attachments, injections, additional models ----------------------------------------------

    def _call(self, call_type, *args):
        for callback in self.get_all_callbacks(call_type):
            callback(self, *args)

    def add_callback(self, call_type: str, callback):
        """Register a callback without a key."""
        self.add_callback_with_key(call_type, None, callback)

    def add_callback_with_key(self, call_type: str, key: str | None, callback):
        """Register a callback under a key."""
        self.callbacks.setdefault(call_type, {}).setdefault(key, []).append(callback)

    def remove_callbacks_with_key(self, call_type: str, key: str):
        """Remove the callbacks of a key."""
        self.callbacks.get(call_type, {}).pop(key, None)

    def get_callbacks(self, call_type: str, key: str):
        """The callbacks of a key."""
        return self.callbacks.get(call_type, {}).get(key, [])

    def get_all_callbacks(self, call_type: str):
        """The callbacks of every key, in order."""
        return [callback for callbacks in self.callbacks.get(call_type, {}).values() for callback in callbacks]

    def add_wrapper(self, wrapper_type: str, wrapper):
        """Register a wrapper without a key."""
        self.add_wrapper_with_key(wrapper_type, None, wrapper)

    def add_wrapper_with_key(self, wrapper_type: str, key: str | None, wrapper):
        """Register a wrapper under a key."""
        self.wrappers.setdefault(wrapper_type, {}).setdefault(key, []).append(wrapper)

    def remove_wrappers_with_key(self, wrapper_type: str, key: str):
        """Remove the wrappers of a key."""
        self.wrappers.get(wrapper_type, {}).pop(key, None)

    def get_wrappers(self, wrapper_type: str, key: str):
        """The wrappers of a key."""
        return self.wrappers.get(wrapper_type, {}).get(key, [])

    def get_all_wrappers(self, wrapper_type: str):
        """The wrappers of every key, in order."""
        return [wrapper for wrappers in self.wrappers.get(wrapper_type, {}).values() for wrapper in wrappers]

    def set_attachments(self, key: str, attachment):
        """Attach an object."""
        self.attachments[key] = attachment

    def get_attachment(self, key: str):
        """An attached object, None without it."""
        return self.attachments.get(key)

    def set_injections(self, key: str, injections: list[PatcherInjection]):
        """Set the injections of a key, replacing earlier ones."""
        self.injections[key] = injections

    def remove_injections(self, key: str):
        """Remove the injections of a key."""
        self.injections.pop(key, None)

    def set_additional_models(self, key: str, models: list):
        """Set further patchers to load with this one."""
        self.additional_models[key] = models

    def get_additional_models_with_key(self, key: str):
        """The further patchers of a key."""
        return self.additional_models.get(key, [])

    def get_additional_models(self):
        """The further patchers of every key."""
        return [model for models in self.additional_models.values() for model in models]

    def get_nested_additional_models(self):
        """The further patchers, theirs, and so on, each once."""
        found = list(dict.fromkeys(self.get_additional_models()))
        for model in found:  # grows while it is walked
            found.extend(other for other in model.get_additional_models() if other not in found)
        return found

    @contextlib.contextmanager
    def use_ejected(self, skip_and_inject_on_exit_only=False):
        """The model without injections inside the block; with skip_and_inject_on_exit_only nothing injects before its
        end.
        """
        previous, was_injected = self.skip_injection, self.is_injected
        if skip_and_inject_on_exit_only:
            self.skip_injection = True
        self.eject_model()
        try:
            yield self
        finally:
            self.skip_injection = previous
            if skip_and_inject_on_exit_only or was_injected:
                self.inject_model()

    def inject_model(self):
        """Run the injections in order unless they are in or skipped."""
        if self.is_injected or self.skip_injection:
            return
        for injections in self.injections.values():
            for injection in injections:
                injection.inject(self)
                self.is_injected = True
        if self.is_injected:
            self._call(CallbacksMP.ON_INJECT_MODEL)

    def eject_model(self):
        """Take injections out in the order they went in, as ComfyUI does."""
        if not self.is_injected:
            return
        for injections in self.injections.values():
            for injection in injections:
                injection.eject(self)
        self.is_injected = False
        self._call(CallbacksMP.ON_EJECT_MODEL)

    # --- hooks: empty ones only ---------------------------------------------------------------------------------------

    def register_all_hook_patches(self, hooks, target_dict, model_options=None, registered=None):
        """An empty group; other hooks are refused."""
        comfy.hooks.refuse(hooks)
        return comfy.hooks.HookGroup() if registered is None else registered

    def apply_hooks(self, hooks, transformer_options=None, force_apply=False):
        """Transformer options of hooks: none; other hooks are refused."""
        comfy.hooks.refuse(hooks)
        return {} if transformer_options is None else transformer_options

    def clean_hooks(self):
        """Nothing to take off."""
