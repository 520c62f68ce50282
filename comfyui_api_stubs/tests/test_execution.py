"""The executor's semantics, told by small nodes. The same tests run in a real ComfyUI; where ours differs on purpose,
the test says so.
"""

from __future__ import annotations

import asyncio
import logging
import random

import pytest
import torch
from comfy_api.latest import io

from comfyui_api_stubs.tests.counting_lines import lines_run
from comfyui_api_stubs.tests.which_host import REAL

only_embedded = pytest.mark.skipif(REAL, reason="the embedded host differs here on purpose")
RUNS: list[tuple] = []  # (node, what it saw), in order of execution


def v3(node_id: str, inputs: list, outputs: list, execute, **more):
    """A V3 node class around a function of its inputs; the function's return value is the node's."""
    methods = {
        name: classmethod(more.pop(name))
        for name in ("check_lazy_status", "fingerprint_inputs", "validate_inputs")
        if name in more
    }

    def define_schema(cls):
        return io.Schema(node_id=node_id, category="test", inputs=inputs, outputs=outputs, **more)

    return type(
        node_id,
        (io.ComfyNode,),
        {"define_schema": classmethod(define_schema), "execute": classmethod(execute), **methods},
    )


def number(cls, value):
    RUNS.append(("number", value))
    return io.NodeOutput(value)


def add(cls, a, b):
    RUNS.append(("add", a, b))
    return io.NodeOutput(a + b)


def choose(cls, left, a=None, b=None):
    RUNS.append(("choose", a, b))
    return io.NodeOutput(a if left else b)


def needed(cls, left, a=None, b=None):
    return [name for name in ("a" if left else "b",) if (a if left else b) is None]


async def slow(cls, value, name):
    RUNS.append(("start", name))
    await asyncio.sleep(0.05)
    RUNS.append(("end", name))
    return io.NodeOutput(value)


def fail(cls, value):
    raise ValueError(f"cannot do {value}")


def report(cls):
    tensor = torch.ones(2, requires_grad=False) * 2
    return io.NodeOutput(cls.hidden.unique_id, tensor.is_inference())


def show(cls, value):
    return io.NodeOutput(ui={"text": [str(value)]})


def noted(cls, value):
    return io.NodeOutput(value, ui={"text": [f"noted {value}"]})


def interrupt(cls, value):
    import comfy.model_management

    import nodes

    nodes.interrupt_processing()
    comfy.model_management.throw_exception_if_processing_interrupted()


def sticky(cls, value):
    cls.kept = value


class Split:
    """V1: gives a list, one entry a number up to `count`."""

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"count": ("INT", {"default": 3, "min": 0, "max": 9})}}

    RETURN_TYPES = ("INT", "INT")
    OUTPUT_IS_LIST = (True, False)
    FUNCTION = "split"
    CATEGORY = "test"

    def split(self, count):
        return (list(range(count)), count)


class Total:
    """V1: takes whole lists."""

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"values": ("INT", {}), "weight": ("INT", {"default": 1})}}

    INPUT_IS_LIST = True
    RETURN_TYPES = ("INT",)
    FUNCTION = "total"
    CATEGORY = "test"

    def total(self, values, weight):
        assert isinstance(weight, list)
        return (sum(values) * weight[0],)


class Changing:
    """V1: asks to run anew while `Changing.mark` differs from the last run."""

    mark = 0

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"value": ("INT", {"default": 0})}}

    @classmethod
    def IS_CHANGED(cls, value):
        return Changing.mark

    RETURN_TYPES = ("INT",)
    FUNCTION = "get"
    CATEGORY = "test"

    def get(self, value):
        RUNS.append(("changing", value))
        return (value,)


class Expanding:
    """V1: adds a node to the running graph, with an id of its own choice."""

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {}}

    RETURN_TYPES = ("INT",)
    FUNCTION = "expand"
    CATEGORY = "test"

    def expand(self):
        return {"result": (["x", 0],), "expand": {"x": {"class_type": "TestNumber", "inputs": {"value": 1}}}}


class Hidden:
    """V1: names a hidden input that only its JavaScript knows."""

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {}, "hidden": {"unique_id": "UNIQUE_ID", "files": (["a", "b"], {}), "other": "NO_SUCH"}}

    RETURN_TYPES = ("STRING",)
    FUNCTION = "told"
    CATEGORY = "test"

    def told(self, unique_id, files="not given", other="not given"):
        return (f"{unique_id} {files} {other}",)


