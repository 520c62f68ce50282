"""Noise levels, schedules and samplers against closed forms on models whose answer is known."""

import itertools
import math

import comfy.conds
import comfy.latent_formats
import comfy.model_base
import comfy.model_patcher
import comfy.sample
import comfy.samplers
import comfy.supported_models_base
import pytest
import torch

CPU = torch.device("cpu")
TYPES = comfy.model_base.ModelType


class Linear(torch.nn.Module):
    """A "UNet" whose output is gain * x plus the mean of its context; notes what it was called with."""

    def __init__(self, dtype=None, device=None, operations=None):
        super().__init__()
        self.dtype, self.gain, self.calls = torch.float32, 0.5, []

    def forward(self, x, timesteps, context=None, control=None, transformer_options=None, **kwargs):
        self.calls.append({"x": x.clone(), "t": timesteps.clone(), "options": transformer_options})
        return self.gain * x + context.mean(dim=(1, 2))[:, None, None, None]


def model(kind, scale=1.0, **settings):
    """A patcher of the linear model."""

    class Config(comfy.supported_models_base.BASE):
        unet_config = {}  # noqa: RUF012
        unet_extra_config = {}  # noqa: RUF012
        sampling_settings = settings

    config = Config({"in_channels": 3})
    config.unet_config = {}
    config.latent_format.scale_factor = scale
    made = comfy.model_base.BaseModel(config, kind, device=CPU, unet_model=lambda **kwargs: Linear(**kwargs))
    return comfy.model_patcher.ModelPatcher(made, CPU, CPU)


def cond(value, **more):
    return [[torch.full((1, 4, 5), float(value)), more]]


def run(
    patcher, sampler="euler", scheduler="normal", steps=4, cfg=1.0, positive=None, negative=None, latent=None, **more
):
    latent = torch.zeros(1, 3, 8, 8) if latent is None else latent
    noise = comfy.sample.prepare_noise(latent, 3)
    out = comfy.sample.sample(
        patcher,
        noise,
        steps,
        cfg,
        sampler,
        scheduler,
        positive or cond(0),
        negative or cond(0),
        latent,
        disable_pbar=True,
        seed=17,
        **more,
    )
    return out, noise


def test_noise_is_the_seeds_and_the_global_generator_is_left_alone(monkeypatch):
    latent = torch.zeros(2, 3, 4, 4)
    expected = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(9))
    assert torch.equal(comfy.sample.prepare_noise(latent, 9), expected)
    each = torch.cat(
        [torch.randn(1, 3, 4, 4, generator=g) for g in [torch.Generator().manual_seed(9)] for _ in range(2)]
    )
    assert torch.equal(comfy.sample.prepare_noise(latent, 9, noise_inds=[1, 0]), each[[1, 0]])


def test_eps_levels():
    levels = model(TYPES.EPS).model.model_sampling
    betas = torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64) ** 2
    alpha_bar = torch.cumprod(1 - betas, 0)
    torch.testing.assert_close(levels.sigmas, ((1 - alpha_bar) / alpha_bar).sqrt().float())
    assert levels.timestep(levels.sigmas[[0, 500, 999]]).tolist() == [0, 500, 999]
    torch.testing.assert_close(levels.sigma(torch.tensor(10.5)), (levels.sigmas[10] * levels.sigmas[11]).sqrt())
    assert levels.percent_to_sigma(0.0) > 1e8 and levels.percent_to_sigma(1.0) == 0.0
    assert levels.percent_to_sigma(0.5) == pytest.approx(
        (levels.sigmas[499] * levels.sigmas[500]).sqrt().item(), rel=1e-5
    )


def test_zero_terminal_snr():
    levels = model(TYPES.V_PREDICTION, zsnr=True).model.model_sampling
    assert levels.sigma_max > 1000 and levels.sigmas[0] == pytest.approx(
        model(TYPES.EPS).model.model_sampling.sigmas[0].item(), rel=1e-4
    )


