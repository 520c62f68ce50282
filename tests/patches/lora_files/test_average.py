"""Averages of LoRA files against full-size products in float64."""

import pytest
import torch
from graft_nodes.patches.lora_files.average import average
from graft_nodes.patches.lora_files.low_rank import cut_to_rank


def lora(seed, rank, alpha=4.0, conv=False, tucker=False):
    """A file with a Linear (12x10), perhaps a Conv2d (8x6x3x3, or with a Tucker core), and a difference."""
    draw = torch.Generator().manual_seed(seed)
    out = {
        "diffusion_model.a.lora_up.weight": torch.randn(12, rank, generator=draw),
        "diffusion_model.a.lora_down.weight": torch.randn(rank, 10, generator=draw),
        "diffusion_model.b.diff": torch.randn(5, generator=draw),
    }
    if alpha is not None:
        out["diffusion_model.a.alpha"] = torch.tensor(alpha)
    if conv:
        out["diffusion_model.c.lora_up.weight"] = torch.randn(8, rank, 1, 1, generator=draw)
        kernel = (1, 1) if tucker else (3, 3)
        out["diffusion_model.c.lora_down.weight"] = torch.randn(rank, 6, *kernel, generator=draw)
        if tucker:
            out["diffusion_model.c.lora_mid.weight"] = torch.randn(rank, rank, 3, 3, generator=draw)
        out["diffusion_model.c.alpha"] = torch.tensor(2.0)
    return out


def change(state, base, shape):
    """The difference a layer makes, written out in float64 without Graft."""
    up, down = state[f"{base}.lora_up.weight"].double(), state[f"{base}.lora_down.weight"].double()
    rank = down.shape[0]
    scale = float(state[f"{base}.alpha"]) / rank if f"{base}.alpha" in state else 1.0
    if f"{base}.lora_mid.weight" in state:
        return scale * torch.einsum(
            "or,rskl,si->oikl", up[:, :, 0, 0], state[f"{base}.lora_mid.weight"].double(), down[:, :, 0, 0]
        )
    return scale * (up.flatten(1) @ down.flatten(1)).reshape(shape)


@pytest.mark.parametrize("ranks", [(4, 4), (4, 2, 7)])
def test_products_are_exact_for_any_ranks_and_forms(ranks):
    files = [lora(n, r, alpha=None if n == 1 else 4.0, conv=True, tucker=n == 1) for n, r in enumerate(ranks)]
    shares = (0.5, 0.75, -0.25)[: len(files)]
    out = average(files, shares, [f"f{n}" for n in range(len(files))], "products")
    for base, shape in (("diffusion_model.a", (12, 10)), ("diffusion_model.c", (8, 6, 3, 3))):
        expected = sum(share * change(file, base, shape) for file, share in zip(files, shares, strict=True))
        torch.testing.assert_close(change(out.state, base, shape), expected, rtol=0, atol=1e-5)
    expected = sum(share * file["diffusion_model.b.diff"].double() for file, share in zip(files, shares, strict=True))
    torch.testing.assert_close(out.state["diffusion_model.b.diff"].double(), expected, rtol=0, atol=1e-6)
    assert out.algebra == "products" and max(out.ranks) == sum(ranks)
    assert out.state["diffusion_model.c.lora_up.weight"].shape == (8, sum(ranks), 1, 1)


def test_factors_are_averaged_one_by_one_and_differ_from_products():
    files = [lora(1, 4), lora(2, 4)]
    out = average(files, (0.25, 0.75), ["x", "y"], "factors")
    for key in ("diffusion_model.a.lora_up.weight", "diffusion_model.a.lora_down.weight", "diffusion_model.b.diff"):
        expected = 0.25 * files[0][key].double() + 0.75 * files[1][key].double()
        torch.testing.assert_close(out.state[key].double(), expected, rtol=0, atol=1e-6)
    assert out.state.keys() == files[0].keys() and out.algebra == "factors" and out.ranks == (4,)
    exact = average(files, (0.25, 0.75), ["x", "y"], "products").state
    apart = (
        (change(out.state, "diffusion_model.a", (12, 10)) - change(exact, "diffusion_model.a", (12, 10))).abs().max()
    )
    assert apart > 0.1


def test_a_cut_is_the_best_product_of_that_rank():
    draw = torch.Generator().manual_seed(5)
    up, down = (
        torch.randn(30, 9, generator=draw, dtype=torch.float64),
        torch.randn(9, 20, generator=draw, dtype=torch.float64),
    )
    u, s, v = torch.linalg.svd(up @ down, full_matrices=False)  # the full-size product, which the code never makes
    small_up, small_down, whole, cut = cut_to_rank(up, down, 3)
    torch.testing.assert_close(small_up @ small_down, u[:, :3] @ torch.diag(s[:3]) @ v[:3])
    assert whole == pytest.approx(float(s.square().sum())) and cut == pytest.approx(float(s[3:].square().sum()))


