"""Loads what sampling needs and turns CONDITIONING into dicts (ComfyUI's `comfy.sampler_helpers`)."""

import uuid

import comfy.hooks
import comfy.model_management
import comfy.patcher_extension
import comfy.utils


def prepare_mask(noise_mask, shape, device):
    """An inpainting mask of the latent's shape on the device."""
    return comfy.utils.reshape_mask(noise_mask, shape).to(device)


def get_models_from_cond(cond, model_type):
    """The models under a key of conditioning entries."""
    found = [entry[model_type] for entry in cond if model_type in entry]
    return [model for models in found for model in (models if isinstance(models, list) else [models])]


def convert_cond(cond):
    """[[tokens, options]] to [{"cross_attn": tokens, **options}]."""
    out = []
    for tokens, options in cond:
        entry = {**options, "model_conds": options.get("model_conds", {}), "uuid": uuid.uuid4()}
        if tokens is not None:
            entry["cross_attn"] = tokens
        out.append(entry)
    return out


def get_additional_models(conds, dtype):
    """(models of ControlNets and other conditioning, bytes they need to run)."""
    entries = [entry for cond in conds.values() for entry in cond]
    controls = list(dict.fromkeys(get_models_from_cond(entries, "control")))
    models = [model for control in controls for model in control.get_models()]
    memory = sum(control.inference_memory_requirements(dtype) for control in controls)
    return models + get_models_from_cond(entries, "additional_models"), memory


def cleanup_additional_models(models):
    """Tell models that sampling ended."""
    for model in models:
        if hasattr(model, "cleanup"):
            model.cleanup()


def estimate_memory(model, noise_shape, conds):
    """(bytes for all conditionings at once, bytes for one)."""
    doubled = [noise_shape[0] * 2, *noise_shape[1:]]
    return model.model.memory_required(doubled), model.model.memory_required(list(noise_shape))


def prepare_sampling(model, noise_shape, conds, model_options=None):
    """(model, conditioning, further models), loaded, through the prepare_sampling wrappers."""
    executor = comfy.patcher_extension.WrapperExecutor.new_executor(
        _prepare_sampling,
        comfy.patcher_extension.get_all_wrappers(
            comfy.patcher_extension.WrappersMP.PREPARE_SAMPLING,
            {} if model_options is None else model_options,
            is_model_options=True,
        ),
    )
    return executor.execute(model, noise_shape, conds, model_options=model_options)


def _prepare_sampling(model, noise_shape, conds, model_options=None):
    models, memory = get_additional_models(conds, model.model_dtype())
    models += model.get_nested_additional_models()
    wanted, least = estimate_memory(model, noise_shape, conds)
    comfy.model_management.load_models_gpu(
        [model, *models], memory_required=wanted + memory, minimum_memory_required=least + memory
    )
    return model.model, conds, models


def cleanup_models(conds, models):
    """Tell models and ControlNets that sampling ended."""
    cleanup_additional_models(models)
    cleanup_additional_models(
        dict.fromkeys(c for cond in conds.values() for c in get_models_from_cond(cond, "control"))
    )


def prepare_model_patcher(model, conds, model_options):
    """Put the patcher's wrappers and callbacks into the options of a run; conditioning hooks are refused."""
    for cond in conds.values():
        for entry in cond:
            comfy.hooks.refuse(entry.get("hooks"))
    options, to_load = model_options["transformer_options"], model_options.setdefault("to_load_options", {})
    for name in ("wrappers", "callbacks"):
        merged = comfy.patcher_extension.merge_nested_dicts(options.get(name, {}), getattr(model, name))
        options[name] = merged
        to_load[name] = comfy.patcher_extension.merge_nested_dicts(to_load.get(name, {}), merged)
    return to_load