@pytest.mark.parametrize("kind", [TYPES.EPS, TYPES.V_PREDICTION, TYPES.FLOW])
def test_the_right_prediction_gives_back_the_image(kind):
    levels, g = model(kind).model.model_sampling, torch.Generator().manual_seed(0)
    image, noise = torch.randn(2, 3, 4, 4, generator=g), torch.randn(2, 3, 4, 4, generator=g)
    sigma = torch.tensor([0.25, 0.75])
    s = sigma[:, None, None, None]
    noisy = levels.noise_scaling(sigma, noise, image)
    torch.testing.assert_close(noisy, (1 - s) * image + s * noise if kind == TYPES.FLOW else image + s * noise)
    alpha = 1 / (1 + s**2).sqrt()
    prediction = {TYPES.EPS: noise, TYPES.V_PREDICTION: alpha * noise - alpha * s * image, TYPES.FLOW: noise - image}[
        kind
    ]
    torch.testing.assert_close(levels.calculate_denoised(sigma, prediction, noisy), image, rtol=1e-4, atol=1e-5)
    expected = noisy if kind == TYPES.FLOW else noisy * alpha
    torch.testing.assert_close(levels.calculate_input(sigma, noisy), expected)


def test_flow_levels_are_shifted_time():
    levels = model(TYPES.FLOW, shift=3.0).model.model_sampling
    torch.testing.assert_close(levels.sigmas[499], torch.tensor(3 * 0.5 / (1 + 2 * 0.5)))
    assert levels.sigma_max == 1.0 and levels.timestep(torch.tensor(0.25)) == 250
    assert levels.percent_to_sigma(0.25) == pytest.approx(3 * 0.75 / (1 + 2 * 0.75))


@pytest.mark.parametrize("scheduler", comfy.samplers.SCHEDULER_NAMES[:9])
@pytest.mark.parametrize("kind", [TYPES.EPS, TYPES.FLOW])
def test_schedules_fall_to_zero(kind, scheduler):
    levels = model(kind).model.model_sampling
    sigmas = comfy.samplers.calculate_sigmas(levels, scheduler, 10)
    assert (
        len(sigmas) == 11 and sigmas[-1] == 0 and (sigmas.diff() < 0).all() and sigmas[0] <= levels.sigma_max * 1.0001
    )


def test_schedules_in_closed_form():
    levels = model(TYPES.EPS).model.model_sampling
    low, high = levels.sigma_min.item(), levels.sigma_max.item()
    karras = comfy.samplers.calculate_sigmas(levels, "karras", 5)
    expected = [(high ** (1 / 7) + i / 4 * (low ** (1 / 7) - high ** (1 / 7))) ** 7 for i in range(5)]
    torch.testing.assert_close(karras[:-1], torch.tensor(expected), rtol=1e-4, atol=1e-5)
    exponential = comfy.samplers.calculate_sigmas(levels, "exponential", 5)
    torch.testing.assert_close(
        exponential[:-1].log().diff(), torch.full((4,), math.log(low / high) / 4), rtol=1e-4, atol=1e-4
    )
    simple = comfy.samplers.calculate_sigmas(levels, "simple", 4)
    torch.testing.assert_close(simple, torch.cat([levels.sigmas[[999, 749, 499, 249]], torch.zeros(1)]))
    uniform = comfy.samplers.calculate_sigmas(levels, "sgm_uniform", 4)
    torch.testing.assert_close(levels.timestep(uniform[:-1]), torch.tensor([999, 749, 500, 250]), rtol=0, atol=1)


def test_beta_schedule_of_a_flat_distribution_is_even():
    levels = model(TYPES.FLOW).model.model_sampling
    sigmas = comfy.samplers.beta_scheduler(levels, 10, alpha=1.0, beta=1.0)
    torch.testing.assert_close(sigmas[:-1], torch.linspace(1, 0.1, 10), rtol=0, atol=1.1e-3)


def test_euler_on_flow_in_closed_form():
    # the model's flow is gain * x, so one step multiplies x by 1 + gain * (next - sigma)
    patcher = model(TYPES.FLOW, scale=2.0)
    out, noise = run(patcher, steps=5)
    sigmas = comfy.samplers.calculate_sigmas(patcher.model.model_sampling, "normal", 5)
    factor = math.prod(1 + 0.5 * (b - a).item() for a, b in itertools.pairwise(sigmas))
    torch.testing.assert_close(out, noise * factor / 2.0)
    assert [call["t"].item() for call in patcher.model.diffusion_model.calls] == [
        pytest.approx(1000 * s.item()) for s in sigmas[:-1]
    ]


