"""Which images make up each batch: the order of an epoch, drawn from the seed, and the share of regularization images.

Every choice is a function of (seed, batch number), so a batch is the same whoever prepares it.
"""

from __future__ import annotations

import math
import weakref
from bisect import bisect_right
from collections import Counter
from fractions import Fraction
from typing import NamedTuple

import torch
from torch import Tensor

from ..random_draws import generator
from .dataset import Dataset, DatasetImage

_REGULARIZATION_ORDER = "regularisation order"  # goes into the seed: another spelling would be another order
_GOLDEN_RATIO = 0.6180339887498949
_MOST_EPOCHS = 1_000_000  # to look for the first one with a batch, where repeats are tiny fractions


class _Epoch(NamedTuple):
    """An epoch's image indices, those of one size and batch_id together, and where each batch begins and ends there."""

    indices: Tensor
    begins: Tensor
    ends: Tensor


class SmallBatch(NamedTuple):
    """A batch of an epoch that is not full: its number of images, the batch size, and one of its images."""

    size: int
    batch_size: int
    image: DatasetImage


class EpochOrder:
    """The endless sequence of batches of one dataset: epoch after epoch, each in an order of its own.

    `batch_size` counts the images of the dataset itself in a batch; images with a batch size of their own keep that,
    less the regularization images in it. It holds indices, never the dataset itself, so that it may live as long as the
    dataset and no longer. They are tensors, as repeats may make millions of them.
    """

    def __init__(self, dataset: Dataset, batch_size: int, seed: int, purpose: str) -> None:
        self.seed, self.purpose = seed, purpose
        keys = [_group_key(image) for image in dataset.images]
        numbers = {key: number for number, key in enumerate(sorted(set(keys)))}
        self._groups = [numbers[key] for key in keys]
        self._batch_sizes: list[int] = []  # by group
        for *_, own_size in numbers:
            if own_size:
                own_size -= regularization_count(dataset, own_size)
            self._batch_sizes.append(own_size or batch_size)
        self._repeats = [image.repeats for image in dataset.images]
        self._equal_epochs = all(float(repeats).is_integer() for repeats in self._repeats)
        self._first_batches = [0]  # number of the first batch of each epoch
        self._number = -1  # of the epoch that is drawn
        self._epoch = _Epoch(*[torch.empty(0, dtype=torch.int64)] * 3)

    def times(self, epoch: int) -> list[int]:
        """How often an epoch shows each image. A fraction is spread over the epochs as evenly as possible."""
        times: list[int] = []
        for index, repeats in enumerate(self._repeats):
            phase = 0.0
            if not float(repeats).is_integer():
                phase = index * _GOLDEN_RATIO % 1.0
            times.append(math.floor((epoch + 1) * repeats + phase) - math.floor(epoch * repeats + phase))
        return times

    def small_batches(self, dataset: Dataset, epoch: int) -> list[SmallBatch]:
        """The batches of an epoch that are not full."""
        found = []
        sizes: Counter[int] = Counter()
        for group, count in zip(self._groups, self.times(epoch), strict=True):
            sizes[group] += count
        for group, size in sorted(sizes.items()):
            if size % self._batch_sizes[group]:
                image = dataset.images[self._groups.index(group)]
                found.append(SmallBatch(size % self._batch_sizes[group], self._batch_sizes[group], image))
        return found

    def _group_sizes(self, times: list[int]) -> list[tuple[int, int]]:
        """(images, batch size) of each group that has any images, in the groups' order."""
        sizes: Counter[int] = Counter()
        for group, count in zip(self._groups, times, strict=True):
            sizes[group] += count
        return [(size, self._batch_sizes[group]) for group, size in sorted(sizes.items()) if size]

    def count(self, epoch: int) -> int:
        """How many batches an epoch has."""
        return sum(math.ceil(size / batch_size) for size, batch_size in self._group_sizes(self.times(epoch)))

    def batch(self, epoch: int, position: int) -> list[int]:
        """A batch of an epoch, in an order drawn from (seed, epoch). All its images have the same size and batch_id;
        the last batch of each size is smaller.
        """
        if self._number != epoch:
            self._number, self._epoch = epoch, self._draw(epoch)
        return self._epoch.indices[self._epoch.begins[position] : self._epoch.ends[position]].tolist()

    def _draw(self, epoch: int) -> _Epoch:
        rng = generator(self.seed, epoch, self.purpose)
        times = self.times(epoch)
        indices = torch.arange(len(times)).repeat_interleave(torch.tensor(times))
        indices = indices[torch.randperm(len(indices), generator=rng)]
        indices = indices[torch.tensor(self._groups)[indices].argsort(stable=True)]
        begins: list[Tensor] = []
        ends: list[Tensor] = []
        first = 0
        for size, batch_size in self._group_sizes(times):
            begins.append(torch.arange(first, first + size, batch_size))
            ends.append((begins[-1] + batch_size).clamp(max=first + size))
            first += size
        order = torch.randperm(sum(map(len, begins)), generator=rng)
        return _Epoch(indices, torch.cat(begins)[order], torch.cat(ends)[order])

    def take(self, number: int) -> list[int]:
        """Image indices of batch `number`, counted from 0 over all epochs."""
        if self._equal_epochs:
            if len(self._first_batches) == 1:
                self._first_batches.append(self.count(0))
            epoch, position = divmod(number, self._first_batches[1])
            return self.batch(epoch, position)
        while self._first_batches[-1] <= number:
            self._first_batches.append(self._first_batches[-1] + self.count(len(self._first_batches) - 1))
        epoch = bisect_right(self._first_batches, number) - 1
        return self.batch(epoch, number - self._first_batches[epoch])


