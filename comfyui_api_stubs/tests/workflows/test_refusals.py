"""Everything that the conversion of an editor workflow refuses: each refusal names its node, its input where it has
one, and what to do about it. A refusal that no case here meets fails the last test.
"""

import ast
import copy
import sys
from pathlib import Path

import pytest

from comfyui_api_stubs import packs
from comfyui_api_stubs.tests.workflows.recorded import read
from comfyui_api_stubs.tests.workflows.test_editor_json import GROWING, of_classes
from comfyui_api_stubs.tests.workflows.test_group_nodes import (
    CORE,
    REFUSED,
    SAMPLING,
    to_a_link_from_a_bypassed_one,
    to_a_subgraph,
    to_one_in_another,
)
from comfyui_api_stubs.tests.workflows.test_group_nodes import LOOK_UP as OF_ODD_NODES
from comfyui_api_stubs.workflows import editor_file, editor_json, group_nodes, workflow
from comfyui_api_stubs.workflows.problem import WorkflowError

SAVE, LINK = "open the workflow in the editor and save it again", "link it again in the editor, or remove its link"
CONVERT = "open the workflow in the editor, convert the group node to nodes there, and save it"
PACK = "load the pack that brings it (--pack DIR), or name a ComfyUI that has it (--comfyui DIR)"
EXPORT = "save the workflow with 'Export (API)' and run that file"
OUT = "take it out of itself in the editor and save the workflow"
LOOK_UP = of_classes(
    Sink={"required": {"text": ("STRING", {"dynamicPrompts": True})}, "optional": {"image": ("IMAGE",)}},
    Grows={"required": {"texts": ("COMFY_AUTOGROW_V3", GROWING)}},
    Slots={"required": {"slot": ("COMFY_DYNAMICSLOT_V3", {})}},
)


def node(kind="Sink", number=1, **more):
    return {"id": number, "type": kind, **more}


def slot(name, link):
    return {"name": name, "type": "*", "link": link}


def one(*nodes, links=(), **more):
    return {"nodes": list(nodes), "links": list(links), **more}


def subgraph(*nodes, links=(), **more):
    return {"subgraphs": [{"id": "s", "name": "s", "nodes": list(nodes), "links": list(links), **more}]}


def inside(*nodes, links=(), properties=None, **more):
    """A workflow of one subgraph node."""
    host = node("s", 9, properties=properties or {})
    return one(host, definitions=subgraph(*nodes, links=links, **more))


CIRCLE = one(
    node(inputs=[slot("image", 1)]),
    node("Reroute", 2, inputs=[slot("", 2)]),
    node("Reroute", 3, inputs=[slot("", 3)]),
    links=[[1, 2, 0, 1, 1, "*"], [2, 3, 0, 2, 0, "*"], [3, 2, 0, 3, 0, "*"]],
)
PASSES_ON = inside(links=[[1, -10, 7, -20, 0, "*"]], outputs=[{"name": "o", "type": "*"}])
PASSES_ON["nodes"].append(node("Sink", 2, inputs=[slot("image", 5)]))
PASSES_ON["links"].append([5, 9, 0, 2, 1, "*"])


def of_set(name):
    """A Set node of this name and a Get node of 'a'."""
    get = node("GetNode", 3, widgets_values=["a"])
    nodes = [node(inputs=[slot("image", 1)]), node("SetNode", 2, widgets_values=[name]), get]
    return one(*nodes, links=[[1, 3, 0, 1, 1, "*"]])


def around_a_get():
    """Two Set nodes of one name around the subgraph of a Get node."""
    get = node("GetNode", 5, widgets_values=["a"])
    data = inside(get, node("Sink", 6, inputs=[slot("image", 1)]), links=[[1, 5, 0, 6, 1, "*"]])
    data["nodes"] += [node("SetNode", number, widgets_values=["a"]) for number in (2, 3)]
    return data


