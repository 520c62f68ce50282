"""Every kind of adapter: training at the activations is what its file makes of the weights, and what lycoris computes
with the file.
"""

import pytest
import torch
from graft_nodes.patches.adapters.factor_products import factorize_side
from graft_nodes.patches.lora_files.parse import Target, patches_of, read
from graft_nodes.patches.patching.fuse import Patch, apply_patches
from graft_nodes.training.trainable.install import (
    attach,
    group_by_module,
    init_trainable,
    limit_norms_,
    make_lora,
    read_lora,
)
from graft_nodes.training.trainable.patterns import parse_patterns
from graft_nodes.training.trainable.settings import AdapterSettings
from graft_nodes.training.trainable.targets import adapter_targets
from torch import nn

ADAPTERS = ("lora", "locon", "loha", "lokr", "dora", "oft", "tlora")


class Odd(nn.Module):
    """A linear layer, a strided convolution, a pointwise, a long and a deep one; sides with few divisors."""

    def __init__(self):
        super().__init__()
        self.line = nn.Linear(12, 18)
        self.plain = nn.Linear(18, 8, bias=False)
        self.conv = nn.Conv2d(8, 6, 3, stride=2, padding=1)
        self.round = nn.Conv2d(6, 6, 3, padding=1, padding_mode="circular")
        self.point = nn.Conv2d(6, 10, 1)
        self.long = nn.Conv1d(10, 4, 3, padding=2, dilation=2)
        self.deep = nn.Conv3d(4, 4, (1, 2, 2))

    def forward(self, x):
        x = torch.tanh(self.plain(torch.tanh(self.line(x)))).movedim(-1, 1)
        x = self.point(torch.tanh(self.round(torch.tanh(self.conv(x)))))
        x = torch.tanh(self.long(x.flatten(2))).unflatten(2, (3, 4))
        return self.deep(x[:, :, None])


def _odd():
    net, draws = Odd(), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=draws) * (0.2 if p.ndim == 1 else p[0].numel() ** -0.5))
    return net.requires_grad_(False)


def _base(net):
    return {name: p.detach() for name, p in net.named_parameters()}


def _moved(trained, scale=0.2):
    """Trained tensors after a random walk, so that none is zero."""
    draws = torch.Generator().manual_seed(5)
    return {name: (t + torch.randn(t.shape, generator=draws) * scale).requires_grad_() for name, t in trained.items()}


def _input():
    return torch.randn(2, 6, 8, 12, generator=torch.Generator().manual_seed(2))


def _still():
    return 0, 0, ""


def _settings(kind, **more):
    return AdapterSettings(kind, rank=3, alpha=0.0 if kind == "oft" else 1.5, targets="all", **more)


def _merged(net, lora):
    """The net with the file on its weights, read and applied as every LoRA file is."""
    other = _odd().double()
    shapes = {("model", f"diffusion_model.{name}"): tuple(p.shape) for name, p in other.named_parameters()}
    keys = {name.removesuffix(".weight"): Target("model", name) for _, name in shapes if name.endswith(".weight")}
    for weight, layer, part in patches_of(read(lora, keys, shapes, "file"), "model", shapes):
        own = other.get_parameter(weight.removeprefix("diffusion_model."))
        own.data = apply_patches(own.data.float(), [Patch(layer, 1.0, part)]).double()
    return other


@pytest.mark.parametrize("kind", ADAPTERS)
def test_training_computes_what_the_file_makes_of_the_weights(kind):
    net, settings = _odd(), _settings(kind)
    before = {name: p.clone() for name, p in net.named_parameters()}
    start = init_trainable(net, settings, 0, _base(net))
    trained = _moved(start)
    plain = net(_input())
    with attach(net, settings, start, _still):
        assert torch.allclose(net(_input()), plain, atol=1e-6)  # a beginning changes nothing
    with attach(net, settings, trained, _still):
        found = net(_input())
        gradients = torch.autograd.grad(found.square().sum(), list(trained.values()))
    assert all(g.abs().max() > 0 for g in gradients)
    merged = _merged(net, make_lora(trained, settings, None))
    assert not torch.allclose(found, plain, atol=1e-2)
    assert torch.allclose(found.double(), merged(_input().double()), atol=2e-5)
    assert all(torch.equal(p, before[name]) for name, p in net.named_parameters())
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in net.modules())
    assert all(
        torch.equal(t, read_lora(make_lora(start, settings, None), settings, None)[name]) for name, t in start.items()
    )


