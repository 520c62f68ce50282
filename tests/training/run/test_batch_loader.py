"""Batches are a function of (seed, step): the same with any number of workers, from any step on; captions are known
ahead.
"""

import hashlib
from collections import Counter
from itertools import pairwise

import pytest
import torch
from graft_nodes.training.data.buckets import frame
from graft_nodes.training.data.conditionings import Conditionings
from graft_nodes.training.data.dataset import Conditioning, Dataset, DatasetImage, ImageCrop
from graft_nodes.training.data.tags import Caption, CaptionRules
from graft_nodes.training.run.batch_loader import BatchLoader, BatchSchedule

WORDS = CaptionRules(shuffle=1.0, dropout=0.2)


def _encode(texts):
    return {text: Conditioning(torch.tensor([[[float(len(text))]]])) for text in texts}


def _dataset(count=7, regularization=None, **settings):
    """Pictures of two sizes with tags that move, two cuts each, masks on every second, batch ids on some."""
    pictures = []
    for i in range(count):
        shape = (2, 4, 6) if i % 3 else (2, 6, 4)
        framing = frame((100, 80), (48, 32), (0.5, 0.5))
        mask = torch.linspace(0, 1, shape[1] * shape[2]).view(1, *shape[1:]) if i % 2 else None
        more = (
            ImageCrop(
                torch.full(shape, i + 0.5), torch.full(shape, -i - 0.5), mask, frame((100, 80), (48, 32), (0.0, 0.0))
            ),
        )
        caption = Caption(tags=("a", "b", "c", f"picture {i}"), rules=WORDS)
        own = {"repeats": 1.5 if i == 1 else 1, "batch_id": "own" if i in (3, 6) else "", "loss_weight": 1.0 + i}
        latent = torch.full(shape, float(i))
        pictures.append(
            DatasetImage(
                f"{i}.png",
                caption.plain,
                latent,
                -latent,
                mask=mask,
                framing=framing,
                other_crops=more,
                caption_template=caption,
                **own,
            )
        )
    texts = [picture.caption for picture in pictures]
    if regularization is not None:
        settings.update(regularization=regularization, regularization_share=0.5)
    return Dataset(
        tuple(pictures), Conditionings(_encode, [*texts, ""]), "digest", flip=0.5, caption_dropout=0.1, **settings
    )


def _rows(batches):
    """Everything in a step's batches as plain values."""
    out = []
    for batch in batches:
        mask = None if batch.mask is None else batch.mask.tolist()
        told = [sorted(one.extras.items()) for one in batch.conditionings]
        tensors = [one.tolist() for one in (batch.latents, batch.is_regularization, batch.weights)]
        out.append((tensors, [one.context.item() for one in batch.conditionings], batch.captions, mask, told))
    return out


@pytest.mark.parametrize("workers", [1, 2, 5])
@pytest.mark.parametrize("parts", [1, 3])
def test_any_number_of_workers_gives_the_same_batches(workers, parts):
    schedule = BatchSchedule(_dataset(regularization=_dataset(3)), 4, parts, 0.1, 5)
    plain, threaded = BatchLoader(schedule), BatchLoader(schedule, workers, until=12)
    for step in range(12):
        for part in range(parts):
            assert _rows(plain.take(step, part)) == _rows(threaded.take(step, part))
    threaded.close()


def test_steps_can_be_taken_from_anywhere_and_again():
    schedule = BatchSchedule(_dataset(), 2, 2, 0.0, 1)
    expected = [_rows(BatchLoader(schedule).take(step, part)) for step in range(6) for part in range(2)]
    loader = BatchLoader(schedule, 2, until=6)
    for place in (3, 3, 4, 0, 11, 10):
        assert _rows(loader.take(*divmod(place, 2))) == expected[place]
    loader.close()


def test_every_process_draws_the_same():
    """The pictures, cuts, sides and words of five steps, as another process drew them when this was written."""
    schedule = BatchSchedule(_dataset(), 3, 1, 0.1, 9)
    rows = [
        (one.image.name, one.crop_number, one.flipped, one.caption)
        for step in range(5)
        for one in schedule.pictures_of(step, 0)
    ]
    assert hashlib.sha256(repr(rows).encode()).hexdigest()[:16] == "8b3db6f5efa5616f"


def test_the_captions_of_steps_are_known_before_them():
    calls = []

    def encode(texts):
        calls.append(list(texts))
        return _encode(texts)

    dataset = _dataset(5)
    dataset = Dataset(dataset.images, Conditionings(encode, [*(p.caption for p in dataset.images), ""]), "digest")
    schedule = BatchSchedule(dataset, 2, 2, 0.2, 3)
    needed = schedule.captions(4, 6)[dataset]
    assert len(needed) > 10 and schedule.prepare(4, 6) == len(needed - set(dataset.conditionings))
    before = len(calls)
    taken = [batch for step in range(4, 10) for part in range(2) for batch in BatchLoader(schedule).take(step, part)]
    used = {caption for batch in taken for caption in batch.captions}
    assert used == needed and len(calls) == before


def test_captions_that_never_vary_need_nothing():
    pictures = (DatasetImage("a", "a", torch.zeros(1, 2, 2)),)
    assert BatchSchedule(Dataset(pictures, _encode(["a", ""]), "digest"), 1, 1, 0.5, 0).prepare(0, 100) == 0


