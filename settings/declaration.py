"""A setting is declared once, as a field of a dataclass: its label, default, bounds, choices and help, and what other
trainers call it.

From a declaration come the input of a node, the check of every value whatever way it came in, the English texts, and
the tables of docs/coming_from.md and of the help pages:

    @dataclass(frozen=True)
    class AdapterSettings:
        rank: int = setting("rank (dim)", 16, "The rank of the matrices.", low=1, high=4096, kohya="--network_dim")
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import Any

Choices = Sequence[str] | Callable[[], Sequence[str]]
Text = str | Callable[[], str]
Name = str | tuple[str, str]


@dataclass(frozen=True)
class Setting:
    """What is known of a setting. `kind` is the type of its value: bool, int, float or str.

    - Numbers lie from `low` to `high`, both included. `step` is what one click in the editor changes; `finer`: the
      editor keeps numbers between two steps.
    - `about` is the help, or a function that writes it: where choices are records, each may say what it is.
    - `choices` are all values that a text may have, or a function that lists them. `multiline`: a text of several
      lines. `read` makes the value out of a text ("0.05 0.10": two numbers); it raises ValueError.
    - `advanced`: folded away in the editor.
    - `elsewhere` maps a trainer ("kohya", "diffusers" ...) to its name for the same setting: a text, or a name and a
      note. Several names stand with commas between them.
    """

    label: str
    default: bool | int | float | str
    about: Text
    low: float | None = None
    high: float | None = None
    step: float | None = None
    choices: Choices | None = None
    advanced: bool = False
    multiline: bool = False
    finer: bool = False
    read: Callable[[str], object] | None = None
    elsewhere: Mapping[str, Name] = field(default_factory=dict)

    @property
    def kind(self) -> type:
        """bool, int, float or str."""
        return type(self.default)

    @property
    def help(self) -> str:
        """What the setting does, when to change it and to which value."""
        return self.about() if callable(self.about) else self.about

    def options(self) -> list[str] | None:
        """All values that a text may have; None where it may be any."""
        if callable(self.choices):
            return list(self.choices())
        return None if self.choices is None else list(self.choices)

    def value(self, given: Any) -> Any:
        """What a value without an error means: of this kind, or read from its text. Raises ValueError."""
        return self.kind(given) if self.read is None else self.read(given)

    def error(self, value: object) -> str:
        """What is wrong with a value, by the setting's label; empty where nothing is."""
        return value_error(self.label, self.kind, value, self.low, self.high, self.options())


def setting(
    label: str,
    default: Any,
    about: Text,
    *,
    low: float | None = None,
    high: float | None = None,
    step: float | None = None,
    choices: Choices | None = None,
    advanced: bool = False,
    multiline: bool = False,
    finer: bool = False,
    read: Callable[[str], object] | None = None,
    **elsewhere: Name,
) -> Any:
    """A dataclass field that declares a setting (`Setting` explains the arguments). Further keywords are its names
    elsewhere: `kohya="--network_dim"`, or with a note `kohya=("--min_timestep", "a fraction: 0.4 for 400")`.
    """
    declared = Setting(label, default, about, low, high, step, choices, advanced, multiline, finer, read, elsewhere)
    return field(default=default, metadata={"setting": declared})


def settings_of(settings: Any) -> dict[str, Setting]:
    """The settings that a dataclass, or an instance of one, declares, by field, in order. Other fields are none."""
    return {one.name: one.metadata["setting"] for one in fields(settings) if "setting" in one.metadata}


def read_values(settings: Any) -> list[str]:
    """What is wrong with the values of a dataclass's settings, each by itself. Called on creation, before what depends
    on several of them is checked.

    A value that came as a text (`Setting.read`) or as another kind of number (2.0 for 2) is replaced by what it means.
    """
    errors = []
    for name, one in settings_of(settings).items():
        value = getattr(settings, name)
        if one.read is not None and not isinstance(value, str):
            continue  # it was read already
        error = one.error(value)
        if not error:
            try:
                object.__setattr__(settings, name, one.value(value))
            except ValueError as unreadable:
                error = f"{one.label}: {unreadable}"
        if error:
            errors.append(error)
    return errors


def check_values(settings: Any, node: str, *rules: Callable[[Any], Iterable[str]]) -> None:
    """Read the values of a dataclass's settings, on its creation.

    Args:
        settings: the new dataclass, whose values `read_values` reads.
        node: what the settings belong to, as errors name it.
        rules: what is wrong with several values together; asked where each value is fine by itself.

    Raises:
        ValueError: with everything that is wrong.
    """
    raise_errors(node, read_values(settings) or [error for rule in rules for error in rule(settings)])


def raise_errors(node: str, errors: Sequence[str]) -> None:
    """Raise ValueError with everything that is wrong with the settings of a node, if anything is."""
    if errors:
        raise ValueError(f"{node}: {'; '.join(errors)}.")


def value_error(
    label: str,
    kind: type,
    value: object,
    low: float | None = None,
    high: float | None = None,
    options: Sequence[str] | None = None,
) -> str:
    """What is wrong with the value of a setting that is a bool, int, float or str; empty where nothing is.

    A whole number may be given as a float without a fraction, and a number as a whole number: editors and other nodes
    do that. NaN and infinities are never right, whatever the bounds.
    """
    if kind is bool:
        return "" if isinstance(value, bool) else f"{label} is {value!r}, expected true or false"
    if kind is str:
        if not isinstance(value, str):
            return f"{label} is {value!r}, expected text"
        if options is not None and value not in options:
            return f"{label} is {value!r}, expected one of {', '.join(options)}"
        return ""
    if not _is_number(value, kind):
        what = "a whole number" if kind is int else "a number"
        return f"{label} is {value!r}, expected {what}{_range_text(low, high)}"
    number: Any = value  # a whole number stays one: as a float, 2^64 - 1 is beyond a bound of 2^64 - 1
    if (low is not None and number < low) or (high is not None and number > high):
        return f"{label} is {value}, expected{_range_text(low, high)}"
    return ""


def _is_number(value: object, kind: type) -> bool:
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    if isinstance(value, Integral):
        return True
    return math.isfinite(value) and (kind is float or float(value).is_integer())


def _range_text(low: float | None, high: float | None) -> str:
    if low is None and high is None:
        return ""
    if high is None:
        return f" {low} or more"
    if low is None:
        return f" at most {high}"
    return f" from {low} to {high}"
