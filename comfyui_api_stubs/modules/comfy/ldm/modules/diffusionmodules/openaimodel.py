"""The diffusion UNet of Stable Diffusion 1.x, 2.x and XL in ComfyUI's key layout (Dhariwal 2021; Rombach 2022)."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import comfy.ops
import comfy.patcher_extension

from ..attention import SpatialTransformer
from .util import timestep_embedding

ops = comfy.ops.disable_weight_init


class TimestepBlock(nn.Module):
    """A module whose forward takes the timestep embedding as its second argument."""


def forward_timestep_embed(
    ts,
    x,
    emb,
    context=None,
    transformer_options=None,
    output_shape=None,
    time_context=None,
    num_video_frames=None,
    image_only_indicator=None,
):
    """Run a sequence of layers, giving each what it takes; a forward_timestep_embed_patch may replace a layer of its
    class.
    """
    options = {} if transformer_options is None else transformer_options
    handlers = options.get("patches", {}).get("forward_timestep_embed_patch", ())
    for layer in ts:
        handler = next((function for kind, function in handlers if isinstance(layer, kind)), None)
        if handler is not None:
            x = handler(
                layer, x, emb, context, options, output_shape, time_context, num_video_frames, image_only_indicator
            )
        elif isinstance(layer, TimestepBlock):
            x = layer(x, emb)
        elif isinstance(layer, SpatialTransformer):
            x = layer(x, context, options)
            if "transformer_index" in options:
                options["transformer_index"] += 1
        elif isinstance(layer, Upsample):
            x = layer(x, output_shape=output_shape)
        else:
            x = layer(x)
    return x


class TimestepEmbedSequential(nn.Sequential, TimestepBlock):
    """A sequence that passes timestep embedding and context to the layers that take them."""

    def forward(self, *args, **kwargs):
        """See forward_timestep_embed."""
        return forward_timestep_embed(self, *args, **kwargs)


class Upsample(nn.Module):
    """Nearest-neighbour upsampling to twice the size, or to the size of the skip it will meet."""

    def __init__(
        self, channels, use_conv, dims=2, out_channels=None, padding=1, dtype=None, device=None, operations=ops
    ):
        super().__init__()
        self.channels, self.out_channels, self.use_conv, self.dims = channels, out_channels or channels, use_conv, dims
        if use_conv:
            self.conv = operations.conv_nd(
                dims, channels, self.out_channels, 3, padding=padding, dtype=dtype, device=device
            )

    def forward(self, x, output_shape=None):
        """(B, C, H, W) to (B, C', H', W')."""
        size = [side * 2 for side in x.shape[2:]] if output_shape is None else list(output_shape[2:])
        x = F.interpolate(x, size=size, mode="nearest")
        return self.conv(x) if self.use_conv else x


class Downsample(nn.Module):
    """Half the size, rounded up, by a strided convolution; or rounded down by pooling."""

    def __init__(
        self, channels, use_conv, dims=2, out_channels=None, padding=1, dtype=None, device=None, operations=ops
    ):
        super().__init__()
        self.channels, self.out_channels, self.use_conv, self.dims = channels, out_channels or channels, use_conv, dims
        if use_conv:
            self.op = operations.conv_nd(
                dims, channels, self.out_channels, 3, stride=2, padding=padding, dtype=dtype, device=device
            )
        else:
            self.op = nn.AvgPool2d(kernel_size=2, stride=2)

    def forward(self, x):
        """(B, C, H, W) to (B, C', H', W')."""
        return self.op(x)


class ResBlock(TimestepBlock):
    """Two convolutions with the timestep embedding added, or used as scale and shift, in between, and a skip."""

    def __init__(
        self,
        channels,
        emb_channels,
        dropout,
        out_channels=None,
        use_conv=False,
        use_scale_shift_norm=False,
        dims=2,
        use_checkpoint=False,
        up=False,
        down=False,
        kernel_size=3,
        exchange_temb_dims=False,
        skip_t_emb=False,
        dtype=None,
        device=None,
        operations=ops,
    ):
        super().__init__()
        if exchange_temb_dims or skip_t_emb:
            raise NotImplementedError("temporal residual blocks (video UNets) need a real ComfyUI")
        placed, out = {"dtype": dtype, "device": device}, out_channels or channels

        def conv(channels_in, size):
            return operations.conv_nd(dims, channels_in, out, size, padding=size // 2, **placed)

        self.channels, self.out_channels, self.use_checkpoint = channels, out, use_checkpoint
        self.use_scale_shift_norm, self.updown = use_scale_shift_norm, up or down
        self.in_layers = nn.Sequential(
            operations.GroupNorm(32, channels, **placed), nn.SiLU(), conv(channels, kernel_size)
        )
        resize = Upsample if up else Downsample if down else None
        self.h_upd = resize(channels, False, dims) if resize else nn.Identity()
        self.x_upd = resize(channels, False, dims) if resize else nn.Identity()
        self.emb_layers = nn.Sequential(
            nn.SiLU(), operations.Linear(emb_channels, 2 * out if use_scale_shift_norm else out, **placed)
        )
        self.out_layers = nn.Sequential(
            operations.GroupNorm(32, out, **placed), nn.SiLU(), nn.Dropout(p=dropout), conv(out, kernel_size)
        )
        self.skip_connection = nn.Identity() if out == channels else conv(channels, kernel_size if use_conv else 1)

    def forward(self, x, emb):
        """(B, C, H, W) and (B, E) to (B, C', H, W)."""
        return checkpoint(self._forward, x, emb, use_reentrant=False) if self.use_checkpoint else self._forward(x, emb)

    def _forward(self, x, emb):
        h = self.h_upd(self.in_layers[:-1](x)) if self.updown else None
        x = self.x_upd(x)
        h = self.in_layers(x) if h is None else self.in_layers[-1](h)
        emb = self.emb_layers(emb).type(h.dtype)
        emb = emb.reshape(*emb.shape, *(1 for _ in h.shape[2:]))
        if self.use_scale_shift_norm:
            scale, shift = emb.chunk(2, dim=1)
            h = self.out_layers[1:](self.out_layers[0](h) * (1 + scale) + shift)
        else:
            h = self.out_layers(h + emb)
        return self.skip_connection(x) + h


class Timestep(nn.Module):
    """Sinusoidal embedding as a module."""

    def __init__(self, dim):
        super().__init__()
        self.dim = dim

    def forward(self, t):
        """(B,) to (B, dim)."""
        return timestep_embedding(t, self.dim)


def apply_control(h, control, name):
    """Add the next residual of a ControlNet for this part of the UNet."""
    if control is None or not control.get(name):
        return h
    residual = control[name].pop()
    return h if residual is None else h + residual


class UNetModel(nn.Module):
    """Residual and transformer blocks down, in the middle and up, with skips; honours ComfyUI's transformer_options."""

    def __init__(
        self,
        image_size,
        in_channels,
        model_channels,
        out_channels,
        num_res_blocks,
        dropout=0,
        channel_mult=(1, 2, 4, 8),
        conv_resample=True,
        dims=2,
        num_classes=None,
        use_checkpoint=False,
        dtype=torch.float32,
        num_heads=-1,
        num_head_channels=-1,
        num_heads_upsample=-1,
        use_scale_shift_norm=False,
        resblock_updown=False,
        use_new_attention_order=False,
        use_spatial_transformer=False,
        transformer_depth=1,
        context_dim=None,
        n_embed=None,
        legacy=True,
        disable_self_attentions=None,
        num_attention_blocks=None,
        disable_middle_self_attn=False,
        use_linear_in_transformer=False,
        adm_in_channels=None,
        transformer_depth_middle=None,
        transformer_depth_output=None,
        use_temporal_resblock=False,
        use_temporal_attention=False,
        time_context_dim=None,
        extra_ff_mix_layer=False,
        use_spatial_context=False,
        merge_strategy=None,
        merge_factor=0.0,
        video_kernel_size=None,
        disable_temporal_crossattention=False,
        max_ddpm_temb_period=10000,
        attn_precision=None,
        device=None,
        operations=ops,
    ):
        super().__init__()
        if use_temporal_attention or use_temporal_resblock or n_embed is not None or dims != 2:
            raise NotImplementedError("video UNets and UNets that predict codebook ids need a real ComfyUI")
        if num_heads == -1 and num_head_channels == -1:
            raise ValueError("set num_heads or num_head_channels")
        levels = len(channel_mult)
        self.num_res_blocks = [num_res_blocks] * levels if isinstance(num_res_blocks, int) else list(num_res_blocks)
        if len(self.num_res_blocks) != levels:
            raise ValueError(
                f"num_res_blocks has {len(self.num_res_blocks)} entries, channel_mult {levels}; give one a level"
            )
        self.in_channels, self.model_channels, self.out_channels = in_channels, model_channels, out_channels
        self.dropout, self.channel_mult, self.conv_resample, self.num_classes = (
            dropout,
            channel_mult,
            conv_resample,
            num_classes,
        )
        self.use_checkpoint, self.dtype, self.num_heads, self.num_head_channels = (
            use_checkpoint,
            dtype,
            num_heads,
            num_head_channels,
        )
        self.num_heads_upsample = num_heads if num_heads_upsample == -1 else num_heads_upsample
        self.predict_codebook_ids, self.default_num_video_frames = False, None
        placed, emb = {"dtype": dtype, "device": device, "operations": operations}, model_channels * 4
        plain = {"dtype": dtype, "device": device}
        depth_in, depth_out = list(transformer_depth), list(transformer_depth_output)

        def res_block(channels, out=None, **resize):
            return ResBlock(
                channels,
                emb,
                dropout,
                out_channels=out,
                dims=dims,
                use_checkpoint=use_checkpoint,
                use_scale_shift_norm=use_scale_shift_norm,
                **resize,
                **placed,
            )

        def transformer(channels, depth, disable_self_attn):
            heads = num_heads if num_head_channels == -1 else channels // num_head_channels
            return SpatialTransformer(
                channels,
                heads,
                channels // heads,
                depth=depth,
                context_dim=context_dim,
                disable_self_attn=disable_self_attn,
                use_linear=use_linear_in_transformer,
                use_checkpoint=use_checkpoint,
                attn_precision=attn_precision,
                **placed,
            )

        def transformers(channels, depth, level, index):
            wanted = num_attention_blocks is None or index < num_attention_blocks[level]
            no_self = disable_self_attentions is not None and disable_self_attentions[level]
            return [transformer(channels, depth, no_self)] if depth > 0 and wanted else []

        def resample(kind, channels):
            if resblock_updown:
                return res_block(channels, channels, **{"up" if kind is Upsample else "down": True})
            return kind(channels, conv_resample, dims=dims, out_channels=channels, **placed)

        def mlp(channels):
            return nn.Sequential(
                operations.Linear(channels, emb, **plain), nn.SiLU(), operations.Linear(emb, emb, **plain)
            )

        self.time_embed = mlp(model_channels)
        if num_classes == "sequential":
            self.label_emb: nn.Module = nn.Sequential(mlp(adm_in_channels))
        elif isinstance(num_classes, int):
            self.label_emb = nn.Embedding(num_classes, emb, **plain)
        elif num_classes is not None:
            raise NotImplementedError(f"num_classes {num_classes!r} needs a real ComfyUI")

        channels, skips = model_channels, [model_channels]
        self.input_blocks = nn.ModuleList(
            [TimestepEmbedSequential(operations.conv_nd(dims, in_channels, model_channels, 3, padding=1, **plain))]
        )
        for level, mult in enumerate(channel_mult):
            for i in range(self.num_res_blocks[level]):
                block = res_block(channels, mult * model_channels)
                channels = mult * model_channels
                self.input_blocks.append(
                    TimestepEmbedSequential(block, *transformers(channels, depth_in.pop(0), level, i))
                )
                skips.append(channels)
            if level != levels - 1:
                self.input_blocks.append(TimestepEmbedSequential(resample(Downsample, channels)))
                skips.append(channels)

        self.middle_block = None
        if transformer_depth_middle >= 0:
            self.middle_block = TimestepEmbedSequential(
                res_block(channels),
                transformer(channels, transformer_depth_middle, disable_middle_self_attn),
                res_block(channels),
            )
        elif transformer_depth_middle == -1:
            self.middle_block = TimestepEmbedSequential(res_block(channels))

        self.output_blocks = nn.ModuleList()
        for level, mult in reversed(list(enumerate(channel_mult))):
            for i in range(self.num_res_blocks[level] + 1):
                block = res_block(channels + skips.pop(), mult * model_channels)
                channels = mult * model_channels
                layers = [block, *transformers(channels, depth_out.pop(), level, i)]
                if level and i == self.num_res_blocks[level]:
                    layers.append(resample(Upsample, channels))
                self.output_blocks.append(TimestepEmbedSequential(*layers))

        self.out = nn.Sequential(
            operations.GroupNorm(32, channels, **plain),
            nn.SiLU(),
            operations.conv_nd(dims, model_channels, out_channels, 3, padding=1, **plain),
        )

    def forward(self, x, timesteps=None, context=None, y=None, control=None, transformer_options=None, **kwargs):
        """(B, C, H, W), (B,), (B, M, context_dim) and, for a class-conditional model, (B, adm) to (B, C', H, W)."""
        options = {} if transformer_options is None else transformer_options
        return comfy.patcher_extension.WrapperExecutor.new_class_executor(
            self._forward,
            self,
            comfy.patcher_extension.get_all_wrappers(comfy.patcher_extension.WrappersMP.DIFFUSION_MODEL, options),
        ).execute(x, timesteps, context, y, control, options, **kwargs)

    def _forward(self, x, timesteps=None, context=None, y=None, control=None, transformer_options=None, **kwargs):
        options = {} if transformer_options is None else transformer_options
        patches = options.get("patches", {})
        options["original_shape"], options["transformer_index"] = list(x.shape), 0
        if (y is None) != (self.num_classes is None):
            raise ValueError(
                "give y (pooled text and sizes) if and only if the model is class-conditional; "
                f"this one has num_classes {self.num_classes!r} and y is {'missing' if y is None else 'given'}"
            )

        emb = self.time_embed(timestep_embedding(timesteps, self.model_channels).to(x.dtype))
        for patch in patches.get("emb_patch", ()):
            emb = patch(emb, self.model_channels, options)
        if y is not None:
            emb = emb + self.label_emb(y)

        h, skips = x, []
        for i, block in enumerate(self.input_blocks):
            options["block"] = ("input", i)
            h = apply_control(block(h, emb, context, options), control, "input")
            for patch in patches.get("input_block_patch", ()):
                h = patch(h, options)
            skips.append(h)
            for patch in patches.get("input_block_patch_after_skip", ()):
                h = patch(h, options)

        options["block"] = ("middle", 0)
        if self.middle_block is not None:
            h = self.middle_block(h, emb, context, options)
        h = apply_control(h, control, "middle")

        for i, block in enumerate(self.output_blocks):
            options["block"] = ("output", i)
            skip = apply_control(skips.pop(), control, "output")
            for patch in patches.get("output_block_patch", ()):
                h, skip = patch(h, skip, options)
            h = block(torch.cat([h, skip], dim=1), emb, context, options, skips[-1].shape if skips else None)
        return self.out(h.type(x.dtype))
