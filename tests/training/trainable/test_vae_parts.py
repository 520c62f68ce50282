"""Which parts of a VAE are trained, by the names of ComfyUI's modules, and the layer that makes pictures."""

import pytest
import torch
from graft_nodes.tests.training.recipes.real_sizes import build
from graft_nodes.training.objective import patch_discriminator, perceptual
from graft_nodes.training.trainable.targets import adapter_targets
from graft_nodes.training.trainable.vae_parts import VaeSettings, adapter_for, last_layer, side_of
from torch import nn

SIDE = (4, 4)
KL = ("encoder.conv_in", "encoder.conv_out", "quant_conv", "post_quant_conv", "decoder.conv_in", "decoder.conv_out")
TINY = ("taesd_encoder.0", "taesd_decoder.1")
WAN = ("encoder.conv1", "conv1", "conv2", "decoder.conv1", "decoder.head.2")


@pytest.mark.parametrize(
    ("layers", "of_decoder"),
    [
        (KL, {"post_quant_conv", "decoder.conv_in", "decoder.conv_out"}),
        (TINY, {"taesd_decoder.1"}),
        (WAN, {"conv2", "decoder.conv1", "decoder.head.2"}),
    ],
    ids=["AutoencoderKL", "TAESD", "Wan"],
)
def test_the_decoder_or_the_whole_is_trained(layers, of_decoder):
    module = build(dict.fromkeys(layers, SIDE))
    assert set(adapter_targets(module, adapter_for(module, VaeSettings()))) == of_decoder
    whole = VaeSettings(part="whole")
    assert set(adapter_targets(module, adapter_for(module, whole))) == set(layers)


def test_a_vae_without_such_parts_is_refused():
    module = nn.ModuleDict({"decoder": nn.Identity(), "net": nn.Linear(2, 2)})
    with pytest.raises(ValueError, match=r"this VAE \(ModuleDict\) has no decoder with weights that Graft knows"):
        adapter_for(module, VaeSettings())


def test_the_last_layer_is_the_decoders_last_weight():
    names = ("decoder.conv_in.weight", "decoder.mid.weight", "decoder.conv_out.weight")
    trained = {"encoder.conv_in.weight": torch.ones(2, 2), **dict.fromkeys(names, torch.ones(2, 2))}
    trained |= {"decoder.conv_out.bias": torch.ones(2), "post_quant_conv.weight": torch.ones(2, 2)}
    assert last_layer(trained) == "decoder.conv_out.weight"


@pytest.mark.parametrize(
    ("length", "crop", "side"), [(100, 0, 96), (100, 64, 64), (100, 70, 64), (40, 64, 40), (8, 64, 8)]
)
def test_crops_are_multiples_of_the_factor(length, crop, side):
    assert side_of(length, crop, 8) == side


@pytest.mark.parametrize("only", ["l1", "mse", "edge", "lpips"])
def test_one_loss_is_enough_and_one_there_must_be(only):
    none = {"l1": 0.0, "mse": 0.0, "edge": 0.0, "lpips": 0.0}
    VaeSettings(**{**none, only: 0.1})
    VaeSettings(**{**none, "l1": 0.1, only: 2.0})
    with pytest.raises(ValueError, match="LPIPS weight are all 0: set one of them above 0"):
        VaeSettings(**none)


@pytest.mark.parametrize(
    ("loss", "least"), [("lpips", perceptual.LEAST_SIDE), ("discriminator", patch_discriminator.LEAST_SIDE)]
)
def test_crops_are_large_enough_for_their_losses(loss, least):
    for crop in (0, least):
        VaeSettings(crop=crop, **{loss: 1.0})
    with pytest.raises(ValueError, match=f"crop size is {least - 1}, and LPIPS and the discriminator need {least} pix"):
        VaeSettings(crop=least - 1, **{loss: 1.0})
