"""Reads the inputs and outputs of a node from its class (INPUT_TYPES, RETURN_TYPES), for V1 and V3 nodes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

COMBO = "COMBO"
DYNAMIC_COMBO = "COMFY_DYNAMICCOMBO_V3"  # a choice, and with it the inputs of the chosen option, named `name.key`
AUTOGROW = "COMFY_AUTOGROW_V3"  # sockets of one type, as many as are linked, named `name.key`
IMAGE_COMPARE = "IMAGECOMPARE"
MATCH_TYPE = "COMFY_MATCHTYPE_V3"  # a socket that takes the type of what is linked to its node
VIEWPORT = "LOAD_3D"  # what the viewer of a 3D model shows; only a browser draws it
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
        IMAGE_COMPARE,
        VIEWPORT,
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
        drawn = self.type == DYNAMIC_COMBO or str(self.settings.get("widgetType") or self.type) in WIDGETS
        return drawn and not self.settings.get("forceInput")

    @property
    def socket_type(self) -> str:
        """The types that the editor lets you link: of a match type those that it may become."""
        if self.type != MATCH_TYPE:
            return self.type
        return str((self.settings.get("template") or {}).get("allowed_types") or "*")

    @property
    def dynamic(self) -> bool:
        """Whether this is a dynamic V3 input, which stands for several inputs named `name.key`."""
        return self.type.startswith("COMFY_") and self.type.endswith("_V3") and self.type != MATCH_TYPE

    @property
    def default(self) -> Any:
        """The first value of the widget."""
        if self.type == DYNAMIC_COMBO:
            return next(iter(self.choices), None)
        if "default" in self.settings:
            return self.settings["default"]
        if self.type == COMBO:
            if self.options:
                return self.options[0]
            return None
        firsts = {"INT": 0, "FLOAT": 0, "BOOLEAN": False, "STRING": "", "COLOR": "#ffffff", VIEWPORT: ""}
        if self.type == IMAGE_COMPARE:
            return ["", ""]  # no picture on either side
        return firsts.get(self.type)

    @property
    def choices(self) -> list[Any]:
        """The choices of a dynamic combo."""
        return [option["key"] for option in self.settings.get("options") or ()]

    def inputs_of(self, choice: Any) -> list[Input]:
        """The inputs that a dynamic combo has with this choice, required ones first; none for one that it lacks."""
        for option in self.settings.get("options") or ():
            if option["key"] == choice:
                return [replace(one, name=f"{self.name}.{one.name}") for one in read_inputs(option["inputs"])]
        return []

    def grown(self) -> list[Input]:
        """What each of an autogrow's inputs is."""
        return read_inputs((self.settings.get("template") or {}).get("input") or {})


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
    inputs = read_inputs(cls.INPUT_TYPES())
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


def read_inputs(spec: Mapping[str, Any]) -> list[Input]:
    """The inputs that {"required": …, "optional": …} declares."""
    inputs = []
    for kind in ("required", "optional"):
        for name, entry in (spec.get(kind) or {}).items():
            inputs.append(_input(name, entry, kind == "required"))
    return inputs


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
