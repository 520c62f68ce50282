"""GraftDataset: loads a folder of captioned images, encoded, into memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from comfy_api.latest import io

from .. import host
from ..storage.digest import sha256, sha256_of_file
from ..storage.file_list import files_below
from .refusals import refusal
from .schema import Dataset, GraftNode, advanced, aliases

# The names of training/data/clip_parts.py, which only a run imports.
CLIP_PARTS = ("head", "uniform", "chunk", "slide", "full")
# The names of training/data/control_methods.py, which only a run imports.
CONTROL_PICTURES = (
    "auto",
    "reference latents",
    "Flux Kontext",
    "Qwen-Image-Edit",
    "Qwen-Image-Edit Plus",
    "concatenated latents",
    "Wan image to video",
    "inpainting mask",
    "off",
)


class GraftDataset(GraftNode):
    """Reads pictures and captions below ComfyUI's input folder and encodes them once."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        from ..training.data.layouts import registry

        return io.Schema(
            node_id="GraftDataset",
            display_name="Dataset",
            category="Graft/training",
            description=(
                "Reads a folder of captioned images under ComfyUI's input folder, sorts them into aspect"
                " ratio buckets, and encodes images and captions once."
            ),
            **aliases("dataset", "training images", "image folder", "captions", "regularisation"),
            inputs=[
                io.String.Input(
                    "folder",
                    display_name="image folder",
                    default="",
                    tooltip=(
                        "A folder under ComfyUI's input folder. Images in a folder named 10_name repeat 10"
                        " times, as in kohya's scripts; the report says which do. Or kohya's dataset_config.toml there."
                        " graft_demo/concept and graft_demo/regular are the demo's; they are put there when they are"
                        " missing."
                    ),
                ),
                io.Vae.Input("vae", tooltip="Encodes the images. Use the VAE of the model you train."),
                io.Clip.Input("clip", tooltip="Encodes the captions. Use the text encoder of the model you train."),
                io.Int.Input(
                    "resolution",
                    display_name="resolution",
                    default=512,
                    min=64,
                    max=8192,
                    step=8,
                    tooltip=(
                        "Trains at this resolution: no image has a larger area than this number squared. Use the size"
                        " of the model: 512 for SD1.x, 1024 for SDXL and newer. Lower it to save memory."
                    ),
                ),
                advanced(
                    io.Boolean,
                    "buckets",
                    display_name="aspect ratio buckets",
                    default=True,
                    tooltip=(
                        "On: keeps the shape of each image as closely as its bucket allows. Off: crops every"
                        " image to a square from its center."
                    ),
                ),
                advanced(
                    io.Int,
                    "bucket_step",
                    display_name="bucket step",
                    default=64,
                    min=8,
                    max=512,
                    step=8,
                    tooltip=(
                        "The sides of the buckets are multiples of this many pixels. 64 suits most models; lower"
                        " it to crop less."
                    ),
                ),
                io.Combo.Input(
                    "captions",
                    display_name="caption source",
                    options=registry.options(),
                    default=registry.AUTO,
                    tooltip=registry.tooltip(),
                ),
                io.Int.Input(
                    "repeats",
                    display_name="repeats",
                    default=1,
                    min=1,
                    max=10000,
                    tooltip=(
                        "How often each image is shown in an epoch. Raise it for a small dataset that you mix"
                        " with a larger one."
                    ),
                ),
                advanced(
                    io.Float,
                    "flip",
                    display_name="flip probability",
                    default=0.0,
                    min=0.0,
                    max=1.0,
                    step=0.05,
                    tooltip=(
                        "How often an image is mirrored. Try 0.5 with few images; keep 0 if left and right"
                        " matter, as with text or asymmetric faces."
                    ),
                ),
                advanced(
                    io.Boolean,
                    "shuffle_tags",
                    display_name="shuffle tags",
                    default=False,
                    tooltip=(
                        "Puts the comma-separated tags in a new order each time an image is shown. Switch it on"
                        " for tag captions, off for sentences."
                    ),
                ),
                advanced(
                    io.Int,
                    "keep_tags",
                    display_name="keep first tags",
                    default=0,
                    min=0,
                    max=1000,
                    tooltip=(
                        "This many tags at the start of a caption never move and never drop out. Set it to 1 if"
                        " each caption starts with a trigger word."
                    ),
                ),
                advanced(
                    io.Float,
                    "tag_dropout",
                    display_name="tag dropout",
                    default=0.0,
                    min=0.0,
                    max=1.0,
                    step=0.05,
                    tooltip=(
                        "Randomly drops each tag this often. Try 0.1 so that the LoRA does not depend on every tag."
                    ),
                ),
                advanced(
                    io.Float,
                    "caption_dropout",
                    display_name="caption dropout",
                    default=0.0,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    tooltip=(
                        "Randomly drops the whole caption this often, on top of the conditioning dropout in"
                        " Objective Settings."
                    ),
                ),
                advanced(
                    io.Int,
                    "clip_skip",
                    display_name="CLIP skip",
                    default=0,
                    min=0,
                    max=24,
                    tooltip=(
                        "Uses an earlier layer of the text encoder, counted from the end: 2 is one layer before"
                        " the last, usual for anime models. 0 leaves it as it is."
                    ),
                ),
                io.Float.Input(
                    "validation",
                    display_name="validation split",
                    default=0.1,
                    min=0.0,
                    max=0.9,
                    step=0.01,
                    tooltip=(
                        "Holds out this fraction of the images to measure the loss on. Which ones depends only"
                        " on their contents. Set it to 0 for very small datasets."
                    ),
                ),
                advanced(
                    io.String,
                    "filters",
                    display_name="filters (YAML)",
                    default="",
                    multiline=True,
                    tooltip=(
                        "YAML that chooses images and changes tags, crops, masks and the cache. Leave empty to"
                        " use everything. The help page lists all keys."
                    ),
                ),
                Dataset.Input(
                    "regularisation",
                    optional=True,
                    tooltip=(
                        "Optional. A second dataset mixed into every batch, so that the model keeps what it"
                        " already knows."
                    ),
                ),
                advanced(
                    io.Float,
                    "regularisation_share",
                    display_name="regularization share",
                    default=0.25,
                    min=0.0,
                    max=0.95,
                    step=0.05,
                    tooltip=(
                        "The fraction of each batch that comes from the regularization dataset: 0.25 is 2 of 8"
                        " images. Raise it if the model forgets."
                    ),
                ),
                advanced(
                    io.Boolean,
                    "weighted_captions",
                    display_name="weighted captions",
                    default=False,
                    optional=True,
                    tooltip=(
                        "Off: brackets in captions are text, as in saber (fate). On: they weigh what is in them, as in"
                        " prompts: (word:1.2). kohya's weighted_captions."
                    ),
                ),
                advanced(
                    io.Boolean,
                    "no_upscale",
                    display_name="no upscale",
                    default=False,
                    optional=True,
                    tooltip=(
                        "On: no image is enlarged. One smaller than the resolution keeps its size, cut to multiples of"
                        " bucket step, and the shape of an image has no limit. kohya's bucket_no_upscale."
                    ),
                ),
                advanced(
                    io.Int,
                    "min_side",
                    display_name="minimum bucket side",
                    default=0,
                    min=0,
                    max=16384,
                    step=8,
                    optional=True,
                    tooltip=(
                        "No side of a bucket is shorter, in pixels: kohya's min_bucket_reso. Set 256 for shapes beyond"
                        " 4:1. 0, with maximum bucket side 0, allows shapes up to 4:1."
                    ),
                ),
                advanced(
                    io.Int,
                    "max_side",
                    display_name="maximum bucket side",
                    default=0,
                    min=0,
                    max=16384,
                    step=8,
                    optional=True,
                    tooltip=(
                        "No side of a bucket is longer, in pixels: kohya's max_bucket_reso. Set 2048 for long panoramas"
                        " at resolution 1024. 0 is no limit of its own."
                    ),
                ),
                Dataset.Input(
                    "more_images",
                    optional=True,
                    tooltip=(
                        "Optional. Another Dataset whose images are trained as well, with its own repeats, captions,"
                        " resolution and batch size. Chain as many as you like."
                    ),
                ),
                advanced(
                    io.Int,
                    "batch_size",
                    display_name="own batch size",
                    default=0,
                    min=0,
                    max=4096,
                    optional=True,
                    tooltip=(
                        "Batches of these images have this size, in place of that of Optimizer Settings. Raise it for"
                        " the lower resolution of two datasets. 0 takes that of Optimizer Settings."
                    ),
                ),
                advanced(
                    io.String,
                    "validation_folder",
                    display_name="validation folder",
                    default="",
                    optional=True,
                    tooltip=(
                        "A folder under ComfyUI's input folder whose images are only used to measure the loss. It"
                        " replaces validation split. Leave empty to use validation split."
                    ),
                ),
                advanced(
                    io.Combo,
                    "control_pictures",
                    display_name="control pictures",
                    options=list(CONTROL_PICTURES),
                    default=CONTROL_PICTURES[0],
                    optional=True,
                    tooltip=(
                        "How an edit model gets the pictures before the edit: name.control.png beside name.png, or"
                        " control/name.png. auto knows Flux Kontext, Flux.2, Qwen-Image-Edit, OmniGen2 and Wan by their"
                        " CLIP. off trains on them as on other pictures."
                    ),
                ),
                advanced(
                    io.String,
                    "frames",
                    display_name="frames of clips",
                    default="0",
                    optional=True,
                    tooltip=(
                        "Trains a video model on clips (mp4, mov, mkv, webm, animated gif and webp, folders of pictures"
                        " named clip.frames): how many frames, as 33, or 1, 17, 33. 0 leaves clips out."
                    ),
                ),
                advanced(
                    io.Float,
                    "frame_rate",
                    display_name="frame rate",
                    default=0.0,
                    min=0.0,
                    max=240.0,
                    step=0.001,
                    optional=True,
                    tooltip=(
                        "Reads clips at this many frames a second. Use that of the model: 16 for Wan 2.1, 24 for"
                        " HunyuanVideo and Wan 2.2 5B. 0 keeps each clip's own."
                    ),
                ),
                advanced(
                    io.Combo,
                    "clip_part",
                    display_name="part of clips",
                    options=list(CLIP_PARTS),
                    default=CLIP_PARTS[0],
                    optional=True,
                    tooltip=(
                        "What is taken of a longer clip. head: its beginning. uniform: 4 parts, spread evenly. chunk:"
                        " one part after the other. slide: a part every 10 frames. full: all of it, up to the most"
                        " frames."
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
    def validate_inputs(
        cls,
        folder=None,
        resolution=None,
        buckets=None,
        bucket_step=None,
        captions=None,
        shuffle_tags=None,
        filters=None,
        no_upscale=None,
        min_side=None,
        max_side=None,
        validation_folder=None,
        frames="0",
        frame_rate=0.0,
        clip_part="head",
    ) -> bool | str:
        """Refuses settings that are wrong, and folders that are not there or have no pictures."""
        return refusal(
            cls,
            _check_values,
            ("folder",),
            ("validation_folder",),
            folder=folder,
            resolution=resolution,
            buckets=buckets,
            bucket_step=bucket_step,
            captions=captions,
            shuffle_tags=shuffle_tags,
            filters=filters,
            no_upscale=no_upscale,
            min_side=min_side,
            max_side=max_side,
            validation_folder=validation_folder,
            frames=frames,
            frame_rate=frame_rate,
            clip_part=clip_part,
        )

    @classmethod
    def fingerprint_inputs(cls, folder="", validation_folder="", **_) -> str:
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
        folder,
        vae,
        clip,
        resolution=512,
        buckets=True,
        bucket_step=64,
        captions="auto",
        repeats=1,
        flip=0.0,
        shuffle_tags=False,
        keep_tags=0,
        tag_dropout=0.0,
        caption_dropout=0.0,
        clip_skip=0,
        validation=0.1,
        filters="",
        regularisation=None,
        regularisation_share=0.25,
        weighted_captions=False,
        no_upscale=False,
        min_side=0,
        max_side=0,
        more_images=None,
        batch_size=0,
        validation_folder="",
        control_pictures="auto",
        frames="0",
        frame_rate=0.0,
        clip_part="head",
    ) -> io.NodeOutput:
        from ..host.demo_files import place_pictures
        from ..training.data.folder_settings import FolderSource, parse_settings
        from .dataset_reading import Reading

        if validation_folder:
            validation = 0.0
        settings = parse_settings(
            filters,
            [*_missing_inputs({"VAE": vae, "CLIP": clip}), *_batch_size_errors(batch_size)],
            resolution=resolution,
            buckets=buckets,
            bucket_step=bucket_step,
            captions=captions,
            repeats=repeats,
            flip=flip,
            validation=validation,
            shuffle_tags=shuffle_tags,
            keep_tags=keep_tags,
            tag_dropout=tag_dropout,
            no_upscale=no_upscale,
            min_side=min_side,
            max_side=max_side,
            control_pictures=control_pictures,
            frames=frames,
            frame_rate=frame_rate,
            clip_part=clip_part,
        )
        placed = [said for name in (folder, validation_folder) if (said := place_pictures(name))]
        notes: list[str] = []
        if host.folders.is_dataset_config(folder):
            sources, notes = _config_sources(folder, settings, caption_dropout, batch_size)
            _refuse_two_regularisations(sources, regularisation)
        else:
            sources = [FolderSource(Path(host.folders.pictures_folder(folder)), settings, caption_dropout, batch_size)]
        if validation_folder:
            sources = [replace(source, settings=replace(source.settings, validation=0.0)) for source in sources]
            sources.append(FolderSource(_validation_folder(validation_folder), settings, is_validation=True))
        reading = Reading(vae, clip, clip_skip, weighted_captions, settings.filters)
        return reading.output(sources, regularisation, regularisation_share, more_images, notes, placed)


def _check_values(folder=None, validation_folder="", filters="", **settings) -> None:
    """Raises an error for settings that are wrong, and for folders that are not there or have no pictures. Without
    settings a dataset_config.toml is not read: what is wrong in it depends on them.
    """
    from ..training.data.folder_reader import pictures_in
    from ..training.data.folder_settings import parse_settings

    read = parse_settings(filters, [], **settings)
    takes_clips = read.takes_clips or "frames" not in settings
    if validation_folder:
        pictures_in(_validation_folder(validation_folder), takes_clips)
    if folder is None:
        return
    if not host.folders.is_dataset_config(folder):
        pictures_in(Path(host.folders.pictures_folder(folder)), takes_clips)
    elif settings:
        _config_sources(folder, read, 0.0, 0)
    else:
        host.folders.input_file(folder)


def _config_sources(folder, settings, caption_dropout, batch_size) -> Any:
    from ..training.data.dataset_config import read_config
    from ..training.data.folder_settings import FolderSource

    root = Path(host.folders.input_root())
    return read_config(
        Path(host.folders.input_file(folder)), root, FolderSource(root, settings, caption_dropout, batch_size)
    )


def _refuse_two_regularisations(sources, regularisation) -> None:
    if regularisation is not None and any(source.is_regularisation for source in sources):
        raise ValueError(
            "Dataset: dataset_config.toml has regularization images (is_reg), and a regularization dataset is connected"
            " too: disconnect it, or take is_reg out."
        )


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


def _batch_size_errors(batch_size: int) -> list[str]:
    if batch_size < 0:
        return [f"own batch size is {batch_size}, expected 0 or more"]
    return []


def _missing_inputs(inputs: dict[str, Any]) -> list[str]:
    missing = [label for label, value in inputs.items() if value is None]
    return [f"{label} is empty: the checkpoint has none; connect one from another loader" for label in missing]


class GraftSamples(GraftNode):
    """Makes a dataset of what a graph gives: latents with a conditioning each."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="GraftSamples",
            display_name="Samples",
            category="Graft/training",
            description=(
                "Makes a dataset of latents and conditionings from the graph, one conditioning for each sample: with"
                " reference images, control, clips or sound, as the model's own nodes make them."
            ),
            **aliases("dataset", "samples", "training images", "edit", "video", "kontext", "image to video"),
            is_input_list=True,
            inputs=[
                io.Latent.Input(
                    "latents",
                    tooltip=(
                        "What to train on: a list of latents of pictures, clips or sound. A batch counts as many"
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
                    tooltip="Optional. A list of masks: the loss counts where they are white. Or one for all.",
                ),
                io.Conditioning.Input(
                    "empty",
                    optional=True,
                    tooltip=(
                        "The conditioning of an empty prompt, for conditioning dropout. Reference latents and the like"
                        " stay those of the sample."
                    ),
                ),
                io.Clip.Input(
                    "clip",
                    optional=True,
                    tooltip="Encodes the empty prompt, if no empty conditioning is connected.",
                ),
                Dataset.Input(
                    "regularisation",
                    optional=True,
                    tooltip="Optional. Another dataset of ordinary images, so that the model does not forget them.",
                ),
                Dataset.Input(
                    "more_images",
                    optional=True,
                    tooltip="Optional. More images to train on, from Dataset or another Samples.",
                ),
                io.Int.Input(
                    "repeats",
                    display_name="repeats",
                    default=1,
                    min=1,
                    max=10_000,
                    tooltip="How often an epoch shows each sample.",
                ),
                io.Float.Input(
                    "validation",
                    display_name="validation split",
                    default=0.1,
                    min=0.0,
                    max=0.9,
                    step=0.01,
                    tooltip=(
                        "The fraction of samples held out to measure the validation loss, chosen by their contents."
                        " 0.1 is usual; 0 trains on all."
                    ),
                ),
                advanced(
                    io.Float,
                    "caption_dropout",
                    display_name="caption dropout",
                    default=0.0,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    tooltip=(
                        "How often a sample is trained with the empty conditioning, on top of conditioning dropout."
                    ),
                ),
                advanced(
                    io.Float,
                    "regularisation_share",
                    display_name="regularization share",
                    default=0.25,
                    min=0.01,
                    max=0.99,
                    step=0.01,
                    tooltip="The fraction of each batch that is regularization images.",
                ),
                advanced(
                    io.Int,
                    "batch_size",
                    display_name="own batch size",
                    default=0,
                    min=0,
                    max=4096,
                    tooltip="Batch size of these samples; clips need a smaller one. 0 uses that of Optimizer Settings.",
                ),
                Dataset.Input(
                    "validation_dataset",
                    optional=True,
                    tooltip=(
                        "Optional. Another dataset, from Samples or Dataset, that measures the validation loss and is"
                        " never trained on. It replaces validation split."
                    ),
                ),
                advanced(
                    io.Float,
                    "loss_weight",
                    display_name="loss weight",
                    default=1.0,
                    min=0.0,
                    max=100.0,
                    step=0.1,
                    optional=True,
                    tooltip="How much these samples count in the loss, beside other images of the run. 1 is usual.",
                ),
            ],
            outputs=[Dataset.Output(display_name="GRAFT_DATASET"), io.String.Output(display_name="report")],
        )

    @classmethod
    def execute(
        cls,
        latents,
        conditioning,
        captions=None,
        masks=None,
        empty=None,
        clip=None,
        regularisation=None,
        more_images=None,
        repeats=(1,),
        validation=(0.1,),
        caption_dropout=(0.0,),
        regularisation_share=(0.25,),
        batch_size=(0,),
        validation_dataset=None,
        loss_weight=(1.0,),
    ) -> io.NodeOutput:
        from ..training.data.samples import SampleSettings
        from . import samples_reading

        measured = _only("validation dataset", validation_dataset)
        share = validation[0]
        if measured is not None:
            share = 0.0
        settings = SampleSettings(repeats[0], share, caption_dropout[0], batch_size[0], loss_weight[0])
        return samples_reading.output(
            latents,
            conditioning,
            captions or [],
            masks or [],
            _only("empty conditioning", empty),
            _only("CLIP", clip),
            settings,
            _only("regularization dataset", regularisation),
            regularisation_share[0],
            _only("more images", more_images),
            measured,
        )


def _only(name: str, values: Any) -> Any:
    """The one value of an input that takes no list; None where it is not connected."""
    if not values:
        return None
    if len(values) > 1:
        raise ValueError(f"Samples: {name} takes one, and {len(values)} are connected.")
    return values[0]


NODES = [GraftDataset, GraftSamples]
