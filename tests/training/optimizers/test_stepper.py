"""Every optimizer and precision: two calls are one byte for byte, fused and offloaded steps are the plain ones, one
step by hand.
"""

import json
import math
from dataclasses import replace

import pytest
import torch
from graft_nodes.ema.decay import EMASettings
from graft_nodes.training.data.batches import make_batches
from graft_nodes.training.memory import layer_ring, offload
from graft_nodes.training.optimizers.learning_rate_schedule import rate_at
from graft_nodes.training.optimizers.registry import OPTIMIZERS
from graft_nodes.training.optimizers.settings import OptimizerSettings
from graft_nodes.training.optimizers.stepper import OptimizerStepper
from graft_nodes.training.run.loop import Callbacks, Stopped, train
from graft_nodes.training.run.step import advance_, backward_
from graft_nodes.training.run.workspace import Workspace
from graft_nodes.training.state import Settings, Start, begin, change_settings, equal
from graft_nodes.training.store.store import Store
from graft_nodes.training.trainable.settings import AdapterSettings
from torch.utils._python_dispatch import TorchDispatchMode

RATES = {"lion": 1e-3, "prodigy": 1.0, "prodigyplus": 1.0}
NO_WARMUP = ("adacoor", "automagic")
AVERAGES = ("schedulefree", "prodigyplus")  # that keep one themselves
FULL = AdapterSettings("full", targets="all")
PAIRS = AdapterSettings("locon", targets="all", rank=2)
BARE = {"schedule": "constant", "warmup": 0}


def _need(optimizer):
    package = OPTIMIZERS.get(optimizer).package
    if package is not None:
        pytest.importorskip(package.module)


def _state(lab, denoiser, dataset, optimizer="adamw", adapter=None, **more):
    _need(optimizer)
    given = {"optimizer": optimizer, "learning_rate": RATES.get(optimizer, 1e-2), **more}
    if optimizer in (*AVERAGES, *NO_WARMUP):
        given = {"schedule": "constant", **given}
    if optimizer in NO_WARMUP:
        given = {"warmup": 0, "learning_rate": 1e-4, **given}
    return lab.state(denoiser, dataset, adapter or PAIRS, optimizer not in AVERAGES, **given)


def _same(left, right):
    groups = [(left.trained, right.trained), (left.optimizer, right.optimizer), (left.average, right.average)]
    return all(
        a.keys() == b.keys() and all(torch.equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a) for a, b in groups
    )


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS.names())
@pytest.mark.parametrize("precision", ["float32", "bf16", "fp16", "full-bf16"])
@pytest.mark.parametrize("adapter", [PAIRS, FULL], ids=["pairs", "full"])
def test_two_calls_are_one_through_a_file(lab, tmp_path, optimizer, precision, adapter):
    denoiser, dataset = (
        lab.Flow(lab.Net(16) if optimizer == "adamw8bit" else None),
        lab.pictures(shape=(16, 6, 6), held_out=[9]),
    )
    if optimizer != "adamw8bit":
        dataset = lab.pictures(held_out=[9])
    start = _state(
        lab, denoiser, dataset, optimizer, adapter, precision=precision, warmup=0 if optimizer in NO_WARMUP else 3
    )
    callbacks = Callbacks(validate_every=2)
    whole = train(start, denoiser, dataset, 6, callbacks)
    half = train(start, denoiser, dataset, 2, callbacks)
    Store(tmp_path, "run").save(half)
    found, problems = Store(tmp_path, "run").furthest(start, 2)
    assert not problems and _same(found.state, half)
    parts = train(found.state, denoiser, dataset, 4, callbacks)
    assert _same(whole, parts) and whole.history == parts.history and equal(whole, parts)
    moved = [name for name, t in whole.trained.items() if not torch.equal(t, start.trained[name])]
    assert moved == list(whole.trained) and all(t.dtype == torch.float32 for t in whole.trained.values())
    if precision == "full-bf16" and optimizer not in AVERAGES:
        assert all(torch.equal(t, t.bfloat16().float()) for t in whole.trained.values())