@pytest.mark.parametrize("kind", ADAPTERS)
def test_gradients_are_those_of_finite_differences(kind):
    """By central differences of the loss along random directions; DoRA's norm is a constant of its gradient (section
    4.3).
    """
    net, settings = _odd().double(), _settings(kind)
    trained = {
        name: t.detach().double().requires_grad_()
        for name, t in _moved(init_trainable(_odd(), settings, 0, _base(_odd()))).items()
    }
    x, draws = _input().double(), torch.Generator().manual_seed(3)
    frozen = (
        {path: settings.adapter.change(t, site).detach() for path, t, site in _of(net, settings, trained)}
        if kind == "dora"
        else None
    )

    def loss(tensors):
        with attach(net, settings, tensors, _still):
            if frozen is None:
                return net(x).square().mean()
            return _with_norms(net, settings, tensors, frozen)(x).square().mean()

    with attach(net, settings, trained, _still):
        net(x).square().mean().backward()
    for name, t in trained.items():
        way = torch.randn(t.shape, generator=draws, dtype=torch.float64)
        step = 1e-3 if kind in ("loha", "oft") else 1e-5  # those are computed in float32
        with torch.no_grad():
            ahead, behind = (loss({**trained, name: t + sign * step * way}) for sign in (1, -1))
        expected = float((ahead - behind) / (2 * step))
        coarse = step == 1e-3
        assert float((t.grad * way).sum()) == pytest.approx(
            expected, rel=5e-3 if coarse else 1e-6, abs=2e-5 if coarse else 1e-9
        ), name


def _of(net, settings, trained):
    tensors = group_by_module(trained)
    return [(path, tensors[path], site) for path, site in adapter_targets(net, settings).items()]


def _with_norms(net, settings, trained, frozen):
    """The net with DoRA's weights written out, the norms those of `frozen` changes."""
    other = _odd().double()
    for path, tensors, _ in _of(net, settings, trained):
        weight = net.get_submodule(path).weight
        delta = (tensors["lora_up.weight"].flatten(1) @ tensors["lora_down.weight"].flatten(1)).view(
            weight.shape
        ) / 2  # alpha / rank
        norm = (weight + frozen[path]).transpose(0, 1).flatten(1).norm(dim=1) + torch.finfo(torch.float32).eps
        scale = tensors["dora_scale"].flatten() / norm
        other.get_submodule(path).weight.data = (weight + delta) * scale.view(1, -1, *(1,) * (weight.ndim - 2))
    return other


MODULES = {
    "locon": "LoConModule",
    "loha": "LohaModule",
    "lokr": "LokrModule",
    "dora": "LoConModule",
    "oft": "DiagOFTModule",
}
OPTIONS = {"dora": {"weight_decompose": True, "wd_on_out": False}}


@pytest.fixture
def lycoris():
    """Its layers; whoever has not installed it runs the other tests."""
    return pytest.importorskip("lycoris.modules")


@pytest.mark.parametrize(
    "build", [lambda: nn.Linear(24, 40), lambda: nn.Conv2d(16, 36, 3, padding=1)], ids=["linear", "conv"]
)
@pytest.mark.parametrize("rank", [3, 8])
@pytest.mark.parametrize("kind", MODULES)
def test_names_shapes_beginnings_and_forward_are_lycoris(lycoris, kind, rank, build):
    net = nn.Module()
    torch.manual_seed(0)
    net.a = build().requires_grad_(False)
    settings = AdapterSettings(kind, rank=rank, alpha=0.0 if kind == "oft" else 2.0, targets="all")
    start = init_trainable(net, settings, 0, {})
    peer = getattr(lycoris, MODULES[kind])("a", net.a, 1.0, rank, 2.0, **OPTIONS.get(kind, {})).eval()
    theirs = {name: value for name, value in peer.state_dict().items() if name not in ("alpha", "scalar")}
    ours = {name.removeprefix("a."): value for name, value in start.items()}
    assert {name: t.shape for name, t in ours.items()} == {name: t.shape for name, t in theirs.items()}
    for name, value in theirs.items():
        assert bool(value.any()) == bool(ours[name].any()), name
        if value.any() and value.numel() > 40:
            assert float(ours[name].abs().max()) == pytest.approx(float(value.abs().max()), rel=0.5)
            assert float(ours[name].std()) == pytest.approx(float(value.std()), rel=0.35)
    if kind == "dora":
        assert torch.allclose(ours["dora_scale"], theirs["dora_scale"], atol=1e-6)
    trained = _moved(start)
    file = {
        name.removeprefix("diffusion_model.a."): value for name, value in make_lora(trained, settings, None).items()
    }
    peer.load_state_dict(file, strict=False)
    x = torch.randn(2, 5, 24) if isinstance(net.a, nn.Linear) else torch.randn(2, 16, 6, 6)
    with attach(net, settings, trained, _still):
        found = net.a(x)
    peer.apply_to()
    assert torch.allclose(found, net.a(x), atol=2e-5)


