"""The V3 node schema: socket types with their inputs and outputs, Schema, ComfyNode, NodeOutput (ComfyUI's
comfy_api.latest.io).
"""

from __future__ import annotations

import copy
import inspect
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

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
    ):
        super().__init__()
        self.id = id
        self.display_name = display_name
        self.optional = optional
        self.tooltip = tooltip
        self.lazy = lazy
        self.extra_dict = {} if extra_dict is None else extra_dict

    def as_dict(self) -> dict:
        own = {"display_name": self.display_name, "optional": self.optional, "tooltip": self.tooltip, "lazy": self.lazy}
        return prune_dict(own) | prune_dict(self.extra_dict)

    def get_io_type(self) -> Any:
        return self.io_type


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
    ):
        super().__init__(id, display_name, optional, tooltip, lazy, extra_dict)
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
        self.display_name = display_name
        self.tooltip = tooltip
        self.is_output_list = is_output_list

    def as_dict(self) -> dict:
        return prune_dict(
            {"display_name": self.display_name, "tooltip": self.tooltip, "is_output_list": self.is_output_list}
        )

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
    Type = bool

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
        ):
            super().__init__(id, display_name, optional, tooltip, lazy, default, socketless, None, force_input)
            self.label_on = label_on
            self.label_off = label_off

        def as_dict(self) -> dict:
            return super().as_dict() | prune_dict({"label_on": self.label_on, "label_off": self.label_off})


@comfytype(io_type="INT")
class Int(ComfyTypeIO):
    Type = int

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
            control_after_generate: bool | None = None,
            display_mode: NumberDisplay | None = None,
            socketless: bool | None = None,
            force_input: bool | None = None,
        ):
            super().__init__(id, display_name, optional, tooltip, lazy, default, socketless, None, force_input)
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
    Type = float

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
            socketless: bool | None = None,
            force_input: bool | None = None,
        ):
            super().__init__(id, display_name, optional, tooltip, lazy, default, socketless, None, force_input)
            self.min = min
            self.max = max
            self.step = step
            self.round = round
            self.display_mode = display_mode

        def as_dict(self) -> dict:
            own = {
                "min": self.min,
                "max": self.max,
                "step": self.step,
                "round": self.round,
                "display": self.display_mode.value if self.display_mode else None,
            }
            return super().as_dict() | prune_dict(own)


@comfytype(io_type="STRING")
class String(ComfyTypeIO):
    Type = str

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
        ):
            super().__init__(id, display_name, optional, tooltip, lazy, default, socketless, None, force_input)
            self.multiline = multiline
            self.placeholder = placeholder
            self.dynamic_prompts = dynamic_prompts

        def as_dict(self) -> dict:
            own = {"multiline": self.multiline, "placeholder": self.placeholder, "dynamicPrompts": self.dynamic_prompts}
            return super().as_dict() | prune_dict(own)


@comfytype(io_type="COMBO")
class Combo(ComfyTypeIO):
    Type = str

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
            control_after_generate: bool | None = None,
            upload: UploadType | None = None,
            image_folder: FolderType | None = None,
            remote: RemoteOptions | None = None,
            socketless: bool | None = None,
        ):
            if isinstance(default, Enum):
                default = default.value
            super().__init__(id, display_name, optional, tooltip, lazy, default, socketless)
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
        """One of `options`; the options themselves are the type on the wire."""

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

        @property
        def io_type(self) -> list[str]:
            return self.options


@comfytype(io_type="IMAGE")
class Image(ComfyTypeIO):
    """Pictures (B, H, W, C), float32 from 0 to 1."""


@comfytype(io_type="MASK")
class Mask(ComfyTypeIO):
    """Masks (B, H, W), float32 from 0 to 1."""


@comfytype(io_type="LATENT")
class Latent(ComfyTypeIO):
    """A dict whose "samples" are (B, C, H, W)."""

    Type = dict


@comfytype(io_type="CONDITIONING")
class Conditioning(ComfyTypeIO):
    """A list of [tensor (B, N, C), dict]."""

    Type = list


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

    Type = dict


