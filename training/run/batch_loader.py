"""Prepares a run's batches ahead of time, and tells their captions and their order before training.

`batches.draw_items` draws what a batch holds from (seed, step). Threads only put it together, so any number of them
gives the same bytes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..data.batches import Batch, BatchItem, collate, draw_items, group_by_size, make_batches
from ..data.dataset import Dataset, DatasetImage
from ..data.epoch_order import select_images
from ..data.reading_ahead import NeedsEncodingError, read_ahead

if TYPE_CHECKING:
    from ..state import TrainState


@dataclass(frozen=True)
class BatchSchedule:
    """Decides which images each step of a run sees: `parts` micro-batches per step, `dropout` is the objective's.
    `with_empty`: batches have conditionings of the empty prompt too.
    """

    dataset: Dataset
    batch_size: int
    parts: int
    dropout: float
    seed: int
    with_empty: bool = False

    @classmethod
    def from_state(cls, state: TrainState, dataset: Dataset) -> BatchSchedule:
        """The schedule of a run from a state on, with its settings."""
        optimizer, objective = state.settings.optimizer, state.settings.objective
        return cls(
            dataset,
            optimizer.batch_size,
            optimizer.accumulation,
            objective.conditioning_dropout,
            state.start.seed,
            objective.needs_empty_prompt,
        )

    def pictures_of(self, step: int, part: int) -> list[BatchItem]:
        """The pictures of micro-batch `part` of step `step` (from 0)."""
        return draw_items(*self._place(step, part))

    def images_of(self, step: int) -> int:
        """How many pictures all micro-batches of a step have together."""
        count = 0
        for part in range(self.parts):
            number = step * self.parts + part
            count += sum(map(len, select_images(self.dataset, self.batch_size, self.seed, number)))
        return count

    def batches(self, step: int, part: int) -> list[Batch]:
        """The batches of that micro-batch, grouped by image size."""
        return make_batches(*self._place(step, part), with_empty=self.with_empty)

    def _place(self, step: int, part: int) -> tuple[Dataset, int, float, int, int, int, str]:
        return self.dataset, self.batch_size, self.dropout, self.seed, step, step * self.parts + part, f"part {part}"

    def sizes(self) -> dict[tuple[int, ...], DatasetImage]:
        """The sizes of batches, (B, C, …, h, w) or B with those of all parts, the largest first, each with a picture of
        that size.

        A batch of one picture, as at the end of an epoch, has a shape of its own; other counts are as the whole batch.
        """
        found: dict[tuple[int, ...], DatasetImage] = {}
        numbers: Counter[tuple[int, ...]] = Counter()
        for source in (self.dataset, self.dataset.regularization):
            images: Sequence[DatasetImage] = () if source is None else source.images
            for image in images:
                shape = (image.batch_size or self.batch_size, *image.size)
                found.setdefault(shape, image)
                numbers[shape] += math.ceil(image.repeats)
        for shape, number in numbers.items():
            if number % shape[0] == 1:
                found.setdefault((1, *shape[1:]), found[shape])

        def size(one: tuple[tuple[int, ...], DatasetImage]) -> tuple[int, tuple[int, ...]]:
            shape, image = one
            return shape[0] * math.prod(image.latent.shape), shape

        return dict(sorted(found.items(), key=size, reverse=True))

    def captions(self, first: int, steps: int) -> dict[Dataset, set[str]]:
        """The captions that the steps from `first` on need, by dataset, with the pictures that the text encoder sees.
        Empty if no caption varies.
        """
        if not captions_vary(self.dataset):
            return {}
        needed: dict[Dataset, set[str]] = {source: set() for source in _sources(self.dataset)}
        for step in range(first, first + steps):
            for part in range(self.parts):
                for item in self.pictures_of(step, part):
                    if item.crop.brought is None:
                        needed[item.dataset].add(item.prompt)
                        if self.with_empty:
                            needed[item.dataset].add(item.crop.prompt("", item.flipped))
        return needed

    def prepare(self, first: int, steps: int, done: Callable[[int, int], object] = lambda done, total: None) -> int:
        """Encodes the captions of those steps now, while the text encoder can have the device to itself. Returns how
        many.
        """
        count = 0
        for source, texts in self.captions(first, steps).items():
            prepare_texts = getattr(source.conditionings, "prepare", None)
            count += 0 if prepare_texts is None else prepare_texts(texts, done)
        return count

    def lines(self, first: int, steps: int) -> Iterator[str]:
        """Lines of text: each step from `first` on with its pictures (EveryDream2's write_schedule)."""
        for step in range(first, first + steps):
            for part in range(self.parts):
                yield f"step {step + 1}" + (f" part {part + 1}" if self.parts > 1 else "")
                for group in group_by_size(self.pictures_of(step, part)):
                    for item in group:
                        yield f"  {_describe_item(item)}"


def captions_vary(dataset: Dataset) -> bool:
    """Whether captions are drawn anew in each step, or encoded with pictures, so that they are encoded before it."""
    return any(
        image.caption_template is not None or any(image.seen) for source in _sources(dataset) for image in source.images
    )


def _sources(dataset: Dataset) -> list[Dataset]:
    return [source for source in (dataset, dataset.regularization) if source is not None]


def _describe_item(one: BatchItem) -> str:
    marks = [
        one.image.sides,
        *(["mirrored"] if one.flipped else []),
        *([f"cut {one.crop_number + 1}"] if one.image.other_crops else []),
    ]
    marks += [
        *([f"batch_id {one.image.batch_id}"] if one.image.batch_id else []),
        *(["regularization"] if one.is_regularization else []),
    ]
    return f"{one.image.name} ({', '.join(marks)}): {one.caption or '(no caption)'}"


class BatchLoader:
    """The batches of a schedule by (step, part).

    With workers, threads read those of the next steps, up to `until`, exclusive. What has to be encoded again, and
    errors, come up when the batch is taken.

    `every` is (rank, ranks): of each step only the parts rank, rank + ranks, … will be asked for.
    """

    def __init__(
        self, schedule: BatchSchedule, workers: int = 0, until: int = 0, every: tuple[int, int] = (0, 1)
    ) -> None:
        self.schedule, self.until = schedule, until
        self._parts = range(schedule.parts)[every[0] :: every[1]]
        self._threads: ThreadPoolExecutor | None = None
        if workers:
            self._threads = ThreadPoolExecutor(workers, thread_name_prefix="graft-loader")
        self._ahead = 2 * workers
        self._coming: dict[tuple[int, int], Future[list[Batch]]] = {}
        self._counted = -1, 0  # a step and its pictures

    def images_of(self, step: int) -> int:
        """How many pictures all micro-batches of a step have together, those of other ranks too."""
        if self._counted[0] != step:
            self._counted = step, self.schedule.images_of(step)
        return self._counted[1]

    def take(self, step: int, part: int) -> list[Batch]:
        """Micro-batch `part` of a step, grouped by picture size."""
        if self._threads is None:
            return self.schedule.batches(step, part)
        position = step * len(self._parts) + self._parts.index(part)
        for number in range(
            position, min(position + 1 + self._ahead, max(position + 1, self.until * len(self._parts)))
        ):
            key = number // len(self._parts), self._parts[number % len(self._parts)]
            if key not in self._coming:
                self._coming[key] = self._threads.submit(self._collate, self.schedule.pictures_of(*key))
        for key in [key for key in self._coming if key < (step, part)]:
            self._coming.pop(key).cancel()
        try:
            return self._coming.pop((step, part)).result()
        except NeedsEncodingError:
            return self.schedule.batches(step, part)

    def close(self) -> None:
        """End the threads; what they had begun is finished first."""
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)
        self._coming.clear()

    def _collate(self, pictures: list[BatchItem]) -> list[Batch]:
        with read_ahead():
            return [collate(group, self.schedule.with_empty) for group in group_by_size(pictures)]
