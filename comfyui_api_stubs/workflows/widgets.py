"""The widgets that a node shows in the editor, and their values, read from the `widgets_values` that ComfyUI's front
end saves.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .schema import AUTOGROW, COMBO, DYNAMIC_COMBO, IMAGE_COMPARE, VIEWPORT, Input, Schema

CUSTOM_COMBO = "CustomCombo"  # a choice between texts that its user enters: option1, option2 …
VIEWS = ("Load3D", "Load3DAnimation")  # they need pictures of what the browser shows of a 3D model
VIEW_BUTTONS = ("upload 3d model", "upload extra resources", "clear")  # beside the file of a 3D view
UPLOADS = ("image_upload", "animated_image_upload", "video_upload")


@dataclass(frozen=True)
class Widget:
    """One widget: the input that it sets, or None for one that only the editor uses (control after generate, an upload
    button).
    """

    name: str
    input: Input | None
    default: Any = None


class EditorNode:
    """What the editor shows of every node of a class."""

    def __init__(self, schema: Schema):
        self.schema = schema
        # required inputs first, then the optional ones
        items = [item for item in schema.inputs if item.required]
        items += [item for item in schema.inputs if not item.required]
        self.widgets = _widgets(schema, items)  # in the order of `widgets_values`
        self.sockets = [item for item in items if not item.widget]  # plain sockets first, then the widgets' sockets
        self.sockets += [item for item in items if item.widget and not item.settings.get("socketless")]
        self._names = [widget.name for widget in self.widgets]
        self._was_widget = _were_widgets(schema, self._names)

    def values(self, saved: Any) -> dict[str, Any]:
        """The value of every widget that sets an input: the saved value if there is one, else the default.

        `saved` is the node's `widgets_values`: a list, or a dict by name as some packs save it."""
        take = _by_name(saved if isinstance(saved, Mapping) else {})
        if isinstance(saved, list):
            take = _in_turn(self._without_sockets(saved))
        values: dict[str, Any] = {}
        _fill(values, self.widgets, take)
        if self.schema.id == CUSTOM_COMBO and isinstance(saved, list):
            values.update(_own_options(saved[2:]))
        return values

    def unreadable(self, values: Mapping[str, Any]) -> list[tuple[str, str]]:
        """(input, why) for each input of a node with these values that cannot be read from the editor's format."""
        return [found for item in present(self.schema, values) for found in _unreadable(item)]

    def choose(self, values: dict[str, Any], name: str, choice: Any) -> None:
        """Change a widget's value as its user would: what a dynamic combo chose goes, and the new inputs have their
        defaults.
        """
        item = next((item for item in present(self.schema, values) if item.name == name), None)
        if item is not None and item.type == DYNAMIC_COMBO and choice != values[name]:
            for old in [key for key in values if key.startswith(f"{name}.")]:
                del values[old]
            _fill(values, _widgets_of(item.inputs_of(choice)), lambda widget: widget.default)
        values[name] = choice

    def _without_sockets(self, saved: Sequence[Any]) -> Sequence[Any]:
        """Drop the values of inputs that are now sockets (forceInput): old files still hold them, which the number of
        values shows.
        """
        if len(self._was_widget) != len(saved):
            return saved
        return [value for value, dropped in zip(saved, self._was_widget, strict=True) if not dropped]


_EXPORT = "save the workflow with 'Export (API)' and run that file"
_VIEW = (
    "it sends pictures of the 3D view, which only a browser draws; let the editor run this workflow, or save it there"
    " with 'Export (API)' while the view is shown, and run that file"
)


def present(schema: Schema, values: Mapping[str, Any]) -> Iterator[Input]:
    """The inputs of a node with these values: its own, each followed by those that it chooses."""
    left = list(reversed(schema.inputs))
    while left:
        item = left.pop()
        yield item
        if item.type == DYNAMIC_COMBO:
            left += reversed(item.inputs_of(values.get(item.name)))


def has_slot(schema: Schema, values: Mapping[str, Any], name: str) -> bool:
    """Whether a slot of a file is there: one behind a dynamic combo is if the choice brings it, or an input that grows
    into it.
    """
    owner = schema.input(name)
    if owner is None or owner.name == name or owner.type != DYNAMIC_COMBO:
        return True
    behind = [item for item in present(schema, values) if item.name.startswith(f"{owner.name}.")]
    return any(item.name == name or (item.dynamic and name.startswith(f"{item.name}.")) for item in behind)


def _unreadable(item: Input) -> Iterator[tuple[str, str]]:
    if item.dynamic and item.type not in (AUTOGROW, DYNAMIC_COMBO):
        yield item.name, f"inputs of type {item.type} cannot be read from the editor's format; {_EXPORT}"
    elif item.type == AUTOGROW and any(one.widget for one in item.grown()):
        yield item.name, f"its inputs grow and hold values, which cannot be read from the editor's format; {_EXPORT}"