@pytest.mark.parametrize(
    ("build", "size"),
    [
        (lambda: nn.Linear(24, 40), (2, 5, 24)),
        (lambda: nn.Linear(36, 128), (2, 5, 36)),
        (lambda: nn.Conv2d(16, 36, 3, padding=1), (2, 16, 6, 6)),
    ],
    ids=["linear", "wide", "conv"],
)
@pytest.mark.parametrize("factor", [2, 4, 7, 8, 16, 4096])
@pytest.mark.parametrize("whole", [False, True], ids=["product", "full_matrix"])
def test_a_lokr_with_a_factor_is_lycoris(lycoris, build, size, factor, whole):
    """The same tensors, and lycoris computes with the file what is trained; rank 4096 is its full_matrix."""
    net = nn.Module()
    net.a = build().requires_grad_(False)
    settings = AdapterSettings("lokr", rank=4096 if whole else 2, alpha=1.0, targets="all", factor=factor)
    trained = _moved(init_trainable(net, settings, 0, {}))
    peer = lycoris.LokrModule("a", net.a, 1.0, settings.rank, 1.0, factor=factor, full_matrix=whole).eval()
    theirs = {name: tuple(t.shape) for name, t in peer.state_dict().items() if name not in ("alpha", "scalar")}
    assert {name.removeprefix("a."): tuple(t.shape) for name, t in trained.items()} == theirs
    lora = make_lora(trained, settings, None)
    file = {name.removeprefix("diffusion_model.a."): value for name, value in lora.items()}
    peer.load_state_dict(file, strict=False)
    x = torch.randn(size, generator=torch.Generator().manual_seed(3))
    with attach(net, settings, trained, _still):
        found = net.a(x)
    plain = net.a(x)
    assert not torch.allclose(found, plain, atol=1e-2)
    peer.apply_to()
    assert torch.allclose(found, net.a(x), atol=2e-5 * float(plain.abs().max()))


def test_peft_reads_a_lora_and_begins_alike():
    peft = pytest.importorskip("peft")
    net, settings = nn.ModuleDict({"a": nn.Linear(24, 40)}), AdapterSettings(rank=8, alpha=2.0, targets="all")
    start = init_trainable(net, settings, 0, {})
    model = peft.get_peft_model(
        nn.ModuleDict({"a": nn.Linear(24, 40)}), peft.LoraConfig(target_modules=["a"], r=8, lora_alpha=2)
    )
    state = peft.get_peft_model_state_dict(model)
    down = next(value for name, value in state.items() if "lora_A" in name)
    assert float(start["a.lora_down.weight"].abs().max()) == pytest.approx(float(down.abs().max()), rel=0.1)
    trained = _moved(start)
    names = {"lora_A": "a.lora_down.weight", "lora_B": "a.lora_up.weight"}
    peft.set_peft_model_state_dict(model, {key: trained[names[key.split(".")[-2]]].detach() for key in state})
    model.base_model.model["a"].base_layer.load_state_dict(net["a"].state_dict())
    x = torch.randn(3, 24)
    with attach(net, settings, trained, _still):
        assert torch.allclose(net["a"](x), model.base_model.model["a"](x), atol=1e-6)


@pytest.mark.parametrize(
    ("side", "factor", "expected"),
    [
        (127, -1, (1, 127)),
        (128, -1, (8, 16)),
        (360, -1, (18, 20)),
        (512, 4, (4, 128)),
        (250, 4, (2, 125)),
        (320, 64, (5, 64)),
    ],
)
def test_factors(side, factor, expected):
    assert factorize_side(side, factor) == expected


