"""Parity jobs that run the same code on a real ComfyUI and, as a child process, on the embedded host, so that results
can be compared.

As a script: `python stub_unet.py JOBS.json IN.safetensors OUT.safetensors` runs jobs on the embedded host alone.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import subprocess
import sys
import types
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_BASE = {
    "image_size": 32,
    "use_checkpoint": False,
    "use_spatial_transformer": True,
    "legacy": False,
    "adm_in_channels": None,
    "use_temporal_attention": False,
    "use_temporal_resblock": False,
    "num_heads": -1,
    "num_head_channels": -1,
}


def unet_config(
    in_channels: int = 4,
    channels: int = 32,
    mult: tuple = (1, 2),
    depth: tuple = (1, 1),
    res: int = 1,
    middle: int = 1,
    context: int = 48,
    **more: Any,
) -> dict:
    """UNetModel arguments with one transformer depth a level."""
    return {
        **_BASE,
        "in_channels": in_channels,
        "out_channels": in_channels,
        "model_channels": channels,
        "num_res_blocks": [res] * len(mult),
        "channel_mult": list(mult),
        "transformer_depth": [d for d in depth for _ in range(res)],
        "transformer_depth_output": [d for d in depth for _ in range(res + 1)],
        "transformer_depth_middle": middle,
        "context_dim": context,
        "use_linear_in_transformer": False,
        **more,
    }


SD15 = unet_config(4, 320, (1, 2, 4, 4), (1, 1, 1, 0), res=2, context=768, num_heads=8)
SD20 = unet_config(
    4, 320, (1, 2, 4, 4), (1, 1, 1, 0), res=2, context=1024, num_head_channels=64, use_linear_in_transformer=True
)
SDXL = unet_config(
    4,
    320,
    (1, 2, 4),
    (0, 2, 10),
    res=2,
    middle=10,
    context=2048,
    num_head_channels=64,
    use_linear_in_transformer=True,
    adm_in_channels=2816,
    num_classes="sequential",
)
SMALL = {
    "sd15": unet_config(4, 32, (1, 2, 2, 2), (1, 1, 1, 0), res=2, num_heads=4),
    "sdxl": unet_config(
        4,
        32,
        (1, 2),
        (0, 2),
        middle=2,
        num_head_channels=16,
        use_linear_in_transformer=True,
        adm_in_channels=24,
        num_classes="sequential",
    ),
    "demo": unet_config(3, 32, (1, 2, 2), (0, 1, 1), context=64, num_heads=4, use_linear_in_transformer=True),
    "updown": unet_config(
        4, 32, (1, 2), (1, 0), num_heads=2, resblock_updown=True, use_scale_shift_norm=True, middle=-1
    ),
}


def build(
    config: dict, kind: str = "EPS", dtype: torch.dtype = torch.float32, device: str = "cpu", **settings: Any
) -> Any:
    """A BaseModel of the open host around a UNet, weights uninitialized."""
    import comfy.latent_formats
    import comfy.model_base
    import comfy.supported_models_base

    class Config(comfy.supported_models_base.BASE):
        unet_config: dict = {}  # noqa: RUF012
        unet_extra_config: dict = {}  # noqa: RUF012
        latent_format = comfy.latent_formats.SD15
        sampling_settings = settings

    model_config = Config(dict(config))
    model_config.unet_config = {**config, "dtype": dtype}
    model_config.manual_cast_dtype = None if dtype == torch.float32 else torch.float32
    return comfy.model_base.BaseModel(model_config, comfy.model_base.ModelType[kind], device=torch.device(device))


def patcher(model: Any) -> Any:
    """A ModelPatcher on the CPU."""
    import comfy.model_patcher

    cpu = torch.device("cpu")
    return comfy.model_patcher.ModelPatcher(model, load_device=cpu, offload_device=cpu)


def random_weights(config: dict, seed: int = 0) -> dict[str, Tensor]:
    """UNet weights of the open host's shapes, drawn in key order."""
    shapes, generator = shapes_of(config), torch.Generator().manual_seed(seed)

    def draw(shape: list[int]) -> Tensor:
        values = torch.randn(shape, generator=generator)
        return values * values[0].numel() ** -0.5 if len(shape) > 1 else 1.0 + 0.1 * values

    return {key: draw(shape) for key, shape in sorted(shapes.items())}


def shapes_of(config: dict) -> dict[str, list[int]]:
    """{key: shape} of the UNet's state dict."""
    from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel

    return {key: list(value.shape) for key, value in UNetModel(**config, device="meta").state_dict().items()}