@comfytype(io_type="LOSS_MAP")
class LossMap(ComfyTypeIO):
    """{"loss": [float]}."""

    Type = dict


@comfytype(io_type="*")
class AnyType(ComfyTypeIO):
    """Anything."""


Sampler = Custom("SAMPLER")
Sigmas = Custom("SIGMAS")
Noise = Custom("NOISE")
Guider = Custom("GUIDER")
ControlNet = Custom("CONTROL_NET")
ClipVision = Custom("CLIP_VISION")
ClipVisionOutput = Custom("CLIP_VISION_OUTPUT")
StyleModel = Custom("STYLE_MODEL")
Gligen = Custom("GLIGEN")
UpscaleModel = Custom("UPSCALE_MODEL")
Audio = Custom("AUDIO")
Video = Custom("VIDEO")
Hooks = Custom("HOOKS")
HookKeyframes = Custom("HOOK_KEYFRAMES")
TimestepsRange = Custom("TIMESTEPS_RANGE")
LatentOperation = Custom("LATENT_OPERATION")


@comfytype(io_type="COMFY_MULTITYPED_V3")
class MultiType:
    """A socket that takes more than one type."""

    Type = Any

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
            super().__init__(id, display_name, optional, tooltip, lazy, extra_dict)
            self._io_types = types

        @property
        def io_types(self) -> list[type]:
            """The permitted types."""
            return [kind if is_class(kind) else type(kind) for kind in self._io_types]

        def get_io_type(self) -> str:
            names = [kind.io_type for kind in self.io_types]
            if self.input_override is not None:
                names.insert(0, self.input_override.get_io_type())
            return ",".join(dict.fromkeys(names))

        def as_dict(self) -> dict:
            return ({} if self.input_override is None else self.input_override.as_dict()) | super().as_dict()


class Hidden(str, Enum):
    """What a node can ask for beside its inputs."""

    unique_id = "UNIQUE_ID"
    prompt = "PROMPT"
    extra_pnginfo = "EXTRA_PNGINFO"
    dynprompt = "DYNPROMPT"
    auth_token_comfy_org = "AUTH_TOKEN_COMFY_ORG"
    api_key_comfy_org = "API_KEY_COMFY_ORG"


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
        **kwargs: Any,
    ):
        self.unique_id = unique_id
        self.prompt = prompt
        self.extra_pnginfo = extra_pnginfo
        self.dynprompt = dynprompt
        self.auth_token_comfy_org = auth_token_comfy_org
        self.api_key_comfy_org = api_key_comfy_org

    def __getattr__(self, key: str) -> None:
        return None

    @classmethod
    def from_dict(cls, d: dict | None) -> HiddenHolder:
        values = d or {}
        return cls(**{hidden.name: values.get(hidden) for hidden in Hidden})


@dataclass
class NodeInfoV1:
    """A node as /object_info describes it."""

    input: dict | None = None
    input_order: dict[str, list[str]] | None = None
    output: list | None = None
    output_is_list: list[bool] | None = None
    output_name: list[str] | None = None
    output_tooltips: list[str | None] | None = None
    name: str | None = None
    display_name: str | None = None
    description: str | None = None
    python_module: Any = None
    category: str | None = None
    output_node: bool | None = None
    deprecated: bool | None = None
    experimental: bool | None = None
    api_node: bool | None = None
    search_aliases: list[str] | None = None
    is_input_list: bool | None = None


