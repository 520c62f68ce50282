"""The embedded host's noise levels, schedules and samplers against the real ComfyUI's: the same numbers."""

from __future__ import annotations

import importlib.util
import os

import torch

_spec = importlib.util.spec_from_file_location(
    "stub_unet", os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "stub_unet.py")
)
stub_unet = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(stub_unet)

SCHEDULERS = [
    "normal",
    "karras",
    "exponential",
    "sgm_uniform",
    "simple",
    "ddim_uniform",
    "beta",
    "linear_quadratic",
    "kl_optimal",
]


def test_levels_and_schedules(tmp_path):
    g = torch.Generator().manual_seed(0)
    kinds = [
        ("EPS", {}),
        ("V_PREDICTION", {"zsnr": True}),
        ("EPS", {"beta_schedule": "cosine", "timesteps": 500}),
        ("FLOW", {}),
        ("FLOW", {"shift": 3.0}),
    ]
    jobs = [{"run": "levels", "kind": kind, "settings": settings, "schedulers": SCHEDULERS} for kind, settings in kinds]
    tensors = {}
    for i, (kind, _) in enumerate(kinds):
        sigma = torch.tensor([0.9, 0.04, 0.5]) * (1 if kind == "FLOW" else 12)
        tensors[f"{i}.sigma"] = sigma
        tensors |= {f"{i}.{name}": torch.randn(3, 4, 5, 6, generator=g) for name in ("noise", "latent")}
    difference, real, stub = stub_unet.compare(jobs, tensors, str(tmp_path))
    assert real == stub
    assert {key: value for key, value in difference.items() if value > 1e-6} == {}


def test_samplers(tmp_path):
    named = {"steps": 4, "cfg": 3.0, "scheduler": "normal"}
    small = {"run": "sample", "config": stub_unet.SMALL["demo"]}
    larger = {**small, "config": stub_unet.SMALL["sd15"]}
    jobs = []
    for kind in ("EPS", "V_PREDICTION", "FLOW"):
        jobs += [{**small, **named, "kind": kind, "sampler": sampler} for sampler in ("euler", "dpmpp_2m")]
        jobs.append({**small, **named, "kind": kind, "sampler": "euler_ancestral", "noise_seed": 11})
    jobs += [
        {**larger, **named, "kind": "EPS", "sampler": "euler", "scheduler": "karras", "cfg": 1.0},
        {**larger, **named, "kind": "EPS", "sampler": "euler", "regions": True},
        {**small, **named, "kind": "FLOW", "sampler": "euler", "regions": True, "steps": 5},
        {**small, **named, "kind": "EPS", "sampler": "ddim", "inpaint": True, "denoise": 0.6, "filled": True},
        {**small, **named, "kind": "FLOW", "sampler": "euler", "inpaint": True, "denoise": 0.5, "filled": True},
        {**small, **named, "kind": "EPS", "sampler": "dpmpp_2m", "start": 1, "last": 3, "full": True, "filled": True},
        {**small, **named, "kind": "EPS", "sampler": "euler", "dtype": "bfloat16"},
    ]
    tensors, g = {}, torch.Generator().manual_seed(1)
    for i, job in enumerate(jobs):
        config, size = job["config"], (24, 20)
        latent = torch.randn(2, config["in_channels"], *size, generator=g) * bool(job.get("filled"))
        mask = torch.zeros(1, *size)
        mask[:, 5:20, 3:15] = 1.0
        mine = {
            "latent": latent,
            "mask": mask,
            "positive": torch.randn(1, 6, config["context_dim"], generator=g),
            "negative": torch.randn(1, 9, config["context_dim"], generator=g),
        }
        if job.get("inpaint"):
            mine["denoise_mask"] = mask[:, None]
        mine |= {
            f"w.{key}": value.to(getattr(torch, job.get("dtype", "float32")))
            for key, value in stub_unet.random_weights(config, seed=i).items()
        }
        tensors |= {f"{i}.{key}": value for key, value in mine.items()}
    difference, real, stub = stub_unet.compare(jobs, tensors, str(tmp_path))
    print(
        "largest differences:",
        {f"{i} {job['kind']} {job['sampler']}": f"{difference[f'{i}.out']:.1e}" for i, job in enumerate(jobs)},
    )
    assert real == stub  # the callback's steps
    assert {key: value for key, value in difference.items() if value > 1e-5} == {}
