"""A made-up kind of training, which compares features that a small network of its own learns beside the model. Its one
record takes it through a node, a run, validation, previews, a saved state and its resumption, and the reports.
"""

import os
import types
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from torch.nn.functional import conv2d, relu

NODE = "GraftTestFeatureStart"
RATE, WEIGHT, FEATURES = 0.05, 3.0, 6
STEPS = 4


@dataclass(frozen=True)
class FeatureSettings:
    """How much the features count."""

    weight: float = WEIGHT


class Critic:
    """One convolution whose features tell clean latents from denoised ones: a companion that moves by plain descent."""

    def __init__(self, saved, channels, device):
        self.kernel = saved.get("kernel", first_kernel(channels)).to(device, copy=True)
        self.pictures = 0

    def prepare(self, step):
        self.change, self.pictures = torch.zeros_like(self.kernel), 0

    def features(self, latents):
        return relu(conv2d(latents, self.kernel, padding=1))

    @torch.enable_grad()
    def learn(self, denoised, clean):
        kernel = self.kernel.clone().requires_grad_()
        means = [relu(conv2d(latents, kernel, padding=1)).mean() for latents in (clean, denoised.detach())]
        (gradient,) = torch.autograd.grad((means[0] - means[1]) * len(clean), kernel)
        self.change += gradient
        self.pictures += len(clean)

    def finish_gradients(self):
        self.change /= max(1, self.pictures)
        return float(self.change.norm())

    def step_(self):
        self.kernel += RATE * self.change

    def state(self):
        return {"kernel": self.kernel.cpu().clone()}


def first_kernel(channels):
    return torch.randn(FEATURES, channels, 3, 3, generator=torch.Generator().manual_seed(5)) * 0.3


def feature_task(host):
    """The class of the task, of the pack as the host has imported it."""
    denoising, interface = host.module("training.tasks.denoising"), host.module("training.tasks.task")
    read_latent = host.module("training.data.stored_latent").read_latent
    companion_tensors, collate = host.module("training.state").companion_tensors, host.module("training.data.batches")

    class FeatureTask(denoising.DenoisingTask):
        def check(self, state, denoiser, dataset, group):
            super().check(state, denoiser, dataset, group)
            if state.start.task_settings.weight > 100:
                raise ValueError("Train Features: weight is above 100.")

        def companions(self, state, device):
            channels = state.subject.dataset.images[0].shape[0]
            self.critic = Critic(companion_tensors(state, "critic"), channels, device)
            return {"critic": self.critic}

        def losses(self, context, batch, draws):
            x, target, drawn = self.add_noise(context, batch, draws)
            denoised = context.denoiser.denoise(x, drawn.sigma, batch.conditionings, draws.options)
            if draws.number is None:
                self.critic.learn(denoised, target)
            difference = self.critic.features(denoised) - self.critic.features(target)
            return context.start_state.start.task_settings.weight * difference.abs().flatten(1).mean(1)

        def held_out(self, context, item, draws):
            losses = self.losses(context, collate.collate([item] * 2), draws)
            return interface.Measures(losses, torch.tensor(0.25))

        def previews(self, state, dataset):
            def shown(denoiser, image):
                return (
                    self.critic_of(state)
                    .features(read_latent(image.latent)[None].float())[0, :3]
                    .movedim(0, -1)
                    .clamp(0, 1)
                )

            return interface.Preview(shown=shown, images=dataset.images[:2])

        def critic_of(self, state):
            return Critic(companion_tensors(state, "critic"), state.subject.dataset.images[0].shape[0], "cpu")

        def beginning(self, state, dataset):
            return [f"features count {state.start.task_settings.weight:g} times"]

        def report(self, state):
            kernel = companion_tensors(state, "critic")["kernel"]
            return [*super().report(state), f"the critic has {kernel.numel()} weights"]

    return FeatureTask


