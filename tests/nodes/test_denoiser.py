"""The host's model as training sees it: the forward of sampling, each kind of objective, conditions of any length,
fingerprints.
"""

from types import SimpleNamespace

import pytest
import torch
from graft_nodes.host.denoiser import describe_attention
from graft_nodes.training.data.dataset import Conditioning, Dataset
from graft_nodes.training.objective.loss import losses
from graft_nodes.training.objective.settings import ObjectiveSettings
from graft_nodes.training.optimizers.settings import OptimizerSettings
from graft_nodes.training.run.loop import train
from graft_nodes.training.state import Settings, Start, begin
from graft_nodes.training.trainable.settings import AdapterSettings

from ..loaded_models import loaded
from ..model_device import LOAD

CONFIG = {
    "image_size": 32,
    "in_channels": 4,
    "out_channels": 4,
    "model_channels": 32,
    "num_res_blocks": [1, 1],
    "channel_mult": [1, 2],
    "transformer_depth": [0, 1],
    "transformer_depth_output": [0, 0, 1, 1],
    "transformer_depth_middle": 1,
    "context_dim": 16,
    "num_heads": 2,
    "num_head_channels": -1,
    "use_spatial_transformer": True,
    "use_linear_in_transformer": True,
    "adm_in_channels": None,
    "use_temporal_attention": False,
    "legacy": False,
}


@pytest.fixture(scope="module")
def wall(host):
    return host.module("host")


def _model(kind, sdxl=False, dtype=torch.float32):
    import comfy.model_base
    import comfy.model_management
    import comfy.supported_models

    family = comfy.supported_models.SDXL if sdxl else comfy.supported_models.SD15
    own = dict(CONFIG, **({"adm_in_channels": 2816, "num_classes": "sequential"} if sdxl else {}))
    with torch.inference_mode(), torch.random.fork_rng(devices=[]):
        config = family(own)
        config.unet_config, config.manual_cast_dtype = dict(own, dtype=dtype), None
        model_type = getattr(comfy.model_base.ModelType, kind)
        made = comfy.model_base.SDXL if sdxl else comfy.model_base.BaseModel

        def fill_(network):
            generator = torch.Generator().manual_seed(0)
            for p in network.parameters():
                p.copy_(
                    torch.randn(p.shape, generator=generator) * (p[0].numel() ** -0.5 if p.ndim > 1 else 0.1)
                    + (p.ndim == 1)
                )

        return loaded(lambda: made(config, model_type, device="cpu"), fill_)


def _random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _input(*shape, seed=0):
    """Random numbers on the model's device."""
    return _random(*shape, seed=seed).to(LOAD)


@pytest.mark.parametrize(("kind", "prediction"), [("EPS", "eps"), ("V_PREDICTION", "v"), ("FLOW", "flow")])
def test_the_forward_is_that_of_sampling(wall, kind, prediction):
    import comfy.samplers

    patcher, context = _model(kind), _random(1, 7, 16)
    with wall.denoiser.open_denoiser(patcher) as denoiser, torch.no_grad():
        assert denoiser.prediction == prediction
        sigma = denoiser.sigma(torch.tensor([0.6], device=LOAD))
        x = _input(1, 4, 16, 16, seed=1)
        found = denoiser.denoise(x, sigma, [Conditioning(context)], {})
        guider = comfy.samplers.CFGGuider(patcher)
        guider.set_conds([[context, {}]], [[context, {}]])
        guider.set_cfg(1.0)
        seen = []

        def one_step(model, noise, sigmas, extra_args=None, **_):
            seen.append(model(x, sigmas[:1], **extra_args))
            return noise

        sigmas, zeros = torch.cat([sigma.cpu(), torch.zeros(1)]), torch.zeros(x.shape)
        guider.sample(zeros, zeros, comfy.samplers.KSAMPLER(one_step), sigmas, seed=0)
    assert torch.allclose(found, seen[0], atol=1e-5)


