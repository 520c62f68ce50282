"""Nodes that add nodes to the running graph ("node expansion"). The same tests run in a real ComfyUI."""

from __future__ import annotations

import asyncio
import logging

import pytest
from comfy_api.latest import io
from comfy_execution.graph import ExecutionBlocker
from comfy_execution.graph_utils import GraphBuilder, add_graph_prefix, is_link

from comfyui_api_stubs.tests.counting_lines import lines_run
from comfyui_api_stubs.tests.which_host import REAL

only_embedded = pytest.mark.skipif(REAL, reason="the embedded host differs here on purpose")
RAN: list[tuple] = []  # (node, what it saw), in order of execution


class Number:
    """Gives a number."""

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"value": ("INT", {"default": 0})}}

    RETURN_TYPES = ("INT",)
    FUNCTION = "run"
    CATEGORY = "test"

    def run(self, value):
        RAN.append((type(self).__name__, value))
        return (value,)


class Sum(Number):
    """Adds two numbers."""

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"a": ("INT", {}), "b": ("INT", {"default": 0})}}

    def run(self, a, b):
        RAN.append(("Sum", a, b))
        return (a + b,)


class Several(Number):
    """Gives all numbers below one, as a list."""

    OUTPUT_IS_LIST = (True,)

    def run(self, value):
        return (list(range(value)),)


class Shown(Number):
    """An output."""

    RETURN_TYPES = ()
    OUTPUT_NODE = True

    def run(self, value):
        RAN.append(("Shown", value))
        return {"ui": {"text": [str(value)]}}


class Fails(Number):
    """Raises."""

    def run(self, value):
        raise ValueError(f"cannot do {value}")


class Blocks(Number):
    """Blocks odd numbers."""

    def run(self, value):
        return (ExecutionBlocker(None) if value % 2 else value,)


class Waits(Number):
    """Takes a while."""

    async def run(self, value):
        RAN.append(("start", value))
        await asyncio.sleep(0.05)
        RAN.append(("end", value))
        return (value,)


class Either(Number):
    """Asks for one of two inputs."""

    @classmethod
    def INPUT_TYPES(cls):
        lazy = ("INT", {"lazy": True})
        return {"required": {"left": ("BOOLEAN", {}), "a": lazy, "b": lazy}}

    def check_lazy_status(self, left, a=None, b=None):
        name, value = ("a", a) if left else ("b", b)
        return [name] if value is None else []

    def run(self, left, a=None, b=None):
        return (a if left else b,)


class Doubled(Number):
    """Adds two nodes: a number, and that number twice."""

    def run(self, value):
        RAN.append(("Doubled", value))
        graph = GraphBuilder()
        first = graph.node("XNumber", value=value)
        return {"result": (graph.node("XSum", a=first.out(0), b=first.out(0)).out(0),), "expand": graph.finalize()}


class DoubledOutputs(Doubled):
    """Waits before it adds them."""

    async def run(self, value):
        await asyncio.sleep(0.01 * (3 - value))
        return super().run(value)


class Countdown(Number):
    """Adds a copy of itself with a number less, until there is none left; gives how many there were."""

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"value": ("INT", {}), "passed": ("INT", {"default": 0})}}

    def run(self, value, passed):
        if value == 0:
            return (passed,)
        graph = GraphBuilder()
        one_more = graph.node("XSum", a=passed, b=1)
        again = graph.node("XCountdown", "again", value=value - 1, passed=one_more.out(0))
        return {"result": (again.out(0),), "expand": graph.finalize()}


class Adds(Number):
    """Adds whatever the test sets: `graph` of a builder and the node's inputs gives the results."""

    graph = None

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"value": ("INT", {"default": 0})}, "optional": {"link": ("INT", {"rawLink": True})}}

    def run(self, value, link=None):
        builder = GraphBuilder()
        results = Adds.graph(builder, value, link)
        return {"result": results, "expand": builder.finalize()}


class AddsAndShows(Adds):
    """Shows something as well."""

    OUTPUT_NODE = True

    def run(self, value, link=None):
        return {**super().run(value, link), "ui": {"text": ["shown"]}}


