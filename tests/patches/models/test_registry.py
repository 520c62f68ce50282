"""The registry of model families: every record is complete, and no two families claim the same files or classes."""

import dataclasses
import pkgutil

import pytest
from graft_nodes.patches import models
from graft_nodes.patches.models import registry
from graft_nodes.patches.models.block_names import BlockNames
from graft_nodes.patches.models.diffusers_names import LayerNames
from graft_nodes.patches.models.family import Kohya, Missing, ModelFamily, ModelSpec, TrainingTargets
from graft_nodes.patches.models.recognition import Recognition, factors_of
from graft_nodes.patches.models.registry import recognize_lora
from graft_nodes.patches.models.routed_blocks import TokenRouting
from graft_nodes.patches.models.token_layout import TokenLayout, UNetLayout
from graft_nodes.training.recipes.published import PUBLISHED

FIELDS = {
    "recognition": Recognition,
    "modelspec": ModelSpec,
    "kohya": Kohya,
    "layer_names": LayerNames,
    "blocks": BlockNames,
    "token_layout": TokenLayout | UNetLayout,
    "token_routing": TokenRouting | UNetLayout,
    "training": TrainingTargets,
}
OPTIONAL = {"other_names", "name", "title", "examples", "weight_parts", "masked_text_alone", "expert_boundary"}
EVERY = pytest.mark.parametrize("family", list(registry.FAMILIES), ids=lambda family: family.name)
EXAMPLES = [
    pytest.param(family, example, id=f"{family.name}-{number}")
    for family in registry.FAMILIES
    for number, example in enumerate(family.examples)
]


def problems(family):
    """What is missing in a record, in words."""
    found = []
    for name, kind in FIELDS.items():
        value = getattr(family, name, None)
        if not isinstance(value, kind) and not (isinstance(value, Missing) and len(value.why) > 10):
            found.append(f"{name}: expected {kind}, or Missing with a reason")
    if not family.name or not family.title or not family.examples:
        found.append("name, title, examples: expected one each")
    return found


def test_the_test_knows_every_field():
    assert {field.name for field in dataclasses.fields(ModelFamily)} == FIELDS.keys() | OPTIONAL


@EVERY
def test_a_record_is_complete(family):
    assert problems(family) == []


def test_an_incomplete_record_is_found():
    """The contract itself: nothing, or no reason, is a problem."""
    flux = registry.FAMILIES.get("flux")
    for nothing in (None, Missing("")):
        assert len(problems(dataclasses.replace(flux, blocks=nothing))) == 1


def test_every_file_with_a_family_is_registered():
    in_files = set()
    for module in pkgutil.iter_modules(models.__path__):
        contents = vars(__import__(f"{models.__name__}.{module.name}", fromlist=["x"]))
        in_files |= {value.name for value in contents.values() if isinstance(value, ModelFamily)}
    assert in_files == {family.name for family in registry.FAMILIES}


def test_names_and_titles_are_of_one_family_each():
    for name in ("name", "title"):
        values = [getattr(family, name) for family in registry.FAMILIES]
        assert len(values) == len(set(values))


def test_recipes_are_of_families():
    """A recipe finds its published figures by the name of the model's family."""
    assert {family.name for family in registry.FAMILIES} >= set(PUBLISHED.names())


@pytest.mark.parametrize(("family", "layers"), EXAMPLES)
def test_a_family_recognizes_its_own_files(family, layers):
    recognized = recognize_lora(factors_of(layers).items())
    assert recognized is not None and recognized.name == family.name


def test_families_with_the_same_class_have_the_same_tokens():
    classes = {}
    for family in registry.FAMILIES:
        if isinstance(family.token_layout, TokenLayout):
            for name, tokens in family.token_layout.classes.items():
                assert classes.setdefault(name, tokens) is tokens, name


def test_families_with_the_same_class_call_their_blocks_in_the_same_way():
    classes = {}
    for family in registry.FAMILIES:
        if isinstance(family.token_routing, TokenRouting):
            for name, routed in family.token_routing.classes.items():
                assert classes.setdefault(name, routed) is routed, name
            assert all(len(why) > 10 for why in family.token_routing.refused.values())
            assert not classes.keys() & family.token_routing.refused.keys()
    assert registry.token_routing().classes == classes


def test_lists_of_block_weights_are_of_one_family_each():
    lists, presets, kinds = {}, {}, {}
    for names in registry.block_names():
        for length, blocks in names.weight_lists.items():
            assert lists.setdefault(length, blocks) is blocks and len(blocks[1]) == length
        for preset, weights in names.presets.items():
            assert presets.setdefault(preset, weights) is weights
        for block_list, kind in names.lists.items():
            assert kinds.setdefault(block_list, kind) == kind and kind in names.kinds


def test_lists_of_block_weights_are_those_of_the_help_page():
    """GraftLoRAStack.md names them by their length."""
    found = {
        length: title.split()[0]
        for names in registry.block_names()
        for length, (title, _) in names.weight_lists.items()
    }
    assert found == {17: "SD1.x", 26: "SD1.x", 12: "SDXL", 20: "SDXL", 57: "Flux", 58: "Flux", 61: "Flux"}


@EVERY
def test_parts_of_a_fused_layer_are_all_of_it(family):
    if isinstance(family.layer_names, Missing):
        pytest.skip(family.layer_names.why)
    for layers in family.examples:
        for layer, (rows, columns) in layers.items():
            path = layer.removeprefix("diffusion_model.")
            parts = family.layer_names.parts(path, rows, columns)
            assert sum(part.length for part in parts) == rows
            assert [part.start for part in parts] == [sum(p.length for p in parts[:i]) for i in range(len(parts))]


def test_a_name_is_registered_once():
    flux = registry.FAMILIES.get("flux")
    with pytest.raises(ValueError, match="already registered"):
        registry.FAMILIES.register(flux)


def test_a_family_is_gone_after_its_block():
    before = tuple(registry.FAMILIES)
    made_up = dataclasses.replace(before[0], name="made-up", title="Made up")
    with registry.FAMILIES.registered(made_up):
        assert tuple(registry.FAMILIES) == (made_up, *before)
    assert tuple(registry.FAMILIES) == before


def test_layer_names_are_those_of_all_families_with_their_other_names():
    found = registry.layer_names()
    others = [names for family in registry.FAMILIES for names in family.other_names]
    own = [family.layer_names for family in registry.FAMILIES if isinstance(family.layer_names, LayerNames)]
    assert len(others) > 4 and len(own) > 10
    assert all(names in found for names in (*others, *own))
