"""Token routing of every family of models: a training step's forward pass against whole blocks in float64 attention,
where tokens that skip are masked as keys and keep what they were in front of each block.
"""

import contextlib
import dataclasses
import math
import sys
from collections.abc import Mapping

import comfyui_version
import pytest
import torch
from families import build, conditioning, conditions, latents, parts_of
from graft_nodes import host as wall
from graft_nodes.host.token_routing import apply_routing
from graft_nodes.patches.token_routing.settings import RoutingSettings
from graft_nodes.patches.token_routing.token_choice import choose_kept, kept_count
from graft_nodes.training.memory.checkpointing import checkpoint_blocks
from tiny_families import CLIPS, EVERY

SEED = 5
SPANS = [(0, -1), (1, -1), (0, 0)]  # first and last layer
OLD = tuple(int(part) for part in comfyui_version.__version__.split(".")) < (0, 33)


@dataclasses.dataclass(frozen=True)
class Blocks:
    """A list of blocks: its path, where a block's image is in its arguments and in what it returns, and how many other
    tokens are in front of the image there: None where it is the whole sequence, as attention has it.
    """

    path: str
    image: str | int | tuple[str | int, int]
    returned: int | None = None
    start: int | None = 0


@dataclasses.dataclass(frozen=True)
class Truth:
    """What is known about a tiny model: its blocks, how many tokens its image has, {number of an attention's keys: how
    many are in front of the image's}, and whether all rows keep the same tokens.
    """

    blocks: tuple[Blocks, ...]
    count: int
    keys: Mapping[int, int]
    shared: bool = False
    settings: Mapping[str, object] = dataclasses.field(default_factory=dict)


def _flux(count, keys):
    return Truth((Blocks("double_blocks", "img", 0), Blocks("single_blocks", 0, start=None)), count, keys)


def _behind_text(path, argument, count, text=6, after=0):
    return Truth((Blocks(path, argument, start=None),), count, {text + count + after: text})


def _alone(path, argument, count, **more):
    return Truth((Blocks(path, argument),), count, {count: 0}, **more)


_WAN = _alone("blocks", 0, 20)
_TEXT_IN_FRONT = 0 if OLD else 6  # of HunyuanVideo's image
_QWEN = Blocks("transformer_blocks", "hidden_states", 1)
TRUTHS = {
    "sd3": Truth((Blocks("joint_blocks", 1, 1),), 20, {26: 6, 20: 0}),
    "flux": _flux(20, {26: 6}),
    "flux schnell": _flux(20, {26: 6}),
    "flux kontext": _flux(20, {32: 6}),
    "flux2": _flux(80, {592: 512}),
    "krea2": _behind_text("blocks", 0, 20),
    "chroma": _flux(20, {26: 6}),
    "radiance": _flux(20, {26: 6}),
    "qwen": Truth((_QWEN,), 20, {26: 6}),
    "qwen edit": Truth((_QWEN,), 20, {32: 6}),
    "lumina2": Truth((Blocks("layers", 0, start=None),), 20, {26: 6, 24: 4}),  # older ComfyUIs leave out masked text
    "z-image": _behind_text("layers", 0, 20, text=8, after=4),
    "wan": _WAN,
    "wan i2v": _WAN,
    "wan 2.2 i2v": _WAN,
    "wan 2.2": _WAN,
    "hunyuan": _flux(20, {26: _TEXT_IN_FRONT}),
    "hunyuan 1.5": _flux(20, {30: 0 if OLD else 10}),
    "hunyuan image": _flux(80, {86: _TEXT_IN_FRONT}),
    "ltx": _alone("transformer_blocks", 0, 80),
    "ltx 2": Truth((Blocks("transformer_blocks", (0, 0), 0),), 80, {80: 0}),
    "ltx 2 sound": Truth((Blocks("transformer_blocks", (0, 0), 0),), 40, {40: 0}),
    "cosmos": _alone("blocks", 0, 20),
    "anima": _alone("blocks", 0, 20),
    "ernie": Truth((Blocks("layers", 0),), 80, {86: 0}),
    "hidream": Truth(
        (Blocks("double_stream_blocks", "image_tokens", 0), Blocks("single_stream_blocks", "image_tokens")),
        20,
        {36: 0},
    ),
    "hidream o1": Truth((Blocks("language_model.layers", "x", 0, None),), 6, {10: 4}, shared=True),
    "ideogram 4": _behind_text("layers", 0, 80),
    "kandinsky 5": _alone("visual_transformer_blocks", 0, 20),
    "kandinsky 5 image": _alone("visual_transformer_blocks", 0, 20),
    "ace-step 1.5": _alone("decoder.layers", "hidden_states", 10, shared=True, settings={"sliding_window": 2}),
    "stable audio": Truth((Blocks("transformer.layers", 0, start=None),), 20, {21: 1}, shared=True),
    "auraflow": Truth((Blocks("double_layers", 1, 1), Blocks("single_layers", 0, start=None)), 20, {34: 14}),
    "pixart": _alone("blocks", 0, 400),
    "omnigen2": _behind_text("layers", 0, 20),
}
UNETS = ("sd1", "sd2-v", "sdxl")
REFUSED = {
    "ace-step": "its feed-forward layers mix neighboring moments, so none can be left out",
}