@pytest.mark.parametrize("optimizer", OPTIMIZERS.names())
def test_optimizers_differ_and_learn(lab, optimizer):
    denoiser, dataset = lab.Flow(), lab.pictures()
    start = _state(lab, denoiser, dataset, optimizer, FULL, total_steps=1000)
    losses = train(start, denoiser, dataset, 60).history.loss
    # adacoor's, automagic's and prodigy's first steps are tiny by design
    slow = (*NO_WARMUP, "prodigy", "prodigyplus", "sgd")
    assert sum(losses[-20:]) < sum(losses[:20]) * (1.0 if optimizer in slow else 0.97)


# --- one step by hand -------------------------------------------------------------------------------------------------


def _newton_schulz(g):
    """Muon's orthogonalization (Jordan 2024): five quintic iterations in bf16."""
    x = g.bfloat16()
    flip = x.shape[0] > x.shape[1]
    x = x.T if flip else x
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        a = x @ x.T
        x = torch.addmm(
            x, torch.addmm(a, a, a, beta=-4.775, alpha=2.0315), x, beta=3.4445
        )  # a x + (b A + c A A) x, rounded as often
    return (x.T if flip else x).float()


def _adafactor(p, g, held, n):
    """Shazeer 2018 with torch's relative step: row and column averages of the square, the update's norm
    limited to 1.
    """
    rate, beta = max(1e-3, float(p.norm()) / math.sqrt(p.numel())) * min(held["rate"], n**-0.5), 1 - n**-0.8
    if p.ndim > 1:
        held["r"] = beta * held.get("r", 0) + (1 - beta) * g.square().mean(-1, keepdim=True)
        held["c"] = beta * held.get("c", 0) + (1 - beta) * g.square().mean(-2, keepdim=True)
        v = held["r"] @ held["c"] / held["r"].mean(-2, keepdim=True).clamp(min=2.0**-23)
    else:
        held["v"] = v = beta * held.get("v", 0) + (1 - beta) * g.square()
    update = g / v.clamp(min=2.0**-46).sqrt()
    update = update / max(1.0, float(update.norm()) / math.sqrt(update.numel()))
    return p * (1 - held["rate"] * 0.1) - rate * update


def _by_hand(optimizer, p, g, held, n):
    """The tensor after step n (1 is the first) with rate held["rate"] and weight decay 0.1."""
    rate = held["rate"]
    if optimizer == "lion":
        m = held.get("m", torch.zeros_like(p))
        held["m"] = 0.99 * m + 0.01 * g
        return p * (1 - rate * 0.1) - rate * torch.sign(0.9 * m + 0.1 * g)
    if optimizer == "sgd":
        g = g + 0.1 * p
        held["m"] = 0.9 * held["m"] + g if n > 1 else g
        return p - rate * held["m"]
    if optimizer == "adacoor":
        held["v"] = (held.get("v", torch.zeros_like(p)) + 1e-8 * g * g).bfloat16().to(p.dtype)
        return p - 1e-8 * g / (held["v"].sqrt() + 1e-8)
    if optimizer == "muon" and p.ndim == 2:
        held["m"] = held.get("m", torch.zeros_like(p).float()).lerp(g.float(), 0.05)
        update = _newton_schulz(g.float().lerp(held["m"], 0.95))
        return p * (1 - rate * 0.1) - rate * 0.2 * math.sqrt(max(p.shape)) * update
    if optimizer == "adafactor":
        return _adafactor(p, g, held, n)
    if optimizer == "schedulefree":  # 2405.15682 with beta 0.9: gradients at y, the step at z, the average at x
        z = held.setdefault("z", p)
        held["v"] = 0.999 * held.get("v", torch.zeros_like(p)) + 0.001 * g * g
        step = g / ((held["v"] / (1 - 0.999**n)).sqrt() + 1e-8) + 0.1 * p
        x = held.get("x", p)
        held["z"] = z - rate * step
        held["x"] = x + (held["z"] - x) / n
        return 0.1 * held["z"] + 0.9 * held["x"]
    held["m"] = 0.9 * held.get("m", torch.zeros_like(p)) + 0.1 * g
    held["v"] = 0.999 * held.get("v", torch.zeros_like(p)) + 0.001 * g * g
    p = p * (1 - rate * 0.1)
    return p - rate * (held["m"] / (1 - 0.9**n)) / ((held["v"] / (1 - 0.999**n)).sqrt() + 1e-8)


