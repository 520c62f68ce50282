"""Searched averages: the minimizer against closed forms, the answer on held-out images that the search has not seen,
and the guard.
"""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from graft_nodes.ema import post_hoc
from graft_nodes.ema.decay import EMASettings
from graft_nodes.training.averages import merge, search, sources
from graft_nodes.training.averages.held_out_loss import halves, held_out_loss
from graft_nodes.training.run.call import run
from graft_nodes.training.state import begin
from graft_nodes.training.store.store import Store
from graft_nodes.training.trainable.settings import AdapterSettings


def _axes(count):
    """Orthonormal changes of shares that add up to 0."""
    without_sum = torch.eye(count, dtype=torch.float64) - 1 / count
    return torch.linalg.eigh(without_sum).eigenvectors.T[1:]


def _quadratic(count, seed):
    """(|T shares - goal|^2, its lowest point among shares that add up to 1, T): the point solves a linear system."""
    draws = torch.Generator().manual_seed(seed)
    weights = torch.randn(20, count, generator=draws, dtype=torch.float64)
    goal = torch.randn(20, generator=draws, dtype=torch.float64)
    # Lagrange: 2 T^T T shares + multiplier = 2 T^T goal, and the shares add up to 1
    system = torch.ones(count + 1, count + 1, dtype=torch.float64)
    system[:count, :count], system[count, count] = 2 * weights.T @ weights, 0
    right = torch.cat((2 * weights.T @ goal, torch.ones(1, dtype=torch.float64)))
    expected = torch.linalg.solve(system, right)[:count]
    return lambda shares: float((weights @ shares - goal).square().sum()), expected, weights


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("count", [2, 4, 8])
def test_a_quadratics_lowest_point_is_found(count, seed):
    loss, expected, _ = _quadratic(count, seed)
    assert float(expected.min()) < 0 or count < 8  # shares below 0 are found too
    start = torch.zeros(count, dtype=torch.float64)
    start[-1] = 1.0
    found = search.minimize(loss, start, _axes(count) * 0.3, 60 * count, seed)
    assert float(found.point.sum()) == pytest.approx(1, abs=1e-12) and found.tries <= 60 * count
    torch.testing.assert_close(found.point, expected, rtol=0, atol=5e-3)
    assert found.value - loss(expected) < 1e-4 * (loss(start) - loss(expected))


@pytest.mark.parametrize("count", [2, 4, 8, 12])
def test_one_round_along_the_axes_of_the_files_finds_the_nearest_average(count):
    """Where the loss is the distance from a goal, the files' own axes do not disturb each other."""
    loss, expected, weights = _quadratic(count, 5)
    files = [{"a": column.clone()} for column in weights.T]
    start = torch.full((count,), 1 / count, dtype=torch.float64)
    found = search.minimize(loss, start, search.directions(files, start, 12), 1 + 3 * (count - 1), 0)
    torch.testing.assert_close(found.point, expected, rtol=0, atol=1e-6)


def test_tries_are_counted_and_never_exceeded():
    calls = []

    def bowl(point):
        calls.append(point)
        return float((point - 3).square().sum())

    for tries in (1, 2, 3, 4, 7, 50):
        calls.clear()
        found = search.minimize(bowl, torch.ones(3, dtype=torch.float64), _axes(3), tries, 0)
        assert found.tries == len(calls) <= tries and found.value == min(bowl(point) for point in list(calls))
    flat = search.minimize(lambda point: 1.0, torch.ones(3, dtype=torch.float64), _axes(3), 500, 0)
    assert flat.tries == 1 + 3 * 2 * 2 and torch.equal(flat.point, torch.ones(3, dtype=torch.float64))


@pytest.mark.parametrize(
    ("loss", "places"),
    [
        (lambda place: 1.0, [1, -1, 1 / 4, -1 / 4, 1 / 16, -1 / 16]),  # nothing to find: shorter each time
        (lambda place: -place, [1, 2, 4, 6, 10, 14]),  # downhill: twice as long each time
        (
            lambda place: (place - 100) ** 2,
            [1, 2, 4, 6, 8, 12, 16, 20, 28],
        ),  # the parabola's lowest, up to 4 steps away
        (lambda place: (place + 100) ** 2, [1, -1, -4, -2, -6, -12, -8, -16, -28]),
        (lambda place: (place - 0.5) ** 2, [1, -1, 0.5, 1, 0, 0.5]),  # found: from there again, half as far
    ],
    ids=["flat", "downhill", "far ahead", "far behind", "near"],
)
def test_how_far_each_try_goes(loss, places):
    """Along one step, from a start that is far from 0; places in steps from there."""
    start = torch.tensor([50.0, -49.0], dtype=torch.float64)
    step = torch.tensor([[0.5, -0.5]], dtype=torch.float64)
    tried = []

    def value(point):
        tried.append(float((point - start)[0]) / 0.5)
        assert float(point.sum()) == pytest.approx(1)
        return loss(tried[-1])

    search.minimize(value, start, step, 1 + len(places), 0)
    assert tried == pytest.approx([0, *places])


