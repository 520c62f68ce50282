"""What a Samples node does when it runs. dataset.py imports it only then, so that ComfyUI starts without it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from comfy_api.latest import io

from .. import host
from ..host import samples as graph
from ..training.data import combine, folder_report, samples
from ..training.data.cache import Cache
from ..training.data.dataset import Conditioning
from ..training.data.sample_store import SampleStore
from ..training.data.samples import Sample, SampleSettings

T = TypeVar("T")


def output(
    latents: Sequence[Any],
    conditionings: Sequence[Any],
    captions: Sequence[str],
    masks: Sequence[Any],
    empty: Any,
    clip: Any,
    settings: SampleSettings,
    regularisation: Any,
    share: float,
    more_images: Any,
) -> io.NodeOutput:
    """What the node gives."""
    made = _samples(latents, conditionings, captions, masks)
    without_prompt = _empty(empty, clip)
    fields: dict[str, Any] = {}
    if regularisation is not None:
        fields = {"regularisation": regularisation, "regularisation_share": share}
        fields["unhashed"] = regularisation.unhashed
    store = SampleStore(Cache(Path(host.folders.training_folder()) / "cache"))
    dataset = samples.make_dataset(made, settings, without_prompt, store, **fields)
    lines = samples.report(dataset, without_prompt is not None) + store.report()
    if regularisation is not None:
        lines.append(f"regularization dataset: {len(regularisation.images)} images, {share:.0%} of each batch")
    if any("noise_mask" in latent for latent in latents):
        lines.append("noise masks of latents are not used: connect them as masks")
    if more_images is not None:
        parts = [dataset, more_images]
        dataset = combine.combine(parts)
        lines += folder_report.together(parts, dataset)
    report = "\n".join(lines)
    return io.NodeOutput(replace(dataset, report=report), report, ui={"text": [report]})


def _samples(
    latents: Sequence[Any], conditionings: Sequence[Any], captions: Sequence[str], masks: Sequence[Any]
) -> list[Sample]:
    tensors: list[torch.Tensor] = []
    sizes = []
    for number, latent in enumerate(latents, 1):
        of_latent = graph.latents_of(latent, number)
        tensors += of_latent
        sizes.append(len(of_latent))
    _check_channels(tensors)
    converted = [graph.conditioning_of(one, f"conditioning {number}") for number, one in enumerate(conditionings, 1)]
    flat_masks = [mask for one in masks for mask in graph.masks_of(one)]
    by_sample = _for_each(converted, sizes, "conditionings")
    texts = _for_each(list(captions) or [""], sizes, "captions")
    weights = _for_each(list(flat_masks) or [None], sizes, "masks")
    made = []
    for latent, conditioning, caption, mask in zip(tensors, by_sample, texts, weights, strict=True):
        made.append(Sample(latent, conditioning, caption.strip(), _fitted(mask, latent)))
    return made


def _check_channels(latents: Sequence[torch.Tensor]) -> None:
    channels = sorted({latent.shape[0] for latent in latents})
    if len(channels) > 1:
        found = " and ".join(map(str, channels))
        raise ValueError(f"Samples: latents have {found} channels: use the same VAE for all of them.")


def _for_each(values: Sequence[T], sizes: Sequence[int], name: str) -> list[T]:
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


def _fitted(mask: torch.Tensor | None, latent: torch.Tensor) -> torch.Tensor | None:
    """A mask (1, H, W) at the size of a latent, by area."""
    if mask is None:
        return None
    return F.interpolate(mask[None], size=latent.shape[-2:], mode="area")[0]


def _empty(empty: Any, clip: Any) -> Conditioning | None:
    """The conditioning for dropped prompts: the one that is connected, or the empty prompt of the CLIP."""
    if empty is not None:
        made = graph.conditioning_of(empty, "empty conditioning")
        text = {name: value for name, value in made.extras.items() if name in samples.TEXT_ENTRIES}
        return Conditioning(made.context, text)
    if clip is None:
        return None
    with torch.no_grad():
        return host.encoding.encode_captions(clip, [""])[""]
