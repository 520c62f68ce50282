"""Every input of every node, out of its range: typed in, in a workflow's JSON, and through a link."""

import dataclasses
import math

import pytest
from comfy_api.latest import io
from graft_nodes.nodes import NODES
from graft_nodes.settings.declaration import settings_of

NUMBERS = (io.Int.Input, io.Float.Input)


def wrong_values(one):
    """Values that an input of this kind must not take."""
    if isinstance(one, NUMBERS):
        yield from ("much", None, [], {"__value__": [1]})
        yield from (math.nan, math.inf)
        for bound, beyond in ((one.min, -1), (one.max, 1)):
            if bound is not None:
                yield bound + beyond
        if isinstance(one, io.Int.Input):
            yield 1.5
    elif isinstance(one, io.Combo.Input):
        yield from ("no such choice", None, 3)
    elif isinstance(one, io.Boolean.Input):
        yield from ("yes", None, 2)
    elif isinstance(one, io.String.Input):
        yield from (None, 3, {"__value__": [1]})


CASES = [
    pytest.param(node, one, value, id=f"{node.define_schema().node_id}-{one.id}-{value!r}")
    for node in NODES
    for one in node.define_schema().inputs
    for value in wrong_values(one)
]


def test_there_is_a_case_for_every_widget_of_every_node():
    widgets = {
        (node.define_schema().node_id, one.id)
        for node in NODES
        for one in node.define_schema().inputs
        if hasattr(one, "default") or isinstance(one, io.Combo.Input)
    }
    assert {(case.values[0].define_schema().node_id, case.values[1].id) for case in CASES} == widgets
    assert len(widgets) > 190


@pytest.mark.parametrize(("node", "one", "value"), CASES)
def test_execute_refuses_it_by_its_label_before_anything_else(host, node, one, value):
    """What came through a link: only the run sees it."""
    identifier = node.define_schema().node_id
    given = [value] if node.define_schema().is_input_list else value
    with pytest.raises(ValueError) as error:
        host.call(identifier, **{one.id: given})
    assert f"{one.display_name} is" in str(error.value)


def typed_in(one, value):
    """Whether ComfyUI hands this value on as it is: it makes texts and whole numbers of what it can."""
    if isinstance(one, NUMBERS):
        return type(value) in (int, float) and math.isfinite(value) and (type(value) is int or value != 1.5)
    return isinstance(one, io.Combo.Input) and isinstance(value, str)


LATER = ("GraftLoadState", "name")  # looked up when the node runs: a state may be saved after the list was made
TYPED_IN = [
    case
    for case in CASES
    if typed_in(*case.values[1:]) and (case.values[0].define_schema().node_id, case.values[1].id) != LATER
]


@pytest.mark.parametrize(("node", "one", "value"), TYPED_IN)
def test_it_is_refused_at_its_input_before_a_workflow_runs(host, node, one, value):
    schema = node.define_schema()
    inputs = {**host.defaults(schema.node_id), one.id: value}
    _, _, _, errors = host.validate(
        {
            "1": {"class_type": schema.node_id, "inputs": inputs},
            "2": {"class_type": "TestCapture", "inputs": {"value": ["1", 0], "name": "shown"}},
        }
    )
    assert one.id in {error["extra_info"]["input_name"] for error in errors["1"]["errors"]}


def test_declared_settings_are_the_inputs_of_their_nodes():
    seen = 0
    for node in NODES:
        if node.settings_class is None:
            continue
        inputs = {one.id: one for one in node.define_schema().inputs}
        for name, one in settings_of(node.settings_class).items():
            made = inputs[name]
            assert (made.display_name, made.default, made.tooltip) == (one.label, one.default, one.help)
            assert (getattr(made, "min", None), getattr(made, "max", None)) == (one.low, one.high)
            assert made.optional
            seen += 1
    assert seen > 80


def test_every_check_before_a_run_comes_from_the_declaration():
    """No node writes its own: what `validate_inputs` does with a value is the same for every way in."""
    checked = [node for node in NODES if node.checked_together]
    assert len(checked) > 15
    for node in NODES:
        assert "validate_inputs" not in vars(node) or "_make_validator" in node.validate_inputs.__qualname__
        assert bool(vars(node).get("validate_inputs")) == bool(node.checked_together) or not host_checks_choices()


def host_checks_choices():
    return any(field.name == "search_aliases" for field in dataclasses.fields(io.Schema))
