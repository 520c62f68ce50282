"""How long results are kept: ComfyUI's four ways. The same tests run in a real ComfyUI."""

from __future__ import annotations

import inspect
import types

import psutil
import pytest
import torch
from comfy_execution.graph_utils import GraphBuilder

from comfyui_api_stubs.tests.which_host import REAL

RAN: list[str] = []  # the names of the nodes, in order of execution
GB = 1024**3


class Source:
    """Gives a number of bytes."""

    @classmethod
    def INPUT_TYPES(cls):
        size = ("INT", {"default": 1, "max": GB})
        return {"required": {"name": ("STRING", {"default": ""})}, "optional": {"size": size}}

    RETURN_TYPES = ("BYTES",)
    FUNCTION = "run"
    CATEGORY = "test"

    def run(self, name, size=1):
        RAN.append(name)
        return (torch.zeros(1).expand(size),)  # it says that it is so large, and holds four bytes


class Join:
    """Takes several, some of them lazily."""

    @classmethod
    def INPUT_TYPES(cls):
        late = ("BYTES", {"lazy": True})
        return {"required": {"name": ("STRING", {})}, "optional": {"a": ("BYTES",), "b": ("BYTES",), "late": late}}

    RETURN_TYPES = ("BYTES",)
    FUNCTION = "run"
    CATEGORY = "test"

    def check_lazy_status(self, name, a=None, b=None, late=None):
        return ["late"] if late is None else []

    def run(self, name, a=None, b=None, late=None):
        RAN.append(name)
        return (a,)


class Plain(Join):
    """Takes several."""

    check_lazy_status = None


class Counts:
    """Counts its own calls."""

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"value": ("INT", {})}}

    RETURN_TYPES = ("INT",)
    FUNCTION = "run"
    CATEGORY = "test"
    calls = 0

    def run(self, value):
        self.calls += 1
        return (self.calls,)


class Links:
    """Adds a node that links to a node of the workflow."""

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"link": ("BYTES", {"rawLink": True})}}

    RETURN_TYPES = ("BYTES",)
    FUNCTION = "run"
    CATEGORY = "test"

    def run(self, link):
        RAN.append("links")
        graph = GraphBuilder()
        return {"result": (graph.node("CPlain", name="added", a=link).out(0),), "expand": graph.finalize()}


@pytest.fixture(autouse=True, scope="module")
def small_nodes(host):
    classes = {"CSource": Source, "CJoin": Join, "CPlain": Plain, "CCounts": Counts, "CLinks": Links}
    host.nodes.NODE_CLASS_MAPPINGS.update(classes)


@pytest.fixture
def keeping(host):
    """Opens an executor that keeps results so; afterwards there is a usual one again."""

    def keep(way, **limits):
        if way not in host.execution.CacheType.__members__:
            pytest.skip(f"this ComfyUI has no {way}")
        host.fresh(way, **limits)
        return lambda prompt, **inputs: names(host, prompt, **inputs)

    RAN.clear()
    yield keep
    host.fresh()


def names(host, prompt, output=("1", 0)):
    """The nodes that run."""
    RAN.clear()
    result = host.run(prompt, capture={"out": list(output)})
    assert result["success"], result["errors"]
    return list(RAN)


def node(class_type, **inputs):
    return {"class_type": class_type, "inputs": inputs}


def source(name, size=1):
    return {"1": node("CSource", name=name, size=size)}


def test_classic_keeps_the_latest_workflow(keeping):
    run = keeping("CLASSIC")
    assert [run(source(name)) for name in "aabba"] == [["a"], [], ["b"], [], ["a"]]


def test_lru_keeps_results_of_earlier_workflows(keeping):
    run = keeping("LRU", lru=20)
    assert [run(source(name)) for name in "abcabc"] == [["a"], ["b"], ["c"], [], [], []]


def test_lru_forgets_what_was_unused_for_longest(keeping):
    """With the capturing node each workflow has two results."""
    run = keeping("LRU", lru=5)
    assert [run(source(name)) for name in "abca"] == [["a"], ["b"], ["c"], []]
    assert [run(source(name)) for name in "dac"] == [["d"], [], ["c"]]


def test_lru_never_forgets_what_the_running_workflow_has(keeping):
    run = keeping("LRU", lru=1)
    prompt = {"1": node("CPlain", name="1", a=["2", 0], b=["3", 0])}
    prompt |= {"2": node("CSource", name="2"), "3": node("CSource", name="3")}
    assert sorted(run(prompt)) == ["1", "2", "3"] and run(prompt) == []


def test_a_result_stays_when_what_led_to_it_was_forgotten(keeping, host):
    """b alone keeps 'b' in use, and the source upstream with it; what else used the source goes."""
    run = keeping("LRU", lru=20)
    prompt = {"1": node("CPlain", name="b", a=["2", 0]), "2": node("CSource", name="a")}
    run(prompt)
    run(source("x"))
    assert run(prompt) == []


