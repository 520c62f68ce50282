"""A dataset in memory: images as latents, masks, captions and their encoded conditionings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ...storage.digest import sha256
from .buckets import Framing
from .tags import Caption

if TYPE_CHECKING:
    from ..objective.slider import SliderSettings
    from .changed_files import WatchedFiles
    from .parts import Parts
    from .stored_latent import Latent


@dataclass(frozen=True, eq=False)
class Conditioning:
    """The output of a text encoder for one caption: `context` (1, T, C) and the other entries of the host's
    conditioning (pooled output …).
    """

    context: Tensor
    extras: Mapping[str, Any] = field(default_factory=dict)


class StoredConditioning:
    """A conditioning that `read` reads anew each time."""

    def __init__(self, read: Callable[[], Conditioning]) -> None:
        self.read = read


def read_conditioning(conditioning: Conditioning | StoredConditioning) -> Conditioning:
    """The conditioning, wherever it is."""
    if isinstance(conditioning, StoredConditioning):
        return conditioning.read()
    return conditioning


_PICTURES = "\0pictures "


def prompt_key(caption: str, seen: str) -> str:
    """The key of a caption's conditioning: the caption itself, or with the key of the pictures that the text encoder
    sees too.
    """
    if not seen:
        return caption
    return f"{caption}{_PICTURES}{seen}"


def prompt_parts(key: str) -> tuple[str, str]:
    """(the caption, the key of the pictures that the text encoder sees) of such a key."""
    caption, _, seen = key.partition(_PICTURES)
    return caption, seen


@dataclass(frozen=True, eq=False)
class SampleConditioning:
    """The conditioning that a sample brings in place of its caption's. `empty` takes its place where the caption is
    dropped; None where it never is.
    """

    conditioning: Conditioning | StoredConditioning
    empty: Conditioning | None = None


@dataclass(frozen=True, eq=False)
class WorsePicture:
    """The picture of a preference pair that people like less, or the other picture of a slider's pair, cropped like the
    better one: its latent (C, h, w), and that of it flipped if the pair may be flipped. `sha256` is the content hash of
    the worse one's file.
    """

    latent: Latent
    flipped_latent: Latent | None = None
    sha256: str = ""

    def latent_as(self, flipped: bool) -> Tensor:
        """Its latent as it is, or flipped."""
        from .stored_latent import read_latent

        if flipped and self.flipped_latent is not None:
            return read_latent(self.flipped_latent)
        return read_latent(self.latent)


@dataclass(frozen=True, eq=False)
class ImageCrop:
    """One crop of an image: latent (C, h, w) in float32, the flipped image's latent if it may be flipped, loss mask
    (1, h, w) in 0..1, and where the crop lies.

    `extras` are entries of the conditioning that belong to this image and not to its caption, as reference latents;
    they replace those of the caption. `flipped_extras` are those of the flipped image, where they differ. `seen` are
    the keys of the control pictures that the text encoder sees with the caption, of the image as it is and flipped; ""
    where it sees none. `brought` is the conditioning of a sample that brings its own. `worse` is the other picture of a
    preference pair.
    """

    latent: Latent
    flipped_latent: Latent | None = None
    mask: Tensor | None = None
    framing: Framing | None = None
    extras: Mapping[str, Any] = field(default_factory=dict)
    flipped_extras: Mapping[str, Any] | None = None
    seen: tuple[str, str] = ("", "")
    brought: SampleConditioning | None = None
    worse: WorsePicture | None = None

    def extras_of(self, flipped: bool) -> Mapping[str, Any]:
        """The entries of the conditioning that belong to the image as it is, or flipped."""
        if flipped and self.flipped_extras is not None:
            return self.flipped_extras
        return self.extras

    def prompt(self, caption: str, flipped: bool) -> str:
        """Under which key the dataset's conditionings have that caption of this crop."""
        return prompt_key(caption, self.seen[flipped])


