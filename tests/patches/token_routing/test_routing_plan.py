"""Which blocks tokens skip, what is refused, and what the report says of it."""

import pytest
from graft_nodes.patches.token_routing.report import report
from graft_nodes.patches.token_routing.routing_plan import plan_routing
from graft_nodes.patches.token_routing.settings import RoutingSettings
from torch import nn


def of_class(name, **modules):
    model = type(name, (nn.Module,), {})()
    for key, module in modules.items():
        setattr(model, key, module)
    return model


def layers(count):
    return nn.ModuleList([nn.Linear(1, 1) for _ in range(count)])


def test_blocks_of_two_lists_are_counted_one_after_the_other():
    model = of_class("Flux", double_blocks=layers(3), single_blocks=layers(5))
    plan = plan_routing(model, RoutingSettings(0.5, 2, -2))
    ((*span,),) = plan.spans(model)
    assert (plan.skipped, plan.total) == (range(2, 7), 8)
    assert [block for block, _ in span] == [model.double_blocks[2], *model.single_blocks[:4]]
    assert [called.blocks for _, called in span] == ["double_blocks", *["single_blocks"] * 4]


def test_a_list_may_be_inside_of_another_module():
    decoder = nn.Module()
    decoder.layers = layers(6)
    model = of_class("AceStepConditionGenerationModel", decoder=decoder)
    settings = RoutingSettings(0.5)
    plan = plan_routing(model, settings)
    assert [block for block, _ in plan.spans(model)[0]] == list(decoder.layers[2:5])
    assert report(settings, plan, False).startswith(
        "In each training step, a random 50% of the sound's tokens skips blocks 2 to 4 of 0 to 5.\n"
        "That is 25% of the blocks' work on sound tokens"
    )


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "ACEStepTransformer2DModel",
            "Apply TREAD does not work on ACEStepTransformer2DModel: its feed-forward layers mix neighboring moments,"
            " so none can be left out",
        ),
        ("SomethingNew", r"does not know how SomethingNew calls its blocks.*these transformers: .*Flux, .*WanModel"),
    ],
)
def test_other_classes_are_refused_by_name(name, says):
    with pytest.raises(TypeError, match=says):
        plan_routing(of_class(name), RoutingSettings(0.5))