def test_training_computes_attention_with_pytorchs_kernel_beside_another_nodes_override(wall):
    """Whatever kernel the host samples with on this machine; the numbers are those of sampling."""
    patcher, context, x = _model("EPS"), _input(1, 7, 16), _input(1, 4, 16, 16, seed=1)
    one = torch.ones(1, device=LOAD)
    seen = set()

    def theirs(kernel, *args, **kwargs):
        seen.add(kernel.__name__)
        return kernel(*args, **kwargs)

    with wall.denoiser.open_denoiser(patcher) as denoiser, torch.no_grad():
        before = denoiser.denoise(x, one, [Conditioning(context)], {})
        sampled = denoiser.model.apply_model(x, one, c_crossattn=context)
        denoiser.patcher.model_options["transformer_options"]["optimized_attention_override"] = theirs
        after = denoiser.denoise(x, one, [Conditioning(context)], {})
    assert seen == {"attention_pytorch"}
    assert torch.equal(before, after)
    assert torch.allclose(before, sampled, atol=1e-5)


@pytest.mark.parametrize("kind", ["EPS", "V_PREDICTION", "FLOW"])
def test_the_loss_is_that_of_the_networks_own_output(wall, kind):
    """Against the raw output of the UNet and the target written out from the papers."""
    patcher, context = _model(kind), _input(2, 7, 16)
    with wall.denoiser.open_denoiser(patcher) as denoiser, torch.no_grad():
        clean, noise = _input(2, 4, 16, 16, seed=1), _input(2, 4, 16, 16, seed=2)
        u = torch.tensor([0.3, 0.8], device=LOAD)
        sigma = denoiser.sigma(u)
        x = denoiser.noisy(clean, noise, sigma)
        s = sigma.view(-1, 1, 1, 1)
        denoised = denoiser.denoise(x, sigma, [Conditioning(context[:1]), Conditioning(context[1:])], {})
        found = losses(ObjectiveSettings(), denoiser.prediction, denoised, clean, sigma)
        timestep = denoiser.sampling.timestep(sigma).float()
        if kind == "FLOW":
            assert torch.allclose(x, (1 - s) * clean + s * noise, atol=1e-6)
            out, target = denoiser.module(x, timestep, context=context), noise - clean
        else:
            alpha = 1 / (1 + s**2).sqrt()
            out = denoiser.module(alpha * x, timestep, context=context)
            target = noise if kind == "EPS" else alpha * noise - s * alpha * clean
            table = torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64) ** 2
            bar = torch.cumprod(1 - table, 0)
            assert torch.allclose(sigma.cpu().double(), ((1 - bar) / bar).sqrt()[[300, 800]], rtol=1e-4)
        assert torch.allclose(found, (out - target).square().flatten(1).mean(1), rtol=2e-3)


@pytest.mark.parametrize(("dimensions", "frames"), [(2, ()), (3, (1,))])
def test_a_picture_is_one_frame_for_a_model_of_clips(wall, monkeypatch, dimensions, frames):
    patcher = _model("EPS")
    monkeypatch.setattr(patcher.model.latent_format, "latent_dimensions", dimensions)
    pictures, clips = torch.ones(2, 4, 6, 8, device=LOAD), torch.ones(2, 4, 3, 6, 8, device=LOAD)
    with wall.denoiser.open_denoiser(patcher) as denoiser:
        scaled = denoiser.process_in(pictures)
        assert scaled.shape == (2, 4, *frames, 6, 8)
        assert torch.equal(scaled, patcher.model.process_latent_in(pictures).view(scaled.shape))
        assert denoiser.process_in(clips).shape == clips.shape


def test_captions_of_any_length_share_a_batch(wall):
    patcher = _model("EPS")
    conditionings = [Conditioning(_random(1, length, 16, seed=length)) for length in (7, 14, 13, 7, 91)]
    with wall.denoiser.open_denoiser(patcher) as denoiser, torch.no_grad():
        x, sigma = _input(5, 4, 16, 16, seed=1), denoiser.sigma(torch.linspace(0.1, 0.9, 5, device=LOAD))
        together = denoiser.denoise(x, sigma, conditionings, {})
        alone = torch.cat(
            [denoiser.denoise(x[i : i + 1], sigma[i : i + 1], [c], {}) for i, c in enumerate(conditionings)]
        )
    assert torch.allclose(together, alone, atol=1e-4)


