"""The V3 node schema: socket types with their inputs and outputs, Schema, ComfyNode, NodeOutput (ComfyUI's
comfy_api.latest.io).
"""

from __future__ import annotations

import copy
import inspect
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict

import torch
from comfy_execution.graph_utils import ExecutionBlocker

from comfy_api.internal import (
    _ComfyNodeInternal,
    _NodeOutputInternal,
    classproperty,
    copy_class,
    first_real_override,
    is_class,
    prune_dict,
    shallow_clone_class,
)
from comfy_api.latest import _input, _util


class FolderType(str, Enum):
    """One of the three folders that the browser may read from."""

    input = "input"
    output = "output"
    temp = "temp"


class UploadType(str, Enum):
    """What a combo's upload button takes."""

    image = "image_upload"
    audio = "audio_upload"
    video = "video_upload"
    model = "file_upload"


class NumberDisplay(str, Enum):
    """How a number widget looks."""

    number = "number"
    slider = "slider"
    gradient_slider = "gradientslider"


class ControlAfterGenerate(str, Enum):
    """What becomes of a widget's value after each run."""

    fixed = "fixed"
    increment = "increment"
    decrement = "decrement"
    randomize = "randomize"


class RemoteOptions:
    """Where the editor fetches a combo's options from."""

    def __init__(
        self,
        route: str,
        refresh_button: bool,
        control_after_refresh: str = "first",
        timeout: int | None = None,
        max_retries: int | None = None,
        refresh: int | None = None,
    ):
        self.route = route
        self.refresh_button = refresh_button
        self.control_after_refresh = control_after_refresh
        self.timeout = timeout
        self.max_retries = max_retries
        self.refresh = refresh

    def as_dict(self) -> dict:
        return prune_dict(vars(self))


class _ComfyType(ABC):  # noqa: B024  (ComfyUI's own shape)
    """A socket type: `io_type` is its name on the wire."""

    Type: Any = Any
    io_type: Any = None


class _IO_V3:
    """An input or an output of a node; `Parent` is its socket type."""

    Parent: Any = None

    def __init__(self) -> None:
        pass

    def validate(self) -> None:
        """Raise ValueError when the declaration cannot be used."""

    @property
    def io_type(self) -> Any:
        return self.Parent.io_type

    @property
    def Type(self) -> Any:
        return self.Parent.Type


class Input(_IO_V3):
    """A socket that takes a value."""

    def __init__(
        self,
        id: str,
        display_name: str | None = None,
        optional: bool = False,
        tooltip: str | None = None,
        lazy: bool | None = None,
        extra_dict: dict | None = None,
        raw_link: bool | None = None,
        advanced: bool | None = None,
    ):
        super().__init__()
        self.id = id
        self.display_name = display_name
        self.optional = optional
        self.tooltip = tooltip
        self.lazy = lazy
        self.extra_dict = {} if extra_dict is None else extra_dict
        self.rawLink = raw_link
        self.advanced = advanced

    def as_dict(self) -> dict:
        own = {
            "display_name": self.display_name,
            "optional": self.optional,
            "tooltip": self.tooltip,
            "lazy": self.lazy,
            "rawLink": self.rawLink,
            "advanced": self.advanced,
        }
        return prune_dict(own) | prune_dict(self.extra_dict)

    def get_io_type(self) -> Any:
        return self.io_type

    def get_all(self) -> list[Input]:
        """This input and those inside it."""
        return [self]


class WidgetInput(Input):
    """An input that the editor draws a widget for; the socket is there as well unless `socketless`."""

    def __init__(
        self,
        id: str,
        display_name: str | None = None,
        optional: bool = False,
        tooltip: str | None = None,
        lazy: bool | None = None,
        default: Any = None,
        socketless: bool | None = None,
        widget_type: str | None = None,
        force_input: bool | None = None,
        extra_dict: dict | None = None,
        raw_link: bool | None = None,
        advanced: bool | None = None,
    ):
        super().__init__(id, display_name, optional, tooltip, lazy, extra_dict, raw_link, advanced)
        self.default = default
        self.socketless = socketless
        self.widget_type = widget_type
        self.force_input = force_input

    def as_dict(self) -> dict:
        own = {
            "default": self.default,
            "socketless": self.socketless,
            "widgetType": self.widget_type,
            "forceInput": self.force_input,
        }
        return super().as_dict() | prune_dict(own)

    def get_io_type(self) -> Any:
        return super().get_io_type() if self.widget_type is None else self.widget_type


class Output(_IO_V3):
    """A socket that gives a value; `is_output_list` says that it gives a list of them, one
    execution each downstream.
    """

    def __init__(
        self,
        id: str | None = None,
        display_name: str | None = None,
        tooltip: str | None = None,
        is_output_list: bool = False,
    ):
        self.id = id
        self.display_name = display_name or id
        self.tooltip = tooltip
        self.is_output_list = is_output_list

    def as_dict(self) -> dict:
        name = self.display_name or self.id
        return prune_dict({"display_name": name, "tooltip": self.tooltip, "is_output_list": self.is_output_list})

    def get_io_type(self) -> Any:
        return self.io_type


class ComfyTypeI(_ComfyType):
    """A type that nodes only take."""

    class Input(Input):
        pass


class ComfyTypeIO(ComfyTypeI):
    """A type that nodes take and give."""

    class Output(Output):
        pass


def comfytype(io_type: str, **kwargs: Any) -> Callable[[type], type]:
    """Class decorator: makes a socket type of this name; its Input and Output become classes of its own that know it as
    Parent.
    """

    def decorate(cls: type) -> type:
        if not issubclass(cls, _ComfyType):
            body = {key: value for key, value in vars(cls).items() if key not in ("__dict__", "__weakref__")}
            cls = type(cls.__name__, (cls, ComfyTypeIO), body)
        for side in ("Input", "Output"):
            if getattr(cls, side, None) is not None:
                own = copy_class(getattr(cls, side))
                own.Parent = cls  # type: ignore[union-attr]
                setattr(cls, side, own)
        cls.io_type = io_type  # type: ignore[attr-defined]
        return cls

    return decorate


def Custom(io_type: str) -> type[ComfyTypeIO]:
    """A socket type of any name."""

    @comfytype(io_type=io_type)
    class CustomComfyType(ComfyTypeIO):
        pass

    return CustomComfyType


@comfytype(io_type="BOOLEAN")
class Boolean(ComfyTypeIO):
    Type: TypeAlias = bool

    class Input(WidgetInput):
        """A switch."""

        def __init__(
            self,
            id: str,
            display_name: str | None = None,
            optional: bool = False,
            tooltip: str | None = None,
            lazy: bool | None = None,
            default: bool | None = None,
            label_on: str | None = None,
            label_off: str | None = None,
            socketless: bool | None = None,
            force_input: bool | None = None,
            extra_dict: dict | None = None,
            raw_link: bool | None = None,
            advanced: bool | None = None,
        ):
            common = (id, display_name, optional, tooltip, lazy, default, socketless, None, force_input)
            super().__init__(*common, extra_dict, raw_link, advanced)
            self.label_on = label_on
            self.label_off = label_off

        def as_dict(self) -> dict:
            return super().as_dict() | prune_dict({"label_on": self.label_on, "label_off": self.label_off})


@comfytype(io_type="INT")
class Int(ComfyTypeIO):
    Type: TypeAlias = int

    class Input(WidgetInput):
        """A whole number."""

        def __init__(
            self,
            id: str,
            display_name: str | None = None,
            optional: bool = False,
            tooltip: str | None = None,
            lazy: bool | None = None,
            default: int | None = None,
            min: int | None = None,
            max: int | None = None,
            step: int | None = None,
            control_after_generate: bool | ControlAfterGenerate | None = None,
            display_mode: NumberDisplay | None = None,
            socketless: bool | None = None,
            force_input: bool | None = None,
            extra_dict: dict | None = None,
            raw_link: bool | None = None,
            advanced: bool | None = None,
        ):
            common = (id, display_name, optional, tooltip, lazy, default, socketless, None, force_input)
            super().__init__(*common, extra_dict, raw_link, advanced)
            self.min = min
            self.max = max
            self.step = step
            self.control_after_generate = control_after_generate
            self.display_mode = display_mode

        def as_dict(self) -> dict:
            own = {
                "min": self.min,
                "max": self.max,
                "step": self.step,
                "control_after_generate": self.control_after_generate,
                "display": self.display_mode.value if self.display_mode else None,
            }
            return super().as_dict() | prune_dict(own)


@comfytype(io_type="FLOAT")
class Float(ComfyTypeIO):
    Type: TypeAlias = float

    class Input(WidgetInput):
        """A number."""

        def __init__(
            self,
            id: str,
            display_name: str | None = None,
            optional: bool = False,
            tooltip: str | None = None,
            lazy: bool | None = None,
            default: float | None = None,
            min: float | None = None,
            max: float | None = None,
            step: float | None = None,
            round: float | None = None,
            display_mode: NumberDisplay | None = None,
            gradient_stops: list[dict] | None = None,
            socketless: bool | None = None,
            force_input: bool | None = None,
            extra_dict: dict | None = None,
            raw_link: bool | None = None,
            advanced: bool | None = None,
        ):
            common = (id, display_name, optional, tooltip, lazy, default, socketless, None, force_input)
            super().__init__(*common, extra_dict, raw_link, advanced)
            self.min = min
            self.max = max
            self.step = step
            self.round = round
            self.display_mode = display_mode
            self.gradient_stops = gradient_stops

        def as_dict(self) -> dict:
            own = {
                "min": self.min,
                "max": self.max,
                "step": self.step,
                "round": self.round,
                "display": self.display_mode.value if self.display_mode else None,
                "gradient_stops": self.gradient_stops,
            }
            return super().as_dict() | prune_dict(own)


