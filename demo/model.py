"""The demo model in plain torch: the UNet's configuration and first weights, a small fixed text encoder, a VAE of plain
resampling.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import tokenizer

WIDTH = 64
HEADS = 4
LATENT_CHANNELS = 3
SCALE = 8

# Keywords of ComfyUI's UNetModel: 1.7M parameters on 3 x 32 x 32 latents, attention at 16 x 16 and 8 x 8.
UNET_CONFIG: dict[str, Any] = {
    "image_size": 32,
    "in_channels": LATENT_CHANNELS,
    "out_channels": LATENT_CHANNELS,
    "model_channels": 32,
    "channel_mult": [1, 2, 2],
    "num_res_blocks": [1, 1, 1],
    "transformer_depth": [0, 1, 1],
    "transformer_depth_output": [0, 0, 1, 1, 1, 1],
    "transformer_depth_middle": 1,
    "context_dim": WIDTH,
    "num_heads": HEADS,
    "num_head_channels": -1,
    "use_spatial_transformer": True,
    "use_linear_in_transformer": True,
    "legacy": False,
}

# Modules whose output starts at zero, so that every block starts as the identity and the first prediction is zero.
_ZERO = ("out_layers.3", "proj_out")


def initialize_(unet: nn.Module, seed: int = 0) -> None:
    """First weights of a UNet to train, in place: normal with std fan_in^-0.5; zero where a block joins its residual,
    and for biases.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, module in unet.named_modules():
        weight = getattr(module, "weight", None)
        if weight is None:
            continue
        with torch.no_grad():
            if weight.ndim == 1:
                weight.fill_(1.0)
            elif name == "out.2" or name.endswith(_ZERO):
                weight.zero_()
            else:
                weight.copy_(torch.randn(weight.shape, generator=generator) * weight[0].numel() ** -0.5)
            if getattr(module, "bias", None) is not None:
                module.bias.zero_()


