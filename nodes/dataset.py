"""GraftDataset: loads a folder of captioned images, encoded, into memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from comfy_api.latest import io

from .. import host
from ..storage.digest import sha256, sha256_of_file
from ..storage.file_list import files_below
from ..training.data.folder_settings import FolderSettings, FolderSource, SampleSettings
from .schema import Dataset, GraftNode, inputs_of, search_aliases

if TYPE_CHECKING:
    from torch import Tensor

    from ..host.comfyui_objects import Clip, Conditioning, Latent, Vae
    from ..training.data.dataset import Dataset as TrainingData


class GraftDataset(GraftNode):
    """Reads pictures and captions below ComfyUI's input folder and encodes them once."""

    settings_class = FolderSettings
    checked_together = (
        ("folder",),
        ("validation_folder",),
        (
            "folder",
            "resolution",
            "buckets",
            "bucket_step",
            "captions",
            "shuffle_tags",
            "filters",
            "no_upscale",
            "min_side",
            "max_side",
            "validation_folder",
            "frames",
            "frame_rate",
            "clip_part",
        ),
    )

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="GraftDataset",
            display_name="Dataset",
            category="Graft/training",
            description=(
                "Reads a folder of captioned images under ComfyUI's input folder, sorts them into aspect"
                " ratio buckets, and encodes images and captions once."
            ),
            **search_aliases("dataset", "training images", "image folder", "captions", "regularization"),
            inputs=[
                io.Vae.Input("vae", tooltip="Encodes the images. Use the VAE of the model you train."),
                io.Clip.Input("clip", tooltip="Encodes the captions. Use the text encoder of the model you train."),
                *inputs_of(cls.settings_class),
                Dataset.Input(
                    "regularization",
                    optional=True,
                    tooltip=(
                        "Optional. A second dataset mixed into every batch, so that the model keeps what it"
                        " already knows."
                    ),
                ),
                Dataset.Input(
                    "more_images",
                    optional=True,
                    tooltip=(
                        "Optional. Another Dataset whose images are trained on too, with its own repeats, captions,"
                        " resolution and batch size. Chain as many as you like."
                    ),
                ),
            ],
            outputs=[
                Dataset.Output(display_name="GRAFT_DATASET"),
                io.Image.Output(display_name="contact sheet"),
                io.String.Output(display_name="report"),
            ],
        )

    @classmethod
    def check_settings(cls, folder: str | None = None, **values: Any) -> None:
        """Raises an error for settings that are wrong, and for folders that are not there or have no pictures. Without
        other settings a dataset_config.toml is not read: what is wrong in it depends on them.
        """
        from ..training.data.folder_reader import pictures_in

        chosen = FolderSettings(**values)
        takes_clips = chosen.takes_clips or "frames" not in values
        if chosen.validation_folder:
            pictures_in(_validation_folder(chosen.validation_folder), takes_clips)
        if folder is None:
            return
        if not host.folders.is_dataset_config(folder):
            pictures_in(Path(host.folders.pictures_folder(folder)), takes_clips)
        elif values:
            _config_sources(folder, chosen)
        else:
            host.folders.input_file(folder)

    @classmethod
    def fingerprint_inputs(cls, folder: str = "", validation_folder: str = "", **_: Any) -> str:
        """Changes when a file in the folders changes. A folder name that comes through a link is known only to
        `execute`.
        """
        digest = sha256(str(folder).encode("utf-8", "surrogatepass"))
        try:
            roots = _folders_of(folder or "", digest)
            if validation_folder:
                roots.append(Path(host.folders.pictures_folder(validation_folder)))
        except (ValueError, OSError):
            return digest.hexdigest()
        for root in roots:
            if root.is_file():
                digest.update(sha256_of_file(root).encode())
            for path, stat in files_below(root):
                digest.update(repr((path.relative_to(root).as_posix(), stat.st_size, stat.st_mtime_ns)).encode())
        return digest.hexdigest()

    @classmethod
    def execute(
        cls,
        vae: Vae,
        clip: Clip,
        chosen: FolderSettings,
        regularization: TrainingData | None = None,
        more_images: TrainingData | None = None,
    ) -> io.NodeOutput:
        from ..host.demo_files import place_pictures
        from .dataset_reader import DatasetReader

        _refuse_missing({"VAE": vae, "CLIP": clip})
        measured = _measured_source(chosen)
        if measured is not None:
            chosen = replace(chosen, validation=0.0)
        folder = chosen.folder
        placed = [said for name in (folder, chosen.validation_folder) if (said := place_pictures(name))]
        notes: list[str] = []
        if host.folders.is_dataset_config(folder):
            sources, notes = _config_sources(folder, chosen)
            if regularization is not None and any(source.is_regularization for source in sources):
                raise ValueError(
                    "Dataset: dataset_config.toml has regularization images (is_reg), and a regularization dataset is"
                    " connected too: disconnect it, or take is_reg out."
                )
        else:
            sources = [FolderSource(Path(host.folders.pictures_folder(folder)), chosen)]
        if measured is not None:
            sources = [replace(source, settings=replace(source.settings, validation=0.0)) for source in sources]
            sources.append(measured)
        return DatasetReader(vae, clip, chosen).read(sources, regularization, more_images, notes, placed)


def _config_sources(folder: str, chosen: FolderSettings) -> Any:
    from ..training.data.dataset_config import read_config

    root = Path(host.folders.input_root())
    return read_config(Path(host.folders.input_file(folder)), root, FolderSource(root, chosen))


