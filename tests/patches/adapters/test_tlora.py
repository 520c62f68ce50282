"""T-LoRA against its authors' own formulas (ControlGenAI/T-LoRA), written out here, and against LyCORIS's masks."""

import math

import pytest
import torch
from graft_nodes.patches.adapters.rank_mask import RankMask, current_timesteps, set_timesteps, timesteps_of_rows
from graft_nodes.patches.adapters.tlora import schedule_error, smallest_singular_values
from graft_nodes.patches.lora_files.key_formats.registry import generic_keys
from graft_nodes.patches.lora_files.parse import Target, patches_of, read
from graft_nodes.patches.lora_files.save import build_metadata, to_key_format
from graft_nodes.patches.lora_files.trainer import rank_schedules
from graft_nodes.patches.patching.bypass import Bypass, put_bypass
from graft_nodes.patches.patching.fuse import Patch
from graft_nodes.patches.patching.strength_schedule import Clock, Schedule
from graft_nodes.training.memory.checkpointing import checkpoint_blocks
from graft_nodes.training.trainable.install import attach, init_trainable, make_lora
from graft_nodes.training.trainable.settings import AdapterSettings
from torch import nn

WHERE = "diffusion_model.input_blocks.4.1.transformer_blocks.0.attn1.to_q"
AUTHORS = "down_blocks.1.attentions.0.transformer_blocks.0.attn1.processor.to_q_lora"


def still():
    return 0, 0, ""


def mask_of_the_authors(timestep, max_timestep, max_rank, min_rank=1, alpha=1.0):
    """`get_mask_by_timestep` of their trainer and pipeline."""
    r = int(((max_timestep - timestep) / max_timestep) ** alpha * (max_rank - min_rank)) + min_rank
    mask = torch.zeros((1, max_rank))
    mask[:, :r] = 1.0
    return mask


def layer_of_the_authors(x, tensors, mask):
    """`OrthogonalLoRALinearLayer.forward`."""
    hidden = x @ tensors["q_layer.weight"].T * tensors["lambda_layer"] * mask
    base = x @ tensors["base_q.weight"].T * tensors["base_lambda"] * mask
    return hidden @ tensors["p_layer.weight"].T - base @ tensors["base_p.weight"].T


@pytest.mark.parametrize(("rank", "min_rank", "exponent"), [(64, 32, 1.0), (16, 1, 1.0), (11, 1, 2.0), (8, 8, 0.5)])
def test_masks_are_the_authors(rank, min_rank, exponent):
    mask = RankMask(rank, min_rank, exponent)
    for timestep in torch.arange(1001):  # what their trainer draws, and what its schedulers give
        expected = mask_of_the_authors(timestep, 1000, rank, min_rank, exponent)
        assert torch.equal(mask.at(timestep[None]).float(), expected), int(timestep)
    for timestep in torch.linspace(0, 1000, 301):  # Euler's
        expected = mask_of_the_authors(timestep, 1000, rank, min_rank, exponent)
        assert torch.equal(mask.at(timestep[None]).float(), expected), float(timestep)


def test_masks_are_lycoris():
    lycoris = pytest.importorskip("lycoris.modules.tlora")
    every = torch.arange(1000)
    expected = torch.cat([lycoris.compute_timestep_mask(t, 1000, 24, 5, 1.5) for t in every])
    assert torch.equal(RankMask(24, 5, 1.5).at(every).float(), expected)


def net_and_tensors(rank=6, alpha=3.0, **more):
    torch.manual_seed(0)
    net = nn.ModuleDict({"a": nn.Linear(24, 40)}).requires_grad_(False).double()
    settings = AdapterSettings("tlora", rank=rank, alpha=alpha, targets="all", **more)
    start = init_trainable(net, settings, 0, {})
    return net, settings, start


def moved(start):
    generator = torch.Generator().manual_seed(4)
    tensors = {}
    for name, tensor in start.items():
        tensors[name] = tensor.double()
        if "base" not in name:
            tensors[name] += 0.1 * torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
    return tensors


def by_suffix(tensors):
    return {name.removeprefix("a."): tensor for name, tensor in tensors.items()}


