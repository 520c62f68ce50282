"""Merge methods against PEFT's own functions with the same masks, and against dense formulas in float64."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import peft.utils.merge_utils as peft
import pytest
import torch
from graft_nodes.patches.lora_files.entry import LoraEntry
from graft_nodes.patches.lora_files.merge import WeightChange, file_changes, merge_changes, merge_loras
from graft_nodes.patches.lora_files.merge_methods import METHODS, MergeSettings, mask_generator
from graft_nodes.patches.patching.fuse import Patch, apply_in_order

from ..patching.test_compose import layer
from .test_merge import change, lora, of_family, random

STRENGTHS = (0.7, -0.4, 1.3)
FULL = 4096  # a maximum rank that cuts nothing
SHAPES = [(12, 10), (12, 6, 3, 3)]
DROPPING = [method.name for method in METHODS if method.drops]


def files(shape, count=3):
    return [lora("a", 10 * number, shape=shape) for number in range(count)]


def entries(states, strengths=STRENGTHS):
    return [
        LoraEntry(f"file{number}", state, strength)
        for number, (state, strength) in enumerate(zip(states, strengths, strict=False))
    ]


def merged(states, rank=FULL, strengths=STRENGTHS, **settings):
    return merge_loras(entries(states, strengths), rank, settings=MergeSettings(**settings))


def deltas(states, shape, strengths=STRENGTHS):
    """What each file does, with its strength, in float64."""
    return [strength * change(state, shape) for state, strength in zip(states, strengths, strict=False)]


def same(made, expected):
    ours = change(made.state, expected.shape)
    assert float((ours - expected).norm()) <= 1e-6 * float(expected.norm())


# --- each method equals its reference ---------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("density", [0.2, 0.55, 1.0])
def test_ties_is_pefts(shape, density):
    states = files(shape)
    same(merged(states, method="ties", density=density), peft.ties(deltas(states, shape), torch.ones(3), density))


@pytest.mark.parametrize(("density", "kept"), [(0.01, 1), (0.3, 1), (0.34, 2), (0.99, 5), (1.0, 6)])
def test_ties_keeps_that_share_of_the_elements_rounded_down_and_one_at_least(density, kept):
    values = torch.tensor([[1.0, -4.0, 2.0], [3.0, 0.5, -0.25]])
    made = merged([{"a.diff": values}], strengths=(1.0,), method="ties", density=density).state["a.diff"]
    threshold = values.abs().flatten().sort(descending=True).values[kept - 1]
    assert torch.equal(made, values * (values.abs() >= threshold))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("method", "reference"), [("dare_linear", peft.dare_linear), ("dare_ties", peft.dare_ties)])
def test_dare_is_pefts_with_the_same_masks(monkeypatch, shape, method, reference):
    states, density = files(shape), 0.4
    masks = iter([torch.rand(shape, generator=mask_generator(7, "a", file)) < density for file in range(3)])
    monkeypatch.setattr(torch, "bernoulli", lambda chances: next(masks).to(chances))
    expected = reference(deltas(states, shape), torch.ones(3), density)
    same(merged(states, method=method, density=density, mask_seed=7), expected)


@pytest.mark.parametrize("shape", SHAPES)
def test_della_is_the_papers_formula(shape):
    """p_i = p - epsilon / 2 + epsilon / n * place, kept elements divided by 1 - p_i, then TIES' election."""
    states, density, epsilon = files(shape), 0.6, 0.3
    kept = []
    for file, delta in enumerate(deltas(states, shape)):
        draws = torch.rand((12, delta[0].numel()), generator=mask_generator(0, "a", file)).numpy()
        rows = delta.flatten(1).numpy()
        result = np.zeros_like(rows)
        for row, columns in enumerate(rows):
            for place, column in enumerate(np.argsort(-np.abs(columns))):
                drop = (1 - density) - epsilon / 2 + epsilon / len(columns) * place
                if draws[row, column] < 1 - drop:
                    result[row, column] = columns[column] / (1 - drop)
        kept.append(torch.from_numpy(result).reshape(shape))
    stacked = torch.stack(kept)
    expected = peft.disjoint_merge(stacked, peft.calculate_majority_sign_mask(stacked))
    same(merged(states, method="della", density=density, epsilon=epsilon), expected)


