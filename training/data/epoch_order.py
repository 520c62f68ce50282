"""Which images make up each batch: the order of an epoch, drawn from the seed, and the share of regularisation images.

Every choice is a function of (seed, batch number), so a batch is the same whoever prepares it.
"""

from __future__ import annotations

import math
import weakref
from bisect import bisect_right
from collections import Counter
from typing import Any

import torch

from ..random_draws import generator
from .dataset import Dataset, DatasetImage

_GOLDEN_RATIO = 0.6180339887498949
_MOST_EPOCHS = 1_000_000  # to look for the first one with a batch, where repeats are tiny fractions


class EpochOrder:
    """The endless sequence of batches of one dataset: epoch after epoch, each in an order of its own.

    It holds indices, never the dataset itself, so that it may live as long as the dataset and no longer.
    """

    def __init__(self, dataset: Dataset, batch_size: int, seed: int, purpose: str) -> None:
        self.batch_size, self.seed, self.purpose = batch_size, seed, purpose
        self._keys = [(tuple(image.latent.shape), image.batch_id) for image in dataset.images]
        self._repeats = [image.repeats for image in dataset.images]
        self._equal_epochs = all(float(repeats).is_integer() for repeats in self._repeats)
        self._first_batches = [0]  # number of the first batch of each epoch
        self._epoch = -1
        self._batches: list[list[int]] = []

    def indices(self, epoch: int) -> list[int]:
        """Indices of the images of an epoch, with repeats. A fraction of a repeat is spread over the epochs as evenly
        as possible.
        """
        repeated: list[int] = []
        for index, repeats in enumerate(self._repeats):
            phase = 0.0
            if not float(repeats).is_integer():
                phase = index * _GOLDEN_RATIO % 1.0
            times = math.floor((epoch + 1) * repeats + phase) - math.floor(epoch * repeats + phase)
            repeated += [index] * times
        return repeated

    def count(self, epoch: int) -> int:
        """How many batches an epoch has."""
        counts = Counter(self._keys[index] for index in self.indices(epoch))
        return sum(math.ceil(count / self.batch_size) for count in counts.values())

    def batches(self, epoch: int) -> list[list[int]]:
        """The batches of an epoch in an order drawn from (seed, epoch). All images of a batch have the same size and
        batch_id; the last batch of each size is smaller.
        """
        if self._epoch != epoch:
            self._epoch, self._batches = epoch, self._draw(epoch)
        return self._batches

    def _draw(self, epoch: int) -> list[list[int]]:
        rng = generator(self.seed, epoch, self.purpose)
        indices = self.indices(epoch)
        groups: dict[Any, list[int]] = {}
        for position in torch.randperm(len(indices), generator=rng).tolist():
            groups.setdefault(self._keys[indices[position]], []).append(indices[position])
        batches: list[list[int]] = []
        for _, group in sorted(groups.items()):
            for start in range(0, len(group), self.batch_size):
                batches.append(group[start : start + self.batch_size])
        return [batches[i] for i in torch.randperm(len(batches), generator=rng).tolist()]

    def take(self, number: int) -> list[int]:
        """Image indices of batch `number`, counted from 0 over all epochs."""
        if self._equal_epochs:
            if len(self._first_batches) == 1:
                self._first_batches.append(self.count(0))
            epoch, position = divmod(number, self._first_batches[1])
            return self.batches(epoch)[position]
        while self._first_batches[-1] <= number:
            self._first_batches.append(self._first_batches[-1] + self.count(len(self._first_batches) - 1))
        epoch = bisect_right(self._first_batches, number) - 1
        return self.batches(epoch)[number - self._first_batches[epoch]]


_ORDERS: weakref.WeakKeyDictionary[Dataset, dict[tuple[int, int, str], EpochOrder]] = weakref.WeakKeyDictionary()


def _epoch_order(dataset: Dataset, batch_size: int, seed: int, purpose: str) -> EpochOrder:
    orders = _ORDERS.setdefault(dataset, {})
    key = (batch_size, seed, purpose)
    if key not in orders:
        orders[key] = EpochOrder(dataset, batch_size, seed, purpose)
    return orders[key]


def batches_per_epoch(dataset: Dataset, batch_size: int) -> int:
    """Batches that show every image (and repeat) once; regularisation images come on top and are not counted.

    Where repeats are fractions, epochs differ by an image or so, and this counts the first one that is not empty.
    """
    regularisation_count = _regularisation_count(dataset, batch_size)
    order = _epoch_order(dataset, batch_size - regularisation_count, 0, "order")
    count = next(count for count in map(order.count, range(_MOST_EPOCHS)) if count)
    if dataset.regularisation is not None and regularisation_count == 0:
        return math.ceil(count / (1 - dataset.regularisation_share))
    return count


def _regularisation_count(dataset: Dataset, batch_size: int) -> int:
    """How many images of each batch are regularisation images."""
    if dataset.regularisation is None:
        return 0
    return min(batch_size - 1, int(batch_size * dataset.regularisation_share + 0.5))


def _take(dataset: Dataset, batch_size: int, seed: int, number: int, purpose: str) -> list[DatasetImage]:
    return [dataset.images[index] for index in _epoch_order(dataset, batch_size, seed, purpose).take(number)]


def select_images(
    dataset: Dataset, batch_size: int, seed: int, number: int
) -> tuple[list[DatasetImage], list[DatasetImage]]:
    """The images of micro-batch `number` (from 0): (of the dataset, of its regularisation dataset).

    A share of each batch goes to regularisation. If the batch is so small that the share is less than one image, whole
    batches do.
    """
    other = dataset.regularisation
    if other is None:
        return _take(dataset, batch_size, seed, number, "order"), []
    count = _regularisation_count(dataset, batch_size)
    if count == 0:
        regularisation_batches = math.floor(number * dataset.regularisation_share)
        if math.floor((number + 1) * dataset.regularisation_share) > regularisation_batches:
            return [], _take(other, batch_size, seed, regularisation_batches, "regularisation order")
        return _take(dataset, batch_size, seed, number - regularisation_batches, "order"), []
    regularisation_images: list[DatasetImage] = []
    for i in range(number * count, (number + 1) * count):
        regularisation_images += _take(other, 1, seed, i, "regularisation order")
    return _take(dataset, batch_size - count, seed, number, "order"), regularisation_images