def _note(options: dict) -> list:
    """The parts of extra_options that patches read, as JSON values."""
    names = ("block", "block_index", "transformer_index", "original_shape", "activations_shape", "n_heads", "dim_head")
    return [list(options[name]) if isinstance(options[name], tuple) else options[name] for name in names]


def attention_patches(notes: list) -> dict:
    """transformer_options with a patch of every kind the UNet calls, each of which changes the result."""

    def attn(q: Tensor, context: Tensor, value: Tensor, extra: dict) -> tuple:
        notes.append(_note(extra))
        return q * 1.01, context[:, ::2], value[:, ::2] * 0.9

    def replace(q: Tensor, k: Tensor, v: Tensor, extra: dict) -> Tensor:
        notes.append(["replace", *_note(extra)])
        return q + (k.mean(1, keepdim=True) * v).mean(1, keepdim=True)

    def override(function: Any, *args: Any, **kwargs: Any) -> Tensor:
        notes.append(["override", args[3], sorted(name for name in kwargs if name != "attn_precision")])
        return function(*args, **kwargs) * 1.02

    def scaled(factor: float) -> Any:
        return lambda x, *_: x * factor

    return {
        "patches": {
            "attn1_patch": [attn, attn],
            "attn2_patch": [attn],
            "attn1_output_patch": [scaled(1.1)],
            "attn2_output_patch": [scaled(0.9)],
            "middle_patch": [scaled(1.05)],
            "input_block_patch": [scaled(0.98)],
            "input_block_patch_after_skip": [scaled(1.03)],
            "output_block_patch": [lambda h, skip, options: (h * 1.04, skip * 0.97)],
            "emb_patch": [scaled(0.95)],
        },
        "patches_replace": {
            "attn1": {("input", 1): replace, ("middle", 0, 0): replace},
            "attn2": {("output", 1, 0): replace},
        },
        "optimized_attention_override": override,
    }


def run_unet(job: dict, tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], Any]:
    """One forward of a UNet, plain or with patches, wrappers and control residuals."""
    from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel

    unet = UNetModel(**job["config"], device="cpu").eval()
    unet.load_state_dict({key.removeprefix("w."): value for key, value in tensors.items() if key.startswith("w.")})
    notes: list = []
    options = attention_patches(notes) if job.get("patches") else {}
    if job.get("wrapper"):

        def wrapper(executor: Any, *args: Any, **kwargs: Any) -> Tensor:
            notes.append([executor.class_obj is unet, len(args), sorted(kwargs)])
            return executor(*args, **kwargs) * 2

        options["wrappers"] = {"diffusion_model": {None: [wrapper], "key": [wrapper]}}
    control = None
    if job.get("control"):
        control = {
            name: [value.clone() for key, value in sorted(tensors.items()) if key.startswith(f"control.{name}.")]
            for name in ("input", "middle", "output")
        }
    with torch.no_grad():
        out = unet(tensors["x"].clone(), tensors["t"], tensors["context"], tensors.get("y"), control, options)
    return {"out": out}, notes


def conditioning(job: dict, tensors: dict[str, Tensor]) -> tuple[list, list]:
    """(positive, negative) CONDITIONING, the positive one with areas, masks and ranges when the job asks for them."""
    pooled = {"pooled_output": tensors["pooled"]} if "pooled" in tensors else {}
    positive = [[tensors["positive"], {**pooled}]]
    if job.get("regions"):
        positive += [
            [tensors["negative"], {**pooled, "area": (16, 12, 4, 8), "strength": 0.7}],
            [
                tensors["negative"],
                {**pooled, "area": ("percentage", 0.5, 0.5, 0.25, 0.5), "start_percent": 0.2, "end_percent": 0.8},
            ],
            [
                tensors["negative"],
                {**pooled, "mask": tensors["mask"], "mask_strength": 0.8, "set_area_to_bounds": True},
            ],
            [tensors["positive"], {**pooled, "mask": tensors["mask"], "mask_strength": 0.5}],
        ]
    return positive, [[tensors["negative"], {**pooled}]]