@comfytype(io_type="STRING")
class String(ComfyTypeIO):
    Type: TypeAlias = str

    class Input(WidgetInput):
        """A text."""

        def __init__(
            self,
            id: str,
            display_name: str | None = None,
            optional: bool = False,
            tooltip: str | None = None,
            lazy: bool | None = None,
            multiline: bool = False,
            placeholder: str | None = None,
            default: str | None = None,
            dynamic_prompts: bool | None = None,
            socketless: bool | None = None,
            force_input: bool | None = None,
            extra_dict: dict | None = None,
            raw_link: bool | None = None,
            advanced: bool | None = None,
        ):
            common = (id, display_name, optional, tooltip, lazy, default, socketless, None, force_input)
            super().__init__(*common, extra_dict, raw_link, advanced)
            self.multiline = multiline
            self.placeholder = placeholder
            self.dynamic_prompts = dynamic_prompts

        def as_dict(self) -> dict:
            own = {"multiline": self.multiline, "placeholder": self.placeholder, "dynamicPrompts": self.dynamic_prompts}
            return super().as_dict() | prune_dict(own)


@comfytype(io_type="COMBO")
class Combo(ComfyTypeIO):
    Type: TypeAlias = str

    class Input(WidgetInput):
        """A choice from a list."""

        def __init__(
            self,
            id: str,
            options: list[str] | list[int] | type[Enum] | None = None,
            display_name: str | None = None,
            optional: bool = False,
            tooltip: str | None = None,
            lazy: bool | None = None,
            default: str | int | Enum | None = None,
            control_after_generate: bool | ControlAfterGenerate | None = None,
            upload: UploadType | None = None,
            image_folder: FolderType | None = None,
            remote: RemoteOptions | None = None,
            socketless: bool | None = None,
            extra_dict: dict | None = None,
            raw_link: bool | None = None,
            advanced: bool | None = None,
        ):
            if isinstance(default, Enum):
                default = default.value
            common = (id, display_name, optional, tooltip, lazy, default, socketless, None, None)
            super().__init__(*common, extra_dict, raw_link, advanced)
            self.multiselect = False
            self.options = [member.value for member in options] if is_class(options) else options  # type: ignore[union-attr]
            self.control_after_generate = control_after_generate
            self.upload = upload
            self.image_folder = image_folder
            self.remote = remote

        def as_dict(self) -> dict:
            own = {
                "multiselect": self.multiselect,
                "options": self.options,
                "control_after_generate": self.control_after_generate,
                "image_folder": self.image_folder.value if self.image_folder else None,
                "remote": self.remote.as_dict() if self.remote else None,
            }
            if self.upload is not None:
                own[self.upload.value] = True
            return super().as_dict() | prune_dict(own)

    class Output(Output):
        """One of `options`."""

        def __init__(
            self,
            id: str | None = None,
            display_name: str | None = None,
            options: list[str] | None = None,
            tooltip: str | None = None,
            is_output_list: bool = False,
        ):
            super().__init__(id, display_name, tooltip, is_output_list)
            self.options = [] if options is None else options


@comfytype(io_type="COMBO")
class MultiCombo(ComfyTypeI):
    Type: TypeAlias = list[str]

    class Input(Combo.Input):
        """Several choices from a list."""

        def __init__(
            self,
            id: str,
            options: list[str],
            display_name: str | None = None,
            optional: bool = False,
            tooltip: str | None = None,
            lazy: bool | None = None,
            default: list[str] | None = None,
            placeholder: str | None = None,
            chip: bool | None = None,
            control_after_generate: bool | ControlAfterGenerate | None = None,
            socketless: bool | None = None,
            extra_dict: dict | None = None,
            raw_link: bool | None = None,
            advanced: bool | None = None,
        ):
            super().__init__(
                id,
                options,
                display_name,
                optional,
                tooltip,
                lazy,
                control_after_generate=control_after_generate,
                socketless=socketless,
                extra_dict=extra_dict,
                raw_link=raw_link,
                advanced=advanced,
            )
            self.default = default
            self.multiselect = True
            self.placeholder = placeholder
            self.chip = chip

        def as_dict(self) -> dict:
            looks = prune_dict({"placeholder": self.placeholder, "chip": self.chip})
            return super().as_dict() | {"multi_select": looks}


# --- sockets without a widget -----------------------------------------------------------------------------------------


@comfytype(io_type="IMAGE")
class Image(ComfyTypeIO):
    """Pictures (B, H, W, C), float32 from 0 to 1."""

    Type: TypeAlias = torch.Tensor


@comfytype(io_type="MASK")
class Mask(ComfyTypeIO):
    """Masks (B, H, W), float32 from 0 to 1."""

    Type: TypeAlias = torch.Tensor


class _Samples(TypedDict):
    samples: torch.Tensor


@comfytype(io_type="LATENT")
class Latent(ComfyTypeIO):
    """A dict whose "samples" are (B, C, H, W)."""

    class LatentDict(_Samples, total=False):
        noise_mask: torch.Tensor
        batch_index: list[int]
        type: str

    Type: TypeAlias = LatentDict


class _Pooled(TypedDict):
    pooled_output: torch.Tensor


@comfytype(io_type="CONDITIONING")
class Conditioning(ComfyTypeIO):
    """A list of [tensor (B, N, C), dict]."""

    class PooledDict(_Pooled, total=False):
        """What may stand beside the tensor; packs add keys of their own."""

        # the whole prompt or a part of the picture
        area: tuple
        strength: float
        mask: torch.Tensor
        mask_strength: float
        set_area_to_bounds: bool
        default: bool
        start_percent: float
        end_percent: float
        clip_start_percent: float
        clip_end_percent: float
        attention_mask: torch.Tensor
        attention_mask_img_shape: tuple[int, ...]
        hooks: Any
        # ControlNets and what else goes with the picture
        control: Any
        control_apply_to_uncond: bool
        cross_attn_controlnet: torch.Tensor
        pooled_output_controlnet: torch.Tensor
        gligen: tuple
        concat_latent_image: torch.Tensor
        concat_mask: torch.Tensor
        concat_image: torch.Tensor
        noise_augmentation: float
        unclip_conditioning: list[dict]
        clip_vision_output: Any
        reference_latents: list[torch.Tensor]
        guidance: float
        # sizes of SDXL
        width: int
        height: int
        aesthetic_score: float
        crop_w: int
        crop_h: int
        target_width: int
        target_height: int
        stable_cascade_prior: torch.Tensor
        # video and views
        guiding_frame_index: int
        ref_latent: torch.Tensor
        keyframe_idxs: list[int]
        frame_rate: float
        elevation: list[float]
        azimuth: list[float]
        motion_bucket_id: int
        fps: int
        augmentation_level: float
        vace_frames: torch.Tensor
        vace_mask: torch.Tensor
        vace_strength: float
        camera_conditions: Any
        time_dim_concat: torch.Tensor
        time_dim_replace: torch.Tensor
        # sound
        conditioning_lyrics: torch.Tensor
        seconds_start: float
        seconds_total: float
        lyrics_strength: float

    CondList = list[tuple[torch.Tensor, PooledDict]]
    Type: TypeAlias = CondList


@comfytype(io_type="MODEL")
class Model(ComfyTypeIO):
    """A comfy.model_patcher.ModelPatcher."""


@comfytype(io_type="CLIP")
class Clip(ComfyTypeIO):
    """A comfy.sd.CLIP."""


@comfytype(io_type="VAE")
class Vae(ComfyTypeIO):
    """A comfy.sd.VAE."""


@comfytype(io_type="LORA_MODEL")
class LoraModel(ComfyTypeIO):
    """A LoRA's state dict."""

    Type: TypeAlias = dict[str, torch.Tensor]


@comfytype(io_type="LOSS_MAP")
class LossMap(ComfyTypeIO):
    """The losses of a training."""

    class LossMapDict(TypedDict):
        loss: list[torch.Tensor]

    Type: TypeAlias = LossMapDict


@comfytype(io_type="*")
class AnyType(ComfyTypeIO):
    """Anything."""


@comfytype(io_type="SAMPLER")
class Sampler(ComfyTypeIO):
    """A comfy.samplers.Sampler."""


@comfytype(io_type="SIGMAS")
class Sigmas(ComfyTypeIO):
    """Noise levels, the first one highest."""

    Type: TypeAlias = torch.Tensor


@comfytype(io_type="NOISE")
class Noise(ComfyTypeIO):
    """Something that makes noise for a latent."""

    Type: TypeAlias = torch.Tensor


@comfytype(io_type="GUIDER")
class Guider(ComfyTypeIO):
    """A comfy.samplers.CFGGuider."""


@comfytype(io_type="CONTROL_NET")
class ControlNet(ComfyTypeIO):
    """A ControlNet."""