@pytest.mark.parametrize(
    ("system", "own", "already", "disabled", "expected"),
    [
        ("win32", 90, 0, False, 40),  # ComfyUI 0.8 would take 45%
        ("win32", 90, 10, False, 30),
        ("linux", 80, 0, False, 80),
        ("linux", 80, 30, False, 50),
        ("linux", -1, 0, False, 84),  # no limit of its own
        ("linux", 80, 0, True, 0),
    ],
)
def test_as_much_memory_is_pinned_as_the_host_would(wall, monkeypatch, system, own, already, disabled, expected):
    import comfy.model_management as management
    from comfy.cli_args import args

    gb = 2**30
    monkeypatch.setattr(wall.device_memory.sys, "platform", system)
    monkeypatch.setattr(management, "get_total_memory", lambda *_: 100 * gb)
    monkeypatch.setattr(management, "MAX_PINNED_MEMORY", own * gb, raising=False)
    monkeypatch.setattr(management, "TOTAL_PINNED_MEMORY", already * gb, raising=False)
    monkeypatch.setattr(args, "disable_pinned_memory", disabled, raising=False)
    monkeypatch.setattr(wall.device_memory.pinned, "limit", None)
    wall.device_memory.limit_pinned_memory()
    assert wall.device_memory.pinned.limit == expected * gb


def test_training_sets_that_limit(wall, monkeypatch):
    pinned = wall.device_memory.pinned
    monkeypatch.setattr(pinned, "limit", None)
    with wall.denoiser.open_denoiser(_model("EPS")):
        assert pinned.limit is not None


def test_sdxl_s_conditions_are_made_once(wall, monkeypatch):
    """A module beside the network embeds its sizes: nothing trains that one."""
    patcher, made = _model("EPS", sdxl=True), []
    trained = wall.whole_models.whole_model(patcher).model
    extra_conds = trained.extra_conds
    monkeypatch.setattr(trained, "extra_conds", lambda **given: made.append(1) or extra_conds(**given))
    text = Conditioning(_random(1, 7, 16), {"pooled_output": _random(1, 1280)})
    with wall.denoiser.open_denoiser(patcher) as denoiser, torch.no_grad():
        x, sigma = _input(1, 4, 16, 16, seed=1), denoiser.sigma(torch.tensor([0.5], device=LOAD))
        for _ in range(3):
            denoiser.denoise(x, sigma, [text], {})
    assert made == [1]


def test_pooled_text_and_sizes_reach_sdxl(wall):
    patcher = _model("EPS", sdxl=True)

    def conditioning(seed, **extras):
        return Conditioning(_random(1, 7, 16), {"pooled_output": _random(1, 1280, seed=seed), **extras})

    with wall.denoiser.open_denoiser(patcher) as denoiser, torch.no_grad():
        x = _input(1, 4, 16, 16, seed=1).expand(4, -1, -1, -1)
        sigma = denoiser.sigma(torch.full((4,), 0.5, device=LOAD))
        different = [
            conditioning(0),
            conditioning(1),
            conditioning(0, width=512, height=512),
            conditioning(0, width=128, height=128),
        ]
        out = denoiser.denoise(x, sigma, different, {})
    assert torch.allclose(out[0], out[3], atol=1e-5)  # the default is the picture's own size
    assert not torch.allclose(out[0], out[1], atol=1e-4) and not torch.allclose(out[0], out[2], atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "dtype", "checkpointing"),
    [
        ("EPS", "float32", False),
        ("V_PREDICTION", "float32", True),
        ("FLOW", "float32", False),
        ("EPS", "bfloat16", True),
    ],
)
@pytest.mark.parametrize(
    "adapter",
    [AdapterSettings("locon", targets="all", rank=4), AdapterSettings("full", targets="all")],
    ids=["locon", "full"],
)
def test_every_kind_trains(wall, kind, dtype, checkpointing, adapter):
    patcher = _model(kind, dtype=getattr(torch, dtype))
    conditionings = {text: Conditioning(_random(1, 7, 16, seed=n)) for n, text in enumerate(("", "a"))}
    dataset = Dataset.from_latents([_random(4, 8, 8, seed=n) for n in range(2)], ["a"] * 2, conditionings)
    before = {name: p.clone() for name, p in patcher.model.named_parameters()}
    settings = Settings(OptimizerSettings(learning_rate=5e-3, batch_size=2, checkpointing=checkpointing))
    state = begin(patcher.model.diffusion_model, Start("model", dataset.digest, adapter), settings)
    with torch.inference_mode(), wall.denoiser.open_denoiser(patcher) as denoiser:
        trained = train(state, denoiser, dataset, 2)
    assert all(torch.isfinite(t).all() and t.dtype == torch.float32 for t in trained.trained.values())
    assert {name.split("/", 1)[1] for name in trained.optimizer} == set(trained.trained)  # every one had a gradient
    assert all(not torch.equal(t.cpu(), state.trained[name].cpu()) for name, t in trained.trained.items())
    assert all(torch.equal(before[name], p.cpu()) for name, p in patcher.model.named_parameters())
    assert not patcher.model.diffusion_model._forward_pre_hooks