def _measured_source(chosen: FolderSettings) -> FolderSource | None:
    """The images that only measure the loss: of the validation folder, or those that `validation` of filters chooses
    from the image folder. None where neither is given.
    """
    own = chosen.filters.validation
    if not chosen.validation_folder and own is None:
        return None
    settings = replace(chosen, validation=0.0, caption_dropout=0.0, batch_size=0, filters=own or chosen.filters)
    if chosen.validation_folder:
        return FolderSource(_validation_folder(chosen.validation_folder), settings, is_validation=True)
    if host.folders.is_dataset_config(chosen.folder):
        raise ValueError(
            "Dataset: validation of filters needs a validation folder beside dataset_config.toml: give one, or take"
            " validation out."
        )
    return FolderSource(Path(host.folders.pictures_folder(chosen.folder)), settings, is_validation=True)


def _folders_of(folder: str, digest: Any) -> list[Path]:
    """The folders that an image folder or dataset_config.toml stands for; the digest gets the latter's bytes."""
    if not host.folders.is_dataset_config(folder):
        return [Path(host.folders.pictures_folder(folder))]
    from ..training.data.dataset_config import paths_in

    file = Path(host.folders.input_file(folder))
    digest.update(sha256_of_file(file).encode())
    return paths_in(file, Path(host.folders.input_root()))


def _validation_folder(name: str) -> Path:
    """The validation folder of this name; its errors say which input they are about."""
    try:
        return Path(host.folders.pictures_folder(name))
    except (ValueError, FileNotFoundError) as error:
        raise type(error)(f"validation folder: {error}") from error


def _refuse_missing(inputs: dict[str, Any]) -> None:
    missing = [label for label, value in inputs.items() if value is None]
    if missing:
        errors = [f"{label} is empty: the checkpoint has none; connect one from another loader" for label in missing]
        raise ValueError(f"Dataset: {'; '.join(errors)}.")


class GraftSamples(GraftNode):
    """Makes a dataset of what a graph gives: latents with a conditioning each."""

    settings_class = SampleSettings

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="GraftSamples",
            display_name="Samples",
            category="Graft/training",
            description=(
                "Makes a dataset from latents and conditionings of the graph, with one conditioning for each sample:"
                " also with reference images, control, clips or sound, as the model's own nodes make them."
            ),
            **search_aliases("dataset", "samples", "training images", "edit", "video", "kontext", "image to video"),
            is_input_list=True,
            inputs=[
                io.Latent.Input(
                    "latents",
                    tooltip=(
                        "What to train on: a list of latents of pictures, clips or sound. A batch counts as several"
                        " samples."
                    ),
                ),
                io.Conditioning.Input(
                    "conditioning",
                    tooltip=(
                        "A list with the conditioning of each sample: its prompt, and reference latents, image"
                        " embeddings or sound. Or one for all."
                    ),
                ),
                io.String.Input(
                    "captions",
                    force_input=True,
                    optional=True,
                    tooltip="Optional. A list of captions, for reports. The model is trained with the conditionings.",
                ),
                io.Mask.Input(
                    "masks",
                    optional=True,
                    tooltip="Optional. A list of masks, or one for all: only their white areas count in the loss.",
                ),
                io.Conditioning.Input(
                    "empty",
                    optional=True,
                    tooltip=(
                        "The conditioning of an empty prompt, for conditioning dropout. It replaces only the prompt;"
                        " reference latents and the like stay."
                    ),
                ),
                io.Clip.Input(
                    "clip",
                    optional=True,
                    tooltip="Encodes the empty prompt, if no empty conditioning is connected.",
                ),
                Dataset.Input(
                    "regularization",
                    optional=True,
                    tooltip="Optional. Another dataset of ordinary images, so that the model does not forget them.",
                ),
                Dataset.Input(
                    "more_images",
                    optional=True,
                    tooltip="Optional. More images to train on, from Dataset or another Samples.",
                ),
                *inputs_of(cls.settings_class),
                Dataset.Input(
                    "validation_dataset",
                    optional=True,
                    tooltip=(
                        "Optional. Another dataset, from Samples or Dataset, that measures the validation loss and is"
                        " never trained on. It replaces validation split."
                    ),
                ),
            ],
            outputs=[Dataset.Output(display_name="GRAFT_DATASET"), io.String.Output(display_name="report")],
        )

    @classmethod
    def execute(
        cls,
        latents: Sequence[Latent],
        conditioning: Sequence[Conditioning],
        chosen: SampleSettings,
        captions: Sequence[str] | None = None,
        masks: Sequence[Tensor] | None = None,
        empty: Sequence[Conditioning] | None = None,
        clip: Clip = None,
        regularization: TrainingData | None = None,
        more_images: TrainingData | None = None,
        validation_dataset: TrainingData | None = None,
    ) -> io.NodeOutput:
        from . import samples_reader

        return samples_reader.make_output(
            latents,
            conditioning,
            captions or [],
            masks or [],
            _take_one("empty conditioning", empty),
            _take_one("CLIP", clip),
            chosen,
            _take_one("regularization dataset", regularization),
            _take_one("more images", more_images),
            _take_one("validation dataset", validation_dataset),
        )


def _take_one(name: str, values: Any) -> Any:
    """The one value of an input that takes no list; None where it is not connected."""
    if not values:
        return None
    if len(values) > 1:
        raise ValueError(f"Samples: {name} takes one, and {len(values)} are connected.")
    return values[0]


NODES = [GraftDataset, GraftSamples]
