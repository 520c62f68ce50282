"""VAEs of ComfyUI's own classes are trained: the decoder learns and the encoder keeps its bytes, gradients are those of
finite differences, and Load VAE reads what VAE Save writes.
"""

import json
import os

import comfy.sd
import numpy as np
import pytest
import torch
from comfy.ldm.models.autoencoder import AutoencoderKL, AutoencodingEngine
from comfy.taesd.taesd import TAESD
from graft_nodes.host import trainable_vae as autoencoders
from graft_nodes.tests import fake_lpips
from graft_nodes.training.data.dataset import Conditioning, Dataset, DatasetImage
from graft_nodes.training.memory.checkpointing import blocks
from graft_nodes.training.run import step as steps
from graft_nodes.training.run import workspace
from graft_nodes.training.tasks import discriminator
from graft_nodes.training.trainable.vae_parts import last_layer

import nodes

TINY = {
    "double_z": True,
    "z_channels": 4,
    "resolution": 32,
    "in_channels": 3,
    "out_ch": 3,
    "ch": 32,
    "ch_mult": [1, 2],
    "num_res_blocks": 1,
    "attn_resolutions": [],
    "dropout": 0.0,
}
CLASSES = "comfy.ldm.modules.diffusionmodules.model."


def _kl():
    """SD's, SDXL's and Flux.2's class."""
    return AutoencoderKL(ddconfig=TINY, embed_dim=4)


def _engine(sizes=TINY):
    """Flux.1's and Z-Image's class."""
    return AutoencodingEngine(
        regularizer_config={"target": "comfy.ldm.models.autoencoder.DiagonalGaussianRegularizer"},
        encoder_config={"target": CLASSES + "Encoder", "params": sizes},
        decoder_config={"target": CLASSES + "Decoder", "params": sizes},
    )


def _wan():
    """Wan's and Qwen-Image's class, whose pictures are clips of one frame."""
    from comfy.ldm.wan.vae import WanVAE

    return WanVAE(dim=16, z_dim=4, dim_mult=[1, 2], num_res_blocks=1, attn_scales=[], temperal_downsample=[False])


def _taesd():
    """The small VAE of previews, for any of these models."""
    return TAESD(latent_channels=4)


# What is left of the error: the latents of random encoders tell only a part of a picture.
LEARNED = {"kl": 0.5, "engine": 0.5, "wan": 0.85, "taesd": 0.8}
RATES = {"taesd": 5e-4}  # it diverges at the others' on some CPUs
KINDS = {"kl": _kl, "engine": _engine, "wan": _wan, "taesd": _taesd}
OF_DECODER = {
    "kl": {"decoder", "post_quant_conv"},
    "engine": {"decoder"},
    "wan": {"decoder", "conv2"},
    "taesd": {"taesd_decoder"},
}
SHRUNK = {"taesd": 8}  # times, from pixels to latents; else 2