def test_what_a_round_has_changed_is_a_step_of_the_next_one():
    """Downhill along the first of two steps, by 6 in the first round: 2 along the step, 4 along what that changed. The
    next round goes on with twice that change.
    """
    steps = torch.tensor([[1.0, -1.0, 0.0], [0.5, 0.5, -1.0]], dtype=torch.float64)
    places = []

    def value(point):
        places.append(float(point @ steps[0]) / 2)
        return -places[-1]

    search.minimize(value, torch.zeros(3, dtype=torch.float64), steps, 11, 0)
    assert sorted(set(places)) == pytest.approx([0, 1, 2, 4, 6, 10, 14])


def test_infinite_losses_and_edges_are_walked_around():
    def edge(point):
        if float(point[0]) > 0.5:
            return float("inf")
        return -float(point[0])

    found = search.minimize(edge, torch.zeros(2, dtype=torch.float64), _axes(2), 100, 0)
    assert 0.3 < float(found.point[0]) <= 0.5


def test_directions_are_the_axes_of_the_differences():
    """Three files that differ along two axes, one ten times as wide: the wide one first, with the shorter change of
    the shares.
    """
    base = torch.randn(40, generator=torch.Generator().manual_seed(0))
    far, near = torch.zeros(40), torch.zeros(40)
    far[3], near[7] = 10.0, 1.0
    files = [{"a": base + far, "a.alpha": torch.ones(())}, {"a": base - far}, {"a": base + near}, {"a": base - near}]
    start = torch.full((4,), 0.25, dtype=torch.float64)
    found = search.directions(files, start, 12)
    assert found.shape == (2, 4) and torch.allclose(found.sum(1), torch.zeros(2, dtype=torch.float64), atol=1e-12)
    unit = found / found.norm(dim=1, keepdim=True)
    expected = torch.tensor([[1, -1, 0, 0], [0, 0, 1, -1]], dtype=torch.float64) / 2**0.5
    torch.testing.assert_close(unit.abs(), expected.abs(), rtol=0, atol=1e-6)
    assert float(found[0].norm()) < float(found[1].norm()) <= 1
    assert len(search.directions(files, start, 1)) == 1
    assert len(search.directions([files[0]] * 3, torch.full((3,), 1 / 3, dtype=torch.float64), 12)) == 0


def trained(lab, tmp_path, held_out=(2, 5, 7, 8, 9), seed=3):
    denoiser, dataset = lab.Flow(), lab.pictures(held_out=list(held_out))
    plain = lab.state(denoiser, dataset, AdapterSettings(targets="all", rank=2), seed=seed)
    start = begin(denoiser.module, replace(plain.start, ema=EMASettings("ramp", snapshots=2)), plain.settings)
    state = run(start, 12, lambda: nullcontext(denoiser), dataset, Store(tmp_path, "run")).state
    return state, denoiser, dataset, sources.sources_of_state(state, Store(tmp_path, "run").folder)


def _search(trained_run, tries=40, seed=0):
    state, denoiser, dataset, found = trained_run

    def score(lora, numbers):
        return held_out_loss(state, denoiser, dataset, lora, numbers)

    return search.search(found, merge.widths_to_try(found, ""), score, halves(dataset), tries, seed), score


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_never_worse_than_the_best_width_on_the_images_that_were_kept(lab, tmp_path, seed):
    trained_run = trained(lab, tmp_path, seed=seed + 3)
    *_, dataset, found = trained_run
    searched, score = _search(trained_run, seed=seed)
    average = merge.merge_with_shares(found, searched.shares, searched.lines, width=searched.width)
    kept = halves(dataset)[1]
    widths = [merge.merge_files(found, "width", width, "").lora for width in merge.widths_to_try(found, "")]
    assert score(average.lora, kept) <= min(score(lora, kept) for lora in widths)
    text = "\n".join(average.lines)
    assert f"on 3 held-out images, seed {seed}; 2 other ones are kept for the answer" in text
    assert text.count("\nwidth 0.") >= 10 and "searched: " in text
    if searched.width is None:
        seen = halves(dataset)[0]
        assert score(average.lora, seen) <= min(score(lora, seen) for lora in widths) * (1 + 1e-6)
        assert sum(searched.shares) == pytest.approx(1)
        assert f"{score(average.lora, kept):.6g}" in text


def test_the_same_search_gives_the_same_bytes(lab, tmp_path):
    trained_run = trained(lab, tmp_path)
    found = trained_run[-1]
    first, again = (_search(trained_run)[0] for _ in range(2))
    assert first == again
    averages = [merge.merge_with_shares(found, one.shares, one.lines).lora for one in (first, again)]
    assert all(torch.equal(averages[0][name], tensor) for name, tensor in averages[1].items())


