"""Weights and biases of modules that keep them in their own way, read through their forward, against the numbers that
they hold.
"""

import pytest
import torch
from graft_nodes.patches.models.layers import bias_of, shape_of, weight_of
from torch import nn

CPU = torch.device("cpu")


class Bytes:
    """Weight and bias as bytes, one behind the other, multiplied out in the forward in the type of the activations."""

    def __init__(self, *arguments, **settings):
        super().__init__(*arguments, **settings)
        generator = torch.Generator().manual_seed(1)
        for name, scale in (("weight", 0.002), ("bias", 0.1)):
            sides = getattr(self, name).shape
            kept = torch.randint(-127, 128, (sides.numel(),), generator=generator, dtype=torch.int8)
            setattr(self, name, nn.Parameter(kept, requires_grad=False))
            self.register_buffer(f"{name}_scale", torch.tensor(scale))
            setattr(self, f"{name}_sides", sides)

    def held(self, name, dtype=torch.float64):
        return (getattr(self, name).to(dtype) * getattr(self, f"{name}_scale").to(dtype)).view(
            getattr(self, f"{name}_sides")
        )

    def forward(self, x):
        weight, bias = self.held("weight", x.dtype), self.held("bias", x.dtype)
        return (
            nn.functional.linear(x, weight, bias)
            if isinstance(self, nn.Linear)
            else self._conv_forward(x, weight, bias)
        )


def kept(of):
    return type(f"Bytes{of.__name__}", (Bytes, of), {})


MODULES = {
    "linear": lambda: kept(nn.Linear)(12, 8),
    "1x1": lambda: kept(nn.Conv2d)(12, 8, 1),
    "padded": lambda: kept(nn.Conv2d)(12, 8, 3, padding=1),
    "strided": lambda: kept(nn.Conv2d)(12, 8, 3, stride=2, padding=1),
    "long strides": lambda: kept(nn.Conv2d)(12, 8, 2, stride=5),
    "of two sides": lambda: kept(nn.Conv2d)(12, 8, (2, 5), padding=(1, 0)),
    "dilated": lambda: kept(nn.Conv2d)(12, 8, 3, padding="same", dilation=2),
    "reflecting": lambda: kept(nn.Conv2d)(12, 8, 3, padding=2, padding_mode="reflect"),
    "circular": lambda: kept(nn.Conv1d)(12, 8, 5, padding=2, padding_mode="circular"),
    "of groups": lambda: kept(nn.Conv2d)(12, 8, 3, padding=1, groups=2),
    "of as many groups": lambda: kept(nn.Conv2d)(12, 12, 3, groups=12),
    "3d": lambda: kept(nn.Conv3d)(4, 8, (1, 3, 3), stride=(1, 2, 2), padding=(0, 1, 1)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODULES)
def test_read_through_the_forward(name, dtype):
    """In bfloat16 too, beside biases that are forty times as large as weights, and each number by itself; nothing of
    the module changes.
    """
    module = MODULES[name]()
    before = dict(module.__dict__)
    assert shape_of(module) == tuple(module.weight_sides) and module.weight.ndim == 1
    weight, bias = weight_of(module, dtype, CPU), bias_of(module, dtype, CPU)
    exact = dtype == torch.float32
    assert weight.dtype == bias.dtype == torch.float32 and weight.shape == module.weight_sides
    own = module.held("weight").abs() / (1e5 if exact else 60) + (1e-5 if exact else 2e-4 if weight.ndim > 2 else 7e-2)
    assert bool(((weight - module.held("weight")).abs() <= own).all())
    assert torch.allclose(bias.double(), module.held("bias"), rtol=1e-5 if exact else 1e-2)
    assert module.__dict__ == before


@pytest.mark.parametrize("kind", [nn.Linear, nn.Conv2d])
def test_a_plain_bias_does_not_blur_the_weight(kind):
    """Whatever its size: in bfloat16, numbers below 0.3 beside a thousand would be rounded to whole eights."""

    class PlainBias(kept(kind)):
        def forward(self, x):
            weight, bias = self.held("weight", x.dtype), self.bias.to(x.dtype)
            return nn.functional.linear(x, weight, bias) if kind is nn.Linear else self._conv_forward(x, weight, bias)

    module = PlainBias(12, 8) if kind is nn.Linear else PlainBias(12, 8, 3)
    bias = module.bias = nn.Parameter(torch.full((8,), 1000.0), requires_grad=False)
    weight = weight_of(module, torch.bfloat16, CPU)
    assert torch.allclose(weight.double(), module.held("weight"), rtol=2**-7, atol=1e-6)
    assert module.bias is bias and torch.equal(bias_of(module, torch.bfloat16, CPU), bias)


def test_many_times_over(monkeypatch):
    """In as many goes as its size asks for."""
    module = MODULES["of groups"]()
    monkeypatch.setattr("graft_nodes.patches.models.layers.PROBE_NUMBERS", 700)
    assert torch.allclose(weight_of(module, torch.float32, CPU).double(), module.held("weight"), atol=1e-5)


def test_plain_fp8_is_read_as_it_is():
    module = nn.Conv2d(4, 8, 3).requires_grad_(False)
    module.weight.data = module.weight.data.to(torch.float8_e4m3fn)
    assert torch.equal(weight_of(module, torch.float16, CPU), module.weight.float())


@pytest.mark.parametrize("name", ["weight_function", "weight_lowvram_function"])
def test_what_the_host_does_to_a_weight_on_its_way_counts(name):
    """As a partly loaded or paged model's LoRAs do."""

    class Casting(nn.Conv2d):
        def forward(self, x):
            return self._conv_forward(x, getattr(self, name)[0](self.weight), self.bias)

    module = Casting(4, 8, 3, stride=2).requires_grad_(False)
    setattr(module, name, [lambda weight: 3 * weight])
    assert torch.allclose(weight_of(module, torch.float32, CPU), 3 * module.weight, atol=1e-6)


def test_a_forward_that_does_something_else_is_refused():
    class Causal(kept(nn.Conv1d)):
        def forward(self, x):
            return super().forward(nn.functional.pad(x, (2, 0)))

    module = Causal(4, 8, 3, stride=2)
    with pytest.raises(
        ValueError,
        match=r"Causal: its forward made \(1, 8, 5\) of \(1, 4, 5\), expected \(1, 8, 3\); set patch mode to host",
    ):
        weight_of(module, torch.float32, CPU)
    assert module.stride == (2,)
