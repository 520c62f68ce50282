"""What is wrong with what a node class says of itself: each problem in words, with what to write instead."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

KINDS = ("required", "optional", "hidden")
WIDGETS = ("INT", "FLOAT", "STRING", "BOOLEAN", "COMBO")  # inputs that the editor always sends
SHOWN_CHOICES = 5


def node_problems(cls: Any) -> Iterator[str]:
    """Everything that is wrong with a node class."""
    if not inspect.isclass(cls):
        yield f"NODE_CLASS_MAPPINGS has a {type(cls).__name__} for it, and must have the class: write it without ()"
        return
    inputs, problems = declared_inputs(cls)
    yield from problems
    for kind in ("required", "optional"):
        for name, entry in inputs.get(kind, {}).items():
            yield from input_problems(name, entry)
    yield from output_problems(cls)
    if len(inputs) == len(KINDS):  # all could be read
        yield from call_problems(cls, inputs)


# --- inputs -----------------------------------------------------------------------------------------------------------


def declared_inputs(cls: Any) -> tuple[dict[str, Mapping[str, Any]], list[str]]:
    """(INPUT_TYPES as far as it can be read, what is wrong with it)."""
    if not hasattr(cls, "INPUT_TYPES"):
        return {}, ['it has no INPUT_TYPES; write a class method that returns {"required": {…}}']
    try:
        spec = cls.INPUT_TYPES()
    except Exception as error:  # noqa: BLE001  (a pack's own code)
        return {}, [_raised(cls, error)]
    if not isinstance(spec, Mapping):
        return {}, [f'INPUT_TYPES returns {spec!r}, and must return a dict: {{"required": {{…}}}}']
    problems = []
    unknown = sorted(set(map(str, spec)) - set(KINDS))
    if unknown:
        problems.append(f"INPUT_TYPES has {', '.join(map(repr, unknown))}; it may have {', '.join(KINDS)}")
    inputs = {}
    for kind in KINDS:
        entries = spec.get(kind, {})
        if isinstance(entries, Mapping):
            inputs[kind] = entries
        else:
            wanted = '{"value": ("INT", {"default": 0})}'
            problems.append(f"{kind} in INPUT_TYPES is {entries!r}, and must be a dict of inputs: {wanted}")
    return inputs, problems


def _raised(cls: Any, error: Exception) -> str:
    """That INPUT_TYPES cannot be called."""
    if isinstance(error, TypeError) and inspect.isfunction(inspect.getattr_static(cls, "INPUT_TYPES")):
        return "INPUT_TYPES is not a class method; write @classmethod above it"
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"INPUT_TYPES raises {type(error).__name__}: {error} (line {place.lineno} of {place.filename})"


def input_problems(name: str, entry: Any) -> Iterator[str]:
    """What is wrong with one input."""
    if not isinstance(entry, tuple | list) or not entry:
        kind = entry if isinstance(entry, str) else "INT"
        yield f'input {name} is {entry!r}, and must be a tuple: ("{kind}",) or ("{kind}", {{"default": …}})'
        return
    options = entry[1] if len(entry) > 1 else {}
    if isinstance(entry, list) and all(isinstance(choice, str) for choice in entry) and len(entry) > 1:
        yield f"input {name} is {entry!r}; choices are the first entry of a tuple: ({entry!r},)"
        return
    if not isinstance(options, dict):
        yield f"input {name}: its options are {options!r}, and must be a dict"
        return
    default = options.get("default")
    if default is None:
        return
    kind = plain(entry[0])
    if kind in ("INT", "FLOAT"):
        yield from number_problems(name, default, options)
    if kind == "BOOLEAN" and isinstance(default, str):
        yield f"input {name}: its default {default!r} is neither True nor False"
    if kind == "COMBO" or isinstance(kind, list):
        yield from choice_problems(name, default, kind if isinstance(kind, list) else options.get("options"))


def plain(kind: Any) -> Any:
    """A type as a plain text: packs write "any" as a text that says it equals every other one."""
    return str.__str__(kind) if isinstance(kind, str) else kind


def number_problems(name: str, default: Any, options: dict) -> Iterator[str]:
    """What is wrong with a number's default."""
    if not isinstance(default, int | float):
        yield f"input {name}: its default {default!r} is not a number"
    elif default < options.get("min", default):
        yield f"input {name}: its default {default} is below its min {options['min']}"
    elif default > options.get("max", default):
        yield f"input {name}: its default {default} is above its max {options['max']}"