class ByHand:
    """Blocks that run on all tokens: those that skip are not keys, and come out as they went in."""

    def __init__(self, truth, seed=SEED):
        self.truth, self.seed = truth, seed
        self.inside, self.masked, self.went_in = False, 0, None

    def skips(self, rows):
        """Which of the image's tokens skip, (rows, count)."""
        count = self.truth.count
        draws = 1 if self.truth.shared else rows
        kept = choose_kept(self.seed, draws, count, kept_count(count, 0.5), torch.device("cpu")).expand(rows, -1)
        return torch.ones(rows, count, dtype=torch.bool).scatter(1, kept, False)

    def enters(self, blocks):
        def enter(_, args, kwargs):
            place, *rest = blocks.image if isinstance(blocks.image, tuple) else (blocks.image,)
            image = kwargs[place] if isinstance(place, str) else args[place]
            self.went_in, self.inside = (image[rest[0]] if rest else image).clone(), True

        return enter

    def leaves(self, blocks):
        def leave(_, args, out):
            self.inside = False
            if blocks.returned is None:
                return self.restored(out, blocks.start)
            return tuple(
                self.restored(part, blocks.start) if place == blocks.returned else part
                for place, part in enumerate(out)
            )

        return leave

    def restored(self, image, start):
        before, after = self.went_in.flatten(1, -2), image.flatten(1, -2)
        assert before.shape == after.shape
        if start is None:
            start = self.truth.keys[after.shape[1]]
        rows = torch.zeros(after.shape[:2], dtype=torch.bool)
        rows[:, start : start + self.truth.count] = self.skips(len(rows))
        return torch.where(rows.unsqueeze(-1), before, after).view(image.shape)

    def attention(
        self, q, k, v, heads, mask=None, *args, skip_reshape=False, skip_output_reshape=False, enable_gqa=False, **_
    ):
        if not skip_reshape:
            q, k, v = (tokens.reshape(*tokens.shape[:2], heads, -1).transpose(1, 2) for tokens in (q, k, v))
        if enable_gqa:
            k, v = (tokens.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for tokens in (k, v))
        scores = q.double() @ k.double().transpose(-1, -2) / math.sqrt(q.shape[-1])
        if mask is not None:
            mask = torch.where(mask, 0.0, -torch.inf) if mask.dtype == torch.bool else mask.double()
            if mask.ndim == 2 and mask.shape[0] == q.shape[0] != q.shape[2]:
                mask = mask.view(len(mask), 1, 1, -1)
            scores = scores + (mask if mask.ndim != 3 else mask.unsqueeze(1))
        if self.inside and k.shape[2] in self.truth.keys:
            self.masked += 1
            start = self.truth.keys[k.shape[2]]
            none = torch.zeros(len(k), 1, 1, k.shape[2], dtype=torch.bool)
            none[:, 0, 0, start : start + self.truth.count] = self.skips(len(k))
            scores = scores.masked_fill(none, -torch.inf)
        out = (scores.softmax(-1) @ v.double()).to(q.dtype)
        return out if skip_output_reshape else out.transpose(1, 2).flatten(2)


