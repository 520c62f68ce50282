"""A workflow that the first version of Graft saved: it opens and runs as it was meant, and what came since has its
default.
"""

import json
from pathlib import Path

import pytest
from graft_nodes.headless import workflow_file
from graft_nodes.headless.embedded import catalogue, workflow

SAVED = Path(__file__).parent / "older" / "train_and_sample-0.1.0.json"
SINCE = {  # inputs that came after the first version, with the values that change nothing
    "EMAMerge": {"algebra": "auto", "rank": 0},
    "TrainStep": {"keep": "best", "snapshot_minutes": 10.0, "tensorboard": False},
    "GraftOptimizer": {"block_rates": "", "fused_backward": False},
}


@pytest.fixture(scope="module")
def look_up(host):
    return catalogue(host.nodes.NODE_CLASS_MAPPINGS, host.nodes.NODE_DISPLAY_NAME_MAPPINGS)


def test_an_older_workflow_opens_with_its_values_and_the_defaults_of_what_came_since(look_up):
    graph = workflow_file.read(str(SAVED)).graph(look_up)
    assert workflow.check(graph, look_up) == []
    seen = set()
    for node in json.loads(SAVED.read_text(encoding="utf-8"))["nodes"]:
        if node["type"] not in SINCE:
            continue
        seen.add(node["type"])
        given = graph[str(node["id"])]["inputs"]
        named = [slot["name"] for slot in node["inputs"] if "widget" in slot]
        assert {name: given[name] for name in named} == dict(zip(named, node["widgets_values"], strict=True))
        assert {name: given[name] for name in SINCE[node["type"]]} == SINCE[node["type"]]
    assert seen == set(SINCE)


def test_a_node_that_this_graft_has_not_is_said(look_up):
    graph = workflow_file.read(str(SAVED)).graph(look_up)
    (start,) = (node for node in graph.values() if node["class_type"] == "GraftTrainStart")
    start["class_type"] = "GraftTrainBegin"
    texts = [str(problem) for problem in workflow.check(graph, look_up)]
    assert any("GraftTrainBegin" in text for text in texts), texts


def test_a_choice_that_this_graft_has_not_is_said_with_those_it_has(look_up, host):
    graph = workflow_file.read(str(SAVED)).graph(look_up)
    (optimizer,) = (key for key, node in graph.items() if node["class_type"] == "GraftOptimizer")
    graph[optimizer]["inputs"]["optimizer"] = "adam-of-old"
    result = host.run(graph)
    assert not result["valid"]
    for error in result["errors"][optimizer]:
        assert "adam-of-old" in error["details"] and "adamw8bit" in error["details"]