class Overfitted:
    """A loss that falls along one difference of the snapshots on the images that are searched, and rises along it on
    the others.
    """

    def __init__(self, found, kept):
        first, last = (found.files[number].load() for number in (0, -1))
        self.way = {key: last[key] - first[key] for key in last if not key.endswith(".alpha")}
        self.middle = {key: (last[key] + first[key]) / 2 for key in self.way}
        self.size = sum(float(way.square().sum()) for way in self.way.values())
        self.kept = kept

    def __call__(self, lora, numbers):
        place = sum(float(((lora[key] - self.middle[key]) * way).sum()) for key, way in self.way.items()) / self.size
        if numbers == self.kept:
            return 10.0 + place
        return 10.0 + (place - 5.0) ** 2


def test_a_result_that_fits_only_the_images_it_was_searched_on_is_not_taken(lab, tmp_path):
    *_, dataset, found = trained(lab, tmp_path)
    images = halves(dataset)
    score = Overfitted(found, images[1])
    widths = merge.widths_to_try(found, "")
    guarded = search.search(found, widths, score, images, 60, 0)
    losses = {width: score(merge.merge_files(found, "width", width, "").lora, images[1]) for width in widths}
    assert guarded.width == min(losses, key=lambda width: losses[width])
    assert guarded.shares == post_hoc.reconstruct(found.profiles, guarded.width).weights
    assert "the searched average is worse on the kept images" in guarded.lines[-2]
    alike = search.search(found, widths, lambda lora, _: score(lora, images[0]), images, 60, 0)
    assert alike.width is None and "is taken" in alike.lines[-2]  # the same loss on both halves: nothing is overfitted


def test_snapshots_as_they_are_stored_are_the_same_numbers(lab, tmp_path):
    *_, found = trained(lab, tmp_path)
    for file in found.files:
        whole, stored = file.load(), file.load_as_stored()
        assert whole.keys() == stored.keys()
        for name, tensor in stored.items():
            assert torch.equal(tensor.float(), whole[name]) and (tensor.numel() < 2 or tensor.dtype == torch.float16)


def test_half_of_the_held_out_images_are_kept(lab):
    assert [list(half) for half in halves(lab.pictures(held_out=[1, 3, 5, 7, 9]))] == [[0, 2, 4], [1, 3]]
    with pytest.raises(ValueError, match=r"at least 2 held-out images.*there are 1"):
        halves(lab.pictures(held_out=[1]))


def test_both_halves_are_all_images(lab, tmp_path):
    state, denoiser, dataset, _ = trained(lab, tmp_path, held_out=(6, 7, 8, 9))
    seen, kept = (held_out_loss(state, denoiser, dataset, None, half) for half in halves(dataset))
    assert (seen + kept) / 2 == pytest.approx(held_out_loss(state, denoiser, dataset), rel=1e-6)


def test_one_snapshot_is_not_enough(lab, tmp_path):
    *_, dataset, found = trained(lab, tmp_path)
    one = replace(found, files=found.files[-1:])
    with pytest.raises(post_hoc.TooFewSnapshots, match="at least 2 snapshots"):
        search.search(one, [found.files[-1].snapshot.width], lambda *_: 1.0, halves(dataset), 10, 0)


def test_two_snapshots_are_enough(lab, tmp_path):
    *_, dataset, found = trained(lab, tmp_path)
    two = replace(found, files=found.files[-2:])
    searched = search.search(two, [found.files[-1].snapshot.width], lambda *_: 1.0, halves(dataset), 10, 0)
    assert len(searched.shares) == 2 and sum(searched.shares) == pytest.approx(1)


@pytest.mark.parametrize("size", [30, 600_000])  # of the larger one some numbers are read
@pytest.mark.parametrize("share", [0.0, 1e-6])
def test_a_start_that_is_one_of_two_files_has_a_step_of_half_the_way(share, size):
    """As with a width that was tracked, whose average is a snapshot itself."""
    draws = torch.Generator().manual_seed(1)
    files = [{"a": torch.randn(size, generator=draws)} for _ in range(2)]
    (step,) = search.directions(files, torch.tensor([share, 1 - share], dtype=torch.float64), 12)
    torch.testing.assert_close(step.abs(), torch.full((2,), 0.5, dtype=torch.float64), rtol=1e-4, atol=0)
    assert float(step.sum()) == pytest.approx(0, abs=1e-12)


def test_directions_are_as_many_as_the_tries_are_good_for(lab, tmp_path):
    """Three tries along each, and one more for each along what a round has changed; at least one direction."""
    *_, dataset, found = trained(lab, tmp_path)
    for tries, count in ((3, 1), (12, 3), (16, 4)):
        width = found.files[-1].snapshot.width
        searched = search.search(found, [width], lambda *_: 1.0, halves(dataset), tries, 0)
        assert f" in {count} directions on 3 held-out images" in searched.lines[0]
