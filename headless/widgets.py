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


def ordered(schema: Schema) -> list[Input]:
    """The inputs in the editor's order: required, then optional."""
    return [item for item in schema.inputs if item.required] + [item for item in schema.inputs if not item.required]


def sockets(schema: Schema) -> list[Input]:
    """The inputs that have a socket, in the editor's order: plain sockets first, then the widgets' sockets."""
    items = ordered(schema)
    widget_inputs = [item for item in items if item.widget and not item.settings.get("socketless")]
    return [item for item in items if not item.widget] + widget_inputs


def widgets(schema: Schema) -> list[Widget]:
    """The node's widgets, in the order of `widgets_values`."""
    result: list[Widget] = []
    for item in ordered(schema):
        if item.widget:
            result.append(Widget(item.name, item, item.default))
            result += [Widget(name, None) for name in _controls(item)]
    if any(
        item.required and item.type == COMBO and any(item.settings.get(key) for key in UPLOADS)
        for item in schema.inputs
    ):
        result.append(Widget("upload", None))
    return result


def values(schema: Schema, saved: Any) -> dict[str, Any]:
    """The value of every widget that sets an input: the saved value if there is one, else the default.

    `saved` is the node's `widgets_values`: a list, or a dict by name as some packs save it."""
    node_widgets = widgets(schema)
    saved_values: Mapping[str, Any] = saved if isinstance(saved, Mapping) else {}
    if isinstance(saved, list):
        saved_values = dict(
            zip([widget.name for widget in node_widgets], _without_sockets(schema, node_widgets, saved), strict=False)
        )
    return {
        widget.name: _settled(saved_values.get(widget.name, widget.default), widget)
        for widget in node_widgets
        if widget.input is not None
    }


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


def _without_sockets(schema: Schema, shown: Sequence[Widget], saved: Sequence[Any]) -> list[Any]:
    """Drop the values of inputs that are now sockets (forceInput): old files still hold them, which the number of
    values shows.
    """
    names = {widget.name for widget in shown}
    flags: list[bool] = []
    for item in schema.inputs:
        if item.name in names or item.settings.get("forceInput"):
            force = bool(item.settings.get("forceInput"))
            flags += [force, False] if item.settings.get("control_after_generate") else [force]
    if len(flags) != len(saved):
        return list(saved)
    return [value for value, dropped in zip(saved, flags, strict=True) if not dropped]


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
