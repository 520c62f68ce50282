"""Few settings stand open on a node: the editor folds the advanced ones away, on every host."""

import inspect
import json
import re

import pytest
from graft_nodes.nodes import NODES
from graft_nodes.patches.models.family import Missing
from graft_nodes.patches.models.registry import FAMILIES, token_routing
from graft_nodes.patches.models.token_layout import TokenLayout, UNetLayout
from graft_nodes.settings.declaration import settings_of
from graft_nodes.tests.nodes import write_inputs

WIDGETS = ("INT", "FLOAT", "STRING", "BOOLEAN", "COMBO")
MOST_OPEN = 7
IDS = [node.define_schema().node_id for node in NODES]
# Blueprints show these on their own node; an advanced one would be folded away there.
IN_BLUEPRINTS = {
    ("GraftTrainStart", "seed"),
    ("GraftTrainStart", "run"),
    ("GraftDataset", "folder"),
    ("GraftDataset", "resolution"),
    ("GraftAdapter", "rank"),
    ("GraftOptimizer", "learning_rate"),
    ("GraftOptimizer", "batch_size"),
    ("TrainStep", "steps"),
    ("GraftSaveLoRA", "prefix"),
    ("ApplyToDo", "factor"),
    ("LoRAStackPatch", "mode"),
}

# What people type into the node search, and the node that they mean.
SEARCHES = {
    "kohya": "GraftTrainStart",
    "train sdxl": "GraftTrainStart",
    "sdxl train": "GraftTrainStart",
    "train flux": "GraftTrainStart",
    "flux train": "GraftTrainStart",
    "prodigy": "GraftOptimizer",
    "gradient checkpointing": "GraftOptimizer",
    "dpo": "GraftObjective",
    "validation": "TrainStep",
    "resume training": "GraftLoadState",
    "kontext": "GraftSamples",
    "image to video": "GraftSamples",
    "image folder": "GraftDataset",
    "captions": "GraftDataset",
    "dreambooth": "GraftTrainStart",
    "finetune": "GraftTrainStart",
    "train lora": "TrainStep",
    "locon": "GraftAdapter",
    "network dim": "GraftAdapter",
    "textual inversion": "GraftWords",
    "trigger word": "GraftWords",
    "adamw": "GraftOptimizer",
    "gradient accumulation": "GraftOptimizer",
    "min snr": "GraftObjective",
    "offset noise": "GraftObjective",
    "resume": "GraftLoadState",
    "power lora": "GraftLoadLoRAs",
    "multi lora": "GraftLoRAStack",
    "apply lora": "LoRAStackPatch",
    "lbw": "GraftLoRAEffect",
    "model soup": "EMAMerge",
    "ties": "GraftMergeLoRAs",
    "model difference": "GraftExtractLoRA",
    "leco": "GraftSlider",
    "vram": "GraftRecipe",
    "tome": "ApplyToDo",
    "token routing": "ApplyTREAD",
    "loss curve": "GraftLossPlot",
}


def node_settings(host, identifier):
    """{input: its options} of a node's widgets, from what the host tells the editor of it (/object_info)."""
    definition = json.loads(json.dumps(host.node(identifier).GET_NODE_INFO_V1()))
    inputs = {**definition["input"]["required"], **definition["input"].get("optional", {})}
    return {name: found[1] for name, found in inputs.items() if isinstance(found[0], list) or found[0] in WIDGETS}


@pytest.mark.parametrize("identifier", IDS)
def test_at_most_seven_settings_stand_open(host, identifier):
    settings = node_settings(host, identifier)
    assert all(options.get("advanced", True) is True for options in settings.values())
    shown = [name for name, options in settings.items() if "advanced" not in options]
    assert len(shown) <= MOST_OPEN, shown
    assert shown or not settings


def test_what_is_declared_advanced_arrives_as_advanced(host):
    folded = {
        (identifier, name)
        for identifier in IDS
        for name, options in node_settings(host, identifier).items()
        if options.get("advanced")
    }
    declared = {
        (schema.node_id, made.id)
        for schema in (node.define_schema() for node in NODES)
        for made in schema.inputs
        if made.extra_dict.get("advanced")
    }
    assert folded == declared
    assert len(folded) > 60 and ("GraftOptimizer", "weight_decay") in folded
    assert not folded & IN_BLUEPRINTS


