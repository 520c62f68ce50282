"""The widgets that a node shows in the editor, and their values, read from the `widgets_values` that ComfyUI's front
end saves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .schema import AUTOGROW, COMBO, DYNAMIC_COMBO, IMAGE_COMPARE, Input, Schema

CUSTOM_COMBO = "CustomCombo"  # a choice between texts that its user enters: option1, option2 …
VIEWS = ("Load3D", "Load3DAnimation")  # they need pictures of what the browser shows of a 3D model
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

    def unusable(self, values: Mapping[str, Any]) -> list[tuple[str, str]]:
        """(input, why) for each input of a node with these values that cannot be known without a browser."""
        found: list[tuple[str, str]] = []
        for item in self.schema.inputs:
            found += _unusable(item, values)
        if self.schema.id in VIEWS:
            found.append(("image", _VIEW))
        return found

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


def _unusable(item: Input, values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if item.type == DYNAMIC_COMBO:
        yield from _unusable_choice(item, values)
    elif item.dynamic and item.type != AUTOGROW:
        yield item.name, f"inputs of type {item.type} cannot be read from the editor's format; {_EXPORT}"
    elif item.type == AUTOGROW and any(one.widget for one in item.grown()):
        yield item.name, f"its inputs grow and hold values, which cannot be read from the editor's format; {_EXPORT}"


def _unusable_choice(item: Input, values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What is wrong with a dynamic combo's choice and with what it chooses."""
    choice = values.get(item.name)
    keys = [option["key"] for option in item.settings.get("options") or ()]
    if choice not in keys:
        yield (
            item.name,
            f"{choice!r} is not a choice of this ComfyUI, which has {', '.join(map(str, keys))}; choose one of them in"
            " the editor, or update ComfyUI",
        )
    for one in item.inputs_of(choice):
        yield from _unusable(one, values)


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
