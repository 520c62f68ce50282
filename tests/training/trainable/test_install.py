"""What is trained: the choice of modules, the math at the activations against patched weights, and the names of the
result.
"""

import copy

import pytest
import torch
from graft_nodes.training.trainable.install import attach, init_trainable, limit_norms_, make_lora
from graft_nodes.training.trainable.settings import AdapterSettings
from graft_nodes.training.trainable.targets import adapter_targets
from torch import nn


def _net(lab):
    return lab.Flow().module.double().eval()


def _trained(net, settings, seed=0):
    """A beginning with up weights that are not zero, in float64."""
    base = {name: p.detach() for name, p in net.named_parameters()}
    out = {name: t.double() for name, t in init_trainable(net, settings, seed, base).items()}
    draws = torch.Generator().manual_seed(5)
    return {
        name: t if "down" in name else torch.randn(t.shape, generator=draws, dtype=torch.float64) * 0.2
        for name, t in out.items()
    }


def _still():
    return 0, 0, ""


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (AdapterSettings(targets="attention"), {"attn1.to_q", "attn1.to_out"}),
        (AdapterSettings(targets="attention+ff"), {"attn1.to_q", "attn1.to_out", "ff", "proj_in"}),
        (AdapterSettings(targets="all"), {"attn1.to_q", "attn1.to_out", "ff", "proj_in"}),
        (AdapterSettings("locon", targets="all"), {"attn1.to_q", "attn1.to_out", "ff", "proj_in", "conv"}),
        (AdapterSettings(targets="all", pattern="*.ff, /attn1\\.to_q$/"), {"attn1.to_q", "ff"}),
        (AdapterSettings(targets="all", pattern="!*attn*"), {"ff", "proj_in"}),
    ],
)
def test_targets(lab, settings, expected):
    found = adapter_targets(_net(lab), settings)
    assert set(found) == {f"blocks.{i}.{name}" for i in (0, 1) for name in expected}


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("", {"blocks.0.self_attn.q"}),
        ("*attn*", {"blocks.0.self_attn.q"}),
        ("llm_adapter.*", {"llm_adapter.blocks.0.self_attn.q"}),
        ("*, llm_adapter.*", {"blocks.0.self_attn.q", "llm_adapter.blocks.0.self_attn.q"}),
        ("*, /^llm_adapter/, !llm_adapter.*", {"blocks.0.self_attn.q"}),
    ],
)
@pytest.mark.parametrize("preset", ["attention", "attention+ff", "all"])
def test_a_text_encoder_inside_the_network_is_trained_only_when_it_is_named(preset, pattern, expected):
    block = {"blocks": nn.ModuleList([nn.ModuleDict({"self_attn": nn.ModuleDict({"q": nn.Linear(4, 4)})})])}
    net = nn.ModuleDict({**block, "llm_adapter": nn.ModuleDict(copy.deepcopy(block))})
    assert set(adapter_targets(net, AdapterSettings(targets=preset, pattern=pattern))) == expected


@pytest.mark.parametrize(
    ("preset", "pattern", "read"),
    [
        ("attention", "", False),
        ("attention+ff", "", False),
        ("all", "", True),
        ("attention", "*, txt_in.*", True),
        ("all", "!txt_in.*", False),
    ],
)
def test_what_reads_text_before_the_blocks_is_trained_with_all_or_when_it_is_named(preset, pattern, read):
    block = {"blocks": nn.ModuleList([nn.ModuleDict({"self_attn": nn.ModuleDict({"q": nn.Linear(4, 4)})})])}
    net = nn.ModuleDict({**block, "txt_in": nn.ModuleDict(copy.deepcopy(block))})
    found = set(adapter_targets(net, AdapterSettings(targets=preset, pattern=pattern)))
    assert found - {"blocks.0.self_attn.q"} == ({"txt_in.blocks.0.self_attn.q"} if read else set())


def test_a_choice_of_nothing_says_what_there_is(lab):
    with pytest.raises(ValueError, match=r"layer filter 'nothing' choose no module.*blocks\.0\.conv"):
        adapter_targets(_net(lab), AdapterSettings(targets="all", pattern="nothing"))