def test_wrappers_and_model_function_wrappers_are_honored(wall):
    import comfy.patcher_extension as extension

    patcher, called = _model("EPS"), []

    def wrapper(executor, *args, **kwargs):
        called.append("wrapper")
        return executor(*args, **kwargs)

    def function(apply_model, options):
        called.append("function")
        return apply_model(options["input"], options["timestep"], **options["c"])

    patcher.add_wrapper_with_key(extension.WrappersMP.APPLY_MODEL, "test", wrapper)
    patcher.set_model_unet_function_wrapper(function)
    with wall.denoiser.open_denoiser(patcher) as denoiser, torch.no_grad():
        sigma = denoiser.sigma(torch.tensor([0.5], device=LOAD))
        denoiser.denoise(_input(1, 4, 16, 16), sigma, [Conditioning(_random(1, 7, 16))], {})
    assert called == ["function", "wrapper"]
    assert any("wrappers" in what for what in wall.fingerprint.fingerprint_patcher(patcher).unhashed)


def test_the_fingerprint_follows_what_changes_training(wall):
    import comfy.model_sampling

    def made(change=lambda patcher: None, kind="EPS", **more):
        patcher = _model(kind, **more)
        change(patcher)
        return wall.fingerprint.fingerprint_patcher(patcher)

    def weight(patcher):
        with torch.inference_mode():
            next(patcher.model.diffusion_model.parameters()).view(-1)[0] += 1

    def patch(patcher, strength=0.5):
        name = "diffusion_model.out.2.weight"
        patcher.add_patches({name: ("diff", (torch.ones_like(patcher.model.state_dict()[name]),))}, strength)

    def sampling(patcher):
        class Other(comfy.model_sampling.ModelSamplingDiscreteFlow, comfy.model_sampling.CONST):
            pass

        other = Other()
        other.set_parameters(shift=3.0)
        patcher.add_object_patch("model_sampling", other)

    def sampling_levels(patcher, first):
        levels = patcher.model.model_sampling.sigmas.clone()
        levels[0] = first
        patcher.model.model_sampling.set_sigmas(levels)

    plain = made()
    assert plain == made() and plain.unhashed == ()
    changed = [made(change) for change in (weight, patch, lambda p: patch(p, 0.6), sampling)]
    changed += [made(kind="V_PREDICTION"), made(dtype=torch.bfloat16)]
    assert len({plain.digest, *(one.digest for one in changed)}) == 7 and all(one.unhashed == () for one in changed)
    for change in (
        lambda p: p.model_options.update(sampler_cfg_rescale=0.7),
        lambda p: p.add_object_patch("diffusion_model.scale", 2.0),
        lambda p: setattr(p.model, "manual_cast_dtype", torch.float16),
        lambda p: sampling_levels(p, 0.03),
        lambda p: setattr(p, "hook_patches", {"hook": {"diffusion_model.out.2.weight": [1.0]}}),
        lambda p: setattr(p, "weight_wrapper_patches", {"diffusion_model.out.2.weight": ["wrapped"]}),
    ):
        assert made(change).digest != plain.digest and made(change) == made(change)
    injected = made(lambda p: p.injections.update(other=[object()]))
    assert injected.unhashed == ("injection other",)
    closure = made(lambda p: p.set_model_attn1_patch(lambda q, k, v, extra: (q, k, v)))
    assert len(closure.unhashed) == 1 and "option patches" in closure.unhashed[0]