INT = io.Int
NODES = [
    v3("TestNumber", [INT.Input("value", default=0, min=0, max=99)], [INT.Output()], number),
    v3("TestAdd", [INT.Input("a"), INT.Input("b")], [INT.Output()], add),
    v3(
        "TestChoose",
        [io.Boolean.Input("left"), INT.Input("a", lazy=True), INT.Input("b", lazy=True)],
        [INT.Output()],
        choose,
        check_lazy_status=needed,
    ),
    v3("TestSlow", [INT.Input("value"), io.String.Input("name", default="")], [INT.Output()], slow),
    v3("TestFail", [INT.Input("value")], [INT.Output()], fail),
    v3("TestReport", [], [io.String.Output(), io.Boolean.Output()], report, hidden=[io.Hidden.unique_id]),
    v3("TestShow", [io.AnyType.Input("value")], [], show, is_output_node=True),
    v3("TestNoted", [INT.Input("value")], [INT.Output()], noted),
    v3("TestInterrupt", [INT.Input("value")], [INT.Output()], interrupt),
    v3("TestSticky", [INT.Input("value")], [], sticky, is_output_node=True),
    v3("TestTwice", [INT.Input("value")], [INT.Output()], number, not_idempotent=True),
    v3(
        "TestPicky",
        [INT.Input("value")],
        [INT.Output()],
        number,
        validate_inputs=lambda cls, value: value != 13 or "13 is unlucky",
    ),
    v3(
        "TestKind",
        [io.Combo.Input("kind", options=["dog", "cat"])],
        [io.String.Output()],
        lambda cls, kind: io.NodeOutput(kind),
    ),
    v3("TestFinger", [INT.Input("value")], [INT.Output()], number, fingerprint_inputs=lambda cls, value: Changing.mark),
]


@pytest.fixture(autouse=True, scope="module")
def small_nodes(host):
    host.register(*NODES)
    host.nodes.NODE_CLASS_MAPPINGS.update(
        TestSplit=Split, TestTotal=Total, TestChanging=Changing, TestExpanding=Expanding, TestHidden=Hidden
    )


@pytest.fixture(autouse=True)
def clean(host):
    RUNS.clear()
    Changing.mark = 0
    host.fresh()


def node(class_type, **inputs):
    return {"class_type": class_type, "inputs": inputs}


def types(result, key):
    return sorted(error["type"] for error in result["errors"].get(key, []))


def test_values_and_order(host):
    prompt = {
        "3": node("TestAdd", a=["1", 0], b=["2", 0]),
        "1": node("TestNumber", value=1),
        "2": node("TestNumber", value=2),
    }
    result = host.run(prompt, capture={"sum": ["3", 0]})
    assert result["success"] and result["captured"] == {"sum": 3}
    assert sorted(RUNS[:2]) == [("number", 1), ("number", 2)] and RUNS[2:] == [("add", 1, 2)]


def test_only_what_outputs_need_runs(host):
    host.run({"1": node("TestNumber", value=1), "2": node("TestNumber", value=2)}, capture={"one": ["1", 0]})
    assert RUNS == [("number", 1)]


def test_cached_by_inputs_upstream(host):
    prompt = {
        "1": node("TestNumber", value=1),
        "2": node("TestNumber", value=2),
        "3": node("TestAdd", a=["1", 0], b=["2", 0]),
    }
    host.run(prompt, capture={"sum": ["3", 0]})
    RUNS.clear()
    again = host.run(prompt, capture={"sum": ["3", 0]})
    assert RUNS == [] and again["captured"] == {"sum": 3} and sorted(again["cached"]) == ["1", "2", "3"]
    prompt["2"]["inputs"]["value"] = 5
    assert host.run(prompt, capture={"sum": ["3", 0]})["captured"] == {"sum": 6}
    assert RUNS == [("number", 5), ("add", 1, 5)]


