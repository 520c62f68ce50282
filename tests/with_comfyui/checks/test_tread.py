"""Token routing of tiny, randomly initialized transformers of ComfyUI's own classes, against whole blocks in float64
attention: tokens that skip are masked as keys, and keep what they were in front of each block.
"""

import contextlib
import importlib
import math

import pytest
import torch
from graft_nodes import host
from graft_nodes.host.denoiser import open_denoiser
from graft_nodes.host.token_routing import apply_routing
from graft_nodes.patches.token_downsampling.tokens import ToDoSettings
from graft_nodes.patches.token_routing.settings import RoutingSettings
from graft_nodes.patches.token_routing.token_choice import choose_kept, kept_count
from graft_nodes.training.memory.checkpointing import checkpoint_blocks

from .test_todo_transformers import CASES, Case, build, close, forward, inputs

SEED = 5
ROUTED = (
    "flux",
    "flux with references",
    "flux with a mask",
    "flux 2",
    "flux 2 with references",
    "chroma",
    "chroma radiance",
    "sd3",
    "sd3.5 medium",
    "qwen",
    "qwen edit, masked text",
    "qwen, layers",
    "lumina",
    "lumina, masked text",
    "lumina, as much text as image",
    "z-image",
    "z-image, as much text as image",
    "wan",
    "wan, as much text as image",
    "wan with a reference",
    "wan with more frames",
    "wan with pictures in context",
    "wan image to video",
)
LISTS = ("double_blocks", "single_blocks", "joint_blocks", "transformer_blocks", "layers", "blocks")


def training(patcher, step=0):
    """The options of a training step's forward pass."""
    where = {"step": step, "total_steps": 10, "routing": SEED}
    return {**patcher.model_options["transformer_options"], "graft_training": where}


def blocks(patcher):
    """All blocks in the order in which they run."""
    model = patcher.model.diffusion_model
    return [block for name in LISTS for block in getattr(model, name, ())]


def image_size(case: Case, patcher):
    frames = (case.latent[2] if len(case.latent) == 5 else 1) + case.conditions.get("time_dim_concat", (0, 0))[1]
    patch = patcher.model.diffusion_model.patch_size
    side = patch[1] if isinstance(patch, tuple | list) else patch
    height, width = (math.ceil(length / side) for length in case.latent[-2:])
    return frames * height * width


def image_of(block, args, kwargs):
    """The image tokens that a block is given."""
    name = next((name for name in ("img", "x", "hidden_states") if name in kwargs), None)
    if name is not None:
        return kwargs[name]
    return args[1] if type(block).__name__ == "JointBlock" else args[0]


class ByHand:
    """Blocks that run on all tokens: those that skip are not keys, and come out as they went in."""

    def __init__(self, case, kept, count):
        self.case, self.count = case, count
        self.skips = torch.ones(kept.shape[0], count, dtype=torch.bool).scatter(1, kept, False)
        self.inside, self.lengths = [], []  # the modules whose attention is self-attention, and how long that was
        self.went_in = None

    def enters(self, block, args, kwargs):
        self.went_in = image_of(block, args, kwargs).clone()

    def leaves(self, block, args, out):
        if not isinstance(out, tuple):
            return self.mixed(out, self.case.start_by_length.get(out.shape[1], self.case.start))
        place = int(type(block).__name__ in ("JointBlock", "QwenImageTransformerBlock"))
        return tuple(self.mixed(part, 0) if n == place else part for n, part in enumerate(out))

    def mixed(self, image, start):
        rows = torch.zeros(image.shape[:2], dtype=torch.bool)
        rows[:, start : start + self.count] = self.skips
        return torch.where(rows.unsqueeze(-1), self.went_in, image)

    def attention(self, q, k, v, heads, mask=None, *args, skip_reshape=False, skip_output_reshape=False, **kwargs):
        if not skip_reshape:
            q, k, v = (tokens.reshape(*tokens.shape[:2], heads, -1).transpose(1, 2) for tokens in (q, k, v))
        scores = q.double() @ k.double().transpose(-1, -2) / math.sqrt(q.shape[-1])
        if mask is not None:
            scores = scores + (mask if mask.ndim != 3 else mask.unsqueeze(1)).double()
        if self.inside:
            scores = scores.masked_fill(self.no_keys(q.shape[2]), -torch.inf)
        out = (scores.softmax(-1) @ v.double()).to(q.dtype)
        return out if skip_output_reshape else out.transpose(1, 2).flatten(2)

    def no_keys(self, length):
        self.lengths.append(length)
        start = 0 if length == self.count else self.case.start_by_length.get(length, self.case.start)
        keys = torch.zeros(self.skips.shape[0], 1, 1, length, dtype=torch.bool)
        keys[:, 0, 0, start : start + self.count] = self.skips
        return keys


