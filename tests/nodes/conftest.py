"""Small models with random weights for the node tests, of the open host's own classes."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from ..loaded_models import loaded
from ..model_device import LOAD
from ..sampling_options import sampling_options


def build_unet(
    dtype: torch.dtype = torch.float32,
    channels: int = 32,
    mult: tuple[int, ...] = (1, 2),
    depth: tuple[int, ...] = (1, 1),
    seed: int = 0,
    disable_dynamic: bool = False,
    file: torch.dtype | None = None,
    blocks: int = 1,
    context: int = 24,
) -> Any:
    """A ModelPatcher around a UNet of the LDM layout (eps, 4 latent channels), from a file of a type of its own if one
    is given. With four levels, two `blocks` in each and a `context` of 768 its layers are named as SD 1.5's.
    """
    import comfy.latent_formats
    import comfy.model_base
    import comfy.supported_models_base

    shape = {
        "image_size": 32,
        "in_channels": 4,
        "out_channels": 4,
        "model_channels": channels,
        "num_res_blocks": [blocks] * len(mult),
        "channel_mult": list(mult),
        "transformer_depth": [d for d in depth for _ in range(blocks)],
        "transformer_depth_output": [d for d in depth for _ in range(blocks + 1)],
        "transformer_depth_middle": depth[-1] or (1 if blocks > 1 else -1),
        "context_dim": context,
        "num_heads": 4,
        "num_head_channels": -1,
        "use_spatial_transformer": True,
        "use_linear_in_transformer": False,
        "adm_in_channels": None,
        "use_temporal_attention": False,
        "legacy": False,
    }

    class Config(comfy.supported_models_base.BASE):
        unet_config = {}  # noqa: RUF012 (ComfyUI's own form)
        unet_extra_config = {}  # noqa: RUF012
        latent_format = comfy.latent_formats.SD15

    config = Config(shape)
    config.unet_config = {**shape, "dtype": dtype}
    config.manual_cast_dtype = None

    def build() -> Any:
        return comfy.model_base.BaseModel(config, comfy.model_base.ModelType.EPS, device="cpu")

    def fill_(network: torch.nn.Module) -> None:
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in network.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator) * (
                parameter[0].numel() ** -0.5 if parameter.ndim > 1 else 0.1
            )
            parameter.data.copy_(drawn + (1.0 if parameter.ndim == 1 and name.endswith("weight") else 0.0))

    return loaded(build, fill_, disable_dynamic, file)


def build_lora(
    patcher: Any, seed: int = 0, rank: int = 4, scale: float = 0.1, part: str = ""
) -> dict[str, torch.Tensor]:
    """A LoRA in ComfyUI's generic names on every attention, feed-forward and projection weight whose
    name holds `part`.
    """
    generator, state = torch.Generator().manual_seed(seed), {}
    for name, weight in patcher.model.named_parameters():
        wanted = name.endswith(".weight") and weight.ndim > 1 and part in name
        if not wanted or not any(kind in name for kind in ("attn", "ff.net", "proj_")):
            continue
        base = name.removesuffix(".weight")
        state[f"{base}.lora_up.weight"] = (
            torch.randn(weight.shape[0], rank, *(1,) * (weight.ndim - 2), generator=generator) * scale
        )
        state[f"{base}.lora_down.weight"] = torch.randn(rank, *weight.shape[1:], generator=generator) * scale
        state[f"{base}.alpha"] = torch.tensor(rank / 2)
    return state


def load(*patchers: Any) -> None:
    """Load models as sampling does."""
    import comfy.model_management

    comfy.model_management.load_models_gpu(list(patchers), force_full_load=True)


def forward(patcher: Any, size: tuple[int, int] = (8, 8), seed: int = 0, sigma: float = 1.0) -> torch.Tensor:
    """The model's prediction for fixed random input, as float32, loaded and with its wrappers as sampling does it.

    `sigma` is the noise level that patches and wrappers are told; the model itself always computes with level 1.
    """
    load(patcher)
    return predict(patcher, size, seed, sigma)


def predict(patcher: Any, size: tuple[int, int] = (8, 8), seed: int = 0, sigma: float = 1.0) -> torch.Tensor:
    """The same of a model as it is loaded now."""
    generator = torch.Generator().manual_seed(seed)
    x, context = torch.randn(2, 4, *size, generator=generator), torch.randn(2, 5, 24, generator=generator)
    options = {**sampling_options(patcher), "sigmas": torch.full((2,), sigma, device=LOAD)}
    with torch.inference_mode():
        x, level, context = x.to(LOAD), torch.ones(2, device=LOAD), context.to(LOAD)
        prediction = patcher.model.apply_model(x, level, c_crossattn=context, transformer_options=options)
    return prediction.float().cpu()


class Snapshot:
    """What a model is: bytes, parameter objects, module classes, attributes and hooks."""

    def __init__(self, model: torch.nn.Module):
        self.bytes = {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}
        self.objects = {name: id(parameter) for name, parameter in model.named_parameters()}
        modules = dict(model.named_modules())
        self.classes = {name: type(module) for name, module in modules.items()}
        self.graft = {
            name: [key for key in module.__dict__ if "graft" in key or key == "forward"]
            for name, module in modules.items()
        }
        self.hooks = {
            name: (len(module._forward_hooks), len(module._forward_hooks_with_kwargs))
            for name, module in modules.items()
        }

    def check(self, model: torch.nn.Module, objects: bool = True) -> None:
        """Fail unless the model is as it was; `objects` false where the host itself has replaced Parameter objects."""
        now = Snapshot(model)
        assert now.bytes.keys() == self.bytes.keys()
        changed = [name for name in self.bytes if not torch.equal(now.bytes[name], self.bytes[name])]
        assert not changed, f"changed: {changed[:5]}"
        assert now.classes == self.classes and now.graft == self.graft and now.hooks == self.hooks
        if objects:
            assert now.objects == self.objects


@pytest.fixture
def small(host) -> types.SimpleNamespace:
    """`unet(...)`, `lora(patcher, ...)`, `load`, `forward`, `predict`, `Snapshot`; every model
    is unloaded afterwards.
    """
    import comfy.model_management

    yield types.SimpleNamespace(
        unet=build_unet, lora=build_lora, load=load, forward=forward, predict=predict, Snapshot=Snapshot
    )
    comfy.model_management.unload_all_models()
