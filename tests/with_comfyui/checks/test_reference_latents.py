"""Pictures that bring reference latents: they reach the network, change the loss and the gradients, and pictures with
references of different sizes share no batch.
"""

import pytest
import torch
from families import build, conditions, latent, random
from graft_nodes import host as wall
from graft_nodes.training.data.batches import image_conditioning
from graft_nodes.training.data.dataset import Conditioning, Dataset, DatasetImage
from graft_nodes.training.optimizers.settings import OptimizerSettings
from graft_nodes.training.run import step as steps
from graft_nodes.training.run import workspace
from graft_nodes.training.state import Settings, Start, begin
from graft_nodes.training.trainable.settings import AdapterSettings
from tiny_families import EVERY

NAMES = ["flux kontext", "qwen edit"]


def references(name, seed, *sizes):
    """Reference latents of these sizes (h, w), as ReferenceLatent puts them into a conditioning."""
    channels = EVERY[name].latent[:-2]
    return {"reference_latents": [random(1, *channels, *size, seed=seed + n) for n, size in enumerate(sizes)]}


def dataset(name, extras):
    """A dataset of one picture for each of the extras, with one caption."""
    context, entries = conditions(name, 0)
    entries.pop("reference_latents")
    texts = {"": Conditioning(context, entries), "a": Conditioning(*conditions(name, 1))}
    texts["a"].extras.pop("reference_latents")
    pictures = [DatasetImage(str(n), "a", latent(name, 0), extras=own) for n, own in enumerate(extras)]
    return Dataset(tuple(pictures), texts, "digest")


def after_one_step(name, extras):
    """(loss, trained tensors) after one step with all pictures."""
    patcher, data = build(name), dataset(name, extras)
    settings = Settings(OptimizerSettings(learning_rate=1e-2, batch_size=len(extras), total_steps=10))
    network = patcher.model.diffusion_model
    state = begin(network, Start("m", data.digest, AdapterSettings(rank=2, targets="all")), settings)
    with wall.denoiser.open_denoiser(patcher) as denoiser:
        work = workspace.Workspace(state, denoiser, data)
        with work.install():
            result = steps.advance_(work)
        trained = {key: tensor.detach().clone() for key, tensor in work.trained.items()}
        work.close()
    moved = [key for key, tensor in trained.items() if not torch.equal(tensor, state.trained[key])]
    assert len(moved) > 0.4 * len(trained)  # of each pair the up factor, which begins at zero
    return result.loss, trained


@pytest.mark.parametrize("name", NAMES)
def test_a_reference_is_what_comfyui_gets_from_its_own_node(name):
    """The picture's entries equal a conditioning that holds them itself, alone and in a batch of two sizes."""
    data = dataset(
        name, [references(name, 1, (4, 6)), references(name, 2, (4, 6)), references(name, 3, (6, 4), (4, 4))]
    )
    found = [image_conditioning(data, "a", image.crop(0)) for image in data.images]
    core = [Conditioning(one.context, dict(one.extras)) for one in found]
    with wall.denoiser.open_denoiser(build(name)) as denoiser, torch.no_grad():
        clean = denoiser.process_in(torch.stack([image.latent for image in data.images]))
        sigma = denoiser.sigma(torch.tensor([0.3, 0.5, 0.7]))
        together = denoiser.denoise(clean, sigma, found, {})
        for number, conditioning in enumerate(core):
            alone = denoiser.denoise(clean[number : number + 1], sigma[number : number + 1], [conditioning], {})
            torch.testing.assert_close(together[number : number + 1], alone, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(together[0], together[1])


@pytest.mark.parametrize("name", NAMES)
def test_other_references_change_the_loss_and_what_is_learned(name):
    one, other = references(name, 1, (4, 6)), references(name, 2, (4, 6))
    first, second = after_one_step(name, [one, one]), after_one_step(name, [one, other])
    assert first[0] != second[0] and after_one_step(name, [one, one])[0] == first[0]
    assert any(not torch.equal(tensor, second[1][key]) for key, tensor in first[1].items())
    after_one_step(name, [one, references(name, 3, (6, 4), (4, 4))])  # two sizes, two numbers


def test_a_trained_text_encoder_keeps_the_entries_of_the_picture():
    class Clip:
        """A CLIP whose encoder gives a context and pooled output."""

        cond_stage_model = torch.nn.Linear(1, 1)
        tokenizer = None

        def clone(self):
            return Clip()

        def tokenize(self, text):
            return text

        def encode_from_tokens_scheduled(self, tokens):
            return [
                [torch.full((1, 6, 12), float(len(tokens)), requires_grad=True), {"pooled_output": torch.ones(1, 8)}]
            ]

    data = dataset("flux kontext", [references("flux kontext", 1, (4, 6))])
    known = image_conditioning(data, "a", data.images[0].crop(0))
    (live,) = wall.encoding.LiveEncoder(Clip())(["a"], [known])
    assert live.context.requires_grad and torch.equal(live.extras["pooled_output"], torch.ones(1, 8))
    assert live.extras["reference_latents"] is data.images[0].extras["reference_latents"]


def test_what_is_kept_on_the_device_has_a_limit(monkeypatch):
    from graft_nodes.host import conditions as kept

    name, count = "flux kontext", 12
    data = dataset(name, [references(name, number, (4, 6)) for number in range(count)])
    made = []
    patcher = build(name)
    own = patcher.model.extra_conds
    monkeypatch.setattr(patcher.model, "extra_conds", lambda **params: made.append(1) or own(**params), raising=False)
    with wall.denoiser.open_denoiser(patcher) as denoiser, torch.no_grad():
        x, sigma = torch.stack([image.latent for image in data.images]), torch.full((count,), 0.5)
        found = [image_conditioning(data, "a", image.crop(0)) for image in data.images]
        denoiser.denoise(x, sigma, found, {})
        denoiser.denoise(x, sigma, found, {})
        assert len(made) == count + 1  # once without references, to see that they count; then they were kept
        monkeypatch.setattr(kept, "KEPT_BYTES", 4 * (6 * 12 + 8 + 16 * 4 * 6 + 1))  # of one picture
        denoiser.denoise(x[:2], sigma[:2], [Conditioning(one.context, dict(one.extras)) for one in found[:2]], {})
        denoiser.denoise(x, sigma, found, {})
        assert len(made) == 2 * count + 3
