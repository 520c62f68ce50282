"""Token downsampling of tiny, randomly initialized transformers of ComfyUI's own classes, against attention thinned by
hand in float64.
"""

import contextlib
import copy
import functools
import importlib
import inspect
import math

import comfy.latent_formats
import comfy.model_base
import comfy.model_management
import comfy.model_patcher
import comfy.sample
import comfy.supported_models_base
import comfyui_version
import pytest
import torch
from comfy.ldm.modules.attention import attention_pytorch
from graft_nodes import host
from graft_nodes.host.plain_kernels import PlainKernels
from graft_nodes.patches.models.attention_kernels import TrainingKernel
from graft_nodes.patches.token_downsampling.attention_override import OVERRIDE
from graft_nodes.patches.token_downsampling.tokens import ToDoSettings
from graft_nodes.training.memory.checkpointing import checkpoint_blocks

from ...sampling_options import sampling_options

FLUX = dict(
    in_channels=4,
    out_channels=4,
    vec_in_dim=8,
    context_in_dim=12,
    hidden_size=32,
    mlp_ratio=2.0,
    num_heads=2,
    depth=1,
    depth_single_blocks=2,
    axes_dim=[4, 6, 6],
    theta=10000,
    patch_size=2,
    qkv_bias=True,
    guidance_embed=False,
    txt_ids_dims=[],
)
FLUX2 = dict(
    FLUX,
    vec_in_dim=None,
    axes_dim=[4, 4, 4, 4],
    theta=2000,
    patch_size=1,
    qkv_bias=False,
    txt_ids_dims=[3],
    global_modulation=True,
    mlp_silu_act=True,
    ops_bias=False,
    default_ref_method="index",
    ref_index_scale=10.0,
)
CHROMA = dict(
    in_channels=16,
    out_channels=16,
    context_in_dim=12,
    hidden_size=32,
    mlp_ratio=2.0,
    num_heads=2,
    depth=1,
    depth_single_blocks=2,
    axes_dim=[4, 6, 6],
    theta=10000,
    patch_size=2,
    qkv_bias=True,
    in_dim=64,
    out_dim=32,
    hidden_dim=16,
    n_layers=1,
    txt_ids_dims=[],
    vec_in_dim=None,
)
RADIANCE = dict(
    CHROMA,
    in_channels=3,
    out_channels=3,
    patch_size=16,
    nerf_hidden_size=8,
    nerf_mlp_ratio=2,
    nerf_depth=1,
    nerf_max_freqs=4,
    nerf_tile_size=0,
    nerf_final_head_type="conv",
    nerf_embedder_dtype=torch.float32,
    use_x0=False,
    use_sequential_txt_ids=False,
)
SD3 = dict(
    input_size=None,
    patch_size=2,
    in_channels=4,
    depth=2,
    adm_in_channels=8,
    pos_embed_max_size=16,
    num_patches=256,
    qk_norm="rms",
    context_embedder_config={"target": "torch.nn.Linear", "params": {"in_features": 12, "out_features": 128}},
)
QWEN = dict(
    patch_size=2,
    in_channels=16,
    out_channels=4,
    num_layers=2,
    attention_head_dim=16,
    num_attention_heads=2,
    joint_attention_dim=12,
    axes_dims_rope=(4, 6, 6),
)
LUMINA = dict(
    patch_size=2,
    in_channels=4,
    dim=32,
    n_layers=2,
    n_refiner_layers=1,
    n_heads=2,
    n_kv_heads=1,
    multiple_of=8,
    ffn_dim_multiplier=2.0,
    qk_norm=True,
    cap_feat_dim=12,
    axes_dims=(4, 6, 6),
    axes_lens=(64, 64, 64),
)
ZIMAGE = dict(
    LUMINA, dim=256, n_heads=16, n_kv_heads=16, z_image_modulation=True, time_scale=1000.0, pad_tokens_multiple=8
)
WAN = dict(
    model_type="t2v", in_dim=4, dim=36, ffn_dim=32, freq_dim=16, text_dim=12, out_dim=4, num_heads=2, num_layers=2
)
COSMOS = dict(
    max_img_h=64,
    max_img_w=64,
    max_frames=16,
    in_channels=4,
    out_channels=4,
    patch_spatial=2,
    patch_temporal=1,
    concat_padding_mask=False,
    model_channels=32,
    num_blocks=2,
    num_heads=2,
    mlp_ratio=2.0,
    crossattn_emb_channels=12,
    pos_emb_cls="rope3d",
    use_adaln_lora=True,
    adaln_lora_dim=8,
)
COSMOS1 = dict(
    COSMOS,
    patch_temporal=1,
    block_x_format="THWBD",
    extra_per_block_abs_pos_emb=True,
    extra_per_block_abs_pos_emb_type="learnable",
    affline_emb_norm=True,
)


def _version(text):
    return tuple(int(part) for part in text.split("."))