def test_equal_nodes_share_a_result_unless_not_idempotent(host):
    prompt = {
        "1": node("TestNumber", value=1),
        "2": node("TestNumber", value=1),
        "3": node("TestAdd", a=["1", 0], b=["2", 0]),
    }
    host.run(prompt, capture={"sum": ["3", 0]})
    assert RUNS == [("number", 1), ("add", 1, 1)]
    RUNS.clear()
    prompt = {
        "1": node("TestTwice", value=1),
        "2": node("TestTwice", value=1),
        "3": node("TestAdd", a=["1", 0], b=["2", 0]),
    }
    host.run(prompt, capture={"sum": ["3", 0]})
    assert RUNS == [("number", 1), ("number", 1), ("add", 1, 1)]


def test_results_move_with_new_ids(host):
    host.run({"1": node("TestNumber", value=1)}, capture={"one": ["1", 0]})
    assert host.run({"7": node("TestNumber", value=1)}, capture={"one": ["7", 0]})["cached"] == ["7"]


@pytest.mark.parametrize("kind", ["TestChanging", "TestFinger"])
def test_fingerprints_decide(host, kind):
    prompt = {"1": node(kind, value=4), "2": node("TestAdd", a=["1", 0], b=1)}
    for mark, ran in ((0, True), (0, False), (1, True), (float("nan"), True), (float("nan"), True)):
        Changing.mark = mark
        RUNS.clear()
        assert host.run(prompt, capture={"out": ["2", 0]})["captured"] == {"out": 5}
        assert (RUNS != []) is ran and (("add", 4, 1) in RUNS) is ran, mark


def test_lists_are_mapped_and_gathered(host):
    prompt = {
        "1": node("TestSplit", count=3),
        "2": node("TestAdd", a=["1", 0], b=10),
        "3": node("TestTotal", values=["2", 0], weight=2),
        "4": node("TestAdd", a=["1", 0], b=["1", 1]),
    }
    result = host.run(prompt, capture={"each": ["2", 0], "total": ["3", 0], "broadcast": ["4", 0]})
    assert result["captured"] == {"each": [10, 11, 12], "total": 66, "broadcast": [3, 4, 5]}


def test_lazy_inputs(host):
    prompt = {"1": node("TestNumber", value=1), "2": node("TestNumber", value=2)}
    prompt["3"] = node("TestChoose", left=False, a=["1", 0], b=["2", 0])
    assert host.run(prompt, capture={"out": ["3", 0]})["captured"] == {"out": 2}
    assert RUNS == [("number", 2), ("choose", None, 2)]


def test_async_nodes_overlap(host):
    prompt = {"1": node("TestSlow", value=1, name="a"), "2": node("TestSlow", value=2, name="b")}
    prompt["3"] = node("TestAdd", a=["1", 0], b=["2", 0])
    assert host.run(prompt, capture={"sum": ["3", 0]})["captured"] == {"sum": 3}
    assert {name for kind, name in RUNS[:2] if kind == "start"} == {"a", "b"}


def test_inference_mode_and_hidden(host):
    captured = host.run({"5": node("TestReport")}, capture={"id": ["5", 0], "inference": ["5", 1]})["captured"]
    assert captured == {"id": "5", "inference": True}


def test_hidden_inputs_that_no_host_knows_are_left_out(host):
    captured = host.run({"5": node("TestHidden")}, capture={"told": ["5", 0]})["captured"]
    assert captured == {"told": "5 not given not given"}


def test_ui_and_history(host):
    prompt = {"1": node("TestNumber", value=1), "2": node("TestShow", value=["1", 0])}
    for _ in range(2):  # the second time from the cache
        result = host.run(prompt)
        assert result["history"] == {"2": {"text": ["1"]}}
        shown = [data["output"] for event, data in result["events"] if event == "executed" and data["node"] == "2"]
        assert shown == [{"text": ["1"]}]
    names = [
        event for event, _ in result["events"] if event in ("execution_start", "execution_cached", "execution_success")
    ]
    assert names == ["execution_start", "execution_cached", "execution_success"]


@only_embedded
def test_what_a_cached_node_shows_is_sent_again_when_only_a_node_behind_it_runs(host):
    prompt = {
        "1": node("TestNoted", value=1),
        "2": node("TestAdd", a=["1", 0], b=0),
        "3": node("TestShow", value=["2", 0]),
    }
    for added in (0, 0, 5):
        prompt["2"]["inputs"]["b"] = added
        result = host.run(prompt)
        sent = [data["output"] for event, data in result["events"] if event == "executed" and data["node"] == "1"]
        assert sent == [{"text": ["noted 1"]}] and result["history"]["1"] == {"text": ["noted 1"]}
    assert "1" not in result["executed"]


