"""Which pictures make up a batch: every picture once a round, one size a group, the share of regularization, dropped
captions and flips.
"""

import gc
import math
import tracemalloc
import weakref
from collections import Counter
from fractions import Fraction

import pytest
import torch
from graft_nodes.training.data.batches import image_conditioning, make_batches
from graft_nodes.training.data.dataset import Conditioning, Dataset, DatasetImage, ImageCrop
from graft_nodes.training.data.epoch_order import batches_per_epoch, ends_epoch, select_images
from graft_nodes.training.random_draws import generator

CONDITIONINGS = {text: Conditioning(torch.full((1, 1, 1), value)) for text, value in (("a", 1.0), ("", 0.0))}


def _dataset(shapes, repeats=1, **settings):
    latents = [torch.full((1, *shape), float(i)) for i, shape in enumerate(shapes)]
    pictures = tuple(DatasetImage(str(i), "a", latent, -1.0 - latent, repeats) for i, latent in enumerate(latents))
    return Dataset(pictures, CONDITIONINGS, "digest", **settings)


@pytest.mark.parametrize("size", [1, 2, 4, 7])
def test_every_round_shows_every_picture_as_often_as_it_repeats(size):
    dataset = _dataset([(2, 2)] * 5 + [(2, 3)] * 4, repeats=3)
    rounds = batches_per_epoch(dataset, size)
    for epoch in range(3):
        seen = Counter()
        for number in range(epoch * rounds, (epoch + 1) * rounds):
            own, regular = select_images(dataset, size, 0, number)
            assert not regular and 0 < len(own) <= size and len({p.latent.shape for p in own}) == 1
            seen.update(p.name for p in own)
        assert seen == {str(i): 3 for i in range(9)}


@pytest.mark.parametrize("repeats", [1, 3, 0.75, 2.5])
def test_the_order_is_drawn_as_it_always_was(repeats):
    """The order of stored runs, written out with lists."""
    shapes = [(2, 3), (2, 2), (2, 2), (2, 3), (2, 2), (3, 2), (2, 2)]
    dataset, number = _dataset(shapes, repeats), 0
    for epoch in range(4):
        rng, indices = generator(5, epoch, "order"), []
        for i in range(len(shapes)):
            phase = 0.0 if float(repeats).is_integer() else i * 0.6180339887498949 % 1.0
            indices += [i] * (math.floor((epoch + 1) * repeats + phase) - math.floor(epoch * repeats + phase))
        groups = {}
        for position in torch.randperm(len(indices), generator=rng).tolist():
            groups.setdefault(shapes[indices[position]], []).append(indices[position])
        batches = [group[i : i + 2] for _, group in sorted(groups.items()) for i in range(0, len(group), 2)]
        for position in torch.randperm(len(batches), generator=rng).tolist():
            own, _ = select_images(dataset, 2, 5, number)
            assert [image.name for image in own] == [str(i) for i in batches[position]]
            number += 1


def test_an_epoch_of_millions_is_drawn_in_tensors():
    dataset = _dataset([(2, 2), (2, 3)], repeats=2_000_000)
    tracemalloc.start()
    assert batches_per_epoch(dataset, 4) == 1_000_000
    own, _ = select_images(dataset, 4, 0, 999_999)
    assert len(own) == 4 and tracemalloc.get_traced_memory()[1] < 10e6  # of Python's objects; a list takes 32 MB
    tracemalloc.stop()


def test_the_order_depends_on_the_seed_and_the_round():
    dataset = _dataset([(2, 2)] * 12)

    def order(seed, epoch):
        return [
            p.name for number in range(epoch * 3, epoch * 3 + 3) for p in select_images(dataset, 4, seed, number)[0]
        ]

    assert order(0, 0) == order(0, 0) != order(1, 0) and order(0, 0) != order(0, 1)


@pytest.mark.parametrize(
    ("size", "share", "expected"),
    [(8, 0.25, 2 / 8), (4, 0.25, 1 / 4), (1, 0.25, 1 / 4), (2, 0.2, 1 / 5), (4, 0.9, 3 / 4)],
)
def test_the_share_of_regularization(size, share, expected):
    other = _dataset([(2, 2)] * 6)
    dataset = _dataset([(2, 2)] * 24, regularization=other, regularization_share=share)
    own, regular = 0, Counter()
    for number in range(240):
        first, second = select_images(dataset, size, 0, number)
        assert 0 < len(first) + len(second) <= size
        own += len(first)
        regular.update(p.name for p in second)
    total = sum(regular.values())
    assert total / (own + total) == pytest.approx(expected, rel=0.05)
    assert max(regular.values()) - min(regular.values()) <= 1  # in rounds, too


def test_a_round_with_regularization_still_shows_every_picture_once():
    dataset = _dataset([(2, 2)] * 10, regularization=_dataset([(2, 2)] * 3), regularization_share=0.3)
    for size in (1, 4):
        rounds = batches_per_epoch(dataset, size)
        seen = Counter(p.name for number in range(rounds) for p in select_images(dataset, size, 0, number)[0])
        assert max(seen.values()) <= (2 if size == 1 else 1) and len(seen) == 10


def test_groups_of_one_size_with_their_sources():
    dataset = _dataset([(2, 2)] * 6, regularization=_dataset([(3, 2)] * 2), regularization_share=0.5)
    groups = make_batches(dataset, 4, 0.0, 0, 0, 0, "part 0")
    assert sorted((tuple(g.latents.shape), g.is_regularization.tolist()) for g in groups) == [
        ((2, 1, 2, 2), [False] * 2),
        ((2, 1, 3, 2), [True] * 2),
    ]