# (workflow, its node, its input, words of the message, what to do); node and input are "" where there is none
OF_FILES = [
    (one(definitions=[]), "", "", "'definitions' is not", SAVE),
    (one(definitions=subgraph(inputs=[3])), "", "", "subgraph s: 'inputs' holds an entry that is not an object", SAVE),
    (one(definitions=subgraph(inputs={"a": 1})), "", "", "subgraph s: 'inputs' is not a list", SAVE),
    (one(links=[[1, 2]]), "", "", "not a link: [1, 2]", SAVE),
    (one({"id": 1}), "", "", "not a node (it needs an id and a type)", SAVE),
    (one(node(mode="on")), "1", "", "'mode' is not a number", SAVE),
    (one(node(properties=[1])), "1", "", "'properties' is not an object", SAVE),
    (one(node(inputs={"a": 1})), "1", "", "'inputs' is not a list of slots", SAVE),
    (one(node(inputs=[slot("image", 5)])), "1", "image", "link 5 is not in the file", LINK),
    (one(node(inputs=[slot("image", 5)]), links=[[5, 8, 0, 1, 1, "*"]]), "1", "image", "linked to node 8", LINK),
    (CIRCLE, "2", "", "the links make a cycle through reroutes or bypassed nodes", "remove one of them in the editor"),
    (one(node("Anything Everywhere")), "1", "", "works only in the browser", EXPORT),
    (of_set("b"), "3", "", "no Set node is named 'a' (the Set nodes here: b)", "choose another name in the editor"),
    (around_a_get(), "9:5", "", "2 Set nodes around this subgraph are named 'a' (ids 2, 3)", "rename one of them"),
    (inside(node("s", 5)), "9:5", "", "the subgraph contains itself", OUT),
    (inside(properties={"proxyWidgets": "{"}), "9", "", "'proxyWidgets' is not JSON", SAVE),
    (inside(properties={"proxyWidgets": {"a": 1}}), "9", "", "'proxyWidgets' is not a list", SAVE),
    (
        inside(node("Sink", 5, inputs=[slot("image", 1)]), links=[[1, -10, 7, 5, 1, "*"]]),
        "9:5",
        "image",
        "linked to input 7 of the subgraph, which has none there",
        LINK,
    ),
    (PASSES_ON, "9", "", "linked to input 7 of the subgraph, which has none there", LINK),
    (one(node(widgets_values=["{" * 200])), "1", "text", "nested more than 100 deep", "nest them less deep"),
    (one(node("Grows")), "1", "texts", "its inputs grow and hold values", EXPORT),
    (one(node("Slots")), "1", "slot", "inputs of type COMFY_DYNAMICSLOT_V3", EXPORT),
]


def changed(change):
    data = copy.deepcopy(SAMPLING)
    change(data, data["nodes"][2], data["extra"]["groupNodes"]["sampling"])
    return data


def recorded(name):
    return read(str(REFUSED / f"{name}.editor.json")).data


OF_SAMPLING = [
    (changed(lambda data, node, group: data["extra"].clear()), "3", "", "the file has no definition of", CONVERT),
    (changed(lambda data, node, group: group["nodes"].append({})), "3", "", "an entry that is not a node", CONVERT),
    (changed(lambda data, node, group: group["nodes"][0].update(inputs=3)), "3", "", "'inputs' is not a list", CONVERT),
    (changed(lambda data, node, group: group["links"].append([1])), "3", "", "an entry that is not a link", CONVERT),
    (changed(lambda data, node, group: group.update(external={"a": 1})), "3", "", "'external' of its", CONVERT),
    (changed(lambda data, node, group: group["nodes"].append({"type": "Lost"})), "3", "", "does not have 'Lost'", PACK),
    (changed(lambda data, node, group: group["links"].append([1, 7, 2, 0])), "3", "", "leads to nothing", CONVERT),
    (changed(lambda data, node, group: node["inputs"][0].update(name="gone")), "3", "gone", "no such input", CONVERT),
    (changed(to_one_in_another), "3", "", "the group node 'workflow>inner' is inside it", CONVERT),
    (changed(to_a_subgraph), "20", "", "a group node inside a subgraph cannot be read", CONVERT),
    (changed(to_a_link_from_a_bypassed_one), "3", "start", "linked to the bypassed group node 9", "turn that one on"),
]
OF_RECORDED = [
    (recorded("primitive"), "3", "", "a Primitive inside it", CONVERT),
    (recorded("reroute_outside"), "3", "", "a Reroute inside takes its link from outside", CONVERT),
    (recorded("choice"), "3", "resize_type", "it grows or changes", CONVERT),
    (recorded("other_order"), "3", "", "has other inputs in this ComfyUI", CONVERT),
    (recorded("converted"), "3", "steps", "front ends lose the link or differ in where it goes", CONVERT),
    (recorded("unsorted_inside"), "3", "", "has no clear place", CONVERT),
]
CASES = [(case, LOOK_UP) for case in OF_FILES] + [(case, OF_ODD_NODES) for case in OF_SAMPLING]
CASES += [(case, CORE) for case in OF_RECORDED]


