"""How models take control pictures: one record for each way, each as ComfyUI's own node for those models does it.

A record says how a picture is scaled for the VAE, whether the text encoder sees it too, and which entries the
conditioning gets.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import images
from .buckets import Framing, frame

if TYPE_CHECKING:
    from PIL import Image

AUTO, OFF = "auto", "off"
_MOST_DIFFERENCE = 0.01  # of the aspect ratios of pictures that have the same shape
_REFERENCE_STEP = 16  # the sides of references are multiples of it: the VAE's 8 pixels times the model's patches of 2
_MEGAPIXEL, _SEEN_PIXELS = 1024 * 1024, 384 * 384
# The sizes that Flux Kontext was trained on, as in ComfyUI's FluxKontextImageScale.
_KONTEXT_SIZES = (
    (672, 1568),
    (688, 1504),
    (720, 1456),
    (752, 1392),
    (800, 1328),
    (832, 1248),
    (880, 1184),
    (944, 1104),
    (1024, 1024),
    (1104, 944),
    (1184, 880),
    (1248, 832),
    (1328, 800),
    (1392, 752),
    (1456, 720),
    (1504, 688),
    (1568, 672),
)
_EDIT_PLUS_TEMPLATE = (
    "<|im_start|>system\nDescribe the key features of the input image (color, shape, size, texture, objects,"
    " background), then explain how the user's text instruction should alter or modify the image. Generate a new image"
    " that meets the user's requirements while maintaining consistency with the original input where"
    " appropriate.<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)


@dataclass(frozen=True)
class FramedControl:
    """A control picture (RGB) beside its image: `framing` is that of the image, `frames` how many frames the model
    generates. `image` is the image itself, for methods that need it.
    """

    picture: Image.Image
    framing: Framing
    frames: int = 1
    image: Image.Image | None = None

    @property
    def has_shape_of_image(self) -> bool:
        """Whether it has the aspect ratio of its image, so that it is cropped with it."""
        return has_same_shape(self.picture.size, self.framing.original)

    def cut(self) -> Tensor:
        """Its pixels (1, H, W, 3) at its own size: what is left of it when it is cropped with its image."""
        if not self.has_shape_of_image or self.framing.kept == 1.0:
            return images.image_tensor(self.picture)
        across = self.picture.width / self.framing.scaled[0]
        down = self.picture.height / self.framing.scaled[1]
        left, top, right, bottom = self.framing.box
        box = round(left * across), round(top * down), round(right * across), round(bottom * down)
        return images.image_tensor(self.picture.crop(box))

    def as_image(self) -> Tensor:
        """Its pixels at the size of the image; one of another shape is cropped around its center."""
        framing = self.framing
        if not self.has_shape_of_image:
            framing = frame(self.picture.size, self.framing.target)
        return images.image_tensor(images.crop_image(self.picture, framing))


@dataclass(frozen=True)
class ControlMethod:
    """One way to give control pictures to a model.

    `for_vae` gives the pixels that the VAE encodes; `entries` makes those of the conditioning of the latents of all
    pictures. With `seen` the text encoder gets pictures too: of those pixels, with the caption
    as `prompt` gives it, (text, options of the tokenizer). `tokenizers` are the classes of ComfyUI's tokenizers by
    which `auto` knows the models. With `mask` the control picture is a mask (8 bit, of the size of the image) of the
    image, whose pixels `for_vae` needs, and the conditioning gets it too.
    """

    name: str
    node: str  # of ComfyUI, that does the same
    models: str  # for people
    for_vae: Callable[[FramedControl], Tensor]
    entries: Callable[[Sequence[Tensor]], dict[str, Any]]
    most: int = 3  # pictures of one image
    tokenizers: tuple[str, ...] = ()
    seen: Callable[[FramedControl], Tensor] | None = None
    prompt: Callable[[str, int], tuple[str, dict[str, str]]] | None = None
    mask: Callable[[FramedControl], Tensor] | None = None


@dataclass(frozen=True)
class ControlSize:
    """The size of control pictures as musubi-tuner's files say it: about `area` pixels (0: as the method says), or
    `kept` as it is, up to that area if there is one.
    """

    area: int = 0
    kept: bool = False

    def __str__(self) -> str:
        area = f"{self.area:,} pixels"
        if not self.kept:
            return f"at {area}"
        if not self.area:
            return "at their own size"
        return f"at their own size, up to {area}"

    def fit(self, control: FramedControl) -> Tensor:
        """The pixels of a picture at this size: sides in multiples of 16."""
        pixels = control.cut()
        width, height = pixels.shape[2], pixels.shape[1]
        if self.kept and not 0 < self.area < width * height:
            return _cut_to_steps(pixels, _REFERENCE_STEP)
        return _lanczos(pixels, _sides((width, height), self.area, _REFERENCE_STEP))


NODES_SIZE = ControlSize()


def has_same_shape(size: tuple[int, int], other: tuple[int, int]) -> bool:
    """Whether two pictures (width, height) have the same aspect ratio, but for the rounding of their sides."""
    first, second = size[0] * other[1], size[1] * other[0]
    return abs(first - second) <= _MOST_DIFFERENCE * max(first, second)


def _reference(control: FramedControl) -> Tensor:
    if control.has_shape_of_image:
        return control.as_image()
    area = control.framing.target[0] * control.framing.target[1]
    width, height = _sides(control.picture.size, area, _REFERENCE_STEP)
    whole = Framing(control.picture.size, (width, height), 0, 0, (width, height))
    return images.image_tensor(images.crop_image(control.picture, whole))


def _kontext(control: FramedControl) -> Tensor:
    pixels = control.cut()
    height, width = pixels.shape[1:3]
    size = min((abs(width / height - w / h), w, h) for w, h in _KONTEXT_SIZES)[1:]
    return _lanczos(_cut_to_shape(pixels, size[0] / size[1]), size)


def _cut_to_shape(pixels: Tensor, aspect: float) -> Tensor:
    """The middle of a picture (1, H, W, 3), of that aspect ratio."""
    height, width = pixels.shape[1:3]
    left = top = 0
    if width / height > aspect:
        left = round((width - width * (aspect / (width / height))) / 2)
    elif width / height < aspect:
        top = round((height - height * ((width / height) / aspect)) / 2)
    return pixels[:, top : height - top, left : width - left]


def _cut_to_steps(pixels: Tensor, step: int) -> Tensor:
    """The middle of a picture (1, H, W, 3), of sides in multiples of `step`; one that is smaller is enlarged."""
    height, width = pixels.shape[1:3]
    if min(width, height) < step:
        return _lanczos(pixels, _sides((width, height), max(width * height, step * step), step))
    top, left = height % step // 2, width % step // 2
    return pixels[:, top : top + height // step * step, left : left + width // step * step]


def _lanczos(pixels: Tensor, size: tuple[int, int]) -> Tensor:
    from PIL import Image

    picture = Image.fromarray((pixels[0] * 255.0).clamp(0, 255).to(torch.uint8).numpy())
    return images.image_tensor(picture.resize(size, Image.Resampling.LANCZOS))


def _area_scaler(area: int, step: int = 1) -> Callable[[FramedControl], Tensor]:
    """Scales a picture to an area, each pixel the mean of those that it covers."""

    def scale(control: FramedControl) -> Tensor:
        pixels = control.cut()
        width, height = _sides((pixels.shape[2], pixels.shape[1]), area, step)
        scaled = torch.nn.functional.interpolate(pixels.movedim(-1, 1), size=(height, width), mode="area")
        return scaled.movedim(1, -1)

    return scale


def _sides(size: tuple[int, int], area: int, step: int) -> tuple[int, int]:
    """The sides of a picture of about that area, in multiples of `step`."""
    scale = math.sqrt(area / (size[0] * size[1]))
    return max(step, round(size[0] * scale / step) * step), max(step, round(size[1] * scale / step) * step)


def _start_of_video(control: FramedControl) -> Tensor:
    """The picture as the first frame, with gray ones behind it."""
    first = control.as_image()
    if control.frames == 1:
        return first
    pixels = torch.full((control.frames, *first.shape[1:]), 0.5)
    pixels[:1] = first
    return pixels


def _inpainting_mask(control: FramedControl) -> Tensor:
    """The mask as (1, 1, H, W) in 8 bit; 255 is drawn anew."""
    return (control.as_image().mean(-1) * 255.0).round().to(torch.uint8)[:, None]


def _outside_mask(control: FramedControl) -> Tensor:
    """The image, with gray where it is drawn anew."""
    assert control.image is not None
    pixels = images.image_tensor(images.crop_image(control.image, control.framing))
    kept = 1.0 - unpack_mask(_inpainting_mask(control)).round().movedim(1, -1)
    return (pixels - 0.5) * kept + 0.5


def unpack_mask(mask: Tensor) -> Tensor:
    """A mask of 8 bit in 0..1."""
    return mask.float() / 255.0


def _make_references(latents: Sequence[Tensor]) -> dict[str, Any]:
    return {"reference_latents": list(latents)}


def _make_concatenated(latents: Sequence[Tensor]) -> dict[str, Any]:
    return {"concat_latent_image": latents[0]}


def _make_first_frame(latents: Sequence[Tensor]) -> dict[str, Any]:
    mask = torch.ones(1, 1, latents[0].shape[2], *latents[0].shape[-2:])
    mask[:, :, :1] = 0.0
    return {"concat_latent_image": latents[0], "concat_mask": mask}


def _edit_prompt(caption: str, count: int) -> tuple[str, dict[str, str]]:
    return caption, {}


def _edit_plus_prompt(caption: str, count: int) -> tuple[str, dict[str, str]]:
    names = [f"Picture {number}: <|vision_start|><|image_pad|><|vision_end|>" for number in range(1, count + 1)]
    return "".join(names) + caption, {"llama_template": _EDIT_PLUS_TEMPLATE}


METHODS = (
    ControlMethod(
        "reference latents",
        "ReferenceLatent",
        "Flux.2, OmniGen2 and others, at the size that is trained",
        _reference,
        _make_references,
        tokenizers=("Flux2Tokenizer", "KleinTokenizer", "KleinTokenizer8B", "Omnigen2Tokenizer"),
    ),
    ControlMethod(
        "Flux Kontext",
        "FluxKontextImageScale and ReferenceLatent",
        "Flux.1 Kontext",
        _kontext,
        _make_references,
        tokenizers=("FluxTokenizer",),
    ),
    ControlMethod(
        "Qwen-Image-Edit",
        "TextEncodeQwenImageEdit",
        "the first Qwen-Image-Edit, one picture",
        _area_scaler(_MEGAPIXEL),
        _make_references,
        most=1,
        seen=_area_scaler(_MEGAPIXEL),
        prompt=_edit_prompt,
    ),
    ControlMethod(
        "Qwen-Image-Edit Plus",
        "TextEncodeQwenImageEditPlus",
        "Qwen-Image-Edit 2509 and 2511",
        _area_scaler(_MEGAPIXEL, 8),
        _make_references,
        tokenizers=("QwenImageTokenizer",),
        seen=_area_scaler(_SEEN_PIXELS),
        prompt=_edit_plus_prompt,
    ),
    ControlMethod(
        "concatenated latents",
        "InstructPixToPixConditioning",
        "InstructPix2Pix, Flux.1 Canny and Depth, HiDream-E1, one picture",
        FramedControl.as_image,
        _make_concatenated,
        most=1,
    ),
    ControlMethod(
        "Wan image to video",
        "WanImageToVideo",
        "Wan I2V, the first frame",
        _start_of_video,
        _make_first_frame,
        most=1,
        tokenizers=("WanT5Tokenizer",),
    ),
    ControlMethod(
        "inpainting mask",
        "InpaintModelConditioning",
        "Flux.1 Fill and other inpainting models, a mask: white is drawn anew",
        _outside_mask,
        _make_concatenated,
        most=1,
        mask=_inpainting_mask,
    ),
)
_BY_NAME: Mapping[str, ControlMethod] = {method.name: method for method in METHODS}


def options() -> list[str]:
    """The options of the input, the default first."""
    return [AUTO, *_BY_NAME, OFF]


def set_size(method: ControlMethod, size: ControlSize) -> ControlMethod:
    """The method with control pictures of this size for the VAE. Raises ValueError where the method has one size."""
    if size == NODES_SIZE:
        return method
    if method.entries is not _make_references:
        raise ValueError(
            f"Dataset: control_resolution and no_resize_control do not fit control pictures {method.name}: there a"
            " control picture has the size of its image. Take the keys out of dataset_config.toml."
        )
    return replace(method, name=f"{method.name} {size}", for_vae=size.fit)


def find_method(name: str, tokenizer: str) -> ControlMethod:
    """The method of that name; `auto` is the one that knows this class of tokenizers. Raises ValueError when none
    does.
    """
    if name in _BY_NAME:
        return _BY_NAME[name]
    for method in METHODS:
        if tokenizer in method.tokenizers:
            return method
    choices = "; ".join(f"{method.name} for {method.models}" for method in METHODS)
    raise ValueError(
        "Dataset: the folder has control pictures, and this CLIP does not tell how the model takes them. Set control"
        f" pictures: {choices}; {OFF} trains on them as on other pictures."
    )