def test_a_rank_says_what_it_lost_and_a_large_rank_loses_nothing():
    files = [lora(1, 4, conv=True), lora(2, 3, conv=True)]
    small = average(files, (0.5, 0.5), ["x", "y"], "products", rank=2)
    assert small.ranks == (2,) and 0.1 < small.lost < 1
    large = average(files, (0.5, 0.5), ["x", "y"], "products", rank=64)
    assert large.lost < 1e-6
    expected = sum(0.5 * change(file, "diffusion_model.c", (8, 6, 3, 3)) for file in files)
    torch.testing.assert_close(change(large.state, "diffusion_model.c", (8, 6, 3, 3)), expected, rtol=0, atol=1e-5)


def test_every_mismatch_is_listed_at_once():
    left, right = lora(1, 4, conv=True), lora(2, 6)
    right["diffusion_model.d.diff"] = torch.zeros(3)
    right["diffusion_model.b.diff"] = torch.zeros(7)
    with pytest.raises(ValueError, match="cannot be averaged") as error:
        average([left, right], (0.5, 0.5), ["x", "y"], "factors")
    for part in (
        "diffusion_model.c: in x, missing in y",
        "diffusion_model.d: in y, missing in x",
        "(5,) and (7,)",
        "(12, 4) and (12, 6)",
    ):
        assert part in str(error.value)
    with pytest.raises(ValueError) as error:
        average([left, right], (0.5, 0.5), ["x", "y"], "products")
    assert "(5,) and (7,)" in str(error.value) and "(12, 6)" not in str(error.value)


@pytest.mark.parametrize(
    ("change_", "says"),
    [
        (lambda f: f.pop("diffusion_model.a.lora_up.weight"), "half a pair"),
        (lambda f: f["diffusion_model.b.diff"].fill_(float("nan")), "NaN"),
        (lambda f: f.update({"diffusion_model.a.hada_w1_a": torch.zeros(2, 2)}), "LoHa"),
        (lambda f: f.update({"strange": torch.zeros(2)}), "strange is not a LoRA tensor"),
        (lambda f: f.update({"diffusion_model.a.lora_down.weight": torch.zeros(4, 11)}), "weights"),
    ],
)
def test_what_cannot_be_averaged_is_named(change_, says):
    broken = lora(2, 4)
    change_(broken)
    with pytest.raises(ValueError, match=says):
        average([lora(1, 4), broken], (0.5, 0.5), ["x", "y"], "products")


def test_arguments_are_checked():
    files = [lora(1, 4), lora(2, 4)]
    for call in (
        lambda: average(files, (1.0,), ["x", "y"], "products"),
        lambda: average([], (), [], "products"),
        lambda: average(files, (0.5, 0.5), ["x", "y"], "sums"),
        lambda: average(files, (0.5, 0.5), ["x", "y"], "factors", rank=3),
    ):
        with pytest.raises(ValueError, match="Averaging LoRAs"):
            call()
    unequal = [lora(1, 4), lora(2, 4, alpha=8.0)]
    with pytest.raises(ValueError, match="alpha 4 and 8"):
        average(unequal, (0.5, 0.5), ["x", "y"], "factors")


def in_pefts_names(state):
    """A file of kohya's names as PEFT writes it: without alpha, whose scale is in the second factor."""
    renamed = {}
    for key, tensor in state.items():
        if not key.endswith(".alpha"):
            key = key.replace("diffusion_model.", "base_model.model.").replace("lora_up", "lora_B")
            renamed[key.replace("lora_down", "lora_A")] = tensor
    return renamed


@pytest.mark.parametrize("algebra", ["factors", "products"])
def test_files_in_different_key_formats(algebra):
    """PEFT's and kohya's: the average of both has the first one's names and is that of files in one format."""
    first, second = lora(1, 4), lora(2, 4)
    expected = average([first, second], (0.25, 0.75), ["x", "y"], algebra).state
    mixed = average([first, in_pefts_names(second)], (0.25, 0.75), ["x", "y"], algebra).state
    assert mixed.keys() == expected.keys()
    assert all(torch.equal(mixed[key], expected[key]) for key in expected)
    turned = average([in_pefts_names(second), first], (0.75, 0.25), ["x", "y"], algebra).state
    assert all(key.startswith("base_model.model.") for key in turned)


def test_another_scale_is_no_missing_alpha():
    first, second = lora(1, 4, alpha=2.0), lora(2, 4, alpha=2.0)
    with pytest.raises(ValueError, match="alpha only in one"):
        average([first, in_pefts_names(second)], (0.5, 0.5), ["x", "y"], "factors")


def test_files_without_a_common_layer_say_what_to_do():
    first, second = lora(1, 4), {f"other_{key}": tensor for key, tensor in lora(2, 4).items()}
    expected = r"x and y have no layer in common by name \(.*put y alone into Merge LoRAs"
    with pytest.raises(ValueError, match=expected) as error:
        average([first, second], (0.5, 0.5), ["x", "y"], "products")
    assert "missing in" not in str(error.value)