def test_a_failing_node_is_reported_and_the_rest_kept(host):
    prompt = {"1": node("TestNumber", value=7), "2": node("TestFail", value=["1", 0])}
    result = host.run(prompt, capture={"out": ["2", 0]})
    assert not result["success"] and not host.executor.success
    (error,) = result["errors"]["2"]
    assert (error["node_type"], error["exception_type"], error["exception_message"].strip()) == (
        "TestFail",
        "ValueError",
        "cannot do 7",
    )
    assert (
        error["executed"] == ["1"]
        and error["current_inputs"] == {"value": [7]}
        and "fail" in "".join(error["traceback"])
    )
    assert host.executor.status_messages[-1][0] == "execution_error"
    RUNS.clear()
    host.run(prompt, capture={"out": ["2", 0]})
    assert RUNS == []


def test_interruption(host):
    result = host.run({"1": node("TestInterrupt", value=1)}, capture={"out": ["1", 0]})
    assert not result["success"] and host.executor.status_messages[-1][0] == "execution_interrupted"
    assert result["errors"]["1"][0]["node_type"] == "TestInterrupt"
    assert host.run({"1": node("TestNumber", value=1)}, capture={"out": ["1", 0]})["success"], (
        "the next run starts uninterrupted"
    )


def test_a_v3_class_is_locked_while_it_runs(host):
    result = host.run({"1": node("TestSticky", value=1)})
    assert result["errors"]["1"][0]["exception_type"] == "AttributeError"


def test_previews_follow_each_workflow(host, monkeypatch):
    import latent_preview
    from comfy.cli_args import LatentPreviewMethod

    if not hasattr(latent_preview, "set_preview_method"):
        pytest.skip("this ComfyUI has one preview method for all workflows")
    monkeypatch.setattr(latent_preview, "default_preview_method", LatentPreviewMethod.TAESD)
    monkeypatch.setattr(latent_preview.args, "preview_method", LatentPreviewMethod.TAESD)
    methods = {"none": "none", "latent2rgb": "latent2rgb", "default": "taesd", "no such": "taesd", None: "taesd"}
    for asked, used in methods.items():
        host.run({"1": node("TestShow", value="x")}, extra_data={"preview_method": asked})
        assert latent_preview.args.preview_method.value == used


def test_execute_from_outside_a_loop(host):
    host.executor.execute({"1": node("TestShow", value="x")}, "id", {}, ["1"])
    assert host.executor.success and host.executor.history_result["outputs"] == {"1": {"text": ["x"]}}
    asyncio.set_event_loop(host.loop)


def test_progress_reaches_the_hook(host):
    import comfy.utils

    told = []
    previous = comfy.utils.PROGRESS_BAR_HOOK
    comfy.utils.set_progress_bar_global_hook(lambda value, total, preview, node_id=None: told.append((value, total)))
    try:
        bar = comfy.utils.ProgressBar(4)
        bar.update(1)
        bar.update_absolute(9)
    finally:
        comfy.utils.set_progress_bar_global_hook(previous)
    assert told == [(1, 4), (4, 4)]


# --- validation -------------------------------------------------------------------------------------------------------


def test_all_errors_of_all_nodes_at_once(host):
    prompt = {
        "1": node("TestNumber", value=100),
        "2": node("TestNumber", value=-1),
        "3": node("TestAdd", a=["1", 0]),
        "4": node("TestAdd", a="many", b=["5", 0]),
        "5": node("TestReport"),
        "6": node("TestPicky", value=13),
        "7": node("TestAdd", a=[1], b=2),
    }
    show = {f"s{key}": node("TestShow", value=[key, 0]) for key in ("2", "3", "4", "6", "7")}
    result = host.run({**prompt, **show})
    assert not result["valid"] and RUNS == []
    assert types(result, "1") == ["value_bigger_than_max"]
    assert types(result, "2") == ["value_smaller_than_min"]
    assert types(result, "3") == ["required_input_missing"]
    assert types(result, "4") == ["invalid_input_type", "return_type_mismatch"]
    assert (
        types(result, "6") == ["custom_validation_failed"]
        and result["errors"]["6"][0]["details"] == "value - 13 is unlucky"
    )
    assert types(result, "7") == ["bad_linked_input"]
    valid, error, outputs, node_errors = host.validate({**prompt, **show})
    assert (valid, error["type"], outputs) == (False, "prompt_outputs_failed_validation", [])
    dependents = node_errors["1"]["dependent_outputs"]  # ComfyUI adds every output that failed after the first
    assert node_errors["1"]["class_type"] == "TestNumber" and ("s3" in dependents if REAL else dependents == ["s3"])


