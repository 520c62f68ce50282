"""A VAE is trained: what it learns, one call or two, what is stored, its gradients, and what does not fit."""

import os

import numpy as np
import pytest
import torch
from graft_nodes.tests import fake_lpips
from PIL import Image


@pytest.fixture(scope="module")
def pictures(host):
    folder = os.path.join(host.input, "vae pictures")
    os.makedirs(folder, exist_ok=True)
    draw = np.random.default_rng(0)
    for i in range(8):
        pixels = np.full((96, 128, 3), draw.integers(0, 255, 3), dtype=np.uint8)
        pixels[24:72, 12 * i : 12 * i + 40] = draw.integers(0, 255, 3)
        Image.fromarray(pixels).save(os.path.join(folder, f"{i}.png"))
        with open(os.path.join(folder, f"{i}.txt"), "w", encoding="utf-8") as file:
            file.write("a picture")
    return "vae pictures"


def _workflow(host, pictures, run, *steps, optimizer=None, ema=None, damage=1.0, step=None, data=None, **given):
    def node(node_id, **values):
        return {"class_type": node_id, "inputs": {**host.defaults(node_id), **values}}

    data = {"folder": pictures, "resolution": 96, "bucket_step": 16, "validation": 0.25, **(data or {})}
    prompt = {
        "1": node("GraftDemo"),
        "2": node("GraftDataset", vae=["1", 2], clip=["1", 1], **data),
        "3": node("GraftDemoVAE", damage=damage),
        "4": node("GraftOptimizer", **{"learning_rate": 1e-2, "batch_size": 2, "total_steps": 4, **(optimizer or {})}),
        "5": node("GraftTrainVAEStart", vae=["3", 0], dataset=["2", 0], settings=["4", 0], run=run),
    }
    prompt["5"]["inputs"].update({"crop": 64, **given})
    if ema is not None:
        prompt["6"] = node("GraftEMA", settings=["4", 0], **ema)
        prompt["5"]["inputs"]["settings"] = ["6", 0]
    at = ["5", 0]
    for number, count in enumerate(steps):
        values = {"validate_every": 2, **(step or {})}
        prompt[str(10 + number)] = node("TrainStep", state=at, steps=count, **values)
        at = [str(10 + number), 0]
    prompt["20"] = node("GraftTrainedVAE", state=at, weights="average" if ema is not None else "last")
    return prompt


def _run(host, prompt, last="10"):
    host.fresh()
    capture = {
        "state": [last, 0],
        "report": [last, 5],
        "start": ["5", 0],
        "start report": ["5", 1],
        "dataset": ["2", 0],
        "base": ["3", 0],
        "vae": ["20", 0],
        "vae report": ["20", 1],
    }
    result = host.run(prompt, capture=capture)
    assert result["success"], result["errors"]
    return result["captured"]


def _error(vae, pictures):
    """The mean absolute error of pictures (B, H, W, 3) through a VAE, in float64, by its own encode and decode."""
    with torch.inference_mode():
        return float((vae.decode(vae.encode(pictures)).double() - pictures.double()).abs().mean())


def _held_out(state):
    return torch.stack([image.latent for image in state.subject.dataset.held_out]).movedim(1, -1).float() / 255


def _weights(vae):
    """A VAE's weights, wherever it is loaded."""
    return {name: tensor.cpu() for name, tensor in vae.get_sd().items()}


def _through(module, pictures):
    """Pictures (B, 3, H, W) through a network, wherever it is loaded."""
    device = next(module.parameters()).device
    return module.decode(module.encode(pictures.to(device))).cpu()


@pytest.fixture(scope="module")
def trained(host, pictures):
    return _run(host, _workflow(host, pictures, "vae", 60, optimizer={"total_steps": 60}, step={"validate_every": 20}))


def test_the_decoder_learns_and_the_encoder_keeps_its_bytes(host, trained):
    """The rule: from a damaged start the error of held-out pictures is at least halved. ComfyUI's nodes see it too."""
    state, base, vae = trained["state"], trained["base"], trained["vae"]
    (_, before), *_, (_, after) = state.history.validation
    assert after < 0.5 * before
    held_out = _held_out(state)
    assert len(held_out) == 2 and _error(vae, held_out) < 0.5 * _error(base, held_out)
    assert {name.split(".")[0] for name in state.trained} == {"decoder"}
    ours, theirs = _weights(vae), _weights(base)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(tensor, ours[name]) == (not name.startswith("decoder")), name
        if name in state.trained:
            assert torch.equal(ours[name], state.trained[name])
    assert torch.equal(vae.encode(held_out), base.encode(held_out))
    fresh = _weights(host.call("GraftDemoVAE", damage=1.0)[0])
    assert all(torch.equal(tensor, fresh[name]) for name, tensor in theirs.items())
    assert "the latent space is the same" in trained["vae report"]
    assert "decoder" not in trained["start report"] or "parameters in 3 modules" in trained["start report"]


