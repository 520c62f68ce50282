"""Merged and extracted LoRAs against products in float64 and numpy's SVD."""

import numpy as np
import pytest
import torch
from graft_nodes.patches import blocks
from graft_nodes.patches.formats import Target, pieces_of, read
from graft_nodes.patches.low_rank import best, extracted, merged


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def lora(base, seed, rank=3, shape=(12, 10), alpha=1.5):
    return {f"{base}.lora_up.weight": random(shape[0], rank, *(1 for _ in shape[2:]), seed=seed),
            f"{base}.lora_down.weight": random(rank, *shape[1:], seed=seed + 1), f"{base}.alpha": torch.tensor(alpha)}  # fmt: skip


def change(state, shape):
    """The whole change that a state dict of one layer makes to a weight, in float64."""
    total = torch.zeros(shape, dtype=torch.float64)
    up = next((value for key, value in state.items() if key.endswith("lora_up.weight")), None)
    if up is not None:
        down = next(value for key, value in state.items() if key.endswith("lora_down.weight"))
        alpha = next(float(value) for key, value in state.items() if key.endswith("alpha"))
        total += (alpha / down.shape[0] * up.double().flatten(1) @ down.double().flatten(1)).reshape(shape)
    return total + sum(value.double() for key, value in state.items() if key.endswith(".diff"))


@pytest.mark.parametrize("shape", [(12, 10), (12, 6, 3, 3)])
def test_exact(shape):
    first, second = lora("lora_unet_a_b", 1, shape=shape), lora("diffusion_model.a.b", 5, rank=2, shape=shape)
    made = merged([("x", first, 0.7, 1.0), ("y", second, -0.4, 1.0)])
    assert made.rank == 5 and made.lost == 0 and set(key.split(".")[0] for key in made.state) == {"lora_unet_a_b"}
    assert torch.allclose(change(made.state, shape), 0.7 * change(first, shape) - 0.4 * change(second, shape), atol=1e-5)
    target = Target("model", "a.weight")
    parsed = read(made.state, {"lora_unet_a_b": target}, {("model", "a.weight"): shape}, "merged")
    assert len(list(pieces_of(parsed, "model", {("model", "a.weight"): shape}))) == 1


@pytest.mark.parametrize("difference", [False, True])
def test_cut_is_the_best_of_its_rank(difference):
    states = [lora("a", 1), lora("a", 5)] + ([{"a.diff": random(12, 10, seed=9)}] if difference else [])
    made = merged([(str(n), state, 1.0, 1.0) for n, state in enumerate(states)], rank=2)
    exact = sum(change(state, (12, 10)) for state in states).numpy()
    values = np.linalg.svd(exact, compute_uv=False)
    error = np.linalg.norm(exact - change(made.state, (12, 10)).numpy())
    assert made.rank == 2 and np.isclose(error, np.linalg.norm(values[2:]), rtol=1e-4)
    assert np.isclose(made.lost, error / np.linalg.norm(exact), rtol=1e-3)


def test_large_matrices_are_cut_well_and_always_alike():
    matrix = random(700, 500) @ torch.diag(0.97 ** torch.arange(500.0)) @ random(500, 600, seed=1)
    up, down, left = best(matrix, 8)
    values = np.linalg.svd(matrix.double().numpy(), compute_uv=False)
    error = float((matrix - up @ down).norm())
    assert error <= 1.001 * np.linalg.norm(values[8:]) and np.isclose(left**0.5, error, rtol=1e-3)
    assert torch.equal(best(matrix, 8)[0], up)


def test_text_encoders_take_their_own_strength():
    made = merged([("x", lora("lora_te_a", 1), 0.0, 0.5)])
    assert torch.allclose(change(made.state, (12, 10)), 0.5 * change(lora("lora_te_a", 1), (12, 10)), atol=1e-5)


def test_extraction():
    weight, bias, conv = random(12, 4) @ random(4, 10), random(12), random(8, 4, 3, 3)
    changes = {"m.a.weight": lambda: weight, "m.a.bias": lambda: bias, "m.c.weight": lambda: conv, "m.n.weight": lambda: bias,
               "m.same.weight": lambda: torch.zeros(3, 3)}  # fmt: skip
    made = extracted(changes, 4)
    layer = {key: value for key, value in made.state.items() if key.startswith("m.a.lora") or key == "m.a.alpha"}
    assert torch.allclose(change(layer, (12, 10)), weight.double(), atol=1e-4)
    assert torch.equal(made.state["m.a.diff_b"], bias) and torch.equal(made.state["m.n.diff"], bias)
    assert made.state["m.c.lora_down.weight"].shape == (4, 4, 3, 3) and not any("same" in key for key in made.state)
    assert 0 < made.lost < 1
    with pytest.raises(ValueError, match="zero everywhere"):
        extracted({"m.a.weight": lambda: torch.zeros(2, 2)}, 4)


def test_what_cannot_be_merged_is_listed():
    states = [("x", lora("lora_unet_input_blocks_1", 1) | {"lora_unet_a.hada_w1_a": torch.ones(2)}, 1.0, 1.0),
              ("y", lora("lora_unet_down_blocks_1", 1) | {"z.lora_up.weight": torch.ones(2, 2),
                    "what": torch.ones(1)}, 1.0, 1.0)]  # fmt: skip
    with pytest.raises(ValueError) as error:
        merged(states)
    for said in ("x: LoHa is not available here", "y: z is half a pair", "y: what is no LoRA tensor", "name the UNet's blocks differently"):
        assert said in str(error.value)
    with pytest.raises(ValueError, match="different models"):
        merged([("x", lora("a", 1), 1.0, 1.0), ("y", lora("a", 1, shape=(9, 10)), 1.0, 1.0)])


def test_block_weights():
    """The layers of each block with their own strength, whichever way the file names its blocks; what is zero is left out."""
    names = ("input_blocks_4_1_proj_in", "middle_block_1_proj_in", "output_blocks_3_1_proj_in")
    diffusers = ("down_blocks_1_attentions_0_proj_in", "mid_block_attentions_0_proj_in", "up_blocks_1_attentions_0_proj_in")
    weights = blocks.parse("IN=0.5, M=0, OUT03=2")
    for spelled in (names, diffusers):
        state = {key: value for seed, name in enumerate(spelled) for key, value in lora(f"lora_unet_{name}", seed).items()}
        made = merged([("x", state, 0.7, 1.0)], by_block=[weights]).state
        for name, factor in zip(spelled, (0.5, None, 2.0), strict=True):
            base = f"lora_unet_{name}"
            if factor is None:
                assert not any(key.startswith(base) for key in made)
                continue
            scale = float(state[f"{base}.alpha"]) / state[f"{base}.lora_down.weight"].shape[0] if f"{base}.alpha" in state else 1.0
            exact = 0.7 * factor * scale * state[f"{base}.lora_up.weight"].flatten(1) @ state[f"{base}.lora_down.weight"].flatten(1)
            ours = made[f"{base}.lora_up.weight"].flatten(1) @ made[f"{base}.lora_down.weight"].flatten(1)
            assert torch.allclose(ours, exact, atol=1e-5)
    with pytest.raises(ValueError, match=r"x: blocks: it has no D00; its blocks are BASE, IN, M, OUT"):
        merged([("x", state, 1.0, 1.0)], by_block=[{"D00": 1.0}])