def test_euler_on_eps_in_closed_form():
    # eps = gain * x / sqrt(sigma^2 + 1), and dx = eps dsigma
    patcher = model(TYPES.EPS)
    out, noise = run(patcher, scheduler="karras", steps=6)
    sigmas = comfy.samplers.calculate_sigmas(patcher.model.model_sampling, "karras", 6).double()
    factor = (1 + sigmas[0] ** 2).sqrt()  # pure noise is scaled to the whole standard deviation
    for a, b in itertools.pairwise(sigmas):
        factor = factor * (1 + 0.5 / (1 + a**2).sqrt() * (b - a))
    torch.testing.assert_close(out, noise * factor.float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("sampler", ["euler", "dpmpp_2m", "ddim"])
def test_samplers_converge_on_the_exact_solution(sampler):
    # with a constant x0 = -c sigma … the flow model of output c has x(0) = x(1) - c exactly, at any number of steps
    patcher = model(TYPES.FLOW)
    patcher.model.diffusion_model.gain = 0.0
    out, noise = run(patcher, sampler=sampler, steps=60 if sampler == "dpmpp_2m" else 3, positive=cond(0.25))
    torch.testing.assert_close(out, noise - 0.25, rtol=1e-3, atol=2e-2 if sampler == "dpmpp_2m" else 1e-5)


def test_ancestral_is_reproducible_and_keeps_the_variance():
    patcher = model(TYPES.EPS)
    patcher.model.diffusion_model.gain = 0.0  # predicts x0 = x: only the noise that is added counts
    latent = torch.zeros(1, 3, 32, 32)
    one, _ = run(patcher, sampler="euler_ancestral", steps=5, latent=latent)
    two, _ = run(patcher, sampler="euler_ancestral", steps=5, latent=latent)
    assert torch.equal(one, two)
    sigmas = comfy.samplers.calculate_sigmas(patcher.model.model_sampling, "normal", 5).double()
    up = [b**2 * (a**2 - b**2) / a**2 for a, b in itertools.pairwise(sigmas)]
    expected = (1 + sigmas[0] ** 2 + sum(up)).sqrt().item()
    assert one.std().item() == pytest.approx(expected, rel=0.05)


def test_guidance_runs_one_batch_and_mixes():
    patcher = model(TYPES.FLOW)
    patcher.model.diffusion_model.gain = 0.0
    out, noise = run(patcher, steps=2, cfg=3.0, positive=cond(1), negative=cond(0.5))
    torch.testing.assert_close(out, noise - (0.5 + 3 * 0.5))
    calls = patcher.model.diffusion_model.calls
    assert [len(call["x"]) for call in calls] == [2, 2]
    options = calls[0]["options"]
    assert (
        sorted(options["cond_or_uncond"]) == [0, 1]
        and len(options["uuids"]) == 2
        and options["sigmas"].tolist() == [1.0]
    )
    assert len(options["sample_sigmas"]) == 3

    out, noise = run(patcher, steps=2, cfg=1.0, positive=cond(1), negative=cond(100))
    torch.testing.assert_close(out, noise - 1)
    assert len(calls[-1]["x"]) == 1


def test_options_of_the_patcher_are_used_and_left_alone():
    patcher, log = model(TYPES.FLOW), []
    patcher.set_model_sampler_cfg_function(lambda args: args["uncond"] + 2 * (args["cond"] - args["uncond"]))
    patcher.set_model_sampler_post_cfg_function(lambda args: args["denoised"] + 1)
    patcher.set_model_unet_function_wrapper(lambda apply, args: apply(args["input"], args["timestep"], **args["c"]))
    for kind in (
        "outer_sample",
        "sampler_sample",
        "predict_noise",
        "calc_cond_batch",
        "apply_model",
        "prepare_sampling",
    ):

        def wrapper(executor, *args, kind=kind, **kwargs):
            log.append(kind)
            return executor(*args, **kwargs)

        patcher.add_wrapper_with_key(kind, "k", wrapper)
    before = {key: dict(value) if isinstance(value, dict) else value for key, value in patcher.model_options.items()}
    run(patcher, steps=1, cfg=2.0, positive=cond(1))
    assert log == [
        "outer_sample",
        "prepare_sampling",
        "sampler_sample",
        "predict_noise",
        "calc_cond_batch",
        "apply_model",
    ]
    assert patcher.model_options == before


def test_regions():
    patcher = model(TYPES.FLOW)
    patcher.model.diffusion_model.gain = 0.0
    latent, mask = torch.zeros(1, 3, 32, 32), torch.zeros(1, 16, 16)
    mask[:, :8] = 1.0
    out, noise = run(
        patcher, steps=1, latent=latent, positive=cond(1, area=(16, 32, 0, 0)) + cond(2, area=(16, 32, 16, 0))
    )
    torch.testing.assert_close((noise - out)[..., :8, :], torch.ones(1, 3, 8, 32))
    torch.testing.assert_close((noise - out)[..., -8:, :], torch.full((1, 3, 8, 32), 2.0))
    out, noise = run(patcher, steps=1, latent=latent, positive=cond(1, mask=mask) + cond(2, mask=1 - mask))
    torch.testing.assert_close((noise - out)[..., 0, 0], torch.ones(1, 3))
    torch.testing.assert_close((noise - out)[..., -1, 0], torch.full((1, 3), 2.0))
    out, noise = run(patcher, "euler", "simple", 2, latent=latent, positive=cond(4, end_percent=0.25) + cond(2))
    torch.testing.assert_close(noise - out, torch.full_like(out, 0.5 * 3 + 0.5 * 2), rtol=1e-2, atol=1e-2)


def test_start_last_and_denoise():
    patcher = model(TYPES.FLOW)
    patcher.model.diffusion_model.gain = 0.0
    image = torch.full((1, 3, 8, 8), 5.0)
    out, noise = run(patcher, steps=4, latent=image, denoise=0.5, positive=cond(0.1), scheduler="simple")
    torch.testing.assert_close(out, 0.5 * noise + 0.5 * image - 0.05, rtol=1e-4, atol=1e-4)
    out, _ = run(patcher, steps=4, latent=image, start_step=4)
    assert torch.equal(out, image)
    seen = []
    run(patcher, steps=6, start_step=2, last_step=5, callback=lambda step, x0, x, total: seen.append((step, total)))
    assert seen == [(0, 3), (1, 3), (2, 3)]


def test_inpainting_keeps_the_rest():
    patcher, mask = model(TYPES.FLOW), torch.zeros(1, 1, 8, 8)
    mask[..., 4:] = 1.0
    image = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(4))
    out, _ = run(patcher, steps=3, latent=image, noise_mask=mask)
    torch.testing.assert_close(out[..., :4], image[..., :4], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(out[..., 4:], image[..., 4:])


def test_contexts_of_different_lengths_are_repeated():
    short, long = comfy.conds.CONDCrossAttn(torch.rand(1, 2, 3)), comfy.conds.CONDCrossAttn(torch.rand(1, 3, 3))
    assert short.can_concat(long)
    both = short.concat([long])
    assert both.shape == (2, 6, 3) and torch.equal(both[0], short.cond[0].repeat(3, 1))
    assert not comfy.conds.CONDCrossAttn(torch.rand(1, 7, 3)).can_concat(comfy.conds.CONDCrossAttn(torch.rand(1, 5, 3)))


@pytest.mark.skipif(
    len(comfy.samplers.SAMPLER_NAMES) > 4, reason="the real ComfyUI has more samplers, and replaces unknown names"
)
def test_what_the_embedded_host_lacks_is_refused_by_name():
    patcher = model(TYPES.FLOW)
    with pytest.raises(ValueError, match=r"'heun'.*euler_ancestral"):
        run(patcher, sampler="heun")
    with pytest.raises(ValueError, match=r"'turbo'.*karras"):
        run(patcher, scheduler="turbo")
    with pytest.raises(ValueError, match="turbo"):
        comfy.samplers.calculate_sigmas(patcher.model.model_sampling, "turbo", 3)
    with pytest.raises(NotImplementedError, match="GLIGEN"):
        run(patcher, positive=cond(0, gligen=("position", None, None)))