def test_none_runs_everything_each_time_and_once_in_a_run(keeping):
    run = keeping("NONE")
    prompt = {"1": node("CPlain", name="1", a=["2", 0], b=["3", 0])}
    prompt |= {"2": node("CPlain", name="2", a=["4", 0]), "3": node("CPlain", name="3", a=["4", 0])}
    prompt |= {"4": node("CSource", name="4")}
    for _ in range(2):
        assert sorted(run(prompt)) == ["1", "2", "3", "4"]


def test_none_runs_equal_nodes_each(keeping):
    run = keeping("NONE")
    prompt = {"1": node("CPlain", name="1", a=["2", 0], b=["3", 0])}
    assert sorted(run({**prompt, "2": node("CSource", name="a"), "3": node("CSource", name="a")})) == ["1", "a", "a"]


def test_none_gives_up_results_that_nothing_waits_for(keeping):
    """The lazy input is asked for when the other node that used it is done: it runs again."""
    run = keeping("NONE")
    prompt = {"1": node("CJoin", name="1", a=["2", 0], late=["3", 0])}
    prompt |= {"2": node("CPlain", name="2", a=["3", 0]), "3": node("CSource", name="3")}
    assert run(prompt) == ["3", "2", "3", "1"]


def test_none_runs_what_added_nodes_link_to_again(keeping):
    run = keeping("NONE")
    prompt = {"1": node("CPlain", name="1", a=["4", 0]), "2": node("CPlain", name="2", a=["3", 0])}
    prompt |= {"3": node("CSource", name="3"), "4": node("CJoin", name="4", a=["2", 0], late=["5", 0])}
    prompt |= {"5": node("CLinks", link=["3", 0])}
    assert run(prompt) == ["3", "2", "3", "links", "3", "added", "4", "1"]


def test_none_makes_a_nodes_object_each_time(keeping, host):
    for way, counted in (("CLASSIC", [1, 2]), ("NONE", [1, 1])):
        keeping(way)
        prompts = [{"1": node("CCounts", value=value)} for value in (5, 6)]
        assert [host.run(prompt, capture={"n": ["1", 0]})["captured"]["n"] for prompt in prompts] == counted


@pytest.fixture
def memory(monkeypatch):
    """Sets how much memory is free."""
    total = 64 * GB
    now = types.SimpleNamespace(total=total, available=total)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: now)
    return now


def test_ram_pressure_keeps_results_while_memory_is_free(keeping, memory):
    run = keeping("RAM_PRESSURE", ram=1.0, ram_inactive=2.0)
    memory.available = 3 * GB
    assert [run(source(name)) for name in "abab"] == [["a"], ["b"], [], []]


def test_ram_pressure_forgets_earlier_workflows_first(host, keeping, memory):
    if "ram_inactive" not in inspect.getsource(host.execution):
        pytest.skip("this ComfyUI does not tell earlier workflows from the latest one")
    run = keeping("RAM_PRESSURE", ram=1.0, ram_inactive=2.0)
    memory.available = 3 * GB
    run(source("a"))
    memory.available = GB * 3 // 2
    assert [run(source(name)) for name in "bb"] == [["b"], []]
    memory.available = 3 * GB
    assert [run(source(name)) for name in "ba"] == [[], ["a"]]


def test_ram_pressure_forgets_large_results_of_the_running_workflow(keeping, memory):
    """What waits has its results all the same."""
    run = keeping("RAM_PRESSURE", ram=1.0, ram_inactive=2.0)
    memory.available = GB // 2
    prompt = {"1": node("CPlain", name="1", a=["2", 0]), "2": node("CSource", name="2", size=GB)}
    assert run(prompt) == ["2", "1"]
    assert "2" in run(prompt) or "1" in run(prompt)


@pytest.mark.skipif(REAL, reason="looks into the embedded host's cache")
def test_ram_pressure_forgets_models_then_the_large_and_the_old(monkeypatch):
    from comfy_execution import caching

    free = [0]
    monkeypatch.setattr(caching.comfy.model_management, "get_free_memory", lambda device: free[0])
    cache = caching.RAMPressureCache(active=1, inactive=10)

    def put(number, value):
        cache.put(number, caching.CacheEntry([[value]], {}))

    cache.begin(set())
    for number, value in enumerate([torch.zeros(9), types.SimpleNamespace(patcher=None), torch.zeros(99), "text"]):
        put(number, value)
    forgotten = []
    forget = cache.forget

    def counted(numbers):
        forgotten.extend(numbers)
        forget(numbers)
        free[0] = len(forgotten) * 5

    monkeypatch.setattr(cache, "forget", counted)
    cache.begin({0})
    cache.node_done()
    assert forgotten == [1, 2] and set(cache.entries) == {0, 3}
