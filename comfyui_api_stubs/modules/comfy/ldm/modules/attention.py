"""Attention blocks of diffusion UNets in ComfyUI's key layout, with its attention patches and overrides."""

import functools
from collections.abc import Callable

import torch.nn.functional as F
from torch import nn

import comfy.ops

ops = comfy.ops.disable_weight_init
REGISTERED_ATTENTION_FUNCTIONS: dict[str, Callable] = {}


def register_attention_function(name, func):
    """Make an attention function known by name; the first one registered stays."""
    REGISTERED_ATTENTION_FUNCTIONS.setdefault(name, func)


def wrap_attn(func):
    """Let transformer_options["optimized_attention_override"] replace an attention function, but not inside the
    override itself.
    """

    @functools.wraps(func)
    def wrapper(*args, **kwargs):
        if "_inside_attn_wrapper" in kwargs:
            return func(*args, **kwargs)
        override = (kwargs.get("transformer_options") or {}).get("optimized_attention_override")
        kwargs["_inside_attn_wrapper"] = True
        return func(*args, **kwargs) if override is None else override(func, *args, **kwargs)

    return wrapper


@wrap_attn
def attention_pytorch(
    q, k, v, heads, mask=None, attn_precision=None, skip_reshape=False, skip_output_reshape=False, **kwargs
):
    """(B, N, heads*D) or, with skip_reshape, (B, heads, N, D) to the same shape: PyTorch's scaled dot-product
    attention.
    """
    if not skip_reshape:
        q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (q, k, v))
    if mask is not None:
        mask = mask.reshape((1,) * (3 - mask.ndim) + tuple(mask.shape)) if mask.ndim < 3 else mask
        mask = mask.unsqueeze(1) if mask.ndim == 3 else mask
    out = comfy.ops.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=0.0, is_causal=False)
    return out if skip_output_reshape else out.transpose(1, 2).flatten(2)


optimized_attention = attention_pytorch
optimized_attention_masked = attention_pytorch
register_attention_function("pytorch", attention_pytorch)


class GEGLU(nn.Module):
    """Gated GELU (Shazeer 2020)."""

    def __init__(self, dim_in, dim_out, dtype=None, device=None, operations=ops):
        super().__init__()
        self.proj = operations.Linear(dim_in, dim_out * 2, dtype=dtype, device=device)

    def forward(self, x):
        """(…, dim_in) to (…, dim_out)."""
        x, gate = self.proj(x).chunk(2, dim=-1)
        return x * F.gelu(gate)


class FeedForward(nn.Module):
    """A hidden layer with GELU, gated or not."""

    def __init__(self, dim, dim_out=None, mult=4, glu=False, dropout=0.0, dtype=None, device=None, operations=ops):
        super().__init__()
        hidden, placed = int(dim * mult), {"dtype": dtype, "device": device}
        first = (
            GEGLU(dim, hidden, operations=operations, **placed)
            if glu
            else nn.Sequential(operations.Linear(dim, hidden, **placed), nn.GELU())
        )
        self.net = nn.Sequential(first, nn.Dropout(dropout), operations.Linear(hidden, dim_out or dim, **placed))

    def forward(self, x):
        """(B, N, dim) to (B, N, dim_out)."""
        return self.net(x)


class CrossAttention(nn.Module):
    """Attention of queries to a context, or to themselves without one."""

    def __init__(
        self,
        query_dim,
        context_dim=None,
        heads=8,
        dim_head=64,
        dropout=0.0,
        attn_precision=None,
        dtype=None,
        device=None,
        operations=ops,
    ):
        super().__init__()
        inner, context_dim, placed = heads * dim_head, context_dim or query_dim, {"dtype": dtype, "device": device}
        self.heads, self.dim_head, self.attn_precision = heads, dim_head, attn_precision
        self.to_q = operations.Linear(query_dim, inner, bias=False, **placed)
        self.to_k = operations.Linear(context_dim, inner, bias=False, **placed)
        self.to_v = operations.Linear(context_dim, inner, bias=False, **placed)
        self.to_out = nn.Sequential(operations.Linear(inner, query_dim, **placed), nn.Dropout(dropout))

    def forward(self, x, context=None, value=None, mask=None, transformer_options=None):
        """(B, N, query_dim), context and value (B, M, context_dim) to (B, N, query_dim)."""
        context = x if context is None else context
        q, k, v = self.to_q(x), self.to_k(context), self.to_v(context if value is None else value)
        masked = () if mask is None else (mask,)
        attention = optimized_attention if mask is None else optimized_attention_masked
        return self.to_out(
            attention(
                q,
                k,
                v,
                self.heads,
                *masked,
                attn_precision=self.attn_precision,
                transformer_options={} if transformer_options is None else transformer_options,
            )
        )


