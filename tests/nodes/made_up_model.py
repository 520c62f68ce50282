"""A tiny model of the family in tests/patches/models/made_up_family.py: joint attention of image and text tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..loaded_models import loaded

WIDTH, CONTEXT, PATCH = 16, 24, 2


class Mixer(nn.Module):
    """Q, K and V in one layer."""

    def __init__(self, operations: Any, **where: Any):
        super().__init__()
        self.qkv = operations.Linear(WIDTH, 3 * WIDTH, **where)
        self.out = operations.Linear(WIDTH, WIDTH, **where)

    def forward(self, x: torch.Tensor, transformer_options: dict[str, Any]) -> torch.Tensor:
        from comfy.ldm.modules.attention import optimized_attention

        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return self.out(optimized_attention(q, k, v, 2, transformer_options=transformer_options))


class Branch(nn.Module):
    """Attention and a feed-forward network."""

    def __init__(self, operations: Any, **where: Any):
        super().__init__()
        self.mixer = Mixer(operations, **where)
        up, down = operations.Linear(WIDTH, 2 * WIDTH, **where), operations.Linear(2 * WIDTH, WIDTH, **where)
        self.swish = nn.Sequential(up, nn.SiLU(), down)

    def forward(self, x: torch.Tensor, transformer_options: dict[str, Any]) -> torch.Tensor:
        x = x + self.mixer(x, transformer_options)
        return x + self.swish(x)


class RowanTransformer(nn.Module):
    """A latent (B, 4, H, W) and a text (B, L, 24); sides are a multiple of the patch."""

    def __init__(self, dtype: Any = None, device: Any = None, operations: Any = None, **settings: Any):
        super().__init__()
        where = {"dtype": dtype, "device": device}
        self.dtype, self.patch_size = dtype, PATCH
        self.image_in = operations.Linear(4 * PATCH * PATCH, WIDTH, **where)
        self.text_in = operations.Linear(CONTEXT, WIDTH, **where)
        self.branches = nn.ModuleList(Branch(operations, **where) for _ in range(2))
        self.last_modulation = operations.Linear(WIDTH, 2 * WIDTH, **where)
        self.image_out = operations.Linear(WIDTH, 4 * PATCH * PATCH, **where)

    def forward(
        self,
        x: torch.Tensor,
        timestep: torch.Tensor,
        context: torch.Tensor | None = None,
        transformer_options: dict[str, Any] | None = None,
        **_: Any,
    ) -> torch.Tensor:
        size = x.shape[-2:]
        image = torch.nn.functional.unfold(x, PATCH, stride=PATCH).transpose(1, 2)
        tokens = torch.cat((self.image_in(image), self.text_in(context)), dim=1)
        for branch in self.branches:
            tokens = branch(tokens, transformer_options or {})
        scale, shift = self.last_modulation(tokens.mean(dim=1, keepdim=True)).chunk(2, dim=-1)
        out = self.image_out(tokens[:, : image.shape[1]] * (1 + scale) + shift)
        return torch.nn.functional.fold(out.transpose(1, 2), size, PATCH, stride=PATCH)


def build_model(seed: int = 0) -> Any:
    """A ModelPatcher around it, with random weights."""
    import comfy.latent_formats
    import comfy.model_base
    import comfy.supported_models_base

    class Config(comfy.supported_models_base.BASE):
        unet_config = {}  # noqa: RUF012 (ComfyUI's own form)
        unet_extra_config = {}  # noqa: RUF012
        latent_format = comfy.latent_formats.SD15

    config = Config({"dtype": torch.float32})
    config.unet_config, config.manual_cast_dtype = {"dtype": torch.float32}, None
    kind = comfy.model_base.ModelType.EPS

    def build() -> Any:
        return comfy.model_base.BaseModel(config, kind, device="cpu", unet_model=RowanTransformer)

    def fill_(network: torch.nn.Module) -> None:
        generator = torch.Generator().manual_seed(seed)
        for parameter in network.parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.data.copy_(drawn * parameter.shape[-1] ** -0.5)

    return loaded(build, fill_)
