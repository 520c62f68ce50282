"""Inputs that stand for others: what nodes with them are given, and what validation says of them. The expected values
hold for a real ComfyUI 0.33.0, which runs the same tests.
"""

from __future__ import annotations

import pytest
from comfy_api.latest import _io as io  # io itself leaves DynamicSlot out

IS_NEW = hasattr(io, "DynamicSlot") and "accept_all_inputs" in io.Schema.__dataclass_fields__
pytestmark = pytest.mark.skipif(not IS_NEW, reason="this ComfyUI's inputs do not grow, or not in this way")
GIVEN: list[dict] = []  # the arguments of each call, in order
NUMBERS = {"1": 1, "2": 2, "3": 3}


def numbered(optional=False, lazy=None, least=2, most=4):
    template = io.Autogrow.TemplatePrefix(
        io.Int.Input("number", optional=optional, lazy=lazy), prefix="n", min=least, max=most
    )
    return io.Autogrow.Input("numbers", template=template)


def named(least=1):
    return io.Autogrow.Input("parts", template=io.Autogrow.TemplateNames(io.Int.Input("part"), ["a", "b"], min=least))


def modes():
    """A choice with nothing, with a number, with inputs that grow, and with a choice inside."""
    inner = io.DynamicCombo.Input("inner", [io.DynamicCombo.Option("x", [io.Float.Input("f", default=0.5, max=1.0)])])
    options = [
        io.DynamicCombo.Option("plain", []),
        io.DynamicCombo.Option("number", [io.Int.Input("count", default=1, min=1, max=5)]),
        io.DynamicCombo.Option("many", [numbered()]),
        io.DynamicCombo.Option("nested", [inner, io.String.Input("text", optional=True)]),
    ]
    return io.DynamicCombo.Input("mode", options)


def slot():
    return io.DynamicSlot.Input(io.Int.Input("first"), [io.Int.Input("second", default=7, min=0, max=9)])


def given(cls, **arguments):
    GIVEN.append(arguments)
    return io.NodeOutput(str(arguments))


def growing(node_id, inputs, **methods):
    """A node that notes its arguments; `inputs` is a function, as an older ComfyUI does not have these inputs."""

    def define_schema(cls):
        return io.Schema(
            node_id=node_id,
            category="test",
            inputs=inputs(),
            outputs=[io.String.Output()],
            hidden=[io.Hidden.unique_id],
            accept_all_inputs=node_id == "GrowAll",
            is_input_list=node_id == "GrowList",
        )

    members = {"define_schema": classmethod(define_schema), "execute": classmethod(given)}
    return type(node_id, (io.ComfyNode,), members | {name: classmethod(call) for name, call in methods.items()})


def asks_for_missing(cls, numbers):
    GIVEN.append({"asked": numbers})
    return [name for value, name in numbers.values() if value is None]


def accepts(cls, input_types, **arguments):
    GIVEN.append({"types": input_types, "validated": arguments})
    return True


def refuses(cls, numbers):
    return f"not with {numbers}"


def fingerprint(cls, **arguments):
    GIVEN.append({"fingerprint": arguments})
    return 1


def give_number(cls, value):
    return io.NodeOutput(value)


class ListSource:
    """V1: a list of numbers."""

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {}}

    RETURN_TYPES = ("INT",)
    OUTPUT_IS_LIST = (True,)
    FUNCTION = "give"
    CATEGORY = "test"

    def give(self):
        return ([10, 20, 30],)