def test_large_elements_survive_della_more_often():
    rows = torch.randn(400, 200, generator=torch.Generator().manual_seed(0))
    made = merged([{"a.diff": rows}], strengths=(1.0,), method="della", density=0.5, epsilon=0.8)
    kept = made.state["a.diff"] != 0
    order = rows.abs().argsort(1)
    shares = kept.gather(1, order).float().mean(0)
    assert abs(float(shares[:20].mean()) - 0.14) < 0.03 and abs(float(shares[-20:].mean()) - 0.86) < 0.03


def karcher_mean(vectors, shares):
    """Gradient descent on the sphere in float64, on whole vectors."""
    mean = sum(share * vector for share, vector in zip(shares, vectors, strict=True))
    mean = mean / mean.norm()
    for _ in range(300):
        tangent = torch.zeros_like(mean)
        for share, vector in zip(shares, vectors, strict=True):
            cosine = (mean * vector).sum().clamp(-1, 1)
            angle = cosine.acos()
            tangent += share * angle / angle.sin() * (vector - cosine * mean)
        step = tangent.norm()
        if step < 1e-14:
            break
        mean = step.cos() * mean + step.sin() * tangent / step
    return mean


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("strengths", [(1.0, 1.0, 1.0), STRENGTHS])
def test_karcher_is_the_mean_on_the_sphere(shape, strengths):
    states = files(shape)
    changes = deltas(states, shape, strengths)
    norms = torch.stack([delta.norm() for delta in changes])
    shares = [abs(strength) / sum(map(abs, strengths)) for strength in strengths]
    units = [delta / norm for delta, norm in zip(changes, norms, strict=True)]
    made = merged(states, 0, strengths, method="karcher")
    same(made, norms.mean() * karcher_mean(units, shares))
    assert made.rank == 9 and made.lost == 0
    mean = change(made.state, shape)
    for file, delta in enumerate(changes):
        sine = math.sqrt(1 - max(0.0, float((mean * delta).sum() / mean.norm() / delta.norm())) ** 2)
        assert np.isclose(made.files[file].share, sine, atol=1e-6)


def test_karcher_of_two_is_the_middle_of_the_arc():
    states, shape = files((12, 10), 2), (12, 10)
    one, other = (delta / delta.norm() for delta in deltas(states, shape, (1.0, 1.0)))
    made = change(merged(states, strengths=(1.0, 1.0), method="karcher").state, shape)
    middle = (one + other) / (one + other).norm()
    assert torch.allclose(made / made.norm(), middle, atol=1e-7)


def test_karcher_leaves_files_without_the_layer_out():
    states = [lora("a", 1), lora("b", 5), lora("a", 9) | lora("b", 13)]
    both = merged(states, 0, (1.0, 1.0, 1.0), method="karcher").state
    of_a = merged([states[0], lora("a", 9)], 0, (1.0, 1.0), method="karcher").state
    assert torch.equal(both["a.lora_up.weight"], of_a["a.lora_up.weight"])


def mergekits_mean(changes):
    """mergekit's karcher in float64: the mean direction of the changes that have one, as long as all changes are on
    average, zeros among them.
    """
    present = [change for change in changes if change.norm()]
    direction = karcher_mean([change / change.norm() for change in present], [1 / len(present)] * len(present))
    return torch.stack([change.norm() for change in changes]).mean() * direction


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("zeros", [0, 1, 2])
def test_karcher_is_mergekits_but_for_the_length_beside_changes_of_zero(shape, zeros):
    states, strengths = files(shape), (1.0,) * (3 + zeros)
    for _ in range(zeros):
        states.append(states[0] | {"a.lora_up.weight": torch.zeros_like(states[0]["a.lora_up.weight"])})
    of_mergekit = mergekits_mean(deltas(states, shape, strengths))
    made = merged(states, 0, strengths, method="karcher")
    same(made, of_mergekit * (3 + zeros) / 3)
    assert [made.files[file].zeros for file in range(3 + zeros)] == [0, 0, 0, 1, 1][: 3 + zeros]