@comfytype(io_type="CLIP_VISION")
class ClipVision(ComfyTypeIO):
    """A model that reads pictures."""


@comfytype(io_type="CLIP_VISION_OUTPUT")
class ClipVisionOutput(ComfyTypeIO):
    """What such a model read."""


@comfytype(io_type="BACKGROUND_REMOVAL")
class BackgroundRemoval(ComfyTypeIO):
    """A model that finds the background."""


@comfytype(io_type="AUDIO_ENCODER")
class AudioEncoder(ComfyTypeIO):
    """A model that reads sound."""


@comfytype(io_type="AUDIO_ENCODER_OUTPUT")
class AudioEncoderOutput(ComfyTypeIO):
    """What such a model read."""


@comfytype(io_type="STYLE_MODEL")
class StyleModel(ComfyTypeIO):
    """A style model."""


@comfytype(io_type="GLIGEN")
class Gligen(ComfyTypeIO):
    """A GLIGEN model, in a ModelPatcher."""


@comfytype(io_type="UPSCALE_MODEL")
class UpscaleModel(ComfyTypeIO):
    """A model that enlarges pictures."""


@comfytype(io_type="LATENT_UPSCALE_MODEL")
class LatentUpscaleModel(ComfyTypeIO):
    """A model that enlarges latents."""


@comfytype(io_type="MODEL_PATCH")
class ModelPatch(ComfyTypeIO):
    """Weights that a node adds to a model."""


@comfytype(io_type="PHOTOMAKER")
class Photomaker(ComfyTypeIO):
    """A PhotoMaker model."""


@comfytype(io_type="WAN_CAMERA_EMBEDDING")
class WanCameraEmbedding(ComfyTypeIO):
    """Camera moves for Wan."""

    Type: TypeAlias = torch.Tensor


@comfytype(io_type="AUDIO")
class Audio(ComfyTypeIO):
    """Sound: {"waveform": (B, C, T), "sample_rate": Hz}."""

    class AudioDict(TypedDict):
        waveform: torch.Tensor
        sampler_rate: int  # ComfyUI's own spelling; nodes read and write "sample_rate"

    Type: TypeAlias = AudioDict


@comfytype(io_type="VIDEO")
class Video(ComfyTypeIO):
    """A comfy_api.latest.Input.Video."""


@comfytype(io_type="SVG")
class SVG(ComfyTypeIO):
    """Vector drawings."""

    Type: TypeAlias = _util.SVG


@comfytype(io_type="HOOKS")
class Hooks(ComfyTypeIO):
    """A comfy.hooks.HookGroup."""


@comfytype(io_type="HOOK_KEYFRAMES")
class HookKeyframes(ComfyTypeIO):
    """How strong hooks are over time."""


@comfytype(io_type="TIMESTEPS_RANGE")
class TimestepsRange(ComfyTypeIO):
    """Start and end of a range, each from 0 to 1."""

    Type: TypeAlias = tuple[int, int]


@comfytype(io_type="LATENT_OPERATION")
class LatentOperation(ComfyTypeIO):
    """A function of latents."""

    Type: TypeAlias = Callable[[torch.Tensor], torch.Tensor]


@comfytype(io_type="FLOW_CONTROL")
class FlowControl(ComfyTypeIO):
    """The handle of a loop."""

    Type: TypeAlias = tuple[str, Any]


@comfytype(io_type="ACCUMULATION")
class Accumulation(ComfyTypeIO):
    """What a loop has collected."""

    class AccumulationDict(TypedDict):
        accum: list[Any]

    Type: TypeAlias = AccumulationDict


@comfytype(io_type="POINT")
class Point(ComfyTypeIO):
    """A point in a picture."""


@comfytype(io_type="FACE_ANALYSIS")
class FaceAnalysis(ComfyTypeIO):
    """Faces that were found."""


@comfytype(io_type="BBOX")
class BBOX(ComfyTypeIO):
    """Boxes of the detector packs."""


@comfytype(io_type="SEGS")
class SEGS(ComfyTypeIO):
    """Segments of the detector packs."""


@comfytype(io_type="TRACKS")
class Tracks(ComfyTypeIO):
    """Paths of points through a video."""

    class TrackDict(TypedDict):
        track_path: torch.Tensor
        track_visibility: torch.Tensor

    Type: TypeAlias = TrackDict


@comfytype(io_type="DICT")
class Dict(ComfyTypeIO):
    Type: TypeAlias = dict


@comfytype(io_type="ARRAY")
class Array(ComfyTypeIO):
    Type: TypeAlias = list


@comfytype(io_type="HISTOGRAM")
class Histogram(ComfyTypeIO):
    """How many values fall into each bin."""

    Type: TypeAlias = list[int]


# --- three dimensions -------------------------------------------------------------------------------------------------


@comfytype(io_type="VOXEL")
class Voxel(ComfyTypeIO):
    Type: TypeAlias = _util.VOXEL


@comfytype(io_type="MESH")
class Mesh(ComfyTypeIO):
    Type: TypeAlias = _util.MESH


@comfytype(io_type="SPLAT")
class Splat(ComfyTypeIO):
    Type: TypeAlias = _util.SPLAT


@comfytype(io_type="FILE_3D")
class File3DAny(ComfyTypeIO):
    """A 3D file of any format."""

    Type: TypeAlias = _util.File3D


@comfytype(io_type="FILE_3D_GLB")
class File3DGLB(ComfyTypeIO):
    Type: TypeAlias = _util.File3D


@comfytype(io_type="FILE_3D_GLTF")
class File3DGLTF(ComfyTypeIO):
    Type: TypeAlias = _util.File3D


@comfytype(io_type="FILE_3D_FBX")
class File3DFBX(ComfyTypeIO):
    Type: TypeAlias = _util.File3D


@comfytype(io_type="FILE_3D_OBJ")
class File3DOBJ(ComfyTypeIO):
    Type: TypeAlias = _util.File3D


@comfytype(io_type="FILE_3D_STL")
class File3DSTL(ComfyTypeIO):
    Type: TypeAlias = _util.File3D


@comfytype(io_type="FILE_3D_USDZ")
class File3DUSDZ(ComfyTypeIO):
    Type: TypeAlias = _util.File3D


@comfytype(io_type="FILE_3D_PLY")
class File3DPLY(ComfyTypeIO):
    Type: TypeAlias = _util.File3D


@comfytype(io_type="FILE_3D_SPLAT")
class File3DSPLAT(ComfyTypeIO):
    Type: TypeAlias = _util.File3D


@comfytype(io_type="FILE_3D_SPZ")
class File3DSPZ(ComfyTypeIO):
    Type: TypeAlias = _util.File3D


@comfytype(io_type="FILE_3D_KSPLAT")
class File3DKSPLAT(ComfyTypeIO):
    Type: TypeAlias = _util.File3D


@comfytype(io_type="FILE_3D_SPLAT_ANY")
class File3DSplatAny(ComfyTypeIO):
    """Gaussian splats in any of their formats."""

    Type: TypeAlias = _util.File3D


@comfytype(io_type="FILE_3D_POINT_CLOUD_ANY")
class File3DPointCloudAny(ComfyTypeIO):
    """A point cloud in any of its formats."""

    Type: TypeAlias = _util.File3D


class _CameraView(TypedDict):
    position: dict[str, float]
    target: dict[str, float]
    zoom: float
    cameraType: str


@comfytype(io_type="LOAD3D_CAMERA")
class Load3DCamera(ComfyTypeIO):
    """Where the camera of a 3D view stands."""

    class CameraInfo(_CameraView, total=False):
        quaternion: dict[str, float]
        fov: float
        aspect: float
        near: float
        far: float
        frustum: dict[str, float]

    Type: TypeAlias = CameraInfo


@comfytype(io_type="LOAD3D_MODEL_INFO")
class Load3DModelInfo(ComfyTypeIO):
    """Where the models of a 3D view stand."""

    class Model3DTransform(TypedDict):
        position: dict[str, float]
        quaternion: dict[str, float]
        scale: dict[str, float]

    Type: TypeAlias = list[Model3DTransform]


class _Model3D(TypedDict):
    image: str
    mask: str
    normal: str
    camera_info: Load3DCamera.CameraInfo


@comfytype(io_type="LOAD_3D")
class Load3D(ComfyTypeIO):
    """What the 3D viewer's widget gives."""

    class Model3DDict(_Model3D, total=False):
        recording: str
        model_3d_info: list[Load3DModelInfo.Model3DTransform]

    Type: TypeAlias = Model3DDict


@comfytype(io_type="LOAD_3D_ANIMATION")
class Load3DAnimation(Load3D):
    """The same of an animation."""


# --- layers -----------------------------------------------------------------------------------------------------------


class _Layer(TypedDict):
    image: torch.Tensor
    type: Literal["raster"]
    z_index: int


class _Document(TypedDict):
    version: int
    layers: list


class _LayerState(TypedDict):
    canvas: dict
    layers: list[dict]