@pytest.mark.parametrize("optimizer", ["adafactor", "lion", "schedulefree", "muon", "adacoor", "sgd"])
def test_three_steps_by_hand(lab, optimizer):
    denoiser, dataset = lab.Flow(), lab.pictures()
    decay = {} if optimizer == "adacoor" else {"weight_decay": 0.1}
    start = _state(lab, denoiser, dataset, optimizer, FULL, clip_norm=0.0, **BARE, **decay)
    work = Workspace(start, denoiser, dataset)
    rate = start.settings.optimizer.learning_rate
    held = {name: {"rate": rate} for name in work.trained}
    weights = {name: t.detach().double() for name, t in work.trained.items()}
    with work.install():
        for n in range(1, 4):
            backward_(work)
            weights = {
                name: _by_hand(optimizer, p, work.trained[name].grad.double(), held[name], n)
                for name, p in weights.items()
            }
            advance_(work)
            for name, expected in weights.items():
                assert torch.allclose(expected.float(), work.trained[name].detach(), atol=2e-6 if n > 1 else 1e-6), (
                    n,
                    name,
                )
    if optimizer == "schedulefree":  # what is sampled with is the average
        for name, t in work.state().trained.items():
            assert torch.allclose(held[name]["x"].float(), t, atol=2e-6), name


def test_prodigy_by_hand(lab):
    """2306.06101, algorithm 4 with decoupled decay and without bias correction: one d for all tensors."""
    denoiser, dataset = lab.Flow(), lab.pictures()
    work = Workspace(
        _state(lab, denoiser, dataset, "prodigy", FULL, clip_norm=0.0, weight_decay=0.1, **BARE), denoiser, dataset
    )
    p = {name: t.detach().double() for name, t in work.trained.items()}
    begun = dict(p)
    m, v, s = ({name: torch.zeros_like(t) for name, t in p.items()} for _ in range(3))
    d, r, b3 = 1e-6, 0.0, 0.999**0.5
    with work.install():
        for _ in range(4):
            backward_(work)
            g = {name: t.grad.double() for name, t in work.trained.items()}
            r = b3 * r + sum(d / 1e-6 * d * float((g[k] * (begun[k] - p[k])).sum()) for k in p)
            for k in p:
                m[k] = 0.9 * m[k] + 0.1 * d * g[k]
                v[k] = 0.999 * v[k] + 0.001 * d * d * g[k] ** 2
                s[k] = b3 * s[k] + d / 1e-6 * d * g[k]
            found = max(d, r / sum(float(t.abs().sum()) for t in s.values()))
            p = {k: t * (1 - 0.1 * d) - d * m[k] / (v[k].sqrt() + found * 1e-8) for k, t in p.items()}
            d = found
            advance_(work)
            assert all(torch.allclose(p[k].float(), t.detach(), atol=1e-6) for k, t in work.trained.items())
    assert work.stepper.state()["scalars/blocks.0.ff.weight"][1].item() == pytest.approx(d, rel=1e-3) and d > 1e-6


def test_8_bit_moments_follow_adamw(lab):
    _need("adamw8bit")
    denoiser, dataset = lab.Flow(lab.Net(32)), lab.pictures(shape=(32, 4, 4))
    plain, eight = (
        train(_state(lab, denoiser, dataset, kind, FULL, learning_rate=1e-3), denoiser, dataset, 5)
        for kind in ("adamw", "adamw8bit")
    )
    assert eight.optimizer["state1/blocks.0.conv.weight"].dtype == torch.uint8
    start = _state(lab, denoiser, dataset, "adamw", FULL).trained["blocks.0.conv.weight"]
    one, other = (state.trained["blocks.0.conv.weight"] - start for state in (plain, eight))
    assert torch.cosine_similarity(one.flatten(), other.flatten(), dim=0) > 0.98


# --- fused backward, pieces and offload -------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [record.name for record in OPTIMIZERS if not record.joint_step])
@pytest.mark.parametrize("precision", ["float32", "full-bf16"])
@pytest.mark.parametrize("passes", [1, 2])
def test_fused_backward_gives_the_same_bytes(lab, optimizer, precision, passes):
    denoiser, dataset = lab.Flow(), lab.pictures()
    if passes == 2:  # pictures of two sizes in a step
        dataset = replace(dataset, regularization=lab.pictures(shape=(4, 5, 6), seed=1), regularization_share=0.5)
    assert len(make_batches(dataset, 4, 0.0, 0, 0, 0, "part 0")) == passes
    found = []
    for fused in (False, True):
        start = _state(
            lab,
            denoiser,
            dataset,
            optimizer,
            FULL if passes == 2 else PAIRS,
            precision=precision,
            clip_norm=0.0,
            fused_backward=fused,
        )
        found.append(train(start, denoiser, dataset, 4))
    assert _same(*found)
    assert found[0].history.norm == pytest.approx(found[1].history.norm, rel=1e-5)
    assert found[0].key == found[1].key


