"""The embedded host's UNet, key names and LoRA patches against the real ComfyUI's: same configuration and weights, same
output.
"""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

_spec = importlib.util.spec_from_file_location(
    "stub_unet", os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "stub_unet.py")
)
stub_unet = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(stub_unet)


def inputs(name: str, size: tuple[int, int], control: bool) -> tuple[dict, dict]:
    """(config, tensors) for one forward."""
    config, g = stub_unet.SMALL[name], torch.Generator().manual_seed(len(name) + sum(size))

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g)

    tensors = {f"w.{key}": value for key, value in stub_unet.random_weights(config).items()}
    tensors |= {
        "x": draw(2, config["in_channels"], *size),
        "t": torch.tensor([999.0, 37.5]),
        "context": draw(2, 6, config["context_dim"]),
    }
    if config["adm_in_channels"]:
        tensors["y"] = draw(2, config["adm_in_channels"])
    if control:
        half = [(side + 1) // 2 for side in size]
        quarter = [(side + 1) // 2 for side in half]
        tensors["control.middle.0"] = draw(2, 64, *quarter)
        tensors["control.input.0"] = draw(2, 32, *size)
        tensors["control.output.0"], tensors["control.output.1"] = draw(2, 64, *quarter), draw(2, 64, *quarter)
    return config, tensors


UNETS = [
    ("sd15", (16, 16), {}),
    ("sd15", (17, 23), {"patches": True}),
    ("sdxl", (16, 16), {}),
    ("sdxl", (19, 14), {"patches": True}),
    ("demo", (32, 32), {}),
    ("demo", (9, 31), {"patches": True, "wrapper": True}),
    ("demo", (33, 32), {"control": True}),
    ("updown", (16, 16), {"wrapper": True}),
]


def test_output(tmp_path):
    jobs, tensors = [], {}
    for i, (name, size, more) in enumerate(UNETS):
        config, mine = inputs(name, size, more.get("control", False))
        jobs.append({"run": "unet", "config": config, **more})
        tensors |= {f"{i}.{key}": value for key, value in mine.items()}
    difference, real, stub = stub_unet.compare(jobs, tensors, str(tmp_path))
    print("largest differences:", {UNETS[i][:2]: f"{difference[f'{i}.out']:.1e}" for i in range(len(UNETS))})
    assert max(difference.values()) <= 1e-5
    assert real == stub  # what the patches saw: blocks, indices, shapes, arguments
    assert all(noted for job, noted in zip(jobs, stub, strict=True) if job.get("patches"))


@pytest.mark.parametrize("name", ["SD15", "SD20", "SDXL"])
def test_names(tmp_path, name):
    config = {"SD15": stub_unet.SD15, "SD20": stub_unet.SD20, "SDXL": stub_unet.SDXL}[name]
    _, (real,), (stub,) = stub_unet.compare([{"run": "names", "config": config}], {}, str(tmp_path))
    assert stub["shapes"] == real["shapes"]
    assert stub["lora"] == real["lora"]
    assert stub["detected"] == real["detected"]
    assert stub["family"] == real["family"] == name
    assert stub["built"] == real["built"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_lora_patches(tmp_path, dtype):
    config, g = stub_unet.SMALL["demo"], torch.Generator().manual_seed(3)
    weights = {key: value.to(getattr(torch, dtype)) for key, value in stub_unet.random_weights(config).items()}
    lora = {}
    for number, (key, value) in enumerate(weights.items()):
        name = "lora_unet_" + key.removesuffix(".weight").replace(".", "_")
        if not key.endswith(".weight") or value.ndim < 2:
            continue
        if number % 7 == 0:
            lora[f"diffusion_model.{key.removesuffix('.weight')}.diff"] = torch.randn(value.shape, generator=g) * 0.1
            continue
        if value.ndim == 4 and number % 2:
            lora[f"{name}.lora_mid.weight"] = torch.randn(4, 4, *value.shape[2:], generator=g)
            down = torch.randn(4, value.shape[1], 1, 1, generator=g)
        else:
            down = torch.randn(4, *value.shape[1:], generator=g)
        lora[f"{name}.lora_down.weight"] = down
        lora[f"{name}.lora_up.weight"] = torch.randn(value.shape[0], 4, *(1 for _ in value.shape[2:]), generator=g)
        if number % 3:
            lora[f"{name}.alpha"] = torch.tensor(2.0)
        if value.ndim == 2 and number % 5 == 0:
            lora[f"{name}.dora_scale"] = torch.rand(value.shape[0], 1, generator=g)
    tensors = {f"0.w.{key}": value for key, value in weights.items()} | {
        f"0.lora.{key}": value for key, value in lora.items()
    }
    jobs = [{"run": "lora", "config": config, "dtype": dtype}]
    difference, real, stub = stub_unet.compare(jobs, tensors, str(tmp_path))
    assert real == stub
    assert max(difference.values()) <= (1e-5 if dtype == "float32" else 2**-8)
    assert max(value for key, value in difference.items() if ".base." in key) == 0.0
    there, _ = stub_unet.run_in_stubs(jobs, tensors, str(tmp_path))
    assert all(torch.equal(there[f"0.base.{key}"], value) for key, value in weights.items())