@comfytype(io_type="LAYERS")
class Layers(ComfyTypeIO):
    """A picture in layers."""

    BlendMode = Literal[
        "normal",
        "multiply",
        "screen",
        "overlay",
        "darken",
        "lighten",
        "color-dodge",
        "color-burn",
        "hard-light",
        "soft-light",
        "difference",
        "exclusion",
        "linear-dodge",
        "linear-burn",
        "vivid-light",
        "pin-light",
        "linear-light",
        "hard-mix",
        "subtract",
        "divide",
        "grain-extract",
        "grain-merge",
        "hue",
        "saturation",
        "color",
        "luminosity",
    ]

    class LayerItem(_Layer, total=False):
        x: int
        y: int
        w: int
        h: int
        mask: torch.Tensor
        name: str
        opacity: float
        blend_mode: str
        visible: bool
        flip_h: bool
        flip_v: bool
        rotation: float

    class Document(_Document, total=False):
        canvas: tuple[int, int]

    Type: TypeAlias = Document


# --- sockets with a widget of their own -------------------------------------------------------------------------------


class _PanelInput(WidgetInput):
    """An input whose widget fills a part of the node; it has no socket unless it is asked for."""

    def __init__(
        self,
        id: str,
        display_name: str | None = None,
        optional: bool = False,
        tooltip: str | None = None,
        socketless: bool = True,
        default: Any = None,
        advanced: bool | None = None,
    ):
        super().__init__(id, display_name, optional, tooltip, default=default, socketless=socketless, advanced=advanced)


@comfytype(io_type="COMPOSITOR")
class Compositor(ComfyTypeIO):
    """The state of the layer editor."""

    class LayerState(_LayerState, total=False):
        version: int
        background: dict
        inputs: list[str]
        order: list[int]

    Type: TypeAlias = LayerState

    class Input(_PanelInput):
        def __init__(
            self,
            id: str,
            display_name: str | None = None,
            optional: bool = False,
            tooltip: str | None = None,
            socketless: bool = True,
            default: dict | None = None,
            advanced: bool | None = None,
        ):
            start = {} if default is None else default
            super().__init__(id, display_name, optional, tooltip, socketless, start, advanced)


@comfytype(io_type="WEBCAM")
class Webcam(ComfyTypeIO):
    Type: TypeAlias = str

    class Input(WidgetInput):
        """A picture from the camera."""

        def __init__(
            self,
            id: str,
            display_name: str | None = None,
            optional: bool = False,
            tooltip: str | None = None,
            lazy: bool | None = None,
            default: str | None = None,
            socketless: bool | None = None,
            extra_dict: dict | None = None,
            raw_link: bool | None = None,
            advanced: bool | None = None,
        ):
            common = (id, display_name, optional, tooltip, lazy, default, socketless, None, None)
            super().__init__(*common, extra_dict, raw_link, advanced)


@comfytype(io_type="IMAGECOMPARE")
class ImageCompare(ComfyTypeI):
    """Two pictures under a slider."""

    Type: TypeAlias = dict

    class Input(_PanelInput):
        def __init__(
            self,
            id: str,
            display_name: str | None = None,
            optional: bool = False,
            tooltip: str | None = None,
            socketless: bool = True,
            advanced: bool | None = None,
        ):
            super().__init__(id, display_name, optional, tooltip, socketless, None, advanced)


@comfytype(io_type="COLOR")
class Color(ComfyTypeIO):
    """A color as #rrggbb."""

    Type: TypeAlias = str

    class Input(_PanelInput):
        def __init__(
            self,
            id: str,
            display_name: str | None = None,
            optional: bool = False,
            tooltip: str | None = None,
            socketless: bool = True,
            advanced: bool | None = None,
            default: str = "#ffffff",
        ):
            super().__init__(id, display_name, optional, tooltip, socketless, default, advanced)


@comfytype(io_type="COLORS")
class Colors(ComfyTypeIO):
    """Several colors."""

    Type: TypeAlias = list[str]

    class Input(_PanelInput):
        def __init__(
            self,
            id: str,
            display_name: str | None = None,
            optional: bool = False,
            tooltip: str | None = None,
            socketless: bool = True,
            default: list[str] | None = None,
            advanced: bool | None = None,
        ):
            start = [] if default is None else default
            super().__init__(id, display_name, optional, tooltip, socketless, start, advanced)


@comfytype(io_type="BOUNDING_BOX")
class BoundingBox(ComfyTypeIO):
    """A box in a picture, in pixels."""

    class BoundingBoxDict(TypedDict):
        x: int
        y: int
        width: int
        height: int

    Type: TypeAlias = BoundingBoxDict

    class Input(_PanelInput):
        def __init__(
            self,
            id: str,
            display_name: str | None = None,
            optional: bool = False,
            tooltip: str | None = None,
            socketless: bool = True,
            default: dict | None = None,
            component: str | None = None,
            force_input: bool | None = None,
        ):
            start = {"x": 0, "y": 0, "width": 512, "height": 512} if default is None else default
            super().__init__(id, display_name, optional, tooltip, socketless, start)
            self.component = component
            self.force_input = force_input

        def as_dict(self) -> dict:
            return super().as_dict() | prune_dict({"component": self.component or None})


@comfytype(io_type="BOUNDING_BOXES")
class BoundingBoxes(ComfyTypeIO):
    """Boxes, each with what is known of it."""

    class BoundingBoxWithMetadata(BoundingBox.BoundingBoxDict):
        metadata: dict

    Type: TypeAlias = list[BoundingBoxWithMetadata]

    class Input(_PanelInput):
        def __init__(
            self,
            id: str,
            display_name: str | None = None,
            optional: bool = False,
            tooltip: str | None = None,
            socketless: bool = True,
            default: list[dict] | None = None,
            advanced: bool | None = None,
        ):
            start = [] if default is None else default
            super().__init__(id, display_name, optional, tooltip, socketless, start, advanced)


@comfytype(io_type="CURVE")
class Curve(ComfyTypeIO):
    """A curve through points from (0, 0) to (1, 1): comfy_api.input.CurveInput."""

    CurvePoint = _input.CurvePoint

    class Input(_PanelInput):
        def __init__(
            self,
            id: str,
            display_name: str | None = None,
            optional: bool = False,
            tooltip: str | None = None,
            socketless: bool = True,
            default: list[tuple[float, float]] | None = None,
            advanced: bool | None = None,
        ):
            start = [(0.0, 0.0), (1.0, 1.0)] if default is None else default
            super().__init__(id, display_name, optional, tooltip, socketless, start, advanced)

        def as_dict(self) -> dict:
            points = [list(point) for point in self.default]
            return super().as_dict() | {"default": {"points": points, "interpolation": "monotone_cubic"}}


@comfytype(io_type="RANGE")
class Range(ComfyTypeIO):
    """From where to where, with a midpoint."""

    RangeInput = _input.RangeInput

    class Input(_PanelInput):
        def __init__(
            self,
            id: str,
            display_name: str | None = None,
            optional: bool = False,
            tooltip: str | None = None,
            socketless: bool = True,
            default: dict | None = None,
            display: str | None = None,
            gradient_stops: list | None = None,
            show_midpoint: bool | None = None,
            midpoint_scale: str | None = None,
            value_min: float | None = None,
            value_max: float | None = None,
            advanced: bool | None = None,
        ):
            start = {"min": 0.0, "max": 1.0} if default is None else default
            super().__init__(id, display_name, optional, tooltip, socketless, start, advanced)
            self.display = display
            self.gradient_stops = gradient_stops
            self.show_midpoint = show_midpoint
            self.midpoint_scale = midpoint_scale
            self.value_min = value_min
            self.value_max = value_max

        def as_dict(self) -> dict:
            names = ("display", "gradient_stops", "show_midpoint", "midpoint_scale", "value_min", "value_max")
            return super().as_dict() | prune_dict({name: getattr(self, name) for name in names})


# --- sockets of several types -----------------------------------------------------------------------------------------


@comfytype(io_type="COMFY_MULTITYPED_V3")
class MultiType:
    """A socket that takes more than one type."""

    Type: TypeAlias = Any

    class Input(Input):
        """`id` may be a widget input: then the socket has that widget, and its type comes first."""

        def __init__(
            self,
            id: str | Input,
            types: list,
            display_name: str | None = None,
            optional: bool = False,
            tooltip: str | None = None,
            lazy: bool | None = None,
            extra_dict: dict | None = None,
            raw_link: bool | None = None,
            advanced: bool | None = None,
        ):
            self.input_override = None
            if not isinstance(id, str):
                self.input_override = override = copy.copy(id)
                optional = override.optional or optional
                display_name = display_name if override.display_name is None else override.display_name
                tooltip = tooltip if override.tooltip is None else override.tooltip
                lazy = lazy if override.lazy is None else override.lazy
                id = override.id
                if isinstance(override, WidgetInput):
                    override.widget_type = override.get_io_type()
            super().__init__(id, display_name, optional, tooltip, lazy, extra_dict, raw_link, advanced)
            self._io_types = types

        @property
        def io_types(self) -> list[Any]:
            """The permitted types."""
            return [kind if is_class(kind) else type(kind) for kind in self._io_types]

        def get_io_type(self) -> str:
            names = [kind.io_type for kind in self.io_types]
            if self.input_override is not None:
                names.insert(0, self.input_override.get_io_type())
            return ",".join(dict.fromkeys(names))

        def as_dict(self) -> dict:
            return ({} if self.input_override is None else self.input_override.as_dict()) | super().as_dict()


