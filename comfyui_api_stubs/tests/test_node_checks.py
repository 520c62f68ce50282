"""The mistakes that authors make in node classes, and what they are told."""

from __future__ import annotations

import pytest

from comfyui_api_stubs.node_checks import node_problems


def node(inputs, function=None, **attributes):
    """A node class with these INPUT_TYPES."""
    body = {"INPUT_TYPES": classmethod(lambda cls: inputs), "RETURN_TYPES": ("INT",), "FUNCTION": "run"}
    body["run"] = (lambda self, **kwargs: None) if function is None else function
    return type("Node", (), {**body, **attributes})


class EqualToAll(str):
    """A type that equals every other one, as packs write "any"."""

    __hash__ = str.__hash__

    def __eq__(self, other):
        return True

    def __ne__(self, other):
        return False


class WithoutHash(str):
    """The same, as it is written without a thought for hashes."""

    def __eq__(self, other):
        return True

    def __ne__(self, other):
        return False


ANY_TYPES = [EqualToAll("*"), WithoutHash("*")]


def without(cls, *names):
    for name in names:
        delattr(cls, name)
    return cls


def raises(cls):
    raise KeyError("models")


VALUE = {"required": {"value": ("INT", {"default": 1})}}


class AnyInput(dict):
    """A dict that has every input, as packs write it for inputs that grow."""


@pytest.mark.parametrize(
    "cls",
    [
        node(VALUE),
        node(VALUE, lambda self, value: None),
        node(VALUE, lambda node, value=3, *, other=None: None),
        node(VALUE, staticmethod(lambda value: None)),
        node(VALUE, classmethod(lambda cls, value: None)),
        node({"optional": {"amount": ("FLOAT", {})}}, lambda self, amount: None),
        node({"optional": {"mode": (["a", "b"],)}}, lambda self, mode: None),
        node({"optional": {"image": ("IMAGE",)}}, lambda self, image=None: None),
        node({"optional": AnyInput()}, lambda self, anything: None),
        node({"hidden": {"unique_id": "UNIQUE_ID"}}, lambda self, unique_id: None),
        node({}, RETURN_TYPES=[], RETURN_NAMES=()),
        node({"required": {"mode": (["a", "b"], {"default": "b"}), "own": ("MY_TYPE", {"default": {}})}}),
        *(node({"required": {"value": (kind, {"default": ""})}}) for kind in ANY_TYPES),
        *(node({"required": {"value": (kind, {"default": {}, "min": 3})}}) for kind in ANY_TYPES),
        *(node({"optional": {"value": (kind,)}}, lambda self, value=None: None) for kind in ANY_TYPES),
        *(node({"hidden": {"own": kind}}, RETURN_TYPES=(kind,), RETURN_NAMES=(kind,)) for kind in ANY_TYPES),
        node({"required": {"several": ("COMBO", {"options": ["a", "b"], "default": ["a", "b"]})}}),
        node(
            {
                "required": {
                    "edge": ("FLOAT", {"default": 0.0, "min": 0.0, "max": 0.0}),
                    "on": ("BOOLEAN", {"default": 1}),
                }
            }
        ),
    ],
)
def test_a_node_that_is_right_has_no_problems(cls):
    assert list(node_problems(cls)) == []