@contextlib.contextmanager
def skipping_by_hand(spans):
    """Blocks run as ByHand says: [[(block, its Blocks), …], …] and the truth and the seed of each span."""
    hands, hooks, before = [], [], []
    for span, truth, seed in spans:
        hand = ByHand(truth, seed)
        hands.append(hand)
        for block, blocks in span:
            hooks.append(block.register_forward_pre_hook(hand.enters(blocks), with_kwargs=True))
            hooks.append(block.register_forward_hook(hand.leaves(blocks)))

    def attention(*args, **kwargs):
        hand = next((one for one in hands if one.inside), hands[0])
        return hand.attention(*args, **kwargs)

    for name, module in list(sys.modules.items()):
        for function in ("optimized_attention", "optimized_attention_masked"):
            if name.startswith("comfy.ldm.") and hasattr(module, function):
                before.append((module, function, getattr(module, function)))
                setattr(module, function, attention)
    try:
        yield hands
    finally:
        for module, function, plain in before:
            setattr(module, function, plain)
        for hook in hooks:
            hook.remove()


def denoised(denoiser, name, options=None, frames=None, beside=None):
    """What training computes for a batch of two, with entries beside the text."""
    x, parts = latents(name, 4, 2, frames), parts_of(name, frames)
    texts = [conditions(name, seed) for seed in (3, 4)]
    texts = [conditioning(context, {**extras, **(beside or {})}, parts) for context, extras in texts]
    return denoiser.denoise(x, denoiser.sigma(torch.tensor([0.6, 0.3])), texts, options or {})


def predicted(patcher, name, options=None, **given):
    with torch.no_grad(), wall.denoiser.open_denoiser(patcher) as denoiser:
        return denoised(denoiser, name, options, **given)


def step():
    return {"graft_training": {"step": 0, "total_steps": 10, "routing": SEED}}


def close(one, other):
    return (one - other).abs().max() <= 1e-4 * other.abs().max()


def with_routing(patcher, first=0, last=-1):
    return apply_routing(patcher, RoutingSettings(0.5, first, last))


def equal_to_skipping_by_hand(patcher, name, spans, first=0, last=-1, **given):
    plain = predicted(patcher, name, **given)
    patched, plan, _ = with_routing(patcher, first, last)
    result = predicted(patched, name, step(), **given)
    with skipping_by_hand(spans) as hands:
        wanted = predicted(patcher, name, **given)
    assert all(hand.masked >= len(span[0]) for hand, span in zip(hands, spans, strict=True))
    assert torch.isfinite(result).all()
    assert close(result, wanted), f"{(result - wanted).abs().max()} of {wanted.abs().max()}"
    assert not close(result, plain), "what skips must be seen in the output of this random model"
    assert torch.equal(predicted(patched, name, **given), plain), "outside of training steps nothing skips"
    assert torch.equal(predicted(patcher, name, **given), plain), "the model stays as it was"
    return plan


def all_blocks(patcher, truth):
    model = patcher.model.diffusion_model
    return [(block, blocks) for blocks in truth.blocks for block in model.get_submodule(blocks.path)]


@pytest.mark.column("tread")
@pytest.mark.parametrize("name", EVERY)
def test_tokens_skip_blocks_or_the_error_says_why(name, record_property):
    truth = TRUTHS.get(name)
    patcher = build(name, **(truth.settings if truth else {}))
    if name in REFUSED:
        with pytest.raises(TypeError, match=f"does not work on .*: {REFUSED[name]}"):
            with_routing(patcher)
        record_property("says", f"no: {REFUSED[name]}")
        return
    model = patcher.model.diffusion_model
    if name in UNETS:
        transformers = [
            module.transformer_blocks
            for module in model.modules()
            if type(module).__name__ == "SpatialTransformer" and module.in_channels == 128
        ]
        spans = [
            ([(block, Blocks("", 0)) for block in blocks], Truth((), 64, {64: 0}), SEED + number)
            for number, blocks in enumerate(transformers)
        ]
        assert len(spans) > 2
        equal_to_skipping_by_hand(patcher, name, spans)
        return
    every = all_blocks(patcher, truth)
    for first, last in SPANS:
        span = every[first : len(every) if last < 0 else last + 1]
        plan = equal_to_skipping_by_hand(patcher, name, [(span, truth, SEED)], first, last)
        assert plan.total == len(every)