@comfytype(io_type="COMFY_MATCHTYPE_V3")
class MatchType(ComfyTypeIO):
    """Sockets that share a template take the type of whichever is linked first."""

    class Template:
        """What the sockets of one group may be."""

        def __init__(self, template_id: str, allowed_types: Any = AnyType):
            self.template_id = template_id
            self.allowed_types = list(allowed_types) if isinstance(allowed_types, Iterable) else [allowed_types]
            for kind in self.allowed_types:
                if not issubclass(kind if is_class(kind) else type(kind), _ComfyType):
                    name = getattr(kind, "__name__", type(kind).__name__)
                    raise ValueError(f"Allowed types must be ComfyTypes such as io.Image, got {name}")

        def as_dict(self) -> dict:
            names = ",".join(kind.io_type for kind in self.allowed_types)
            return {"template_id": self.template_id, "allowed_types": names}

    class Input(Input):
        def __init__(
            self,
            id: str,
            template: MatchType.Template,
            display_name: str | None = None,
            optional: bool = False,
            tooltip: str | None = None,
            lazy: bool | None = None,
            extra_dict: dict | None = None,
            raw_link: bool | None = None,
            advanced: bool | None = None,
        ):
            super().__init__(id, display_name, optional, tooltip, lazy, extra_dict, raw_link, advanced)
            self.template = template

        def as_dict(self) -> dict:
            return super().as_dict() | {"template": self.template.as_dict()}

    class Output(Output):
        def __init__(
            self,
            template: MatchType.Template,
            id: str | None = None,
            display_name: str | None = None,
            tooltip: str | None = None,
            is_output_list: bool = False,
        ):
            name = display_name if id or display_name else "MATCHTYPE"
            super().__init__(id, name, tooltip, is_output_list)
            self.template = template

        def as_dict(self) -> dict:
            return super().as_dict() | {"template": self.template.as_dict()}


# --- inputs that grow in the editor -----------------------------------------------------------------------------------


class DynamicInput(Input, ABC):
    """An input that stands for several; which ones depends on what the workflow sends."""


class DynamicOutput(Output, ABC):
    """The same on the other side."""


def handle_prefix(prefix_list: list[str] | None, id: str | None = None) -> list[str]:
    """The prefix of the inputs inside `id`."""
    return [*(prefix_list or []), *([] if id is None else [id])]


def finalize_prefix(prefix_list: list[str] | None, id: str | None = None) -> str:
    """An input's name in a workflow: the names of what it stands in, joined by dots."""
    return ".".join(handle_prefix(prefix_list, id))


@comfytype(io_type="COMFY_AUTOGROW_V3")
class Autogrow(ComfyTypeI):
    """One input after another: the node gets a dict of those that are linked."""

    Type: TypeAlias = dict[str, Any]
    _MaxNames = 100

    class _AutogrowTemplate:
        """What each of the inputs is, and their names."""

        min: int

        def __init__(self, input: Input):
            if isinstance(input, DynamicInput):
                raise ValueError(f"{input.id}: an input that grows cannot be inside of another one")
            self.input = copy.copy(input)
            if isinstance(self.input, WidgetInput):
                self.input.force_input = True
            self.names: list[str] = []
            self.cached_inputs: dict[str, Input] = {}

        def _name_inputs(self, names: list[str]) -> None:
            self.names = names
            for name in names:
                self.cached_inputs[name] = copy.copy(self.input)
                self.cached_inputs[name].id = name

        def get_all(self) -> list[Input]:
            return list(self.cached_inputs.values())

        def as_dict(self) -> dict:
            return {"input": create_input_dict_v1([self.input])}

        def validate(self) -> None:
            self.input.validate()

    class TemplatePrefix(_AutogrowTemplate):
        """Inputs with a number at the end: image0, image1, …"""

        def __init__(self, input: Input, prefix: str, min: int = 1, max: int = 10):
            super().__init__(input)
            if min < 0 or not 1 <= max <= Autogrow._MaxNames:
                raise ValueError(f"{prefix}: min must be 0 or more and max from 1 to {Autogrow._MaxNames}")
            self.prefix = prefix
            self.min = min
            self.max = max
            self._name_inputs(_numbered(prefix, max))

        def as_dict(self) -> dict:
            return super().as_dict() | {"prefix": self.prefix, "min": self.min, "max": self.max}

    class TemplateNames(_AutogrowTemplate):
        """Inputs with names of their own."""

        def __init__(self, input: Input, names: list[str], min: int = 1):
            super().__init__(input)
            if min < 0:
                raise ValueError(f"{input.id}: min must be 0 or more")
            self.min = min
            self._name_inputs(names[: Autogrow._MaxNames])

        def as_dict(self) -> dict:
            return super().as_dict() | {"names": self.names, "min": self.min}

    class Input(DynamicInput):
        def __init__(
            self,
            id: str,
            template: Autogrow.TemplatePrefix | Autogrow.TemplateNames,
            display_name: str | None = None,
            optional: bool = False,
            tooltip: str | None = None,
            lazy: bool | None = None,
            extra_dict: dict | None = None,
        ):
            super().__init__(id, display_name, optional, tooltip, lazy, extra_dict)
            self.template = template

        def as_dict(self) -> dict:
            return super().as_dict() | {"template": self.template.as_dict()}

        def get_all(self) -> list[Input]:
            return [self, *self.template.get_all()]

        def validate(self) -> None:
            self.template.validate()

    @staticmethod
    def _expand_schema_for_dynamic(
        out_dict: dict[str, Any],
        live_inputs: dict[str, Any],
        value: tuple[str, dict[str, Any]],
        input_type: str,
        curr_prefix: list[str] | None,
    ) -> None:
        template = value[1]["template"]
        names = template["names"] if "names" in template else _numbered(template["prefix"], template["max"])
        kind, entry = _only_input(template["input"])
        sent: dict[str, dict] = {}
        for number, name in enumerate(names):
            needed = "required" if kind == "required" and number < template["min"] else "optional"
            full = finalize_prefix(curr_prefix, name)
            out_dict[needed][full] = entry
            sent.setdefault(needed, {})
            if full in live_inputs:
                sent[needed][name] = entry
        if not any(sent.values()):  # nothing is linked: the node gets an empty dict
            own = finalize_prefix(curr_prefix)
            out_dict["dynamic_paths"][own] = own
            out_dict["dynamic_paths_default_value"][own] = DynamicPathsDefaultValue.EMPTY_DICT
        parse_class_inputs(out_dict, live_inputs, sent, curr_prefix)


def _numbered(prefix: str, count: int) -> list[str]:
    """The names image0, image1, … of inputs that grow."""
    return [f"{prefix}{number}" for number in range(count)]


def _only_input(spec: dict[str, dict]) -> tuple[str, tuple]:
    """(required or optional, the entry) of the one input in a template."""
    for kind, inputs in spec.items():
        for entry in inputs.values():
            return kind, entry
    raise ValueError("a template that has no input")


@comfytype(io_type="COMFY_DYNAMICCOMBO_V3")
class DynamicCombo(ComfyTypeI):
    """A choice that decides which other inputs there are; the node gets them all as one dict."""

    Type: TypeAlias = dict[str, Any]

    class Option:
        """One choice and its inputs."""

        def __init__(self, key: str, inputs: list[Input]):
            self.key = key
            self.inputs = inputs

        def as_dict(self) -> dict:
            return {"key": self.key, "inputs": create_input_dict_v1(self.inputs)}

    class Input(DynamicInput):
        def __init__(
            self,
            id: str,
            options: list[DynamicCombo.Option],
            display_name: str | None = None,
            optional: bool = False,
            tooltip: str | None = None,
            lazy: bool | None = None,
            extra_dict: dict | None = None,
        ):
            super().__init__(id, display_name, optional, tooltip, lazy, extra_dict)
            self.options = options

        def get_all(self) -> list[Input]:
            return [self, *(inner for option in self.options for inner in option.inputs)]

        def as_dict(self) -> dict:
            return super().as_dict() | {"options": [option.as_dict() for option in self.options]}

        def validate(self) -> None:
            for inner in self.get_all()[1:]:
                inner.validate()

    @staticmethod
    def _expand_schema_for_dynamic(
        out_dict: dict[str, Any],
        live_inputs: dict[str, Any],
        value: tuple[str, dict[str, Any]],
        input_type: str,
        curr_prefix: list[str] | None,
    ) -> None:
        own = finalize_prefix(curr_prefix)
        for option in value[1]["options"]:
            if own in live_inputs and option["key"] == live_inputs[own]:
                _expand_with_itself(out_dict, live_inputs, option["inputs"], value, input_type, curr_prefix or [])
                return


