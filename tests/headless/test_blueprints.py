"""The subgraph blueprints: each is a whole workflow once its inputs are wired, and does what it says."""

import json
import shutil
from pathlib import Path

import pytest
from graft_nodes import host as wall
from graft_nodes.headless.embedded import catalogue, workflow

ROOT = Path(__file__).resolve().parents[2]
BLUEPRINTS = sorted((ROOT / "subgraphs").glob("*.json"))
DEMO = {"MODEL": 0, "CLIP": 1, "VAE": 2}  # GraftDemo's outputs


def wired(path, **widgets):
    """The blueprint as the editor saves it once it stands in a graph: GraftDemo in its sockets, these values in its
    widgets.
    """
    data = json.loads(path.read_text(encoding="utf-8"))
    (node,) = data["nodes"]
    shown = [slot["name"] for slot in node["inputs"] if "widget" in slot]
    values = {**dict(zip(shown, node["widgets_values"], strict=True)), **widgets}
    assert set(values) == set(shown)
    node["widgets_values"] = [values[name] for name in shown]
    node.pop("widgets_values_named", None)
    for number, slot in enumerate(node["inputs"]):
        if slot["type"] in DEMO:
            slot["link"] = 100 + number
            data["links"].append([100 + number, 50, DEMO[slot["type"]], node["id"], number, slot["type"]])
    outputs = [
        {"name": kind, "type": kind, "links": [link[0] for link in data["links"] if link[5] == kind]} for kind in DEMO
    ]
    data["nodes"].append(
        {"id": 50, "type": "GraftDemo", "pos": [0, 0], "size": [200, 80], "mode": 0, "inputs": [], "outputs": outputs}
    )
    return data


def of(graph, kind):
    """(id, inputs) of the only node of a type."""
    ((found, node),) = ((found, node) for found, node in graph.items() if node["class_type"] == kind)
    return found, node["inputs"]


@pytest.fixture(scope="module")
def graph_of(host):
    """What makes an API graph of a blueprint's workflow; nothing in it may be wrong."""
    look_up = catalogue(host.nodes.NODE_CLASS_MAPPINGS, host.nodes.NODE_DISPLAY_NAME_MAPPINGS)

    def read(data):
        graph = workflow.parse(data).graph(look_up)
        return graph, [str(problem) for problem in workflow.check(graph, look_up)]

    return read


@pytest.mark.parametrize("path", BLUEPRINTS, ids=lambda path: path.stem)
def test_a_blueprint_says_what_it_does_and_has_no_missing_node(host, path):
    data = json.loads(path.read_text(encoding="utf-8"))
    (inner,) = data["definitions"]["subgraphs"]
    assert data["nodes"][0]["title"] == inner["name"] == path.stem
    assert inner["extra"]["BlueprintDescription"].endswith(".")
    assert data["extra"] == inner["extra"], "front end 1.58 reads the workflow's own, older ones the subgraph's"
    assert len(data["extra"]["BlueprintSearchAliases"]) > 3
    assert not {node["type"] for node in inner["nodes"]} - set(host.nodes.NODE_CLASS_MAPPINGS)


PLAIN = ("INT", "FLOAT", "BOOLEAN", "STRING", "COMBO")  # inputs that the editor draws as widgets


def sockets(node_class):
    """The names of a node's inputs that are sockets only, in the editor's order."""
    found = []
    for group in ("required", "optional"):
        for name, (kind, *options) in node_class.INPUT_TYPES().get(group, {}).items():
            drawn = kind in PLAIN or isinstance(kind, list)
            if not drawn or (options and options[0].get("forceInput")):
                found.append(name)
    return found


