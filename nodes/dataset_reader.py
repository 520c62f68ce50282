"""What a Dataset node does when it runs: it reads its folders, encodes them and puts them together. dataset.py imports
it only then, so that ComfyUI starts without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from comfy_api.latest import io
from torch import Tensor

from .. import host
from ..training.data import combine, encoding, folder_report, images, pictures
from ..training.data.cache import Cache
from ..training.data.control_encoding import ControlEncoder
from ..training.data.control_methods import ControlMethod, find_method, set_size
from ..training.data.dataset import Dataset
from ..training.data.file_names import printable
from ..training.data.folder_reader import read_folder
from ..training.data.folder_settings import FolderSettings, FolderSource
from ..training.data.listing import FolderListing

if TYPE_CHECKING:
    from ..host.comfyui_objects import Clip, Vae


class DatasetReader:
    """Reads and encodes the folders of one run of the node."""

    def __init__(self, vae: Vae, clip: Clip, chosen: FolderSettings) -> None:
        self.vae, self.clip, self.share = vae, clip, chosen.regularization_share
        self.clip_skip, self.weighted_captions = chosen.clip_skip, chosen.weighted_captions
        if chosen.skip_from_own:
            self.clip_skip = host.encoding.skip_from_own_layer(clip, chosen.clip_skip)
        vae_hash = host.fingerprint.fingerprint_of(vae, "vae")
        clip_hash = host.fingerprint.fingerprint_of(clip, "clip")
        self.encoders = vae_hash.digest, f"{clip_hash.digest} {self.clip_skip}"
        self.unhashed = vae_hash.unhashed + clip_hash.unhashed
        self.cache = None
        # Without a hash there is no cache entry to find.
        if chosen.filters.cache and not self.unhashed:
            self.cache = Cache(Path(host.folders.training_folder()) / "cache", chosen.filters.cache_gb)
        self.frame_step = host.encoding.frame_step(vae)
        self.progress: Any = None
        self.done = 0
        self.sheets: list[Any] = []

    def read(
        self,
        sources: Sequence[FolderSource],
        regularization: Dataset | None,
        more_images: Dataset | None,
        notes: Sequence[str],
        placed: Sequence[str],
    ) -> io.NodeOutput:
        """What the node gives. All folders are read before the first one is encoded."""
        sources = [replace(one, settings=replace(one.settings, frame_step=self.frame_step)) for one in sources]
        check = host.events.raise_if_interrupted
        listings = [read_folder(source.folder, source.settings, self.cache, check) for source in sources]
        listings = _set_measured_apart(sources, listings)
        methods = [self._control_method(source, listing) for source, listing in zip(sources, listings, strict=True)]
        self.progress = host.events.progress_bar(sum(len(listing.entries) for listing in listings))
        read = list(zip(sources, listings, strict=True))
        regular = [self._encode(*one, None) for one in read if one[0].is_regularization]
        if regular:
            regularization = combine.combine(regular)
        trained = self._encode_trained(read, regularization)
        measured = [self._encode(*one, None) for one in read if one[0].is_validation]
        overlap: list[str] = []
        dataset = combine.combine(trained)
        not_measured = folder_report.note_unmeasured(trained, dataset)
        if measured:
            validation = combine.combine(measured)
            dataset = combine.hold_out(dataset, validation)
            overlap = folder_report.overlap(validation, dataset)
        parts = trained
        if more_images is not None:
            parts = [dataset, more_images]
            dataset = combine.combine(parts)
            not_measured += folder_report.note_unmeasured(parts, dataset)
        names = [host.folders.relative_to_input(source.folder) for source in sources]
        folders = folder_report.ReadFolders(tuple(zip(names, sources, listings, strict=True)))
        lines = [*notes, *folders.lines(regularization, self.share), *overlap]
        if len(parts) > 1:
            lines += folder_report.describe_together(parts, dataset)
        lines += not_measured
        lines += folder_report.control_methods_used([method for method in methods if method is not None])
        lines.append(folder_report.memory(dataset))
        lines += [*folders.brackets(self.weighted_captions), *placed]
        if self.unhashed:
            lines.append(f"nothing is cached on disk, because these cannot be hashed: {', '.join(self.unhashed)}")
        if self.cache is not None:
            lines += self.cache.report()
        report = printable("\n".join(lines))
        ui = {"text": [report], "graft_dataset": [{**folders.editor_data(report), "placed": placed}]}
        return io.NodeOutput(replace(dataset, report=report), images.stack_sheets(self.sheets), report, ui=ui)

    def _encode_trained(
        self, read: Sequence[tuple[FolderSource, FolderListing]], regularization: Dataset | None
    ) -> list[Any]:
        """The datasets to train on; the first has the regularization dataset."""
        trained: list[Any] = []
        for source, listing in read:
            if source.is_regularization or source.is_validation:
                continue
            trained.append(self._encode(source, listing, regularization))
            regularization = None
        return trained

    def _encode(self, source: FolderSource, listing: FolderListing, regularization: Dataset | None) -> Dataset:
        """The dataset of one folder."""
        fields = {
            "caption_dropout": source.settings.caption_dropout,
            "unhashed": self.unhashed,
            "regularization_share": 0.0,
            "weighted_captions": self.weighted_captions,
        }
        if self.clip_skip:
            fields["clip_skip"] = self.clip_skip
        if source.settings.batch_size:
            fields["batch_size"] = source.settings.batch_size
        if regularization is not None:
            fields["regularization_share"] = self.share
            fields["unhashed"] = self.unhashed + regularization.unhashed
        dataset, sheet = encoding.encode(
            listing,
            lambda pixels: host.encoding.encode_pictures(self.vae, pixels),
            self._encode_captions,
            self.encoders,
            self.cache,
            self._on_progress,
            lambda caption: host.encoding.caption_key(self.clip, caption, self.weighted_captions),
            regularization=regularization,
            controls=self._control_encoder(source, listing),
            **fields,
        )
        self.done += len(listing.entries)
        self.sheets.append(sheet)
        return replace(dataset, pictures=partial(pictures.read_pictures, listing))

    def _control_method(self, source: FolderSource, listing: FolderListing) -> Any:
        """How the model takes the control pictures of a folder; None where it has none."""
        if not any(entry.controls for entry in listing.entries):
            return None
        method = find_method(source.settings.control_pictures, host.encoding.tokenizer_of(self.clip))
        subset = source.settings.subset
        if subset is None:
            return method
        return set_size(method, subset.control_size)

    def _control_encoder(self, source: FolderSource, listing: FolderListing) -> Any:
        method = self._control_method(source, listing)
        if method is None:
            return None
        return ControlEncoder(
            listing.folder,
            method,
            lambda pixels: host.encoding.encode_pictures(self.vae, pixels),
            self._encode_with_pictures,
            self.encoders[0],
            self.cache,
        )

    def _encode_with_pictures(self, caption: str, pictures: Sequence[Tensor], method: ControlMethod) -> Any:
        host.events.raise_if_interrupted()
        assert method.prompt is not None  # only such a method has its captions encoded with their pictures
        text, options = method.prompt(
            host.encoding.prompt_for_clip(self.clip, caption, self.weighted_captions), len(pictures)
        )
        return host.encoding.encode_with_pictures(self.clip, text, pictures, options, self.clip_skip)

    def _encode_captions(self, texts: Sequence[str]) -> Any:
        host.events.raise_if_interrupted()
        return host.encoding.encode_captions(self.clip, texts, self.clip_skip, self.weighted_captions)

    def _on_progress(self, done: int) -> None:
        self.progress(self.done + done)
        host.events.raise_if_interrupted()


def _set_measured_apart(sources: Sequence[FolderSource], listings: Sequence[FolderListing]) -> list[FolderListing]:
    """The listings, without the images that `validation` of filters has chosen to measure among those to train on."""
    measured = {
        entry.sha256
        for source, listing in zip(sources, listings, strict=True)
        if source.is_validation and not source.settings.validation_folder
        for entry in listing.entries
    }
    apart: list[FolderListing] = []
    for source, listing in zip(sources, listings, strict=True):
        if measured and not source.is_validation:
            train = tuple(entry for entry in listing.train if entry.sha256 not in measured)
            if not train:
                raise ValueError(
                    f"Dataset: validation of filters chooses every image of {listing.folder.name!r}, so none is left to"
                    " train on. Let it choose fewer, as consider_every_nth: 8 does."
                )
            listing = replace(listing, train=train)
        apart.append(listing)
    return apart