class Attention(nn.Module):
    """Self-attention over (B, N, 64) with 4 heads."""

    def __init__(self, operations: Any, **kwargs: Any) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v, self.to_out = (operations.Linear(WIDTH, WIDTH, **kwargs) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (to(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for to in (self.to_q, self.to_k, self.to_v))
        return self.to_out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class TextEncoder(nn.Module):
    """64 word rows -> (B, 8, 64) conditioning: word and position vectors, one pre-norm transformer layer, LayerNorm.

    The word rows are random normal vectors, so a new word has a vector that no known word uses. Has the
    methods that ComfyUI's `comfy.sd.CLIP` calls on its text model.
    """

    def __init__(
        self,
        dtype: torch.dtype | None = None,
        device: Any = None,
        model_options: Mapping | None = None,
        operations: Any = nn,
    ) -> None:
        super().__init__()
        kwargs: dict[str, Any] = {"dtype": dtype, "device": device}
        self.dtypes = {dtype or torch.float32}
        self.words = operations.Embedding(tokenizer.ROWS, WIDTH, **kwargs)
        self.positions = operations.Embedding(tokenizer.LENGTH, WIDTH, **kwargs)
        self.norm1, self.norm2, self.norm = (operations.LayerNorm(WIDTH, **kwargs) for _ in range(3))
        self.attention = Attention(operations, **kwargs)
        self.ff1, self.ff2 = (
            operations.Linear(WIDTH, 2 * WIDTH, **kwargs),
            operations.Linear(2 * WIDTH, WIDTH, **kwargs),
        )
        self.options: dict[str, Any] = {}

    def forward(self, rows: Tensor) -> Tensor:
        """(B, 8) int64 rows -> (B, 8, 64)."""
        return self.encode(self.words(rows))

    def get_input_embeddings(self) -> nn.Module:
        """The table of word vectors, under the name that ComfyUI's text encoders have for it."""
        return self.words

    def encode(self, vectors: Tensor) -> Tensor:
        """(B, 8, 64) word vectors -> (B, 8, 64)."""
        x = vectors + self.positions(torch.arange(vectors.shape[1], device=vectors.device))
        layer = self.options.get("layer")
        if layer not in (None, -1, -2):
            raise ValueError(
                f"clip layer {layer}: the demo's text encoder has one layer; use -1 (after it) or -2 (before it)"
            )
        if layer != -2:
            x = x + self.attention(self.norm1(x))
            x = x + self.ff2(F.gelu(self.ff1(self.norm2(x))))
        return self.norm(x)

    def encode_token_weights(self, tokens: Mapping[str, list[list[tuple]]]) -> tuple[Tensor, Tensor]:
        """Tokens of `WordTokenizer` -> conditioning (1, 8 * chunks, 64) and its mean (1, 64).

        A word's weight moves its vector away from the empty prompt's: empty + weight * (word - empty), ComfyUI's rule
        for SD1.
        """
        pairs = tokens["words"]
        device = self.options.get("execution_device") or next(self.parameters()).device
        rows, embeddings = _split_tokens(pairs)
        weights = torch.tensor([[pair[1] for pair in chunk] for chunk in pairs], device=device)[..., None]
        rows = rows.to(device)
        vectors = self.words(rows)
        for place, vector in embeddings.items():
            vectors = vectors.index_put(place, vector.to(vectors))
        encoded = self.encode(vectors)
        if (weights != 1.0).any():
            empty = self(torch.full_like(rows[:1], tokenizer.EMPTY))
            encoded = empty + weights * (encoded - empty)
        encoded = encoded.flatten(0, 1)[None].float()
        return encoded, encoded.mean(dim=1)

    def set_clip_options(self, options: Mapping[str, Any]) -> None:
        """ComfyUI's `layer` (clip skip) and `execution_device`."""
        self.options.update(options)

    def reset_clip_options(self) -> None:
        self.options.clear()

    def load_sd(self, state_dict: Mapping[str, Tensor]) -> Any:
        return self.load_state_dict(state_dict, strict=False)


def _split_tokens(pairs: list[list[tuple]]) -> tuple[Tensor, dict[tuple[Tensor, Tensor], Tensor]]:
    """The rows of tokens (B, 8), EMPTY where a token is a vector, and these vectors by (chunk, place in it)."""
    rows = torch.full((len(pairs), tokenizer.LENGTH), tokenizer.EMPTY)
    embeddings = {}
    for number, chunk in enumerate(pairs):
        for place, (token, *_) in enumerate(chunk):
            if tokenizer.is_row(token):
                rows[number, place] = token
            else:
                embeddings[torch.tensor(number), torch.tensor(place)] = token
    return rows, embeddings


def initialize_text_(encoder: nn.Module, seed: int = 0) -> None:
    """The text encoder's fixed weights, in place: normal word rows (std 1) and positions (std 0.5), linear layers with
    std fan_in^-0.5.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in encoder.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif parameter.ndim == 1:
                parameter.fill_(1.0)
            else:
                std = {"words.weight": 1.0, "positions.weight": 0.5}.get(name, parameter.shape[1] ** -0.5)
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)


class PixelVAE:
    """Decodes latents (B, 3, h, w) in -1..1 to pictures (B, 8h, 8w, 3) in 0..1 by bicubic enlarging; encodes by the
    mean of 8 x 8 cells.

    Has the methods and attributes of ComfyUI's `comfy.sd.VAE` that nodes use; it has no weights.
    """

    latent_channels = LATENT_CHANNELS
    latent_dim = 2
    output_channels = 3
    downscale_ratio = SCALE
    upscale_ratio = SCALE
    vae_dtype = torch.float32
    size = 0

    def __init__(self) -> None:
        self.first_stage_model: Any = nn.Identity()

    def throw_exception_if_invalid(self) -> None:
        """Does nothing: no weights are loaded that could be invalid."""

    def encode(self, pixel_samples: Tensor) -> Tensor:
        """(B, H, W, 3 or more) in 0..1 -> (B, 3, H // 8, W // 8); a rest of less than 8 pixels is
        cropped off evenly.
        """
        h, w = pixel_samples.shape[1] // SCALE * SCALE, pixel_samples.shape[2] // SCALE * SCALE
        top, left = (pixel_samples.shape[1] - h) // 2, (pixel_samples.shape[2] - w) // 2
        pixels = pixel_samples[:, top : top + h, left : left + w, :3].movedim(-1, 1).float()
        return F.avg_pool2d(pixels, SCALE) * 2.0 - 1.0

    def decode(self, samples_in: Tensor, vae_options: Mapping | None = None) -> Tensor:
        """(B, 3, h, w) -> (B, 8h, 8w, 3) in 0..1."""
        large = F.interpolate(samples_in.float(), scale_factor=SCALE, mode="bicubic", align_corners=False)
        return (large * 0.5 + 0.5).clamp(0.0, 1.0).movedim(1, -1)

    def encode_tiled(
        self,
        pixel_samples: Tensor,
        tile_x: Any = None,
        tile_y: Any = None,
        overlap: Any = None,
        tile_t: Any = None,
        overlap_t: Any = None,
    ) -> Tensor:
        """`encode`: it needs no more memory than the picture, so tiles would change nothing."""
        return self.encode(pixel_samples)

    def decode_tiled(
        self,
        samples: Tensor,
        tile_x: Any = None,
        tile_y: Any = None,
        overlap: Any = None,
        tile_t: Any = None,
        overlap_t: Any = None,
    ) -> Tensor:
        """`decode`: it needs no more memory than the picture, so tiles would change nothing."""
        return self.decode(samples)

    def spacial_compression_decode(self) -> int:
        return SCALE

    def spacial_compression_encode(self) -> int:
        return SCALE

    def temporal_compression_decode(self) -> None:
        return None

    def is_dynamic(self) -> bool:
        return False

    def get_sd(self) -> dict[str, Tensor]:
        return {}