def choice_problems(name: str, default: Any, choices: Any) -> Iterator[str]:
    """What is wrong with the default of a choice; one from several choices may be a list."""
    if isinstance(choices, list | tuple) and choices and default not in choices and not isinstance(default, list):
        listed = ", ".join(map(str, choices[:SHOWN_CHOICES])) + (" …" if len(choices) > SHOWN_CHOICES else "")
        yield f"input {name}: its default {default!r} is none of its choices: {listed}"


# --- outputs ----------------------------------------------------------------------------------------------------------


def output_problems(cls: Any) -> Iterator[str]:
    """What is wrong with the outputs."""
    kinds = getattr(cls, "RETURN_TYPES", None)
    if kinds is None:
        yield 'it has no RETURN_TYPES; write RETURN_TYPES = ("INT",), or () for a node without outputs'
        return
    for attribute in ("RETURN_TYPES", "RETURN_NAMES", "OUTPUT_IS_LIST"):
        listed = getattr(cls, attribute, None)
        if listed is None:
            continue
        if not isinstance(listed, tuple | list):
            yield f"{attribute} is {listed!r}, and must be a tuple: write ({listed!r},), with the comma"
        elif isinstance(kinds, tuple | list) and len(listed) != len(kinds):
            yield f"{attribute} has {len(listed)} entries for {len(kinds)} outputs"


# --- the function -----------------------------------------------------------------------------------------------------


def call_problems(cls: Any, inputs: dict[str, Mapping[str, Any]]) -> Iterator[str]:
    """Whether the function can be called with the inputs."""
    is_v3 = hasattr(cls, "GET_SCHEMA")
    name = "execute" if is_v3 else getattr(cls, "FUNCTION", None)
    if not callable(getattr(cls, str(name), None)):
        yield _no_function(cls, name)
        return
    parameters = parameters_of(cls, str(name))
    names = [key for kind in KINDS for key in inputs.get(kind, {}) if kind != "hidden" or not is_v3]
    if parameters is None:
        return
    if not is_v3 and takes_no_self(cls, str(name), names):
        yield f"the first parameter of {name} must be the node itself: write def {name}(self, …)"
        return
    where = "the schema" if is_v3 else "INPUT_TYPES"
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        refused = sorted(set(names) - {parameter.name for parameter in parameters})
        if refused:
            yield f"{name} takes no {', '.join(refused)}, which {where} has"
    if all(type(entries) is dict for entries in inputs.values()):  # a dict of a pack's own may have any input
        yield from missing_arguments(str(name), parameters, inputs, names, where)


def _no_function(cls: Any, name: Any) -> str:
    """That FUNCTION names no method."""
    methods = [key for key, value in vars(cls).items() if inspect.isfunction(value) and not key.startswith("_")]
    listed = f"; it has {', '.join(methods)}" if methods else ""
    if name is None:
        return f'it has no FUNCTION; write FUNCTION = "{methods[0] if methods else "run"}", the method that runs it'
    return f"FUNCTION is {name!r}, and there is no such method{listed}"


def parameters_of(cls: Any, name: str) -> list[inspect.Parameter] | None:
    """What a call of the method takes beside the node itself; None when Python cannot tell."""
    try:
        parameters = list(inspect.signature(getattr(cls, name)).parameters.values())
    except ValueError:
        return None
    return parameters[1:] if inspect.isfunction(inspect.getattr_static(cls, name)) else parameters


def takes_no_self(cls: Any, name: str, names: list[str]) -> bool:
    """Whether the node itself would go into a parameter for an input, or into none."""
    function = inspect.getattr_static(cls, name)
    if not inspect.isfunction(function):
        return False
    parameters = list(inspect.signature(function).parameters.values())
    takes_one = parameters and parameters[0].kind is not inspect.Parameter.KEYWORD_ONLY
    return not takes_one or parameters[0].name in names


def missing_arguments(
    name: str,
    parameters: list[inspect.Parameter],
    inputs: dict[str, Mapping[str, Any]],
    names: list[str],
    where: str,
) -> Iterator[str]:
    """Parameters that get no value: those that are not inputs, and sockets that need no link."""
    for parameter in parameters:
        if parameter.default is not parameter.empty or parameter.kind in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        ):
            continue
        if parameter.name not in names:
            yield f"{name} needs {parameter.name}, which {where} has not: add it there, or give it a default"
        elif parameter.name in inputs.get("optional", {}) and is_socket(inputs["optional"][parameter.name]):
            yield f"{name} needs {parameter.name}, which is optional: write {parameter.name}=None"


def is_socket(entry: Any) -> bool:
    """Whether an input gets a value by a link alone."""
    kind, options = plain(entry[0]), entry[1] if len(entry) > 1 else {}
    has_widget = isinstance(kind, list) or kind in WIDGETS or "widgetType" in options
    return not has_widget or bool(options.get("forceInput"))