def test_opposite_changes_have_no_karcher_mean():
    with pytest.raises(
        ValueError, match=r"a: the changes of the files point in opposite directions.*use merge method sum"
    ):
        merged([lora("a", 1), lora("a", 1)], 0, (1.0, -1.0), method="karcher")
    with pytest.raises(ValueError, match="no Karcher mean"):
        merged([lora("a", 1), lora("a", 1)], 0, (1.0, -0.4), method="karcher")


def test_the_karcher_mean_of_changes_that_nearly_undo_each_other_is_found():
    apart = [
        {"a.diff": torch.tensor([[1.0, 0.0, 0.0]])},
        {"a.diff": torch.tensor([[-1.0, 0.1, 0.0]])},
        {"a.diff": torch.tensor([[0.0, 0.1, 2.0]])},
    ]
    made = merged(apart, 0, (1.0, 1.0, 1.0), method="karcher").state["a.diff"].double()
    changes = [state["a.diff"].double() for state in apart]
    norms = torch.stack([delta.norm() for delta in changes])
    units = [delta / norm for delta, norm in zip(changes, norms, strict=True)]
    mean, pull = made / made.norm(), torch.zeros(1, 3, dtype=torch.float64)
    for unit in units:  # at a mean the pulls cancel each other
        angle = (mean * unit).sum().acos()
        pull += angle / angle.sin() * (unit - angle.cos() * mean)
    assert float(pull.norm()) < 1e-5 and np.isclose(float(made.norm()), float(norms.mean()), atol=1e-6)


def tsv(changes, rank):
    """TSV-Merge on whole matrices in float64: the singular vectors side by side, each side's polar factor."""
    lefts, all_values, rights = [], [], []
    for delta in changes:
        left, values, right = np.linalg.svd(delta.flatten(1).numpy(), full_matrices=False)
        lefts.append(left[:, :rank])
        all_values.append(values[:rank])
        rights.append(right[:rank])
    polar = []
    for side in (np.concatenate(lefts, 1), np.concatenate(rights, 0)):
        left, _, right = np.linalg.svd(side, full_matrices=False)
        polar.append(left @ right)
    values = np.concatenate(all_values)
    whole = polar[0] * values @ polar[1]
    parts = [
        polar[0][:, n : n + rank] * values[n : n + rank] @ polar[1][n : n + rank] for n in range(0, 3 * rank, rank)
    ]
    return torch.from_numpy(whole), [torch.from_numpy(part) for part in parts]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_orthogonal_sum_is_tsv_merge(shape):
    states = files(shape)
    changes = deltas(states, shape)
    made = merged(states, 0, method="orthogonal")
    expected, parts = tsv(changes, 3)
    same(made, expected.reshape(shape))
    assert made.rank == 9 and made.lost == 0
    for file, (delta, part) in enumerate(zip(changes, parts, strict=True)):
        moved = float((delta.flatten(1) - part).norm() / delta.norm())
        assert np.isclose(made.files[file].share, moved, atol=1e-6) and moved > 0.1


def test_the_orthogonal_sum_of_large_ranks_takes_the_largest_of_each():
    states = [lora("a", 10 * number, rank=7) for number in range(3)]
    expected, _ = tsv(deltas(states, (12, 10)), 3)
    same(merged(states, 0, method="orthogonal"), expected)


def test_the_orthogonal_sum_keeps_orthogonal_files_and_counts_the_same_file_once():
    states = [lora("a", 1), lora("a", 1)]
    same(merged(states, 0, (1.0, 1.0), method="orthogonal"), change(states[0], (12, 10)))
    apart = [{"a.lora_up.weight": torch.eye(12)[:, [n]], "a.lora_down.weight": torch.eye(10)[[n]]} for n in range(2)]
    made = merged(apart, 0, (1.0, 2.0), method="orthogonal")
    ours = made.state["a.lora_up.weight"] @ made.state["a.lora_down.weight"]
    expected = torch.zeros(12, 10)
    expected[0, 0], expected[1, 1] = 1.0, 2.0
    assert torch.allclose(ours, expected, atol=1e-6)
    assert made.files[0].share < 1e-6 and made.files[1].share < 1e-6