def test_each_picture_has_the_ranks_of_its_own_noise_level():
    """In float64: outputs and gradients are those of the authors' layer, one picture at a time."""
    net, settings, start = net_and_tensors(min_rank=2)
    tensors, x = moved(start), torch.randn(3, 5, 24, dtype=torch.float64)
    timesteps = torch.tensor([0.0, 412.0, 999.0])
    trained = {name: tensor.clone().requires_grad_("base" not in name) for name, tensor in tensors.items()}
    with attach(net, settings, trained, still), set_timesteps(timesteps):
        found = net["a"](x)
        found.square().sum().backward()
    theirs = {name: tensor.clone().requires_grad_("base" not in name) for name, tensor in tensors.items()}
    rows = []
    for picture, timestep in zip(x, timesteps, strict=True):
        mask = mask_of_the_authors(timestep, 1000, 6, 2).double()
        plain = picture @ net["a"].weight.T + net["a"].bias
        rows.append(plain + 0.5 * layer_of_the_authors(picture, by_suffix(theirs), mask))
    expected = torch.stack(rows)
    expected.square().sum().backward()
    assert torch.allclose(found, expected, rtol=0, atol=1e-12)
    assert not torch.allclose(found[1], found[2])
    for name, tensor in theirs.items():
        if "base" not in name:
            assert torch.allclose(trained[name].grad, tensor.grad, rtol=1e-10, atol=1e-11), name


def test_it_starts_from_orthogonal_matrices_and_no_change():
    net, settings, start = net_and_tensors(rank=8)
    tensors = by_suffix(start)
    q, p, values = tensors["q_layer.weight"], tensors["p_layer.weight"], tensors["lambda_layer"]
    assert torch.allclose(q @ q.T, torch.eye(8), atol=1e-6) and torch.allclose(p.T @ p, torch.eye(8), atol=1e-6)
    assert bool((values.diff() <= 0).all()) and values.shape == (1, 8)
    assert all(torch.equal(tensors[f"base_{n}"], tensors[m]) for n, m in BASES.items())
    x = torch.randn(2, 24, dtype=torch.float64)
    with attach(net, settings, start, still):
        assert torch.equal(net["a"](x), x @ net["a"].weight.T + net["a"].bias)
    other = init_trainable(net, settings, 1, {})
    assert not torch.equal(other["a.q_layer.weight"], start["a.q_layer.weight"])


BASES = {"q.weight": "q_layer.weight", "p.weight": "p_layer.weight", "lambda": "lambda_layer"}


def test_singular_values_are_the_last_of_normal_draws():
    """The authors decompose normal draws (in, out) of deviation 1 / rank: ours are as some of many such draws."""
    rank, draws = 20, torch.Generator().manual_seed(0)
    base = torch.normal(0.0, 1 / rank, (40, 120, 60), generator=draws)
    values = torch.linalg.svdvals(base)[:, -rank:]
    found = torch.tensor(smallest_singular_values(120, 60, rank))
    away = (found - values.mean(0)) / values.std(0)
    assert float(away.abs().max()) < 4, away.tolist()
    assert float(found.mean()) == pytest.approx(float(values.mean()), rel=0.05)
    assert smallest_singular_values(60, 120, rank) == smallest_singular_values(120, 60, rank)


def test_a_rank_that_a_layer_cannot_have_is_said():
    with pytest.raises(ValueError, match=r"rank \(dim\) is 25, and adapter type tlora can have at most 24"):
        net_and_tensors(rank=25)
    assert net_and_tensors(rank=24)[1].rank == 24


@pytest.mark.parametrize(
    ("values", "is_right"),
    [([0.0, 0.5], True), ([4.0, 1.0], True), ([-1.0, 1.0], False), ([4.0, 0.0], False), ([65536.0, 1.0], False),
     ([4.0, 65536.0], False), ([4.0], False), ([4.0, 1.0, 1.0], False), ([float("nan"), 1.0], False)],
)  # fmt: skip
def test_a_schedule_in_a_file_is_a_smallest_rank_and_an_exponent(values, is_right):
    said = schedule_error("schedule", torch.tensor(values))
    assert (said is None) == is_right and (is_right or str(torch.tensor(values).tolist()) in said)


def test_settings():
    assert AdapterSettings("tlora", rank=9).rank_mask_of("a") == RankMask(9, 4)
    assert AdapterSettings("tlora", rank=9, min_rank=1, rank_exponent=2.0).rank_mask_of("a") == RankMask(9, 1, 2.0)
    assert AdapterSettings("tlora", rank=9).rank_mask_of("text_encoders.a") is None
    assert AdapterSettings("lora").rank_mask_of("a") is None
    with pytest.raises(ValueError, match=r"smallest rank is 10, expected at most rank \(dim\), which is 9"):
        AdapterSettings("tlora", rank=9, min_rank=10)
    with pytest.raises(ValueError, match="rank exponent is 0"):
        AdapterSettings("tlora", rank_exponent=0.0)