class Case:
    """One model: where its class and its attention function are, its settings, its inputs, and the truth about each
    attention call.

    `image` names the modules whose attention is image self-attention; `start` is the number of tokens before the image
    (by the sequence length where there is more than one). `since` is the first of the tested ComfyUIs that has it.
    """

    def __init__(
        self,
        module,
        name,
        attention,
        config,
        latent,
        image,
        start,
        text=5,
        start_by_length=None,
        since="0.3.64",
        **conditions,
    ):
        self.module, self.name, self.attention, self.config, self.latent = module, name, attention, config, latent
        self.image, self.start, self.text, self.conditions = image, start, text, conditions
        self.start_by_length, self.since = start_by_length or {}, _version(since)

    def model_class(self):
        return getattr(importlib.import_module(f"comfy.ldm.{self.module}"), self.name)


LATENT = (2, 4, 7, 9)  # odd sides: padded to 8 x 10, so 4 x 5 tokens of patch 2
VIDEO = (2, 4, 3, 7, 9)
EVEN = (2, 4, 3, 8, 10)  # Cosmos of 0.3.64 does not pad

ROOT = ("flux.math", "optimized_attention")
CASES = {
    "flux": Case("flux.model", "Flux", ROOT, FLUX, LATENT, ("double_blocks", "single_blocks"), 5, y=(8,)),
    "flux with references": Case(
        "flux.model",
        "Flux",
        ROOT,
        FLUX,
        LATENT,
        ("double_blocks", "single_blocks"),
        5,
        y=(8,),
        ref_latents=[(4, 4, 5), (4, 4, 4)],
    ),
    "flux with a mask": Case(
        "flux.model", "Flux", ROOT, FLUX, LATENT, ("double_blocks", "single_blocks"), 5, y=(8,), attention_mask="mask"
    ),
    "flux 2": Case("flux.model", "Flux", ROOT, FLUX2, LATENT, ("double_blocks", "single_blocks"), 5, since="0.8.0"),
    "flux 2 with references": Case(
        "flux.model",
        "Flux",
        ROOT,
        FLUX2,
        LATENT,
        ("double_blocks", "single_blocks"),
        5,
        ref_latents=[(4, 4, 5), (4, 4, 4)],
        since="0.8.0",
    ),
    "chroma": Case(
        "chroma.model", "Chroma", ROOT, CHROMA, LATENT, ("double_blocks", "single_blocks"), 5, guidance="zeros"
    ),
    "chroma radiance": Case(
        "chroma_radiance.model",
        "ChromaRadiance",
        ROOT,
        RADIANCE,
        (2, 3, 60, 75),
        ("double_blocks", "single_blocks"),
        5,
        guidance="zeros",
    ),
    "sd3": Case(
        "modules.diffusionmodules.mmdit",
        "OpenAISignatureMMDITWrapper",
        ("modules.diffusionmodules.mmdit", "optimized_attention"),
        SD3,
        LATENT,
        ("joint_blocks",),
        5,
        y=(8,),
    ),
    "sd3.5 medium": Case(
        "modules.diffusionmodules.mmdit",
        "OpenAISignatureMMDITWrapper",
        ("modules.diffusionmodules.mmdit", "optimized_attention"),
        dict(SD3, x_block_self_attn_layers=[0]),
        LATENT,
        ("joint_blocks",),
        5,
        start_by_length={20: 0},
        y=(8,),
    ),
    "qwen": Case(
        "qwen_image.model",
        "QwenImageTransformer2DModel",
        ("qwen_image.model", "optimized_attention_masked"),
        QWEN,
        (2, 4, 1, 7, 9),
        ("transformer_blocks",),
        5,
    ),
    "qwen edit, masked text": Case(
        "qwen_image.model",
        "QwenImageTransformer2DModel",
        ("qwen_image.model", "optimized_attention_masked"),
        QWEN,
        (2, 4, 1, 7, 9),
        ("transformer_blocks",),
        5,
        ref_latents=[(4, 1, 4, 5)],
        attention_mask="three words",
    ),
    "qwen, layers": Case(
        "qwen_image.model",
        "QwenImageTransformer2DModel",
        ("qwen_image.model", "optimized_attention_masked"),
        QWEN,
        VIDEO,
        ("transformer_blocks",),
        5,
        since="0.8.0",
    ),
    "lumina": Case(
        "lumina.model",
        "NextDiT",
        ("lumina.model", "optimized_attention_masked"),
        LUMINA,
        LATENT,
        ("noise_refiner", "layers"),
        5,
        start_by_length={20: 0},
        num_tokens=5,
    ),
    "lumina, masked text": Case(
        "lumina.model",
        "NextDiT",
        ("lumina.model", "optimized_attention_masked"),
        LUMINA,
        (1, 4, 7, 9),
        ("noise_refiner", "layers"),
        5,
        start_by_length={20: 0, 23: 3},
        num_tokens=3,
        attention_mask="three words",
    ),
    "lumina, as much text as image": Case(
        "lumina.model",
        "NextDiT",
        ("lumina.model", "optimized_attention_masked"),
        LUMINA,
        LATENT,
        ("noise_refiner", "layers"),
        20,
        text=20,
        start_by_length={20: 0},
        num_tokens=20,
    ),
    "z-image omni": Case(
        "lumina.model",
        "NextDiT",
        ("lumina.model", "optimized_attention_masked"),
        ZIMAGE,
        LATENT,
        ("noise_refiner", "layers"),
        24,
        start_by_length={32: 8, 56: 32},
        num_tokens=5,
        ref_latents=[(4, 4, 6)],
        ref_contexts=[(9, 12)],
        since="0.33.0",
    ),
    "z-image omni, as many vision features as pictures": Case(
        "lumina.model",
        "NextDiT",
        ("lumina.model", "optimized_attention_masked"),
        dict(ZIMAGE, siglip_feat_dim=12),
        LATENT,
        ("noise_refiner", "layers"),
        24,
        start_by_length={32: 8, 88: 64},
        num_tokens=5,
        ref_latents=[(4, 4, 6)],
        ref_contexts=[(9, 12)],
        siglip_feats=[(4, 6, 12)],
        since="0.33.0",
    ),
    "z-image": Case(
        "lumina.model",
        "NextDiT",
        ("lumina.model", "optimized_attention_masked"),
        ZIMAGE,
        LATENT,
        ("noise_refiner", "layers"),
        8,
        start_by_length={24: 0},
        num_tokens=5,
        since="0.8.0",
    ),
    "z-image, as much text as image": Case(
        "lumina.model",
        "NextDiT",
        ("lumina.model", "optimized_attention_masked"),
        ZIMAGE,
        LATENT,
        ("noise_refiner", "layers"),
        24,
        text=24,
        start_by_length={24: 0},
        num_tokens=24,
        since="0.8.0",
    ),
    "wan": Case("wan.model", "WanModel", ("wan.model", "optimized_attention"), WAN, VIDEO, ("self_attn",), 0),
    "wan, as much text as image": Case(
        "wan.model", "WanModel", ("wan.model", "optimized_attention"), WAN, VIDEO, ("self_attn",), 0, text=60
    ),
    "wan with a reference": Case(
        "wan.model",
        "WanModel",
        ("wan.model", "optimized_attention"),
        dict(WAN, in_dim_ref_conv=4),
        EVEN,
        ("self_attn",),
        20,
        reference_latent=(4, 8, 10),
    ),
    "wan with more frames": Case(
        "wan.model",
        "WanModel",
        ("wan.model", "optimized_attention"),
        WAN,
        VIDEO,
        ("self_attn",),
        0,
        time_dim_concat=(4, 2, 7, 9),
    ),
    "wan with pictures in context": Case(
        "wan.model",
        "WanModel",
        ("wan.model", "optimized_attention"),
        WAN,
        VIDEO,
        ("self_attn",),
        0,
        context_latents=[(4, 1, 4, 6)],
        since="0.33.0",
    ),
    "wan vace": Case(
        "wan.model",
        "VaceWanModel",
        ("wan.model", "optimized_attention"),
        dict(WAN, vace_layers=1, vace_in_dim=4),
        EVEN,
        ("self_attn",),
        0,
        text=60,
        vace_context=(1, 4, 3, 8, 10),
        vace_strength="strength",
    ),
    "wan image to video": Case(
        "wan.model",
        "WanModel",
        ("wan.model", "optimized_attention"),
        dict(WAN, model_type="i2v"),
        VIDEO,
        ("self_attn",),
        0,
        clip_fea=(60, 1280),
    ),
    "wan camera": Case(
        "wan.model",
        "CameraWanModel",
        ("wan.model", "optimized_attention"),
        dict(WAN, model_type="camera", in_dim_control_adapter=2),
        EVEN,
        ("self_attn",),
        0,
        clip_fea=(60, 1280),
        camera_conditions=(2, 3, 64, 80),
    ),
    "wan humo": Case(
        "wan.model",
        "HumoWanModel",
        ("wan.model", "optimized_attention"),
        WAN,
        VIDEO,
        ("self_attn",),
        0,
        text=60,
        audio_embed=(3, 8, 5, 1280),
        reference_latent=None,
    ),
    "wan humo with a reference": Case(
        "wan.model",
        "HumoWanModel",
        ("wan.model", "optimized_attention"),
        WAN,
        EVEN,
        ("self_attn",),
        0,
        reference_latent=(4, 1, 8, 10),
        audio_embed=(3, 8, 5, 1280),
    ),
    "wan animate": Case(
        "wan.model_animate",
        "AnimateWanModel",
        ("wan.model", "optimized_attention"),
        dict(WAN, in_dim=4),
        EVEN,
        ("self_attn",),
        0,
        pose_latents=(16, 2, 8, 10),
        clip_fea=(60, 1280),
    ),
    "cosmos 1": Case(
        "cosmos.model",
        "GeneralDIT",
        ("cosmos.blocks", "optimized_attention"),
        COSMOS1,
        EVEN,
        ("blocks.0.block.attn",),
        0,
        text=60,
        fps=None,
        padding_mask=None,
    ),
    "cosmos": Case(
        "cosmos.predict2",
        "MiniTrainDIT",
        ("cosmos.predict2", "optimized_attention"),
        COSMOS,
        EVEN,
        ("self_attn",),
        0,
        fps=None,
        padding_mask=None,
    ),
    "cosmos, as much text as image": Case(
        "cosmos.predict2",
        "MiniTrainDIT",
        ("cosmos.predict2", "optimized_attention"),
        COSMOS,
        EVEN,
        ("self_attn",),
        0,
        text=60,
        fps=None,
        padding_mask=None,
    ),
    "anima": Case(
        "anima.model",
        "Anima",
        ("cosmos.predict2", "optimized_attention"),
        COSMOS,
        VIDEO,
        ("self_attn",),
        0,
        fps=None,
        padding_mask=None,
    ),
    "anima, 512 tokens of text and of image": Case(
        "anima.model",
        "Anima",
        ("cosmos.predict2", "optimized_attention"),
        COSMOS,
        (2, 4, 2, 32, 32),
        ("self_attn",),
        0,
        fps=None,
        padding_mask=None,
        t5xxl_ids="words",
    ),
}