def test_layers_in_host_memory_change_nothing_where_full_weights_compute_there(lab):
    denoiser, dataset = lab.Flow(), lab.pictures()
    fused = {"clip_norm": 0.0, "fused_backward": True}
    plain = train(_state(lab, denoiser, dataset, "adamw", FULL, **fused), denoiser, dataset, 2)
    layers = _state(lab, denoiser, dataset, "adamw", FULL, offload="layers", swapped_blocks=1, **fused)
    assert _same(plain, train(layers, denoiser, dataset, 2))


def test_fused_backward_holds_one_gradient_at_a_time(lab):
    denoiser, dataset = lab.Flow(), lab.pictures()
    for fused in (False, True):
        work = Workspace(
            _state(lab, denoiser, dataset, "adamw", FULL, clip_norm=0.0, fused_backward=fused), denoiser, dataset
        )
        held, trained = [], list(work.trained.values())
        for t in trained:
            t.register_post_accumulate_grad_hook(
                lambda _, held=held, every=trained: held.append(sum(t.grad is not None for t in every))
            )
        with work.install():
            advance_(work)
        assert max(held) == (1 if fused else len(work.trained))


def test_a_fused_backward_that_breaks_midway_keeps_no_half_moved_state(lab):
    denoiser, dataset = lab.Flow(), lab.pictures()
    start = _state(lab, denoiser, dataset, "adamw", FULL, clip_norm=0.0, fused_backward=True)
    real, calls = denoiser.denoise, []

    def poisoned(*args):
        out = real(*args)
        calls.append(1)
        if len(calls) == 3:
            out.register_hook(lambda g: g * float("nan"))
        return out

    denoiser.denoise = poisoned
    kept = []
    with pytest.raises(Stopped, match="after step 2 is kept") as stopped:
        train(start, denoiser, dataset, 5, Callbacks(save_snapshot=kept.append, snapshot_every=2))
    assert [state.step for state in kept] == [2] and stopped.value.state is start
    assert all(torch.isfinite(t).all() for t in kept[0].trained.values())


@pytest.mark.parametrize("optimizer", OPTIMIZERS.names())
@pytest.mark.parametrize("precision", ["float32", "full-bf16"])
def test_state_that_waits_in_host_memory_gives_the_same_bytes(lab, monkeypatch, optimizer, precision):
    denoiser, dataset = lab.Flow(), lab.pictures()
    plain = train(_state(lab, denoiser, dataset, optimizer, FULL, precision=precision), denoiser, dataset, 4)
    monkeypatch.setattr(offload, "is_on_device", lambda tensor: True)  # this machine's memory stands for the device's
    start = _state(lab, denoiser, dataset, optimizer, FULL, precision=precision, offload="optimizer")
    work = Workspace(start, denoiser, dataset)
    with work.install():
        advance_(work)
        parked = {id(place) for place in work.stepper._parking._places.values()}
        slots = [v for optimizer in work.stepper.optimizers for s in optimizer.state.values() for v in s.values()]
        assert parked and all(id(v) in parked for v in slots if isinstance(v, torch.Tensor) and v.ndim)
    away = train(train(start, denoiser, dataset, 2), denoiser, dataset, 2)
    assert _same(plain, away) and plain.key == away.key