@comfytype(io_type="COMFY_DYNAMICSLOT_V3")
class DynamicSlot(ComfyTypeI):
    """A socket that brings other inputs with it once it is linked."""

    Type: TypeAlias = dict[str, Any]

    class Input(DynamicInput):
        def __init__(
            self,
            slot: Input,
            inputs: list[Input],
            display_name: str | None = None,
            tooltip: str | None = None,
            lazy: bool | None = None,
            extra_dict: dict | None = None,
        ):
            if isinstance(slot, DynamicInput):
                raise ValueError(f"{slot.id}: an input that grows cannot be the socket of another one")
            self.slot = copy.copy(slot)
            self.slot.display_name = display_name if slot.display_name is None else slot.display_name
            self.slot.tooltip = tooltip if slot.tooltip is None else slot.tooltip
            self.slot.lazy = lazy if slot.lazy is None else slot.lazy
            self.slot.extra_dict = extra_dict if slot.extra_dict is None else slot.extra_dict
            super().__init__(
                slot.id, self.slot.display_name, True, self.slot.tooltip, self.slot.lazy, self.slot.extra_dict
            )
            self.inputs = inputs
            self.force_input = None
            if isinstance(self.slot, WidgetInput):
                self.force_input = self.slot.force_input = True

        def get_all(self) -> list[Input]:
            return [self.slot, *self.inputs]

        def as_dict(self) -> dict:
            own = {
                "slotType": str(self.slot.get_io_type()),
                "inputs": create_input_dict_v1(self.inputs),
                "forceInput": self.force_input,
            }
            return super().as_dict() | prune_dict(own)

        def validate(self) -> None:
            for inner in self.get_all():
                inner.validate()

    @staticmethod
    def _expand_schema_for_dynamic(
        out_dict: dict[str, Any],
        live_inputs: dict[str, Any],
        value: tuple[str, dict[str, Any]],
        input_type: str,
        curr_prefix: list[str] | None,
    ) -> None:
        if finalize_prefix(curr_prefix) in live_inputs:
            _expand_with_itself(out_dict, live_inputs, value[1]["inputs"], value, input_type, curr_prefix or [])


def _expand_with_itself(
    out_dict: dict[str, Any], live_inputs: dict[str, Any], inner: dict, value: tuple, input_type: str, prefix: list[str]
) -> None:
    """Enter the inputs inside of a dynamic one, and its own value beside them under its own name again."""
    parse_class_inputs(out_dict, live_inputs, inner, prefix)
    own = finalize_prefix(prefix)
    out_dict[input_type][own] = value
    out_dict["dynamic_paths"][own] = finalize_prefix(prefix, prefix[-1])


_Expand = Callable[[dict[str, Any], dict[str, Any], tuple[str, dict[str, Any]], str, "list[str] | None"], None]
DYNAMIC_INPUT_LOOKUP: dict[str, _Expand] = {}


def register_dynamic_input_func(io_type: str, func: _Expand) -> None:
    """Say which function turns a dynamic input of this type into the inputs that it stands for."""
    DYNAMIC_INPUT_LOOKUP[io_type] = func


def get_dynamic_input_func(io_type: str) -> _Expand:
    """The function that does so."""
    return DYNAMIC_INPUT_LOOKUP[io_type]


def setup_dynamic_input_funcs() -> None:
    """Register the three kinds that there are."""
    for kind in (Autogrow, DynamicCombo, DynamicSlot):
        register_dynamic_input_func(kind.io_type, kind._expand_schema_for_dynamic)


setup_dynamic_input_funcs()


class V3Data(TypedDict):
    """What one execution of a V3 node needs beside its inputs' values."""

    hidden_inputs: dict[str, Any]
    dynamic_paths: dict[str, Any]
    dynamic_paths_default_value: dict[str, Any]
    create_dynamic_tuple: bool


class DynamicPathsDefaultValue:
    """What an input that grows gives when nothing is linked."""

    EMPTY_DICT = "empty_dict"


def get_finalized_class_inputs(
    d: dict[str, Any], live_inputs: dict[str, Any], include_hidden: bool = False
) -> tuple[dict[str, Any], dict | None, dict[str, Any]]:
    """(the inputs that a node has in a workflow which sends `live_inputs`, its hidden ones, what
    `build_nested_inputs` needs) of a node's INPUT_TYPES.
    """
    out_dict: dict[str, Any] = {"required": {}, "optional": {}, "dynamic_paths": {}, "dynamic_paths_default_value": {}}
    hidden = d.get("hidden")
    parse_class_inputs(out_dict, live_inputs, {kind: inputs for kind, inputs in d.items() if kind != "hidden"})
    names = ("dynamic_paths", "dynamic_paths_default_value")
    v3_data = {name: found for name in names if (found := out_dict.pop(name))}
    if hidden is not None and include_hidden:
        out_dict["hidden"] = hidden
    return out_dict, hidden, v3_data


def parse_class_inputs(
    out_dict: dict[str, Any],
    live_inputs: dict[str, Any],
    curr_dict: dict[str, Any],
    curr_prefix: list[str] | None = None,
) -> None:
    """Enter inputs under their full names, dynamic ones as what they stand for."""
    for kind, inputs in curr_dict.items():
        for name, value in inputs.items():
            expand = DYNAMIC_INPUT_LOOKUP.get(value[0]) if isinstance(value[0], str) else None
            if expand is not None:
                expand(out_dict, live_inputs, value, kind, handle_prefix(curr_prefix, name))
                continue
            full = finalize_prefix(curr_prefix, name)
            out_dict[kind][full] = value
            if curr_prefix:
                out_dict["dynamic_paths"][full] = full


def build_nested_inputs(values: dict[str, Any], v3_data: dict[str, Any]) -> dict[str, Any]:
    """The values of one call with those of dynamic inputs gathered into dicts: "images.image0" becomes
    images["image0"]. With `create_dynamic_tuple` every value is (value, its name in the workflow).
    """
    paths = v3_data.get("dynamic_paths")
    if paths is None:
        return values
    rest = dict(values)
    nested: dict[str, Any] = {}
    empty = v3_data.get("dynamic_paths_default_value", {})
    for name, path in paths.items():
        value = rest.pop(name, None)
        if value is None and empty.get(name) == DynamicPathsDefaultValue.EMPTY_DICT:
            value = {}
        *parents, last = path.split(".")
        place: dict[str, Any] = nested
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = (value, name) if v3_data.get("create_dynamic_tuple") else value
    return rest | nested


# --- nodes ------------------------------------------------------------------------------------------------------------


class Hidden(str, Enum):
    """What a node can ask for beside its inputs."""

    unique_id = "UNIQUE_ID"
    prompt = "PROMPT"
    extra_pnginfo = "EXTRA_PNGINFO"
    dynprompt = "DYNPROMPT"
    auth_token_comfy_org = "AUTH_TOKEN_COMFY_ORG"
    api_key_comfy_org = "API_KEY_COMFY_ORG"
    comfy_usage_source = "COMFY_USAGE_SOURCE"


class HiddenHolder:
    """The hidden values of one execution, as `cls.hidden`; what was not asked for reads as None."""

    def __init__(
        self,
        unique_id: str | None,
        prompt: Any,
        extra_pnginfo: Any,
        dynprompt: Any,
        auth_token_comfy_org: str | None,
        api_key_comfy_org: str | None,
        comfy_usage_source: str | None = None,
        **kwargs: Any,
    ):
        self.unique_id = unique_id
        self.prompt = prompt
        self.extra_pnginfo = extra_pnginfo
        self.dynprompt = dynprompt
        self.auth_token_comfy_org = auth_token_comfy_org
        self.api_key_comfy_org = api_key_comfy_org
        self.comfy_usage_source = comfy_usage_source

    def __getattr__(self, key: str) -> None:
        return None

    @classmethod
    def from_dict(cls, d: dict | None) -> HiddenHolder:
        values = d or {}
        return cls(**{hidden.name: values.get(hidden) for hidden in Hidden})

    @classmethod
    def from_v3_data(cls, v3_data: dict | None) -> HiddenHolder:
        return cls.from_dict((v3_data or {}).get("hidden_inputs"))


@dataclass
class NodeInfoV1:
    """A node as /object_info describes it."""

    input: dict | None = None
    input_order: dict[str, list[str]] | None = None
    is_input_list: bool | None = None
    output: list | None = None
    output_is_list: list[bool] | None = None
    output_name: list[str] | None = None
    output_tooltips: list[str | None] | None = None
    output_matchtypes: list[str | None] | None = None
    name: str | None = None
    display_name: str | None = None
    description: str | None = None
    python_module: Any = None
    category: str | None = None
    output_node: bool | None = None
    deprecated: bool | None = None
    experimental: bool | None = None
    dev_only: bool | None = None
    api_node: bool | None = None
    price_badge: dict | None = None
    search_aliases: list[str] | None = None
    essentials_category: str | None = None
    has_intermediate_output: bool | None = None


@dataclass
class PriceBadgeDepends:
    """What a price is computed from: widgets, sockets and groups of sockets, by name."""

    widgets: list[str] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)
    input_groups: list[str] = field(default_factory=list)

    def validate(self) -> None:
        """Raise ValueError when one of the lists is not a list of names."""
        for name in ("widgets", "inputs", "input_groups"):
            listed = getattr(self, name)
            if not isinstance(listed, list) or not all(isinstance(entry, str) for entry in listed):
                raise ValueError(f"PriceBadgeDepends.{name} must be a list[str].")

    def as_dict(self, schema_inputs: list[Input]) -> dict[str, Any]:
        types: dict[str, Any] = {}
        for socket in schema_inputs:
            types[socket.id] = socket.get_io_type()
            types |= {f"{socket.id}.{inner.id}": inner.get_io_type() for inner in socket.get_all()[1:]}
        unknown = next((name for name in self.widgets if name not in types), None)
        if unknown is not None:
            raise ValueError(f"PriceBadge depends on the unknown widget {unknown!r}; there are: {', '.join(types)}")
        widgets = [{"name": name, "type": types[name]} for name in self.widgets]
        return {"widgets": widgets, "inputs": self.inputs, "input_groups": self.input_groups}