def test_factors_are_lycoris(lycoris):
    from lycoris.functional.general import factorization

    sizes = [(side, factor) for side in range(1, 400) for factor in (-1, 4, 8, 64)]
    assert [factorize_side(*size) for size in sizes] == [factorization(*size) for size in sizes]


def test_rank_and_alpha_by_pattern():
    text = "conv=rank 5, alpha 2.5\n*line*=rank 2, p*=alpha 9, point=rank 1 alpha 1, !deep"
    assert parse_patterns(text).sizes == (("conv", 5, 2.5), ("*line*", 2, None), ("p*", None, 9.0), ("point", 1, 1.0))
    assert parse_patterns(text).drop == ("deep",) and parse_patterns(text).keep == ()
    settings = AdapterSettings("locon", rank=3, targets="all", pattern=text)
    net = _odd()
    found = {path: (site.rank, site.alpha) for path, site in adapter_targets(net, settings).items()}
    plain = {"round": (3, 3.0), "long": (3, 3.0)}
    assert found == {"line": (2, 2.0), "plain": (3, 9.0), "conv": (5, 2.5), "point": (1, 1.0), **plain}
    trained = _moved(init_trainable(net, settings, 0, {}))
    lora = make_lora(trained, settings, None)
    assert {path: float(lora[f"diffusion_model.{path}.alpha"]) for path in found} == {
        path: alpha for path, (_, alpha) in found.items()
    }
    assert all(trained[f"{path}.lora_up.weight"].shape[1] == rank for path, (rank, _) in found.items())
    with attach(net, settings, trained, _still):
        out = net(_input())
    assert torch.allclose(out.double(), _merged(net, lora)(_input().double()), atol=2e-5)


def test_a_lokr_of_two_whole_matrices_has_its_rank_for_alpha():
    """Its scale is 1 whatever alpha is; lycoris stores the rank, and others divide what is stored by it."""
    settings = AdapterSettings("lokr", rank=64, alpha=2.0, targets="all", pattern="*line*=rank 1")
    trained = init_trainable(_odd(), settings, 0, {})
    lora = make_lora(trained, settings, None)
    whole = {path for path, tensors in group_by_module(trained).items() if "lokr_w2" in tensors}
    products = group_by_module(trained).keys() - whole
    assert whole and products
    for paths, alpha in ((whole, 64.0), (products, 2.0)):
        assert {float(lora[f"diffusion_model.{path}.alpha"]) for path in paths} == {alpha}


def test_an_alpha_of_0_behind_a_comma_is_the_rank():
    for text in ("*=rank 8, alpha 0", "*=rank 8 alpha 0"):
        settings = AdapterSettings("lora", rank=16, alpha=4.0, targets="all", pattern=text)
        assert {(site.rank, site.alpha) for site in adapter_targets(_odd(), settings).values()} == {(8, 8.0)}
    with pytest.raises(ValueError, match="rank is 0"):
        AdapterSettings("lora", rank=16, targets="all", pattern="*=alpha 4, rank 0").check()


def test_a_size_for_nothing_is_said():
    with pytest.raises(ValueError, match=r"gives a size to other\*, which matches no chosen module such as line"):
        adapter_targets(_odd(), AdapterSettings(targets="all", pattern="other*=rank 4"))


@pytest.mark.parametrize("kind", ADAPTERS)
def test_going_on_from_a_file(kind):
    """A file of another alpha begins with the same change of the weights."""
    net, given = _odd(), _settings(kind)
    trained = _moved(init_trainable(net, given, 0, {}))
    file = make_lora(trained, given, None)
    settings = AdapterSettings(kind, rank=3, alpha=0.0 if kind == "oft" else 6.0, targets="all", initial=file)
    start = init_trainable(net, settings, 1, {})
    with attach(net, given, trained, _still):
        expected = net(_input())
    with attach(net, settings, start, _still):
        assert torch.allclose(net(_input()), expected, atol=1e-5)


@pytest.mark.parametrize("kind", ["lora", "lokr", "dora"])
def test_half_a_layer_in_a_file_is_said(kind):
    net, settings = _odd(), _settings(kind)
    file = make_lora(init_trainable(net, settings, 0, {}), settings, None)
    del file[next(name for name in file if "plain" in name and not name.endswith(".alpha"))]
    with pytest.raises(ValueError, match=r"plain.*: missing beside the others of its layer"):
        init_trainable(net, _settings(kind, initial=file), 1, {})