def test_rows_of_frames_belong_to_their_picture():
    assert timesteps_of_rows(torch.tensor([1.0, 2.0]), 6).tolist() == [1, 1, 1, 2, 2, 2]
    with pytest.raises(ValueError, match="a layer got 5 rows for 2 pictures"):
        timesteps_of_rows(torch.tensor([1.0, 2.0]), 5)


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            [nn.ModuleDict({"attn1": nn.Linear(8, 8), "other": nn.Linear(8, 8)}) for _ in range(2)]
        )
        for block in self.blocks:
            block.forward = lambda x, block=block: torch.tanh(block["attn1"](x)) + x

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def test_checkpointing_remembers_the_noise_levels():
    """Two forward passes at other levels before one backward pass: blocks that run again have the ranks of theirs."""
    torch.manual_seed(0)
    net, settings = Blocks().requires_grad_(False), AdapterSettings("tlora", rank=4, min_rank=1, targets="attention")
    start, x = init_trainable(net, settings, 0, {}), torch.randn(2, 3, 8)
    assert len(start) == 12

    def gradients(checkpointing):
        trained = {n: t.float().requires_grad_("base" not in n) for n, t in moved(start).items()}
        with attach(net, settings, trained, still):
            total = torch.zeros(())
            for levels in ([100.0, 900.0], [700.0, 300.0]):
                with set_timesteps(torch.tensor(levels)):
                    if checkpointing:
                        with checkpoint_blocks(net):
                            total = total + net(x).square().sum()
                    else:
                        total = total + net(x).square().sum()
            assert current_timesteps() is None
            total.backward()
        return {name: tensor.grad for name, tensor in trained.items() if tensor.requires_grad}

    plain, again = gradients(False), gradients(True)
    assert plain.keys() == again.keys() and all(torch.equal(plain[name], again[name]) for name in plain)


# --- files ------------------------------------------------------------------------------------------------------------


def named_like_a_unet(tensors, settings):
    lora = make_lora(tensors, settings, None)
    return {name.replace("diffusion_model.a", WHERE): tensor for name, tensor in lora.items()}


def layer_in(state, metadata=None, strength=1.0, schedule=None):
    """The patch that a file makes of the layer."""
    shapes = {("model", "a.weight"): (40, 24)}
    authors = "unet." + AUTHORS.replace("processor.", "").removesuffix("_lora")
    names = [WHERE, authors, "lora_unet_" + WHERE.split(".", 1)[1].replace(".", "_")]
    state = dict(generic_keys(state))
    state |= rank_schedules(state, metadata or {})
    parsed = read(state, dict.fromkeys(names, Target("model", "a.weight")), shapes, "file")
    ((_, layer, _),) = patches_of(parsed, "model", shapes)
    return Patch(layer, strength, schedule=schedule)


@pytest.mark.parametrize("names", ["kohya", "comfyui", "t-lora"])
def test_a_saved_file_has_every_number_and_the_ranks_of_every_noise_level(names):
    net, settings, start = net_and_tensors(min_rank=2, rank_exponent=1.5)
    tensors = {name: tensor.float() for name, tensor in moved(start).items()}
    lora = named_like_a_unet(tensors, settings)
    metadata = build_metadata(lora, "a", {})
    assert (metadata["ss_tlora_min_rank"], metadata["ss_tlora_alpha_rank_scale"]) == ("2", "1.5")
    file = to_key_format(lora, names, torch.bfloat16)
    assert all(tensor.dtype == torch.float32 for tensor in file.values())
    patch = layer_in(file, metadata)
    assert patch.layer.rank_mask == RankMask(6, 2, 1.5)
    if names == "t-lora":
        assert {name.removeprefix(f"{AUTHORS}.") for name in file} == {*by_suffix(start)}
        assert layer_in(file).layer.rank_mask == RankMask(6, 1)  # what the authors' inference takes
    x, clock = torch.randn(2, 24, dtype=torch.float64), Clock()
    module = nn.Linear(24, 40).double()
    module.load_state_dict(net["a"].state_dict())
    wrapped = put_bypass(module, Bypass(module, [patch], clock=clock))
    for timestep in (999.0, 612.0, 3.0):
        clock.tick(0.5, timestep)
        with attach(net, settings, tensors, still), set_timesteps(torch.tensor([timestep])):
            expected = net["a"](x)
        assert torch.allclose(module(x), expected, rtol=0, atol=1e-6), timestep
    wrapped.leave()


