"""A workflow that the first version of Graft saved: it opens and runs as it was meant, and what came since has its
default.
"""

import json
from pathlib import Path

import pytest
from graft_nodes.headless import schema, workflow

SAVED = Path(__file__).parent / "older" / "train_and_sample-0.1.0.json"
SINCE = {  # inputs that came after the first version, with the values that change nothing
    "EMAMerge": {"algebra": "auto", "rank": 0},
    "TrainStep": {"keep": "best", "snapshot_minutes": 10.0, "tensorboard": False},
    "GraftOptimizer": {"block_rates": "", "fused_backward": False},
}


@pytest.fixture(scope="module")
def look_up(host):
    return schema.catalogue(host.nodes.NODE_CLASS_MAPPINGS, host.nodes.NODE_DISPLAY_NAME_MAPPINGS)


def test_an_older_workflow_opens_with_its_values_and_the_defaults_of_what_came_since(look_up):
    graph = workflow.read(str(SAVED)).graph(look_up)
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


def test_what_an_older_or_newer_workflow_has_and_this_graft_has_not_is_said(look_up):
    graph = workflow.read(str(SAVED)).graph(look_up)
    (optimizer,) = (node for node in graph.values() if node["class_type"] == "GraftOptimizer")
    optimizer["inputs"]["optimizer"] = "adam-of-old"
    (start,) = (node for node in graph.values() if node["class_type"] == "GraftTrainStart")
    start["class_type"] = "GraftTrainBegin"
    texts = [str(problem) for problem in workflow.check(graph, look_up)]
    assert any("GraftTrainBegin" in text for text in texts), texts
    assert any("adam-of-old" in text and "adamw8bit" in text for text in texts), texts
