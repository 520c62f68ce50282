"""What the nodes' schemas are made of beside ComfyUI's own: the base class, socket types, inputs of declared settings,
and search aliases.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from comfy_api.latest import io

from ..settings.declaration import Setting, settings_of
from .input_checks import WIDGETS, input_errors

# Graft's own sockets, and those shared with other packs.
Dataset = io.Custom("GRAFT_DATASET")
LoraModel = io.Custom("LORA_MODEL")
LoraStack = io.Custom("LORA_STACK")
LossMap = io.Custom("LOSS_MAP")
Previews = io.Custom("GRAFT_PREVIEWS")
Settings = io.Custom("GRAFT_SETTINGS")
Snapshots = io.Custom("GRAFT_SNAPSHOTS")
TrainState = io.Custom("TRAIN_STATE")

_HAS_ALIASES = any(field.name == "search_aliases" for field in dataclasses.fields(io.Schema))  # newer than 0.3.64
_HOST_CHECKS_CHOICES = _HAS_ALIASES  # before a workflow runs: ComfyUI 0.3.64 takes any text for a choice


class GraftNode(io.ComfyNode):
    """A node whose inputs are checked by their declarations, whatever way a value came in.

    ComfyUI checks the bounds of what is typed into a node, but of no value that comes through a link, and of none that
    `validate_inputs` takes. Here `execute` gets what its schema allows: a number out of its bounds, NaN, a choice that
    is none or a text in a number's place ends the node before anything runs, by the label of the input.

    A subclass may have:
    - `settings_class`, a dataclass of declared settings (`settings.declaration`): `inputs_of` makes its inputs, and
      `execute` takes one of it as `chosen` in their place.
    - `checked_together`, groups of names: before a workflow runs, `check_settings` gets each group whose values are all
      known, or all of them at once. A value that comes through a link is known only when the node runs.
    - `checked_sockets`, whose state counts there: `check_settings` gets the names of the connected ones as `connected`.
    - `growing_choices`, inputs whose choices an earlier node may add to: they are checked when the node runs.
    """

    settings_class: ClassVar[type | None] = None
    checked_together: ClassVar[tuple[tuple[str, ...], ...]] = ()
    checked_sockets: ClassVar[tuple[str, ...]] = ()
    growing_choices: ClassVar[tuple[str, ...]] = ()
    _is_checked: ClassVar[bool]  # of a class whose own execute checks its inputs

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if "_is_checked" in cls.__dict__:  # a clone that ComfyUI makes; another pack may have replaced its execute
            return
        own = cls.__dict__.get("execute")
        if own is not None:
            execute = own.__func__
        elif own is None and "settings_class" in cls.__dict__:
            execute = cls.execute.__func__.__wrapped__
        else:
            return  # it has no execute yet
        cls._is_checked = True
        # The schema is made anew at each check, in a tenth of a millisecond: a registry may have grown since.
        cls.execute = classmethod(_check_inputs(execute, cls.settings_class, cls.define_schema))
        if "define_schema" in cls.__dict__:
            validate = _make_validator(cls, inspect.signature(cls.execute).parameters, cls.define_schema)
            if validate is not None:
                cls.validate_inputs = classmethod(validate)

    @classmethod
    def check_settings(cls, *_: Any, **values: Any) -> None:
        """Raises ValueError or FileNotFoundError for settings that are wrong; those that are not given are right."""
        assert cls.settings_class is not None
        cls.settings_class(**values)


def _check_inputs(
    execute: Callable[..., Any], settings_class: type | None, schema_of: Callable[[], io.Schema]
) -> Callable[..., Any]:
    """`execute` of a node with every value checked by the schema, and its settings in one dataclass. Where inputs are
    lists, a setting is the first of its list.
    """
    own = {} if settings_class is None else settings_of(settings_class)

    @functools.wraps(execute)
    def run(cls: type[GraftNode], **values: Any) -> Any:
        schema = schema_of()
        # The dataclass says all that is wrong with its settings at once. What is not text it takes as read already.
        checked = {name: value for name, value in values.items() if name not in own or own[name].read is not None}
        errors = input_errors(schema, checked)
        if errors:
            raise ValueError(errors)
        if settings_class is not None:
            given = {name: values.pop(name) for name in own if name in values}
            if schema.is_input_list:
                given = {name: value[0] for name, value in given.items()}
            values["chosen"] = settings_class(**given)
        return execute(cls, **values)

    if settings_class is not None:
        run.__signature__ = _with_settings(inspect.signature(execute), own)  # type: ignore[attr-defined]
    return run


def _with_settings(signature: inspect.Signature, settings: Mapping[str, Setting]) -> inspect.Signature:
    """A signature with settings, by their names, in the place of `chosen`: what a node is called with."""
    kind = inspect.Parameter.KEYWORD_ONLY
    others = [one for name, one in signature.parameters.items() if name != "chosen"]
    return inspect.Signature(
        [*others, *(inspect.Parameter(name, kind, default=one.default) for name, one in settings.items())]
    )


def _make_validator(
    node: type[GraftNode], parameters: Mapping[str, inspect.Parameter], schema_of: Callable[[], io.Schema]
) -> Callable[..., bool | str] | None:
    """`validate_inputs` of a node; None for one that leaves all to ComfyUI.

    ComfyUI names an error of it at every input that it takes, and asks its signature which these are. The bounds and
    choices of those it leaves to the node.
    """
    names = dict.fromkeys(name for group in node.checked_together for name in group)
    if not _HOST_CHECKS_CHOICES:
        names |= dict.fromkeys(one.id for one in schema_of().inputs if isinstance(one, io.Combo.Input))
    if not names:
        return None
    defaults = {
        name: parameters[name].default for name in names if parameters[name].default is not inspect.Parameter.empty
    }

    def validate_inputs(cls: type[GraftNode], **values: Any) -> bool | str:
        sockets = [name for name in node.checked_sockets if name in values]
        known = {name: value for name, value in {**defaults, **values}.items() if name in names and value is not None}
        errors = input_errors(
            schema_of(), {name: value for name, value in known.items() if name not in node.growing_choices}
        )
        if errors:
            return errors
        groups = [group for group in node.checked_together if known.keys() >= set(group)]
        if groups == list(node.checked_together):
            groups = [tuple(dict.fromkeys(name for group in groups for name in group))] if groups else []
        for group in groups:
            chosen = {name: known[name] for name in group}
            try:
                cls.check_settings(**({"connected": sockets} if node.checked_sockets else {}), **chosen)
            except (ValueError, FileNotFoundError) as error:
                return str(error)
        return True

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    taken = [inspect.Parameter(name, kind, default=None) for name in (*node.checked_sockets, *names)]
    validate_inputs.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter("cls", kind), *taken]
    )
    return validate_inputs


def inputs_of(settings: type) -> list[Any]:
    """The inputs of a node for the settings that a dataclass declares, in its order. A workflow need only name those
    that differ from their defaults.
    """
    return [setting_input(name, one) for name, one in settings_of(settings).items()]


def setting_input(name: str, one: Setting) -> Any:
    """The input of one declared setting."""
    kind = io.Combo if one.choices is not None else WIDGETS[one.kind]
    bounds = {"min": one.low, "max": one.high, "step": one.step, "options": one.options()}
    given: dict[str, Any] = {key: value for key, value in bounds.items() if value is not None}
    if one.multiline:
        given["multiline"] = True
    if one.finer:
        given["round"] = False
    given |= {"display_name": one.label, "default": one.default, "tooltip": one.help, "optional": True}
    return advanced_input(kind, name, **given) if one.advanced else kind.Input(name, **given)


def advanced_input(kind: Any, identifier: str, **declared: Any) -> Any:
    """`advanced_input(io.Int, "rank", default=16)` is `io.Int.Input("rank", default=16)`, folded away in the editor
    behind "Show advanced inputs".

    Widgets take no `advanced` in ComfyUI 0.3.64; what is in `extra_dict` reaches the editor from every host.
    """
    made = kind.Input(identifier, **declared)
    made.extra_dict = {**made.extra_dict, "advanced": True}
    return made


def file_size_input(tooltip: str) -> Any:
    """The input of nodes that split what they save into files of a size."""
    return advanced_input(
        io.Float,
        "max_shard_gb",
        display_name="maximum file size (GB)",
        default=0.0,
        min=0.0,
        max=1000.0,
        step=0.5,
        tooltip=tooltip,
    )


def search_aliases(*words: str) -> dict[str, list[str]]:
    """Search aliases: `io.Schema(..., **aliases("a", "b"))` passes the keyword argument if the host's Schema has it."""
    if _HAS_ALIASES:
        return {"search_aliases": list(words)}
    return {}


def run_settings() -> Any:
    """The input of nodes that begin a run: its settings."""
    return Settings.Input(
        "settings",
        optional=True,
        tooltip=(
            "What to train and how, from Training Recipe, or from Adapter, Optimizer, Objective and EMA Settings, one"
            " after another. If nothing is connected: a LoRA of rank 16 on the attention layers with AdamW at 1e-4,"
            " and no average."
        ),
    )


def run_seed() -> Any:
    """The input of nodes that begin a run: its seed."""
    return io.Int.Input(
        "seed",
        display_name="seed",
        default=0,
        min=0,
        max=0xFFFFFFFFFFFFFFFF,
        tooltip=(
            "The seed of every random draw in the run. The same seed and inputs give the same result. For another one"
            " each time (-1 in other trainers), set control after generate to randomize."
        ),
    )


def run_name(default: str) -> Any:
    """The input of nodes that begin a run: its name."""
    return io.String.Input(
        "run",
        display_name="run name",
        default=default,
        tooltip="Folder under output/graft where the training states are stored.",
    )
