"""ApplyToDo on a UNet of the open host's class, against attention blocks that are fed with thinned tokens by hand."""

import contextlib

import pytest
import torch
import torch.nn.functional as F

# build_unet(mult=(1, 2), depth=(1, 1)): self-attention at both levels
DEPTHS = {
    "input_blocks.1": 0, "output_blocks.2": 0, "output_blocks.3": 0,
    "input_blocks.3": 1, "middle_block": 1, "output_blocks.0": 1, "output_blocks.1": 1,
}  # fmt: skip


@contextlib.contextmanager
def thinned_by_hand(patcher, size, factors, method):
    """Every attn1 attends to F.interpolate of its own tokens; the grid is worked out from the latent's size."""

    def attend(module, grid, factor):
        original = module.forward

        def forward(x, context=None, value=None, **keywords):
            image = x.transpose(1, 2).reshape(x.shape[0], -1, *grid)
            target = [max(1, int(side // factor)) for side in grid]
            thin = F.interpolate(image, size=target, mode=method).flatten(2).transpose(1, 2)
            return original(x, context=thin, value=thin, **keywords)

        module.forward = forward

    unet, changed = patcher.model.diffusion_model, []
    for name, module in unet.named_modules():
        level = next((level for block, level in DEPTHS.items() if name.startswith(f"{block}.")), None)
        if name.endswith(".attn1") and level is not None and level < len(factors):
            attend(module, [-(-side // 2**level) for side in size], factors[level])
            changed.append(module)
    assert len(changed) == {1: 3, 2: 7}[len(factors)]
    try:
        yield
    finally:
        for module in changed:
            del module.forward


@pytest.mark.parametrize("size", [(8, 8), (13, 10), (9, 21)])
@pytest.mark.parametrize(("factors", "method"), [((2.0,), "nearest-exact"), ((3.0, 1.5), "nearest"), ((2.5, 2.5), "area")])
def test_a_unet_at_any_size(host, small, size, factors, method):
    model = small.unet()
    patched, report = host.call("ApplyToDo", model=model, depth_factors=" ".join(map(str, factors)), method=method)
    plain, result = small.forward(model, size), small.forward(patched, size)
    with thinned_by_hand(model, size, factors, method):
        expected = small.forward(model, size)
    assert torch.equal(result, expected) and not torch.equal(result, plain)
    assert torch.equal(small.forward(model, size), plain)
    assert "depth 1" in report


def test_factor_one_and_removal_change_no_bit(host, small):
    model = small.unet()
    before, plain = small.Snapshot(model.model), small.forward(model)
    assert torch.equal(small.forward(host.call("ApplyToDo", model=model, factor=1.0)[0]), plain)
    small.forward(host.call("ApplyToDo", model=model, factor=2.0)[0])
    assert torch.equal(small.forward(model), plain)
    before.check(model.model)


def test_with_a_stack_in_either_order(host, small):
    model, state = small.unet(), small.lora(small.unet())
    first = host.call("LoRAStackPatch", model=host.call("ApplyToDo", model=model)[0], lora_model=state)[0]
    second = host.call("ApplyToDo", model=host.call("LoRAStackPatch", model=model, lora_model=state)[0])[0]
    assert torch.equal(small.forward(first), small.forward(second))


def test_among_other_attention_patches(host, small):
    """Patches set before and after it both run and see every token; one that extends K and V makes a block that is left alone."""
    seen = []

    def watching(q, k, v, options):
        seen.append(k.shape[1])
        return q, k, v

    def extending(q, k, v, options):
        return q, torch.cat((k, k), 1), torch.cat((v, v), 1)

    model = small.unet(mult=(1,), depth=(1,))
    before = model.clone()
    before.set_model_attn1_patch(watching)
    after = host.call("ApplyToDo", model=before)[0].clone()
    after.set_model_attn1_patch(watching)
    assert torch.equal(small.forward(after), small.forward(host.call("ApplyToDo", model=model)[0]))
    assert seen == [64] * 8
    extended = model.clone()
    extended.set_model_attn1_patch(extending)
    assert torch.equal(small.forward(host.call("ApplyToDo", model=extended)[0]), small.forward(extended))


def test_part_of_the_schedule(host, small):
    """apply_model at sigma 1, which lies in the last third of an eps schedule."""
    model = small.unet()
    plain, always = small.forward(model), small.forward(host.call("ApplyToDo", model=model)[0])
    early = host.call("ApplyToDo", model=model, end_percent=0.2)[0]
    late = host.call("ApplyToDo", model=model, start_percent=0.2)[0]
    assert torch.equal(small.forward(early), plain) and torch.equal(small.forward(late), always)


def test_training_phase_is_off_while_sampling(host, small):
    model = small.unet()
    assert torch.equal(small.forward(host.call("ApplyToDo", model=model, phase="training")[0]), small.forward(model))


def test_report_counts_for_a_latent(host, small):
    report = host.call("ApplyToDo", model=small.unet(), factor=2.0, max_depth=2, latent={"samples": torch.zeros(1, 4, 33, 20)})[1]
    assert "660" in report and "160" in report and "170" in report and "40" in report  # 33x20 -> 16x10, 17x10 -> 8x5


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"depth_factors": "2 2 2"}, "2"),
        ({"depth_factors": "2 x"}, "'x'"),
        ({"factor": float("nan")}, "factor"),
        ({"factor": 0.5}, "factor"),
    ],
)
def test_bad_input(host, small, inputs, message):
    model = small.unet()
    with pytest.raises(ValueError, match=message):
        host.call("ApplyToDo", model=model, **inputs)
    assert not model.model_options["transformer_options"].get("patches")


def test_a_model_without_self_attention(host, small):
    with pytest.raises(ValueError, match="no attention"):
        host.call("ApplyToDo", model=small.unet(mult=(1, 2), depth=(0, 0)))
