"""Apply TREAD on the open host's own UNet and transformers, and in training runs."""

import contextlib

import pytest
import torch
from graft_nodes.host.token_routing import apply_routing, routing_of
from graft_nodes.patches.token_routing.settings import RoutingSettings
from graft_nodes.patches.token_routing.token_choice import choose_kept, kept_count
from graft_nodes.training.memory.checkpointing import checkpoint_blocks

from .test_training import _bytes, _clear, _inputs, _run, _workflow, lora_metadata, pictures, run  # noqa: F401

SEED = 5


def training(patcher, step=0):
    where = {"step": step, "total_steps": 10, "routing": SEED}
    return {**patcher.model_options["transformer_options"], "graft_training": where}


def forward(patcher, options=None):
    generator = torch.Generator().manual_seed(2)
    x, text = torch.randn(2, 4, 16, 24, generator=generator), torch.randn(2, 7, 24, generator=generator)
    if options is None:
        options = patcher.model_options["transformer_options"]
    return patcher.model.apply_model(x, torch.full((2,), 0.6), c_crossattn=text, transformer_options=dict(options))


def row_by_row(block, seed, ratio, x, context, transformer_options):
    """A block's output for (B, N, C), each row called by itself with the tokens that stay."""
    kept = choose_kept(seed, x.shape[0], x.shape[1], kept_count(x.shape[1], ratio), x.device)
    rows = []
    for row, staying in enumerate(kept):
        one = slice(row, row + 1)
        out = type(block).forward(block, x[one, staying], context[one], transformer_options)
        rows.append(x[row].index_copy(0, staying, out[0]))
    return torch.stack(rows)


@contextlib.contextmanager
def skipping_by_hand(unet, ratio):
    """The deepest transformers' blocks, called row by row with the tokens that stay."""
    number = 0
    changed = []
    for module in unet.modules():
        blocks = getattr(module, "transformer_blocks", None)
        if blocks is None or blocks[0].attn1.heads * blocks[0].attn1.dim_head != 64:
            continue
        for block in blocks:

            def forward(x, context=None, transformer_options={}, *, block=block, number=number):  # noqa: B006
                count = x.shape[1]
                kept = choose_kept(SEED + number, x.shape[0], count, kept_count(count, ratio), x.device)
                rows = []
                for row, staying in enumerate(kept):
                    out = type(block).forward(
                        block, x[row : row + 1, staying], context[row : row + 1], transformer_options
                    )
                    rows.append(x[row].index_copy(0, staying, out[0]))
                return torch.stack(rows)

            changed.append(block)
            block.forward = forward
        number += 1
    assert number == 4
    try:
        yield
    finally:
        for block in changed:
            del block.forward


def test_a_unet_is_equal_to_blocks_called_with_the_tokens_that_stay(small):
    patcher = small.unet(depth=(1, 2))
    with torch.no_grad():
        plain = forward(patcher)
        patched, plan, _ = apply_routing(patcher, RoutingSettings(0.5))
        result = forward(patched, training(patched))
        with skipping_by_hand(patcher.model.diffusion_model, 0.5):
            wanted = forward(patcher)
        assert (result - wanted).abs().max() <= 1e-5 * wanted.abs().max()
        assert (result - plain).abs().max() > 1e-3 * plain.abs().max()
        assert torch.equal(forward(patched), plain) and torch.equal(forward(patcher), plain)
    assert (plan.skipped, plan.total) == (8, 11)


def test_checkpointing_changes_no_byte_of_the_gradients(small):
    patched, _, _ = apply_routing(small.unet(), RoutingSettings(0.5))
    model = patched.model.diffusion_model.requires_grad_(True)

    def gradients(context):
        model.zero_grad(set_to_none=True)
        with context:
            forward(patched, training(patched)).square().sum().backward()
        return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}

    plain, again = gradients(contextlib.nullcontext()), gradients(checkpoint_blocks(model))
    assert plain and plain.keys() == again.keys()
    assert all(torch.equal(value, again[name]) for name, value in plain.items())
    assert not any("forward" in module.__dict__ for module in model.modules()), "no trace afterwards"