def _kohya(trained, path, scale, limit):
    """scale_weight_norms of kohya-ss/sd-scripts, written out in float64."""
    up, down = trained[f"{path}.lora_up.weight"].double(), trained[f"{path}.lora_down.weight"].double()
    product = torch.einsum("or...,ri...->oi...", up, down)
    norm = (product * scale).norm().clamp(min=limit / 2)
    ratio = norm.clamp(max=limit) / norm
    return up * ratio**0.5, down * ratio**0.5


@pytest.mark.parametrize("kind", ["locon", "dora"])
def test_scale_weight_norm_is_kohya(kind):
    net, settings = _odd().double(), _settings(kind, max_norm=0.4)
    trained = {name: t.detach().double() for name, t in _moved(init_trainable(_odd(), settings, 0, {})).items()}
    expected = {path: _kohya(trained, path, 0.5, 0.4) for path in adapter_targets(net, settings)}
    before = {name: t.clone() for name, t in trained.items()}
    assert 0 < limit_norms_(trained, settings) < len(expected)
    for path, (up, down) in expected.items():
        assert torch.allclose(trained[f"{path}.lora_up.weight"], up, rtol=1e-12)
        assert torch.allclose(trained[f"{path}.lora_down.weight"], down, rtol=1e-12)
    if kind == "dora":
        assert all(torch.equal(trained[name], before[name]) for name in before if name.endswith("dora_scale"))


@pytest.mark.parametrize("kind", ["loha", "lokr", "oft"])
def test_scale_weight_norm_elsewhere_is_lycoris(lycoris, kind):
    settings, net = _settings(kind, max_norm=0.4), nn.ModuleDict({"a": nn.Linear(24, 40)})
    trained = {name: t.detach() for name, t in _moved(init_trainable(net, settings, 0, {})).items()}
    peer = getattr(lycoris, MODULES[kind])("a", net["a"], 1.0, 3, 1.5)
    peer.load_state_dict({name.removeprefix("a."): t.clone() for name, t in trained.items()}, strict=False)
    assert limit_norms_(trained, settings) == 1
    with torch.no_grad():
        if kind == "oft":
            assert peer.apply_max_norm(0.4)[0]
            expected = peer.oft_blocks
            assert torch.allclose(trained["a.oft_blocks"], expected, atol=1e-6)
        else:
            weight = peer.get_weight(peer.shape)
            (site,) = adapter_targets(net, settings).values()
            found = settings.adapter.change(group_by_module(trained)["a"], site)
            assert torch.allclose(found, weight * (0.4 / weight.norm()), atol=1e-6) and float(
                found.norm()
            ) == pytest.approx(0.4, rel=1e-5)
    assert limit_norms_(trained, _settings(kind, max_norm=0.41)) == 0


@pytest.mark.parametrize("kind", ["loha", "lokr", "oft"])
def test_rank_dropout_without_ranks(kind):
    """Rows of the change (or blocks of the rotation) are there whole or not at all, the same for every picture."""
    settings = _settings(kind, pattern="line", rank_dropout=0.5)
    net = _odd()
    trained = _moved(init_trainable(net, settings, 0, {}))
    x = _input()

    def change(step, purpose="part 0"):
        with attach(net, settings, trained, lambda: (0, step, purpose)), torch.no_grad():
            return net.line(x) - nn.functional.linear(x, net.line.weight, net.line.bias)

    whole, left = change(0, ""), change(1)
    gone = (left.abs().amax((0, 1, 2)) < 1e-6) & (whole.abs().amax((0, 1, 2)) > 1e-4)
    assert 0 < int(gone.sum()) < 18 and torch.allclose(left[..., ~gone], whole[..., ~gone], atol=1e-6)
    assert torch.equal(left, change(1)) and not torch.equal(left, change(2))


@pytest.mark.parametrize("kind", ["loha", "dora", "oft"])
def test_module_dropout_leaves_the_module_alone(kind):
    """Or changes it as without dropout: DoRA's two hooks make the same draw."""
    settings, net, x = _settings(kind, pattern="line", module_dropout=0.5), _odd(), _input()
    trained = _moved(init_trainable(net, settings, 0, {}))
    plain = net.line(x)

    def run(settings, step):
        with attach(net, settings, trained, lambda: (0, step, "part 0")), torch.no_grad():
            return net.line(x)

    whole = run(_settings(kind, pattern="line"), 0)
    outputs = [run(settings, step) for step in range(12)]
    alone = [torch.allclose(output, plain, atol=1e-6) for output in outputs]
    assert 2 < sum(alone) < 10
    assert all(is_plain or torch.equal(output, whole) for is_plain, output in zip(alone, outputs, strict=True))