def problems_of(data, look_up):
    with pytest.raises(WorkflowError) as error:
        workflow.parse(copy.deepcopy(data)).graph(look_up)
    return error.value.problems


@pytest.mark.parametrize(("case", "look_up"), CASES, ids=[case[3][:40] for case, _ in CASES])
def test_a_refusal_names_its_node_its_input_and_what_to_do(case, look_up):
    data, where, name, said, remedy = case
    problems = problems_of(data, look_up)
    (found,) = [one for one in problems if said in one.message][:1] or [None]
    assert found is not None, [str(one) for one in problems]
    assert (found.node, found.input) == (where, name)
    assert remedy in found.message
    assert found.as_json().get("input", "") == name
    for other in problems:  # what is refused beside it says what to do too
        assert any(words in other.message for words in (SAVE, LINK, CONVERT, PACK, EXPORT, OUT, remedy)), str(other)


MODULES = (editor_file, editor_json, group_nodes)
MAKERS = ("Problem", "_at", "_problem")


def refusals(module):
    """The lines of a module that make a refusal."""
    lines = set()
    for entry in ast.walk(ast.parse(Path(module.__file__).read_text(encoding="utf-8"))):
        if isinstance(entry, ast.Call):
            named = getattr(entry.func, "id", None) in MAKERS
            listed = getattr(entry.func, "attr", "") == "append" and ast.unparse(entry.func) == "errors.append"
            if named or listed:
                lines.add(entry.lineno)
        elif isinstance(entry, ast.Yield) and "; " in ast.unparse(entry):
            lines.add(entry.lineno)
    return lines


def test_every_refusal_of_the_conversion_has_a_case():
    wanted = {module.__file__: refusals(module) for module in MODULES}
    assert sum(map(len, wanted.values())) > 30
    met = set()

    def lines(frame, event, argument):
        met.add((frame.f_code.co_filename, frame.f_lineno))
        return lines

    def calls(frame, event, argument):
        return lines if frame.f_code.co_filename in wanted else None

    previous = sys.gettrace()
    sys.settrace(calls)
    try:
        for case, look_up in CASES:
            problems_of(case[0], look_up)
    finally:
        sys.settrace(previous)
    missed = [(Path(file).name, line) for file, found in wanted.items() for line in found if (file, line) not in met]
    assert not missed


def test_a_pack_s_workflow_that_is_broken_fails_and_one_that_only_a_browser_reads_is_skipped():
    class Grows:
        RETURN_TYPES = ()
        INPUT_TYPES = classmethod(lambda cls: {"required": {"texts": ("COMFY_AUTOGROW_V3", GROWING)}})

    broken = one(node("Lost", inputs=[slot("image", 5)]))
    for data, expected in (
        (one(node("Grows")), packs.CannotRun),
        (broken, packs.Failed),
        (one({"id": 1}), packs.Failed),
        (one(node("Grows"), *broken["nodes"]), packs.Failed),
        (recorded("primitive"), packs.CannotRun),
    ):
        with pytest.raises(expected):
            packs.converted(data, Path("w.json"), {"Grows": Grows}, {})
    unknown = one(node("Gone", 2), node("Lost", 3, mode=2), node("Lost", 4, mode=4))
    sent = packs.converted(unknown, Path("w.json"), {"Grows": Grows}, {})
    assert [entry["class_type"] for entry in sent.values()] == ["Gone"]  # muted and bypassed ones are not sent