@pytest.mark.parametrize("kind", ["lora", "locon"])
def test_beside_the_activations_is_the_patched_weight(lab, kind):
    settings = AdapterSettings(kind, rank=3, alpha=1.5, targets="all")
    net, x = _net(lab), torch.randn(2, 4, 6, 6, dtype=torch.float64)
    trained = _trained(net, settings)
    with attach(net, settings, trained, _still):
        found = net(x, 0.0)
    patched = _net(lab)
    with torch.no_grad():
        for path, target in adapter_targets(patched, settings).items():
            up, down = trained[f"{path}.lora_up.weight"], trained[f"{path}.lora_down.weight"]
            weight = target.module.weight
            weight += 0.5 * (up.flatten(1) @ down.flatten(1)).view(weight.shape)
    assert not torch.allclose(found, net(x, 0.0), atol=1e-3)
    assert torch.allclose(found, patched(x, 0.0), atol=1e-12)


def test_full_weights_are_targets_where_a_module_has_its_own(lab):
    net = _net(lab)
    targets = adapter_targets(net, AdapterSettings("full", targets="all"))
    assert sum(p.numel() for target in targets.values() for p in target.module.parameters()) == sum(
        p.numel() for p in net.parameters()
    )


def test_full_weights_are_used_and_given_as_differences(lab):
    settings, net = AdapterSettings("full", targets="all"), _net(lab)
    base = {name: p.detach().clone() for name, p in net.named_parameters()}
    trained = {name: t.double() + 0.25 for name, t in init_trainable(net, settings, 0, base).items()}
    assert trained.keys() == base.keys()
    with attach(net, settings, trained, _still):
        assert all(torch.equal(p, base[name] + 0.25) for name, p in net.named_parameters())
    lora = make_lora(trained, settings, base)

    def named(name):
        return "diffusion_model." + (
            name.replace(".bias", ".diff_b") if name.endswith(".bias") else name.replace(".weight", ".diff")
        )

    assert set(lora) == {named(name) for name in base}
    assert all(torch.allclose(t, torch.full_like(t, 0.25)) for t in lora.values())


def test_names_of_a_lora(lab):
    settings = AdapterSettings(rank=3, alpha=6.0)
    trained = _trained(_net(lab), settings)
    lora = make_lora(trained, settings, None)
    assert len(lora) == 3 * len(trained) // 2
    assert float(lora["diffusion_model.blocks.1.attn1.to_q.alpha"]) == 6.0
    assert lora["diffusion_model.blocks.1.attn1.to_q.lora_up.weight"].shape == (4, 3)
    assert lora["diffusion_model.blocks.1.attn1.to_q.lora_down.weight"].shape == (3, 4)
    assert all(t.dtype == torch.float32 for t in lora.values())


def test_the_start_depends_on_seed_and_name_alone(lab):
    net = _net(lab)
    small, large = (init_trainable(net, AdapterSettings(targets=t), 7, {}) for t in ("attention", "all"))
    assert all(torch.equal(small[name], large[name]) for name in small)
    other = init_trainable(net, AdapterSettings(targets="attention"), 8, {})
    name = "blocks.0.attn1.to_q.lora_down.weight"
    assert not torch.equal(small[name], other[name])
    assert not torch.equal(small[name], small["blocks.1.attn1.to_q.lora_down.weight"])
    assert small[name].abs().max() <= 4**-0.5 and small[name].std() == pytest.approx(4**-0.5 / 3**0.5, rel=0.25)
    assert all(not t.any() for n, t in small.items() if "lora_up" in n)


def test_an_initial_lora_is_gone_on_from_at_its_own_scale(lab):
    net, given = _net(lab), AdapterSettings(rank=3, alpha=1.5)
    trained = {name: t.float() for name, t in _trained(net, given).items()}
    file = make_lora(trained, given, None)
    settings = AdapterSettings(rank=3, alpha=6.0, initial=file)
    start = init_trainable(net, settings, 0, {})
    for name in trained:
        if "lora_up" in name:
            down = name.replace("lora_up", "lora_down")
            assert torch.allclose(2.0 * start[name] @ start[down], 0.5 * trained[name] @ trained[down], atol=1e-6)
    assert settings.initial_digest and settings != AdapterSettings(rank=3, alpha=6.0)