def test_one_good_output_is_enough_for_comfyui(host):
    prompt = {
        "1": node("TestShow", value="x"),
        "2": node("TestShow", value=["3", 0]),
        "3": node("TestNumber", value=-1),
    }
    valid, error, outputs, node_errors = host.validate(prompt)
    assert (valid, error, outputs) == (True, None, ["1"]) and list(node_errors) == ["3"]


def test_what_a_nodes_validation_raises_is_told_apart(host):
    raising = {"VALIDATE_INPUTS": classmethod(lambda cls, value: 1 / 0)}
    host.nodes.NODE_CLASS_MAPPINGS.update(TestRaises=type("TestRaises", (Changing,), raising))
    shown = type("TestRaisesShown", (Changing,), {**raising, "OUTPUT_NODE": True})
    host.nodes.NODE_CLASS_MAPPINGS.update(TestRaisesShown=shown)
    prompt = {"1": node("TestRaises", value=1), "2": node("TestShow", value=["1", 0])}
    errors = host.run({**prompt, "3": node("TestRaisesShown", value=1)})["errors"]
    assert {key: [error["type"] for error in found] for key, found in errors.items()} == {
        "1": ["exception_during_inner_validation"],
        "3": ["exception_during_validation"],
    }
    assert errors["1"][0]["extra_info"]["exception_type"] == "ZeroDivisionError"


def test_constants_are_converted(host):
    prompt = {"1": node("TestNumber", value="7"), "2": node("TestShow", value=["1", 0])}
    assert host.validate(prompt)[0] and prompt["1"]["inputs"]["value"] == 7


def test_no_outputs(host):
    valid, error, outputs, _ = host.validate({"1": node("TestNumber", value=1)})
    assert (valid, error["type"], outputs) == (False, "prompt_no_outputs", [])


def test_partial_execution(host):
    prompt = {"1": node("TestShow", value="x"), "2": node("TestShow", value="y")}
    arguments = ("id", prompt, ["2"])
    assert host.loop.run_until_complete(host.execution.validate_prompt(*arguments))[2] == ["2"]


@pytest.mark.skipif(REAL, reason="0.3.64 does not check the choices of V3 combos")
def test_choices(host):
    result = host.run({"1": node("TestKind", kind="bird"), "2": node("TestShow", value=["1", 0])})
    assert (
        types(result, "1") == ["value_not_in_list"]
        and "'bird' not in ['dog', 'cat']" in result["errors"]["1"][0]["details"]
    )


@only_embedded
def test_unknown_nodes_cycles_and_dead_links_are_listed_with_the_rest(host):
    prompt = {
        "1": {"class_type": "NoSuchNode", "inputs": {}, "_meta": {"title": "Mine"}},
        "2": {"inputs": {}},
        "3": node("TestAdd", a=["4", 0], b=["1", 0]),
        "4": node("TestAdd", a=["3", 0], b=1),
        "5": node("TestShow", value=["3", 0]),
        "6": node("TestShow", value=["99", 0]),
        "7": node("TestShow", value=["4", 3]),
        "8": node("TestNumber", value=-1),
    }
    valid, error, outputs, node_errors = host.validate(prompt)
    assert (
        not valid
        and outputs == []
        and error["type"] == "missing_node_type"
        and "Mine" in error["details"]
        and "#2" in error["details"]
    )
    kinds = {key: sorted(problem["type"] for problem in found["errors"]) for key, found in node_errors.items()}
    assert kinds == {
        "1": ["missing_node_type"],
        "2": ["missing_node_type"],
        "3": ["dependency_cycle"],
        "4": ["dependency_cycle"],
        "6": ["bad_linked_input"],
        "7": ["bad_linked_input"],
        "8": ["value_smaller_than_min"],
    }
    assert "3 (TestAdd)" in node_errors["3"]["errors"][0]["details"]
    assert host.run(prompt)["success"] is False


