"""Schedules, batches of conditionings, classifier-free guidance and the sampling loop (ComfyUI's `comfy.samplers`)."""

import collections
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import comfy.hooks
import comfy.model_management
import comfy.model_patcher
import comfy.patcher_extension
import comfy.sampler_helpers
import comfy.utils

from .k_diffusion import sampling as k_diffusion_sampling

_Wrappers, _Executor = comfy.patcher_extension.WrappersMP, comfy.patcher_extension.WrapperExecutor

# --- one conditioning of a picture or a part of it --------------------------------------------------------------------

cond_obj = collections.namedtuple(
    "cond_obj", ["input_x", "mult", "conditioning", "area", "control", "patches", "uuid", "hooks"]
)


def add_area_dims(area, num_dims):
    """An area (sizes, offsets) with whole leading dimensions added up to num_dims."""
    area = list(area)
    while len(area) // 2 < num_dims:
        half = len(area) // 2
        area = [2147483648, *area[:half], 0, *area[half:]]
    return area


def get_area_and_mult(conds, x_in, timestep_in):
    """What one conditioning sees of x and how its prediction counts; None outside its timesteps."""
    if "gligen" in conds or "default" in conds:
        raise NotImplementedError("GLIGEN and default conditionings need a real ComfyUI; remove them from the workflow")
    if "timestep_start" in conds and timestep_in[0] > conds["timestep_start"]:
        return None
    if "timestep_end" in conds and timestep_in[0] < conds["timestep_end"]:
        return None
    sides, area, x, mask = x_in.shape[2:], conds.get("area"), x_in, conds.get("mask")
    dims = len(sides)
    if area is not None:
        area = add_area_dims(area, dims)
        half = len(area) // 2
        area = area[:dims] + area[half : half + dims]
        for i in range(dims):
            area[i] = min(sides[i] - area[dims + i], area[i])
            x = x.narrow(i + 2, area[dims + i], area[i])
    if mask is None:
        mult = torch.ones_like(x)
    else:
        mask = mask[: x.shape[0]] * conds.get("mask_strength", 1.0)
        for i in range(dims if area is not None else 0):
            mask = mask.narrow(i + 1, area[dims + i], area[i])
        mult = mask.unsqueeze(1).repeat(x.shape[0] // mask.shape[0], x.shape[1], *(1 for _ in sides))
    mult = mult * conds.get("strength", 1.0)
    if conds.get("mask") is None and area is not None:
        _feather_(mult, area, sides)
    conditioning = {
        name: value.process_cond(batch_size=x_in.shape[0], area=area) for name, value in conds["model_conds"].items()
    }
    return cond_obj(x, mult, conditioning, area, conds.get("control"), None, conds["uuid"], conds.get("hooks"))


def _feather_(mult, area, sides, width=8):
    """Let the weight of an area fall off linearly towards its inner borders."""
    dims = len(sides)
    for i in range(dims):
        ramp = min(width, mult.shape[2 + i] // 4)
        for t in range(ramp):
            if area[dims + i] != 0:
                mult.narrow(i + 2, t, 1).mul_((t + 1) / ramp)
            if area[i] + area[dims + i] < sides[i]:
                mult.narrow(i + 2, area[i] - 1 - t, 1).mul_((t + 1) / ramp)


def cond_equal_size(c1, c2):
    """Whether two conditionings have the same parts and each pair fits into one batch."""
    return c1 is c2 or (c1.keys() == c2.keys() and all(c1[name].can_concat(c2[name]) for name in c1))


def can_concat_cond(c1, c2):
    """Whether two conditionings can run in one batch."""
    return (
        c1.input_x.shape == c2.input_x.shape
        and c1.control is c2.control
        and cond_equal_size(c1.conditioning, c2.conditioning)
    )


def cond_cat(c_list):
    """The parts of several conditionings as batches."""
    return {name: value.concat([other[name] for other in c_list[1:]]) for name, value in c_list[0].items()}


def calc_cond_batch(model, conds, x_in, timestep, model_options):
    """The predictions [x0] of lists of conditionings, through the calc_cond_batch wrappers."""
    if model_options.get("context_handler") is not None:
        raise NotImplementedError("context windows need a real ComfyUI")
    executor = _Executor.new_executor(
        _calc_cond_batch,
        comfy.patcher_extension.get_all_wrappers(_Wrappers.CALC_COND_BATCH, model_options, is_model_options=True),
    )
    return executor.execute(model, conds, x_in, timestep, model_options)


def _largest_batch(model, to_run):
    """Indices, last first, of the conditionings that run with the first one, as many as memory holds."""
    together = [i for i in reversed(range(len(to_run))) if can_concat_cond(to_run[i][0], to_run[0][0])]
    shape, free = to_run[0][0].input_x.shape, comfy.model_management.get_free_memory(to_run[0][0].input_x.device)
    for parts in range(1, len(together) + 1):
        batch = together[: len(together) // parts]
        if model.memory_required([len(batch) * shape[0], *shape[1:]]) * 1.5 < free:
            return batch
    return together[:1]


def _calc_cond_batch(model, conds, x_in, timestep, model_options):
    out = [torch.zeros_like(x_in) for _ in conds]
    counts = [torch.full_like(x_in, 1e-37) for _ in conds]
    to_run = []
    for index, cond in enumerate(conds):
        for entry in cond or ():
            seen = get_area_and_mult(entry, x_in, timestep)
            if seen is not None:
                comfy.hooks.refuse(seen.hooks)
                to_run.append((seen, index))

    model.current_patcher.prepare_state(timestep, model_options)
    while to_run:
        batch = [to_run.pop(i) for i in _largest_batch(model, to_run)]
        seen, indices = [entry for entry, _ in batch], [index for _, index in batch]
        x, sigma = torch.cat([entry.input_x for entry in seen]), torch.cat([timestep] * len(seen))
        arguments = cond_cat([entry.conditioning for entry in seen])
        options = comfy.patcher_extension.merge_nested_dicts(
            model.current_patcher.apply_hooks(hooks=None),
            model_options.get("transformer_options", {}),
            copy_dict1=False,
        )
        options.update(cond_or_uncond=indices[:], uuids=[entry.uuid for entry in seen], sigmas=timestep)
        arguments["transformer_options"] = options
        if seen[0].control is not None:
            arguments["control"] = seen[0].control.get_control(x, sigma, arguments, len(indices), options)
        if "model_function_wrapper" in model_options:
            call = {"input": x, "timestep": sigma, "c": arguments, "cond_or_uncond": indices}
            result = model_options["model_function_wrapper"](model.apply_model, call)
        else:
            result = model.apply_model(x, sigma, **arguments)
        for part, entry, index in zip(result.chunk(len(seen)), seen, indices, strict=True):
            total, count = out[index], counts[index]
            for i in range(len(entry.area) // 2 if entry.area is not None else 0):
                place = i + 2, entry.area[i + len(entry.area) // 2], entry.area[i]
                total, count = total.narrow(*place), count.narrow(*place)
            total += part * entry.mult
            count += entry.mult
    return [total / count for total, count in zip(out, counts, strict=True)]


def cfg_function(model, cond_pred, uncond_pred, cond_scale, x, timestep, model_options=None, cond=None, uncond=None):
    """Classifier-free guidance (Ho 2022), or what replaces and follows it."""
    options = {} if model_options is None else model_options
    said = {
        "input": x,
        "sigma": timestep,
        "cond_scale": cond_scale,
        "model": model,
        "model_options": options,
        "cond_denoised": cond_pred,
        "uncond_denoised": uncond_pred,
    }
    if "sampler_cfg_function" in options:
        result = x - options["sampler_cfg_function"](
            {
                **said,
                "cond": x - cond_pred,
                "uncond": x - uncond_pred,
                "timestep": timestep,
                "input_cond": cond,
                "input_uncond": uncond,
            }
        )
    else:
        result = uncond_pred + (cond_pred - uncond_pred) * cond_scale
    for function in options.get("sampler_post_cfg_function", ()):
        result = function({**said, "denoised": result, "cond": cond, "uncond": uncond})
    return result


def sampling_function(model, x, timestep, uncond, cond, cond_scale, model_options=None, seed=None):
    """The guided x0 of a noisy latent; a scale of 1 needs no negative conditioning."""
    options = {} if model_options is None else model_options
    if math.isclose(cond_scale, 1.0) and not options.get("disable_cfg1_optimization", False):
        uncond = None
    conds = [cond, uncond]
    said = {"conds": conds, "input": x, "sigma": timestep, "model": model, "model_options": options}
    if "sampler_calc_cond_batch_function" in options:
        out = options["sampler_calc_cond_batch_function"](said)
    else:
        out = calc_cond_batch(model, conds, x, timestep, options)
    for function in options.get("sampler_pre_cfg_function", ()):
        out = function({**said, "conds_out": out, "cond_scale": cond_scale, "timestep": timestep})
    return cfg_function(model, out[0], out[1], cond_scale, x, timestep, model_options=options, cond=cond, uncond=uncond)


class KSamplerX0Inpaint:
    """The guided model that keeps the unmasked part of a latent; the sampler sets that latent and its noise."""

    latent_image: torch.Tensor
    noise: torch.Tensor

    def __init__(self, model, sigmas):
        self.inner_model, self.sigmas = model, sigmas

    def __call__(self, x, sigma, denoise_mask, model_options=None, seed=None):
        """x0 of a noisy latent (B, C, H, W)."""
        options = {} if model_options is None else model_options
        if denoise_mask is None:
            return self.inner_model(x, sigma, model_options=options, seed=seed)
        if "denoise_mask_function" in options:
            said = {"model": self.inner_model, "sigmas": self.sigmas}
            denoise_mask = options["denoise_mask_function"](sigma, denoise_mask, extra_options=said)
        kept = self.inner_model.inner_model.scale_latent_inpaint(
            x=x, sigma=sigma, noise=self.noise, latent_image=self.latent_image
        )
        out = self.inner_model(x * denoise_mask + kept * (1.0 - denoise_mask), sigma, model_options=options, seed=seed)
        return out * denoise_mask + self.latent_image * (1.0 - denoise_mask)


# --- schedules --------------------------------------------------------------------------------------------------------


def simple_scheduler(model_sampling, steps):
    """Every n-th entry of the table."""
    table = model_sampling.sigmas
    stride = len(table) / steps
    return torch.FloatTensor([float(table[-(1 + int(i * stride))]) for i in range(steps)] + [0.0])


def ddim_scheduler(model_sampling, steps):
    """Every n-th entry of the table, counted from the second."""
    table = model_sampling.sigmas
    starts_at_zero = math.isclose(float(table[1]), 0, abs_tol=0.00001)
    stride = max(len(table) // (steps + starts_at_zero), 1)
    levels = [float(table[i]) for i in range(1, len(table), stride)]
    return torch.FloatTensor(([] if starts_at_zero else [0.0]) + levels).flip(0)


def normal_scheduler(model_sampling, steps, sgm=False, floor=False):
    """Even timesteps; sgm leaves the last one out."""
    start, end = model_sampling.timestep(model_sampling.sigma_max), model_sampling.timestep(model_sampling.sigma_min)
    append_zero = True
    if sgm:
        timesteps = torch.linspace(start, end, steps + 1)[:-1]
    else:
        append_zero = not math.isclose(float(model_sampling.sigma(end)), 0, abs_tol=0.00001)
        timesteps = torch.linspace(start, end, steps + (not append_zero))
    return torch.FloatTensor([float(model_sampling.sigma(t)) for t in timesteps] + [0.0] * append_zero)


def _beta_cdf(x, a, b):
    """The regularised incomplete beta function, by Lentz's continued fraction (Press, Numerical Recipes, 6.4)."""
    if x <= 0.0 or x >= 1.0:
        return float(x >= 1.0)
    if x > (a + 1) / (a + b + 2):
        return 1.0 - _beta_cdf(1.0 - x, b, a)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)) / a
    c, d = 1.0, 1.0 / (1.0 - (a + b) * x / (a + 1))
    fraction = d
    for m in range(1, 200):
        for numerator in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d, c = 1.0 / (1.0 + numerator * d), 1.0 + numerator / c
            fraction *= c * d
        if abs(c * d - 1.0) < 1e-15:
            break
    return front * fraction


def _beta_quantile(p, a, b):
    """The x at which the beta distribution has reached p, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _beta_cdf(middle, a, b) < p else (low, middle)
    return (low + high) / 2


def beta_scheduler(model_sampling, steps, alpha=0.6, beta=0.6):
    """Timesteps at quantiles of a beta distribution (arXiv 2407.12173)."""
    last = len(model_sampling.sigmas) - 1
    indices = [round(_beta_quantile(1 - i / steps, alpha, beta) * last) for i in range(steps)]
    return torch.FloatTensor([float(model_sampling.sigmas[i]) for i in dict.fromkeys(indices)] + [0.0])


def linear_quadratic_schedule(model_sampling, steps, threshold_noise=0.025, linear_steps=None):
    """The first half falls linearly by threshold_noise, the rest quadratically to zero, continuous in value and slope
    (Mochi).
    """
    if steps == 1:
        return torch.FloatTensor([1.0, 0.0]) * model_sampling.sigma_max.cpu()
    linear_steps = steps // 2 if linear_steps is None else linear_steps
    slope, rest = threshold_noise / linear_steps, steps - linear_steps
    bend = (1 - threshold_noise - slope * rest) / rest**2
    done = [i * slope for i in range(linear_steps)]
    done += [threshold_noise + slope * i + bend * i**2 for i in range(rest)]
    return torch.FloatTensor([1.0 - x for x in [*done, 1.0]]) * model_sampling.sigma_max.cpu()


def kl_optimal_scheduler(n: int, sigma_min: float, sigma_max: float) -> torch.Tensor:
    """Levels evenly spaced in the arc tangent, then 0 (Align Your Steps, arXiv 2404.14507)."""
    share = torch.arange(n, dtype=torch.float) / (n - 1)
    levels = (share * math.atan(sigma_min) + (1 - share) * math.atan(sigma_max)).tan()
    return torch.cat([levels, levels.new_zeros(1)])


class SchedulerHandler(NamedTuple):
    """A schedule: a function of (model_sampling, steps), or without use_ms of (n, sigma_min, sigma_max)."""

    handler: Callable[..., torch.Tensor]
    use_ms: bool = True


SCHEDULER_HANDLERS = {
    "simple": SchedulerHandler(simple_scheduler),
    "sgm_uniform": SchedulerHandler(functools.partial(normal_scheduler, sgm=True)),
    "karras": SchedulerHandler(k_diffusion_sampling.get_sigmas_karras, use_ms=False),
    "exponential": SchedulerHandler(k_diffusion_sampling.get_sigmas_exponential, use_ms=False),
    "ddim_uniform": SchedulerHandler(ddim_scheduler),
    "beta": SchedulerHandler(beta_scheduler),
    "normal": SchedulerHandler(normal_scheduler),
    "linear_quadratic": SchedulerHandler(linear_quadratic_schedule),
    "kl_optimal": SchedulerHandler(kl_optimal_scheduler, use_ms=False),
}
SCHEDULER_NAMES = list(SCHEDULER_HANDLERS)


def calculate_sigmas(model_sampling: Any, scheduler_name: str, steps: int) -> torch.Tensor:
    """The (steps + 1,) noise levels of a schedule, the last one 0."""
    handler = SCHEDULER_HANDLERS.get(scheduler_name)
    if handler is None:
        raise ValueError(f"no scheduler {scheduler_name!r} on the embedded host; it has {', '.join(SCHEDULER_NAMES)}")
    if handler.use_ms:
        return handler.handler(model_sampling, steps)
    return handler.handler(
        n=steps, sigma_min=float(model_sampling.sigma_min), sigma_max=float(model_sampling.sigma_max)
    )


# --- conditionings of a run -------------------------------------------------------------------------------------------


def _mask_bounds(mask):
    """(height, width, y, x) around the non-zero part of a mask (B, H, W), at least 8 each way."""
    found = torch.nonzero(mask.abs().amax(dim=0))
    if len(found) == 0:
        return 8, 8, 0, 0
    (y0, x0), (y1, x1) = found.amin(dim=0).tolist(), found.amax(dim=0).tolist()
    return max(8, y1 - y0 + 1), max(8, x1 - x0 + 1), y0, x0


def resolve_areas_and_cond_masks_multidim(conditions, dims, device):
    """Give areas in latent pixels and masks of the latent's size to the conditionings, in the list."""
    for i, cond in enumerate(conditions):
        cond = dict(cond)
        if cond.get("area", (None,))[0] == "percentage":
            parts = cond["area"][1:]
            half = len(parts) // 2
            cond["area"] = (
                *(max(1, round(p * d)) for p, d in zip(parts[:half], dims, strict=False)),
                *(round(p * d) for p, d in zip(parts[half:], dims, strict=False)),
            )
        if "mask" in cond:
            mask = cond["mask"].to(device=device)
            mask = mask.unsqueeze(0) if mask.ndim == len(dims) else mask
            if mask.shape[1:] != dims:
                mask = comfy.utils.common_upscale(mask.unsqueeze(1), dims[-1], dims[-2], "bilinear", "none").squeeze(1)
            if cond.get("set_area_to_bounds", False):
                cond["area"] = _mask_bounds(mask)
            cond["mask"] = mask
        conditions[i] = cond


def create_cond_with_same_area_if_none(conds, c):
    """Append to `conds` a copy of the smallest conditioning that covers `c`, cut to its area, unless there is one."""
    if "area" not in c:
        return
    half = len(c["area"]) // 2
    sizes, offsets = c["area"][:half], c["area"][half:]

    def covers(area):
        return all(
            at >= begin and at + size <= begin + length
            for size, at, length, begin in zip(sizes, offsets, area[:half], area[half:], strict=True)
        )

    smallest = None
    for x in conds:
        if "area" not in x:
            smallest = x if smallest is None else smallest
        elif covers(x["area"]) and (
            smallest is None
            or "area" not in smallest
            or math.prod(smallest["area"][:half]) > math.prod(x["area"][:half])
        ):
            smallest = x
    if smallest is not None and smallest.get("area") != c["area"]:
        conds.append({**c, "model_conds": dict(smallest["model_conds"])})


def calculate_start_end_timesteps(model, conds):
    """Turn start and end percent of the conditionings into noise levels, in the list."""
    to_sigma = model.model_sampling.percent_to_sigma
    for i, cond in enumerate(conds):
        found = {
            f"timestep_{end}": to_sigma(cond[f"{end}_percent"]) for end in ("start", "end") if f"{end}_percent" in cond
        }
        conds[i] = {**cond, **found}


def encode_model_conds(model_function, conds, noise, device, prompt_type, **kwargs):
    """Let the model turn each conditioning into arguments of its own."""
    out = []
    for cond in conds:
        said = {
            **kwargs,
            "width": noise.shape[-1] * 8,
            "height": noise.shape[-2] * 8,
            "prompt_type": prompt_type,
            **cond,
        }
        said.update(device=device, noise=noise)
        out.append({**cond, "model_conds": {**cond["model_conds"], **model_function(**said)}})
    return out


def _share_control(positive, negative):
    """Negative conditionings without a ControlNet take the positive ones', as the loader of the ControlNet asked."""
    controls = [
        c["control"]
        for c in positive
        if c.get("control_apply_to_uncond", False) and "area" not in c and c.get("control")
    ]
    bare = [i for i, c in enumerate(negative) if "area" not in c and not c.get("control")]
    if any("area" not in c and c.get("control") for c in negative):
        return
    for i, control in enumerate(controls):
        negative[bare[i % len(bare)]] = {**negative[bare[i % len(bare)]], "control": control}


def process_conds(model, noise, conds, device, latent_image=None, denoise_mask=None, seed=None):
    """The conditionings of a run {name: [dict]} ready for the model."""
    for name in conds:
        conds[name] = list(conds[name])
        resolve_areas_and_cond_masks_multidim(conds[name], noise.shape[2:], device)
        calculate_start_end_timesteps(model, conds[name])
        if hasattr(model, "extra_conds"):
            conds[name] = encode_model_conds(
                model.extra_conds,
                conds[name],
                noise,
                device,
                name,
                latent_image=latent_image,
                denoise_mask=denoise_mask,
                seed=seed,
            )
    for name, others in ((name, others) for name in conds for others in conds if others != name):
        for cond in list(conds[name]):
            create_cond_with_same_area_if_none(conds[others], cond)
    for cond in (cond for entries in conds.values() for cond in entries if "control" in cond):
        cond["control"].pre_run(model, model.model_sampling.percent_to_sigma)
    for name in conds:
        if "positive" in conds and name != "positive":
            _share_control(conds["positive"], conds[name])
    return conds


# --- the loop ---------------------------------------------------------------------------------------------------------


class Sampler:
    """Something that turns noise into a latent with a guided model."""

    def sample(self) -> Any:
        """Overridden."""

    def max_denoise(self, model_wrap, sigmas):
        """Whether sampling starts from pure noise."""
        highest, first = float(model_wrap.inner_model.model_sampling.sigma_max), float(sigmas[0])
        return math.isclose(highest, first, rel_tol=1e-05) or first > highest


class KSAMPLER(Sampler):
    """A k-diffusion sampler function as a Sampler."""

    def __init__(self, sampler_function, extra_options=None, inpaint_options=None):
        self.sampler_function = sampler_function
        self.extra_options = {} if extra_options is None else extra_options
        self.inpaint_options = {} if inpaint_options is None else inpaint_options

    def sample(  # type: ignore[override]  # as ComfyUI has it
        self, model_wrap, sigmas, extra_args, callback, noise, latent_image=None, denoise_mask=None, disable_pbar=False
    ):
        """The latent; callback(step, x0, x, steps) after each prediction."""
        extra_args["denoise_mask"] = denoise_mask
        model, levels = KSamplerX0Inpaint(model_wrap, sigmas), model_wrap.inner_model.model_sampling
        model.latent_image, model.noise = latent_image, noise
        if self.inpaint_options.get("random", False):
            generator = torch.Generator().manual_seed(extra_args.get("seed", 41) + 1)
            model.noise = torch.randn(noise.shape, generator=generator).to(noise)
        x = levels.noise_scaling(sigmas[0], noise, latent_image, self.max_denoise(model_wrap, sigmas))
        steps = len(sigmas) - 1
        told = None if callback is None else lambda said: callback(said["i"], said["denoised"], said["x"], steps)
        samples = self.sampler_function(
            model, x, sigmas, extra_args=extra_args, callback=told, disable=disable_pbar, **self.extra_options
        )
        return levels.inverse_noise_scaling(sigmas[-1], samples)


KSAMPLER_NAMES = ["euler", "euler_ancestral", "dpmpp_2m"]
SAMPLER_NAMES = [*KSAMPLER_NAMES, "ddim"]


def ksampler(sampler_name, extra_options=None, inpaint_options=None):
    """The sampler of a name, with options of its function."""
    if sampler_name not in KSAMPLER_NAMES:
        raise ValueError(f"no sampler {sampler_name!r} on the embedded host; it has {', '.join(SAMPLER_NAMES)}")
    return KSAMPLER(getattr(k_diffusion_sampling, f"sample_{sampler_name}"), extra_options, inpaint_options)


def sampler_object(name):
    """The sampler of a name; ddim is euler with other noise in the kept part when inpainting."""
    return ksampler("euler", inpaint_options={"random": True}) if name == "ddim" else ksampler(name)


def cast_to_load_options(model_options, device=None, dtype=None):
    """Move wrappers and callbacks that can move to a device and type."""
    targets = [target for target in (device, dtype) if target is not None]
    options = model_options.get("to_load_options") or {}
    for items in (
        items
        for name in ("wrappers", "callbacks")
        for by_key in options.get(name, {}).values()
        for items in by_key.values()
    ):
        for i, item in enumerate(items):
            for target in targets if hasattr(item, "to") else ():
                items[i] = item.to(target)


class CFGGuider:
    """Classifier-free guidance of one model through a whole sampling."""

    inner_model: Any
    conds: dict[str, list[dict]]

    def __init__(self, model_patcher):
        self.model_patcher, self.model_options = model_patcher, model_patcher.model_options
        self.original_conds, self.cfg = {}, 1.0

    def set_conds(self, positive, negative):
        """Set both conditionings."""
        self.inner_set_conds({"positive": positive, "negative": negative})

    def set_cfg(self, cfg):
        """Set the scale."""
        self.cfg = cfg

    def inner_set_conds(self, conds):
        """Set conditionings of any names."""
        self.original_conds.update({name: comfy.sampler_helpers.convert_cond(cond) for name, cond in conds.items()})

    def _wrapped(self, function, owner, kind, options):
        return _Executor.new_class_executor(
            function, owner, comfy.patcher_extension.get_all_wrappers(kind, options, is_model_options=True)
        )

    def __call__(self, *args, **kwargs):
        return self.outer_predict_noise(*args, **kwargs)

    def outer_predict_noise(self, x, timestep, model_options=None, seed=None):
        """The guided x0, through the predict_noise wrappers."""
        options = {} if model_options is None else model_options
        return self._wrapped(self.predict_noise, self, _Wrappers.PREDICT_NOISE, self.model_options).execute(
            x, timestep, options, seed
        )

    def predict_noise(self, x, timestep, model_options=None, seed=None):
        """The guided x0."""
        return sampling_function(
            self.inner_model,
            x,
            timestep,
            self.conds.get("negative"),
            self.conds.get("positive"),
            self.cfg,
            model_options=model_options,
            seed=seed,
        )

    def inner_sample(self, noise, latent_image, device, sampler, sigmas, denoise_mask, callback, disable_pbar, seed):
        """The latent, with the model loaded."""
        if latent_image is not None and torch.count_nonzero(latent_image) > 0:  # an empty latent stays empty
            latent_image = self.inner_model.process_latent_in(latent_image)
        self.conds = process_conds(self.inner_model, noise, self.conds, device, latent_image, denoise_mask, seed)
        options = comfy.model_patcher.create_model_options_clone(self.model_options)
        options.setdefault("transformer_options", {})["sample_sigmas"] = sigmas
        executor = self._wrapped(sampler.sample, sampler, _Wrappers.SAMPLER_SAMPLE, options)
        samples = executor.execute(
            self,
            sigmas,
            {"model_options": options, "seed": seed},
            callback,
            noise,
            latent_image,
            denoise_mask,
            disable_pbar,
        )
        return self.inner_model.process_latent_out(samples.to(torch.float32))

    def outer_sample(
        self, noise, latent_image, sampler, sigmas, denoise_mask=None, callback=None, disable_pbar=False, seed=None
    ):
        """Load the model, sample, clean up."""
        self.inner_model, self.conds, self.loaded_models = comfy.sampler_helpers.prepare_sampling(
            self.model_patcher, noise.shape, self.conds, self.model_options
        )
        device = self.model_patcher.load_device
        if denoise_mask is not None:
            denoise_mask = comfy.sampler_helpers.prepare_mask(denoise_mask, noise.shape, device)
        noise, latent_image = (
            noise.to(device=device, dtype=torch.float32),
            latent_image.to(device=device, dtype=torch.float32),
        )
        sigmas = sigmas.to(device)
        cast_to_load_options(self.model_options, device=device, dtype=self.model_patcher.model_dtype())
        try:
            self.model_patcher.pre_run()
            output = self.inner_sample(
                noise, latent_image, device, sampler, sigmas, denoise_mask, callback, disable_pbar, seed
            )
        finally:
            self.model_patcher.cleanup()
        comfy.sampler_helpers.cleanup_models(self.conds, self.loaded_models)
        del self.inner_model, self.loaded_models
        return output

    def sample(
        self, noise, latent_image, sampler, sigmas, denoise_mask=None, callback=None, disable_pbar=False, seed=None
    ):
        """The latent (B, C, H, W) from noise and a latent to start from; no noise levels, no change."""
        if sigmas.shape[-1] == 0:
            return latent_image
        self.conds = {name: [dict(entry) for entry in cond] for name, cond in self.original_conds.items()}
        original = self.model_options
        self.model_options = comfy.model_patcher.create_model_options_clone(original)
        try:
            comfy.sampler_helpers.prepare_model_patcher(self.model_patcher, self.conds, self.model_options)
            executor = self._wrapped(self.outer_sample, self, _Wrappers.OUTER_SAMPLE, self.model_options)
            output = executor.execute(noise, latent_image, sampler, sigmas, denoise_mask, callback, disable_pbar, seed)
        finally:
            cast_to_load_options(self.model_options, device=self.model_patcher.offload_device)
            self.model_options = original
        del self.conds
        return output


def sample(
    model,
    noise,
    positive,
    negative,
    cfg,
    device,
    sampler,
    sigmas,
    model_options=None,
    latent_image=None,
    denoise_mask=None,
    callback=None,
    disable_pbar=False,
    seed=None,
):
    """A guided sampling in one call."""
    guider = CFGGuider(model)
    guider.set_conds(positive, negative)
    guider.set_cfg(cfg)
    return guider.sample(noise, latent_image, sampler, sigmas, denoise_mask, callback, disable_pbar, seed)


class KSampler:
    """A sampler and a schedule by name."""

    SCHEDULERS = SCHEDULER_NAMES
    SAMPLERS = SAMPLER_NAMES
    DISCARD_PENULTIMATE_SIGMA_SAMPLERS: frozenset[str] = frozenset()

    def __init__(self, model, steps, device, sampler=None, scheduler=None, denoise=None, model_options=None):
        for kind, name, known in (("sampler", sampler, self.SAMPLERS), ("scheduler", scheduler, self.SCHEDULERS)):
            if name is not None and name not in known:
                raise ValueError(f"no {kind} {name!r} on the embedded host; it has {', '.join(known)}")
        self.model, self.device, self.denoise = model, device, denoise
        self.scheduler, self.sampler = scheduler or self.SCHEDULERS[0], sampler or self.SAMPLERS[0]
        self.model_options = {} if model_options is None else model_options
        self.set_steps(steps, denoise)

    def calculate_sigmas(self, steps):
        """The noise levels of that many steps."""
        return calculate_sigmas(self.model.get_model_object("model_sampling"), self.scheduler, steps)

    def set_steps(self, steps, denoise=None):
        """Set the noise levels; a denoise below 1 takes the last `steps` of a longer schedule."""
        self.steps = steps
        if denoise is None or denoise > 0.9999:
            self.sigmas = self.calculate_sigmas(steps).to(self.device)
        elif denoise <= 0.0:
            self.sigmas = torch.FloatTensor([])
        else:
            self.sigmas = self.calculate_sigmas(int(steps / denoise)).to(self.device)[-(steps + 1) :]

    def sample(
        self,
        noise,
        positive,
        negative,
        cfg,
        latent_image=None,
        start_step=None,
        last_step=None,
        force_full_denoise=False,
        denoise_mask=None,
        sigmas=None,
        callback=None,
        disable_pbar=False,
        seed=None,
    ):
        """The latent, from start_step to last_step."""
        sigmas = self.sigmas if sigmas is None else sigmas
        if last_step is not None and last_step < len(sigmas) - 1:
            sigmas = sigmas[: last_step + 1].clone()
            if force_full_denoise:
                sigmas[-1] = 0
        if start_step is not None:
            if start_step >= len(sigmas) - 1:
                return torch.zeros_like(noise) if latent_image is None else latent_image
            sigmas = sigmas[start_step:]
        return sample(
            self.model,
            noise,
            positive,
            negative,
            cfg,
            self.device,
            sampler_object(self.sampler),
            sigmas,
            self.model_options,
            latent_image=latent_image,
            denoise_mask=denoise_mask,
            callback=callback,
            disable_pbar=disable_pbar,
            seed=seed,
        )