def test_the_size_and_cut_of_each_picture_reach_sdxl(wall):
    """Six numbers as SDXL was trained with them: height, width, top, left, target height and width,
    each as sinusoids.
    """
    from graft_nodes.training.data.batches import add_size_conditioning
    from graft_nodes.training.data.buckets import frame

    patcher = _model("EPS", sdxl=True)
    framings = [frame((2000, 1000), (64, 64), (1.0, 0.0)), frame((100, 300), (64, 64), (0.5, 0.5)).flipped]
    plain = Conditioning(torch.zeros(1, 5, CONFIG["context_dim"]), {"pooled_output": torch.ones(1, 1280)})
    seen = []
    with wall.denoiser.open_denoiser(patcher) as denoiser, torch.no_grad():
        apply = denoiser.model.apply_model
        denoiser.model.apply_model = lambda x, t, **c: seen.append(c["y"]) or apply(x, t, **c)
        try:
            denoiser.denoise(
                torch.zeros(2, 4, 8, 8, device=LOAD),
                torch.ones(2, device=LOAD),
                [add_size_conditioning(plain, framing) for framing in framings],
                {},
            )
        finally:
            del denoiser.model.apply_model
    frequencies = torch.exp(-torch.log(torch.tensor(10000.0)) * torch.arange(128) / 128)
    for row, numbers in zip(seen[0], ([1000, 2000, 0, 64, 64, 64], [300, 100, 64, 0, 64, 64]), strict=True):
        waves = torch.tensor(numbers, dtype=torch.float32)[:, None] * frequencies
        expected = torch.cat([waves.cos(), waves.sin()], 1).flatten()
        assert torch.allclose(row[1280:].float().cpu(), expected, atol=1e-3)


def test_tensors_in_lists_go_to_the_device(host):
    class Made:
        def __init__(self, params):
            self.cond = params

        def process_cond(self, **_):
            return self

    class Model:
        diffusion_model = torch.nn.Identity()

        def extra_conds(self, **params):
            return {"all": Made(params)}

    host.module("host.denoiser")
    conditions = host.module("host.conditions").Conditions(Model(), torch.device("meta"))
    extras = {"reference_latents": [torch.ones(2)], "pair": (torch.ones(2), "a"), "by name": {"b": [torch.ones(2)]}}
    found = conditions.make(Conditioning(torch.ones(1, 2, 3), extras), torch.ones(1, 4, 2, 2))["all"].cond
    tensors = [found["reference_latents"][0], found["pair"][0], found["by name"]["b"][0], found["cross_attn"]]
    assert all(tensor.device.type == "meta" for tensor in tensors) and found["pair"][1] == "a"
    assert extras["reference_latents"][0].device.type == "cpu"


def test_the_attention_is_the_one_that_computes(host, monkeypatch):
    """EveryDream2's attn_type: the function that ComfyUI's blocks call, by its name there, and a node's override."""
    from comfy.ldm.modules import attention

    functions = [getattr(attention, name) for name in dir(attention) if name.startswith("attention_")]
    model = SimpleNamespace(model_options={"transformer_options": {}})
    for function in functions:
        if callable(function):
            monkeypatch.setattr(attention, "optimized_attention", function)
            name = function.__name__.removeprefix("attention_")
            assert describe_attention(model).startswith(f"attention: {name}, which ComfyUI chose when it started")
    assert "replaces" not in describe_attention(model)
    model.model_options["transformer_options"]["optimized_attention_override"] = lambda *_: None
    assert describe_attention(model).endswith("; a node on this model replaces some of it")