@pytest.mark.slow
def test_the_template_repairs_the_decoder(host):
    """The template as it is: the error of held-out pictures is at least halved, and what the demo model draws is
    through the trained VAE as through one that was never damaged, but for the half of the damage at most.
    """
    graph = host.template("Repair a VAE's decoder")
    ids = {node["class_type"]: node_id for node_id, node in graph.items()}
    capture = {"state": [ids["TrainStep"], 0], "latents": [ids["KSampler"], 0], "whole": [ids["GraftDemo"], 2]}
    capture |= {"base": [ids["GraftDemoVAE"], 0], "vae": [ids["GraftTrainedVAE"], 0]}
    for node_id, node in graph.items():
        if node["class_type"] == "VAEDecode":
            capture["after" if node["inputs"]["vae"] == capture["vae"] else "before"] = [node_id, 0]
    host.fresh()
    result = host.run(graph, capture)
    assert result["success"], result["errors"]
    found = result["captured"]
    state, base, vae = found["state"], found["base"], found["vae"]
    (_, first), *_, (_, last) = state.history.validation
    held_out = _held_out(state)
    assert last < 0.5 * first and _error(vae, held_out) < 0.5 * _error(base, held_out)
    assert torch.equal(vae.encode(held_out), base.encode(held_out))
    theirs, ours = _weights(base), _weights(vae)
    assert all(torch.equal(tensor, ours[name]) for name, tensor in theirs.items() if not name.startswith("decoder"))
    with torch.inference_mode():
        whole = found["whole"].decode(found["latents"]["samples"]).double()
    before, after = (float((found[name].double() - whole).abs().mean()) for name in ("before", "after"))
    assert after < 0.5 * before, (before, after)


def test_the_held_out_error_is_that_of_the_tiles(host, trained):
    """Each held-out picture of 80 x 112 in four tiles of 64, the last of which end with the picture."""
    state, vae = trained["state"], trained["vae"]
    module = vae.first_stage_model
    losses = []
    for picture in _held_out(state).movedim(-1, 1):
        height, width = picture.shape[1:]
        tiles = [
            picture[:, top : top + 64, left : left + 64]
            for top in sorted({0, height - 64})
            for left in sorted({0, width - 64})
        ]
        with torch.inference_mode():
            scaled = torch.stack(tiles).double() * 2 - 1
            decoded = _through(module, scaled.float()).double()
        losses.append((decoded - scaled).abs().mean())
    assert len(tiles) == 4
    assert state.history.validation[-1][1] == pytest.approx(float(torch.stack(losses).mean()), rel=1e-5)


@pytest.mark.parametrize("part", ["decoder", "whole"])
def test_two_calls_are_one(host, pictures, part):
    given = {
        "part": part,
        "latent_bound": 100.0,
        "edge": 0.5,
        "mse": 0.5,
        "ema": {"schedule": "constant", "decay": 0.5},
    }
    if part == "whole":
        given["kl"] = 1e-6
    once = _run(host, _workflow(host, pictures, f"vae once {part}", 4, **given))
    twice = _run(host, _workflow(host, pictures, f"vae twice {part}", 1, 3, **given), "11")
    assert host.module("training.state").equal(once["state"], twice["state"])
    assert once["state"].history.loss == twice["state"].history.loss
    assert once["state"].history.validation == twice["state"].history.validation
    average, last = once["state"].average, once["state"].trained
    saved = _weights(once["vae"])
    assert all(torch.equal(saved[name], tensor) for name, tensor in average.items())
    assert any(not torch.equal(last[name], tensor) for name, tensor in average.items())
    assert {name.split(".")[0] for name in last} == ({"decoder", "encoder"} if part == "whole" else {"decoder"})