def run_sample(job: dict, tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], Any]:
    """A guided sampling, by name or, with noise of its own, by sampler object."""
    import comfy.sample
    import comfy.samplers

    model = build(
        job["config"], job["kind"], dtype=getattr(torch, job.get("dtype", "float32")), **job.get("settings", {})
    )
    model.diffusion_model.load_state_dict(
        {key.removeprefix("w."): value for key, value in tensors.items() if key.startswith("w.")}
    )
    mine, seen = patcher(model), []
    positive, negative = conditioning(job, tensors)
    latent, mask = tensors["latent"], tensors.get("denoise_mask")

    def callback(step: int, x0: Tensor, x: Tensor, total: int) -> None:
        seen.append((step, total, x0.clone()))

    if "noise_seed" in job:
        draws = torch.Generator().manual_seed(job["noise_seed"])
        sampler = comfy.samplers.ksampler(
            job["sampler"], {"noise_sampler": lambda *_: torch.randn(latent.shape, generator=draws)}
        )
        sigmas = comfy.samplers.calculate_sigmas(model.model_sampling, job["scheduler"], job["steps"])
        out = comfy.sample.sample_custom(
            mine,
            comfy.sample.prepare_noise(latent, 5),
            job["cfg"],
            sampler,
            sigmas,
            positive,
            negative,
            latent,
            noise_mask=mask,
            callback=callback,
            disable_pbar=True,
            seed=7,
        )
    else:
        out = comfy.sample.sample(
            mine,
            comfy.sample.prepare_noise(latent, 5),
            job["steps"],
            job["cfg"],
            job["sampler"],
            job["scheduler"],
            positive,
            negative,
            latent,
            denoise=job.get("denoise", 1.0),
            start_step=job.get("start"),
            last_step=job.get("last"),
            force_full_denoise=job.get("full", False),
            noise_mask=mask,
            callback=callback,
            disable_pbar=True,
            seed=7,
        )
    return {"out": out, **{f"x0.{i}": x0 for i, (_, _, x0) in enumerate(seen)}}, [
        [step, total] for step, total, _ in seen
    ]


def run_levels(job: dict, tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], Any]:
    """Noise levels, their functions, and every schedule."""
    import comfy.model_base
    import comfy.samplers

    levels = build(SMALL["demo"], job["kind"], device="meta", **job.get("settings", {})).model_sampling
    sigma, noise, latent = tensors["sigma"], tensors["noise"], tensors["latent"]
    out = {
        "sigmas": levels.sigmas,
        "timestep": levels.timestep(sigma).float(),
        "sigma": levels.sigma(levels.timestep(sigma).float() * 0.7),
        "input": levels.calculate_input(sigma, noise),
        "denoised": levels.calculate_denoised(sigma, noise, latent),
        "noisy": levels.noise_scaling(sigma, noise, latent),
        "noisiest": levels.noise_scaling(sigma[:1], noise, latent, True),
        "inverse": levels.inverse_noise_scaling(sigma * 0.01, latent),
    }
    sdxl = types.SimpleNamespace(embedder=comfy.model_base.Timestep(256), noise_augmentor=None)
    sizes = {"width": 832, "height": 1216, "crop_w": 3, "target_height": 1024}
    out["adm"] = comfy.model_base.SDXL.encode_adm(sdxl, pooled_output=noise.flatten(1), **sizes)
    for name in job["schedulers"]:
        for steps in (2, 7, 20, 333):
            out[f"{name}.{steps}"] = comfy.samplers.calculate_sigmas(levels, name, steps)
    return {key: value.float().contiguous() for key, value in out.items()}, [
        levels.percent_to_sigma(p / 10) for p in range(-1, 12)
    ]


def run_names(job: dict, tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], Any]:
    """The UNet's keys and shapes, what is detected from them, and every name of a LoRA file for them."""
    import comfy.lora
    import comfy.model_detection

    model = build(job["config"], device="meta")
    state = {f"p.{key}": torch.empty(shape, device="meta") for key, shape in shapes_of(job["config"]).items()}
    detected = comfy.model_detection.detect_unet_config(state, "p.")
    family = comfy.model_detection.model_config_from_unet_config(detected, state)
    return {}, {
        "shapes": shapes_of(job["config"]),
        "lora": comfy.lora.model_lora_keys_unet(model, {}),
        "detected": detected,
        "family": type(family).__name__,
        "built": {key: str(value) for key, value in family.unet_config.items()},
    }


def run_lora(job: dict, tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], Any]:
    """The weights after a LoRA file was loaded twice at different strengths, and after it was taken off again."""
    import comfy.model_management
    import comfy.sd

    model = build(job["config"], dtype=getattr(torch, job["dtype"]))
    model.diffusion_model.load_state_dict(
        {key.removeprefix("w."): value for key, value in tensors.items() if key.startswith("w.")}
    )
    lora = {key.removeprefix("lora."): value for key, value in tensors.items() if key.startswith("lora.")}
    mine = patcher(model)
    once, _ = comfy.sd.load_lora_for_models(mine, None, lora, 0.75, 0)
    twice, _ = comfy.sd.load_lora_for_models(once, None, lora, -0.5, 0)
    comfy.model_management.load_models_gpu([twice])
    patched = {f"patched.{key}": value.clone() for key, value in model.diffusion_model.state_dict().items()}
    comfy.model_management.load_models_gpu([mine])
    return patched | {
        f"base.{key}": value.clone() for key, value in model.diffusion_model.state_dict().items()
    }, sorted(twice.patches)