class BasicTransformerBlock(nn.Module):
    """Self-attention, cross-attention and feed-forward, each pre-normalised and residual, with ComfyUI's patches in
    between.
    """

    def __init__(
        self,
        dim,
        n_heads,
        d_head,
        dropout=0.0,
        context_dim=None,
        gated_ff=True,
        checkpoint=True,
        ff_in=False,
        inner_dim=None,
        disable_self_attn=False,
        disable_temporal_crossattention=False,
        switch_temporal_ca_to_sa=False,
        attn_precision=None,
        dtype=None,
        device=None,
        operations=ops,
    ):
        super().__init__()
        if ff_in or inner_dim not in (None, dim) or disable_temporal_crossattention or switch_temporal_ca_to_sa:
            raise NotImplementedError("temporal transformer blocks (video UNets) need a real ComfyUI")
        placed = {"dtype": dtype, "device": device}
        heads = {
            "heads": n_heads,
            "dim_head": d_head,
            "dropout": dropout,
            "attn_precision": attn_precision,
            "operations": operations,
        }
        self.disable_self_attn, self.n_heads, self.d_head, self.attn_precision = (
            disable_self_attn,
            n_heads,
            d_head,
            attn_precision,
        )
        self.attn1 = CrossAttention(dim, context_dim if disable_self_attn else None, **heads, **placed)
        self.ff = FeedForward(dim, dropout=dropout, glu=gated_ff, operations=operations, **placed)
        self.attn2 = CrossAttention(dim, context_dim, **heads, **placed)
        self.norm1 = operations.LayerNorm(dim, **placed)
        self.norm2 = operations.LayerNorm(dim, **placed)
        self.norm3 = operations.LayerNorm(dim, **placed)

    def _attend(self, name, x, context, options, extra):
        """One attention with its input patches, replacement and output patches: (B, N, C) to (B, N, C)."""
        attention, patches, value = getattr(self, name), options.get("patches", {}), None
        if f"{name}_patch" in patches:
            context = x if context is None else context
            value = context
            for patch in patches[f"{name}_patch"]:
                x, context, value = patch(x, context, value, extra)
        replace = options.get("patches_replace", {}).get(name, {})
        block = options.get("block")
        numbered = None if block is None else (block[0], block[1], options.get("block_index", 0))
        replacement = replace.get(numbered, replace.get(block))
        if replacement is None:
            x = attention(x, context=context, value=value, transformer_options=options)
        else:
            context = x if context is None else context
            value = context if value is None else value
            x = attention.to_out(replacement(attention.to_q(x), attention.to_k(context), attention.to_v(value), extra))
        for patch in patches.get(f"{name}_output_patch", ()):
            x = patch(x, extra)
        return x

    def forward(self, x, context=None, transformer_options=None):
        """(B, N, dim) with context (B, M, context_dim) to (B, N, dim)."""
        options = {} if transformer_options is None else transformer_options
        extra = {key: value for key, value in options.items() if key not in ("patches", "patches_replace")}
        extra.update(n_heads=self.n_heads, dim_head=self.d_head, attn_precision=self.attn_precision)
        x = x + self._attend("attn1", self.norm1(x), context if self.disable_self_attn else None, options, extra)
        for patch in options.get("patches", {}).get("middle_patch", ()):
            x = patch(x, extra)
        x = x + self._attend("attn2", self.norm2(x), context, options, extra)
        return x + self.ff(self.norm3(x))


class SpatialTransformer(nn.Module):
    """Transformer blocks over the pixels of a feature map, between 1x1 convolutions or linear layers."""

    def __init__(
        self,
        in_channels,
        n_heads,
        d_head,
        depth=1,
        dropout=0.0,
        context_dim=None,
        disable_self_attn=False,
        use_linear=False,
        use_checkpoint=True,
        attn_precision=None,
        dtype=None,
        device=None,
        operations=ops,
    ):
        super().__init__()
        contexts = context_dim if isinstance(context_dim, list) else [context_dim] * depth
        inner, placed = n_heads * d_head, {"dtype": dtype, "device": device}
        self.in_channels, self.use_linear = in_channels, use_linear
        self.norm = operations.GroupNorm(num_groups=32, num_channels=in_channels, eps=1e-6, affine=True, **placed)
        layer = operations.Linear if use_linear else functools.partial(operations.Conv2d, kernel_size=1)
        self.proj_in = layer(in_channels, inner, **placed)
        self.transformer_blocks = nn.ModuleList(
            BasicTransformerBlock(
                inner,
                n_heads,
                d_head,
                dropout=dropout,
                context_dim=contexts[i],
                disable_self_attn=disable_self_attn,
                checkpoint=use_checkpoint,
                attn_precision=attn_precision,
                operations=operations,
                **placed,
            )
            for i in range(depth)
        )
        self.proj_out = layer(inner, in_channels, **placed)

    def forward(self, x, context=None, transformer_options=None):
        """(B, C, H, W) with context (B, M, context_dim), or one context a block, to (B, C, H, W)."""
        options = {} if transformer_options is None else transformer_options
        contexts = context if isinstance(context, list) else [context] * len(self.transformer_blocks)
        options["activations_shape"] = list(x.shape)
        skip, (height, width) = x, x.shape[-2:]
        x = self.norm(x)
        if not self.use_linear:
            x = self.proj_in(x)
        x = x.movedim(1, 3).flatten(1, 2).contiguous()
        if self.use_linear:
            x = self.proj_in(x)
        for i, block in enumerate(self.transformer_blocks):
            options["block_index"] = i
            x = block(x, context=contexts[i], transformer_options=options)
        if self.use_linear:
            x = self.proj_out(x)
        x = x.unflatten(1, (height, width)).movedim(3, 1).contiguous()
        if not self.use_linear:
            x = self.proj_out(x)
        return x + skip