@only_embedded
def test_a_cycle_that_reaches_the_executor_is_an_error(host):
    host.executor.execute(
        {"1": node("TestAdd", a=["2", 0], b=1), "2": node("TestAdd", a=["1", 0], b=1)}, "id", {}, ["1"]
    )
    asyncio.set_event_loop(host.loop)
    event, data = host.executor.status_messages[-1]
    assert event == "execution_error" and data["exception_type"].endswith("DependencyCycleError")


@only_embedded
def test_a_node_that_returns_none_is_named(host):
    host.nodes.NODE_CLASS_MAPPINGS.update(TestNone=type("TestNone", (Expanding,), {"expand": lambda self: None}))
    (error,) = host.run({"1": node("TestNone")}, capture={"out": ["1", 0]})["errors"]["1"]
    assert "TestNone returned None" in error["exception_message"]


@only_embedded
def test_a_node_that_returns_no_tuple_is_named(host):
    host.nodes.NODE_CLASS_MAPPINGS.update(TestOne=type("TestOne", (Expanding,), {"expand": lambda self: 3}))
    (error,) = host.run({"1": node("TestOne")}, capture={"out": ["1", 0]})["errors"]["1"]
    assert "TestOne returned one int; a node returns a tuple of its outputs" in error["exception_message"]


@pytest.mark.slow
@only_embedded
def test_a_long_chain_is_no_recursion(host):
    prompt = {"0": node("TestNumber", value=0)} | {
        str(i): node("TestAdd", a=[str(i - 1), 0], b=1) for i in range(1, 1500)
    }
    assert host.run(prompt, capture={"out": ["1499", 0]})["captured"] == {"out": 1499}


# --- what a node costs ------------------------------------------------------------------------------------------------


class Gather:
    """V1: takes as many numbers as the test sets."""

    inputs = 1

    @classmethod
    def INPUT_TYPES(cls):
        ASKED.append(cls)
        return {"required": {f"value{number}": ("INT", {}) for number in range(cls.inputs)}}

    RETURN_TYPES = ()
    FUNCTION = "gather"
    CATEGORY = "test"
    OUTPUT_NODE = True

    def gather(self, **values):
        return {"ui": {"count": [len(values)]}}


class Step:
    """V1: passes a number on."""

    @classmethod
    def INPUT_TYPES(cls):
        ASKED.append(cls)
        return {"required": {"a": ("INT", {"default": 0})}, "optional": {"b": ("INT", {"default": 0})}}

    RETURN_TYPES = ("INT",)
    FUNCTION = "step"
    CATEGORY = "test"

    def step(self, a, b=0):
        return (a,)


class Show(Step):
    """V1: an output."""

    RETURN_TYPES = ()
    OUTPUT_NODE = True

    def step(self, a, b=0):
        return {"ui": {"text": [str(a)]}}


ASKED: list[type] = []  # the classes whose INPUT_TYPES was called


def chain(count):
    steps = {str(n): node("TestStep", a=[str(n - 1), 0]) for n in range(1, count)}
    return {**steps, "0": node("TestStep", a=0), "end": node("TestGather", value0=[str(count - 1), 0])}


def fan(count):
    steps = {str(n): node("TestStep", a=n) for n in range(count)}
    return {**steps, "end": node("TestGather", **{f"value{n}": [str(n), 0] for n in range(count)})}


def grid(count):
    width = 10
    links = {n: [[str(n - 1), 0]] * (n % width > 0) + [[str(n - width), 0]] * (n >= width) for n in range(count)}
    steps = {str(n): node("TestStep", **{"a": n, **dict(zip("ab", links[n], strict=False))}) for n in links}
    return {**steps, "end": node("TestGather", value0=[str(count - 1), 0])}


def outputs_along(count):
    """A chain that shows each of its numbers."""
    shows = {f"show {n}": node("TestShowStep", a=[str(n), 0]) for n in range(count)}
    return {**shows, **chain(count)}