def run_signatures(job: dict, tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], Any]:
    """{module.function or module.class.method: [[parameter, whether it has a default]]} of what the open host defines
    in modules.
    """
    out = {}

    def note(name: str, function: Any) -> None:
        parameters = inspect.signature(function).parameters.values()
        out[name] = [
            [p.name, p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)] for p in parameters
        ]

    for module in job["modules"]:
        for name, value in vars(importlib.import_module(module)).items():
            if name.startswith("_") or not str(getattr(value, "__module__", "")).startswith("comfy"):
                continue
            if inspect.isfunction(value):
                note(f"{module}.{name}", value)
            elif inspect.isclass(value):
                for method, function in inspect.getmembers(value, callable):
                    public = method == "__init__" or not method.startswith("_")
                    if (
                        public
                        and str(getattr(function, "__module__", "")).startswith("comfy")
                        and not inspect.isclass(function)
                    ):
                        note(f"{module}.{name}.{method}", function)
    return {}, out


RUN = {
    "signatures": run_signatures,
    "unet": run_unet,
    "sample": run_sample,
    "levels": run_levels,
    "names": run_names,
    "lora": run_lora,
}


def run(jobs: list[dict], tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], list]:
    """Every job on the open host: ({"<job>.<name>": tensor}, [what each noted]). Job i's tensors are the ones under
    "<i>.".
    """
    out, notes = {}, []
    for i, job in enumerate(jobs):
        mine = {key.removeprefix(f"{i}."): value for key, value in tensors.items() if key.startswith(f"{i}.")}
        results, noted = RUN[job["run"]](job, mine)
        out.update({f"{i}.{key}": value.contiguous() for key, value in results.items()})
        notes.append(noted)
    return out, notes


def run_in_stubs(jobs: list[dict], tensors: dict[str, Tensor], folder: str) -> tuple[dict[str, Tensor], list]:
    """The same in a child process that has the embedded host alone."""
    paths = [os.path.join(folder, name) for name in ("jobs.json", "in.safetensors", "out.safetensors")]
    with open(paths[0], "w", encoding="utf-8") as file:
        json.dump(jobs, file)
    save_file({key: value.contiguous().clone() for key, value in tensors.items()}, paths[1])
    environment = {
        key: value
        for key, value in os.environ.items()
        if key not in ("GRAFT_TEST_COMFYUI", "COMFYUI_PATH", "PYTHONPATH")
    }
    child = subprocess.run(
        [sys.executable, os.path.abspath(__file__), *paths],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        cwd=folder,
    )
    if child.returncode != 0:
        raise RuntimeError(f"the embedded host failed:\n{child.stderr[-4000:]}")
    with open(paths[2] + ".json", encoding="utf-8") as file:
        return load_file(paths[2]), json.load(file)


def compare(jobs: list[dict], tensors: dict[str, Tensor], folder: str) -> tuple[dict[str, float], list, list]:
    """({result: largest relative difference}, notes here, notes of the embedded host); the scale is the larger of 1 and
    the result's.
    """
    torch.set_num_threads(1)
    here, noted = run(jobs, tensors)
    there, noted_there = run_in_stubs(jobs, tensors, folder)
    if here.keys() != there.keys():
        raise AssertionError(f"different results: {sorted(here.keys() ^ there.keys())}")
    difference = {
        key: ((value.double() - there[key].double()).abs().max() / max(1.0, value.double().abs().max())).item()
        if value.shape == there[key].shape
        else float("inf")
        for key, value in here.items()
    }
    return difference, json.loads(json.dumps(noted)), noted_there


def _main() -> None:
    sys.path.insert(0, os.path.join(ROOT, "comfyui_api_stubs", "modules"))
    torch.set_num_threads(1)
    jobs_path, in_path, out_path = sys.argv[1:]
    with open(jobs_path, encoding="utf-8") as file:
        jobs = json.load(file)
    out, notes = run(jobs, load_file(in_path))
    save_file(out, out_path)
    with open(out_path + ".json", "w", encoding="utf-8") as file:
        json.dump(notes, file)


if __name__ == "__main__":
    _main()