@dataclass(frozen=True, eq=False)
class DatasetImage:
    """One training image: its name for messages, its caption, and its first crop (latent, flipped latent, mask,
    framing, extras, flipped extras, seen pictures, worse picture).

    `repeats` counts per epoch and may be a fraction. `caption` never varies (validation uses it); `caption_template`
    is there if it does: shuffled tags, wildcards. `other_crops` are further crops with `crop: random`. `flip` and
    `dropout` override the dataset's chances (`dropout` the objective's too). Images of different `batch_id`s never
    share a batch. `loss_weight` scales the loss.

    Of a dataset that is one of several: `batch_size` is its own (0: the run's), `resolution` its base resolution, and
    `caption_dropout` overrides that of the whole. Images that differ in the first two never share a batch. `sha256` is
    the content hash of the file, where there is one. `brought` is the conditioning of a sample that brings its own.
    `prompt_set` says with which prompts of a slider it is trained. `parts` are the shapes of what a latent of video
    with its sound packs (`parts`); its extras have them too, for the host.
    """

    name: str
    caption: str
    latent: Latent
    flipped_latent: Latent | None = None
    repeats: float = 1
    mask: Tensor | None = None
    framing: Framing | None = None
    other_crops: tuple[ImageCrop, ...] = ()
    caption_template: Caption | None = None
    flip: float | None = None
    dropout: float | None = None
    batch_id: str = ""
    loss_weight: float = 1.0
    batch_size: int = 0
    resolution: int = 0
    caption_dropout: float | None = None
    sha256: str = ""
    extras: Mapping[str, Any] = field(default_factory=dict)
    flipped_extras: Mapping[str, Any] | None = None
    seen: tuple[str, str] = ("", "")
    brought: SampleConditioning | None = None
    worse: WorsePicture | None = None
    prompt_set: int = 0
    parts: Parts = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape (C, [frames,] h, w) of its latent, (C, T) of sound; of video with sound that of the video."""
        if self.parts:
            return self.parts[0]
        return tuple(self.latent.shape)

    @property
    def size(self) -> tuple[int, ...]:
        """What latents have in common that share a batch: their shape, or those of all parts in a row."""
        if self.parts:
            return tuple(length for part in self.parts for length in part)
        return tuple(self.latent.shape)

    @property
    def sides(self) -> str:
        """Its width and height, such as 512x768: in pixels where they are known, else those of the latent."""
        return "x".join(map(str, self.framing.target if self.framing else reversed(self.shape[1:][-2:])))

    def crop(self, number: int) -> ImageCrop:
        """The crop of that number; 0 is the first one."""
        if number:
            return self.other_crops[number - 1]
        return ImageCrop(
            self.latent,
            self.flipped_latent,
            self.mask,
            self.framing,
            self.extras,
            self.flipped_extras,
            self.seen,
            self.brought,
            self.worse,
        )


@dataclass(frozen=True, eq=False)
class Dataset:
    """Training images, held-out images and encoded captions (the empty caption too); immutable. `digest` identifies the
    contents.

    `conditionings` may encode other captions when they are asked for (`conditionings.Conditionings`).
    """

    images: tuple[DatasetImage, ...]
    conditionings: Mapping[str, Conditioning]
    digest: str
    held_out: tuple[DatasetImage, ...] = ()
    flip: float = 0.0
    caption_dropout: float = 0.0
    regularization: Dataset | None = None
    regularization_share: float = 0.0
    report: str = ""
    unhashed: tuple[str, ...] = ()  # parts of the encoders that cannot be hashed, so the digest leaves them out
    clip_skip: int = 0  # of the encoder that made the conditionings, for encoding the captions again
    weighted_captions: bool = False  # whether brackets in captions weigh what is in them, for the same
    workers: int = 0  # threads that prepare batches ahead; not part of the digest
    write_schedule: bool = False
    watched: tuple[WatchedFiles, ...] = ()  # the files it was read from
    kohya_metadata: Mapping[str, Any] = field(default_factory=dict)  # for saved LoRAs: `kohya_metadata.folder_metadata`
    batch_size: int = 0  # of its images; 0: that of the run
    resolution: int = 0  # its base resolution, and the name of its folder; neither is part of the digest
    folder: str = ""
    encoders: tuple[str, str] = ("", "")  # hashes of VAE and text encoder, which the digest has
    pictures: Callable[[], Dataset] | None = None  # the same files as pictures, by `pictures.read`; not in the digest
    slider: SliderSettings | None = None  # it trains a slider: `sliders` makes such datasets
    has_pictures: bool = True  # else its latents are empty, and a slider is trained from noise

    @property
    def trigger(self) -> str:
        """The trigger word of its filters, "" without one."""
        settings: Mapping[str, Any] = self.kohya_metadata.get("settings", {})
        return str(settings.get("modelspec.trigger_phrase", ""))

    def __post_init__(self) -> None:
        if not self.images:
            raise ValueError("A dataset needs at least one image to train on.")
        encoded = [image for image in self.images + self.held_out if image.brought is None]
        captions = {image.caption for image in encoded if not any(image.seen)}
        if encoded:
            captions.add("")
        missing = sorted(captions - self.conditionings.keys())
        if missing:
            raise ValueError(
                f"Captions without conditioning ({len(missing)}; the empty caption is always needed): {missing[:5]}"
            )
        if self.regularization is not None:
            self._check_regularization(self.regularization)

    def _check_regularization(self, other: Dataset) -> None:
        if not 0.0 < self.regularization_share < 1.0:
            raise ValueError(f"regularization share is {self.regularization_share}, expected above 0 and below 1.")
        if other.slider is not None:
            raise ValueError("A slider is connected as regularization dataset: connect Dataset instead.")
        if other.regularization is not None:
            raise ValueError("The regularization dataset has a regularization dataset of its own: connect only one.")
        if any(image.batch_size for image in other.images):
            raise ValueError(
                "The regularization dataset has a batch size of its own, and its share of each batch says how many of"
                " its images there are: set its own batch size to 0."
            )
        channels = self.images[0].shape[0]
        other_channels = other.images[0].shape[0]
        if channels != other_channels:
            raise ValueError(
                f"Latents have {channels} channels and those of the regularization dataset {other_channels}: use the"
                " same VAE for both."
            )

    @property
    def loader_threads(self) -> int:
        """How many threads prepare its batches ahead, images of its regularization dataset among them."""
        if self.regularization is None:
            return self.workers
        return max(self.workers, self.regularization.workers)

    @property
    def brings_conditionings(self) -> bool:
        """Whether any sample brings its own conditioning, which no text encoder can make again."""
        images = self.images + self.held_out
        if self.regularization is not None and self.regularization.brings_conditionings:
            return True
        return any(image.brought is not None for image in images)

    @property
    def has_sound(self) -> bool:
        """Whether any image is a video with its sound."""
        images = self.images + self.held_out
        if self.regularization is not None and self.regularization.has_sound:
            return True
        return any(image.parts for image in images)

    def as_pictures(self) -> Dataset:
        """The same images as pictures, for VAE training. Raises ValueError where they were not read from files."""
        if self.slider is not None:
            raise ValueError(
                "VAE training needs pictures, and Slider is connected, which trains a LoRA. Connect Dataset instead."
            )
        if self.pictures is None:
            raise ValueError(
                "VAE training needs pictures, and this dataset has latents only, as Samples makes it. Connect Dataset,"
                " with a folder of images."
            )
        return self.pictures()

    @classmethod
    def from_latents(
        cls,
        latents: Sequence[Tensor],
        captions: Sequence[str],
        conditionings: Mapping[str, Conditioning],
        held_out: Sequence[int] = (),
        **settings: Any,
    ) -> Dataset:
        """A dataset of latents in memory.

        Args:
            latents: (C, h, w) each.
            captions: one for each latent.
            conditionings: by caption.
            held_out: the indices of those that are kept for validation.
            settings: further fields of the dataset.

        Raises:
            ValueError: for more latents than captions, or the other way round.
        """
        if len(latents) != len(captions):
            raise ValueError(f"{len(latents)} latents and {len(captions)} captions: expected one caption a latent.")
        train: list[DatasetImage] = []
        validation: list[DatasetImage] = []
        entries = sorted((key, str(value)) for key, value in settings.items() if key != "regularization")
        digest = sha256(repr((sorted(held_out), entries)).encode())
        for index, (latent, caption) in enumerate(zip(latents, captions, strict=True)):
            own = latent.detach().float().cpu()
            image = DatasetImage(str(index), caption, own)
            digest.update(caption.encode() + _tensor_bytes(own))
            if index in held_out:
                validation.append(image)
            else:
                train.append(image)
        for caption in sorted(conditionings):
            digest.update(caption.encode() + _tensor_bytes(conditionings[caption].context))
        if settings.get("regularization") is not None:
            digest.update(settings["regularization"].digest.encode())
        return cls(tuple(train), dict(conditionings), digest.hexdigest(), tuple(validation), **settings)


def _tensor_bytes(tensor: Tensor) -> bytes:
    return tensor.detach().float().cpu().contiguous().numpy().tobytes()