def test_text_encoder_modules_come_after_the_models(lab):
    net, text = (
        lab.Flow().module,
        nn.ModuleDict({"self_attn": nn.ModuleDict({"q_proj": nn.Linear(6, 6)}), "mlp": nn.Linear(6, 6)}),
    )
    settings = AdapterSettings(rank=2, text_encoder=True)
    trained = init_trainable(net, settings, 0, {}, text)
    assert [name for name in trained if name.startswith("text_encoders.")] == [
        "text_encoders.self_attn.q_proj.lora_down.weight",
        "text_encoders.self_attn.q_proj.lora_up.weight",
    ]
    assert {name for name in trained if not name.startswith("text_")} == set(
        init_trainable(net, AdapterSettings(rank=2), 0, {})
    )
    lora = make_lora(trained, settings, None)
    assert "text_encoders.self_attn.q_proj.alpha" in lora and "diffusion_model.blocks.0.attn1.to_q.alpha" in lora
    assert all(torch.equal(trained[name], value) for name, value in read_lora(lora, settings, None).items())
    moved, x = _moved(trained), torch.randn(2, 6)
    with attach(net, settings, moved, _still, text):
        out = text["self_attn"]["q_proj"](x)
    part = text["self_attn"]["q_proj"]
    name = "text_encoders.self_attn.q_proj.lora_"
    assert torch.allclose(out, part(x) + x @ moved[f"{name}down.weight"].T @ moved[f"{name}up.weight"].T, atol=1e-6)
    with pytest.raises(ValueError, match=r"train text encoder is on.*begin with text_encoders\."):
        init_trainable(net, AdapterSettings(rank=2, text_encoder=True, pattern="blocks.*"), 0, {}, text)


def test_full_weights_of_both(lab):
    net, text = lab.Flow().module, nn.ModuleDict({"a": nn.Linear(4, 4)})
    base = {name: p.detach() for name, p in net.named_parameters()} | {
        f"text_encoders.{n}": p.detach() for n, p in text.named_parameters()
    }
    settings = AdapterSettings("full", targets="all", text_encoder=True)
    trained = {name: t + 0.5 for name, t in init_trainable(net, settings, 0, base, text).items()}
    assert trained.keys() == base.keys()
    with attach(net, settings, trained, _still, text):
        assert torch.equal(text["a"].weight, base["text_encoders.a.weight"] + 0.5)
        assert torch.equal(net.norm.weight, base["norm.weight"] + 0.5)
    lora = make_lora(trained, settings, base)
    assert {"text_encoders.a.diff", "text_encoders.a.diff_b", "diffusion_model.norm.diff"} <= lora.keys()
    assert all(torch.equal(value, trained[name]) for name, value in read_lora(lora, settings, base).items())


def test_full_weights_of_a_quantized_model_are_refused(lab):
    net = lab.Flow().module
    base = {name: p.detach().to(torch.float8_e4m3fn) for name, p in net.named_parameters()}
    with pytest.raises(ValueError, match=r"quantized \(blocks.*float8_e4m3fn\); use another adapter type"):
        init_trainable(net, AdapterSettings("full", targets="all"), 0, base)


@pytest.mark.parametrize("kind", ["loha", "lokr", "dora", "oft"])
def test_snapshots_of_a_run_average_whatever_the_kind(kind):
    from graft_nodes.patches.lora_files.average import average

    net, settings = _odd(), _settings(kind)
    first, second = init_trainable(net, settings, 0, {}), _moved(init_trainable(net, settings, 0, {}))
    mean = average(
        [make_lora(first, settings, None), make_lora(second, settings, None)], [0.25, 0.75], ["a", "b"], "factors"
    ).state
    found = read_lora(mean, settings, None)
    assert found.keys() == first.keys()
    assert all(torch.allclose(found[name], 0.25 * first[name] + 0.75 * second[name], atol=1e-6) for name in found)
    with pytest.raises(ValueError, match="is not available here"):
        average([make_lora(first, settings, None)] * 2, [0.5, 0.5], ["a", "b"], "products")