def test_an_initial_lora_that_does_not_fit_is_listed(lab):
    net = _net(lab)
    file = make_lora(_trained(net, AdapterSettings(rank=2)), AdapterSettings(rank=2), None)
    file["diffusion_model.blocks.0.attn1.to_q.lora_up.weight"][0, 0] = float("nan")
    file["diffusion_model.other.lora_up.weight"] = torch.zeros(1, 1)
    with pytest.raises(ValueError, match=r"expected \(3, 4\), got \(2, 4\)[\s\S]*|other") as caught:
        init_trainable(net, AdapterSettings(rank=3, initial=file), 0, {})
    assert "other.lora_up.weight: not a tensor" in str(caught.value) and str(caught.value).count("expected") == 8
    with pytest.raises(ValueError, match="not finite"):
        init_trainable(net, AdapterSettings(rank=2, initial=file), 0, {})


def test_max_norm_limits_the_product(lab):
    settings = AdapterSettings("locon", rank=2, alpha=4.0, targets="all", max_norm=0.3)
    trained = _trained(_net(lab), settings)

    def norms():
        ups = [name for name in trained if "lora_up" in name]
        return torch.stack(
            [2.0 * (trained[n].flatten(1) @ trained[n.replace("up", "down")].flatten(1)).norm() for n in ups]
        )

    before = norms()
    assert limit_norms_(trained, settings) == int((before > 0.3).sum()) > 0
    assert torch.allclose(norms(), before.clamp(max=0.3), atol=1e-9)


@pytest.mark.parametrize("name", ["rank_dropout", "module_dropout", "network_dropout"])
def test_dropout_is_drawn_from_the_moment_and_keeps_the_mean(lab, name):
    settings = AdapterSettings(rank=4, targets="all", pattern="blocks.0.ff", **{name: 0.4})
    net, x = _net(lab), torch.randn(2, 4, 3, 3, dtype=torch.float64)
    trained = _trained(net, settings)
    part = net.blocks[0].ff

    def run(step, purpose="part 0"):
        with attach(net, settings, trained, lambda: (0, step, purpose)):
            return part(x.movedim(1, -1)) - torch.nn.functional.linear(x.movedim(1, -1), part.weight, part.bias)

    assert torch.equal(run(1), run(1))
    whole = run(1, "")
    many = torch.stack([run(step) for step in range(400)])
    assert len({tuple(m.flatten().tolist()) for m in many}) > 1
    keep = 0.6 if name == "module_dropout" else 1.0  # kohya does not rescale what module dropout leaves out
    assert torch.allclose(many.mean(0), keep * whole, atol=0.25 * whole.abs().max())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "ia3"}, "adapter type is 'ia3', expected one of lora, locon, loha, lokr, dora, oft, full"),
        ({"rank": 0, "max_norm": -1.0}, "rank \\(dim\\) is 0.*maximum weight norm is -1"),
        (
            {"kind": "full", "rank_dropout": 0.1},
            "rank dropout needs an adapter, and adapter type full trains without one",
        ),
        ({"kind": "full", "alpha": 4.0}, "alpha needs an adapter"),
        ({"kind": "full", "pattern": "*=rank 4"}, "adapter type full has neither"),
        (
            {"kind": "oft", "alpha": 4.0, "network_dropout": 0.1},
            "does not use alpha.*network dropout drops the activations inside",
        ),
        (
            {"pattern": "a=rank 0, b=size 3, /(/"},
            "'b=size 3': expected PATTERN=rank 8.*'a': rank is 0.*not a regular expression",
        ),
        (
            {"kind": "full", "initial": {}},
            "initial LoRA is a LoRA to continue from, and adapter type full trains no LoRA",
        ),
    ],
)
def test_wrong_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        AdapterSettings(**settings)