def start_node(host):
    """A node that makes a training state one of this kind, and says so."""
    from comfy_api.latest import io

    text = host.module("training.reports.text")

    class FeatureStart(io.ComfyNode):
        @classmethod
        def define_schema(cls):
            state = io.Custom("GRAFT_TRAIN_STATE")
            inputs = [state.Input("state"), io.Float.Input("weight", default=WEIGHT)]
            return io.Schema(node_id=NODE, inputs=inputs, outputs=[state.Output(), io.String.Output()])

        @classmethod
        def execute(cls, state, weight=WEIGHT):
            start = replace(state.start, task="features", task_settings=FeatureSettings(weight))
            state = replace(state, start=start)
            return io.NodeOutput(state, text.beginning(state, state.subject.dataset, ()))

    return FeatureStart


@pytest.fixture
def features(host):
    """The kind, listed in the pack's registry, and its node."""
    registry, interface = host.module("training.tasks.registry"), host.module("training.tasks.task")
    kind = interface.TaskKind("features", feature_task(host), FeatureSettings)
    host.register(start_node(host))
    with registry.TASKS.registered(kind):
        yield kind
    del host.nodes.NODE_CLASS_MAPPINGS[NODE]


@pytest.fixture
def begun(host, features):
    """`begun(run, weight)`: (state at step 0, report of its start), and `begun.given` of Start Training."""
    folder = os.path.join(host.input, "made_up_task")
    os.makedirs(folder, exist_ok=True)
    draws = np.random.default_rng(0)
    for number in range(4):
        pixels = draws.integers(0, 255, (64, 64, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(os.path.join(folder, f"{number}.png"))
    model, clip, vae = host.call("GraftDemo")[:3]
    data = {"folder": "made_up_task", "vae": vae, "clip": clip, "resolution": 64, "bucket_step": 64, "validation": 0.25}
    (adapter,) = host.call("GraftAdapter", rank=2)
    (optimizer,) = host.call("GraftOptimizer", learning_rate=1e-2, batch_size=2, total_steps=8)
    dataset = host.call("GraftDataset", **data)[0]
    given = {"model": model, "dataset": dataset, "vae": vae, "adapter": adapter, "optimizer": optimizer}

    def begin(run, weight=WEIGHT):
        state, _ = host.call("GraftTrainStart", **given, run=run)
        return host.call(NODE, state=state, weight=weight)

    return types.SimpleNamespace(state=begin, given=given)


def latent_of(host, image):
    return host.module("training.data.stored_latent").read_latent(image.latent).float()


def kernel(host, state):
    return host.module("training.state").companion_tensors(state, "critic")["kernel"]


def test_it_is_a_run_of_its_own_whose_network_learns(host, begun):
    state, report = begun.state("features")
    plain, _ = host.call("GraftTrainStart", **begun.given, run="features")
    digests = {state.start.digest, plain.start.digest, begun.state("features", 2.0)[0].start.digest}
    assert len(digests) == 3 and f"features count {WEIGHT:g} times" in report
    trained, *_, said = host.call("TrainStep", state=state, steps=STEPS, validate_every=2)
    moved = (kernel(host, trained) - first_kernel(state.subject.dataset.images[0].shape[0])).norm()
    assert moved > 1e-3 and f"the critic has {kernel(host, trained).numel()} weights" in said
    assert trained.history.loss[-1] > 0 and [row[0] for row in trained.history.validation] == [0, 2, 4]
    assert trained.history.accuracy == ((0, 0.25), (2, 0.25), (4, 0.25))
    again, *_, said = host.call("TrainStep", state=state, steps=STEPS, validate_every=2)
    assert "nothing was trained" in said and host.module("training.state").equal(trained, again)


def test_the_held_out_loss_is_that_of_the_formula(host, begun):
    """At step 0, where the model is the base and the network has its first weights: weight times mean |f(d) - f(x)|."""
    state, _ = begun.state("features by hand")
    trained = host.call("TrainStep", state=state, steps=1, validate_every=1)[0]
    draws = host.module("training.random_draws").generator(state.start.seed, 0, "validation")
    (image,) = state.subject.dataset.held_out
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        host.module("host").denoiser.open_denoiser(state.subject.model) as denoiser,
    ):
        shares = (torch.arange(2) + torch.rand((), generator=draws)) / 2
        sigma = denoiser.sigma(shares.to(denoiser.device))
        clean = denoiser.process_in(torch.stack([latent_of(host, image)] * 2).to(denoiser.device))
        noise = torch.randn(clean.shape, generator=draws).to(denoiser.device)
        known = [state.subject.dataset.conditionings[image.caption]] * 2
        denoised = denoiser.denoise(denoiser.noisy(clean, noise, sigma), sigma, known, {})
        found = [conv2d(x.double().cpu(), first_kernel(x.shape[1]).double(), padding=1) for x in (denoised, clean)]
    expected = WEIGHT * float((found[0].clamp(min=0) - found[1].clamp(min=0)).abs().mean())
    assert trained.history.validation[0] == (0, pytest.approx(expected, rel=1e-4))


def test_two_calls_a_saved_state_and_another_optimizer_go_on_from_the_network(host, begun, features):
    states = host.module("training.state")
    start, _ = begun.state("features resumed")
    whole = host.call("TrainStep", state=start, steps=STEPS, validate_every=2)[0]
    half = host.call("TrainStep", state=begun.state("features in parts")[0], steps=2, validate_every=2)[0]
    host.call("GraftSaveState", state=half, name="features half")
    loaded = host.call(
        "GraftLoadState", name="features half", model=begun.given["model"], dataset=begun.given["dataset"]
    )[0]
    assert loaded.start.task_settings == FeatureSettings(WEIGHT) and loaded.task == "features"
    ended = host.call("TrainStep", state=loaded, steps=2, validate_every=2)[0]
    assert states.equal(whole, ended) and whole.history == ended.history
    assert torch.equal(kernel(host, whole), kernel(host, ended))
    (lion,) = host.call("GraftOptimizer", optimizer="lion", learning_rate=1e-3, batch_size=2, total_steps=8)
    other = states.change_settings(half, lion.optimizer, None)
    assert torch.equal(kernel(host, other), kernel(host, half)) and len(other.optimizer) == 1
    registry = host.module("training.tasks.registry")
    registry.TASKS.unregister("features")
    try:
        with pytest.raises(ValueError, match="kind of training 'features', which this Graft does not know"):
            host.call("GraftLoadState", name="features half", model=begun.given["model"])
    finally:
        registry.TASKS.register(features)


def test_its_pictures_are_the_previews_and_its_lora_is_saved(host, begun, monkeypatch):
    state, _ = begun.state("features shown")
    previews, kept = host.module("host.previews"), []
    keep = previews.save_pictures
    monkeypatch.setattr(
        previews, "save_pictures", lambda pictures, *named: kept.append(pictures) or keep(pictures, *named)
    )
    trained, *_, report = host.call("TrainStep", state=state, steps=2, preview_every=2)
    names = os.listdir(os.path.join(host.output, "graft", "features shown", "previews"))
    assert len(names) == 2 and "2 previews, from" in report
    (pictures,) = kept
    for image, picture in zip(state.subject.dataset.images, pictures, strict=False):
        latent = latent_of(host, image)[None]
        expected = relu(conv2d(latent, first_kernel(latent.shape[1]), padding=1))[0, :3].movedim(0, -1).clamp(0, 1)
        assert torch.equal(picture, expected)
    (path,) = host.call("GraftSaveLoRA", state=trained, prefix="loras/features")
    with safe_open(path, "pt") as file:
        assert len(list(file.keys())) >= len(trained.trained)


def test_what_it_refuses_is_said_before_the_first_step(host, begun):
    with pytest.raises(ValueError, match=r"Train Features: weight is above 100\."):
        host.call("TrainStep", state=begun.state("features refused", 101.0)[0], steps=1)