def _vae(kind):
    """A comfy.sd.VAE around a tiny network with random weights."""
    with torch.inference_mode():
        vae = comfy.sd.VAE(sd={}, config={"params": {"ddconfig": TINY, "embed_dim": 4}}, dtype=torch.float32)
        network = KINDS[kind]().eval()
        draw = torch.Generator().manual_seed(0)
        for weight in network.parameters():
            if weight.ndim > 1:
                weight.copy_(torch.randn(weight.shape, generator=draw) * weight[0].numel() ** -0.5)
            elif kind == "taesd":
                weight.copy_(weight if weight.ndim == 0 else 0.1 * torch.randn(weight.shape, generator=draw))
            else:
                weight.copy_(1 + 0.1 * torch.randn(weight.shape, generator=draw))
        vae.first_stage_model = network
        vae.patcher = type(vae.patcher)(network, load_device=vae.device, offload_device=vae.device)
        vae.downscale_ratio = vae.upscale_ratio = SHRUNK.get(kind, 2)
        if kind == "wan":
            vae.latent_dim = 3
            vae.upscale_ratio = (lambda a: max(0, a * 4 - 3), 2, 2)
            vae.downscale_ratio = (lambda a: max(0, (a + 3) // 4), 2, 2)
    return vae


def _dataset():
    draw = np.random.default_rng(0)

    def picture(number):
        pixels = np.full((3, 32, 32), draw.integers(0, 255, (3, 1, 1)), dtype=np.uint8)
        pixels[:, 8:24, 2 * number : 2 * number + 12] = draw.integers(0, 255, (3, 1, 1))
        return DatasetImage(str(number), "", torch.from_numpy(pixels))

    images = tuple(picture(number) for number in range(6))
    conditionings = {"": Conditioning(torch.zeros(1, 1, 1))}
    pictures = Dataset(images[:4], conditionings, "pictures", images[4:])
    return Dataset(images[:4], conditionings, "latents", images[4:], pictures=lambda: pictures)


def _begun(host, kind, run, **given):
    vae = _vae(kind)
    (optimizer,) = host.call("GraftOptimizer", learning_rate=RATES.get(kind, 2e-3), batch_size=2, total_steps=40)
    given = {"crop": 16, "vae": vae, "dataset": _dataset(), "optimizer": optimizer, **given}
    state, _ = host.call("GraftTrainVAEStart", run=f"vae {run} {kind}", **given)
    return vae, state


@pytest.mark.parametrize("kind", KINDS)
def test_the_decoder_learns_and_the_encoder_keeps_its_bytes(host, kind):
    vae, state = _begun(host, kind, "decoder", crop=32)
    before = {name: tensor.clone() for name, tensor in vae.get_sd().items()}
    made = host.call("TrainStep", state=state, steps=40, validate_every=40)[0]
    (_, first), (_, last) = made.history.validation
    assert last < LEARNED[kind] * first
    trained, report = host.call("GraftTrainedVAE", state=made)
    assert "the latent space is the same" in report
    after = trained.get_sd()
    assert all(torch.equal(tensor, vae.get_sd()[name]) for name, tensor in before.items())
    moved = {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}
    assert moved and {name.split(".")[0] for name in moved} <= OF_DECODER[kind]
    held_out = torch.stack([image.latent for image in state.subject.dataset.held_out]).movedim(1, -1) / 255
    for one, measured in ((vae, first), (trained, last)):
        errors = []
        for picture in held_out:
            with torch.inference_mode():
                latents = vae.encode(picture[None])
                assert torch.equal(latents, one.encode(picture[None]))
                decoded = one.first_stage_model.decode(latents).reshape(3, 32, 32)
            errors.append((decoded.double() - (picture.movedim(-1, 0).double() * 2 - 1)).abs().mean())
        assert float(torch.stack(errors).mean()) == pytest.approx(measured, rel=1e-4)


def test_pictures_leave_what_a_video_vae_does_with_other_frames(host, monkeypatch):
    from comfy.ldm.wan.vae import WanVAE

    def of_video():
        return WanVAE(dim=16, z_dim=4, dim_mult=[1, 2], num_res_blocks=1, attn_scales=[], temperal_downsample=[True])

    monkeypatch.setitem(KINDS, "wan", of_video)
    (optimizer,) = host.call("GraftOptimizer", learning_rate=2e-3, weight_decay=0.0, total_steps=2)
    vae, state = _begun(host, "wan", "frames", optimizer=optimizer, part="whole", latent_bound=100.0)
    trained, _ = host.call("GraftTrainedVAE", state=host.call("TrainStep", state=state, steps=2)[0])
    before, after = (dict(one.first_stage_model.named_parameters()) for one in (vae, trained))
    over_time = [name for name, weight in before.items() if weight.ndim == 5 and weight.shape[2] > 1]
    assert any("time_conv" in name for name in over_time) and len(over_time) > 10
    for name in over_time:
        moved = [not torch.equal(before[name][:, :, at], after[name][:, :, at]) for at in range(3)]
        assert moved == [False, False, "time_conv" not in name], name  # the last is the frame itself


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("part", ["decoder", "whole"])
@pytest.mark.parametrize("looks", [False, True], ids=["pixels", "looks"])
def test_gradients_are_those_of_finite_differences(host, monkeypatch, kind, part, looks):
    given = {"part": part, "edge": 0.5, "mse": 1.0}
    if looks:
        fake_lpips.installed(monkeypatch)
        monkeypatch.setattr(discriminator, "adaptive_weight", lambda *_: 3.0)  # it is a constant to the gradient
        given.update({"crop": 24, "lpips": 1.0, "discriminator": 0.5})
    if part == "whole" and kind in ("kl", "engine"):
        given["kl"] = 1e-4
    vae, state = _begun(host, kind, f"gradients {part} {looks}", **given)
    with torch.inference_mode(False), autoencoders.open_vae(vae) as coder:
        work = workspace.Workspace(state, coder, state.subject.dataset)
        try:
            with work.install():
                (batch, *_) = work.loader.take(work.step, 0)

                def loss():
                    return steps.batch_losses(work, batch, torch.Generator().manual_seed(0), {}).double().sum()

                loss().backward()
                halves = {name.split(".")[0] for name in work.trained}
                assert halves == {name for name, _ in coder.module.named_children() if _is_trained(name, part)}
                for half in halves:
                    weights = {name: weight for name, weight in work.trained.items() if name.split(".")[0] == half}
                    begun = {name: weight.detach().clone() for name, weight in weights.items()}
                    slope = sum(float(weight.grad.double().square().sum()) for weight in weights.values()) ** 0.5
                    assert slope > 0, half
                    step = 2e-3
                    if looks:
                        step /= slope  # a discriminator is far from straight: the loss changes by as much everywhere
                    values = []
                    for sign in (1, -1):
                        with torch.no_grad():
                            for name, weight in weights.items():
                                weight.copy_(begun[name] + sign * step * weight.grad / slope)
                        values.append(float(loss()))
                    with torch.no_grad():
                        for name, weight in weights.items():
                            weight.copy_(begun[name])
                    assert (values[0] - values[1]) / (2 * step) == pytest.approx(slope, rel=3e-2), half
        finally:
            work.close()


def _is_trained(name, part):
    decoder = ("decoder", "post_quant_conv", "conv2", "taesd_decoder")
    return name in decoder or (part == "whole" and name in ("encoder", "quant_conv", "conv1", "taesd_encoder"))


def _decoder_of(vae):
    network = vae.first_stage_model
    return getattr(network, "decoder", None) or network.taesd_decoder


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_the_decoder_forget_their_activations(host, kind):
    """Gradient checkpointing: the blocks of the decoder run twice in a step, and the weights are the same."""
    made, counts = [], []
    for checkpointing in (False, True):
        given = {"learning_rate": 2e-3, "batch_size": 2, "total_steps": 2, "checkpointing": checkpointing}
        (optimizer,) = host.call("GraftOptimizer", **given)
        vae, state = _begun(host, kind, f"checkpointing {checkpointing}", optimizer=optimizer)
        calls = []
        for block in blocks(_decoder_of(vae)):
            first = next(part for part in block.modules() if not list(part.children()))
            first.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        made.append(host.call("TrainStep", state=state, steps=2, validate_every=0, snapshot_every=0)[0])
        counts.append(len(calls))
    assert counts[0] and counts[1] == 2 * counts[0]
    plain, checkpointed = (one.trained for one in made)
    assert all(torch.equal(tensor, checkpointed[name]) for name, tensor in plain.items())


@pytest.mark.parametrize("kind", KINDS)
def test_two_calls_are_one(host, kind):
    given = {"part": "whole", "latent_bound": 1000.0}
    given.update({"crop": 24, "discriminator": 0.5, "discriminator_start": 1})
    _, once = _begun(host, kind, "once", **given)
    _, twice = _begun(host, kind, "twice", **given)
    whole = host.call("TrainStep", state=once, steps=3, validate_every=1)[0]
    first = host.call("TrainStep", state=twice, steps=1, validate_every=1)[0]
    second = host.call("TrainStep", state=first, steps=2, validate_every=1)[0]
    assert whole.history.loss == second.history.loss and whole.history.validation == second.history.validation
    assert all(torch.equal(tensor, second.trained[name]) for name, tensor in whole.trained.items())
    assert all(torch.equal(tensor, second.optimizer[name]) for name, tensor in whole.optimizer.items())


@pytest.mark.parametrize("kind", KINDS)
def test_the_adaptive_weight_is_measured_at_the_layer_that_makes_the_pictures(host, kind):
    vae, state = _begun(host, kind, "last layer", crop=24, discriminator=0.5)
    name = last_layer(state.trained)
    weight = dict(vae.first_stage_model.named_parameters())[name]
    assert weight.shape[0] == 3 and weight.ndim > 3
    assert name in ("decoder.conv_out.weight", "decoder.head.2.weight", "taesd_decoder.19.weight")


def _of_own_size(kind):
    """A network in the shape that Load VAE expects of its class."""
    sizes = {"double_z": True, "z_channels": 4, "resolution": 256, "in_channels": 3, "out_ch": 3, "ch": 128}
    sizes.update({"ch_mult": [1, 2, 4, 4], "num_res_blocks": 2, "attn_resolutions": [], "dropout": 0.0})
    if kind == "kl":
        return AutoencoderKL(ddconfig=sizes, embed_dim=4)
    if kind == "engine":
        return _engine({**sizes, "z_channels": 16})
    if kind == "wan":
        from comfy.ldm.wan.vae import WanVAE

        halves = [False, True, True]
        return WanVAE(
            dim=96, z_dim=16, dim_mult=[1, 2, 4, 4], num_res_blocks=2, attn_scales=[], temperal_downsample=halves
        )
    return TAESD(latent_channels=16)


@pytest.mark.parametrize("kind", KINDS)
def test_load_vae_reads_what_vae_save_writes(host, tmp_path, monkeypatch, kind):
    """A VAE of the real size with random weights, one step, through ComfyUI's own nodes."""
    with torch.inference_mode():
        network = _of_own_size(kind)
        draw = torch.Generator().manual_seed(0)
        weights = {}
        for name, weight in network.state_dict().items():
            weights[name] = torch.randn(weight.shape, generator=draw) * 0.02
        assert weights.keys() == network.state_dict().keys()
        del network
        vae = comfy.sd.VAE(sd=weights, dtype=torch.float32)
    (optimizer,) = host.call("GraftOptimizer", optimizer="sgd", learning_rate=1e-3, batch_size=1, total_steps=1)
    given = {"vae": vae, "dataset": _dataset(), "optimizer": optimizer, "run": f"vae full size {kind}"}
    state, _ = host.call("GraftTrainVAEStart", **given)
    made = host.call("TrainStep", state=state, steps=1, validate_every=0, snapshot_every=0)[0]
    trained, _ = host.call("GraftTrainedVAE", state=made)
    from comfy_extras.nodes_model_merging import VAESave

    saver = VAESave()
    saver.output_dir = str(tmp_path)
    saver.save(trained, "trained")
    (file,) = os.listdir(tmp_path)
    monkeypatch.setattr("folder_paths.get_full_path_or_raise", lambda kind, name: str(tmp_path / name))
    with torch.inference_mode():
        (loaded,) = nodes.VAELoader().load_vae(file)
    ours, theirs = trained.get_sd(), loaded.get_sd()
    assert json.dumps(sorted(ours)) == json.dumps(sorted(theirs))
    for name, tensor in ours.items():
        assert torch.equal(tensor.float(), theirs[name].float()), name
        if tensor.ndim > 1 and "time_conv" not in name:  # a single picture does not reach what joins frames
            assert torch.equal(tensor, weights[name]) == (name not in made.trained), name
    assert {name.split(".")[0] for name in made.trained} == OF_DECODER[kind]
    with torch.inference_mode():
        latents = trained.encode(torch.full((1, 32, 32, 3), 0.3))
        assert torch.equal(trained.decode(latents), loaded.decode(latents))