def test_a_batch_has_one_size_and_one_batch_id():
    loader = BatchLoader(BatchSchedule(_dataset(), 3, 1, 0.0, 0))
    seen = Counter()
    for step in range(40):
        for batch in loader.take(step, 0):
            names = {abs(float(value)) // 1 for value in batch.latents[:, 0, 0, 0]}
            assert len(names & {3.0, 6.0}) in (0, len(names))
            seen.update(names)
    assert set(seen) == set(map(float, range(7)))


def test_part_of_a_repeat_is_spread_over_the_rounds():
    latent = torch.zeros(1, 2, 2)
    pictures = tuple(DatasetImage(str(i), "", latent, repeats=repeats) for i, repeats in enumerate((1, 2.5, 0.25, 1)))
    loader = BatchLoader(BatchSchedule(Dataset(pictures, _encode([""]), "digest"), 1, 1, 0.0, 0))
    seen = Counter(
        one.image.name for step in range(475) for one in loader.schedule.pictures_of(step, 0)
    )  # 100 rounds of 4.75
    assert seen["0"] == pytest.approx(100, abs=1) and seen["1"] == pytest.approx(250, abs=2)
    assert seen["2"] == pytest.approx(25, abs=1) and seen["3"] == pytest.approx(100, abs=1)


def test_flips_mirror_latent_mask_and_framing():
    schedule = BatchSchedule(_dataset(regularization=_dataset(3)), 4, 1, 0.0, 2)
    loader, mirrored = BatchLoader(schedule), 0
    for step in range(20):
        drawn = schedule.pictures_of(step, 0)
        for batch, group in zip(loader.take(step, 0), _grouped(drawn), strict=True):
            for row, one in enumerate(group):
                view = one.crop
                assert torch.equal(batch.latents[row], view.flipped_latent if one.flipped else view.latent)
                whole = torch.ones(1, *view.latent.shape[-2:]) if view.mask is None else view.mask
                if batch.mask is not None:
                    assert torch.equal(batch.mask[row], whole.flip(2) if one.flipped else whole)
                framing = view.framing.flipped if one.flipped else view.framing
                told = batch.conditionings[row].extras
                assert told["crop_w"] == framing.left and told["width"] == 100 and told["target_height"] == 32
                mirrored += one.flipped
    assert 20 < mirrored < 60


def _grouped(drawn):
    groups = {}
    for one in drawn:
        groups.setdefault(tuple(one.image.latent.shape), []).append(one)
    return groups.values()


def test_shares_of_a_picture_replace_those_of_the_dataset():
    latent, flipped = torch.zeros(1, 2, 2), torch.ones(1, 2, 2)
    pictures = (
        DatasetImage("never", "x", latent, flipped, flip=0.0, dropout=0.0),
        DatasetImage("always", "x", latent, flipped, flip=1.0, dropout=1.0),
        DatasetImage("half", "x", latent, flipped),
    )
    dataset = Dataset(pictures, _encode(["x", ""]), "digest", flip=0.5, caption_dropout=0.5)
    seen = Counter()
    for step in range(300):
        for one in BatchSchedule(dataset, 3, 1, 0.5, 0).pictures_of(step, 0):
            seen[one.image.name, "mirrored"] += one.flipped
            seen[one.image.name, "dropped"] += one.caption == ""
    assert (
        seen["never", "mirrored"] == seen["never", "dropped"] == 0
        and seen["always", "mirrored"] == seen["always", "dropped"] == 300
    )
    assert seen["half", "mirrored"] / 300 == pytest.approx(0.5, abs=0.08) and seen[
        "half", "dropped"
    ] / 300 == pytest.approx(0.75, abs=0.08)


def test_the_schedule_is_what_happens():
    schedule = BatchSchedule(_dataset(regularization=_dataset(3)), 4, 2, 0.3, 7)
    lines = list(schedule.lines(2, 3))
    assert [line for line in lines if not line.startswith(" ")] == [
        f"step {step} part {part}" for step in (3, 4, 5) for part in (1, 2)
    ]
    pictures = [
        one
        for step in (2, 3, 4)
        for part in (0, 1)
        for group in _grouped(schedule.pictures_of(step, part))
        for one in group
    ]
    said = [line.strip() for line in lines if line.startswith(" ")]
    assert len(said) == len(pictures)
    for line, one in zip(said, pictures, strict=True):
        marks = "48x32" + ", mirrored" * one.flipped + f", cut {one.crop_number + 1}"
        marks += ", batch_id own" * (one.image.batch_id == "own") + ", regularization" * one.is_regularization
        assert line == f"{one.image.name} ({marks}): {one.caption or '(no caption)'}"


def test_regularization_that_cannot_be():
    other = _dataset(2)
    with pytest.raises(ValueError, match="a regularization dataset of its own"):
        _dataset(2, regularization=_dataset(2, regularization=other))
    four = Dataset((DatasetImage("a", "", torch.zeros(4, 2, 2)),), _encode([""]), "digest")
    with pytest.raises(ValueError, match="2 channels and those of the regularization dataset 4"):
        _dataset(2, regularization=four)


def test_orders_do_not_keep_a_dataset_alive():
    import gc
    import weakref

    dataset = _dataset(3)
    BatchLoader(BatchSchedule(dataset, 2, 1, 0.0, 0)).take(5, 0)
    gone = weakref.ref(dataset)
    del dataset
    gc.collect()
    assert gone() is None


def test_wordings_change_from_step_to_step():
    schedule = BatchSchedule(_dataset(1), 1, 1, 0.0, 0)
    captions = [schedule.pictures_of(step, 0)[0].caption for step in range(20)]
    assert sum(left == right for left, right in pairwise(captions)) < 5