def test_gradients_equal_finite_differences(small):
    patched, _, _ = apply_routing(small.unet(dtype=torch.float64), RoutingSettings(0.5))
    model = patched.model.diffusion_model
    weight = model.middle_block[1].transformer_blocks[0].attn1.to_v.weight.requires_grad_(True)
    forward(patched, training(patched)).double().square().mean().backward()
    slope = float(weight.grad.norm())
    direction = weight.grad / slope
    step, values = 1e-2, []
    with torch.no_grad():
        for sign in (1, -1):
            weight += sign * step * direction
            values.append(float(forward(patched, training(patched)).double().square().mean()))
            weight -= sign * step * direction
    measured = (values[0] - values[1]) / (2 * step)
    assert measured == pytest.approx(slope, rel=1e-2)


def test_the_last_one_on_a_model_counts_and_ratio_0_takes_it_off(small):
    patcher = small.unet()
    same, _, _ = apply_routing(patcher, RoutingSettings(0.0))
    assert same is patcher
    one, _, replaced = apply_routing(patcher, RoutingSettings(0.5))
    assert not replaced and routing_of(patcher) is None
    two, _, replaced = apply_routing(one, RoutingSettings(0.25))
    assert replaced and routing_of(two).settings.ratio == 0.25 and routing_of(one).settings.ratio == 0.5
    off, _, replaced = apply_routing(two, RoutingSettings(0.0))
    assert replaced and routing_of(off) is None and routing_of(two) is not None


def _routed(host, pictures, run, steps, **settings):  # noqa: F811
    prompt = _workflow(host, pictures, run, steps)
    prompt["8"] = _inputs(host, "ApplyTREAD", model=["1", 0], **{"start_layer": 0, "end_layer": -1, **settings})
    prompt["7"]["inputs"]["model"] = ["8", 0]
    return prompt


def test_it_is_used_in_training_and_noted(host, pictures, run):  # noqa: F811
    plain = _run(host, _workflow(host, pictures, run, 2), lora=["10", 3], state=["10", 0])
    routed = _run(host, _routed(host, pictures, run, 2), lora=["10", 3], state=["10", 0], text=["8", 1])
    assert _bytes(plain["lora"]) != _bytes(routed["lora"])
    assert plain["state"].start.model != routed["state"].start.model and not routed["state"].subject.unhashed
    metadata = lora_metadata(routed["state"])
    assert (metadata["ss_tread_ratio"], metadata["ss_tread_end_layer"]) == ("0.5", "-1")
    assert "ss_tread_ratio" not in lora_metadata(plain["state"])
    assert "a random 50% of the image's tokens skips" in routed["text"]


def test_the_same_tokens_skip_when_a_run_goes_on(host, pictures, run):  # noqa: F811
    whole = _run(host, _routed(host, pictures, run, 4), lora=["10", 3])
    _clear(host, run)
    prompt = _routed(host, pictures, run, 2)
    prompt["11"] = {**prompt["10"], "inputs": {**prompt["10"]["inputs"], "state": ["10", 0]}}
    assert _bytes(_run(host, prompt, lora=["11", 3])["lora"]) == _bytes(whole["lora"])


def test_todo_leaves_the_blocks_alone_that_tokens_skip_and_says_so(host, pictures, run, caplog):  # noqa: F811
    prompt = _routed(host, pictures, run, 2)
    prompt["9"] = _inputs(host, "ApplyToDo", model=["8", 0], factor=2.0)  # the demo attends at one width alone
    prompt["7"]["inputs"]["model"] = ["9", 0]
    both = _run(host, prompt, lora=["10", 3], state=["10", 0])
    alone = _run(host, _routed(host, pictures, run, 2), lora=["10", 3])
    assert _bytes(both["lora"]) == _bytes(alone["lora"])
    assert "Apply ToDo left 3 self-attention blocks alone" in caplog.text
    assert {"ss_tread_ratio", "ss_todo_factor"} <= lora_metadata(both["state"]).keys()


def test_it_ends_where_it_is_told(host, pictures, run):  # noqa: F811
    runs = [
        _run(host, _routed(host, pictures, run, 2, disable_after=after), state=["10", 0])["state"].history.loss
        for after in (0.0, 1.0)
    ]
    plain = _run(host, _workflow(host, pictures, run, 2), state=["10", 0])["state"].history.loss
    assert runs[0][0] == runs[1][0] != plain[0]
    assert runs[0][1] != runs[1][1]
