"""Wrappers around host functions, callbacks of a model patcher, and injections into a model."""

from collections.abc import Callable


class CallbacksMP:
    """Names of the moments in a patcher's life at which callbacks run."""

    ON_CLONE = "on_clone"
    ON_LOAD = "on_load_after"
    ON_DETACH = "on_detach_after"
    ON_CLEANUP = "on_cleanup"
    ON_PRE_RUN = "on_pre_run"
    ON_PREPARE_STATE = "on_prepare_state"
    ON_APPLY_HOOKS = "on_apply_hooks"
    ON_REGISTER_ALL_HOOK_PATCHES = "on_register_all_hook_patches"
    ON_INJECT_MODEL = "on_inject_model"
    ON_EJECT_MODEL = "on_eject_model"

    @classmethod
    def init_callbacks(cls) -> dict:
        """An empty {call type: {key: [callback]}}."""
        return {}


class WrappersMP:
    """Names of the host functions that can be wrapped."""

    OUTER_SAMPLE = "outer_sample"
    PREPARE_SAMPLING = "prepare_sampling"
    SAMPLER_SAMPLE = "sampler_sample"
    PREDICT_NOISE = "predict_noise"
    CALC_COND_BATCH = "calc_cond_batch"
    APPLY_MODEL = "apply_model"
    DIFFUSION_MODEL = "diffusion_model"

    @classmethod
    def init_wrappers(cls) -> dict:
        """An empty {wrapper type: {key: [wrapper]}}."""
        return {}


def _section(name, options, is_model_options, create):
    """The "wrappers" or "callbacks" mapping inside transformer or model options."""
    if is_model_options:
        options = options.setdefault("transformer_options", {}) if create else options.get("transformer_options", {})
    return options.setdefault(name, {}) if create else options.get(name, {})


def _add(name, kind, key, item, options, is_model_options):
    _section(name, options, is_model_options, True).setdefault(kind, {}).setdefault(key, []).append(item)


def _flat(by_key):
    return [item for items in by_key.values() for item in items]


def add_callback(call_type: str, callback: Callable, transformer_options: dict, is_model_options=False):
    """Register a callback without a key."""
    _add("callbacks", call_type, None, callback, transformer_options, is_model_options)


def add_callback_with_key(
    call_type: str, key: str, callback: Callable, transformer_options: dict, is_model_options=False
):
    """Register a callback under a key."""
    _add("callbacks", call_type, key, callback, transformer_options, is_model_options)


def get_all_callbacks(call_type: str, transformer_options: dict, is_model_options=False):
    """The callbacks of every key, in order."""
    return _flat(_section("callbacks", transformer_options, is_model_options, False).get(call_type, {}))


def add_wrapper(wrapper_type: str, wrapper: Callable, transformer_options: dict, is_model_options=False):
    """Register a wrapper without a key."""
    _add("wrappers", wrapper_type, None, wrapper, transformer_options, is_model_options)


def add_wrapper_with_key(
    wrapper_type: str, key: str, wrapper: Callable, transformer_options: dict, is_model_options=False
):
    """Register a wrapper under a key."""
    _add("wrappers", wrapper_type, key, wrapper, transformer_options, is_model_options)


def get_all_wrappers(wrapper_type: str, transformer_options: dict, is_model_options=False):
    """The wrappers of every key, in order."""
    return _flat(_section("wrappers", transformer_options, is_model_options, False).get(wrapper_type, {}))


class WrapperExecutor:
    """Calls a function through its wrappers: each wrapper gets the executor that calls the rest."""

    def __init__(self, original: Callable, class_obj: object, wrappers: list, idx: int):
        self.original, self.class_obj, self.wrappers, self.idx = original, class_obj, list(wrappers), idx
        self.is_last = idx == len(self.wrappers)

    def __call__(self, *args, **kwargs):
        """Called by a wrapper: go on with the next one, or the function itself."""
        return WrapperExecutor(self.original, self.class_obj, self.wrappers, self.idx + 1).execute(*args, **kwargs)

    def execute(self, *args, **kwargs):
        """Called by the host: start with the wrapper at this index."""
        if self.is_last:
            return self.original(*args, **kwargs)
        return self.wrappers[self.idx](self, *args, **kwargs)

    @classmethod
    def new_executor(cls, original: Callable, wrappers: list, idx=0):
        """An executor of a plain function."""
        return cls(original, None, wrappers, idx)

    @classmethod
    def new_class_executor(cls, original: Callable, class_obj: object, wrappers: list, idx=0):
        """An executor of a method; wrappers find its object as `executor.class_obj`."""
        return cls(original, class_obj, wrappers, idx)


class PatcherInjection:
    """A pair of functions of the patcher: `inject` after its model is loaded, `eject` before it is unloaded."""

    def __init__(self, inject: Callable, eject: Callable):
        self.inject, self.eject = inject, eject


def copy_nested_dicts(input_dict: dict):
    """A copy whose dicts and lists are copies too; other values are shared."""

    def copied(value):
        if isinstance(value, dict):
            return copy_nested_dicts(value)
        return value.copy() if isinstance(value, list) else value

    return {key: copied(value) for key, value in input_dict.items()}


def merge_nested_dicts(dict1: dict, dict2: dict, copy_dict1=True):
    """dict1 with dict2 merged in: dicts recursively, lists appended, other values replaced."""
    merged = copy_nested_dicts(dict1) if copy_dict1 else dict1
    for key, value in dict2.items():
        if isinstance(value, dict):
            merged[key] = merge_nested_dicts(merged.get(key, {}), value)
        elif isinstance(value, list):
            merged.setdefault(key, []).extend(value)
        else:
            merged[key] = value
    return merged