def expanding_output(cls, value):
    graph = GraphBuilder()
    number = graph.node("XNumber", value=value + 1)
    return io.NodeOutput(number.out(0), expand=graph.finalize())


class V3(io.ComfyNode):
    """Adds a node as V3 nodes do."""

    @classmethod
    def define_schema(cls):
        sockets = {"inputs": [io.Int.Input("value")], "outputs": [io.Int.Output()]}
        return io.Schema("XV3", category="test", enable_expand=True, **sockets)

    execute = classmethod(expanding_output)


CLASSES = (Number, Sum, Several, Shown, Fails, Blocks, Waits, Either, Doubled, Countdown, Adds, AddsAndShows)


@pytest.fixture(autouse=True, scope="module")
def small_nodes(host):
    mappings = host.nodes.NODE_CLASS_MAPPINGS
    mappings.update({f"X{cls.__name__}": cls for cls in (*CLASSES, DoubledOutputs)})
    host.register(V3)


@pytest.fixture(autouse=True)
def clean(host, monkeypatch):
    RAN.clear()
    monkeypatch.setattr(Adds, "graph", None)
    host.fresh()


def node(class_type, **inputs):
    return {"class_type": class_type, "inputs": inputs}


def adds(monkeypatch, graph):
    """Have XAdds add this graph."""
    monkeypatch.setattr(Adds, "graph", staticmethod(graph))


def out_of(host, prompt, output=("1", 0)):
    return host.run(prompt, capture={"out": list(output)})


def sent(result, kind):
    return [data for event, data in result["events"] if event == kind]


def test_outputs_of_added_nodes_become_the_outputs_of_the_node(host):
    assert out_of(host, {"1": node("XDoubled", value=4)})["captured"] == {"out": 8}
    assert RAN == [("Doubled", 4), ("Number", 4), ("Sum", 4, 4)]
    assert out_of(host, {"1": node("XV3", value=4)})["captured"] == {"out": 5}


def test_events_name_the_added_node_the_one_shown_and_where_it_comes_from(host, monkeypatch):
    def graph(builder, value, link):
        builder.node("XShown", "shown", value=1)
        named = builder.node("XNumber", "named", value=2)
        named.set_override_display_id("2")
        return (named.out(0),)

    adds(monkeypatch, graph)
    result = out_of(host, {"1": node("XAdds", value=4), "2": node("XNumber", value=3)})
    running = {data["node"]: data["display_node"] for data in sent(result, "executing") if data["node"]}
    assert running == {"1": "1", "1.0.0.shown": "1", "1.0.0.named": "2", "capture out": "capture out"}
    (shown,) = [data for data in sent(result, "executed") if data["node"] == "1.0.0.shown"]
    assert (shown["display_node"], shown["output"]) == ("1", {"text": ["1"]})
    assert result["history"]["1.0.0.shown"] == {"text": ["1"]}
    assert host.executor.history_result["meta"]["1.0.0.shown"] == {
        "node_id": "1.0.0.shown",
        "display_node": "1",
        "parent_node": "1",
        "real_node_id": "1",
    }


def test_each_call_and_each_graph_has_ids_of_its_own(host, monkeypatch):
    def graph(builder, value, link):
        second = GraphBuilder()
        assert (builder.prefix, second.prefix) == (f"1.{value}.0.", f"1.{value}.1.")
        return (builder.node("XSum", a=value, b=10).out(0),)

    adds(monkeypatch, graph)
    result = out_of(host, {"1": node("XAdds", value=["2", 0]), "2": node("XSeveral", value=3)})
    assert result["captured"] == {"out": [10, 11, 12]}
    assert {"1.0.0.1", "1.1.0.1", "1.2.0.1"} <= set(result["executed"])


def test_some_calls_may_add_nodes_and_others_not(host):
    result = out_of(host, {"1": node("XCountdown", value=["2", 0], passed=0), "2": node("XSeveral", value=3)})
    assert result["captured"] == {"out": [0, 1, 2]}


def test_added_nodes_may_add_nodes(host):
    result = out_of(host, {"1": node("XCountdown", value=20, passed=0)})
    assert result["captured"] == {"out": 20}
    assert {data["display_node"] for data in sent(result, "executing")} == {"1", "capture out"}