@pytest.mark.parametrize("path", BLUEPRINTS, ids=lambda path: path.stem)
def test_a_blueprint_has_every_socket_of_its_nodes_at_its_place(host, path):
    """Front end 1.27 finds the end of a link in a subgraph by the number of the input, and not by its name."""
    (inner,) = json.loads(path.read_text(encoding="utf-8"))["definitions"]["subgraphs"]
    nodes = {node["id"]: node for node in inner["nodes"]}
    for node in nodes.values():
        listed = [slot["name"] for slot in node["inputs"] if "widget" not in slot]
        assert listed == sockets(host.nodes.NODE_CLASS_MAPPINGS[node["type"]]), node["type"]
    for link in inner["links"]:
        if link["target_id"] in nodes:
            assert nodes[link["target_id"]]["inputs"][link["target_slot"]]["link"] == link["id"]


@pytest.mark.parametrize("path", BLUEPRINTS, ids=lambda path: path.stem)
def test_a_blueprint_calls_its_settings_as_the_nodes_do(path):
    """The front end translates no name on a subgraph's own node: without a label it shows the input's id."""
    labels = json.loads((ROOT / "locales" / "en" / "nodeDefs.json").read_text(encoding="utf-8"))
    data = json.loads(path.read_text(encoding="utf-8"))
    (inner,) = data["definitions"]["subgraphs"]
    nodes, links = ({one["id"]: one for one in inner[name]} for name in ("nodes", "links"))
    for slot, outside in zip(inner["inputs"], data["nodes"][0]["inputs"], strict=True):
        link = links[slot["linkIds"][0]]
        node = nodes[link["target_id"]]
        name = node["inputs"][link["target_slot"]]["name"]
        own = {"text": "prompt"} if node["type"] == "CLIPTextEncode" else {}  # ComfyUI's own node calls it text
        label = own.get(name) or labels[node["type"]]["inputs"][name]["name"]
        assert slot.get("label", slot["name"]) == outside.get("label", outside["name"]) == label


def test_the_training_blueprint_trains_and_saves_a_lora(host, graph_of):
    folder = Path(host.input) / "blueprint"
    folder.mkdir()
    for path in sorted((ROOT / "demo" / "concept").iterdir())[:16]:
        shutil.copy(path, folder)
    (path,) = (path for path in BLUEPRINTS if path.stem.startswith("Train"))
    given = {
        "folder": "blueprint",
        "resolution": 64,
        "rank": 2,
        "steps": 2,
        "batch_size": 2,
        "run": "whole",
        "prefix": "loras/whole",
    }
    graph, problems = graph_of(wired(path, **given))
    assert problems == []
    for kind, names in (
        ("GraftDataset", ("folder", "resolution")),
        ("GraftAdapter", ("rank",)),
        ("GraftOptimizer", ("batch_size",)),
        ("TrainStep", ("steps",)),
        ("GraftTrainStart", ("run",)),
        ("GraftSaveLoRA", ("prefix",)),
    ):
        assert {name: of(graph, kind)[1][name] for name in names} == {name: given[name] for name in names}
    result = host.run(
        graph, capture={"model": [of(graph, "EMAMerge")[0], 0], "chart": [of(graph, "GraftLossPlot")[0], 0]}
    )
    assert result["success"], result["errors"]
    assert list((Path(host.output) / "loras").glob("whole*.safetensors")), "the LoRA is saved where the prefix says"
    assert result["captured"]["chart"].shape[-1] == 3
    assert wall.lora_stacks.list_patches(result["captured"]["model"]), "the average is on the model that comes out"


def test_the_stack_blueprint_puts_todo_and_the_stack_on_the_model(host, graph_of):
    (path,) = (path for path in BLUEPRINTS if path.stem.startswith("LoRA stack"))
    graph, _ = graph_of(wired(path, factor=4))
    patch, inputs = of(graph, "LoRAStackPatch")
    todo, settings = of(graph, "ApplyToDo")
    assert settings["factor"] == 4 and inputs["model"] == [todo, 0] and inputs["mode"] == "auto"
    result = host.run(graph, capture={"model": [patch, 0], "clip": [patch, 1]})
    assert result["success"], result["errors"]
    assert wall.token_downsampling.todo_of(result["captured"]["model"]).settings.factors == (4.0,)
    assert result["captured"]["clip"] is not None