def test_a_result_is_stored_and_a_run_that_ends_goes_on_from_its_snapshot(host, pictures, monkeypatch):
    whole = _run(host, _workflow(host, pictures, "vae stored", 4))
    again = _run(host, _workflow(host, pictures, "vae stored", 4))
    assert "stored result of step 4: nothing was trained" in again["report"]
    assert host.module("training.state").equal(whole["state"], again["state"])
    run_step, calls = host.module("training.run.loop"), []
    advance = run_step.advance_

    def failing(work):
        calls.append(work.step)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return advance(work)

    monkeypatch.setattr(run_step, "advance_", failing)
    prompt = _workflow(host, pictures, "vae broken", 4)
    with pytest.raises(BaseException) as stopped:
        assert host.run(prompt)["success"]
    assert isinstance(stopped.value, KeyboardInterrupt | AssertionError)
    monkeypatch.setattr(run_step, "advance_", advance)
    ended = _run(host, prompt)
    assert "went on from the snapshot at step 2" in ended["report"]
    assert ended["state"].history.loss == whole["state"].history.loss
    assert all(torch.equal(tensor, ended["state"].trained[name]) for name, tensor in whole["state"].trained.items())


ADVERSARIAL = {"discriminator": 0.5, "discriminator_start": 1}


def _judge(state):
    """The tensors of a state's discriminator and of its optimizer."""
    return {name: tensor for name, tensor in state.optimizer.items() if name.startswith("companions/discriminator/")}


def test_two_calls_with_a_discriminator_are_one(host, pictures, monkeypatch):
    fake_lpips.installed(monkeypatch)
    given = {**ADVERSARIAL, "lpips": 0.5, "optimizer": {"accumulation": 2}}
    once = _run(host, _workflow(host, pictures, "vae judged once", 4, **given))["state"]
    twice = _run(host, _workflow(host, pictures, "vae judged twice", 2, 2, **given), "11")["state"]
    assert host.module("training.state").equal(once, twice)
    assert once.history.loss == twice.history.loss and once.history.validation == twice.history.validation
    assert len(_judge(once)) == 4 * 13  # weights, and of Adam two means and a count


def test_the_discriminator_takes_part_after_its_first_steps(host, pictures):
    plain, judged, other = (
        _run(host, _workflow(host, pictures, f"vae judged {number}", 3, **given))["state"]
        for number, given in enumerate(({}, {"discriminator": 0.5, "discriminator_start": 2}, {"discriminator": 0.5}))
    )
    assert judged.history.loss[:2] == plain.history.loss[:2] and judged.history.loss[2] != plain.history.loss[2]
    assert judged.history.validation[:2] == plain.history.validation[:2]  # at steps 0 and 2, without the discriminator
    assert other.history.loss[0] != plain.history.loss[0] and other.history.validation[0] == plain.history.validation[0]
    assert any(not torch.equal(tensor, judged.trained[name]) for name, tensor in plain.trained.items())
    (count,) = {int(tensor) for name, tensor in _judge(judged).items() if "/step/" in name}
    assert count == 1


def test_another_optimizer_keeps_the_discriminator(host, pictures):
    begun = _run(host, _workflow(host, pictures, "vae judged kept", 2, **ADVERSARIAL))["state"]
    (lion,) = host.call("GraftOptimizer", optimizer="lion", learning_rate=1e-4, batch_size=2, total_steps=3)
    (state, *_) = host.call("TrainStep", state=begun, steps=1, optimizer=lion, validate_every=0)
    steps = {int(tensor) for name, tensor in _judge(state).items() if "/step/" in name}
    assert steps == {2}


def test_the_held_out_error_counts_lpips_and_no_discriminator(host, pictures, monkeypatch):
    fake_lpips.installed(monkeypatch)
    given = {"crop": 0, "l1": 0.0, "lpips": 2.0, "discriminator": 0.5}
    found = _run(host, _workflow(host, pictures, "vae looks", 2, **given))
    looks, module, losses = fake_lpips.LPIPS(verbose=False), found["vae"].first_stage_model, []
    for picture in _held_out(found["state"]).movedim(-1, 1):
        scaled = picture[None] * 2 - 1
        with torch.no_grad(), torch.inference_mode(False):
            losses.append(2 * float(looks(_through(module, scaled.clone()), scaled)))
    assert found["state"].history.validation[-1][1] == pytest.approx(sum(losses) / len(losses), rel=1e-4)