@pytest.fixture(autouse=True, scope="module")
def nodes_that_grow(host):
    def number_schema(cls):
        return io.Schema("GrowNumber", category="test", inputs=[io.Int.Input("value")], outputs=[io.Int.Output()])

    number = {"define_schema": classmethod(number_schema), "execute": classmethod(give_number)}
    host.register(
        type("GrowNumber", (io.ComfyNode,), number),
        growing("GrowPrefix", lambda: [io.Int.Input("plain", default=0), numbered()]),
        growing("GrowOptional", lambda: [numbered(optional=True)]),
        growing("GrowNames", lambda: [named()]),
        growing("GrowLazy", lambda: [numbered(lazy=True, least=0)], check_lazy_status=asks_for_missing),
        growing("GrowMode", lambda: [modes()]),
        growing("GrowSlot", lambda: [slot()]),
        growing("GrowSlotTaken", lambda: [slot()], validate_inputs=accepts),
        growing("GrowRefused", lambda: [numbered()], validate_inputs=refuses),
        growing("GrowMarked", lambda: [numbered()], fingerprint_inputs=fingerprint),
        growing("GrowAll", lambda: [numbered(optional=True)]),
        growing("GrowList", lambda: [numbered()]),
    )
    host.nodes.NODE_CLASS_MAPPINGS.update(GrowSource=ListSource)


@pytest.fixture(autouse=True)
def clean(host):
    GIVEN.clear()
    host.fresh()


def graph(class_type, **inputs):
    """A node with these inputs, beside the numbers 1 to 3, a list and a text."""
    prompt = {key: {"class_type": "GrowNumber", "inputs": {"value": value}} for key, value in NUMBERS.items()}
    prompt["list"] = {"class_type": "GrowSource", "inputs": {}}
    prompt["text"] = {"class_type": "GrowOptional", "inputs": {}}
    prompt["it"] = {"class_type": class_type, "inputs": inputs}
    return prompt


ONE, TWO, THREE = ["1", 0], ["2", 0], ["3", 0]
LIST = ["list", 0]

# For each: the node, its inputs, and what it is given, call by call.
RUNS = {
    "prefix": (
        "GrowPrefix",
        {"plain": 5, "numbers.n0": ONE, "numbers.n1": TWO},
        [{"plain": 5, "numbers": {"n0": 1, "n1": 2}}],
    ),
    "prefix with a gap": (
        "GrowPrefix",
        {"plain": 5, "numbers.n0": ONE, "numbers.n1": 2, "numbers.n3": THREE},
        [{"plain": 5, "numbers": {"n0": 1, "n1": 2, "n3": 3}}],
    ),
    "none of the optional": ("GrowOptional", {}, [{"numbers": {}}]),
    "one of the optional": ("GrowOptional", {"numbers.n2": THREE}, [{"numbers": {"n2": 3}}]),
    "names": ("GrowNames", {"parts.b": ONE, "parts.a": TWO}, [{"parts": {"a": 2, "b": 1}}]),
    "a choice alone": ("GrowMode", {"mode": "plain"}, [{"mode": {"mode": "plain"}}]),
    "a choice with a number": (
        "GrowMode",
        {"mode": "number", "mode.count": "3"},
        [{"mode": {"count": 3, "mode": "number"}}],
    ),
    "what another choice has": ("GrowMode", {"mode": "plain", "mode.count": 3}, [{"mode": {"mode": "plain"}}]),
    "a choice that grows": (
        "GrowMode",
        {"mode": "many", "mode.numbers.n0": ONE, "mode.numbers.n1": TWO},
        [{"mode": {"numbers": {"n0": 1, "n1": 2}, "mode": "many"}}],
    ),
    "a choice in a choice": (
        "GrowMode",
        {"mode": "nested", "mode.inner": "x", "mode.inner.f": 1},
        [{"mode": {"inner": {"f": 1.0, "inner": "x"}, "text": None, "mode": "nested"}}],
    ),
    "an unknown choice": ("GrowMode", {"mode": "gone"}, [{}]),
    "an empty slot": ("GrowSlot", {}, [{}]),
    "a slot": (
        "GrowSlotTaken",
        {"first": ONE, "first.second": 4},
        [
            {"types": {"first": "INT"}, "validated": {"first": {"second": 4, "first": None}}},
            {"first": {"second": 4, "first": 1}},
        ],
    ),
    "all inputs": ("GrowAll", {"numbers.n0": 1, "other": "kept"}, [{"other": "kept", "numbers": {"n0": 1}}]),
    "lists one by one": (
        "GrowPrefix",
        {"plain": 0, "numbers.n0": LIST, "numbers.n1": ONE},
        [{"plain": 0, "numbers": {"n0": number, "n1": 1}} for number in (10, 20, 30)],
    ),
    "whole lists": (
        "GrowList",
        {"numbers.n0": LIST, "numbers.n1": ONE},
        [{"numbers": {"n0": [10, 20, 30], "n1": [1]}}],
    ),
    "fingerprints": (
        "GrowMarked",
        {"numbers.n0": ONE, "numbers.n1": 8},
        [{"fingerprint": {"numbers": {"n0": None, "n1": 8}}}, {"numbers": {"n0": 1, "n1": 8}}],
    ),
    "lazy ones": (
        "GrowLazy",
        {"numbers.n0": ONE, "numbers.n2": TWO},
        [{"asked": {"n0": (1, "numbers.n0"), "n2": (2, "numbers.n2")}}, {"numbers": {"n0": 1, "n2": 2}}],
    ),
    "validation that takes no input": (
        "GrowRefused",
        {"numbers.n0": ONE, "numbers.n1": 4},
        [{"numbers": {"n0": 1, "n1": 4}}],
    ),
}


