"""The loss of every picture by itself, before and after training, as validation measures it: at noise levels and noise
that never change, and here are the same for all pictures, so that these can be compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from ..averages.held_out_loss import open_for_measuring
from ..data.batches import BatchItem
from ..data.dataset import Dataset, DatasetImage
from ..objective.denoiser import Denoiser
from ..state import TrainState
from ..tasks.registry import trains_vae
from .validation import mean_loss, measure_picture
from .workspace import Workspace

NUMBER = 0  # whose noise levels and noise every picture gets


@dataclass(frozen=True)
class PictureLoss:
    """One picture's mean losses: with the weights `before` training and `after` it, and after it without its caption.

    The last is None where the picture has no caption, or brings its own conditioning.
    """

    image: DatasetImage
    is_held_out: bool
    before: float
    after: float
    without_caption: float | None = None

    @property
    def caption_help(self) -> float | None:
        """By which share of the loss without a caption the caption lowers it; below 0 it makes it worse."""
        if self.without_caption is None or not self.without_caption:
            return None
        return 1 - self.after / self.without_caption


def picture_losses(
    state: TrainState,
    denoiser: Denoiser,
    dataset: Dataset,
    raise_if_interrupted: Callable[[], None] | None = None,
    on_pass: Callable[[], None] = lambda: None,
) -> list[PictureLoss]:
    """Measure every picture, those to train on and those held out. The model is left as it was.

    Args:
        state: the run.
        denoiser: its model.
        dataset: the pictures.
        raise_if_interrupted: called before every picture.
        on_pass: called after every picture of each of the `passes`.

    Raises:
        ValueError: for a slider, which learns from prompts, and a VAE.
    """
    if dataset.slider is not None or trains_vae(state):
        raise ValueError(
            "Picture Losses measures the pictures of a model or an adapter, and this training state is of a"
            f" {'VAE' if trains_vae(state) else 'slider'}. Connect another one."
        )
    images = dataset.images + dataset.held_out
    with (
        open_for_measuring(state, denoiser, dataset, raise_if_interrupted) as work,
        torch.no_grad(),
        work.stepper.use_sampling_weights(),
    ):

        def measure(image: DatasetImage, caption: str) -> float:
            work.raise_if_interrupted()
            item = BatchItem(dataset, image, 0, False, caption, False, dropped=caption != image.caption)
            loss = float(mean_loss(measure_picture(work, item, NUMBER)))
            on_pass()
            return loss

        after = [measure(image, image.caption) for image in images]
        bare = [measure(image, "") if _is_captioned(image) else None for image in images]
        before = _without_training(work, [(image, image.caption) for image in images], measure)
    held_out = set(map(id, dataset.held_out))
    rows = zip(images, before, after, bare, strict=True)
    return [PictureLoss(image, id(image) in held_out, first, last, plain) for image, first, last, plain in rows]


def passes(dataset: Dataset) -> int:
    """How often `picture_losses` calls `on_pass`."""
    images = dataset.images + dataset.held_out
    return 2 * len(images) + sum(map(_is_captioned, images))


def _is_captioned(image: DatasetImage) -> bool:
    """Whether the loss without its caption can be measured."""
    return bool(image.caption) and image.brought is None and not any(image.seen)


def _without_training(
    work: Workspace, items: Sequence[tuple[DatasetImage, str]], measure: Callable[[DatasetImage, str], float]
) -> list[float]:
    with work.switch_off_trained():
        return [measure(image, caption) for image, caption in items]


def by_name(losses: Sequence[PictureLoss]) -> dict[str, PictureLoss]:
    """One for each picture by its name: the mean over its resolutions, the highest loss first. Other pictures of the
    same name, in another folder, get a number behind it.
    """
    groups: dict[tuple[str, str], list[PictureLoss]] = {}
    for loss in losses:
        groups.setdefault((loss.image.name, loss.image.sha256), []).append(loss)
    means: dict[str, PictureLoss] = {}
    for (name, _), group in groups.items():
        label, number = name, 2
        while label in means:
            label, number = f"{name} ({number})", number + 1
        means[label] = _mean(group)
    return dict(sorted(means.items(), key=lambda pair: -pair[1].after))


def _mean(group: Sequence[PictureLoss]) -> PictureLoss:
    bare = [one.without_caption for one in group if one.without_caption is not None]
    return replace(
        group[0],
        before=sum(one.before for one in group) / len(group),
        after=sum(one.after for one in group) / len(group),
        without_caption=sum(bare) / len(bare) if bare else None,
    )