@pytest.mark.parametrize("method", METHODS.names())
@pytest.mark.parametrize("resize", ["none", "energy", "sv_fro", "sv_cumulative"])
def test_a_file_without_any_change_changes_nothing(method, resize):
    """A LoRA as training starts, with zeros in up; a layer that is zero in every file keeps rank 1 when resized."""
    nothing = lora("a", 5) | {"a.lora_up.weight": torch.zeros(12, 3)}
    nothing |= lora("b", 5) | {"b.lora_up.weight": torch.zeros(12, 3)}
    settings = {"method": method, "resize": resize, "resize_to": 1.0, "density": 1.0, "epsilon": 0.0}
    made = merged([lora("a", 1), nothing], FULL, (0.7, 1.0), **settings).state
    of_a = {key: value for key, value in made.items() if key.startswith("a.")}
    of_b = {key: value for key, value in made.items() if key.startswith("b.")}
    assert torch.allclose(change(of_a, (12, 10)), 0.7 * change(lora("a", 1), (12, 10)), atol=1e-5)
    assert not change(of_b, (12, 10)).any()
    assert resize == "none" or len(of_b["b.lora_down.weight"]) == 1


# --- what they lose, and to which rank they come back -----------------------------------------------------------------


def test_what_each_file_loses_is_said():
    shape, density = (12, 10), 0.3
    states = [lora("a", 1) | lora("b", 5), lora("a", 9)]
    made = merged(states, strengths=(1.0, 0.5), method="dare_linear", density=density, mask_seed=3)
    dropped, whole, shares = 0.0, 0.0, {}
    for name, seed in (("a", 1), ("b", 5)):
        delta = change(lora(name, seed), shape)
        gone = delta * (torch.rand(shape, generator=mask_generator(3, name, 0)) >= density)
        dropped, whole = dropped + float(gone.norm()) ** 2, whole + float(delta.norm()) ** 2
        shares[name] = float(gone.norm() / delta.norm())
    worst = max(shares, key=shares.get)
    assert np.isclose(made.files[0].share, math.sqrt(dropped / whole), atol=1e-6)
    assert made.files[0].worst_layer == worst and np.isclose(made.files[0].worst_share, shares[worst], atol=1e-6)
    assert made.lost == 0 and set(made.files) == {0, 1}


def test_outvoted_elements_count_as_lost():
    states = [{"a.diff": torch.tensor([[3.0, 4.0]])}, {"a.diff": torch.tensor([[5.0, -1.0]])}]
    made = merged(states, strengths=(1.0, 1.0), method="ties", density=1.0)
    assert torch.equal(made.state["a.diff"], torch.tensor([[4.0, 4.0]]))
    assert made.files[0].share == 0 and np.isclose(made.files[1].share, 1 / math.sqrt(26))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("method", METHODS.names())
def test_a_rank_is_the_best_of_it_and_its_loss_is_said(method, rank, shape):
    """With rank 0, methods that drop elements come back with the ranks of the files together."""
    states = files(shape, 2)
    exact = change(merged(states, method=method).state, shape)
    made = merged(states, rank, method=method)
    kept = rank or 6
    values = np.linalg.svd(exact.flatten(1).numpy(), compute_uv=False)
    least = float(np.linalg.norm(values[kept:]))
    error = float((change(made.state, shape) - exact).norm())
    assert made.rank == made.lowest_rank == kept
    assert error <= least * (1 + 1e-6) + 1e-6 * float(exact.norm())
    assert np.isclose(made.lost, least / float(exact.norm()), atol=1e-6)
    assert made.lost == 0 or made.cut.worst_layer == "a"


