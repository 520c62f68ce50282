"""What a V1 node class says of itself, for annotations (ComfyUI's comfy.comfy_types.node_typing)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import Enum
from typing import Any, Literal, TypeAlias, TypedDict


class StrEnum(str, Enum):
    """An enumeration of texts; Python 3.10 has none."""

    def __str__(self) -> str:
        return self.value


class IO(StrEnum):
    """Socket types by name. Two are unequal only when neither may go into the other."""

    STRING = "STRING"
    IMAGE = "IMAGE"
    MASK = "MASK"
    LATENT = "LATENT"
    BOOLEAN = "BOOLEAN"
    INT = "INT"
    FLOAT = "FLOAT"
    COMBO = "COMBO"
    CONDITIONING = "CONDITIONING"
    SAMPLER = "SAMPLER"
    SIGMAS = "SIGMAS"
    GUIDER = "GUIDER"
    NOISE = "NOISE"
    CLIP = "CLIP"
    CONTROL_NET = "CONTROL_NET"
    VAE = "VAE"
    MODEL = "MODEL"
    LORA_MODEL = "LORA_MODEL"
    LOSS_MAP = "LOSS_MAP"
    CLIP_VISION = "CLIP_VISION"
    CLIP_VISION_OUTPUT = "CLIP_VISION_OUTPUT"
    STYLE_MODEL = "STYLE_MODEL"
    GLIGEN = "GLIGEN"
    UPSCALE_MODEL = "UPSCALE_MODEL"
    AUDIO = "AUDIO"
    WEBCAM = "WEBCAM"
    POINT = "POINT"
    FACE_ANALYSIS = "FACE_ANALYSIS"
    BBOX = "BBOX"
    SEGS = "SEGS"
    VIDEO = "VIDEO"
    ANY = "*"
    NUMBER = "FLOAT,INT"
    PRIMITIVE = "STRING,FLOAT,INT,BOOLEAN"

    def __ne__(self, value: object) -> bool:
        if "*" in (self.value, value):
            return False
        if not isinstance(value, str):
            return True
        mine, theirs = set(self.value.split(",")), set(str(value).split(","))
        return not (mine <= theirs or theirs <= mine)


class RemoteInputOptions(TypedDict):
    """Where the editor fetches a combo's options from."""

    route: str
    refresh_button: bool
    control_after_refresh: Literal["first", "last"]
    timeout: int
    max_retries: int
    refresh: int


class MultiSelectOptions(TypedDict, total=False):
    """How a combo of several choices looks."""

    placeholder: str
    chip: bool


class InputTypeOptions(TypedDict, total=False):
    """The second half of an input's entry in INPUT_TYPES."""

    default: Any
    defaultInput: bool
    forceInput: bool
    lazy: bool
    rawLink: bool
    tooltip: str
    socketless: bool
    widgetType: str
    # numbers
    min: float
    max: float
    step: float
    round: float
    gradient_stops: list[dict]
    # switches
    label_on: str
    label_off: str
    # texts
    multiline: bool
    placeholder: str
    dynamicPrompts: bool
    # combos
    image_upload: bool
    image_folder: Literal["input", "output", "temp"]
    remote: RemoteInputOptions
    control_after_generate: bool
    options: list[Any]
    multi_select: MultiSelectOptions


class HiddenInputTypeDict(TypedDict, total=False):
    """What a node can ask for beside its inputs."""

    node_id: Literal["UNIQUE_ID"]
    unique_id: Literal["UNIQUE_ID"]
    prompt: Literal["PROMPT"]
    extra_pnginfo: Literal["EXTRA_PNGINFO"]
    dynprompt: Literal["DYNPROMPT"]


# A type of ComfyUI's, one of a pack's own, or a list of choices.
_Kind: TypeAlias = IO | str | Sequence[str] | Sequence[int] | Sequence[float]
_Entry: TypeAlias = tuple[_Kind] | tuple[_Kind, InputTypeOptions]


class InputTypeDict(TypedDict, total=False):
    """What INPUT_TYPES gives."""

    required: dict[str, _Entry]
    optional: dict[str, _Entry]
    hidden: HiddenInputTypeDict


class ComfyNodeABC(ABC):
    """What a V1 node class has."""

    DESCRIPTION: str
    CATEGORY: str
    EXPERIMENTAL: bool
    DEPRECATED: bool
    DEV_ONLY: bool
    API_NODE: bool | None
    OUTPUT_NODE: bool
    INPUT_IS_LIST: bool
    OUTPUT_IS_LIST: tuple[bool, ...]
    RETURN_TYPES: tuple[IO | str, ...]
    RETURN_NAMES: tuple[str, ...]
    OUTPUT_TOOLTIPS: tuple[str, ...]
    FUNCTION: str

    @classmethod
    @abstractmethod
    def INPUT_TYPES(s) -> InputTypeDict:
        """The node's inputs."""
        return {"required": {}}


class CheckLazyMixin:
    """Asks for every lazy input."""

    def check_lazy_status(self, **kwargs: Any) -> list[str]:
        """The inputs that are not evaluated yet."""
        return [name for name, value in kwargs.items() if value is None]


class FileLocator(TypedDict):
    """Where a file is."""

    filename: str
    subfolder: str
    type: Literal["input", "output", "temp"]
