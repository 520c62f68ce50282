"""The widgets that a node shows in the editor, and their values, read from the `widgets_values` that ComfyUI's front
end saves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .schema import COMBO, Input, Schema

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
        self.dynamic = any(item.dynamic for item in schema.inputs)
        self._names = [widget.name for widget in self.widgets]
        self._setting = [widget for widget in self.widgets if widget.input is not None]
        self._was_widget = _were_widgets(schema, self._names)

    def values(self, saved: Any) -> dict[str, Any]:
        """The value of every widget that sets an input: the saved value if there is one, else the default.

        `saved` is the node's `widgets_values`: a list, or a dict by name as some packs save it."""
        saved_values: Mapping[str, Any] = saved if isinstance(saved, Mapping) else {}
        if isinstance(saved, list):
            saved_values = dict(zip(self._names, self._without_sockets(saved), strict=False))
        return {
            widget.name: _settled(saved_values.get(widget.name, widget.default), widget) for widget in self._setting
        }

    def _without_sockets(self, saved: Sequence[Any]) -> Sequence[Any]:
        """Drop the values of inputs that are now sockets (forceInput): old files still hold them, which the number of
        values shows.
        """
        if len(self._was_widget) != len(saved):
            return saved
        return [value for value, dropped in zip(saved, self._was_widget, strict=True) if not dropped]


def _widgets(schema: Schema, items: Sequence[Input]) -> list[Widget]:
    result: list[Widget] = []
    for item in items:
        if item.widget:
            result.append(Widget(item.name, item, item.default))
            result += [Widget(name, None) for name in _controls(item)]
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
    if value is None and widget.input.type == COMBO:
        if widget.input.options:
            return widget.input.options[0]
        return None
    if widget.input.type == "STRING" and widget.input.settings.get("multiline") and not isinstance(value, str):
        if value is None:
            return ""
        return str(value)
    return value