@dataclass
class Schema:
    """What a V3 node is: its id, its sockets and widgets, and how it is executed."""

    node_id: str
    display_name: str | None = None
    category: str = "sd"
    inputs: list[Input] | None = None
    outputs: list[Output] | None = None
    hidden: list[Hidden] | None = None
    description: str = ""
    search_aliases: list[str] = field(default_factory=list)
    is_input_list: bool = False
    is_output_node: bool = False
    is_deprecated: bool = False
    is_experimental: bool = False
    is_api_node: bool = False
    not_idempotent: bool = False
    enable_expand: bool = False

    def validate(self) -> None:
        """Raise ValueError, naming every id that is there twice; an id shared by an input and an output is refused as
        in 0.3.64.
        """
        inputs, outputs = [socket.id for socket in self.inputs or []], [socket.id for socket in self.outputs or []]
        issues = [
            f"{side} ids must be unique, but {sorted(key for key, count in Counter(ids).items() if count > 1)} are not."
            for side, ids in (("Input", inputs), ("Output", outputs))
            if len(set(ids)) != len(ids)
        ]
        if shared := set(inputs) & set(outputs):
            issues.append(f"Ids must be unique between inputs and outputs, but {shared} are not.")
        if issues:
            raise ValueError("\n".join(issues))

    def finalize(self) -> None:
        """Ask for the hidden values that the node's kind needs, and give every output an id."""
        needed = [Hidden.auth_token_comfy_org, Hidden.api_key_comfy_org] if self.is_api_node else []
        needed += [Hidden.prompt, Hidden.extra_pnginfo] if self.is_output_node else []
        for hidden in needed:
            if hidden not in (self.hidden or []):
                self.hidden = [*(self.hidden or []), hidden]
        for index, output in enumerate(self.outputs or []):
            if output.id is None:
                output.id = f"_{index}_{output.io_type}_"

    def get_v1_info(self, cls: type) -> NodeInfoV1:
        """The node as a V1 class would describe itself."""
        inputs: dict[str, dict] = {"required": {}}
        for socket in self.inputs or []:
            add_to_dict_v1(socket, inputs)
        if self.hidden:
            inputs["hidden"] = {hidden.name: (hidden.value,) for hidden in self.hidden}
        outputs = self.outputs or []
        return NodeInfoV1(
            input=inputs,
            input_order={kind: list(sockets) for kind, sockets in inputs.items()},
            output=[output.io_type for output in outputs],
            output_is_list=[output.is_output_list for output in outputs],
            output_name=[output.display_name or output.io_type for output in outputs],
            output_tooltips=[output.tooltip or None for output in outputs],
            name=self.node_id,
            display_name=self.display_name,
            description=self.description,
            python_module=getattr(cls, "RELATIVE_PYTHON_MODULE", "nodes"),
            category=self.category,
            output_node=self.is_output_node,
            deprecated=self.is_deprecated,
            experimental=self.is_experimental,
            api_node=self.is_api_node,
            search_aliases=self.search_aliases or None,
            is_input_list=self.is_input_list,
        )


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
    hidden: HiddenHolder | None = None

    _DESCRIPTION = _CATEGORY = _EXPERIMENTAL = _DEPRECATED = _API_NODE = _OUTPUT_NODE = _INPUT_IS_LIST = (
        _NOT_IDEMPOTENT
    ) = None
    _RETURN_TYPES = _RETURN_NAMES = _OUTPUT_IS_LIST = _OUTPUT_TOOLTIPS = None

    DESCRIPTION = _of_schema("DESCRIPTION")
    CATEGORY = _of_schema("CATEGORY")
    EXPERIMENTAL = _of_schema("EXPERIMENTAL")
    DEPRECATED = _of_schema("DEPRECATED")
    API_NODE = _of_schema("API_NODE")
    OUTPUT_NODE = _of_schema("OUTPUT_NODE")
    INPUT_IS_LIST = _of_schema("INPUT_IS_LIST")
    NOT_IDEMPOTENT = _of_schema("NOT_IDEMPOTENT")
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
        return "EXECUTE_NORMALIZED_ASYNC" if inspect.iscoroutinefunction(cls.execute) else "EXECUTE_NORMALIZED"  # type: ignore[attr-defined]

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
        clone.hidden = HiddenHolder.from_dict((v3_data or {}).get("hidden_inputs"))  # type: ignore[attr-defined]
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
            "API_NODE": schema.is_api_node,
            "OUTPUT_NODE": schema.is_output_node,
            "INPUT_IS_LIST": schema.is_input_list,
            "NOT_IDEMPOTENT": schema.not_idempotent,
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
