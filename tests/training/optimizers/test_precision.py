"""Which type a forward pass computes in, and the loss scale of whatever computes in fp16."""

import types

import pytest
import torch
from graft_nodes.training.optimizers.precision import LossScale, autocast, autocast_type, computes_in_fp16
from graft_nodes.training.optimizers.settings import OptimizerSettings
from graft_nodes.training.run.step import advance_
from graft_nodes.training.run.workspace import Workspace
from graft_nodes.training.trainable.settings import AdapterSettings

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ALL = AdapterSettings(targets="all", rank=2)


def network(auto=None, own=FP32):
    return types.SimpleNamespace(device=torch.device("cpu"), auto_type=auto, own_type=own)


@pytest.mark.parametrize(
    ("precision", "auto", "own", "cast", "scaled"),
    [
        ("auto", BF16, FP16, BF16, False),
        ("auto", FP16, BF16, FP16, True),  # a card that would emulate bf16
        ("auto", None, FP16, None, True),  # SDXL on MPS, XPU and DirectML
        ("auto", None, BF16, None, False),
        ("float32", BF16, FP16, None, True),  # no autocast: the model is what it was loaded as
        ("float32", FP16, FP32, None, False),
        ("bf16", FP16, FP16, BF16, False),
        ("full-bf16", None, FP16, BF16, False),
        ("fp16", BF16, FP32, FP16, True),
    ],
)
def test_the_type_that_is_computed_in(precision, auto, own, cast, scaled):
    settings, card = OptimizerSettings(precision=precision), network(auto, own)
    assert autocast_type(settings, card) == cast
    assert computes_in_fp16(settings, card) == scaled
    with autocast(settings, card):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == (cast or FP32)


def small_gradients(lab, own_type):
    """The first step along gradients so small that fp16 has no numbers for them, with the network in a type."""
    denoiser = lab.Flow(lab.Net(width=4))
    denoiser.own_type = own_type
    denoiser.module.to(own_type)
    forward, denoise = denoiser.module.forward, denoiser.denoise
    denoiser.module.forward = lambda x, context: forward(x.to(own_type), context.to(own_type)).float()
    denoiser.sigma = lambda u: torch.full_like(u, 0.9)
    denoiser.denoise = lambda x, sigma, *rest: x + 1e-5 * denoise(x, sigma, *rest)
    dataset = lab.pictures(4)
    settings = {"ema": False, "learning_rate": 1.0, "optimizer": "sgd", "clip_norm": 0.0, "weight_decay": 0.0}
    work = Workspace(lab.state(denoiser, dataset, ALL, **settings), denoiser, dataset)
    before = {name: tensor.detach().clone() for name, tensor in work.trained.items()}
    with work.install():
        advance_(work)
    return torch.cat([(work.trained[name].detach() - before[name]).flatten() for name in before])


def test_a_model_that_is_loaded_in_fp16_has_a_loss_scale(lab):
    """Without one most of these gradients would be nothing."""
    expected, found = (small_gradients(lab, dtype) for dtype in (FP32, FP16))
    assert expected.abs().max() > 0
    assert float((found - expected).norm() / expected.norm()) < 0.02


def test_a_fused_backward_pass_is_refused_where_auto_means_fp16(lab):
    denoiser, dataset = lab.Flow(), lab.pictures()
    denoiser.auto_type = FP16
    settings = {"ema": False, "fused_backward": True, "clip_norm": 0.0}
    with pytest.raises(ValueError, match=r"training precision auto computes in fp16.*fused backward"):
        Workspace(lab.state(denoiser, dataset, ALL, **settings), denoiser, dataset)


def with_gradients(*values):
    tensors = {}
    for number, value in enumerate(values):
        tensors[str(number)] = torch.zeros(2, requires_grad=True)
        tensors[str(number)].grad = torch.tensor([1.0, value])
    return tensors


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_any_gradient_that_is_not_finite_halves_the_scale(bad):
    scale = LossScale({})
    first = scale.scale
    assert not scale.unscale_(with_gradients(2.0, bad, 3.0))
    scale.step_()
    assert scale.scale == first / 2 and scale.state()["grad_scaler/count"].item() == 0


def test_gradients_are_divided_by_the_scale_exactly():
    scale, trained = LossScale({}), with_gradients(3.0e-3)
    assert scale.scale_loss(torch.tensor(1.5)) == 1.5 * scale.scale
    assert scale.unscale_(trained)
    assert torch.equal(trained["0"].grad * scale.scale, torch.tensor([1.0, 3.0e-3]))


def test_the_scale_doubles_after_two_thousand_good_steps_also_across_a_saved_state():
    scale = LossScale({})
    first = scale.scale
    for step in range(2000):
        if step == 1000:
            scale = LossScale(scale.state())
        assert scale.scale == first and scale.unscale_(with_gradients(1.0))
        scale.step_()
    assert scale.scale == 2 * first


def test_a_step_without_gradients_is_not_counted():
    scale = LossScale({})
    assert scale.unscale_({"a": torch.zeros(2, requires_grad=True)})
    scale.step_()
    assert scale.state()["grad_scaler/count"].item() == 0