@dataclass
class PriceBadge:
    """What a run of an API node costs, as an expression that the editor computes."""

    expr: str
    depends_on: PriceBadgeDepends = field(default_factory=PriceBadgeDepends)
    engine: str = field(default="jsonata")

    def validate(self) -> None:
        """Raise ValueError when the editor could not compute it."""
        if self.engine != "jsonata":
            raise ValueError(f"Unsupported PriceBadge.engine {self.engine!r}; it must be 'jsonata'.")
        if not isinstance(self.expr, str) or not self.expr.strip():
            raise ValueError("PriceBadge.expr must be a non-empty string.")
        self.depends_on.validate()

    def as_dict(self, schema_inputs: list[Input]) -> dict[str, Any]:
        return {"engine": self.engine, "depends_on": self.depends_on.as_dict(schema_inputs), "expr": self.expr}


@dataclass
class Schema:
    """What a V3 node is: its id, its sockets and widgets, and how it is executed."""

    node_id: str
    display_name: str | None = None
    category: str = "sd"
    inputs: list[Input] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)
    hidden: list[Hidden] = field(default_factory=list)
    description: str = ""
    search_aliases: list[str] = field(default_factory=list)
    is_input_list: bool = False
    is_output_node: bool = False
    is_deprecated: bool = False
    is_experimental: bool = False
    is_dev_only: bool = False
    is_api_node: bool = False
    price_badge: PriceBadge | None = None
    not_idempotent: bool = False
    enable_expand: bool = False
    accept_all_inputs: bool = False
    essentials_category: str | None = None
    has_intermediate_output: bool = False

    def validate(self) -> None:
        """Raise ValueError, naming every id that is there twice. An id may be one of an input and of an output, which
        0.3.64 refuses.
        """
        fixed = [socket for socket in self.inputs if not isinstance(socket, DynamicInput)]
        inputs = [inner.id for socket in fixed for inner in socket.get_all()]
        issues = []
        for side, ids in (("Input", inputs), ("Output", [socket.id for socket in self.outputs])):
            twice = [key for key, count in Counter(ids).items() if count > 1]
            if twice:
                issues.append(f"{side} ids must be unique, but {twice} are not.")
        if issues:
            raise ValueError("\n".join(issues))
        for socket in (*self.inputs, *self.outputs):
            socket.validate()
        if self.price_badge is not None:
            self.price_badge.validate()

    def finalize(self) -> None:
        """Ask for the hidden values that the node's kind needs, and give every output an id."""
        self.inputs = self.inputs or []
        self.outputs = self.outputs or []
        needed: list[Hidden] = []
        if self.is_api_node:
            needed += [Hidden.auth_token_comfy_org, Hidden.api_key_comfy_org, Hidden.comfy_usage_source]
        if self.is_output_node:
            needed += [Hidden.prompt, Hidden.extra_pnginfo]
        hidden = self.hidden or []
        self.hidden = hidden + [value for value in needed if value not in hidden]
        for index, output in enumerate(self.outputs):
            if output.id is None:
                output.id = f"_{index}_{output.io_type}_"

    def get_v1_info(self, cls: type) -> NodeInfoV1:
        """The node as a V1 class would describe itself."""
        sockets, outputs = self.inputs or [], self.outputs or []
        inputs = create_input_dict_v1(sockets)
        if self.hidden:
            inputs["hidden"] = {hidden.name: (hidden.value,) for hidden in self.hidden}
        templates = [getattr(output, "template", None) for output in outputs]
        matched = [None if template is None else template.template_id for template in templates]
        return NodeInfoV1(
            input=inputs,
            input_order={kind: list(entries) for kind, entries in inputs.items()},
            is_input_list=self.is_input_list,
            output=[output.io_type for output in outputs],
            output_is_list=[output.is_output_list for output in outputs],
            output_name=[output.display_name or output.io_type for output in outputs],
            output_tooltips=[output.tooltip or None for output in outputs],
            output_matchtypes=matched if any(matched) else None,
            name=self.node_id,
            display_name=self.display_name,
            description=self.description,
            python_module=getattr(cls, "RELATIVE_PYTHON_MODULE", "nodes"),
            category=self.category,
            output_node=self.is_output_node,
            deprecated=self.is_deprecated,
            experimental=self.is_experimental,
            dev_only=self.is_dev_only,
            api_node=self.is_api_node,
            price_badge=None if self.price_badge is None else self.price_badge.as_dict(sockets),
            search_aliases=self.search_aliases or None,
            essentials_category=self.essentials_category,
            has_intermediate_output=self.has_intermediate_output,
        )


def create_input_dict_v1(inputs: list[Input]) -> dict[str, dict]:
    """Inputs as a V1 INPUT_TYPES dict."""
    spec: dict[str, dict] = {"required": {}}
    for socket in inputs:
        add_to_dict_v1(socket, spec)
    return spec


def add_to_dict_v1(i: Input, d: dict) -> None:
    """Enter one input into a V1 INPUT_TYPES dict, under required or optional."""
    options = i.as_dict()
    options.pop("optional", None)
    d.setdefault("optional" if i.optional else "required", {})[i.id] = (i.get_io_type(), options)


def _of_schema(name: str) -> classproperty:
    """A V1 class attribute that is read from the schema the first time."""

    def read(cls: Any) -> Any:
        if getattr(cls, f"_{name}") is None:
            cls.GET_SCHEMA()
        return getattr(cls, f"_{name}")

    return classproperty(read)


def _normal_output(cls: Any, returned: Any) -> NodeOutput:
    """Whatever `execute` returned as a NodeOutput."""
    if returned is None:
        returned = NodeOutput()
    elif isinstance(returned, tuple):
        returned = NodeOutput(*returned)
    elif isinstance(returned, dict):
        returned = NodeOutput.from_dict(returned)
    elif isinstance(returned, ExecutionBlocker):
        returned = NodeOutput(block_execution=returned.message)
    elif not isinstance(returned, NodeOutput):
        raise TypeError(
            f"Invalid return type from node: {type(returned)}; execute returns io.NodeOutput, a tuple, a dict or None"
        )
    if returned.expand is not None and not cls.SCHEMA.enable_expand:
        raise ValueError(
            f"Node {cls.__name__} is not expandable, but expand included in NodeOutput; set enable_expand=True in its"
            " Schema."
        )
    return returned


