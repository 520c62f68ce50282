"""What a Samples node does when it runs. dataset.py imports it only then, so that ComfyUI starts without it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.nn.functional as F
from comfy_api.latest import io

from .. import host
from ..host import samples as graph
from ..training.data import combine, folder_report, samples
from ..training.data.cache import Cache
from ..training.data.dataset import Conditioning, Dataset
from ..training.data.folder_settings import SampleSettings
from ..training.data.parts import Parts
from ..training.data.sample_store import SampleStore
from ..training.data.samples import Sample

if TYPE_CHECKING:
    from ..host.comfyui_objects import Clip

T = TypeVar("T")


def make_output(
    latents: Sequence[Any],
    conditionings: Sequence[Any],
    captions: Sequence[str],
    masks: Sequence[Any],
    empty: Any,
    clip: Clip,
    settings: SampleSettings,
    regularization: Dataset | None,
    more_images: Dataset | None,
    validation: Dataset | None,
) -> io.NodeOutput:
    """What the node gives."""
    if validation is not None:
        settings = replace(settings, validation=0.0)
    made = _make_samples(latents, conditionings, captions, masks)
    without_prompt = _empty_conditioning(empty, clip)
    fields: dict[str, Any] = {}
    if regularization is not None:
        fields = {"regularization": regularization, "regularization_share": settings.regularization_share}
        fields["unhashed"] = regularization.unhashed
    store = SampleStore(Cache(Path(host.folders.training_folder()) / "cache"), beside=more_images)
    dataset = samples.make_dataset(made, settings, without_prompt, store, **fields)
    lines = samples.report(dataset, without_prompt is not None) + store.report()
    if regularization is not None:
        share = f"{settings.regularization_share:.0%} of each batch"
        lines.append(f"regularization dataset: {len(regularization.images)} images, {share}")
    if any("noise_mask" in latent for latent in latents):
        lines.append("noise masks of latents are not used: connect them as masks")
    if validation is not None:
        dataset = _hold_out_all(dataset, validation)
        lines.append(f"validation dataset: {len(dataset.held_out)} images are measured, in place of validation split")
        left_out = len(validation.images) + len(validation.held_out) - len(dataset.held_out)
        if left_out:
            lines.append(f"{left_out} images of it are trained on too, so they are not measured")
    parts = [dataset]
    if more_images is not None:
        parts.append(more_images)
    dataset = combine.combine(parts)
    if more_images is not None:
        lines += folder_report.describe_together(parts, dataset)
    lines += folder_report.note_unmeasured(parts, dataset)
    report = "\n".join(lines)
    return io.NodeOutput(replace(dataset, report=report), report, ui={"text": [report]})


def _hold_out_all(dataset: Dataset, validation: Dataset) -> Dataset:
    """The dataset with all images of another one held out."""
    every = replace(validation, images=validation.images + validation.held_out, held_out=())
    return combine.hold_out(dataset, every, "Samples: every image of validation dataset", "disconnect it")


def _make_samples(
    latents: Sequence[Any], conditionings: Sequence[Any], captions: Sequence[str], masks: Sequence[Any]
) -> list[Sample]:
    tensors: list[tuple[torch.Tensor, Parts]] = []
    sizes = []
    for number, latent in enumerate(latents, 1):
        of_latent = graph.latents_of(latent, number)
        tensors += of_latent
        sizes.append(len(of_latent))
    channels = sorted({(parts[0] if parts else latent.shape)[0] for latent, parts in tensors})
    if len(channels) > 1:
        found = " and ".join(map(str, channels))
        raise ValueError(f"Samples: latents have {found} channels: use the same VAE for all of them.")
    flat_masks = [mask for one in masks for mask in graph.masks_of(one)]
    by_sample = _conditionings(conditionings, sizes)
    texts = _spread(list(captions) or [""], sizes, "captions")
    weights = _spread(list(flat_masks) or [None], sizes, "masks")
    made = []
    for number, ((latent, parts), conditioning) in enumerate(zip(tensors, by_sample, strict=True)):
        mask = weights[number]
        if mask is not None:
            shape = parts[0] if parts else latent.shape
            samples.check_takes_mask(f"sample {number + 1}", shape)
            mask = F.interpolate(mask[None], size=tuple(shape[-2:]), mode="area")[0]
        made.append(Sample(latent, conditioning, texts[number].strip(), mask, parts))
    return made


def _conditionings(given: Sequence[Any], sizes: Sequence[int]) -> list[Conditioning]:
    """The conditioning of each sample; `sizes` are how many samples each LATENT holds."""
    names = [f"conditioning {number}" for number in range(1, len(given) + 1)]
    if len(given) != len(sizes):
        converted = [graph.conditioning_of(one, name) for one, name in zip(given, names, strict=True)]
        return _spread(converted, sizes, "conditionings")
    of_latents = map(graph.conditionings_of, given, names, sizes)
    return [one for of_latent in of_latents for one in of_latent]


def _spread(values: Sequence[T], sizes: Sequence[int], name: str) -> list[T]:
    """One value for each sample, from as many, from one for each LATENT, or from one for all.

    `sizes` are how many samples each LATENT holds.
    """
    count = sum(sizes)
    if len(values) == count:
        return list(values)
    if len(values) == 1:
        return list(values) * count
    if len(values) == len(sizes):
        return [value for value, size in zip(values, sizes, strict=True) for _ in range(size)]
    raise ValueError(
        f"Samples: {count} latents and {len(values)} {name}: connect as many {name} as latents, or one for all."
    )


def _empty_conditioning(empty: Any, clip: Clip) -> Conditioning | None:
    """The conditioning for dropped prompts: the one that is connected, or the empty prompt of the CLIP."""
    if empty is not None:
        made = graph.conditioning_of(empty, "empty conditioning")
        text = {name: value for name, value in made.extras.items() if name in samples.TEXT_ENTRIES}
        return Conditioning(made.context, text)
    if clip is None:
        return None
    with torch.no_grad():
        return host.encoding.encode_captions(clip, [""])[""]