def test_the_authors_file_does_what_their_layer_does():
    """A file as their trainer saves it (diffusers' AttnProcsLayers), with the names that their loader asks for."""
    loaders = pytest.importorskip("diffusers.loaders")
    generator = torch.Generator().manual_seed(0)

    class Linear(nn.Module):  # the parameters of their OrthogonalLoRALinearLayer
        def __init__(self):
            super().__init__()
            self.q_layer, self.p_layer = nn.Linear(24, 6, bias=False), nn.Linear(6, 40, bias=False)
            self.lambda_layer = nn.Parameter(torch.rand(1, 6, generator=generator))
            self.base_p, self.base_q = nn.Linear(6, 40, bias=False), nn.Linear(24, 6, bias=False)
            self.base_lambda = nn.Parameter(torch.rand(1, 6, generator=generator))

    processor = nn.Module()
    processor.to_q_lora = Linear()
    file = loaders.AttnProcsLayers({AUTHORS.removesuffix(".to_q_lora"): processor}).state_dict()
    assert all(name.startswith(AUTHORS) for name in file) and len(file) == 6
    module, clock = nn.Linear(24, 40).double(), Clock()
    x = torch.randn(2, 24, dtype=torch.float64)
    plain = module(x)
    rising = Schedule(((0.0, 0.0), (1.0, 2.0)))
    wrapped = put_bypass(module, Bypass(module, [layer_in(file, strength=0.7, schedule=rising)], clock=clock))
    tensors = {name.removeprefix(f"{AUTHORS}."): tensor.double() for name, tensor in file.items()}
    for percent, timestep in ((0.1, 980.0), (0.5, 400.0)):  # the row's own schedule is multiplied in
        clock.tick(percent, timestep)
        mask = mask_of_the_authors(torch.tensor(timestep), 1000, 6).double()
        expected = plain + 0.7 * 2 * percent * layer_of_the_authors(x, tensors, mask)
        assert torch.allclose(module(x), expected, rtol=0, atol=1e-6)
    wrapped.leave()


def test_lycoris_files_lack_what_they_started_from():
    _, settings, start = net_and_tensors()
    file = {name: tensor for name, tensor in named_like_a_unet(start, settings).items() if "base" not in name}
    with pytest.raises(ValueError, match="which LyCORIS leaves out of its files"):
        layer_in(file)


def test_the_authors_have_names_for_attention_alone():
    _, settings, start = net_and_tensors()
    lora = {
        name.replace("attn1.to_q", "ff.net.2"): tensor for name, tensor in named_like_a_unet(start, settings).items()
    }
    with pytest.raises(ValueError, match="names for a UNet's attention layers only; save with kohya or comfyui names"):
        to_key_format(lora, "t-lora", torch.float32)


def test_the_clock_gives_every_rank_its_place():
    """Indices of ranks that nobody uses any more are given again; schedules keep theirs."""
    clock, rising = Clock(), Schedule(((0.0, 0.0), (1.0, 2.0)))

    class User:
        def __init__(self, *schedules):
            self.schedules = set(schedules)
            clock.users.add(self)

    _, settings, start = net_and_tensors(rank=16, min_rank=4)
    patch = layer_in(named_like_a_unet(start, settings))
    ranks, other = patch.changes, Patch(patch.layer, 1.0, schedule=rising).changes
    users = [User(ranks), User(rising)]
    index, first = clock.index_of(rising), clock.index_of(ranks)
    assert first >= 64 and len(clock.values) == first + 16
    clock.tick(0.25, 500.0)
    assert clock.values[first : first + 16].tolist() == [1.0] * 10 + [0.0] * 6 and float(clock.values[index]) == 0.5
    second = clock.index_of(other)
    assert second == first + 16
    users[0] = User(other)
    clock.tick(0.25, 500.0)
    assert clock.values[second : second + 16].tolist() == [0.5] * 10 + [0.0] * 6
    assert math.isclose(float(clock.values[0]), 1.0)