def kohyas_rank(values, rule, target):
    """The rules of resize_lora.py, and the share of the energy."""
    squares = values**2
    if rule == "sv_ratio":
        return max(1, int((values > values[0] / target).sum()))
    parts = {"energy": squares, "sv_fro": squares, "sv_cumulative": values}[rule]
    wanted = target**2 if rule == "sv_fro" else target
    rank = int(np.searchsorted(np.cumsum(parts) / parts.sum(), wanted)) + 1
    return min(rank, len(values))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("rule", "target"), [("energy", 0.9), ("sv_fro", 0.9), ("sv_cumulative", 0.8), ("sv_ratio", 4.0), ("sv_fro", 1.0)]
)
def test_resize_gives_every_layer_its_own_rank(shape, rule, target):
    states = [lora("a", 1, rank=5, shape=shape) | lora("b", 7, rank=2, shape=shape), {"b.diff": random(*shape, seed=4)}]
    made = merged(states, 0, (1.0, 1.0), resize=rule, resize_to=target)
    exact = {
        "a": change({k: v for k, v in states[0].items() if k.startswith("a.")}, shape),
        "b": change({k: v for k, v in states[0].items() if k.startswith("b.")}, shape) + states[1]["b.diff"].double(),
    }
    ranks, lost, whole = [], 0.0, 0.0
    for name, delta in exact.items():
        values = np.linalg.svd(delta.flatten(1).numpy(), compute_uv=False)
        if name == "a":
            values = values[:5]
        rank = kohyas_rank(values, rule, target)
        own = {key: value for key, value in made.state.items() if key.startswith(f"{name}.")}
        assert own[f"{name}.lora_down.weight"].shape[0] == rank and float(own[f"{name}.alpha"]) == rank
        error = float((change(own, shape) - delta).norm())
        least = float(np.linalg.norm(values[rank:]))
        assert abs(error - least) <= 1e-6 * float(delta.norm())
        ranks.append(rank)
        lost, whole = lost + least**2, whole + float(delta.norm()) ** 2
    assert (made.lowest_rank, made.rank) == (min(ranks), max(ranks))
    assert np.isclose(made.lost, math.sqrt(lost / whole), atol=1e-6)
    capped = merged(states, 2, (1.0, 1.0), resize=rule, resize_to=target)
    assert capped.rank == min(2, max(ranks))


# --- the same bytes, other kinds, block weights, memory ---------------------------------------------------------------


def test_the_sum_puts_the_factors_side_by_side_bit_for_bit():
    states = files((12, 10), 2)
    made = merged(states, 0)
    ups, downs = [], []
    for state, strength in zip(states, STRENGTHS, strict=False):
        scale = torch.tensor(strength * (float(state["a.alpha"]) / 3), dtype=torch.float32)
        ups.append(state["a.lora_up.weight"] * scale)
        downs.append(state["a.lora_down.weight"])
    assert torch.equal(made.state["a.lora_up.weight"], torch.cat(ups, 1))
    assert torch.equal(made.state["a.lora_down.weight"], torch.cat(downs, 0))
    assert made.files == {} and made.lost == 0


@pytest.mark.parametrize("method", METHODS.names())
def test_the_same_input_gives_the_same_bytes(method):
    states = files((12, 10))
    drawn = torch.get_rng_state()
    first, again = (merged(states, method=method, mask_seed=5).state for _ in range(2))
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(torch.equal(first[key], again[key]) for key in first)
    other = merged(states, method=method, mask_seed=6).state
    random_masks = method in ("dare_linear", "dare_ties", "della")
    assert torch.equal(change(first, (12, 10)), change(other, (12, 10))) != random_masks


def test_masks_differ_by_layer_and_file():
    draws = {
        tuple(torch.rand(4, generator=mask_generator(*place)).tolist())
        for place in ((0, "a", 0), (0, "b", 0), (0, "a", 1), (1, "a", 0))
    }
    assert len(draws) == 4