def cannot_run(schema: Schema, inputs: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(input, why) for what a node of the API format sends and no run can have: choices that its ComfyUI lacks, and
    pictures that only a browser draws.
    """
    for item in present(schema, inputs):
        choice = inputs.get(item.name)
        if item.type != DYNAMIC_COMBO or item.name not in inputs or isinstance(choice, list):
            continue  # a linked choice is known when it runs
        if choice not in item.choices:
            names = ", ".join(map(str, item.choices))
            message = (
                f"{choice!r} is not a choice of this ComfyUI, which has {names}; choose one of them in the editor,"
            )
            yield item.name, f"{message} or update ComfyUI"
    if schema.id in VIEWS and not isinstance(inputs.get("image"), (dict, list)):
        yield "image", _VIEW


def of_unknown(saved: Any) -> dict[str, Any]:
    """The values of a node that its ComfyUI lacks: the editor keeps them without their names."""
    names = ["UNKNOWN", *(f"UNKNOWN_{number}" for number in range(1, len(saved)))] if isinstance(saved, list) else []
    plain = (str, int, float, bool)
    return {
        name: value if isinstance(value, plain) else json.dumps(value, separators=(",", ":"), ensure_ascii=False)
        for name, value in zip(names, saved or (), strict=False)
    }


def _own_options(saved: Sequence[Any]) -> dict[str, Any]:
    """The options of a Custom Combo as the editor shows them: up to the first empty one, which is for a new option."""
    options: dict[str, Any] = {}
    for number, text in enumerate([*saved, ""], 1):
        options[f"option{number}"] = text
        if not text:
            break
    return options


def own_index(inputs: Mapping[str, Any], choice: Any) -> int:
    """The place of a Custom Combo's choice among its options; -1 if it is none of them."""
    options = [value for name, value in inputs.items() if name.startswith("option")]
    if choice in options:
        return options.index(choice)
    return -1


# what gives a widget its value: the saved one, else its default
_Take = Callable[[Widget], Any]


def _by_name(saved: Mapping[str, Any]) -> _Take:
    return lambda widget: saved.get(widget.name, widget.default)


def _in_turn(saved: Sequence[Any]) -> _Take:
    left = iter(saved)
    return lambda widget: next(left, widget.default)


def _fill(values: dict[str, Any], shown: Sequence[Widget], take: _Take) -> None:
    """Put the widgets' values into `values`. What a dynamic combo chooses has its own widgets right behind it."""
    for widget in shown:
        value = take(widget)
        if widget.input is None:
            continue
        values[widget.name] = _settled(value, widget)
        if widget.input.type == DYNAMIC_COMBO:
            _fill(values, _widgets_of(widget.input.inputs_of(values[widget.name])), take)


def _widgets_of(items: Sequence[Input]) -> list[Widget]:
    result: list[Widget] = []
    for item in items:
        if item.type == VIEWPORT and any(widget.name == "model_file" for widget in result):
            result += [Widget(name, None) for name in VIEW_BUTTONS]
        if item.widget:
            result.append(Widget(item.name, item, item.default))
            result += [Widget(name, None) for name in _controls(item)]
    return result


def _widgets(schema: Schema, items: Sequence[Input]) -> list[Widget]:
    result = _widgets_of(items)
    if any(
        item.required and item.type == COMBO and any(item.settings.get(key) for key in UPLOADS)
        for item in schema.inputs
    ):
        result.append(Widget("upload", None))
    return result


def _controls(item: Input) -> list[str]:
    """The widgets that the editor adds to change a value after each run; their values are not inputs."""
    control = item.settings.get("control_after_generate")
    if control is None and item.type == "INT":
        control = item.name in ("seed", "noise_seed")
    if not control or item.type not in ("INT", "FLOAT", COMBO):
        return []
    if isinstance(control, str) and item.type != COMBO:
        name = control
    else:
        name = "control_after_generate"
    if item.type == COMBO:
        return [f"{item.name}:{name}", f"{item.name}:control_filter_list"]
    return [f"{item.name}:{name}"]


def _were_widgets(schema: Schema, shown: Sequence[str]) -> list[bool]:
    """For each value of an old file whether it is of an input that was a widget and is now a socket."""
    names = set(shown)
    flags: list[bool] = []
    for item in schema.inputs:
        if item.name in names or item.settings.get("forceInput"):
            force = bool(item.settings.get("forceInput"))
            flags += [force, False] if item.settings.get("control_after_generate") else [force]
    return flags


def _settled(value: Any, widget: Widget) -> Any:
    """A value as the editor shows it: an empty COMBO shows its first choice, a text box always holds text."""
    assert widget.input is not None
    if widget.input.type == IMAGE_COMPARE:
        return widget.default  # pictures of the last run, which nothing saved
    if value is None and widget.input.type == COMBO:
        if widget.input.options:
            return widget.input.options[0]
        return None
    if widget.input.type == "STRING" and widget.input.settings.get("multiline") and not isinstance(value, str):
        if value is None:
            return ""
        return str(value)
    return value