def test_results_that_are_no_links_are_passed_on(host, monkeypatch):
    adds(monkeypatch, lambda builder, value, link: (value + 1,))
    assert out_of(host, {"1": node("XAdds", value=4)})["captured"] == {"out": 5}


def test_added_nodes_link_to_the_workflow_and_are_run_once(host, monkeypatch):
    adds(monkeypatch, lambda builder, value, link: (builder.node("XSum", a=link, b=value).out(0),))
    prompt = {"1": node("XAdds", value=1, link=["2", 0]), "2": node("XNumber", value=6)}
    assert out_of(host, prompt)["captured"] == {"out": 7} and RAN == [("Number", 6), ("Sum", 6, 1)]


def test_results_of_added_nodes_are_cached(host):
    prompt = {"1": node("XDoubled", value=4), "2": node("XSum", a=["1", 0], b=1)}
    out_of(host, prompt, ("2", 0))
    RAN.clear()
    assert out_of(host, prompt, ("2", 0))["captured"] == {"out": 9} and RAN == []
    prompt["2"]["inputs"]["b"] = 2
    assert out_of(host, prompt, ("2", 0))["captured"] == {"out": 10} and RAN == [("Sum", 8, 2)]


def test_added_nodes_that_are_the_same_again_do_not_run_again(host, monkeypatch):
    def graph(builder, value, link):
        return (builder.node("XSum", a=builder.node("XNumber", value=7).out(0), b=value).out(0),)

    adds(monkeypatch, graph)
    for value in (1, 2):
        assert out_of(host, {"1": node("XAdds", value=value)})["captured"] == {"out": 7 + value}
    assert RAN == [("Number", 7), ("Sum", 7, 1), ("Sum", 7, 2)]


def test_added_nodes_are_kept_while_their_node_is_cached(host, monkeypatch):
    def graph(builder, value, link):
        return (builder.node("XSum", a=builder.node("XNumber", value=7).out(0), b=value).out(0),)

    adds(monkeypatch, graph)
    for value in (1, 1, 2):  # the second time nothing is added
        out_of(host, {"1": node("XAdds", value=value)})
    assert RAN.count(("Number", 7)) == 1


def test_lazy_inputs_of_added_nodes(host, monkeypatch):
    def graph(builder, value, link):
        left, right = builder.node("XNumber", value=1), builder.node("XNumber", value=2)
        return (builder.node("XEither", left=value > 0, a=left.out(0), b=right.out(0)).out(0),)

    adds(monkeypatch, graph)
    assert out_of(host, {"1": node("XAdds", value=0)})["captured"] == {"out": 2} and RAN == [("Number", 2)]
    assert out_of(host, {"1": node("XAdds", value=1)})["captured"] == {"out": 1}
    assert RAN == [("Number", 2), ("Number", 1)]


def test_a_lazy_input_may_lead_to_a_node_that_adds_nodes(host):
    prompt = {"1": node("XEither", left=True, a=["2", 0], b=["3", 0])}
    prompt |= {"2": node("XDoubled", value=2), "3": node("XDoubled", value=3)}
    assert out_of(host, prompt)["captured"] == {"out": 4} and ("Doubled", 3) not in RAN


def test_blockers_go_through_added_nodes(host, monkeypatch):
    def graph(builder, value, link):
        blocks = builder.node("XBlocks", value=value)
        builder.node("XShown", value=blocks.out(0))
        return (builder.node("XSum", a=blocks.out(0), b=10).out(0),)

    adds(monkeypatch, graph)
    prompt = {"1": node("XAdds", value=["2", 0]), "2": node("XSeveral", value=4), "3": node("XShown", value=["1", 0])}
    result = host.run(prompt)
    assert result["success"] and result["history"]["3"] == {"text": ["10", "12"]}
    assert sorted(entry for entry in RAN if entry[0] == "Shown") == [
        ("Shown", 0),
        ("Shown", 2),
        ("Shown", 10),
        ("Shown", 12),
    ]


def test_a_blocker_as_the_result_of_a_node_that_adds_nodes(host, monkeypatch):
    adds(monkeypatch, lambda builder, value, link: builder.node("XShown", value=value) and ExecutionBlocker(None))
    result = host.run({"1": node("XAdds", value=5), "2": node("XShown", value=["1", 0])})
    assert result["success"] and RAN == [("Shown", 5)]