@pytest.mark.parametrize("method", METHODS.names())
def test_block_weights_and_strengths_count(method):
    """A block weight is a strength of that block; a block at 0 leaves the file out there."""
    names = ("input_blocks_4_1_proj_in", "middle_block_1_proj_in")
    states = [
        lora(f"lora_unet_{names[0]}", 1) | lora(f"lora_unet_{names[1]}", 3),
        lora(f"lora_unet_{names[0]}", 5) | lora(f"lora_unet_{names[1]}", 7),
    ]
    rows = [LoraEntry("x", states[0], 0.8, blocks="IN=0.5, M=0"), LoraEntry("y", states[1], 0.6)]
    made = merge_loras(rows, FULL, settings=MergeSettings(method)).state
    one_block = [{k: v for k, v in state.items() if names[0] in k} for state in states]
    expected = merged(one_block, FULL, (0.4, 0.6), method=method).state
    assert all(torch.equal(made[key], expected[key]) for key in expected)
    ours = {k: v for k, v in made.items() if names[1] in k}
    alone = merge_loras(
        [LoraEntry("z", {}, 0.0), LoraEntry("y", {k: v for k, v in states[1].items() if names[1] in k}, 0.6)],
        FULL,
        settings=MergeSettings(method),
    ).state
    assert all(torch.equal(ours[key], alone[key]) for key in alone)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["loha", "small loha", "lokr", "diff"])
@pytest.mark.parametrize("method", METHODS.names())
def test_every_additive_kind_is_merged(method, kind, shape):
    """As if its whole difference had been in the file."""
    state = of_family(kind, shape, 20)
    whole = change_of(state, shape)
    plain = {"a.diff": whole} | {key: value for key, value in state.items() if key.endswith("diff_b")}
    rows = [lora("a", 1, shape=shape), state]
    made = merged(rows, method=method).state
    expected = merged([rows[0], plain], method=method).state
    assert torch.allclose(as_whole(made, shape), as_whole(expected, shape), atol=2e-5)
    if kind == "diff":
        assert torch.allclose(made["a.diff_b"], expected["a.diff_b"])


def change_of(state, shape):
    from graft_nodes.patches.lora_files.parse import Target, patches_of, read

    shapes = {("model", "a.weight"): shape, ("model", "a.bias"): shape[:1]}
    parsed = read(state, {"a": Target("model", "a.weight")}, shapes, "x")
    return sum(one.delta(shape) for weight, one, _ in patches_of(parsed, "model", shapes) if weight == "a.weight")


def as_whole(state, shape):
    return change({key: value for key, value in state.items() if not key.endswith("diff_b")}, shape).float()


@pytest.mark.parametrize("kind", ["dora", "oft", "lokr", "ia3"])
def test_what_needs_the_weight_is_measured_on_the_model_by_itself(kind):
    shape, generator = (24, 16), torch.Generator().manual_seed(1)
    base = torch.randn(shape, generator=generator)
    rows = [
        [
            Patch(layer("lora", shape, generator), 0.5, file=0),
            Patch(layer("lora", (12, 16), generator), 0.5, (0, 8, 12)),
        ],
        [Patch(layer(kind, shape, generator), 0.7, file=1)],
    ]
    patches = [*rows[0], *rows[1]]
    made = merge_changes(
        {"diffusion_model.a.weight": WeightChange(patches, shape, lambda: base)},
        FULL,
        settings=MergeSettings("ties", 0.4),
    )
    alone = [apply_in_order(base, own) - base for own in rows]
    expected = peft.ties(alone, torch.ones(2), 0.4)
    assert torch.allclose(made.state["diffusion_model.a.diff"], expected, atol=1e-6)
    assert [found.file for found in file_changes(patches, shape, lambda: base)] == [0, 1]


PEAK = """
import json, resource, sys, torch
from graft_nodes.patches.lora_files import merge, open_file
from graft_nodes.patches.lora_files.entry import LoraEntry
from graft_nodes.patches.lora_files.merge_methods import MergeSettings
torch.set_num_threads(1)
def once(count):
    files = [open_file.load(path)[0] for path in sys.argv[1:]]
    entries = []
    for number, state in enumerate(files):
        kept = {key: value for key, value in state.items() if int(key.split(".")[0][1:]) < count}
        entries.append(LoraEntry(str(number), kept))
    merge.merge_loras(entries, 4, settings=MergeSettings("ties"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps([once(2), once(40)]))
"""