@contextlib.contextmanager
def skipping_by_hand(case, span, kept, count):
    """The blocks of `span` run as ByHand says."""
    hand, hooks = ByHand(case, kept, count), []
    for block in span:
        hooks.append(block.register_forward_pre_hook(hand.enters, with_kwargs=True))
        hooks.append(block.register_forward_hook(hand.leaves))
        attending = [module for name, module in block.named_modules() if name.endswith("self_attn")]
        for module in attending or [block]:
            hooks.append(module.register_forward_pre_hook(lambda module, _: hand.inside.append(module)))
            hooks.append(module.register_forward_hook(lambda *_: hand.inside.pop() and None))
    module = importlib.import_module(f"comfy.ldm.{case.attention[0]}")
    before = getattr(module, case.attention[1])
    setattr(module, case.attention[1], hand.attention)
    try:
        yield hand.lengths
    finally:
        setattr(module, case.attention[1], before)
        for hook in hooks:
            hook.remove()


@pytest.mark.parametrize("name", ROUTED)
@pytest.mark.parametrize(("first", "last"), [(0, -1), (1, -1), (0, 0)])
def test_equal_to_blocks_that_leave_tokens_alone(name, first, last):
    case = CASES[name]
    patcher = build(case)
    plain = forward(patcher, case)
    patched, plan, _ = apply_routing(patcher, RoutingSettings(0.5, first, last))
    result = forward(patched, case, training(patched))
    every = blocks(patcher)
    assert plan.total == len(every)
    span = every[first : len(every) + last + 1 if last < 0 else last + 1]
    count = image_size(case, patcher)
    kept = choose_kept(SEED, case.latent[0], count, kept_count(count, 0.5), torch.device("cpu"))
    with skipping_by_hand(case, span, kept, count) as lengths:
        wanted = forward(patcher, case)
    assert len(lengths) >= len(span)
    assert close(result, wanted), f"{(result - wanted).abs().max()} of {wanted.abs().max()}"
    assert not close(result, plain), "what skips must be seen in the output of this random model"
    assert torch.equal(forward(patched, case), plain), "outside of training steps nothing skips"
    assert torch.equal(forward(patcher, case), plain), "the model stays as it was"


@pytest.mark.parametrize(
    "name",
    [
        "flux",
        "sd3.5 medium",
        "lumina, as much text as image",
        "wan",
        "cosmos",
        "cosmos, as much text as image",
        "anima",
    ],
)
def test_todo_leaves_the_blocks_alone_that_tokens_skip(name):
    case = CASES[name]
    patcher = build(case)
    routed, _, _ = apply_routing(patcher, RoutingSettings(0.5, 0, -1))
    alone = forward(routed, case, training(routed))
    thinned = host.token_downsampling.apply_todo(patcher, ToDoSettings(factor=2.0))[0]
    for both in (
        host.token_downsampling.apply_todo(routed, ToDoSettings(factor=2.0))[0],
        apply_routing(thinned, RoutingSettings(0.5, 0, -1))[0],
    ):
        result = forward(both, case, training(both))
        refiners = name.startswith("lumina")  # tokens do not skip these, so ToDo works there
        assert torch.equal(result, alone) != refiners
    one, other = (apply_routing(one, RoutingSettings(0.5, 0, 0))[0] for one in (patcher, thinned))
    assert not torch.equal(forward(one, case, training(one)), forward(other, case, training(other)))


@pytest.mark.parametrize("name", ["flux", "chroma", "sd3", "qwen", "z-image", "wan"])
def test_checkpointing_changes_no_byte_of_the_gradients(name):
    case = CASES[name]
    patched, _, _ = apply_routing(build(case), RoutingSettings(0.5, 0, -1))
    model = patched.model.diffusion_model

    def gradients(context):
        x, sigma, text, conditions = inputs(case)
        model.zero_grad(set_to_none=True)
        with context:
            out = patched.model.apply_model(
                x, sigma, c_crossattn=text, transformer_options=training(patched), **conditions
            )
            out.square().sum().backward()
        return {key: one.grad for key, one in model.named_parameters() if one.grad is not None}

    model.requires_grad_(True)
    with open_denoiser(patched):  # as in training: no kernels without a backward pass
        plain, again = gradients(contextlib.nullcontext()), gradients(checkpoint_blocks(model))
    assert plain and plain.keys() == again.keys()
    assert all(torch.equal(value, again[key]) for key, value in plain.items())


@pytest.mark.parametrize("name", ["z-image omni"])
def test_references_at_a_noise_level_of_their_own_are_refused(name):
    case = CASES[name]
    patched, _, _ = apply_routing(build(case), RoutingSettings(0.5, 0, -1))
    with pytest.raises(RuntimeError, match="treats reference images at a noise level of their own"):
        forward(patched, case, training(patched))


@pytest.mark.parametrize("name", ["wan vace", "wan humo", "cosmos 1"])
def test_other_classes_are_refused_by_name(name):
    patcher = build(CASES[name])
    with pytest.raises(TypeError, match=f"does not know how {type(patcher.model.diffusion_model).__name__} calls"):
        apply_routing(patcher, RoutingSettings(0.5))