@pytest.mark.parametrize("name", CLIPS)
def test_tokens_of_all_frames_of_a_clip_skip_blocks(name):
    truth = TRUTHS[name]
    per_frame = truth.count // (EVERY[name].latent[1])
    count = 3 * per_frame
    keys = {length - truth.count + count: start for length, start in truth.keys.items()}
    patcher, truth = build(name), dataclasses.replace(truth, count=count, keys=keys)
    equal_to_skipping_by_hand(patcher, name, [(all_blocks(patcher, truth), truth, SEED)], frames=3)


_PICTURE = torch.randn(1, 16, 4, 6, generator=torch.Generator().manual_seed(7))  # 2 x 3 tokens
_EDITED = torch.randn(1, 16, 8, 10, generator=torch.Generator().manual_seed(7))  # beside the image: 4 x 10 tokens
BESIDE = {  # (family, settings, what is beside the text, image's tokens, keys, where a double block's image begins)
    "hunyuan, a reference picture": (
        "hunyuan",
        {},
        {"ref_latent": _PICTURE.unsqueeze(2)},
        20,
        {32: 6 if OLD else 12},
        6,
    ),
    "omnigen2, a reference picture": ("omnigen2", {}, {"reference_latents": [_PICTURE]}, 20, {32: 12}, None),
    "krea2, a reference picture": (
        "krea2",
        {"default_ref_method": "index"},
        {"reference_latents": [_PICTURE.unsqueeze(2)]},
        20,
        {32: 6},
        None,
    ),
    "krea2, a reference picture without a method": (
        "krea2",
        {},
        {"reference_latents": [_PICTURE.unsqueeze(2)]},
        20,
        {26: 6},
        None,
    ),
    "hidream, a picture to edit": ("hidream", {}, {"concat_latent_image": _EDITED}, 40, {56: 0}, 0),
}


@pytest.mark.parametrize("case", BESIDE)
def test_other_pictures_stay_where_they_are(case):
    name, settings, beside, count, keys, start = BESIDE[case]
    patcher, truth = build(name, **settings), TRUTHS[name]
    blocks = truth.blocks
    if start is not None:
        blocks = (dataclasses.replace(blocks[0], start=start), *blocks[1:])
    truth = dataclasses.replace(truth, blocks=blocks, count=count, keys=keys)
    equal_to_skipping_by_hand(patcher, name, [(all_blocks(patcher, truth), truth, SEED)], beside=beside)


@pytest.mark.parametrize(
    ("name", "beside", "says"),
    [
        (
            "krea2",
            {"reference_latents": [_PICTURE.unsqueeze(2)], "reference_latents_method": "index_timestep_zero"},
            "SingleStreamBlock treats reference images at a noise level of their own, so tokens cannot skip it",
        ),
        (
            "hunyuan",
            {"guiding_frame_index": 0},
            "DoubleStreamBlock treats reference images at a noise level of their own, so tokens cannot skip it",
        ),
        (
            "ltx",
            {"denoise_mask": torch.rand(1, 1, 1, 8, 10)},
            "BasicTransformerBlock gets a noise level for each frame, so tokens cannot skip it",
        ),
        (
            "ltx 2",
            {"denoise_mask": torch.rand(1, 1, 1, 8, 10)},
            "BasicAVTransformerBlock gets a noise level for each frame, so tokens cannot skip it",
        ),
    ],
)
def test_noise_levels_of_their_own_are_refused(name, beside, says):
    patched = with_routing(build(name))[0]
    with pytest.raises(RuntimeError, match=says):
        predicted(patched, name, step(), beside=beside)
    assert torch.isfinite(predicted(patched, name, beside=beside)).all(), "sampling takes it"


@pytest.mark.parametrize("name", [name for name in EVERY if name in TRUTHS])
def test_checkpointing_changes_no_byte_of_the_gradients(name):
    patched = with_routing(build(name, **TRUTHS[name].settings))[0]
    model = patched.model.diffusion_model

    def gradients(context):
        model.zero_grad(set_to_none=True)
        with wall.denoiser.open_denoiser(patched) as denoiser, context:
            model.requires_grad_(True)
            denoised(denoiser, name, step()).square().sum().backward()
        return {key: one.grad for key, one in model.named_parameters() if one.grad is not None}

    plain, again = gradients(contextlib.nullcontext()), gradients(checkpoint_blocks(model))
    assert len(plain) > 10 and plain.keys() == again.keys()
    assert all(torch.equal(value, again[key]) for key, value in plain.items())