def no_outputs(count):
    return {key: entry for key, entry in chain(count).items() if key != "end"}


def invalid(count):
    """A chain with a mistake in every node."""
    return {key: {**entry, "inputs": {**entry["inputs"], "b": "many"}} for key, entry in chain(count).items()}


def is_counted(file):
    """Whether a file is of the host's executor."""
    return file.endswith("execution.py") or "comfy_execution" in file


@pytest.fixture
def counted(host, monkeypatch):
    """Runs a workflow without any page; a function of shape, count and number of inputs of the last node."""
    extra = {"TestStep": Step, "TestGather": Gather, "TestShowStep": Show}
    for name, kind in extra.items():
        monkeypatch.setitem(host.nodes.NODE_CLASS_MAPPINGS, name, kind)
    monkeypatch.setattr(Gather, "inputs", 1)
    monkeypatch.setattr(logging.getLogger(), "disabled", True)

    def run(shape, count):
        Gather.inputs = count if shape is fan else 1
        host.fresh()
        ASKED.clear()
        prompt = shape(count)
        valid = host.validate(prompt)
        if valid[0] and not valid[3]:
            host.loop.run_until_complete(host.executor.execute_async(prompt, "id", {"client_id": "test"}, valid[2]))
            host.server.client_id = None
            assert host.executor.success and host.executor.history_result["outputs"]

    return run


@pytest.mark.slow
@only_embedded
@pytest.mark.parametrize("shape", [chain, fan, grid, outputs_along, no_outputs, invalid])
def test_as_many_nodes_more_cost_as_many_lines_more(counted, shape):
    few, more, many = (lines_run(lambda count=count: counted(shape, count), is_counted) for count in (500, 750, 1000))
    assert few > 500 and many - more <= more - few


@only_embedded
def test_input_types_are_asked_once_a_class_in_a_validation_and_in_a_run(counted):
    for count in (500, 1000):
        counted(chain, count)
        assert sorted(kind.__name__ for kind in ASKED) == ["Gather", "Gather", "Step", "Step"]


class Everyone:
    """A server with one open page."""

    def __init__(self):
        self.client_id, self.sockets, self.sent = "page", {"page": object()}, []

    def send_sync(self, event, data, sid=None):
        self.sent.append((event, data, sid))


@only_embedded
def test_progress_is_sent_as_comfyui_sends_it_and_not_built_for_nobody():
    from comfy_execution import graph, progress

    server, expected = Everyone(), []
    registry = progress.ProgressRegistry("p", graph.DynamicPrompt({}))
    handler = progress.WebUIProgressHandler(server)
    handler.set_registry(registry)
    registry.register_handler(handler)

    def all_nodes():
        """ComfyUI's own way: every node that has started, at every event."""
        where = {"display_node_id": "{}", "parent_node_id": None, "real_node_id": "{}"}
        return {
            key: {
                "value": state["value"],
                "max": state["max"],
                "state": state["state"].value,
                "node_id": key,
                "prompt_id": "p",
                **{name: place and place.format(key) for name, place in where.items()},
            }
            for key, state in registry.nodes.items()
            if state["state"] != progress.NodeState.Pending
        }

    def change(number):
        key = str(number % 7)
        registry.ensure_entry("never started")
        (registry.start_progress, registry.finish_progress)[number % 2](key)
        if number % 3 == 0:
            registry.update_progress(key, number, 90)
            expected.append(None)  # the state between is checked with the next

    for number in range(40):
        change(number)
        expected.append(all_nodes())
    states = [data["nodes"] for event, data, _ in server.sent]
    assert len(states) == len(expected)
    assert all(right is None or state == right for state, right in zip(states, expected, strict=True))
    assert {sid for _, _, sid in server.sent} == {"page"}
    server.sent.clear()
    page = server.sockets.pop("page")
    for number in range(40, 60):
        change(number)
    assert server.sent == []
    server.sockets["page"] = page  # the page is opened again: it gets what it missed
    registry.start_progress("new")
    assert [data["nodes"] for _, data, _ in server.sent] == [all_nodes()]