@pytest.mark.parametrize(
    ("cls", "told"),
    [
        (without(node(VALUE), "FUNCTION"), 'it has no FUNCTION; write FUNCTION = "run", the method that runs it'),
        (node(VALUE, FUNCTION="rnu"), "FUNCTION is 'rnu', and there is no such method; it has run"),
        (without(node(VALUE), "INPUT_TYPES"), "it has no INPUT_TYPES; write a class method"),
        (node(VALUE, INPUT_TYPES=lambda self: VALUE), "INPUT_TYPES is not a class method; write @classmethod above it"),
        (node(VALUE, INPUT_TYPES=classmethod(raises)), "INPUT_TYPES raises KeyError: 'models' (line "),
        (node([]), 'INPUT_TYPES returns [], and must return a dict: {"required": {…}}'),
        (node({"required": {"value"}}), "required in INPUT_TYPES is {'value'}, and must be a dict of inputs"),
        (node({"optinal": {}}), "INPUT_TYPES has 'optinal'; it may have required, optional, hidden"),
        (node({"required": {"value": "INT"}}), "input value is 'INT', and must be a tuple: (\"INT\",)"),
        (node({"required": {"mode": ["a", "b"]}}), "choices are the first entry of a tuple: (['a', 'b'],)"),
        (node({"required": {"value": ("INT", 3)}}), "input value: its options are 3, and must be a dict"),
        (node({"required": {"value": ("INT", {"default": "1"})}}), "input value: its default '1' is not a number"),
        (node({"required": {"value": ("INT", {"default": 9, "max": 5})}}), "its default 9 is above its max 5"),
        (node({"required": {"value": ("FLOAT", {"default": 0, "min": 0.1})}}), "its default 0 is below its min 0.1"),
        (node({"required": {"on": ("BOOLEAN", {"default": "no"})}}), "its default 'no' is neither True nor False"),
        (node({"required": {"mode": (["a"], {"default": "c"})}}), "its default 'c' is none of its choices: a"),
        (
            node({"required": {"mode": ("COMBO", {"default": "z", "options": list("abcdef")})}}),
            "its default 'z' is none of its choices: a, b, c, d, e …",
        ),
        (without(node(VALUE), "RETURN_TYPES"), 'it has no RETURN_TYPES; write RETURN_TYPES = ("INT",), or ()'),
        (node(VALUE, RETURN_TYPES="IMAGE"), "RETURN_TYPES is 'IMAGE', and must be a tuple: write ('IMAGE',)"),
        (node(VALUE, RETURN_NAMES="a"), "RETURN_NAMES is 'a', and must be a tuple: write ('a',), with the comma"),
        (
            node(VALUE, OUTPUT_IS_LIST=True),
            "OUTPUT_IS_LIST is True, and must be a tuple: write (True,), with the comma",
        ),
        (node(VALUE, RETURN_NAMES=("a", "b")), "RETURN_NAMES has 2 entries for 1 outputs"),
        (node(VALUE, lambda self: None), "run takes no value, which INPUT_TYPES has"),
        (node(VALUE, lambda value: None), "the first parameter of run must be the node itself: write def run(self, …)"),
        (node({}, lambda: None), "the first parameter of run must be the node itself: write def run(self, …)"),
        (
            node(VALUE, lambda self, value, other: None),
            "run needs other, which INPUT_TYPES has not: add it there, or give it a default",
        ),
        (
            node({"optional": {"mask": ("MASK",)}}, lambda self, mask: None),
            "run needs mask, which is optional: write mask=None",
        ),
        *(
            (
                node({"optional": {"value": (kind,)}}, lambda self, value: None),
                "run needs value, which is optional: write value=None",
            )
            for kind in ANY_TYPES
        ),
        (
            node({"optional": {"value": ("INT", {"forceInput": True})}}, lambda self, value: None),
            "run needs value, which is optional: write value=None",
        ),
        (node(VALUE)(), "NODE_CLASS_MAPPINGS has a Node for it, and must have the class: write it without ()"),
    ],
)
def test_a_mistake_is_told_once_with_what_to_write(cls, told):
    (problem,) = node_problems(cls)
    assert problem.startswith(told) or told in problem


def test_every_mistake_of_a_node_is_told():
    inputs = {"required": {"a": "INT", "b": ("INT", {"default": 9, "max": 5})}, "other": {}}
    problems = list(node_problems(node(inputs, lambda self, a: None, RETURN_TYPES="INT")))
    assert len(problems) == 5 and problems[-1] == "run takes no b, which INPUT_TYPES has"
