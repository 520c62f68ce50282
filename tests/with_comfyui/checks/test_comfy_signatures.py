"""Every public function and method of the embedded host's `comfy` package against the real one's signature."""

from __future__ import annotations

import importlib.util
import os

_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_spec = importlib.util.spec_from_file_location("stub_unet", os.path.join(_HERE, "stub_unet.py"))
stub_unet = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(stub_unet)

STUBS = os.path.join(os.path.dirname(os.path.dirname(_HERE)), "comfyui_api_stubs", "modules")
# What differs on purpose, or differs between the two versions themselves.
KNOWN = {
    "hooks.refuse": "the embedded host's own",
    "ops.CastWeightBiasOp.forward": "defined once for all layers, where ComfyUI has one a layer",
    "ops.CastWeightBiasOp.reset_parameters": "the same",
    "ldm.modules.attention.optimized_attention": (
        "whichever function the device takes: names of q, k, v differ between them"
    ),
    "ldm.modules.attention.optimized_attention_masked": "the same",
    "model_patcher.ModelPatcher.prepare_state": "0.3.64 has no model_options",
    "model_base.BaseModel.state_dict_for_saving": "0.33.0 takes the UNet's state dict first",
    "model_base.SDXL.state_dict_for_saving": "the same",
    "ops.pick_operations": "the last, unused argument differs between versions",
    "sd.CLIP.__init__": "0.33.0 has one argument more in the middle",
    "ldm.modules.diffusionmodules.openaimodel.UNetModel.__init__": "the same",
    "model_base.UNetModel.__init__": "the same",
}


def modules() -> list[str]:
    """The names of the embedded host's comfy modules."""
    found = []
    for folder, _, files in os.walk(os.path.join(STUBS, "comfy")):
        package = os.path.relpath(folder, STUBS).replace(os.sep, ".")
        found += [
            package if name == "__init__.py" else f"{package}.{name[:-3]}" for name in files if name.endswith(".py")
        ]
    return sorted(found)


def test_signatures(tmp_path):
    _, (real,), (stub,) = stub_unet.compare([{"run": "signatures", "modules": modules()}], {}, str(tmp_path))
    assert len(stub) > 350
    wrong = []
    for name, mine in stub.items():
        if name.removeprefix("comfy.") in KNOWN:
            continue
        theirs = real.get(name)
        if theirs is None:
            wrong.append(f"{name} does not exist")
        elif [n for n, _ in mine] != [n for n, _ in theirs[: len(mine)]]:
            wrong.append(f"{name}{[n for n, _ in mine]} is {[n for n, _ in theirs]}")
        elif any(not optional for _, optional in theirs[len(mine) :]):
            wrong.append(f"{name} needs {[n for n, optional in theirs[len(mine) :] if not optional]} too")
        elif [n for (n, a), (_, b) in zip(mine, theirs, strict=False) if a and not b]:
            wrong.append(f"{name} has required arguments that are optional in the embedded host")
    assert wrong == []