def test_outputs_among_added_nodes_run_though_nothing_needs_them(host, monkeypatch):
    adds(monkeypatch, lambda builder, value, link: (builder.node("XShown", value=value), value)[1:])
    for _ in range(2):
        result = host.run({"1": node("XAddsAndShows", value=5)})
        assert result["success"] and result["history"]["1"] == {"text": ["shown"]}
    assert RAN == [("Shown", 5)]


def test_an_error_is_the_workflows_nodes(host, monkeypatch):
    adds(monkeypatch, lambda builder, value, link: (builder.node("XFails", value=value).out(0),))
    result = out_of(host, {"1": node("XAdds", value=5)})
    (error,) = result["errors"]["1"]
    assert (error["node_type"], error["exception_type"]) == ("XAdds", "ValueError")
    assert error["exception_message"].strip() == "cannot do 5" and error["current_inputs"] == {"value": [5]}


def test_a_cycle_of_added_nodes_is_an_error_of_the_node_that_added_them(host, monkeypatch):
    def graph(builder, value, link):
        first, second = builder.node("XSum", "first", a=1), builder.node("XSum", "second", a=1)
        first.set_input("b", second.out(0))
        second.set_input("b", first.out(0))
        return (second.out(0),)

    adds(monkeypatch, graph)
    prompt = {"1": node("XAdds", value=["2", 0]), "2": node("XNumber", value=5), "3": node("XShown", value=["1", 0])}
    result = host.run(prompt)
    (error,) = result["errors"]["1"]
    assert error["exception_type"].endswith("graph.DependencyCycleError") and error["node_type"] == "XAdds"
    assert error["exception_message"].startswith("Dependency cycle detected")
    if not REAL:  # ComfyUI does not say which nodes
        assert "1.0.0.second (XSum) -> 1.0.0.first (XSum) -> 1.0.0.second" in error["exception_message"]


def test_a_cycle_through_the_node_itself(host, monkeypatch):
    adds(monkeypatch, lambda builder, value, link: (builder.node("XSum", a=["1", 0], b=1).out(0),))
    (error,) = out_of(host, {"1": node("XAdds", value=1)})["errors"]["1"]
    assert error["exception_message"].startswith("Dependency cycle detected")
    adds(monkeypatch, lambda builder, value, link: (builder.node("XNumber", value=3).out(0),))
    assert out_of(host, {"1": node("XAdds", value=1)})["captured"] == {"out": 3}, "the next run is not hurt"


def test_async_nodes_among_added_ones_overlap(host, monkeypatch):
    def graph(builder, value, link):
        first, second = builder.node("XWaits", value=1), builder.node("XWaits", value=2)
        return (builder.node("XSum", a=first.out(0), b=second.out(0)).out(0),)

    adds(monkeypatch, graph)
    assert out_of(host, {"1": node("XAdds", value=5)})["captured"] == {"out": 3}
    assert [kind for kind, *_ in RAN[:4]] == ["start", "start", "end", "end"]


def test_async_nodes_may_add_nodes(host):
    prompt = {"1": node("XDoubledOutputs", value=["2", 0]), "2": node("XSeveral", value=1)}
    assert out_of(host, prompt)["captured"] == {"out": 0}


@only_embedded
def test_async_calls_of_a_node_have_ids_of_their_own(host):
    """In ComfyUI the calls that wait share a prefix, so their nodes take each other's place."""
    prompt = {"1": node("XDoubledOutputs", value=["2", 0]), "2": node("XSeveral", value=4)}
    assert out_of(host, prompt)["captured"] == {"out": [0, 2, 4, 6]}


def test_a_list_of_an_added_node_gives_its_first_entry(host, monkeypatch):
    """Each value fills one place of the result, as the executor puts them one after the other."""
    adds(monkeypatch, lambda builder, value, link: (builder.node("XSeveral", value=3).out(0),))
    assert out_of(host, {"1": node("XAdds", value=5)})["captured"] == {"out": 0}