def test_a_saved_state_goes_on_with_its_discriminator(host, pictures):
    whole = _run(host, _workflow(host, pictures, "vae judged saved", 4, **ADVERSARIAL))["state"]
    half = _run(host, _workflow(host, pictures, "vae judged saved b", 2, **ADVERSARIAL))
    host.call("GraftSaveState", state=half["state"], name="judged")
    vae = host.call("GraftDemoVAE", damage=1.0)[0]
    (loaded,) = host.call("GraftLoadState", name="judged", vae=vae, dataset=half["dataset"])
    (state, *_) = host.call("TrainStep", state=loaded, steps=2, validate_every=2)
    assert all(torch.equal(tensor, whole.trained[name]) for name, tensor in state.trained.items())
    assert all(torch.equal(tensor, _judge(state)[name]) for name, tensor in _judge(whole).items())


def test_a_saved_state_goes_on(host, pictures):
    whole = _run(host, _workflow(host, pictures, "vae saved", 4))
    half = _run(host, _workflow(host, pictures, "vae saved b", 2))
    host.call("GraftSaveState", state=half["state"], name="vae")
    with pytest.raises(ValueError, match="vae trains a VAE, and none is connected"):
        host.call("GraftLoadState", name="vae")
    other = host.call("GraftDemoVAE", damage=0.5)[0]
    with pytest.raises(ValueError, match="does not fit: it was trained on the VAE"):
        host.call("GraftLoadState", name="vae", vae=other)
    vae = host.call("GraftDemoVAE", damage=1.0)[0]
    (alone,) = host.call("GraftLoadState", name="vae", vae=vae)
    with pytest.raises(ValueError, match="loaded without its dataset"):
        host.call("TrainStep", state=alone, steps=1)
    (loaded,) = host.call("GraftLoadState", name="vae", vae=vae, dataset=half["dataset"])
    assert loaded.start == half["state"].start
    (state, *_) = host.call("TrainStep", state=loaded, steps=2, validate_every=2)
    assert all(torch.equal(tensor, whole["state"].trained[name]) for name, tensor in state.trained.items())


def test_a_saved_state_of_a_decoder_refuses_another_encoder(host, pictures):
    """Its decoder would be trained on latents of another space."""
    made = _run(host, _workflow(host, pictures, "vae encoder", 1))
    host.call("GraftSaveState", state=made["state"], name="encoder")
    vae = host.call("GraftDemoVAE", damage=1.0)[0]
    (loaded,) = host.call("GraftLoadState", name="encoder", vae=vae, dataset=made["dataset"])
    assert loaded.step == 1
    names = [name for name, _ in vae.first_stage_model.named_parameters() if name.startswith("encoder")]
    values = dict(vae.first_stage_model.named_parameters())[names[0]]
    other = host.module("host.trainable_vae").copy_with_weights(vae, {names[0]: values + 0.01})
    said = "it was trained on the VAE [0-9a-f]{16}, and the VAE that is connected is [0-9a-f]{16}. Connect that one; "
    said += r"to go on with another, start a run with it \(Start VAE Training\)"
    with pytest.raises(ValueError, match=said):
        host.call("GraftLoadState", name="encoder", vae=other, dataset=made["dataset"])


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"l1": 0.0, "mse": 1.0},
        {"edge": 1.0, "l1": 0.0},
        {"part": "whole", "kl": 1e-3, "mse": 1.0, "latent_bound": 100.0},
        {"lpips": 1.0},
        {"discriminator": 0.5},
    ],
    ids=["l1", "mse", "edge", "kl", "lpips", "discriminator"],
)
def test_gradients_are_those_of_finite_differences(host, pictures, monkeypatch, given):
    fake_lpips.installed(monkeypatch)
    _hold_adaptive_weights(host, monkeypatch)
    steps, coders = host.module("training.run.step"), host.module("host.trainable_vae")
    state = _run(host, _workflow(host, pictures, f"vae gradients {sorted(given)}", 1, **given))["state"]
    with torch.inference_mode(False), coders.open_vae(state.subject.vae) as coder:
        work = host.module("training.run.workspace").Workspace(state, coder, state.subject.dataset)
        try:
            with work.install():
                batch, *_ = work.loader.take(work.step, 0)

                def loss():
                    return steps.batch_losses(work, batch, torch.Generator().manual_seed(0), {}).double().sum()

                loss().backward()
                for name, weight in work.trained.items():
                    if float(weight.grad.norm()) == 0:
                        assert name == "encoder.bias" or "draw" not in name, name
                        continue
                    way = weight.grad / weight.grad.norm()
                    begun, values = weight.detach().clone(), []
                    for sign in (1, -1):
                        with torch.no_grad():
                            weight.copy_(begun + sign * 1e-3 * way)
                        values.append(float(loss()))
                    with torch.no_grad():
                        weight.copy_(begun)
                    assert (values[0] - values[1]) / 2e-3 == pytest.approx(float(weight.grad.norm()), rel=3e-2), name
        finally:
            work.close()