@pytest.mark.parametrize("case", RUNS)
def test_what_a_node_is_given(host, case):
    class_type, inputs, expected = RUNS[case]
    result = host.run(graph(class_type, **inputs), capture={"out": ["it", 0]})
    assert result["success"], result["errors"]
    assert expected == GIVEN
    assert [list(call) for call in GIVEN] == [list(call) for call in expected]


# For each: the node, its inputs, and (kind, details, input) of each problem.
MISSING = "required_input_missing"
REFUSED = {
    "too few": ("GrowPrefix", {"plain": 5, "numbers.n1": TWO}, [(MISSING, "n0", "numbers.n0")]),
    "none": ("GrowPrefix", {"plain": 5}, [(MISSING, "n0", "numbers.n0"), (MISSING, "n1", "numbers.n1")]),
    "too few in a choice": (
        "GrowMode",
        {"mode": "many", "mode.numbers.n0": ONE},
        [(MISSING, "n1", "mode.numbers.n1")],
    ),
    "a choice without its number": ("GrowMode", {"mode": "number"}, [(MISSING, "count", "mode.count")]),
    "too large a number": (
        "GrowMode",
        {"mode": "number", "mode.count": 6},
        [("value_bigger_than_max", "mode.count", "mode.count")],
    ),
    "no number": (
        "GrowMode",
        {"mode": "number", "mode.count": "many"},
        [
            (
                "invalid_input_type",
                "mode.count, many, invalid literal for int() with base 10: 'many'",
                "mode.count",
            )
        ],
    ),
    "too large in a choice in a choice": (
        "GrowMode",
        {"mode": "nested", "mode.inner": "x", "mode.inner.f": 1.5},
        [("value_bigger_than_max", "mode.inner.f", "mode.inner.f")],
    ),
    "another type": (
        "GrowPrefix",
        {"plain": 5, "numbers.n0": ["text", 0], "numbers.n1": TWO},
        [("return_type_mismatch", "numbers.n0, received_type(STRING) mismatch input_type(INT)", "numbers.n0")],
    ),
    "a slot, for which ComfyUI itself takes no type": (
        "GrowSlot",
        {"first": ONE, "first.second": 4},
        [("return_type_mismatch", "first, received_type(INT) mismatch input_type(COMFY_DYNAMICSLOT_V3)", "first")],
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_validation_says(host, case):
    class_type, inputs, expected = REFUSED[case]
    result = host.run(graph(class_type, **inputs), capture={"out": ["it", 0]})
    assert not result["valid"] and list(result["errors"]) == ["it"] and not GIVEN
    errors = result["errors"]["it"]
    said = [(error["type"], error["details"], error["extra_info"]["input_name"]) for error in errors]
    assert sorted(said) == expected


def test_another_number_of_inputs_is_another_result(host):
    few = {"plain": 5, "numbers.n0": ONE, "numbers.n1": TWO}
    for inputs in (few, few, {**few, "numbers.n2": THREE}, few):
        assert host.run(graph("GrowPrefix", **inputs), capture={"out": ["it", 0]})["success"]
    assert [len(call["numbers"]) for call in GIVEN] == [2, 3, 2]