def test_the_same_ids_in_two_runs_are_told_apart(host, monkeypatch):
    for value in (1, 2, 1):
        adds(monkeypatch, lambda builder, _, link, value=value: (builder.node("XNumber", "n", value=value).out(0),))
        host.fresh()
        assert out_of(host, {"1": node("XAdds", value=0)})["captured"] == {"out": value}


@only_embedded
def test_an_unknown_class_is_named(host, monkeypatch):
    adds(monkeypatch, lambda builder, value, link: (builder.node("NoSuchNode").out(0),))
    (error,) = out_of(host, {"1": node("XAdds", value=5)})["errors"]["1"]
    assert "XAdds added a node of class NoSuchNode, which is not installed" in error["exception_message"]


@only_embedded
def test_a_node_that_forgets_its_result_is_named(host, monkeypatch):
    adds(monkeypatch, lambda builder, value, link: builder.node("XNumber", value=1) and None)
    (error,) = out_of(host, {"1": node("XAdds", value=5)})["errors"]["1"]
    assert 'Adds returned "expand" without "result"' in error["exception_message"]


@only_embedded
def test_an_output_that_an_added_node_does_not_have_is_named(host, monkeypatch):
    adds(monkeypatch, lambda builder, value, link: (builder.node("XNumber", "n", value=1).out(2),))
    (error,) = out_of(host, {"1": node("XAdds", value=5)})["errors"]["1"]
    assert "output 2 of node 1.0.0.n" in error["exception_message"]


# --- GraphBuilder -----------------------------------------------------------------------------------------------------


def test_builder_finds_renames_and_removes():
    graph = GraphBuilder(prefix="p.")
    first, second = graph.node("A", value=1), graph.node("B", "b")
    second.set_input("x", first.out(0))
    second.set_input("y", first.out(1))
    assert graph.lookup_node("b") is second and graph.lookup_node("c") is None and second.get_input("x") == ["p.1", 0]
    graph.replace_node_output("1", 0, ["q", 3])
    graph.replace_node_output("1", 1, None)
    assert graph.finalize()["p.b"] == {"class_type": "B", "inputs": {"x": ["q", 3]}}
    graph.remove_node("1")
    second.set_input("x", None)
    assert graph.finalize() == {"p.b": {"class_type": "B", "inputs": {}}}
    assert graph.node("C").id == "p.2", "an id is not given twice"


def test_prefixes_are_added_to_ids_and_links():
    graph = {"1": node("A", value=1), "2": node("B", x=["1", 0], y=[1, 2])}
    renamed, outputs = add_graph_prefix(graph, [["2", 0], 5], "p.")
    assert renamed == {"p.1": node("A", value=1), "p.2": node("B", x=["p.1", 0], y=[1, 2])}
    assert outputs == (["p.2", 0], 5) and is_link(outputs[0])


# --- what it costs ----------------------------------------------------------------------------------------------------


def wide(builder, value, link):
    """As many nodes as the number says, each linked to the one before."""
    last = builder.node("XNumber", value=0)
    for _ in range(value):
        last = builder.node("XSum", a=last.out(0), b=1)
    return (last.out(0),)


@pytest.mark.slow
@only_embedded
@pytest.mark.parametrize("shape", ["wide", "deep", "calls"])
def test_as_many_added_nodes_more_cost_as_many_lines_more(host, monkeypatch, shape):
    monkeypatch.setattr(logging.getLogger(), "disabled", True)
    adds(monkeypatch, wide)

    def run(count):
        prompt = {
            "wide": {"1": node("XAdds", value=count)},
            "deep": {"1": node("XCountdown", value=count, passed=0)},
            "calls": {"1": node("XDoubled", value=["2", 0]), "2": node("XSeveral", value=count)},
        }[shape]
        prompt["end"] = node("XShown", value=["1", 0])
        host.fresh()
        valid = host.validate(prompt)
        for _ in range(2):
            host.loop.run_until_complete(host.executor.execute_async(prompt, "id", {}, valid[2]))
            assert host.executor.success

    def is_counted(file):
        return file.endswith("execution.py") or "comfy_execution" in file

    few, more, many = (lines_run(lambda count=count: run(count), is_counted) for count in (100, 150, 200))
    assert few > 500 and many - more <= more - few