@only_embedded
def test_an_event_of_progress_costs_the_same_for_many_nodes():
    from comfy_execution import graph, progress

    def costs(count):
        server = Everyone()
        registry = progress.ProgressRegistry("p", graph.DynamicPrompt({}))
        handler = progress.WebUIProgressHandler(server)
        handler.set_registry(registry)
        registry.register_handler(handler)
        return lines_run(lambda: [registry.start_progress(str(number)) for number in range(count)], is_counted)

    assert costs(1000) <= 2 * costs(500)


class Scanning:
    """Which node is next by looking through all that wait: the rule that WaitingNodes keeps to."""

    def __init__(self):
        self.waiting, self.urgent, self.busy = {}, set(), set()

    def add(self, node_id, urgent, sources):
        self.waiting[node_id] = set(sources)
        if urgent:
            self.urgent.add(node_id)

    def wait_for(self, node_id, source):
        self.waiting[node_id].add(source)

    def take(self):
        ready = [key for key, blockers in self.waiting.items() if not blockers and key not in self.busy]
        near = self.urgent & self.waiting.keys()
        chosen = ready[0] if ready else None
        for _ in range(3):
            found = next((key for key in ready if key in near), None)
            if found is not None:
                chosen = found
                break
            near = {source for key in near & self.waiting.keys() for source in self.waiting[key]}
        if chosen is not None:
            self.busy.add(chosen)
        return chosen

    def give_back(self, node_id):
        self.busy.discard(node_id)

    def done(self, node_id):
        self.busy.discard(node_id)
        del self.waiting[node_id]
        for blockers in self.waiting.values():
            blockers.discard(node_id)


@only_embedded
@pytest.mark.parametrize("seed", range(60))
def test_the_order_is_that_of_looking_through_all_that_wait(seed):
    """Random graphs with lazy inputs, which are asked for at the first try, and async nodes, which end later."""
    from comfy_execution.graph import WaitingNodes

    def order(waiting):
        draw = random.Random(seed)
        count = draw.randrange(2, 40)
        sources = {n: draw.sample(range(n), min(n, draw.randrange(4))) for n in range(count)}
        lazy = {n: [source for source in links if draw.random() < 0.2] for n, links in sources.items()}
        urgent = {n for n in range(count) if draw.random() < 0.2}
        takes_long = {n for n in range(count) if draw.random() < 0.3}
        told, results, running = [], set(), []

        def demand(start):
            pending = [start]
            while pending:
                current = pending.pop()
                if str(current) in known:
                    continue
                eager = [s for s in sources[current] if s not in lazy[current] and s not in results]
                known.add(str(current))
                waiting.add(str(current), current in urgent, [str(s) for s in eager])
                pending += eager

        known: set[str] = set()
        for start in sorted(urgent | {count - 1}, reverse=seed % 2 == 0):
            demand(start)
        while True:
            taken = waiting.take()
            if taken is None and not running:
                return told
            if taken is None:
                number = running.pop(draw.randrange(len(running)))
            else:
                number = int(taken)
                told.append(number)
                missing = [source for source in lazy[number] if source not in results]
                lazy[number] = []
                if missing:
                    for source in missing:
                        demand(source)
                        waiting.wait_for(taken, str(source))
                    waiting.give_back(taken)
                    continue
                if number in takes_long:
                    running.append(number)
                    continue
            results.add(number)
            waiting.done(str(number))

    found = order(WaitingNodes())
    assert found and found == order(Scanning())


@only_embedded
def test_a_chain_of_5000_is_no_recursion(host, counted):
    counted(chain, 5000)
    counted(invalid, 5000)


@only_embedded
def test_a_class_may_take_any_input(host):
    """Packs have dicts of inputs that hold every name."""

    class Any(dict):
        def __contains__(self, name):
            return True

        def __getitem__(self, name):
            return ("INT", {})

    taking = type(
        "Taking",
        (Step,),
        {"INPUT_TYPES": classmethod(lambda cls: {"required": {}, "optional": Any()}), "FUNCTION": "t"},
    )
    taking.t = lambda self, **values: (sum(values.values()),)
    host.nodes.NODE_CLASS_MAPPINGS.update(TestTaking=taking)
    prompt = {"1": node("TestNumber", value=4), "2": node("TestTaking", x=["1", 0], y=3)}
    assert host.run(prompt, capture={"sum": ["2", 0]})["captured"] == {"sum": 7}