class _ComfyNodeBaseInternal(_ComfyNodeInternal):
    """The machinery of V3 nodes; nodes derive from ComfyNode."""

    RELATIVE_PYTHON_MODULE: str | None = None
    SCHEMA: Schema | None = None
    hidden: HiddenHolder = None  # type: ignore[assignment]  # a node has it while it runs

    _DESCRIPTION = _CATEGORY = _EXPERIMENTAL = _DEPRECATED = _DEV_ONLY = _API_NODE = _OUTPUT_NODE = None
    _HAS_INTERMEDIATE_OUTPUT = _INPUT_IS_LIST = _NOT_IDEMPOTENT = _ACCEPT_ALL_INPUTS = None
    _RETURN_TYPES = _RETURN_NAMES = _OUTPUT_IS_LIST = _OUTPUT_TOOLTIPS = None

    DESCRIPTION = _of_schema("DESCRIPTION")
    CATEGORY = _of_schema("CATEGORY")
    EXPERIMENTAL = _of_schema("EXPERIMENTAL")
    DEPRECATED = _of_schema("DEPRECATED")
    DEV_ONLY = _of_schema("DEV_ONLY")
    API_NODE = _of_schema("API_NODE")
    OUTPUT_NODE = _of_schema("OUTPUT_NODE")
    HAS_INTERMEDIATE_OUTPUT = _of_schema("HAS_INTERMEDIATE_OUTPUT")
    INPUT_IS_LIST = _of_schema("INPUT_IS_LIST")
    NOT_IDEMPOTENT = _of_schema("NOT_IDEMPOTENT")
    ACCEPT_ALL_INPUTS = _of_schema("ACCEPT_ALL_INPUTS")
    RETURN_TYPES = _of_schema("RETURN_TYPES")
    RETURN_NAMES = _of_schema("RETURN_NAMES")
    OUTPUT_IS_LIST = _of_schema("OUTPUT_IS_LIST")
    OUTPUT_TOOLTIPS = _of_schema("OUTPUT_TOOLTIPS")

    def __init__(self) -> None:
        self.__class__.VALIDATE_CLASS()

    @classmethod
    @abstractmethod
    def define_schema(cls) -> Schema:
        """What the node is."""
        raise NotImplementedError

    if TYPE_CHECKING:
        # Every node takes its own inputs, and may be async: to a type checker any method is right in place of these.
        @classmethod
        def execute(cls, *args: Any, **kwargs: Any) -> NodeOutput | Awaitable[NodeOutput]: ...

        @classmethod
        def validate_inputs(cls, *args: Any, **kwargs: Any) -> bool | str | Awaitable[bool | str]: ...

        @classmethod
        def fingerprint_inputs(cls, *args: Any, **kwargs: Any) -> Any: ...

        @classmethod
        def check_lazy_status(cls, *args: Any, **kwargs: Any) -> list[str] | Awaitable[list[str]]: ...

    else:

        @classmethod
        @abstractmethod
        def execute(cls, **kwargs: Any) -> NodeOutput:
            """What the node does."""
            raise NotImplementedError

        @classmethod
        def validate_inputs(cls, **kwargs: Any) -> bool | str:
            """Optional: True, or what is wrong with the constants among the inputs."""
            raise NotImplementedError

        @classmethod
        def fingerprint_inputs(cls, **kwargs: Any) -> Any:
            """Optional: a value that changes when the node must run again although its inputs are the same."""
            raise NotImplementedError

        @classmethod
        def check_lazy_status(cls, **kwargs: Any) -> list[str]:
            """Optional: the lazy inputs that are needed after all; one not evaluated yet is None."""
            return [name for name, value in kwargs.items() if value is None]

    @classmethod
    def GET_BASE_CLASS(cls) -> type:
        return _ComfyNodeBaseInternal

    @classmethod
    def VALIDATE_CLASS(cls) -> None:
        for name in ("define_schema", "execute"):
            if first_real_override(cls, name) is None:
                raise NotImplementedError(f"No {name} function was defined for node class {cls.__name__}.")

    @classproperty
    def FUNCTION(cls) -> str:
        return "EXECUTE_NORMALIZED_ASYNC" if inspect.iscoroutinefunction(cls.execute) else "EXECUTE_NORMALIZED"

    @classmethod
    def EXECUTE_NORMALIZED(cls, *args: Any, **kwargs: Any) -> NodeOutput:
        return _normal_output(cls, cls.execute(*args, **kwargs))

    @classmethod
    async def EXECUTE_NORMALIZED_ASYNC(cls, *args: Any, **kwargs: Any) -> NodeOutput:
        return _normal_output(cls, await cls.execute(*args, **kwargs))  # type: ignore[misc]

    @classmethod
    def PREPARE_CLASS_CLONE(cls, v3_data: dict | None) -> type[ComfyNode]:
        """A class for one execution, with the hidden values of `v3_data["hidden_inputs"]` as `cls.hidden`."""
        clone = shallow_clone_class(cls if is_class(cls) else type(cls))
        clone.hidden = HiddenHolder.from_v3_data(v3_data)  # type: ignore[attr-defined]
        return clone

    @classmethod
    def GET_NODE_INFO_V1(cls) -> dict[str, Any]:
        return asdict(cls.GET_SCHEMA().get_v1_info(cls))

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, dict]:
        return cls.FINALIZE_SCHEMA().get_v1_info(cls).input  # type: ignore[return-value]

    @classmethod
    def FINALIZE_SCHEMA(cls) -> Schema:
        """A new schema with its hidden values and output ids filled in."""
        schema = cls.define_schema()
        schema.finalize()
        return schema

    @classmethod
    def GET_SCHEMA(cls) -> Schema:
        """A new, validated schema; sets the V1 attributes of the class."""
        cls.VALIDATE_CLASS()
        schema = cls.FINALIZE_SCHEMA()
        schema.validate()
        info = schema.get_v1_info(cls)
        values = {
            "DESCRIPTION": schema.description,
            "CATEGORY": schema.category,
            "EXPERIMENTAL": schema.is_experimental,
            "DEPRECATED": schema.is_deprecated,
            "DEV_ONLY": schema.is_dev_only,
            "API_NODE": schema.is_api_node,
            "OUTPUT_NODE": schema.is_output_node,
            "HAS_INTERMEDIATE_OUTPUT": schema.has_intermediate_output,
            "INPUT_IS_LIST": schema.is_input_list,
            "NOT_IDEMPOTENT": schema.not_idempotent,
            "ACCEPT_ALL_INPUTS": schema.accept_all_inputs,
            "RETURN_TYPES": info.output,
            "RETURN_NAMES": info.output_name,
            "OUTPUT_IS_LIST": info.output_is_list,
            "OUTPUT_TOOLTIPS": info.output_tooltips,
        }
        for name, value in values.items():
            if getattr(cls, f"_{name}") is None:
                setattr(cls, f"_{name}", value)
        cls.SCHEMA = schema
        return schema


class ComfyNode(_ComfyNodeBaseInternal):
    """What V3 nodes derive from: define_schema and execute, both class methods."""

    @classmethod
    def GET_BASE_CLASS(cls) -> type:
        return ComfyNode


class _UIOutput(ABC):
    """Something the editor shows under a node."""

    @abstractmethod
    def as_dict(self) -> dict: ...


class NodeOutput(_NodeOutputInternal):
    """A node's return value: its outputs in order, and what the editor shows."""

    def __init__(
        self,
        *args: Any,
        ui: _UIOutput | dict | None = None,
        expand: dict | None = None,
        block_execution: str | None = None,
    ):
        self.args = args
        self.ui = ui
        self.expand = expand
        self.block_execution = block_execution

    @property
    def result(self) -> tuple | None:
        return self.args or None

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> NodeOutput:
        result = data.get("result", ())
        if isinstance(result, ExecutionBlocker):
            return cls(block_execution=result.message)
        return cls(*result, ui=data.get("ui"), expand=data.get("expand"))

    def __getitem__(self, index: int) -> Any:
        return self.args[index]


# --- nodes that replace others ----------------------------------------------------------------------------------------


class InputMapOldId(TypedDict):
    """An input of the new node takes what an input of the old one had."""

    new_id: str
    old_id: str


class InputMapSetValue(TypedDict):
    """An input of the new node gets a value."""

    new_id: str
    set_value: Any


InputMap = InputMapOldId | InputMapSetValue


class OutputMap(TypedDict):
    """An output of the new node takes the place of one of the old node."""

    new_idx: int
    old_idx: int


class NodeReplace:
    """Which node takes the place of an older one when a workflow is opened, and how its inputs and outputs are
    mapped. `old_widget_ids` are the old node's widgets in order, because workflows store values by position.
    """

    def __init__(
        self,
        new_node_id: str,
        old_node_id: str,
        old_widget_ids: list[str] | None = None,
        input_mapping: list[InputMap] | None = None,
        output_mapping: list[OutputMap] | None = None,
    ):
        self.new_node_id = new_node_id
        self.old_node_id = old_node_id
        self.old_widget_ids = old_widget_ids
        self.input_mapping = input_mapping
        self.output_mapping = output_mapping

    def as_dict(self) -> dict:
        return {
            "new_node_id": self.new_node_id,
            "old_node_id": self.old_node_id,
            "old_widget_ids": self.old_widget_ids,
            "input_mapping": list(self.input_mapping) if self.input_mapping else None,
            "output_mapping": list(self.output_mapping) if self.output_mapping else None,
        }


__all__ = [
    "BBOX",
    "SEGS",
    "SVG",
    "Accumulation",
    "AnyType",
    "Array",
    "Audio",
    "AudioEncoder",
    "AudioEncoderOutput",
    "Autogrow",
    "BackgroundRemoval",
    "Boolean",
    "BoundingBox",
    "BoundingBoxes",
    "Clip",
    "ClipVision",
    "ClipVisionOutput",
    "Color",
    "Colors",
    "Combo",
    "ComfyNode",
    "ComfyTypeI",
    "ComfyTypeIO",
    "Compositor",
    "Conditioning",
    "ControlAfterGenerate",
    "ControlNet",
    "Curve",
    "Custom",
    "Dict",
    "DynamicCombo",
    "FaceAnalysis",
    "File3DAny",
    "File3DFBX",
    "File3DGLB",
    "File3DGLTF",
    "File3DKSPLAT",
    "File3DOBJ",
    "File3DPLY",
    "File3DPointCloudAny",
    "File3DSPLAT",
    "File3DSPZ",
    "File3DSTL",
    "File3DSplatAny",
    "File3DUSDZ",
    "Float",
    "FlowControl",
    "FolderType",
    "Gligen",
    "Guider",
    "Hidden",
    "HiddenHolder",
    "Histogram",
    "HookKeyframes",
    "Hooks",
    "Image",
    "ImageCompare",
    "Input",
    "Int",
    "Latent",
    "LatentOperation",
    "LatentUpscaleModel",
    "Layers",
    "Load3D",
    "Load3DAnimation",
    "Load3DCamera",
    "Load3DModelInfo",
    "LoraModel",
    "LossMap",
    "Mask",
    "MatchType",
    "Mesh",
    "Model",
    "ModelPatch",
    "MultiCombo",
    "MultiType",
    "NodeInfoV1",
    "NodeOutput",
    "NodeReplace",
    "Noise",
    "NumberDisplay",
    "Output",
    "Photomaker",
    "Point",
    "PriceBadge",
    "PriceBadgeDepends",
    "Range",
    "RemoteOptions",
    "Sampler",
    "Schema",
    "Sigmas",
    "Splat",
    "String",
    "StyleModel",
    "TimestepsRange",
    "Tracks",
    "UploadType",
    "UpscaleModel",
    "V3Data",
    "Vae",
    "Video",
    "Voxel",
    "WanCameraEmbedding",
    "Webcam",
    "WidgetInput",
    "add_to_dict_v1",
    "comfytype",
]
