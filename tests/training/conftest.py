"""A tiny flow model, its pictures, and states to train: what the tests of the core work on, without any host."""

import pytest
import torch
from graft_nodes.ema.decay import EMASettings
from graft_nodes.training.data.dataset import Conditioning, Dataset
from graft_nodes.training.objective.settings import ObjectiveSettings
from graft_nodes.training.optimizers.settings import OptimizerSettings
from graft_nodes.training.state import Settings, Start, begin
from graft_nodes.training.tasks.registry import task_for
from graft_nodes.training.trainable.settings import AdapterSettings
from torch import nn


class Block(nn.Module):
    """Attention-like names, a convolution and a buffer."""

    def __init__(self, width):
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)
        self.attn1 = nn.ModuleDict({"to_q": nn.Linear(width, width), "to_out": nn.Linear(width, width, bias=False)})
        self.ff = nn.Linear(width, width)
        self.proj_in = nn.Conv2d(width, width, 1)
        self.register_buffer("shift", torch.full((1,), 0.1))

    def forward(self, x):
        x = x + self.conv(x)
        rows = self.proj_in(x).movedim(1, -1)
        rows = self.attn1["to_out"](torch.tanh(self.attn1["to_q"](rows))) + self.shift
        return x + self.ff(rows).movedim(-1, 1)


class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.blocks = nn.ModuleList([Block(width), Block(width)])
        self.norm = nn.GroupNorm(2, width)

    def forward(self, x, context):
        for block in self.blocks:
            x = block(x)
        return self.norm(x) * (1 + context)


class Flow:
    """A denoiser of rectified flow; `calls` counts forwards, `fail_at` makes one of them give NaN, `seen` holds
    transformer options.
    """

    prediction = "flow"
    device = torch.device("cpu")
    auto_type = None
    own_type = torch.float32
    room_for_blocks = 0
    kept_weights = None

    def __init__(self, module=None):
        generator = torch.Generator().manual_seed(1)
        self.module = module or Net()
        with torch.no_grad():
            for p in self.module.parameters():
                p.copy_(torch.randn(p.shape, generator=generator) * 0.3)
        self.calls, self.fail_at, self.seen = 0, None, []

    def process_in(self, latents):
        return latents * 0.5

    def sigma(self, u):
        return u.clamp(min=1e-3)

    def noisy(self, clean, noise, sigma):
        t = sigma.view(-1, 1, 1, 1)
        return (1 - t) * clean + t * noise

    def denoise(self, x, sigma, conditionings, options):
        self.calls += 1
        self.seen.append(dict(options))
        context = torch.stack([c.context.mean() for c in conditionings]).view(-1, 1, 1, 1)
        out = x - sigma.view(-1, 1, 1, 1) * self.module(x, context)
        return out * float("nan") if self.calls == self.fail_at else out


def pictures(count=10, shape=(4, 6, 6), seed=0, **settings):
    generator = torch.Generator().manual_seed(seed)
    latents = [torch.randn(shape, generator=generator) for _ in range(count)]
    conditionings = {
        text: Conditioning(torch.full((1, 1, 1), value)) for text, value in (("a", 0.5), ("b", -0.5), ("", 0.0))
    }
    return Dataset.from_latents(latents, ["a", "b"] * (count // 2) + ["a"] * (count % 2), conditionings, **settings)


class Lab:
    """Makes datasets, denoisers and states with a few words."""

    Flow, Net, Block = Flow, Net, Block
    pictures = staticmethod(pictures)

    @staticmethod
    def state(denoiser, dataset, adapter=None, ema=True, seed=3, objective=None, **optimizer):
        optimizer = {
            "learning_rate": 1e-2,
            "batch_size": 4,
            "schedule": "cosine",
            "total_steps": 30,
            "warmup": 3,
            **optimizer,
        }
        adapter = adapter or AdapterSettings(targets="all", rank=2)
        average = EMASettings("ramp") if ema else None
        start = Start("model", dataset.digest, adapter, average, seed, task=task_for(dataset))
        return begin(denoiser.module, start, Settings(OptimizerSettings(**optimizer), objective or ObjectiveSettings()))


@pytest.fixture
def lab():
    return Lab
