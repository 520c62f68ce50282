"""Under ComfyUI's own way of compiling a model, whatever its guards look at, token downsampling comes, changes, rests
and goes.
"""

import pytest
import torch

BACKEND = "eager"  # guards are the same for every backend; this one needs no C++ compiler


def blind(guards):
    """As the TorchCompileModel of ComfyUI 0.33 filters guards."""
    return ["transformer_options" not in guard.name for guard in guards]


@pytest.fixture
def compiled():
    """A clone that compiles as TorchCompileModel makes it, with guards of both versions."""
    helpers = pytest.importorskip("comfy_api.torch_helpers", reason="the embedded host does not compile")

    def compiled(base, guards):
        clone = base.clone()
        options = {"guard_filter_fn": blind} if guards == "blind" else None
        helpers.set_torch_compile_wrapper(model=clone, backend=BACKEND, options=options)
        return clone

    torch._dynamo.reset()
    yield compiled
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("guards", "order"), [("blind", "ToDo before compiling"), ("blind", "after"), ("all", "after")]
)
def test_todo_comes_changes_and_goes(host, small, compiled, guards, order):
    model = small.unet(channels=32, mult=(1, 2), depth=(1, 1))

    def check(sigma=1.0, **inputs):
        plain = host.call("ApplyToDo", model=model, **inputs)[0]
        after = (
            compiled(plain, guards)
            if "before" in order
            else host.call("ApplyToDo", model=compiled(model, guards), **inputs)[0]
        )
        wanted = small.forward(plain, sigma=sigma)
        assert torch.allclose(
            small.forward(after, sigma=sigma), wanted, rtol=0, atol=1e-5 * float(wanted.abs().max())
        ), inputs
        return wanted

    settings = [{"factor": 1.0}, {"factor": 2.0}, {"factor": 3.0, "max_depth": 2}]
    seen = [check(**inputs) for inputs in settings]
    assert all(
        not torch.allclose(one, other, rtol=0, atol=1e-3) for number, one in enumerate(seen) for other in seen[:number]
    )
    for inputs in settings[::-1]:
        check(**inputs)
    level = float(model.get_model_object("model_sampling").percent_to_sigma(0.5))
    high, low = (check(sigma, factor=2.0, start_percent=0.5) for sigma in (2 * level, level / 2))
    assert torch.equal(high, seen[0]) and torch.equal(low, seen[1]), (
        "the noise level decides nothing but whether it thins"
    )
    check(factor=1.0)


def test_settings_that_were_compiled_are_found_again(host, small, compiled):
    model = small.unet(channels=32, mult=(1,), depth=(1,))
    sampled = compiled(model, "blind")
    first, second = (host.call("ApplyToDo", model=sampled, factor=factor)[0] for factor in (2.0, 3.0))
    for patcher in (sampled, first, second):
        for _ in range(2):  # torch.compile learns at the second call which sizes vary from layer to layer
            small.forward(patcher)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for patcher in (second, host.call("ApplyToDo", model=sampled, factor=2.0)[0], sampled):
            small.forward(patcher)
