"""Describes io and ui of the comfy_api that is on the path: socket types, the options that their widgets send, classes
and functions. Run as a script by `compare`, in a process of its own: sockets.py FOLDER prints JSON.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import json
import sys
from typing import Any


def arguments_of(function: Any) -> list[str]:
    """A function's parameters as text, those with a default as name=default."""
    found = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name in ("self", "cls"):
            continue
        text = str(parameter.replace(annotation=inspect.Parameter.empty))
        found.append(text)
    return found


def samples(io: Any, socket: str) -> dict[str, Any]:
    """A value for each parameter that an Input has."""
    default = {
        "Boolean": True,
        "Int": 3,
        "Float": 0.5,
        "String": "text",
        "Combo": "b",
        "MultiCombo": ["a"],
        "Color": "#102030",
        "Colors": ["#102030"],
        "Curve": [(0.0, 1.0), (1.0, 0.0)],
        "Webcam": "webcam.png",
    }.get(socket, {"own": 1})
    values = {
        "id": "x",
        "display_name": "Name",
        "optional": True,
        "tooltip": "A tip.",
        "lazy": True,
        "default": default,
        "socketless": True,
        "widget_type": "W",
        "force_input": True,
        "extra_dict": {"own": 1},
        "raw_link": True,
        "advanced": True,
        "min": 1,
        "max": 9,
        "step": 2,
        "round": 0.1,
        "display_mode": io.NumberDisplay.slider,
        "gradient_stops": [{"offset": 0.0, "color": [1, 2, 3]}],
        "label_on": "yes",
        "label_off": "no",
        "multiline": True,
        "placeholder": "Write here",
        "dynamic_prompts": True,
        "options": ["a", "b"],
        "control_after_generate": True,
        "upload": io.UploadType.image,
        "image_folder": io.FolderType.input,
        "remote": io.RemoteOptions("/list", True, timeout=5),
        "chip": True,
        "component": "box",
        "display": "wide",
        "show_midpoint": True,
        "midpoint_scale": "log",
        "value_min": 0.1,
        "value_max": 0.9,
        "types": [io.Int, io.Mask],
    }
    return values | dynamic_samples(io, socket)


def dynamic_samples(io: Any, socket: str) -> dict[str, Any]:
    """Those of sockets that hold others."""
    if socket == "MatchType":
        return {"template": io.MatchType.Template("t", [io.Image, io.Mask])}
    if socket == "Autogrow":
        return {"template": io.Autogrow.TemplatePrefix(io.Int.Input("n", default=1), "n", min=2, max=4)}
    if socket == "DynamicCombo":
        inner = [io.Int.Input("n", default=1), io.Image.Input("image", optional=True)]
        return {"options": [io.DynamicCombo.Option("a", inner), io.DynamicCombo.Option("b", [])]}
    return {}


def options(io: Any, socket: str, kind: Any) -> dict[str, Any]:
    """What an Input or Output sends to the editor: with only what it needs, and with everything that it takes."""
    parameters = inspect.signature(kind.__init__).parameters.values()
    named = [parameter for parameter in parameters if parameter.name not in ("self", "args", "kwargs")]
    values = samples(io, socket)
    told = {}
    for case in ("needed", "all"):
        chosen = [parameter for parameter in named if case == "all" or parameter.default is parameter.empty]
        made = kind(**{parameter.name: values[parameter.name] for parameter in chosen if parameter.name in values})
        told[case] = {"io_type": made.get_io_type() if hasattr(made, "get_io_type") else made.io_type}
        told[case]["options"] = made.as_dict()
    return told


def described_socket(io: Any, name: str, kind: Any) -> dict[str, Any]:
    """One socket type."""
    told: dict[str, Any] = {"io_type": kind.io_type}
    for side in ("Input", "Output"):
        found = getattr(kind, side, None)
        if found is not None:
            told[side] = {"arguments": arguments_of(found.__init__), **options(io, name, found)}
    for inner, value in vars(kind).items():
        if inspect.isclass(value) and inner not in ("Input", "Output", "Type") and not inner.startswith("_"):
            told[inner] = described_class(value)
    return told


def described_class(kind: Any) -> dict[str, Any]:
    """Any other class."""
    if issubclass(kind, enum.Enum):
        return {"members": {member.name: member.value for member in kind}}
    if dataclasses.is_dataclass(kind):
        return {"fields": [field.name for field in dataclasses.fields(kind)]}
    if hasattr(kind, "__total__"):
        return {"keys": sorted(kind.__annotations__)}
    methods = {}
    for name in dir(kind):
        found = inspect.getattr_static(kind, name)
        found = getattr(found, "__func__", found)
        if inspect.isfunction(found) and (name == "__init__" or not name.startswith("_")):
            methods[name] = arguments_of(found)
    return {"methods": methods}


def described(io: Any, name: str, found: Any) -> dict[str, Any]:
    """Whatever a module gives under a name."""
    if inspect.isfunction(found):
        return {"arguments": arguments_of(found)}
    if isinstance(getattr(found, "io_type", None), str):
        return described_socket(io, name, found)
    return described_class(found)


def describe() -> dict[str, dict[str, Any]]:
    """{"io": {name: what it is}, "ui": …} of the comfy_api that is imported."""
    from comfy_api.latest import io, ui

    told: dict[str, dict[str, Any]] = {}
    for title, module in (("io", io), ("ui", ui)):
        names = getattr(module, "__all__", None) or public_names(module)
        told[title] = {name: described(io, name, getattr(module, name)) for name in sorted(names)}
    return told


def public_names(module: Any) -> list[str]:
    """The classes and functions of a module that says not itself which are public."""
    found = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    wanted = [name for name, value in found.items() if inspect.isclass(value) or inspect.isfunction(value)]
    return [name for name in wanted if found[name].__module__.startswith("comfy_api.latest.")]


if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])
    sys.argv[1:] = []  # ComfyUI reads the command line
    print(json.dumps(describe(), default=str))