def _hold_adaptive_weights(host, monkeypatch):
    """The adaptive weight is a constant to the gradient, so it must stay as it was first."""
    discriminator, known = host.module("training.tasks.discriminator"), []
    measure = discriminator.adaptive_weight

    def first(*given):
        if not known:
            known.append(measure(*given))
        return known[0]

    monkeypatch.setattr(discriminator, "adaptive_weight", first)


def test_the_whole_vae_stops_when_the_latent_space_moves(host, pictures):
    near = {"part": "whole", "optimizer": {"learning_rate": 1e-5}}
    found = _run(host, _workflow(host, pictures, "vae near", 4, **near))
    moved = float(found["vae report"].partition("moved by ")[2].split()[0])
    held_out = _held_out(found["state"])
    base, now = (found[one].encode(held_out).double() for one in ("base", "vae"))
    assert 0 < moved < 0.1
    assert moved == pytest.approx(float((now - base).square().mean().sqrt() / base.std()), rel=0.3)  # of tiles
    host.call("GraftSaveState", state=found["state"], name="near")
    loaded = host.call("GraftLoadState", name="near", vae=host.call("GraftDemoVAE", damage=1.0)[0])[0]
    says = "loaded without a dataset, so how far the latents have moved is not measured"
    with torch.inference_mode():
        saved = host.node("GraftTrainedVAE").execute(state=loaded)
    assert says in saved.args[1] and says not in found["vae report"]
    assert saved.ui == {"text": [saved.args[1]]}
    host.fresh()
    result = host.run(_workflow(host, pictures, "vae far", 4, part="whole", latent_bound=0.01))
    assert not result["success"]
    assert "the latents of held-out pictures have moved by" in str(result["errors"])
    assert "latent bound allows 0.01" in str(result["errors"])
    unmeasured = _workflow(host, pictures, "vae unmeasured", 4, part="whole", latent_bound=0.01)
    unmeasured["10"]["inputs"]["validate_every"] = 0
    host.fresh()
    result = host.run(unmeasured, capture={"vae": ["20", 0]})
    assert not result["success"] and "Trained VAE: the latents of held-out images" in str(result["errors"])


def test_previews_are_pictures_beside_their_reconstructions(host, pictures):
    prompt = _workflow(host, pictures, "vae previews", 2, damage=0.0, step={"preview_every": 2})
    found = _run(host, prompt)
    folder = os.path.join(host.output, "graft", "vae previews", "previews")
    names = sorted(os.listdir(folder))
    assert len(names) == 2 and "2 previews" in found["report"]
    held_out = _held_out(found["state"])
    for name, picture in zip(names, held_out, strict=True):
        shown = torch.from_numpy(np.asarray(Image.open(os.path.join(folder, name)).convert("RGB")).copy()).float() / 255
        left, right = shown.chunk(2, dim=1)
        assert (left - picture).abs().mean() < 0.05
        assert (right - found["vae"].decode(found["vae"].encode(picture[None]))[0]).abs().mean() < 0.05


def test_crops_are_drawn_and_bound_what_goes_through_the_vae(host, pictures, monkeypatch):
    seen, demo = [], host.module("demo.vae").DemoAutoencoder
    encode = demo.encode
    monkeypatch.setattr(demo, "encode", lambda self, pixels: seen.append(pixels.clone()) or encode(self, pixels))
    _run(host, _workflow(host, pictures, "vae crops", 3, crop=32, step={"validate_every": 0}))
    assert {tuple(one.shape) for one in seen} == {(2, 3, 32, 32)}
    seen.clear()
    _run(host, _workflow(host, pictures, "vae no crops", 1, crop=0, step={"validate_every": 0}))
    assert {tuple(one.shape[-2:]) for one in seen} == {tuple(found) for found in [_size(host, pictures)]}


def _size(host, pictures):
    _model, clip, vae = host.call("GraftDemo")[:3]
    data = {"folder": pictures, "resolution": 96, "bucket_step": 16}
    (dataset, *_) = host.call("GraftDataset", vae=vae, clip=clip, **data)
    assert dataset.as_pictures().images[0].latent.dtype == torch.uint8
    return dataset.as_pictures().images[0].latent.shape[-2:]