def accepted(cls, config):
    """The settings that this version's class has."""
    names = {name for base in cls.__mro__ for name in inspect.signature(base.__init__).parameters}
    module = importlib.import_module(cls.__module__)
    for kind in ("FluxParams", "ChromaParams", "ChromaRadianceParams"):
        if hasattr(module, kind) and kind == f"{cls.__name__}Params":
            names |= set(getattr(module, kind).__dataclass_fields__)
    return {name: value for name, value in config.items() if name in names}


@contextlib.contextmanager
def small_adapter(cls):
    """Anima's text adapter, of its own class, with few weights while the model is built."""
    module = importlib.import_module(cls.__module__)
    before = getattr(module, "LLMAdapter", None)
    if before is None:
        yield
        return
    module.LLMAdapter = functools.partial(before, source_dim=12, target_dim=12, model_dim=16, num_layers=1, num_heads=2)
    try:
        yield
    finally:
        module.LLMAdapter = before


def build(case):
    """A ModelPatcher of one tiny model with random weights."""
    try:
        cls = case.model_class()
    except ModuleNotFoundError:
        pytest.skip(f"this ComfyUI has no {case.module}")
    if _version(comfyui_version.__version__) < case.since:
        pytest.skip(f"ComfyUI {comfyui_version.__version__} has no such {case.name}")
    config = accepted(cls, case.config)

    class Config(comfy.supported_models_base.BASE):
        unet_config = {}  # noqa: RUF012
        unet_extra_config = {}  # noqa: RUF012
        sampling_settings = {"shift": 1.0, "multiplier": 1.0}  # noqa: RUF012
        latent_format = comfy.latent_formats.SD15
        memory_usage_factor = 1.0

    settings = Config(copy.deepcopy(config))
    settings.set_inference_dtype(torch.float32, None)
    with small_adapter(cls):
        model = comfy.model_base.BaseModel(settings, comfy.model_base.ModelType.FLOW, device=None, unet_model=cls)
    generator = torch.Generator().manual_seed(1)
    parameters = dict(model.diffusion_model.named_parameters())
    for name, tensor in model.diffusion_model.state_dict().items():
        if tensor.is_floating_point() and (
            name in parameters or not ("rope" in name or "pos_embedder" in name)
        ):  # frequencies stay
            scale = 0.3 if tensor.ndim < 2 else 1.5 * tensor[0].numel() ** -0.5
            tensor.copy_(
                torch.randn(tensor.shape, generator=generator) * scale + (1.0 if name.endswith("norm.weight") else 0.0)
            )
    return comfy.model_patcher.ModelPatcher(model, load_device=torch.device("cpu"), offload_device=torch.device("cpu"))