@pytest.mark.parametrize(
    ("dropout", "own", "expected"),
    [(0.0, 0.0, 0.0), (0.3, 0.0, 0.3), (0.0, 0.4, 0.4), (0.3, 0.4, 0.58), (1.0, 0.0, 1.0)],
)
def test_captions_are_dropped_for_the_empty_one(dropout, own, expected):
    dataset = _dataset([(2, 2)] * 10, caption_dropout=own)
    groups = [group for step in range(200) for group in make_batches(dataset, 10, dropout, 0, step, step, "part 0")]
    found = [conditioning is CONDITIONINGS[""] for group in groups for conditioning in group.conditionings]
    assert sum(found) / len(found) == pytest.approx(expected, abs=0.03)


def test_flips_take_the_mirrored_latent():
    dataset = _dataset([(2, 2)] * 10, flip=0.3)
    found = torch.cat(
        [g.latents[:, 0, 0, 0] for step in range(200) for g in make_batches(dataset, 10, 0.0, 0, step, step, "part 0")]
    )
    assert float((found < 0).float().mean()) == pytest.approx(0.3, abs=0.03)


def test_draws_depend_on_the_step():
    dataset = _dataset([(2, 2)] * 10, flip=0.5)

    def flips(step):
        return make_batches(dataset, 10, 0.0, 0, step, 0, "part 0")[0].latents[:, 0, 0, 0].sign().tolist()

    assert flips(0) == flips(0) != flips(1)


def test_what_cannot_be_a_dataset():
    with pytest.raises(ValueError, match="at least one image"):
        Dataset((), CONDITIONINGS, "")
    with pytest.raises(ValueError, match=r"without conditioning.*\['b'\]"):
        Dataset((DatasetImage("0", "b", torch.zeros(1, 2, 2)),), CONDITIONINGS, "")
    with pytest.raises(ValueError, match=r"regularization share is 1\.0"):
        _dataset([(2, 2)], regularization=_dataset([(2, 2)]), regularization_share=1.0)


def _with_extras(count, **fields):
    """A dataset whose pictures have entries of their own in the conditioning."""
    pictures = []
    for number in range(count):
        latent = torch.full((1, 2, 2), float(number))
        own = {"reference_latents": [torch.full((1, 1, 2, 2), float(number))]}
        flipped = {"reference_latents": [torch.full((1, 1, 2, 2), -1.0 - number)]}
        pictures.append(
            DatasetImage(str(number), "a", latent, -1.0 - latent, extras=own, flipped_extras=flipped, **fields)
        )
    return Dataset(tuple(pictures), CONDITIONINGS, "digest", flip=0.5)


def test_each_picture_brings_its_own_entries_of_the_conditioning():
    dataset, flipped = _with_extras(4), 0
    for step in range(20):
        for batch in make_batches(dataset, 4, 0.3, 0, step, step, "part 0"):
            for latent, caption, conditioning in zip(batch.latents, batch.captions, batch.conditionings, strict=True):
                assert conditioning.context is CONDITIONINGS[caption].context
                (reference,) = conditioning.extras["reference_latents"]
                assert torch.equal(reference[0], latent)
                flipped += int(latent.flatten()[0] < 0)
    assert 20 < flipped < 60 and CONDITIONINGS["a"].extras == {}


def test_entries_of_a_picture_replace_those_of_its_caption_and_a_crop_has_its_own():
    crops = (ImageCrop(torch.zeros(1, 2, 2), extras={"width": 3}), ImageCrop(torch.zeros(1, 2, 2)))
    picture = DatasetImage("0", "a", torch.zeros(1, 2, 2), other_crops=crops, extras={"width": 2})
    texts = {"": CONDITIONINGS[""], "a": Conditioning(torch.zeros(1, 1, 1), {"width": 1, "pooled_output": 5})}
    dataset = Dataset((picture,), texts, "digest")
    found = [image_conditioning(dataset, "a", picture.crop(number), flipped=True).extras for number in range(3)]
    assert [extras["width"] for extras in found] == [2, 3, 1]
    assert all(extras["pooled_output"] == 5 for extras in found)


def test_the_conditioning_of_a_picture_is_one_object_as_long_as_somebody_holds_it():
    dataset = _with_extras(300)
    held = [image_conditioning(dataset, "a", image.crop(0)) for image in dataset.images[:3]]
    again = [image_conditioning(dataset, "a", image.crop(0)) for image in dataset.images[:3]]
    assert all(first is second for first, second in zip(held, again, strict=True))
    made = weakref.WeakSet()
    for image in dataset.images:
        for caption in ("a", ""):
            made.add(image_conditioning(dataset, caption, image.crop(0)))
    gc.collect()
    assert len(made) == 3  # those that are held; the others are gone


@pytest.mark.parametrize("epoch", [Fraction(10), Fraction(7, 2), Fraction(1, 3)])
@pytest.mark.parametrize(("every", "first"), [(1, 0), (2, 0), (3, 7), (1, 3)])
def test_an_epoch_ends_with_the_step_that_it_ends_within(epoch, every, first):
    """By the epochs that end in each step, counted one by one."""
    for step in range(1, 60):
        ends = [number for number in range(1, 200) if math.ceil(number * epoch) == step]
        kept = any(number % every == 0 and number >= first for number in ends)
        assert ends_epoch(step, epoch, every, first) == kept, step