def test_pictures_beyond_what_stays_in_memory_are_read_when_they_are_drawn(host, pictures, monkeypatch):
    kept = _run(host, _workflow(host, pictures, "vae in memory", 3))["state"]
    picture = kept.subject.dataset.images[0].latent
    monkeypatch.setattr(host.module("training.data.encoding"), "KEPT_BYTES", 2 * picture.numel())
    read = _run(host, _workflow(host, pictures, "vae from files", 3))["state"]
    images = read.subject.dataset.images + read.subject.dataset.held_out
    assert [isinstance(image.latent, torch.Tensor) for image in images] == [True] * 2 + [False] * 6
    assert read.history.loss == kept.history.loss and read.history.validation == kept.history.validation
    assert all(torch.equal(tensor, read.trained[name]) for name, tensor in kept.trained.items())


def test_a_run_of_a_diffusion_model_is_stored_as_before(host):
    states, settings = host.module("training.state"), host.module("training.trainable.vae_parts")
    plain = states.Start("model", "data")
    assert plain.digest == "34dc336173360d429db1f7f9c0e9c25d192de5cdb3064c2b10518fbbdcefd113"
    assert states.Start("model", "data", task="vae", task_settings=settings.VaeSettings()).digest != plain.digest


REFUSED = {
    "no loss": ({"l1": 0.0}, "L1 weight, MSE weight, edge weight and LPIPS weight are all 0"),
    "kl of a decoder": ({"kl": 1e-6}, "KL weight is 1e-06 and what to train is decoder"),
    "small crops for a discriminator": (
        {"crop": 16, "discriminator": 0.5},
        "crop size is 16, and LPIPS and the discriminator need 24 pixels or more",
    ),
    "fp16 with a discriminator": (
        {"discriminator": 0.5, "optimizer": {"precision": "fp16"}},
        "training precision is fp16, and discriminator weight of Start VAE Training is above 0",
    ),
    "no rate of a discriminator": ({"discriminator_rate": 0.0}, "smaller than min of 1e-07"),
    "no package for LPIPS": ({"lpips": 1.0}, "pip install lpips torchvision, or set LPIPS weight to 0"),
    "no weights": ({"vae": ["1", 2]}, "this VAE has no weights, as Demo Model's"),
    "nothing held out": ({"part": "whole", "data": {"validation": 0.0}}, "no image is held out to see whether"),
    "snapshots": ({"ema": {"schedule": "power", "snapshots": 1, "widths": "0.05 0.1"}}, "EMA Settings keeps snapshots"),
    "compile": (
        {"optimizer": {"compile": "blocks"}},
        "compile is blocks, and VAE training takes none: set compile to off",
    ),
    "offload": (
        {"optimizer": {"offload": "activations"}},
        "offload to CPU memory is activations, and VAE training takes none",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused(host, pictures, case):
    given, said = REFUSED[case]
    host.fresh()
    result = host.run(_workflow(host, pictures, f"vae refused {case}", 1, **given))
    assert not result["success"] and said in str(result["errors"]), result["errors"]


def test_several_ranks_are_refused(host, trained):
    process_group, tasks = host.module("training.distributed.process_group"), host.module("training.tasks.registry")

    class Two(process_group.SingleProcess):
        size = 2

    state = trained["state"]
    with host.module("host.trainable_vae").open_vae(state.subject.vae) as coder:
        tasks.task_of(state).check(state, coder, state.subject.dataset, process_group.SingleProcess())
        with pytest.raises(ValueError, match="a VAE is trained by one process, and there are several ranks"):
            tasks.task_of(state).check(state, coder, state.subject.dataset, Two())


NO_PICTURES = "this VAE is not one of pictures, and VAE training takes pictures only"
NO_SINGLE_ONES = r"Graft does not know how this VAE \(DemoAutoencoder\) takes single pictures"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"latent_dim": 1}, NO_PICTURES),
        ({"output_channels": 4}, NO_PICTURES),
        ({"not_video": True}, NO_SINGLE_ONES),
        ({"latent_dim": 3, "temporal_compression_decode": lambda: None}, NO_SINGLE_ONES),
        ({"patcher": None}, "this VAE has no weights, as Demo Model's"),
        ({"first_stage_model": torch.nn.Identity()}, "this VAE has no weights, as Demo Model's"),
    ],
    ids=["sound", "four channels", "layers", "frames", "no patcher", "no parameters"],
)
def test_a_vae_that_cannot_be_trained_is_refused(host, given, said):
    vae = host.call("GraftDemoVAE", damage=1.0)[0]
    check = host.module("host.trainable_vae").check_trainable
    check(vae)
    for name, value in given.items():
        setattr(vae, name, value)
    with pytest.raises(ValueError, match=f"Start VAE Training: .*{said}"):
        check(vae)