def inputs(case):
    """(latent, noise levels, text tokens, conditions), the same every time."""
    generator = torch.Generator().manual_seed(2)

    def random(*shape):
        return torch.randn(*shape, generator=generator)

    batch = case.latent[0]
    conditions = {}
    for name, value in case.conditions.items():
        if value == "zeros":
            value = torch.zeros(batch)
        elif value == "strength":
            value = [0.7]
        elif value == "words":
            value = torch.arange(14).view(2, 7)
        elif value == "three words":
            value = torch.tensor([[1, 1, 1, 0, 0]] * batch)
        elif value == "mask":
            value = torch.where(random(25, 25) > 1.0, -torch.inf, 0.0).fill_diagonal_(0.0)
        elif isinstance(value, tuple):
            value = random(batch, *value)
        elif isinstance(value, list):
            value = [random(batch, *shape) for shape in value]
        conditions[name] = value
    return random(*case.latent), torch.full((batch,), 0.6), random(batch, case.text, 12), conditions


def forward(patcher, case, options=None):
    x, sigma, context, conditions = inputs(case)
    options = patcher.model_options["transformer_options"] if options is None else options
    with torch.no_grad():
        return patcher.model.apply_model(x, sigma, c_crossattn=context, transformer_options=dict(options), **conditions)