def test_an_advanced_setting_keeps_what_else_is_said_of_it(host):
    options = node_settings(host, "GraftOptimizer")["clip_norm"]
    assert (options["default"], options["min"], options["max"], options["step"]) == (1.0, 0.0, 1000.0, 0.1)
    assert "kohya's max_grad_norm" in options["tooltip"]


@pytest.mark.parametrize("node", NODES, ids=IDS)
def test_no_id_is_one_of_an_input_and_of_an_output(node):
    """ComfyUI 0.3.64 refuses such a node; newer ones do not."""
    schema = node.define_schema()
    schema.finalize()
    assert not {entry.id for entry in schema.inputs} & {entry.id for entry in schema.outputs}


@pytest.mark.parametrize("node", NODES, ids=IDS)
def test_a_call_without_a_setting_takes_the_default_of_its_widget(node):
    """Workflows and scripts from before a setting give no value for it."""
    schema = node.define_schema()
    widgets = {made.id: made.default for made in schema.inputs if hasattr(made, "default")}
    if schema.is_input_list:
        own = (
            settings_of(node.settings_class) if node.settings_class else {}
        )  # of which a node takes the first in their lists
        widgets = {name: value if name in own else (value,) for name, value in widgets.items() if value is not None}
    called = inspect.signature(node.execute).parameters.values()
    defaults = {one.name: one.default for one in called if one.name in widgets and one.default is not one.empty}
    assert defaults == {name: widgets[name] for name in defaults}


RECORDED = json.loads(write_inputs.FILE.read_text(encoding="utf-8"))


def test_the_record_names_every_node():
    assert list(RECORDED) == IDS, "python -m graft_nodes.tests.nodes.write_inputs"


@pytest.mark.parametrize("identifier", IDS)
def test_what_workflows_know_of_a_node_is_as_recorded(host, identifier):
    """Old workflows hold ids, order and values of inputs, and leave defaults to the node."""
    found, recorded = write_inputs.of_node(host.node(identifier)), RECORDED[identifier]
    for name, (kind, settings) in recorded["inputs"].items():
        if kind == "COMBO" and "options" not in settings:  # names of files
            found["inputs"].get(name, [kind, {}])[1].pop("options", None)
    assert found == recorded, "only what is new may differ: python -m graft_nodes.tests.nodes.write_inputs"
    assert list(found["inputs"]) == list(recorded["inputs"])


def named_models(identifier):
    """The UNets and the transformers that the tooltip of a node's model names."""
    node = next(node for node in NODES if node.define_schema().node_id == identifier)
    tooltip = node.define_schema().inputs[0].tooltip
    return [
        names.split(", ") for names in re.fullmatch(r".*UNet \((.+)\) or a transformer \((.+)\)\.", tooltip).groups()
    ]


def titles(layout):
    return [one.title for one in FAMILIES if isinstance(one.token_layout, layout)]


def test_the_tooltips_name_the_models_whose_tokens_graft_can_reduce():
    assert named_models("ApplyToDo") == [titles(UNetLayout), titles(TokenLayout)]


def test_the_tooltip_names_the_models_whose_tokens_cannot_skip_blocks():
    node = next(node for node in NODES if node.define_schema().node_id == "ApplyTREAD")
    (named,) = re.fullmatch(r".*of any family but (.+)\.", node.define_schema().inputs[0].tooltip).groups()
    assert named == "ACE-Step 1 and Stable Cascade"
    assert [one.title for one in FAMILIES if isinstance(one.token_routing, Missing)] == ["Stable Cascade"]
    assert list(token_routing().refused) == ["ACEStepTransformer2DModel"]


@pytest.mark.parametrize("typed", SEARCHES)
def test_the_node_search_finds_a_node_by_what_people_call_it(host, typed):
    identifier = SEARCHES[typed]
    told = host.node(identifier).GET_NODE_INFO_V1()
    if "search_aliases" not in told:
        pytest.skip("this ComfyUI's nodes have no search words")
    assert typed in told["search_aliases"]


@pytest.mark.parametrize("node", NODES, ids=IDS)
def test_an_execute_that_another_pack_replaced_is_what_a_copy_of_the_class_runs(node, monkeypatch):
    """ComfyUI runs nodes and asks their validation on copies, which its versions make of the class's own attributes."""
    monkeypatch.setattr(node, "execute", classmethod(lambda cls, **values: values))
    copy = type("Copy", (node, *node.__bases__), dict(node.__dict__))
    assert copy.execute(anything="arrives") == {"anything": "arrives"}
    assert copy.__dict__.get("validate_inputs") is node.__dict__.get("validate_inputs")