def _group_key(image: DatasetImage) -> tuple[tuple[int, ...], str, int, int]:
    """What the images of a batch have in common: latent size, batch_id, and what their dataset has of its own."""
    return image.size, image.batch_id, image.resolution, image.batch_size


_ORDERS: weakref.WeakKeyDictionary[Dataset, dict[tuple[int, int, str], EpochOrder]] = weakref.WeakKeyDictionary()


def _epoch_order(dataset: Dataset, batch_size: int, seed: int, purpose: str) -> EpochOrder:
    orders = _ORDERS.setdefault(dataset, {})
    key = (batch_size, seed, purpose)
    if key not in orders:
        orders[key] = EpochOrder(dataset, batch_size, seed, purpose)
    return orders[key]


def batches_per_epoch(dataset: Dataset, batch_size: int) -> int:
    """Batches that show every image (and repeat) once; regularization images come on top and are not counted.

    Where repeats are fractions, epochs differ by an image or so, and this counts the first one that is not empty.
    """
    order = _epoch_order(dataset, batch_size - regularization_count(dataset, batch_size), 0, "order")
    count = next(count for count in map(order.count, range(_MOST_EPOCHS)) if count)
    if dataset.regularization is not None and _most_regularization(dataset, batch_size) == 0:
        return math.ceil(count / (1 - dataset.regularization_share))
    return count


def small_batches(dataset: Dataset, batch_size: int) -> list[SmallBatch]:
    """The batches of the first epoch that are not full, without their regularization images."""
    order = _epoch_order(dataset, batch_size - regularization_count(dataset, batch_size), 0, "order")
    return order.small_batches(dataset, 0)


def steps_per_epoch(dataset: Dataset, batch_size: int, accumulation: int) -> Fraction:
    """Steps that show every image (and repeat) once, which may end within a step."""
    return Fraction(batches_per_epoch(dataset, batch_size), accumulation)


def ends_epoch(step: int, epoch: Fraction, every: int, first: int = 0) -> bool:
    """Whether one in `every` epochs, from the `first` on, ends with a step. An epoch of so many steps may end within
    one, and then ends with it; several may.
    """
    before, now = math.floor((step - 1) / epoch), math.floor(step / epoch)
    newest = now - now % every
    return newest > before and newest >= first


def batch_sizes(dataset: Dataset, batch_size: int) -> list[int]:
    """The batch sizes of a run with this one, smallest first: images of a dataset with its own keep that."""
    return sorted({image.batch_size or batch_size for image in dataset.images})


def regularization_count(dataset: Dataset, batch_size: int) -> int:
    """How many images of a batch of this size are regularization images."""
    if dataset.regularization is None:
        return 0
    return min(batch_size - 1, int(batch_size * dataset.regularization_share + 0.5))


def _most_regularization(dataset: Dataset, batch_size: int) -> int:
    """How many regularization images a batch has at most; 0 where no batch has room for one."""
    return regularization_count(dataset, batch_sizes(dataset, batch_size)[-1])


def _take(dataset: Dataset, batch_size: int, seed: int, number: int, purpose: str) -> list[DatasetImage]:
    return [dataset.images[index] for index in _epoch_order(dataset, batch_size, seed, purpose).take(number)]


def select_images(
    dataset: Dataset, batch_size: int, seed: int, number: int
) -> tuple[list[DatasetImage], list[DatasetImage]]:
    """The images of micro-batch `number` (from 0): (of the dataset, of its regularization dataset).

    A share of each batch goes to regularization. If all batches are so small that the share is less than one image,
    whole batches do.
    """
    other = dataset.regularization
    if other is None:
        return _take(dataset, batch_size, seed, number, "order"), []
    most = _most_regularization(dataset, batch_size)
    if most == 0:
        regularization_batches = math.floor(number * dataset.regularization_share)
        if math.floor((number + 1) * dataset.regularization_share) > regularization_batches:
            return [], _take(other, batch_size, seed, regularization_batches, _REGULARIZATION_ORDER)
        return _take(dataset, batch_size, seed, number - regularization_batches, "order"), []
    images = _take(dataset, batch_size - regularization_count(dataset, batch_size), seed, number, "order")
    count = regularization_count(dataset, images[0].batch_size or batch_size)
    regularization_images: list[DatasetImage] = []
    for i in range(number * most, number * most + count):  # smaller batches pass over the rest of `most`
        regularization_images += _take(other, 1, seed, i, _REGULARIZATION_ORDER)
    return images, regularization_images