@pytest.mark.parametrize("adapter", [PAIRS, FULL], ids=["pairs", "full"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_activations_in_host_memory_give_the_same_bytes(lab, monkeypatch, adapter, checkpointing):
    denoiser, dataset = lab.Flow(), lab.pictures()
    plain = train(_state(lab, denoiser, dataset, "adamw", adapter), denoiser, dataset, 3)
    copies = []
    monkeypatch.setattr(offload, "is_on_device", lambda tensor: True)
    monkeypatch.setattr(offload, "SMALL", 0)
    room = offload.empty_on_host
    monkeypatch.setattr(
        offload, "empty_on_host", lambda like: copies.append(like.untyped_storage().data_ptr()) or room(like)
    )
    start = _state(lab, denoiser, dataset, "adamw", adapter, offload="activations", checkpointing=checkpointing)
    away = train(start, denoiser, dataset, 3)
    assert _same(plain, away) and plain.key == away.key
    base = {t.untyped_storage().data_ptr() for t in denoiser.module.parameters()}
    assert copies and not base & set(copies)  # weights stay where they are


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("inference", [False, True])
def test_layers_in_host_memory_give_the_same_bytes_and_come_over_block_by_block(lab, monkeypatch, inference, ahead):
    with torch.inference_mode(inference):
        denoiser = lab.Flow()
    dataset = lab.pictures(held_out=[9])
    plain = train(_state(lab, denoiser, dataset, "adamw"), denoiser, dataset, 3, Callbacks(validate_every=2))
    before = {name: (id(p), p.clone()) for name, p in denoiser.module.named_parameters()}
    used, computing, real = [], [], layer_ring.LayerRing.call

    def seen(ring, group, *args, **kwargs):
        assert group not in computing
        computing.append(group)
        used.append(len(computing))
        try:
            return real(ring, group, *args, **kwargs)
        finally:
            computing.remove(group)

    monkeypatch.setattr(offload, "is_on_other_device", lambda tensor, device: True)
    monkeypatch.setattr(layer_ring, "copies_ahead", lambda device: ahead)
    monkeypatch.setattr(layer_ring.LayerRing, "call", seen)
    away = train(
        _state(lab, denoiser, dataset, "adamw", offload="layers"), denoiser, dataset, 3, Callbacks(validate_every=2)
    )
    assert _same(plain, away) and plain.key == away.key and plain.history == away.history
    # Three steps and two validations of the weights and of their average: the root and its two blocks; in each step's
    # backward pass the blocks again, one at a time.
    assert len(used) == 5 * 3 + 3 * 2 * 2 and max(used) == 2
    assert all(
        id(p) == before[name][0] and torch.equal(p, before[name][1]) for name, p in denoiser.module.named_parameters()
    )
    assert "forward" not in denoiser.module.__dict__ and not any(
        "forward" in block.__dict__ for block in denoiser.module.blocks
    )


# --- precision --------------------------------------------------------------------------------------------------------


def test_a_loss_scale_that_overflows_is_halved_and_the_step_made_again(lab):
    denoiser, dataset = lab.Flow(), lab.pictures()
    start = _state(lab, denoiser, dataset, "adamw", FULL, precision="fp16")
    work = Workspace(start, denoiser, dataset)
    work.loss_scale.scale = 2.0**60  # gradients overflow in fp16 until it is small enough
    with work.install():
        moved = advance_(work)
    assert math.isfinite(moved.norm) and work.step == 1 and work.loss_scale.scale < 2.0**30
    saved = work.state()
    assert (
        saved.optimizer["grad_scaler/scale"].item() == work.loss_scale.scale
        and saved.optimizer["grad_scaler/count"].item() == 1
    )
    assert Workspace(saved, denoiser, dataset).loss_scale.scale == work.loss_scale.scale


def test_a_step_that_memory_runs_out_in_is_not_counted(lab, monkeypatch):
    denoiser, dataset = lab.Flow(), lab.pictures()
    start = _state(lab, denoiser, dataset, "adamw", FULL, precision="fp16")
    whole = train(start, denoiser, dataset, 4)
    norm = OptimizerStepper.norm

    def norm_or_not(self):
        if self._step == 2:
            raise torch.OutOfMemoryError("out of memory")
        return norm(self)

    monkeypatch.setattr(OptimizerStepper, "norm", norm_or_not)
    with pytest.raises(Stopped) as stopped:
        train(start, denoiser, dataset, 4)
    monkeypatch.undo()
    half = stopped.value.state
    assert half.step == 2 and half.optimizer["grad_scaler/count"].item() == 2
    assert equal(train(half, denoiser, dataset, 2), whole)


def test_the_loss_scale_does_not_change_the_gradient(lab):
    denoiser, dataset = lab.Flow(), lab.pictures()
    plain, fp16 = (
        train(_state(lab, denoiser, dataset, "adamw", FULL, precision=p), denoiser, dataset, 3)
        for p in ("float32", "fp16")
    )
    assert fp16.history.norm == pytest.approx(plain.history.norm, rel=2e-2) and fp16.history.norm != plain.history.norm
    assert fp16.optimizer["grad_scaler/count"].item() == 3


def test_precisions_differ(lab):
    denoiser, dataset = lab.Flow(), lab.pictures()
    found = [
        train(_state(lab, denoiser, dataset, precision=p), denoiser, dataset, 3)
        for p in ("float32", "bf16", "fp16", "full-bf16")
    ]
    name = "blocks.0.ff.lora_up.weight"
    assert len({bytes(state.trained[name].numpy().data) for state in found}) == 4
    auto = train(_state(lab, denoiser, dataset, precision="auto"), denoiser, dataset, 3)
    assert torch.equal(auto.trained[name], found[0].trained[name])


# --- settings and runs ------------------------------------------------------------------------------------------------


def test_another_optimizer_begins_with_a_state_of_its_own(lab):
    denoiser, dataset = lab.Flow(), lab.pictures()
    first = train(_state(lab, denoiser, dataset, "adamw", FULL), denoiser, dataset, 3)
    slower = change_settings(first, OptimizerSettings(learning_rate=1e-3, batch_size=4), None)
    assert slower.optimizer is first.optimizer
    other = change_settings(first, OptimizerSettings("sgd", 1e-3, batch_size=4), None)
    assert not other.optimizer
    assert {key.split("/")[0] for key in train(other, denoiser, dataset, 1).optimizer} == {"momentum_buffer"}


def test_prodigy_begins_anew_where_its_mean_of_gradients_comes_or_goes(lab):
    pytest.importorskip("prodigyopt")
    denoiser, dataset = lab.Flow(), lab.pictures()
    without = train(_state(lab, denoiser, dataset, "prodigy", FULL, options="betas = 0 0.9"), denoiser, dataset, 2)
    settings = without.settings.optimizer
    also = change_settings(without, replace(settings, options="betas = 0 0.99"), None)
    assert also.optimizer is without.optimizer and train(also, denoiser, dataset, 1).step == 3
    for options in ("betas = 0.9 0.99", ""):
        other = change_settings(without, replace(settings, options=options), None)
        assert not other.optimizer and train(other, denoiser, dataset, 1).step == 3


@pytest.mark.parametrize("change", [{"checkpointing": True}, {"offload": "activations"}, {"offload": "optimizer"}])
def test_what_changes_speed_only_keeps_the_identity(lab, change):
    denoiser, dataset = lab.Flow(), lab.pictures()
    plain, other = (train(_state(lab, denoiser, dataset, **more), denoiser, dataset, 3) for more in ({}, change))
    assert equal(plain, other) and plain.settings != other.settings


def test_rates_of_blocks_and_factors_reach_the_step(lab):
    denoiser, dataset = lab.Flow(), lab.pictures()
    rates = {"block_rates": "blocks.0.*=0, /ff$/=0.5", "lora_plus": 4.0}
    common = {"optimizer": "sgd", "clip_norm": 0.0, "weight_decay": 0.0, **BARE}
    plain, other = (_state(lab, denoiser, dataset, **common, **more) for more in ({}, rates))
    one, two = (train(state, denoiser, dataset, 1) for state in (plain, other))
    for name in one.trained:
        expected = (4.0 if "lora_up" in name else 1.0) * (0.5 if ".ff." in name else 0.0 if "blocks.0" in name else 1.0)
        step = [state.trained[name] - start.trained[name] for start, state in ((plain, one), (other, two))]
        assert torch.allclose(step[0] * expected, step[1], atol=1e-7), name


def test_a_text_encoder_has_its_own_rate():
    settings = OptimizerSettings("sgd", 1e-2, text_encoder_rate=1e-3)
    trained = {name: torch.zeros(2) for name in ("a.lora_up.weight", "text_encoders.a.lora_up.weight")}
    stepper = OptimizerStepper(settings, trained, {}, torch.device("cpu"), 0)
    stepper.prepare(1e-2, 0)
    for t in stepper.trained.values():
        t.grad = torch.ones(2)
    stepper.step_()
    assert [stepper.trained[name][0].item() for name in trained] == pytest.approx([-1e-2, -1e-3])


def test_history_is_json(lab):
    denoiser, dataset = lab.Flow(), lab.pictures()
    state = train(_state(lab, denoiser, dataset, precision="fp16"), denoiser, dataset, 2)
    json.dumps([state.history.loss, state.history.norm, state.history.rate], allow_nan=False)


def test_schedule_free_validates_the_average_and_goes_on_from_where_it_was(lab):
    denoiser, dataset = lab.Flow(), lab.pictures(held_out=[9])
    state = train(
        _state(lab, denoiser, dataset, "schedulefree", FULL), denoiser, dataset, 4, Callbacks(validate_every=4)
    )
    again = Workspace(state, denoiser, dataset)
    assert any(not torch.equal(t, state.trained[name]) for name, t in again.trained.items())  # y is not x
    live = {name: t.detach().clone() for name, t in again.trained.items()}
    with again.stepper.use_sampling_weights():
        assert all(torch.equal(t, state.trained[name]) for name, t in again.trained.items())
    assert all(torch.equal(t, live[name]) for name, t in again.trained.items())
    (library,) = again.stepper.optimizers
    library.eval()  # the library's own way from y to x
    assert all(torch.allclose(t, state.trained[name], atol=1e-6) for name, t in again.trained.items())


@pytest.mark.parametrize("optimizer", AVERAGES)
def test_an_exchange_that_breaks_off_is_no_state_or_gives_every_byte_back(lab, optimizer):
    class Break(TorchDispatchMode):
        def __init__(self, at):
            super().__init__()
            self.left = at

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.copy_.default:
                self.left -= 1
                if not self.left:
                    raise KeyboardInterrupt
            return func(*args, **(kwargs or {}))

    denoiser, dataset = lab.Flow(), lab.pictures()
    state = train(_state(lab, denoiser, dataset, optimizer, PAIRS), denoiser, dataset, 2)
    count, usable = len(state.trained), []
    for at in range(1, 2 * count + 1):
        work = Workspace(state, denoiser, dataset)
        live = {name: t.detach().clone() for name, t in work.trained.items()}
        with pytest.raises(KeyboardInterrupt), Break(at), work.stepper.use_sampling_weights():
            pass
        is_back = all(torch.equal(t, live[name]) for name, t in work.trained.items())
        assert is_back or not work.is_usable
        usable.append(work.is_usable)
    assert usable == [True] * count + [False] * count


def test_schedule_free_refuses_an_average(lab):
    denoiser, dataset = lab.Flow(), lab.pictures()
    _need("schedulefree")
    settings = Settings(OptimizerSettings("schedulefree"))
    with pytest.raises(ValueError, match="disconnect EMA Settings"):
        begin(denoiser.module, Start("m", dataset.digest, PAIRS, EMASettings()), settings)


FLIPS = [
    {"optimizer": "sgd"},
    {"learning_rate": 2e-2},
    {"schedule": "linear"},
    {"schedule": "polynomial"},
    {"schedule": "cosine-restarts"},
    {"warmup": 2},
    {"total_steps": 9},
    {"floor": 0.5},
    {"batch_size": 2},
    {"accumulation": 2},
    {"clip_norm": 1e-3},
    {"weight_decay": 0.5},
    {"lora_plus": 4.0},
    {"precision": "bf16"},
    {"scale_lr": True},
    {"block_rates": "blocks.1.*=0.5"},
]


@pytest.mark.parametrize("flip", FLIPS, ids=str)
def test_no_setting_is_dead(lab, flip):
    """The others: text_encoder_rate is refused without a text encoder; checkpointing, offload, fused_backward change no
    bytes.
    """
    denoiser, dataset = lab.Flow(), lab.pictures()
    plain, other = (train(_state(lab, denoiser, dataset, **more), denoiser, dataset, 5) for more in ({}, flip))
    assert any(not torch.equal(t, other.trained[name]) for name, t in plain.trained.items()) and plain.key != other.key


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "cosine-restarts", "polynomial"])
def test_two_calls_are_one_on_every_schedule(lab, schedule):
    denoiser, dataset = lab.Flow(), lab.pictures()
    start = _state(
        lab, denoiser, dataset, schedule=schedule, floor=0.0 if schedule == "constant" else 0.1, total_steps=10
    )
    whole = train(start, denoiser, dataset, 8)
    assert equal(whole, train(train(start, denoiser, dataset, 3), denoiser, dataset, 5))
    assert whole.history.rate[7] == rate_at(start.settings.optimizer, 7)