def test_a_vae_with_patches_on_it_is_refused(host):
    vae = host.call("GraftDemoVAE", damage=1.0)[0]
    vae.patcher = vae.patcher.clone()
    name, weight = next(iter(vae.first_stage_model.named_parameters()))
    assert vae.patcher.add_patches({name: (torch.zeros_like(weight),)})
    with pytest.raises(ValueError, match=r"this VAE has 1 patched weights on it\. Connect it without them"):
        host.module("host.trainable_vae").check_trainable(vae)


def test_other_nodes_say_that_it_is_a_vae(host, trained):
    state = trained["state"]
    with pytest.raises(ValueError, match="This training state is of a VAE"):
        host.call("GraftSaveLoRA", state=state)
    (objective,) = host.call("GraftObjective")
    with pytest.raises(ValueError, match="whose losses are set in Start VAE Training"):
        host.call("TrainStep", state=state, steps=1, objective=objective)
    _, model, clip, lora, losses, _ = host.call("TrainStep", state=state, steps=0)
    assert "so there is no MODEL" in model.message and "no CLIP" in clip.message and "no LoRA" in lora.message
    assert len(losses["loss"]) == 60
    model, clip, _ = host.call("GraftDemo")[:3]
    with pytest.raises(ValueError, match="this dataset has latents only, as Samples makes it"):
        dataclass = host.module("training.data.dataset")
        conditionings = {"": dataclass.Conditioning(torch.zeros(1, 1, 1))}
        plain = dataclass.Dataset.from_latents([torch.zeros(3, 8, 8)], [""], conditionings)
        host.call("GraftTrainVAEStart", vae=trained["base"], dataset=plain, run="vae samples")


def test_pictures_that_are_too_small_for_a_discriminator_are_named(host, trained):
    data = host.module("training.data.dataset")
    nothing = {"": data.Conditioning(torch.zeros(1, 1, 1))}
    image = data.DatasetImage("thin.png", "", torch.zeros(3, 200, 20, dtype=torch.uint8))
    pictures = data.Dataset((image,), nothing, "pictures")
    latents = data.Dataset((image,), nothing, "latents", pictures=lambda: pictures)
    given = {"vae": trained["base"], "dataset": latents, "run": "vae thin", "discriminator": 0.5}
    state, _ = host.call("GraftTrainVAEStart", **given)
    with pytest.raises(ValueError, match=r"of thin\.png a side of 16 pixels is left, and LPIPS and the discriminator"):
        host.call("TrainStep", state=state, steps=1, validate_every=0)


@pytest.mark.parametrize("with_pictures", [False, True])
def test_a_slider_is_no_dataset_of_a_vae(host, trained, with_pictures):
    clip, vae = host.call("GraftDemo")[1:3]
    prompts = {"positive": "a green circle", "negative": "a red circle", "target": "a yellow circle"}
    given = {**prompts, "width": 64, "height": 64, "clip": clip, "vae": vae}
    if with_pictures:
        given["dataset"] = trained["dataset"]
    slider = host.call("GraftSlider", **given)[0]
    with pytest.raises(ValueError, match="Slider is connected, which trains a LoRA"):
        host.call("GraftTrainVAEStart", vae=trained["base"], dataset=slider, run="vae slider")


def test_what_to_change_when_memory_runs_out_is_what_vae_training_has(host, pictures, monkeypatch):
    loop = host.module("training.run.loop")

    def short(_work):
        raise MemoryError("out of memory")

    monkeypatch.setattr(loop, "advance_", short)
    host.fresh()
    result = host.run(_workflow(host, pictures, "vae short of memory", 2))
    less = (
        "To need less: make batch size smaller than 2 (a larger gradient accumulation keeps the step the same); or make"
        " crop size of Start VAE Training smaller."
    )
    assert less in str(result["errors"]).replace("\\n", " ")