def sources(side, factor, method):
    """For each position that stays of one side, the positions that it is the mean of, by each method's definition.

    nearest-exact: the source under each target's center; nearest: under its beginning; area: all that it covers, whole
    or in part.
    """
    target = max(1, math.floor(side / factor))
    if method == "area":
        return [range(index * side // target, -(-(index + 1) * side // target)) for index in range(target)]
    shift = 0.5 if method == "nearest-exact" else 0.0
    return [[min(side - 1, math.floor((index + shift) * side / target))] for index in range(target)]


def thinning_by_hand(case, length, factor, patch, method):
    """The matrix (kept, length) in float64 that takes a sequence to what stays of it."""
    if method == "blend":
        return (
            thinning_by_hand(case, length, factor, patch, "nearest")
            + thinning_by_hand(case, length, factor, patch, "area")
        ) / 2
    frames = (case.latent[2] if len(case.latent) == 5 else 1) + case.conditions.get("time_dim_concat", (0, 0))[1]
    height, width = (math.ceil(side / patch) for side in case.latent[-2:])
    start = case.start_by_length.get(length, case.start)
    image = [
        [start + (frame * height + row) * width + column for row in rows for column in columns]
        for frame in range(frames)
        for rows in sources(height, factor, method)
        for columns in sources(width, factor, method)
    ]
    kept = [*([n] for n in range(start)), *image, *([n] for n in range(start + frames * height * width, length))]
    matrix = torch.zeros(len(kept), length, dtype=torch.float64)
    for row, of in enumerate(kept):
        matrix[row, of] = 1 / len(of)
    return matrix


@contextlib.contextmanager
def attention_by_hand(patcher, case, factor, patch, calls, method="nearest-exact"):
    """Replaces the family's attention function by float64 attention whose image self-attention is thinned by hand.

    Which call that is, is known from the module that is running, not from any length.
    """
    inside = []
    hooks = []
    for name, module in patcher.model.diffusion_model.named_modules():
        parts = name.split(".")
        own = (
            name.endswith(case.image[0])
            if case.image[0].endswith("attn")
            else len(parts) == 2 and parts[0] in case.image
        )
        if own:
            hooks.append(module.register_forward_pre_hook(lambda *_: inside.append(True)))
            hooks.append(module.register_forward_hook(lambda *_: inside.pop() and None, always_call=True))

    def attention(q, k, v, heads, mask=None, *args, skip_reshape=False, skip_output_reshape=False, **kwargs):
        if not skip_reshape:
            q, k, v = (tokens.reshape(*tokens.shape[:2], heads, -1).transpose(1, 2) for tokens in (q, k, v))
        length = q.shape[2]
        q, k, v = q.double(), k.double(), v.double()
        mask = None if mask is None else mask.double()
        if inside:
            matrix = thinning_by_hand(case, length, factor, patch, method)
            calls.append((length, len(matrix)))
            k, v = matrix @ k, matrix @ v
            middle = thinning_by_hand(
                case, length, factor, patch, "nearest" if method == "nearest" else "nearest-exact"
            ).argmax(1)
            mask = None if mask is None else mask[..., middle]
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        if mask is not None:
            scores = scores + (mask if mask.ndim != 3 else mask.unsqueeze(1))
        out = (scores.softmax(-1) @ v).float()
        return out if skip_output_reshape else out.transpose(1, 2).flatten(2)

    module = importlib.import_module(f"comfy.ldm.{case.attention[0]}")
    before = getattr(module, case.attention[1])
    setattr(module, case.attention[1], attention)
    try:
        yield
    finally:
        setattr(module, case.attention[1], before)
        for hook in hooks:
            hook.remove()


def settings(factor=2.0, **options):
    return ToDoSettings(factor=factor, **options)


def close(a, b):
    return (a - b).abs().max() <= 2e-5 * b.abs().max()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("factor", [2.0, 1.5])
def test_equal_to_attention_thinned_by_hand(name, factor):
    case = CASES[name]
    patcher = build(case)
    plain = forward(patcher, case)
    patched, todo, _ = host.token_downsampling.apply_todo(patcher, settings(factor))
    result, calls = forward(patched, case), []
    with attention_by_hand(patcher, case, factor, todo.patch, calls):
        wanted = forward(patcher, case)
    assert torch.isfinite(plain).all()
    twice = 1 if name == "sd3.5 medium" else 0  # a block that attends to the image a second time
    assert len(calls) == todo.depths[1][0] + twice and all(after < before for before, after in calls)
    assert close(result, wanted), f"{(result - wanted).abs().max()} of {wanted.abs().max()}"
    assert not close(result, plain), "thinning must be seen in the output of this random model"
    assert torch.equal(forward(patcher, case), plain), "the unpatched model stays as it was"


@pytest.mark.parametrize("name", CASES)
def test_factor_one_is_the_model_itself(name):
    patcher = build(CASES[name])
    assert host.token_downsampling.apply_todo(patcher, settings(1.0))[0] is patcher


@pytest.mark.parametrize("name", ["flux with a mask", "lumina, masked text", "wan", "sd3.5 medium"])
@pytest.mark.parametrize("factor", [2.0, 1.5])
@pytest.mark.parametrize("method", ["nearest", "area", "blend"])
def test_other_methods_are_equal_to_attention_thinned_by_hand(name, method, factor):
    case = CASES[name]
    patcher = build(case)
    patched, todo, _ = host.token_downsampling.apply_todo(patcher, settings(factor, method=method))
    result, exact = (
        forward(patched, case),
        forward(host.token_downsampling.apply_todo(patcher, settings(factor))[0], case),
    )
    with attention_by_hand(patcher, case, factor, todo.patch, [], method):
        assert close(result, forward(patcher, case)) and not close(result, exact)


@pytest.mark.parametrize("name", ["flux", "wan, as much text as image", "qwen"])
def test_another_override_is_kept_whether_set_before_or_after(name):
    case = CASES[name]
    patcher = build(case)
    seen = []

    def counting(kernel, q, k, v, *args, **kwargs):
        seen.append((q.shape[-2], k.shape[-2]))
        return kernel(q, k, v, *args, **kwargs)

    before = patcher.clone()
    before.model_options["transformer_options"]["optimized_attention_override"] = counting
    one = host.token_downsampling.apply_todo(before, settings())[0]
    two = host.token_downsampling.apply_todo(patcher, settings())[0].clone()
    two.model_options["transformer_options"]["optimized_attention_override"] = counting
    first, count = forward(one, case), len(seen)
    assert count and any(keys < queries for queries, keys in seen)
    assert torch.equal(forward(two, case), first) and len(seen) == 2 * count
    assert torch.equal(first, forward(host.token_downsampling.apply_todo(patcher, settings())[0], case))


def test_an_override_that_needs_equal_lengths_is_named():
    case = CASES["flux"]
    patcher = build(case).clone()

    def picky_kernel(kernel, q, k, v, *args, **kwargs):
        if k.shape[-2] != q.shape[-2]:
            raise ValueError("q and k must have the same length")
        return kernel(q, k, v, *args, **kwargs)

    patcher.model_options["transformer_options"]["optimized_attention_override"] = picky_kernel
    forward(patcher, case)
    with pytest.raises(RuntimeError, match=r"picky_kernel.*fewer keys than queries.*same length"):
        forward(host.token_downsampling.apply_todo(patcher, settings())[0], case)


def test_an_inference_only_kernel_is_refused_by_name_while_training():
    case = CASES["flux"]
    patched = host.token_downsampling.apply_todo(build(case), settings())[0]

    def attention_sage(kernel, *args, **kwargs):
        return kernel(*args, **kwargs)

    options = {**patched.model_options["transformer_options"], "optimized_attention_override": attention_sage}
    forward(patched, case, options)
    options |= {
        "graft_training": {"step": 0, "total_steps": 10},
        OVERRIDE: TrainingKernel(attention_pytorch, attention_sage),
    }
    with pytest.raises(ValueError, match=r"SageAttention.*inference only"):
        forward(patched, case, options)


def test_noise_levels_phase_and_disable_after():
    case = CASES["sd3"]
    patcher = build(case)
    plain = forward(patcher, case)

    def with_options(patched, **options):
        return forward(patched, case, {**patched.model_options["transformer_options"], **options})

    late = host.token_downsampling.apply_todo(patcher, settings(start_percent=0.5))[0]
    assert torch.equal(with_options(late, sigmas=torch.tensor([0.9])), plain)
    assert not torch.equal(with_options(late, sigmas=torch.tensor([0.2])), plain)
    only = host.token_downsampling.apply_todo(patcher, settings(phase="training", disable_after=0.5))[0]
    assert torch.equal(forward(only, case), plain)
    assert not torch.equal(with_options(only, graft_training={"step": 4, "total_steps": 10}), plain)
    assert torch.equal(with_options(only, graft_training={"step": 5, "total_steps": 10}), plain)


def test_noise_levels_are_those_of_a_later_nodes_sampling():
    """Shift 6 puts half of sampling at 0.857; without it that is 0.5."""
    from comfy_extras.nodes_model_advanced import ModelSamplingSD3

    def shifted(patcher):
        found = getattr(ModelSamplingSD3, "execute", ModelSamplingSD3().patch)(patcher, 6.0)
        return found[0] if isinstance(found, tuple) else found.args[0]

    case = CASES["sd3"]
    patcher = build(case)

    def thins(patched, sigma):
        comfy.model_management.load_models_gpu([patched], force_full_load=True)
        options = patched.model_options["transformer_options"]
        found, plain = forward(patched, case, {**options, "sigmas": torch.tensor([sigma])}), forward(patcher, case)
        return not torch.equal(found, plain)

    before = host.token_downsampling.apply_todo(shifted(patcher), settings(start_percent=0.5))[0]
    after = shifted(host.token_downsampling.apply_todo(patcher, settings(start_percent=0.5))[0])
    levels = (0.9, 6 / 7, 0.7, 0.3)  # the second is the level itself, as samplers have it in float32
    assert (
        [thins(before, level) for level in levels]
        == [thins(after, level) for level in levels]
        == [False, True, True, True]
    )


def test_steps_that_easycache_skips_are_not_called_unthinned(caplog):
    from comfy_extras.nodes_easycache import EasyCacheNode

    case = CASES["flux"]
    cached = EasyCacheNode.execute(build(case), 10.0, 0.15, 0.95, False).args[0]
    patched = host.token_downsampling.apply_todo(cached, settings())[0]
    generator, lengths = torch.Generator().manual_seed(1), []

    def note(kernel, q, k, v, *args, **kwargs):
        lengths.append(k.shape[2] < q.shape[2])
        return kernel(q, k, v, *args, **kwargs)

    patched.model_options["transformer_options"][OVERRIDE] = note
    noise = torch.randn(1, 4, 16, 20, generator=generator)
    prompt = [[torch.randn(1, 5, 12, generator=generator), {"pooled_output": torch.randn(1, 8, generator=generator)}]]
    with torch.inference_mode():
        comfy.sample.sample(
            patched,
            noise,
            12,
            1.0,
            "euler",
            "simple",
            prompt,
            prompt,
            torch.zeros_like(noise),
            seed=1,
            disable_pbar=True,
        )
    assert all(lengths) and 0 < len(lengths) < 12 * 3, "some steps come from the cache, the others are thinned"
    assert not [record for record in caplog.records if "thinned nothing" in record.getMessage()]


@pytest.mark.parametrize(("name", "kind"), [("flux 2", "Flux2"), ("wan", "Wan22")])
def test_the_report_has_the_size_that_the_host_samples_an_empty_latent_in(name, kind):
    """EmptyLatentImage makes cells of 8 pixels; newer ComfyUIs resize them to those of the model."""
    from graft_nodes.nodes.apply_todo import ApplyToDo

    import nodes

    (latent,) = nodes.EmptyLatentImage().generate(1024, 512, 1)
    if "downscale_ratio_spacial" not in latent:
        pytest.skip("this ComfyUI samples it as it is")
    patcher = build(CASES[name])
    patcher.model.latent_format = getattr(comfy.latent_formats, kind)()
    noise = comfy.sample.fix_empty_latent_channels(patcher, latent["samples"], latent["downscale_ratio_spacial"])
    data = ApplyToDo.execute(model=patcher, factor=2.0, latent=latent).ui["graft_todo"][0]
    sides, cell = [512 // 16, 1024 // 16], data["depths"][0]["cell"]
    assert list(noise.shape[-2:]) == sides, "else this test says nothing"
    assert data["depths"][0]["before"] == [side // cell for side in sides] and data["latent"] == sides
    assert host.latents.prepare_latent(patcher, latent).shape == noise.shape, "what previews while training begin with"


def test_a_compiled_model_is_thinned_too():
    """Compiled as TorchCompileModel does it while it runs, another class stands in the model's place; run eagerly, for
    speed.
    """
    case = CASES["flux with references"]
    patcher = build(case)
    patched = host.token_downsampling.apply_todo(patcher, settings())[0]
    thinned, plain = forward(patched, case), forward(patcher, case)
    patcher.model.diffusion_model = torch.compile(patcher.model.diffusion_model, backend="eager")
    with torch.compiler.set_stance("force_eager"):
        assert torch.equal(forward(patched, case), thinned) and not torch.equal(thinned, plain)


def test_a_model_that_another_clone_has_compiled_is_planned_as_what_it_is():
    """An object patch puts the compiled module in the place of the shared model's while that clone is loaded."""
    patcher = build(CASES["flux with references"])
    plain = host.token_downsampling.apply_todo(patcher, settings())[1]
    patcher.model.diffusion_model = torch.compile(patcher.model.diffusion_model, backend="eager")
    found = host.token_downsampling.apply_todo(patcher, settings())[1]
    assert (found.name, found.depths, found.patch) == (plain.name, plain.depths, plain.patch)


def test_blocks_whose_keys_another_node_extends_are_counted(caplog):
    """In the single blocks only: the double block is thinned all the same."""

    def longer(q, k, v, extra_options=None, **_):
        single = extra_options["block_type"] == "single"
        return (
            {"k": torch.cat([k, k[:, :, -3:]], 2), "v": torch.cat([v, v[:, :, -3:]], 2), "pe": None} if single else {}
        )

    case, lengths = CASES["flux"], []

    def counting(kernel, q, k, v, *args, **kwargs):
        lengths.append((q.shape[-2], k.shape[-2]))
        return kernel(q, k, v, *args, **kwargs)

    other = build(case).clone()
    other.set_model_attn1_patch(longer)
    patched = host.token_downsampling.apply_todo(other, settings())[0]
    patched.model_options["transformer_options"]["optimized_attention_override"] = counting
    forward(patched, case)
    left = sum(keys > queries for queries, keys in lengths)
    if not left:
        pytest.skip("this ComfyUI's Flux has no attn1 patches")
    assert any(keys < queries for queries, keys in lengths)
    said = [record.getMessage() for record in caplog.records if "Apply ToDo" in record.getMessage()]
    assert said == [f"Apply ToDo left {left} self-attention blocks alone: {left} whose keys another node changed"]


def test_a_second_todo_replaces_the_first():
    case = CASES["wan"]
    patcher = build(case)
    first = host.token_downsampling.apply_todo(patcher, settings(4.0))[0]
    second, _, notes = host.token_downsampling.apply_todo(first, settings(2.0))
    assert torch.equal(
        forward(second, case), forward(host.token_downsampling.apply_todo(patcher, settings(2.0))[0], case)
    )
    assert not torch.equal(forward(second, case), forward(first, case)) and any("replaces" in note for note in notes)


def test_more_than_one_depth_is_refused_with_what_the_model_has():
    with pytest.raises(ValueError, match="this Flux is a transformer: all its 3 blocks"):
        host.token_downsampling.apply_todo(build(CASES["flux"]), ToDoSettings(depth_factors="4 2"))


def test_an_unknown_transformer_is_named():
    import comfy.ldm.hunyuan_video.model

    patcher = build(CASES["flux"])
    model = object.__new__(comfy.ldm.hunyuan_video.model.HunyuanVideo)
    torch.nn.Module.__init__(model)
    patcher.model.diffusion_model = model
    with pytest.raises(TypeError, match=r"does not know where HunyuanVideo keeps its image tokens.*Flux.*WanModel"):
        host.token_downsampling.apply_todo(patcher, settings())


def test_training_gradients_reach_the_weights(monkeypatch):
    case = CASES["wan, as much text as image"]
    patched = host.token_downsampling.apply_todo(build(case), settings())[0]
    x, sigma, context, conditions = inputs(case)
    patched.model.diffusion_model.requires_grad_(True)
    monkeypatch.setattr(comfy.model_management, "in_training", True, raising=False)  # 0.33's own trainer does so
    options = {**patched.model_options["transformer_options"], "graft_training": {"step": 0, "total_steps": 10}}
    with PlainKernels():  # for 0.8.0, which has no in_training
        out = patched.model.apply_model(x, sigma, c_crossattn=context, transformer_options=options, **conditions)
        out.square().mean().backward()
    gradient = patched.model.diffusion_model.blocks[0].self_attn.k.weight.grad
    assert gradient is not None and gradient.abs().sum() > 0


EQUAL = [name for name in CASES if "as much text as image" in name and name[:6] != "cosmos"]  # which 0.33 cannot train


@pytest.mark.parametrize("name", [*EQUAL, "sd3.5 medium"])
def test_gradients_with_checkpointing_are_those_without(monkeypatch, name):
    case = CASES[name]
    monkeypatch.setattr(comfy.model_management, "in_training", True, raising=False)  # 0.33's own trainer does so
    with torch.inference_mode(False):
        patcher = build(case)
        patched = host.token_downsampling.apply_todo(patcher, settings())[0]
        model = patcher.model.diffusion_model.requires_grad_(True)
        x, sigma, context, conditions = inputs(case)
        options = {**patched.model_options["transformer_options"], "graft_training": {"step": 0, "total_steps": 10}}
        found = []
        for around in (contextlib.nullcontext(), checkpoint_blocks(model)):
            model.zero_grad()
            with around, PlainKernels():
                out = patched.model.apply_model(
                    x, sigma, c_crossattn=context, transformer_options=dict(options), **conditions
                )
                out.square().mean().backward()
            found.append({key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys() and len(found[0]) > 10
    assert all(torch.equal(gradient, found[1][key]) for key, gradient in found[0].items())


def test_a_call_in_which_nothing_is_thinned_is_told_once(caplog):
    """A patch that adds tokens of its own, as style references for Flux do."""
    case = CASES["flux"]
    patcher = build(case)

    def longer(args):
        txt, ids = args["txt"], args["txt_ids"]
        return {**args, "txt": torch.cat([txt[:, :3], txt], 1), "txt_ids": torch.cat([ids[:, :3], ids], 1)}

    more = patcher.clone()
    more.model_options["transformer_options"]["patches"] = {"post_input": [longer]}
    wanted, patched = forward(more, case), host.token_downsampling.apply_todo(more, settings())[0]
    assert not caplog.records
    for _ in range(2):
        if torch.equal(wanted, forward(patcher, case)):
            pytest.skip("this ComfyUI has no post_input patches")
        assert torch.equal(forward(patched, case), wanted)
    assert [
        record.message for record in caplog.records if "thinned nothing: no attention had 25 tokens" in record.message
    ] != []
    assert len(caplog.records) == 1


BLOCKS = [f"diffusion_model.{block}" for block in ("double_blocks.0", "single_blocks.0", "single_blocks.1")]


@pytest.mark.parametrize("keys", [["diffusion_model"], BLOCKS])
@pytest.mark.parametrize("method", ["nearest-exact", "area"])
def test_compiled_without_guards_on_options_every_size_is_thinned_as_its_own(keys, method):
    """As ComfyUI 0.33's TorchCompileModel filters guards; other packs compile blocks. Grids of as many tokens share no
    code.
    """
    from comfy_api.torch_helpers import set_torch_compile_wrapper

    case = copy.copy(CASES["flux"])
    patcher = build(case)
    torch._dynamo.reset()
    compiled = patcher.clone()
    blind = {"guard_filter_fn": lambda guards: ["transformer_options" not in guard.name for guard in guards]}
    set_torch_compile_wrapper(model=compiled, backend="eager", options=blind, keys=keys)
    patched = host.token_downsampling.apply_todo(compiled, settings(method=method))[0]
    plain = host.token_downsampling.apply_todo(patcher, settings(method=method))[0]
    for size in ((8, 12), (12, 8), (4, 24), (8, 12)):
        case.latent = (2, 4, *size)
        for on, off in ((patched, plain), (compiled, patcher)):
            assert close(forward(on, case, sampling_options(on)), forward(off, case)), size
    torch._dynamo.reset()
