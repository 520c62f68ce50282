"""The settings of the datasets that nodes make, of folders and of samples, and their validation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...settings.declaration import check_values, setting, settings_of
from . import buckets, clip_parts, control_methods
from .buckets import LONGEST_SIDE
from .control_methods import NODES_SIZE, ControlSize
from .filters import Filters
from .layouts import registry
from .yaml_values import shorten

if TYPE_CHECKING:
    from .musubi_jsonl import ListedPicture

NO_CLIPS = "0"
MOST_LENGTH = 1_000  # frames of one part of a clip


@dataclass(frozen=True)
class ConfigSubset:
    """What only a subset of kohya's `dataset_config.toml` says: the caption of images that have none, the ending of the
    caption files, the path of its metadata JSON, and the folders and size of its control pictures; "" or none where it
    does not.
    `listed` are the pictures of musubi-tuner's JSONL file `listed_in`; `resolution` is (width, height) where they
    differ.

    Its images lie directly in the folder, but for listed ones, and the names of folders mean nothing.
    """

    class_tokens: str = ""
    caption_extension: str = ""
    metadata_file: str = ""
    control_folders: tuple[str, ...] = ()
    listed: tuple[ListedPicture, ...] = ()
    listed_in: str = ""
    control_size: ControlSize = NODES_SIZE
    resolution: tuple[int, int] | None = None


@dataclass(frozen=True)
class FolderSettings:
    """The settings of Dataset; plain values, checked on creation. `frames` is text (`read_frames`).

    A folder of kohya's `dataset_config.toml` has settings of its own, with what the file says of it in `subset`. How
    captions are encoded and how much of a batch is regularization are the node's for all of them.
    """

    folder: str = setting(
        "image folder",
        "",
        "A folder under ComfyUI's input folder. Images in a folder named 10_name repeat 10 times, as in kohya's"
        " scripts; the report says which do. You can also enter a kohya dataset_config.toml in that folder."
        " graft_demo/concept and graft_demo/regular are the demo's folders; Graft puts them there if they are missing.",
        kohya=(
            "--train_data_dir, --dataset_config",
            "below ComfyUI's `input`. `10_sks dog` repeats its images ten times, and `sks dog` is the caption of"
            " those without a file. Of a `dataset_config.toml` [the path, as it"
            " is](../web/docs/GraftDataset.md#kohyas-dataset_configtoml)",
        ),
        ai_toolkit=("datasets.folder_path", "below ComfyUI's `input`"),
        onetrainer=("Path, Include Subdirectories", "below ComfyUI's `input`, always with its subfolders"),
        everydream2=("data_root", "below ComfyUI's `input`"),
        diffusers=("--dataset_name", "with `name.win.png`, `name.lose.png` and `name.txt`"),
    )
    resolution: int = setting(
        "resolution",
        512,
        "Trains at this resolution: the largest area of an image is this number squared. Use the size of the model:"
        " 512 for SD1.x, 1024 for SDXL and newer. Lower it to save memory. Above the model's own size, lower the"
        " learning rate: at 768 on SD1.x to half.",
        low=64,
        high=8192,
        step=8,
        kohya=("--resolution", "width and height in `dataset_config.toml`"),
        ai_toolkit=(
            "datasets.resolution",
            "of `[512, 768, 1024]` it is 1024, and `resolutions: [512, 768]` in filters",
        ),
        onetrainer=("Resolution", "further ones in `resolutions` in filters"),
        lunnova=("size", "or unchanged in filters"),
        everydream2="--resolution",
    )
    buckets: bool = setting(
        "aspect ratio buckets",
        True,
        "On: keeps the shape of each image as closely as its bucket allows. Off: crops every image to a square from"
        " its center.",
        advanced=True,
        kohya=("--enable_bucket", "on by default"),
        ai_toolkit="datasets.buckets",
    )
    bucket_step: int = setting(
        "bucket step",
        64,
        "The sides of the buckets are multiples of this many pixels. 64 suits most models; lower it to crop less.",
        low=8,
        high=512,
        step=8,
        advanced=True,
        kohya="--bucket_reso_steps",
        ai_toolkit="datasets.bucket_tolerance",
    )
    captions: str = setting(
        "caption source",
        registry.AUTO,
        registry.tooltip,
        choices=registry.options,
        kohya=("--caption_extension, --in_json", "`txt` reads `.txt` and `.caption`; `metadata` the JSON"),
        ai_toolkit=("datasets.caption_ext", "`txt`"),
        onetrainer=(
            "Prompt Source",
            "file names (up to the first `_`): `yaml`; a single prompt for all: a folder `1_your prompt` without"
            " caption files, or `trigger` in filters",
        ),
        everydream2=("local.yaml, global.yaml", "`yaml`, with the same files"),
    )
    repeats: int = setting(
        "repeats",
        1,
        "How often each image is shown in an epoch. Raise it for a small dataset that you mix with a larger one.",
        low=1,
        high=10000,
        ai_toolkit="datasets.num_repeats",
        onetrainer=("Balancing", "or a number in front of the folder's name"),
        everydream2=("multiply.txt", "or the file unchanged"),
    )
    flip: float = setting(
        "flip probability",
        0.0,
        "How often an image is mirrored. Try 0.5 with few images; keep 0 if left and right matter, as with text or"
        " asymmetric faces.",
        low=0.0,
        high=1.0,
        step=0.05,
        advanced=True,
        kohya=("--flip_aug", "0.5"),
        ai_toolkit=(
            "datasets.flip_x",
            "0.5, as often mirrored, but drawn each time, where AI-Toolkit doubles the images",
        ),
        onetrainer=("Random Flip", "0.5"),
        everydream2="--flip_p",
        lunnova=("flip_p", "or unchanged in filters"),
        diffusers=("--no_hflip", "0, the default"),
    )
    shuffle_tags: bool = setting(
        "shuffle tags",
        False,
        "Puts the comma-separated tags in a new order each time an image is shown. Switch it on for tag captions,"
        " off for sentences.",
        advanced=True,
        kohya="--shuffle_caption",
        ai_toolkit="datasets.shuffle_tokens",
        onetrainer=("Tag Shuffling", "with `tag_separator` in filters for Tag Delimiter"),
        everydream2="--shuffle_tags",
    )
    keep_tags: int = setting(
        "keep first tags",
        0,
        "This many tags at the start of a caption never move and never drop out. Set it to 1 if each caption starts"
        " with a trigger word.",
        low=0,
        high=1000,
        advanced=True,
        kohya="--keep_tokens",
        ai_toolkit="datasets.keep_tokens",
        onetrainer="Keep Tag Count",
        everydream2="--keep_tags",
    )
    tag_dropout: float = setting(
        "tag dropout",
        0.0,
        "Randomly drops each tag this often. Try 0.1 so that the LoRA does not depend on every tag.",
        low=0.0,
        high=1.0,
        step=0.05,
        advanced=True,
        kohya="--caption_tag_dropout_rate",
        ai_toolkit="datasets.token_dropout_rate",
        onetrainer="Tag Dropout",
    )
    caption_dropout: float = setting(
        "caption dropout",
        0.0,
        "Randomly drops the whole caption this often, on top of the conditioning dropout in Objective Settings.",
        low=0.0,
        high=1.0,
        step=0.01,
        advanced=True,
        kohya=("--caption_dropout_rate", "conditioning dropout of Objective Settings comes on top"),
    )
    clip_skip: int = setting(
        "CLIP skip",
        0,
        "Uses an earlier layer of the text encoder, counted from the end: 2 is one layer before the last, usual for"
        " anime models. 0 does not change it.",
        low=0,
        high=24,
        advanced=True,
        kohya="--clip_skip",
        onetrainer=("Clip Skip", "on SD 1.5 OneTrainer's 1 is Graft's 2: it counts skipped layers"),
        everydream2=("--clip_skip", "the same number, with CLIP skip from model's own layer on"),
    )
    validation: float = setting(
        "validation split",
        0.1,
        "Holds out this fraction of the images to measure the loss on. Which ones depends only on their contents."
        " Set it to 0 for very small datasets.",
        low=0.0,
        high=0.9,
        step=0.01,
        kohya="--validation_split",
    )
    filters: Filters = setting(  # noqa: RUF009
        "filters (YAML)",
        "",
        "YAML that chooses images and changes tags, crops, masks and the cache. Leave empty to use everything. The"
        " help page lists all keys.",
        multiline=True,
        read=Filters.parse,
        advanced=True,
    )
    regularization_share: float = setting(
        "regularization share",
        0.25,
        "The fraction of each batch that comes from the regularization dataset: 0.25 is 2 of 8 images. Raise it if"
        " the model forgets.",
        low=0.0,
        high=0.95,
        step=0.05,
        advanced=True,
        kohya=(
            "--reg_data_dir",
            "a second Dataset goes to regularization dataset of the first. kohya shows as many regularization"
            " images as others; here a quarter by default",
        ),
    )
    weighted_captions: bool = setting(
        "weighted captions",
        False,
        "Off: brackets in captions are plain text, as in saber (fate). On: they weight the words inside, as in"
        " prompts: (word:1.2). kohya's weighted_captions.",
        advanced=True,
        kohya="--weighted_captions",
    )
    no_upscale: bool = setting(
        "no upscale",
        False,
        "On: no image is enlarged. An image smaller than the resolution keeps its size, cropped to multiples of"
        " bucket step, and image shapes have no limit. kohya's bucket_no_upscale.",
        advanced=True,
        kohya="--bucket_no_upscale",
    )
    min_side: int = setting(
        "minimum bucket side",
        0,
        "No side of a bucket is shorter, in pixels: kohya's min_bucket_reso. Set 256 for shapes beyond 4:1. 0, with"
        " maximum bucket side 0, allows shapes up to 4:1.",
        low=0,
        high=LONGEST_SIDE,
        step=8,
        advanced=True,
        kohya=("--min_bucket_reso", "without it and the next, shapes up to 4:1 are allowed"),
    )
    max_side: int = setting(
        "maximum bucket side",
        0,
        "No side of a bucket is longer, in pixels: kohya's max_bucket_reso. Set 2048 for long panoramas at resolution"
        " 1024. 0 means no limit.",
        low=0,
        high=LONGEST_SIDE,
        step=8,
        advanced=True,
        kohya="--max_bucket_reso",
    )
    batch_size: int = setting(
        "own batch size",
        0,
        "The batch size for these images, instead of the one in Optimizer Settings. Raise it for the lower resolution"
        " of two datasets. 0 uses the one in Optimizer Settings.",
        low=0,
        high=4096,
        advanced=True,
    )
    validation_folder: str = setting(
        "validation folder",
        "",
        "A folder under ComfyUI's input folder whose images are only used to measure the loss. It replaces"
        " validation split. Leave empty to use validation split.",
        advanced=True,
        lunnova=(
            "validation",
            "its filters go into `validation` in filters. LunNova's is part of the same images",
        ),
        onetrainer=("Concept Type VALIDATION", "without one Graft draws the held-out images: validation split"),
    )
    control_pictures: str = setting(
        "control pictures",
        control_methods.AUTO,
        "How an edit model gets the pictures before the edit: name.control.png beside name.png, or control/name.png."
        " auto recognizes Flux Kontext, Flux.2, Qwen-Image-Edit, OmniGen2 and Wan by their CLIP. off trains on them"
        " like on other pictures.",
        choices=control_methods.options,
        advanced=True,
        ai_toolkit=(
            "datasets.control_path, control_path_1, control_path_2, control_path_3",
            "folders `control`, `control2`, `control3` inside the images' folder or beside it, files of the same names",
        ),
    )
    frames: str = setting(
        "frames of clips",
        NO_CLIPS,
        "Trains a video model on clips (mp4, mov, mkv, webm, animated gif and webp, folders of pictures named"
        " clip.frames): how many frames to take, such as 33, or 1, 17, 33. 0 leaves clips out.",
        advanced=True,
        ai_toolkit=(
            "datasets.num_frames",
            "with frame rate. AI-Toolkit spreads the frames over the whole clip; Graft takes frames that follow"
            " each other",
        ),
    )
    frame_rate: float = setting(
        "frame rate",
        0.0,
        "Reads clips at this many frames per second. Use the model's rate: 16 for Wan 2.1, 24 for HunyuanVideo and"
        " Wan 2.2 5B. 0 keeps each clip's own rate.",
        low=0.0,
        high=240.0,
        step=0.001,
        advanced=True,
    )
    clip_part: str = setting(
        "part of clips",
        clip_parts.HEAD,
        "Which part of a longer clip to take. head: its beginning. uniform: 4 parts, spread evenly. chunk: one part"
        " after the other. slide: a part every 10 frames. full: all of it, up to the most frames.",
        choices=clip_parts.WAYS,
        advanced=True,
    )
    skip_from_own: bool = setting(
        "CLIP skip from model's own layer",
        False,
        "Counts CLIP skip from the layer that the model uses by itself, as EveryDream2 does: 0 and 1 change nothing,"
        " 2 is one layer further back. Switch it on for its numbers on SD 2.x and SDXL, whose own layer is the one"
        " before the last.",
        advanced=True,
        everydream2=("--clip_skip", "on"),
    )
    subset: ConfigSubset | None = None
    frame_step: int = 1  # of the VAE: it takes multiples of this and one more; 0: pictures only

    def __post_init__(self) -> None:
        check_values(self, "Dataset", _take_from_filters, _wrong_sizes, _wrong_buckets, _wrong_captions, _wrong_clips)
        self.bucket_choices()  # raises ValueError where resolution and bucket_step do not fit

    @property
    def takes_clips(self) -> bool:
        """Whether clips are read."""
        return bool(read_frames(self.frames))

    @property
    def frame_counts(self) -> list[int]:
        """How many frames the parts of clips have, as the VAE takes them, fewest first."""
        return sorted({clip_parts.round_frames(count, max(1, self.frame_step)) for count in read_frames(self.frames)})

    @property
    def own_resolution(self) -> tuple[int, int]:
        """(width, height) of the resolution; `resolution` is a side of the square with its area."""
        if self.subset is not None and self.subset.resolution is not None:
            return self.subset.resolution
        return self.resolution, self.resolution

    @property
    def resolutions(self) -> tuple[tuple[int, int], ...]:
        """(width, height) of every base resolution that images are trained at."""
        squares = ((side, side) for side in self.filters.resolutions)
        return tuple(dict.fromkeys((self.own_resolution, *squares)))

    def bucket_choices(self) -> list[list[tuple[int, int]]]:
        """(width, height) of the buckets of each resolution; its own size without buckets. Raises ValueError where the
        resolution and bucket_step do not fit.
        """
        choices: list[list[tuple[int, int]]] = []
        for resolution in self.resolutions:
            sizes = buckets.bucket_sizes(resolution, self.bucket_step, self.min_side, self.max_side)
            if not self.buckets:
                sizes = [resolution]
            choices.append(sizes)
        return choices


def _take_from_filters(settings: FolderSettings) -> Iterable[str]:
    """Take resolution and flip probability that the filters say, which is never wrong. They are taken once, so that a
    dataset_config.toml may say others.
    """
    filters = settings.filters
    if filters.size is not None:
        object.__setattr__(settings, "resolution", filters.size)
    if filters.flip_p is not None:
        object.__setattr__(settings, "flip", filters.flip_p)
    object.__setattr__(settings, "filters", replace(filters, size=None, flip_p=None))
    return ()


def _wrong_sizes(settings: FolderSettings) -> list[str]:
    if settings.buckets:
        return []
    sizes = [size for size in settings.resolutions if size[0] % 8 or size[1] % 8]
    return [f"resolution is {buckets.name_of(size)}, expected a multiple of 8" for size in sizes]


def _wrong_buckets(settings: FolderSettings) -> list[str]:
    """Settings of buckets that would do nothing beside others."""
    errors: list[str] = []
    has_sides = bool(settings.min_side or settings.max_side)
    if settings.no_upscale and not settings.buckets:
        errors.append("no upscale has no effect without aspect ratio buckets; switch one of them")
    if has_sides and not settings.buckets:
        errors.append("minimum and maximum bucket side have no effect without aspect ratio buckets; set them to 0")
    if has_sides and settings.no_upscale:
        errors.append(
            "minimum and maximum bucket side have no effect with no upscale, which takes each image's own size; set"
            " them to 0"
        )
    if settings.max_side and settings.min_side > settings.max_side:
        errors.append(
            f"minimum bucket side is {settings.min_side}, larger than maximum bucket side ({settings.max_side})"
        )
    if settings.no_upscale and settings.filters.small == "skip":
        errors.append("small: skip of filters has no effect with no upscale, which enlarges no image")
    return errors


def _wrong_captions(settings: FolderSettings) -> list[str]:
    errors: list[str] = []
    if settings.shuffle_tags and settings.filters.shuffle_tag_p is not None:
        errors.append("shuffle tags shuffles always and shuffle_tag_p of filters now and then; set one of them")
    options = registry.names_where_scores_are_read()
    if settings.filters.needs_scores and settings.captions not in options:
        errors.append(
            "abs_min_score, min_score and score_tags need scores from JSON files; caption source"
            f" {settings.captions} reads none, {' and '.join(options)} do"
        )
    return errors


def _wrong_clips(settings: FolderSettings) -> list[str]:
    errors: list[str] = []
    try:
        takes_clips = bool(read_frames(settings.frames))
    except ValueError as error:
        return [f"frames of clips is {shorten(settings.frames)}, expected {error}"]
    for name, way in (("frame_sample", "uniform"), ("frame_stride", "slide")):
        if getattr(settings.filters, name) != getattr(Filters, name) and settings.clip_part != way:
            errors.append(f"{name} of filters has no effect with part of clips {settings.clip_part}; set it to {way}")
    if not takes_clips and (settings.frame_rate or settings.clip_part != clip_parts.HEAD):
        errors.append(
            "frame rate and part of clips have no effect with frames of clips 0; set it to 17, for example, or"
            f" frame rate to 0 and part of clips to {clip_parts.HEAD}"
        )
    return errors


def read_frames(text: str) -> tuple[int, ...]:
    """The numbers in `frames`, none where clips are left out. Raises ValueError that says what was expected."""
    words = [word.strip() for word in text.split(",")]
    if words in ([""], [NO_CLIPS]):
        return ()
    if not all(word.isdecimal() and 1 <= int(word[:9]) <= MOST_LENGTH for word in words):
        raise ValueError(f"numbers from 1 to {MOST_LENGTH:,}, as 17 or 1, 17, 33; 0 leaves clips out")
    return tuple(map(int, words))


@dataclass(frozen=True)
class FolderSource:
    """A folder with settings of its own, one of those that a dataset is made of."""

    folder: Path
    settings: FolderSettings
    is_regularization: bool = False
    is_validation: bool = False


def read_settings(values: Mapping[str, Any]) -> FolderSettings:
    """The settings in a node's inputs as the editor sends them, what is missing at its default; other inputs are left
    alone. Raises ValueError for what is wrong with them.
    """
    return FolderSettings(**{name: values[name] for name in settings_of(FolderSettings) if name in values})


@dataclass(frozen=True)
class SampleSettings:
    """The settings of Samples; plain values, checked on creation. `batch_size` 0 is that of the run."""

    repeats: int = setting(
        "repeats",
        1,
        "How often an epoch shows each sample.",
        low=1,
        high=10000,
    )
    validation: float = setting(
        "validation split",
        0.1,
        "The fraction of samples held out to measure the validation loss, chosen by their contents. 0.1 is usual; 0"
        " trains on all.",
        low=0.0,
        high=0.9,
        step=0.01,
    )
    caption_dropout: float = setting(
        "caption dropout",
        0.0,
        "How often a sample is trained with the empty conditioning, in addition to conditioning dropout.",
        low=0.0,
        high=1.0,
        step=0.01,
        advanced=True,
    )
    regularization_share: float = setting(
        "regularization share",
        0.25,
        "The share of regularization images in each batch.",
        low=0.01,
        high=0.99,
        step=0.01,
        advanced=True,
    )
    batch_size: int = setting(
        "own batch size",
        0,
        "Batch size of these samples; clips need a smaller one. 0 uses the one in Optimizer Settings.",
        low=0,
        high=4096,
        advanced=True,
    )
    loss_weight: float = setting(
        "loss weight",
        1.0,
        "How much these samples count in the loss, compared with other images of the run. 1 is usual.",
        low=0.0,
        high=100.0,
        step=0.1,
        advanced=True,
    )

    def __post_init__(self) -> None:
        check_values(self, "Samples")