def test_layers_are_merged_one_after_the_other(tmp_path):
    """The whole differences of 40 layers are 20 times those of two, and the peak is nearly the same."""
    from safetensors.torch import save_file

    paths = []
    for file in range(2):
        state = {}
        for number in range(40):
            state |= lora(f"l{number}", 100 * file + number, rank=2, shape=(768, 768))
        paths.append(str(tmp_path / f"{file}.safetensors"))
        save_file(state, paths[-1])
    done = subprocess.run([sys.executable, "-c", PEAK, *paths], capture_output=True, text=True, check=True)
    few, many = json.loads(done.stdout)
    assert many - few < 20 * 768 * 768 * 4  # all differences of one file are 40 of these


STREAMED = """
import sys, torch
from graft_nodes.patches.lora_files import merge, open_file
from graft_nodes.patches.lora_files.entry import LoraEntry
from graft_nodes.patches.lora_files.merge_methods import MergeSettings
torch.set_num_threads(1)
def own():  # bytes that are not a file's
    return int(open("/proc/self/status").read().split("RssAnon:")[1].split()[0]) * 1024
settings, used = MergeSettings(sys.argv[1]), []
merge.merge_loras([LoraEntry("x", {"a.diff": torch.ones(512, 512)})], 1, settings=settings)
before = own()
entries = [LoraEntry(path, open_file.load(path)[0]) for path in sys.argv[2:]]
merge.merge_loras(entries, 1, lambda: used.append(own() - before), settings)
print(max(used))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="measures memory as Linux does")
@pytest.mark.parametrize("method", ["sum", "ties"])
def test_files_stay_on_the_disk(tmp_path, method):
    """Two files of 42 MB are merged layer by layer in less than 16 MB."""
    from safetensors.torch import save_file

    paths = []
    for file in range(2):
        state = {}
        for number in range(40):
            state[f"l{number}.diff"] = random(512, 512, seed=100 * file + number)
        paths.append(str(tmp_path / f"{file}.safetensors"))
        save_file(state, paths[-1])
    command = [sys.executable, "-c", STREAMED, method, *paths]
    # glibc then gives large pieces back to the system as soon as they are free
    settings = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=settings)
    assert int(done.stdout) < 16 * 2**20


# --- refused ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"method": "ties", "density": 0.0}, "density is 0, expected above 0 and at most 1"),
        ({"method": "dare_linear", "density": 0.0}, "density is 0, expected above 0 and at most 1"),
        ({"method": "dare_linear", "density": 1.5}, "density is 1.5, expected from 0.0 to 1.0"),
        ({"method": "dare_ties", "density": float("nan")}, "density is nan"),
        (
            {"method": "della", "density": 0.9, "epsilon": 0.3},
            "epsilon is 0.3, expected from 0 to 0.2: with density 0.9",
        ),
        ({"method": "mean"}, "merge method is 'mean', expected one of sum, ties"),
        ({"resize": "half"}, "resize is 'half', expected one of none, energy"),
        ({"resize": "energy", "resize_to": 20.0}, "resize to is 20, expected above 0 and at most 1 with energy"),
        ({"resize": "sv_ratio", "resize_to": 0.9}, "resize to is 0.9, expected above 1 with sv_ratio"),
    ],
)
def test_impossible_settings_are_refused(settings, said):
    with pytest.raises(ValueError) as error:
        MergeSettings(**settings)
    assert said in str(error.value)


@pytest.mark.parametrize("method", METHODS.names())
def test_damaged_and_foreign_files_are_refused(method):
    broken = lora("a", 1)
    broken["a.lora_up.weight"][0, 0] = math.nan
    with pytest.raises(ValueError, match=r"x: a.*NaN or infinite"):
        merge_loras([LoraEntry("x", broken)], settings=MergeSettings(method))
    with pytest.raises(ValueError, match="these LoRAs are for different models"):
        merged([lora("a", 1), lora("a", 1, shape=(9, 10))], method=method)
    dora = lora("a", 1) | {"a.dora_scale": torch.ones(12, 1)}
    with pytest.raises(ValueError, match=r"DoRA \(a\) changes the weight that it finds: connect model"):
        merged([dora], method=method)
