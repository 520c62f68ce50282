"""Reads the inputs and outputs of a node from its class (INPUT_TYPES, RETURN_TYPES), for V1 and V3 nodes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

COMBO = "COMBO"
NUMBERS = ("INT", "FLOAT")
# Types that the graph editor draws as a widget; every other type is a socket.
WIDGETS = frozenset(
    (
        "INT",
        "FLOAT",
        "BOOLEAN",
        "STRING",
        COMBO,
        "MARKDOWN",
        "COLOR",
        "TEXTAREA",
        "IMAGEUPLOAD",
        "BOUNDING_BOX",
        "BOUNDING_BOXES",
        "CURVE",
        "RANGE",
        "COLORS",
        "CHART",
        "GALLERIA",
        "PAINTER",
        "COMPOSITOR",
        "VIDEO_EDIT",
        "IMAGECOMPARE",
    )
)


@dataclass(frozen=True)
class Input:
    """One input of a node: `type` is a socket type or a widget type, `options` the choices of a COMBO."""

    name: str
    type: str
    required: bool
    settings: Mapping[str, Any] = field(default_factory=dict)
    options: tuple[Any, ...] | None = None

    @property
    def widget(self) -> bool:
        """Whether the editor draws a widget where you can enter a value, not only a socket."""
        return str(self.settings.get("widgetType") or self.type) in WIDGETS and not self.settings.get("forceInput")

    @property
    def dynamic(self) -> bool:
        """Whether this is a dynamic V3 input, which stands for several inputs named `name.key`."""
        return self.type.startswith("COMFY_") and self.type.endswith("_V3") and self.type != "COMFY_MATCHTYPE_V3"

    @property
    def default(self) -> Any:
        """The first value of the widget."""
        if "default" in self.settings:
            return self.settings["default"]
        if self.type == COMBO:
            if self.options:
                return self.options[0]
            return None
        return {"INT": 0, "FLOAT": 0, "BOOLEAN": False, "STRING": "", "COLOR": "#ffffff"}.get(self.type)


@dataclass(frozen=True)
class Schema:
    """A node class: its inputs in the editor's order, its output types, and whether it is an output node, which makes a
    workflow run.
    """

    id: str
    inputs: tuple[Input, ...]
    outputs: tuple[str, ...]
    output_node: bool
    title: str = ""
    own_checks: frozenset[str] = frozenset()
    checks_all: bool = False

    def named_in(self, text: str) -> set[str]:
        """The inputs whose names in the editor are in a text; of names that overlap the longest counts."""
        labels = {str(one.settings.get("display_name") or one.name): one.name for one in self.inputs}
        named = set()
        for label in sorted(labels, key=len, reverse=True):
            if label in text:
                named.add(labels[label])
                text = text.replace(label, " ")
        return named

    def input(self, name: str) -> Input | None:
        """The input with this name; for `name.key`, the dynamic input `name`."""
        match = self._by_name.get(name) or self._by_name.get(name.split(".", 1)[0])
        if match is None or match.name == name or match.dynamic:
            return match
        return None

    @cached_property
    def _by_name(self) -> dict[str, Input]:
        return {item.name: item for item in self.inputs}

    def checks(self, name: str) -> bool:
        """Whether the node's own validation function checks this input, so that we do not check limits and choices."""
        return self.checks_all or name in self.own_checks


def describe(class_type: str, cls: Any, title: str = "") -> Schema:
    """The schema of a node class; `title` is the name that the editor shows."""
    spec = cls.INPUT_TYPES()
    entries = [
        (kind, name, entry) for kind in ("required", "optional") for name, entry in (spec.get(kind) or {}).items()
    ]
    inputs = [_input(name, entry, kind == "required") for kind, name, entry in entries]
    outputs = tuple(_type(kind)[0] for kind in (getattr(cls, "RETURN_TYPES", None) or ()))
    names, everything = _own_checks(cls)
    return Schema(
        class_type,
        tuple(inputs),
        outputs,
        bool(getattr(cls, "OUTPUT_NODE", False)),
        title or class_type,
        names,
        everything,
    )


def catalogue(classes: Mapping[str, Any], titles: Mapping[str, str]) -> Callable[[str], Schema | None]:
    """A function that returns the schema of a class type in the host; it reads each class once, on first use."""
    schemas: dict[str, Schema] = {}

    def look_up(class_type: str) -> Schema | None:
        if class_type not in schemas and class_type in classes:
            schemas[class_type] = describe(class_type, classes[class_type], titles.get(class_type, ""))
        return schemas.get(class_type)

    return look_up


def _input(name: str, entry: Any, required: bool) -> Input:
    if not isinstance(entry, (tuple, list)):
        entry = (entry,)
    if len(entry) > 1 and isinstance(entry[1], Mapping):
        settings = entry[1]
    else:
        settings = {}
    kind, options = _type(entry[0])
    if kind == COMBO and options is None:
        options = tuple(settings.get("options") or ())
    return Input(name, kind, required, settings, options)


def _type(kind: Any) -> tuple[str, tuple[Any, ...] | None]:
    """The type as a string, and its choices if the type is given as a list."""
    if isinstance(kind, (list, tuple)):
        return (COMBO, tuple(kind))
    return (str(kind), None)


def _own_checks(cls: Any) -> tuple[frozenset[str], bool]:
    """The inputs that the class's own VALIDATE_INPUTS (V1) or validate_inputs (V3) takes, and whether it takes all of
    them.
    """
    function = getattr(cls, "VALIDATE_INPUTS", None)
    if hasattr(cls, "define_schema"):
        bases = (
            base
            for base in cls.__mro__
            if "validate_inputs" in base.__dict__ and not base.__module__.startswith("comfy_api.")
        )
        function = next((base.__dict__["validate_inputs"] for base in bases), None)
    if function is None:
        return frozenset(), False
    spec = inspect.getfullargspec(getattr(function, "__func__", function))
    return frozenset(spec.args), spec.varkw is not None
