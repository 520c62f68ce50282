"""Reading workflow files, --set, and the check that lists every error at once."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from comfyui_api_stubs.workflows import workflow
from comfyui_api_stubs.workflows.schema import catalogue


def _odd_nodes():
    spec = importlib.util.spec_from_file_location("odd_nodes", Path(__file__).parent / "odd_nodes.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["odd_nodes"] = module
    spec.loader.exec_module(module)
    return module


ODD = _odd_nodes()
LOOK_UP = catalogue(ODD.NODE_CLASS_MAPPINGS, ODD.NODE_DISPLAY_NAME_MAPPINGS)


def source(**inputs):
    return {"class_type": "OddSource", "inputs": {"text": "t", "number": 1, **inputs}}


def sink(**inputs):
    return {"class_type": "OddSink", "inputs": {"name": "out", **inputs}}


def messages(problems):
    return sorted((problem.node, problem.input, problem.message) for problem in problems)


GRAPH_OF_A_WRAPPER = {"1": {"class_type": "OddSource", "inputs": {}}}


def check(graph):
    return workflow.check(workflow.parse(graph).graph(LOOK_UP), LOOK_UP)


class Id(str):
    """A node id that counts how often it is compared with another: what looking through a list does."""

    compared = 0

    def __eq__(self, other):
        Id.compared += self is not other
        return str.__eq__(self, other)

    __hash__ = str.__hash__


def chained(count, closed):
    """A chain of so many nodes and an output; `closed`: the first takes what the last gives."""
    ids = [Id(f"n{number}") for number in range(count)]
    graph = {}
    for number, node_id in enumerate(ids):
        before = [ids[number - 1], 0] if number or closed else "t"
        graph[node_id] = {"class_type": "OddSource", "inputs": {"text": before, "number": 1}}
    graph[Id("end")] = {"class_type": "OddSink", "inputs": {"name": "out", "value": [ids[-1], 0]}}
    return graph


@pytest.mark.parametrize("closed", [False, True])
def test_the_check_of_a_chain_looks_through_no_list(closed):
    compared = []
    for count in (500, 1000):
        Id.compared = 0
        graph = chained(count, closed)
        problems = workflow.check(graph, LOOK_UP)
        assert len(workflow.cycles(graph)) == closed == any("cycle" in problem.message for problem in problems)
        compared.append(Id.compared)
    assert compared[1] <= 2 * compared[0] + 2


def test_formats_are_told_apart():
    graph = {"1": source()}
    assert not workflow.parse(graph).is_editor
    assert workflow.parse({"prompt": graph, "client_id": "x"}).data == graph
    assert workflow.parse({"nodes": [], "links": []}).is_editor
    assert workflow.parse({"nodes": sink()}).graph(LOOK_UP)["nodes"]["class_type"] == "OddSink", (
        "a node may have any id"
    )


def test_a_valid_graph_has_no_problems():
    assert (
        check(
            {"1": source(), "2": sink(text=["1", 0], anything=["1", 3], image=["1", 3]), "3": source(number=["1", 1])}
        )
        == []
    )


def test_links_may_name_nodes_by_number():
    assert workflow.parse({"1": source(), "2": sink(text=[1, 0])}).graph(LOOK_UP)["2"]["inputs"]["text"] == ["1", 0]


def test_every_error_is_listed_at_once():
    found = check(
        {
            "1": source(number=101),
            "2": {"class_type": "Unknown", "inputs": {"x": ["1", 0]}, "_meta": {"title": "mine"}},
            "3": {"inputs": {}},
            "4": sink(text=["1", 2], image=["1", 9], latent=["77", 0], anything=["2", 0]),
            "5": {"class_type": "OddPass", "inputs": {"image": ["6", 1], "latent": ["6", 0], "amount": "much"}},
            "6": {"class_type": "OddPass", "inputs": {"image": ["5", 1], "latent": ["5", 0], "amount": 1}},
            "7": sink(latent=["6", 0]),
            "8": {"class_type": "OddSink", "inputs": {"text": [1, 2, 3]}},
            "9": {
                "class_type": "OddWidgets",
                "inputs": {
                    "seed": 1,
                    "latent": ["1", 2],
                    "plain_seed": 1,
                    "ratio": -1,
                    "flag": "false",
                    "text": "",
                    "choice": "four",
                    "forced": ["1", 0],
                    "turning": "x",
                },
            },
            "10": sink(text=["9", 0]),
        }
    )
    assert [(node, name) for node, name, _ in messages(found)] == [
        ("1", "number"),
        ("2", ""),
        ("3", ""),
        ("4", "image"),
        ("4", "latent"),
        ("4", "text"),
        ("5", ""),
        ("5", "amount"),
        ("8", "name"),
        ("8", "text"),
        ("9", "choice"),
        ("9", "flag"),
        ("9", "ratio"),
    ]
    text = "\n".join(map(str, found))
    for expected in (
        "node 1 \"OddSource\" (OddSource), input 'number': 101 is above the maximum 100",
        "node 2 \"mine\" (Unknown): this host has no node 'Unknown'",
        "has no class_type",
        "expected STRING, got LATENT from output 2 of node 1",
        'linked to output 9 of node 1 "OddSource", which has 4 outputs',
        "linked to node 77, which is not in the workflow",
        'expected FLOAT, got "much"',
        "the links make a cycle",
        "required input is missing (type STRING)",
        "'four' is not in the list [one, two, three]",
        'expected BOOLEAN (true or false), got "false"',
        "-1.0 is below the minimum 0.0",
    ):
        assert expected in text, expected


@pytest.mark.parametrize("graph", [GRAPH_OF_A_WRAPPER, {"nodes": [{"id": 1, "type": "OddSource"}], "links": []}])
@pytest.mark.parametrize(
    "wrapped",
    [
        lambda graph: {"prompt": graph, "client_id": "x", "extra_data": {}},
        lambda graph: {"workflow": graph},
        lambda graph: {"input": {"workflow": graph, "images": [{"name": "a.png", "image": ""}]}},
        lambda graph: {"input": {"prompt": graph}, "webhook": "x"},
        lambda graph: {"input": graph},
        lambda graph: {"prompt": {}, "workflow": graph},
    ],
)
def test_what_servers_are_sent_is_unwrapped(wrapped, graph):
    document = workflow.parse(wrapped(graph))
    assert document.data == graph and document.is_editor == ("nodes" in graph)


def test_nodes_called_like_a_wrapper_stay_nodes():
    graph = {"input": source(), "prompt": sink(text=["input", 0]), "workflow": source()}
    assert workflow.parse(graph).data == graph


def test_limits_are_allowed_themselves():
    for number in (0, 100):
        assert messages(check({"1": source(number=number), "2": sink(text=["1", 0])})) == []


def test_what_no_output_needs_is_not_checked_but_unknown_nodes_are():
    assert messages(check({"1": source(number=-5), "2": sink()})) == []
    assert [problem.node for problem in check({"1": {"class_type": "Nothing", "inputs": {}}, "2": sink()})] == ["1"]


def test_without_an_output_node_that_is_said_beside_the_other_errors():
    found = check({"1": source(number=-5)})
    assert "no output node" in str(found[0]) and "below the minimum" in str(found[1])


@pytest.mark.parametrize("size", [1, 2, 5])
def test_cycles_of_any_length(size):
    graph = {str(k): {"class_type": "OddPass", "inputs": {"image": [str((k + 1) % size), 1]}} for k in range(size)}
    (path,) = workflow.cycles(graph)
    assert path[0] == path[-1] and sorted(path[:-1]) == sorted(graph)


def test_a_diamond_is_no_cycle():
    graph = {
        "1": source(),
        "2": source(text=["1", 0]),
        "3": source(text=["1", 0]),
        "4": sink(text=["2", 0], anything=["3", 0]),
    }
    assert workflow.cycles(graph) == []


def test_a_long_chain_is_walked_without_recursion():
    graph = {str(k): source(text=[str(k + 1), 0]) for k in range(5000)} | {"5000": source()}
    assert workflow.cycles(graph) == [] and len(workflow.reachable(graph, ["0"])) == 5001


def test_the_copy_for_the_host_is_free_of_what_breaks_its_validation():
    graph = {
        "1": source(),
        "2": sink(text=["9", 0], anything=["3", 0], image=["1", 7]),
        "3": {"class_type": "Nope", "inputs": {}},
        "4": {"class_type": "OddPass", "inputs": {"latent": ["4", 0]}},
    }
    copy, cut = workflow.without_broken_parts(graph, LOOK_UP)
    assert set(copy) == {"1", "2", "4"} and cut == {"2", "4"}
    assert copy["2"]["inputs"] == {"name": "out"} and copy["4"]["inputs"] == {}
    assert graph["2"]["inputs"]["text"] == ["9", 0], "the given graph is not changed"


def named():
    return {
        "1": {**source(), "_meta": {"title": "the source"}},
        "2": {**sink(text=["1", 0]), "_meta": {"title": "twice"}},
        "3": {**sink(), "_meta": {"title": "twice"}},
        "4:5": {"class_type": "OddWidgets", "inputs": {}, "_meta": {"title": "v1.5 widgets"}},
    }


@pytest.mark.parametrize(
    ("assignment", "node", "name", "value"),
    [
        ("1.number=7", "1", "number", 7),
        ("the source.number=7", "1", "number", 7),
        ("1.text=hello", "1", "text", "hello"),
        ("1.text=12", "1", "text", "12"),
        ('1.text="12"', "1", "text", "12"),
        ("1.text=a=b", "1", "text", "a=b"),
        ("1.text=", "1", "text", ""),
        ('1.text={"version": 1}', "1", "text", '{"version": 1}'),
        ("2.text=replaces the link", "2", "text", "replaces the link"),
        ("4:5.ratio=1", "4:5", "ratio", 1),
        ("4:5.flag=true", "4:5", "flag", True),
        ("4:5.choice=one", "4:5", "choice", "one"),
        ('4:5.choice="one"', "4:5", "choice", "one"),
        ("v1.5 widgets.newer=p", "4:5", "newer", "p"),
        ("2.anything=3", "2", "anything", 3),
    ],
)
def test_set_changes_an_input(assignment, node, name, value):
    graph = named()
    changed, problems = workflow.set_values(graph, [assignment], LOOK_UP)
    assert (
        problems == [] and changed[node]["inputs"][name] == value and type(changed[node]["inputs"][name]) is type(value)
    )
    assert graph == named(), "the given graph is not changed"


def test_of_many_nodes_those_with_a_similar_title_come_first_and_the_rest_is_counted():
    many = {str(index): {"class_type": "One", "inputs": {}, "_meta": {"title": f"node {index}"}} for index in range(40)}
    many["77"] = {"class_type": "One", "inputs": {}, "_meta": {"title": "Train 100 steps"}}
    _, (problem,) = workflow.set_values(many, ["Train 100 step.steps=5"], LOOK_UP)
    assert 'the nodes are 77 "Train 100 steps", 0 "node 0", 1 ' in problem.message
    assert problem.message.endswith('18 "node 18", … 41 in all')


def test_set_refuses_what_it_cannot_apply_and_says_what_there_is():
    wrong = {
        "nonsense": "expected NODE.INPUT=VALUE",
        "1=2": "expected NODE.INPUT=VALUE",
        "9.text=x": 'no node has the id or title \'9\'; the nodes are 1 "the source", 2 "twice"',
        "twice.name=x": "2 nodes have the title 'twice' (ids 2, 3); use the id",
        "1.words=x": "has no input 'words'; its inputs are text, number",
        "1.number=many": "expects INT, got 'many'",
        "1.number=1.5": "expects INT, got '1.5'",
        "1.number=true": "expects INT, got 'true'",
        "4:5.flag=maybe": "expects BOOLEAN, got 'maybe'",
        "4:5.latent=3": "takes a link of type LATENT",
        "4:5.choice=[1, 2]": "expects COMBO",
    }
    _, problems = workflow.set_values(named(), wrong, LOOK_UP)
    assert len(problems) == len(wrong)
    for problem, expected in zip(problems, wrong.values(), strict=True):
        assert expected in str(problem)


def test_set_values_are_checked_against_limits_like_any_other():
    graph, problems = workflow.set_values({"1": source(), "2": sink(text=["1", 0])}, ["1.number=1000"], LOOK_UP)
    assert problems == [] and "above the maximum" in str(workflow.check(graph, LOOK_UP)[0])


def test_problems_as_json_leave_out_what_is_empty():
    (problem,) = check({"1": source(number=-1), "2": sink(text=["1", 0])})
    assert json.loads(json.dumps(problem.as_json())) == {
        "node": "1",
        "title": "OddSource",
        "class": "OddSource",
        "input": "number",
        "message": "-1 is below the minimum 0",
    }
